//! The plot of a streamed request: one SVG file that needs nothing else.

use std::fmt::Write as _;

use super::report::Summary;
use super::stream::Streamed;
use crate::show;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 96.0;
/// Of a layer: two bars and a gap.
const ROW: f64 = 20.0;
const BAR: f64 = 7.5;
const COMPUTE: &str = "#4c78a8";
const WIRE: &str = "#f58518";

/// Time from left to right, layers from top to bottom, of each the compute and the wire side by side.
pub(crate) fn svg(summary: &Summary, s: &Streamed) -> String {
    let end = s.lines.iter().filter_map(|l| l.written.map(|w| w.1)).chain([s.delivered, s.sealed]).fold(0.0, f64::max);
    let step = tick(end);
    let scale = (WIDTH - LEFT - RIGHT) / end.max(1e-9);
    let x = |seconds: f64| LEFT + seconds * scale;
    #[expect(clippy::cast_precision_loss, reason = "a row's number")]
    let y = |row: usize| TOP + ROW * row as f64;
    let bottom = y(s.lines.len());
    let height = bottom + 46.0;
    let mut out = String::new();
    // Nothing that is written to a text can fail.
    let mut line =
        |text: std::fmt::Arguments<'_>| out.write_fmt(text).and_then(|()| out.write_char('\n')).unwrap_or_default();
    line(format_args!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11" fill="#222">"##
    ));
    line(format_args!(r##"<rect width="100%" height="100%" fill="#fff"/>"##));
    let title = format!(
        "{}: {} tokens from {} to {} over {}, {:.1} ms a layer",
        summary.model,
        summary.tokens,
        summary.prefill,
        summary.decode,
        summary.prefill_transport,
        s.layer_seconds * 1e3
    );
    line(format_args!(r##"<text x="16" y="24" font-size="15">{}</text>"##, escaped(&title)));
    let gain = format!(
        "prefill {:.1} ms; the transfer alone {:.1} ms, {:.1} ms of it after the prefill's end: {:.0} % of its time and {:.0} % of its bytes hidden",
        s.prefill_seconds * 1e3,
        s.alone_seconds * 1e3,
        s.exposed_seconds * 1e3,
        s.hidden * 100.0,
        s.early_bytes * 100.0
    );
    line(format_args!(r##"<text x="16" y="44">{}</text>"##, escaped(&gain)));
    for (at, color, name) in [(16.0, COMPUTE, "compute"), (96.0, WIRE, "wire")] {
        line(format_args!(r##"<rect x="{at}" y="56" width="12" height="9" fill="{color}"/>"##));
        line(format_args!(r##"<text x="{}" y="65">{name}</text>"##, at + 17.0));
    }
    let mut mark = 0.0;
    while mark <= end {
        let at = x(mark);
        line(format_args!(
            r##"<line x1="{at:.1}" y1="{:.1}" x2="{at:.1}" y2="{bottom:.1}" stroke="#ddd"/><text x="{at:.1}" y="{:.1}" text-anchor="middle">{:.0} ms</text>"##,
            TOP - 4.0,
            bottom + 16.0,
            mark * 1e3
        ));
        mark += step;
    }
    for (row, l) in s.lines.iter().enumerate() {
        line(format_args!(
            r##"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"##,
            LEFT - 8.0,
            y(row) + 12.0,
            escaped(&l.layer)
        ));
        let bytes = show::size(l.bytes);
        let mut bar = |(from, to): (f64, f64), top: f64, color: &str, what: &str| {
            line(format_args!(
                r##"<rect x="{:.1}" y="{top:.1}" width="{:.1}" height="{BAR}" fill="{color}"><title>{}: {what} {:.2} to {:.2} ms</title></rect>"##,
                x(from),
                ((to - from) * scale).max(1.0),
                escaped(&l.layer),
                from * 1e3,
                to * 1e3
            ));
        };
        bar(l.computed, y(row) + 1.5, COMPUTE, "computed");
        if let Some(written) = l.written {
            bar(written, y(row) + 1.5 + BAR, WIRE, &format!("{bytes} written"));
        }
    }
    for (at, name, shift) in [(s.sealed, "prefill ends", -4.0), (s.delivered, "delivered", 8.0)] {
        line(format_args!(
            r##"<line x1="{0:.1}" y1="{1:.1}" x2="{0:.1}" y2="{bottom:.1}" stroke="#222" stroke-dasharray="4 3"/><text x="{0:.1}" y="{2:.1}" text-anchor="end">{name}</text>"##,
            x(at),
            TOP - 4.0,
            TOP - 16.0 + shift
        ));
    }
    line(format_args!(r##"<text x="{LEFT}" y="{:.1}">time since the request was announced</text>"##, bottom + 34.0));
    line(format_args!("</svg>"));
    out
}

/// A round step of which some ten fit.
fn tick(end: f64) -> f64 {
    let mut step = 1e-4;
    for factor in [2.0, 2.5, 2.0].into_iter().cycle().take(30) {
        if end / step <= 12.0 {
            break;
        }
        step *= factor;
    }
    step
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
