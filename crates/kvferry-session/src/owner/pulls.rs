//! The consumer's side: requests, from the wish to the end of their reads. How they end stands in [`ends`](super::ends).

use super::{BTreeSet, Effect, Fence, Life, LinkId, OwnerSession, PullId, PullWish, dst_counts};

use std::sync::Arc;

use kvferry_geometry::request::{BoundRequest, Request, SrcGroup};
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::handshake::Abilities;
use kvferry_proto::names::pairing_salt;
use kvferry_proto::peer::{
    BindAnswer, BindRefusal, MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, PeerMessage, ReleaseAnswer,
};
use kvferry_proto::rank::{Pairing, PullOrder, Stage, ToRank};
use kvferry_proto::request::{Ended, Granted as GrantedLease, RankResult, Step, Wanted};

use super::config::Mode;
use super::ends::lost;
use super::loans::written;
use super::receiving::Granted;
use super::roads::RoadId;
use crate::assurance::{Assured, served};
use crate::outcome::{self, Delivered, Failed, FailureCause, Phase, Phases, Report, Times};

mod table;

use table::Outcomes;
pub(super) use table::{Asked, Pull, Pulls, State};

impl OwnerSession {
    /// Puts a state in, and tells of the phase that it begins.
    pub(super) fn put(&mut self, id: PullId, state: State) {
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        pull.state = state;
        self.pulls.due.set(id, pull.due());
    }

    /// As [`put`](Self::put), for a state of another phase.
    pub(super) fn enter(&mut self, id: PullId, state: State) {
        let now = self.now;
        if let (Some(pull), Some(phase)) = (self.pulls.open.get_mut(&id), state.phase()) {
            pull.phase_ends(now);
            pull.phase = phase;
            self.effects.push_back(Effect::Phase { pull: id, phase });
        }
        self.put(id, state);
    }

    pub(super) fn start_pull(&mut self, wish: Box<PullWish>) -> PullId {
        self.pulls.last += 1;
        let id = PullId(self.pulls.last);
        let manifest = self.life.local().map(|l| l.manifest.cache().clone());
        let mut places = Vec::new();
        let mut refused = self.refuses(&wish);
        if refused.is_none()
            && let Some(m) = &manifest
        {
            places = written(m, wish.tokens, &wish.groups);
            refused = self.loans.write(m, id, &places).err().map(FailureCause::Overlap);
        }
        let kept = manifest.map(|m| outcome::kept(&m, wish.tokens, &wish.groups, Tokens::ZERO)).unwrap_or_default();
        if let Some(cause) = refused {
            let times = Times { attempts: 1, ..Times::default() };
            let report = Report::empty(wish.fence, wish.assurance, times, kept);
            let result = Box::new(Err(Failed { cause, report }));
            self.effects.push_back(Effect::PullEnded { pull: id, result });
            return id;
        }
        let road = self.road_to(&wish.address, &wish.fence.engine);
        self.pulls.by_lease.insert((wish.fence.lease, wish.fence.epoch), id);
        let state = State::Linking(Wanted::new(wish.fence.clone(), wish.content_key));
        let (started, deadline) = (self.now, self.now.saturating_add(wish.deadline));
        let others = wish.policy.others.clone().into_iter();
        let pull = Pull {
            attempt: wish.fence.attempt,
            wish,
            road,
            link: None,
            pairing: None,
            granted: Granted::default(),
            unanswered: None,
            doubt: None,
            asked: Asked::default(),
            groups: Outcomes { kept, delivered: Vec::new() },
            stopped: BTreeSet::new(),
            places,
            started,
            deadline,
            tries: 1,
            tries_here: 1,
            others,
            lease_end: None,
            state,
            phase: Phase::Link,
            since: started,
            phases: Phases::default(),
        };
        self.pulls.due.set(id, pull.due());
        self.pulls.open.insert(id, Box::new(pull));
        self.effects.push_back(Effect::Phase { pull: id, phase: Phase::Link });
        self.seek_link(road, id);
        id
    }

    /// Goes over the link that there is, or waits for one.
    pub(super) fn seek_link(&mut self, road: RoadId, id: PullId) {
        match self.roads.link(road) {
            Some(link) if self.links.peer(link).is_some() => self.ask(id, link),
            _ => self.wait_for_link(road, id),
        }
    }

    fn refuses(&self, wish: &PullWish) -> Option<FailureCause> {
        match &self.life {
            Life::Assembling => return Some(FailureCause::NotReady),
            Life::Broken { rank, reason, .. } => {
                return Some(FailureCause::RankLost { rank: *rank, reason: reason.clone() });
            }
            Life::Ready(_) => {}
        }
        if self.service.is_draining() {
            return Some(FailureCause::Draining);
        }
        if let Err(error) = served(wish.assurance) {
            return Some(error.into());
        }
        let limit = self.config.limits.pulls;
        if self.pulls.open.len() >= limit {
            return Some(FailureCause::TooManyPulls { limit });
        }
        if self.pulls.by_lease.contains_key(&(wish.fence.lease, wish.fence.epoch)) {
            return Some(FailureCause::Refused(BindRefusal::AlreadyBound));
        }
        let (blocks, states) = dst_counts(&wish.groups);
        if blocks > MAX_REQUEST_BLOCKS {
            return Some(FailureCause::TooManyBlocks { got: blocks, limit: MAX_REQUEST_BLOCKS });
        }
        if states > MAX_REQUEST_STATES {
            return Some(FailureCause::TooManyStates { got: states, limit: MAX_REQUEST_STATES });
        }
        None
    }

    /// The link is up: asks the producer, or finds that this link will not do.
    pub(super) fn ask(&mut self, id: PullId, link: LinkId) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let (road, fence, started) = (pull.road, pull.fence(), pull.started);
        let epoch = self.links.peer(link).map(|peer| peer.epoch());
        let (Some((heard, ours)), Some(epoch)) = (self.links.standing(link), epoch) else {
            return self.wait_for_link(road, id);
        };
        let current = self.life.local().map(|l| l.manifest.digest());
        // A link that is older than the request may know less than the reference: either engine may have a new epoch since.
        let unknown = epoch != fence.epoch && !self.roads.is_stale(road, fence.epoch);
        if (unknown && heard < started) || ours != current {
            return self.renew_link(road, id);
        }
        if epoch != fence.epoch {
            self.roads.note_stale(road, fence.epoch);
            return self.stop(id, FailureCause::StaleEpoch { reference: fence.epoch, current: epoch });
        }
        self.pulls.go_over(id, link);
        self.links.used(link, self.now);
        self.bind(id, link);
    }

    /// Binds the lease by the attempt that is due.
    pub(super) fn bind(&mut self, id: PullId, link: LinkId) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let fence = pull.fence();
        let salt = pairing_salt(&self.config.engine, fence.lease, fence.attempt);
        let (options, compat) = (self.peer_options(salt), self.config.compat);
        if self.is_pushed(id) && !self.links.has(link, Abilities::PUSH) {
            return self.stop(id, FailureCause::NoPush { peer: fence.engine });
        }
        let Some((peer, direction)) = self.reading(link) else { return };
        let map = match direction.and_then(|d| d.map(options)) {
            Ok(map) => map,
            Err(error) => return self.stop(id, error.into()),
        };
        match self.pulls.take(id) {
            Some(State::Linking(wanted)) => {
                let (asking, bind) = wanted.ask(salt, map.digest());
                if let Some(pull) = self.pulls.open.get_mut(&id) {
                    pull.pairing = Some(Pairing { peer: peer.digest(), options, compat, peer_map: map.digest() });
                    pull.unanswered = Some((link, bind.fence.clone()));
                }
                let pushed = self.is_pushed(id);
                self.enter(id, State::Asking(asking, self.now));
                if pushed {
                    let pairs: Vec<(RankId, RankId)> = map.pairs().iter().map(|p| (p.src(), p.dst())).collect();
                    self.grant(id, link, bind, &peer, &pairs);
                } else {
                    self.send_peer(link, PeerMessage::Bind(bind));
                }
            }
            Some(other) => self.put(id, other),
            None => {}
        }
    }

    pub(super) fn on_bind_answer(&mut self, link: LinkId, answer: BindAnswer) {
        let (fence, left) = match &answer {
            BindAnswer::Bound(grant) => (&grant.fence, grant.time_left),
            BindAnswer::Refused { fence, .. } => (fence, None),
        };
        if self.links.settle_owed(link, fence) {
            return;
        }
        let Some(id) = self.pulls.find(fence, link) else { return };
        if let Some(pull) = self.pulls.open.get_mut(&id) {
            pull.unanswered = None;
        }
        match self.pulls.take(id) {
            Some(State::Asking(asking, sent)) => match asking.on_answer(answer) {
                Step::Next(Ok(granted)) => {
                    // Counted from when it was asked: never later than the producer counts.
                    let end = left.map(|left| sent.saturating_add(left));
                    if let Some(pull) = self.pulls.open.get_mut(&id) {
                        pull.lease_end = end;
                    }
                    let margin = self.config.lease.margin;
                    let pushed = self.is_pushed(id);
                    match end.map(|end| end.saturating_sub(self.now)) {
                        Some(left) if left <= margin && pushed => {
                            self.halt(id, granted.fence().clone(), FailureCause::LeaseExpired { left, margin });
                        }
                        left if pushed => {
                            self.receive(id, granted.fence().clone());
                            if let Some(left) = left {
                                self.beat_for(link, left);
                            }
                        }
                        Some(left) if left <= margin => {
                            self.give_back(id, link, granted, FailureCause::LeaseExpired { left, margin });
                        }
                        Some(left) => {
                            self.beat_for(link, left);
                            self.read(id, link, granted);
                        }
                        None => self.read(id, link, granted),
                    }
                }
                Step::Next(Err(reason)) => {
                    self.release_former(id, link);
                    self.stop_next_attempt(id);
                    self.fail(id, FailureCause::Refused(reason), None);
                }
                Step::Ignored(same) | Step::Waiting(same) => self.put(id, State::Asking(same, sent)),
            },
            // It was never bound, so nobody writes.
            Some(State::Halting { receiving, cause, until }) => match answer {
                BindAnswer::Refused { .. } => self.fail_written(id, cause, &BTreeSet::new()),
                BindAnswer::Bound(_) => self.put(id, State::Halting { receiving, cause, until }),
            },
            Some(other) => self.put(id, other),
            None => {}
        }
    }

    /// All is written: what follows a read is done by our ranks.
    pub(super) fn finish_written(&mut self, id: PullId, link: LinkId, fence: Fence, groups: Vec<SrcGroup>) {
        self.read(id, link, GrantedLease::written(fence, groups));
    }

    fn read(&mut self, id: PullId, link: LinkId, granted: GrantedLease) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let (wish, pairing) = (&pull.wish, pull.pairing);
        let request = Request { tokens: wish.tokens, src: granted.groups().to_vec(), dst: wish.groups.clone() };
        let request = Arc::new(request);
        let (assurance, priority, written) = (wish.assurance, wish.priority, pull.is_pushed());
        let left = pull.deadline.saturating_sub(self.now);
        let queue = wish.policy.within.queue.filter(|_| wish.mode == Mode::Pull);
        let deadline = Some(queue.map_or(left, |queue| queue.min(left)));
        let (Some(pairing), Some((peer, direction))) = (pairing, self.reading(link)) else {
            return self.give_back(id, link, granted, FailureCause::NotReady);
        };
        let direction = match direction {
            Ok(direction) => direction,
            Err(error) => return self.give_back(id, link, granted, error.into()),
        };
        let map = match direction.map(pairing.options) {
            Ok(map) => map,
            Err(error) => return self.give_back(id, link, granted, error.into()),
        };
        let (full_hit, delivered) = match BoundRequest::new(direction.compatible(), Request::clone(&request)) {
            Ok(bound) => (bound.is_full_hit(), outcome::delivered(direction.compatible(), &request, &bound)),
            Err(errors) => return self.give_back(id, link, granted, FailureCause::Request(errors)),
        };
        if let Some(pull) = self.pulls.open.get_mut(&id) {
            pull.groups.delivered = delivered;
        }
        if full_hit && !written {
            return self.reads_ended(id, granted.full_hit(), None);
        }
        let reading = granted.read(&map);
        let named: Vec<RankId> = reading.pending().collect();
        self.enter(id, State::Reading(reading));
        // All are ordered before one that isn't there makes the others stop.
        let order = |rank: &RankId| {
            let request = request.clone();
            let order = PullOrder { pull: id, pairing, request, assurance, priority, deadline, written };
            !self.send_rank(*rank, ToRank::Pull(order), Some(&peer))
        };
        let absent: Vec<RankId> = named.into_iter().filter(order).collect();
        for rank in absent {
            self.on_pulled(rank, id, Err(lost("it is not there", false)));
        }
    }

    fn give_back(&mut self, id: PullId, link: LinkId, granted: GrantedLease, cause: FailureCause) {
        self.send_peer(link, PeerMessage::Release(granted.abandon()));
        self.fail(id, cause, None);
    }

    pub(super) fn on_pulled(&mut self, rank: RankId, id: PullId, result: RankResult) {
        let result = match self.pulls.open.get(&id) {
            Some(pull) if pull.is_pushed() => pull.granted.complete(rank, result),
            _ => result,
        };
        let failed = result.is_err();
        let (reading, stopping) = match self.pulls.take(id) {
            Some(State::Reading(reading)) => (reading, None),
            Some(State::Stopping { reading, cause, until }) => (reading, Some((cause, until))),
            Some(other) => return self.put(id, other),
            None => {
                // The request has ended without it. Whatever it says, it has stopped, unless it says that it doesn't know.
                if !matches!(&result, Err(fault) if fault.in_doubt) {
                    self.loans.stopped(id, rank);
                }
                return;
            }
        };
        match (reading.on_rank(rank, result), stopping) {
            (Step::Next(ended), stopping) => self.reads_ended(id, ended, stopping.and_then(|(cause, _)| cause)),
            (Step::Ignored(reading) | Step::Waiting(reading), Some((cause, until))) => {
                self.put(id, State::Stopping { reading, cause, until });
            }
            (Step::Waiting(reading), None) if failed => self.stop_ranks(id, reading, None),
            (Step::Ignored(reading) | Step::Waiting(reading), None) => self.put(id, State::Reading(reading)),
        }
    }

    /// No rank reads any more.
    pub(super) fn reads_ended(&mut self, id: PullId, ended: Ended, cause: Option<FailureCause>) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let Some(link) = pull.link else { return };
        let cause = match (cause, Assured::check(pull.wish.assurance, &ended)) {
            (Some(cause), _) => cause,
            (None, Ok(assured)) => match ended.release() {
                Ok((releasing, release)) => {
                    self.enter(id, State::Releasing(releasing, assured));
                    return self.send_peer(link, PeerMessage::Release(release));
                }
                Err((ended, release)) => {
                    self.send_peer(link, PeerMessage::Release(release));
                    return self.fail(id, crate::assurance::NotAssured::Incomplete.into(), Some(&ended));
                }
            },
            (None, Err(error)) => {
                if let Some(wanted) = self.another_attempt(id, link, &ended) {
                    return self.try_again(id, link, wanted, true);
                }
                // Those that were stopped because of others are not what went wrong.
                let own = |r: &&RankResult| matches!(r, Err(fault) if fault.stage != Stage::Cancelled);
                let failed = ended.results().values().filter(own).count();
                let ranks = ended.results().len();
                if failed > 0 { FailureCause::Ranks { failed, ranks } } else { error.into() }
            }
        };
        self.send_peer(link, PeerMessage::Release(ended.abandon()));
        self.fail(id, cause, Some(&ended));
    }

    pub(super) fn on_release_answer(&mut self, link: LinkId, answer: &ReleaseAnswer) {
        let Some(id) = self.pulls.find(&answer.fence, link) else { return };
        match self.pulls.take(id) {
            Some(State::Releasing(releasing, assured)) => match releasing.on_answer(answer) {
                Step::Next(Ok(held)) => {
                    let now = self.now;
                    let Some(pull) = self.pulls.open.get_mut(&id) else { return };
                    let groups = std::mem::take(&mut pull.groups.delivered);
                    let times = pull.times(now);
                    self.end(id, Ok(Delivered::new(&held, assured, times, groups)));
                }
                Step::Next(Err(ended)) => self.fail(id, FailureCause::Stale, Some(&ended)),
                Step::Ignored(same) | Step::Waiting(same) => self.put(id, State::Releasing(same, assured)),
            },
            Some(other) => self.put(id, other),
            None => {}
        }
    }
}
