//! A process's own clock: begins where it likes, and goes a little fast or slow.

use std::time::Duration;

/// How a process's time goes by the world's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Clock {
    /// What it shows when the world begins.
    pub offset: Duration,
    /// How much faster it goes, in parts of a million; slower where negative.
    pub drift: i32,
}

const MILLION: i128 = 1_000_000;

impl Clock {
    /// What it shows at a time of the world.
    #[must_use]
    pub fn shows(self, world: Duration) -> Duration {
        let nanos = i128::try_from(world.as_nanos()).unwrap_or(i128::MAX / MILLION / 2);
        let drifted = nanos + nanos * i128::from(self.drift) / MILLION;
        self.offset.saturating_add(Duration::from_nanos(u64::try_from(drifted).unwrap_or(0)))
    }

    /// The first time of the world at which it shows that, or later.
    #[must_use]
    pub fn when(self, shown: Duration) -> Duration {
        let nanos = i128::try_from(shown.saturating_sub(self.offset).as_nanos()).unwrap_or(i128::MAX / MILLION / 2);
        let world = nanos * MILLION / (MILLION + i128::from(self.drift));
        let mut at = Duration::from_nanos(u64::try_from(world).unwrap_or(u64::MAX));
        while self.shows(at) < shown {
            at = at.saturating_add(Duration::from_nanos(1));
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back_is_never_early() {
        for drift in [-900, -1, 0, 7, 50_000] {
            let clock = Clock { offset: Duration::from_secs(77), drift };
            for nanos in [0, 1, 999_999_999, 12_345_678_901_234] {
                let shown = clock.shows(Duration::from_nanos(nanos));
                let at = clock.when(shown);
                assert!(clock.shows(at) >= shown && at <= Duration::from_nanos(nanos + 2), "{drift} {nanos} {at:?}");
            }
        }
    }
}
