//! How a consumer's requests end: told to stop, out of time, with a link or a rank lost, delivered.

use std::collections::BTreeSet;

use kvferry_geometry::units::RankId;
use kvferry_proto::lease::Closing;
use kvferry_proto::names::Fence;
use kvferry_proto::peer::LeaseClosed;
use kvferry_proto::push::Stop;
use kvferry_proto::rank::{PullId, Stage};
use kvferry_proto::request::{Ended, Reading, Wanted};

use super::reads::Course;
use super::{At, Consumer, Left, Loan, LoanOf, NOBODY, Phase, Why, epoch, fault};
use crate::fault::Fault;
use crate::network::{End, LinkId, Made, Message};
use crate::producer::{Content, content_key};
use crate::rules::Rule;
use crate::state::Fate;

impl At<'_> {
    pub(crate) fn on_lease_closed(&mut self, link: LinkId, notice: &LeaseClosed) {
        let Some(id) = self.c().and_then(|c| c.find(&notice.fence, link)) else { return };
        if notice.how == Closing::Restarted {
            return self.on_restarted(id, link);
        }
        self.stop_reading(id);
    }

    /// The prefill begins anew, and nothing of what it has written is written any more: its room is granted again.
    fn on_restarted(&mut self, id: PullId, link: LinkId) {
        let again = self.w.is(Fault::AttemptAgain);
        let Some(fence) = self.pull(id).map(|p| p.now_fence()) else { return };
        match self.state(id) {
            Some(Phase::Receiving(_)) => {
                let Some(plan) = self.w.plan(id) else { return };
                let next = if again { Some(fence.attempt) } else { fence.attempt.next() };
                let Some(attempt) = next else { return self.fail_written(id, &NOBODY) };
                self.try_again(id, link, Wanted::new(Fence { attempt, ..fence }, content_key(plan.lease)));
            }
            // Nobody wants it any more, nor what is offered anew.
            Some(Phase::Halting { .. }) => {
                self.send(link, Message::Stop(Stop { fence }));
                self.fail_written(id, &NOBODY);
            }
            _ => {}
        }
    }

    pub(super) fn stop_reading(&mut self, id: PullId) {
        if matches!(self.state(id), Some(Phase::Receiving(_) | Phase::Reading(_))) {
            self.stop(id);
        }
    }

    /// The caller gives it up: also what stops because of its ranks makes no further attempt then.
    pub(crate) fn cancel(&mut self, id: PullId) {
        let noted = !self.w.is(Fault::AbortForgotten);
        if let Some(pull) = self.pull(id).filter(|_| noted)
            && let Phase::Stopping { why, .. } = &mut pull.state
        {
            *why = Why::Told;
        }
        self.s.given_up.insert(id);
        self.stop(id);
    }

    /// Ends a request as failed: at once if no rank reads, else when all have stopped.
    pub(crate) fn stop(&mut self, id: PullId) {
        match self.state(id) {
            Some(Phase::Asking(..) | Phase::Receiving(_)) if self.is_pushed(id) && self.w.is(Fault::StopForgotten) => {
                self.give_up(id);
                self.fail(id, None);
            }
            Some(Phase::Asking(asking, _)) if self.is_pushed(id) => self.halt(id, asking.fence().clone()),
            Some(Phase::Receiving(receiving)) => self.halt(id, receiving.fence().clone()),
            Some(Phase::Asking(..)) => {
                self.abandon(id);
                self.fail(id, None);
            }
            Some(Phase::Reading(reading)) if self.w.is(Fault::EndBeforeStopped) => {
                let ended = reading.end_pending(&fault(Stage::Cancelled, false));
                self.reads_ended(id, ended, Why::Told);
            }
            Some(Phase::Reading(reading)) => self.stop_ranks(id, reading, Why::Told),
            Some(Phase::Releasing(releasing)) => self.fail(id, Some(releasing.ended())),
            Some(Phase::Linking(_)) => self.fail(id, None),
            Some(Phase::Stopping { .. } | Phase::Halting { .. }) | None => {}
        }
    }

    /// Tells the producer that nothing of its lease will be used.
    pub(super) fn abandon(&mut self, id: PullId) {
        let Some((link, fence)) = self.pull(id).and_then(|p| Some((p.link?, p.now_fence()))) else { return };
        if self.is_pushed(id) {
            return self.send(link, Message::Stop(Stop { fence }));
        }
        self.release_former(id, link);
        self.abandoned(link, fence);
    }

    /// As one that is pulled.
    pub(super) fn give_up(&mut self, id: PullId) {
        if let Some((link, fence)) = self.pull(id).and_then(|p| Some((p.link?, p.now_fence()))) {
            self.abandoned(link, fence);
        }
    }

    pub(super) fn stop_ranks(&mut self, id: PullId, reading: Reading, why: Why) {
        let pending: Vec<RankId> = reading.pending().collect();
        let until = (!self.w.is(Fault::NoGrace)).then(|| self.s.now + self.w.grace());
        self.put(id, Phase::Stopping { reading, why, until });
        let Some(c) = self.c() else { return };
        for rank in pending {
            if let Some(read) = c.reads.get_mut(&(rank, id)).filter(|r| r.course == Course::Runs) {
                read.course = Course::Cancelled;
            }
        }
    }

    /// `link_lost_in_pulls`.
    pub(crate) fn loses_link(&mut self, producer: usize, link: LinkId) {
        self.beats_end(link);
        let Some(c) = self.c() else { return };
        if c.roads.get(&producer) == Some(&link) {
            c.roads.remove(&producer);
        }
        let on_link: Vec<PullId> = c.pulls.iter().filter(|(_, p)| p.link == Some(link)).map(|(id, _)| *id).collect();
        for id in on_link {
            self.stop(id);
            // Nothing will be heard any more of a request's writers.
            if let Some(Phase::Halting { receiving, .. }) = self.state(id) {
                let doubted = if self.w.is(Fault::LinkLossIsEvidence) { &NOBODY } else { receiving.writers() };
                self.fail_written(id, doubted);
            }
        }
    }

    /// `rank_lost_in_pulls`. The rank itself may live on for a while, and its reads with it.
    pub(crate) fn lose_rank(&mut self, rank: RankId) {
        let Some(c) = self.c() else { return };
        c.lost = Some(rank);
        for (_, read) in c.reads.iter_mut().filter(|((of, _), _)| *of == rank) {
            read.course = Course::Hangs;
        }
        let open: Vec<PullId> = c.pulls.keys().copied().collect();
        for id in open {
            let fails = match self.state(id) {
                Some(Phase::Linking(_) | Phase::Asking(..)) => true,
                Some(Phase::Reading(reading) | Phase::Stopping { reading, .. }) if reading.is_pending(rank) => {
                    self.on_pulled(rank, id, Err(fault(Stage::Read, true)));
                    continue;
                }
                Some(Phase::Reading(reading) | Phase::Stopping { reading, .. }) => reading.names(rank),
                Some(Phase::Releasing(releasing)) => releasing.ended().names(rank),
                Some(Phase::Receiving(_)) => {
                    self.pull(id).and_then(|p| p.granted.as_ref()).is_some_and(|of| of.writes_to(rank))
                }
                Some(Phase::Halting { .. }) | None => false,
            };
            if fails {
                self.stop(id);
            }
        }
    }

    /// The rank's process is another one, and joins: nothing of its former life writes any more.
    pub(crate) fn rejoin_rank(&mut self, rank: RankId) {
        let early = !self.w.is(Fault::DoubtForEver);
        let Some(c) = self.c() else { return };
        (c.lost, c.epoch) = (None, c.epoch.after());
        if let Some(life) = usize::try_from(rank.get()).ok().and_then(|n| c.ranks.get_mut(n)) {
            *life += 1;
        }
        c.reads.retain(|(of, _), _| *of != rank);
        c.memory.retain(|(of, _, _), _| *of != rank);
        for pull in c.pulls.values_mut().filter(|_| early) {
            if pull.granted.is_some() {
                pull.gone.insert(rank);
            }
            if let Phase::Reading(reading) | Phase::Stopping { reading, .. } = &pull.state
                && reading.names(rank)
            {
                pull.stopped.insert(rank);
            }
        }
        let waiting: Vec<PullId> = c.quarantine.keys().copied().collect();
        for id in waiting {
            self.settle(id, |left| {
                left.ours.remove(&rank);
                // What is written to the memory that it had changes nothing of what it has.
                if let Some(theirs) = &mut left.theirs {
                    theirs.is_new(rank);
                }
            });
        }
    }

    /// All of the engine dies and is started again.
    pub(crate) fn restart(&mut self) {
        let number = self.number;
        let Some(c) = self.c() else { return };
        let lives = c.lives + 1;
        let gone: Vec<PullId> = c.pulls.keys().copied().collect();
        let ranks = c.ranks.map(|life| life + 1);
        *c = Consumer { lives, epoch: epoch(number, lives), ranks, ..Consumer::new(number) };
        for link in self.s.links.values_mut().filter(|l| l.consumer == number) {
            link.drop_end(End::Consumer);
        }
        self.s.late.retain(|late| late.consumer != number);
        for id in gone {
            self.s.pull_ends(id, Fate::Gone);
        }
    }

    /// The one place where a request is delivered.
    pub(super) fn deliver(&mut self, id: PullId, ended: &Ended) {
        let Some(plan) = self.w.plan(id) else { return };
        let run = self.s.leases.get(plan.lease).map_or(0, |told| told.run);
        let Some(c) = self.c() else { return };
        let right = |(dst, src)| c.memory.get(&(dst, plan.block, src)) == Some(&Content::Of(plan.lease, run));
        let all_right = ended.sources().into_iter().all(right);
        if !all_right {
            self.s.broken.insert(Rule::DeliveredIsRight);
        }
        if self.s.given_up.contains(&id) {
            self.s.broken.insert(Rule::GivenUpIsOver);
        }
        if self.s.leases.get(plan.lease).is_some_and(|told| told.held == 0) {
            self.s.broken.insert(Rule::DeliveredIsHeld);
        }
        self.end(id, Fate::Delivered, None);
    }

    pub(super) fn fail(&mut self, id: PullId, ended: Option<&Ended>) {
        self.end(id, Fate::Failed, ended);
    }

    pub(super) fn end(&mut self, id: PullId, fate: Fate, ended: Option<&Ended>) {
        let (w, keep) = (self.w, self.w.is(Fault::EndTwice) && fate == Fate::Failed);
        let Some(c) = self.c() else { return };
        let Some(pull) = c.pulls.get(&id).cloned() else { return };
        if !keep {
            c.pulls.remove(&id);
        }
        let results = ended.into_iter().flat_map(Ended::results);
        let in_doubt = results.filter(|(_, r)| matches!(r, Err(fault) if fault.in_doubt)).map(|(rank, _)| *rank);
        let in_doubt: BTreeSet<RankId> = in_doubt.filter(|rank| !pull.stopped.contains(rank)).collect();
        if let Some(plan) = w.plan(id) {
            c.memory.retain(|(_, block, _), _| *block != plan.block);
            if (in_doubt.is_empty() && pull.doubt.is_none()) || w.is(Fault::NoQuarantine) {
                c.loans.remove(&plan.block);
            } else {
                c.loans.insert(plan.block, Loan { pull: id, of: LoanOf::Quarantine });
                let left = Left { block: plan.block, ours: in_doubt, theirs: pull.doubt.clone() };
                c.quarantine.insert(id, left);
                self.ask_others(id, pull.link);
            }
            if let Some(link) = pull.link {
                self.close_if_unused(w.leases.get(plan.lease).map_or(0, |l| l.producer), link);
            }
        }
        self.s.pull_ends(id, fate);
    }

    /// A rank that was in doubt has stopped after all.
    pub(super) fn stopped(&mut self, id: PullId, rank: RankId) {
        self.settle(id, |left| {
            left.ours.remove(&rank);
        });
    }

    /// Less is in doubt of a request; its block leaves quarantine when nothing is.
    pub(super) fn settle(&mut self, id: PullId, change: impl FnOnce(&mut Left)) {
        let Some(c) = self.c() else { return };
        let Some(left) = c.quarantine.get_mut(&id) else { return };
        change(left);
        if left.ours.is_empty() && left.theirs.as_ref().is_none_or(|theirs| theirs.ranks.is_empty()) {
            let block = left.block;
            c.quarantine.remove(&id);
            c.loans.remove(&block);
        }
    }

    /// Evidence of what was just left in quarantine is asked for on links that are up already.
    fn ask_others(&mut self, id: PullId, but: Option<LinkId>) {
        if self.w.is(Fault::AskedOnNewLinksOnly) {
            return;
        }
        let number = self.number;
        let Some(theirs) = self.c().and_then(|c| c.quarantine.get(&id)).and_then(|left| left.theirs.clone()) else {
            return;
        };
        let of = |l: &crate::network::Link| {
            (l.consumer, l.producer) == (number, theirs.producer) && l.at_consumer.is_up() && l.made != Made::Apart
        };
        let up: Vec<LinkId> =
            self.s.links.iter().filter(|(link, l)| of(l) && Some(**link) != but).map(|(link, _)| *link).collect();
        for link in up {
            self.send(link, Message::Stop(Stop { fence: theirs.fence.clone() }));
        }
    }
}
