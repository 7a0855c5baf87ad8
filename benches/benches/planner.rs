//! The planner: plan of a rank pair, resolve of a request, expansion to flat descriptors.
//!
//! `resolve` starts from block ids as an engine has them: making the tables, proving the request (ids in range, no
//! repeat) and multiplying out are all inside. `expand` reuses one small buffer; `expand_fresh` fills new memory.
#![allow(clippy::unwrap_used, reason = "a benchmark whose shape is wrong has nothing to measure")]
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_benches::{llama_70b, scattered, whole};
use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::BlockTable;
use kvferry_geometry::units::{BlockId, RankId};

const BLOCKS: u32 = 1 << 17;

fn pair(src_tp: u32, dst_tp: u32, src_block: u32, dst_block: u32, style: LayoutStyle) -> (Compatible, PairPlan) {
    let src = llama_70b(src_tp, src_block, BLOCKS, style);
    let dst = llama_70b(dst_tp, dst_block, BLOCKS, style);
    let c = Compatible::new(src, dst).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
    (c, plan)
}

fn plan(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan_pair_80_items");
    for (name, src_tp, dst_tp, style) in [
        ("tp8_to_tp8_hnd", 8, 8, LayoutStyle::HND),
        ("tp8_to_tp4_hnd", 8, 4, LayoutStyle::HND),
        ("tp8_to_tp4_nhd", 8, 4, LayoutStyle::NHD),
    ] {
        let (compatible, _) = pair(src_tp, dst_tp, 16, 16, style);
        let peers = PeerMap::new(&compatible, 0).unwrap();
        group.bench_function(name, |b| {
            b.iter(|| PairPlan::new(black_box(&compatible), &peers, RankId::ZERO, RankId::ZERO).unwrap());
        });
    }
    group.finish();
    c.bench_function("peer_map_tp8_to_tp4_80_items", |b| {
        let (compatible, _) = pair(8, 4, 16, 16, LayoutStyle::HND);
        b.iter(|| PeerMap::new(black_box(&compatible), 3).unwrap());
    });
}

fn resolve(c: &mut Criterion) {
    let mut group = c.benchmark_group("resolve_80_items");
    let (compatible, plan) = pair(8, 4, 16, 16, LayoutStyle::HND);
    for blocks in [1024u32, 8192, 65_536] {
        let (from, to) = (scattered(blocks, BLOCKS, 77_777), scattered(blocks, BLOCKS, 31_415));
        let tokens = u64::from(blocks) * 16;
        group.bench_with_input(BenchmarkId::new("scattered", blocks), &blocks, |b, _| {
            b.iter(|| {
                let (src, dst) = (BlockTable::new(0, black_box(&from)), BlockTable::new(0, black_box(&to)));
                plan.resolve(&whole(&compatible, tokens, src, dst)).unwrap()
            });
        });
        let bound = whole(&compatible, tokens, BlockTable::new(0, &from), BlockTable::new(0, &to));
        group.bench_with_input(BenchmarkId::new("scattered_bound", blocks), &blocks, |b, _| {
            b.iter(|| plan.resolve(black_box(&bound)).unwrap());
        });
        group.bench_with_input(BenchmarkId::new("contiguous", blocks), &blocks, |b, _| {
            b.iter(|| {
                let src = BlockTable::contiguous(0, BlockId::new(7), black_box(blocks));
                let dst = BlockTable::contiguous(0, BlockId::new(9), black_box(blocks));
                plan.resolve(&whole(&compatible, tokens, src, dst)).unwrap()
            });
        });
    }
    group.finish();
}

fn expand(c: &mut Criterion) {
    let mut group = c.benchmark_group("expand");
    let blocks = 65_536u32;
    for (name, src_tp, dst_tp, style) in
        [("pages", 8, 8, LayoutStyle::HND), ("head_slices_nhd", 8, 4, LayoutStyle::NHD)]
    {
        let (compatible, plan) = pair(src_tp, dst_tp, 16, 16, style);
        let (from, to) = (scattered(blocks, BLOCKS, 77_777), scattered(blocks, BLOCKS, 31_415));
        let bound = whole(&compatible, u64::from(blocks) * 16, BlockTable::new(0, &from), BlockTable::new(0, &to));
        let batch = plan.resolve(&bound).unwrap();
        let count = batch.descriptors();
        group.throughput(Throughput::Elements(count));
        group.sample_size(20);
        group.bench_function(BenchmarkId::new("reused_buffer", name), |b| {
            let mut buffer = vec![Descriptor::default(); 512];
            b.iter(|| {
                let mut cursor = batch.cursor();
                let mut seen = 0;
                loop {
                    let n = cursor.fill(&mut buffer);
                    if n == 0 {
                        break;
                    }
                    seen += n;
                    black_box(&mut buffer);
                }
                assert_eq!(seen as u64, count);
            });
        });
        if name == "pages" {
            group.bench_function(BenchmarkId::new("fresh_memory", name), |b| {
                b.iter(|| {
                    let mut all = vec![Descriptor::default(); usize::try_from(count).unwrap()];
                    assert_eq!(batch.cursor().fill(&mut all), all.len());
                    black_box(all);
                });
            });
            // The machine's limit beside it: the same memory, filled with one descriptor.
            group.bench_function(BenchmarkId::new("fresh_memory_limit", name), |b| {
                let one = Descriptor { len: 1, ..Descriptor::default() };
                b.iter(|| black_box(vec![black_box(one); usize::try_from(count).unwrap()]));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, plan, resolve, expand);
criterion_main!(benches);
