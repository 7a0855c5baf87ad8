//! The planner on small shapes whose numbers can be checked by hand.
#![allow(clippy::unwrap_used, reason = "a test helper that cannot build its shape has failed")]

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BlockTable, BoundRequest, DstPaged, Request, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{BlockId, ItemId, RankId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;

struct Engine {
    layers: usize,
    heads: u32,
    tp: u32,
    block: u32,
    blocks: u32,
    style: LayoutStyle,
}

impl Engine {
    fn manifest(&self) -> Arc<Manifest> {
        let kv = PagedItem::new(self.heads, vec![Component::new("k", 256, "bf16"), Component::new("v", 256, "bf16")]);
        let items = (0..self.layers).map(|i| Item::paged(&format!("layers.{i}"), kv.clone())).collect();
        let spec = ModelSpec::new(items).unwrap();
        let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
        let placements = Parallelism::tensor(&spec, self.tp).place(&spec, |_, _| HeadRule::Split).unwrap();
        let group = CacheGroup { name: "kv".into(), items: ids.clone(), block_tokens: Tokens::new(self.block.into()) };
        let ranks = placements
            .into_iter()
            .map(|placement| {
                let layout = self.style.build(&spec, &placement, &[(&ids, self.block, self.blocks)]).unwrap();
                RankManifest { placement, layout }
            })
            .collect();
        Arc::new(Manifest::new(spec, vec![group], ranks).unwrap())
    }
}

fn ids(list: &[u32]) -> BlockTable {
    BlockTable::new(0, &list.iter().map(|&i| BlockId::new(i)).collect::<Vec<_>>())
}

fn request(n: u64, cached: u64, src: BlockTable, dst: BlockTable) -> Request {
    Request {
        tokens: Tokens::new(n),
        src: vec![
            SrcPaged { table: src, held: TokenRange::new(Tokens::ZERO, Tokens::new(n)), tail: Tail::Exact }.into(),
        ],
        dst: vec![DstPaged { table: dst, cached: Tokens::new(cached) }.into()],
    }
}

fn flat(batch: &Batch) -> Vec<Descriptor> {
    let mut out = vec![Descriptor::default(); 4096];
    let n = batch.cursor().fill(&mut out);
    out.truncate(n);
    out
}

const HND: LayoutStyle = LayoutStyle::HND;
const NHD: LayoutStyle = LayoutStyle::NHD;

fn engine(tp: u32, block: u32, style: LayoutStyle) -> Engine {
    Engine { layers: 80, heads: 8, tp, block, blocks: 4096, style }
}

#[test]
fn equal_shapes_are_one_class_one_phase_one_run() {
    let c = Compatible::new(engine(4, 16, HND).manifest(), engine(4, 16, HND).manifest()).unwrap();
    let peers = PeerMap::new(&c, 7).unwrap();
    assert_eq!(peers.pairs().len(), 4);
    let plan = PairPlan::new(&c, &peers, RankId::new(2), RankId::new(2)).unwrap();
    assert_eq!(plan.classes().len(), 1);
    assert_eq!(plan.classes()[0].phases().len(), 1);
    // Every second block, so that nothing is adjacent; 1,000 blocks.
    let table: Vec<u32> = (0..1000).map(|i| 2 * i).collect();
    let bound = BoundRequest::new(&c, request(16_000, 0, ids(&table), ids(&table))).unwrap();
    let batch = plan.resolve(&bound).unwrap();
    assert_eq!((batch.rows(), batch.descriptors()), (1080, 80_000));
    assert_eq!(batch.bytes().get(), 16_000 * 80 * 2 * 512);
    // In one stretch it is one run for each layer.
    let bound = BoundRequest::new(
        &c,
        request(16_000, 0, BlockTable::contiguous(0, BlockId::new(5), 1000), ids(&(0..1000).collect::<Vec<_>>())),
    )
    .unwrap();
    assert_eq!(flat(&plan.resolve(&bound).unwrap()).len(), 80);
}

#[test]
fn tp_not_dividing_is_an_ordinary_intersection() {
    let c = Compatible::new(engine(6, 16, HND).manifest(), engine(4, 16, HND).manifest()).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    // 6 ranks hold heads 1, 1, 2, 1, 1, 2; destination rank 1 wants heads 2 and 3.
    let sources: Vec<u32> = peers.sources_of(RankId::new(1)).map(RankId::get).collect();
    assert_eq!(sources, [2]);
    let sources: Vec<u32> = peers.sources_of(RankId::new(0)).map(RankId::get).collect();
    assert_eq!(sources, [0, 1]);
}

#[test]
fn blocks_of_different_sizes_pair_by_position_and_leave_a_tail() {
    // Source blocks of 4 tokens, destination blocks of 16; 40 tokens.
    let one = |block| Engine { layers: 1, heads: 1, tp: 1, block, blocks: 64, style: NHD };
    let c = Compatible::new(one(4).manifest(), one(16).manifest()).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
    assert_eq!(plan.classes()[0].phases().len(), 4);
    let src: Vec<u32> = (1..=10).collect();
    let bound = BoundRequest::new(&c, request(40, 0, ids(&src), ids(&[1, 2, 3]))).unwrap();
    // Both tables are stretches of consecutive blocks, and tokens lie end to end on both sides.
    assert_eq!(flat(&plan.resolve(&bound).unwrap()).len(), 1);
    let bound = BoundRequest::new(&c, request(40, 0, ids(&src), ids(&[1, 3, 2]))).unwrap();
    assert_eq!(flat(&plan.resolve(&bound).unwrap()).len(), 3);
    let bound = BoundRequest::new(&c, request(40, 0, ids(&src), ids(&[1, 2, 3]))).unwrap();
    let mut pairs: Vec<(u64, u64)> = Vec::new();
    for d in flat(&plan.resolve(&bound).unwrap()) {
        for token in 0..d.len / 512 {
            pairs.push((d.dst_offset / 512 + token, d.src_offset / 512 + token));
        }
    }
    pairs.sort_unstable();
    let expected: Vec<(u64, u64)> = (0..40).map(|t| (16 + t, 4 + t)).collect();
    assert_eq!(pairs, expected);
    let zero = ZeroPlan::new(c.dst(), RankId::ZERO).unwrap().resolve(&bound).unwrap();
    let ranges: Vec<(u64, u64)> = zero.ranges().map(|z| (z.offset, z.len)).collect();
    assert_eq!(ranges, [((3 * 16 + 8) * 512, 8 * 512)]);
}

#[test]
fn a_hit_at_any_token_moves_exactly_the_rest() {
    for (style, layers) in [(HND, 1), (NHD, 1), (LayoutStyle::PLANES, 1), (LayoutStyle::PACKED_ROWS, 3)] {
        let one = || Engine { layers, heads: 2, tp: 1, block: 16, blocks: 64, style };
        let c = Compatible::new(one().manifest(), one().manifest()).unwrap();
        let peers = PeerMap::new(&c, 0).unwrap();
        let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
        for cached in 0..=50 {
            let bound = BoundRequest::new(&c, request(50, cached, ids(&[3, 9, 4, 1]), ids(&[0, 2, 4, 6]))).unwrap();
            let bytes: u64 = flat(&plan.resolve(&bound).unwrap()).iter().map(|d| d.len).sum();
            assert_eq!(bytes, (50 - cached) * 1024 * layers as u64, "{style:?} {cached}");
        }
    }
}

#[test]
fn rows_of_all_layers_move_whole_when_both_sides_pack() {
    let rows = LayoutStyle::PACKED_ROWS;
    let c = Compatible::new(engine(2, 16, rows).manifest(), engine(2, 16, rows).manifest()).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
    let bound = BoundRequest::new(&c, request(48, 0, ids(&[1, 3, 5]), ids(&[2, 4, 8]))).unwrap();
    assert_eq!(flat(&plan.resolve(&bound).unwrap()).len(), 3);
    // Against a source that does not pack, a slice for each layer.
    let c = Compatible::new(engine(2, 16, HND).manifest(), engine(2, 16, rows).manifest()).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
    let bound = BoundRequest::new(&c, request(48, 0, ids(&[1, 3, 5]), ids(&[2, 4, 8]))).unwrap();
    assert_eq!(flat(&plan.resolve(&bound).unwrap()).len(), 240);
}
