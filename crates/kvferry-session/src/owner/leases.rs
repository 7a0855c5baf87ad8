//! The producer's side: leases, and digests and gathers for those who have bound them.

use super::{BTreeMap, Effect, EngineId, Epoch, Fence, LeaseId, Life, LinkId, OwnerSession, dst_counts};

use super::loans::shown;

use kvferry_geometry::request::{DstGroup, Request};
use kvferry_geometry::units::{Bytes, RankId, Tokens};
use kvferry_proto::lease::{Bound, Closed, Consumer, Offer, Offered, first_attempt, stale};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::pairing_salt;
use kvferry_proto::peer::{
    Bind, BindAnswer, BindRefusal, Gather, GatherAnswer, Grant, MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, NotGathered,
    PeerMessage, PieceDigest, Release, RunDigest, RunDigestAnswer,
};
use kvferry_proto::rank::{DigestOrder, GatherOrder, Pairing, ToRank};

/// A lease that is open.
#[derive(Debug)]
enum Open {
    Offered(Offered),
    Bound(Bound, LinkId),
}

/// What a peer asks of one of our ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Ask {
    /// Digests.
    Digest,
    /// To gather. What was gathered stays until the lease is closed, and so does the ticket.
    Gather,
}

/// An order at one of our ranks.
#[derive(Debug)]
struct Ticket {
    ask: Ask,
    /// Whether the peer has its answer.
    answered: bool,
    link: LinkId,
    fence: Fence,
    src: RankId,
    dst: RankId,
}

/// The most orders of a kind that one link may have open: one for each lease and pair of ranks at most.
const MAX_TICKETS: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Leases {
    open: BTreeMap<LeaseId, Open>,
    last_ticket: u64,
    tickets: BTreeMap<u64, Ticket>,
    /// The tickets by lease, source, destination and what is asked for: one question is open for each at most.
    asked: BTreeMap<(LeaseId, RankId, RankId, Ask), u64>,
    /// How many tickets of a kind each link has: gathers last longer than digests, and must not be in their way.
    counts: BTreeMap<(LinkId, Ask), usize>,
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

    /// Whether no lease is bound and nothing is asked for.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.tickets.is_empty()
            && self.asked.is_empty()
            && self.counts.is_empty()
            && self.open.values().all(|o| matches!(o, Open::Offered(_)))
    }

    fn add_ticket(&mut self, ticket: Ticket) -> u64 {
        self.last_ticket += 1;
        self.asked.insert((ticket.fence.lease, ticket.src, ticket.dst, ticket.ask), self.last_ticket);
        *self.counts.entry((ticket.link, ticket.ask)).or_default() += 1;
        self.tickets.insert(self.last_ticket, ticket);
        self.last_ticket
    }

    fn remove_ticket(&mut self, id: u64) -> Option<Ticket> {
        let ticket = self.tickets.remove(&id)?;
        self.asked.remove(&(ticket.fence.lease, ticket.src, ticket.dst, ticket.ask));
        if let Some(count) = self.counts.get_mut(&(ticket.link, ticket.ask)) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&(ticket.link, ticket.ask));
            }
        }
        Some(ticket)
    }

    fn tickets_of(&self, lease: LeaseId) -> Vec<u64> {
        let (least, most) = (RankId::new(0), RankId::new(u32::MAX));
        let range = (lease, least, least, Ask::Digest)..=(lease, most, most, Ask::Gather);
        self.asked.range(range).map(|(_, ticket)| *ticket).collect()
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
        let RunDigest { fence, src, dst, tokens, groups, windows } = q;
        let ticket = Ticket { ask: Ask::Digest, answered: false, link, fence, src, dst };
        self.order(ticket, tokens, groups, |ticket, pairing, request| {
            ToRank::Digest(DigestOrder { ticket, pairing, dst, request, windows })
        })
    }

    pub(super) fn on_gather(&mut self, link: LinkId, question: Gather) {
        let Gather { fence, src, dst, gathered, tokens, groups } = question;
        let ticket = Ticket { ask: Ask::Gather, answered: false, link, fence: fence.clone(), src, dst };
        let order = |ticket, pairing, request| ToRank::Gather(GatherOrder { ticket, pairing, dst, gathered, request });
        if let Err(why) = self.order(ticket, tokens, groups, order) {
            let answer = GatherAnswer { fence, src, dst, result: Err(why.into()) };
            self.send_peer(link, PeerMessage::GatherAnswer(answer));
        }
    }

    /// Orders what a peer asks for at one of our ranks, if the lease is the peer's.
    fn order(
        &mut self,
        asked: Ticket,
        tokens: Tokens,
        groups: Vec<DstGroup>,
        order: impl FnOnce(u64, Pairing, Request) -> ToRank,
    ) -> Result<(), String> {
        let (link, src, dst) = (asked.link, asked.src, asked.dst);
        let bound = self.leases.bound(&asked.fence, link).ok_or("the lease is not bound by this peer")?;
        let peer = self.links.peer(link).ok_or("the link is not established")?.clone();
        let (salt, peer_map) = (bound.salt(), bound.peer_map());
        if self.leases.counts.get(&(link, asked.ask)).is_some_and(|n| *n >= MAX_TICKETS) {
            let what = if asked.ask == Ask::Digest { "digests" } else { "gathers" };
            return Err(format!("too many {what} are asked for at a time"));
        }
        if self.leases.asked.contains_key(&(asked.fence.lease, src, dst, asked.ask)) {
            return Err("the same digests or gathers are asked for already".into());
        }
        let (expected, got) = (peer.cache().groups().len(), groups.len());
        if expected != got {
            return Err(format!("the question lists {got} groups, the consumer's engine has {expected}"));
        }
        let (blocks, states) = dst_counts(&groups);
        if blocks > MAX_REQUEST_BLOCKS || states > MAX_REQUEST_STATES {
            let limits = format!("{MAX_REQUEST_BLOCKS} and {MAX_REQUEST_STATES}");
            return Err(format!("the question lists {blocks} blocks and {states} states, the limits are {limits}"));
        }
        let options = self.peer_options(salt);
        let Some((_, Ok(direction))) = self.serving(link) else { return Err("the engines do not match".into()) };
        let map = direction.map(options).map_err(|e| e.to_string())?;
        if !map.sources_of(dst).any(|of| of == src) {
            return Err(format!("rank {dst} reads nothing from rank {src}"));
        }
        let bound = self.leases.bound(&asked.fence, link).ok_or("the lease is not bound by this peer")?;
        let pairing = Pairing { peer: peer.digest(), options, compat: self.config.compat, peer_map };
        // The producer's blocks are those of the lease, never what a peer says.
        let request = Request { tokens, src: bound.offer().groups.clone(), dst: groups };
        let ticket = self.leases.add_ticket(asked);
        if !self.send_rank(src, order(ticket, pairing, request), Some(&peer)) {
            self.leases.remove_ticket(ticket);
            return Err(format!("the producer's rank {src} is not there"));
        }
        Ok(())
    }

    pub(super) fn on_digested(&mut self, ticket: u64, pieces: Result<Vec<PieceDigest>, String>) {
        if self.leases.tickets.get(&ticket).is_none_or(|t| t.ask != Ask::Digest) {
            return;
        }
        let Some(Ticket { link, fence, src, dst, .. }) = self.leases.remove_ticket(ticket) else { return };
        // What was digested counts only if the blocks are still the lease's; the release will tell.
        self.send_peer(link, PeerMessage::RunDigestAnswer(RunDigestAnswer { fence, src, dst, pieces }));
    }

    pub(super) fn on_gathered(&mut self, ticket: u64, result: Result<Bytes, NotGathered>) {
        let Some(open) = self.leases.tickets.get_mut(&ticket) else { return };
        if open.ask != Ask::Gather || std::mem::replace(&mut open.answered, true) {
            return;
        }
        let (link, fence, src, dst) = (open.link, open.fence.clone(), open.src, open.dst);
        if result.is_err() {
            // There is nothing that would have to be given back.
            self.leases.remove_ticket(ticket);
        }
        self.send_peer(link, PeerMessage::GatherAnswer(GatherAnswer { fence, src, dst, result }));
    }

    /// Nothing comes of an order any more; whoever waits for it is told why.
    fn end_ticket(&mut self, ticket: u64, why: &str) {
        match self.leases.tickets.get(&ticket).map(|t| (t.ask, t.answered)) {
            Some((Ask::Digest, _)) => self.on_digested(ticket, Err(why.into())),
            Some((Ask::Gather, false)) => self.on_gathered(ticket, Err(why.into())),
            Some((Ask::Gather, true)) => drop(self.leases.remove_ticket(ticket)),
            None => {}
        }
    }

    pub(super) fn rank_lost_in_leases(&mut self, rank: RankId, reason: &str) {
        let lost: Vec<u64> = self.leases.tickets.iter().filter(|(_, t)| t.src == rank).map(|(id, _)| *id).collect();
        for ticket in lost {
            self.end_ticket(ticket, &format!("the producer's rank {rank} is gone: {reason}"));
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

    /// Its blocks are the engine's again, and so is what was gathered of them; nobody digests them any more.
    pub(super) fn close_lease(&mut self, closed: &Closed) {
        if let Some(local) = self.life.local() {
            self.loans.read_ended(&shown(local.manifest.cache(), &closed.offer().groups));
        }
        for ticket in self.leases.tickets_of(closed.fence().lease) {
            if let Some((src, ask)) = self.leases.tickets.get(&ticket).map(|t| (t.src, t.ask)) {
                let end = match ask {
                    Ask::Digest => ToRank::CancelDigest(ticket),
                    Ask::Gather => ToRank::GatherEnd(ticket),
                };
                self.send_rank(src, end, None);
            }
            self.end_ticket(ticket, "the lease was closed");
        }
        self.effects.push_back(Effect::LeaseClosed { fence: closed.fence().clone(), how: closed.how() });
    }
}
