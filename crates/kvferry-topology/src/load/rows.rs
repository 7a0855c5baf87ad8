//! One line of a trace as a request.

use serde::Deserialize;

use super::fault::{Fault, Faults, clip};
use super::trace::Format;
use super::{MAX_TOKENS, Prefix, date};
use crate::number::nearest;

/// The most block ids of one trace: 256 MiB of them.
pub(crate) const MAX_BLOCK_IDS: u64 = 32 << 20;
/// The most columns of a CSV that are looked at.
const MAX_COLUMNS: usize = 64;

/// One request as it stands in the trace.
#[derive(Debug)]
pub(crate) struct Row {
    /// Nanoseconds, from whatever the trace counts from.
    pub(crate) at: i64,
    pub(crate) prompt: u64,
    pub(crate) output: u64,
    pub(crate) prefix: Prefix,
}

impl Row {
    pub(crate) fn ids(&self) -> u64 {
        if let Prefix::Blocks { ids, .. } = &self.prefix { ids.len() as u64 } else { 0 }
    }
}

/// Which columns hold what.
#[derive(Debug)]
pub(crate) struct Columns {
    count: usize,
    at: usize,
    prompt: usize,
    output: usize,
    hits: [Option<usize>; 2],
    /// Their names, in that order.
    names: [&'static str; 5],
}

const OURS: [&str; 5] = ["at_s", "prompt", "output", "prefill_hit", "decode_hit"];
const AZURE: [&str; 5] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens", "", ""];

/// How lines are read.
#[derive(Debug)]
pub(crate) enum Rows {
    Mooncake { block: u64 },
    Jsonl { block: u64 },
    Azure(Columns),
    Csv(Columns),
}

#[derive(Deserialize)]
struct MooncakeRow {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnRow {
    at_s: f64,
    prompt: u64,
    output: u64,
    prefill_hit: Option<u64>,
    decode_hit: Option<u64>,
    blocks: Option<Vec<u64>>,
}

/// Where a fault belongs.
struct At<'a> {
    line: u64,
    faults: &'a mut Faults,
}

impl At<'_> {
    fn push(&mut self, key: &str, fault: Fault) {
        self.faults.at(Some(self.line), key, fault);
    }

    fn range(&mut self, key: &str, got: impl ToString, low: u64, high: u64) {
        self.push(key, Fault::Range { got: got.to_string(), low: low.to_string(), high: high.to_string() });
    }

    fn whole(&mut self, key: &str, text: &str) -> Option<u64> {
        let value = text.parse().ok();
        if value.is_none() {
            self.push(key, Fault::Value { got: clip(text), expected: "a whole number of tokens" });
        }
        value
    }

    /// Nanoseconds of a number of these.
    fn nanos(&mut self, key: &str, got: f64, each: u32) -> Option<i64> {
        /// About thirty years.
        const MOST: u64 = 1_000_000_000_000_000_000;
        let most = MOST / u64::from(each);
        if (0.0..=most as f64).contains(&got) {
            return i64::try_from(nearest(got * f64::from(each))).ok();
        }
        self.range(key, got, 0, most);
        None
    }
}

impl Rows {
    /// By the first line; also whether that is a request itself.
    pub(crate) fn begin(
        format: Format,
        line: &str,
        number: u64,
        block: u64,
        faults: &mut Faults,
    ) -> Option<(Self, bool)> {
        match format {
            Format::Mooncake => Some((Self::Mooncake { block }, true)),
            Format::Jsonl => Some((Self::Jsonl { block }, true)),
            Format::Azure => {
                Columns::of(line, AZURE, &mut At { line: number, faults }).map(|c| (Self::Azure(c), false))
            }
            Format::Csv => Columns::of(line, OURS, &mut At { line: number, faults }).map(|c| (Self::Csv(c), false)),
        }
    }

    /// One line as a request, or its faults.
    pub(crate) fn row(&mut self, line: &str, number: u64, faults: &mut Faults) -> Option<Row> {
        let mut at = At { line: number, faults };
        match self {
            Self::Mooncake { block } => mooncake(line, *block, &mut at),
            Self::Jsonl { block } => jsonl(line, *block, &mut at),
            Self::Azure(columns) => columns.row(line, &mut at, |text, at| {
                let time = date::nanos(text);
                if time.is_none() {
                    at.push(AZURE[0], Fault::Value { got: clip(text), expected: DATE });
                }
                time
            }),
            Self::Csv(columns) => columns.row(line, &mut at, |text, at| {
                if let Ok(seconds) = text.parse() {
                    return at.nanos(OURS[0], seconds, 1_000_000_000);
                }
                at.push(OURS[0], Fault::Value { got: clip(text), expected: "a number of seconds" });
                None
            }),
        }
    }
}

const DATE: &str = "a date and time as 2023-11-16 18:15:46.6805900";

fn mooncake(line: &str, block: u64, at: &mut At<'_>) -> Option<Row> {
    let row: MooncakeRow = json(line, at)?;
    let time = at.nanos("timestamp", row.timestamp, 1_000_000);
    let lengths = lengths(("input_length", row.input_length), ("output_length", row.output_length), at);
    let prefix = blocks("hash_ids", row.hash_ids, block, row.input_length, at);
    let (prompt, output) = lengths?;
    Some(Row { at: time?, prompt, output, prefix: prefix? })
}

fn jsonl(line: &str, block: u64, at: &mut At<'_>) -> Option<Row> {
    let row: OwnRow = json(line, at)?;
    let time = at.nanos(OURS[0], row.at_s, 1_000_000_000);
    let lengths = lengths((OURS[1], row.prompt), (OURS[2], row.output), at);
    let hits = [row.prefill_hit, row.decode_hit];
    let prefix = match row.blocks {
        Some(_) if hits.iter().any(Option::is_some) => {
            let fault = "stand beside a hit; blocks tell hits themselves: keep one of them";
            at.push("blocks", Fault::Conflict(fault.into()));
            None
        }
        Some(ids) => blocks("blocks", ids, block, row.prompt, at),
        None => hit(hits, row.prompt, at),
    };
    let (prompt, output) = lengths?;
    Some(Row { at: time?, prompt, output, prefix: prefix? })
}

fn json<'a, T: Deserialize<'a>>(line: &'a str, at: &mut At<'_>) -> Option<T> {
    // A list would be taken for the values in order.
    if !line.starts_with('{') {
        at.push("", Fault::Value { got: clip(line), expected: "a JSON object" });
        return None;
    }
    serde_json::from_str(line)
        .map_err(|e| {
            // It counts lines itself, and sees one.
            let text = e.to_string();
            let text = text.split(" at line ").next().unwrap_or_default();
            at.push("", Fault::Json(format!("{} (column {})", clip(text), e.column())));
        })
        .ok()
}

fn lengths(prompt: (&str, u64), output: (&str, u64), at: &mut At<'_>) -> Option<(u64, u64)> {
    let mut fine = true;
    for ((key, got), low) in [(prompt, 1), (output, 0)] {
        if !(low..=MAX_TOKENS).contains(&got) {
            at.range(key, got, low, MAX_TOKENS);
            fine = false;
        }
    }
    fine.then_some((prompt.1, output.1))
}

fn hit(hits: [Option<u64>; 2], prompt: u64, at: &mut At<'_>) -> Option<Prefix> {
    if hits == [None, None] {
        return Some(Prefix::None);
    }
    let [prefill, decode] = hits.map(Option::unwrap_or_default);
    let mut fine = true;
    for (key, got) in [(OURS[3], prefill), (OURS[4], decode)] {
        if got > prompt {
            at.push(key, Fault::Conflict(format!("is {got}, more than the {prompt} tokens of the prompt")));
            fine = false;
        }
    }
    fine.then_some(Prefix::Hit { prefill, decode })
}

fn blocks(key: &str, ids: Vec<u64>, tokens: u64, prompt: u64, at: &mut At<'_>) -> Option<Prefix> {
    if ids.is_empty() {
        return Some(Prefix::None);
    }
    let most = prompt.div_ceil(tokens.max(1));
    if ids.len() as u64 > most {
        let fault = format!(
            "are {} ids, but a prompt of {prompt} tokens has {most} blocks of {tokens}; set `load.block_tokens`",
            ids.len()
        );
        at.push(key, Fault::Conflict(fault));
        return None;
    }
    Some(Prefix::Blocks { ids: ids.into(), tokens })
}

impl Columns {
    /// By the header; columns may stand in any order. Ours may have no others, Azure's may.
    fn of(header: &str, names: [&'static str; 5], at: &mut At<'_>) -> Option<Self> {
        let fields: Vec<&str> = header.split(',').take(MAX_COLUMNS + 1).map(unquoted).collect();
        if fields.len() > MAX_COLUMNS {
            let change = "write a header as docs/load.md has it";
            at.push("", Fault::TooMany { what: "columns", limit: MAX_COLUMNS as u64, change });
            return None;
        }
        let place = |name: &str| fields.iter().position(|f| *f == name && !name.is_empty());
        let mut fine = true;
        for (i, field) in fields.iter().enumerate() {
            let known = place(field).is_some_and(|p| names.contains(field) && p == i);
            let twice = names.contains(field) && !known;
            if twice || (names == OURS && !known) {
                let fault = if twice { "stands in the header twice" } else { "is no column of ours; leave it out" };
                at.push(&clip(field), Fault::Conflict(fault.into()));
                fine = false;
            }
        }
        let mut needed = |name: &str| {
            let place = place(name);
            if place.is_none() {
                at.push(name, Fault::Missing(format!("the header is {}", clip(header))));
            }
            place
        };
        let [at_name, prompt_name, output_name, hits @ ..] = names;
        let (time, prompt, output) = (needed(at_name), needed(prompt_name), needed(output_name));
        let hits = hits.map(place);
        let (time, prompt, output) = (time?, prompt?, output?);
        fine.then_some(Self { count: fields.len(), at: time, prompt, output, hits, names })
    }

    fn row(&self, line: &str, at: &mut At<'_>, time: impl Fn(&str, &mut At<'_>) -> Option<i64>) -> Option<Row> {
        let got = line.split(',').count();
        if got != self.count {
            at.push("", Fault::Fields { got, want: self.count });
            return None;
        }
        let field = |i: usize| line.split(',').nth(i).map(unquoted).unwrap_or_default();
        let time = time(field(self.at), at);
        let [_, prompt_name, output_name, hit_names @ ..] = self.names;
        let prompt = at.whole(prompt_name, field(self.prompt));
        let output = at.whole(output_name, field(self.output));
        let mut hits = [None, None];
        let mut fine = true;
        for ((hit, place), name) in hits.iter_mut().zip(self.hits).zip(hit_names) {
            // An empty field is none.
            if let Some(text) = place.map(field).filter(|f| !f.is_empty()) {
                *hit = at.whole(name, text);
                fine &= hit.is_some();
            }
        }
        let (prompt, output) = lengths((prompt_name, prompt?), (output_name, output?), at)?;
        let prefix = hit(hits, prompt, at)?;
        fine.then_some(Row { at: time?, prompt, output, prefix })
    }
}

/// A field without blanks and quotes around it.
fn unquoted(field: &str) -> &str {
    let field = field.trim();
    field.strip_prefix('"').and_then(|f| f.strip_suffix('"')).unwrap_or(field)
}
