//! Many deployments for one load: which of them work, what each does, and which are best.
//!
//! | module | what it is |
//! |---|---|
//! | [`space`] | the scenario's `[sweep]` table, and the candidates that it makes |
//! | [`candidate`] | one deployment: the scenario with other sizes |
//! | [`outcome`] | its figures, or why it does not work |
//! | [`rank`] | objectives, the order by one of them, and the front of two |
//! | [`results`] | what came of all |
//!
//! A candidate is the scenario with other keys, judged by the closed form ([`crate::analytic`]): [`Sweep::scenario`] makes the scenario that a
//! file with these keys would. What is the same for many is made once. It starts no thread and writes no file: who runs a sweep asks for
//! [`Sweep::outcome`] from as many threads as it likes. `docs/sweep.md` tells of every key.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::{Arc, OnceLock};

use kvferry_geometry::manifest::Manifest;
use kvferry_models::{EngineDescription, Shape};

pub mod candidate;
pub mod outcome;
pub mod rank;
pub mod results;
pub mod space;

pub use candidate::{Candidate, Engines};
pub use outcome::{Figures, Kind, Outcome, Reason};
pub use rank::Objective;
pub use results::{Question, Report, Results};
pub use space::{MAX_CANDIDATES, Settings, SweepTable};

use crate::analytic::{self, AnalyticError};
use crate::events;
use crate::load::prefill::PrefillTime;
use crate::load::{DecodeModel, Load, LoadErrors, PrefillModel};
use crate::number::cut;
use crate::scenario::{Broken, FitError, Fleet, Scenario, ScenarioErrors, Transfer, figures};
use crate::traffic::{Traffic, TrafficError};

/// An engine's description and cache, with what its blocks were fitted into.
type Described = (EngineDescription, Arc<Manifest>, Option<u64>);
/// All engines of one side that differ in something else than their number.
type Sides = BTreeMap<(candidate::Sizes, u32, candidate::Layout), OnceLock<Result<Described, Reason>>>;

/// A scenario, its load, and all that is tried.
#[derive(Debug)]
pub struct Sweep {
    base: Scenario,
    load: Load,
    settings: Settings,
    candidates: Vec<Candidate>,
    sides: (Sides, Sides),
    /// The longest prompt.
    longest: u64,
}

/// There is nothing to try.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// The table has faults.
    #[error(transparent)]
    Table(#[from] ScenarioErrors),
    /// There are no requests.
    #[error(transparent)]
    Load(#[from] LoadErrors),
}

impl Sweep {
    /// What a scenario's `[sweep]` asks for; `file` names it in messages.
    ///
    /// # Errors
    /// All faults of the table, or those of the load.
    pub fn new(base: Scenario, file: &str) -> Result<Self, SweepError> {
        let (candidates, settings) = space::candidates(file, &base)?;
        let mut load = base.requests()?;
        if let Some(most) = settings.requests {
            load.requests.truncate(usize::try_from(most).unwrap_or(usize::MAX));
        }
        let of = |side: fn(&Candidate) -> Engines| -> Sides {
            let key = |e: Engines| ((e.sizes, e.block_size, e.layout), OnceLock::new());
            candidates.iter().map(|c| key(side(c))).collect()
        };
        let sides = (of(|c| c.prefill), of(|c| c.decode));
        let longest = load.requests.iter().map(|r| r.prompt).max().unwrap_or(0);
        Ok(Self { base, load, settings, candidates, sides, longest })
    }

    /// All that is tried, in the order of the table's lists.
    #[must_use]
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The scenario that all are made from.
    #[must_use]
    pub fn base(&self) -> &Scenario {
        &self.base
    }

    /// The requests that all have to serve.
    #[must_use]
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// What is the same for all.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The shapes of the scenario's own engines.
    #[must_use]
    pub fn shapes(&self) -> (Shape, Shape) {
        (self.base.prefill.description.shape, self.base.decode.description.shape)
    }

    /// Writes all that an outcome depends on, but for the candidate: of equal text, equal outcomes of equal [keys](Self::key).
    ///
    /// # Errors
    /// Those of the writer.
    pub fn identity(&self, out: &mut impl Write) -> fmt::Result {
        let s = &self.base;
        writeln!(out, "kvferry {}", env!("CARGO_PKG_VERSION"))?;
        writeln!(out, "{:?} {:?} {:?}", s.seed, s.cluster, Settings { budget: 0, ..self.settings })?;
        for fleet in [&s.prefill, &s.decode] {
            let d = &fleet.description;
            writeln!(out, "{:?} {:?} {:?} {:?} {:?}", d.model, d.options, d.shape, d.stages, d.whole)?;
            writeln!(out, "{:?} {:?} {:?} {:?}", d.block_size, d.kernel_block, d.slots, d.layout)?;
            // Blocks that were fitted are fitted anew.
            let blocks = d.blocks.filter(|_| fleet.kv_bytes.is_none());
            writeln!(out, "{:?} {blocks:?} {:?} {:?}", d.grouping, fleet.kv_bytes, fleet.prefix_tokens)?;
        }
        let transfer = Transfer { mode: Transfer::default().mode, stream: Transfer::default().stream, ..s.transfer };
        writeln!(out, "{} {:?} {:?}", self.first_gpu(), s.prefill_spec, s.decode_spec)?;
        writeln!(out, "{transfer:?} {:?} {:?}", s.router, s.failures)?;
        self.load.requests.iter().try_for_each(|r| writeln!(out, "{r:?}"))
    }

    /// What tells a candidate from all others of the same [identity](Self::identity), whatever the budget.
    #[must_use]
    pub fn key(&self, c: &Candidate) -> String {
        let budget = self.settings.budget;
        let stream = c.way.transfer().1;
        if self.gpus(c) > u64::from(budget) { format!("{c} {stream:?} of {budget}") } else { format!("{c} {stream:?}") }
    }

    /// GPUs that a candidate's engines take.
    #[must_use]
    pub fn gpus(&self, c: &Candidate) -> u64 {
        let of = |e: &Engines, own: Shape| u64::from(e.engines) * u64::from(e.sizes.on(own).ranks());
        let (p, d) = self.shapes();
        of(&c.prefill, p) + of(&c.decode, d)
    }

    fn first_gpu(&self) -> u64 {
        let Some(gpu) = self.base.prefill.gpus.first() else { return 0 };
        self.base.cluster.nodes().get(gpu.node as usize).map_or(0, |n| u64::from(n.first_gpu + gpu.index))
    }

    /// The scenario that a candidate stands for: its keys in place of the base's, D's engines behind P's.
    ///
    /// # Errors
    /// All reasons why there is none.
    pub fn scenario(&self, c: &Candidate) -> Result<Scenario, Vec<Reason>> {
        let mut reasons = Vec::new();
        let (gpus, budget) = (self.gpus(c), u64::from(self.settings.budget));
        if gpus > budget {
            let text = format!("one engine of each side would take {gpus} GPUs, and the budget is {budget}");
            let text = if c.prefill.engines == 1 && c.decode.engines == 1 {
                text
            } else {
                text.replace("one engine of each side", "they")
            };
            reasons.push(Reason::new(Kind::Gpus, text));
        }
        let p = self.described(true, &c.prefill);
        let d = self.described(false, &c.decode);
        let (p, d) = match (p, d) {
            (Ok(p), Ok(d)) if reasons.is_empty() => (p, d),
            (p, d) => {
                reasons.extend([p.err(), d.err()].into_iter().flatten());
                return Err(reasons);
            }
        };
        let s = &self.base;
        let (mode, stream) = c.way.transfer();
        let mut out = Scenario { transfer: Transfer { mode, stream, ..s.transfer }, sweep: None, ..s.clone() };
        let gpus = |reason: crate::scenario::TooFewGpus| vec![Reason::new(Kind::Gpus, reason)];
        let ranks = |m: &Manifest| u32::try_from(m.ranks().len()).unwrap_or(u32::MAX);
        let fleet = |(description, manifest, kv_bytes): Described, engines, first, prefix_tokens| {
            let ranks = ranks(&manifest);
            let gpus = Fleet::placed(engines, ranks, first, &s.cluster)?;
            Ok(Fleet { description, manifest, engines, ranks, gpus, prefix_tokens, kv_bytes })
        };
        out.prefill = fleet(p, c.prefill.engines, self.first_gpu(), s.prefill.prefix_tokens).map_err(gpus)?;
        let wanted = u64::from(c.decode.engines) * u64::from(ranks(&d.1));
        let first = Fleet::after(&out.prefill.gpus, &s.cluster, wanted);
        out.decode = fleet(d, c.decode.engines, first, s.decode.prefix_tokens).map_err(gpus)?;
        out.failures.retain(|f| match f.what {
            Broken::Prefill(n) => n < c.prefill.engines,
            Broken::Decode(n) => n < c.decode.engines,
            Broken::Link(..) => true,
        });
        self.times(&mut out).map_err(|e| vec![Reason::new(Kind::Engine, e)])?;
        out.compatible().map_err(|e| vec![Reason::new(Kind::Mismatch, e)])?;
        Ok(out)
    }

    fn described(&self, prefill: bool, e: &Engines) -> Result<Described, Reason> {
        let (sides, fleet) =
            if prefill { (&self.sides.0, &self.base.prefill) } else { (&self.sides.1, &self.base.decode) };
        let make = || {
            let mut d = fleet.description.clone();
            e.describe(&mut d);
            let kv_bytes = match self.settings.weights {
                None => fleet.kv_bytes,
                Some(weights) => Some(self.left(&d, weights)?),
            };
            let manifest = Fleet::fitted(&mut d, kv_bytes).map_err(|error| match error {
                FitError::Full(full) => Reason::new(Kind::Memory, format!("{}: {full}", d.name)),
                error => Reason::new(Kind::Engine, error),
            })?;
            Ok((d, manifest, kv_bytes))
        };
        match sides.get(&(e.sizes, e.block_size, e.layout)) {
            Some(known) => known.get_or_init(make).clone(),
            // Of another sweep.
            None => make(),
        }
    }

    /// What a GPU has for its cache beside the weights.
    fn left(&self, d: &EngineDescription, (gib, share): (f64, f64)) -> Result<u64, Reason> {
        let gpu = self.base.cluster.gpu_model(self.base.prefill.gpus.first().map_or(0, |g| g.node));
        let ranks = d.shape.tp.saturating_mul(d.shape.pp).max(1);
        let (usable, each) = (gpu.hbm_gib * share, gib / f64::from(ranks));
        let left = (usable - each) * f64::from(1u32 << 30);
        if left >= 1.0 {
            return Ok(cut(left));
        }
        let text = format!(
            "{}: a rank has {each:.1} GiB of {gib} GiB of weights (tp x pp = {ranks}), and of a GPU's {} GiB {usable:.1} GiB may be used; \
             more tp or pp",
            d.name, gpu.hbm_gib
        );
        Err(Reason::new(Kind::Memory, text))
    }

    /// How long prefills and tokens take in engines of these shapes.
    fn times(&self, s: &mut Scenario) -> Result<(), LoadErrors> {
        s.prefill_time = s.prefill_spec.model(&figures(&s.prefill, &s.cluster))?;
        s.decode_time = s.decode_spec.model(&figures(&s.decode, &s.cluster))?;
        if self.settings.fixed_times {
            return Ok(());
        }
        // GPUs that compute on one prompt; stages do so one after the other.
        let of = |f: &Fleet| f64::from(f.description.shape.tp.saturating_mul(f.description.shape.pcp).max(1));
        let slower = |own: &Fleet, new: &Fleet| of(own) / of(new);
        scale_prefill(&mut s.prefill_time, slower(&self.base.prefill, &s.prefill));
        scale_decode(&mut s.decode_time, slower(&self.base.decode, &s.decode));
        Ok(())
    }

    /// What comes of a candidate by the closed form. Of many, a [`Judge`] says it faster.
    #[must_use]
    pub fn outcome(&self, c: &Candidate) -> Outcome {
        self.judge().outcome(c)
    }

    /// Whoever judges candidates, one after the other.
    #[must_use]
    pub fn judge(&self) -> Judge<'_> {
        Judge { sweep: self, known: None }
    }

    fn figures(&self, s: &Scenario, traffic: &mut Traffic) -> Result<Figures, Vec<Reason>> {
        // What never fits is said before all requests are looked at.
        traffic.of(0, self.longest, 0).map_err(|e| vec![self.reason(e)])?;
        let answer = analytic::analyse_with(s, &self.load, traffic, false).map_err(|e| match e {
            AnalyticError::Traffic(e) => vec![self.reason(e)],
            AnalyticError::Load(e) => vec![Reason::new(Kind::Request, e)],
        })?;
        let out = Figures::of(&answer, self.load.span().as_secs_f64());
        if let Some((why, n)) = answer.requests.failed.first() {
            return Err(vec![Reason::new(Kind::Pool, format!("{n} of {} requests: {why}", answer.requests.all))]);
        }
        let mut over = Vec::new();
        let mut too_much = |share: f64, what: String, change: &str| {
            // In steps, so that candidates have reasons in common.
            if let Some(step) = [10.0, 4.0, 2.0, 1.5, 1.25, 1.1, 1.0].into_iter().find(|step| share > *step) {
                over.push(Reason::new(Kind::Overload, format!("{what} more than {:.0} %: {change}", step * 100.0)));
            }
        };
        let engines = "P's engines would have to compute".to_owned();
        too_much(out.prefill_busy, engines, "more or larger engines of P");
        let link = format!("{} would have to carry", out.hot_link_name);
        too_much(out.hot_link, link, "more machines, more rails, or fewer descriptors");
        let pools = "D's pools would have to hold".to_owned();
        too_much(out.pool, pools, "more engines of D, or more memory for its cache");
        if over.is_empty() || self.settings.allow_overload { Ok(out) } else { Err(over) }
    }

    fn reason(&self, error: TrafficError) -> Reason {
        match error {
            TrafficError::Mismatch(e) => Reason::new(Kind::Mismatch, e),
            TrafficError::Pairing(e) => Reason::new(Kind::Peers, e),
            TrafficError::Request(e) => Reason::new(Kind::Request, e),
            e @ TrafficError::NoRoom { .. } => {
                Reason::new(Kind::Pool, format!("a prompt of {} tokens: {e}", self.longest))
            }
        }
    }

    /// The figures of a candidate by discrete events.
    ///
    /// # Errors
    /// Why there are none, in words.
    pub fn confirm(&self, c: &Candidate) -> Result<Figures, String> {
        let s = self
            .scenario(c)
            .map_err(|reasons| reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
        let answer = events::simulate_load(&s, &self.load).map_err(|e| e.to_string())?;
        Ok(Figures::of(&answer, self.load.span().as_secs_f64()))
    }
}

/// What tells the two kinds of engines of one candidate from those of another, but for their number.
type Pair = [(candidate::Sizes, u32, candidate::Layout); 2];

/// Judges candidates one after the other. What goes from rank to rank is the same for all whose engines differ in their number only, or in
/// the way that caches are handed over: it is worked out once where such follow each other, as they do in [`Sweep::candidates`].
#[derive(Debug)]
pub struct Judge<'a> {
    sweep: &'a Sweep,
    known: Option<(Pair, Traffic)>,
}

impl Judge<'_> {
    /// What comes of a candidate by the closed form.
    pub fn outcome(&mut self, c: &Candidate) -> Outcome {
        match self.figures(c) {
            Ok(figures) => Outcome::Feasible(figures),
            Err(reasons) => Outcome::Infeasible(reasons),
        }
    }

    fn figures(&mut self, c: &Candidate) -> Result<Figures, Vec<Reason>> {
        let s = self.sweep.scenario(c)?;
        let pair = c.pair();
        let mut traffic = match self.known.take().filter(|(known, _)| *known == pair) {
            Some((_, traffic)) => traffic,
            None => Traffic::new(&s).map_err(|e| vec![self.sweep.reason(e)])?,
        };
        let figures = self.sweep.figures(&s, &mut traffic);
        self.known = Some((pair, traffic));
        figures
    }
}

/// Makes stated times so many times as long; a roofline knows its shape.
fn scale_prefill(model: &mut PrefillModel, slower: f64) {
    match &mut model.time {
        PrefillTime::Rate { tokens_per_s, .. } => *tokens_per_s /= slower,
        PrefillTime::Table { curve, .. } => *curve = curve.times(slower),
        PrefillTime::Roofline { .. } => {}
    }
}

fn scale_decode(model: &mut DecodeModel, slower: f64) {
    match model {
        DecodeModel::Constant { s } => *s *= slower,
        DecodeModel::Table(curve) => *curve = curve.times(slower),
        DecodeModel::Roofline { .. } => {}
    }
}
