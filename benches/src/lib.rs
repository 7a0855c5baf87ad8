//! Shapes that the benchmarks share, and how they measure.
#![allow(clippy::expect_used, reason = "a benchmark whose shape is wrong has nothing to measure")]

use std::sync::Arc;

use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::request::{BlockTable, BoundRequest, DstPaged, Request, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{BlockId, ItemId, TokenRange, Tokens};

pub mod engines;
pub mod instant;
pub mod measure;

/// Llama-3.1-70B: 80 layers, 8 KV heads of 128 in bf16.
#[must_use]
pub fn llama_70b(tp: u32, block: u32, blocks: u32, style: LayoutStyle) -> Arc<Manifest> {
    let kv = PagedItem::new(8, vec![Component::new("k", 256, "bf16"), Component::new("v", 256, "bf16")]);
    let items = (0..80).map(|i| Item::paged(&format!("model.layers.{i}.self_attn.attn"), kv.clone())).collect();
    let spec = ModelSpec::new(items).expect("a sound spec");
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let placements = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split).expect("a sound parallelism");
    let group = CacheGroup { name: "kv".into(), items: ids.clone(), block_tokens: Tokens::new(block.into()) };
    let rank = |placement| {
        let layout = style.build(&spec, &placement, &[(&ids, block, blocks)]).expect("a sound layout");
        RankManifest { placement, layout }
    };
    let ranks = placements.into_iter().map(rank).collect();
    Arc::new(Manifest::new(spec, vec![group], ranks).expect("a sound manifest"))
}

/// `count` distinct ids below `blocks` in an order without neighbours, by a step that shares no factor with `blocks`
/// (a power of two).
#[must_use]
pub fn scattered(count: u32, blocks: u32, step: u32) -> Vec<BlockId> {
    (0..count).map(|i| BlockId::new(i.wrapping_mul(step | 1) % blocks)).collect()
}

/// A request for all tokens of the tables.
#[must_use]
pub fn whole(c: &Compatible, tokens: u64, src: BlockTable, dst: BlockTable) -> BoundRequest {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(tokens));
    let request = Request {
        tokens: Tokens::new(tokens),
        src: vec![SrcPaged { table: src, held, tail: Tail::Exact }.into()],
        dst: vec![DstPaged { table: dst, cached: Tokens::ZERO }.into()],
    };
    BoundRequest::new(c, request).expect("a sound request")
}
