//! The wake source: a flag that a thread can sleep on and a poller can watch.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One byte is in the stream exactly while the flag is up.
#[derive(Debug)]
pub(super) struct Signal {
    up: Mutex<bool>,
    changed: Condvar,
    ours: UnixStream,
    theirs: UnixStream,
}

impl Signal {
    pub(super) fn new() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        Ok(Self { up: Mutex::new(false), changed: Condvar::new(), ours, theirs })
    }

    pub(super) fn raise(&self) {
        let mut up = self.lock();
        if !*up {
            *up = true;
            // Cannot block: the stream is empty while the flag is down. Were it to fail, `wait` would work, a poller not.
            (&self.theirs).write_all(&[1]).unwrap_or(());
            self.changed.notify_all();
        }
    }

    pub(super) fn clear(&self) {
        let mut up = self.lock();
        if *up {
            *up = false;
            // Nothing to read only if nothing could be written.
            (&self.ours).read_exact(&mut [0]).unwrap_or(());
        }
    }

    pub(super) fn wait(&self, timeout: Option<Duration>) -> bool {
        let up = self.lock();
        let up = match timeout {
            Some(timeout) => {
                self.changed.wait_timeout_while(up, timeout, |up| !*up).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.changed.wait_while(up, |up| !*up).unwrap_or_else(PoisonError::into_inner),
        };
        *up
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.ours.as_fd()
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.up.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
