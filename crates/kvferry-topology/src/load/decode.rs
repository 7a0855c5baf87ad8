//! How long D takes for a token.

use std::time::Duration;

use super::curve::Curve;
use super::roofline::Roofline;
use super::seconds;

/// How long a step takes that makes one token for every running sequence.
#[derive(Clone, PartialEq, Debug)]
pub enum DecodeModel {
    /// Always the same.
    Constant {
        /// Seconds.
        s: f64,
    },
    /// Measured over the number of running sequences; below the first point as at the first.
    Table(Curve),
    /// Arithmetic and memory traffic of the model.
    Roofline {
        /// What they are.
        roofline: Roofline,
        /// Seconds for each step.
        fixed_s: f64,
    },
}

impl DecodeModel {
    /// The time of one step: `running` sequences (one at least) that have `context` tokens together.
    #[must_use]
    pub fn step(&self, running: u64, context: u64) -> Duration {
        let running = running.max(1);
        seconds(match self {
            Self::Constant { s } => *s,
            Self::Table(curve) => curve.at((running as f64).max(curve.first())),
            Self::Roofline { roofline, fixed_s } => fixed_s + roofline.step(running, context),
        })
    }
}
