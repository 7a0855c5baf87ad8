//! Every typed error of states, spans, chunks, rings, mixed groups and shared memory, provoked by exactly what it tells of.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::sync::Arc;

use kvferry_geometry::batch::Side;
use kvferry_geometry::compat::{CompatOptions, Compatible, Mismatch, Unmatched};
use kvferry_geometry::layout::{
    CacheLayout, Chunks, ComponentOrder, LayoutError, LayoutStyle, PagedView, Rows, StateView, StyleError, View,
};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestError, RankManifest};
use kvferry_geometry::placement::{HeadRange, HeadRule, Parallelism, ParallelismError, Placement, TokenClass};
use kvferry_geometry::request::{
    BlockTable, BoundRequest, Checkpoint, DstGroup, DstPaged, DstState, Request, RequestError, SrcGroup, SrcPaged,
    SrcState, Tail,
};
use kvferry_geometry::spec::{
    Component, Item, ItemKind, ModelSpec, PagedItem, Retention, SpecError, StateItem, StatePart,
};
use kvferry_geometry::units::{BlockId, Bytes, ItemId, TokenRange, Tokens};

fn k() -> Component {
    Component::new("k", 4, "u8")
}

fn paged() -> PagedItem {
    PagedItem::new(2, vec![k()])
}

fn kept(retention: Retention) -> PagedItem {
    PagedItem { retention, ..paged() }
}

fn scaled(span: u32) -> PagedItem {
    PagedItem::new(2, vec![k(), Component::new("scale", 4, "f32").with_span(span)])
}

/// Convolution state of 4 channels and 3 rows, and recurrent state of 2 heads.
fn mamba() -> StateItem {
    StateItem { parts: vec![StatePart::new("x", 4, 3, 2, "bf16"), StatePart::new("temporal", 2, 1, 8, "f32")] }
}

fn ring(n: u64) -> Retention {
    Retention::Ring(Tokens::new(n))
}

/// One rank, or several, with the items of every group in blocks of so many tokens; 16 blocks or slots.
#[derive(Clone)]
struct Shape {
    groups: Vec<(Vec<Item>, u32)>,
    tp: u32,
    style: LayoutStyle,
}

impl Shape {
    fn new(groups: &[(&[Item], u32)]) -> Self {
        let groups = groups.iter().map(|g| (g.0.to_vec(), g.1)).collect();
        Self { groups, tp: 1, style: LayoutStyle::HND }
    }

    fn one(item: Item, block: u32) -> Self {
        Self::new(&[(&[item], block)])
    }

    fn tp(self, tp: u32) -> Self {
        Self { tp, ..self }
    }

    fn spec(&self) -> ModelSpec {
        ModelSpec::new(self.groups.iter().flat_map(|g| g.0.clone()).collect()).unwrap()
    }

    fn parts(&self) -> (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>) {
        let spec = self.spec();
        let mut ids = spec.iter().map(|i| i.0).collect::<Vec<ItemId>>().into_iter();
        let members: Vec<Vec<ItemId>> = self.groups.iter().map(|g| ids.by_ref().take(g.0.len()).collect()).collect();
        let tables: Vec<(&[ItemId], u32, u32)> =
            members.iter().zip(&self.groups).map(|(m, g)| (&m[..], g.1, 16)).collect();
        let placed = Parallelism::tensor(&spec, self.tp).place(&spec, |_, _| HeadRule::Split).unwrap();
        let rank =
            |placement| RankManifest { layout: self.style.build(&spec, &placement, &tables).unwrap(), placement };
        let ranks = placed.into_iter().map(rank).collect();
        let mut groups = Vec::new();
        for (items, (_, block)) in members.into_iter().zip(&self.groups) {
            let name = format!("g{}", groups.len()).as_str().into();
            groups.push(CacheGroup { name, items, block_tokens: Tokens::new(u64::from(*block)) });
        }
        (spec, groups, ranks)
    }

    fn manifest(&self) -> Arc<Manifest> {
        let (spec, groups, ranks) = self.parts();
        Arc::new(Manifest::new(spec, groups, ranks).unwrap())
    }

    /// The faults of the manifest after a change.
    fn faults(&self, change: impl FnOnce(&mut Vec<CacheGroup>, &mut Vec<RankManifest>)) -> Vec<ManifestError> {
        let (spec, mut groups, mut ranks) = self.parts();
        change(&mut groups, &mut ranks);
        Manifest::new(spec, groups, ranks).unwrap_err().0
    }

    /// The faults of rank 0's layout after a change.
    fn layout_faults(&self, change: impl FnOnce(&mut RankManifest)) -> Vec<LayoutError> {
        let faults = self.faults(|_, ranks| change(&mut ranks[0]));
        let layout = |e| if let ManifestError::Layout { error, .. } = e { error } else { panic!("{e}") };
        faults.into_iter().map(layout).collect()
    }
}

fn view_of_pages(layout: &mut CacheLayout) -> &mut PagedView {
    if let Some(View::Paged(v)) = &mut layout.views[0] { v } else { panic!("no paged item") }
}

fn view_of_states(layout: &mut CacheLayout) -> &mut StateView {
    if let Some(View::State(v)) = &mut layout.views[0] { v } else { panic!("no state") }
}

/// That a list has one error, of a pattern, which says something.
macro_rules! assert_only {
    ($errors:expr, $pattern:pat $(if $guard:expr)?) => {{
        let errors = $errors;
        assert!(matches!(&errors[..], [$pattern] $(if $guard)?), "{errors:?}");
        assert!(errors[0].to_string().len() > 20);
    }};
}

#[test]
fn specs() {
    let of = |kind: ItemKind| ModelSpec::new(vec![Item { name: "a".into(), kind }]).unwrap_err().0;
    let state = |parts: Vec<StatePart>| of(ItemKind::State(StateItem { parts }));
    let part = |units, rows, width| state(vec![StatePart::new("x", units, rows, width, "u8")]);
    assert_only!(state(Vec::new()), SpecError::ComponentCount { got: 0, .. });
    let twice = StatePart::new("x", 1, 1, 1, "u8");
    assert_only!(state(vec![twice.clone(), twice]), SpecError::DuplicateComponent { .. });
    assert_only!(part(0, 1, 1), SpecError::OutOfRange { what: "units", got: 0, .. });
    assert_only!(part(1, 1 << 20, 1), SpecError::OutOfRange { what: "rows", .. });
    assert_only!(part(1, 1, 0), SpecError::OutOfRange { what: "part width", .. });
    let entries = PagedItem { tokens_per_entry: 0, ..paged() };
    assert_only!(of(ItemKind::Paged(entries)), SpecError::OutOfRange { what: "tokens per entry", .. });
    assert_only!(of(ItemKind::Paged(scaled(0))), SpecError::OutOfRange { what: "component span", .. });
    assert_only!(of(ItemKind::Paged(kept(ring(0)))), SpecError::OutOfRange { what: "ring", .. });
    let spanning = PagedItem { retention: ring(8), ..scaled(2) };
    assert_only!(of(ItemKind::Paged(spanning)), SpecError::RingSpan { span: 2, .. });
}

#[test]
fn parallel_sizes() {
    let spec = ModelSpec::new(vec![Item::state("s", mamba())]).unwrap();
    let placed = Parallelism::tensor(&spec, 2).place(&spec, |_, part| HeadRule::Blocks(if part == 0 { 3 } else { 1 }));
    assert_only!(placed.unwrap_err(), ParallelismError::Blocks { total: 4, rule: HeadRule::Blocks(3), .. });
}

#[test]
fn styles() {
    let build = |item: PagedItem, style: LayoutStyle, block| {
        let spec = ModelSpec::new(vec![Item::paged("a", item)]).unwrap();
        let placement = Parallelism::tensor(&spec, 1).place(&spec, |_, _| HeadRule::Split).unwrap().remove(0);
        style.build(&spec, &placement, &[(&[ItemId::ZERO], block, 4)]).map(|_| ()).map_err(|e| vec![e])
    };
    for (rows, share) in [(Rows::Packed, false), (Rows::PerItem, true)] {
        let style = LayoutStyle { components: ComponentOrder::Planes, rows, share, ..LayoutStyle::HND };
        assert_only!(build(paged(), style, 8).unwrap_err(), StyleError::PlanesInRows);
    }
    let entry = PagedItem { tokens_per_entry: 3, ..paged() };
    assert_only!(
        build(entry, LayoutStyle::HND, 8).unwrap_err(),
        StyleError::Divides { what: "tokens of an entry", .. }
    );
    let kernel = LayoutStyle { kernel_block: Some(4), ..LayoutStyle::HND };
    assert_only!(build(paged(), kernel, 6).unwrap_err(), StyleError::Divides { what: "kernel block", got: 4, .. });
    assert_only!(build(scaled(8), kernel, 8).unwrap_err(), StyleError::Divides { what: "entries of a value", .. });
    let long = LayoutStyle { padding: Bytes::new(u64::MAX), ..LayoutStyle::HND };
    assert_only!(build(paged(), long, 8).unwrap_err(), StyleError::TooLarge { .. });
}

#[test]
fn views_of_pages() {
    let shape = |item| Shape::one(Item::paged("a", item), 8);
    let plain = |change: fn(&mut PagedView)| shape(scaled(4)).layout_faults(|r| change(view_of_pages(&mut r.layout)));
    assert_only!(plain(|v| v.kernel.size = 2), LayoutError::Span { span: 4, kernel: 2, .. });
    let chunks = |bytes, stride| Some(Chunks { bytes: Bytes::new(bytes), stride: Bytes::new(stride) });
    for bytes in [0, 3, 8] {
        let faults =
            shape(paged()).layout_faults(|r| view_of_pages(&mut r.layout).components[0].chunks = chunks(bytes, 1));
        assert_only!(faults, LayoutError::Chunk { .. });
    }
    let faults = shape(paged()).layout_faults(|r| view_of_pages(&mut r.layout).components[0].chunks = chunks(2, 1));
    assert_only!(faults, LayoutError::Overlap { .. } | LayoutError::Unprovable { .. });
    let faults =
        shape(paged()).layout_faults(|r| view_of_pages(&mut r.layout).components[0].chunks = chunks(2, 1 << 30));
    assert_only!(faults, LayoutError::OutOfRegion { .. });
    let state = Shape::one(Item::state("s", mamba()), 0).parts().2.remove(0);
    let faults = shape(paged()).layout_faults(|r| *r = state);
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults.iter().all(|e| matches!(e, LayoutError::Kind { .. })), "{faults:?}");
}

#[test]
fn views_of_states() {
    let shape = Shape::one(Item::state("s", mamba()), 0);
    let faults = |change: fn(&mut StateView)| shape.layout_faults(|r| change(view_of_states(&mut r.layout)));
    assert_only!(faults(|v| v.slots = 0), LayoutError::OutOfRange { what: "slots", .. });
    assert_only!(faults(|v| v.parts[0].scratch_rows = 1 << 20), LayoutError::OutOfRange { what: "scratch rows", .. });
    assert_only!(faults(|v| v.parts[0].name = "y".into()), LayoutError::Components { .. });
    assert_only!(faults(|v| v.slots = 17), LayoutError::OutOfRegion { .. });
    assert_only!(faults(|v| v.slot_stride = Bytes::new(8)), LayoutError::Overlap { .. });
    // Scratch rows have places of their own.
    assert_only!(faults(|v| v.parts[0].scratch_rows = 1), LayoutError::Overlap { .. });
    let placed = |parts: Vec<HeadRange>| shape.layout_faults(|r| r.placement[0] = Some(Placement::state(parts)));
    let units = |a, b| HeadRange::new(a, b).unwrap();
    assert_only!(placed(vec![units(0, 4)]), LayoutError::PartCount { got: 1, expected: 2, .. });
    assert_only!(placed(vec![units(0, 4), units(1, 3)]), LayoutError::HeadsOutOfItem { total: 2, .. });
}

#[test]
fn context_parallelism_and_values_of_several_tokens() {
    let two = |item: PagedItem, interleave| {
        let (spec, mut groups, ranks) = Shape::one(Item::paged("a", item), 8).parts();
        let placed = |index| {
            let tokens = TokenClass::new(2, interleave, index).unwrap();
            vec![Some(Placement::paged(HeadRange::new(0, 2).unwrap(), tokens))]
        };
        groups[0].block_tokens = Tokens::new(16);
        let rank = |index| RankManifest { placement: placed(index), layout: ranks[0].layout.clone() };
        Manifest::new(spec, groups, vec![rank(0), rank(1)]).map(|_| ()).map_err(|e| e.0)
    };
    assert_eq!(two(scaled(4), 4), Ok(()));
    let errors = two(scaled(4), 2).unwrap_err();
    let cut = |e: &ManifestError| {
        matches!(e, ManifestError::Layout { error: LayoutError::SpanInterleave { tokens: 4, interleave: 2, .. }, .. })
    };
    assert!(errors.len() == 2 && errors.iter().all(cut), "{errors:?}");
    let entry = PagedItem { tokens_per_entry: 2, ..paged() };
    assert_eq!(two(entry.clone(), 2), Ok(()));
    assert!(two(entry, 1).is_err());
}

#[test]
fn groups() {
    let pages = |name: &str, item| Item::paged(name, item);
    let mixed = Shape::new(&[(&[pages("a", paged())], 8), (&[Item::state("s", mamba())], 0)]);
    let faults = mixed.faults(|groups, _| {
        let state = groups.pop().unwrap();
        groups[0].items.extend(state.items);
    });
    assert_only!(faults, ManifestError::MixedGroup { .. });
    let states = Shape::one(Item::state("s", mamba()), 0);
    assert_only!(
        states.faults(|groups, _| groups[0].block_tokens = Tokens::new(16)),
        ManifestError::StateTokens { got, .. } if got.get() == 16
    );
    let round = Shape::one(pages("a", kept(ring(24))), 8);
    assert!(round.manifest().ranks().len() == 1);
    let uneven = Shape::one(pages("a", kept(ring(20))), 8);
    assert_only!(uneven.faults(|_, _| {}), ManifestError::Ring { ring: 20, block_tokens: 8, .. });
    for other in [ring(48), Retention::Full, Retention::Window(Tokens::new(24))] {
        let two = Shape::new(&[(&[pages("a", kept(ring(24))), pages("b", kept(other))], 8)]);
        assert_only!(two.faults(|_, _| {}), ManifestError::Retention { b, .. } if *b == other);
    }
    // Others may share a table.
    let window = kept(Retention::Window(Tokens::new(5)));
    assert!(!Shape::new(&[(&[pages("a", paged()), pages("b", window)], 8)]).manifest().groups().is_empty());
}

#[test]
fn coverage_of_states() {
    let shape = Shape::one(Item::state("s", mamba()), 0).tp(2);
    let faults = shape.faults(|_, ranks| drop(ranks.pop()));
    assert!(!faults.is_empty() && faults.iter().all(|e| matches!(e, ManifestError::Uncovered { .. })), "{faults:?}");
}

fn mismatches(src: &Shape, dst: &Shape) -> Vec<Mismatch> {
    Compatible::new(src.manifest(), dst.manifest()).unwrap_err().0
}

#[test]
fn engines_that_differ() {
    let pages = |item| Shape::one(Item::paged("a", item), 8);
    let states = |parts: Vec<StatePart>| Shape::one(Item::state("a", StateItem { parts }), 0);
    let part = |units, rows, width| StatePart::new("x", units, rows, width, "bf16");
    let base = || states(vec![part(4, 3, 2)]);
    assert_only!(mismatches(&pages(paged()), &base()), Mismatch::Kind { .. });
    assert_only!(mismatches(&base(), &states(vec![part(8, 3, 2)])), Mismatch::Count { src: 4, dst: 8, .. });
    assert_only!(mismatches(&base(), &states(vec![part(4, 2, 2)])), Mismatch::Count { src: 3, dst: 2, .. });
    assert_only!(mismatches(&base(), &states(vec![part(4, 3, 4)])), Mismatch::Width { .. });
    let other = StatePart { encoding: "f32".into(), ..part(4, 3, 2) };
    assert_only!(mismatches(&base(), &states(vec![other])), Mismatch::Encoding { .. });
    let more = states(vec![part(4, 3, 2), StatePart::new("y", 1, 1, 1, "u8")]);
    assert_only!(mismatches(&base(), &more), Mismatch::Components { .. });
    let entry = PagedItem { tokens_per_entry: 2, ..paged() };
    assert_only!(mismatches(&pages(paged()), &pages(entry)), Mismatch::Count { src: 1, dst: 2, .. });
    assert_only!(mismatches(&pages(scaled(2)), &pages(scaled(4))), Mismatch::Coverage { .. });
    let shared = || PagedItem::new(2, vec![k(), Component::new("scale", 4, "f32").with_span(4).shared()]);
    assert_only!(mismatches(&pages(scaled(4)), &pages(shared())), Mismatch::Coverage { .. });
    assert_only!(mismatches(&pages(kept(ring(8))), &pages(kept(ring(16)))), Mismatch::Retention { .. });
    let mut found = mismatches(&pages(shared()), &pages(shared()).tp(2));
    let Some(Mismatch::SharedValue { src, dst, .. }) = found.pop() else { panic!("{found:?}") };
    let ranges = |list: &[HeadRange]| list.iter().map(|h| (h.start(), h.end())).collect::<Vec<_>>();
    assert_eq!((ranges(&src), ranges(&dst)), (vec![(0, 2)], vec![(0, 1), (1, 2)]));
    assert!(Compatible::new(pages(shared()).tp(2).manifest(), pages(shared()).tp(2).manifest()).is_ok());
}

#[test]
fn items_of_one_side() {
    let item = |name: &str| Item::paged(name, paged());
    let (one, two) = (Shape::new(&[(&[item("a")], 8)]), Shape::new(&[(&[item("a"), item("draft")], 8)]));
    assert_only!(mismatches(&one, &two), Mismatch::MissingAtSource { .. });
    assert_only!(mismatches(&two, &one), Mismatch::MissingAtDestination { .. });
    let other = Shape::new(&[(&[item("b")], 8)]);
    let nothing = CompatOptions { source_only: Unmatched::Ignore, destination_only: Unmatched::Ignore };
    let found = Compatible::with(one.manifest(), other.manifest(), nothing).unwrap_err().0;
    assert!(found.iter().any(|m| matches!(m, Mismatch::NothingInCommon { .. })), "{found:?}");
    let with = |src: &Shape, dst: &Shape, source_only, destination_only| {
        let options = CompatOptions { source_only, destination_only };
        Compatible::with(src.manifest(), dst.manifest(), options).map(|c| c.src_item(ItemId::new(1)))
    };
    assert_eq!(with(&one, &two, Unmatched::Refuse, Unmatched::Ignore), Ok(None));
    assert!(with(&one, &two, Unmatched::Ignore, Unmatched::Refuse).is_err());
    assert_eq!(with(&two, &one, Unmatched::Ignore, Unmatched::Refuse), Ok(None));
    assert!(with(&two, &one, Unmatched::Refuse, Unmatched::Ignore).is_err());
}

fn ids(list: &[u32]) -> BlockTable {
    BlockTable::new(0, &list.iter().copied().map(BlockId::new).collect::<Vec<_>>())
}

fn held(n: u64, list: &[u32]) -> SrcGroup {
    SrcPaged { table: ids(list), held: TokenRange::new(Tokens::ZERO, Tokens::new(n)), tail: Tail::Exact }.into()
}

fn wanted(cached: u64, list: &[u32]) -> DstGroup {
    DstPaged { table: ids(list), cached: Tokens::new(cached) }.into()
}

fn states(list: &[(u64, u32)]) -> Vec<Checkpoint> {
    list.iter().map(|s| Checkpoint { position: Tokens::new(s.0), slot: BlockId::new(s.1) }).collect()
}

fn checkpoints(list: &[(u64, u32)]) -> SrcGroup {
    SrcState { checkpoints: states(list) }.into()
}

fn slots(slot: Option<u32>, more: &[(u64, u32)]) -> DstGroup {
    DstState { slot: slot.map(BlockId::new), more: states(more) }.into()
}

/// What is wrong with a request between two engines alike.
fn refused(shape: &Shape, tokens: u64, src: Vec<SrcGroup>, dst: Vec<DstGroup>) -> Vec<RequestError> {
    let both = Compatible::new(shape.manifest(), shape.manifest()).unwrap();
    let bound = BoundRequest::new(&both, Request { tokens: Tokens::new(tokens), src, dst });
    bound.map_or_else(|e| e.0, |_| Vec::new())
}

#[test]
fn requests_of_states() {
    let shape = Shape::one(Item::state("s", mamba()), 0);
    let ask = |src: SrcGroup, dst: DstGroup| refused(&shape, 20, vec![src], vec![dst]);
    assert_eq!(ask(checkpoints(&[(20, 3), (7, 1)]), slots(Some(0), &[(7, 2)])), []);
    assert_eq!(ask(checkpoints(&[]), slots(None, &[])), []);
    let missing = ask(checkpoints(&[(19, 3), (21, 1)]), slots(Some(0), &[]));
    assert_only!(missing, RequestError::NoState { position, held, .. } if position.get() == 20 && held.len() == 2);
    assert_only!(ask(checkpoints(&[(20, 3)]), slots(Some(0), &[(7, 2)])), RequestError::NoState { .. });
    let all = || checkpoints(&[(20, 3), (7, 1)]);
    let at = |side, slot| matches!(side, Side::Dst) && slot == 7;
    assert_only!(
        ask(all(), slots(Some(0), &[(7, 2), (7, 4)])),
        RequestError::StatePosition { side, position, .. } if at(*side, position.get())
    );
    assert_only!(ask(all(), slots(Some(0), &[(20, 2)])), RequestError::StatePosition { side: Side::Dst, .. });
    assert_only!(
        ask(checkpoints(&[(20, 3), (20, 1)]), slots(Some(0), &[])),
        RequestError::StatePosition { side: Side::Src, .. }
    );
    assert_only!(ask(all(), slots(Some(2), &[(7, 2)])), RequestError::RepeatedBlock { side: Side::Dst, .. });
    assert_only!(
        ask(checkpoints(&[(20, 3), (7, 3)]), slots(Some(2), &[])),
        RequestError::RepeatedBlock { side: Side::Src, .. }
    );
    assert_only!(ask(all(), slots(Some(16), &[])), RequestError::BlockOutOfRange { side: Side::Dst, .. });
    assert_only!(
        ask(checkpoints(&[(20, 16)]), slots(Some(1), &[])),
        RequestError::BlockOutOfRange { side: Side::Src, .. }
    );
    assert_only!(ask(held(20, &[0, 1, 2]), slots(Some(0), &[])), RequestError::GroupKind { side: Side::Src, .. });
    assert_only!(ask(all(), wanted(0, &[0, 1, 2])), RequestError::GroupKind { side: Side::Dst, .. });
    let many: Vec<(u64, u32)> = (0..5000).map(|i| (i, 0)).collect();
    assert_only!(ask(checkpoints(&many), slots(None, &[])), RequestError::TooManyStates { got: 5000, .. });
    let pages = Shape::one(Item::paged("a", paged()), 8);
    let ask = |src: SrcGroup, dst: DstGroup| refused(&pages, 20, vec![src], vec![dst]);
    assert_only!(ask(all(), wanted(0, &[0, 1, 2])), RequestError::GroupKind { side: Side::Src, .. });
    assert_only!(ask(held(20, &[0, 1, 2]), slots(None, &[])), RequestError::GroupKind { side: Side::Dst, .. });
}

#[test]
fn requests_of_rings() {
    let shape = Shape::one(Item::paged("a", kept(ring(24))), 8);
    let last = |list: &[u32]| -> SrcGroup {
        let held = TokenRange::new(Tokens::new(76), Tokens::new(100));
        SrcPaged { table: ids(list), held, tail: Tail::Exact }.into()
    };
    let ask = |src: SrcGroup, dst: DstGroup| refused(&shape, 100, vec![src], vec![dst]);
    assert_eq!(ask(last(&[5, 1, 9]), wanted(0, &[0, 3, 2])), []);
    assert_only!(
        ask(last(&[5, 1, 9]), wanted(0, &[0, 3])),
        RequestError::RingTable { side: Side::Dst, got: 2, expected: 3, .. }
    );
    assert_only!(ask(last(&[5, 1, 9, 2]), wanted(0, &[0, 3, 2])), RequestError::RingTable { side: Side::Src, .. });
    let late = BlockTable::new(10, &[0, 1, 2].map(BlockId::new));
    let late = DstPaged { table: late, cached: Tokens::ZERO }.into();
    assert_only!(ask(last(&[5, 1, 9]), late), RequestError::RingTable { first: 10, .. });
    assert_only!(ask(last(&[5, 1, 5]), wanted(0, &[0, 3, 2])), RequestError::RepeatedBlock { side: Side::Src, .. });
    assert_only!(ask(last(&[5, 1, 9]), wanted(0, &[3, 3, 2])), RequestError::RepeatedBlock { side: Side::Dst, .. });
}

#[test]
fn hits_that_cut_a_value() {
    let shape = Shape::one(Item::paged("a", scaled(4)), 8);
    let ask = |cached| refused(&shape, 20, vec![held(20, &[0, 1, 2])], vec![wanted(cached, &[0, 1, 2])]);
    for whole in [0, 4, 16, 20] {
        assert_eq!(ask(whole), [], "{whole}");
    }
    for cut in [1, 6, 19] {
        assert_only!(ask(cut), RequestError::SplitSpan { cached, span, .. } if (cached.get(), span.get()) == (cut, 4));
    }
    // What a window has left behind may be cut.
    let window = PagedItem { retention: Retention::Window(Tokens::new(9)), ..scaled(4) };
    let shape = Shape::one(Item::paged("a", window), 8);
    let ask = |cached| refused(&shape, 20, vec![held(20, &[0, 1, 2])], vec![wanted(cached, &[0, 1, 2])]);
    assert_eq!((ask(11), ask(12)), (Vec::new(), Vec::new()));
    assert_only!(ask(13), RequestError::SplitSpan { .. });
}

#[test]
fn groups_that_share_memory() {
    let shape = Shape {
        style: LayoutStyle { share: true, ..LayoutStyle::HND },
        ..Shape::new(&[(&[Item::paged("a", paged())], 8), (&[Item::state("s", mamba())], 0)])
    };
    let ask = |pages: &[u32], slot| {
        let src = vec![held(20, &[0, 1, 2]), checkpoints(&[(20, 3)])];
        refused(&shape, 20, src, vec![wanted(0, pages), slots(slot, &[])])
    };
    assert_eq!(ask(&[4, 5, 6], Some(7)), []);
    assert_eq!(ask(&[4, 5, 6], None), []);
    let meet = ask(&[4, 5, 6], Some(5));
    let five = BlockId::new(5);
    assert_only!(meet, RequestError::SharedBytes { a, b, .. } if (*a, *b) == (five, five));
    // A hit would be overwritten; what is behind a window is nobody's.
    let src = || vec![held(20, &[0, 1, 2]), checkpoints(&[(20, 3)])];
    let dst = |slot| vec![wanted(8, &[4, 5, 6]), slots(Some(slot), &[])];
    assert_only!(refused(&shape, 20, src(), dst(4)), RequestError::SharedBytes { .. });
    let window = Item::paged("a", kept(Retention::Window(Tokens::new(9))));
    let shape = Shape { style: shape.style, ..Shape::new(&[(&[window], 8), (&[Item::state("s", mamba())], 0)]) };
    assert_eq!(refused(&shape, 20, src(), dst(4)), []);
    assert_only!(refused(&shape, 20, src(), dst(5)), RequestError::SharedBytes { .. });
}
