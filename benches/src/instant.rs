//! A transport that moves nothing and is done at once: what is left is what everything else costs. Between any two processes.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use kvferry_geometry::units::RegionId;
use kvferry_transport::blob::Blob;
use kvferry_transport::table::RegionTable;
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, Lane, LaneKind, OpId, Outcome, PeerId, PeerInfo,
    Region, RegisterError, RevokeError, RevokeScope, Stats, Submission, SubmitError, Transport, UnknownOp, UnknownPeer,
};
use rustix::event::EventfdFlags;

/// See the module's text.
#[derive(Debug)]
pub struct Instant {
    capabilities: Capabilities,
    endpoint: EndpointId,
    regions: RegionTable,
    peers: BTreeMap<PeerId, PeerInfo>,
    events: VecDeque<Event>,
    wake: OwnedFd,
    last: u64,
}

impl Instant {
    /// An endpoint with this name.
    ///
    /// # Panics
    /// If the system gives no event descriptor.
    #[must_use]
    pub fn new(name: u128) -> Self {
        Self {
            capabilities: Capabilities::host("instant"),
            endpoint: EndpointId::new(name.to_le_bytes()),
            regions: RegionTable::new(),
            peers: BTreeMap::new(),
            events: VecDeque::new(),
            wake: rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("a descriptor"),
            last: 0,
        }
    }

    fn push(&mut self, event: Event) {
        if self.events.is_empty() {
            // Readable until all was taken.
            let _ = rustix::io::write(&self.wake, &1u64.to_le_bytes());
        }
        self.events.push_back(event);
    }
}

impl Transport for Instant {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn endpoint(&self) -> EndpointId {
        self.endpoint
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.regions.register(region, &self.capabilities)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.regions.deregister(region, 0).map(drop)
    }

    fn blob(&self) -> Vec<u8> {
        let (regions, generation) = (self.regions.lens(), self.regions.generation());
        Blob { backend: "instant".into(), endpoint: self.endpoint, generation, regions, lane: Vec::new() }.encode()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let blob = Blob::decode(blob)?;
        self.last += 1;
        let peer = PeerId::new(self.last);
        let lane = Lane { kind: LaneKind::InProcess, transports: Vec::new(), detail: String::new(), measured: None };
        self.peers.insert(peer, PeerInfo { endpoint: blob.endpoint, regions: blob.regions.into(), lane });
        self.push(Event::Connected { peer });
        Ok(peer)
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.peers.remove(&peer).map(drop).ok_or(UnknownPeer(peer))
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.peers.get(&peer).cloned().ok_or(UnknownPeer(peer))
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        self.last += 1;
        let (op, peer) = (OpId::new(self.last), submission.peer);
        let stats = Stats { bytes: submission.batch.bytes(), descriptors: 0 };
        self.push(Event::Completed { op, peer, outcome: Outcome::Done(stats) });
        Ok(op)
    }

    fn cancel(&mut self, _: OpId) -> Result<(), UnknownOp> {
        Ok(())
    }

    fn revoke(&mut self, _: RevokeScope) -> Result<(), RevokeError> {
        Err(RevokeError::Unsupported { backend: "instant" })
    }

    fn step(&mut self, _: Duration) -> Option<Duration> {
        None
    }

    fn next_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if event.is_some() && self.events.is_empty() {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        event
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn wait(&mut self, _: Option<Duration>) -> bool {
        !self.events.is_empty()
    }
}
