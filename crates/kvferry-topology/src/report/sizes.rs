//! Descriptors by size, before and after neighbours are joined.

use std::fmt::Write as _;

use super::axis::Tick;
use super::data::Data;
use super::figures::{As, count, size};
use super::html::{self, percent};
use super::plot::Plot;

pub(super) fn draw(data: &Data) -> String {
    let all = &data.answer.descriptors;
    let column = |list: &[u64], n: usize| list.get(n).copied().unwrap_or(0);
    let rows: Vec<(u64, u64, u64)> =
        all.sizes.iter().enumerate().map(|(n, s)| (*s, column(&all.before, n), column(&all.after, n))).collect();
    let used = |r: &(u64, u64, u64)| r.1 > 0 || r.2 > 0;
    let (first, last) = (rows.iter().position(used), rows.iter().rposition(used));
    let (Some(first), Some(last)) = (first, last) else {
        return "<p class=\"none\">A transport was given no descriptor.</p>".to_owned();
    };
    let rows = rows.get(first..=last).unwrap_or_default();
    let mut out = format!(
        "<p>{} descriptors with nothing joined, {} as a transport is given them: of {} requests that were measured, with blocks one after \
         the other.</p>\n\
         <ul class=\"key\"><li class=\"before\">nothing joined</li><li class=\"joined\">as given</li></ul>\n",
        data.sum("descriptors.before", As::Count),
        data.sum("descriptors.after", As::Count),
        data.figure("descriptors.requests", As::Count)
    );
    let most = rows.iter().map(|r| r.1.max(r.2)).max().unwrap_or(1);
    // One decade more than the most, so that a single descriptor has a height too.
    let decades = decades(most);
    let height = |n: u64| if n == 0 { 0.0 } else { ((n as f64).log10() + 0.3) / (f64::from(decades) + 0.3) };
    let power = |d: u32| 10u64.checked_pow(d).map_or_else(|| format!("1e{d}"), count);
    let tick = |d: u32| Tick { at: (f64::from(d) + 0.3) / (f64::from(decades) + 0.3), label: power(d) };
    let y: Vec<Tick> = (0..=decades).filter(|d| decades < 7 || d.is_multiple_of(2)).map(tick).collect();
    let wide = 1.0 / rows.len() as f64;
    let mut over = String::new();
    let mut x = Vec::new();
    for (n, (bytes, before, after)) in rows.iter().enumerate() {
        let left = n as f64 * wide;
        x.push(Tick { at: left + wide / 2.0, label: size(*bytes) });
        for (class, count_of, at) in [("before", *before, 0.1), ("joined", *after, 0.5)] {
            if count_of > 0 {
                let (from, high) = (percent(left + at * wide), height(count_of));
                let title = format!(
                    "up to {}, {}: {}",
                    size(*bytes),
                    if class == "before" { "nothing joined" } else { "as given" },
                    count(count_of)
                );
                let _ = write!(
                    over,
                    "<rect class=\"{class}\" x=\"{from}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}</title></rect>",
                    percent(1.0 - high),
                    percent(0.38 * wide),
                    percent(high),
                    html::escape(&title),
                );
            }
        }
    }
    let label = format!("Descriptors by size, before and after joining: up to {} of one size", count(most));
    out.push_str(
        &Plot {
            label: &label,
            height: 220,
            x: &x,
            x_title: "size of a descriptor, up to",
            x_lines: false,
            y: &y,
            y_title: "descriptors (logarithmic)",
            stretched: "",
            over: &over,
        }
        .draw(),
    );
    out
}

/// The least number of decades that hold a count.
fn decades(most: u64) -> u32 {
    most.max(10).checked_ilog10().map_or(1, |d| if 10u64.checked_pow(d) == Some(most) { d } else { d + 1 })
}
