//! Slices against the flat expansion of the whole.

use super::*;
use crate::batch::Descriptor;
use crate::batch::Pairs;
use crate::units::RegionId;

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn small(&mut self, n: u64) -> u32 {
        u32::try_from(self.below(n)).unwrap()
    }
}

/// The runs of batches one after the other, neighbours joined: what is the same however it is cut. Each is counted as it is
/// walked.
fn flat<'a>(batches: impl IntoIterator<Item = &'a Batch>) -> Vec<Descriptor> {
    let mut all: Vec<Descriptor> = Vec::new();
    for batch in batches {
        let (mut cursor, mut out, mut count) = (batch.cursor(), [Descriptor::default(); 7], 0);
        loop {
            let n = cursor.fill(&mut out);
            if n == 0 {
                assert_eq!(batch.descriptors(), count, "{batch:?}");
                break;
            }
            count += n as u64;
            for d in &out[..n] {
                assert!(d.len > 0);
                match all.last_mut() {
                    Some(last)
                        if (last.src_region, last.dst_region) == (d.src_region, d.dst_region)
                            && last.src_offset + last.len == d.src_offset
                            && last.dst_offset + last.len == d.dst_offset =>
                    {
                        last.len += d.len;
                    }
                    _ => all.push(*d),
                }
            }
        }
    }
    all
}

fn bounded(batch: Batch, lens: &[u64]) -> Arc<BoundedBatch> {
    let lens: Vec<Bytes> = lens.iter().map(|&n| Bytes::new(n)).collect();
    Arc::new(batch.check(&lens, &lens).unwrap())
}

fn sizes(whole: &Arc<BoundedBatch>, max: u64) -> Vec<u64> {
    whole.slices(Bytes::new(max)).map(|s| s.bytes().get()).collect()
}

/// All that slices promise, for one size.
fn check(whole: &Arc<BoundedBatch>, max: u64) -> usize {
    let slices: Vec<_> = whole.slices(Bytes::new(max)).collect();
    let bytes = whole.bytes().get();
    let longest = whole.batch().sections().iter().flat_map(|s| &s.parts).map(|p| p.nest.run).max().unwrap_or(0);
    for slice in &slices {
        let of_slice = slice.bytes().get();
        assert!(of_slice > 0 && of_slice <= max.max(1), "{of_slice} of {max}");
        // It was not checked; it would pass.
        let again = slice.batch().clone().check(whole.src_lens(), whole.dst_lens()).unwrap();
        assert_eq!(again, **slice);
    }
    assert_eq!(flat(slices.iter().map(|s| s.batch())), flat([whole.batch()]), "{max}");
    // Two neighbours together are more than a slice, but for what was not worth a cut.
    let full = |w: &[Arc<BoundedBatch>]| {
        let bytes: u64 = w.iter().map(|s| s.bytes().get()).sum();
        bytes > max - max / SMALL || longest > max / SMALL
    };
    assert!(slices.windows(2).all(full), "{max}: {:?}", sizes(whole, max));
    if bytes > 0 && bytes <= max {
        assert!(slices.len() == 1 && Arc::ptr_eq(&slices[0], whole), "it is not copied");
    }
    slices.len()
}

fn part(rng: &mut Rng) -> Part {
    let mut dims = ArrayVec::new();
    for _ in 0..rng.below(4) * rng.below(2) + rng.below(2) {
        // Also loops of one step, and strides that go back and forth in no order.
        dims.push(Dim { count: 1 + rng.below(4), src_stride: rng.below(90), dst_stride: rng.below(90) });
    }
    let run = 1 + rng.below(40);
    let adjacent = rng.below(3) == 0;
    let stride = |rng: &mut Rng| if adjacent { run } else { rng.below(300) };
    let pairs = (0..rng.below(5))
        .map(|_| PairRun { src: rng.small(9), dst: rng.small(9), count: 1 + rng.small(5) })
        .collect::<Vec<_>>();
    Part {
        src_add: rng.below(50),
        dst_add: rng.below(50),
        src_block_stride: stride(rng),
        dst_block_stride: stride(rng),
        src_step: rng.small(3),
        dst_step: rng.small(3),
        nest: Nest { dims, run },
        pairs: pairs.into(),
    }
}

fn random(rng: &mut Rng) -> Batch {
    let section = |rng: &mut Rng| {
        let base = |rng: &mut Rng| Base {
            src_region: RegionId::new(rng.small(2)),
            dst_region: RegionId::new(rng.small(2)),
            src_offset: rng.below(100),
            dst_offset: rng.below(100),
        };
        let bases = (0..rng.below(5)).map(|_| base(rng)).collect::<Vec<_>>();
        let parts = (0..rng.below(4)).map(|_| part(rng)).collect();
        Section { bases: bases.into(), parts }
    };
    Batch::new((0..rng.below(4)).map(|_| section(rng)).collect())
}

#[test]
fn the_slices_of_any_batch_are_the_batch() {
    let (mut rng, mut cut, mut most) = (Rng(7), 0, 0);
    for _ in 0..150 {
        let whole = bounded(random(&mut rng), &[1 << 20, 1 << 20]);
        let bytes = whole.bytes().get();
        for max in [0, 1, 2, 3, 7, 16, 41, 100, 1 + rng.below(bytes + 2), bytes.saturating_sub(1), bytes, u64::MAX] {
            let slices = check(&whole, max);
            cut += usize::from(slices > 1);
            most = most.max(slices);
        }
    }
    assert!(cut > 700 && most > 2_000, "{cut} were cut, into {most} at most");
}

fn one_part(bases: u64, pairs: Vec<PairRun>, nest: Nest, stride: u64, base_stride: u64) -> Batch {
    let base = |i: u64| Base {
        src_region: RegionId::ZERO,
        dst_region: RegionId::ZERO,
        src_offset: i * base_stride,
        dst_offset: i * base_stride,
    };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: stride,
        dst_block_stride: stride,
        src_step: 1,
        dst_step: 1,
        nest,
        pairs: pairs.into(),
    };
    Batch::new(vec![Section { bases: (0..bases).map(base).collect(), parts: vec![part] }])
}

#[test]
fn a_run_of_more_than_32_bits_is_cut() {
    const GIB: u64 = 1 << 30;
    let pair = vec![PairRun { src: 0, dst: 0, count: 1 }];
    let whole = bounded(one_part(1, pair, Nest::run(9 * GIB + 5), 0, 0), &[10 * GIB]);
    assert_eq!(sizes(&whole, 2 * GIB), [2 * GIB, 2 * GIB, 2 * GIB, 2 * GIB, GIB + 5]);
    check(&whole, GIB + 4097);
    // Cuts stay at multiples of a page where a slice has room for one.
    assert_eq!(sizes(&whole, 6 * GIB + 1), [6 * GIB, 3 * GIB + 5]);
    let slices = whole.slices(Bytes::new(8 << 20));
    assert_eq!(slices.count(), 9 * 128 + 1);
}

#[test]
fn pairs_and_loops_of_more_than_32_bits_are_cut() {
    const MIB: u64 = 1 << 20;
    let pairs = vec![PairRun { src: 7, dst: 0, count: 5_000 }, PairRun { src: 0, dst: 6_000, count: 1 }];
    let strided = Dim { count: 3, src_stride: MIB, dst_stride: MIB };
    let nest = Nest { dims: [strided].into_iter().collect(), run: MIB - 1 };
    let whole = bounded(one_part(3, pairs, nest, 4 * MIB, 0), &[u64::MAX]);
    assert!(whole.bytes().get() > 10 << 32);
    for max in [5 << 32, 1 << 33, 64 * MIB] {
        check(&whole, max);
    }
    // Two pairs of three steps each, and not a step of the third.
    assert_eq!(sizes(&whole, 6 * MIB)[..3], [6 * (MIB - 1); 3]);
}

#[test]
fn what_is_not_cut_is_shared() {
    // 8 bases of two parts over one list of 100 pairs of 10 bytes: 2,000 bytes a base.
    let pairs: Pairs = (0..100).map(|i| PairRun { src: 2 * i, dst: 2 * i, count: 1 }).collect::<Vec<_>>().into();
    let batch = one_part(8, Vec::new(), Nest::run(10), 10, 2_000);
    let mut section = batch.sections()[0].clone();
    let part = Part { pairs: pairs.clone(), ..section.parts[0].clone() };
    section.parts = vec![part.clone(), Part { dst_add: 5, ..part }];
    let whole = bounded(Batch::new(vec![section]), &[1 << 20]);
    check(&whole, 4_000);
    let slices: Vec<_> = whole.slices(Bytes::new(4_000)).collect();
    assert_eq!(slices.len(), 4);
    for slice in &slices {
        let [section] = slice.batch().sections() else { panic!("one section") };
        assert_eq!(section.bases.len(), 2);
        assert!(section.parts.iter().all(|p| p.pairs.id() == pairs.id()), "the list of pairs is shared");
    }
    // A base, and a part of the next, which are shared too, and its other part's half.
    let first = whole.slices(Bytes::new(3_500)).next().unwrap();
    let [one, cut] = first.batch().sections() else { panic!("two sections") };
    assert_eq!((one.bases.len(), cut.bases.len(), cut.parts.len()), (1, 1, 2));
    assert_eq!([one.parts[0].pairs.id(), one.parts[1].pairs.id(), cut.parts[0].pairs.id()], [pairs.id(); 3]);
    assert_eq!(cut.parts[1].pairs.len(), 50);
    // A slice's rows are its own alone, however long the whole.
    assert!(slices.iter().all(|s| s.batch().rows() <= 2 + 2 * 100));
    let small: Vec<_> = whole.slices(Bytes::new(100)).collect();
    assert!(
        small.iter().all(|s| s.batch().rows() <= 2 * (1 + 10)),
        "{:?}",
        small.iter().map(|s| s.batch().rows()).max()
    );
}

/// A run is cut only where it is larger than a slice.
#[test]
fn runs_that_fit_stay_whole() {
    let pairs = vec![PairRun { src: 0, dst: 0, count: 6 }];
    let dims = [Dim { count: 4, src_stride: 100, dst_stride: 200 }];
    let whole =
        bounded(one_part(2, pairs, Nest { dims: dims.into_iter().collect(), run: 60 }, 1_000, 10_000), &[1 << 20]);
    for (max, size) in [(60, 60), (100, 60), (119, 60), (130, 120), (250, 240), (1_000, 960)] {
        let slices = sizes(&whole, max);
        assert!(slices[..slices.len() - 1].iter().all(|&s| s == size), "{max}: {slices:?}");
    }
    assert_eq!(sizes(&whole, 59)[..4], [59, 59, 59, 59], "one is cut, and then all that are cut anyway");
}
