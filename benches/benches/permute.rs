//! Local permutations (the second half of a staged transfer) against plain `memcpy` of the same bytes, block by block, from
//! staging memory in order to the same scattered blocks, with the same number of threads, between memory that was touched
//! before; alternating in one process.
//!
//! Prints a table of medians and ratios first, then hands the same work to criterion.
//! `KVFERRY_BENCH_MIB` sets the bytes of an operation in MiB (default 128), `KVFERRY_BENCH_ROUNDS` the rounds of the table,
//! `KVFERRY_BENCH_THREADS` the most threads (default 2).
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use kvferry_benches::measure::{Column, number, shared_out};
use kvferry_geometry::batch::{Base, Batch, Dim, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_memory::{BufferOptions, HostBuffer, Permute};
use kvferry_transport::Region;
use kvferry_transport::conformance::sample::Rng;

/// Items of an operation.
const ITEMS: u64 = 8;

/// What one block (or state slot) becomes.
struct Shape {
    name: &'static str,
    /// Bytes of a source block.
    block: u64,
    /// Source blocks in a destination block, each with its place there.
    phases: u64,
    /// Bytes from one phase to the next in the destination block.
    phase_stride: u64,
    nest: Nest,
}

fn dim(count: u64, src_stride: u64, dst_stride: u64) -> Dim {
    Dim { count, src_stride, dst_stride }
}

fn shape(name: &'static str, dims: &[Dim], run: u64) -> Shape {
    let nest = Nest { dims: dims.iter().copied().collect(), run };
    Shape { name, block: nest.runs() * run, phases: 1, phase_stride: 0, nest }
}

/// 8 heads x 16 tokens of 256 bytes (K or V of 128 values in bf16), and the others that staging is for; as many as fit `total` bytes.
fn shapes(total: u64) -> Vec<Shape> {
    const ROW: u64 = 2 * 6144;
    let wide = |name, dims: &[Dim], run, phase_stride| Shape { phases: 4, phase_stride, ..shape(name, dims, run) };
    let all = vec![
        shape("same order", &[], 32 << 10),
        shape("NHD to HND", &[dim(8, 256, 4096), dim(16, 2048, 256)], 256),
        shape("HND to NHD", &[dim(16, 256, 2048), dim(8, 4096, 256)], 256),
        wide("HND 16 to 64", &[dim(8, 4096, 16384)], 4096, 4096),
        wide("NHD 16 to HND 64", &[dim(8, 256, 16384), dim(16, 2048, 256)], 256, 4096),
        shape("scales NHD to HND", &[dim(8, 4, 64), dim(16, 32, 4)], 4),
        shape("conv dim to state", &[dim(3, 2, ROW), dim(6144, 6, 2)], 2),
        shape("conv state to dim", &[dim(6144, 2, 6), dim(3, ROW, 2)], 2),
        shape("512 x 512 of 2 B", &[dim(512, 2, 1024), dim(512, 1024, 2)], 2),
    ];
    let room = total / ITEMS;
    all.into_iter().filter(|s| s.block * s.phases <= room).collect()
}

/// One operation over 8 items, and the same bytes as plain copies.
struct Work {
    permute: Permute,
    /// Source and destination offset of each block.
    plain: Vec<(u64, u64)>,
    block: usize,
    src: Region,
    dst: Region,
    bytes: u64,
}

impl Work {
    fn new(shape: &Shape, src: &Region, dst: &Region) -> Self {
        let item = src.len().get() / ITEMS;
        let whole = shape.block * shape.phases;
        let blocks = u32::try_from(item / whole).unwrap();
        let mut scattered: Vec<u32> = (0..blocks).collect();
        Rng::new(7).shuffle(&mut scattered);
        let phases = u32::try_from(shape.phases).unwrap();
        let part = |phase: u32| {
            let pair = |(at, &dst): (u32, &u32)| PairRun { src: at * phases + phase, dst, count: 1 };
            Part {
                src_add: 0,
                dst_add: u64::from(phase) * shape.phase_stride,
                src_block_stride: shape.block,
                dst_block_stride: whole,
                src_step: 1,
                dst_step: 1,
                nest: shape.nest.clone(),
                pairs: (0..blocks).zip(&scattered).map(pair).collect::<Vec<_>>().into(),
            }
        };
        let base = |i| Base {
            src_region: RegionId::new(0),
            dst_region: RegionId::new(0),
            src_offset: i * item,
            dst_offset: i * item,
        };
        let section = Section { bases: (0..ITEMS).map(base).collect(), parts: (0..phases).map(part).collect() };
        let mut plain = Vec::new();
        for base in section.bases.iter() {
            for (phase, part) in (0..).zip(&section.parts) {
                for pair in part.pairs.iter() {
                    let dst = u64::from(pair.dst) * whole + phase * shape.block;
                    plain.push((base.src_offset + u64::from(pair.src) * shape.block, base.dst_offset + dst));
                }
            }
        }
        let batch = Batch::new(vec![section]).check(&[src.len()], &[dst.len()]).unwrap();
        let bytes = batch.bytes().get();
        assert_eq!(bytes, plain.len() as u64 * shape.block);
        let permute = Permute::new(Arc::new(batch), |_| Some(src.clone()), |_| Some(dst.clone())).unwrap();
        let block = usize::try_from(shape.block).unwrap();
        Self { permute, plain, block, src: src.clone(), dst: dst.clone(), bytes }
    }

    /// The yardstick.
    fn memcpy(&self, threads: usize) -> Duration {
        let start = Instant::now();
        let (src, dst) = (self.src.as_ptr().expose_provenance(), self.dst.as_ptr().expose_provenance());
        let copy = |blocks: &[(u64, u64)]| {
            for &(s, d) in blocks {
                let from = std::ptr::with_exposed_provenance::<u8>(src + usize::try_from(s).unwrap());
                let to = std::ptr::with_exposed_provenance_mut::<u8>(dst + usize::try_from(d).unwrap());
                // SAFETY: all blocks lie inside the two regions, which are distinct.
                unsafe { std::ptr::copy_nonoverlapping(from, to, self.block) };
            }
        };
        shared_out(&self.plain, threads, copy);
        start.elapsed()
    }

    fn permute(&self, threads: usize) -> Duration {
        let start = Instant::now();
        assert_eq!(self.permute.run(threads).bytes, Bytes::new(self.bytes));
        start.elapsed()
    }
}

fn table(rounds: usize, most: usize, src: &Region, dst: &Region) {
    println!("{} MiB an operation; medians of {rounds} alternating rounds, GB/s of wall time", src.len().get() >> 20);
    println!("(cpu: the ratio by CPU time of all threads, which other load on the machine disturbs less)");
    println!("threads              shape   memcpy  permute  ratio    cpu");
    for threads in 1..=most {
        for shape in shapes(src.len().get()) {
            let work = Work::new(&shape, src, dst);
            let [mut memcpy, mut permute] = [Column::default(), Column::default()];
            for _ in 0..=rounds {
                memcpy.measure(|| work.memcpy(threads));
                permute.measure(|| work.permute(threads));
            }
            let (memcpy, permute) = (memcpy.rates(work.bytes), permute.rates(work.bytes));
            println!(
                "{threads:7} {:>18} {:8.2} {:8.2}  {:5.2}  {:5.2}",
                shape.name,
                memcpy.0,
                permute.0,
                permute.0 / memcpy.0,
                permute.1 / memcpy.1
            );
        }
    }
}

fn main() {
    let benched = std::env::args().any(|arg| arg == "--bench");
    let total = Bytes::new((number("KVFERRY_BENCH_MIB", if benched { 128 } else { 8 }) << 20) as u64);
    let options = BufferOptions { touch: true, huge_pages: false };
    let [src, dst] = [(); 2].map(|()| HostBuffer::new(total, options).unwrap().region());
    for region in [&src, &dst] {
        region.fill(0, total.get(), 1).unwrap();
    }
    let most = number("KVFERRY_BENCH_THREADS", 2);

    // Without `--bench` (as `cargo test` runs it) criterion does everything once, and there is no table.
    if benched {
        table(number("KVFERRY_BENCH_ROUNDS", 15), most, &src, &dst);
    }

    let mut criterion = Criterion::default().configure_from_args();
    for threads in 1..=most {
        let mut group = criterion.benchmark_group(format!("permute {threads} threads"));
        group.sample_size(10);
        for shape in shapes(src.len().get()) {
            let work = Work::new(&shape, &src, &dst);
            group.throughput(Throughput::Bytes(work.bytes));
            let mut bench = |what: &str, once: &mut dyn FnMut() -> Duration| {
                group.bench_function(BenchmarkId::new(what, shape.name), |b| {
                    b.iter_custom(|n| (0..n).map(|_| once()).sum());
                });
            };
            bench("memcpy", &mut || work.memcpy(threads));
            bench("permute", &mut || work.permute(threads));
        }
        group.finish();
    }
    criterion.final_summary();
}
