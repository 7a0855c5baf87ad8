//! A transport slowed to a rate: a wrapper that is a transport.
//!
//! Operations are accepted at once and posted one after the other, each when the time that its bytes take at the rate
//! has passed; time is the `now` of [`Transport::step`] alone, so a virtual clock works. It limits what this endpoint
//! submits, not what others read from it.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvferry_geometry::units::RegionId;

use crate::error::{ConnectError, DeregisterError, RegisterError, RevokeError, SubmitError, UnknownOp, UnknownPeer};
use crate::gate::Gate;
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Capabilities, EndpointId, Event, OpId, PeerId, PeerInfo, RevokeScope, Submission};

/// A rate; zero means no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rate {
    /// Bytes in a second.
    pub bytes_per_second: u64,
    /// Operations in a second.
    pub ops_per_second: u64,
}

impl Rate {
    /// How long an operation of so many bytes takes.
    #[must_use]
    pub fn time_of(&self, bytes: u64) -> Duration {
        nanos(bytes, self.bytes_per_second) + nanos(1, self.ops_per_second)
    }
}

fn nanos(amount: u64, per_second: u64) -> Duration {
    let nanos = u128::from(amount) * 1_000_000_000 / u128::from(per_second.max(1));
    if per_second == 0 { Duration::ZERO } else { Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)) }
}

/// A transport slowed to a rate.
#[derive(Debug)]
pub struct Throttle<T> {
    gate: Gate<T>,
    rate: Rate,
    /// Held operations with the time each takes, in order.
    queue: VecDeque<(OpId, Duration)>,
    /// When the lane began to work on the front of the queue.
    began: Duration,
    /// Whether the queue was not empty at the end of the last step.
    waiting: bool,
}

impl<T: Transport> Throttle<T> {
    /// Slows a transport.
    #[must_use]
    pub fn new(inner: T, rate: Rate) -> Self {
        Self { gate: Gate::new(inner), rate, queue: VecDeque::new(), began: Duration::ZERO, waiting: false }
    }

    /// Posts what is due; gives the time of the next.
    fn post_due(&mut self, now: Duration) -> Option<Duration> {
        if !self.waiting {
            self.began = now;
        }
        while let Some(&(op, takes)) = self.queue.front() {
            if self.gate.is_open(op) {
                let due = self.began + takes;
                if due > now {
                    self.waiting = true;
                    return Some(due);
                }
                self.gate.post(op);
                self.began = due;
            }
            self.queue.pop_front();
        }
        self.waiting = false;
        None
    }
}

impl<T: Transport> Transport for Throttle<T> {
    fn capabilities(&self) -> &Capabilities {
        self.gate.inner.capabilities()
    }

    fn endpoint(&self) -> EndpointId {
        self.gate.inner.endpoint()
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.gate.register(region)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.gate.deregister(region)
    }

    fn blob(&self) -> Vec<u8> {
        self.gate.inner.blob()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        self.gate.inner.connect(blob)
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.gate.disconnect(peer)
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.gate.inner.peer(peer)
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let takes = self.rate.time_of(submission.batch.bytes().get());
        let op = self.gate.submit(submission)?;
        self.queue.push_back((op, takes));
        Ok(op)
    }

    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        self.gate.cancel(op).map(|_| ())
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        self.gate.inner.revoke(scope)
    }

    fn step(&mut self, now: Duration) -> Option<Duration> {
        let due = self.post_due(now);
        let inner = self.gate.inner.step(now);
        while let Some(event) = self.gate.next_inner() {
            match event {
                Event::Completed { op, outcome, .. } => self.gate.end(op, outcome),
                other => self.gate.push(other),
            }
        }
        match (due, inner) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn next_event(&mut self) -> Option<Event> {
        self.gate.next_event()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.gate.inner.wake_fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.gate.has_events() || self.gate.inner.wait(timeout)
    }
}
