//! Real pairs of engines: how many descriptors one decode rank's request takes before and after coalescing and when it is staged, what
//! the cost model makes of that, and how fast this machine's CPU does it all.
//!
//! `direct` copies every run straight into place (as transports that copy do), `kernels` does the same with the loops of
//! [`Permute`]; `staged` copies whole runs into staging memory (`wire`) and permutes from there (`local`), or the other way
//! round. The yardstick is `memcpy` of as many bytes from one end to the other, with the same threads in the same round. Both steps
//! of staging are copies here, so what it saves, descriptors at a network card, does not show in these rates; the model's
//! columns are about that.
//!
//! `KVFERRY_BENCH_TOKENS` sets the tokens of a request (default 4096), `KVFERRY_BENCH_ROUNDS` the rounds (default 9),
//! `KVFERRY_BENCH_THREADS` the most threads (default 2).
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_benches::measure::{Column, median, number};
use kvferry_benches::scattered;
use kvferry_geometry::batch::{Batch, BoundedBatch, Descriptor};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{
    BlockTable, BoundRequest, Checkpoint, DstGroup, DstPaged, DstState, Request, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::staged::{CostModel, Place, Pools, Staged};
use kvferry_geometry::units::{BlockId, Bytes, GroupId, RankId, RegionId, TokenRange, Tokens};
use kvferry_memory::{BufferOptions, HostBuffer, Permute};
use kvferry_models::{EngineDescription, Model, layout_named};
use kvferry_transport::Region;
use kvferry_transport::copy::Copier;

/// Staging memory of either side, for the model.
const POOL: u64 = 1 << 30;

/// An engine of a pair.
struct Side {
    shape: &'static str,
    block: u32,
    layout: &'static str,
}

struct Pair {
    name: &'static str,
    preset: &'static str,
    layers: u32,
    src: Side,
    dst: Side,
}

const fn side(shape: &'static str, block: u32, layout: &'static str) -> Side {
    Side { shape, block, layout }
}

/// Layers are as many as fit memory; descriptors grow with them, except where whole rows move.
const PAIRS: [Pair; 9] = [
    Pair {
        name: "Llama-70B TP8>TP4 HND>HND",
        preset: "llama-3.1-70b",
        layers: 16,
        src: side("tp=8", 16, "hnd"),
        dst: side("tp=4", 16, "hnd"),
    },
    Pair {
        name: "Llama-70B TP8>TP4 NHD>HND",
        preset: "llama-3.1-70b",
        layers: 16,
        src: side("tp=8", 16, "nhd"),
        dst: side("tp=4", 16, "hnd"),
    },
    Pair {
        name: "Llama-70B TP8>TP4 NHD>NHD",
        preset: "llama-3.1-70b",
        layers: 16,
        src: side("tp=8", 16, "nhd"),
        dst: side("tp=4", 16, "nhd"),
    },
    Pair {
        name: "Llama-70B TP4>TP4 NHD>HND",
        preset: "llama-3.1-70b",
        layers: 16,
        src: side("tp=4", 16, "nhd"),
        dst: side("tp=4", 16, "hnd"),
    },
    Pair {
        name: "DeepSeek-V3.2 packed>layers",
        preset: "deepseek-v3.2",
        layers: 16,
        src: side("tp=8", 64, "packed-rows"),
        dst: side("tp=8", 64, "hnd"),
    },
    Pair {
        name: "DeepSeek-V3.2 packed>packed",
        preset: "deepseek-v3.2",
        layers: 16,
        src: side("tp=8", 64, "packed-rows"),
        dst: side("tp=8", 64, "packed-rows"),
    },
    Pair {
        name: "Gemma-4 PP2>PP1",
        preset: "gemma-4-26b-a4b-it",
        layers: 30,
        src: side("tp=4,pp=2", 16, "hnd"),
        dst: side("tp=4", 16, "hnd"),
    },
    Pair {
        name: "Kimi-Linear TP8>TP2",
        preset: "kimi-linear-48b-a3b",
        layers: 27,
        src: side("tp=8", 64, "hnd"),
        dst: side("tp=2", 64, "hnd"),
    },
    Pair {
        name: "Llama-70B TP8>TP4 16>64 HND",
        preset: "llama-3.1-70b",
        layers: 16,
        src: side("tp=8", 16, "hnd"),
        dst: side("tp=4", 64, "hnd"),
    },
];

fn engine(pair: &Pair, side: &Side, tokens: u32) -> Arc<Manifest> {
    let mut engine = EngineDescription::new(Model::preset(pair.preset).unwrap(), side.shape.parse().unwrap());
    engine.options.layers = Some(pair.layers);
    engine.block_size = side.block;
    engine.layout = layout_named(side.layout).unwrap();
    engine.blocks = Some(tokens.div_ceil(side.block).next_power_of_two());
    engine.slots.count = Some(4);
    Arc::new(engine.manifest().unwrap())
}

/// How the blocks of a table lie.
#[derive(Clone, Copy, PartialEq)]
enum Blocks {
    Scattered,
    InOrder,
}

/// A table for all tokens.
fn table(m: &Manifest, id: GroupId, tokens: u64, blocks: Blocks, step: u32) -> BlockTable {
    let count = u32::try_from(tokens.div_ceil(m.groups()[id.index()].block_tokens.get())).unwrap();
    match blocks {
        Blocks::Scattered => BlockTable::new(0, &scattered(count, m.blocks(id).get(), step)),
        Blocks::InOrder => BlockTable::contiguous(0, BlockId::ZERO, count),
    }
}

fn bound(c: &Compatible, tokens: u64, blocks: Blocks) -> BoundRequest {
    let ids = |m: &Manifest| (0u32..).map(GroupId::new).take(m.groups().len()).collect::<Vec<_>>();
    let n = Tokens::new(tokens);
    let src = |&id: &GroupId| -> SrcGroup {
        if c.src().is_state(id) {
            return SrcState { checkpoints: vec![Checkpoint { position: n, slot: BlockId::new(1) }] }.into();
        }
        let table = table(c.src(), id, tokens, blocks, 77_777);
        SrcPaged { table, held: TokenRange::new(Tokens::ZERO, n), tail: Tail::Exact }.into()
    };
    let dst = |&id: &GroupId| -> DstGroup {
        if c.dst().is_state(id) {
            return DstState { slot: Some(BlockId::new(2)), more: Vec::new() }.into();
        }
        DstPaged { table: table(c.dst(), id, tokens, blocks, 31_415), cached: Tokens::ZERO }.into()
    };
    let (src, dst) = (ids(c.src()).iter().map(src).collect(), ids(c.dst()).iter().map(dst).collect());
    BoundRequest::new(c, Request { tokens: n, src, dst }).unwrap()
}

/// What destination rank 0 reads, by source rank.
struct Share {
    rank: RankId,
    batch: Batch,
    uncoalesced: u64,
}

/// One pair with one request.
struct Case {
    c: Compatible,
    shares: Vec<Share>,
}

impl Case {
    fn new(pair: &Pair, tokens: u32, blocks: Blocks) -> Self {
        let c = Compatible::new(engine(pair, &pair.src, tokens), engine(pair, &pair.dst, tokens)).unwrap();
        let peers = PeerMap::new(&c, 0).unwrap();
        let request = bound(&c, tokens.into(), blocks);
        let share = |rank| {
            let plan = PairPlan::new(&c, &peers, rank, RankId::ZERO).unwrap();
            Share { rank, batch: plan.resolve(&request).unwrap(), uncoalesced: plan.uncoalesced(&request).unwrap() }
        };
        let shares = peers.sources_of(RankId::ZERO).map(share).collect();
        Self { c, shares }
    }

    fn sum(&self, of: impl Fn(&Share) -> u64) -> u64 {
        self.shares.iter().map(of).sum()
    }

    fn bytes(&self) -> u64 {
        self.sum(|s| s.batch.bytes().get())
    }
}

fn staged(batch: &Batch, place: Place) -> Staged {
    Staged::new(batch, place, RegionId::ZERO).unwrap()
}

/// Descriptors as a cursor gives them.
fn count(batch: &Batch) -> u64 {
    let (mut cursor, mut buffer, mut count) = (batch.cursor(), vec![Descriptor::default(); 512], 0);
    loop {
        match cursor.fill(&mut buffer) {
            0 => return count,
            n => count += n as u64,
        }
    }
}

/// Median time of a few repetitions, in microseconds.
fn micros(mut once: impl FnMut()) -> f64 {
    let times = (0..9).map(|_| {
        let start = Instant::now();
        once();
        start.elapsed()
    });
    median(times.collect()) * 1e6
}

fn descriptor_table(tokens: u32) {
    println!("descriptors of one request of {tokens} tokens at decode rank 0, all its sources");
    println!(
        "before: one for each item, component, head and block; after: coalesced, with scattered blocks and with blocks in order;"
    );
    println!(
        "wire: of the wire step when staged at D or at S, scattered; direct, staged: ms by the model's default constants"
    );
    println!("(the better staged way), and its choice; us: to compute both staged ways and their costs");
    println!(
        "pair                         layers src    MiB    before    after in order   wire@D   wire@S   direct   staged  \
         choice                       us"
    );
    for pair in &PAIRS {
        let case = Case::new(pair, tokens, Blocks::Scattered);
        let (before, after) = (case.sum(|s| s.uncoalesced), case.sum(|s| count(&s.batch)));
        let in_order = Case::new(pair, tokens, Blocks::InOrder).sum(|s| count(&s.batch));
        let wire = |place| case.sum(|s| count(&staged(&s.batch, place).wire));
        let pools = Pools { source: POOL, destination: POOL };
        let model = CostModel::default();
        let choices: Vec<_> = case.shares.iter().map(|s| model.compare(&s.batch, pools)).collect();
        let direct: u64 = choices.iter().map(|c| c.direct.ns).sum();
        let best = |c: &kvferry_geometry::staged::Choice| {
            [c.destination, c.source].into_iter().flatten().map(|c| c.ns).min().unwrap_or(u64::MAX)
        };
        let best: u64 = choices.iter().map(best).sum();
        let took = micros(|| {
            for share in &case.shares {
                std::hint::black_box(model.compare(&share.batch, pools));
            }
        });
        println!(
            "{:<28} {:>6} {:>3} {:>6.1} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8.2} {:>8.2}  {:<24} {:>6.0}",
            pair.name,
            pair.layers,
            case.shares.len(),
            case.bytes() as f64 / f64::from(1 << 20),
            before,
            after,
            in_order,
            wire(Place::Destination),
            wire(Place::Source),
            direct as f64 / 1e6,
            best as f64 / 1e6,
            choices.first().map_or_else(String::new, |c| c.best.place.to_string()),
            took
        );
    }
}

fn buffer(len: u64) -> Region {
    HostBuffer::new(Bytes::new(len), BufferOptions { touch: true, huge_pages: false }).unwrap().region()
}

fn regions(m: &Manifest, rank: RankId) -> Vec<Region> {
    m.region_lens(rank).iter().map(|len| buffer(len.get())).collect()
}

/// No two pages alike.
fn fill(region: &Region, seed: u64) {
    let mut x = seed | 1;
    let page = 4096;
    for start in (0..region.len().get()).step_by(page) {
        let mut bytes = [0; 4096];
        for word in bytes.chunks_exact_mut(8) {
            x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            word.copy_from_slice(&x.to_le_bytes());
        }
        let len = usize::try_from(region.len().get() - start).unwrap().min(page);
        region.write(start, &bytes[..len]).unwrap();
    }
}

fn proven(batch: Batch, src: &[Region], dst: &[Region]) -> Arc<BoundedBatch> {
    let lens = |side: &[Region]| side.iter().map(Region::len).collect::<Vec<_>>();
    Arc::new(batch.check(&lens(src), &lens(dst)).unwrap())
}

fn copier(batch: Batch, src: &[Region], dst: &[Region]) -> Copier {
    let of = |side: &[Region], id: RegionId| side.get(id.index()).cloned();
    Copier::new(proven(batch, src, dst), |id| of(src, id), |id| of(dst, id)).unwrap()
}

fn permute(batch: Batch, src: &[Region], dst: &[Region]) -> Permute {
    let of = |side: &[Region], id: RegionId| side.get(id.index()).cloned();
    Permute::new(proven(batch, src, dst), |id| of(src, id), |id| of(dst, id)).unwrap()
}

/// All ways of one source's share, between touched memory.
struct Ways {
    direct: Copier,
    kernels: Permute,
    at_dst: (Copier, Permute),
    at_src: (Permute, Copier),
}

/// A case with its memory.
struct Bench {
    ways: Vec<Ways>,
    dst: Vec<Region>,
    plain: (Region, Region),
    bytes: u64,
}

impl Bench {
    fn new(case: &Case) -> Self {
        let dst = regions(case.c.dst(), RankId::ZERO);
        let mut ways = Vec::new();
        for share in &case.shares {
            let src = regions(case.c.src(), share.rank);
            src.iter().zip(1u64..).for_each(|(r, i)| fill(r, i + 100 * u64::from(share.rank.get())));
            let staging = [buffer(share.batch.bytes().get())];
            let (d, s) = (staged(&share.batch, Place::Destination), staged(&share.batch, Place::Source));
            ways.push(Ways {
                direct: copier(share.batch.clone(), &src, &dst),
                kernels: permute(share.batch.clone(), &src, &dst),
                at_dst: (copier(d.wire, &src, &staging), permute(d.local, &staging, &dst)),
                at_src: (permute(s.local, &src, &staging), copier(s.wire, &staging, &dst)),
            });
        }
        let bytes = case.bytes();
        let bench = Self { ways, dst, plain: (buffer(bytes), buffer(bytes)), bytes };
        bench.verify();
        bench
    }

    /// Every way writes the same bytes.
    fn verify(&self) {
        let all = || self.dst.iter().map(|r| r.to_vec().unwrap()).collect::<Vec<_>>();
        let clear = || self.dst.iter().for_each(|r| r.fill(0, r.len().get(), 0).unwrap());
        clear();
        self.direct(1);
        let expected = all();
        let ways: [fn(&Self); 3] = [
            |b| b.kernels(2),
            |b| {
                b.at_dst(2);
            },
            |b| {
                b.at_src(2);
            },
        ];
        for way in ways {
            clear();
            way(self);
            assert!(all() == expected);
        }
    }

    fn memcpy(&self, threads: usize) {
        let (src, dst) = (self.plain.0.address(), self.plain.1.address());
        let total = usize::try_from(self.bytes).unwrap();
        let part = total.div_ceil(threads);
        let copy = |i: usize| {
            let (start, end) = ((i * part).min(total), ((i + 1) * part).min(total));
            let from = std::ptr::with_exposed_provenance::<u8>(src + start);
            let to = std::ptr::with_exposed_provenance_mut::<u8>(dst + start);
            // SAFETY: both regions are `total` bytes and distinct.
            unsafe { std::ptr::copy_nonoverlapping(from, to, end - start) };
        };
        std::thread::scope(|scope| {
            for i in 1..threads {
                scope.spawn(move || copy(i));
            }
            copy(0);
        });
    }

    fn direct(&self, threads: usize) {
        for way in &self.ways {
            assert_eq!(way.direct.copy_with(threads).bytes.get(), way.direct.bytes());
        }
    }

    fn kernels(&self, threads: usize) {
        for way in &self.ways {
            assert_eq!(way.kernels.run(threads).bytes.get(), way.kernels.bytes());
        }
    }

    /// Returns the time of the wire step.
    fn at_dst(&self, threads: usize) -> Duration {
        let mut wire = Duration::ZERO;
        for Ways { at_dst: (first, second), .. } in &self.ways {
            let start = Instant::now();
            assert_eq!(first.copy_with(threads).bytes.get(), first.bytes());
            wire += start.elapsed();
            assert_eq!(second.run(threads).bytes.get(), second.bytes());
        }
        wire
    }

    /// Returns the time of the wire step.
    fn at_src(&self, threads: usize) -> Duration {
        let mut wire = Duration::ZERO;
        for Ways { at_src: (first, second), .. } in &self.ways {
            assert_eq!(first.run(threads).bytes.get(), first.bytes());
            let start = Instant::now();
            assert_eq!(second.copy_with(threads).bytes.get(), second.bytes());
            wire += start.elapsed();
        }
        wire
    }
}

/// How long something takes.
fn timed(once: impl FnOnce()) -> Duration {
    let start = Instant::now();
    once();
    start.elapsed()
}

fn speed_table(tokens: u32, rounds: usize, most: usize) {
    println!();
    println!(
        "the same requests on this machine's CPU; medians of {rounds} alternating rounds, GB/s of wall time; a ratio is to memcpy,"
    );
    println!(
        "by wall time and (in brackets) by CPU time of all threads, which other load on the machine disturbs less"
    );
    println!(
        "pair                         th  memcpy |  direct         ratio | kernels         ratio |    wire   local staged@D\
         \x20        ratio | staged@S         ratio"
    );
    for pair in &PAIRS {
        let bench = Bench::new(&Case::new(pair, tokens, Blocks::Scattered));
        for threads in 1..=most {
            let mut columns: [Column; 5] = Default::default();
            let mut wire = Vec::new();
            for _ in 0..=rounds {
                let [memcpy, direct, kernels, at_dst, at_src] = &mut columns;
                memcpy.measure(|| timed(|| bench.memcpy(threads)));
                direct.measure(|| timed(|| bench.direct(threads)));
                kernels.measure(|| timed(|| bench.kernels(threads)));
                at_dst.measure(|| timed(|| wire.push(bench.at_dst(threads))));
                at_src.measure(|| {
                    timed(|| {
                        bench.at_src(threads);
                    })
                });
            }
            let bytes = bench.bytes as f64 / 1e9;
            let [memcpy, direct, kernels, at_dst, at_src] = columns.map(Column::medians);
            let wire = median(wire.split_off(1));
            let ratio = |t: (f64, f64)| format!("{:.2} ({:.2})", memcpy.0 / t.0, memcpy.1 / t.1);
            println!(
                "{:<28} {threads:>2} {:>7.2} | {:>7.2} {:>13} | {:>7.2} {:>13} | {:>7.2} {:>7.2} {:>8.2} {:>13} | {:>8.2} {:>13}",
                pair.name,
                bytes / memcpy.0,
                bytes / direct.0,
                ratio(direct),
                bytes / kernels.0,
                ratio(kernels),
                bytes / wire,
                bytes / (at_dst.0 - wire).max(1e-9),
                bytes / at_dst.0,
                ratio(at_dst),
                bytes / at_src.0,
                ratio(at_src)
            );
        }
    }
}

fn main() {
    // Without `--bench` (as `cargo test` runs it) every way is done once and compared, and nothing is timed.
    if !std::env::args().any(|arg| arg == "--bench") {
        PAIRS.iter().for_each(|pair| drop(Bench::new(&Case::new(pair, 192, Blocks::Scattered))));
        return;
    }
    let tokens = u32::try_from(number("KVFERRY_BENCH_TOKENS", 4096)).unwrap();
    descriptor_table(tokens);
    speed_table(tokens, number("KVFERRY_BENCH_ROUNDS", 9), number("KVFERRY_BENCH_THREADS", 2));
}
