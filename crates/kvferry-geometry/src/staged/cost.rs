//! Which way is cheapest: a model with stated constants.

use super::{Place, Staged};
use crate::batch::Batch;
use crate::units::RegionId;

/// What a transfer costs. The defaults are round numbers for a 400 Gb/s network card and one socket's memory; whoever has
/// measured better ones sets them.
///
/// ```text
/// direct = descriptors · descriptor_ns + bytes / wire
/// staged = stage_ns + descriptors of the wire step · descriptor_ns + bytes / wire
///        + runs of the local step · run_ps / 1000 + bytes / permute
/// ```
///
/// The two steps don't overlap in this model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CostModel {
    /// Nanoseconds that a descriptor costs whatever its length, over both network cards and the software that posts it.
    pub descriptor_ns: u64,
    /// Bytes that the wire moves in a microsecond.
    pub wire_bytes_per_us: u64,
    /// Bytes that the local step permutes in a microsecond, with long runs.
    pub permute_bytes_per_us: u64,
    /// Picoseconds that a contiguous run of the local step costs whatever its length.
    pub run_ps: u64,
    /// Nanoseconds that staging costs once: a segment of the pool, a second start, a second wait.
    pub stage_ns: u64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            descriptor_ns: 100,
            wire_bytes_per_us: 50_000,
            permute_bytes_per_us: 20_000,
            run_ps: 2_000,
            stage_ns: 20_000,
        }
    }
}

/// Bytes of staging memory on either side; 0 where there is none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Pools {
    /// At the source.
    pub source: u64,
    /// At the destination.
    pub destination: u64,
}

/// What one way costs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cost {
    /// The way.
    pub place: Place,
    /// Nanoseconds in all.
    pub ns: u64,
    /// Descriptors on the wire.
    pub descriptors: u64,
    /// Contiguous runs of the local step.
    pub runs: u64,
    /// Bytes of staging memory.
    pub staging: u64,
    /// Whether the pool on that side has so many bytes.
    pub fits: bool,
}

/// The three ways with their costs, and the cheapest that is possible.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The cheapest way that fits its pool; direct where equal.
    pub best: Cost,
    /// Straight into place.
    pub direct: Cost,
    /// Permuted at the destination, if the batch can be staged at all.
    pub destination: Option<Cost>,
    /// Gathered at the source, if the batch can be staged at all.
    pub source: Option<Cost>,
}

impl CostModel {
    /// What a batch costs as it is.
    #[must_use]
    pub fn direct(&self, batch: &Batch) -> Cost {
        let descriptors = batch.descriptors();
        let ns = self.wire_ns(descriptors, batch.bytes().get());
        Cost { place: Place::Direct, ns, descriptors, runs: 0, staging: 0, fits: true }
    }

    /// What the two steps of a staged batch cost.
    #[must_use]
    pub fn staged(&self, place: Place, staged: &Staged, pools: Pools) -> Cost {
        let (descriptors, runs) = (staged.wire.descriptors(), staged.local.descriptors());
        let pool = if place == Place::Source { pools.source } else { pools.destination };
        let local =
            (runs.saturating_mul(self.run_ps) / 1000).saturating_add(per_us(staged.bytes, self.permute_bytes_per_us));
        let ns = self.wire_ns(descriptors, staged.bytes).saturating_add(local).saturating_add(self.stage_ns);
        Cost { place, ns, descriptors, runs, staging: staged.bytes, fits: staged.bytes <= pool }
    }

    /// All three ways of a batch.
    #[must_use]
    pub fn compare(&self, direct: &Batch, pools: Pools) -> Choice {
        let cost = |place| Some(self.staged(place, &Staged::new(direct, place, RegionId::ZERO)?, pools));
        let (destination, source) = (cost(Place::Destination), cost(Place::Source));
        let direct = self.direct(direct);
        let ways = [Some(direct), destination, source].into_iter().flatten().filter(|c| c.fits);
        let best = ways.min_by_key(|c| c.ns).unwrap_or(direct);
        Choice { best, direct, destination, source }
    }

    /// Whether no staging could be cheaper than this direct batch, whatever the layouts: then none need be looked at.
    #[must_use]
    pub fn direct_is_best(&self, batch: &Batch) -> bool {
        let least = per_us(batch.bytes().get(), self.permute_bytes_per_us).saturating_add(self.stage_ns);
        batch.descriptors().saturating_mul(self.descriptor_ns) <= least
    }

    fn wire_ns(&self, descriptors: u64, bytes: u64) -> u64 {
        descriptors.saturating_mul(self.descriptor_ns).saturating_add(per_us(bytes, self.wire_bytes_per_us))
    }
}

/// Nanoseconds for so many bytes at so many bytes a microsecond.
fn per_us(bytes: u64, rate: u64) -> u64 {
    bytes.saturating_mul(1000) / rate.max(1)
}
