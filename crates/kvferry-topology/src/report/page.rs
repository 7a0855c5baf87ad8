//! The page: one file that any browser opens, with nothing to fetch.
//!
//! All of it is drawn here, so it is complete without script, and its policy (`Content-Security-Policy`) lets no more run than the script and the
//! style that stand in this crate: both are named by their hashes.

use std::fmt::Write as _;

use super::data::Data;
use super::{color, gantt, head, heat, html, links, pools, sizes, spread, tables};
use crate::answer::Answer;

pub(super) const STYLE: &str = include_str!("page.css");
pub(super) const SCRIPT: &str = include_str!("page.js");
/// SHA-256 of the style with the colours, and of the script.
pub(super) const STYLE_HASH: &str = "qQ8EgLu/3g4UtQEItH7yTdzR4Sjjx3Fbui2SBaU8MJ4=";
pub(super) const SCRIPT_HASH: &str = "O9bkr7xDSFhM7BD4zbD6CQKc+LzUlGdmtFI6JqbW5rM=";

/// The answer as one HTML page that needs nothing else: no network, no file. Long lists are cut to what matters most.
#[must_use]
pub fn page(answer: &Answer) -> String {
    let data = Data::new(answer);
    let mut out = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    let _ = write!(
        out,
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; \
         script-src 'sha256-{SCRIPT_HASH}'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>{} · kvferry</title>\n<style>{STYLE}{}</style>\n</head>\n<body>\n",
        html::name(&answer.scenario),
        color::rules(),
    );
    header(&mut out, &data);
    out.push_str("<main>\n");
    let sections: [(&str, &str, String); 9] = [
        ("warnings", "Warnings", head::warnings(&data)),
        ("traffic", "Who sends what to whom", both(&heat::draw(&data), &tables::pairs(&data))),
        ("links", "Links", links::draw(&data)),
        ("request", "One request", gantt::draw(&data)),
        ("first-token", "Time to first token", spread::draw(&data)),
        ("times", "All times", tables::times(&data)),
        ("descriptors", "Descriptors", sizes::draw(&data)),
        ("pools", "Pools of D", pools::draw(&data)),
        ("engines", "Engines", tables::sides(&data)),
    ];
    for (id, title, body) in &sections {
        let _ = write!(
            out,
            "<section id=\"{id}\" aria-labelledby=\"{id}-h\">\n<h2 id=\"{id}-h\">{title}</h2>\n{body}\n</section>\n"
        );
    }
    let _ = write!(
        out,
        "</main>\n<footer>{}</footer>\n<div id=\"tip\" role=\"status\" hidden></div>\n\
         <script type=\"application/json\" id=\"answer\">{}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        head::foot(&data),
        data.embedded(),
    );
    out
}

fn header(out: &mut String, data: &Data) {
    let answer = &data.answer;
    let _ = write!(
        out,
        "<header>\n<p class=\"over\">kvferry · simulated handover · {} engine</p>\n<h1>{}</h1>\n{}",
        html::name(&answer.engine),
        html::name(&answer.scenario),
        head::sentences(data),
    );
    let side = |side: &crate::answer::Side| format!("{} × <code>{}</code>", side.engines, html::name(&side.shape));
    let _ = write!(
        out,
        "<p class=\"setup\">P {} → D {} · <code>{}</code> · <code>mode = \"{}\"</code> · <code>{}</code><br>{}</p>\n{}",
        side(&answer.prefill),
        side(&answer.decode),
        html::name(&answer.prefill.model),
        html::name(&answer.mode),
        html::name(&spread::this(answer)),
        head::load(data),
        head::keys(data),
    );
    out.push_str("<nav aria-label=\"Sections\">");
    for (id, name) in [
        ("warnings", "Warnings"),
        ("traffic", "Traffic"),
        ("links", "Links"),
        ("request", "One request"),
        ("first-token", "First token"),
        ("times", "Times"),
        ("descriptors", "Descriptors"),
        ("pools", "Pools"),
        ("engines", "Engines"),
    ] {
        let _ = write!(out, "<a href=\"#{id}\">{name}</a>");
    }
    out.push_str("</nav>\n</header>\n");
}

/// Two things beside each other where there is room.
fn both(first: &str, second: &str) -> String {
    format!("<div class=\"both\"><div>{first}</div><div>{second}</div></div>")
}
