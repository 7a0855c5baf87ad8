//! An endpoint of the simulated data plane.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::RegionId;
use kvferry_transport::admit::admit;
use kvferry_transport::blob::Blob;
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, Lane, LaneKind, OpId, OpKind, PeerId, PeerInfo,
    Region, RegisterError, Revocation, RevokeError, RevokeScope, Submission, SubmitError, TransferError, Transport,
    UnknownOp, UnknownPeer,
};

use crate::fabric::{Conn, Due, Fabric, Link, Op, Owner, Stage};
use crate::faults::FaultKind;

/// The backend's name.
pub const BACKEND: &str = "sim";

/// A rank's endpoint of a [`Fabric`]. Its time is the fabric's, whatever its driver says that it is.
#[derive(Debug)]
pub struct SimTransport {
    fabric: Fabric,
    node: usize,
    id: EndpointId,
    capabilities: Capabilities,
    events: VecDeque<Event>,
    /// Never readable: who drives endpoints of a fabric knows which of them have something to take up.
    quiet: Arc<OwnedFd>,
}

impl SimTransport {
    /// An endpoint of a rank. `quiet` is a file that is never readable; one serves all endpoints.
    #[must_use]
    pub fn new(fabric: &Fabric, owner: Owner, id: EndpointId, quiet: Arc<OwnedFd>) -> Self {
        let node = fabric.lock().add(owner, id);
        let mut capabilities = Capabilities::host(BACKEND);
        capabilities.revocation = Revocation::Excludes;
        Self { fabric: fabric.clone(), node, id, capabilities, events: VecDeque::new(), quiet }
    }
}

impl Transport for SimTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn endpoint(&self) -> EndpointId {
        self.id
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        let mut state = self.fabric.lock();
        match state.nodes.get_mut(self.node) {
            Some(node) => node.table.register(region, &self.capabilities),
            None => Err(RegisterError::Empty),
        }
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        let mut state = self.fabric.lock();
        let named = |op: &&Op| op.node == self.node && op.named.ours.contains(&region) && op.stage != Stage::Told;
        let busy = state.ops.values().filter(named).count();
        let Some(node) = state.nodes.get_mut(self.node) else { return Err(DeregisterError::Unknown { region }) };
        let gone = node.table.deregister(region, busy)?;
        node.revoked.remove(&region);
        drop(state);
        drop(gone);
        Ok(())
    }

    fn blob(&self) -> Vec<u8> {
        let state = self.fabric.lock();
        let (generation, regions) =
            state.nodes.get(self.node).map_or((0, Vec::new()), |n| (n.table.generation(), n.table.lens()));
        Blob { backend: BACKEND.to_owned(), endpoint: self.id, generation, regions, lane: Vec::new() }.encode()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let blob = Blob::decode(blob)?;
        if blob.backend != BACKEND {
            return Err(ConnectError::WrongBackend { expected: BACKEND, got: blob.backend });
        }
        if !blob.lane.is_empty() {
            let reason = format!("{} bytes where there are none", blob.lane.len());
            return Err(ConnectError::BadLane { backend: BACKEND, reason });
        }
        let endpoint = blob.endpoint;
        if endpoint == self.id {
            return Err(ConnectError::Itself);
        }
        let mut state = self.fabric.lock();
        let unreachable = || ConnectError::Unreachable { endpoint, reason: "there never was such an endpoint".into() };
        let to = state.find(endpoint).ok_or_else(unreachable)?;
        let node = state.nodes.get_mut(self.node).ok_or_else(unreachable)?;
        if let Some((&peer, _)) = node.peers.iter().find(|(_, c)| c.info.endpoint == endpoint) {
            return Err(ConnectError::AlreadyConnected { endpoint, peer });
        }
        let peer = PeerId::new(node.next_peer);
        node.next_peer += 1;
        let detail = "simulated".to_owned();
        let lane = Lane { kind: LaneKind::Rdma, transports: Vec::new(), detail, measured: None };
        let info = PeerInfo { endpoint, regions: blob.regions.into(), lane };
        let conn = Conn { info, node: to, generation: blob.generation, link: Link::New, waiting: Vec::new() };
        node.peers.insert(peer, conn);
        let refused = state.goes_wrong(self.node, FaultKind::LaneFails);
        let after = state.config.lane;
        let after = state.draw(self.node, after);
        state.put(after, Due::Lane { node: self.node, peer, refused });
        Ok(peer)
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        let mut state = self.fabric.lock();
        if !state.nodes.get(self.node).is_some_and(|n| n.peers.contains_key(&peer)) {
            return Err(UnknownPeer(peer));
        }
        self.events.retain(|event| !event.is_of_connection(peer));
        if let Some(node) = state.nodes.get_mut(self.node) {
            node.arrived.retain(|event| !event.is_of_connection(peer));
        }
        state.end_all(self.node, peer, &TransferError::Disconnected);
        if let Some(node) = state.nodes.get_mut(self.node) {
            node.peers.remove(&peer);
        }
        Ok(())
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        let state = self.fabric.lock();
        let conn = state.nodes.get(self.node).and_then(|n| n.peers.get(&peer));
        conn.map(|c| c.info.clone()).ok_or(UnknownPeer(peer))
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let peer = submission.peer;
        let mut state = self.fabric.lock();
        let node = state.nodes.get_mut(self.node).filter(|n| n.alive);
        let node = node.ok_or_else(|| SubmitError::Refused { reason: "this endpoint was killed".to_owned() })?;
        let conn = node.peers.get(&peer).ok_or(SubmitError::UnknownPeer { peer })?;
        if let Link::Lost(cause) = &conn.link {
            return Err(SubmitError::PeerLost { peer, cause: cause.clone() });
        }
        let ours = |id| node.table.len_of(id);
        let named = admit(&submission, &self.capabilities, node.ops.len(), ours, &conn.info)?;
        let (peer_node, generation) = (conn.node, conn.generation);
        let id = OpId::new(node.next_op);
        node.next_op += 1;
        let Submission { kind, batch, notify, .. } = submission;
        let total = batch.bytes().get();
        state.accept(Op::new(self.node, id, peer, peer_node, generation, (kind, named, batch, notify), total));
        Ok(id)
    }

    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        let mut state = self.fabric.lock();
        let key = state.nodes.get(self.node).and_then(|n| n.ops.get(&op).copied()).ok_or(UnknownOp(op))?;
        state.cancel(key);
        Ok(())
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        let mut state = self.fabric.lock();
        let Some(node) = state.nodes.get_mut(self.node) else { return Ok(()) };
        match scope {
            RevokeScope::Region(region) if node.table.get(region).is_none() => {
                return Err(RevokeError::Unknown { region });
            }
            RevokeScope::Region(region) => node.revoked.insert(region),
            RevokeScope::Endpoint(endpoint) => node.banned.insert(endpoint),
        };
        Ok(())
    }

    fn step(&mut self, _: Duration) -> Option<Duration> {
        if let Some(node) = self.fabric.lock().nodes.get_mut(self.node) {
            self.events.append(&mut node.arrived);
        }
        None
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.quiet.as_fd()
    }

    fn wait(&mut self, _: Option<Duration>) -> bool {
        !self.events.is_empty()
    }
}

impl Drop for SimTransport {
    fn drop(&mut self) {
        self.fabric.kill(self.id, false);
    }
}

/// What is asked for, so that the constructor reads as one sentence.
type Asked = (OpKind, kvferry_transport::admit::Named, Arc<kvferry_geometry::batch::BoundedBatch>, Option<Vec<u8>>);

impl Op {
    fn new(
        node: usize,
        id: OpId,
        peer: PeerId,
        peer_node: usize,
        generation: u64,
        (kind, named, batch, notify): Asked,
        total: u64,
    ) -> Self {
        Self {
            node,
            id,
            peer,
            peer_node,
            generation,
            kind,
            named,
            batch,
            notify,
            copier: None,
            moved: 0,
            total,
            strip: total,
            stage: Stage::Moving,
            fate: crate::fabric::Fate::Well,
            written: Vec::new(),
            sent: Vec::new(),
            began: Duration::ZERO,
            stalled: None,
        }
    }
}
