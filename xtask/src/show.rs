//! How commands write names, sizes and tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use kvferry_geometry::layout::{ComponentOrder, LayoutStyle, Rows, StateOrder, TokenOrder};
use kvferry_geometry::units::RankId;
use kvferry_models::{EngineDescription, ranges};

/// Names that differ only in their first number, as one: `model.layers.{0-31}.self_attn.attn`.
pub(crate) fn names<'a>(list: impl IntoIterator<Item = &'a str>) -> String {
    let mut families: Vec<(&str, &str)> = Vec::new();
    let mut numbers: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let mut out = Vec::new();
    for name in list {
        let digit = |c: char| c.is_ascii_digit();
        let start = name.find(digit).unwrap_or(name.len());
        let (before, rest) = name.split_at(start);
        let (number, after) = rest.split_at(rest.find(|c| !digit(c)).unwrap_or(rest.len()));
        let Ok(number) = number.parse() else {
            out.push(name.to_owned());
            continue;
        };
        let at = families.iter().position(|f| *f == (before, after)).unwrap_or_else(|| {
            families.push((before, after));
            families.len() - 1
        });
        numbers.entry(at).or_default().push(number);
    }
    for (at, mut list) in numbers {
        list.sort_unstable();
        list.dedup();
        let (before, after) = families[at];
        out.push(match list.as_slice() {
            [one] => format!("{before}{one}{after}"),
            many => format!("{before}{{{}}}{after}", ranges(many)),
        });
    }
    out.join(", ")
}

/// A number with separators: `65,536`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A count with its noun: `2 mismatches`.
pub(crate) fn number_of(count: usize, noun: &str) -> String {
    let (s, es) = if noun.ends_with("ch") { ("", "es") } else { ("", "s") };
    format!("{count} {noun}{}", if count == 1 { s } else { es })
}

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// A size to three digits: `1.25 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let text = if unit == 0 { bytes.to_string() } else { three_digits(value) };
    format!("{text} {}", UNITS[unit])
}

/// A rank with its place: `3 (pp0 tp3)`; dimensions of size 1 are left out.
pub(crate) fn rank(engine: &EngineDescription, rank: RankId) -> String {
    let at = engine.coordinates(rank);
    let mut out = rank.get().to_string();
    let mut places = Vec::new();
    for (name, size, index) in
        [("pp", engine.shape.pp, at.pp), ("pcp", engine.shape.pcp, at.pcp), ("tp", engine.shape.tp, at.tp)]
    {
        if size > 1 {
            places.push(format!("{name}{index}"));
        }
    }
    if !places.is_empty() {
        let _ = write!(out, " ({})", places.join(" "));
    }
    out
}

/// A layout in words.
pub(crate) fn layout(style: &LayoutStyle) -> String {
    let order = match style.order {
        TokenOrder::HeadsOuter => "hnd",
        TokenOrder::TokensOuter => "nhd",
    };
    let components = match style.components {
        ComponentOrder::Packed => "",
        ComponentOrder::InBlock => ", K and V in turn in each block",
        ComponentOrder::Planes => ", K and V planes",
    };
    let rows = match style.rows {
        Rows::PerItem => "",
        Rows::Packed => ", packed rows",
    };
    let padding = match style.padding.get() {
        0 => String::new(),
        n => format!(", {n} B padding"),
    };
    let kernel = style.kernel_block.map_or_else(String::new, |n| format!(", kernel blocks of {n}"));
    let states = match style.state_order {
        StateOrder::UnitsOuter => "",
        StateOrder::RowsOuter => ", states' rows outside",
    };
    let scratch = match style.scratch_rows {
        0 => String::new(),
        n => format!(", {n} scratch rows"),
    };
    let share = if style.share { ", groups share memory" } else { "" };
    format!("{order}{components}{rows}{padding}{kernel}{states}{scratch}{share}")
}

/// Reads a size as `size` writes it: `64MiB`, `1.5 GiB`, `4096`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || "write bytes, or a number with KiB, MiB or GiB".to_owned();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim() {
        "" => "B",
        unit => unit,
    };
    let power = UNITS.iter().position(|u| *u == unit).and_then(|n| u32::try_from(n).ok()).ok_or_else(wrong)?;
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = number * 1024f64.powi(i32::try_from(power).unwrap_or(0));
    // Beyond this a float has no single bytes, and no machine has so much memory.
    if !(0.0..9e15).contains(&bytes) {
        return Err(wrong());
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range was checked")]
    Ok(bytes as u64)
}

/// A time to three digits: `1.25 ms`.
pub(crate) fn time(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

fn three_digits(value: f64) -> String {
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

const TIMES: [&str; 4] = ["ns", "us", "ms", "s"];

/// Whether a cell is a number, with or without a unit of bytes or time.
fn is_number(cell: &str) -> bool {
    let (number, unit) = cell.split_once(' ').unwrap_or((cell, "B"));
    number.starts_with(|c: char| c.is_ascii_digit()) && (UNITS.contains(&unit) || TIMES.contains(&unit))
}

/// Rows of cells under headings. Columns of numbers stand to the right.
pub(crate) fn table(indent: &str, headings: &[&str], rows: &[Vec<String>]) -> String {
    let columns = headings.len();
    let cell = |row: &Vec<String>, i: usize| row.get(i).cloned().unwrap_or_default();
    let mut widths: Vec<usize> = headings.iter().map(|h| h.chars().count()).collect();
    let mut right = vec![!rows.is_empty(); columns];
    for row in rows {
        for (i, (width, right)) in widths.iter_mut().zip(&mut right).enumerate() {
            let cell = cell(row, i);
            *width = (*width).max(cell.chars().count());
            *right &= is_number(&cell) || cell == "-";
        }
    }
    let mut out = String::new();
    let mut line = |cells: Vec<String>| {
        let mut text = indent.to_owned();
        for (i, cell) in cells.iter().enumerate() {
            let (gap, width) = (if i > 0 { "  " } else { "" }, widths[i]);
            let _ = if right[i] { write!(text, "{gap}{cell:>width$}") } else { write!(text, "{gap}{cell:<width$}") };
        }
        out.push_str(text.trim_end());
        out.push('\n');
    };
    line(headings.iter().map(|h| (*h).to_owned()).collect());
    for row in rows {
        line((0..columns).map(|i| cell(row, i)).collect());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_sizes() {
        assert_eq!((count(7), count(1234), count(1_000_000)), ("7".into(), "1,234".into(), "1,000,000".into()));
        let sizes: Vec<String> = [0, 1023, 1024, 1536, 10 << 20, 268_435_456, u64::MAX].map(size).to_vec();
        assert_eq!(sizes, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "10 MiB", "256 MiB", "16 EiB"]);
    }

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [("0", 0), ("4096", 4096), ("64MiB", 64 << 20), ("1.5 GiB", 3 << 29), ("12 B", 12)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "1 MB", "1..5GiB", "-1", "9 EiB"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times() {
        let times: Vec<String> = [0, 999, 1_500, 20_000, 1_234_567, 2_000_000_000].map(time).to_vec();
        assert_eq!(times, ["0 ns", "999 ns", "1.5 us", "20 us", "1.23 ms", "2 s"]);
    }

    #[test]
    fn names_of_many_layers_are_one() {
        assert_eq!(names(["m.0.a", "m.1.a", "m.3.a", "m.0.k", "x"]), "x, m.{0, 1, 3}.a, m.0.k");
    }

    #[test]
    fn tables_are_aligned() {
        let rows = [vec!["a".into(), "5".into()], vec!["bcd".into(), "1,000".into()]];
        assert_eq!(table("", &["x", "n"], &rows), "x        n\na        5\nbcd  1,000\n");
    }
}
