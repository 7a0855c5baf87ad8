//! How a consumer's requests end: told to stop, out of time, with a link or a rank lost, delivered.

use std::collections::BTreeSet;

use kvferry_geometry::units::RankId;
use kvferry_proto::peer::LeaseClosed;
use kvferry_proto::rank::{PullId, Stage};
use kvferry_proto::request::{Ended, Reading};

use super::reads::Course;
use super::{At, Consumer, Loan, LoanOf, Phase, Why, epoch, fault};
use crate::fault::Fault;
use crate::network::{End, LinkId};
use crate::producer::Content;
use crate::rules::Rule;
use crate::state::Fate;

impl At<'_> {
    pub(crate) fn on_lease_closed(&mut self, link: LinkId, notice: &LeaseClosed) {
        if let Some(id) = self.c().and_then(|c| c.find(&notice.fence, link)) {
            self.stop_reading(id);
        }
    }

    pub(super) fn stop_reading(&mut self, id: PullId) {
        if matches!(self.state(id), Some(Phase::Reading(_))) {
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
            Some(Phase::Asking(..)) => {
                if let Some((link, fence)) = self.pull(id).and_then(|p| Some((p.link?, p.now_fence()))) {
                    self.release_former(id, link);
                    self.abandoned(link, fence);
                }
                self.fail(id, None);
            }
            Some(Phase::Reading(reading)) if self.w.is(Fault::EndBeforeStopped) => {
                let ended = reading.end_pending(&fault(Stage::Cancelled, false));
                self.reads_ended(id, ended, Why::Told);
            }
            Some(Phase::Reading(reading)) => self.stop_ranks(id, reading, Why::Told),
            Some(Phase::Releasing(releasing)) => self.fail(id, Some(releasing.ended())),
            Some(Phase::Linking(_)) => self.fail(id, None),
            Some(Phase::Stopping { .. }) | None => {}
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
                None => false,
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
        c.reads.retain(|(of, _), _| *of != rank);
        c.memory.retain(|(of, _, _), _| *of != rank);
        for pull in c.pulls.values_mut().filter(|_| early) {
            if let Phase::Reading(reading) | Phase::Stopping { reading, .. } = &pull.state
                && reading.names(rank)
            {
                pull.stopped.insert(rank);
            }
        }
        let waiting: Vec<PullId> = c.quarantine.keys().copied().collect();
        for id in waiting {
            self.stopped(id, rank);
        }
    }

    /// All of the engine dies and is started again.
    pub(crate) fn restart(&mut self) {
        let number = self.number;
        let Some(c) = self.c() else { return };
        let lives = c.lives + 1;
        let gone: Vec<PullId> = c.pulls.keys().copied().collect();
        *c = Consumer { lives, epoch: epoch(number, lives), ..Consumer::new(number) };
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
        let Some(c) = self.c() else { return };
        let right = |(dst, src)| c.memory.get(&(dst, plan.block, src)) == Some(&Content::Of(plan.lease));
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
            if in_doubt.is_empty() || w.is(Fault::NoQuarantine) {
                c.loans.remove(&plan.block);
            } else {
                c.loans.insert(plan.block, Loan { pull: id, of: LoanOf::Quarantine });
                c.quarantine.insert(id, (plan.block, in_doubt));
            }
            if let Some(link) = pull.link {
                self.close_if_unused(w.leases.get(plan.lease).map_or(0, |l| l.producer), link);
            }
        }
        self.s.pull_ends(id, fate);
    }

    /// A rank that was in doubt has stopped after all.
    pub(super) fn stopped(&mut self, id: PullId, rank: RankId) {
        let Some(c) = self.c() else { return };
        let Some((block, ranks)) = c.quarantine.get_mut(&id) else { return };
        ranks.remove(&rank);
        if ranks.is_empty() {
            let block = *block;
            c.quarantine.remove(&id);
            c.loans.remove(&block);
        }
    }
}
