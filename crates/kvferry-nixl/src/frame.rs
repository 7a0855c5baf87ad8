//! What the endpoints tell each other: notifications of NIXL's agents, with a prefix of ours. Others are not ours.

use kvferry_transport::access::{Message, MessageError};

use crate::process::Process;

/// Most bytes of a notification of an operation.
pub(crate) const MAX_NOTIFY: usize = 64 << 10;

const PREFIX: &[u8; 5] = b"kvfN\x01";
const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const LEAVE: u8 = 3;
const BYE: u8 = 4;
const PING: u8 = 5;
const PONG: u8 = 6;
const ACCESS: u8 = 7;
const CLOSING: u8 = 8;

/// One notification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Frame<'a> {
    /// The first word of a connection: who asks, and how its agent is reached.
    Hello {
        /// The connection, by the number of who asks.
        connection: u64,
        process: Process,
        /// NIXL's metadata of the agent, without memory.
        metadata: &'a [u8],
    },
    /// The answer.
    Welcome { connection: u64 },
    /// The connection is given up.
    Leave { connection: u64 },
    /// The endpoint ends: operations on it are to end, and nothing new is to be asked. Its own may still be moving.
    Closing,
    /// The last word: nothing of the sender's touches the receiver's memory any more.
    Bye,
    /// Is anybody there?
    Ping,
    /// The answer.
    Pong,
    /// Of the protocol of access.
    Access(Message<'a>),
}

/// Why bytes are no frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Bad {
    /// Not of this crate at all.
    Foreign,
    /// Of this crate, but broken.
    Broken(String),
}

impl From<MessageError> for Bad {
    fn from(error: MessageError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl<'a> Frame<'a> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = PREFIX.to_vec();
        match self {
            Self::Hello { connection, process, metadata } => {
                out.push(HELLO);
                out.extend_from_slice(&connection.to_le_bytes());
                process.encode(&mut out);
                out.extend_from_slice(metadata);
            }
            Self::Welcome { connection } => {
                out.push(WELCOME);
                out.extend_from_slice(&connection.to_le_bytes());
            }
            Self::Leave { connection } => {
                out.push(LEAVE);
                out.extend_from_slice(&connection.to_le_bytes());
            }
            Self::Closing => out.push(CLOSING),
            Self::Bye => out.push(BYE),
            Self::Ping => out.push(PING),
            Self::Pong => out.push(PONG),
            Self::Access(message) => {
                out.push(ACCESS);
                out.extend_from_slice(&message.encode());
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, Bad> {
        let rest = bytes.strip_prefix(PREFIX).ok_or(Bad::Foreign)?;
        let broken = || Bad::Broken(format!("{} bytes that are no frame", bytes.len()));
        let (&tag, rest) = rest.split_first().ok_or_else(broken)?;
        let number = |rest: &'a [u8]| rest.split_first_chunk::<8>().map(|(n, rest)| (u64::from_le_bytes(*n), rest));
        let connection = || match number(rest) {
            Some((connection, [])) => Ok(connection),
            _ => Err(broken()),
        };
        match (tag, rest) {
            (HELLO, rest) => {
                let (connection, rest) = number(rest).ok_or_else(broken)?;
                let (process, metadata) = rest.split_first_chunk::<{ Process::LEN }>().ok_or_else(broken)?;
                Ok(Self::Hello { connection, process: Process::decode(process), metadata })
            }
            (WELCOME, _) => Ok(Self::Welcome { connection: connection()? }),
            (LEAVE, _) => Ok(Self::Leave { connection: connection()? }),
            (CLOSING, []) => Ok(Self::Closing),
            (BYE, []) => Ok(Self::Bye),
            (PING, []) => Ok(Self::Ping),
            (PONG, []) => Ok(Self::Pong),
            (ACCESS, rest) => Ok(Self::Access(Message::decode(rest)?)),
            _ => Err(broken()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_cuts_are_refused() {
        let process = Process::this();
        let frames = [
            Frame::Hello { connection: 7, process, metadata: b"" },
            Frame::Welcome { connection: u64::MAX },
            Frame::Leave { connection: 1 },
            Frame::Closing,
            Frame::Bye,
            Frame::Ping,
            Frame::Pong,
            Frame::Access(Message::End { op: 3, notify: None }),
        ];
        for frame in &frames {
            let bytes = frame.encode();
            assert_eq!(Frame::decode(&bytes).as_ref(), Ok(frame));
            for end in 0..bytes.len() {
                let want_foreign = end < PREFIX.len();
                let got = Frame::decode(&bytes[..end]);
                assert!(if want_foreign { got == Err(Bad::Foreign) } else { matches!(got, Err(Bad::Broken(_))) });
            }
        }
        assert_eq!(Frame::decode(b"a notification of somebody else"), Err(Bad::Foreign));
    }
}
