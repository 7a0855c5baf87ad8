//! A transport that is counted: a wrapper that is a transport.
//!
//! What passes is told to a [`Sink`]; [`Counters`] is one that adds up for each peer. Nothing is changed.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RegionId};

use crate::error::{ConnectError, DeregisterError, RegisterError, RevokeError, SubmitError, UnknownOp, UnknownPeer};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Capabilities, EndpointId, Event, OpId, OpKind, Outcome, PeerId, PeerInfo, RevokeScope, Submission};

/// Something that passed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Observation<'a> {
    /// An operation was accepted.
    Posted {
        /// Its id.
        op: OpId,
        /// With whom.
        peer: PeerId,
        /// Which way.
        kind: OpKind,
        /// Bytes of its batch.
        bytes: Bytes,
    },
    /// A submission was refused.
    Refused {
        /// With whom.
        peer: PeerId,
        /// Why.
        error: &'a SubmitError,
    },
    /// An event was given out.
    Event(&'a Event),
}

/// Where observations go. Called on the thread that drives the transport: be quick.
pub trait Sink: Send {
    /// Takes one.
    fn observe(&mut self, what: Observation<'_>);
}

/// What was counted, of one peer or in all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Operations accepted.
    pub posted: u64,
    /// Submissions refused.
    pub refused: u64,
    /// Operations done.
    pub done: u64,
    /// Operations failed.
    pub failed: u64,
    /// Operations in doubt.
    pub in_doubt: u64,
    /// Bytes moved by operations that are done.
    pub bytes: u64,
    /// Contiguous pieces that they were moved in.
    pub descriptors: u64,
}

impl Counts {
    /// Operations that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.posted - self.done - self.failed - self.in_doubt
    }
}

/// A sink that adds up. Cheap to clone; clones share the numbers.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    total: Counts,
    /// Of connections that stand, or that broke and were not yet left.
    peers: BTreeMap<PeerId, Counts>,
    notifications: u64,
    peers_lost: u64,
}

impl Counters {
    /// All zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Over all peers.
    #[must_use]
    pub fn total(&self) -> Counts {
        self.lock().total
    }

    /// Of one peer; all zero if nothing passed.
    #[must_use]
    pub fn peer(&self, peer: PeerId) -> Counts {
        self.lock().peers.get(&peer).copied().unwrap_or_default()
    }

    /// Forgets a peer's own counts; the total keeps them.
    pub fn forget(&self, peer: PeerId) {
        self.lock().peers.remove(&peer);
    }

    /// Notifications received.
    #[must_use]
    pub fn notifications(&self) -> u64 {
        self.lock().notifications
    }

    /// Peers lost.
    #[must_use]
    pub fn peers_lost(&self) -> u64 {
        self.lock().peers_lost
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink for Counters {
    fn observe(&mut self, what: Observation<'_>) {
        let mut state = self.lock();
        match what {
            Observation::Posted { peer, .. } => state.add(peer, |c| c.posted += 1),
            Observation::Refused { peer, .. } => state.add(peer, |c| c.refused += 1),
            Observation::Event(Event::Completed { peer, outcome, .. }) => state.add(*peer, |c| match outcome {
                Outcome::Done(stats) => {
                    c.done += 1;
                    c.bytes += stats.bytes.get();
                    c.descriptors += stats.descriptors;
                }
                Outcome::Failed(_) => c.failed += 1,
                Outcome::InDoubt(_) => c.in_doubt += 1,
            }),
            Observation::Event(Event::Notification { .. }) => state.notifications += 1,
            Observation::Event(Event::PeerLost { .. }) => state.peers_lost += 1,
            Observation::Event(Event::Connected { .. }) => {}
        }
    }
}

impl State {
    fn add(&mut self, peer: PeerId, change: impl Fn(&mut Counts)) {
        change(&mut self.total);
        change(self.peers.entry(peer).or_default());
    }
}

/// A transport that is counted.
#[derive(Debug)]
pub struct Observed<T, S> {
    inner: T,
    sink: S,
}

impl<T: Transport, S: Sink> Observed<T, S> {
    /// Tells `sink` what passes.
    #[must_use]
    pub fn new(inner: T, sink: S) -> Self {
        Self { inner, sink }
    }
}

impl<T: Transport, S: Sink> Transport for Observed<T, S> {
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
        let (peer, kind, bytes) = (submission.peer, submission.kind, submission.batch.bytes());
        let result = self.inner.submit(submission);
        match &result {
            Ok(op) => self.sink.observe(Observation::Posted { op: *op, peer, kind, bytes }),
            Err(error) => self.sink.observe(Observation::Refused { peer, error }),
        }
        result
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
        self.sink.observe(Observation::Event(&event));
        Some(event)
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inner.wake_fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.wait(timeout)
    }
}
