//! Periodic sets of tokens, the token axis of atoms.

use alloc::vec;
use alloc::vec::Vec;

use crate::placement::TokenClass;

/// The longest period that is planned for, in tokens.
pub(crate) const MAX_PERIOD: u64 = 1 << 16;

/// Tokens `t` with `t mod period` in one of the intervals: sorted, disjoint, not touching, inside `[0, period)`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct TokenSet {
    pub(crate) period: u64,
    pub(crate) intervals: Vec<(u64, u64)>,
}

impl TokenSet {
    /// The class's tokens, with a period that its own divides.
    pub(crate) fn of_class(class: TokenClass, period: u64) -> Self {
        if class.count() == 1 {
            return Self { period, intervals: vec![(0, period)] };
        }
        let (i, own) = (u64::from(class.interleave()), class.period());
        let start = u64::from(class.index()) * i;
        let intervals = (0..period / own).map(|k| (k * own + start, k * own + start + i)).collect();
        Self { period, intervals }
    }

    /// The same set counted in entries of so many tokens; `None` where an interval cuts an entry.
    pub(crate) fn in_entries(&self, tokens: u64) -> Option<Self> {
        if self.is_all() {
            return Some(Self { period: 1, intervals: vec![(0, 1)] });
        }
        let whole = |n: u64| n.is_multiple_of(tokens).then(|| n / tokens);
        let intervals = self.intervals.iter().map(|&(a, b)| Some((whole(a)?, whole(b)?))).collect::<Option<_>>()?;
        Some(Self { period: whole(self.period)?, intervals })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.intervals.is_empty()
    }

    /// Tokens in one period.
    pub(crate) fn len(&self) -> u64 {
        self.intervals.iter().map(|(a, b)| b - a).sum()
    }

    /// Whether it holds every token.
    pub(crate) fn is_all(&self) -> bool {
        self.intervals == [(0, self.period)]
    }

    /// The first interval of the (unbounded) token axis that has a token at or after `at`, cut to start no earlier.
    pub(crate) fn next_interval(&self, at: u64) -> Option<(u64, u64)> {
        if self.is_all() {
            return Some((at, u64::MAX));
        }
        let (turn, rest) = (at / self.period * self.period, at % self.period);
        let i = self.intervals.partition_point(|x| x.1 <= rest);
        let (turn, interval) = match self.intervals.get(i) {
            Some(interval) => (turn, interval),
            None => (turn.checked_add(self.period)?, self.intervals.first()?),
        };
        Some(((turn + interval.0).max(at), turn.checked_add(interval.1)?))
    }

    pub(crate) fn intersect(&self, other: &Self) -> Self {
        let mut out = Vec::new();
        let (mut i, mut j) = (0, 0);
        while let (Some(&(a, b)), Some(&(c, d))) = (self.intervals.get(i), other.intervals.get(j)) {
            if a.max(c) < b.min(d) {
                out.push((a.max(c), b.min(d)));
            }
            if b < d { i += 1 } else { j += 1 }
        }
        Self { period: self.period, intervals: out }
    }

    pub(crate) fn minus(&self, other: &Self) -> Self {
        let mut out = Vec::new();
        let mut j = 0;
        for &(mut a, b) in &self.intervals {
            while other.intervals.get(j).is_some_and(|o| o.1 <= a) {
                j += 1;
            }
            let mut k = j;
            while let Some(&(c, d)) = other.intervals.get(k).filter(|o| o.0 < b) {
                if a < c {
                    out.push((a, c));
                }
                a = a.max(d);
                k += 1;
            }
            if a < b {
                out.push((a, b));
            }
        }
        Self { period: self.period, intervals: out }
    }
}

pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Least common multiple of two numbers above 0, or `None` beyond 64 bits.
pub(crate) fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b)).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_operations_agree_with_membership() {
        let class = |c, i, x| TokenSet::of_class(TokenClass::new(c, i, x).unwrap(), 48);
        let has = |s: &TokenSet, t| s.intervals.iter().any(|&(a, b)| a <= t && t < b);
        let sets = [
            class(1, 1, 0),
            class(2, 1, 1),
            class(3, 4, 2),
            class(4, 2, 0),
            class(2, 8, 1),
            TokenSet { period: 48, intervals: Vec::new() },
        ];
        for a in &sets {
            for b in &sets {
                for t in 0..48 {
                    assert_eq!(has(&a.intersect(b), t), has(a, t) && has(b, t));
                    assert_eq!(has(&a.minus(b), t), has(a, t) && !has(b, t), "{a:?} {b:?} {t}");
                }
            }
        }
        assert_eq!(class(3, 4, 2).len(), 16);
    }
}
