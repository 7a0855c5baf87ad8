//! Which item and block a destination byte belongs to, so that a difference can be named.

use kvferry_geometry::layout::PagedView;
use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::{BlockId, ItemId, RegionId};

/// The item and block of a byte of one rank's memory, and how many bytes from there on are of the same cell (one
/// component of one head and entry). `None` where no view has the byte. Where several views share memory, the first in
/// the model's order.
#[must_use]
pub fn cell_at(spec: &ModelSpec, rank: &RankManifest, region: RegionId, offset: u64) -> Option<(ItemId, BlockId, u64)> {
    spec.iter().find_map(|(id, item)| {
        let view = rank.layout.views.get(id.index())?.as_ref().filter(|v| v.region == region)?;
        let heads = u64::from((*rank.placement.get(id.index())?)?.heads.count());
        view.components.iter().find_map(|c| {
            let width = item.as_paged().components.iter().find(|s| s.name == c.name)?.width.get();
            let start = view.offset.get() + c.offset.get();
            let within = offset.checked_sub(start)?;
            let strides = [
                (view.block_stride.get(), u64::from(view.blocks)),
                (view.kernel.stride.get(), kernel_blocks(view)),
                (c.head_stride.get(), heads),
                (c.entry_stride.get(), u64::from(view.kernel.size)),
            ];
            let (block, byte) = split(within, strides, width)?;
            Some((id, BlockId::new(block), width - byte))
        })
    })
}

fn kernel_blocks(view: &PagedView) -> u64 {
    u64::from(view.block_size) / u64::from(view.kernel.size.max(1))
}

/// The block and the byte of the cell, by taking the largest stride first: right for nested strides, which all layouts
/// have that aren't proven disjoint by exhaustion.
fn split(mut within: u64, strides: [(u64, u64); 4], width: u64) -> Option<(u32, u64)> {
    let mut order = [0usize, 1, 2, 3];
    order.sort_by_key(|&i| std::cmp::Reverse(strides[i].0));
    let mut block = 0;
    for i in order {
        let (stride, count) = strides[i];
        let index = if count <= 1 || stride == 0 { 0 } else { (within / stride).min(count - 1) };
        within -= index * stride;
        if i == 0 {
            block = u32::try_from(index).ok()?;
        }
    }
    (within < width).then_some((block, within))
}
