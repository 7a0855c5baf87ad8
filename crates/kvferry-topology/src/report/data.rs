//! What a page embeds, and figures that say where in it they stand.
//!
//! A page shows the most important part of long lists, and embeds what it shows; the whole is in the JSON of the answer itself. A figure is
//! an element with `data-path` (where the embedded JSON has it), `data-value` (the number as it stands there) and `data-as` (what it is).
//! A sum has `data-sum` and a part of two figures `data-ratio` (two paths) in place of `data-path`.

use serde_json::Value;

use super::figures::{As, NONE};
use super::html;
use crate::answer::{Answer, Pair};

/// The most links that a page shows.
pub(super) const LINKS: usize = 24;
/// The most pairs of ranks.
pub(super) const PAIRS: usize = 16;
/// The most rows of a Gantt, and bars in all of them.
const GANTT_ROWS: usize = 64;
const GANTT_BARS: usize = 1000;
/// The most other runs to compare with.
const COMPARED: usize = 3;
/// The most warnings, and causes of failure.
const WARNINGS: usize = 40;
/// The most bars of a histogram, and parts of the span.
const BARS: usize = 400;

/// An answer cut to what a page shows.
pub(super) struct Data {
    pub(super) answer: Answer,
    /// How many links there are in all.
    pub(super) all_links: usize,
    /// How many rows the Gantt has in all.
    pub(super) all_rows: usize,
    value: Value,
}

impl Data {
    pub(super) fn new(answer: &Answer) -> Self {
        let links = answer.links.iter().take(LINKS).cloned().collect();
        let mut most: Vec<&Pair> = answer.traffic.pairs.iter().collect();
        most.sort_by_key(|p| (std::cmp::Reverse(p.bytes), p.source, p.destination));
        let pairs = most.into_iter().take(PAIRS).cloned().collect();
        let mut gantt = answer.gantt.clone();
        let all_rows = gantt.as_ref().map_or(0, |g| g.rows.len());
        if let Some(gantt) = &mut gantt {
            gantt.rows.truncate(GANTT_ROWS);
            let most = GANTT_BARS / gantt.rows.len().max(1);
            gantt.rows.iter_mut().for_each(|r| r.bars = joined(&r.bars, most));
        }
        let mut cut = Answer {
            scenario: answer.scenario.clone(),
            engine: answer.engine.clone(),
            seed: answer.seed,
            prefill: answer.prefill.clone(),
            decode: answer.decode.clone(),
            mode: answer.mode.clone(),
            stream: answer.stream.clone(),
            span: answer.span,
            requests: answer.requests.clone(),
            times: answer.times.clone(),
            compared: answer.compared.clone(),
            traffic: super::heat::fold(&answer.traffic, pairs),
            links,
            descriptors: answer.descriptors.clone(),
            pools: answer.pools.clone(),
            gantt,
            warnings: answer.warnings.clone(),
            cost: answer.cost.clone(),
        };
        cut.warnings.truncate(WARNINGS);
        cut.requests.failed.truncate(WARNINGS);
        cut.compared.truncate(COMPARED);
        let compared = cut.compared.iter_mut().flat_map(|c| [&mut c.first_token, &mut c.handover]);
        cut.times.iter_mut().chain(compared).for_each(|t| t.bars.truncate(BARS));
        cut.pools.in_flight.truncate(BARS);
        cut.pools.used.truncate(BARS);
        cut.descriptors.sizes.truncate(BARS);
        for link in &mut cut.links {
            link.over_time.truncate(BARS);
        }
        let value = serde_json::to_value(&cut).unwrap_or_default();
        Self { answer: cut, all_links: answer.links.len(), all_rows, value }
    }

    /// The embedded JSON.
    pub(super) fn embedded(&self) -> String {
        // Not from the value, in which a short float would be a long one.
        html::json(&serde_json::to_string(&self.answer).unwrap_or_default())
    }

    /// The value at a path as `times.4.p50`.
    fn at(&self, path: &str) -> Option<&Value> {
        self.value.pointer(&format!("/{}", path.replace('.', "/")))
    }

    fn number(&self, path: &str) -> Option<f64> {
        self.at(path).and_then(Value::as_f64)
    }

    /// A figure of the answer.
    pub(super) fn figure(&self, path: &str, what: As) -> String {
        let value = self.at(path).unwrap_or(&Value::Null);
        let text = match value {
            // Not by way of a float, which has no room for all of them.
            value if what == As::Plain => value.to_string(),
            value => value.as_f64().map_or_else(|| NONE.to_owned(), |v| what.write(v)),
        };
        element("path", path, &value.to_string(), what, &text)
    }

    /// The sum of a list of whole numbers.
    pub(super) fn sum(&self, path: &str, what: As) -> String {
        let numbers = self.at(path).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_u64);
        let sum = numbers.fold(0u64, u64::saturating_add);
        element("sum", path, &sum.to_string(), what, &what.write(sum as f64))
    }

    /// One figure as a part of another; nothing where that is 0.
    pub(super) fn ratio(&self, part: &str, of: &str) -> Option<String> {
        let (value, whole) = (self.number(part)?, self.number(of)?);
        let ratio = value / whole;
        let paths = format!("{part} {of}");
        (whole > 0.0).then(|| element("ratio", &paths, &ratio.to_string(), As::Share, &As::Share.write(ratio)))
    }

    /// The place of a time in the list of them, if any request has it.
    pub(super) fn time(&self, name: &str) -> Option<usize> {
        self.answer.times.iter().position(|t| t.name == name && t.count > 0)
    }
}

/// Bars of a row of a Gantt, and what each is.
type Bars = [(f64, f64, String)];

/// The same bars, or as many neighbours in one as leave no more than `most`.
fn joined(bars: &Bars, most: usize) -> Vec<(f64, f64, String)> {
    let together = bars.len().div_ceil(most.max(1)).max(1);
    let join = |some: &Bars| match some {
        [(begin, end, first), middle @ .., (_, last_end, last)] => {
            let end = middle.iter().map(|b| b.1).fold(end.max(*last_end), f64::max);
            let what = if first == last { format!("{} of {first}", some.len()) } else { format!("{first} to {last}") };
            (*begin, end, what)
        }
        some => some.first().cloned().unwrap_or_default(),
    };
    bars.chunks(together).map(join).collect()
}

pub(super) fn element(kind: &str, path: &str, value: &str, what: As, text: &str) -> String {
    let (word, text) = (what.word(), html::number(text));
    format!("<span class=\"n\" data-{kind}=\"{path}\" data-as=\"{word}\" data-value=\"{value}\">{text}</span>")
}
