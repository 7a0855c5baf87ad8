//! Connections that peers made to us. They ask for our regions and send notifications; we only ever answer.
//!
//! Nothing a guest does costs more than a bounded amount: strangers are few and have little time, a guest that does not read
//! its answer is not read from either, notifications wait in the guest's socket while our driver does not take events, and
//! each step reads a bounded number of frames. Whoever breaks the protocol is sent away: we say no more and read no more, but
//! its board is looked at until it closed its end, because until then it may be inside a slice of our memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use kvferry_transport::{EndpointId, Event};
use rustix::io::Errno;

use crate::board::PeerBoard;
use crate::frame::{Frame, VERSION};
use crate::local::Local;
use crate::poller::{Poller, Source};
use crate::sock::{self, Passed, Received};

/// Connections that have not said hello yet.
const MAX_STRANGERS: usize = 256;
/// How long they may take for it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Frames read from one guest in one step.
const FRAMES: usize = 64;
/// Events that wait for our driver, above which no more notifications are read.
const EVENTS: usize = 4096;
/// Connections accepted in one step.
const ACCEPTS: usize = 64;
/// How long the listener rests when there are no descriptors left.
const REST: Duration = Duration::from_millis(100);
/// How long until the next try to send an answer for which the system has no room.
const SEND_AGAIN: Duration = Duration::from_millis(5);

/// Who we are, and what we demand of a guest.
#[derive(Debug)]
pub(crate) struct House {
    pub(crate) id: EndpointId,
    pub(crate) token: [u8; 16],
    /// Our effective user.
    pub(crate) user: u32,
    pub(crate) other_users: bool,
    pub(crate) grant_writes: bool,
    pub(crate) max_guests: usize,
}

/// What serving a guest needs of the endpoint.
pub(crate) struct Desk<'a> {
    pub(crate) now: Duration,
    pub(crate) house: &'a House,
    pub(crate) local: &'a Local,
    pub(crate) poller: &'a Poller,
    pub(crate) buffer: &'a mut [u8],
    pub(crate) events: &'a mut VecDeque<Event>,
}

#[derive(Debug)]
struct Guest {
    socket: OwnedFd,
    since: Duration,
    known: Option<(EndpointId, PeerBoard)>,
    /// An answer that could not be sent yet.
    answer: Option<(Vec<u8>, Option<OwnedFd>)>,
    /// The system had no room for the answer: nothing tells when it has, so it is tried again after a while.
    stuck: bool,
    /// It was sent away, or left, and its end is not closed yet.
    away: bool,
}

/// All guests.
#[derive(Debug)]
pub(crate) struct Guests {
    listener: OwnedFd,
    /// Until when the listener rests.
    rests: Option<Duration>,
    by_key: BTreeMap<u64, Guest>,
    strangers: usize,
    next: u64,
    /// Those whose answers are stuck, and when they are tried again.
    stuck: BTreeSet<u64>,
    retry: Option<Duration>,
}

/// A guest that left, or did what no conforming peer does.
struct Away;

impl Guests {
    pub(crate) fn new(listener: OwnedFd) -> Self {
        Self {
            listener,
            rests: None,
            by_key: BTreeMap::new(),
            strangers: 0,
            next: 0,
            stuck: BTreeSet::new(),
            retry: None,
        }
    }

    /// The boards of those who said hello and may touch our memory.
    pub(crate) fn boards(&self) -> impl Iterator<Item = (u64, &PeerBoard)> {
        self.by_key.iter().filter_map(|(key, guest)| guest.known.as_ref().map(|(_, board)| (*key, board)))
    }

    /// The board of a guest that is still connected.
    pub(crate) fn board(&self, key: u64) -> Option<&PeerBoard> {
        self.by_key.get(&key)?.known.as_ref().map(|(_, board)| board)
    }

    /// Tells every guest that the endpoint ends. Closing would do as well, unless a child of a fork has the socket too.
    pub(crate) fn farewell(&self) {
        self.by_key.values().for_each(|guest| sock::say_no_more(&guest.socket));
    }

    /// Forgets guests whose socket is closed at the other end, without reading what they sent last.
    pub(crate) fn drop_closed(&mut self, poller: &Poller) {
        self.by_key.retain(|_, guest| {
            let stays = !sock::closed(&guest.socket);
            if !stays {
                poller.remove(&guest.socket);
            }
            stays
        });
    }

    /// Takes new connections in.
    pub(crate) fn accept(&mut self, now: Duration, house: &House, poller: &Poller) {
        for _ in 0..ACCEPTS {
            let socket = match sock::accept(&self.listener) {
                Ok(socket) => socket,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    // They wait in the listener's queue; without this rest we would be woken for them all the time.
                    self.rests = Some(now.saturating_add(REST));
                    poller.want(&self.listener, Source::Listener, false, false).unwrap_or(());
                    return;
                }
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(_) => return,
            };
            if let Some(text) = self.refuses(&socket, house) {
                sock::send(&socket, &Frame::Refuse(text).encode(), &[], None).unwrap_or(());
                continue;
            }
            let key = self.next;
            if poller.add(&socket, Source::Guest(key)).is_ok() {
                self.next += 1;
                self.strangers += 1;
                let guest = Guest { socket, since: now, known: None, answer: None, stuck: false, away: false };
                self.by_key.insert(key, guest);
            }
        }
    }

    /// Refuses whoever waits to connect, and touches nothing else.
    pub(crate) fn turn_away(&self, why: &str) {
        for socket in (0..ACCEPTS).map_while(|_| sock::accept(&self.listener).ok()) {
            sock::send(&socket, &Frame::Refuse(why.to_owned()).encode(), &[], None).unwrap_or(());
        }
    }

    fn refuses(&self, socket: &OwnedFd, house: &House) -> Option<String> {
        if self.strangers >= MAX_STRANGERS || self.by_key.len() >= house.max_guests.saturating_add(MAX_STRANGERS) {
            return Some("too many connections wait to be admitted; try again".to_owned());
        }
        let ours = house.user;
        match sock::credentials(socket) {
            Ok(peer) if house.other_users || peer.user == ours => None,
            Ok(peer) => Some(format!("user {} may not connect to an endpoint of user {}", peer.user, ours)),
            Err(e) => Some(format!("the kernel does not say who is connecting: {e}")),
        }
    }

    /// Serves a guest whose socket is ready.
    pub(crate) fn serve(&mut self, key: u64, desk: &mut Desk<'_>) {
        let full = self.by_key.len() - self.strangers >= desk.house.max_guests;
        // Looked for only when it matters: at a hello.
        let taken: Vec<EndpointId> = match self.by_key.get(&key) {
            Some(guest) if guest.known.is_none() => self.names().collect(),
            _ => Vec::new(),
        };
        let Some(guest) = self.by_key.get_mut(&key) else {
            return;
        };
        let was_stranger = guest.known.is_none();
        let stays = !guest.away && guest.serve(key, full, &taken, desk).is_ok();
        let known = guest.known.is_some();
        if was_stranger && (known || !stays) {
            self.strangers -= 1;
        }
        if guest.stuck {
            self.stuck.insert(key);
            self.retry.get_or_insert(desk.now.saturating_add(SEND_AGAIN));
        }
        let waits = stays || known && guest.sent_away(key, desk.poller);
        if !waits {
            desk.poller.remove(&guest.socket);
            self.by_key.remove(&key);
        }
    }

    #[cfg(test)]
    pub(crate) fn send_all_away(&mut self, poller: &Poller) {
        for (key, guest) in &mut self.by_key {
            guest.sent_away(*key, poller);
        }
    }

    /// The guests whose stuck answers are due.
    pub(crate) fn due(&mut self, now: Duration) -> BTreeSet<u64> {
        if self.retry.is_none_or(|at| at > now) {
            return BTreeSet::new();
        }
        self.retry = None;
        std::mem::take(&mut self.stuck)
    }

    /// The endpoints that guests say they are.
    fn names(&self) -> impl Iterator<Item = EndpointId> {
        let here = |guest: &&Guest| !guest.away && !sock::gone(&guest.socket, None);
        self.by_key.values().filter(here).filter_map(|guest| guest.known.as_ref().map(|(from, _)| *from))
    }

    /// Sends away strangers who took too long and lets the listener go on after its rest; gives the time of the next such.
    pub(crate) fn tick(&mut self, now: Duration, poller: &Poller) -> Option<Duration> {
        if self.rests.is_some_and(|until| until <= now) {
            self.rests = None;
            poller.want(&self.listener, Source::Listener, true, false).unwrap_or(());
        }
        let mut next = [self.rests, self.retry].into_iter().flatten().min();
        if self.strangers > 0 {
            self.by_key.retain(|_, guest| {
                let stays = guest.known.is_some() || guest.since.saturating_add(PATIENCE) > now;
                if !stays {
                    poller.remove(&guest.socket);
                }
                stays
            });
            let waiting = self.by_key.values().filter(|g| g.known.is_none());
            let (count, first) = waiting.fold((0, None), |(n, first), guest| {
                (n + 1, Some(first.map_or(guest.since, |f: Duration| f.min(guest.since))))
            });
            self.strangers = count;
            let first = first.map(|since| since.saturating_add(PATIENCE));
            next = [next, first].into_iter().flatten().min();
        }
        next
    }
}

impl Guest {
    fn serve(&mut self, key: u64, full: bool, taken: &[EndpointId], desk: &mut Desk<'_>) -> Result<(), Away> {
        if let Some((bytes, fd)) = self.answer.take() {
            self.stuck = false;
            self.answer(key, bytes, fd, desk.poller)?;
            if self.answer.is_none() {
                desk.poller.want(&self.socket, Source::Guest(key), true, false).map_err(|_| Away)?;
            }
        }
        for _ in 0..FRAMES {
            if self.answer.is_some() || desk.events.len() >= EVENTS {
                break;
            }
            let (len, fd) = match sock::receive(&self.socket, desk.buffer) {
                Ok(Received::Frame(len, fd)) => (len, fd),
                Ok(Received::Nothing) => break,
                Ok(Received::Closed | Received::Improper(_)) | Err(_) => return Err(Away),
            };
            match (Frame::decode(&desk.buffer[..len]), &self.known) {
                (Ok(Frame::Hello { version, target, token, from }), None) => {
                    let hello = Hello { version, target, token, full, from_taken: taken.contains(&from) };
                    let board = hello.check(desk.house).and_then(|()| map_board(&fd));
                    self.greet(key, from, board, desk)?;
                }
                (Ok(Frame::Ask { generation, region, access }), Some(_)) => {
                    let (grant, fd) = desk.local.grant(generation, region, access, desk.house.grant_writes);
                    self.answer(key, Frame::Grant { region, access, grant }.encode(), fd, desk.poller)?;
                }
                (Ok(Frame::Notify(payload)), Some((from, _))) => {
                    desk.events.push_back(Event::Notification { from: *from, payload: payload.to_vec() });
                }
                _ => return Err(Away),
            }
        }
        Ok(())
    }

    fn greet(
        &mut self,
        key: u64,
        from: EndpointId,
        board: Result<PeerBoard, String>,
        desk: &Desk<'_>,
    ) -> Result<(), Away> {
        match board {
            Ok(board) => {
                let (probe_at, probe) = desk.local.probe();
                let fd = desk.local.board.fd().try_clone_to_owned().map_err(|_| Away)?;
                self.answer(key, Frame::Welcome { probe_at, probe }.encode(), Some(fd), desk.poller)?;
                self.known = Some((from, board));
                Ok(())
            }
            Err(text) => {
                sock::send(&self.socket, &Frame::Refuse(text).encode(), &[], None).unwrap_or(());
                Err(Away)
            }
        }
    }

    /// Sends an answer, or keeps it and stops reading until there is room.
    fn answer(&mut self, key: u64, bytes: Vec<u8>, fd: Option<OwnedFd>, poller: &Poller) -> Result<(), Away> {
        match sock::send(&self.socket, &bytes, &[], fd.as_ref().map(AsFd::as_fd)) {
            Ok(()) => Ok(()),
            // It hears no more, but what it sent before it left is still to be read.
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(errno @ (Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM)) => {
                self.answer = Some((bytes, fd));
                self.stuck = errno != Errno::AGAIN;
                poller.want(&self.socket, Source::Guest(key), false, !self.stuck).map_err(|_| Away)
            }
            Err(_) => Err(Away),
        }
    }

    /// Says no more, and waits for the other end to be closed; false if it is.
    fn sent_away(&mut self, key: u64, poller: &Poller) -> bool {
        if !self.away {
            self.away = true;
            (self.answer, self.stuck) = (None, false);
            sock::say_no_more(&self.socket);
            // Hang-ups are told in any case.
            poller.want(&self.socket, Source::Guest(key), false, false).unwrap_or(());
        }
        !sock::closed(&self.socket)
    }
}

fn map_board(board: &Passed) -> Result<PeerBoard, String> {
    let fd = board.fd().map_err(|lack| format!("the board of the hello {lack}"))?;
    PeerBoard::map(fd).map_err(|e| format!("the board that came with the hello: {e}"))
}

struct Hello {
    version: u16,
    target: EndpointId,
    token: [u8; 16],
    full: bool,
    from_taken: bool,
}

impl Hello {
    fn check(&self, house: &House) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("lane version {} is not spoken here, only {VERSION}", self.version));
        }
        // Compared without an early end, so that the time tells nothing.
        let differs = self.token.iter().zip(house.token).fold(0, |d, (a, b)| d | (a ^ b));
        if self.target != house.id || differs != 0 {
            return Err(format!(
                "this is endpoint {}, and the blob was another's or an earlier life's; fetch the blob anew",
                house.id
            ));
        }
        if self.from_taken {
            return Err("another connection has this endpoint's id; an endpoint connects once".to_owned());
        }
        if self.full {
            return Err(format!("{} peers are connected, the most that are allowed here", house.max_guests));
        }
        Ok(())
    }
}
