//! The proof that no two places of a set of strided extents share a byte.
//!
//! Nested strides prove it at once; what they can't prove, going through the runs of one block in order does, within a stated
//! amount of work and of memory.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use super::{ComponentView, PagedView, PartView, StateView, View};
use crate::placement::{PagedPlacement, Placement, StatePlacement};
use crate::spec::{Item, ItemKind, PagedItem, StateItem, ValueHeads};
use crate::units::{Bytes, ItemId};

/// The most runs that are gone through for one set of places that meet.
pub(super) const MAX_RUNS: u64 = 1 << 20;
/// The most parts that extents are cut in, each of which gives its runs in order: some hundred kibibytes.
const MAX_PARTS: usize = 1 << 11;

/// `run` bytes at `offset` and at every step of the loops.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    offset: u128,
    /// (count, stride), largest stride first; counts above 1 only.
    dims: Vec<(u128, u128)>,
    run: u128,
}

impl Extent {
    fn new<const N: usize>(base: Bytes, offset: Bytes, dims: [(u64, Bytes); N], run: u64) -> Self {
        let some = dims.into_iter().filter(|(count, _)| *count > 1);
        let mut dims: Vec<(u128, u128)> = some.map(|(n, stride)| (u128::from(n), u128::from(stride.get()))).collect();
        dims.sort_by_key(|d| core::cmp::Reverse(d.1));
        Self { offset: u128::from(base.get()) + u128::from(offset.get()), dims, run: u128::from(run) }
    }

    /// The first byte.
    pub(super) fn start(&self) -> u128 {
        self.offset
    }

    /// The loops as (count, stride), largest stride first; counts above 1 only.
    pub(super) fn dims(&self) -> &[(u128, u128)] {
        &self.dims
    }

    /// Bytes at each point of the loops.
    pub(super) fn run(&self) -> u128 {
        self.run
    }

    /// One past the last byte.
    pub(super) fn end(&self) -> u128 {
        self.offset + self.span()
    }

    /// Whether its runs, loop by loop, come in the order of their starts and don't meet each other.
    fn ascends(&self) -> bool {
        let mut inside = self.run;
        self.dims.iter().rev().all(|(count, stride)| {
            let clears = inside <= *stride;
            inside += (count - 1) * stride;
            clears
        })
    }

    /// The start of the run after the one that starts here, at these places of the loops.
    fn following(&self, start: u128, places: &mut [u128]) -> Option<u128> {
        let mut start = start;
        for (place, (count, stride)) in places.iter_mut().zip(&self.dims).rev() {
            *place += 1;
            if *place < *count {
                return Some(start + stride);
            }
            *place = 0;
            start -= (count - 1) * stride;
        }
        None
    }

    fn span(&self) -> u128 {
        self.dims.iter().map(|(count, stride)| (count - 1) * stride).sum::<u128>() + self.run
    }
}

/// Why no proof was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// These two share a byte.
    Overlap(ItemId, ItemId),
    /// The list of runs would be too long.
    Unprovable(ItemId),
}

/// One extent for each component or part of a view, scratch rows included; the values are in range, so nothing overflows 128
/// bits.
pub(super) fn extents(item: &Item, placement: &Placement, view: &View) -> Vec<Extent> {
    match (&item.kind, placement, view) {
        (ItemKind::Paged(item), Placement::Paged(p), View::Paged(view)) => paged_extents(item, p, view),
        (ItemKind::State(item), Placement::State(p), View::State(view)) => state_extents(item, p, view),
        _ => Vec::new(),
    }
}

fn paged_extents(item: &PagedItem, placement: &PagedPlacement, view: &PagedView) -> Vec<Extent> {
    let kernels = view.block_size / view.kernel.size.max(1);
    let of_component = |view_of: &ComponentView| {
        let c = item.components.iter().find(|s| s.name == view_of.name)?;
        let heads = if c.heads == ValueHeads::Shared { 1 } else { placement.heads.count() };
        let width = c.width.get();
        let (chunk, chunk_stride) = view_of.chunks.map_or((width, Bytes::ZERO), |c| (c.bytes.get(), c.stride));
        let dims = [
            (u64::from(view.blocks), view.block_stride),
            (u64::from(kernels), view.kernel.stride),
            (u64::from(heads), view_of.head_stride),
            (u64::from(view.kernel.size / c.span.max(1)), view_of.entry_stride),
            (width / chunk.max(1), chunk_stride),
        ];
        Some(Extent::new(view.offset, view_of.offset, dims, chunk))
    };
    view.components.iter().filter_map(of_component).collect()
}

fn state_extents(item: &StateItem, placement: &StatePlacement, view: &StateView) -> Vec<Extent> {
    let of_part = |view_of: &PartView| {
        let (part, units) = item.parts.iter().zip(&placement.parts).find(|(s, _)| s.name == view_of.name)?;
        let dims = [
            (u64::from(view.slots), view.slot_stride),
            (u64::from(part.rows) + u64::from(view_of.scratch_rows), view_of.row_stride),
            (u64::from(units.count()), view_of.unit_stride),
        ];
        Some(Extent::new(view.offset, view_of.offset, dims, part.width.get()))
    };
    view.parts.iter().filter_map(of_part).collect()
}

/// Proves that no byte belongs to two places.
pub(super) fn prove_disjoint(mut members: Vec<(ItemId, Extent)>, budget: &mut u64) -> Result<(), Failure> {
    members.sort_by_key(|(_, e)| e.offset);
    // Clusters of extents whose spans meet; clusters can't meet each other.
    let mut start = 0;
    while start < members.len() {
        let mut end = members[start].1.end();
        let mut next = start + 1;
        while next < members.len() && members[next].1.offset < end {
            end = end.max(members[next].1.end());
            next += 1;
        }
        prove_cluster(members[start..next].to_vec(), budget)?;
        start = next;
    }
    Ok(())
}

fn prove_cluster(members: Vec<(ItemId, Extent)>, budget: &mut u64) -> Result<(), Failure> {
    let Some((first, extent)) = members.first() else { return Ok(()) };
    if members.len() == 1 && extent.dims.is_empty() {
        return Ok(());
    }
    // If all share their outermost loop and one step of it clears everything inside, look inside only.
    if let Some(&outer) = extent.dims.first() {
        let shared = members.iter().all(|(_, e)| e.dims.first() == Some(&outer));
        if shared {
            let inner: Vec<(ItemId, Extent)> =
                members.iter().map(|(id, e)| (*id, Extent { dims: e.dims[1..].to_vec(), ..e.clone() })).collect();
            let low = inner.iter().map(|(_, e)| e.offset).min().unwrap_or(0);
            let high = inner.iter().map(|(_, e)| e.end()).max().unwrap_or(0);
            if high - low <= outer.1 {
                return prove_disjoint(inner, budget);
            }
        }
    } else if members.iter().all(|(_, e)| e.dims.is_empty()) {
        // Plain runs whose spans meet.
        return Err(Failure::Overlap(*first, members[1].0));
    }
    by_listing(&members, budget)
}

/// Goes through every run in order and looks for two that meet.
fn by_listing(members: &[(ItemId, Extent)], budget: &mut u64) -> Result<(), Failure> {
    let runs = |e: &Extent| e.dims.iter().map(|d| d.0).fold(1u128, u128::saturating_mul);
    let total = members.iter().map(|(_, e)| runs(e)).fold(0u128, u128::saturating_add);
    let parts = if total > u128::from(MAX_RUNS) { None } else { ascending(members) };
    let Some(parts) = parts else { return shrink(members, budget) };
    let cost = u64::try_from(total).unwrap_or(u64::MAX);
    *budget =
        budget.checked_sub(cost).ok_or_else(|| Failure::Unprovable(members.first().map_or(ItemId::ZERO, |m| m.0)))?;
    let mut last: Option<(u128, ItemId)> = None;
    for (start, end, id) in merged(&parts) {
        match last {
            Some((until, of)) if start < until => return Err(Failure::Overlap(of, id)),
            _ => last = Some((end, id)),
        }
    }
    Ok(())
}

/// The same runs as extents which each give their own in order; `None` if these would be too many.
fn ascending(members: &[(ItemId, Extent)]) -> Option<Vec<(ItemId, Extent)>> {
    let mut parts = Vec::new();
    for (id, e) in members {
        // Loops are undone from the outside until what is left ascends.
        let mut open = alloc::vec![e.clone()];
        while !open.first()?.ascends() {
            let (count, stride) = open.first()?.dims.first().copied()?;
            let many = usize::try_from(count).ok()?.checked_mul(open.len())?;
            if many.checked_add(parts.len())? > MAX_PARTS {
                return None;
            }
            let inside =
                |e: &Extent, i: u128| Extent { offset: e.offset + i * stride, dims: e.dims[1..].to_vec(), ..*e };
            open = open.iter().flat_map(|e| (0..count).map(move |i| inside(e, i))).collect();
        }
        parts.extend(open.into_iter().map(|e| (*id, e)));
    }
    (parts.len() <= MAX_PARTS).then_some(parts)
}

/// The runs of extents that give their own in order, in the order of all: start, end, whose.
fn merged(members: &[(ItemId, Extent)]) -> impl Iterator<Item = (u128, u128, ItemId)> {
    let mut places: Vec<Vec<u128>> = members.iter().map(|(_, e)| alloc::vec![0; e.dims.len()]).collect();
    let mut next: BinaryHeap<Reverse<(u128, usize)>> =
        members.iter().enumerate().map(|(at, (_, e))| Reverse((e.offset, at))).collect();
    core::iter::from_fn(move || {
        let Reverse((start, at)) = next.pop()?;
        let (id, e) = &members[at];
        if let Some(following) = e.following(start, &mut places[at]) {
            next.push(Reverse((following, at)));
        }
        Some((start, start + e.run, *id))
    })
}

/// Too many runs to go through. Where all share their outermost loop, overlap between steps `i` and `j` depends only on
/// `j - i`, and steps further apart than the inside is long can't meet: so a few steps stand for all of them.
fn shrink(members: &[(ItemId, Extent)], budget: &mut u64) -> Result<(), Failure> {
    let fail = |m: &[(ItemId, Extent)]| Failure::Unprovable(m.first().map_or(ItemId::ZERO, |m| m.0));
    let outer = members.first().and_then(|(_, e)| e.dims.first().copied()).ok_or_else(|| fail(members))?;
    let (count, stride) = outer;
    if stride == 0 || members.iter().any(|(_, e)| e.dims.first() != Some(&outer)) {
        return Err(fail(members));
    }
    let low = members.iter().map(|(_, e)| e.offset).min().unwrap_or(0);
    let high = members.iter().map(|(_, e)| e.end() - (count - 1) * stride).max().unwrap_or(0);
    let steps = (high - low) / stride + 2;
    if steps >= count {
        return Err(fail(members));
    }
    let few: Vec<(ItemId, Extent)> = members
        .iter()
        .map(|(id, e)| {
            let mut e = e.clone();
            e.dims[0].0 = steps;
            (*id, e)
        })
        .collect();
    by_listing(&few, budget)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn extent(offset: u128, dims: &[(u128, u128)], run: u128) -> (ItemId, Extent) {
        (ItemId::ZERO, Extent { offset, dims: dims.to_vec(), run })
    }

    /// Every byte one by one.
    fn truth(members: &[(ItemId, Extent)]) -> bool {
        let mut seen = alloc::collections::BTreeSet::new();
        for (_, e) in members {
            let mut starts = vec![e.offset];
            for &(count, stride) in &e.dims {
                starts = starts.iter().flat_map(|s| (0..count).map(move |i| s + i * stride)).collect();
            }
            for s in starts {
                for b in s..s + e.run {
                    if !seen.insert(b) {
                        return false;
                    }
                }
            }
        }
        true
    }

    #[test]
    fn agrees_with_a_bitmap_on_small_strides() {
        // A fixed generator is enough: all that varies is small.
        let mut x = 12345u64;
        let mut next = |n: u64| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            u128::from((x >> 33) % n)
        };
        let (mut yes, mut no) = (0, 0);
        for _ in 0..20_000 {
            let members: Vec<(ItemId, Extent)> = (0..=next(2))
                .map(|_| {
                    let mut dims: Vec<(u128, u128)> = (0..next(4)).map(|_| (2 + next(3), next(24))).collect();
                    dims.sort_by_key(|d| core::cmp::Reverse(d.1));
                    extent(next(40), &dims, 1 + next(4))
                })
                .collect();
            let expected = truth(&members);
            assert_eq!(prove_disjoint(members.clone(), &mut MAX_RUNS.clone()).is_ok(), expected, "{members:?}");
            if expected { yes += 1 } else { no += 1 }
        }
        assert!(yes > 1000 && no > 1000, "{yes} disjoint, {no} overlapping");
    }

    #[test]
    fn many_interleaved_blocks_are_proven_by_a_few() {
        // Two components whose planes are interleaved so that strides do not nest.
        let a = extent(0, &[(1 << 22, 64), (2, 32)], 8);
        let b = extent(8, &[(1 << 22, 64), (2, 32)], 24);
        assert_eq!(prove_disjoint(vec![a.clone(), b], &mut MAX_RUNS.clone()), Ok(()));
        let c = extent(16, &[(1 << 22, 64), (3, 40)], 8);
        let d = extent(4, &[(1 << 22, 64)], 8);
        assert!(prove_disjoint(vec![a.clone(), d], &mut MAX_RUNS.clone()).is_err());
        assert_eq!(prove_disjoint(vec![a, c], &mut MAX_RUNS.clone()).is_ok(), {
            let few = |e: &[(u128, u128)], o| extent(o, e, 8);
            truth(&[few(&[(8, 64), (2, 32)], 0), few(&[(8, 64), (3, 40)], 16)])
        });
    }
}
