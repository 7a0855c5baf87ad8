//! Runs worlds of a range of seeds; for a quick look.
#![allow(clippy::print_stdout, reason = "it is for looking")]

use kvferry_sim::{Mask, World, WorldConfig};

fn main() {
    let arg = |i: usize, d: u64| std::env::args().nth(i).and_then(|a| a.parse().ok()).unwrap_or(d);
    let (from, to, trace) = (arg(1, 0), arg(2, 1), arg(3, 0) > 0);
    let begin = std::time::Instant::now();
    let mut all = kvferry_sim::Stats::default();
    for seed in from..to {
        let config = WorldConfig { trace, ..WorldConfig::small(seed, Mask::default()) };
        match World::new(config).map(World::run) {
            Ok(outcome) => {
                for line in &outcome.trace {
                    println!("{line}");
                }
                if let Some(v) = outcome.violation {
                    println!("{seed}: {} {v}", v.name());
                }
                all.add(&outcome.stats);
            }
            Err(e) => println!("{e}"),
        }
    }
    println!("{all:#?} {:?}", begin.elapsed());
}
