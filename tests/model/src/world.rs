//! What a world is made of: its engines, leases and requests, what may go wrong in it and how often, and a planted fault.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{ItemId, Name, RankId, Tokens};
use kvferry_proto::names::{Attempt, EngineId, LeaseId, SALTS, pairing_salt};

use crate::fault::Fault;

/// Ranks of every engine.
pub const RANKS: u32 = 2;

/// Which life each rank of an engine is in.
pub(crate) type Lives = [u8; RANKS as usize];

/// The engines of a world could not be described: in geometry's words.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the engines of a world can't be described: {0}")]
pub struct WorldError(String);

impl WorldError {
    fn of(error: impl std::fmt::Debug) -> Self {
        Self(format!("{error:?}"))
    }
}

/// What a producer's ranks hold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Shape {
    /// Each a part: consumer rank `i` reads from producer rank `i`, whatever the salt.
    Split,
    /// Each all of it: which one is read turns with the attempt.
    Replicated,
}

/// How control messages travel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Network {
    /// As over a stream: in order, once, until the link breaks; then none of the rest, and each end finds out when it does.
    Ordered,
    /// As single messages: any of them later, more than once or never, as far as [`Chances`] allow.
    Anyhow,
}

/// A lease that a producer offers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeasePlan {
    /// Whose.
    pub producer: usize,
    /// The block that it shows, of every rank.
    pub block: u32,
    /// Seconds until it ends; `None`: without end.
    pub ttl: Option<u64>,
    /// Offered when this other lease has been closed; `None`: from the beginning.
    pub after: Option<usize>,
    /// Whether it is announced while it is still being computed.
    pub stream: bool,
}

/// When a request begins.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Start {
    /// At once.
    First,
    /// At any time, once its lease was offered.
    Anytime,
    /// Once that other request is over.
    After(usize),
}

/// A request of a consumer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PullPlan {
    /// Whose.
    pub consumer: usize,
    /// Of which lease it has the reference.
    pub lease: usize,
    /// The block that it writes, of every rank.
    pub block: u32,
    /// Seconds it may take.
    pub deadline: u64,
    /// Attempts it may make.
    pub attempts: u32,
    /// When it begins.
    pub start: Start,
    /// Whether it is pushed.
    pub push: bool,
}

/// How often each thing may still happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Chances {
    /// A link breaks.
    pub breaks: u8,
    /// A control message is lost ([`Network::Anyhow`]).
    pub losses: u8,
    /// A control message comes once more ([`Network::Anyhow`]).
    pub repeats: u8,
    /// A rank's read or write fails, and has stopped.
    pub fails: u8,
    /// A rank's read or write never ends; its bytes may still come.
    pub hangs: u8,
    /// A rank's report comes once more.
    pub echoes: u8,
    /// The caller gives a request up.
    pub aborts: u8,
    /// A producer's engine takes a lease back.
    pub withdraws: u8,
    /// A producer is started again.
    pub producer_restarts: u8,
    /// A consumer is started again.
    pub consumer_restarts: u8,
    /// A rank of a producer is lost; it joins again later.
    pub producer_ranks: u8,
    /// A rank of a consumer is lost; it joins again later.
    pub consumer_ranks: u8,
    /// A closed lease's block is filled with other bytes.
    pub reuses: u8,
    /// The prefill of a stream begins anew.
    pub prefills: u8,
    /// A link comes about that no request has asked for, which its consumer hears of later.
    pub strays: u8,
}

/// The times of all owners, in seconds; `LeaseTerms` and `grace` of the session's configuration.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Terms {
    /// Between two heartbeats.
    pub beat: u64,
    /// What a heartbeat leaves of a lease, at least.
    pub extension: u64,
    /// What must be left of a lease for its reads to begin.
    pub margin: u64,
    /// What ranks have to stop.
    pub grace: u64,
}

impl Default for Terms {
    fn default() -> Self {
        Self { beat: 1, extension: 2, margin: 0, grace: 1 }
    }
}

/// A world.
#[derive(Clone, Debug)]
pub struct World {
    /// What it is called.
    pub name: &'static str,
    /// Leases, by number.
    pub leases: Vec<LeasePlan>,
    /// Requests, by number.
    pub pulls: Vec<PullPlan>,
    /// Control messages.
    pub network: Network,
    /// What may happen.
    pub chances: Chances,
    /// Times.
    pub terms: Terms,
    /// What is done wrong.
    pub fault: Option<Fault>,
    pub(crate) producers: Vec<EngineId>,
    pub(crate) consumers: Vec<EngineId>,
    maps: BTreeMap<u64, PeerMap>,
}

impl World {
    /// A world in which nothing goes wrong.
    ///
    /// # Errors
    /// If geometry refuses the engines.
    pub fn new(name: &'static str, shape: Shape, leases: &[LeasePlan], pulls: &[PullPlan]) -> Result<Self, WorldError> {
        let manifest = manifest(shape)?;
        let pair = Compatible::new(manifest.clone(), manifest).map_err(WorldError::of)?;
        let map = |salt| Ok((salt, PeerMap::new(&pair, salt).map_err(WorldError::of)?));
        let maps: Result<_, WorldError> = (0..SALTS).map(map).collect();
        let engines = |side, count| -> Result<Vec<EngineId>, WorldError> {
            (0..count).map(|n| EngineId::new(&format!("{side}{n}")).map_err(WorldError::of)).collect()
        };
        Ok(Self {
            name,
            leases: leases.to_vec(),
            pulls: pulls.to_vec(),
            network: Network::Ordered,
            chances: Chances::default(),
            terms: Terms::default(),
            fault: None,
            producers: engines("p", leases.iter().map(|l| l.producer + 1).max().unwrap_or(0))?,
            consumers: engines("d", pulls.iter().map(|p| p.consumer + 1).max().unwrap_or(0))?,
            maps: maps?,
        })
    }

    /// The same with a fault.
    #[must_use]
    pub fn with(mut self, fault: Fault) -> Self {
        self.fault = Some(fault);
        self
    }

    /// The random number of a lease.
    pub(crate) fn lease_id(&self, lease: usize) -> LeaseId {
        let after = self.leases.get(lease).and_then(|l| l.after);
        let number = match after {
            Some(before) if self.is(Fault::LeaseIdAgain) => before,
            _ => lease,
        };
        LeaseId::new(1 + number as u128)
    }

    /// Who reads from whom.
    pub(crate) fn map(&self, consumer: &EngineId, lease: LeaseId, attempt: Attempt) -> (u64, Option<&PeerMap>) {
        let salt = pairing_salt(consumer, lease, attempt);
        (salt, self.maps.get(&salt))
    }

    /// Whether the map for a salt names a producer's rank; also where there is no map.
    pub(crate) fn names(&self, salt: u64, rank: RankId) -> bool {
        self.maps.get(&salt).is_none_or(|m| m.pairs().iter().any(|p| p.src() == rank))
    }

    /// The producer's ranks that a map names.
    pub(crate) fn sources(&self, salt: u64) -> impl Iterator<Item = RankId> {
        self.maps.get(&salt).into_iter().flat_map(|m| m.pairs().iter().map(|p| p.src()))
    }

    pub(crate) fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    pub(crate) fn grace(&self) -> Duration {
        Duration::from_secs(self.terms.grace)
    }
}

pub(crate) fn ranks() -> impl Iterator<Item = RankId> {
    (0..RANKS).map(RankId::new)
}

fn manifest(shape: Shape) -> Result<Arc<Manifest>, WorldError> {
    let heads = match shape {
        Shape::Split => RANKS,
        Shape::Replicated => 1,
    };
    let item = Item::paged("kv", PagedItem::new(heads, vec![Component::new("kv", 8, "bf16")]));
    let spec = ModelSpec::new(vec![item]).map_err(WorldError::of)?;
    let ids = [ItemId::new(0)];
    // A single head is on every rank.
    let placed = Parallelism::tensor(&spec, RANKS).place(&spec, |_, _| HeadRule::Split).map_err(WorldError::of)?;
    let mut built = Vec::new();
    for placement in placed {
        let layout = LayoutStyle::HND.build(&spec, &placement, &[(&ids[..], 16, 4)]).map_err(WorldError::of)?;
        built.push(RankManifest { placement, layout });
    }
    let group = CacheGroup { name: Name::new("all"), items: ids.to_vec(), block_tokens: Tokens::new(16) };
    Ok(Arc::new(Manifest::new(spec, vec![group], built).map_err(WorldError::of)?))
}
