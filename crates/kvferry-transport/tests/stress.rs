//! Many transfers, registrations and connections on the reference backend; one test, so that nothing else runs in its process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;

use std::time::Duration;

use kvferry_transport::Region;
use kvferry_transport::conformance::Harness;
use kvferry_transport::conformance::stress::{
    connections_on_threads, notification_gap, registration_rounds, slowdown, small_transfers,
};
use kvferry_transport::mem::MemFaults;

use common::{Mem, plain};

#[test]
fn nothing_grows_slows_down_or_is_lost() {
    let mut h = Mem::new(MemFaults::default(), plain);
    let [early, end] = small_transfers(&mut h, 100_000).unwrap();
    println!("100,000 small transfers: {early:?}, {end:?}");
    end.flat_since(&early, 8, 32 << 20).unwrap();

    let rounds = registration_rounds(&mut *h.endpoint(), &Region::zeroed(1 << 20).unwrap(), 2000, 60).unwrap();
    println!("the last of 60 rounds takes {:.2} of an early one", slowdown(&rounds));

    let gap = notification_gap(&mut h, 250, 64 << 10).unwrap();
    println!("told {gap:?} after it was done");
    assert!(gap < Duration::from_secs(1), "{gap:?}");

    connections_on_threads(&mut h, 8, 200).unwrap();
}
