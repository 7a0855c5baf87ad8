//! The frame of a chart: labels beside it, lines behind it, and what screen readers and narrow screens need.
//!
//! A drawing is as wide as the page lets it be. So places on the horizontal axis are per cents, letters keep their size, and labels that would touch on
//! a narrow screen are of class `w`, which narrow screens leave out.

use std::fmt::Write as _;

use super::axis::{self, End, Tick};
use super::html::{self, percent};

/// How wide a chart is at least where the screen is wide, and where it is narrow, in pixels.
const WIDE: f64 = 560.0;
const NARROW: f64 = 270.0;

/// A chart with two axes.
pub(super) struct Plot<'a> {
    /// What it shows, for those who don't see it.
    pub(super) label: &'a str,
    /// Its height in pixels.
    pub(super) height: u32,
    /// Ticks of the horizontal axis, and what it is.
    pub(super) x: &'a [Tick],
    pub(super) x_title: &'a str,
    /// Whether there are lines at them.
    pub(super) x_lines: bool,
    /// Ticks of the vertical axis, and what it is.
    pub(super) y: &'a [Tick],
    pub(super) y_title: &'a str,
    /// Drawn in an area of 1,000 by 1,000 that is stretched, its upper end at 0.
    pub(super) stretched: &'a str,
    /// Drawn as it is, in per cents.
    pub(super) over: &'a str,
}

impl Plot<'_> {
    pub(super) fn draw(&self) -> String {
        let Self { height, stretched, over, .. } = self;
        let mut out = format!("<div class=\"chart\"><div class=\"yt\">{}</div>\n", html::escape(self.y_title));
        let longest = self.y.iter().map(|t| t.label.chars().count()).max().unwrap_or(0);
        let width = longest as f64 * 7.0 + 10.0;
        let _ = write!(out, "<svg class=\"y\" aria-hidden=\"true\" width=\"{width}\" height=\"{height}\">");
        for tick in self.y {
            let (y, label) = (percent(1.0 - tick.at), html::number(&tick.label));
            let _ = write!(
                out,
                "<text class=\"t\" x=\"{}\" y=\"{y}\" dy=\"4\" text-anchor=\"end\">{label}</text>",
                width - 7.0
            );
        }
        let label = html::escape(self.label);
        let _ = write!(
            out,
            "</svg>\n<div class=\"area\"><svg class=\"plot\" role=\"img\" aria-label=\"{label}\" width=\"100%\" height=\"{height}\">"
        );
        out.push_str(&rules(if self.x_lines { self.x } else { &[] }, self.y));
        let _ = writeln!(
            out,
            "<svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" width=\"100%\" height=\"100%\" class=\"s\">{stretched}</svg>{over}</svg>"
        );
        out.push_str(&labels(self.x));
        let _ = writeln!(out, "<div class=\"xt\">{}</div></div></div>", html::escape(self.x_title));
        out
    }
}

/// Lines at the ticks.
pub(super) fn rules(x: &[Tick], y: &[Tick]) -> String {
    let mut out = String::from("<g class=\"grid\">");
    for tick in x {
        let at = percent(tick.at);
        let _ = write!(out, "<line x1=\"{at}\" x2=\"{at}\" y1=\"0\" y2=\"100%\"/>");
    }
    for tick in y {
        let at = percent(1.0 - tick.at);
        let _ = write!(out, "<line x1=\"0\" x2=\"100%\" y1=\"{at}\" y2=\"{at}\"/>");
    }
    out.push_str("</g>");
    out
}

/// Labels under a horizontal axis: those that there is room for.
pub(super) fn labels(ticks: &[Tick]) -> String {
    let (wide, narrow) = (axis::room(ticks, WIDE), axis::room(ticks, NARROW));
    let mut out = String::from("<svg class=\"xl\" aria-hidden=\"true\" width=\"100%\" height=\"18\">");
    for ((tick, wide), narrow) in ticks.iter().zip(wide).zip(narrow) {
        let only = match (wide, narrow) {
            (false, false) => continue,
            (true, true) => "",
            (true, false) => " w",
            (false, true) => " nw",
        };
        let end = match axis::end_of(tick.at) {
            End::First => "start",
            End::Last => "end",
            End::Neither => "middle",
        };
        let x = match axis::end_of(tick.at) {
            End::First => percent(0.0),
            End::Last => percent(1.0),
            End::Neither => percent(tick.at),
        };
        let label = html::number(&tick.label);
        let _ = write!(out, "<text class=\"t{only}\" x=\"{x}\" y=\"13\" text-anchor=\"{end}\">{label}</text>");
    }
    out.push_str("</svg>\n");
    out
}

/// A line or an area through points from 0 to 1, the vertical ones counted from below.
pub(super) fn path(points: &[(f64, f64)]) -> String {
    let mut out = String::new();
    for (n, (x, y)) in points.iter().enumerate() {
        let _ = write!(out, "{}{:.1} {:.1}", if n == 0 { "M" } else { "L" }, x * 1000.0, 1000.0 - y * 1000.0);
    }
    out
}
