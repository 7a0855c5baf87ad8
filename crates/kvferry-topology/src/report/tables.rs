//! The tables of a page: both sides, all times, the busiest pairs.

use std::fmt::Write as _;

use super::data::{Data, PAIRS};
use super::figures::{As, NONE, count};
use super::html;
use crate::answer::Side;

/// What the two kinds of engines are.
pub(super) fn sides(data: &Data) -> String {
    let (p, d) = (&data.answer.prefill, &data.answer.decode);
    let mut out = String::from(
        "<div class=\"scroll\"><table class=\"sides\"><caption>What was simulated</caption><thead><tr><td></td><th scope=\"col\">P (prefill)</th>\
         <th scope=\"col\">D (decode)</th></tr></thead>\n<tbody>\n",
    );
    type Text = fn(&Side) -> &str;
    let texts: [(&str, Text); 3] =
        [("Model", |s| &s.model), ("Parallel sizes", |s| &s.shape), ("Layout", |s| &s.layout)];
    let row = |out: &mut String, name: &str, p: &str, d: &str| {
        let _ = writeln!(out, "<tr><th scope=\"row\">{name}</th><td>{p}</td><td>{d}</td></tr>");
    };
    for (name, text) in texts {
        row(&mut out, name, &html::name(text(p)), &html::name(text(d)));
    }
    let numbers = [
        ("Engines", "engines", As::Count),
        ("Ranks of an engine", "ranks", As::Count),
        ("GPUs", "gpus", As::Count),
        ("Tokens of a block", "block_tokens", As::Count),
        ("Cache of a token", "bytes_per_token", As::Size),
        ("States of a sequence", "bytes_per_state", As::Size),
    ];
    for (name, key, what) in numbers {
        let figure = |side| data.figure(&format!("{side}.{key}"), what);
        row(&mut out, name, &figure("prefill"), &figure("decode"));
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// Every time of a request.
pub(super) fn times(data: &Data) -> String {
    if data.answer.times.is_empty() {
        return "<p class=\"none\">No request was timed.</p>".to_owned();
    }
    let mut out = String::from(
        "<div class=\"scroll\"><table class=\"times\"><caption>Times of delivered requests</caption><thead><tr><th scope=\"col\">Time</th>\
         <th scope=\"col\" class=\"r w\">Requests</th><th scope=\"col\" class=\"r w\">Mean</th><th scope=\"col\" class=\"r\">p50</th>\
         <th scope=\"col\" class=\"r\">p90</th><th scope=\"col\" class=\"r\">p99</th><th scope=\"col\" class=\"r\">Most</th></tr></thead>\n<tbody>\n",
    );
    for (n, times) in data.answer.times.iter().enumerate() {
        let figure = |key: &str, what| data.figure(&format!("times.{n}.{key}"), what);
        // No request has a time that is 0 for want of requests.
        let timed = |key: &str| if times.count > 0 { figure(key, As::Time) } else { NONE.to_owned() };
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{}<small>{}</small></th><td class=\"r w\">{}</td><td class=\"r w\">{}</td>",
            html::name(&times.name),
            meaning(&times.name),
            figure("count", As::Count),
            timed("mean"),
        );
        for key in ["p50", "p90", "p99", "max"] {
            let _ = write!(out, "<td class=\"r\">{}</td>", timed(key));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// What each of [`TIMES`](crate::answer::TIMES) is counted from and to.
fn meaning(name: &str) -> &'static str {
    match name {
        "prefill queue" => "arrival until the prefill begins",
        "transfer queue" => "end of the prefill until the first byte is asked for",
        "wire" => "first byte posted until the last is visible",
        "handover" => "end of the prefill until D may use the cache",
        "time to first token" => "arrival until D has made one token",
        "decode" => "tokens after the first",
        "held at P" => "end of the prefill until P has its blocks back",
        _ => "",
    }
}

/// The pairs of ranks with the most bytes.
pub(super) fn pairs(data: &Data) -> String {
    let traffic = &data.answer.traffic;
    if traffic.pairs.is_empty() {
        return String::new();
    }
    let caption = if traffic.all_pairs > PAIRS as u64 {
        format!("The pairs with the most bytes of {}, as engine / rank", count(traffic.all_pairs))
    } else {
        "Pairs of ranks, as engine / rank".to_owned()
    };
    let mut out = format!(
        "<div class=\"scroll\"><table class=\"pairs\"><caption>{caption}</caption><thead><tr><th scope=\"col\">P</th><th scope=\"col\">D</th>\
         <th scope=\"col\" class=\"r\">Bytes</th><th scope=\"col\" class=\"r\">Descriptors</th><th scope=\"col\" class=\"r\">Transfers</th></tr></thead>\n<tbody>\n"
    );
    for n in 0..traffic.pairs.len() {
        let figure = |key: &str, what| data.figure(&format!("traffic.pairs.{n}.{key}"), what);
        let end = |key: &str| {
            let (engine, rank) = (figure(&format!("{key}.0"), As::Plain), figure(&format!("{key}.1"), As::Plain));
            format!("<td>{engine} / {rank}</td>")
        };
        let _ = writeln!(
            out,
            "<tr>{}{}<td class=\"r\">{}</td><td class=\"r\">{}</td><td class=\"r\">{}</td></tr>",
            end("source"),
            end("destination"),
            figure("bytes", As::Size),
            figure("descriptors", As::Count),
            figure("transfers", As::Count),
        );
    }
    out.push_str("</tbody></table></div>\n");
    out
}
