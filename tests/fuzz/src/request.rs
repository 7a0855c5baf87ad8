//! Two engines and a request between them.

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, BoundedBatch, Descriptor};
use kvferry_geometry::compat::{CompatOptions, Compatible, Unmatched};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{
    BlockTable, BoundRequest, Checkpoint, DstGroup, DstPaged, DstState, Request, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::spec::Retention;
use kvferry_geometry::staged::{CostModel, Place, Pools, Staged};
use kvferry_geometry::units::{BlockId, Bytes, GroupId, RankId, RegionId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;

use crate::{Reached, Reader, engine, layout};

/// The most pairs of ranks that are planned.
const MAX_PAIRS: usize = 32;
/// The most descriptors of a batch that are looked at.
const MAX_DESCRIPTORS: usize = 1 << 13;
/// The most bytes that a rank has in memory of its own, so that they can be moved.
const MAX_MEMORY: u64 = 1 << 18;

/// Choices for a spec, two engines and a request.
///
/// # Panics
/// Where a promise is broken.
#[must_use]
pub fn run(data: &[u8]) -> Reached {
    let (mut r, mut reached) = (Reader::new(data), Reached::default());
    let items = engine::items(&mut r);
    let Some(src) = layout::accepted(&mut r, &mut reached, items.clone(), 0) else { return reached };
    let mut wanted = items;
    match r.below(16) {
        14 => drop(wanted.pop()),
        15 => wanted.extend(engine::items(&mut r)),
        _ => {}
    }
    let turn = usize::from(r.byte());
    let Some(dst) = layout::accepted(&mut r, &mut reached, wanted, turn) else { return reached };
    let unmatched = |r: &mut Reader<'_>| if r.flag() { Unmatched::Ignore } else { Unmatched::Refuse };
    let options = CompatOptions { source_only: unmatched(&mut r), destination_only: unmatched(&mut r) };
    let c = match Compatible::with(Arc::new(src), Arc::new(dst), options) {
        Ok(c) => c,
        Err(errors) => {
            assert!(!errors.0.is_empty());
            errors.0.iter().take(64).for_each(|e| reached.fault(e));
            return reached;
        }
    };
    let options = PeerOptions { salt: r.number(), stripe: r.flag() };
    let map = match PeerMap::with(&c, options, |s, d| s.get() ^ d.get()) {
        Ok(map) => map,
        Err(error) => {
            reached.fault(&error);
            return reached;
        }
    };
    let request = request(&mut r, &c);
    crate::show("request", &request);
    let frozen = request.src.iter().any(|g| matches!(g, SrcGroup::Paged(g) if g.tail == Tail::Frozen));
    match BoundRequest::new(&c, request) {
        Ok(bound) => transfer(&c, &map, &bound, frozen, &mut reached),
        Err(errors) => {
            assert!(!errors.0.is_empty());
            errors.0.iter().take(64).for_each(|e| reached.fault(e));
        }
    }
    reached
}

/// A request that fits mostly.
fn request(r: &mut Reader<'_>, c: &Compatible) -> Request {
    let groups = |m: &Manifest| (0u32..).map(GroupId::new).take(m.groups().len()).collect::<Vec<_>>();
    let capacity = |m: &Manifest, id: GroupId| match ring(m, id) {
        _ if m.is_state(id) => 1 << 20,
        // More than a ring has room for, now and then.
        Some(ring) => ring.saturating_mul(3),
        None => u64::from(m.blocks(id).get()).saturating_mul(m.groups()[id.index()].block_tokens.get()),
    };
    let of_both = [c.src(), c.dst()].map(|m| groups(m).iter().map(|&g| capacity(m, g)).min().unwrap_or(0));
    let most = of_both[0].min(of_both[1]);
    let any = r.number();
    let tokens = Tokens::new(if r.rare() { any } else { any % most.saturating_add(1).max(1) });
    let mut src: Vec<SrcGroup> = groups(c.src()).iter().map(|&g| src_group(r, c.src(), g, tokens)).collect();
    let mut dst: Vec<DstGroup> = groups(c.dst()).iter().map(|&g| dst_group(r, c.dst(), g, tokens)).collect();
    if r.rare() {
        src.pop();
        dst.extend(dst.first().cloned());
    }
    Request { tokens, src, dst }
}

fn src_group(r: &mut Reader<'_>, m: &Manifest, id: GroupId, tokens: Tokens) -> SrcGroup {
    if m.is_state(id) != r.rare() {
        let mut checkpoints = vec![Checkpoint { position: tokens, slot: BlockId::new(r.number32() % slots(m, id)) }];
        let more = more(r);
        let first = u64::from(r.byte());
        let at = |i: u64| Checkpoint { position: Tokens::new(first + i), slot: slot(r, m, id) };
        checkpoints.extend((0..more).map(at));
        return SrcState { checkpoints }.into();
    }
    let table = table(r, m, id, tokens);
    let held = if r.rare() { TokenRange::new(Tokens::new(r.number()), Tokens::new(r.number())) } else { all(tokens) };
    let tail = if r.below(4) == 3 { Tail::Frozen } else { Tail::Exact };
    SrcPaged { table, held, tail }.into()
}

fn dst_group(r: &mut Reader<'_>, m: &Manifest, id: GroupId, tokens: Tokens) -> DstGroup {
    if m.is_state(id) != r.rare() {
        let resumes = Some(slot(r, m, id)).filter(|_| r.below(4) < 3);
        let more = more(r);
        let first = u64::from(r.byte());
        let at = |i: u64| Checkpoint { position: Tokens::new(first + i), slot: slot(r, m, id) };
        return DstState { slot: resumes, more: (0..more).map(at).collect() }.into();
    }
    let table = table(r, m, id, tokens);
    let cached = match r.below(8) {
        6 => r.number() % tokens.get().max(1),
        7 => r.number(),
        _ => 0,
    };
    DstPaged { table, cached: Tokens::new(cached) }.into()
}

fn all(tokens: Tokens) -> TokenRange {
    TokenRange::new(Tokens::ZERO, tokens)
}

fn slots(m: &Manifest, id: GroupId) -> u32 {
    m.blocks(id).get().max(1)
}

fn slot(r: &mut Reader<'_>, m: &Manifest, id: GroupId) -> BlockId {
    let any = r.number32();
    BlockId::new(if r.rare() { any } else { any % slots(m, id) })
}

/// How many further states: none mostly, now and then more than a request can have.
fn more(r: &mut Reader<'_>) -> u64 {
    if r.below(4) == 3 { r.usual(&[1, 2, 3]).min(5000) } else { 0 }
}

fn ring(m: &Manifest, id: GroupId) -> Option<u64> {
    let first = m.groups()[id.index()].items.first().and_then(|&i| m.spec().get(i))?;
    match first.as_paged()?.retention {
        Retention::Ring(t) => Some(t.get()),
        _ => None,
    }
}

/// A table with room for all tokens mostly.
fn table(r: &mut Reader<'_>, m: &Manifest, id: GroupId, tokens: Tokens) -> BlockTable {
    let block = m.groups()[id.index()].block_tokens.get().max(1);
    let needed = ring(m, id).map_or(tokens.get().div_ceil(block), |ring| ring / block);
    let blocks = slots(m, id);
    let fits = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let choice = r.below(8);
    if needed > 4096 || choice == 6 {
        let (first, count) = if r.rare() { (r.number32(), r.number32()) } else { (0, fits(needed)) };
        return BlockTable::contiguous(if r.rare() { r.number() } else { 0 }, BlockId::new(first), count);
    }
    if choice == 7 {
        let first = r.number();
        let ids: Vec<BlockId> = (0..r.below(40)).map(|_| slot(r, m, id)).collect();
        return BlockTable::new(first, &ids);
    }
    // A step that shares no factor with the number of blocks gives each id once.
    let (start, step) = (r.number(), r.usual(&[1, 3, 5, 7, 11]));
    let id = |i: u64| BlockId::new(fits(start.wrapping_add(i.wrapping_mul(step)) % u64::from(blocks)));
    let skipped = if choice == 5 { r.below(3) as u64 } else { 0 };
    let spare = u64::from(choice == 4);
    let ids: Vec<BlockId> = (skipped..needed.saturating_add(spare)).map(id).collect();
    BlockTable::new(skipped, &ids)
}

/// Plans and resolves every pair of ranks, and looks at what comes out. A `frozen` tail may arrive as zeros and be zeroed again.
fn transfer(c: &Compatible, map: &PeerMap, bound: &BoundRequest, frozen: bool, reached: &mut Reached) {
    reached.at("bound");
    if bound.moves().iter().any(|m| !m.states.is_empty()) {
        reached.at("states move");
    }
    if bound.is_full_hit() {
        reached.at("full hit");
    }
    let mut last: Option<(RankId, Written)> = None;
    for pair in map.pairs().iter().take(MAX_PAIRS) {
        let plan = PairPlan::new(c, map, pair.src(), pair.dst()).expect("a pair of the map has a plan");
        let batch = plan.resolve(bound).expect("a request of these engines");
        let (src, dst) = (c.src().region_lens(pair.src()), c.dst().region_lens(pair.dst()));
        let direct = batch.clone().check(&src, &dst).expect("a resolved batch lies inside its regions");
        let descriptors = descriptors(&direct);
        let before = plan.uncoalesced(bound).expect("a request of these engines");
        assert!(batch.descriptors() <= before, "{} descriptors, {before} before coalescing", batch.descriptors());
        if batch.is_empty() {
            continue;
        }
        reached.at("batch");
        if let Some(list) = &descriptors {
            let written = match last.take() {
                Some((rank, written)) if rank == pair.dst() => written,
                _ => Written::default(),
            };
            let written = written.with(list);
            if !frozen {
                zeroed(c, bound, pair.dst(), &written);
            }
            last = Some((pair.dst(), written));
        }
        staged(&batch, &src, &dst, reached);
    }
    let ranks = (0u32..).map(RankId::new).take(c.dst().ranks().len().min(MAX_PAIRS));
    ranks.for_each(|rank| zeroed(c, bound, rank, &Written::default()));
}

/// The descriptors of a batch, where they are few: each inside its regions and all of its bytes.
fn descriptors(batch: &BoundedBatch) -> Option<Vec<Descriptor>> {
    let (mut cursor, mut out) = (batch.batch().cursor(), vec![Descriptor::default(); MAX_DESCRIPTORS + 1]);
    // In two fills, since where a buffer ends must not matter.
    let first = cursor.fill(&mut out[..7]);
    let count = if first == 7 { 7 + cursor.fill(&mut out[7..]) } else { first };
    out.truncate(count);
    for d in &out {
        assert!(d.len > 0);
        let inside = |region: RegionId, offset: u64, lens: &[Bytes]| {
            offset.checked_add(d.len).is_some_and(|end| end <= lens[region.index()].get())
        };
        assert!(inside(d.src_region, d.src_offset, batch.src_lens()), "{d:?}");
        assert!(inside(d.dst_region, d.dst_offset, batch.dst_lens()), "{d:?}");
    }
    if count > MAX_DESCRIPTORS {
        return None;
    }
    assert_eq!(count as u64, batch.batch().descriptors());
    assert_eq!(out.iter().map(|d| d.len).sum::<u64>(), batch.bytes().get());
    Some(out)
}

/// The bytes that were written at a destination: region, start, end.
#[derive(Default)]
struct Written(Vec<(RegionId, u64, u64)>);

impl Written {
    /// More of them, none of them twice.
    fn with(mut self, list: &[Descriptor]) -> Self {
        self.0.extend(list.iter().map(|d| (d.dst_region, d.dst_offset, d.dst_offset + d.len)));
        self.0.sort_unstable();
        self.apart();
        self
    }

    fn apart(&self) {
        for pair in self.0.windows(2) {
            assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "a byte is written twice: {pair:?}");
        }
    }
}

/// What is zeroed lies inside the regions, once, and is none of what arrived.
fn zeroed(c: &Compatible, bound: &BoundRequest, rank: RankId, written: &Written) {
    let zero = ZeroPlan::new(c.dst(), rank).expect("a rank of the engine").resolve(bound).expect("its own request");
    let lens = c.dst().region_lens(rank);
    let mut all = Written(written.0.clone());
    for range in zero.ranges().take(MAX_DESCRIPTORS) {
        let end = range.offset.checked_add(range.len).expect("a range that ends");
        assert!(range.len > 0 && end <= lens[range.region.index()].get(), "{range:?}");
        all.0.push((range.region, range.offset, end));
    }
    all.0.sort_unstable();
    all.apart();
}

/// Both staged ways move the same bytes in bounds; where memory is small, the bytes themselves are compared.
fn staged(direct: &Batch, src: &[Bytes], dst: &[Bytes], reached: &mut Reached) {
    let choice = CostModel::default().compare(direct, Pools { source: 1 << 20, destination: 1 << 20 });
    assert!(choice.best.fits && choice.best.ns <= choice.direct.ns);
    let total = |lens: &[Bytes]| lens.iter().map(|l| l.get()).fold(0, u64::saturating_add);
    let small = total(src) <= MAX_MEMORY && total(dst) <= MAX_MEMORY && direct.descriptors() <= MAX_DESCRIPTORS as u64;
    let memory = small.then(|| (patterned(src), blank(dst)));
    let expected = memory.as_ref().map(|(from, to)| moved(direct, from, to));
    for place in [Place::Destination, Place::Source] {
        let Some(staged) = Staged::new(direct, place, RegionId::ZERO) else {
            reached.at("not staged");
            continue;
        };
        assert_eq!(staged.bytes, direct.bytes().get());
        let staging = [Bytes::new(staged.bytes)];
        let ((first, first_dst), (second, second_src)) = match place {
            Place::Source => ((&staged.local, &staging[..]), (&staged.wire, &staging[..])),
            _ => ((&staged.wire, &staging[..]), (&staged.local, &staging[..])),
        };
        for (step, from, to) in [(first, src, first_dst), (second, second_src, dst)] {
            let step = step.clone().check(from, to).expect("a staged batch lies inside its regions");
            assert_eq!(step.bytes(), direct.bytes());
            descriptors(&step);
        }
        if let (Some((from, to)), Some(expected)) = (&memory, &expected) {
            let buffer = moved(first, from, &blank(&staging));
            assert!(buffer.iter().all(|b| !b.contains(&BLANK)), "{place}: bytes of the buffer that nothing fills");
            assert!(moved(second, &buffer, to) == *expected, "{place}: other bytes than directly");
            reached.at(&format!("{place}"));
            let few = staged.wire.descriptors() < direct.descriptors();
            reached.at(if few { "fewer descriptors" } else { "as many descriptors" });
        }
    }
}

/// What no pattern has.
const BLANK: u8 = 0;

fn patterned(lens: &[Bytes]) -> Vec<Vec<u8>> {
    let byte = |region: usize, i: u64| {
        let x = (i ^ (region as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        1 + (x >> 32).to_le_bytes()[0] % 255
    };
    lens.iter().enumerate().map(|(region, len)| (0..len.get()).map(|i| byte(region, i)).collect()).collect()
}

fn blank(lens: &[Bytes]) -> Vec<Vec<u8>> {
    lens.iter().map(|len| vec![BLANK; usize::try_from(len.get()).unwrap()]).collect()
}

/// A batch by its descriptors.
fn moved(batch: &Batch, src: &[Vec<u8>], dst: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let (mut cursor, mut out) = (batch.cursor(), dst.to_vec());
    let mut buffer = [Descriptor::default(); 64];
    loop {
        let count = cursor.fill(&mut buffer);
        if count == 0 {
            return out;
        }
        for d in &buffer[..count] {
            let range = |offset: u64| {
                let start = usize::try_from(offset).unwrap();
                start..start + usize::try_from(d.len).unwrap()
            };
            let from = &src[d.src_region.index()][range(d.src_offset)];
            out[d.dst_region.index()][range(d.dst_offset)].copy_from_slice(from);
        }
    }
}
