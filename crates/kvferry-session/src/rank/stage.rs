//! How a rank stages what it reads: whether, in which segment of its staging memory, and the two steps of it.
//!
//! A read that is staged goes over the wire into a segment in the source's order, and from there into place by a local
//! permutation, which the session's driver does ([`LocalWork`]). The segment is given back when neither step can touch it any
//! more; where that is in doubt it stays out of use. Who finds no segment waits in line; what is larger than all staging memory
//! goes directly.

use std::fmt;
use std::sync::Arc;

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, BoundsError, Section, Side};
use kvferry_geometry::staged::{CostModel, Place, Pools, Staged};
use kvferry_geometry::units::{Bytes, RankId, RegionId};
use kvferry_memory::Permute;
use kvferry_proto::rank::PullId;
use kvferry_transport::{MemoryKind, Region};

use crate::cache::LocalCache;
use crate::staging::{Acquired, Grant, Segment, StagingPool};

/// Segments begin at multiples of this: a page.
const ALIGN: Bytes = Bytes::new(4096);

/// Which way a rank's reads go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Way {
    /// Whichever is cheaper by the model.
    #[default]
    Auto,
    /// Always straight into place.
    Direct,
    /// Always staged at this rank, but for what is larger than its staging memory.
    Destination,
    /// Gathered at the producer's ranks. Refused: it needs a message between ranks that there is not yet.
    Source,
}

/// How a rank stages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct StagingConfig {
    /// What the ways cost.
    pub cost: CostModel,
    /// Which one is taken.
    pub way: Way,
}

/// A rank can't stage as it is told to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingRefused {
    /// Staging at the source.
    #[error(
        "reads can't be gathered at their source yet, since ranks have no message for it; let the way be auto, direct or destination"
    )]
    SourceNotServed,
    /// Staging without memory for it.
    #[error("staging at the destination is forced, but the rank has {got} of staging memory; give it at least {least}")]
    NoMemory {
        /// What there is.
        got: Bytes,
        /// The least.
        least: Bytes,
    },
    /// Memory that the CPU can't permute.
    #[error(
        "staging at the destination is forced, but region {region} is {kind} memory, which is not permuted; let the way be auto or direct"
    )]
    NotHost {
        /// A region of the cache, or the staging memory after them.
        region: RegionId,
        /// Its kind.
        kind: MemoryKind,
    },
}

/// One local permutation. Counted by the session, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkId(pub u64);

/// A permutation that the driver does, on any thread and in its own time; then it says
/// [`RankSession::work_done`](super::RankSession::work_done). Its memory stays alive with it.
#[derive(Debug)]
pub struct LocalWork {
    /// Its name.
    pub id: WorkId,
    /// What to do: [`Permute::run`], or [`Permute::copy`] in slices.
    pub permute: Permute,
}

/// Who waits for a segment: one source of a request.
pub(super) type Waiter = (PullId, RankId);

/// A rank's staging memory.
pub(super) struct Stager {
    config: StagingConfig,
    region: Region,
    id: RegionId,
    pool: StagingPool<Waiter>,
}

impl Stager {
    /// The staging memory of a cache, where it has some and is told to use it.
    pub(super) fn new(cache: &LocalCache, config: StagingConfig) -> Result<Option<Self>, StagingRefused> {
        let forced = match config.way {
            Way::Source => return Err(StagingRefused::SourceNotServed),
            Way::Direct => return Ok(None),
            Way::Destination => true,
            Way::Auto => false,
        };
        let got = cache.staging().map_or(Bytes::ZERO, Region::len);
        // No pool where segments can't be aligned, which a constant can.
        let pool = StagingPool::new(got, ALIGN).ok().filter(|pool| !pool.is_empty());
        let (Some(pool), Some(region)) = (pool, cache.staging().cloned()) else {
            let least = ALIGN;
            return if forced { Err(StagingRefused::NoMemory { got, least }) } else { Ok(None) };
        };
        let all = (0u32..).map(RegionId::new).zip(cache.regions().iter().chain(cache.staging()));
        let other = all.map(|(id, r)| (id, r.kind())).find(|(_, kind)| *kind != MemoryKind::Host);
        if let Some((region, kind)) = other {
            return if forced { Err(StagingRefused::NotHost { region, kind }) } else { Ok(None) };
        }
        Ok(Some(Self { config, region, id: cache.staging_id(), pool }))
    }

    /// The two steps of a batch, if it is to be staged.
    pub(super) fn choose(&self, direct: &Batch) -> Option<Steps> {
        let (forced, cost) = (self.config.way == Way::Destination, &self.config.cost);
        if !forced && cost.direct_is_best(direct) {
            return None;
        }
        let place = Place::Destination;
        let staged = Staged::new(direct, place, self.id)?;
        let pools = Pools { source: 0, destination: self.pool.len().get() };
        let way = cost.staged(place, &staged, pools);
        let better = forced || way.ns < cost.direct(direct).ns;
        let Staged { wire, local, bytes } = staged;
        (way.fits && better).then(|| Steps { wire, local, bytes: Bytes::new(bytes), segment: None })
    }

    /// Asks for a segment. `None`: it will come, by [`release`](Self::release) or [`cancel`](Self::cancel).
    pub(super) fn acquire(&mut self, waiter: Waiter, bytes: Bytes) -> Result<Option<Segment>, String> {
        match self.pool.acquire(waiter, bytes) {
            Ok(Acquired::Granted(segment)) => Ok(Some(segment)),
            Ok(Acquired::Queued) => Ok(None),
            Ok(Acquired::TooLarge) => Err(format!("{bytes} are more than all staging memory has")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Takes a segment back, which nothing touches any more.
    pub(super) fn release(&mut self, segment: Segment) -> Vec<Grant<Waiter>> {
        // There is one pool; what it didn't lend would stay out of use.
        self.pool.release(segment).unwrap_or_default()
    }

    /// Takes a waiter out of the line.
    pub(super) fn cancel(&mut self, waiter: Waiter) -> Vec<Grant<Waiter>> {
        self.pool.cancel(waiter)
    }

    /// The second step, with the memory of both sides.
    pub(super) fn permute(&self, steps: &Steps, cache: &LocalCache) -> Result<Permute, String> {
        let local = steps.placed(Side::Src, self.id).ok_or("it has no segment")?;
        let lens = cache.lens();
        let batch = Arc::new(local.check(&lens, &lens).map_err(|e| e.to_string())?);
        let from = |id| (id == self.id).then(|| self.region.clone());
        let to = |id: RegionId| cache.regions().get(id.index()).cloned();
        let faults =
            |all: Vec<kvferry_memory::PermuteError>| all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        Permute::new(batch, from, to).map_err(faults)
    }

    /// Bytes that are lent; those in doubt never come back.
    pub(super) fn lent(&self) -> Bytes {
        self.pool.lent()
    }
}

impl fmt::Debug for Stager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stager({} of {} lent, {} wait)", self.pool.lent(), self.pool.len(), self.pool.waiting())
    }
}

/// The two steps of a staged read. Their staging offsets count from 0 until there is a segment.
#[derive(Debug)]
pub(super) struct Steps {
    wire: Batch,
    local: Batch,
    pub(super) bytes: Bytes,
    pub(super) segment: Option<Segment>,
}

impl Steps {
    /// Descriptors and rows of the wire's step.
    pub(super) fn size(&self) -> (u64, u64) {
        (self.wire.descriptors(), self.wire.rows())
    }

    /// The wire's step in its segment, proven to stay inside what is registered.
    pub(super) fn wire(&self, cache: &LocalCache, peer: &[Bytes]) -> Result<Arc<BoundedBatch>, String> {
        let wire = self.placed(Side::Dst, cache.staging_id()).ok_or("it has no segment")?;
        Ok(Arc::new(wire.check(peer, &cache.lens()).map_err(|e: BoundsError| e.to_string())?))
    }

    /// A step whose staging side is moved into the segment: the wire's writes it, the local one reads it.
    fn placed(&self, side: Side, staging: RegionId) -> Option<Batch> {
        let by = self.segment.as_ref()?.offset().get();
        let batch = if side == Side::Dst { &self.wire } else { &self.local };
        let base = |b: &Base| {
            let mut moved = *b;
            match side {
                Side::Src => (moved.src_region, moved.src_offset) = (staging, b.src_offset.checked_add(by)?),
                Side::Dst => (moved.dst_region, moved.dst_offset) = (staging, b.dst_offset.checked_add(by)?),
            }
            Some(moved)
        };
        let section = |s: &Section| {
            let bases: Option<Vec<Base>> = s.bases.iter().map(base).collect();
            Some(Section { bases: bases?.into(), parts: s.parts.clone() })
        };
        Some(Batch::new(batch.sections().iter().map(section).collect::<Option<_>>()?))
    }
}
