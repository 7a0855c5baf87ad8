//! Which cache groups share memory, and which of their blocks then have bytes in common.
//!
//! The groups of a hybrid model lie over the same bytes. What matters of that is only which blocks of one group meet which
//! blocks of another: normally those of the same number.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use super::overlap::{self, Extent};
use super::{CacheLayout, View};
use crate::placement::RankPlacement;
use crate::spec::ModelSpec;
use crate::units::{BlockId, GroupId, RegionId};

/// The most tracks of one region, and the steps that finding all relations of an engine may take.
const MAX_TRACKS: usize = 1 << 12;
const WORK: u64 = 1 << 26;

/// The blocks of one group in one region, seen from outside: block `b` lies inside `[start + b·stride, ... + len)`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Track {
    group: GroupId,
    start: i128,
    stride: i128,
    len: i128,
}

/// How blocks of group `a` meet blocks of group `b`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Relation {
    /// Equal strides: `x` of `a` meets `x + low` up to `x + high` of `b`.
    Shifted { a: GroupId, b: GroupId, low: i128, high: i128 },
    /// Unequal strides.
    Apart { a: Track, b: Track },
}

/// What groups of an engine share, over all its ranks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct SharedMemory {
    /// Each both ways.
    relations: BTreeSet<Relation>,
}

/// Memory that is shared in too many different ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooManyWays;

/// Collects what ranks share. Regions alike are looked at once.
#[derive(Default)]
pub(crate) struct Collector {
    seen: BTreeSet<Vec<Track>>,
    relations: BTreeSet<Relation>,
    work: u64,
}

impl Collector {
    /// Adds what groups of one rank share; `group_of` is by item.
    pub(crate) fn add(
        &mut self,
        layout: &CacheLayout,
        spec: &ModelSpec,
        placement: &RankPlacement,
        group_of: &[GroupId],
    ) -> Result<(), TooManyWays> {
        let mut by_region: BTreeMap<RegionId, Vec<usize>> = BTreeMap::new();
        for (index, view) in layout.views.iter().enumerate() {
            if let Some(view) = view {
                by_region.entry(view.region()).or_default().push(index);
            }
        }
        for items in by_region.into_values() {
            let first = group_of[items[0]];
            if items.iter().all(|&i| group_of[i] == first) {
                continue;
            }
            let mut spans: Vec<Span> = Vec::new();
            for i in items {
                let (Some(p), Some(view), Some(item)) = (&placement[i], &layout.views[i], spec.items().get(i)) else {
                    continue;
                };
                let extents = overlap::extents(item, p, view);
                let start = extents.iter().map(Extent::start).min().unwrap_or(0);
                let end = extents.iter().map(Extent::end).max().unwrap_or(0);
                spans.push(Span { start, end, group: group_of[i], view, extents });
            }
            let mut tracks: Vec<Track> = Vec::new();
            for span in meeting(spans) {
                for extent in &span.extents {
                    tracks_of(span.group, span.view.stride().get().into(), span.view.blocks(), extent, &mut tracks)?;
                }
            }
            let tracks = joined(tracks);
            self.spend(tracks.len())?;
            if !self.seen.contains(&tracks) {
                self.spend(tracks.len() * tracks.len())?;
                self.relate(&tracks);
                self.seen.insert(tracks);
            }
        }
        Ok(())
    }

    /// What all the ranks share.
    pub(crate) fn finish(self) -> SharedMemory {
        SharedMemory { relations: self.relations }
    }

    fn spend(&mut self, steps: usize) -> Result<(), TooManyWays> {
        self.work = self.work.saturating_add(steps as u64);
        if self.work > WORK { Err(TooManyWays) } else { Ok(()) }
    }

    fn relate(&mut self, tracks: &[Track]) {
        for &a in tracks {
            for &b in tracks.iter().filter(|b| b.group != a.group) {
                if a.stride != b.stride || a.stride == 0 {
                    self.relations.insert(Relation::Apart { a, b });
                    continue;
                }
                // They meet where b's block starts before a's ends, and ends after a's starts.
                let low = (a.start - b.start - b.len).div_euclid(a.stride) + 1;
                let high = (a.start + a.len - b.start - 1).div_euclid(a.stride);
                if low <= high {
                    self.relations.insert(Relation::Shifted { a: a.group, b: b.group, low, high });
                }
            }
        }
    }
}

impl SharedMemory {
    /// Whether no groups share memory.
    pub(crate) fn is_empty(&self) -> bool {
        self.relations.is_empty()
    }

    /// Two blocks of different groups that have bytes in common, given the sorted blocks of each group.
    pub(crate) fn first_meeting(
        &self,
        ids: &BTreeMap<GroupId, Vec<BlockId>>,
    ) -> Option<((GroupId, BlockId), (GroupId, BlockId))> {
        let listed = |g: GroupId| ids.get(&g).map_or(&[][..], Vec::as_slice);
        // Each relation stands here both ways, and one is enough: the one with fewer blocks to go through.
        for relation in &self.relations {
            let (a, b) = relation.groups();
            let (from, to) = (listed(a), listed(b));
            if (from.len(), a) > (to.len(), b) {
                continue;
            }
            for &block in from {
                let Some(range) = relation.meets(block) else { continue };
                let next = to.partition_point(|id| id < range.start());
                if let Some(&met) = to.get(next).filter(|id| range.contains(id)) {
                    return Some(((a, block), (b, met)));
                }
            }
        }
        None
    }

    /// The blocks of other groups that have bytes in common with a block: from an id to an id, both included. Ids may pass the
    /// group's last.
    pub(crate) fn meeting(&self, group: GroupId, block: BlockId) -> Vec<(GroupId, RangeInclusive<BlockId>)> {
        let of = self.relations.iter().filter(|r| r.groups().0 == group);
        let mut met: Vec<_> = of.filter_map(|r| Some((r.groups().1, r.meets(block)?))).collect();
        met.sort_unstable_by_key(|(g, ids)| (*g, *ids.start(), *ids.end()));
        met.dedup();
        met
    }
}

impl Relation {
    fn groups(&self) -> (GroupId, GroupId) {
        match self {
            Self::Shifted { a, b, .. } => (*a, *b),
            Self::Apart { a, b } => (a.group, b.group),
        }
    }

    /// The blocks of `b` that a block of `a` meets.
    fn meets(&self, block: BlockId) -> Option<RangeInclusive<BlockId>> {
        let x = i128::from(block.get());
        let (low, high) = match self {
            Self::Shifted { low, high, .. } => (x + low, x + high),
            Self::Apart { a, b } => {
                let (start, end) = (a.start + x * a.stride, a.start + x * a.stride + a.len);
                if b.stride == 0 {
                    let meets = start < b.start + b.len && b.start < end;
                    if meets { (0, i128::from(u32::MAX)) } else { (0, -1) }
                } else {
                    ((start - b.start - b.len).div_euclid(b.stride) + 1, (end - b.start - 1).div_euclid(b.stride))
                }
            }
        };
        let (low, high) = (low.max(0), high.min(u32::MAX.into()));
        let id = |n: i128| Some(BlockId::new(u32::try_from(n).ok()?));
        if low <= high { Some(id(low)?..=id(high)?) } else { None }
    }
}

/// One item of a region, from its first byte to its last.
struct Span<'a> {
    start: u128,
    end: u128,
    group: GroupId,
    view: &'a View,
    extents: Vec<Extent>,
}

/// Those that reach into an item of another group: items that lie one behind another share nothing.
fn meeting(mut spans: Vec<Span<'_>>) -> Vec<Span<'_>> {
    spans.sort_by_key(|s| s.start);
    let mut meets = vec![false; spans.len()];
    // Forwards: the furthest ends so far, of one group and of any other.
    let mut far = [(0u128, None); 2];
    for (s, meets) in spans.iter().zip(&mut meets) {
        *meets = far.iter().any(|(end, group)| *group != Some(s.group) && *end > s.start);
        if far[0].1 == Some(s.group) {
            far[0].0 = far[0].0.max(s.end);
        } else if s.end > far[0].0 {
            far = [(s.end, Some(s.group)), far[0]];
        } else if s.end > far[1].0 {
            far[1] = (s.end, Some(s.group));
        }
    }
    // Backwards: the nearest start, of one group and of any other.
    let mut near = [(u128::MAX, None); 2];
    for (s, meets) in spans.iter().zip(&mut meets).rev() {
        *meets |= near.iter().any(|(start, group)| *group != Some(s.group) && *start < s.end);
        near = if near[0].1 == Some(s.group) {
            [(s.start, Some(s.group)), near[1]]
        } else {
            [(s.start, Some(s.group)), near[0]]
        };
    }
    let mut kept = meets.into_iter();
    spans.retain(|_| kept.next().unwrap_or(true));
    spans
}

/// What a block covers of an extent: loops that step over whole blocks (heads outside blocks, say) are taken apart, and what
/// lies inside a block's stride counts as covered from its first to its last byte.
fn tracks_of(
    group: GroupId,
    stride: u128,
    blocks: u32,
    extent: &Extent,
    out: &mut Vec<Track>,
) -> Result<(), TooManyWays> {
    let mut starts = vec![extent.start()];
    let mut len = extent.run();
    let mut of_blocks = blocks > 1;
    for &(count, step) in extent.dims() {
        if of_blocks && (count, step) == (u128::from(blocks), stride) {
            of_blocks = false;
        } else if step > stride {
            if (starts.len() as u128).saturating_mul(count) > MAX_TRACKS as u128 {
                return Err(TooManyWays);
            }
            starts = starts.iter().flat_map(|s| (0..count).map(move |i| s + i * step)).collect();
        } else {
            len += (count - 1) * step;
        }
    }
    if out.len() + starts.len() > MAX_TRACKS {
        return Err(TooManyWays);
    }
    // Places of a proven view lie in a region, far below what 127 bits count.
    let fits = |n: u128| i128::try_from(n).unwrap_or(i128::MAX);
    out.extend(starts.into_iter().map(|s| Track { group, start: fits(s), stride: fits(stride), len: fits(len) }));
    Ok(())
}

/// Tracks of one group that lie in one stretch of its stride become one.
fn joined(mut tracks: Vec<Track>) -> Vec<Track> {
    tracks.sort_unstable_by_key(|t| (t.group, t.stride, t.start, t.len));
    let mut out: Vec<Track> = Vec::new();
    for t in tracks {
        match out.last_mut() {
            Some(last) if (last.group, last.stride) == (t.group, t.stride) && t.start <= last.start + last.len => {
                last.len = last.len.max(t.start + t.len - last.start);
            }
            _ => out.push(t),
        }
    }
    out
}
