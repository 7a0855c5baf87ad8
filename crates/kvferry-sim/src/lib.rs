//! A world of engines that steps *real* sessions on a virtual clock, all of it drawn from one seed.
//!
//! [`World`] holds owners and ranks of several engines ([`kvferry_session`]), links between them that are late, break and are
//! overtaken, and a data plane ([`fabric`]) whose operations take time, fail, end in doubt and land late. Engines compute caches,
//! offer, read and give back, and use every block again at once. After everything that happens, the invariants of
//! [`Violation`] must hold. One thread, no clock, no socket: a seed runs the same every time, so a failing one is run again
//! with parts left out ([`Mask`]) until little is left ([`shrink`]).
//!
//! | module | what it is |
//! |---|---|
//! | [`world`] | engines, links, what happens next |
//! | [`trial`] | the script that looks for faults |
//! | [`fabric`], [`transport`] | the data plane, and a rank's end of it |
//! | [`shape`], [`places`] | what the engines are, and what lies where |
//! | [`plan`], [`faults`] | what they want of each other, and what goes wrong |
//! | [`flows`] | how fast bytes go where flows share links |
//! | [`violation`] | what must never happen |
//! | [`mask`], [`shrink`] | leaving things out |
//! | [`rng`], [`clock`], [`queue`], [`stats`] | chance, clocks that go wrong, the order of things, counts |
//!
//! It is for finding what nobody thought of: it proves nothing, and it has no part in the product.
#![forbid(unsafe_code)]

pub mod clock;
mod engine;
pub mod fabric;
pub mod faults;
pub mod flows;
pub mod mask;
mod memory;
pub mod places;
pub mod plan;
pub mod queue;
pub mod rng;
pub mod shape;
pub mod shrink;
pub mod stats;
pub mod transport;
pub mod trial;
pub mod violation;
pub mod world;

pub use faults::FaultKind;
pub use mask::{Mask, Replay};
pub use stats::Stats;
pub use transport::SimTransport;
pub use violation::Violation;
pub use world::{Outcome, World, WorldConfig};
