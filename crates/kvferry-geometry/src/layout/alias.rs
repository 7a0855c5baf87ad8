//! Which cache groups of a rank share memory, so that a request's blocks of different groups can be proven apart.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use super::CacheLayout;
use super::overlap::{self, Extent};
use crate::placement::RankPlacement;
use crate::spec::ModelSpec;
use crate::units::{BlockId, GroupId, RegionId};

/// The blocks of one group in one region, seen from outside: block `b` lies inside `[start + b·stride, ... + len)`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Track {
    group: GroupId,
    start: u64,
    stride: u64,
    len: u64,
}

/// Regions in which more than one group has its blocks. Regions alike are listed once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Shared {
    regions: BTreeSet<Vec<Track>>,
    /// Tracks that came from taking extents apart.
    apart: u128,
}

/// The most tracks, over all ranks, that extents are taken apart into; what goes beyond counts as covered from end to end.
const MAX_APART: u128 = 1 << 16;
/// The most places that one look for an overlap lists.
const MAX_PLACES: u64 = 1 << 21;

/// Two blocks of different groups.
pub(crate) type Meeting = ((GroupId, BlockId), (GroupId, BlockId));

/// A request lists so many blocks in memory that groups share that they are not compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TooMany {
    pub(crate) got: u64,
    pub(crate) limit: u64,
}

impl Shared {
    /// Whether no groups share memory.
    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Adds what groups of one rank share; `group_of` is by item.
    pub(crate) fn add(
        &mut self,
        layout: &CacheLayout,
        spec: &ModelSpec,
        placement: &RankPlacement,
        group_of: &[GroupId],
    ) {
        let mut users: Vec<(RegionId, GroupId)> = Vec::new();
        let views = layout.views.iter().zip(group_of).filter_map(|(v, g)| Some((v.as_ref()?, *g)));
        users.extend(views.map(|(v, g)| (v.region(), g)));
        users.sort_unstable();
        users.dedup();
        for region in users.chunk_by(|a, b| a.0 == b.0).filter(|c| c.len() > 1).map(|c| c[0].0) {
            let mut tracks: Vec<Track> = Vec::new();
            for (id, item) in spec.iter() {
                let (Some(p), Some(view)) = (&placement[id.index()], &layout.views[id.index()]) else { continue };
                if view.region() == region {
                    let stride = view.stride().get();
                    let group = group_of[id.index()];
                    for extent in overlap::extents(item, p, view) {
                        self.tracks_of(group, stride, view.blocks(), &extent, &mut tracks);
                    }
                }
            }
            self.regions.insert(joined(tracks));
        }
    }

    /// What a block covers of an extent: loops that step over whole blocks (heads outside blocks, say) are taken apart, and what
    /// lies inside a block's stride counts as covered from its first to its last byte.
    fn tracks_of(&mut self, group: GroupId, stride: u64, blocks: u32, extent: &Extent, out: &mut Vec<Track>) {
        let fits = |n: u128| u64::try_from(n).unwrap_or(u64::MAX);
        let mut starts = alloc::vec![extent.start()];
        let mut len = extent.run();
        let mut of_blocks = blocks > 1;
        for &(count, step) in extent.dims() {
            let more = (starts.len() as u128).saturating_mul(count);
            if of_blocks && (count, step) == (u128::from(blocks), u128::from(stride)) {
                of_blocks = false;
            } else if step > u128::from(stride) && self.apart.saturating_add(more) <= MAX_APART {
                starts = starts.iter().flat_map(|s| (0..count).map(move |i| s + i * step)).collect();
            } else {
                len += (count - 1) * step;
            }
        }
        if starts.len() > 1 {
            self.apart += starts.len() as u128;
        }
        out.extend(starts.into_iter().map(|s| Track { group, start: fits(s), stride, len: fits(len) }));
    }

    /// Two blocks of different groups that share bytes, given the blocks of each group.
    pub(crate) fn overlap(&self, ids: &BTreeMap<GroupId, Vec<BlockId>>) -> Result<Option<Meeting>, TooMany> {
        let of = |t: &Track| ids.get(&t.group).map_or(&[][..], Vec::as_slice);
        let got = self.regions.iter().flatten().map(|t| of(t).len() as u64).fold(0, u64::saturating_add);
        if got > MAX_PLACES {
            return Err(TooMany { got, limit: MAX_PLACES });
        }
        for tracks in &self.regions {
            let mut places: Vec<(u64, u64, GroupId, BlockId)> = Vec::new();
            for t in tracks {
                places.extend(of(t).iter().map(|&id| {
                    let start = t.start.saturating_add(u64::from(id.get()).saturating_mul(t.stride));
                    (start, start.saturating_add(t.len), t.group, id)
                }));
            }
            places.sort_unstable();
            // Where no two groups have met so far, only the last group can still reach on.
            let mut reach: Option<(u64, GroupId, BlockId)> = None;
            for (start, end, group, id) in places {
                match reach {
                    Some((far, of, first)) if of != group && far > start => {
                        return Ok(Some(((of, first), (group, id))));
                    }
                    Some((far, of, _)) if of == group && far >= end => {}
                    _ => reach = Some((end, group, id)),
                }
            }
        }
        Ok(None)
    }

    /// The blocks of other groups that share bytes with a block: from an id to an id, both included. Ids may pass the group's last.
    pub(crate) fn meets(&self, group: GroupId, block: BlockId) -> Vec<(GroupId, RangeInclusive<BlockId>)> {
        let mut out = Vec::new();
        for tracks in &self.regions {
            for own in tracks.iter().filter(|t| t.group == group) {
                let start = own.start.saturating_add(u64::from(block.get()).saturating_mul(own.stride));
                let end = start.saturating_add(own.len);
                out.extend(
                    tracks.iter().filter(|t| t.group != group).filter_map(|t| Some((t.group, t.within(start, end)?))),
                );
            }
        }
        out
    }
}

impl Track {
    /// The ids whose blocks reach into `[start, end)`.
    fn within(&self, start: u64, end: u64) -> Option<RangeInclusive<BlockId>> {
        let id = |n: u64| BlockId::new(u32::try_from(n).unwrap_or(u32::MAX));
        let before = end.checked_sub(self.start)?.checked_sub(1)?;
        let last = before.checked_div(self.stride).unwrap_or(0);
        // Those that end at or before the start are passed over.
        let first = match start.checked_sub(self.start.saturating_add(self.len)) {
            Some(passed) => passed.checked_div(self.stride)?.saturating_add(1),
            None => 0,
        };
        (first <= last).then(|| id(first)..=id(last))
    }
}

/// Tracks of one group that lie in one stretch of its stride become one.
fn joined(mut tracks: Vec<Track>) -> Vec<Track> {
    tracks.sort_unstable();
    let mut out: Vec<Track> = Vec::new();
    for t in tracks {
        match out.last_mut() {
            Some(last)
                if last.group == t.group
                    && last.stride == t.stride
                    && t.start <= last.start.saturating_add(last.len) =>
            {
                last.len = last.len.max(t.start + t.len - last.start);
            }
            _ => out.push(t),
        }
    }
    out
}
