//! The time to first token of this run and of others with the same load, as shares of requests and as histograms.

use std::fmt::Write as _;

use super::axis::{Linear, Logarithmic, Tick};
use super::data::Data;
use super::figures::As;
use super::html;
use super::plot::{self, Plot};
use crate::answer::{Answer, Times};

/// One run.
struct Run<'a> {
    name: String,
    /// Where the time to first token and the handover stand in the embedded JSON.
    first_token: String,
    handover: Option<String>,
    times: &'a Times,
}

fn runs(data: &Data) -> Vec<Run<'_>> {
    let answer = &data.answer;
    let path = |name| data.time(name).map(|n| format!("times.{n}"));
    let mut out = Vec::new();
    if let Some(n) = data.time("time to first token")
        && let Some(times) = answer.times.get(n)
    {
        let (first_token, handover) = (format!("times.{n}"), path("handover"));
        out.push(Run { name: way(answer), first_token, handover, times });
    }
    for (n, other) in answer.compared.iter().enumerate() {
        if other.first_token.count > 0 {
            let handover = (other.handover.count > 0).then(|| format!("compared.{n}.handover"));
            let first_token = format!("compared.{n}.first_token");
            out.push(Run { name: other.with.clone(), first_token, handover, times: &other.first_token });
        }
    }
    out
}

/// This run's way, written as [`Compared::with`](crate::answer::Compared::with) has that of the others.
fn way(answer: &Answer) -> String {
    if answer.stream == "none" { answer.mode.clone() } else { format!("{}, stream {}", answer.mode, answer.stream) }
}

/// This run's way of streaming.
pub(super) fn this(answer: &Answer) -> String {
    format!("stream = \"{}\"", answer.stream)
}

/// Bars that make sense: their upper ends grow.
fn bars(times: &Times) -> Vec<(f64, u64)> {
    let mut last = 0.0;
    let mut keep = |b: &&(f64, u64)| {
        let good = b.0.is_finite() && b.0 > last;
        if good {
            last = b.0;
        }
        good
    };
    times.bars.iter().filter(|b| keep(b)).copied().collect()
}

pub(super) fn draw(data: &Data) -> String {
    let runs = runs(data);
    if runs.is_empty() {
        return "<p class=\"none\">No request got a first token.</p>".to_owned();
    }
    let mut out = String::from("<ul class=\"key\">");
    for (n, run) in runs.iter().enumerate() {
        let this = if n == 0 { " (this run)" } else { "" };
        let _ = write!(out, "<li class=\"run{n}\">{}{this}</li>", html::name(&run.name));
    }
    out.push_str("</ul>\n");
    let drawn: Vec<Vec<(f64, u64)>> = runs.iter().map(|r| bars(r.times)).collect();
    let ends = || drawn.iter().flatten().filter(|b| b.1 > 0).map(|b| b.0);
    let (low, high) = (ends().fold(f64::INFINITY, f64::min), ends().fold(0.0, f64::max));
    if high > 0.0 {
        // The first bar begins somewhere below its end: where a bar as wide as the next would.
        let steps: Vec<f64> =
            drawn.iter().flat_map(|b| b.iter().zip(b.iter().skip(1)).map(|(a, b)| b.0 / a.0)).collect();
        let step = steps.iter().copied().fold(f64::INFINITY, f64::min);
        let step = if step.is_finite() { step.min(10.0) } else { 1.5 };
        let x = Logarithmic::new(low / step, high, As::Time);
        out.push_str(&shares(&runs, &drawn, &x));
        out.push_str(&histogram(&drawn, &x, step));
    }
    out.push_str(&table(data, &runs));
    out
}

fn shares(runs: &[Run<'_>], drawn: &[Vec<(f64, u64)>], x: &Logarithmic) -> String {
    let mut lines = String::new();
    for (n, bars) in drawn.iter().enumerate() {
        let all: u64 = bars.iter().fold(0, |sum, b| sum.saturating_add(b.1));
        let mut points = vec![(0.0, 0.0)];
        let mut sum = 0u64;
        for (end, count) in bars {
            sum = sum.saturating_add(*count);
            points.push((x.at(*end), sum as f64 / all.max(1) as f64));
        }
        points.push((1.0, 1.0));
        let _ = write!(lines, "<path class=\"line run{n}\" d=\"{}\"/>", plot::path(&points));
    }
    let y: Vec<Tick> = [0.0, 0.25, 0.5, 0.75, 1.0].map(|at| Tick { at, label: As::Share.write(at) }).into();
    let label = format!("Share of requests with their first token by a time, for {}", names(runs));
    Plot {
        label: &label,
        height: 220,
        x: &x.ticks,
        x_title: "",
        x_lines: true,
        y: &y,
        y_title: "requests that have their first token by then",
        stretched: &lines,
        over: "",
    }
    .draw()
}

fn histogram(drawn: &[Vec<(f64, u64)>], x: &Logarithmic, step: f64) -> String {
    let most = drawn.iter().flatten().map(|b| b.1).max().unwrap_or(1);
    let y = Linear::new(most as f64, 3.0, As::Count, true);
    let mut shapes = String::new();
    for (n, bars) in drawn.iter().enumerate() {
        let mut points = Vec::new();
        let mut from = bars.first().map_or(0.0, |b| b.0 / step);
        points.push((x.at(from), 0.0));
        for (end, count) in bars {
            let height = y.at(*count as f64);
            points.push((x.at(from), height));
            points.push((x.at(*end), height));
            from = *end;
        }
        points.push((x.at(from), 0.0));
        let _ = write!(shapes, "<path class=\"shape run{n}\" d=\"{}Z\"/>", plot::path(&points));
    }
    Plot {
        label: "Histogram of the time to first token",
        height: 120,
        x: &x.ticks,
        x_title: "time to first token (logarithmic)",
        x_lines: true,
        y: &y.ticks,
        y_title: "requests in each step of time",
        stretched: &shapes,
        over: "",
    }
    .draw()
}

fn names(runs: &[Run<'_>]) -> String {
    runs.iter().map(|r| super::figures::clean(&super::figures::clip(&r.name, 40))).collect::<Vec<_>>().join(" and ")
}

/// The runs in figures.
fn table(data: &Data, runs: &[Run<'_>]) -> String {
    let mut out = String::from(
        "<div class=\"scroll\"><table><caption>The same in figures, and what the handover costs</caption><thead><tr><th scope=\"col\">Run</th>\
         <th scope=\"col\" class=\"r\">p50</th><th scope=\"col\" class=\"r\">p90</th><th scope=\"col\" class=\"r\">p99</th>\
         <th scope=\"col\" class=\"r\">Most</th></tr></thead>\n<tbody>\n",
    );
    for run in runs {
        let times = [("time to first token", Some(&run.first_token)), ("handover", run.handover.as_ref())];
        for (what, path) in times {
            let Some(path) = path else { continue };
            let _ = write!(out, "<tr><th scope=\"row\">{}<small>{what}</small></th>", html::name(&run.name));
            for key in ["p50", "p90", "p99", "max"] {
                let _ = write!(out, "<td class=\"r\">{}</td>", data.figure(&format!("{path}.{key}"), As::Time));
            }
            out.push_str("</tr>\n");
        }
    }
    out.push_str("</tbody></table></div>\n");
    out
}
