//! What a simulation says: one format for both engines, and the JSON of `cargo xtask sim --json`.
//!
//! Times are seconds, sizes bytes, rates bytes a second. A list that may be long is cut off at a stated length, and says so.

use serde::{Deserialize, Serialize};

/// Everything that a simulation found out.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    /// The scenario's name.
    pub scenario: String,
    /// `"analytic"` or `"events"`.
    pub engine: String,
    /// What all chance came from.
    pub seed: u64,
    /// The two kinds of engines.
    pub prefill: Side,
    /// See `prefill`.
    pub decode: Side,
    /// `"pull"` or `"push"`.
    pub mode: String,
    /// `"none"`, `"layers"` or `"chunks"`.
    pub stream: String,
    /// From the first arrival to the last end, in seconds.
    pub span: f64,
    /// How requests ended.
    pub requests: Requests,
    /// Times of requests, by name, in the order of [`TIMES`].
    pub times: Vec<Times>,
    /// The same load with the other way of streaming, if that was asked for: its time to first token.
    pub compared: Vec<Compared>,
    /// What goes from which rank to which.
    pub traffic: Traffic,
    /// Every link that carried anything, the [fullest](LinkUse::fullest) first.
    pub links: Vec<LinkUse>,
    /// Sizes of what a transport is given, before and after neighbours are joined.
    pub descriptors: Descriptors,
    /// Blocks of D's engines over time.
    pub pools: Pools,
    /// One request in detail.
    pub gantt: Option<Gantt>,
    /// What an operator should change, the worst first.
    pub warnings: Vec<Warning>,
    /// What the simulation itself took.
    pub cost: Cost,
}

/// One kind of engine.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Side {
    /// The model.
    pub model: String,
    /// Its parallel sizes, as `tp=8,pp=2`.
    pub shape: String,
    /// How many engines.
    pub engines: u32,
    /// Ranks of one engine.
    pub ranks: u32,
    /// GPUs of all engines.
    pub gpus: u32,
    /// Tokens of a scheduler's block of the first paged group.
    pub block_tokens: u64,
    /// The layout's name.
    pub layout: String,
    /// Bytes of the cache that a token takes, over all layers, each byte counted once.
    pub bytes_per_token: u64,
    /// Bytes of the states of a sequence, each counted once.
    pub bytes_per_state: u64,
}

/// How many requests ended how.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Requests {
    /// All.
    pub all: u64,
    /// Delivered.
    pub delivered: u64,
    /// Not delivered: by cause, with how many.
    pub failed: Vec<(String, u64)>,
    /// Prompt tokens of all.
    pub prompt_tokens: u64,
    /// Of those, tokens that P had in its prefix cache.
    pub hit_tokens: u64,
    /// Of those, tokens that D had.
    pub decode_hit_tokens: u64,
    /// Bytes delivered.
    pub bytes: u64,
    /// Bytes that went over a wire, retries and zeroed tails of blocks included.
    pub wire_bytes: u64,
    /// Descriptors that transports were given for them.
    #[serde(default)]
    pub descriptors: u64,
    /// Messages between owners, and between owners and ranks; 0 where the engine does not count them.
    pub messages: u64,
}

/// The names of [`Answer::times`].
pub const TIMES: [&str; 8] = [
    // From arrival until the prefill begins.
    "prefill queue",
    "prefill",
    // From the end of the prefill until the first byte is asked for (D has no blocks, admission, bind).
    "transfer queue",
    // From the first byte posted to the last visible.
    "wire",
    // From the end of the prefill until D may use the cache: what the handover costs.
    "handover",
    // From arrival until D has made one token.
    "time to first token",
    // Tokens after the first.
    "decode",
    // From the end of the prefill until P has its blocks back.
    "held at P",
];

/// How one time is distributed over the delivered requests.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Times {
    /// One of [`TIMES`].
    pub name: String,
    /// Requests that have it.
    pub count: u64,
    /// Mean, in seconds.
    pub mean: f64,
    /// Quantiles in seconds: 0.5, 0.9, 0.99, and the largest.
    pub p50: f64,
    /// See `p50`.
    pub p90: f64,
    /// See `p50`.
    pub p99: f64,
    /// See `p50`.
    pub max: f64,
    /// Bars of a histogram in logarithmic steps: upper end in seconds, and requests up to it since the bar before.
    pub bars: Vec<(f64, u64)>,
}

/// The time to first token of another run of the same load.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Compared {
    /// What was different, as `stream = "layers"`.
    pub with: String,
    /// The time to first token.
    pub first_token: Times,
    /// The handover.
    pub handover: Times,
}

/// What ranks send each other.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// Every pair of ranks, or those with the most bytes if there are more than [`MOST_PAIRS`].
    pub pairs: Vec<Pair>,
    /// How many pairs there are in all.
    pub all_pairs: u64,
    /// What a row of the heat map is: `"rank"`, `"engine"` or `"node"`.
    pub rows_are: String,
    /// Names of the rows (sources).
    pub rows: Vec<String>,
    /// What a column is.
    pub columns_are: String,
    /// Names of the columns (destinations).
    pub columns: Vec<String>,
    /// Bytes by row and column, where there are any: row, column, bytes.
    pub cells: Vec<(u32, u32, u64)>,
}

/// The most pairs that are listed.
pub const MOST_PAIRS: usize = 4096;

/// One pair of ranks.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Pair {
    /// P's engine and rank.
    pub source: (u32, u32),
    /// D's engine and rank.
    pub destination: (u32, u32),
    /// Bytes.
    pub bytes: u64,
    /// Descriptors that a transport is given.
    pub descriptors: u64,
    /// Transfers (one for each request, or slice of one).
    pub transfers: u64,
}

/// How much of a link was used.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct LinkUse {
    /// As `node0/nic3/out`.
    pub name: String,
    /// As `nic`, `nvlink`, `pcie`, `uplink`.
    pub kind: String,
    /// Bytes a second.
    pub capacity: f64,
    /// Bytes carried.
    pub bytes: u64,
    /// Mean share of the capacity over the span, 0 to 1.
    pub mean: f64,
    /// Share of the capacity in the busiest of [`SLICES`] equal parts of the span, 0 to 1; `None` where the engine knows no time.
    #[serde(default)]
    pub peak: Option<f64>,
    /// The share in each of those parts; empty where the engine knows no time.
    pub over_time: Vec<f32>,
}

impl LinkUse {
    /// How full it was when it was fullest, so far as that is known: at its peak, else on average.
    #[must_use]
    pub fn fullest(&self) -> f64 {
        self.peak.unwrap_or(self.mean)
    }

    /// Which of some links is used most on average; the first of equals.
    pub(crate) fn busiest<'a>(links: impl IntoIterator<Item = &'a Self>) -> Option<&'a Self> {
        links.into_iter().reduce(|most, link| if link.mean > most.mean { link } else { most })
    }
}

/// Into how many parts the span is cut for [`LinkUse::over_time`] and [`Pools`].
pub const SLICES: usize = 60;

/// Sizes of descriptors: how many are at most so large, by powers of two. They are those of some of the requests, spread over all, if
/// their blocks lay one after the other: how many there really were stands in [`Requests::descriptors`].
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Descriptors {
    /// Requests that were measured.
    #[serde(default)]
    pub requests: u64,
    /// Upper ends of the bars in bytes.
    pub sizes: Vec<u64>,
    /// With nothing joined.
    pub before: Vec<u64>,
    /// As they are.
    pub after: Vec<u64>,
}

/// How full D's pools were.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Pools {
    /// Bytes of KV that all of D's engines have room for.
    pub capacity: u64,
    /// Bytes that were on their way (taken out, not delivered), at the end of each of [`SLICES`] parts.
    pub in_flight: Vec<u64>,
    /// Bytes taken out in all.
    pub used: Vec<u64>,
    /// The most that was on its way.
    pub peak_in_flight: u64,
    /// The most that was taken out.
    pub peak_used: u64,
    /// Requests that waited for room.
    pub waited: u64,
}

/// One request's transfer beside its prefill.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Gantt {
    /// Which request, by its place in the load.
    pub request: u64,
    /// Prompt tokens.
    pub tokens: u64,
    /// What happens, by row; rows in order.
    pub rows: Vec<GanttRow>,
}

/// A row of it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct GanttRow {
    /// As `prefill`, `rank 3 -> rank 1`, or `node 0 -> node 2 (64 pairs)` where there are too many.
    pub name: String,
    /// `"compute"`, `"wait"` or `"wire"`.
    pub kind: String,
    /// Begin and end in seconds after arrival, and what it is (`layers 0-3`, `8.4 MB`).
    pub bars: Vec<(f64, f64, String)>,
}

/// Something that an operator should look at.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Warning {
    /// A word that does not change, as `hot-link`.
    pub code: String,
    /// What was found, with figures.
    pub text: String,
    /// What to change.
    pub change: String,
}

/// What the simulation took.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Cost {
    /// Things that happened.
    pub events: u64,
    /// Transfers.
    pub transfers: u64,
    /// Times that rates of links were shared out anew, and how many flows that concerned in all.
    pub shares: (u64, u64),
}
