//! One rank: a thread (or the process's own) that joins its owner and drives a [`RankSession`].
//!
//! It needs no async runtime: it sleeps in one `poll` on its link to the owner, the transport's wake source, the end of
//! permutations and the request to stop, and uses no CPU while idle. The link is a Unix socket, or a queue where the owner is in
//! the same process.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::staged::CostModel;
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_memory::{BufferError, BufferOptions, SharedBuffer};
use kvferry_proto::names::{EngineId, Epoch};
use kvferry_proto::wire::WireError;
use kvferry_session::pairing::Pairings;
use kvferry_session::rank::{Admission, AdmissionRefused, RankIdentity};
use kvferry_session::{CacheError, LaneReport, LocalCache, RankSession, StagingConfig, StagingRefused, Way};
use kvferry_transport::preflight::Policy;
use kvferry_transport::{Region, Transport};

use crate::config::WorkerOptions;
use crate::memory::RankPort;
use crate::permuter::Permuter;

mod link;
mod ready;
mod run;

use link::RankLink;
pub use ready::ReadyPort;
use ready::ready_port;
use run::Loop;

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
    /// The rank can't read as it is told to.
    #[error(transparent)]
    Admission(#[from] AdmissionRefused),
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
    owner: OwnerAt,
    manifest: RankManifest,
    memory: Vec<Region>,
    transport: Box<dyn Transport>,
    connect: Duration,
    staging: StagingOptions,
    policy: Policy,
    admission: Admission,
}

/// Where the owner is.
#[derive(Debug)]
enum OwnerAt {
    Socket(PathBuf),
    Here(RankPort),
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
        write!(f, "WorkerBuilder({} rank {} at {:?})", self.engine, self.rank, self.owner)
    }
}

impl WorkerBuilder {
    /// All that a configuration says of workers, [`EngineConfig::worker`](crate::config::EngineConfig::worker), instead of what was
    /// set before.
    #[must_use]
    pub fn options(mut self, options: &WorkerOptions) -> Self {
        self.connect = options.connect_timeout;
        self.staging = options.staging;
        self.policy = options.lanes.clone();
        self.admission = options.admission;
        self
    }

    /// How long the owner's socket may take to appear. Default 30 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect = timeout;
        self
    }

    /// Joins an owner of this process by its [`rank_port`](crate::Owner::rank_port) instead of its socket: messages are moved, not
    /// encoded.
    #[must_use]
    pub fn in_process(mut self, port: RankPort) -> Self {
        self.owner = OwnerAt::Here(port);
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

    /// How much the rank reads at a time, over all and from one peer, and into what slices a long read is cut.
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
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
        let (link, pairings) = match self.owner {
            OwnerAt::Socket(path) => {
                let link = RankLink::connect(&path, self.connect);
                (link.map_err(|error| WorkerError::Connect { path, error })?, Pairings::default())
            }
            OwnerAt::Here(port) => {
                let end = port.join().map_err(system("a link to the owner"))?;
                (RankLink::Memory { end, out: Vec::new() }, port.pairings())
            }
        };
        let (port, readies) = ready_port().map_err(system("a pair of sockets"))?;
        let who = RankIdentity { engine: self.engine, rank: self.rank, epoch: Epoch::new(epoch) };
        let session = RankSession::new(who, self.transport, cache).with_staging(StagingConfig { cost, way })?;
        let session = session.with_lanes(self.policy)?.with_admission(self.admission)?.with_pairings(pairings);
        let permuter = Permuter::new(self.rank, threads).map_err(system("a pair of sockets"))?;
        let lanes = LaneBoard::default();
        let board = (lanes.clone(), 0);
        let loop_ = Loop { rank: self.rank, session, link, readies, permuter, board };
        Ok(Worker { rank: self.rank, loop_, port, lanes })
    }

    /// Connects, then runs on a thread of its own.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), or if there is no thread to be had.
    pub fn spawn(self) -> Result<WorkerHandle, WorkerError> {
        let Worker { rank, loop_, port, lanes } = self.connect()?;
        let thread = std::thread::Builder::new()
            .name(format!("kvferry-rank-{rank}"))
            .spawn(move || loop_.run())
            .map_err(|error| WorkerError::System { what: "a thread", error })?;
        Ok(WorkerHandle { rank, thread: Some(thread), port, lanes })
    }
}

/// One rank, connected to its owner and ready to run in the calling thread.
#[derive(Debug)]
pub struct Worker {
    rank: RankId,
    loop_: Loop,
    port: ReadyPort,
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
        let (owner, connect) = (OwnerAt::Socket(owner.into()), Duration::from_secs(30));
        let staging = StagingOptions::default();
        let policy = Policy::default();
        let admission = Admission::default();
        WorkerBuilder { engine, rank, owner, manifest, memory, transport, connect, staging, policy, admission }
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

    /// Where the rank says which of its bytes are final, while it still computes others.
    #[must_use]
    pub fn ready_port(&self) -> ReadyPort {
        self.port.clone()
    }

    /// Serves until the owner closes the link, which is the usual end.
    ///
    /// # Errors
    /// If the owner refuses the rank, or the link breaks.
    pub fn run(self) -> Result<(), WorkerError> {
        let result = self.loop_.run();
        // Kept until here, so that its end is not seen as a request to stop.
        drop(self.port);
        result
    }
}

/// A worker on a thread of its own. Dropping it stops it and waits for it.
#[derive(Debug)]
pub struct WorkerHandle {
    rank: RankId,
    thread: Option<JoinHandle<Result<(), WorkerError>>>,
    port: ReadyPort,
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

    /// Where the rank says which of its bytes are final, while it still computes others.
    #[must_use]
    pub fn ready_port(&self) -> ReadyPort {
        self.port.clone()
    }

    /// Asks it to stop, whatever it is doing: its transport is dropped, its link closed.
    pub fn stop(&self) {
        self.port.stop();
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
