//! Requests in slices: what is read, who goes first, and what ends when.

use kvferry_geometry::batch::Descriptor;
use kvferry_transport::conformance::sample::{Rng, sample};
use kvferry_transport::{ConnectError, SubmitError};

use super::*;

/// In slices of so many bytes, at most `ops` in flight.
fn admission(slice: u64, ops: u32) -> Admission {
    Admission { slice: Bytes::new(slice), peer_ops: ops, ops, ..Admission::default() }
}

fn world(script: Script, admission: Admission) -> World {
    let mut w = World::new(script);
    w.d.queue = Queue::new(admission);
    w
}

/// The same for each of the first operations.
fn all(count: u64, fault: &OpFault) -> Script {
    Script { submit: (0..count).map(|k| (k, fault.clone())).collect(), ..Script::default() }
}

fn order(w: &mut World, pull: u64, priority: u8, deadline: Option<Duration>) {
    let order = PullOrder { priority, deadline, ..w.order(pull, Assurance::Fenced) };
    w.d.handle(ToRank::Pull(order), w.now);
}

/// One step of the decode rank; gives who has ended.
fn step(w: &mut World) -> Vec<(u64, Result<RankReport, RankFault>)> {
    w.d.step(w.now);
    w.now += Duration::from_millis(1);
    let mut ended = Vec::new();
    while let Some(message) = w.d.next_message() {
        let FromRank::Pulled { pull, result } = message else { panic!("{message:?}") };
        ended.push((pull.0, result));
    }
    ended
}

fn steps(w: &mut World, times: usize) -> Vec<(u64, Result<RankReport, RankFault>)> {
    (0..times).flat_map(|_| step(w)).collect()
}

fn flying(w: &World, pull: u64) -> usize {
    w.d.end.ops.values().filter(|f| f.order == Order::Pull(PullId(pull))).count()
}

#[test]
fn a_share_in_slices_is_the_same_share() {
    let read = |slice: u64| {
        let mut w = world(Script::default(), admission(slice, 200));
        w.d.cache.regions().iter().for_each(|r| r.fill(0, r.len().get(), 0xee).unwrap());
        w.pull(Assurance::Full);
        w.run(SECOND);
        let memory: Vec<_> = w.d.cache.regions().iter().map(|r| r.to_vec().unwrap()).collect();
        let Ok([report]) = <[_; 1]>::try_from(w.ended) else { panic!("it ends once") };
        (memory, report.unwrap())
    };
    let (memory, whole) = read(1 << 20);
    assert_eq!((whole.slices, whole.sources.len()), (2, 2));
    for slice in [1, 3, 64, 100, 1000, 4096, TOKENS * TOKEN_BYTES / 2] {
        let (got, report) = read(slice);
        assert!(got == memory, "{slice}");
        let least = 2 * (TOKENS * TOKEN_BYTES / 2).div_ceil(slice);
        assert!(u64::from(report.slices) >= least, "{} slices of {slice}", report.slices);
        assert!(u64::from(report.slices) <= 2 * least, "{} slices of {slice}", report.slices);
        assert_eq!((report.zeroed, report.compared), (whole.zeroed, whole.compared));
        let bytes = |r: &RankReport| r.sources.iter().map(|s| (s.src, s.bytes, s.rows)).collect::<Vec<_>>();
        assert_eq!(bytes(&report), bytes(&whole));
    }
}

/// Neither bytes nor operations in flight pass their limits, which are used.
#[test]
fn what_is_in_flight_is_bounded() {
    let b = Bytes::new;
    for (limits, ops, bytes) in [
        (admission(256, 3), 3, 768),
        (Admission { bytes: b(1000), ..admission(256, 9) }, 3, 768),
        (Admission { peer_bytes: b(600), ..admission(256, 9) }, 2, 512),
        (Admission { peer_ops: 2, ..admission(256, 9) }, 2, 512),
        // A slice is never larger than a limit.
        (Admission { peer_bytes: b(64), ..admission(256, 9) }, 1, 64),
    ] {
        let mut w = world(all(1000, &OpFault::HoldCompletion(SECOND / 500)), limits);
        (1..4).for_each(|pull| order(&mut w, pull, 100, None));
        let (mut ended, mut most) = (Vec::new(), (0, 0));
        for _ in 0..4000 {
            let flights = w.d.end.ops.values();
            let now = (flights.len(), flights.map(|f| f.bytes.get()).sum::<u64>());
            most = (most.0.max(now.0), most.1.max(now.1));
            ended.extend(step(&mut w));
        }
        assert_eq!(most, (ops, bytes), "{limits:?}");
        assert_eq!(ended.len(), 3, "{limits:?}");
        assert!(ended.iter().all(|(_, r)| r.is_ok()), "{ended:?}");
        assert!(w.d.queue.in_flight() == Bytes::ZERO && w.d.end.ops.is_empty());
    }
}

/// FR-01: one failed slice fails the share, its siblings are stopped and nothing more is posted; and the share ends, once, when the
/// last of what was posted has.
#[test]
fn fr_01_a_failed_slice_ends_nothing_under_its_siblings() {
    for (failing, doubt) in [(0, false), (3, false), (3, true), (5, false)] {
        let mut script = all(6, &OpFault::HoldCompletion(SECOND / 2));
        script.submit.insert(failing, OpFault::Fail(lost()));
        if doubt {
            script.submit.insert(1, OpFault::InDoubt(lost()));
        }
        // A seventh would be told as another fault.
        script.submit.insert(6, OpFault::Refuse(SubmitError::Refused { reason: "more is posted".into() }));
        let mut w = world(script, admission(1024, 6));
        w.deaf.store(true, Ordering::Relaxed);
        w.pull(Assurance::Fenced);
        assert!(step(&mut w).is_empty());
        assert_eq!(w.d.end.ops.len(), 6);
        let ended = steps(&mut w, 400);
        assert!(ended.is_empty(), "some are in flight: {ended:?}");
        assert_eq!(w.d.end.ops.len(), if doubt { 4 } else { 5 });
        let ended = steps(&mut w, 400);
        let [(1, Err(fault))] = &ended[..] else { panic!("it ends once: {ended:?}") };
        assert_eq!((fault.stage, fault.in_doubt), (Stage::Read, doubt), "{fault}");
        assert!(w.d.end.ops.is_empty() && w.d.pulls.is_empty() && w.d.queue.pick().is_none());
    }
    // Those that can be stopped are.
    let mut script = all(6, &OpFault::Delay(60 * SECOND));
    script.submit.insert(2, OpFault::Fail(lost()));
    let mut w = world(script, admission(1024, 6));
    w.pull(Assurance::Fenced);
    assert!(matches!(&steps(&mut w, 20)[..], [(1, Err(fault))] if fault.stage == Stage::Read));
    assert!(w.d.end.ops.is_empty());
}

/// FR-09: a request that is given up has failed when what was posted has ended, not before; and nothing more is posted for it.
#[test]
fn fr_09_a_timeout_is_not_a_stop() {
    let mut w = world(all(1, &OpFault::HoldCompletion(60 * SECOND)), admission(1024, 1));
    w.deaf.store(true, Ordering::Relaxed);
    let begun = w.now;
    order(&mut w, 1, 100, Some(30 * SECOND));
    assert!(steps(&mut w, 5).is_empty() && flying(&w, 1) == 1);
    // What was begun goes on at its deadline: it is the owner who gives it up.
    w.now = begun + 31 * SECOND;
    assert!(steps(&mut w, 10).is_empty() && flying(&w, 1) == 1);
    w.d.handle(ToRank::Cancel(PullId(1)), w.now);
    assert!(steps(&mut w, 10).is_empty() && flying(&w, 1) == 1, "its blocks may still be written");
    w.now = begun + 59 * SECOND;
    assert!(steps(&mut w, 10).is_empty() && flying(&w, 1) == 1);
    w.now = begun + 61 * SECOND;
    let ended = steps(&mut w, 10);
    assert!(matches!(&ended[..], [(1, Err(f))] if f.stage == Stage::Cancelled && !f.in_doubt), "{ended:?}");
    assert!(w.d.end.ops.is_empty() && w.d.queue.pick().is_none());
}

/// FR-12: an error while any slice is prepared, posted or polled is one failure, and leaves nothing behind.
#[test]
fn fr_12_an_error_at_any_slice_is_one_failure() {
    let refused = SubmitError::Refused { reason: "on demand".into() };
    for k in 0..20 {
        for (fault, stage) in [(OpFault::Refuse(refused.clone()), Stage::Submit), (OpFault::Fail(lost()), Stage::Read)]
        {
            let mut w = world(on(k, fault), admission(1024, 4));
            w.pull(Assurance::Full);
            w.run(SECOND);
            assert_eq!(w.fault().stage, stage, "{k}");
            assert!(w.d.end.ops.is_empty() && w.d.queue.pick().is_none());
            assert_eq!(w.d.queue.in_flight(), Bytes::ZERO);
        }
    }
    for (k, ok) in [(0, false), (1, false), (2, true)] {
        let connect = [(k, ConnectError::Itself)].into();
        let mut w = world(Script { connect, ..Script::default() }, admission(1024, 4));
        w.pull(Assurance::Full);
        w.run(SECOND);
        assert!(matches!(&w.ended[..], [r] if r.is_ok() == ok), "{:?}", w.ended);
    }
    // A full queue delays, wherever it comes.
    let full = OpFault::Refuse(SubmitError::QueueFull { limit: 1 });
    let script = Script { submit: (1..40).step_by(2).map(|k| (k, full.clone())).collect(), ..Script::default() };
    let mut w = world(script, admission(1024, 4));
    w.pull(Assurance::Full);
    w.run(SECOND);
    assert!(matches!(&w.ended[..], [Ok(report)] if report.slices == 20), "{:?}", w.ended);
}

/// FR-13: a request that is larger than every limit is read all the same; of twenty, as many as have room proceed and the others
/// wait and end as those do.
#[test]
fn fr_13_no_request_is_too_large_and_none_blocks_the_rank() {
    let b = Bytes::new;
    let tiny = Admission { slice: b(4096), peer_bytes: b(100), bytes: b(60), ..Admission::default() };
    let mut w = world(Script::default(), tiny);
    w.pull(Assurance::Full);
    for _ in 0..5 {
        w.run(SECOND / 10);
        if !w.ended.is_empty() {
            break;
        }
    }
    assert!(matches!(&w.ended[..], [Ok(report)] if report.slices >= 342), "{:?}", w.ended);
    let mut w = world(all(40, &OpFault::HoldCompletion(SECOND / 10)), admission(1 << 20, 8));
    (1..=20).for_each(|pull| order(&mut w, pull, 100, None));
    let mut ended = step(&mut w);
    // Two sources each: eight operations are four requests.
    for round in 1..=5 {
        assert_eq!(w.d.end.ops.len(), 8);
        ended.extend(steps(&mut w, 105));
        assert_eq!(ended.len(), 4 * round);
    }
    assert!(ended.iter().all(|(_, r)| r.is_ok()), "{ended:?}");
    let queued = |n: usize| ended[n].1.as_ref().unwrap().queued;
    assert!(queued(0) < SECOND / 100, "{:?}", queued(0));
    assert!(queued(19) >= SECOND * 4 / 10 && queued(19) <= SECOND / 2, "{:?}", queued(19));
}

/// A request of which nothing was posted in time fails in the queue; the rank asks to be called for it.
#[test]
fn a_request_that_is_late_in_the_queue_fails_there() {
    let mut w = world(all(1, &OpFault::HoldCompletion(10 * SECOND)), admission(1 << 20, 1));
    order(&mut w, 1, 100, Some(SECOND));
    order(&mut w, 2, 100, Some(2 * SECOND));
    order(&mut w, 3, 100, None);
    assert!(steps(&mut w, 5).is_empty());
    assert_eq!(w.d.step(w.now), Some(2 * SECOND));
    w.now = 2 * SECOND - Duration::from_millis(1);
    assert!(step(&mut w).is_empty());
    let ended = step(&mut w);
    let [(2, Err(fault))] = &ended[..] else { panic!("{ended:?}") };
    assert_eq!((fault.stage, fault.in_doubt), (Stage::Submit, false));
    assert!(fault.text.starts_with("waited 2s in the queue"), "{fault}");
    // One that has no time at all is late at once, though there may be room.
    order(&mut w, 4, 100, Some(Duration::ZERO));
    assert!(matches!(&step(&mut w)[..], [(4, Err(f))] if f.stage == Stage::Submit));
    w.now = 11 * SECOND;
    let ended = steps(&mut w, 20);
    assert_eq!(ended.iter().map(|(id, r)| (*id, r.is_ok())).collect::<Vec<_>>(), [(1, true), (3, true)]);
    assert!(w.d.unposted.is_empty());
    // So does one that waits for its lane.
    let mut w = World::new(Script::default());
    w.held.store(true, Ordering::Relaxed);
    order(&mut w, 1, 100, Some(SECOND));
    w.now += SECOND;
    assert!(matches!(&step(&mut w)[..], [(1, Err(f))] if f.stage == Stage::Submit));
    assert!(w.d.unposted.is_empty() && w.d.pulls.is_empty());
}

/// The more urgent goes first, and one that comes later has its turn among equals after a few slices.
#[test]
fn priorities_and_turns_are_kept() {
    let mut w = world(Script::default(), admission(512, 1));
    order(&mut w, 1, 1, Some(SECOND));
    order(&mut w, 2, 200, None);
    let mut begun = false;
    let first = loop {
        if let Some((id, result)) = step(&mut w).pop() {
            assert!(result.is_ok());
            break id;
        }
        begun |= flying(&w, 2) > 0;
        assert!(!begun || flying(&w, 1) == 0, "only what was posted before it came goes before it");
    };
    assert_eq!((first, begun), (2, true));
    assert!(matches!(&steps(&mut w, 200)[..], [(1, Ok(report))] if report.slices == 40));
    let mut w = world(Script::default(), admission(512, 1));
    order(&mut w, 1, 100, Some(SECOND));
    steps(&mut w, 5);
    order(&mut w, 2, 100, Some(60 * SECOND));
    let before = w.d.pulls.len();
    let mut others = 0;
    while flying(&w, 2) == 0 {
        others += flying(&w, 1);
        assert!(step(&mut w).is_empty());
    }
    assert!(before == 2 && others <= 12, "{others} steps");
}

/// A lane that breaks under a request that is posted in part fails it, and nothing of the rest is posted.
#[test]
fn a_lane_that_breaks_drops_what_is_not_posted() {
    let mut w = world(all(4, &OpFault::HoldCompletion(60 * SECOND)), admission(1024, 4));
    w.pull(Assurance::Fenced);
    assert!(steps(&mut w, 10).is_empty());
    drop(w.p.pop());
    let ended = steps(&mut w, 50);
    let [(1, Err(fault))] = &ended[..] else { panic!("{ended:?}") };
    assert!(matches!(fault.stage, Stage::Connect | Stage::Read) && fault.text.starts_with("source rank 1"), "{fault}");
    assert!(w.d.end.ops.is_empty() && w.d.queue.pick().is_none());
}

/// An engine that doesn't answer keeps none of the rank's room from others.
#[test]
fn an_engine_that_is_not_there_holds_nobody_up() {
    let mut w = world(Script::default(), admission(1024, 1));
    order(&mut w, 1, 100, None);
    assert!(matches!(&steps(&mut w, 200)[..], [(1, Ok(_))]));
    w.held.store(true, Ordering::Relaxed);
    let (gone, contacts): (Vec<_>, Vec<_>) =
        (0..2).map(|rank| session("gone", rank, 2, Box::new(w.network.endpoint().unwrap()))).unzip();
    let there = super::lanes::introduce(&mut w, "gone", contacts);
    order(&mut w, 2, 200, None);
    assert!(steps(&mut w, 10).is_empty() && flying(&w, 2) == 0);
    w.pairing.peer = there;
    order(&mut w, 3, 100, None);
    assert!(matches!(&steps(&mut w, 200)[..], [(3, Ok(_))]));
    drop(gone);
    w.held.store(false, Ordering::Relaxed);
    let ended = steps(&mut w, 200);
    assert!(matches!(&ended[..], [(2, Err(f))] if f.stage == Stage::Connect), "{ended:?}");
}

/// Other ranks of the engine were restarted: it is another engine to its owner, and this rank reads on.
#[test]
fn a_second_welcome_replaces_the_engine() {
    let mut w = World::new(Script::default());
    w.pull(Assurance::Full);
    w.run(SECOND);
    let Standing::Member(old) = w.d.standing() else { panic!("it is a member") };
    let contact = RankContact { epoch: Epoch::new(9), blob: Arc::from([1]) };
    let cache = (**old.cache()).clone();
    let new = EngineManifest::new(EngineId::new("d").unwrap(), Epoch::new(2), cache, vec![contact]).unwrap();
    w.d.handle(ToRank::Welcome(Arc::new(new.clone())), w.now);
    assert!(matches!(w.d.standing(), Standing::Member(engine) if engine.digest() == new.digest()));
    order(&mut w, 2, 100, None);
    w.run(SECOND);
    assert!(matches!(&w.ended[..], [Ok(_), Ok(_)]), "{:?}", w.ended);
    // Of another layout: what was computed for the old one is computed anew, and says that the order doesn't fit.
    let contacts = (0..2).map(|_| RankContact { epoch: Epoch::new(9), blob: Arc::from([1]) }).collect();
    let other =
        EngineManifest::new(EngineId::new("d").unwrap(), Epoch::new(3), (*manifest(2)).clone(), contacts).unwrap();
    w.d.handle(ToRank::Welcome(Arc::new(other)), w.now);
    order(&mut w, 3, 100, None);
    w.run(SECOND / 10);
    assert!(matches!(&w.ended[2], Err(fault) if fault.stage == Stage::Plan), "{:?}", w.ended[2]);
}

/// The slices of the batches that backends are tried with are those batches.
#[test]
fn slices_of_any_sample_are_the_sample() {
    let flat = |batches: &[Arc<BoundedBatch>]| {
        let mut bytes = Vec::new();
        for batch in batches {
            let (mut cursor, mut out) = (batch.batch().cursor(), [Descriptor::default(); 32]);
            loop {
                let n = cursor.fill(&mut out);
                if n == 0 {
                    break;
                }
                for d in &out[..n] {
                    let at = |i: u64| (d.src_region, d.src_offset + i, d.dst_region, d.dst_offset + i);
                    bytes.extend((0..d.len).map(at));
                }
            }
        }
        bytes
    };
    let mut rng = Rng::new(11);
    for _ in 0..60 {
        let s = sample(&mut rng, 3000);
        let bytes = s.batch.bytes().get();
        for max in [1, 17, 200, bytes / 2, bytes] {
            let slices: Vec<_> = s.batch.slices(Bytes::new(max)).collect();
            assert!(slices.iter().all(|x| x.bytes().get() <= max.max(1)));
            assert!(flat(&slices) == flat(std::slice::from_ref(&s.batch)), "{max}");
        }
    }
}
