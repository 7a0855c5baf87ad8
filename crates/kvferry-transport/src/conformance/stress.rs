//! What takes more time or memory than a suite may: for tests of their own in each backend.
//!
//! Whatever is timed is given back and not judged here: the machine and the backend decide what is good.

use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;

use super::pair::{Pair, submission};
use super::sample::{Rng, scattered};
use super::{Harness, ensure, volume};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Event, OpKind, Outcome};

/// What a process holds of the system, by `/proc/self`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Open file descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Mappings.
    pub mappings: usize,
    /// Bytes of memory in use.
    pub resident: u64,
}

impl Counts {
    /// As they are now; 0 for what can't be read.
    #[must_use]
    pub fn now() -> Self {
        let entries = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let kib = text("/proc/self/status")
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        Self {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            mappings: text("/proc/self/maps").lines().count(),
            resident: kib.unwrap_or(0) * 1024,
        }
    }

    /// Whether nothing has grown since `before`, but for so many mappings and bytes, which come and go with the allocator.
    ///
    /// # Errors
    /// Both counts.
    pub fn flat_since(&self, before: &Self, mappings: usize, bytes: u64) -> Result<(), String> {
        let flat = self.descriptors <= before.descriptors
            && self.threads <= before.threads
            && self.mappings <= before.mappings + mappings
            && self.resident <= before.resident + bytes;
        ensure!(flat, "{self:?} has grown from {before:?}");
        Ok(())
    }
}

/// So many small writes with notifications, each done and told once; the counts after the first tenth and at the end, which
/// should be flat where nothing else runs in this process.
///
/// # Errors
/// What does not hold.
pub fn small_transfers(h: &mut dyn Harness, count: usize) -> Result<[Counts; 2], String> {
    let mut early = None;
    volume::small(h, count, &mut |ended| {
        if early.is_none() && ended >= count / 10 {
            early = Some(Counts::now());
        }
    })?;
    Ok([early.unwrap_or_default(), Counts::now()])
}

/// Registers so many ranges of a region and deregisters them, again and again; the time of each round. Ids begin at 0 in each.
///
/// # Errors
/// What does not hold.
pub fn registration_rounds(
    t: &mut dyn Transport,
    whole: &Region,
    ranges: u32,
    rounds: usize,
) -> Result<Vec<Duration>, String> {
    // They overlap, as far as the region is too short for all of them side by side.
    let len = usize::try_from(whole.len().get()).map_err(|e| e.to_string())?;
    let step = (len / 2 / usize::try_from(ranges.max(1)).map_err(|e| e.to_string())?).max(1);
    let empty = t.blob().len();
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds {
        let start = Instant::now();
        for i in 0..ranges {
            let at = usize::try_from(i).map_err(|e| e.to_string())? * step;
            let part = whole.part(at, len / 2).ok_or("the region is too short for so many ranges")?;
            let id = t.register(part).map_err(|e| format!("round {round}, range {i}: {e}"))?;
            ensure!(id == RegionId::new(i), "round {round}: range {i} is region {id}");
        }
        for i in 0..ranges {
            t.deregister(RegionId::new(i)).map_err(|e| format!("round {round}, range {i}: {e}"))?;
        }
        times.push(start.elapsed());
        ensure!(t.blob().len() == empty, "round {round}: the blob has {} bytes instead of {empty}", t.blob().len());
    }
    Ok(times)
}

/// The last of the rounds against the median of the second to fifth.
#[must_use]
pub fn slowdown(rounds: &[Duration]) -> f64 {
    let mut early: Vec<_> = rounds.iter().skip(1).take(4).copied().collect();
    early.sort_unstable();
    match (rounds.last(), early.get(early.len() / 2)) {
        (Some(last), Some(median)) => last.as_secs_f64() / median.as_secs_f64().max(1e-9),
        _ => 1.0,
    }
}

/// How long after a write of `runs` runs of `run` bytes was told as done, the peer hears of it, which sleeps on another thread and
/// does nothing but what it is woken for. Zero if it heard first.
///
/// # Errors
/// What does not hold; also if the peer isn't told within 20 s.
pub fn notification_gap(h: &mut dyn Harness, runs: u32, run: u64) -> Result<Duration, String> {
    let sample = scattered(runs, run);
    let (pair, memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(60))?;
    let Pair { mut near, mut far, .. } = pair;
    let clock = Instant::now();
    let patience = Duration::from_secs(20);
    let (done, told) = std::thread::scope(|scope| {
        let sleeper = scope.spawn(move || {
            let mut told = None;
            let begun = Instant::now();
            while told.is_none() && begun.elapsed() < 10 * patience {
                let next = far.step(clock.elapsed());
                while let Some(event) = far.next_event() {
                    if matches!(event, Event::Notification { .. }) {
                        told = Some(clock.elapsed());
                    }
                }
                let rest = next.map_or(patience, |at| at.saturating_sub(clock.elapsed()).min(patience));
                if told.is_none() {
                    far.wait(Some(rest));
                }
            }
            (told, far)
        });
        let op = near.submit(submission(peer, OpKind::Write, &sample, Some(b"done"))).map_err(|e| e.to_string())?;
        let mut done = None;
        let mut heard = Ok(());
        while done.is_none() && heard.is_ok() && clock.elapsed() < 10 * patience {
            let next = near.step(clock.elapsed());
            while let Some(event) = near.next_event() {
                match event {
                    Event::Completed { op: id, outcome: Outcome::Done(_), .. } if id == op => {
                        done = Some(clock.elapsed())
                    }
                    Event::Completed { outcome, .. } => heard = Err(format!("the write ended as {outcome:?}")),
                    _ => {}
                }
            }
            let rest = next.map_or(patience, |at| at.saturating_sub(clock.elapsed()).min(patience));
            if done.is_none() {
                near.wait(Some(rest.min(Duration::from_millis(100))));
            }
        }
        heard?;
        // Near sleeps as its driver would; what is still to be sent, it is woken for.
        while !sleeper.is_finished() && done.is_some_and(|at| clock.elapsed() < at + patience) {
            near.step(clock.elapsed());
            near.wait(Some(Duration::from_millis(1)));
        }
        let (told, far) = sleeper.join().map_err(|_| "the peer's thread panicked".to_owned())?;
        drop(far);
        Ok::<_, String>((done, told))
    })?;
    memory.check(&sample)?;
    match (done, told) {
        (Some(done), Some(told)) => Ok(told.saturating_sub(done)),
        (done, told) => Err(format!("done at {done:?}, the peer was told at {told:?}")),
    }
}

/// Endpoints on `threads` threads write to one endpoint, `rounds` times each by a fresh connection, while another thread steps that
/// one. Each write is done, and told once.
///
/// # Errors
/// What does not hold.
pub fn connections_on_threads(h: &mut dyn Harness, threads: u32, rounds: u32) -> Result<(), String> {
    let sample = scattered(16, 300);
    let mut far = h.endpoint();
    let dst = h.region(usize::try_from(sample.dst_lens[0].get()).map_err(|e| e.to_string())?);
    far.register(dst).map_err(|e| e.to_string())?;
    let blob = far.blob();
    let mut writers = Vec::new();
    for _ in 0..threads {
        let mut t = h.endpoint();
        let src = h.region(usize::try_from(sample.src_lens[0].get()).map_err(|e| e.to_string())?);
        t.register(src).map_err(|e| e.to_string())?;
        writers.push(t);
    }
    let clock = Instant::now();
    let expected = threads * rounds;
    std::thread::scope(|scope| {
        let (blob, sample) = (&blob, &sample);
        let handles: Vec<_> = writers
            .into_iter()
            .map(|mut t| {
                scope.spawn(move || (0..rounds).try_for_each(|_| one_visit(&mut *t, blob, sample, clock)).map(|()| t))
            })
            .collect();
        let mut told = 0;
        while told < expected && clock.elapsed() < Duration::from_secs(120) {
            far.step(clock.elapsed());
            while let Some(event) = far.next_event() {
                told += u32::from(matches!(event, Event::Notification { .. }));
            }
            far.wait(Some(Duration::from_millis(2)));
            if handles.iter().all(std::thread::ScopedJoinHandle::is_finished) && clock.elapsed().as_secs() > 60 {
                break;
            }
        }
        for handle in handles {
            handle.join().map_err(|_| "a thread panicked".to_owned())??;
        }
        ensure!(told == expected, "{told} of {expected} notifications");
        Ok(())
    })
}

/// Connects, writes once, and disconnects.
fn one_visit(t: &mut dyn Transport, blob: &[u8], sample: &super::sample::Sample, clock: Instant) -> Result<(), String> {
    let peer = t.connect(blob).map_err(|e| e.to_string())?;
    let op = t.submit(submission(peer, OpKind::Write, sample, Some(b"visit"))).map_err(|e| e.to_string())?;
    let begun = Instant::now();
    loop {
        t.step(clock.elapsed());
        while let Some(event) = t.next_event() {
            match event {
                Event::Completed { op: id, outcome: Outcome::Done(_), .. } if id == op => {
                    return t.disconnect(peer).map_err(|e| e.to_string());
                }
                Event::Connected { .. } => {}
                other => return Err(format!("heard {other:?}")),
            }
        }
        ensure!(begun.elapsed() < Duration::from_secs(60), "a write does not end");
        t.wait(Some(Duration::from_millis(2)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_of_this_process() {
        let before = Counts::now();
        assert!(before.descriptors > 2 && before.threads > 0 && before.mappings > 5 && before.resident > 1 << 20);
        let more = Counts { threads: before.threads + 1, ..before };
        assert!(more.flat_since(&before, 0, 0).is_err() && before.flat_since(&more, 0, 0).is_ok());
    }

    #[test]
    fn slowdown_is_of_the_last_against_the_early() {
        let ms = |n: &[u64]| slowdown(&n.iter().map(|n| Duration::from_millis(*n)).collect::<Vec<_>>());
        assert!((ms(&[900, 10, 10, 10, 10, 10, 20]) - 2.0).abs() < 1e-6);
        assert!((ms(&[]) - 1.0).abs() < 1e-6);
    }
}
