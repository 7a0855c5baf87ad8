//! A small engine for this crate's tests.

use std::sync::Arc;

use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention};
use kvferry_geometry::units::{ItemId, Name, Tokens};

use crate::manifest::{EngineManifest, RankContact};
use crate::names::{EngineId, Epoch};

/// Three items in three groups on two ranks.
pub(crate) fn ranks() -> (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>) {
    let item = |name: &str, retention| {
        let components = vec![Component::new("k", 32, "bf16"), Component::new("v", 32, "bf16")];
        Item::paged(name, PagedItem { heads: 4, components, retention })
    };
    let items = vec![
        item("layer.0", Retention::Full),
        item("layer.1", Retention::Window(Tokens::new(8))),
        item("layer.2", Retention::Chunk(Tokens::new(64))),
    ];
    let spec = ModelSpec::new(items).unwrap();
    let group = |i: u32| CacheGroup {
        name: Name::new(&format!("group {i}")),
        items: vec![ItemId::new(i)],
        block_tokens: Tokens::new(16),
    };
    let placed = Parallelism::tensor(&spec, 2).place(&spec, |_| HeadRule::Split).unwrap();
    let ids = [[ItemId::new(0)], [ItemId::new(1)], [ItemId::new(2)]];
    let groups: Vec<(&[ItemId], u32, u32)> = ids.iter().map(|i| (i.as_slice(), 16, 8)).collect();
    let rank = |placement| {
        let layout = LayoutStyle::NHD.build(&spec, &placement, &groups).unwrap();
        RankManifest { placement, layout }
    };
    let ranks = placed.into_iter().map(rank).collect();
    (spec, (0..3).map(group).collect(), ranks)
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
