//! Bytes of large regions, made and looked at a piece at a time: what a seed and a place determine, and sums that don't depend on
//! the order of blocks.

use std::sync::Arc;

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};

use crate::region::Region;

/// The seed of what a peer's memory holds at first.
pub const PEER: u64 = 7;

const PIECE: usize = 64 << 10;

/// Writes what `seed` gives for places counted from `offset`.
///
/// # Errors
/// If the bytes leave the region, or the CPU can't reach it.
pub fn fill(region: &Region, offset: u64, len: u64, seed: u64) -> Result<(), String> {
    pieces(len, |at, piece| {
        make(piece, at, seed);
        region.write(offset + at, piece).map_err(|e| e.to_string())
    })
}

/// Whether the region holds what [`fill`] writes.
///
/// # Errors
/// The first place that differs.
pub fn check(region: &Region, offset: u64, len: u64, seed: u64) -> Result<(), String> {
    let mut expected = vec![0; PIECE];
    pieces(len, |at, piece| {
        region.read(offset + at, piece).map_err(|e| e.to_string())?;
        let expected = &mut expected[..piece.len()];
        make(expected, at, seed);
        if piece == expected {
            return Ok(());
        }
        let place = piece.iter().zip(expected.iter()).position(|(a, b)| a != b).unwrap_or(0);
        let (got, want) = (piece[place], expected[place]);
        Err(format!("byte {} is {got:#04x} instead of {want:#04x}", offset + at + place as u64))
    })
}

/// What block `index` of [`fill`]'s bytes is.
#[must_use]
pub fn block(index: u64, len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    make(&mut out, index * len as u64, seed);
    out
}

/// A sum over the blocks of a range, each with its index: equal for equal blocks at equal places.
///
/// # Errors
/// If the bytes leave the region, or the CPU can't reach it.
pub fn sum(region: &Region, offset: u64, len: u64, block: usize) -> Result<u64, String> {
    sum_by(region, offset, len, block, |index| index)
}

/// As [`sum`] would be over the blocks in reverse order.
///
/// # Errors
/// As for `sum`.
pub fn sum_reversed(region: &Region, offset: u64, len: u64, block: usize) -> Result<u64, String> {
    let last = (len / block as u64).saturating_sub(1);
    sum_by(region, offset, len, block, |index| last - index)
}

fn sum_by(region: &Region, offset: u64, len: u64, block: usize, index: impl Fn(u64) -> u64) -> Result<u64, String> {
    let mut bytes = vec![0; block];
    let mut total = 0u64;
    for i in 0..len / block as u64 {
        region.read(offset + i * block as u64, &mut bytes).map_err(|e| e.to_string())?;
        total = total.wrapping_add(hash(&bytes, index(i)));
    }
    Ok(total)
}

/// Eight bytes at a time; the last few as zeros beyond the end.
fn hash(bytes: &[u8], seed: u64) -> u64 {
    bytes.chunks(8).fold(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, |h, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (h ^ u64::from_le_bytes(word)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
    })
}

/// A batch of one region to one region, `len` bytes by blocks of `block`, whose order is reversed. `ours` bytes stand before and
/// behind the blocks in the destination or source region that is ours; the peer's has just the blocks. `None` if `len` is not whole
/// blocks, or too many.
#[must_use]
pub fn reversed(len: u64, block: u64, margin: u64, reads: bool) -> Option<Arc<BoundedBatch>> {
    let blocks = u32::try_from(len.checked_div(block)?).ok()?;
    if len == 0 || u64::from(blocks) * block != len {
        return None;
    }
    let (src_offset, dst_offset) = if reads { (0, margin) } else { (margin, 0) };
    let base = Base { src_region: RegionId::ZERO, dst_region: RegionId::ZERO, src_offset, dst_offset };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: block,
        dst_block_stride: block,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(block),
        pairs: (0..blocks).map(|i| PairRun { src: i, dst: blocks - 1 - i, count: 1 }).collect::<Vec<_>>().into(),
    };
    let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    let (ours, peers) = ([Bytes::new(len + 2 * margin)], [Bytes::new(len)]);
    let checked = if reads { batch.check(&peers, &ours) } else { batch.check(&ours, &peers) };
    checked.ok().map(Arc::new)
}

fn pieces(len: u64, mut each: impl FnMut(u64, &mut [u8]) -> Result<(), String>) -> Result<(), String> {
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    while at < len {
        let n = usize::try_from(len - at).map_or(PIECE, |left| left.min(PIECE));
        each(at, &mut piece[..n])?;
        at += n as u64;
    }
    Ok(())
}

/// The bytes from place `at`, which is a multiple of eight.
fn make(out: &mut [u8], at: u64, seed: u64) {
    let first = at / 8;
    for (i, chunk) in (0..).zip(out.chunks_mut(8)) {
        let word = (first + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        chunk.copy_from_slice(&(word ^ (word >> 31)).to_le_bytes()[..chunk.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_checks_and_what_is_changed_does_not() {
        let region = Region::zeroed(200_003).unwrap();
        fill(&region, 3, 200_000, 5).unwrap();
        check(&region, 3, 200_000, 5).unwrap();
        assert!(check(&region, 3, 200_000, 6).is_err());
        region.write(150_000, &[1]).unwrap();
        let why = check(&region, 3, 200_000, 5).unwrap_err();
        assert!(why.contains("byte 150000 is 0x01"), "{why}");
        assert!(fill(&region, 4, 200_000, 5).is_err());
        assert_eq!(block(2, 4096, 5), {
            fill(&region, 0, 200_000, 5).unwrap();
            region.to_vec().unwrap()[8192..12_288].to_vec()
        });
    }

    #[test]
    fn sums_know_places_and_reversal() {
        let (a, b) = (Region::zeroed(64 * 512).unwrap(), Region::zeroed(64 * 512).unwrap());
        fill(&a, 0, 64 * 512, 1).unwrap();
        let bytes = a.to_vec().unwrap();
        let turned: Vec<u8> = bytes.chunks(512).rev().flatten().copied().collect();
        b.write(0, &turned).unwrap();
        let whole = 64 * 512;
        assert_eq!(sum(&b, 0, whole, 512), sum_reversed(&a, 0, whole, 512));
        assert_ne!(sum(&b, 0, whole, 512), sum(&a, 0, whole, 512));
    }

    #[test]
    fn batches_are_whole_blocks() {
        let batch = reversed(1 << 20, 4096, 100, true).unwrap();
        assert_eq!((batch.bytes().get(), batch.batch().descriptors()), (1 << 20, 256));
        assert!(reversed(4097, 4096, 0, true).is_none() && reversed(0, 4096, 0, false).is_none());
        assert!(reversed(1, 0, 0, false).is_none());
    }
}
