//! A message on its way: as it is, or as its bytes.

use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{FromRank, ToRank};
use kvferry_proto::wire::{self, Frame, FrameReader};

#[derive(Debug)]
pub(crate) enum Packet {
    Peer(Box<PeerMessage>),
    FromRank(Box<FromRank>),
    ToRank(Box<ToRank>),
    Bytes(Vec<u8>),
}

fn frame(bytes: &[u8]) -> Result<Frame, String> {
    let mut reader = FrameReader::default();
    reader.extend(bytes);
    match reader.next_frame() {
        Ok(Some(frame)) => Ok(frame),
        Ok(None) => Err("half a frame".into()),
        Err(error) => Err(error.to_string()),
    }
}

impl Packet {
    pub(crate) fn peer(message: PeerMessage, wire: bool) -> Result<Self, String> {
        match wire {
            true => wire::encode_peer(&message).map(Self::Bytes).map_err(|e| e.to_string()),
            false => Ok(Self::Peer(Box::new(message))),
        }
    }

    pub(crate) fn from_rank(message: FromRank, wire: bool) -> Result<Self, String> {
        match wire {
            true => wire::encode_from_rank(&message).map(Self::Bytes).map_err(|e| e.to_string()),
            false => Ok(Self::FromRank(Box::new(message))),
        }
    }

    pub(crate) fn to_rank(message: ToRank, wire: bool) -> Result<Self, String> {
        match wire {
            true => wire::encode_to_rank(&message).map(Self::Bytes).map_err(|e| e.to_string()),
            false => Ok(Self::ToRank(Box::new(message))),
        }
    }

    pub(crate) fn read_peer(self) -> Result<PeerMessage, String> {
        match self {
            Self::Peer(message) => Ok(*message),
            Self::Bytes(bytes) => wire::decode_peer(&frame(&bytes)?).map_err(|e| e.to_string()),
            _ => Err("a message of a rank's link".into()),
        }
    }

    pub(crate) fn read_from_rank(self) -> Result<FromRank, String> {
        match self {
            Self::FromRank(message) => Ok(*message),
            Self::Bytes(bytes) => wire::decode_from_rank(&frame(&bytes)?).map_err(|e| e.to_string()),
            _ => Err("a message that no rank sends".into()),
        }
    }

    pub(crate) fn read_to_rank(self) -> Result<ToRank, String> {
        match self {
            Self::ToRank(message) => Ok(*message),
            Self::Bytes(bytes) => wire::decode_to_rank(&frame(&bytes)?).map_err(|e| e.to_string()),
            _ => Err("a message that no rank gets".into()),
        }
    }
}
