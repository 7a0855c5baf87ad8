//! The rank's end of its link to the owner: a Unix socket, or the owner's inbox where that is in the same process.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvferry_proto::rank::{FromRank, ToRank};
use kvferry_proto::wire::{FrameReader, WireError, decode_to_rank, encode_from_rank};
use rustix::event::PollFlags;

use super::WorkerError;
use crate::driver::Clock;
use crate::memory::{Found, RankEnd, take_list};

/// Between two attempts to reach the owner's socket.
const RETRY: Duration = Duration::from_millis(20);
/// Bytes that wait for the owner, at most: an owner that takes nothing is as good as gone.
const OUTBOX: usize = 64 << 20;
/// Bytes that are read at a time.
const READ: usize = 64 << 10;

/// Whether the link goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Go {
    On,
    /// The owner has closed it.
    End,
}

#[derive(Debug)]
pub(super) enum RankLink {
    Socket(SocketLink),
    Memory { end: RankEnd, out: Vec<FromRank> },
}

#[derive(Debug)]
pub(super) struct SocketLink {
    socket: UnixStream,
    frames: FrameReader,
    out: Vec<u8>,
    scratch: Box<[u8]>,
}

impl RankLink {
    /// Reaches an owner's socket.
    pub(super) fn connect(owner: &Path, timeout: Duration) -> std::io::Result<Self> {
        let socket = reach(owner, timeout)?;
        socket.set_nonblocking(true)?;
        let (frames, out, scratch) = (FrameReader::default(), Vec::new(), vec![0; READ].into());
        Ok(Self::Socket(SocketLink { socket, frames, out, scratch }))
    }

    /// Says something with the next [`flush`](Self::flush).
    pub(super) fn send(&mut self, message: FromRank) -> Result<(), WorkerError> {
        match self {
            Self::Socket(link) => link.out.extend(encode_from_rank(&message)?),
            Self::Memory { out, .. } => out.push(message),
        }
        Ok(())
    }

    /// Hands over what was said, as far as it is taken.
    pub(super) fn flush(&mut self) -> Result<Go, WorkerError> {
        match self {
            Self::Socket(link) => link.write(),
            Self::Memory { end, out } => {
                if out.is_empty() || !end.is_open() || end.send(take_list(out)) {
                    Ok(Go::On)
                } else {
                    Ok(Go::End)
                }
            }
        }
    }

    /// What the owner has said, once [`poll_fd`](Self::poll_fd) is ready. Where that is nothing, and it was asked `to_sleep`, the
    /// link wakes from now on.
    pub(super) fn receive(&mut self, ready: bool, into: &mut Vec<ToRank>) -> Result<Go, WorkerError> {
        match self {
            Self::Socket(link) if ready => link.read(into),
            Self::Socket(_) => Ok(Go::On),
            Self::Memory { end, .. } => {
                if ready {
                    end.woken();
                }
                match end.take(into) {
                    Found::Orders | Found::Nothing => Ok(Go::On),
                    Found::End => Ok(Go::End),
                }
            }
        }
    }

    /// What to poll, and for what.
    pub(super) fn poll_fd(&self) -> (BorrowedFd<'_>, PollFlags) {
        match self {
            Self::Socket(link) if link.out.is_empty() => (link.socket.as_fd(), PollFlags::IN),
            Self::Socket(link) => (link.socket.as_fd(), PollFlags::IN | PollFlags::OUT),
            Self::Memory { end, .. } => (end.wake_fd(), PollFlags::IN),
        }
    }
}

impl SocketLink {
    fn write(&mut self) -> Result<Go, WorkerError> {
        let mut done = 0;
        while done < self.out.len() {
            match self.socket.write(&self.out[done..]) {
                Ok(0) => return Ok(Go::End),
                Ok(n) => done += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return ended(error),
            }
        }
        self.out.drain(..done);
        if self.out.len() > OUTBOX { Err(WorkerError::OwnerStuck { waiting: self.out.len() }) } else { Ok(Go::On) }
    }

    fn read(&mut self, into: &mut Vec<ToRank>) -> Result<Go, WorkerError> {
        // A bound, so that a chatty owner doesn't keep the transport waiting.
        for _ in 0..16 {
            match self.socket.read(&mut self.scratch) {
                Ok(0) => return Ok(Go::End),
                Ok(n) => self.frames.extend(&self.scratch[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return ended(error),
            }
            while let Some(frame) = self.frames.next_frame().map_err(WireError::from)? {
                into.push(decode_to_rank(&frame)?);
            }
        }
        Ok(Go::On)
    }
}

/// Connects to a socket that may not be there yet.
fn reach(path: &Path, timeout: Duration) -> std::io::Result<UnixStream> {
    let clock = Clock::start();
    loop {
        match UnixStream::connect(path) {
            Ok(link) => return Ok(link),
            Err(error) => {
                let may_come = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
                if !may_come || clock.now() >= timeout {
                    return Err(error);
                }
            }
        }
        std::thread::sleep(RETRY);
    }
}

/// A broken link is an end like any other when the owner has just closed it.
fn ended(error: std::io::Error) -> Result<Go, WorkerError> {
    match error.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Ok(Go::End),
        _ => Err(WorkerError::Link(error)),
    }
}
