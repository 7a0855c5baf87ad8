//! Operations of ours, from the question to their end.

use std::sync::Arc;
use std::time::Instant;

use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::access::{Answer, Message};
use kvferry_transport::{EndpointId, Event, OpId, OpKind, Outcome, PeerId, Stats, TransferError};

use super::flights::Orphan;
use super::{STOP_WITHIN, Worker};
use crate::feed::{Feed, Filled};
use crate::frame::Frame;
use crate::shared::{NewOp, Ours, Told};

/// One operation that has not ended.
pub(super) struct Op {
    pub(super) peer: PeerId,
    pub(super) kind: OpKind,
    pub(super) stage: Stage,
    pub(super) feed: Feed,
    notify: Option<Vec<u8>>,
    pub(super) ours: Arc<[Ours]>,
    /// Of the peer, until it was asked.
    pub(super) theirs: Vec<RegionId>,
    /// Requests in progress.
    pub(super) flights: usize,
    done: Stats,
    /// A request failed, or the end could not be told: it ends with the peer.
    pub(super) failed: bool,
    /// A request failed, and nothing proves that it has stopped.
    pub(super) doubt: bool,
}

/// What an operation waits for.
pub(super) enum Stage {
    /// To be asked about.
    Waiting,
    /// The peer's answer.
    Asking,
    /// Its bytes.
    Moving,
    /// The end of what is in progress, since then; nothing more is posted, and it ends with this.
    Draining(TransferError, Instant),
}

impl Op {
    pub(super) fn count(&mut self, filled: Filled) {
        self.done.bytes = Bytes::new(self.done.bytes.get() + filled.bytes);
        self.done.descriptors += filled.descriptors as u64;
    }
}

impl Worker {
    pub(super) fn submit(&mut self, new: NewOp) {
        let NewOp { op: id, peer: peer_id, kind, batch, notify, ours, theirs } = new;
        let op = Op {
            peer: peer_id,
            kind,
            stage: Stage::Waiting,
            feed: Feed::new(batch),
            notify,
            ours: ours.into(),
            theirs,
            flights: 0,
            done: Stats::default(),
            failed: false,
            doubt: false,
        };
        self.ops.insert(id, op);
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            self.finish(id, Outcome::Failed(TransferError::Disconnected));
            return;
        };
        peer.begin_waiting();
        peer.open += 1;
        peer.waiting.push_back(id);
        match peer.lost.clone() {
            Some(cause) => self.stop(id, TransferError::PeerLost(cause)),
            None => self.ask(peer_id),
        }
    }

    /// Lets an operation end as soon as nothing of it is in progress.
    pub(super) fn stop(&mut self, id: OpId, error: TransferError) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        match op.stage {
            Stage::Draining(..) => {}
            Stage::Moving if op.flights > 0 => op.stage = Stage::Draining(error, Instant::now()),
            Stage::Waiting | Stage::Asking | Stage::Moving => self.fail(id, error),
        }
    }

    /// Ends an operation of which nothing is in progress as failed.
    fn fail(&mut self, id: OpId, error: TransferError) {
        let Some(op) = self.ops.get(&id) else { return };
        // What failed without proof is proven stopped by the end of the peer, if it was seen, and by nothing else: not by its word.
        let peer = self.peers.get(&op.peer).map(|p| (p.endpoint, p.dead));
        if op.doubt && peer.is_none_or(|(_, dead)| !dead) {
            // Nor is the peer told: it would let go of memory that may still be touched.
            if let Some((endpoint, _)) = peer {
                self.orphans.insert(id, Orphan { endpoint, left: 0, doubt: true });
            }
            self.finish(id, Outcome::InDoubt(error));
            return;
        }
        if !matches!(op.stage, Stage::Waiting) {
            self.tell_end(id, None);
        }
        self.finish(id, Outcome::Failed(error));
    }

    /// Tells the peer that an operation has stopped.
    fn tell_end(&mut self, id: OpId, notify: Option<&[u8]>) -> bool {
        let Some(peer) = self.ops.get(&id).and_then(|op| self.peers.get(&op.peer)) else { return false };
        if peer.dead {
            return false;
        }
        self.net.send(peer.endpoint, &Frame::Access(Message::End { op: id.get(), notify }))
    }

    /// Ends an operation.
    fn finish(&mut self, id: OpId, outcome: Outcome) {
        let Some(op) = self.ops.remove(&id) else { return };
        let peer_id = op.peer;
        let asked = !matches!(op.stage, Stage::Waiting);
        // Memory is let go before anybody hears of the end.
        drop(op);
        if let Some(peer) = self.peers.get_mut(&peer_id) {
            peer.open = peer.open.saturating_sub(1);
            peer.begun = peer.begun.saturating_sub(usize::from(asked));
        }
        self.shared.tell(Told::Event(Event::Completed { op: id, peer: peer_id, outcome }));
        self.ask(peer_id);
        self.settle(peer_id);
    }

    /// The peer has answered.
    pub(super) fn answered(&mut self, from: EndpointId, id: OpId, answer: Answer) {
        let asked = |op: &&mut Op| {
            matches!(op.stage, Stage::Asking) && self.peers.get(&op.peer).is_some_and(|p| p.endpoint == from)
        };
        let Some(op) = self.ops.get_mut(&id).filter(asked) else {
            // It was cancelled before, and the peer may have heard of the end before the question.
            if answer == Answer::Granted && !self.orphans.contains_key(&id) {
                self.net.send(from, &Frame::Access(Message::End { op: id.get(), notify: None }));
            }
            return;
        };
        let outcome = match answer {
            Answer::Granted => {
                op.stage = Stage::Moving;
                self.moving.push_back(id);
                return;
            }
            Answer::Stale(region) => TransferError::Stale { region },
            Answer::Revoked(region) => TransferError::Revoked { region },
            Answer::Refused => {
                let reason =
                    "the peer refused the operation: it ends, or has too many open; try again later".to_owned();
                TransferError::Lane { reason }
            }
        };
        self.finish(id, Outcome::Failed(outcome));
    }

    /// Looks whether an operation has come to its end.
    pub(super) fn look_at(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        if op.flights > 0 {
            return;
        }
        match &op.stage {
            Stage::Draining(error, _) => {
                let error = error.clone();
                self.fail(id, error);
            }
            Stage::Moving if !op.failed && op.feed.is_done() => {
                let (done, notify) = (op.done, op.notify.take());
                // NIXL has flushed the endpoint, so the bytes are at the peer before this is. That alone is no proof of them: NIXL
                // looks at the status of a request's last descriptor only, and UCX ends flushes of a failed endpoint as done. But
                // whatever fails fails the endpoint, and then this can't be sent. So a round
                // of progress, in which UCX does what it has put off, comes before it, and nothing is done without it.
                if done.descriptors > 0 {
                    self.listen();
                }
                if self.tell_end(id, notify.as_deref()) {
                    self.finish(id, Outcome::Done(done));
                } else if let Some(op) = self.ops.get_mut(&id) {
                    // The peer is looked after at once, and the operation ends with it.
                    op.failed = true;
                }
            }
            Stage::Waiting | Stage::Asking | Stage::Moving => {}
        }
    }

    /// Ends operations in doubt that should have stopped and have not.
    pub(super) fn give_up_draining(&mut self, now: Instant) -> bool {
        let late = |op: &Op| match &op.stage {
            Stage::Draining(error, since) if now > *since + STOP_WITHIN => Some(error.clone()),
            _ => None,
        };
        let given_up: Vec<_> = self.ops.iter().filter_map(|(id, op)| Some((*id, late(op)?))).collect();
        let did = !given_up.is_empty();
        for (id, error) in given_up {
            let Some(op) = self.ops.get(&id) else { continue };
            let peer = self.peers.get(&op.peer);
            // What a dead peer's memory gets matters to nobody; ours may still get what was on its way.
            let proven = op.kind == OpKind::Write && peer.is_some_and(|p| p.dead);
            if let Some(peer) = peer {
                self.orphans.insert(id, Orphan { endpoint: peer.endpoint, left: op.flights, doubt: op.doubt });
            }
            self.finish(id, if proven { Outcome::Failed(error) } else { Outcome::InDoubt(error) });
        }
        did
    }
}
