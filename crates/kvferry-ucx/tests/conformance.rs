//! The suite of the contract over the lanes that this machine has, with one rail and with two.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use kvferry_transport::conformance::{Harness, run};
use kvferry_transport::{Event, LaneKind, Region, Transport};
use kvferry_ucx::{Rail, UcxConfig, UcxTransport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

struct Ucx {
    start: Instant,
    config: UcxConfig,
    rounds: u64,
}

impl Harness for Ucx {
    fn endpoint(&mut self) -> Box<dyn Transport> {
        Box::new(UcxTransport::new(self.config.clone()).unwrap())
    }

    fn region(&mut self, len: usize) -> Region {
        Region::zeroed(len).unwrap()
    }

    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn kill(&mut self, victim: Box<dyn Transport>) {
        // The death of a whole process is in `processes.rs`.
        drop(victim);
    }

    fn readable(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        Some(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&zero)).unwrap() > 0)
    }

    fn rounds(&self) -> u64 {
        self.rounds
    }
}

fn suite(mut config: UcxConfig, rounds: u64, lane: LaneKind) {
    assert_eq!(lane_of(&config), lane);
    // Shares even of the suite's small batches.
    config.stripe = 4096;
    let report = run(&mut Ucx { start: Instant::now(), config, rounds });
    println!("{report}");
    assert!(report.holds_except(&[]), "{report}");
}

/// The lane between two endpoints, as they say.
fn lane_of(config: &UcxConfig) -> LaneKind {
    let mut near = UcxTransport::new(config.clone()).unwrap();
    let far = UcxTransport::new(config.clone()).unwrap();
    let peer = near.connect(&far.blob()).unwrap();
    let start = Instant::now();
    while !std::iter::from_fn(|| near.next_event()).any(|event| event == Event::Connected { peer }) {
        near.wait(Some(Duration::from_millis(1)));
        near.step(start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    let lane = near.peer(peer).unwrap().lane;
    println!("{:?} {}", lane.transports, lane.detail);
    lane.kind
}

fn over(transports: &[&str], rails: usize) -> UcxConfig {
    let mut config = UcxConfig::with_rails(rails);
    config.rails.fill(Rail::default().with_transports(transports.iter().copied()));
    config
}

#[test]
fn as_ucx_chooses_on_one_rail() {
    suite(UcxConfig::with_rails(1), 100, LaneKind::CrossProcess);
}

#[test]
fn as_ucx_chooses_on_two_rails() {
    suite(UcxConfig::with_rails(2), 40, LaneKind::CrossProcess);
}

#[test]
fn over_tcp() {
    suite(over(&["tcp"], 2), 20, LaneKind::Stream);
}

#[test]
fn over_shared_memory_alone() {
    suite(over(&["posix"], 1), 20, LaneKind::SharedMemory);
}
