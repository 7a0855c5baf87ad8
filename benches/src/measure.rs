//! Rounds that alternate, and what they are told by: medians of wall and CPU time.

use std::time::Duration;

/// The middle of some times, in seconds.
#[must_use]
pub fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64)
}

/// The time below which so many of a thousand are, in seconds; of a sorted list.
#[must_use]
pub fn quantile(sorted: &[Duration], per_mille: usize) -> f64 {
    sorted.get(sorted.len() * per_mille / 1000).map_or(0.0, Duration::as_secs_f64)
}

/// A setting from the environment.
#[must_use]
pub fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// CPU time of this process so far, all threads.
#[must_use]
pub fn cpu() -> Duration {
    clock(rustix::time::ClockId::ProcessCPUTime)
}

/// CPU time of this thread so far.
#[must_use]
pub fn thread_cpu() -> Duration {
    clock(rustix::time::ClockId::ThreadCPUTime)
}

fn clock(id: rustix::time::ClockId) -> Duration {
    let now = rustix::time::clock_gettime(id);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Wall and CPU time of each round.
#[derive(Default)]
pub struct Column {
    wall: Vec<Duration>,
    cpu: Vec<Duration>,
}

impl Column {
    /// A round, which says how long it took.
    pub fn measure(&mut self, once: impl FnOnce() -> Duration) {
        let before = cpu();
        self.wall.push(once());
        self.cpu.push(cpu().saturating_sub(before));
    }

    /// Median wall and CPU time in seconds, without the first round, which touches what is touched for the first time.
    #[must_use]
    pub fn medians(self) -> (f64, f64) {
        let warm = |times: Vec<Duration>| median(times.into_iter().skip(1).collect());
        (warm(self.wall), warm(self.cpu))
    }

    /// Gigabytes per second of wall time, and per second of CPU time.
    #[must_use]
    pub fn rates(self, bytes: u64) -> (f64, f64) {
        let (wall, cpu) = self.medians();
        (bytes as f64 / wall / 1e9, bytes as f64 / cpu / 1e9)
    }
}

/// Does `each` on equal shares of a list, one for each thread.
pub fn shared_out<T: Sync>(list: &[T], threads: usize, each: impl Fn(&[T]) + Sync) {
    let mut shares = list.chunks(list.len().div_ceil(threads.max(1)).max(1));
    let own = shares.next().unwrap_or_default();
    let each = &each;
    std::thread::scope(|scope| {
        for share in shares {
            scope.spawn(move || each(share));
        }
        each(own);
    });
}
