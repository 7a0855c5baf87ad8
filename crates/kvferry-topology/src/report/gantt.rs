//! One request: what computes, waits and moves, row by row, and when D may use the cache.

use std::fmt::Write as _;

use super::axis::Linear;
use super::data::Data;
use super::figures::{self, As, number_of, time};
use super::html::{self, percent};
use super::plot;
use crate::answer::{Gantt, GanttRow};

/// Pixels of a row where there are few, and where there are many.
const ROW: usize = 22;
const TIGHT: usize = 14;
/// Up to so many are few.
const FEW: usize = 24;
/// How wide the drawing is at least on a wide screen and on a narrow one, and a character of a bar's label.
const WIDE: f64 = 620.0;
const NARROW: f64 = 220.0;
const CHARACTER: f64 = 6.4;

pub(super) fn draw(data: &Data) -> String {
    let Some(gantt) = data.answer.gantt.as_ref().filter(|g| g.rows.iter().any(|r| !r.bars.is_empty())) else {
        return "<p class=\"none\">No request was looked at in detail.</p>".to_owned();
    };
    // D computes too, once it has all.
    let (computed, moved) = (end_of(gantt, |r| r.name.starts_with("prefill")), end_of(gantt, |r| r.kind == "wire"));
    let end = end_of(gantt, |_| true);
    let axis = Linear::new(end, 8.0, As::Time, false);
    let handover = computed > 0.0 && moved > computed;
    let mut out = format!(
        "<p>Request {} of the load, {} tokens of prompt. ",
        data.figure("gantt.request", As::Plain),
        data.figure("gantt.tokens", As::Count)
    );
    if handover {
        let (done, after) = (html::number(&time(computed)), html::number(&time(moved - computed)));
        let _ = write!(
            out,
            "Its prefill ends {done} after arrival; the last of its cache is at D <b>{after}</b> later (shaded)."
        );
    } else if computed > 0.0 && moved > 0.0 {
        out.push_str("All of its cache is at D when its prefill ends.");
    }
    out.push_str("</p>\n<ul class=\"key\"><li class=\"compute\">compute</li><li class=\"wait\">wait</li><li class=\"wire\">wire</li></ul>\n");
    let (pixels, tight) = if gantt.rows.len() > FEW { (TIGHT, " tight") } else { (ROW, "") };
    let _ = write!(out, "<div class=\"gantt{tight}\"><div class=\"names\">");
    for row in &gantt.rows {
        let (full, cut) = (html::name(&row.name), html::short(&row.name, 40));
        let _ = write!(out, "<span title=\"{full}\">{cut}</span>");
    }
    let height = gantt.rows.len() * pixels;
    let label = format!(
        "Gantt chart of one request: {}, {} from its arrival to its end",
        number_of(gantt.rows.len() as u64, "row"),
        time(end)
    );
    let _ = write!(
        out,
        "</div>\n<div class=\"area\"><svg class=\"plot\" role=\"img\" aria-label=\"{}\" width=\"100%\" height=\"{height}\">{}",
        html::escape(&label),
        plot::rules(&axis.ticks, &[]),
    );
    if handover {
        let (from, width) = (percent(axis.at(computed)), percent(axis.at(moved) - axis.at(computed)));
        let _ = write!(out, "<rect class=\"after\" x=\"{from}\" width=\"{width}\" height=\"100%\"/>");
        let _ = write!(out, "<line class=\"mark\" x1=\"{from}\" x2=\"{from}\" y1=\"0\" y2=\"100%\"/>");
    }
    for (n, row) in gantt.rows.iter().enumerate() {
        bars(&mut out, row, n * pixels, &axis);
    }
    let _ = write!(out, "</svg>\n{}<div class=\"xt\">after arrival</div></div></div>", plot::labels(&axis.ticks));
    let left = data.all_rows.saturating_sub(gantt.rows.len());
    if left > 0 {
        let _ = write!(out, "<p class=\"more\">{} are not shown.</p>", number_of(left as u64, "row"));
    }
    out
}

/// When the last bar of some rows ends.
fn end_of(gantt: &Gantt, which: impl Fn(&GanttRow) -> bool) -> f64 {
    let ends = gantt.rows.iter().filter(|r| which(r)).flat_map(|r| &r.bars).map(|b| b.1);
    ends.filter(|e| e.is_finite()).fold(0.0, f64::max)
}

fn bars(out: &mut String, row: &GanttRow, top: usize, axis: &Linear) {
    let class = match row.kind.as_str() {
        "compute" => "compute",
        "wire" => "wire",
        _ => "wait",
    };
    let _ = write!(out, "<g class=\"{class}\" transform=\"translate(0 {top})\">");
    for (begin, end, what) in &row.bars {
        let (from, to) = (axis.at(*begin), axis.at(*end));
        let share = (to - from).max(0.0);
        let (x, width) = (percent(from), percent(share.max(0.001)));
        let what = figures::clean(&figures::clip(what, 60));
        let title = html::escape(&format!("{what}: {} to {}", time(*begin), time(*end)));
        let needs = what.chars().count() as f64 * CHARACTER + 10.0;
        let _ = if share * WIDE > needs {
            let only = if share * NARROW > needs { "" } else { " class=\"w\"" };
            let text = html::escape(&what);
            write!(
                out,
                "<svg x=\"{x}\" y=\"3\" width=\"{width}\" height=\"16\"><title>{title}</title><rect width=\"100%\" rx=\"2\"/><text{only} x=\"5\" y=\"12\">{text}</text></svg>"
            )
        } else {
            write!(out, "<rect x={x} width={width} rx=2><title>{title}</title></rect>")
        };
    }
    out.push_str("</g>\n");
}
