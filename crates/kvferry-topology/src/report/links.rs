//! Links: how full each was, on the mean and at its fullest, and when.

use std::fmt::Write as _;

use super::data::Data;
use super::figures::{self, As};
use super::html::{self, percent};
use crate::answer::LinkUse;

/// From which share on a link is called hot, and from which busy.
pub(super) const HOT: f64 = 0.9;
pub(super) const BUSY: f64 = 0.7;

/// What a share says of a link, as a word and as the class of its bar.
pub(super) fn heat_of(share: f64) -> &'static str {
    if share >= HOT {
        "hot"
    } else if share >= BUSY {
        "busy"
    } else {
        "calm"
    }
}

/// What a capacity of a link is, and what it carries.
pub(super) fn units(link: &LinkUse) -> (As, As) {
    // The engine of descriptors in a network card carries work, not bytes.
    if link.kind.eq_ignore_ascii_case("work") { (As::Work, As::Count) } else { (As::Rate, As::Size) }
}

pub(super) fn draw(data: &Data) -> String {
    let links = &data.answer.links;
    if links.is_empty() {
        return "<p class=\"none\">No link carried anything.</p>".to_owned();
    }
    let timed = links.iter().any(|l| !l.over_time.is_empty());
    let order = if timed {
        "the fullest at its peak first; over time, each as a part of its own peak"
    } else {
        "the fullest on average first; this engine knows no peaks"
    };
    let mut out = format!(
        "<div class=\"scroll\"><table class=\"links\"><caption>Links, {order}</caption><thead><tr><th scope=\"col\">Link</th>\
         <th scope=\"col\" class=\"r w\">Capacity</th><th scope=\"col\" class=\"r w\">Carried</th>\
         <th scope=\"col\" class=\"r\">Mean</th><th scope=\"col\" class=\"r\">Peak</th><th scope=\"col\" class=\"w\">Mean and peak</th>",
    );
    if timed {
        out.push_str("<th scope=\"col\">Over time</th>");
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (n, link) in links.iter().enumerate() {
        let (capacity, carried) = units(link);
        let figure = |key: &str, what| data.figure(&format!("links.{n}.{key}"), what);
        let state = heat_of(link.fullest());
        let _ = write!(
            out,
            "<tr class=\"{state}\"><th scope=\"row\">{}<small>{}</small></th><td class=\"r w\">{}</td><td class=\"r w\">{}</td>\
             <td class=\"r\">{}</td><td class=\"r\">{}</td><td class=\"w\">{}</td>",
            html::name(&link.name),
            html::name(&link.kind),
            figure("capacity", capacity),
            figure("bytes", carried),
            figure("mean", As::Share),
            link.peak.map_or_else(|| figures::NONE.to_owned(), |_| figure("peak", As::Share)),
            bar(link),
        );
        if timed {
            let _ = write!(out, "<td>{}</td>", spark(link));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    let left = data.all_links.saturating_sub(links.len());
    if left > 0 {
        let _ = writeln!(
            out,
            "<p class=\"more\">{} carried less and are not shown.</p>",
            figures::number_of(left as u64, "link")
        );
    }
    out
}

/// The mean as a bar, the peak as a thin one behind it.
fn bar(link: &LinkUse) -> String {
    let (mean, peak) = (link.mean.clamp(0.0, 1.0), link.fullest().clamp(0.0, 1.0));
    let label = link.peak.map_or_else(String::new, |peak| format!(", peak {}", figures::share(peak)));
    format!(
        "<svg class=\"bar\" role=\"img\" aria-label=\"mean {}{label}\" width=\"100%\" height=\"12\"><rect class=\"whole\" width=\"100%\" height=\"12\"/>\
         <rect class=\"peak\" width=\"{}\" height=\"12\"/><rect class=\"mean\" width=\"{}\" height=\"12\"/></svg>",
        figures::share(link.mean),
        percent(peak),
        percent(mean),
    )
}

/// The share over time as a small area; its full height is the link's own peak.
fn spark(link: &LinkUse) -> String {
    let count = link.over_time.len();
    let shares = || link.over_time.iter().map(|s| if s.is_finite() { f64::from(*s).clamp(0.0, 1.0) } else { 0.0 });
    let peak = shares().fold(0.0, f64::max);
    if count == 0 {
        return String::new();
    }
    let step = 120.0 / count as f64;
    let mut area = String::from("M0 20");
    for share in shares() {
        let height = if peak > 0.0 { share / peak } else { 0.0 };
        let _ = write!(area, "V{:.1}h{step:.3}", 20.0 - 20.0 * height);
    }
    area.push_str("V20Z");
    format!(
        "<svg class=\"spark\" role=\"img\" aria-label=\"share of the capacity over the span, up to {}\" width=\"120\" height=\"20\" viewBox=\"0 0 120 20\" \
         preserveAspectRatio=\"none\"><rect class=\"whole\" width=\"120\" height=\"20\"/><path d=\"{area}\"/></svg>",
        figures::share(peak)
    )
}
