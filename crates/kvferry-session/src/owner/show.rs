//! The session at a moment.

use super::{Duration, Life, OwnerSession};

use crate::snapshot::{LeaseSnapshot, LinkSnapshot, PullSnapshot, QuarantineSnapshot, Snapshot};

impl OwnerSession {
    pub(super) fn show(&self, now: Duration) -> Snapshot {
        let state = match &self.life {
            Life::Assembling => "joining",
            Life::Broken { .. } => "rank lost",
            Life::Ready(_) if self.service.is_draining() => "draining",
            Life::Ready(_) => "ready",
        };
        let quarantine = self.loans.in_doubt().map(|q| QuarantineSnapshot {
            pull: q.pull,
            blocks: q.blocks,
            ranks: q.doubt.ours.iter().copied().collect(),
            producer: q.doubt.theirs.as_ref().map(|w| w.fence.engine.clone()),
            writers: q.doubt.theirs.iter().flat_map(|w| w.ranks.keys().copied()).collect(),
            since: now.saturating_sub(q.since),
        });
        Snapshot {
            engine: self.config.engine.clone(),
            epoch: self.epoch,
            state,
            missing: self.missing(),
            links: self.show_links(now),
            leases: self.show_leases(now),
            pulls: self.show_pulls(now),
            quarantine: quarantine.collect(),
        }
    }

    fn show_links(&self, now: Duration) -> Vec<LinkSnapshot> {
        let show = |v: super::links::LinkView<'_>| LinkSnapshot {
            link: v.link.0,
            peer: v.peer.map(|p| p.engine().clone()),
            epoch: v.peer.map(|p| p.epoch()),
            address: v.road.and_then(|road| self.roads.address(road)).map(str::to_owned),
            state: v.stage,
            since: now.saturating_sub(v.since),
            version: v.version,
            bound: self.leases.bound_by(v.link),
            pulls: self.pulls.on_link(v.link).len(),
        };
        self.links.views().map(show).collect()
    }

    fn show_leases(&self, now: Duration) -> Vec<LeaseSnapshot> {
        let show = |v: super::leases::LeaseView<'_>| LeaseSnapshot {
            fence: v.fence.clone(),
            consumer: v.bound.map(|consumer| consumer.engine.clone()),
            waiting_for: v.waiting_for,
            since: now.saturating_sub(v.since),
            left: v.term.end().map(|end| end.saturating_sub(now)),
        };
        self.leases.views().map(show).collect()
    }

    fn show_pulls(&self, now: Duration) -> Vec<PullSnapshot> {
        let open = self.pulls.open.iter();
        let show = |id: &super::PullId, p: &super::pulls::Pull| PullSnapshot {
            pull: *id,
            fence: p.fence(),
            address: p.wish.address.clone(),
            phase: p.phase().name(),
            waiting_for: p.state.waiting_for(),
            since: now.saturating_sub(p.since),
            age: now.saturating_sub(p.started),
            left: p.deadline().saturating_sub(now),
            lease_left: p.lease_end().map(|end| end.saturating_sub(now)),
            ranks: p.state.pending(),
            trouble: self.roads.trouble(p.road).map(str::to_owned),
        };
        open.map(|(id, p)| show(id, p)).collect()
    }
}
