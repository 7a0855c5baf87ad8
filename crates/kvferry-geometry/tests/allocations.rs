//! Nothing is allocated for each block or descriptor: a plan is resolved with a handful of allocations, and expanded with
//! none.
#![allow(clippy::unwrap_used, reason = "a test whose shape is wrong has failed")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BlockTable, BoundRequest, DstPaged, Request, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{BlockId, ItemId, RankId, TokenRange, Tokens};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counter is plain thread-local data without a
// destructor and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|c| c.set(c.get() + 1));
        // SAFETY: the caller keeps `alloc`'s contract, which is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract, and `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `f` gives and how often it allocated.
fn counted<T>(f: impl FnOnce() -> T) -> (T, u64) {
    let before = COUNT.with(Cell::get);
    let out = f();
    (out, COUNT.with(Cell::get) - before)
}

fn manifest(tp: u32, block: u32, style: LayoutStyle) -> Arc<Manifest> {
    let kv = PagedItem::new(8, vec![Component::new("k", 256, "bf16"), Component::new("v", 256, "bf16")]);
    let spec = ModelSpec::new((0..80).map(|i| Item::paged(&format!("layers.{i}"), kv.clone())).collect()).unwrap();
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let group = CacheGroup { name: "kv".into(), items: ids.clone(), block_tokens: Tokens::new(block.into()) };
    let rank = |placement| {
        let layout = style.build(&spec, &placement, &[(&ids, block, 1 << 17)]).unwrap();
        RankManifest { placement, layout }
    };
    let placements = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split).unwrap();
    let ranks = placements.into_iter().map(rank).collect();
    Arc::new(Manifest::new(spec.clone(), vec![group], ranks).unwrap())
}

#[test]
fn allocations_do_not_grow_with_blocks() {
    for (src, dst) in [
        (manifest(8, 16, LayoutStyle::HND), manifest(4, 16, LayoutStyle::HND)),
        (manifest(8, 16, LayoutStyle::NHD), manifest(4, 16, LayoutStyle::HND)),
        (manifest(4, 16, LayoutStyle::NHD), manifest(4, 64, LayoutStyle::NHD)),
        (manifest(2, 48, LayoutStyle::HND), manifest(4, 32, LayoutStyle::PACKED_ROWS)),
    ] {
        let c = Compatible::new(src, dst).unwrap();
        let peers = PeerMap::new(&c, 0).unwrap();
        let plan = PairPlan::new(&c, &peers, RankId::ZERO, RankId::ZERO).unwrap();
        let mut counts = Vec::new();
        for tokens in [3_000u64, 300_000] {
            let scattered = |step: u32, block: u64| -> BlockTable {
                let n = u32::try_from(tokens.div_ceil(block)).unwrap();
                let ids: Vec<BlockId> = (0..n).map(|i| BlockId::new(i.wrapping_mul(step) % (1 << 17))).collect();
                BlockTable::new(0, &ids)
            };
            let block = |m: &Manifest| m.groups()[0].block_tokens.get();
            let held = TokenRange::new(Tokens::ZERO, Tokens::new(tokens));
            let request = Request {
                tokens: Tokens::new(tokens),
                src: vec![SrcPaged { table: scattered(77_777, block(c.src())), held, tail: Tail::Exact }.into()],
                dst: vec![DstPaged { table: scattered(31_415, block(c.dst())), cached: Tokens::ZERO }.into()],
            };
            let bound = BoundRequest::new(&c, request).unwrap();
            let (batch, resolving) = counted(|| plan.resolve(&bound).unwrap());
            let mut buffer = vec![Descriptor::default(); 256];
            let (seen, expanding) = counted(|| {
                let (mut cursor, mut seen) = (batch.cursor(), 0u64);
                loop {
                    match cursor.fill(&mut buffer) {
                        0 => break seen,
                        n => seen += n as u64,
                    }
                }
            });
            assert!(seen > 10_000 * tokens / 300_000, "{seen} descriptors");
            assert_eq!(expanding, 0);
            counts.push(resolving);
        }
        // A hundred times the blocks; growing vectors double a few times more.
        assert!(counts[1] < 100 && counts[1] <= counts[0] + 16, "{counts:?} allocations");
    }
}
