//! The suite of the contract over NIXL, in one process.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use kvferry_transport::conformance::{Harness, run};
use kvferry_transport::{Region, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

struct Nixl {
    start: Instant,
}

impl Harness for Nixl {
    fn endpoint(&mut self) -> Box<dyn Transport> {
        Box::new(support::endpoint())
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
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        Some(poll(&mut fds, Some(&zero)).unwrap() > 0)
    }

    fn rounds(&self) -> u64 {
        50
    }
}

#[test]
fn every_clause_holds() {
    if !support::has_nixl() {
        return;
    }
    let report = run(&mut Nixl { start: Instant::now() });
    println!("{report}");
    assert!(report.holds_except(&[]), "{report}");
}
