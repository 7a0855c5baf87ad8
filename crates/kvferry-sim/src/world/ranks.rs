//! Ranks: how they begin and end, and what they and their owner say to each other.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::rank::FromRank;
use kvferry_session::owner::RankLinkId;
use kvferry_session::rank::RankIdentity;
use kvferry_session::{LocalCache, RankSession};
use kvferry_transport::{EndpointId, Transport};

use super::{Happens, Packet, Script, Who, World};
use crate::clock::Clock;
use crate::engine::{Process, Rank};
use crate::fabric::Owner;
use crate::memory::RankMemory;
use crate::rng::{Rng, hash, ms, us};
use crate::transport::SimTransport;
use crate::violation::Violation;

impl<S: Script> World<S> {
    /// Places for ranks that begin later.
    pub(crate) fn add_ranks(&mut self, engine: u32, ranks: u32) {
        let Some(e) = self.engines.get_mut(engine as usize) else { return };
        while e.ranks.len() < ranks as usize {
            e.ranks.push(Rank {
                process: Process::new(Clock::default(), 0),
                session: None,
                memory: None,
                endpoint: EndpointId::new([0; 16]),
                since: Duration::ZERO,
                link: None,
                up: Duration::ZERO,
                down: Duration::ZERO,
                work: BTreeMap::new(),
            });
        }
    }

    pub(crate) fn rank(&mut self, engine: u32, rank: u32) -> Option<&mut Rank<Happens<S::Event>>> {
        self.engines.get_mut(engine as usize)?.ranks.get_mut(rank as usize)
    }

    /// Whether this life of a rank goes on.
    fn lives(&self, engine: u32, rank: u32, life: u32) -> bool {
        let of = self.engines.get(engine as usize).and_then(|e| e.ranks.get(rank as usize));
        of.is_some_and(|r| r.process.life == life && r.session.is_some())
    }

    /// A rank begins, with memory of its own in which there is nothing yet.
    pub(crate) fn start_rank(&mut self, engine: u32, rank: u32) {
        let up = self.engines.get(engine as usize).is_some_and(|e| e.owner.is_some());
        if !up || self.rank(engine, rank).is_none_or(|r| r.session.is_some()) {
            return;
        }
        self.count(9, u64::from(engine), u64::from(rank));
        match self.rank_session(engine, rank) {
            Ok(life) => {
                self.note(|_| format!("e{engine} rank {rank} begins, life {life}"));
                let after = self.rng.time(us(20), us(500));
                self.put(after, Happens::RankAccept(engine, rank, life));
                let (began, at) = (self.now, self.now + after);
                if let Some(r) = self.rank(engine, rank) {
                    (r.since, r.up, r.down) = (began, at, at);
                }
                self.pump_rank(engine, rank);
            }
            Err(error) => self.violates(Violation::Unreadable { engine, error }),
        }
    }

    fn rank_session(&mut self, engine: u32, rank: u32) -> Result<u32, String> {
        let epoch = self.epoch();
        let (nothing, quiet, fabric) = (self.nothing.clone(), self.quiet.clone(), self.fabric.clone());
        let (staging, admission, seed) = (self.config.staging, self.config.admission, self.config.seed);
        let pairings = self.pairings.clone().unwrap_or_default();
        let life = self.rank(engine, rank).map_or(0, |r| r.process.life) + 1;
        let clock = self.clock(&[u64::from(engine), u64::from(life), u64::from(rank) + 1]);
        let e = self.engines.get_mut(engine as usize).ok_or("no such engine")?;
        let (manifest, places) = (e.shape.manifest.clone(), e.shape.places.clone());
        let id = e.id.clone();
        let r = e.ranks.get_mut(rank as usize).ok_or("no such rank")?;
        let said = manifest.ranks().get(rank as usize).ok_or("no such rank")?;
        let places = places.get(rank as usize).cloned().unwrap_or_default();
        // A new life has the card of the one before.
        fabric.flush(r.endpoint);
        let own = [seed, u64::from(engine), u64::from(rank), u64::from(life)];
        let mut name = [0; 16];
        name[..8].copy_from_slice(&hash(&[&own[..], &[1]].concat()).to_le_bytes());
        name[8..].copy_from_slice(&hash(&[&own[..], &[2]].concat()).to_le_bytes());
        let endpoint = EndpointId::new(name);
        let mut transport: Box<dyn Transport> =
            Box::new(SimTransport::new(&fabric, Owner { engine, rank, life }, endpoint, quiet));
        fabric.describe(endpoint, places.clone());
        let memory = RankMemory::new(said, places, staging.map(|s| s.0), nothing.as_ref()).ok_or("no memory")?;
        let cache = LocalCache::register(&mut *transport, said.clone(), memory.regions.clone());
        let mut cache = cache.map_err(|e| e.to_string())?;
        if let Some(region) = &memory.staging {
            cache = cache.with_staging(&mut *transport, region.clone()).map_err(|e| e.to_string())?;
        }
        let who = RankIdentity { engine: id, rank: RankId::new(rank), epoch };
        let session = RankSession::new(who, transport, cache).with_pairings(pairings);
        let mut session = session.with_admission(admission).map_err(|e| e.to_string())?;
        if let Some((_, config)) = staging {
            session = session.with_staging(config).map_err(|e| e.to_string())?;
        }
        if nothing.is_some() {
            session = session.without_bytes();
        }
        r.process = Process::new(clock, life);
        r.session = Some(session);
        r.memory = Some(memory);
        r.endpoint = endpoint;
        r.link = None;
        r.work.clear();
        Ok(life)
    }

    /// A rank's process is gone, with its memory.
    pub fn kill_rank(&mut self, engine: u32, rank: u32, drains: bool) {
        let fabric = self.fabric.clone();
        let Some(r) = self.rank(engine, rank) else { return };
        if r.session.is_none() {
            return;
        }
        fabric.kill(r.endpoint, drains);
        r.session = None;
        r.memory = None;
        r.work.clear();
        r.process.paused = None;
        r.process.held.clear();
        r.process.timer = None;
        self.note(|_| format!("e{engine} rank {rank} is dead"));
    }

    pub(crate) fn rank_accept(&mut self, engine: u32, rank: u32, life: u32) {
        if !self.lives(engine, rank, life) {
            return;
        }
        self.count(10, u64::from(engine), u64::from(rank));
        let mut link = None;
        self.with_owner(engine, |owner, now| link = Some(owner.accept_rank(now)));
        if let (Some(link), Some(e)) = (link, self.engines.get_mut(engine as usize)) {
            e.rank_links.insert(link, rank);
            if let Some(r) = e.ranks.get_mut(rank as usize) {
                r.link = Some(link);
            }
        }
        self.pump_owner(engine);
    }

    pub(crate) fn rank_says(&mut self, engine: u32, rank: u32, life: u32, packet: Packet) {
        // What a rank had sent before it died still arrives, until its end is heard of.
        let link = self.rank(engine, rank).filter(|r| r.process.life == life).and_then(|r| r.link);
        let Some(link) = link else { return };
        if self.engines.get(engine as usize).is_none_or(|e| !e.rank_links.contains_key(&link)) {
            return;
        }
        self.count(11, u64::from(engine), u64::from(rank));
        self.stats.messages += 1;
        match packet.read_from_rank() {
            Ok(message) => {
                self.note(|_| format!("e{engine} hears of rank {rank}: {}", short(&message)));
                self.with_owner(engine, |owner, now| owner.rank_message(link, message, now));
            }
            Err(error) => self.violates(Violation::Unreadable { engine, error }),
        }
        self.pump_owner(engine);
    }

    pub(crate) fn rank_hears(&mut self, engine: u32, rank: u32, life: u32, packet: Packet) {
        if !self.lives(engine, rank, life) {
            return;
        }
        self.count(12, u64::from(engine), u64::from(rank));
        self.stats.messages += 1;
        let now = self.now;
        match packet.read_to_rank() {
            Ok(message) => {
                self.note(|_| {
                    let text: String = format!("{message:?}").chars().take(60).collect();
                    format!("e{engine} rank {rank} hears: {text}")
                });
                if let Some(r) = self.rank(engine, rank) {
                    let shown = r.process.clock.shows(now);
                    if let Some(session) = &mut r.session {
                        session.handle(message, shown);
                    }
                }
            }
            Err(error) => self.violates(Violation::Unreadable { engine, error }),
        }
        self.pump_rank(engine, rank);
    }

    /// A message to a rank, after those before it.
    pub(crate) fn send_rank(&mut self, engine: u32, rank: u32, packet: Packet) {
        let at = self.now + self.rank_delay(engine, rank);
        let Some(r) = self.rank(engine, rank) else { return };
        r.down = r.down.max(at);
        let (at, life) = (r.down, r.process.life);
        self.queue.put(at, Happens::ToRank(engine, rank, life, packet));
    }

    fn rank_delay(&mut self, engine: u32, rank: u32) -> Duration {
        let mut rng =
            Rng::of(&[self.config.seed, 11, u64::from(engine), u64::from(rank), self.stats.messages, self.stats.steps]);
        self.delay(&mut rng, (engine, engine))
    }

    /// The data plane has something for a rank.
    pub(crate) fn wake_rank(&mut self, engine: u32, rank: u32, life: u32) {
        if self.lives(engine, rank, life) {
            self.pump_rank(engine, rank);
        }
    }

    pub(crate) fn work_done(&mut self, engine: u32, rank: u32, life: u32, work: u64) {
        if !self.lives(engine, rank, life) {
            return;
        }
        self.count(13, u64::from(engine), u64::from(rank));
        let now = self.now;
        if let Some(r) = self.rank(engine, rank) {
            let shown = r.process.clock.shows(now);
            if let (Some(work), Some(session)) = (r.work.remove(&work), &mut r.session) {
                work.permute.run(1);
                session.work_done(work.id, shown);
            }
        }
        self.pump_rank(engine, rank);
    }

    /// Steps a rank and sends what it says.
    pub(crate) fn pump_rank(&mut self, engine: u32, rank: u32) {
        let (now, wire) = (self.now, self.config.wire);
        let Some(r) = self.rank(engine, rank) else { return };
        if r.process.paused.is_some() {
            return;
        }
        let shown = r.process.clock.shows(now);
        let life = r.process.life;
        let Some(session) = &mut r.session else { return };
        let due = session.step(shown);
        let (mut said, mut work) = (Vec::new(), Vec::new());
        while let Some(next) = session.next_work() {
            work.push(next.id.0);
            r.work.insert(next.id.0, next);
        }
        while let Some(message) = session.next_message() {
            said.push(message);
        }
        self.stats.steps += 1;
        for work in work {
            let after = self.rng.time(us(5), ms(3));
            self.put(after, Happens::WorkDone(engine, rank, life, work));
        }
        for message in said {
            match Packet::from_rank(message, wire) {
                Ok(packet) => {
                    let at = self.now + self.rank_delay(engine, rank);
                    let Some(r) = self.rank(engine, rank) else { continue };
                    r.up = r.up.max(at);
                    let at = r.up;
                    self.queue.put(at, Happens::FromRank(engine, rank, life, packet));
                }
                Err(error) => self.violates(Violation::Unreadable { engine, error }),
            }
        }
        self.set_timer(Who::Rank(engine, rank), due);
    }

    /// An owner hears that a rank is gone, whether it is or not.
    pub(crate) fn rank_gone(&mut self, engine: u32, life: u32, link: RankLinkId) {
        if self.life(engine) != life {
            return;
        }
        let Some(e) = self.engines.get_mut(engine as usize) else { return };
        let Some(rank) = e.rank_links.remove(&link) else { return };
        if let Some(r) = e.ranks.get_mut(rank as usize).filter(|r| r.link == Some(link)) {
            r.link = None;
        }
        self.count(14, u64::from(engine), u64::from(rank));
        self.note(|_| format!("e{engine} hears that rank {rank} is gone"));
        self.with_owner(engine, |owner, now| owner.rank_closed(link, "it is gone", now));
        S::rank_lost(self, engine);
        self.pump_owner(engine);
    }

    /// The owner will hear of the end of a rank's present life.
    pub(crate) fn will_hear(&mut self, engine: u32, rank: u32, after: Duration) {
        let life = self.life(engine);
        if let Some(link) = self.rank(engine, rank).and_then(|r| r.link) {
            self.put(after, Happens::RankGone(engine, life, link));
        }
    }

    /// A rank dies; another life of it begins some time after.
    pub(crate) fn rank_dies(&mut self, engine: u32, rank: u32, life: u32) {
        if !self.lives(engine, rank, life) {
            return;
        }
        self.count(15, u64::from(engine), u64::from(rank));
        self.kill_rank(engine, rank, false);
        self.will_hear(engine, rank, us(100));
        self.put(ms(50), Happens::StartRank(engine, rank));
    }

    /// The owner has sent a rank away.
    pub(crate) fn rank_refused(&mut self, engine: u32, rank: u32) {
        let Some(r) = self.rank(engine, rank) else { return };
        r.link = None;
        let life = r.process.life;
        self.put(ms(5), Happens::RankDies(engine, rank, life));
    }
}

fn short(message: &FromRank) -> String {
    match message {
        FromRank::Join(join) => format!("Join {}", join.epoch),
        other => format!("{other:?}").chars().take(200).collect(),
    }
}
