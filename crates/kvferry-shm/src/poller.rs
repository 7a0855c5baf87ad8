//! One epoll descriptor for everything that an endpoint waits for. It is itself the descriptor that drivers poll.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvferry_transport::PeerId;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

/// Events of one look.
pub(crate) const LOOK: usize = 64;

/// What became ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// The listening socket.
    Listener,
    /// A job has ended.
    Crew,
    /// The socket of a connection that we made.
    Link(PeerId),
    /// The process at its other end has ended.
    Process(PeerId),
    /// The socket of a connection that was made to us.
    Guest(u64),
}

const SHIFT: u32 = 56;

impl Source {
    fn encode(self) -> u64 {
        let (kind, value) = match self {
            Self::Listener => (0, 0),
            Self::Crew => (1, 0),
            Self::Link(peer) => (2, peer.get()),
            Self::Process(peer) => (3, peer.get()),
            Self::Guest(key) => (4, key),
        };
        (kind << SHIFT) | value
    }

    fn decode(raw: u64) -> Self {
        let value = raw & ((1 << SHIFT) - 1);
        match raw >> SHIFT {
            0 => Self::Listener,
            1 => Self::Crew,
            2 => Self::Link(PeerId::new(value)),
            3 => Self::Process(PeerId::new(value)),
            _ => Self::Guest(value),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    pub(crate) fn add(&self, fd: impl AsFd, source: Source) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(source.encode()), EventFlags::IN | EventFlags::RDHUP)
    }

    /// Waits for room to send as well, or instead of input, or no longer.
    pub(crate) fn want(&self, fd: impl AsFd, source: Source, input: bool, output: bool) -> Result<(), Errno> {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN | EventFlags::RDHUP, input);
        flags.set(EventFlags::OUT, output);
        epoll::modify(&self.epoll, fd, EventData::new_u64(source.encode()), flags)
    }

    pub(crate) fn remove(&self, fd: impl AsFd) {
        // Fails only for what is not there.
        epoll::delete(&self.epoll, fd).unwrap_or(());
    }

    /// What is ready now, at most [`LOOK`] of it.
    pub(crate) fn look(&self) -> Vec<Source> {
        let mut events = Vec::with_capacity(LOOK);
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&zero)) {
            Ok(_) => events.iter().map(|e: &epoll::Event| Source::decode({ e.data }.u64())).collect(),
            Err(_) => Vec::new(),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_round_trip() {
        let peer = PeerId::new(77);
        for source in [Source::Listener, Source::Crew, Source::Link(peer), Source::Process(peer), Source::Guest(9)] {
            assert_eq!(Source::decode(source.encode()), source);
        }
    }
}
