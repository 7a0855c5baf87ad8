//! A preflight over either way of this backend, to a peer in this process: the lane that is named, and figures that are sane.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::preflight::{Policy, ProbeOptions, Report, run};
use kvferry_transport::{LaneKind, Region, Transport};
use support::shared;

fn measured(region: Region) -> Report {
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let mut d = ShmTransport::new(Config::default()).unwrap();
    p.register(region).unwrap();
    let (peer, start, done) = (d.connect(&p.blob()).unwrap(), Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                p.step(start.elapsed());
                p.wait(Some(Duration::from_millis(5)));
            }
        });
        let (mut others, options) = (Vec::new(), ProbeOptions::quick());
        let report = run(&mut d, peer, shared(4 << 20), &mut || start.elapsed(), &options, &mut others);
        done.store(true, Ordering::Relaxed);
        report.unwrap()
    })
}

#[test]
fn each_lane_is_named_and_measured() {
    for (region, kind, other) in [
        (shared(8 << 20), LaneKind::SharedMemory, LaneKind::CrossProcess),
        (Region::zeroed(8 << 20).unwrap(), LaneKind::CrossProcess, LaneKind::SharedMemory),
    ] {
        let report = measured(region);
        println!("{report}");
        assert_eq!(report.lane.kind, kind);
        let by_name = |kind: LaneKind| Policy::new([kind.name()], Some(1_000_000)).unwrap().check(&report.lane);
        by_name(kind).unwrap();
        let refusal = by_name(other).unwrap_err().to_string();
        assert!(refusal.contains(&format!("requires {other}")) && refusal.contains("measured"), "{refusal}");
        let measured = report.measured();
        assert!(measured.per_operation < Duration::from_secs(1) && measured.bytes_per_second > 1e6, "{measured:?}");
    }
}
