//! The suite of the contract, once with memory that peers map, once with memory that the kernel copies, and as one of two backends.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::conformance::{Harness, Report, run};
use kvferry_transport::mem::MemNetwork;
use kvferry_transport::negotiate::Negotiated;
use kvferry_transport::{Region, Transport};
use support::Shm;

fn suite(threads: usize, region: fn(usize) -> Region) -> Report {
    let report = run(&mut Shm::new(threads, region));
    println!("{report}");
    report
}

/// Endpoints with two backends, in either order, and with this one alone.
struct Mixed {
    shm: Shm,
    network: MemNetwork,
    made: u32,
}

impl Harness for Mixed {
    fn endpoint(&mut self) -> Box<dyn Transport> {
        self.made += 1;
        let mut config = Config::default();
        if self.made.is_multiple_of(3) {
            return Box::new(Negotiated::new(vec![Box::new(ShmTransport::new(config).unwrap())]).unwrap());
        }
        let mem = self.network.endpoint().unwrap();
        config.endpoint = Some(mem.endpoint());
        let mut list: Vec<Box<dyn Transport>> = vec![Box::new(ShmTransport::new(config).unwrap()), Box::new(mem)];
        if self.made % 3 == 1 {
            list.reverse();
        }
        Box::new(Negotiated::new(list).unwrap())
    }

    fn region(&mut self, len: usize) -> Region {
        self.shm.region(len)
    }

    fn now(&mut self) -> Duration {
        self.shm.now()
    }

    fn kill(&mut self, victim: Box<dyn Transport>) {
        self.network.kill(victim.endpoint());
        drop(victim);
    }

    fn readable(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        self.shm.readable(fd)
    }

    fn rounds(&self) -> u64 {
        100
    }
}

#[test]
fn one_of_two_backends() {
    let shm = Shm::new(2, support::shared);
    let report = run(&mut Mixed { shm, network: MemNetwork::new(5), made: 0 });
    println!("{report}");
    assert!(report.holds_except(&["deregister-under-peer", "revoke", "revoke-endpoint"]), "{report}");
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
