//! Cross-crate tests of kvferry, and the generators that they share.
//!
//! [`Case`] is one random request between two random engines of one random model, valid by construction. It is made
//! from a list of numbers ([`Choices`]) in which zero is always the simplest choice, so that shrinking a failing case
//! is shrinking numbers. [`check_cases`] runs a property over many of them and prints the seed when it fails.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "generators of tests")]

pub mod by_hand;
mod case;
mod choices;
mod engine;
mod model;
mod odd_layout;
pub mod over_mem;
mod runner;
mod skip;

pub use case::{Case, Outcome, Plan};
pub use choices::Choices;
pub use engine::{Draft, Engine, RefusedDraft};
pub use model::random_items;
pub use runner::{cases, check_cases, run_case, sample, seed};
pub use skip::skip;

/// A number that is known to be small.
pub(crate) fn small(x: u64) -> u32 {
    u32::try_from(x).expect("a small number")
}

/// The README's example, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
