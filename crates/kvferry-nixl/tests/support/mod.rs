//! What the tests share: endpoints or a skip, memory, a clock, and endpoints driven to an event.
#![allow(dead_code, unused_imports, clippy::unwrap_used, clippy::panic, reason = "tests; each binary uses its part")]

use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_nixl::{NixlConfig, NixlTransport};
pub(crate) use kvferry_transport::conformance::drive::{connected, drive, end_of};
use kvferry_transport::{Region, Transport};

/// Whether NIXL is here; tells of the skip if not.
pub(crate) fn has_nixl() -> bool {
    match kvferry_nixl::available() {
        Ok(_) => true,
        Err(error) => {
            kvferry_tests::skip("nixl", &error.to_string());
            false
        }
    }
}

pub(crate) fn endpoint() -> NixlTransport {
    NixlTransport::new(NixlConfig::default()).unwrap()
}

/// Memory that can be looked at from the side, the same as an owner lends it, and what tells whether that is still held.
pub(crate) fn lent(len: usize) -> (Region, Region, Weak<Region>) {
    let memory = Region::zeroed(len).unwrap();
    let owner = Arc::new(memory.clone());
    let held = Arc::downgrade(&owner);
    let start = NonNull::new(memory.as_ptr()).unwrap();
    // SAFETY: the owner holds the memory, whose region was promised the same.
    let lent = unsafe { Region::from_raw(start, len, memory.kind(), owner) };
    (memory, lent, held)
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut met: impl FnMut() -> bool) {
    let start = Instant::now();
    while !met() {
        assert!(start.elapsed() < Duration::from_secs(20), "not in time: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Bytes that a seed and a place determine.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// A batch that copies one region to another of the same length, block by block with the block order reversed.
pub(crate) fn reversed(len: usize, block: usize) -> Arc<BoundedBatch> {
    reversed_into(len, block, 0)
}

/// As `reversed`, into another region.
pub(crate) fn reversed_into(len: usize, block: usize, dst: u32) -> Arc<BoundedBatch> {
    let blocks = u32::try_from(len / block).unwrap();
    let base = Base { src_region: RegionId::new(0), dst_region: RegionId::new(dst), src_offset: 0, dst_offset: 0 };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: block as u64,
        dst_block_stride: block as u64,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(block as u64),
        pairs: (0..blocks).map(|i| PairRun { src: i, dst: blocks - 1 - i, count: 1 }).collect::<Vec<_>>().into(),
    };
    let (src, dst) = (vec![Bytes::new(len as u64)], vec![Bytes::new(len as u64); dst as usize + 1]);
    Arc::new(Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]).check(&src, &dst).unwrap())
}

/// What `reversed` makes of bytes.
pub(crate) fn reverse_blocks(bytes: &[u8], block: usize) -> Vec<u8> {
    bytes.chunks(block).rev().flatten().copied().collect()
}
