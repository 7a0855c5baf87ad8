//! The endpoint: registrations, connections and operations as their owner sees them. The work is the rails'.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_geometry::staged::CostModel;
use kvferry_geometry::units::RegionId;
use kvferry_transport::access::MAX_REGIONS;
use kvferry_transport::admit::admit;
use kvferry_transport::blob::{Blob, MAX_LANE};
use kvferry_transport::table::RegionTable;
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, LostCause, MemoryKind, OpId, Outcome, PeerId,
    PeerInfo, Region, RegisterError, Revocation, RevokeError, RevokeScope, Submission, SubmitError, TransferError,
    Transport, UnknownOp, UnknownPeer,
};

use crate::config::UcxConfig;
use crate::error::UcxError;
use crate::lane::{self, RailLane};
use crate::mailbox::Mailbox;
use crate::part::{KeyTable, Part, Place, RailPart};
use crate::rail::{self, Started};
use crate::shared::{Callee, Command, Mapped, Report, Shared};
use crate::work::{Ours, State, Stop, Work};

const BACKEND: &str = "ucx";
/// The longest notification.
pub(crate) const MAX_NOTIFY: usize = 64 << 10;
/// The most operations in flight.
const MAX_IN_FLIGHT: usize = 1 << 14;
/// How long an operation that was told to stop may take; then it ends in doubt.
const STOP_WITHIN: Duration = Duration::from_secs(5);
/// How long dropping waits for the rails; one that is not done by then ends by itself, and keeps what it uses.
const DROP_WITHIN: Duration = Duration::from_secs(3);

/// One rank's endpoint over UCX. See the [crate's text](crate) for what it guarantees, and [`Transport`] for how it is driven.
pub struct UcxTransport {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    rails: Vec<RailInfo>,
    capabilities: Capabilities,
    addresses: Vec<Vec<u8>>,
    regions: BTreeMap<RegionId, Registration>,
    /// Bytes of our part of the blob.
    part_len: usize,
    peers: BTreeMap<PeerId, Peer>,
    ops: BTreeMap<OpId, Op>,
    events: VecDeque<Event>,
    /// A rail whose thread has died: nothing goes on after that.
    dead: Option<usize>,
    next: Next,
}

/// What a rail uses.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RailInfo {
    /// The devices that it was given; empty: as UCX chose.
    pub devices: Vec<String>,
    /// Transport and device of each of its lanes, as UCX chose them for a connection inside this process.
    pub lanes: Vec<(String, String)>,
}

struct Next {
    peer: u64,
    op: u64,
    key: u64,
    home: usize,
}

struct Registration {
    mapped: Weak<Mapped>,
    key: u64,
    /// Packed, of each rail.
    keys: Vec<Vec<u8>>,
    /// Our operations that name it and have not ended.
    named: usize,
}

struct Peer {
    info: PeerInfo,
    /// The lanes of each rail that is up.
    up: Vec<Option<Vec<RailLane>>>,
    told_up: bool,
    lost: Option<LostCause>,
    told_lost: bool,
    closing: bool,
    /// Operations that have not ended.
    open: usize,
    /// Those of them that wait for the lane, oldest first.
    waiting: Vec<Arc<Work>>,
}

struct Op {
    work: Arc<Work>,
    peer: PeerId,
    /// When it must have ended, once it was told to stop and a step has seen it.
    until: Option<Duration>,
}

impl std::fmt::Debug for UcxTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UcxTransport")
            .field("id", &self.shared.id)
            .field("rails", &self.rails)
            .field("peers", &self.peers.len())
            .field("operations", &self.ops.len())
            .finish_non_exhaustive()
    }
}

impl UcxTransport {
    /// Opens an endpoint: starts its rails, and finds out whether their transports can do what is needed.
    ///
    /// # Errors
    /// A setting out of its range or refused by UCX, transports or devices that are not there, transports that can't carry
    /// messages, or what the system refused.
    pub fn new(config: UcxConfig) -> Result<Self, UcxError> {
        config.check()?;
        let mut random = [0u8; 32];
        getrandom::fill(&mut random).map_err(UcxError::system("random bytes"))?;
        let mut id = [0; 16];
        let mut token = [0; 16];
        id.copy_from_slice(&random[..16]);
        token.copy_from_slice(&random[16..]);
        let devices: Vec<_> = config.rails.iter().map(|rail| rail.devices.clone()).collect();
        let mailboxes: Result<Arc<[Mailbox]>, _> = devices.iter().map(|_| Mailbox::new()).collect();
        let mailboxes = mailboxes.map_err(UcxError::system("an eventfd"))?;
        let shared = Shared::new(config.endpoint.unwrap_or(EndpointId::new(id)), token, config, mailboxes)
            .map_err(UcxError::system("an eventfd"))?;
        let mut capabilities = Capabilities::host(BACKEND);
        capabilities.max_notify = MAX_NOTIFY;
        capabilities.max_in_flight = MAX_IN_FLIGHT;
        capabilities.revocation = Revocation::Fences;
        capabilities.cost = cost(devices.len());
        let mut endpoint = Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
            rails: Vec::new(),
            capabilities,
            addresses: Vec::new(),
            regions: BTreeMap::new(),
            part_len: 0,
            peers: BTreeMap::new(),
            ops: BTreeMap::new(),
            events: VecDeque::new(),
            dead: None,
            next: Next { peer: 0, op: 0, key: 0, home: 0 },
        };
        // All at once: most of the time goes into UCX's look around. Those that started are ended by the drop if one fails.
        let starting = (0..devices.len()).map(|index| endpoint.start(index)).collect::<Result<Vec<_>, _>>()?;
        for (started, devices) in starting.into_iter().zip(devices) {
            let died = |_| UcxError::System { what: "a thread", reason: "it ended at once".to_owned() };
            let Started { address, transports } = started.recv().map_err(died)??;
            endpoint.part_len += address.len() + 8;
            endpoint.addresses.push(address);
            endpoint.rails.push(RailInfo { devices, lanes: transports });
        }
        endpoint.part_len += 64;
        Ok(endpoint)
    }

    /// The rails, and what UCX chose for each.
    #[must_use]
    pub fn rails(&self) -> &[RailInfo] {
        &self.rails
    }

    /// Breaks the lane of a connection at a rail, or the ways back to all its guests.
    #[cfg(test)]
    pub(crate) fn break_for_tests(&self, rail: usize, conn: Option<PeerId>) {
        self.shared.mailboxes[rail].post(Command::Break { conn: conn.map(PeerId::get) });
    }

    #[cfg(test)]
    pub(crate) fn shared_for_tests(&self) -> &Shared {
        &self.shared
    }

    fn start(&mut self, index: usize) -> Result<Receiver<Result<Started, UcxError>>, UcxError> {
        let (send, receive) = mpsc::sync_channel(1);
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new()
            .name(format!("kvferry-ucx-{index}"))
            .spawn(move || rail::main(index, &shared, &send))
            .map_err(UcxError::system("a thread"))?;
        self.threads.push(thread);
        Ok(receive)
    }

    /// Gives every rail an order.
    fn order(&self, mut command: impl FnMut() -> Command) {
        self.shared.mailboxes.iter().for_each(|mailbox| mailbox.post(command()));
    }

    /// Registers memory at every rail; the packed keys.
    fn map(&self, key: u64, region: &Region) -> Result<Vec<Vec<u8>>, String> {
        let mut replies = Vec::with_capacity(self.rails.len());
        self.order(|| {
            let (reply, receive) = mpsc::sync_channel(1);
            replies.push(receive);
            Command::Map { key, region: region.clone(), reply }
        });
        let ended = || "its thread has ended".to_owned();
        let each = replies.iter().enumerate().map(|(rail, reply)| {
            reply.recv().unwrap_or_else(|_| Err(ended())).map_err(|reason| format!("at rail {rail}: {reason}"))
        });
        // All are awaited before one that failed is reported.
        each.collect::<Vec<_>>().into_iter().collect()
    }

    /// Waits until the rails have done everything that was ordered so far.
    fn settle(&self) {
        let mut replies = Vec::with_capacity(self.rails.len());
        self.order(|| {
            let (reply, receive) = mpsc::sync_channel(1);
            replies.push(receive);
            Command::Ping { reply }
        });
        // A rail that has ended holds nothing.
        replies.iter().for_each(|reply| reply.recv().unwrap_or(()));
    }

    fn part(&self) -> Part {
        let mut tables: Vec<KeyTable<'_>> = self.addresses.iter().map(|_| KeyTable::default()).collect();
        let books = self.shared.books();
        let regions = books.table.iter().map(|(id, region)| {
            let keys: &[Vec<u8>] = self.regions.get(&id).map_or(&[], |r| &r.keys);
            let keys = tables.iter_mut().zip(keys).map(|(table, key)| table.index(key)).collect();
            Place { address: region.address() as u64, keys }
        });
        let regions = regions.collect();
        let rails = self.addresses.iter().zip(tables);
        let rails = rails.map(|(address, table)| RailPart { address: address.clone(), keys: table.keys }).collect();
        Part { token: self.shared.token, process: self.shared.process, rails, regions }
    }

    fn heed(&mut self, report: Report) {
        match report {
            Report::Up { peer: id, rail, lanes } => {
                let Some(peer) = self.peers.get_mut(&id) else { return };
                if let Some(slot) = peer.up.get_mut(rail) {
                    *slot = Some(lanes);
                }
                if peer.up.iter().all(Option::is_some) && !peer.told_up && peer.lost.is_none() && !peer.closing {
                    peer.told_up = true;
                    peer.info.lane = lane::merged(peer.up.iter().map(|lanes| lanes.as_deref().unwrap_or_default()));
                    self.events.push_back(Event::Connected { peer: id });
                    for work in std::mem::take(&mut peer.waiting) {
                        self.shared.mailboxes[work.home].post(Command::Begin(work));
                    }
                }
            }
            Report::Lost { peer: id, cause } => {
                let Some(peer) = self.peers.get_mut(&id) else { return };
                if peer.lost.is_some() {
                    return;
                }
                peer.lost = Some(cause.clone());
                self.ops.values().filter(|op| op.peer == id).for_each(|op| op.work.stop(Stop::Lost));
                self.order(|| Command::Lose { conn: id.get(), cause: cause.clone() });
                self.end_waiting(id, &TransferError::PeerLost(cause));
                self.stir(id);
            }
            Report::Ended { op, outcome } => self.end(OpId::new(op), outcome),
            Report::Dead { rail } => {
                let cause = LostCause::Lane(format!("rail {rail} of this endpoint has died; open another endpoint"));
                for op in self.ops.keys().copied().collect::<Vec<_>>() {
                    self.end(op, Outcome::InDoubt(TransferError::PeerLost(cause.clone())));
                }
                for peer in self.peers.keys().copied().collect::<Vec<_>>() {
                    self.heed(Report::Lost { peer, cause: cause.clone() });
                }
                self.dead = Some(rail);
            }
            Report::Notice { from, payload } => self.events.push_back(Event::Notification { from, payload }),
        }
    }

    /// Ends the operations that wait for a lane that doesn't come.
    fn end_waiting(&mut self, id: PeerId, error: &TransferError) {
        let waiting = self.peers.get_mut(&id).map(|peer| std::mem::take(&mut peer.waiting)).unwrap_or_default();
        for work in waiting {
            self.end(OpId::new(work.op), Outcome::Failed(error.clone()));
        }
    }

    fn end(&mut self, id: OpId, outcome: Outcome) {
        // One that ended in doubt may end once more.
        let Some(op) = self.ops.remove(&id) else { return };
        for ours in &op.work.ours {
            if let Some(registration) = self.regions.get_mut(&ours.id) {
                registration.named -= 1;
            }
        }
        self.events.push_back(Event::Completed { op: id, peer: op.peer, outcome });
        if let Some(peer) = self.peers.get_mut(&op.peer) {
            peer.open -= 1;
            self.stir(op.peer);
        }
    }

    /// Tells of a lost peer, and forgets a disconnected one, once its operations have ended.
    fn stir(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.open == 0) else { return };
        if peer.closing {
            self.peers.remove(&id);
        } else if let Some(cause) = peer.lost.clone().filter(|_| !peer.told_lost) {
            peer.told_lost = true;
            self.events.push_back(Event::PeerLost { peer: id, cause });
        }
    }

    /// Ends in doubt what was told to stop and hasn't; when the next is due.
    fn watch_stopping(&mut self, now: Duration) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        let mut late = Vec::new();
        for (id, op) in self.ops.iter_mut().filter(|(_, op)| op.work.stopped()) {
            let until = *op.until.get_or_insert(now + STOP_WITHIN);
            if until <= now {
                late.push(*id);
            } else {
                next = Some(next.map_or(until, |next| next.min(until)));
            }
        }
        for id in late {
            let Some(op) = self.ops.get(&id) else { continue };
            let lost = self.peers.get(&op.peer).and_then(|peer| peer.lost.clone()).map(TransferError::PeerLost);
            let error = op.work.stop_error().or(lost).unwrap_or(TransferError::Cancelled);
            self.end(id, Outcome::InDoubt(error));
        }
        next
    }
}

impl Transport for UcxTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn endpoint(&self) -> EndpointId {
        self.shared.id
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.shared.books().table.check(&region, &self.capabilities)?;
        let refused = |reason| RegisterError::Refused { backend: BACKEND, len: region.len(), reason };
        let key = self.next.key;
        self.next.key += 1;
        let mapped = Arc::new(Mapped { key, mailboxes: self.shared.mailboxes.clone(), _region: region.clone() });
        let keys = self.map(key, &region).map_err(refused)?;
        let part_len = self.part_len + 8 + keys.iter().map(|key| 6 + key.len()).sum::<usize>();
        if part_len > MAX_LANE {
            return Err(RegisterError::TooMany { limit: self.regions.len() });
        }
        let start = NonNull::new(region.as_ptr()).ok_or_else(|| refused("it is at address 0".to_owned()))?;
        let len = usize::try_from(region.len().get()).map_err(|e| refused(e.to_string()))?;
        // SAFETY: the same bytes as `region`'s, whose promises hold while its owner lives, which the new owner holds.
        let held = unsafe { Region::from_raw(start, len, MemoryKind::Host, mapped.clone()) };
        let id = self.shared.books().table.register(held, &self.capabilities)?;
        self.part_len = part_len;
        let registration = Registration { mapped: Arc::downgrade(&mapped), key, keys, named: 0 };
        self.regions.insert(id, registration);
        Ok(id)
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), DeregisterError> {
        let busy = self.regions.get(&id).map_or(0, |registration| registration.named);
        // Bound before it is dropped: the rails need the lock.
        let region = self.shared.books().table.deregister(id, busy)?;
        drop(region);
        if let Some(registration) = self.regions.remove(&id) {
            self.part_len -= 8 + registration.keys.iter().map(|key| 6 + key.len()).sum::<usize>();
            // Otherwise a peer's operation, or one of ours in doubt, keeps it until it ends.
            if registration.mapped.strong_count() == 0 {
                self.settle();
            }
        }
        Ok(())
    }

    fn blob(&self) -> Vec<u8> {
        let lane = self.part().encode();
        let books = self.shared.books();
        Blob {
            backend: BACKEND.to_owned(),
            endpoint: self.shared.id,
            generation: books.table.generation(),
            regions: books.table.lens(),
            lane,
        }
        .encode()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let blob = Blob::decode(blob)?;
        if blob.backend != BACKEND {
            return Err(ConnectError::WrongBackend { expected: BACKEND, got: blob.backend });
        }
        let part = Part::decode(&blob.lane, blob.regions.iter().map(|(_, len)| len.get()))
            .map_err(|reason| ConnectError::BadLane { backend: BACKEND, reason })?;
        let endpoint = blob.endpoint;
        if endpoint == self.shared.id {
            return Err(ConnectError::Itself);
        }
        let same = |(_, peer): &(&PeerId, &Peer)| !peer.closing && peer.info.endpoint == endpoint;
        if let Some((peer, _)) = self.peers.iter().find(same) {
            return Err(ConnectError::AlreadyConnected { endpoint, peer: *peer });
        }
        if let Some(rail) = self.dead {
            let reason = format!("rail {rail} of this endpoint has died; open another endpoint");
            return Err(ConnectError::Unreachable { endpoint, reason });
        }
        let id = PeerId::new(self.next.peer);
        self.next.peer += 1;
        let regions = blob.regions.iter().map(|(id, _)| *id).collect();
        let callee = Arc::new(Callee { endpoint, generation: blob.generation, regions, part });
        self.order(|| Command::Connect { conn: id.get(), callee: callee.clone() });
        let info = PeerInfo { endpoint, regions: blob.regions.into(), lane: lane::intended() };
        let up = self.rails.iter().map(|_| None).collect();
        let peer = Peer {
            info,
            up,
            told_up: false,
            lost: None,
            told_lost: false,
            closing: false,
            open: 0,
            waiting: Vec::new(),
        };
        self.peers.insert(id, peer);
        Ok(id)
    }

    fn disconnect(&mut self, id: PeerId) -> Result<(), UnknownPeer> {
        let peer = self.peers.get_mut(&id).filter(|peer| !peer.closing).ok_or(UnknownPeer(id))?;
        peer.closing = true;
        self.events.retain(|event| !event.is_of_connection(id));
        self.ops.values().filter(|op| op.peer == id).for_each(|op| op.work.stop(Stop::Disconnected));
        self.order(|| Command::Disconnect { conn: id.get() });
        self.end_waiting(id, &TransferError::Disconnected);
        self.stir(id);
        Ok(())
    }

    fn peer(&self, id: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.peers.get(&id).filter(|peer| !peer.closing).map(|peer| peer.info.clone()).ok_or(UnknownPeer(id))
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let id = submission.peer;
        let unknown = SubmitError::UnknownPeer { peer: id };
        let peer = self.peers.get_mut(&id).filter(|peer| !peer.closing).ok_or(unknown)?;
        if let Some(cause) = &peer.lost {
            return Err(SubmitError::PeerLost { peer: id, cause: cause.clone() });
        }
        let books = self.shared.books();
        let ours = |region| books.table.len_of(region);
        let named = admit(&submission, &self.capabilities, self.ops.len(), ours, &peer.info)?;
        if named.peers.len() > MAX_REGIONS {
            let reason = format!(
                "it names {} of the peer's regions, an operation may name {MAX_REGIONS}; split it",
                named.peers.len()
            );
            return Err(SubmitError::Refused { reason });
        }
        let ours: Vec<Ours> = named
            .ours
            .iter()
            .filter_map(|id| {
                let key = self.regions.get(id)?.key;
                Some(Ours { id: *id, region: books.table.get(*id)?.clone(), key })
            })
            .collect();
        drop(books);
        for ours in &ours {
            if let Some(registration) = self.regions.get_mut(&ours.id) {
                registration.named += 1;
            }
        }
        let op = self.next.op;
        self.next.op += 1;
        let home = self.next.home % self.rails.len();
        self.next.home = home + 1;
        peer.open += 1;
        let work = Arc::new(Work {
            op,
            conn: id.get(),
            kind: submission.kind,
            batch: submission.batch,
            notify: submission.notify,
            ours,
            peers: named.peers,
            home,
            state: State::default(),
        });
        if peer.told_up {
            self.shared.mailboxes[home].post(Command::Begin(work.clone()));
        } else {
            peer.waiting.push(work.clone());
        }
        self.ops.insert(OpId::new(op), Op { work, peer: id, until: None });
        Ok(OpId::new(op))
    }

    fn cancel(&mut self, id: OpId) -> Result<(), UnknownOp> {
        let op = self.ops.get(&id).ok_or(UnknownOp(id))?;
        let peer = self.peers.get_mut(&op.peer);
        if let Some(peer) = peer.filter(|peer| peer.waiting.iter().any(|work| work.op == id.get())) {
            peer.waiting.retain(|work| work.op != id.get());
            self.end(id, Outcome::Failed(TransferError::Cancelled));
            return Ok(());
        }
        op.work.stop(Stop::Cancelled);
        self.order(|| Command::Stopped(op.work.clone()));
        Ok(())
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        self.shared.books().revoke(scope)
    }

    fn step(&mut self, now: Duration) -> Option<Duration> {
        for report in self.shared.take_reports() {
            self.heed(report);
        }
        self.watch_stopping(now)
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        !self.events.is_empty() || self.shared.wake.wait(timeout)
    }
}

/// Round numbers of cma on this project's machines: 1.2 us and 3.4 GB/s a thread, and as many threads as there are rails and
/// processors; a thread of ours wakes up twice more for a second step.
fn cost(rails: usize) -> CostModel {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = u64::try_from(rails.min(processors)).unwrap_or(1);
    CostModel {
        descriptor_ns: 1_200 / threads,
        wire_bytes_per_us: 3_400 * threads,
        stage_ns: 50_000,
        ..CostModel::default()
    }
}

impl Drop for UcxTransport {
    fn drop(&mut self) {
        self.ops.values().for_each(|op| op.work.stop(Stop::Disconnected));
        self.ops.clear();
        // From here on nothing more is granted; what peers have open keeps what it uses.
        let table = std::mem::replace(&mut self.shared.books().table, RegionTable::new());
        drop(table);
        self.order(|| Command::Quit);
        let start = Instant::now();
        while start.elapsed() < DROP_WITHIN && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_micros(200));
        }
        // One that isn't done waits for peers that are inside of our memory, or for UCX; it ends when they are done.
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            thread.join().unwrap_or(());
        }
    }
}
