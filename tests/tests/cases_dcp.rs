//! DCP cases: tokens dealt out to ranks, in degrees that differ.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;

use kvferry_geometry::placement::PcpMode;
use kvferry_geometry::request::{BoundRequest, Request, RequestError, SrcPaged, Tail};
use kvferry_geometry::units::Tokens;
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, latent, pieces, request, table, tokens, wants};
use kvferry_tests::over_mem::World;

/// Bytes of one rank's block: 16 tokens of 4 B.
const BLOCK: u64 = 64;

/// MLA on `tp` ranks; whole blocks of 16 tokens are dealt out to `dcp` of them.
fn mla(tp: u32, dcp: u32) -> Engine {
    Engine::new(vec![latent("mla", 4)], tp).dcp(dcp, 16)
}

/// A request of `n` blocks of 16 tokens whose table entries have equal ids and positions on both sides.
fn blocks(n: u64, cached: u64, src_dcp: u64, dst_dcp: u64) -> Request {
    let ids = |dcp: u64| table(&(0..u32::try_from(n.div_ceil(dcp)).expect("few")).collect::<Vec<_>>());
    Request {
        tokens: Tokens::new(n * 16),
        src: vec![holds(n * 16, ids(src_dcp))],
        dst: vec![wants(cached * 16, ids(dst_dcp))],
    }
}

/// The global blocks that `dst` reads from each of its sources; entry `k` of rank `i` of `c` is block `k * c + i`.
fn reads(pair: &Pair, dst: u32, src_dcp: u64, dst_dcp: u64, request: Request) -> BTreeMap<u32, Vec<u64>> {
    let bound = pair.bind(request);
    let of = |src: u32| {
        let (from, to) = (u64::from(src) % src_dcp, u64::from(dst) % dst_dcp);
        let entries = pieces(&pair.runs(src, dst, &bound), BLOCK);
        let global = entries.into_iter().map(|(s, d)| {
            assert_eq!(s * src_dcp + from, d * dst_dcp + to, "rank {src} entry {s} is not rank {dst} entry {d}");
            s * src_dcp + from
        });
        (src, global.collect())
    };
    pair.sources(dst).into_iter().map(of).collect()
}

fn map<const N: usize>(entries: [(u32, &[u64]); N]) -> BTreeMap<u32, Vec<u64>> {
    entries.into_iter().map(|(src, blocks)| (src, blocks.to_vec())).collect()
}

#[test]
fn dcp_01_four_shards_to_two() {
    let pair = Pair::new(&mla(4, 4), &mla(2, 2));
    assert_eq!(reads(&pair, 0, 4, 2, blocks(8, 0, 4, 2)), map([(0, &[0, 4]), (2, &[2, 6])]));
    assert_eq!(reads(&pair, 1, 4, 2, blocks(8, 0, 4, 2)), map([(1, &[1, 5]), (3, &[3, 7])]));
    assert_eq!(pair.consumer_counts(), [1, 1, 1, 1]);
    // Rank 0 has blocks 0, 2, 4 already (and rank 1 has 1, 3): source rank 0 stays a named source with nothing to read.
    assert_eq!(reads(&pair, 0, 4, 2, blocks(8, 5, 4, 2)), map([(0, &[]), (2, &[6])]));
    assert_eq!(reads(&pair, 1, 4, 2, blocks(8, 5, 4, 2)), map([(1, &[5]), (3, &[7])]));
}

#[test]
fn dcp_01_four_shards_to_none() {
    let pair = Pair::new(&mla(4, 4), &mla(2, 1));
    for dst in 0..2 {
        let expected = map([(0, &[0, 4]), (1, &[1, 5]), (2, &[2, 6]), (3, &[3, 7])]);
        let bound = pair.bind(blocks(8, 0, 4, 1));
        let found: BTreeMap<u32, Vec<u64>> = pair
            .sources(dst)
            .into_iter()
            .map(|src| (src, pieces(&pair.runs(src, dst, &bound), BLOCK).iter().map(|p| p.1).collect()))
            .collect();
        assert_eq!(found, expected);
    }
    assert_eq!(pair.consumer_counts(), [2, 2, 2, 2]);
}

#[test]
fn dcp_01_two_shards_to_four() {
    let pair = Pair::new(&mla(2, 2), &mla(4, 4));
    assert_eq!(reads(&pair, 2, 2, 4, blocks(8, 0, 2, 4)), map([(0, &[2, 6])]));
    assert_eq!(reads(&pair, 3, 2, 4, blocks(8, 0, 2, 4)), map([(1, &[3, 7])]));
    assert_eq!(pair.consumer_counts(), [2, 2]);
}

#[test]
fn dcp_01_four_shards_to_six() {
    // Neither divides the other: blocks meet again every twelve.
    let pair = Pair::new(&mla(4, 4), &mla(6, 6));
    let request = || blocks(24, 0, 4, 6);
    assert_eq!(reads(&pair, 0, 4, 6, request()), map([(0, &[0, 12]), (2, &[6, 18])]));
    assert_eq!(reads(&pair, 5, 4, 6, request()), map([(1, &[5, 17]), (3, &[11, 23])]));
    assert_eq!(pair.consumer_counts(), [3, 3, 3, 3]);
}

#[test]
fn dcp_03_replicas_are_not_shards() {
    // 8 workers, of which four by four hold the same bytes.
    let source = Engine::new(vec![kv("a", 2, 2)], 2).pcp(4, PcpMode::Replicate);
    assert_eq!(source.ranks().len(), 8);
    let pair = Pair::new(&source, &Engine::new(vec![kv("a", 2, 2)], 2));
    assert_eq!(pair.peers.pairs().len(), 2, "each shard is read once, from one of its replicas");
    for dst in 0..2 {
        let sources = pair.sources(dst);
        assert!(matches!(sources.as_slice(), [src] if src % 2 == dst), "{sources:?}");
    }
    assert_eq!(pair.consumer_counts().iter().sum::<usize>(), 2);
}

#[test]
fn dcp_04_shards_meet_in_one_table_and_the_padding_is_zeroed() {
    let pair = Pair::new(&mla(2, 2), &mla(1, 1));
    let request = |held: u64| {
        let mut request = request(80, &[0, 1, 2], &[10, 11, 12, 13, 14, 15]);
        request.src[0] = SrcPaged { table: table(&[0, 1, 2]), held: tokens(0, held), tail: Tail::Exact }.into();
        request
    };
    let bound = pair.bind(request(80));
    assert_eq!(pair.sources(0), [0, 1]);
    assert_eq!(pieces(&pair.runs(0, 0, &bound), BLOCK), [(0, 10), (1, 12), (2, 14)]);
    assert_eq!(pieces(&pair.runs(1, 0, &bound), BLOCK), [(0, 11), (1, 13)]);
    assert_eq!(pair.zeroed(0, &bound), [(0, 15 * BLOCK, BLOCK)]);
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    world.zero(&pair, &bound);
    assert_eq!(world.dst_memory(), pair.deliver(&bound, 0xEE));

    let refused = BoundRequest::new(&pair.compatible, request(64)).expect_err("block 4 is missing").0;
    let [RequestError::NotHeld { need, held, .. }] = refused.as_slice() else { panic!("{refused:?}") };
    assert_eq!((*need, *held), (tokens(0, 80), tokens(0, 64)));
}
