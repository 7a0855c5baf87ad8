//! BLK cases: block sizes that differ between engines and between groups.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry_geometry::request::Request;
use kvferry_geometry::units::Tokens;
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, pieces, request, source_byte, table, tokens, wants};
use kvferry_tests::over_mem::World;

/// One head, 2 B of K and of V: 4 B a token.
fn engine(block: u32, blocks: u32) -> Engine {
    Engine::new(vec![kv("a", 1, 2)], 1).blocks(block, blocks)
}

#[test]
fn blk_01_a_source_block_twice_as_long_feeds_two() {
    let pair = Pair::new(&engine(32, 8), &engine(16, 16));
    let bound = pair.bind(request(64, &[5, 2], &[9, 4, 1, 12]));
    let mut runs = pair.runs(0, 0, &bound);
    runs.sort_unstable();
    let (p, d) = (128, 64);
    assert_eq!(
        runs,
        [(2 * p, d, 64), (2 * p + 64, 12 * d, 64), (5 * p, 9 * d, 64), (5 * p + 64, 4 * d, 64)],
        "halves of block 5 to 9 and 4, of block 2 to 1 and 12"
    );
}

#[test]
fn blk_01_neither_size_is_a_multiple_of_the_other() {
    // 16 tokens against 12: runs end where either side's block does.
    let pair = Pair::new(&engine(16, 8), &engine(12, 16));
    let bound = pair.bind(request(40, &[5, 2, 7], &[9, 4, 1, 12]));
    let mut runs = pair.runs(0, 0, &bound);
    runs.sort_unstable();
    let (p, d) = (64, 48);
    assert_eq!(
        runs,
        [
            (2 * p, 4 * d + 16, 32),
            (2 * p + 32, d, 32),
            (5 * p, 9 * d, 48),
            (5 * p + 48, 4 * d, 16),
            (7 * p, d + 32, 16),
            (7 * p + 16, 12 * d, 16),
        ],
        "tokens 0-11, 12-15 of block 5, then 16-23, 24-31 of block 2, then 32-35, 36-39 of block 7"
    );
    assert_eq!(pair.zeroed(0, &bound), [(0, 12 * d + 16, 32)]);
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    world.zero(&pair, &bound);
    assert!(world.dst_memory() == pair.deliver(&bound, 0xEE));
}

#[test]
fn blk_02_small_blocks_fill_large_ones_and_the_rest_is_zeroed() {
    let pair = Pair::new(&engine(4, 16), &engine(16, 8));
    let src: Vec<u32> = (1..=10).collect();
    let bound = pair.bind(request(40, &src, &[1, 2, 3]));
    // In pieces of 4 tokens (16 B), destination block 1 is pieces 4 to 7.
    let expected: Vec<(u64, u64)> = (1..=10).map(|p| (p, p + 3)).collect();
    assert_eq!(pieces(&pair.runs(0, 0, &bound), 16), expected);
    assert_eq!(pair.zeroed(0, &bound), [(0, 14 * 16, 2 * 16)], "pieces 14 and 15");
    assert_eq!(bound.moves()[0].range, tokens(0, 40));
    assert_eq!(bound.moves()[0].zero, tokens(40, 48));

    let memory = pair.deliver(&bound, 0xEE).swap_remove(0).swap_remove(0);
    for (at, &byte) in (0u64..).zip(&memory) {
        let expected = match at / 16 {
            4..14 => source_byte(0, 0, at - 3 * 16),
            14 | 15 => 0,
            _ => 0xEE,
        };
        assert_eq!(byte, expected, "byte {at}");
    }

    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    world.zero(&pair, &bound);
    assert_eq!(world.dst_memory(), [[memory]]);
}

#[test]
fn blk_02_scattered_large_blocks() {
    let pair = Pair::new(&engine(4, 16), &engine(8, 8));
    let bound = pair.bind(request(16, &[1, 2, 3, 4], &[0, 2]));
    assert_eq!(pieces(&pair.runs(0, 0, &bound), 16), [(1, 0), (2, 1), (3, 4), (4, 5)]);
    assert!(pair.zeroed(0, &bound).is_empty());
}

#[test]
fn blk_02_large_blocks_feed_small_ones() {
    let pair = Pair::new(&engine(16, 8), &engine(4, 16));
    let dst: Vec<u32> = (1..=10).collect();
    let bound = pair.bind(request(40, &[1, 2, 3], &dst));
    let expected: Vec<(u64, u64)> = (1..=10).map(|d| (d + 3, d)).collect();
    assert_eq!(pieces(&pair.runs(0, 0, &bound), 16), expected);
    assert!(pair.zeroed(0, &bound).is_empty(), "the ten blocks are full");
}

#[test]
fn blk_04_groups_differ_in_block_size_on_both_sides() {
    let items = || vec![kv("large", 1, 2), kv("small", 1, 2)];
    let src = Engine::new(items(), 1).groups(&[(&["large"], 256, 8), (&["small"], 4, 300)]);
    let dst = Engine::new(items(), 1).groups(&[(&["small"], 16, 80), (&["large"], 64, 32)]);
    let pair = Pair::new(&src, &dst);
    let up_to = |n: u32| table(&(0..n).collect::<Vec<_>>());
    let bound = pair.bind(Request {
        tokens: Tokens::new(1024),
        src: vec![holds(1024, up_to(4)), holds(1024, up_to(256))],
        dst: vec![wants(0, up_to(64)), wants(512, up_to(16))],
    });
    let all: Vec<_> = pair.descriptors(0, 0, &bound);
    let moved: Vec<_> =
        all.iter().map(|d| (d.src_region.get(), d.dst_region.get(), d.src_offset, d.dst_offset, d.len)).collect();
    // Groups are listed in each engine's own order; regions are the items'.
    let (large, small) = (0, 1);
    let by_item = |item: &str, m: &kvferry_geometry::manifest::Manifest| {
        let id = m.spec().find(&item.into()).expect("named");
        m.ranks()[0].layout.views[id.index()].as_ref().expect("placed").region().get()
    };
    assert_eq!((by_item("large", pair.compatible.src()), by_item("small", pair.compatible.src())), (large, small));
    let to = |item| by_item(item, pair.compatible.dst());
    let mut expected = vec![(large, to("large"), 2048, 2048, 2048), (small, to("small"), 0, 0, 4096)];
    expected.sort_unstable_by_key(|m| (m.1, m.3));
    assert_eq!(moved, expected);
}

#[test]
fn blk_04_block_size_is_per_group() {
    let items = || vec![kv("large", 1, 2), kv("small", 1, 2)];
    let engine = || Engine::new(items(), 1).groups(&[(&["large"], 256, 8), (&["small"], 4, 300)]);
    let pair = Pair::new(&engine(), &engine());
    let group_tokens: Vec<u64> = pair.compatible.src().groups().iter().map(|g| g.block_tokens.get()).collect();
    assert_eq!(group_tokens, [256, 4]);
    // 1024 tokens: 4 blocks and 256 blocks; reversed at the destination, so that they stay apart.
    let (large, small): (Vec<u32>, Vec<u32>) = ((0..4).collect(), (0..256).collect());
    let back = |ids: &[u32]| table(&ids.iter().rev().copied().collect::<Vec<_>>());
    let bound = pair.bind(Request {
        tokens: Tokens::new(1024),
        src: vec![holds(1024, table(&large)), holds(1024, table(&small))],
        dst: vec![wants(0, back(&large)), wants(0, back(&small))],
    });
    let all = pair.descriptors(0, 0, &bound);
    let lens = |region| all.iter().filter(|d| d.dst_region.get() == region).map(|d| d.len).collect::<Vec<_>>();
    assert_eq!(lens(0), vec![1024; 4]);
    assert_eq!(lens(1), vec![16; 256]);
}
