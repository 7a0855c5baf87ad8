//! Proving a request against its two engines.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{
    BlockTable, DstGroup, DstPaged, DstState, MAX_TOLD, Request, RequestError, RequestErrors, SrcGroup, SrcPaged,
    SrcState, Tail,
};
use crate::batch::Side;
use crate::compat::{Compatible, Link};
use crate::digest::Digest;
use crate::manifest::Manifest;
use crate::spec::Retention;
use crate::units::{BlockId, GroupId, ItemId, Name, TokenRange, Tokens};

/// The longest sequence, in tokens, and the largest table position; far beyond any model, so that products fit.
const MAX_TOKENS: u64 = 1 << 40;
/// The most states of a group in one request.
const MAX_STATES: usize = 1 << 12;

/// A state that moves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct StateMove {
    /// How many tokens are folded into it.
    pub position: Tokens,
    /// The source's slot.
    pub src: BlockId,
    /// The destination's slot.
    pub dst: BlockId,
}

/// What moves of the items that one source group and one destination group share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMove {
    /// Group of the source engine.
    pub src_group: GroupId,
    /// Group of the destination engine.
    pub dst_group: GroupId,
    /// Which tokens these items keep; items of one group that keep others have a move of their own. `None` for states.
    pub retention: Option<Retention>,
    /// Exactly these tokens move; empty when the destination needs nothing, and for states.
    pub range: TokenRange,
    /// The destination's listed tokens that are zeroed as part of delivery: those after the moved ones.
    pub zero: TokenRange,
    /// The states that move, the one that the destination resumes from first; empty for paged items.
    pub states: Vec<StateMove>,
}

impl GroupMove {
    /// Whether neither tokens nor states move.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty() && self.states.is_empty()
    }
}

/// A request proven against its two engines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BoundRequest {
    /// Digests of the two engines' manifests.
    of: (Digest, Digest),
    moves: Vec<GroupMove>,
    /// By move: its slots at the source and at the destination, in order; empty for paged items.
    slots: Vec<(BlockTable, BlockTable)>,
    src: Vec<BlockTable>,
    dst: Vec<BlockTable>,
    /// Destination items that the source doesn't have.
    unmatched: Arc<[ItemId]>,
    /// Length of the sequence.
    tokens: Tokens,
    promised: bool,
}

impl BoundRequest {
    /// Checks a request against two engines.
    ///
    /// # Errors
    /// All faults at once, with group names and both values.
    pub fn new(c: &Compatible, request: Request) -> Result<Self, RequestErrors> {
        Self::bind(c, request, false)
    }

    /// The same for a source that is still computing what it will hold. What it lists so far is checked, and only the rest of
    /// it may be missing: later blocks of a table, the whole table (a ring's is listed whole or not at all), states.
    /// [`held`](SrcPaged::held) is not read, and [`tail`](SrcPaged::tail) counts as [`Tail::Exact`].
    ///
    /// The same tokens move as of the final request, but for a frozen tail. Nothing that is
    /// [`Whole`](crate::watermarks::Watermark::Whole) can be resolved of it: that takes the final lists.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`RequestError::NotHeld`] where a table begins behind the first token that is needed.
    pub fn promised(c: &Compatible, mut request: Request) -> Result<Self, RequestErrors> {
        for group in &mut request.src {
            if let SrcGroup::Paged(g) = group {
                (g.held, g.tail) = (TokenRange::new(Tokens::ZERO, request.tokens), Tail::Exact);
            }
        }
        Self::bind(c, request, true)
    }

    fn bind(c: &Compatible, request: Request, promised: bool) -> Result<Self, RequestErrors> {
        let mut errors = Vec::new();
        let (src_groups, dst_groups) = (c.src().groups(), c.dst().groups());
        for (side, got, expected) in
            [(Side::Src, request.src.len(), src_groups.len()), (Side::Dst, request.dst.len(), dst_groups.len())]
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
        let Request { tokens, mut src, mut dst } = request;
        let ask = Ask { c, tokens, promised };
        for (id, group) in (0u32..).map(GroupId::new).zip(&mut src) {
            check_src(ask, id, group, &mut errors);
        }
        for (id, group) in (0u32..).map(GroupId::new).zip(&mut dst) {
            check_dst(c.dst(), id, group, tokens, &mut errors);
        }
        let mut moves = Vec::new();
        if errors.is_empty() {
            moves.extend(c.links().iter().filter_map(|link| {
                let (s, d) = (&src[link.src.index()], &dst[link.dst.index()]);
                match (s, d, link.retention) {
                    (SrcGroup::Paged(s), DstGroup::Paged(d), Some(r)) => {
                        Some(paged_move(ask, *link, r, s, d, &mut errors))
                    }
                    (SrcGroup::State(s), DstGroup::State(d), None) => Some(state_move(ask, *link, s, d, &mut errors)),
                    // The groups' kinds were checked.
                    _ => None,
                }
            }));
            check_apart(c.dst(), tokens, &dst, &mut errors);
        }
        if !errors.is_empty() {
            errors.dedup();
            return Err(RequestErrors(errors));
        }
        let slots = moves.iter().map(slots_of).collect();
        let src = src.into_iter().map(|g| match g {
            SrcGroup::Paged(g) => g.table,
            SrcGroup::State(_) => BlockTable::default(),
        });
        let dst = dst.into_iter().map(|g| match g {
            DstGroup::Paged(g) => g.table,
            DstGroup::State(_) => BlockTable::default(),
        });
        let (src, dst) = (src.collect(), dst.collect());
        Ok(Self { of: c.digests(), moves, slots, src, dst, unmatched: c.unmatched(), tokens, promised })
    }

    /// What moves, for every pair of groups that share items.
    #[must_use]
    pub fn moves(&self) -> &[GroupMove] {
        &self.moves
    }

    /// Whether the source is still computing what it will hold.
    #[must_use]
    pub fn is_promised(&self) -> bool {
        self.promised
    }

    /// Length of the sequence: what moves behind it are zeros of a frozen tail.
    pub(crate) fn tokens(&self) -> Tokens {
        self.tokens
    }

    /// The engines it was bound to.
    pub(crate) fn of(&self) -> (Digest, Digest) {
        self.of
    }

    /// Whether nothing moves: the destination has all it needs, in every group.
    #[must_use]
    pub fn is_full_hit(&self) -> bool {
        self.moves.iter().all(GroupMove::is_empty)
    }

    /// The tables that a move's items use at the source and at the destination.
    pub(crate) fn tables(&self, index: usize) -> Option<(&BlockTable, &BlockTable)> {
        let m = self.moves.get(index)?;
        if m.retention.is_none() {
            return self.slots.get(index).map(|(s, d)| (s, d));
        }
        Some((self.src.get(m.src_group.index())?, self.dst.get(m.dst_group.index())?))
    }

    /// Destination items that the source doesn't have.
    pub(crate) fn unmatched(&self) -> &[ItemId] {
        &self.unmatched
    }

    pub(crate) fn dst_table(&self, group: GroupId) -> &BlockTable {
        &self.dst[group.index()]
    }
}

/// Between whom a request is bound, its length, and whether the source's lists are still growing.
#[derive(Clone, Copy)]
struct Ask<'a> {
    c: &'a Compatible,
    tokens: Tokens,
    promised: bool,
}

fn slots_of(m: &GroupMove) -> (BlockTable, BlockTable) {
    let list = |slot: fn(&StateMove) -> BlockId| BlockTable::new(0, &m.states.iter().map(slot).collect::<Vec<_>>());
    (list(|s| s.src), list(|s| s.dst))
}

fn check_src(ask: Ask<'_>, id: GroupId, group: &mut SrcGroup, errors: &mut Vec<RequestError>) {
    let Ask { c, tokens, promised } = ask;
    let (side, m) = (Side::Src, c.src());
    match group {
        SrcGroup::Paged(_) if m.is_state(id) => wrong_kind(m, side, id, errors),
        SrcGroup::State(_) if !m.is_state(id) => wrong_kind(m, side, id, errors),
        // Nothing is listed yet, of a ring neither.
        SrcGroup::Paged(g) if promised && g.table.is_empty() => {}
        SrcGroup::Paged(g) => check_table(m, side, id, &mut g.table, tokens, errors),
        SrcGroup::State(g) => {
            let slots: Vec<BlockId> = g.checkpoints.iter().map(|c| c.slot).collect();
            let positions = g.checkpoints.iter().map(|c| c.position);
            check_states(m, side, id, (&slots, positions), None, errors);
        }
    }
}

fn check_dst(m: &Manifest, id: GroupId, group: &mut DstGroup, tokens: Tokens, errors: &mut Vec<RequestError>) {
    let side = Side::Dst;
    match group {
        DstGroup::Paged(_) if m.is_state(id) => wrong_kind(m, side, id, errors),
        DstGroup::State(_) if !m.is_state(id) => wrong_kind(m, side, id, errors),
        DstGroup::Paged(g) => check_table(m, side, id, &mut g.table, tokens, errors),
        DstGroup::State(g) => {
            let slots: Vec<BlockId> = g.slot.into_iter().chain(g.more.iter().map(|c| c.slot)).collect();
            check_states(m, side, id, (&slots, g.more.iter().map(|c| c.position)), Some(tokens), errors);
        }
    }
}

fn name_of(m: &Manifest, id: GroupId) -> Name {
    m.groups().get(id.index()).map_or_else(|| "?".into(), |g| g.name.clone())
}

fn wrong_kind(m: &Manifest, side: Side, id: GroupId, errors: &mut Vec<RequestError>) {
    let (paged, state) = ("paged items, in blocks", "states, in slots");
    let (kind, got) = if m.is_state(id) { (state, paged) } else { (paged, state) };
    errors.push(RequestError::GroupKind { side, group: name_of(m, id), kind, got });
}

/// Slots in range and, at the destination, each once; positions each once and, of the destination, before `end`.
fn check_states(
    m: &Manifest,
    side: Side,
    id: GroupId,
    (slots, positions): (&[BlockId], impl Iterator<Item = Tokens>),
    end: Option<Tokens>,
    errors: &mut Vec<RequestError>,
) {
    let group = || name_of(m, id);
    if slots.len() > MAX_STATES {
        errors.push(RequestError::TooManyStates { side, group: group(), got: slots.len(), limit: MAX_STATES });
        return;
    }
    let mut seen = BTreeSet::new();
    for position in positions {
        if !seen.insert(position) || end.is_some_and(|end| position >= end) {
            let tokens = end.unwrap_or(Tokens::new(u64::MAX));
            errors.push(RequestError::StatePosition { side, group: group(), position, tokens });
        }
    }
    let blocks = m.blocks(id);
    let mut used = BTreeSet::new();
    for &block in slots {
        if block >= blocks {
            errors.push(RequestError::BlockOutOfRange { side, group: group(), block, blocks });
        } else if !used.insert(block) {
            errors.push(RequestError::RepeatedBlock { side, group: group(), block });
        }
    }
}

/// The ring that a group's items keep, if they keep one.
fn ring_of(m: &Manifest, id: GroupId) -> Option<u64> {
    let first = m.groups().get(id.index()).and_then(|g| m.spec().get(*g.items.first()?))?;
    match first.as_paged()?.retention {
        Retention::Ring(r) => Some(r.get()),
        _ => None,
    }
}

/// Ids in range and, at the destination, each once. A ring is unrolled, so that from here on its table is one like others.
fn check_table(
    m: &Manifest,
    side: Side,
    id: GroupId,
    table: &mut BlockTable,
    tokens: Tokens,
    errors: &mut Vec<RequestError>,
) {
    let Some(group) = m.groups().get(id.index()) else { return };
    let block = group.block_tokens.get();
    let last = table.first_position().saturating_add(table.len());
    let (got, limit) = (last.saturating_mul(block), MAX_TOKENS * 2);
    if got > limit {
        errors.push(RequestError::TooLong { what: "the last token that a table covers", got, limit });
        return;
    }
    let ring = ring_of(m, id);
    let blocks = m.blocks(id);
    if table.end() > u64::from(blocks.get()) {
        let (group, id) = (group.name.clone(), BlockId::new(u32::try_from(table.end() - 1).unwrap_or(u32::MAX)));
        errors.push(RequestError::BlockOutOfRange { side, group, block: id, blocks });
        return;
    }
    if (side == Side::Dst || ring.is_some())
        && let Some(block) = table.repeated(blocks.get(), 0, u64::MAX)
    {
        errors.push(RequestError::RepeatedBlock { side, group: group.name.clone(), block });
    }
    let Some(ring) = ring else { return };
    let expected = ring.checked_div(block).unwrap_or(0);
    let (first, got) = (table.first_position(), table.len());
    if (first, got) != (0, expected) {
        errors.push(RequestError::RingTable { side, group: group.name.clone(), got, first, expected });
    } else if tokens.get() > ring {
        let from = (tokens.get() - ring) / block;
        *table = table.unrolled(from, tokens.get().div_ceil(block));
    }
}

fn state_move(ask: Ask<'_>, link: Link, src: &SrcState, dst: &DstState, errors: &mut Vec<RequestError>) -> GroupMove {
    let Ask { c, tokens, promised } = ask;
    let resume = dst.slot.map(|slot| (tokens, slot));
    let wanted = resume.into_iter().chain(dst.more.iter().map(|c| (c.position, c.slot)));
    let mut states = Vec::new();
    for (position, slot) in wanted {
        match src.checkpoints.iter().find(|c| c.position == position) {
            Some(held) => states.push(StateMove { position, src: held.slot, dst: slot }),
            None => {
                // Listed later.
                if promised {
                    continue;
                }
                let mut held: Vec<Tokens> = src.checkpoints.iter().map(|c| c.position).collect();
                held.sort_unstable_by_key(|p| core::cmp::Reverse(*p));
                held.truncate(MAX_TOLD);
                errors.push(RequestError::NoState { group: name_of(c.src(), link.src), position, held });
            }
        }
    }
    let none = TokenRange::new(tokens, tokens);
    GroupMove { src_group: link.src, dst_group: link.dst, retention: None, range: none, zero: none, states }
}

/// `need = retention ∩ [cached, n)`; it must lie in the destination's room and in what the source holds.
fn paged_move(
    ask: Ask<'_>,
    link: Link,
    retention: Retention,
    src: &SrcPaged,
    dst: &DstPaged,
    errors: &mut Vec<RequestError>,
) -> GroupMove {
    let Ask { c, tokens: n, promised } = ask;
    let (src_name, dst_name) = (|| name_of(c.src(), link.src), || name_of(c.dst(), link.dst));
    let block_tokens = |m: &Manifest, id: GroupId| m.groups().get(id.index()).map_or(Tokens::ZERO, |g| g.block_tokens);
    let (src_block, dst_block) = (block_tokens(c.src(), link.src), block_tokens(c.dst(), link.dst));
    let kept = retention.needed(n);
    let need = kept.intersect(TokenRange::new(dst.cached, n));
    let moved = |range: TokenRange, zero: TokenRange| {
        let (src_group, dst_group) = (link.src, link.dst);
        GroupMove { src_group, dst_group, retention: Some(retention), range, zero, states: Vec::new() }
    };
    if dst.cached > n {
        errors.push(RequestError::CachedBeyond { group: dst_name(), cached: dst.cached, tokens: n });
    }
    if need.is_empty() {
        let none = TokenRange::new(need.end(), need.end());
        return moved(none, none);
    }
    // The first value that moves would stand for tokens that the destination has.
    if need.start().get() / link.span * link.span < dst.cached.get() && !dst.cached.get().is_multiple_of(link.span) {
        let (cached, span) = (dst.cached, Tokens::new(link.span));
        errors.push(RequestError::SplitSpan { group: dst_name(), cached, span });
    }
    let room = dst.table.tokens(dst_block);
    if !room.contains(need) {
        let blocks = dst.table.len();
        errors.push(RequestError::NoRoom { group: dst_name(), need, room, blocks });
    }
    let listed = src.table.tokens(src_block);
    let held = match retention {
        // Older tokens have been overwritten, whatever the source says.
        Retention::Ring(r) => {
            let oldest = Tokens::new(src.held.end().get().saturating_sub(r.get()));
            src.held.intersect(TokenRange::new(oldest, src.held.end()))
        }
        _ => src.held,
    };
    // What is promised may be listed later, but a table grows at its end only.
    let to_come = promised && (src.table.is_empty() || listed.start() <= need.start());
    if !held.contains(need) || !(listed.contains(need) || to_come) {
        let blocks = src.table.len();
        errors.push(RequestError::NotHeld { group: src_name(), need, held, listed, blocks });
    }
    let block = src_block.get().max(1);
    let is_ring = matches!(retention, Retention::Ring(_));
    if !is_ring {
        // Two positions that are read can't both be in one block. Placeholders before or after them may repeat.
        let first = src.table.first_position();
        let (from, to) = (need.start().get() / block, need.end().get().div_ceil(block));
        let blocks = c.src().blocks(link.src).get();
        if let Some(block) = src.table.repeated(blocks, from.saturating_sub(first), to.saturating_sub(first)) {
            errors.push(RequestError::RepeatedBlock { side: Side::Src, group: src_name(), block });
        }
    }
    let end = match src.tail {
        // A source that holds more than is asked for has other tokens there, not zeros; and so has a ring.
        Tail::Frozen if src.held.end() == need.end() && !is_ring => {
            Tokens::new(need.end().get().next_multiple_of(block).min(room.end().get()))
        }
        Tail::Frozen | Tail::Exact => need.end(),
    };
    // What follows in a ring that has gone round are older tokens.
    let gone_round = matches!(retention, Retention::Ring(r) if n > r);
    let zero = TokenRange::new(end, if gone_round { end } else { room.end() });
    moved(TokenRange::new(need.start(), end), zero)
}

/// Blocks of groups that share memory must be apart, since a write to one would change the other: those that the request
/// writes, and those that the destination has already.
fn check_apart(m: &Manifest, tokens: Tokens, dst: &[DstGroup], errors: &mut Vec<RequestError>) {
    if m.shared().is_empty() {
        return;
    }
    let ids = (0u32..).map(GroupId::new).zip(dst).map(|(id, listed)| {
        let mut ids: Vec<BlockId> = match listed {
            DstGroup::Paged(g) => {
                // What lies before all that is kept may be placeholders.
                let skipped = first_kept(m, id, tokens).saturating_sub(g.table.first_position());
                g.table.iter().skip(usize::try_from(skipped).unwrap_or(usize::MAX)).collect()
            }
            DstGroup::State(g) => g.slot.into_iter().chain(g.more.iter().map(|c| c.slot)).collect(),
        };
        ids.sort_unstable();
        (id, ids)
    });
    if let Some(((first, a), (second, b))) = m.shared().first_meeting(&ids.collect()) {
        errors.push(RequestError::SharedBytes { first: name_of(m, first), second: name_of(m, second), a, b });
    }
}

/// The first table position of a group that any of its items still keeps.
fn first_kept(m: &Manifest, id: GroupId, tokens: Tokens) -> u64 {
    let Some(group) = m.groups().get(id.index()) else { return 0 };
    let paged = group.items.iter().filter_map(|&i| m.spec().get(i)?.as_paged());
    let first = paged.map(|p| p.retention.needed(tokens).start().get()).min().unwrap_or(0);
    first / group.block_tokens.get().max(1)
}
