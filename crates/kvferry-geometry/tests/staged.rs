//! Staged batches move the bytes of the direct batch, with the fewest descriptors that the anchor's layout allows.
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
use kvferry_geometry::staged::{CostModel, Place, Pools, Staged};
use kvferry_geometry::units::{BlockId, ItemId, RankId, RegionId, TokenRange, Tokens};

#[derive(Clone, Copy)]
struct Shape {
    tp: u32,
    block: u32,
    style: LayoutStyle,
}

const LAYERS: u32 = 3;
const TOKENS: u64 = 150;

fn manifest(s: Shape) -> Arc<Manifest> {
    let kv = PagedItem::new(4, vec![Component::new("k", 8, "u8"), Component::new("v", 4, "u8")]);
    let spec = ModelSpec::new((0..LAYERS).map(|i| Item::paged(&format!("{i}"), kv.clone())).collect()).unwrap();
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let group = CacheGroup { name: "g".into(), items: ids.clone(), block_tokens: Tokens::new(s.block.into()) };
    let placements = Parallelism::tensor(&spec, s.tp).place(&spec, |_, _| HeadRule::Split).unwrap();
    let rank = |placement| {
        let layout = s.style.build(&spec, &placement, &[(&ids, s.block, 64)]).unwrap();
        RankManifest { placement, layout }
    };
    let ranks = placements.into_iter().map(rank).collect();
    Arc::new(Manifest::new(spec, vec![group], ranks).unwrap())
}

/// Direct batches of all pairs, over blocks that are nowhere adjacent.
fn batches(src: Shape, dst: Shape) -> Vec<(Batch, Vec<usize>, Vec<usize>)> {
    let c = Compatible::new(manifest(src), manifest(dst)).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    let table = |block: u32, turn: u32| {
        let count = u32::try_from(TOKENS).unwrap().div_ceil(block);
        BlockTable::new(0, &(0..count).map(|i| BlockId::new((i * 5 + turn) % 64)).collect::<Vec<_>>())
    };
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    let request = Request {
        tokens: Tokens::new(TOKENS),
        src: vec![SrcPaged { table: table(src.block, 3), held, tail: Tail::Exact }.into()],
        dst: vec![DstPaged { table: table(dst.block, 8), cached: Tokens::new(16) }.into()],
    };
    let bound = BoundRequest::new(&c, request).unwrap();
    let lens = |m: &Manifest, r: RankId| m.region_lens(r).iter().map(|b| usize::try_from(b.get()).unwrap()).collect();
    let of = |p: &kvferry_geometry::peers::RankPair| {
        let batch = PairPlan::new(&c, &peers, p.src(), p.dst()).unwrap().resolve(&bound).unwrap();
        (batch, lens(c.src(), p.src()), lens(c.dst(), p.dst()))
    };
    peers.pairs().iter().map(of).collect()
}

type Memory = Vec<Vec<u8>>;

fn run(batch: &Batch, src: &Memory, dst: &mut Memory) -> u64 {
    let (mut cursor, mut out, mut moves) = (batch.cursor(), [Descriptor::default(); 64], 0);
    loop {
        let n = cursor.fill(&mut out);
        if n == 0 {
            return moves;
        }
        moves += n as u64;
        for d in &out[..n] {
            let at = |o: u64| usize::try_from(o).unwrap();
            let from = &src[at(d.src_region.get().into())][at(d.src_offset)..at(d.src_offset + d.len)];
            dst[at(d.dst_region.get().into())][at(d.dst_offset)..at(d.dst_offset + d.len)].copy_from_slice(from);
        }
    }
}

/// The descriptors on the wire: (direct, staged at the destination, staged at the source), over all pairs.
fn staged_equals_direct(src: Shape, dst: Shape) -> (u64, u64, u64) {
    let mut counts = (0, 0, 0);
    for (direct, src_lens, dst_lens) in batches(src, dst) {
        let mut seed = 0u8;
        let mut byte = || {
            seed = seed.wrapping_mul(31).wrapping_add(17);
            seed
        };
        let from: Memory = src_lens.iter().map(|&n| (0..n).map(|_| byte()).collect()).collect();
        let empty: Memory = dst_lens.iter().map(|&n| vec![0xee; n]).collect();
        let mut expected = empty.clone();
        counts.0 += run(&direct, &from, &mut expected);
        assert_ne!(expected, empty);
        for (place, count) in [(Place::Destination, &mut counts.1), (Place::Source, &mut counts.2)] {
            let staged = Staged::new(&direct, place, RegionId::ZERO).unwrap();
            assert_eq!(staged.bytes, direct.bytes().get());
            let mut buffer: Memory = vec![vec![0xbb; usize::try_from(staged.bytes).unwrap()]];
            let mut got = empty.clone();
            if place == Place::Destination {
                *count += run(&staged.wire, &from, &mut buffer);
                run(&staged.local, &buffer, &mut got);
            } else {
                run(&staged.local, &from, &mut buffer);
                *count += run(&staged.wire, &buffer, &mut got);
            }
            assert!(got == expected, "{place} differs from direct");
        }
    }
    counts
}

#[test]
fn staged_moves_what_direct_moves() {
    let styles = [
        LayoutStyle::HND,
        LayoutStyle::NHD,
        LayoutStyle::PLANES,
        LayoutStyle::PACKED_ROWS,
        LayoutStyle { kernel_block: Some(4), ..LayoutStyle::PACKED_ROWS },
    ];
    let mut shapes = Vec::new();
    for style in styles {
        for (tp, block) in [(1, 16), (2, 8), (4, 16), (3, 64), (2, 24)] {
            shapes.push(Shape { tp, block, style });
        }
    }
    let mut fewer = 0;
    for &src in &shapes {
        for &dst in &shapes {
            let (direct, at_dst, at_src) = staged_equals_direct(src, dst);
            // Never much worse: only neighbours of different phases that touch may come apart.
            assert!(at_dst.max(at_src) * 4 <= direct * 5, "{direct} descriptors direct, {at_dst} and {at_src} staged");
            fewer += u64::from(at_dst.min(at_src) < direct);
        }
    }
    assert!(fewer > 300, "staging has fewer descriptors for {fewer} of 625 pairs only");
}

#[test]
fn a_block_that_is_whole_at_the_anchor_is_one_descriptor() {
    let shape = |tp, block, style| Shape { tp, block, style };
    // 134 tokens after the 16 cached: 9 source blocks of 16, the last in part.
    let (hnd, nhd) = (LayoutStyle::HND, LayoutStyle::NHD);
    let (direct, at_dst, _) = staged_equals_direct(shape(1, 16, nhd), shape(1, 16, hnd));
    assert_eq!((direct, at_dst), (u64::from(LAYERS) * 134 * 4, u64::from(LAYERS) * 9));
    // A source block of 64 feeds four destination blocks, in stripes of every head, but is read whole where all of it moves:
    // block 1. Of block 0 three quarters move, of block 2 a quarter and 6 tokens, in stripes as they are.
    let (direct, at_dst, at_src) = staged_equals_direct(shape(1, 64, hnd), shape(1, 16, hnd));
    assert_eq!(direct, u64::from(LAYERS) * 9 * 4);
    assert_eq!(at_dst, u64::from(LAYERS) * (3 * 4 + 1 + 2 * 4));
    // Gathered at the source, a destination block is written whole, but for the last.
    assert_eq!(at_src, u64::from(LAYERS) * (8 + 4));
    // Rows of all layers at the source, a region for each layer at the destination.
    let (direct, at_dst, _) = staged_equals_direct(shape(1, 16, LayoutStyle::PACKED_ROWS), shape(1, 16, hnd));
    assert_eq!(direct, u64::from(LAYERS) * (8 + 4));
    assert_eq!(at_dst, 8 + u64::from(LAYERS) * 4);
}

#[test]
fn the_cost_model_stages_when_descriptors_are_dear_and_the_pool_is_large_enough() {
    let nhd = Shape { tp: 1, block: 16, style: LayoutStyle::NHD };
    let hnd = Shape { style: LayoutStyle::HND, ..nhd };
    let (direct, ..) = batches(nhd, hnd).remove(0);
    let pools = Pools { source: 1 << 20, destination: 1 << 20 };
    let dear = CostModel { descriptor_ns: 10_000, ..CostModel::default() };
    let choice = dear.compare(&direct, pools);
    assert_eq!(choice.best.place, Place::Destination);
    assert_eq!(choice.best.descriptors, u64::from(LAYERS) * 9);
    assert!(choice.best.ns < choice.direct.ns && !dear.direct_is_best(&direct));
    // The pool is a byte too small.
    let small = Pools { source: 0, destination: direct.bytes().get() - 1 };
    let choice = dear.compare(&direct, small);
    assert_eq!(choice.best.place, Place::Direct);
    assert!(!choice.destination.unwrap().fits);
    // Descriptors cost nothing.
    let free = CostModel { descriptor_ns: 0, ..CostModel::default() };
    assert_eq!(free.compare(&direct, pools).best.place, Place::Direct);
    assert!(free.direct_is_best(&direct));
    assert!(Staged::new(&direct, Place::Direct, RegionId::ZERO).is_none());
}

/// Both engines compute a staged batch for themselves, so its order is part of what they agree on: where this changes, peers
/// of another version must not gather for each other.
#[test]
fn the_order_of_a_staged_batch_is_pinned() {
    let src = Shape { tp: 2, block: 64, style: LayoutStyle::PACKED_ROWS };
    let dst = Shape { tp: 4, block: 24, style: LayoutStyle::NHD };
    let mut sum = 0xcbf2_9ce4_8422_2325u64;
    for (direct, ..) in batches(src, dst) {
        let staged = Staged::new(&direct, Place::Source, RegionId::new(7)).unwrap();
        for batch in [&direct, &staged.local, &staged.wire] {
            let (mut cursor, mut out) = (batch.cursor(), [Descriptor::default(); 64]);
            loop {
                let n = cursor.fill(&mut out);
                if n == 0 {
                    break;
                }
                for d in &out[..n] {
                    for number in
                        [d.src_region.get().into(), d.dst_region.get().into(), d.src_offset, d.dst_offset, d.len]
                    {
                        sum = (sum ^ number).wrapping_mul(0x0100_0000_01b3);
                    }
                }
            }
        }
    }
    assert_eq!(sum, 6_516_940_189_161_489_781);
}
