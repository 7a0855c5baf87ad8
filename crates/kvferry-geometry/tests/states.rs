//! States, compressed entries, scales and rings on shapes whose numbers can be checked by hand.
#![allow(clippy::unwrap_used, reason = "a test helper that cannot build its shape has failed")]

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::compat::{CompatOptions, Compatible, Mismatch, Unmatched};
use kvferry_geometry::layout::{LayoutStyle, StateOrder};
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::{PeerMap, PeerOptions, RankPair};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{
    BlockTable, BoundRequest, Checkpoint, DstPaged, DstState, Request, RequestError, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::units::{BlockId, Name, RankId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;

/// An engine with a group for each list of items; block size 0 stands for states.
fn engine(items: &[&[Item]], blocks: &[u32], tp: u32, style: LayoutStyle) -> Arc<Manifest> {
    let spec = ModelSpec::new(items.concat()).unwrap();
    let groups: Vec<CacheGroup> = items
        .iter()
        .zip(blocks)
        .enumerate()
        .map(|(i, (list, &block))| CacheGroup {
            name: Name::new(&format!("g{i}")),
            items: list.iter().map(|i| spec.find(&i.name).unwrap()).collect(),
            block_tokens: Tokens::new(block.into()),
        })
        .collect();
    let rule = |item: &Item, axis: usize| {
        let replicated = item.as_state().is_some_and(|s| s.parts[axis].name.as_str() == "bias");
        if replicated { HeadRule::Whole } else { HeadRule::Split }
    };
    let rank = |placement| {
        let list: Vec<_> = groups.iter().zip(blocks).map(|(g, &b)| (&g.items[..], b, 16)).collect();
        let layout = style.build(&spec, &placement, &list).unwrap();
        RankManifest { placement, layout }
    };
    let ranks = Parallelism::tensor(&spec, tp).place(&spec, rule).unwrap().into_iter().map(rank).collect();
    Arc::new(Manifest::new(spec.clone(), groups, ranks).unwrap())
}

fn flat(batch: &Batch) -> Vec<(u64, u64, u64)> {
    let mut out = vec![Descriptor::default(); 4096];
    let n = batch.cursor().fill(&mut out);
    out[..n].iter().map(|d| (d.src_offset, d.dst_offset, d.len)).collect()
}

fn moves(c: &Compatible, request: &Request, src: u32, dst: u32) -> Vec<(u64, u64, u64)> {
    let peers = PeerMap::new(c, 0).unwrap();
    let plan = PairPlan::new(c, &peers, RankId::new(src), RankId::new(dst)).unwrap();
    let batch = plan.resolve(&BoundRequest::new(c, request.clone()).unwrap()).unwrap();
    let mut list = flat(&batch);
    list.sort_unstable_by_key(|d| d.1);
    list
}

fn ids(list: &[u32]) -> Vec<BlockId> {
    list.iter().map(|&i| BlockId::new(i)).collect()
}

fn held(n: u64, list: &[u32]) -> SrcPaged {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(n));
    SrcPaged { table: BlockTable::new(0, &ids(list)), held, tail: Tail::Exact }
}

fn wanted(cached: u64, list: &[u32]) -> DstPaged {
    DstPaged { table: BlockTable::new(0, &ids(list)), cached: Tokens::new(cached) }
}

fn at(position: u64, slot: u32) -> Checkpoint {
    Checkpoint { position: Tokens::new(position), slot: BlockId::new(slot) }
}

/// 8 channels of x, 4 of B and of C, with 3 rows of 2 bytes; 2 heads of 64 bytes.
fn mamba2() -> Item {
    let parts = vec![
        StatePart::new("x", 8, 3, 2, "bf16"),
        StatePart::new("B", 4, 3, 2, "bf16"),
        StatePart::new("C", 4, 3, 2, "bf16"),
        StatePart::new("temporal", 2, 1, 64, "fp32"),
    ];
    Item::state("mixer", StateItem { parts })
}

fn one_state(n: u64, src: Vec<Checkpoint>, slot: Option<u32>, more: Vec<Checkpoint>) -> Request {
    Request {
        tokens: Tokens::new(n),
        src: vec![SrcState { checkpoints: src }.into()],
        dst: vec![DstState { slot: slot.map(BlockId::new), more }.into()],
    }
}

#[test]
fn every_part_of_a_convolution_state_is_sharded_on_its_own() {
    let item = [mamba2()];
    let of = |tp| engine(&[&item], &[0], tp, LayoutStyle::HND);
    let c = Compatible::new(of(1), of(2)).unwrap();
    let request = one_state(5, vec![at(5, 0)], Some(0), vec![]);
    assert_eq!(moves(&c, &request, 0, 0), [(0, 0, 24), (48, 24, 12), (72, 36, 12), (96, 48, 64)]);
    assert_eq!(moves(&c, &request, 0, 1), [(24, 0, 24), (60, 24, 12), (84, 36, 12), (160, 48, 64)]);
    // The other way round whole pieces land at 24, 60, 84.
    let c = Compatible::new(of(2), of(1)).unwrap();
    assert_eq!(moves(&c, &request, 1, 0), [(0, 24, 24), (24, 60, 12), (36, 84, 12), (48, 160, 64)]);
    // Equal shards are one run, from slot 3 to slot 2.
    let c = Compatible::new(of(2), of(2)).unwrap();
    let request = one_state(5, vec![at(5, 3)], Some(2), vec![]);
    assert_eq!(moves(&c, &request, 1, 1), [(3 * 112, 2 * 112, 112)]);
}

#[test]
fn rows_are_matched_by_index_in_either_order_and_scratch_rows_stay() {
    let item = [Item::state("conv", StateItem { parts: vec![StatePart::new("x", 2, 2, 4, "f32")] })];
    let style = LayoutStyle { scratch_rows: 1, ..LayoutStyle::HND };
    let rows = LayoutStyle { state_order: StateOrder::RowsOuter, ..LayoutStyle::HND };
    let c = Compatible::new(engine(&[&item], &[0], 1, style), engine(&[&item], &[0], 1, rows)).unwrap();
    // Source: [unit][row 0, row 1, scratch]; destination: [row][unit].
    let request = one_state(9, vec![at(9, 0)], Some(0), vec![]);
    assert_eq!(moves(&c, &request, 0, 0), [(0, 0, 4), (12, 4, 4), (4, 8, 4), (16, 12, 4)]);
}

#[test]
fn a_state_comes_from_exactly_the_position_that_is_resumed_from() {
    let item = [mamba2()];
    let of = |tp| engine(&[&item], &[0], tp, LayoutStyle::HND);
    let c = Compatible::new(of(1), of(1)).unwrap();
    let checkpoints = vec![at(16, 3), at(32, 4), at(40, 9)];
    let bind = |n, slot, more| BoundRequest::new(&c, one_state(n, checkpoints.clone(), slot, more));
    let bound = bind(40, Some(1), vec![at(16, 2)]).unwrap();
    let pairs: Vec<_> = bound.moves()[0].states.iter().map(|s| (s.position.get(), s.src.get(), s.dst.get())).collect();
    assert_eq!(pairs, [(40, 9, 1), (16, 3, 2)]);
    let refused = |n, slot, more| bind(n, slot, more).unwrap_err().0;
    let no_state = |e: &[RequestError], p| matches!(e, [RequestError::NoState { position, .. }] if position.get() == p);
    assert!(no_state(&refused(39, Some(1), vec![]), 39));
    assert!(no_state(&refused(40, Some(1), vec![at(17, 2)]), 17));
    assert!(matches!(refused(40, Some(1), vec![at(16, 1)])[..], [RequestError::RepeatedBlock { .. }]));
    assert!(matches!(refused(40, Some(1), vec![at(40, 2)])[..], [RequestError::StatePosition { .. }]));
    assert!(matches!(refused(40, Some(16), vec![])[..], [RequestError::BlockOutOfRange { .. }]));
    assert!(bind(40, None, vec![]).unwrap().is_full_hit());
}

#[test]
fn a_replicated_part_is_read_once_and_a_cached_prefix_does_not_save_the_state() {
    let bias = Item::state("conv", StateItem { parts: vec![StatePart::new("bias", 3, 1, 8, "f32")] });
    let kv = Item::paged("attn", PagedItem::new(2, vec![Component::new("kv", 8, "u8")]));
    let (paged, states) = ([kv], [mamba2(), bias]);
    let src = engine(&[&paged, &states], &[4, 0], 4, LayoutStyle::HND);
    let dst = engine(&[&states, &paged], &[0, 8], 2, LayoutStyle { share: true, ..LayoutStyle::HND });
    let c = Compatible::new(src, dst).unwrap();
    let mut request = Request {
        tokens: Tokens::new(8),
        src: vec![held(8, &[1, 2]).into(), SrcState { checkpoints: vec![at(8, 5)] }.into()],
        dst: vec![DstState { slot: Some(BlockId::new(7)), more: vec![] }.into(), wanted(8, &[3]).into()],
    };
    let bound = BoundRequest::new(&c, request.clone()).unwrap();
    assert!(!bound.is_full_hit());
    let peers = PeerMap::new(&c, 0).unwrap();
    let bytes = |bound: &BoundRequest, dst| -> u64 {
        let of = |src| PairPlan::new(&c, &peers, src, RankId::new(dst)).unwrap().resolve(bound).unwrap().bytes().get();
        peers.sources_of(RankId::new(dst)).map(of).sum()
    };
    // 4 channels of x, 2 of B, 2 of C with 3 rows; a head of 64; the whole bias.
    let state = (4 + 2 + 2) * 6 + 64 + 24;
    assert_eq!((bytes(&bound, 0), bytes(&bound, 1)), (state, state));
    // The two groups share memory, so no block serves both.
    request.dst[1] = wanted(0, &[7]).into();
    let errors = BoundRequest::new(&c, request.clone()).unwrap_err().0;
    assert!(
        matches!(errors[..], [RequestError::SharedBytes { a, b, .. }] if a.get() == 7 && b.get() == 7),
        "{errors:?}"
    );
    request.dst[1] = wanted(0, &[6]).into();
    assert_eq!(bytes(&BoundRequest::new(&c, request).unwrap(), 0), state + 8 * 8);
}

#[test]
fn compressed_entries_move_when_all_their_tokens_do() {
    let kv = PagedItem { tokens_per_entry: 4, ..PagedItem::new(1, vec![Component::new("latent", 8, "u8")]) };
    let item = [Item::paged("compressed", kv)];
    let of = |block| engine(&[&item], &[block], 1, LayoutStyle::HND);
    let c = Compatible::new(of(8), of(16)).unwrap();
    let request = |cached| Request {
        tokens: Tokens::new(22),
        src: vec![held(22, &[4, 1, 2]).into()],
        dst: vec![wanted(cached, &[0, 1]).into()],
    };
    // 5 entries; source blocks have 2, destination blocks 4.
    assert_eq!(moves(&c, &request(0), 0, 0), [(64, 0, 16), (16, 16, 24)]);
    // Of the 7 cached tokens one entry is complete.
    assert_eq!(moves(&c, &request(7), 0, 0), [(72, 8, 8), (16, 16, 24)]);
    let bound = BoundRequest::new(&c, request(0)).unwrap();
    let zero: Vec<_> = ZeroPlan::new(c.dst(), RankId::ZERO)
        .unwrap()
        .resolve(&bound)
        .unwrap()
        .ranges()
        .map(|z| (z.offset, z.len))
        .collect();
    assert_eq!(zero, [(40, 24)]);
}

#[test]
fn a_scale_moves_with_any_token_of_its_block_and_a_hit_may_not_cut_it() {
    let components = vec![Component::new("kv", 8, "fp8"), Component::new("scale", 4, "f32").with_span(4)];
    let item = [Item::paged("attn", PagedItem::new(2, components.clone()))];
    let of = |tp, block| engine(&[&item], &[block], tp, LayoutStyle::HND);
    let c = Compatible::new(of(1, 4), of(2, 8)).unwrap();
    let request = |cached| Request {
        tokens: Tokens::new(9),
        src: vec![held(9, &[0, 1, 2]).into()],
        dst: vec![wanted(cached, &[0, 1]).into()],
    };
    // A source block: [head][4 tokens] of 8 bytes, then [head] scales; a destination block: [8 tokens], then 2 scales.
    let page = 2 * 4 * 8 + 2 * 4;
    let expected = [
        (32, 0, 32),
        (page + 32, 32, 32),
        (64 + 4, 64, 4),
        (page + 64 + 4, 68, 4),
        (2 * page + 32, 72, 8),
        (2 * page + 64 + 4, 72 + 64, 4),
    ];
    assert_eq!(moves(&c, &request(0), 0, 1), expected);
    let errors = BoundRequest::new(&c, request(6)).unwrap_err().0;
    assert!(matches!(errors[..], [RequestError::SplitSpan { .. }]), "{errors:?}");
    assert!(BoundRequest::new(&c, request(4)).is_ok());
    // One scale for all heads of a rank can't be re-sharded.
    let shared = [Item::paged("attn", PagedItem::new(2, vec![components[0].clone(), components[1].clone().shared()]))];
    let of = |tp| engine(&[&shared], &[4], tp, LayoutStyle::HND);
    assert!(Compatible::new(of(2), of(2)).is_ok());
    let errors = Compatible::new(of(1), of(2)).unwrap_err().0;
    assert!(
        matches!(&errors[..], [Mismatch::SharedValue { component, .. }] if component.as_str() == "scale"),
        "{errors:?}"
    );
    // Nor can scales of 4 tokens become scales of 8.
    let wide =
        [Item::paged("attn", PagedItem::new(2, vec![components[0].clone(), components[1].clone().with_span(8)]))];
    let errors = Compatible::new(of(1), engine(&[&wide], &[8], 1, LayoutStyle::HND)).unwrap_err().0;
    assert!(matches!(errors[..], [Mismatch::Coverage { .. }]), "{errors:?}");
}

#[test]
fn a_ring_keeps_the_last_tokens_in_their_places() {
    let kv = PagedItem {
        retention: Retention::Ring(Tokens::new(8)),
        ..PagedItem::new(1, vec![Component::new("kv", 2, "u8")])
    };
    let item = [Item::paged("ring", kv)];
    let of = |block| engine(&[&item], &[block], 1, LayoutStyle::HND);
    let c = Compatible::new(of(4), of(8)).unwrap();
    let request =
        |n| Request { tokens: Tokens::new(n), src: vec![held(n, &[5, 2]).into()], dst: vec![wanted(0, &[1]).into()] };
    // Tokens 3 to 10: places 3 to 7, then 0 to 2.
    assert_eq!(moves(&c, &request(11), 0, 0), [(40, 16, 6), (46, 22, 2), (16, 24, 8)]);
    // Not gone round yet: 3 tokens, and 5 places to zero.
    assert_eq!(moves(&c, &request(3), 0, 0), [(40, 16, 6)]);
    let zero = |n| {
        let bound = BoundRequest::new(&c, request(n)).unwrap();
        ZeroPlan::new(c.dst(), RankId::ZERO).unwrap().resolve(&bound).unwrap().bytes().get()
    };
    assert_eq!((zero(3), zero(8), zero(11)), (10, 0, 0));
    let mut wrong = request(3);
    wrong.src = vec![held(3, &[5]).into()];
    let errors = BoundRequest::new(&c, wrong).unwrap_err().0;
    assert!(matches!(errors[..], [RequestError::RingTable { got: 1, expected: 2, .. }]), "{errors:?}");
}

#[test]
fn items_of_one_side_only_are_a_mismatch_or_none_of_our_business() {
    let kv = |name: &str| Item::paged(name, PagedItem::new(1, vec![Component::new("kv", 2, "u8")]));
    let (both, with_draft) = ([kv("attn")], [kv("attn"), kv("draft")]);
    let of = |items: &[Item]| engine(&[items], &[4], 1, LayoutStyle::PACKED_ROWS);
    let (plain, draft) = (of(&both), of(&with_draft));
    let missing = Compatible::new(Arc::clone(&plain), Arc::clone(&draft)).unwrap_err().0;
    assert!(matches!(missing[..], [Mismatch::MissingAtSource { .. }]), "{missing:?}");
    let options = CompatOptions { destination_only: Unmatched::Ignore, ..CompatOptions::default() };
    let c = Compatible::with(Arc::clone(&plain), Arc::clone(&draft), options).unwrap();
    let request =
        Request { tokens: Tokens::new(3), src: vec![held(3, &[1]).into()], dst: vec![wanted(0, &[2]).into()] };
    assert_eq!(moves(&c, &request, 0, 0), [(8, 32, 6)]);
    // The draft's page is not zeroed either.
    let bound = BoundRequest::new(&c, request).unwrap();
    let zero = ZeroPlan::new(c.dst(), RankId::ZERO).unwrap().resolve(&bound).unwrap();
    assert_eq!(zero.ranges().map(|z| (z.offset, z.len)).collect::<Vec<_>>(), [(38, 2)]);
    assert!(Compatible::with(draft, plain, options).is_err());
}

#[test]
fn stripes_deal_neighbouring_items_out_over_equal_holders() {
    let latent = |i: u32| Item::paged(&format!("{i:02}"), PagedItem::new(1, vec![Component::new("latent", 8, "u8")]));
    let items: Vec<Item> = (0..61).map(latent).collect();
    let of = |tp| engine(&[&items], &[4], tp, LayoutStyle::HND);
    let c = Compatible::new(of(8), of(1)).unwrap();
    let layers = |stripe| -> Vec<(u32, usize)> {
        let peers = PeerMap::with(&c, PeerOptions { salt: 3, stripe }, |_, _| 0).unwrap();
        let of = |p: &RankPair| {
            let plan = PairPlan::new(&c, &peers, p.src(), p.dst()).unwrap();
            (p.src().get(), plan.classes().iter().map(|c| c.items().len()).sum())
        };
        peers.pairs().iter().map(of).collect()
    };
    assert_eq!(layers(false), [(3, 61)]);
    let mut counts: Vec<usize> = layers(true).into_iter().map(|l| l.1).collect();
    counts.sort_unstable();
    assert_eq!(counts, [7, 7, 7, 8, 8, 8, 8, 8]);
}

#[test]
fn a_row_of_different_pages_moves_whole_where_both_sides_have_it() {
    // A latent and an indexer's key for each layer, side by side in one row.
    let paged = |name: &str, width| Item::paged(name, PagedItem::new(1, vec![Component::new("kv", width, "u8")]));
    let items = [paged("0.attn", 8), paged("0.index", 3), paged("1.attn", 8), paged("1.index", 3)];
    let of = |style| engine(&[&items], &[4], 1, style);
    let request = Request {
        tokens: Tokens::new(12),
        src: vec![held(12, &[1, 5, 3]).into()],
        dst: vec![wanted(0, &[4, 2, 7]).into()],
    };
    let row = 2 * (8 + 3) * 4;
    let c = Compatible::new(of(LayoutStyle::PACKED_ROWS), of(LayoutStyle::PACKED_ROWS)).unwrap();
    assert_eq!(moves(&c, &request, 0, 0), [(5 * row, 2 * row, row), (row, 4 * row, row), (3 * row, 7 * row, row)]);
    // A third of the tokens of the last block do not fill its row.
    let short = Request { tokens: Tokens::new(9), ..request.clone() };
    assert_eq!(moves(&c, &short, 0, 0).len(), 2 + 4);
    // One region for each item at the destination.
    let c = Compatible::new(of(LayoutStyle::PACKED_ROWS), of(LayoutStyle::HND)).unwrap();
    assert_eq!(moves(&c, &request, 0, 0).len(), 3 * 4);
}

#[test]
fn blocks_that_the_destination_has_are_not_written_for_another_group() {
    let kv = |name: &str| [Item::paged(name, PagedItem::new(1, vec![Component::new("kv", 2, "u8")]))];
    let (a, b) = (kv("a"), kv("b"));
    let of = |share| engine(&[&a, &b], &[4, 4], 1, LayoutStyle { share, ..LayoutStyle::HND });
    let c = Compatible::new(of(false), of(true)).unwrap();
    let bind = |cached, of_a: &[u32], of_b: &[u32]| {
        let dst = vec![wanted(cached, of_a).into(), wanted(0, of_b).into()];
        let src = vec![held(8, &[0, 1]).into(), held(8, &[2, 3]).into()];
        BoundRequest::new(&c, Request { tokens: Tokens::new(8), src, dst })
    };
    for (cached, of_b) in [(8, [3, 4]), (4, [3, 5]), (0, [5, 4])] {
        let errors = bind(cached, &[3, 4], &of_b).unwrap_err().0;
        assert!(matches!(errors[..], [RequestError::SharedBytes { .. }]), "{cached} cached: {errors:?}");
        assert!(bind(cached, &[3, 4], &[5, 6]).is_ok());
    }
}

#[test]
fn engines_without_a_common_item_are_never_compatible() {
    let kv = |name: &str| [Item::paged(name, PagedItem::new(1, vec![Component::new("kv", 2, "u8")]))];
    let (a, b) = (kv("model.layers.0"), kv("language_model.layers.0"));
    let options = CompatOptions { source_only: Unmatched::Ignore, destination_only: Unmatched::Ignore };
    let of = |items: &[Item]| engine(&[items], &[4], 1, LayoutStyle::HND);
    let errors = Compatible::with(of(&a), of(&b), options).unwrap_err().0;
    assert!(matches!(errors[..], [Mismatch::NothingInCommon { src: 1, dst: 1, .. }]), "{errors:?}");
}

#[test]
fn a_scale_never_replaces_one_of_tokens_that_are_present() {
    let components = vec![Component::new("kv", 8, "fp8"), Component::new("scale", 4, "f32").with_span(4)];
    let retention = Retention::Window(Tokens::new(7));
    let item = [Item::paged("attn", PagedItem { retention, ..PagedItem::new(1, components) })];
    let of = || engine(&[&item], &[4], 1, LayoutStyle::HND);
    let c = Compatible::new(of(), of()).unwrap();
    // At 16 the window starts at 10, in the stretch from 8 to 11.
    for cached in 0..16 {
        let src = vec![held(16, &[0, 1, 2, 3]).into()];
        let dst = vec![wanted(cached, &[4, 5, 6, 7]).into()];
        let bound = BoundRequest::new(&c, Request { tokens: Tokens::new(16), src, dst });
        assert_eq!(bound.is_ok(), cached <= 8 || cached == 12, "{cached} cached");
    }
}
