//! The messages between the owners of two engines, after their hellos.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::digest::Digest;
use kvferry_geometry::request::{DstGroup, SrcGroup};
use kvferry_geometry::units::{Bytes, RankId, Tokens};

use crate::handshake::{Again, Hello};
use crate::lease::Closing;
use crate::manifest::EngineManifest;
use crate::names::{Attempt, ContentKey, Epoch, Fence, LeaseId};
use crate::push::{Progress, PushBind, Stop, Stopped, Written};

/// The most blocks that one side of a request may list, over all its groups.
pub const MAX_REQUEST_BLOCKS: u64 = 1 << 20;
/// The most states that one side of a request may list, over all its groups.
pub const MAX_REQUEST_STATES: usize = 1 << 16;

/// One message between two owners.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum PeerMessage {
    /// The first, from both sides.
    Hello(Hello),
    /// Instead of it, between engines that have met before: by digests, without manifests.
    Again(Again),
    /// I don't know your manifest (any more). At most once on a link, before the hello of who says it.
    ManifestWanted,
    /// The answer.
    Manifest(Arc<EngineManifest>),
    /// Instead of going on: why not. The link is closed after it.
    Refused(Vec<String>),
    /// Consumer to producer: may I read this lease?
    Bind(Bind),
    /// The answer.
    BindAnswer(BindAnswer),
    /// Consumer to producer: write this lease into these blocks. Answered like a bind.
    PushBind(Box<PushBind>),
    /// Producer to consumer: all writers of an attempt have ended.
    Written(Box<Written>),
    /// Producer to consumer: so much is in place.
    Progress(Progress),
    /// Consumer to producer: stop writing.
    Stop(Stop),
    /// The answer.
    Stopped(Stopped),
    /// Consumer to producer: my ranks' reads have ended.
    Release(Release),
    /// The answer.
    ReleaseAnswer(ReleaseAnswer),
    /// Consumer to producer: I still want these leases.
    Heartbeat(Heartbeat),
    /// The answer.
    HeartbeatAnswer(HeartbeatAnswer),
    /// Producer to consumer: a lease that you have bound is over, otherwise than by your release.
    Closed(LeaseClosed),
    /// Consumer to producer: digest these of your bytes.
    RunDigest(RunDigest),
    /// The answer.
    RunDigestAnswer(RunDigestAnswer),
    /// Consumer to producer: gather these of your bytes in staging memory. Only for a peer with
    /// [`Abilities::GATHER`](crate::handshake::Abilities::GATHER).
    Gather(Gather),
    /// The answer.
    GatherAnswer(GatherAnswer),
}

/// May I read this lease?
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Bind {
    /// The lease.
    pub fence: Fence,
    /// What the consumer thinks the cache was computed from.
    pub content_key: ContentKey,
    /// The salt of the map of peers.
    pub salt: u64,
    /// The digest of that map as the consumer computes it.
    pub peer_map: Digest,
}

/// The answer to a bind.
#[derive(Clone, PartialEq, Hash, Debug)]
pub enum BindAnswer {
    /// Read.
    Bound(Grant),
    /// Don't.
    Refused {
        /// The lease asked for.
        fence: Fence,
        /// Why not.
        reason: BindRefusal,
    },
}

/// What a consumer may read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Grant {
    /// The lease.
    pub fence: Fence,
    /// The producer's blocks and held tokens, one entry for each of its groups.
    pub groups: Vec<SrcGroup>,
    /// How long the lease lasts, counted by the consumer from when it sent the bind; `None` for a lease without end.
    pub time_left: Option<Duration>,
}

/// The most leases of one heartbeat.
pub const MAX_BEATS: usize = 1 << 12;

/// I still want these leases. One for all leases of a peer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Heartbeat {
    /// Counted by the consumer, on each link.
    pub beat: u64,
    /// The leases, with the attempts that read them; at most [`MAX_BEATS`].
    pub leases: Vec<(LeaseId, Attempt)>,
}

/// What is left of a lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Left {
    /// Nothing: it is over, or the asker doesn't read it.
    Closed,
    /// So long, counted by the consumer from when it asked.
    For(Duration),
    /// It has no end.
    Always,
}

/// The answer to a heartbeat.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HeartbeatAnswer {
    /// Which.
    pub beat: u64,
    /// What is left, lease by lease in the order of the heartbeat.
    pub left: Vec<Left>,
}

/// A lease that was bound is over. Whatever is still read of it will not be told *Held*.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LeaseClosed {
    /// The lease and the attempt that was bound.
    pub fence: Fence,
    /// How it ended.
    pub how: Closing,
}

/// Why a lease may not be read.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindRefusal {
    /// The fence names another engine.
    #[error("the reference is for another engine than the one that answered")]
    WrongEngine,
    /// The engine has been restarted since.
    #[error("the reference is from an earlier life of the engine (its epoch is now {current:.8}); prefill again")]
    StaleEpoch {
        /// The present epoch.
        current: Epoch,
    },
    /// Never offered, or closed: released, withdrawn, expired, or its consumer was lost.
    #[error("the lease is not open: it was released or withdrawn, has expired, or was never offered")]
    UnknownLease,
    /// Another request reads it, or has bound it before.
    #[error("the lease is bound already by another request")]
    AlreadyBound,
    /// Another attempt is due.
    #[error("attempt {got} was asked for, attempt {expected} is due")]
    WrongAttempt {
        /// The one due.
        expected: u32,
        /// The one asked for.
        got: u32,
    },
    /// The two sides would compute the cache from different inputs.
    #[error("the content keys differ: the producer computed this cache from other tokens, adapter or inputs")]
    WrongContent,
    /// The two sides' maps of who reads what differ.
    #[error("the maps of peers differ: the producer's is {ours:.16}; the two sides run different planners")]
    PeerMapDiffers {
        /// The producer's.
        ours: Digest,
    },
    /// The two caches don't describe one model.
    #[error("the caches do not match: {0}")]
    Incompatible(String),
    /// A rank of the producer is gone.
    #[error("the producer's rank {rank} is gone: {reason}; prefill again at another engine")]
    RankLost {
        /// Which.
        rank: RankId,
        /// What the producer knows.
        reason: String,
    },
    /// The producer serves no more: too much is bound by this peer already. To neighbours of version 2 this is told as
    /// `Incompatible`.
    #[error("the producer is busy: {0}")]
    Busy(String),
    /// Its bytes are still being computed: they can be pushed as they become final, and read when all are.
    #[error("the lease is still being computed; let it be pushed, or ask again when it is sealed")]
    NotSealed,
    /// The blocks that a push grants don't fit what is offered.
    #[error("the room that was granted does not fit what is offered: {0}")]
    Unfit(String),
}

/// How the consumer's reads ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReadsEnd {
    /// Every named source was read.
    Complete,
    /// The consumer has given up; what its ranks read, or may still be reading, will not be used. Nothing is said of a
    /// lease that this consumer has not bound.
    Abandoned,
    /// Nobody will read it: ends a lease that nobody has bound. Only for a peer of version 3.
    Declined,
}

/// My ranks' reads have ended.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Release {
    /// The lease.
    pub fence: Fence,
    /// How they ended.
    pub reads: ReadsEnd,
}

/// What became of the bytes while they were read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verdict {
    /// The blocks were held until now: what was read is the lease's.
    Held,
    /// They were not, or nobody knows.
    Stale,
}

/// The answer to a release.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ReleaseAnswer {
    /// The lease.
    pub fence: Fence,
    /// The verdict.
    pub verdict: Verdict,
}

/// The most windows of one question.
pub const MAX_WINDOWS: usize = 64;
/// The most pieces of one answer.
pub const MAX_PIECES: usize = 1 << 16;

/// A stretch of the byte stream that a batch's runs make in order, and the length of the pieces it is digested in. The
/// last piece may be shorter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    /// First byte of the stream.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Bytes of one piece, at least 1.
    pub piece: u64,
}

impl Window {
    /// How many pieces; `None` if a piece has no bytes or the window passes the end of 64 bits.
    #[must_use]
    pub fn pieces(self) -> Option<u64> {
        self.start.checked_add(self.len)?;
        (self.piece > 0).then(|| self.len.div_ceil(self.piece))
    }
}

/// The digest of one piece: the first half of its BLAKE3.
pub type PieceDigest = [u8; 16];

/// Digest these of your bytes: the runs of one consumer in batch order, read at the producer.
#[derive(Clone, PartialEq, Debug)]
pub struct RunDigest {
    /// The lease; bound by the asker.
    pub fence: Fence,
    /// The producer's rank.
    pub src: RankId,
    /// The consumer's rank.
    pub dst: RankId,
    /// Length of the sequence, as in the consumer's request.
    pub tokens: Tokens,
    /// The consumer's blocks and what it had cached, as in its request.
    pub groups: Vec<DstGroup>,
    /// What to digest: windows in the order of the stream, none of which overlap.
    pub windows: Vec<Window>,
}

/// The answer: the windows' pieces in order, or why not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunDigestAnswer {
    /// The lease.
    pub fence: Fence,
    /// The producer's rank.
    pub src: RankId,
    /// The consumer's rank.
    pub dst: RankId,
    /// The digests.
    pub pieces: Result<Vec<PieceDigest>, String>,
}

/// Gather what one of my ranks reads from one of yours, in the order in which it lies at my rank.
///
/// The staging memory of a rank is the region after those of its manifest. What was gathered stays there until the lease is
/// closed. A wish, not a claim: whoever refuses is read from directly.
#[derive(Clone, PartialEq, Debug)]
pub struct Gather {
    /// The lease; bound by the asker.
    pub fence: Fence,
    /// The producer's rank.
    pub src: RankId,
    /// The consumer's rank.
    pub dst: RankId,
    /// Which bytes in which order, as the consumer's rank computes them.
    pub gathered: Gathered,
    /// Length of the sequence, as in the consumer's request.
    pub tokens: Tokens,
    /// The consumer's blocks and what it had cached, as in its request.
    pub groups: Vec<DstGroup>,
}

/// What a consumer's rank computes of what is to be gathered for it. The producer's rank computes it too, and gathers nothing
/// where the two are not the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Gathered {
    /// How many bytes.
    pub bytes: Bytes,
    /// The name of the batch: [`Staged::digest`](kvferry_geometry::staged::Staged::digest).
    pub batch: Digest,
}

impl fmt::Display for Gathered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} as batch {:.16}", self.bytes, self.batch)
    }
}

/// Why a producer's rank has gathered nothing; then it is read from directly.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotGathered {
    /// The two sides compute different batches, or orders of them: what the consumer would find is not what it expects.
    #[error(
        "the producer would gather {ours}, the consumer expects other bytes or another order; the two sides run different planners"
    )]
    Differs {
        /// What the producer's rank computes.
        ours: Gathered,
    },
    /// It can't, or has no room.
    #[error("{0}")]
    Unable(String),
}

impl From<String> for NotGathered {
    fn from(why: String) -> Self {
        Self::Unable(why)
    }
}

impl From<&str> for NotGathered {
    fn from(why: &str) -> Self {
        Self::Unable(why.into())
    }
}

/// The answer: where the bytes begin in the rank's staging memory, or why they are not there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GatherAnswer {
    /// The lease.
    pub fence: Fence,
    /// The producer's rank.
    pub src: RankId,
    /// The consumer's rank.
    pub dst: RankId,
    /// The offset. The asker proves for itself that the bytes lie inside what the rank has registered.
    pub result: Result<Bytes, NotGathered>,
}
