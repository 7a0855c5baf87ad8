//! Clauses on cancelling, revoking, waking and dropping.

use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;

use super::pair::{Pair, submission};
use super::sample::{Rng, Sample, scattered};
use super::{Harness, Verdict, ensure};
use crate::error::{RevokeError, TransferError, UnknownOp};
use crate::types::{Event, OpId, OpKind, Outcome, PeerId, Revocation, RevokeScope};

pub(super) fn cancel(h: &mut dyn Harness) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        for steps in 0..4 {
            let sample = scattered(500, 2000);
            let (mut pair, memory, peer) = Pair::ready(h, &sample, kind, &mut Rng::new(20))?;
            let op = pair.submit(peer, kind, &sample, Some(b"done"))?;
            for _ in 0..steps {
                pair.step(h);
            }
            match pair.near.cancel(op) {
                Ok(()) => {}
                Err(UnknownOp(id)) => {
                    ensure!(id == op && !pair.outcomes(op).is_empty(), "an open operation is unknown")
                }
            }
            let end = pair.end_of(h, op)?;
            match &end {
                Outcome::Done(_) => memory.check(&sample)?,
                Outcome::Failed(why) => {
                    ensure!(*why == TransferError::Cancelled, "cancelled, it failed with {why}");
                    memory.check_outside(&sample)?;
                }
                Outcome::InDoubt(_) => memory.check_outside(&sample)?,
            }
            pair.linger(h);
            ensure!(pair.outcomes(op).len() == 1, "{} ends", pair.outcomes(op).len());
            let notices = pair.notices().len();
            match end {
                Outcome::Done(_) => pair.drive(h, "notification", |p| p.notices().len() == 1)?,
                Outcome::Failed(_) => ensure!(notices == 0, "a failed {kind} was notified"),
                Outcome::InDoubt(_) => ensure!(notices <= 1, "{notices} notifications"),
            }
            ensure!(pair.near.cancel(op) == Err(UnknownOp(op)), "an ended operation could be cancelled");
        }
    }
    let mut t = h.endpoint();
    let nothing = OpId::new(5);
    ensure!(t.cancel(nothing) == Err(UnknownOp(nothing)), "an unknown operation could be cancelled");
    Ok(Verdict::Passed)
}

pub(super) fn revoke(h: &mut dyn Harness) -> Result<Verdict, String> {
    revoked(h, |_| RevokeScope::Region(RegionId::new(0)))
}

pub(super) fn revoke_endpoint(h: &mut dyn Harness) -> Result<Verdict, String> {
    revoked(h, |pair| RevokeScope::Endpoint(pair.near.endpoint()))
}

fn revoked(h: &mut dyn Harness, scope: impl Fn(&Pair) -> RevokeScope) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        let sample = scattered(500, 2000);
        let (mut pair, memory, peer) = Pair::ready(h, &sample, kind, &mut Rng::new(21))?;
        let scope = scope(&pair);
        let caps = pair.far.capabilities();
        if caps.revocation == Revocation::Unsupported {
            let backend = caps.backend;
            let got = pair.far.revoke(scope);
            ensure!(got == Err(RevokeError::Unsupported { backend }), "revoking without support gave {got:?}");
            return Ok(Verdict::Skipped("the backend cannot revoke; it says so".to_owned()));
        }
        let unknown = RegionId::new(40);
        let got = pair.far.revoke(RevokeScope::Region(unknown));
        ensure!(got == Err(RevokeError::Unknown { region: unknown }), "revoking an unknown region gave {got:?}");
        let op = pair.submit(peer, kind, &sample, Some(b"x"))?;
        pair.near.step(h.now());
        pair.far.revoke(scope).map_err(|e| e.to_string())?;
        // From here on nothing may be touched, whatever the outcome, where that is promised.
        let excludes = pair.far.capabilities().revocation == Revocation::Excludes;
        let far: Vec<_> = if kind == OpKind::Write && excludes { memory.dst.clone() } else { Vec::new() };
        let frozen: Vec<_> = far.iter().map(crate::region::Region::to_vec).collect();
        let end = pair.end_of(h, op)?;
        let late = pair.submit(peer, kind, &sample, Some(b"y"))?;
        let late_end = pair.end_of(h, late)?;
        let want = Outcome::Failed(TransferError::Revoked { region: RegionId::new(0) });
        ensure!(late_end == want, "a {kind} after revoking ended as {late_end:?}");
        pair.linger(h);
        ensure!(frozen == far.iter().map(crate::region::Region::to_vec).collect::<Vec<_>>(), "written after revoking");
        match end {
            Outcome::Done(_) => memory.check(&sample)?,
            Outcome::Failed(_) | Outcome::InDoubt(_) => memory.check_outside(&sample)?,
        }
        ensure!(pair.outcomes(op).len() == 1, "{} ends", pair.outcomes(op).len());
        let expected = usize::from(end.done().is_some());
        ensure!(pair.notices().len() == expected, "{} notifications after {end:?}", pair.notices().len());
    }
    Ok(Verdict::Passed)
}

pub(super) fn wake(h: &mut dyn Harness) -> Result<Verdict, String> {
    let sample = scattered(10, 100);
    let (mut pair, _memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(22))?;
    pair.linger(h);
    let quiet = Instant::now();
    while pair.far.wait(Some(Duration::from_millis(20))) {
        pair.step(h);
        ensure!(quiet.elapsed() < Duration::from_secs(10), "an idle endpoint is woken without end");
    }
    for (name, t) in [("near", &mut pair.near), ("far", &mut pair.far)] {
        let now = h.now();
        let next = t.step(now);
        ensure!(next.is_none_or(|at| at > now), "{name} is idle and wants to be stepped at {next:?}; it is {now:?}");
    }
    queued(h, &mut pair, peer, &sample)?;
    let Some(readable) = h.readable(pair.far.wake_fd()) else {
        return Ok(Verdict::Skipped("the harness can't poll a file descriptor".to_owned()));
    };
    ensure!(!readable, "the wake source of an idle endpoint is readable");
    let op = pair.near.submit(submission(peer, OpKind::Write, &sample, Some(b"wake"))).map_err(|e| e.to_string())?;
    let start = Instant::now();
    let mut timer = None;
    while !pair.outcomes(op).iter().any(|o| o.done().is_some()) {
        // Far is stepped only when it says that it wants to be.
        pair.near.step(h.now());
        pair.near_events.extend(std::iter::from_fn(|| pair.near.next_event()));
        if pair.far.wait(Some(Duration::ZERO)) && h.readable(pair.far.wake_fd()) != Some(false) {
            timer = pair.far.step(h.now());
            pair.far_events.extend(std::iter::from_fn(|| pair.far.next_event()));
        }
        ensure!(start.elapsed() < Duration::from_secs(20), "the write doesn't end: {:?}", pair.near_events);
    }
    while !pair.far_events.iter().any(|e| matches!(e, Event::Notification { .. })) {
        // A step that gave a time is due by that time, not by a wake.
        ensure!(timer.is_some() || pair.far.wait(Some(Duration::from_secs(10))), "the notification did not wake");
        timer = pair.far.step(h.now());
        pair.far_events.extend(std::iter::from_fn(|| pair.far.next_event()));
        ensure!(start.elapsed() < Duration::from_secs(20), "woken, but there is no notification");
    }
    Ok(Verdict::Passed)
}

/// A wait with an event in the queue returns at once.
fn queued(h: &mut dyn Harness, pair: &mut Pair, peer: PeerId, sample: &Sample) -> Result<(), String> {
    let op = pair.submit(peer, OpKind::Write, sample, None)?;
    // Nobody takes the event; what else there is to do is done by then.
    for _ in 0..150 {
        pair.near.step(h.now());
        pair.far.step(h.now());
        std::thread::sleep(Duration::from_millis(1));
    }
    let start = Instant::now();
    let woken = pair.near.wait(Some(Duration::from_secs(20)));
    let took = start.elapsed();
    ensure!(woken && took < Duration::from_secs(10), "with an event queued, a wait gave {woken} after {took:?}");
    let ended = pair.end_of(h, op)?;
    ensure!(ended.done().is_some(), "the write ended as {ended:?}");
    Ok(())
}

/// Near is stepped only when it is woken or its timer is due.
pub(super) fn timers(h: &mut dyn Harness) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        let sample = scattered(300, 3000);
        let (mut pair, memory, peer) = Pair::ready(h, &sample, kind, &mut Rng::new(24))?;
        pair.linger(h);
        for _ in 0..20 {
            let op = pair.submit(peer, kind, &sample, Some(b"timed"))?;
            let start = Instant::now();
            // As the contract has it: a step follows our own calls.
            let mut next = pair.near.step(h.now());
            loop {
                pair.near_events.extend(std::iter::from_fn(|| pair.near.next_event()));
                if let Some(end) = pair.outcomes(op).pop() {
                    ensure!(end.done().is_some(), "{op} ended as {end:?}");
                    break;
                }
                ensure!(
                    start.elapsed() < Duration::from_secs(20),
                    "{op} does not end: nothing wakes, next is {next:?}"
                );
                pair.far.step(h.now());
                pair.far_events.extend(std::iter::from_fn(|| pair.far.next_event()));
                let now = h.now();
                if next.is_some_and(|at| at <= now) || pair.near.wait(Some(Duration::from_micros(200))) {
                    next = pair.near.step(h.now());
                }
            }
        }
        memory.check(&sample)?;
    }
    Ok(Verdict::Passed)
}

pub(super) fn drop_in_flight(h: &mut dyn Harness) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        let sample = scattered(500, 2000);
        let (mut pair, memory, peer) = Pair::ready(h, &sample, kind, &mut Rng::new(23))?;
        for _ in 0..3 {
            pair.submit(peer, kind, &sample, None)?;
        }
        pair.near.step(h.now());
        let ours = if kind == OpKind::Read { &memory.dst[0] } else { &memory.src[0] };
        let heir = h.endpoint();
        drop(std::mem::replace(&mut pair.near, heir));
        let before = memory.dst[0].to_vec().map_err(|e| e.to_string())?;
        let start = Instant::now();
        // The owner may be kept a while by a library that is not done with it, but not for good.
        while ours.owners() > 1 && start.elapsed() < Duration::from_secs(10) {
            pair.step(h);
        }
        ensure!(ours.owners() == 1, "a dropped endpoint keeps {} owners", ours.owners() - 1);
        pair.linger(h);
        let after = memory.dst[0].to_vec().map_err(|e| e.to_string())?;
        ensure!(before == after, "memory changed after the drop");
        memory.check_outside(&sample)?;
    }
    Ok(Verdict::Passed)
}
