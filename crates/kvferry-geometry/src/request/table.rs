//! Block tables: which block holds which stretch of the sequence.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use crate::units::{BlockId, TokenRange, Tokens};

/// The most blocks that a map is made of for a list of few of them: a mebibyte.
const LARGEST_MAP: u32 = 1 << 23;
/// A list of so many is compared each with each.
const FEW: usize = 16;
/// With more blocks than this for each that is listed, to sort the list is quicker than to make a map of all; beyond
/// [`LARGEST_MAP`], a map may only be as long as the list.
const SPARSE: u64 = 4096;
const DENSE: u64 = 64;

/// Consecutive table positions with consecutive block ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Stretch {
    /// Counted from the table's first.
    position: u64,
    id: u32,
    count: u32,
}

/// The ids of a table: as they came, or as stretches where these are much fewer. Shared, since a table goes into each request,
/// grant and order that names its blocks.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Ids {
    List(Arc<[BlockId]>),
    Stretches(Arc<[Stretch]>),
}

/// One group's blocks of one request, by table position.
///
/// The entry at position `k` covers tokens `[k·block_tokens, (k+1)·block_tokens)` of the sequence. A table may start
/// late: blocks that a window has left behind, or that a prefix hit covers, need not be listed.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BlockTable {
    first: u64,
    len: u64,
    /// One past the largest id; 0 without entries.
    end: u64,
    ids: Ids,
}

impl Default for BlockTable {
    fn default() -> Self {
        Self::new(0, &[])
    }
}

impl BlockTable {
    /// A table whose entries from `first_position` on are `ids`.
    #[must_use]
    pub fn new(first_position: u64, ids: &[BlockId]) -> Self {
        let follows = |a: BlockId, b: BlockId| a.get().wrapping_add(1) == b.get() && b != BlockId::ZERO;
        let breaks = ids.windows(2).filter(|w| !follows(w[0], w[1])).count();
        let end = ids.iter().max().map_or(0, |id| u64::from(id.get()) + 1);
        let len = ids.len() as u64;
        let ids = if breaks.saturating_mul(8) <= ids.len() {
            let mut list: Vec<Stretch> = Vec::with_capacity(breaks + 1);
            for (position, &id) in (0u64..).zip(ids) {
                match list.last_mut() {
                    Some(last) if last.id.checked_add(last.count) == Some(id.get()) => last.count += 1,
                    _ => list.push(Stretch { position, id: id.get(), count: 1 }),
                }
            }
            Ids::Stretches(list.into())
        } else {
            Ids::List(ids.into())
        };
        Self { first: first_position, len, end, ids }
    }

    /// A table of runs of consecutive ids, each by its first and how many, cut where they pass the largest id: the same as of the
    /// ids themselves, without a list of them where the runs are few.
    #[must_use]
    pub fn from_runs(first_position: u64, runs: &[(BlockId, u32)]) -> Self {
        let (mut list, mut len, mut end) = (Vec::<Stretch>::new(), 0u64, 0);
        for &(first, count) in runs {
            let id = first.get();
            let count = count.min((u32::MAX - id).saturating_add(1));
            if count == 0 {
                continue;
            }
            match list.last_mut() {
                Some(last) if last.id.checked_add(last.count) == Some(id) => last.count += count,
                _ => list.push(Stretch { position: len, id, count }),
            }
            len += u64::from(count);
            end = end.max(u64::from(id) + u64::from(count));
        }
        let breaks = list.len().saturating_sub(1) as u64;
        if breaks.saturating_mul(8) <= len {
            return Self { first: first_position, len, end, ids: Ids::Stretches(list.into()) };
        }
        let ids = list.iter().flat_map(|s| (0..s.count).map(move |i| BlockId::new(s.id + i))).collect();
        Self { first: first_position, len, end, ids: Ids::List(ids) }
    }

    /// A table of `count` consecutive ids, cut where they pass the largest id.
    #[must_use]
    pub fn contiguous(first_position: u64, first: BlockId, count: u32) -> Self {
        let id = first.get();
        let count = count.min((u32::MAX - id).saturating_add(1));
        let (len, end) = (u64::from(count), if count == 0 { 0 } else { u64::from(id) + u64::from(count) });
        let stretch = Stretch { position: 0, id, count };
        let ids = Ids::Stretches(if count == 0 { Arc::default() } else { Arc::new([stretch]) });
        Self { first: first_position, len, end, ids }
    }

    /// The position of the first entry.
    #[must_use]
    pub fn first_position(&self) -> u64 {
        self.first
    }

    /// How many entries.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The block ids in order of position.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> {
        let (list, stretches) = match &self.ids {
            Ids::List(list) => (&list[..], &[][..]),
            Ids::Stretches(stretches) => (&[][..], &stretches[..]),
        };
        let of_stretch = |s: &Stretch| {
            let id = s.id;
            (0..s.count).map(move |i| BlockId::new(id + i))
        };
        list.iter().copied().chain(stretches.iter().flat_map(of_stretch))
    }

    /// A reader at a listed position.
    pub(crate) fn reader(&self, position: u64) -> Reader<'_> {
        let at = position.saturating_sub(self.first);
        match &self.ids {
            Ids::List(list) => Reader::List { list, at },
            Ids::Stretches(list) => {
                let i = list.partition_point(|s| s.position <= at).saturating_sub(1);
                Reader::Stretches { rest: &list[i..], at }
            }
        }
    }

    /// The tokens that the entries cover.
    pub(super) fn tokens(&self, block_tokens: Tokens) -> TokenRange {
        let at = |position: u64| Tokens::new(position.saturating_mul(block_tokens.get()));
        TokenRange::new(at(self.first), at(self.first.saturating_add(self.len)))
    }

    /// One past the largest id; 0 without entries.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// The blocks of a ring as a table of the positions `[from, to)`: position `k` lies in the ring's block `k mod len`.
    pub(super) fn unrolled(&self, from: u64, to: u64) -> Self {
        let ids: Vec<BlockId> = self.iter().collect();
        let at = |k: u64| ids.get(usize::try_from(k.checked_rem(self.len)?).ok()?).copied();
        Self::new(from, &(from..to).filter_map(at).collect::<Vec<_>>())
    }

    /// An id that stands twice among the entries `from` to `to`, counted from the first; ids are below `blocks`.
    pub(super) fn repeated(&self, blocks: u32, from: u64, to: u64) -> Option<BlockId> {
        match &self.ids {
            Ids::Stretches(list) => {
                if list.len() < 2 {
                    return None;
                }
                // The part of every stretch that lies inside; what is cut off has fewer than 2^32 entries.
                let inside = |s: &Stretch| {
                    let (a, b) = (s.position.max(from), (s.position + u64::from(s.count)).min(to));
                    let cut = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
                    (a < b).then(|| (s.id + cut(a - s.position), cut(b - a)))
                };
                let mut sorted: Vec<(u32, u32)> = list.iter().filter_map(inside).collect();
                sorted.sort_unstable();
                sorted.windows(2).find(|w| w[1].0 - w[0].0 < w[0].1).map(|w| BlockId::new(w[1].0))
            }
            Ids::List(list) => {
                let fits = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).min(list.len());
                let listed = &list[fits(from)..fits(to)];
                if listed.len() <= FEW {
                    return (1..listed.len()).find(|&i| listed[..i].contains(&listed[i])).map(|i| listed[i]);
                }
                // A map of all blocks is quick, but there may be thousands for each that is listed, and a peer may claim that it has very many.
                let room = if blocks > LARGEST_MAP { DENSE } else { SPARSE };
                if (listed.len() as u64).saturating_mul(room) < u64::from(blocks) {
                    let mut sorted = listed.to_vec();
                    sorted.sort_unstable();
                    return sorted.windows(2).find(|w| w[0] == w[1]).map(|w| w[0]);
                }
                let mut seen = vec![0u64; blocks as usize / 64 + 1];
                listed.iter().copied().find(|id| {
                    let (word, bit) = (&mut seen[id.get() as usize / 64], 1u64 << (id.get() % 64));
                    core::mem::replace(word, *word | bit) & bit != 0
                })
            }
        }
    }
}

/// Reads a table forward.
#[derive(Clone, Copy)]
pub(crate) enum Reader<'a> {
    List { list: &'a [BlockId], at: u64 },
    Stretches { rest: &'a [Stretch], at: u64 },
}

impl Reader<'_> {
    /// The id here, and for how many entries from here on ids are known to be consecutive.
    #[inline]
    pub(crate) fn get(&self) -> (u32, u32) {
        match self {
            Self::List { list, at } => {
                (usize::try_from(*at).ok().and_then(|at| list.get(at)).map_or(0, |id| id.get()), 1)
            }
            Self::Stretches { rest, at } => match rest.first() {
                Some(s) => {
                    // Less than the stretch's count, so it fits.
                    let inside = u32::try_from(at - s.position).unwrap_or(0);
                    (s.id + inside, s.count - inside)
                }
                None => (0, 1),
            },
        }
    }

    /// How many runs of known consecutive ids there can be from here on.
    pub(crate) fn runs(&self) -> u64 {
        match self {
            Self::List { list, at } => (list.len() as u64).saturating_sub(*at),
            Self::Stretches { rest, .. } => rest.len() as u64,
        }
    }

    /// Moves on by some entries.
    #[inline]
    pub(crate) fn skip(&mut self, entries: u64) {
        match self {
            Self::List { at, .. } => *at += entries,
            Self::Stretches { rest, at } => {
                *at += entries;
                while let [s, more @ ..] = rest {
                    if *at < s.position + u64::from(s.count) {
                        break;
                    }
                    *rest = more;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of runs is the table of their ids, however they are cut.
    #[test]
    fn runs_make_the_table_of_their_ids() {
        let mut seed = 7u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            u32::try_from((seed >> 33) % n).unwrap_or(0)
        };
        for _ in 0..2000 {
            let near_the_end = below(4) == 0;
            let base = if near_the_end { u32::MAX - 60 } else { 0 };
            let count = below(12);
            let runs: Vec<(BlockId, u32)> =
                (0..count).map(|_| (BlockId::new(base + below(50)), below(1 + u64::from(count) * 3))).collect();
            let ids: Vec<BlockId> = runs
                .iter()
                .flat_map(|(first, n)| u64::from(first.get())..u64::from(first.get()) + u64::from(*n))
                .filter_map(|id| u32::try_from(id).ok().map(BlockId::new))
                .collect();
            let table = BlockTable::from_runs(3, &runs);
            assert_eq!(table.iter().collect::<Vec<_>>(), ids);
            // A run that is cut at the largest id is the one place where the ids alone say less.
            if runs.iter().all(|(first, n)| first.get().checked_add(*n).is_some()) {
                assert_eq!(table, BlockTable::new(3, &ids));
            }
        }
        assert_eq!(BlockTable::from_runs(0, &[]), BlockTable::default());
    }

    /// Whichever way it is looked for: few and many ids, in a row and scattered, of few blocks and of more than are ever mapped.
    #[test]
    fn an_id_that_stands_twice_is_found() {
        let mut seed = 7u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        let mut found = [[0; 2]; 4];
        for round in 0..4000 {
            let (way, blocks) = match round % 4 {
                0 => (0, 64),
                1 => (1, 1000),
                2 => (2, 1 << 20),
                _ => (3, LARGEST_MAP + 1),
            };
            let (count, step) = (below(60), below(3));
            let mut ids: Vec<BlockId> = (0..count)
                .map(|i| if step == 0 { below(u64::from(blocks)) } else { (i * step) % u64::from(blocks) })
                .map(|id| BlockId::new(u32::try_from(id).unwrap_or(0)))
                .collect();
            if below(2) == 0 && ids.len() > 1 {
                let (from, to) = (below(count), below(count));
                ids[usize::try_from(to).unwrap_or(0)] = ids[usize::try_from(from).unwrap_or(0)];
            }
            let from = below(4);
            let to = from + below(70);
            let inside = ids.iter().enumerate().filter(|(i, _)| (from..to).contains(&(*i as u64))).map(|(_, id)| *id);
            let inside: Vec<BlockId> = inside.collect();
            let twice = |id: BlockId| inside.iter().filter(|i| **i == id).count() > 1;
            let told = BlockTable::new(0, &ids).repeated(blocks, from, to);
            assert_eq!(told.is_some(), inside.iter().any(|id| twice(*id)), "{ids:?} {from} {to} {blocks}");
            assert!(told.is_none_or(twice), "{told:?} of {ids:?}");
            found[way][usize::from(told.is_some())] += 1;
        }
        assert!(found.iter().flatten().all(|n| *n > 100), "{found:?}");
    }
}
