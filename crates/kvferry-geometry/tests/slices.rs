//! The slices of what the planner makes, direct and staged, are all of it, in its order.
#![allow(clippy::unwrap_used, reason = "a test helper that cannot build its shape has failed")]

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BlockTable, BoundRequest, DstPaged, Request, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::staged::{Place, Staged};
use kvferry_geometry::units::{BlockId, Bytes, ItemId, RegionId, TokenRange, Tokens};

const TOKENS: u64 = 150;

fn manifest((tp, block, style): (u32, u32, LayoutStyle)) -> Arc<Manifest> {
    let kv = PagedItem::new(4, vec![Component::new("k", 8, "u8"), Component::new("v", 4, "u8")]);
    let spec = ModelSpec::new((0..3).map(|i| Item::paged(&format!("{i}"), kv.clone())).collect()).unwrap();
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let group = CacheGroup { name: "g".into(), items: ids.clone(), block_tokens: Tokens::new(block.into()) };
    let placements = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split).unwrap();
    let rank = |placement| {
        let layout = style.build(&spec, &placement, &[(&ids, block, 64)]).unwrap();
        RankManifest { placement, layout }
    };
    let ranks = placements.into_iter().map(rank).collect();
    Arc::new(Manifest::new(spec, vec![group], ranks).unwrap())
}

/// Neighbours joined. Each batch is counted as it is walked.
fn flat<'a>(batches: impl IntoIterator<Item = &'a Batch>) -> Vec<Descriptor> {
    let mut all: Vec<Descriptor> = Vec::new();
    for batch in batches {
        let (mut cursor, mut out, mut count) = (batch.cursor(), [Descriptor::default(); 64], 0);
        loop {
            let n = cursor.fill(&mut out);
            if n == 0 {
                assert_eq!(batch.descriptors(), count, "{batch:?}");
                break;
            }
            count += n as u64;
            for d in &out[..n] {
                let follows = |last: &Descriptor| {
                    let end = Descriptor {
                        src_offset: last.src_offset + last.len,
                        dst_offset: last.dst_offset + last.len,
                        ..*last
                    };
                    end == Descriptor { len: last.len, ..*d }
                };
                match all.last_mut() {
                    Some(last) if follows(last) => last.len += d.len,
                    _ => all.push(*d),
                }
            }
        }
    }
    all
}

fn check(batch: &Batch, src: &[Bytes], dst: &[Bytes]) -> usize {
    let whole = Arc::new(batch.clone().check(src, dst).unwrap());
    let expected = flat([batch]);
    let bytes = batch.bytes().get();
    let mut most = 0;
    for max in [1, 5, 48, 100, 700, bytes / 3, bytes - 1, bytes] {
        let slices: Vec<_> = whole.slices(Bytes::new(max)).collect();
        for slice in &slices {
            assert!(slice.bytes().get() <= max);
            assert_eq!(slice.batch().clone().check(src, dst).unwrap(), **slice);
        }
        assert_eq!(flat(slices.iter().map(|s| s.batch())), expected, "{max}");
        most = most.max(slices.len());
    }
    most
}

#[test]
fn slices_of_planned_batches_are_the_batches() {
    let (nhd, hnd, rows) = (LayoutStyle::NHD, LayoutStyle::HND, LayoutStyle::PACKED_ROWS);
    for (src, dst) in [
        ((1, 16, nhd), (1, 16, nhd)),
        ((2, 16, hnd), (1, 16, nhd)),
        ((4, 48, nhd), (2, 32, hnd)),
        ((1, 16, rows), (2, 64, hnd)),
        ((2, 32, nhd), (4, 16, rows)),
    ] {
        let c = Compatible::new(manifest(src), manifest(dst)).unwrap();
        let peers = PeerMap::new(&c, 0).unwrap();
        let table = |block: u32, step: u32, turn: u32| {
            let count = u32::try_from(TOKENS).unwrap().div_ceil(block);
            BlockTable::new(0, &(0..count).map(|i| BlockId::new((i * step + turn) % 64)).collect::<Vec<_>>())
        };
        // Blocks that are nowhere adjacent, and blocks in a row.
        for step in [5, 1] {
            let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
            let request = Request {
                tokens: Tokens::new(TOKENS),
                src: vec![SrcPaged { table: table(src.1, step, 3), held, tail: Tail::Exact }.into()],
                dst: vec![DstPaged { table: table(dst.1, step, 8), cached: Tokens::new(16) }.into()],
            };
            let bound = BoundRequest::new(&c, request).unwrap();
            for pair in peers.pairs() {
                let batch = PairPlan::new(&c, &peers, pair.src(), pair.dst()).unwrap().resolve(&bound).unwrap();
                let (src_lens, dst_lens) = (c.src().region_lens(pair.src()), c.dst().region_lens(pair.dst()));
                assert!(check(&batch, &src_lens, &dst_lens) > 500);
                let buffer = [batch.bytes()];
                for (place, lens) in
                    [(Place::Destination, (&src_lens[..], &buffer[..])), (Place::Source, (&buffer, &dst_lens))]
                {
                    let staged = Staged::new(&batch, place, RegionId::ZERO).unwrap();
                    check(&staged.wire, lens.0, lens.1);
                }
            }
        }
    }
}
