//! The leases that are open, and what is kept of each.

use crate::owner::loans::Place;
use crate::owner::pushes::Push;
use crate::owner::streams::StreamState;
use crate::owner::timers::Timers;
use crate::owner::{BTreeMap, BTreeSet, Duration, EngineId, Fence, LeaseId, LinkId};
use kvferry_geometry::request::SrcGroup;
use kvferry_proto::lease::{Bound, Closing, Consumer, Offer, Offered, Term};
use kvferry_proto::names::Attempt;

/// A lease that is open.
#[derive(Debug)]
pub(in crate::owner) struct Open {
    pub(in crate::owner) state: State,
    pub(in crate::owner) since: Duration,
    /// The blocks and slots that it shows.
    pub(in crate::owner) places: Vec<Place>,
    /// Of one whose bytes are computed while it is open, or were.
    pub(in crate::owner) stream: Option<Box<StreamState>>,
    /// What our ranks write of it, or have written last.
    pub(in crate::owner) push: Option<Box<Push>>,
    /// Whom it was taken from when it was offered anew, and the link over which that one may bind it again.
    pub(in crate::owner) before: Option<(EngineId, LinkId)>,
    /// The last attempt of which it was said that nobody writes: it is never bound (again), whatever still comes.
    pub(in crate::owner) refused: Option<Attempt>,
}

impl Open {
    /// Other blocks are offered.
    pub(in crate::owner) fn regroup(&mut self, groups: &[SrcGroup]) {
        self.state = match std::mem::replace(&mut self.state, State::Moving) {
            State::Offered(state) => State::Offered(state.regroup(groups.to_vec())),
            State::Bound(bound, link) => State::Bound(bound.regroup(groups.to_vec()), link),
            State::Stopping { bound, link, then, until } => {
                State::Stopping { bound: bound.regroup(groups.to_vec()), link, then, until }
            }
            State::Moving => State::Moving,
        };
    }

    /// An engine was told that nobody writes for an attempt: that one is not bound any more. Of a lease that others have, what it
    /// asks says nothing.
    pub(in crate::owner) fn refuse(&mut self, fence: &Fence, engine: &EngineId) {
        let (theirs, of) = match &self.state {
            State::Offered(state) => (true, state.fence()),
            State::Bound(bound, _) | State::Stopping { bound, .. } => {
                (bound.consumer().engine == *engine, bound.fence())
            }
            State::Moving => return,
        };
        // Nobody can have granted a later one than the next.
        let most = of.attempt.next().unwrap_or(of.attempt);
        if theirs && of.epoch == fence.epoch {
            self.refused = self.refused.max(Some(fence.attempt.min(most)));
        }
    }

    /// Whether it was this engine that had bound it before it was offered anew.
    pub(in crate::owner) fn was_of(&self, engine: &EngineId) -> bool {
        self.before.as_ref().is_some_and(|(before, _)| before == engine)
    }

    /// Whether ranks of ours write it, or may be about to.
    pub(in crate::owner) fn is_written(&self) -> bool {
        self.push.as_ref().is_some_and(|push| !push.writing.is_over())
    }

    /// Whether its time is up.
    pub(in crate::owner) fn is_over(&self, now: Duration) -> bool {
        self.state.term().is_over(now)
    }

    /// Whether more of its bytes will be computed.
    pub(in crate::owner) fn is_unsealed(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| !stream.sealed)
    }
}

#[derive(Debug)]
pub(in crate::owner) enum State {
    Offered(Offered),
    Bound(Bound, LinkId),
    /// Its writers are being stopped, until then.
    Stopping {
        bound: Bound,
        link: LinkId,
        then: Then,
        until: Duration,
    },
    /// Between two states, within one call.
    Moving,
}

/// What becomes of a lease when its writers have stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::owner) enum Then {
    Close(Closing),
    /// The next attempt may be bound.
    Reopen,
}

impl State {
    pub(in crate::owner) fn term(&self) -> Term {
        match self {
            Self::Offered(state) => state.term(),
            Self::Bound(state, _) => state.term(),
            Self::Stopping { .. } | Self::Moving => Term::Open,
        }
    }

    /// When it is looked at again if nothing happens.
    pub(in crate::owner) fn due(&self) -> Option<Duration> {
        match self {
            Self::Stopping { until, .. } => Some(*until),
            other => other.term().end(),
        }
    }

    /// What is offered.
    pub(in crate::owner) fn offer(&self) -> Option<&Offer> {
        match self {
            Self::Offered(state) => Some(state.offer()),
            Self::Bound(bound, _) | Self::Stopping { bound, .. } => Some(bound.offer()),
            Self::Moving => None,
        }
    }

    pub(in crate::owner) fn fence(&self) -> Option<&Fence> {
        match self {
            Self::Offered(state) => Some(state.fence()),
            Self::Bound(bound, _) | Self::Stopping { bound, .. } => Some(bound.fence()),
            Self::Moving => None,
        }
    }
}

/// A lease, for whoever wants to see it.
pub(in crate::owner) struct LeaseView<'a> {
    pub(in crate::owner) fence: &'a Fence,
    pub(in crate::owner) bound: Option<&'a Consumer>,
    pub(in crate::owner) waiting_for: &'static str,
    pub(in crate::owner) since: Duration,
    pub(in crate::owner) term: Term,
}

#[derive(Debug, Default)]
pub(in crate::owner) struct Leases {
    pub(in crate::owner) open: BTreeMap<LeaseId, Box<Open>>,
    /// When a lease ends that has an end.
    pub(in crate::owner) ends: Timers<LeaseId>,
    /// What each link has bound.
    pub(in crate::owner) of_link: BTreeMap<LinkId, BTreeSet<LeaseId>>,
    /// How much each engine has bound, over all its links.
    pub(in crate::owner) of_engine: BTreeMap<EngineId, usize>,
    /// What is offered anew to those who had bound it over each link.
    pub(in crate::owner) awaited: BTreeMap<LinkId, BTreeSet<LeaseId>>,
    /// How many are bound, by whomever.
    pub(in crate::owner) bound: usize,
}

impl Leases {
    pub(in crate::owner) fn is_open(&self, lease: LeaseId) -> bool {
        self.open.contains_key(&lease)
    }

    pub(in crate::owner) fn len(&self) -> usize {
        self.open.len()
    }

    pub(in crate::owner) fn uses(&self, link: LinkId) -> bool {
        self.of_link.contains_key(&link) || self.awaited.contains_key(&link)
    }

    pub(in crate::owner) fn next_end(&self) -> Option<Duration> {
        self.ends.next()
    }

    pub(in crate::owner) fn open(&mut self, fence: Fence, offer: Offer, term: Term, places: Vec<Place>, now: Duration) {
        let lease = fence.lease;
        if let Some(end) = term.end() {
            self.ends.set(lease, end);
        }
        let state = State::Offered(Offered::new(fence, offer, term));
        self.open.insert(
            lease,
            Box::new(Open { state, since: now, places, stream: None, push: None, before: None, refused: None }),
        );
    }

    /// A lease that this link has bound, by this attempt.
    pub(in crate::owner) fn bound(&self, fence: &Fence, link: LinkId) -> Option<&Bound> {
        match &self.open.get(&fence.lease)?.state {
            State::Bound(state, l) if *l == link && state.fence() == fence => Some(state),
            _ => None,
        }
    }

    pub(in crate::owner) fn views(&self) -> impl Iterator<Item = LeaseView<'_>> {
        self.open.values().filter_map(|open| {
            let fence = open.state.fence()?;
            let (bound, waiting_for) = match &open.state {
                State::Offered(_) => (None, "waiting for a consumer"),
                State::Bound(state, _) if open.is_written() && open.is_unsealed() => {
                    (Some(state.consumer()), "being computed and written to its consumer")
                }
                State::Bound(state, _) if open.is_written() => (Some(state.consumer()), "waiting for ranks to write"),
                State::Bound(state, _) => (Some(state.consumer()), "waiting for its consumer to read"),
                State::Stopping { bound, .. } => (Some(bound.consumer()), "waiting for its writers to stop"),
                State::Moving => return None,
            };
            Some(LeaseView { fence, bound, waiting_for, since: open.since, term: open.state.term() })
        })
    }

    pub(in crate::owner) fn take(&mut self, lease: LeaseId) -> Option<State> {
        Some(std::mem::replace(&mut self.open.get_mut(&lease)?.state, State::Moving))
    }

    pub(in crate::owner) fn put(&mut self, lease: LeaseId, state: State) {
        match state.due() {
            Some(due) => self.ends.set(lease, due),
            None => self.ends.remove(lease),
        }
        if let Some(open) = self.open.get_mut(&lease) {
            open.state = state;
        }
    }

    pub(in crate::owner) fn all_bound(&self) -> usize {
        self.bound
    }

    pub(in crate::owner) fn bound_by(&self, link: LinkId) -> usize {
        self.of_link.get(&link).map_or(0, BTreeSet::len)
    }

    /// Whether no lease is bound, and nothing is kept of those that were.
    #[cfg(test)]
    pub(in crate::owner) fn is_idle(&self) -> bool {
        self.of_link.is_empty()
            && self.of_engine.is_empty()
            && self.bound == 0
            && self.open.values().all(|o| matches!(o.state, State::Offered(_)))
    }

    /// How many blocks and slots all leases show.
    #[cfg(test)]
    pub(in crate::owner) fn shown(&self) -> usize {
        self.open.values().map(|open| open.places.len()).sum()
    }

    /// It is offered anew to the one who had it.
    pub(in crate::owner) fn wait_for(&mut self, lease: LeaseId, engine: EngineId, link: LinkId) {
        if let Some(open) = self.open.get_mut(&lease) {
            open.before = Some((engine, link));
            self.awaited.entry(link).or_default().insert(lease);
        }
    }

    pub(in crate::owner) fn await_no_more(&mut self, lease: LeaseId, before: Option<&(EngineId, LinkId)>) {
        let Some((_, link)) = before else { return };
        if let Some(awaited) = self.awaited.get_mut(link) {
            awaited.remove(&lease);
            if awaited.is_empty() {
                self.awaited.remove(link);
            }
        }
    }

    /// Those that are offered anew to whoever is at a link.
    pub(in crate::owner) fn take_awaited(&mut self, link: LinkId) -> BTreeSet<LeaseId> {
        let awaited = self.awaited.remove(&link).unwrap_or_default();
        let waits = |lease: &LeaseId| {
            let open = self.open.get(lease);
            let of_link = |open: &Open| open.before.as_ref().is_some_and(|(_, before)| *before == link);
            open.is_some_and(|open| matches!(open.state, State::Offered(_)) && of_link(open))
        };
        awaited.into_iter().filter(waits).collect()
    }

    /// It is bound over a link.
    pub(in crate::owner) fn bind(&mut self, lease: LeaseId, engine: EngineId, link: LinkId) {
        self.of_link.entry(link).or_default().insert(lease);
        *self.of_engine.entry(engine).or_default() += 1;
        self.bound += 1;
    }

    /// One that was bound over a link is nobody's any more.
    pub(in crate::owner) fn unbind(&mut self, lease: LeaseId, engine: &EngineId, link: LinkId) {
        if let Some(count) = self.of_engine.get_mut(engine) {
            *count -= 1;
            self.bound -= 1;
            if *count == 0 {
                self.of_engine.remove(engine);
            }
        }
        if let Some(of_link) = self.of_link.get_mut(&link) {
            of_link.remove(&lease);
            if of_link.is_empty() {
                self.of_link.remove(&link);
            }
        }
    }

    /// Whether nothing at all is left over.
    #[cfg(test)]
    pub(in crate::owner) fn is_clean(&self) -> bool {
        self.open.is_empty()
            && self.ends.is_empty()
            && self.of_link.is_empty()
            && self.of_engine.is_empty()
            && self.awaited.is_empty()
    }
}
