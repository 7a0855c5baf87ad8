//! What consumers ask of this engine's ranks about leases that they have bound: to digest, and to gather.

use super::{BTreeMap, LeaseId, LinkId, OwnerSession, dst_counts};

use kvferry_geometry::request::{DstGroup, Request};
use kvferry_geometry::units::{Bytes, RankId, Tokens};
use kvferry_proto::names::Fence;
use kvferry_proto::peer::{
    Gather, GatherAnswer, MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, NotGathered, PeerMessage, PieceDigest, RunDigest,
    RunDigestAnswer,
};
use kvferry_proto::rank::{DigestOrder, GatherOrder, Pairing, ToRank};

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
pub(super) struct Asks {
    last: u64,
    tickets: BTreeMap<u64, Ticket>,
    /// The tickets by lease, source, destination and what is asked for: one question is open for each at most.
    asked: BTreeMap<(LeaseId, RankId, RankId, Ask), u64>,
    /// How many tickets of a kind each link has: gathers last longer than digests, and must not be in their way.
    counts: BTreeMap<(LinkId, Ask), usize>,
}

impl Asks {
    fn add(&mut self, ticket: Ticket) -> u64 {
        self.last += 1;
        self.asked.insert((ticket.fence.lease, ticket.src, ticket.dst, ticket.ask), self.last);
        *self.counts.entry((ticket.link, ticket.ask)).or_default() += 1;
        self.tickets.insert(self.last, ticket);
        self.last
    }

    fn remove(&mut self, id: u64) -> Option<Ticket> {
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

    fn of(&self, lease: LeaseId) -> Vec<u64> {
        let (least, most) = (RankId::new(0), RankId::new(u32::MAX));
        let range = (lease, least, least, Ask::Digest)..=(lease, most, most, Ask::Gather);
        self.asked.range(range).map(|(_, ticket)| *ticket).collect()
    }

    /// Whether nothing is asked for.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.tickets.is_empty() && self.asked.is_empty() && self.counts.is_empty()
    }
}

impl OwnerSession {
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
        if self.asks.counts.get(&(link, asked.ask)).is_some_and(|n| *n >= MAX_TICKETS) {
            let what = if asked.ask == Ask::Digest { "digests" } else { "gathers" };
            return Err(format!("too many {what} are asked for at a time"));
        }
        if self.asks.asked.contains_key(&(asked.fence.lease, src, dst, asked.ask)) {
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
        let ticket = self.asks.add(asked);
        if !self.send_rank(src, order(ticket, pairing, request), Some(&peer)) {
            self.asks.remove(ticket);
            return Err(format!("the producer's rank {src} is not there"));
        }
        Ok(())
    }

    pub(super) fn on_digested(&mut self, ticket: u64, pieces: Result<Vec<PieceDigest>, String>) {
        if self.asks.tickets.get(&ticket).is_none_or(|t| t.ask != Ask::Digest) {
            return;
        }
        let Some(Ticket { link, fence, src, dst, .. }) = self.asks.remove(ticket) else { return };
        // What was digested counts only if the blocks are still the lease's; the release will tell.
        self.send_peer(link, PeerMessage::RunDigestAnswer(RunDigestAnswer { fence, src, dst, pieces }));
    }

    pub(super) fn on_gathered(&mut self, ticket: u64, result: Result<Bytes, NotGathered>) {
        let Some(open) = self.asks.tickets.get_mut(&ticket) else { return };
        if open.ask != Ask::Gather || std::mem::replace(&mut open.answered, true) {
            return;
        }
        let (link, fence, src, dst) = (open.link, open.fence.clone(), open.src, open.dst);
        if result.is_err() {
            // There is nothing that would have to be given back.
            self.asks.remove(ticket);
        }
        self.send_peer(link, PeerMessage::GatherAnswer(GatherAnswer { fence, src, dst, result }));
    }

    /// Nothing comes of an order any more; whoever waits for it is told why.
    fn end_ticket(&mut self, ticket: u64, why: &str) {
        match self.asks.tickets.get(&ticket).map(|t| (t.ask, t.answered)) {
            Some((Ask::Digest, _)) => self.on_digested(ticket, Err(why.into())),
            Some((Ask::Gather, false)) => self.on_gathered(ticket, Err(why.into())),
            Some((Ask::Gather, true)) => drop(self.asks.remove(ticket)),
            None => {}
        }
    }

    /// Nothing is asked of a rank any more that is gone.
    pub(super) fn end_asks_of(&mut self, rank: RankId, reason: &str) {
        let lost: Vec<u64> = self.asks.tickets.iter().filter(|(_, t)| t.src == rank).map(|(id, _)| *id).collect();
        for ticket in lost {
            self.end_ticket(ticket, &format!("the producer's rank {rank} is gone: {reason}"));
        }
    }

    /// Nothing is asked any more about a lease, or about the attempt that read it.
    pub(super) fn end_asks(&mut self, lease: LeaseId, why: &str) {
        if self.asks.tickets.is_empty() {
            return;
        }
        for ticket in self.asks.of(lease) {
            if let Some((src, ask)) = self.asks.tickets.get(&ticket).map(|t| (t.src, t.ask)) {
                let end = match ask {
                    Ask::Digest => ToRank::CancelDigest(ticket),
                    Ask::Gather => ToRank::GatherEnd(ticket),
                };
                self.send_rank(src, end, None);
            }
            self.end_ticket(ticket, why);
        }
    }
}
