//! Runtime-free orchestration: what a rank does with its memory and its transport, and what an owner decides.
//!
//! [`RankSession`] serves one rank: it registers the cache, reads what its owner orders over its [`Transport`], zeroes
//! tails, digests and compares. [`OwnerSession`] serves one engine: it collects its ranks, meets other owners, keeps the
//! leases of what it offers and decides how each of its requests ends. Both take messages and the time, and give messages;
//! neither has a thread, a socket, a clock or a runtime. What drives them is the `kvferry` crate, or a test.
//!
//! | module | what it is |
//! |---|---|
//! | [`cache`] | a rank's regions, checked against its layout and registered |
//! | [`pairing`] | what two engines are to each other: compatible or not, maps of peers, plans; cached |
//! | [`bind`] | the proof that a batch stays inside what is registered |
//! | [`runs`] | digests of a batch's bytes in the order of its runs |
//! | [`locate`] | which item and block a destination byte belongs to |
//! | [`rank`] | one rank: pulls, whose read is posted next, lanes, staging, digests |
//! | [`staging`] | who may use a rank's staging memory, and in which order |
//! | [`owner`] | one engine: ranks, links, leases, requests, and which blocks are lent to whom |
//! | [`snapshot`] | an owner at a moment |
//! | [`assurance`], [`outcome`] | how sure the consumer is; the one way to say "delivered" |
//!
//! Invariants: a batch is submitted only after its bounds were proven; a request ends exactly once; [`Delivered`] is made
//! in one function, from the producer's *Held* for complete reads and a proof that only [`assurance`] makes.
//!
//! [`Transport`]: kvferry_transport::Transport
#![forbid(unsafe_code)]

pub mod assurance;
pub mod bind;
pub mod cache;
pub mod locate;
pub mod outcome;
pub mod owner;
pub mod pairing;
pub mod rank;
pub mod runs;
pub mod snapshot;
pub mod staging;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod world;

pub use assurance::Assurance;
pub use cache::{CacheError, LocalCache};
pub use outcome::{Delivered, Failed, FailureCause, GroupOutcome, Phase, Phases, Report};
pub use owner::{
    Backoff, FailurePolicy, Holder, LeaseTerms, Limits, Mode, Overlap, OwnerConfig, OwnerSession, PhaseLimits, Remedy,
    Source, StreamError, Ttl,
};
pub use rank::{
    Admission, AdmissionRefused, LaneReport, LaneStanding, RankSession, StagingConfig, StagingRefused, Way,
};
pub use staging::StagingPool;
