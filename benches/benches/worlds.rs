//! How fast worlds of kvferry-sim run: real sessions on a virtual clock, one world after another on one thread.
//!
//! Rates are those of CPU time, which other work on the machine disturbs little. `KVFERRY_BENCH_SECONDS` is the CPU time of a row
//! (default 5).
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::time::Duration;

use kvferry_benches::measure::{number, quantile, thread_cpu};
use kvferry_sim::shrink::Kind;
use kvferry_sim::{Mask, Replay, Stats, World};

fn main() {
    let benched = std::env::args().any(|arg| arg == "--bench");
    let time = Duration::from_secs(number("KVFERRY_BENCH_SECONDS", if benched { 5 } else { 0 }) as u64);
    println!("worlds from seed 0 on, one thread; per second of CPU time\n");
    println!(
        "| worlds | run | requests a world | steps/s | messages/s | events/s | seconds of the worlds | CPU of a world p50 | p99 | violations |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (name, kind) in [("small, every byte compared", Kind::Small), ("large, without bytes", Kind::Large)] {
        row(name, kind, time);
    }
}

fn row(name: &str, kind: Kind, time: Duration) {
    let (mut stats, mut took, mut violations) = (Stats::default(), Vec::new(), 0);
    let began = thread_cpu();
    for seed in 0.. {
        let before = thread_cpu();
        let outcome = World::new(kind.config(&Replay { seed, mask: Mask::default() })).unwrap().run();
        took.push(thread_cpu().saturating_sub(before));
        stats.add(&outcome.stats);
        violations += u32::from(outcome.violation.is_some());
        if thread_cpu().saturating_sub(began) >= time {
            break;
        }
    }
    let seconds = thread_cpu().saturating_sub(began).as_secs_f64();
    took.sort();
    let requests = stats.outcomes.values().sum::<u64>() / took.len() as u64;
    let [steps, messages, events] = [stats.steps, stats.messages, stats.events].map(|n| n as f64 / seconds);
    println!(
        "| {name} | {} | {requests} | {steps:.0} | {messages:.0} | {events:.0} | {:.0} | {:.1} ms | {:.1} ms | {violations} |",
        took.len(),
        stats.time.as_secs_f64() / seconds,
        quantile(&took, 500) * 1e3,
        quantile(&took, 990) * 1e3,
    );
}
