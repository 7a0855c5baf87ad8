//! The thread that owns the agent: it makes every call of NIXL's, keeps the state of connections and operations, and waits.
//!
//! Why a thread of our own and no direct calls: NIXL with its locks (`thread_sync`) would let several threads in, but nobody is told
//! when something has arrived or ended, so somebody must look, and go on looking after `submit` returned. One thread that looks,
//! without NIXL's own progress thread and without locks inside UCX, is the cheapest of the ways to do that.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use kvferry_transport::{EndpointId, Lane, LostCause, OpId, PeerId, Region, TransferError};
use rustix::event::{PollFd, PollFlags, poll};

use crate::bell::Bell;
use crate::config::NixlConfig;
use crate::feed::Lists;
use crate::frame::Frame;
use crate::process::{Process, Watch};
use crate::shared::{Command, Shared};
use crate::sys::{Agent, Fail, Notifications};
use crate::truth::{self, Ucx};
use flights::{Flight, Ghost};
use guests::Guest;
use ops::Op;
use peers::Peer;

mod flights;
mod guests;
mod ops;
mod peers;

/// The first pause; each is twice the one before.
const FIRST_NAP: Duration = Duration::from_micros(10);
/// How often peers are looked after.
const LOOK: Duration = Duration::from_millis(5);
/// How long an endpoint that was busy still looks often, so that nobody needs to ring.
const AWAKE: Duration = Duration::from_micros(100);
/// How long an operation that was told to stop may take; then it ends in doubt.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// How long what was sent last may take to go out before the agent ends.
const FAREWELL: Duration = Duration::from_millis(2);

/// What the thread works on.
pub(crate) struct Worker {
    pub(crate) net: Net,
    pub(crate) shared: Arc<Shared>,
    pub(crate) config: NixlConfig,
    pub(crate) lists: Lists,
    /// The memory of our registrations, by their numbers.
    pub(crate) memory: HashMap<u64, Region>,
    peers: BTreeMap<PeerId, Peer>,
    guests: HashMap<EndpointId, Guest>,
    ops: HashMap<OpId, Op>,
    /// Operations with bytes to post, in turns.
    moving: VecDeque<OpId>,
    flights: Vec<Flight>,
    /// Operations that ended in doubt, by what of them is still in progress.
    orphans: HashMap<OpId, (EndpointId, usize)>,
    ghosts: Vec<Ghost>,
    /// Those that something could not be sent to, or whose requests fail, and until when their process's end is awaited as the cause.
    suspects: HashMap<EndpointId, Instant>,
    stopping: Option<SyncSender<()>>,
    inbox: Vec<(EndpointId, Vec<u8>)>,
    /// Questions that wait until the endpoint has taken notifications.
    deferred: VecDeque<(EndpointId, Vec<u8>)>,
    looked: Instant,
}

/// The agent and those that it can send to.
pub(crate) struct Net {
    pub(crate) agent: Agent,
    pub(crate) notifications: Notifications,
    pub(crate) process: Process,
    /// What peers need to answer us.
    pub(crate) metadata: Vec<u8>,
    /// What tells which lanes are used.
    pub(crate) ucx: Option<Ucx>,
    pub(crate) bell: Option<Bell>,
    remotes: HashMap<EndpointId, Remote>,
    /// Those that something could not be sent to.
    failing: Vec<EndpointId>,
}

/// Another agent that NIXL knows.
struct Remote {
    name: std::ffi::CString,
    /// Connections and requests that need it.
    users: usize,
    /// UCX's handle for it, where it was found.
    ucx: Option<usize>,
    /// It is on this host, and our doorbell reaches it as far as is known.
    rings: bool,
    /// When we last heard of it, or rang.
    touched: Option<Instant>,
}

impl Net {
    pub(crate) fn new(
        agent: Agent,
        notifications: Notifications,
        process: Process,
        metadata: Vec<u8>,
        ucx: Option<Ucx>,
        bell: Option<Bell>,
    ) -> Self {
        Self { agent, notifications, process, metadata, ucx, bell, remotes: HashMap::new(), failing: Vec::new() }
    }

    /// Makes an agent known to NIXL, or more of its memory, for one more user.
    fn load(&mut self, endpoint: EndpointId, watch: &Watch, metadata: &[u8]) -> Result<(), Fail> {
        let endpoints = |ucx: &Option<Ucx>| ucx.as_ref().map_or(BTreeSet::new(), Ucx::endpoints);
        let before = if self.remotes.contains_key(&endpoint) { BTreeSet::new() } else { endpoints(&self.ucx) };
        self.agent.load(metadata)?;
        if let Some(remote) = self.remotes.get_mut(&endpoint) {
            remote.users += 1;
        } else {
            let ucx = endpoints(&self.ucx).difference(&before).next().copied();
            let (name, rings) = (crate::lane::agent_name(endpoint), !matches!(watch, Watch::Elsewhere));
            self.remotes.insert(endpoint, Remote { name, users: 1, ucx, rings, touched: None });
        }
        Ok(())
    }

    /// The lane to a remote that has answered.
    fn lane(&self, config: &NixlConfig, endpoint: EndpointId) -> Lane {
        truth::lane(config, self.ucx.as_ref(), self.remotes.get(&endpoint).and_then(|remote| remote.ucx))
    }

    /// One user more of a remote that has some.
    fn retain(&mut self, endpoint: EndpointId) {
        if let Some(remote) = self.remotes.get_mut(&endpoint) {
            remote.users += 1;
        }
    }

    /// One user less; without any, NIXL forgets the agent, so that nothing stale of it is ever used.
    fn release(&mut self, endpoint: EndpointId) {
        let Some(remote) = self.remotes.get_mut(&endpoint) else { return };
        remote.users -= 1;
        if remote.users == 0 {
            // NIXL may have forgotten it by itself, when it lost it.
            let _ = self.agent.forget(&remote.name);
            self.remotes.remove(&endpoint);
        }
    }

    /// Sends; who can't be reached is noted, and looked after soon.
    fn send(&mut self, to: EndpointId, frame: &Frame<'_>) -> bool {
        let remote = self.remotes.get_mut(&to);
        let sent = remote.is_some_and(|remote| {
            let sent = self.agent.notify(&remote.name, &frame.encode()).is_ok();
            // Whoever was heard of just now looks again soon.
            if let Some(bell) = self.bell.as_ref().filter(|_| sent && remote.rings)
                && remote.touched.is_none_or(|at| at.elapsed() > AWAKE)
            {
                remote.rings = bell.ring(to);
                remote.touched = Some(Instant::now());
            }
            sent
        });
        if !sent && !self.failing.contains(&to) {
            self.failing.push(to);
        }
        sent
    }

    /// Something came from an endpoint.
    fn touch(&mut self, from: EndpointId, now: Instant) {
        if let Some(remote) = self.remotes.get_mut(&from) {
            remote.touched = Some(now);
        }
    }

    /// Whether all that may send to us ring.
    fn all_ring(&self) -> bool {
        self.bell.is_some() && !self.remotes.is_empty() && self.remotes.values().all(|r| r.rings)
    }
}

impl Worker {
    pub(crate) fn new(net: Net, shared: Arc<Shared>, config: NixlConfig, lists: Lists) -> Self {
        Self {
            net,
            shared,
            config,
            lists,
            memory: HashMap::new(),
            peers: BTreeMap::new(),
            guests: HashMap::new(),
            ops: HashMap::new(),
            moving: VecDeque::new(),
            flights: Vec::new(),
            orphans: HashMap::new(),
            ghosts: Vec::new(),
            suspects: HashMap::new(),
            stopping: None,
            inbox: Vec::new(),
            deferred: VecDeque::new(),
            looked: Instant::now(),
        }
    }

    /// Works until the endpoint has ended and nothing of its memory is touched any more.
    pub(crate) fn run(mut self) {
        let (mut nap, mut awake_until) = (FIRST_NAP, Instant::now());
        loop {
            let mut did = self.obey();
            did |= self.hear();
            did |= self.poll_flights();
            did |= self.post();
            did |= self.look_after();
            if self.stopping.is_some() && self.flights.is_empty() && self.guests.values().all(|g| g.open == 0) {
                break;
            }
            if did {
                nap = FIRST_NAP;
                awake_until = Instant::now() + self.config.waiting.spin;
            } else if Instant::now() < awake_until {
                // Others on this processor may be what is waited for.
                std::thread::yield_now();
            } else {
                nap = nap.min(self.longest_nap());
                nap *= 2;
                if self.sleep(nap / 2) {
                    nap = FIRST_NAP;
                    awake_until = Instant::now() + self.config.waiting.spin;
                }
            }
        }
        let end = Instant::now() + FAREWELL;
        while Instant::now() < end {
            let _ = self.net.agent.notifications(&self.net.notifications, |_, _| {});
            std::thread::yield_now();
        }
        let reply = self.stopping.take();
        // The agent ends before the memory that is registered with it.
        let Self { net, memory, .. } = self;
        drop(net);
        drop(memory);
        if let Some(reply) = reply {
            let _ = reply.send(());
        }
    }

    /// Does what the endpoint told.
    fn obey(&mut self) -> bool {
        let mut did = false;
        while let Some(command) = self.shared.next_command() {
            did = true;
            // A reply that nobody waits for any more is nothing to care about.
            match command {
                Command::Submit(op) => self.submit(op),
                Command::Cancel(op) => self.stop(op, TransferError::Cancelled),
                Command::Connect(peer) => self.connect(peer),
                Command::Disconnect(peer) => self.disconnect(peer),
                Command::Register { region, serial, reply } => {
                    let _ = reply.send(self.register(region, serial));
                }
                Command::Deregister(serial) => self.deregister(serial),
                Command::Metadata(reply) => {
                    drop(reply.send(self.net.agent.metadata()));
                }
                Command::Barrier(reply) => {
                    let _ = reply.send(());
                }
                Command::Stop(reply) => self.end(reply),
            }
        }
        did
    }

    fn register(&mut self, region: Region, serial: u64) -> Result<(), Fail> {
        let len = usize::try_from(region.len().get()).map_err(|_| Fail::InvalidParam)?;
        // SAFETY: the region keeps the memory mapped and is kept until `deregister` or the agent's end. `Deregister` comes when the last
        // clone of the region that stands for it is gone, and each request holds such clones of what it names.
        unsafe { self.net.agent.register(region.address(), len, serial) }?;
        self.memory.insert(serial, region);
        Ok(())
    }

    fn deregister(&mut self, serial: u64) {
        let Some(region) = self.memory.get(&serial) else { return };
        let len = usize::try_from(region.len().get()).unwrap_or(usize::MAX);
        // If NIXL kept it, its pages may stay pinned: then the memory stays too.
        if self.net.agent.deregister(region.address(), len, serial).is_ok() {
            self.memory.remove(&serial);
        }
    }

    /// Takes what others sent.
    fn hear(&mut self) -> bool {
        let mut inbox = std::mem::take(&mut self.inbox);
        let mut foreign = 0;
        // A failure of NIXL here is that of one of its engines, and shows in what is sent or requested as well.
        let _ = self.net.agent.notifications(&self.net.notifications, |name, bytes| {
            match crate::lane::endpoint_of(name.to_bytes()) {
                Some(from) => inbox.push((from, bytes.to_vec())),
                None => foreign += 1,
            }
        });
        if foreign > 0 {
            self.shared.telemetry().foreign += foreign;
        }
        let mut did = !inbox.is_empty();
        for (from, bytes) in inbox.drain(..) {
            self.handle(from, bytes);
        }
        self.inbox = inbox;
        did |= self.answer_deferred();
        for endpoint in std::mem::take(&mut self.net.failing) {
            self.unreachable(endpoint);
            did = true;
        }
        did
    }

    /// Looks after everybody now and then.
    fn look_after(&mut self) -> bool {
        let now = Instant::now();
        if now < self.looked + LOOK {
            return false;
        }
        self.looked = now;
        let mut did = false;
        for endpoint in self.ended_processes() {
            self.gone(endpoint, true);
            did = true;
        }
        let late: Vec<EndpointId> = self.suspects.iter().filter(|(_, until)| now > **until).map(|(e, _)| *e).collect();
        for endpoint in late {
            self.broken(endpoint);
            did = true;
        }
        self.ping_peers(now);
        self.ping_guests(now);
        did |= self.give_up_draining(now);
        self.lay_ghosts(now);
        did
    }

    /// The longest pause that what is under way allows.
    fn longest_nap(&self) -> Duration {
        let waiting = &self.config.waiting;
        if !self.flights.is_empty() || self.peers.values().any(Peer::awaits) {
            waiting.busy
        } else if self.stopping.is_some() || self.guests.values().any(|g| g.open > 0) {
            waiting.serving
        } else if self.net.all_ring() {
            waiting.resting
        } else {
            waiting.idle
        }
    }

    /// Sleeps; whether somebody rang.
    fn sleep(&mut self, nap: Duration) -> bool {
        let watches = self.peers.values().map(|p| &p.watch).chain(self.guests.values().map(|g| &g.watch));
        let mut fds: Vec<PollFd<'_>> = watches.filter_map(watch_fd).collect();
        let watched = fds.len();
        fds.extend(self.net.bell.iter().map(|bell| PollFd::from_borrowed_fd(bell.fd(), PollFlags::IN)));
        self.shared.sleep(&mut fds, nap);
        let rung = self.net.bell.is_some() && fds.get(watched).is_some_and(|fd| !fd.revents().is_empty());
        if fds.iter().take(watched).any(|fd| !fd.revents().is_empty()) {
            // `look_after` finds out who it is.
            self.looked = Instant::now() - LOOK;
        }
        if let Some(bell) = self.net.bell.as_ref().filter(|_| rung) {
            bell.hush();
        }
        rung
    }

    /// Endpoints in processes that have ended, or that have ended themselves in this one.
    fn ended_processes(&self) -> Vec<EndpointId> {
        let peers = self.peers.values().filter(|p| p.lost.is_none()).map(|p| (p.endpoint, &p.watch));
        let all = peers.chain(self.guests.iter().map(|(endpoint, guest)| (*endpoint, &guest.watch)));
        all.filter(|(endpoint, watch)| has_ended(*endpoint, watch)).map(|(endpoint, _)| endpoint).collect()
    }

    /// Something could not be sent to an endpoint. If its process can be watched, then its end may be the cause, and shows a little
    /// later: the system takes a killed process's memory down before it says that it has ended.
    fn unreachable(&mut self, endpoint: EndpointId) {
        let watch = self.peers.values().find(|p| p.endpoint == endpoint).map(|p| &p.watch);
        match watch.or(self.guests.get(&endpoint).map(|g| &g.watch)) {
            None => {}
            Some(watch) if has_ended(endpoint, watch) => self.gone(endpoint, true),
            Some(Watch::Elsewhere) => self.broken(endpoint),
            Some(Watch::Here | Watch::Process(_)) => {
                self.suspects.entry(endpoint).or_insert_with(|| Instant::now() + self.config.silence);
            }
        }
    }

    /// The connection to an endpoint is broken.
    fn broken(&mut self, endpoint: EndpointId) {
        self.suspects.remove(&endpoint);
        let cause =
            LostCause::Lane("NIXL can't reach it any more: its agent is gone or the network is broken".to_owned());
        for peer in self.peers_at(endpoint) {
            self.lose(peer, &cause);
        }
        // NIXL has closed its side of the connection, so the peer's access through it has ended too.
        self.remove_guest(endpoint);
    }

    /// An endpoint has ended, by its own word or, as one that is dead and can't hear us, by its process's end.
    fn gone(&mut self, endpoint: EndpointId, dead: bool) {
        self.suspects.remove(&endpoint);
        for peer in self.peers_at(endpoint) {
            if let Some(peer) = self.peers.get_mut(&peer) {
                peer.dead = dead;
            }
            self.lose(peer, &LostCause::Gone);
        }
        self.remove_guest(endpoint);
    }

    /// Begins the end: nothing more is posted, everybody is told, and what is in progress is awaited.
    fn end(&mut self, reply: SyncSender<()>) {
        self.stopping = Some(reply);
        let ops: Vec<OpId> = self.ops.keys().copied().collect();
        for op in ops {
            self.stop(op, TransferError::Disconnected);
        }
        let everybody: Vec<EndpointId> = self.net.remotes.keys().copied().collect();
        for endpoint in everybody {
            self.net.send(endpoint, &Frame::Bye);
        }
    }
}

fn watch_fd(watch: &Watch) -> Option<PollFd<'_>> {
    match watch {
        Watch::Process(fd) => Some(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)),
        Watch::Here | Watch::Elsewhere => None,
    }
}

fn has_ended(endpoint: EndpointId, watch: &Watch) -> bool {
    match watch {
        Watch::Here => !crate::live::is_live(endpoint),
        Watch::Process(fd) => {
            let mut fds = [PollFd::new(fd, PollFlags::IN)];
            poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
        }
        Watch::Elsewhere => false,
    }
}
