//! The usual layouts, written out as data.

use alloc::vec;
use alloc::vec::Vec;

use super::{CacheLayout, ComponentView, KernelBlock, MemoryKind, PagedView, PartView, Region, StateView, View};
use crate::placement::{PagedPlacement, Placement, RankPlacement, StatePlacement};
use crate::spec::{Component, Item, ItemKind, ModelSpec, PagedItem, StateItem, StatePart, ValueHeads};
use crate::units::{Bytes, ItemId, Name, RegionId};

/// Which of heads and tokens is outside in a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TokenOrder {
    /// `[head][token]` (HND).
    HeadsOuter,
    /// `[token][head]` (NHD).
    TokensOuter,
}

/// How a paged item's components lie to each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ComponentOrder {
    /// Side by side for each (token, head): K then V. Values that cover several entries or heads follow, as in a block.
    Packed,
    /// One after the other in each kernel block.
    InBlock,
    /// One after the other over all blocks: a K plane, then a V plane.
    Planes,
}

/// How the items of a group lie to each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rows {
    /// A region for each item.
    PerItem,
    /// One region for each group; a block's row holds the pages of all its items.
    Packed,
}

/// Which of rows and units is outside in a part of a state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StateOrder {
    /// `[unit][row]`: dim-first.
    UnitsOuter,
    /// `[row][unit]`: state-first. Neighbouring parts with equally many rows share them.
    RowsOuter,
}

/// One of the usual layouts. [`LayoutStyle::build`] writes it out for a rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayoutStyle {
    /// Heads or tokens outside.
    pub order: TokenOrder,
    /// K and V.
    pub components: ComponentOrder,
    /// Items.
    pub rows: Rows,
    /// Whether the groups share memory, as in hybrid models: the n-th item of every group has its pages in the same place, one
    /// page size serves all, and one pool of block ids, so that no two groups ever hold one block at a time.
    pub share: bool,
    /// Unused bytes after each page (one item's bytes in one block).
    pub padding: Bytes,
    /// Tokens of a kernel block where it is smaller than the block; it must divide every block size.
    pub kernel_block: Option<u32>,
    /// Rows or units outside.
    pub state_order: StateOrder,
    /// Rows that speculative decoding adds to every part with more than one row.
    pub scratch_rows: u32,
}

/// A layout that can't be written out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StyleError {
    /// Planes exclude packed rows and shared memory.
    #[error(
        "K and V planes over all blocks exclude rows that pack all items of a block and memory that groups share; choose one"
    )]
    PlanesInRows,
    /// Something doesn't divide the scheduler's block.
    #[error("item {item}: {what} {got} does not divide block size {block_size}")]
    Divides {
        /// The item.
        item: Name,
        /// Kernel block, tokens of an entry, or entries of a value.
        what: &'static str,
        /// How many.
        got: u32,
        /// What it should divide, in tokens or entries.
        block_size: u32,
    },
    /// The memory has more bytes than 64 bits count.
    #[error("item {item}: its blocks need more bytes than 64 bits count")]
    TooLarge {
        /// The item.
        item: Name,
    },
}

/// One item on one rank: what it needs in a block.
#[derive(Clone, Copy, Debug)]
struct Page<'a> {
    id: ItemId,
    name: &'a Name,
    kind: PageKind<'a>,
    blocks: u32,
}

#[derive(Clone, Copy, Debug)]
enum PageKind<'a> {
    /// With block size and kernel block in entries.
    Paged(&'a PagedItem, &'a PagedPlacement, u32, u32),
    State(&'a StateItem, &'a StatePlacement),
}

/// A region to be, with the pages of its rows and where they start.
struct Row<'a> {
    pages: Vec<(Page<'a>, u64)>,
    bytes: u64,
}

impl LayoutStyle {
    /// `[head][token][K, V]`, a region for each item, no padding; states `[unit][row]`.
    pub const HND: Self = Self {
        order: TokenOrder::HeadsOuter,
        components: ComponentOrder::Packed,
        rows: Rows::PerItem,
        share: false,
        padding: Bytes::ZERO,
        kernel_block: None,
        state_order: StateOrder::UnitsOuter,
        scratch_rows: 0,
    };
    /// `[token][head][K, V]`, a region for each item, no padding.
    pub const NHD: Self = Self { order: TokenOrder::TokensOuter, ..Self::HND };
    /// A K plane, then a V plane, over all blocks; `[head][token]` inside.
    pub const PLANES: Self = Self { components: ComponentOrder::Planes, ..Self::HND };
    /// A row for each block with the pages of all items; `[head][token][K, V]` inside.
    pub const PACKED_ROWS: Self = Self { rows: Rows::Packed, ..Self::HND };

    /// Writes the layout of one rank: `groups` are (items that share a block table, block size, blocks). The block size is
    /// in tokens that this rank holds in a block; it means nothing for a group of states, whose blocks are slots.
    /// Items that the rank doesn't own get no memory. Groups that share memory all have as many blocks as the largest.
    ///
    /// # Errors
    /// The first reason why it can't be written.
    pub fn build(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        groups: &[(&[ItemId], u32, u32)],
    ) -> Result<CacheLayout, StyleError> {
        let mut layout = CacheLayout { regions: Vec::new(), views: vec![None; spec.items().len()] };
        if self.components == ComponentOrder::Planes && (self.rows == Rows::Packed || self.share) {
            return Err(StyleError::PlanesInRows);
        }
        let pool = groups.iter().map(|g| g.2).max().unwrap_or(0);
        let mut by_group: Vec<Vec<Page<'_>>> = Vec::new();
        for &(ids, block_size, blocks) in groups {
            let blocks = if self.share { pool } else { blocks };
            let mut pages = Vec::new();
            for &id in ids {
                if let (Some(item), Some(Some(p))) = (spec.get(id), placement.get(id.index()))
                    && let Some(kind) = self.page(item, p, block_size)?
                {
                    pages.push(Page { id, name: &item.name, kind, blocks });
                }
            }
            by_group.push(pages);
        }
        for row in self.rows_of(&by_group)? {
            self.put(&mut layout, &row)?;
        }
        Ok(layout)
    }

    fn page<'a>(&self, item: &'a Item, p: &'a Placement, tokens: u32) -> Result<Option<PageKind<'a>>, StyleError> {
        Ok(match (&item.kind, p) {
            (ItemKind::Paged(paged), Placement::Paged(p)) => {
                let each = paged.tokens_per_entry;
                let block_size = tokens.checked_div(each).unwrap_or(0);
                // A kernel's block counts tokens too.
                let kernel = self.kernel_block.map_or(block_size, |k| k.checked_div(each).unwrap_or(0));
                let divides = |what, got: u32, block_size: u32| {
                    let fine = got > 0 && block_size > 0 && block_size.is_multiple_of(got);
                    let fault = || StyleError::Divides { item: item.name.clone(), what, got, block_size };
                    if fine { Ok(()) } else { Err(fault()) }
                };
                divides("tokens of an entry", each, tokens)?;
                divides("kernel block", kernel, block_size)?;
                for c in &paged.components {
                    divides("entries of a value", c.span, kernel)?;
                }
                Some(PageKind::Paged(paged, p, block_size, kernel))
            }
            (ItemKind::State(state), Placement::State(p)) => Some(PageKind::State(state, p)),
            // A placement of the wrong kind is what the manifest's check is for.
            _ => None,
        })
    }

    fn rows_of<'a>(&self, groups: &[Vec<Page<'a>>]) -> Result<Vec<Row<'a>>, StyleError> {
        let mut rows = Vec::new();
        match (self.rows, self.share) {
            (Rows::PerItem, false) => {
                for &page in groups.iter().flatten() {
                    rows.push(Row { pages: vec![(page, 0)], bytes: self.page_bytes(&page)? });
                }
            }
            (Rows::PerItem, true) => {
                for n in 0..groups.iter().map(Vec::len).max().unwrap_or(0) {
                    let pages: Vec<Page<'_>> = groups.iter().filter_map(|g| g.get(n).copied()).collect();
                    let bytes = pages.iter().map(|p| self.page_bytes(p)).collect::<Result<Vec<u64>, _>>()?;
                    let bytes = bytes.into_iter().max().unwrap_or(0);
                    rows.push(Row { pages: pages.into_iter().map(|p| (p, 0)).collect(), bytes });
                }
            }
            (Rows::Packed, share) => {
                for group in groups {
                    let (mut pages, mut bytes) = (Vec::new(), 0u64);
                    for page in group {
                        pages.push((*page, bytes));
                        let next = bytes.checked_add(self.page_bytes(page)?);
                        bytes = next.ok_or_else(|| StyleError::TooLarge { item: page.name.clone() })?;
                    }
                    match rows.first_mut() {
                        Some(first) if share => {
                            let first: &mut Row<'_> = first;
                            first.pages.extend(pages);
                            first.bytes = first.bytes.max(bytes);
                        }
                        _ => rows.push(Row { pages, bytes }),
                    }
                }
                rows.retain(|r| !r.pages.is_empty());
            }
        }
        Ok(rows)
    }

    /// One region whose rows hold the given pages.
    fn put(&self, layout: &mut CacheLayout, row: &Row<'_>) -> Result<(), StyleError> {
        let Some((first, _)) = row.pages.first() else { return Ok(()) };
        let too_large = || StyleError::TooLarge { item: first.name.clone() };
        let region = RegionId::new(u32::try_from(layout.regions.len()).unwrap_or(u32::MAX));
        // One plane; a row without planes is one plane of all.
        let plane = row.bytes.checked_mul(u64::from(first.blocks)).ok_or_else(too_large)?;
        let len = plane.checked_mul(self.planes(first)).ok_or_else(too_large)?;
        layout.regions.push(Region { len: Bytes::new(len), kind: MemoryKind::Host });
        for (page, offset) in &row.pages {
            let (offset, stride) = (Bytes::new(*offset), Bytes::new(row.bytes));
            layout.views[page.id.index()] = Some(match page.kind {
                PageKind::Paged(paged, placed, block_size, kernel) => {
                    let heads = u64::from(placed.heads.count());
                    let (components, kernel_bytes) = self.components_of(paged, heads, u64::from(kernel), plane);
                    View::Paged(PagedView {
                        region,
                        offset,
                        block_stride: stride,
                        blocks: page.blocks,
                        block_size,
                        kernel: KernelBlock { size: kernel, stride: Bytes::new(kernel_bytes) },
                        components,
                    })
                }
                PageKind::State(state, placed) => View::State(StateView {
                    region,
                    offset,
                    slot_stride: stride,
                    slots: page.blocks,
                    parts: self.parts_of(state, placed),
                }),
            });
        }
        Ok(())
    }

    fn planes(&self, page: &Page<'_>) -> u64 {
        match page.kind {
            PageKind::Paged(paged, ..) if self.components == ComponentOrder::Planes => paged.components.len() as u64,
            _ => 1,
        }
    }

    /// Bytes of one item in one block (in one plane of it), padding included.
    fn page_bytes(&self, page: &Page<'_>) -> Result<u64, StyleError> {
        let bytes: Option<u64> = match page.kind {
            PageKind::Paged(paged, placed, block_size, _) => {
                let heads = u64::from(placed.heads.count());
                let sizes = paged.components.iter().map(|c| component_bytes(c, heads, u64::from(block_size)));
                let mut total = Some(0u64);
                for size in sizes {
                    let (Some(t), Some(s)) = (total, size) else { return Err(too_large(page)) };
                    // In planes a block's stride is that of one plane; equal widths are not assumed, so the widest sets it.
                    total = if self.components == ComponentOrder::Planes { Some(t.max(s)) } else { t.checked_add(s) };
                }
                total
            }
            PageKind::State(state, placed) => {
                let mut total = Some(0u64);
                for (part, units) in state.parts.iter().zip(&placed.parts) {
                    let size = u64::from(part.rows + self.scratch(part.rows)) * u64::from(units.count());
                    total = total.and_then(|t| t.checked_add(size.checked_mul(part.width.get())?));
                }
                total
            }
        };
        bytes.and_then(|b| b.checked_add(self.padding.get())).ok_or_else(|| too_large(page))
    }

    /// The components' places, and the bytes from one kernel block to the next.
    fn components_of(&self, paged: &PagedItem, heads: u64, kernel: u64, plane: u64) -> (Vec<ComponentView>, u64) {
        let plain = |c: &Component| c.span == 1 && c.heads == ValueHeads::Each;
        let packed = |c: &Component| self.components == ComponentOrder::Packed && plain(c);
        let cell: u64 = paged.components.iter().filter(|c| packed(c)).map(|c| c.width.get()).sum();
        let size = |c: &Component| component_bytes(c, heads, kernel).unwrap_or(0);
        let (mut in_cell, mut apart) = (0u64, cell * heads * kernel);
        let mut out = Vec::new();
        for (index, c) in (0u64..).zip(&paged.components) {
            let width = c.width.get();
            let own_heads = if c.heads == ValueHeads::Shared { 1 } else { heads };
            let (offset, unit) = if self.components == ComponentOrder::Planes {
                (index * plane, width)
            } else if packed(c) {
                in_cell += width;
                (in_cell - width, cell)
            } else {
                apart += size(c);
                (apart - size(c), width)
            };
            let values = kernel / u64::from(c.span).max(1);
            let (head_stride, entry_stride) = match self.order {
                TokenOrder::HeadsOuter => (unit * values, unit),
                TokenOrder::TokensOuter => (unit, unit * own_heads),
            };
            out.push(ComponentView::new(c.name.clone(), offset, head_stride, entry_stride));
        }
        let widest = paged.components.iter().map(size).max().unwrap_or(0);
        (out, if self.components == ComponentOrder::Planes { widest } else { apart })
    }

    fn parts_of(&self, state: &StateItem, placed: &StatePlacement) -> Vec<PartView> {
        let members: Vec<(&StatePart, u64)> = state
            .parts
            .iter()
            .zip(&placed.parts)
            .map(|(p, units)| (p, u64::from(units.count()) * p.width.get()))
            .collect();
        let mut offset = 0;
        let mut out = Vec::new();
        // With rows outside, neighbours with equally many rows share them: a convolution's row is x, B, C.
        let share = |a: &(&StatePart, u64), b: &(&StatePart, u64)| {
            self.state_order == StateOrder::RowsOuter && a.0.rows > 1 && a.0.rows == b.0.rows
        };
        for together in members.chunk_by(share) {
            let row: u64 = together.iter().map(|m| m.1).sum();
            let mut in_row = 0;
            for (part, bytes) in together {
                let scratch_rows = self.scratch(part.rows);
                let (width, rows) = (part.width.get(), u64::from(part.rows) + u64::from(scratch_rows));
                let view = match self.state_order {
                    StateOrder::UnitsOuter => PartView::new(part.name.clone(), offset, width, width * rows),
                    StateOrder::RowsOuter => PartView::new(part.name.clone(), offset + in_row, row, width),
                };
                out.push(PartView { scratch_rows, ..view });
                in_row += bytes;
            }
            offset += row * together.first().map_or(0, |m| u64::from(m.0.rows) + u64::from(self.scratch(m.0.rows)));
        }
        out
    }

    fn scratch(&self, rows: u32) -> u32 {
        if rows > 1 { self.scratch_rows.min(crate::spec::MAX_ROWS) } else { 0 }
    }
}

fn too_large(page: &Page<'_>) -> StyleError {
    StyleError::TooLarge { item: page.name.clone() }
}

/// Bytes of a component's values for so many entries.
fn component_bytes(c: &Component, heads: u64, entries: u64) -> Option<u64> {
    let heads = if c.heads == ValueHeads::Shared { 1 } else { heads };
    c.width.get().checked_mul(heads)?.checked_mul(entries / u64::from(c.span).max(1))
}
