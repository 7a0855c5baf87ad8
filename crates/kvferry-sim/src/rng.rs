//! Chance: one generator for each thing that happens by chance, so that leaving one thing out moves no other.

use std::time::Duration;

/// Mixes a number so that neighbours look unrelated.
#[must_use]
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// One number of several.
#[must_use]
pub fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0x6b76_6665_7272_7921, |h, p| mix(h.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(*p)))
}

/// A generator (SplitMix64). Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that gives the same for the same parts.
    #[must_use]
    pub fn of(parts: &[u64]) -> Self {
        Self(hash(parts))
    }

    /// Sixty-four bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A hundred and twenty-eight bits.
    pub fn wide(&mut self) -> u128 {
        (u128::from(self.word()) << 64) | u128::from(self.word())
    }

    /// A number below `n`; 0 where `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let wide = u128::from(self.word()) * u128::from(n);
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// As [`between`](Self::between), for small numbers.
    pub fn small(&mut self, low: u32, high: u32) -> u32 {
        u32::try_from(self.between(u64::from(low), u64::from(high))).unwrap_or(high)
    }

    /// Whether something happens that happens `of_ten_thousand` times in ten thousand.
    pub fn chance(&mut self, of_ten_thousand: u32) -> bool {
        self.below(10_000) < u64::from(of_ten_thousand)
    }

    /// A time from `low` to `high`.
    pub fn time(&mut self, low: Duration, high: Duration) -> Duration {
        let span = u64::try_from(high.saturating_sub(low).as_nanos()).unwrap_or(u64::MAX);
        low + Duration::from_nanos(self.below(span.saturating_add(1)))
    }

    /// One of several, unless there is none.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        let at = usize::try_from(self.below(of.len() as u64)).unwrap_or(0);
        of.get(at)
    }

    /// Puts a list into another order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            let j = usize::try_from(self.below(i as u64 + 1)).unwrap_or(0);
            list.swap(i, j);
        }
    }
}

/// Milliseconds.
#[must_use]
pub const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Microseconds.
#[must_use]
pub const fn us(n: u64) -> Duration {
    Duration::from_micros(n)
}
