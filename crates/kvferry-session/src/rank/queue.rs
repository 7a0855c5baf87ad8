//! A rank's slices on their way from the line to the transport.
//!
//! A source or destination whose batch is known and whose lane is open stands in the line of [`admission`](super::admission) with
//! its next slice; it is posted when it is its turn, and then it stands there with the one after it. A pull of which nothing
//! was posted when its deadline comes fails without having read anything; a push of which something is left when its grant ends
//! fails then.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::rank::{PullId, RankFault, Stage};
use kvferry_transport::{OpId, PeerId, Submission, SubmitError};

use super::admission::{Admission, AdmissionRefused, Queue};
use super::endpoint::Flight;
use super::lanes::Gate;
use super::orders::{Order, fault};
use super::pull::SourceState;
use super::push::Push;
use super::{RankSession, Standing};

impl RankSession {
    /// The same, reading and writing in such slices and with no more in flight than this admits. Before anything is ordered.
    ///
    /// # Errors
    /// If nothing could ever be read or written so.
    pub fn with_admission(mut self, admission: Admission) -> Result<Self, AdmissionRefused> {
        admission.check()?;
        self.queue = Queue::new(admission);
        Ok(self)
    }

    /// Puts those sources of a request into the line that know what they read and have their lane.
    pub(super) fn enqueue(&mut self, id: PullId) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let mut failed = None;
        let mut open: Vec<RankId> = Vec::new();
        for (&src, source) in &pull.sources {
            let SourceState::Queued(lane, _) = source.state else { continue };
            match self.lanes.gate(lane) {
                Gate::Open => open.push(src),
                Gate::Wait => {}
                Gate::Refused(why) => {
                    failed = Some(Order::Pull(id).other(src).fault(Stage::Connect, why));
                    break;
                }
            }
        }
        if let Some(fault) = failed {
            return self.fail(id, fault);
        }
        for src in open {
            if let Some(wanted) = pull.read(src, self.queue.limits().cut()) {
                self.queue.push((Order::Pull(id), src), wanted);
            }
        }
        let next = pull.after_reads();
        self.go_on(id, next);
    }

    /// The same for all orders, if a lane was admitted.
    pub(super) fn enqueue_admitted(&mut self) {
        if !std::mem::take(&mut self.lanes.admitted) {
            return;
        }
        let queued: Vec<PullId> = self.pulls.iter().filter(|(_, p)| p.has_queued()).map(|(id, _)| *id).collect();
        for id in queued {
            self.enqueue(id);
        }
        self.enqueue_pushes();
    }

    /// Nothing more is posted of an order.
    pub(super) fn dequeue(&mut self, order: Order) {
        self.queue.remove_order(order);
        self.is_in_time(order);
    }

    /// An order is not late any more, whenever it would have been.
    fn is_in_time(&mut self, order: Order) {
        let late = match order {
            Order::Pull(id) => self.pulls.get(&id).and_then(|p| p.deadline()),
            Order::Push(id) => self.pushes.get(id).map(Push::deadline),
        };
        if let Some(late) = late {
            self.unposted.remove(&(late, order));
        }
    }

    /// Posts slices in their order, as far as the limits and the transport let.
    pub(super) fn pump(&mut self) {
        while !self.end.full
            && let Some((order, other)) = self.queue.pick()
        {
            let Some((lane, batch)) = self.next_slice(order, other) else {
                self.queue.remove((order, other));
                continue;
            };
            if let Some(fault) = self.too_late(order) {
                self.fail_order(order, fault);
                continue;
            }
            let bytes = batch.bytes();
            match self.end.submit(Submission { peer: lane, kind: order.kind(), batch, notify: None }) {
                Ok(op) => self.on_posted(order, other, op, bytes),
                Err(SubmitError::QueueFull { .. }) if !self.end.ops.is_empty() || self.lanes.is_reading() => {
                    self.end.full = true;
                }
                Err(error) => self.fail_order(order, order.other(other).fault(Stage::Submit, error)),
            }
        }
    }

    fn next_slice(&self, order: Order, other: RankId) -> Option<(PeerId, Arc<BoundedBatch>)> {
        match order {
            Order::Pull(id) => self.pulls.get(&id)?.next_slice(other),
            Order::Push(id) => self.pushes.get(id)?.next_slice(other),
        }
    }

    /// Why nothing may be written any more, if that is so. A read that has begun goes on: it is the owner who gives it up.
    fn too_late(&self, order: Order) -> Option<RankFault> {
        match order {
            Order::Pull(_) => None,
            Order::Push(id) => self.pushes.get(id)?.too_late(self.now),
        }
    }

    fn on_posted(&mut self, order: Order, other: RankId, op: OpId, bytes: Bytes) {
        let (engine, next) = match order {
            Order::Pull(id) => {
                self.is_in_time(order);
                let Some(pull) = self.pulls.get_mut(&id) else { return };
                (pull.engine().clone(), pull.on_posted(other, op, self.now))
            }
            Order::Push(id) => {
                let Some(push) = self.pushes.get_mut(id) else { return };
                (push.engine().clone(), push.on_posted(other, op, self.now))
            }
        };
        self.end.ops.insert(op, Flight { order, other, engine, bytes });
        self.queue.posted((order, other), next);
        if let (Order::Push(id), None) = (order, next) {
            // What has become final meanwhile is next.
            self.advance(id);
        }
    }

    /// Notes when a pull is late, if nothing of it was posted.
    pub(super) fn note_late(&mut self, id: PullId) {
        if let Some(late) = self.pulls.get(&id).and_then(|p| p.late_at()) {
            self.unposted.insert((late, Order::Pull(id)));
        }
    }

    /// When the next order is late.
    pub(super) fn late_at(&self) -> Option<Duration> {
        self.unposted.first().map(|(late, _)| *late)
    }

    /// Fails those that are late.
    pub(super) fn expire(&mut self) {
        while let Some(&(late, order)) = self.unposted.first()
            && late <= self.now
        {
            self.unposted.remove(&(late, order));
            let fault = match order {
                Order::Pull(id) => self.late_in_queue(id),
                Order::Push(id) => {
                    let push = self.pushes.get(id).filter(|p| p.late_at().is_some());
                    push.and_then(|p| p.too_late(self.now))
                }
            };
            if let Some(fault) = fault {
                self.fail_order(order, fault);
            }
        }
    }

    fn late_in_queue(&self, id: PullId) -> Option<RankFault> {
        let pull = self.pulls.get(&id).filter(|p| p.late_at().is_some())?;
        let (waited, in_flight) = (pull.waited(self.now), self.queue.in_flight());
        let text = format!(
            "waited {waited:?} in the queue and nothing of it was posted when its deadline came ({in_flight} of others are in \
             flight)"
        );
        Some(fault(Stage::Submit, text))
    }

    /// Our engine's description has changed, as other ranks of it were restarted: what was computed from the old one is of no use.
    pub(super) fn forget_own(&mut self, new: &EngineManifest) {
        let same = matches!(&self.standing, Standing::Member(old) if old.cache().digest() == new.cache().digest());
        if !same {
            self.acquaintances.clear();
        }
    }
}
