//! One request: how many tokens, which blocks on each side, what each side holds already.
//!
//! A [`BoundRequest`] is a [`Request`] proven against two engines: block ids in range, no destination byte twice, and
//! for every group the tokens that move lie both in the destination's room and in what the source holds, and the states that
//! move are at the positions that the destination names.

use alloc::vec::Vec;
use core::fmt;

use crate::batch::Side;
use crate::spec::write_list;
use crate::units::{BlockId, Name, TokenRange, Tokens};

mod bind;
mod table;

pub use bind::{BoundRequest, GroupMove, StateMove};
pub use table::BlockTable;
pub(crate) use table::Reader;

/// What may move of the source's last block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Tail {
    /// The held tokens and nothing else.
    #[default]
    Exact,
    /// The source's last block is frozen, and zero beyond the held tokens: it may move whole, as fewer descriptors.
    Frozen,
}

/// One paged group of the source.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SrcPaged {
    /// Its blocks. A ring lists all blocks of the ring, from position 0.
    pub table: BlockTable,
    /// The tokens whose bytes it holds.
    pub held: TokenRange,
    /// What may move of the last block.
    pub tail: Tail,
}

/// A slot with the state of a sequence after some tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Checkpoint {
    /// How many tokens are folded into the state.
    pub position: Tokens,
    /// Where it is.
    pub slot: BlockId,
}

/// One group of states of the source.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct SrcState {
    /// The states that it holds, in any order.
    pub checkpoints: Vec<Checkpoint>,
}

/// One group of the source.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SrcGroup {
    /// Of paged items.
    Paged(SrcPaged),
    /// Of states.
    State(SrcState),
}

/// One paged group of the destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DstPaged {
    /// Its blocks; those of cached tokens may be listed or not. A ring lists all blocks of the ring, from position 0.
    pub table: BlockTable,
    /// It holds tokens `[0, cached)` already (a prefix hit); they are not touched.
    pub cached: Tokens,
}

/// One group of states of the destination.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DstState {
    /// Takes the state that the destination resumes from, at position [`Request::tokens`]; `None` where it has that already.
    pub slot: Option<BlockId>,
    /// Slots for further, earlier states.
    pub more: Vec<Checkpoint>,
}

/// One group of the destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DstGroup {
    /// Of paged items.
    Paged(DstPaged),
    /// Of states.
    State(DstState),
}

impl From<SrcPaged> for SrcGroup {
    fn from(group: SrcPaged) -> Self {
        Self::Paged(group)
    }
}
impl From<SrcState> for SrcGroup {
    fn from(group: SrcState) -> Self {
        Self::State(group)
    }
}
impl From<DstPaged> for DstGroup {
    fn from(group: DstPaged) -> Self {
        Self::Paged(group)
    }
}
impl From<DstState> for DstGroup {
    fn from(group: DstState) -> Self {
        Self::State(group)
    }
}

/// One request as its two engines state it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Length of the sequence: the destination wants `[0, tokens)`, and the state after them.
    pub tokens: Tokens,
    /// One for each group of the source, in its manifest's order.
    pub src: Vec<SrcGroup>,
    /// One for each group of the destination, in its manifest's order.
    pub dst: Vec<DstGroup>,
}

/// The most positions that a [`RequestError::NoState`] tells.
pub const MAX_TOLD: usize = 16;

/// A fault of a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Not one entry for each group.
    #[error("the {side} lists {got} groups, but its engine has {expected}; list one for each, in its order")]
    GroupCount {
        /// Which side.
        side: Side,
        /// Groups listed.
        got: usize,
        /// Groups of the engine.
        expected: usize,
    },
    /// Blocks for a group of states, or slots for one of paged items.
    #[error("{side} group {group}: it holds {kind}, but the request lists {got} for it")]
    GroupKind {
        /// Which side.
        side: Side,
        /// The group.
        group: Name,
        /// What it holds.
        kind: &'static str,
        /// What is listed.
        got: &'static str,
    },
    /// More states than a request can list.
    #[error("{side} group {group}: {got} states are listed, more than the {limit} that a request can have")]
    TooManyStates {
        /// Which side.
        side: Side,
        /// The group.
        group: Name,
        /// States listed.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// The source has no state at a wanted position.
    #[error(
        "source group {group}: the state after {position} is needed, it holds those after {held:?} (the latest of them)"
    )]
    NoState {
        /// The group.
        group: Name,
        /// The position wanted.
        position: Tokens,
        /// The latest positions held, at most [`MAX_TOLD`].
        held: Vec<Tokens>,
    },
    /// A state's position is listed twice, or is beyond the sequence.
    #[error(
        "{side} group {group}: the state after {position} is listed twice, or is not before the sequence's end at {tokens}"
    )]
    StatePosition {
        /// Which side.
        side: Side,
        /// The group.
        group: Name,
        /// The position.
        position: Tokens,
        /// Length of the sequence.
        tokens: Tokens,
    },
    /// A ring's table doesn't list the ring.
    #[error("{side} group {group}: a ring has {expected} blocks, from position 0; the table lists {got} from {first}")]
    RingTable {
        /// Which side.
        side: Side,
        /// The group.
        group: Name,
        /// Blocks listed.
        got: u64,
        /// Position of the first.
        first: u64,
        /// Blocks of the ring.
        expected: u64,
    },
    /// A prefix hit ends inside a stretch of tokens that one value stands for.
    #[error(
        "destination group {group}: {cached} are cached, inside a stretch of {span} that has one scale; \
         a stretch comes from one engine, so cut the hit down to a multiple of {span}"
    )]
    SplitSpan {
        /// The group.
        group: Name,
        /// Tokens cached.
        cached: Tokens,
        /// Tokens of the stretch.
        span: Tokens,
    },
    /// Blocks of two groups that share memory have bytes in common.
    #[error("destination groups {first} and {second} share memory, and blocks {a} and {b} have bytes in common")]
    SharedBytes {
        /// A group.
        first: Name,
        /// Another.
        second: Name,
        /// A block of the first.
        a: BlockId,
        /// A block of the other.
        b: BlockId,
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
        side: Side,
        /// The group.
        group: Name,
        /// The largest id listed.
        block: BlockId,
        /// Blocks that every rank has.
        blocks: BlockId,
    },
    /// A block stands twice in one group: at the destination anywhere, at the source among the blocks that are read. So does a
    /// slot, on either side.
    #[error("{side} group {group}: block {block} is listed twice; two tokens would share its bytes")]
    RepeatedBlock {
        /// Which side.
        side: Side,
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
