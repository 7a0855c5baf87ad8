//! A whole engine in one process: its owner and a thread for each of its ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use kvferry_geometry::manifest::{CacheGroup, RankManifest};
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::RankId;
use kvferry_proto::names::EngineId;
use kvferry_session::Admission;
use kvferry_transport::preflight::Policy;
use kvferry_transport::{Region, Transport};

use crate::config::{EngineConfig, WorkerOptions};
use crate::owner::options::{Options, setters};
use crate::owner::{self, Owner, ReadyError, StartError};
use crate::worker::{LaneBoard, ReadyPort, StagingOptions, Worker, WorkerError, WorkerHandle};

/// An engine could not be started. Nothing is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Its owner could not be started.
    #[error(transparent)]
    Owner(#[from] StartError),
    /// A rank could not be started, or has ended.
    #[error("rank {rank}: {error}")]
    Rank {
        /// Which.
        rank: RankId,
        /// Why.
        #[source]
        error: WorkerError,
    },
    /// Its ranks do not make an engine.
    #[error(transparent)]
    Ready(#[from] ReadyError),
    /// The engine has no such rank.
    #[error("the engine has no rank {rank}: it was started with ranks 0 to {last}")]
    NoSuchRank {
        /// Which.
        rank: RankId,
        /// The last one that it has.
        last: RankId,
    },
}

/// One rank as it was given.
struct Rank {
    manifest: RankManifest,
    memory: Vec<Region>,
    transport: Box<dyn Transport>,
}

/// Prepares an engine; see [`Engine::builder`].
pub struct EngineBuilder {
    options: Options,
    ranks: Vec<Rank>,
    ready: Duration,
}

impl EngineBuilder {
    setters!();

    /// Adds the next rank, from rank 0 on: what it holds and where, the memory of its layout's regions in order, and a transport
    /// without other registrations.
    #[must_use]
    pub fn rank(mut self, manifest: RankManifest, memory: Vec<Region>, transport: Box<dyn Transport>) -> Self {
        self.ranks.push(Rank { manifest, memory, transport });
        self
    }

    /// Lets all ranks stage what they read; see [`WorkerBuilder::staging`](crate::WorkerBuilder::staging).
    #[must_use]
    pub fn staging(mut self, options: StagingOptions) -> Self {
        self.options.config.worker.staging = options;
        self
    }

    /// Refuses lanes that are not what a policy says; see [`WorkerBuilder::lanes`](crate::WorkerBuilder::lanes).
    #[must_use]
    pub fn lanes(mut self, policy: Policy) -> Self {
        self.options.config.worker.lanes = policy;
        self
    }

    /// How much each rank reads at a time; see [`WorkerBuilder::admission`](crate::WorkerBuilder::admission).
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.options.config.worker.admission = admission;
        self
    }

    /// How long all ranks may take to join. Default 30 s; a rank that doesn't make it fails the start.
    #[must_use]
    pub fn ready_timeout(mut self, timeout: Duration) -> Self {
        self.ready = timeout;
        self
    }

    /// Starts the owner on the current tokio runtime and a thread for each rank, and waits until all have joined.
    ///
    /// # Errors
    /// If any of that fails; nothing is left running then.
    pub async fn start(self) -> Result<Engine, EngineError> {
        let count = u32::try_from(self.ranks.len()).unwrap_or(u32::MAX);
        let options = self.options.config.worker.clone();
        let owner = owner::start(self.options, count, false).await?;
        let mut engine = Engine { owner, ranks: BTreeMap::new(), options, ready: self.ready };
        for (id, rank) in (0..).map(RankId::new).zip(self.ranks) {
            if let Err(error) = engine.spawn(id, rank).await {
                engine.shutdown().await;
                return Err(error);
            }
        }
        match engine.owner.ready(engine.ready).await {
            Ok(_) => Ok(engine),
            Err(error) => {
                engine.shutdown().await;
                Err(error.into())
            }
        }
    }
}

impl fmt::Debug for EngineBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineBuilder({}, {} ranks)", self.options.config.id, self.ranks.len())
    }
}

/// An engine whose ranks are threads of this process. It offers and pulls as its [`Owner`] does, to which it dereferences; its
/// ranks are linked to it without a socket, and nothing that passes between them is encoded.
///
/// Dropping it shuts it down and waits for its threads; [`shutdown`](Self::shutdown) does so without blocking the runtime.
#[derive(Debug)]
pub struct Engine {
    owner: Owner,
    /// Each with its thread, if that was not ended for a new one.
    ranks: BTreeMap<RankId, (RankManifest, Option<WorkerHandle>)>,
    options: WorkerOptions,
    ready: Duration,
}

impl Engine {
    /// Prepares an engine that caches `spec`'s items in `groups`. Give it its [ranks](EngineBuilder::rank). Every data-parallel replica
    /// with blocks of its own is an engine of its own, with an id of its own.
    #[must_use]
    pub fn builder(engine: EngineId, spec: ModelSpec, groups: Vec<CacheGroup>) -> EngineBuilder {
        Self::from_config(EngineConfig::new(engine), spec, groups)
    }

    /// As [`builder`](Self::builder), with all that a configuration says.
    #[must_use]
    pub fn from_config(config: EngineConfig, spec: ModelSpec, groups: Vec<CacheGroup>) -> EngineBuilder {
        let options = Options::new(config, spec, groups);
        EngineBuilder { options, ranks: Vec::new(), ready: Duration::from_secs(30) }
    }

    /// Its owner.
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Where the lanes of a rank can be seen; `None` if there is no such rank.
    #[must_use]
    pub fn lanes(&self, rank: RankId) -> Option<LaneBoard> {
        self.ranks.get(&rank)?.1.as_ref().map(WorkerHandle::lanes)
    }

    /// Where a rank says which of its bytes are final, while it still computes others; `None` if there is no such rank.
    #[must_use]
    pub fn ready_port(&self, rank: RankId) -> Option<ReadyPort> {
        self.ranks.get(&rank)?.1.as_ref().map(WorkerHandle::ready_port)
    }

    /// Takes the stream of events. `None` the second time.
    pub fn take_events(&mut self) -> Option<crate::OwnerEvents> {
        self.owner.take_events()
    }

    /// Ends a rank, whatever it is doing, and starts it anew: what it holds is as it was, memory and transport are fresh. Pulls that it
    /// takes part in fail, leases end, and the engine has a new [epoch](Owner::epoch) when this returns: references that it has
    /// given out are of its former life.
    ///
    /// # Errors
    /// If there is no such rank, or it can't be started; then the engine is without it, and this can be tried again.
    pub async fn restart_rank(
        &mut self,
        rank: RankId,
        memory: Vec<Region>,
        transport: Box<dyn Transport>,
    ) -> Result<(), EngineError> {
        let Some((manifest, old)) = self.ranks.get_mut(&rank) else {
            let last = RankId::new(u32::try_from(self.ranks.len()).unwrap_or(u32::MAX).saturating_sub(1));
            return Err(EngineError::NoSuchRank { rank, last });
        };
        let manifest = manifest.clone();
        if let Some(old) = old.take() {
            end(vec![old]).await;
        }
        // By the time that this is answered, the owner knows that the rank is gone.
        self.owner.quarantined().await.map_err(|_| ReadyError::Shutdown)?;
        self.spawn(rank, Rank { manifest, memory, transport }).await?;
        self.owner.ready(self.ready).await?;
        Ok(())
    }

    /// Shuts down gracefully, as [`Owner::drain`], then waits for the ranks' threads. Gives true if nothing had to be cut off.
    pub async fn drain(self, deadline: Duration) -> bool {
        let Self { owner, ranks, .. } = self;
        let drained = owner.drain(deadline).await;
        end(ranks.into_values().filter_map(|(_, handle)| handle).collect()).await;
        drained
    }

    /// Ends all requests and leases, closes all links, and waits until all ranks' threads have ended.
    pub async fn shutdown(self) {
        let Self { owner, ranks, .. } = self;
        owner.shutdown().await;
        end(ranks.into_values().filter_map(|(_, handle)| handle).collect()).await;
    }

    /// Registering memory may take a while; it doesn't hold the runtime up.
    async fn spawn(&mut self, rank: RankId, given: Rank) -> Result<(), EngineError> {
        let failed = |error| EngineError::Rank { rank, error };
        let Rank { manifest, memory, transport } = given;
        let worker = Worker::builder(self.owner.engine().clone(), rank, "", manifest.clone(), memory, transport)
            .in_process(self.owner.rank_port())
            .staging(self.options.staging)
            .lanes(self.options.lanes.clone())
            .admission(self.options.admission);
        let spawned = tokio::task::spawn_blocking(move || worker.spawn()).await;
        let handle = spawned.map_err(|_| failed(WorkerError::Panicked))?.map_err(failed)?;
        self.ranks.insert(rank, (manifest, Some(handle)));
        Ok(())
    }
}

impl Deref for Engine {
    type Target = Owner;

    fn deref(&self) -> &Owner {
        &self.owner
    }
}

/// Waits for threads beside the runtime.
async fn end(handles: Vec<WorkerHandle>) {
    let ended = tokio::task::spawn_blocking(move || {
        for handle in &handles {
            handle.stop();
        }
        drop(handles);
    });
    // It can't panic.
    drop(ended.await);
}
