//! What is read from one source, or is one piece of what is written to one destination, slice by slice.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::{BoundedBatch, Slices};
use kvferry_geometry::units::Bytes;
use kvferry_transport::{OpId, Outcome, PeerId};

/// Slices over one lane: the next to be posted, those in flight, and how those that have ended did.
#[derive(Debug)]
pub(super) struct Reading {
    lane: PeerId,
    /// None when all are posted, or no more will be.
    next: Option<Arc<BoundedBatch>>,
    rest: Slices,
    ops: BTreeSet<OpId>,
    /// When the first was posted.
    since: Option<Duration>,
    descriptors: u64,
    worst: Worst,
    /// Whether those in flight were asked to stop.
    stopped: bool,
}

/// The worst end of an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Worst {
    Done,
    Failed,
    InDoubt,
}

impl Reading {
    pub(super) fn new(lane: PeerId, batch: &Arc<BoundedBatch>, slice: Bytes) -> Self {
        let mut rest = batch.slices(slice);
        let next = rest.next();
        let (ops, since) = (BTreeSet::new(), None);
        Self { lane, next, rest, ops, since, descriptors: 0, worst: Worst::Done, stopped: false }
    }

    pub(super) fn lane(&self) -> PeerId {
        self.lane
    }

    /// The slice to be posted next.
    pub(super) fn next(&self) -> Option<&Arc<BoundedBatch>> {
        self.next.as_ref()
    }

    /// Its bytes.
    pub(super) fn next_bytes(&self) -> Option<Bytes> {
        self.next.as_ref().map(|b| b.bytes())
    }

    /// When the first slice was posted.
    pub(super) fn since(&self) -> Option<Duration> {
        self.since
    }

    /// Descriptors of the slices that are done, as the transport counts them.
    pub(super) fn descriptors(&self) -> u64 {
        self.descriptors
    }

    pub(super) fn posted(&mut self, op: OpId, now: Duration) {
        self.ops.insert(op);
        self.since.get_or_insert(now);
        self.next = self.rest.next();
    }

    /// Whether this operation is one of those in flight.
    pub(super) fn holds(&self, op: OpId) -> bool {
        self.ops.contains(&op)
    }

    pub(super) fn on_completed(&mut self, op: OpId, outcome: &Outcome) {
        self.ops.remove(&op);
        let end = match outcome {
            Outcome::Done(stats) => {
                self.descriptors = self.descriptors.saturating_add(stats.descriptors);
                Worst::Done
            }
            Outcome::Failed(_) => Worst::Failed,
            Outcome::InDoubt(_) => Worst::InDoubt,
        };
        self.worst = self.worst.max(end);
    }

    /// No more is posted. Gives what is to be cancelled, once.
    pub(super) fn stop(&mut self) -> Vec<OpId> {
        self.next = None;
        if std::mem::replace(&mut self.stopped, true) { Vec::new() } else { self.ops.iter().copied().collect() }
    }

    /// Whether nothing is in flight, and nothing will be.
    pub(super) fn is_over(&self) -> bool {
        self.next.is_none() && self.ops.is_empty()
    }

    /// Whether what it writes may still be written when all has ended.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.worst == Worst::InDoubt
    }
}
