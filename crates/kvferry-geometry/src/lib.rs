//! Pure geometry of KV caches: what each rank holds, where it lies, and the plan that moves it.
//!
//! This crate is `no_std`: it knows no address, clock, device, socket or peer. It takes *descriptions* (a [`spec`] of
//! the model's cache items, a [`placement`] for each rank, a [`layout`] of each rank's memory), proves them once
//! ([`manifest::Manifest::new`]), and from two proven manifests computes who reads what from whom ([`peers`]) and which
//! byte ranges those are ([`plan`], multiplied by a [`request`]), all of them or those that became final between two
//! [`watermarks`].
//!
//! The unit of truth is the *logical byte*: (item, token, head, component, byte), or (item, part, row, unit, byte) of a
//! state. Everything that differs between two engines (parallelism, block size, layout, grouping, order) is data in their
//! manifests; no function here branches on it.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod batch;
pub mod compat;
pub mod digest;
pub mod layout;
pub mod manifest;
pub mod peers;
pub mod placement;
pub mod plan;
pub mod request;
pub mod spec;
pub mod staged;
mod token_set;
pub mod units;
pub mod watermarks;
pub mod zero;
