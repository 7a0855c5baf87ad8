//! A share of a batch as pieces, each contiguous on both sides.

use std::ops::Range;
use std::sync::Arc;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::RegionId;
use kvferry_transport::strips::{Scatter, Strip, Strips};

/// The longest piece: bounds how long a rail is inside of UCX for one, and how much is under way at once.
pub(crate) const MAX_PIECE: u64 = 1 << 20;

/// Contiguous bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    pub(crate) src_region: RegionId,
    pub(crate) dst_region: RegionId,
    pub(crate) src_offset: u64,
    pub(crate) dst_offset: u64,
    pub(crate) len: u64,
}

/// Where the walk stands inside of what [`Strips`] gave last.
#[derive(Debug)]
enum Cursor {
    Between,
    /// In run `.1`, `.2` bytes of it done.
    Strip(Strip, u64, u64),
    /// At pair `.1`, `.2` bytes of it done.
    Scatter(Scatter<'static>, usize, u64),
}

/// The pieces between two byte positions, without allocation.
#[derive(Debug)]
pub(crate) struct Walk {
    // Both borrow from the batch below, which is never changed or moved: it is in an `Arc`, dropped after them.
    cursor: Cursor,
    strips: Strips<'static>,
    _batch: Arc<BoundedBatch>,
}

impl Walk {
    pub(crate) fn new(batch: Arc<BoundedBatch>, range: Range<u64>) -> Self {
        // SAFETY: the reference is used by this value only, which holds the `Arc` until the borrowers are gone (fields are dropped
        // in order), and a `BoundedBatch` has no interior mutability. No method hands out the lifetime.
        let borrowed: &'static BoundedBatch = unsafe { &*Arc::as_ptr(&batch) };
        Self { cursor: Cursor::Between, strips: Strips::new(borrowed, range), _batch: batch }
    }

    /// The next piece; `None` at the end.
    pub(crate) fn next(&mut self) -> Option<Piece> {
        loop {
            match &mut self.cursor {
                Cursor::Between => {
                    self.cursor = match self.strips.next_scatter() {
                        Some(scatter) => Cursor::Scatter(scatter, 0, 0),
                        None => Cursor::Strip(self.strips.next()?, 0, 0),
                    }
                }
                Cursor::Strip(strip, run, done) => {
                    if *run == strip.count {
                        self.cursor = Cursor::Between;
                        continue;
                    }
                    let len = (strip.run - *done).min(MAX_PIECE);
                    let piece = Piece {
                        src_region: strip.src_region,
                        dst_region: strip.dst_region,
                        src_offset: strip.src_offset + *run * strip.src_stride + *done,
                        dst_offset: strip.dst_offset + *run * strip.dst_stride + *done,
                        len,
                    };
                    *done += len;
                    if *done == strip.run {
                        (*run, *done) = (*run + 1, 0);
                    }
                    return Some(piece);
                }
                Cursor::Scatter(scatter, at, done) => {
                    let Some(pair) = scatter.pairs.get(*at) else {
                        self.cursor = Cursor::Between;
                        continue;
                    };
                    let len = (scatter.run - *done).min(MAX_PIECE);
                    let piece = Piece {
                        src_region: scatter.src_region,
                        dst_region: scatter.dst_region,
                        src_offset: scatter.src_offset + u64::from(pair.src) * scatter.src_block_stride + *done,
                        dst_offset: scatter.dst_offset + u64::from(pair.dst) * scatter.dst_block_stride + *done,
                        len,
                    };
                    *done += len;
                    if *done == scatter.run {
                        (*at, *done) = (*at + 1, 0);
                    }
                    return Some(piece);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_transport::Region;
    use kvferry_transport::conformance::sample::{Memory, Rng, sample};
    use kvferry_transport::strips::shares;

    use super::*;

    #[test]
    fn pieces_are_the_batch() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let sample = sample(&mut rng, 20_000);
            let memory = Memory::new(&sample, &mut rng, |len| Region::zeroed(len).unwrap());
            for share in shares(&sample.batch, 1 + usize::try_from(seed % 3).unwrap()) {
                let mut walk = Walk::new(sample.batch.clone(), share);
                while let Some(piece) = walk.next() {
                    let mut bytes = vec![0; usize::try_from(piece.len).unwrap()];
                    memory.src[piece.src_region.index()].read(piece.src_offset, &mut bytes).unwrap();
                    memory.dst[piece.dst_region.index()].write(piece.dst_offset, &bytes).unwrap();
                }
            }
            memory.check(&sample).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
    }
}
