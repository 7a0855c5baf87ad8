//! The one place where a peer's bytes become values of the crates' own types, and back.
//!
//! Every check of a foreign value is made here or in the constructor that is called here
//! ([`Manifest::new`](kvferry_geometry::manifest::Manifest::new), [`EngineId::new`](crate::names::EngineId::new), ...).
//! What can't be told without knowing our own side (are the block ids in range? do the two caches match?) is not asked
//! here.

use kvferry_geometry::digest::Digest;
use kvferry_geometry::manifest::ManifestErrors;
use kvferry_geometry::spec::SpecErrors;
use serde::{Deserialize, Serialize};

use super::{Frame, MAGIC, MAX_FRAME, WireError, dto, frame, kind};
use crate::handshake::{Abilities, Again, Claim, Hello, Versions};
use crate::manifest::ContactError;
use crate::names::{EngineId, ModelIdentity, NameError};
use crate::peer::PeerMessage;
use crate::rank::{FromRank, ToRank};

mod gather;
mod geometry;
mod leases;
mod messages;
mod push;
mod request;

/// The longest text in a message, in bytes.
pub const MAX_TEXT: usize = 16 << 10;

/// Something well-formed that makes no sense: the peer's fault.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// A name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The list of items.
    #[error("the model's items: {0}")]
    Spec(#[from] SpecErrors),
    /// The whole description.
    #[error("the manifest: {0}")]
    Manifest(#[from] ManifestErrors),
    /// The transport blobs.
    #[error(transparent)]
    Contacts(#[from] ContactError),
    /// An empty interval of heads, or of a part's units.
    #[error("item {item}: heads or units [{start}, {end}) are no interval")]
    Heads {
        /// The item's id.
        item: u32,
        /// First head.
        start: u32,
        /// One past the last.
        end: u32,
    },
    /// A token class that there is not.
    #[error("item {item}: token class {index} of {count}, {interleave} at a time, is none")]
    TokenClass {
        /// The item's id.
        item: u32,
        /// How many share the tokens.
        count: u32,
        /// Tokens at a time.
        interleave: u32,
        /// Which one.
        index: u32,
    },
    /// A list of items is longer than any model's.
    #[error("{what} counts {got} items, more than {limit}")]
    ItemCount {
        /// Which list.
        what: &'static str,
        /// Its length.
        got: u32,
        /// The limit.
        limit: usize,
    },
    /// An item id beyond its list, or twice in it.
    #[error("item id {item} is beyond its list or stands in it twice")]
    ItemId {
        /// The id.
        item: u32,
    },
    /// An interval that ends before it starts.
    #[error("tokens [{start}, {end}) are no interval")]
    Tokens {
        /// First token.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// The block tables of one side of a request are too long.
    #[error("the block tables of one side of a request list more than {limit} blocks")]
    Tables {
        /// The limit.
        limit: u64,
    },
    /// The groups of one side of a request list too many states.
    #[error("the groups of one side of a request list more than {limit} states")]
    States {
        /// The limit.
        limit: usize,
    },
    /// Block ids that pass 32 bits.
    #[error("a run of {count} blocks from {first} on passes the largest id")]
    Blocks {
        /// First id.
        first: u32,
        /// How many.
        count: u32,
    },
    /// A text is too long.
    #[error("a text of {got} bytes is longer than {limit}")]
    Text {
        /// Its length.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// Something was written by a writer that isn't listed, or has failed.
    #[error("something was written by writer {writer} of the list, which has none of that number that has written")]
    Writer {
        /// Its place in the list.
        writer: u32,
    },
    /// A digest window's pieces are empty, it overflows, or the windows overlap or ask for too many pieces.
    #[error("the digest windows are not valid or not in order, or ask for more than {limit} pieces")]
    Windows {
        /// The most pieces.
        limit: usize,
    },
}

type Converted<T> = Result<T, ConvertError>;

pub(super) fn peer_message(frame: &Frame) -> Result<PeerMessage, WireError> {
    Ok(match frame.kind {
        kind::HELLO => PeerMessage::Hello(hello(&frame.body)?),
        kind::AGAIN => PeerMessage::Again(again(&frame.body)?),
        kind::MANIFEST_WANTED => {
            parse::<()>("manifest question", &frame.body)?;
            PeerMessage::ManifestWanted
        }
        kind::MANIFEST => PeerMessage::Manifest(read::<dto::Engine, messages::Shared>("manifest", frame)?.0),
        kind::HEARTBEAT => PeerMessage::Heartbeat(read::<dto::Heartbeat, _>("heartbeat", frame)?),
        kind::HEARTBEAT_ANSWER => {
            PeerMessage::HeartbeatAnswer(read::<dto::HeartbeatAnswer, _>("heartbeat answer", frame)?)
        }
        kind::CLOSED => PeerMessage::Closed(read::<dto::LeaseClosed, _>("notice of a closed lease", frame)?),
        kind::PUSH_BIND => PeerMessage::PushBind(Box::new(read::<dto::PushBind, _>("push bind", frame)?)),
        kind::WRITTEN => PeerMessage::Written(Box::new(read::<dto::Written, _>("end of writes", frame)?)),
        kind::PROGRESS => PeerMessage::Progress(read::<dto::Progress, _>("progress", frame)?),
        kind::STOP => PeerMessage::Stop(read::<dto::Fence, _>("stop", frame)?),
        kind::STOPPED => PeerMessage::Stopped(read::<dto::Stopped, _>("end of a stop", frame)?),
        kind::REFUSED => PeerMessage::Refused(read::<dto::Refused, messages::Reasons>("refusal", frame)?.0),
        kind::BIND => PeerMessage::Bind(read::<dto::Bind, _>("bind", frame)?),
        kind::BIND_ANSWER => PeerMessage::BindAnswer(read::<dto::BindAnswer, _>("bind answer", frame)?),
        kind::RELEASE => PeerMessage::Release(read::<dto::Release, _>("release", frame)?),
        kind::RELEASE_ANSWER => PeerMessage::ReleaseAnswer(read::<dto::ReleaseAnswer, _>("release answer", frame)?),
        kind::RUN_DIGEST => PeerMessage::RunDigest(read::<dto::RunDigest, _>("run digest", frame)?),
        kind::RUN_DIGEST_ANSWER => {
            PeerMessage::RunDigestAnswer(read::<dto::RunDigestAnswer, _>("run digest answer", frame)?)
        }
        kind::GATHER => PeerMessage::Gather(read::<dto::Gather, _>("gather", frame)?),
        kind::GATHER_ANSWER => PeerMessage::GatherAnswer(read::<dto::GatherAnswer, _>("gather answer", frame)?),
        got => return Err(WireError::UnknownKind { got }),
    })
}

pub(super) fn from_rank(frame: &Frame) -> Result<FromRank, WireError> {
    Ok(match frame.kind {
        kind::JOIN => FromRank::Join(read::<dto::Join, _>("join", frame)?),
        kind::PULLED => read::<dto::Pulled, _>("pull result", frame)?,
        kind::DIGEST_WANTED => read::<dto::DigestWanted, _>("digest question", frame)?,
        kind::DIGESTED => read::<dto::Digested, _>("digest result", frame)?,
        kind::PUSHED => read::<dto::Pushed, _>("push result", frame)?,
        kind::PUSH_PROGRESS => read::<dto::PushProgress, _>("push progress", frame)?,
        kind::GATHER_WANTED => read::<dto::GatherWanted, _>("gather question", frame)?,
        kind::GATHERED => read::<dto::Gathered, _>("gather result", frame)?,
        got => return Err(WireError::UnknownKind { got }),
    })
}

pub(super) fn to_rank(frame: &Frame) -> Result<ToRank, WireError> {
    Ok(match frame.kind {
        kind::WELCOME => ToRank::Welcome(read::<dto::Engine, messages::Shared>("welcome", frame)?.0),
        kind::JOIN_REFUSED => ToRank::Refused(read::<String, messages::Text>("refusal", frame)?.0),
        kind::PEER => ToRank::Peer(read::<dto::Engine, messages::Shared>("peer", frame)?.0),
        kind::FORGET => ToRank::Forget(read::<[u8; 32], messages::Named>("forget", frame)?.0),
        kind::PULL => ToRank::Pull(read::<dto::Pull, _>("pull order", frame)?),
        kind::CANCEL => ToRank::Cancel(read::<u64, messages::Cancelled>("cancel", frame)?.0),
        kind::PUSH => ToRank::Push(Box::new(read::<dto::Push, _>("push order", frame)?)),
        kind::CANCEL_PUSH => ToRank::CancelPush(read::<u64, _>("push cancel", frame)?),
        kind::STREAM => ToRank::Stream(read::<dto::Stream, _>("stream", frame)?),
        kind::READY => ToRank::Ready(read::<dto::Ready, _>("ready bytes", frame)?),
        kind::STREAM_END => ToRank::StreamEnd(read::<u128, push::Ended>("end of a stream", frame)?.0),
        kind::CANCEL_DIGEST => ToRank::CancelDigest(read::<u64, messages::Ticket>("digest cancel", frame)?.0),
        kind::DIGEST => ToRank::Digest(read::<dto::DigestOrder, _>("digest order", frame)?),
        kind::DIGEST_ANSWER => read::<dto::DigestAnswer, _>("digest answer", frame)?,
        kind::GATHER_ORDER => ToRank::Gather(read::<dto::GatherOrder, _>("gather order", frame)?),
        kind::GATHER_END => ToRank::GatherEnd(read::<u64, messages::Ticket>("gather end", frame)?.0),
        kind::GATHER_PLACE => read::<dto::GatherPlace, _>("gather place", frame)?,
        got => return Err(WireError::UnknownKind { got }),
    })
}

pub(super) fn encode_peer(message: &PeerMessage) -> Result<Vec<u8>, WireError> {
    match message {
        PeerMessage::Hello(m) => write_hello(m),
        PeerMessage::Again(m) => write_again(m),
        PeerMessage::ManifestWanted => write("manifest question", kind::MANIFEST_WANTED, &()),
        PeerMessage::Manifest(m) => write("manifest", kind::MANIFEST, &dto::Engine::from(&**m)),
        PeerMessage::Heartbeat(m) => write("heartbeat", kind::HEARTBEAT, &dto::Heartbeat::from(m)),
        PeerMessage::HeartbeatAnswer(m) => {
            write("heartbeat answer", kind::HEARTBEAT_ANSWER, &dto::HeartbeatAnswer::from(m))
        }
        PeerMessage::Closed(m) => write("notice of a closed lease", kind::CLOSED, &dto::LeaseClosed::from(m)),
        PeerMessage::Refused(reasons) => {
            let reasons = reasons.iter().take(dto::MAX_REASONS).map(|r| clip(r)).collect();
            write("refusal", kind::REFUSED, &dto::Refused(reasons))
        }
        PeerMessage::PushBind(m) => write("push bind", kind::PUSH_BIND, &dto::PushBind::from(&**m)),
        PeerMessage::Written(m) => write("end of writes", kind::WRITTEN, &dto::Written::from(&**m)),
        PeerMessage::Progress(m) => write("progress", kind::PROGRESS, &dto::Progress::from(m)),
        PeerMessage::Stop(m) => write("stop", kind::STOP, &dto::Fence::from(&m.fence)),
        PeerMessage::Stopped(m) => write("end of a stop", kind::STOPPED, &dto::Stopped::from(m)),
        PeerMessage::Bind(m) => write("bind", kind::BIND, &dto::Bind::from(m)),
        PeerMessage::BindAnswer(m) => write("bind answer", kind::BIND_ANSWER, &dto::BindAnswer::from(m)),
        PeerMessage::Release(m) => write("release", kind::RELEASE, &dto::Release::from(m)),
        PeerMessage::ReleaseAnswer(m) => write("release answer", kind::RELEASE_ANSWER, &dto::ReleaseAnswer::from(m)),
        PeerMessage::RunDigest(m) => write("run digest", kind::RUN_DIGEST, &dto::RunDigest::from(m)),
        PeerMessage::RunDigestAnswer(m) => {
            write("run digest answer", kind::RUN_DIGEST_ANSWER, &dto::RunDigestAnswer::from(m))
        }
        PeerMessage::Gather(m) => write("gather", kind::GATHER, &dto::Gather::from(m)),
        PeerMessage::GatherAnswer(m) => write("gather answer", kind::GATHER_ANSWER, &dto::GatherAnswer::from(m)),
    }
}

pub(super) fn encode_from_rank(message: &FromRank) -> Result<Vec<u8>, WireError> {
    match message {
        FromRank::Join(m) => write("join", kind::JOIN, &dto::Join::from(m)),
        FromRank::Pulled { pull, result } => {
            let result = result.as_ref().map(dto::RankReport::from).map_err(dto::RankFault::from);
            write("pull result", kind::PULLED, &dto::Pulled { pull: pull.0, result })
        }
        FromRank::DigestWanted { pull, src, windows } => {
            let windows = messages::write_windows(windows);
            write("digest question", kind::DIGEST_WANTED, &dto::DigestWanted { pull: pull.0, src: src.get(), windows })
        }
        FromRank::Digested { ticket, pieces } => {
            let pieces = messages::write_pieces(pieces);
            write("digest result", kind::DIGESTED, &dto::Digested { ticket: *ticket, pieces })
        }
        FromRank::Pushed { push, result } => write("push result", kind::PUSHED, &push::write_pushed(*push, result)),
        FromRank::PushProgress { push, tokens } => {
            let d = dto::PushProgress { push: push.0, tokens: tokens.get() };
            write("push progress", kind::PUSH_PROGRESS, &d)
        }
        FromRank::GatherWanted { pull, src, gathered } => {
            let d = dto::GatherWanted { pull: pull.0, src: src.get(), batch: gathered.into() };
            write("gather question", kind::GATHER_WANTED, &d)
        }
        FromRank::Gathered { ticket, result } => {
            let result = gather::write_gathering(result);
            write("gather result", kind::GATHERED, &dto::Gathered { ticket: *ticket, result })
        }
    }
}

pub(super) fn encode_to_rank(message: &ToRank) -> Result<Vec<u8>, WireError> {
    match message {
        ToRank::Welcome(m) => write("welcome", kind::WELCOME, &dto::Engine::from(&**m)),
        ToRank::Refused(reason) => write("refusal", kind::JOIN_REFUSED, &clip(reason)),
        ToRank::Peer(m) => write("peer", kind::PEER, &dto::Engine::from(&**m)),
        ToRank::Forget(digest) => write("forget", kind::FORGET, digest.as_bytes()),
        ToRank::Pull(m) => write("pull order", kind::PULL, &dto::Pull::from(m)),
        ToRank::Cancel(pull) => write("cancel", kind::CANCEL, &pull.0),
        ToRank::Push(m) => write("push order", kind::PUSH, &dto::Push::from(&**m)),
        ToRank::CancelPush(push) => write("push cancel", kind::CANCEL_PUSH, &push.0),
        ToRank::Stream(m) => write("stream", kind::STREAM, &dto::Stream::from(m)),
        ToRank::Ready(m) => write("ready bytes", kind::READY, &dto::Ready::from(m)),
        ToRank::StreamEnd(lease) => write("end of a stream", kind::STREAM_END, &lease.get()),
        ToRank::CancelDigest(ticket) => write("digest cancel", kind::CANCEL_DIGEST, ticket),
        ToRank::Digest(m) => write("digest order", kind::DIGEST, &dto::DigestOrder::from(m)),
        ToRank::DigestAnswer { pull, src, pieces } => {
            let pieces = messages::write_pieces(pieces);
            write("digest answer", kind::DIGEST_ANSWER, &dto::DigestAnswer { pull: pull.0, src: src.get(), pieces })
        }
        ToRank::Gather(m) => write("gather order", kind::GATHER_ORDER, &dto::GatherOrder::from(m)),
        ToRank::GatherEnd(ticket) => write("gather end", kind::GATHER_END, ticket),
        ToRank::GatherAnswer { pull, src, result } => {
            let result = gather::write_gathering(result);
            write("gather place", kind::GATHER_PLACE, &dto::GatherPlace { pull: pull.0, src: src.get(), result })
        }
    }
}

/// The head of a hello can be read whatever the version; the rest only if there is a common one.
fn head<'a>(what: &'static str, body: &'a [u8]) -> Result<(Versions, &'a [u8]), WireError> {
    let Some((_, rest)) = body.split_first_chunk::<4>().filter(|(m, _)| **m == MAGIC) else {
        return Err(WireError::Magic { got: body[..body.len().min(MAGIC.len())].to_vec() });
    };
    let Some((&[a, b, c, d], rest)) = rest.split_first_chunk::<4>() else {
        return Err(WireError::Body { what, len: body.len(), reason: "it ends inside its versions".into() });
    };
    let theirs = Versions { min: u16::from_le_bytes([a, b]), max: u16::from_le_bytes([c, d]) };
    let ours = Versions::OURS;
    if ours.common(theirs).is_none() {
        return Err(WireError::Version { ours, theirs });
    }
    Ok((theirs, rest))
}

fn write_head<D: Serialize>(what: &'static str, kind: u16, versions: Versions, rest: &D) -> Result<Vec<u8>, WireError> {
    let mut body = MAGIC.to_vec();
    body.extend_from_slice(&versions.min.to_le_bytes());
    body.extend_from_slice(&versions.max.to_le_bytes());
    let body = postcard::to_extend(rest, body).map_err(|e| not_written(what, &e))?;
    framed(what, kind, &body)
}

fn hello(body: &[u8]) -> Result<Hello, WireError> {
    let what = "hello";
    let (versions, rest) = head(what, body)?;
    let d: dto::Hello<'_> = parse(what, rest)?;
    let meaning = |error| WireError::Meaning { what, error };
    Ok(Hello {
        versions,
        abilities: Abilities(d.abilities),
        identity: ModelIdentity::new(d.identity).map_err(|e| meaning(e.into()))?,
        stripe: d.stripe,
        digest: Digest::from_bytes(d.digest),
        manifest: messages::Shared::try_from(d.manifest).map_err(meaning)?.0,
    })
}

/// The most bytes of a claim: a model identity and an engine id of full length, and what stands between them.
const MAX_CLAIM: usize = 4096;

pub(super) fn claim(frame: &Frame) -> Option<Claim> {
    if frame.kind != kind::HELLO {
        return None;
    }
    let (versions, rest) = head("hello", &frame.body).ok()?;
    // Names have a limit, so no more is looked at, whatever lengths are announced.
    let rest = &rest[..rest.len().min(MAX_CLAIM)];
    let (d, _) = postcard::take_from_bytes::<dto::HelloClaim>(rest).ok()?;
    Some(Claim {
        versions,
        identity: ModelIdentity::new(d.identity).ok()?,
        stripe: d.stripe,
        engine: EngineId::new(d.engine).ok()?,
    })
}

fn write_hello(hello: &Hello) -> Result<Vec<u8>, WireError> {
    let rest = dto::Hello {
        abilities: hello.abilities.0,
        identity: hello.identity.as_str(),
        stripe: hello.stripe,
        digest: *hello.digest.as_bytes(),
        manifest: dto::Engine::from(&*hello.manifest),
    };
    write_head("hello", kind::HELLO, hello.versions, &rest)
}

fn again(body: &[u8]) -> Result<Again, WireError> {
    let what = "hello by digest";
    let (versions, rest) = head(what, body)?;
    let d: dto::Again = parse(what, rest)?;
    let meaning = |error: NameError| WireError::Meaning { what, error: error.into() };
    Ok(Again {
        versions,
        abilities: Abilities(d.abilities),
        identity: ModelIdentity::new(&d.identity).map_err(meaning)?,
        stripe: d.stripe,
        engine: EngineId::new(&d.engine).map_err(meaning)?,
        digest: Digest::from_bytes(d.digest),
        yours: Digest::from_bytes(d.yours),
    })
}

fn write_again(again: &Again) -> Result<Vec<u8>, WireError> {
    let rest = dto::Again {
        abilities: again.abilities.0,
        identity: again.identity.as_str().into(),
        stripe: again.stripe,
        engine: again.engine.as_str().into(),
        digest: *again.digest.as_bytes(),
        yours: *again.yours.as_bytes(),
    };
    write_head("hello by digest", kind::AGAIN, again.versions, &rest)
}

fn read<'a, D: Deserialize<'a>, T: TryFrom<D, Error = ConvertError>>(
    what: &'static str,
    frame: &'a Frame,
) -> Result<T, WireError> {
    let d: D = parse(what, &frame.body)?;
    T::try_from(d).map_err(|error| WireError::Meaning { what, error })
}

fn parse<'a, D: Deserialize<'a>>(what: &'static str, body: &'a [u8]) -> Result<D, WireError> {
    let (value, rest) = postcard::take_from_bytes(body).map_err(|e| WireError::Body {
        what,
        len: body.len(),
        reason: e.to_string(),
    })?;
    if rest.is_empty() { Ok(value) } else { Err(WireError::Trailing { what, extra: rest.len() }) }
}

fn write<D: Serialize>(what: &'static str, kind: u16, d: &D) -> Result<Vec<u8>, WireError> {
    let body = postcard::to_allocvec(d).map_err(|e| not_written(what, &e))?;
    framed(what, kind, &body)
}

fn framed(what: &'static str, kind: u16, body: &[u8]) -> Result<Vec<u8>, WireError> {
    frame::encode(kind, body).ok_or(WireError::TooLong { what, got: body.len(), limit: MAX_FRAME })
}

fn not_written(what: &'static str, error: &postcard::Error) -> WireError {
    WireError::NotWritten { what, reason: error.to_string() }
}

fn text(text: String) -> Converted<String> {
    bounded(&text)?;
    Ok(text)
}

fn bounded(text: &str) -> Converted<&str> {
    if text.len() > MAX_TEXT { Err(ConvertError::Text { got: text.len(), limit: MAX_TEXT }) } else { Ok(text) }
}

/// A text of ours, cut to what a peer takes.
fn clip(text: &str) -> String {
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    text[..end].into()
}
