//! The suite on the reference backend, plain and disturbed, and on every wrapper.
// The helpers of tests may fail as tests do.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests and their helpers")]

mod common;

use std::time::Duration;

use kvferry_transport::conformance::run;
use kvferry_transport::fault::{Faulty, OpFault, Script};
use kvferry_transport::mem::MemFaults;
use kvferry_transport::observe::{Counters, Observed};
use kvferry_transport::throttle::{Rate, Throttle};

use common::{Mem, plain};

fn check(mut harness: Mem) {
    let report = run(&mut harness);
    println!("{report}");
    assert!(report.holds_except(&[]), "{report}");
}

fn ms(start: u64, end: u64) -> std::ops::Range<Duration> {
    Duration::from_millis(start)..Duration::from_millis(end)
}

#[test]
fn mem() {
    check(Mem::new(MemFaults::default(), plain));
}

#[test]
fn mem_in_slices() {
    check(Mem::new(MemFaults { slice: Some(1000), ..MemFaults::default() }, plain));
}

#[test]
fn mem_late_and_out_of_order() {
    let faults = MemFaults {
        start_delay: ms(0, 6),
        completion_delay: ms(0, 6),
        notify_delay: ms(0, 6),
        shuffle: true,
        ..MemFaults::default()
    };
    check(Mem::new(faults, plain));
}

#[test]
fn mem_with_doubled_completions() {
    let faults = MemFaults { duplicate_completion: (0..100_000).collect(), slice: Some(777), ..MemFaults::default() };
    check(Mem::new(faults, plain));
}

#[test]
fn observed() {
    let counters = Counters::new();
    let sink = counters.clone();
    check(Mem::new(MemFaults::default(), move |t| Box::new(Observed::new(t, sink.clone()))));
    let total = counters.total();
    assert!(total.done > 5000 && total.failed > 0 && total.refused > 0, "{total:?}");
    assert!(counters.notifications() > 5000 && counters.peers_lost() > 0);
}

#[test]
fn throttled() {
    let rate = Rate { bytes_per_second: 500_000_000, ops_per_second: 2_000_000 };
    check(Mem::new(MemFaults::default(), move |t| Box::new(Throttle::new(t, rate))));
}

#[test]
fn faulty_without_script() {
    check(Mem::new(MemFaults::default(), |t| Box::new(Faulty::new(t, Script::default()))));
}

#[test]
fn faulty_with_delays() {
    let fault = |k: u64| match k % 3 {
        0 => OpFault::Delay(Duration::from_millis(k % 7)),
        1 => OpFault::HoldCompletion(Duration::from_millis(k % 5)),
        _ => OpFault::Delay(Duration::ZERO),
    };
    let script = Script { submit: (0..1000).map(|k| (k, fault(k))).collect(), ..Script::default() };
    check(Mem::new(MemFaults::default(), move |t| Box::new(Faulty::new(t, script.clone()))));
}

#[test]
fn all_wrappers_at_once() {
    let sink = Counters::new();
    let rate = Rate { bytes_per_second: 1_000_000_000, ops_per_second: 0 };
    check(Mem::new(MemFaults { slice: Some(4096), ..MemFaults::default() }, move |t| {
        Box::new(Observed::new(Throttle::new(Faulty::new(t, Script::default()), rate), sink.clone()))
    }));
}
