//! The end of a world: everything heals, everything ends, and nothing may be left.

use std::time::Duration;

use super::{Happens, PATIENCE, Who, World};
use crate::rng::ms;
use crate::violation::Violation;

impl World {
    pub(crate) fn run_until_quiet(&mut self) {
        let last = self.config.requests.iter().map(|r| r.at).chain(self.config.faults.events.iter().map(|e| e.at));
        let last = last.max().unwrap_or_default() + ms(1500);
        while self.next(last) {}
        self.now = self.now.max(last);
        self.heal();
        let end = self.now + PATIENCE;
        let mut look = self.now;
        while self.violation.is_none() && self.now < end {
            look += ms(500);
            while self.next(look) {}
            self.now = self.now.max(look);
            if self.is_over() {
                break;
            }
        }
        if self.violation.is_some() {
            return;
        }
        // Ranks that somebody is in doubt about: another life of them is evidence, once it is heard of.
        let producers = self.renew_doubtful();
        let renewed = self.now + ms(1500);
        while self.next(renewed) {}
        self.now = self.now.max(renewed);
        for (engine, producer) in producers {
            self.call_on(engine, producer);
        }
        let settled = self.now + ms(8000);
        while self.next(settled) {}
        if self.violation.is_none() {
            self.check_quiet();
        }
    }

    /// Nothing goes wrong any more.
    fn heal(&mut self) {
        self.healed = true;
        self.note(|_| "everything heals".into());
        let now = self.now;
        self.fabric.heal();
        for until in self.cut.values_mut() {
            *until = now.min(*until);
        }
        let mut sleeping = Vec::new();
        for e in &self.engines {
            if e.process.paused.is_some() {
                sleeping.push((Who::Owner(e.index), e.process.life));
            }
            for (rank, r) in (0u32..).zip(&e.ranks) {
                if r.process.paused.is_some() {
                    sleeping.push((Who::Rank(e.index, rank), r.process.life));
                }
            }
        }
        for (who, life) in sleeping {
            self.resume(who, life);
        }
    }

    /// Whether all requests and leases have ended and everybody is there.
    fn is_over(&self) -> bool {
        // What was read and is kept may yet be given back.
        let open = |r: &super::Request| {
            let kept = r.dst.is_some() && r.outcome.as_deref() == Some("delivered");
            r.outcome.is_none() || kept || (r.src.is_some() && r.fence.is_none())
        };
        let engine = |e: &crate::engine::Engine<Happens>| {
            e.pulls.is_empty()
                && e.leases.is_empty()
                && e.owner.as_ref().is_some_and(|o| o.missing().is_empty() && o.is_drained())
                && e.ranks.iter().all(|r| r.session.is_some())
        };
        !self.script.requests.iter().any(open) && self.engines.iter().all(engine)
    }

    /// Lets ranks begin anew that are in doubt. Gives the engines that must hear of it, and of whom.
    fn renew_doubtful(&mut self) -> Vec<(u32, u32)> {
        let (mut doubtful, mut producers) = (Vec::new(), Vec::new());
        let now = self.now;
        for e in &self.engines {
            let Some(owner) = &e.owner else { continue };
            for q in owner.snapshot(e.process.clock.shows(now)).quarantine {
                doubtful.extend(q.ranks.iter().map(|rank| (e.index, rank.get())));
                if let Some(producer) = self.engines.iter().find(|p| Some(&p.id) == q.producer.as_ref()) {
                    doubtful.extend(q.writers.iter().map(|rank| (producer.index, rank.get())));
                    producers.push((e.index, producer.index));
                }
            }
        }
        doubtful.sort_unstable();
        doubtful.dedup();
        for (engine, rank) in doubtful {
            if let Some(life) = self.rank(engine, rank).map(|r| r.process.life) {
                self.put(ms(1), Happens::RankDies(engine, rank, life));
            }
        }
        producers
    }

    /// An owner connects to another, to say something of no weight.
    fn call_on(&mut self, engine: u32, producer: u32) {
        let Some(id) = self.engines.get(producer as usize).map(|e| e.id.clone()) else { return };
        let (epoch, lease) = (self.epoch(), self.lease_id());
        let fence = kvferry_proto::lease::first_attempt(id.clone(), epoch, lease);
        self.with_owner(engine, |owner, now| owner.decline(id.as_str(), fence, now));
        self.pump_owner(engine);
    }

    /// Nothing may be left of anything.
    fn check_quiet(&mut self) {
        let now = self.now;
        for engine in 0..u32::try_from(self.engines.len()).unwrap_or(0) {
            if let Some(what) = self.left(engine, now) {
                return self.violates(Violation::NotEmpty { engine, what });
            }
            self.absorb_open(engine);
            self.check_memory(engine, "the end");
        }
        let open = self.fabric.open();
        if open > 0 {
            self.violates(Violation::NotEmpty { engine: 0, what: format!("{open} operations in flight") });
        }
    }

    fn left(&self, engine: u32, now: Duration) -> Option<String> {
        let e = self.engines.get(engine as usize)?;
        let Some(owner) = &e.owner else { return Some("no owner".into()) };
        let shown = owner.snapshot(e.process.clock.shows(now));
        let unended =
            self.script.requests.iter().enumerate().find(|(_, r)| r.consumer == engine && r.outcome.is_none());
        if let Some((i, _)) = unended {
            return Some(format!("request {i} without an outcome"));
        }
        if shown.state != "ready" {
            return Some(format!("its owner {}: {:?} missing", shown.state, shown.missing));
        }
        if let Some(p) = shown.pulls.first() {
            return Some(format!("request {} that is {} ({} in all)", p.pull, p.waiting_for, shown.pulls.len()));
        }
        if let Some(l) = shown.leases.first() {
            return Some(format!("lease {} that is {} ({} in all)", l.fence, l.waiting_for, shown.leases.len()));
        }
        if let Some(q) = shown.quarantine.first() {
            return Some(format!(
                "blocks of request {} in quarantine for ranks {:?} and writers {:?}",
                q.pull, q.ranks, q.writers
            ));
        }
        if !owner.is_drained() || owner.quarantined() > 0 {
            return Some("something that its snapshot doesn't show".into());
        }
        for (rank, r) in e.ranks.iter().enumerate() {
            let text = r.session.as_ref().map_or_else(|| "dead".into(), |s| format!("{s:?}"));
            // After the name come counts of what is open.
            let counts = text.split_once(", ").map_or(text.as_str(), |(_, counts)| counts);
            if !counts.split([' ', ',']).filter_map(|n| n.parse::<u64>().ok()).all(|n| n == 0) || counts == text {
                return Some(format!("rank {rank}: {text}"));
            }
            let lent = r.session.as_ref().map_or(0, |s| s.staging_lent().get());
            if lent > 0 {
                return Some(format!("rank {rank}: {lent} bytes of staging memory lent"));
            }
        }
        let group = e.pools.iter().position(|p| !p.is_full())?;
        Some(format!("{} blocks of group {group} that nobody gave back", e.pools.get(group)?.missing()))
    }
}
