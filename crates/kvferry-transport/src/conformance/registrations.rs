//! Clauses on registrations.

use kvferry_geometry::units::RegionId;

use super::pair::{Pair, submission};
use super::sample::{Rng, scattered};
use super::{Harness, Verdict, ensure};
use crate::error::{DeregisterError, RegisterError, TransferError};
use crate::region::MemoryKind;
use crate::types::{OpKind, Outcome, Revocation};

pub(super) fn ids(h: &mut dyn Harness) -> Result<Verdict, String> {
    let mut rng = Rng::new(1);
    let sample = scattered(8, 100);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Read, &mut rng)?;
    let more = [h.region(64), h.region(64), h.region(64)];
    let far = &mut pair.far;
    for (i, region) in (1..).zip(&more[..2]) {
        ensure!(far.register(region.clone()) == Ok(RegionId::new(i)), "ids don't count up");
    }
    far.deregister(RegionId::new(1)).map_err(|e| e.to_string())?;
    ensure!(far.register(more[2].clone()) == Ok(RegionId::new(3)), "an id was re-used while others stand");
    for id in [0, 2, 3] {
        far.deregister(RegionId::new(id)).map_err(|e| e.to_string())?;
    }
    // The same length under the same id: only the generation tells it from what the peer knows.
    let other = h.region(usize::try_from(sample.src_lens[0].get()).unwrap_or(0));
    ensure!(far.register(other) == Ok(RegionId::new(0)), "ids don't begin anew when none stands");
    let op = pair.submit(peer, OpKind::Read, &sample, Some(b"no"))?;
    let end = pair.end_of(h, op)?;
    ensure!(
        matches!(end, Outcome::Failed(TransferError::Stale { .. })),
        "a read through a connection of the old generation ended as {end:?}"
    );
    pair.linger(h);
    ensure!(pair.notices().is_empty(), "a failed operation was notified");
    memory.check_untouched()?;
    pair.near.disconnect(peer).map_err(|e| e.to_string())?;
    let peer = pair.connect(h)?;
    let op = pair.submit(peer, OpKind::Read, &sample, None)?;
    let end = pair.end_of(h, op)?;
    ensure!(end.done().is_some(), "after connecting anew it ended as {end:?}");
    Ok(Verdict::Passed)
}

pub(super) fn duplicate(h: &mut dyn Harness) -> Result<Verdict, String> {
    let mut t = h.endpoint();
    let region = h.region(4096);
    let id = t.register(region.clone()).map_err(|e| e.to_string())?;
    match t.register(region.clone()) {
        Err(RegisterError::Duplicate { existing, .. }) if existing == id => {}
        other => return Err(format!("the second registration gave {other:?}")),
    }
    let part = region.part(0, 2048).ok_or("no part")?;
    let part_id = t.register(part).map_err(|e| format!("an overlapping range: {e}"))?;
    ensure!(part_id != id, "an overlapping range got the same id");
    t.deregister(id).map_err(|e| format!("the first registration is not intact: {e}"))?;
    let again = t.deregister(id);
    ensure!(again == Err(DeregisterError::Unknown { region: id }), "the second deregistration gave {again:?}");
    t.deregister(part_id).map_err(|e| e.to_string())?;
    ensure!(region.owners() == 1, "{} owners are left", region.owners());
    t.register(region).map_err(|e| format!("after deregistration: {e}"))?;
    Ok(Verdict::Passed)
}

pub(super) fn memory_kind(h: &mut dyn Harness) -> Result<Verdict, String> {
    let mut t = h.endpoint();
    let device = MemoryKind::Device(0);
    if t.capabilities().memory.contains(&device) {
        return Ok(Verdict::Skipped("the backend reaches device memory".to_owned()));
    }
    let region = h.region(4096);
    match t.register(region.labelled(device)) {
        Err(error @ RegisterError::UnsupportedMemory { .. }) => {
            let text = error.to_string();
            let names_all = t.capabilities().memory.iter().all(|kind| text.contains(&kind.to_string()));
            ensure!(names_all && text.contains("device 0"), "the message doesn't say what is supported: {text}");
        }
        other => return Err(format!("registering device memory gave {other:?}")),
    }
    ensure!(t.register(region) == Ok(RegionId::new(0)), "host memory can't be registered afterwards");
    let none = h.region(1).part(0, 0).ok_or("no part")?;
    ensure!(t.register(none) == Err(RegisterError::Empty), "a region of no bytes was taken");
    Ok(Verdict::Passed)
}

pub(super) fn deregister(h: &mut dyn Harness) -> Result<Verdict, String> {
    let mut rng = Rng::new(2);
    let sample = scattered(50, 333);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut rng)?;
    let id = RegionId::new(0);
    let op = pair.submit(peer, OpKind::Write, &sample, None)?;
    let busy = pair.near.deregister(id);
    ensure!(busy == Err(DeregisterError::Busy { region: id, operations: 1 }), "under an operation it gave {busy:?}");
    let unknown = pair.near.deregister(RegionId::new(9));
    ensure!(matches!(unknown, Err(DeregisterError::Unknown { .. })), "an unknown id gave {unknown:?}");
    let end = pair.end_of(h, op)?;
    ensure!(end.done().is_some(), "the operation ended as {end:?}");
    memory.check(&sample)?;
    pair.near.deregister(id).map_err(|e| format!("after the end: {e}"))?;
    pair.near.disconnect(peer).map_err(|e| e.to_string())?;
    pair.linger(h);
    ensure!(memory.src[0].owners() == 1, "{} owners are left", memory.src[0].owners());
    Ok(Verdict::Passed)
}

pub(super) fn deregister_under_peer(h: &mut dyn Harness) -> Result<Verdict, String> {
    for kind in [OpKind::Read, OpKind::Write] {
        let mut rng = Rng::new(3);
        let sample = scattered(50, 333);
        let (mut pair, memory, peer) = Pair::ready(h, &sample, kind, &mut rng)?;
        if pair.far.capabilities().revocation == Revocation::Unsupported {
            return Ok(Verdict::Skipped("the backend cannot exclude a peer's access".to_owned()));
        }
        let op = pair.near.submit(submission(peer, kind, &sample, Some(b"x"))).map_err(|e| e.to_string())?;
        pair.far.deregister(RegionId::new(0)).map_err(|e| e.to_string())?;
        match pair.end_of(h, op)? {
            Outcome::Done(_) => memory.check(&sample)?,
            Outcome::Failed(_) | Outcome::InDoubt(_) => memory.check_outside(&sample)?,
        }
        let late = pair.near.submit(submission(peer, kind, &sample, None));
        if let Ok(op) = late {
            let end = pair.end_of(h, op)?;
            ensure!(matches!(end, Outcome::Failed(TransferError::Stale { .. })), "a later {kind} ended as {end:?}");
        }
        pair.linger(h);
        ensure!(pair.outcomes(op).len() == 1, "{} ends", pair.outcomes(op).len());
    }
    Ok(Verdict::Passed)
}

pub(super) fn rounds(h: &mut dyn Harness) -> Result<Verdict, String> {
    let mut t = h.endpoint();
    let whole = h.region(4096);
    for round in 0..20 {
        for i in 0..200u32 {
            let part = whole.part(usize::try_from(i).unwrap_or(0), 8).ok_or("no part")?;
            let id = t.register(part).map_err(|e| format!("round {round}: {e}"))?;
            ensure!(id == RegionId::new(i), "round {round}: region {i} got id {id}");
        }
        for i in 0..200 {
            t.deregister(RegionId::new(i)).map_err(|e| format!("round {round}: {e}"))?;
        }
        ensure!(whole.owners() == 1, "round {round}: {} owners are left", whole.owners());
    }
    Ok(Verdict::Passed)
}
