//! The worked numbers and byte drawings of `docs/geometry.md`, held to the code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry_geometry::batch::Batch;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::{LayoutStyle, PagedView, StateOrder};
use kvferry_geometry::manifest::ManifestError;
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::placement::{HeadRule, TokenClass, split_heads};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BoundRequest, Request, RequestError};
use kvferry_geometry::spec::{Component, Item, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::staged::{Place, Staged};
use kvferry_geometry::units::{RankId, RegionId, Tokens};
use kvferry_tests::by_hand::{Engine, Pair, flat, holds, kv, request, table, tokens, wants};
use kvferry_tests::by_hand_states::{Rule, Shape, mamba2, mla};

#[test]
fn retention() {
    let needed = |r: Retention| r.needed(Tokens::new(1000));
    assert_eq!(needed(Retention::Full), tokens(0, 1000));
    assert_eq!(needed(Retention::Window(Tokens::new(256))), tokens(745, 1000));
    assert_eq!(needed(Retention::Chunk(Tokens::new(256))), tokens(768, 1000));
    assert_eq!(needed(Retention::Ring(Tokens::new(256))), tokens(744, 1000));
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
fn units() {
    let of = |rule: HeadRule, total, tp| -> Vec<(u32, u32)> {
        (0..tp).map(|r| rule.of(total, tp, r).unwrap()).map(|h| (h.start(), h.end() - 1)).collect()
    };
    assert_eq!(of(HeadRule::Blocks(64), 512, 6)[..4], [(0, 63), (64, 127), (128, 255), (256, 319)]);
    assert_eq!(of(HeadRule::Split, 2, 4), [(0, 0), (0, 0), (1, 1), (1, 1)]);
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
fn scales_lie_behind_their_data() {
    let components = vec![Component::new("k", 2, "u8"), Component::new("v", 2, "u8"), scale(4)];
    let shape = Shape::new(vec![Item::paged("a", PagedItem::new(2, components))], 1).blocks(4, 3);
    let view = shape.ranks().remove(0).layout.views.remove(0).unwrap().as_paged().unwrap().clone();
    let scale = &view.components[2];
    assert_eq!((scale.offset.get(), scale.head_stride.get(), view.block_stride.get()), (32, 4, 40));
    assert_drawn(&view, "k00 v00 k01 v01 k02 v02 k03 v03 k10 v10 k11 v11 k12 v12 k13 v13");
}

/// A scale of 4 bytes for so many tokens of each head.
fn scale(span: u32) -> Component {
    Component::new("scale", 4, "f32").with_span(span)
}

#[test]
fn states_in_either_order() {
    let parts = vec![StatePart::new("x", 2, 2, 2, "u8"), StatePart::new("b", 1, 2, 2, "u8")];
    let shape = |state_order| {
        let style = LayoutStyle { state_order, ..LayoutStyle::HND };
        Shape::new(vec![Item::state("s", StateItem { parts: parts.clone() })], 1).style(style).ranks().remove(0)
    };
    for (order, drawing) in
        [(StateOrder::UnitsOuter, "x00 x01 x10 x11 b00 b01"), (StateOrder::RowsOuter, "x00 x10 b00 x01 x11 b01")]
    {
        let layout = shape(order).layout;
        let view = layout.views[0].as_ref().unwrap().as_state().unwrap();
        for (place, name) in (0u64..).zip(drawing.split(' ')) {
            let digits: Vec<u64> = name[1..].chars().map(|c| u64::from(c.to_digit(10).unwrap())).collect();
            let part = &view.parts[usize::from(name.starts_with('b'))];
            let at = part.offset.get() + digits[0] * part.unit_stride.get() + digits[1] * part.row_stride.get();
            assert_eq!(at, place * 2, "{order:?}, {name}");
        }
        assert_eq!(view.slot_stride.get(), 12);
    }
}

#[test]
fn shared_memory() {
    let state = StateItem { parts: vec![StatePart::new("temporal", 1, 1, 40, "u8")] };
    let style = LayoutStyle { share: true, ..LayoutStyle::HND };
    let items = vec![kv("window", 2, 2), kv("full", 2, 2), Item::state("state", state)];
    let groups: [(&[&str], u32, u32); 3] = [(&["window"], 4, 8), (&["full"], 4, 8), (&["state"], 4, 8)];
    let layout = Shape::new(items, 1).groups(&groups).style(style).ranks().remove(0).layout;
    assert_eq!((layout.regions.len(), layout.regions[0].len.get()), (1, 8 * 40));
    let places = layout.views.iter().map(|v| v.as_ref().unwrap()).map(|v| (v.offset().get(), v.stride().get()));
    assert_eq!(places.collect::<Vec<_>>(), [(0, 40); 3]);
}

#[test]
fn who_reads_parts_of_a_state() {
    let items = || vec![mamba2("m", 8, 4, 2, 2)];
    let rule: Rule = |_, part| if part == 1 || part == 2 { HeadRule::Blocks(2) } else { HeadRule::Split };
    let pair = Pair::of(Shape::new(items(), 4).rule(rule).manifest(), Shape::new(items(), 2).rule(rule).manifest());
    assert_eq!((pair.sources(0), pair.sources(1)), (vec![0, 1], vec![2, 3]));
    let mut of_group = 0;
    for src in [0, 1] {
        let plan = PairPlan::new(&pair.compatible, &pair.peers, RankId::new(src), RankId::ZERO).unwrap();
        let shares: Vec<&str> =
            plan.classes().iter().flat_map(|c| c.shares()).map(|s| s.part.as_ref().unwrap().as_str()).collect();
        assert!(shares.contains(&"conv.x") && shares.contains(&"temporal"), "{shares:?}");
        of_group += shares.iter().filter(|s| **s == "conv.b").count();
    }
    assert_eq!(of_group, 1);
}

#[test]
fn stripes_of_61_layers() {
    let engine = |tp| {
        let items = (0..61).map(|i| mla(&format!("layer.{i}"))).collect();
        Shape::new(items, tp).blocks(1, 1).manifest()
    };
    let both = Compatible::new(engine(8), engine(1)).unwrap();
    let striped = PeerMap::with(&both, PeerOptions { salt: 0, stripe: true }, |_, _| 0).unwrap();
    let layers = |src: RankId| {
        let plan = PairPlan::new(&both, &striped, src, RankId::ZERO).unwrap();
        let mut items: Vec<u32> = plan.classes().iter().flat_map(|c| c.items()).map(|i| i.get()).collect();
        items.sort_unstable();
        items
    };
    let mut stretches: Vec<Vec<u32>> = striped.sources_of(RankId::ZERO).map(layers).collect();
    stretches.sort();
    assert_eq!(stretches.concat(), (0..61).collect::<Vec<_>>());
    assert_eq!(stretches.iter().map(Vec::len).collect::<Vec<_>>(), [8, 7, 8, 7, 8, 8, 7, 8]);
}

#[test]
fn what_moves_of_several_tokens() {
    // A window of 6 needs tokens [6, 11) at 11.
    let window = Retention::Window(Tokens::new(6));
    let item = |name: &str, tokens_per_entry, component| {
        Item::paged(name, PagedItem { tokens_per_entry, retention: window, ..PagedItem::new(1, vec![component]) })
    };
    let items = || vec![item("compressed", 4, Component::new("k", 4, "u8")), item("scaled", 1, scale(4))];
    let shape = || Shape::new(items(), 1).groups(&[(&["compressed"], 16, 1), (&["scaled"], 16, 1)]).manifest();
    let pair = Pair::of(shape(), shape());
    let ask = |cached| Request {
        tokens: Tokens::new(11),
        src: vec![holds(11, table(&[0])), holds(11, table(&[0]))],
        dst: vec![wants(0, table(&[0])), wants(cached, table(&[0]))],
    };
    let values = |region: u32| {
        let of = pair.descriptors(0, 0, &pair.bind(ask(0)));
        of.iter()
            .filter(|d| d.dst_region.get() == region)
            .flat_map(|d| d.dst_offset / 4..(d.dst_offset + d.len) / 4)
            .collect::<Vec<u64>>()
    };
    assert_eq!((values(0), values(1)), (vec![1], vec![1, 2]));
    let cut = BoundRequest::new(&pair.compatible, ask(7)).unwrap_err().0;
    assert!(matches!(cut[..], [RequestError::SplitSpan { .. }]), "{cut:?}");
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
    assert_eq!(class.period(), Some(96));
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
fn a_block_with_a_scale_for_16_tokens_is_a_block_of_3() {
    let engine = || Shape::new(vec![Item::paged("a", PagedItem::new(1, vec![scale(16)]))], 1).blocks(48, 4).manifest();
    let pair = Pair::of(engine(), engine());
    let plan = PairPlan::new(&pair.compatible, &pair.peers, RankId::ZERO, RankId::ZERO).unwrap();
    let [class] = plan.classes() else { panic!("one class") };
    assert_eq!((class.entry_tokens().get(), class.period()), (16, Some(3)));
}

#[test]
fn direct_and_staged() {
    let engine = |block, blocks, style| Engine::new(vec![kv("layer", 8, 2)], 1).blocks(block, blocks).style(style);
    let scattered = |n: u32| (0..n).map(|i| i * 7919 % 1009 * 3).collect::<Vec<u32>>();
    // The other side's are in another order, so that no two go on in each other.
    let reversed = |n: u32| scattered(n).into_iter().rev().collect::<Vec<u32>>();
    let cases = [
        (engine(16, 4000, LayoutStyle::HND), 1000, (128_000, 1000, 128_000, 1000)),
        (engine(64, 4000, LayoutStyle::HND), 250, (8000, 1000, 8000, 250)),
    ];
    for (dst, blocks, (direct, at_dst, gathered, at_src)) in cases {
        let order = if blocks == 1000 { LayoutStyle::NHD } else { LayoutStyle::HND };
        let pair = Pair::new(&engine(16, 4000, order), &dst);
        let batch = pair.batch(0, 0, &pair.bind(request(16_000, &scattered(1000), &reversed(blocks))));
        let count = |batch: &Batch| flat(batch).len();
        assert_eq!(count(&batch), direct);
        let staged = |place| Staged::new(&batch, place, RegionId::new(1)).unwrap();
        assert_eq!(count(&staged(Place::Destination).wire), at_dst);
        let source = staged(Place::Source);
        assert_eq!((count(&source.local), count(&source.wire)), (gathered, at_src));
    }
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
