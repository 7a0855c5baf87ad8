//! One suite for all backends and wrappers.
pub mod sample;
