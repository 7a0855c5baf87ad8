//! The frames of a connection. One socket for each `connect`: the connecting side asks, reads or writes memory and
//! notifies; the listening side answers. Little endian.
//!
//! ```text
//! connecting side                         listening side
//! Hello  endpoint token who  + board  ->
//!                                     <-  Welcome probe-place probe  + board   (or Refuse text)
//! Ask    generation region access     ->
//!                                     <-  Grant  region access what  (+ memfd)
//! Notify bytes                        ->
//! ```
//!
//! What a peer sends is parsed here, once: a frame is either one of these or a [`FrameError`]. Nothing is allocated from a
//! length that a peer announces, because a frame has none: it is as long as the message that brought it.

use kvferry_geometry::units::RegionId;
use kvferry_transport::EndpointId;

/// The version of the frames.
pub(crate) const VERSION: u16 = 1;
/// The longest notification.
pub(crate) const MAX_NOTIFY: usize = 64 << 10;
/// The longest frame.
pub(crate) const MAX_FRAME: usize = MAX_NOTIFY + 64;
/// The longest text in a frame.
const MAX_TEXT: usize = 512;

/// What a peer wants to do with a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Access {
    Read,
    Write,
}

/// How a region can be reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Grant {
    /// By mapping the descriptor that comes with it.
    Map { offset: u64, len: u64 },
    /// By the kernel's copy between processes, at this address.
    Address { start: u64, len: u64 },
    /// Not: it is not registered as the asking side believes.
    Stale,
    /// Not: for this reason.
    Denied(String),
}

/// One frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Frame<'a> {
    Hello { version: u16, target: EndpointId, token: [u8; 16], from: EndpointId },
    Welcome { probe_at: u64, probe: [u8; 16] },
    Refuse(String),
    Ask { generation: u64, region: RegionId, access: Access },
    Grant { region: RegionId, access: Access, grant: Grant },
    Notify(&'a [u8]),
}

/// Bytes that are no frame.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("a frame of kind {0} with a length of {1} bytes")]
    Length(u8, usize),
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    #[error("an empty frame")]
    Empty,
    #[error("a frame with the value {got} in its field {field}")]
    Field { field: &'static str, got: u8 },
}

impl Frame<'_> {
    /// The bytes. A notification's payload is not among them: it follows as the frame's second piece.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Self::Hello { version, target, token, from } => {
                out.push(1);
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&target.get());
                out.extend_from_slice(token);
                out.extend_from_slice(&from.get());
            }
            Self::Welcome { probe_at, probe } => {
                out.push(2);
                out.extend_from_slice(&probe_at.to_le_bytes());
                out.extend_from_slice(probe);
            }
            Self::Refuse(text) => {
                out.push(3);
                push_text(&mut out, text);
            }
            Self::Ask { generation, region, access } => {
                out.push(4);
                out.extend_from_slice(&generation.to_le_bytes());
                out.extend_from_slice(&region.get().to_le_bytes());
                out.push(*access as u8);
            }
            Self::Grant { region, access, grant } => {
                out.push(5);
                out.extend_from_slice(&region.get().to_le_bytes());
                out.push(*access as u8);
                push_grant(&mut out, grant);
            }
            Self::Notify(_) => out.push(6),
        }
        out
    }
}

impl<'a> Frame<'a> {
    /// Parses what a peer sent.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let (&kind, rest) = bytes.split_first().ok_or(FrameError::Empty)?;
        let mut r = Reader { kind, len: bytes.len(), rest };
        let frame = match kind {
            1 => Self::Hello {
                version: u16::from_le_bytes(r.array()?),
                target: EndpointId::new(r.array()?),
                token: r.array()?,
                from: EndpointId::new(r.array()?),
            },
            2 => Self::Welcome { probe_at: u64::from_le_bytes(r.array()?), probe: r.array()? },
            3 => Self::Refuse(r.text()?),
            4 => Self::Ask {
                generation: u64::from_le_bytes(r.array()?),
                region: RegionId::new(u32::from_le_bytes(r.array()?)),
                access: r.access()?,
            },
            5 => Self::Grant {
                region: RegionId::new(u32::from_le_bytes(r.array()?)),
                access: r.access()?,
                grant: r.grant()?,
            },
            6 if rest.len() <= MAX_NOTIFY => return Ok(Self::Notify(rest)),
            6 => return Err(r.length()),
            other => return Err(FrameError::Kind(other)),
        };
        if r.rest.is_empty() { Ok(frame) } else { Err(r.length()) }
    }
}

/// A peer's text made fit to be shown: bounded, and without control characters.
pub(crate) fn tidy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_TEXT)])
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&text.as_bytes()[..text.len().min(MAX_TEXT)]);
}

fn push_grant(out: &mut Vec<u8>, grant: &Grant) {
    match grant {
        Grant::Map { offset, len } => {
            out.push(0);
            out.extend_from_slice(&offset.to_le_bytes());
            out.extend_from_slice(&len.to_le_bytes());
        }
        Grant::Address { start, len } => {
            out.push(1);
            out.extend_from_slice(&start.to_le_bytes());
            out.extend_from_slice(&len.to_le_bytes());
        }
        Grant::Stale => out.push(2),
        Grant::Denied(text) => {
            out.push(3);
            push_text(out, text);
        }
    }
}

struct Reader<'a> {
    kind: u8,
    len: usize,
    rest: &'a [u8],
}

impl Reader<'_> {
    fn length(&self) -> FrameError {
        FrameError::Length(self.kind, self.len)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (array, rest) = self.rest.split_first_chunk::<N>().ok_or(self.length())?;
        self.rest = rest;
        Ok(*array)
    }

    fn byte(&mut self) -> Result<u8, FrameError> {
        self.array::<1>().map(|[b]| b)
    }

    fn text(&mut self) -> Result<String, FrameError> {
        let text = std::mem::take(&mut self.rest);
        if text.len() > MAX_TEXT { Err(self.length()) } else { Ok(tidy(text)) }
    }

    fn access(&mut self) -> Result<Access, FrameError> {
        match self.byte()? {
            0 => Ok(Access::Read),
            1 => Ok(Access::Write),
            got => Err(FrameError::Field { field: "access", got }),
        }
    }

    fn grant(&mut self) -> Result<Grant, FrameError> {
        match self.byte()? {
            0 => Ok(Grant::Map { offset: u64::from_le_bytes(self.array()?), len: u64::from_le_bytes(self.array()?) }),
            1 => {
                Ok(Grant::Address { start: u64::from_le_bytes(self.array()?), len: u64::from_le_bytes(self.array()?) })
            }
            2 => Ok(Grant::Stale),
            3 => Ok(Grant::Denied(self.text()?)),
            got => Err(FrameError::Field { field: "grant", got }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Frame<'static>> {
        let (region, access) = (RegionId::new(7), Access::Write);
        vec![
            Frame::Hello {
                version: 1,
                target: EndpointId::new([1; 16]),
                token: [2; 16],
                from: EndpointId::new([3; 16]),
            },
            Frame::Welcome { probe_at: 0xdead_beef, probe: [9; 16] },
            Frame::Refuse("no such token".into()),
            Frame::Ask { generation: 3, region, access },
            Frame::Grant { region, access, grant: Grant::Map { offset: 4096, len: u64::MAX } },
            Frame::Grant { region, access: Access::Read, grant: Grant::Address { start: 1 << 40, len: 5 } },
            Frame::Grant { region, access, grant: Grant::Stale },
            Frame::Grant { region, access, grant: Grant::Denied("read only".into()) },
        ]
    }

    #[test]
    fn round_trip_and_every_cut() {
        for frame in samples() {
            let bytes = frame.encode();
            assert!(bytes.len() <= MAX_FRAME);
            assert_eq!(Frame::decode(&bytes).as_ref(), Ok(&frame));
            for end in 0..bytes.len() {
                assert_ne!(Frame::decode(&bytes[..end]).as_ref(), Ok(&frame), "{frame:?} cut at {end}");
            }
            let text = matches!(&frame, Frame::Refuse(_) | Frame::Grant { grant: Grant::Denied(_), .. });
            assert_eq!(Frame::decode(&[&bytes[..], b"x"].concat()).is_ok(), text);
        }
        assert_eq!(Frame::decode(b"\x06hello"), Ok(Frame::Notify(b"hello")));
        assert!(Frame::decode(&vec![6; MAX_NOTIFY + 2]).is_err());
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut state = 11u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        let mut parsed = 0;
        for _ in 0..200_000 {
            let mut bytes: Vec<u8> = (0..random() % 80).map(|_| random()).collect();
            if let Some(kind) = bytes.first_mut() {
                *kind %= 8;
            }
            if let Ok(frame) = Frame::decode(&bytes) {
                parsed += usize::from(!frame.encode().is_empty());
            }
        }
        assert!(parsed > 1000);
    }

    #[test]
    fn texts_are_bounded_and_printable() {
        assert!(Frame::decode(&[&[3][..], &vec![b'a'; MAX_TEXT + 1]].concat()).is_err());
        assert_eq!(Frame::decode(b"\x03a\x1b[31m\n\xff"), Ok(Frame::Refuse("a [31m \u{fffd}".into())));
    }
}
