//! The scenario's `[load]` table, and the load that it stands for.

use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::draw::{self, Arrivals, Hits, Length};
use super::fault::{Fault, Faults, LoadErrors, clip};
use super::trace::{self, Format, TraceOptions};
use super::{Load, MAX_REQUESTS, MAX_TOKENS, Prefix};

/// The `[load]` table as it stands in the file. Values are looked at by [`check`](Self::check).
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadTable {
    requests: Option<i64>,
    arrivals: Option<String>,
    per_s: Option<f64>,
    cv: Option<f64>,
    prompt: Option<LengthTable>,
    output: Option<LengthTable>,
    prefill_hit: Option<HitTable>,
    decode_hit: Option<HitTable>,
    trace: Option<String>,
    format: Option<String>,
    speed: Option<f64>,
    first: Option<i64>,
    limit: Option<i64>,
    block_tokens: Option<i64>,
}

/// A number, or a table that says which numbers.
#[derive(Clone, PartialEq, Debug)]
enum LengthTable {
    Fixed(i64),
    Table(LengthKeys),
}

#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LengthKeys {
    uniform: Option<[i64; 2]>,
    median: Option<f64>,
    p99: Option<f64>,
    most: Option<i64>,
    list: Option<Vec<i64>>,
}

/// A share, or a table that says how often and how much.
#[derive(Clone, PartialEq, Debug)]
enum HitTable {
    Share(f64),
    Table(HitKeys),
}

#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HitKeys {
    chance: f64,
    share: f64,
}

impl<'de> Deserialize<'de> for LengthTable {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = LengthTable;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of tokens, or a table with `uniform`, `median` and `p99`, or `list`")
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<LengthTable, E> {
                Ok(LengthTable::Fixed(n))
            }
            fn visit_u64<E: Error>(self, n: u64) -> Result<LengthTable, E> {
                Ok(LengthTable::Fixed(i64::try_from(n).unwrap_or(i64::MAX)))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LengthTable, A::Error> {
                LengthKeys::deserialize(MapAccessDeserializer::new(map)).map(LengthTable::Table)
            }
        }
        from.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for HitTable {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = HitTable;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a share from 0 to 1, or a table with `chance` and `share`")
            }
            fn visit_f64<E: Error>(self, share: f64) -> Result<HitTable, E> {
                Ok(HitTable::Share(share))
            }
            fn visit_i64<E: Error>(self, share: i64) -> Result<HitTable, E> {
                Ok(HitTable::Share(share as f64))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<HitTable, A::Error> {
                HitKeys::deserialize(MapAccessDeserializer::new(map)).map(HitTable::Table)
            }
        }
        from.deserialize_any(Either)
    }
}

/// What a load is drawn or read from.
#[derive(Clone, PartialEq, Debug)]
pub struct LoadSpec {
    /// Where requests come from.
    pub source: Source,
    /// What P has of prompts whose beginnings aren't known.
    pub prefill_hit: Hits,
    /// What D has of them.
    pub decode_hit: Hits,
}

/// The longest drawn load, in seconds.
const YEAR: f64 = 3.2e7;

/// Where requests come from.
#[derive(Clone, PartialEq, Debug)]
pub enum Source {
    /// Chance.
    Drawn {
        /// How many, from 1 to [`MAX_REQUESTS`].
        requests: u64,
        /// When they arrive.
        arrivals: Arrivals,
        /// Tokens of their prompts.
        prompt: Length,
        /// Tokens to be made.
        output: Length,
    },
    /// A file.
    Trace {
        /// Its path, from the scenario's folder.
        file: PathBuf,
        /// How it is read.
        options: TraceOptions,
    },
}

impl LoadSpec {
    /// The load: all chance from `seed`, a trace's path from `dir`.
    ///
    /// # Errors
    /// A trace that can't be read or has faults, with their lines; hits that the trace has already.
    pub fn draw(&self, seed: u64, dir: &Path) -> Result<Load, LoadErrors> {
        match &self.source {
            Source::Drawn { requests, arrivals, prompt, output } => {
                let mut load = draw::load(*requests, *arrivals, prompt, output, seed);
                draw::hits(&mut load, self.prefill_hit, self.decode_hit, seed);
                Ok(load)
            }
            Source::Trace { file, options } => {
                let name = file.display().to_string();
                let opened = File::open(dir.join(file))
                    .map_err(|e| LoadErrors::of_file(&name, Fault::Unreadable(e.to_string())))?;
                self.with_hits(trace::read(&name, BufReader::with_capacity(1 << 16, opened), options)?, &name, seed)
            }
        }
    }

    /// Gives the requests of a trace the hits that it doesn't tell.
    fn with_hits(&self, mut load: Load, file: &str, seed: u64) -> Result<Load, LoadErrors> {
        let asked = !self.prefill_hit.is_none() || !self.decode_hit.is_none();
        if asked && load.requests.iter().any(|r| r.prefix != Prefix::None) {
            let mut faults = Faults::default();
            for (key, hits) in [("load.prefill_hit", self.prefill_hit), ("load.decode_hit", self.decode_hit)] {
                if !hits.is_none() {
                    let fault = format!("is set, but {file} tells itself what is cached; leave it out");
                    faults.push(key, Fault::Conflict(fault));
                }
            }
            return faults.finish(None);
        }
        draw::hits(&mut load, self.prefill_hit, self.decode_hit, seed);
        Ok(load)
    }
}

impl LoadTable {
    /// The table's meaning.
    ///
    /// # Errors
    /// Every fault of its values, with their keys.
    pub fn check(&self) -> Result<LoadSpec, LoadErrors> {
        let mut faults = Faults::default();
        let source = if let Some(file) = &self.trace { self.trace(file, &mut faults) } else { self.drawn(&mut faults) };
        let prefill_hit = hits("load.prefill_hit", self.prefill_hit.as_ref(), &mut faults);
        let decode_hit = hits("load.decode_hit", self.decode_hit.as_ref(), &mut faults);
        faults.finish(source.map(|source| LoadSpec { source, prefill_hit, decode_hit }))
    }

    fn drawn(&self, faults: &mut Faults) -> Option<Source> {
        let foreign = [
            ("format", self.format.is_some()),
            ("speed", self.speed.is_some()),
            ("first", self.first.is_some()),
            ("limit", self.limit.is_some()),
            ("block_tokens", self.block_tokens.is_some()),
        ];
        only("goes with `trace`; leave it out, or name a trace", &foreign, faults);
        let requests = match self.requests {
            Some(n) => faults.count("load.requests", n, 1, MAX_REQUESTS),
            None => {
                faults.missing("load.requests", "say how many are drawn, or name a `trace`");
                None
            }
        };
        let arrivals = self.arrivals(faults);
        if let (Some(requests), Some(arrivals)) = (requests, &arrivals)
            && requests as f64 > arrivals.per_s() * YEAR
        {
            let fault = format!("is {}, with which {requests} requests take more than a year", arrivals.per_s());
            faults.push("load.per_s", Fault::Conflict(fault + "; raise it, or lower `requests`"));
        }
        let prompt = length("load.prompt", self.prompt.as_ref(), faults);
        let output = length("load.output", self.output.as_ref(), faults);
        Some(Source::Drawn { requests: requests?, arrivals: arrivals?, prompt: prompt?, output: output? })
    }

    fn arrivals(&self, faults: &mut Faults) -> Option<Arrivals> {
        let per_s = match self.per_s {
            Some(rate) => faults.number("load.per_s", rate, 1e-4, 1e6),
            None => {
                faults.missing("load.per_s", "say how many requests arrive in a second");
                None
            }
        };
        let cv = self.cv.map(|cv| faults.number("load.cv", cv, 0.01, 20.0));
        let word = self.arrivals.as_deref().unwrap_or("poisson");
        match (word, cv) {
            ("constant" | "poisson", Some(_)) => {
                let fault = format!("is for arrivals = \"gamma\", not {word:?}; leave it out, or change `arrivals`");
                faults.push("load.cv", Fault::Conflict(fault));
                None
            }
            ("constant", None) => Some(Arrivals::Constant { per_s: per_s? }),
            ("poisson", None) => Some(Arrivals::Poisson { per_s: per_s? }),
            ("gamma", Some(cv)) => Some(Arrivals::Gamma { per_s: per_s?, cv: cv? }),
            ("gamma", None) => {
                faults.missing("load.cv", "gamma arrivals need it: more than 1 for bursts, as 3");
                None
            }
            _ => {
                let known = "\"constant\", \"poisson\" or \"gamma\"";
                faults.push("load.arrivals", Fault::Word { got: clip(word), known });
                None
            }
        }
    }

    fn trace(&self, file: &str, faults: &mut Faults) -> Option<Source> {
        let foreign = [
            ("requests", self.requests.is_some()),
            ("arrivals", self.arrivals.is_some()),
            ("per_s", self.per_s.is_some()),
            ("cv", self.cv.is_some()),
            ("prompt", self.prompt.is_some()),
            ("output", self.output.is_some()),
        ];
        only("is what the trace says; leave it out, or leave `trace` out", &foreign, faults);
        let format = match self.format.as_deref() {
            None | Some("auto") => None,
            Some(word) => {
                let format = Format::named(word);
                if format.is_none() {
                    faults.push("load.format", Fault::Word { got: clip(word), known: Format::KNOWN });
                }
                format
            }
        };
        let whole = TraceOptions::default();
        let mut count = |key: &str, n: Option<i64>, low: u64, high: u64, unsaid: u64| match n {
            Some(n) => faults.count(format!("load.{key}"), n, low, high),
            None => Some(unsaid),
        };
        let first = count("first", self.first, 0, u64::MAX >> 1, whole.first);
        let limit = count("limit", self.limit, 1, MAX_REQUESTS, whole.limit);
        let block_tokens = count("block_tokens", self.block_tokens, 1, MAX_TOKENS, whole.block_tokens);
        let speed = faults.number("load.speed", self.speed.unwrap_or(whole.speed), 0.01, 1e6);
        let options = TraceOptions { format, speed: speed?, first: first?, limit: limit?, block_tokens: block_tokens? };
        Some(Source::Trace { file: file.into(), options })
    }
}

/// Faults of keys that stand where they have no meaning.
fn only(why: &str, keys: &[(&str, bool)], faults: &mut Faults) {
    for (key, _) in keys.iter().filter(|k| k.1) {
        faults.push(format!("load.{key}"), Fault::Conflict(why.into()));
    }
}

fn hits(key: &str, table: Option<&HitTable>, faults: &mut Faults) -> Hits {
    let hits = match table {
        None => return Hits::NONE,
        Some(HitTable::Share(share)) => Hits { chance: 1.0, share: *share },
        Some(HitTable::Table(keys)) => {
            faults.number(format!("{key}.chance"), keys.chance, 0.0, 1.0);
            faults.number(format!("{key}.share"), keys.share, 0.0, 1.0);
            return Hits { chance: keys.chance, share: keys.share };
        }
    };
    faults.number(key, hits.share, 0.0, 1.0);
    hits
}

fn length(key: &str, table: Option<&LengthTable>, faults: &mut Faults) -> Option<Length> {
    let keys = match table {
        None => {
            faults.missing(key, "say how many tokens, as 4096 or { median = 2000, p99 = 30000 }");
            return None;
        }
        Some(LengthTable::Fixed(n)) => return faults.count(key, *n, 1, MAX_TOKENS).map(Length::Fixed),
        Some(LengthTable::Table(keys)) => keys,
    };
    let log_normal = keys.median.is_some() || keys.p99.is_some() || keys.most.is_some();
    match (keys.uniform, log_normal, &keys.list) {
        (Some([low, high]), false, None) => {
            let key = format!("{key}.uniform");
            let low = faults.count(key.as_str(), low, 1, MAX_TOKENS)?;
            let high = faults.count(key, high, low, MAX_TOKENS)?;
            Some(Length::Uniform { low, high })
        }
        (None, true, None) => log_normal_of(key, keys, faults),
        (None, false, Some(list)) if list.is_empty() => {
            faults.missing(format!("{key}.list"), "give it one number at least");
            None
        }
        (None, false, Some(list)) => {
            let key = format!("{key}.list");
            let tokens = list.iter().map(|n| faults.count(key.as_str(), *n, 1, MAX_TOKENS)).collect::<Vec<_>>();
            tokens.into_iter().collect::<Option<_>>().map(Length::Empirical)
        }
        (None, false, None) => {
            faults.missing(key, "give the table `uniform`, `median` and `p99`, or `list`");
            None
        }
        _ => {
            let fault = "has more than one of `uniform`, `median` with `p99`, and `list`; keep one";
            faults.push(key, Fault::Conflict(fault.into()));
            None
        }
    }
}

fn log_normal_of(key: &str, keys: &LengthKeys, faults: &mut Faults) -> Option<Length> {
    let limit = MAX_TOKENS as f64;
    let mut needed = |name: &str, value: Option<f64>, low: f64| match value {
        Some(value) => faults.number(format!("{key}.{name}"), value, low, limit),
        None => {
            faults.missing(format!("{key}.{name}"), "`median` and `p99` go together");
            None
        }
    };
    let median = needed("median", keys.median, 1.0);
    let p99 = needed("p99", keys.p99, median.unwrap_or(1.0));
    let most = match keys.most {
        Some(most) => faults.count(format!("{key}.most"), most, 1, MAX_TOKENS),
        None => Some(MAX_TOKENS),
    };
    Some(Length::LogNormal { median: median?, p99: p99?, most: most? })
}
