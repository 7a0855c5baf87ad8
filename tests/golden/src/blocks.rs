//! The recorded block lists as kvferry's requests.
//!
//! The lists say which blocks, but rarely which tokens: a record gives the prompt's length only where it ends inside a
//! block, and counts of cached blocks only where context parallelism needs them. What it does not say follows from one
//! rule: *the lists of both sides end with the prompt*. So a list that is shorter than the prompt starts late, and what the
//! consumer does not list it has already.
//!
//! - Where a block covers equally many tokens on both sides, the prompt is as long as the producer's longest list.
//! - Where it does not, it ends where the shorter of the two capacities ends.
//! - Lists of states have placeholders (id 0) in front and scratch slots of speculative decoding behind; the last slot
//!   between them is the state after all tokens, one before it the state a block earlier.

use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::{
    BlockTable, Checkpoint, DstGroup, DstPaged, DstState, Request, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::{BlockId, GroupId, TokenRange, Tokens};

use crate::engine::Engine;
use crate::schema;

/// The longest prompt that is rebuilt.
const MAX_TOKENS: u64 = 1 << 20;

/// Block lists that can't be made a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlocksError {
    /// Not one list for each group.
    #[error("request {request}: {got} block lists for the {expected} groups of the {side}")]
    Groups {
        /// The request.
        request: String,
        /// Which side.
        side: &'static str,
        /// Lists.
        got: usize,
        /// Groups.
        expected: usize,
    },
    /// A prompt beyond all reason, or of no tokens.
    #[error("request {request}: the prompt has {got} tokens; it must have 1 to {limit}")]
    Length {
        /// The request.
        request: String,
        /// Tokens.
        got: u64,
        /// The limit.
        limit: u64,
    },
}

/// One group's list on one side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum List {
    /// Blocks of tokens.
    Paged {
        /// Table position of the first.
        first: u64,
        /// Their ids.
        blocks: Vec<u32>,
        /// First token that lies in them: at the producer the first that it holds, at the consumer the first that it lacks.
        from: u64,
    },
    /// Slots of states, each with the number of tokens that its state has seen; the last is the prompt's.
    State(Vec<(u64, u32)>),
}

/// One request between two engines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lists {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// The producer's, by group.
    pub src: Vec<List>,
    /// The consumer's, by group.
    pub dst: Vec<List>,
}

impl Lists {
    /// Reads a recorded request.
    ///
    /// # Errors
    /// Lists that don't fit the engines.
    pub fn new(request: &schema::Request, src: &Engine, dst: &Engine) -> Result<Self, BlocksError> {
        let sides = [("producer", &request.prefill_block_ids, src), ("consumer", &request.decode_block_ids, dst)];
        for (side, lists, engine) in sides {
            let expected = engine.manifest.groups().len();
            if lists.len() != expected {
                let (request, got) = (request.id.clone(), lists.len());
                return Err(BlocksError::Groups { request, side, got, expected });
            }
        }
        let computed = |g: usize| request.decode_num_computed_blocks.as_ref().and_then(|c| c.get(g)).copied();
        let tokens = request.num_tokens.unwrap_or_else(|| length(request, src, dst, &computed));
        let before = request.decode_num_computed_blocks.iter().flatten().copied().max().unwrap_or(0);
        if tokens == 0 || tokens.max(before) > MAX_TOKENS {
            return Err(BlocksError::Length { request: request.id.clone(), got: tokens, limit: MAX_TOKENS });
        }
        let list = |engine: &Engine, g: usize, blocks: &[u32], computed: Option<u64>, is_src: bool| {
            let id = group_id(g);
            if engine.manifest.is_state(id) {
                return List::State(slots(blocks, engine.scratch_slots[g], tokens, engine.block_size[g]));
            }
            let block_tokens = engine.manifest.groups()[g].block_tokens.get().max(1);
            let all = tokens.div_ceil(block_tokens);
            let blocks = blocks.to_vec();
            if let Some(ring) = ring_of(&engine.manifest, id) {
                let from = if is_src { tokens.saturating_sub(ring) } else { 0 };
                let from = if blocks.is_empty() { tokens } else { from };
                return List::Paged { first: 0, blocks, from };
            }
            // A list that has lost its front (a window's) is counted from the prompt's end all the same.
            let ends = all.saturating_sub(blocks.len() as u64);
            let first = computed.map_or(ends, |c| c.max(ends));
            List::Paged { first, blocks, from: (first * block_tokens).min(tokens) }
        };
        let prefill = request.prefill_block_ids.iter().enumerate();
        let decode = request.decode_block_ids.iter().enumerate();
        Ok(Self {
            tokens,
            src: prefill.map(|(g, blocks)| list(src, g, blocks, None, true)).collect(),
            dst: decode.map(|(g, blocks)| list(dst, g, blocks, computed(g), false)).collect(),
        })
    }

    /// A request for engines that come without one: a prompt that ends inside a block, every list whole, block ids from 1
    /// on and no id twice on a side.
    ///
    /// # Errors
    /// Engines with too few blocks for any prompt.
    pub fn made_up(src: &Engine, dst: &Engine) -> Result<Self, BlocksError> {
        // Two blocks and a half of the larger size, or as many tokens as half the blocks of a side can hold.
        let of = |engine: &Engine| {
            let groups = engine.manifest.groups();
            let size = groups.iter().map(|g| g.block_tokens.get()).max().unwrap_or(1);
            let blocks = (0..groups.len()).map(|g| u64::from(blocks_of(&engine.manifest, g))).min().unwrap_or(0);
            let each = (blocks.saturating_sub(1) / groups.len().max(1) as u64).min(blocks / 2);
            (
                size,
                each.saturating_mul(groups.iter().map(|g| g.block_tokens.get()).filter(|t| *t > 0).min().unwrap_or(1)),
            )
        };
        let (s, d) = (of(src), of(dst));
        let largest = s.0.max(d.0);
        let wanted = (2 * largest).saturating_add(largest.div_ceil(2)).min(s.1).min(d.1);
        let step = entry_tokens(&src.manifest).max(1);
        let tokens = wanted / step * step;
        if tokens == 0 || tokens > MAX_TOKENS {
            return Err(BlocksError::Length { request: "made up".to_owned(), got: tokens, limit: MAX_TOKENS });
        }
        let lists = |engine: &Engine, is_src: bool| {
            let mut next = 1u32;
            let mut ids = |count: u64| -> Vec<u32> {
                let first = next;
                next = next.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
                (first..next).collect()
            };
            let groups = engine.manifest.groups().iter().enumerate();
            let list = groups.map(|(g, group)| {
                let id = group_id(g);
                if engine.manifest.is_state(id) {
                    return List::State(ids(1).into_iter().map(|slot| (tokens, slot)).collect());
                }
                let block_tokens = group.block_tokens.get().max(1);
                if let Some(ring) = ring_of(&engine.manifest, id) {
                    let from = if is_src { tokens.saturating_sub(ring) } else { 0 };
                    return List::Paged { first: 0, blocks: ids(ring.div_ceil(block_tokens)), from };
                }
                List::Paged { first: 0, blocks: ids(tokens.div_ceil(block_tokens)), from: 0 }
            });
            list.collect()
        };
        Ok(Self { tokens, src: lists(src, true), dst: lists(dst, false) })
    }

    /// For the planner.
    #[must_use]
    pub fn request(&self) -> Request {
        let ids = |blocks: &[u32]| blocks.iter().map(|&b| BlockId::new(b)).collect::<Vec<_>>();
        let at =
            |&(position, slot): &(u64, u32)| Checkpoint { position: Tokens::new(position), slot: BlockId::new(slot) };
        let src = self.src.iter().map(|list| match list {
            List::Paged { first, blocks, from } => SrcGroup::Paged(SrcPaged {
                table: BlockTable::new(*first, &ids(blocks)),
                held: TokenRange::new(Tokens::new(*from), Tokens::new(self.tokens)),
                tail: Tail::Exact,
            }),
            List::State(slots) => SrcGroup::State(SrcState { checkpoints: slots.iter().map(at).collect() }),
        });
        let dst = self.dst.iter().map(|list| match list {
            List::Paged { first, blocks, from } => {
                DstGroup::Paged(DstPaged { table: BlockTable::new(*first, &ids(blocks)), cached: Tokens::new(*from) })
            }
            List::State(slots) => DstGroup::State(DstState {
                slot: slots.last().map(|s| BlockId::new(s.1)),
                more: slots.iter().rev().skip(1).map(at).collect(),
            }),
        });
        Request { tokens: Tokens::new(self.tokens), src: src.collect(), dst: dst.collect() }
    }
}

/// A group's number as its id.
fn group_id(group: usize) -> GroupId {
    GroupId::new(u32::try_from(group).unwrap_or(u32::MAX))
}

/// Ids below this exist on every rank.
fn blocks_of(manifest: &Manifest, group: usize) -> u32 {
    manifest.blocks(group_id(group)).get()
}

/// Tokens of the largest entry.
fn entry_tokens(manifest: &Manifest) -> u64 {
    let paged = manifest.spec().items().iter().filter_map(|i| i.as_paged());
    paged.map(|p| u64::from(p.tokens_per_entry)).max().unwrap_or(1)
}

/// Tokens of the ring that a group's items are.
fn ring_of(manifest: &Manifest, group: GroupId) -> Option<u64> {
    let items = &manifest.groups().get(group.index())?.items;
    items.iter().find_map(|&i| match manifest.spec().get(i)?.as_paged()?.retention {
        Retention::Ring(r) => Some(r.get()),
        _ => None,
    })
}

fn length(request: &schema::Request, src: &Engine, dst: &Engine, computed: &dyn Fn(usize) -> Option<u64>) -> u64 {
    let capacity = |engine: &Engine, g: usize, blocks: usize, before: u64| {
        let id = group_id(g);
        let paged = !engine.manifest.is_state(id) && ring_of(&engine.manifest, id).is_none();
        let block_tokens = engine.manifest.groups()[g].block_tokens.get();
        paged.then(|| (block_tokens, (blocks as u64 + before).saturating_mul(block_tokens)))
    };
    let of = |engine: &Engine, lists: &[Vec<u32>], before: &dyn Fn(usize) -> u64| -> Vec<(u64, u64)> {
        let each = lists.iter().enumerate();
        each.filter_map(|(g, blocks)| capacity(engine, g, blocks.len(), before(g))).collect()
    };
    let held = of(src, &request.prefill_block_ids, &|_| 0);
    let room = of(dst, &request.decode_block_ids, &|g| computed(g).unwrap_or(0));
    let sizes: Vec<u64> = held.iter().chain(&room).map(|c| c.0).collect();
    let longest = |of: &[(u64, u64)]| of.iter().map(|c| c.1).max().unwrap_or(0);
    if sizes.windows(2).all(|w| w[0] == w[1]) { longest(&held) } else { longest(&held).min(longest(&room)) }
}

/// The slots between placeholders and scratch, with the positions of their states.
fn slots(blocks: &[u32], scratch: usize, tokens: u64, block_size: u64) -> Vec<(u64, u32)> {
    // A list without placeholders may have had its scratch slots taken off already.
    let has_scratch = scratch > 0 && blocks.len() > scratch;
    let blocks = if has_scratch { &blocks[..blocks.len() - scratch] } else { blocks };
    let mut out: Vec<(u64, u32)> = Vec::new();
    let mut position = tokens;
    for &slot in blocks.iter().rev() {
        if slot != 0 {
            out.push((position, slot));
        }
        position = position.saturating_sub(1) / block_size.max(1) * block_size;
    }
    out.reverse();
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_and_scratch_slots_are_no_states() {
        // Three blocks of 16 tokens and two scratch slots.
        assert_eq!(slots(&[0, 0, 5, 6, 7], 2, 48, 16), [(48, 5)]);
        assert_eq!(slots(&[0, 8, 9, 10], 2, 48, 16), [(48, 8)]);
        assert_eq!(slots(&[5], 2, 48, 16), [(48, 5)]);
        assert_eq!(slots(&[4, 0, 5], 0, 40, 16), [(16, 4), (40, 5)]);
        assert_eq!(slots(&[], 0, 48, 16), []);
    }
}
