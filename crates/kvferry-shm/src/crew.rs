//! The copy threads. They sleep on a condition variable while there is nothing to move, and ring an eventfd when an
//! operation has ended.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_transport::OpId;
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::board::{Board, MAX_SLOTS, Slot};
use crate::job::{End, Job, Tally};

/// How long a share that is under way is waited for when the endpoint ends.
const LAST_WAIT: Duration = Duration::from_millis(500);

/// The copy threads of one endpoint. Started with the first job; joined when dropped, after every share that is under
/// way has ended. A thread that a peer holds (its memory can be such that the kernel waits for it) is left to itself: its job
/// owns all that it uses.
#[derive(Debug)]
pub(crate) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    size: usize,
    /// Threads that are held by a job in doubt, for which others were hired.
    held: usize,
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
        Ok(Self { shared: Arc::new(shared), threads: Vec::new(), size, held: 0 })
    }

    /// How many threads there are, or will be.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Readable while ended jobs wait.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Starts the threads if they don't run yet. Fails if there is none.
    pub(crate) fn start(&mut self, board: &Board) -> std::io::Result<()> {
        for index in self.threads.len()..(self.size + self.held).min(MAX_SLOTS) {
            let (shared, slot) = (self.shared.clone(), board.slot(index));
            let thread = std::thread::Builder::new().name(format!("kvferry-shm-{index}"));
            match thread.spawn(move || work(&shared, &slot)) {
                Ok(thread) => self.threads.push(thread),
                Err(e) if self.threads.is_empty() => return Err(e),
                // Slower, and tried again with the next job.
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Queues a job's shares.
    pub(crate) fn add(&self, job: &Arc<Job>, shares: Vec<Range<u64>>) {
        let count = shares.len();
        lock(&self.shared.queue).tasks.extend(shares.into_iter().map(|s| (job.clone(), s)));
        if count == 1 { self.shared.bell.notify_one() } else { self.shared.bell.notify_all() }
    }

    /// Takes back the shares that no thread has begun; the job may end by that.
    pub(crate) fn withdraw(&self, job: &Arc<Job>) {
        let mut queue = lock(&self.shared.queue);
        let before = queue.tasks.len();
        queue.tasks.retain(|(other, _)| !Arc::ptr_eq(other, job));
        let taken = before - queue.tasks.len();
        drop(queue);
        if taken > 0 {
            self.shared.leave(job.tally(), taken);
        }
    }

    /// Hires threads in place of those that a job in doubt holds, as long as there are slots.
    pub(crate) fn replace(&mut self, held: usize, board: &Board) {
        self.held += held;
        // If none can be started now, the next job tries again.
        self.start(board).unwrap_or(());
    }

    /// Forgets the threads: in a child of a fork there are none.
    pub(crate) fn forget(&mut self) {
        self.threads.drain(..).for_each(std::mem::forget);
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
        self.finish();
    }
}

impl Crew {
    /// Ends the threads, and waits a while for them.
    pub(crate) fn finish(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        let mut queue = lock(&self.shared.queue);
        queue.closed = true;
        queue.tasks.clear();
        drop(queue);
        self.shared.bell.notify_all();
        let until = Instant::now() + LAST_WAIT;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            if thread.is_finished() {
                // A panic of a copy thread has nobody to be told to any more.
                thread.join().unwrap_or(());
            }
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
        job.run(share, slot);
        let tally = job.tally().clone();
        drop(job);
        shared.leave(&tally, 1);
    }
}

impl Shared {
    /// Counts shares of a job as ended, and tells the job's end if none is left.
    fn leave(&self, tally: &Tally, shares: usize) {
        if let Some(end) = tally.leave(shares) {
            lock(&self.ended).push((tally.op(), end));
            // Fails only when the counter is full, and then it is readable anyway.
            rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap_or(0);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the locks guard is consistent between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
