//! Many transfers, registrations and connections, and a run above 1 GiB; one test, so that nothing else runs in its process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::time::Duration;

use kvferry_transport::conformance::stress::{
    connections_on_threads, notification_gap, registration_rounds, slowdown, small_transfers,
};
use kvferry_transport::conformance::{CLAUSES, Harness, Verdict};
use support::{Shm, shared};

#[test]
fn nothing_grows_slows_down_or_is_lost() {
    let mut h = Shm::new(2, shared);
    let [early, end] = small_transfers(&mut h, 20_000).unwrap();
    println!("20,000 small transfers: {early:?}, {end:?}");
    end.flat_since(&early, 8, 32 << 20).unwrap();

    let rounds = registration_rounds(&mut *h.endpoint(), &shared(1 << 20), 500, 60).unwrap();
    println!("the last of 60 rounds takes {:.2} of an early one", slowdown(&rounds));

    let gap = notification_gap(&mut h, 250, 1 << 20).unwrap();
    println!("250 MiB in 250 runs: told {gap:?} after it was done");
    assert!(gap < Duration::from_secs(1), "{gap:?}");

    connections_on_threads(&mut h, 8, 25).unwrap();
    one_run_above_a_gibibyte(&mut h);
}

fn one_run_above_a_gibibyte(h: &mut Shm) {
    h.large = (1 << 30) + 4096;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let free: usize = line.trim().trim_end_matches(" kB").parse().unwrap();
    if free / 1024 < 4 * (h.large >> 20) {
        kvferry_tests::skip("memory", &format!("{} MiB are free, 4 GiB are needed", free / 1024));
        return;
    }
    let (_, large) = CLAUSES.iter().find(|(name, _)| *name == "large").unwrap();
    assert_eq!(large(h), Ok(Verdict::Passed));
}
