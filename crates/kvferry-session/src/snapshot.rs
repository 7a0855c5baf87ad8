//! What an owner does at a moment, for people who look: every live request and lease, its state, what it waits for and since
//! when. Plain values; times are counted back from the moment, so that they need no clock to be read.

use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::names::{EngineId, Epoch, Fence};
use kvferry_proto::rank::PullId;

/// An owner at a moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// The engine.
    pub engine: EngineId,
    /// Which life of it; another once a rank was lost and has come back.
    pub epoch: Epoch,
    /// `joining`, `ready`, `rank lost` or `draining`.
    pub state: &'static str,
    /// Ranks that have not joined, or are gone.
    pub missing: Vec<RankId>,
    /// Links to other owners.
    pub links: Vec<LinkSnapshot>,
    /// Leases that are open.
    pub leases: Vec<LeaseSnapshot>,
    /// Requests that have not ended.
    pub pulls: Vec<PullSnapshot>,
    /// Requests that have ended and left blocks in quarantine.
    pub quarantine: Vec<QuarantineSnapshot>,
}

/// A link to another owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkSnapshot {
    /// Its number.
    pub link: u64,
    /// The engine at its other end, once that is known.
    pub peer: Option<EngineId>,
    /// Which life of it.
    pub epoch: Option<Epoch>,
    /// Where it leads, if it was us who connected.
    pub address: Option<String>,
    /// `up`, or what it waits for.
    pub state: &'static str,
    /// For how long.
    pub since: Duration,
    /// The version that both speak.
    pub version: Option<u16>,
    /// Leases that its peer has bound.
    pub bound: usize,
    /// Our requests that go over it.
    pub pulls: usize,
}

/// An open lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseSnapshot {
    /// The lease, with the attempt that reads it.
    pub fence: Fence,
    /// Who has bound it.
    pub consumer: Option<EngineId>,
    /// What it waits for.
    pub waiting_for: &'static str,
    /// Since the offer.
    pub since: Duration,
    /// How long it has left; `None`: it has no end.
    pub left: Option<Duration>,
}

/// A request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullSnapshot {
    /// Its number.
    pub pull: PullId,
    /// The lease that it reads, with the present attempt.
    pub fence: Fence,
    /// Where the producer's owner listens.
    pub address: String,
    /// Its phase, in a word.
    pub phase: &'static str,
    /// What it waits for.
    pub waiting_for: &'static str,
    /// Since when it is in this phase.
    pub since: Duration,
    /// Since the engine's call.
    pub age: Duration,
    /// Until its deadline.
    pub left: Duration,
    /// How long its lease has left, as far as is known here; `None`: it has no end, or nothing is known yet.
    pub lease_left: Option<Duration>,
    /// Our ranks that it waits for.
    pub ranks: Vec<RankId>,
    /// What the last attempt to reach the producer's owner came to.
    pub trouble: Option<String>,
}

/// Blocks in quarantine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QuarantineSnapshot {
    /// The request that has left them.
    pub pull: PullId,
    /// How many blocks and slots.
    pub blocks: usize,
    /// The ranks of ours that have not said that they have stopped.
    pub ranks: Vec<RankId>,
    /// The engine whose ranks may still write them.
    pub producer: Option<EngineId>,
    /// Which of its ranks.
    pub writers: Vec<RankId>,
    /// Since the request has ended.
    pub since: Duration,
}
