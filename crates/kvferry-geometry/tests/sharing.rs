//! Which blocks of groups that share memory have bytes in common, against the places of every byte.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use kvferry_geometry::layout::{LayoutStyle, View};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestError, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, StateItem, StatePart};
use kvferry_geometry::units::{BlockId, Bytes, GroupId, ItemId, Name, Tokens};

/// Attention of 512 bytes a block, a state of 320 a slot, in groups of their own.
fn manifest(share: bool, change: impl Fn(&mut RankManifest)) -> Manifest {
    let kv = PagedItem::new(2, vec![Component::new("kv", 32, "bf16")]);
    let state = StateItem { parts: vec![StatePart::new("s", 4, 1, 80, "fp32")] };
    let spec = ModelSpec::new(vec![Item::paged("a", kv), Item::state("m", state)]).unwrap();
    let ids = [[ItemId::new(0)], [ItemId::new(1)]];
    let groups: Vec<(&[ItemId], u32, u32)> = vec![(&ids[0], 8, 6), (&ids[1], 0, 6)];
    let placed = Parallelism::tensor(&spec, 1).place(&spec, |_, _| HeadRule::Whole).unwrap();
    let rank = |placement| {
        let layout = LayoutStyle { share, ..LayoutStyle::NHD }.build(&spec, &placement, &groups).unwrap();
        let mut rank = RankManifest { placement, layout };
        change(&mut rank);
        rank
    };
    let ranks = placed.into_iter().map(rank).collect();
    let group = |i: usize, block_tokens| CacheGroup {
        name: Name::new(["attention", "state"][i]),
        items: ids[i].to_vec(),
        block_tokens: Tokens::new(block_tokens),
    };
    Manifest::new(spec, vec![group(0, 8), group(1, 0)], ranks).unwrap()
}

/// First byte and one past the last of each block of an item.
fn places(m: &Manifest, item: usize, len: u64) -> Vec<(u64, u64)> {
    let view = m.ranks()[0].layout.views[item].as_ref().unwrap();
    let start = |b: u32| view.offset().get() + u64::from(b) * view.stride().get();
    (0..view.blocks()).map(|b| (start(b), start(b) + len)).collect()
}

fn check(m: &Manifest) {
    let (attention, state) = (places(m, 0, 512), places(m, 1, 320));
    for (group, own, other) in [(0, &attention, &state), (1, &state, &attention)] {
        for (block, place) in (0u32..).zip(own) {
            let met = m.sharing(GroupId::new(group), BlockId::new(block));
            for (id, theirs) in (0u32..).map(BlockId::new).zip(other) {
                let told = met.iter().any(|(g, ids)| *g == GroupId::new(1 - group) && ids.contains(&id));
                let meet = place.0 < theirs.1 && theirs.0 < place.1;
                assert_eq!(told, meet, "group {group} block {block} and {id}");
            }
        }
    }
}

#[test]
fn blocks_meet_where_their_bytes_do() {
    check(&manifest(true, |_| {}));
    // Slots packed more closely than pages, and not from the region's start: blocks meet others than those of their number.
    check(&manifest(true, |rank| {
        if let Some(View::State(view)) = &mut rank.layout.views[1] {
            (view.offset, view.slot_stride, view.slots) = (Bytes::new(200), Bytes::new(336), 8);
        }
    }));
}

#[test]
fn groups_with_memory_of_their_own_share_nothing() {
    let m = manifest(false, |_| {});
    assert!((0..6).all(|b| m.sharing(GroupId::new(0), BlockId::new(b)).is_empty()));
}

#[test]
fn items_one_behind_another_in_one_region_share_nothing() {
    // The state begins where the attention's blocks end, then one byte before.
    let apart = |offset: u64| {
        manifest(true, |rank| {
            if let Some(View::State(view)) = &mut rank.layout.views[1] {
                view.offset = Bytes::new(offset);
            }
            rank.layout.regions[0].len = Bytes::new(1 << 16);
        })
    };
    let m = apart(6 * 512);
    assert!((0..6).all(|b| m.sharing(GroupId::new(0), BlockId::new(b)).is_empty()));
    let m = apart(6 * 512 - 1);
    let meets: Vec<u32> = (0..6).filter(|&b| !m.sharing(GroupId::new(0), BlockId::new(b)).is_empty()).collect();
    assert_eq!(meets, [5]);
}

#[test]
fn memory_that_is_shared_in_too_many_ways_is_refused() {
    // 5,000 heads, each with a plane of all blocks of its own, over the slots of a state.
    let kv = PagedItem::new(5000, vec![Component::new("kv", 1, "u8")]);
    let state = StateItem { parts: vec![StatePart::new("s", 1, 1, 8, "u8")] };
    let spec = ModelSpec::new(vec![Item::paged("a", kv), Item::state("m", state)]).unwrap();
    let ids = [[ItemId::new(0)], [ItemId::new(1)]];
    let groups: Vec<(&[ItemId], u32, u32)> = vec![(&ids[0], 1, 2), (&ids[1], 0, 2)];
    let placement = Parallelism::tensor(&spec, 1).place(&spec, |_, _| HeadRule::Whole).unwrap().remove(0);
    let mut layout = LayoutStyle { share: true, ..LayoutStyle::HND }.build(&spec, &placement, &groups).unwrap();
    if let Some(View::Paged(view)) = &mut layout.views[0] {
        view.block_stride = Bytes::new(1);
        view.components[0].head_stride = Bytes::new(2);
    }
    let group = |i: usize, tokens| CacheGroup {
        name: Name::new(["a", "m"][i]),
        items: ids[i].to_vec(),
        block_tokens: Tokens::new(tokens),
    };
    let ranks = vec![RankManifest { placement, layout }];
    let errors = Manifest::new(spec, vec![group(0, 1), group(1, 0)], ranks).unwrap_err().0;
    assert!(matches!(errors[..], [ManifestError::Sharing { .. }]), "{errors:?}");
}
