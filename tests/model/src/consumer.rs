//! A consumer: its requests, and the ranks that read for them.
//!
//! Mirrors `kvferry-session/src/owner/{pulls,ends,beats,loans,roads}.rs` where a request's state changes, without questions to
//! producers, assurance above the fence, limits, and outcomes by group. Of a rank (`rank/pull.rs`) there is a read that was
//! ordered: its bytes come at some moment, piece by piece, and it ends once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_proto::names::{Attempt, Epoch, Fence};
use kvferry_proto::peer::{
    BindAnswer, Heartbeat, HeartbeatAnswer, LeaseClosed, Left, ReadsEnd, Release, ReleaseAnswer,
};
use kvferry_proto::rank::{PullId, RankFault, RankReport, SourceReport, Stage};
use kvferry_proto::request::{Asking, Ended, Granted, RankResult, Reading, Releasing, Step, Wanted};

use crate::fault::Fault;
use crate::network::{End, LinkId, Message};
use crate::producer::{Content, block_of, content_key};
use crate::rules::Rule;
use crate::state::{Fate, State};
use crate::world::{PullPlan, World};

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Consumer {
    pub(crate) lives: u8,
    pub(crate) epoch: Epoch,
    /// The rank whose link is lost.
    pub(crate) lost: Option<RankId>,
    pub(crate) pulls: BTreeMap<PullId, Pull>,
    /// The link to each producer that requests take.
    pub(crate) roads: BTreeMap<usize, LinkId>,
    last_beat: u64,
    awaited: BTreeMap<LinkId, Awaited>,
    pub(crate) beats_due: BTreeMap<LinkId, Duration>,
    pub(crate) loans: BTreeMap<u32, Loan>,
    /// Requests in doubt: the block, and the ranks of which nothing proves that they have stopped.
    pub(crate) quarantine: BTreeMap<PullId, (u32, BTreeSet<RankId>)>,
    pub(crate) reads: BTreeMap<(RankId, PullId), Read>,
    /// What was read: by whom, for which block, from whom.
    pub(crate) memory: BTreeMap<(RankId, u32, RankId), Content>,
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
    pub(crate) state: Phase,
}

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) enum Phase {
    Linking(Wanted),
    Asking(Asking, Duration),
    Reading(Reading),
    Stopping { reading: Reading, why: Why, until: Option<Duration> },
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

/// Heartbeats of a link whose answers are awaited, at most.
const MAX_AWAITED: usize = 4;

/// A rank's share of a request, under way.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Read {
    pub(crate) attempt: Attempt,
    pub(crate) producer: usize,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// From whom it has still to read, and from whom it has.
    pub(crate) left: Vec<RankId>,
    pub(crate) done: Vec<RankId>,
    pub(crate) course: Course,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Course {
    Runs,
    Cancelled,
    /// It never ends.
    Hangs,
}

/// How a rank's read ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum How {
    /// All was read.
    Complete,
    /// A source could not be read.
    Failed,
    /// It was told to stop, and has.
    Cancelled,
}

impl Consumer {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            lives: 0,
            epoch: epoch(number, 0),
            lost: None,
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
            Phase::Reading(_) => Some(self.lease_end.map_or(self.deadline, |end| end.min(self.deadline))),
            _ => Some(self.deadline),
        }
    }

    fn is_expired(&self, now: Duration) -> bool {
        matches!(self.state, Phase::Reading(_)) && self.lease_end.is_some_and(|end| end <= now)
    }
}

fn epoch(number: usize, life: u8) -> Epoch {
    Epoch::new(2000 + 100 * number as u128 + u128::from(life))
}

fn fault(stage: Stage, in_doubt: bool) -> RankFault {
    RankFault { stage, text: String::new(), in_doubt, bad: Vec::new() }
}

fn report(sources: &[RankId]) -> RankResult {
    let source = |&src: &RankId| SourceReport {
        src,
        bytes: Bytes::ZERO,
        rows: 0,
        descriptors_before: 0,
        descriptors_after: 0,
        place: Place::Direct,
        lane: String::new(),
        took: Duration::ZERO,
    };
    Ok(RankReport {
        sources: sources.iter().map(source).collect(),
        zeroed: Bytes::ZERO,
        compared: Bytes::ZERO,
        queued: Duration::ZERO,
        slices: 0,
        took: Duration::ZERO,
    })
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
        let stopped = BTreeSet::new();
        let pull = Pull { fence, attempt, link: None, started: now, deadline, lease_end: None, stopped, state };
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
        self.send(link, Message::Bind(bind));
    }

    pub(crate) fn on_bind_answer(&mut self, link: LinkId, answer: BindAnswer) {
        let (fence, left) = match &answer {
            BindAnswer::Bound(grant) => (&grant.fence, grant.time_left),
            BindAnswer::Refused { fence, .. } => (fence, None),
        };
        let now = self.s.now;
        let Some(id) = self.c().and_then(|c| c.find(fence, link)) else { return };
        let Some(Phase::Asking(asking, sent)) = self.state(id) else { return };
        match asking.on_answer(answer) {
            Step::Next(Ok(granted)) => {
                let from = if self.w.is(Fault::CountFromAnswer) { now } else { sent };
                let end = left.map(|left| from + left);
                if let Some(pull) = self.pull(id) {
                    pull.lease_end = end;
                }
                let margin = Duration::from_secs(self.w.terms.margin);
                match end.map(|end| end.saturating_sub(now)) {
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

    /// All named ranks are ordered to read; one that isn't there makes the others stop.
    fn read(&mut self, id: PullId, granted: Granted) {
        let (w, number) = (self.w, self.number);
        let Some(engine) = w.consumers.get(number) else { return };
        let (Some(from), Some(plan)) = (block_of(granted.groups()), w.plan(id)) else { return };
        let Some(pull) = self.pull(id) else { return };
        let attempt = pull.attempt;
        let (_, Some(map)) = w.map(engine, pull.fence.lease, attempt) else { return };
        let producer = w.leases.get(plan.lease).map_or(0, |l| l.producer);
        let reading = granted.read(map);
        let named: Vec<RankId> = reading.pending().collect();
        self.put(id, Phase::Reading(reading));
        let mut absent = Vec::new();
        for rank in named {
            let Some(c) = self.c() else { return };
            if c.lost == Some(rank) {
                absent.push(rank);
                continue;
            }
            c.memory.retain(|(of, block, _), _| (*of, *block) != (rank, plan.block));
            let left: Vec<RankId> = map.sources_of(rank).collect();
            let read = Read { attempt, producer, from, to: plan.block, left, done: Vec::new(), course: Course::Runs };
            let before = c.reads.iter().any(|((_, pull), read)| *pull == id && read.attempt != attempt);
            c.reads.insert((rank, id), read);
            if before {
                self.s.broken.insert(Rule::StoppedBeforeRetry);
            }
        }
        for rank in absent {
            self.on_pulled(rank, id, Err(fault(Stage::Read, false)));
        }
    }

    /// A piece of a read arrives: whatever is there now.
    pub(crate) fn copy(&mut self, rank: RankId, id: PullId) {
        let Some(read) = self.c().and_then(|c| c.reads.get_mut(&(rank, id))) else { return };
        if read.left.is_empty() {
            return;
        }
        let src = read.left.remove(0);
        read.done.push(src);
        let (producer, from, to) = (read.producer, read.from, read.to);
        let content = self.s.producers.get(producer).map_or(Content::Other, |p| p.content(src, from));
        if let Some(c) = self.c() {
            c.memory.insert((rank, to, src), content);
        }
    }

    /// A read ends, and its rank says so.
    pub(crate) fn finish(&mut self, rank: RankId, id: PullId, how: How) -> Option<RankResult> {
        let read = self.c()?.reads.remove(&(rank, id))?;
        let result = match how {
            How::Complete => report(&read.done),
            How::Failed if self.w.is(Fault::FaultIsFine) => {
                let all: Vec<RankId> = read.done.iter().chain(&read.left).copied().collect();
                report(&all)
            }
            How::Failed => Err(fault(Stage::Read, false)),
            How::Cancelled => Err(fault(Stage::Cancelled, false)),
        };
        self.on_pulled(rank, id, result.clone());
        Some(result)
    }

    pub(crate) fn on_pulled(&mut self, rank: RankId, id: PullId, result: RankResult) {
        let failed = result.is_err();
        let (reading, stopping) = match self.state(id) {
            Some(Phase::Reading(reading)) => (reading, None),
            Some(Phase::Stopping { reading, why, until }) => (reading, Some((why, until))),
            Some(_) => return,
            None => {
                if !matches!(&result, Err(fault) if fault.in_doubt) {
                    self.stopped(id, rank);
                }
                return;
            }
        };
        let first = self.w.is(Fault::FirstRankEndsAll);
        match (reading.on_rank(rank, result), stopping) {
            (Step::Next(ended), stopping) => self.reads_ended(id, ended, stopping.map_or(Why::Ranks, |s| s.0)),
            (Step::Waiting(reading), None) if !failed && first => {
                let mut ended = reading;
                loop {
                    let Some(next) = ended.pending().next() else { return };
                    let sources: Vec<RankId> = self.sources(id, next);
                    match ended.on_rank(next, report(&sources)) {
                        Step::Next(ended) => return self.reads_ended(id, ended, Why::Ranks),
                        Step::Waiting(same) | Step::Ignored(same) => ended = same,
                    }
                }
            }
            (Step::Waiting(reading), None) if failed && self.w.is(Fault::RetryBeforeStopped) => {
                let ended = reading.end_pending(&fault(Stage::Cancelled, false));
                self.reads_ended(id, ended, Why::Ranks);
            }
            (Step::Ignored(reading) | Step::Waiting(reading), Some((why, until))) => {
                self.put(id, Phase::Stopping { reading, why, until });
            }
            (Step::Waiting(reading), None) if failed => self.stop_ranks(id, reading, Why::Ranks),
            (Step::Ignored(reading) | Step::Waiting(reading), None) => self.put(id, Phase::Reading(reading)),
        }
    }

    fn sources(&mut self, id: PullId, rank: RankId) -> Vec<RankId> {
        let (w, number) = (self.w, self.number);
        let Some(pull) = self.pull(id) else { return Vec::new() };
        let Some(engine) = w.consumers.get(number) else { return Vec::new() };
        let (_, map) = w.map(engine, pull.fence.lease, pull.attempt);
        map.map(|m| m.sources_of(rank).collect()).unwrap_or_default()
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
                let forgets = !self.w.is(Fault::DoubtForgotten);
                if let Some(pull) = self.pull(id) {
                    (pull.attempt, pull.lease_end) = (wanted.fence().attempt, None);
                    pull.state = Phase::Linking(wanted);
                    pull.stopped.retain(|_| !forgets);
                }
                return self.bind(id, link);
            }
        }
        self.send(link, Message::Release(ended.abandon()));
        self.fail(id, Some(&ended));
    }

    fn another_attempt(&mut self, id: PullId, ended: &Ended) -> Option<Wanted> {
        let (w, now, number) = (self.w, self.s.now, self.number);
        let (engine, plan) = (w.consumers.get(number)?, w.plan(id)?);
        let pull = self.pull(id)?;
        let made = pull.attempt.get() - pull.fence.attempt.get() + 1;
        let of_source = |fault: &RankFault| {
            let stage = matches!(fault.stage, Stage::Connect | Stage::Submit | Stage::Read | Stage::Cancelled);
            stage && !fault.in_doubt && fault.bad.is_empty()
        };
        let sources = ended.results().values().filter_map(|r| r.as_ref().err()).all(of_source);
        if made >= plan.attempts || pull.deadline <= now || !sources {
            return None;
        }
        let wanted = ended.again(content_key(plan.lease))?;
        let map = w.map(engine, pull.fence.lease, wanted.fence().attempt).1?;
        let before = w.map(engine, pull.fence.lease, pull.attempt).1?.digest();
        let former = ended.sources();
        let others = map.pairs().iter().any(|p| !former.contains(&(p.dst(), p.src())));
        (others && map.digest() != before).then_some(wanted)
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

    pub(crate) fn on_lease_closed(&mut self, link: LinkId, notice: &LeaseClosed) {
        if let Some(id) = self.c().and_then(|c| c.find(&notice.fence, link)) {
            self.stop_reading(id);
        }
    }

    fn stop_reading(&mut self, id: PullId) {
        if matches!(self.state(id), Some(Phase::Reading(_))) {
            self.stop(id);
        }
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

    fn stop_ranks(&mut self, id: PullId, reading: Reading, why: Why) {
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
                Some(Phase::Stopping { .. }) | None => {}
                Some(_) => self.stop(id),
            }
        }
        let Some(c) = self.c() else { return };
        let links: Vec<LinkId> = c.beats_due.iter().filter(|(_, due)| **due <= now).map(|(link, _)| *link).collect();
        for link in links {
            self.beat(link);
        }
    }

    fn beat_for(&mut self, link: LinkId) {
        let due = self.s.now + Duration::from_secs(self.w.terms.beat);
        if let Some(c) = self.c() {
            c.beats_due.entry(link).or_insert(due);
        }
    }

    fn beats_end(&mut self, link: LinkId) {
        if let Some(c) = self.c() {
            c.beats_due.remove(&link);
            c.awaited.remove(&link);
        }
    }

    fn beat(&mut self, link: LinkId) {
        let (now, beat) = (self.s.now, Duration::from_secs(self.w.terms.beat));
        let Some(c) = self.c() else { return };
        let pulls = c.ending_leases(link, now);
        c.beats_due.remove(&link);
        if pulls.is_empty() {
            c.awaited.remove(&link);
            return;
        }
        c.last_beat += 1;
        let number = c.last_beat;
        let awaited = c.awaited.entry(link).or_default();
        awaited.insert(number, (now, pulls.clone()));
        while awaited.len() > MAX_AWAITED {
            awaited.pop_first();
        }
        let leases = pulls.iter().filter_map(|id| c.pulls.get(id)).map(|p| (p.fence.lease, p.attempt)).collect();
        c.beats_due.insert(link, now + beat);
        self.send(link, Message::Heartbeat(Heartbeat { beat: number, leases }));
    }

    pub(crate) fn on_heartbeat_answer(&mut self, link: LinkId, answer: HeartbeatAnswer) {
        let now = self.s.now;
        let Some(c) = self.c() else { return };
        let awaited = c.awaited.get_mut(&link).and_then(|awaited| awaited.remove(&answer.beat));
        let Some((sent, pulls)) = awaited else { return };
        let sent = if self.w.is(Fault::CountFromAnswer) { now } else { sent };
        for (id, left) in pulls.into_iter().zip(answer.left) {
            let end = match left {
                Left::Closed => {
                    self.stop_reading(id);
                    continue;
                }
                Left::For(time) => Some(sent + time),
                Left::Always => None,
            };
            if let Some(pull) = self.pull(id) {
                pull.lease_end = match (pull.lease_end, end) {
                    (Some(before), Some(end)) => Some(before.max(end)),
                    _ => None,
                };
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
    fn deliver(&mut self, id: PullId, ended: &Ended) {
        let Some(plan) = self.w.plan(id) else { return };
        let Some(c) = self.c() else { return };
        let right = |(dst, src)| c.memory.get(&(dst, plan.block, src)) == Some(&Content::Of(plan.lease));
        let all_right = ended.sources().into_iter().all(right);
        if !all_right {
            self.s.broken.insert(Rule::DeliveredIsRight);
        }
        if self.s.leases.get(plan.lease).is_some_and(|told| told.held == 0) {
            self.s.broken.insert(Rule::DeliveredIsHeld);
        }
        self.end(id, Fate::Delivered, None);
    }

    fn fail(&mut self, id: PullId, ended: Option<&Ended>) {
        self.end(id, Fate::Failed, ended);
    }

    fn end(&mut self, id: PullId, fate: Fate, ended: Option<&Ended>) {
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
    fn stopped(&mut self, id: PullId, rank: RankId) {
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
