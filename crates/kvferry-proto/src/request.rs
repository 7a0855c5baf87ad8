//! A request at the consumer's owner, from the wish to read a lease to the producer's verdict.
//!
//! ```text
//!   Wanted --ask--> Asking --Bound--> Granted --read--> Reading --last rank--> Ended --release--> Releasing --Held--> Held
//!                     \--Refused--> (over)                          |                                \---Stale--> (over)
//!      Wanted, of the next attempt <------------another replica-------/
//! ```
//!
//! Each state is a struct that its transition consumes. Whose ranks read, and from whom, is a *named set* taken from the
//! map of peers: [`Ended`] knows whether exactly these sources were read. [`Held`] exists only after the producer said so
//! for complete reads; the delivery of a request is made from it and from nothing else. Deadlines and cancellation act
//! on the ranks: a request leaves `Reading` when the last of them has stopped.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_geometry::digest::Digest;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::request::SrcGroup;
use kvferry_geometry::units::RankId;

use crate::names::{ContentKey, Fence};
use crate::peer::{Bind, BindAnswer, BindRefusal, ReadsEnd, Release, ReleaseAnswer, Verdict};
use crate::rank::{RankFault, RankReport};

/// How one rank's share ended.
pub type RankResult = Result<RankReport, RankFault>;

/// A lease is to be read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Wanted {
    fence: Fence,
    content_key: ContentKey,
}

/// The producer was asked.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Asking {
    fence: Fence,
}

/// The producer's blocks may be read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Granted {
    fence: Fence,
    groups: Vec<SrcGroup>,
}

/// Ranks read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Reading {
    fence: Fence,
    named: BTreeMap<RankId, BTreeSet<RankId>>,
    results: BTreeMap<RankId, RankResult>,
}

/// No rank reads any more.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Ended {
    fence: Fence,
    named: BTreeMap<RankId, BTreeSet<RankId>>,
    results: BTreeMap<RankId, RankResult>,
}

/// The producer was told that all reads are complete.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Releasing {
    ended: Ended,
}

/// The producer held the blocks while they were read, and every named source was read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Held {
    ended: Ended,
}

/// What a message led to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step<Same, Next> {
    /// The message was not for this state (another fence, an unknown or repeated rank): nothing has changed.
    Ignored(Same),
    /// More of the kind must come.
    Waiting(Same),
    /// On.
    Next(Next),
}

impl Wanted {
    /// Begins.
    #[must_use]
    pub fn new(fence: Fence, content_key: ContentKey) -> Self {
        Self { fence, content_key }
    }

    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Asks the producer, naming the map of peers.
    #[must_use]
    pub fn ask(self, salt: u64, peer_map: Digest) -> (Asking, Bind) {
        let bind = Bind { fence: self.fence.clone(), content_key: self.content_key, salt, peer_map };
        (Asking { fence: self.fence }, bind)
    }
}

impl Asking {
    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Takes the producer's answer.
    #[must_use]
    pub fn on_answer(self, answer: BindAnswer) -> Step<Self, Result<Granted, BindRefusal>> {
        match answer {
            BindAnswer::Bound(grant) if grant.fence == self.fence => {
                Step::Next(Ok(Granted { fence: self.fence, groups: grant.groups }))
            }
            BindAnswer::Refused { fence, reason } if fence == self.fence => Step::Next(Err(reason)),
            _ => Step::Ignored(self),
        }
    }
}

impl Granted {
    /// What the producer has written, when all of its writers have.
    #[must_use]
    pub fn written(fence: Fence, groups: Vec<SrcGroup>) -> Self {
        Self { fence, groups }
    }

    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// The producer's blocks and held tokens.
    #[must_use]
    pub fn groups(&self) -> &[SrcGroup] {
        &self.groups
    }

    /// Gives up before anything was read.
    #[must_use]
    pub fn abandon(self) -> Release {
        Release { fence: self.fence, reads: ReadsEnd::Abandoned }
    }

    /// The ranks that the map names begin to read.
    #[must_use]
    pub fn read(self, peers: &PeerMap) -> Reading {
        self.read_named(peers.pairs().iter().map(|p| (p.dst(), p.src())))
    }

    /// Nothing is to be read: the consumer has it all.
    #[must_use]
    pub fn full_hit(self) -> Ended {
        Ended { fence: self.fence, named: BTreeMap::new(), results: BTreeMap::new() }
    }

    fn read_named(self, pairs: impl Iterator<Item = (RankId, RankId)>) -> Reading {
        let mut named: BTreeMap<RankId, BTreeSet<RankId>> = BTreeMap::new();
        for (dst, src) in pairs {
            named.entry(dst).or_default().insert(src);
        }
        Reading { fence: self.fence, named, results: BTreeMap::new() }
    }
}

impl Reading {
    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// The ranks whose share has not ended.
    pub fn pending(&self) -> impl Iterator<Item = RankId> {
        self.named.keys().copied().filter(|rank| !self.results.contains_key(rank))
    }

    /// Whether this rank is named and its share has not ended.
    #[must_use]
    pub fn is_pending(&self, rank: RankId) -> bool {
        self.named.contains_key(&rank) && !self.results.contains_key(&rank)
    }

    /// Whether this rank is named.
    #[must_use]
    pub fn names(&self, rank: RankId) -> bool {
        self.named.contains_key(&rank)
    }

    /// Nobody waits for the pending ranks any more: each ends with this fault, the others as they did.
    #[must_use]
    pub fn end_pending(mut self, fault: &RankFault) -> Ended {
        let pending: Vec<RankId> = self.pending().collect();
        self.results.extend(pending.into_iter().map(|rank| (rank, Err(fault.clone()))));
        let Self { fence, named, results } = self;
        Ended { fence, named, results }
    }

    /// A rank's share has ended.
    #[must_use]
    pub fn on_rank(mut self, rank: RankId, result: RankResult) -> Step<Self, Ended> {
        if !self.is_pending(rank) {
            return Step::Ignored(self);
        }
        self.results.insert(rank, result);
        if self.pending().next().is_some() {
            return Step::Waiting(self);
        }
        let Self { fence, named, results } = self;
        Step::Next(Ended { fence, named, results })
    }
}

impl Ended {
    /// What each consumer rank reported.
    #[must_use]
    pub fn results(&self) -> &BTreeMap<RankId, RankResult> {
        &self.results
    }

    /// Whether this rank is named.
    #[must_use]
    pub fn names(&self, rank: RankId) -> bool {
        self.named.contains_key(&rank)
    }

    /// Who was to read from whom: consumer rank, producer rank.
    #[must_use]
    pub fn sources(&self) -> BTreeSet<(RankId, RankId)> {
        self.named.iter().flat_map(|(dst, sources)| sources.iter().map(|src| (*dst, *src))).collect()
    }

    /// Whether every named consumer has read exactly its named sources.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.named.iter().all(|(dst, sources)| match self.results.get(dst) {
            Some(Ok(report)) => {
                let read = report.sources.iter().map(|s| s.src);
                // By rank, as ranks report them: nothing is to be sorted.
                read.clone().eq(sources.iter().copied())
                    || (report.sources.len() == sources.len() && read.collect::<BTreeSet<_>>() == *sources)
            }
            _ => false,
        })
    }

    /// Asks for the verdict.
    ///
    /// # Errors
    /// If not every named source was read: then the release says so, and there is no verdict to wait for.
    #[allow(clippy::result_large_err, reason = "the state comes back so that the caller loses nothing")]
    pub fn release(self) -> Result<(Releasing, Release), (Self, Release)> {
        let reads = if self.is_complete() { ReadsEnd::Complete } else { ReadsEnd::Abandoned };
        let release = Release { fence: self.fence.clone(), reads };
        match reads {
            ReadsEnd::Complete => Ok((Releasing { ended: self }, release)),
            _ => Err((self, release)),
        }
    }

    /// Tries again with the next attempt, which replaces this one at the producer in one step; `None` after the last that there
    /// can be. Only when everything of this one has stopped.
    #[must_use]
    pub fn again(&self, content_key: ContentKey) -> Option<Wanted> {
        let attempt = self.fence.attempt.next()?;
        Some(Wanted { fence: Fence { attempt, ..self.fence.clone() }, content_key })
    }

    /// Gives up although the reads may be complete.
    #[must_use]
    pub fn abandon(&self) -> Release {
        Release { fence: self.fence.clone(), reads: ReadsEnd::Abandoned }
    }
}

impl Releasing {
    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.ended.fence
    }

    /// What was read.
    #[must_use]
    pub fn ended(&self) -> &Ended {
        &self.ended
    }

    /// Takes the producer's verdict: held, or stale with what was read.
    #[must_use]
    pub fn on_answer(self, answer: &ReleaseAnswer) -> Step<Self, Result<Held, Ended>> {
        if answer.fence != self.ended.fence {
            return Step::Ignored(self);
        }
        Step::Next(match answer.verdict {
            Verdict::Held => Ok(Held { ended: self.ended }),
            Verdict::Stale => Err(self.ended),
        })
    }
}

impl Held {
    /// What was read.
    #[must_use]
    pub fn ended(&self) -> &Ended {
        &self.ended
    }

    /// The lease.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.ended.fence
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvferry_geometry::units::Bytes;

    use super::*;
    use crate::lease::first_attempt;
    use crate::names::{EngineId, Epoch, LeaseId};
    use crate::peer::Grant;
    use crate::rank::{SourceReport, Stage};

    fn fence(lease: u128) -> Fence {
        first_attempt(EngineId::new("p").unwrap(), Epoch::new(7), LeaseId::new(lease))
    }

    fn rank(n: u32) -> RankId {
        RankId::new(n)
    }

    fn report(sources: &[u32]) -> RankResult {
        let source = |&src: &u32| SourceReport {
            src: rank(src),
            bytes: Bytes::new(1),
            rows: 1,
            descriptors_before: 1,
            descriptors_after: 1,
            place: kvferry_geometry::staged::Place::Direct,
            lane: String::new(),
            took: Duration::ZERO,
        };
        let sources = sources.iter().map(source).collect();
        Ok(RankReport {
            sources,
            zeroed: Bytes::ZERO,
            compared: Bytes::ZERO,
            queued: Duration::ZERO,
            slices: 1,
            took: Duration::ZERO,
        })
    }

    fn fault() -> RankResult {
        Err(RankFault { stage: Stage::Read, text: "lost".into(), in_doubt: false, bad: Vec::new() })
    }

    fn asking() -> Asking {
        Wanted::new(fence(1), ContentKey::from_bytes([1; 32])).ask(3, Digest::from_bytes([9; 32])).0
    }

    fn granted() -> Granted {
        Granted { fence: fence(1), groups: Vec::new() }
    }

    /// Consumers 0 and 1; 0 reads sources 4 and 5, 1 reads source 5.
    fn reading() -> Reading {
        granted().read_named([(rank(0), rank(4)), (rank(0), rank(5)), (rank(1), rank(5))].into_iter())
    }

    fn ended(first: RankResult, second: RankResult) -> Ended {
        let Step::Waiting(state) = reading().on_rank(rank(0), first) else { panic!("two ranks are named") };
        let Step::Next(ended) = state.on_rank(rank(1), second) else { panic!("both have ended") };
        ended
    }

    fn releasing() -> Releasing {
        ended(report(&[4, 5]), report(&[5])).release().unwrap().0
    }

    #[test]
    fn wanted_asks_with_all_it_knows() {
        let (_, bind) = Wanted::new(fence(1), ContentKey::from_bytes([1; 32])).ask(3, Digest::from_bytes([9; 32]));
        assert_eq!((bind.fence, bind.salt), (fence(1), 3));
        assert_eq!(bind.content_key, ContentKey::from_bytes([1; 32]));
        assert_eq!(bind.peer_map, Digest::from_bytes([9; 32]));
    }

    #[test]
    fn asking_by_event() {
        let bound = |f| BindAnswer::Bound(Grant { fence: f, groups: Vec::new(), time_left: None });
        let refused = |f| BindAnswer::Refused { fence: f, reason: BindRefusal::WrongContent };
        assert_eq!(asking().on_answer(bound(fence(1))), Step::Next(Ok(granted())));
        assert_eq!(asking().on_answer(refused(fence(1))), Step::Next(Err(BindRefusal::WrongContent)));
        assert_eq!(asking().on_answer(bound(fence(2))), Step::Ignored(asking()));
        assert_eq!(asking().on_answer(refused(fence(2))), Step::Ignored(asking()));
    }

    #[test]
    fn reading_by_event() {
        assert_eq!(reading().pending().collect::<Vec<_>>(), [rank(0), rank(1)]);
        assert_eq!(reading().on_rank(rank(7), report(&[])), Step::Ignored(reading()), "not named");
        let Step::Waiting(one) = reading().on_rank(rank(1), fault()) else { panic!("rank 0 is pending") };
        assert_eq!(one.pending().collect::<Vec<_>>(), [rank(0)]);
        let again = one.clone().on_rank(rank(1), report(&[5]));
        assert_eq!(again, Step::Ignored(one.clone()), "a rank ends once");
        let Step::Next(ended) = one.on_rank(rank(0), report(&[4, 5])) else { panic!("all have ended") };
        assert!(!ended.is_complete());
    }

    #[test]
    fn ended_is_complete_only_with_exactly_the_named_sources() {
        for (first, second, complete) in [
            (report(&[4, 5]), report(&[5]), true),
            (report(&[5, 4]), report(&[5]), true),
            (report(&[4]), report(&[5]), false),
            (report(&[4, 5, 6]), report(&[5]), false),
            (report(&[4, 5, 5]), report(&[5]), false),
            (report(&[4, 5]), report(&[]), false),
            (report(&[4, 5]), report(&[4]), false),
            (fault(), report(&[5]), false),
            (report(&[4, 5]), fault(), false),
        ] {
            let state = ended(first, second);
            assert_eq!(state.is_complete(), complete);
            match state.release() {
                Ok((_, release)) => assert_eq!((complete, release.reads), (true, ReadsEnd::Complete)),
                Err((_, release)) => assert_eq!((complete, release.reads), (false, ReadsEnd::Abandoned)),
            }
        }
        assert!(granted().full_hit().is_complete(), "nothing named, nothing lacking");
        assert_eq!(ended(report(&[4, 5]), report(&[5])).abandon().reads, ReadsEnd::Abandoned);
        assert_eq!(granted().abandon().reads, ReadsEnd::Abandoned);
    }

    #[test]
    fn releasing_by_event() {
        let answer = |f, verdict| ReleaseAnswer { fence: f, verdict };
        assert!(matches!(releasing().on_answer(&answer(fence(1), Verdict::Held)), Step::Next(Ok(_))));
        assert!(matches!(releasing().on_answer(&answer(fence(1), Verdict::Stale)), Step::Next(Err(_))));
        for verdict in [Verdict::Held, Verdict::Stale] {
            assert_eq!(releasing().on_answer(&answer(fence(2), verdict)), Step::Ignored(releasing()));
        }
    }
}
