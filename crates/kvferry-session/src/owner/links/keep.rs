//! How long links are kept: closed when they are late, idle, too many, or of an engine that is no more.

use super::{Duration, EngineId, Link, LinkId, OwnerSession, RoadId, SHORTEST_IDLE, Stage, Versions};

impl OwnerSession {
    /// An engine that makes ever more links to us has those closed that have bound nothing, the oldest first. Gives false if
    /// all are in use: then the new one is too many.
    pub(super) fn spare_links(&mut self, new: LinkId, engine: &EngineId) -> bool {
        let others = self.links.up.to(engine).filter(|link| *link != new);
        let others = others.filter_map(|link| Some((link, self.links.links.get(&link).filter(|l| l.road.is_none())?)));
        let mut others: Vec<(bool, Duration, LinkId)> =
            others.map(|(link, l)| (self.leases.uses(link), l.used, link)).collect();
        others.sort_unstable();
        let spare = others.len().saturating_sub(self.config.limits.links.max(1) - 1);
        for (in_use, _, link) in others.into_iter().take(spare) {
            if in_use {
                return false;
            }
            self.close_link(link, "its engine has made too many others since");
        }
        true
    }

    /// Closes a link that was made anew meanwhile, once nothing goes over it: it has no other use.
    pub(in crate::owner) fn retire_link(&mut self, link: LinkId) {
        let road = self.links.links.get(&link).and_then(|l| l.road);
        if road.is_some_and(|road| self.roads.link(road) != Some(link)) && !self.is_in_use(link) {
            self.close_link(link, "it was made anew");
        }
    }

    /// Sends away those whose hello takes too long, and closes links of which nothing has been asked for long.
    pub(in crate::owner) fn expire_links(&mut self) {
        while let Some(link) = self.links.due.take_due(self.now) {
            let Some(l) = self.links.links.get(&link) else { continue };
            if !matches!(l.stage, Stage::Up(_)) {
                let reason = format!("no handshake within {:?}", self.config.handshake);
                self.close_link(link, &reason);
                continue;
            }
            let Some(idle) = self.config.idle.map(|idle| idle.max(SHORTEST_IDLE)) else { continue };
            let idle = allowed(idle, l.road);
            let until = l.used.saturating_add(idle);
            if self.is_in_use(link) {
                self.links.due.set(link, self.now.saturating_add(idle));
            } else if until > self.now {
                self.links.due.set(link, until);
            } else {
                self.close_link(link, &format!("nothing was asked of it for {idle:?}"));
            }
        }
    }

    /// Whether a request reads over it, or has bound something.
    pub(in crate::owner) fn is_in_use(&self, link: LinkId) -> bool {
        self.pulls.uses(link) || self.leases.uses(link)
    }

    /// Our engine is another by now, and neighbours of version 2 don't ask again who we are.
    pub(in crate::owner) fn close_old_links(&mut self) {
        let old = |l: &Link| matches!(&l.stage, Stage::Up(e) if e.version < Versions::LEASES);
        let old: Vec<LinkId> = self.links.links.iter().filter(|(_, l)| old(l)).map(|(id, _)| *id).collect();
        for link in old {
            self.close_link(link, super::MADE_ANEW);
        }
    }
}

/// How long a link may be idle. Who has made it closes it first: a request that is just sent over it must not meet its end.
pub(super) fn allowed(idle: Duration, made: Option<RoadId>) -> Duration {
    if made.is_some() { idle } else { idle.saturating_mul(2).saturating_add(Duration::from_secs(1)) }
}
