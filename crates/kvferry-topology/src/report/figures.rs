//! Numbers with units, to three digits, and names that are safe to print.

use crate::number::nearest;

const SIZES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const RATES: [&str; 6] = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"];
const WORK: [&str; 4] = ["/s", "k/s", "M/s", "G/s"];

/// What stands for a number that there is none of.
pub(super) const NONE: &str = "-";

/// What a number is, so that it is written with its unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum As {
    /// Seconds.
    Time,
    /// Bytes.
    Size,
    /// How many.
    Count,
    /// A part of one, as per cent.
    Share,
    /// Bytes a second.
    Rate,
    /// Descriptors a second.
    Work,
    /// As it is.
    Plain,
}

impl As {
    /// The word that a page has for it.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Size => "size",
            Self::Count => "count",
            Self::Share => "share",
            Self::Rate => "rate",
            Self::Work => "work",
            Self::Plain => "plain",
        }
    }

    /// The number in words; whole numbers lose nothing on the way, up to 2^53.
    pub(super) fn write(self, value: f64) -> String {
        match self {
            Self::Time => time(value),
            Self::Size => whole(value).map_or_else(|| NONE.to_owned(), size),
            Self::Count => whole(value).map_or_else(|| NONE.to_owned(), count),
            Self::Share => share(value),
            Self::Rate => scaled(value, 1000.0, &RATES),
            Self::Work => scaled(value, 1000.0, &WORK).replace(" /s", "/s"),
            Self::Plain => value.to_string(),
        }
    }
}

fn whole(value: f64) -> Option<u64> {
    (value.is_finite() && value >= 0.0).then(|| nearest(value))
}

/// A number with separators: `65,536`.
pub(super) fn count(n: u64) -> String {
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

/// A count with its noun: `2 requests`.
pub(super) fn number_of(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(n), if n == 1 { "" } else { "s" })
}

/// A size to three digits: `1.25 MiB`.
pub(super) fn size(bytes: u64) -> String {
    if bytes < 1024 { format!("{bytes} B") } else { scaled(bytes as f64, 1024.0, &SIZES) }
}

/// Seconds to three digits in the unit that fits: `1.25 ms`.
pub(super) fn time(seconds: f64) -> String {
    if !seconds.is_finite() {
        return NONE.to_owned();
    }
    if seconds < 0.0 {
        return format!("-{}", time(-seconds));
    }
    if seconds == 0.0 {
        return "0 s".to_owned();
    }
    for (scale, unit) in [(1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s")] {
        // What rounds to a thousand of a unit is one of the next.
        if seconds / scale < 999.5 {
            return format!("{} {unit}", three_digits(seconds / scale));
        }
    }
    match whole(seconds) {
        Some(whole) if seconds < 1e10 => format!("{} s", count(whole)),
        _ => format!("{} s", three_digits(seconds)),
    }
}

/// A part of one as per cent, to three digits: `83.4 %`.
pub(super) fn share(part: f64) -> String {
    let hundredths = part * 100.0;
    if hundredths.is_finite() { format!("{} %", three_digits(hundredths)) } else { NONE.to_owned() }
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    if !value.is_finite() || value < 0.0 {
        return NONE.to_owned();
    }
    let (mut value, mut unit) = (value, 0);
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    format!("{} {}", three_digits(value), units.get(unit).copied().unwrap_or_default())
}

fn three_digits(value: f64) -> String {
    if value >= 1e7 {
        // More than its largest unit is for.
        return format!("{value:.2e}");
    }
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A name without what moves a cursor, ends a line, or turns the direction of writing: each such character as a picture of it.
pub(super) fn clean(name: &str) -> String {
    let visible = |c: char| match c {
        '\u{0}'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)).unwrap_or(char::REPLACEMENT_CHARACTER),
        '\u{7f}'..='\u{9f}'
        | '\u{61c}'
        | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}'
        | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    name.chars().map(visible).collect()
}

/// A name of at most `most` characters; where it is longer, its middle is left out, for names of ranks and links differ at their ends.
pub(super) fn clip(name: &str, most: usize) -> String {
    let length = name.chars().count();
    if length <= most {
        return name.to_owned();
    }
    let kept = most.saturating_sub(1);
    let (head, tail) = (kept / 2, kept - kept / 2);
    let mut out: String = name.chars().take(head).collect();
    out.push('…');
    out.extend(name.chars().skip(length - tail));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_the_unit_that_fits() {
        let written =
            [0.0, 2.5e-10, 999e-9, 1.5e-6, 20e-6, 0.00123456, 0.999_96, 2.0, 59.96, 999.4, 12_031.4].map(time);
        let wanted =
            ["0 s", "0.25 ns", "999 ns", "1.5 us", "20 us", "1.23 ms", "1 s", "2 s", "60 s", "999 s", "12,031 s"];
        assert_eq!(written, wanted);
        assert_eq!((time(1e12), share(1e9)), ("1.00e12 s".into(), "1.00e11 %".into()));
        assert_eq!((time(-0.5), time(f64::NAN), time(f64::INFINITY)), ("-500 ms".into(), "-".into(), "-".into()));
    }

    #[test]
    fn sizes_shares_and_rates() {
        let sizes = [0, 1023, 1024, 1536, 10 << 20, 268_435_456, u64::MAX].map(size);
        assert_eq!(sizes, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "10 MiB", "256 MiB", "16 EiB"]);
        assert_eq!([0.0, 0.001_234, 0.5, 0.9999, 1.2].map(share), ["0 %", "0.12 %", "50 %", "100 %", "120 %"]);
        assert_eq!(
            [0.0, 999.0, 5e10, 1.25e9, f64::NAN].map(|r| As::Rate.write(r)),
            ["0 B/s", "999 B/s", "50 GB/s", "1.25 GB/s", "-"]
        );
        assert_eq!((As::Work.write(12.5e6), As::Work.write(200.0)), ("12.5 M/s".into(), "200/s".into()));
        assert_eq!((count(7), count(1234), count(1_000_000)), ("7".into(), "1,234".into(), "1,000,000".into()));
    }

    #[test]
    fn nothing_of_a_name_moves_a_cursor() {
        assert_eq!(clean("a\x1b[31m\n\u{202e}b\u{9b}\u{7f}"), "a␛[31m␊\u{fffd}b\u{fffd}\u{fffd}");
        let every: String = (0..0x3000).filter_map(char::from_u32).collect();
        assert!(!clean(&every).chars().any(char::is_control));
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(clip("node12/nic3/out", 9), "node…/out");
        assert_eq!((clip("äöü", 3), clip("äöüß", 3), clip("abc", 0)), ("äöü".into(), "ä…ß".into(), "…".into()));
    }
}
