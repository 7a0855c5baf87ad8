//! What a page says first: in sentences, in key figures, and what to change.

use std::fmt::Write as _;

use super::data::Data;
use super::figures::{As, NONE};
use super::html;
use super::links::{heat_of, units};

/// The answer in a few sentences: whether it works, what the handover costs, which link is full, what to change.
pub(super) fn sentences(data: &Data) -> String {
    let answer = &data.answer;
    let figure = |path: &str, what| format!("<b>{}</b>", data.figure(path, what));
    let mut out = String::from("<p class=\"lead\">");
    let requests = &answer.requests;
    let noun = if requests.all == 1 { "request" } else { "requests" };
    let (all, delivered) = (figure("requests.all", As::Count), figure("requests.delivered", As::Count));
    let _ = match (requests.all, requests.delivered) {
        (0, _) => write!(
            out,
            "The load has no request, so nothing was moved: <b>{}</b> requests.",
            data.figure("requests.all", As::Count)
        ),
        (1, 1) => write!(out, "It works: {all} request, and it was delivered."),
        (a, d) if a == d => write!(out, "It works: all {all} {noun} were delivered."),
        (_, 0) => {
            write!(out, "<strong class=\"bad\">It does not work:</strong> {delivered} of {all} {noun} were delivered.")
        }
        _ => {
            write!(out, "<strong class=\"bad\">It works in part:</strong> {delivered} of {all} {noun} were delivered.")
        }
    };
    if let Some(n) = data.time("handover") {
        let (p50, p99) = (figure(&format!("times.{n}.p50"), As::Time), figure(&format!("times.{n}.p99"), As::Time));
        let _ = write!(out, " The handover costs {p50} at the median and {p99} at the 99th percentile");
        let part = data.time("time to first token");
        let part = part.and_then(|t| data.ratio(&format!("times.{n}.p50"), &format!("times.{t}.p50")));
        match part {
            Some(part) => {
                let _ = write!(out, "; that is {part} of the median time to first token.");
            }
            None => out.push('.'),
        }
    }
    for (n, other) in answer.compared.iter().enumerate().filter(|(_, c)| c.handover.count > 0) {
        let p50 = figure(&format!("compared.{n}.handover.p50"), As::Time);
        let _ = write!(out, " With <code>{}</code> it would cost {p50} at the median.", html::name(&other.with));
    }
    if let Some(link) = answer.links.first() {
        let mean = figure("links.0.mean", As::Share);
        let _ = write!(
            out,
            " The fullest link is <code>{}</code>: {mean} of its capacity over the span",
            html::name(&link.name)
        );
        let _ = match link.peak {
            Some(_) => write!(out, ", {} at its fullest.", figure("links.0.peak", As::Share)),
            None => write!(out, "."),
        };
    }
    out.push_str("</p>\n");
    let _ = match answer.warnings.as_slice() {
        [first, ..] => writeln!(out, "<p class=\"lead change\">Change first: {}</p>", html::sentence(&first.change)),
        [] if requests.all == 0 => writeln!(out, "<p class=\"lead change\">Give the scenario a load.</p>"),
        [] => writeln!(out, "<p class=\"lead change good\">Nothing has to be changed.</p>"),
    };
    out
}

/// One key figure: what it is, the figure, and what else there is to say of it.
struct Key {
    name: &'static str,
    figure: String,
    note: String,
    state: &'static str,
}

/// The key figures.
pub(super) fn keys(data: &Data) -> String {
    let answer = &data.answer;
    let mut keys = Vec::new();
    let share = data.ratio("requests.delivered", "requests.all").map_or_else(String::new, |s| format!(", {s}"));
    keys.push(Key {
        name: "Delivered",
        figure: data.figure("requests.delivered", As::Count),
        note: format!("of {} requests{share}", data.figure("requests.all", As::Count)),
        state: if answer.requests.delivered < answer.requests.all { "hot" } else { "calm" },
    });
    for (name, shown) in [("handover", "Handover, p99"), ("time to first token", "Time to first token, p99")] {
        let path = data.time(name).map(|n| format!("times.{n}"));
        let figure =
            |key| path.as_ref().map_or_else(|| NONE.to_owned(), |p| data.figure(&format!("{p}.{key}"), As::Time));
        keys.push(Key { name: shown, figure: figure("p99"), note: format!("median {}", figure("p50")), state: "calm" });
    }
    if let Some(link) = answer.links.first() {
        let note = if link.peak.is_some() { "peak" } else { "mean" };
        keys.push(Key {
            name: "Fullest link",
            figure: data.figure(&format!("links.0.{note}"), As::Share),
            note: format!(
                "{note} of {} on {}",
                data.figure("links.0.capacity", units(link).0),
                html::short(&link.name, 40)
            ),
            state: heat_of(link.fullest()),
        });
    }
    keys.push(Key {
        name: "Over the wire",
        figure: data.figure("requests.wire_bytes", As::Size),
        note: format!("for {} delivered", data.figure("requests.bytes", As::Size)),
        state: "calm",
    });
    keys.push(Key {
        name: "Cache of a token",
        figure: data.figure("prefill.bytes_per_token", As::Size),
        note: format!("in {} a block at P", plural(data.figure("prefill.block_tokens", As::Count), "token")),
        state: "calm",
    });
    keys.push(Key {
        name: "Descriptors",
        figure: data.figure("requests.descriptors", As::Count),
        note: format!("in {}", plural(data.figure("cost.transfers", As::Count), "transfer")),
        state: "calm",
    });
    let used = data.ratio("pools.peak_used", "pools.capacity");
    keys.push(Key {
        name: "D's pools at their fullest",
        figure: used.unwrap_or_else(|| data.figure("pools.peak_used", As::Size)),
        note: format!(
            "of {}; {} waited for room",
            data.figure("pools.capacity", As::Size),
            data.figure("pools.waited", As::Count)
        ),
        state: if answer.pools.waited > 0 { "busy" } else { "calm" },
    });
    let mut out = String::from("<dl class=\"keys\">\n");
    for Key { name, figure, note, state } in keys {
        let _ =
            writeln!(out, "<div class=\"{state}\"><dt>{name}</dt><dd class=\"big\">{figure}</dd><dd>{note}</dd></div>");
    }
    out.push_str("</dl>\n");
    out
}

fn plural(figure: String, noun: &str) -> String {
    format!("{figure} {noun}s")
}

/// Failures by cause, and warnings with what to change.
pub(super) fn warnings(data: &Data) -> String {
    let answer = &data.answer;
    let mut out = String::new();
    if !answer.requests.failed.is_empty() {
        out.push_str("<div class=\"scroll\"><table class=\"failed\"><caption>Requests that were not delivered</caption><thead><tr><th scope=\"col\">Cause</th><th scope=\"col\" class=\"r\">Requests</th></tr></thead>\n<tbody>\n");
        for (n, (cause, _)) in answer.requests.failed.iter().enumerate() {
            let figure = data.figure(&format!("requests.failed.{n}.1"), As::Count);
            let _ = writeln!(out, "<tr><th scope=\"row\">{}</th><td class=\"r\">{figure}</td></tr>", html::name(cause));
        }
        out.push_str("</tbody></table></div>\n");
    }
    if answer.warnings.is_empty() {
        out.push_str("<p class=\"none\">No warnings.</p>\n");
        return out;
    }
    out.push_str("<ol class=\"warnings\">\n");
    for warning in &answer.warnings {
        let _ = writeln!(
            out,
            "<li><p><code>{}</code> {}</p><p class=\"change\"><b>Change:</b> {}</p></li>",
            html::name(&warning.code),
            html::sentence(&warning.text),
            html::sentence(&warning.change),
        );
    }
    out.push_str("</ol>\n");
    out
}

/// What the simulation took, and where its figures are from.
pub(super) fn foot(data: &Data) -> String {
    let figure = |path: &str| data.figure(path, As::Count);
    format!(
        "<p>The simulation took {} events for {} transfers, and shared out links {} times among {} flows. Seed {}. \
         Sizes are powers of 1,024, rates powers of 1,000. Figures stand as numbers in this page's <code>#answer</code>; the whole of \
         long lists is in the answer's JSON.</p>",
        figure("cost.events"),
        figure("cost.transfers"),
        figure("cost.shares.0"),
        figure("cost.shares.1"),
        data.figure("seed", As::Plain),
    )
}

/// The load in one line.
pub(super) fn load(data: &Data) -> String {
    let requests = &data.answer.requests;
    let mut out = format!(
        "{} requests over {}, {} tokens of prompt",
        data.figure("requests.all", As::Count),
        data.figure("span", As::Time),
        data.figure("requests.prompt_tokens", As::Count)
    );
    for (side, key, hits) in
        [("P", "hit_tokens", requests.hit_tokens), ("D", "decode_hit_tokens", requests.decode_hit_tokens)]
    {
        if hits > 0
            && let Some(share) = data.ratio(&format!("requests.{key}"), "requests.prompt_tokens")
        {
            let _ = write!(out, ", {share} of them in {side}'s cache already");
        }
    }
    if requests.messages > 0 {
        let _ = write!(out, ", {} messages", data.figure("requests.messages", As::Count));
    }
    out
}
