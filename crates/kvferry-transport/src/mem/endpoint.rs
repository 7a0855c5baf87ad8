//! The endpoint of the reference backend.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::RegionId;

use super::network::{MemNetwork, Notice, Shared};
use super::op::{Op, Progress, Stage, World};
use crate::admit::admit;
use crate::blob::Blob;
use crate::error::{
    ConnectError, DeregisterError, LostCause, RegisterError, RevokeError, SubmitError, TransferError, UnknownOp,
    UnknownPeer,
};
use crate::region::Region;
use crate::rng::Rng;
use crate::transport::Transport;
use crate::types::{
    Capabilities, EndpointId, Event, Lane, LaneKind, OpId, Outcome, PeerId, PeerInfo, Revocation, RevokeScope, Stats,
    Submission,
};

/// An endpoint of a [`MemNetwork`].
#[derive(Debug)]
pub struct MemTransport {
    network: MemNetwork,
    shared: Arc<Shared>,
    capabilities: Capabilities,
    rng: Rng,
    peers: BTreeMap<PeerId, Conn>,
    ops: BTreeMap<OpId, Op>,
    /// Notifications under way to us, with the time at which they arrive.
    notices: Vec<(Duration, Notice)>,
    events: VecDeque<Event>,
    next_peer: u64,
    next_op: u64,
}

/// A connection.
#[derive(Debug)]
struct Conn {
    info: PeerInfo,
    shared: Arc<Shared>,
    generation: u64,
    link: Link,
}

#[derive(Clone, Debug)]
enum Link {
    /// `Connected` was not told yet.
    New,
    Up,
    Lost(LostCause),
}

impl MemTransport {
    pub(super) fn new(network: MemNetwork, shared: Arc<Shared>, rng: Rng) -> Self {
        let capabilities = Capabilities { revocation: Revocation::Excludes, ..Capabilities::host(network.name()) };
        Self {
            network,
            shared,
            capabilities,
            rng,
            peers: BTreeMap::new(),
            ops: BTreeMap::new(),
            notices: Vec::new(),
            events: VecDeque::new(),
            next_peer: 0,
            next_op: 0,
        }
    }

    /// Operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ops.len()
    }

    /// Ends an operation; the second end of one is none.
    fn end(&mut self, op: OpId, outcome: Outcome) {
        if let Some(ended) = self.ops.remove(&op) {
            self.events.push_back(Event::Completed { op, peer: ended.peer, outcome });
        }
    }

    /// Ends all operations of a peer.
    fn end_all(&mut self, peer: PeerId, why: &TransferError) {
        let of_peer: Vec<_> = self.ops.iter().filter(|(_, op)| op.peer == peer).map(|(id, _)| *id).collect();
        for id in of_peer {
            if let Some(outcome) = self.ops.get(&id).map(|op| op.stop(why.clone())) {
                self.end(id, outcome);
            }
        }
    }

    fn step_peers(&mut self) {
        let mut lost = Vec::new();
        for (&peer, conn) in &mut self.peers {
            match conn.link {
                Link::Lost(_) => {}
                Link::New | Link::Up if !conn.shared.read().alive => {
                    conn.link = Link::Lost(LostCause::Gone);
                    lost.push(peer);
                }
                Link::New => {
                    conn.link = Link::Up;
                    self.events.push_back(Event::Connected { peer });
                }
                Link::Up => {}
            }
        }
        for peer in lost {
            self.end_all(peer, &TransferError::PeerLost(LostCause::Gone));
            self.events.push_back(Event::PeerLost { peer, cause: LostCause::Gone });
        }
    }

    fn step_ops(&mut self, now: Duration) -> Option<Duration> {
        let faults = self.shared.faults();
        let mut ids: Vec<_> = self.ops.keys().copied().collect();
        if faults.shuffle {
            self.rng.shuffle(&mut ids);
        }
        let mut next: Option<Duration> = None;
        for id in ids {
            let Some(op) = self.ops.get_mut(&id) else { continue };
            let Some(conn) = self.peers.get(&op.peer) else { continue };
            let world =
                World { now, ours: &self.shared, theirs: &conn.shared, generation: conn.generation, faults: &faults };
            let index = op.index;
            match op.step(&world, &mut self.rng) {
                Progress::Ended(outcome) => {
                    if faults.duplicate_completion.contains(&index) {
                        self.end(id, outcome.clone());
                    }
                    self.end(id, outcome);
                }
                Progress::Again(at) => next = earlier(next, at),
                Progress::Stuck => {}
            }
        }
        next
    }

    fn step_notices(&mut self, now: Duration) -> Option<Duration> {
        self.notices.extend(self.shared.take_notices().into_iter().map(|n| (now + n.delay, n)));
        // Stable: what is due together arrives in the order it was sent.
        self.notices.sort_by_key(|(due, _)| *due);
        let due = self.notices.partition_point(|(due, _)| *due <= now);
        let arrived = self.notices.drain(..due);
        self.events.extend(arrived.map(|(_, n)| Event::Notification { from: n.from, payload: n.payload }));
        self.notices.first().map(|(due, _)| *due)
    }
}

impl Transport for MemTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn endpoint(&self) -> EndpointId {
        self.shared.id
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        let mut access = self.shared.write();
        if !access.alive {
            let reason = "this endpoint was killed".to_owned();
            return Err(RegisterError::Refused { backend: self.capabilities.backend, len: region.len(), reason });
        }
        access.table.register(region, &self.capabilities)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        let busy = self.ops.values().filter(|op| op.named.ours.binary_search(&region).is_ok()).count();
        let mut access = self.shared.write();
        let gone = access.table.deregister(region, busy)?;
        access.revoked.remove(&region);
        drop(access);
        drop(gone);
        Ok(())
    }

    fn blob(&self) -> Vec<u8> {
        let access = self.shared.read();
        Blob {
            backend: self.capabilities.backend.to_owned(),
            endpoint: self.shared.id,
            generation: access.table.generation(),
            regions: access.table.lens(),
            lane: Vec::new(),
        }
        .encode()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let blob = Blob::decode(blob)?;
        let backend = self.capabilities.backend;
        if blob.backend != backend {
            return Err(ConnectError::WrongBackend { expected: backend, got: blob.backend });
        }
        if !blob.lane.is_empty() {
            let reason = format!("{} bytes where there are none", blob.lane.len());
            return Err(ConnectError::BadLane { backend, reason });
        }
        let endpoint = blob.endpoint;
        if endpoint == self.shared.id {
            return Err(ConnectError::Itself);
        }
        if let Some((&peer, _)) = self.peers.iter().find(|(_, c)| c.info.endpoint == endpoint) {
            return Err(ConnectError::AlreadyConnected { endpoint, peer });
        }
        let Some(shared) = self.network.find(endpoint) else {
            let reason = "there is no such endpoint in this network".to_owned();
            return Err(ConnectError::Unreachable { endpoint, reason });
        };
        let peer = PeerId::new(self.next_peer);
        self.next_peer += 1;
        let detail = "copy inside one process".to_owned();
        let lane = Lane { kind: LaneKind::InProcess, transports: Vec::new(), detail, measured: None };
        let info = PeerInfo { endpoint, regions: blob.regions.into(), lane };
        self.peers.insert(peer, Conn { info, shared, generation: blob.generation, link: Link::New });
        Ok(peer)
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        if !self.peers.contains_key(&peer) {
            return Err(UnknownPeer(peer));
        }
        self.events.retain(|event| !event.is_of_connection(peer));
        self.end_all(peer, &TransferError::Disconnected);
        self.peers.remove(&peer);
        Ok(())
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.peers.get(&peer).map(|conn| conn.info.clone()).ok_or(UnknownPeer(peer))
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let peer = submission.peer;
        let conn = self.peers.get(&peer).ok_or(SubmitError::UnknownPeer { peer })?;
        if let Link::Lost(cause) = &conn.link {
            return Err(SubmitError::PeerLost { peer, cause: cause.clone() });
        }
        let access = self.shared.read();
        if !access.alive {
            return Err(SubmitError::Refused { reason: "this endpoint was killed".to_owned() });
        }
        let ours = |id| access.table.len_of(id);
        let named = admit(&submission, &self.capabilities, self.ops.len(), ours, &conn.info)?;
        drop(access);
        let index = self.next_op;
        self.next_op += 1;
        let Submission { kind, batch, notify, .. } = submission;
        let op = Op {
            index,
            peer,
            kind,
            named,
            batch,
            notify,
            cancelled: false,
            stage: Stage::Accepted,
            moved: Stats::default(),
            copier: None,
        };
        self.ops.insert(OpId::new(index), op);
        Ok(OpId::new(index))
    }

    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        self.ops.get_mut(&op).ok_or(UnknownOp(op))?.cancelled = true;
        Ok(())
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        let mut access = self.shared.write();
        match scope {
            RevokeScope::Region(region) if access.table.get(region).is_none() => {
                return Err(RevokeError::Unknown { region });
            }
            RevokeScope::Region(region) => access.revoked.insert(region),
            RevokeScope::Endpoint(endpoint) => access.banned.insert(endpoint),
        };
        Ok(())
    }

    fn step(&mut self, now: Duration) -> Option<Duration> {
        self.shared.signal.clear();
        if !self.shared.read().alive {
            return None;
        }
        self.step_peers();
        let ops = self.step_ops(now);
        let notices = self.step_notices(now);
        match (ops, notices) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.signal.fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        !self.events.is_empty() || self.shared.signal.wait(timeout)
    }
}

impl Drop for MemTransport {
    fn drop(&mut self) {
        self.network.kill(self.shared.id);
    }
}

fn earlier(a: Option<Duration>, b: Duration) -> Option<Duration> {
    Some(a.map_or(b, |a| a.min(b)))
}
