//! A link secured by a shared key: the Noise protocol `NNpsk0`, by the crate `snow`.
//!
//! ```text
//!   client                                                         server
//!   "kvsk", 1, length of the id, the key's id, noise (48 bytes) -->        the key must be ours
//!                                  <-- "kvsk", 0, noise (48 bytes)         or why not, unauthenticated
//!   an empty frame -->                                                     proves that this is no recording
//!   frames <--> frames                                                     the last one of each side is empty
//! ```
//!
//! A frame is the length of what follows (2 bytes, big endian) and up to 65,535 bytes of ciphertext, of which 16 are its tag. Both ends
//! bring fresh keys of one use, so a recorded link can't be played again, in whole or in part, and stays secret if the shared key is
//! stolen later. Nonces count frames; each direction of each link has a key of its own. ChaCha20-Poly1305 needs no change of keys before
//! those 2^64 run out, at which the link fails. What identifies protocol and key is part of what both ends authenticate.

use snow::params::NoiseParams;
use snow::{Builder, HandshakeState, TransportState};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::frames::KeyedStream;
use super::key::{Key, SharedKeyOptions, is_key_id};
use super::stream::Peer;
use super::{MAX_KEY_ID, SecureError};

/// What this kind of security is called.
pub(super) const KIND: &str = "a shared key";
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
const PROLOGUE: &[u8] = b"kvferry control link";
const MAGIC: [u8; 4] = *b"kvsk";
const VERSION: u8 = 1;
/// Bytes of a message of Noise here: a key and a tag.
const MESSAGE: usize = 32 + TAG;
const TAG: usize = 16;

const GO_ON: u8 = 0;
const UNKNOWN_KEY: u8 = 1;
const WRONG_KEY: u8 = 2;

pub(super) async fn connect<S>(mut stream: S, options: &SharedKeyOptions) -> Result<(KeyedStream<S>, Peer), SecureError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let keys = options.keys();
    let Some(key) = keys.first() else { return Err(broken("this end has no key")) };
    let id = key.id.clone();
    let Some(peer) = options.peer(&id) else { return Err(SecureError::NotAllowed { names: vec![id] }) };

    let mut hello = header(&id);
    let mut noise = builder(key, &hello, |b| b.build_initiator())?;
    let at = hello.len();
    hello.resize(at + MESSAGE, 0);
    noise.write_message(&[], &mut hello[at..]).map_err(library)?;
    stream.write_all(&hello).await.map_err(failure)?;
    stream.flush().await.map_err(failure)?;

    let mut start = [0; MAGIC.len() + 1];
    stream.read_exact(&mut start).await.map_err(failure)?;
    let [magic @ .., status] = start;
    check_magic(magic)?;
    match status {
        GO_ON => {}
        UNKNOWN_KEY => return Err(SecureError::KeyNotKnownThere { id }),
        WRONG_KEY => return Err(SecureError::WrongKey { id }),
        other => return Err(broken(&format!("it answered with the status {other}"))),
    }
    let mut message = [0; MESSAGE];
    stream.read_exact(&mut message).await.map_err(failure)?;
    noise.read_message(&message, &mut []).map_err(|_| SecureError::WrongKey { id })?;
    let mut noise = noise.into_transport_mode().map_err(library)?;

    let mut proof = [0; 2 + TAG];
    let [_, len, frame @ ..] = &mut proof;
    *len = 16;
    noise.write_message(&[], frame).map_err(library)?;
    stream.write_all(&proof).await.map_err(failure)?;
    stream.flush().await.map_err(failure)?;
    Ok((KeyedStream::new(stream, noise), peer))
}

pub(super) async fn accept<S>(mut stream: S, options: &SharedKeyOptions) -> Result<(KeyedStream<S>, Peer), SecureError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut start = [0; MAGIC.len() + 2];
    stream.read_exact(&mut start).await.map_err(failure)?;
    let [magic @ .., version, len] = start;
    check_magic(magic)?;
    if version != VERSION {
        return Err(broken(&format!("it speaks version {version} of the handshake, and this end version {VERSION}")));
    }
    let mut id = vec![0; usize::from(len).min(MAX_KEY_ID + 1)];
    stream.read_exact(&mut id).await.map_err(failure)?;
    let id = String::from_utf8(id).unwrap_or_default();
    if !is_key_id(&id) {
        return Err(broken("its key's id is none"));
    }
    let mut message = [0; MESSAGE];
    stream.read_exact(&mut message).await.map_err(failure)?;

    let keys = options.keys();
    let Some(key) = keys.iter().find(|key| key.id == id) else {
        refuse(&mut stream, UNKNOWN_KEY).await;
        return Err(SecureError::UnknownKey { id, known: keys.iter().map(|key| key.id.clone()).collect() });
    };
    let Some(peer) = options.peer(&id) else {
        refuse(&mut stream, UNKNOWN_KEY).await;
        return Err(SecureError::NotAllowed { names: vec![id] });
    };
    let mut noise = builder(key, &header(&id), |b| b.build_responder())?;
    if noise.read_message(&message, &mut []).is_err() {
        refuse(&mut stream, WRONG_KEY).await;
        return Err(SecureError::WrongKey { id });
    }
    let mut answer = [0; MAGIC.len() + 1 + MESSAGE];
    let (start, message) = answer.split_at_mut(MAGIC.len() + 1);
    start[..MAGIC.len()].copy_from_slice(&MAGIC);
    noise.write_message(&[], message).map_err(library)?;
    stream.write_all(&answer).await.map_err(failure)?;
    stream.flush().await.map_err(failure)?;

    let mut noise: TransportState = noise.into_transport_mode().map_err(library)?;
    let mut proof = [0; 2 + TAG];
    stream.read_exact(&mut proof).await.map_err(failure)?;
    match proof {
        [0, 16, frame @ ..] => {
            noise.read_message(&frame, &mut []).map_err(|_| SecureError::WrongKey { id })?;
        }
        _ => return Err(broken("its third message has the wrong length")),
    }
    Ok((KeyedStream::new(stream, noise), peer))
}

/// What a client's first message begins with, for a checked id.
fn header(id: &str) -> Vec<u8> {
    let mut header = Vec::with_capacity(MAGIC.len() + 2 + id.len() + MESSAGE);
    header.extend(MAGIC);
    header.push(VERSION);
    header.push(u8::try_from(id.len()).unwrap_or(u8::MAX));
    header.extend(id.as_bytes());
    header
}

fn builder(
    key: &Key,
    header: &[u8],
    build: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> Result<HandshakeState, SecureError> {
    let pattern: NoiseParams = PATTERN.parse().map_err(library)?;
    let prologue = [PROLOGUE, header].concat();
    #[cfg(fuzzing)]
    let builder = Builder::with_resolver(pattern, super::cheap::resolver());
    #[cfg(not(fuzzing))]
    let builder = Builder::new(pattern);
    let builder = builder.psk(0, &key.secret).and_then(|b| b.prologue(&prologue)).map_err(library)?;
    build(builder).map_err(library)
}

/// Tells the client why, as well as that goes.
async fn refuse(stream: &mut (impl AsyncWrite + Unpin), status: u8) {
    let [a, b, c, d] = MAGIC;
    if stream.write_all(&[a, b, c, d, status]).await.is_ok() {
        // It is closed now in any case.
        drop(stream.shutdown().await);
    }
}

fn check_magic(start: [u8; 4]) -> Result<(), SecureError> {
    match start {
        MAGIC => Ok(()),
        // A handshake or an alert of TLS.
        [0x15 | 0x16, 0x03, ..] => Err(SecureError::OtherKind { ours: KIND, theirs: "TLS" }),
        _ => Err(SecureError::OtherKind { ours: KIND, theirs: "plaintext, or is no kvferry engine" }),
    }
}

fn broken(reason: &str) -> SecureError {
    SecureError::Broken { ours: KIND, reason: reason.into() }
}

fn library(error: snow::Error) -> SecureError {
    SecureError::Broken { ours: KIND, reason: format!("the library snow refused: {error}") }
}

fn failure(error: std::io::Error) -> SecureError {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof
        | std::io::ErrorKind::ConnectionReset
        | std::io::ErrorKind::BrokenPipe
        | std::io::ErrorKind::WriteZero => SecureError::Closed { ours: KIND },
        _ => SecureError::Io(error),
    }
}
