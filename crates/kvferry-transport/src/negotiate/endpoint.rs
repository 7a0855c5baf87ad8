//! The endpoint over several backends.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::RegionId;

use super::offer::{self, Offer};
use super::wake::Wake;
use super::{ANY, MAX_BACKENDS, NegotiateError};
use crate::blob::Blob;
use crate::error::{ConnectError, DeregisterError, RegisterError, RevokeError, SubmitError, UnknownOp, UnknownPeer};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{
    Capabilities, EndpointId, Event, OpId, OpKind, PeerId, PeerInfo, Revocation, RevokeScope, Submission,
};

/// Several backends as one. See the [module's text](super).
pub struct Negotiated {
    backends: Vec<Box<dyn Transport>>,
    capabilities: Capabilities,
    endpoint: EndpointId,
    /// `None` for one backend: that one's descriptor does.
    wake: Option<Wake>,
    peers: BTreeMap<PeerId, Conn>,
    /// Operations that have not ended: whose regions may not go.
    open: HashMap<OpId, (OpKind, Arc<BoundedBatch>)>,
    events: VecDeque<Event>,
    /// Registrations that stand.
    registered: usize,
    ids: Ids,
}

/// Whether the backends agree on the next region id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ids {
    Agree,
    /// Not until nothing is registered, where all begin at 0 again.
    DifferUntilEmpty,
    /// One of them keeps a region that the others gave up.
    DifferForGood,
}

struct Conn {
    endpoint: EndpointId,
    /// Why preferred backends that both have were passed over.
    passed: Vec<String>,
}

impl fmt::Debug for Negotiated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Negotiated")
            .field("endpoint", &self.endpoint)
            .field("backends", &self.backends().collect::<Vec<_>>())
            .field("peers", &self.peers.len())
            .field("operations", &self.open.len())
            .finish_non_exhaustive()
    }
}

impl Negotiated {
    /// One transport of several, in order of preference. They must have the same endpoint id, and nothing registered.
    ///
    /// # Errors
    /// What keeps them from being one: see [`NegotiateError`].
    pub fn new(backends: Vec<Box<dyn Transport>>) -> Result<Self, NegotiateError> {
        if backends.len() > MAX_BACKENDS {
            return Err(NegotiateError::Count { got: backends.len() });
        }
        let first = backends.first().ok_or(NegotiateError::Count { got: 0 })?;
        let (endpoint, first_name) = (first.endpoint(), first.capabilities().backend);
        for (index, backend) in backends.iter().enumerate() {
            let name = backend.capabilities().backend;
            if name == ANY {
                return Err(NegotiateError::Nested);
            }
            if backends.iter().take(index).any(|b| b.capabilities().backend == name) {
                return Err(NegotiateError::Twice { name });
            }
            if backend.endpoint() != endpoint {
                let (first_id, second_id) = (endpoint, backend.endpoint());
                return Err(NegotiateError::Endpoints { first: first_name, first_id, second: name, second_id });
            }
            let blob = Blob::decode(&backend.blob()).map_err(|reason| NegotiateError::Frame { name, reason })?;
            if !blob.regions.is_empty() {
                return Err(NegotiateError::Registered { name, regions: blob.regions.len() });
            }
        }
        let wake = match backends.len() {
            1 => None,
            _ => Some(Wake::new(backends.iter().map(|b| b.wake_fd())).map_err(|errno| NegotiateError::System {
                what: "making one epoll descriptor of the backends'",
                reason: errno.to_string(),
            })?),
        };
        Ok(Self {
            capabilities: common(&backends, first.capabilities().clone())?,
            endpoint,
            wake,
            backends,
            peers: BTreeMap::new(),
            open: HashMap::new(),
            events: VecDeque::new(),
            registered: 0,
            ids: Ids::Agree,
        })
    }

    /// The backends' names, in order of preference.
    pub fn backends(&self) -> impl Iterator<Item = &'static str> {
        self.backends.iter().map(|b| b.capabilities().backend)
    }

    /// The backend that carries a connection.
    ///
    /// # Errors
    /// If there is no such connection.
    pub fn backend_of(&self, peer: PeerId) -> Result<&'static str, UnknownPeer> {
        self.peers.get(&peer).ok_or(UnknownPeer(peer))?;
        Ok(self.backends[self.index(peer.get())].capabilities().backend)
    }

    /// Why backends that both sides have, and that we prefer to the one which carries a connection, don't carry it.
    ///
    /// # Errors
    /// If there is no such connection.
    pub fn passed(&self, peer: PeerId) -> Result<&[String], UnknownPeer> {
        self.peers.get(&peer).map(|conn| conn.passed.as_slice()).ok_or(UnknownPeer(peer))
    }

    /// The backend that an outer id belongs to.
    fn index(&self, outer: u64) -> usize {
        // Smaller than the number of backends.
        usize::try_from(outer % self.backends.len() as u64).unwrap_or(0)
    }

    fn inner(&self, outer: u64) -> u64 {
        outer / self.backends.len() as u64
    }

    fn inner_peer(&self, peer: PeerId) -> (usize, PeerId) {
        (self.index(peer.get()), PeerId::new(self.inner(peer.get())))
    }

    /// Takes what the backends have to say, with our ids.
    fn drain(&mut self) {
        let count = self.backends.len() as u64;
        for (index, backend) in (0..).zip(&mut self.backends) {
            let outer = |inner: u64| inner * count + index;
            while let Some(event) = backend.next_event() {
                self.events.push_back(match event {
                    Event::Connected { peer } => Event::Connected { peer: PeerId::new(outer(peer.get())) },
                    Event::PeerLost { peer, cause } => Event::PeerLost { peer: PeerId::new(outer(peer.get())), cause },
                    Event::Completed { op, peer, outcome } => {
                        let op = OpId::new(outer(op.get()));
                        self.open.remove(&op);
                        Event::Completed { op, peer: PeerId::new(outer(peer.get())), outcome }
                    }
                    notification @ Event::Notification { .. } => notification,
                });
            }
        }
    }

    /// Whether a region may be registered now with every backend under the same id.
    fn check_even(&mut self, region: &Region) -> Result<(), RegisterError> {
        let (backend, len) = (self.capabilities.backend, region.len());
        if !self.capabilities.memory.contains(&region.kind()) {
            let (got, supported) = (region.kind(), self.capabilities.memory.clone());
            return Err(RegisterError::UnsupportedMemory { backend, got, supported });
        }
        if self.ids == Ids::DifferUntilEmpty && self.registered == 0 {
            self.ids = Ids::Agree;
        }
        let reason = match self.ids {
            Ids::Agree => return Ok(()),
            Ids::DifferUntilEmpty => {
                "the backends no longer agree on region ids, since one of them refused a region that others had taken; \
                 deregister all regions and register them anew"
            }
            Ids::DifferForGood => {
                "the backends no longer agree on region ids, since one of them did not give up a region that others gave up; \
                 open a new endpoint"
            }
        };
        Err(RegisterError::Refused { backend, len, reason: reason.to_owned() })
    }

    /// After the first backends took a region that the next refused: takes it back, and has the others count as far.
    fn undo(&mut self, taken: &[RegionId]) {
        for (backend, id) in self.backends.iter_mut().zip(taken) {
            if backend.deregister(*id).is_err() {
                self.ids = Ids::DifferForGood;
            }
        }
        if self.registered == 0 || taken.is_empty() {
            return;
        }
        for backend in self.backends.iter_mut().skip(taken.len()) {
            let counted = Region::zeroed(1).and_then(|byte| backend.register(byte).ok());
            let even = counted.is_some_and(|id| backend.deregister(id).is_ok() && Some(&id) == taken.first());
            if !even && self.ids == Ids::Agree {
                self.ids = Ids::DifferUntilEmpty;
            }
        }
    }

    /// Connects by the first of our backends that is offered.
    fn choose(&mut self, blob: &Blob, mut offers: Vec<Offer>) -> Result<PeerId, ConnectError> {
        let count = self.backends.len() as u64;
        let offered: Vec<_> = offers.iter().map(|o| o.backend.clone()).collect();
        let (mut passed, mut refused) = (Vec::new(), None);
        for (index, backend) in (0..).zip(&mut self.backends) {
            let name = backend.capabilities().backend;
            let Some(at) = offers.iter().position(|o| o.backend == name) else { continue };
            match backend.connect(&offers.swap_remove(at).blob(blob.endpoint, blob.regions.clone())) {
                Ok(inner) => {
                    let peer = PeerId::new(inner.get() * count + index);
                    self.peers.insert(peer, Conn { endpoint: blob.endpoint, passed });
                    return Ok(peer);
                }
                Err(ConnectError::Unreachable { reason, .. }) => {
                    passed.push(format!("{name}: {reason}"));
                    refused = Some(passed.join("; "));
                }
                Err(error) => return Err(error),
            }
        }
        Err(match refused {
            Some(reason) => ConnectError::Unreachable { endpoint: blob.endpoint, reason },
            None => ConnectError::NoCommonBackend { ours: self.backends().collect(), offered },
        })
    }

    fn outer_error(peer: PeerId, error: SubmitError) -> SubmitError {
        match error {
            SubmitError::UnknownPeer { .. } => SubmitError::UnknownPeer { peer },
            SubmitError::PeerLost { cause, .. } => SubmitError::PeerLost { peer, cause },
            other => other,
        }
    }
}

/// What all of them can do.
fn common(backends: &[Box<dyn Transport>], mut all: Capabilities) -> Result<Capabilities, NegotiateError> {
    let [_, others @ ..] = backends else { return Ok(all) };
    if others.is_empty() {
        return Ok(all);
    }
    all.backend = ANY;
    for one in others.iter().map(|b| b.capabilities()) {
        all.memory.retain(|kind| one.memory.contains(kind));
        all.read &= one.read;
        all.write &= one.write;
        all.max_notify = all.max_notify.min(one.max_notify);
        all.max_in_flight = all.max_in_flight.min(one.max_in_flight);
        all.revocation = weaker(all.revocation, one.revocation);
    }
    if all.memory.is_empty() {
        let each = |caps: &Capabilities| {
            let kinds = caps.memory.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            format!("{} has {kinds}", caps.backend)
        };
        let supported = backends.iter().map(|b| each(b.capabilities())).collect::<Vec<_>>().join("; ");
        return Err(NegotiateError::NoCommonMemory { supported });
    }
    Ok(all)
}

fn weaker(a: Revocation, b: Revocation) -> Revocation {
    let strength = |r| match r {
        Revocation::Unsupported => 0,
        Revocation::Fences => 1,
        Revocation::Excludes => 2,
    };
    if strength(a) <= strength(b) { a } else { b }
}

fn names(kind: OpKind, batch: &BoundedBatch, region: RegionId) -> bool {
    batch.batch().sections().iter().flat_map(|s| s.bases.iter()).any(|base| match kind {
        OpKind::Read => base.dst_region == region,
        OpKind::Write => base.src_region == region,
    })
}

impl Transport for Negotiated {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn endpoint(&self) -> EndpointId {
        self.endpoint
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.check_even(&region)?;
        let mut taken: Vec<RegionId> = Vec::with_capacity(self.backends.len());
        for backend in &mut self.backends {
            let got = backend.register(region.clone());
            match (got, taken.first()) {
                (Ok(id), Some(&first)) if id != first => {
                    taken.push(id);
                    let reason =
                        format!("{} counted region {id} where others have {first}", backend.capabilities().backend);
                    self.ids = Ids::DifferUntilEmpty;
                    self.undo(&taken);
                    return Err(RegisterError::Refused { backend: ANY, len: region.len(), reason });
                }
                (Ok(id), _) => taken.push(id),
                (Err(error), _) => {
                    self.undo(&taken);
                    return Err(error);
                }
            }
        }
        self.registered += 1;
        Ok(taken.first().copied().unwrap_or(RegionId::ZERO))
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.drain();
        let operations = self.open.values().filter(|(kind, batch)| names(*kind, batch, region)).count();
        if operations > 0 {
            return Err(DeregisterError::Busy { region, operations });
        }
        let mut results = self.backends.iter_mut().map(|backend| backend.deregister(region));
        results.next().unwrap_or(Err(DeregisterError::Unknown { region }))?;
        // All have the same regions, and none has an operation on this one: what the first does, all do. One that doesn't breaks
        // the contract; the region is gone, and the others are not held up.
        if results.filter(Result::is_err).count() > 0 {
            self.ids = Ids::DifferForGood;
        }
        self.registered = self.registered.saturating_sub(1);
        Ok(())
    }

    fn blob(&self) -> Vec<u8> {
        if let [only] = &self.backends[..] {
            return only.blob();
        }
        let mut regions = Vec::new();
        let mut offers = Vec::with_capacity(self.backends.len());
        // They all parse: `new` has tried. One that has other regions than the first is not offered.
        for mut blob in self.backends.iter().filter_map(|b| Blob::decode(&b.blob()).ok()) {
            let theirs = std::mem::take(&mut blob.regions);
            if offers.is_empty() {
                regions = theirs;
            } else if theirs != regions {
                continue;
            }
            offers.push(Offer::of(blob));
        }
        let lane = offer::encode(&offers);
        Blob { backend: ANY.to_owned(), endpoint: self.endpoint, generation: 0, regions, lane }.encode()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let frame = Blob::decode(blob)?;
        let endpoint = frame.endpoint;
        if endpoint == self.endpoint {
            return Err(ConnectError::Itself);
        }
        if let Some((&peer, _)) = self.peers.iter().find(|(_, conn)| conn.endpoint == endpoint) {
            return Err(ConnectError::AlreadyConnected { endpoint, peer });
        }
        if frame.backend == ANY {
            let offers = offer::decode(&frame.lane)
                .map_err(|e| ConnectError::BadLane { backend: ANY, reason: e.to_string() })?;
            return self.choose(&frame, offers);
        }
        if let [only] = &mut self.backends[..] {
            let peer = only.connect(blob)?;
            self.peers.insert(peer, Conn { endpoint, passed: Vec::new() });
            return Ok(peer);
        }
        let offer = Offer { backend: frame.backend.clone(), generation: frame.generation, lane: frame.lane.clone() };
        self.choose(&frame, vec![offer])
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        let (index, inner) = self.inner_peer(peer);
        self.backends[index].disconnect(inner).map_err(|_| UnknownPeer(peer))?;
        self.peers.remove(&peer);
        self.events.retain(|event| !event.is_of_connection(peer));
        self.drain();
        Ok(())
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        let (index, inner) = self.inner_peer(peer);
        let mut info = self.backends[index].peer(inner).map_err(|_| UnknownPeer(peer))?;
        if let Some(conn) = self.peers.get(&peer)
            && self.backends.len() > 1
        {
            let name = self.backends[index].capabilities().backend;
            let passed = conn.passed.iter().map(|why| format!("; not {why}")).collect::<String>();
            info.lane.detail = format!("{name}: {}{passed}", info.lane.detail);
        }
        Ok(info)
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let (peer, kind) = (submission.peer, submission.kind);
        let (index, inner) = self.inner_peer(peer);
        let Capabilities { backend, read, write, max_notify, max_in_flight, .. } = self.capabilities;
        if !(match kind {
            OpKind::Read => read,
            OpKind::Write => write,
        }) {
            return Err(SubmitError::UnsupportedKind { backend, kind });
        }
        if let Some(got) = submission.notify.as_ref().map(Vec::len).filter(|got| *got > max_notify) {
            return Err(SubmitError::NotifyTooLong { got, limit: max_notify });
        }
        if self.open.len() >= max_in_flight {
            // Ends that nobody has taken make room as well.
            self.drain();
        }
        if self.open.len() >= max_in_flight {
            return Err(SubmitError::QueueFull { limit: max_in_flight });
        }
        let batch = submission.batch.clone();
        let op = self.backends[index]
            .submit(Submission { peer: inner, ..submission })
            .map_err(|error| Self::outer_error(peer, error))?;
        let op = OpId::new(op.get() * self.backends.len() as u64 + index as u64);
        self.open.insert(op, (kind, batch));
        Ok(op)
    }

    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        let (index, inner) = (self.index(op.get()), OpId::new(self.inner(op.get())));
        self.backends[index].cancel(inner).map_err(|_| UnknownOp(op))
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        if self.capabilities.revocation == Revocation::Unsupported {
            return Err(RevokeError::Unsupported { backend: self.capabilities.backend });
        }
        // A peer may come by any of them. All have the same regions: what the first refuses, all would.
        self.backends.iter_mut().try_for_each(|backend| backend.revoke(scope))
    }

    fn step(&mut self, now: Duration) -> Option<Duration> {
        let next = self.backends.iter_mut().filter_map(|backend| backend.step(now)).min();
        self.drain();
        next
    }

    fn next_event(&mut self) -> Option<Event> {
        if self.events.is_empty() {
            self.drain();
        }
        self.events.pop_front()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        match &self.wake {
            Some(wake) => wake.fd(),
            None => self.backends[0].wake_fd(),
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        if !self.events.is_empty() {
            return true;
        }
        match &self.wake {
            None => self.backends[0].wait(timeout),
            // The first looks for events that are queued below.
            Some(wake) => self.backends.iter_mut().any(|b| b.wait(Some(Duration::ZERO))) || wake.wait(timeout),
        }
    }
}
