//! Runs the small worlds of a range of seeds, on all cores, until an invariant doesn't hold: says in which, and exits with 1.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvferry_sim::World;

fn main() -> ExitCode {
    let arg = |i: usize, usual: u64| std::env::args().nth(i).and_then(|a| a.parse().ok()).unwrap_or(usual);
    let (from, to) = (arg(1, 0), arg(2, 200));
    // No seed after the first that fails is begun; those before it are run to their end, so it is the same every time.
    let (next, first) = (AtomicU64::new(from), AtomicU64::new(to));
    let found: Mutex<BTreeMap<u64, String>> = Mutex::default();
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first.load(Ordering::Relaxed) {
                return;
            }
            let text = match World::small(seed).map(World::run) {
                Ok(outcome) => outcome.violation.map(|v| format!("{}: {v}", v.name())),
                Err(error) => Some(format!("error: {error}")),
            };
            if let Some(text) = text {
                first.fetch_min(seed, Ordering::Relaxed);
                found.lock().unwrap_or_else(PoisonError::into_inner).insert(seed, text);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    match found.first_key_value() {
        Some((seed, text)) => {
            println!("seed {seed}: {text}");
            ExitCode::FAILURE
        }
        None => {
            println!("{} seeds, 0 violations", to.saturating_sub(from));
            ExitCode::SUCCESS
        }
    }
}
