//! HMA cases: groups with windows, and layers that share memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;

use kvferry_geometry::layout::{LayoutStyle, PagedView, View};
use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::request::{BoundRequest, Checkpoint, DstState, Request, RequestError, SrcPaged, SrcState, Tail};
use kvferry_geometry::spec::{Item, Retention};
use kvferry_geometry::units::{BlockId, RankId, RegionId, Tokens};
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, latent, table, table_at, tokens, wants, windowed};
use kvferry_tests::by_hand_states::{Shape, falcon, gqa};
use kvferry_tests::over_mem::World;

/// 34 layers: 29 with a window of 256 tokens in six groups of 5, 5, 5, 5, 5, 4, and 5 that keep everything.
fn hybrid() -> Engine {
    let window = Retention::Window(Tokens::new(256));
    let mut items: Vec<Item> = (0..29).map(|i| windowed(&format!("window.{i}"), 1, 2, window)).collect();
    items.extend((0..5).map(|i| kv(&format!("full.{i}"), 1, 2)));
    let names: Vec<String> = items.iter().map(|i| i.name.to_string()).collect();
    let groups: Vec<Vec<&str>> =
        names[..29].chunks(5).chain([&names[29..]]).map(|g| g.iter().map(String::as_str).collect()).collect();
    let groups: Vec<(&[&str], u32, u32)> = groups.iter().map(|g| (g.as_slice(), 16, 512)).collect();
    Engine::new(items, 1).style(LayoutStyle::PLANES).groups(&groups)
}

fn paged(view: &mut Option<View>) -> &mut PagedView {
    let Some(View::Paged(view)) = view else { panic!("a placed, paged item") };
    view
}

/// Its rank, with the memory of one group's five layers used by all groups.
fn shared(engine: &Engine) -> Vec<RankManifest> {
    let mut ranks = engine.ranks();
    for rank in &mut ranks {
        assert_eq!(rank.layout.regions.len(), 34);
        rank.layout.regions.truncate(5);
        for (place, view) in (0u32..).zip(&mut rank.layout.views) {
            // Place of the layer in its group: groups of the window layers start at multiples of 5, the full one at 29.
            let in_group = if place < 29 { place % 5 } else { place - 29 };
            paged(view).region = RegionId::new(in_group);
        }
    }
    ranks
}

fn hybrid_pair() -> Pair {
    let engine = hybrid();
    let manifest = || engine.assemble(shared(&engine)).expect("groups may share memory");
    Pair::of(manifest(), manifest())
}

/// Every group's table lists ids `first..`, 64 apart between groups.
fn hybrid_request(n: u64, blocks: u32) -> Request {
    let ids = |group: u32| (group * 64 + 1..group * 64 + 1 + blocks).collect::<Vec<_>>();
    Request {
        tokens: Tokens::new(n),
        src: (0..7).map(|g| holds(n, table(&ids(g)))).collect(),
        // Backwards at the destination, so that no two neighbours merge.
        dst: (0..7).map(|g| wants(0, table(&ids(g).iter().rev().copied().collect::<Vec<_>>()))).collect(),
    }
}

#[test]
fn hma_01_a_window_group_moves_its_last_blocks_only() {
    let pair = hybrid_pair();
    // 63 blocks, the last of them half full: a window of 256 tokens reaches back into a seventeenth block.
    let bound = pair.bind(hybrid_request(1000, 63));
    let all = pair.descriptors(0, 0, &bound);
    // K and V of 29 layers x 17 blocks and of 5 layers x 63: a tensor that the group of four doesn't use is
    // not read for it.
    assert_eq!(all.len(), 2 * (29 * 17 + 5 * 63));
    assert_eq!(all.len(), 1616);
    let plane = 512 * 32;
    let blocks: BTreeSet<u64> = all.iter().map(|d| d.src_offset % plane / 32).collect();
    for group in 0..7 {
        let kept = if group < 6 { 47..=63 } else { 1..=63 };
        let found: Vec<u64> = blocks.iter().copied().filter(|b| b / 64 == group).map(|b| b % 64).collect();
        assert_eq!(found, kept.collect::<Vec<_>>(), "group {group}");
    }
    // A window that starts exactly at a block needs sixteen.
    let whole = pair.bind(hybrid_request(1007, 63));
    assert_eq!(whole.moves()[0].range, tokens(752, 1007));
    assert_eq!(pair.descriptors(0, 0, &whole).len(), 2 * (29 * 16 + 5 * 63));
}

#[test]
fn hma_01_a_request_shorter_than_the_window_keeps_all() {
    let pair = hybrid_pair();
    let bound = pair.bind(hybrid_request(160, 10));
    assert!(bound.moves().iter().all(|m| m.range == tokens(0, 160)));
    assert_eq!(pair.descriptors(0, 0, &bound).len(), 2 * 34 * 10);
}

/// A window of 1024 tokens over MLA, blocks of 64 tokens a rank on two context-parallel ranks: 128 tokens an entry.
fn windowed_mla(window: u64) -> Pair {
    let mut item = latent("mla", 4);
    let kvferry_geometry::spec::ItemKind::Paged(paged) = &mut item.kind else { unreachable!() };
    paged.retention = Retention::Window(Tokens::new(window));
    let engine = || Engine::new(vec![item.clone()], 2).dcp(2, 64).blocks(64, 64);
    Pair::new(&engine(), &engine())
}

#[test]
fn hma_02_context_parallelism_widens_a_block_of_the_window() {
    let pair = windowed_mla(1024);
    let entries = |n: u64| {
        let ids: Vec<u32> = (0..u32::try_from(n.div_ceil(128)).expect("few")).collect();
        let bound = pair.bind(Request {
            tokens: Tokens::new(n),
            src: vec![holds(n, table(&ids))],
            dst: vec![wants(0, table(&ids))],
        });
        // Entries that any of the two ranks reads; a rank's block is 64 x 4 B.
        let of = |rank| pair.runs(rank, rank, &bound);
        let runs: Vec<_> = (0..2).flat_map(of).collect();
        let touched: BTreeSet<u64> =
            runs.iter().flat_map(|&(src, _, len)| src / 256..(src + len).div_ceil(256)).collect();
        touched.len()
    };
    assert_eq!(entries(2561), 9);
    assert!((1..=2700).step_by(7).all(|n| entries(n) <= 9));
}

#[test]
fn hma_02_placeholders_of_blocks_left_behind_are_not_read() {
    // Positions 0 to 2 are behind the window; their entries are placeholders.
    let pair = windowed_mla(384);
    let request = |n: u64, held: u64| {
        let src = SrcPaged { table: table(&[0, 0, 0, 5, 6, 7]), held: tokens(held, n), tail: Tail::Exact };
        Request { tokens: Tokens::new(n), src: vec![src.into()], dst: vec![wants(0, table_at(3, &[9, 20, 31]))] }
    };
    let bound = pair.bind(request(768, 384));
    for rank in 0..2 {
        let read: BTreeSet<u64> = pair.runs(rank, rank, &bound).iter().map(|r| r.0 / 256).collect();
        assert_eq!(read, BTreeSet::from([5, 6, 7]));
    }
    // Where the window would reach them, that is an error, not a read of block 0.
    let refused = BoundRequest::new(&pair.compatible, request(640, 384)).expect_err("position 2 is gone").0;
    assert!(
        refused.iter().any(|e| matches!(e, RequestError::NotHeld { need, held, .. }
        if *need == tokens(257, 640) && *held == tokens(384, 640))),
        "{refused:?}"
    );
}

#[test]
fn hma_04_layers_that_share_memory_stay_addressable_by_name() {
    let engine = hybrid();
    let manifest = engine.assemble(shared(&engine)).expect("groups may share memory");
    let rank = &manifest.ranks()[0];
    assert_eq!(rank.layout.regions.len(), 5, "five tensors, five registrations");
    let region_of = |name: &str| {
        let id = manifest.spec().find(&name.into()).expect("named");
        rank.layout.views[id.index()].as_ref().expect("placed").region().get()
    };
    assert_eq!(manifest.spec().items().len(), 34);
    assert_eq!((region_of("window.0"), region_of("window.28"), region_of("full.4")), (0, 3, 4));
    // Within one group two layers on one tensor would overwrite each other.
    let mut ranks = shared(&engine);
    paged(&mut ranks[0].layout.views[1]).region = RegionId::new(0);
    assert!(engine.assemble(ranks).is_err());
}

#[test]
fn hma_04_shared_memory_is_registered_once_and_serves_every_group() {
    let pair = hybrid_pair();
    let bound = pair.bind(hybrid_request(1000, 63));
    // The transport refuses to register one range twice; its five regions carry all 34 layers.
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    world.zero(&pair, &bound);
    assert_eq!(world.dst_memory(), pair.deliver(&bound, 0xEE));
    assert_eq!(world.dst_memory()[0].len(), 5);
}

#[test]
fn hma_01_items_of_one_group_keep_what_they_keep() {
    // One table serves layers that keep everything and layers with a window.
    let items = || vec![kv("full", 1, 2), windowed("window", 1, 2, Retention::Window(Tokens::new(64)))];
    let engine = |block| Engine::new(items(), 1).blocks(block, 32);
    let pair = Pair::new(&engine(16), &engine(16));
    let ids: Vec<u32> = (1..=13).rev().collect();
    let bound = pair.bind(Request {
        tokens: Tokens::new(200),
        src: vec![holds(200, table(&ids))],
        dst: vec![wants(0, table(&ids))],
    });
    let ranges: BTreeSet<(u64, u64)> =
        bound.moves().iter().map(|m| (m.range.start().get(), m.range.end().get())).collect();
    assert_eq!(ranges, BTreeSet::from([(0, 200), (137, 200)]));
    let all = pair.descriptors(0, 0, &bound);
    let bytes = |region| all.iter().filter(|d| d.dst_region.get() == region).map(|d| d.len).sum::<u64>();
    assert_eq!((bytes(0), bytes(1)), (200 * 4, 63 * 4));
    // A producer that has freed what is behind the window has freed it for all layers of the group: told, not guessed.
    let freed = SrcPaged { table: table(&ids), held: tokens(137, 200), tail: Tail::Exact };
    let refused = BoundRequest::new(
        &pair.compatible,
        Request { tokens: Tokens::new(200), src: vec![freed.into()], dst: vec![wants(0, table(&ids))] },
    );
    let refused = refused.expect_err("the full layer needs all").0;
    assert!(
        matches!(refused.as_slice(), [RequestError::NotHeld { need, held, .. }]
            if *need == tokens(0, 200) && *held == tokens(137, 200)),
        "{refused:?}"
    );
}

#[test]
fn hma_01_chunks_and_rings_move_what_is_still_read() {
    let chunk = || Engine::new(vec![windowed("a", 1, 2, Retention::Chunk(Tokens::new(64)))], 1).blocks(16, 32);
    let pair = Pair::new(&chunk(), &chunk());
    let ids: Vec<u32> = (1..=13).rev().collect();
    let ask =
        |n: u64| Request { tokens: Tokens::new(n), src: vec![holds(n, table(&ids))], dst: vec![wants(0, table(&ids))] };
    // The chunk that token 200 is in starts at 192; a prompt that ends with its chunk needs nothing.
    assert_eq!(pair.bind(ask(200)).moves()[0].range, tokens(192, 200));
    assert!(pair.bind(ask(192)).is_full_hit());

    // A ring of 128 tokens: token t is in ring block t / 16 mod 8 at the producer, t / 32 mod 4 at the consumer.
    let ring = |block, blocks| {
        Engine::new(vec![windowed("a", 1, 2, Retention::Ring(Tokens::new(128)))], 1).blocks(block, blocks)
    };
    let pair = Pair::new(&ring(16, 9), &ring(32, 5));
    let (src, dst) = ([8, 3, 5, 1, 7, 2, 6, 4], [4, 2, 3, 1]);
    let bound = pair.bind(Request {
        tokens: Tokens::new(200),
        src: vec![holds(200, table(&src))],
        dst: vec![wants(0, table(&dst))],
    });
    assert_eq!(bound.moves()[0].range, tokens(72, 200));
    let place = |ids: &[u32], block: u64, t: u64| {
        let at = usize::try_from(t / block).expect("few") % ids.len();
        u64::from(ids[at]) * block + t % block
    };
    let mut expected: Vec<(u64, u64)> = (72..200).map(|t| (place(&src, 16, t), place(&dst, 32, t))).collect();
    expected.sort_unstable_by_key(|p| p.1);
    assert_eq!(kvferry_tests::by_hand::pieces(&pair.runs(0, 0, &bound), 4), expected);
    assert!(pair.zeroed(0, &bound).is_empty(), "what follows in the ring is older, not empty");
}

/// Two layers of attention and two of states whose pages and slots are blocks of one pool.
fn pool() -> Pair {
    let items = vec![gqa("attn.0", 2), falcon("mixer.0"), gqa("attn.1", 2), falcon("mixer.1")];
    let groups: [(&[&str], u32, u32); 2] = [(&["attn.0", "attn.1"], 16, 12), (&["mixer.1", "mixer.0"], 0, 12)];
    let style = LayoutStyle { share: true, ..LayoutStyle::HND };
    let engine = Shape::new(items, 1).groups(&groups).style(style);
    Pair::of(engine.manifest(), engine.manifest())
}

#[test]
fn hma_04_pages_and_states_of_one_pool_are_kept_apart() {
    let pair = pool();
    assert_eq!(pair.compatible.dst().region_lens(RankId::ZERO).len(), 2, "two tensors for four layers");
    let slot = |id| Checkpoint { position: Tokens::new(40), slot: BlockId::new(id) };
    let ask = |blocks: &[u32], to: u32| Request {
        tokens: Tokens::new(40),
        src: vec![holds(40, table(&[3, 9, 1])), SrcState { checkpoints: vec![slot(7)] }.into()],
        dst: vec![wants(0, table(blocks)), DstState { slot: Some(BlockId::new(to)), more: Vec::new() }.into()],
    };
    let bound = pair.bind(ask(&[5, 6, 8], 2));
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    world.zero(&pair, &bound);
    assert!(world.dst_memory() == pair.deliver(&bound, 0xEE));
    // A slot that is a page of the same request would be overwritten by it.
    let refused = BoundRequest::new(&pair.compatible, ask(&[5, 6, 2], 2)).expect_err("block 2 twice").0;
    let [RequestError::SharedBytes { first, second, a, b }] = refused.as_slice() else { panic!("{refused:?}") };
    assert_ne!(first, second);
    assert_eq!((a.get(), b.get()), (2, 2));
}
