//! Moves KV caches between LLM engines of any two layouts.
//!
//! An engine has one [`Owner`], its control endpoint, and a [`Worker`] for each of its ranks, each in a process of its own
//! or all in one. A prefill engine *offers* the blocks of a request and hands the [`Reference`] to its router; a decode
//! engine *pulls* by that reference into its own blocks. What is between them (who reads what from whom, which bytes those
//! are, and whether they can be trusted) is kvferry's business.
//!
//! ```text
//!   engine's scheduler           each rank of the engine
//!   Owner::builder(..)           Worker::builder(..)
//!     |   ^                        |        \
//!     |   '---- Unix socket -------'         '--- Transport: reads the other engine's ranks
//!     |
//!     '---- TCP or Unix socket ---- the other engine's Owner
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
//! What this crate does not do yet: authentication (so it listens on loopback and Unix sockets unless
//! [told otherwise](OwnerBuilder::plaintext_beyond_loopback)), lease expiry, retries, push.
#![forbid(unsafe_code)]

mod address;
mod connection;
mod driver;
mod owner;
mod permuter;
mod pull;
mod reference;
mod worker;

pub use address::{Address, AddressError};
pub use kvferry_geometry::compat::{CompatOptions, Unmatched};
pub use kvferry_geometry::manifest::{CacheGroup, RankManifest};
pub use kvferry_geometry::request::{
    BlockTable, Checkpoint, DstGroup, DstPaged, DstState, SrcGroup, SrcPaged, SrcState, Tail,
};
pub use kvferry_geometry::spec::ModelSpec;
pub use kvferry_geometry::staged::{CostModel, Place};
pub use kvferry_geometry::units::{BlockId, Bytes, RankId, TokenRange, Tokens};
pub use kvferry_proto::handshake::IdentityCheck;
pub use kvferry_proto::lease::Closing;
pub use kvferry_proto::manifest::{EngineManifest, JoinError};
pub use kvferry_proto::names::{ContentKey, EngineId, Epoch, Fence, LeaseId, ModelIdentity, NameError};
pub use kvferry_session::outcome::PairReport;
pub use kvferry_session::owner::OfferError;
pub use kvferry_session::{
    Assurance, CacheError, Delivered, Failed, FailureCause, GroupOutcome, Holder, LaneReport, LaneStanding, Overlap,
    Report, StagingRefused, Way,
};
pub use kvferry_transport::preflight::{Policy, PolicyError};
pub use kvferry_transport::{Region, Transport};
pub use owner::{CallError, OfferSpec, Owner, OwnerBuilder, OwnerEvent, OwnerEvents, PullSpec, ReadyError, StartError};
pub use pull::{PullError, PullHandle};
pub use reference::{Reference, ReferenceError};
pub use worker::{LaneBoard, StagingOptions, Worker, WorkerBuilder, WorkerError, WorkerHandle};
