//! The harness of the reference backend.

// Each test binary uses a part of this, and its helpers may fail as tests do.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "tests; each binary uses its part")]

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvferry_transport::conformance::Harness;
use kvferry_transport::mem::{MemFaults, MemNetwork, MemTransport};
use kvferry_transport::{Region, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

type Wrap = Box<dyn FnMut(MemTransport) -> Box<dyn Transport>>;

/// Endpoints of one network, disturbed and wrapped alike, on a virtual clock.
pub struct Mem {
    network: MemNetwork,
    faults: MemFaults,
    wrap: Wrap,
    now: Duration,
}

impl Mem {
    pub fn new(faults: MemFaults, wrap: impl FnMut(MemTransport) -> Box<dyn Transport> + 'static) -> Self {
        Self { network: MemNetwork::new(42), faults, wrap: Box::new(wrap), now: Duration::ZERO }
    }
}

impl Harness for Mem {
    fn endpoint(&mut self) -> Box<dyn Transport> {
        let endpoint = self.network.endpoint().unwrap();
        self.network.set_faults(endpoint.endpoint(), self.faults.clone());
        (self.wrap)(endpoint)
    }

    fn region(&mut self, len: usize) -> Region {
        Region::zeroed(len).unwrap()
    }

    fn now(&mut self) -> Duration {
        self.now += Duration::from_micros(500);
        self.now
    }

    fn kill(&mut self, victim: Box<dyn Transport>) {
        assert!(self.network.kill(victim.endpoint()));
    }

    fn readable(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        Some(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1)
    }

    fn rounds(&self) -> u64 {
        100
    }
}

/// No wrapper.
pub fn plain(t: MemTransport) -> Box<dyn Transport> {
    Box::new(t)
}
