//! The producer's side: leases, from the offer to the one end of each.

use super::{BTreeSet, Digest, Duration, Effect, EngineId, Fence, LeaseId, Life, LinkId, OwnerSession, RankId};
use std::sync::Arc;

use kvferry_geometry::peers::PeerMap;
use kvferry_proto::handshake::Abilities;
use kvferry_proto::lease::{Closed, Closing, Consumer, Offer, Term, first_attempt, stale};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::pairing_salt;
use kvferry_proto::peer::{
    Bind, BindAnswer, BindRefusal, Grant, Heartbeat, HeartbeatAnswer, LeaseClosed, Left, PeerMessage, ReadsEnd,
    Release, Verdict,
};
use kvferry_proto::rank::ToRank;

use super::loans::Place;

mod table;

pub(super) use table::{LeaseView, Leases, State, Then};

fn consumer(peer: &EngineManifest) -> Consumer {
    Consumer { engine: peer.engine().clone(), epoch: peer.epoch() }
}

impl OwnerSession {
    pub(super) fn open_lease(
        &mut self,
        lease: LeaseId,
        offer: Offer,
        ttl: Option<Duration>,
        places: Vec<Place>,
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
                    // Who doesn't know of pushes doesn't know of this either.
                    same @ BindRefusal::NotSealed if !self.links.has(link, Abilities::PUSH) => {
                        BindRefusal::Incompatible(same.to_string())
                    }
                    other => other,
                };
                BindAnswer::Refused { fence: bind.fence.clone(), reason }
            }
        };
        self.send_peer(link, PeerMessage::BindAnswer(answer));
    }

    fn try_bind(&mut self, link: LinkId, bind: &Bind) -> Result<Grant, BindRefusal> {
        let (by, map) = self.admit(link, bind)?;
        if self.leases.open.get(&bind.fence.lease).is_some_and(|open| open.is_unsealed()) {
            return Err(BindRefusal::NotSealed);
        }
        self.bind_lease(link, bind, by, map.digest())
    }

    /// Whether a consumer may have a lease; gives who it is, and the map of peers.
    pub(super) fn admit(&mut self, link: LinkId, bind: &Bind) -> Result<(Consumer, Arc<PeerMap>), BindRefusal> {
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
        let open = self.leases.open.get(&lease).ok_or(BindRefusal::UnknownLease)?;
        if open.refused.is_some_and(|refused| bind.fence.attempt <= refused) {
            return Err(BindRefusal::UnknownLease);
        }
        match &open.state {
            // Its writers for the attempt before must have stopped.
            State::Bound(state, of) if *of == link && !open.is_written() => state.admits(bind, &by, now)?,
            State::Stopping { .. } => return Err(BindRefusal::UnknownLease),
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
        Ok((by, map))
    }

    /// Lends a lease to a consumer that was admitted; `peer_map` is the digest as this side computes it.
    pub(super) fn bind_lease(
        &mut self,
        link: LinkId,
        bind: &Bind,
        by: Consumer,
        peer_map: Digest,
    ) -> Result<Grant, BindRefusal> {
        let (lease, now) = (bind.fence.lease, self.now);
        let engine = by.engine.clone();
        let (state, result) = match self.leases.take(lease) {
            Some(State::Offered(state)) => match state.bind(bind, by, peer_map, now) {
                Ok((mut bound, mut grant)) => {
                    if !self.links.knows_leases(link) {
                        // A neighbour of version 2 beats for nothing and knows of no end: its release or its link ends it.
                        (bound, grant.time_left) = (bound.without_end(), None);
                    }
                    self.leases.bind(lease, engine, link);
                    (State::Bound(bound, link), Ok(grant))
                }
                Err((same, refusal)) => (State::Offered(same), Err(refusal)),
            },
            Some(State::Bound(state, of)) => match state.rebind(bind, &by, peer_map, now) {
                Ok((bound, grant)) => {
                    // What was asked for the attempt before is of no use to this one.
                    self.end_asks(lease, "another attempt reads the lease");
                    (State::Bound(bound, of), Ok(grant))
                }
                Err((same, refusal)) => (State::Bound(same, of), Err(refusal)),
            },
            Some(same @ State::Stopping { .. }) => (same, Err(BindRefusal::UnknownLease)),
            Some(State::Moving) | None => return Err(BindRefusal::UnknownLease),
        };
        self.leases.put(lease, state);
        result
    }

    pub(super) fn on_release(&mut self, link: LinkId, release: &Release) {
        let (lease, now) = (release.fence.lease, self.now);
        let Some(peer) = self.links.peer(link).map(|p| consumer(p)) else { return };
        let written = self.leases.open.get(&lease).is_some_and(|open| open.is_written());
        let answer = match self.leases.take(lease) {
            // Whatever it says of its reads: nobody has told it that all is written.
            Some(State::Bound(state, of)) if of == link && written => {
                let given_up = state.is_of(&release.fence, &peer);
                self.leases.put(lease, State::Bound(state, of));
                if given_up {
                    self.end_bound(lease, Then::Close(Closing::Abandoned));
                }
                stale(release)
            }
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
                // Its prefill begins anew, and it will be offered again.
                Some(state @ State::Stopping { then: Then::Reopen, .. }) => {
                    self.leases.put(lease, state);
                    Left::For(by)
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

    /// Ends one that nobody has bound, as nobody will.
    pub(super) fn end_offered(&mut self, lease: LeaseId) -> bool {
        self.end_lease(lease, Closing::Declined)
    }

    /// Takes a lease back, whatever its state; false where there is none.
    pub(super) fn withdraw_lease(&mut self, lease: LeaseId) -> bool {
        self.end_lease(lease, Closing::Withdrawn)
    }

    /// Ends leases whose time is up.
    pub(super) fn expire_leases(&mut self) {
        while let Some(lease) = self.leases.ends.take_due(self.now) {
            let Some(open) = self.leases.open.get(&lease) else { continue };
            match &open.state {
                State::Stopping { until, .. } if *until <= self.now => self.writers_are_late(lease),
                state if state.term().is_over(self.now) => {
                    self.end_lease(lease, Closing::Expired);
                }
                _ => {}
            }
        }
    }

    /// Ends a lease otherwise than by a release, and tells its consumer so.
    fn end_lease(&mut self, lease: LeaseId, how: Closing) -> bool {
        match self.leases.take(lease) {
            Some(State::Offered(state)) => self.close_lease(&state.close(how), None),
            Some(State::Bound(state, link)) => {
                if self.links.knows_leases(link) {
                    let fence = state.fence().clone();
                    self.send_peer(link, PeerMessage::Closed(LeaseClosed { fence, how }));
                }
                self.leases.put(lease, State::Bound(state, link));
                self.end_bound(lease, Then::Close(how));
            }
            // It ends anyway, or does now.
            Some(state @ State::Stopping { .. }) => {
                self.leases.put(lease, state);
                self.end_bound(lease, Then::Close(how));
            }
            Some(State::Moving) | None => return false,
        }
        true
    }

    /// Ends what a consumer has bound: at once if no rank of ours writes it, else when all have stopped.
    pub(super) fn end_bound(&mut self, lease: LeaseId, then: Then) {
        let Some(open) = self.leases.open.get(&lease) else { return };
        let written = open.is_written();
        let (bound, link) = match self.leases.take(lease) {
            Some(State::Bound(bound, link)) => (bound, link),
            // One that was to be offered anew isn't.
            Some(State::Stopping { bound, link, then: before, until }) => {
                let then = if before == Then::Reopen { then } else { before };
                return self.leases.put(lease, State::Stopping { bound, link, then, until });
            }
            Some(other) => return self.leases.put(lease, other),
            None => return,
        };
        let until = self.now.saturating_add(self.config.grace);
        self.leases.put(lease, State::Stopping { bound, link, then, until });
        if written { self.stop_writers(lease) } else { self.has_stopped(lease) }
    }

    /// Nothing of a lease is written any more, as far as anybody will hear.
    pub(super) fn has_stopped(&mut self, lease: LeaseId) {
        let (bound, link, then) = match self.leases.take(lease) {
            Some(State::Stopping { bound, link, then, .. }) => (bound, link, then),
            Some(other) => return self.leases.put(lease, other),
            None => return,
        };
        let consumer = bound.consumer().engine.clone();
        let doubted = self.writers_have_stopped(lease);
        let reopened = match then {
            // One of a former life of the engine can't be bound anew.
            Then::Reopen if doubted.as_ref().is_none_or(BTreeSet::is_empty) && bound.fence().epoch == self.epoch => {
                bound.clone().reopen(self.config.lease.extension, self.now)
            }
            _ => None,
        };
        if let Some(offered) = reopened {
            let (fence, how) = (bound.fence().clone(), Closing::Restarted);
            self.send_peer(link, PeerMessage::Closed(LeaseClosed { fence, how }));
            self.leases.unbind(lease, &consumer, link);
            self.leases.put(lease, State::Offered(offered));
            self.leases.wait_for(lease, consumer, link);
            self.end_asks(lease, "the prefill has begun anew");
        } else {
            if let Some(doubted) = doubted {
                self.tell_stopped(&consumer, bound.fence(), &doubted);
            }
            // One that can't be offered anew has lost what it would be offered to.
            let how = if let Then::Close(how) = then { how } else { Closing::Withdrawn };
            self.close_lease(&bound.close(how), Some((consumer, link)));
        }
        self.retire_link(link);
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
        for lease in self.leases.of_link.get(&link).cloned().unwrap_or_default() {
            self.end_bound(lease, Then::Close(Closing::ConsumerLost));
        }
        // Nobody else knows the attempt that is due.
        for lease in self.leases.take_awaited(link) {
            self.end_lease(lease, Closing::ConsumerLost);
        }
    }

    /// Every open lease is taken back; for the end of the owner itself.
    pub(super) fn end_all_leases(&mut self) {
        let open: Vec<LeaseId> = self.leases.open.keys().copied().collect();
        for lease in open {
            self.withdraw_lease(lease);
            // Whoever has not stopped yet won't be heard of again.
            if self.leases.is_open(lease) {
                self.writers_are_late(lease);
            }
        }
    }

    /// Its blocks are the engine's again, and so is what was gathered of them; nobody digests them any more.
    pub(super) fn close_lease(&mut self, closed: &Closed, bound: Option<(EngineId, LinkId)>) {
        let lease = closed.fence().lease;
        let Some(open) = self.leases.open.remove(&lease) else { return };
        self.leases.ends.remove(lease);
        self.leases.await_no_more(lease, open.before.as_ref());
        self.loans.read_ended(&open.places);
        if let Some((engine, link)) = &bound {
            self.leases.unbind(lease, engine, *link);
        }
        if open.stream.is_some() {
            self.tell_ranks(|| ToRank::StreamEnd(lease));
        }
        let consumer = bound.map(|(engine, _)| engine);
        self.end_asks(lease, "the lease was closed");
        let (fence, how, age) = (closed.fence().clone(), closed.how(), self.now.saturating_sub(open.since));
        self.effects.push_back(Effect::LeaseClosed { fence, how, age, consumer });
    }
}
