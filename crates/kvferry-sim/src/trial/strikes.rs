//! What goes wrong at a time.

use super::{Happens, Who, World};
use crate::faults::{FaultEvent, FaultKind};
use crate::rng::{Rng, ms, us};

impl World {
    pub(crate) fn strike(&mut self, number: usize) {
        let Some(event) = self.config.faults.events.get(number).copied() else { return };
        if self.healed {
            return;
        }
        self.count(19, number as u64, event.kind as u64);
        self.stats.fault(event.kind);
        self.note(|_| format!("STRIKE {number}: {event}"));
        let FaultEvent { kind, engine, other, lasts, luck, .. } = event;
        let mut rng = Rng::of(&[luck]);
        let ranks = self.engines.get(engine as usize).map_or(1, |e| e.shape.ranks()).max(1);
        let rank = event.rank % ranks;
        let pair = (engine.min(other), engine.max(other));
        let owner = self.engines.get(engine as usize).is_some_and(|e| e.owner.is_some());
        let life = self.rank(engine, rank).filter(|r| r.session.is_some()).map(|r| r.process.life);
        match kind {
            FaultKind::LinkBreak => self.break_between(engine, other),
            FaultKind::HalfOpen if owner => self.half_open(other, engine, lasts),
            FaultKind::Partition => {
                let until = self.now + lasts;
                let end = self.cut.entry(pair).or_default();
                *end = until.max(*end);
                // Some implementations give up while it lasts.
                if rng.chance(5000) {
                    self.break_between(engine, other);
                }
            }
            FaultKind::DataPartition => self.fabric.cut(engine, other, self.now + lasts),
            FaultKind::OwnerPause if owner => self.pause(Who::Owner(engine), lasts),
            FaultKind::EngineCrash => self.crash_engine(engine, lasts, rng.chance(5000)),
            FaultKind::SlowRank => {
                let until = self.now + lasts;
                if let Some(endpoint) = self.rank(engine, rank).map(|r| r.endpoint) {
                    self.fabric.slow(endpoint, rng.between(5, 200), until);
                }
            }
            _ => {}
        }
        let Some(life) = life else { return };
        match kind {
            FaultKind::RankPause => self.pause(Who::Rank(engine, rank), lasts),
            FaultKind::RankCrash => {
                self.kill_rank(engine, rank, rng.chance(5000));
                self.will_hear(engine, rank, rng.time(us(50), ms(200)));
                self.put(lasts, Happens::StartRank(engine, rank));
            }
            FaultKind::RankLinkLoss => {
                self.will_hear(engine, rank, rng.time(us(50), ms(5)));
                // It hears nothing more, and does not know it yet.
                self.put(lasts, Happens::RankDies(engine, rank, life));
            }
            _ => {}
        }
    }

    fn break_between(&mut self, a: u32, b: u32) {
        let between = |c: &super::Conn| {
            let ends = (c.ends[0].engine, c.ends[1].engine);
            ends == (a, b) || ends == (b, a)
        };
        let broken: Vec<u64> = self.conns.iter().filter(|(_, c)| between(c)).map(|(number, _)| *number).collect();
        for number in broken {
            self.break_conn(number);
        }
    }
}
