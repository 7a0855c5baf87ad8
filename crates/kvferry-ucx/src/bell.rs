//! A counter of the kernel that a thread sleeps on and another one rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    pub(crate) fn ring(&self) {
        // Fails only if it rang 2^64 - 2 times unheard, and is readable then.
        let _: rustix::io::Result<usize> = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        // Fails only if it doesn't ring.
        let _: rustix::io::Result<usize> = rustix::io::read(&self.0, &mut [0u8; 8]);
    }

    /// Whether it rings, after at most this long; `None`: no limit.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        // Interrupted by a signal, it didn't ring as far as we know.
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout.as_ref()).is_ok_and(|n| n > 0)
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
