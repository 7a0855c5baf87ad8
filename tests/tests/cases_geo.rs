//! GEO cases: tensor-parallel sizes that differ, GQA replicas, token-major layouts, ranks of different capacity.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry_geometry::layout::{LayoutError, LayoutStyle, View};
use kvferry_geometry::manifest::ManifestError;
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_tests::by_hand::{Engine, Pair, kv, request};
use kvferry_tests::over_mem::World;
use kvferry_transport::mem::MemFaults;

/// The length of a block of the first item on every rank.
fn block_lens(engine: &Engine) -> Vec<u64> {
    let lens = engine.ranks().into_iter().map(|r| r.layout.views[0].as_ref().expect("placed").stride().get());
    lens.collect()
}

#[test]
fn geo_01_block_length_follows_heads_not_tp() {
    for (tp, len) in [(1, 16384), (2, 8192), (4, 4096), (8, 4096), (16, 4096)] {
        let engine = Engine::new(vec![kv("a", 4, 128)], tp);
        assert_eq!(block_lens(&engine), vec![len; tp as usize], "tp {tp}");
    }
}

#[test]
fn geo_01_replicated_heads_read_the_right_offset() {
    let block0 = request(16, &[0], &[0]);
    let pair = Pair::new(&Engine::new(vec![kv("a", 4, 128)], 2), &Engine::new(vec![kv("a", 4, 128)], 8));
    let bound = pair.bind(block0.clone());
    for (r, offset) in (0u32..).zip([0, 0, 4096, 4096, 0, 0, 4096, 4096]) {
        assert_eq!(pair.sources(r), [r / 4]);
        assert_eq!(pair.runs(r / 4, r, &bound), [(offset, 0, 4096)], "rank {r}");
    }
    assert_eq!(pair.consumers(0), [0, 1, 2, 3]);
    assert_eq!(pair.consumers(1), [4, 5, 6, 7]);

    for (heads, src_tp, dst_tp) in [(4, 4, 8), (8, 8, 16)] {
        let pair =
            Pair::new(&Engine::new(vec![kv("a", heads, 128)], src_tp), &Engine::new(vec![kv("a", heads, 128)], dst_tp));
        let bound = pair.bind(block0.clone());
        for r in 0..dst_tp {
            assert_eq!(pair.sources(r), [r / 2]);
            assert_eq!(pair.runs(r / 2, r, &bound), [(0, 0, 4096)]);
        }
        assert_eq!(pair.consumer_counts(), vec![2; src_tp as usize]);
    }
}

#[test]
fn geo_01_a_block_too_short_for_its_heads_is_refused() {
    // 8 of 32 heads on each rank, but a block as long as the peer's, which has 4: heads would overlap the next block.
    let engine = Engine::new(vec![kv("a", 32, 128)], 4);
    let mut ranks = engine.ranks();
    let View::Paged(view) = ranks[2].layout.views[0].as_mut().expect("placed") else { panic!("a paged item") };
    assert_eq!(view.block_stride.get(), 8 * 4096);
    view.block_stride = Bytes::new(4 * 4096);
    let errors = engine.assemble(ranks).expect_err("blocks overlap").0;
    let [ManifestError::Layout { rank, error: LayoutError::Overlap { first, .. } }] = errors.as_slice() else {
        panic!("{errors:?}");
    };
    assert_eq!((rank.get(), first.as_str()), (2, "a"));
}

#[test]
fn geo_02_replicas_stay_inside_their_block_and_registration() {
    let pair = Pair::new(
        &Engine::new(vec![kv("a", 2, 512)], 1).blocks(16, 10),
        &Engine::new(vec![kv("a", 2, 512)], 4).blocks(16, 10),
    );
    // Scattered at the destination, so that blocks stay apart.
    let dst = [9, 7, 5, 3, 1, 8, 6, 4, 2, 0];
    let bound = pair.bind(request(160, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], &dst));
    let mut largest_end = 0;
    for (r, offset) in (0u32..).zip([0, 0, 16384, 16384]) {
        let mut runs = pair.runs(0, r, &bound);
        runs.sort_unstable();
        let expected: Vec<_> =
            (0u64..).zip(dst).map(|(b, d)| (b * 32768 + offset, u64::from(d) * 16384, 16384)).collect();
        assert_eq!(runs, expected, "rank {r}");
        assert!(runs.iter().all(|&(src, _, len)| src / 32768 == (src + len - 1) / 32768));
        largest_end = runs.iter().map(|r| r.0 + r.2).max().max(Some(largest_end)).unwrap_or(0);
    }
    assert_eq!(largest_end, 327_680);
    assert_eq!(pair.consumers(0), [0, 1, 2, 3]);
    assert_eq!(pair.compatible.src().region_lens(RankId::ZERO), [Bytes::new(327_680)]);
}

#[test]
fn geo_05_one_rank_gathers_from_four() {
    let pair = Pair::new(&Engine::new(vec![kv("a", 8, 256)], 4), &Engine::new(vec![kv("a", 8, 256)], 1));
    assert_eq!(pair.sources(0), [0, 1, 2, 3]);
    assert_eq!(pair.consumer_counts(), [1, 1, 1, 1]);
    let bound = pair.bind(request(16, &[0], &[0]));
    for (i, offset) in (0u32..).zip([0, 16384, 32768, 49152]) {
        assert_eq!(pair.runs(i, 0, &bound), [(0, offset, 16384)]);
    }
}

#[test]
fn geo_06_token_major_is_not_sliced_as_head_major() {
    // One block, K and V apart, 64 B each; rank 1 of 2 wants heads 2 and 3.
    let items = || vec![kv("a", 4, 4)];
    let pair = |style| {
        let style = LayoutStyle { components: LayoutStyle::PLANES.components, ..style };
        Pair::new(
            &Engine::new(items(), 1).blocks(4, 1).style(style),
            &Engine::new(items(), 2).blocks(4, 1).style(style),
        )
    };
    let with_v = |k: &[(u64, u64, u64)]| -> Vec<_> {
        k.iter().copied().chain(k.iter().map(|&(src, dst, len)| (src + 64, dst + 32, len))).collect()
    };
    let hnd = pair(LayoutStyle::HND);
    assert_eq!(hnd.runs(0, 1, &hnd.bind(request(4, &[0], &[0]))), with_v(&[(32, 0, 32)]));
    let nhd = pair(LayoutStyle::NHD);
    let expected = with_v(&[(8, 0, 8), (24, 8, 8), (40, 16, 8), (56, 24, 8)]);
    assert_eq!(nhd.runs(0, 1, &nhd.bind(request(4, &[0], &[0]))), expected);
    // Equal sizes of token-major engines copy whole planes.
    let equal = Pair::new(
        &Engine::new(items(), 1).blocks(4, 1).style(LayoutStyle::NHD),
        &Engine::new(items(), 1).blocks(4, 1).style(LayoutStyle::NHD),
    );
    assert_eq!(equal.runs(0, 0, &equal.bind(request(4, &[0], &[0]))), [(0, 0, 128)]);
}

#[test]
fn geo_07_every_rank_has_its_own_block_count() {
    // K blocks of 4096 B, then a V plane of equal length; ranks 0 and 1 of the source have different capacity.
    let items = || vec![kv("a", 2, 256)];
    let engine = |blocks| Engine::new(items(), 2).style(LayoutStyle::PLANES).blocks(16, blocks);
    let source = engine(111_680);
    let mut ranks = source.ranks();
    ranks[1] = engine(111_488).ranks().swap_remove(1);
    let source = source.assemble(ranks).expect("capacities may differ");
    let pair = Pair::of(source, engine(211).manifest());
    let bound = pair.bind(request(16, &[7], &[0]));
    for (rank, v_plane, index) in [(0, 457_441_280, 111_687), (1, 456_654_848, 111_495)] {
        let runs = pair.runs(rank, rank, &bound);
        assert_eq!(runs, [(7 * 4096, 0, 4096), (v_plane + 7 * 4096, 211 * 4096, 4096)]);
        assert_eq!(runs[1].0 / 4096, index);
    }
    // Only ids that every rank has are taken.
    assert_eq!(pair.compatible.src().blocks(kvferry_geometry::units::GroupId::ZERO).get(), 111_488);
}

#[test]
fn geo_05_three_of_four_completions_are_not_all() {
    let pair = Pair::new(&Engine::new(vec![kv("a", 8, 256)], 4), &Engine::new(vec![kv("a", 8, 256)], 1));
    let bound = pair.bind(request(16, &[0], &[0]));
    for lost in 0..4 {
        let mut world = World::new(&pair, 0xEE);
        world.set_faults(0, MemFaults { lose_completion: [u64::from(lost)].into(), ..MemFaults::default() });
        let pull = world.pull(&pair, &bound);
        let ended: Vec<u32> = (0..4).filter(|&src| pull.end(src, 0).is_some()).collect();
        assert_eq!(ended, (0..4).filter(|&src| src != lost).collect::<Vec<_>>());
        assert!(!pull.is_done());
    }
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert_eq!(world.dst_memory(), pair.deliver(&bound, 0xEE));
    for src in 0..4 {
        assert_eq!(world.notices(src), [0]);
    }
}
