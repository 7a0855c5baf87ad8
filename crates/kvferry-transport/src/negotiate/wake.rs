//! One descriptor that is readable while any of several is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

#[derive(Debug)]
pub(super) struct Wake {
    epoll: OwnedFd,
}

impl Wake {
    /// The sources must outlive it; level triggered, as they are.
    pub(super) fn new<'a>(sources: impl Iterator<Item = BorrowedFd<'a>>) -> Result<Self, Errno> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (index, source) in (0..).zip(sources) {
            epoll::add(&epoll, source, EventData::new_u64(index), EventFlags::IN)?;
        }
        Ok(Self { epoll })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Blocks until a source is readable (true) or the time is over.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> bool {
        // A wait is in real time: that of the contract's clock is the driver's business.
        let until = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut left = timeout;
        loop {
            let spec = left.and_then(|t| Timespec::try_from(t).ok());
            match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], spec.as_ref()) {
                Ok(ready) => return ready > 0,
                // A signal: for what is left.
                Err(Errno::INTR) => left = until.map(|at| at.saturating_duration_since(Instant::now())).or(left),
                // Nothing that waiting could cure; the driver steps and looks.
                Err(_) => return true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn readable_while_any_is() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let (mut c, d) = UnixStream::pair().unwrap();
        let wake = Wake::new([b.as_fd(), d.as_fd()].into_iter()).unwrap();
        assert!(!wake.wait(Some(Duration::ZERO)));
        assert!(!wake.wait(Some(Duration::from_millis(1))));
        a.write_all(&[1]).unwrap();
        assert!(wake.wait(None) && wake.wait(Some(Duration::MAX)), "level");
        c.write_all(&[1]).unwrap();
        (&b).read_exact(&mut [0]).unwrap();
        assert!(wake.wait(Some(Duration::ZERO)), "the other");
        (&d).read_exact(&mut [0]).unwrap();
        assert!(!wake.wait(Some(Duration::ZERO)));
    }
}
