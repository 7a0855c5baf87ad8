//! Requests of NIXL in progress.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_transport::access::Message;
use kvferry_transport::{EndpointId, OpId, PeerId, TransferError};

use super::Worker;
use super::ops::Stage;
use crate::feed::{Filled, Map};
use crate::frame::Frame;
use crate::shared::Ours;
use crate::sys::{Fail, Request};

/// Bytes that are posted before others are heard again.
const TURN: u64 = 1 << 20;
/// Requests that are posted before others are heard again.
const TURN_REQUESTS: usize = 16;
/// How long after NIXL forgot a peer the memory of a request that it lost track of is kept.
const HAUNT: Duration = Duration::from_secs(1);

/// One request that was posted.
pub(super) struct Flight {
    request: Request,
    op: OpId,
    peer: PeerId,
    endpoint: EndpointId,
    filled: Filled,
    /// Keeps our memory and its registrations alive until the request has ended.
    _held: Arc<[Ours]>,
}

/// What became of a request that failed.
enum Trouble {
    /// It could not be made.
    Request(Fail),
    /// It ended with an error. Nothing proves that all of it has stopped: NIXL tells the first error that it sees, without a look at
    /// the rest, and bytes of a write may be on their way.
    Lost,
}

/// An operation that ended before what it had in progress did.
pub(super) struct Orphan {
    pub(super) endpoint: EndpointId,
    /// Requests in progress.
    pub(super) left: usize,
    /// A request failed without proof of its end: the peer is never told that the operation has stopped.
    pub(super) doubt: bool,
}

/// Memory of a request that failed and may not have stopped: kept until the peer was seen to have ended and NIXL has closed its
/// connection to it, or the agent ends.
pub(super) struct Ghost {
    pub(super) endpoint: EndpointId,
    _held: Arc<[Ours]>,
    /// The peer was seen to have ended.
    pub(super) dead: bool,
    forgotten: Option<Instant>,
}

impl Worker {
    /// Posts requests, one of each operation in turns.
    pub(super) fn post(&mut self) -> bool {
        let (mut posted, mut bytes) = (0, 0);
        while posted < TURN_REQUESTS && bytes < TURN && self.flights.len() < self.config.cutting.outstanding {
            let Some(id) = self.moving.pop_front() else { break };
            let Some(op) = self.ops.get_mut(&id).filter(|op| matches!(op.stage, Stage::Moving) && !op.failed) else {
                continue;
            };
            if op.feed.is_done() {
                self.look_at(id);
                continue;
            }
            posted += 1;
            match self.post_one(id) {
                Ok(filled) => {
                    bytes += filled.bytes;
                    let more = self.ops.get_mut(&id).is_some_and(|op| !op.feed.is_done());
                    if more {
                        self.moving.push_back(id);
                    } else {
                        self.look_at(id);
                    }
                }
                Err(trouble) => self.trouble(id, trouble),
            }
        }
        posted > 0
    }

    /// Posts the next request of an operation.
    fn post_one(&mut self, id: OpId) -> Result<Filled, Trouble> {
        let never = Trouble::Request;
        let op = self.ops.get_mut(&id).ok_or(never(Fail::NotFound))?;
        let peer = self.peers.get(&op.peer).ok_or(never(Fail::NotFound))?;
        let remote = self.net.get(peer.endpoint).ok_or(never(Fail::NotFound))?;
        let map = Map { kind: op.kind, ours: &op.ours, theirs: &peer.places };
        let filled = op.feed.fill(&mut self.lists, &map, &self.config.cutting).map_err(never)?;
        let request =
            self.net.agent.request(op.kind, &self.lists.local, &self.lists.remote, &remote.name).map_err(never)?;
        // SAFETY: our memory stays mapped because the flight below, or a ghost, holds the regions' owners until the request has ended,
        // and the peer's because it granted the operation and was not told its end.
        let done = unsafe { self.net.agent.post(&request) };
        match done {
            Ok(true) => {
                op.count(filled);
                self.count(&request, filled);
                self.net.agent.release(request);
            }
            Ok(false) => {
                op.flights += 1;
                let (endpoint, held) = (peer.endpoint, op.ours.clone());
                let flight = Flight { request, op: id, peer: op.peer, endpoint, filled, _held: held };
                self.net.retain(endpoint);
                self.flights.push(flight);
            }
            Err(_) => {
                let (endpoint, dead) = (peer.endpoint, self.net.is_dead(peer.endpoint));
                self.stuck |= self.config.shares_requests();
                self.ghosts.push(Ghost { endpoint, _held: op.ours.clone(), dead, forgotten: None });
                self.net.agent.release(request);
                return Err(Trouble::Lost);
            }
        }
        Ok(filled)
    }

    /// Looks which requests have ended.
    pub(super) fn poll_flights(&mut self) -> bool {
        let (mut at, mut did) = (0, false);
        while let Some(flight) = self.flights.get(at) {
            match self.net.agent.poll(&flight.request) {
                Ok(false) => at += 1,
                ended => {
                    did = true;
                    let flight = self.flights.swap_remove(at);
                    self.landed(flight, ended.map(|_| ()));
                }
            }
        }
        did
    }

    fn landed(&mut self, flight: Flight, ended: Result<(), Fail>) {
        let Flight { request, op: id, peer, endpoint, filled, _held: held } = flight;
        if ended.is_ok() {
            self.count(&request, filled);
        }
        if ended.is_err() {
            let dead = self.net.is_dead(endpoint);
            self.stuck |= self.config.shares_requests();
            self.ghosts.push(Ghost { endpoint, _held: held.clone(), dead, forgotten: None });
        }
        self.net.agent.release(request);
        drop(held);
        if let Some(op) = self.ops.get_mut(&id) {
            op.flights -= 1;
            match ended {
                Ok(()) => {
                    op.count(filled);
                    self.look_at(id);
                }
                Err(_) => self.trouble(id, Trouble::Lost),
            }
        } else if let Some(orphan) = self.orphans.get_mut(&id) {
            orphan.left = orphan.left.saturating_sub(1);
            orphan.doubt |= ended.is_err();
            // In doubt it stays, so that nobody is told.
            if orphan.left == 0 && !orphan.doubt {
                self.orphans.remove(&id);
                self.net.send(endpoint, &Frame::Access(Message::End { op: id.get(), notify: None }));
            }
        }
        self.net.release(endpoint);
        self.settle(peer);
    }

    /// A request failed. UCX fails a connection with its first request that fails, so the operation ends with the peer, whatever the
    /// cause turns out to be; but one that could not even be made is a matter of the operation alone.
    fn trouble(&mut self, id: OpId, trouble: Trouble) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        match trouble {
            Trouble::Request(fail) if fail != Fail::NotFound => {
                // NIXL says the same where it has dropped the peer: then this can't be sent either, and the peer is looked after.
                if let Some(peer) = self.peers.get(&op.peer) {
                    self.net.send(peer.endpoint, &Frame::Ping);
                }
                self.stop(id, TransferError::Lane { reason: format!("NIXL could not make a request: {fail}") });
                return;
            }
            Trouble::Request(_) => op.failed = true,
            Trouble::Lost => (op.failed, op.doubt) = (true, true),
        }
        if let Some(peer) = self.peers.get(&op.peer)
            && peer.lost.is_none()
        {
            self.unreachable(peer.endpoint);
        }
        self.look_at(id);
    }

    /// Forgets the memory of requests whose connections NIXL has closed.
    pub(super) fn lay_ghosts(&mut self, now: Instant) {
        for ghost in &mut self.ghosts {
            if ghost.dead && ghost.forgotten.is_none() && self.net.get(ghost.endpoint).is_none() {
                ghost.forgotten = Some(now);
            }
        }
        self.ghosts.retain(|ghost| ghost.forgotten.is_none_or(|at| now < at + HAUNT));
    }

    fn count(&mut self, request: &Request, filled: Filled) {
        let measured = if self.config.telemetry { self.net.agent.telemetry(request).ok() } else { None };
        let mut telemetry = self.shared.telemetry();
        telemetry.requests += 1;
        telemetry.bytes += filled.bytes;
        telemetry.descriptors += filled.descriptors as u64;
        if let Some(measured) = measured {
            telemetry.posting += Duration::from_micros(measured.post_duration_us);
            telemetry.moving += Duration::from_micros(measured.xfer_duration_us);
        }
    }
}
