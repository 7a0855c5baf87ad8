//! What came of all candidates of a sweep, in the order of the candidates, whoever found it out and when.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Sweep;
use super::candidate::Candidate;
use super::outcome::{Figures, Kind, Outcome, Reason};
use super::rank::{Objective, front};

/// An outcome without what others have in common with it.
#[derive(Clone, PartialEq, Debug)]
enum Kept {
    Feasible(Box<Figures>),
    /// Places in the list of reasons.
    Infeasible(Box<[u32]>),
}

/// Outcomes by candidate.
#[derive(Debug, Default)]
pub struct Results {
    kept: Vec<Option<Kept>>,
    reasons: Vec<Reason>,
    places: BTreeMap<Reason, u32>,
    feasible: usize,
    done: usize,
    /// What discrete events say of some, by the candidate's place.
    pub events: BTreeMap<usize, Result<Figures, String>>,
}

impl Results {
    /// None yet, of so many candidates.
    #[must_use]
    pub fn new(candidates: usize) -> Self {
        Self { kept: vec![None; candidates], ..Self::default() }
    }

    /// Notes what came of a candidate, the first time that it is told.
    pub fn set(&mut self, at: usize, outcome: Outcome) {
        let Some(slot) = self.kept.get_mut(at).filter(|slot| slot.is_none()) else { return };
        self.done += 1;
        *slot = Some(match outcome {
            Outcome::Feasible(figures) => {
                self.feasible += 1;
                Kept::Feasible(Box::new(figures))
            }
            Outcome::Infeasible(reasons) => {
                let mut place = |reason: Reason| {
                    *self.places.entry(reason).or_insert_with_key(|reason| {
                        self.reasons.push(reason.clone());
                        u32::try_from(self.reasons.len() - 1).unwrap_or(u32::MAX)
                    })
                };
                Kept::Infeasible(reasons.into_iter().map(&mut place).collect())
            }
        });
    }

    /// Whether something came of a candidate.
    #[must_use]
    pub fn has(&self, at: usize) -> bool {
        self.kept.get(at).is_some_and(Option::is_some)
    }

    /// Candidates of which something came, and how many of those work.
    #[must_use]
    pub fn done(&self) -> (usize, usize) {
        (self.done, self.feasible)
    }

    /// The figures of a candidate, if it works.
    #[must_use]
    pub fn figures(&self, at: usize) -> Option<&Figures> {
        match self.kept.get(at)?.as_ref()? {
            Kept::Feasible(figures) => Some(figures),
            Kept::Infeasible(_) => None,
        }
    }

    /// Why a candidate does not work; none if it does.
    pub fn why(&self, at: usize) -> impl Iterator<Item = &Reason> {
        let places = match self.kept.get(at).and_then(Option::as_ref) {
            Some(Kept::Infeasible(places)) => &**places,
            _ => &[],
        };
        places.iter().filter_map(|n| self.reasons.get(*n as usize))
    }

    /// Those that work, the best first.
    #[must_use]
    pub fn ranked(&self, candidates: &[Candidate], objective: Objective) -> Vec<usize> {
        let works = candidates.iter().enumerate().filter_map(|(at, c)| Some((at, self.figures(at)?, c)));
        let mut all: Vec<(usize, &Figures, &Candidate)> = works.collect();
        all.sort_by(|a, b| objective.compare((a.1, a.2), (b.1, b.2)));
        all.into_iter().map(|a| a.0).collect()
    }

    /// Those of the ranked that no other beats, by the first axis; of equal ones in the order of the ranking.
    #[must_use]
    pub fn front(&self, ranked: &[usize], axes: (Objective, Objective)) -> Vec<usize> {
        let point = |at: &usize| self.figures(*at).map(|f| (axes.0.value(f), axes.1.value(f)));
        let points: Vec<(f64, f64)> = ranked.iter().filter_map(point).collect();
        front(&points).into_iter().filter_map(|at| ranked.get(at).copied()).collect()
    }

    /// Every reason with the candidates that it is one of: those of the most first, then by their words.
    #[must_use]
    pub fn reasons(&self) -> Vec<(&Reason, Vec<usize>)> {
        let mut of: Vec<(&Reason, Vec<usize>)> = self.reasons.iter().map(|r| (r, Vec::new())).collect();
        for (at, kept) in self.kept.iter().enumerate() {
            let Some(Kept::Infeasible(places)) = kept else { continue };
            for place in places {
                if let Some((_, list)) = of.get_mut(*place as usize) {
                    list.push(at);
                }
            }
        }
        of.sort_by(|a, b| b.1.len().cmp(&a.1.len()).then_with(|| a.0.cmp(b.0)));
        of
    }
}

/// What is asked of the results.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Question {
    /// What is ranked by.
    pub objective: Objective,
    /// The axes of the front.
    pub axes: (Objective, Objective),
    /// How many of the best are shown.
    pub top: usize,
}

/// All that a sweep found out, ready to be shown. Everything in it depends on the sweep and the question alone.
#[derive(Debug)]
pub struct Report<'a> {
    /// What was swept.
    pub sweep: &'a Sweep,
    /// What came of it.
    pub results: &'a Results,
    /// What was asked.
    pub question: Question,
    /// Places of those that work, the best first.
    pub ranked: Vec<usize>,
    /// Places of the front.
    pub front: Vec<usize>,
    /// Every reason with the candidates that it is one of.
    pub reasons: Vec<(&'a Reason, Vec<usize>)>,
}

impl<'a> Report<'a> {
    /// The answer to a question.
    #[must_use]
    pub fn new(sweep: &'a Sweep, results: &'a Results, question: Question) -> Self {
        let ranked = results.ranked(sweep.candidates(), question.objective);
        let front = results.front(&ranked, question.axes);
        Self { sweep, results, question, ranked, front, reasons: results.reasons() }
    }

    /// A candidate and its figures.
    #[must_use]
    pub fn row(&self, at: usize) -> Option<(&Candidate, &Figures)> {
        Some((self.sweep.candidates().get(at)?, self.results.figures(at)?))
    }

    /// Points of the front that are not equal, each with the first of its candidates and how many others are equal to it.
    #[must_use]
    pub fn steps(&self) -> Vec<(usize, usize)> {
        let point = |at: usize| {
            self.results.figures(at).map(|f| [self.question.axes.0.value(f), self.question.axes.1.value(f)])
        };
        let mut out: Vec<(usize, usize)> = Vec::new();
        for at in &self.front {
            match out.last_mut() {
                Some((first, more)) if point(*first) == point(*at) => *more += 1,
                _ => out.push((*at, 0)),
            }
        }
        out
    }

    /// As JSON: with all candidates, or with the best `top`, the front and the most frequent reasons only.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn json(&self, out: &mut impl std::io::Write, all: bool) -> Result<(), serde_json::Error> {
        let most = |n: usize| if all { usize::MAX } else { n };
        let ranks: BTreeMap<usize, usize> = self.ranked.iter().enumerate().map(|(rank, at)| (*at, rank)).collect();
        let row = |at: &usize| {
            let (candidate, figures) = self.row(*at)?;
            let events = self.results.events.get(at).map(|e| match e {
                Ok(figures) => Confirmed { figures: Some(figures), failed: None },
                Err(why) => Confirmed { figures: None, failed: Some(why) },
            });
            let rank = ranks.get(at).map_or(0, |rank| rank + 1);
            Some(Row { rank, name: candidate.to_string(), candidate, figures, events })
        };
        let places: BTreeMap<&Reason, usize> = self.reasons.iter().enumerate().map(|(n, (r, _))| (*r, n)).collect();
        let refused =
            self.sweep.candidates().iter().enumerate().filter(|(at, _)| self.results.why(*at).next().is_some());
        let (done, feasible) = self.results.done();
        let whole = Whole {
            scenario: &self.sweep.base().name,
            seed: self.sweep.base().seed,
            requests: self.sweep.load().requests.len(),
            budget: self.sweep.settings().budget,
            objective: self.question.objective,
            axes: self.question.axes,
            candidates: self.sweep.candidates().len(),
            feasible,
            infeasible: done - feasible,
            ranked: self.ranked.iter().take(most(self.question.top)).filter_map(row).collect(),
            front: self.front.iter().take(most(ROWS)).filter_map(row).collect(),
            reasons: self
                .reasons
                .iter()
                .take(most(ROWS))
                .map(|(reason, of)| Why { kind: reason.kind, text: &reason.text, candidates: of.len() })
                .collect(),
            refused: refused
                .take(if all { usize::MAX } else { 0 })
                .map(|(at, candidate)| Refused {
                    name: candidate.to_string(),
                    candidate,
                    reasons: self.results.why(at).filter_map(|r| places.get(r).copied()).collect(),
                })
                .collect(),
        };
        if all { serde_json::to_writer_pretty(out, &whole) } else { serde_json::to_writer(out, &whole) }
    }
}

/// The most points of a front and reasons that are shown.
pub const ROWS: usize = 40;

#[derive(Serialize)]
struct Whole<'a> {
    scenario: &'a str,
    seed: u64,
    requests: usize,
    budget: u32,
    objective: Objective,
    axes: (Objective, Objective),
    candidates: usize,
    feasible: usize,
    infeasible: usize,
    ranked: Vec<Row<'a>>,
    front: Vec<Row<'a>>,
    reasons: Vec<Why<'a>>,
    refused: Vec<Refused<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    rank: usize,
    name: String,
    candidate: &'a Candidate,
    figures: &'a Figures,
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<Confirmed<'a>>,
}

#[derive(Serialize)]
struct Confirmed<'a> {
    figures: Option<&'a Figures>,
    failed: Option<&'a str>,
}

#[derive(Serialize)]
struct Why<'a> {
    kind: Kind,
    text: &'a str,
    candidates: usize,
}

#[derive(Serialize)]
struct Refused<'a> {
    name: String,
    candidate: &'a Candidate,
    reasons: Vec<usize>,
}
