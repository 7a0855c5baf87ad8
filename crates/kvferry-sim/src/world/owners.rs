//! Processes: when they are stepped, how they sleep; and what owners want done.

use std::time::Duration;

use kvferry_proto::names::ModelIdentity;
use kvferry_session::OwnerSession;
use kvferry_session::owner::{Backoff, Effect, OwnerConfig};

use super::{Happens, Packet, Script, Who, World};
use crate::clock::Clock;
use crate::engine::Process;
use crate::faults::FaultKind;
use crate::rng::{Rng, ms, us};
use crate::violation::Violation;

/// How often a session may ask to be stepped again at once.
const SPINS: u32 = 20_000;

impl<S: Script> World<S> {
    pub(crate) fn process(&mut self, who: Who) -> Option<&mut Process<Happens<S::Event>>> {
        match who {
            Who::Owner(engine) => self.engines.get_mut(engine as usize).map(|e| &mut e.process),
            Who::Rank(engine, rank) => {
                self.engines.get_mut(engine as usize)?.ranks.get_mut(rank as usize).map(|r| &mut r.process)
            }
        }
    }

    /// Which life an engine's owner has.
    pub(crate) fn life(&self, engine: u32) -> u32 {
        self.engines.get(engine as usize).map_or(u32::MAX, |e| e.process.life)
    }

    pub(crate) fn clock(&self, who: &[u64]) -> Clock {
        let mut rng = Rng::of(&[&[self.config.seed, 0xc1], who].concat());
        let skewed = self.config.faults.rates.contains_key(&FaultKind::ClockSkew);
        let offset = rng.time(Duration::ZERO, ms(100_000));
        let drift = i32::try_from(rng.below(2000)).unwrap_or(0) - 1000;
        match skewed && self.config.mask.has(FaultKind::ClockSkew) {
            true => Clock { offset, drift },
            false => Clock::default(),
        }
    }

    /// An engine begins: its owner, then its ranks.
    pub(crate) fn start_engine(&mut self, engine: u32) {
        self.count(6, u64::from(engine), 0);
        let epoch = self.epoch();
        let clock = self.clock(&[u64::from(engine), u64::from(self.life(engine))]);
        let Some(e) = self.engines.get_mut(engine as usize).filter(|e| e.owner.is_none()) else { return };
        let m = e.shape.manifest.clone();
        e.life += 1;
        e.process = Process::new(clock, e.life);
        let ranks = e.shape.ranks();
        let config = OwnerConfig {
            identity: ModelIdentity::unspecified(),
            lease: self.config.lease,
            grace: self.config.grace,
            reclaim_after: self.config.reclaim,
            handshake: self.config.handshake,
            idle: self.config.idle,
            stripe: self.config.stripe,
            retry: Backoff { first: ms(50), most: ms(1500) },
            ..OwnerConfig::new(e.id.clone(), epoch, m.spec().clone(), m.groups().to_vec(), ranks)
        };
        match OwnerSession::new(config) {
            Ok(owner) => e.owner = Some(owner.with_pairings(self.pairings.clone().unwrap_or_default())),
            Err(error) => return self.violates(Violation::Unreadable { engine, error: error.to_string() }),
        }
        self.note(|_| format!("e{engine} begins"));
        if self.clock(&[u64::from(engine), 0]) != Clock::default() {
            self.stats.fault(FaultKind::ClockSkew);
        }
        self.add_ranks(engine, ranks);
        for rank in 0..ranks {
            self.put(us(u64::from(rank) * 20), Happens::StartRank(engine, rank));
        }
        self.pump_owner(engine);
    }

    /// An engine is gone with all that it had.
    pub fn crash_engine(&mut self, engine: u32, lasts: Duration, drains: bool) {
        if self.engines.get(engine as usize).is_none_or(|e| e.owner.is_none()) {
            return;
        }
        self.note(|_| format!("e{engine} is killed"));
        let ranks = self.engines.get(engine as usize).map_or(0, |e| e.ranks.len());
        for rank in 0..u32::try_from(ranks).unwrap_or(0) {
            self.kill_rank(engine, rank, drains);
        }
        let life = self.life(engine);
        let of_engine = |c: &super::Conn, end: usize| c.ends[end].engine == engine && c.ends[end].life == life;
        let broken: Vec<(u64, bool)> = self
            .conns
            .iter()
            .flat_map(|(number, c)| [0, 1].map(|end| (*number, end, of_engine(c, end))))
            .filter(|(.., of_engine)| *of_engine)
            .map(|(number, end, _)| (number, end == 0))
            .collect();
        for (number, second) in broken {
            if let Some(conn) = self.conns.get_mut(&number) {
                conn.ends[usize::from(!second)].open = false;
            }
            let after = self.rng.time(us(10), ms(300));
            self.put(after, Happens::Closed(number, second));
        }
        let mut waiting = Vec::new();
        let open: Vec<usize> = match self.engines.get_mut(engine as usize) {
            Some(e) => {
                e.owner = None;
                e.process.life += 1;
                e.life = e.process.life;
                e.process.paused = None;
                // What requests wait for comes all the same; the rest was for the life that is over.
                let held = std::mem::take(&mut e.process.held);
                waiting.extend(held.into_iter().filter(|h| matches!(h, Happens::Script(_))));
                let open: Vec<usize> = e.pulls.values().chain(e.leases.values()).copied().collect();
                e.forget();
                open
            }
            None => Vec::new(),
        };
        S::engine_lost(self, engine, open);
        for happens in waiting {
            self.put(us(1), happens);
        }
        self.put(lasts, Happens::StartEngine(engine));
    }

    /// Tells an owner something, by its own clock.
    pub fn with_owner(&mut self, engine: u32, tell: impl FnOnce(&mut OwnerSession, Duration)) {
        let now = self.now;
        if let Some(e) = self.engines.get_mut(engine as usize) {
            let shown = e.process.clock.shows(now);
            if let Some(owner) = &mut e.owner {
                tell(owner, shown);
            }
        }
    }

    pub(crate) fn timer(&mut self, who: Who, life: u32) {
        let now = self.now;
        let Some(process) = self.process(who).filter(|p| p.life == life) else { return };
        // Only the last that was set counts.
        if process.timer != Some(now) {
            return;
        }
        process.timer = None;
        let (kind, a, b) = match who {
            Who::Owner(engine) => (7, engine, 0),
            Who::Rank(engine, rank) => (8, engine, rank),
        };
        self.count(kind, u64::from(a), u64::from(b));
        match who {
            Who::Owner(engine) => self.pump_owner(engine),
            Who::Rank(engine, rank) => self.pump_rank(engine, rank),
        }
    }

    /// A session said when it must be stepped again, by its own clock.
    pub(crate) fn set_timer(&mut self, who: Who, due: Option<Duration>) {
        let now = self.now;
        let Some(process) = self.process(who) else { return };
        let Some(due) = due else {
            // It waits for others, who may well let it post the next slice at once.
            (process.timer, process.spins) = (None, 0);
            return;
        };
        let at = process.clock.when(due);
        // Nothing is done in no time.
        let at = if at <= now {
            process.spins += 1;
            now + us(2)
        } else {
            process.spins = 0;
            at
        };
        let (spins, life) = (process.spins, process.life);
        if process.timer != Some(at) {
            process.timer = Some(at);
            self.queue.put(at, Happens::Step(who, life));
        }
        if spins > SPINS {
            let (Who::Owner(engine) | Who::Rank(engine, _)) = who;
            self.violates(Violation::Spins { engine, who: format!("{who:?}"), times: spins });
        }
    }

    /// A process does nothing until then.
    pub(crate) fn pause(&mut self, who: Who, lasts: Duration) {
        let until = self.now + lasts;
        let Some(process) = self.process(who).filter(|p| p.paused.is_none()) else { return };
        process.paused = Some(until);
        process.slept += lasts;
        let life = process.life;
        self.note(|_| format!("{who:?} sleeps for {lasts:?}"));
        self.put(lasts, Happens::Resume(who, life));
    }

    pub(crate) fn resume(&mut self, who: Who, life: u32) {
        let Some(process) = self.process(who).filter(|p| p.life == life && p.paused.is_some()) else { return };
        process.paused = None;
        process.timer = None;
        let held = std::mem::take(&mut process.held);
        self.note(|_| format!("{who:?} wakes, and {} things wait for it", held.len()));
        for happens in held {
            if !matches!(happens, Happens::Step(..)) {
                self.happens(happens);
            }
        }
        match who {
            Who::Owner(engine) => self.pump_owner(engine),
            Who::Rank(engine, rank) => self.pump_rank(engine, rank),
        }
    }

    /// Steps an owner and does what it wants done.
    pub fn pump_owner(&mut self, engine: u32) {
        let now = self.now;
        let Some(e) = self.engines.get_mut(engine as usize) else { return };
        if e.process.paused.is_some() {
            return;
        }
        let shown = e.process.clock.shows(now);
        let Some(mut owner) = e.owner.take() else { return };
        let due = owner.step(shown);
        self.stats.steps += 1;
        let mut effects = Vec::new();
        while let Some(effect) = owner.next_effect() {
            effects.push(effect);
        }
        if let Some(e) = self.engines.get_mut(engine as usize) {
            e.owner = Some(owner);
        }
        for effect in effects {
            self.effect(engine, effect);
        }
        self.set_timer(Who::Owner(engine), due);
        S::stepped(self, engine);
    }

    fn effect(&mut self, engine: u32, effect: Effect) {
        match effect {
            Effect::Connect { link, address } => self.connect(engine, link, &address),
            Effect::SendPeer { link, message } => self.send_peer(engine, link, message),
            Effect::ClosePeer { link } => self.close(engine, link),
            Effect::SendRank { link, message } => {
                let rank = self.engines.get(engine as usize).and_then(|e| e.rank_links.get(&link)).copied();
                // What is sent on a link that broke is lost.
                let ranks = self.engines.get(engine as usize).map_or(&[][..], |e| &e.ranks);
                let stands = |rank: &u32| ranks.get(*rank as usize).is_some_and(|r| r.link == Some(link));
                let Some(rank) = rank.filter(stands) else { return };
                match Packet::to_rank(message, self.config.wire) {
                    Ok(packet) => self.send_rank(engine, rank, packet),
                    Err(error) => self.violates(Violation::Unreadable { engine, error }),
                }
            }
            Effect::CloseRank { link } => {
                let rank = self.engines.get_mut(engine as usize).and_then(|e| e.rank_links.remove(&link));
                if let Some(rank) = rank {
                    self.rank_refused(engine, rank);
                }
            }
            other => S::effect(self, engine, other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Mask;
    use crate::world::WorldConfig;

    #[test]
    fn only_who_never_rests_spins() {
        let who = Who::Owner(0);
        let began = || {
            let mut world = World::new(WorldConfig::small(1, Mask::default())).unwrap();
            world.start_engine(0);
            world.process(who).unwrap().clock = Clock::default();
            world
        };
        // A rank that posts one operation after the other is stepped again after each, and then waits.
        for rest in [None, Some(ms(5))] {
            let mut world = began();
            for _ in 0..=SPINS {
                let now = world.now;
                world.set_timer(who, Some(now));
                world.set_timer(who, rest.map(|rest| now + rest));
            }
            assert!(world.violation.is_none(), "{:?}", world.violation);
        }
        let mut world = began();
        for _ in 0..=SPINS {
            let now = world.now;
            world.set_timer(who, Some(now));
        }
        assert!(matches!(world.violation, Some(Violation::Spins { .. })));
    }
}
