//! What real wires bring: lanes that come up late, are not what they should be, break, or are full.

use kvferry_transport::{ConnectError, SubmitError, TransferError};

use super::*;

fn policy(require: &[&str], min: Option<u64>) -> Policy {
    Policy::new(require.iter().copied(), min).unwrap()
}

fn standings(w: &World) -> Vec<LaneStanding> {
    w.d.lanes().into_iter().map(|l| l.standing).collect()
}

fn pull(w: &mut World, id: u64) {
    let order = w.order(id, Assurance::Fenced);
    w.d.handle(ToRank::Pull(order), w.now);
}

/// What the policy allows is used, and is told; with a least rate it was measured before.
#[test]
fn lanes_that_are_allowed_are_used() {
    for (require, min) in [(&[][..], None), (&["rdma", "in-process"], None), (&[], Some(1)), (&["in-process"], Some(1))]
    {
        let mut w = World::with(Script::default(), policy(require, min));
        w.pull(Assurance::Full);
        w.run(SECOND);
        let [Ok(report)] = &w.ended[..] else { panic!("{:?}", w.ended) };
        assert!(report.sources.iter().all(|s| s.lane == "in-process: copy inside one process"), "{report:?}");
        let lanes = w.d.lanes();
        assert_eq!(lanes.iter().map(|l| l.rank.get()).collect::<Vec<_>>(), [0, 1]);
        for lane in &lanes {
            assert_eq!((lane.engine.as_str(), lane.backend, &lane.standing), ("p", "mem", &LaneStanding::Up));
            assert_eq!(lane.lane.measured.is_some(), min.is_some());
        }
        assert!(!w.d.lanes.is_reading());
    }
}

/// A lane that is not what the policy requires carries nothing: the request fails with the reason, and so does each later one at
/// once, without another connection.
#[test]
fn a_lane_that_is_not_allowed_fails_the_request_with_the_reason() {
    for (require, min, reason) in [
        (&["rdma", "cuda_ipc"][..], None, "requires rdma or cuda_ipc"),
        (&[], Some(u64::MAX), "at least; the lane is in-process"),
        (&["tcp"], Some(1), "requires tcp"),
    ] {
        // A third connection would be another fault.
        let connect = [(2, ConnectError::Itself)].into();
        let mut w = World::with(Script { connect, ..Script::default() }, policy(require, min));
        w.d.cache.regions().iter().for_each(|r| r.fill(0, r.len().get(), 0xee).unwrap());
        for round in 1..4 {
            pull(&mut w, round);
            w.run(SECOND);
            assert_eq!(w.fault().stage, Stage::Connect);
            assert!(w.fault().text.contains(reason), "{}", w.fault());
            assert!(w.fault().text.starts_with("source rank 0: the lane is refused"), "{}", w.fault());
            assert!(!w.fault().in_doubt);
            w.ended.clear();
        }
        for standing in standings(&w) {
            assert!(matches!(&standing, LaneStanding::Refused(why) if why.contains(reason)), "{standing:?}");
        }
        let untouched = |r: &Region| r.to_vec().unwrap().iter().all(|b| *b == 0xee);
        assert!(w.d.cache.regions().iter().all(untouched), "no byte has moved");
    }
}

/// A lane of which no probe succeeds is refused; one that fails once isn't. Scratch memory is not shared with what a probe has left
/// in flight.
#[test]
fn a_lane_that_cannot_be_measured_is_refused() {
    let lane = TransferError::Lane { reason: "on demand".into() };
    for (fault, reason) in [
        (OpFault::Fail(lane.clone()), "on demand"),
        (OpFault::InDoubt(lane), "on demand"),
        (OpFault::Refuse(SubmitError::Refused { reason: "no room".into() }), "no room"),
        (OpFault::LoseCompletion, "not done within"),
    ] {
        for k in [0, 1, 2] {
            let mut w = World::with(on(k, fault.clone()), policy(&[], Some(1)));
            w.pull(Assurance::Fenced);
            w.run(20 * SECOND);
            assert!(matches!(&w.ended[..], [Ok(_)]), "{k} {fault:?} {:?}", w.ended);
            assert_eq!(standings(&w), [LaneStanding::Up, LaneStanding::Up]);
            assert!(!w.d.lanes.is_reading() && w.d.end.ops.is_empty());
        }
        // Each probe of either lane ends with its first read.
        for (failing, refused) in [(4, false), (6, true)] {
            let script = Script { submit: (0..failing).map(|k| (k, fault.clone())).collect(), ..Script::default() };
            let mut w = World::with(script, policy(&[], Some(1)));
            w.pull(Assurance::Fenced);
            w.run(20 * SECOND);
            if refused {
                assert_eq!(w.fault().stage, Stage::Connect, "{fault:?}");
                let text = &w.fault().text;
                assert!(text.contains("can't be measured") && text.contains(reason), "{text}");
            } else {
                assert!(matches!(&w.ended[..], [Ok(_)]), "{fault:?} {:?}", w.ended);
            }
            let is_as_said = |s: &LaneStanding| matches!(s, LaneStanding::Refused(_)) == refused;
            assert!(standings(&w).iter().all(is_as_said), "{:?}", standings(&w));
            assert!(!w.d.lanes.is_reading() && w.d.end.ops.is_empty());
        }
    }
    // A full queue is no failure.
    let full = OpFault::Refuse(SubmitError::QueueFull { limit: 1 });
    let script = Script { submit: [0, 1, 4, 9].map(|k| (k, full.clone())).into(), ..Script::default() };
    let mut w = World::with(script, policy(&[], Some(1)));
    w.pull(Assurance::Fenced);
    w.run(SECOND);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
}

/// The best of a few probes is what a lane is judged by, and while one reads, nothing else takes the rank's time for long.
#[test]
fn a_lane_that_is_slow_once_is_not_refused() {
    let measured = |w: &World| w.d.lanes()[0].lane.measured.unwrap().bytes_per_second;
    let mut w = World::with(Script::default(), policy(&[], Some(1)));
    w.pull(Assurance::Fenced);
    w.run(SECOND);
    // As fast as the steps are.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate of some MB/s")]
    let least = (measured(&w) / 2.0) as u64;
    // The first large read, after one small one that isn't counted and 21 that are.
    let mut w = World::with(on(22, OpFault::HoldCompletion(SECOND / 4)), policy(&[], Some(least)));
    w.pull(Assurance::Fenced);
    assert_eq!(w.d.slice(), SLICE);
    for _ in 0..3 {
        w.d.step(w.now);
    }
    assert!(w.d.lanes.is_reading());
    assert_eq!(w.d.slice(), SLICE_WHILE_PROBING);
    w.run(SECOND);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
    assert_eq!(w.d.slice(), SLICE);
    assert_eq!(w.d.lanes.known.values().map(|k| k.tries).collect::<Vec<_>>(), [1, 0]);
    assert!(measured(&w) >= 2.0 * f64::from(u32::try_from(least).unwrap()) * 0.9, "the best counts");
}

/// Operations wait for a slow lane before they are posted, whether something is required of it or not. They can be given up.
#[test]
fn a_lane_that_comes_up_late_delays() {
    for policy in [policy(&["in-process"], None), policy(&[], Some(1)), Policy::default()] {
        let mut w = World::with(Script::default(), policy.clone());
        w.held.store(true, Ordering::Relaxed);
        for round in 1..3 {
            pull(&mut w, round);
            w.run(SECOND);
            assert!(w.ended.is_empty() && w.d.end.ops.is_empty(), "nothing moves on a lane that was not looked at");
            assert_eq!(standings(&w), [LaneStanding::Connecting, LaneStanding::Connecting]);
            if round == 1 {
                w.d.handle(ToRank::Cancel(PullId(1)), w.now);
                w.run(SECOND);
                assert_eq!(w.fault().stage, Stage::Cancelled);
                w.ended.clear();
            }
        }
        w.held.store(false, Ordering::Relaxed);
        w.run(SECOND);
        assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
        assert_eq!(standings(&w), [LaneStanding::Up, LaneStanding::Up]);
    }
}

/// A lane that is lost before it was up, or while others wait for it, ends who waits; the next request makes it anew.
#[test]
fn a_lane_that_is_lost_ends_those_who_wait_for_it() {
    let mut w = World::with(Script::default(), policy(&["in-process"], None));
    w.held.store(true, Ordering::Relaxed);
    w.pull(Assurance::Fenced);
    w.run(SECOND / 10);
    // The second producer's rank dies.
    let dead = w.p.pop().unwrap();
    drop(dead);
    w.d.step(w.now);
    w.held.store(false, Ordering::Relaxed);
    for _ in 0..100 {
        w.d.step(w.now);
        while let Some(message) = w.d.next_message() {
            let FromRank::Pulled { result, .. } = message else { panic!("{message:?}") };
            w.ended.push(result);
        }
        w.now += SECOND / 100;
    }
    let fault = w.fault();
    assert!(matches!(fault.stage, Stage::Connect | Stage::Read) && !fault.in_doubt, "{fault}");
    assert!(fault.text.starts_with("source rank 1"), "{fault}");
    assert!(w.d.end.ops.is_empty());
    assert!(matches!(&standings(&w)[..], [LaneStanding::Up, LaneStanding::Lost(_)]), "{:?}", standings(&w));
    assert_eq!(w.d.peers.values().map(|k| k.lanes.len()).sum::<usize>(), 1);
}

/// Lanes that there were are shown, but not for ever.
#[test]
fn lanes_of_the_past_are_bounded() {
    let mut w = World::new(Script::default());
    let engine = w.d.peers.values().next().unwrap().manifest.clone();
    for round in 1..=50u64 {
        pull(&mut w, round);
        w.run(SECOND / 100);
        assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
        w.ended.clear();
        w.d.handle(ToRank::Forget(engine.digest()), w.now);
        assert_eq!(standings(&w), [LaneStanding::Left, LaneStanding::Left], "the last one to each rank");
        w.d.handle(ToRank::Peer(engine.clone()), w.now);
    }
    // Of other engines.
    let info = |w: &World| w.d.lanes.known.values().next().unwrap().info.clone();
    for i in 1000..1200 {
        let (peer, info) = (PeerId::new(i), info(&w));
        let engine = EngineId::new(&format!("e{i}")).unwrap();
        w.d.lanes.add(peer, (&engine, RankId::new(0)), &[].into(), info);
        w.d.lanes.leave(peer);
    }
    assert_eq!(w.d.lanes().len(), 64);
    assert_eq!(w.d.lanes().last().unwrap().engine.as_str(), "e1199");
}

/// A lane that fails an operation is used again; the request that it failed says what the backend said.
#[test]
fn a_lane_that_fails_once_fails_one_request() {
    let lane = TransferError::Lane { reason: "retry count exceeded (12) on mlx5_0".into() };
    for (fault, in_doubt) in [(OpFault::Fail(lane.clone()), false), (OpFault::InDoubt(lane), true)] {
        let mut w = World::new(on(1, fault));
        pull(&mut w, 1);
        w.run(SECOND);
        assert_eq!((w.fault().stage, w.fault().in_doubt), (Stage::Read, in_doubt));
        assert!(w.fault().text.contains("source rank 1: the lane failed: retry count exceeded"), "{}", w.fault());
        w.ended.clear();
        pull(&mut w, 2);
        w.run(SECOND);
        assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
        assert_eq!(w.d.lanes().len(), 2, "no lane was made anew");
    }
}

/// The producer's ranks register their memory anew; gives what they would join with then.
fn registered_anew(w: &mut World) -> Vec<RankContact> {
    let anew = |rank: &mut RankSession| {
        let regions = rank.cache.regions().to_vec();
        for id in 0..u32::try_from(regions.len()).unwrap() {
            rank.end.transport.deregister(RegionId::new(id)).unwrap();
        }
        for region in regions {
            rank.end.transport.register(region).unwrap();
        }
        RankContact { epoch: Epoch::new(7), blob: rank.end.transport.blob().into() }
    };
    w.p.iter_mut().map(anew).collect()
}

/// The consumer hears of an engine that is like the producer, and reads from it from now on; gives from whom it has read.
pub(super) fn introduce(w: &mut World, id: &str, contacts: Vec<RankContact>) -> Digest {
    let engine = EngineId::new(id).unwrap();
    let engine = EngineManifest::new(engine, Epoch::new(2), (*manifest(2)).clone(), contacts).unwrap();
    let old = std::mem::replace(&mut w.pairing.peer, engine.digest());
    w.d.handle(ToRank::Peer(Arc::new(engine)), w.now);
    old
}

fn contacts(w: &World) -> Vec<RankContact> {
    w.p.iter().map(|p| RankContact { epoch: Epoch::new(1), blob: p.end.transport.blob().into() }).collect()
}

/// An endpoint id that two ranks name, of one engine or of two, is not taken for both: the one's bytes would be read for the
/// other's.
#[test]
fn a_lane_is_not_taken_for_another_rank_or_engine() {
    let mut w = World::new(Script::default());
    let mut twice = contacts(&w);
    twice[1] = twice[0].clone();
    let p = introduce(&mut w, "twice", twice);
    pull(&mut w, 1);
    w.run(SECOND / 10);
    assert_eq!(w.fault().stage, Stage::Connect);
    for text in ["source rank 1: rank 1 of engine twice names", "that of rank 0 of engine twice", "of its own"] {
        assert!(w.fault().text.contains(text), "{}", w.fault());
    }
    w.ended.clear();
    w.d.handle(ToRank::Forget(w.pairing.peer), w.now);
    // Another engine that gives out the producer's endpoints as its own, and is read from first.
    let thief = contacts(&w);
    introduce(&mut w, "thief", thief);
    pull(&mut w, 2);
    w.run(SECOND / 10);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
    w.ended.clear();
    w.pairing.peer = p;
    pull(&mut w, 3);
    w.run(SECOND / 10);
    assert_eq!(w.fault().stage, Stage::Connect);
    for text in ["source rank 0: rank 0 of engine p names", "that of rank 0 of engine thief"] {
        assert!(w.fault().text.contains(text), "{}", w.fault());
    }
}

/// The same rank under a newer manifest is reached by the lane that there is, while its blob is the same; by another blob, anew,
/// though nothing has shown yet that the old one is stale.
#[test]
fn a_lane_is_kept_for_as_long_as_its_blob_is_the_same() {
    let mut w = World::new(Script::default());
    let lanes = |w: &World| w.d.peers[&w.pairing.peer].lanes.clone();
    pull(&mut w, 1);
    w.run(SECOND / 10);
    let first = lanes(&w);
    let mut same = contacts(&w);
    same[0].epoch = Epoch::new(9);
    introduce(&mut w, "p", same);
    pull(&mut w, 2);
    w.run(SECOND / 10);
    assert_eq!(lanes(&w), first);
    let other = registered_anew(&mut w);
    introduce(&mut w, "p", other);
    pull(&mut w, 3);
    w.run(SECOND / 10);
    assert!(matches!(&w.ended[..], [Ok(_), Ok(_), Ok(_)]), "{:?}", w.ended);
    assert!(lanes(&w).values().all(|lane| first.values().all(|f| f != lane)), "both were made anew");
    assert_eq!(standings(&w), [LaneStanding::Up, LaneStanding::Up]);
}

/// Those who share a lane share what its rank has said of gathering.
#[test]
fn a_rank_that_computes_other_batches_is_asked_by_no_manifest_of_its_lane() {
    let mut w = World::new(Script::default());
    pull(&mut w, 1);
    let mut same = contacts(&w);
    same[0].epoch = Epoch::new(9);
    introduce(&mut w, "p", same);
    pull(&mut w, 2);
    let other = w.network.endpoint().unwrap();
    let blob: Arc<[u8]> = other.blob().into();
    introduce(&mut w, "other", vec![RankContact { epoch: Epoch::new(1), blob }; 2]);
    let src = RankId::new(0);
    let lane = w.d.peers.values().find_map(|k| k.lanes.get(&src).copied()).unwrap();
    w.d.stop_gathering(src, lane);
    let gathers = w.d.peers.values().map(|k| (k.manifest.engine().as_str(), k.gathers));
    let mut gathers: Vec<_> = gathers.collect();
    gathers.sort_unstable();
    assert_eq!(gathers, [("other", true), ("p", false), ("p", false)]);
}

/// A lane that can't be probed, as its peer has no region, doesn't keep those behind it from being probed.
#[test]
fn a_lane_that_cannot_be_probed_holds_nobody_up() {
    let mut w = World::with(Script::default(), policy(&[], Some(1)));
    let empty: Vec<_> = (0..2).map(|_| w.network.endpoint().unwrap()).collect();
    let contacts = empty.iter().map(|e| RankContact { epoch: Epoch::new(1), blob: e.blob().into() }).collect();
    let p = introduce(&mut w, "empty", contacts);
    pull(&mut w, 1);
    w.pairing.peer = p;
    pull(&mut w, 2);
    let (mut now, mut steps) = (w.now, 0);
    while let Some(next) = w.d.step(now) {
        now = next.max(now) + Duration::from_micros(20);
        steps += 1;
        assert!(steps < 10_000, "it never rests");
    }
    let ends: Vec<FromRank> = std::iter::from_fn(|| w.d.next_message()).collect();
    let [FromRank::Pulled { result: Err(fault), .. }, FromRank::Pulled { pull: PullId(2), result: Ok(_) }] = &ends[..]
    else {
        panic!("{ends:?}")
    };
    assert_eq!(fault.stage, Stage::Plan, "{fault}");
    let [LaneStanding::Refused(why), LaneStanding::Up, LaneStanding::Up] = &standings(&w)[..] else {
        panic!("{:?}", standings(&w))
    };
    assert!(why.contains("no registered region"), "{why}");
}

/// A probe that finds a lane stale leaves it, as a request does.
#[test]
fn a_lane_that_its_probe_finds_stale_is_made_anew() {
    let mut w = World::with(Script::default(), policy(&[], Some(1)));
    let contacts = registered_anew(&mut w);
    pull(&mut w, 1);
    w.run(SECOND);
    assert_eq!(w.fault().stage, Stage::Connect);
    assert!(w.fault().text.contains("connect anew with a new blob"), "{}", w.fault());
    assert!(standings(&w).iter().all(|s| matches!(s, LaneStanding::Lost(_))), "{:?}", standings(&w));
    w.ended.clear();
    introduce(&mut w, "p", contacts);
    pull(&mut w, 2);
    w.run(SECOND);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
    assert_eq!(standings(&w), [LaneStanding::Up, LaneStanding::Up]);
}

/// Where the producer has registered its memory anew, what was known of it is stale: the request fails with that, and the next one
/// makes the lane anew by the blob that the engine has then, though the endpoint is the same.
#[test]
fn a_producer_that_registers_anew_is_reached_by_its_new_blob() {
    // The second request's reads wait; they end when the first one's have shown that the lanes are stale.
    let mut script = on(4, OpFault::Delay(SECOND));
    script.submit.insert(5, OpFault::Delay(SECOND));
    let mut w = World::new(script);
    pull(&mut w, 1);
    w.run(SECOND / 10);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
    w.ended.clear();
    let contacts = registered_anew(&mut w);
    // Two requests at once over the same lanes: both fail, once each.
    let orders = [2, 3].map(|id| w.order(id, Assurance::Fenced));
    for order in orders {
        w.d.handle(ToRank::Pull(order), w.now);
    }
    for _ in 0..20 {
        w.d.step(w.now);
        for p in &mut w.p {
            p.step(w.now);
        }
        w.now += SECOND / 100;
    }
    let ends: Vec<FromRank> = std::iter::from_fn(|| w.d.next_message()).collect();
    assert_eq!(ends.len(), 2);
    for end in ends {
        let FromRank::Pulled { result: Err(fault), .. } = end else { panic!("{end:?}") };
        assert!(!fault.in_doubt && fault.text.contains("connect anew with a new blob"), "{fault}");
    }
    assert!(standings(&w).iter().all(|s| matches!(s, LaneStanding::Lost(_))), "{:?}", standings(&w));
    // What the owner tells of the engine's new life, with the same endpoints.
    let old = introduce(&mut w, "p", contacts);
    w.d.handle(ToRank::Forget(old), w.now);
    pull(&mut w, 4);
    w.run(SECOND / 10);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
    assert_eq!(standings(&w), [LaneStanding::Up, LaneStanding::Up]);
}

/// A producer that dies in the middle and comes back as another engine: the old reads end, the new ones go to the new endpoints,
/// and what is left of the old ones is forgotten with it.
#[test]
fn a_producer_that_restarts_is_reached_at_its_new_endpoints() {
    let mut w = World::new(on(0, OpFault::Delay(SECOND)));
    pull(&mut w, 1);
    w.run(SECOND / 10);
    assert!(w.ended.is_empty(), "one read is on its way");
    let old = w.pairing.peer;
    w.p.clear();
    for _ in 0..200 {
        w.d.step(w.now);
        w.now += SECOND / 100;
    }
    let ends: Vec<FromRank> = std::iter::from_fn(|| w.d.next_message()).collect();
    let [FromRank::Pulled { result: Err(fault), .. }] = &ends[..] else { panic!("{ends:?}") };
    assert_eq!((fault.stage, fault.in_doubt), (Stage::Read, false), "{fault}");
    assert!(matches!(&standings(&w)[0], LaneStanding::Lost(why) if why.contains("gone")), "{:?}", standings(&w));
    let (mut p, mut contacts) = (Vec::new(), Vec::new());
    for rank in 0..2 {
        let (session, contact) = session("p", rank, 2, Box::new(w.network.endpoint().unwrap()));
        p.push(session);
        contacts.push(contact);
    }
    w.p = p;
    let cache = (*manifest(2)).clone();
    let engine = EngineManifest::new(EngineId::new("p").unwrap(), Epoch::new(2), cache, contacts).unwrap();
    w.pairing.peer = engine.digest();
    w.d.handle(ToRank::Peer(Arc::new(engine)), w.now);
    w.d.handle(ToRank::Forget(old), w.now);
    pull(&mut w, 2);
    w.run(SECOND / 10);
    assert!(matches!(&w.ended[..], [Ok(_)]), "{:?}", w.ended);
    assert_eq!(standings(&w), [LaneStanding::Up, LaneStanding::Up], "of the old life nothing is left");
}

/// A session that is dropped in the middle leaves its reads to the transport: no byte is written after that.
#[test]
fn a_session_that_is_dropped_writes_nothing_more() {
    for fault in [OpFault::Delay(SECOND), OpFault::HoldCompletion(SECOND), OpFault::LoseCompletion] {
        let mut script = on(0, fault.clone());
        script.submit.insert(1, fault);
        let mut w = World::new(script);
        pull(&mut w, 1);
        w.run(SECOND / 10);
        assert!(w.ended.is_empty());
        let regions = w.d.cache.regions().to_vec();
        let World { p, d, .. } = w;
        drop(d);
        regions.iter().for_each(|r| r.fill(0, r.len().get(), 0xee).unwrap());
        let mut p = p;
        for i in 0..100u32 {
            for rank in &mut p {
                rank.step(SECOND * (1 + i));
            }
        }
        assert!(regions.iter().all(|r| r.to_vec().unwrap().iter().all(|b| *b == 0xee)));
    }
}

/// A driver that steps only when it is told to (or woken) sees everything end: whatever the session asks of its transport in a step
/// is followed by another.
#[test]
fn nothing_waits_for_a_step_that_nobody_asks_for() {
    let full = OpFault::Refuse(SubmitError::QueueFull { limit: 1 });
    for (script, policy) in [
        (Script::default(), Policy::default()),
        (on(1, full.clone()), Policy::default()),
        (on(1, OpFault::Delay(SECOND)), Policy::default()),
        (on(1, OpFault::Fail(lost())), Policy::default()),
        (Script::default(), policy(&[], Some(1))),
        (on(0, OpFault::LoseCompletion), policy(&[], Some(1))),
        // A queue that is full for ever is waited for, not asked again and again.
        (
            Script { submit: (0..20_000).map(|k| (k, full.clone())).collect(), ..Script::default() },
            policy(&[], Some(1)),
        ),
    ] {
        let faults = script.submit.len();
        let mut w = World::with(script, policy);
        pull(&mut w, 1);
        let (mut now, mut steps) = (w.now, 0);
        while let Some(next) = w.d.step(now) {
            // The clock goes on a little by itself.
            now = next.max(now) + Duration::from_micros(20);
            steps += 1;
            assert!(steps < 10_000, "it never rests");
        }
        let ended = std::iter::from_fn(|| w.d.next_message()).filter(|m| matches!(m, FromRank::Pulled { .. })).count();
        assert_eq!(ended, 1, "with {faults} faults");
        assert!(w.d.end.ops.is_empty());
    }
}
