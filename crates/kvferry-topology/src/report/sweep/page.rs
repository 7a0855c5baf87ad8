//! A sweep as a page: one file that any browser opens, with nothing to fetch.

use std::fmt::Write as _;

use serde_json::Value;

use super::super::data::element;
use super::super::figures::{As, NONE};
use super::super::page::{SCRIPT, SCRIPT_HASH, STYLE, STYLE_HASH};
use super::super::{color, html};
use super::chart;
use super::columns::Columns;
use super::text::order;
use crate::sweep::results::ROWS;
use crate::sweep::{Objective, Report};

const OWN_STYLE: &str = include_str!("sweep.css");
/// SHA-256 of it.
const OWN_HASH: &str = "1fW6WgYka92op8rLPcZmLJzDdNKTEVS0jzHeXAV/iEo=";
/// The most of the best that a page shows.
const TOP: usize = 200;

/// What the page embeds, and figures that say where in it they stand.
struct Data(Value);

impl Data {
    fn figure(&self, path: &str, what: As) -> String {
        let value = self.0.pointer(&format!("/{}", path.replace('.', "/"))).unwrap_or(&Value::Null);
        let text = value.as_f64().map_or_else(|| NONE.to_owned(), |v| what.write(v));
        element("path", path, &value.to_string(), what, &text)
    }
}

/// A sweep as one HTML page that needs nothing else: the best, the front of two axes, and why the others do not work.
#[must_use]
pub fn page(report: &Report<'_>) -> String {
    let mut json = Vec::new();
    let mut shown = report.question;
    shown.top = shown.top.min(TOP);
    let cut = Report::new(report.sweep, report.results, shown);
    // Writing to memory does not fail; without data the page has no figures, which is seen.
    let written = cut.json(&mut json, false).is_ok();
    let json = String::from_utf8(json).ok().filter(|_| written).unwrap_or_else(|| "null".into());
    let data = Data(serde_json::from_str(&json).unwrap_or_default());
    let columns = Columns::new(report);
    let name = html::name(&report.sweep.base().name);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{STYLE_HASH}' 'sha256-{OWN_HASH}'; \
         script-src 'sha256-{SCRIPT_HASH}'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>{name} · kvferry sweep</title>\n<style>{STYLE}{}</style>\n<style>{OWN_STYLE}</style>\n</head>\n<body>\n",
        color::rules(),
    );
    header(&mut out, &cut, &data, &columns);
    out.push_str("<main>\n");
    let axes = report.question.axes;
    let sections = [
        ("front", format!("{} against {}", capital(axes.1.title()), axes.0.title()), chart::draw(report)),
        ("steps", "No other is better in both".to_owned(), steps(&cut, &data, &columns)),
        ("best", "The best".to_owned(), best(&cut, &data, &columns)),
        ("reasons", "Why the others do not work".to_owned(), reasons(&cut, &data)),
        ("keys", "The best, in the scenario's keys".to_owned(), keys(&cut)),
    ];
    for (id, title, body) in &sections {
        let title = html::name(title);
        let _ = write!(
            out,
            "<section id=\"{id}\" aria-labelledby=\"{id}-h\">\n<h2 id=\"{id}-h\">{title}</h2>\n{body}\n</section>\n"
        );
    }
    let _ = write!(
        out,
        "</main>\n<footer><p>Each candidate is the scenario with these keys, judged by the closed form, which is blind to bursts; the best are \
         worth a run by discrete events. Sizes are powers of 1,024. Figures stand as numbers in this page's <code>#answer</code>; all candidates \
         are in the JSON of the sweep.</p></footer>\n<div id=\"tip\" role=\"status\" hidden></div>\n\
         <script type=\"application/json\" id=\"answer\">{}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        html::json(&json),
    );
    out
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

fn header(out: &mut String, report: &Report<'_>, data: &Data, columns: &Columns) {
    let objective = report.question.objective;
    let _ = write!(
        out,
        "<header>\n<p class=\"over\">kvferry · sweep · closed form</p>\n<h1>{}</h1>\n<p class=\"lead\">",
        html::name(&report.sweep.base().name)
    );
    let (all, works) = (data.figure("candidates", As::Count), data.figure("feasible", As::Count));
    let _ = match report.ranked.first().and_then(|at| report.row(*at)) {
        None => write!(out, "<strong class=\"bad\">None works:</strong> <b>{works}</b> of <b>{all}</b> candidates."),
        Some((best, _)) => write!(
            out,
            "<b>{works}</b> of <b>{all}</b> candidates work. By {} the best is <code>{}</code>: <b>{}</b>.",
            html::name(objective.title()),
            html::name(&best.to_string()),
            data.figure(&format!("ranked.0.figures.{}", key(objective)), chart::unit(objective)),
        ),
    };
    let _ = write!(
        out,
        "</p>\n<p class=\"setup\">At most {} GPUs · {} requests · seed {} · ranked {}",
        data.figure("budget", As::Count),
        data.figure("requests", As::Count),
        report.sweep.base().seed,
        html::name(&order(objective)),
    );
    if let Some(same) = columns.same() {
        let _ = write!(out, " · all have {}", html::name(&same));
    }
    out.push_str("</p>\n<nav aria-label=\"Sections\">");
    for (id, name) in
        [("front", "Plot"), ("steps", "Front"), ("best", "The best"), ("reasons", "Reasons"), ("keys", "Keys")]
    {
        let _ = write!(out, "<a href=\"#{id}\">{name}</a>");
    }
    out.push_str("</nav>\n</header>\n");
}

/// Where JSON has an objective's figure.
fn key(objective: Objective) -> &'static str {
    match objective {
        Objective::HandoverP50 => "handover_p50",
        Objective::HandoverP99 => "handover_p99",
        Objective::FirstTokenP99 => "first_token_p99",
        Objective::HotLink => "hot_link",
        Objective::Descriptors => "descriptors",
        Objective::Gpus => "gpus",
    }
}

const FIGURES: [(Objective, &str); 6] = [
    (Objective::Gpus, "GPUs"),
    (Objective::HandoverP50, "Handover"),
    (Objective::HandoverP99, "p99"),
    (Objective::FirstTokenP99, "First token p99"),
    (Objective::HotLink, "Fullest link"),
    (Objective::Descriptors, "Descriptors"),
];

fn table(caption: &str, first: &str, columns: &Columns, rows: &str, last: &str) -> String {
    let mut head = format!("<th scope=\"col\">{first}</th>");
    for heading in columns.headings() {
        let _ = write!(head, "<th scope=\"col\">{heading}</th>");
    }
    for (_, heading) in FIGURES {
        let _ = write!(head, "<th scope=\"col\" class=\"r\">{heading}</th>");
    }
    if !last.is_empty() {
        let _ = write!(head, "<th scope=\"col\" class=\"r\">{last}</th>");
    }
    format!(
        "<div class=\"scroll\"><table class=\"ranks\"><caption>{caption}</caption><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )
}

/// One row: its rank, what tells it apart, its figures, which stand at a path.
fn row(report: &Report<'_>, data: &Data, columns: &Columns, (at, path): (usize, &str), last: &str) -> String {
    let Some((candidate, _)) = report.row(at) else { return String::new() };
    let on = if report.front.contains(&at) { " class=\"on\"" } else { "" };
    let mut out = format!("<tr{on}><td>{}</td>", data.figure(&format!("{path}.rank"), As::Count));
    for cell in columns.cells(candidate) {
        let _ = write!(out, "<td>{}</td>", html::name(&cell));
    }
    for (objective, _) in FIGURES {
        let figure = data.figure(&format!("{path}.figures.{}", key(objective)), chart::unit(objective));
        let _ = write!(out, "<td class=\"r\">{figure}</td>");
    }
    let _ = writeln!(out, "{last}</tr>");
    out
}

fn steps(report: &Report<'_>, data: &Data, columns: &Columns) -> String {
    let mut rows = String::new();
    let mut place = 0;
    for (at, more) in report.steps() {
        // Equal points stand one after the other; the first of them is shown.
        if place < ROWS {
            let last = format!("<td class=\"r\">{}</td>", if more > 0 { more.to_string() } else { String::new() });
            rows.push_str(&row(report, data, columns, (at, &format!("front.{place}")), &last));
        }
        place += more + 1;
    }
    if rows.is_empty() {
        return "<p class=\"none\">No candidate works.</p>".to_owned();
    }
    let (a, b) = report.question.axes;
    let caption =
        format!("Less of {} costs more of {}, and the other way round", html::name(a.title()), html::name(b.title()));
    table(&caption, "Rank", columns, &rows, "Alike")
}

fn best(report: &Report<'_>, data: &Data, columns: &Columns) -> String {
    let mut rows = String::new();
    let with_events = report.ranked.iter().take(report.question.top).any(|at| report.results.events.contains_key(at));
    for (n, at) in report.ranked.iter().take(report.question.top).enumerate() {
        let last = match (with_events, report.results.events.get(at)) {
            (false, _) => String::new(),
            (true, Some(Ok(_))) => {
                let figure = data.figure(&format!("ranked.{n}.events.figures.handover_p99"), As::Time);
                let token = data.figure(&format!("ranked.{n}.events.figures.first_token_p99"), As::Time);
                format!("<td class=\"r\">{figure}, {token}</td>")
            }
            (true, other) => format!("<td class=\"r\">{}</td>", if other.is_some() { "failed" } else { NONE }),
        };
        rows.push_str(&row(report, data, columns, (*at, &format!("ranked.{n}")), &last));
    }
    if rows.is_empty() {
        return "<p class=\"none\">No candidate works.</p>".to_owned();
    }
    let (caption, last) = if with_events {
        (
            "Those with a mark are on the front; the last column is handover p99 and first token p99 by discrete events",
            "Events",
        )
    } else {
        ("Those with a mark are on the front", "")
    };
    table(caption, "Rank", columns, &rows, last)
}

fn reasons(report: &Report<'_>, data: &Data) -> String {
    if report.reasons.is_empty() {
        return "<p class=\"none\">All work.</p>".to_owned();
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table class=\"reasons\"><caption>The most frequent first; a candidate may have several</caption><thead><tr>\
         <th scope=\"col\" class=\"r\">Candidates</th><th scope=\"col\">Kind</th><th scope=\"col\">Reason</th></tr></thead>\n<tbody>\n",
    );
    for (n, (reason, _)) in report.reasons.iter().enumerate().take(ROWS) {
        let _ = writeln!(
            out,
            "<tr><td class=\"r\">{}</td><td><code>{}</code></td><td>{}</td></tr>",
            data.figure(&format!("reasons.{n}.candidates"), As::Count),
            reason.kind.name(),
            html::sentence(&reason.text.replace('\n', "; ")),
        );
    }
    out.push_str("</tbody></table></div>\n");
    if report.reasons.len() > ROWS {
        let _ = write!(out, "<p class=\"more\">The {ROWS} most frequent of {} are shown.</p>", report.reasons.len());
    }
    out
}

fn keys(report: &Report<'_>) -> String {
    let Some((best, _)) = report.ranked.first().and_then(|at| report.row(*at)) else {
        return "<p class=\"none\">No candidate works.</p>".to_owned();
    };
    format!("<pre>{}</pre>", html::escape(&best.keys(report.sweep.shapes())))
}
