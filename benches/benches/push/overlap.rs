//! From the end of a prefill to *delivered*, in real time, over kvferry-shm between two processes.

use std::time::Duration;

use kvferry::{Assurance, Engine, PullHandle, PullSpec, Reference, Tokens};
use kvferry_benches::engines::{BLOCK, wanted};
use kvferry_benches::measure::{median, number};
use kvferry_memory::available::available_memory;

use crate::producer::{Apart, Producer};
use crate::requests::{size, told};
use crate::side::{Cache, DESTINATION, Order, SOURCE, check, clear, ids, runs};
use crate::{KEY, benched, model, prompts, shared_clock};

pub(crate) async fn run() {
    println!(
        "from a prefill's last layer to delivered, kvferry-shm between two processes, one rank each, scattered blocks of 16, fenced;"
    );
    println!(
        "{}. Pull: offered when all is computed; sealed: granted before, said to be final at the end; streamed: layer by layer",
        model::told()
    );
    println!("(hidden: 1 - streamed / sealed; of 32 layers, the last can't be)\n");
    println!("| tokens | cache | prefill | pull | push, sealed | push, streamed | hidden | streamed/pull |");
    println!("|---|---|---|---|---|---|---|---|");
    for tokens in prompts() {
        let cache = Cache { layers: model::LAYERS, width: model::WIDTH, block: BLOCK, tokens };
        let need = cache.bytes(tokens) * 5 / 2;
        if available_memory().is_some_and(|have| have.get() < need) {
            println!("| {tokens} | {} | | not enough memory: {} are needed | | | | |", size(need * 2 / 5), size(need));
            continue;
        }
        row(cache).await;
    }
    println!();
}

async fn row(cache: Cache) {
    let tokens = cache.tokens;
    let blocks = cache.blocks();
    let (from, into) =
        (ids(Order::Scattered, blocks, blocks, SOURCE), ids(Order::Scattered, blocks, blocks, DESTINATION));
    let memory = cache.memory();
    let d = cache.engine("d", memory.clone()).start().await.unwrap();
    let mut p = Producer::apart(cache);
    let rounds = if benched() { number("KVFERRY_BENCH_ROUNDS", 5).max(2) } else { 2 };
    let mut times: [Vec<Duration>; 3] = Default::default();
    for round in 0..rounds {
        let (end, reference) = p.offer(Order::Scattered, blocks).await;
        let pulled = ended(d.pull(reference, wish(&into, tokens)).await.unwrap()).await - end;
        let Producer::Apart(apart) = &mut p else { return };
        let sealed = pushed(&d, apart, &into, tokens, false).await;
        if round + 1 == rounds {
            clear(&memory);
        }
        let streamed = pushed(&d, apart, &into, tokens, true).await;
        // The first round makes lanes and mappings.
        if round > 0 {
            for (all, took) in times.iter_mut().zip([pulled, sealed, streamed]) {
                all.push(Duration::from_nanos(took));
            }
        }
    }
    check(&runs(cache, cache, &from, &into), &memory);
    d.shutdown().await;
    let [pull, sealed, streamed] = times.map(median);
    println!(
        "| {tokens} | {} | {} | {} | {} | {} | {:.1} % | {:.2} |",
        size(cache.bytes(tokens)),
        told((model::layer(0, tokens) * model::LAYERS).as_secs_f64()),
        told(pull),
        told(sealed),
        told(streamed),
        (1.0 - streamed / sealed) * 100.0,
        streamed / pull,
    );
}

fn wish(into: &[u32], tokens: u64) -> PullSpec {
    let spec = PullSpec::new(Tokens::new(tokens), wanted(into), KEY);
    PullSpec { assurance: Assurance::Fenced, ..spec }
}

/// Nanoseconds from the end of the prefill to delivered.
async fn pushed(d: &Engine, p: &mut Apart, into: &[u32], tokens: u64, told: bool) -> u64 {
    let blocks = u32::try_from(tokens / BLOCK).unwrap();
    let reference: Reference = p.announce(blocks);
    let handle = d.pull(reference, wish(into, tokens).push()).await.unwrap();
    // The room is granted, as it is where a prefill takes longer than a message.
    while d.snapshot().await.unwrap().pulls[0].phase != "write" {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let end = tokio::spawn(ended(handle));
    let sealed = p.prefill(told);
    // Of one that tells of nothing, the answer is the time before the seal.
    end.await.unwrap() - sealed
}

async fn ended(handle: PullHandle) -> u64 {
    handle.await.unwrap();
    shared_clock()
}
