//! Batches done as local copies, by several threads: the permutation of staged bytes, from or into staging memory.
//!
//! A [`Permute`] walks the product form of a batch by its own loops, two at a time, so that a block which only changes its
//! order is one call of a kernel and not a descriptor for each run. The kernels know the sizes of short runs at compile time
//! and the shapes worth instructions of their own, such as a convolution's state from dim-first to state-first.
//!
//! It differs from [`Copier`](kvferry_transport::copy::Copier) in that sources and destinations must not overlap, and that
//! short runs are cheap. No thread outlives a call, and nothing here waits or looks at a clock: who must not be held up
//! gives a range of positions at a time.
//!
//! Not here: which bytes to permute (`kvferry-geometry`), where staging memory is (`kvferry-session`), and device memory.
//!
//! ```
//! # use std::sync::Arc;
//! # use kvferry_geometry::batch::{Base, Batch, Dim, Nest, PairRun, Part, Section};
//! # use kvferry_geometry::units::{Bytes, RegionId};
//! # use kvferry_memory::{BufferOptions, HostBuffer, Permute};
//! # let base = Base { src_region: RegionId::new(0), dst_region: RegionId::new(0), src_offset: 0, dst_offset: 0 };
//! // Two rows of three become three rows of two.
//! let columns = Dim { count: 3, src_stride: 1, dst_stride: 2 };
//! let rows = Dim { count: 2, src_stride: 3, dst_stride: 1 };
//! let nest = Nest { dims: [columns, rows].into_iter().collect(), run: 1 };
//! # let part = Part {
//! #     src_add: 0, dst_add: 0, src_block_stride: 0, dst_block_stride: 0, src_step: 1, dst_step: 1,
//! #     nest, pairs: vec![PairRun { src: 0, dst: 0, count: 1 }].into(),
//! # };
//! let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
//! let batch = Arc::new(batch.check(&[Bytes::new(6)], &[Bytes::new(6)])?);
//! let src = HostBuffer::new(Bytes::new(6), BufferOptions::default())?.region();
//! let dst = HostBuffer::new(Bytes::new(6), BufferOptions::default())?.region();
//! src.write(0, b"abcdef")?;
//! let permute = Permute::new(batch, |_| Some(src.clone()), |_| Some(dst.clone())).map_err(|all| all[0].clone())?;
//! assert_eq!(permute.run(2).bytes, Bytes::new(6));
//! assert_eq!(dst.to_vec()?, b"adbecf");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use kvferry_geometry::batch::{BoundedBatch, Side};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::strips::{Strips, pair_shares};
use kvferry_transport::{MemoryKind, Region, Stats};

use kernel::{Loop, Runs};

mod kernel;
#[cfg(test)]
mod tests;
mod transpose;

/// From this many bytes on a batch is written past the caches: its destination would only push out what is in use.
const STREAM_FROM: u64 = 4 << 20;
/// From this many bytes on a thread gets several pieces, so that one that is held up does not hold up all.
const LARGE: u64 = 16 << 20;
/// A thread is not worth starting for fewer bytes.
const SMALL: u64 = 256 << 10;

/// A batch does not fit the memory that it is to be done in.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PermuteError {
    /// A region that the batch names was not given.
    #[error("the batch names {side} region {region}, which there is not")]
    UnknownRegion {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
    },
    /// The batch was proven against another length.
    #[error("the batch was proven against {expected} for {side} region {region}, which has {got}; prove it again")]
    Length {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
        /// The length that the proof assumed.
        expected: Bytes,
        /// The length it has.
        got: Bytes,
    },
    /// The CPU cannot reach it.
    #[error("the CPU cannot reach {side} region {region}, which is {kind} memory; send the batch directly")]
    NotHost {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
        /// Its kind.
        kind: MemoryKind,
    },
    /// Memory would be read and written.
    #[error("source region {src} and destination region {dst} share {bytes}; stage in memory of its own")]
    Overlap {
        /// The source region.
        src: RegionId,
        /// The destination region.
        dst: RegionId,
        /// How many bytes they share.
        bytes: Bytes,
    },
}

/// A batch and the memory of both its sides. Keeps the memory's owners alive.
#[derive(Clone, Debug)]
pub struct Permute {
    batch: Arc<BoundedBatch>,
    src: Vec<Option<Region>>,
    dst: Vec<Option<Region>>,
    /// Whether it is large enough to be written past the caches.
    stream: bool,
}

impl Permute {
    /// Binds a batch to regions, which are asked for by id, once for each id that the batch names on a side.
    ///
    /// Regions that share memory are found by their addresses; a memory that is mapped twice is the caller's to avoid. Where a
    /// batch writes a byte more than once (a planner's doesn't), which write stands is open.
    ///
    /// # Errors
    /// Everything that doesn't fit: regions that are missing, have other lengths than the batch was proven against, aren't host
    /// memory, or are (in part) both read and written.
    pub fn new(
        batch: Arc<BoundedBatch>,
        src: impl Fn(RegionId) -> Option<Region>,
        dst: impl Fn(RegionId) -> Option<Region>,
    ) -> Result<Self, Vec<PermuteError>> {
        let mut faults = Vec::new();
        let src = bind(&batch, Side::Src, src, &mut faults);
        let dst = bind(&batch, Side::Dst, dst, &mut faults);
        check_overlap(&src, &dst, &mut faults);
        let stream = batch.bytes().get() >= STREAM_FROM;
        if faults.is_empty() { Ok(Self { batch, src, dst, stream }) } else { Err(faults) }
    }

    /// Says that what is written is read soon and by a CPU (staging memory that is sent next), so that it should go through the
    /// caches whatever its size. Destinations in a cache of keys and values are not: the bulk of it is never in a CPU's caches.
    #[must_use]
    pub fn read_soon(self) -> Self {
        Self { stream: false, ..self }
    }

    /// Bytes of the batch: its positions are 0 up to this.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.batch.bytes().get()
    }

    /// The batch.
    #[must_use]
    pub fn batch(&self) -> &Arc<BoundedBatch> {
        &self.batch
    }

    /// Copies everything with up to `threads` threads, one of them the caller's; returns when all have ended. Where the system
    /// gives fewer threads, those do it all.
    pub fn run(&self, threads: usize) -> Stats {
        let useful = usize::try_from(self.bytes() / SMALL).unwrap_or(usize::MAX).max(1);
        let threads = threads.clamp(1, useful);
        let pieces = if threads > 1 && self.bytes() >= LARGE { threads * 4 } else { threads };
        self.run_pieces(threads, &pair_shares(&self.batch, pieces))
    }

    /// Copies the bytes between two byte positions of the batch's order with the caller's thread; positions past the end are
    /// cut off. For a slice at a time; a cut may fall anywhere, even inside a run.
    pub fn copy(&self, range: Range<u64>) -> Stats {
        let mut walk = Walk { permute: self, held: None, stats: (0, 0) };
        let mut strips = Strips::new(&self.batch, range);
        loop {
            if let Some(tile) = strips.next_tile() {
                let [outer, inner] = [tile.outer, tile.inner].map(|d| Loop::of(d.count, d.src_stride, d.dst_stride));
                let (src, dst) = ((tile.src_region, tile.src_offset), (tile.dst_region, tile.dst_offset));
                walk.add(self.locate(src, dst, tile.run, outer, inner));
            } else if let Some(scatter) = strips.next_scatter() {
                for pair in scatter.pairs {
                    let src = scatter.src_offset + u64::from(pair.src) * scatter.src_block_stride;
                    let dst = scatter.dst_offset + u64::from(pair.dst) * scatter.dst_block_stride;
                    let (src, dst) = ((scatter.src_region, src), (scatter.dst_region, dst));
                    walk.add(self.locate(src, dst, scatter.run, Loop::ONCE, Loop::ONCE));
                }
            } else if let Some(strip) = strips.next() {
                let inner = Loop::of(strip.count, strip.src_stride, strip.dst_stride);
                let (src, dst) = ((strip.src_region, strip.src_offset), (strip.dst_region, strip.dst_offset));
                walk.add(self.locate(src, dst, strip.run, Loop::ONCE, inner));
            } else {
                return walk.end();
            }
        }
    }

    /// Copies all pieces; threads take the next one as they become free.
    fn run_pieces(&self, threads: usize, pieces: &[Range<u64>]) -> Stats {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut sum = Stats::default();
            // Relaxed: pieces are known before the threads start, and joining orders what they wrote.
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                add(&mut sum, self.copy(piece.clone()));
            }
            sum
        };
        std::thread::scope(|scope| {
            let named = || Builder::new().name("kvferry-permute".to_owned());
            // A thread that cannot be had leaves its pieces to the others.
            let others: Vec<_> = (1..threads).map_while(|_| named().spawn_scoped(scope, work).ok()).collect();
            let mut sum = work();
            for other in others {
                // Nothing in `work` panics; if it did, the missing bytes would tell.
                add(&mut sum, other.join().unwrap_or_default());
            }
            sum
        })
    }

    /// Makes addresses of runs of the batch; `outer` and `inner` are loops of its walk.
    ///
    /// The runs may be copied while `self` lives: they come from the proven batch, so each of them lies inside regions of the
    /// lengths that the proof assumed. `new` checked that these regions have those lengths and are host memory, which their owners,
    /// held by `self`, keep mapped (`Region::from_raw`), and that no source region overlaps a destination region.
    fn locate(&self, src: (RegionId, u64), dst: (RegionId, u64), run: u64, outer: Loop, inner: Loop) -> Option<Runs> {
        // Always there: `new` found every region that the batch names.
        let from = self.src.get(src.0.index())?.as_ref()?;
        let to = self.dst.get(dst.0.index())?.as_ref()?;
        // SAFETY: the first run lies inside both regions, see above.
        let (src, dst) = unsafe { (from.as_ptr().add(fit(src.1)).cast_const(), to.as_ptr().add(fit(dst.1))) };
        Some(Runs { src, dst, run: fit(run), outer, inner })
    }
}

/// One thread's walk, with what it did so far.
struct Walk<'a> {
    permute: &'a Permute,
    /// One behind, so that the memory of the next one is on its way while one is copied.
    held: Option<Runs>,
    /// Bytes, runs.
    stats: (u64, u64),
}

impl Walk<'_> {
    fn add(&mut self, runs: Option<Runs>) {
        let Some(runs) = runs else { return };
        runs.fetch(self.permute.stream);
        let count = (runs.outer.count * runs.inner.count) as u64;
        self.stats.0 += count * runs.run as u64;
        self.stats.1 += count;
        self.copy_held(Some(runs));
    }

    fn copy_held(&mut self, next: Option<Runs>) {
        if let Some(runs) = std::mem::replace(&mut self.held, next) {
            // SAFETY: the runs were made by `locate` of `self.permute`, which is alive.
            unsafe { runs.copy(self.permute.stream) };
        }
    }

    fn end(mut self) -> Stats {
        self.copy_held(None);
        kernel::drain();
        Stats { bytes: Bytes::new(self.stats.0), descriptors: self.stats.1 }
    }
}

/// Offsets and runs fit `usize`: the proof puts all of them inside a region, which is memory.
fn fit(v: u64) -> usize {
    usize::try_from(v).unwrap_or(0)
}

fn add(sum: &mut Stats, more: Stats) {
    sum.bytes = Bytes::new(sum.bytes.get() + more.bytes.get());
    sum.descriptors += more.descriptors;
}

/// The regions that a batch names on a side, by id.
fn bind(
    batch: &BoundedBatch,
    side: Side,
    region: impl Fn(RegionId) -> Option<Region>,
    faults: &mut Vec<PermuteError>,
) -> Vec<Option<Region>> {
    let lens = match side {
        Side::Src => batch.src_lens(),
        Side::Dst => batch.dst_lens(),
    };
    let mut named = vec![false; lens.len()];
    // A section without parts may name what the proof never saw; nothing is copied for it.
    for base in batch.batch().sections().iter().filter(|s| !s.parts.is_empty()).flat_map(|s| s.bases.iter()) {
        let id = match side {
            Side::Src => base.src_region,
            Side::Dst => base.dst_region,
        };
        if let Some(named) = named.get_mut(id.index()) {
            *named = true;
        }
    }
    let numbered = (0u32..).map(RegionId::new).zip(lens.iter().zip(named));
    let find = |(id, (&expected, named)): (RegionId, (&Bytes, bool))| {
        if !named {
            return None;
        }
        let Some(found) = region(id) else {
            faults.push(PermuteError::UnknownRegion { side, region: id });
            return None;
        };
        if found.len() != expected {
            faults.push(PermuteError::Length { side, region: id, expected, got: found.len() });
        }
        if found.kind() != MemoryKind::Host {
            faults.push(PermuteError::NotHost { side, region: id, kind: found.kind() });
        }
        Some(found)
    };
    numbered.map(find).collect()
}

/// Finds source regions that share bytes with destination regions, in one walk over all of them by address.
fn check_overlap(src: &[Option<Region>], dst: &[Option<Region>], faults: &mut Vec<PermuteError>) {
    let mut all = extents(Side::Src, src);
    all.extend(extents(Side::Dst, dst));
    all.sort_unstable_by_key(|region| region.start);
    // Those that begin before the next one and have not ended there.
    let mut open: Vec<Extent> = Vec::new();
    for next in all {
        open.retain(|before| before.end > next.start);
        for before in open.iter().filter(|before| before.side != next.side) {
            let (src, dst) = if next.side == Side::Src { (next.id, before.id) } else { (before.id, next.id) };
            let bytes = Bytes::new((before.end.min(next.end) - next.start) as u64);
            faults.push(PermuteError::Overlap { src, dst, bytes });
        }
        open.push(next);
    }
}

/// The addresses of a region.
struct Extent {
    start: usize,
    end: usize,
    side: Side,
    id: RegionId,
}

fn extents(side: Side, regions: &[Option<Region>]) -> Vec<Extent> {
    let numbered = (0u32..).map(RegionId::new).zip(regions);
    let of = |(id, region): (RegionId, &Option<Region>)| {
        let region = region.as_ref().filter(|r| !r.is_empty())?;
        let start = region.address();
        Some(Extent { start, end: start.saturating_add(fit(region.len().get())), side, id })
    };
    numbered.filter_map(of).collect()
}
