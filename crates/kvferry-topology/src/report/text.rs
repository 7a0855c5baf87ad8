//! Tables for a terminal, at most [`WIDTH`] columns wide.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::figures::{self, count, number_of, share, size, time};
use super::links::{heat_of, units};
use super::spread;
use crate::answer::{Answer, Pair, Side};

/// The most columns of a line.
pub(super) const WIDTH: usize = 110;
/// How many of the fullest links and of the largest pairs and senders are shown.
const SHOWN: usize = 10;
/// How wide a full bar is.
const BAR: usize = 20;

/// The answer as tables of plain text, with a newline at the end.
#[must_use]
pub fn text(answer: &Answer) -> String {
    let mut out = String::new();
    summary(&mut out, answer);
    warnings(&mut out, answer);
    times(&mut out, answer);
    links(&mut out, answer);
    senders(&mut out, answer);
    pairs(&mut out, answer);
    descriptors(&mut out, answer);
    pools(&mut out, answer);
    let (rates, flows) = answer.cost.shares;
    let cost = format!(
        "simulated with {} for {}; links were shared out {} times among {}",
        number_of(answer.cost.events, "event"),
        number_of(answer.cost.transfers, "transfer"),
        count(rates),
        number_of(flows, "flow"),
    );
    let _ = write!(out, "\n{}", wrap("", &cost));
    out
}

fn name(text: &str, most: usize) -> String {
    figures::clip(&figures::clean(text), most)
}

fn summary(out: &mut String, answer: &Answer) {
    let _ = writeln!(out, "{}", name(&answer.scenario, WIDTH));
    let line = format!(
        "{} engine, seed {}, mode {}, {}, {} from the first arrival to the last end",
        name(&answer.engine, 20),
        answer.seed,
        name(&answer.mode, 20),
        name(&spread::this(answer), 30),
        time(answer.span),
    );
    let _ = writeln!(out, "{}", wrap("", &line));
    let side = |title: &str, s: &Side| {
        vec![
            title.to_owned(),
            format!("{} of {}", count(s.engines.into()), count(s.ranks.into())),
            count(s.gpus.into()),
            name(&s.shape, 24),
            name(&s.model, 24),
            name(&s.layout, 10),
            count(s.block_tokens),
            size(s.bytes_per_token),
        ]
    };
    let headings = ["", "engines of ranks", "GPUs", "shape", "model", "layout", "block", "a token"];
    out.push_str(&table(&headings, &[side("P", &answer.prefill), side("D", &answer.decode)]));
    let requests = &answer.requests;
    let part = if requests.all > 0 { requests.delivered as f64 / requests.all as f64 } else { f64::NAN };
    let _ = writeln!(
        out,
        "\n{}: {} delivered ({}), {} over the wire for {} delivered",
        number_of(requests.all, "request"),
        count(requests.delivered),
        share(part),
        size(requests.wire_bytes),
        size(requests.bytes),
    );
    for (cause, n) in &requests.failed {
        let _ = writeln!(out, "  failed: {} ({})", name(cause, WIDTH - 40), count(*n));
    }
    let hit = |n: u64| if requests.prompt_tokens > 0 { n as f64 / requests.prompt_tokens as f64 } else { 0.0 };
    let _ = writeln!(
        out,
        "{} of prompt, of which P had {} and D {}",
        number_of(requests.prompt_tokens, "token"),
        share(hit(requests.hit_tokens)),
        share(hit(requests.decode_hit_tokens)),
    );
}

fn warnings(out: &mut String, answer: &Answer) {
    for warning in &answer.warnings {
        let code = name(&warning.code, 30);
        let _ = write!(out, "\nwarning: {code}\n{}", wrap("  ", &figures::clean(&warning.text)));
        out.push_str(&wrap("  change: ", &figures::clean(&warning.change)));
    }
}

fn times(out: &mut String, answer: &Answer) {
    let mut rows = Vec::new();
    let mut row = |what: String, t: &crate::answer::Times| {
        let mut row = vec![what, count(t.count)];
        row.extend([t.mean, t.p50, t.p90, t.p99, t.max].map(|v| if t.count > 0 { time(v) } else { "-".to_owned() }));
        rows.push(row);
    };
    for t in &answer.times {
        row(name(&t.name, 40), t);
    }
    for other in &answer.compared {
        row(format!("time to first token, {}", name(&other.with, 28)), &other.first_token);
        row(format!("handover, {}", name(&other.with, 28)), &other.handover);
    }
    if !rows.is_empty() {
        let _ =
            write!(out, "\n{}", table(&["time of a request", "requests", "mean", "p50", "p90", "p99", "most"], &rows));
    }
}

fn links(out: &mut String, answer: &Answer) {
    let row = |l: &crate::answer::LinkUse| {
        let (capacity, carried) = units(l);
        let state = heat_of(l.fullest());
        vec![
            name(&l.name, 30),
            name(&l.kind, 8),
            capacity.write(l.capacity),
            carried.write(l.bytes as f64),
            share(l.mean),
            l.peak.map_or_else(|| figures::NONE.to_owned(), share),
            bar(l.fullest()),
            if state == "calm" { String::new() } else { state.to_owned() },
        ]
    };
    let rows: Vec<_> = answer.links.iter().take(SHOWN).map(row).collect();
    if !rows.is_empty() {
        let headings = ["fullest links", "kind", "capacity", "carried", "mean", "peak", "", ""];
        let _ = write!(out, "\n{}", table(&headings, &rows));
        more(out, answer.links.len() as u64, "link");
    }
}

fn more(out: &mut String, all: u64, noun: &str) {
    let left = all.saturating_sub(SHOWN as u64);
    if left > 0 {
        let _ = writeln!(out, "and {}", number_of(left, &format!("more {noun}")));
    }
}

/// What each rank of P sends, from the pairs that are listed.
fn senders(out: &mut String, answer: &Answer) {
    let mut sent: BTreeMap<(u32, u32), (u64, u64, u64)> = BTreeMap::new();
    for pair in &answer.traffic.pairs {
        let sum = sent.entry(pair.source).or_default();
        *sum = (sum.0.saturating_add(pair.bytes), sum.1.saturating_add(pair.descriptors), sum.2 + 1);
    }
    let mut list: Vec<_> = sent.into_iter().collect();
    list.sort_by_key(|(rank, sum)| (std::cmp::Reverse(sum.0), *rank));
    let most = list.first().map_or(0, |l| l.1.0);
    let row = |((engine, rank), (bytes, descriptors, to)): &((u32, u32), (u64, u64, u64))| {
        let part = if most > 0 { *bytes as f64 / most as f64 } else { 0.0 };
        vec![format!("P {engine} rank {rank}"), size(*bytes), count(*descriptors), count(*to), bar(part)]
    };
    let rows: Vec<_> = list.iter().take(SHOWN).map(row).collect();
    if !rows.is_empty() {
        let _ = write!(out, "\n{}", table(&["sent by", "bytes", "descriptors", "to ranks", ""], &rows));
        more(out, list.len() as u64, "rank");
    }
}

fn pairs(out: &mut String, answer: &Answer) {
    let mut list: Vec<&Pair> = answer.traffic.pairs.iter().collect();
    list.sort_by_key(|p| (std::cmp::Reverse(p.bytes), p.source, p.destination));
    let row = |p: &&Pair| {
        let end = |side: &str, (engine, rank): (u32, u32)| format!("{side} {engine} rank {rank}");
        let (from, to) = (end("P", p.source), end("D", p.destination));
        vec![from, to, size(p.bytes), count(p.descriptors), count(p.transfers)]
    };
    let rows: Vec<_> = list.iter().take(SHOWN).map(row).collect();
    if !rows.is_empty() {
        let _ = write!(out, "\n{}", table(&["pair", "", "bytes", "descriptors", "transfers"], &rows));
        more(out, answer.traffic.all_pairs.max(list.len() as u64), "pair");
    }
    if !list.is_empty() {
        let sum = |of: fn(&Pair) -> u64| list.iter().fold(0u64, |sum, p| sum.saturating_add(of(p)));
        let (bytes, descriptors, transfers) = (sum(|p| p.bytes), sum(|p| p.descriptors), sum(|p| p.transfers));
        let (bytes, descriptors) = (size(bytes), number_of(descriptors, "descriptor"));
        let _ = writeln!(out, "all that are listed: {bytes}, {descriptors}, {}", number_of(transfers, "transfer"));
    }
    if answer.traffic.all_pairs > list.len() as u64 {
        let _ = writeln!(
            out,
            "the {} with the most bytes are listed, of {} in all; what a rank sends is counted over those",
            count(list.len() as u64),
            count(answer.traffic.all_pairs)
        );
    }
}

fn descriptors(out: &mut String, answer: &Answer) {
    let d = &answer.descriptors;
    let most = d.before.iter().chain(&d.after).copied().max().unwrap_or(0);
    let mut rows = Vec::new();
    for (n, bytes) in d.sizes.iter().enumerate() {
        let of = |list: &[u64]| list.get(n).copied().unwrap_or(0);
        let (before, after) = (of(&d.before), of(&d.after));
        if before > 0 || after > 0 {
            // By orders of magnitude, as there may be very many of one size and few of another.
            let bar_of =
                |n: u64| bar(if n == 0 || most == 0 { 0.0 } else { (n as f64 + 1.0).ln() / (most as f64 + 1.0).ln() });
            rows.push(vec![size(*bytes), count(before), count(after), bar_of(before), bar_of(after)]);
        }
    }
    if !rows.is_empty() {
        let headings = ["descriptors up to", "not joined", "as given", "not joined (log)", "as given (log)"];
        let _ = write!(out, "\n{}", table(&headings, &rows));
        let sum = |list: &[u64]| count(list.iter().fold(0, |a, b| a.saturating_add(*b)));
        let (before, after) = (sum(&d.before), sum(&d.after));
        let measured = number_of(d.requests, "request");
        let _ = writeln!(
            out,
            "{before} with nothing joined, {after} as given,\nof {measured} that were measured, blocks in order"
        );
    }
}

fn pools(out: &mut String, answer: &Answer) {
    let p = &answer.pools;
    if p.capacity == 0 && p.peak_used == 0 {
        return;
    }
    let part = |n: u64| if p.capacity > 0 { n as f64 / p.capacity as f64 } else { f64::NAN };
    let row = |what: &str, n: u64| vec![what.to_owned(), size(n), share(part(n)), bar(part(n))];
    let rows = [row("taken out at most", p.peak_used), row("on its way at most", p.peak_in_flight)];
    let heading = format!("D's pools, {}", size(p.capacity));
    let _ =
        write!(out, "\n{}{} waited for room\n", table(&[&heading, "", "", ""], &rows), number_of(p.waited, "request"));
}

/// A part of one as a bar of eighths.
fn bar(part: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let part = if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of one")]
    let eighths = (part * (BAR * 8) as f64).round() as usize;
    // What is more than nothing is seen.
    let eighths = if part > 0.0 { eighths.max(1) } else { 0 };
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS.get(eighths % 8).copied().unwrap_or_default())
}

/// Whether a cell is a number, with or without a unit.
fn is_number(cell: &str) -> bool {
    cell == "-" || cell.starts_with(|c: char| c.is_ascii_digit()) && !cell.contains(" of ")
}

/// Rows of cells under headings. Columns of numbers stand to the right.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |row: &[String], i: usize| row.get(i).cloned().unwrap_or_default();
    let headings: Vec<String> = headings.iter().map(|h| (*h).to_owned()).collect();
    let columns: Vec<(usize, bool)> = (0..headings.len())
        .map(|i| {
            let cells = || rows.iter().map(|r| cell(r, i));
            let width = cells().chain([cell(&headings, i)]).map(|c| c.chars().count()).max().unwrap_or(0);
            (width, !rows.is_empty() && cells().all(|c| is_number(&c)))
        })
        .collect();
    let mut out = String::new();
    for row in std::iter::once(&headings).chain(rows) {
        let mut line = String::new();
        for (i, (width, right)) in columns.iter().enumerate() {
            let (gap, cell) = (if i > 0 { "  " } else { "" }, cell(row, i));
            let _ = if *right { write!(line, "{gap}{cell:>width$}") } else { write!(line, "{gap}{cell:<width$}") };
        }
        // Only what no machine has makes a line too long.
        let line = line.trim_end();
        match line.char_indices().nth(WIDTH) {
            Some(_) => out.extend(line.chars().take(WIDTH - 1).chain(['…'])),
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

/// A sentence on lines of at most [`WIDTH`] columns; those after the first are indented as far as its beginning.
pub(super) fn wrap(begin: &str, text: &str) -> String {
    let indent = begin.chars().count();
    let mut out = String::new();
    let (mut line, mut width) = (begin.to_owned(), indent);
    for word in text.split_whitespace() {
        let word = figures::clip(word, WIDTH - indent);
        let length = word.chars().count();
        if width > indent && width + 1 + length > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            (line, width) = (" ".repeat(indent), indent);
        }
        if width > indent {
            line.push(' ');
            width += 1;
        }
        line.push_str(&word);
        width += length;
    }
    out.push_str(line.trim_end());
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_they_say() {
        assert_eq!(
            (bar(0.0), bar(1e-9), bar(0.5), bar(f64::NAN)),
            (String::new(), "▏".into(), "█".repeat(10), String::new())
        );
        assert_eq!(bar(7.0).chars().count(), BAR);
    }

    #[test]
    fn lines_end_in_time() {
        let text = "word ".repeat(100) + &"long".repeat(100);
        for line in wrap("  change: ", &text).lines() {
            assert!(line.chars().count() <= WIDTH && line.starts_with("  "), "{line}");
        }
    }

    #[test]
    fn columns_of_numbers_stand_to_the_right() {
        let rows = [vec!["a".into(), "5 us".into()], vec!["bcd".into(), "1,000".into()]];
        assert_eq!(table(&["x", "n"], &rows), "x        n\na     5 us\nbcd  1,000\n");
    }
}
