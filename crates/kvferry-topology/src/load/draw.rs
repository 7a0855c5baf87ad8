//! Arrivals, lengths and hits by chance.
//!
//! Everything is a function of the seed. Logarithms and cosines are the standard library's, whose last bit may differ between
//! platforms: a seed gives the same load on the same platform, and one that differs by nanoseconds on another.

use std::f64::consts::TAU;
use std::time::Duration;

use kvferry_sim::rng::Rng;

use super::{Load, LoadRequest, MAX_TOKENS, Prefix, seconds};
use crate::number::{cut, nearest};

/// When requests arrive.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arrivals {
    /// One after the other in equal steps, the first at once.
    Constant {
        /// Requests a second.
        per_s: f64,
    },
    /// Independent of each other.
    Poisson {
        /// Requests a second, on average.
        per_s: f64,
    },
    /// Times between two arrivals are gamma-distributed: in bursts where `cv` is more than 1, more even than Poisson below it.
    Gamma {
        /// Requests a second, on average.
        per_s: f64,
        /// Standard deviation of the time between two arrivals over its mean; 1 is Poisson.
        cv: f64,
    },
}

impl Arrivals {
    /// Requests a second, on average.
    #[must_use]
    pub fn per_s(&self) -> f64 {
        let (Self::Constant { per_s } | Self::Poisson { per_s } | Self::Gamma { per_s, .. }) = *self;
        per_s
    }

    /// The time to the next arrival, in seconds.
    pub fn gap(&self, rng: &mut Rng) -> f64 {
        match *self {
            Self::Constant { per_s } => per_s.recip(),
            Self::Poisson { per_s } => exponential(rng) / per_s,
            Self::Gamma { per_s, cv } => {
                let shape = (cv * cv).recip();
                gamma(rng, shape) / (shape * per_s)
            }
        }
    }
}

/// How many tokens.
#[derive(Clone, PartialEq, Debug)]
pub enum Length {
    /// Always the same.
    Fixed(u64),
    /// Each number from `low` to `high` as often as any other.
    Uniform {
        /// The least.
        low: u64,
        /// The most.
        high: u64,
    },
    /// The logarithm is normally distributed.
    LogNormal {
        /// Half are at most this.
        median: f64,
        /// All but one in a hundred are at most this, before `most`.
        p99: f64,
        /// What is longer is cut to this.
        most: u64,
    },
    /// One of a list, each entry as often as any other.
    Empirical(Box<[u64]>),
}

impl Length {
    /// One of them, from 1 to [`MAX_TOKENS`].
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        let tokens = match self {
            Self::Fixed(n) => *n,
            Self::Uniform { low, high } => rng.between(*low, *high),
            Self::LogNormal { median, p99, most } => {
                let sigma = (p99 / median).ln() / Z99;
                nearest((median.ln() + sigma * normal(rng)).exp()).min(*most)
            }
            Self::Empirical(list) => rng.pick(list).copied().unwrap_or(1),
        };
        tokens.clamp(1, MAX_TOKENS)
    }
}

/// Where the standard normal distribution has 99 % below it.
const Z99: f64 = 2.326_347_874_040_841;

/// How much of a prompt one kind of engine has already.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hits {
    /// How many requests have a hit at all, from 0 to 1.
    pub chance: f64,
    /// Which share of the prompt it then is, from 0 to 1; rounded down to tokens.
    pub share: f64,
}

impl Hits {
    /// None.
    pub const NONE: Self = Self { chance: 0.0, share: 0.0 };

    /// Whether there are none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.chance <= 0.0 || self.share <= 0.0
    }

    /// The hit of one prompt.
    pub fn draw(&self, prompt: u64, rng: &mut Rng) -> u64 {
        if unit(rng) > self.chance { 0 } else { cut(prompt as f64 * self.share).min(prompt) }
    }
}

/// Draws a load.
pub(crate) fn load(requests: u64, arrivals: Arrivals, prompt: &Length, output: &Length, seed: u64) -> Load {
    let [mut gaps, mut prompts, mut outputs] = [1, 2, 3].map(|what| Rng::of(&[seed, LOAD, what]));
    let mut at = 0.0;
    let requests = (0..requests)
        .map(|i| {
            if i > 0 || !matches!(arrivals, Arrivals::Constant { .. }) {
                at += arrivals.gap(&mut gaps);
            }
            let (prompt, output) = (prompt.draw(&mut prompts), output.draw(&mut outputs));
            LoadRequest { at: seconds(at), prompt, output, prefix: Prefix::None }
        })
        .collect();
    Load { requests, notes: Vec::new() }
}

/// Gives every request its hits.
pub(crate) fn hits(load: &mut Load, prefill: Hits, decode: Hits, seed: u64) {
    if prefill.is_none() && decode.is_none() {
        return;
    }
    let [mut at_prefill, mut at_decode] = [4, 5].map(|what| Rng::of(&[seed, LOAD, what]));
    for request in &mut load.requests {
        let prefill = prefill.draw(request.prompt, &mut at_prefill);
        let decode = decode.draw(request.prompt, &mut at_decode);
        request.prefix = Prefix::Hit { prefill, decode };
    }
}

/// Sets a load's generators apart from everybody else's.
const LOAD: u64 = 0x6c6f_6164;

/// A number above 0, up to 1, in steps of 2⁻⁵³.
pub fn unit(rng: &mut Rng) -> f64 {
    const STEP: f64 = 1.0 / (1_u64 << 53) as f64;
    ((rng.word() >> 11) + 1) as f64 * STEP
}

/// Exponentially distributed with mean 1.
pub fn exponential(rng: &mut Rng) -> f64 {
    -unit(rng).ln()
}

/// Normally distributed with mean 0 and deviation 1, by Box and Muller (Annals of Mathematical Statistics 29, 1958).
pub fn normal(rng: &mut Rng) -> f64 {
    (2.0 * exponential(rng)).sqrt() * (TAU * unit(rng)).cos()
}

/// Gamma-distributed with this shape and scale 1, by Marsaglia and Tsang (ACM Transactions on Mathematical Software 26, 2000); below
/// shape 1 by theirs of a shape one higher, times `u^(1/shape)`.
pub fn gamma(rng: &mut Rng, shape: f64) -> f64 {
    if shape < 1.0 {
        let above = gamma(rng, shape + 1.0);
        return above * unit(rng).powf(shape.recip());
    }
    let d = shape - 1.0 / 3.0;
    let c = (9.0 * d).sqrt().recip();
    // Nineteen of twenty tries and more are taken, so that the bound is never met.
    for _ in 0..1_000 {
        let x = normal(rng);
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && unit(rng).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
    d
}

/// A time of a trace `speed` times as fast.
pub(crate) fn faster(time: Duration, speed: f64) -> Duration {
    if (speed - 1.0).abs() < f64::EPSILON { time } else { seconds(time.as_secs_f64() / speed) }
}
