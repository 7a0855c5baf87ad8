//! One suite for all backends and wrappers.
//!
//! A backend implements [`Harness`] in its tests and calls [`run`]; the [`Report`] names each clause of the contract on
//! [`Transport`] that it breaks. What a backend cannot do (by its capabilities) is skipped with the
//! reason, not passed.
//!
//! What needs a second process, or more time than a suite may take, stands beside it: [`process`] and [`death`],
//! [`stress`].
//!
//! The suite drives both endpoints from one thread, apart from `threads`. It knows nothing of how a backend moves bytes; what
//! it looks at is memory before and after, and events.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::region::Region;
use crate::transport::Transport;

pub mod bytes;
pub mod death;
pub mod drive;
mod life;
mod moves;
mod pair;
mod peers;
pub mod process;
mod registrations;
pub mod sample;
pub mod stress;
mod traffic;
mod volume;

pub use pair::Pair;

/// What the suite needs from a backend.
pub trait Harness {
    /// A fresh endpoint; all endpoints of one harness can reach each other.
    fn endpoint(&mut self) -> Box<dyn Transport>;

    /// Fresh zeroed memory, of a kind that the backend can register, that nothing else holds.
    fn region(&mut self, len: usize) -> Region;

    /// The driver's clock; may be virtual, must move on from call to call.
    fn now(&mut self) -> Duration;

    /// Lets an endpoint die in the hardest way the backend can show: peers learn it only from the backend.
    fn kill(&mut self, victim: Box<dyn Transport>);

    /// Whether a file descriptor is readable now, by `poll` with no timeout. `None` if the harness can't tell; the
    /// clause is then skipped.
    fn readable(&mut self, fd: BorrowedFd<'_>) -> Option<bool>;

    /// How many random batches to try for each direction; about 100.
    fn rounds(&self) -> u64;

    /// Bytes of the one large run of clause `large`; there is memory for twice as many. 8 MiB where nothing else is said; beyond
    /// 1 GiB is where libraries' limits are.
    fn large(&self) -> usize {
        8 << 20
    }
}

/// What became of a clause.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It holds.
    Passed,
    /// It could not be tried.
    Skipped(String),
}

/// One clause: holds, cannot be tried, or what breaks it.
pub type Clause = fn(&mut dyn Harness) -> Result<Verdict, String>;

/// All clauses by name, in the order of the contract.
pub const CLAUSES: &[(&str, Clause)] = &[
    ("ids", registrations::ids),
    ("duplicate", registrations::duplicate),
    ("memory-kind", registrations::memory_kind),
    ("deregister", registrations::deregister),
    ("deregister-under-peer", registrations::deregister_under_peer),
    ("register-rounds", registrations::rounds),
    ("blob", peers::blob),
    ("connect", peers::connect),
    ("disconnect", peers::disconnect),
    ("peer-death", peers::peer_death),
    ("peer-death-idle", peers::peer_death_idle),
    ("bounds", moves::bounds),
    ("read", moves::read),
    ("write", moves::write),
    ("both-ways", moves::both_ways),
    ("large", traffic::large),
    ("empty", moves::empty),
    ("notify", moves::notify),
    ("notify-limits", moves::notify_limits),
    ("cancel", life::cancel),
    ("revoke", life::revoke),
    ("revoke-endpoint", life::revoke_endpoint),
    ("wake", life::wake),
    ("timers", life::timers),
    ("drop", life::drop_in_flight),
    ("queue", volume::queue),
    ("many-small", volume::many_small),
    ("threads", volume::threads),
    ("registrations-under-traffic", traffic::registrations),
    ("peers-under-traffic", traffic::peers),
];

/// What became of the suite.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Clauses that hold.
    pub passed: Vec<&'static str>,
    /// Clauses that could not be tried, and why.
    pub skipped: Vec<(&'static str, String)>,
    /// Clauses that do not hold, and what broke them.
    pub failed: Vec<(&'static str, String)>,
}

impl Report {
    /// Whether nothing failed and exactly the named clauses were skipped.
    #[must_use]
    pub fn holds_except(&self, skipped: &[&str]) -> bool {
        self.failed.is_empty() && self.skipped.iter().map(|(name, _)| *name).eq(skipped.iter().copied())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} clauses hold", self.passed.len())?;
        self.skipped.iter().try_for_each(|(name, why)| write!(f, "\nskipped {name}: {why}"))?;
        self.failed.iter().try_for_each(|(name, why)| write!(f, "\nFAILED {name}: {why}"))
    }
}

/// Runs all clauses.
#[must_use]
pub fn run(harness: &mut dyn Harness) -> Report {
    let mut report = Report::default();
    for (name, clause) in CLAUSES {
        match clause(harness) {
            Ok(Verdict::Passed) => report.passed.push(name),
            Ok(Verdict::Skipped(why)) => report.skipped.push((name, why)),
            Err(why) => report.failed.push((name, why)),
        }
    }
    report
}

/// Returns a failure unless a condition holds.
macro_rules! ensure {
    ($cond:expr, $($why:tt)+) => {
        if !$cond {
            return Err(format!($($why)+));
        }
    };
}
use ensure;
