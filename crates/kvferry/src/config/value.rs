//! Durations, sizes and rates as text: a whole number and a unit, nothing between them.

use std::time::Duration;

/// Longer than this is a slip of the pen.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// What a duration looks like, for messages.
pub(super) const DURATION: &str = "a duration with its unit (us, ms, s, min or h), as in \"250ms\" or \"30s\"";
/// As [`DURATION`], or none.
pub(super) const DURATION_OR_NEVER: &str =
    "a duration with its unit (us, ms, s, min or h), as in \"250ms\" or \"30s\", or \"never\"";
/// What a size looks like.
pub(super) const SIZE: &str = "a size with its unit (B, KiB, MiB, GiB, kB, MB or GB), as in \"8MiB\"";
/// What a rate looks like.
pub(super) const RATE: &str = "a rate with its unit, as in \"10GB/s\"";

const NANOS: &[(&str, u64)] =
    &[("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000), ("min", 60_000_000_000), ("h", 3_600_000_000_000)];
const BYTES: &[(&str, u64)] = &[
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// `None` for what is none, or longer than a year.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let duration = Duration::from_nanos(number(text, NANOS)?);
    (duration <= LONGEST).then_some(duration)
}

/// In bytes.
pub(super) fn size(text: &str) -> Option<u64> {
    number(text, BYTES)
}

/// In bytes per second.
pub(super) fn rate(text: &str) -> Option<u64> {
    size(text.strip_suffix("/s")?)
}

fn number(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at_checked(digits)?;
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_with_units_are_read() {
        for (text, millis) in [("250ms", 250), ("30s", 30_000), ("5min", 300_000), ("2h", 7_200_000), ("0s", 0)] {
            assert_eq!(duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(duration("7us"), Some(Duration::from_micros(7)));
        for (text, bytes) in [("8MiB", 8 << 20), ("0B", 0), ("10GB", 10_000_000_000), ("3kB", 3000), ("1TiB", 1 << 40)]
        {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        assert_eq!(rate("10GB/s"), Some(10_000_000_000));
    }

    #[test]
    fn anything_else_is_not() {
        for text in [
            "",
            "s",
            "30",
            "30 s",
            "1.5s",
            "-1s",
            "30S",
            "30sec",
            "9999999999h",
            "99999999999999999999s",
            "9000h\u{e9}",
        ] {
            assert_eq!(duration(text), None, "{text}");
        }
        for text in ["8", "8M", "8mib", "8 MiB", "8MiB/s", "99999999TiB", "\u{661}B"] {
            assert_eq!(size(text), None, "{text}");
        }
        assert_eq!(rate("10GB"), None);
    }
}
