//! What must never happen.

use std::time::Duration;

use crate::places::Place;

/// An invariant that does not hold.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A block was given back while something may still touch it.
    #[error(
        "engine {engine} rank {rank}: block {} of group {} was given back by {by} while {writers} operations may write it and {senders} send it",
        place.1, place.0
    )]
    GivenBackInUse {
        /// The engine.
        engine: u32,
        /// Its rank.
        rank: u32,
        /// Group and block.
        place: Place,
        /// Which effect.
        by: &'static str,
        /// Operations that may write it.
        writers: u32,
        /// Operations of its own rank that send it.
        senders: u32,
    },
    /// A byte is not what was delivered, or was touched by nobody's order.
    #[error(
        "engine {engine} rank {rank}: byte {offset} of region {region}{} is {got}, not {expected} ({count} bytes of the region differ) after {after}",
        place.map_or(String::new(), |p| format!(" (block {} of group {})", p.1, p.0))
    )]
    WrongBytes {
        /// The engine.
        engine: u32,
        /// Its rank.
        rank: u32,
        /// The region.
        region: usize,
        /// The first byte that differs.
        offset: u64,
        /// Its group and block, if it has one.
        place: Option<Place>,
        /// What it should be.
        expected: u8,
        /// What it is.
        got: u8,
        /// How many bytes of the region differ.
        count: u64,
        /// When that was found.
        after: String,
    },
    /// A request ended that has ended before, or never was.
    #[error("engine {engine}: request {pull} has ended, which was not open")]
    EndedTwice {
        /// The engine.
        engine: u32,
        /// Its name for the request.
        pull: u64,
    },
    /// A lease was closed that was closed before, or never was.
    #[error("engine {engine}: lease {lease} was closed, which was not open")]
    ClosedTwice {
        /// The engine.
        engine: u32,
        /// The lease.
        lease: String,
    },
    /// A request ended later than it may.
    #[error("engine {engine}: request {pull} has not ended {late:?} after its last moment ({waits})")]
    Overdue {
        /// The engine.
        engine: u32,
        /// Its name for the request.
        pull: u64,
        /// By how much.
        late: Duration,
        /// What it waits for, or how it ended.
        waits: String,
    },
    /// A lease ended later than it may.
    #[error("engine {engine}: lease {lease} has not ended {late:?} after its last moment")]
    LeaseOverdue {
        /// The engine.
        engine: u32,
        /// The lease.
        lease: String,
        /// By how much.
        late: Duration,
    },
    /// The session holds blocks that it has given back, or has given out twice.
    #[error("engine {engine}: blocks that are the engine's are refused: {error}")]
    StillLent {
        /// The engine.
        engine: u32,
        /// In the session's words.
        error: String,
    },
    /// A message could not be written or read.
    #[error("engine {engine}: a message between sessions is not one: {error}")]
    Unreadable {
        /// Who received or sent it.
        engine: u32,
        /// In the wire's words.
        error: String,
    },
    /// Nothing happens any more, and something is still open.
    #[error("the world is quiet and engine {engine} still has {what}")]
    NotEmpty {
        /// The engine.
        engine: u32,
        /// What.
        what: String,
    },
    /// Blocks that a request writes were lent a second time.
    #[error("engine {engine}: blocks that request {pull} writes are lent a second time: {how}")]
    LentTwice {
        /// The engine.
        engine: u32,
        /// The request that writes them.
        pull: u64,
        /// To whom.
        how: String,
    },
    /// A session says that bytes are in place, and they are not.
    #[error("engine {engine}: request {pull} says that tokens before {tokens} are in place ({how}), and they are not")]
    NotInPlace {
        /// The engine.
        engine: u32,
        /// The request.
        pull: u64,
        /// The tokens.
        tokens: u64,
        /// How it was said.
        how: &'static str,
    },
    /// What an engine says of its stream, rightly, is refused.
    #[error("engine {engine}: what is said of a stream is refused: {error}")]
    StreamRefused {
        /// The engine.
        engine: u32,
        /// In the session's words.
        error: String,
    },
    /// What a producer says of a lease is not so.
    #[error("engine {engine} says what is not true: {what}")]
    Untrue {
        /// The engine.
        engine: u32,
        /// What is so.
        what: String,
    },
    /// A session says that its peer contradicts itself, where all sessions are sound.
    #[error("engine {engine} says that a peer contradicts itself: {what}")]
    Contradiction {
        /// The engine.
        engine: u32,
        /// In the session's words.
        what: String,
    },
    /// A session asks to be stepped again and again, and nothing comes of it.
    #[error("engine {engine}: {who} asks to be stepped again at once, {times} times in a row")]
    Spins {
        /// The engine.
        engine: u32,
        /// Which session.
        who: String,
        /// How often.
        times: u32,
    },
}

impl Violation {
    /// Which invariant it is of, in a word.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::GivenBackInUse { .. } => "given-back-in-use",
            Self::WrongBytes { .. } => "wrong-bytes",
            Self::EndedTwice { .. } => "ended-twice",
            Self::ClosedTwice { .. } => "closed-twice",
            Self::Overdue { .. } => "overdue",
            Self::LeaseOverdue { .. } => "lease-overdue",
            Self::StillLent { .. } => "still-lent",
            Self::Unreadable { .. } => "unreadable",
            Self::NotEmpty { .. } => "not-empty",
            Self::Spins { .. } => "spins",
            Self::LentTwice { .. } => "lent-twice",
            Self::NotInPlace { .. } => "not-in-place",
            Self::StreamRefused { .. } => "stream-refused",
            Self::Untrue { .. } => "untrue",
            Self::Contradiction { .. } => "contradiction",
        }
    }
}
