//! Digests of a batch's bytes in the order of its runs.
//!
//! The runs of a batch, in the order of its cursor, are one stream of bytes: the same stream at the source and at the
//! destination, whatever the two layouts. [`RunDigester`] digests windows of that stream in pieces, a bounded amount of work
//! at a time, so that whoever drives it stays responsive.

use std::sync::Arc;

use blake3::Hasher;
use kvferry_geometry::batch::{BoundedBatch, Side};
use kvferry_geometry::units::RegionId;
use kvferry_proto::peer::{PieceDigest, Window};
use kvferry_transport::Region;
use kvferry_transport::region::AccessError;
use kvferry_transport::strips::Strips;

/// A stream can't be digested.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunsError {
    /// A window is not of this stream.
    #[error("the window of {} bytes from byte {} on leaves a stream of {stream} bytes or overlaps the one before, or its pieces are empty", .window.len, .window.start)]
    Window {
        /// The window.
        window: Window,
        /// Length of the stream.
        stream: u64,
    },
    /// The batch names a region that is not ours.
    #[error("the batch names region {region}, we have {regions}")]
    Region {
        /// The region.
        region: RegionId,
        /// How many we have.
        regions: usize,
    },
    /// The memory can't be read.
    #[error(transparent)]
    Access(#[from] AccessError),
}

/// Bytes are gathered here before they are hashed, so that short runs cost no call of the hash each.
const SCRATCH: usize = 64 << 10;

/// Digests windows of one side of a batch.
pub struct RunDigester {
    batch: Arc<BoundedBatch>,
    side: Side,
    windows: Vec<Window>,
    /// The window in progress, and how many of its bytes are done.
    at: (usize, u64),
    piece: Hasher,
    scratch: Vec<u8>,
    out: Vec<PieceDigest>,
}

impl std::fmt::Debug for RunDigester {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RunDigester({} windows, at {:?})", self.windows.len(), self.at)
    }
}

impl RunDigester {
    /// Prepares to digest. Windows come in the order of the stream and don't overlap, so that no more than the stream is
    /// digested.
    ///
    /// # Errors
    /// If a window leaves the stream or overlaps the one before it.
    pub fn new(batch: Arc<BoundedBatch>, side: Side, windows: Vec<Window>) -> Result<Self, RunsError> {
        let stream = batch.bytes().get();
        let mut before = 0;
        for &window in &windows {
            match window.start.checked_add(window.len) {
                Some(end) if end <= stream && window.start >= before && window.piece > 0 => before = end,
                _ => return Err(RunsError::Window { window, stream }),
            }
        }
        Ok(Self { batch, side, windows, at: (0, 0), piece: Hasher::new(), scratch: Vec::new(), out: Vec::new() })
    }

    /// Digests up to about `budget` bytes more. Gives true when all windows are done.
    ///
    /// # Errors
    /// If the memory can't be read.
    pub fn advance(&mut self, regions: &[Region], budget: u64) -> Result<bool, RunsError> {
        let mut left = budget.max(1);
        let batch = self.batch.clone();
        while let Some(&window) = self.windows.get(self.at.0) {
            let from = window.start + self.at.1;
            let take = (window.len - self.at.1).min(left);
            let mut strips = Strips::new(&batch, from..from + take);
            while let Some(strip) = strips.next_within(take) {
                let (region, mut offset, stride) = match self.side {
                    Side::Src => (strip.src_region, strip.src_offset, strip.src_stride),
                    Side::Dst => (strip.dst_region, strip.dst_offset, strip.dst_stride),
                };
                let memory = regions.get(region.index()).ok_or(RunsError::Region { region, regions: regions.len() })?;
                for _ in 0..strip.count {
                    self.update(window, memory, offset, strip.run)?;
                    // The last step may leave the region; nothing is read there.
                    offset = offset.wrapping_add(stride);
                }
            }
            left -= take;
            if self.at.1 == window.len {
                self.end_piece(window);
                self.at = (self.at.0 + 1, 0);
            } else if left == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The digests of all pieces of all windows, in order.
    #[must_use]
    pub fn finish(self) -> Vec<PieceDigest> {
        self.out
    }

    fn update(&mut self, window: Window, memory: &Region, mut offset: u64, mut len: u64) -> Result<(), RunsError> {
        while len > 0 {
            let in_piece = window.piece - self.at.1 % window.piece;
            let filled = self.scratch.len();
            // At most SCRATCH, so it fits.
            let n = usize::try_from(len.min(in_piece)).unwrap_or(SCRATCH).min(SCRATCH - filled);
            self.scratch.resize(filled + n, 0);
            memory.read(offset, &mut self.scratch[filled..])?;
            if self.scratch.len() == SCRATCH {
                self.flush();
            }
            self.at.1 += n as u64;
            offset += n as u64;
            len -= n as u64;
            if self.at.1.is_multiple_of(window.piece) && self.at.1 < window.len {
                self.end_piece(window);
            }
        }
        Ok(())
    }

    fn flush(&mut self) {
        self.piece.update(&self.scratch);
        self.scratch.clear();
    }

    fn end_piece(&mut self, window: Window) {
        self.flush();
        if window.len > 0 {
            let mut digest = PieceDigest::default();
            digest.copy_from_slice(&self.piece.finalize().as_bytes()[..16]);
            self.out.push(digest);
        }
        self.piece.reset();
    }
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::batch::{Base, Batch, Nest, PairRun, Part, Section};
    use kvferry_geometry::units::Bytes;

    use super::*;

    /// Blocks of 32 bytes: source 2, 5, 1 to destination 0, 1, 4 at offset 64.
    fn batch() -> Arc<BoundedBatch> {
        let base = Base { src_region: RegionId::new(0), dst_region: RegionId::new(0), src_offset: 0, dst_offset: 64 };
        let pair = |src, dst| PairRun { src, dst, count: 1 };
        let part = Part {
            src_add: 0,
            dst_add: 0,
            src_block_stride: 32,
            dst_block_stride: 32,
            src_step: 1,
            dst_step: 1,
            nest: Nest::run(32),
            pairs: vec![pair(2, 0), pair(5, 1), pair(1, 4)].into(),
        };
        let lens = [Bytes::new(256)];
        Arc::new(Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]).check(&lens, &lens).unwrap())
    }

    fn memories() -> (Region, Region) {
        let (src, dst) = (Region::zeroed(256).unwrap(), Region::zeroed(256).unwrap());
        let bytes: Vec<u8> = (0..=255).collect();
        src.write(0, &bytes).unwrap();
        for (s, d) in [(2usize, 0u64), (5, 1), (1, 4)] {
            dst.write(64 + d * 32, &bytes[s * 32..s * 32 + 32]).unwrap();
        }
        (src, dst)
    }

    fn digest(side: Side, memory: &Region, windows: &[Window], budget: u64) -> Vec<PieceDigest> {
        let mut job = RunDigester::new(batch(), side, windows.to_vec()).unwrap();
        while !job.advance(std::slice::from_ref(memory), budget).unwrap() {}
        job.finish()
    }

    #[test]
    fn both_sides_agree_whatever_the_budget_and_a_changed_byte_shows() {
        let (src, dst) = memories();
        let windows = [Window { start: 0, len: 85, piece: 20 }, Window { start: 87, len: 9, piece: 9 }];
        let expected = digest(Side::Src, &src, &windows, u64::MAX);
        assert_eq!(expected.len(), 6);
        for budget in [1, 7, 20, 33, 96, 1000] {
            assert_eq!(digest(Side::Dst, &dst, &windows, budget), expected, "budget {budget}");
        }
        // Byte 40 of the stream is byte 8 of destination block 1.
        dst.fill(64 + 32 + 8, 1, 0xee).unwrap();
        let got = digest(Side::Dst, &dst, &windows, 5);
        let differing: Vec<usize> = (0..6).filter(|&i| got[i] != expected[i]).collect();
        assert_eq!(differing, [2]);
    }

    #[test]
    fn pieces_are_plain_digests_of_the_stream() {
        let (src, _) = memories();
        let mut stream = Vec::new();
        for block in [2u8, 5, 1] {
            stream.extend(block * 32..block * 32 + 32);
        }
        let pieces = digest(Side::Src, &src, &[Window { start: 3, len: 90, piece: 50 }], 13);
        let expected: Vec<PieceDigest> = [&stream[3..53], &stream[53..93]]
            .map(|part| blake3::hash(part).as_bytes()[..16].try_into().unwrap())
            .to_vec();
        assert_eq!(pieces, expected);
    }

    #[test]
    fn windows_that_leave_the_stream_are_refused() {
        for window in [
            Window { start: 0, len: 97, piece: 1 },
            Window { start: 97, len: 0, piece: 1 },
            Window { start: u64::MAX, len: 2, piece: 1 },
            Window { start: 0, len: 1, piece: 0 },
        ] {
            let error = RunDigester::new(batch(), Side::Src, vec![window]).unwrap_err();
            assert_eq!(error, RunsError::Window { window, stream: 96 });
        }
        let window = Window { start: 9, len: 10, piece: 10 };
        let overlap = RunDigester::new(batch(), Side::Src, vec![Window { start: 0, ..window }, window]);
        assert_eq!(overlap.unwrap_err(), RunsError::Window { window, stream: 96 });
        assert!(digest(Side::Src, &memories().0, &[Window { start: 96, len: 0, piece: 1 }], 1).is_empty());
    }
}
