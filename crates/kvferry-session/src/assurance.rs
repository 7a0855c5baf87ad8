//! How sure the consumer is of its bytes.
//!
//! | level | what is checked |
//! |---|---|
//! | `Fenced` | every named source was read and every operation ended well; the producer held the lease meanwhile |
//! | `Sampled` | not served yet: refused when it is asked for |
//! | `Full` | `Fenced`, and both sides digested all moved bytes in batch order, and the digests are equal |
//!
//! Only `Full` may be called *verified*. [`Assured`] is the proof that the level was reached; it can be made nowhere else.

use kvferry_geometry::units::{Bytes, RankId};
pub use kvferry_proto::rank::Assurance;
use kvferry_proto::request::Ended;

/// The level that was asked for was not reached.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotAssured {
    /// A level that is not served.
    #[error("assurance {0} is not served yet; ask for fenced or full")]
    Unsupported(Assurance),
    /// Not all named sources were read.
    #[error("not every named source was read")]
    Incomplete,
    /// A rank compared other than all its bytes.
    #[error("rank {rank} read {read} and compared {compared}")]
    NotCompared {
        /// The rank.
        rank: RankId,
        /// Bytes read.
        read: Bytes,
        /// Bytes compared.
        compared: Bytes,
    },
}

/// The level that a request asked for was reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Assured {
    level: Assurance,
}

impl Assured {
    /// The level.
    #[must_use]
    pub fn level(self) -> Assurance {
        self.level
    }

    /// Looks at how the reads ended.
    ///
    /// # Errors
    /// Why the level was not reached.
    pub(crate) fn check(level: Assurance, ended: &Ended) -> Result<Self, NotAssured> {
        served(level)?;
        if !ended.is_complete() {
            return Err(NotAssured::Incomplete);
        }
        if level == Assurance::Full {
            for (&rank, report) in ended.results().iter().filter_map(|(rank, r)| Some((rank, r.as_ref().ok()?))) {
                let read = Bytes::new(report.sources.iter().map(|s| s.bytes.get()).sum());
                let compared = report.compared;
                if read != compared {
                    return Err(NotAssured::NotCompared { rank, read, compared });
                }
            }
        }
        Ok(Self { level })
    }
}

/// Whether a level can be asked for.
///
/// # Errors
/// If it is not served.
pub(crate) fn served(level: Assurance) -> Result<(), NotAssured> {
    match level {
        Assurance::Fenced | Assurance::Full => Ok(()),
        Assurance::Sampled => Err(NotAssured::Unsupported(level)),
    }
}
