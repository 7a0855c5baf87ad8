//! The slow oracle: what a transfer must do to memory, found by walking logical coordinates one by one.
//!
//! But for [`prove`] it reads declared data only (specs, placements, views, block tables), and shares no arithmetic with the planner:
//! tokens are dealt out one at a time, block tables are walked entry by entry, batches are expanded by the formula in
//! [`kvferry_geometry::batch`] with plain loops. A fault in the planner's arithmetic therefore has no twin here.
//!
//! - [`Transfer`] is one request between two manifests, as plain numbers; it tells what must happen to each token.
//! - [`fill_source`] writes the producer's memory: held bytes are a function of their coordinate, all others poison.
//! - [`prove`] plans a request, carries it out and compares, in one call.
//! - [`Execution`] applies batches and zero ranges, counts the writes of each byte, and [`Execution::finish`]
//!   compares every byte of the consumer with what it would have computed itself, every other byte with what it was.
//! - [`unusual`] deals heads and ranks out by the usual rules and finds a placement that differs.
//! - [`uncovered`] walks an engine's placements for bytes that no rank holds.
//!
//! It is slow and meant for small caches. It is not a reference implementation to call from the product.
#![forbid(unsafe_code)]

mod compare;
mod cover;
mod execute;
mod memory;
mod place;
mod prove;
mod transfer;
mod walk;

pub use compare::{Mismatch, Report, Verdict};
pub use cover::{Missing, uncovered};
pub use execute::{Execution, Expansion, Finding, expand, flatten, joined};
pub use memory::{Memory, Stamp, fill_source};
pub use place::{Share, unusual, usual_heads};
pub use prove::{Outcome, carry_out, prove};
pub use transfer::{DstTable, Fate, Fates, Gap, SrcTable, Transfer, unshareable};
pub use walk::{Cell, Coordinate, Listed, Table, dealt, walk};

/// A 64-bit number as an index; beyond the address space it is an index that nothing has.
fn at(index: u64) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}
