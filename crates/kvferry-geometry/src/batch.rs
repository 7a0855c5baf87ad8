//! A batch: byte ranges to move from one source rank to one destination rank, in product form.
//!
//! A batch is region-relative: a place is a region and an offset inside it, never an address. It lists
//! *sections*; a section is a set of [`Base`]s (one for each cache item, say) times its [`Part`]s; a part is a set of
//! block pairs times a nest of loops around one contiguous run of bytes:
//!
//! ```text
//! for base in section.bases
//!   for part in section.parts
//!     for (s, d) in part.pairs                       // block ids
//!       for each point of part.nest.dims             // strides on both sides
//!         src = base.src_offset + part.src_add + s * part.src_block_stride + Σ i·dim.src_stride
//!         dst = base.dst_offset + part.dst_add + d * part.dst_block_stride + Σ i·dim.dst_stride
//!         move part.nest.run bytes
//! ```
//!
//! So 1,000 scattered blocks of 80 layers are 1,080 rows, not 80,000 descriptors. A backend expands as late as it
//! can: by [`Batch::cursor`] into a small buffer, or with loops of its own over the fields.
//!
//! This module knows nothing of layers, heads, tokens or requests.
//!
//! ```
//! use kvferry_geometry::batch::{Base, Batch, Descriptor, Nest, PairRun, Part, Section};
//! use kvferry_geometry::units::RegionId;
//! let base = Base { src_region: RegionId::new(0), dst_region: RegionId::new(0), src_offset: 0, dst_offset: 64 };
//! let part = Part {
//!     src_add: 0, dst_add: 0, src_block_stride: 32, dst_block_stride: 32, src_step: 1, dst_step: 1,
//!     nest: Nest::run(32), pairs: vec![PairRun { src: 2, dst: 0, count: 1 }, PairRun { src: 5, dst: 1, count: 1 }].into(),
//! };
//! let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
//! let mut out = [Descriptor::default(); 8];
//! assert_eq!(batch.cursor().fill(&mut out), 2);
//! assert_eq!((out[1].src_offset, out[1].dst_offset, out[1].len), (160, 96, 32));
//! assert_eq!(batch.bytes().get(), 64);
//! ```

use alloc::sync::Arc;
use alloc::vec::Vec;

use arrayvec::ArrayVec;

use crate::units::{Bytes, RegionId};

mod bounds;
mod count;
mod cursor;
mod slices;

pub use bounds::{BoundedBatch, BoundsError, Side};
pub use cursor::Cursor;
pub use slices::Slices;

/// The most loops a nest can have: component, head, two token loops, entry.
pub const MAX_DIMS: usize = 5;

/// One loop of a nest: `count` steps, each `src_stride` bytes further at the source and `dst_stride` at the
/// destination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Dim {
    /// Steps, at least 1.
    pub count: u64,
    /// Bytes from one step to the next at the source.
    pub src_stride: u64,
    /// Bytes from one step to the next at the destination.
    pub dst_stride: u64,
}

/// Loops, outermost first, around one contiguous run of `run` bytes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Nest {
    /// Outermost first.
    pub dims: ArrayVec<Dim, MAX_DIMS>,
    /// Bytes moved at each point of the loops.
    pub run: u64,
}

impl Nest {
    /// A single run without loops.
    #[must_use]
    pub fn run(run: u64) -> Self {
        Self { dims: ArrayVec::new(), run }
    }

    /// The fewest loops around the longest run: loops that continue the run join it, loops that continue each other become
    /// one. What is left goes outermost by destination stride, so that writes go forward.
    pub(crate) fn collapsed(mut dims: ArrayVec<Dim, MAX_DIMS>, mut run: u64) -> Self {
        dims.retain(|d| d.count > 1);
        while let Some(at) = dims.iter().position(|d| d.src_stride == run && d.dst_stride == run) {
            run *= dims[at].count;
            dims.remove(at);
        }
        dims.sort_by_key(|d| core::cmp::Reverse(d.dst_stride));
        let mut merged: ArrayVec<Dim, MAX_DIMS> = ArrayVec::new();
        for inner in dims {
            match merged.last_mut() {
                Some(outer)
                    if inner.src_stride.checked_mul(inner.count) == Some(outer.src_stride)
                        && inner.dst_stride.checked_mul(inner.count) == Some(outer.dst_stride) =>
                {
                    *outer = Dim { count: outer.count * inner.count, ..inner };
                }
                _ => merged.push(inner),
            }
        }
        Self { dims: merged, run }
    }

    /// How many runs the loops make.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.dims.iter().map(|d| d.count).product()
    }
}

/// Where one member of a section starts on each side.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Base {
    /// Region at the source rank.
    pub src_region: RegionId,
    /// Region at the destination rank.
    pub dst_region: RegionId,
    /// Byte offset in the source region.
    pub src_offset: u64,
    /// Byte offset in the destination region.
    pub dst_offset: u64,
}

/// `count` block pairs: (`src`, `dst`), (`src + src_step`, `dst + dst_step`), ... with the steps of the part.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PairRun {
    /// First source block id.
    pub src: u32,
    /// First destination block id.
    pub dst: u32,
    /// How many pairs, at least 1.
    pub count: u32,
}

/// A shared list of pair runs. Parts of one phase share one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pairs(Arc<Vec<PairRun>>);

impl From<Vec<PairRun>> for Pairs {
    /// Takes the list as it is; nothing is copied.
    fn from(list: Vec<PairRun>) -> Self {
        Self(Arc::new(list))
    }
}

impl Pairs {
    /// A number that lists which live at a time share only where they are one.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl core::ops::Deref for Pairs {
    type Target = [PairRun];

    fn deref(&self) -> &[PairRun] {
        &self.0
    }
}

/// Joins pair runs that go on by the steps.
pub(crate) fn joined(
    pairs: impl Iterator<Item = PairRun>,
    (src_step, dst_step): (u64, u64),
    most: usize,
) -> Vec<PairRun> {
    let mut out: Vec<PairRun> = Vec::with_capacity(most);
    // Where the last run would go on; nowhere at first.
    let mut next = (u64::MAX, u64::MAX);
    for pair in pairs {
        let count = u64::from(pair.count);
        match out.last_mut() {
            Some(last)
                if next == (u64::from(pair.src), u64::from(pair.dst))
                    && last.count.checked_add(pair.count).is_some() =>
            {
                last.count += pair.count;
            }
            _ => out.push(pair),
        }
        next = (u64::from(pair.src) + count * src_step, u64::from(pair.dst) + count * dst_step);
    }
    out
}

/// Block pairs times a nest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Added to every source offset.
    pub src_add: u64,
    /// Added to every destination offset.
    pub dst_add: u64,
    /// Bytes from one source block id to the next.
    pub src_block_stride: u64,
    /// Bytes from one destination block id to the next.
    pub dst_block_stride: u64,
    /// Block ids from one pair of a [`PairRun`] to the next, at the source.
    pub src_step: u32,
    /// Block ids from one pair of a [`PairRun`] to the next, at the destination.
    pub dst_step: u32,
    /// What is moved for each pair.
    pub nest: Nest,
    /// The pairs.
    pub pairs: Pairs,
}

impl Part {
    /// Number of block pairs.
    #[must_use]
    pub fn pair_count(&self) -> u64 {
        self.pairs.iter().map(|p| u64::from(p.count)).sum()
    }

    /// Whether the pairs of one [`PairRun`] lie end to end on both sides, so that they are one run.
    #[must_use]
    pub fn pairs_are_adjacent(&self) -> bool {
        self.nest.dims.is_empty()
            && self.src_block_stride.checked_mul(u64::from(self.src_step)) == Some(self.nest.run)
            && self.dst_block_stride.checked_mul(u64::from(self.dst_step)) == Some(self.nest.run)
    }

    /// Descriptors this part makes for one base.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        if self.pairs_are_adjacent() { self.pairs.len() as u64 } else { self.pair_count() * self.nest.runs() }
    }
}

/// Bases times parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Section {
    /// One for each member.
    pub bases: Arc<[Base]>,
    /// What is moved for each base, in order.
    pub parts: Vec<Part>,
}

/// One contiguous move.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
pub struct Descriptor {
    /// Region at the source rank.
    pub src_region: RegionId,
    /// Region at the destination rank.
    pub dst_region: RegionId,
    /// Byte offset in the source region.
    pub src_offset: u64,
    /// Byte offset in the destination region.
    pub dst_offset: u64,
    /// Bytes, at least 1.
    pub len: u64,
}

/// What to move from one source rank to one destination rank. See the module's text for its meaning.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Batch {
    sections: Vec<Section>,
}

impl Batch {
    /// A batch of the given sections.
    #[must_use]
    pub fn new(sections: Vec<Section>) -> Self {
        Self { sections }
    }

    /// The sections, in order.
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Whether nothing is to be moved.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sections.iter().all(|s| s.bases.is_empty() || s.parts.iter().all(|p| p.pairs.is_empty()))
    }

    /// Bytes moved in all.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        let of_part = |p: &Part| p.pair_count() * p.nest.runs() * p.nest.run;
        let of_section = |s: &Section| s.bases.len() as u64 * s.parts.iter().map(of_part).sum::<u64>();
        Bytes::new(self.sections.iter().map(of_section).sum())
    }

    /// Rows of the product form: bases plus pair runs, over all sections.
    #[must_use]
    pub fn rows(&self) -> u64 {
        let of_section = |s: &Section| (s.bases.len() + s.parts.iter().map(|p| p.pairs.len()).sum::<usize>()) as u64;
        self.sections.iter().map(of_section).sum()
    }

    /// How many descriptors [`Batch::cursor`] yields. They are counted, not made: it takes as long as there are rows.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        count::descriptors(self)
    }

    /// A cursor at the first descriptor.
    #[must_use]
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor::new(self)
    }

    /// Proves that no byte of the batch lies outside the regions, whose lengths are given by id.
    ///
    /// # Errors
    /// The first place that leaves its region, with the side, the region and both values.
    pub fn check(self, src: &[Bytes], dst: &[Bytes]) -> Result<BoundedBatch, BoundsError> {
        BoundedBatch::new(self, src, dst)
    }
}
