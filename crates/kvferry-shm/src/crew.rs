//! The copy threads. They sleep on a condition variable while there is nothing to move, and ring an eventfd when an
//! operation has ended.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvferry_transport::OpId;
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::board::{Board, Slot};
use crate::job::{End, Job};

/// The copy threads of one endpoint. Started with the first job; joined when dropped, after every share that is under
/// way has ended.
#[derive(Debug)]
pub(crate) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    size: usize,
}

struct Shared {
    queue: Mutex<Queue>,
    bell: Condvar,
    ended: Mutex<Vec<(OpId, End)>>,
    wake: OwnedFd,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<(Arc<Job>, Range<u64>)>,
    closed: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({} shares wait)", lock(&self.queue).tasks.len())
    }
}

impl Crew {
    pub(crate) fn new(size: usize) -> Result<Self, Errno> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Shared { queue: Mutex::default(), bell: Condvar::new(), ended: Mutex::default(), wake };
        Ok(Self { shared: Arc::new(shared), threads: Vec::new(), size })
    }

    /// How many threads there are, or will be.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Readable while ended jobs wait.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Starts the threads if they don't run yet.
    pub(crate) fn start(&mut self, board: &Board) -> std::io::Result<()> {
        for index in self.threads.len()..self.size {
            let (shared, slot) = (self.shared.clone(), board.slot(index));
            let thread = std::thread::Builder::new().name(format!("kvferry-shm-{index}"));
            self.threads.push(thread.spawn(move || work(&shared, &slot))?);
        }
        Ok(())
    }

    /// Queues a job's shares.
    pub(crate) fn add(&self, job: &Arc<Job>, shares: Vec<Range<u64>>) {
        let count = shares.len();
        lock(&self.shared.queue).tasks.extend(shares.into_iter().map(|s| (job.clone(), s)));
        if count == 1 { self.shared.bell.notify_one() } else { self.shared.bell.notify_all() }
    }

    /// Jobs that ended since the last call.
    pub(crate) fn take_ended(&self) -> Vec<(OpId, End)> {
        let mut count = [0u8; 8];
        // Before the list is taken: a job that ends in between rings again. Nothing to read is fine as well.
        rustix::io::read(&self.shared.wake, &mut count).unwrap_or(0);
        std::mem::take(&mut *lock(&self.shared.ended))
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.closed = true;
        queue.tasks.clear();
        drop(queue);
        self.shared.bell.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of a copy thread has nobody to be told to any more.
            thread.join().unwrap_or(());
        }
    }
}

fn work(shared: &Shared, slot: &Slot) {
    loop {
        let mut queue = lock(&shared.queue);
        let (job, share) = loop {
            if queue.closed {
                return;
            }
            if let Some(task) = queue.tasks.pop_front() {
                break task;
            }
            queue = shared.bell.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        let op = job.op();
        if let Some(end) = job.run(share, slot) {
            // The job's hold on mappings and owners ends before its end is told.
            drop(job);
            lock(&shared.ended).push((op, end));
            // Fails only when the counter is full, and then it is readable anyway.
            rustix::io::write(&shared.wake, &1u64.to_ne_bytes()).unwrap_or(0);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the locks guard is consistent between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
