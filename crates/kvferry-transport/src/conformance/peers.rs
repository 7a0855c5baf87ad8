//! Clauses on blobs, connections and death.

use kvferry_geometry::units::RegionId;

use super::pair::{Pair, submission};
use super::sample::{Memory, Rng, Sample, scattered};
use super::{Harness, Verdict, ensure};
use crate::blob::Blob;
use crate::error::{ConnectError, Fault, SubmitError, UnknownPeer};
use crate::transport::Transport;
use crate::types::{EndpointId, Event, OpId, OpKind, PeerId};

pub(super) fn blob(h: &mut dyn Harness) -> Result<Verdict, String> {
    let mut pair = Pair::new(h);
    pair.far.register(h.region(4096)).map_err(|e| e.to_string())?;
    let blob = pair.far.blob();
    let near = &mut pair.near;
    for end in 0..blob.len() {
        refused(&mut **near, &blob[..end], &format!("cut at byte {end}"))?;
    }
    for bit in 0..blob.len() * 8 {
        let mut flipped = blob.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        refused(&mut **near, &flipped, &format!("with bit {bit} flipped"))?;
    }
    let mut rng = Rng::new(4);
    for len in 0..200 {
        refused(&mut **near, &rng.bytes(len), &format!("of {len} random bytes"))?;
    }
    refused(&mut **near, &[&blob[..], &[0]].concat(), "with a byte more")?;
    let parsed = Blob::decode(&blob).map_err(|e| format!("the blob is not in the common frame: {e}"))?;
    let foreign = Blob { backend: "another".to_owned(), ..parsed.clone() }.encode();
    let got = near.connect(&foreign);
    let refused_by_name = matches!(got, Err(ConnectError::WrongBackend { .. } | ConnectError::NoCommonBackend { .. }));
    ensure!(refused_by_name, "another backend's blob gave {got:?}");
    let garbled = Blob { lane: rng.bytes(33), ..parsed.clone() }.encode();
    refused(&mut **near, &garbled, "with a garbled lane")?;
    let nobody = Blob { endpoint: EndpointId::new([9; 16]), ..parsed }.encode();
    if let Ok(peer) = near.connect(&nobody) {
        pair.drive(h, "PeerLost for an endpoint that is nowhere", |p| {
            p.near_events.iter().any(|e| matches!(e, Event::PeerLost { peer: lost, .. } if *lost == peer))
        })?;
        pair.near.disconnect(peer).map_err(|e| e.to_string())?;
    }
    let own = pair.near.blob();
    let got = pair.near.connect(&own);
    ensure!(got == Err(ConnectError::Itself), "its own blob gave {got:?}");
    pair.near_events.clear();
    pair.connect(h).map_err(|e| format!("the true blob after all this: {e}"))?;
    ensure!(pair.near_events.len() == 1, "refused blobs left events: {:?}", pair.near_events);
    Ok(Verdict::Passed)
}

fn refused(t: &mut dyn Transport, blob: &[u8], what: &str) -> Result<(), String> {
    match t.connect(blob) {
        Ok(peer) => Err(format!("a blob {what} was taken as {peer}")),
        Err(e) if matches!(e.fault(), Fault::PeerBytes | Fault::PeerChoice) => Ok(()),
        Err(e) => Err(format!("a blob {what} is said to be the fault of {:?}: {e}", e.fault())),
    }
}

pub(super) fn connect(h: &mut dyn Harness) -> Result<Verdict, String> {
    let sample = scattered(10, 64);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Read, &mut Rng::new(5))?;
    let info = pair.near.peer(peer).map_err(|e| e.to_string())?;
    ensure!(info.endpoint == pair.far.endpoint(), "the peer's endpoint is {}", info.endpoint);
    ensure!(info.lens() == sample.src_lens, "the peer's regions are {:?}", info.regions);
    let endpoint = info.endpoint;
    let again = pair.near.connect(&pair.far.blob());
    ensure!(again == Err(ConnectError::AlreadyConnected { endpoint, peer }), "connecting twice gave {again:?}");
    let nobody = PeerId::new(77);
    ensure!(pair.near.peer(nobody) == Err(UnknownPeer(nobody)), "peer 77 is known");
    ensure!(pair.near.disconnect(nobody) == Err(UnknownPeer(nobody)), "peer 77 could be disconnected");
    let got = pair.near.submit(submission(nobody, OpKind::Read, &sample, None));
    ensure!(got == Err(SubmitError::UnknownPeer { peer: nobody }), "submitting to peer 77 gave {got:?}");
    // Submitted before the lane is up, from a third endpoint; far has not connected to anyone.
    let mut late = Pair { near: h.endpoint(), far: pair.far, near_events: Vec::new(), far_events: Vec::new() };
    late.near.register(memory.dst[0].clone()).map_err(|e| e.to_string())?;
    let peer = late.near.connect(&late.far.blob()).map_err(|e| e.to_string())?;
    let op = late.submit(peer, OpKind::Read, &sample, Some(b"early"))?;
    let end = late.end_of(h, op)?;
    ensure!(end.done().is_some(), "submitted before Connected it ended as {end:?}");
    memory.check(&sample)?;
    late.drive(h, "notification", |p| !p.notices().is_empty())?;
    let from = late.near.endpoint();
    let is_ours = |e: &Event| matches!(e, Event::Notification { from: f, .. } if *f == from);
    ensure!(late.far_events.iter().any(is_ours), "the notification is from another: {:?}", late.far_events);
    late.linger(h);
    let connected = late.near_events.iter().filter(|e| matches!(e, Event::Connected { .. })).count();
    ensure!(connected == 1, "Connected was told {connected} times");
    Ok(Verdict::Passed)
}

pub(super) fn disconnect(h: &mut dyn Harness) -> Result<Verdict, String> {
    for stepped in [false, true] {
        let sample = scattered(100, 1000);
        let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(6))?;
        let mut ops = Vec::new();
        for _ in 0..5 {
            ops.push(pair.submit(peer, OpKind::Write, &sample, None)?);
        }
        if stepped {
            pair.near.step(h.now());
        }
        pair.near.disconnect(peer).map_err(|e| e.to_string())?;
        for &op in &ops {
            pair.end_of(h, op)?;
        }
        pair.linger(h);
        for &op in &ops {
            ensure!(pair.outcomes(op).len() == 1, "{} ends of {op}", pair.outcomes(op).len());
        }
        let lost = pair.near_events.iter().any(|e| matches!(e, Event::PeerLost { .. }));
        ensure!(!lost, "PeerLost after disconnecting");
        check_ends(&pair, &memory, &sample, &ops)?;
        let got = pair.near.submit(submission(peer, OpKind::Write, &sample, None));
        ensure!(got == Err(SubmitError::UnknownPeer { peer }), "submitting afterwards gave {got:?}");
        ensure!(pair.near.disconnect(peer) == Err(UnknownPeer(peer)), "disconnecting twice is no error");
        pair.near.deregister(RegionId::new(0)).map_err(|e| format!("after disconnecting: {e}"))?;
    }
    // What was told of the connection, and not taken yet, is not heard either.
    let mut pair = Pair::new(h);
    for steps in 0..20 {
        let peer = pair.near.connect(&pair.far.blob()).map_err(|e| e.to_string())?;
        for _ in 0..steps {
            pair.near.step(h.now());
            pair.far.step(h.now());
        }
        pair.near.disconnect(peer).map_err(|e| e.to_string())?;
        pair.linger(h);
        ensure!(pair.near_events.is_empty(), "after {steps} steps, disconnected, it heard {:?}", pair.near_events);
    }
    Ok(Verdict::Passed)
}

/// All operations move the same bytes to the same places: if one is done, all are there; in any case no others are touched.
fn check_ends(pair: &Pair, memory: &Memory, sample: &Sample, ops: &[OpId]) -> Result<(), String> {
    let done = ops.iter().flat_map(|op| pair.outcomes(*op)).any(|end| end.done().is_some());
    if done { memory.check(sample) } else { memory.check_outside(sample) }
}

pub(super) fn peer_death(h: &mut dyn Harness) -> Result<Verdict, String> {
    for stepped in [false, true] {
        let sample = scattered(100, 1000);
        let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Read, &mut Rng::new(7))?;
        let mut ops = Vec::new();
        for _ in 0..5 {
            ops.push(pair.submit(peer, OpKind::Read, &sample, None)?);
        }
        if stepped {
            pair.near.step(h.now());
        }
        let heir = h.endpoint();
        h.kill(std::mem::replace(&mut pair.far, heir));
        let lost = |e: &Event| matches!(e, Event::PeerLost { peer: p, .. } if *p == peer);
        pair.drive(h, "PeerLost", |p| p.near_events.iter().any(lost))?;
        let at = pair.near_events.iter().position(lost).unwrap_or(0);
        for &op in &ops {
            let ends = pair.near_events[..at].iter();
            let ends = ends.filter(|e| matches!(e, Event::Completed { op: id, .. } if *id == op)).count();
            ensure!(ends == 1, "{ends} ends of {op} before PeerLost");
        }
        pair.linger(h);
        ensure!(pair.near_events.len() == at + 1, "events after PeerLost: {:?}", &pair.near_events[at + 1..]);
        check_ends(&pair, &memory, &sample, &ops)?;
        let got = pair.near.submit(submission(peer, OpKind::Read, &sample, None));
        ensure!(matches!(got, Err(SubmitError::PeerLost { .. })), "submitting to the dead gave {got:?}");
        pair.near.disconnect(peer).map_err(|e| e.to_string())?;
        pair.near.deregister(RegionId::new(0)).map_err(|e| e.to_string())?;
    }
    Ok(Verdict::Passed)
}

pub(super) fn peer_death_idle(h: &mut dyn Harness) -> Result<Verdict, String> {
    let sample = scattered(10, 100);
    let (mut pair, memory, peer) = Pair::ready(h, &sample, OpKind::Write, &mut Rng::new(8))?;
    let heir = h.endpoint();
    h.kill(std::mem::replace(&mut pair.far, heir));
    match pair.near.submit(submission(peer, OpKind::Write, &sample, Some(b"x"))) {
        Err(SubmitError::PeerLost { .. }) => {}
        Err(other) => return Err(format!("submitting to the dead gave {other:?}")),
        Ok(op) => {
            let end = pair.end_of(h, op)?;
            ensure!(end.done().is_none(), "a write to the dead is said to be done");
        }
    }
    let lost = |e: &Event| matches!(e, Event::PeerLost { peer: p, .. } if *p == peer);
    pair.drive(h, "PeerLost", |p| p.near_events.iter().any(lost))?;
    drop(memory);
    Ok(Verdict::Passed)
}
