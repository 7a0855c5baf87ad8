//! The suite of the contract, once with memory that peers map and once with memory that the kernel copies.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::conformance::{Harness, Report, run};
use kvferry_transport::{Region, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

struct Shm {
    start: Instant,
    threads: usize,
    region: fn(usize) -> Region,
}

impl Harness for Shm {
    fn endpoint(&mut self) -> Box<dyn Transport> {
        let mut config = Config::default();
        config.threads = self.threads;
        Box::new(ShmTransport::new(config).unwrap())
    }

    fn region(&mut self, len: usize) -> Region {
        (self.region)(len)
    }

    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn kill(&mut self, victim: Box<dyn Transport>) {
        // The death of a whole process is in `processes.rs`.
        drop(victim);
    }

    fn readable(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        Some(poll(&mut fds, Some(&zero)).unwrap() > 0)
    }

    fn rounds(&self) -> u64 {
        100
    }
}

fn suite(threads: usize, region: fn(usize) -> Region) -> Report {
    let report = run(&mut Shm { start: Instant::now(), threads, region });
    println!("{report}");
    report
}

#[test]
fn mapped_memory() {
    for threads in [1, 3] {
        let report = suite(threads, support::shared);
        assert!(report.holds_except(&["deregister-under-peer", "revoke", "revoke-endpoint"]), "{report}");
    }
}

#[test]
fn memory_copied_by_the_kernel() {
    for threads in [1, 3] {
        let report = suite(threads, |len| Region::zeroed(len).unwrap());
        assert!(report.holds_except(&["deregister-under-peer", "revoke", "revoke-endpoint"]), "{report}");
    }
}
