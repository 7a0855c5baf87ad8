//! A state of a world, and what can happen in it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::lease::Closing;
use kvferry_proto::names::{Attempt, Fence};
use kvferry_proto::push::PushId;
use kvferry_proto::rank::PullId;
use kvferry_proto::request::RankResult;

use crate::consumer::{At, Consumer, Course, How, Phase};
use crate::fault::Fault;
use crate::network::{End, Link, LinkId, Made, Message, Side, Wire};
use crate::producer::{Content, LatePush, Producer};
use crate::rules::Rule;
use crate::world::{Chances, PullPlan, Start, World};

mod actions;

/// Everything that the rest of a world depends on.
#[derive(Clone, PartialEq, Hash, Debug)]
pub struct State {
    pub(crate) now: Duration,
    pub(crate) producers: Vec<Producer>,
    pub(crate) consumers: Vec<Consumer>,
    pub(crate) links: BTreeMap<LinkId, Link>,
    last_link: u8,
    pub(crate) chances: Chances,
    pub(crate) leases: Vec<Told>,
    pub(crate) pulls: Vec<Fate>,
    pub(crate) late: Vec<Late>,
    pub(crate) late_pushes: Vec<LatePush>,
    /// Attempts for which writers were ordered.
    pub(crate) ordered: BTreeSet<(usize, Attempt)>,
    /// Attempts for which a consumer was told who has stopped.
    pub(crate) over: BTreeSet<(usize, Attempt, usize)>,
    /// Requests that their caller has given up.
    pub(crate) given_up: BTreeSet<PullId>,
    pub(crate) broken: BTreeSet<Rule>,
}

/// What became of a lease, as the engine was told.
#[derive(Clone, PartialEq, Hash, Debug, Default)]
pub(crate) struct Told {
    /// The reference, once it was offered.
    pub(crate) fence: Option<Fence>,
    /// How often its blocks were handed back.
    pub(crate) closes: u8,
    /// How often it was said to have been held.
    pub(crate) held: u8,
    /// Which run of its prefill is the last.
    pub(crate) run: u8,
    /// Its producer was started again.
    pub(crate) gone: bool,
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fate {
    /// It has not begun.
    Planned,
    /// It is open.
    Open,
    /// Its blocks are filled.
    Delivered,
    /// They are not.
    Failed,
    /// Its engine was started again.
    Gone,
}

/// A rank's report that comes once more.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Late {
    pub(crate) consumer: usize,
    rank: RankId,
    pull: PullId,
    result: RankResult,
}

/// An owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Owner {
    /// Of a producer.
    Producer(usize),
    /// Of a consumer.
    Consumer(usize),
}

/// Whether a rank's report comes once or twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Times {
    /// As it should.
    Once,
    /// Once more later.
    Twice,
}

/// What can happen.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// A second passes.
    Tick,
    /// An owner does what is due.
    Step(Owner),
    /// A request begins.
    Start(PullId),
    /// A link is made, by a consumer to a producer.
    Connect(usize, usize),
    /// A message arrives.
    Deliver(LinkId, End, usize),
    /// A message is lost.
    Lose(LinkId, End, usize),
    /// A message will come once more.
    Repeat(LinkId, End, usize),
    /// A link breaks.
    Break(LinkId),
    /// An end finds that its link is gone.
    Notice(LinkId, End),
    /// Bytes of a rank's read arrive.
    Copy(usize, RankId, PullId),
    /// A rank's read ends.
    Finish(usize, RankId, PullId, How, Times),
    /// A rank's read will never end.
    Hang(usize, RankId, PullId),
    /// A report comes once more.
    Again(usize),
    /// Bytes of a rank's write arrive.
    Write(usize, RankId, PushId),
    /// A rank's write ends.
    EndWrite(usize, RankId, PushId, How, Times),
    /// A rank's write will not end for long.
    HangWrite(usize, RankId, PushId),
    /// Bytes of a write arrive whose rank's life is over.
    WriteLate(usize, usize),
    /// A writer's report comes once more.
    ReportAgain(usize),
    /// A stream's block is final.
    Ready(usize),
    /// A stream is complete.
    Seal(usize),
    /// A stream's prefill begins anew.
    Anew(usize),
    /// A link is begun that no request has asked for.
    Stray(usize, usize),
    /// Its consumer hears what the producer has said of itself.
    Greet(LinkId),
    /// A lease is offered.
    Offer(usize),
    /// A closed lease's block is filled with other bytes.
    Reuse(usize),
    /// A lease is taken back.
    Withdraw(usize),
    /// A request is given up.
    Abort(PullId),
    /// An engine dies and is started again.
    Restart(Owner),
    /// A rank's link to its owner is lost.
    LoseRank(Owner, RankId),
    /// A lost rank joins again.
    Rejoin(Owner, RankId),
}

impl World {
    /// How it begins: leases are offered, requests that begin at once have.
    #[must_use]
    pub fn first(&self) -> State {
        let mut s = State {
            now: Duration::ZERO,
            producers: (0..self.producers.len()).map(Producer::new).collect(),
            consumers: (0..self.consumers.len()).map(Consumer::new).collect(),
            links: BTreeMap::new(),
            last_link: 0,
            chances: self.chances,
            leases: vec![Told::default(); self.leases.len()],
            pulls: vec![Fate::Planned; self.pulls.len()],
            late: Vec::new(),
            late_pushes: Vec::new(),
            ordered: BTreeSet::new(),
            over: BTreeSet::new(),
            given_up: BTreeSet::new(),
            broken: BTreeSet::new(),
        };
        for lease in (0..self.leases.len()).filter(|l| self.leases.get(*l).is_some_and(|plan| plan.after.is_none())) {
            s.offer(self, lease);
        }
        for (id, plan) in self.requests() {
            if plan.start == Start::First {
                s.start(self, id, plan);
            }
        }
        s
    }

    /// What can happen in a state.
    pub fn actions(&self, s: &State, out: &mut Vec<Action>) {
        s.of_time(out);
        s.of_requests(self, out);
        s.of_links(self, out);
        s.of_reads(self, out);
        s.of_writes(self, out);
        s.of_engines(self, out);
    }

    /// What follows.
    #[must_use]
    pub fn next(&self, s: &State, action: &Action) -> State {
        let mut next = s.clone();
        next.happens(self, action);
        next
    }

    pub(crate) fn plan(&self, id: PullId) -> Option<PullPlan> {
        self.pulls.get(usize::try_from(id.0).ok()?).copied()
    }

    fn requests(&self) -> impl Iterator<Item = (PullId, PullPlan)> {
        (0..).map(PullId).zip(self.pulls.iter().copied())
    }
}

impl State {
    /// What became of each request.
    #[must_use]
    pub fn fates(&self) -> &[Fate] {
        &self.pulls
    }

    pub(crate) fn can_go_on(&self, w: &World) -> bool {
        let mut out = Vec::new();
        w.actions(self, &mut out);
        !out.is_empty()
    }

    pub(crate) fn pull_ends(&mut self, id: PullId, fate: Fate) {
        let Some(of) = usize::try_from(id.0).ok().and_then(|n| self.pulls.get_mut(n)) else { return };
        if *of != Fate::Open {
            self.broken.insert(Rule::OneOutcome);
        }
        *of = fate;
        self.given_up.remove(&id);
    }

    pub(crate) fn send(&mut self, w: &World, link: LinkId, to: End, message: Message) {
        if let Some(link) = self.links.get_mut(&link) {
            link.send(to, message, w.network);
        }
    }

    fn fate(&self, id: PullId) -> Option<Fate> {
        self.pulls.get(usize::try_from(id.0).ok()?).copied()
    }

    fn start(&mut self, w: &World, id: PullId, plan: PullPlan) {
        let Some(fence) = self.leases.get(plan.lease).and_then(|told| told.fence.clone()) else { return };
        if let Some(fate) = usize::try_from(id.0).ok().and_then(|n| self.pulls.get_mut(n)) {
            *fate = Fate::Open;
        }
        self.at(w, plan.consumer).start(id, plan, fence);
    }

    fn at<'a>(&'a mut self, w: &'a World, number: usize) -> At<'a> {
        At { w, s: self, number }
    }

    fn happens(&mut self, w: &World, action: &Action) {
        match *action {
            Action::Tick => self.now += Duration::from_secs(1),
            Action::Step(Owner::Producer(n)) => self.step_producer(w, n),
            Action::Step(Owner::Consumer(n)) => self.at(w, n).step(),
            Action::Start(id) => {
                if let Some(plan) = w.plan(id) {
                    self.start(w, id, plan);
                }
            }
            Action::Connect(consumer, producer) => self.connect(w, consumer, producer),
            Action::Deliver(link, end, index) => self.deliver(w, link, end, index),
            Action::Lose(link, end, index) => {
                self.chances.losses -= 1;
                let _lost = self.links.get_mut(&link).and_then(|l| l.take(end, index));
            }
            Action::Repeat(link, end, index) => {
                self.chances.repeats -= 1;
                if let Some(Side::Up(waiting)) = self.links.get_mut(&link).map(|l| l.side_mut(end))
                    && let Some(message) = waiting.get(index).cloned()
                {
                    waiting.insert(index, message);
                }
            }
            Action::Break(link) => {
                self.chances.breaks -= 1;
                if let Some(l) = self.links.get_mut(&link) {
                    l.wire = Wire::Cut;
                }
            }
            Action::Notice(link, end) => self.notice(w, link, end),
            Action::Copy(n, rank, pull) => self.at(w, n).copy(rank, pull),
            Action::Finish(n, rank, pull, how, times) => {
                if how == How::Failed {
                    self.chances.fails -= 1;
                }
                let result = self.at(w, n).finish(rank, pull, how);
                if let (Times::Twice, Some(result)) = (times, result) {
                    self.chances.echoes -= 1;
                    self.late.push(Late { consumer: n, rank, pull, result });
                }
            }
            Action::Hang(n, rank, pull) => {
                self.chances.hangs -= 1;
                if let Some(read) = self.consumers.get_mut(n).and_then(|c| c.reads.get_mut(&(rank, pull))) {
                    read.course = Course::Hangs;
                }
            }
            Action::Again(index) => {
                let Late { consumer, rank, pull, result } = self.late.remove(index);
                self.at(w, consumer).on_pulled(rank, pull, result);
            }
            _ => self.happens_to_writes(w, action),
        }
        self.links.retain(|_, l| l.at_consumer.is_up() || l.at_producer.is_up());
    }

    fn happens_to_writes(&mut self, w: &World, action: &Action) {
        let of = |lease: usize| w.leases.get(lease).map_or(0, |plan| plan.producer);
        match *action {
            Action::Write(n, rank, push) => self.write(n, rank, push),
            Action::EndWrite(n, rank, push, how, times) => {
                match how {
                    How::Failed => self.chances.fails -= 1,
                    How::InDoubt => self.chances.hangs -= 1,
                    How::Complete | How::Cancelled => {}
                }
                if times == Times::Twice {
                    self.chances.echoes -= 1;
                }
                self.end_write(w, n, rank, push, (how, times));
            }
            Action::HangWrite(n, rank, push) => {
                self.chances.hangs -= 1;
                if let Some(write) = self.producers.get_mut(n).and_then(|p| p.writes.get_mut(&(rank, push))) {
                    write.course = Course::Hangs;
                }
            }
            Action::WriteLate(n, at) => self.write_late(n, at),
            Action::ReportAgain(index) => self.report_again(w, index),
            Action::Ready(lease) => self.region_ready(w, of(lease), w.lease_id(lease)),
            Action::Seal(lease) => self.seal(of(lease), w.lease_id(lease)),
            Action::Anew(lease) => {
                self.chances.prefills -= 1;
                self.begin_anew(w, of(lease), w.lease_id(lease));
            }
            Action::Stray(consumer, producer) => {
                self.chances.strays -= 1;
                self.link(consumer, producer, Made::Apart);
            }
            Action::Greet(link) => {
                let Some(l) = self.links.get_mut(&link) else { return };
                l.made = Made::ApartUp;
                let consumer = l.consumer;
                self.at(w, consumer).ask_for_evidence(link, w.is(Fault::OldManifest));
            }
            _ => self.happens_to_engine(w, action),
        }
    }

    fn happens_to_engine(&mut self, w: &World, action: &Action) {
        match *action {
            Action::Offer(lease) => self.offer(w, lease),
            Action::Reuse(lease) => {
                self.chances.reuses -= 1;
                if let Some(plan) = w.leases.get(lease)
                    && let Some(p) = self.producers.get_mut(plan.producer)
                {
                    p.fill(plan.block, Content::Other);
                }
            }
            Action::Withdraw(lease) => {
                self.chances.withdraws -= 1;
                if let Some(plan) = w.leases.get(lease) {
                    self.end_lease(w, plan.producer, w.lease_id(lease), Closing::Withdrawn);
                }
            }
            Action::Abort(id) => {
                self.chances.aborts -= 1;
                if let Some(plan) = w.plan(id) {
                    self.at(w, plan.consumer).cancel(id);
                }
            }
            Action::Restart(Owner::Producer(n)) => {
                self.chances.producer_restarts -= 1;
                self.restart_producer(w, n);
            }
            Action::Restart(Owner::Consumer(n)) => {
                self.chances.consumer_restarts -= 1;
                self.at(w, n).restart();
            }
            Action::LoseRank(Owner::Producer(n), rank) => {
                self.chances.producer_ranks -= 1;
                self.lose_producer_rank(w, n, rank);
            }
            Action::LoseRank(Owner::Consumer(n), rank) => {
                self.chances.consumer_ranks -= 1;
                self.at(w, n).lose_rank(rank);
            }
            Action::Rejoin(Owner::Producer(n), rank) => self.rejoin_producer_rank(w, n, rank),
            Action::Rejoin(Owner::Consumer(n), rank) => self.at(w, n).rejoin_rank(rank),
            _ => {}
        }
    }

    /// Begins a link: the producer has said who it is.
    fn link(&mut self, consumer: usize, producer: usize, made: Made) -> Option<LinkId> {
        let (c, p) = (self.consumers.get(consumer)?, self.producers.get(producer)?);
        self.last_link += 1;
        let id = LinkId(self.last_link);
        let link = Link {
            consumer,
            producer,
            consumer_epoch: c.epoch,
            producer_epoch: p.epoch,
            consumer_ranks: c.ranks,
            producer_ranks: p.ranks,
            made,
            up: self.now,
            wire: Wire::Whole,
            at_consumer: Side::Up(Vec::new()),
            at_producer: Side::Up(Vec::new()),
        };
        self.links.insert(id, link);
        Some(id)
    }

    /// A link is made and greeted; those who have waited ask, after what has been left in quarantine was asked about.
    fn connect(&mut self, w: &World, consumer: usize, producer: usize) {
        let Some(id) = self.link(consumer, producer, Made::Road) else { return };
        self.at(w, consumer).ask_for_evidence(id, true);
        let Some(c) = self.consumers.get_mut(consumer) else { return };
        c.roads.insert(producer, id);
        let waits = |pull: &PullId| {
            let lease = w.plan(*pull).and_then(|plan| w.leases.get(plan.lease));
            lease.is_some_and(|lease| lease.producer == producer)
        };
        let linking = c.pulls.iter().filter(|(id, p)| matches!(p.state, Phase::Linking(_)) && waits(id));
        let linking: Vec<PullId> = linking.map(|(id, _)| *id).collect();
        for pull in linking {
            self.at(w, consumer).ask(pull, producer, id);
        }
    }

    fn deliver(&mut self, w: &World, link: LinkId, end: End, index: usize) {
        let Some(l) = self.links.get_mut(&link) else { return };
        let (consumer, producer) = (l.consumer, l.producer);
        let Some(message) = l.take(end, index) else { return };
        match message {
            Message::Bind(bind) => self.on_bind(w, producer, link, &bind),
            Message::PushBind(push) => self.on_push_bind(w, producer, link, push),
            Message::Stop(stop) => self.on_stop(w, producer, link, &stop),
            Message::Written(written) => self.at(w, consumer).on_written(link, written),
            Message::Stopped(stopped) => self.at(w, consumer).on_stopped(link, &stopped),
            Message::Release(release) => self.on_release(w, producer, link, &release),
            Message::Heartbeat(beat) => self.on_heartbeat(w, producer, link, beat),
            Message::BindAnswer(answer) => self.at(w, consumer).on_bind_answer(link, answer),
            Message::ReleaseAnswer(answer) => self.at(w, consumer).on_release_answer(link, &answer),
            Message::HeartbeatAnswer(answer) => self.at(w, consumer).on_heartbeat_answer(link, answer),
            Message::Closed(notice) => self.at(w, consumer).on_lease_closed(link, &notice),
        }
    }

    fn notice(&mut self, w: &World, link: LinkId, end: End) {
        let Some(l) = self.links.get_mut(&link) else { return };
        let (consumer, producer) = (l.consumer, l.producer);
        l.drop_end(end);
        match end {
            End::Consumer => self.at(w, consumer).loses_link(producer, link),
            End::Producer => self.producer_loses_link(w, producer, link),
        }
    }
}
