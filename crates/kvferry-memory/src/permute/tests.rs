use kvferry_geometry::batch::{Base, Batch, Dim, Nest, PairRun, Part, Section};
use kvferry_transport::conformance::sample::{Memory, Rng, Sample, sample};

use super::*;

/// Samples of a normal run; an interpreter does fewer.
const SEEDS: u64 = if cfg!(miri) { 4 } else { 300 };

fn below(rng: &mut Rng, n: usize) -> usize {
    usize::try_from(rng.below(n as u64)).unwrap()
}

fn zeroed(len: usize) -> Region {
    Region::zeroed(len).unwrap()
}

/// Does the sample with so many threads and checks every byte of both sides.
fn check(sample: &Sample, rng: &mut Rng, what: &str) {
    for stream in [false, true] {
        let memory = Memory::new(sample, rng, zeroed);
        let find = |regions: &[Region], id: RegionId| regions.get(id.index()).cloned();
        let src = |id| find(&memory.src, id);
        let mut permute = Permute::new(sample.batch.clone(), src, |id| find(&memory.dst, id)).unwrap();
        permute.stream = stream;
        let threads = 1 + below(rng, 8);
        let pieces = pair_shares(&sample.batch, threads + below(rng, 5));
        let stats = permute.run_pieces(threads, &pieces);
        assert_eq!(stats.bytes, sample.batch.bytes(), "{what}, {threads} threads, stream {stream}");
        memory.check(sample).unwrap_or_else(|e| panic!("{what}, {threads} threads, stream {stream}: {e}"));
    }
}

#[test]
fn random_batches_are_what_the_cursor_says() {
    for seed in 0..SEEDS {
        let mut rng = Rng::new(seed);
        let about = if cfg!(miri) { 300 } else { 6000 };
        let sample = sample(&mut rng, about);
        check(&sample, &mut rng, &format!("seed {seed}"));
    }
}

/// One part over some pairs in one region each; the regions end with the last byte of a run, so that whatever goes past it
/// goes out of bounds.
fn tight(nest: Nest, pairs: Vec<PairRun>, block: (u64, u64), start: (u64, u64)) -> Sample {
    let zero = RegionId::new(0);
    let base = Base { src_region: zero, dst_region: zero, src_offset: start.0, dst_offset: start.1 };
    let reach = |stride: fn(&Dim) -> u64| nest.dims.iter().map(|d| (d.count - 1) * stride(d)).sum::<u64>() + nest.run;
    let last = |id: fn(&PairRun) -> u32| pairs.iter().map(|p| u64::from(id(p) + p.count - 1)).max().unwrap();
    let src = Bytes::new(start.0 + last(|p| p.src) * block.0 + reach(|d| d.src_stride));
    let dst = Bytes::new(start.1 + last(|p| p.dst) * block.1 + reach(|d| d.dst_stride));
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: block.0,
        dst_block_stride: block.1,
        src_step: 1,
        dst_step: 1,
        nest,
        pairs: pairs.into(),
    };
    let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    let batch = Arc::new(batch.check(&[src], &[dst]).unwrap());
    Sample { batch, src_lens: vec![src], dst_lens: vec![dst] }
}

#[test]
fn matrices_of_any_shape_are_turned_over() {
    const LONG: [usize; 11] = [9, 3, 1, 2, 4, 5, 8, 12, 16, 33, 70];
    for seed in 0..2 * SEEDS {
        let mut rng = Rng::new(seed);
        let run = [1, 2, 2, 2, 4, 4, 8, 16, 32, 64, 6][below(&mut rng, 11)];
        let pick = |rng: &mut Rng| LONG[below(rng, if cfg!(miri) { 3 } else { LONG.len() })] as u64;
        let (a, b) = (pick(&mut rng), pick(&mut rng));
        let pad = |rng: &mut Rng| if rng.below(2) == 0 { 0 } else { rng.below(12) };
        // `a` is the inner loop at the source, `b` at the destination; either may be the inner one of the nest. Now and then
        // elements lie apart, or places of the source lie over each other.
        let apart = |rng: &mut Rng| if rng.below(6) == 0 { run + rng.below(5) } else { run };
        let (src, dst) = (apart(&mut rng), apart(&mut rng));
        let over = rng.below(6) == 0;
        let src_place = if over { rng.below(a * src) } else { a * src + pad(&mut rng) };
        let loops = [
            Dim { count: a, src_stride: src, dst_stride: b * dst + pad(&mut rng) },
            Dim { count: b, src_stride: src_place, dst_stride: dst },
        ];
        let swap = rng.below(2) == 0;
        let dims = if swap { [loops[1], loops[0]] } else { loops };
        let nest = Nest { dims: dims.into_iter().collect(), run };
        let block = (b * loops[1].src_stride + pad(&mut rng), a * loops[0].dst_stride + pad(&mut rng));
        let pairs = vec![PairRun { src: 1, dst: 0, count: 2 }, PairRun { src: 0, dst: 2, count: 1 }];
        let start = (rng.below(20), rng.below(2) * rng.below(20));
        check(&tight(nest, pairs, block, start), &mut rng, &format!("seed {seed}: {a} x {b} of {run} B"));
    }
}

#[test]
fn runs_of_any_length_and_alignment() {
    let lens: &[u64] = if cfg!(miri) { &[70] } else { &[3, 17, 64, 100, 128, 256, 512, 513, 1024, 4096, 5000] };
    for &run in lens {
        for (gap, start) in [((0, 64), (0, 0)), ((64, 0), (5, 64)), ((7, 3), (1, 2)), ((0, 0), (64, 63))] {
            let outer = Dim { count: 3, src_stride: run + gap.0, dst_stride: 5 * (run + gap.1) };
            let inner = Dim { count: 5, src_stride: 3 * (run + gap.0), dst_stride: run + gap.1 };
            for dims in [vec![outer, inner], vec![inner], vec![]] {
                let what = format!("{run} B, gaps {gap:?}, start {start:?}, {} loops", dims.len());
                let nest = Nest { dims: dims.into_iter().collect(), run };
                let block = (15 * (run + gap.0), 15 * (run + gap.1));
                let pairs = vec![PairRun { src: 2, dst: 1, count: 1 }, PairRun { src: 0, dst: 0, count: 1 }];
                check(&tight(nest, pairs, block, start), &mut Rng::new(run), &what);
            }
        }
    }
}

#[test]
fn slices_of_any_size_make_the_whole() {
    for seed in 0..SEEDS {
        let mut rng = Rng::new(seed);
        let sample = sample(&mut rng, if cfg!(miri) { 200 } else { 1000 });
        let memory = Memory::new(&sample, &mut rng, zeroed);
        let permute = Permute::new(
            sample.batch.clone(),
            |id| memory.src.get(id.index()).cloned(),
            |id| memory.dst.get(id.index()).cloned(),
        );
        let permute = permute.unwrap();
        let (mut at, mut sum) = (0, 0);
        while at < permute.bytes() {
            let end = at + 1 + rng.below(300);
            sum += permute.copy(at..end).bytes.get();
            at = end;
        }
        assert_eq!(sum, permute.bytes());
        memory.check(&sample).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// Not for interpreters: megabytes take them minutes, and the pieces are those of the other tests.
#[cfg(not(miri))]
#[test]
fn large_batches_by_threads_of_their_own() {
    let dims =
        [Dim { count: 8, src_stride: 256, dst_stride: 4096 }, Dim { count: 16, src_stride: 2048, dst_stride: 256 }];
    let pairs = (0..600).map(|i| PairRun { src: i, dst: (i * 7) % 601, count: 1 }).collect();
    let sample = tight(Nest { dims: dims.into_iter().collect(), run: 256 }, pairs, (32 << 10, 32 << 10), (0, 0));
    for threads in [0, 1, 3] {
        let memory = Memory::new(&sample, &mut Rng::new(1), zeroed);
        let first = |regions: &[Region]| regions.first().cloned();
        let permute = Permute::new(sample.batch.clone(), |_| first(&memory.src), |_| first(&memory.dst)).unwrap();
        assert!(permute.stream && !permute.clone().read_soon().stream);
        assert_eq!(permute.run(threads), Stats { bytes: Bytes::new(600 * (32 << 10)), descriptors: 600 * 128 });
        memory.check(&sample).unwrap();
    }
}

/// A batch of one run from source region 1 to destination region 0; lengths 10 and 20.
fn one() -> Arc<BoundedBatch> {
    let base = Base { src_region: RegionId::new(1), dst_region: RegionId::new(0), src_offset: 0, dst_offset: 0 };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: 0,
        dst_block_stride: 0,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(10),
        pairs: vec![PairRun { src: 0, dst: 0, count: 1 }].into(),
    };
    let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    Arc::new(batch.check(&[Bytes::new(1), Bytes::new(10)], &[Bytes::new(20)]).unwrap())
}

#[test]
fn everything_that_does_not_fit_is_told() {
    let (src, dst) = (RegionId::new(1), RegionId::new(0));
    let missing = Permute::new(one(), |_| None, |_| None).unwrap_err();
    let unknown = |side, region| PermuteError::UnknownRegion { side, region };
    assert_eq!(missing, [unknown(Side::Src, src), unknown(Side::Dst, dst)]);

    let short = Permute::new(one(), |_| Some(zeroed(11)), |_| Some(zeroed(19))).unwrap_err();
    let length = |side, region, expected, got| {
        let (expected, got) = (Bytes::new(expected), Bytes::new(got));
        PermuteError::Length { side, region, expected, got }
    };
    assert_eq!(short, [length(Side::Src, src, 10, 11), length(Side::Dst, dst, 20, 19)]);
    assert_eq!(
        short[0].to_string(),
        "the batch was proven against 10 B for source region 1, which has 11 B; prove it again"
    );

    let host = zeroed(20);
    let start = std::ptr::NonNull::new(host.as_ptr()).unwrap();
    // SAFETY: the bytes are owned by `host`, which is the owner given; as device memory nobody looks at them.
    let device = unsafe { Region::from_raw(start, 20, MemoryKind::Device(2), Arc::new(host)) };
    let kind = Permute::new(one(), |_| Some(zeroed(10)), |_| Some(device.clone())).unwrap_err();
    assert_eq!(kind, [PermuteError::NotHost { side: Side::Dst, region: dst, kind: MemoryKind::Device(2) }]);
}

#[test]
fn sources_and_destinations_must_be_apart() {
    let memory = zeroed(64);
    let part = |at, len| memory.part(at, len);
    for (at, shared) in [(0, 10), (5, 10), (15, 5), (20, 0), (30, 0)] {
        let bound = Permute::new(one(), |_| part(at, 10), |_| part(0, 20));
        if shared == 0 {
            assert_eq!(bound.unwrap().run(1).bytes, Bytes::new(10));
            continue;
        }
        let (src, dst, bytes) = (RegionId::new(1), RegionId::new(0), Bytes::new(shared));
        assert_eq!(bound.unwrap_err(), [PermuteError::Overlap { src, dst, bytes }], "at {at}");
    }
    // What the batch does not name may be anything.
    let named = |id: RegionId| if id.index() == 1 { part(20, 10) } else { part(0, 20) };
    assert!(Permute::new(one(), named, named).is_ok());
}

#[test]
fn an_empty_batch_needs_no_memory() {
    let batch = Arc::new(Batch::default().check(&[Bytes::new(5)], &[]).unwrap());
    let permute = Permute::new(batch, |_| None, |_| None).unwrap();
    assert_eq!(permute.run(4), Stats::default());
    assert_eq!(permute.copy(0..10), Stats::default());
}
