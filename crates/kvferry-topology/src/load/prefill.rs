//! How long P computes on a prompt, and when each layer of it is done.

use std::time::Duration;

use super::curve::Curve;
use super::roofline::Roofline;
use super::seconds;

/// How long a prefill takes.
#[derive(Clone, PartialEq, Debug)]
pub struct PrefillModel {
    /// What it is computed from.
    pub time: PrefillTime,
    /// How much of a step each layer takes, relative to the others; empty: all the same.
    pub(crate) weights: Vec<f64>,
}

/// What the time of a prefill is computed from.
#[derive(Clone, PartialEq, Debug)]
pub enum PrefillTime {
    /// So many tokens a second after a fixed time, whatever the context.
    Rate {
        /// Tokens a second.
        tokens_per_s: f64,
        /// Seconds for each prompt.
        fixed_s: f64,
    },
    /// A measured curve of prompts without any hit.
    Table {
        /// Seconds over tokens.
        curve: Curve,
        /// Seconds for each prompt beside it.
        fixed_s: f64,
    },
    /// Arithmetic and memory traffic of the model.
    Roofline {
        /// What they are.
        roofline: Roofline,
        /// The prompt is computed in chunks of so many tokens.
        chunk: u64,
        /// Seconds for each chunk.
        fixed_s: f64,
    },
}

impl PrefillModel {
    /// One with all layers alike.
    #[must_use]
    pub fn new(time: PrefillTime) -> Self {
        Self { time, weights: Vec::new() }
    }

    /// The time for `new` tokens whose prompt has `context` tokens before them that are cached.
    ///
    /// By rate the context costs nothing. By a table it is what the curve rises from `context` to `context + new`, and what the curve
    /// begins with: that is right for a curve of whole prompts, since the last tokens of a long one are what it rises by. By
    /// roofline each chunk attends to all before it.
    #[must_use]
    pub fn time(&self, new: u64, context: u64) -> Duration {
        seconds(match &self.time {
            PrefillTime::Rate { tokens_per_s, fixed_s } => fixed_s + new as f64 / tokens_per_s,
            PrefillTime::Table { curve, fixed_s } => {
                let (from, to) = (context as f64, context as f64 + new as f64);
                fixed_s + curve.at(to) - curve.at(from) + curve.at(0.0)
            }
            PrefillTime::Roofline { roofline, chunk, fixed_s } => {
                let chunk = (*chunk).max(1);
                let whole: f64 =
                    (0..new / chunk).map(|i| fixed_s + roofline.chunk(chunk, context.saturating_add(i * chunk))).sum();
                match new % chunk {
                    0 if new > 0 => whole,
                    rest => whole + fixed_s + roofline.chunk(rest, context.saturating_add(new - rest)),
                }
            }
        })
    }

    /// The share of a step's time that one layer of so many takes, counted from 0; those of all layers make 1.
    #[must_use]
    pub fn layer_share(&self, layer: u32, layers: u32) -> f64 {
        if layer >= layers {
            return 0.0;
        }
        match self.weights.get(layer as usize) {
            Some(weight) if self.weights.len() == layers as usize => weight / self.weights.iter().sum::<f64>(),
            _ => f64::from(layers).recip(),
        }
    }

    /// When each of so many layers is done, as a share of the step's time: rising, the last 1.
    #[must_use]
    pub fn layer_ends(&self, layers: u32) -> Vec<f64> {
        let mut done = 0.0;
        let mut ends: Vec<f64> = (0..layers)
            .map(|layer| {
                done += self.layer_share(layer, layers);
                f64::min(done, 1.0)
            })
            .collect();
        if let Some(last) = ends.last_mut() {
            *last = 1.0;
        }
        ends
    }
}
