//! Whether what owners say of leases is true, as far as it can be seen from outside.
//!
//! A lie may do no harm in the world that it is told in: others would have to believe it at the wrong moment.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_proto::lease::Closing;
use kvferry_proto::names::{Attempt, Fence, LeaseId};
use kvferry_proto::peer::{BindAnswer, Left, PeerMessage, Verdict};
use kvferry_proto::push::{Stoppage, in_doubt};
use kvferry_session::owner::LinkId;

use super::World;
use crate::violation::Violation;

/// An engine and its life.
type Life = (u32, u32);

/// What was said that is needed to judge what is said later.
#[derive(Debug, Default)]
pub(crate) struct Witness {
    /// Leases that were closed as read, of which that has not been said.
    read: BTreeSet<LeaseId>,
    /// Which attempts were said to have been held, and to which engine.
    held: BTreeSet<(u32, LeaseId, Attempt)>,
    /// Heartbeats, by their sender and number: the leases that they are for.
    beats: BTreeMap<(Life, u64), Vec<LeaseId>>,
    /// Who has asked for which attempt of a lease.
    asked: BTreeSet<(Life, LeaseId, Attempt)>,
    granted: BTreeSet<(LeaseId, Attempt)>,
    /// The last attempt of a lease of which an engine was told that nobody writes any more.
    stopped: BTreeMap<(u32, LeaseId), Attempt>,
}

impl World {
    /// A producer has closed a lease.
    pub(crate) fn witness_closed(&mut self, lease: LeaseId, how: Closing) {
        if how == Closing::Read {
            self.script.witness.read.insert(lease);
        }
    }

    /// A consumer has delivered what it has of a lease: its producer must have said that it held that.
    pub(crate) fn witness_delivered(&mut self, engine: u32, fence: &Fence) {
        if !self.script.witness.held.remove(&(engine, fence.lease, fence.attempt)) {
            let what = format!("{fence} is delivered, and its producer has not said that it held it");
            self.violates(Violation::Untrue { engine, what });
        }
    }

    /// An owner says something to another.
    pub(crate) fn witness_said(&mut self, engine: u32, link: LinkId, message: &PeerMessage) {
        let Some(other) = self.other_end(engine, link) else { return };
        let sender = (engine, self.life(engine));
        let untrue = match message {
            PeerMessage::Bind(bind) => self.asks(sender, &bind.fence),
            PeerMessage::PushBind(push) => self.asks(sender, &push.bind.fence),
            PeerMessage::Heartbeat(beat) => {
                let leases = beat.leases.iter().map(|(lease, _)| *lease).collect();
                self.script.witness.beats.insert((sender, beat.beat), leases);
                None
            }
            PeerMessage::BindAnswer(BindAnswer::Bound(grant)) => self.grants(other, &grant.fence),
            PeerMessage::HeartbeatAnswer(answer) => {
                let leases = self.script.witness.beats.remove(&(other, answer.beat)).unwrap_or_default();
                let wrong =
                    |(lease, left): &(&LeaseId, &Left)| **left != Left::Closed && !self.is_open(engine, **lease);
                let wrong = leases.iter().zip(&answer.left).find(wrong);
                wrong.map(|(lease, left)| format!("lease {lease} is closed, and said to have time left: {left:?}"))
            }
            PeerMessage::ReleaseAnswer(answer) if answer.verdict == Verdict::Held => {
                self.script.witness.held.insert((other.0, answer.fence.lease, answer.fence.attempt));
                let read = self.script.witness.read.remove(&answer.fence.lease);
                (!read).then(|| format!("{} was not closed as read, or that was said before", answer.fence))
            }
            PeerMessage::Written(written) => {
                let ends = written.writers.iter().map(|(rank, end)| (*rank, end));
                let doubt = !in_doubt(ends).is_empty();
                if doubt { None } else { self.is_written((engine, other.0), &written.fence) }
            }
            PeerMessage::Closed(closed) if closed.how == Closing::Restarted => {
                self.is_written((engine, other.0), &closed.fence)
            }
            PeerMessage::Stopped(stopped) if stopped.writers != Stoppage::Unknown => {
                let (lease, attempt) = (stopped.fence.lease, stopped.fence.attempt);
                let last = self.script.witness.stopped.entry((other.0, lease)).or_insert(attempt);
                *last = attempt.max(*last);
                let offered = self.is_offered(engine, &stopped.fence);
                if stopped.writers == Stoppage::All {
                    offered.or_else(|| self.is_written((engine, other.0), &stopped.fence))
                } else {
                    offered
                }
            }
            _ => None,
        };
        if let Some(what) = untrue {
            self.violates(Violation::Untrue { engine, what });
        }
    }

    fn asks(&mut self, who: Life, fence: &Fence) -> Option<String> {
        self.script.witness.asked.insert((who, fence.lease, fence.attempt));
        None
    }

    fn grants(&mut self, who: Life, fence: &Fence) -> Option<String> {
        let (lease, attempt) = (fence.lease, fence.attempt);
        if !self.script.witness.asked.contains(&(who, lease, attempt)) {
            return Some(format!("{fence} is granted to e{}, which has not asked for it", who.0));
        }
        if !self.script.witness.granted.insert((lease, attempt)) {
            return Some(format!("{fence} is granted a second time, to e{}", who.0));
        }
        let stopped = self.script.witness.stopped.get(&(who.0, lease)).is_some_and(|last| attempt <= *last);
        stopped.then(|| format!("{fence} is granted to e{}, which was told that nobody would write for it", who.0))
    }

    fn is_open(&self, engine: u32, lease: LeaseId) -> bool {
        self.engines.get(engine as usize).is_some_and(|e| e.leases.contains_key(&lease))
    }

    /// Whether nobody has a lease of which a consumer was told that it has stopped, though none but that consumer knows this attempt.
    fn is_offered(&self, engine: u32, fence: &Fence) -> Option<String> {
        let e = self.engines.get(engine as usize).filter(|e| e.leases.contains_key(&fence.lease))?;
        let shown = e.owner.as_ref()?.snapshot(e.process.clock.shows(self.now));
        let of_lease = shown.leases.iter().find(|l| l.fence.lease == fence.lease)?;
        let left = of_lease.consumer.is_none() && of_lease.fence.attempt <= fence.attempt;
        left.then(|| format!("{fence} has stopped, and is still offered as attempt {}", of_lease.fence.attempt))
    }

    /// Whether blocks of a request are written of which its engine is told that they aren't any more.
    fn is_written(&self, (producer, consumer): (u32, u32), fence: &Fence) -> Option<String> {
        let of_lease = |r: &&super::Request| {
            r.consumer == consumer
                && r.lives.1 == self.life(consumer)
                && r.fence.as_ref().is_some_and(|f| f.lease == fence.lease)
        };
        let e = self.engines.get(consumer as usize)?;
        let ends: Vec<_> = e.ranks.iter().filter(|r| r.session.is_some()).map(|r| r.endpoint).collect();
        for r in self.script.requests.iter().filter(of_lease) {
            let Some(pull) = r.pull else { continue };
            let Some(blocks) = r.dst.as_ref().filter(|_| r.ended.is_none()).or_else(|| e.aside.get(&pull)) else {
                continue;
            };
            let places = (0u32..).zip(blocks).flat_map(|(group, list)| list.iter().map(move |block| (group, *block)));
            for place in places {
                let writers: usize = ends.iter().map(|end| self.fabric.written_by(producer, *end, place)).sum();
                if writers > 0 {
                    let (group, block) = place;
                    return Some(format!(
                        "nobody writes for {fence}, and {writers} operations write block {block} of group {group}"
                    ));
                }
            }
        }
        None
    }

    /// Who is at the other end of a link.
    fn other_end(&self, engine: u32, link: LinkId) -> Option<Life> {
        let conn = self.conns.get(self.engines.get(engine as usize)?.links.get(&link)?)?;
        let ours = conn.ends.iter().position(|end| end.engine == engine && end.link == Some(link))?;
        let other = conn.ends.get(1 - ours)?;
        Some((other.engine, other.life))
    }
}
