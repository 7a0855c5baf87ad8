//! Where each item's bytes lie in a rank's registered memory.
//!
//! A rank registers *regions*; a [`PagedView`] says how one item lies in one of them. The byte of (block `b`, entry `e`
//! of the block, head `h` counted from the rank's first, component `c`, byte `x`) is at
//!
//! ```text
//! offset + b·block_stride + (e / kernel.size)·kernel.stride
//!        + c.offset + h·c.head_stride + (e mod kernel.size)·c.entry_stride + x
//! ```
//!
//! which covers heads outside tokens (HND) and tokens outside heads (NHD), K and V packed or in planes, rows of many
//! layers, padding, and kernel blocks smaller than the scheduler's. [`LayoutStyle::build`] writes the usual ones.
//! Several items may have views over one region: hybrid models share memory between groups. What must never overlap
//! are two places of one group, and [`check`](CacheLayout::check) proves that.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use crate::placement::{HeadRange, RankPlacement};
use crate::spec::{ModelSpec, PagedItem};
use crate::units::{Bytes, ItemId, Name, RegionId};

mod overlap;
mod style;

pub use style::{ComponentOrder, LayoutStyle, Rows, StyleError, TokenOrder};

/// Where memory lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Host memory.
    Host,
    /// Memory of the accelerator with this index.
    Device(u32),
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Device(i) => write!(f, "device {i}"),
        }
    }
}

/// A stretch of memory that a rank registers. Its address is known to the transport only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region {
    /// Its length.
    pub len: Bytes,
    /// Where it lives.
    pub kind: MemoryKind,
}

/// The blocks that attention kernels use, where they are smaller than the scheduler's: a scheduler's block is
/// `block_size / size` of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KernelBlock {
    /// Entries of one kernel block; divides the block size.
    pub size: u32,
    /// Bytes from one kernel block of a block to the next.
    pub stride: Bytes,
}

/// How one component lies in a kernel block.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ComponentView {
    /// The component's name in the spec.
    pub name: Name,
    /// Bytes from the start of the kernel block (it may lie beyond it: a V plane starts after all of K).
    pub offset: Bytes,
    /// Bytes from one head to the next.
    pub head_stride: Bytes,
    /// Bytes from one entry to the next.
    pub entry_stride: Bytes,
}

/// How one paged item lies in a region.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PagedView {
    /// The region.
    pub region: RegionId,
    /// Byte of the region where block 0 starts.
    pub offset: Bytes,
    /// Bytes from one block id to the next.
    pub block_stride: Bytes,
    /// How many blocks there are: ids are below this.
    pub blocks: u32,
    /// Entries (tokens held by this rank) of one block.
    pub block_size: u32,
    /// The kernel's blocks.
    pub kernel: KernelBlock,
    /// Every component of the item, in any order.
    pub components: Vec<ComponentView>,
}

/// A rank's regions and, for each item by id, its view, or `None` where the rank doesn't own the item.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheLayout {
    /// Regions by id.
    pub regions: Vec<Region>,
    /// Views by item id.
    pub views: Vec<Option<PagedView>>,
}

/// A fault of one view.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The lists of placements and views are not as long as the item list.
    #[error("{what} lists {got} items, but the model has {expected}")]
    ItemCount {
        /// Which list.
        what: &'static str,
        /// Its length.
        got: usize,
        /// Items of the model.
        expected: usize,
    },
    /// An item is placed here but has no view.
    #[error("item {item}: placed on this rank but no view says where it lies")]
    MissingView {
        /// The item.
        item: Name,
    },
    /// An item has a view but is not placed here.
    #[error("item {item}: has a view on this rank but is not placed here")]
    UnplacedView {
        /// The item.
        item: Name,
    },
    /// The heads of a placement are not heads of the item.
    #[error("item {item}: placed heads {heads} are not among its {total} heads")]
    HeadsOutOfItem {
        /// The item.
        item: Name,
        /// The interval placed.
        heads: HeadRange,
        /// Heads of the item.
        total: u32,
    },
    /// The view names a region that isn't there.
    #[error("item {item}: its view names region {region}, but this rank registers {registered}")]
    UnknownRegion {
        /// The item.
        item: Name,
        /// The region named.
        region: RegionId,
        /// Regions registered.
        registered: usize,
    },
    /// The view's component names are not the item's.
    #[error("item {item}: the view's components are {got:?}, the item's are {expected:?}")]
    Components {
        /// The item.
        item: Name,
        /// Names of the view.
        got: Vec<Name>,
        /// Names of the item.
        expected: Vec<Name>,
    },
    /// A region longer than any memory.
    #[error("region {region} has {len}, more than the {limit} that a region can have")]
    RegionTooLong {
        /// The region.
        region: RegionId,
        /// Its length.
        len: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// A size outside its range.
    #[error("item {item}: {what} is {got}; it must be 1 to {limit}")]
    OutOfRange {
        /// The item.
        item: Name,
        /// Which size.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The largest allowed.
        limit: u64,
    },
    /// The kernel's block doesn't divide the scheduler's.
    #[error("item {item}: kernel block {kernel} does not divide block size {block_size}")]
    KernelBlock {
        /// The item.
        item: Name,
        /// Entries of a kernel block.
        kernel: u32,
        /// Entries of a block.
        block_size: u32,
    },
    /// The interleave doesn't divide the block size, so that a stripe would cross a block's end.
    #[error("item {item}: interleave {interleave} does not divide block size {block_size}")]
    Interleave {
        /// The item.
        item: Name,
        /// Tokens dealt out at a time.
        interleave: u32,
        /// Entries of a block.
        block_size: u32,
    },
    /// The view reaches beyond its region.
    #[error("item {item}: its view reaches byte {end} of region {region}, which ends at {len}")]
    OutOfRegion {
        /// The item.
        item: Name,
        /// The region.
        region: RegionId,
        /// One past the last byte of the view.
        end: u128,
        /// Length of the region.
        len: Bytes,
    },
    /// Two places of one item, or of two items of one group, share bytes.
    #[error(
        "items {first} and {second} of one cache group share bytes of region {region}: a write to one would change the other"
    )]
    Overlap {
        /// One item.
        first: Name,
        /// The other; may be the same.
        second: Name,
        /// The region.
        region: RegionId,
    },
    /// Strides so irregular that freedom from overlap could not be proven with bounded work.
    #[error("item {item}: its strides are too irregular to prove that its blocks do not overlap; use nested strides")]
    Unprovable {
        /// The item.
        item: Name,
    },
}

/// The most blocks of a view and the most entries of a block.
const MAX_BLOCKS: u32 = 1 << 30;
const MAX_BLOCK_SIZE: u32 = 1 << 20;
/// The longest region and the largest stride: as much as an address space has.
const MAX_REGION: u64 = 1 << 48;

impl CacheLayout {
    /// Proves that every view lies inside its region and that no two places of one group overlap. `groups` lists the
    /// items that share a block table.
    ///
    /// # Errors
    /// All faults of all views.
    pub fn check(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        groups: &[Vec<ItemId>],
    ) -> Result<(), Vec<LayoutError>> {
        self.check_within(spec, placement, groups, &mut overlap::MAX_RUNS.clone())
    }

    /// As [`check`](Self::check), listing at most `budget` runs of memory and taking them off it.
    pub(crate) fn check_within(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        groups: &[Vec<ItemId>],
        budget: &mut u64,
    ) -> Result<(), Vec<LayoutError>> {
        let mut errors = Vec::new();
        for (region, r) in (0u32..).map(RegionId::new).zip(&self.regions) {
            if r.len.get() > MAX_REGION {
                errors.push(LayoutError::RegionTooLong { region, len: r.len, limit: Bytes::new(MAX_REGION) });
            }
        }
        let expected = spec.items().len();
        for (what, got) in [("the placement", placement.len()), ("the layout", self.views.len())] {
            if got != expected {
                errors.push(LayoutError::ItemCount { what, got, expected });
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        let mut sound = vec![false; expected];
        for (id, item) in spec.iter() {
            let name = &item.name;
            match (&placement[id.index()], &self.views[id.index()]) {
                (None, None) => {}
                (Some(_), None) => errors.push(LayoutError::MissingView { item: name.clone() }),
                (None, Some(_)) => errors.push(LayoutError::UnplacedView { item: name.clone() }),
                (Some(p), Some(view)) => {
                    let before = errors.len();
                    let paged = item.as_paged();
                    if p.heads.end() > paged.heads {
                        let (heads, total) = (p.heads, paged.heads);
                        errors.push(LayoutError::HeadsOutOfItem { item: name.clone(), heads, total });
                    }
                    let interleave = p.tokens.interleave();
                    if view.block_size.checked_rem(interleave) != Some(0) {
                        let block_size = view.block_size;
                        errors.push(LayoutError::Interleave { item: name.clone(), interleave, block_size });
                    }
                    self.check_view(name, paged, p.heads.count(), view, &mut errors);
                    sound[id.index()] = errors.len() == before;
                }
            }
        }
        for group in groups {
            self.check_overlap(spec, placement, group, &sound, budget, &mut errors);
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    fn check_view(&self, name: &Name, paged: &PagedItem, heads: u32, view: &PagedView, errors: &mut Vec<LayoutError>) {
        let before = errors.len();
        let mut range = |what, got: u64, limit: u64| {
            if got == 0 || got > limit {
                errors.push(LayoutError::OutOfRange { item: name.clone(), what, got, limit });
            }
        };
        range("blocks", u64::from(view.blocks), u64::from(MAX_BLOCKS));
        range("block size", u64::from(view.block_size), u64::from(MAX_BLOCK_SIZE));
        range("kernel block size", u64::from(view.kernel.size), u64::from(MAX_BLOCK_SIZE));
        let of_component = |c: &ComponentView| [c.head_stride, c.entry_stride];
        let strides = view.components.iter().flat_map(of_component).chain([view.block_stride, view.kernel.stride]);
        for stride in strides.map(Bytes::get).filter(|&s| s > MAX_REGION) {
            range("a stride", stride, MAX_REGION);
        }
        if view.kernel.size > 0 && !view.block_size.is_multiple_of(view.kernel.size) {
            let (kernel, block_size) = (view.kernel.size, view.block_size);
            errors.push(LayoutError::KernelBlock { item: name.clone(), kernel, block_size });
        }
        let mut got: Vec<Name> = view.components.iter().map(|c| c.name.clone()).collect();
        let mut expected: Vec<Name> = paged.components.iter().map(|c| c.name.clone()).collect();
        got.sort();
        expected.sort();
        if got != expected {
            errors.push(LayoutError::Components { item: name.clone(), got, expected });
        }
        let region = self.regions.get(view.region.index());
        if region.is_none() {
            let (region, registered) = (view.region, self.regions.len());
            errors.push(LayoutError::UnknownRegion { item: name.clone(), region, registered });
        }
        if let (true, Some(region)) = (errors.len() == before, region) {
            let end = overlap::extents(paged, heads, view).iter().map(overlap::Extent::end).max().unwrap_or(0);
            if end > u128::from(region.len.get()) {
                let (region, len) = (view.region, region.len);
                errors.push(LayoutError::OutOfRegion { item: name.clone(), region, end, len });
            }
        }
    }

    fn check_overlap(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        group: &[ItemId],
        sound: &[bool],
        budget: &mut u64,
        errors: &mut Vec<LayoutError>,
    ) {
        // Places can only meet within one region.
        let view_of = |id: ItemId| self.views.get(id.index()).and_then(Option::as_ref);
        let mut by_region: Vec<(RegionId, ItemId)> = group
            .iter()
            .filter(|id| sound.get(id.index()) == Some(&true))
            .filter_map(|&id| Some((view_of(id)?.region, id)))
            .collect();
        by_region.sort_unstable();
        for members in by_region.chunk_by(|a, b| a.0 == b.0) {
            let region = members[0].0;
            let extents_of = |id: ItemId| {
                let (item, p, view) = (spec.get(id)?, (*placement.get(id.index())?)?, view_of(id)?);
                Some(overlap::extents(item.as_paged(), p.heads.count(), view).into_iter().map(move |e| (id, e)))
            };
            let members: Vec<_> = members.iter().filter_map(|&(_, id)| extents_of(id)).flatten().collect();
            let name = |id: ItemId| spec.get(id).map_or_else(|| "?".into(), |i| i.name.clone());
            match overlap::prove_disjoint(members, budget) {
                Ok(()) => {}
                Err(overlap::Failure::Overlap(a, b)) => {
                    errors.push(LayoutError::Overlap { first: name(a), second: name(b), region });
                }
                Err(overlap::Failure::Unprovable(a)) => errors.push(LayoutError::Unprovable { item: name(a) }),
            }
        }
    }
}
