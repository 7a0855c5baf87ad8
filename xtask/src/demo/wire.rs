//! A log of what a rank's transport moves, to be looked at afterwards: which layer, from when to when.
//!
//! While bytes move only the clock is read; what belongs to which layer is found out when the log is asked for. Times are of the
//! host's monotonic clock, which all processes of a demo share.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvferry_geometry::batch::{BoundedBatch, Part};
use kvferry_geometry::layout::View;
use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::units::RegionId;
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, OpId, Outcome, PeerId, PeerInfo, Region,
    RegisterError, RevokeError, RevokeScope, Submission, SubmitError, Transport, UnknownOp, UnknownPeer,
};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Bytes of one item that were moved by one operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Moved {
    pub(crate) item: u32,
    pub(crate) bytes: u64,
    /// When the operation was posted, and when its end was seen, in nanoseconds.
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// The host's monotonic clock, in nanoseconds.
pub(crate) fn clock() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or_default())
}

#[derive(Debug)]
struct Posted {
    op: OpId,
    batch: Arc<BoundedBatch>,
    from: u64,
    /// When it was done.
    to: Option<u64>,
}

/// Clones share what is logged.
#[derive(Clone, Debug, Default)]
pub(crate) struct WireLog(Arc<Mutex<Vec<Posted>>>);

impl WireLog {
    fn with<T>(&self, f: impl FnOnce(&mut Vec<Posted>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Everything that was moved since it was last asked; `rank` says which memory is which item's.
    pub(crate) fn take(&self, rank: &RankManifest) -> Vec<Moved> {
        let done = self.with(|posted| posted.extract_if(.., |p| p.to.is_some()).collect::<Vec<_>>());
        let mut out: Vec<Moved> = Vec::new();
        for Posted { batch, from, to, .. } in done {
            let to = to.unwrap_or(from);
            let first = out.len();
            for section in batch.batch().sections() {
                for base in section.bases.iter() {
                    for part in &section.parts {
                        let Some(item) = item_at(rank, base.src_region, base.src_offset + part.src_add) else {
                            continue;
                        };
                        match out[first..].iter_mut().find(|m| m.item == item) {
                            Some(moved) => moved.bytes += bytes_of(part),
                            None => out.push(Moved { item, bytes: bytes_of(part), from, to }),
                        }
                    }
                }
            }
        }
        out
    }
}

fn bytes_of(part: &Part) -> u64 {
    part.pair_count() * part.nest.runs() * part.nest.run
}

/// The item that begins last before an offset of a region's first block.
fn item_at(rank: &RankManifest, region: RegionId, offset: u64) -> Option<u32> {
    let at = |view: &View| match view {
        View::Paged(v) => (v.region, v.offset.get()),
        View::State(v) => (v.region, v.offset.get()),
    };
    let views = (0u32..).zip(&rank.layout.views).filter_map(|(item, view)| Some((item, at(view.as_ref()?))));
    let before = views.filter(|(_, (of, begins))| *of == region && *begins <= offset);
    before.max_by_key(|(_, (_, begins))| *begins).map(|(item, _)| item)
}

/// A transport whose operations are logged.
pub(crate) struct Logged {
    inner: Box<dyn Transport>,
    log: WireLog,
}

impl Logged {
    pub(crate) fn new(inner: Box<dyn Transport>, log: WireLog) -> Self {
        Self { inner, log }
    }
}

impl Transport for Logged {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn endpoint(&self) -> EndpointId {
        self.inner.endpoint()
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.inner.register(region)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.inner.deregister(region)
    }

    fn blob(&self) -> Vec<u8> {
        self.inner.blob()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        self.inner.connect(blob)
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.inner.disconnect(peer)
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.inner.peer(peer)
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let batch = submission.batch.clone();
        let from = clock();
        let op = self.inner.submit(submission)?;
        self.log.with(|posted| posted.push(Posted { op, batch, from, to: None }));
        Ok(op)
    }

    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        self.inner.cancel(op)
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        self.inner.revoke(scope)
    }

    fn step(&mut self, now: Duration) -> Option<Duration> {
        self.inner.step(now)
    }

    fn next_event(&mut self) -> Option<Event> {
        let event = self.inner.next_event()?;
        if let Event::Completed { op, outcome, .. } = &event {
            let to = clock();
            self.log.with(|posted| match (outcome, posted.iter().rposition(|p| p.op == *op && p.to.is_none())) {
                (Outcome::Done(_), Some(at)) => posted[at].to = Some(to),
                (_, Some(at)) => drop(posted.remove(at)),
                (_, None) => {}
            });
        }
        Some(event)
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inner.wake_fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.wait(timeout)
    }
}
