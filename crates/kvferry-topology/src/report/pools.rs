//! How full D's pools were, and how much was on its way, over time.

use std::fmt::Write as _;

use super::axis::Linear;
use super::data::Data;
use super::figures::{As, size};
use super::html::percent;
use super::plot::{self, Plot};

pub(super) fn draw(data: &Data) -> String {
    let (pools, span) = (&data.answer.pools, data.answer.span);
    let mut out = format!(
        "<p>D's engines have room for {}. At most {} were taken out and {} on their way at once. Requests that waited for room: {}.</p>\n",
        data.figure("pools.capacity", As::Size),
        data.figure("pools.peak_used", As::Size),
        data.figure("pools.peak_in_flight", As::Size),
        data.figure("pools.waited", As::Count),
    );
    if pools.in_flight.is_empty() && pools.used.is_empty() {
        out.push_str("<p class=\"none\">This engine knows nothing of what is where at which time.</p>");
        return out;
    }
    out.push_str("<ul class=\"key\"><li class=\"used\">taken out</li><li class=\"flight\">on its way</li>");
    let taken = pools.used.iter().chain(&pools.in_flight).copied().max().unwrap_or(0);
    let taken = taken.max(pools.peak_used).max(pools.peak_in_flight);
    // A capacity far above everything would press the rest flat on the ground.
    let near = pools.capacity > 0 && pools.capacity / 8 <= taken;
    out.push_str(if near { "<li class=\"capacity\">capacity</li></ul>\n" } else { "</ul>\n" });
    let most = if near { taken.max(pools.capacity) } else { taken };
    let y = Linear::new(most as f64, 4.0, As::Size, true);
    let x = Linear::new(span, 8.0, As::Time, false);
    let mut areas = String::new();
    for (class, list) in [("used", &pools.used), ("flight", &pools.in_flight)] {
        let count = list.len().max(1) as f64;
        let mut points = vec![(0.0, 0.0)];
        points.extend(list.iter().enumerate().map(|(n, b)| ((n + 1) as f64 / count, y.at(*b as f64))));
        let line = plot::path(&points);
        let _ = write!(
            areas,
            "<path class=\"fill {class}\" d=\"{line}L1000 1000Z\"/><path class=\"line {class}\" d=\"{line}\"/>"
        );
    }
    let mut over = String::new();
    if near {
        let at = percent(1.0 - y.at(pools.capacity as f64));
        let _ = write!(over, "<line class=\"capacity\" x1=\"0\" x2=\"100%\" y1=\"{at}\" y2=\"{at}\"/>");
    }
    let label = format!(
        "Bytes taken out of D's pools and on their way over time: at most {} and {} of {}",
        size(pools.peak_used),
        size(pools.peak_in_flight),
        size(pools.capacity)
    );
    out.push_str(
        &Plot {
            label: &label,
            height: 220,
            x: &x.ticks,
            x_title: "since the first arrival",
            x_lines: true,
            y: &y.ticks,
            y_title: "bytes of KV at D",
            stretched: &areas,
            over: &over,
        }
        .draw(),
    );
    if !near {
        out.push_str("<p class=\"more\">The capacity is far above the drawing.</p>");
    }
    out
}
