//! Where each item's bytes lie in a rank's registered memory.
//!
//! A rank registers *regions*; a [`View`] says how one item lies in one of them. Of a paged item, the byte of (block `b`,
//! entry `e` of the block, head `h` counted from the rank's first, component `c`, byte `x`) is at
//!
//! ```text
//! offset + b·block_stride + (e / kernel.size)·kernel.stride
//!        + c.offset + h·c.head_stride + (e mod kernel.size) / c.span · c.entry_stride
//!        + (x / chunks.bytes)·chunks.stride + x mod chunks.bytes
//! ```
//!
//! which covers heads outside tokens (HND) and tokens outside heads (NHD), K and V packed or in planes, scales apart from their
//! data, rows of many layers, padding, and kernel blocks smaller than the scheduler's. Of a state item, the byte of (slot `s`,
//! part `p`, row `r`, unit `u` counted from the rank's first, byte `x`) is at
//!
//! ```text
//! offset + s·slot_stride + p.offset + r·p.row_stride + u·p.unit_stride + x
//! ```
//!
//! [`LayoutStyle::build`] writes the usual layouts. Several items may have views over one region: hybrid models share memory
//! between groups. What must never overlap are two places of one group, and [`check`](CacheLayout::check) proves that.

use alloc::vec::Vec;
use core::fmt;

use crate::units::{Bytes, Name, RegionId};

mod check;
mod overlap;
mod sharing;
mod style;

pub use check::LayoutError;
pub(crate) use sharing::{Collector, SharedMemory};
pub use style::{ComponentOrder, LayoutStyle, Rows, StateOrder, StyleError, TokenOrder};

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
    /// Bytes from one value to the next along the entries: from one entry to the next where a value covers one.
    pub entry_stride: Bytes,
    /// How the bytes of a value are cut, where they don't lie side by side.
    pub chunks: Option<Chunks>,
}

impl ComponentView {
    /// A component whose values lie whole.
    #[must_use]
    pub fn new(name: Name, offset: u64, head_stride: u64, entry_stride: u64) -> Self {
        let (offset, head_stride) = (Bytes::new(offset), Bytes::new(head_stride));
        Self { name, offset, head_stride, entry_stride: Bytes::new(entry_stride), chunks: None }
    }
}

/// Values cut into chunks: chunk `i` of a value starts `i` strides after its first byte.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Chunks {
    /// Bytes of a chunk; divides the component's width.
    pub bytes: Bytes,
    /// Bytes from one chunk of a value to the next.
    pub stride: Bytes,
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
    /// Entries that this rank holds in one block.
    pub block_size: u32,
    /// The kernel's blocks.
    pub kernel: KernelBlock,
    /// Every component of the item, in any order.
    pub components: Vec<ComponentView>,
}

/// How one part of a state lies in a slot.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PartView {
    /// The part's name in the spec.
    pub name: Name,
    /// Bytes from the start of the slot.
    pub offset: Bytes,
    /// Bytes from one row to the next.
    pub row_stride: Bytes,
    /// Bytes from one unit to the next.
    pub unit_stride: Bytes,
    /// Rows after the state's own that speculative decoding scribbles on: they have their place, and are never sent.
    pub scratch_rows: u32,
}

impl PartView {
    /// A part without scratch rows.
    #[must_use]
    pub fn new(name: Name, offset: u64, row_stride: u64, unit_stride: u64) -> Self {
        let (offset, row_stride) = (Bytes::new(offset), Bytes::new(row_stride));
        Self { name, offset, row_stride, unit_stride: Bytes::new(unit_stride), scratch_rows: 0 }
    }
}

/// How one state item lies in a region.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StateView {
    /// The region.
    pub region: RegionId,
    /// Byte of the region where slot 0 starts.
    pub offset: Bytes,
    /// Bytes from one slot to the next.
    pub slot_stride: Bytes,
    /// How many slots there are: ids are below this.
    pub slots: u32,
    /// Every part of the item, in any order.
    pub parts: Vec<PartView>,
}

/// How one item lies in a region.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum View {
    /// A paged item.
    Paged(PagedView),
    /// A state item.
    State(StateView),
}

impl View {
    /// Whether two views are the same but for the region.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Paged(a), Self::Paged(b)) => {
                let of = |v: &PagedView| (v.offset, v.block_stride, v.blocks, v.block_size, v.kernel);
                of(a) == of(b) && a.components == b.components
            }
            (Self::State(a), Self::State(b)) => {
                let of = |v: &StateView| (v.offset, v.slot_stride, v.slots);
                of(a) == of(b) && a.parts == b.parts
            }
            _ => false,
        }
    }

    /// The view, of a paged item.
    #[must_use]
    pub fn as_paged(&self) -> Option<&PagedView> {
        match self {
            Self::Paged(v) => Some(v),
            Self::State(_) => None,
        }
    }

    /// The view, of a state item.
    #[must_use]
    pub fn as_state(&self) -> Option<&StateView> {
        match self {
            Self::Paged(_) => None,
            Self::State(v) => Some(v),
        }
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> RegionId {
        match self {
            Self::Paged(v) => v.region,
            Self::State(v) => v.region,
        }
    }

    /// Byte of the region where block or slot 0 starts.
    #[must_use]
    pub fn offset(&self) -> Bytes {
        match self {
            Self::Paged(v) => v.offset,
            Self::State(v) => v.offset,
        }
    }

    /// Bytes from one block or slot to the next.
    #[must_use]
    pub fn stride(&self) -> Bytes {
        match self {
            Self::Paged(v) => v.block_stride,
            Self::State(v) => v.slot_stride,
        }
    }

    /// How many blocks or slots there are.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        match self {
            Self::Paged(v) => v.blocks,
            Self::State(v) => v.slots,
        }
    }
}

/// A rank's regions and, for each item by id, its view, or `None` where the rank doesn't own the item.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheLayout {
    /// Regions by id.
    pub regions: Vec<Region>,
    /// Views by item id.
    pub views: Vec<Option<View>>,
}
