//! How a request ended, for the engine: delivered, or failed with what each rank said.

use std::fmt;
use std::time::Duration;

use kvferry_geometry::compat::{Compatible, Mismatches};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::{BoundRequest, Checkpoint, DstGroup, Request, RequestErrors};
use kvferry_geometry::spec::{Item, Retention};
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{Bytes, GroupId, ItemId, Name, RankId, TokenRange, Tokens};
use kvferry_proto::lease::Closing;
use kvferry_proto::names::{EngineId, Epoch, Fence};
use kvferry_proto::peer::BindRefusal;
use kvferry_proto::rank::RankFault;
use kvferry_proto::request::{Ended, Held};

use crate::assurance::{Assurance, Assured, NotAssured};
use crate::owner::Overlap;
use crate::pairing::PairingError;

/// What one consumer rank read from one producer rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PairReport {
    /// The producer's rank.
    pub src: RankId,
    /// The consumer's rank.
    pub dst: RankId,
    /// Bytes read.
    pub bytes: Bytes,
    /// Rows of the batch in product form.
    pub rows: u64,
    /// Descriptors if no neighbours were merged: one for each item, component, head and run of tokens in one kernel block.
    pub descriptors_before: u64,
    /// Descriptors after neighbours were merged.
    pub descriptors_after: u64,
    /// Whether the bytes were staged, and where.
    pub place: Place,
    /// The lane that carried them, in words; empty where nothing was read.
    pub lane: String,
    /// From submission until they were in place.
    pub took: Duration,
}

/// What a request does at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Phase {
    /// It waits for the link to the producer's owner.
    Link,
    /// It waits for the producer's answer to its bind.
    Bind,
    /// The producer's ranks write, or wait for what there is to write.
    Write,
    /// Ranks read, or wait for their turn to; or do what follows a write.
    Read,
    /// It has failed, and waits for ranks to stop.
    Stop,
    /// It waits for the producer's verdict.
    Release,
}

impl Phase {
    /// All, in order.
    pub const ALL: [Self; 6] = [Self::Link, Self::Bind, Self::Write, Self::Read, Self::Stop, Self::Release];

    /// A word for it, for logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Bind => "bind",
            Self::Write => "write",
            Self::Read => "read",
            Self::Stop => "stop",
            Self::Release => "release",
        }
    }
}

/// How long a request was in each phase, over all its attempts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Phases {
    times: [Duration; 6],
    queued: Duration,
}

impl Phases {
    /// How long it was in a phase.
    #[must_use]
    pub fn of(&self, phase: Phase) -> Duration {
        self.times[phase as usize]
    }

    /// Of [`Phase::Read`]: the longest time that a rank's first read has waited for its turn.
    #[must_use]
    pub fn queued(&self) -> Duration {
        self.queued
    }

    pub(crate) fn add(&mut self, phase: Phase, time: Duration) {
        let sum = &mut self.times[phase as usize];
        *sum = sum.saturating_add(time);
    }

    fn note_queued(&mut self, time: Duration) {
        self.queued = self.queued.max(time);
    }
}

/// What happened, whatever the end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The lease.
    pub fence: Fence,
    /// What was asked for.
    pub assurance: Assurance,
    /// Who read how much from whom, by consumer rank, then producer rank.
    pub pairs: Vec<PairReport>,
    /// Bytes zeroed beyond the moved tokens, over all ranks.
    pub zeroed: Bytes,
    /// Bytes compared by digest on both sides, over all ranks.
    pub compared: Bytes,
    /// The ranks that failed, and how.
    pub faults: Vec<(RankId, RankFault)>,
    /// Ranks whose memory may still be written: the request's blocks must not be used again while the rank's process lives. They
    /// stay in quarantine, and no other request is given them, until the rank says that it has stopped after all.
    pub in_doubt: Vec<RankId>,
    /// The producer's ranks that may still write our memory: the request's blocks stay in quarantine until these are known to have
    /// stopped.
    pub writers_in_doubt: Vec<RankId>,
    /// What is in place now, one for each group of our engine; none where the engine was not complete.
    pub groups: Vec<GroupOutcome>,
    /// How often it was tried: what is told of ranks is of the last attempt.
    pub attempts: u32,
    /// How long it was in each phase.
    pub phases: Phases,
    /// From the engine's call to the end.
    pub took: Duration,
}

/// When a request took what.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    pub(crate) attempts: u32,
    pub(crate) phases: Phases,
    pub(crate) took: Duration,
}

/// What of one of our groups is in place when a request has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupOutcome {
    /// The group.
    pub group: GroupId,
    /// The tokens whose bytes are in place, of all items that the producer has too: what was cached and what has arrived. A
    /// group of states has none.
    pub valid: TokenRange,
    /// Positions in the sequence's block table (first, one past the last) whose blocks are complete: all tokens of all items are
    /// in place. Only these may enter a prefix cache. A ring has none, and neither has a group with ignored items.
    pub complete: (u64, u64),
    /// The first token whose bytes are not in place, if some are not: who computes the rest begins there, or before. Of a window or a
    /// ring it is where the cached ones end, as what lies before it is needed too; of states that have not arrived, 0.
    pub hole: Option<Tokens>,
    /// The states that have arrived and the slots that took them, the one that the sequence goes on from first.
    pub states: Vec<Checkpoint>,
    /// Items that only our engine has: nothing of them has moved.
    pub ignored: Vec<Name>,
}

impl GroupOutcome {
    /// What a group of paged items has if it has `valid`.
    fn paged(m: &Manifest, group: GroupId, valid: TokenRange, hole: Option<Tokens>, ignored: Vec<Name>) -> Self {
        let block = m.groups().get(group.index()).map_or(1, |g| g.block_tokens.get()).max(1);
        let ring = |item: &Item| matches!(item.as_paged().map(|p| p.retention), Some(Retention::Ring(_)));
        let (first, end) = (valid.start().get().div_ceil(block), valid.end().get() / block);
        let whole = ignored.is_empty() && first < end && !items(m, group).any(|(_, item)| ring(item));
        let complete = if whole { (first, end) } else { (0, 0) };
        Self { group, valid, complete, hole, states: Vec::new(), ignored }
    }

    fn state(group: GroupId, hole: Option<Tokens>, states: Vec<Checkpoint>, ignored: Vec<Name>) -> Self {
        Self { group, valid: TokenRange::default(), complete: (0, 0), hole, states, ignored }
    }
}

fn items(m: &Manifest, group: GroupId) -> impl Iterator<Item = (ItemId, &Item)> {
    let ids = m.groups().get(group.index()).into_iter().flat_map(|g| &g.items);
    ids.filter_map(|&id| Some((id, m.spec().get(id)?)))
}

/// The tokens that all of these items still read after the first `n`; none for no items.
fn read_by_all<'a>(items: impl Iterator<Item = (ItemId, &'a Item)>, n: Tokens) -> Option<TokenRange> {
    let needed = items.filter_map(|(_, item)| Some(item.as_paged()?.retention.needed(n)));
    needed.reduce(TokenRange::intersect)
}

/// What is in place where a request has failed: what was cached, as far as it is read, and of groups that keep all tokens what has
/// arrived, which is those before `arrived`.
pub(crate) fn kept(m: &Manifest, n: Tokens, groups: &[DstGroup], arrived: Tokens) -> Vec<GroupOutcome> {
    let of_group = |(id, group): (GroupId, &DstGroup)| match group {
        DstGroup::Paged(g) => {
            let all = |item: &Item| item.as_paged().is_some_and(|p| p.retention == Retention::Full);
            let keeps_all = items(m, id).all(|(_, item)| all(item));
            let end = if keeps_all { g.cached.max(arrived.min(n)) } else { g.cached };
            let in_place = TokenRange::new(Tokens::ZERO, end);
            let valid = read_by_all(items(m, id), n).unwrap_or_default().intersect(in_place);
            GroupOutcome::paged(m, id, valid, (end < n).then_some(end), Vec::new())
        }
        DstGroup::State(g) => {
            let hole = (g.slot.is_some() || !g.more.is_empty()).then_some(Tokens::ZERO);
            GroupOutcome::state(id, hole, Vec::new(), Vec::new())
        }
    };
    (0u32..).map(GroupId::new).zip(groups).map(of_group).collect()
}

/// What is in place where a request is delivered.
pub(crate) fn delivered(c: &Compatible, request: &Request, bound: &BoundRequest) -> Vec<GroupOutcome> {
    let m = c.dst();
    let of_group = |(id, group): (GroupId, &DstGroup)| {
        let matched = |item: &(ItemId, &Item)| c.src_item(item.0).is_some();
        let ignored = items(m, id).filter(|i| !matched(i)).map(|(_, item)| item.name.clone()).collect();
        match group {
            DstGroup::Paged(g) => {
                let cached = TokenRange::new(Tokens::ZERO, g.cached);
                let valid = read_by_all(items(m, id).filter(matched), request.tokens).unwrap_or(cached);
                GroupOutcome::paged(m, id, valid, None, ignored)
            }
            DstGroup::State(_) => {
                let moves = bound.moves().iter().filter(|x| x.dst_group == id).flat_map(|x| &x.states);
                let mut states: Vec<Checkpoint> = Vec::new();
                for s in moves {
                    let arrived = Checkpoint { position: s.position, slot: s.dst };
                    // Items of one group may come from several of the producer's.
                    if !states.contains(&arrived) {
                        states.push(arrived);
                    }
                }
                GroupOutcome::state(id, None, states, ignored)
            }
        }
    };
    (0u32..).map(GroupId::new).zip(&request.dst).map(of_group).collect()
}

impl Report {
    /// The first token whose bytes are not in place in some group, if there is one: from there on the engine can compute the rest. 0
    /// where nothing is known to be in place.
    #[must_use]
    pub fn first_hole(&self) -> Option<Tokens> {
        self.groups.iter().filter_map(|group| group.hole).min()
    }

    /// Bytes read over all pairs.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.pairs.iter().map(|p| p.bytes.get()).sum())
    }

    pub(crate) fn empty(fence: Fence, assurance: Assurance, times: Times, groups: Vec<GroupOutcome>) -> Self {
        Self {
            fence,
            assurance,
            pairs: Vec::new(),
            zeroed: Bytes::ZERO,
            compared: Bytes::ZERO,
            faults: Vec::new(),
            in_doubt: Vec::new(),
            writers_in_doubt: Vec::new(),
            groups,
            attempts: times.attempts,
            phases: times.phases,
            took: times.took,
        }
    }

    pub(crate) fn of(
        fence: Fence,
        assurance: Assurance,
        times: Times,
        ended: &Ended,
        groups: Vec<GroupOutcome>,
    ) -> Self {
        let mut report = Self::empty(fence, assurance, times, groups);
        let (mut zeroed, mut compared) = (0u64, 0u64);
        for (&dst, result) in ended.results() {
            match result {
                Ok(r) => {
                    report.phases.note_queued(r.queued);
                    zeroed += r.zeroed.get();
                    compared += r.compared.get();
                    report.pairs.extend(r.sources.iter().map(|s| PairReport {
                        src: s.src,
                        dst,
                        bytes: s.bytes,
                        rows: s.rows,
                        descriptors_before: s.descriptors_before,
                        descriptors_after: s.descriptors_after,
                        place: s.place,
                        lane: s.lane.clone(),
                        took: s.took,
                    }));
                }
                Err(fault) => {
                    if fault.in_doubt {
                        report.in_doubt.push(dst);
                    }
                    report.faults.push((dst, fault.clone()));
                }
            }
        }
        (report.zeroed, report.compared) = (Bytes::new(zeroed), Bytes::new(compared));
        report
    }
}

/// Every byte that the request asked for is in place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Delivered {
    assured: Assured,
    report: Report,
}

impl Delivered {
    /// The one way to say so: the producer held the lease for complete reads, and the level asked for was reached.
    pub(crate) fn new(held: &Held, assured: Assured, times: Times, groups: Vec<GroupOutcome>) -> Self {
        Self { assured, report: Report::of(held.fence().clone(), assured.level(), times, held.ended(), groups) }
    }

    /// The level of assurance that was reached.
    #[must_use]
    pub fn assurance(&self) -> Assurance {
        self.assured.level()
    }

    /// What happened.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }
}

/// A request failed. None of its bytes may be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failed {
    /// Why.
    pub cause: FailureCause,
    /// What happened until then.
    pub report: Report,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cause)?;
        for (rank, fault) in &self.report.faults {
            write!(f, "\nrank {rank}: {fault}")?;
        }
        for rank in &self.report.in_doubt {
            write!(f, "\nrank {rank}: its blocks may still be written and must not be used again")?;
        }
        for rank in &self.report.writers_in_doubt {
            write!(f, "\nthe producer's rank {rank}: it may still write our blocks, which must not be used again")?;
        }
        Ok(())
    }
}
impl std::error::Error for Failed {}

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FailureCause {
    /// Our own ranks have not all joined.
    #[error("this engine's ranks have not all joined")]
    NotReady,
    /// One of our own ranks is gone.
    #[error("this engine's rank {rank} is gone: {reason}; it can join again")]
    RankLost {
        /// The rank.
        rank: RankId,
        /// What is known.
        reason: String,
    },
    /// The assurance was not reached, or is not served.
    #[error(transparent)]
    NotAssured(#[from] NotAssured),
    /// The producer's owner can't be reached, or its link broke.
    #[error("the producer's owner at {address}: {reason}")]
    Link {
        /// Its address.
        address: String,
        /// What is known.
        reason: String,
    },
    /// This engine makes no link to that address, as it is set up: trying again is of no use.
    #[error("no link is made to the producer's owner at {address}: {reason}")]
    Unreachable {
        /// Its address.
        address: String,
        /// Why not, and what to set.
        reason: String,
    },
    /// The two owners don't get along.
    #[error("the handshake with {address} failed: {}", .reasons.join("; "))]
    Handshake {
        /// The producer's address.
        address: String,
        /// Every mismatch.
        reasons: Vec<String>,
    },
    /// The caches don't match.
    #[error("the caches do not match: {0}")]
    Mismatch(Mismatches),
    /// The caches match, but there is no map of peers or no plan.
    #[error(transparent)]
    Pairing(PairingError),
    /// The producer was restarted after it made the reference.
    #[error(
        "the reference is of epoch {reference:.8} of its engine, which is now in epoch {current:.8}; prefill again"
    )]
    StaleEpoch {
        /// The reference's.
        reference: Epoch,
        /// The engine's.
        current: Epoch,
    },
    /// The producer refused.
    #[error("the producer refused: {0}")]
    Refused(BindRefusal),
    /// Too many blocks.
    #[error("the request lists {got} blocks, more than the {limit} that one request can have")]
    TooManyBlocks {
        /// Blocks listed.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// Too many states.
    #[error("the request lists {got} states, more than the {limit} that one request can have")]
    TooManyStates {
        /// States listed.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// Blocks, room or held tokens don't fit.
    #[error("the request does not fit: {0}")]
    Request(RequestErrors),
    /// Some of the blocks that it would write are lent already.
    #[error("{0}; a request's blocks must be reserved until it has ended")]
    Overlap(#[from] Overlap),
    /// Some ranks failed: see the report.
    #[error("{failed} of {ranks} ranks failed")]
    Ranks {
        /// How many failed by themselves.
        failed: usize,
        /// How many were named.
        ranks: usize,
    },
    /// Some of the producer's ranks have not written all that they were to write.
    #[error("{failed} of the producer's {ranks} ranks failed; the first: {first}")]
    Writers {
        /// How many failed by themselves.
        failed: usize,
        /// How many were named.
        ranks: usize,
        /// In the first one's words.
        first: String,
    },
    /// It was to be pushed by an engine that doesn't.
    #[error("engine {peer} does not push; pull from it instead")]
    NoPush {
        /// The engine.
        peer: EngineId,
    },
    /// The producer has said what can't be true.
    #[error("the producer contradicts itself: {what}")]
    Contradiction {
        /// What it has said.
        what: String,
    },
    /// As many requests are open as there may be.
    #[error("{limit} requests are open, which is the limit; wait for some to end, or raise the limit")]
    TooManyPulls {
        /// The limit.
        limit: usize,
    },
    /// The owner is being shut down and begins nothing more.
    #[error("this engine is draining and begins nothing more")]
    Draining,
    /// The lease's time was up here, before it was read, or while it was.
    #[error(
        "the lease has {left:?} left, less than the {margin:?} that a read needs; prefill again, or give leases more time"
    )]
    LeaseExpired {
        /// What was left.
        left: Duration,
        /// What there must be.
        margin: Duration,
    },
    /// The producer has closed the lease while it was read.
    #[error("the producer has closed the lease: {}", .how.name())]
    LeaseClosed {
        /// Why.
        how: Closing,
    },
    /// The producer did not hold the lease while it was read.
    #[error("the producer answered stale: the lease was closed while it was read, or before")]
    Stale,
    /// Time is up.
    #[error("not done within {after:?}, while {waiting_for}")]
    Deadline {
        /// The time allowed.
        after: Duration,
        /// What was waited for.
        waiting_for: &'static str,
    },
    /// The engine gave it up.
    #[error("cancelled")]
    Cancelled,
    /// The owner was shut down.
    #[error("the owner was shut down")]
    Shutdown,
}

impl FailureCause {
    /// Whether another producer may do better: it is not the request or our own engine that has failed.
    #[must_use]
    pub const fn is_of_producer(&self) -> bool {
        !matches!(
            self,
            Self::NotReady
                | Self::RankLost { .. }
                | Self::TooManyBlocks { .. }
                | Self::TooManyStates { .. }
                | Self::TooManyPulls { .. }
                | Self::Overlap(_)
                | Self::Draining
                | Self::Cancelled
                | Self::Shutdown
        )
    }

    /// A word for its kind, for logs and metrics. There are few, and none has a value of the request in it.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::NotReady => "not ready",
            Self::RankLost { .. } => "rank lost",
            Self::NotAssured(_) => "not assured",
            Self::Link { .. } => "link",
            Self::Unreachable { .. } => "unreachable",
            Self::Handshake { .. } => "handshake",
            Self::Mismatch(_) => "mismatch",
            Self::Pairing(_) => "pairing",
            Self::StaleEpoch { .. } => "stale epoch",
            Self::Refused(_) => "refused",
            Self::TooManyBlocks { .. } | Self::TooManyStates { .. } | Self::TooManyPulls { .. } => "limit",
            Self::Request(_) => "request",
            Self::Overlap(_) => "overlap",
            Self::Ranks { .. } | Self::Writers { .. } => "transfer",
            Self::NoPush { .. } => "no push",
            Self::Contradiction { .. } => "contradiction",
            Self::Draining => "draining",
            Self::LeaseExpired { .. } => "lease expired",
            Self::LeaseClosed { .. } => "lease closed",
            Self::Stale => "stale",
            Self::Deadline { .. } => "deadline",
            Self::Cancelled => "cancelled",
            Self::Shutdown => "shutdown",
        }
    }
}

impl From<PairingError> for FailureCause {
    fn from(error: PairingError) -> Self {
        match error {
            PairingError::Mismatch(m) => Self::Mismatch(m),
            other => Self::Pairing(other),
        }
    }
}
