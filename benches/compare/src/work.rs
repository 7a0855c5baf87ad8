//! What is moved: the same descriptors for everybody, made by kvferry's planner where a request is meant.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Descriptor, Nest, PairRun, Part, Section};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BlockTable, BoundRequest, DstGroup, DstPaged, Request, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{BlockId, Bytes, ItemId, RankId, RegionId, TokenRange, Tokens};
use kvferry_transport::Region;
use kvferry_transport::conformance::sample::Rng;
use serde::{Deserialize, Serialize};

use crate::memory::GUARD;

/// Bytes of a work of scattered blocks.
pub(crate) const TOTAL: u64 = 256 << 20;
/// Tokens of a request.
pub(crate) const TOKENS: u32 = 4096;
const LAYERS: u32 = 80;
const HEADS: u32 = 2;
/// K or V of one token and head: 128 elements in bf16.
const HEAD_BYTES: u64 = 256;
/// Blocks of 16 tokens that an engine has, as in vLLM's bench; and of 64.
const POOL_16: u32 = 600;
const POOL_64: u32 = 160;

/// Which memory lies on either side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Scene {
    /// One region a side.
    Blocks,
    /// A region for each layer of a rank with two KV heads of Llama-3.1-70B, blocks of 16 tokens on both sides.
    Same,
    /// The same, with blocks of 64 tokens at the destination.
    Wider,
}

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Work {
    /// 4 KiB, to have moved something.
    Small,
    /// [`TOTAL`] bytes in blocks of this many, every one from a random place to a random place.
    Blocks(u64),
    /// A request of [`TOKENS`] tokens into scattered or contiguous blocks, as its planner's descriptors say or staged at the
    /// destination.
    Request {
        /// Whether block ids are contiguous on both sides.
        contiguous: bool,
        /// Whether whole source pages land in staging memory, and are permuted from there.
        staged: bool,
        /// Whether the destination's blocks have 64 tokens: then the scene is [`Scene::Wider`].
        wider: bool,
    },
}

/// Both engines of a scene with requests, as either process knows them.
#[derive(Debug)]
pub(crate) struct Engines {
    pub(crate) c: Compatible,
    pub(crate) plan: PairPlan,
}

impl Scene {
    fn blocks(self) -> [(u32, u32); 2] {
        let wide = if self == Self::Wider { (64, POOL_64) } else { (16, POOL_16) };
        [(16, POOL_16), wide]
    }

    /// Lengths of the regions at the source and at the destination.
    pub(crate) fn lens(self) -> [Vec<Bytes>; 2] {
        if self == Self::Blocks {
            return [vec![Bytes::new(TOTAL)], vec![Bytes::new(TOTAL)]];
        }
        let page = |(tokens, pool): (u32, u32)| {
            let layer = u64::from(pool) * u64::from(tokens * HEADS) * 2 * HEAD_BYTES;
            vec![Bytes::new(layer); LAYERS as usize]
        };
        self.blocks().map(page)
    }

    /// Both engines' manifests, source first.
    pub(crate) fn manifests(self) -> anyhow::Result<[Arc<Manifest>; 2]> {
        let [p, d] = self.blocks();
        Ok([manifest(p.0, p.1)?, manifest(d.0, d.1)?])
    }

    /// What both engines made of each other when they met.
    pub(crate) fn engines(self) -> anyhow::Result<Engines> {
        let [src, dst] = self.manifests()?;
        let c = Compatible::new(src, dst).ok().context("the engines don't fit each other")?;
        let peers = PeerMap::new(&c, 0).ok().context("no map of peers")?;
        let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).ok().context("no plan")?;
        let lens = [src_lens(&c), dst_lens(&c)];
        ensure!(lens == self.lens(), "the planner's regions are {lens:?}");
        Ok(Engines { c, plan })
    }

    /// Block ids of a request on both sides.
    pub(crate) fn ids(self, contiguous: bool) -> [Vec<BlockId>; 2] {
        let mut seed = 11;
        self.blocks().map(|(tokens, pool)| {
            let mut ids: Vec<u32> = (1..pool).collect();
            seed += 1;
            if !contiguous {
                Rng::new(seed).shuffle(&mut ids);
            }
            ids.truncate((TOKENS / tokens) as usize);
            ids.into_iter().map(BlockId::new).collect()
        })
    }
}

fn src_lens(c: &Compatible) -> Vec<Bytes> {
    c.src().region_lens(RankId::ZERO)
}

fn dst_lens(c: &Compatible) -> Vec<Bytes> {
    c.dst().region_lens(RankId::ZERO)
}

/// One rank with the pages of vLLM's bench: `[head][token][K, V]`.
fn manifest(block: u32, blocks: u32) -> anyhow::Result<Arc<Manifest>> {
    let kv =
        PagedItem::new(HEADS, vec![Component::new("k", HEAD_BYTES, "bf16"), Component::new("v", HEAD_BYTES, "bf16")]);
    let items = (0..LAYERS).map(|i| Item::paged(&format!("model.layers.{i}.self_attn.attn"), kv.clone())).collect();
    let spec = ModelSpec::new(items).ok().context("an unsound spec")?;
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let placements = Parallelism::tensor(&spec, 1)
        .place(&spec, |_, _| HeadRule::Split)
        .ok()
        .context("a parallelism that does not fit")?;
    let group = CacheGroup { name: "kv".into(), items: ids.clone(), block_tokens: Tokens::new(block.into()) };
    let rank = |placement| {
        let layout = LayoutStyle::HND.build(&spec, &placement, &[(&ids, block, blocks)])?;
        Ok(RankManifest { placement, layout })
    };
    let ranks = placements.into_iter().map(rank).collect::<anyhow::Result<_>>()?;
    Ok(Arc::new(Manifest::new(spec, vec![group], ranks).ok().context("an unsound manifest")?))
}

impl Engines {
    /// From block ids to what moves, as a decode rank does for each request.
    pub(crate) fn resolve(&self, [src, dst]: &[Vec<BlockId>; 2]) -> anyhow::Result<Batch> {
        let tokens = Tokens::new(TOKENS.into());
        let request = Request { tokens, src: vec![src_group(src, tokens)], dst: vec![dst_group(dst)] };
        let bound = BoundRequest::new(&self.c, request).ok().context("an unsound request")?;
        self.plan.resolve(&bound).ok().context("a request that does not resolve")
    }
}

/// The producer's blocks of a request of so many tokens.
pub(crate) fn src_group(ids: &[BlockId], tokens: Tokens) -> SrcGroup {
    let held = TokenRange::new(Tokens::ZERO, tokens);
    SrcPaged { table: BlockTable::new(0, ids), held, tail: Tail::Exact }.into()
}

/// The consumer's blocks of a request.
pub(crate) fn dst_group(ids: &[BlockId]) -> DstGroup {
    DstPaged { table: BlockTable::new(0, ids), cached: Tokens::ZERO }.into()
}

impl Work {
    /// The bytes as a batch; not staged.
    pub(crate) fn batch(self, scene: Scene, engines: Option<&Engines>) -> anyhow::Result<Batch> {
        match self {
            Self::Small => Ok(blocks(4096, 1)),
            Self::Blocks(bytes) => Ok(blocks(bytes, u32::try_from(TOTAL / bytes)?)),
            Self::Request { contiguous, .. } => {
                engines.context("a scene without engines")?.resolve(&scene.ids(contiguous))
            }
        }
    }

    /// Bytes.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Small => 4096,
            Self::Blocks(_) => TOTAL,
            Self::Request { .. } => u64::from(LAYERS * TOKENS * HEADS) * 2 * HEAD_BYTES,
        }
    }
}

/// `count` blocks of this many bytes in the first regions, from random places to random places.
fn blocks(bytes: u64, count: u32) -> Batch {
    let shuffled = |seed| {
        let mut ids: Vec<u32> = (0..count).collect();
        Rng::new(seed).shuffle(&mut ids);
        ids
    };
    let pairs = shuffled(3).into_iter().zip(shuffled(9)).map(|(src, dst)| PairRun { src, dst, count: 1 });
    let zero = RegionId::ZERO;
    let base = Base { src_region: zero, dst_region: zero, src_offset: 0, dst_offset: 0 };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: bytes,
        dst_block_stride: bytes,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(bytes),
        pairs: pairs.collect::<Vec<_>>().into(),
    };
    Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }])
}

/// Proves a batch.
pub(crate) fn proven(batch: Batch, src: &[Bytes], dst: &[Bytes]) -> anyhow::Result<Arc<BoundedBatch>> {
    Ok(Arc::new(batch.check(src, dst)?))
}

/// Every contiguous move of a batch.
pub(crate) fn descriptors(batch: &Batch) -> anyhow::Result<Vec<Descriptor>> {
    let mut out = vec![Descriptor::default(); usize::try_from(batch.descriptors())?];
    let n = batch.cursor().fill(&mut out);
    out.truncate(n);
    Ok(out)
}

/// Compares all memory of the destination: listed bytes with the source's, all others with the guard value. The number of
/// bytes that are wrong.
pub(crate) fn wrong_bytes(list: &[Descriptor], src: &[Region], dst: &[Region]) -> anyhow::Result<u64> {
    let mut sorted = list.to_vec();
    sorted.sort_by_key(|d| (d.dst_region, d.dst_offset));
    let mut wrong = 0;
    let (mut got, mut expected) = (Vec::new(), Vec::new());
    let mut next = sorted.iter().peekable();
    for (region, id) in dst.iter().zip(0..) {
        let mut at = 0;
        loop {
            let piece = next.next_if(|d| d.dst_region == RegionId::new(id));
            let end = piece.map_or(region.len().get(), |d| d.dst_offset);
            ensure!(at <= end, "two descriptors write the same bytes");
            got.resize(usize::try_from(end - at)?, 0);
            region.read(at, &mut got)?;
            wrong += got.iter().filter(|b| **b != GUARD).count() as u64;
            let Some(d) = piece else { break };
            let len = usize::try_from(d.len)?;
            got.resize(len, 0);
            expected.resize(len, 0);
            region.read(d.dst_offset, &mut got)?;
            src.get(d.src_region.index()).context("no such region")?.read(d.src_offset, &mut expected)?;
            if got != expected {
                wrong += got.iter().zip(&expected).filter(|(a, b)| a != b).count() as u64;
            }
            at = d.dst_offset + d.len;
        }
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> (Vec<Region>, Vec<Region>, Vec<Descriptor>) {
        let [src, dst] = [1_u8, GUARD].map(|value| {
            let region = Region::zeroed(4 << 12).unwrap();
            region.fill(0, 4 << 12, value).unwrap();
            vec![region]
        });
        (0..4).for_each(|page| src[0].fill(page << 12, 1 << 12, 10 + u8::try_from(page).unwrap()).unwrap());
        let list = descriptors(&blocks(4096, 3)).unwrap();
        (src, dst, list)
    }

    #[test]
    fn missing_misplaced_and_stray_bytes_are_counted() {
        let (src, dst, list) = memory();
        assert_eq!(wrong_bytes(&list, &src, &dst).unwrap(), 3 << 12);
        let mut page = vec![0; 4096];
        for d in &list {
            src[0].read(d.src_offset, &mut page).unwrap();
            dst[0].write(d.dst_offset, &page).unwrap();
        }
        assert_eq!(wrong_bytes(&list, &src, &dst).unwrap(), 0);
        dst[0].write(3 << 12, &[0; 7]).unwrap();
        assert_eq!(wrong_bytes(&list, &src, &dst).unwrap(), 7);
        src[0].read(list[0].src_offset, &mut page).unwrap();
        dst[0].write(list[1].dst_offset, &page).unwrap();
        assert_eq!(wrong_bytes(&list, &src, &dst).unwrap(), 7 + 4096);
    }

    #[test]
    fn requests_are_those_of_the_peer() {
        let pages = |scene: Scene, contiguous| {
            let work = Work::Request { contiguous, staged: false, wider: scene == Scene::Wider };
            let batch = work.batch(scene, Some(&scene.engines().unwrap())).unwrap();
            assert_eq!(batch.bytes().get(), work.bytes());
            descriptors(&batch).unwrap().len()
        };
        // 80 layers of 256 pages of 16 KiB; one run a layer; two heads a page.
        assert_eq!(pages(Scene::Same, true), 80);
        assert!((20_000..=20_480).contains(&pages(Scene::Same, false)));
        assert!((40_000..=40_960).contains(&pages(Scene::Wider, false)));
    }

    #[test]
    fn scattered_blocks_move_everything_once() {
        for bytes in [4 << 10, 1 << 20] {
            let mut list = descriptors(&Work::Blocks(bytes).batch(Scene::Blocks, None).unwrap()).unwrap();
            assert_eq!(list.iter().map(|d| d.len).sum::<u64>(), TOTAL);
            list.sort_by_key(|d| d.dst_offset);
            assert!(list.windows(2).all(|w| w[0].dst_offset + w[0].len == w[1].dst_offset));
        }
    }
}
