//! What an owner is told: its engine, its bounds, its times; and what its engine wishes to read.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::manifest::CacheGroup;
use kvferry_geometry::request::DstGroup;
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::Tokens;
use kvferry_proto::handshake::{Allowed, IdentityCheck};
use kvferry_proto::names::{ContentKey, EngineId, Epoch, Fence, ModelIdentity};
use kvferry_proto::rank::Assurance;

use crate::outcome::Phase;

/// What an owner is.
#[derive(Clone, Debug)]
pub struct OwnerConfig {
    /// The engine's id.
    pub engine: EngineId,
    /// This life of it: random.
    pub epoch: Epoch,
    /// The model's items.
    pub spec: ModelSpec,
    /// The groups that share block tables.
    pub groups: Vec<CacheGroup>,
    /// How many ranks will join.
    pub ranks: u32,
    /// What the cache's bytes mean.
    pub identity: ModelIdentity,
    /// Whether peers must say the same.
    pub check: IdentityCheck,
    /// What becomes of items that only one of two engines has. Both engines' owners are asked, each with its own options; where
    /// these differ, the stricter one decides. They never change what moves.
    pub compat: CompatOptions,
    /// Whether one consumer's items are spread over all ranks that hold them alike. Peers must say the same.
    pub stripe: bool,
    /// Which engines may be met; `None`: any.
    pub allowed: Option<Arc<Allowed>>,
    /// How long a link may take until both hellos are in order, and a rank's link until it has joined.
    pub handshake: Duration,
    /// How long ranks may take to stop after a request has failed, before they count as in doubt.
    pub grace: Duration,
    /// How long blocks stay in quarantine if nothing proves that nobody writes them any more. `None`, the default: until something
    /// does. Time proves nothing: who sets it vouches that no write of a rank that isn't heard of takes longer than this.
    pub reclaim_after: Option<Duration>,
    /// How long leases last.
    pub lease: LeaseTerms,
    /// When a link that could not be made is tried again.
    pub retry: Backoff,
    /// How long a link is kept of which nothing is asked; `None`: until it breaks.
    pub idle: Option<Duration>,
    /// How much there may be at a time.
    pub limits: Limits,
}

impl OwnerConfig {
    /// The usual one for an engine.
    #[must_use]
    pub fn new(engine: EngineId, epoch: Epoch, spec: ModelSpec, groups: Vec<CacheGroup>, ranks: u32) -> Self {
        Self {
            engine,
            epoch,
            spec,
            groups,
            ranks,
            identity: ModelIdentity::unspecified(),
            check: IdentityCheck::Required,
            compat: CompatOptions::default(),
            stripe: false,
            allowed: None,
            handshake: Duration::from_secs(10),
            grace: Duration::from_secs(2),
            reclaim_after: None,
            lease: LeaseTerms::default(),
            retry: Backoff::default(),
            idle: None,
            limits: Limits::default(),
        }
    }
}

/// How long leases last, as producer and as consumer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    /// As producer: how long an offer lasts if nobody reads it, where the offer itself doesn't say; `None`: without end, so that
    /// blocks which no consumer ever asks for are lent until the engine takes them back.
    pub ttl: Option<Duration>,
    /// As producer: a beat moves the end of a lease to at least so long from now on.
    pub extension: Duration,
    /// As consumer: how often a producer is told which of its leases are still wanted.
    pub beat: Duration,
    /// As consumer: a lease with less than this left is not read any more.
    pub margin: Duration,
}

impl Default for LeaseTerms {
    /// 30 s; beats every 5 s that extend to 20 s; 1 s at least.
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { ttl: Some(seconds(30)), extension: seconds(20), beat: seconds(5), margin: seconds(1) }
    }
}

/// When something that failed is tried again: after `first`, then twice as long each time, `most` at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backoff {
    /// After the first failure.
    pub first: Duration,
    /// After many.
    pub most: Duration,
}

impl Default for Backoff {
    /// 100 ms to 5 s.
    fn default() -> Self {
        Self { first: Duration::from_millis(100), most: Duration::from_secs(5) }
    }
}

impl Backoff {
    /// How long to wait after so many failures in a row.
    #[must_use]
    pub fn after(self, failures: u32) -> Duration {
        let doubled = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(doubled).min(self.most)
    }
}

/// How much there may be at a time. What is beyond is refused by name; nothing that runs is harmed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Requests of our engine that have not ended.
    pub pulls: usize,
    /// Leases that are open.
    pub leases: usize,
    /// Leases that one engine has bound, over all its links.
    pub bound: usize,
    /// Links that one engine has made to this one and that are up; beyond, the one that was used longest ago is closed, one without a
    /// bound lease first. One is enough for an engine, but for the moment in which it makes it anew.
    pub links: usize,
    /// Manifests that are remembered, of engines with a link and without: those last met. 0: none, and every hello is a whole one.
    pub manifests: usize,
}

impl Default for Limits {
    /// 65,536 requests, 1,048,576 leases, 65,536 bound by one engine over 4 links at most, 64 manifests.
    fn default() -> Self {
        Self { pulls: 1 << 16, leases: 1 << 20, bound: 1 << 16, links: 4, manifests: 64 }
    }
}

/// The priority of a request that says nothing else.
pub const USUAL_PRIORITY: u8 = 100;

/// Who moves the bytes of a request. Both sides hold the same promises, and requests of both kinds mix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Mode {
    /// Our ranks read, once the producer has computed all of them.
    #[default]
    Pull,
    /// The producer's ranks write, as they compute. The producer must be able to.
    Push {
        /// Whether to tell how much is in place, as [`Effect::Progress`](super::Effect::Progress).
        progress: bool,
    },
}

/// What is done where a request fails. The report is the same whatever it says, and the same for pull and push.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailurePolicy {
    /// How often each source may be tried, at least once. Another attempt is made only if it takes from other replicas than the one
    /// that failed, and when everything of that one has stopped. Those of a prefill that begins anew don't count.
    pub attempts: u32,
    /// Other producers that have the same, in order: the next one is tried when one has failed and nothing of it can write our blocks
    /// any more. Not where it is the request itself that can't be served by anybody.
    pub others: Vec<Source>,
    /// What the engine will do when all have failed.
    pub then: Remedy,
    /// How long each phase may take; in all, the request has its deadline.
    pub within: PhaseLimits,
}

impl Default for FailurePolicy {
    /// Two attempts, no others, and that was it.
    fn default() -> Self {
        Self { attempts: 2, others: Vec::new(), then: Remedy::Fail, within: PhaseLimits::default() }
    }
}

/// Where a lease is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// Where its producer's owner listens.
    pub address: String,
    /// The lease.
    pub fence: Fence,
}

/// What an engine does with a request that has failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Remedy {
    /// It gives it up: nothing of it is of use.
    #[default]
    Fail,
    /// It computes the rest from [`Report::first_hole`](crate::Report::first_hole) on: what is in place before that is told, as far as
    /// it is proven.
    Recompute,
}

/// How long a request may be in each of its phases. `None`: as long as the request has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PhaseLimits {
    /// Until there is a link to the producer's owner.
    pub link: Option<Duration>,
    /// Until the producer has answered the bind.
    pub bind: Option<Duration>,
    /// Until the first slice of each of our ranks is posted. Of a pull; a push waits for what is computed.
    pub queue: Option<Duration>,
    /// Until all is moved; of a push, that is not before all is computed.
    pub transfer: Option<Duration>,
    /// Until the producer has given its verdict.
    pub release: Option<Duration>,
}

impl PhaseLimits {
    /// The limit of a phase.
    #[must_use]
    pub fn of(&self, phase: Phase) -> Option<Duration> {
        match phase {
            Phase::Link => self.link,
            Phase::Bind => self.bind,
            Phase::Write | Phase::Read => self.transfer,
            Phase::Release => self.release,
            Phase::Stop => None,
        }
    }
}

/// A wish to have another engine's blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullWish {
    /// Who moves the bytes.
    pub mode: Mode,
    /// Where the producer's owner listens.
    pub address: String,
    /// The lease.
    pub fence: Fence,
    /// Length of the sequence.
    pub tokens: Tokens,
    /// Our blocks and what is cached, one entry for each group of our engine.
    pub groups: Vec<DstGroup>,
    /// What we think the cache was computed from.
    pub content_key: ContentKey,
    /// How sure we want to be.
    pub assurance: Assurance,
    /// How long it may take in all.
    pub deadline: Duration,
    /// Requests of a higher priority are read first; [`USUAL_PRIORITY`] where nothing else is known.
    pub priority: u8,
    /// What is done where it fails.
    pub policy: FailurePolicy,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_most() {
        let b = Backoff::default();
        let ms = |n| b.after(n).as_millis();
        assert_eq!([1, 2, 3, 6, 7, 40, u32::MAX].map(ms), [100, 200, 400, 3200, 5000, 5000, 5000]);
    }
}
