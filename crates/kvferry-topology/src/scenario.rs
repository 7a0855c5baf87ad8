//! A scenario: a cluster, the engines on it, what they have to do, and how caches go from one to another.
//!
//! `docs/simulator.md` tells of every key. A file is read by [`Scenario::from_file`]; whoever builds one in code fills in the fields.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::{CompatOptions, Compatible, Mismatches};
use kvferry_geometry::manifest::Manifest;
use kvferry_models::{DescribeError, EngineDescription};

use crate::cluster::{Cluster, ClusterErrors, Gpu};
use crate::load::{DecodeModel, DecodeSpec, EngineFigures, Load, LoadErrors, LoadSpec, PrefillModel, PrefillSpec};
use crate::sweep::SweepTable;

mod pool;
mod read;

pub use pool::{FitError, PoolFull, fit_pool};

/// Everything that a simulation is made from.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it is called.
    pub name: String,
    /// What all chance comes from.
    pub seed: u64,
    /// The machines.
    pub cluster: Arc<Cluster>,
    /// P's engines.
    pub prefill: Fleet,
    /// D's engines.
    pub decode: Fleet,
    /// How long prefills take.
    pub prefill_time: PrefillModel,
    /// How long tokens take.
    pub decode_time: DecodeModel,
    /// What `prefill_time` is made from, for engines of another shape.
    pub prefill_spec: PrefillSpec,
    /// What `decode_time` is made from.
    pub decode_spec: DecodeSpec,
    /// Where requests come from.
    pub load: LoadSpec,
    /// The folder that a trace's path is taken from.
    pub dir: PathBuf,
    /// How caches are handed over.
    pub transfer: Transfer,
    /// Who gets which request.
    pub router: Router,
    /// What breaks.
    pub failures: Vec<Failure>,
    /// The request that is shown in detail, by its place in the load; `None`: the one in the middle.
    pub gantt: Option<u64>,
    /// What a sweep varies; a simulation passes it over.
    pub sweep: Option<SweepTable>,
}

/// All engines of one kind.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// One of them.
    pub description: EngineDescription,
    /// Its cache.
    pub manifest: Arc<Manifest>,
    /// How many there are.
    pub engines: u32,
    /// Ranks of one.
    pub ranks: u32,
    /// The GPU of each rank: engine by engine, rank by rank.
    pub gpus: Vec<Gpu>,
    /// Tokens of one engine's prefix cache; `None`: no limit.
    pub prefix_tokens: Option<u64>,
    /// Bytes of each GPU that its blocks were fitted into; `None`: the description says how many blocks there are.
    pub kv_bytes: Option<u64>,
}

/// Engines that there are too few GPUs for.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "with {ranks} ranks each, from GPU {first} on, they need {wanted} GPUs, and the cluster has {all}; let it have more nodes, or have \
     fewer engines"
)]
pub struct TooFewGpus {
    /// Ranks of one engine.
    pub ranks: u32,
    /// The first GPU, of all that the cluster has.
    pub first: u64,
    /// How many are needed.
    pub wanted: u64,
    /// How many there are.
    pub all: u64,
}

impl Fleet {
    /// An engine's cache, its blocks fitted into so many bytes of each GPU; `None`: as many as the description says.
    ///
    /// # Errors
    /// All faults of the description, or that there is no room for a block.
    pub fn fitted(description: &mut EngineDescription, kv_bytes: Option<u64>) -> Result<Arc<Manifest>, FitError> {
        if let Some(bytes) = kv_bytes {
            fit_pool(description, bytes)?;
        }
        Ok(Arc::new(description.manifest()?))
    }

    /// The GPUs of so many engines of so many ranks, from the `first` on.
    ///
    /// # Errors
    /// If the cluster has too few.
    pub fn placed(engines: u32, ranks: u32, first: u64, cluster: &Cluster) -> Result<Vec<Gpu>, TooFewGpus> {
        let (all, wanted) = (u64::from(cluster.gpus()), u64::from(engines) * u64::from(ranks));
        if first.saturating_add(wanted) > all {
            return Err(TooFewGpus { ranks, first, wanted, all });
        }
        Ok((first..first + wanted).filter_map(|n| Some(cluster.gpu(u32::try_from(n).ok()?))).collect())
    }

    /// The first GPU behind these engines where `wanted` more are placed: of the next machine, if so many are left from there on, else
    /// the next one.
    #[must_use]
    pub fn after(gpus: &[Gpu], cluster: &Cluster, wanted: u64) -> u64 {
        let Some(last) = gpus.last() else { return 0 };
        let Some(node) = cluster.nodes().get(last.node as usize) else { return 0 };
        let next = node.first_gpu + node.gpus;
        let enough = u64::from(cluster.gpus().saturating_sub(next)) >= wanted;
        u64::from(if enough { next } else { node.first_gpu + last.index + 1 })
    }

    /// The GPU of a rank.
    #[must_use]
    pub fn gpu(&self, engine: u32, rank: u32) -> Option<Gpu> {
        let at = u64::from(engine) * u64::from(self.ranks) + u64::from(rank);
        self.gpus.get(usize::try_from(at).ok()?).copied().filter(|_| rank < self.ranks)
    }
}

/// Who moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Mode {
    /// D's ranks read.
    #[default]
    Pull,
    /// P's ranks write.
    Push,
}

impl Mode {
    /// As a scenario and an answer write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "push",
        }
    }
}

/// Whether bytes go while the prefill runs. Only where P writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Stream {
    /// When all is computed.
    #[default]
    None,
    /// Layers as they are done, in so many equal steps.
    Layers {
        /// How many steps.
        steps: u32,
    },
    /// Chunks of the prompt as they are done.
    Chunks {
        /// Tokens of one.
        tokens: u64,
    },
}

impl Stream {
    /// As a scenario and an answer write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Layers { .. } => "layers",
            Self::Chunks { .. } => "chunks",
        }
    }
}

/// How caches are handed over.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Transfer {
    /// Who moves the bytes.
    pub mode: Mode,
    /// Whether bytes go while the prefill runs.
    pub stream: Stream,
    /// Over how many network cards one rank's bytes are spread.
    pub rails: u32,
    /// What is in flight at a time, as an engine's own configuration has it.
    pub admission: kvferry_session::Admission,
    /// How long a handover may take.
    pub deadline: Duration,
    /// How long the router takes between P and D, beside the network.
    pub routing: Duration,
    /// How long two ranks take to connect the first time.
    pub lane: Duration,
    /// A link between owners that is not used so long is closed; `None`: never.
    pub idle: Option<Duration>,
    /// Whether a rank's bytes are read from all ranks that hold them alike.
    pub stripe: bool,
    /// Items that only one side has are let pass.
    pub compat: CompatOptions,
}

impl Default for Transfer {
    fn default() -> Self {
        Self {
            mode: Mode::Pull,
            stream: Stream::None,
            rails: 1,
            admission: kvferry_session::Admission::default(),
            deadline: Duration::from_secs(60),
            routing: Duration::from_millis(1),
            lane: Duration::from_millis(5),
            idle: None,
            stripe: false,
            compat: CompatOptions::default(),
        }
    }
}

/// How an engine is chosen for a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Choice {
    /// P: the one that will have computed it first, hits in its prefix cache counted. D: the one with the fewest tokens.
    #[default]
    LeastLoaded,
    /// One after the other.
    RoundRobin,
}

/// Who gets which request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Router {
    /// How P's engine is chosen.
    pub prefill: Choice,
    /// How D's engine is chosen.
    pub decode: Choice,
}

/// Something that breaks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// When, after the first arrival.
    pub at: Duration,
    /// What.
    pub what: Broken,
    /// For how long.
    pub lasts: Duration,
}

/// What breaks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Broken {
    /// An engine of P, with all that it has.
    Prefill(u32),
    /// An engine of D.
    Decode(u32),
    /// A link has only so many hundredths of its capacity.
    Link(String, u32),
}

/// Why there is no scenario: every fault that was found.
#[derive(Clone, PartialEq, Debug)]
pub struct ScenarioErrors(pub Vec<ScenarioError>);

impl std::fmt::Display for ScenarioErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            write!(f, "{}{error}", if i > 0 { "\n" } else { "" })?;
        }
        Ok(())
    }
}
impl std::error::Error for ScenarioErrors {}

impl<E: Into<ScenarioError>> From<E> for ScenarioErrors {
    fn from(error: E) -> Self {
        Self(vec![error.into()])
    }
}

/// One fault of a scenario.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScenarioError {
    /// A file can't be read.
    #[error("{file}: cannot be read: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// It is no scenario: its form is another.
    #[error("{file}: {reason}")]
    Form {
        /// The file.
        file: String,
        /// What the reader says, with the line.
        reason: String,
    },
    /// A value that can't be.
    #[error("{file}: {key}: is {got}; {change}")]
    Value {
        /// The file.
        file: String,
        /// The key with its tables.
        key: String,
        /// What it is.
        got: String,
        /// What to change.
        change: String,
    },
    /// The cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterErrors),
    /// An engine's description.
    #[error("{key}: {error}")]
    Engine {
        /// The table.
        key: &'static str,
        /// Its faults.
        error: DescribeError,
    },
    /// An engine's memory is too small.
    #[error("{key}: {full}")]
    Pool {
        /// The table.
        key: &'static str,
        /// What it needs.
        full: PoolFull,
    },
    /// The load, or the time models.
    #[error(transparent)]
    Load(#[from] LoadErrors),
    /// D's engines can't take over P's caches: what a handshake would say.
    #[error("D cannot take over P's cache: {0}")]
    Mismatch(Mismatches),
}

impl Scenario {
    /// Reads a scenario; other files are looked for beside it.
    ///
    /// # Errors
    /// All faults, with their keys.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ScenarioErrors> {
        let path = path.as_ref();
        let file = path.display().to_string();
        let text = read::text(path)?;
        Self::from_toml(&file, &text, path.parent().unwrap_or(Path::new("")))
    }

    /// Reads the text of a scenario; `file` names it in messages, other files are looked for in `dir`.
    ///
    /// # Errors
    /// All faults, with their keys.
    pub fn from_toml(file: &str, text: &str, dir: &Path) -> Result<Self, ScenarioErrors> {
        read::scenario(file, text, dir)
    }

    /// The requests.
    ///
    /// # Errors
    /// A trace that can't be read or has faults.
    pub fn requests(&self) -> Result<Load, LoadErrors> {
        self.load.draw(self.seed, &self.dir)
    }

    /// That D can take over what P has.
    ///
    /// # Errors
    /// Every mismatch, as a handshake would say it.
    pub fn compatible(&self) -> Result<Compatible, Mismatches> {
        Compatible::with(self.prefill.manifest.clone(), self.decode.manifest.clone(), self.transfer.compat)
    }
}

/// What the time models need to know of an engine.
pub(crate) fn figures<'a>(fleet: &'a Fleet, cluster: &Cluster) -> EngineFigures<'a> {
    let (d, m) = (&fleet.description, &fleet.manifest);
    let model = cluster.gpu_model(fleet.gpus.first().map_or(u32::MAX, |g| g.node));
    // Replicas are kept and read as well.
    let kept = |paged: bool| -> f64 {
        let views = m.ranks().iter().flat_map(|r| r.layout.views.iter().flatten());
        views
            .map(|view| match (view.as_paged(), view.as_state()) {
                (Some(v), _) if paged => v.block_stride.get() as f64 / f64::from(v.block_size.max(1)),
                (_, Some(v)) if !paged => v.slot_stride.get() as f64,
                _ => 0.0,
            })
            .sum()
    };
    EngineFigures {
        model: d.model.name(),
        layers: u32::try_from(d.model.layers().len()).unwrap_or(u32::MAX),
        gpus: d.shape.tp.saturating_mul(d.shape.pcp),
        tflops: model.bf16_tflops,
        hbm_gb_s: model.hbm_gb_s,
        bytes_per_token: kept(true),
        bytes_per_state: kept(false),
    }
}
