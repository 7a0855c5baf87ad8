//! A producer: its table of leases and the bytes of its ranks.
//!
//! Mirrors `kvferry-session/src/owner/leases.rs` line by line where a lease's state changes, without limits, versions, drafts of
//! answers to older neighbours, and the asks that gather or digest. The states and what they answer are the real ones.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_geometry::request::{BlockTable, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::units::{BlockId, RankId, TokenRange, Tokens};
use kvferry_proto::lease::{Bound, Closed, Closing, Consumer as Reader, Offer, Offered, Term, first_attempt, stale};
use kvferry_proto::names::{ContentKey, Epoch, LeaseId};
use kvferry_proto::peer::{
    Bind, BindAnswer, BindRefusal, Grant, Heartbeat, HeartbeatAnswer, LeaseClosed, Left, ReadsEnd, Release,
    ReleaseAnswer, Verdict,
};

use crate::fault::Fault;
use crate::network::{End, LinkId, Message};
use crate::rules::Rule;
use crate::state::{State, Told};
use crate::world::{World, ranks};

/// What a block of a rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Content {
    /// What this lease shows.
    Of(usize),
    /// Anything else.
    Other,
}

/// Blocks of every rank.
const BLOCKS: usize = 2;

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Producer {
    pub(crate) lives: u8,
    pub(crate) epoch: Epoch,
    /// The rank that is lost.
    pub(crate) lost: Option<RankId>,
    pub(crate) open: BTreeMap<LeaseId, Open>,
    pub(crate) memory: BTreeMap<RankId, [Content; BLOCKS]>,
}

/// A lease in the table.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Open {
    /// Which of the world's.
    pub(crate) lease: usize,
    pub(crate) state: Lease,
}

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) enum Lease {
    Offered(Offered),
    Bound(Bound, LinkId),
}

impl Lease {
    pub(crate) fn term(&self) -> Term {
        match self {
            Self::Offered(state) => state.term(),
            Self::Bound(state, _) => state.term(),
        }
    }
}

impl Producer {
    pub(crate) fn new(number: usize) -> Self {
        let memory = ranks().map(|rank| (rank, [Content::Other; BLOCKS])).collect();
        Self { lives: 0, epoch: epoch(number, 0), lost: None, open: BTreeMap::new(), memory }
    }

    pub(crate) fn content(&self, rank: RankId, block: u32) -> Content {
        let of_rank = self.memory.get(&rank).and_then(|m| m.get(index(block)));
        of_rank.copied().unwrap_or(Content::Other)
    }

    pub(crate) fn fill(&mut self, block: u32, content: Content) {
        for cell in self.memory.values_mut().filter_map(|m| m.get_mut(index(block))) {
            *cell = content;
        }
    }
}

fn epoch(number: usize, life: u8) -> Epoch {
    Epoch::new(1000 + 100 * number as u128 + u128::from(life))
}

fn index(block: u32) -> usize {
    usize::try_from(block).unwrap_or(usize::MAX)
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(crate) fn content_key(lease: usize) -> ContentKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&(lease as u64).to_le_bytes());
    ContentKey::from_bytes(bytes)
}

fn offer(lease: usize, block: u32) -> Offer {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(16));
    let group = SrcPaged { table: BlockTable::new(0, &[BlockId::new(block)]), held, tail: Tail::Exact };
    Offer { groups: vec![group.into()], content_key: content_key(lease) }
}

/// The block that an offer shows.
pub(crate) fn block_of(groups: &[SrcGroup]) -> Option<u32> {
    match groups {
        [SrcGroup::Paged(paged)] => paged.table.iter().next().map(BlockId::get),
        _ => None,
    }
}

impl State {
    fn producer(&mut self, producer: usize) -> Option<&mut Producer> {
        self.producers.get_mut(producer)
    }

    /// Computes and offers. The driver's call of `OwnerSession::offer`.
    pub(crate) fn offer(&mut self, w: &World, lease: usize) {
        let (Some(plan), now, id) = (w.leases.get(lease), self.now, w.lease_id(lease)) else { return };
        let Some(engine) = w.producers.get(plan.producer).cloned() else { return };
        let Some(p) = self.producer(plan.producer) else { return };
        p.fill(plan.block, Content::Of(lease));
        let fence = first_attempt(engine, p.epoch, id);
        let state = Offered::new(fence.clone(), offer(lease, plan.block), Term::of(plan.ttl.map(at), now));
        p.open.insert(id, Open { lease, state: Lease::Offered(state) });
        if let Some(told) = self.leases.get_mut(lease) {
            told.fence = Some(fence);
        }
    }

    /// The reader at the other end of a link, as it has greeted.
    fn reader(&self, w: &World, link: LinkId) -> Option<Reader> {
        let l = self.links.get(&link)?;
        Some(Reader { engine: w.consumers.get(l.consumer)?.clone(), epoch: l.consumer_epoch })
    }

    pub(crate) fn on_bind(&mut self, w: &World, producer: usize, link: LinkId, bind: &Bind) {
        let answer = match self.try_bind(w, producer, link, bind) {
            Ok(grant) => BindAnswer::Bound(grant),
            Err(reason) => BindAnswer::Refused { fence: bind.fence.clone(), reason },
        };
        self.send(w, link, End::Consumer, Message::BindAnswer(answer));
    }

    fn try_bind(&mut self, w: &World, producer: usize, link: LinkId, bind: &Bind) -> Result<Grant, BindRefusal> {
        let (by, now) = (self.reader(w, link).ok_or(BindRefusal::UnknownLease)?, self.now);
        let engine = w.producers.get(producer);
        let p = self.producer(producer).ok_or(BindRefusal::UnknownLease)?;
        if Some(&bind.fence.engine) != engine {
            return Err(BindRefusal::WrongEngine);
        }
        if bind.fence.epoch != p.epoch && !w.is(Fault::ForgetEpoch) {
            return Err(BindRefusal::StaleEpoch { current: p.epoch });
        }
        if let Some(rank) = p.lost {
            return Err(BindRefusal::RankLost { rank, reason: String::new() });
        }
        let lease = bind.fence.lease;
        match &p.open.get(&lease).ok_or(BindRefusal::UnknownLease)?.state {
            Lease::Bound(state, of) if *of == link => state.admits(bind, &by, now)?,
            Lease::Bound(..) => return Err(BindRefusal::AlreadyBound),
            Lease::Offered(state) => state.admits(bind, now)?,
        }
        let (salt, map) = w.map(&by.engine, lease, bind.fence.attempt);
        let map = map.ok_or(BindRefusal::UnknownLease)?.digest();
        if bind.salt != salt {
            return Err(BindRefusal::PeerMapDiffers { ours: map });
        }
        let Some(Open { lease: number, state }) = p.open.remove(&lease) else { return Err(BindRefusal::UnknownLease) };
        let (state, result) = match state {
            Lease::Offered(state) => match state.bind(bind, by, map, now) {
                Ok((bound, grant)) => (Lease::Bound(bound, link), Ok(grant)),
                Err((same, refusal)) => (Lease::Offered(same), Err(refusal)),
            },
            Lease::Bound(state, of) => match state.rebind(bind, &by, map, now) {
                Ok((bound, grant)) => (Lease::Bound(bound, of), Ok(grant)),
                Err((same, refusal)) => (Lease::Bound(same, of), Err(refusal)),
            },
        };
        p.open.insert(lease, Open { lease: number, state });
        result
    }

    pub(crate) fn on_release(&mut self, w: &World, producer: usize, link: LinkId, release: &Release) {
        let Some(by) = self.reader(w, link) else { return };
        let number = self.named(w, release);
        let open = |told: &Told| told.closes == 0 && !told.gone;
        let was_open = number.and_then(|n| self.leases.get(n)).is_some_and(open);
        let answer = self.judge(w, producer, link, release, &by);
        if let Some(number) = number.filter(|_| answer.verdict == Verdict::Held) {
            self.note_held(w, &by, number, release);
            if !was_open {
                self.broken.insert(Rule::HeldIsHeld);
            }
        }
        self.send(w, link, End::Consumer, Message::ReleaseAnswer(answer));
    }

    fn judge(&mut self, w: &World, producer: usize, link: LinkId, release: &Release, by: &Reader) -> ReleaseAnswer {
        let (lease, now) = (release.fence.lease, self.now);
        let now = if w.is(Fault::LateClock) { Duration::ZERO } else { now };
        let Some(p) = self.producer(producer) else { return stale(release) };
        let Some(Open { lease: number, state }) = p.open.remove(&lease) else {
            if w.is(Fault::HeldIfUnknown) && release.reads == ReadsEnd::Complete {
                return ReleaseAnswer { fence: release.fence.clone(), verdict: Verdict::Held };
            }
            return stale(release);
        };
        let (state, answer) = match state {
            Lease::Bound(state, of) if of == link || w.is(Fault::AnyRelease) => {
                let own = Release { fence: state.fence().clone(), reads: release.reads };
                let (release_of, by_whom) = match w.is(Fault::AnyRelease) {
                    true => (&own, state.consumer().clone()),
                    false => (release, by.clone()),
                };
                match state.release(release_of, &by_whom, now) {
                    Ok((closed, answer)) => {
                        if *closed.fence() != release.fence || by_whom != *by {
                            self.broken.insert(Rule::ReleasedByItsReader);
                        }
                        self.closed(number, &closed);
                        return ReleaseAnswer { fence: release.fence.clone(), ..answer };
                    }
                    Err((same, answer)) => (Lease::Bound(same, of), answer),
                }
            }
            Lease::Offered(state) if release.reads == ReadsEnd::Declined && *state.fence() == release.fence => {
                self.closed(number, &state.close(Closing::Declined));
                return stale(release);
            }
            other => (other, stale(release)),
        };
        p.open.insert(lease, Open { lease: number, state });
        answer
    }

    /// Which of the world's leases a release names: the last that was offered by this id.
    fn named(&self, w: &World, release: &Release) -> Option<usize> {
        let offered = |n: &usize| self.leases.get(*n).is_some_and(|told| told.fence.is_some());
        (0..w.leases.len()).filter(|n| w.lease_id(*n) == release.fence.lease).rfind(offered)
    }

    /// The rules about an answer *Held*: once, and the bytes are there still.
    fn note_held(&mut self, w: &World, by: &Reader, number: usize, release: &Release) {
        let Some(plan) = w.leases.get(number) else { return };
        let (salt, _) = w.map(&by.engine, release.fence.lease, release.fence.attempt);
        let kept = self.producers.get(plan.producer).is_some_and(|p| {
            let mut sources = w.sources(salt);
            sources.all(|rank| p.content(rank, plan.block) == Content::Of(number))
        });
        let Some(told) = self.leases.get_mut(number) else { return };
        told.held += 1;
        if told.held > 1 {
            self.broken.insert(Rule::HeldOnce);
        }
        if !kept {
            self.broken.insert(Rule::HeldIsHeld);
        }
    }

    pub(crate) fn on_heartbeat(&mut self, w: &World, producer: usize, link: LinkId, heartbeat: Heartbeat) {
        let Some(by) = self.reader(w, link) else { return };
        let (extension, now) = (at(w.terms.extension), self.now);
        let Some(p) = self.producer(producer) else { return };
        let mut left = Vec::with_capacity(heartbeat.leases.len());
        for (lease, attempt) in heartbeat.leases {
            left.push(match p.open.remove(&lease) {
                Some(Open { lease: number, state: Lease::Bound(state, of) }) if of == link => {
                    let (state, left) = state.beat(attempt, &by, extension, now);
                    p.open.insert(lease, Open { lease: number, state: Lease::Bound(state, of) });
                    left
                }
                Some(other) => {
                    p.open.insert(lease, other);
                    Left::Closed
                }
                None => Left::Closed,
            });
        }
        let answer = HeartbeatAnswer { beat: heartbeat.beat, left };
        self.send(w, link, End::Consumer, Message::HeartbeatAnswer(answer));
    }

    /// `expire_leases`.
    pub(crate) fn step_producer(&mut self, w: &World, producer: usize) {
        for lease in self.overdue(producer) {
            self.end_lease(w, producer, lease, Closing::Expired);
        }
    }

    pub(crate) fn overdue(&self, producer: usize) -> Vec<LeaseId> {
        let open = self.producers.get(producer).into_iter().flat_map(|p| &p.open);
        let told = |number: usize| self.leases.get(number).is_some_and(|t| t.closes > 0);
        open.filter(|(_, o)| o.state.term().is_over(self.now) && !told(o.lease)).map(|(id, _)| *id).collect()
    }

    /// Ends a lease otherwise than by a release, and tells its consumer so.
    pub(crate) fn end_lease(&mut self, w: &World, producer: usize, lease: LeaseId, how: Closing) {
        let Some(p) = self.producer(producer) else { return };
        let Some(Open { lease: number, state }) = p.open.remove(&lease) else { return };
        let late = (w.is(Fault::CloseLater) && how == Closing::Withdrawn)
            || (w.is(Fault::LateClock) && how == Closing::Expired);
        if late && matches!(state, Lease::Bound(..)) {
            p.open.insert(lease, Open { lease: number, state: state.clone() });
        }
        match state {
            Lease::Offered(state) => self.closed(number, &state.close(how)),
            Lease::Bound(state, link) => {
                let closed = state.close(how);
                let notice = LeaseClosed { fence: closed.fence().clone(), how };
                self.send(w, link, End::Consumer, Message::Closed(notice));
                self.closed(number, &closed);
            }
        }
    }

    /// `rank_lost_in_leases`: its bytes are gone, and so are the leases that show them to somebody.
    pub(crate) fn lose_producer_rank(&mut self, w: &World, producer: usize, rank: RankId) {
        let Some(p) = self.producer(producer) else { return };
        p.lost = Some(rank);
        p.memory.insert(rank, [Content::Other; BLOCKS]);
        let spared = |open: &Open| match &open.state {
            Lease::Bound(state, _) => !w.names(state.salt(), rank) || w.is(Fault::SpareAll),
            Lease::Offered(_) => false,
        };
        let lost: Vec<LeaseId> = p.open.iter().filter(|(_, open)| !spared(open)).map(|(id, _)| *id).collect();
        for lease in lost {
            self.end_lease(w, producer, lease, Closing::RankLost);
        }
    }

    /// The lost rank joins again: another life of the engine.
    pub(crate) fn rejoin_producer_rank(&mut self, producer: usize) {
        if let Some(p) = self.producer(producer) {
            (p.lost, p.epoch) = (None, p.epoch.after());
        }
    }

    /// `link_lost_in_leases`.
    pub(crate) fn producer_loses_link(&mut self, w: &World, producer: usize, link: LinkId) {
        if w.is(Fault::KeepAfterLink) {
            return;
        }
        let Some(p) = self.producer(producer) else { return };
        let of_link = |open: &Open| matches!(&open.state, Lease::Bound(_, of) if *of == link);
        let lost: Vec<LeaseId> = p.open.iter().filter(|(_, open)| of_link(open)).map(|(id, _)| *id).collect();
        for lease in lost {
            let taken = self.producer(producer).and_then(|p| p.open.remove(&lease));
            if let Some(Open { lease: number, state: Lease::Bound(state, _) }) = taken {
                self.closed(number, &state.close(Closing::ConsumerLost));
            }
        }
    }

    /// All of the engine dies and is started again: no lease, other bytes, another epoch.
    pub(crate) fn restart_producer(&mut self, w: &World, producer: usize) {
        let Some(p) = self.producer(producer) else { return };
        p.lives += 1;
        (p.epoch, p.lost) = (epoch(producer, p.lives), None);
        for memory in p.memory.values_mut() {
            *memory = [Content::Other; BLOCKS];
        }
        let gone: Vec<usize> = p.open.values().map(|open| open.lease).collect();
        if !w.is(Fault::ForgetEpoch) {
            p.open.clear();
        }
        for number in gone {
            if let Some(told) = self.leases.get_mut(number) {
                told.gone = true;
            }
        }
        for link in self.links.values_mut().filter(|l| l.producer == producer) {
            link.drop_end(End::Producer);
        }
    }

    /// `close_lease`: the blocks are the engine's again.
    fn closed(&mut self, number: usize, _: &Closed) {
        let Some(told) = self.leases.get_mut(number) else { return };
        told.closes += 1;
        if told.closes > 1 {
            self.broken.insert(Rule::LeaseEndsOnce);
        }
    }
}
