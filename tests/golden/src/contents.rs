//! What lies in the listed blocks of a rank, by content.
//!
//! This is the comparison's own walk over placements and views, entry by entry and unit by unit; it shares nothing with the
//! planner. Without a limit on blocks it would follow a record's numbers anywhere, so it is for requests that are bound.

use kvferry_geometry::layout::{PagedView, StateView, View};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::placement::{PagedPlacement, Placement, StatePlacement, TokenClass};
use kvferry_geometry::spec::{ItemKind, PagedItem, Retention, StateItem};
use kvferry_geometry::units::{ItemId, Name};

use crate::blocks::List;
use crate::engine::Engine;
use crate::relation::{Cell, ContentMap, Overlap};

/// The most cells that are listed for one rank.
const MAX_CELLS: usize = 1 << 22;

/// Blocks whose contents can't be listed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContentsError {
    /// Two items in one place.
    #[error("request {request}: {overlap}")]
    Overlap {
        /// The request.
        request: String,
        /// Where.
        overlap: Overlap,
    },
    /// Too much to list.
    #[error("request {request}: its blocks hold more than the {limit} vectors that are compared")]
    TooMuch {
        /// The request.
        request: String,
        /// The limit.
        limit: usize,
    },
}

/// Numbers items by name, so that both engines' numbers agree.
#[derive(Clone, Debug)]
pub struct Names<'m>(&'m Manifest);

impl<'m> Names<'m> {
    /// The numbers are this engine's item ids.
    #[must_use]
    pub fn new(manifest: &'m Manifest) -> Self {
        Self(manifest)
    }

    /// An item's number, if the engine has it.
    #[must_use]
    pub fn get(&self, name: &Name) -> Option<usize> {
        self.0.spec().find(name).map(ItemId::index)
    }
}

/// What lies in the listed blocks of one rank of a request that is bound: its blocks exist. Only what `keep` says of an
/// item's number and a byte of it.
///
/// A byte of a paged item is counted by (entry, head, byte), of a ring by (place, head, byte), of a state by (position,
/// part, unit, row, byte): all over the whole model, so that shards and replicas agree.
///
/// # Errors
/// Two items in one place, or too much to list.
pub fn contents(
    engine: &Engine,
    names: &Names<'_>,
    rank: usize,
    lists: &[List],
    request: &str,
    keep: &dyn Fn(usize, u64) -> bool,
) -> Result<ContentMap, ContentsError> {
    let manifest = &engine.manifest;
    let mut cells = Vec::new();
    let (Some(r), Some(&base)) = (manifest.ranks().get(rank), engine.bases.get(rank)) else {
        return Ok(ContentMap::default());
    };
    for (group, list) in manifest.groups().iter().zip(lists) {
        for &id in &group.items {
            let Some(item) = manifest.spec().get(id) else { continue };
            let (Some(Some(placed)), Some(Some(view))) = (r.placement.get(id.index()), r.layout.views.get(id.index()))
            else {
                continue;
            };
            // An item that only the other side has moves nowhere.
            let Some(number) = names.get(&item.name) else { continue };
            let listed = match (list, &item.kind, placed, view) {
                (List::Paged { first, blocks, .. }, ItemKind::Paged(spec), Placement::Paged(p), View::Paged(v)) => {
                    paged_cells(spec, p, v, (*first, blocks), (base, number), &mut cells)
                }
                (List::State(slots), ItemKind::State(spec), Placement::State(p), View::State(v)) => {
                    state_cells(spec, p, v, slots, (base, number), &mut cells)
                }
                // A manifest's groups are of one kind.
                _ => Some(()),
            };
            let limit = MAX_CELLS;
            listed.ok_or_else(|| ContentsError::TooMuch { request: request.to_owned(), limit })?;
        }
    }
    cells.retain(|c| keep(c.item, c.byte));
    ContentMap::new(cells).map_err(|overlap| ContentsError::Overlap { request: request.to_owned(), overlap })
}

/// The memory that the listed blocks of one rank take up with their padding: sorted ranges of addresses, neighbours merged.
///
/// A block is as long as its stride. Where its item starts inside a stride (a packed row of many layers, with room after
/// the item), the block is the whole row.
#[must_use]
pub fn rows(engine: &Engine, rank: usize, lists: &[List]) -> Vec<(u64, u64)> {
    let (Some(r), Some(&base)) = (engine.manifest.ranks().get(rank), engine.bases.get(rank)) else { return Vec::new() };
    let mut rows = Vec::new();
    for (group, list) in engine.manifest.groups().iter().zip(lists) {
        let ids: Vec<u32> = match list {
            List::Paged { blocks, .. } => blocks.clone(),
            List::State(slots) => slots.iter().map(|s| s.1).collect(),
        };
        for id in &group.items {
            let Some(Some(view)) = r.layout.views.get(id.index()) else { continue };
            let (offset, stride) = (view.offset().get(), view.stride().get().max(1));
            let inside = offset % stride;
            let whole_row = inside.saturating_add(extent(view, r.placement.get(id.index()))) <= stride;
            let start = base + if whole_row { offset - inside } else { offset };
            rows.extend(ids.iter().map(|&b| start + u64::from(b) * stride).map(|at| (at, at.saturating_add(stride))));
        }
    }
    rows.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for row in rows {
        match merged.last_mut() {
            Some(last) if row.0 <= last.1 => last.1 = last.1.max(row.1),
            _ => merged.push(row),
        }
    }
    merged
}

/// Bytes from a block's start to the end of what an item has in it.
fn extent(view: &View, placed: Option<&Option<Placement>>) -> u64 {
    match (view, placed) {
        (View::Paged(v), Some(Some(Placement::Paged(p)))) => {
            let last_kernel = u64::from(v.block_size / v.kernel.size.max(1)).saturating_sub(1) * v.kernel.stride.get();
            let ends = v.components.iter().map(|c| {
                let heads = u64::from(p.heads.count()).saturating_mul(c.head_stride.get());
                let entries = u64::from(v.kernel.size).saturating_mul(c.entry_stride.get());
                // The outer of the two axes ends last.
                c.offset.get().saturating_add(heads.max(entries))
            });
            ends.max().unwrap_or(0).saturating_add(last_kernel)
        }
        (View::State(v), Some(Some(Placement::State(p)))) => {
            let ends = v.parts.iter().zip(&p.parts).map(|(part, share)| {
                part.offset.get().saturating_add(u64::from(share.count()).saturating_mul(part.unit_stride.get()))
            });
            ends.max().unwrap_or(0)
        }
        _ => 0,
    }
}

/// `None` where there are too many.
fn paged_cells(
    spec: &PagedItem,
    placed: &PagedPlacement,
    view: &PagedView,
    (first, blocks): (u64, &[u32]),
    (base, item): (u64, usize),
    cells: &mut Vec<Cell>,
) -> Option<()> {
    let width = spec.components.iter().map(|c| c.width.get()).sum::<u64>();
    let per_entry = u64::from(spec.tokens_per_entry.max(1));
    let (size, kernel) = (u64::from(view.block_size), u64::from(view.kernel.size.max(1)));
    let mut local = first * size;
    for &block in blocks {
        let start = base + view.offset.get() + u64::from(block) * view.block_stride.get();
        for e in 0..size {
            if cells.len() >= MAX_CELLS {
                return None;
            }
            let entry = match spec.retention {
                Retention::Ring(_) => local,
                // The class deals tokens; an entry is the first of its tokens.
                _ => dealt(placed.tokens, local * per_entry) / per_entry,
            };
            let at = start + e / kernel * view.kernel.stride.get();
            for head in placed.heads.start()..placed.heads.end() {
                let h = u64::from(head - placed.heads.start());
                let mut byte = (entry * u64::from(spec.heads) + u64::from(head)) * width;
                for component in &spec.components {
                    let len = component.width.get();
                    if let Some(v) = view.components.iter().find(|v| v.name == component.name) {
                        let in_kernel = h * v.head_stride.get() + e % kernel * v.entry_stride.get();
                        cells.push(Cell { addr: at + v.offset.get() + in_kernel, len, item, byte });
                    }
                    byte += len;
                }
            }
            local += 1;
        }
    }
    Some(())
}

/// `None` where there are too many.
fn state_cells(
    spec: &StateItem,
    placed: &StatePlacement,
    view: &StateView,
    slots: &[(u64, u32)],
    (base, item): (u64, usize),
    cells: &mut Vec<Cell>,
) -> Option<()> {
    let all = spec.parts.iter().fold(0u64, |sum, p| sum.saturating_add(p.bytes()));
    for &(position, slot) in slots {
        let start = base + view.offset.get() + u64::from(slot) * view.slot_stride.get();
        let mut first = position.saturating_mul(all);
        for (part, share) in spec.parts.iter().zip(&placed.parts) {
            let Some(v) = view.parts.iter().find(|v| v.name == part.name) else { continue };
            for unit in share.start()..share.end() {
                if cells.len() >= MAX_CELLS {
                    return None;
                }
                for row in 0..u64::from(part.rows) {
                    let u = u64::from(unit - share.start());
                    let in_slot = v.offset.get() + row * v.row_stride.get() + u * v.unit_stride.get();
                    let byte = (u64::from(unit) * u64::from(part.rows) + row) * part.width.get();
                    let byte = first.saturating_add(byte);
                    cells.push(Cell { addr: start + in_slot, len: part.width.get(), item, byte });
                }
            }
            first = first.saturating_add(part.bytes());
        }
    }
    Some(())
}

/// The token at a rank's local position.
fn dealt(class: TokenClass, local: u64) -> u64 {
    let interleave = u64::from(class.interleave());
    local / interleave * class.period() + u64::from(class.index()) * interleave + local % interleave
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::units::Tokens;

    use super::*;

    #[test]
    fn tokens_are_dealt_in_turn() {
        let class = TokenClass::new(2, 4, 1).unwrap();
        let got: Vec<_> = (0..8).map(|l| dealt(class, l)).collect();
        assert_eq!(got, [4, 5, 6, 7, 12, 13, 14, 15]);
        assert!(got.iter().all(|&t| class.holds(Tokens::new(t))));
    }
}
