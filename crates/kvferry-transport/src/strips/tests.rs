//! Strips against descriptors, byte by byte.

use super::*;
use crate::conformance::sample::{Rng, sample};
use kvferry_geometry::batch::Descriptor;

/// Every byte that the batch moves, in its order, by the cursor.
fn by_cursor(batch: &BoundedBatch) -> Vec<(u32, u64, u32, u64)> {
    let mut out = Vec::new();
    let mut cursor = batch.batch().cursor();
    let mut buffer = [Descriptor::default(); 7];
    loop {
        let n = cursor.fill(&mut buffer);
        if n == 0 {
            return out;
        }
        for d in &buffer[..n] {
            for i in 0..d.len {
                out.push((d.src_region.get(), d.src_offset + i, d.dst_region.get(), d.dst_offset + i));
            }
        }
    }
}

fn by_strips(strips: &mut Strips<'_>, mut budget: impl FnMut() -> u64) -> Vec<(u32, u64, u32, u64)> {
    let mut out = Vec::new();
    while let Some(s) = strips.next_within(budget()) {
        for r in 0..s.count {
            for i in 0..s.run {
                let (src, dst) = (s.src_offset + r * s.src_stride + i, s.dst_offset + r * s.dst_stride + i);
                out.push((s.src_region.get(), src, s.dst_region.get(), dst));
            }
        }
    }
    out
}

#[test]
fn strips_are_the_bytes_of_the_cursor_in_order() {
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let batch = sample(&mut rng, 4096).batch;
        let expected = by_cursor(&batch);
        let total = batch.bytes().get();
        assert_eq!(expected.len() as u64, total, "seed {seed}");
        let mut all = Strips::new(&batch, 0..total);
        assert_eq!(by_strips(&mut all, || u64::MAX), expected, "seed {seed}");
        assert_eq!(all.position(), total, "seed {seed}");
        let mut slices = Strips::new(&batch, 0..u64::MAX);
        assert_eq!(by_strips(&mut slices, || 1 + rng.below(700)), expected, "seed {seed}, in slices");
    }
}

#[test]
fn scattered_blocks_are_the_strips_they_stand_for() {
    let mut scattered = 0;
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let batch = sample(&mut rng, 4096).batch;
        let total = batch.bytes().get();
        let start = rng.below(total);
        let range = start..start + rng.below(total - start + 1);
        let (mut strips, mut out) = (Strips::new(&batch, range.clone()), Vec::new());
        loop {
            if let Some(s) = strips.next_scatter() {
                scattered += s.pairs.len();
                for pair in s.pairs {
                    for i in 0..s.run {
                        let src = s.src_offset + u64::from(pair.src) * s.src_block_stride + i;
                        let dst = s.dst_offset + u64::from(pair.dst) * s.dst_block_stride + i;
                        out.push((s.src_region.get(), src, s.dst_region.get(), dst));
                    }
                }
            } else if let Some(s) = strips.next() {
                for at in 0..s.bytes() {
                    let (r, i) = (at / s.run, at % s.run);
                    let (src, dst) = (s.src_offset + r * s.src_stride + i, s.dst_offset + r * s.dst_stride + i);
                    out.push((s.src_region.get(), src, s.dst_region.get(), dst));
                }
            } else {
                break;
            }
        }
        assert_eq!(out, by_strips(&mut Strips::new(&batch, range), || u64::MAX), "seed {seed}");
    }
    assert!(scattered > 100, "the samples have {scattered} scattered blocks");
}

#[test]
fn tiles_are_the_strips_they_stand_for() {
    let (mut wide, mut paired) = (0, 0);
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let batch = sample(&mut rng, 4096).batch;
        let total = batch.bytes().get();
        let start = if seed % 2 == 0 { 0 } else { rng.below(total) };
        let range = start..start + rng.below(total - start + 1);
        let (mut strips, mut out) = (Strips::new(&batch, range.clone()), Vec::new());
        loop {
            if let Some(t) = strips.next_tile() {
                wide += u64::from(t.outer.count > 1);
                let one = |p: &Part| p.nest.dims.len() == 1 && p.nest.dims[0] == t.inner;
                paired +=
                    u64::from(t.outer.count > 1 && batch.batch().sections().iter().any(|s| s.parts.iter().any(one)));
                for (o, i) in (0..t.outer.count).flat_map(|o| (0..t.inner.count).map(move |i| (o, i))) {
                    let src = t.src_offset + o * t.outer.src_stride + i * t.inner.src_stride;
                    let dst = t.dst_offset + o * t.outer.dst_stride + i * t.inner.dst_stride;
                    out.extend((0..t.run).map(|b| (t.src_region.get(), src + b, t.dst_region.get(), dst + b)));
                }
                assert_eq!(strips.position(), start + out.len() as u64, "seed {seed}");
            } else if let Some(s) = strips.next() {
                for at in 0..s.bytes() {
                    let (r, i) = (at / s.run, at % s.run);
                    let (src, dst) = (s.src_offset + r * s.src_stride + i, s.dst_offset + r * s.dst_stride + i);
                    out.push((s.src_region.get(), src, s.dst_region.get(), dst));
                }
            } else {
                break;
            }
        }
        assert_eq!(out, by_strips(&mut Strips::new(&batch, range), || u64::MAX), "seed {seed}");
    }
    assert!(wide > 100 && paired > 10, "only {wide} tiles of several steps, {paired} of them over pairs");
}

#[test]
fn any_range_is_its_part_of_the_whole() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let batch = sample(&mut rng, 2048).batch;
        let expected = by_cursor(&batch);
        let total = expected.len() as u64;
        for _ in 0..20 {
            let start = rng.below(total + 1);
            let end = start + rng.below(total - start + 1);
            let got = by_strips(&mut Strips::new(&batch, start..end), || u64::MAX);
            let (s, e) = (usize::try_from(start).unwrap(), usize::try_from(end).unwrap());
            assert_eq!(got, expected[s..e], "seed {seed}, {start}..{end}");
        }
    }
}

#[test]
fn shares_cover_the_batch_evenly() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let batch = sample(&mut rng, 4096).batch;
        let total = batch.bytes().get();
        let longest = Strips::new(&batch, 0..total).map(|s| s.run).max().unwrap_or(0);
        for n in 1..6u64 {
            let shares = shares(&batch, usize::try_from(n).unwrap());
            assert_eq!(shares.len() as u64, n);
            let mut at = 0;
            for share in &shares {
                assert_eq!(share.start, at);
                at = share.end;
                assert!(share.end - share.start <= total / n + 1 + longest, "seed {seed}: {shares:?} of {total}");
            }
            assert_eq!(at, total);
        }
    }
}

#[test]
fn pair_shares_cover_the_batch_and_keep_small_pairs_whole() {
    let mut whole = 0;
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let batch = sample(&mut rng, 4096).batch;
        let total = batch.bytes().get();
        for n in 1..6u64 {
            let plain = shares(&batch, usize::try_from(n).unwrap());
            let mut at = 0;
            for (share, plain) in pair_shares(&batch, usize::try_from(n).unwrap()).into_iter().zip(plain) {
                assert_eq!(share.start, at);
                at = share.end;
                assert!(share.end <= plain.end && plain.end - share.end <= total / n / 8, "seed {seed}");
                let inside = Strips::new(&batch, share.end..total).in_pair();
                assert!(inside == 0 || inside > total / n / 8, "seed {seed}: {inside} bytes of a pair are cut off");
                whole += u64::from(share.end < plain.end);
            }
            assert_eq!(at, total);
        }
    }
    assert!(whole > 50, "only {whole} cuts moved");
}
