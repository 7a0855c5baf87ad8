//! The calling side: our connections, and the operations that ask, move and end on them.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_transport::access::{Answer, Message};
use kvferry_transport::strips::shares;
use kvferry_transport::{LostCause, Outcome, PeerId, Stats, TransferError};
use rustix::event::epoll;

use super::{CONN, LINGER, Rail};
use crate::lane;
use crate::part::{Place, RailPart};
use crate::process::Watch;
use crate::shared::{Callee, Command, Report};
use crate::sys::{Endpoint, Header, RemoteKey};
use crate::wire::{self, Caller, Ear, Hello, Told};
use crate::work::Work;

/// How long after its lane broke the death of a peer is awaited: where it shows no sign of dying, and where it does.
const SUSPECT: Duration = Duration::from_millis(50);
const DYING: Duration = Duration::from_secs(20);

/// One connection of ours, at this rail.
pub(super) struct Conn {
    callee: Arc<Callee>,
    /// Where we hear the peer.
    ear: Ear,
    /// `None` once nothing can be sent any more.
    endpoint: Option<Endpoint>,
    watch: Watch,
    stage: Stage,
    /// Operations that have asked and have no answer.
    asked: HashMap<u64, Arc<Work>>,
    /// Operations that have ended before the answer came; when it comes, the other side must hear of the end.
    orphans: BTreeSet<u64>,
    /// Operations whose bytes move.
    moving: HashMap<u64, Arc<Work>>,
    /// Those of them whose shares have all ended, while it isn't known why the lane is broken.
    held: Vec<Arc<Work>>,
    /// Operations that are done and whose notification is on its way, and what they moved.
    telling: HashMap<u64, Stats>,
    /// How often `End` was said.
    ends: u64,
    /// Shares of operations that this rail works on.
    pub(super) runs: usize,
    /// At another rail the lane is broken.
    halted: bool,
    /// By index, each unpacked at its first use.
    keys: Vec<Option<Rc<RemoteKey>>>,
    /// Why and since when its lane is broken, while it is not known whether that is because the peer has died.
    suspect: Option<(LostCause, Instant)>,
    lost: Option<(LostCause, Instant)>,
    /// Since when it is to go.
    closing: Option<Instant>,
}

enum Stage {
    Calling {
        since: Instant,
    },
    /// Where the peer hears us.
    Up {
        guest: Ear,
    },
}

/// Whether a lost peer may still hear something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Open,
    Broken,
}

impl Conn {
    /// The way to the peer, once the lane is up and while the peer is not lost.
    pub(super) fn ready(&self) -> Option<&Endpoint> {
        match self.stage {
            Stage::Up { .. } if self.lost.is_none() => self.endpoint.as_ref(),
            _ => None,
        }
    }

    /// The way to the peer, whatever is known of it.
    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        self.endpoint.as_ref()
    }

    /// Whether nothing more is to begin.
    pub(super) fn is_halted(&self) -> bool {
        self.halted || self.lost.is_some()
    }

    /// Whether its peer's process has ended, as the kernel tells: only then it is certain that it touches nothing any more.
    pub(super) fn is_gone(&self) -> bool {
        self.watch.is_gone()
    }

    /// Whether operations of it have not ended.
    pub(super) fn has_operations(&self) -> bool {
        !self.moving.is_empty() || !self.telling.is_empty() || self.runs > 0
    }

    pub(super) fn lost(&self) -> Option<&LostCause> {
        self.lost.as_ref().map(|(cause, _)| cause)
    }

    /// Where a region of the peer is, and the key to it at this rail.
    pub(super) fn remote(&mut self, rail: usize, region: RegionId) -> Result<(u64, Rc<RemoteKey>), String> {
        let unknown = || format!("the peer's region {region} is not in its blob");
        let at = self.callee.regions.binary_search(&region).map_err(|_| unknown())?;
        let place: &Place = self.callee.part.regions.get(at).ok_or_else(unknown)?;
        let (rail, part) = theirs(&self.callee, rail);
        let index = place.keys.get(rail).and_then(|key| usize::try_from(*key).ok()).ok_or_else(unknown)?;
        let slot = self.keys.get_mut(index).ok_or_else(unknown)?;
        if let Some(key) = slot {
            return Ok((place.address, key.clone()));
        }
        let endpoint = self.endpoint.as_ref().ok_or("the connection is lost")?;
        let packed = part.keys.get(index).ok_or_else(unknown)?;
        let key = endpoint
            .unpack(packed)
            .map_err(|status| format!("the key to the peer's region {region} can't be used on this lane: {status}"))?;
        let key = Rc::new(key);
        *slot = Some(key.clone());
        Ok((place.address, key))
    }

    /// Whether it is not known yet why its lane is broken.
    pub(super) fn is_suspect(&self) -> bool {
        self.suspect.is_some() && self.lost.is_none()
    }

    /// What is left of it at the end, when nothing is under way.
    pub(super) fn into_endpoint(mut self) -> Option<Endpoint> {
        self.keys.clear();
        self.endpoint.take()
    }

    /// UCX wants keys to go before their endpoint, and after what uses them.
    fn drop_idle_keys(&mut self) {
        if self.runs == 0 {
            self.keys.iter_mut().for_each(|key| *key = None);
        }
    }

    fn send(&self, kind: u8, to: Ear, body: Vec<u8>) -> Result<(), LostCause> {
        let closed = || LostCause::Lane("it is closed".to_owned());
        let endpoint = self.endpoint.as_ref().ok_or_else(closed)?;
        endpoint.send(Header { kind, to }, body).map_err(|status| LostCause::Lane(status.to_string()))
    }
}

/// The peer's rail that this rail of ours talks to.
fn theirs(callee: &Callee, rail: usize) -> (usize, &RailPart) {
    // A part has one rail at least.
    let rail = rail % callee.part.rails.len();
    (rail, &callee.part.rails[rail])
}

impl Rail {
    pub(super) fn connect(&mut self, id: u64, callee: Arc<Callee>) {
        let watch = callee.part.process.watch(&self.shared.process);
        let ear = wire::fresh_ear();
        let (_, part) = theirs(&callee, self.index);
        let keys = (0..part.keys.len()).map(|_| None).collect();
        let endpoint = match (&watch, ear) {
            (Watch::Gone, _) => Err(LostCause::Gone),
            (_, None) => Err(LostCause::Lane("the system has no random bytes".to_owned())),
            _ => self.caller.connect(&part.address).map_err(|status| LostCause::Lane(status.to_string())),
        };
        if let Watch::Alive { fd, .. } = &watch {
            // Unwatched, its death is noticed by UCX later.
            let _: rustix::io::Result<()> =
                epoll::add(&self.epoll, fd, epoll::EventData::new_u64(CONN | id), epoll::EventFlags::IN);
        }
        let hello = Hello {
            token: callee.part.token,
            to: callee.endpoint,
            ear: ear.unwrap_or_default(),
            caller: self.as_caller(id),
            process: self.shared.process,
            address: self.caller_address.clone(),
        };
        let (endpoint, failure) = match endpoint {
            Ok(endpoint) => (Some(endpoint), None),
            Err(cause) => (None, Some(cause)),
        };
        let conn = Conn {
            callee,
            ear: ear.unwrap_or_default(),
            endpoint,
            watch,
            stage: Stage::Calling { since: Instant::now() },
            asked: HashMap::new(),
            orphans: BTreeSet::new(),
            moving: HashMap::new(),
            held: Vec::new(),
            telling: HashMap::new(),
            ends: 0,
            runs: 0,
            halted: false,
            keys,
            suspect: None,
            lost: None,
            closing: None,
        };
        let failure = failure.map_or_else(|| conn.send(wire::HELLO, Ear::default(), hello.encode()).err(), Some);
        self.conn_ears.extend(ear.map(|ear| (ear, id)));
        self.conns.insert(id, conn);
        self.clock.restless = true;
        if let Some(cause) = failure {
            self.lane_broke(id, cause);
        }
    }

    fn as_caller(&self, conn: u64) -> Caller {
        // There are few rails.
        Caller { endpoint: self.shared.id, conn, rail: u8::try_from(self.index).unwrap_or(u8::MAX) }
    }

    pub(super) fn peer_says(&mut self, header: Header, body: &[u8]) {
        let Some(&id) = self.conn_ears.get(&header.to) else { return };
        let Some(conn) = self.conns.get_mut(&id) else { return };
        match header.kind {
            wire::WELCOME => {
                let (Some(guest), Stage::Calling { .. }, None) = (wire::guest(body), &conn.stage, &conn.lost) else {
                    return;
                };
                conn.stage = Stage::Up { guest };
                let lanes = conn.endpoint.as_ref().map_or(Vec::new(), lane::of);
                self.shared.report(Report::Up { peer: PeerId::new(id), rail: self.index, lanes });
                self.let_conn_go(id);
            }
            wire::REFUSE => {
                let reason = String::from_utf8_lossy(&body[..body.len().min(500)]).into_owned();
                self.lose(id, &LostCause::Refused(reason), Way::Open);
            }
            wire::ANSWER => match Message::decode(body) {
                Ok(Message::Answer { op, answer }) => self.answered(id, op, answer),
                Ok(_) => self.lose(id, &LostCause::Protocol("it asked where it was asked".to_owned()), Way::Broken),
                Err(error) => self.lose(id, &LostCause::Protocol(error.to_string()), Way::Broken),
            },
            wire::TOLD => {
                if let Some(Told { op, told }) = Told::decode(body) {
                    self.told(id, op, told);
                }
            }
            wire::GOING => self.lose(id, &LostCause::Gone, Way::Open),
            // Not a message to us.
            _ => {}
        }
    }

    /// Asks for an operation. It comes after the lane is up at every rail.
    pub(super) fn begin(&mut self, work: Arc<Work>) {
        let Some(conn) = self.conns.get_mut(&work.conn) else {
            return self.fail(&work, TransferError::Disconnected);
        };
        if let Some(cause) = conn.lost() {
            let error = TransferError::PeerLost(cause.clone());
            return self.fail(&work, error);
        }
        if let Some(error) = work.stop_error() {
            return self.fail(&work, error);
        }
        let Stage::Up { guest } = conn.stage else {
            return self.fail(&work, TransferError::Disconnected);
        };
        let generation = conn.callee.generation;
        let message = Message::Begin { op: work.op, kind: work.kind, generation, regions: work.peers.clone() };
        let sent = conn.send(wire::ASK, guest, message.encode());
        let id = work.conn;
        conn.asked.insert(work.op, work);
        if let Err(cause) = sent {
            self.lane_broke(id, cause);
        }
    }

    fn answered(&mut self, id: u64, op: u64, answer: Answer) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(work) = conn.asked.remove(&op) else {
            if conn.orphans.remove(&op) {
                if answer == Answer::Granted {
                    let _: bool = self.say_end(id, op, None);
                }
                self.let_conn_go(id);
            }
            return;
        };
        match answer {
            Answer::Granted => match work.stop_error() {
                Some(error) => {
                    let _: bool = self.say_end(id, op, None);
                    self.fail(&work, error);
                    self.let_conn_go(id);
                }
                None => self.share_out(work),
            },
            Answer::Stale(region) => self.fail(&work, TransferError::Stale { region }),
            Answer::Revoked(region) => self.fail(&work, TransferError::Revoked { region }),
            Answer::Refused => self.fail(
                &work,
                TransferError::Lane {
                    reason: "the peer has as many operations of ours open as it takes; have fewer in flight".to_owned(),
                },
            ),
        }
    }

    /// Gives an operation that was granted to the rails: a large one to all, by byte ranges, a small one to this one.
    fn share_out(&mut self, work: Arc<Work>) {
        if let Some(conn) = self.conns.get_mut(&work.conn) {
            conn.moving.insert(work.op, work.clone());
        }
        let rails = self.shared.mailboxes.len();
        let most = usize::try_from(work.bytes().get() / self.shared.config.stripe).unwrap_or(usize::MAX);
        let shares = shares(&work.batch, rails.min(most).max(1));
        let shares: Vec<_> = shares.into_iter().filter(|share| !share.is_empty()).collect();
        work.state.shares.store(shares.len(), Ordering::Release);
        if shares.is_empty() {
            return self.finish(&work);
        }
        // The others first: they may have to wake up.
        for (i, share) in shares.into_iter().enumerate().rev() {
            match (self.index + i) % rails {
                rail if rail == self.index => self.start_run(work.clone(), share),
                rail => self.shared.mailboxes[rail].post(Command::Share(work.clone(), share)),
            }
        }
    }

    /// All shares of an operation have ended: nothing of it is under way at any rail.
    pub(super) fn finish(&mut self, work: &Arc<Work>) {
        let id = work.conn;
        // What has failed has failed for a reason, which may be known by now. And what is done is only known to be if the process
        // that was read from or written to was still there after the last byte: the kernel gives its number to others.
        let failed = !matches!(work.outcome(None), Outcome::Done(_));
        if failed || self.conns.get(&id).is_some_and(Conn::is_gone) {
            self.look_why(id);
        }
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.is_suspect() {
            conn.held.push(work.clone());
            return;
        }
        conn.moving.remove(&work.op);
        let mut outcome = work.outcome(conn.lost().cloned().map(TransferError::PeerLost));
        // The bytes are in place before this is said: for reads every `ucp_get_nbx` has ended, which it does "when the data is
        // in the local buffer"; for writes a `ucp_ep_flush_nbx` posted behind the last `ucp_put_nbx` has, at every rail, and
        // by then "all the AMO and RMA operations issued on the ep prior to this call are completed both at the origin and
        // at the target" (ucp.h).
        let notify = outcome.done().and(work.notify.as_deref());
        if !self.say_end(id, work.op, notify)
            && let Some(stats) = outcome.done()
        {
            // The lane broke right now. The bytes are there, but the other side doesn't know.
            let Some(conn) = self.conns.get_mut(&id) else { return };
            if conn.is_suspect() {
                conn.moving.insert(work.op, work.clone());
                conn.held.push(work.clone());
                return;
            }
            let lost = conn.lost().cloned().map(TransferError::PeerLost);
            let error = lost.or(work.stop_error()).unwrap_or(TransferError::Disconnected);
            outcome = if work.notify.is_some() { Outcome::Failed(error) } else { Outcome::Done(stats) };
        }
        match (&outcome, &work.notify, self.conns.get_mut(&id)) {
            // Done is told when the peer has told the notification.
            (Outcome::Done(stats), Some(_), Some(conn)) => drop(conn.telling.insert(work.op, *stats)),
            _ => self.shared.report(Report::Ended { op: work.op, outcome }),
        }
        self.let_conn_go(id);
    }

    /// The peer has told a notification, or has not because it knows no such operation.
    fn told(&mut self, id: u64, op: u64, told: bool) {
        let Some(stats) = self.conns.get_mut(&id).and_then(|conn| conn.telling.remove(&op)) else { return };
        let outcome = if told {
            Outcome::Done(stats)
        } else {
            Outcome::Failed(TransferError::Lane {
                reason: "the peer doesn't know the operation that it granted".to_owned(),
            })
        };
        self.shared.report(Report::Ended { op, outcome });
        self.let_conn_go(id);
    }

    /// Says that an operation has stopped; whether that is on its way.
    fn say_end(&mut self, id: u64, op: u64, notify: Option<&[u8]>) -> bool {
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        let Stage::Up { guest } = conn.stage else { return false };
        if conn.endpoint.is_none() {
            return false;
        }
        conn.ends += 1;
        match conn.send(wire::ASK, guest, Message::End { op, notify }.encode()) {
            Ok(()) => true,
            Err(cause) => {
                self.lane_broke(id, cause);
                false
            }
        }
    }

    /// Something of a connection has failed: finds out whether its peer is gone, or UCX has said what is wrong.
    pub(super) fn look_why(&mut self, id: u64) {
        if self.conns.get(&id).is_some_and(|conn| conn.watch.is_gone()) {
            self.lose(id, &LostCause::Gone, Way::Broken);
        }
        self.look_for_faults();
    }

    fn fail(&self, work: &Work, error: TransferError) {
        self.shared.report(Report::Ended { op: work.op, outcome: Outcome::Failed(error) });
    }

    /// An operation was told to stop: if its bytes don't move yet, it ends now.
    pub(super) fn stopped(&mut self, work: &Arc<Work>) {
        let Some(conn) = self.conns.get_mut(&work.conn) else { return };
        let error = work.stop_error().unwrap_or(TransferError::Cancelled);
        if conn.asked.remove(&work.op).is_some() {
            conn.orphans.insert(work.op);
            self.fail(work, error);
        }
    }

    pub(super) fn disconnect(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.closing.get_or_insert_with(Instant::now);
        let asked = std::mem::take(&mut conn.asked);
        conn.orphans.extend(asked.keys());
        for work in asked.values() {
            self.fail(work, work.stop_error().unwrap_or(TransferError::Disconnected));
        }
        self.clock.restless = true;
        self.let_conn_go(id);
    }

    /// A peer is lost. What has not begun to move ends now; the rest when it has stopped.
    pub(super) fn lose(&mut self, id: u64, cause: &LostCause, way: Way) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.lost.is_none() {
            conn.lost = Some((cause.clone(), Instant::now()));
            let asked = std::mem::take(&mut conn.asked);
            conn.orphans.extend(asked.keys());
            let telling = std::mem::take(&mut conn.telling);
            let held = std::mem::take(&mut conn.held);
            self.shared.report(Report::Lost { peer: PeerId::new(id), cause: cause.clone() });
            let error = TransferError::PeerLost(cause.clone());
            asked.values().for_each(|work| self.fail(work, error.clone()));
            for op in telling.into_keys() {
                // Its notification may have been told.
                self.shared.report(Report::Ended { op, outcome: Outcome::InDoubt(error.clone()) });
            }
            held.iter().for_each(|work| self.finish(work));
            self.clock.restless = true;
        }
        if way == Way::Broken
            && let Some(conn) = self.conns.get_mut(&id)
        {
            conn.drop_idle_keys();
            // Forced: UCX ends what is under way with an error.
            let endpoint = conn.endpoint.take();
            endpoint.into_iter().for_each(|endpoint| self.close(endpoint, true));
        }
        self.let_conn_go(id);
    }

    /// Forgets a connection that is lost or is to go, as far as it has nothing left to do.
    pub(super) fn let_conn_go(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let lost_since = conn.lost.as_ref().map(|(_, since)| *since);
        let Some(since) = lost_since.or(conn.closing) else { return };
        let late = since.elapsed() > LINGER;
        if conn.runs > 0 && late {
            // What is under way here doesn't end by itself. What other rails do, they see to.
            let endpoint = conn.endpoint.take();
            endpoint.into_iter().for_each(|endpoint| self.close(endpoint, true));
            return;
        }
        if late {
            for (op, _) in std::mem::take(&mut conn.telling) {
                let outcome = Outcome::InDoubt(TransferError::Disconnected);
                self.shared.report(Report::Ended { op, outcome });
            }
        }
        let calling = matches!(conn.stage, Stage::Calling { .. });
        let lost = lost_since.is_some();
        if conn.has_operations() || (!late && !lost && (calling || !conn.orphans.is_empty())) {
            return;
        }
        conn.drop_idle_keys();
        if let Some(endpoint) = conn.endpoint.take() {
            if let Stage::Up { guest } = conn.stage {
                // If it can't be told, the lane is broken, and the guest is mute.
                let header = Header { kind: wire::LEAVE, to: guest };
                endpoint.send(header, conn.ends.to_le_bytes().to_vec()).unwrap_or(());
            }
            self.close(endpoint, false);
        }
        if self.conns.get(&id).is_some_and(|conn| conn.closing.is_some())
            && let Some(conn) = self.conns.remove(&id)
        {
            self.conn_ears.remove(&conn.ear);
            self.unwatch(&conn.watch);
        }
    }

    /// At another rail the lane of a connection broke.
    pub(super) fn halt(&mut self, id: u64) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.halted = true;
        }
    }

    pub(super) fn lose_faulted_conns(&mut self) {
        let fault = |conn: &Conn| conn.endpoint.as_ref().and_then(Endpoint::failed);
        let faulted: Vec<_> = self.conns.iter().filter_map(|(id, conn)| Some((*id, fault(conn)?))).collect();
        for (id, status) in faulted {
            self.lane_broke(id, LostCause::Lane(status.to_string()));
        }
    }

    /// Nothing goes over a connection any more. If its peer's process is one that is watched, its end may be about to be told: a
    /// process that dies loses its memory and its sockets some time before it has ended.
    pub(super) fn lane_broke(&mut self, id: u64, cause: LostCause) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.lost.is_some() || conn.watch.is_gone() {
            return self.lose(id, &LostCause::Gone, Way::Broken);
        }
        if !matches!(conn.watch, Watch::Alive { .. }) {
            return self.lose(id, &cause, Way::Broken);
        }
        if conn.suspect.is_none() {
            conn.suspect = Some((cause, Instant::now()));
            self.clock.restless = true;
            let others = self.shared.mailboxes.iter().enumerate().filter(|(rail, _)| *rail != self.index);
            others.for_each(|(_, mailbox)| mailbox.post(Command::Halt { conn: id }));
        }
        conn.drop_idle_keys();
        let endpoint = conn.endpoint.take();
        endpoint.into_iter().for_each(|endpoint| self.close(endpoint, true));
    }

    pub(super) fn conn_process_ended(&mut self, id: u64) {
        if let Some(conn) = self.conns.get(&id) {
            self.unwatch(&conn.watch);
        }
        self.lose(id, &LostCause::Gone, Way::Broken);
    }

    /// Looks after connections that come up or go; whether there are any.
    pub(super) fn tend_conns(&mut self) -> bool {
        let within = self.shared.config.connect_within;
        let (mut silent, mut going, mut broken) = (Vec::new(), Vec::new(), Vec::new());
        let mut restless = false;
        for (id, conn) in &self.conns {
            if let (Some((cause, since)), None) = (&conn.suspect, &conn.lost) {
                restless = true;
                let patience = if conn.watch.is_dying() { DYING } else { SUSPECT };
                if since.elapsed() > patience {
                    broken.push((*id, cause.clone()));
                }
                continue;
            }
            let lost_open = conn.lost.is_some() && (conn.endpoint.is_some() || conn.runs > 0);
            if conn.closing.is_some() || lost_open {
                going.push(*id);
            } else if let (Stage::Calling { since }, None) = (&conn.stage, &conn.lost) {
                restless = true;
                if since.elapsed() > within {
                    silent.push(*id);
                }
            }
        }
        restless |= !going.is_empty();
        for id in silent {
            let reason = format!("the peer has not answered in {within:?}");
            self.lose(id, &LostCause::Lane(reason), Way::Broken);
        }
        broken.into_iter().for_each(|(id, cause)| self.lose(id, &cause, Way::Broken));
        going.into_iter().for_each(|id| self.let_conn_go(id));
        restless
    }
}
