//! The producer's side: leases, from the offer to the one end of each.

use super::{BTreeMap, BTreeSet, Duration, Effect, EngineId, Fence, LeaseId, Life, LinkId, OwnerSession, RankId};

use kvferry_proto::lease::{Bound, Closed, Closing, Consumer, Offer, Offered, Term, first_attempt, stale};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::pairing_salt;
use kvferry_proto::peer::{
    Bind, BindAnswer, BindRefusal, Grant, Heartbeat, HeartbeatAnswer, LeaseClosed, Left, PeerMessage, ReadsEnd,
    Release, Verdict,
};

use super::loans::Place;
use super::timers::Timers;

/// A lease that is open.
#[derive(Debug)]
struct Open {
    state: State,
    since: Duration,
    /// The blocks and slots that it shows.
    places: Box<[Place]>,
}

#[derive(Debug)]
enum State {
    Offered(Offered),
    Bound(Bound, LinkId),
    /// Between two states, within one call.
    Moving,
}

impl State {
    fn term(&self) -> Term {
        match self {
            Self::Offered(state) => state.term(),
            Self::Bound(state, _) => state.term(),
            Self::Moving => Term::Open,
        }
    }
}

/// A lease, for whoever wants to see it.
pub(super) struct LeaseView<'a> {
    pub(super) fence: &'a Fence,
    pub(super) bound: Option<&'a Consumer>,
    pub(super) since: Duration,
    pub(super) term: Term,
}

#[derive(Debug, Default)]
pub(super) struct Leases {
    open: BTreeMap<LeaseId, Box<Open>>,
    /// When a lease ends that has an end.
    ends: Timers<LeaseId>,
    /// What each link has bound.
    of_link: BTreeMap<LinkId, BTreeSet<LeaseId>>,
    /// How much each engine has bound, over all its links.
    of_engine: BTreeMap<EngineId, usize>,
}

impl Leases {
    pub(super) fn is_open(&self, lease: LeaseId) -> bool {
        self.open.contains_key(&lease)
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn uses(&self, link: LinkId) -> bool {
        self.of_link.contains_key(&link)
    }

    pub(super) fn next_end(&self) -> Option<Duration> {
        self.ends.next()
    }

    pub(super) fn open(&mut self, fence: Fence, offer: Offer, term: Term, places: Box<[Place]>, now: Duration) {
        let lease = fence.lease;
        if let Some(end) = term.end() {
            self.ends.set(lease, end);
        }
        let state = State::Offered(Offered::new(fence, offer, term));
        self.open.insert(lease, Box::new(Open { state, since: now, places }));
    }

    /// A lease that this link has bound, by this attempt.
    pub(super) fn bound(&self, fence: &Fence, link: LinkId) -> Option<&Bound> {
        match &self.open.get(&fence.lease)?.state {
            State::Bound(state, l) if *l == link && state.fence() == fence => Some(state),
            _ => None,
        }
    }

    pub(super) fn views(&self) -> impl Iterator<Item = LeaseView<'_>> {
        self.open.values().filter_map(|open| {
            let (fence, bound) = match &open.state {
                State::Offered(state) => (state.fence(), None),
                State::Bound(state, _) => (state.fence(), Some(state.consumer())),
                State::Moving => return None,
            };
            Some(LeaseView { fence, bound, since: open.since, term: open.state.term() })
        })
    }

    fn take(&mut self, lease: LeaseId) -> Option<State> {
        Some(std::mem::replace(&mut self.open.get_mut(&lease)?.state, State::Moving))
    }

    fn put(&mut self, lease: LeaseId, state: State) {
        if let Some(end) = state.term().end() {
            self.ends.set(lease, end);
        }
        if let Some(open) = self.open.get_mut(&lease) {
            open.state = state;
        }
    }

    pub(super) fn bound_by(&self, link: LinkId) -> usize {
        self.of_link.get(&link).map_or(0, BTreeSet::len)
    }

    /// Whether no lease is bound, and nothing is kept of those that were.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.of_link.is_empty()
            && self.of_engine.is_empty()
            && self.open.values().all(|o| matches!(o.state, State::Offered(_)))
    }

    /// How many blocks and slots all leases show.
    #[cfg(test)]
    pub(super) fn shown(&self) -> usize {
        self.open.values().map(|open| open.places.len()).sum()
    }

    /// Whether nothing at all is left over.
    #[cfg(test)]
    pub(super) fn is_clean(&self) -> bool {
        self.open.is_empty() && self.ends.is_empty() && self.of_link.is_empty() && self.of_engine.is_empty()
    }
}

fn consumer(peer: &EngineManifest) -> Consumer {
    Consumer { engine: peer.engine().clone(), epoch: peer.epoch() }
}

impl OwnerSession {
    pub(super) fn open_lease(
        &mut self,
        lease: LeaseId,
        offer: Offer,
        ttl: Option<Duration>,
        places: Box<[Place]>,
    ) -> Fence {
        let fence = first_attempt(self.config.engine.clone(), self.epoch, lease);
        self.leases.open(fence.clone(), offer, Term::of(ttl, self.now), places, self.now);
        fence
    }

    pub(super) fn on_bind(&mut self, link: LinkId, bind: &Bind) {
        let answer = match self.try_bind(link, bind) {
            Ok(grant) => BindAnswer::Bound(grant),
            Err(reason) => {
                let reason = match reason {
                    BindRefusal::Busy(why) if !self.links.knows_leases(link) => BindRefusal::Incompatible(why),
                    other => other,
                };
                BindAnswer::Refused { fence: bind.fence.clone(), reason }
            }
        };
        self.send_peer(link, PeerMessage::BindAnswer(answer));
    }

    fn try_bind(&mut self, link: LinkId, bind: &Bind) -> Result<Grant, BindRefusal> {
        if bind.fence.engine != self.config.engine {
            return Err(BindRefusal::WrongEngine);
        }
        if bind.fence.epoch != self.epoch {
            return Err(BindRefusal::StaleEpoch { current: self.epoch });
        }
        if let Life::Broken { rank, reason, .. } = &self.life {
            return Err(BindRefusal::RankLost { rank: *rank, reason: reason.clone() });
        }
        let (lease, now) = (bind.fence.lease, self.now);
        let peer = self.links.peer(link).cloned().ok_or(BindRefusal::UnknownLease)?;
        let by = consumer(&peer);
        match &self.leases.open.get(&lease).ok_or(BindRefusal::UnknownLease)?.state {
            State::Bound(state, of) if *of == link => state.admits(bind, &by, now)?,
            State::Bound(..) | State::Moving => return Err(BindRefusal::AlreadyBound),
            State::Offered(state) => {
                state.admits(bind, now)?;
                let limit = self.config.limits.bound;
                if self.leases.of_engine.get(&by.engine).is_some_and(|n| *n >= limit) {
                    return Err(BindRefusal::Busy(format!("this engine has bound {limit} leases, which is the limit")));
                }
            }
        }
        // Which salt is due is not the peer's to choose: it could make us compute ever new maps.
        let salt = pairing_salt(peer.engine(), lease, bind.fence.attempt);
        let options = self.peer_options(salt);
        let Some((_, direction)) = self.serving(link) else { return Err(BindRefusal::UnknownLease) };
        let map = direction.and_then(|d| d.map(options)).map_err(|e| BindRefusal::Incompatible(e.to_string()))?;
        if bind.salt != salt {
            return Err(BindRefusal::PeerMapDiffers { ours: map.digest() });
        }
        let (state, result) = match self.leases.take(lease) {
            Some(State::Offered(state)) => match state.bind(bind, by, map.digest(), now) {
                Ok((mut bound, mut grant)) => {
                    if !self.links.knows_leases(link) {
                        // A neighbour of version 2 beats for nothing and knows of no end: its release or its link ends it.
                        (bound, grant.time_left) = (bound.without_end(), None);
                        self.leases.ends.remove(lease);
                    }
                    self.leases.of_link.entry(link).or_default().insert(lease);
                    *self.leases.of_engine.entry(peer.engine().clone()).or_default() += 1;
                    (State::Bound(bound, link), Ok(grant))
                }
                Err((same, refusal)) => (State::Offered(same), Err(refusal)),
            },
            Some(State::Bound(state, of)) => match state.rebind(bind, &by, map.digest(), now) {
                Ok((bound, grant)) => {
                    // What was asked for the attempt before is of no use to this one.
                    self.end_asks(lease, "another attempt reads the lease");
                    (State::Bound(bound, of), Ok(grant))
                }
                Err((same, refusal)) => (State::Bound(same, of), Err(refusal)),
            },
            Some(State::Moving) | None => return Err(BindRefusal::UnknownLease),
        };
        self.leases.put(lease, state);
        result
    }

    pub(super) fn on_release(&mut self, link: LinkId, release: &Release) {
        let (lease, now) = (release.fence.lease, self.now);
        let Some(peer) = self.links.peer(link).map(|p| consumer(p)) else { return };
        let answer = match self.leases.take(lease) {
            Some(State::Bound(state, of)) if of == link => match state.release(release, &peer, now) {
                Ok((closed, answer)) => {
                    self.close_lease(&closed, Some((peer.engine.clone(), of)));
                    answer
                }
                Err((same, answer)) => {
                    self.leases.put(lease, State::Bound(same, of));
                    answer
                }
            },
            // Nobody has bound it, and who knows its name says that nobody will.
            Some(State::Offered(state)) if release.reads == ReadsEnd::Declined && *state.fence() == release.fence => {
                self.close_lease(&state.close(Closing::Declined), None);
                stale(release)
            }
            Some(other) => {
                self.leases.put(lease, other);
                stale(release)
            }
            None => stale(release),
        };
        if release.reads == ReadsEnd::Complete && answer.verdict == Verdict::Stale {
            self.effects.push_back(Effect::FenceRejected { fence: release.fence.clone(), peer: peer.engine });
        }
        self.send_peer(link, PeerMessage::ReleaseAnswer(answer));
        self.retire_link(link);
    }

    pub(super) fn on_heartbeat(&mut self, link: LinkId, heartbeat: Heartbeat) {
        let Some(peer) = self.links.peer(link).map(|p| consumer(p)) else { return };
        let (by, now) = (self.config.lease.extension, self.now);
        let mut left = Vec::with_capacity(heartbeat.leases.len());
        for (lease, attempt) in heartbeat.leases {
            left.push(match self.leases.take(lease) {
                Some(State::Bound(state, of)) if of == link => {
                    let (state, left) = state.beat(attempt, &peer, by, now);
                    self.leases.put(lease, State::Bound(state, of));
                    left
                }
                Some(other) => {
                    self.leases.put(lease, other);
                    Left::Closed
                }
                None => Left::Closed,
            });
        }
        self.send_peer(link, PeerMessage::HeartbeatAnswer(HeartbeatAnswer { beat: heartbeat.beat, left }));
    }

    /// Takes a lease back, whatever its state; false where there is none.
    pub(super) fn withdraw_lease(&mut self, lease: LeaseId) -> bool {
        self.end_lease(lease, Closing::Withdrawn)
    }

    /// Ends leases whose time is up.
    pub(super) fn expire_leases(&mut self) {
        while let Some(lease) = self.leases.ends.take_due(self.now) {
            let over = self.leases.open.get(&lease).is_some_and(|open| open.state.term().is_over(self.now));
            if over {
                self.end_lease(lease, Closing::Expired);
            }
        }
    }

    /// Ends a lease otherwise than by a release, and tells its consumer so.
    fn end_lease(&mut self, lease: LeaseId, how: Closing) -> bool {
        match self.leases.take(lease) {
            Some(State::Offered(state)) => self.close_lease(&state.close(how), None),
            Some(State::Bound(state, link)) => {
                let consumer = state.consumer().engine.clone();
                let closed = state.close(how);
                if self.links.knows_leases(link) {
                    let fence = closed.fence().clone();
                    self.send_peer(link, PeerMessage::Closed(LeaseClosed { fence, how }));
                }
                self.close_lease(&closed, Some((consumer, link)));
                self.retire_link(link);
            }
            Some(State::Moving) | None => return false,
        }
        true
    }

    /// The bytes of a rank are gone: so are the leases that show them. Those that others read without that rank go on.
    pub(super) fn rank_lost_in_leases(&mut self, rank: RankId, reason: &str) {
        self.end_asks_of(rank, reason);
        let open: Vec<(LeaseId, Option<(LinkId, u64)>)> = self
            .leases
            .open
            .iter()
            .map(|(lease, open)| match &open.state {
                State::Bound(state, link) => (*lease, Some((*link, state.salt()))),
                _ => (*lease, None),
            })
            .collect();
        for (lease, bound) in open {
            let spared = bound.is_some_and(|(link, salt)| !self.names(link, salt, rank));
            if !spared {
                self.end_lease(lease, Closing::RankLost);
            }
        }
    }

    /// Whether the map of peers for a salt names a rank of ours as a source; also where nobody knows.
    fn names(&mut self, link: LinkId, salt: u64, rank: RankId) -> bool {
        let options = self.peer_options(salt);
        match self.serving(link) {
            Some((_, Ok(direction))) => {
                direction.map(options).map_or(true, |m| m.pairs().iter().any(|p| p.src() == rank))
            }
            _ => true,
        }
    }

    pub(super) fn link_lost_in_leases(&mut self, link: LinkId) {
        for lease in self.leases.of_link.remove(&link).unwrap_or_default() {
            if let Some(State::Bound(state, of)) = self.leases.take(lease) {
                let consumer = state.consumer().engine.clone();
                self.close_lease(&state.close(Closing::ConsumerLost), Some((consumer, of)));
            }
        }
    }

    /// Every open lease is taken back; for the end of the owner itself.
    pub(super) fn end_all_leases(&mut self) {
        let open: Vec<LeaseId> = self.leases.open.keys().copied().collect();
        for lease in open {
            self.withdraw_lease(lease);
        }
    }

    /// Its blocks are the engine's again, and so is what was gathered of them; nobody digests them any more.
    fn close_lease(&mut self, closed: &Closed, bound: Option<(EngineId, LinkId)>) {
        let lease = closed.fence().lease;
        let Some(open) = self.leases.open.remove(&lease) else { return };
        self.leases.ends.remove(lease);
        self.loans.read_ended(&open.places);
        if let Some((engine, _)) = &bound
            && let Some(count) = self.leases.of_engine.get_mut(engine)
        {
            *count -= 1;
            if *count == 0 {
                self.leases.of_engine.remove(engine);
            }
        }
        let (consumer, link) = bound.unzip();
        if let Some(link) = link
            && let Some(of_link) = self.leases.of_link.get_mut(&link)
        {
            of_link.remove(&lease);
            if of_link.is_empty() {
                self.leases.of_link.remove(&link);
            }
        }
        self.end_asks(lease, "the lease was closed");
        let (fence, how, age) = (closed.fence().clone(), closed.how(), self.now.saturating_sub(open.since));
        self.effects.push_back(Effect::LeaseClosed { fence, how, age, consumer });
    }
}
