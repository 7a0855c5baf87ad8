//! A producer: its table of leases and the bytes of its ranks.
//!
//! Mirrors `kvferry-session/src/owner/leases.rs` line by line where a lease's state changes, without limits, versions, drafts of
//! answers to older neighbours, and the asks that gather or digest. The states and what they answer are the real ones.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_geometry::digest::Digest;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::request::{BlockTable, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::units::{BlockId, RankId, TokenRange, Tokens};
use kvferry_proto::lease::{Bound, Closed, Closing, Consumer as Reader, Offer, Offered, Term, first_attempt, stale};
use kvferry_proto::names::{Attempt, ContentKey, EngineId, Epoch, Fence, LeaseId};
use kvferry_proto::peer::{
    Bind, BindAnswer, BindRefusal, Grant, Heartbeat, HeartbeatAnswer, LeaseClosed, Left, ReadsEnd, Release,
    ReleaseAnswer, Verdict,
};
use kvferry_proto::push::PushId;

use crate::fault::Fault;
use crate::network::{End, LinkId, Message};
use crate::rules::Rule;
use crate::state::{State, Told};
use crate::world::{Lives, RANKS, World, ranks};

mod losses;
mod pushes;
mod writes;

pub(crate) use pushes::{Doubt, Push};
pub(crate) use writes::{LatePush, Stream, Write};

/// What a block of a rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Content {
    /// What this lease shows, as this run of its prefill has computed it.
    Of(usize, u8),
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
    /// The engine has died, and what its ranks were writing may go on until it is there again.
    pub(crate) down: bool,
    /// Each rank's life.
    pub(crate) ranks: Lives,
    /// The epochs that this owner has had.
    lived: BTreeSet<Epoch>,
    pub(crate) open: BTreeMap<LeaseId, Open>,
    last_push: u64,
    /// Those whose writers have not all ended.
    pub(crate) pushes: BTreeMap<PushId, LeaseId>,
    pub(crate) doubts: BTreeMap<PushId, Doubt>,
    /// What ranks write.
    pub(crate) writes: BTreeMap<(RankId, PushId), Write>,
    /// What ranks of a life that is over may still write.
    pub(crate) orphans: Vec<(RankId, Write)>,
    pub(crate) memory: BTreeMap<RankId, [Content; BLOCKS]>,
}

/// A lease in the table.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Open {
    /// Which of the world's.
    pub(crate) lease: usize,
    pub(crate) state: Lease,
    /// Of one that is computed while it is open.
    pub(crate) stream: Option<Stream>,
    /// What ranks write of it, or have written last.
    pub(crate) push: Option<Push>,
    /// The engine that had it before its prefill began anew, and over which link.
    before: Option<(EngineId, LinkId)>,
    /// The last attempt of which it was said that nobody writes: it is never bound (again), whatever still comes.
    refused: Option<Attempt>,
}

impl Open {
    fn is_written(&self) -> bool {
        self.push.as_ref().is_some_and(|push| !push.writing.is_over())
    }

    fn is_unsealed(&self) -> bool {
        self.stream.is_some_and(|stream| !stream.sealed)
    }
}

#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) enum Lease {
    Offered(Offered),
    Bound(Bound, LinkId),
    /// Its writers are being stopped, until then.
    Stopping {
        bound: Bound,
        link: LinkId,
        then: Then,
        until: Duration,
    },
}

/// What becomes of a lease when its writers have stopped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Then {
    Close(Closing),
    Reopen,
}

impl Lease {
    pub(crate) fn term(&self) -> Term {
        match self {
            Self::Offered(state) => state.term(),
            Self::Bound(state, _) => state.term(),
            Self::Stopping { .. } => Term::Open,
        }
    }

    /// When it is looked at again if nothing happens.
    pub(crate) fn due(&self) -> Option<Duration> {
        match self {
            Self::Stopping { until, .. } => Some(*until),
            other => other.term().end(),
        }
    }

    fn fence(&self) -> &Fence {
        match self {
            Self::Offered(state) => state.fence(),
            Self::Bound(bound, _) | Self::Stopping { bound, .. } => bound.fence(),
        }
    }
}

impl Producer {
    pub(crate) fn new(number: usize) -> Self {
        let memory = ranks().map(|rank| (rank, [Content::Other; BLOCKS])).collect();
        let epoch = epoch(number, 0);
        Self {
            lives: 0,
            epoch,
            lost: None,
            down: false,
            ranks: [0; RANKS as usize],
            lived: BTreeSet::from([epoch]),
            open: BTreeMap::new(),
            last_push: 0,
            pushes: BTreeMap::new(),
            doubts: BTreeMap::new(),
            writes: BTreeMap::new(),
            orphans: Vec::new(),
            memory,
        }
    }

    /// Whether all of its ranks are there.
    pub(crate) fn is_whole(&self) -> bool {
        self.lost.is_none() && !self.down
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
        let stream = plan.stream.then(Stream::default);
        p.fill(plan.block, if plan.stream { Content::Other } else { Content::Of(lease, 0) });
        let fence = first_attempt(engine, p.epoch, id);
        let state = Offered::new(fence.clone(), offer(lease, plan.block), Term::of(plan.ttl.map(at), now));
        p.open
            .insert(id, Open { lease, state: Lease::Offered(state), stream, push: None, before: None, refused: None });
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
        let unsealed = |open: &Open| open.is_unsealed();
        let admitted = self.admit(w, producer, link, bind).and_then(|admitted| {
            match self.producers.get(producer).and_then(|p| p.open.get(&bind.fence.lease)).is_some_and(unsealed) {
                true => Err(BindRefusal::NotSealed),
                false => Ok(admitted),
            }
        });
        let answer = match admitted.and_then(|(by, map)| self.bind_lease(producer, link, bind, by, map.digest())) {
            Ok(grant) => BindAnswer::Bound(grant),
            Err(reason) => BindAnswer::Refused { fence: bind.fence.clone(), reason },
        };
        self.send(w, link, End::Consumer, Message::BindAnswer(answer));
    }

    fn admit<'w>(
        &self,
        w: &'w World,
        producer: usize,
        link: LinkId,
        bind: &Bind,
    ) -> Result<(Reader, &'w PeerMap), BindRefusal> {
        let (by, now) = (self.reader(w, link).ok_or(BindRefusal::UnknownLease)?, self.now);
        let p = self.producers.get(producer).ok_or(BindRefusal::UnknownLease)?;
        if Some(&bind.fence.engine) != w.producers.get(producer) {
            return Err(BindRefusal::WrongEngine);
        }
        if bind.fence.epoch != p.epoch && !w.is(Fault::ForgetEpoch) {
            return Err(BindRefusal::StaleEpoch { current: p.epoch });
        }
        if let Some(rank) = p.lost {
            return Err(BindRefusal::RankLost { rank, reason: String::new() });
        }
        let lease = bind.fence.lease;
        let open = p.open.get(&lease).ok_or(BindRefusal::UnknownLease)?;
        if open.refused.is_some_and(|refused| bind.fence.attempt <= refused) {
            return Err(BindRefusal::UnknownLease);
        }
        match &open.state {
            Lease::Bound(state, of) if *of == link && !open.is_written() => state.admits(bind, &by, now)?,
            Lease::Stopping { .. } => return Err(BindRefusal::UnknownLease),
            Lease::Bound(..) => return Err(BindRefusal::AlreadyBound),
            Lease::Offered(state) => state.admits(bind, now)?,
        }
        let (salt, map) = w.map(&by.engine, lease, bind.fence.attempt);
        let map = map.ok_or(BindRefusal::UnknownLease)?;
        if bind.salt != salt {
            return Err(BindRefusal::PeerMapDiffers { ours: map.digest() });
        }
        Ok((by, map))
    }

    fn bind_lease(
        &mut self,
        producer: usize,
        link: LinkId,
        bind: &Bind,
        by: Reader,
        map: Digest,
    ) -> Result<Grant, BindRefusal> {
        let now = self.now;
        let open = self.producer(producer).and_then(|p| p.open.get_mut(&bind.fence.lease));
        let Some(open) = open else { return Err(BindRefusal::UnknownLease) };
        let (state, result) = match open.state.clone() {
            Lease::Offered(state) => match state.bind(bind, by, map, now) {
                Ok((bound, grant)) => (Lease::Bound(bound, link), Ok(grant)),
                Err((same, refusal)) => (Lease::Offered(same), Err(refusal)),
            },
            Lease::Bound(state, of) => match state.rebind(bind, &by, map, now) {
                Ok((bound, grant)) => (Lease::Bound(bound, of), Ok(grant)),
                Err((same, refusal)) => (Lease::Bound(same, of), Err(refusal)),
            },
            same @ Lease::Stopping { .. } => (same, Err(BindRefusal::UnknownLease)),
        };
        open.state = state;
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
        let Some(open) = p.open.get(&lease) else {
            if w.is(Fault::HeldIfUnknown) && release.reads == ReadsEnd::Complete {
                return ReleaseAnswer { fence: release.fence.clone(), verdict: Verdict::Held };
            }
            return stale(release);
        };
        let (number, written) = (open.lease, open.is_written() && !w.is(Fault::ReleaseEndsAll));
        match open.state.clone() {
            // Whatever it says of its reads: nobody has told it that all is written.
            Lease::Bound(state, of) if of == link && written => {
                if state.is_of(&release.fence, by) {
                    self.end_bound(w, producer, lease, Then::Close(Closing::Abandoned));
                }
                stale(release)
            }
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
                        self.close(producer, number, &closed);
                        ReleaseAnswer { fence: release.fence.clone(), ..answer }
                    }
                    Err((_, answer)) => answer,
                }
            }
            Lease::Offered(state) if release.reads == ReadsEnd::Declined && *state.fence() == release.fence => {
                self.close(producer, number, &state.close(Closing::Declined));
                stale(release)
            }
            _ => stale(release),
        }
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
            let run = self.leases.get(number).map_or(0, |told| told.run);
            sources.all(|rank| p.content(rank, plan.block) == Content::Of(number, run))
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
            left.push(match p.open.get_mut(&lease).map(|open| &mut open.state) {
                Some(Lease::Bound(state, of)) if *of == link => {
                    let (extended, left) = state.clone().beat(attempt, &by, extension, now);
                    *state = extended;
                    left
                }
                // It is waited for: its prefill begins anew, and the next attempt will be offered.
                Some(Lease::Stopping { then: Then::Reopen, .. }) if !w.is(Fault::BeatsEndWhileDraining) => {
                    Left::For(extension)
                }
                _ => Left::Closed,
            });
        }
        let answer = HeartbeatAnswer { beat: heartbeat.beat, left };
        self.send(w, link, End::Consumer, Message::HeartbeatAnswer(answer));
    }

    /// `expire_leases`.
    pub(crate) fn step_producer(&mut self, w: &World, producer: usize) {
        for lease in self.overdue(producer) {
            let open = self.producers.get(producer).and_then(|p| p.open.get(&lease));
            match open.map(|open| &open.state) {
                Some(Lease::Stopping { .. }) => self.writers_are_late(w, producer, lease),
                _ => self.end_lease(w, producer, lease, Closing::Expired),
            }
        }
    }

    pub(crate) fn overdue(&self, producer: usize) -> Vec<LeaseId> {
        let open = self.producers.get(producer).into_iter().flat_map(|p| &p.open);
        let told = |number: usize| self.leases.get(number).is_some_and(|t| t.closes > 0);
        let due = |o: &Open| o.state.due().is_some_and(|due| due <= self.now) && !told(o.lease);
        open.filter(|(_, o)| due(o)).map(|(id, _)| *id).collect()
    }

    /// Ends a lease otherwise than by a release, and tells its consumer so.
    pub(crate) fn end_lease(&mut self, w: &World, producer: usize, lease: LeaseId, how: Closing) {
        let open = self.producers.get(producer).and_then(|p| p.open.get(&lease));
        let Some((number, state)) = open.map(|open| (open.lease, open.state.clone())) else { return };
        let late = (w.is(Fault::CloseLater) && how == Closing::Withdrawn)
            || (w.is(Fault::LateClock) && how == Closing::Expired);
        match state {
            Lease::Offered(state) => self.close(producer, number, &state.close(how)),
            Lease::Bound(state, link) => {
                let notice = LeaseClosed { fence: state.fence().clone(), how };
                self.send(w, link, End::Consumer, Message::Closed(notice));
                if late {
                    return self.closed(number);
                }
                self.end_bound(w, producer, lease, Then::Close(how));
            }
            Lease::Stopping { .. } => self.end_bound(w, producer, lease, Then::Close(how)),
        }
    }

    /// Ends what a consumer has bound: at once if no rank writes it, else when all have stopped.
    fn end_bound(&mut self, w: &World, producer: usize, lease: LeaseId, then: Then) {
        let until = self.now + w.grace();
        let Some(open) = self.producer(producer).and_then(|p| p.open.get_mut(&lease)) else { return };
        let written = open.is_written() && !(w.is(Fault::SkipDrain) && then == Then::Reopen);
        match open.state.clone() {
            Lease::Bound(bound, link) => open.state = Lease::Stopping { bound, link, then, until },
            Lease::Stopping { bound, link, then: Then::Reopen, until } if !w.is(Fault::ReopenForNobody) => {
                open.state = Lease::Stopping { bound, link, then, until };
                return;
            }
            _ => return,
        }
        if written { self.stop_writers(producer, lease) } else { self.has_stopped(w, producer, lease) }
    }

    /// Nothing of a lease is written any more, as far as anybody will hear.
    fn has_stopped(&mut self, w: &World, producer: usize, lease: LeaseId) {
        let (extension, now) = (at(w.terms.extension), self.now);
        let open = self.producers.get(producer).and_then(|p| p.open.get(&lease));
        let Some(Open { lease: number, state: Lease::Stopping { bound, link, then, .. }, .. }) = open.cloned() else {
            return;
        };
        let doubted = self.writers_have_stopped(producer, lease);
        let epoch = self.producers.get(producer).map(|p| p.epoch);
        let reopened = match then {
            // One of a former life of the engine can't be bound anew.
            Then::Reopen if epoch != Some(bound.fence().epoch) => None,
            Then::Reopen if doubted.as_ref().is_none_or(BTreeSet::is_empty) => match w.is(Fault::AttemptAgain) {
                true => Some(Offered::new(bound.fence().clone(), bound.offer().clone(), bound.term())),
                false => bound.clone().reopen(extension, now),
            },
            _ => None,
        };
        if let Some(offered) = reopened {
            let notice = LeaseClosed { fence: bound.fence().clone(), how: Closing::Restarted };
            self.send(w, link, End::Consumer, Message::Closed(notice));
            if let Some(open) = self.producer(producer).and_then(|p| p.open.get_mut(&lease)) {
                (open.state, open.before) = (Lease::Offered(offered), Some((bound.consumer().engine.clone(), link)));
            }
            return;
        }
        if let Some(doubted) = doubted {
            self.tell_stopped(w, producer, (&bound.consumer().engine, link), bound.fence(), &doubted);
        }
        let how = if let Then::Close(how) = then { how } else { Closing::Withdrawn };
        self.close(producer, number, &bound.close(how));
    }

    /// `close_lease`: the blocks are the engine's again.
    fn close(&mut self, producer: usize, number: usize, closed: &Closed) {
        let Some(p) = self.producer(producer) else { return };
        let open = p.open.remove(&closed.fence().lease);
        if open.is_some_and(|open| open.stream.is_some()) {
            p.cancel_writes_of(number);
        }
        self.closed(number);
    }

    fn closed(&mut self, number: usize) {
        let Some(told) = self.leases.get_mut(number) else { return };
        told.closes += 1;
        if told.closes > 1 {
            self.broken.insert(Rule::LeaseEndsOnce);
        }
    }
}
