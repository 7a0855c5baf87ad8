//! The heat map: how many bytes go from each source to each destination.
//!
//! The class of a cell is the letter of its colour, on the scale that shows more: a logarithmic one where bytes differ much, else a linear
//! one. The page's script can change to the other, with the same sums as here.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::color::{self, LEVELS};
use super::data::Data;
use super::figures::{self, As, number_of, size};
use super::html::{self, percent};
use crate::answer::{Pair, Traffic};

/// The most rows and columns; where there are more, neighbours are added up.
const MOST: usize = 128;
/// Cells up to which each says the names of both its ends.
const NAMED: usize = 4096;
/// How large the map and one of its cells are at most, in pixels, and what a narrow screen has for the map.
const SIDE: f64 = 640.0;
const CELL: f64 = 48.0;
const NARROW: f64 = 250.0;

/// Traffic with sorted cells inside of the map, in as many rows and columns as can be drawn, and only the pairs given.
pub(super) fn fold(traffic: &Traffic, pairs: Vec<Pair>) -> Traffic {
    let (rows, by_row) = fold_names(&traffic.rows);
    let (columns, by_column) = fold_names(&traffic.columns);
    let mut cells: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (row, column, bytes) in &traffic.cells {
        let (at, of) = (*row as usize, *column as usize);
        if at < traffic.rows.len() && of < traffic.columns.len() && *bytes > 0 {
            let sum = cells.entry((row / by_row, column / by_column)).or_default();
            *sum = sum.saturating_add(*bytes);
        }
    }
    let are = |what: &str, by: u32| if by == 1 { what.to_owned() } else { format!("{by} {what}s") };
    Traffic {
        pairs,
        all_pairs: traffic.all_pairs,
        rows_are: are(&traffic.rows_are, by_row),
        rows,
        columns_are: are(&traffic.columns_are, by_column),
        columns,
        cells: cells.into_iter().map(|((row, column), bytes)| (row, column, bytes)).collect(),
    }
}

/// Names of so many neighbours each that they can be drawn.
fn fold_names(names: &[String]) -> (Vec<String>, u32) {
    let by = names.len().div_ceil(MOST).max(1);
    let name = |some: &[String]| match some {
        [first, .., last] => format!("{first} to {last}"),
        some => some.concat(),
    };
    (names.chunks(by).map(name).collect(), u32::try_from(by).unwrap_or(u32::MAX))
}

/// One of the two axes.
struct Axis {
    /// What all names begin with.
    prefix: String,
    /// The rest of each, cut.
    labels: Vec<String>,
    longest: usize,
    /// Pixels of a cell.
    cell: f64,
    /// Every so manieth label is shown on a wide screen, and on a narrow one.
    wide: usize,
    narrow: usize,
    /// Its labels are written downwards.
    turned: bool,
}

impl Axis {
    fn new(names: &[String], columns: bool) -> Self {
        let prefix = prefix(names);
        let rest = |n: &String| n.get(prefix.len()..).unwrap_or(n).to_owned();
        let labels: Vec<String> = names.iter().map(|n| figures::clip(&rest(n), 12)).collect();
        let longest = labels.iter().map(|l| l.chars().count()).max().unwrap_or(0);
        let count = names.len().max(1) as f64;
        let cell = (SIDE / count).min(CELL);
        let turned = columns && longest > 5;
        let room = if columns && !turned { longest as f64 * 7.0 + 9.0 } else { 15.0 };
        let every =
            |cell: f64| std::iter::successors(Some(1usize), |n| n.checked_mul(2)).find(|n| *n as f64 * cell >= room);
        let shrunk = cell * (NARROW / (cell * count)).min(1.0);
        let (wide, narrow) = (every(cell).unwrap_or(1), every(shrunk).unwrap_or(1));
        Self { prefix, labels, longest, cell, wide, narrow, turned }
    }

    fn pixels(&self) -> f64 {
        (self.cell * self.labels.len() as f64).round()
    }

    /// Labels that are shown: their places from 0 to 1, and whether only a wide screen has room for them.
    fn shown(&self) -> impl Iterator<Item = (f64, &str, bool)> {
        let count = self.labels.len().max(1) as f64;
        self.labels.iter().enumerate().filter(|(n, _)| n.is_multiple_of(self.wide)).map(move |(n, label)| {
            let at = (n as f64 + 0.5) / count;
            (at, label.as_str(), !n.is_multiple_of(self.narrow))
        })
    }
}

/// What all names have in common at their beginning, up to a number.
fn prefix(names: &[String]) -> String {
    let [first, rest @ ..] = names else { return String::new() };
    let same = |name: &String| first.chars().zip(name.chars()).take_while(|(a, b)| a == b).count();
    let most = rest.iter().map(same).min().unwrap_or(0);
    let common: String = first.chars().take(most).collect();
    common.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned()
}

/// The least and the most bytes of a cell.
fn range(traffic: &Traffic) -> Option<(u64, u64)> {
    let bytes = || traffic.cells.iter().map(|c| c.2);
    Some((bytes().min()?, bytes().max()?))
}

pub(super) fn draw(data: &Data) -> String {
    let traffic = &data.answer.traffic;
    let Some((least, most)) = range(traffic) else {
        return "<p class=\"none\">No byte went from any rank to any other.</p>".to_owned();
    };
    let (rows, columns) = (Axis::new(&traffic.rows, false), Axis::new(&traffic.columns, true));
    let scale = Scale::new(least, most);
    let mut out = String::from("<div class=\"heatbox\"><form id=\"scale\" hidden>");
    for choice in [Scale::Log, Scale::Linear] {
        let (word, checked) = (choice.word(), if choice == scale { " checked" } else { "" });
        let name = if choice == Scale::Log { "logarithmic" } else { "linear" };
        let _ = write!(out, "<label><input type=\"radio\" name=\"scale\" value=\"{word}\"{checked}>{name}</label> ");
    }
    let _ = write!(out, "</form>\n<div class=\"maps\" data-scale=\"{}\">", scale.word());
    let _ = write!(out, "<div class=\"ct\">to {}</div>\n{}", title(&traffic.columns_are, "D", &columns), top(&columns));
    out.push_str(&side(&rows));
    out.push_str(&cells(traffic, &rows, &columns, (least, most)));
    let _ = writeln!(
        out,
        "<div class=\"rt\">from {}</div>{}</div></div>",
        title(&traffic.rows_are, "P", &rows),
        legend(least, most)
    );
    out
}

fn title(what: &str, whose: &str, axis: &Axis) -> String {
    let count = number_of(axis.labels.len() as u64, &format!("{whose} {what}"));
    let prefix = axis.prefix.trim();
    let named =
        if prefix.is_empty() { String::new() } else { format!(", named <b>{}…</b>", html::short(prefix, 24)) };
    format!("{}{named}", html::name(&count))
}

/// Labels over the columns.
fn top(axis: &Axis) -> String {
    let height = if axis.turned { axis.longest as f64 * 7.0 + 8.0 } else { 18.0 };
    let mut out = format!("<svg class=\"cl\" aria-hidden=\"true\" width=\"{}\" height=\"{height}\">", axis.pixels());
    for (at, label, only_wide) in axis.shown() {
        let (x, only, label) = (percent(at), if only_wide { " w" } else { "" }, html::name(label));
        let _ = if axis.turned {
            let y = height - 4.0;
            write!(
                out,
                "<svg x=\"{x}\" y=\"{y}\" class=\"o\"><text class=\"t{only}\" y=\"4\" transform=\"rotate(-90)\">{label}</text></svg>"
            )
        } else {
            write!(out, "<text class=\"t{only}\" x=\"{x}\" y=\"13\" text-anchor=\"middle\">{label}</text>")
        };
    }
    out.push_str("</svg>\n");
    out
}

/// Labels beside the rows.
fn side(axis: &Axis) -> String {
    let width = axis.longest as f64 * 7.0 + 8.0;
    let mut out = format!("<svg class=\"rl\" aria-hidden=\"true\" width=\"{width}\">");
    for (at, label, only_wide) in axis.shown() {
        let (y, only, label) = (percent(at), if only_wide { " w" } else { "" }, html::name(label));
        let x = width - 6.0;
        let _ = write!(out, "<text class=\"t{only}\" x=\"{x}\" y=\"{y}\" dy=\"4\" text-anchor=\"end\">{label}</text>");
    }
    out.push_str("</svg>\n");
    out
}

/// How colours go with bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// From the least bytes of a cell.
    Log,
    /// From nothing.
    Linear,
}

impl Scale {
    /// The one that shows more.
    fn new(least: u64, most: u64) -> Self {
        if most / 30 >= least { Self::Log } else { Self::Linear }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Linear => "linear",
        }
    }

    fn level(self, bytes: u64, (least, most): (u64, u64)) -> usize {
        let part = match self {
            Self::Log if most > least => (bytes as f64 / least as f64).ln() / (most as f64 / least as f64).ln(),
            Self::Log => 1.0,
            Self::Linear => bytes as f64 / most as f64,
        };
        color::level(part)
    }
}

fn cells(traffic: &Traffic, rows: &Axis, columns: &Axis, (least, most): (u64, u64)) -> String {
    let (high, wide) = (traffic.rows.len(), traffic.columns.len());
    // Lines between cells help where cells are large, and hide them where they are small.
    let lines = if rows.cell.min(columns.cell) >= 9.0 { " lines" } else { "" };
    let label = format!(
        "Bytes from {} to {}: {} of {} cells have traffic, from {} to {}",
        number_of(high as u64, &format!("P {}", traffic.rows_are)),
        number_of(wide as u64, &format!("D {}", traffic.columns_are)),
        figures::count(traffic.cells.len() as u64),
        figures::count((high * wide) as u64),
        size(least),
        size(most),
    );
    let mut out = format!(
        "<svg class=\"heat{lines}\" id=\"heat\" role=\"img\" aria-label=\"{}\" width=\"{}\" height=\"{}\" viewBox=\"0 0 {wide} {high}\" preserveAspectRatio=\"none\">\n",
        html::name(&label),
        columns.pixels(),
        rows.pixels(),
    );
    let (names, scale) = (Names::new(traffic, rows, columns), Scale::new(least, most));
    for row in traffic.cells.chunk_by(|a, b| a.0 == b.0) {
        let Some((y, ..)) = row.first() else { continue };
        let _ = write!(out, "<g transform=\"translate(0 {y})\">");
        for (y, x, bytes) in row {
            let (letter, size) = (color::letter(scale.level(*bytes, (least, most))), size(*bytes));
            let _ = write!(out, "<rect x={x} class={letter}><title>{}{size}</title></rect>", names.of(*y, *x));
        }
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

/// What a cell is called: by names where there are few cells, by what tells them apart where there are many.
enum Names {
    Full(Vec<String>, Vec<String>),
    Short(Vec<String>, Vec<String>),
}

impl Names {
    fn new(traffic: &Traffic, rows: &Axis, columns: &Axis) -> Self {
        let full = |names: &[String]| names.iter().map(|n| html::short(n, 40)).collect();
        let brief = |axis: &Axis| match axis.longest {
            0..=4 => axis.labels.iter().map(|l| html::name(l)).collect(),
            _ => (0..axis.labels.len()).map(|n| n.to_string()).collect(),
        };
        if traffic.cells.len() <= NAMED {
            Self::Full(full(&traffic.rows), full(&traffic.columns))
        } else {
            Self::Short(brief(rows), brief(columns))
        }
    }

    fn of(&self, row: u32, column: u32) -> String {
        let name = |names: &Vec<String>, n: u32| names.get(n as usize).cloned().unwrap_or_default();
        match self {
            Self::Full(rows, columns) => format!("{} → {}: ", name(rows, row), name(columns, column)),
            Self::Short(rows, columns) => format!("{}>{} ", name(rows, row), name(columns, column)),
        }
    }
}

/// What the colours mean, on both scales.
fn legend(least: u64, most: u64) -> String {
    if least == most {
        let each = html::number(&size(most));
        let swatch = "<svg class=\"heat one\" aria-hidden=\"true\" width=\"14\" height=\"14\" viewBox=\"0 0 1 1\"><rect x=\"0\" class=\"Z\"/></svg>";
        return format!("<div class=\"legend\"><p>{swatch} every cell with traffic: {each}</p></div>");
    }
    let mut out = format!(
        "<div class=\"legend\"><svg class=\"heat\" role=\"img\" aria-label=\"Scale of colours\" width=\"260\" height=\"12\" viewBox=\"0 0 {LEVELS} 1\" preserveAspectRatio=\"none\">"
    );
    for level in 0..LEVELS {
        let letter = color::letter(level);
        let _ = write!(out, "<rect x=\"{level}\" class=\"{letter}\"/>");
    }
    out.push_str("</svg>");
    let middle = |bytes: f64| As::Size.write(bytes);
    let log = [size(least), middle((least as f64 * most as f64).sqrt()), size(most)];
    let linear = [size(0), middle(most as f64 / 2.0), size(most)];
    for (class, labels) in [("of-log", log), ("of-linear", linear)] {
        let _ = write!(out, "<div class=\"ends {class}\">");
        for label in labels {
            let _ = write!(out, "<span>{}</span>", html::number(&label));
        }
        out.push_str("</div>");
    }
    out.push_str("<p><i class=\"empty\"></i> no traffic</p></div>");
    out
}
