//! Which item and block a destination byte belongs to, so that a difference can be named.

use kvferry_geometry::layout::{PagedView, StateView, View};
use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::placement::{PagedPlacement, Placement, StatePlacement};
use kvferry_geometry::spec::{ItemKind, ModelSpec, PagedItem, StateItem, ValueHeads};
use kvferry_geometry::units::{BlockId, ItemId, RegionId};

/// One loop over a view: bytes of a step, and how many steps.
type Loop = (u64, u64);

/// The item and block (or slot) of a byte of one rank's memory, and how many bytes from there on are of the same cell (one
/// chunk of one value). `None` where no view has the byte in a block that `wanted` names. Where several views share memory, the
/// first of those in the model's order.
#[must_use]
pub fn cell_at(
    spec: &ModelSpec,
    rank: &RankManifest,
    region: RegionId,
    offset: u64,
    wanted: impl Fn(ItemId, BlockId) -> bool,
) -> Option<(ItemId, BlockId, u64)> {
    spec.iter().find_map(|(id, item)| {
        let view = rank.layout.views.get(id.index())?.as_ref().filter(|v| v.region() == region)?;
        let at = offset.checked_sub(view.offset().get())?;
        let blocks = (view.stride().get(), u64::from(view.blocks()));
        let found = match (&item.kind, view, rank.placement.get(id.index())?.as_ref()?) {
            (ItemKind::Paged(item), View::Paged(view), Placement::Paged(p)) => paged(item, view, p, at, blocks),
            (ItemKind::State(item), View::State(view), Placement::State(p)) => state(item, view, p, at, blocks),
            _ => None,
        };
        let (block, rest) = found.filter(|f| wanted(id, f.0))?;
        Some((id, block, rest))
    })
}

fn paged(item: &PagedItem, view: &PagedView, p: &PagedPlacement, at: u64, blocks: Loop) -> Option<(BlockId, u64)> {
    let kernels = u64::from(view.block_size) / u64::from(view.kernel.size.max(1));
    view.components.iter().find_map(|c| {
        let spec = item.components.iter().find(|s| s.name == c.name)?;
        let heads = if spec.heads == ValueHeads::Shared { 1 } else { u64::from(p.heads.count()) };
        let width = spec.width.get();
        let (run, chunks) = match c.chunks {
            Some(x) => (x.bytes.get(), (x.stride.get(), width.checked_div(x.bytes.get())?)),
            None => (width, (0, 1)),
        };
        let values = u64::from(view.kernel.size / spec.span.max(1));
        let inner =
            [(view.kernel.stride.get(), kernels), (c.head_stride.get(), heads), (c.entry_stride.get(), values), chunks];
        split(at.checked_sub(c.offset.get())?, blocks, inner, run)
    })
}

fn state(item: &StateItem, view: &StateView, p: &StatePlacement, at: u64, slots: Loop) -> Option<(BlockId, u64)> {
    view.parts.iter().find_map(|part| {
        let index = item.parts.iter().position(|s| s.name == part.name)?;
        let spec = item.parts.get(index)?;
        let units = u64::from(p.parts.get(index)?.count());
        let inner = [(part.row_stride.get(), u64::from(spec.rows)), (part.unit_stride.get(), units), (0, 1), (0, 1)];
        split(at.checked_sub(part.offset.get())?, slots, inner, spec.width.get())
    })
}

/// The block and the bytes left of the cell, by taking the largest stride first: right for nested strides, which all layouts
/// have that aren't proven disjoint by exhaustion.
fn split(mut at: u64, blocks: Loop, inner: [Loop; 4], run: u64) -> Option<(BlockId, u64)> {
    let mut order = [(blocks, true), (inner[0], false), (inner[1], false), (inner[2], false), (inner[3], false)];
    order.sort_by_key(|((stride, _), _)| std::cmp::Reverse(*stride));
    let mut block = 0;
    for ((stride, count), is_block) in order {
        let index = if count <= 1 || stride == 0 { 0 } else { (at / stride).min(count - 1) };
        at -= index * stride;
        if is_block {
            block = u32::try_from(index).ok()?;
        }
    }
    (at < run).then(|| (BlockId::new(block), run - at))
}
