//! What came of a candidate.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::answer::{Answer, LinkUse};

/// What a candidate does, if it works. Times in seconds. Rounded to nine digits, so that they are written and read without loss.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// GPUs of all engines.
    pub gpus: u32,
    /// From the end of the prefill until D may use the cache: half of the requests take at most so long.
    pub handover_p50: f64,
    /// 99 in 100.
    pub handover_p99: f64,
    /// From arrival until D has made a token.
    pub first_token_p50: f64,
    /// See `first_token_p50`.
    pub first_token_p99: f64,
    /// The mean share of its capacity that the fullest link uses.
    pub hot_link: f64,
    /// Which link that is.
    pub hot_link_name: String,
    /// Descriptors of a delivered request, on average.
    pub descriptors: f64,
    /// Bytes of a delivered request, on average.
    pub bytes: f64,
    /// The share of D's pools that is taken out at their fullest.
    pub pool: f64,
    /// The share of the load's span in which P's engines compute.
    pub prefill_busy: f64,
}

impl Figures {
    /// Those of an answer to a load of such a span.
    #[must_use]
    pub fn of(answer: &Answer, span: f64) -> Self {
        let time = |name: &str| answer.times.iter().find(|t| t.name == name);
        let at = |name: &str| time(name).map_or((0.0, 0.0), |t| (digits(t.p50), digits(t.p99)));
        let (handover, first_token) = (at("handover"), at("time to first token"));
        let each = |sum: u64| digits(sum as f64 / answer.requests.delivered.max(1) as f64);
        let hot = LinkUse::busiest(&answer.links);
        let busy = time("prefill").map_or(0.0, |t| t.mean * t.count as f64) / f64::from(answer.prefill.engines.max(1));
        Self {
            gpus: answer.prefill.gpus.saturating_add(answer.decode.gpus),
            handover_p50: handover.0,
            handover_p99: handover.1,
            first_token_p50: first_token.0,
            first_token_p99: first_token.1,
            hot_link: digits(hot.map_or(0.0, |l| l.mean)),
            hot_link_name: hot.map_or_else(String::new, |l| l.name.clone()),
            descriptors: each(answer.requests.descriptors),
            bytes: each(answer.requests.bytes),
            pool: digits(answer.pools.peak_used as f64 / answer.pools.capacity.max(1) as f64),
            prefill_busy: if span > 0.0 { digits(busy / span) } else { 0.0 },
        }
    }
}

/// Nine digits of a number.
fn digits(value: f64) -> f64 {
    format!("{value:.8e}").parse().unwrap_or(0.0)
}

/// Why a candidate does not work.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Its engines need more GPUs than there are.
    Gpus,
    /// A GPU's memory holds no cache beside the weights.
    Memory,
    /// An engine's description is faulty: a model can't be cut so.
    Engine,
    /// D can't take over P's caches: what a handshake says.
    Mismatch,
    /// There is no map of peers, or no plan.
    Peers,
    /// A request doesn't fit into an engine's blocks.
    Pool,
    /// A request can't be served.
    Request,
    /// More is asked of P, of a link or of D's pools than they have.
    Overload,
}

impl Kind {
    /// As JSON writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpus => "gpus",
            Self::Memory => "memory",
            Self::Engine => "engine",
            Self::Mismatch => "mismatch",
            Self::Peers => "peers",
            Self::Pool => "pool",
            Self::Request => "request",
            Self::Overload => "overload",
        }
    }
}

/// A reason, in the words of what found it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Reason {
    /// Which kind.
    pub kind: Kind,
    /// The words.
    pub text: String,
}

impl Reason {
    pub(super) fn new(kind: Kind, text: impl ToString) -> Self {
        Self { kind, text: text.to_string() }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.text)
    }
}

/// What came of a candidate.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It works.
    Feasible(Figures),
    /// It does not: every reason that was found before nothing more could be asked.
    Infeasible(Vec<Reason>),
}
