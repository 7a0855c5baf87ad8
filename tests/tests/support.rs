//! The pairs of engines in `docs/support.md`: for each row two engines of that shape, with sizes of real models in few layers.
//! Where the row says yes, a request is planned, carried out, and every byte of the destination compared with the slow oracle;
//! where it names a reason, that is the error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_geometry::compat::{CompatOptions, Compatible, Mismatch, Unmatched};
use kvferry_geometry::layout::{ComponentOrder, LayoutStyle, StateOrder, View};
use kvferry_geometry::manifest::{Manifest, ManifestError};
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::placement::{HeadRange, HeadRule, PcpMode};
use kvferry_geometry::spec::{Component, Item, PagedItem};
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::Bytes;
use kvferry_proto::handshake::{Expected, Greeting, HelloMismatch, IdentityCheck, Versions};
use kvferry_tests::by_hand::owner;
use kvferry_tests::by_hand_states::{Ask, Proof, Shape, delta_net, delta_rule, gqa, mamba2, mla, prove};
use kvferry_tests::shapes::{
    compressed, deepseek, falcon_h1, layers, llama, padded_hybrid, sparse, staged, windows, with_gqa_draft,
};
use kvferry_transport::mem::MemNetwork;
use kvferry_transport::{MemoryKind, Region, RegisterError, Transport};

/// Tokens of most requests: three blocks of 16 and a part of a fourth.
const TOKENS: u64 = 55;

/// Proves a request of all tokens, straight into place, and one that begins with a hit inside a block, permuted at the source or
/// at the destination.
fn proven(src: &Shape, dst: &Shape) -> Proof {
    proven_for(&src.manifest(), &dst.manifest(), TOKENS)
}

fn proven_for(src: &Arc<Manifest>, dst: &Arc<Manifest>, tokens: u64) -> Proof {
    let whole = prove(src, dst, Ask::of(tokens));
    // What can be had from several ranks is spread over them here.
    let peers = PeerOptions { salt: 5, stripe: true };
    let place = if src.ranks().len() < dst.ranks().len() { Place::Source } else { Place::Destination };
    let hit = prove(src, dst, Ask { peers, place, ..Ask::of(tokens).cached(tokens * 2 / 5) });
    assert!(hit.moved < whole.moved, "a hit moves less");
    whole
}

/// Proves both directions.
fn both(a: &Shape, b: &Shape) {
    let _there = proven(a, b);
    let _back = proven(b, a);
}

fn mismatches(src: &Shape, dst: &Shape) -> Vec<Mismatch> {
    Compatible::new(src.manifest(), dst.manifest()).expect_err("it must be refused").0
}

#[test]
fn tp_sizes_that_do_not_divide() {
    // 12 heads are dealt out evenly to 6, 4, 3 and 2 ranks; 8 heads are not.
    for heads in [12, 8] {
        let engine = |tp| Shape::new(vec![gqa("layers.0", heads)], tp);
        for (src, dst) in [(6, 4), (4, 6), (3, 2), (2, 3), (6, 5), (8, 3)] {
            let proof = proven(&engine(src), &engine(dst));
            assert_eq!(proof.moved, u64::from(heads) * 512 * TOKENS, "{heads} heads, {src} to {dst}");
        }
    }
    for (src, dst) in [(6, 4), (3, 2)] {
        both(&deepseek(src), &deepseek(dst));
    }
}

#[test]
fn replicated_heads_between_other_tp_sizes() {
    let engine = |tp| Shape::new(vec![gqa("layers.0", 4), gqa("layers.1", 4)], tp);
    for (src, dst) in [(8, 4), (4, 8), (8, 2), (2, 8), (16, 8), (8, 6), (6, 8), (1, 8), (8, 1)] {
        let proof = proven(&engine(src), &engine(dst));
        // Every destination rank has its heads once, replicas too.
        let held: u64 = if dst < 4 { 4 } else { (0..dst).map(|r| heads_of(4, dst, r)).sum() };
        assert_eq!(proof.moved, 2 * held * 512 * TOKENS, "{src} to {dst}");
    }
}

fn heads_of(heads: u32, tp: u32, rank: u32) -> u64 {
    u64::from(kvferry_geometry::placement::split_heads(heads, tp, rank).count())
}

#[test]
fn pipeline_stages_at_the_decoder() {
    let gqa8 = |n: &str| gqa(n, 8);
    for (src, dst) in [(&[4][..], &[2, 2][..]), (&[2, 2], &[3, 1]), (&[1, 1, 1, 1], &[2, 2]), (&[3, 1], &[1, 2, 1])] {
        let proof = proven(&staged(2, gqa8, src), &staged(2, gqa8, dst));
        assert_eq!(proof.moved, 4 * 8 * 512 * TOKENS);
        let _mla = proven(&staged(2, mla, src), &staged(1, mla, dst));
    }
}

#[test]
fn pipeline_stages_of_hybrid_windows() {
    for (src, dst) in [(&[2, 2][..], &[4][..]), (&[4], &[2, 2]), (&[1, 3], &[3, 1])] {
        for (src_tp, dst_tp) in [(2, 2), (4, 2), (2, 4)] {
            let proof = proven_for(&windows(src_tp, src, true).manifest(), &windows(dst_tp, dst, true).manifest(), 200);
            // A window of 128 leaves the last 127 tokens.
            assert_eq!(proof.moved, 2 * 8 * 256 * (200 + 127));
        }
    }
    // One engine with a pool for all groups, one with memory for each.
    let _mixed = proven_for(&windows(2, &[2, 2], true).manifest(), &windows(1, &[4], false).manifest(), 200);
}

#[test]
fn pipeline_stages_of_mamba_hybrids() {
    for (src, dst) in [(&[2, 2][..], &[4][..]), (&[4], &[2, 2]), (&[1, 3], &[3, 1])] {
        for (src_tp, dst_tp) in [(1, 1), (2, 1), (1, 2)] {
            let _proof = proven(&falcon_h1(src_tp, src, 16), &falcon_h1(dst_tp, dst, 16));
        }
    }
}

#[test]
fn pipeline_stages_with_unequal_blocks() {
    for (src, dst) in [(16, 64), (64, 16), (16, 24)] {
        let (p, d) = (windows(2, &[2, 2], false).blocks(src, 14), windows(2, &[4], false).blocks(dst, 14));
        let _windows = proven_for(&p.manifest(), &d.manifest(), 200);
        let gqa8 = |n: &str| gqa(n, 8);
        let (p, d) = (staged(2, gqa8, &[1, 1]).blocks(src, 5), staged(2, gqa8, &[2]).blocks(dst, 5));
        both(&p, &d);
    }
}

#[test]
fn pipeline_stages_with_more_decode_ranks() {
    let gqa8 = |n: &str| gqa(n, 8);
    let _plain = proven(&staged(2, gqa8, &[1, 2]), &staged(4, gqa8, &[3]));
    let p = windows(2, &[2, 2], true).manifest();
    for tp in [4, 8] {
        let _windows = proven_for(&p, &windows(tp, &[4], true).manifest(), 200);
    }
}

/// The style of block-outermost rows that hold the pages of all layers.
const ROWS: LayoutStyle = LayoutStyle::PACKED_ROWS;

#[test]
fn packed_rows_of_stages_beyond_mla() {
    let gqa8 = |n: &str| gqa(n, 8);
    for (src, dst) in [(&[2, 1][..], &[3][..]), (&[3], &[1, 2])] {
        for (src_tp, dst_tp) in [(2, 2), (2, 4), (4, 2)] {
            let _rows = proven(&staged(src_tp, gqa8, src).style(ROWS), &staged(dst_tp, gqa8, dst).style(ROWS));
        }
        let _mla = proven(&staged(2, mla, src).style(ROWS), &staged(1, mla, dst).style(ROWS));
    }
}

#[test]
fn packed_rows_on_one_side_only() {
    for (src_tp, dst_tp) in [(2, 2), (4, 2), (2, 4)] {
        both(&llama(src_tp).style(ROWS), &llama(dst_tp));
    }
    both(&deepseek(2).style(ROWS), &deepseek(4));
}

#[test]
fn packed_rows_of_several_groups_against_regions() {
    let (rows, regions) = (sparse(2, 64).style(ROWS), sparse(1, 32));
    for (src, dst) in [(&rows, &regions), (&regions, &rows)] {
        let proof = proven_for(&src.manifest(), &dst.manifest(), 150);
        assert!(proof.moved >= 2 * (1152 + 132) * 150);
    }
    // Rows that groups share, as one pool.
    let pool = |tp| sparse(tp, 64).style(LayoutStyle { share: true, ..ROWS });
    let grown = |s: Shape| {
        s.groups(&[(&["layers.0", "layers.1"], 64, 12), (&["layers.0.indexer", "layers.1.indexer"], 64, 12)])
    };
    let _pool = proven_for(&grown(pool(2)).manifest(), &regions.manifest(), 150);
    let _back = proven_for(&regions.manifest(), &grown(pool(1)).manifest(), 150);
}

/// Rows in which heads are outside layers: a block is [head][layer][token].
fn heads_outside_layers(tp: u32) -> Arc<Manifest> {
    let shape = llama(tp).style(ROWS);
    let mut ranks = shape.ranks();
    for rank in &mut ranks {
        let layers = rank.layout.views.len() as u64;
        for (layer, view) in (0u64..).zip(&mut rank.layout.views) {
            let Some(View::Paged(view)) = view else { panic!("all layers are placed") };
            let page = view.components[0].head_stride.get();
            view.offset = Bytes::new(layer * page);
            for component in &mut view.components {
                component.head_stride = Bytes::new(layers * page);
            }
        }
    }
    shape.assemble(ranks).expect("rows like any other")
}

#[test]
fn rows_of_blocks_ordered_otherwise() {
    for (src_tp, dst_tp) in [(2, 2), (4, 2), (2, 4)] {
        for other in [llama(dst_tp), llama(dst_tp).style(ROWS), llama(dst_tp).style(LayoutStyle::NHD).blocks(48, 3)] {
            let (p, d) = (heads_outside_layers(src_tp), other.manifest());
            let _there = proven_for(&p, &d, TOKENS);
            let _back = proven_for(&d, &p, TOKENS);
        }
        let _same = proven_for(&heads_outside_layers(src_tp), &heads_outside_layers(dst_tp), TOKENS);
    }
}

#[test]
fn ranks_with_other_numbers_of_blocks() {
    let (few, many) = (llama(2).blocks(16, 5), llama(2).blocks(16, 9));
    let mut ranks = few.ranks();
    ranks[1] = many.ranks().swap_remove(1);
    let uneven = few.assemble(ranks).expect("capacities may differ");
    let other = llama(1).blocks(16, 30).manifest();
    let _there = proven_for(&uneven, &other, TOKENS);
    let _back = proven_for(&other, &uneven, TOKENS);
}

#[test]
fn block_sizes_that_are_no_multiples() {
    for (a, b) in [(16, 12), (16, 24), (48, 32), (64, 48), (16, 16 * 3)] {
        both(&llama(2).blocks(a, 6), &llama(2).blocks(b, 6));
        both(&deepseek(2).blocks(a, 6), &deepseek(1).blocks(b, 6));
    }
}

#[test]
fn unequal_blocks_with_fewer_decode_ranks() {
    for (src, dst) in [(16, 64), (64, 16), (16, 48), (32, 48)] {
        for (src_tp, dst_tp) in [(4, 2), (8, 1), (6, 4)] {
            let _heads = proven(&llama(src_tp).blocks(src, 5), &llama(dst_tp).blocks(dst, 5));
        }
    }
}

#[test]
fn head_major_against_token_major() {
    for (src_tp, dst_tp) in [(2, 2), (4, 2), (2, 4)] {
        both(&llama(src_tp), &llama(dst_tp).style(LayoutStyle::NHD));
        both(&llama(src_tp).style(LayoutStyle::PLANES), &llama(dst_tp).style(LayoutStyle::NHD));
        both(&llama(src_tp), &llama(dst_tp).blocks(48, 3).style(LayoutStyle::NHD));
    }
    // Either way of staging, with many small runs on one side.
    let (p, d) = (llama(4).manifest(), llama(2).style(LayoutStyle::NHD).manifest());
    for place in [Place::Source, Place::Destination] {
        for (src, dst) in [(&p, &d), (&d, &p)] {
            let _staged = prove(src, dst, Ask { place, ..Ask::of(TOKENS) });
        }
    }
    // With groups that share memory.
    let token_major = LayoutStyle { share: true, ..LayoutStyle::NHD };
    let (p, d) = (windows(2, &[4], true).manifest(), windows(2, &[4], true).style(token_major).manifest());
    let _there = proven_for(&p, &d, 200);
    let _back = proven_for(&d, &p, 200);
}

#[test]
fn token_major_blocks_re_sharded() {
    for (src_tp, dst_tp) in [(4, 2), (2, 4), (8, 1), (6, 4)] {
        let engine = |tp| llama(tp).style(LayoutStyle::NHD);
        let proof = proven(&engine(src_tp), &engine(dst_tp));
        assert_eq!(proof.moved, 2 * 8 * 512 * TOKENS);
    }
}

#[test]
fn mamba_with_unequal_ratio_and_prefix_caching() {
    for (src, dst) in [((2, 3), (1, 5)), ((1, 5), (2, 3)), ((2, 2), (2, 4))] {
        let (p, d) = (padded_hybrid(src.0, src.1).manifest(), padded_hybrid(dst.0, dst.1).manifest());
        // Hits of whole blocks of either side, and inside one.
        for cached in [0, 16, 48, 80, 100] {
            let proof = prove(&p, &d, Ask::of(150).cached(cached));
            assert!(proof.moved > 0, "the state is read even where {cached} tokens are cached");
        }
        let all = prove(&p, &d, Ask::of(150).cached(150));
        assert_eq!(all.moved, 2 * state_bytes(dst.0), "attention is all cached, the state is not");
    }
}

/// Bytes of one Falcon state over all ranks: B and C are on every rank.
fn state_bytes(tp: u32) -> u64 {
    24 * 64 * 32 * 2 + 3 * 2 * (1536 + 64 * u64::from(tp))
}

#[test]
fn mamba_with_unequal_dcp() {
    // Four ranks hold one head each twice, so that two of them can share its tokens; states are split over all four.
    let dealt = |dcp| falcon_h1(4, &[4], 16).dcp(dcp, 16);
    for (src, dst) in [(1, 2), (2, 1)] {
        let _proof = proven(&dealt(src), &dealt(dst));
    }
    let _tp = proven(&dealt(2), &falcon_h1(2, &[4], 32));
    let _back = proven(&falcon_h1(2, &[4], 32), &dealt(2));
}

#[test]
fn dcp_of_grouped_heads() {
    let engine = |tp, dcp| Shape::new(vec![gqa("layers.0", 2), gqa("layers.1", 2)], tp).dcp(dcp, 16);
    for (src, dst) in [((4, 2), (2, 1)), ((8, 4), (4, 2)), ((4, 2), (8, 4)), ((8, 2), (2, 1)), ((4, 1), (4, 2))] {
        let _there = proven(&engine(src.0, src.1), &engine(dst.0, dst.1));
        let _back = proven(&engine(dst.0, dst.1), &engine(src.0, src.1));
    }
    // Heads that are not held often enough to share tokens leave a gap, which is told.
    let short = Shape::new(vec![gqa("layers.0", 4)], 4).dcp(2, 16);
    let errors = short.assemble(short.ranks()).expect_err("half of the tokens of every head are missing").0;
    assert!(matches!(&errors[0], ManifestError::Uncovered { item, .. } if item.as_str() == "layers.0"), "{errors:?}");
}

#[test]
fn dcp_sizes_that_do_not_divide() {
    let engine = |tp, dcp| deepseek(tp).dcp(dcp, 16);
    for (src, dst) in [((4, 4), (6, 6)), ((6, 6), (4, 4)), ((3, 3), (2, 2)), ((4, 4), (6, 3)), ((8, 8), (6, 6))] {
        let proof = proven(&engine(src.0, src.1), &engine(dst.0, dst.1));
        assert_eq!(proof.moved, 2 * 1152 * TOKENS * u64::from(dst.0 / dst.1));
    }
    // Tokens dealt out in other portions, and blocks that differ.
    let fine = |tp, dcp| deepseek(tp).dcp(dcp, 1).blocks(32, 8);
    let _fine = proven(&engine(4, 4), &fine(6, 6));
    let _back = proven(&fine(3, 3), &engine(4, 2));
}

#[test]
fn replicated_pcp_with_a_dcp_peer() {
    let copies = deepseek(2).pcp(2, PcpMode::Replicate, 16);
    for dcp in [2, 4] {
        both(&copies, &deepseek(4).dcp(dcp, 16));
    }
    let heads = llama(2).pcp(3, PcpMode::Replicate, 16);
    both(&heads, &Shape::new(vec![gqa("layers.0", 8), gqa("layers.1", 8)], 16).dcp(2, 16));
}

#[test]
fn pcp_at_the_decoder() {
    for mode in [PcpMode::Shard, PcpMode::Replicate] {
        for pcp in [2, 3] {
            let _mla = proven(&deepseek(2), &deepseek(2).pcp(pcp, mode, 16));
            let _heads = proven(&llama(4), &llama(2).pcp(pcp, mode, 16));
            let _both = proven(&llama(2).pcp(2, mode, 16), &llama(2).pcp(pcp, mode, 8));
        }
    }
}

#[test]
fn pcp_and_dcp_over_several_tp_ranks() {
    for mode in [PcpMode::Shard, PcpMode::Replicate] {
        let dealt = |tp, dcp, pcp| deepseek(tp).dcp(dcp, 16).pcp(pcp, mode, 16);
        both(&dealt(2, 2, 2), &deepseek(2));
        both(&dealt(4, 2, 2), &dealt(2, 2, 3));
        let heads =
            |tp, dcp, pcp| Shape::new(vec![gqa("layers.0", 2), gqa("layers.1", 2)], tp).dcp(dcp, 8).pcp(pcp, mode, 8);
        both(&heads(4, 2, 2), &llama_of_two(2));
        both(&heads(4, 2, 2), &heads(8, 4, 1));
    }
}

fn llama_of_two(tp: u32) -> Shape {
    Shape::new(vec![gqa("layers.0", 2), gqa("layers.1", 2)], tp)
}

#[test]
fn gqa_draft_under_an_mla_target() {
    for (src, dst) in [(4, 2), (8, 1), (2, 4), (4, 3), (1, 8)] {
        let _one_group = proven(&with_gqa_draft(src), &with_gqa_draft(dst));
    }
    // With context parallelism the draft's heads must be there often enough, or the draft keeps all tokens in a group of its own.
    both(&with_gqa_draft(4).dcp(2, 16), &with_gqa_draft(2));
    both(&with_gqa_draft(4).dcp(2, 16), &with_gqa_draft(8).dcp(4, 16));
    let apart = |tp, dcp| {
        let groups: [(&[&str], u32, u32); 2] = [(&["layers.0", "layers.1"], 16, 12), (&["draft.0"], 16, 12)];
        with_gqa_draft(tp).groups(&groups).dcp(dcp, 16).undealt(&["draft.0"])
    };
    both(&apart(4, 4), &with_gqa_draft(2));
    both(&apart(4, 4), &apart(2, 2));
    // A draft that every rank holds whole.
    let whole = |tp| {
        with_gqa_draft(tp)
            .rule(|item, _| if item.name.as_str() == "draft.0" { HeadRule::Whole } else { HeadRule::Split })
    };
    both(&whole(4), &with_gqa_draft(2));
    // A draft that one engine runs alone is no business of the transfer where the caller says so.
    let (with, without) = (with_gqa_draft(2).manifest(), deepseek(4).manifest());
    let ignore = CompatOptions { source_only: Unmatched::Ignore, destination_only: Unmatched::Ignore };
    for (src, dst) in [(&with, &without), (&without, &with)] {
        let _ignored = prove(src, dst, Ask { compat: ignore, ..Ask::of(TOKENS) });
        let refused = Compatible::new(Arc::clone(src), Arc::clone(dst)).expect_err("the draft is on one side only").0;
        let [mismatch] = refused.as_slice() else { panic!("{refused:?}") };
        assert_eq!(mismatch.item().as_str(), "draft.0");
    }
}

#[test]
fn mla_draft_in_a_group_of_heads() {
    let engine = |tp| Shape::new(vec![gqa("layers.0", 8), gqa("layers.1", 8), mla("draft.0")], tp);
    for (src, dst) in [(4, 2), (2, 4), (6, 4), (8, 1)] {
        let proof = proven(&engine(src), &engine(dst));
        assert_eq!(proof.moved, TOKENS * (2 * 8 * 512 + 1152 * u64::from(dst)));
    }
}

#[test]
fn other_cache_groups_on_each_side() {
    let four = |tp| Shape::new(layers(4).iter().map(|n| gqa(n, 8)).collect(), tp);
    let one: [(&[&str], u32, u32); 1] = [(&["layers.3", "layers.1", "layers.0", "layers.2"], 16, 12)];
    let two: [(&[&str], u32, u32); 2] = [(&["layers.0", "layers.3"], 32, 8), (&["layers.2", "layers.1"], 16, 12)];
    let three: [(&[&str], u32, u32); 3] =
        [(&["layers.1"], 48, 12), (&["layers.0", "layers.2"], 16, 12), (&["layers.3"], 64, 6)];
    both(&four(2).groups(&one), &four(2).groups(&two));
    both(&four(4).groups(&two), &four(2).groups(&three).style(LayoutStyle::NHD));
    // Windows and full layers in one group of one engine, in two of the other.
    let mixed = |tp| windows(tp, &[4], false).groups(&[(&["layers.0", "layers.1", "layers.2", "layers.3"], 16, 16)]);
    let _there = proven_for(&mixed(2).manifest(), &windows(2, &[4], true).manifest(), 200);
    let _back = proven_for(&windows(4, &[2, 2], true).manifest(), &mixed(2).manifest(), 200);
}

#[test]
fn conv_states_in_either_order() {
    let rows_outer = |tp| {
        let style = LayoutStyle { share: true, state_order: StateOrder::RowsOuter, ..LayoutStyle::HND };
        falcon_h1(tp, &[4], 16).style(style)
    };
    for (src, dst) in [(1, 1), (2, 1), (1, 2), (3, 2), (4, 3)] {
        let _there = proven(&rows_outer(src), &falcon_h1(dst, &[4], 16));
        let _back = proven(&falcon_h1(src, &[4], 16), &rows_outer(dst));
        let _same = proven(&rows_outer(src), &rows_outer(dst));
    }
    // Rows that speculative decoding adds on one side are no part of the state.
    let scratch = |tp, scratch_rows| {
        let style = LayoutStyle { share: true, scratch_rows, ..LayoutStyle::HND };
        falcon_h1(tp, &[4], 16).style(style)
    };
    let _scratch = proven(&scratch(2, 4), &scratch(1, 0));
    let _back = proven(&scratch(1, 0), &scratch(2, 3));
}

#[test]
fn states_of_other_kinds_re_sharded() {
    let delta = |tp| Shape::new(vec![gqa("layers.0", 2), delta_net("layers.1", 4, 8)], tp).rule(delta_rule);
    let grouped = |tp| {
        let rule = |item: &Item, part: usize| match (item.as_state(), part) {
            (Some(_), 0) => HeadRule::Blocks(64),
            (Some(_), 1 | 2) => HeadRule::Blocks(32),
            _ => HeadRule::Split,
        };
        Shape::new(vec![gqa("layers.0", 2), mamba2("layers.1", 16, 64, 4, 32)], tp).rule(rule)
    };
    for (src, dst) in [(4, 2), (2, 4), (1, 8), (8, 1), (4, 3), (3, 4)] {
        let _delta = proven(&delta(src), &delta(dst));
        let _mamba = proven(&grouped(src), &grouped(dst));
    }
}

#[test]
fn compressed_attention_beside_rings_and_states() {
    for (src, dst) in [(1, 2), (2, 1), (4, 3), (1, 8)] {
        let _apart = proven(&compressed(src, false), &compressed(dst, false));
        let _pool = proven(&compressed(src, true), &compressed(dst, true));
        let _one = proven(&compressed(src, true), &compressed(dst, false));
    }
}

/// NVFP4: two values a byte, and a scale of one byte for each 16 values; data first, scales behind them in the block.
fn nvfp4(name: &str, heads: u32) -> Item {
    let components = vec![
        Component::new("k", 64, "nvfp4"),
        Component::new("v", 64, "nvfp4"),
        Component::new("k.scale", 8, "fp8"),
        Component::new("v.scale", 8, "fp8"),
    ];
    Item::paged(name, PagedItem::new(heads, components))
}

/// FP8 with one scale of K and one of V for each head of a block of 16 entries.
fn fp8_by_block(name: &str, heads: u32, shared: bool) -> Item {
    let scale = |n| Component::new(n, 4, "fp32").with_span(16);
    let scale = |n| if shared { scale(n).shared() } else { scale(n) };
    let data = |n| Component::new(n, 128, "fp8");
    Item::paged(name, PagedItem::new(heads, vec![data("k"), data("v"), scale("k.scale"), scale("v.scale")]))
}

#[test]
fn nvfp4_pages_re_sharded() {
    let apart = LayoutStyle { components: ComponentOrder::InBlock, ..LayoutStyle::HND };
    let engine = |tp| Shape::new(vec![nvfp4("layers.0", 8), nvfp4("layers.1", 8)], tp).style(apart);
    for (src, dst) in [(4, 2), (2, 4), (6, 4), (1, 8)] {
        let proof = proven(&engine(src), &engine(dst));
        assert_eq!(proof.moved, 2 * 8 * 144 * TOKENS);
    }
    both(&engine(2), &engine(4).style(LayoutStyle::PLANES).blocks(32, 8));
    // One scale for each head of a block: it follows its head.
    let by_block = |tp| Shape::new(vec![fp8_by_block("layers.0", 8, false)], tp).style(apart);
    for (src, dst) in [(4, 2), (2, 4)] {
        for cached in [0, 16, 32] {
            let _proof = prove(&by_block(src).manifest(), &by_block(dst).manifest(), Ask::of(TOKENS).cached(cached));
        }
        let _blocks = prove(&by_block(src).manifest(), &by_block(dst).blocks(48, 8).manifest(), Ask::of(TOKENS));
    }
}

#[test]
fn scales_that_all_heads_of_a_rank_share() {
    let engine = |tp| Shape::new(vec![fp8_by_block("layers.0", 8, true)], tp);
    // Where both engines cut the heads alike they move; where they don't, there is no right value to give.
    let _same = prove(&engine(2).manifest(), &engine(2).style(LayoutStyle::NHD).manifest(), Ask::of(TOKENS));
    let heads = |ranges: &[(u32, u32)]| ranges.iter().map(|r| HeadRange::new(r.0, r.1).unwrap()).collect::<Vec<_>>();
    let expected = ["k.scale", "v.scale"].map(|component| Mismatch::SharedValue {
        item: "layers.0".into(),
        component: component.into(),
        src: heads(&[(0, 4), (4, 8)]),
        dst: heads(&[(0, 2), (2, 4), (4, 6), (6, 8)]),
    });
    assert_eq!(mismatches(&engine(2), &engine(4)), expected);
}

#[test]
fn kv_types_that_differ() {
    let engine = |width, encoding: &str| {
        let components = vec![Component::new("k", width, encoding), Component::new("v", width, encoding)];
        Shape::new(vec![Item::paged("layers.0", PagedItem::new(8, components))], 2)
    };
    let expected = ["k", "v"].map(|c| {
        [
            Mismatch::Width {
                item: "layers.0".into(),
                component: c.into(),
                src: Bytes::new(256),
                dst: Bytes::new(128),
            },
            Mismatch::Encoding { item: "layers.0".into(), component: c.into(), src: "bf16".into(), dst: "fp8".into() },
        ]
    });
    assert_eq!(mismatches(&engine(256, "bf16"), &engine(128, "fp8")), expected.concat());
    let expected = ["k", "v"].map(|c| Mismatch::Encoding {
        item: "layers.0".into(),
        component: c.into(),
        src: "fp8_e4m3".into(),
        dst: "fp8_e5m2".into(),
    });
    assert_eq!(mismatches(&engine(128, "fp8_e4m3"), &engine(128, "fp8_e5m2")), expected);
}

#[test]
fn software_versions_and_paths_are_not_compared() {
    // What is told of an engine: its name and life, what its bytes mean, and its cache. Neither a version of the software around
    // it, nor where it found its weights, nor who calls whom is among it.
    let (p, d) = (llama(4).manifest(), llama(2).manifest());
    let (_, mut hello) = Greeting::start(Arc::new(owner("prefill", 1, &p)), Expected::default());
    let meet = |hello: &_| Greeting::start(Arc::new(owner("decode", 2, &d)), Expected::default()).0.on_hello(hello);
    assert!(meet(&hello).is_ok());
    // Any version range that overlaps will do.
    hello.versions = Versions { min: 1, max: 9 };
    assert!(meet(&hello).is_ok());
    // What the engine says its bytes mean must be equal, unless one says that it need not be.
    hello.identity = kvferry_proto::names::ModelIdentity::new("model@other").expect("an identity");
    let refused = meet(&hello).expect_err("other weights").0;
    assert!(matches!(refused.as_slice(), [HelloMismatch::Identity { .. }]), "{refused:?}");
    let mut unchecked = owner("decode", 2, &d);
    unchecked.check = IdentityCheck::Off;
    assert!(Greeting::start(Arc::new(unchecked), Expected::default()).0.on_hello(&hello).is_ok());
}

#[test]
fn unequal_blocks_in_host_memory() {
    // Real operations between registered host memory, and what they leave is what the oracle expects.
    use kvferry_tests::by_hand::{Engine, Pair, kv, request};
    use kvferry_tests::over_mem::World;
    for (src, dst) in [((4, 16), (2, 48)), ((2, 48), (4, 16)), ((2, 16), (4, 12))] {
        let engine = |(tp, block): (u32, u32)| Engine::new(vec![kv("layers.0", 8, 256)], tp).blocks(block, 12);
        let pair = Pair::new(&engine(src), &engine(dst));
        let ids = |block: u32| (0..55u32.div_ceil(block)).map(|k| (k * 7 + 3) % 12).collect::<Vec<u32>>();
        let bound = pair.bind(request(55, &ids(src.1), &ids(dst.1)));
        let mut world = World::new(&pair, 0xEE);
        assert!(world.pull(&pair, &bound).is_done());
        world.zero(&pair, &bound);
        assert!(world.dst_memory() == pair.deliver(&bound, 0xEE));
        let shape = |(tp, block)| Shape::new(vec![gqa("layers.0", 8)], tp).blocks(block, 12);
        let _proof = proven(&shape(src), &shape(dst));
    }
}

#[test]
fn device_memory_on_either_side() {
    // Where memory lives is no matter to the plan, device or host, on one side or on both, or both kinds on one.
    let engine = llama(4);
    let mut ranks = engine.ranks();
    for rank in &mut ranks {
        rank.layout.regions[1].kind = kvferry_geometry::layout::MemoryKind::Device(0);
    }
    let mixed = engine.assemble(ranks).expect("memory of two kinds");
    let host = llama(2).manifest();
    let _there = proven_for(&mixed, &host, TOKENS);
    let _back = proven_for(&host, &mixed, TOKENS);
    // But no backend can reach a device yet, and that is said when memory is registered.
    let mut transport = MemNetwork::new(7).endpoint().expect("an endpoint");
    let region = Region::zeroed(4096).expect("memory");
    let start = NonNull::new(region.as_ptr()).expect("not null");
    let kind = MemoryKind::Device(0);
    // SAFETY: the bytes live as long as `region`, which is the owner given. They are not device memory, but whatever would
    // treat them as such must refuse them first: that is what is tested.
    let device = unsafe { Region::from_raw(start, 4096, kind, Arc::new(region.clone())) };
    let refused = transport.register(device).expect_err("no device support");
    assert!(
        matches!(&refused, RegisterError::UnsupportedMemory { got, supported, .. }
            if *got == kind && *supported == [MemoryKind::Host]),
        "{refused}"
    );
}

/// One row of a table in `docs/support.md`: what kvferry does, and the tests named.
#[derive(Debug)]
struct Row {
    pair: String,
    kvferry: String,
    tests: Vec<(String, String)>,
}

const OWN: &str = "tests/tests/support.rs";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace").to_owned()
}

/// Rows look like ``| pair | vLLM | kvferry | `test`, `file::test` |``; a test without a file is one of this file, a file without a
/// directory one of `tests/tests`.
fn rows(text: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", pair, vllm, kvferry, tests, ""] = cells.as_slice() else { continue };
        if *pair == "pair" || pair.starts_with("---") {
            continue;
        }
        assert!(!vllm.is_empty(), "{pair}: how is it refused?");
        let test = |test: &str| match test.trim_matches('`').rsplit_once("::") {
            Some((file, name)) => (format!("tests/tests/{file}.rs"), name.to_owned()),
            None => (OWN.to_owned(), test.trim_matches('`').to_owned()),
        };
        let tests = tests.split(',').map(str::trim).filter(|t| !t.is_empty()).map(test).collect();
        rows.push(Row { pair: (*pair).to_owned(), kvferry: (*kvferry).to_owned(), tests });
    }
    rows
}

/// Names of the test functions of a file.
fn tests_of(text: &str) -> BTreeSet<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut names = BTreeSet::new();
    for at in (0..lines.len()).filter(|&at| lines[at] == "#[test]") {
        let function = lines[at..].iter().find_map(|line| line.strip_prefix("fn "));
        names.extend(function.and_then(|f| f.split('(').next()).map(str::to_owned));
    }
    names
}

#[test]
fn every_row_of_the_page_names_tests_that_exist() {
    let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let rows = rows(&read("docs/support.md"));
    assert!(rows.len() >= 30, "only {} rows found", rows.len());
    let mut named = BTreeSet::new();
    for row in &rows {
        assert!(!row.tests.is_empty(), "{}: nothing shows it", row.pair);
        // A row that doesn't say yes names the error that it is.
        let error = ["Mismatch::", "ManifestError::", "RequestError::", "RegisterError::", "HelloMismatch::"];
        let reason = error.iter().any(|e| row.kvferry.contains(e));
        assert!(row.kvferry.starts_with("yes") || reason, "{}: {}", row.pair, row.kvferry);
        for (file, test) in &row.tests {
            assert!(tests_of(&read(file)).contains(test), "{}: {file} has no test {test}", row.pair);
            named.insert((file.clone(), test.clone()));
        }
    }
    // And every test here is in a row.
    for test in tests_of(&read(OWN)) {
        let is_check = test.starts_with("every_row_of_the_page");
        assert!(is_check || named.contains(&(OWN.to_owned(), test.clone())), "{test} is in no row");
    }
}
