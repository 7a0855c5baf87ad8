//! What only whole engines show: hybrids, loans, what engines ignore, striping, staging.

use kvferry_geometry::compat::{Mismatch, Unmatched};
use kvferry_geometry::layout::{LayoutStyle, StateOrder};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::request::{BlockTable, Checkpoint, DstPaged, DstState, SrcPaged, SrcState, Tail};
use kvferry_geometry::spec::{Component, Item, PagedItem, StateItem, StatePart};
use kvferry_geometry::staged::{CostModel, Place};
use kvferry_geometry::units::{Bytes, GroupId, Name, TokenRange};
use kvferry_proto::peer::BindRefusal;
use kvferry_proto::rank::Stage;
use kvferry_transport::fault::OpFault;
use kvferry_transport::{LostCause, TransferError};

use super::*;
use crate::FailureCause;
use crate::owner::{Holder, OfferError};
use crate::rank::{StagingRefused, Way};

/// Tokens of every request: two blocks of 16 and half of one.
pub(super) const N: u64 = 40;

fn ids(list: &[u32]) -> Vec<BlockId> {
    list.iter().map(|&id| BlockId::new(id)).collect()
}

pub(super) fn held(table: &[u32]) -> SrcGroup {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(N));
    SrcPaged { table: BlockTable::new(0, &ids(table)), held, tail: Tail::Exact }.into()
}

pub(super) fn room(table: &[u32], cached: u64) -> DstGroup {
    DstPaged { table: BlockTable::new(0, &ids(table)), cached: Tokens::new(cached) }.into()
}

fn state(position: u64, slot: u32) -> Checkpoint {
    Checkpoint { position: Tokens::new(position), slot: BlockId::new(slot) }
}

pub(super) fn states(list: &[(u64, u32)]) -> SrcGroup {
    SrcState { checkpoints: list.iter().map(|&(position, slot)| state(position, slot)).collect() }.into()
}

pub(super) fn slot(slot: Option<u32>, more: &[(u64, u32)]) -> DstGroup {
    let more = more.iter().map(|&(position, slot)| state(position, slot)).collect();
    DstState { slot: slot.map(BlockId::new), more }.into()
}

pub(super) fn listed(table: &[u32]) -> Vec<(BlockId, u64)> {
    ids(table).into_iter().zip(0..).collect()
}

pub(super) fn attention(name: &str) -> Item {
    Item::paged(name, PagedItem::new(4, vec![Component::new("k", 32, "bf16"), Component::new("v", 32, "bf16")]))
}

fn mixer(name: &str) -> Item {
    let parts = vec![StatePart::new("conv.x", 16, 3, 2, "bf16"), StatePart::new("temporal", 8, 1, 64, "fp32")];
    Item::state(name, StateItem { parts })
}

/// An engine of these items, in groups of `block` tokens (0 for states).
pub(super) fn engine(
    items: &[Item],
    groups: &[(&[u32], u32)],
    tp: u32,
    pp: usize,
    rule: HeadRule,
    style: LayoutStyle,
) -> Shape {
    let spec = ModelSpec::new(items.to_vec()).unwrap();
    let each = items.len().div_ceil(pp);
    let all: Vec<ItemId> = spec.iter().map(|(id, _)| id).collect();
    let parallel =
        Parallelism { stages: all.chunks(each).map(<[ItemId]>::to_vec).collect(), ..Parallelism::tensor(&spec, tp) };
    let placed = parallel.place(&spec, |_, _| rule).unwrap();
    let members: Vec<Vec<ItemId>> = groups.iter().map(|(g, _)| g.iter().map(|i| ItemId::new(*i)).collect()).collect();
    let lists: Vec<(&[ItemId], u32, u32)> = members.iter().zip(groups).map(|(m, g)| (m.as_slice(), g.1, 24)).collect();
    let rank = |placement| {
        let layout = style.build(&spec, &placement, &lists).unwrap();
        RankManifest { placement, layout }
    };
    let ranks = placed.into_iter().map(rank).collect();
    let group = |(i, m): (usize, &Vec<ItemId>)| CacheGroup {
        name: Name::new(&format!("group {i}")),
        items: m.clone(),
        block_tokens: Tokens::new(u64::from(groups[i].1)),
    };
    let groups = members.iter().enumerate().map(group).collect();
    let (compat, script) = (CompatOptions::default(), Script::default());
    Shape { spec, groups, ranks, compat, stripe: false, staging: None, script }
}

pub(super) fn hybrid(tp: u32, pp: usize, style: LayoutStyle) -> Shape {
    let items: Vec<Item> =
        (0..4).flat_map(|i| [attention(&format!("{i}.attn")), mixer(&format!("{i}.mixer"))]).collect();
    engine(&items, &[(&[0, 2, 4, 6], 16), (&[1, 3, 5, 7], 0)], tp, pp, HeadRule::Split, style)
}

/// TP 4, PP 2 with memory of its own for each item.
pub(super) fn prefill() -> Shape {
    hybrid(4, 2, LayoutStyle::HND)
}

/// TP 2, PP 1, groups that share memory, states the other way round, with scratch rows.
pub(super) fn decode() -> Shape {
    let style = LayoutStyle { share: true, state_order: StateOrder::RowsOuter, scratch_rows: 2, ..LayoutStyle::NHD };
    hybrid(2, 1, style)
}

/// Bytes of a token and of a state of [`hybrid`].
pub(super) const TOKEN_BYTES: u64 = 4 * 4 * 64;
pub(super) const STATE_BYTES: u64 = 4 * (16 * 3 * 2 + 8 * 64);

/// A hybrid whose attention is all cached still reads its state; and every request tells what arrived where.
#[test]
fn a_hybrid_whose_attention_is_cached_still_reads_its_state() {
    let mut w = World::new(prefill(), decode());
    for (salt, cached) in [(1, N), (2, 0), (3, 16)] {
        let src = || vec![held(&[3, 0, 6]), states(&[(16, 8), (N, 7)])];
        w.p.fill(salt, &src());
        let table = [9, 2, 4];
        let delivered = w.pull(N, src(), vec![room(&table, cached), slot(Some(11), &[(16, 12)])]).unwrap();
        let report = delivered.report();
        let moved = (N - cached) * TOKEN_BYTES + 2 * STATE_BYTES;
        assert_eq!((report.bytes().get(), report.compared.get()), (moved, moved));
        assert_eq!(report.groups.len(), 2);
        assert_eq!(report.groups[0].valid, TokenRange::new(Tokens::ZERO, Tokens::new(N)));
        assert_eq!((report.groups[0].complete, report.groups[0].states.len()), ((0, 2), 0));
        assert_eq!(report.groups[1].states, [state(N, 11), state(16, 12)]);
        assert_eq!(w.d.found(salt, 0, &listed(&table), (cached, N)), ((N - cached) * TOKEN_BYTES, 0));
        assert_eq!(w.d.found(salt, 1, &[(BlockId::new(11), N), (BlockId::new(12), 16)], (0, 0)), (2 * STATE_BYTES, 0));
    }
    // All of it is there already, the state too.
    let src = vec![held(&[3, 0, 6]), states(&[(N, 7)])];
    let delivered = w.pull(N, src, vec![room(&[9, 2, 4], N), slot(None, &[])]).unwrap();
    assert!(delivered.report().pairs.is_empty());
    assert_eq!(delivered.report().groups[0].valid.len(), Tokens::new(N));
    assert!(delivered.report().groups[1].states.is_empty(), "nothing has arrived");
    // A state that the producer doesn't have.
    let src = vec![held(&[3, 0, 6]), states(&[(16, 7)])];
    let failed = w.pull(N, src, vec![room(&[9, 2, 4], 16), slot(Some(11), &[])]).unwrap_err();
    assert!(matches!(&failed.cause, FailureCause::Request(e) if e.to_string().contains("40 tokens")), "{failed}");
    assert_eq!(failed.report.groups[0].valid, TokenRange::new(Tokens::ZERO, Tokens::new(16)), "what was cached stays");
}

/// A destination that is lent already is refused: by group, across groups that share memory, and against leases.
#[test]
fn destinations_that_are_lent_are_refused() {
    let mut w = World::new(prefill(), decode());
    let src = || vec![held(&[3, 0, 6]), states(&[(N, 7)])];
    let first = w.offer(src());
    let wish = w.wish(&first, N, vec![room(&[9, 2, 4], 16), slot(Some(11), &[])]);
    let first = w.d.owner.pull(wish, w.now);
    let overlaps = |w: &mut World, table: &[u32], cached, slots| {
        let fence = w.offer(src());
        let wish = w.wish(&fence, N, vec![room(table, cached), slots]);
        let pull = w.d.owner.pull(wish, w.now);
        w.d.step(w.now);
        match w.end_of(pull).map(|r| r.map_err(|f| f.cause)) {
            Some(Err(FailureCause::Overlap(o))) => {
                Some((o.group.to_string(), o.block.get(), o.lent_group.to_string(), o.lent.get(), o.holder))
            }
            None => {
                w.d.owner.cancel(pull, w.now);
                None
            }
            other => panic!("{other:?}"),
        }
    };
    let by_first = Holder::Pull(first);
    let found = |a: &str, x, b: &str, y| Some((format!("group {a}"), x, format!("group {b}"), y, by_first));
    assert_eq!(overlaps(&mut w, &[1, 5, 2], 0, slot(None, &[])), found("0", 2, "0", 2));
    // Groups share the memory of block 4, and of slot 11.
    assert_eq!(overlaps(&mut w, &[1, 5, 6], 0, slot(Some(4), &[])), found("1", 4, "0", 4));
    assert_eq!(overlaps(&mut w, &[1, 5, 11], 0, slot(None, &[])), found("0", 11, "1", 11));
    assert_eq!(overlaps(&mut w, &[1, 5, 6], 0, slot(None, &[(16, 11)])), found("1", 11, "1", 11));
    // Block 9 is cached at both, and written by none.
    assert_eq!(overlaps(&mut w, &[9, 5, 6], 16, slot(Some(7), &[])), None);
    // What is being written is not to be offered.
    let offer = |groups| Offer { groups, content_key: KEY };
    let error =
        w.d.owner.offer(LeaseId::new(9), offer(vec![held(&[1, 5, 4]), states(&[])]), Ttl::Usual, w.now).unwrap_err();
    assert!(matches!(error, OfferError::Overlap(_)), "{error}");
    let error =
        w.d.owner
            .offer(LeaseId::new(9), offer(vec![held(&[1, 5, 6]), states(&[(N, 2)])]), Ttl::Usual, w.now)
            .unwrap_err();
    assert!(matches!(error, OfferError::Overlap(_)), "{error}");
    w.run(60);
    assert!(w.end_of(first).unwrap().is_ok());
    // It has ended, and its blocks may be offered, twice, and then not be written until both leases are over.
    for lease in [10, 11] {
        w.d.owner
            .offer(LeaseId::new(lease), offer(vec![held(&[9, 2, 4]), states(&[(N, 11)])]), Ttl::Usual, w.now)
            .unwrap();
    }
    for lease in [10, 11] {
        let got = overlaps(&mut w, &[1, 5, 11], 0, slot(None, &[]));
        assert_eq!(got.map(|o| (o.3, o.4)), Some((11, Holder::Lease)));
        assert!(w.d.owner.withdraw(LeaseId::new(lease), w.now));
    }
    assert_eq!(overlaps(&mut w, &[1, 5, 11], 0, slot(None, &[])), None);
}

/// What a rank may still write stays in quarantine, and comes back when the rank says that it has stopped.
#[test]
fn blocks_in_doubt_are_nobody_elses() {
    let mut d = decode();
    d.script.submit = [(0, OpFault::Delay(Duration::from_secs(1000))), (1, OpFault::InDoubt(lost()))].into();
    let mut w = World::new(prefill(), d);
    let src = || vec![held(&[3, 0, 6]), states(&[(N, 7)])];
    let dst = || vec![room(&[9, 2, 4], 0), slot(Some(11), &[])];
    let failed = w.pull(N, src(), dst()).unwrap_err();
    assert_eq!(failed.report.in_doubt, [RankId::new(0)], "{failed}");
    assert_eq!(w.d.owner.quarantined(), 4);
    let again = w.pull(N, src(), dst()).unwrap_err();
    let FailureCause::Overlap(overlap) = &again.cause else { panic!("{again}") };
    assert!(matches!(overlap.holder, Holder::Quarantine(_)), "{overlap}");
    assert!(overlap.to_string().contains("quarantine"), "{overlap}");
    w.pull(N, src(), vec![room(&[1, 5, 6], 0), slot(Some(7), &[])]).unwrap();
}

fn lost() -> TransferError {
    TransferError::PeerLost(LostCause::Gone)
}

/// A draft that only one engine has: a mismatch, unless both let it pass.
#[test]
fn items_of_one_engine_are_ignored_if_both_say_so() {
    let plain = || engine(&[attention("layer")], &[(&[0], 16)], 2, 1, HeadRule::Split, LayoutStyle::HND);
    let drafted = |groups: &[(&[u32], u32)]| {
        engine(&[attention("layer"), attention("draft")], groups, 1, 1, HeadRule::Split, LayoutStyle::NHD)
    };
    let ignore = |source_only, destination_only| {
        let way = |ignored| if ignored { Unmatched::Ignore } else { Unmatched::Refuse };
        CompatOptions { source_only: way(source_only), destination_only: way(destination_only) }
    };
    let one: &[(&[u32], u32)] = &[(&[0, 1], 16)];
    let two: &[(&[u32], u32)] = &[(&[0], 16), (&[1], 16)];
    // The draft at the destination.
    for (groups, at_p, at_d) in [(one, false, false), (one, false, true), (one, true, true), (two, true, true)] {
        let mut p = Shape { compat: ignore(false, at_p), ..plain() };
        p.groups[0].name = Name::new("other name");
        let mut w = World::new(p, Shape { compat: ignore(false, at_d), ..drafted(groups) });
        w.p.fill(1, &[held(&[3, 0, 6])]);
        let dst: Vec<DstGroup> = (0u32..).zip(groups).map(|(i, _)| room(&[9 + i, 2 + 2 * i, 4 + 2 * i], 0)).collect();
        let result = w.pull(N, vec![held(&[3, 0, 6])], dst);
        match result.map_err(|f| f.cause) {
            Ok(delivered) => {
                assert!(at_p && at_d);
                let report = delivered.report();
                assert_eq!(report.bytes(), Bytes::new(N * 4 * 64));
                let outcome = report.groups.last().unwrap();
                assert_eq!((outcome.ignored.clone(), outcome.complete), (vec![Name::new("draft")], (0, 0)));
                if groups.len() == 2 {
                    assert_eq!((report.groups[0].complete, outcome.valid.is_empty()), ((0, 2), true));
                } else {
                    assert_eq!(outcome.valid.len(), Tokens::new(N), "the target's tokens are all there");
                }
            }
            Err(FailureCause::Mismatch(m)) => {
                assert!(!at_d);
                assert!(matches!(&m.0[..], [Mismatch::MissingAtSource { item, .. }] if item.as_str() == "draft"));
            }
            Err(FailureCause::Refused(BindRefusal::Incompatible(why))) => {
                assert!(at_d && !at_p);
                assert!(why.contains("draft") && why.contains("ignore items"), "{why}");
            }
            Err(other) => panic!("{other}"),
        }
    }
    // The draft at the source, which both ignore.
    let options = ignore(true, false);
    let p = Shape { compat: options, ..drafted(two) };
    let mut w = World::new(p, Shape { compat: options, ..plain() });
    let delivered = w.pull(N, vec![held(&[3, 0, 6]), held(&[1, 2, 4])], vec![room(&[1, 2, 3], 0)]).unwrap();
    assert!(delivered.report().groups[0].ignored.is_empty());
}

/// Striping reads from all replicas; engines that don't agree on it are told what to change.
#[test]
fn striping_is_agreed_on() {
    let latent = |name: &str| Item::paged(name, PagedItem::new(1, vec![Component::new("latent", 64, "bf16")]));
    let items: Vec<Item> = (0..8).map(|i| latent(&format!("layer {i}"))).collect();
    let all: [u32; 8] = std::array::from_fn(|i| u32::try_from(i).unwrap());
    let shape =
        |tp, stripe| Shape { stripe, ..engine(&items, &[(&all, 16)], tp, 1, HeadRule::Whole, LayoutStyle::HND) };
    for (at_p, at_d, sources) in
        [(false, false, Some(1)), (true, true, Some(4)), (true, false, None), (false, true, None)]
    {
        let mut w = World::new(shape(4, at_p), shape(1, at_d));
        w.p.fill(1, &[held(&[3, 0, 6])]);
        match w.pull(N, vec![held(&[3, 0, 6])], vec![room(&[1, 2, 3], 0)]).map_err(|f| f.cause) {
            Ok(delivered) => {
                assert_eq!(Some(delivered.report().pairs.len()), sources);
                assert_eq!(w.d.found(1, 0, &listed(&[1, 2, 3]), (0, N)), (N * 8 * 64, 0));
            }
            Err(FailureCause::Handshake { reasons, .. }) => {
                assert_eq!(sources, None);
                assert!(reasons[0].contains("configure `stripe` alike"), "{reasons:?}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}

pub(super) fn staged(bytes: usize, way: Way) -> Shape {
    Shape { staging: Some((bytes, StagingConfig { way, ..StagingConfig::default() })), ..decode() }
}

pub(super) fn places(delivered: &Delivered) -> Vec<Place> {
    delivered.report().pairs.iter().map(|p| p.place).collect()
}

pub(super) fn source() -> Vec<SrcGroup> {
    vec![held(&[3, 0, 6]), states(&[(N, 7)])]
}

/// The i-th of some requests with blocks of their own.
pub(super) fn destination(i: u32) -> Vec<DstGroup> {
    vec![room(&[i * 4, i * 4 + 1, i * 4 + 2], 0), slot(Some(i * 4 + 3), &[])]
}

pub(super) fn is_there(w: &World, i: u32) -> bool {
    let table = listed(&[i * 4, i * 4 + 1, i * 4 + 2]);
    w.d.found(1, 0, &table, (0, N)) == (N * TOKEN_BYTES, 0)
        && w.d.found(1, 1, &[(BlockId::new(i * 4 + 3), N)], (0, 0)) == (STATE_BYTES, 0)
}

/// Whichever way bytes take, they are the same, and all of them are compared in place.
#[test]
fn staged_bytes_are_the_direct_ones() {
    let mut images = Vec::new();
    for (way, bytes, expected) in [
        (Way::Direct, 1 << 20, Place::Direct),
        (Way::Destination, 1 << 20, Place::Destination),
        // Larger than the pool, and nothing to gain.
        (Way::Destination, 4096, Place::Direct),
        (Way::Auto, 1 << 20, Place::Direct),
    ] {
        let mut w = World::new(prefill(), staged(bytes, way));
        w.p.fill(1, &source());
        let delivered = w.pull(N, source(), destination(1)).unwrap();
        assert!(places(&delivered).iter().all(|p| *p == expected), "{way:?}: {:?}", places(&delivered));
        assert_eq!(places(&delivered).len(), 8);
        let all = N * TOKEN_BYTES + STATE_BYTES;
        assert_eq!((delivered.report().bytes().get(), delivered.report().compared.get()), (all, all));
        assert!(is_there(&w, 1));
        assert!(w.d.ranks.iter().all(|r| r.staging_lent() == Bytes::ZERO), "all segments are back");
        images.push(w.d.memory.iter().flatten().map(|r| r.to_vec().unwrap()).collect::<Vec<_>>());
    }
    assert!(images.windows(2).all(|w| w[0] == w[1]), "tails are zeroed alike, and nothing else is touched");
    // What the model finds worth it is staged.
    let mut d = staged(1 << 20, Way::Auto);
    if let Some((_, config)) = &mut d.staging {
        config.cost = Some(CostModel { descriptor_ns: 1_000_000, stage_ns: 0, ..CostModel::default() });
    }
    let mut w = World::new(prefill(), d);
    w.p.fill(1, &source());
    let delivered = w.pull(N, source(), destination(1)).unwrap();
    assert!(places(&delivered).contains(&Place::Destination), "{:?}", places(&delivered));
    assert!(is_there(&w, 1));
}

/// A comparison of staged bytes looks at their place, not at the staging memory.
#[test]
fn full_compares_what_is_in_place() {
    let mut w = World::new(prefill(), staged(1 << 20, Way::Destination));
    w.p.fill(1, &source());
    w.d.permutes = false;
    let fence = w.offer(source());
    let wish = w.wish(&fence, N, destination(1));
    let pull = w.d.owner.pull(wish, w.now);
    w.run(30);
    assert_eq!(w.d.work.len(), 8);
    for (rank, work) in std::mem::take(&mut w.d.work) {
        // One of them is said to be done, and wasn't.
        if work.id.0 > 1 || rank > 0 {
            work.permute.run(1);
        }
        w.d.ranks[rank].work_done(work.id, w.now);
    }
    w.run(30);
    let failed = w.end_of(pull).unwrap().unwrap_err();
    let faults = &failed.report.faults;
    assert_eq!(faults.iter().map(|(rank, f)| (rank.get(), f.stage)).collect::<Vec<_>>(), [(0, Stage::Compare)]);
    // Attention and states share memory: each is named as what it is.
    let names: std::collections::BTreeSet<_> =
        faults[0].1.bad.iter().map(|b| (b.item.to_string().contains("attn"), b.block.get() == 7)).collect();
    assert_eq!(names, [(true, false), (false, true)].into());
}

/// More requests than staging memory holds: all are served in turn, in segments that never meet.
#[test]
fn requests_share_staging_memory_in_turn() {
    // Each rank's share of a request is 4 sources; the largest takes two pages.
    let mut w = World::new(prefill(), staged(5 * 4096, Way::Destination));
    w.p.fill(1, &source());
    w.d.permutes = false;
    let mut pulls = Vec::new();
    for i in 0..5 {
        let fence = w.offer(source());
        let wish = w.wish(&fence, N, destination(i));
        pulls.push(w.d.owner.pull(wish, w.now));
    }
    let (mut most, mut waited) = (0, false);
    for round in 0..200 {
        w.run(3);
        for rank in 0..2 {
            // The staging ranges that are to be read, of all work that is not done.
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for (_, work) in w.d.work.iter().filter(|(r, _)| *r == rank) {
                let (mut from, mut to) = (u64::MAX, 0);
                let batch = work.permute.batch().batch();
                let mut cursor = batch.cursor();
                let mut out = [kvferry_geometry::batch::Descriptor::default(); 64];
                loop {
                    let n = cursor.fill(&mut out);
                    if n == 0 {
                        break;
                    }
                    for d in &out[..n] {
                        (from, to) = (from.min(d.src_offset), to.max(d.src_offset + d.len));
                    }
                }
                ranges.push((from, to));
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|r| r[0].1 <= r[1].0), "segments meet: {ranges:?}");
            most = most.max(ranges.len());
            waited |= w.d.ranks[rank].staging_lent() > Bytes::new(3 * 4096);
        }
        // The last first, one at a time.
        if let Some((rank, work)) = w.d.work.pop() {
            work.permute.run(2);
            w.d.ranks[rank].work_done(work.id, w.now);
        } else if pulls.iter().all(|p| w.end_of(*p).is_some()) {
            assert!(round > 10);
            break;
        }
    }
    assert!(most > 1 && waited, "several segments were in use at a time: {most}");
    for (i, pull) in (0..).zip(pulls) {
        let delivered = w.end_of(pull).unwrap().unwrap();
        assert!(places(&delivered).iter().all(|p| *p == Place::Destination));
        assert!(is_there(&w, i));
    }
    assert!(w.d.ranks.iter().all(|r| r.staging_lent() == Bytes::ZERO));
}

/// Whoever is cancelled in the line leaves it, and those behind go on.
#[test]
fn a_request_cancelled_in_the_line_makes_room() {
    let mut w = World::new(prefill(), staged(8 * 4096, Way::Destination));
    w.p.fill(1, &source());
    w.d.permutes = false;
    let mut pulls = Vec::new();
    for i in 0..3 {
        let fence = w.offer(source());
        let wish = w.wish(&fence, N, destination(i));
        pulls.push(w.d.owner.pull(wish, w.now));
        w.run(10);
    }
    // The first has all the memory; the second gives up while it waits.
    let lent = w.d.ranks[0].staging_lent();
    assert!(lent > Bytes::ZERO);
    w.d.owner.cancel(pulls[1], w.now);
    w.run(10);
    let failed = w.end_of(pulls[1]).unwrap().unwrap_err();
    assert_eq!(failed.cause, FailureCause::Cancelled);
    assert!(failed.report.in_doubt.is_empty());
    // The first is cancelled too, while its bytes are being permuted: it ends when that has.
    w.d.owner.cancel(pulls[0], w.now);
    w.run(10);
    assert!(w.end_of(pulls[0]).is_none(), "its blocks are being written");
    w.d.permutes = true;
    for (rank, work) in std::mem::take(&mut w.d.work) {
        work.permute.run(1);
        w.d.ranks[rank].work_done(work.id, w.now);
    }
    w.run(40);
    assert_eq!(w.end_of(pulls[0]).unwrap().unwrap_err().cause, FailureCause::Cancelled);
    assert!(w.end_of(pulls[2]).unwrap().is_ok());
    assert!(is_there(&w, 2));
    assert!(w.d.ranks.iter().all(|r| r.staging_lent() == Bytes::ZERO));
}

/// A large one that is given up in front of the line lets small ones behind it have what is free, at once.
#[test]
fn small_requests_go_on_when_a_large_one_leaves_the_line() {
    // Each source of the first takes two pages, each of the second one.
    let mut w = World::new(prefill(), staged(3 * 4096, Way::Destination));
    w.p.fill(1, &source());
    w.d.permutes = false;
    let fence = w.offer(source());
    let wish = w.wish(&fence, N, destination(0));
    let large = w.d.owner.pull(wish, w.now);
    w.run(10);
    let fence = w.offer(source());
    let wish = w.wish(&fence, N, vec![room(&[4, 5, 6], 32), slot(None, &[])]);
    let small = w.d.owner.pull(wish, w.now);
    w.run(10);
    assert_eq!(w.d.work.len(), 2, "one source of the first at each rank");
    w.d.owner.cancel(large, w.now);
    w.run(10);
    assert_eq!(w.d.work.len(), 4, "one of the second, too");
    assert!(w.end_of(large).is_none());
    w.d.permutes = true;
    for (rank, work) in std::mem::take(&mut w.d.work) {
        work.permute.run(1);
        w.d.ranks[rank].work_done(work.id, w.now);
    }
    w.run(40);
    assert!(w.end_of(large).unwrap().is_err() && w.end_of(small).unwrap().is_ok());
    assert!(w.d.ranks.iter().all(|r| r.staging_lent() == Bytes::ZERO));
}

/// A segment comes back when a read has failed, and stays out of use when that is in doubt.
#[test]
fn segments_of_failed_reads_come_back_and_those_in_doubt_do_not() {
    for (fault, in_doubt) in [(OpFault::Fail(lost()), false), (OpFault::InDoubt(lost()), true)] {
        let mut d = staged(1 << 16, Way::Destination);
        d.script.submit = [(1, fault)].into();
        let mut w = World::new(prefill(), d);
        w.p.fill(1, &source());
        let failed = w.pull(N, source(), destination(0)).unwrap_err();
        assert_eq!((failed.report.faults[0].1.stage, failed.report.in_doubt.is_empty()), (Stage::Read, !in_doubt));
        assert_eq!(w.d.ranks[0].staging_lent() > Bytes::ZERO, in_doubt, "{failed}");
        assert_eq!(w.d.ranks[1].staging_lent(), Bytes::ZERO);
        assert!(w.pull(N, source(), destination(1)).is_ok());
        assert!(is_there(&w, 1));
    }
}

/// What a read in doubt keeps may be most of the pool: then reads that don't fit beside it go directly, those in line too.
#[test]
fn a_segment_in_doubt_holds_nobody_up() {
    let in_doubt = |pool| {
        let mut d = staged(pool, Way::Destination);
        d.script.submit = [(0, OpFault::InDoubt(lost())), (1, OpFault::InDoubt(lost()))].into();
        let w = World::new(prefill(), d);
        w.p.fill(1, &source());
        w
    };
    let mut w = in_doubt(1 << 16);
    assert!(w.pull(N, source(), destination(0)).is_err());
    let one = w.d.ranks[0].staging_lent().get();
    let mut w = in_doubt(usize::try_from(one).unwrap());
    let fence = w.offer(source());
    let wish = w.wish(&fence, N, destination(0));
    let first = w.d.owner.pull(wish, w.now);
    let fence = w.offer(source());
    let wish = w.wish(&fence, N, destination(1));
    let second = w.d.owner.pull(wish, w.now);
    w.run(60);
    assert!(w.end_of(first).unwrap().is_err() && w.end_of(second).unwrap().is_ok());
    assert!(is_there(&w, 1));
    assert!(w.pull(N, source(), destination(2)).is_ok());
}

#[test]
fn what_cannot_be_staged_is_refused() {
    let refused = |memory: Option<usize>, way| {
        let network = MemNetwork::new(1);
        let mut transport: Box<dyn Transport> = Box::new(network.endpoint().unwrap());
        let manifest = decode().ranks.swap_remove(0);
        let regions = manifest.layout.regions.iter();
        let regions = regions.map(|r| Region::zeroed(usize::try_from(r.len.get()).unwrap()).unwrap()).collect();
        let mut cache = LocalCache::register(&mut *transport, manifest, regions).unwrap();
        if let Some(bytes) = memory {
            cache = cache.with_staging(&mut *transport, Region::zeroed(bytes).unwrap()).unwrap();
        }
        let who = RankIdentity { engine: EngineId::new("e").unwrap(), rank: RankId::new(0), epoch: Epoch::new(1) };
        let config = StagingConfig { way, ..StagingConfig::default() };
        RankSession::new(who, transport, cache).with_staging(config).err()
    };
    for (memory, got) in [(None, 0), (Some(100), 100)] {
        let (got, least) = (Bytes::new(got), Bytes::new(4096));
        assert_eq!(refused(memory, Way::Destination), Some(StagingRefused::NoMemory { got, least }));
        for way in [Way::Auto, Way::Direct, Way::Source] {
            assert_eq!(refused(memory, way), None);
        }
    }
    assert_eq!(refused(Some(4096), Way::Destination), None);
}

/// The group ids of outcomes are our engine's.
#[test]
fn outcomes_are_by_our_own_groups() {
    // The producer has one group, the consumer two, in the other order.
    let items = [attention("a"), attention("b")];
    let p = engine(&items, &[(&[0, 1], 16)], 1, 1, HeadRule::Split, LayoutStyle::HND);
    let d =
        engine(&[attention("b"), attention("a")], &[(&[1], 16), (&[0], 32)], 1, 1, HeadRule::Split, LayoutStyle::NHD);
    let mut w = World::new(p, d);
    let delivered = w.pull(N, vec![held(&[3, 0, 6])], vec![room(&[1, 2, 3], 0), room(&[4, 5], 32)]).unwrap();
    let groups = &delivered.report().groups;
    assert_eq!(
        groups.iter().map(|g| (g.group, g.complete)).collect::<Vec<_>>(),
        [(GroupId::new(0), (0, 2)), (GroupId::new(1), (0, 1)),]
    );
}
