//! MAM cases: recurrent states, whose parts are cut each on its own, and which have positions instead of tokens.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_geometry::compat::{Compatible, Mismatch};
use kvferry_geometry::layout::{LayoutStyle, StateOrder};
use kvferry_geometry::placement::HeadRule;
use kvferry_geometry::request::{
    BoundRequest, Checkpoint, DstGroup, DstState, Request, RequestError, SrcGroup, SrcState,
};
use kvferry_geometry::spec::{Item, StateItem, StatePart};
use kvferry_geometry::units::{BlockId, RankId, Tokens};
use kvferry_proto::request::Step;
use kvferry_tests::by_hand::{Pair, holds, kv, source_byte, table, tokens, wants};
use kvferry_tests::by_hand_states::{Ask, Shape, delta_net, delta_rule, has_read, leased, prove};
use kvferry_tests::over_mem::World;
use kvferry_transport::mem::MemFaults;

/// Bytes of one head's recurrent state.
const HEAD: u64 = 64;

/// 8 columns of x, 4 of B and 4 of C, 3 rows of 2 bytes; and 2 heads of recurrent state.
fn conv(widths: [(&str, u32); 3]) -> StateItem {
    let part = |(name, units): (&str, u32)| StatePart::new(name, units, 3, 2, "bf16");
    let mut parts: Vec<StatePart> = widths.map(part).into();
    parts.push(StatePart::new("temporal", 2, 1, HEAD, "fp32"));
    StateItem { parts }
}

fn mixer(name: &str) -> Item {
    Item::state(name, conv([("x", 8), ("B", 4), ("C", 4)]))
}

fn mamba(tp: u32) -> Shape {
    Shape::new(vec![mixer("mixer")], tp)
}

fn pair(src: &Shape, dst: &Shape) -> Pair {
    Pair::of(src.manifest(), dst.manifest())
}

fn at(position: u64, slot: u32) -> Checkpoint {
    Checkpoint { position: Tokens::new(position), slot: BlockId::new(slot) }
}

fn has(states: &[(u64, u32)]) -> SrcGroup {
    SrcState { checkpoints: states.iter().map(|s| at(s.0, s.1)).collect() }.into()
}

fn takes(slot: u32) -> DstGroup {
    DstState { slot: Some(BlockId::new(slot)), more: Vec::new() }.into()
}

/// The state after `n` tokens, from one slot to another.
fn state_request(n: u64, src: u32, dst: u32) -> Request {
    Request { tokens: Tokens::new(n), src: vec![has(&[(n, src)])], dst: vec![takes(dst)] }
}

#[test]
fn mam_01_each_part_of_a_convolution_is_cut_by_itself() {
    let pair = pair(&mamba(1), &mamba(2));
    let bound = pair.bind(state_request(7, 0, 0));
    // 48 | 24 | 24 bytes of x, B, C, then two heads.
    assert_eq!(pair.runs(0, 0, &bound), [(0, 0, 24), (48, 24, 12), (72, 36, 12), (96, 48, 64)]);
    assert_eq!(pair.runs(0, 1, &bound), [(24, 0, 24), (60, 24, 12), (84, 36, 12), (96 + HEAD, 48, HEAD)]);
}

#[test]
fn mam_01_pieces_of_two_ranks_meet_in_one_state() {
    let pair = pair(&mamba(2), &mamba(1));
    let bound = pair.bind(state_request(7, 0, 0));
    assert_eq!(pair.runs(0, 0, &bound), [(0, 0, 24), (24, 48, 12), (36, 72, 12), (48, 96, HEAD)]);
    // Whole pieces of rank 1 land at 24, 60 and 84.
    assert_eq!(pair.runs(1, 0, &bound), [(0, 24, 24), (24, 60, 12), (36, 84, 12), (48, 96 + HEAD, HEAD)]);
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert!(world.dst_memory() == pair.deliver(&bound, 0xEE));
}

#[test]
fn mam_01_q_k_and_v_of_another_width() {
    // 2 heads of q and k with 4 channels, 2 heads of v with 8.
    let engine = |tp| {
        let item = Item::state("mixer", conv([("q", 8), ("k", 8), ("v", 16)]));
        let rule = |_: &Item, part: usize| {
            [HeadRule::Blocks(4), HeadRule::Blocks(4), HeadRule::Blocks(8), HeadRule::Split][part]
        };
        Shape::new(vec![item], tp).rule(rule)
    };
    let pair = pair(&engine(1), &engine(2));
    let bound = pair.bind(state_request(7, 0, 0));
    assert_eq!(pair.runs(0, 1, &bound), [(24, 0, 24), (72, 24, 24), (144, 48, 48), (192 + HEAD, 96, HEAD)]);
    // Real sizes, and ranks that don't divide the heads.
    let delta = |tp| Shape::new(vec![delta_net("mixer", 4, 8)], tp).rule(delta_rule);
    for (src, dst) in [(1, 2), (4, 2), (4, 3), (8, 1)] {
        let _proof = prove(&delta(src).manifest(), &delta(dst).manifest(), Ask::of(9));
    }
}

#[test]
fn mam_01_groups_that_several_ranks_share() {
    // One group of B and C for all heads: where there are more ranks than groups, each has all of it.
    let shared = |tp| {
        let item = Item::state("mixer", conv([("x", 8), ("B", 4), ("C", 4)]));
        Shape::new(vec![item], tp)
            .rule(|_, part| if matches!(part, 1 | 2) { HeadRule::Blocks(4) } else { HeadRule::Split })
    };
    let pair = pair(&shared(1), &shared(2));
    let bound = pair.bind(state_request(7, 0, 0));
    assert_eq!(pair.runs(0, 1, &bound), [(24, 0, 24 + 48), (96 + HEAD, 72, HEAD)]);
    // Back again one of the copies is read, once.
    let back = Pair::of(shared(2).manifest(), shared(1).manifest());
    let bytes: u64 = (0..2).map(|src| back.batch(src, 0, &back.bind(state_request(7, 0, 0))).bytes().get()).sum();
    assert_eq!(bytes, 96 + 2 * HEAD);
    for (src, dst) in [(2, 1), (1, 2), (2, 2)] {
        let _proof = prove(&shared(src).manifest(), &shared(dst).manifest(), Ask::of(9));
    }
}

#[test]
fn mam_01_either_axis_may_be_outside() {
    let rows_outer = |tp| mamba(tp).style(LayoutStyle { state_order: StateOrder::RowsOuter, ..LayoutStyle::HND });
    for (src, dst) in [(1, 2), (2, 1), (2, 2)] {
        let _there = prove(&mamba(src).manifest(), &rows_outer(dst).manifest(), Ask::of(9));
        let _back = prove(&rows_outer(src).manifest(), &mamba(dst).manifest(), Ask::of(9));
        let _same = prove(&rows_outer(src).manifest(), &rows_outer(dst).manifest(), Ask::of(9));
    }
}

#[test]
fn mam_03_a_cache_of_another_kind_is_refused_by_name() {
    let state = Shape::new(vec![kv("attn", 2, 4), mixer("mixer")], 1).manifest();
    let paged = Shape::new(vec![kv("attn", 2, 4), kv("mixer", 2, 4)], 1).manifest();
    for (src, dst) in [(&state, &paged), (&paged, &state)] {
        let refused = Compatible::new(Arc::clone(src), Arc::clone(dst)).expect_err("another kind").0;
        assert!(
            matches!(refused.as_slice(), [Mismatch::Kind { item, src, dst }] if item.as_str() == "mixer" && src != dst),
            "{refused:?}"
        );
    }
    // A state that only one side keeps is not silently left out.
    let without = Shape::new(vec![kv("attn", 2, 4)], 1).manifest();
    let refused = Compatible::new(state, without).expect_err("one side only").0;
    assert!(matches!(refused.as_slice(), [Mismatch::MissingAtDestination { item, .. }] if item.as_str() == "mixer"));
}

/// Two groups of states on two pipeline stages.
fn two_groups(stages: &[&[&str]]) -> Shape {
    let shape = Shape::new(vec![mixer("mixer.0"), mixer("mixer.1")], 1);
    shape.groups(&[(&["mixer.0"], 0, 8), (&["mixer.1"], 0, 8)]).stages(stages)
}

fn two_states() -> Request {
    let src = vec![has(&[(7, 1)]), has(&[(7, 2)])];
    Request { tokens: Tokens::new(7), src, dst: vec![takes(3), takes(4)] }
}

#[test]
fn mam_03_a_request_ends_when_every_group_of_states_is_there() {
    let pair = pair(&two_groups(&[&["mixer.0"], &["mixer.1"]]), &two_groups(&[&["mixer.0", "mixer.1"]]));
    assert_eq!(pair.sources(0), [0, 1]);
    let bound = pair.bind(two_states());
    assert_eq!(bound.moves().len(), 2);
    for lost in 0..2 {
        let mut world = World::new(&pair, 0xEE);
        world.set_faults(0, MemFaults { lose_completion: [u64::from(lost)].into(), ..MemFaults::default() });
        let pull = world.pull(&pair, &bound);
        assert!(pull.end(1 - lost, 0).is_some() && pull.end(lost, 0).is_none());
        assert!(!pull.is_done(), "one of two states is no delivery");
    }
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert!(world.dst_memory() == pair.deliver(&bound, 0xEE));
    // A request that leaves a group out is refused.
    let mut short = two_states();
    short.dst.pop();
    let refused = BoundRequest::new(&pair.compatible, short).expect_err("one group is missing").0;
    assert!(matches!(refused.as_slice(), [RequestError::GroupCount { got: 1, expected: 2, .. }]), "{refused:?}");
    // And so is one whose producer lacks one of the two states, by the group's name.
    let mut gone = two_states();
    gone.src[1] = has(&[(6, 2)]);
    let refused = BoundRequest::new(&pair.compatible, gone).expect_err("one state is missing").0;
    let [RequestError::NoState { group, position, held }] = refused.as_slice() else { panic!("{refused:?}") };
    assert_eq!((group.as_str(), position.get()), ("group 1", 7));
    assert_eq!(held.iter().map(|t| t.get()).collect::<Vec<_>>(), [6]);
}

#[test]
fn mam_03_the_producer_hears_nothing_of_half_a_delivery() {
    // The owners' machines: with two decode stages that each wait for one group, the release comes after the second.
    let pair = pair(&two_groups(&[&["mixer.0", "mixer.1"]]), &two_groups(&[&["mixer.0"], &["mixer.1"]]));
    let reading = leased(&pair, 1, two_states().src).granted.read(&pair.peers);
    let (first, second) = (RankId::new(0), RankId::new(1));
    let Step::Waiting(reading) = reading.on_rank(second, Ok(has_read(&pair, 1))) else { panic!("rank 0 still reads") };
    assert_eq!(reading.pending().collect::<Vec<_>>(), [first]);
    let Step::Next(ended) = reading.on_rank(first, Ok(has_read(&pair, 0))) else { panic!("both have read") };
    assert!(ended.release().is_ok());
}

/// An engine's list of state slots as checkpoints: entry `k` is the state after `k + 1` blocks of 16 tokens; entries beyond the
/// prompt are scratch of speculative decoding, and id 0 stands where there is none.
fn checkpoints(list: &[u32], blocks: usize) -> SrcGroup {
    let states: Vec<(u64, u32)> =
        (1u64..).zip(list).take(blocks).filter(|(_, id)| **id != 0).map(|(k, id)| (k * 16, *id)).collect();
    has(&states)
}

/// Attention beside a state, in blocks of 16 tokens and in slots.
fn hybrid_pair() -> Pair {
    let shape = Shape::new(vec![kv("attn", 1, 2), mixer("mixer")], 1);
    let engine = shape.groups(&[(&["attn"], 16, 32), (&["mixer"], 0, 32)]);
    pair(&engine, &engine)
}

#[test]
fn mam_04_placeholders_and_scratch_are_no_states() {
    let pair = hybrid_pair();
    for list in [&[0, 0, 14][..], &[0, 0, 14, 15, 16]] {
        let bound = pair.bind(Request {
            tokens: Tokens::new(48),
            src: vec![holds(48, table(&[1, 2, 3])), checkpoints(list, 3)],
            // The destination's list is [0, 3]: one placeholder, and the slot that takes the state.
            dst: vec![wants(16, table(&[4, 5, 6])), takes(3)],
        });
        let moves = bound.moves();
        assert_eq!(moves.len(), 2);
        // Attention is trimmed by what is cached, the state is not.
        assert_eq!(moves[0].range, tokens(16, 48));
        let states: Vec<_> = moves[1].states.iter().map(|s| (s.position.get(), s.dst.get(), s.src.get())).collect();
        assert_eq!(states, [(48, 3, 14)]);
        let state = 96 + 2 * HEAD;
        let all = pair.descriptors(0, 0, &bound);
        let moved: Vec<_> =
            all.iter().filter(|d| d.dst_region.get() == 1).map(|d| (d.src_offset, d.dst_offset, d.len)).collect();
        assert_eq!(moved, [(14 * state, 3 * state, state)]);
    }
}

#[test]
fn mam_04_a_placeholder_is_not_taken_for_a_state() {
    let pair = hybrid_pair();
    let ask = |states: &[(u64, u32)]| Request {
        tokens: Tokens::new(48),
        src: vec![holds(48, table(&[1, 2, 3])), has(states)],
        dst: vec![wants(16, table(&[4, 5, 6])), takes(3)],
    };
    // Listed as what they are not, or twice for one position: refused. Nothing is paired from the end of a list.
    for states in [&[(16, 14)][..], &[(16, 0), (32, 14)], &[]] {
        let refused = BoundRequest::new(&pair.compatible, ask(states)).expect_err("no state after 48").0;
        assert!(
            matches!(refused.as_slice(), [RequestError::NoState { position, .. }] if position.get() == 48),
            "{refused:?}"
        );
    }
    let twice = BoundRequest::new(&pair.compatible, ask(&[(48, 14), (48, 15)])).expect_err("which one?").0;
    assert!(
        matches!(twice.as_slice(), [RequestError::StatePosition { position, .. }] if position.get() == 48),
        "{twice:?}"
    );
}

#[test]
fn mam_04_further_checkpoints_move_where_there_are_slots() {
    let pair = hybrid_pair();
    let more = vec![at(16, 9), at(32, 8)];
    let bound = pair.bind(Request {
        tokens: Tokens::new(48),
        src: vec![holds(48, table(&[1, 2, 3])), has(&[(16, 4), (32, 11), (48, 14)])],
        dst: vec![wants(48, table(&[4, 5, 6])), DstState { slot: Some(BlockId::new(3)), more }.into()],
    });
    let pairs: BTreeMap<u64, (u32, u32)> =
        bound.moves()[1].states.iter().map(|s| (s.position.get(), (s.src.get(), s.dst.get()))).collect();
    assert_eq!(pairs, BTreeMap::from([(16, (4, 9)), (32, (11, 8)), (48, (14, 3))]));
    assert!(!bound.is_full_hit(), "attention is all cached, the states are not");
    let mut world = World::new(&pair, 0xEE);
    assert!(world.pull(&pair, &bound).is_done());
    assert!(world.dst_memory() == pair.deliver(&bound, 0xEE));
}

#[test]
fn mam_04_scratch_rows_are_never_sent() {
    let engine = |scratch_rows| mamba(1).style(LayoutStyle { scratch_rows, ..LayoutStyle::HND });
    for (src, dst) in [(2, 0), (0, 2), (2, 3), (2, 2)] {
        let (p, d) = (engine(src).manifest(), engine(dst).manifest());
        let proof = prove(&p, &d, Ask::of(7));
        assert_eq!(proof.moved, 96 + 2 * HEAD);
        // Rows of scratch keep what they were; the oracle has seen to it, and here it is in bytes: unit 0 of x has 3 rows of 2 B.
        let pair = Pair::of(p, d);
        let bound = pair.bind(state_request(7, 1, 1));
        let memory = pair.deliver(&bound, 0xEE).swap_remove(0).swap_remove(0);
        let stride = |rows: u64| 16 * (3 + rows) * 2 + 2 * HEAD;
        let (from, to) = (stride(src.into()), usize::try_from(stride(dst.into())).unwrap());
        let unit = &memory[to..to + (3 + dst as usize) * 2];
        let sent: Vec<u8> = (0..6).map(|i| source_byte(0, 0, from + i)).collect();
        assert_eq!(unit[..6], sent);
        assert!(unit[6..].iter().all(|b| *b == 0xEE));
    }
}
