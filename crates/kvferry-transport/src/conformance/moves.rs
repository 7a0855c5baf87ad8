//! Clauses on bytes and notifications.

use std::sync::Arc;

use kvferry_geometry::batch::{Base, Batch, Section, Side};
use kvferry_geometry::units::{Bytes, RegionId};

use super::pair::{Pair, submission};
use super::sample::{Memory, Rng, Sample, empty as empty_sample, sample, scattered};
use super::{Harness, Verdict, ensure};
use crate::error::SubmitError;
use crate::types::{Event, OpKind};

pub(super) fn bounds(h: &mut dyn Harness) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        let good = scattered(10, 100);
        let (mut pair, memory, peer) = Pair::ready(h, &good, kind, &mut Rng::new(10))?;
        let (src, dst) = (good.src_lens[0], good.dst_lens[0]);
        let longer = |len: Bytes| Bytes::new(len.get() + 1);
        // Proven against a longer region than there is, on either side, and against a region that there isn't.
        for (side, proven_src, proven_dst) in [(Side::Src, longer(src), dst), (Side::Dst, src, longer(dst))] {
            let bad = Arc::new(reprove(&good, 0, 0, &[proven_src], &[proven_dst])?);
            let got = pair.near.submit(submission(peer, kind, &Sample { batch: bad, ..good.clone() }, Some(b"no")));
            let want = matches!(&got, Err(SubmitError::RegionLength { side: s, .. }) if *s == side);
            ensure!(want, "a {kind} proven against a longer {side} region gave {got:?}");
        }
        for (side, s, d) in [(Side::Src, 1, 0), (Side::Dst, 0, 1)] {
            let bad = Arc::new(reprove(&good, s, d, &[src, src], &[dst, dst])?);
            let got = pair.near.submit(submission(peer, kind, &Sample { batch: bad, ..good.clone() }, Some(b"no")));
            let region = RegionId::new(1);
            let want = got == Err(SubmitError::UnknownRegion { side, region });
            ensure!(want, "a {kind} that names an unknown {side} region gave {got:?}");
        }
        let before = pair.near_events.len();
        pair.linger(h);
        ensure!(pair.near_events.len() == before, "a refused {kind} has events: {:?}", pair.near_events);
        ensure!(pair.far_events.is_empty(), "a refused {kind} was told to the peer: {:?}", pair.far_events);
        memory.check_untouched()?;
        // What is known of more regions than are named does not matter.
        let more = Arc::new(reprove(&good, 0, 0, &[src, longer(src)], &[dst])?);
        let op = pair.submit(peer, kind, &Sample { batch: more, ..good.clone() }, None)?;
        let end = pair.end_of(h, op)?;
        ensure!(end.done().is_some(), "a good {kind} ended as {end:?}");
        memory.check(&good)?;
    }
    Ok(Verdict::Passed)
}

/// The same batch on other regions, proven against other lengths.
fn reprove(
    sample: &Sample,
    src: u32,
    dst: u32,
    src_lens: &[Bytes],
    dst_lens: &[Bytes],
) -> Result<kvferry_geometry::batch::BoundedBatch, String> {
    let moved = |b: &Base| Base { src_region: RegionId::new(src), dst_region: RegionId::new(dst), ..*b };
    let section = |s: &Section| Section { bases: s.bases.iter().map(moved).collect(), parts: s.parts.clone() };
    let sections = sample.batch.batch().sections().iter().map(section).collect();
    Batch::new(sections).check(src_lens, dst_lens).map_err(|e| e.to_string())
}

pub(super) fn read(h: &mut dyn Harness) -> Result<Verdict, String> {
    exact(h, OpKind::Read)
}

pub(super) fn write(h: &mut dyn Harness) -> Result<Verdict, String> {
    exact(h, OpKind::Write)
}

/// Random batches arrive byte for byte, nothing else is touched, and each ends once.
fn exact(h: &mut dyn Harness, kind: OpKind) -> Result<Verdict, String> {
    let mut pair = Pair::new(h);
    let caps = pair.near.capabilities();
    if !(match kind {
        OpKind::Read => caps.read,
        OpKind::Write => caps.write,
    }) {
        return Ok(Verdict::Skipped(format!("the backend has no {kind}")));
    }
    for seed in 0..h.rounds() {
        let mut rng = Rng::new(seed);
        let sample = sample(&mut rng, 20_000);
        let memory = Memory::new(&sample, &mut rng, |len| h.region(len));
        pair.register(&memory, kind)?;
        let peer = pair.connect(h)?;
        let op = pair.submit(peer, kind, &sample, None)?;
        let end = pair.end_of(h, op)?;
        let stats = end.done().ok_or_else(|| format!("seed {seed}: ended as {end:?}"))?;
        let bytes = sample.batch.bytes();
        ensure!(stats.bytes == bytes, "seed {seed}: {} of {bytes} are said to be moved", stats.bytes);
        ensure!(stats.descriptors > 0, "seed {seed}: no descriptor is said to be moved");
        memory.check(&sample).map_err(|e| format!("seed {seed}: {e}"))?;
        pair.near.disconnect(peer).map_err(|e| e.to_string())?;
        pair.linger(h);
        ensure!(pair.outcomes(op).len() == 1, "seed {seed}: {} ends", pair.outcomes(op).len());
        let (near, far) = match kind {
            OpKind::Read => (memory.dst.len(), memory.src.len()),
            OpKind::Write => (memory.src.len(), memory.dst.len()),
        };
        for (t, count) in [(&mut pair.near, near), (&mut pair.far, far)] {
            for id in 0..u32::try_from(count).unwrap_or(0) {
                t.deregister(RegionId::new(id)).map_err(|e| format!("seed {seed}: {e}"))?;
            }
        }
        pair.near_events.clear();
    }
    ensure!(pair.far_events.is_empty(), "the peer was told something: {:?}", pair.far_events);
    Ok(Verdict::Passed)
}

/// Both endpoints work on each other at the same time.
pub(super) fn both_ways(h: &mut dyn Harness) -> Result<Verdict, String> {
    let mut rng = Rng::new(11);
    let (there, back) = (scattered(60, 500), scattered(40, 700));
    let out = Memory::new(&there, &mut rng, |len| h.region(len));
    let home = Memory::new(&back, &mut rng, |len| h.region(len));
    let mut pair = Pair::new(h);
    // Near writes `there` from its region 0 to far's region 0; far writes `back` from its region 1 to near's region 1.
    for (t, regions) in [(&mut pair.near, [&out.src[0], &home.dst[0]]), (&mut pair.far, [&out.dst[0], &home.src[0]])] {
        for region in regions {
            t.register(region.clone()).map_err(|e| e.to_string())?;
        }
    }
    let to_far = pair.connect(h)?;
    let to_near = pair.far.connect(&pair.near.blob()).map_err(|e| e.to_string())?;
    let back_lens = |sample: &Sample, first: &Sample, src: bool| {
        if src { [first.dst_lens[0], sample.src_lens[0]] } else { [first.src_lens[0], sample.dst_lens[0]] }
    };
    let (src_lens, dst_lens) = (back_lens(&back, &there, true), back_lens(&back, &there, false));
    let batch = Arc::new(reprove(&back, 1, 1, &src_lens, &dst_lens)?);
    let op = pair.submit(to_far, OpKind::Write, &there, Some(b"there"))?;
    let back_op = pair
        .far
        .submit(submission(to_near, OpKind::Write, &Sample { batch, ..back.clone() }, Some(b"back")))
        .map_err(|e| e.to_string())?;
    let end = pair.end_of(h, op)?;
    ensure!(end.done().is_some(), "there: {end:?}");
    let done =
        |e: &Event| matches!(e, Event::Completed { op, outcome, .. } if *op == back_op && outcome.done().is_some());
    pair.drive(h, "the end of the way back", |p| p.far_events.iter().any(done))?;
    let told = |events: &[Event], text: &[u8]| {
        events.iter().filter(|e| matches!(e, Event::Notification { payload, .. } if payload == text)).count()
    };
    pair.drive(h, "both notifications", |p| told(&p.far_events, b"there") == 1 && told(&p.near_events, b"back") == 1)?;
    out.check(&there)?;
    home.check(&back)?;
    Ok(Verdict::Passed)
}

pub(super) fn empty(h: &mut dyn Harness) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        let sample = empty_sample(100, 100);
        let (mut pair, memory, peer) = Pair::ready(h, &sample, kind, &mut Rng::new(12))?;
        let op = pair.submit(peer, kind, &sample, Some(b"nothing"))?;
        let end = pair.end_of(h, op)?;
        let stats = end.done().ok_or_else(|| format!("an empty {kind} ended as {end:?}"))?;
        ensure!(stats.bytes == Bytes::ZERO, "an empty {kind} moved {}", stats.bytes);
        pair.drive(h, "notification", |p| p.notices() == [b"nothing"])?;
        pair.linger(h);
        ensure!(pair.notices().len() == 1, "{} notifications", pair.notices().len());
        memory.check_untouched()?;
    }
    Ok(Verdict::Passed)
}

/// At the moment of the notification every byte is there; it comes once.
pub(super) fn notify(h: &mut dyn Harness) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        for (count, run) in [(1, 1), (1, 300_000), (1000, 64), (1000, 1024)] {
            let sample = scattered(count, run);
            let (mut pair, memory, peer) = Pair::ready(h, &sample, kind, &mut Rng::new(13))?;
            let op = pair.submit(peer, kind, &sample, Some(b"look"))?;
            let mut seen = None;
            pair.drive(h, "notification", |p| {
                if !p.notices().is_empty() && seen.is_none() {
                    seen = Some(memory.check(&sample));
                }
                seen.is_some()
            })?;
            let seen = seen.unwrap_or(Ok(()));
            seen.map_err(|e| format!("{kind} of {count} x {run} B: the notification was early: {e}"))?;
            pair.end_of(h, op)?;
            pair.linger(h);
            ensure!(pair.notices() == [b"look"], "{kind} of {count} x {run} B: notified {:?}", pair.notices());
            ensure!(pair.outcomes(op).len() == 1, "{} ends", pair.outcomes(op).len());
        }
    }
    Ok(Verdict::Passed)
}

pub(super) fn notify_limits(h: &mut dyn Harness) -> Result<Verdict, String> {
    let sample = scattered(3, 10);
    let (mut pair, _memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(14))?;
    let limit = pair.near.capabilities().max_notify;
    let longest = Rng::new(15).bytes(limit);
    let too_long = vec![0; limit + 1];
    let got = pair.near.submit(submission(peer, OpKind::Write, &sample, Some(&too_long)));
    ensure!(got == Err(SubmitError::NotifyTooLong { got: limit + 1, limit }), "one byte too long gave {got:?}");
    for payload in [&longest[..], &[]] {
        pair.far_events.clear();
        let op = pair.submit(peer, OpKind::Write, &sample, Some(payload))?;
        pair.end_of(h, op)?;
        pair.drive(h, "notification", |p| !p.notices().is_empty())?;
        ensure!(pair.notices() == [payload], "a notification of {} bytes changed on the way", payload.len());
    }
    Ok(Verdict::Passed)
}
