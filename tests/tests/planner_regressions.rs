//! Faults that the random engines found once, each as the smallest case that shows it.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use kvferry_geometry::batch::{Base, Batch, BoundsError, Dim, Nest, PairRun, Part, Section};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::{LayoutStyle, StyleError};
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::request::{BlockTable, BoundRequest, DstPaged, Request, RequestError, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention};
use kvferry_geometry::units::{BlockId, Bytes, ItemId, RegionId, TokenRange, Tokens};
use kvferry_oracle::{Verdict, prove};

fn spec(items: u32, heads: u32) -> ModelSpec {
    let paged = || PagedItem::new(heads, vec![Component::new("k", 2, "u16")]);
    ModelSpec::new((0..items).map(|i| Item::paged(&format!("l{i}"), paged())).collect()).unwrap()
}

/// One rank with everything; groups are (items, block size).
fn engine(spec: &ModelSpec, style: LayoutStyle, groups: &[(&[u32], u32)], blocks: u32) -> Arc<Manifest> {
    let placement = Parallelism::tensor(spec, 1).place(spec, |_, _| HeadRule::Split).unwrap().remove(0);
    let items: Vec<Vec<ItemId>> = groups.iter().map(|g| g.0.iter().map(|&i| ItemId::new(i)).collect()).collect();
    let tables: Vec<(&[ItemId], u32, u32)> = items.iter().zip(groups).map(|(i, g)| (&i[..], g.1, blocks)).collect();
    let layout = style.build(spec, &placement, &tables).unwrap();
    let mut named = Vec::new();
    for (items, g) in items.iter().zip(groups) {
        let name = format!("g{}", named.len()).as_str().into();
        named.push(CacheGroup { name, items: items.clone(), block_tokens: Tokens::new(u64::from(g.1)) });
    }
    Arc::new(Manifest::new(spec.clone(), named, vec![RankManifest { placement, layout }]).unwrap())
}

/// Moves and zeroes all that is needed; tables are in order from block 0.
fn transfer(src: &Arc<Manifest>, dst: &Arc<Manifest>, tokens: u64, tails: &[Tail], room: u32) -> Verdict {
    let length =
        |m: &Manifest, group: usize| u32::try_from(tokens.div_ceil(m.groups()[group].block_tokens.get())).unwrap();
    let held = |group: usize| {
        let table = BlockTable::contiguous(0, BlockId::ZERO, length(src, group));
        let held = TokenRange::new(Tokens::ZERO, Tokens::new(tokens));
        SrcPaged { table, held, tail: tails[group] }.into()
    };
    let room = |_| DstPaged { table: BlockTable::contiguous(0, BlockId::ZERO, room), cached: Tokens::ZERO }.into();
    let request = Request {
        tokens: Tokens::new(tokens),
        src: (0..src.groups().len()).map(held).collect(),
        dst: (0..dst.groups().len()).map(room).collect(),
    };
    proven(src, dst, &request)
}

/// What the oracle counts of a request that must be right.
fn proven(src: &Arc<Manifest>, dst: &Arc<Manifest>, request: &Request) -> Verdict {
    let both = Compatible::new(src.clone(), dst.clone()).unwrap();
    let peers = PeerMap::new(&both, 0).unwrap();
    prove(&both, &peers, request).unwrap().verdict
}

/// A whole HND block is one run, but its tokens are not: the heads lie between them.
#[test]
fn hnd_blocks_of_two_tokens_are_not_token_runs() {
    let spec = spec(1, 5);
    let (src, dst) =
        (engine(&spec, LayoutStyle::HND, &[(&[0], 4)], 19), engine(&spec, LayoutStyle::HND, &[(&[0], 2)], 38));
    let seen = transfer(&src, &dst, 75, &[Tail::Exact], 38);
    assert_eq!((seen.moved, seen.zeroed), (75 * 10, 10));
    let alike = engine(&spec, LayoutStyle::HND, &[(&[0], 2)], 38);
    assert_eq!(transfer(&alike, &dst, 75, &[Tail::Exact], 38).moved, 75 * 10);
}

/// A destination group that two source groups feed, of which one moves its zeroed tail along.
#[test]
fn frozen_and_exact_tails_may_meet_in_one_group() {
    let spec = spec(2, 1);
    let src = engine(&spec, LayoutStyle::HND, &[(&[1], 4), (&[0], 11)], 20);
    let dst = engine(&spec, LayoutStyle::HND, &[(&[1, 0], 4)], 17);
    let seen = transfer(&src, &dst, 61, &[Tail::Exact, Tail::Frozen], 17);
    // Item 0 moves up to token 66, where its source block ends; the room ends at 68.
    assert_eq!((seen.moved, seen.zeroed), ((61 + 66) * 2, (7 + 2) * 2));
}

fn batch(bases: usize, counts: &[u64], run: u64, pairs: Vec<PairRun>) -> Batch {
    let base = Base { src_region: RegionId::ZERO, dst_region: RegionId::ZERO, src_offset: 0, dst_offset: 0 };
    let dims = counts.iter().map(|&count| Dim { count, src_stride: 0, dst_stride: 0 }).collect();
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: 0,
        dst_block_stride: 0,
        src_step: 0,
        dst_step: 0,
        nest: Nest { dims, run },
        pairs: pairs.into(),
    };
    Batch::new(vec![Section { bases: vec![base; bases].into(), parts: vec![part] }])
}

/// What is multiplied by nothing must be countable all the same.
#[test]
fn a_batch_whose_counts_overflow_is_refused_also_where_it_moves_nothing() {
    let regions = [Bytes::new(u64::MAX)];
    let one = || vec![PairRun { src: 0, dst: 0, count: 3 }];
    for batch in [
        batch(1, &[u64::MAX, u64::MAX], 1, Vec::new()),
        batch(0, &[u64::MAX, u64::MAX], 1, one()),
        batch(0, &[], u64::MAX, one()),
        batch(2, &[1 << 40], 1 << 30, one()),
    ] {
        match batch.check(&regions, &regions) {
            Ok(bounded) => assert_eq!((bounded.bytes(), bounded.batch().descriptors()), (Bytes::ZERO, 0)),
            Err(e) => assert!(matches!(e, BoundsError::TooLarge | BoundsError::OutOfRegion { .. }), "{e}"),
        }
    }
}

#[test]
fn a_style_for_blocks_of_no_tokens_is_refused() {
    let spec = spec(1, 1);
    let placement = Parallelism::tensor(&spec, 1).place(&spec, |_, _| HeadRule::Split).unwrap().remove(0);
    let style = LayoutStyle { kernel_block: Some(5), ..LayoutStyle::HND };
    let refused = style.build(&spec, &placement, &[(&[ItemId::ZERO], 0, 4)]);
    assert!(matches!(refused, Err(StyleError::Divides { .. })), "{refused:?}");
}

#[test]
fn the_last_block_id_is_an_id() {
    let last = BlockId::new(u32::MAX);
    assert_eq!(BlockTable::new(0, &[last]).iter().collect::<Vec<_>>(), [last]);
    assert_eq!(BlockTable::contiguous(7, last, 3).iter().collect::<Vec<_>>(), [last]);
    let three = BlockTable::contiguous(7, BlockId::new(u32::MAX - 1), 3);
    assert_eq!((three.len(), three.iter().count()), (2, 2));
}

#[test]
fn what_is_needed_lies_in_the_sequence_whatever_the_window() {
    for n in [0, 1, 5, u64::MAX] {
        for w in [0, 1, 2, 6, 7, u64::MAX] {
            let need = Retention::Window(Tokens::new(w)).needed(Tokens::new(n));
            assert!(need.end() <= Tokens::new(n));
            assert_eq!(need.len().get(), w.saturating_sub(1).min(n), "window {w} at {n}");
        }
    }
}

/// One item in one group, of one component for each token and one with values for `span` entries.
fn scaled(retention: Retention, tokens_per_entry: u32, span: u32, block: u32) -> Arc<Manifest> {
    let scale = Component::new("k.scale", 4, "f32").with_span(span);
    let item =
        PagedItem { retention, tokens_per_entry, ..PagedItem::new(1, vec![Component::new("k", 2, "u16"), scale]) };
    let spec = ModelSpec::new(vec![Item::paged("a", item)]).unwrap();
    engine(&spec, LayoutStyle::HND, &[(&[0], block)], 64)
}

/// Nothing is needed, so no value is either: `[1, 1)` is in the middle of one.
#[test]
fn a_value_of_several_entries_stays_where_no_token_moves() {
    let window = || scaled(Retention::Window(Tokens::new(1)), 1, 2, 2);
    assert_eq!(transfer(&window(), &window(), 1, &[Tail::Exact], 1).moved, 0);
}

/// Token 248 is needed, but the entry that it begins isn't complete; the value's older entry is no longer needed.
#[test]
fn a_value_stays_where_none_of_its_entries_moves() {
    let window = || scaled(Retention::Window(Tokens::new(2)), 2, 3, 36);
    assert_eq!(transfer(&window(), &window(), 249, &[Tail::Exact], 7).moved, 0);
}

/// A value begun with an entry that the window has left, and frozen while its next entry isn't full, moves with the tail.
#[test]
fn a_value_begun_before_the_window_moves_with_a_frozen_tail() {
    let window = || scaled(Retention::Window(Tokens::new(2)), 2, 2, 4);
    let table = || BlockTable::contiguous(0, BlockId::ZERO, 14);
    let held = TokenRange::new(Tokens::new(54), Tokens::new(55));
    let request = Request {
        tokens: Tokens::new(55),
        src: vec![SrcPaged { table: table(), held, tail: Tail::Frozen }.into()],
        dst: vec![DstPaged { table: table(), cached: Tokens::ZERO }.into()],
    };
    // The entry of tokens 54 and 55, as zeros, and the value.
    assert_eq!(proven(&window(), &window(), &request).moved, 2 + 4);
}

/// Of the first value's entries only one is complete.
#[test]
fn a_value_moves_with_its_first_entry() {
    let engine = || scaled(Retention::Full, 2, 3, 36);
    assert_eq!(transfer(&engine(), &engine(), 1, &[Tail::Exact], 1).moved, 0);
    assert_eq!(transfer(&engine(), &engine(), 3, &[Tail::Exact], 1).moved, 2 + 4);
}

/// Items of one group that keep other tokens: what the one doesn't need hides no zeros of the other, and isn't zeroed.
#[test]
fn zeros_follow_the_items_that_move() {
    let k = || PagedItem::new(1, vec![Component::new("k", 2, "u16")]);
    let window = PagedItem { retention: Retention::Window(Tokens::new(1)), ..k() };
    let spec = ModelSpec::new(vec![Item::paged("window", window), Item::paged("full", k())]).unwrap();
    let engine = || engine(&spec, LayoutStyle::HND, &[(&[0, 1], 4)], 8);
    let seen = transfer(&engine(), &engine(), 5, &[Tail::Exact], 2);
    assert_eq!((seen.moved, seen.zeroed), (5 * 2, 3 * 2));
}

/// A hit must be whole in values of every span, not of the longest only.
#[test]
fn a_hit_that_cuts_the_shorter_of_two_spans_is_refused() {
    let scale = |name: &str, span| Component::new(name, 4, "f32").with_span(span);
    let components = vec![Component::new("k", 2, "u16"), scale("four", 4), scale("six", 6)];
    let spec = ModelSpec::new(vec![Item::paged("a", PagedItem::new(1, components))]).unwrap();
    let engine = || engine(&spec, LayoutStyle::HND, &[(&[0], 12)], 8);
    let both = Compatible::new(engine(), engine()).unwrap();
    let bind = |cached| {
        let table = || BlockTable::contiguous(0, BlockId::ZERO, 2);
        let held = TokenRange::new(Tokens::ZERO, Tokens::new(20));
        let src = vec![SrcPaged { table: table(), held, tail: Tail::Exact }.into()];
        let dst = vec![DstPaged { table: table(), cached: Tokens::new(cached) }.into()];
        BoundRequest::new(&both, Request { tokens: Tokens::new(20), src, dst }).map(|_| ())
    };
    for cached in [4, 6, 8, 18] {
        let errors = bind(cached).unwrap_err().0;
        assert!(matches!(errors[..], [RequestError::SplitSpan { .. }]), "{cached}: {errors:?}");
    }
    assert_eq!((bind(0), bind(12), bind(20)), (Ok(()), Ok(()), Ok(())));
}
