//! What a step does: what came from peers, threads and timers is taken, and operations go on or end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::RegionId;
use kvferry_transport::{EndpointId, Event, LostCause, OpId, OpKind, Outcome, PeerId, TransferError};

use super::{BURY_AGAIN, BURY_AT_MOST, Op, STOP_WITHIN, ShmTransport, Stage};
use crate::crew::Crew;
use crate::frame::Access;
use crate::guest::Desk;
use crate::job::{End, Job, Regions};
use crate::link::{Caller, Needs, News};
use crate::process::Way;

impl ShmTransport {
    /// Takes note of what the copy threads have ended.
    pub(crate) fn hear_threads(&mut self) {
        for (op, end) in self.crew.take_ended() {
            self.on_moved(op, end);
        }
    }

    pub(super) fn on_link(&mut self, id: PeerId) {
        let held: usize = self.links.values().map(|p| p.link.mappings()).sum();
        let room = self.config.max_mappings.saturating_sub(held);
        let Some(peer) = self.links.get_mut(&id) else { return };
        if peer.link.lost().is_some() {
            return;
        }
        let news = peer.link.read(&mut self.misc.buffer, &self.poller, room);
        peer.stirred = true;
        self.take(id, news);
    }

    pub(super) fn serve(&mut self, now: Duration, key: u64) {
        let mut desk = Desk {
            now,
            house: &self.house,
            local: &self.local,
            poller: &self.poller,
            buffer: &mut self.misc.buffer,
            events: &mut self.events,
        };
        self.guests.serve(key, &mut desk);
    }

    fn take(&mut self, id: PeerId, news: Vec<News>) {
        for news in news {
            match news {
                News::Up if self.links.get(&id).is_some_and(|p| !p.closing) => {
                    self.events.push_back(Event::Connected { peer: id });
                }
                News::Up | News::Granted => {}
                News::Sent(op) => {
                    if let Some(Op { stage: Stage::Notifying(stats), .. }) = self.ops.get(&op) {
                        let done = Outcome::Done(*stats);
                        self.end(op, done);
                    }
                }
                News::Lost(cause) => self.lose(id, cause),
            }
        }
    }

    /// Gives a connection up; its operations end at once or when their threads have stopped.
    pub(super) fn lose(&mut self, id: PeerId, cause: LostCause) {
        let Some(peer) = self.links.get_mut(&id) else { return };
        if peer.link.lost().is_some() {
            return;
        }
        peer.link.lose(cause.clone(), &self.poller);
        let error = if peer.closing { TransferError::Disconnected } else { TransferError::PeerLost(cause) };
        self.stop_all(id, &error);
    }

    pub(super) fn stop_all(&mut self, id: PeerId, error: &TransferError) {
        let mut ended = Vec::new();
        for (op, state) in self.ops.iter().filter(|(_, op)| op.submission.peer == id) {
            match &state.stage {
                Stage::Running(job) => {
                    stop(&self.crew, job);
                    // Told to stop before, it has no more time than then.
                    self.stopping.entry(*op).or_insert((error.clone(), None)).0 = error.clone();
                }
                Stage::Waiting | Stage::Notifying(_) => ended.push(*op),
            }
        }
        if let Some(peer) = self.links.get_mut(&id) {
            peer.waiting.clear();
            peer.stirred = true;
        }
        for op in ended {
            self.end(op, Outcome::Failed(error.clone()));
        }
    }

    /// Tells the end of an operation.
    pub(super) fn end(&mut self, id: OpId, outcome: Outcome) {
        let Some(op) = self.ops.remove(&id) else { return };
        self.stopping.remove(&id);
        self.local.unname(&op.named.ours);
        let peer = op.submission.peer;
        if let Some(state) = self.links.get_mut(&peer) {
            state.open -= 1;
            state.stirred = true;
            if let Outcome::Failed(TransferError::Stale { region }) = &outcome {
                state.link.forget(*region);
            }
        }
        self.events.push_back(Event::Completed { op: id, peer, outcome });
    }

    /// What follows when the threads are done with an operation.
    fn on_moved(&mut self, id: OpId, end: End) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let peer_id = op.submission.peer;
        let Some(peer) = self.links.get_mut(&peer_id) else { return };
        let failed = match (peer.link.lost(), end) {
            (Some(cause), _) if !peer.closing => Some(TransferError::PeerLost(cause.clone())),
            (_, _) if peer.closing => Some(TransferError::Disconnected),
            (_, End::Failed(error)) => Some(error),
            (_, End::Stopped) => Some(TransferError::Cancelled),
            // The bytes are those of the peer's memory whatever became of it. Only if it was there after the last of them is
            // this a success: what a peer that died had in mind for them is not known.
            (_, End::Moved(..)) if peer.link.is_gone() => Some(TransferError::PeerLost(LostCause::Gone)),
            (_, End::Moved(stats, took)) => {
                peer.link.measure(stats, took);
                match op.submission.notify.take() {
                    Some(payload) => {
                        op.stage = Stage::Notifying(stats);
                        peer.link.notify(id, payload);
                        peer.stirred = true;
                    }
                    None => self.end(id, Outcome::Done(stats)),
                }
                return;
            }
        };
        if let Some(error) = failed {
            let gone = match &error {
                TransferError::PeerLost(cause) => Some(cause.clone()),
                _ => None,
            };
            self.end(id, Outcome::Failed(error));
            if let Some(cause) = gone {
                self.lose(peer_id, cause);
            }
        }
    }

    /// Begins what can begin on a connection, sends, and tells its end.
    pub(super) fn stir(&mut self, id: PeerId) {
        let waiting = match self.links.get_mut(&id) {
            Some(peer) if peer.stirred => {
                peer.stirred = false;
                std::mem::take(&mut peer.waiting)
            }
            _ => return,
        };
        let mut left = VecDeque::new();
        for op in waiting {
            if !self.begin(id, op) {
                left.push_back(op);
            }
        }
        let Some(peer) = self.links.get_mut(&id) else { return };
        peer.waiting = left;
        peer.link.forgive();
        let mut news = peer.link.flush(&self.poller);
        let lost = news.pop_if(|n| matches!(n, News::Lost(_)));
        self.take(id, news);
        if let Some(lost) = lost {
            // What the peer said before it closed tells more.
            self.on_link(id);
            self.take(id, vec![lost]);
        }
        let Some(peer) = self.links.get_mut(&id) else { return };
        if peer.open > 0 {
            return;
        }
        if peer.closing {
            peer.link.let_go();
            self.links.remove(&id);
        } else if let Some(cause) = peer.link.tell_loss() {
            peer.link.let_go();
            self.events.push_back(Event::PeerLost { peer: id, cause });
        }
    }

    /// Begins an operation; false if it must wait.
    fn begin(&mut self, peer: PeerId, id: OpId) -> bool {
        let (Some(op), Some(state)) = (self.ops.get_mut(&id), self.links.get_mut(&peer)) else { return true };
        let (way, access) = match op.submission.kind {
            OpKind::Read => (Way::Fetch, Access::Read),
            OpKind::Write => (Way::Store, Access::Write),
        };
        let peers = match state.link.places(&op.named.peers, access) {
            Needs::Wait => return false,
            Needs::Failed(error) => {
                self.end(id, Outcome::Failed(error));
                return true;
            }
            Needs::Ready(peers) => peers,
        };
        let region = |region: &RegionId| self.local.table().get(*region).map(|r| (*region, r.clone()));
        let ours: Option<Vec<_>> = op.named.ours.iter().map(region).collect();
        let job = ours.zip(state.link.side()).and_then(|(ours, side)| {
            let regions = Regions { ours, peers };
            Job::new(id, way, op.submission.batch.clone(), regions, side, self.crew.size())
        });
        match job {
            Some((job, shares)) => {
                self.crew.add(&job, shares);
                op.stage = Stage::Running(job);
            }
            None => {
                let reason = "internal error of the shm backend: a region changed under an operation".to_owned();
                self.end(id, Outcome::Failed(TransferError::Lane { reason }));
            }
        }
        true
    }

    /// Ends operations in doubt whose threads are held, most likely by the peer; gives the time of the next look.
    fn give_up(&mut self, now: Duration) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        let mut doubtful = Vec::new();
        for (id, (error, since)) in &mut self.stopping {
            let until = since.get_or_insert(now).saturating_add(STOP_WITHIN);
            if until <= now {
                doubtful.push((*id, error.clone()));
            } else {
                next = Some(next.map_or(until, |n| n.min(until)));
            }
        }
        for (id, error) in doubtful {
            if let Some(Op { stage: Stage::Running(job), .. }) = self.ops.get(&id) {
                self.crew.replace(job.tally().left(), &self.local.board);
            }
            self.end(id, Outcome::InDoubt(error));
        }
        next
    }

    pub(super) fn tick(&mut self, now: Duration) -> Option<Duration> {
        let given_up = self.give_up(now);
        let mut next = [self.guests.tick(now, &self.poller), given_up].into_iter().flatten().min();
        // An endpoint connects to another once at a time, so the next connection waits for the end of the last.
        let closing: Vec<EndpointId> = self.links.values().filter(|p| p.closing).map(|p| p.link.endpoint()).collect();
        let mut broken = Vec::new();
        let caller = Caller {
            user: self.house.user,
            id: self.house.id,
            board: self.local.board.fd(),
            other_users: self.config.other_users,
            answer_within: self.config.answer_within,
        };
        for (id, peer) in &mut self.links {
            match peer.link.tick(now, &caller, &self.poller, closing.contains(&peer.link.endpoint())) {
                Ok(at) => next = [next, at].into_iter().flatten().min(),
                Err(cause) => broken.push((*id, cause)),
            }
        }
        for (id, cause) in broken {
            self.lose(id, cause);
        }
        if self.local.bury(|key| self.guests.board(key)) {
            let at = now.saturating_add(self.misc.bury_again);
            next = Some(next.map_or(at, |n| n.min(at)));
            self.misc.bury_again = (self.misc.bury_again * 2).min(BURY_AT_MOST);
        } else {
            self.misc.bury_again = BURY_AGAIN;
        }
        next
    }
}

/// Asks a job to stop; shares that no thread has begun end at once.
pub(super) fn stop(crew: &Crew, job: &Arc<Job>) {
    job.stop();
    crew.withdraw(job);
}
