//! Owned cache buffers for kvferry: host and shared memory, patterns, guard bands.
//!
//! | module | what it is |
//! |---|---|
//! | [`buffer`] | [`HostBuffer`] and [`SharedBuffer`]: memory that we map and own; the only unsafe code here |
//! | [`available`] | how much memory there is to have |
//! | [`pattern`] | bytes as a function of their logical coordinate, to fill and to check at several GB/s |
//! | [`guard`] | bands around a region that tell where they were touched |
//!
//! Buffers give [`Region`](kvferry_transport::Region)s, and everything else works on regions: so a rank without unsafe
//! code can make memory and register it. The kernel that copies batches is
//! [`kvferry_transport::copy`], because the in-memory transport needs it as well.
//!
//! Not here: registering, mapping a peer's memory (the backends do that), and device memory.
#![deny(unsafe_code)]

pub mod available;
#[allow(unsafe_code, reason = "it maps memory and promises it as a region")]
pub mod buffer;
pub mod guard;
pub mod pattern;

pub use buffer::{BufferError, BufferOptions, HostBuffer, SharedBuffer};
