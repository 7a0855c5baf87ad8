//! The shapes of `docs/support.md` between engines that run: what can be planned can be pulled, pushed, and pushed while it is being
//! computed, and every byte is where the slow oracle says. Pipeline stages are in `cases_push.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry_geometry::layout::{ComponentOrder, LayoutStyle};
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::placement::PcpMode;
use kvferry_geometry::spec::{Component, Item, PagedItem};
use kvferry_tests::by_hand_states::{Ask, Shape, delta_net, delta_rule, gqa};
use kvferry_tests::moved::in_every_mode;
use kvferry_tests::shapes::{compressed, deepseek, falcon_h1, llama, padded_hybrid, sparse, windows, with_gqa_draft};

const TOKENS: u64 = 55;

async fn served(src: &Shape, dst: &Shape, ask: Ask) {
    let delivered = in_every_mode(&src.manifest(), &dst.manifest(), ask).await;
    assert!(delivered.report().bytes().get() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensor_parallel_sizes_up_and_down() {
    for (src, dst) in [(4, 2), (2, 4), (1, 8), (8, 1), (6, 4), (3, 2)] {
        served(&llama(src), &llama(dst), Ask::of(TOKENS)).await;
    }
    // Latents that every rank holds, and heads that several do.
    served(&deepseek(4), &deepseek(3), Ask::of(TOKENS)).await;
    let few = |tp| Shape::new(vec![gqa("layers.0", 2), gqa("layers.1", 2)], tp);
    served(&few(4), &few(8), Ask::of(TOKENS)).await;
    let striped = Ask { peers: PeerOptions { salt: 0, stripe: true }, ..Ask::of(TOKENS) };
    served(&deepseek(4), &deepseek(2), striped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_and_layouts_that_differ() {
    for (src, dst) in [(16, 64), (64, 16), (16, 24), (48, 32)] {
        let (p, d) = (llama(2).blocks(src, 6), llama(4).blocks(dst, 6));
        served(&p, &d, Ask::of(TOKENS)).await;
        served(&p, &d.style(LayoutStyle::NHD), Ask::of(TOKENS).cached(21)).await;
    }
    for style in [LayoutStyle::PACKED_ROWS, LayoutStyle::PLANES, LayoutStyle::NHD] {
        served(&llama(4).style(style), &llama(2), Ask::of(TOKENS)).await;
        served(&llama(2), &llama(2).style(style), Ask::of(TOKENS)).await;
    }
    served(&sparse(2, 64).style(LayoutStyle::PACKED_ROWS), &sparse(1, 32), Ask::of(150)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hybrids_of_every_kind() {
    for (src, dst) in [(2, 4), (4, 2)] {
        served(&windows(src, &[4], true), &windows(dst, &[4], false), Ask::of(200)).await;
    }
    for (src, dst) in [(1, 2), (2, 1), (3, 2)] {
        served(&falcon_h1(src, &[4], 16), &falcon_h1(dst, &[4], 16), Ask::of(TOKENS)).await;
    }
    served(&padded_hybrid(2, 3), &padded_hybrid(1, 5), Ask::of(150).cached(48)).await;
    // All attention is cached: only states move.
    served(&falcon_h1(2, &[4], 16), &falcon_h1(1, &[4], 16), Ask::of(TOKENS).cached(TOKENS)).await;
    let delta = |tp| Shape::new(vec![gqa("layers.0", 2), delta_net("layers.1", 4, 8)], tp).rule(delta_rule);
    served(&delta(4), &delta(2), Ask::of(TOKENS)).await;
    // Latents for four tokens each, and a ring.
    for (src, dst) in [(1, 2), (4, 3)] {
        served(&compressed(src, true), &compressed(dst, false), Ask::of(TOKENS)).await;
    }
    served(&with_gqa_draft(4), &with_gqa_draft(2), Ask::of(TOKENS)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_parallel_ranks() {
    let dealt = |tp, dcp| deepseek(tp).dcp(dcp, 16);
    for (src, dst) in [((4, 4), (2, 1)), ((2, 2), (4, 4)), ((6, 6), (4, 4))] {
        served(&dealt(src.0, src.1), &dealt(dst.0, dst.1), Ask::of(TOKENS)).await;
    }
    for mode in [PcpMode::Shard, PcpMode::Replicate] {
        served(&llama(2).pcp(2, mode, 16), &llama(4), Ask::of(TOKENS)).await;
        served(&deepseek(2), &deepseek(2).pcp(2, mode, 16), Ask::of(TOKENS)).await;
    }
}

/// Scales that stand for a block of tokens move when the last of them is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scales_for_tokens_and_for_blocks() {
    let apart = LayoutStyle { components: ComponentOrder::InBlock, ..LayoutStyle::HND };
    let parts = |of: &[(&'static str, u64, &'static str)]| {
        of.iter().map(|(name, width, encoding)| Component::new(name, *width, encoding)).collect::<Vec<_>>()
    };
    let nvfp4 = |n| {
        let of = parts(&[("k", 64, "nvfp4"), ("v", 64, "nvfp4"), ("k.scale", 8, "fp8"), ("v.scale", 8, "fp8")]);
        Item::paged(n, PagedItem::new(8, of))
    };
    let engine = |tp| Shape::new(vec![nvfp4("layers.0"), nvfp4("layers.1")], tp).style(apart);
    served(&engine(4), &engine(2), Ask::of(TOKENS)).await;
    let by_block = |tp| {
        let scale = |n| Component::new(n, 4, "fp32").with_span(16);
        let of = [parts(&[("k", 128, "fp8"), ("v", 128, "fp8")]), vec![scale("k.scale"), scale("v.scale")]].concat();
        Shape::new(vec![Item::paged("layers.0", PagedItem::new(8, of))], tp).style(apart)
    };
    for (src, dst) in [(4, 2), (2, 4)] {
        served(&by_block(src), &by_block(dst), Ask::of(TOKENS).cached(16)).await;
        served(&by_block(src), &by_block(dst).blocks(48, 8), Ask::of(TOKENS)).await;
    }
}
