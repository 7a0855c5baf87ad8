//! Ticks of axes: round numbers at which labels stand, and which of the labels there is room for.

use super::figures::As;

/// What can be drawn without a sum that leaves the range of floats; no real amount is outside.
const SOUND: std::ops::Range<f64> = 1e-200..1e200;

/// A tick: where it stands, from 0 to 1, and its label.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Tick {
    pub(super) at: f64,
    pub(super) label: String,
}

/// An axis from 0 to `top`, with ticks at even steps.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Linear {
    pub(super) top: f64,
    pub(super) ticks: Vec<Tick>,
}

impl Linear {
    /// An axis that `most` fits on, of at most about `steps` steps. Its end is a tick where `to_tick` says so, `most` itself elsewhere.
    pub(super) fn new(most: f64, steps: f64, what: As, to_tick: bool) -> Self {
        let most = if SOUND.contains(&most) { most } else { 1.0 };
        // Steps are round in the unit that the largest label has.
        let unit = match what {
            As::Size => 1024f64.powf((most.ln() / 1024f64.ln()).floor().max(0.0)),
            As::Share => 0.01,
            _ => 1.0,
        };
        let mut step = round_up(most / unit / steps) * unit;
        if matches!(what, As::Count | As::Size) {
            step = step.max(1.0);
        }
        let whole = (most / step - 1e-9).ceil().max(1.0);
        let top = if to_tick { whole * step } else { most };
        let mut ticks = Vec::new();
        let mut n = 0.0;
        while n <= whole && n * step <= top * (1.0 + 1e-9) {
            ticks.push(Tick { at: (n * step / top).min(1.0), label: what.write(n * step) });
            n += 1.0;
        }
        Self { top, ticks }
    }

    /// Where a value stands, from 0 to 1.
    pub(super) fn at(&self, value: f64) -> f64 {
        if value.is_finite() { (value / self.top).clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// The least of 1, 2, 5, 10, … that is no less than `value`.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let of = value / power;
    let round = [1.0, 2.0, 5.0].into_iter().find(|r| of <= r * (1.0 + 1e-9)).unwrap_or(10.0);
    round * power
}

/// An axis of powers of ten, with ticks at each, and between them where there are few.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Logarithmic {
    low: f64,
    high: f64,
    pub(super) ticks: Vec<Tick>,
}

impl Logarithmic {
    /// An axis from `low` to `high`, both above 0.
    pub(super) fn new(low: f64, high: f64, what: As) -> Self {
        let sound = SOUND.contains(&low) && SOUND.contains(&high);
        let (low, high) = if sound { (low, high.max(low * 1.1)) } else { (1.0, 10.0) };
        let mut out = Self { low, high, ticks: Vec::new() };
        const FINE: [f64; 15] = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.5];
        let steps: &[&[f64]] = if high / low < 3000.0 { &[&[1.0, 2.0, 5.0], &FINE] } else { &[&[1.0]] };
        for between in steps {
            out.ticks = out.multiples(between, what);
            if out.ticks.len() > 1 {
                break;
            }
        }
        if out.ticks.len() < 2 {
            out.ticks = [low, high].map(|v| Tick { at: out.at(v), label: what.write(v) }).into();
        }
        out
    }

    /// Ticks at these multiples of the powers of ten.
    fn multiples(&self, of: &[f64], what: As) -> Vec<Tick> {
        let mut out = Vec::new();
        let mut power = 10f64.powf(self.low.log10().floor());
        while power <= self.high {
            for value in of.iter().map(|n| power * n) {
                if value >= self.low * (1.0 - 1e-9) && value <= self.high * (1.0 + 1e-9) {
                    out.push(Tick { at: self.at(value), label: what.write(value) });
                }
            }
            power *= 10.0;
        }
        out
    }

    /// Where a value stands, from 0 to 1.
    pub(super) fn at(&self, value: f64) -> f64 {
        if !value.is_finite() || value <= 0.0 {
            return 0.0;
        }
        ((value / self.low).ln() / (self.high / self.low).ln()).clamp(0.0, 1.0)
    }
}

/// About how wide a character of a label is, in pixels, and the least room between two labels.
const CHARACTER: f64 = 6.8;
const GAP: f64 = 10.0;

/// Which labels there is room for on so many pixels, the first and then each that doesn't touch the one before; labels of the
/// two ends stand inside.
pub(super) fn room(ticks: &[Tick], pixels: f64) -> Vec<bool> {
    let mut free = f64::MIN;
    let mut out = Vec::with_capacity(ticks.len());
    for tick in ticks {
        let width = tick.label.chars().count() as f64 * CHARACTER;
        let (left, right) = match end_of(tick.at) {
            End::First => (0.0, width),
            End::Last => (pixels - width, pixels),
            End::Neither => (tick.at * pixels - width / 2.0, tick.at * pixels + width / 2.0),
        };
        let fits = left >= free && right <= pixels + GAP;
        if fits {
            free = right + GAP;
        }
        out.push(fits);
    }
    out
}

/// Whether a tick is so near an end of its axis that its label stands inside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// Its label begins at the tick.
    First,
    /// Its label ends at the tick.
    Last,
    /// Its label is centred.
    Neither,
}

/// See [`End`].
pub(super) fn end_of(at: f64) -> End {
    if at < 0.03 {
        End::First
    } else if at > 0.97 {
        End::Last
    } else {
        End::Neither
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: &[Tick]) -> Vec<&str> {
        ticks.iter().map(|t| t.label.as_str()).collect()
    }

    #[test]
    fn steps_are_round_in_their_unit() {
        let axis = Linear::new(0.087, 5.0, As::Time, true);
        assert_eq!(labels(&axis.ticks), ["0 s", "20 ms", "40 ms", "60 ms", "80 ms", "100 ms"]);
        let axis = Linear::new(7.3 * 1024.0 * 1024.0, 4.0, As::Size, true);
        assert_eq!(labels(&axis.ticks), ["0 B", "2 MiB", "4 MiB", "6 MiB", "8 MiB"]);
        assert_eq!(labels(&Linear::new(1.0, 4.0, As::Count, true).ticks), ["0", "1"]);
        let axis = Linear::new(0.9, 4.0, As::Share, false);
        assert_eq!((axis.top, labels(&axis.ticks)), (0.9, vec!["0 %", "50 %"]));
    }

    #[test]
    fn every_axis_ends_and_keeps_what_it_shows() {
        let values = [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-12, 1e-9, 0.31, 1.0, 9.99, 1e5, 1e18, 1e300];
        for value in values {
            for what in [As::Time, As::Size, As::Count, As::Share] {
                let axis = Linear::new(value, 5.0, what, true);
                assert!((2..=9).contains(&axis.ticks.len()), "{value} {what:?}: {:?}", axis.ticks);
                assert!(axis.ticks.is_sorted_by(|a, b| a.at < b.at), "{value}");
                assert!(!value.is_finite() || value > 1e200 || axis.top >= value, "{value} on {}", axis.top);
            }
            for wide in [1.0, 1.02, 1.3, 50.0, 1e9] {
                let axis = Logarithmic::new(value, value * wide, As::Time);
                assert!(axis.ticks.is_sorted_by(|a, b| a.at < b.at), "{value}");
                assert!((2..16).contains(&axis.ticks.len()), "{value} {wide}: {:?}", axis.ticks);
            }
        }
    }

    #[test]
    fn powers_are_evenly_apart() {
        let axis = Logarithmic::new(0.001, 10.0, As::Time);
        assert_eq!(labels(&axis.ticks), ["1 ms", "10 ms", "100 ms", "1 s", "10 s"]);
        assert!((axis.at(0.01) - 1.0 / 4.0).abs() < 1e-9 && axis.at(0.0) == 0.0 && axis.at(50.0) == 1.0);
        assert_eq!(labels(&Logarithmic::new(0.003, 0.02, As::Time).ticks), ["5 ms", "10 ms", "20 ms"]);
    }

    #[test]
    fn labels_that_are_kept_do_not_touch() {
        let axis = Linear::new(0.087, 5.0, As::Time, true);
        assert_eq!(room(&axis.ticks, 1000.0), [true; 6]);
        let narrow = room(&axis.ticks, 150.0);
        assert!(narrow[0] && narrow.iter().filter(|k| **k).count() < 4, "{narrow:?}");
    }
}
