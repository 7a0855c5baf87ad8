//! Clauses on one large run, and on what comes and goes while bytes move.

use std::collections::BTreeMap;

use kvferry_geometry::units::RegionId;

use super::bytes::{check, fill, reversed};
use super::pair::Pair;
use super::sample::{Memory, Rng, Sample, scattered};
use super::{Harness, Verdict, ensure};
use crate::transport::Transport;
use crate::types::{Event, OpId, OpKind, PeerId, Submission};

/// One run of many bytes arrives whole, in either direction.
pub(super) fn large(h: &mut dyn Harness) -> Result<Verdict, String> {
    let len = h.large();
    let bytes = len as u64;
    let (ours, theirs) = (h.region(len), h.region(len));
    let mut pair = Pair::new(h);
    pair.near.register(ours.clone()).map_err(|e| e.to_string())?;
    pair.far.register(theirs.clone()).map_err(|e| e.to_string())?;
    let peer = pair.connect(h)?;
    // One block, so one run.
    let batch = reversed(bytes, bytes, 0, true).ok_or("a run of no bytes")?;
    for (kind, src, dst, seed) in [(OpKind::Read, &theirs, &ours, 3), (OpKind::Write, &ours, &theirs, 4)] {
        fill(src, 0, bytes, seed)?;
        let submission = Submission { peer, kind, batch: batch.clone(), notify: Some(b"all".to_vec()) };
        let op = pair.near.submit(submission).map_err(|e| e.to_string())?;
        let end = pair.end_of(h, op)?;
        let stats = end.done().ok_or_else(|| format!("a {kind} of {bytes} bytes ended as {end:?}"))?;
        ensure!(stats.bytes.get() == bytes, "a {kind} of {bytes} bytes moved {}", stats.bytes);
        check(dst, 0, bytes, seed).map_err(|e| format!("a {kind} of {bytes} bytes: {e}"))?;
    }
    pair.drive(h, "both notifications", |p| p.notices().len() == 2)?;
    Ok(Verdict::Passed)
}

/// Operations that are kept in flight on one connection, and what became of them.
struct Stream {
    peer: PeerId,
    sample: Sample,
    window: usize,
    total: usize,
    submitted: usize,
    ends: BTreeMap<OpId, u32>,
}

impl Stream {
    fn new(pair: &Pair, peer: PeerId, sample: Sample, total: usize) -> Self {
        let window = pair.near.capabilities().max_in_flight.min(8);
        Self { peer, sample, window, total, submitted: 0, ends: BTreeMap::new() }
    }

    /// Submits what there is room for, steps, and takes the ends; other completions stay among near's events.
    fn turn(&mut self, h: &mut dyn Harness, pair: &mut Pair) -> Result<(), String> {
        let open = |ends: &BTreeMap<OpId, u32>| ends.values().filter(|n| **n == 0).count();
        while self.submitted < self.total && open(&self.ends) < self.window {
            let payload = self.submitted.to_le_bytes();
            let op = pair.submit(self.peer, OpKind::Write, &self.sample, Some(&payload))?;
            self.ends.insert(op, 0);
            self.submitted += 1;
        }
        pair.step(h);
        let mut failed = None;
        pair.near_events.retain(|event| match event {
            Event::Completed { op, outcome, .. } if self.ends.contains_key(op) => {
                *self.ends.entry(*op).or_default() += 1;
                if outcome.done().is_none() {
                    failed = Some(format!("{op} of the steady connection ended as {outcome:?}"));
                }
                false
            }
            _ => true,
        });
        failed.map_or(Ok(()), Err)
    }

    /// Goes on until all have ended and were notified, once each.
    fn finish(mut self, h: &mut dyn Harness, pair: &mut Pair) -> Result<(), String> {
        let start = std::time::Instant::now();
        while self.submitted < self.total || self.ends.values().any(|n| *n == 0) {
            self.turn(h, pair)?;
            ensure!(start.elapsed().as_secs() < 60, "{} of {} operations were submitted", self.submitted, self.total);
        }
        let total = self.total;
        pair.drive(h, "all notifications", |p| p.notices().len() >= total)?;
        pair.linger(h);
        ensure!(self.ends.values().all(|n| *n == 1), "an operation of the steady connection did not end exactly once");
        let mut notices: Vec<_> = pair.notices().into_iter().map(<[u8]>::to_vec).collect();
        let told = notices.len();
        notices.sort();
        notices.dedup();
        ensure!(
            told == total && notices.len() == total,
            "{told} notifications, {} different, of {total}",
            notices.len()
        );
        Ok(())
    }
}

/// Regions come and go on both sides under transfers that don't name them.
pub(super) fn registrations(h: &mut dyn Harness) -> Result<Verdict, String> {
    let sample = scattered(20, 500);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(40))?;
    let extra = h.region(4096);
    let mut stream = Stream::new(&pair, peer, sample.clone(), 200);
    let mut next = [1u32, 1];
    for round in 0..100usize {
        let mut ids = Vec::new();
        for (side, t) in [&mut pair.near, &mut pair.far].into_iter().enumerate() {
            for part in 0..4 {
                let region = extra.part(part * 8 + 2048 * side, 8).ok_or("no part")?;
                let id = t.register(region).map_err(|e| format!("round {round}: {e}"))?;
                ensure!(id == RegionId::new(next[side]), "round {round}: id {id} instead of {}", next[side]);
                next[side] += 1;
                ids.push((side, id));
            }
        }
        stream.turn(h, &mut pair)?;
        for (side, id) in ids {
            let t: &mut dyn Transport = if side == 0 { &mut *pair.near } else { &mut *pair.far };
            t.deregister(id).map_err(|e| format!("round {round}: {e}"))?;
        }
    }
    stream.finish(h, &mut pair)?;
    memory.check(&sample)?;
    let start = std::time::Instant::now();
    while extra.owners() > 1 {
        ensure!(start.elapsed().as_secs() < 10, "{} owners are left", extra.owners() - 1);
        pair.step(h);
    }
    Ok(Verdict::Passed)
}

/// Connections come and go, some in the middle of an operation, beside one that is busy.
pub(super) fn peers(h: &mut dyn Harness) -> Result<Verdict, String> {
    let sample = scattered(20, 500);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(41))?;
    let others: Vec<_> = (0..3u64).map(|i| Memory::new(&sample, &mut Rng::new(50 + i), |len| h.region(len))).collect();
    let mut peers = Vec::new();
    for other in &others {
        let mut t = h.endpoint();
        t.register(other.dst[0].clone()).map_err(|e| e.to_string())?;
        peers.push(t);
    }
    let mut stream = Stream::new(&pair, peer, sample.clone(), 200);
    for round in 0..60usize {
        let other = &mut peers[round % 3];
        let connection = pair.near.connect(&other.blob()).map_err(|e| format!("round {round}: {e}"))?;
        // Left before it came up, in the middle, and after its end.
        for _ in 0..round % 4 {
            stream.turn(h, &mut pair)?;
            other.step(h.now());
        }
        let op = pair.submit(connection, OpKind::Write, &sample, None)?;
        for _ in 0..round % 5 * 4 {
            stream.turn(h, &mut pair)?;
            other.step(h.now());
        }
        pair.near.disconnect(connection).map_err(|e| format!("round {round}: {e}"))?;
        let start = std::time::Instant::now();
        while pair.outcomes(op).is_empty() {
            stream.turn(h, &mut pair)?;
            other.step(h.now());
            ensure!(start.elapsed().as_secs() < 20, "round {round}: the operation does not end");
        }
        ensure!(pair.outcomes(op).len() == 1, "round {round}: {} ends", pair.outcomes(op).len());
        let lost = pair.near_events.iter().find(|e| matches!(e, Event::PeerLost { .. }));
        ensure!(lost.is_none(), "round {round}: {lost:?}");
        while other.next_event().is_some() {}
    }
    stream.finish(h, &mut pair)?;
    memory.check(&sample)?;
    // Near wrote there from its own memory: in the places of the batch, whole or in part.
    others.iter().try_for_each(|other| other.check_outside(&sample))?;
    Ok(Verdict::Passed)
}
