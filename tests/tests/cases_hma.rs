//! HMA cases: groups with windows, and layers that share memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;

use kvferry_geometry::layout::{LayoutStyle, PagedView, View};
use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::request::{BoundRequest, Request, RequestError};
use kvferry_geometry::spec::{Item, Retention};
use kvferry_geometry::units::{RegionId, Tokens};
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, latent, table, table_at, tokens, wants, windowed};
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
        let mut src = holds(n, table(&[0, 0, 0, 5, 6, 7]));
        src.held = tokens(held, n);
        Request { tokens: Tokens::new(n), src: vec![src], dst: vec![wants(0, table_at(3, &[9, 20, 31]))] }
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
