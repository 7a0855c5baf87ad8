//! A connection that we made: from dialling to its end. It asks for the peer's regions when an operation first needs them,
//! keeps them mapped as long as the connection lives, and sends notifications in order.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::blob::Blob;
use kvferry_transport::{
    EndpointId, Lane, LaneKind, LostCause, Measured, OpId, PeerId, PeerInfo, Stats, TransferError,
};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};

use crate::board::PeerBoard;
use crate::frame::{Access, Frame, Grant, VERSION};
use crate::job::{PeerSide, Place, process_error};
use crate::lane::LanePart;
use crate::poller::{Poller, Source};
use crate::process::{Kernel, Process, ProcessError};
use crate::refusal::{Surroundings, explain};
use crate::sock::{self, Lack, Passed, Received};
use crate::window::Window;

/// Frames read from one peer in one step.
const FRAMES: usize = 256;
/// How long until the next try when a peer's listener is full.
const REDIAL: Duration = Duration::from_millis(5);

/// Who we are towards peers.
pub(crate) struct Caller<'a> {
    /// Our effective user.
    pub(crate) user: u32,
    pub(crate) id: EndpointId,
    pub(crate) board: std::os::fd::BorrowedFd<'a>,
    pub(crate) other_users: bool,
    pub(crate) answer_within: Duration,
}

/// A connection's state.
enum State {
    /// The peer's listener had no room.
    Dialling { next: Duration },
    /// The hello is sent.
    Greeting,
    /// The lane is up.
    Up(Up),
    /// It broke.
    Lost { cause: LostCause, told: bool },
}

struct Up {
    board: PeerBoard,
    process: Process,
    /// Readable once the peer's process has ended.
    pidfd: Option<OwnedFd>,
    /// Whether the kernel lets us copy from the peer's memory; asked for when it first matters.
    probe: Option<Result<(), TransferError>>,
}

enum Wish {
    Asked,
    Ready(Place),
    Failed(TransferError),
}

enum Out {
    Ask(RegionId, Access),
    Notify(OpId, Vec<u8>),
}

/// What came of reading or sending.
pub(crate) enum News {
    /// The lane is up.
    Up,
    /// Grants came, so that waiting operations may go on.
    Granted,
    /// This notification is on its way.
    Sent(OpId),
    /// The connection is to be given up.
    Lost(LostCause),
}

/// What an operation gets that needs regions of the peer.
pub(crate) enum Needs {
    Ready(Vec<(RegionId, Place)>),
    Wait,
    Failed(TransferError),
}

/// A connection that we made.
pub(crate) struct Link {
    peer: PeerId,
    generation: u64,
    part: LanePart,
    /// What is told of the connection; its regions are those of the blob.
    info: PeerInfo,
    /// Jobs hold it too: peers take a closed socket as proof that we touch nothing of theirs any more.
    socket: Arc<OwnedFd>,
    user: u32,
    pid: i32,
    since: Option<Duration>,
    state: State,
    outbox: VecDeque<Out>,
    blocked: bool,
    wishes: HashMap<(RegionId, Access), Wish>,
    /// How many of them are mapped.
    mapped: usize,
    /// Regions that came as addresses, whatever the peer said at first of how many there are.
    addressed: BTreeSet<RegionId>,
    kernel: Arc<dyn Kernel>,
}

impl Link {
    /// A connection that dials at once.
    pub(crate) fn new(peer: PeerId, blob: Blob, part: LanePart, kernel: Arc<dyn Kernel>) -> Result<Self, Errno> {
        let socket = Arc::new(sock::socket()?);
        let lane = lane(part.plain as usize, blob.regions.len(), None);
        Ok(Self {
            peer,
            generation: blob.generation,
            part,
            info: PeerInfo { endpoint: blob.endpoint, regions: blob.regions.into(), lane },
            socket,
            user: 0,
            pid: 0,
            since: None,
            state: State::Dialling { next: Duration::ZERO },
            outbox: VecDeque::new(),
            blocked: false,
            wishes: HashMap::new(),
            mapped: 0,
            addressed: BTreeSet::new(),
            kernel,
        })
    }

    pub(crate) fn endpoint(&self) -> EndpointId {
        self.info.endpoint
    }

    pub(crate) fn lost(&self) -> Option<&LostCause> {
        match &self.state {
            State::Lost { cause, .. } => Some(cause),
            _ => None,
        }
    }

    /// The cause of its loss, if nobody was told yet; from now on somebody was.
    pub(crate) fn tell_loss(&mut self) -> Option<LostCause> {
        match &mut self.state {
            State::Lost { cause, told } if !*told => {
                *told = true;
                Some(cause.clone())
            }
            _ => None,
        }
    }

    /// How many mappings it holds.
    pub(crate) fn mappings(&self) -> usize {
        self.mapped
    }

    pub(crate) fn info(&self) -> &PeerInfo {
        &self.info
    }

    /// Takes the time of an operation that succeeded into what is told of the lane: the best rate and the shortest time so far.
    #[allow(clippy::cast_precision_loss, reason = "a rate for people and policies")]
    pub(crate) fn measure(&mut self, stats: Stats, took: Duration) {
        if took.is_zero() || stats.bytes == Bytes::ZERO {
            return;
        }
        let rate = stats.bytes.get() as f64 / took.as_secs_f64();
        let best = self.info.lane.measured.get_or_insert(Measured { bytes_per_second: rate, per_operation: took });
        best.bytes_per_second = best.bytes_per_second.max(rate);
        best.per_operation = best.per_operation.min(took);
    }

    /// Dials and greets. `Errno::AGAIN` is no failure: another try follows.
    pub(crate) fn dial(&mut self, now: Duration, us: &Caller<'_>, poller: &Poller) -> Result<(), LostCause> {
        let broke = |what: &str, e: Errno| LostCause::Lane(format!("{what}: {e}"));
        match sock::connect(&self.socket, &self.part.name) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => {
                self.state = State::Dialling { next: now.saturating_add(REDIAL) };
                return Ok(());
            }
            Err(Errno::CONNREFUSED) => return Err(LostCause::Gone),
            Err(e) => return Err(broke("connecting to the peer's socket", e)),
        }
        let peer = sock::credentials(&self.socket).map_err(|e| broke("asking for the peer's process", e))?;
        let ours = us.user;
        if peer.user != ours && !us.other_users {
            return Err(LostCause::Lane(format!(
                "the peer's socket is of user {}, we are {ours}; run both as one user",
                peer.user
            )));
        }
        self.user = peer.user;
        self.pid = peer.pid;
        poller.add(&self.socket, Source::Link(self.peer)).map_err(|e| broke("watching the socket", e))?;
        self.state = State::Greeting;
        let hello = Frame::Hello { version: VERSION, target: self.info.endpoint, token: self.part.token, from: us.id };
        match sock::send(&self.socket, &hello.encode(), &[], Some(us.board)) {
            // What the peer said before it closed is still to be read.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            // Too many descriptors are under way. A connection without a hello is of no use.
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => {
                poller.remove(&self.socket);
                self.socket = Arc::new(sock::socket().map_err(|e| broke("making a socket", e))?);
                self.state = State::Dialling { next: now.saturating_add(REDIAL) };
                Ok(())
            }
            Err(e) => Err(broke("greeting the peer", e)),
        }
    }

    /// Tries again unless it is to wait, and gives up when the peer takes too long; gives the time of the next look.
    pub(crate) fn tick(
        &mut self,
        now: Duration,
        us: &Caller<'_>,
        poller: &Poller,
        wait: bool,
    ) -> Result<Option<Duration>, LostCause> {
        if matches!(self.state, State::Up(_) | State::Lost { .. }) {
            return Ok(None);
        }
        let until = self.since.get_or_insert(now).saturating_add(us.answer_within);
        if until <= now {
            return Err(LostCause::Lane(format!("the peer did not answer within {:?}", us.answer_within)));
        }
        if let State::Dialling { next } = &mut self.state
            && *next <= now
        {
            if wait {
                *next = now.saturating_add(REDIAL);
            } else {
                self.dial(now, us, poller)?;
            }
        }
        Ok(Some(match self.state {
            State::Dialling { next } => next.min(until),
            _ => until,
        }))
    }

    /// Reads what the peer sent. `room` is how many more mappings there may be.
    pub(crate) fn read(&mut self, buffer: &mut [u8], poller: &Poller, mut room: usize) -> Vec<News> {
        let mut news = Vec::new();
        for _ in 0..FRAMES {
            let (len, fd) = match sock::receive(&self.socket, buffer) {
                Ok(Received::Frame(len, fd)) => (len, fd),
                Ok(Received::Nothing) => break,
                Ok(Received::Closed) => return lost(news, LostCause::Gone),
                Ok(Received::Improper(what)) => return lost(news, LostCause::Protocol(format!("it sent {what}"))),
                Err(e) => return lost(news, LostCause::Lane(format!("receiving: {e}"))),
            };
            let got = match Frame::decode(&buffer[..len]) {
                Ok(frame) => self.receive(frame, &fd, poller, &mut room),
                Err(e) => Err(LostCause::Protocol(format!("it sent {e}"))),
            };
            match got {
                Ok(got) => news.push(got),
                Err(cause) => return lost(news, cause),
            }
        }
        news
    }

    fn receive(&mut self, frame: Frame<'_>, fd: &Passed, poller: &Poller, room: &mut usize) -> Result<News, LostCause> {
        match (frame, &self.state) {
            (Frame::Refuse(text), State::Greeting) => Err(LostCause::Refused(text)),
            (Frame::Welcome { probe_at, probe }, State::Greeting) => self.welcome(probe_at, probe, fd, poller),
            (Frame::Grant { region, access, grant }, State::Up(_)) => self.granted(region, access, grant, fd, room),
            (frame, _) => Err(LostCause::Protocol(format!("it sent {} out of turn", name_of(&frame)))),
        }
    }

    fn welcome(&mut self, probe_at: u64, probe: [u8; 16], board: &Passed, poller: &Poller) -> Result<News, LostCause> {
        let board = board.fd().map_err(|lack| match lack {
            Lack::Missing => LostCause::Protocol(format!("its board {lack}")),
            Lack::NoRoom => LostCause::Lane(format!("its board {lack}")),
        })?;
        let board = PeerBoard::map(board).map_err(|e| LostCause::Protocol(format!("its board: {e}")))?;
        let pidfd = rustix::process::Pid::from_raw(self.pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if let Some(pidfd) = &pidfd {
            let watched = poller.add(pidfd, Source::Process(self.peer));
            watched.map_err(|e| LostCause::Lane(format!("watching the peer's process: {e}")))?;
        }
        let process = Process { pid: self.pid, probe_at, probe };
        self.state = State::Up(Up { board, process, pidfd, probe: None });
        let plain = self.part.plain as usize;
        if plain > 0
            && let Err(error) = self.probe()
            && plain >= self.info.regions.len()
        {
            // Not one of its regions can be reached.
            return Err(match error {
                TransferError::PeerLost(cause) => cause,
                other => LostCause::Lane(other.to_string()),
            });
        }
        Ok(News::Up)
    }

    /// Takes note that a region is plain, and gives whether the kernel lets us copy from it.
    fn addressed(&mut self, region: RegionId) -> Result<(), TransferError> {
        self.addressed.insert(region);
        let seen = u32::try_from(self.addressed.len()).unwrap_or(u32::MAX);
        self.part.plain = self.part.plain.max(seen);
        self.probe()
    }

    fn probe(&mut self) -> Result<(), TransferError> {
        let State::Up(up) = &mut self.state else { return Err(TransferError::PeerLost(LostCause::Gone)) };
        let (process, user, kernel, socket) = (up.process, self.user, &self.kernel, &self.socket);
        let ask = || match process.check(&**kernel) {
            // The number names nobody, but the peer is there: so it is hidden from us.
            Err(ProcessError::Errno(Errno::SRCH)) if !sock::gone(socket, up.pidfd.as_ref()) => {
                let at = Surroundings { peer_visible: Some(false), ..Surroundings::look(process.pid, user) };
                Err(TransferError::Lane { reason: explain(Errno::SRCH, &at) })
            }
            other => other.map_err(|e| process_error(e, process.pid, user)),
        };
        let probed = up.probe.get_or_insert_with(ask).clone();
        let measured = self.info.lane.measured;
        self.info.lane = lane(self.part.plain as usize, self.info.regions.len(), Some(probed.is_ok()));
        self.info.lane.measured = measured;
        probed
    }

    fn granted(
        &mut self,
        region: RegionId,
        access: Access,
        grant: Grant,
        fd: &Passed,
        room: &mut usize,
    ) -> Result<News, LostCause> {
        if !matches!(self.wishes.get(&(region, access)), Some(Wish::Asked)) {
            return Err(LostCause::Protocol(format!("it granted region {region}, which was not asked for")));
        }
        let wish = match grant {
            Grant::Stale => Wish::Failed(TransferError::Stale { region }),
            Grant::Denied(reason) => Wish::Failed(TransferError::Lane { reason: format!("the peer: {reason}") }),
            Grant::Map { offset, len } => match self.window(region, access, offset, len, fd, *room) {
                Ok(window) => {
                    *room -= 1;
                    self.mapped += 1;
                    Wish::Ready(Place::Mapped(Arc::new(window)))
                }
                Err(reason) => Wish::Failed(TransferError::Lane { reason }),
            },
            Grant::Address { start, len } => match self.addressed(region) {
                Err(error) => Wish::Failed(error),
                Ok(()) if start.checked_add(len).is_none() => {
                    return Err(LostCause::Protocol(format!(
                        "its region {region} passes the end of the address space"
                    )));
                }
                Ok(()) => match self.check_len(region, len) {
                    Ok(()) => Wish::Ready(Place::Remote { start, len }),
                    Err(reason) => Wish::Failed(TransferError::Lane { reason }),
                },
            },
        };
        self.wishes.insert((region, access), wish);
        Ok(News::Granted)
    }

    fn window(
        &self,
        region: RegionId,
        access: Access,
        offset: u64,
        len: u64,
        fd: &Passed,
        room: usize,
    ) -> Result<Window, String> {
        self.check_len(region, len)?;
        let fd = fd.fd().map_err(|lack| format!("the peer's region {region} {lack}"))?;
        if room == 0 {
            return Err("there are as many mappings of peers' regions as max_mappings allows".to_owned());
        }
        Window::map(fd, offset, len, access == Access::Write).map_err(|e| format!("the peer's region {region}: {e}"))
    }

    fn check_len(&self, region: RegionId, len: u64) -> Result<(), String> {
        let at = self.info.regions.binary_search_by_key(&region, |(id, _)| *id).ok();
        match at.and_then(|at| self.info.regions.get(at)) {
            Some((_, expected)) if *expected == Bytes::new(len) => Ok(()),
            other => {
                let expected = other.map_or(0, |(_, len)| len.get());
                Err(format!("the peer's region {region} has {len} bytes, its blob says {expected}"))
            }
        }
    }

    /// The places of regions, asking for those that are not there yet.
    pub(crate) fn places(&mut self, regions: &[RegionId], access: Access) -> Needs {
        if !matches!(self.state, State::Up(_)) {
            return Needs::Wait;
        }
        let mut places = Vec::with_capacity(regions.len());
        let mut wait = false;
        for region in regions {
            match self.wishes.get(&(*region, access)) {
                Some(Wish::Ready(place)) => places.push((*region, place.clone())),
                Some(Wish::Failed(error)) => return Needs::Failed(error.clone()),
                Some(Wish::Asked) => wait = true,
                None => {
                    self.wishes.insert((*region, access), Wish::Asked);
                    self.outbox.push_back(Out::Ask(*region, access));
                    wait = true;
                }
            }
        }
        if wait { Needs::Wait } else { Needs::Ready(places) }
    }

    /// Forgets what was refused, so that the next operation asks again: what a peer does not grant now, or what there was no
    /// room for here, may be granted or find room later. A region that is gone stays gone.
    pub(crate) fn forgive(&mut self) {
        self.wishes.retain(|_, wish| !matches!(wish, Wish::Failed(e) if !matches!(e, TransferError::Stale { .. })));
    }

    /// Forgets how a region was reached that turned out to be stale, so that its memory is not held.
    pub(crate) fn forget(&mut self, region: RegionId) {
        for access in [Access::Read, Access::Write] {
            if let Some(wish) = self.wishes.get_mut(&(region, access)) {
                self.mapped -= usize::from(matches!(wish, Wish::Ready(Place::Mapped(_))));
                *wish = Wish::Failed(TransferError::Stale { region });
            }
        }
    }

    /// What a job needs to know of the peer.
    pub(crate) fn side(&self) -> Option<PeerSide> {
        let State::Up(up) = &self.state else { return None };
        Some(PeerSide {
            board: up.board.clone(),
            generation: self.generation,
            process: Some(up.process),
            user: self.user,
            kernel: self.kernel.clone(),
            socket: self.socket.clone(),
        })
    }

    /// Whether the peer's endpoint is gone, as seen at this moment.
    pub(crate) fn is_gone(&self) -> bool {
        match &self.state {
            State::Up(up) => sock::gone(&self.socket, up.pidfd.as_ref()),
            _ => false,
        }
    }

    pub(crate) fn notify(&mut self, op: OpId, payload: Vec<u8>) {
        self.outbox.push_back(Out::Notify(op, payload));
    }

    /// Takes back a notification that was not sent yet.
    pub(crate) fn unnotify(&mut self, op: OpId) {
        self.outbox.retain(|out| !matches!(out, Out::Notify(id, _) if *id == op));
    }

    /// Sends what there is room for.
    pub(crate) fn flush(&mut self, poller: &Poller) -> Vec<News> {
        let mut news = Vec::new();
        if !matches!(self.state, State::Up(_)) {
            return news;
        }
        while let Some(out) = self.outbox.front() {
            let sent = match out {
                Out::Ask(region, access) => {
                    let (generation, region, access) = (self.generation, *region, *access);
                    sock::send(&self.socket, &Frame::Ask { generation, region, access }.encode(), &[], None)
                }
                Out::Notify(_, payload) => sock::send(&self.socket, &Frame::Notify(&[]).encode(), payload, None),
            };
            match sent {
                Ok(()) => {
                    if let Some(Out::Notify(op, _)) = self.outbox.pop_front() {
                        news.push(News::Sent(op));
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => return lost(news, LostCause::Gone),
                Err(e) => return lost(news, LostCause::Lane(format!("sending: {e}"))),
            }
        }
        let blocked = !self.outbox.is_empty();
        if blocked != self.blocked {
            self.blocked = blocked;
            if let Err(e) = poller.want(&self.socket, Source::Link(self.peer), true, blocked) {
                return lost(news, LostCause::Lane(format!("watching the socket: {e}")));
            }
        }
        news
    }

    /// Marks it as lost. Its socket and mappings stay until its operations have ended: peers take a closed socket as proof
    /// that we touch nothing of theirs any more.
    pub(crate) fn lose(&mut self, cause: LostCause, poller: &Poller) {
        if self.lost().is_some() {
            return;
        }
        poller.remove(&self.socket);
        if let State::Up(Up { pidfd: Some(pidfd), .. }) = &self.state {
            poller.remove(pidfd);
        }
        self.outbox.clear();
        self.state = State::Lost { cause, told: false };
    }

    /// Unmaps everything, and lets the peer know that we touch nothing of its, also if a child of a fork has the socket too. To
    /// be called when every operation has ended; jobs in doubt keep what they use, and the peer waiting.
    pub(crate) fn let_go(&mut self) {
        self.wishes.clear();
        self.mapped = 0;
        if Arc::strong_count(&self.socket) == 1 {
            sock::say_no_more(&self.socket);
        }
    }
}

/// The lane to a peer of whose regions so many are plain; `works` is whether the kernel copies from it, if it was asked.
fn lane(plain: usize, all: usize, works: Option<bool>) -> Lane {
    let works = match works {
        Some(true) => ", which works",
        Some(false) => ", which is refused",
        None => "",
    };
    let (kind, detail) = match plain {
        0 => (LaneKind::SharedMemory, "all regions mapped".to_owned()),
        plain if plain >= all => (LaneKind::CrossProcess, format!("all regions by process_vm_readv/writev{works}")),
        plain => {
            let detail = format!("{plain} of {all} regions by process_vm_readv/writev{works}, the others mapped");
            (LaneKind::SharedMemory, detail)
        }
    };
    Lane { kind, transports: Vec::new(), detail, measured: None }
}

fn lost(mut news: Vec<News>, cause: LostCause) -> Vec<News> {
    news.push(News::Lost(cause));
    news
}

fn name_of(frame: &Frame<'_>) -> &'static str {
    match frame {
        Frame::Hello { .. } => "a hello",
        Frame::Welcome { .. } => "a welcome",
        Frame::Refuse(_) => "a refusal",
        Frame::Ask { .. } => "a question",
        Frame::Grant { .. } => "a grant",
        Frame::Notify(_) => "a notification",
    }
}
