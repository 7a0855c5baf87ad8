//! Bytes that belong to somebody else, told by their pattern: whatever lands, none of it is delivered.

use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::placement::HeadRule;
use kvferry_proto::peer::{BindAnswer, BindRefusal, Heartbeat, HeartbeatAnswer};
use kvferry_transport::fault::OpFault;
use kvferry_transport::{ConnectError, LostCause, OpKind, SubmitError, TransferError};

use super::tests::{N, attention, destination, engine, held, is_there, listed, prefill, room, source};
use super::*;
use crate::FailureCause;
use crate::owner::OfferError;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn lost() -> TransferError {
    TransferError::PeerLost(LostCause::Gone)
}

/// The two engines of most tests here; these faults are those of the consumer's rank 0.
fn world(faults: impl IntoIterator<Item = (u64, OpFault)>) -> World {
    let script = Script { submit: faults.into_iter().collect(), ..Script::default() };
    World::new(prefill(), Shape { script, ..super::tests::decode() })
}

fn image(w: &World) -> Vec<Vec<u8>> {
    w.d.memory.iter().flatten().map(|r| r.to_vec().unwrap()).collect()
}

fn cause(ended: &Ended) -> &FailureCause {
    &ended.as_ref().unwrap_err().cause
}

/// An offer that ends after so long.
fn offer_for(w: &mut World, lease: u128, ttl: Ttl) -> Fence {
    let offer = Offer { groups: source(), content_key: KEY };
    w.p.owner.offer(LeaseId::new(lease), offer, ttl, w.now).unwrap()
}

/// A request into the i-th destination; of what is compared by nobody but the fence.
fn start(w: &mut World, fence: &Fence, i: u32) -> PullId {
    let wish = PullWish { assurance: Assurance::Fenced, ..w.wish(fence, N, destination(i)) };
    w.d.owner.pull(wish, w.now)
}

/// The producer's engine gives its blocks to another request, once the lease is closed, and not before.
fn reuse(w: &mut World, fence: &Fence) {
    assert!(w.p.closed.iter().any(|(f, _)| f.lease == fence.lease), "its blocks are not the engine's yet");
    w.p.fill(2, &source());
}

/// Nobody's request is told of beats and notices: they are as good as lost.
fn unheard(m: PeerMessage) -> PeerMessage {
    match m {
        PeerMessage::Closed(_) | PeerMessage::HeartbeatAnswer(_) => {
            PeerMessage::HeartbeatAnswer(HeartbeatAnswer { beat: u64::MAX, left: Vec::new() })
        }
        other => other,
    }
}

fn unasked(m: PeerMessage) -> PeerMessage {
    match m {
        PeerMessage::Heartbeat(_) => PeerMessage::Heartbeat(Heartbeat { beat: 0, leases: Vec::new() }),
        other => other,
    }
}

/// FR-07: what names no open lease is refused before a byte moves: an unknown id, a reference that was consumed, at once or after
/// its blocks are another's, one of another life, one of other content.
#[test]
fn fr_07_references_that_name_no_open_lease_move_nothing() {
    let mut w = world([]);
    w.p.fill(1, &source());
    let fence = offer_for(&mut w, 1, Ttl::Usual);
    let pull = start(&mut w, &fence, 1);
    w.run(60);
    assert!(w.end_of(pull).unwrap().is_ok() && is_there(&w, 1));
    let before = image(&w);
    let unknown = BindRefusal::UnknownLease;
    let refused = |w: &mut World, fence: &Fence, expected: &BindRefusal| {
        let pull = start(w, fence, 2);
        w.run(60);
        let ended = w.end_of(pull).unwrap();
        assert!(matches!(cause(&ended), FailureCause::Refused(got) if got == expected), "{}", cause(&ended));
        assert_eq!(image(w), before, "nothing has moved");
    };
    refused(&mut w, &Fence { lease: LeaseId::new(99), ..fence.clone() }, &unknown);
    refused(&mut w, &fence, &unknown);
    reuse(&mut w, &fence);
    let next = offer_for(&mut w, 2, Ttl::Usual);
    refused(&mut w, &fence, &unknown);
    let pull = start(&mut w, &Fence { epoch: Epoch::new(77), ..next.clone() }, 2);
    w.run(60);
    assert!(matches!(cause(&w.end_of(pull).unwrap()), FailureCause::StaleEpoch { .. }));
    let other = PullWish { content_key: ContentKey::from_bytes([8; 32]), ..w.wish(&next, N, destination(2)) };
    let pull = w.d.owner.pull(other, w.now);
    w.run(60);
    assert_eq!(*cause(&w.end_of(pull).unwrap()), FailureCause::Refused(BindRefusal::WrongContent));
    assert_eq!(image(&w), before);
}

/// FR-07: a block that the engine doesn't have is refused before anything is posted, whoever names it; other requests go on.
#[test]
fn fr_07_blocks_out_of_range_are_refused() {
    for (src, dst) in [([3, 0, 24], [4, 5, 6]), ([3, 0, u32::MAX], [4, 5, 6]), ([3, 0, 6], [4, 5, 24])] {
        let shape = |tp| engine(&[attention("layer")], &[(&[0], 16)], tp, 1, HeadRule::Split, LayoutStyle::HND);
        let mut w = World::new(shape(2), shape(1));
        w.p.fill(1, &[held(&[3, 0, 6])]);
        let before = image(&w);
        // The producer's engine is told so itself; one that isn't asked lists it all the same.
        let offered = Offer { groups: vec![held(&src)], content_key: KEY };
        let offered = w.p.owner.offer(LeaseId::new(77), offered, Ttl::Usual, w.now);
        if src[2] != 6 {
            assert!(matches!(offered, Err(OfferError::BlockOutOfRange { block, .. }) if block.get() == src[2]));
            w.heard = |m| match m {
                PeerMessage::BindAnswer(BindAnswer::Bound(mut grant)) if grant.fence.lease.get() == 1 => {
                    grant.groups = vec![held(&[3, 0, 24])];
                    PeerMessage::BindAnswer(BindAnswer::Bound(grant))
                }
                other => other,
            };
        } else {
            assert!(w.p.owner.withdraw(LeaseId::new(77), w.now));
        }
        let fence = w.offer(vec![held(&[3, 0, 6])]);
        let wish = w.wish(&fence, N, vec![room(&dst, 0)]);
        let bad = w.d.owner.pull(wish, w.now);
        let fence = w.offer(vec![held(&[3, 0, 6])]);
        let wish = w.wish(&fence, N, vec![room(&[7, 8, 9], 0)]);
        let good = w.d.owner.pull(wish, w.now);
        w.run(60);
        let ended = w.end_of(bad).unwrap();
        assert!(matches!(cause(&ended), FailureCause::Request(_)), "{}", cause(&ended));
        assert!(w.end_of(good).unwrap().is_ok());
        assert_eq!(w.d.found(1, 0, &listed(&[7, 8, 9]), (0, N)).1, 0);
        let after = image(&w);
        let changed = before.iter().flatten().zip(after.iter().flatten()).filter(|(a, b)| a != b).count();
        assert!(changed as u64 <= 3 * 16 * 4 * 64, "only the good one has written: {changed}");
        assert_eq!(w.p.closed.iter().filter(|(f, _)| f.lease.get() < 77).count(), 2);
    }
}

/// FR-07, LS-05: the lease expires while a slow read is under way, and its blocks are another's when the bytes are read at last.
#[test]
fn fr_07_a_lease_that_expires_under_a_slow_read() {
    // Whether the consumer's beats and the producer's notices come through; how the request must end.
    for (lost_beats, lost_notices, expected) in
        [(true, false, &["lease expired", "lease closed"][..]), (true, true, &["lease expired"]), (false, false, &[])]
    {
        let mut w = world([(0, OpFault::Delay(secs(40))), (1, OpFault::Delay(secs(40)))]);
        (w.asked, w.heard) = (if lost_beats { unasked } else { |m| m }, if lost_notices { unheard } else { |m| m });
        w.p.fill(1, &source());
        let fence = offer_for(&mut w, 1, Ttl::For(secs(3)));
        let pull = start(&mut w, &fence, 1);
        w.run(20);
        for _ in 0..12 {
            w.now += secs(1);
            w.run(5);
        }
        let ended = w.end_of(pull);
        if expected.is_empty() {
            assert!(ended.is_none() && w.p.closed.is_empty(), "it is beaten for");
            w.now += secs(15);
            w.run(5);
            w.now += secs(15);
            w.run(60);
            assert!(w.end_of(pull).unwrap().is_ok() && is_there(&w, 1));
            continue;
        }
        assert_eq!(w.p.closed, [(fence.clone(), Closing::Expired)]);
        reuse(&mut w, &fence);
        w.now += secs(60);
        w.run(60);
        let ended = w.end_of(pull).unwrap();
        assert!(expected.contains(&cause(&ended).kind()), "{}", cause(&ended));
        assert!(!is_there(&w, 1));
        assert_eq!((w.p.closed.len(), w.d.owner.quarantined()), (1, 0));
        // The blocks' next owner is read as if nothing had been.
        let next = offer_for(&mut w, 2, Ttl::Never);
        let pull = start(&mut w, &next, 1);
        w.run(60);
        assert!(w.end_of(pull).unwrap().is_ok());
    }
}

/// FR-07: the producer takes the lease back and re-uses its blocks while a slow read is under way, and no notice comes through: the
/// bytes that land are another request's, and the verdict says so.
#[test]
fn fr_07_wrong_bytes_that_land_are_stale() {
    for told in [false, true] {
        let mut w = world([(0, OpFault::Delay(secs(5))), (1, OpFault::Delay(secs(5)))]);
        if !told {
            w.heard = unheard;
        }
        w.p.fill(1, &source());
        let fence = offer_for(&mut w, 1, Ttl::Never);
        let pull = start(&mut w, &fence, 1);
        w.run(20);
        assert!(w.end_of(pull).is_none());
        assert!(w.p.owner.withdraw(fence.lease, w.now));
        w.run(3);
        reuse(&mut w, &fence);
        w.now += secs(6);
        w.run(60);
        let ended = w.end_of(pull).unwrap();
        if told {
            assert_eq!(*cause(&ended), FailureCause::LeaseClosed { how: Closing::Withdrawn });
        } else {
            assert_eq!(*cause(&ended), FailureCause::Stale);
            let (theirs, _) = w.d.found(2, 0, &listed(&[4, 5, 6]), (0, N));
            assert!(theirs > 0, "bytes of the other request have landed, or this shows nothing");
        }
        assert!(!is_there(&w, 1));
        assert_eq!(w.d.owner.quarantined(), 0);
    }
}

/// FR-07: one of a hybrid's reads fails: that request has failed, with what was cached of each of its groups, and the other one,
/// of the same moment, is delivered.
#[test]
fn fr_07_hybrid_failures_are_by_request() {
    let mut w = world([(0, OpFault::Fail(lost()))]);
    w.p.fill(1, &source());
    let fences = [offer_for(&mut w, 1, Ttl::Usual), offer_for(&mut w, 2, Ttl::Usual)];
    let pulls = [start(&mut w, &fences[0], 1), start(&mut w, &fences[1], 2)];
    w.run(80);
    let ended = pulls.map(|pull| w.end_of(pull).unwrap());
    let failed: Vec<&Box<Failed>> = ended.iter().filter_map(|e| e.as_ref().err()).collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    let report = &failed[0].report;
    assert_eq!((report.groups.len(), report.in_doubt.len()), (2, 0));
    assert!(report.groups[0].valid.is_empty() && report.groups[0].complete == (0, 0));
    assert!(report.groups[1].states.is_empty());
    for (i, ended) in (1..).zip(&ended) {
        assert!(ended.is_err() || is_there(&w, i));
    }
    let mut hows: Vec<Closing> = w.p.closed.iter().map(|(_, how)| *how).collect();
    hows.sort_by_key(|how| how.name());
    assert_eq!(hows, [Closing::Abandoned, Closing::Read]);
}

/// FR-09: a transfer of 60 s, a request of 30: it fails then, and its blocks are nobody else's until the transfer has ended.
#[test]
fn fr_09_a_timeout_is_not_a_stop() {
    let mut w = world([(0, OpFault::HoldCompletion(secs(60)))]);
    w.d.deaf[0].store(true, std::sync::atomic::Ordering::Relaxed);
    w.p.fill(1, &source());
    let fence = offer_for(&mut w, 1, Ttl::Never);
    let wish = PullWish { deadline: secs(30), ..w.wish(&fence, N, destination(1)) };
    let pull = w.d.owner.pull(wish, w.now);
    w.run(20);
    for at in [29, 31, 33] {
        w.now = secs(at);
        w.run(3);
        assert_eq!(w.end_of(pull).is_some(), at == 33, "at {at} s");
    }
    let failed = w.end_of(pull).unwrap().unwrap_err();
    assert!(matches!(failed.cause, FailureCause::Deadline { .. }), "{failed}");
    assert_eq!((failed.report.in_doubt.clone(), w.d.owner.quarantined()), (vec![RankId::new(0)], 4));
    w.now = secs(59);
    w.run(3);
    let next = offer_for(&mut w, 2, Ttl::Never);
    let again = start(&mut w, &next, 1);
    w.run(3);
    assert!(matches!(cause(&w.end_of(again).unwrap()), FailureCause::Overlap(_)));
    w.now = secs(62);
    w.run(10);
    assert_eq!(w.d.owner.quarantined(), 0);
    let again = start(&mut w, &next, 1);
    w.run(60);
    assert!(w.end_of(again).unwrap().is_ok() && is_there(&w, 1));
}

/// FR-12: whatever refuses, at whatever step, the request ends once, and nothing of it stays.
#[test]
fn fr_12_every_fault_ends_the_request_once() {
    let refused = ConnectError::BadLane { backend: "mem", reason: "as the test wants".into() };
    for (what, script) in [
        ("connect", Script { connect: [(0, refused)].into(), ..Script::default() }),
        (
            "post",
            Script {
                submit: [(0, OpFault::Refuse(SubmitError::UnsupportedKind { backend: "mem", kind: OpKind::Read }))]
                    .into(),
                ..Script::default()
            },
        ),
        ("first", Script { submit: [(0, OpFault::Fail(lost()))].into(), ..Script::default() }),
        ("last", Script { submit: [(3, OpFault::Fail(lost()))].into(), ..Script::default() }),
        ("lost", Script { submit: [(1, OpFault::LoseCompletion)].into(), ..Script::default() }),
    ] {
        let mut w = World::new(prefill(), Shape { script, ..super::tests::decode() });
        w.p.fill(1, &source());
        let fence = offer_for(&mut w, 1, Ttl::Never);
        let wish = PullWish { deadline: secs(5), ..w.wish(&fence, N, destination(1)) };
        let pull = w.d.owner.pull(wish, w.now);
        w.run(60);
        w.now += secs(5);
        w.run(5);
        w.now += secs(5);
        w.run(20);
        assert_eq!(w.d.ended.iter().filter(|(id, _)| *id == pull).count(), 1, "{what}");
        assert!(w.end_of(pull).unwrap().is_err(), "{what}");
        assert_eq!(w.p.closed, [(fence, Closing::Abandoned)], "{what}");
    }
}

/// FR-15: the one message that would have ended the lease is lost: the producer frees its blocks when their time is up, and the
/// consumer's request ends by its own deadline.
#[test]
fn fr_15_a_lost_release_is_made_up_for_by_time() {
    let mut w = world([]);
    w.asked = |m| match m {
        PeerMessage::Release(_) | PeerMessage::Heartbeat(_) => {
            PeerMessage::Heartbeat(Heartbeat { beat: 0, leases: Vec::new() })
        }
        other => other,
    };
    w.p.fill(1, &source());
    let fence = offer_for(&mut w, 1, Ttl::For(secs(20)));
    let wish = PullWish { deadline: secs(10), ..w.wish(&fence, N, destination(1)) };
    let pull = w.d.owner.pull(wish, w.now);
    w.run(60);
    assert!(w.end_of(pull).is_none() && is_there(&w, 1), "all is there, and nobody may say so");
    w.now = secs(11);
    w.run(3);
    let ended = w.end_of(pull).unwrap();
    assert!(
        matches!(cause(&ended), FailureCause::Deadline { waiting_for, .. } if waiting_for.contains("verdict")),
        "{}",
        cause(&ended)
    );
    assert!(w.p.closed.is_empty());
    w.now = secs(21);
    w.run(3);
    assert_eq!(w.p.closed, [(fence, Closing::Expired)]);
}

/// A read of one replica fails, the other one is read: the bytes are right, and compared by digest.
#[test]
fn another_replica_gives_the_same_bytes() {
    let shape = |tp, rule, script| Shape {
        script,
        ..engine(&[attention("layer")], &[(&[0], 16)], tp, 1, rule, LayoutStyle::HND)
    };
    let script = Script { submit: [(0, OpFault::Fail(lost()))].into(), ..Script::default() };
    let mut w = World::new(shape(2, HeadRule::Whole, Script::default()), shape(1, HeadRule::Split, script));
    w.p.fill(1, &[held(&[3, 0, 6])]);
    let delivered = w.pull(N, vec![held(&[3, 0, 6])], vec![room(&[4, 5, 6], 0)]).unwrap();
    let bytes = N * 4 * 64;
    assert_eq!((delivered.report().attempts, delivered.report().compared.get()), (2, bytes));
    assert_eq!(w.d.found(1, 0, &listed(&[4, 5, 6]), (0, N)), (bytes, 0));
    assert_eq!(w.p.closed[0].1, Closing::Read);
    assert_eq!(w.p.closed[0].0.attempt.get(), 1);
}

/// A rank of the producer is killed while it is read, and begins anew with nothing in its memory: the request fails, what is offered
/// then is read in the engine's new life, and no byte comes from the old one.
#[test]
fn rs_01_a_producers_rank_begins_anew() {
    let mut w = world([(0, OpFault::Delay(secs(5)))]);
    w.p.fill(1, &source());
    let fence = offer_for(&mut w, 1, Ttl::Usual);
    let pull = start(&mut w, &fence, 1);
    w.run(20);
    let unread = offer_for(&mut w, 2, Ttl::Usual);
    w.p.kill(3, w.now);
    w.run(3);
    w.p.revive(3, &w.network, w.now);
    w.now += secs(6);
    w.run(60);
    let ended = w.end_of(pull).unwrap();
    assert_eq!(*cause(&ended), FailureCause::LeaseClosed { how: Closing::RankLost });
    assert_eq!(w.p.closed, [(fence.clone(), Closing::RankLost), (unread.clone(), Closing::RankLost)]);
    w.p.fill(1, &source());
    let next = offer_for(&mut w, 3, Ttl::Usual);
    assert_eq!(next.epoch, fence.epoch.after());
    let wish = w.wish(&next, N, destination(2));
    let pull = w.d.owner.pull(wish, w.now);
    w.run(60);
    w.end_of(pull).unwrap().unwrap();
    assert!(is_there(&w, 2) && !is_there(&w, 1));
    let stale = start(&mut w, &unread, 3);
    w.run(60);
    assert!(matches!(cause(&w.end_of(stale).unwrap()), FailureCause::StaleEpoch { .. }));
}

/// A rank of the consumer is killed while it reads, and begins anew: what it was to write is in quarantine until then.
#[test]
fn rs_01_a_consumers_rank_begins_anew() {
    let mut w = world([(0, OpFault::Delay(secs(5)))]);
    w.p.fill(1, &source());
    let fence = offer_for(&mut w, 1, Ttl::Usual);
    let pull = start(&mut w, &fence, 1);
    w.run(20);
    w.d.kill(0, w.now);
    w.run(30);
    let failed = w.end_of(pull).unwrap().unwrap_err();
    assert_eq!((failed.report.in_doubt, w.d.owner.quarantined()), (vec![RankId::new(0)], 4));
    assert_eq!(w.p.closed, [(fence, Closing::Abandoned)]);
    w.d.revive(0, &w.network, w.now);
    w.run(10);
    assert_eq!(w.d.owner.quarantined(), 0);
    let next = offer_for(&mut w, 2, Ttl::Usual);
    let wish = w.wish(&next, N, destination(1));
    let pull = w.d.owner.pull(wish, w.now);
    w.run(60);
    w.end_of(pull).unwrap().unwrap();
    assert!(is_there(&w, 1));
}
