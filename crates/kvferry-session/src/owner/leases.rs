//! The producer's side: leases, and digests for those who have bound them.

use super::{BTreeMap, Effect, EngineId, Epoch, Fence, LeaseId, Life, LinkId, OwnerSession, dst_counts};

use super::loans::shown;

use kvferry_geometry::request::Request;
use kvferry_geometry::units::RankId;
use kvferry_proto::lease::{Bound, Closed, Consumer, Offer, Offered, first_attempt, stale};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::pairing_salt;
use kvferry_proto::peer::{
    Bind, BindAnswer, BindRefusal, Grant, MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, PeerMessage, PieceDigest, Release,
    RunDigest, RunDigestAnswer,
};
use kvferry_proto::rank::{DigestOrder, Pairing, ToRank};

/// A lease that is open.
#[derive(Debug)]
enum Open {
    Offered(Offered),
    Bound(Bound, LinkId),
}

/// A digest order at one of our ranks.
#[derive(Debug)]
struct Ticket {
    link: LinkId,
    fence: Fence,
    src: RankId,
    dst: RankId,
}

/// The most digest orders that one link may have open: one for each lease and pair of ranks at most.
const MAX_TICKETS: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Leases {
    open: BTreeMap<LeaseId, Open>,
    last_ticket: u64,
    tickets: BTreeMap<u64, Ticket>,
    /// The tickets by lease, source and destination: one question is open for each at most.
    asked: BTreeMap<(LeaseId, RankId, RankId), u64>,
    /// How many tickets each link has.
    counts: BTreeMap<LinkId, usize>,
}

impl Leases {
    pub(super) fn is_open(&self, lease: LeaseId) -> bool {
        self.open.contains_key(&lease)
    }

    pub(super) fn open(&mut self, engine: &EngineId, epoch: Epoch, lease: LeaseId, offer: Offer) -> Fence {
        let fence = first_attempt(engine.clone(), epoch, lease);
        self.open.insert(lease, Open::Offered(Offered::new(fence.clone(), offer)));
        fence
    }

    pub(super) fn withdraw(&mut self, lease: LeaseId) -> Option<Closed> {
        Some(match self.open.remove(&lease)? {
            Open::Offered(state) => state.withdraw(),
            Open::Bound(state, _) => state.withdraw(),
        })
    }

    /// Whether no lease is bound and no digest is asked for.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.tickets.is_empty()
            && self.asked.is_empty()
            && self.counts.is_empty()
            && self.open.values().all(|o| matches!(o, Open::Offered(_)))
    }

    fn add_ticket(&mut self, ticket: Ticket) -> u64 {
        self.last_ticket += 1;
        self.asked.insert((ticket.fence.lease, ticket.src, ticket.dst), self.last_ticket);
        *self.counts.entry(ticket.link).or_default() += 1;
        self.tickets.insert(self.last_ticket, ticket);
        self.last_ticket
    }

    fn remove_ticket(&mut self, id: u64) -> Option<Ticket> {
        let ticket = self.tickets.remove(&id)?;
        self.asked.remove(&(ticket.fence.lease, ticket.src, ticket.dst));
        if let Some(count) = self.counts.get_mut(&ticket.link) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&ticket.link);
            }
        }
        Some(ticket)
    }

    fn tickets_of(&self, lease: LeaseId) -> Vec<u64> {
        let (least, most) = (RankId::new(0), RankId::new(u32::MAX));
        self.asked.range((lease, least, least)..=(lease, most, most)).map(|(_, ticket)| *ticket).collect()
    }

    /// What was bound over a link that is gone.
    fn consumer_lost(&mut self, link: LinkId) -> Vec<Closed> {
        let of_link = |open: &Open| matches!(open, Open::Bound(_, l) if *l == link);
        let gone: Vec<LeaseId> = self.open.iter().filter(|(_, o)| of_link(o)).map(|(id, _)| *id).collect();
        gone.into_iter()
            .filter_map(|id| match self.open.remove(&id)? {
                Open::Bound(state, _) => Some(state.consumer_lost()),
                Open::Offered(state) => {
                    self.open.insert(id, Open::Offered(state));
                    None
                }
            })
            .collect()
    }

    fn bound(&self, fence: &Fence, link: LinkId) -> Option<&Bound> {
        match self.open.get(&fence.lease)? {
            Open::Bound(state, l) if *l == link && state.fence() == fence => Some(state),
            _ => None,
        }
    }
}

fn consumer(peer: &EngineManifest) -> Consumer {
    Consumer { engine: peer.engine().clone(), epoch: peer.epoch() }
}

impl OwnerSession {
    pub(super) fn on_bind(&mut self, link: LinkId, bind: &Bind) {
        let answer = match self.try_bind(link, bind) {
            Ok(grant) => BindAnswer::Bound(grant),
            Err(reason) => BindAnswer::Refused { fence: bind.fence.clone(), reason },
        };
        self.send_peer(link, PeerMessage::BindAnswer(answer));
    }

    fn try_bind(&mut self, link: LinkId, bind: &Bind) -> Result<Grant, BindRefusal> {
        if bind.fence.engine != self.config.engine {
            return Err(BindRefusal::WrongEngine);
        }
        if bind.fence.epoch != self.config.epoch {
            return Err(BindRefusal::StaleEpoch { current: self.config.epoch });
        }
        if let Life::Broken(_, rank, reason) = &self.life {
            return Err(BindRefusal::RankLost { rank: *rank, reason: reason.clone() });
        }
        let lease = bind.fence.lease;
        match self.leases.open.get(&lease) {
            None => return Err(BindRefusal::UnknownLease),
            Some(Open::Bound(..)) => return Err(BindRefusal::AlreadyBound),
            Some(Open::Offered(state)) => state.admits(bind)?,
        }
        let Some(peer) = self.links.peer(link) else { return Err(BindRefusal::UnknownLease) };
        // Which salt is due is not the peer's to choose: it could make us compute ever new maps.
        let salt = pairing_salt(peer.engine(), lease);
        let options = self.peer_options(salt);
        let Some((peer, direction)) = self.serving(link) else { return Err(BindRefusal::UnknownLease) };
        let map = direction.and_then(|d| d.map(options)).map_err(|e| BindRefusal::Incompatible(e.to_string()))?;
        if bind.salt != salt {
            return Err(BindRefusal::PeerMapDiffers { ours: map.digest() });
        }
        let Some(Open::Offered(state)) = self.leases.open.remove(&lease) else {
            return Err(BindRefusal::UnknownLease);
        };
        match state.bind(bind, consumer(&peer), map.digest()) {
            Ok((bound, grant)) => {
                self.leases.open.insert(lease, Open::Bound(bound, link));
                Ok(grant)
            }
            Err((same, refusal)) => {
                self.leases.open.insert(lease, Open::Offered(same));
                Err(refusal)
            }
        }
    }

    pub(super) fn on_release(&mut self, link: LinkId, release: &Release) {
        let lease = release.fence.lease;
        let of_link = matches!(self.leases.open.get(&lease), Some(Open::Bound(_, l)) if *l == link);
        let peer = self.links.peer(link).map(|p| consumer(p));
        let answer = match (of_link, peer) {
            (true, Some(peer)) => match self.leases.open.remove(&lease) {
                Some(Open::Bound(state, _)) => match state.release(release, &peer) {
                    Ok((closed, answer)) => {
                        self.close_lease(&closed);
                        answer
                    }
                    Err((same, answer)) => {
                        self.leases.open.insert(lease, Open::Bound(same, link));
                        answer
                    }
                },
                Some(offered) => {
                    self.leases.open.insert(lease, offered);
                    stale(release)
                }
                None => stale(release),
            },
            _ => stale(release),
        };
        self.send_peer(link, PeerMessage::ReleaseAnswer(answer));
    }

    pub(super) fn on_run_digest(&mut self, link: LinkId, question: RunDigest) {
        let (fence, src, dst) = (question.fence.clone(), question.src, question.dst);
        if let Err(why) = self.try_run_digest(link, question) {
            let answer = RunDigestAnswer { fence, src, dst, pieces: Err(why) };
            self.send_peer(link, PeerMessage::RunDigestAnswer(answer));
        }
    }

    fn try_run_digest(&mut self, link: LinkId, q: RunDigest) -> Result<(), String> {
        let bound = self.leases.bound(&q.fence, link).ok_or("the lease is not bound by this peer")?;
        let peer = self.links.peer(link).ok_or("the link is not established")?.clone();
        let (salt, peer_map) = (bound.salt(), bound.peer_map());
        if self.leases.counts.get(&link).is_some_and(|n| *n >= MAX_TICKETS) {
            return Err("too many digests are asked for at a time".into());
        }
        if self.leases.asked.contains_key(&(q.fence.lease, q.src, q.dst)) {
            return Err("the same digests are asked for already".into());
        }
        let (expected, got) = (peer.cache().groups().len(), q.groups.len());
        if expected != got {
            return Err(format!("the question lists {got} groups, the consumer's engine has {expected}"));
        }
        let (blocks, states) = dst_counts(&q.groups);
        if blocks > MAX_REQUEST_BLOCKS || states > MAX_REQUEST_STATES {
            let limits = format!("{MAX_REQUEST_BLOCKS} and {MAX_REQUEST_STATES}");
            return Err(format!("the question lists {blocks} blocks and {states} states, the limits are {limits}"));
        }
        let options = self.peer_options(salt);
        let Some((_, Ok(direction))) = self.serving(link) else { return Err("the engines do not match".into()) };
        let map = direction.map(options).map_err(|e| e.to_string())?;
        if !map.sources_of(q.dst).any(|src| src == q.src) {
            return Err(format!("rank {} reads nothing from rank {}", q.dst, q.src));
        }
        let bound = self.leases.bound(&q.fence, link).ok_or("the lease is not bound by this peer")?;
        let pairing = Pairing { peer: peer.digest(), options, compat: self.config.compat, peer_map };
        // The producer's blocks are those of the lease, never what a peer says.
        let request = Request { tokens: q.tokens, src: bound.offer().groups.clone(), dst: q.groups };
        let ticket = self.leases.add_ticket(Ticket { link, fence: q.fence, src: q.src, dst: q.dst });
        let order = DigestOrder { ticket, pairing, dst: q.dst, request, windows: q.windows };
        if !self.send_rank(q.src, ToRank::Digest(order), Some(&peer)) {
            self.leases.remove_ticket(ticket);
            return Err(format!("the producer's rank {} is not there", q.src));
        }
        Ok(())
    }

    pub(super) fn on_digested(&mut self, ticket: u64, pieces: Result<Vec<PieceDigest>, String>) {
        let Some(Ticket { link, fence, src, dst }) = self.leases.remove_ticket(ticket) else { return };
        // What was digested counts only if the blocks are still the lease's; the release will tell.
        self.send_peer(link, PeerMessage::RunDigestAnswer(RunDigestAnswer { fence, src, dst, pieces }));
    }

    pub(super) fn rank_lost_in_digests(&mut self, rank: RankId, reason: &str) {
        let lost: Vec<u64> = self.leases.tickets.iter().filter(|(_, t)| t.src == rank).map(|(id, _)| *id).collect();
        for ticket in lost {
            self.on_digested(ticket, Err(format!("the producer's rank {rank} is gone: {reason}")));
        }
    }

    pub(super) fn link_lost_in_leases(&mut self, link: LinkId) {
        for closed in self.leases.consumer_lost(link) {
            self.close_lease(&closed);
        }
    }

    /// Every open lease is taken back; for the end of the owner itself.
    pub(super) fn end_all_leases(&mut self) {
        let open: Vec<LeaseId> = self.leases.open.keys().copied().collect();
        for lease in open {
            self.withdraw(lease);
        }
    }

    /// Its blocks are the engine's again, and nobody digests them any more.
    pub(super) fn close_lease(&mut self, closed: &Closed) {
        if let Some(local) = self.life.local() {
            self.loans.read_ended(&shown(local.manifest.cache(), &closed.offer().groups));
        }
        for ticket in self.leases.tickets_of(closed.fence().lease) {
            if let Some(src) = self.leases.tickets.get(&ticket).map(|t| t.src) {
                self.send_rank(src, ToRank::CancelDigest(ticket), None);
            }
            self.on_digested(ticket, Err("the lease was closed".into()));
        }
        self.effects.push_back(Effect::LeaseClosed { fence: closed.fence().clone(), how: closed.how() });
    }
}
