//! A sweep as tables of a terminal.

use std::fmt::Write as _;

use super::super::figures::{self, count, number_of, share, time};
use super::super::text::{WIDTH, table, wrap};
use super::columns::Columns;
use crate::sweep::{Figures, Objective, Report};

/// The most reasons that a terminal shows, points of a front, and characters of a reason.
const REASONS: usize = 12;
const FRONT: usize = 20;
const REASON: usize = 600;

/// A sweep as tables of plain text, with a newline at the end.
#[must_use]
pub fn text(report: &Report<'_>) -> String {
    let mut out = String::new();
    let base = report.sweep.base();
    let _ = writeln!(out, "{}", figures::clip(&figures::clean(&base.name), WIDTH));
    let (done, feasible) = report.results.done();
    let all = report.sweep.candidates().len();
    let _ = writeln!(
        out,
        "{} for at most {} GPUs: {} work, {} do not{}",
        number_of(all as u64, "candidate"),
        count(report.sweep.settings().budget.into()),
        count(feasible as u64),
        count((done - feasible) as u64),
        if done < all { format!(", {} are not looked at", count((all - done) as u64)) } else { String::new() },
    );
    let requests = number_of(report.sweep.load().requests.len() as u64, "request");
    let load = format!("{requests}, seed {}, closed form; the best {}", base.seed, order(report.question.objective));
    out.push_str(&wrap("", &load));
    out.push_str(&wrap("", LEGEND));
    let columns = Columns::new(report);
    if let Some(same) = columns.same() {
        out.push_str(&wrap("", &format!("all have {same}")));
    }
    best(&mut out, report, &columns);
    events(&mut out, report, &columns);
    front(&mut out, report, &columns);
    reasons(&mut out, report);
    if let Some((best, _)) = report.ranked.first().and_then(|at| report.row(*at)) {
        let _ = write!(out, "\nthe best in the scenario's keys, for cargo xtask sim:\n");
        for line in best.keys(report.sweep.shapes()).lines() {
            let _ = writeln!(out, "  {line}");
        }
    }
    out
}

/// What decides, in words.
pub(super) fn order(objective: Objective) -> String {
    let ties: Vec<&str> = objective.with_ties().skip(1).map(Objective::name).collect();
    format!("by {}, of equal ones by {}, by name", objective.name(), ties.join(", "))
}

const HEADINGS: [&str; 6] = ["GPUs", "p50", "p99", "token p99", "link", "descr."];
/// What they are.
const LEGEND: &str = "p50, p99: of the handover; token p99: of the time to first token; link: mean share of the fullest; descr.: descriptors of \
                      a request";

fn cells(f: &Figures) -> [String; 6] {
    [
        count(f.gpus.into()),
        time(f.handover_p50),
        time(f.handover_p99),
        time(f.first_token_p99),
        share(f.hot_link),
        figures::As::Count.write(f.descriptors),
    ]
}

fn rows<'a>(
    report: &Report<'_>,
    columns: &Columns,
    list: impl Iterator<Item = (usize, &'a usize)>,
) -> Vec<Vec<String>> {
    let row = |(rank, at): (usize, &usize)| {
        let (candidate, f) = report.row(*at)?;
        let mut row = vec![(rank + 1).to_string()];
        row.extend(columns.cells(candidate));
        row.extend(cells(f));
        Some(row)
    };
    list.filter_map(row).collect()
}

fn headings(columns: &Columns) -> Vec<&'static str> {
    let mut out = vec!["#"];
    out.extend(columns.headings());
    out.extend(HEADINGS);
    out
}

fn best(out: &mut String, report: &Report<'_>, columns: &Columns) {
    let rows = rows(report, columns, report.ranked.iter().take(report.question.top).enumerate());
    if rows.is_empty() {
        out.push_str("\nnone works; the reasons are below\n");
        return;
    }
    let _ = write!(out, "\n{}", table(&headings(columns), &rows));
    let left = report.ranked.len() - rows.len();
    if left > 0 {
        let _ = writeln!(out, "and {} more that work", count(left as u64));
    }
}

fn events(out: &mut String, report: &Report<'_>, columns: &Columns) {
    let mut rows = Vec::new();
    let mut failed = Vec::new();
    for (rank, at) in report.ranked.iter().enumerate() {
        let (Some((candidate, closed)), Some(events)) = (report.row(*at), report.results.events.get(at)) else {
            continue;
        };
        let events = match events {
            Ok(events) => events,
            Err(why) => {
                failed.push(format!("{}: {}", rank + 1, figures::clean(why)));
                continue;
            }
        };
        let mut row = vec![(rank + 1).to_string()];
        row.extend(columns.cells(candidate));
        for of in [Objective::HandoverP50, Objective::HandoverP99, Objective::FirstTokenP99] {
            row.push(format!("{} : {}", time(of.value(closed)), time(of.value(events))));
        }
        rows.push(row);
    }
    if !rows.is_empty() {
        let mut headings = vec!["#"];
        headings.extend(columns.headings());
        headings.extend(["handover p50", "p99", "token p99"]);
        let _ = write!(out, "\nthe closed form : discrete events\n{}", table(&headings, &rows));
    }
    for why in failed {
        out.push_str(&wrap("no events for ", &why));
    }
}

fn front(out: &mut String, report: &Report<'_>, columns: &Columns) {
    let steps = report.steps();
    let rank = |at: &usize| report.ranked.iter().position(|other| other == at).unwrap_or(0);
    let rows = rows(report, columns, steps.iter().take(FRONT).map(|(at, _)| (rank(at), at)));
    if rows.is_empty() {
        return;
    }
    let (a, b) = report.question.axes;
    let title = format!("no other is better in both {} and {}; of equal ones the first", a.name(), b.name());
    let _ = write!(out, "\n{title}:\n{}", table(&headings(columns), &rows));
    if steps.len() > rows.len() {
        let _ = writeln!(out, "and {} more", count((steps.len() - rows.len()) as u64));
    }
}

fn reasons(out: &mut String, report: &Report<'_>) {
    if report.reasons.is_empty() {
        return;
    }
    out.push_str("\nwhy the others do not work:\n");
    for (reason, of) in report.reasons.iter().take(REASONS) {
        let begin = format!("{:>8} x {:<9} ", count(of.len() as u64), reason.kind.name());
        out.push_str(&wrap(&begin, &figures::clean(&figures::clip(&reason.text.replace('\n', "; "), REASON))));
    }
    let left = report.reasons.len().saturating_sub(REASONS);
    if left > 0 {
        let _ = writeln!(out, "and {} that --json lists", number_of(left as u64, "more reason"));
    }
}
