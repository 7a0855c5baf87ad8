//! What the endpoint and its agent's thread share: commands one way, what happened the other way, and the registrations.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::RegionId;
use kvferry_transport::access::Keeper;
use kvferry_transport::table::RegionTable;
use kvferry_transport::{EndpointId, Event, Lane, OpId, OpKind, PeerId, Region};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::lane::Place;
use crate::process::Watch;
use crate::sys::Fail;

/// One of our regions that an operation names.
#[derive(Clone, Debug)]
pub(crate) struct Ours {
    pub(crate) id: RegionId,
    /// Keeps the memory and its registration alive.
    pub(crate) region: Region,
    pub(crate) serial: u64,
}

/// An operation that was admitted.
#[derive(Debug)]
pub(crate) struct NewOp {
    pub(crate) op: OpId,
    pub(crate) peer: PeerId,
    pub(crate) kind: OpKind,
    pub(crate) batch: Arc<BoundedBatch>,
    pub(crate) notify: Option<Vec<u8>>,
    /// Of ours, ascending.
    pub(crate) ours: Vec<Ours>,
    /// Of the peer, ascending.
    pub(crate) theirs: Vec<RegionId>,
}

/// A connection that was validated.
#[derive(Debug)]
pub(crate) struct NewPeer {
    pub(crate) peer: PeerId,
    pub(crate) endpoint: EndpointId,
    pub(crate) generation: u64,
    pub(crate) watch: Watch,
    pub(crate) metadata: Vec<u8>,
    /// The peer's regions, ascending.
    pub(crate) places: Vec<(RegionId, Place)>,
}

/// What the thread is told.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(NewOp),
    Cancel(OpId),
    Connect(NewPeer),
    Disconnect(PeerId),
    Register {
        region: Region,
        serial: u64,
        reply: SyncSender<Result<(), Fail>>,
    },
    /// Nothing uses the registration any more.
    Deregister(u64),
    /// Asks for NIXL's metadata of the agent and its memory.
    Metadata(SyncSender<Result<Vec<u8>, Fail>>),
    /// Answered when all before it is done.
    Barrier(SyncSender<()>),
    /// The endpoint ends; answered when nothing of its memory is touched any more.
    Stop(SyncSender<()>),
}

/// What the thread tells.
#[derive(Debug)]
pub(crate) enum Told {
    Event(Event),
    /// A connection is up, over this lane.
    Up(PeerId, Lane),
}

/// Totals over the life of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Telemetry {
    /// Requests that NIXL has done.
    pub requests: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Descriptors of them.
    pub descriptors: u64,
    /// Time that NIXL took to post them. Zero unless [`NixlConfig::telemetry`](crate::NixlConfig::telemetry) is set.
    pub posting: Duration,
    /// Time from posting to the end, added up over requests that may have run side by side. Zero as above.
    pub moving: Duration,
    /// Notifications that were not ours: of agents that are no kvferry endpoints, or broken.
    pub foreign: u64,
}

/// Our registrations, and who works on them.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    pub(crate) table: RegionTable,
    pub(crate) keeper: Keeper,
    /// The number of each registration, by region.
    pub(crate) serials: BTreeMap<RegionId, u64>,
}

/// What both hold.
#[derive(Debug)]
pub(crate) struct Shared {
    commands: Mutex<VecDeque<Command>>,
    /// Wakes the thread.
    bell: OwnedFd,
    /// The thread sleeps, or is about to.
    sleeping: AtomicBool,
    told: Mutex<Outbox>,
    /// Readable while something was told.
    wake: OwnedFd,
    registry: Mutex<Registry>,
    telemetry: Mutex<Telemetry>,
}

#[derive(Debug, Default)]
struct Outbox {
    told: VecDeque<Told>,
    /// Notifications among them.
    notices: usize,
}

/// Locks, whatever a thread that panicked has left: every holder leaves what it guards whole at each step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            commands: Mutex::default(),
            bell: eventfd(0, flags)?,
            sleeping: AtomicBool::new(false),
            told: Mutex::default(),
            wake: eventfd(0, flags)?,
            registry: Mutex::default(),
            telemetry: Mutex::default(),
        })
    }

    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        lock(&self.registry)
    }

    pub(crate) fn telemetry(&self) -> MutexGuard<'_, Telemetry> {
        lock(&self.telemetry)
    }

    /// Gives the thread something to do. Operations are bounded by the endpoint; everything else it waits for.
    pub(crate) fn command(&self, command: Command) {
        lock(&self.commands).push_back(command);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            ring(&self.bell);
        }
    }

    /// The thread's next command.
    pub(crate) fn next_command(&self) -> Option<Command> {
        lock(&self.commands).pop_front()
    }

    /// The thread sleeps until it is given something to do, one of `fds` is readable, or the time is over.
    pub(crate) fn sleep<'a>(&'a self, fds: &mut Vec<PollFd<'a>>, limit: Duration) {
        self.sleeping.store(true, Ordering::SeqCst);
        let mut rung = false;
        if lock(&self.commands).is_empty() {
            fds.push(PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN));
            // An interruption is as good as the end of the time.
            let _ = poll(fds, Some(&timespec(limit)));
            rung = fds.last().is_some_and(|fd| !fd.revents().is_empty());
        }
        // Whoever took the flag may ring only after we woke by something else: such a ring is heard by the next sleep, which
        // silences it although nobody took its flag.
        if !self.sleeping.swap(false, Ordering::SeqCst) || rung {
            silence(&self.bell);
        }
    }

    /// Tells the endpoint something.
    pub(crate) fn tell(&self, told: Told) {
        let mut outbox = lock(&self.told);
        outbox.notices += usize::from(matches!(told, Told::Event(Event::Notification { .. })));
        outbox.told.push_back(told);
        if outbox.told.len() == 1 {
            ring(&self.wake);
        }
    }

    /// Notifications that the endpoint has not taken.
    pub(crate) fn untaken(&self) -> usize {
        lock(&self.told).notices
    }

    /// All that was told since the last time.
    pub(crate) fn take(&self) -> VecDeque<Told> {
        let mut outbox = lock(&self.told);
        if outbox.told.is_empty() {
            return VecDeque::new();
        }
        outbox.notices = 0;
        silence(&self.wake);
        std::mem::take(&mut outbox.told)
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Blocks until something was told; false if the time was over before.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        loop {
            match poll(&mut fds, timeout.map(timespec).as_ref()) {
                Ok(ready) => return ready > 0,
                // Returning early is allowed, as a spurious wake.
                Err(Errno::INTR) if timeout.is_none() => {}
                Err(_) => return true,
            }
        }
    }
}

/// A registration with NIXL, owned by the region that stands for it; see `wrap`.
struct Registration {
    /// What the caller registered.
    region: Region,
    serial: u64,
    /// Not to own it: the registry in it holds regions that own this.
    shared: Weak<Shared>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Without it the thread has ended, and with it the agent and all its registrations.
        if let Some(shared) = self.shared.upgrade() {
            shared.command(Command::Deregister(self.serial));
        }
    }
}

/// A region of the same bytes, whose clones keep NIXL's registration alive as well as the memory: the last of them tells the thread to
/// end it. So a registration outlives every operation, ours or a peer's, that holds a clone.
pub(crate) fn wrap(region: Region, serial: u64, shared: &Arc<Shared>) -> Option<Region> {
    let start = std::ptr::NonNull::new(region.as_ptr())?;
    let len = usize::try_from(region.len().get()).ok()?;
    let kind = region.kind();
    let owner = Arc::new(Registration { region, serial, shared: Arc::downgrade(shared) });
    // SAFETY: the same bytes as `region`, which the owner holds, so all that was promised of it at its making still is.
    Some(unsafe { Region::from_raw(start, len, kind, owner) })
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration")
            .field("region", &self.region)
            .field("serial", &self.serial)
            .finish_non_exhaustive()
    }
}

fn ring(fd: &OwnedFd) {
    // It can only fail if the counter is near its end, and then it is readable.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

fn silence(fd: &OwnedFd) {
    // It can only fail if it is not readable.
    let _ = rustix::io::read(fd, &mut [0u8; 8]);
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(time.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_late_ring_wakes_one_sleep_only() {
        let shared = Shared::new().unwrap();
        ring(&shared.bell);
        shared.sleep(&mut Vec::new(), Duration::from_secs(5));
        let start = Instant::now();
        shared.sleep(&mut Vec::new(), Duration::from_millis(50));
        assert!(start.elapsed() >= Duration::from_millis(50), "{:?}", start.elapsed());
    }
}
