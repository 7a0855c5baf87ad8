//! How requests end: stopped, failed, out of time; and what their ranks are told meanwhile.

use super::{BTreeSet, Duration, Effect, Fence, LinkId, OwnerSession, PullId};

use kvferry_geometry::compat::Unmatched;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::lease::Closing;
use kvferry_proto::peer::{LeaseClosed, PeerMessage, ReadsEnd, Release};
use kvferry_proto::push::Stop;
use kvferry_proto::rank::{RankFault, Stage, ToRank};
use kvferry_proto::request::{Ended, Reading, Wanted};

use super::config::Remedy;
use super::loans::Doubt;
use super::pulls::State;
use crate::assurance::Assurance;
use crate::outcome::{self, Delivered, Failed, FailureCause, Report};

impl OwnerSession {
    pub(super) fn cancel_pull(&mut self, id: PullId) {
        // One that stops already stops for this from now on: without another attempt, or another source.
        if let Some(pull) = self.pulls.open.get_mut(&id) {
            match &mut pull.state {
                State::Stopping { cause, .. } => *cause = Some(FailureCause::Cancelled),
                State::Halting { cause, .. } => *cause = FailureCause::Cancelled,
                _ => {}
            }
        }
        self.stop(id, FailureCause::Cancelled);
    }

    /// Ends a request as failed: at once if no rank reads, else when all have stopped.
    pub(super) fn stop(&mut self, id: PullId, cause: FailureCause) {
        match self.pulls.take(id) {
            // It may be bound by the time this arrives, and after the bind it does; and be written.
            Some(State::Asking(asking, _)) if self.is_pushed(id) => self.halt(id, asking.fence().clone(), cause),
            Some(State::Asking(..)) => {
                self.abandon(id);
                self.fail(id, cause, None);
            }
            Some(State::Receiving(receiving)) => self.halt(id, receiving.fence().clone(), cause),
            Some(same @ State::Halting { .. }) => self.put(id, same),
            Some(State::Reading(reading)) => self.stop_ranks(id, reading, Some(cause)),
            Some(State::Releasing(releasing, _)) => self.fail(id, cause, Some(releasing.ended())),
            Some(same @ State::Stopping { .. }) => self.put(id, same),
            Some(State::Linking(_) | State::Moving) => {
                self.stop_next_attempt(id);
                self.fail(id, cause, None);
            }
            None => {}
        }
    }

    /// What the producer holds for the next attempt of a push that will not be made is wanted by nobody else.
    pub(super) fn stop_next_attempt(&mut self, id: PullId) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let fence = pull.fence();
        if pull.is_pushed() && fence.attempt > pull.wish.fence.attempt {
            self.say_stop(id, fence);
        }
    }

    /// As [`stop`](Self::stop), for one that reads; the verdict tells the others.
    pub(super) fn stop_reading(&mut self, id: PullId, cause: FailureCause) {
        if self.pulls.open.get(&id).is_some_and(|p| matches!(p.state, State::Receiving(_) | State::Reading(_))) {
            self.stop(id, cause);
        }
    }

    /// The producer says that a lease is over which we have bound.
    pub(super) fn on_lease_closed(&mut self, link: LinkId, notice: &LeaseClosed) {
        if let Some(id) = self.pulls.find(&notice.fence, link) {
            if notice.how == Closing::Restarted {
                return self.on_restarted(id, link);
            }
            self.stop_reading(id, FailureCause::LeaseClosed { how: notice.how });
        }
    }

    /// The prefill begins anew, and nothing of what it has written is written any more: its room is granted again.
    fn on_restarted(&mut self, id: PullId, link: LinkId) {
        match self.pulls.take(id) {
            Some(State::Receiving(receiving)) => {
                let next =
                    receiving.fence().attempt.next().map(|attempt| Fence { attempt, ..receiving.fence().clone() });
                match (next, self.pulls.open.get(&id).map(|pull| pull.wish.content_key)) {
                    (Some(next), Some(key)) => self.try_again(id, link, Wanted::new(next, key), false),
                    _ => self.fail_written(id, FailureCause::LeaseClosed { how: Closing::Restarted }, &BTreeSet::new()),
                }
            }
            // Nobody wants it any more, nor what is offered anew.
            Some(State::Halting { receiving, cause, .. }) => {
                self.say_stop(id, receiving.fence().clone());
                if let Some(pull) = self.pulls.open.get_mut(&id) {
                    pull.granted.progress = Tokens::ZERO;
                }
                self.fail_written(id, cause, &BTreeSet::new());
            }
            Some(other) => self.put(id, other),
            None => {}
        }
    }

    pub(super) fn is_pushed(&self, id: PullId) -> bool {
        self.pulls.open.get(&id).is_some_and(|pull| pull.is_pushed())
    }

    /// Tells the producer that nothing of its lease will be used.
    pub(super) fn abandon(&mut self, id: PullId) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let (Some(link), fence) = (pull.link, pull.fence()) else { return };
        if self.is_pushed(id) {
            return self.say_stop(id, fence);
        }
        self.release_former(id, link);
        self.send_peer(link, PeerMessage::Release(Release { fence, reads: ReadsEnd::Abandoned }));
    }

    fn say_stop(&mut self, id: PullId, fence: Fence) {
        if let Some(link) = self.pulls.open.get(&id).and_then(|pull| pull.link) {
            self.send_peer(link, PeerMessage::Stop(Stop { fence }));
        }
    }

    pub(super) fn stop_ranks(&mut self, id: PullId, reading: Reading, cause: Option<FailureCause>) {
        let pending: Vec<RankId> = reading.pending().collect();
        let until = self.now.saturating_add(self.config.grace);
        self.enter(id, State::Stopping { reading, cause, until });
        for rank in pending {
            self.send_rank(rank, ToRank::Cancel(id), None);
        }
    }

    pub(super) fn link_lost_in_pulls(&mut self, link: LinkId, cause: &FailureCause) {
        for id in self.pulls.on_link(link) {
            self.stop(id, cause.clone());
            self.give_up_halting(id);
        }
    }

    /// Nothing will be heard any more of a request's writers.
    fn give_up_halting(&mut self, id: PullId) {
        match self.pulls.take(id) {
            Some(State::Halting { receiving, cause, .. }) => self.fail_written(id, cause, receiving.writers()),
            Some(other) => self.put(id, other),
            None => {}
        }
    }

    pub(super) fn rank_lost_in_pulls(&mut self, rank: RankId, reason: &str) {
        let open: Vec<PullId> = self.pulls.open.keys().copied().collect();
        for id in open {
            let Some(pull) = self.pulls.open.get_mut(&id) else { continue };
            // What it had of what has arrived is gone.
            if pull.granted.pairs().iter().any(|(dst, _)| *dst == rank) {
                pull.granted.progress = Tokens::ZERO;
            }
            let fails = match &pull.state {
                State::Linking(_) | State::Asking(..) | State::Moving => true,
                State::Receiving(_) => pull.granted.pairs().iter().any(|(dst, _)| *dst == rank),
                State::Halting { .. } => false,
                State::Reading(reading) | State::Stopping { reading, .. } if reading.is_pending(rank) => {
                    // Nothing proves that it has stopped.
                    self.on_pulled(rank, id, Err(lost(reason, true)));
                    continue;
                }
                // Its bytes are there, but nobody can use them.
                State::Reading(reading) | State::Stopping { reading, .. } => reading.names(rank),
                State::Releasing(releasing, _) => releasing.ended().names(rank),
            };
            if fails {
                self.stop(id, FailureCause::RankLost { rank, reason: reason.into() });
            }
        }
    }

    /// A rank has joined anew: whatever its former life was ordered to do, it does no more.
    pub(super) fn rank_is_new_in_pulls(&mut self, rank: RankId) {
        for pull in self.pulls.open.values_mut() {
            pull.granted.forget(rank);
            if let State::Reading(reading) | State::Stopping { reading, .. } = &pull.state
                && reading.names(rank)
            {
                pull.stopped.insert(rank);
            }
        }
        self.loans.rank_is_new(rank);
        self.evidence_has_come();
    }

    /// Ends what is overdue.
    pub(super) fn expire_pulls(&mut self) {
        while let Some(id) = self.pulls.due.take_due(self.now) {
            let now = self.now;
            let Some(pull) = self.pulls.open.get(&id) else { continue };
            if pull.is_expired(now) && !pull.is_late(now) {
                let (left, margin) = (Duration::ZERO, self.config.lease.margin);
                self.stop(id, FailureCause::LeaseExpired { left, margin });
                continue;
            }
            match self.pulls.take(id) {
                Some(State::Stopping { reading, cause, until }) if until <= now => {
                    // Ranks that have not stopped in time are in doubt.
                    let ended = reading.end_pending(&lost("it did not stop in time", true));
                    self.reads_ended(id, ended, cause);
                }
                Some(State::Halting { receiving, cause, until }) if until <= now => {
                    self.fail_written(id, cause, receiving.writers());
                }
                Some(state @ (State::Stopping { .. } | State::Halting { .. })) => self.put(id, state),
                Some(state) => {
                    let cause = self.late(id, &state);
                    self.put(id, state);
                    self.stop(id, cause);
                }
                None => {}
            }
        }
    }

    fn late(&self, id: PullId, state: &State) -> FailureCause {
        let (after, road) =
            self.pulls.open.get(&id).map_or((Duration::ZERO, None), |p| (p.allowed(self.now), Some(p.road)));
        match (state, road.and_then(|road| Some((self.roads.address(road)?, self.roads.trouble(road)?)))) {
            (State::Linking(_), Some((address, trouble))) => FailureCause::Link {
                address: address.to_owned(),
                reason: format!("{trouble}; no link within {after:?}"),
            },
            _ => FailureCause::Deadline { after, waiting_for: state.waiting_for() },
        }
    }

    pub(super) fn end_all_pulls(&mut self) {
        let open: Vec<PullId> = self.pulls.open.keys().copied().collect();
        for id in open {
            let Some(state) = self.pulls.take(id) else { continue };
            match &state {
                State::Linking(_) => {}
                State::Receiving(of) | State::Halting { receiving: of, .. } => self.say_stop(id, of.fence().clone()),
                State::Asking(asking, _) if self.is_pushed(id) => self.say_stop(id, asking.fence().clone()),
                _ => self.abandon(id),
            }
            match state {
                // Whoever has not stopped yet won't be heard of again.
                State::Reading(reading) | State::Stopping { reading, .. } => {
                    let ended = reading.end_pending(&lost("the owner was shut down before it had stopped", true));
                    self.fail(id, FailureCause::Shutdown, Some(&ended));
                }
                State::Releasing(releasing, _) => self.fail(id, FailureCause::Shutdown, Some(releasing.ended())),
                State::Receiving(receiving) | State::Halting { receiving, .. } => {
                    self.fail_written(id, FailureCause::Shutdown, receiving.writers());
                }
                State::Asking(..) if self.is_pushed(id) => {
                    let writers = self.pulls.open.get(&id).map(|pull| pull.granted.writers()).unwrap_or_default();
                    self.fail_written(id, FailureCause::Shutdown, &writers);
                }
                State::Linking(_) | State::Asking(..) | State::Moving => self.fail(id, FailureCause::Shutdown, None),
            }
        }
    }

    /// A request has failed and nothing of it moves any more: takes another source, or ends it.
    pub(super) fn fail(&mut self, id: PullId, cause: FailureCause, ended: Option<&Ended>) {
        if self.another_source(id, &cause, ended) {
            return;
        }
        let now = self.now;
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        let (fence, level) = (pull.fence(), pull.wish.assurance);
        let times = pull.times(now);
        let kept = std::mem::take(&mut pull.groups.kept);
        // What was told to be in place is so, unless somebody may still write there.
        let proven = pull.wish.policy.then == Remedy::Recompute
            && pull.wish.assurance == Assurance::Fenced
            // Nothing is told of items that only our engine has.
            && self.config.compat.destination_only == Unmatched::Refuse
            && pull.doubt.is_none();
        let kept = match self.life.local() {
            Some(local) if proven && pull.granted.progress > Tokens::ZERO => {
                outcome::kept(local.manifest.cache(), pull.wish.tokens, &pull.wish.groups, pull.granted.progress)
            }
            _ => kept,
        };
        let writers = pull.doubt.as_ref().map(|w| w.ranks.keys().copied().collect()).unwrap_or_default();
        let mut report = match ended {
            Some(ended) => Report::of(fence, level, times, ended, kept),
            None => Report::empty(fence, level, times, kept),
        };
        report.writers_in_doubt = writers;
        self.end(id, Err(Failed { cause, report }));
    }

    pub(super) fn end(&mut self, id: PullId, mut result: Result<Delivered, Failed>) {
        let Some(mut pull) = self.pulls.remove(id) else { return };
        if let Some((link, fence)) = pull.take_unanswered() {
            self.links.owe(link, fence);
        }
        if let Err(failed) = &mut result {
            failed.report.in_doubt.retain(|rank| !pull.stopped.contains(rank));
        }
        let in_doubt = result.as_ref().err().map_or(&[][..], |failed| &failed.report.in_doubt);
        let doubt = Doubt { theirs: pull.doubt, ..Doubt::ours(in_doubt) };
        self.loans.write_ended(id, pull.places, doubt, self.now);
        self.effects.push_back(Effect::PullEnded { pull: id, result: Box::new(result) });
        self.roads.stop_waiting(pull.road, id);
        if let Some(link) = pull.link {
            self.links.used(link, self.now);
            self.retire_link(link);
        }
    }
}

pub(super) fn lost(reason: &str, in_doubt: bool) -> RankFault {
    RankFault {
        stage: Stage::Read,
        text: format!("nothing is known of the rank any more: {reason}"),
        in_doubt,
        bad: Vec::new(),
    }
}
