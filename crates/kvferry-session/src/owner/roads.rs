//! Roads: how to come to an engine at an address. A link that can't be made is tried again, later each time, for as long as
//! somebody waits; each who waits does so until his own deadline.

use super::{BTreeMap, BTreeSet, Digest, Duration, EngineId, Epoch, Fence, LinkId, OwnerSession, PullId, VecDeque};

use kvferry_proto::peer::{PeerMessage, ReadsEnd, Release};

use super::timers::Timers;
use crate::outcome::FailureCause;

/// A road. Counted by the session, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct RoadId(u64);

/// Leases that nobody reads are told to their producers as long as that is possible within this many of them.
const MAX_DECLINES: usize = 1 << 12;

/// The most roads that are made for leases to be declined.
const MAX_ROADS: usize = 1 << 10;

#[derive(Debug)]
struct Road {
    address: String,
    engine: EngineId,
    /// The link that requests take, up or being made.
    link: Option<LinkId>,
    /// Another one that is being made while that is up: the first will not do for who waits, but it may do for others.
    next: Option<LinkId>,
    /// Requests that wait for a link.
    waiting: BTreeSet<PullId>,
    /// Leases to be declined when there is a link.
    declines: Vec<Fence>,
    /// Whether its engine is to be asked for evidence about writers in doubt.
    evidence: bool,
    failures: u32,
    /// Why there is no link.
    last: Option<String>,
    /// The manifest of the engine at its end when it was last met, if it knows brief hellos.
    met: Option<Digest>,
    /// Epochs that links have shown to be none of the engine's any more: references of them need no link of their own.
    stale: VecDeque<Epoch>,
}

impl Road {
    /// Whether somebody waits for a link.
    fn is_wanted(&self) -> bool {
        !self.waiting.is_empty() || self.evidence
    }
}

/// Stale epochs that are remembered for a road.
const MAX_STALE: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Roads {
    last: u64,
    roads: BTreeMap<RoadId, Road>,
    by_target: BTreeMap<(String, EngineId), RoadId>,
    /// Roads without a link, when the next attempt is due.
    retries: Timers<RoadId>,
    /// Of roads that are gone: whom they led to. Bounded by [`MAX_MET`].
    met: BTreeMap<(String, EngineId), Digest>,
}

/// Engines that we have met at an address and have no road to.
const MAX_MET: usize = 1 << 10;

impl Roads {
    pub(super) fn address(&self, road: RoadId) -> Option<&str> {
        self.roads.get(&road).map(|r| r.address.as_str())
    }

    pub(super) fn engine(&self, road: RoadId) -> Option<&EngineId> {
        self.roads.get(&road).map(|r| &r.engine)
    }

    pub(super) fn met(&self, road: RoadId) -> Option<Digest> {
        self.roads.get(&road)?.met
    }

    /// Whether a reference of this epoch was shown to be stale on this road.
    pub(super) fn is_stale(&self, road: RoadId, epoch: Epoch) -> bool {
        self.roads.get(&road).is_some_and(|r| r.stale.contains(&epoch))
    }

    /// A link that was made after a reference of this epoch has led to another.
    pub(super) fn note_stale(&mut self, road: RoadId, epoch: Epoch) {
        if let Some(r) = self.roads.get_mut(&road).filter(|r| !r.stale.contains(&epoch)) {
            r.stale.truncate(MAX_STALE - 1);
            r.stale.push_front(epoch);
        }
    }

    pub(super) fn link(&self, road: RoadId) -> Option<LinkId> {
        self.roads.get(&road)?.link
    }

    /// Why there is no link, if attempts have failed.
    pub(super) fn trouble(&self, road: RoadId) -> Option<&str> {
        self.roads.get(&road)?.last.as_deref()
    }

    pub(super) fn next_due(&self) -> Option<Duration> {
        self.retries.next()
    }

    /// The road that a link was made for, or is.
    fn making(&mut self, road: RoadId, link: LinkId) -> Option<&mut Road> {
        self.roads.get_mut(&road).filter(|r| r.link == Some(link) || r.next == Some(link))
    }

    pub(super) fn stop_waiting(&mut self, road: RoadId, pull: PullId) {
        if let Some(r) = self.roads.get_mut(&road) {
            r.waiting.remove(&pull);
        }
        self.tidy(road);
    }

    /// A road that nobody takes is forgotten, but for whom it led to.
    fn tidy(&mut self, road: RoadId) {
        let Some(r) = self.roads.get(&road) else { return };
        if r.link.is_some() || r.next.is_some() || r.is_wanted() || !r.declines.is_empty() {
            return;
        }
        self.retries.remove(road);
        let Some(r) = self.roads.remove(&road) else { return };
        let target = (r.address, r.engine);
        self.by_target.remove(&target);
        if let Some(met) = r.met {
            if self.met.len() >= MAX_MET {
                self.met.pop_first();
            }
            self.met.insert(target, met);
        }
    }

    /// Whether there is no road, and nothing is kept of any but whom it led to.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.roads.is_empty() && self.by_target.is_empty() && self.retries.is_empty()
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.roads.values().map(|r| r.waiting.len() + r.declines.len()).sum()
    }
}

impl OwnerSession {
    /// The road to an engine, made now if there is none.
    pub(super) fn road_to(&mut self, address: &str, engine: &EngineId) -> RoadId {
        let target = (address.to_owned(), engine.clone());
        if let Some(road) = self.roads.by_target.get(&target) {
            return *road;
        }
        self.roads.last += 1;
        let id = RoadId(self.roads.last);
        let met = self.roads.met.remove(&target);
        let road = Road {
            address: target.0.clone(),
            engine: target.1.clone(),
            link: None,
            next: None,
            waiting: BTreeSet::new(),
            declines: Vec::new(),
            evidence: false,
            failures: 0,
            last: None,
            met,
            stale: VecDeque::new(),
        };
        self.roads.roads.insert(id, road);
        self.roads.by_target.insert(target, id);
        id
    }

    /// A request waits until there is a link; it is begun if it isn't being made or retried already.
    pub(super) fn wait_for_link(&mut self, road: RoadId, pull: PullId) {
        if let Some(r) = self.roads.roads.get_mut(&road) {
            r.waiting.insert(pull);
            self.travel(road);
        }
    }

    /// The link of a road has shown to be of no use for a request: another one is made. When it is up, this one is closed as soon
    /// as what goes over it has ended; until then it serves whom it can.
    pub(super) fn renew_link(&mut self, road: RoadId, pull: PullId) {
        if let Some(r) = self.roads.roads.get_mut(&road) {
            r.waiting.insert(pull);
            self.travel_anew(road);
        }
    }

    /// Nobody will read this lease: tells its producer.
    pub(super) fn decline_lease(&mut self, address: &str, fence: Fence) {
        // References come from outside: many of them must not make as many links. A lease that is not declined has its end.
        let many = self.roads.roads.len() >= MAX_ROADS;
        let new_and_many = many && !self.roads.by_target.contains_key(&(address.to_owned(), fence.engine.clone()));
        if new_and_many {
            return;
        }
        let road = self.road_to(address, &fence.engine);
        let up = self.roads.link(road).filter(|link| self.links.peer(*link).is_some());
        if let Some(link) = up {
            return self.say_declined(link, fence);
        }
        if let Some(r) = self.roads.roads.get_mut(&road) {
            if r.declines.len() < MAX_DECLINES {
                r.declines.push(fence);
            }
            self.travel(road);
        }
    }

    fn say_declined(&mut self, link: LinkId, fence: Fence) {
        if self.links.knows_leases(link) {
            self.send_peer(link, PeerMessage::Release(Release { fence, reads: ReadsEnd::Declined }));
        }
    }

    fn travel(&mut self, road: RoadId) {
        if self.roads.link(road).is_none() {
            self.travel_anew(road);
        }
    }

    /// Makes a link, unless one is being made or retried, also where there is one.
    fn travel_anew(&mut self, road: RoadId) {
        let Some(r) = self.roads.roads.get_mut(&road) else { return };
        if r.next.is_some() || self.roads.retries.is_set(road) {
            return;
        }
        let address = r.address.clone();
        let link = self.begin_link(road, &address);
        if let Some(r) = self.roads.roads.get_mut(&road) {
            let place = if r.link.is_none() { &mut r.link } else { &mut r.next };
            *place = Some(link);
        }
    }

    pub(super) fn road_is_up(&mut self, road: RoadId, link: LinkId, met: Option<Digest>) {
        let Some(r) = self.roads.roads.get_mut(&road) else { return };
        let before = r.link.replace(link).filter(|before| *before != link);
        (r.next, r.failures, r.last, r.met) = (None, 0, None, met);
        let (waiting, declines) = (std::mem::take(&mut r.waiting), std::mem::take(&mut r.declines));
        for fence in declines {
            self.say_declined(link, fence);
        }
        for pull in waiting {
            self.ask(pull, link);
        }
        if let Some(before) = before.filter(|link| !self.is_in_use(*link)) {
            self.close_link(before, "it was made anew");
        }
    }

    /// A link that was up is gone.
    pub(super) fn road_is_down(&mut self, road: RoadId, link: LinkId) {
        let Some(r) = self.roads.roads.get_mut(&road).filter(|r| r.link == Some(link)) else { return };
        r.link = r.next.take();
        if r.is_wanted() { self.travel(road) } else { self.roads.tidy(road) }
    }

    /// A link may not be made: nobody waits for it any more.
    pub(super) fn road_is_closed(&mut self, road: RoadId, link: LinkId, reason: &str) {
        let Some(r) = self.roads.making(road, link) else { return };
        let (address, waiting) = (r.address.clone(), std::mem::take(&mut r.waiting));
        for pull in waiting {
            self.stop(pull, FailureCause::Unreachable { address: address.clone(), reason: reason.to_owned() });
        }
    }

    /// A link did not come up.
    pub(super) fn road_failed(&mut self, road: RoadId, link: LinkId, reasons: Vec<String>, refused: bool) {
        let Some(r) = self.roads.making(road, link) else { return };
        let place = if r.next == Some(link) { &mut r.next } else { &mut r.link };
        (*place, r.met) = (None, None);
        r.failures = r.failures.saturating_add(1);
        r.last = Some(reasons.join("; "));
        // Who is not read is not worth more than one attempt.
        r.declines.clear();
        if refused {
            let (address, waiting) = (r.address.clone(), std::mem::take(&mut r.waiting));
            for pull in waiting {
                self.stop(pull, FailureCause::Handshake { address: address.clone(), reasons: reasons.clone() });
            }
        }
        let Some(r) = self.roads.roads.get(&road) else { return };
        if !r.is_wanted() {
            return self.roads.tidy(road);
        }
        let due = self.now.saturating_add(self.config.retry.after(r.failures));
        self.roads.retries.set(road, due);
    }

    /// Whether writers of this road's engine have stopped is to be asked, for as long as that is not known.
    pub(super) fn seek_evidence(&mut self, road: RoadId) {
        if let Some(r) = self.roads.roads.get_mut(&road) {
            r.evidence = true;
            self.travel(road);
        }
    }

    /// An engine doesn't know of writers of its own in a former life: only what it says of itself now can tell of them, and it says that
    /// on a new link. One that was greeted just now has said it.
    pub(super) fn greet_anew(&mut self, engine: &EngineId) {
        let (now, rest) = (self.now, self.config.retry.most);
        let is_old = |link: Option<LinkId>| {
            let asked = link.and_then(|link| self.links.asked(link));
            asked.is_none_or(|asked| asked.saturating_add(rest) <= now)
        };
        let seeking = self.roads.roads.iter().filter(|(_, r)| r.evidence && r.engine == *engine && is_old(r.link));
        let roads: Vec<RoadId> = seeking.map(|(id, _)| *id).collect();
        for road in roads {
            self.travel_anew(road);
        }
    }

    /// Evidence has come: nobody is asked any more who isn't in doubt.
    pub(super) fn evidence_has_come(&mut self) {
        let seeking = self.roads.roads.iter().filter(|(_, r)| r.evidence && !self.loans.doubts(&r.engine));
        let settled: Vec<RoadId> = seeking.map(|(id, _)| *id).collect();
        for road in settled {
            if let Some(r) = self.roads.roads.get_mut(&road) {
                r.evidence = false;
            }
            self.roads.tidy(road);
        }
    }

    /// Tries again what is due.
    pub(super) fn retry_roads(&mut self) {
        while let Some(road) = self.roads.retries.take_due(self.now) {
            // Whoever wanted another link than the one that is up may have gone.
            if self.roads.roads.get(&road).is_some_and(|r| r.link.is_none() || r.is_wanted()) {
                self.travel_anew(road);
            }
        }
    }
}
