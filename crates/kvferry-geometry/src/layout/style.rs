//! The usual layouts, written out as data.

use alloc::vec;
use alloc::vec::Vec;

use super::{CacheLayout, ComponentView, KernelBlock, MemoryKind, PagedView, Region};
use crate::placement::RankPlacement;
use crate::spec::{ModelSpec, PagedItem};
use crate::units::{Bytes, ItemId, Name, RegionId};

/// Which of heads and tokens is outside in a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TokenOrder {
    /// `[head][token]` (HND).
    HeadsOuter,
    /// `[token][head]` (NHD).
    TokensOuter,
}

/// How an item's components lie to each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ComponentOrder {
    /// Side by side for each (token, head): K then V.
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

/// One of the usual layouts. [`LayoutStyle::build`] writes it out for a rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayoutStyle {
    /// Heads or tokens outside.
    pub order: TokenOrder,
    /// K and V.
    pub components: ComponentOrder,
    /// Items.
    pub rows: Rows,
    /// Unused bytes after each page (one item's bytes in one block).
    pub padding: Bytes,
    /// Entries of a kernel block where it is smaller than the block; it must divide every block size.
    pub kernel_block: Option<u32>,
}

/// A layout that can't be written out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StyleError {
    /// Planes and packed rows exclude each other.
    #[error("K and V planes over all blocks and rows that pack all items of a block exclude each other; choose one")]
    PlanesInRows,
    /// The kernel's block doesn't divide the scheduler's.
    #[error("kernel block {kernel} does not divide block size {block_size}")]
    KernelBlock {
        /// Entries of a kernel block.
        kernel: u32,
        /// Entries of a block.
        block_size: u32,
    },
    /// The memory has more bytes than 64 bits count.
    #[error("item {item}: its blocks need more bytes than 64 bits count")]
    TooLarge {
        /// The item.
        item: Name,
    },
}

/// The items of one group of a rank, with sizes for [`LayoutStyle::build`].
#[derive(Clone, Copy, Debug)]
struct Page<'a> {
    id: ItemId,
    name: &'a Name,
    paged: &'a PagedItem,
    heads: u64,
}

impl LayoutStyle {
    /// `[head][token][K, V]`, a region for each item, no padding.
    pub const HND: Self = Self {
        order: TokenOrder::HeadsOuter,
        components: ComponentOrder::Packed,
        rows: Rows::PerItem,
        padding: Bytes::ZERO,
        kernel_block: None,
    };
    /// `[token][head][K, V]`, a region for each item, no padding.
    pub const NHD: Self = Self { order: TokenOrder::TokensOuter, ..Self::HND };
    /// A K plane, then a V plane, over all blocks; `[head][token]` inside.
    pub const PLANES: Self = Self { components: ComponentOrder::Planes, ..Self::HND };
    /// A row for each block with the pages of all items; `[head][token][K, V]` inside.
    pub const PACKED_ROWS: Self = Self { rows: Rows::Packed, ..Self::HND };

    /// Writes the layout of one rank: `groups` are (items that share a block table, block size in entries, blocks).
    /// Items that the rank doesn't own get no memory.
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
        if self.components == ComponentOrder::Planes && self.rows == Rows::Packed {
            return Err(StyleError::PlanesInRows);
        }
        for &(ids, block_size, blocks) in groups {
            let kernel = self.kernel_block.unwrap_or(block_size);
            if kernel == 0 || block_size == 0 || block_size % kernel != 0 {
                return Err(StyleError::KernelBlock { kernel, block_size });
            }
            let mut pages = Vec::new();
            for &id in ids {
                if let (Some(item), Some(Some(p))) = (spec.get(id), placement.get(id.index())) {
                    let heads = u64::from(p.heads.count());
                    pages.push(Page { id, name: &item.name, paged: item.as_paged(), heads });
                }
            }
            match self.rows {
                Rows::PerItem => {
                    for page in &pages {
                        self.put(&mut layout, core::slice::from_ref(page), block_size, kernel, blocks)?;
                    }
                }
                Rows::Packed if pages.is_empty() => {}
                Rows::Packed => self.put(&mut layout, &pages, block_size, kernel, blocks)?,
            }
        }
        Ok(layout)
    }

    /// One region whose rows hold the given pages.
    fn put(
        &self,
        layout: &mut CacheLayout,
        pages: &[Page<'_>],
        block_size: u32,
        kernel: u32,
        blocks: u32,
    ) -> Result<(), StyleError> {
        let region = RegionId::new(u32::try_from(layout.regions.len()).unwrap_or(u32::MAX));
        let too_large = || StyleError::TooLarge { item: pages.first().map_or_else(|| "?".into(), |p| p.name.clone()) };
        let planes = self.components == ComponentOrder::Planes;
        let mut offset = 0u64;
        let mut views = Vec::new();
        for page in pages {
            let size = self.page_bytes(page, block_size).ok_or_else(too_large)?;
            views.push((page, offset, size));
            offset = offset.checked_add(size).ok_or_else(too_large)?;
        }
        // In planes a block's stride is that of one plane; equal widths are not assumed, so the widest sets it.
        let row = if planes {
            pages.iter().map(|p| self.plane_bytes(p, block_size)).max().flatten().ok_or_else(too_large)?
        } else {
            offset
        };
        let planes_count =
            if planes { pages.iter().map(|p| p.paged.components.len() as u64).max().unwrap_or(1) } else { 1 };
        let len = row.checked_mul(u64::from(blocks)).and_then(|l| l.checked_mul(planes_count)).ok_or_else(too_large)?;
        let plane = row.checked_mul(u64::from(blocks)).ok_or_else(too_large)?;
        layout.regions.push(Region { len: Bytes::new(len), kind: MemoryKind::Host });
        for (page, offset, size) in views {
            let kernels = u64::from(block_size / kernel);
            let pad = self.padding.get();
            let kernel_bytes = if planes { (row - pad) / kernels } else { (size - pad) / kernels };
            let components = self.components_of(page, kernel, plane);
            layout.views[page.id.index()] = Some(PagedView {
                region,
                offset: Bytes::new(offset),
                block_stride: Bytes::new(row),
                blocks,
                block_size,
                kernel: KernelBlock { size: kernel, stride: Bytes::new(kernel_bytes) },
                components,
            });
        }
        Ok(())
    }

    /// Bytes of one item in one block, padding included.
    fn page_bytes(&self, page: &Page<'_>, block_size: u32) -> Option<u64> {
        let cell: u64 = page.paged.components.iter().map(|c| c.width.get()).sum();
        cell.checked_mul(page.heads)?.checked_mul(u64::from(block_size))?.checked_add(self.padding.get())
    }

    /// Bytes of the widest component in one block, padding included.
    fn plane_bytes(&self, page: &Page<'_>, block_size: u32) -> Option<u64> {
        let width = page.paged.components.iter().map(|c| c.width.get()).max()?;
        width.checked_mul(page.heads)?.checked_mul(u64::from(block_size))?.checked_add(self.padding.get())
    }

    fn components_of(&self, page: &Page<'_>, kernel: u32, plane: u64) -> Vec<ComponentView> {
        let n = u64::from(kernel);
        let cell: u64 = page.paged.components.iter().map(|c| c.width.get()).sum();
        let mut out = Vec::new();
        let (mut before, mut index) = (0u64, 0u64);
        for c in &page.paged.components {
            let width = c.width.get();
            let (offset, unit) = match self.components {
                ComponentOrder::Packed => (before, cell),
                ComponentOrder::InBlock => (before * page.heads * n, width),
                ComponentOrder::Planes => (index * plane, width),
            };
            let (head_stride, entry_stride) = match self.order {
                TokenOrder::HeadsOuter => (unit * n, unit),
                TokenOrder::TokensOuter => (unit, unit * page.heads),
            };
            out.push(ComponentView {
                name: c.name.clone(),
                offset: Bytes::new(offset),
                head_stride: Bytes::new(head_stride),
                entry_stride: Bytes::new(entry_stride),
            });
            before += width;
            index += 1;
        }
        out
    }
}
