//! What goes wrong in a world, and how often.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::rng::{Rng, ms};

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal),+ $(,)?) => {
        /// A way in which something goes wrong.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum FaultKind { $($(#[$doc])* $name),+ }

        impl FaultKind {
            /// Every kind.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Its name, as masks and reports write it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }
        }
    };
}

kinds! {
    /// An operation breaks on the way: a part of its bytes is written.
    FailedOp = "failed-op",
    /// An operation ends in doubt; nothing more of it lands.
    DoubtfulOp = "doubtful-op",
    /// An operation ends in doubt, or is stopped, and the rest of its bytes lands later.
    LateBytes = "late-bytes",
    /// An operation is done and its end is lost; after a while it counts as in doubt.
    LostCompletion = "lost-completion",
    /// A cancel is not heeded.
    DeafCancel = "deaf-cancel",
    /// An operation waits for up to a second before its first byte.
    SlowOp = "slow-op",
    /// A lane doesn't come up.
    LaneFails = "lane-fails",
    /// A message takes up to a hundred times longer than usual, so that those of other links overtake it.
    Jitter = "jitter",
    /// The links between two owners break; either end hears of it in its own time.
    LinkBreak = "link-break",
    /// An owner is connected to by another that says nothing, and then goes.
    HalfOpen = "half-open",
    /// Nothing that owners say arrives until it is over, and no link is made.
    Partition = "partition",
    /// Nothing moves between the ranks of two engines.
    DataPartition = "data-partition",
    /// An owner does nothing for a while.
    OwnerPause = "owner-pause",
    /// A rank does nothing for a while; its card goes on.
    RankPause = "rank-pause",
    /// A rank is killed, and begins anew with other memory.
    RankCrash = "rank-crash",
    /// An owner loses a rank that lives on for a while and finishes what it does.
    RankLinkLoss = "rank-link-loss",
    /// An engine is killed, its owner with all ranks, and begins anew.
    EngineCrash = "engine-crash",
    /// A rank's card is many times slower for a while.
    SlowRank = "slow-rank",
    /// Clocks begin anywhere and go up to a thousandth fast or slow.
    ClockSkew = "clock-skew",
    /// A request is cancelled by its engine.
    Cancel = "cancel",
    /// An offer is taken back by its engine.
    Withdraw = "withdraw",
    /// A consumer declines, without having bound.
    Decline = "decline",
    /// Nobody ever asks for an offer.
    Silence = "silence",
    /// A request has a deadline that it can hardly meet.
    ShortDeadline = "short-deadline",
    /// Two engines ask for one lease, or one asks twice.
    Twice = "twice",
    /// A request names a lease that is over.
    StaleFence = "stale-fence",
    /// An engine asks for, and offers, blocks that a request of its own writes.
    Overlap = "overlap",
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FaultKind {
    /// Those of the data plane, with how often in ten thousand operations (lanes) where they are chosen for a world.
    pub(crate) const OF_OPS: &[(Self, u32)] = &[
        (Self::FailedOp, 150),
        (Self::DoubtfulOp, 100),
        (Self::LateBytes, 400),
        (Self::LostCompletion, 120),
        (Self::DeafCancel, 3000),
        (Self::SlowOp, 400),
        (Self::LaneFails, 500),
    ];

    /// Those that strike at a time, with how many there are at most where they are chosen for a world.
    pub(crate) const AT_TIMES: &[(Self, u64)] = &[
        (Self::LinkBreak, 5),
        (Self::HalfOpen, 3),
        (Self::Partition, 2),
        (Self::DataPartition, 2),
        (Self::OwnerPause, 3),
        (Self::RankPause, 3),
        (Self::RankCrash, 3),
        (Self::RankLinkLoss, 4),
        (Self::EngineCrash, 2),
        (Self::SlowRank, 2),
    ];

    /// Those of requests, with how often in ten thousand where they are chosen for a world.
    pub(crate) const OF_REQUESTS: &[(Self, u32)] = &[
        (Self::Cancel, 800),
        (Self::Withdraw, 1500),
        (Self::Decline, 500),
        (Self::Silence, 500),
        (Self::ShortDeadline, 700),
        (Self::Twice, 1500),
        (Self::StaleFence, 300),
        (Self::Overlap, 500),
    ];
}

/// Something that goes wrong at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultEvent {
    /// When.
    pub at: Duration,
    /// How.
    pub kind: FaultKind,
    /// The engine that it strikes, counted in the world.
    pub engine: u32,
    /// The other engine, of what is between two.
    pub other: u32,
    /// The rank, of what strikes one; taken modulo the engine's ranks.
    pub rank: u32,
    /// How long it lasts.
    pub lasts: Duration,
    /// What else is drawn.
    pub luck: u64,
}

impl fmt::Display for FaultEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, kind, engine, other, rank, lasts, .. } = self;
        write!(f, "{at:?} {kind}: engine {engine} (rank {rank}, other engine {other}), for {lasts:?}")
    }
}

/// Which kinds a world has, and what strikes when.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    /// How often in ten thousand: of operations, lanes, messages or requests.
    pub rates: BTreeMap<FaultKind, u32>,
    /// What strikes, by time.
    pub events: Vec<FaultEvent>,
}

impl FaultPlan {
    /// Chooses some kinds, and when they strike a world of so many engines in the time that it has requests.
    #[must_use]
    pub fn draw(seed: u64, engines: u32, span: Duration) -> Self {
        let mut plan = Self::default();
        let chosen = |kind: FaultKind| {
            let mut rng = Rng::of(&[seed, 0xfa, kind as u64]);
            rng.chance(4000).then_some(rng)
        };
        for &(kind, rate) in FaultKind::OF_OPS.iter().chain(FaultKind::OF_REQUESTS) {
            if let Some(mut rng) = chosen(kind) {
                plan.rates.insert(kind, rng.small(rate / 4, rate));
            }
        }
        for kind in [FaultKind::Jitter, FaultKind::ClockSkew] {
            if chosen(kind).is_some() {
                plan.rates.insert(kind, 300);
            }
        }
        for &(kind, most) in FaultKind::AT_TIMES {
            let Some(mut rng) = chosen(kind) else { continue };
            for _ in 0..rng.between(1, most) {
                let engine = rng.small(0, engines.saturating_sub(1));
                let apart = rng.small(1, engines.saturating_sub(1).max(1));
                plan.events.push(FaultEvent {
                    at: rng.time(ms(100), span),
                    kind,
                    engine,
                    other: (engine + apart) % engines.max(1),
                    rank: rng.small(0, 63),
                    lasts: rng.time(ms(20), ms(3000)),
                    luck: rng.word(),
                });
            }
        }
        plan.events.sort_by_key(|e| e.at);
        plan
    }
}
