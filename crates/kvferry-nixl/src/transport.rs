//! The endpoint: what the driver holds. It admits, numbers and hands over; the agent's thread does the rest.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_geometry::staged::CostModel;
use kvferry_geometry::units::RegionId;
use kvferry_transport::access::MAX_REGIONS;
use kvferry_transport::admit::{Named, admit};
use kvferry_transport::blob::{Blob, MAX_LANE};
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, LostCause, OpId, PeerId, PeerInfo, Region,
    RegisterError, Revocation, RevokeError, RevokeScope, Submission, SubmitError, Transport, UnknownOp, UnknownPeer,
};

use crate::config::NixlConfig;
use crate::error::NixlError;
use crate::frame::MAX_NOTIFY;
use crate::lane::{ENTRY, LanePart, Place};
use crate::process::Process;
use crate::shared::{Command, NewOp, NewPeer, Ours, Shared, Telemetry, Told, wrap};
use crate::sys::library;
use crate::{live, truth};

const BACKEND: &str = "nixl";
/// What a child of a fork is told: the agent's thread is not in it.
const FORKED: &str = "this endpoint was opened before a fork; open one in the process that uses it";
/// What is said if the agent's thread has ended, which only a panic in it can bring about.
const ENDED: &str = "the agent's thread has ended";
/// How long the end of an endpoint waits for what is in progress; then it leaves that, and all that it needs, to the thread.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// One rank's endpoint over NIXL. See the [crate's text](crate) for what it guarantees, and [`Transport`] for how it is driven.
pub struct NixlTransport {
    id: EndpointId,
    config: NixlConfig,
    capabilities: Capabilities,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    process: Process,
    /// Of the process that opened it.
    pid: u32,
    peers: BTreeMap<PeerId, Peer>,
    ops: HashMap<OpId, Open>,
    /// Operations that name a region of ours and have not ended.
    busy: HashMap<RegionId, usize>,
    events: VecDeque<Event>,
    /// The next numbers: of peers, operations, registrations.
    next: (u64, u64, u64),
    sizes: Sizes,
}

struct Peer {
    info: PeerInfo,
    lost: Option<LostCause>,
    /// Operations that have not ended.
    open: usize,
}

struct Open {
    peer: PeerId,
    ours: Vec<RegionId>,
}

/// How large the metadata is, so that the blob does not outgrow its limit.
#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    /// Without memory.
    none: usize,
    /// Of each region, once one was registered.
    each: Option<usize>,
}

impl std::fmt::Debug for NixlTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NixlTransport")
            .field("id", &self.id)
            .field("plugin", &self.config.plugin)
            .field("peers", &self.peers.len())
            .field("operations", &self.ops.len())
            .finish_non_exhaustive()
    }
}

impl NixlTransport {
    /// Opens an endpoint: an agent of NIXL's with one backend, on a thread of its own. It can be connected to from now on.
    ///
    /// # Errors
    /// No library (what was looked for, and how to get it), a setting out of its range, a plugin that is not there, can't be started or
    /// moves bytes only between memory and storage, or what the system refused.
    pub fn new(config: NixlConfig) -> Result<Self, NixlError> {
        config.check()?;
        let library = library()?;
        let mut random = [0u8; 16];
        getrandom::fill(&mut random)
            .map_err(|e| NixlError::System { what: "getting random bytes", reason: e.to_string() })?;
        let id = config.endpoint.unwrap_or(EndpointId::new(random));
        let process = Process::this();
        let shared = Arc::new(Shared::new().map_err(NixlError::system("making an eventfd"))?);
        let (thread, none) = crate::open::open(&library, &config, id, process, &shared)?;
        let mut capabilities = Capabilities::host(BACKEND);
        capabilities.max_notify = MAX_NOTIFY;
        capabilities.max_in_flight = 1 << 14;
        capabilities.revocation = Revocation::Fences;
        capabilities.cost = cost();
        Ok(Self {
            id,
            config,
            capabilities,
            shared,
            thread: Some(thread),
            process,
            pid: std::process::id(),
            peers: BTreeMap::new(),
            ops: HashMap::new(),
            busy: HashMap::new(),
            events: VecDeque::new(),
            next: (0, 0, 0),
            sizes: Sizes { none, each: None },
        })
    }

    /// What this endpoint has moved so far, and how long NIXL took where [`NixlConfig::telemetry`] is set.
    #[must_use]
    pub fn telemetry(&self) -> Telemetry {
        *self.shared.telemetry()
    }

    fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Asks the thread something. `None` if it can't answer.
    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Option<T> {
        if !self.is_ours() {
            return None;
        }
        let (reply, answer): (_, Receiver<T>) = sync_channel(1);
        self.shared.command(command(reply));
        self.await_answer(&answer)
    }

    fn await_answer<T>(&self, answer: &Receiver<T>) -> Option<T> {
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return Some(answer),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return None,
                // The command lies in the queue of a thread that is no more.
                Err(_) if self.thread.as_ref().is_none_or(JoinHandle::is_finished) => return None,
                Err(_) => {}
            }
        }
    }

    /// What refuses a registration for want of room in the blob.
    fn check_room(&mut self) -> Result<(), RegisterError> {
        let regions = self.shared.registry().table.len();
        if self.sizes.each.is_none() && regions > 0 {
            let len = self.ask(Command::Metadata).and_then(Result::ok).map_or(0, |m| m.len());
            self.sizes.each = Some(len.saturating_sub(self.sizes.none) / regions + ENTRY + 8);
        }
        let Some(each) = self.sizes.each else { return Ok(()) };
        let limit = MAX_LANE.saturating_sub(self.sizes.none + 1024) / each;
        if regions >= limit { Err(RegisterError::TooMany { limit }) } else { Ok(()) }
    }

    /// Takes what the thread told.
    fn take(&mut self) {
        for told in self.shared.take() {
            match told {
                Told::Up(peer, lane) => {
                    if let Some(known) = self.peers.get_mut(&peer) {
                        known.info.lane = lane;
                        self.events.push_back(Event::Connected { peer });
                    }
                }
                Told::Event(Event::PeerLost { peer, cause }) => {
                    if let Some(known) = self.peers.get_mut(&peer) {
                        known.lost = Some(cause);
                        self.tell_loss(peer);
                    }
                }
                Told::Event(Event::Completed { op, peer, outcome }) => {
                    self.close(op);
                    self.events.push_back(Event::Completed { op, peer, outcome });
                    self.tell_loss(peer);
                }
                Told::Event(event) => self.events.push_back(event),
            }
        }
    }

    /// Tells of a loss once no operation is left. The thread may have lost the peer before it heard of the last ones.
    fn tell_loss(&mut self, peer: PeerId) {
        if let Some(known) = self.peers.get(&peer)
            && known.open == 0
            && let Some(cause) = known.lost.clone()
        {
            self.events.push_back(Event::PeerLost { peer, cause });
        }
    }

    fn close(&mut self, op: OpId) {
        let Some(open) = self.ops.remove(&op) else { return };
        if let Some(peer) = self.peers.get_mut(&open.peer) {
            peer.open -= 1;
        }
        for region in open.ours {
            if let Some(count) = self.busy.get_mut(&region) {
                *count -= 1;
                if *count == 0 {
                    self.busy.remove(&region);
                }
            }
        }
    }
}

impl Transport for NixlTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn endpoint(&self) -> EndpointId {
        self.id
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.shared.registry().table.check(&region, &self.capabilities)?;
        self.check_room()?;
        let len = region.len();
        let refused = |reason: String| RegisterError::Refused { backend: BACKEND, len, reason };
        let serial = self.next.2;
        self.next.2 += 1;
        let forked = || refused(if self.is_ours() { ENDED } else { FORKED }.to_owned());
        let held = region.clone();
        self.ask(|reply| Command::Register { region: held, serial, reply }).ok_or_else(forked)?.map_err(|fail| {
            refused(format!("{fail}; is the memory mapped, and does the limit of locked memory (ulimit -l) allow it?"))
        })?;
        let wrapped = wrap(region, serial, &self.shared).ok_or_else(|| refused("it has no address".to_owned()))?;
        let mut registry = self.shared.registry();
        let id = registry.table.register(wrapped, &self.capabilities)?;
        registry.serials.insert(id, serial);
        Ok(id)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.take();
        let busy = self.busy.get(&region).copied().unwrap_or(0);
        let removed = {
            let mut registry = self.shared.registry();
            let removed = registry.table.deregister(region, busy)?;
            registry.serials.remove(&region);
            removed
        };
        // Where no peer's operation holds it, the registration ends with this, and at return the memory is free.
        drop(removed);
        self.ask(Command::Barrier);
        Ok(())
    }

    fn blob(&self) -> Vec<u8> {
        let (generation, regions, places) = {
            let registry = self.shared.registry();
            let place = |(id, region): (RegionId, &Region)| Place {
                address: region.address() as u64,
                serial: registry.serials.get(&id).copied().unwrap_or(u64::MAX),
            };
            let places: Vec<Place> = registry.table.iter().map(place).collect();
            (registry.table.generation(), registry.table.lens(), places)
        };
        // Without an answer the blob is one that every peer refuses.
        let metadata = self.ask(Command::Metadata).and_then(Result::ok).unwrap_or_default();
        let lane = LanePart { process: self.process, plugin: self.config.plugin.clone(), metadata, places };
        Blob { backend: BACKEND.to_owned(), endpoint: self.id, generation, regions, lane: lane.encode() }.encode()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let blob = Blob::decode(blob)?;
        if blob.backend != BACKEND {
            return Err(ConnectError::WrongBackend { expected: BACKEND, got: blob.backend });
        }
        let lens: Vec<u64> = blob.regions.iter().map(|(_, len)| len.get()).collect();
        let endpoint = blob.endpoint;
        let part = LanePart::decode(&blob.lane, endpoint, &lens)
            .map_err(|reason| ConnectError::BadLane { backend: BACKEND, reason })?;
        if endpoint == self.id {
            return Err(ConnectError::Itself);
        }
        if let Some((peer, _)) = self.peers.iter().find(|(_, p)| p.info.endpoint == endpoint) {
            return Err(ConnectError::AlreadyConnected { endpoint, peer: *peer });
        }
        let unreachable = |reason: String| ConnectError::Unreachable { endpoint, reason };
        if !self.is_ours() {
            return Err(unreachable(FORKED.to_owned()));
        }
        if part.plugin != self.config.plugin {
            let (theirs, ours) = (&part.plugin, &self.config.plugin);
            return Err(unreachable(format!(
                "its NIXL plugin is {theirs}, ours is {ours}; use the same on both sides"
            )));
        }
        let ended = |what: &str| unreachable(format!("its {what} has ended; fetch a new blob"));
        let watch = part.process.watch(&self.process).map_err(|_| ended("process"))?;
        if matches!(watch, crate::process::Watch::Here) && !live::takes_connections(endpoint) {
            return Err(ended("endpoint"));
        }
        let peer = PeerId::new(self.next.0);
        self.next.0 += 1;
        let places = blob.regions.iter().map(|(id, _)| *id).zip(part.places).collect();
        let info = PeerInfo { endpoint, regions: blob.regions.into(), lane: truth::intended(&self.config) };
        self.peers.insert(peer, Peer { info, lost: None, open: 0 });
        let new = NewPeer { peer, endpoint, generation: blob.generation, watch, metadata: part.metadata, places };
        self.shared.command(Command::Connect(new));
        Ok(peer)
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.take();
        self.peers.remove(&peer).ok_or(UnknownPeer(peer))?;
        self.events.retain(|event| !event.is_of_connection(peer));
        self.shared.command(Command::Disconnect(peer));
        Ok(())
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.peers.get(&peer).map(|p| p.info.clone()).ok_or(UnknownPeer(peer))
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let peer_id = submission.peer;
        let peer = self.peers.get(&peer_id).ok_or(SubmitError::UnknownPeer { peer: peer_id })?;
        if let Some(cause) = &peer.lost {
            return Err(SubmitError::PeerLost { peer: peer_id, cause: cause.clone() });
        }
        let registry = self.shared.registry();
        let len_of = |id| registry.table.len_of(id);
        let Named { ours, peers } = admit(&submission, &self.capabilities, self.ops.len(), len_of, &peer.info)?;
        if peers.len() > MAX_REGIONS {
            let reason = format!("it names {} regions of the peer, the most are {MAX_REGIONS}: cut it", peers.len());
            return Err(SubmitError::Refused { reason });
        }
        let held = |id: &RegionId| {
            let (region, serial) = (registry.table.get(*id)?.clone(), *registry.serials.get(id)?);
            Some(Ours { id: *id, region, serial })
        };
        let held: Vec<Ours> = ours.iter().filter_map(held).collect();
        drop(registry);
        if !self.is_ours() {
            return Err(SubmitError::Refused { reason: FORKED.to_owned() });
        }
        let op = OpId::new(self.next.1);
        self.next.1 += 1;
        for region in &ours {
            *self.busy.entry(*region).or_default() += 1;
        }
        self.ops.insert(op, Open { peer: peer_id, ours });
        if let Some(peer) = self.peers.get_mut(&peer_id) {
            peer.open += 1;
        }
        let Submission { peer, kind, batch, notify } = submission;
        self.shared.command(Command::Submit(NewOp { op, peer, kind, batch, notify, ours: held, theirs: peers }));
        Ok(op)
    }

    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        if !self.ops.contains_key(&op) {
            return Err(UnknownOp(op));
        }
        self.shared.command(Command::Cancel(op));
        Ok(())
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        let mut registry = self.shared.registry();
        let registry = &mut *registry;
        registry.keeper.revoke(scope, &registry.table)
    }

    fn step(&mut self, _now: Duration) -> Option<Duration> {
        self.take();
        None
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake_fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        !self.events.is_empty() || self.shared.wait(timeout)
    }
}

impl Drop for NixlTransport {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        live::close(self.id);
        let (reply, answer) = sync_channel(1);
        self.shared.command(Command::Stop(reply));
        let ended = answer.recv_timeout(LAST_WAIT);
        if let (Ok(()), Some(thread)) = (ended, self.thread.take()) {
            drop(thread.join());
        }
    }
}

/// Round numbers of NIXL with UCX between two processes of one host, on one thread: each descriptor is an operation of UCX of its own.
fn cost() -> CostModel {
    CostModel { descriptor_ns: 1_300, wire_bytes_per_us: 4_000, stage_ns: 50_000, ..CostModel::default() }
}
