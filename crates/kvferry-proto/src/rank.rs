//! The messages between an owner and its own ranks.
//!
//! A rank link carries orders down and results up; which requests exist, and how they end, only the owner knows.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::digest::Digest;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::request::Request;
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{BlockId, Bytes, Name, RankId, Tokens};

use crate::manifest::{EngineManifest, RankJoin};
use crate::names::LeaseId;
use crate::peer::{Gathered, NotGathered, PieceDigest, Window};
use crate::push::{PushId, PushOrder, Ready, Stream, WriterEnd};

/// A request of one owner. Counted by the owner, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PullId(pub u64);

impl fmt::Display for PullId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How sure the consumer wants to be before it uses the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Assurance {
    /// Every operation completed, all named sources were read, the lease was held.
    #[default]
    Fenced,
    /// `Fenced`, and a sample of the bytes compared. Not served yet.
    Sampled,
    /// `Fenced`, and all bytes digested on both sides and compared.
    Full,
}

impl fmt::Display for Assurance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fenced => "fenced",
            Self::Sampled => "sampled",
            Self::Full => "full",
        })
    }
}

/// Which two engines meet, and by which map: what a rank needs to compute its batches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pairing {
    /// The other engine, by the digest of its [`EngineManifest`].
    pub peer: Digest,
    /// How the map of peers was made.
    pub options: PeerOptions,
    /// What this rank's owner lets pass.
    pub compat: CompatOptions,
    /// The digest of the map, as the owners agreed on it.
    pub peer_map: Digest,
}

/// Read this rank's share of a request.
#[derive(Clone, PartialEq, Debug)]
pub struct PullOrder {
    /// The request.
    pub pull: PullId,
    /// From whom.
    pub pairing: Pairing,
    /// Both sides' blocks; shared by the orders to all ranks.
    pub request: Arc<Request>,
    /// How sure the owner wants to be.
    pub assurance: Assurance,
    /// Whose reads are posted first: those of a higher one, always. 0 is the lowest.
    pub priority: u8,
    /// How long the owner waits for it, from when the order was sent; `None`: as long as it takes. Of a consumer's requests to one
    /// engine, the one whose time ends first is posted first, most of the time; and one of which nothing is posted by then fails.
    pub deadline: Option<Duration>,
    /// Whether the producer's ranks have written it already: then nothing is read, and only what follows a read is done.
    pub written: bool,
}

/// Digest what a peer's rank reads from this rank.
#[derive(Clone, PartialEq, Debug)]
pub struct DigestOrder {
    /// Names the order in its answer.
    pub ticket: u64,
    /// For whom.
    pub pairing: Pairing,
    /// The consumer's rank.
    pub dst: RankId,
    /// Both sides' blocks.
    pub request: Request,
    /// What to digest.
    pub windows: Vec<Window>,
}

/// Gather in staging memory what a peer's rank reads from this rank, in the order in which it lies there.
#[derive(Clone, PartialEq, Debug)]
pub struct GatherOrder {
    /// Names the order in its answer and in its end.
    pub ticket: u64,
    /// For whom.
    pub pairing: Pairing,
    /// The consumer's rank.
    pub dst: RankId,
    /// Which bytes in which order, as the consumer's rank computes them.
    pub gathered: Gathered,
    /// Both sides' blocks.
    pub request: Request,
}

/// One message from an owner to a rank.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum ToRank {
    /// All ranks have joined: this is the engine.
    Welcome(Arc<EngineManifest>),
    /// The rank may not join; the link is closed after it.
    Refused(String),
    /// Another engine; sent before the first order that names it.
    Peer(Arc<EngineManifest>),
    /// No order will name that engine any more.
    Forget(Digest),
    /// Read.
    Pull(PullOrder),
    /// Write.
    Push(Box<PushOrder>),
    /// Stop writing; [`FromRank::Pushed`] still follows, when nothing is in flight any more.
    CancelPush(PushId),
    /// Bytes of ours are being computed, or are final.
    Stream(Stream),
    /// So much of them is.
    Ready(Ready),
    /// The stream's lease is closed: nothing more is said or written of it.
    StreamEnd(LeaseId),
    /// Stop reading; [`FromRank::Pulled`] still follows, when nothing is in flight any more.
    Cancel(PullId),
    /// Digest.
    Digest(DigestOrder),
    /// Nobody waits for the digests of this ticket any more; no answer is needed.
    CancelDigest(u64),
    /// The producer's digests for [`FromRank::DigestWanted`].
    DigestAnswer {
        /// The request.
        pull: PullId,
        /// The producer's rank.
        src: RankId,
        /// The pieces in order, or why there are none.
        pieces: Result<Vec<PieceDigest>, String>,
    },
    /// Gather.
    Gather(GatherOrder),
    /// Nobody reads any more what this ticket gathered, or waits for it; no answer is needed.
    GatherEnd(u64),
    /// The answer to [`FromRank::GatherWanted`].
    GatherAnswer {
        /// The request.
        pull: PullId,
        /// The producer's rank.
        src: RankId,
        /// Where the bytes begin in the staging memory of the producer's rank, or why they are not there.
        result: Result<Bytes, NotGathered>,
    },
}

/// What one rank read from one source.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SourceReport {
    /// The producer's rank.
    pub src: RankId,
    /// Bytes read.
    pub bytes: Bytes,
    /// Rows of the batch in product form.
    pub rows: u64,
    /// Descriptors if no neighbours were merged: one for each item, component, head and run of tokens in one kernel block.
    pub descriptors_before: u64,
    /// Descriptors after neighbours were merged.
    pub descriptors_after: u64,
    /// Whether the bytes were staged, and where.
    pub place: Place,
    /// The lane that carried them, in the words of the rank's transport; empty where nothing was read.
    pub lane: String,
    /// From submission until they were in place.
    pub took: Duration,
}

/// What one rank did for a request.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RankReport {
    /// One for each source that the map of peers names, by rank.
    pub sources: Vec<SourceReport>,
    /// Bytes zeroed beyond the moved tokens.
    pub zeroed: Bytes,
    /// Bytes compared by digest on both sides.
    pub compared: Bytes,
    /// From the order until its first slice was posted; zero where nothing was to be read.
    pub queued: Duration,
    /// In how many slices the sources were read, all together.
    pub slices: u32,
    /// From the order to the end.
    pub took: Duration,
}

/// Destination bytes that differ from the producer's.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BadBlock {
    /// The producer's rank.
    pub src: RankId,
    /// The item, as far as it can be told.
    pub item: Name,
    /// The destination's block.
    pub block: BlockId,
}

impl fmt::Display for BadBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "item {} block {} (from rank {})", self.item, self.block, self.src)
    }
}

/// At which step a rank failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Stage {
    /// Before anything was posted: engines, maps, request or plan don't fit.
    Plan,
    /// Reaching the producer's rank.
    Connect,
    /// Posting the read.
    Submit,
    /// The read itself.
    Read,
    /// The write itself, by a producer's rank.
    Write,
    /// Permuting what was staged into place.
    Permute,
    /// Zeroing the tail.
    Zero,
    /// Digesting and comparing.
    Compare,
    /// It was cancelled.
    Cancelled,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plan => "plan",
            Self::Connect => "connect",
            Self::Submit => "submit",
            Self::Read => "read",
            Self::Write => "write",
            Self::Permute => "permute",
            Self::Zero => "zero",
            Self::Compare => "compare",
            Self::Cancelled => "cancelled",
        })
    }
}

/// Why a rank did not deliver its share.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RankFault {
    /// At which step; the first, if several failed.
    pub stage: Stage,
    /// What happened, for people.
    pub text: String,
    /// Whether memory may still be written: some operation ended without evidence that it has stopped.
    pub in_doubt: bool,
    /// Blocks that differ, if bytes were compared; at most [`MAX_BAD_BLOCKS`].
    pub bad: Vec<BadBlock>,
}

/// The most bad blocks that are named.
pub const MAX_BAD_BLOCKS: usize = 1024;

impl fmt::Display for RankFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.stage, self.text)?;
        if self.in_doubt {
            f.write_str(" (memory may still be written)")?;
        }
        if let Some(first) = self.bad.first() {
            write!(f, "; {} blocks differ, first {first}", self.bad.len())?;
        }
        Ok(())
    }
}

/// One message from a rank to its owner.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum FromRank {
    /// The first.
    Join(RankJoin),
    /// The rank's share of a request has ended, once for each order; nothing of it is in flight any more unless the
    /// fault says so.
    Pulled {
        /// The request.
        pull: PullId,
        /// How it ended.
        result: Result<RankReport, RankFault>,
    },
    /// The rank's writes of an order have ended, once for each order; nothing of them is in flight any more unless the fault
    /// says so.
    Pushed {
        /// The order.
        push: PushId,
        /// How they ended.
        result: WriterEnd,
    },
    /// The tokens before this one are written, as far as the order's items go; only if that is wanted.
    PushProgress {
        /// The order.
        push: PushId,
        /// The first token that is not.
        tokens: Tokens,
    },
    /// The rank needs a producer rank's digests.
    DigestWanted {
        /// The request.
        pull: PullId,
        /// The producer's rank.
        src: RankId,
        /// What to digest.
        windows: Vec<Window>,
    },
    /// The answer to a digest order.
    Digested {
        /// The order.
        ticket: u64,
        /// The pieces in order, or why there are none.
        pieces: Result<Vec<PieceDigest>, String>,
    },
    /// The rank would like a producer's rank to gather what it reads from it. Whoever can't says so, and it reads directly.
    GatherWanted {
        /// The request.
        pull: PullId,
        /// The producer's rank.
        src: RankId,
        /// Which bytes in which order.
        gathered: Gathered,
    },
    /// The answer to a gather order.
    Gathered {
        /// The order.
        ticket: u64,
        /// Where the bytes begin in the rank's staging memory, or why they are not there.
        result: Result<Bytes, NotGathered>,
    },
}
