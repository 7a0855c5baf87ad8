//! The scenario's `[prefill.time]` and `[decode.time]` tables.

use serde::Deserialize;

use super::MAX_TOKENS;
use super::curve::Curve;
use super::decode::DecodeModel;
use super::fault::{Fault, Faults, LoadErrors};
use super::prefill::{PrefillModel, PrefillTime};
use super::roofline::{Attention, EngineFigures, MAX_WINDOW, RooflineSpec};

/// Tokens of a chunk unless said otherwise.
pub const DEFAULT_CHUNK: u64 = 8_192;
/// The share of a GPU's arithmetic that is reached unless said otherwise.
pub const DEFAULT_EFFICIENCY: f64 = 0.5;
/// The share of a GPU's memory traffic that is reached unless said otherwise.
pub const DEFAULT_HBM_EFFICIENCY: f64 = 0.8;
/// The least tokens of a chunk.
const MIN_CHUNK: u64 = 128;
/// The most sequences that run at the same time.
const MAX_RUNNING: u64 = 1 << 20;
/// The most kinds of attention that are listed, and the most layers with weights.
const MAX_LIST: usize = 1_024;
/// The longest fixed time, in milliseconds.
const MAX_FIXED_MS: f64 = 1e6;

const PREFILL: &str = "prefill.time";
const DECODE: &str = "decode.time";

/// The `[prefill.time]` table as it stands in the file. Values are looked at by [`check`](Self::check).
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillTable {
    tokens_per_s: Option<f64>,
    table_ms: Option<Vec<[f64; 2]>>,
    roofline: Option<RooflineTable>,
    fixed_ms: Option<f64>,
    chunk_tokens: Option<i64>,
    layer_weights: Option<Vec<f64>>,
}

/// The `[decode.time]` table as it stands in the file. Values are looked at by [`check`](Self::check).
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeTable {
    ms_per_token: Option<f64>,
    table_ms: Option<Vec<[f64; 2]>>,
    roofline: Option<RooflineTable>,
    fixed_ms: Option<f64>,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RooflineTable {
    active_params_b: Option<f64>,
    params_b: Option<f64>,
    weight_bytes: Option<f64>,
    attention: Option<Vec<AttentionTable>>,
    tflops: Option<f64>,
    hbm_gb_s: Option<f64>,
    efficiency: Option<f64>,
    hbm_efficiency: Option<f64>,
}

#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AttentionTable {
    layers: i64,
    heads: i64,
    head_dim: Option<i64>,
    qk_dim: Option<i64>,
    v_dim: Option<i64>,
    most_tokens: Option<i64>,
}

/// How long a prefill takes, before the engine is known.
#[derive(Clone, PartialEq, Debug)]
pub struct PrefillSpec {
    way: Way,
    chunk: u64,
    fixed_s: f64,
    weights: Vec<f64>,
}

/// How long a token takes, before the engine is known.
#[derive(Clone, PartialEq, Debug)]
pub struct DecodeSpec {
    way: Way,
    fixed_s: f64,
}

#[derive(Clone, PartialEq, Debug)]
enum Way {
    /// Tokens a second of a prefill, or seconds a token.
    Number(f64),
    Table(Curve),
    Roofline(RooflineSpec),
}

impl PrefillTable {
    /// The table's meaning. An empty one is the roofline of the model's preset.
    ///
    /// # Errors
    /// Every fault of its values, with their keys.
    pub fn check(&self) -> Result<PrefillSpec, LoadErrors> {
        let mut faults = Faults::default();
        let rate = self.tokens_per_s.map(|rate| (rate, 1e-3, 1e9));
        let way = way(
            PREFILL,
            ("tokens_per_s", rate),
            (self.table_ms.as_deref(), MAX_TOKENS),
            self.roofline.as_ref(),
            &mut faults,
        );
        let fixed = fixed(PREFILL, self.fixed_ms, &mut faults);
        let key = format!("{PREFILL}.chunk_tokens");
        let chunk = match (self.chunk_tokens, &way) {
            (Some(_), Some(Way::Number(_) | Way::Table(_))) => {
                let fault = "is for the roofline, and the times are stated; leave it out";
                faults.push(key, Fault::Conflict(fault.into()));
                None
            }
            (Some(n), _) => faults.count(key, n, MIN_CHUNK, MAX_TOKENS),
            (None, _) => Some(DEFAULT_CHUNK),
        };
        let weights = self.layer_weights.as_deref().map_or(Some(Vec::new()), |w| weights(w, &mut faults));
        let spec = match (way, chunk, fixed, weights) {
            (Some(way), Some(chunk), Some(fixed_s), Some(weights)) => {
                Some(PrefillSpec { way, chunk, fixed_s, weights })
            }
            _ => None,
        };
        faults.finish(spec)
    }
}

impl DecodeTable {
    /// The table's meaning. An empty one is the roofline of the model's preset.
    ///
    /// # Errors
    /// Every fault of its values, with their keys.
    pub fn check(&self) -> Result<DecodeSpec, LoadErrors> {
        let mut faults = Faults::default();
        let constant = self.ms_per_token.map(|ms| (ms, 1e-3, 1e6));
        let way = way(
            DECODE,
            ("ms_per_token", constant),
            (self.table_ms.as_deref(), MAX_RUNNING),
            self.roofline.as_ref(),
            &mut faults,
        );
        let fixed_s = match (self.fixed_ms, &way) {
            (Some(_), Some(Way::Number(_) | Way::Table(_))) => {
                let fault = "is for the roofline, and the times are stated; leave it out";
                faults.push(format!("{DECODE}.fixed_ms"), Fault::Conflict(fault.into()));
                None
            }
            (ms, _) => fixed(DECODE, ms, &mut faults),
        };
        faults.finish(way.zip(fixed_s).map(|(way, fixed_s)| DecodeSpec { way, fixed_s }))
    }
}

impl PrefillSpec {
    /// The times of an engine.
    ///
    /// # Errors
    /// Figures that neither the scenario, the preset nor the cluster states; weights for another number of layers.
    pub fn model(&self, engine: &EngineFigures<'_>) -> Result<PrefillModel, LoadErrors> {
        let mut faults = Faults::default();
        if !self.weights.is_empty() && self.weights.len() != engine.layers as usize {
            let fault = format!(
                "has {} numbers, but the model {} layers; give one for each",
                self.weights.len(),
                engine.layers
            );
            faults.push(format!("{PREFILL}.layer_weights"), Fault::Conflict(fault));
        }
        let fixed_s = self.fixed_s;
        let time =
            match &self.way {
                Way::Number(tokens_per_s) => Some(PrefillTime::Rate { tokens_per_s: *tokens_per_s, fixed_s }),
                Way::Table(curve) => Some(PrefillTime::Table { curve: curve.clone(), fixed_s }),
                Way::Roofline(spec) => spec
                    .of(PREFILL, engine, false, &mut faults)
                    .map(|roofline| PrefillTime::Roofline { roofline, chunk: self.chunk, fixed_s }),
            };
        faults.finish(time.map(|time| PrefillModel { time, weights: self.weights.clone() }))
    }
}

impl DecodeSpec {
    /// The times of an engine.
    ///
    /// # Errors
    /// Figures that neither the scenario, the preset nor the cluster states.
    pub fn model(&self, engine: &EngineFigures<'_>) -> Result<DecodeModel, LoadErrors> {
        let mut faults = Faults::default();
        let model = match &self.way {
            Way::Number(ms) => Some(DecodeModel::Constant { s: ms / 1e3 }),
            Way::Table(curve) => Some(DecodeModel::Table(curve.clone())),
            Way::Roofline(spec) => spec
                .of(DECODE, engine, true, &mut faults)
                .map(|roofline| DecodeModel::Roofline { roofline, fixed_s: self.fixed_s }),
        };
        faults.finish(model)
    }
}

/// Which of the three ways a table says; the roofline if none.
fn way(
    key: &str,
    (name, number): (&str, Option<(f64, f64, f64)>),
    (table, most): (Option<&[[f64; 2]]>, u64),
    roofline: Option<&RooflineTable>,
    faults: &mut Faults,
) -> Option<Way> {
    let said = [number.is_some(), table.is_some(), roofline.is_some()];
    if said.iter().filter(|s| **s).count() > 1 {
        let fault = format!("has more than one of `{name}`, `table_ms` and `roofline`; keep one");
        faults.push(key, Fault::Conflict(fault));
        return None;
    }
    if let Some((got, low, high)) = number {
        return faults.number(format!("{key}.{name}"), got, low, high).map(Way::Number);
    }
    if let Some(pairs) = table {
        return Curve::check(&format!("{key}.table_ms"), pairs, most, faults).map(Way::Table);
    }
    let table = RooflineTable::default();
    roofline.unwrap_or(&table).check(&format!("{key}.roofline"), faults).map(Way::Roofline)
}

fn fixed(key: &str, ms: Option<f64>, faults: &mut Faults) -> Option<f64> {
    faults.number(format!("{key}.fixed_ms"), ms.unwrap_or(0.0), 0.0, MAX_FIXED_MS).map(|ms| ms / 1e3)
}

fn weights(list: &[f64], faults: &mut Faults) -> Option<Vec<f64>> {
    let key = format!("{PREFILL}.layer_weights");
    if !(1..=MAX_LIST).contains(&list.len()) {
        let fault = format!("has {} numbers; it must have one for each layer, 1 to {MAX_LIST}", list.len());
        faults.push(key, Fault::Conflict(fault));
        return None;
    }
    let number = |(i, w): (usize, &f64)| faults.number(format!("{key}[{i}]"), *w, 1e-6, 1e6);
    list.iter().enumerate().map(number).collect::<Vec<_>>().into_iter().collect()
}

impl RooflineTable {
    fn check(&self, key: &str, faults: &mut Faults) -> Option<RooflineSpec> {
        let mut fine = true;
        let mut number = |name: &str, got: Option<f64>, low: f64, high: f64| {
            let got = got?;
            let value = faults.number(format!("{key}.{name}"), got, low, high);
            fine &= value.is_some();
            value
        };
        let billion = 1e9;
        let mut spec = RooflineSpec {
            active_params: number("active_params_b", self.active_params_b, 1e-3, 1e5).map(|b| b * billion),
            params: number("params_b", self.params_b, 1e-3, 1e5).map(|b| b * billion),
            weight_bytes: number("weight_bytes", self.weight_bytes, 0.1, 8.0),
            attention: None,
            tflops: number("tflops", self.tflops, 1e-3, 1e6),
            hbm_gb_s: number("hbm_gb_s", self.hbm_gb_s, 1e-3, 1e6),
            efficiency: number("efficiency", self.efficiency, 1e-3, 1.0).unwrap_or(DEFAULT_EFFICIENCY),
            hbm_efficiency: number("hbm_efficiency", self.hbm_efficiency, 1e-3, 1.0).unwrap_or(DEFAULT_HBM_EFFICIENCY),
        };
        if let Some(list) = &self.attention {
            let key = format!("{key}.attention");
            if list.len() > MAX_LIST {
                let change = "put layers that are alike into one entry";
                faults.push(key, Fault::TooMany { what: "entries", limit: MAX_LIST as u64, change });
                return None;
            }
            let kinds = list.iter().enumerate().map(|(i, a)| a.check(&format!("{key}[{i}]"), faults));
            spec.attention = Some(kinds.collect::<Vec<_>>().into_iter().collect::<Option<_>>()?);
        }
        fine.then_some(spec)
    }
}

impl AttentionTable {
    fn check(&self, key: &str, faults: &mut Faults) -> Option<Attention> {
        let layers = faults.count(format!("{key}.layers"), self.layers, 1, 1_024);
        let heads = faults.count(format!("{key}.heads"), self.heads, 1, 1 << 16);
        let mut dim = |name: &str, own: Option<i64>, low: u64| match (own, self.head_dim) {
            (Some(_), Some(_)) => {
                let fault = "stands beside `head_dim`, which says both; keep one";
                faults.push(format!("{key}.{name}"), Fault::Conflict(fault.into()));
                None
            }
            (Some(n), None) => faults.count(format!("{key}.{name}"), n, low, 1 << 16),
            (None, Some(n)) => faults.count(format!("{key}.head_dim"), n, 1, 1 << 16),
            (None, None) => {
                faults.missing(format!("{key}.{name}"), "say `head_dim`, or `qk_dim` and `v_dim`");
                None
            }
        };
        let qk_dim = dim("qk_dim", self.qk_dim, 1);
        let v_dim = dim("v_dim", self.v_dim, 0);
        let most = match self.most_tokens {
            Some(n) => Some(faults.count(format!("{key}.most_tokens"), n, 1, MAX_WINDOW)?),
            None => None,
        };
        let small = |n: u64| u32::try_from(n).ok();
        Some(Attention {
            layers: small(layers?)?,
            heads: small(heads?)?,
            qk_dim: small(qk_dim?)?,
            v_dim: small(v_dim?)?,
            most,
        })
    }
}
