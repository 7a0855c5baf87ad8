//! The bytes of peer links and rank links.
//!
//! A link is a byte stream in each direction, cut into frames:
//!
//! ```text
//! length u32 | kind u16 | body, `length` bytes              (little endian)
//! ```
//!
//! Peer links join neighbours of any version. An owner and its ranks are of one build, so that bodies on rank links may change with
//! it.
//!
//! The length is compared with the link's limit before anything is kept for the body, and a body is only ever kept as far
//! as it has arrived. `kind` is one of the numbers in [`kind`]; a number is never given a second meaning. A body is the
//! [postcard](https://postcard.jamesmunns.com/wire-format) encoding of one type of the private module `dto`, to its last
//! byte. The two kinds of hello alone have a head of fixed layout before it, so that neighbours of any version can tell each other what
//! they speak:
//!
//! ```text
//! "kvfy" | oldest version u16 | newest version u16 | postcard of the rest
//! ```
//!
//! Postcard is not self-describing: a decoder can only ever build the type that the frame's kind names. Lists are bounded
//! by number, and no list reserves memory for more than a few elements that have not arrived. What is decoded is then converted in
//! [`convert`], the only place where a peer's bytes become values of the crates' own types; domain types are
//! never serialisable themselves. Every fault is a [`WireError`] that says whose it is. Nothing here panics.

use crate::handshake::{Claim, Versions};
use crate::peer::PeerMessage;
use crate::rank::{FromRank, ToRank};

mod bounded;
pub mod convert;
mod dto;
mod frame;
#[cfg(test)]
mod tests;

pub use convert::ConvertError;
pub use frame::{Frame, FrameError, FrameReader, HEADER};

/// The longest body of a frame on any link, in bytes.
pub const MAX_FRAME: usize = 16 << 20;
/// What a hello begins with.
pub const MAGIC: [u8; 4] = *b"kvfy";

/// The registry of frame kinds. Numbers below 64 are of peer links, from 64 on of rank links.
pub mod kind {
    /// [`PeerMessage::Hello`](crate::peer::PeerMessage::Hello): magic, versions, names, digest, manifest.
    pub const HELLO: u16 = 1;
    /// [`PeerMessage::Refused`](crate::peer::PeerMessage::Refused): why the link will be closed.
    pub const REFUSED: u16 = 2;
    /// [`PeerMessage::Again`](crate::peer::PeerMessage::Again): a hello by digests. From version 3 on.
    pub const AGAIN: u16 = 3;
    /// [`PeerMessage::ManifestWanted`](crate::peer::PeerMessage::ManifestWanted): an empty body. From version 3 on.
    pub const MANIFEST_WANTED: u16 = 4;
    /// [`PeerMessage::Manifest`](crate::peer::PeerMessage::Manifest): a whole manifest. From version 3 on.
    pub const MANIFEST: u16 = 5;
    /// [`PeerMessage::Bind`](crate::peer::PeerMessage::Bind): fence, content key, salt, digest of the map of peers.
    pub const BIND: u16 = 16;
    /// [`PeerMessage::BindAnswer`](crate::peer::PeerMessage::BindAnswer): block tables, or why not.
    pub const BIND_ANSWER: u16 = 17;
    /// [`PeerMessage::Release`](crate::peer::PeerMessage::Release): the reads have ended.
    pub const RELEASE: u16 = 18;
    /// [`PeerMessage::ReleaseAnswer`](crate::peer::PeerMessage::ReleaseAnswer): held or stale.
    pub const RELEASE_ANSWER: u16 = 19;
    /// [`PeerMessage::Heartbeat`](crate::peer::PeerMessage::Heartbeat): leases still wanted. From version 3 on.
    pub const HEARTBEAT: u16 = 20;
    /// [`PeerMessage::HeartbeatAnswer`](crate::peer::PeerMessage::HeartbeatAnswer): what is left of them. From version 3 on.
    pub const HEARTBEAT_ANSWER: u16 = 21;
    /// [`PeerMessage::Closed`](crate::peer::PeerMessage::Closed): a bound lease is over. From version 3 on.
    pub const CLOSED: u16 = 22;
    /// [`PeerMessage::PushBind`](crate::peer::PeerMessage::PushBind): a bind, and blocks to write into. This and the four after it
    /// only for a peer with [`Abilities::PUSH`](crate::handshake::Abilities::PUSH).
    pub const PUSH_BIND: u16 = 24;
    /// [`PeerMessage::Written`](crate::peer::PeerMessage::Written): each writer, and how it ended.
    pub const WRITTEN: u16 = 25;
    /// [`PeerMessage::Progress`](crate::peer::PeerMessage::Progress): so much is in place.
    pub const PROGRESS: u16 = 26;
    /// [`PeerMessage::Stop`](crate::peer::PeerMessage::Stop): stop writing.
    pub const STOP: u16 = 27;
    /// [`PeerMessage::Stopped`](crate::peer::PeerMessage::Stopped): which writers have stopped.
    pub const STOPPED: u16 = 28;
    /// [`PeerMessage::RunDigest`](crate::peer::PeerMessage::RunDigest): digest these of your bytes.
    pub const RUN_DIGEST: u16 = 32;
    /// [`PeerMessage::RunDigestAnswer`](crate::peer::PeerMessage::RunDigestAnswer): the digests.
    pub const RUN_DIGEST_ANSWER: u16 = 33;
    /// [`PeerMessage::Gather`](crate::peer::PeerMessage::Gather): gather these of your bytes in staging memory.
    ///
    /// 34 and 35 were a question that didn't name what its asker has computed, and its answer.
    pub const GATHER: u16 = 36;
    /// [`PeerMessage::GatherAnswer`](crate::peer::PeerMessage::GatherAnswer): where they are, or why not.
    pub const GATHER_ANSWER: u16 = 37;
    /// [`FromRank::Join`](crate::rank::FromRank::Join): names, placement, layout, blob.
    pub const JOIN: u16 = 64;
    /// [`FromRank::Pulled`](crate::rank::FromRank::Pulled): how a rank's share of a request ended.
    pub const PULLED: u16 = 65;
    /// [`FromRank::DigestWanted`](crate::rank::FromRank::DigestWanted): a producer rank's digests are needed.
    pub const DIGEST_WANTED: u16 = 66;
    /// [`FromRank::Digested`](crate::rank::FromRank::Digested): the answer to a digest order.
    pub const DIGESTED: u16 = 67;
    /// [`FromRank::GatherWanted`](crate::rank::FromRank::GatherWanted): a producer's rank is to gather.
    pub const GATHER_WANTED: u16 = 68;
    /// [`FromRank::Gathered`](crate::rank::FromRank::Gathered): the answer to a gather order.
    pub const GATHERED: u16 = 69;
    /// [`FromRank::Pushed`](crate::rank::FromRank::Pushed): how a rank's writes of an order ended.
    pub const PUSHED: u16 = 70;
    /// [`FromRank::PushProgress`](crate::rank::FromRank::PushProgress): so much of them is done.
    pub const PUSH_PROGRESS: u16 = 71;
    /// [`ToRank::Welcome`](crate::rank::ToRank::Welcome): the whole engine.
    pub const WELCOME: u16 = 80;
    /// [`ToRank::Refused`](crate::rank::ToRank::Refused): the rank may not join.
    pub const JOIN_REFUSED: u16 = 81;
    /// [`ToRank::Peer`](crate::rank::ToRank::Peer): another engine.
    pub const PEER: u16 = 82;
    /// [`ToRank::Forget`](crate::rank::ToRank::Forget): an engine is not needed any more.
    pub const FORGET: u16 = 83;
    /// [`ToRank::Pull`](crate::rank::ToRank::Pull): read.
    pub const PULL: u16 = 84;
    /// [`ToRank::Cancel`](crate::rank::ToRank::Cancel): stop reading.
    pub const CANCEL: u16 = 85;
    /// [`ToRank::Digest`](crate::rank::ToRank::Digest): digest what a peer's rank reads.
    pub const DIGEST: u16 = 86;
    /// [`ToRank::DigestAnswer`](crate::rank::ToRank::DigestAnswer): the producer rank's digests.
    pub const DIGEST_ANSWER: u16 = 87;
    /// [`ToRank::CancelDigest`](crate::rank::ToRank::CancelDigest): digests are not needed any more.
    pub const CANCEL_DIGEST: u16 = 88;
    /// [`ToRank::Gather`](crate::rank::ToRank::Gather): gather what a peer's rank reads.
    pub const GATHER_ORDER: u16 = 89;
    /// [`ToRank::GatherEnd`](crate::rank::ToRank::GatherEnd): what was gathered is not read any more.
    pub const GATHER_END: u16 = 90;
    /// [`ToRank::GatherAnswer`](crate::rank::ToRank::GatherAnswer): where the producer's rank has gathered.
    pub const GATHER_PLACE: u16 = 91;
    /// [`ToRank::Push`](crate::rank::ToRank::Push): write.
    pub const PUSH: u16 = 92;
    /// [`ToRank::CancelPush`](crate::rank::ToRank::CancelPush): stop writing.
    pub const CANCEL_PUSH: u16 = 93;
    /// [`ToRank::Stream`](crate::rank::ToRank::Stream): the blocks of a lease that is being computed.
    pub const STREAM: u16 = 94;
    /// [`ToRank::Ready`](crate::rank::ToRank::Ready): some of its bytes are final.
    pub const READY: u16 = 95;
    /// [`ToRank::StreamEnd`](crate::rank::ToRank::StreamEnd): it is over.
    pub const STREAM_END: u16 = 96;
}

/// A message could not be read, or not be written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The stream is not cut into frames as it should be.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A kind that this link doesn't have.
    #[error("a frame of kind {got} does not belong on this link")]
    UnknownKind {
        /// The kind.
        got: u16,
    },
    /// A hello that doesn't begin with the magic bytes: not a kvferry peer.
    #[error("the hello begins with {got:02x?}, not with {MAGIC:02x?}; is the peer a kvferry owner?")]
    Magic {
        /// What it begins with, as far as it goes.
        got: Vec<u8>,
    },
    /// A hello of a neighbour that has no version in common with us.
    #[error("protocol versions: ours are {ours}, the peer's {theirs}; upgrade the older side")]
    Version {
        /// Ours.
        ours: Versions,
        /// The peer's.
        theirs: Versions,
    },
    /// The body does not decode.
    #[error("the body of a {what} of {len} bytes does not decode: {reason}")]
    Body {
        /// Which message.
        what: &'static str,
        /// Length of the body.
        len: usize,
        /// In the decoder's words.
        reason: String,
    },
    /// The body decodes, with bytes left over.
    #[error("the body of a {what} has {extra} bytes after its end")]
    Trailing {
        /// Which message.
        what: &'static str,
        /// How many.
        extra: usize,
    },
    /// The body decodes to something that makes no sense.
    #[error("{what}: {error}")]
    Meaning {
        /// Which message.
        what: &'static str,
        /// What is wrong.
        error: ConvertError,
    },
    /// Our own message has a list that is longer than the peer takes.
    #[error("a {what} could not be written: {reason}")]
    NotWritten {
        /// Which message.
        what: &'static str,
        /// In the encoder's words.
        reason: String,
    },
    /// Our own message is longer than a frame can be.
    #[error("a {what} of {got} bytes is longer than the {limit} that a frame can carry")]
    TooLong {
        /// Which message.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The longest.
        limit: usize,
    },
}

/// Whose fault something is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fault {
    /// The peer's bytes.
    PeerBytes,
    /// The peer's choice of something well-formed.
    PeerChoice,
    /// Our caller's.
    Caller,
}

impl WireError {
    /// Whose fault it is.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Version { .. } | Self::Meaning { .. } => Fault::PeerChoice,
            Self::TooLong { .. } | Self::NotWritten { .. } => Fault::Caller,
            _ => Fault::PeerBytes,
        }
    }
}

/// Reads a message of a peer link.
///
/// # Errors
/// Whatever is wrong with the bytes; see [`WireError`].
pub fn decode_peer(frame: &Frame) -> Result<PeerMessage, WireError> {
    convert::peer_message(frame)
}

/// What a hello says before its manifest, which is not read; `None` for other frames, and where not even that can be read:
/// [`decode_peer`] says why.
#[must_use]
pub fn claim(frame: &Frame) -> Option<Claim> {
    convert::claim(frame)
}

/// Reads a message of a rank link at the owner.
///
/// # Errors
/// Whatever is wrong with the bytes; see [`WireError`].
pub fn decode_from_rank(frame: &Frame) -> Result<FromRank, WireError> {
    convert::from_rank(frame)
}

/// Reads a message of a rank link at the rank.
///
/// # Errors
/// Whatever is wrong with the bytes; see [`WireError`].
pub fn decode_to_rank(frame: &Frame) -> Result<ToRank, WireError> {
    convert::to_rank(frame)
}

/// Writes a message of a peer link, as a whole frame.
///
/// # Errors
/// If it is too long for a frame.
pub fn encode_peer(message: &PeerMessage) -> Result<Vec<u8>, WireError> {
    convert::encode_peer(message)
}

/// Writes a message of a rank to its owner, as a whole frame.
///
/// # Errors
/// If it is too long for a frame.
pub fn encode_from_rank(message: &FromRank) -> Result<Vec<u8>, WireError> {
    convert::encode_from_rank(message)
}

/// Writes a message of an owner to its rank, as a whole frame.
///
/// # Errors
/// If it is too long for a frame.
pub fn encode_to_rank(message: &ToRank) -> Result<Vec<u8>, WireError> {
    convert::encode_to_rank(message)
}
