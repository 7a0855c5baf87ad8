//! What an engine's ranks have read in an interval, as numbers that can't be misread.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RankId};
use kvferry_session::outcome::Report;

/// A summary over ranks and requests. A *transfer* is what one rank has read for one request, from all its sources at once.
///
/// Throughput has two meanings, and each has its name: [per rank](Self::per_rank_throughput), bytes by the time that ranks were
/// busy, added up; and [by the wall clock](Self::wall_clock_throughput), by the time of the rank that was busy the longest.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Transfers {
    bytes: u64,
    /// Those that arrived.
    count: u64,
    /// Those that did not.
    failures: u64,
    /// How long each rank was busy.
    busy: BTreeMap<RankId, Duration>,
}

impl Transfers {
    /// Adds what a rank has read.
    pub fn record(&mut self, rank: RankId, bytes: Bytes, took: Duration) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes.get());
        let busy = self.busy.entry(rank).or_default();
        *busy = busy.saturating_add(took);
    }

    /// Adds a transfer that did not arrive.
    pub fn record_failure(&mut self) {
        self.failures += 1;
    }

    /// Adds what a request's ranks have done.
    pub(super) fn record_report(&mut self, report: &Report) {
        // Its pairs are by consumer.
        for pairs in report.pairs.chunk_by(|a, b| a.dst == b.dst) {
            let (bytes, took) = pairs.iter().fold((0u64, Duration::ZERO), |(bytes, took), p| {
                (bytes.saturating_add(p.bytes.get()), took.max(p.took))
            });
            if let Some(pair) = pairs.first() {
                self.record(pair.dst, Bytes::new(bytes), took);
            }
        }
        self.failures += report.faults.len() as u64;
    }

    /// Both together; neither is changed.
    #[must_use]
    pub fn merged(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        sum.count += other.count;
        sum.failures += other.failures;
        sum.bytes = sum.bytes.saturating_add(other.bytes);
        for (rank, time) in &other.busy {
            let busy = sum.busy.entry(*rank).or_default();
            *busy = busy.saturating_add(*time);
        }
        sum
    }

    /// Whether nothing has happened: no transfer, and no failure either.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0 && self.failures == 0
    }

    /// Transfers that arrived.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Transfers that did not.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// Bytes over all transfers.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.bytes)
    }

    /// Bytes of a transfer; 0 for none.
    #[must_use]
    pub fn mean_bytes(&self) -> f64 {
        ratio(self.bytes, self.count)
    }

    /// The time of all transfers, added up over ranks.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.busy.values().fold(Duration::ZERO, |sum, t| sum.saturating_add(*t))
    }

    /// The time of a transfer; zero for none.
    #[must_use]
    pub fn mean_time(&self) -> Duration {
        let nanos = self.time().as_nanos() / u128::from(self.count.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// What a rank reads on average while it is busy, in bytes per second: all bytes by the time of all ranks, added up. It does not
    /// grow with the number of ranks.
    #[must_use]
    pub fn per_rank_throughput(&self) -> f64 {
        rate(self.bytes, self.time())
    }

    /// What the engine reads while the rank that was busy the longest is, in bytes per second, all its ranks together. It is the rate by
    /// the wall clock if they began together.
    #[must_use]
    pub fn wall_clock_throughput(&self) -> f64 {
        rate(self.bytes, self.busy.values().copied().max().unwrap_or_default())
    }
}

#[expect(clippy::cast_precision_loss, reason = "an average for people to read")]
fn ratio(sum: u64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { sum as f64 / count as f64 }
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people to read")]
fn rate(bytes: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = 1_048_576.0;

    fn one(rank: u32, bytes: u64, millis: u64) -> Transfers {
        let mut t = Transfers::default();
        t.record(RankId::new(rank), Bytes::new(bytes), Duration::from_millis(millis));
        t
    }

    #[test]
    fn me_01_two_ranks_are_aggregated_under_names_that_say_how() {
        let (a, b) = (one(0, 104_857_600, 10), one(1, 104_857_600, 20));
        let (a_before, b_before) = (a.clone(), b.clone());
        let both = a.merged(&b);
        assert_eq!((both.count(), both.failures()), (2, 0));
        assert_eq!(both.bytes(), Bytes::new(209_715_200));
        assert!((both.mean_bytes() - 100.0 * MIB).abs() < 1.0);
        assert_eq!(both.mean_time(), Duration::from_millis(15));
        assert_eq!(both.time(), Duration::from_millis(30));
        assert!((both.per_rank_throughput() / MIB - 6666.67).abs() < 0.01);
        assert!((both.wall_clock_throughput() / MIB - 10_000.0).abs() < 0.01);
        assert_eq!((a, b), (a_before, b_before), "merging alters its inputs");
    }

    #[test]
    fn me_01_an_interval_of_failures_only_is_something() {
        let mut t = Transfers::default();
        assert!(t.is_empty());
        t.record_failure();
        assert!(!t.is_empty());
        assert_eq!((t.count(), t.failures(), t.mean_time()), (0, 1, Duration::ZERO));
        assert_eq!(t.per_rank_throughput().to_bits(), 0.0f64.to_bits());
        assert!(!Transfers::default().merged(&t).is_empty());
    }

    #[test]
    fn the_same_rank_is_busy_one_transfer_after_the_other() {
        let both = one(3, 1 << 20, 10).merged(&one(3, 1 << 20, 10));
        assert!((both.wall_clock_throughput() / MIB - 100.0).abs() < 0.01);
        assert!((both.per_rank_throughput() / MIB - 100.0).abs() < 0.01);
        let most = one(0, u64::MAX, 1).merged(&one(0, u64::MAX, 1));
        assert_eq!(most.bytes(), Bytes::new(u64::MAX));
    }
}
