//! PFX cases: prefix hits, partial blocks, lists that grow.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry_geometry::request::Request;
use kvferry_geometry::units::Tokens;
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, pieces, request, source_byte, table, table_at, tokens, wants};
use kvferry_tests::over_mem::World;

/// One head, 4 B a token, blocks of 16 tokens: 64 B a block.
fn pair() -> Pair {
    let engine = || Engine::new(vec![kv("a", 1, 2)], 1).blocks(16, 64);
    Pair::new(&engine(), &engine())
}

/// Destination blocks that change, of 64 B each.
fn changed(pair: &Pair, request: Request) -> Vec<(u64, u64)> {
    pieces(&pair.runs(0, 0, &pair.bind(request)), 64)
}

#[test]
fn pfx_01_a_partial_hit_pairs_by_position() {
    let src: Vec<u32> = (10..20).collect();
    // Only the new blocks are listed, or all ten: the same four move.
    for dst in [table_at(6, &[46, 47, 48, 49]), table(&(40..50).collect::<Vec<_>>())] {
        let request =
            Request { tokens: Tokens::new(160), src: vec![holds(160, table(&src))], dst: vec![wants(96, dst)] };
        assert_eq!(changed(&pair(), request), [(16, 46), (17, 47), (18, 48), (19, 49)]);
    }
}

#[test]
fn pfx_01_a_hit_inside_a_block_leaves_its_head_untouched() {
    let pair = pair();
    let bound = pair.bind(Request {
        tokens: Tokens::new(64),
        src: vec![holds(64, table(&[0, 1, 2, 3]))],
        dst: vec![wants(37, table(&[4, 5, 6, 7]))],
    });
    assert_eq!(bound.moves()[0].range, tokens(37, 64));
    let memory = pair.deliver(&bound, 0xEE).swap_remove(0).swap_remove(0);
    for (at, &byte) in (0u64..).zip(&memory) {
        let moved = (256 + 37 * 4..512).contains(&at);
        assert_eq!(byte, if moved { source_byte(0, 0, at - 256) } else { 0xEE }, "byte {at}");
    }
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert_eq!(world.dst_memory(), [[memory]]);
}

#[test]
fn pfx_04_a_full_hit_reads_nothing_from_a_named_source() {
    let pair = pair();
    let bound = pair.bind(Request {
        tokens: Tokens::new(48),
        src: vec![holds(48, table(&[1, 2, 3]))],
        dst: vec![wants(48, table(&[4, 5, 6]))],
    });
    assert!(bound.is_full_hit());
    assert!(pair.batch(0, 0, &bound).is_empty());
    assert!(pair.zeroed(0, &bound).is_empty());
    // Whom the source waits for doesn't depend on what is cached: an empty operation still ends and still tells.
    assert_eq!(pair.consumers(0), [0]);
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert_eq!(world.notices(0), [0]);
    assert!(world.dst_memory()[0][0].iter().all(|&b| b == 0xEE));
}

#[test]
fn pfx_05_the_last_partial_block_moves() {
    // (tokens, blocks): 40 of a prompt of 40; a model that recomputes the last token takes 39, or 32 of 33.
    for (n, blocks) in [(40, 3), (39, 3), (33, 3), (32, 2)] {
        let pair = pair();
        let ids: Vec<u32> = (0..blocks).collect();
        let bound = pair.bind(request(n, &ids, &ids));
        assert_eq!(bound.moves()[0].range, tokens(0, n));
        assert_eq!(pair.runs(0, 0, &bound), [(0, 0, n * 4)]);
        let rest = u64::from(blocks) * 64 - n * 4;
        let zeroed: u64 = pair.zeroed(0, &bound).iter().map(|z| z.2).sum();
        assert_eq!(zeroed, rest);
        let too_few = request(n, &ids, &ids[1..]);
        assert!(kvferry_geometry::request::BoundRequest::new(&pair.compatible, too_few).is_err());
    }
}

#[test]
fn pfx_06_every_block_of_a_grown_list_moves_once() {
    // Prefilled in three chunks: [5, 6], then [7, 8], then [9].
    let src = [vec![5, 6], vec![7, 8], vec![9]].concat();
    let moved = changed(&pair(), request(80, &src, &[30, 28, 26, 24, 22]));
    let mut by_source: Vec<_> = moved.iter().map(|p| p.0).collect();
    by_source.sort_unstable();
    assert_eq!(by_source, [5, 6, 7, 8, 9]);
    assert_eq!(moved, [(9, 22), (8, 24), (7, 26), (6, 28), (5, 30)]);
}
