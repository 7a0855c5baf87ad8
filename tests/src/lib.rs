//! Cross-crate tests of kvferry, and what they share: engines by hand ([`by_hand`]) and at random ([`random`]), engines that
//! run ([`running`]), and what stands between two of them ([`between`]).
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "generators of tests")]

pub mod between;
pub mod by_hand;
pub mod by_hand_states;
pub mod over_mem;
pub mod random;
pub mod running;
mod skip;

pub use random::{Case, Choices, Plan, cases, check_cases, run_case, sample};
pub use skip::skip;

/// The README's example, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
