//! Descriptions made to be costly, and values that belong to other engines: a typed answer in bounded work, never a plan.
#![allow(clippy::unwrap_used, reason = "a test helper that cannot build its shape has failed")]

use std::sync::Arc;

use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::{
    CacheLayout, ComponentView, KernelBlock, LayoutError, LayoutStyle, MemoryKind, PagedView, Region, View,
};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestError, RankManifest};
use kvferry_geometry::peers::{PeerError, PeerMap};
use kvferry_geometry::placement::{HeadRange, Placement, TokenClass};
use kvferry_geometry::plan::{PairPlan, PlanError};
use kvferry_geometry::request::{BlockTable, BoundRequest, DstPaged, Request, RequestError, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{BlockId, Bytes, ItemId, RankId, RegionId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;

/// One item; every rank has the heads and tokens given, in HND blocks.
fn engine(heads: u32, width: u64, placed: &[(HeadRange, TokenClass)], block_tokens: u32) -> Arc<Manifest> {
    Arc::new(try_engine(&[(heads, width)], placed, block_tokens).unwrap())
}

fn try_engine(
    items: &[(u32, u64)],
    placed: &[(HeadRange, TokenClass)],
    block_tokens: u32,
) -> Result<Manifest, Vec<ManifestError>> {
    let of = |heads, width| PagedItem::new(heads, vec![Component::new("kv", width, "u8")]);
    let items: Vec<Item> = (0..).zip(items).map(|(i, &(h, w))| Item::paged(&format!("item {i}"), of(h, w))).collect();
    let spec = ModelSpec::new(items).unwrap();
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let group =
        CacheGroup { name: "kv".into(), items: ids.clone(), block_tokens: Tokens::new(u64::from(block_tokens)) };
    let rank = |&(heads, tokens): &(HeadRange, TokenClass)| {
        let placement = vec![Some(Placement::paged(heads, tokens)); ids.len()];
        let layout = LayoutStyle::HND.build(&spec, &placement, &[(&ids, block_tokens / tokens.count(), 8)]).unwrap();
        RankManifest { placement, layout }
    };
    let ranks = placed.iter().map(rank).collect();
    Manifest::new(spec.clone(), vec![group], ranks).map_err(|e| e.0)
}

fn heads(start: u32, end: u32) -> HeadRange {
    HeadRange::new(start, end).unwrap()
}

fn ids(list: &[u32]) -> BlockTable {
    BlockTable::new(0, &list.iter().map(|&i| BlockId::new(i)).collect::<Vec<_>>())
}

fn request(n: u64, cached: u64, src: BlockTable, dst: BlockTable) -> Request {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(n));
    Request {
        tokens: Tokens::new(n),
        src: vec![SrcPaged { table: src, held, tail: Tail::Exact }.into()],
        dst: vec![DstPaged { table: dst, cached: Tokens::new(cached) }.into()],
    }
}

const ALL: TokenClass = TokenClass::ALL;

#[test]
fn a_plan_takes_no_request_of_other_engines() {
    let one = |block| engine(2, 8, &[(heads(0, 2), ALL)], block);
    let c = Compatible::new(one(16), one(16)).unwrap();
    let other = Compatible::new(one(32), one(16)).unwrap();
    let (peers, foreign) = (PeerMap::new(&c, 0).unwrap(), PeerMap::new(&other, 0).unwrap());
    let (src, dst) = (RankId::ZERO, RankId::ZERO);
    assert_eq!(PairPlan::new(&c, &foreign, src, dst).unwrap_err(), PlanError::ForeignMap { src, dst });
    let plan = PairPlan::new(&c, &peers, src, dst).unwrap();
    let bound = BoundRequest::new(&other, request(64, 0, ids(&[0, 1]), ids(&[0, 1, 2, 3]))).unwrap();
    assert_eq!(plan.resolve(&bound), Err(PlanError::ForeignRequest { src, dst }));
    assert_eq!(plan.uncoalesced(&bound), Err(PlanError::ForeignRequest { src, dst }));
    // Zeroing knows the destination only, and that is the same.
    assert!(ZeroPlan::new(c.dst(), dst).unwrap().resolve(&bound).is_ok());
    assert!(ZeroPlan::new(other.src(), dst).unwrap().resolve(&bound).is_err());
    let unknown = RankId::new(1);
    assert!(matches!(PairPlan::new(&c, &peers, unknown, dst), Err(PlanError::UnknownRank { ranks: 1, .. })));
    assert!(matches!(ZeroPlan::new(c.dst(), unknown), Err(PlanError::UnknownRank { ranks: 1, .. })));
}

#[test]
fn two_positions_that_are_read_are_never_one_block() {
    let one = || engine(2, 8, &[(heads(0, 2), ALL)], 16);
    let c = Compatible::new(one(), one()).unwrap();
    let bound = |cached, list: &[u32]| BoundRequest::new(&c, request(64, cached, ids(list), ids(&[0, 1, 2, 3])));
    let errors = bound(0, &[5, 6, 5, 7]).unwrap_err().0;
    assert!(matches!(errors[..], [RequestError::RepeatedBlock { .. }]), "{errors:?}");
    // Placeholders of what the destination has already may repeat.
    assert!(bound(32, &[0, 0, 5, 7]).is_ok());
    assert!(bound(15, &[0, 0, 5, 7]).is_err() && bound(48, &[0, 0, 0, 7]).is_ok());
    let errors = bound(65, &[1, 2, 3, 4]).unwrap_err().0;
    assert!(matches!(errors[..], [RequestError::CachedBeyond { .. }]), "{errors:?}");
}

#[test]
fn work_is_bounded_whatever_is_described() {
    // Nested head intervals over finely dealt tokens: every cut is held by many.
    let class = |i| TokenClass::new(2, 1, i % 2).unwrap();
    let mut placed: Vec<_> = (0..1500).map(|i| (heads(i, 65_536 - i), class(i))).collect();
    placed.push((heads(0, 65_536), TokenClass::new(2, 32_768, 0).unwrap()));
    placed.push((heads(0, 65_536), TokenClass::new(2, 32_768, 1).unwrap()));
    let errors = try_engine(&[(65_536, 1)], &placed, 65_536).unwrap_err();
    assert!(errors.iter().any(|e| matches!(e, ManifestError::TooComplex { .. })), "{:?}", &errors[..1]);

    // One head for each of many holders, and one consumer of all.
    let many: Vec<_> = (0..4096).map(|i| (heads(i, i + 1), ALL)).collect();
    let src = engine(4096, 1, &many, 1);
    let dst = engine(4096, 1, &[(heads(0, 4096), ALL)], 1);
    let c = Compatible::new(src, dst).unwrap();
    assert!(matches!(PeerMap::new(&c, 0), Err(PeerError::TooComplex { .. })));

    // More ranks times items than are planned for, however few bytes say so.
    let items = vec![(1, 1); 64];
    let ranks = vec![(heads(0, 1), ALL); 8192];
    let errors = try_engine(&items, &ranks, 1).unwrap_err();
    assert!(matches!(errors[..], [ManifestError::Placements { ranks: 8192, items: 64, .. }]), "{errors:?}");
}

#[test]
fn proofs_of_overlap_share_one_budget() {
    // Strides that don't nest, so that runs must be listed; each view is cheap enough alone.
    let items = 64;
    let kind = PagedItem::new(2, vec![Component::new("kv", 8, "u8")]);
    let spec = ModelSpec::new((0..items).map(|i| Item::paged(&format!("i{i}"), kind.clone())).collect()).unwrap();
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let view = |region| {
        View::Paged(PagedView {
            region: RegionId::new(region),
            offset: Bytes::ZERO,
            block_stride: Bytes::new(16),
            blocks: 1 << 16,
            block_size: 1,
            kernel: KernelBlock { size: 1, stride: Bytes::new(8) },
            // No two alike: each needs a proof of its own.
            components: vec![ComponentView::new("kv".into(), 0, 16 * (100 + u64::from(region)) + 8, 8)],
        })
    };
    let len = Bytes::new(1 << 24);
    let layout = CacheLayout {
        regions: vec![Region { len, kind: MemoryKind::Host }; items],
        views: (0..u32::try_from(items).unwrap()).map(|i| Some(view(i))).collect(),
    };
    let placement = vec![Some(Placement::paged(heads(0, 2), ALL)); items];
    assert_eq!(layout.check(&spec, &placement, &[ids[..1].to_vec()]), Ok(()));
    let group = CacheGroup { name: "g".into(), items: ids, block_tokens: Tokens::new(1) };
    let Err(errors) = Manifest::new(spec, vec![group], vec![RankManifest { placement, layout }]) else {
        panic!("as many runs as there are were listed");
    };
    let errors = errors.0;
    let unprovable =
        |e: &ManifestError| matches!(e, ManifestError::Layout { error: LayoutError::Unprovable { .. }, .. });
    assert!(errors.iter().any(unprovable), "{errors:?}");
}

#[test]
fn strides_at_their_limits_do_not_overflow() {
    let kind = PagedItem::new(2, vec![Component::new("kv", 16, "u8")]);
    let spec = || ModelSpec::new(vec![Item::paged("i", kind.clone())]).unwrap();
    let build = |block_size: u32, blocks: u32, block_stride: u64, head_stride: u64, len: u64| {
        let view = PagedView {
            region: RegionId::ZERO,
            offset: Bytes::ZERO,
            block_stride: Bytes::new(block_stride),
            blocks,
            block_size,
            kernel: KernelBlock { size: block_size, stride: Bytes::new(0) },
            components: vec![ComponentView::new("kv".into(), 0, head_stride, 16)],
        };
        let region = Region { len: Bytes::new(len), kind: MemoryKind::Host };
        let layout = CacheLayout { regions: vec![region], views: vec![Some(View::Paged(view))] };
        let placement = vec![Some(Placement::paged(heads(0, 2), ALL))];
        let group =
            CacheGroup { name: "g".into(), items: vec![ItemId::ZERO], block_tokens: Tokens::new(block_size.into()) };
        Manifest::new(spec(), vec![group], vec![RankManifest { placement, layout }]).map(Arc::new)
    };
    let plain = || build(32, 8, 1024, 512, 1 << 20).unwrap();
    // As far apart as an address space allows.
    let far = build(16, 1, 1 << 48, (1 << 48) - 1024, 1 << 48).unwrap();
    let c = Compatible::new(far, plain()).unwrap();
    let peers = PeerMap::new(&c, 0).unwrap();
    let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
    let bound = BoundRequest::new(&c, request(16, 0, ids(&[0]), ids(&[0]))).unwrap();
    let batch = plan.resolve(&bound).unwrap();
    let mut out = [Descriptor::default(); 64];
    assert_eq!(batch.cursor().fill(&mut out), 2);
    assert!(batch.check(&c.src().region_lens(RankId::ZERO), &c.dst().region_lens(RankId::ZERO)).is_ok());
    for (stride, len) in [(u64::MAX, 1 << 20), (1 << 63, u64::MAX), (1024, u64::MAX)] {
        assert!(build(32, 8, stride, 512, len).is_err(), "{stride} {len}");
    }
}

/// Items whose tokens repeat after different periods weigh by their bytes, not by their periods.
#[test]
fn replicas_are_balanced_by_bytes_whatever_the_periods() {
    let kind = |width| PagedItem::new(1, vec![Component::new("kv", width, "u8")]);
    let spec = ModelSpec::new(vec![Item::paged("narrow", kind(8)), Item::paged("wide", kind(512))]).unwrap();
    let (narrow, wide) = (ItemId::new(0), ItemId::new(1));
    let class = |i: u32| TokenClass::new(2, 4096, i % 2).unwrap();
    let make = |placed: Vec<(Option<TokenClass>, bool)>| {
        let groups: [&[ItemId]; 2] = [&[narrow], &[wide]];
        let ranks = placed.into_iter().map(|(n, w)| {
            let at = |tokens| Placement::paged(heads(0, 1), tokens);
            let placement = vec![n.map(at), w.then(|| at(ALL))];
            let layout =
                LayoutStyle::HND.build(&spec, &placement, &[(groups[0], 4096, 4), (groups[1], 16, 4)]).unwrap();
            RankManifest { placement, layout }
        });
        let group = |name: &str, item, tokens| CacheGroup {
            name: name.into(),
            items: vec![item],
            block_tokens: Tokens::new(tokens),
        };
        let groups = vec![group("n", narrow, 8192), group("w", wide, 16)];
        Arc::new(Manifest::new(spec.clone(), groups, ranks.collect()).unwrap())
    };
    // The narrow item is dealt to two ranks and held twice; the wide one is whole on all four.
    let src = make((0..4).map(|i| (Some(class(i)), true)).collect());
    let dst = make(vec![(Some(class(0)), true), (Some(class(1)), true), (None, true), (None, true)]);
    let c = Compatible::new(src, dst).unwrap();
    for salt in 0..8 {
        let peers = PeerMap::new(&c, salt).unwrap();
        let mut sources: Vec<u32> = (0..4).flat_map(|d| peers.sources_of(RankId::new(d)).map(RankId::get)).collect();
        sources.sort_unstable();
        sources.dedup();
        assert_eq!(sources, [0, 1, 2, 3], "salt {salt}");
    }
}
