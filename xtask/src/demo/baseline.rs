//! The yardstick: the same runs, in the same order and with as many threads, by plain memcpy between memory of one
//! process that has been touched.

use std::sync::Arc;

use anyhow::Context as _;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::BoundRequest;
use kvferry_geometry::units::{Bytes, RankId, RegionId};
use kvferry_memory::{BufferOptions, HostBuffer};
use kvferry_transport::Region;
use kvferry_transport::copy::Copier;

use super::scenario::Scenario;

/// Everything that one decode rank reads, ready to be copied.
pub(crate) struct Baseline {
    copiers: Vec<Copier>,
}

impl Baseline {
    /// Plans all reads of a decode rank into `regions`, from buffers of this process that stand for every source: what is
    /// copied doesn't matter, only that the memory was touched and is far larger than the CPU's caches.
    pub(crate) fn new(scenario: &Scenario, rank: RankId, regions: &[Region]) -> anyhow::Result<Self> {
        let (src, dst) = (&scenario.prefill.manifest, &scenario.decode.manifest);
        let (compatible, peers) = scenario.plan()?;
        let bound: Vec<BoundRequest> = (0..scenario.requests.len())
            .map(|r| BoundRequest::new(&compatible, scenario.request(r)))
            .collect::<Result<_, _>>()?;
        let sources: Vec<RankId> = peers.sources_of(rank).collect();
        let all: Vec<Vec<Bytes>> = sources.iter().map(|&source| src.region_lens(source)).collect();
        let count = all.iter().map(Vec::len).max().unwrap_or(0);
        let largest = |i: usize| all.iter().filter_map(|lens| lens.get(i)).max().copied().unwrap_or_default();
        let touched = BufferOptions { touch: true, ..BufferOptions::default() };
        let buffers: Vec<Region> =
            (0..count).map(|i| Ok(HostBuffer::new(largest(i), touched)?.region())).collect::<anyhow::Result<_>>()?;
        let mut copiers = Vec::new();
        for (&source, lens) in sources.iter().zip(&all) {
            let plan = PairPlan::new(&compatible, &peers, source, rank)?;
            for request in &bound {
                let batch = plan.resolve(request)?.check(lens, &dst.region_lens(rank))?;
                let from =
                    |id: RegionId| buffers.get(id.index())?.part(0, usize::try_from(lens.get(id.index())?.get()).ok()?);
                let to = |id: RegionId| regions.get(id.index()).cloned();
                copiers.push(Copier::new(Arc::new(batch), from, to).context("the yardstick's copy")?);
            }
        }
        Ok(Self { copiers })
    }

    /// Copies everything; returns how many bytes.
    pub(crate) fn copy(&self, threads: usize) -> u64 {
        self.copiers.iter().map(|c| c.copy_with(threads).bytes.get()).sum()
    }
}
