//! Clauses on many operations and many threads.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::pair::{Pair, submission};
use super::sample::{Memory, Rng, Sample, scattered};
use super::{Harness, Verdict, ensure};
use crate::error::SubmitError;
use crate::transport::Transport;
use crate::types::{Event, OpId, OpKind, PeerId};

/// The queue has an end, says so, and takes more once there is room.
pub(super) fn queue(h: &mut dyn Harness) -> Result<Verdict, String> {
    let sample = scattered(1, 8);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Read, &mut Rng::new(30))?;
    let limit = pair.near.capabilities().max_in_flight;
    if limit > 1 << 17 {
        return Ok(Verdict::Skipped(format!("{limit} operations may be in flight: too many to try")));
    }
    let mut ops = Vec::with_capacity(limit);
    for _ in 0..limit {
        ops.push(pair.submit(peer, OpKind::Read, &sample, None)?);
    }
    let got = pair.near.submit(submission(peer, OpKind::Read, &sample, None));
    ensure!(got == Err(SubmitError::QueueFull { limit }), "one more than {limit} gave {got:?}");
    let mut ended = 0;
    pair.drive(h, "the end of all", |p| {
        ended = p.near_events.iter().filter(|e| matches!(e, Event::Completed { .. })).count();
        ended >= limit
    })?;
    pair.linger(h);
    ensure!(ended == limit, "{ended} ends of {limit} operations");
    memory.check(&sample)?;
    let op = pair.submit(peer, OpKind::Read, &sample, None)?;
    pair.end_of(h, op)?;
    Ok(Verdict::Passed)
}

/// Many small operations, a few at a time: each ends once, each is notified once, nothing is left behind.
pub(super) fn many_small(h: &mut dyn Harness) -> Result<Verdict, String> {
    small(h, 5000, &mut |_| {}).map(|()| Verdict::Passed)
}

/// As many small operations as said; `watch` is told how many have ended.
pub(super) fn small(h: &mut dyn Harness, count: usize, watch: &mut dyn FnMut(usize)) -> Result<(), String> {
    let sample = scattered(4, 16);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(31))?;
    let window = pair.near.capabilities().max_in_flight.min(64);
    let mut ends: BTreeMap<OpId, u32> = BTreeMap::new();
    let mut notices: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    let start = Instant::now();
    let patience = Duration::from_secs(60 + count as u64 / 500);
    let (mut submitted, mut ended) = (0, 0);
    while ended < count || notices.len() < count {
        watch(ended);
        while submitted < count && submitted - ended < window {
            let payload = submitted.to_le_bytes();
            ends.insert(pair.submit(peer, OpKind::Write, &sample, Some(&payload))?, 0);
            submitted += 1;
        }
        pair.step(h);
        for event in pair.near_events.drain(..) {
            if let Event::Completed { op, outcome, .. } = event {
                ensure!(outcome.done().is_some(), "{op} ended as {outcome:?}");
                *ends.entry(op).or_default() += 1;
                ended += 1;
            }
        }
        for event in pair.far_events.drain(..) {
            if let Event::Notification { payload, .. } = event {
                *notices.entry(payload).or_default() += 1;
            }
        }
        ensure!(start.elapsed() < patience, "{ended} ends and {} notifications", notices.len());
    }
    pair.linger(h);
    ensure!(ends.len() == count && ends.values().all(|n| *n == 1), "an operation did not end exactly once");
    ensure!(notices.len() == count && notices.values().all(|n| *n == 1), "a notification was not told exactly once");
    let extra = pair.far_events.iter().chain(&pair.near_events).filter(|e| !matches!(e, Event::Connected { .. }));
    ensure!(extra.count() == 0, "events after the last");
    memory.check(&sample)?;
    let src = &memory.src[0];
    pair.near.disconnect(peer).map_err(|e| e.to_string())?;
    pair.near.deregister(kvferry_geometry::units::RegionId::new(0)).map_err(|e| e.to_string())?;
    ensure!(src.owners() == 1, "{} owners are left", src.owners());
    Ok(())
}

/// Several endpoints, each on a thread of its own, write to one endpoint, which is on another.
pub(super) fn threads(h: &mut dyn Harness) -> Result<Verdict, String> {
    const WRITERS: u32 = 4;
    const OPS: u32 = 40;
    let mut rng = Rng::new(32);
    let sample = scattered(64, 700);
    let mut far = h.endpoint();
    let memories: Vec<_> = (0..WRITERS).map(|_| Memory::new(&sample, &mut rng, |len| h.region(len))).collect();
    for memory in &memories {
        far.register(memory.dst[0].clone()).map_err(|e| e.to_string())?;
    }
    let blob = far.blob();
    let mut writers = Vec::new();
    for (i, memory) in (0..).zip(&memories) {
        let mut t = h.endpoint();
        t.register(memory.src[0].clone()).map_err(|e| e.to_string())?;
        writers.push((t, moved_to(&sample, i, WRITERS)?));
    }
    let clock = Instant::now();
    let expected = WRITERS * OPS;
    let outcome = std::thread::scope(|scope| {
        let blob = &blob;
        let handles: Vec<_> = writers
            .into_iter()
            .map(|(t, sample)| scope.spawn(move || write_all(t, blob, &sample, OPS, clock)))
            .collect();
        let mut got = 0;
        while got < expected && clock.elapsed() < Duration::from_secs(60) {
            far.step(clock.elapsed());
            while let Some(event) = far.next_event() {
                got += u32::from(matches!(event, Event::Notification { .. }));
            }
            far.wait(Some(Duration::from_millis(2)));
        }
        let mut ends = handles.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a writer panicked".to_owned())));
        ends.try_for_each(|e| e.map(drop)).map(|()| got)
    });
    let got = outcome?;
    ensure!(got == expected, "{got} of {expected} notifications");
    memories.iter().try_for_each(|memory| memory.check(&sample))?;
    Ok(Verdict::Passed)
}

/// The sample with far's region `index` as its destination.
fn moved_to(sample: &Sample, index: u32, regions: u32) -> Result<Sample, String> {
    use kvferry_geometry::batch::{Base, Batch, Section};
    use kvferry_geometry::units::RegionId;
    let moved = |b: &Base| Base { dst_region: RegionId::new(index), ..*b };
    let section = |s: &Section| Section { bases: s.bases.iter().map(moved).collect(), parts: s.parts.clone() };
    let batch = Batch::new(sample.batch.batch().sections().iter().map(section).collect());
    let dst_lens = vec![sample.dst_lens[0]; usize::try_from(regions).unwrap_or(0)];
    let batch = batch.check(&sample.src_lens, &dst_lens).map_err(|e| e.to_string())?;
    Ok(Sample { batch: batch.into(), src_lens: sample.src_lens.clone(), dst_lens })
}

/// Writes the sample again and again; returns the endpoint alive, so that its notifications are not lost with it.
fn write_all(
    mut t: Box<dyn Transport>,
    blob: &[u8],
    sample: &Sample,
    ops: u32,
    clock: Instant,
) -> Result<Box<dyn Transport>, String> {
    let peer: PeerId = t.connect(blob).map_err(|e| e.to_string())?;
    for i in 0..ops {
        let op =
            t.submit(submission(peer, OpKind::Write, sample, Some(&i.to_le_bytes()))).map_err(|e| e.to_string())?;
        let mut ended = false;
        while !ended {
            let now = clock.elapsed();
            ensure!(now < Duration::from_secs(60), "write {i} does not end");
            let next = t.step(now);
            while let Some(event) = t.next_event() {
                if let Event::Completed { op: id, outcome, .. } = event {
                    ensure!(id == op && outcome.done().is_some(), "write {i}: {id} ended as {outcome:?}");
                    ended = true;
                }
            }
            if !ended {
                let pause = next.map_or(Duration::from_millis(2), |n| n.saturating_sub(clock.elapsed()));
                t.wait(Some(pause.min(Duration::from_millis(2))));
            }
        }
    }
    Ok(t)
}
