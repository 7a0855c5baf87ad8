//! One request at a time, pulled and pushed by turns.

use std::time::{Duration, Instant};

use kvferry::{Assurance, Engine, PullSpec, Region, Tokens};
use kvferry_benches::engines::{BLOCK, wanted};
use kvferry_benches::measure::{cpu, median, quantile, shared_out};
use kvferry_geometry::batch::Descriptor;

use crate::producer::Producer;
use crate::side::{Cache, DESTINATION, Order, check, clear, ids, runs};
use crate::{KEY, benched, seconds};

const LAYERS: u32 = 4;
/// A turn takes about so long, but is one request at least.
const TURN: Duration = Duration::from_millis(30);
/// From here on bytes a second are told.
const LARGE: u64 = 1 << 20;

#[derive(Clone, Copy)]
struct Case {
    blocks: u32,
    order: Order,
    /// Tokens of a block of the consumer.
    to: u64,
}

pub(crate) async fn run() {
    let most: u32 = if benched() { 1024 } else { 64 };
    println!(
        "requests one at a time over kvferry-shm, {LAYERS} layers, one rank an engine, fenced; pull and push by turns; from the call to \
         delivered.\nCPU of both engines from the offer on; memcpy: the same runs with as many threads as kvferry-shm has\n"
    );
    println!(
        "| engines | blocks | moved | runs | pull p50 | p99 | push p50 | p99 | push/pull | CPU pull | CPU push | memcpy | CPU memcpy | pull GB/s | push GB/s | memcpy GB/s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for apart in [false, true] {
        for width in [16, 256] {
            let tokens = u64::from(most) * BLOCK;
            let src = Cache { layers: LAYERS, width, block: BLOCK, tokens };
            let mut p = if apart { Producer::apart(src) } else { Producer::here(src).await };
            for to in [BLOCK, 4 * BLOCK] {
                let dst = Cache { block: to, ..src };
                let memory = dst.memory();
                let d = dst.engine("d", memory.clone()).start().await.unwrap();
                let mut bench = Bench { src, dst, memory, yardstick: src.memory(), d };
                for case in cases(most).into_iter().filter(|case| case.to == to) {
                    bench.row(&mut p, apart, case).await;
                }
                bench.d.shutdown().await;
            }
        }
    }
    println!();
}

fn cases(most: u32) -> Vec<Case> {
    let mut cases = vec![Case { blocks: 1, order: Order::InARow, to: BLOCK }];
    for blocks in [64, 1024].into_iter().filter(|n| *n <= most) {
        for (order, to) in [(Order::InARow, BLOCK), (Order::Scattered, BLOCK), (Order::Scattered, 4 * BLOCK)] {
            cases.push(Case { blocks, order, to });
        }
    }
    cases
}

struct Bench {
    src: Cache,
    dst: Cache,
    memory: Vec<Region>,
    /// What `memcpy` copies from.
    yardstick: Vec<Region>,
    d: Engine,
}

/// Latencies, and CPU a request by turn.
#[derive(Default)]
struct Way {
    took: Vec<Duration>,
    cpu: Vec<Duration>,
}

impl Bench {
    async fn row(&mut self, p: &mut Producer, apart: bool, case: Case) {
        let Case { blocks, order, to } = case;
        let from = ids(order, blocks, self.src.blocks(), crate::side::SOURCE);
        let count = u32::try_from((u64::from(blocks) * BLOCK).div_ceil(to)).unwrap();
        let into = ids(order, count, self.dst.blocks(), DESTINATION);
        let runs = runs(self.src, self.dst, &from, &into);
        let bytes = self.src.bytes(u64::from(blocks) * BLOCK);
        for push in [false, true] {
            clear(&self.memory);
            self.once(p, case, &into, push).await;
            check(&runs, &self.memory);
        }
        let warm = self.once(p, case, &into, true).await.max(Duration::from_micros(1));
        let turn = (TURN.as_nanos() / warm.as_nanos()).clamp(1, 1000);
        let mut ways: [Way; 2] = Default::default();
        let mut copies = Way::default();
        let began = Instant::now();
        loop {
            for (push, way) in [(false, 0), (true, 1)] {
                let before = cpu() + p.cpu();
                for _ in 0..turn {
                    let took = self.once(p, case, &into, push).await;
                    ways[way].took.push(took);
                }
                let spent = (cpu() + p.cpu()).saturating_sub(before);
                ways[way].cpu.push(spent / u32::try_from(turn).unwrap());
            }
            for _ in 0..turn.min(20) {
                let before = cpu();
                copies.took.push(tokio::task::block_in_place(|| self.memcpy(&runs, bytes)));
                copies.cpu.push(cpu().saturating_sub(before));
            }
            if began.elapsed().as_secs_f64() >= seconds() {
                break;
            }
        }
        let [pull, push] = ways.map(|mut way| {
            way.took.sort();
            (quantile(&way.took, 500), quantile(&way.took, 990), median(way.cpu))
        });
        let (copy, copy_cpu) = (median(copies.took), median(copies.cpu));
        let engines = if apart { "two processes" } else { "one process" };
        let how = match (order, to == BLOCK) {
            (_, false) => format!("{blocks}, scattered, into blocks of {to}"),
            (Order::InARow, _) => format!("{blocks}, in a row"),
            (Order::Scattered, _) => format!("{blocks}, scattered"),
        };
        let rate = |time: f64| if bytes < LARGE { "-".into() } else { format!("{:.2}", bytes as f64 / time / 1e9) };
        println!(
            "| {engines} | {how} | {} | {} | {} | {} | {} | {} | {:.2} | {} | {} | {} | {} | {} | {} | {} |",
            size(bytes),
            runs.len(),
            told(pull.0),
            told(pull.1),
            told(push.0),
            told(push.1),
            push.0 / pull.0,
            told(pull.2),
            told(push.2),
            told(copy),
            told(copy_cpu),
            rate(pull.0),
            rate(push.0),
            rate(copy)
        );
    }

    async fn once(&self, p: &mut Producer, case: Case, into: &[u32], push: bool) -> Duration {
        let (_, reference) = p.offer(case.order, case.blocks).await;
        let tokens = Tokens::new(u64::from(case.blocks) * BLOCK);
        let spec = PullSpec { assurance: Assurance::Fenced, ..PullSpec::new(tokens, wanted(into), KEY) };
        let spec = if push { spec.push() } else { spec };
        let began = Instant::now();
        self.d.pull(reference, spec).await.unwrap().await.unwrap();
        began.elapsed()
    }

    fn memcpy(&self, runs: &[Descriptor], bytes: u64) -> Duration {
        // Who makes a thread for little waits for the thread.
        let threads = if bytes < 4 * LARGE { 1 } else { kvferry_shm::Config::default().threads };
        let (src, dst) = (&self.yardstick, &self.memory);
        let began = Instant::now();
        shared_out(runs, threads.min(runs.len()), |some| {
            for run in some {
                let len = usize::try_from(run.len).unwrap();
                let from = src[run.src_region.index()].host_range(run.src_offset, len).unwrap();
                let to = dst[run.dst_region.index()].host_range(run.dst_offset, len).unwrap();
                // SAFETY: both ranges were just checked, they are of different memory, and nothing else touches either now: no
                // request is under way.
                unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
            }
        });
        began.elapsed()
    }
}

pub(crate) fn told(seconds: f64) -> String {
    if seconds < 1e-3 { format!("{:.0} us", seconds * 1e6) } else { format!("{:.2} ms", seconds * 1e3) }
}

pub(crate) fn size(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}
