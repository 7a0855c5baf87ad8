//! Engines of one rank over kvferry-shm, and what lies in their memory.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kvferry::{Engine, EngineBuilder, EngineId, RankManifest, Region};
use kvferry_benches::engines::{BLOCK, shape_of_blocks};
use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BoundRequest, Request};
use kvferry_geometry::units::{Bytes, RankId, Tokens};
use kvferry_memory::{BufferOptions, SharedBuffer, pattern};
use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::conformance::sample::Rng;

/// A cache: layers, bytes of a K or V head, tokens of a block, tokens in all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cache {
    pub(crate) layers: u32,
    pub(crate) width: u64,
    pub(crate) block: u64,
    pub(crate) tokens: u64,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.layers, self.width, self.block, self.tokens)
    }
}

impl FromStr for Cache {
    type Err = std::num::ParseIntError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let mut words = s.split(' ');
        let mut next = || words.next().unwrap_or_default();
        let layers = next().parse()?;
        Ok(Self { layers, width: next().parse()?, block: next().parse()?, tokens: next().parse()? })
    }
}

impl Cache {
    pub(crate) fn blocks(&self) -> u32 {
        u32::try_from(self.tokens / self.block).unwrap()
    }

    /// Bytes of so many tokens, all layers.
    pub(crate) fn bytes(&self, tokens: u64) -> u64 {
        tokens * u64::from(self.layers) * 8 * 2 * self.width
    }

    fn manifest(&self) -> Manifest {
        let (spec, groups, ranks) = shape_of_blocks(self.layers, self.width, 1, self.blocks(), self.block);
        Manifest::new(spec, groups, ranks).unwrap()
    }

    /// Memory that was touched.
    pub(crate) fn memory(&self) -> Vec<Region> {
        let options = BufferOptions { touch: true, ..BufferOptions::default() };
        let region = |r: &kvferry_geometry::layout::Region| {
            SharedBuffer::new("kvferry bench", Bytes::new(r.len.get()), options).unwrap().region()
        };
        self.manifest().ranks()[0].layout.regions.iter().map(region).collect()
    }

    pub(crate) fn engine(&self, id: &str, memory: Vec<Region>) -> EngineBuilder {
        let (spec, groups, ranks) = shape_of_blocks(self.layers, self.width, 1, self.blocks(), self.block);
        let transport = Box::new(ShmTransport::new(Config::default()).unwrap());
        let rank: RankManifest = ranks.into_iter().next().unwrap();
        Engine::builder(EngineId::new(id).unwrap(), spec, groups).rank(rank, memory, transport)
    }
}

/// Every place of a producer's memory its own value.
pub(crate) fn paint(memory: &[Region]) {
    for (i, region) in (0..).zip(memory) {
        pattern::fill(region, 0, region.len().get(), pattern::background(i), 0).unwrap();
    }
}

pub(crate) fn clear(memory: &[Region]) {
    memory.iter().for_each(|region| region.fill(0, region.len().get(), 0).unwrap());
}

/// In which order the blocks of a request lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    InARow,
    Scattered,
}

/// The first so many of a cache's blocks in an order; the two sides of a transfer have different seeds.
pub(crate) fn ids(order: Order, count: u32, of: u32, seed: u64) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..of).collect();
    if order == Order::Scattered {
        Rng::new(seed).shuffle(&mut ids);
    }
    ids.truncate(count as usize);
    ids
}

pub(crate) const SOURCE: u64 = 3;
pub(crate) const DESTINATION: u64 = 9;

/// The runs of a request, as the planner finds them.
pub(crate) fn runs(src: Cache, dst: Cache, from: &[u32], to: &[u32]) -> Vec<Descriptor> {
    let c = Compatible::new(Arc::new(src.manifest()), Arc::new(dst.manifest())).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
    let tokens = Tokens::new(from.len() as u64 * BLOCK);
    let (src, dst) = (kvferry_benches::engines::listed(from), kvferry_benches::engines::wanted(to));
    let bound = BoundRequest::new(&c, Request { tokens, src, dst }).unwrap();
    let batch = plan.resolve(&bound).unwrap();
    let mut runs = vec![Descriptor::default(); usize::try_from(batch.descriptors()).unwrap()];
    let got = batch.cursor().fill(&mut runs);
    assert_eq!(got, runs.len());
    runs
}

/// Whether all that was to be moved is what the producer has.
pub(crate) fn check(runs: &[Descriptor], memory: &[Region]) {
    for run in runs {
        let place = pattern::background(run.src_region.get().into());
        let region = &memory[run.dst_region.index()];
        let wrong = pattern::check(region, run.dst_offset, run.len, place, run.src_offset).unwrap();
        assert_eq!(wrong, None, "{run:?}");
    }
}
