//! A lease at the producer's owner: the one place where it is decided whether blocks are still the lease's.
//!
//! ```text
//!   Offered --bind ok--> Bound --release--> Closed (answer Held, when the reads were complete)
//!      |                   |---consumer lost--> Closed
//!      \---withdraw--------\---withdraw-------> Closed
//! ```
//!
//! The blocks go back to the engine with [`Closed`] and with nothing else. A closed lease is not kept: lease ids are
//! random and never re-used, so a table that doesn't list one answers *Stale*, and never *Held*, for ever. Refusals leave
//! the lease as it was. Expiry and further attempts are not part of this machine yet; the fence has room for them.

use kvferry_geometry::digest::Digest;
use kvferry_geometry::request::SrcGroup;

use crate::names::{Attempt, ContentKey, EngineId, Epoch, Fence};
use crate::peer::{Bind, BindRefusal, Grant, ReadsEnd, Release, ReleaseAnswer, Verdict};

/// What a producer offers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Blocks and held tokens, one entry for each group of the engine, in its order.
    pub groups: Vec<SrcGroup>,
    /// What the cache was computed from.
    pub content_key: ContentKey,
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
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offered {
    fence: Fence,
    offer: Offer,
}

/// One request reads it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    fence: Fence,
    offer: Offer,
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
    /// The consumer's owner went away.
    ConsumerLost,
    /// The producer's engine took it back.
    Withdrawn,
}

/// It is over; its blocks are the engine's again.
#[derive(Clone, PartialEq, Eq, Debug)]
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
    pub fn new(fence: Fence, offer: Offer) -> Self {
        Self { fence, offer }
    }

    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Whether a bind would be granted, but for the map of peers: checked first, since that map costs more.
    ///
    /// # Errors
    /// Why not.
    pub fn admits(&self, bind: &Bind) -> Result<(), BindRefusal> {
        if bind.fence.engine != self.fence.engine {
            return Err(BindRefusal::WrongEngine);
        }
        if bind.fence.epoch != self.fence.epoch {
            return Err(BindRefusal::StaleEpoch { current: self.fence.epoch });
        }
        if bind.fence.lease != self.fence.lease {
            return Err(BindRefusal::UnknownLease);
        }
        if bind.fence.attempt != self.fence.attempt {
            let (expected, got) = (self.fence.attempt.get(), bind.fence.attempt.get());
            return Err(BindRefusal::WrongAttempt { expected, got });
        }
        if bind.content_key != self.offer.content_key {
            return Err(BindRefusal::WrongContent);
        }
        Ok(())
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
    ) -> Result<(Bound, Grant), (Self, BindRefusal)> {
        if let Err(refusal) = self.admits(bind) {
            return Err((self, refusal));
        }
        if bind.peer_map != peer_map {
            return Err((self, BindRefusal::PeerMapDiffers { ours: peer_map }));
        }
        let grant = Grant { fence: self.fence.clone(), groups: self.offer.groups.clone(), time_left: None };
        let Self { fence, offer } = self;
        Ok((Bound { fence, offer, consumer, salt: bind.salt, peer_map }, grant))
    }

    /// Takes it back.
    #[must_use]
    pub fn withdraw(self) -> Closed {
        Closed { fence: self.fence, how: Closing::Withdrawn, offer: self.offer }
    }
}

impl Bound {
    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
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

    /// Its consumer's reads have ended.
    ///
    /// # Errors
    /// The lease as it was and the answer *Stale*, if the release is not of the one who bound it.
    #[allow(clippy::result_large_err, reason = "the state comes back so that the caller loses nothing")]
    pub fn release(
        self,
        release: &Release,
        consumer: &Consumer,
    ) -> Result<(Closed, ReleaseAnswer), (Self, ReleaseAnswer)> {
        if !self.is_of(&release.fence, consumer) {
            let answer = stale(release);
            return Err((self, answer));
        }
        let (how, verdict) = match release.reads {
            ReadsEnd::Complete => (Closing::Read, Verdict::Held),
            ReadsEnd::Abandoned => (Closing::Abandoned, Verdict::Stale),
        };
        let closed = Closed { fence: self.fence, how, offer: self.offer };
        Ok((closed, ReleaseAnswer { fence: release.fence.clone(), verdict }))
    }

    /// The consumer's owner is gone; a read of its ranks that comes late can no longer be told *Held*.
    #[must_use]
    pub fn consumer_lost(self) -> Closed {
        Closed { fence: self.fence, how: Closing::ConsumerLost, offer: self.offer }
    }

    /// Takes it back; the consumer will be told *Stale*.
    #[must_use]
    pub fn withdraw(self) -> Closed {
        Closed { fence: self.fence, how: Closing::Withdrawn, offer: self.offer }
    }
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

    fn offered() -> Offered {
        Offered::new(fence(), Offer { groups: Vec::new(), content_key: key(1) })
    }

    fn bind() -> Bind {
        Bind { fence: fence(), content_key: key(1), salt: 3, peer_map: map(9) }
    }

    fn bound() -> Bound {
        offered().bind(&bind(), consumer("d", 1), map(9)).unwrap().0
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
        let mut refusals: Vec<(Bind, Digest, BindRefusal)> =
            fences().into_iter().map(|(fence, r)| (Bind { fence, ..bind() }, map(9), r)).collect();
        refusals.push((Bind { content_key: key(2), ..bind() }, map(9), BindRefusal::WrongContent));
        refusals.push((bind(), map(8), BindRefusal::PeerMapDiffers { ours: map(8) }));
        for (bind, ours, expected) in refusals {
            let (state, refusal) = offered().bind(&bind, consumer("d", 1), ours).unwrap_err();
            assert_eq!(refusal, expected);
            assert_eq!(state, offered(), "a refusal leaves the lease as it was");
        }
        let (state, grant) = offered().bind(&bind(), consumer("d", 1), map(9)).unwrap();
        assert_eq!((state.salt(), state.peer_map(), grant.fence), (3, map(9), fence()));
        assert_eq!(offered().withdraw().how(), Closing::Withdrawn);
    }

    /// State `Bound` with every event.
    #[test]
    fn bound_by_event() {
        let release = |reads| Release { fence: fence(), reads };
        for (reads, how, verdict) in [
            (ReadsEnd::Complete, Closing::Read, Verdict::Held),
            (ReadsEnd::Abandoned, Closing::Abandoned, Verdict::Stale),
        ] {
            let (closed, answer) = bound().release(&release(reads), &consumer("d", 1)).unwrap();
            assert_eq!((closed.how(), answer.verdict, closed.fence()), (how, verdict, &fence()));
        }
        for (fence, _) in fences() {
            let release = Release { fence: fence.clone(), reads: ReadsEnd::Complete };
            let (state, answer) = bound().release(&release, &consumer("d", 1)).unwrap_err();
            assert_eq!((state, answer), (bound(), ReleaseAnswer { fence, verdict: Verdict::Stale }));
        }
        for other in [consumer("e", 1), consumer("d", 2)] {
            let (state, answer) = bound().release(&release(ReadsEnd::Complete), &other).unwrap_err();
            assert_eq!((state, answer.verdict), (bound(), Verdict::Stale));
        }
        assert_eq!(bound().consumer_lost().how(), Closing::ConsumerLost);
        assert_eq!(bound().withdraw().how(), Closing::Withdrawn);
    }
}
