//! The transport contract of kvferry, its in-memory reference, wrappers and conformance suite.
//!
//! A [`Transport`] moves the bytes of a proven batch ([`BoundedBatch`](kvferry_geometry::batch::BoundedBatch)) between
//! registered [`Region`]s of two ranks and says how each move ended. It knows nothing of layers, heads, tokens,
//! blocks or requests, and no backend but [`mem`] lives here: a backend is a crate of its own.
//!
//! | module | what it is |
//! |---|---|
//! | [`Transport`] | the contract: every clause of it has a test in [`conformance`] |
//! | [`Region`] | memory that may be registered; its one unsafe constructor is where foreign memory is promised |
//! | [`blob`] | the frame of what ranks tell each other about their registrations, and its validation |
//! | [`strips`], [`copy`] | a batch walked by loops, cut at any byte, and copied; for backends that copy themselves |
//! | [`access`] | asking before touching, for backends on one-sided lanes |
//! | [`admit`], [`table`] | the checks every backend runs on a submission before anything is posted, and on a registration |
//! | [`mem`] | the reference backend, inside one process, with faults on demand |
//! | [`fault`], [`throttle`], [`observe`] | wrappers that are transports |
//! | [`negotiate`] | several backends of one rank as one transport, that takes for each peer one that both have |
//! | [`preflight`] | what a lane must be, and measuring what it is |
//! | [`topology`] | which network device is near which accelerator, and which rank gets which |
//! | [`conformance`] | one suite for all backends and wrappers |
//!
//! Invariants: nothing outside a registered region is ever touched; every operation ends exactly once; a registration
//! outlives every operation that names it; unsafe code stands only in [`region`] and [`copy`].
#![deny(unsafe_code)]

pub mod access;
pub mod admit;
pub mod blob;
pub mod conformance;
#[allow(unsafe_code, reason = "it copies between regions by pointer")]
pub mod copy;
pub mod error;
pub mod fault;
mod gate;
pub mod mem;
pub mod negotiate;
pub mod observe;
pub mod preflight;
#[allow(unsafe_code, reason = "foreign memory is promised here, once")]
pub mod region;
mod rng;
pub mod strips;
pub mod table;
pub mod throttle;
pub mod topology;
mod transport;
pub mod types;

pub use error::{
    ConnectError, DeregisterError, Fault, LostCause, RegisterError, RevokeError, SubmitError, TransferError, UnknownOp,
    UnknownPeer,
};
pub use region::{MemoryKind, Region};
pub use transport::Transport;
pub use types::{
    Capabilities, EndpointId, Event, Lane, LaneKind, Measured, OpId, OpKind, Outcome, PeerId, PeerInfo, Revocation,
    RevokeScope, Stats, Submission,
};
