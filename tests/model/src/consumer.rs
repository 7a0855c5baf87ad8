//! A consumer: its requests, and the ranks that read for them.
//!
//! Mirrors `kvferry-session/src/owner/{pulls,ends,beats,receiving,loans,roads}.rs` where a request's state changes, without questions to
//! producers, assurance above the fence, limits, and outcomes by group.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::names::{Attempt, Epoch, Fence};
use kvferry_proto::peer::{BindAnswer, ReadsEnd, Release, ReleaseAnswer};
use kvferry_proto::push::Receiving;
use kvferry_proto::rank::{PullId, RankFault, Stage};
use kvferry_proto::request::{Asking, Ended, Reading, Releasing, Step, Wanted};

use crate::fault::Fault;
use crate::network::{End, LinkId, Message};
use crate::producer::{Content, content_key};
use crate::state::{Fate, State};
use crate::world::{Lives, PullPlan, RANKS, World};

mod beats;
mod ends;
mod reads;
mod receiving;

pub use reads::How;
pub(crate) use reads::{Course, Read};
pub(crate) use receiving::Writers;

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Consumer {
    pub(crate) lives: u8,
    pub(crate) epoch: Epoch,
    /// The rank whose link is lost.
    pub(crate) lost: Option<RankId>,
    /// Each rank's life.
    pub(crate) ranks: Lives,
    pub(crate) pulls: BTreeMap<PullId, Pull>,
    /// The link to each producer that requests take.
    pub(crate) roads: BTreeMap<usize, LinkId>,
    last_beat: u64,
    awaited: BTreeMap<LinkId, Awaited>,
    pub(crate) beats_due: BTreeMap<LinkId, Duration>,
    pub(crate) loans: BTreeMap<u32, Loan>,
    /// Requests in doubt.
    pub(crate) quarantine: BTreeMap<PullId, Left>,
    pub(crate) reads: BTreeMap<(RankId, PullId), Read>,
    /// What was read: by whom, for which block, from whom.
    pub(crate) memory: BTreeMap<(RankId, u32, RankId), Content>,
}

/// What a request has left.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Left {
    pub(crate) block: u32,
    /// The ranks of ours of which nothing proves that they have stopped.
    pub(crate) ours: BTreeSet<RankId>,
    /// The same of the producer's.
    pub(crate) theirs: Option<Writers>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Loan {
    pub(crate) pull: PullId,
    pub(crate) of: LoanOf,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum LoanOf {
    Request,
    Quarantine,
}

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Pull {
    pub(crate) fence: Fence,
    pub(crate) attempt: Attempt,
    pub(crate) link: Option<LinkId>,
    pub(crate) started: Duration,
    pub(crate) deadline: Duration,
    pub(crate) lease_end: Option<Duration>,
    /// Ranks that were in doubt, and are known to have stopped before it has ended.
    stopped: BTreeSet<RankId>,
    /// Of one that is pushed: who may write it, as it was told to.
    pub(crate) granted: Option<Writers>,
    /// Ranks of ours that have begun another life since: what is written to their memory of before changes nothing.
    gone: BTreeSet<RankId>,
    /// Those of them that may still write it though it has ended.
    doubt: Option<Writers>,
    pub(crate) push: bool,
    pub(crate) state: Phase,
}

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) enum Phase {
    Linking(Wanted),
    Asking(Asking, Duration),
    Receiving(Receiving),
    /// It has failed; the producer's ranks are stopping.
    Halting {
        receiving: Receiving,
        until: Duration,
    },
    Reading(Reading),
    Stopping {
        reading: Reading,
        why: Why,
        until: Option<Duration>,
    },
    Releasing(Releasing),
}

/// Why a request stops: `FailureCause`, or none of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Why {
    Told,
    Ranks,
}

/// Heartbeats whose answers are awaited: when each was sent, and for whom.
type Awaited = BTreeMap<u64, (Duration, Vec<PullId>)>;

impl Consumer {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            lives: 0,
            epoch: epoch(number, 0),
            lost: None,
            ranks: [0; RANKS as usize],
            pulls: BTreeMap::new(),
            roads: BTreeMap::new(),
            last_beat: 0,
            awaited: BTreeMap::new(),
            beats_due: BTreeMap::new(),
            loans: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            reads: BTreeMap::new(),
            memory: BTreeMap::new(),
        }
    }

    fn find(&self, fence: &Fence, link: LinkId) -> Option<PullId> {
        let of = |pull: &Pull| pull.fence.lease == fence.lease && pull.fence.epoch == fence.epoch;
        let (id, pull) = self.pulls.iter().find(|(_, pull)| of(pull))?;
        let same = pull.link == Some(link) && pull.attempt == fence.attempt && pull.fence.engine == fence.engine;
        same.then_some(*id)
    }

    /// The leases with an end that are read over a link; not those that have ended.
    fn ending_leases(&self, link: LinkId, now: Duration) -> Vec<PullId> {
        let ends = |p: &Pull| p.lease_end.is_some_and(|end| end > now) && !matches!(p.state, Phase::Asking(..));
        self.pulls.iter().filter(|(_, p)| p.link == Some(link) && ends(p)).map(|(id, _)| *id).collect()
    }

    pub(crate) fn next_due(&self) -> Option<Duration> {
        let pulls = self.pulls.values().filter_map(Pull::due);
        pulls.chain(self.beats_due.values().copied()).min()
    }
}

impl Pull {
    fn now_fence(&self) -> Fence {
        Fence { attempt: self.attempt, ..self.fence.clone() }
    }

    fn due(&self) -> Option<Duration> {
        match &self.state {
            Phase::Stopping { until, .. } => *until,
            Phase::Halting { until, .. } => Some(*until),
            Phase::Receiving(_) | Phase::Reading(_) => {
                Some(self.lease_end.map_or(self.deadline, |end| end.min(self.deadline)))
            }
            _ => Some(self.deadline),
        }
    }

    fn is_expired(&self, now: Duration) -> bool {
        matches!(self.state, Phase::Receiving(_) | Phase::Reading(_)) && self.lease_end.is_some_and(|end| end <= now)
    }
}

static NOBODY: BTreeSet<RankId> = BTreeSet::new();

fn epoch(number: usize, life: u8) -> Epoch {
    Epoch::new(2000 + 100 * number as u128 + u128::from(life))
}

fn fault(stage: Stage, in_doubt: bool) -> RankFault {
    RankFault { stage, text: String::new(), in_doubt, bad: Vec::new() }
}

/// One consumer of a state, and the world around it, for as long as something happens to it.
pub(crate) struct At<'a> {
    pub(crate) w: &'a World,
    pub(crate) s: &'a mut State,
    pub(crate) number: usize,
}

impl At<'_> {
    fn c(&mut self) -> Option<&mut Consumer> {
        self.s.consumers.get_mut(self.number)
    }

    fn pull(&mut self, id: PullId) -> Option<&mut Pull> {
        self.c()?.pulls.get_mut(&id)
    }

    /// The state, to be put back or followed by another.
    fn state(&mut self, id: PullId) -> Option<Phase> {
        Some(self.pull(id)?.state.clone())
    }

    fn put(&mut self, id: PullId, state: Phase) {
        if let Some(pull) = self.pull(id) {
            pull.state = state;
        }
    }

    fn send(&mut self, link: LinkId, message: Message) {
        self.s.send(self.w, link, End::Producer, message);
    }

    fn abandoned(&mut self, link: LinkId, fence: Fence) {
        self.send(link, Message::Release(Release { fence, reads: ReadsEnd::Abandoned }));
    }

    /// `start_pull`, with the loan of the block.
    pub(crate) fn start(&mut self, id: PullId, plan: PullPlan, fence: Fence) {
        let (now, w) = (self.s.now, self.w);
        let Some(c) = self.c() else { return };
        let same = |p: &Pull| p.fence.lease == fence.lease && p.fence.epoch == fence.epoch;
        let refused = c.lost.is_some() || c.pulls.values().any(same) || c.loans.contains_key(&plan.block);
        if refused {
            return self.s.pull_ends(id, Fate::Failed);
        }
        c.loans.insert(plan.block, Loan { pull: id, of: LoanOf::Request });
        let state = Phase::Linking(Wanted::new(fence.clone(), content_key(plan.lease)));
        let deadline = now + Duration::from_secs(plan.deadline);
        let attempt = fence.attempt;
        let pull = Pull {
            fence,
            attempt,
            link: None,
            started: now,
            deadline,
            lease_end: None,
            stopped: BTreeSet::new(),
            granted: None,
            gone: BTreeSet::new(),
            doubt: None,
            push: plan.push,
            state,
        };
        c.pulls.insert(id, pull);
        let producer = w.leases.get(plan.lease).map_or(0, |l| l.producer);
        if let Some(link) = c.roads.get(&producer).copied() {
            self.ask(id, producer, link);
        }
    }

    /// The link is up. One that is older than a request may know less than its reference: another is made then.
    pub(crate) fn ask(&mut self, id: PullId, producer: usize, link: LinkId) {
        let Some((up, ours, theirs)) = self.s.links.get(&link).map(|l| (l.up, l.consumer_epoch, l.producer_epoch))
        else {
            return;
        };
        let Some(c) = self.c() else { return };
        let Some(pull) = c.pulls.get(&id) else { return };
        let (epoch, started) = (pull.fence.epoch, pull.started);
        if (theirs != epoch && up < started) || ours != c.epoch {
            c.roads.remove(&producer);
            return self.close_if_unused(producer, link);
        }
        if theirs != epoch && !self.w.is(Fault::ForgetEpoch) {
            return self.stop(id);
        }
        if let Some(pull) = self.pull(id) {
            pull.link = Some(link);
        }
        self.bind(id, link);
    }

    fn close_if_unused(&mut self, producer: usize, link: LinkId) {
        let Some(c) = self.c() else { return };
        if c.roads.get(&producer) != Some(&link) && c.pulls.values().all(|p| p.link != Some(link)) {
            self.beats_end(link);
            if let Some(l) = self.s.links.get_mut(&link) {
                l.drop_end(End::Consumer);
            }
        }
    }

    fn bind(&mut self, id: PullId, link: LinkId) {
        let (w, now) = (self.w, self.s.now);
        let (Some(engine), Some(Phase::Linking(wanted))) = (w.consumers.get(self.number), self.state(id)) else {
            return;
        };
        let (lease, attempt) = (wanted.fence().lease, wanted.fence().attempt);
        let (salt, Some(map)) = w.map(engine, lease, attempt) else { return };
        let (asking, bind) = wanted.ask(salt, map.digest());
        self.put(id, Phase::Asking(asking, now));
        if self.is_pushed(id) {
            return self.grant(id, link, bind, map);
        }
        self.send(link, Message::Bind(bind));
    }

    pub(crate) fn on_bind_answer(&mut self, link: LinkId, answer: BindAnswer) {
        let (fence, left) = match &answer {
            BindAnswer::Bound(grant) => (&grant.fence, grant.time_left),
            BindAnswer::Refused { fence, .. } => (fence, None),
        };
        let now = self.s.now;
        let Some(id) = self.c().and_then(|c| c.find(fence, link)) else { return };
        let (asking, sent) = match self.state(id) {
            Some(Phase::Asking(asking, sent)) => (asking, sent),
            // It was never bound by this attempt, so nobody writes.
            Some(Phase::Halting { .. }) if matches!(answer, BindAnswer::Refused { .. }) => {
                return self.fail_written(id, &NOBODY);
            }
            _ => return,
        };
        match asking.on_answer(answer) {
            Step::Next(Ok(granted)) => {
                let from = if self.w.is(Fault::CountFromAnswer) { now } else { sent };
                let end = left.map(|left| from + left);
                if let Some(pull) = self.pull(id) {
                    pull.lease_end = end;
                }
                let margin = Duration::from_secs(self.w.terms.margin);
                let pushed = self.is_pushed(id);
                match end.map(|end| end.saturating_sub(now)) {
                    Some(left) if left <= margin && pushed => self.halt(id, granted.fence().clone()),
                    left if pushed => {
                        self.receive(id, granted.fence().clone());
                        if left.is_some() {
                            self.beat_for(link);
                        }
                    }
                    Some(left) if left <= margin => {
                        self.send(link, Message::Release(granted.abandon()));
                        self.fail(id, None);
                    }
                    Some(_) => {
                        self.beat_for(link);
                        self.read(id, granted);
                    }
                    None => self.read(id, granted),
                }
            }
            Step::Next(Err(_)) => {
                self.release_former(id, link);
                self.fail(id, None);
            }
            Step::Ignored(same) | Step::Waiting(same) => self.put(id, Phase::Asking(same, sent)),
        }
    }

    /// A further attempt was refused: the one before it is still bound at the producer.
    fn release_former(&mut self, id: PullId, link: LinkId) {
        let Some(pull) = self.pull(id) else { return };
        let former = pull.attempt.get().checked_sub(1).filter(|n| *n >= pull.fence.attempt.get());
        if let Some(former) = former {
            let fence = Fence { attempt: Attempt::new(former), ..pull.fence.clone() };
            self.abandoned(link, fence);
        }
    }

    /// No rank reads any more.
    fn reads_ended(&mut self, id: PullId, ended: Ended, why: Why) {
        let Some(link) = self.pull(id).and_then(|p| p.link) else { return };
        if why == Why::Ranks {
            if ended.is_complete() {
                if self.w.is(Fault::DeliverUnasked) {
                    return self.deliver(id, &ended);
                }
                match ended.release() {
                    Ok((releasing, release)) => {
                        self.put(id, Phase::Releasing(releasing));
                        return self.send(link, Message::Release(release));
                    }
                    Err((ended, release)) => {
                        self.send(link, Message::Release(release));
                        return self.fail(id, Some(&ended));
                    }
                }
            }
            if let Some(wanted) = self.another_attempt(id, &ended) {
                return self.try_again(id, link, wanted);
            }
        }
        self.send(link, Message::Release(ended.abandon()));
        self.fail(id, Some(&ended));
    }

    fn try_again(&mut self, id: PullId, link: LinkId, wanted: Wanted) {
        let forgets = !self.w.is(Fault::DoubtForgotten);
        if let Some(pull) = self.pull(id) {
            (pull.attempt, pull.lease_end) = (wanted.fence().attempt, None);
            pull.state = Phase::Linking(wanted);
            pull.stopped.retain(|_| !forgets);
        }
        self.bind(id, link);
    }

    fn another_attempt(&mut self, id: PullId, ended: &Ended) -> Option<Wanted> {
        let plan = self.w.plan(id)?;
        let wanted = ended.again(content_key(plan.lease))?;
        let faults: Vec<&RankFault> = ended.results().values().filter_map(|r| r.as_ref().err()).collect();
        let worth = self.is_worth_another(id, wanted.fence().attempt, &ended.sources(), &faults)?;
        worth.then_some(wanted)
    }

    /// Sources could not be reached, all has stopped, and the next map of peers names others.
    fn is_worth_another(
        &mut self,
        id: PullId,
        next: Attempt,
        former: &BTreeSet<(RankId, RankId)>,
        faults: &[&RankFault],
    ) -> Option<bool> {
        let (w, now, number) = (self.w, self.s.now, self.number);
        let (engine, plan) = (w.consumers.get(number)?, w.plan(id)?);
        let up = |s: &State, link: &LinkId| s.links.get(link).is_some_and(|l| l.at_consumer.is_up());
        let gone = self.c()?.lost.is_some();
        let link = self.pull(id)?.link.filter(|link| up(self.s, link));
        let pull = self.pull(id)?;
        let made = pull.attempt.get() - pull.fence.attempt.get() + 1;
        let of_source = |fault: &&RankFault| {
            let stages =
                matches!(fault.stage, Stage::Connect | Stage::Submit | Stage::Read | Stage::Write | Stage::Cancelled);
            stages && !fault.in_doubt && fault.bad.is_empty()
        };
        if made >= plan.attempts || pull.deadline <= now || !faults.iter().all(of_source) || link.is_none() || gone {
            return None;
        }
        let map = w.map(engine, pull.fence.lease, next).1?;
        let before = w.map(engine, pull.fence.lease, pull.attempt).1?.digest();
        let others = map.pairs().iter().any(|p| !former.contains(&(p.dst(), p.src())));
        Some(others && map.digest() != before)
    }

    pub(crate) fn on_release_answer(&mut self, link: LinkId, answer: &ReleaseAnswer) {
        let Some(id) = self.c().and_then(|c| c.find(&answer.fence, link)) else { return };
        let Some(Phase::Releasing(releasing)) = self.state(id) else { return };
        match releasing.on_answer(answer) {
            Step::Next(Ok(held)) => self.deliver(id, held.ended()),
            Step::Next(Err(ended)) => self.fail(id, Some(&ended)),
            Step::Ignored(same) | Step::Waiting(same) => self.put(id, Phase::Releasing(same)),
        }
    }

    /// `expire_pulls` and `send_beats`.
    pub(crate) fn step(&mut self) {
        let now = self.s.now;
        let Some(c) = self.c() else { return };
        let due: Vec<PullId> =
            c.pulls.iter().filter(|(_, p)| p.due().is_some_and(|due| due <= now)).map(|(id, _)| *id).collect();
        for id in due {
            let Some(pull) = self.pull(id) else { continue };
            if pull.is_expired(now) && pull.deadline > now {
                self.stop(id);
                continue;
            }
            match self.state(id) {
                Some(Phase::Stopping { reading, why, until: Some(until) }) if until <= now => {
                    let ended = reading.end_pending(&fault(Stage::Read, true));
                    self.reads_ended(id, ended, why);
                }
                Some(Phase::Halting { receiving, until }) if until <= now => {
                    let doubted = if self.w.is(Fault::TimeIsEvidence) { &NOBODY } else { receiving.writers() };
                    self.fail_written(id, doubted);
                }
                Some(Phase::Stopping { .. } | Phase::Halting { .. }) | None => {}
                Some(_) => self.stop(id),
            }
        }
        let Some(c) = self.c() else { return };
        let links: Vec<LinkId> = c.beats_due.iter().filter(|(_, due)| **due <= now).map(|(link, _)| *link).collect();
        for link in links {
            self.beat(link);
        }
    }
}
