//! What a deployment has to do: when requests arrive, how long they are, what is cached already, and how long a prefill and a
//! token take.
//!
//! | module | what it is |
//! |---|---|
//! | [`read`] | the scenario's `[load]` table, and [`LoadSpec::draw`] |
//! | [`draw`] | arrivals, lengths and hits by chance |
//! | [`trace`] | recorded requests: two formats of our own, Mooncake's and Azure's |
//! | [`prefix`] | a prefix cache over block ids |
//! | [`times`] | the `[prefill.time]` and `[decode.time]` tables |
//! | [`prefill`], [`decode`] | how long a prompt and an output token take |
//! | [`roofline`], [`figures`] | arithmetic and memory traffic of a model, and the published figures of the presets |
//!
//! It knows no cluster, no engine and no block table: a GPU is three numbers here. The keys and formulas are in `docs/load.md`.

use std::time::Duration;

pub mod curve;
pub mod date;
pub mod decode;
pub mod draw;
pub mod fault;
pub mod figures;
pub mod prefill;
pub mod prefix;
pub mod read;
pub mod roofline;
mod rows;
pub mod times;
pub mod trace;

pub use decode::DecodeModel;
pub use fault::{Fault, LoadErrors, LoadFault};
pub use prefill::PrefillModel;
pub use prefix::PrefixCache;
pub use read::{LoadSpec, LoadTable};
pub use roofline::EngineFigures;
pub use times::{DecodeSpec, DecodeTable, PrefillSpec, PrefillTable};

/// The most tokens of one prompt, and of one output.
pub const MAX_TOKENS: u64 = 1 << 24;
/// The most requests of one load.
pub const MAX_REQUESTS: u64 = 4_000_000;

/// Requests in the order in which they arrive.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Load {
    /// By time; of the same time, in the order in which they were drawn or stand in the trace.
    pub requests: Vec<LoadRequest>,
    /// What was changed while a trace was read, for whoever reads the report.
    pub notes: Vec<String>,
}

/// One request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadRequest {
    /// When it arrives, from the load's beginning.
    pub at: Duration,
    /// Tokens of its prompt, from 1 to [`MAX_TOKENS`].
    pub prompt: u64,
    /// Tokens that are to be made, from 1 to [`MAX_TOKENS`]; the first of them is the prefill's.
    pub output: u64,
    /// What of the prompt others have had before.
    pub prefix: Prefix,
}

/// What is known of a prompt's beginning.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Prefix {
    /// Nothing: no token is cached anywhere.
    #[default]
    None,
    /// So many tokens are cached, whatever came before.
    Hit {
        /// Tokens that P has, at most the prompt.
        prefill: u64,
        /// Tokens that D has, at most the prompt.
        decode: u64,
    },
    /// An id for each block of the prompt: a [`PrefixCache`] tells what is cached. An id stands for its block and all before it.
    Blocks {
        /// The ids, from the prompt's beginning. A block that isn't full may have one, too.
        ids: Box<[u64]>,
        /// Tokens of a block.
        tokens: u64,
    },
}

impl Prefix {
    /// Tokens of a prompt that an engine of P has; at least one is computed.
    pub(crate) fn at_prefill(&self, cache: &mut PrefixCache, prompt: u64) -> u64 {
        let hit = match self {
            Self::None => 0,
            Self::Hit { prefill, .. } => *prefill,
            Self::Blocks { ids, tokens } => cache.lookup(ids, *tokens, prompt),
        };
        hit.min(prompt.saturating_sub(1))
    }

    /// Tokens of a prompt that an engine of D has.
    pub(crate) fn at_decode(&self, cache: &mut PrefixCache, prompt: u64) -> u64 {
        match self {
            Self::None => 0,
            Self::Hit { decode, .. } => (*decode).min(prompt),
            Self::Blocks { ids, tokens } => cache.lookup(ids, *tokens, prompt),
        }
    }

    /// An engine has all of the prompt from now on.
    pub(crate) fn enter(&self, cache: &mut PrefixCache) {
        if let Self::Blocks { ids, tokens } = self {
            cache.insert(ids, *tokens);
        }
    }
}

impl Load {
    /// From the beginning to the last arrival.
    #[must_use]
    pub fn span(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |r| r.at)
    }

    /// Prompt tokens of all requests.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.requests.iter().map(|r| r.prompt).sum()
    }

    /// Output tokens of all requests.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.requests.iter().map(|r| r.output).sum()
    }

    /// The share of all prompt tokens that one prefix cache of so many tokens would have had (`None`: without limit), if every
    /// request went by it in turn and was in it at once. `Hit`s count what P has.
    #[must_use]
    pub fn hit_rate(&self, capacity: Option<u64>) -> f64 {
        let mut cache = PrefixCache::new(capacity);
        let hit: u64 = self
            .requests
            .iter()
            .map(|r| match &r.prefix {
                Prefix::None => 0,
                Prefix::Hit { prefill, .. } => *prefill,
                Prefix::Blocks { ids, tokens } => {
                    let hit = cache.lookup(ids, *tokens, r.prompt);
                    cache.insert(ids, *tokens);
                    hit
                }
            })
            .sum();
        let all = self.prompt_tokens();
        if all == 0 { 0.0 } else { hit as f64 / all as f64 }
    }
}

/// Seconds as a time; what isn't a time (less than nothing, not a number) is none, and what is too long the longest.
pub(crate) fn seconds(s: f64) -> Duration {
    /// Thirty years: whatever takes longer never ends for any purpose here.
    const MOST: f64 = 1e9;
    Duration::try_from_secs_f64(s.clamp(0.0, MOST)).unwrap_or(Duration::ZERO)
}
