//! The copy kernel: runs the loops of a batch between mapped memory.
//!
//! For backends whose bytes are moved by our own CPU. It stands here, and not with the buffers of `kvferry-memory`, because
//! the in-memory reference needs it too and this crate depends on geometry alone.
//!
//! The proof that made the batch a [`BoundedBatch`] holds for regions of certain lengths; [`Copier::new`] checks that
//! the regions have these lengths, and so no place needs a check while copying.

use std::ops::Range;
use std::sync::Arc;

use kvferry_geometry::batch::{BoundedBatch, Side};
use kvferry_geometry::units::{Bytes, RegionId};

use crate::region::{MemoryKind, Region};
use crate::strips::{Scatter, Strip, Strips, shares};
use crate::types::Stats;

/// A batch does not fit the regions it is to be copied between.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// A region that the batch names was not given.
    #[error("the batch names {side} region {region}, which there is not")]
    UnknownRegion {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
    },
    /// The batch was proven against another length.
    #[error("the batch was proven against {proven} for {side} region {region}, which has {got}")]
    Length {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
        /// The length that the proof assumed.
        proven: Bytes,
        /// The length it has.
        got: Bytes,
    },
    /// The CPU cannot reach it.
    #[error("the CPU cannot reach {side} region {region}, which is {kind} memory")]
    NotHost {
        /// The side.
        side: Side,
        /// The region.
        region: RegionId,
        /// Its kind.
        kind: MemoryKind,
    },
}

/// A batch and the mapped regions of both its sides. Keeps the regions' owners alive.
///
/// ```
/// # use std::sync::Arc;
/// # use kvferry_geometry::batch::{Base, Batch, Nest, PairRun, Part, Section};
/// # use kvferry_geometry::units::{Bytes, RegionId};
/// # use kvferry_transport::{Region, copy::Copier};
/// # let base = Base { src_region: RegionId::new(0), dst_region: RegionId::new(0), src_offset: 0, dst_offset: 64 };
/// # let part = Part {
/// #     src_add: 0, dst_add: 0, src_block_stride: 32, dst_block_stride: 32, src_step: 1, dst_step: 1,
/// #     nest: Nest::run(32), pairs: vec![PairRun { src: 2, dst: 0, count: 1 }].into(),
/// # };
/// let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
/// let batch = Arc::new(batch.check(&[Bytes::new(128)], &[Bytes::new(128)])?);
/// let (src, dst) = (Region::zeroed(128).unwrap(), Region::zeroed(128).unwrap());
/// src.fill(64, 32, 7)?;
/// let copier = Copier::new(batch, |_| Some(src.clone()), |_| Some(dst.clone()))?;
/// assert_eq!(copier.copy(0..copier.bytes()).bytes, Bytes::new(32));
/// assert_eq!(dst.to_vec()?[64..96], [7; 32]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Copier {
    batch: Arc<BoundedBatch>,
    src: Vec<Option<Region>>,
    dst: Vec<Option<Region>>,
}

impl Copier {
    /// Binds a batch to regions, which are asked for by id, once for each id that the batch names.
    ///
    /// # Errors
    /// If a region is missing, isn't host memory, or has another length than the batch was proven against.
    pub fn new(
        batch: Arc<BoundedBatch>,
        src: impl Fn(RegionId) -> Option<Region>,
        dst: impl Fn(RegionId) -> Option<Region>,
    ) -> Result<Self, CopyError> {
        let src = bind(&batch, Side::Src, src)?;
        let dst = bind(&batch, Side::Dst, dst)?;
        Ok(Self { batch, src, dst })
    }

    /// Bytes of the batch.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.batch.bytes().get()
    }

    /// The batch.
    #[must_use]
    pub fn batch(&self) -> &Arc<BoundedBatch> {
        &self.batch
    }

    /// Copies the bytes between two byte positions of the batch's order; returns what was copied. Positions past the end are
    /// cut off. Source and destination may overlap; each run is then copied as if through a buffer.
    #[must_use]
    pub fn copy(&self, range: Range<u64>) -> Stats {
        let (mut bytes, mut descriptors) = (0, 0);
        let mut strips = Strips::new(&self.batch, range);
        loop {
            if let Some(scatter) = strips.next_scatter() {
                self.copy_scatter(&scatter);
                bytes += scatter.run * scatter.pairs.len() as u64;
                descriptors += scatter.pairs.len() as u64;
            } else if let Some(strip) = strips.next() {
                self.copy_strip(&strip);
                bytes += strip.bytes();
                descriptors += strip.count;
            } else {
                break;
            }
        }
        Stats { bytes: Bytes::new(bytes), descriptors }
    }

    /// Copies everything with `threads` threads, one of them the caller's, each its share of the bytes.
    #[must_use]
    pub fn copy_with(&self, threads: usize) -> Stats {
        let mut shares = shares(&self.batch, threads).into_iter().filter(|s| !s.is_empty());
        let Some(own) = shares.next() else { return Stats::default() };
        std::thread::scope(|scope| {
            let others: Vec<_> = shares.map(|share| scope.spawn(|| self.copy(share))).collect();
            let mut sum = self.copy(own);
            for other in others {
                let stats = other.join().unwrap_or_default();
                sum.bytes = Bytes::new(sum.bytes.get() + stats.bytes.get());
                sum.descriptors += stats.descriptors;
            }
            sum
        })
    }

    fn copy_strip(&self, strip: &Strip) {
        let Some((src, dst)) = self.places(strip.src_region, strip.dst_region) else { return };
        // SAFETY: the strip comes from the proven batch, so each of its runs lies inside regions of the lengths that the proof
        // assumed; `bind` checked that these regions have these lengths and are host memory, which their owners, held
        // by `self`, keep mapped (`Region::from_raw`).
        unsafe {
            let (src, dst) = (src.add(fit(strip.src_offset)), dst.add(fit(strip.dst_offset)));
            copy_runs(src, dst, fit(strip.run), fit(strip.count), fit(strip.src_stride), fit(strip.dst_stride));
        }
    }

    fn copy_scatter(&self, scatter: &Scatter<'_>) {
        let Some((src, dst)) = self.places(scatter.src_region, scatter.dst_region) else { return };
        let run = fit(scatter.run);
        for pair in scatter.pairs {
            let from = scatter.src_offset + u64::from(pair.src) * scatter.src_block_stride;
            let to = scatter.dst_offset + u64::from(pair.dst) * scatter.dst_block_stride;
            // SAFETY: as in `copy_strip`: each of these runs is one of the proven batch.
            unsafe { copy_runs(src.add(fit(from)), dst.add(fit(to)), run, 1, 0, 0) };
        }
    }

    /// Where two regions begin. They are always there: `bind` found every region that the batch names.
    fn places(&self, src: RegionId, dst: RegionId) -> Option<(*const u8, *mut u8)> {
        let src = self.src.get(src.index())?.as_ref()?;
        let dst = self.dst.get(dst.index())?.as_ref()?;
        Some((src.as_ptr().cast_const(), dst.as_ptr()))
    }
}

/// Offsets, strides and runs fit `usize`: the proof puts all of them inside a region, which is memory.
fn fit(v: u64) -> usize {
    usize::try_from(v).unwrap_or(0)
}

/// Copies `count` runs of `run` bytes, each a stride further on either side; after the last one no pointer is made. A run that
/// overlaps its own destination is copied as if through a buffer.
///
/// # Safety
/// Every run must be readable at the source and writable at the destination, and nobody may hold a reference to its bytes.
#[inline]
pub unsafe fn copy_runs(src: *const u8, dst: *mut u8, run: usize, count: usize, src_stride: usize, dst_stride: usize) {
    // SAFETY: the caller's promise, passed on; `N` is `run`.
    unsafe {
        match run {
            16 => fixed_runs::<16>(src, dst, count, src_stride, dst_stride),
            32 => fixed_runs::<32>(src, dst, count, src_stride, dst_stride),
            64 => fixed_runs::<64>(src, dst, count, src_stride, dst_stride),
            128 => fixed_runs::<128>(src, dst, count, src_stride, dst_stride),
            256 => fixed_runs::<256>(src, dst, count, src_stride, dst_stride),
            _ => {
                for i in 0..count {
                    std::ptr::copy(src.add(i * src_stride), dst.add(i * dst_stride), run);
                }
            }
        }
    }
}

/// Short runs of a size known to the compiler, which then needs no call for each.
///
/// # Safety
/// As for [`copy_runs`] with `run == N`.
unsafe fn fixed_runs<const N: usize>(src: *const u8, dst: *mut u8, count: usize, src_stride: usize, dst_stride: usize) {
    for i in 0..count {
        // SAFETY: the caller's promise; the run passes through a value, so that overlap does no harm.
        unsafe {
            let bytes: [u8; N] = src.add(i * src_stride).cast::<[u8; N]>().read();
            dst.add(i * dst_stride).cast::<[u8; N]>().write(bytes);
        }
    }
}

fn bind(
    batch: &BoundedBatch,
    side: Side,
    region: impl Fn(RegionId) -> Option<Region>,
) -> Result<Vec<Option<Region>>, CopyError> {
    let lens = match side {
        Side::Src => batch.src_lens(),
        Side::Dst => batch.dst_lens(),
    };
    let mut out: Vec<Option<Region>> = vec![None; lens.len()];
    for base in batch.batch().sections().iter().flat_map(|s| s.bases.iter()) {
        let id = match side {
            Side::Src => base.src_region,
            Side::Dst => base.dst_region,
        };
        // A section without parts may name what the proof never saw; nothing is copied for it.
        let (Some(slot), Some(&proven)) = (out.get_mut(id.index()), lens.get(id.index())) else { continue };
        if slot.is_some() {
            continue;
        }
        let found = region(id).ok_or(CopyError::UnknownRegion { side, region: id })?;
        if found.len() != proven {
            return Err(CopyError::Length { side, region: id, proven, got: found.len() });
        }
        if found.kind() != MemoryKind::Host {
            return Err(CopyError::NotHost { side, region: id, kind: found.kind() });
        }
        *slot = Some(found);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::sample::{Memory, Rng, sample};

    #[test]
    fn copies_are_exact_and_touch_nothing_else() {
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let sample = sample(&mut rng, 6000);
            let memory = Memory::new(&sample, &mut rng, |len| Region::zeroed(len).unwrap());
            let copier = Copier::new(
                sample.batch.clone(),
                |id| memory.src.get(id.index()).cloned(),
                |id| memory.dst.get(id.index()).cloned(),
            )
            .unwrap();
            let stats = match seed % 3 {
                0 => copier.copy(0..copier.bytes()),
                1 => copier.copy_with(1 + usize::try_from(rng.below(4)).unwrap()),
                _ => {
                    let cut = rng.below(copier.bytes() + 1);
                    let (a, b) = (copier.copy(0..cut), copier.copy(cut..u64::MAX));
                    Stats { bytes: Bytes::new(a.bytes.get() + b.bytes.get()), descriptors: a.descriptors }
                }
            };
            assert_eq!(stats.bytes, sample.batch.bytes(), "seed {seed}");
            memory.check(&sample).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
    }

    #[test]
    fn regions_must_be_those_of_the_proof() {
        let sample = sample(&mut Rng::new(1), 1000);
        let one = Region::zeroed(1).unwrap();
        let missing = Copier::new(sample.batch.clone(), |_| None, |_| None);
        assert!(matches!(missing, Err(CopyError::UnknownRegion { side: Side::Src, .. })));
        let wrong = Copier::new(sample.batch, |_| Some(one.clone()), |_| Some(one.clone()));
        assert!(matches!(wrong, Err(CopyError::Length { side: Side::Src, .. })));
    }
}
