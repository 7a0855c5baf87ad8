//! A failing world made smaller: runs it again with things left out, and keeps what still fails in the same way.

use std::collections::BTreeSet;

use crate::faults::FaultKind;
use crate::mask::{Mask, Replay};
use crate::world::{NotMade, Outcome, World, WorldConfig};

/// Which world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// [`WorldConfig::small`].
    Small,
    /// [`WorldConfig::large`].
    Large,
}

impl Kind {
    /// Its configuration.
    #[must_use]
    pub fn config(self, replay: &Replay) -> WorldConfig {
        match self {
            Self::Small => WorldConfig::small(replay.seed, replay.mask.clone()),
            Self::Large => WorldConfig::large(replay.seed, replay.mask.clone()),
        }
    }
}

/// What is left of a failing world.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// How to run it again.
    pub replay: Replay,
    /// How it ends, with what happened.
    pub outcome: Outcome,
    /// How often it was run.
    pub runs: u32,
}

/// Runs a world with what happens written down.
///
/// # Errors
/// If it can't be made.
pub fn trace(kind: Kind, replay: &Replay) -> Result<Outcome, NotMade> {
    Ok(World::new(WorldConfig { trace: true, ..kind.config(replay) })?.run())
}

/// Makes a failing world smaller, with at most so many runs. One that doesn't fail is given back as it is.
///
/// # Errors
/// If it can't be made.
pub fn shrink(kind: Kind, replay: Replay, most: u32) -> Result<Shrunk, NotMade> {
    let mut search = Search { kind, runs: 0, most, name: "", seed: replay.seed };
    let first = World::new(kind.config(&replay))?.run();
    let Some(violation) = &first.violation else { return Ok(Shrunk { replay, outcome: first, runs: 1 }) };
    search.name = violation.name();
    let config = kind.config(&replay);
    let mut mask = replay.mask;
    for &fault in FaultKind::ALL {
        let mut without = mask.clone();
        if without.without.insert(fault) && search.fails(&without) {
            mask = without;
        }
    }
    let all = |n: usize| (0..u32::try_from(n).unwrap_or(u32::MAX)).collect::<BTreeSet<u32>>();
    let strikes = mask.strikes.clone().unwrap_or_else(|| all(config.faults.events.len()));
    let strikes = search.least(strikes, |s| Mask { strikes: Some(s), ..mask.clone() });
    mask.strikes = Some(strikes);
    let requests = mask.requests.clone().unwrap_or_else(|| all(config.requests.len()));
    let requests = search.least(requests, |r| Mask { requests: Some(r), ..mask.clone() });
    mask.requests = Some(requests);
    let replay = Replay { seed: replay.seed, mask };
    let outcome = trace(kind, &replay)?;
    Ok(Shrunk { replay, outcome, runs: search.runs })
}

struct Search {
    kind: Kind,
    runs: u32,
    most: u32,
    name: &'static str,
    seed: u64,
}

impl Search {
    fn fails(&mut self, mask: &Mask) -> bool {
        if self.runs >= self.most {
            return false;
        }
        self.runs += 1;
        let config = self.kind.config(&Replay { seed: self.seed, mask: mask.clone() });
        let outcome = World::new(config).map(World::run);
        outcome.is_ok_and(|o| o.violation.is_some_and(|v| v.name() == self.name))
    }

    /// Leaves out halves, then quarters, and so on, of what still fails without them.
    fn least(&mut self, mut kept: BTreeSet<u32>, mask: impl Fn(BTreeSet<u32>) -> Mask) -> BTreeSet<u32> {
        let mut piece = kept.len().div_ceil(2).max(1);
        loop {
            let list: Vec<u32> = kept.iter().copied().collect();
            for part in list.chunks(piece) {
                let fewer: BTreeSet<u32> = kept.iter().filter(|n| !part.contains(n)).copied().collect();
                if fewer.len() < kept.len() && self.fails(&mask(fewer.clone())) {
                    kept = fewer;
                }
            }
            if piece == 1 || self.runs >= self.most {
                return kept;
            }
            piece = piece.div_ceil(2);
        }
    }
}
