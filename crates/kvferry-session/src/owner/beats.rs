//! The consumer's heartbeats: one for all leases that a link's requests read, and what their answers say is left.
//!
//! Time left is counted from when the heartbeat was sent: it is never later here than at the producer.

use super::{BTreeMap, Duration, LinkId, OwnerSession, PullId};

use kvferry_proto::peer::{Heartbeat, HeartbeatAnswer, Left, MAX_BEATS, PeerMessage};

use super::timers::Timers;
use crate::outcome::FailureCause;

/// Heartbeats of a link whose answers are awaited, at most: those before are of no use any more.
const MAX_AWAITED: usize = 4;

/// A lease that is about to end is not beaten for more often than every third of this.
const SHORTEST: Duration = Duration::from_millis(30);

/// A heartbeat that was sent: when, and for which requests.
type Sent = (Duration, Vec<PullId>);

#[derive(Debug, Default)]
pub(super) struct Beats {
    /// Counted over all links, so that no late answer is taken for another's.
    last: u64,
    due: Timers<LinkId>,
    /// The heartbeats whose answers are awaited.
    of_link: BTreeMap<LinkId, BTreeMap<u64, Sent>>,
}

impl Beats {
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.due.next()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.due.is_empty() && self.of_link.is_empty()
    }
}

impl OwnerSession {
    /// A lease with so much left is read over this link: it is beaten for from now on.
    pub(super) fn beat_for(&mut self, link: LinkId, left: Duration) {
        if self.links.knows_leases(link) {
            self.beats.due.hasten(link, self.next_beat(left));
        }
    }

    /// Often enough for a lease that is shorter than usual, too.
    fn next_beat(&self, left: Duration) -> Duration {
        self.now.saturating_add(self.config.lease.beat.min(left / 3).max(SHORTEST / 3))
    }

    pub(super) fn beats_end(&mut self, link: LinkId) {
        self.beats.due.remove(link);
        self.beats.of_link.remove(&link);
    }

    /// Sends what is due.
    pub(super) fn send_beats(&mut self) {
        while let Some(link) = self.beats.due.take_due(self.now) {
            let leases = self.pulls.ending_leases(link, self.now);
            if leases.is_empty() {
                self.beats.of_link.remove(&link);
                continue;
            }
            let shortest = leases.iter().map(|(.., end)| end.saturating_sub(self.now)).min();
            let next = self.next_beat(shortest.unwrap_or(self.config.lease.beat));
            // A lease that is about to end makes beats come sooner; the others need not go with each of them.
            let soon = self.now.saturating_add(next.saturating_sub(self.now).saturating_mul(6));
            let leases: Vec<_> = leases.into_iter().filter(|(.., end)| *end <= soon).collect();
            for chunk in leases.chunks(MAX_BEATS) {
                self.beats.last += 1;
                let beat = self.beats.last;
                let awaited = self.beats.of_link.entry(link).or_default();
                awaited.insert(beat, (self.now, chunk.iter().map(|(pull, ..)| *pull).collect()));
                while awaited.len() > MAX_AWAITED.max(leases.len().div_ceil(MAX_BEATS) * 2) {
                    awaited.pop_first();
                }
                let leases = chunk.iter().map(|(_, lease, _)| *lease).collect();
                self.send_peer(link, PeerMessage::Heartbeat(Heartbeat { beat, leases }));
            }
            self.beats.due.set(link, next);
        }
    }

    pub(super) fn on_heartbeat_answer(&mut self, link: LinkId, answer: HeartbeatAnswer) {
        let awaited = self.beats.of_link.get_mut(&link).and_then(|awaited| awaited.remove(&answer.beat));
        let Some((sent, pulls)) = awaited else { return };
        for (pull, left) in pulls.into_iter().zip(answer.left) {
            match left {
                Left::Closed => self.stop_reading(pull, FailureCause::Stale),
                Left::For(time) => self.pulls.extend(pull, Some(sent.saturating_add(time))),
                Left::Always => self.pulls.extend(pull, None),
            }
        }
    }
}
