//! Owned cache buffers for kvferry: host and shared memory, patterns, guard bands; local permutations.
//!
//! | module | what it is |
//! |---|---|
//! | [`buffer`] | [`HostBuffer`] and [`SharedBuffer`]: memory that we map and own |
//! | [`available`] | how much memory there is to have |
//! | [`pattern`] | bytes as a function of their logical coordinate, to fill and to check at several GB/s |
//! | [`permute`] | batches done as local copies by several threads: what staging does besides the transfer |
//! | [`guard`] | bands around a region that tell where they were touched |
//!
//! Buffers give [`Region`](kvferry_transport::Region)s, and everything else works on regions: so a rank without unsafe
//! code can make memory and register it. Unsafe code stands in `buffer` and `permute` alone. The kernel of transports that
//! copy is [`kvferry_transport::copy`], because the in-memory one needs it as well.
//!
//! Not here: registering, mapping a peer's memory (the backends do that), and device memory.
#![deny(unsafe_code)]

pub mod available;
#[allow(unsafe_code, reason = "it maps memory and promises it as a region")]
pub mod buffer;
pub mod guard;
pub mod pattern;
#[allow(unsafe_code, reason = "it copies between regions that it has checked against a proof")]
pub mod permute;

pub use buffer::{BufferError, BufferOptions, HostBuffer, SharedBuffer};
pub use permute::{Permute, PermuteError};
