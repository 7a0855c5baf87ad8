//! The thread that owns the agent: it makes every call of NIXL's, keeps the state of connections and operations, and waits.
//!
//! Why a thread of our own and no direct calls: NIXL with its locks (`thread_sync`) would let several threads in, but nobody is told
//! when something has arrived or ended, so somebody must look, and go on looking after `submit` returned. One thread that looks,
//! without NIXL's own progress thread and without locks inside UCX, is the cheapest of the ways to do that.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use kvferry_transport::{EndpointId, LostCause, OpId, PeerId, Region, TransferError};
use rustix::event::{PollFd, PollFlags};

use crate::config::NixlConfig;
use crate::feed::Lists;
use crate::frame::Frame;
use crate::shared::{Command, Shared};
use crate::sys::Fail;
use flights::{Flight, Ghost, Orphan};
use guests::Guest;
pub(crate) use net::Net;
use ops::{Op, Stage};
use peers::Peer;

mod flights;
mod guests;
mod net;
mod ops;
mod peers;

/// The first pause; each is twice the one before.
const FIRST_NAP: Duration = Duration::from_micros(10);
/// How often peers are looked after.
const LOOK: Duration = Duration::from_millis(5);
/// How long an operation that was told to stop may take; then it ends in doubt.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// A longer time between two looks than this and the pause, and this thread was held up itself.
const HELD_UP: Duration = Duration::from_millis(100);
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
    /// Operations that ended in doubt and whose ends the peers were not told.
    orphans: HashMap<OpId, Orphan>,
    ghosts: Vec<Ghost>,
    /// A request that the plugin's threads shared has failed. NIXL gave it up, with parts of it still queued where nobody makes
    /// progress any more, and UCX aborts the process if such a worker is destroyed.
    stuck: bool,
    /// Those that something could not be sent to, or whose requests fail, and until when their process's end is awaited as the cause.
    suspects: HashMap<EndpointId, Instant>,
    stopping: Option<SyncSender<()>>,
    inbox: Vec<(EndpointId, Vec<u8>)>,
    /// Questions that wait until the endpoint has taken notifications.
    deferred: VecDeque<(EndpointId, Vec<u8>)>,
    looked: Instant,
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
            stuck: false,
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
            if self.stopping.is_some() && self.flights.is_empty() && self.is_untouched() {
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
        self.farewell();
        let end = Instant::now() + FAREWELL;
        while Instant::now() < end {
            let _ = self.net.agent.notifications(&mut self.net.notifications, |_, _| {});
            std::thread::yield_now();
        }
        let reply = self.stopping.take();
        if self.stuck {
            self.abandon();
        } else {
            // The agent ends before the memory that is registered with it.
            let Self { net, memory, ghosts, .. } = self;
            drop(net);
            drop((memory, ghosts));
        }
        if let Some(reply) = reply {
            let _ = reply.send(());
        }
    }

    /// Ends without the agent's end: it stays behind. Memory is let go if NIXL ends its registration, and what a peer that is not known
    /// to have ended may still touch is kept with the agent.
    fn abandon(mut self) {
        let serials: Vec<u64> = self.memory.keys().copied().collect();
        serials.into_iter().for_each(|serial| self.deregister(serial));
        let Self { net, memory, mut ghosts, .. } = self;
        ghosts.retain(|ghost| !ghost.dead);
        // Its doorbell and what watches others end.
        std::mem::forget((net.agent, memory, ghosts));
    }

    /// Whether no guest touches our memory any more. Those on other hosts that can't be reached will never say so, but can't
    /// once NIXL has ended the registrations, which it does before the memory goes.
    fn is_untouched(&self) -> bool {
        self.guests.iter().all(|(e, g)| g.open == 0 || (g.cut && !self.net.is_watched(*e)))
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

    /// Lets NIXL make progress, and takes what others sent into the inbox.
    pub(super) fn listen(&mut self) {
        let (inbox, mut foreign) = (&mut self.inbox, 0);
        // A failure of NIXL here is that of one of its engines, and shows in what is sent or requested as well.
        let _ =
            self.net.agent.notifications(&mut self.net.notifications, |name, bytes| {
                match crate::lane::endpoint_of(name.to_bytes()) {
                    Some(from) => inbox.push((from, bytes.to_vec())),
                    None => foreign += 1,
                }
            });
        if foreign > 0 {
            self.shared.telemetry().foreign += foreign;
        }
    }

    /// Does what others sent.
    fn hear(&mut self) -> bool {
        self.listen();
        let mut inbox = std::mem::take(&mut self.inbox);
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
        let gap = now.duration_since(self.looked);
        if gap > HELD_UP + self.longest_nap() {
            self.forgive(gap);
        }
        self.looked = now;
        let mut did = false;
        for endpoint in self.net.found_ended() {
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
        self.net.bury(now);
        self.lay_ghosts(now);
        did
    }

    /// For a time nobody was heard, as we did not listen: in a long call of NIXL's, or stopped. It is not counted against anybody.
    fn forgive(&mut self, gap: Duration) {
        self.peers.values_mut().for_each(|peer| peer.forgive(gap));
        self.guests.values_mut().for_each(|guest| guest.heard += gap);
        self.suspects.values_mut().for_each(|until| *until += gap);
        for op in self.ops.values_mut() {
            if let Stage::Draining(_, since) = &mut op.stage {
                *since += gap;
            }
        }
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
        let mut fds = self.net.watched();
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

    /// Something could not be sent to an endpoint. If its process can be watched, then its end may be the cause, and shows a little
    /// later: the system takes a killed process's memory down before it says that it has ended.
    fn unreachable(&mut self, endpoint: EndpointId) {
        if self.net.is_dead(endpoint) {
            self.gone(endpoint, true);
        } else if self.net.is_given_up(endpoint) {
            // All that follows from it was done. Its end, if it is seen, does the rest.
        } else if self.net.is_watched(endpoint) {
            self.suspects.entry(endpoint).or_insert_with(|| Instant::now() + self.config.silence);
        } else {
            self.broken(endpoint);
        }
    }

    /// The connection to an endpoint is broken.
    fn broken(&mut self, endpoint: EndpointId) {
        self.suspects.remove(&endpoint);
        self.net.ended(endpoint, false);
        let cause =
            LostCause::Lane("NIXL can't reach it any more: its agent is gone or the network is broken".to_owned());
        for peer in self.peers_at(endpoint) {
            self.lose(peer, &cause);
        }
        // What it was granted goes its own way, which may well be whole: what it holds stays until its end is seen or told.
        self.cut_guest(endpoint);
    }

    /// An endpoint has ended: it has said that nothing of it is in progress any more or, if it is dead, was seen to have ended.
    fn gone(&mut self, endpoint: EndpointId, dead: bool) {
        self.suspects.remove(&endpoint);
        self.net.ended(endpoint, dead);
        if dead {
            // Nobody is left who waits to be told of their ends.
            self.orphans.retain(|_, orphan| orphan.endpoint != endpoint || orphan.left > 0);
            self.ghosts.iter_mut().filter(|g| g.endpoint == endpoint).for_each(|g| g.dead = true);
        }
        for peer in self.peers_at(endpoint) {
            if let Some(peer) = self.peers.get_mut(&peer) {
                peer.dead |= dead;
            }
            self.lose(peer, &LostCause::Gone);
        }
        self.remove_guest(endpoint);
    }

    /// An endpoint is about to end: our operations on it end, and it waits for that. What it was granted may still be moving.
    fn closes(&mut self, endpoint: EndpointId) {
        for peer in self.peers_at(endpoint) {
            self.lose(peer, &LostCause::Gone);
        }
    }

    /// Tells those whose memory nothing of ours touches any more; the others see our end.
    fn farewell(&mut self) {
        for endpoint in self.net.everybody() {
            if !self.orphans.values().any(|orphan| orphan.endpoint == endpoint) {
                self.net.send(endpoint, &Frame::Bye);
            }
        }
    }

    /// Begins the end: nothing more is posted, everybody is told, and what is in progress is awaited.
    fn end(&mut self, reply: SyncSender<()>) {
        self.stopping = Some(reply);
        let ops: Vec<OpId> = self.ops.keys().copied().collect();
        for op in ops {
            self.stop(op, TransferError::Disconnected);
        }
        for endpoint in self.net.everybody() {
            self.net.send(endpoint, &Frame::Closing);
        }
    }
}
