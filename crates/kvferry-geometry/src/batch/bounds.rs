//! The proof that a batch stays inside its regions, done once on the product form.

use alloc::sync::Arc;
use core::fmt;

use super::{Base, Batch, Part};
use crate::units::{Bytes, RegionId};

/// A side of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    /// Where bytes are read.
    Src,
    /// Where bytes are written.
    Dst,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Src => "source",
            Self::Dst => "destination",
        })
    }
}

/// A batch would leave a region.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BoundsError {
    /// The batch names a region that was not registered.
    #[error("section {section} names {side} region {region}, but {registered} are registered")]
    UnknownRegion {
        /// Section of the batch.
        section: usize,
        /// Which side.
        side: Side,
        /// The region named.
        region: RegionId,
        /// How many regions there are.
        registered: usize,
    },
    /// The batch reaches beyond the end of a region.
    #[error("section {section} reaches byte {end} of {side} region {region}, which ends at {len}")]
    OutOfRegion {
        /// Section of the batch.
        section: usize,
        /// Which side.
        side: Side,
        /// The region.
        region: RegionId,
        /// One past the last byte that the batch touches.
        end: u128,
        /// The region's length.
        len: Bytes,
    },
    /// A loop or pair run of no steps, or a run of no bytes.
    #[error("section {section} has a part with an empty loop, pair run or run")]
    EmptyLoop {
        /// Section of the batch.
        section: usize,
    },
    /// The block ids of a pair run pass the end of their 32 bits.
    #[error("section {section} has a pair run whose block ids overflow")]
    BlockOverflow {
        /// Section of the batch.
        section: usize,
    },
    /// More bytes or descriptors than 64 bits count.
    #[error("the batch counts more bytes or descriptors than 64 bits hold")]
    TooLarge,
}

/// A batch that was proven to stay inside regions of known lengths.
///
/// The only way to make one is [`Batch::check`]; a transport takes nothing else.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BoundedBatch {
    batch: Batch,
    bytes: Bytes,
    src: Arc<[Bytes]>,
    dst: Arc<[Bytes]>,
}

impl BoundedBatch {
    pub(super) fn new(batch: Batch, src: &[Bytes], dst: &[Bytes]) -> Result<Self, BoundsError> {
        let mut total: u128 = 0;
        for (index, section) in batch.sections().iter().enumerate() {
            let (mut src_end, mut dst_end) = (0, 0);
            for part in &section.parts {
                // A section without bases moves nothing, but what its parts count must be countable too.
                let bases = section.bases.len().max(1) as u128;
                total = total.saturating_add(bases.saturating_mul(part_bytes(index, part)?));
                let (s, d) = part_extreme(index, part)?;
                src_end = src_end.max(s);
                dst_end = dst_end.max(d);
            }
            if section.parts.is_empty() {
                continue;
            }
            for base in section.bases.iter() {
                check_side(index, Side::Src, base, src_end, src)?;
                check_side(index, Side::Dst, base, dst_end, dst)?;
            }
        }
        if total > u128::from(u64::MAX) {
            return Err(BoundsError::TooLarge);
        }
        Ok(Self { bytes: batch.bytes(), batch, src: src.into(), dst: dst.into() })
    }

    /// A batch of places that this one lists, so that the proof holds for them as well: no region, block, step or run that is
    /// not one of this batch's or a piece of one, and each at most as often.
    pub(super) fn lesser(&self, batch: Batch) -> Self {
        Self { bytes: batch.bytes(), batch, src: self.src.clone(), dst: self.dst.clone() }
    }

    /// The batch.
    #[must_use]
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Bytes moved in all.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The source regions' lengths that were assumed.
    #[must_use]
    pub fn src_lens(&self) -> &[Bytes] {
        &self.src
    }

    /// The destination regions' lengths that were assumed.
    #[must_use]
    pub fn dst_lens(&self) -> &[Bytes] {
        &self.dst
    }
}

fn check_side(section: usize, side: Side, base: &Base, end: u128, lens: &[Bytes]) -> Result<(), BoundsError> {
    let (region, offset) = match side {
        Side::Src => (base.src_region, base.src_offset),
        Side::Dst => (base.dst_region, base.dst_offset),
    };
    let Some(&len) = lens.get(region.index()) else {
        return Err(BoundsError::UnknownRegion { section, side, region, registered: lens.len() });
    };
    let end = end.saturating_add(u128::from(offset));
    if end > u128::from(len.get()) {
        return Err(BoundsError::OutOfRegion { section, side, region, end, len });
    }
    Ok(())
}

fn part_bytes(section: usize, part: &Part) -> Result<u128, BoundsError> {
    let mut bytes = u128::from(part.nest.run);
    for dim in &part.nest.dims {
        bytes = bytes.saturating_mul(u128::from(dim.count));
    }
    let pairs: u128 = part.pairs.iter().map(|p| u128::from(p.count)).sum();
    if bytes == 0 || part.pairs.iter().any(|p| p.count == 0) {
        return Err(BoundsError::EmptyLoop { section });
    }
    // Also where no pair multiplies it: what a nest counts must be countable.
    if bytes > u128::from(u64::MAX) {
        return Err(BoundsError::TooLarge);
    }
    Ok(bytes.saturating_mul(pairs))
}

/// One past the last byte of a part relative to a base, on both sides.
fn part_extreme(section: usize, part: &Part) -> Result<(u128, u128), BoundsError> {
    let (mut max_src, mut max_dst) = (0u64, 0u64);
    for pair in part.pairs.iter() {
        let steps = u64::from(pair.count) - 1;
        let src = u64::from(pair.src) + steps * u64::from(part.src_step);
        let dst = u64::from(pair.dst) + steps * u64::from(part.dst_step);
        if src > u64::from(u32::MAX) || dst > u64::from(u32::MAX) {
            return Err(BoundsError::BlockOverflow { section });
        }
        max_src = max_src.max(src);
        max_dst = max_dst.max(dst);
    }
    let mut src = u128::from(part.src_add) + u128::from(max_src) * u128::from(part.src_block_stride);
    let mut dst = u128::from(part.dst_add) + u128::from(max_dst) * u128::from(part.dst_block_stride);
    for dim in &part.nest.dims {
        let steps = u128::from(dim.count - 1);
        src = src.saturating_add(steps * u128::from(dim.src_stride));
        dst = dst.saturating_add(steps * u128::from(dim.dst_stride));
    }
    let run = u128::from(part.nest.run);
    if part.pairs.is_empty() { Ok((0, 0)) } else { Ok((src.saturating_add(run), dst.saturating_add(run))) }
}
