//! A date with a time as traces write it, as nanoseconds.

/// Nanoseconds since 1970-01-01 00:00:00 UTC of a text as `2023-11-16 18:15:46.6805900`: a date, a blank or `T`, a time, and
/// where given a fraction of up to nine digits and `Z` or a distance from UTC as `+00:00`. Years 1970 to 2261; no leap seconds.
///
/// ```
/// use kvferry_topology::load::date::nanos;
/// assert_eq!(nanos("1970-01-02 00:00:00.5"), Some(86_400_500_000_000));
/// assert_eq!(nanos("2023-11-16 18:15:46.6805900"), nanos("2023-11-16T20:15:46.68059+02:00"));
/// assert_eq!(nanos("2023-02-29 00:00:00"), None);
/// ```
#[must_use]
pub fn nanos(text: &str) -> Option<i64> {
    let mut rest = text.as_bytes();
    let year = digits(&mut rest, 4)?;
    let month = after(&mut rest, b"-", 2)?;
    let day = after(&mut rest, b"-", 2)?;
    let hour = after(&mut rest, b" T", 2)?;
    let minute = after(&mut rest, b":", 2)?;
    let second = after(&mut rest, b":", 2)?;
    let fraction = fraction(&mut rest)?;
    let east = distance(rest)?;
    let real = (1970..=2261).contains(&year)
        && (1..=12).contains(&month)
        && (1..=days_in(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second < 60;
    if !real {
        return None;
    }
    let seconds = ((days(year, month, day) * 24 + hour) * 60 + minute - east) * 60 + second;
    seconds.checked_mul(1_000_000_000)?.checked_add(fraction)
}

/// So many digits.
fn digits(rest: &mut &[u8], count: usize) -> Option<i64> {
    let (head, tail) = rest.split_at_checked(count)?;
    *rest = tail;
    head.iter().try_fold(0, |n, c| c.is_ascii_digit().then(|| n * 10 + i64::from(c - b'0')))
}

/// One of these, then so many digits.
fn after(rest: &mut &[u8], one_of: &[u8], count: usize) -> Option<i64> {
    let (first, tail) = rest.split_first()?;
    *rest = tail;
    if one_of.contains(first) { digits(rest, count) } else { None }
}

/// A fraction of a second in nanoseconds, if there is one.
fn fraction(rest: &mut &[u8]) -> Option<i64> {
    let Some((b'.', tail)) = rest.split_first() else { return Some(0) };
    let count = tail.iter().take_while(|c| c.is_ascii_digit()).count();
    if !(1..=9).contains(&count) {
        return None;
    }
    *rest = tail;
    let value = digits(rest, count)?;
    Some((count..9).fold(value, |n, _| n * 10))
}

/// Minutes east of UTC; what else is left is none.
fn distance(rest: &[u8]) -> Option<i64> {
    let (sign, mut tail) = match rest.split_first() {
        None => return Some(0),
        Some((b'Z', [])) => return Some(0),
        Some((b'+', tail)) => (1, tail),
        Some((b'-', tail)) => (-1, tail),
        Some(_) => return None,
    };
    let hours = digits(&mut tail, 2)?;
    let minutes = after(&mut tail, b":", 2)?;
    (tail.is_empty() && hours < 24 && minutes < 60).then_some(sign * (hours * 60 + minutes))
}

const fn leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

const fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 if leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let before = year - 1;
    let years = (year - 1970) * 365 + (before / 4 - before / 100 + before / 400) - (1969 / 4 - 1969 / 100 + 1969 / 400);
    years + (1..month).map(|m| days_in(year, m)).sum::<i64>() + day - 1
}
