//! What lies where in a rank's memory: which bytes are of which block, and what each of them means.

use kvferry_geometry::layout::View;
use kvferry_geometry::manifest::{Manifest, RankManifest};
use kvferry_geometry::placement::Placement;
use kvferry_geometry::spec::{Item, ItemKind, Retention};
use kvferry_geometry::units::{RegionId, Tokens};
use kvferry_memory::pattern;

/// A block, or slot, of a group: both counted from 0.
pub type Place = (u32, u32);

/// Bytes that lie side by side in a block and mean one value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cell {
    /// From where the view has its block 0, without the block's own offset.
    pub(crate) at: u64,
    pub(crate) width: u64,
    /// Token in the block; 0 for states.
    pub(crate) entry: u64,
    pub(crate) head: u32,
    /// The component's or part's name, and the row, as a number.
    pub(crate) part: u32,
}

/// One item's view.
#[derive(Clone, Debug)]
pub(crate) struct ItemPlaces {
    pub(crate) group: u32,
    /// The item's name as a number.
    pub(crate) name: u64,
    pub(crate) retention: Option<Retention>,
    pub(crate) region: usize,
    pub(crate) offset: u64,
    pub(crate) stride: u64,
    blocks: u64,
    pub(crate) cells: Vec<Cell>,
    /// First byte in a block, and one past the last, of each stretch without another block's bytes between.
    extents: Vec<(u64, u64)>,
}

/// A rank's memory, by item.
#[derive(Clone, Debug, Default)]
pub struct RankPlaces {
    pub(crate) items: Vec<ItemPlaces>,
}

fn part(name: &str, row: u32) -> u32 {
    let folded = pattern::seed(name);
    let [a, b, c, d, ..] = folded.to_le_bytes();
    u32::from_le_bytes([a, b, c, d]).wrapping_add(row.wrapping_mul(0x9e37_79b9))
}

impl RankPlaces {
    /// Of one rank of an engine. Items with values for several entries or heads, chunks or shares of the tokens are left out: a
    /// world has none.
    #[must_use]
    pub fn new(manifest: &Manifest, rank: &RankManifest) -> Self {
        let mut items = Vec::new();
        for ((id, item), (view, placed)) in manifest.spec().iter().zip(rank.layout.views.iter().zip(&rank.placement)) {
            let (Some(view), Some(placed)) = (view, placed) else { continue };
            let (cells, extents) = cells(item, view, placed);
            items.push(ItemPlaces {
                group: manifest.group_of(id).get(),
                name: pattern::seed(item.name.as_str()),
                retention: item.as_paged().map(|p| p.retention),
                region: view.region().index(),
                offset: view.offset().get(),
                stride: view.stride().get(),
                blocks: u64::from(view.blocks()),
                cells,
                extents,
            });
        }
        Self { items }
    }

    /// Adds the blocks that have bytes in a range of a region.
    pub(crate) fn find(&self, region: RegionId, start: u64, len: u64, into: &mut Vec<Place>) {
        let end = start + len;
        for item in self.items.iter().filter(|i| i.region == region.index()) {
            for &(low, high) in &item.extents {
                let base = item.offset + low;
                let first = start.saturating_sub(base + (high - low) - 1).div_ceil(item.stride.max(1));
                let last = end.saturating_sub(base).div_ceil(item.stride.max(1)).min(item.blocks);
                for block in first..last {
                    let place = (item.group, u32::try_from(block).unwrap_or(u32::MAX));
                    if into.last() != Some(&place) {
                        into.push(place);
                    }
                }
            }
        }
    }
}

impl ItemPlaces {
    /// Which of its tokens a sequence of `n` needs.
    pub(crate) fn needs(&self, n: u64) -> (u64, u64) {
        let range = self.retention.map_or(0..n, |r| {
            let needed = r.needed(Tokens::new(n));
            needed.start().get()..needed.end().get()
        });
        (range.start, range.end)
    }
}

fn cells(item: &Item, view: &View, placed: &Placement) -> (Vec<Cell>, Vec<(u64, u64)>) {
    let (mut cells, mut extents) = (Vec::new(), Vec::new());
    match (&item.kind, view, placed) {
        (ItemKind::Paged(paged), View::Paged(v), Placement::Paged(p)) => {
            for c in &v.components {
                let Some(spec) = paged.components.iter().find(|s| s.name == c.name) else { continue };
                let first = cells.len();
                for entry in 0..u64::from(v.block_size) {
                    let (kernel, within) = (entry / u64::from(v.kernel.size), entry % u64::from(v.kernel.size));
                    for head in p.heads.start()..p.heads.end() {
                        let at = kernel * v.kernel.stride.get()
                            + c.offset.get()
                            + u64::from(head - p.heads.start()) * c.head_stride.get()
                            + within * c.entry_stride.get();
                        let (width, part) = (spec.width.get(), part(c.name.as_str(), 0));
                        cells.push(Cell { at, width, entry, head, part });
                    }
                }
                extents.extend(extent(&cells[first..]));
            }
        }
        (ItemKind::State(state), View::State(v), Placement::State(p)) => {
            for (spec, units) in state.parts.iter().zip(&p.parts) {
                let Some(c) = v.parts.iter().find(|c| c.name == spec.name) else { continue };
                let first = cells.len();
                for (row, unit) in (0..spec.rows).flat_map(|r| (units.start()..units.end()).map(move |u| (r, u))) {
                    let at = c.offset.get()
                        + u64::from(row) * c.row_stride.get()
                        + u64::from(unit - units.start()) * c.unit_stride.get();
                    let (width, part) = (spec.width.get(), part(spec.name.as_str(), row));
                    cells.push(Cell { at, width, entry: 0, head: unit, part });
                }
                extents.extend(extent(&cells[first..]));
            }
        }
        _ => {}
    }
    (cells, extents)
}

fn extent(cells: &[Cell]) -> Option<(u64, u64)> {
    let low = cells.iter().map(|c| c.at).min()?;
    let high = cells.iter().map(|c| c.at + c.width).max()?;
    Some((low, high))
}
