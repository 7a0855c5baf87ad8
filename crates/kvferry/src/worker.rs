//! One rank: a thread (or the process's own) that joins its owner and drives a [`RankSession`].
//!
//! It needs no async runtime: it sleeps in one `poll` on the owner's socket, the transport's wake source, the end of
//! permutations and the request to stop, and uses no CPU while idle.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::staged::CostModel;
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_memory::{BufferError, BufferOptions, SharedBuffer};
use kvferry_proto::names::{EngineId, Epoch};
use kvferry_proto::wire::{FrameReader, WireError, decode_to_rank, encode_from_rank};
use kvferry_session::rank::{RankIdentity, Standing};
use kvferry_session::{CacheError, LaneReport, LocalCache, RankSession, StagingConfig, StagingRefused, Way};
use kvferry_transport::preflight::Policy;
use kvferry_transport::{Region, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::driver::Clock;
use crate::permuter::Permuter;

/// Between two attempts to reach the owner's socket.
const RETRY: Duration = Duration::from_millis(20);
/// Bytes that wait for the owner, at most: an owner that takes nothing is as good as gone.
const OUTBOX: usize = 64 << 20;

/// A worker ended otherwise than by request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The memory is not what the layout says, or can't be registered.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The rank can't stage as it is told to.
    #[error(transparent)]
    Staging(#[from] StagingRefused),
    /// There is no staging memory to be had.
    #[error("staging memory: {0}")]
    Memory(#[from] BufferError),
    /// The owner's socket can't be reached.
    #[error("the owner's socket {path} cannot be reached: {error}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The owner does not take the rank in, or has thrown it out.
    #[error("the owner refused rank {rank}: {reason}")]
    Refused {
        /// The rank.
        rank: RankId,
        /// Why.
        reason: String,
    },
    /// The owner's bytes make no sense, or ours are too long.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The link to the owner broke.
    #[error("the link to the owner broke: {0}")]
    Link(std::io::Error),
    /// The owner takes nothing any more.
    #[error("the owner has taken nothing while {waiting} bytes wait for it")]
    OwnerStuck {
        /// How many wait.
        waiting: usize,
    },
    /// The system refused a resource.
    #[error("the system refused {what}: {error}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// The worker's thread panicked.
    #[error("the worker's thread panicked")]
    Panicked,
}

/// Prepares a worker; see [`Worker::builder`].
pub struct WorkerBuilder {
    engine: EngineId,
    rank: RankId,
    owner: PathBuf,
    manifest: RankManifest,
    memory: Vec<Region>,
    transport: Box<dyn Transport>,
    connect: Duration,
    staging: StagingOptions,
    policy: Policy,
}

/// How a worker stages what its rank reads, and what others read from it; see [`WorkerBuilder::staging`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagingOptions {
    /// Bytes of staging memory that the worker makes and registers: for what the rank reads, and to gather what other engines'
    /// ranks read from it. 0: there is none, and reads are staged at their source at most.
    pub pool: Bytes,
    /// Which reads are staged: those for which it is cheaper, by default.
    pub way: Way,
    /// What the ways cost. `None`, by default: what the transport says that they cost over it. What was measured on a lane makes
    /// the times truer, but changes no choice: the bytes cross it either way.
    pub cost: Option<CostModel>,
    /// Threads that permute what was staged into place, or gather, at least one. By default half of the processors that there are, 4 at most.
    pub threads: usize,
}

impl Default for StagingOptions {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { pool: Bytes::ZERO, way: Way::Auto, cost: None, threads: (processors / 2).clamp(1, 4) }
    }
}

impl std::fmt::Debug for WorkerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WorkerBuilder({} rank {} at {})", self.engine, self.rank, self.owner.display())
    }
}

impl WorkerBuilder {
    /// How long the owner's socket may take to appear. Default 30 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect = timeout;
        self
    }

    /// Lets reads be staged: few large moves into staging memory, then a local permutation on threads of the worker's own; or a
    /// permutation at the producer's worker, if that has staging memory, then few large moves. The default has no memory for it.
    #[must_use]
    pub fn staging(mut self, options: StagingOptions) -> Self {
        self.staging = options;
        self
    }

    /// Refuses lanes to other engines' ranks that are not what a policy says: a pull that needs one fails with the reason, before
    /// anything has moved. Where the policy asks for a least rate, each lane is measured when it is made, up to three times, of which
    /// the best counts. A refused lane stays refused as long as its connection stands. The default allows every lane.
    #[must_use]
    pub fn lanes(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Registers the memory and connects to the owner.
    ///
    /// # Errors
    /// If the memory doesn't fit or can't be registered, or the owner's socket can't be reached in time, or the rank can't stage
    /// as it should.
    pub fn connect(mut self) -> Result<Worker, WorkerError> {
        let system = |what| move |error: std::io::Error| WorkerError::System { what, error };
        let epoch = crate::owner::random()
            .map_err(|e| WorkerError::System { what: "random numbers", error: std::io::Error::other(e) })?;
        let mut cache = LocalCache::register(&mut *self.transport, self.manifest, self.memory)?;
        let StagingOptions { pool, way, cost, threads } = self.staging;
        if pool > Bytes::ZERO && way != Way::Direct {
            let name = format!("kvferry staging {}", self.rank);
            let memory = SharedBuffer::new(&name, pool, BufferOptions::default())?;
            cache = cache.with_staging(&mut *self.transport, memory.region())?;
        }
        let link = reach(&self.owner, self.connect)
            .map_err(|error| WorkerError::Connect { path: self.owner.clone(), error })?;
        link.set_nonblocking(true).map_err(system("a socket that doesn't block"))?;
        let (stop, stopped) = UnixStream::pair().map_err(system("a pair of sockets"))?;
        let who = RankIdentity { engine: self.engine, rank: self.rank, epoch: Epoch::new(epoch) };
        let session = RankSession::new(who, self.transport, cache).with_staging(StagingConfig { cost, way })?;
        let session = session.with_lanes(self.policy)?;
        let permuter = Permuter::new(self.rank, threads).map_err(system("a pair of sockets"))?;
        let (frames, out) = (FrameReader::default(), Vec::new());
        let lanes = LaneBoard::default();
        let board = (lanes.clone(), 0);
        let loop_ = Loop { rank: self.rank, session, link, stopped, frames, out, permuter, board };
        Ok(Worker { rank: self.rank, loop_, stop, lanes })
    }

    /// Connects, then runs on a thread of its own.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), or if there is no thread to be had.
    pub fn spawn(self) -> Result<WorkerHandle, WorkerError> {
        let Worker { rank, loop_, stop, lanes } = self.connect()?;
        let thread = std::thread::Builder::new()
            .name(format!("kvferry-rank-{rank}"))
            .spawn(move || loop_.run())
            .map_err(|error| WorkerError::System { what: "a thread", error })?;
        Ok(WorkerHandle { rank, thread: Some(thread), stop, lanes })
    }
}

/// One rank, connected to its owner and ready to run in the calling thread.
#[derive(Debug)]
pub struct Worker {
    rank: RankId,
    loop_: Loop,
    stop: UnixStream,
    lanes: LaneBoard,
}

/// What a worker's lanes are, for whoever wants to see it, on any thread and also after the worker's end. Cheap to clone; clones
/// show the same.
#[derive(Clone, Debug, Default)]
pub struct LaneBoard(Arc<Mutex<Vec<LaneReport>>>);

impl LaneBoard {
    /// The lanes to ranks of other engines as they stand now; of those that there were, some, the last one to each rank.
    #[must_use]
    pub fn snapshot(&self) -> Vec<LaneReport> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, lanes: Vec<LaneReport>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = lanes;
    }
}

impl Worker {
    /// Prepares rank `rank` of `engine`. `owner` is its owner's [`rank_socket`](crate::Owner::rank_socket); `manifest` says what the
    /// rank holds and where; `memory` has the layout's regions in order; the transport must have no other registrations.
    #[must_use]
    pub fn builder(
        engine: EngineId,
        rank: RankId,
        owner: impl Into<PathBuf>,
        manifest: RankManifest,
        memory: Vec<Region>,
        transport: Box<dyn Transport>,
    ) -> WorkerBuilder {
        let (owner, connect) = (owner.into(), Duration::from_secs(30));
        let staging = StagingOptions::default();
        let policy = Policy::default();
        WorkerBuilder { engine, rank, owner, manifest, memory, transport, connect, staging, policy }
    }

    /// Which rank.
    #[must_use]
    pub fn rank(&self) -> RankId {
        self.rank
    }

    /// Where its lanes can be seen.
    #[must_use]
    pub fn lanes(&self) -> LaneBoard {
        self.lanes.clone()
    }

    /// Serves until the owner closes the link, which is the usual end.
    ///
    /// # Errors
    /// If the owner refuses the rank, or the link breaks.
    pub fn run(self) -> Result<(), WorkerError> {
        let result = self.loop_.run();
        // Kept until here, so that its end is not seen as a request to stop.
        drop(self.stop);
        result
    }
}

/// A worker on a thread of its own. Dropping it stops it and waits for it.
#[derive(Debug)]
pub struct WorkerHandle {
    rank: RankId,
    thread: Option<JoinHandle<Result<(), WorkerError>>>,
    stop: UnixStream,
    lanes: LaneBoard,
}

impl WorkerHandle {
    /// Which rank.
    #[must_use]
    pub fn rank(&self) -> RankId {
        self.rank
    }

    /// Where its lanes can be seen.
    #[must_use]
    pub fn lanes(&self) -> LaneBoard {
        self.lanes.clone()
    }

    /// Asks it to stop, whatever it is doing: its transport is dropped, its link closed.
    pub fn stop(&self) {
        // Stopped already is as good.
        drop(self.stop.shutdown(std::net::Shutdown::Both));
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// How it ended, if not by request or by the owner's.
    pub fn join(mut self) -> Result<(), WorkerError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(WorkerError::Panicked),
            None => Ok(()),
        }
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop();
            // Its error was not asked for.
            drop(thread.join());
        }
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

/// Why to go on or not.
enum Go {
    On,
    /// The owner has closed the link, or we were asked to stop.
    End,
}

#[derive(Debug)]
struct Loop {
    rank: RankId,
    session: RankSession,
    link: UnixStream,
    stopped: UnixStream,
    frames: FrameReader,
    out: Vec<u8>,
    permuter: Permuter,
    /// Where the lanes are shown, and up to which change they are.
    board: (LaneBoard, u64),
}

impl Loop {
    fn run(mut self) -> Result<(), WorkerError> {
        let clock = Clock::start();
        loop {
            let next = self.session.step(clock.now());
            if self.session.lanes_revision() != self.board.1 {
                self.board.1 = self.session.lanes_revision();
                self.board.0.set(self.session.lanes());
            }
            while let Some(work) = self.session.next_work() {
                self.permuter.start(work)?;
            }
            while let Some(message) = self.session.next_message() {
                self.out.extend(encode_from_rank(&message)?);
            }
            if let Go::End = self.write()? {
                return Ok(());
            }
            if let Standing::Refused(reason) = self.session.standing() {
                return Err(WorkerError::Refused { rank: self.rank, reason: reason.clone() });
            }
            let timeout = next.map(|t| t.saturating_sub(clock.now()));
            let (readable, stopped) = self.sleep(timeout)?;
            if stopped {
                return Ok(());
            }
            while let Some(work) = self.permuter.done()? {
                self.session.work_done(work, clock.now());
            }
            if readable && let Go::End = self.read(clock)? {
                return match self.session.standing() {
                    Standing::Refused(reason) => Err(WorkerError::Refused { rank: self.rank, reason: reason.clone() }),
                    _ => Ok(()),
                };
            }
        }
    }

    /// Sleeps until something is to be done; says whether the owner has sent and whether to stop.
    fn sleep(&self, timeout: Option<Duration>) -> Result<(bool, bool), WorkerError> {
        let wanted = if self.out.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let wake = self.session.wake_fd();
        let mut fds = [
            PollFd::from_borrowed_fd(self.link.as_fd(), wanted),
            PollFd::from_borrowed_fd(self.stopped.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(wake, PollFlags::IN),
            PollFd::from_borrowed_fd(self.permuter.wake_fd(), PollFlags::IN),
        ];
        // Beyond a day it may as well look once more.
        let timeout = timeout.map(|t| t.min(Duration::from_secs(86400)));
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(WorkerError::System { what: "to wait", error: error.into() }),
        }
        let any = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok((fds[0].revents().intersects(any), fds[1].revents().intersects(any)))
    }

    fn write(&mut self) -> Result<Go, WorkerError> {
        let mut done = 0;
        while done < self.out.len() {
            match self.link.write(&self.out[done..]) {
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

    fn read(&mut self, clock: Clock) -> Result<Go, WorkerError> {
        let mut buffer = [0u8; 16 << 10];
        // A bound, so that a chatty owner doesn't keep the transport waiting.
        for _ in 0..64 {
            match self.link.read(&mut buffer) {
                Ok(0) => return Ok(Go::End),
                Ok(n) => self.frames.extend(&buffer[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return ended(error),
            }
            while let Some(frame) = self.frames.next_frame().map_err(WireError::from)? {
                self.session.handle(decode_to_rank(&frame)?, clock.now());
            }
        }
        Ok(Go::On)
    }
}

/// A broken link is an end like any other when the owner has just closed it.
fn ended(error: std::io::Error) -> Result<Go, WorkerError> {
    match error.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Ok(Go::End),
        _ => Err(WorkerError::Link(error)),
    }
}
