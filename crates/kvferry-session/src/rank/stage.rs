//! How a rank stages what it reads: whether, in which segment of its staging memory, and the two steps of it.
//!
//! A read that is staged at the destination goes over the wire into a segment in the source's order, and from there into place
//! by a local permutation, which the session's driver does ([`LocalWork`]). The segment is given back when neither step can
//! touch it any more; where that is in doubt it stays out of use. Who finds no segment waits in line; what is larger than all
//! staging memory goes directly.
//!
//! For a read that is staged at the source, the producer's rank gathers the bytes in a segment of its own, in the destination's
//! order, and they go over the wire straight into place. That segment is lent until the lease is closed, for as long as peers
//! like; so nobody waits for one, and it is only had where nobody waits. Whoever finds none reads directly.

use std::fmt;
use std::sync::Arc;

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, BoundsError, Section, Side};
use kvferry_geometry::staged::{CostModel, Place, Pools, Staged};
use kvferry_geometry::units::{Bytes, RankId, RegionId};
use kvferry_memory::Permute;
use kvferry_proto::peer::{Gathered, NotGathered};
use kvferry_proto::rank::PullId;
use kvferry_transport::{Lane, Measured, MemoryKind, Region};

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
    /// Always gathered at the producer's ranks, but where these can't, or have no room.
    Source,
}

/// How a rank stages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct StagingConfig {
    /// What the ways cost. `None`: what the transport says that they cost over it. Over a lane that was measured, the wire's rate is
    /// the measured one: that makes the costs of all ways truer, but alike, as the same bytes go over the wire whichever is taken.
    /// So it changes no choice; what descriptors and permuting cost does, and a probe of a lane measures neither.
    pub cost: Option<CostModel>,
    /// Which one is taken.
    pub way: Way,
}

/// A rank can't stage as it is told to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingRefused {
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

/// Who has a segment, or waits for one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waiter {
    /// One source of a request.
    Read(PullId, RankId),
    /// What a peer's rank reads from this one, by ticket. It never waits.
    Gather(u64),
}

/// What came of asking for a segment for a read.
#[derive(Debug)]
pub(super) enum Got {
    /// Here it is.
    Segment(Segment),
    /// It will come.
    InLine,
    /// It might not come for as long as a peer likes, or ever.
    Busy,
}

/// Which reads a rank stages, and its memory for it, if it has some.
pub(super) struct Stager {
    config: StagingConfig,
    /// What the transport says that the ways cost.
    backend: CostModel,
    id: RegionId,
    memory: Option<Memory>,
}

struct Memory {
    region: Region,
    pool: StagingPool<Waiter>,
    /// Segments that are lent to gathers.
    gathers: usize,
    /// Whether a read in doubt has taken a segment out of use for good.
    lost: bool,
}

impl Stager {
    /// How a cache's reads are staged, unless all go directly.
    pub(super) fn new(
        cache: &LocalCache,
        config: StagingConfig,
        backend: CostModel,
    ) -> Result<Option<Self>, StagingRefused> {
        if config.way == Way::Direct {
            return Ok(None);
        }
        let memory = match Memory::new(cache) {
            Err(refused) if config.way == Way::Destination => return Err(refused),
            memory => memory.ok(),
        };
        Ok(Some(Self { config, backend, id: cache.staging_id(), memory }))
    }

    /// The two steps of a batch that comes over a lane, if it is to be staged; `theirs` is the staging memory of the source's
    /// rank.
    pub(super) fn choose(&self, direct: &Batch, theirs: (RegionId, Bytes), lane: &Lane) -> Option<Steps> {
        let cost = self.config.cost.unwrap_or_else(|| on_lane(self.backend, lane.measured));
        let places: &[Place] = match self.config.way {
            Way::Direct => &[],
            Way::Destination => &[Place::Destination],
            Way::Source => &[Place::Source],
            Way::Auto if cost.direct_is_best(direct) => &[],
            Way::Auto => &[Place::Destination, Place::Source],
        };
        let destination = self.memory.as_ref().map_or(0, |m| m.pool.len().get());
        let pools = Pools { source: theirs.1.get(), destination };
        let way = |&place: &Place| -> Option<(u64, Place, Staged)> {
            let (id, pool) =
                if place == Place::Source { (theirs.0, pools.source) } else { (self.id, pools.destination) };
            // A pool of nothing need not be looked at.
            let staged = if pool > 0 { Staged::new(direct, place, id)? } else { return None };
            let cost = cost.staged(place, &staged, pools);
            cost.fits.then_some((cost.ns, place, staged))
        };
        let (ns, place, staged) = places.iter().filter_map(way).min_by_key(|(ns, ..)| *ns)?;
        let better = self.config.way != Way::Auto || ns < cost.direct(direct).ns;
        better.then(|| {
            let gathered = (place == Place::Source).then(|| gathered(direct, &staged));
            let Staged { wire, local, bytes } = staged;
            Steps { place, wire, local, bytes: Bytes::new(bytes), gathered, segment: None }
        })
    }

    /// Asks for a segment for a read. One in line gets it by [`release`](Self::release) or [`cancel`](Self::cancel).
    pub(super) fn acquire(&mut self, (pull, src): (PullId, RankId), bytes: Bytes) -> Result<Got, String> {
        let memory = self.memory.as_mut().ok_or("there is no staging memory")?;
        let waiter = Waiter::Read(pull, src);
        match memory.pool.acquire(waiter, bytes) {
            Ok(Acquired::Granted(segment)) => Ok(Got::Segment(segment)),
            Ok(Acquired::Queued) if memory.gathers > 0 || memory.lost => {
                // It was the last in line, so that nobody is served by this.
                drop(memory.pool.cancel(waiter));
                Ok(Got::Busy)
            }
            Ok(Acquired::Queued) => Ok(Got::InLine),
            Ok(Acquired::TooLarge) => Err(format!("{bytes} are more than all staging memory has")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Takes a segment back, which nothing touches any more.
    pub(super) fn release(&mut self, segment: Segment) -> Vec<Grant<Waiter>> {
        // There is one pool; what it didn't lend would stay out of use.
        self.memory.as_mut().map_or_else(Vec::new, |m| m.pool.release(segment).unwrap_or_default())
    }

    /// A segment won't come back. From now on nobody stands in line: it might never be long enough again.
    pub(super) fn lose(&mut self) {
        if let Some(memory) = &mut self.memory {
            memory.lost = true;
        }
    }

    /// Takes a waiter out of the line.
    pub(super) fn cancel(&mut self, waiter: Waiter) -> Vec<Grant<Waiter>> {
        self.memory.as_mut().map_or_else(Vec::new, |m| m.pool.cancel(waiter))
    }

    /// The second step, with the memory of both sides.
    pub(super) fn permute(&self, steps: &Steps, cache: &LocalCache) -> Result<Permute, String> {
        let region = self.memory.as_ref().map(|m| m.region.clone());
        let segment = steps.segment.as_ref().ok_or("it has no segment")?;
        let local =
            moved(&steps.local, Side::Src, (self.id, segment.offset())).ok_or("its segment passes all memory")?;
        let staging = |id| region.clone().filter(|_| id == self.id);
        bind(local, cache, staging, |id| cache.regions().get(id.index()).cloned())
    }

    /// A segment for what a peer's rank says that it reads. Nobody waits. It goes back by
    /// [`release_gather`](Self::release_gather).
    pub(super) fn lend(&mut self, ticket: u64, bytes: Bytes) -> Result<Segment, String> {
        let memory = self.memory.as_mut().ok_or("the rank has no staging memory")?;
        let (all, waiter) = (memory.pool.len(), Waiter::Gather(ticket));
        match memory.pool.acquire(waiter, bytes) {
            Ok(Acquired::Granted(segment)) => {
                memory.gathers += 1;
                Ok(segment)
            }
            Ok(Acquired::Queued) => {
                drop(memory.pool.cancel(waiter));
                Err(format!("the {all} of staging memory are in use"))
            }
            Ok(Acquired::TooLarge) => Err(format!("{bytes} are more than the {all} of staging memory")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The gather of what a peer's rank reads by this batch into a segment lent for it, if the peer computes the same.
    pub(super) fn gather(
        &self,
        direct: &Batch,
        theirs: Gathered,
        segment: &Segment,
        cache: &LocalCache,
    ) -> Result<Permute, NotGathered> {
        let id = self.id;
        let memory = self.memory.as_ref().ok_or("the rank has no staging memory")?;
        let staged = Staged::new(direct, Place::Source, id).ok_or("so much can't be staged")?;
        let ours = gathered(direct, &staged);
        if ours != theirs {
            return Err(NotGathered::Differs { ours });
        }
        let local = moved(&staged.local, Side::Dst, (id, segment.offset())).ok_or("its segment passes all memory")?;
        let staging = |r| (r == id).then(|| memory.region.clone());
        // It is sent next, so it should be in the caches.
        Ok(bind(local, cache, |r| cache.regions().get(r.index()).cloned(), staging)?.read_soon())
    }

    /// Takes the segment of a gather back, which nothing touches any more.
    pub(super) fn release_gather(&mut self, segment: Segment) -> Vec<Grant<Waiter>> {
        if let Some(memory) = &mut self.memory {
            memory.gathers = memory.gathers.saturating_sub(1);
        }
        self.release(segment)
    }

    /// Bytes that are lent; those in doubt never come back.
    pub(super) fn lent(&self) -> Bytes {
        self.memory.as_ref().map_or(Bytes::ZERO, |m| m.pool.lent())
    }
}

impl Memory {
    fn new(cache: &LocalCache) -> Result<Self, StagingRefused> {
        let got = cache.staging().map_or(Bytes::ZERO, Region::len);
        // No pool where segments can't be aligned, which a constant can.
        let pool = StagingPool::new(got, ALIGN).ok().filter(|pool| !pool.is_empty());
        let (Some(pool), Some(region)) = (pool, cache.staging().cloned()) else {
            return Err(StagingRefused::NoMemory { got, least: ALIGN });
        };
        let all = (0u32..).map(RegionId::new).zip(cache.regions().iter().chain(cache.staging()));
        match all.map(|(id, r)| (id, r.kind())).find(|(_, kind)| *kind != MemoryKind::Host) {
            Some((region, kind)) => Err(StagingRefused::NotHost { region, kind }),
            None => Ok(Self { region, pool, gathers: 0, lost: false }),
        }
    }
}

impl fmt::Debug for Stager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.memory {
            Some(Memory { pool, gathers, .. }) => {
                let (lent, all, waiting) = (pool.lent(), pool.len(), pool.waiting());
                write!(f, "Stager({lent} of {all} lent, {gathers} gathers, {waiting} wait)")
            }
            None => f.write_str("Stager(no memory)"),
        }
    }
}

/// The two steps of a staged read. Their staging offsets count from 0 until it is known where they are.
#[derive(Debug)]
pub(super) struct Steps {
    /// Where the staging memory is.
    pub(super) place: Place,
    wire: Batch,
    /// At the source it is the producer's, which computes it from the same batch.
    local: Batch,
    pub(super) bytes: Bytes,
    /// At the source: what its rank is asked for.
    pub(super) gathered: Option<Gathered>,
    /// At the destination.
    pub(super) segment: Option<Segment>,
}

impl Steps {
    /// Descriptors and rows of the wire's step.
    pub(super) fn size(&self) -> (u64, u64) {
        (self.wire.descriptors(), self.wire.rows())
    }

    /// The wire's step into its segment, proven to stay inside what is registered.
    pub(super) fn wire_to_segment(&self, cache: &LocalCache, peer: &[Bytes]) -> Result<Arc<BoundedBatch>, String> {
        let segment = self.segment.as_ref().ok_or("it has no segment")?;
        self.wire(Side::Dst, (cache.staging_id(), segment.offset()), cache, peer)
    }

    /// The wire's step out of the staging memory of the producer's rank, where that says it has gathered; proven to stay inside
    /// what the rank has registered.
    pub(super) fn wire_from_gathered(
        &self,
        at: (RegionId, Bytes),
        cache: &LocalCache,
        peer: &[Bytes],
    ) -> Result<Arc<BoundedBatch>, String> {
        self.wire(Side::Src, at, cache, peer)
    }

    fn wire(
        &self,
        side: Side,
        at: (RegionId, Bytes),
        cache: &LocalCache,
        peer: &[Bytes],
    ) -> Result<Arc<BoundedBatch>, String> {
        let wire = moved(&self.wire, side, at).ok_or("its place in staging memory passes the end of 64 bits")?;
        Ok(Arc::new(wire.check(peer, cache.lens()).map_err(|e: BoundsError| e.to_string())?))
    }
}

/// The model of a lane that was measured: times that are nearer to the truth, and the same choice, as the bytes on the wire cost
/// each way the same. What a small operation took is latency, which is the same whichever way is taken; a
/// descriptor's share of a batch is not to be had from it.
#[expect(clippy::cast_possible_truncation, reason = "it saturates, and what isn't a number becomes 0")]
fn on_lane(model: CostModel, measured: Option<Measured>) -> CostModel {
    let rate = measured.map_or(0, |m| (m.bytes_per_second / 1e6) as u64);
    if rate == 0 { model } else { CostModel { wire_bytes_per_us: rate, ..model } }
}

/// What both sides compute of what is gathered.
fn gathered(direct: &Batch, staged: &Staged) -> Gathered {
    Gathered { bytes: Bytes::new(staged.bytes), batch: staged.digest(direct) }
}

/// A step whose staging side is moved to a place in that memory.
fn moved(batch: &Batch, side: Side, (staging, by): (RegionId, Bytes)) -> Option<Batch> {
    let base = |b: &Base| {
        let mut moved = *b;
        match side {
            Side::Src => (moved.src_region, moved.src_offset) = (staging, b.src_offset.checked_add(by.get())?),
            Side::Dst => (moved.dst_region, moved.dst_offset) = (staging, b.dst_offset.checked_add(by.get())?),
        }
        Some(moved)
    };
    let section = |s: &Section| {
        let bases: Option<Vec<Base>> = s.bases.iter().map(base).collect();
        Some(Section { bases: bases?.into(), parts: s.parts.clone() })
    };
    Some(Batch::new(batch.sections().iter().map(section).collect::<Option<_>>()?))
}

/// A local step with its memory, proven to stay inside it.
fn bind(
    local: Batch,
    cache: &LocalCache,
    from: impl Fn(RegionId) -> Option<Region>,
    to: impl Fn(RegionId) -> Option<Region>,
) -> Result<Permute, String> {
    let lens = cache.lens();
    let batch = Arc::new(local.check(lens, lens).map_err(|e| e.to_string())?);
    let faults =
        |all: Vec<kvferry_memory::PermuteError>| all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Permute::new(batch, from, to).map_err(faults)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::Duration;

    use kvferry_geometry::batch::{Nest, PairRun, Part};
    use kvferry_transport::mem::MemNetwork;
    use kvferry_transport::{LaneKind, Transport};

    use super::*;
    use crate::testing;

    /// `count` pages of one region to another.
    fn batch(count: u32) -> Batch {
        let base = Base { src_region: RegionId::ZERO, dst_region: RegionId::ZERO, src_offset: 0, dst_offset: 0 };
        let part = Part {
            src_add: 0,
            dst_add: 0,
            src_block_stride: 0,
            dst_block_stride: 0,
            src_step: 1,
            dst_step: 1,
            nest: Nest::run(u64::from(count) * ALIGN.get()),
            pairs: vec![PairRun { src: 0, dst: 0, count: 1 }].into(),
        };
        Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }])
    }

    fn pages(n: u64) -> Bytes {
        Bytes::new(n * ALIGN.get())
    }

    fn read(stager: &mut Stager, id: u64, n: u64) -> Got {
        stager.acquire((PullId(id), RankId::new(0)), pages(n)).unwrap()
    }

    fn stager(config: StagingConfig, backend: CostModel) -> (LocalCache, Stager) {
        let network = MemNetwork::new(1);
        let mut transport: Box<dyn Transport> = Box::new(network.endpoint().unwrap());
        let manifest = testing::shape(1).2.swap_remove(0);
        let regions = manifest.layout.regions.iter();
        let regions: Vec<Region> =
            regions.map(|r| Region::zeroed(usize::try_from(r.len.get()).unwrap()).unwrap()).collect();
        assert!(regions[0].len() >= pages(1), "{}", regions[0].len());
        let cache = LocalCache::register(&mut *transport, manifest, regions).unwrap();
        let memory = Region::zeroed(usize::try_from(pages(4).get()).unwrap()).unwrap();
        let cache = cache.with_staging(&mut *transport, memory).unwrap();
        let stager = Stager::new(&cache, config, backend).unwrap().unwrap();
        (cache, stager)
    }

    /// The transport's numbers decide, unless others are given; over a lane that was measured, what was measured.
    #[test]
    fn the_costs_are_the_transports_unless_others_are_given() {
        // 64 rows of 64 bytes that don't touch at the source, and do at the destination.
        let mut scattered = batch(1).sections().to_vec();
        let part = &mut scattered[0].parts[0];
        (part.src_block_stride, part.dst_block_stride, part.nest) = (128, 64, Nest::run(64));
        part.pairs = vec![PairRun { src: 0, dst: 0, count: 64 }].into();
        let scattered = Batch::new(scattered);
        let theirs = (RegionId::new(1), pages(1));
        let mut lane = Lane { kind: LaneKind::Unknown, transports: Vec::new(), detail: String::new(), measured: None };
        let (dear, cheap) = (1_000_000, 0);
        let model = |descriptor_ns| CostModel { descriptor_ns, ..CostModel::default() };
        for (given, backend, place) in [
            (None, dear, Some(Place::Source)),
            (None, cheap, None),
            (Some(model(cheap)), dear, None),
            (Some(model(dear)), cheap, Some(Place::Source)),
        ] {
            let (_, stager) = stager(StagingConfig { cost: given, ..StagingConfig::default() }, model(backend));
            let chosen = stager.choose(&scattered, theirs, &lane).map(|steps| steps.place);
            assert_eq!(chosen, place, "{given:?} {backend}");
        }
        for (bytes_per_second, wire) in
            [(3.1e9, 3_100), (f64::MAX, u64::MAX), (0.0, 50_000), (-1.0, 50_000), (f64::NAN, 50_000)]
        {
            lane.measured = Some(Measured { bytes_per_second, per_operation: Duration::from_micros(30) });
            let expected = CostModel { wire_bytes_per_us: wire, ..CostModel::default() };
            assert_eq!(on_lane(CostModel::default(), lane.measured), expected, "{bytes_per_second}");
        }
    }

    /// Reads wait for reads alone, and gathers for nobody; so no two requests can wait for each other.
    #[test]
    fn nobody_waits_for_a_gather() {
        let (_, mut stager) = stager(StagingConfig::default(), CostModel::default());
        let first = stager.lend(1, pages(1)).unwrap();
        let Got::Segment(read_first) = read(&mut stager, 1, 3) else { panic!("there is room") };
        // All is lent, to a gather among others: a read goes directly, and so does a gather.
        assert!(matches!(read(&mut stager, 2, 1), Got::Busy));
        assert!(stager.lend(2, pages(1)).unwrap_err().contains("in use"));
        for too_much in [pages(5), Bytes::new(u64::MAX)] {
            assert!(stager.lend(2, too_much).unwrap_err().contains("are more than"));
        }
        assert!(stager.release_gather(first).is_empty(), "nobody has waited");
        // Only a read has some: another waits for it, and no gather comes between them.
        assert!(matches!(read(&mut stager, 2, 2), Got::InLine));
        assert!(stager.lend(3, pages(1)).unwrap_err().contains("in use"));
        let granted = stager.release(read_first);
        assert_eq!(granted.iter().map(|g| g.waiter).collect::<Vec<_>>(), [Waiter::Read(PullId(2), RankId::new(0))]);
        assert_eq!(stager.lent(), pages(2));
    }

    /// FR-13: what can never fit is not staged, so that nothing waits for it; of twenty that share the pool, as many as fit have a
    /// segment, and the others have theirs as those are given back.
    #[test]
    fn fr_13_what_cannot_fit_is_not_waited_for() {
        for way in [Way::Auto, Way::Destination] {
            let (_, stager) = stager(StagingConfig { way, ..StagingConfig::default() }, CostModel::default());
            let lane = Lane { kind: LaneKind::Unknown, transports: Vec::new(), detail: String::new(), measured: None };
            let chosen = |pages: u32| stager.choose(&batch(pages), (RegionId::new(1), Bytes::ZERO), &lane);
            assert!(chosen(5).is_none());
            assert_eq!(chosen(4).is_some(), way == Way::Destination);
        }
        let (_, mut stager) = stager(StagingConfig::default(), CostModel::default());
        let mut held = VecDeque::new();
        for id in 0..20 {
            match read(&mut stager, id, 1) {
                Got::Segment(segment) => held.push_back((id, segment)),
                got => assert!(matches!(got, Got::InLine) && id >= 4, "{id}"),
            }
        }
        assert_eq!(held.len(), 4);
        let mut served = Vec::new();
        while let Some((id, segment)) = held.pop_front() {
            served.push(id);
            for Grant { waiter, segment } in stager.release(segment) {
                let Waiter::Read(PullId(id), _) = waiter else { panic!("{waiter:?}") };
                held.push_back((id, segment));
            }
        }
        assert_eq!(served, (0..20).collect::<Vec<_>>());
        assert_eq!(stager.lent(), Bytes::ZERO);
    }

    /// What is gathered is what the peer computes too, and lies in the cache.
    #[test]
    fn only_what_both_sides_compute_is_gathered() {
        let (cache, mut stager) = stager(StagingConfig::default(), CostModel::default());
        let segment = stager.lend(1, pages(1)).unwrap();
        let computed = |direct: &Batch| gathered(direct, &Staged::new(direct, Place::Source, stager.id).unwrap());
        let direct = batch(1);
        let ours = computed(&direct);
        assert_eq!(ours.bytes, pages(1));
        stager.gather(&direct, ours, &segment, &cache).unwrap();
        let others = [Gathered { bytes: pages(2), ..ours }, Gathered { batch: computed(&batch(2)).batch, ..ours }];
        for theirs in others {
            let refused = stager.gather(&direct, theirs, &segment, &cache).unwrap_err();
            assert_eq!(refused, NotGathered::Differs { ours });
        }
        let mut outside = direct.sections().to_vec();
        outside[0].bases = vec![Base { src_offset: u64::MAX / 2, ..outside[0].bases[0] }].into();
        let outside = Batch::new(outside);
        let refused = stager.gather(&outside, computed(&outside), &segment, &cache).unwrap_err();
        assert!(matches!(refused, NotGathered::Unable(_)), "{refused}");
    }
}
