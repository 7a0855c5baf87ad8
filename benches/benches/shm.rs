//! The same-host transport against plain `memcpy` of the same runs, in the same order, with the same number of threads,
//! between memory that was touched before; alternating in one process. Assurance is not part of it: bytes only.
//!
//! Prints a table of medians and ratios first, then hands the same work to criterion.
//! `KVFERRY_BENCH_MIB` sets the bytes of an operation in MiB (default 256), `KVFERRY_BENCH_ROUNDS` the rounds of the table.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use kvferry_benches::measure::{Column, number, shared_out};
use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::conformance::sample::Rng;
use kvferry_transport::{Event, MemoryKind, OpKind, Outcome, PeerId, Region, Submission, Transport};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Mapped for the whole benchmark.
fn memfd_region(len: usize) -> Region {
    let fd = rustix::fs::memfd_create("kvferry-bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at a place of the kernel's choice.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, flags, MapFlags::SHARED, &fd, 0) };
    let start = NonNull::new(start.unwrap().cast::<u8>()).unwrap();
    // SAFETY: the mapping is never undone, the file never shrinks, and no reference to its bytes is made.
    unsafe { Region::from_raw(start, len, MemoryKind::Host, Arc::new(())) }.with_share(Arc::new(fd), 0)
}

/// Block numbers in a random order.
fn shuffled(n: u32, seed: u64) -> Vec<u32> {
    let mut out: Vec<u32> = (0..n).collect();
    Rng::new(seed).shuffle(&mut out);
    out
}

/// One operation: every block of the source to another block of the destination.
struct Work {
    run: usize,
    pairs: Vec<(u32, u32)>,
    batch: Arc<BoundedBatch>,
}

impl Work {
    fn new(total: usize, run: usize) -> Self {
        let blocks = u32::try_from(total / run).unwrap();
        let pairs: Vec<_> = shuffled(blocks, 3).into_iter().zip(shuffled(blocks, 9)).collect();
        let zero = RegionId::new(0);
        let base = Base { src_region: zero, dst_region: zero, src_offset: 0, dst_offset: 0 };
        let part = Part {
            src_add: 0,
            dst_add: 0,
            src_block_stride: run as u64,
            dst_block_stride: run as u64,
            src_step: 1,
            dst_step: 1,
            nest: Nest::run(run as u64),
            pairs: pairs.iter().map(|&(src, dst)| PairRun { src, dst, count: 1 }).collect::<Vec<_>>().into(),
        };
        let lens = [Bytes::new(total as u64)];
        let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
        Self { run, pairs, batch: Arc::new(batch.check(&lens, &lens).unwrap()) }
    }

    /// The yardstick.
    fn memcpy(&self, src: &Region, dst: &Region, threads: usize) -> Duration {
        let start = Instant::now();
        let (src, dst) = (src.address(), dst.address());
        let copy = |pairs: &[(u32, u32)]| {
            for &(s, d) in pairs {
                let from = std::ptr::with_exposed_provenance::<u8>(src + s as usize * self.run);
                let to = std::ptr::with_exposed_provenance_mut::<u8>(dst + d as usize * self.run);
                // SAFETY: block numbers are below total / run, and both regions are `total` bytes and distinct.
                unsafe { std::ptr::copy_nonoverlapping(from, to, self.run) };
            }
        };
        shared_out(&self.pairs, threads, copy);
        start.elapsed()
    }
}

/// Two endpoints of one process; their memory is reached as another process's would be.
struct Lane {
    p: ShmTransport,
    d: ShmTransport,
    peer: PeerId,
    start: Instant,
}

impl Lane {
    fn new(src: &Region, dst: &Region, threads: usize) -> Self {
        let mut config = Config::default();
        config.threads = threads;
        let mut p = ShmTransport::new(config.clone()).unwrap();
        let mut d = ShmTransport::new(config).unwrap();
        p.register(src.clone()).unwrap();
        d.register(dst.clone()).unwrap();
        let peer = d.connect(&p.blob()).unwrap();
        Self { p, d, peer, start: Instant::now() }
    }

    /// From the submission to the event.
    fn read(&mut self, work: &Work) -> Duration {
        let submission = Submission { peer: self.peer, kind: OpKind::Read, batch: work.batch.clone(), notify: None };
        let start = Instant::now();
        let op = self.d.submit(submission).unwrap();
        loop {
            self.p.step(self.start.elapsed());
            self.d.step(self.start.elapsed());
            while let Some(event) = self.d.next_event() {
                if let Event::Completed { op: id, outcome, .. } = event
                    && id == op
                {
                    assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?}");
                    return start.elapsed();
                }
            }
            self.d.wait(Some(Duration::from_millis(1)));
        }
    }
}

const RUNS: [(usize, &str); 4] = [(4 << 10, "4 KiB"), (16 << 10, "16 KiB"), (64 << 10, "64 KiB"), (1 << 20, "1 MiB")];

fn table(total: usize, rounds: usize, src: &Region, dst: &Region, plain: &Region) {
    println!("{} MiB an operation, scattered; medians of {rounds} alternating rounds, GB/s of wall time", total >> 20);
    println!("(cpu: the ratio by CPU time of all threads, which other load on the machine disturbs less)");
    println!("threads      run   memcpy      shm  ratio    cpu | process_vm  ratio    cpu");
    for threads in [1, 2] {
        let (mut mapped, mut copied) = (Lane::new(src, dst, threads), Lane::new(plain, dst, threads));
        for (run, name) in RUNS {
            let work = Work::new(total, run);
            let [mut memcpy, mut shm, mut vm] = [Column::default(), Column::default(), Column::default()];
            for _ in 0..=rounds {
                memcpy.measure(|| work.memcpy(src, dst, threads));
                shm.measure(|| mapped.read(&work));
                vm.measure(|| copied.read(&work));
            }
            let [memcpy, shm, vm] = [memcpy, shm, vm].map(|column| column.rates(total as u64));
            println!(
                "{threads:7} {name:>8} {:8.2} {:8.2}  {:5.2}  {:5.2} | {:10.2}  {:5.2}  {:5.2}",
                memcpy.0,
                shm.0,
                shm.0 / memcpy.0,
                shm.1 / memcpy.1,
                vm.0,
                vm.0 / memcpy.0,
                vm.1 / memcpy.1
            );
        }
    }
}

fn main() {
    let benched = std::env::args().any(|arg| arg == "--bench");
    let total = number("KVFERRY_BENCH_MIB", if benched { 256 } else { 8 }) << 20;
    let rounds = number("KVFERRY_BENCH_ROUNDS", 15);
    let (src, dst, plain) = (memfd_region(total), memfd_region(total), Region::zeroed(total).unwrap());
    for region in [&src, &dst, &plain] {
        region.fill(0, total as u64, 1).unwrap();
    }

    // Without `--bench` (as `cargo test` runs it) criterion does everything once, and there is no table.
    if benched {
        table(total, rounds, &src, &dst, &plain);
    }

    let mut criterion = Criterion::default().configure_from_args();
    for threads in [1, 2] {
        let (mut mapped, mut copied) = (Lane::new(&src, &dst, threads), Lane::new(&plain, &dst, threads));
        let mut group = criterion.benchmark_group(format!("shm {threads} threads"));
        group.throughput(Throughput::Bytes(total as u64)).sample_size(10);
        for (run, name) in RUNS {
            let work = Work::new(total, run);
            let mut bench = |what: &str, once: &mut dyn FnMut() -> Duration| {
                group.bench_function(BenchmarkId::new(what, name), |b| {
                    b.iter_custom(|n| (0..n).map(|_| once()).sum());
                });
            };
            bench("memcpy", &mut || work.memcpy(&src, &dst, threads));
            bench("mapped", &mut || mapped.read(&work));
            bench("process_vm", &mut || copied.read(&work));
        }
        group.finish();
    }
    criterion.final_summary();
}
