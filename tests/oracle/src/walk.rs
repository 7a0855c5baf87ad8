//! Coordinates and their places, one by one.

use kvferry_geometry::layout::{ComponentView, PagedView, PartView, StateView, View};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::placement::{PagedPlacement, Placement, StatePlacement, TokenClass};
use kvferry_geometry::spec::{Component, Item, ItemKind, PagedItem, Retention, StateItem, ValueHeads};
use kvferry_geometry::units::Name;

use crate::at;

/// One group's block table for a request: entry `k` is the block for the tokens of table position `first + k`. The table of a
/// ring lists the blocks of the ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Table {
    /// Table position of the first entry.
    pub first: u64,
    /// Block ids.
    pub blocks: Vec<u32>,
}

/// What one value or state means, the same on every engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Coordinate {
    /// First token that the value stands for; of a state its position.
    pub token: u64,
    /// Row of a state; 0 for values.
    pub row: u32,
    /// Heads that the value stands for (first, one past the last), or the one unit of a state.
    pub heads: (u32, u32),
}

/// Bytes that lie side by side on one rank: a value or a chunk of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cell<'m> {
    /// The item's name.
    pub item: &'m Name,
    /// The component's or part's name.
    pub component: &'m Name,
    /// What it means.
    pub coordinate: Coordinate,
    /// Last token that the value stands for; of a state its position.
    pub last: u64,
    /// Tokens of one of the entries that the value stands for.
    pub entry_tokens: u64,
    /// First byte of the value.
    pub byte: u64,
    /// Bytes.
    pub width: u64,
    /// Region of the rank.
    pub region: usize,
    /// First byte in the region.
    pub offset: u64,
}

impl Cell<'_> {
    /// First token, or a state's position.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.coordinate.token
    }

    /// The last token of every entry that the value stands for: an entry is once that has come.
    pub fn entries(&self) -> impl Iterator<Item = u64> + use<> {
        let (each, end) = (self.entry_tokens, self.last);
        let mut next = self.coordinate.token + each - 1;
        std::iter::from_fn(move || {
            let last = next;
            next += each;
            (last <= end).then_some(last)
        })
    }
}

/// What a request lists for the group of an item, and up to which token it has been filled.
#[derive(Clone, Copy, Debug)]
pub struct Listed<'t> {
    /// Blocks, of paged items.
    pub table: &'t Table,
    /// (position, slot), of states.
    pub states: &'t [(u64, u32)],
    /// One past the last token: a ring has the last tokens before it.
    pub end: u64,
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

/// Visits every cell of one item on one rank that a request reaches, in the order of its table. Nothing is visited where
/// the rank doesn't hold the item.
pub fn walk<'m>(manifest: &'m Manifest, rank: usize, item: usize, listed: Listed<'_>, visit: impl FnMut(Cell<'m>)) {
    let Some(r) = manifest.ranks().get(rank) else { return };
    let (Some(Some(placed)), Some(Some(view))) = (r.placement.get(item), r.layout.views.get(item)) else { return };
    let Some(spec) = manifest.spec().items().get(item) else { return };
    match (&spec.kind, placed, view) {
        (ItemKind::Paged(paged), Placement::Paged(p), View::Paged(v)) => {
            walk_paged(spec, paged, p, v, listed, visit);
        }
        (ItemKind::State(state), Placement::State(p), View::State(v)) => {
            walk_state(spec, state, p, v, listed.states, visit);
        }
        _ => {}
    }
}

fn walk_paged<'m>(
    item: &'m Item,
    paged: &'m PagedItem,
    placed: &PagedPlacement,
    view: &'m PagedView,
    listed: Listed<'_>,
    mut visit: impl FnMut(Cell<'m>),
) {
    let named = |c: &'m ComponentView| Some((c, paged.components.iter().find(|s| s.name == c.name)?));
    let components: Vec<(&ComponentView, &Component)> = view.components.iter().filter_map(named).collect();
    let table = listed.table;
    let tokens_per_entry = u64::from(paged.tokens_per_entry);
    let block_tokens = u64::from(view.block_size) * tokens_per_entry;
    let tokens = dealt(placed.tokens, (table.first + table.blocks.len() as u64) * block_tokens);
    let mut local = table.first * block_tokens;
    for &block in &table.blocks {
        let block_start = view.offset.get() + u64::from(block) * view.block_stride.get();
        let (mut kernel_start, mut in_kernel) = (block_start, 0);
        for _ in 0..view.block_size {
            if in_kernel == view.kernel.size {
                kernel_start += view.kernel.stride.get();
                in_kernel = 0;
            }
            for &(c, component) in &components {
                // A value of several entries lies where the first of them does.
                let mut values_before = 0;
                let mut entry = 0;
                while entry + component.span <= in_kernel {
                    entry += component.span;
                    values_before += 1;
                }
                if entry != in_kernel {
                    continue;
                }
                let entries = u64::from(component.span);
                let mut first = tokens[at(local)];
                let mut last = tokens[at(local + entries * tokens_per_entry - 1)];
                if let Retention::Ring(ring) = paged.retention {
                    // The latest that is there.
                    while last + ring.get() < listed.end {
                        first += ring.get();
                        last += ring.get();
                    }
                }
                let all = (placed.heads.start(), placed.heads.end());
                let each = || (placed.heads.start()..placed.heads.end()).map(|h| (h, h + 1)).collect();
                let values: Vec<(u32, u32)> = if component.heads == ValueHeads::Shared { vec![all] } else { each() };
                for (h, heads) in values.into_iter().enumerate() {
                    let start = kernel_start
                        + c.offset.get()
                        + h as u64 * c.head_stride.get()
                        + values_before * c.entry_stride.get();
                    let (piece, stride) =
                        c.chunks.map_or((component.width.get(), 0), |x| (x.bytes.get(), x.stride.get()));
                    let (mut byte, mut offset) = (0, start);
                    while byte < component.width.get() {
                        visit(Cell {
                            item: &item.name,
                            component: &component.name,
                            coordinate: Coordinate { token: first, row: 0, heads },
                            last,
                            entry_tokens: tokens_per_entry,
                            byte,
                            width: piece,
                            region: view.region.index(),
                            offset,
                        });
                        byte += piece;
                        offset += stride;
                    }
                }
            }
            local += tokens_per_entry;
            in_kernel += 1;
        }
    }
}

fn walk_state<'m>(
    item: &'m Item,
    state: &'m StateItem,
    placed: &StatePlacement,
    view: &'m StateView,
    states: &[(u64, u32)],
    mut visit: impl FnMut(Cell<'m>),
) {
    for &(position, slot) in states {
        let slot_start = view.offset.get() + u64::from(slot) * view.slot_stride.get();
        for (part, units) in state.parts.iter().zip(&placed.parts) {
            let Some(v): Option<&PartView> = view.parts.iter().find(|v| v.name == part.name) else { continue };
            for row in 0..part.rows {
                for (u, unit) in (units.start()..units.end()).enumerate() {
                    let in_slot = v.offset.get() + u64::from(row) * v.row_stride.get() + u as u64 * v.unit_stride.get();
                    visit(Cell {
                        item: &item.name,
                        component: &part.name,
                        coordinate: Coordinate { token: position, row, heads: (unit, unit + 1) },
                        last: position,
                        entry_tokens: 1,
                        byte: 0,
                        width: part.width.get(),
                        region: view.region.index(),
                        offset: slot_start + in_slot,
                    });
                }
            }
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
