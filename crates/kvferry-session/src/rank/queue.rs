//! A rank's slices on their way from the line to the transport.
//!
//! A source whose batch is known and whose lane is open stands in the line of [`admission`](super::admission) with its next slice;
//! it is posted when it is its turn, and then the source stands there with the one after it. A request of which nothing
//! was posted when its deadline comes fails without having read anything.

use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::rank::{PullId, RankFault, Stage};
use kvferry_transport::{OpKind, Submission, SubmitError};

use super::admission::{Admission, AdmissionRefused, Queue};
use super::endpoint::Flight;
use super::lanes::Gate;
use super::pull::SourceState;
use super::{RankSession, Standing};
use crate::pairing::Acquaintance;

impl RankSession {
    /// The same, reading in such slices and with no more in flight than this admits. Before anything is ordered.
    ///
    /// # Errors
    /// If nothing could ever be read so.
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
                    let text = format!("source rank {src}: {why}");
                    failed = Some(RankFault { stage: Stage::Connect, text, in_doubt: false, bad: Vec::new() });
                    break;
                }
            }
        }
        if let Some(fault) = failed {
            return self.fail(id, fault);
        }
        for src in open {
            if let Some(wanted) = pull.read(src, self.queue.limits().cut()) {
                self.queue.push((id, src), wanted);
            }
        }
        let next = pull.after_reads();
        self.go_on(id, next);
    }

    /// The same for all requests, if a lane was admitted.
    pub(super) fn enqueue_admitted(&mut self) {
        if !std::mem::take(&mut self.lanes.admitted) {
            return;
        }
        let queued: Vec<PullId> = self.pulls.iter().filter(|(_, p)| p.has_queued()).map(|(id, _)| *id).collect();
        for id in queued {
            self.enqueue(id);
        }
    }

    /// Nothing more is posted of a request.
    pub(super) fn dequeue(&mut self, id: PullId) {
        self.queue.remove_pull(id);
        if let Some(late) = self.pulls.get(&id).and_then(|p| p.deadline()) {
            self.unposted.remove(&(late, id));
        }
    }

    /// Posts slices in their order, as far as the limits and the transport let.
    pub(super) fn pump(&mut self) {
        while !self.end.full
            && let Some((id, src)) = self.queue.pick()
        {
            let pull = self.pulls.get_mut(&id);
            let Some((pull, (lane, batch))) = pull.and_then(|p| p.next_slice(src).map(|next| (p, next))) else {
                self.queue.remove((id, src));
                continue;
            };
            let bytes = batch.batch().bytes();
            match self.end.submit(Submission { peer: lane, kind: OpKind::Read, batch, notify: None }) {
                Ok(op) => {
                    if let Some(late) = pull.deadline() {
                        self.unposted.remove(&(late, id));
                    }
                    let engine = pull.engine().clone();
                    let next = pull.on_posted(src, op, self.now);
                    self.end.ops.insert(op, Flight { pull: id, src, engine, bytes });
                    self.queue.posted((id, src), next);
                }
                Err(SubmitError::QueueFull { .. }) if !self.end.ops.is_empty() || self.lanes.is_reading() => {
                    self.end.full = true;
                }
                Err(error) => {
                    let text = format!("source rank {src}: {error}");
                    self.fail(id, RankFault { stage: Stage::Submit, text, in_doubt: false, bad: Vec::new() });
                }
            }
        }
    }

    /// Notes when a request is late, if nothing of it was posted.
    pub(super) fn note_late(&mut self, id: PullId) {
        if let Some(late) = self.pulls.get(&id).and_then(|p| p.late_at()) {
            self.unposted.insert((late, id));
        }
    }

    /// When the next request is late.
    pub(super) fn late_at(&self) -> Option<Duration> {
        self.unposted.first().map(|(late, _)| *late)
    }

    /// Fails those that are late.
    pub(super) fn expire(&mut self) {
        while let Some(&(late, id)) = self.unposted.first()
            && late <= self.now
        {
            self.unposted.remove(&(late, id));
            let Some(pull) = self.pulls.get(&id).filter(|p| p.late_at().is_some()) else { continue };
            let (waited, in_flight) = (pull.waited(self.now), self.queue.in_flight());
            let text = format!(
                "waited {waited:?} in the queue and nothing of it was posted when its deadline came ({in_flight} of others are in \
                 flight)"
            );
            self.fail(id, RankFault { stage: Stage::Submit, text, in_doubt: false, bad: Vec::new() });
        }
    }

    /// Our engine's description has changed, as other ranks of it were restarted: what was computed from the old one is of no use.
    pub(super) fn forget_own(&mut self, new: &EngineManifest) {
        let same = matches!(&self.standing, Standing::Member(old) if old.cache().digest() == new.cache().digest());
        if !same {
            self.peers.values_mut().for_each(|known| known.acquaintance = Acquaintance::default());
        }
    }
}
