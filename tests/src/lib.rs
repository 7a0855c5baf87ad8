//! Cross-crate tests of kvferry, and what they share: engines by hand ([`by_hand`]), of well-known shapes ([`shapes`]) and at random
//! ([`random`]), engines that run ([`running`]), requests that any two of them serve in every mode ([`moved`]), and what stands
//! between two of them ([`between`]), ends one without a word ([`mortal`]), and loses a message of every kind ([`losses`]). What is for people to
//! look at is looked at by a real [`browser`].
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "generators of tests")]

pub mod between;
pub mod browser;
pub mod by_hand;
pub mod by_hand_states;
pub mod losses;
pub mod mortal;
pub mod moved;
pub mod over_mem;
pub mod random;
pub mod running;
pub mod shapes;
mod skip;

pub use random::{Case, Choices, Plan, cases, check_cases, run_case, sample};
pub use skip::skip;

/// The README's example, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
