//! The consumer's side: requests, from the wish to the end of their reads. How they end stands in [`ends`](super::ends).

use super::{
    BTreeMap, BTreeSet, Duration, Effect, Fence, LeaseId, Life, LinkId, OwnerSession, PullId, PullWish, dst_counts,
};

use std::sync::Arc;

use kvferry_geometry::request::{BoundRequest, Request, SrcGroup};
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::handshake::Abilities;
use kvferry_proto::names::{Attempt, pairing_salt};
use kvferry_proto::peer::{
    BindAnswer, BindRefusal, MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, PeerMessage, ReleaseAnswer,
};
use kvferry_proto::push::Receiving;
use kvferry_proto::rank::{Pairing, PullOrder, Stage, ToRank};
use kvferry_proto::request::{Asking, Ended, Granted as GrantedLease, RankResult, Reading, Releasing, Step, Wanted};

use super::config::{Mode, Source};
use super::ends::lost;
use super::loans::{Place, Writers, written};
use super::receiving::Granted;
use super::roads::RoadId;
use super::timers::Timers;
use crate::assurance::{Assured, served};
use crate::outcome::{self, Delivered, Failed, FailureCause, GroupOutcome, Phase, Phases, Report, Times};

#[derive(Debug)]
pub(super) enum State {
    /// The link is not up.
    Linking(Wanted),
    /// The producer was asked, then.
    Asking(Asking, Duration),
    /// The producer's ranks write.
    Receiving(Receiving),
    /// It has failed; the producer's ranks are stopping.
    Halting { receiving: Receiving, cause: FailureCause, until: Duration },
    /// Ranks read, or do what follows a write.
    Reading(Reading),
    /// It has failed; ranks are stopping. `None`: the ranks' own faults are the cause.
    Stopping { reading: Reading, cause: Option<FailureCause>, until: Duration },
    /// The verdict is awaited.
    Releasing(Releasing, Assured),
    /// Between two states, within one call.
    Moving,
}

impl State {
    fn phase(&self) -> Option<Phase> {
        Some(match self {
            Self::Linking(_) => Phase::Link,
            Self::Asking(..) => Phase::Bind,
            Self::Receiving(_) => Phase::Write,
            Self::Reading(_) => Phase::Read,
            Self::Halting { .. } | Self::Stopping { .. } => Phase::Stop,
            Self::Releasing(..) => Phase::Release,
            Self::Moving => return None,
        })
    }

    /// Our ranks that have not ended.
    pub(super) fn pending(&self) -> Vec<RankId> {
        match self {
            Self::Reading(reading) | Self::Stopping { reading, .. } => reading.pending().collect(),
            _ => Vec::new(),
        }
    }

    pub(super) fn waiting_for(&self) -> &'static str {
        match self {
            Self::Linking(_) => "waiting for the link to the producer's owner",
            Self::Asking(..) => "waiting for the producer to bind the lease",
            Self::Receiving(_) => "waiting for the producer's ranks to write",
            Self::Halting { .. } => "waiting for the producer's ranks to stop",
            Self::Reading(_) => "waiting for ranks to read",
            Self::Stopping { .. } => "waiting for ranks to stop",
            Self::Releasing(..) | Self::Moving => "waiting for the producer's verdict",
        }
    }
}

/// What was asked of the producer about a request's reads, and has not been answered: of which of its ranks, for which of ours.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub(super) digests: BTreeSet<(RankId, RankId)>,
    pub(super) gathers: BTreeSet<(RankId, RankId)>,
}

#[derive(Debug)]
pub(super) struct Pull {
    pub(super) wish: PullWish,
    pub(super) road: RoadId,
    /// The link that it goes over, once it is up.
    pub(super) link: Option<LinkId>,
    pub(super) pairing: Option<Pairing>,
    /// Of one that is pushed: to whom its room is granted.
    pub(super) granted: Granted,
    /// The bind whose answer is awaited, whatever the state.
    unanswered: Option<(LinkId, Fence)>,
    /// The producer's ranks that may still write it though it has ended.
    pub(super) doubt: Option<Writers>,
    pub(super) asked: Asked,
    pub(super) groups: Outcomes,
    /// Ranks that were in doubt, and are known to have stopped before it has ended.
    pub(super) stopped: BTreeSet<RankId>,
    /// The blocks and slots that it writes.
    pub(super) places: Vec<Place>,
    pub(super) started: Duration,
    /// By when it must have ended.
    deadline: Duration,
    /// How often it was tried, over all sources; and at this one, but for prefills that began anew.
    tries: u32,
    pub(super) tries_here: u32,
    /// The sources that have not been tried.
    pub(super) others: std::vec::IntoIter<Source>,
    /// When its lease ends, as far as is known here; `None`: it has no end, or none is known.
    pub(super) lease_end: Option<Duration>,
    pub(super) attempt: Attempt,
    pub(super) state: State,
    /// What it does, and since when.
    phase: Phase,
    pub(super) since: Duration,
    phases: Phases,
}

/// What of our groups is in place when the request ends.
#[derive(Debug)]
pub(super) struct Outcomes {
    /// Where it fails.
    pub(super) kept: Vec<GroupOutcome>,
    /// Where it is delivered.
    pub(super) delivered: Vec<GroupOutcome>,
}

impl Pull {
    /// Whether the producer's ranks write it.
    pub(super) fn is_pushed(&self) -> bool {
        self.wish.mode != Mode::Pull
    }

    /// The bind that was sent and not answered, if there is one: nobody waits for it any more.
    pub(super) fn take_unanswered(&mut self) -> Option<(LinkId, Fence)> {
        self.unanswered.take()
    }

    /// The lease, by the attempt that reads it now.
    pub(super) fn fence(&self) -> Fence {
        Fence { attempt: self.attempt, ..self.wish.fence.clone() }
    }

    /// When it is looked at again if nothing happens.
    fn due(&self) -> Duration {
        match &self.state {
            State::Stopping { until, .. } | State::Halting { until, .. } => *until,
            State::Receiving(_) | State::Reading(_) => {
                self.lease_end.map_or(self.late_at(), |end| end.min(self.late_at()))
            }
            _ => self.late_at(),
        }
    }

    /// When it is late: by its own deadline, or that of its phase.
    fn late_at(&self) -> Duration {
        let of_phase = self.wish.policy.within.of(self.phase).map(|limit| self.since.saturating_add(limit));
        of_phase.map_or(self.deadline, |of_phase| of_phase.min(self.deadline))
    }

    /// How long it, or its phase, was allowed to take.
    pub(super) fn allowed(&self, now: Duration) -> Duration {
        let of_phase = self.wish.policy.within.of(self.phase).filter(|_| !self.is_late(now));
        of_phase.unwrap_or(self.wish.deadline)
    }

    pub(super) fn is_late(&self, now: Duration) -> bool {
        self.deadline <= now
    }

    /// Whether its lease's time is up while it is read.
    pub(super) fn is_expired(&self, now: Duration) -> bool {
        matches!(self.state, State::Receiving(_) | State::Reading(_)) && self.lease_end.is_some_and(|end| end <= now)
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(super) fn lease_end(&self) -> Option<Duration> {
        self.lease_end
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    pub(super) fn times(&mut self, now: Duration) -> Times {
        self.phase_ends(now);
        Times { attempts: self.tries, phases: self.phases, took: now.saturating_sub(self.started) }
    }

    fn phase_ends(&mut self, now: Duration) {
        self.phases.add(self.phase, now.saturating_sub(self.since));
        self.since = now;
    }
}

#[derive(Debug, Default)]
pub(super) struct Pulls {
    last: u64,
    /// Boxed: a tree of large values moves them about.
    pub(super) open: BTreeMap<PullId, Box<Pull>>,
    /// By lease, whatever the attempt, and its engine.
    by_lease: BTreeMap<(LeaseId, kvferry_proto::names::Epoch), PullId>,
    pub(super) due: Timers<PullId>,
    /// Those that go over each link.
    on_link: BTreeMap<LinkId, BTreeSet<PullId>>,
}

impl Pulls {
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.due.next()
    }

    pub(super) fn uses(&self, link: LinkId) -> bool {
        self.on_link.contains_key(&link)
    }

    /// Whether nothing is kept of any request.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether nothing at all is left over.
    #[cfg(test)]
    pub(super) fn is_clean(&self) -> bool {
        self.open.is_empty() && self.by_lease.is_empty() && self.due.is_empty() && self.on_link.is_empty()
    }

    /// The requests whose share of this rank has not ended.
    #[cfg(test)]
    pub(super) fn pending(&self, rank: RankId) -> Vec<PullId> {
        self.open.iter().filter(|(_, p)| p.state.pending().contains(&rank)).map(|(id, _)| *id).collect()
    }

    /// The request that reads a lease by this attempt, over this link.
    pub(super) fn find(&self, fence: &Fence, link: LinkId) -> Option<PullId> {
        let id = *self.by_lease.get(&(fence.lease, fence.epoch))?;
        let pull = self.open.get(&id)?;
        let same = pull.link == Some(link) && pull.attempt == fence.attempt && pull.wish.fence.engine == fence.engine;
        same.then_some(id)
    }

    /// Takes the state out; put another back in the same call.
    pub(super) fn take(&mut self, id: PullId) -> Option<State> {
        Some(std::mem::replace(&mut self.open.get_mut(&id)?.state, State::Moving))
    }

    /// The leases with an end that are read over a link, and when they end; not those that have ended.
    pub(super) fn ending_leases(&self, link: LinkId, now: Duration) -> Vec<(PullId, (LeaseId, Attempt), Duration)> {
        let of_link = self.on_link.get(&link).into_iter().flatten();
        let ending = of_link.filter_map(|id| {
            let pull = self.open.get(id).filter(|p| !matches!(p.state, State::Asking(..)))?;
            let end = pull.lease_end.filter(|end| *end > now)?;
            Some((*id, (pull.wish.fence.lease, pull.attempt), end))
        });
        ending.collect()
    }

    /// The end of a request's lease is known to be later than it was, or not to be.
    pub(super) fn extend(&mut self, id: PullId, end: Option<Duration>) {
        if let Some(pull) = self.open.get_mut(&id) {
            pull.lease_end = match (pull.lease_end, end) {
                (Some(before), Some(end)) => Some(before.max(end)),
                _ => None,
            };
            self.due.set(id, pull.due());
        }
    }

    pub(super) fn on_link(&self, link: LinkId) -> Vec<PullId> {
        self.on_link.get(&link).into_iter().flatten().copied().collect()
    }

    fn go_over(&mut self, id: PullId, link: LinkId) {
        if let Some(pull) = self.open.get_mut(&id) {
            pull.link = Some(link);
            self.on_link.entry(link).or_default().insert(id);
        }
    }

    /// It takes another source from now on: as if nothing had been asked of any.
    pub(super) fn change_source(&mut self, id: PullId, source: Source, road: RoadId) {
        let Some(pull) = self.open.get_mut(&id) else { return };
        self.by_lease.remove(&(pull.wish.fence.lease, pull.wish.fence.epoch));
        self.by_lease.insert((source.fence.lease, source.fence.epoch), id);
        if let Some(link) = pull.link.take() {
            leave(&mut self.on_link, link, id);
        }
        (pull.wish.address, pull.wish.fence) = (source.address, source.fence);
        (pull.attempt, pull.road, pull.pairing, pull.lease_end) = (pull.wish.fence.attempt, road, None, None);
        (pull.asked, pull.granted) = (Asked::default(), Granted::default());
        (pull.tries, pull.tries_here) = (pull.tries.saturating_add(1), 1);
        pull.stopped.clear();
    }

    /// The next source of a request that nobody else takes.
    pub(super) fn next_source(&mut self, id: PullId) -> Option<Source> {
        let taken = &self.by_lease;
        self.open.get_mut(&id)?.others.find(|s| !taken.contains_key(&(s.fence.lease, s.fence.epoch)))
    }

    /// Counts one more try.
    pub(super) fn tried(&mut self, id: PullId, counts: bool) {
        if let Some(pull) = self.open.get_mut(&id) {
            pull.tries = pull.tries.saturating_add(1);
            pull.tries_here = pull.tries_here.saturating_add(u32::from(counts));
        }
    }

    /// Nothing is kept of it.
    pub(super) fn remove(&mut self, id: PullId) -> Option<Box<Pull>> {
        let pull = self.open.remove(&id)?;
        self.by_lease.remove(&(pull.wish.fence.lease, pull.wish.fence.epoch));
        self.due.remove(id);
        if let Some(link) = pull.link {
            leave(&mut self.on_link, link, id);
        }
        Some(pull)
    }
}

fn leave(on_link: &mut BTreeMap<LinkId, BTreeSet<PullId>>, link: LinkId, id: PullId) {
    if let Some(of_link) = on_link.get_mut(&link) {
        of_link.remove(&id);
        if of_link.is_empty() {
            on_link.remove(&link);
        }
    }
}

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

    pub(super) fn start_pull(&mut self, wish: PullWish) -> PullId {
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
