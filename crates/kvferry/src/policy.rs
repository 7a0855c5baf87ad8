//! What becomes of a pull that fails, as the engine chooses.

use kvferry_session::owner::{FailurePolicy as Policy, Source};
use kvferry_session::{PhaseLimits, Remedy};

use crate::reference::Reference;

/// What is done where a pull fails; the same for pull and push.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailurePolicy {
    /// How often each source may be tried, at least once. A further attempt is made only if it takes from other replicas than the one that
    /// failed, and when everything of that one has stopped. Those of a prefill that begins anew don't count.
    pub attempts: u32,
    /// Other offers of the same, in order: the next one is tried when one has failed and nothing of it can write our blocks any more.
    /// Not where the request itself can't be served by anybody. What is not tried any more is declined by nobody: it ends by itself.
    pub others: Vec<Reference>,
    /// What the engine will do when all have failed.
    pub then: Remedy,
    /// How long each phase may take; in all, the pull has its deadline.
    pub within: PhaseLimits,
}

impl Default for FailurePolicy {
    /// Two attempts, no others, and that was it.
    fn default() -> Self {
        let Policy { attempts, then, within, .. } = Policy::default();
        Self { attempts, others: Vec::new(), then, within }
    }
}

impl From<FailurePolicy> for Policy {
    fn from(p: FailurePolicy) -> Self {
        let source = |r: Reference| Source { address: r.address().to_string(), fence: r.fence() };
        let FailurePolicy { attempts, others, then, within } = p;
        Self { attempts, others: others.into_iter().map(source).collect(), then, within }
    }
}
