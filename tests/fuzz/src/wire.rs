//! Frames of peer links and rank links.

use std::sync::Arc;

use kvferry_geometry::manifest::Manifest;
use kvferry_proto::handshake::Claim;
use kvferry_proto::manifest::{EngineManifest, RankContact};
use kvferry_proto::names::{EngineId, Epoch};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::ToRank;
use kvferry_proto::wire::{
    Frame, FrameReader, HEADER, WireError, claim, decode_from_rank, decode_peer, decode_to_rank, encode_from_rank,
    encode_peer, encode_to_rank,
};

use crate::{Reached, Reader, promise};

/// A byte for the link, then `kind u16 | body` of one frame, or a stream of whole frames.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let (mut r, mut reached) = (Reader::new(data), Reached::default());
    let choice = r.byte();
    let link = choice % 3;
    if choice < 128 {
        let kind = u16::from_le_bytes([r.byte(), r.byte()]);
        message(link, &Frame { kind, body: r.rest().to_vec() }, &mut reached);
        return reached;
    }
    let mut frames = FrameReader::new(1 << 16);
    for bytes in r.rest().chunks(usize::from(choice) - 120) {
        frames.extend(bytes);
        loop {
            match frames.next_frame() {
                Ok(Some(frame)) => message(link, &frame, &mut reached),
                Ok(None) => break,
                Err(error) => {
                    reached.fault(&error);
                    return reached;
                }
            }
        }
    }
    if let Err(error) = frames.finish() {
        reached.fault(&error);
    }
    reached
}

/// Reads as [`run`] does, and does no more.
pub fn read(data: &[u8]) {
    let mut r = Reader::new(data);
    let choice = r.byte();
    let decode = |frame: &Frame| match choice % 3 {
        0 => {
            drop(claim(frame));
            drop(decode_peer(frame));
        }
        1 => drop(decode_from_rank(frame)),
        _ => drop(decode_to_rank(frame)),
    };
    if choice < 128 {
        let kind = u16::from_le_bytes([r.byte(), r.byte()]);
        return decode(&Frame { kind, body: r.rest().to_vec() });
    }
    let mut frames = FrameReader::new(1 << 16);
    for bytes in r.rest().chunks(usize::from(choice) - 120) {
        frames.extend(bytes);
        loop {
            match frames.next_frame() {
                Ok(Some(frame)) => decode(&frame),
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// Reads and writes one message of a link.
fn message(link: u8, frame: &Frame, reached: &mut Reached) {
    match link {
        0 => {
            let begins = claim(frame);
            if let Ok(PeerMessage::Hello(hello)) = decode_peer(frame) {
                assert_eq!(begins, Some(Claim::from(&hello)), "a hello begins otherwise than it is");
            }
            again(frame, decode_peer, encode_peer, reached);
        }
        1 => again(frame, decode_from_rank, encode_from_rank, reached),
        _ => {
            if let Ok(ToRank::Welcome(m) | ToRank::Peer(m)) = decode_to_rank(frame) {
                promise::manifest(m.cache());
            }
            again(frame, decode_to_rank, encode_to_rank, reached);
        }
    }
}

/// What is read is written, and what was written is read as the same and written as the same bytes.
fn again<T: PartialEq + std::fmt::Debug>(
    frame: &Frame,
    decode: fn(&Frame) -> Result<T, WireError>,
    encode: fn(&T) -> Result<Vec<u8>, WireError>,
    reached: &mut Reached,
) {
    let message = match decode(frame) {
        Ok(message) => message,
        Err(error) => {
            reached.fault(&error);
            return;
        }
    };
    reached.at(&format!("kind {}", frame.kind));
    let written = encode(&message).expect("what was read can be written");
    let read = Frame { kind: frame.kind, body: written[HEADER..].to_vec() };
    let second = decode(&read).expect("what was written can be read");
    assert!(second == message, "{message:?} was written and read as {second:?}");
    assert_eq!(encode(&second).expect("it was written before"), written);
}

/// An accepted manifest is the same after the wire.
pub(crate) fn describes(cache: &Manifest) {
    let contact = || RankContact { epoch: Epoch::new(1), blob: Arc::from([7; 8].as_slice()) };
    let contacts = cache.ranks().iter().map(|_| contact()).collect();
    let engine = EngineManifest::new(EngineId::new("e").unwrap(), Epoch::new(2), cache.clone(), contacts).unwrap();
    let message = ToRank::Peer(Arc::new(engine));
    let written = match encode_to_rank(&message) {
        Ok(written) => written,
        // More than a frame carries.
        Err(WireError::TooLong { .. } | WireError::NotWritten { .. }) => return,
        Err(error) => panic!("an accepted manifest is not written: {error}"),
    };
    let kind = u16::from_le_bytes([written[4], written[5]]);
    let read = decode_to_rank(&Frame { kind, body: written[HEADER..].to_vec() });
    let read = read.expect("an accepted manifest is not read");
    assert!(read == message, "{message:?} was read as {read:?}");
}
