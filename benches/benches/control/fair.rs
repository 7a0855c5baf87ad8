//! Short requests beside a long one.

use std::time::{Duration, Instant};

use kvferry::{Address, ContentKey, Engine, EngineId, OfferSpec, PullSpec, Tokens};
use kvferry_benches::engines::{BLOCK, listed, shape, wanted};
use kvferry_benches::measure::{number, quantile};
use kvferry_geometry::units::Bytes;
use kvferry_memory::{BufferOptions, SharedBuffer};
use kvferry_shm::{Config, ShmTransport};

const KEY: ContentKey = ContentKey::from_bytes([7; 32]);
/// 1 MiB a block: 8 heads, 16 tokens, K and V of 4 KiB each.
const WIDTH: u64 = 4096;
const MIB_A_BLOCK: usize = 1;
const SHORT: usize = 16;

pub(super) async fn run() {
    let long = number("KVFERRY_BENCH_BESIDE_MIB", 4096);
    let blocks = u32::try_from((long + SHORT) / MIB_A_BLOCK).unwrap();
    let p = engine("p", blocks).listen(Address::loopback(0)).start().await.unwrap();
    let d = engine("d", blocks).start().await.unwrap();
    let all: Vec<u32> = (0..blocks).rev().collect();
    let (few, many) = all.split_at(SHORT / MIB_A_BLOCK);
    // Memory is touched, and the engines have met.
    once(&p, &d, &all).await;
    let mut alone = Vec::new();
    for _ in 0..200 {
        alone.push(once(&p, &d, few).await);
    }
    let (mut beside, mut long_alone, mut long_beside) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..3 {
        long_alone.push(once(&p, &d, many).await);
        let long = once(&p, &d, many);
        tokio::pin!(long);
        let took = loop {
            tokio::select! {
                took = &mut long => break took,
                short = once(&p, &d, few) => beside.push(short),
            }
        };
        long_beside.push(took);
        // The one that was given up with the long one has stopped when another can have its blocks.
        while d.quarantined().await.unwrap() > 0 || !d.snapshot().await.unwrap().pulls.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    println!("{SHORT} MiB requests beside one of {long} MiB, one rank a side, shared memory, 8 MiB slices\n");
    println!("| | count | p50 | p99 |\n|---|---|---|---|");
    row(&format!("{SHORT} MiB alone"), alone);
    row(&format!("{SHORT} MiB beside"), beside);
    row(&format!("{long} MiB alone"), long_alone);
    row(&format!("{long} MiB with the others"), long_beside);
    println!();
}

fn row(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |per_mille| quantile(&times, per_mille) * 1e3;
    println!("| {what} | {} | {:.2} ms | {:.2} ms |", times.len(), at(500), at(990));
}

async fn once(p: &Engine, d: &Engine, ids: &[u32]) -> Duration {
    let began = Instant::now();
    let reference = p.offer(OfferSpec::new(listed(ids), KEY)).await.unwrap();
    let spec = PullSpec::new(Tokens::new(ids.len() as u64 * BLOCK), wanted(ids), KEY);
    d.pull(reference, spec).await.unwrap().await.unwrap();
    began.elapsed()
}

fn engine(id: &str, blocks: u32) -> kvferry::EngineBuilder {
    let (spec, groups, ranks) = shape(1, WIDTH, 1, blocks);
    let mut builder = Engine::builder(EngineId::new(id).unwrap(), spec, groups);
    for manifest in ranks {
        let memory = manifest.layout.regions.iter().map(|r| {
            let len = Bytes::new(r.len.get());
            SharedBuffer::new("kvferry bench", len, BufferOptions::default()).unwrap().region()
        });
        let memory = memory.collect();
        builder = builder.rank(manifest, memory, Box::new(ShmTransport::new(Config::default()).unwrap()));
    }
    builder
}
