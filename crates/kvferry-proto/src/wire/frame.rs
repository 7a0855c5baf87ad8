//! Cutting a byte stream into frames, with nothing kept that has not arrived.

use super::MAX_FRAME;

/// Bytes before a frame's body: its length and its kind.
pub const HEADER: usize = 6;

/// One frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// One of [`kind`](super::kind)'s numbers, or not.
    pub kind: u16,
    /// The body.
    pub body: Vec<u8>,
}

/// The stream can't be cut into frames any further.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A frame longer than the link allows.
    #[error(
        "a frame of {got} bytes was announced, more than the {limit} that this link allows; is the peer a kvferry owner?"
    )]
    TooLong {
        /// The length announced.
        got: u32,
        /// The limit.
        limit: usize,
    },
    /// The stream ended inside a frame.
    #[error("the stream ended inside a frame, after {got} of its bytes")]
    Truncated {
        /// Bytes of the frame that had arrived.
        got: usize,
    },
}

/// Collects the bytes of one direction of a link and gives frames.
#[derive(Debug)]
pub struct FrameReader {
    limit: usize,
    buffer: Vec<u8>,
    /// Bytes of `buffer` before this are used up.
    start: usize,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self::new(MAX_FRAME)
    }
}

impl FrameReader {
    /// A reader that refuses bodies longer than `limit`.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.min(MAX_FRAME), buffer: Vec::new(), start: 0 }
    }

    /// From the next frame on, refuses bodies longer than this.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit.min(MAX_FRAME);
    }

    /// Bytes that have arrived and were not given out.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.buffer.len() - self.start
    }

    /// Takes bytes that have arrived.
    pub fn extend(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if it has arrived.
    ///
    /// # Errors
    /// If the frame that begins here is too long; the stream is of no use after that.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = &self.buffer[self.start..];
        let Some((header, rest)) = rest.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [a, b, c, d, k, l] = *header;
        let got = u32::from_le_bytes([a, b, c, d]);
        let len = match usize::try_from(got) {
            Ok(len) if len <= self.limit => len,
            _ => return Err(FrameError::TooLong { got, limit: self.limit }),
        };
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let frame = Frame { kind: u16::from_le_bytes([k, l]), body: body.to_vec() };
        self.start += HEADER + len;
        if self.start == self.buffer.len() {
            // Nothing is kept for an idle link.
            self.start = 0;
            if self.buffer.capacity() > 64 << 10 { self.buffer = Vec::new() } else { self.buffer.clear() }
        }
        Ok(Some(frame))
    }

    /// The stream has ended.
    ///
    /// # Errors
    /// If it ended inside a frame.
    pub fn finish(&self) -> Result<(), FrameError> {
        let got = self.waiting();
        if got > 0 { Err(FrameError::Truncated { got }) } else { Ok(()) }
    }
}

/// A whole frame of a body; `None` if it is longer than a frame can be.
pub(super) fn encode(kind: u16, body: &[u8]) -> Option<Vec<u8>> {
    let len = u32::try_from(body.len()).ok().filter(|_| body.len() <= MAX_FRAME)?;
    let mut out = Vec::with_capacity(HEADER + body.len());
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(body);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_however_the_bytes_come_in() {
        let frames = [Frame { kind: 1, body: vec![1, 2, 3] }, Frame { kind: 700, body: vec![] }];
        let stream: Vec<u8> = frames.iter().flat_map(|f| encode(f.kind, &f.body).unwrap()).collect();
        for chunk in 1..=stream.len() {
            let mut reader = FrameReader::default();
            let mut got = Vec::new();
            for bytes in stream.chunks(chunk) {
                reader.extend(bytes);
                while let Some(f) = reader.next_frame().unwrap() {
                    got.push(f);
                }
            }
            assert_eq!(got, frames, "in chunks of {chunk}");
            assert_eq!(reader.finish(), Ok(()));
        }
    }

    #[test]
    fn hs_06_a_length_is_refused_before_anything_is_kept_for_it() {
        for len in [101u32, 64 << 20, u32::MAX] {
            let mut reader = FrameReader::new(100);
            reader.extend(&len.to_le_bytes());
            reader.extend(&[0, 0]);
            assert_eq!(reader.next_frame(), Err(FrameError::TooLong { got: len, limit: 100 }));
            assert!(reader.buffer.capacity() < 64);
        }
        // An announced body that doesn't come costs nothing.
        let mut reader = FrameReader::default();
        reader.extend(&(16u32 << 20).to_le_bytes());
        reader.extend(&[0, 0]);
        assert_eq!(reader.next_frame(), Ok(None));
        assert!(reader.buffer.capacity() < 64);
    }

    #[test]
    fn int_01_a_frame_cut_at_each_byte_is_no_frame() {
        let whole = encode(5, &[9; 40]).unwrap();
        for cut in 0..whole.len() {
            let mut reader = FrameReader::default();
            reader.extend(&whole[..cut]);
            assert_eq!(reader.next_frame(), Ok(None), "cut at {cut}");
            assert_eq!(reader.finish(), if cut == 0 { Ok(()) } else { Err(FrameError::Truncated { got: cut }) });
        }
    }
}
