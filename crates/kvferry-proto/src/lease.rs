//! A lease at the producer's owner: the one place where it is decided whether blocks are still the lease's.
//!
//! ```text
//!   Offered --bind ok--> Bound --release--> Closed (answer Held, when the reads were complete)
//!      |                 |  ^ |
//!      |                 \--/ | bind of the next attempt; beat
//!      |                      |
//!      \--declined, withdrawn, expired, a rank lost--\--withdrawn, expired, a rank or the consumer lost--> Closed
//! ```
//!
//! A lease whose prefill begins anew goes back from Bound to Offered, with the next attempt, once nothing of it is written any more
//! ([`push`](crate::push)).
//!
//! The blocks go back to the engine with [`Closed`] and with nothing else. A closed lease is not kept: lease ids are
//! random and never re-used, so a table that doesn't list one answers *Stale*, and never *Held*, for ever. Refusals leave
//! the lease as it was.
//!
//! A lease has an end in the time of this owner, which beats of its consumer move further away and never nearer. What
//! crosses the wire is the time that is left, and the consumer counts it from when it *asked*: so it is never later at the
//! consumer than here, whatever the delay, and no clock reading of another host is ever compared.

use std::time::Duration;

use kvferry_geometry::digest::Digest;
use kvferry_geometry::request::SrcGroup;

use crate::names::{Attempt, ContentKey, EngineId, Epoch, Fence};
use crate::peer::{Bind, BindRefusal, Grant, Left, ReadsEnd, Release, ReleaseAnswer, Verdict};

/// What a producer offers.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Offer {
    /// Blocks and held tokens, one entry for each group of the engine, in its order.
    pub groups: Vec<SrcGroup>,
    /// What the cache was computed from.
    pub content_key: ContentKey,
}

/// When a lease ends, in the time of its owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Term {
    /// When it is closed by a message or its engine; never by the time alone.
    Open,
    /// At this time, unless it is extended.
    Until(Duration),
}

impl Term {
    /// From now on for so long; `None`: without end.
    #[must_use]
    pub fn of(ttl: Option<Duration>, now: Duration) -> Self {
        ttl.map_or(Self::Open, |ttl| Self::Until(now.saturating_add(ttl)))
    }

    /// At least so long from now on; never shorter than it was.
    #[must_use]
    pub fn extended(self, by: Duration, now: Duration) -> Self {
        match self {
            Self::Open => Self::Open,
            Self::Until(end) => Self::Until(end.max(now.saturating_add(by))),
        }
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_over(self, now: Duration) -> bool {
        matches!(self, Self::Until(end) if end <= now)
    }

    /// When it ends.
    #[must_use]
    pub fn end(self) -> Option<Duration> {
        match self {
            Self::Open => None,
            Self::Until(end) => Some(end),
        }
    }

    /// What a consumer is told.
    #[must_use]
    pub fn left(self, now: Duration) -> Left {
        match self {
            Self::Open => Left::Always,
            Self::Until(end) => Left::For(end.saturating_sub(now)),
        }
    }
}

/// One life of another engine.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Consumer {
    /// The engine.
    pub engine: EngineId,
    /// Which life of it.
    pub epoch: Epoch,
}

/// Nobody has bound it yet.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Offered {
    fence: Fence,
    offer: Offer,
    term: Term,
}

/// One request reads it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Bound {
    fence: Fence,
    offer: Offer,
    term: Term,
    consumer: Consumer,
    salt: u64,
    peer_map: Digest,
}

/// How a lease ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Closing {
    /// The consumer read all of it and was told *Held*.
    Read,
    /// The consumer gave up.
    Abandoned,
    /// A consumer said, without binding it, that nobody will read it.
    Declined,
    /// The consumer's owner went away.
    ConsumerLost,
    /// The producer's engine took it back.
    Withdrawn,
    /// Its time was up, and no beat of a consumer had extended it.
    Expired,
    /// A rank of the producer is gone, and with it the bytes that were offered.
    RankLost,
    /// The prefill begins anew, with a higher attempt; of a pushed lease, whose writers have all stopped.
    Restarted,
}

impl Closing {
    /// A word for it, for logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Abandoned => "abandoned",
            Self::Declined => "declined",
            Self::ConsumerLost => "consumer lost",
            Self::Withdrawn => "withdrawn",
            Self::Expired => "expired",
            Self::RankLost => "rank lost",
            Self::Restarted => "restarted",
        }
    }
}

/// It is over; its blocks are the engine's again.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Closed {
    fence: Fence,
    how: Closing,
    offer: Offer,
}

impl Closed {
    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// What was offered.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// How it ended.
    #[must_use]
    pub fn how(&self) -> Closing {
        self.how
    }
}

impl Offered {
    /// Opens a lease.
    #[must_use]
    pub fn new(fence: Fence, offer: Offer, term: Term) -> Self {
        Self { fence, offer, term }
    }

    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// When it ends.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// What is offered.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Other blocks are offered: more of them are known, or the prefill has begun anew.
    #[must_use]
    pub fn regroup(mut self, groups: Vec<SrcGroup>) -> Self {
        self.offer.groups = groups;
        self
    }

    /// Whether a bind would be granted, but for the map of peers: checked first, since that map costs more.
    ///
    /// # Errors
    /// Why not.
    pub fn admits(&self, bind: &Bind, now: Duration) -> Result<(), BindRefusal> {
        admits(&self.fence, self.fence.attempt, &self.offer, self.term, bind, now)
    }

    /// Lends it to a consumer. `peer_map` is the digest as this side computes it, for the salt of the bind.
    ///
    /// # Errors
    /// The lease as it was, and why it is not lent.
    #[allow(clippy::result_large_err, reason = "the state comes back so that the caller loses nothing")]
    pub fn bind(
        self,
        bind: &Bind,
        consumer: Consumer,
        peer_map: Digest,
        now: Duration,
    ) -> Result<(Bound, Grant), (Self, BindRefusal)> {
        if let Err(refusal) = self.admits(bind, now) {
            return Err((self, refusal));
        }
        if bind.peer_map != peer_map {
            return Err((self, BindRefusal::PeerMapDiffers { ours: peer_map }));
        }
        let Self { fence, offer, term } = self;
        let bound = Bound { fence, offer, term, consumer, salt: bind.salt, peer_map };
        let grant = bound.grant(now);
        Ok((bound, grant))
    }

    /// It is over.
    #[must_use]
    pub fn close(self, how: Closing) -> Closed {
        Closed { fence: self.fence, how, offer: self.offer }
    }
}

impl Bound {
    /// The lease, with the attempt that reads it.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// When it ends.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// Who reads it.
    #[must_use]
    pub fn consumer(&self) -> &Consumer {
        &self.consumer
    }

    /// What is read.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// The salt of the map of peers.
    #[must_use]
    pub fn salt(&self) -> u64 {
        self.salt
    }

    /// The digest of that map.
    #[must_use]
    pub fn peer_map(&self) -> Digest {
        self.peer_map
    }

    /// Whether a message about this lease comes from the one who bound it, about the attempt that was bound.
    #[must_use]
    pub fn is_of(&self, fence: &Fence, consumer: &Consumer) -> bool {
        self.fence == *fence && self.consumer == *consumer
    }

    /// Whether the one who bound it may go over to the next attempt.
    ///
    /// # Errors
    /// Why not.
    pub fn admits(&self, bind: &Bind, consumer: &Consumer, now: Duration) -> Result<(), BindRefusal> {
        let next = self.fence.attempt.next().filter(|_| self.consumer == *consumer);
        // The present attempt, once more, and anybody else's.
        if self.fence.lease == bind.fence.lease && Some(bind.fence.attempt) != next {
            return Err(BindRefusal::AlreadyBound);
        }
        let Some(next) = next else { return Err(BindRefusal::AlreadyBound) };
        admits(&self.fence, next, &self.offer, self.term, bind, now)
    }

    /// Goes over to the consumer's next attempt, by another map of peers, in one step: nothing that names the attempt before
    /// counts any more. The consumer says by asking that its ranks have stopped reading for that one.
    ///
    /// # Errors
    /// The lease as it was, and why it is not lent anew.
    #[allow(clippy::result_large_err, reason = "the state comes back so that the caller loses nothing")]
    pub fn rebind(
        mut self,
        bind: &Bind,
        consumer: &Consumer,
        peer_map: Digest,
        now: Duration,
    ) -> Result<(Self, Grant), (Self, BindRefusal)> {
        if let Err(refusal) = self.admits(bind, consumer, now) {
            return Err((self, refusal));
        }
        if bind.peer_map != peer_map {
            return Err((self, BindRefusal::PeerMapDiffers { ours: peer_map }));
        }
        (self.fence.attempt, self.salt, self.peer_map) = (bind.fence.attempt, bind.salt, peer_map);
        let grant = self.grant(now);
        Ok((self, grant))
    }

    /// More of the blocks are known.
    #[must_use]
    pub fn regroup(mut self, groups: Vec<SrcGroup>) -> Self {
        self.offer.groups = groups;
        self
    }

    /// Nobody has it any more, and the next attempt may be bound; `None` after the last that there can be. Only when everything of
    /// this attempt has stopped.
    #[must_use]
    pub fn reopen(self, least: Duration, now: Duration) -> Option<Offered> {
        let attempt = self.fence.attempt.next()?;
        let fence = Fence { attempt, ..self.fence };
        Some(Offered { fence, offer: self.offer, term: self.term.extended(least, now) })
    }

    /// It ends by a message only, or by its engine: for a consumer that knows no ends.
    #[must_use]
    pub fn without_end(mut self) -> Self {
        self.term = Term::Open;
        self
    }

    /// Its consumer still wants it: its end moves away, if the beat is of the one who bound it and the lease isn't over. Gives
    /// what is left.
    #[must_use]
    pub fn beat(mut self, attempt: Attempt, consumer: &Consumer, by: Duration, now: Duration) -> (Self, Left) {
        if attempt != self.fence.attempt || *consumer != self.consumer || self.term.is_over(now) {
            return (self, Left::Closed);
        }
        self.term = self.term.extended(by, now);
        let left = self.term.left(now);
        (self, left)
    }

    /// Its consumer's reads have ended.
    ///
    /// # Errors
    /// The lease as it was and the answer *Stale*, if the release is not of the one who bound it, or its time is up.
    #[allow(clippy::result_large_err, reason = "the state comes back so that the caller loses nothing")]
    pub fn release(
        self,
        release: &Release,
        consumer: &Consumer,
        now: Duration,
    ) -> Result<(Closed, ReleaseAnswer), (Self, ReleaseAnswer)> {
        if !self.is_of(&release.fence, consumer) || self.term.is_over(now) {
            let answer = stale(release);
            return Err((self, answer));
        }
        let (how, verdict) = match release.reads {
            ReadsEnd::Complete => (Closing::Read, Verdict::Held),
            ReadsEnd::Abandoned | ReadsEnd::Declined => (Closing::Abandoned, Verdict::Stale),
        };
        Ok((self.close(how), ReleaseAnswer { fence: release.fence.clone(), verdict }))
    }

    /// It is over; a read of its consumer that comes late can no longer be told *Held*.
    #[must_use]
    pub fn close(self, how: Closing) -> Closed {
        Closed { fence: self.fence, how, offer: self.offer }
    }

    fn grant(&self, now: Duration) -> Grant {
        let time_left = self.term.end().map(|end| end.saturating_sub(now));
        Grant { fence: self.fence.clone(), groups: self.offer.groups.clone(), time_left }
    }
}

fn admits(
    fence: &Fence,
    due: Attempt,
    offer: &Offer,
    term: Term,
    bind: &Bind,
    now: Duration,
) -> Result<(), BindRefusal> {
    if bind.fence.engine != fence.engine {
        return Err(BindRefusal::WrongEngine);
    }
    if bind.fence.epoch != fence.epoch {
        return Err(BindRefusal::StaleEpoch { current: fence.epoch });
    }
    if bind.fence.lease != fence.lease || term.is_over(now) {
        return Err(BindRefusal::UnknownLease);
    }
    if bind.fence.attempt != due {
        let (expected, got) = (due.get(), bind.fence.attempt.get());
        return Err(BindRefusal::WrongAttempt { expected, got });
    }
    if bind.content_key != offer.content_key {
        return Err(BindRefusal::WrongContent);
    }
    Ok(())
}

/// The answer to a release of a lease that is not open.
#[must_use]
pub fn stale(release: &Release) -> ReleaseAnswer {
    ReleaseAnswer { fence: release.fence.clone(), verdict: Verdict::Stale }
}

/// The fence of a fresh lease.
#[must_use]
pub fn first_attempt(engine: EngineId, epoch: Epoch, lease: crate::names::LeaseId) -> Fence {
    Fence { engine, epoch, lease, attempt: Attempt::FIRST }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::LeaseId;

    fn map(n: u8) -> Digest {
        Digest::from_bytes([n; 32])
    }

    fn key(n: u8) -> ContentKey {
        ContentKey::from_bytes([n; 32])
    }

    fn engine(name: &str) -> EngineId {
        EngineId::new(name).unwrap()
    }

    fn consumer(name: &str, epoch: u128) -> Consumer {
        Consumer { engine: engine(name), epoch: Epoch::new(epoch) }
    }

    fn fence() -> Fence {
        first_attempt(engine("p"), Epoch::new(7), LeaseId::new(1))
    }

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Ends at 30.
    fn offered() -> Offered {
        let offer = Offer { groups: Vec::new(), content_key: key(1) };
        Offered::new(fence(), offer, Term::of(Some(at(30)), at(0)))
    }

    fn bind() -> Bind {
        Bind { fence: fence(), content_key: key(1), salt: 3, peer_map: map(9) }
    }

    fn second() -> Bind {
        Bind { fence: Fence { attempt: Attempt::new(1), ..fence() }, salt: 4, peer_map: map(8), ..bind() }
    }

    fn bound() -> Bound {
        offered().bind(&bind(), consumer("d", 1), map(9), at(10)).unwrap().0
    }

    fn fences() -> [(Fence, BindRefusal); 4] {
        let f = fence();
        [
            (Fence { engine: engine("q"), ..f.clone() }, BindRefusal::WrongEngine),
            (Fence { epoch: Epoch::new(8), ..f.clone() }, BindRefusal::StaleEpoch { current: Epoch::new(7) }),
            (Fence { lease: LeaseId::new(4097), ..f.clone() }, BindRefusal::UnknownLease),
            (Fence { attempt: Attempt::new(1), ..f }, BindRefusal::WrongAttempt { expected: 0, got: 1 }),
        ]
    }

    /// State `Offered` with every event.
    #[test]
    fn offered_by_event() {
        let mut refusals: Vec<(Bind, Digest, u64, BindRefusal)> =
            fences().into_iter().map(|(fence, r)| (Bind { fence, ..bind() }, map(9), 10, r)).collect();
        refusals.push((Bind { content_key: key(2), ..bind() }, map(9), 10, BindRefusal::WrongContent));
        refusals.push((bind(), map(8), 10, BindRefusal::PeerMapDiffers { ours: map(8) }));
        refusals.push((bind(), map(9), 30, BindRefusal::UnknownLease));
        for (bind, ours, now, expected) in refusals {
            let (state, refusal) = offered().bind(&bind, consumer("d", 1), ours, at(now)).unwrap_err();
            assert_eq!(refusal, expected);
            assert_eq!(state, offered(), "a refusal leaves the lease as it was");
        }
        let (state, grant) = offered().bind(&bind(), consumer("d", 1), map(9), at(10)).unwrap();
        assert_eq!((state.salt(), state.peer_map(), grant.fence), (3, map(9), fence()));
        assert_eq!((grant.time_left, state.term()), (Some(at(20)), Term::Until(at(30))), "a bind extends nothing");
        for how in [Closing::Withdrawn, Closing::Declined, Closing::Expired, Closing::RankLost] {
            assert_eq!(offered().close(how).how(), how);
        }
    }

    /// State `Bound` with every event.
    #[test]
    fn bound_by_event() {
        let release = |reads| Release { fence: fence(), reads };
        for (reads, how, verdict) in [
            (ReadsEnd::Complete, Closing::Read, Verdict::Held),
            (ReadsEnd::Abandoned, Closing::Abandoned, Verdict::Stale),
        ] {
            let (closed, answer) = bound().release(&release(reads), &consumer("d", 1), at(29)).unwrap();
            assert_eq!((closed.how(), answer.verdict, closed.fence()), (how, verdict, &fence()));
        }
        for (fence, _) in fences() {
            let release = Release { fence: fence.clone(), reads: ReadsEnd::Complete };
            let (state, answer) = bound().release(&release, &consumer("d", 1), at(29)).unwrap_err();
            assert_eq!((state, answer), (bound(), ReleaseAnswer { fence, verdict: Verdict::Stale }));
        }
        for (other, now) in [(consumer("e", 1), 29), (consumer("d", 2), 29), (consumer("d", 1), 30)] {
            let (state, answer) = bound().release(&release(ReadsEnd::Complete), &other, at(now)).unwrap_err();
            assert_eq!((state, answer.verdict), (bound(), Verdict::Stale));
        }
        for how in [Closing::ConsumerLost, Closing::Withdrawn, Closing::Expired, Closing::RankLost] {
            assert_eq!(bound().close(how).how(), how);
        }
    }

    /// The next attempt of the one who bound it replaces the one before in one step; nothing else does.
    #[test]
    fn bound_by_bind() {
        let d = consumer("d", 1);
        let skipped = Bind { fence: Fence { attempt: Attempt::new(2), ..fence() }, ..second() };
        for (bind, by, ours, now, expected) in [
            (bind(), d.clone(), map(9), 10, BindRefusal::AlreadyBound),
            (skipped, d.clone(), map(8), 10, BindRefusal::AlreadyBound),
            (second(), consumer("e", 1), map(8), 10, BindRefusal::AlreadyBound),
            (second(), consumer("d", 2), map(8), 10, BindRefusal::AlreadyBound),
            (second(), d.clone(), map(7), 10, BindRefusal::PeerMapDiffers { ours: map(7) }),
            (Bind { content_key: key(2), ..second() }, d.clone(), map(8), 10, BindRefusal::WrongContent),
            (second(), d.clone(), map(8), 30, BindRefusal::UnknownLease),
        ] {
            let (state, refusal) = bound().rebind(&bind, &by, ours, at(now)).unwrap_err();
            assert_eq!((state, refusal), (bound(), expected));
        }
        let (state, grant) = bound().rebind(&second(), &d, map(8), at(20)).unwrap();
        assert_eq!((state.fence(), &grant.fence, grant.time_left), (&second().fence, &second().fence, Some(at(10))));
        assert_eq!((state.salt(), state.peer_map()), (4, map(8)));
        // What names the attempt before is stale now, and changes nothing.
        let old = Release { fence: fence(), reads: ReadsEnd::Complete };
        let (state, answer) = state.release(&old, &d, at(21)).unwrap_err();
        assert_eq!(answer.verdict, Verdict::Stale);
        assert_eq!(state.clone().beat(Attempt::FIRST, &d, at(20), at(21)), (state.clone(), Left::Closed));
        let new = Release { fence: second().fence, reads: ReadsEnd::Complete };
        assert_eq!(state.release(&new, &d, at(21)).unwrap().1.verdict, Verdict::Held);
    }

    /// A lease of 30 s, beats at 5, 10, 15 and 20 by 20 s each: it ends at 30, 30, 35, 40.
    #[test]
    fn ls_04_beats_move_the_end_and_never_nearer() {
        let (mut state, d) = (bound(), consumer("d", 1));
        for (now, end) in [(5, 30), (10, 30), (15, 35), (20, 40)] {
            let left;
            (state, left) = state.beat(Attempt::FIRST, &d, at(20), at(now));
            assert_eq!((state.term(), left), (Term::Until(at(end)), Left::For(at(end - now))));
        }
        for (attempt, by, now) in
            [(Attempt::new(1), &d, 21), (Attempt::FIRST, &consumer("e", 1), 21), (Attempt::FIRST, &d, 40)]
        {
            let (same, left) = state.clone().beat(attempt, by, at(20), at(now));
            assert_eq!((same, left), (state.clone(), Left::Closed));
        }
        assert!(!state.term().is_over(at(39)) && state.term().is_over(at(40)));
        let (open, left) = state.without_end().beat(Attempt::FIRST, &d, at(20), at(99));
        assert_eq!((open.term(), left), (Term::Open, Left::Always));
        assert_eq!(Term::of(None, at(5)).extended(at(1), at(6)).left(at(7)), Left::Always);
    }
}
