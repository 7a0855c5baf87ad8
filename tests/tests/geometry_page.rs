//! The worked numbers and byte drawings of `docs/geometry.md`, held to the code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry_geometry::layout::{LayoutStyle, PagedView};
use kvferry_geometry::manifest::ManifestError;
use kvferry_geometry::placement::{TokenClass, split_heads};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_tests::by_hand::{Engine, Pair, kv, request, tokens};

#[test]
fn retention() {
    let needed = |r: Retention| r.needed(Tokens::new(1000));
    assert_eq!(needed(Retention::Full), tokens(0, 1000));
    assert_eq!(needed(Retention::Window(Tokens::new(256))), tokens(745, 1000));
    assert_eq!(needed(Retention::Chunk(Tokens::new(256))), tokens(768, 1000));
}

#[test]
fn heads() {
    let heads = |h, tp: u32| -> Vec<(u32, u32)> {
        (0..tp).map(|r| split_heads(h, tp, r)).map(|h| (h.start(), h.end() - 1)).collect()
    };
    assert_eq!(heads(8, 4), [(0, 1), (2, 3), (4, 5), (6, 7)]);
    assert_eq!(heads(8, 6), [(0, 0), (1, 1), (2, 3), (4, 4), (5, 5), (6, 7)]);
    assert_eq!(heads(4, 8), [0, 0, 1, 1, 2, 2, 3, 3].map(|h| (h, h)));
    assert_eq!(heads(1, 3), [(0, 0); 3]);
}

#[test]
fn interleave() {
    let class = |index| TokenClass::new(2, 4, index).expect("in range");
    let (first, second) = (class(0), class(1));
    for (t, index, local) in [(0, 0, 0), (3, 0, 3), (4, 1, 0), (7, 1, 3), (8, 0, 4), (11, 0, 7), (15, 1, 7), (16, 0, 8)]
    {
        let (holder, other) = if index == 0 { (first, second) } else { (second, first) };
        assert!(holder.holds(Tokens::new(t)) && !other.holds(Tokens::new(t)), "token {t}");
        assert_eq!(holder.local(Tokens::new(t)), local, "token {t}");
    }
}

#[test]
fn a_gap_in_coverage() {
    let engine = Engine::new(vec![kv("a", 8, 2)], 2).dcp(2, 1);
    let errors = engine.assemble(engine.ranks()).expect_err("half of the tokens are missing").0;
    assert!(
        matches!(&errors[0], ManifestError::Uncovered { heads, start: 1, .. } if (heads.start(), heads.end()) == (0, 4))
    );
}

/// Where a cell lies: of component 0 (K) or 1 (V), head, token of the block.
fn cell(view: &PagedView, block: u64, component: usize, head: u64, token: u64) -> u64 {
    let c = &view.components[component];
    let kernel = u64::from(view.kernel.size);
    view.offset.get()
        + block * view.block_stride.get()
        + token / kernel * view.kernel.stride.get()
        + c.offset.get()
        + head * c.head_stride.get()
        + token % kernel * c.entry_stride.get()
}

/// Views of engines with 2 heads, blocks of 4 tokens, 2 bytes of K and of V.
fn views(style: LayoutStyle, layers: u32, blocks: u32) -> Vec<PagedView> {
    let items = (0..layers).map(|i| kv(&format!("layer.{i}"), 2, 2)).collect();
    let engine = Engine::new(items, 1).blocks(4, blocks).style(style);
    engine
        .ranks()
        .remove(0)
        .layout
        .views
        .into_iter()
        .map(|v| v.expect("placed").as_paged().expect("a paged item").clone())
        .collect()
}

/// A drawing is the cells in the order of their bytes.
fn assert_drawn(view: &PagedView, drawing: &str) {
    for (place, name) in (0u64..).zip(drawing.split_whitespace()) {
        let digits: Vec<u64> = name[1..].chars().map(|c| u64::from(c.to_digit(10).expect("a digit"))).collect();
        let component = usize::from(name.starts_with('v'));
        assert_eq!(cell(view, 0, component, digits[0], digits[1]), place * 2, "{name}");
    }
}

#[test]
fn drawings() {
    let hnd = &views(LayoutStyle::HND, 1, 3)[0];
    assert_drawn(hnd, "k00 v00 k01 v01 k02 v02 k03 v03 k10 v10 k11 v11 k12 v12 k13 v13");
    assert_eq!(hnd.block_stride.get(), 32);
    let nhd = &views(LayoutStyle::NHD, 1, 3)[0];
    assert_drawn(nhd, "k00 v00 k10 v10 k01 v01 k11 v11 k02 v02 k12 v12 k03 v03 k13 v13");
    assert_eq!(nhd.block_stride.get(), 32);

    let planes = &views(LayoutStyle::PLANES, 1, 3)[0];
    assert_drawn(planes, "k00 k01 k02 k03 k10 k11 k12 k13");
    assert_eq!((cell(planes, 2, 0, 0, 0), cell(planes, 0, 1, 0, 0), cell(planes, 1, 1, 0, 0)), (32, 48, 64));

    let rows = views(LayoutStyle::PACKED_ROWS, 2, 3);
    assert!(rows.iter().all(|v| v.block_stride.get() == 64 && v.region.get() == 0));
    assert_eq!((rows[0].offset.get(), rows[1].offset.get()), (0, 32));

    let kernel = &views(LayoutStyle { kernel_block: Some(2), ..LayoutStyle::HND }, 1, 3)[0];
    assert_drawn(kernel, "k00 v00 k01 v01 k10 v10 k11 v11 k02 v02 k03 v03 k12 v12 k13 v13");
}

#[test]
fn who_reads_whom() {
    let pair = |heads, src, dst| {
        Pair::new(&Engine::new(vec![kv("a", heads, 2)], src), &Engine::new(vec![kv("a", heads, 2)], dst))
    };
    let six_to_four = pair(8, 6, 4);
    let sources: Vec<Vec<u32>> = (0..4).map(|dst| six_to_four.sources(dst)).collect();
    assert_eq!(sources, [vec![0, 1], vec![2], vec![3, 4], vec![5]]);
    let eight_to_four = pair(4, 8, 4);
    for dst in 0..4 {
        assert!(matches!(eight_to_four.sources(dst).as_slice(), [src] if src / 2 == dst));
    }
}

#[test]
fn phases_of_48_to_32() {
    // Two heads, so that blocks are not simply end to end.
    let engine = |block| Engine::new(vec![kv("a", 2, 2)], 1).blocks(block, 64);
    let pair = Pair::new(&engine(48), &engine(32));
    let plan = PairPlan::new(&pair.compatible, &pair.peers, RankId::ZERO, RankId::ZERO).expect("a plan");
    let [class] = plan.classes() else { panic!("one class") };
    assert_eq!(class.period(), Some(Tokens::new(96)));
    assert_eq!(class.phases().len(), 4);
    // The table: (tokens, source block, from entry, destination block, from entry), read off the descriptors of head 0.
    let bound = pair.bind(request(96, &[0, 1], &[0, 1, 2]));
    let head = |len: u64, block: u64, side: u64| side / (2 * block * 4) * block + side % (2 * block * 4) / 4 % len;
    let found: Vec<(u64, u64, u64)> = pair
        .runs(0, 0, &bound)
        .into_iter()
        .filter(|&(src, _, _)| src % (2 * 48 * 4) < 48 * 4)
        .map(|(src, dst, len)| (head(48, 48, src), head(32, 32, dst), len / 4))
        .collect();
    assert_eq!(found, [(0, 0, 32), (32, 32, 16), (48, 48, 16), (64, 64, 32)], "tokens at the source and destination");
}

#[test]
fn rows_of_eighty_layers() {
    let engine = || {
        let items = (0..80).map(|i| kv(&format!("layer.{i}"), 2, 2)).collect();
        Engine::new(items, 1).blocks(16, 4000)
    };
    let pair = Pair::new(&engine(), &engine());
    let rows = |src: &[u32], dst: &[u32]| pair.batch(0, 0, &pair.bind(request(16_000, src, dst))).rows();
    let contiguous: Vec<u32> = (0..1000).collect();
    let scattered: Vec<u32> = contiguous.iter().map(|i| i * 7919 % 1009 * 3).collect();
    assert_eq!(rows(&scattered, &scattered.iter().rev().copied().collect::<Vec<_>>()), 1080);
    assert_eq!(rows(&contiguous, &contiguous), 81);
}
