//! The cursor of a batch against the batch's formula.
#![allow(clippy::unwrap_used, reason = "a test")]

use kvferry_geometry::batch::{Base, Batch, Dim, Nest, PairRun, Part, Section};
use kvferry_geometry::units::RegionId;
use kvferry_oracle::{expand, flatten, joined};
use kvferry_tests::{Choices, sample};

/// Small numbers, so that neighbours often touch.
fn random_batch(c: &mut Choices) -> Batch {
    let small = |c: &mut Choices| c.pick(&[0, 1, 2, 4, 8, 3, 6, 12]);
    let small32 = |c: &mut Choices, low, high| u32::try_from(c.within(low, high)).unwrap();
    let mut sections = Vec::new();
    for _ in 0..c.within(0, 2) {
        let mut bases = Vec::new();
        for _ in 0..c.within(0, 3) {
            bases.push(Base {
                src_region: RegionId::new(u32::from(c.chance(20))),
                dst_region: RegionId::new(u32::from(c.chance(20))),
                src_offset: small(c),
                dst_offset: small(c),
            });
        }
        let mut parts = Vec::new();
        for _ in 0..c.within(0, 3) {
            let mut nest = Nest::run(c.pick(&[1, 2, 4]));
            for _ in 0..c.below(4) {
                nest.dims.push(Dim { count: c.within(1, 3), src_stride: small(c), dst_stride: small(c) });
            }
            let mut pairs = Vec::new();
            for _ in 0..c.within(0, 4) {
                pairs.push(PairRun { src: small32(c, 0, 4), dst: small32(c, 0, 4), count: small32(c, 1, 4) });
            }
            parts.push(Part {
                src_add: small(c),
                dst_add: small(c),
                src_block_stride: small(c),
                dst_block_stride: small(c),
                src_step: small32(c, 0, 2),
                dst_step: small32(c, 0, 2),
                nest,
                pairs: pairs.into(),
            });
        }
        sections.push(Section { bases: bases.into(), parts });
    }
    Batch::new(sections)
}

#[test]
fn the_cursor_moves_the_bytes_of_the_formula_in_its_order_whatever_the_buffers() {
    let mut c = Choices::seeded(5);
    for _ in 0..20_000 {
        let batch = random_batch(&mut c);
        let truth = expand(&batch).unwrap();
        let whole = flatten(&batch, &[truth.len() + 1]);
        assert_eq!(joined(&whole), joined(&truth), "{batch:?}");
        assert_eq!(whole.len() as u64, batch.descriptors(), "{batch:?}");
        assert_eq!(batch.bytes().get(), truth.iter().map(|d| d.len).sum::<u64>());
        assert_eq!(batch.is_empty(), truth.is_empty());
        let sizes: Vec<usize> = (0..5).map(|_| usize::try_from(c.within(1, 6)).unwrap()).collect();
        assert_eq!(flatten(&batch, &sizes), whole, "with buffers of {sizes:?}: {batch:?}");
    }
}

/// Neighbours are one descriptor also across parts and bases. Only where a loop of a nest happens to start again right
/// behind its own end are they left apart, since finding that would cost more than it saves.
#[test]
fn neighbours_in_order_are_one_descriptor() {
    let (mut descriptors, mut fewest) = (0, 0);
    for case in sample(6, 500) {
        for (_, _, batch) in case.plan().unwrap().batches {
            let flat = flatten(&batch, &[1 << 10]);
            descriptors += flat.len();
            fewest += joined(&flat).len();
            let looped = batch.sections().iter().flat_map(|s| &s.parts).any(|p| !p.nest.dims.is_empty());
            assert!(looped || joined(&flat) == flat, "{batch:?}");
        }
    }
    assert!(descriptors - fewest <= descriptors / 500, "{descriptors} descriptors where {fewest} would do");
}
