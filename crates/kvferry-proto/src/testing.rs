//! A small engine for this crate's tests.

use std::sync::Arc;

use kvferry_geometry::layout::{Chunks, LayoutStyle, View};
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::units::{Bytes, ItemId, Name, Tokens};

use crate::manifest::{EngineManifest, RankContact};
use crate::names::{EngineId, Epoch};

/// Items of every kind and retention, each in a group of its own, on two ranks.
pub(crate) fn ranks() -> (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>) {
    let kv = || vec![Component::new("k", 32, "bf16"), Component::new("v", 32, "bf16")];
    let item = |name: &str, retention| Item::paged(name, PagedItem { retention, ..PagedItem::new(4, kv()) });
    let scaled = [Component::new("k", 32, "fp8"), Component::new("scale", 4, "fp32").with_span(2).shared()];
    let state = StateItem {
        parts: vec![StatePart::new("conv.x", 8, 3, 2, "bf16"), StatePart::new("temporal", 2, 1, 64, "fp32")],
    };
    let items = vec![
        item("layer.0", Retention::Full),
        item("layer.1", Retention::Window(Tokens::new(8))),
        item("layer.2", Retention::Chunk(Tokens::new(64))),
        Item::paged("layer.3", PagedItem { tokens_per_entry: 4, ..PagedItem::new(2, scaled.to_vec()) }),
        item("layer.4", Retention::Ring(Tokens::new(32))),
        Item::state("layer.5", state),
    ];
    let spec = ModelSpec::new(items).unwrap();
    let group = |id: u32| CacheGroup {
        name: Name::new(&format!("group {id}")),
        items: vec![ItemId::new(id)],
        block_tokens: Tokens::new(if id == 5 { 0 } else { 16 }),
    };
    let placed = Parallelism::tensor(&spec, 2).place(&spec, |_, _| HeadRule::Split).unwrap();
    let ids: Vec<[ItemId; 1]> = (0..6).map(|id| [ItemId::new(id)]).collect();
    let groups: Vec<(&[ItemId], u32, u32)> = ids.iter().map(|i| (i.as_slice(), 16, 8)).collect();
    let rank = |placement| {
        let mut layout = LayoutStyle { scratch_rows: 1, ..LayoutStyle::NHD }.build(&spec, &placement, &groups).unwrap();
        if let Some(View::Paged(view)) = &mut layout.views[0] {
            // The bytes of K in two halves, which lie as if they were one.
            view.components[0].chunks = Some(Chunks { bytes: Bytes::new(16), stride: Bytes::new(16) });
        }
        RankManifest { placement, layout }
    };
    let ranks = placed.into_iter().map(rank).collect();
    (spec, (0..6).map(group).collect(), ranks)
}

/// One life of the engine of [`ranks`].
pub(crate) fn engine_of(id: &str, epoch: u128) -> Arc<EngineManifest> {
    let (spec, groups, ranks) = ranks();
    let contact = |n: u8| RankContact { epoch: Epoch::new(u128::MAX - u128::from(n)), blob: Arc::from(vec![n; 70]) };
    let cache = Manifest::new(spec, groups, ranks).unwrap();
    let contacts = vec![contact(1), contact(2)];
    Arc::new(EngineManifest::new(EngineId::new(id).unwrap(), Epoch::new(epoch), cache, contacts).unwrap())
}

/// The usual one.
pub(crate) fn engine() -> Arc<EngineManifest> {
    engine_of("prefill", 9)
}
