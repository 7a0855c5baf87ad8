//! The requests that have not ended, and what is kept of each.

use crate::assurance::Assured;
use crate::outcome::{FailureCause, GroupOutcome, Phase, Phases, Times};
use crate::owner::config::{Mode, Source};
use crate::owner::loans::{Place, Writers};
use crate::owner::receiving::Granted;
use crate::owner::roads::RoadId;
use crate::owner::timers::Timers;
use crate::owner::{BTreeMap, BTreeSet, Duration, Fence, LeaseId, LinkId, PullId, PullWish};
use kvferry_geometry::units::RankId;
use kvferry_proto::names::Attempt;
use kvferry_proto::push::Receiving;
use kvferry_proto::rank::Pairing;
use kvferry_proto::request::{Asking, Reading, Releasing, Wanted};

#[derive(Debug)]
pub(in crate::owner) enum State {
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
    pub(in crate::owner) fn phase(&self) -> Option<Phase> {
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
    pub(in crate::owner) fn pending(&self) -> Vec<RankId> {
        match self {
            Self::Reading(reading) | Self::Stopping { reading, .. } => reading.pending().collect(),
            _ => Vec::new(),
        }
    }

    pub(in crate::owner) fn waiting_for(&self) -> &'static str {
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
pub(in crate::owner) struct Asked {
    pub(in crate::owner) digests: BTreeSet<(RankId, RankId)>,
    pub(in crate::owner) gathers: BTreeSet<(RankId, RankId)>,
}

#[derive(Debug)]
pub(in crate::owner) struct Pull {
    /// In the box in which it has come.
    pub(in crate::owner) wish: Box<PullWish>,
    pub(in crate::owner) road: RoadId,
    /// The link that it goes over, once it is up.
    pub(in crate::owner) link: Option<LinkId>,
    pub(in crate::owner) pairing: Option<Pairing>,
    /// Of one that is pushed: to whom its room is granted.
    pub(in crate::owner) granted: Granted,
    /// The bind whose answer is awaited, whatever the state.
    pub(in crate::owner) unanswered: Option<(LinkId, Fence)>,
    /// The producer's ranks that may still write it though it has ended.
    pub(in crate::owner) doubt: Option<Writers>,
    pub(in crate::owner) asked: Asked,
    pub(in crate::owner) groups: Outcomes,
    /// Ranks that were in doubt, and are known to have stopped before it has ended.
    pub(in crate::owner) stopped: BTreeSet<RankId>,
    /// The blocks and slots that it writes.
    pub(in crate::owner) places: Vec<Place>,
    pub(in crate::owner) started: Duration,
    /// By when it must have ended.
    pub(in crate::owner) deadline: Duration,
    /// How often it was tried, over all sources; and at this one, but for prefills that began anew.
    pub(in crate::owner) tries: u32,
    pub(in crate::owner) tries_here: u32,
    /// The sources that have not been tried.
    pub(in crate::owner) others: std::vec::IntoIter<Source>,
    /// When its lease ends, as far as is known here; `None`: it has no end, or none is known.
    pub(in crate::owner) lease_end: Option<Duration>,
    pub(in crate::owner) attempt: Attempt,
    pub(in crate::owner) state: State,
    /// What it does, and since when.
    pub(in crate::owner) phase: Phase,
    pub(in crate::owner) since: Duration,
    pub(in crate::owner) phases: Phases,
}

/// What of our groups is in place when the request ends.
#[derive(Debug)]
pub(in crate::owner) struct Outcomes {
    /// Where it fails.
    pub(in crate::owner) kept: Vec<GroupOutcome>,
    /// Where it is delivered.
    pub(in crate::owner) delivered: Vec<GroupOutcome>,
}

impl Pull {
    /// Whether the producer's ranks write it.
    pub(in crate::owner) fn is_pushed(&self) -> bool {
        self.wish.mode != Mode::Pull
    }

    /// The bind that was sent and not answered, if there is one: nobody waits for it any more.
    pub(in crate::owner) fn take_unanswered(&mut self) -> Option<(LinkId, Fence)> {
        self.unanswered.take()
    }

    /// The lease, by the attempt that reads it now.
    pub(in crate::owner) fn fence(&self) -> Fence {
        Fence { attempt: self.attempt, ..self.wish.fence.clone() }
    }

    /// When it is looked at again if nothing happens.
    pub(in crate::owner) fn due(&self) -> Duration {
        match &self.state {
            State::Stopping { until, .. } | State::Halting { until, .. } => *until,
            State::Receiving(_) | State::Reading(_) => {
                self.lease_end.map_or(self.late_at(), |end| end.min(self.late_at()))
            }
            _ => self.late_at(),
        }
    }

    /// When it is late: by its own deadline, or that of its phase.
    pub(in crate::owner) fn late_at(&self) -> Duration {
        let of_phase = self.wish.policy.within.of(self.phase).map(|limit| self.since.saturating_add(limit));
        of_phase.map_or(self.deadline, |of_phase| of_phase.min(self.deadline))
    }

    /// How long it, or its phase, was allowed to take.
    pub(in crate::owner) fn allowed(&self, now: Duration) -> Duration {
        let of_phase = self.wish.policy.within.of(self.phase).filter(|_| !self.is_late(now));
        of_phase.unwrap_or(self.wish.deadline)
    }

    pub(in crate::owner) fn is_late(&self, now: Duration) -> bool {
        self.deadline <= now
    }

    /// Whether its lease's time is up while it is read.
    pub(in crate::owner) fn is_expired(&self, now: Duration) -> bool {
        matches!(self.state, State::Receiving(_) | State::Reading(_)) && self.lease_end.is_some_and(|end| end <= now)
    }

    pub(in crate::owner) fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(in crate::owner) fn lease_end(&self) -> Option<Duration> {
        self.lease_end
    }

    pub(in crate::owner) fn phase(&self) -> Phase {
        self.phase
    }

    pub(in crate::owner) fn times(&mut self, now: Duration) -> Times {
        self.phase_ends(now);
        Times { attempts: self.tries, phases: self.phases, took: now.saturating_sub(self.started) }
    }

    pub(in crate::owner) fn phase_ends(&mut self, now: Duration) {
        self.phases.add(self.phase, now.saturating_sub(self.since));
        self.since = now;
    }
}

#[derive(Debug, Default)]
pub(in crate::owner) struct Pulls {
    pub(in crate::owner) last: u64,
    /// Boxed: a tree of large values moves them about.
    pub(in crate::owner) open: BTreeMap<PullId, Box<Pull>>,
    /// By lease, whatever the attempt, and its engine.
    pub(in crate::owner) by_lease: BTreeMap<(LeaseId, kvferry_proto::names::Epoch), PullId>,
    pub(in crate::owner) due: Timers<PullId>,
    /// Those that go over each link.
    pub(in crate::owner) on_link: BTreeMap<LinkId, BTreeSet<PullId>>,
}

impl Pulls {
    pub(in crate::owner) fn next_due(&self) -> Option<Duration> {
        self.due.next()
    }

    pub(in crate::owner) fn uses(&self, link: LinkId) -> bool {
        self.on_link.contains_key(&link)
    }

    /// Whether nothing is kept of any request.
    pub(in crate::owner) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether nothing at all is left over.
    #[cfg(test)]
    pub(in crate::owner) fn is_clean(&self) -> bool {
        self.open.is_empty() && self.by_lease.is_empty() && self.due.is_empty() && self.on_link.is_empty()
    }

    /// The requests whose share of this rank has not ended.
    #[cfg(test)]
    pub(in crate::owner) fn pending(&self, rank: RankId) -> Vec<PullId> {
        self.open.iter().filter(|(_, p)| p.state.pending().contains(&rank)).map(|(id, _)| *id).collect()
    }

    /// The request that reads a lease by this attempt, over this link.
    pub(in crate::owner) fn find(&self, fence: &Fence, link: LinkId) -> Option<PullId> {
        let id = *self.by_lease.get(&(fence.lease, fence.epoch))?;
        let pull = self.open.get(&id)?;
        let same = pull.link == Some(link) && pull.attempt == fence.attempt && pull.wish.fence.engine == fence.engine;
        same.then_some(id)
    }

    /// Takes the state out; put another back in the same call.
    pub(in crate::owner) fn take(&mut self, id: PullId) -> Option<State> {
        Some(std::mem::replace(&mut self.open.get_mut(&id)?.state, State::Moving))
    }

    /// The leases with an end that are read over a link, and when they end; not those that have ended.
    pub(in crate::owner) fn ending_leases(
        &self,
        link: LinkId,
        now: Duration,
    ) -> Vec<(PullId, (LeaseId, Attempt), Duration)> {
        let of_link = self.on_link.get(&link).into_iter().flatten();
        let ending = of_link.filter_map(|id| {
            let pull = self.open.get(id).filter(|p| !matches!(p.state, State::Asking(..)))?;
            let end = pull.lease_end.filter(|end| *end > now)?;
            Some((*id, (pull.wish.fence.lease, pull.attempt), end))
        });
        ending.collect()
    }

    /// The end of a request's lease is known to be later than it was, or not to be.
    pub(in crate::owner) fn extend(&mut self, id: PullId, end: Option<Duration>) {
        if let Some(pull) = self.open.get_mut(&id) {
            pull.lease_end = match (pull.lease_end, end) {
                (Some(before), Some(end)) => Some(before.max(end)),
                _ => None,
            };
            self.due.set(id, pull.due());
        }
    }

    pub(in crate::owner) fn on_link(&self, link: LinkId) -> Vec<PullId> {
        self.on_link.get(&link).into_iter().flatten().copied().collect()
    }

    pub(in crate::owner) fn go_over(&mut self, id: PullId, link: LinkId) {
        if let Some(pull) = self.open.get_mut(&id) {
            pull.link = Some(link);
            self.on_link.entry(link).or_default().insert(id);
        }
    }

    /// It takes another source from now on: as if nothing had been asked of any.
    pub(in crate::owner) fn change_source(&mut self, id: PullId, source: Source, road: RoadId) {
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
    pub(in crate::owner) fn next_source(&mut self, id: PullId) -> Option<Source> {
        let taken = &self.by_lease;
        self.open.get_mut(&id)?.others.find(|s| !taken.contains_key(&(s.fence.lease, s.fence.epoch)))
    }

    /// Counts one more try.
    pub(in crate::owner) fn tried(&mut self, id: PullId, counts: bool) {
        if let Some(pull) = self.open.get_mut(&id) {
            pull.tries = pull.tries.saturating_add(1);
            pull.tries_here = pull.tries_here.saturating_add(u32::from(counts));
        }
    }

    /// Nothing is kept of it.
    pub(in crate::owner) fn remove(&mut self, id: PullId) -> Option<Box<Pull>> {
        let pull = self.open.remove(&id)?;
        self.by_lease.remove(&(pull.wish.fence.lease, pull.wish.fence.epoch));
        self.due.remove(id);
        if let Some(link) = pull.link {
            leave(&mut self.on_link, link, id);
        }
        Some(pull)
    }
}

pub(in crate::owner) fn leave(on_link: &mut BTreeMap<LinkId, BTreeSet<PullId>>, link: LinkId, id: PullId) {
    if let Some(of_link) = on_link.get_mut(&link) {
        of_link.remove(&id);
        if of_link.is_empty() {
            on_link.remove(&link);
        }
    }
}
