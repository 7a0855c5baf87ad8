//! A rank's end of the data plane: its transport, what is in flight on it, and whether it must be stepped again.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RankId};
use kvferry_proto::names::EngineId;
use kvferry_transport::{ConnectError, Event, OpId, PeerId, Submission, SubmitError, Transport};

use super::orders::Order;

/// A slice in flight.
pub(super) struct Flight {
    pub(super) order: Order,
    /// The source or destination.
    pub(super) other: RankId,
    /// Its engine.
    pub(super) engine: EngineId,
    pub(super) bytes: Bytes,
}

pub(super) struct Endpoint {
    pub(super) transport: Box<dyn Transport>,
    /// Reads and writes in flight.
    pub(super) ops: BTreeMap<OpId, Flight>,
    /// Whether the transport's queue was full, and nothing has ended since.
    pub(super) full: bool,
    /// Whether it was called since its last step: what it was told it does in a step only.
    called: bool,
}

impl Endpoint {
    pub(super) fn new(transport: Box<dyn Transport>) -> Self {
        Self { transport, ops: BTreeMap::new(), full: false, called: false }
    }

    pub(super) fn step(&mut self, now: Duration) -> Option<Duration> {
        self.called = false;
        self.transport.step(now)
    }

    /// Whether it must be stepped again though nothing wakes it.
    pub(super) fn is_called(&self) -> bool {
        self.called
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.transport.next_event()
    }

    pub(super) fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        self.called = true;
        self.transport.connect(blob)
    }

    /// One that is gone already is as good.
    pub(super) fn disconnect(&mut self, peer: PeerId) {
        self.called = true;
        let _ = self.transport.disconnect(peer);
    }

    pub(super) fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let result = self.transport.submit(submission);
        // A refusal changes nothing: to step again at once would only be refused again.
        self.called |= result.is_ok();
        result
    }

    /// One that is not in flight any more has its event on the way.
    pub(super) fn cancel(&mut self, op: OpId) {
        self.called = true;
        let _ = self.transport.cancel(op);
    }
}
