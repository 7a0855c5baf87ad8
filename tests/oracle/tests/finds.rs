//! The oracle on moves written by hand: right ones pass, and each wrong one is told in words.
#![allow(clippy::unwrap_used, reason = "a test")]

use kvferry_geometry::batch::{Base, Batch, Nest, PairRun, Part, Section};
use kvferry_geometry::layout::{CacheLayout, ComponentView, KernelBlock, MemoryKind, PagedView, Region, View};
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::placement::{HeadRange, Placement, TokenClass};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{Bytes, ItemId, RankId, RegionId, Tokens};
use kvferry_oracle::{DstTable, Execution, Finding, Mismatch, Report, SrcTable, Table, Transfer};

/// One item `a` of two heads and 4 B, in four blocks of two tokens: `[block][token][head]`, 16 B a block.
fn engine() -> Manifest {
    let paged = PagedItem::new(2, vec![Component::new("k", 4, "f32")]);
    let spec = ModelSpec::new(vec![Item::paged("a", paged)]).unwrap();
    let view = PagedView {
        region: RegionId::ZERO,
        offset: Bytes::ZERO,
        block_stride: Bytes::new(16),
        blocks: 4,
        block_size: 2,
        kernel: KernelBlock { size: 2, stride: Bytes::new(16) },
        components: vec![ComponentView::new("k".into(), 0, 4, 8)],
    };
    let regions = vec![Region { len: Bytes::new(64), kind: MemoryKind::Host }];
    let layout = CacheLayout { regions, views: vec![Some(View::Paged(view))] };
    let placement = vec![Some(Placement::paged(HeadRange::new(0, 2).unwrap(), TokenClass::ALL))];
    let group = CacheGroup { name: "g".into(), items: vec![ItemId::ZERO], block_tokens: Tokens::new(2) };
    Manifest::new(spec, vec![group], vec![RankManifest { placement, layout }]).unwrap()
}

/// Runs of bytes from the source's to the destination's offsets.
fn batch(moves: &[(u64, u64, u64)]) -> Batch {
    let part = |&(src, dst, run): &(u64, u64, u64)| Part {
        src_add: src,
        dst_add: dst,
        src_block_stride: 0,
        dst_block_stride: 0,
        src_step: 0,
        dst_step: 0,
        nest: Nest::run(run),
        pairs: vec![PairRun { src: 0, dst: 0, count: 1 }].into(),
    };
    let base = Base { src_region: RegionId::ZERO, dst_region: RegionId::ZERO, src_offset: 0, dst_offset: 0 };
    Batch::new(vec![Section { bases: vec![base].into(), parts: moves.iter().map(part).collect() }])
}

/// Five tokens, the first one cached; blocks 0, 1, 2 at the source and 3, 1, 0 at the destination.
fn carry_out(moves: &[(u64, u64, u64)], zeros: &[(u64, u64)]) -> Result<(u64, u64), Box<Report>> {
    let (src, dst) = (engine(), engine());
    let table = |blocks: &[u32]| Table { first: 0, blocks: blocks.to_vec() };
    let transfer = Transfer {
        src: &src,
        dst: &dst,
        tokens: 5,
        src_tables: vec![SrcTable { table: table(&[0, 1, 2]), held: 0..5, frozen: false, ..SrcTable::default() }],
        dst_tables: vec![DstTable { table: table(&[3, 1, 0]), cached: 1, ..DstTable::default() }],
    };
    let mut run = Execution::new(&transfer).unwrap();
    run.run(RankId::ZERO, RankId::ZERO, &batch(moves)).unwrap();
    for &(offset, len) in zeros {
        run.zero(RankId::ZERO, RegionId::ZERO, offset, len).unwrap();
    }
    run.finish().map(|v| (v.moved, v.zeroed))
}

/// Token 1, tokens 2 and 3, token 4.
const RIGHT: [(u64, u64, u64); 3] = [(8, 56, 8), (16, 16, 16), (32, 0, 8)];
/// Token 5 has a place, but is none of the sequence.
const ZEROS: [(u64, u64); 1] = [(8, 8)];

fn fault(moves: &[(u64, u64, u64)], zeros: &[(u64, u64)]) -> String {
    carry_out(moves, zeros).unwrap_err().to_string()
}

#[track_caller]
fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

#[test]
fn right_moves_pass() {
    assert_eq!(carry_out(&RIGHT, &ZEROS), Ok((32, 8)));
}

#[test]
fn a_wrong_source_is_named() {
    // Head 1 of token 4 comes from token 3.
    let text = fault(&[RIGHT[0], RIGHT[1], (32, 0, 4), (28, 4, 4)], &ZEROS);
    assert_says(&text, &["4 bytes wrong", "item a, rank 0, token 4, head 1, component k, byte 0"]);
    assert_says(&text, &["which is item a, token 3, head 1, component k"]);
}

#[test]
fn what_is_missing_too_much_or_doubled_is_told() {
    assert_says(&fault(&RIGHT[..2], &ZEROS), &["8 bytes wrong", "after 0 moves", "which is what was there before"]);
    let cached = fault(&[(0, 48, 16), RIGHT[1], RIGHT[2]], &ZEROS);
    assert_says(&cached, &["8 touched outside", "token 0", "to be left alone"]);
    let beyond = fault(&[RIGHT[0], RIGHT[1], (32, 0, 16)], &ZEROS);
    assert_says(&beyond, &["token 5", "to be zeroed", "not written exactly once"]);
    let poison = fault(&[RIGHT[0], RIGHT[1], (40, 0, 8)], &ZEROS);
    assert_says(&poison, &["token 4", "a byte that the producer never computed"]);
    let twice = fault(&[RIGHT[0], RIGHT[1], RIGHT[2], RIGHT[2]], &ZEROS);
    assert_says(&twice, &["0 bytes wrong", "8 not written exactly once", "after 2 moves"]);
    let unlisted = fault(&[RIGHT[0], RIGHT[1], RIGHT[2], (0, 32, 8)], &ZEROS);
    assert_says(&unlisted, &["8 touched outside", "of no coordinate of the request"]);
    assert_says(&fault(&RIGHT, &[]), &["8 bytes wrong", "token 5", "to be zeroed"]);
}

#[test]
fn tables_that_contradict_themselves_are_told() {
    let engine = engine();
    let table = Table { first: 0, blocks: vec![1, 1] };
    let transfer = Transfer {
        src: &engine,
        dst: &engine,
        tokens: 4,
        src_tables: vec![SrcTable { table: table.clone(), held: 0..4, frozen: false, ..SrcTable::default() }],
        dst_tables: vec![DstTable { table, cached: 0, ..DstTable::default() }],
    };
    let shared = Finding::Shared { rank: 0, region: 0, offset: 16 };
    assert_eq!(Execution::new(&transfer).unwrap_err(), shared);
    let mut good = transfer.clone();
    good.src_tables[0].table.blocks = vec![0, 1];
    let report = Execution::new(&good).unwrap().finish().unwrap_err();
    assert_eq!(report.first, Mismatch::Broken(shared));
}
