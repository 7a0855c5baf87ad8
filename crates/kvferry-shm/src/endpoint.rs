//! The endpoint: ties connections, registrations, copy threads and operations together, and is the [`Transport`]. What its steps do
//! is in `work`.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_geometry::staged::CostModel;
use kvferry_geometry::units::RegionId;
use kvferry_transport::admit::{Named, admit};
use kvferry_transport::blob::Blob;
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, LostCause, OpId, Outcome, PeerId, PeerInfo, Region,
    RegisterError, Revocation, RevokeError, RevokeScope, Stats, Submission, SubmitError, TransferError, Transport,
    UnknownOp, UnknownPeer,
};
use rustix::io::Errno;

use crate::board::Board;
use crate::config::{Config, OpenError};
use crate::crew::Crew;
use crate::frame::{MAX_FRAME, MAX_NOTIFY};
use crate::guest::{Guests, House};
use crate::job::Job;
use crate::lane::LanePart;
use crate::link::{Caller, Link};
use crate::local::Local;
use crate::poller::{LOOK, Poller, Source};
use crate::process::{Kernel, Linux};
use crate::sock;

mod work;

use work::stop;

const BACKEND: &str = "shm";
/// What a child of a fork is told: it has no copy threads, and its memory is not what the peers know.
const FORKED: &str = "this endpoint was opened before a fork; open one in the process that uses it";
/// Direct and staged bytes are copied by the same processors at the same rates, some 8 GB/s by two threads, and a run costs the same
/// 10 ns in either: so staging is a second copy of everything, and never cheaper.
const COST: CostModel = CostModel {
    descriptor_ns: 10,
    wire_bytes_per_us: 8_000,
    permute_bytes_per_us: 8_000,
    run_ps: 10_000,
    stage_ns: 20_000,
};
/// How long until given-up regions are looked at again: at first, and at most, doubled each time.
const BURY_AGAIN: Duration = Duration::from_millis(1);
const BURY_AT_MOST: Duration = Duration::from_millis(100);
/// How long a job that was told to stop may take; then its operation ends in doubt.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// How long the end of an endpoint may wait for peers that are inside a slice of its plain memory.
const LAST_WAIT: Duration = Duration::from_millis(500);

/// One rank's endpoint on this host. See the [crate's text](crate) for what it guarantees, and [`Transport`] for how it
/// is driven.
pub struct ShmTransport {
    // Dropped first: no copy thread runs while the rest goes.
    crew: Crew,
    config: Config,
    capabilities: Capabilities,
    house: House,
    name: Vec<u8>,
    poller: Poller,
    local: Local,
    guests: Guests,
    links: BTreeMap<PeerId, Peer>,
    ops: BTreeMap<OpId, Op>,
    /// Operations whose jobs were told to stop, and why and since when.
    stopping: BTreeMap<OpId, (TransferError, Option<Duration>)>,
    events: VecDeque<Event>,
    misc: Misc,
}

/// Counters, and what is used by every connection.
struct Misc {
    next_peer: u64,
    next_op: u64,
    buffer: Box<[u8]>,
    kernel: Arc<dyn Kernel>,
    /// How long until given-up regions are looked at again.
    bury_again: Duration,
}

/// A connection and the operations on it that have not begun.
struct Peer {
    link: Link,
    /// Operations that have not ended.
    open: usize,
    /// Operations that wait for the lane or for grants, oldest first.
    waiting: VecDeque<OpId>,
    /// Something changed that may let them go on, or things wait to be sent.
    stirred: bool,
    /// It was disconnected and goes when its operations have ended.
    closing: bool,
}

struct Op {
    submission: Submission,
    named: Named,
    stage: Stage,
}

enum Stage {
    Waiting,
    /// On the copy threads.
    Running(Arc<Job>),
    /// The bytes are moved; the notification waits for room.
    Notifying(Stats),
}

impl std::fmt::Debug for ShmTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShmTransport")
            .field("id", &self.house.id)
            .field("peers", &self.links.len())
            .field("operations", &self.ops.len())
            .finish_non_exhaustive()
    }
}

impl ShmTransport {
    /// Opens an endpoint: it can be connected to from now on, and answers when it is stepped.
    ///
    /// # Errors
    /// A setting out of its range, a name that is taken, or what the system refused.
    pub fn new(config: Config) -> Result<Self, OpenError> {
        Self::with_kernel(config, Arc::new(Linux))
    }

    pub(crate) fn with_kernel(config: Config, kernel: Arc<dyn Kernel>) -> Result<Self, OpenError> {
        config.check()?;
        let mut random = [0u8; 48];
        getrandom::fill(&mut random)
            .map_err(|e| OpenError::System { what: "getting random bytes", reason: e.to_string() })?;
        let (id, token, probe) = thirds(&random);
        let id = config.endpoint.unwrap_or(EndpointId::new(id));
        let name = config.name.clone().unwrap_or_else(|| format!("kvferry-{id}"));
        let listener = sock::listen(name.as_bytes()).map_err(|errno| match errno {
            Errno::ADDRINUSE => OpenError::NameTaken { name: name.clone() },
            errno => OpenError::system("listening on a Unix socket")(errno),
        })?;
        let board = Board::new().map_err(|e| OpenError::board(&e))?;
        let poller = Poller::new().map_err(OpenError::system("making an epoll descriptor"))?;
        let crew = Crew::new(config.threads).map_err(OpenError::system("making an eventfd"))?;
        poller.add(&listener, Source::Listener).map_err(OpenError::system("watching the listener"))?;
        poller.add(crew.wake_fd(), Source::Crew).map_err(OpenError::system("watching the eventfd"))?;
        let mut capabilities = Capabilities::host(BACKEND);
        capabilities.max_notify = MAX_NOTIFY;
        capabilities.revocation = Revocation::Unsupported;
        capabilities.cost = COST;
        let house = House {
            id,
            token,
            user: rustix::process::geteuid().as_raw(),
            other_users: config.other_users,
            grant_writes: config.grant_writes,
            max_guests: config.max_guests,
        };
        Ok(Self {
            crew,
            capabilities,
            house,
            name: name.into_bytes(),
            poller,
            local: Local::new(board, probe),
            guests: Guests::new(listener),
            links: BTreeMap::new(),
            ops: BTreeMap::new(),
            stopping: BTreeMap::new(),
            events: VecDeque::new(),
            misc: Misc { next_peer: 0, next_op: 0, buffer: vec![0; MAX_FRAME].into(), kernel, bury_again: BURY_AGAIN },
            config,
        })
    }

    /// Registers memory that peers may read and not write. Enforced where they map it; a peer that the kernel lets into
    /// this process's memory (`process_vm_writev`) is trusted.
    ///
    /// # Errors
    /// As for [`Transport::register`].
    pub fn register_read_only(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.local.register(region, true, self.config.other_users, &self.capabilities)
    }

    /// The slot of a copy thread, for tests that play one.
    #[cfg(test)]
    pub(crate) fn slot(&self, index: usize) -> crate::board::Slot {
        self.local.board.slot(index)
    }

    /// Sends every guest away, for tests of what follows.
    #[cfg(test)]
    pub(crate) fn send_all_away(&mut self) {
        self.guests.send_all_away(&self.poller);
    }

    /// For tests that play another user.
    #[cfg(test)]
    pub(crate) fn pretend_user(&mut self, user: u32) {
        self.house.user = user;
    }

    fn caller(&self) -> Caller<'_> {
        Caller {
            user: self.house.user,
            id: self.house.id,
            board: self.local.board.fd(),
            other_users: self.config.other_users,
            answer_within: self.config.answer_within,
        }
    }
}

impl Transport for ShmTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn endpoint(&self) -> EndpointId {
        self.house.id
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.local.register(region, false, self.config.other_users, &self.capabilities)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.local.deregister(region, self.guests.boards())
    }

    fn blob(&self) -> Vec<u8> {
        let lane = LanePart { name: self.name.clone(), token: self.house.token, plain: self.local.plain() };
        Blob {
            backend: BACKEND.to_owned(),
            endpoint: self.house.id,
            generation: self.local.table().generation(),
            regions: self.local.table().lens(),
            lane: lane.encode(),
        }
        .encode()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let blob = Blob::decode(blob)?;
        if blob.backend != BACKEND {
            return Err(ConnectError::WrongBackend { expected: BACKEND, got: blob.backend });
        }
        let part = LanePart::decode(&blob.lane).map_err(|reason| ConnectError::BadLane { backend: BACKEND, reason })?;
        let endpoint = blob.endpoint;
        if endpoint == self.house.id {
            return Err(ConnectError::Itself);
        }
        let unreachable = |reason: String| ConnectError::Unreachable { endpoint, reason };
        if !self.local.board.is_ours() {
            return Err(unreachable(FORKED.to_owned()));
        }
        let same = |(_, peer): &(&PeerId, &Peer)| !peer.closing && peer.link.endpoint() == endpoint;
        if let Some((peer, _)) = self.links.iter().find(same) {
            return Err(ConnectError::AlreadyConnected { endpoint, peer: *peer });
        }
        let id = PeerId::new(self.misc.next_peer);
        let mut link = Link::new(id, blob, part, self.misc.kernel.clone())
            .map_err(|e| unreachable(format!("no socket could be made: {e}")))?;
        let last = |p: &Peer| p.closing && p.link.endpoint() == endpoint;
        let dialled = match self.links.values().any(last) {
            true => Ok(()),
            false => link.dial(Duration::ZERO, &self.caller(), &self.poller),
        };
        dialled.map_err(|cause| {
            match cause {
            LostCause::Gone => unreachable(
                "nobody listens under its name: its process has ended, or runs in another network namespace, where its \
                 abstract socket is not seen"
                    .to_owned(),
            ),
            other => unreachable(other.to_string()),
        }
        })?;
        self.misc.next_peer += 1;
        self.links.insert(id, Peer { link, open: 0, waiting: VecDeque::new(), stirred: true, closing: false });
        Ok(id)
    }

    fn disconnect(&mut self, id: PeerId) -> Result<(), UnknownPeer> {
        let ours = self.local.board.is_ours();
        let peer = self.links.get_mut(&id).filter(|p| !p.closing && ours).ok_or(UnknownPeer(id))?;
        peer.closing = true;
        self.events.retain(|event| !event.is_of_connection(id));
        peer.link.lose(LostCause::Gone, &self.poller);
        self.stop_all(id, &TransferError::Disconnected);
        self.stir(id);
        Ok(())
    }

    fn peer(&self, id: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.links.get(&id).filter(|p| !p.closing).map(|p| p.link.info().clone()).ok_or(UnknownPeer(id))
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let id = submission.peer;
        let peer = self.links.get_mut(&id).filter(|p| !p.closing).ok_or(SubmitError::UnknownPeer { peer: id })?;
        if let Some(cause) = peer.link.lost() {
            return Err(SubmitError::PeerLost { peer: id, cause: cause.clone() });
        }
        if !self.local.board.is_ours() {
            return Err(SubmitError::Refused { reason: FORKED.to_owned() });
        }
        let ours = |region| self.local.table().len_of(region);
        let named = admit(&submission, &self.capabilities, self.ops.len(), ours, peer.link.info())?;
        self.crew
            .start(&self.local.board)
            .map_err(|e| SubmitError::Refused { reason: format!("a copy thread could not be started: {e}") })?;
        let op = OpId::new(self.misc.next_op);
        self.misc.next_op += 1;
        self.local.name(&named.ours);
        peer.open += 1;
        peer.waiting.push_back(op);
        peer.stirred = true;
        self.ops.insert(op, Op { submission, named, stage: Stage::Waiting });
        Ok(op)
    }

    fn cancel(&mut self, id: OpId) -> Result<(), UnknownOp> {
        let op = self.ops.get(&id).ok_or(UnknownOp(id))?;
        match &op.stage {
            Stage::Running(job) => {
                stop(&self.crew, job);
                self.stopping.entry(id).or_insert((TransferError::Cancelled, None));
                return Ok(());
            }
            Stage::Waiting | Stage::Notifying(_) => {
                if let Some(peer) = self.links.get_mut(&op.submission.peer) {
                    peer.waiting.retain(|waiting| *waiting != id);
                    peer.link.unnotify(id);
                }
            }
        }
        self.end(id, Outcome::Failed(TransferError::Cancelled));
        Ok(())
    }

    fn revoke(&mut self, _scope: RevokeScope) -> Result<(), RevokeError> {
        Err(RevokeError::Unsupported { backend: BACKEND })
    }

    fn step(&mut self, now: Duration) -> Option<Duration> {
        if !self.local.board.is_ours() {
            // What we would tell of our memory is true of another process, and every descriptor is shared with it.
            self.guests.turn_away(FORKED);
            return None;
        }
        let ready = self.poller.look();
        let more = ready.len() == LOOK;
        for source in ready {
            match source {
                Source::Listener => self.guests.accept(now, &self.house, &self.poller),
                Source::Crew => {}
                Source::Link(peer) => self.on_link(peer),
                Source::Process(peer) => {
                    // What it sent before it ended may tell why.
                    self.on_link(peer);
                    self.lose(peer, LostCause::Gone);
                }
                Source::Guest(key) => self.serve(now, key),
            }
        }
        for key in self.guests.due(now) {
            self.serve(now, key);
        }
        self.hear_threads();
        let next = self.tick(now);
        let stirred: Vec<PeerId> = self.links.iter().filter(|(_, p)| p.stirred).map(|(id, _)| *id).collect();
        for peer in stirred {
            self.stir(peer);
        }
        // Events that are not taken yet are something to do as well: nothing would wake a driver for them again.
        let again = more || !self.events.is_empty() || self.links.values().any(|p| p.stirred);
        if again { Some(now) } else { next }
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.poller.fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        !self.events.is_empty() || sock::readable(self.poller.fd(), timeout)
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        if !self.local.board.is_ours() {
            // A child of a fork shares the sockets and the board with the process that goes on using them, and has no threads.
            self.crew.forget();
            return;
        }
        for op in self.ops.values() {
            if let Stage::Running(job) = &op.stage {
                stop(&self.crew, job);
            }
        }
        self.crew.finish();
        for peer in self.links.values_mut() {
            peer.link.let_go();
        }
        // Peers may be inside a slice of our memory. What they map lives on by itself, but plain memory would be re-used under
        // their hands: it waits for them, and is never freed if they don't leave.
        let ids: Vec<RegionId> = self.local.table().iter().map(|(id, _)| id).collect();
        for id in ids {
            self.local.abandon(id, self.guests.boards());
        }
        self.guests.farewell();
        let until = Instant::now() + LAST_WAIT;
        while self.local.bury(|key| self.guests.board(key)) {
            if Instant::now() >= until {
                self.local.leak_graves();
                return;
            }
            std::thread::sleep(BURY_AGAIN);
            self.guests.drop_closed(&self.poller);
        }
    }
}

fn thirds(random: &[u8; 48]) -> ([u8; 16], [u8; 16], [u8; 16]) {
    let part = |from: usize| std::array::from_fn(|i| random[from + i]);
    (part(0), part(16), part(32))
}
