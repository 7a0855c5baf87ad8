//! Push beside pull, and what of a transfer is hidden behind the prefill that computes it.
//!
//! | part | what is measured |
//! |---|---|
//! | `requests` | one request at a time over kvferry-shm, pulled and pushed by turns, in one process and between two: 1, 64 and 1,024 blocks that lie in a row or scattered, and blocks of another size at the consumer; from the consumer's call to *delivered*, CPU of both engines, and a plain `memcpy` of the same runs |
//! | `rates` | many small requests at a time in one process, with a transport that is done at once: what everything but the moving of bytes costs |
//! | `overlap` | time from the end of a prefill to *delivered* over kvferry-shm between two processes, in real time: pulled, pushed when all is sealed, pushed layer by layer. The prefill is waited for by the compute model of [`model`] |
//! | `wire` | the same on a virtual clock, with real sessions and wires of stated rates: it comes out the same each time |
//!
//! `KVFERRY_BENCH_ONLY=requests,rates` chooses; `KVFERRY_BENCH_SECONDS` is the time of a row of `requests` and of a turn of `rates` (default 1),
//! `KVFERRY_BENCH_TOKENS=1024,8192` the prompts of `overlap` and `wire`, `KVFERRY_BENCH_ROUNDS` the rounds of `overlap`, the first of
//! which doesn't count (default 5). Every byte that `requests` and `overlap` move is compared once for each way and row.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use kvferry::ContentKey;
use kvferry_benches::measure::number;

mod model;
mod overlap;
mod producer;
mod rates;
mod requests;
mod side;
mod wire;

pub(crate) const KEY: ContentKey = ContentKey::from_bytes([7; 32]);

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if std::env::var_os(producer::CACHE).is_some() {
        return runtime.block_on(producer::serve());
    }
    let only = std::env::var("KVFERRY_BENCH_ONLY").unwrap_or_default();
    let wanted = |part: &str| only.is_empty() || only.split(',').any(|o| o == part);
    // On a worker: what another thread begins has to be handed over.
    runtime.block_on(async {
        if wanted("requests") {
            tokio::spawn(requests::run()).await.unwrap();
        }
        if wanted("rates") {
            tokio::spawn(rates::run()).await.unwrap();
        }
        if wanted("overlap") {
            tokio::spawn(overlap::run()).await.unwrap();
        }
    });
    if wanted("wire") {
        wire::run();
    }
}

/// Whether this is `cargo bench`, and not `cargo test`, for which everything is done as little as can be.
pub(crate) fn benched() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// How long a row may take.
pub(crate) fn seconds() -> f64 {
    if benched() { number("KVFERRY_BENCH_SECONDS", 1) as f64 } else { 0.0 }
}

/// Prompts, in tokens.
pub(crate) fn prompts() -> Vec<u64> {
    let text = std::env::var("KVFERRY_BENCH_TOKENS");
    let text = text.unwrap_or(if benched() { "1024,8192,32768" } else { "1024" }.into());
    text.split(',').map(|n| n.parse().unwrap()).collect()
}

/// Nanoseconds of a clock that all processes share.
pub(crate) fn shared_clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap()
}
