//! The stream of a link with a shared key: bytes cut into frames, each encrypted and authenticated.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use snow::TransportState;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The most bytes in a frame after its length.
const MAX: usize = 65_535;
const TAG: usize = 16;
/// Bytes of a frame's length.
const LEN: usize = 2;
/// A buffer larger than this is given back when nothing is in it.
const IDLE: usize = 4 << 10;
/// The most that is read ahead.
const AHEAD: usize = 2 * (LEN + MAX);

/// Encrypts what is written to it and decrypts what is read from it.
///
/// What was written may wait here until it is flushed, or until more is written. An end of the stream that the other end didn't
/// announce is an error, and so is anything that its key doesn't open.
pub(super) struct KeyedStream<S> {
    stream: S,
    noise: TransportState,
    /// Ciphertext that has arrived: `input[start..end]`.
    input: Vec<u8>,
    start: usize,
    end: usize,
    /// Plaintext for which a reader had no room: from `taken`.
    plain: Vec<u8>,
    taken: usize,
    /// Ciphertext to be written: from `written`.
    output: Vec<u8>,
    written: usize,
    reading: Reading,
    /// Our last frame was made.
    finished: bool,
}

#[derive(Clone, Copy)]
enum Reading {
    Open,
    /// The other end has said its last.
    Ended,
    /// Nothing more of it can be believed.
    Failed(io::ErrorKind, &'static str),
}

impl<S> KeyedStream<S> {
    pub(super) fn new(stream: S, noise: TransportState) -> Self {
        Self {
            stream,
            noise,
            input: Vec::new(),
            start: 0,
            end: 0,
            plain: Vec::new(),
            taken: 0,
            output: Vec::new(),
            written: 0,
            reading: Reading::Open,
            finished: false,
        }
    }

    pub(super) fn get_ref(&self) -> &S {
        &self.stream
    }

    /// Bytes of the whole frame that begins the input, if its length is there.
    fn frame(&self) -> Option<usize> {
        match self.input.get(self.start..self.end)? {
            [a, b, ..] => Some(LEN + usize::from(u16::from_be_bytes([*a, *b]))),
            _ => None,
        }
    }

    /// Appends a frame to the output.
    fn seal(&mut self, bytes: &[u8]) -> io::Result<()> {
        let at = self.output.len();
        self.output.resize(at + LEN + bytes.len() + TAG, 0);
        let sealed = self.noise.write_message(bytes, &mut self.output[at + LEN..]);
        let len = sealed.as_ref().ok().and_then(|&len| u16::try_from(len).ok());
        let Some(len) = len else {
            self.output.truncate(at);
            return Err(io::Error::other("the link has no nonces left"));
        };
        self.output[at..at + LEN].copy_from_slice(&len.to_be_bytes());
        Ok(())
    }

    /// Opens the frame of `len` bytes at the start of the input, into `buf` if it has the room. Gives false at the last one.
    fn open(&mut self, len: usize, buf: &mut ReadBuf<'_>) -> Result<bool, &'static str> {
        let frame = &self.input[self.start + LEN..self.start + len];
        let Some(size) = frame.len().checked_sub(TAG) else {
            return Err("a frame is too short to be authentic");
        };
        // The library opens in place if there is room for the tag too.
        let opened = if buf.remaining() >= frame.len() {
            let opened = self.noise.read_message(frame, buf.initialize_unfilled_to(frame.len()));
            if opened.is_ok() {
                buf.advance(size);
            }
            opened
        } else {
            self.plain.resize(frame.len(), 0);
            self.taken = 0;
            let opened = self.noise.read_message(frame, &mut self.plain);
            self.plain.truncate(if opened.is_ok() { size } else { 0 });
            opened
        };
        self.start += len;
        match opened {
            Ok(_) => Ok(size > 0),
            Err(_) => Err("a frame is not what the other end sent: tampered with, repeated or left out"),
        }
    }

    /// Gives what was kept for the reader; false if there was nothing.
    fn take_plain(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let rest = &self.plain[self.taken..];
        if rest.is_empty() {
            return false;
        }
        let n = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..n]);
        self.taken += n;
        if self.taken == self.plain.len() {
            self.plain.clear();
            self.taken = 0;
        }
        true
    }

    fn fail<T>(&mut self, kind: io::ErrorKind, why: &'static str) -> Poll<io::Result<T>> {
        self.reading = Reading::Failed(kind, why);
        Poll::Ready(Err(io::Error::new(kind, why)))
    }

    /// Lets go of large buffers in which nothing is.
    fn rest(&mut self) {
        if self.start == self.end && self.input.len() > IDLE {
            self.input = Vec::new();
            (self.start, self.end) = (0, 0);
        }
        if self.plain.is_empty() && self.plain.capacity() > IDLE {
            self.plain = Vec::new();
        }
    }
}

impl<S: AsyncRead + Unpin> KeyedStream<S> {
    /// Reads what has come, with room for the frame that has begun. Gives the bytes read.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let wanted = self.frame().unwrap_or(LEN);
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        // A reader that was given all it had room for is given more.
        let room = match self.end == self.input.len() {
            true => (2 * self.input.len()).clamp(IDLE, AHEAD),
            false => self.input.len(),
        };
        self.input.resize(room.max(wanted), 0);
        let mut buf = ReadBuf::new(&mut self.input[self.end..]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf))?;
        let n = buf.filled().len();
        self.end += n;
        Poll::Ready(Ok(n))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for KeyedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if buf.remaining() == 0 || this.take_plain(buf) {
                return Poll::Ready(Ok(()));
            }
            match this.reading {
                Reading::Open => {}
                Reading::Ended => return Poll::Ready(Ok(())),
                Reading::Failed(kind, why) => return Poll::Ready(Err(io::Error::new(kind, why))),
            }
            // All frames that are there and fit, so that a reader with room is called once.
            let mut given = false;
            while let Some(len) = this.frame().filter(|len| this.start + len <= this.end) {
                if given && buf.remaining() < len {
                    return Poll::Ready(Ok(()));
                }
                match this.open(len, buf) {
                    Ok(true) => given = true,
                    Ok(false) => {
                        this.reading = Reading::Ended;
                        return Poll::Ready(Ok(()));
                    }
                    Err(why) if given => {
                        // What came before it was authentic.
                        this.reading = Reading::Failed(io::ErrorKind::InvalidData, why);
                        return Poll::Ready(Ok(()));
                    }
                    Err(why) => return this.fail(io::ErrorKind::InvalidData, why),
                }
                if !this.plain.is_empty() {
                    break;
                }
            }
            if given {
                this.take_plain(buf);
                return Poll::Ready(Ok(()));
            }
            match this.poll_fill(cx) {
                Poll::Ready(Ok(0)) => {
                    let why = "the connection ended without the other end's last word: cut off, or its process died";
                    return this.fail(io::ErrorKind::UnexpectedEof, why);
                }
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    this.rest();
                    return Poll::Pending;
                }
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> KeyedStream<S> {
    /// Writes what waits.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.output.len() {
            match ready!(Pin::new(&mut self.stream).poll_write(cx, &self.output[self.written..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => self.written += n,
            }
        }
        self.output.clear();
        self.written = 0;
        if self.output.capacity() > IDLE {
            self.output = Vec::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for KeyedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let bytes = &bytes[..bytes.len().min(MAX - TAG)];
        if bytes.is_empty() {
            // An empty frame would be our last word.
            return Poll::Ready(Ok(0));
        }
        // What waits goes first; a little more may wait behind it.
        if this.poll_drain(cx)?.is_pending() && this.output.len() > MAX {
            return Poll::Pending;
        }
        this.seal(bytes)?;
        // Its failure comes with the next call: these bytes were taken.
        drop(this.poll_drain(cx));
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.finished {
            this.seal(&[])?;
            this.finished = true;
        }
        ready!(this.poll_drain(cx))?;
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}
