//! A prefill that is moved while it runs, on a shape whose numbers can be checked by hand: those of `docs/geometry.md`. And what
//! is refused.
#![allow(clippy::unwrap_used, reason = "a test helper that cannot build its shape has failed")]

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::plan::{PairPlan, PlanError};
use kvferry_geometry::request::{
    BlockTable, BoundRequest, Checkpoint, DstPaged, DstState, Request, RequestError, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::units::{BlockId, GroupId, ItemId, Name, RankId, TokenRange, Tokens};
use kvferry_geometry::watermarks::{Watermark, Watermarks};

/// Items of the source, which has them in another order than the destination.
const STATE: ItemId = ItemId::new(0);
const B: ItemId = ItemId::new(1);
const A: ItemId = ItemId::new(2);

/// 4 bytes for a token.
fn a() -> Item {
    Item::paged("a", PagedItem::new(1, vec![Component::new("k", 4, "u8")]))
}

/// The same, and a scale of 4 bytes for 16 tokens.
fn b() -> Item {
    let scale = Component::new("scale", 4, "f32").with_span(16);
    Item::paged("b", PagedItem::new(1, vec![Component::new("k", 4, "u8"), scale]))
}

fn s() -> Item {
    Item::state("s", StateItem { parts: vec![StatePart::new("temporal", 1, 1, 8, "u8")] })
}

/// One rank, a group and a region for each item, 8 blocks of 16 tokens or 8 slots.
fn engine(items: Vec<Item>) -> Arc<Manifest> {
    let spec = ModelSpec::new(items).unwrap();
    let groups: Vec<CacheGroup> = spec
        .iter()
        .map(|(id, item)| CacheGroup {
            name: item.name.clone(),
            items: vec![id],
            block_tokens: Tokens::new(if item.as_state().is_some() { 0 } else { 16 }),
        })
        .collect();
    let placement = Parallelism::tensor(&spec, 1).place(&spec, |_, _| HeadRule::Split).unwrap().remove(0);
    let blocks = |g: &CacheGroup| u32::try_from(g.block_tokens.get()).unwrap();
    let list: Vec<(&[ItemId], u32, u32)> = groups.iter().map(|g| (&g.items[..], blocks(g), 8)).collect();
    let layout = LayoutStyle::HND.build(&spec, &placement, &list).unwrap();
    Arc::new(Manifest::new(spec.clone(), groups, vec![RankManifest { placement, layout }]).unwrap())
}

fn table(first: u64, ids: &[u32]) -> BlockTable {
    BlockTable::new(first, &ids.iter().map(|&i| BlockId::new(i)).collect::<Vec<_>>())
}

fn paged(table: BlockTable) -> SrcGroup {
    SrcPaged { table, held: TokenRange::new(Tokens::ZERO, Tokens::new(40)), tail: Tail::Exact }.into()
}

fn state(at: &[u64]) -> SrcGroup {
    let checkpoint = |&position: &u64| Checkpoint { position: Tokens::new(position), slot: BlockId::new(3) };
    SrcState { checkpoints: at.iter().map(checkpoint).collect() }.into()
}

struct Pair {
    c: Compatible,
    plan: PairPlan,
}

impl Pair {
    fn new() -> Self {
        let c = Compatible::new(engine(vec![s(), b(), a()]), engine(vec![a(), b(), s()])).unwrap();
        let plan = PairPlan::new(&c, &PeerMap::new(&c, 0).unwrap(), RankId::ZERO, RankId::ZERO).unwrap();
        Self { c, plan }
    }

    /// 40 tokens, with these groups of the source.
    fn request(&self, src: Vec<SrcGroup>) -> Request {
        let blocks = || DstPaged { table: table(0, &[0, 1, 2]), cached: Tokens::ZERO }.into();
        let state = DstState { slot: Some(BlockId::ZERO), more: Vec::new() };
        Request { tokens: Tokens::new(40), src, dst: vec![blocks(), blocks(), state.into()] }
    }

    fn promised(&self, src: Vec<SrcGroup>) -> BoundRequest {
        BoundRequest::promised(&self.c, self.request(src)).unwrap()
    }

    fn last(&self) -> BoundRequest {
        let blocks = || paged(table(0, &[5, 6, 7]));
        BoundRequest::new(&self.c, self.request(vec![state(&[40]), blocks(), blocks()])).unwrap()
    }
}

/// What a batch moves: tokens of a, tokens of b, scales of b, bytes of s.
type Moved = (Vec<u64>, Vec<u64>, Vec<u64>, u64);

fn moved(batch: &Batch) -> Moved {
    let mut list = vec![Descriptor::default(); 64];
    let n = batch.cursor().fill(&mut list);
    let (mut tokens_a, mut tokens_b, mut scales, mut state) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for d in &list[..n] {
        for value in (d.dst_offset..d.dst_offset + d.len).step_by(4) {
            match (d.dst_region.get(), value % 68) {
                (0, _) => tokens_a.push(value / 4),
                (1, 64) => scales.push(value / 68),
                (1, k) => tokens_b.push(value / 68 * 16 + k / 4),
                _ => state += 4,
            }
        }
    }
    for list in [&mut tokens_a, &mut tokens_b, &mut scales] {
        list.sort_unstable();
    }
    (tokens_a, tokens_b, scales, state)
}

fn range(from: u64, to: u64) -> Vec<u64> {
    (from..to).collect()
}

fn tokens(from: u64, to: u64) -> TokenRange {
    TokenRange::new(Tokens::new(from), Tokens::new(to))
}

#[test]
fn a_prefill_in_four_steps() {
    let pair = Pair::new();
    let mut marks = Watermarks::none(3);
    let mut step = |request: &BoundRequest, advance: &mut dyn FnMut(&mut Watermarks)| {
        let before = marks.clone();
        advance(&mut marks);
        moved(&pair.plan.resolve_between(request, &before, &marks).unwrap())
    };
    // Two blocks of a are listed, none of b, and no state yet.
    let first = pair.promised(vec![state(&[]), paged(table(0, &[])), paged(table(0, &[5, 6]))]);
    let got = step(&first, &mut |marks| marks.advance([A], Tokens::new(20)).unwrap());
    assert_eq!(got, (range(0, 20), vec![], vec![], 0));

    let second = pair.promised(vec![state(&[]), paged(table(0, &[5, 6])), paged(table(0, &[5, 6, 7]))]);
    let got = step(&second, &mut |marks| {
        marks.advance([A], Tokens::new(40)).unwrap();
        marks.advance([B], Tokens::new(20)).unwrap();
    });
    assert_eq!(got, (range(20, 40), range(0, 20), vec![0], 0));

    let third = pair.promised(vec![state(&[40]), paged(table(0, &[5, 6, 7])), paged(table(0, &[5, 6, 7]))]);
    let got = step(&third, &mut |marks| marks.advance([B, STATE], Tokens::new(40)).unwrap());
    assert_eq!(got, (vec![], range(20, 40), vec![1], 0));

    assert_eq!(step(&pair.last(), &mut Watermarks::seal), (vec![], vec![], vec![2], 8));
}

#[test]
fn what_can_not_be_resolved_is_said() {
    let pair = Pair::new();
    let (none, whole) = (Watermarks::none(3), Watermarks::whole(3));
    let at = |item, to| {
        let mut marks = Watermarks::none(3);
        marks.advance([item], Tokens::new(to)).unwrap();
        marks
    };
    let between = |request: &BoundRequest, from: &Watermarks, to: &Watermarks| {
        let count = pair.plan.uncoalesced_between(request, from, to);
        let batch = pair.plan.resolve_between(request, from, to);
        assert_eq!(count.as_ref().err(), batch.as_ref().err());
        batch.unwrap_err()
    };
    let promised = pair.promised(vec![state(&[]), paged(table(0, &[])), paged(table(0, &[5]))]);
    assert_eq!(
        between(&promised, &none, &at(A, 20)),
        PlanError::NotListed { group: GroupId::new(2), to: tokens(0, 20), listed: tokens(0, 16) }
    );
    assert_eq!(
        between(&promised, &none, &at(B, 16)).to_string(),
        "source group 1: tokens [0, 16) are to move, but its blocks cover [0, 0) so far; list more blocks first"
    );
    // What is listed moves, whatever else is missing; and below a value's last token nothing of it is needed.
    assert_eq!(moved(&pair.plan.resolve_between(&promised, &none, &at(A, 16)).unwrap()).0, range(0, 16));

    let some_whole: Watermarks = [Watermark::NONE, Watermark::NONE, Watermark::Whole].into_iter().collect();
    assert_eq!(between(&promised, &none, &some_whole), PlanError::Promised { item: A });
    assert!(matches!(pair.plan.resolve(&promised), Err(PlanError::Promised { .. })));
    assert!(matches!(pair.plan.uncoalesced(&promised), Err(PlanError::Promised { .. })));
    // Not even what is listed: states have no part that is final before the rest.
    let marks: Watermarks = [Watermark::Whole, Watermark::NONE, Watermark::NONE].into_iter().collect();
    let listed = pair.promised(vec![state(&[40]), paged(table(0, &[])), paged(table(0, &[]))]);
    assert_eq!(between(&listed, &none, &marks), PlanError::Promised { item: STATE });

    let last = pair.last();
    assert_eq!(
        between(&last, &at(B, 20), &at(B, 19)),
        PlanError::Backwards { item: B, from: Watermark::Upto(Tokens::new(20)), to: Watermark::Upto(Tokens::new(19)) }
    );
    assert_eq!(
        between(&last, &whole, &at(A, 40)),
        PlanError::Backwards { item: STATE, from: Watermark::Whole, to: Watermark::NONE }
    );
    let foreign = |got| PlanError::ForeignWatermarks { src: RankId::ZERO, dst: RankId::ZERO, got, expected: 3 };
    assert_eq!(between(&last, &Watermarks::none(2), &whole), foreign(2));
    assert_eq!(between(&last, &none, &Watermarks::whole(4)), foreign(4));
    let other = Compatible::new(engine(vec![a()]), engine(vec![a()])).unwrap();
    let request = Request {
        tokens: Tokens::new(4),
        src: vec![paged(table(0, &[0]))],
        dst: vec![DstPaged { table: table(0, &[0]), cached: Tokens::ZERO }.into()],
    };
    let request = BoundRequest::new(&other, request).unwrap();
    assert!(matches!(between(&request, &none, &whole), PlanError::ForeignRequest { .. }));
}

#[test]
fn a_promise_may_lack_what_comes_later_and_nothing_else() {
    let pair = Pair::new();
    let refused = |src| BoundRequest::promised(&pair.c, pair.request(src)).unwrap_err().0;
    // A table grows at its end: one that begins late lacks its first blocks for good.
    let late = refused(vec![state(&[]), paged(table(0, &[])), paged(table(1, &[5]))]);
    let not_held = RequestError::NotHeld {
        group: Name::new("a"),
        need: tokens(0, 40),
        held: tokens(0, 40),
        listed: tokens(16, 32),
        blocks: 1,
    };
    assert_eq!(late, [not_held]);
    let repeated = refused(vec![state(&[]), paged(table(0, &[4, 4])), paged(table(0, &[]))]);
    assert!(matches!(repeated[..], [RequestError::RepeatedBlock { .. }]), "{repeated:?}");
    let beyond = refused(vec![state(&[]), paged(table(0, &[8])), paged(table(0, &[]))]);
    assert!(matches!(beyond[..], [RequestError::BlockOutOfRange { .. }]), "{beyond:?}");
    let kinds = refused(vec![paged(table(0, &[])), paged(table(0, &[])), state(&[])]);
    assert!(kinds.iter().all(|e| matches!(e, RequestError::GroupKind { .. })) && kinds.len() == 2, "{kinds:?}");
    // An empty table has no place that could be wrong.
    let request = pair.promised(vec![state(&[]), paged(table(u64::MAX, &[])), paged(table(7, &[]))]);
    let mut marks = Watermarks::none(3);
    marks.advance([A], Tokens::new(40)).unwrap();
    let error = pair.plan.resolve_between(&request, &Watermarks::none(3), &marks).unwrap_err();
    assert!(matches!(error, PlanError::NotListed { .. }), "{error}");
    // The destination's side is checked as ever.
    let mut request = pair.request(vec![state(&[]), paged(table(0, &[])), paged(table(0, &[]))]);
    request.dst[0] = DstPaged { table: table(0, &[0, 1]), cached: Tokens::ZERO }.into();
    let no_room = BoundRequest::promised(&pair.c, request).unwrap_err().0;
    assert!(matches!(no_room[..], [RequestError::NoRoom { .. }]), "{no_room:?}");
}

#[test]
fn a_ring_is_promised_whole_or_not_at_all() {
    let ring = || {
        let retention = Retention::Ring(Tokens::new(32));
        Item::paged("r", PagedItem { retention, ..PagedItem::new(1, vec![Component::new("k", 4, "u8")]) })
    };
    let c = Compatible::new(engine(vec![ring()]), engine(vec![ring()])).unwrap();
    let plan = PairPlan::new(&c, &PeerMap::new(&c, 0).unwrap(), RankId::ZERO, RankId::ZERO).unwrap();
    let promise = |ids: &[u32]| {
        let dst = DstPaged { table: table(0, &[0, 1]), cached: Tokens::ZERO }.into();
        let src = vec![paged(table(0, ids))];
        BoundRequest::promised(&c, Request { tokens: Tokens::new(40), src, dst: vec![dst] })
    };
    let halves = promise(&[5]).unwrap_err().0;
    assert!(matches!(halves[..], [RequestError::RingTable { got: 1, expected: 2, .. }]), "{halves:?}");
    let (none, mut marks) = (Watermarks::none(1), Watermarks::none(1));
    marks.advance([ItemId::ZERO], Tokens::new(34)).unwrap();
    let nothing = plan.resolve_between(&promise(&[]).unwrap(), &none, &marks);
    assert!(matches!(nothing, Err(PlanError::NotListed { .. })), "{nothing:?}");
    // Of 40 tokens the last 32 move, from token 8 on; 32 and 33 lie where 0 and 1 were.
    let batch = plan.resolve_between(&promise(&[5, 6]).unwrap(), &none, &marks).unwrap();
    let places = moved(&batch).0;
    assert_eq!(places, [range(0, 2), range(8, 32)].concat());
}
