//! A consumer's heartbeats.

use std::time::Duration;

use kvferry_proto::peer::{Heartbeat, HeartbeatAnswer, Left};
use kvferry_proto::rank::PullId;

use super::{At, Phase};
use crate::fault::Fault;
use crate::network::{LinkId, Message};
use crate::producer::{Lease, Then};
use crate::rules::Rule;
use crate::world::Network;

/// Heartbeats of a link whose answers are awaited, at most.
const MAX_AWAITED: usize = 4;

impl At<'_> {
    pub(super) fn beat_for(&mut self, link: LinkId) {
        let due = self.s.now + Duration::from_secs(self.w.terms.beat);
        if let Some(c) = self.c() {
            c.beats_due.entry(link).or_insert(due);
        }
    }

    pub(super) fn beats_end(&mut self, link: LinkId) {
        if let Some(c) = self.c() {
            c.beats_due.remove(&link);
            c.awaited.remove(&link);
        }
    }

    pub(super) fn beat(&mut self, link: LinkId) {
        let (now, beat) = (self.s.now, Duration::from_secs(self.w.terms.beat));
        let Some(c) = self.c() else { return };
        let pulls = c.ending_leases(link, now);
        c.beats_due.remove(&link);
        if pulls.is_empty() {
            c.awaited.remove(&link);
            return;
        }
        c.last_beat += 1;
        let number = c.last_beat;
        let awaited = c.awaited.entry(link).or_default();
        awaited.insert(number, (now, pulls.clone()));
        while awaited.len() > MAX_AWAITED {
            awaited.pop_first();
        }
        let leases = pulls.iter().filter_map(|id| c.pulls.get(id)).map(|p| (p.fence.lease, p.attempt)).collect();
        c.beats_due.insert(link, now + beat);
        self.send(link, Message::Heartbeat(Heartbeat { beat: number, leases }));
    }

    pub(crate) fn on_heartbeat_answer(&mut self, link: LinkId, answer: HeartbeatAnswer) {
        let now = self.s.now;
        let Some(c) = self.c() else { return };
        let awaited = c.awaited.get_mut(&link).and_then(|awaited| awaited.remove(&answer.beat));
        let Some((sent, pulls)) = awaited else { return };
        let sent = if self.w.is(Fault::CountFromAnswer) { now } else { sent };
        for (id, left) in pulls.into_iter().zip(answer.left) {
            let end = match left {
                Left::Closed => {
                    self.note_closed(id);
                    self.stop_reading(id);
                    continue;
                }
                Left::For(time) => Some(sent + time),
                Left::Always => None,
            };
            if let Some(pull) = self.pull(id) {
                pull.lease_end = match (pull.lease_end, end) {
                    (Some(before), Some(end)) => Some(before.max(end)),
                    _ => None,
                };
            }
        }
    }

    /// The rule about what a request is stopped for.
    fn note_closed(&mut self, id: PullId) {
        let Some(pull) = self.pull(id).filter(|p| matches!(p.state, Phase::Receiving(_) | Phase::Reading(_))) else {
            return;
        };
        let lease = pull.fence.lease;
        let now = self.s.now;
        let open = self.s.producers.iter().find_map(|p| p.open.get(&lease));
        // Timers are late by less than a second.
        let ends = open.is_none_or(|open| match &open.state {
            Lease::Stopping { then: Then::Close(_), .. } => true,
            Lease::Stopping { bound, .. } | Lease::Bound(bound, _) => bound.term().is_over(now),
            Lease::Offered(state) => state.term().is_over(now),
        });
        if !ends && self.w.network == Network::Ordered {
            self.s.broken.insert(Rule::ClosedIsClosed);
        }
    }
}
