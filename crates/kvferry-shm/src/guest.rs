//! Connections that peers made to us. They ask for our regions and send notifications; we only ever answer.
//!
//! Nothing a guest does costs more than a bounded amount: strangers are few and have little time, a guest that does not read
//! its answer is not read from either, notifications wait in the guest's socket while our driver does not take events, and
//! each step reads a bounded number of frames. Whoever breaks the protocol is disconnected.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use kvferry_transport::{EndpointId, Event};
use rustix::io::Errno;

use crate::board::PeerBoard;
use crate::frame::{Frame, VERSION};
use crate::local::Local;
use crate::poller::{Poller, Source};
use crate::sock::{self, Received};

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

/// Who we are, and what we demand of a guest.
#[derive(Debug)]
pub(crate) struct House {
    pub(crate) id: EndpointId,
    pub(crate) token: [u8; 16],
    pub(crate) other_users: bool,
    pub(crate) grant_writes: bool,
    pub(crate) max_guests: usize,
}

#[derive(Debug)]
struct Guest {
    socket: OwnedFd,
    since: Duration,
    known: Option<(EndpointId, PeerBoard)>,
    /// An answer that the guest's socket has no room for.
    answer: Option<(Vec<u8>, Option<OwnedFd>)>,
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
}

/// Why a guest is sent away.
enum Away {
    /// It left.
    Left,
    /// It did what no conforming peer does.
    Broke,
}

impl Guests {
    pub(crate) fn new(listener: OwnedFd) -> Self {
        Self { listener, rests: None, by_key: BTreeMap::new(), strangers: 0, next: 0 }
    }

    /// The boards of those who said hello.
    pub(crate) fn boards(&self) -> impl Iterator<Item = (u64, &PeerBoard)> {
        self.by_key.iter().filter_map(|(key, guest)| guest.known.as_ref().map(|(_, board)| (*key, board)))
    }

    /// The board of a guest that is still connected.
    pub(crate) fn board(&self, key: u64) -> Option<&PeerBoard> {
        self.by_key.get(&key)?.known.as_ref().map(|(_, board)| board)
    }

    /// Forgets guests whose socket is closed at the other end, without reading what they sent last.
    pub(crate) fn drop_gone(&mut self) {
        self.by_key.retain(|_, guest| !sock::gone(&guest.socket, None));
    }

    /// Takes new connections in.
    pub(crate) fn accept(&mut self, now: Duration, house: &House, poller: &Poller) {
        for _ in 0..ACCEPTS {
            let socket = match sock::accept(&self.listener) {
                Ok(socket) => socket,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    // They wait in the listener's queue; without this rest we would be woken for them all the time.
                    self.rests = Some(now + REST);
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
                self.by_key.insert(key, Guest { socket, since: now, known: None, answer: None });
            }
        }
    }

    fn refuses(&self, socket: &OwnedFd, house: &House) -> Option<String> {
        if self.strangers >= MAX_STRANGERS || self.by_key.len() >= house.max_guests + MAX_STRANGERS {
            return Some("too many connections wait to be admitted; try again".to_owned());
        }
        let ours = rustix::process::geteuid().as_raw();
        match sock::credentials(socket) {
            Ok(peer) if house.other_users || peer.user == ours => None,
            Ok(peer) => Some(format!("user {} may not connect to an endpoint of user {}", peer.user, ours)),
            Err(e) => Some(format!("the kernel does not say who is connecting: {e}")),
        }
    }

    /// Serves a guest whose socket is ready.
    pub(crate) fn serve(
        &mut self,
        key: u64,
        house: &House,
        local: &Local,
        poller: &Poller,
        buffer: &mut [u8],
        events: &mut VecDeque<Event>,
    ) {
        let guests = self.by_key.len() - self.strangers;
        let Some(guest) = self.by_key.get_mut(&key) else { return };
        let was_stranger = guest.known.is_none();
        let full = guests >= house.max_guests;
        let stays = guest.serve(key, house, full, local, poller, buffer, events);
        let known = guest.known.is_some();
        if was_stranger && (known || stays.is_err()) {
            self.strangers -= 1;
        }
        if stays.is_err() {
            self.by_key.remove(&key);
        }
    }

    /// Sends away strangers who took too long and lets the listener go on after its rest; gives the time of the next such.
    pub(crate) fn tick(&mut self, now: Duration, poller: &Poller) -> Option<Duration> {
        if self.rests.is_some_and(|until| until <= now) {
            self.rests = None;
            poller.want(&self.listener, Source::Listener, true, false).unwrap_or(());
        }
        let mut next = self.rests;
        if self.strangers > 0 {
            self.by_key.retain(|_, guest| guest.known.is_some() || guest.since + PATIENCE > now);
            let waiting = self.by_key.values().filter(|g| g.known.is_none());
            let (count, first) = waiting.fold((0, None), |(n, first), guest| {
                (n + 1, Some(first.map_or(guest.since, |f: Duration| f.min(guest.since))))
            });
            self.strangers = count;
            let first = first.map(|since| since + PATIENCE);
            next = [next, first].into_iter().flatten().min();
        }
        next
    }
}

impl Guest {
    #[allow(clippy::too_many_arguments, reason = "the parts of the endpoint that a guest may see, borrowed one by one")]
    fn serve(
        &mut self,
        key: u64,
        house: &House,
        full: bool,
        local: &Local,
        poller: &Poller,
        buffer: &mut [u8],
        events: &mut VecDeque<Event>,
    ) -> Result<(), Away> {
        if let Some((bytes, fd)) = self.answer.take() {
            self.answer(key, bytes, fd, poller)?;
            if self.answer.is_none() {
                poller.want(&self.socket, Source::Guest(key), true, false).map_err(|_| Away::Broke)?;
            }
        }
        for _ in 0..FRAMES {
            if self.answer.is_some() || events.len() >= EVENTS {
                break;
            }
            let (len, fd) = match sock::receive(&self.socket, buffer) {
                Ok(Received::Frame(len, fd)) => (len, fd),
                Ok(Received::Nothing) => break,
                Ok(Received::Closed) => return Err(Away::Left),
                Ok(Received::Improper(_)) | Err(_) => return Err(Away::Broke),
            };
            match (Frame::decode(&buffer[..len]), &self.known) {
                (Ok(Frame::Hello { version, target, token, from }), None) => {
                    let hello = Hello { version, target, token, full };
                    self.greet(&hello, from, fd.as_ref(), house, local)?;
                }
                (Ok(Frame::Ask { generation, region, access }), Some(_)) => {
                    let (grant, fd) = local.grant(generation, region, access, house.grant_writes);
                    self.answer(key, Frame::Grant { region, access, grant }.encode(), fd, poller)?;
                }
                (Ok(Frame::Notify(payload)), Some((from, _))) => {
                    events.push_back(Event::Notification { from: *from, payload: payload.to_vec() });
                }
                _ => return Err(Away::Broke),
            }
        }
        Ok(())
    }

    fn greet(
        &mut self,
        hello: &Hello,
        from: EndpointId,
        board: Option<&OwnedFd>,
        house: &House,
        local: &Local,
    ) -> Result<(), Away> {
        let board = hello.check(house).and_then(|()| {
            let fd = board.ok_or_else(|| "the hello brought no board".to_owned())?;
            PeerBoard::map(fd.as_fd()).map_err(|e| format!("the board that came with the hello: {e}"))
        });
        match board {
            Ok(board) => {
                let (probe_at, probe) = local.probe();
                let welcome = Frame::Welcome { probe_at, probe }.encode();
                // The first frame always has room; if it hasn't, this is no conforming peer.
                sock::send(&self.socket, &welcome, &[], Some(local.board.fd())).map_err(|_| Away::Left)?;
                self.known = Some((from, board));
                Ok(())
            }
            Err(text) => {
                sock::send(&self.socket, &Frame::Refuse(text).encode(), &[], None).unwrap_or(());
                Err(Away::Broke)
            }
        }
    }

    /// Sends an answer, or keeps it and stops reading until there is room.
    fn answer(&mut self, key: u64, bytes: Vec<u8>, fd: Option<OwnedFd>, poller: &Poller) -> Result<(), Away> {
        match sock::send(&self.socket, &bytes, &[], fd.as_ref().map(AsFd::as_fd)) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => {
                self.answer = Some((bytes, fd));
                poller.want(&self.socket, Source::Guest(key), false, true).map_err(|_| Away::Broke)
            }
            Err(_) => Err(Away::Left),
        }
    }
}

struct Hello {
    version: u16,
    target: EndpointId,
    token: [u8; 16],
    full: bool,
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
        if self.full {
            return Err(format!("{} peers are connected, the most that are allowed here", house.max_guests));
        }
        Ok(())
    }
}
