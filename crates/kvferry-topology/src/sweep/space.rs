//! The `[sweep]` table of a scenario, and the candidates that it makes.

use std::collections::BTreeSet;

use kvferry_geometry::placement::{MAX_CONTEXT, MAX_RANKS};
use kvferry_models::MAX_BLOCK_SIZE;
use serde::Deserialize;

use super::candidate::{Candidate, Engines, Layout, Sizes, Way};
use crate::scenario::{Fleet, Scenario, ScenarioError, ScenarioErrors, Stream};

/// The most candidates of one sweep.
pub const MAX_CANDIDATES: u64 = 1_000_000;
/// The most entries of one list.
const MAX_LIST: usize = 1_024;
/// The most engines of one kind.
const MAX_ENGINES: i64 = 65_536;
/// The most GPUs of a budget.
const MAX_GPUS: i64 = 1 << 20;

/// One value for both sides, or one for each.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(untagged)]
enum Pair<T> {
    Both(T),
    Each([T; 2]),
}

impl<T: Clone> Pair<T> {
    fn each(&self) -> (T, T) {
        match self {
            Self::Both(value) => (value.clone(), value.clone()),
            Self::Each([p, d]) => (p.clone(), d.clone()),
        }
    }
}

#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(untagged)]
enum Budgets {
    One(i64),
    List(Vec<i64>),
}

/// The table as it stands in the file. A simulation passes it over, but for its form.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepTable {
    gpus: Option<Budgets>,
    prefill_share: Option<Vec<f64>>,
    prefill_engines: Option<Vec<i64>>,
    decode_engines: Option<Vec<i64>>,
    prefill_tp: Option<Vec<i64>>,
    prefill_pp: Option<Vec<i64>>,
    prefill_dcp: Option<Vec<i64>>,
    decode_tp: Option<Vec<i64>>,
    decode_pp: Option<Vec<i64>>,
    decode_dcp: Option<Vec<i64>>,
    block_sizes: Option<Vec<Pair<i64>>>,
    layouts: Option<Vec<Pair<String>>>,
    modes: Option<Vec<String>>,
    weights_gib: Option<f64>,
    gpu_memory: Option<f64>,
    requests: Option<i64>,
    #[serde(default)]
    fixed_times: bool,
    #[serde(default)]
    allow_overload: bool,
}

/// What is the same for all candidates, beside the scenario.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Settings {
    /// The most GPUs of a candidate.
    pub budget: u32,
    /// GiB of one engine's weights, which its ranks share out evenly, and the share of a GPU's memory that is used for them and the
    /// cache together.
    pub weights: Option<(f64, f64)>,
    /// Only so many requests of the load, from its beginning.
    pub requests: Option<u64>,
    /// Times that are stated are those of every shape; else they are in proportion to the GPUs that compute on one prompt.
    pub fixed_times: bool,
    /// Candidates that can't keep up are no less feasible.
    pub allow_overload: bool,
}

struct Faults<'a> {
    file: &'a str,
    all: Vec<ScenarioError>,
}

impl Faults<'_> {
    fn value(&mut self, key: &str, got: impl ToString, change: impl Into<String>) {
        let (file, key, got) = (self.file.to_owned(), format!("sweep.{key}"), got.to_string());
        self.all.push(ScenarioError::Value { file, key, got, change: change.into() });
    }

    fn count(&mut self, key: &str, n: i64, high: i64) -> u32 {
        if !(1..=high).contains(&n) {
            self.value(key, n, format!("it must be 1 to {high}"));
        }
        u32::try_from(n.clamp(1, high)).unwrap_or(1)
    }

    /// A list without what stands in it twice; `usual` where there is none.
    fn list<T: Clone, U: PartialEq>(
        &mut self,
        key: &str,
        said: Option<&Vec<T>>,
        usual: U,
        mut read: impl FnMut(&mut Self, &T) -> Option<U>,
    ) -> Vec<U> {
        let Some(said) = said else { return vec![usual] };
        if said.is_empty() || said.len() > MAX_LIST {
            self.value(key, format!("a list of {}", said.len()), format!("it must have 1 to {MAX_LIST} entries"));
        }
        let mut out = Vec::new();
        for value in said.iter().take(MAX_LIST) {
            if let Some(value) = read(self, value)
                && !out.contains(&value)
            {
                out.push(value);
            }
        }
        out
    }

    fn counts(&mut self, key: &str, said: Option<&Vec<i64>>, usual: u32, high: i64) -> Vec<u32> {
        self.list(key, said, usual, |faults, n| Some(faults.count(key, *n, high)))
    }

    fn sizes(&mut self, side: &str, said: [Option<&Vec<i64>>; 3], fleet: &Fleet) -> Vec<Sizes> {
        let own = Sizes::of(&fleet.description.shape);
        let [tp, pp, dcp] = said;
        let ranks = i64::from(MAX_RANKS);
        let tp = self.counts(&format!("{side}_tp"), tp, own.tp, ranks);
        let pp = self.counts(&format!("{side}_pp"), pp, own.pp, ranks);
        let dcp = self.counts(&format!("{side}_dcp"), dcp, own.dcp, i64::from(MAX_CONTEXT));
        // No more than can be candidates, whatever is listed.
        let all = tp.iter().flat_map(|tp| {
            let dcp = &dcp;
            pp.iter().flat_map(move |pp| dcp.iter().map(move |dcp| Sizes { tp: *tp, pp: *pp, dcp: *dcp }))
        });
        all.take(limit() + 1).collect()
    }

    fn layout(&mut self, name: &str) -> Option<Layout> {
        let known = Layout::NAMED.into_iter().find(|l| l.name() == name);
        if known.is_none() {
            self.value("layouts", format!("{name:?}"), "it must be hnd, nhd, planes or packed-rows");
        }
        known
    }

    fn way(&mut self, name: &str, own: Stream) -> Option<Way> {
        let way = match (name, own) {
            ("pull", _) => Way::Pull,
            ("push", _) => Way::Push,
            ("push+layers", Stream::Layers { steps }) => Way::PushLayers(steps),
            ("push+layers", _) => Way::PushLayers(8),
            ("push+chunks", Stream::Chunks { tokens }) => Way::PushChunks(tokens),
            ("push+chunks", _) => Way::PushChunks(2048),
            _ => {
                self.value("modes", format!("{name:?}"), "it must be pull, push, push+layers or push+chunks");
                return None;
            }
        };
        Some(way)
    }

    fn number(&mut self, key: &str, got: f64, (low, high): (f64, f64)) -> f64 {
        if !(low..=high).contains(&got) {
            self.value(key, got, format!("it must be {low} to {high}"));
            return low;
        }
        got
    }
}

fn limit() -> usize {
    usize::try_from(MAX_CANDIDATES).unwrap_or(usize::MAX)
}

/// How many engines there are of each kind.
enum Number {
    /// As many as fill a budget, with such shares of it for P.
    Fill { budgets: Vec<u32>, shares: Vec<f64> },
    /// Those listed.
    Listed(Vec<u32>, Vec<u32>),
}

impl Number {
    /// P's and D's engines for engines of so many ranks; one of each where none fit.
    fn engines(&self, (p, d): (u32, u32)) -> Vec<(u32, u32)> {
        let mut out = BTreeSet::new();
        match self {
            Self::Listed(of_p, of_d) => {
                out.extend(of_p.iter().flat_map(|p| of_d.iter().map(move |d| (*p, *d))));
            }
            Self::Fill { budgets, shares } => {
                for budget in budgets {
                    // What is left when D has one engine.
                    let most = budget.saturating_sub(d) / p;
                    for share in shares.iter().filter(|_| most > 0) {
                        #[expect(
                            clippy::cast_possible_truncation,
                            clippy::cast_sign_loss,
                            reason = "a share of a budget"
                        )]
                        let of_p = ((f64::from(*budget) * share / f64::from(p) + 1e-9) as u32).clamp(1, most);
                        out.insert((of_p, (budget - of_p * p) / d));
                    }
                }
                if out.is_empty() {
                    out.insert((1, 1));
                }
            }
        }
        out.into_iter().collect()
    }
}

/// The candidates of a scenario's `[sweep]`, in the order of its lists, and what is the same for all.
///
/// # Errors
/// All faults, with their keys.
pub(super) fn candidates(file: &str, s: &Scenario) -> Result<(Vec<Candidate>, Settings), ScenarioErrors> {
    let mut faults = Faults { file, all: Vec::new() };
    let Some(said) = &s.sweep else {
        let change = "say what to vary, as in [sweep] gpus = 16, prefill_tp = [4, 8], decode_tp = [1, 2, 4], modes = [\"pull\", \"push\"]";
        faults.value("*", "missing", change);
        return Err(ScenarioErrors(faults.all));
    };
    let own = (&s.prefill, &s.decode);
    let of_p = [&said.prefill_tp, &said.prefill_pp, &said.prefill_dcp].map(Option::as_ref);
    let of_d = [&said.decode_tp, &said.decode_pp, &said.decode_dcp].map(Option::as_ref);
    let (of_p, of_d) = (faults.sizes("prefill", of_p, own.0), faults.sizes("decode", of_d, own.1));
    let blocks = (own.0.description.block_size, own.1.description.block_size);
    let blocks = faults.list("block_sizes", said.block_sizes.as_ref(), blocks, |faults, pair| {
        let (p, d) = pair.each();
        let high = i64::from(MAX_BLOCK_SIZE);
        Some((faults.count("block_sizes", p, high), faults.count("block_sizes", d, high)))
    });
    let layouts = faults.list("layouts", said.layouts.as_ref(), (Layout::Own, Layout::Own), |faults, pair| {
        let (p, d) = pair.each();
        faults.layout(&p).zip(faults.layout(&d))
    });
    let usual = Way::of(s.transfer.mode, s.transfer.stream);
    let ways = faults.list("modes", said.modes.as_ref(), usual, |faults, name| faults.way(name, s.transfer.stream));
    let (number, settings) = number(said, s, &mut faults);
    if !faults.all.is_empty() {
        return Err(ScenarioErrors(faults.all));
    }
    let mut out = Vec::new();
    let (pcp_p, pcp_d) = (own.0.description.shape.pcp, own.1.description.shape.pcp);
    for p in &of_p {
        for d in &of_d {
            let ranks =
                (p.tp.saturating_mul(p.pp).saturating_mul(pcp_p), d.tp.saturating_mul(d.pp).saturating_mul(pcp_d));
            let engines = number.engines((ranks.0.max(1), ranks.1.max(1)));
            let more =
                engines.len().saturating_mul(blocks.len()).saturating_mul(layouts.len()).saturating_mul(ways.len());
            if out.len().saturating_add(more) > limit() {
                let got = format!("more than {MAX_CANDIDATES} candidates");
                let change = "shorten the lists, or sweep one part after the other";
                return Err(ScenarioError::Value {
                    file: file.into(),
                    key: "sweep".into(),
                    got,
                    change: change.into(),
                }
                .into());
            }
            for (block, layout) in blocks.iter().flat_map(|block| layouts.iter().map(move |layout| (block, layout))) {
                for (n_p, n_d) in &engines {
                    let side = |engines, sizes, block_size, layout| Engines { engines, sizes, block_size, layout };
                    let prefill = side(*n_p, *p, block.0, layout.0);
                    let decode = side(*n_d, *d, block.1, layout.1);
                    out.extend(ways.iter().map(|way| Candidate { prefill, decode, way: *way }));
                }
            }
        }
    }
    Ok((out, settings))
}

fn number(said: &SweepTable, s: &Scenario, faults: &mut Faults<'_>) -> (Number, Settings) {
    let gpus = |f: &Fleet| f.engines.saturating_mul(f.ranks);
    let own = gpus(&s.prefill).saturating_add(gpus(&s.decode));
    let list = said.gpus.as_ref().map(|gpus| match gpus {
        Budgets::One(n) => vec![*n],
        Budgets::List(list) => list.clone(),
    });
    let budgets = faults.counts("gpus", list.as_ref(), own, MAX_GPUS);
    let budget = budgets.iter().copied().max().unwrap_or(own);
    if budget > s.cluster.gpus() {
        let change = format!("the cluster has {}; let it have more nodes, or lower the budget", s.cluster.gpus());
        faults.value("gpus", budget, change);
    }
    let listed = (said.prefill_engines.as_ref(), said.decode_engines.as_ref());
    let number = if let (None, None) = listed {
        let usual = f64::from(gpus(&s.prefill)) / f64::from(own.max(1));
        let shares = faults.list("prefill_share", said.prefill_share.as_ref(), usual, |faults, share| {
            Some(faults.number("prefill_share", *share, (0.001, 0.999)))
        });
        Number::Fill { budgets, shares }
    } else {
        if said.prefill_share.is_some() || list.is_some_and(|list| list.len() > 1) {
            let change = "with prefill_engines or decode_engines there is no budget to fill: leave prefill_share out, and give one number of gpus";
            faults.value("gpus", "a choice", change);
        }
        Number::Listed(
            faults.counts("prefill_engines", listed.0, s.prefill.engines, MAX_ENGINES),
            faults.counts("decode_engines", listed.1, s.decode.engines, MAX_ENGINES),
        )
    };
    let share = said.gpu_memory.map_or(0.9, |share| faults.number("gpu_memory", share, (0.01, 1.0)));
    if said.gpu_memory.is_some() && said.weights_gib.is_none() {
        let change = "it goes with weights_gib; without, each GPU has kv_gib for the cache, whatever the shape";
        faults.value("gpu_memory", share, change);
    }
    let weights = said.weights_gib.map(|gib| (faults.number("weights_gib", gib, (0.001, 1e6)), share));
    let requests = said.requests.map(|n| u64::from(faults.count("requests", n, 4_000_000)));
    let settings =
        Settings { budget, weights, requests, fixed_times: said.fixed_times, allow_overload: said.allow_overload };
    (number, settings)
}
