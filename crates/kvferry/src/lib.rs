//! Moves KV caches between LLM engines of any two layouts.
//!
//! An engine has one [`Owner`], its control endpoint, and a [`Worker`] for each of its ranks, each in a process of its own
//! or all in one: that is an [`Engine`]. A prefill engine *offers* the blocks of a request and hands the [`Reference`] to its
//! router; a decode engine *pulls* by that reference into its own blocks. What is between them (who reads what from whom, which
//! bytes those are, and whether they can be trusted) is kvferry's business.
//!
//! ```text
//!   engine's scheduler           each rank of the engine
//!   Owner::builder(..)           Worker::builder(..)
//!     |   ^                        |        \
//!     |   '- Unix socket or memory -'         '--- Transport: reads the other engine's ranks
//!     |
//!     '---- TCP or Unix socket, or memory ---- the other engine's Owner
//! ```
//!
//! ```no_run
//! # async fn example(spec: kvferry::ModelSpec, groups: Vec<kvferry::CacheGroup>, offer: kvferry::OfferSpec,
//! #     pull: kvferry::PullSpec) -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use kvferry::{Address, EngineId, Owner};
//!
//! let prefill = Owner::builder(EngineId::new("prefill-0")?, spec.clone(), groups.clone(), 2)
//!     .model_identity("llama-3.1-8b@main")
//!     .listen(Address::loopback(0))
//!     .start()
//!     .await?;
//! // ... two workers join at `prefill.rank_socket()` ...
//! prefill.ready(Duration::from_secs(30)).await?;
//! let reference = prefill.offer(offer).await?;
//!
//! // Elsewhere, with the text that the router carried:
//! let decode = Owner::builder(EngineId::new("decode-0")?, spec, groups, 1).start().await?;
//! decode.ready(Duration::from_secs(30)).await?;
//! let delivered = decode.pull(reference.to_string().parse()?, pull).await?.await?;
//! println!("{} from {} rank pairs", delivered.report().bytes(), delivered.report().pairs.len());
//! # Ok(()) }
//! ```
//!
//! This is the only crate that knows tokio, sockets and the clock; one file reads the clock (`driver.rs`). Everything that
//! is decided is decided in [`kvferry_session`].
//!
//! What returns a future does nothing until that is polled for the first time; await it, or spawn it. What happens to a future that is
//! dropped after that: [`Owner::offer`] and [`Owner::announce`] take the offer back; [`PullHandle`] gives the pull up, which ends when
//! its ranks have stopped; what is said of an [`OfferStream`], [`Owner::withdraw`], [`Owner::decline`] and [`Owner::abort`] happen all the
//! same; [`Owner::drain`] has begun to drain, and shuts down. An [`OfferStream`] that is dropped before it is sealed withdraws its offer.
//!
//! # Push
//!
//! A prefill engine may hand the reference out before it has computed a token: it *announces* blocks, says what is final as layers and
//! chunks finish, and seals the whole. A decode engine that asks to have them *pushed* gets each byte as soon as that is said, so that
//! most of the transfer is over when the prefill is. For the decode engine nothing else changes: the same handle, report and certainty;
//! and a push may be asked for at any time, of whatever was offered or announced.
//!
//! ```no_run
//! # async fn example(prefill: kvferry::Owner, decode: kvferry::Owner, promised: kvferry::OfferSpec,
//! #     pull: kvferry::PullSpec) -> Result<(), Box<dyn std::error::Error>> {
//! use kvferry::{Items, TokenRange, Tokens};
//!
//! let groups = promised.groups.clone();
//! let mut stream = prefill.announce(promised).await?;
//! let handle = decode.pull(stream.reference().clone(), pull.push()).await?;
//! for chunk in 0..4 {
//!     // ... compute 512 tokens ...
//!     let tokens = TokenRange::new(Tokens::new(chunk * 512), Tokens::new((chunk + 1) * 512));
//!     stream.region_ready(Items::Paged, tokens).await?;
//! }
//! stream.seal(groups).await?;
//! let delivered = handle.await?;
//! # Ok(()) }
//! ```
//!
//! Links to other owners are [protected](secure) where other hosts can connect, or the owner does not start
//! (but [see](OwnerBuilder::plaintext_beyond_loopback)).
#![forbid(unsafe_code)]

mod address;
pub mod config;
mod connection;
mod driver;
mod engine;
mod memory;
mod metrics;
mod owner;
mod params;
mod permuter;
mod policy;
mod pull;
mod reference;
pub mod secure;
mod snapshot;
mod spans;
mod stream;
mod worker;

pub use address::{Address, AddressError, MemoryName};
pub use config::{ConfigErrors, EngineConfig};
pub use driver::events::{OwnerEvent, OwnerEvents};
pub use engine::{Engine, EngineBuilder, EngineError};
pub use kvferry_geometry::compat::{CompatOptions, Unmatched};
pub use kvferry_geometry::manifest::{CacheGroup, RankManifest};
pub use kvferry_geometry::request::{
    BlockTable, Checkpoint, DstGroup, DstPaged, DstState, SrcGroup, SrcPaged, SrcState, Tail,
};
pub use kvferry_geometry::spec::ModelSpec;
pub use kvferry_geometry::staged::{CostModel, Place};
pub use kvferry_geometry::units::{BlockId, Bytes, ItemId, RankId, TokenRange, Tokens};
pub use kvferry_proto::handshake::IdentityCheck;
pub use kvferry_proto::lease::Closing;
pub use kvferry_proto::manifest::{EngineManifest, JoinError};
pub use kvferry_proto::names::{Attempt, ContentKey, EngineId, Epoch, Fence, LeaseId, ModelIdentity, NameError};
pub use kvferry_proto::rank::PullId;
pub use kvferry_session::outcome::PairReport;
pub use kvferry_session::owner::{OfferError, USUAL_PRIORITY};
pub use kvferry_session::{
    Admission, Assurance, Backoff, CacheError, Delivered, Failed, FailureCause, GroupOutcome, Holder, LaneReport,
    LaneStanding, LeaseTerms, Limits, Mode, Overlap, Phase, PhaseLimits, Phases, Remedy, Report, StagingRefused,
    StreamError, Ttl, Way,
};
pub use kvferry_transport::preflight::{Policy, PolicyError};
pub use kvferry_transport::{Region, Transport};
pub use memory::RankPort;
pub use metrics::{METRICS, Metric, MetricKind, Transfers};
pub use owner::options::ConnectionLimits;
pub use owner::{CallError, OfferSpec, Owner, OwnerBuilder, PullSpec, ReadyError, StartError};
pub use params::{MODE_KEY, ParamsError, REFERENCE_KEY, Source, TransferParams};
pub use policy::FailurePolicy;
pub use pull::{PullError, PullHandle, PullProgress};
pub use reference::{Reference, ReferenceError};
pub use snapshot::{LeaseSnapshot, LinkSnapshot, PullSnapshot, QuarantineSnapshot, Snapshot};
pub use stream::{Items, OfferStream};
pub use worker::{LaneBoard, ReadyPort, StagingOptions, Worker, WorkerBuilder, WorkerError, WorkerHandle};
