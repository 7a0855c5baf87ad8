//! Does a rank's local permutations beside its loop: one after the other, on a thread that starts with the first and ends with
//! the rank.
//!
//! Dropping it waits for the permutation in progress, so that nothing is written after a rank has ended.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use kvferry_geometry::units::RankId;
use kvferry_session::rank::{LocalWork, WorkId};

use crate::worker::WorkerError;

pub(crate) struct Permuter {
    rank: RankId,
    threads: usize,
    /// Our end of the pair; a byte arrives with each end of a permutation.
    wake: UnixStream,
    /// The thread's end, until it has started.
    theirs: Option<UnixStream>,
    running: Option<Running>,
}

struct Running {
    orders: Option<Sender<LocalWork>>,
    ended: Receiver<WorkId>,
    /// Nothing more is to be begun.
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Permuter {
    pub(crate) fn new(rank: RankId, threads: usize) -> std::io::Result<Self> {
        let (wake, theirs) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        // A full pair wakes as well as a byte more.
        theirs.set_nonblocking(true)?;
        Ok(Self { rank, threads: threads.max(1), wake, theirs: Some(theirs), running: None })
    }

    /// Begins a permutation, after those begun before.
    pub(crate) fn start(&mut self, work: LocalWork) -> Result<(), WorkerError> {
        if self.running.is_none() {
            self.running = Some(self.spawn()?);
        }
        let orders = self.running.as_ref().and_then(|r| r.orders.as_ref());
        let sent = orders.is_some_and(|orders| orders.send(work).is_ok());
        // It takes orders for as long as we are there, unless it has panicked.
        if sent { Ok(()) } else { Err(WorkerError::Panicked) }
    }

    /// The next permutation that has ended.
    pub(crate) fn done(&mut self) -> Result<Option<WorkId>, WorkerError> {
        let Some(running) = &self.running else { return Ok(None) };
        let next = || match running.ended.try_recv() {
            Ok(work) => Ok(Some(work)),
            Err(TryRecvError::Empty) => Ok(None),
            // It ends before us only by a panic.
            Err(TryRecvError::Disconnected) => Err(WorkerError::Panicked),
        };
        if let Some(work) = next()? {
            return Ok(Some(work));
        }
        let mut bytes = [0; 64];
        loop {
            match self.wake.read(&mut bytes) {
                Ok(n) if n > 0 => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Nothing more, or the thread has ended.
                _ => break,
            }
        }
        // What ended between the two looks has been woken for.
        next()
    }

    /// Readable when a permutation has ended.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn spawn(&mut self) -> Result<Running, WorkerError> {
        let system = |error| WorkerError::System { what: "a thread", error };
        let mut wake = self.theirs.take().ok_or(WorkerError::Panicked)?;
        let (orders, inbox) = channel::<LocalWork>();
        let (tell, ended) = channel();
        let (threads, stopped) = (self.threads, Arc::new(AtomicBool::new(false)));
        let stop = stopped.clone();
        let work = move || {
            for LocalWork { id, permute } in inbox {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                permute.run(threads);
                drop(permute);
                if tell.send(id).is_err() {
                    return;
                }
                // Full: it is awake already.
                drop(wake.write(&[1]));
            }
        };
        let name = format!("kvferry-permute-{}", self.rank);
        let thread = std::thread::Builder::new().name(name).spawn(work).map_err(system)?;
        Ok(Running { orders: Some(orders), ended, stopped, thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Without orders the thread ends, and what it has not begun nobody waits for.
        self.stopped.store(true, Ordering::Relaxed);
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl std::fmt::Debug for Permuter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Permuter(rank {}, {} threads)", self.rank, self.threads)
    }
}
