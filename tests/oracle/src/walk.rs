//! Coordinates and their places, one by one.

use kvferry_geometry::layout::{ComponentView, View};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::placement::{Placement, TokenClass};
use kvferry_geometry::spec::Component;
use kvferry_geometry::units::Name;

use crate::at;

/// One group's block table for a request: entry `k` is the block for the tokens of table position `first + k`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Table {
    /// Table position of the first entry.
    pub first: u64,
    /// Block ids.
    pub blocks: Vec<u32>,
}

/// The bytes of one (item, token, head, component) on one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cell<'m> {
    /// The item's name.
    pub item: &'m Name,
    /// The component's name.
    pub component: &'m Name,
    /// The token's position in the sequence.
    pub token: u64,
    /// The head, counted over the whole model.
    pub head: u32,
    /// Bytes.
    pub width: u64,
    /// Region of the rank.
    pub region: usize,
    /// First byte in the region.
    pub offset: u64,
}

/// The first `entries` tokens of a class, in the order in which the rank stores them: tokens are dealt out like cards,
/// `interleave` at a time.
#[must_use]
pub fn dealt(class: TokenClass, entries: u64) -> Vec<u64> {
    let mut mine = Vec::new();
    let mut token = 0;
    while (mine.len() as u64) < entries {
        for index in 0..class.count() {
            for _ in 0..class.interleave() {
                if index == class.index() && (mine.len() as u64) < entries {
                    mine.push(token);
                }
                token += 1;
            }
        }
    }
    mine
}

/// Visits every cell of one item on one rank that a table reaches, in the order of the table. Nothing is visited where
/// the rank doesn't hold the item.
pub fn walk<'m>(manifest: &'m Manifest, rank: usize, item: usize, table: &Table, mut visit: impl FnMut(Cell<'m>)) {
    let Some(r) = manifest.ranks().get(rank) else { return };
    let (Some(Some(Placement::Paged(placed))), Some(Some(View::Paged(view)))) =
        (r.placement.get(item), r.layout.views.get(item))
    else {
        return;
    };
    let Some(spec) = manifest.spec().items().get(item) else { return };
    let Some(paged) = spec.as_paged() else { return };
    let named = |c: &'m ComponentView| Some((c, paged.components.iter().find(|s| s.name == c.name)?));
    let components: Vec<(&ComponentView, &Component)> = view.components.iter().filter_map(named).collect();
    let end = table.first + table.blocks.len() as u64;
    let tokens = dealt(placed.tokens, end * u64::from(view.block_size));
    let mut local = table.first * u64::from(view.block_size);
    for &block in &table.blocks {
        let block_start = view.offset.get() + u64::from(block) * view.block_stride.get();
        let (mut kernel_start, mut in_kernel) = (block_start, 0);
        for _ in 0..view.block_size {
            if in_kernel == view.kernel.size {
                kernel_start += view.kernel.stride.get();
                in_kernel = 0;
            }
            let token = tokens[at(local)];
            for (h, head) in (placed.heads.start()..placed.heads.end()).enumerate() {
                for (c, component) in &components {
                    let offset = kernel_start
                        + c.offset.get()
                        + h as u64 * c.head_stride.get()
                        + u64::from(in_kernel) * c.entry_stride.get();
                    visit(Cell {
                        item: &spec.name,
                        component: &component.name,
                        token,
                        head,
                        width: component.width.get(),
                        region: view.region.index(),
                        offset,
                    });
                }
            }
            local += 1;
            in_kernel += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_dealt_like_cards() {
        let class = |c, i, x| TokenClass::new(c, i, x).unwrap();
        assert_eq!(dealt(TokenClass::ALL, 4), [0, 1, 2, 3]);
        assert_eq!(dealt(class(2, 1, 1), 4), [1, 3, 5, 7]);
        assert_eq!(dealt(class(3, 2, 1), 5), [2, 3, 8, 9, 14]);
        assert_eq!(dealt(class(2, 4, 0), 6), [0, 1, 2, 3, 8, 9]);
    }
}
