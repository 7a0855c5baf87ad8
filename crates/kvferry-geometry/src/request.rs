//! One request: how many tokens, which blocks on each side, what each side holds already.
//!
//! A [`BoundRequest`] is a [`Request`] proven against two engines: block ids in range, no destination block twice, and
//! for every group the tokens that move lie both in the destination's room and in what the source holds.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use crate::compat::Compatible;
use crate::digest::Digest;
use crate::manifest::Manifest;
use crate::spec::write_list;
use crate::units::{BlockId, GroupId, Name, TokenRange, Tokens};

/// The longest sequence, in tokens, and the largest table position; far beyond any model, so that products fit.
const MAX_TOKENS: u64 = 1 << 40;

/// Consecutive table positions with consecutive block ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stretch {
    /// Counted from the table's first.
    position: u64,
    id: u32,
    count: u32,
}

/// The ids of a table: as they came, or as stretches where these are much fewer.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Ids {
    List(Vec<BlockId>),
    Stretches(Vec<Stretch>),
}

/// One group's blocks of one request, by table position.
///
/// The entry at position `k` covers tokens `[k·block_tokens, (k+1)·block_tokens)` of the sequence. A table may start
/// late: blocks that a window has left behind, or that a prefix hit covers, need not be listed.
#[derive(Clone, PartialEq, Eq, Debug)]
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
            Ids::Stretches(list)
        } else {
            Ids::List(ids.to_vec())
        };
        Self { first: first_position, len, end, ids }
    }

    /// A table of `count` consecutive ids, cut where they pass the largest id.
    #[must_use]
    pub fn contiguous(first_position: u64, first: BlockId, count: u32) -> Self {
        let id = first.get();
        let count = count.min((u32::MAX - id).saturating_add(1));
        let (len, end) = (u64::from(count), if count == 0 { 0 } else { u64::from(id) + u64::from(count) });
        let ids = Ids::Stretches(if count == 0 { Vec::new() } else { vec![Stretch { position: 0, id, count }] });
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
    fn tokens(&self, block_tokens: Tokens) -> TokenRange {
        let at = |position: u64| Tokens::new(position.saturating_mul(block_tokens.get()));
        TokenRange::new(at(self.first), at(self.first.saturating_add(self.len)))
    }

    /// An id that stands twice among the entries `from` to `to`, counted from the first; ids are below `blocks`.
    fn repeated(&self, blocks: u32, from: u64, to: u64) -> Option<BlockId> {
        match &self.ids {
            Ids::Stretches(list) => {
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
                let mut seen = vec![0u64; blocks as usize / 64 + 1];
                let fits = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).min(list.len());
                list[fits(from)..fits(to)].iter().copied().find(|id| {
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

/// What may move of the source's last block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Tail {
    /// The held tokens and nothing else.
    #[default]
    Exact,
    /// The source's last block is frozen, and zero beyond the held tokens: it may move whole, as fewer descriptors.
    Frozen,
}

/// One group of the source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SrcGroup {
    /// Its blocks.
    pub table: BlockTable,
    /// The tokens whose bytes it holds.
    pub held: TokenRange,
    /// What may move of the last block.
    pub tail: Tail,
}

/// One group of the destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DstGroup {
    /// Its blocks; those of cached tokens may be listed or not.
    pub table: BlockTable,
    /// It holds tokens `[0, cached)` already (a prefix hit); they are not touched.
    pub cached: Tokens,
}

/// One request as its two engines state it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Length of the sequence: the destination wants `[0, tokens)`.
    pub tokens: Tokens,
    /// One for each group of the source, in its manifest's order.
    pub src: Vec<SrcGroup>,
    /// One for each group of the destination, in its manifest's order.
    pub dst: Vec<DstGroup>,
}

/// A fault of a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Not one entry for each group.
    #[error("the {side} lists {got} groups, but its engine has {expected}; list one for each, in its order")]
    GroupCount {
        /// Which side.
        side: crate::batch::Side,
        /// Groups listed.
        got: usize,
        /// Groups of the engine.
        expected: usize,
    },
    /// A sequence or a table position beyond all reason.
    #[error("{what} is {got}, beyond the limit of {limit}")]
    TooLong {
        /// Which number.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// A block id that some rank doesn't have.
    #[error("{side} group {group}: block {block} is out of range; every rank has blocks 0 to {blocks} (exclusive)")]
    BlockOutOfRange {
        /// Which side.
        side: crate::batch::Side,
        /// The group.
        group: Name,
        /// The largest id listed.
        block: BlockId,
        /// Blocks that every rank has.
        blocks: BlockId,
    },
    /// A block stands twice in one group: at the destination anywhere, at the source among the blocks that are read.
    #[error("{side} group {group}: block {block} is listed twice; two tokens would share its bytes")]
    RepeatedBlock {
        /// Which side.
        side: crate::batch::Side,
        /// The group.
        group: Name,
        /// The block.
        block: BlockId,
    },
    /// The destination says that it has more than the sequence is long.
    #[error("destination group {group}: {cached} are cached, but the sequence has {tokens} only")]
    CachedBeyond {
        /// The group.
        group: Name,
        /// Tokens cached.
        cached: Tokens,
        /// Length of the sequence.
        tokens: Tokens,
    },
    /// The destination lists too few blocks.
    #[error("destination group {group}: tokens {need} are needed, but its {blocks} blocks have room for {room} only")]
    NoRoom {
        /// The group.
        group: Name,
        /// Tokens needed.
        need: TokenRange,
        /// Tokens that the listed blocks cover.
        room: TokenRange,
        /// Blocks listed.
        blocks: u64,
    },
    /// The source doesn't hold what is needed.
    #[error("source group {group}: tokens {need} are needed, it holds {held}, and its {blocks} blocks cover {listed}")]
    NotHeld {
        /// The group.
        group: Name,
        /// Tokens needed.
        need: TokenRange,
        /// Tokens held.
        held: TokenRange,
        /// Tokens that the listed blocks cover.
        listed: TokenRange,
        /// Blocks listed.
        blocks: u64,
    },
}

/// Every fault of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestErrors(pub Vec<RequestError>);

impl fmt::Display for RequestErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_list(f, &self.0)
    }
}
impl core::error::Error for RequestErrors {}

/// What moves of the items that one source group and one destination group share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupMove {
    /// Group of the source engine.
    pub src_group: GroupId,
    /// Group of the destination engine.
    pub dst_group: GroupId,
    /// Exactly these tokens move; empty when the destination needs nothing.
    pub range: TokenRange,
    /// The destination's listed tokens that are zeroed as part of delivery: those after the moved ones.
    pub zero: TokenRange,
}

/// A request proven against its two engines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BoundRequest {
    /// Digests of the two engines' manifests.
    of: (Digest, Digest),
    moves: Vec<GroupMove>,
    src: Vec<BlockTable>,
    dst: Vec<BlockTable>,
}

impl BoundRequest {
    /// Checks a request against two engines.
    ///
    /// # Errors
    /// All faults at once, with group names and both values.
    pub fn new(c: &Compatible, request: Request) -> Result<Self, RequestErrors> {
        use crate::batch::Side::{Dst, Src};
        let mut errors = Vec::new();
        let (src_groups, dst_groups) = (c.src().groups(), c.dst().groups());
        for (side, got, expected) in
            [(Src, request.src.len(), src_groups.len()), (Dst, request.dst.len(), dst_groups.len())]
        {
            if got != expected {
                errors.push(RequestError::GroupCount { side, got, expected });
            }
        }
        if request.tokens.get() > MAX_TOKENS {
            errors.push(RequestError::TooLong { what: "the sequence", got: request.tokens.get(), limit: MAX_TOKENS });
        }
        if !errors.is_empty() {
            return Err(RequestErrors(errors));
        }
        for (id, group) in (0u32..).map(GroupId::new).zip(&request.src) {
            check_table(Src, c.src(), id, &group.table, &mut errors);
        }
        for (id, group) in (0u32..).map(GroupId::new).zip(&request.dst) {
            check_table(Dst, c.dst(), id, &group.table, &mut errors);
        }
        let mut moves = Vec::new();
        if errors.is_empty() {
            for &(src_group, dst_group) in c.group_pairs() {
                moves.push(move_of(c, &request, src_group, dst_group, &mut errors));
            }
        }
        if !errors.is_empty() {
            errors.dedup();
            return Err(RequestErrors(errors));
        }
        Ok(Self {
            of: c.digests(),
            moves,
            src: request.src.into_iter().map(|g| g.table).collect(),
            dst: request.dst.into_iter().map(|g| g.table).collect(),
        })
    }

    /// What moves, for every pair of groups that share items.
    #[must_use]
    pub fn moves(&self) -> &[GroupMove] {
        &self.moves
    }

    /// The engines it was bound to.
    pub(crate) fn of(&self) -> (Digest, Digest) {
        self.of
    }

    /// Whether nothing moves: the destination has all it needs.
    #[must_use]
    pub fn is_full_hit(&self) -> bool {
        self.moves.iter().all(|m| m.range.is_empty())
    }

    pub(crate) fn src_table(&self, group: GroupId) -> &BlockTable {
        &self.src[group.index()]
    }

    pub(crate) fn dst_table(&self, group: GroupId) -> &BlockTable {
        &self.dst[group.index()]
    }
}

fn check_table(
    side: crate::batch::Side,
    manifest: &Manifest,
    id: GroupId,
    table: &BlockTable,
    errors: &mut Vec<RequestError>,
) {
    let group = &manifest.groups()[id.index()];
    let last = table.first.saturating_add(table.len);
    let (got, limit) = (last.saturating_mul(group.block_tokens.get()), MAX_TOKENS * 2);
    if got > limit {
        errors.push(RequestError::TooLong { what: "the last token that a table covers", got, limit });
    }
    let blocks = manifest.blocks(id);
    if table.end > u64::from(blocks.get()) {
        let (group, block) = (group.name.clone(), BlockId::new(u32::try_from(table.end - 1).unwrap_or(u32::MAX)));
        errors.push(RequestError::BlockOutOfRange { side, group, block, blocks });
    } else if side == crate::batch::Side::Dst
        && let Some(block) = table.repeated(blocks.get(), 0, u64::MAX)
    {
        errors.push(RequestError::RepeatedBlock { side, group: group.name.clone(), block });
    }
}

/// `need = retention ∩ [cached, n)`; it must lie in the destination's room and in what the source holds.
fn move_of(
    c: &Compatible,
    request: &Request,
    src_group: GroupId,
    dst_group: GroupId,
    errors: &mut Vec<RequestError>,
) -> GroupMove {
    let (src, dst) = (&request.src[src_group.index()], &request.dst[dst_group.index()]);
    let (src_info, dst_info) = (&c.src().groups()[src_group.index()], &c.dst().groups()[dst_group.index()]);
    let n = request.tokens;
    let need = c.dst().retention(dst_group).needed(n).intersect(TokenRange::new(dst.cached, n));
    let none = TokenRange::new(need.end(), need.end());
    if dst.cached > n {
        let (group, cached) = (dst_info.name.clone(), dst.cached);
        errors.push(RequestError::CachedBeyond { group, cached, tokens: n });
    }
    if need.is_empty() {
        return GroupMove { src_group, dst_group, range: none, zero: none };
    }
    let room = dst.table.tokens(dst_info.block_tokens);
    if !room.contains(need) {
        let (group, blocks) = (dst_info.name.clone(), dst.table.len());
        errors.push(RequestError::NoRoom { group, need, room, blocks });
    }
    let listed = src.table.tokens(src_info.block_tokens);
    if !src.held.contains(need) || !listed.contains(need) {
        let (group, blocks) = (src_info.name.clone(), src.table.len());
        errors.push(RequestError::NotHeld { group, need, held: src.held, listed, blocks });
    }
    // Two positions that are read can't both be in one block. Placeholders before or after them may repeat.
    let block = src_info.block_tokens.get().max(1);
    let first = src.table.first;
    let (from, to) = (need.start().get() / block, need.end().get().div_ceil(block));
    let blocks = c.src().blocks(src_group).get();
    if let Some(block) = src.table.repeated(blocks, from.saturating_sub(first), to.saturating_sub(first)) {
        let (side, group) = (crate::batch::Side::Src, src_info.name.clone());
        errors.push(RequestError::RepeatedBlock { side, group, block });
    }
    let end = match src.tail {
        // A source that holds more than is asked for has other tokens there, not zeros.
        Tail::Frozen if src.held.end() == need.end() => {
            Tokens::new(need.end().get().next_multiple_of(block).min(room.end().get()))
        }
        Tail::Frozen | Tail::Exact => need.end(),
    };
    GroupMove {
        src_group,
        dst_group,
        range: TokenRange::new(need.start(), end),
        zero: TokenRange::new(end, room.end()),
    }
}
