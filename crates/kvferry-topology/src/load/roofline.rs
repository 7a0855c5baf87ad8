//! The roofline: a step takes as long as its arithmetic or its memory traffic, whichever is more.
//!
//! It counts no collective, no kernel launch and no bubble: that is what the efficiencies and the fixed time stand for.

use super::MAX_TOKENS;
use super::fault::{Fault, Faults};

/// An engine as far as its speed goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EngineFigures<'a> {
    /// The model's name; the figures of [`figures`](super::figures) are found by it.
    pub model: &'a str,
    /// The model's layers.
    pub layers: u32,
    /// GPUs that work on one step at the same time: those of one pipeline stage, unless chunks fill all stages.
    pub gpus: u32,
    /// Dense arithmetic of one GPU in 10¹² operations a second, in the type that the model is computed in.
    pub tflops: f64,
    /// Memory traffic of one GPU in 10⁹ bytes a second.
    pub hbm_gb_s: f64,
    /// Bytes of the cache for one token, over all of the engine's ranks.
    pub bytes_per_token: f64,
    /// Bytes of the recurrent states of one sequence, over all ranks.
    pub bytes_per_state: f64,
}

/// Layers whose attention costs the same.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attention {
    /// How many layers.
    pub layers: u32,
    /// Heads of the queries.
    pub heads: u32,
    /// Values of a head's query and key.
    pub qk_dim: u32,
    /// Values of a head's value; 0 for an indexer, which only scores.
    pub v_dim: u32,
    /// The most tokens that one token reads: a window, or what an indexer picks. `None`: all before it.
    pub most: Option<u64>,
}

impl Attention {
    /// Operations for each token that a token reads: a multiplication and an addition for each value of the key and of the value.
    fn each(&self) -> f64 {
        2.0 * f64::from(self.layers) * f64::from(self.heads) * (f64::from(self.qk_dim) + f64::from(self.v_dim))
    }

    /// Tokens that `new` tokens after `context` others read, each also itself.
    fn reads(&self, new: u64, context: u64) -> f64 {
        let most = self.most.unwrap_or(u64::MAX);
        let growing = most.saturating_sub(context).min(new);
        let (n, c) = (growing as f64, context as f64);
        let full = new.saturating_sub(growing);
        let rest = if full == 0 { 0.0 } else { full as f64 * most as f64 };
        n * c + n * (n + 1.0) / 2.0 + rest
    }

    /// Operations of `new` tokens after `context` others.
    #[must_use]
    pub fn flops(&self, new: u64, context: u64) -> f64 {
        self.each() * self.reads(new, context)
    }
}

/// A model's steps on an engine.
#[derive(Clone, PartialEq, Debug)]
pub struct Roofline {
    /// Parameters that one token meets.
    pub active_params: f64,
    /// All parameters.
    pub params: f64,
    /// Bytes of one.
    pub weight_bytes: f64,
    /// Where attention costs more the longer the context is.
    pub attention: Vec<Attention>,
    /// Operations a second that are reached, over all GPUs.
    pub flops_per_s: f64,
    /// Bytes a second that are reached, over all GPUs.
    pub bytes_per_s: f64,
    /// Bytes of the cache for one token.
    pub bytes_per_token: f64,
    /// Bytes of the states of one sequence.
    pub bytes_per_state: f64,
}

impl Roofline {
    /// Bytes of weights that a step of so many tokens reads: `params * (1 - (1 - active / params)^tokens)`, each once. Exact for one
    /// token and for many, and for dense models; between them as if every parameter were an expert's, and experts picked evenly.
    #[must_use]
    pub fn weights(&self, tokens: f64) -> f64 {
        let idle = (1.0 - self.active_params / self.params).max(0.0);
        self.params * (1.0 - idle.powf(tokens)) * self.weight_bytes
    }

    /// Operations of `new` tokens after `context` others: two for each active parameter and token, and the attention's.
    #[must_use]
    pub fn flops(&self, new: u64, context: u64) -> f64 {
        let attention: f64 = self.attention.iter().map(|a| a.flops(new, context)).sum();
        2.0 * self.active_params * new as f64 + attention
    }

    /// Seconds of one chunk of a prompt: weights and the cache of the context are read once, and that of the chunk is written.
    #[must_use]
    pub fn chunk(&self, new: u64, context: u64) -> f64 {
        let cache = self.bytes_per_token * (context as f64 + new as f64);
        self.slower(self.flops(new, context), self.weights(new as f64) + cache)
    }

    /// Seconds of one step that makes a token for each of `running` sequences with `context` tokens together: weights are read once,
    /// all their caches, and their states are read and written.
    #[must_use]
    pub fn step(&self, running: u64, context: u64) -> f64 {
        let each = context.checked_div(running).unwrap_or(0);
        let flops = self.flops(1, each) * running as f64;
        let cache = self.bytes_per_token * context as f64 + 2.0 * self.bytes_per_state * running as f64;
        self.slower(flops, self.weights(running as f64) + cache)
    }

    fn slower(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.flops_per_s).max(bytes / self.bytes_per_s)
    }
}

/// What the scenario says of a roofline; what it leaves out is the preset's or the cluster's.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RooflineSpec {
    pub(crate) active_params: Option<f64>,
    pub(crate) params: Option<f64>,
    pub(crate) weight_bytes: Option<f64>,
    pub(crate) attention: Option<Vec<Attention>>,
    pub(crate) tflops: Option<f64>,
    pub(crate) hbm_gb_s: Option<f64>,
    pub(crate) efficiency: f64,
    pub(crate) hbm_efficiency: f64,
}

impl RooflineSpec {
    /// The roofline of an engine; `key` is the table's, `decode` whether it makes tokens one by one.
    pub(crate) fn of(
        &self,
        key: &str,
        engine: &EngineFigures<'_>,
        decode: bool,
        faults: &mut Faults,
    ) -> Option<Roofline> {
        let known = super::figures::of(engine.model);
        let active = self.active_params.or(known.map(|k| k.active_params()));
        let attention = self.attention.clone().or_else(|| known.map(|k| k.attention(decode)));
        if active.is_none() || attention.is_none() {
            let hint = format!("there are no figures of the model {:?} here; say it, or measure times", engine.model);
            for (name, missing) in [("active_params_b", active.is_none()), ("attention", attention.is_none())] {
                if missing {
                    faults.missing(format!("{key}.roofline.{name}"), &hint);
                }
            }
            return None;
        }
        let (active_params, attention) = (active?, attention?);
        // Who states the active parameters alone has a dense model, or one of the same total.
        let total = known.filter(|_| self.active_params.is_none()).map(|k| k.params());
        let params = self.params.or(total).unwrap_or(active_params);
        if params < active_params {
            let fault = format!("is {} billion, less than the {} billion active", params / 1e9, active_params / 1e9);
            faults.push(format!("{key}.roofline.params_b"), Fault::Conflict(fault));
        }
        let weight_bytes = self.weight_bytes.or(known.map(|k| k.weight_bytes)).unwrap_or(2.0);
        let hint = "the cluster states none for this GPU: say it";
        let mut machine = |name: &str, own: Option<f64>, of_cluster: f64| {
            let value = own.unwrap_or(of_cluster);
            if value.is_finite() && value > 0.0 {
                return Some(value);
            }
            faults.missing(format!("{key}.roofline.{name}"), hint);
            None
        };
        let tflops = machine("tflops", self.tflops, engine.tflops);
        let hbm_gb_s = machine("hbm_gb_s", self.hbm_gb_s, engine.hbm_gb_s);
        let gpus = f64::from(engine.gpus.max(1));
        Some(Roofline {
            active_params,
            params,
            weight_bytes,
            attention,
            flops_per_s: gpus * tflops? * 1e12 * self.efficiency,
            bytes_per_s: gpus * hbm_gb_s? * 1e9 * self.hbm_efficiency,
            bytes_per_token: engine.bytes_per_token.max(0.0),
            bytes_per_state: engine.bytes_per_state.max(0.0),
        })
    }
}

/// The most tokens of a window.
pub(crate) const MAX_WINDOW: u64 = MAX_TOKENS;
