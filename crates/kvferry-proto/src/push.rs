//! Push: the consumer grants destination blocks, the producer's ranks write into them and say so by name.
//!
//! A request is pushed when its consumer binds the lease with its own blocks ([`PushBind`]): before, while or after the producer
//! computes them. From then on the lease is one like any other (it has an end, beats move it, one release closes it), and in
//! between the producer's ranks write instead of the consumer's reading:
//!
//! ```text
//!   producer   Bound --grant--> Writing --last named writer--> Bound (told: Written) --release--> Closed
//!                                  \--stop, withdrawn, expired, restarted--> (writers cancelled) --last one--> Closed, or Offered
//!   consumer   Asking --Bound--> Receiving --Written by all that are named--> Granted --read (zero, compare)--> ...
//! ```
//!
//! Who writes is a *named set* from the map of peers, never a count: [`Written`] names each writer and how it ended, and the
//! consumer compares the names. Its blocks stay lent until every one of them is known to have stopped; what is known is what
//! [`Written`] and [`Stopped`] say, never that time has passed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::request::{DstGroup, Request, SrcGroup};
use kvferry_geometry::units::{Bytes, ItemId, RankId, Tokens};

use crate::names::{Attempt, Fence, LeaseId};
use crate::peer::Bind;
use crate::rank::{Pairing, RankFault};
use crate::request::Step;

/// May your ranks write this lease into these blocks of mine? They may from now on. Answered as a bind is. Only for a peer with
/// [`Abilities::PUSH`](crate::handshake::Abilities::PUSH).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PushBind {
    /// The lease.
    pub bind: Bind,
    /// Where to.
    pub room: Room,
}

/// What a consumer grants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Room {
    /// Length of the sequence.
    pub tokens: Tokens,
    /// The consumer's blocks and what it had cached, one entry for each of its groups.
    pub groups: Vec<DstGroup>,
    /// How long the grant lasts: nothing is posted later, counted by the producer from when it was told.
    pub within: Duration,
    /// Whose writes are posted last: those of a lower one than is usual. More than is usual is not granted: who comes first is the
    /// producer's to say.
    pub priority: u8,
    /// Whether [`Progress`] is wanted.
    pub progress: bool,
}

/// How one writer ended.
pub type WriterEnd = Result<WriterReport, RankFault>;

/// All named writers of an attempt have ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Written {
    /// The lease and the attempt.
    pub fence: Fence,
    /// Each writer, by rank, once.
    pub writers: Vec<(RankId, WriterEnd)>,
    /// What the producer holds in the end, one entry for each of its groups.
    pub groups: Vec<SrcGroup>,
}

/// What one producer rank wrote.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WriterReport {
    /// One for each consumer rank that the map of peers names, by rank.
    pub writes: Vec<WriteReport>,
    /// From when there was something to write until its first slice was posted; zero where nothing was to be written.
    pub queued: Duration,
    /// In how many slices it was written, all together.
    pub slices: u32,
    /// From the order to the end.
    pub took: Duration,
}

/// What one producer rank wrote to one consumer rank.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WriteReport {
    /// The consumer's rank.
    pub dst: RankId,
    /// Bytes written.
    pub bytes: Bytes,
    /// Descriptors that they were written in.
    pub descriptors: u64,
    /// The lane that carried them, in the words of the rank's transport; empty where nothing was written.
    pub lane: String,
    /// From the first submission until all was in place.
    pub took: Duration,
}

/// The tokens before this one are in place at the consumer, as far as they were to be written: of all items that keep tokens, from all
/// writers. States are not in place before all is. What is told once stays so within an attempt; it is not *delivered* before the
/// request is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Progress {
    /// The lease and the attempt.
    pub fence: Fence,
    /// The first token that is not.
    pub tokens: Tokens,
}

/// Stop writing for this attempt, and say when that is so.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Stop {
    /// The lease and the attempt.
    pub fence: Fence,
}

/// The answer to [`Stop`], when there is one to give.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Stopped {
    /// The lease and the attempt.
    pub fence: Fence,
    /// Who has stopped.
    pub writers: Stoppage,
}

/// Which writers of an attempt are known to have stopped for ever.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Stoppage {
    /// All that there were.
    All,
    /// All but these, of which nobody knows.
    Except(BTreeSet<RankId>),
    /// Nobody knows of any: the attempt is of an earlier life of the producer's owner.
    Unknown,
}

/// A write order of one owner. Counted by the owner, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PushId(pub u64);

impl fmt::Display for PushId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Write what a consumer has granted room for, as it becomes final.
#[derive(Clone, PartialEq, Debug)]
pub struct PushOrder {
    /// Names the order in its end.
    pub push: PushId,
    /// What is written.
    pub lease: LeaseId,
    /// Which run of the prefill.
    pub attempt: Attempt,
    /// Whether what is final is what a [`Stream`] of that lease and attempt says, and nothing before there is one. Else all is.
    pub streamed: bool,
    /// To whom.
    pub pairing: Pairing,
    /// Both sides' blocks. Of ours, none where it is streamed.
    pub request: Arc<Request>,
    /// As of a pull.
    pub priority: u8,
    /// How long the grant lasts, from when the order was sent: nothing is posted later.
    pub within: Duration,
    /// Whether [`FromRank::PushProgress`](crate::rank::FromRank::PushProgress) is wanted.
    pub progress: bool,
}

/// The blocks of a lease whose bytes are still being computed, as far as they are known; replaces what was said of it before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stream {
    /// The lease.
    pub lease: LeaseId,
    /// Which run of the prefill. A higher one ends what is known of the one before.
    pub attempt: Attempt,
    /// Our blocks, one entry for each group.
    pub groups: Vec<SrcGroup>,
    /// Whether that is all, and everything is final.
    pub sealed: bool,
}

/// Some bytes of a stream are final: they will not change before the lease is closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ready {
    /// The lease.
    pub lease: LeaseId,
    /// Which run of the prefill.
    pub attempt: Attempt,
    /// Of which items.
    pub items: Vec<ItemId>,
    /// All tokens before this one.
    pub tokens: Tokens,
}

/// Ranks write.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Writing {
    writers: BTreeSet<RankId>,
    ends: BTreeMap<RankId, WriterEnd>,
}

impl Writing {
    /// These ranks write.
    #[must_use]
    pub fn new(writers: BTreeSet<RankId>) -> Self {
        Self { writers, ends: BTreeMap::new() }
    }

    /// Whether this rank is named and has not ended.
    #[must_use]
    pub fn is_pending(&self, rank: RankId) -> bool {
        self.writers.contains(&rank) && !self.ends.contains_key(&rank)
    }

    /// Whether this rank is named.
    #[must_use]
    pub fn names(&self, rank: RankId) -> bool {
        self.writers.contains(&rank)
    }

    /// All that are named.
    pub fn ranks(&self) -> impl Iterator<Item = RankId> {
        self.writers.iter().copied()
    }

    /// The ranks that have not ended.
    pub fn pending(&self) -> impl Iterator<Item = RankId> {
        self.writers.iter().copied().filter(|rank| !self.ends.contains_key(rank))
    }

    /// Whether all have ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.pending().next().is_none()
    }

    /// A rank has ended. False if it is not named, or had ended before: then nothing has changed.
    pub fn on_end(&mut self, rank: RankId, end: WriterEnd) -> bool {
        let counts = self.is_pending(rank);
        if counts {
            self.ends.insert(rank, end);
        }
        counts
    }

    /// Nobody waits for the pending ranks any more: each ends with this fault.
    pub fn end_pending(&mut self, fault: &RankFault) {
        let pending: Vec<RankId> = self.pending().collect();
        self.ends.extend(pending.into_iter().map(|rank| (rank, Err(fault.clone()))));
    }

    /// A rank that was in doubt is known to have stopped after all. False if it was not in doubt.
    pub fn has_stopped(&mut self, rank: RankId) -> bool {
        match self.ends.get_mut(&rank) {
            Some(Err(fault)) => std::mem::replace(&mut fault.in_doubt, false),
            _ => false,
        }
    }

    /// The writers whose memory accesses nobody has seen the end of, of those that have ended.
    #[must_use]
    pub fn in_doubt(&self) -> BTreeSet<RankId> {
        in_doubt(self.ends.iter().map(|(rank, end)| (*rank, end)))
    }

    /// What the consumer is told, once all have ended.
    #[must_use]
    pub fn told(&self, fence: Fence, groups: Vec<SrcGroup>) -> Written {
        Written { fence, writers: self.ends.iter().map(|(rank, end)| (*rank, end.clone())).collect(), groups }
    }
}

/// Those of these ends that are in doubt.
pub fn in_doubt<'a>(ends: impl Iterator<Item = (RankId, &'a WriterEnd)>) -> BTreeSet<RankId> {
    ends.filter(|(_, end)| end.as_ref().is_err_and(|fault| fault.in_doubt)).map(|(rank, _)| rank).collect()
}

/// The producer's ranks write into our blocks.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Receiving {
    fence: Fence,
    writers: BTreeSet<RankId>,
}

/// What [`Written`] means for one who waits for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// Every named writer has written all of its share.
    Whole {
        /// What the producer held.
        groups: Vec<SrcGroup>,
        /// What each writer did.
        reports: BTreeMap<RankId, WriterReport>,
    },
    /// Some have not; all have ended.
    Broken(BTreeMap<RankId, WriterEnd>),
    /// It names others than the map of peers does: whoever said it can't be believed.
    Others {
        /// Named by the map and not by the message.
        missing: BTreeSet<RankId>,
        /// The other way round, or twice.
        extra: BTreeSet<RankId>,
    },
}

impl Receiving {
    /// Waits for these writers.
    #[must_use]
    pub fn new(fence: Fence, writers: BTreeSet<RankId>) -> Self {
        Self { fence, writers }
    }

    /// The lease and the attempt.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Who writes.
    #[must_use]
    pub fn writers(&self) -> &BTreeSet<RankId> {
        &self.writers
    }

    /// The producer says that its writers have ended.
    #[must_use]
    pub fn on_written(self, written: Written) -> Step<Self, Arrival> {
        if written.fence != self.fence {
            return Step::Ignored(self);
        }
        let (mut ends, mut extra) = (BTreeMap::new(), BTreeSet::new());
        for (rank, end) in written.writers {
            if !self.writers.contains(&rank) || ends.insert(rank, end).is_some() {
                extra.insert(rank);
            }
        }
        let missing: BTreeSet<RankId> = self.writers.iter().copied().filter(|w| !ends.contains_key(w)).collect();
        Step::Next(if !missing.is_empty() || !extra.is_empty() {
            Arrival::Others { missing, extra }
        } else if ends.values().all(Result::is_ok) {
            let reports = ends.into_iter().filter_map(|(rank, end)| Some((rank, end.ok()?))).collect();
            Arrival::Whole { groups: written.groups, reports }
        } else {
            Arrival::Broken(ends)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::first_attempt;
    use crate::names::{EngineId, Epoch};
    use crate::rank::Stage;

    fn rank(n: u32) -> RankId {
        RankId::new(n)
    }

    fn set(ranks: &[u32]) -> BTreeSet<RankId> {
        ranks.iter().copied().map(RankId::new).collect()
    }

    fn fence(attempt: u32) -> Fence {
        let fence = first_attempt(EngineId::new("p").unwrap(), Epoch::new(7), LeaseId::new(1));
        Fence { attempt: Attempt::new(attempt), ..fence }
    }

    fn done() -> WriterEnd {
        Ok(WriterReport { writes: Vec::new(), queued: Duration::ZERO, slices: 0, took: Duration::ZERO })
    }

    fn fault(in_doubt: bool) -> WriterEnd {
        Err(RankFault { stage: Stage::Write, text: "lost".into(), in_doubt, bad: Vec::new() })
    }

    fn written(ends: &[(u32, WriterEnd)]) -> Written {
        let writers = ends.iter().map(|(n, end)| (rank(*n), end.clone())).collect();
        Written { fence: fence(0), writers, groups: Vec::new() }
    }

    #[test]
    fn writing_by_event() {
        let mut w = Writing::new(set(&[1, 4]));
        assert!(!w.on_end(rank(2), done()), "not named");
        assert!(w.on_end(rank(4), fault(true)) && !w.on_end(rank(4), done()), "a writer ends once");
        assert_eq!((w.pending().collect::<Vec<_>>(), w.is_over(), w.names(rank(4))), (vec![rank(1)], false, true));
        let mut late = w.clone();
        late.end_pending(&fault(true).unwrap_err());
        assert_eq!((late.is_over(), late.in_doubt()), (true, set(&[1, 4])));
        assert!(w.on_end(rank(1), done()) && w.is_over());
        assert_eq!(w.in_doubt(), set(&[4]));
        let mut later = w.clone();
        assert!(later.has_stopped(rank(4)) && !later.has_stopped(rank(4)) && !later.has_stopped(rank(1)));
        assert!(later.in_doubt().is_empty());
        assert_eq!(w.told(fence(0), Vec::new()), written(&[(1, done()), (4, fault(true))]));
        assert!(Writing::new(BTreeSet::new()).is_over(), "nobody is named, nothing is awaited");
    }

    /// By named senders, never by their number: three messages of one don't stand for three of three.
    #[test]
    fn receiving_by_event() {
        let waits = || Receiving::new(fence(0), set(&[1, 4]));
        let other = Written { fence: fence(1), ..written(&[(1, done()), (4, done())]) };
        assert_eq!(waits().on_written(other), Step::Ignored(waits()));
        let others =
            |missing: &[u32], extra: &[u32]| Step::Next(Arrival::Others { missing: set(missing), extra: set(extra) });
        assert_eq!(waits().on_written(written(&[(1, done())])), others(&[4], &[]));
        assert_eq!(waits().on_written(written(&[(1, done()), (1, done())])), others(&[4], &[1]));
        assert_eq!(waits().on_written(written(&[(1, done()), (4, done()), (5, done())])), others(&[], &[5]));
        assert_eq!(waits().on_written(written(&[(1, done()), (4, done()), (4, done())])), others(&[], &[4]));
        let broken = BTreeMap::from([(rank(1), done()), (rank(4), fault(true))]);
        assert_eq!(in_doubt(broken.iter().map(|(r, e)| (*r, e))), set(&[4]));
        assert_eq!(waits().on_written(written(&[(1, done()), (4, fault(true))])), Step::Next(Arrival::Broken(broken)));
        let Step::Next(Arrival::Whole { reports, .. }) = waits().on_written(written(&[(4, done()), (1, done())]))
        else {
            panic!("both have written")
        };
        assert_eq!(reports.keys().copied().collect::<BTreeSet<_>>(), set(&[1, 4]));
    }
}
