//! Random requests between random engines, for properties that hold the planner and the oracle together.
//!
//! [`Case`] is one random request between two random engines of one random model, valid by construction. It is made
//! from a list of numbers ([`Choices`]) in which zero is always the simplest choice, so that shrinking a failing case
//! is shrinking numbers. [`check_cases`] runs a property over many of them and prints the seed when it fails.
//!
//! This module uses nothing of its crate: the command that plants faults in the planner builds it alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "generators of tests")]

mod case;
mod choices;
mod engine;
mod features;
mod model;
mod odd_layout;
mod runner;

pub use case::{Case, Plan};
pub use choices::Choices;
pub use engine::{Draft, Engine, Kin, RefusedDraft, Usual};
pub use model::{Model, random_model};
pub use runner::{cases, check_cases, run_case, sample, seed};

/// A number that is known to be small.
pub(crate) fn small(x: u64) -> u32 {
    u32::try_from(x).expect("a small number")
}
