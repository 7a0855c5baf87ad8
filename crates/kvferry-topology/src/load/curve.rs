//! A measured curve: seconds over a count, linear between the points.

use super::fault::{Fault, Faults};

/// The most points of a curve.
const MAX_POINTS: usize = 4_096;
/// The longest time of a point, in milliseconds: a bit more than a day.
const MAX_MS: f64 = 1e8;

/// Points by rising count, with times that don't fall.
#[derive(Clone, PartialEq, Debug)]
pub struct Curve {
    points: Box<[(f64, f64)]>,
    /// What continues the curve below the first point.
    begin: f64,
    /// What continues it beyond the last, in seconds for each count.
    slope: f64,
}

impl Curve {
    /// A curve of pairs of a count and milliseconds; `None` where it has faults, which are told.
    pub(crate) fn check(key: &str, pairs: &[[f64; 2]], most: u64, faults: &mut Faults) -> Option<Self> {
        if pairs.is_empty() {
            faults.missing(key, "give it one pair at least, as [4096, 210]");
            return None;
        }
        if pairs.len() > MAX_POINTS {
            let change = "leave out those that lie between others";
            faults.push(key, Fault::TooMany { what: "pairs", limit: MAX_POINTS as u64, change });
            return None;
        }
        let mut fine = true;
        for (i, &[count, ms]) in pairs.iter().enumerate() {
            let key = format!("{key}[{i}]");
            fine &= faults.number(format!("{key}[0]"), count, 1.0, most as f64).is_some();
            fine &= faults.number(format!("{key}[1]"), ms, 0.0, MAX_MS).is_some();
            let Some(&[before, ms_before]) = i.checked_sub(1).and_then(|i| pairs.get(i)) else { continue };
            if count <= before {
                let fault = format!("{count} comes after {before}; put the pairs in rising order, each count once");
                faults.push(format!("{key}[0]"), Fault::Conflict(fault));
                fine = false;
            }
            if ms < ms_before {
                let fault =
                    format!("{ms} ms for {count} is less than {ms_before} ms for {before}; more can't take less");
                faults.push(format!("{key}[1]"), Fault::Conflict(fault));
                fine = false;
            }
        }
        fine.then(|| Self::of(pairs))
    }

    fn of(pairs: &[[f64; 2]]) -> Self {
        let points: Box<[(f64, f64)]> = pairs.iter().map(|&[count, ms]| (count, ms / 1e3)).collect();
        let slope = |a: (f64, f64), b: (f64, f64)| (b.1 - a.1) / (b.0 - a.0);
        let (begin, slope) = match *points {
            // One point: in proportion.
            [(count, s)] => (0.0, s / count),
            [first, second, ..] => {
                let last = points.windows(2).next_back();
                let end = last.map_or(0.0, |w| if let [a, b] = *w { slope(a, b) } else { 0.0 });
                ((first.1 - slope(first, second) * first.0).max(0.0), end)
            }
            [] => (0.0, 0.0),
        };
        Self { points, begin, slope }
    }

    /// The same curve with all times multiplied.
    #[must_use]
    pub fn times(&self, factor: f64) -> Self {
        let points = self.points.iter().map(|&(count, s)| (count, s * factor)).collect();
        Self { points, begin: self.begin * factor, slope: self.slope * factor }
    }

    /// The count of the first point.
    #[must_use]
    pub fn first(&self) -> f64 {
        self.points.first().map_or(0.0, |p| p.0)
    }

    /// Seconds at a count: between two points on the line through them; beyond the last with the slope of the last two; below the
    /// first on the line from what the first two extrapolate to at 0, or from 0 where that is less.
    #[must_use]
    pub fn at(&self, count: f64) -> f64 {
        let next = self.points.partition_point(|p| p.0 < count);
        let before = next.checked_sub(1).and_then(|i| self.points.get(i)).copied();
        match (before, self.points.get(next).copied()) {
            (Some(a), Some(b)) => a.1 + (b.1 - a.1) * (count - a.0) / (b.0 - a.0),
            (Some(last), None) => last.1 + self.slope * (count - last.0),
            (None, Some(first)) => self.begin + (first.1 - self.begin) * count / first.0,
            (None, None) => 0.0,
        }
    }
}
