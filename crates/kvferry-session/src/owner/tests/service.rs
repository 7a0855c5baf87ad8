//! Draining, limits, and what is told of all this: snapshots, phases, effects.

use super::pair::{Pair, losing, nothing};
use super::*;

/// What has begun goes on to its end; nothing more is begun.
#[test]
fn draining_ends_what_has_begun() {
    let mut w = Pair::leased();
    let (first, second) = (w.offer(1, Ttl::Usual), w.offer(2, Ttl::Usual));
    let pull = w.pull(&first);
    w.carry(nothing);
    w.p.session.drain();
    w.d.session.drain();
    assert!(!w.p.session.is_drained() && !w.d.session.is_drained());
    assert_eq!(w.p.session.snapshot(w.now).state, "draining");
    assert_eq!(w.p.session.offer(LeaseId::new(3), offer(), Ttl::Usual, w.now), Err(OfferError::Draining));
    let late = w.pull(&second);
    w.carry(nothing);
    assert_eq!(w.failed(late).cause, FailureCause::Draining);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    assert!(w.d.session.is_drained() && !w.p.session.is_drained(), "an offer is still open");
    // Which others may read, or let expire.
    w.pass(30 * SECOND, nothing);
    assert!(w.p.session.is_drained());
    assert_eq!(w.p.closed.last(), Some(&(second, Closing::Expired)));
}

#[test]
fn what_is_beyond_a_limit_is_refused_by_name() {
    let mut w = Pair::leased();
    w.d.session.config.limits.pulls = 2;
    w.p.session.config.limits.leases = 4;
    w.p.session.config.limits.bound = 1;
    let fences: Vec<Fence> = (1..=4).map(|lease| w.offer(lease, Ttl::Usual)).collect();
    let refused = w.p.session.offer(LeaseId::new(5), offer(), Ttl::Usual, w.now);
    assert_eq!(refused, Err(OfferError::TooManyLeases { limit: 4 }));
    let pulls: Vec<PullId> = fences.iter().take(3).map(|fence| w.pull(fence)).collect();
    w.carry(nothing);
    assert_eq!(w.failed(pulls[2]).cause, FailureCause::TooManyPulls { limit: 2 });
    assert_eq!(w.failed(pulls[2]).cause.kind(), "limit");
    let FailureCause::Refused(BindRefusal::Busy(why)) = &w.failed(pulls[1]).cause else { panic!("{:?}", w.d.ended) };
    assert!(why.contains("1 leases"), "{why}");
    w.read(pulls[0]);
    w.carry(nothing);
    assert_eq!(w.end_of(pulls[0]), "Delivered", "nothing that runs is harmed");
    // There is room again, for each of them.
    let pull = w.pull(&fences[1]);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    w.offer(6, Ttl::Usual);
}

/// Manifests of engines without a link are remembered up to a number.
#[test]
fn manifests_are_remembered_up_to_a_limit() {
    let mut p = Side::with(OwnerConfig { limits: Limits { manifests: 2, ..Limits::default() }, ..config("p", 1, 4) });
    let mut met = Vec::new();
    for id in ["a", "b", "c"] {
        let mut w = Pair::of(p, Side::new(id, 2, 2));
        w.p.session.leases = Leases::default();
        w.p.session.loans = Loans::default();
        let pull = w.one_request(1);
        assert_eq!(w.end_of(pull), "Delivered");
        w.cut();
        met.push(w.d.session.manifest().unwrap().digest());
        p = w.p;
    }
    assert_eq!(met.iter().map(|d| p.session.links.remembers(*d)).collect::<Vec<_>>(), [false, true, true]);
}

/// The snapshot of a request in each state: what it waits for, since when, for how much longer.
#[test]
fn snapshots_by_state() {
    let table = [
        ("Linking", "link", "waiting for the link to the producer's owner", 0, 0),
        ("Asking", "bind", "waiting for the producer to bind the lease", 0, 1),
        ("Reading", "read", "waiting for ranks to read", 2, 1),
        ("Stopping", "stop", "waiting for ranks to stop", 2, 1),
        ("Releasing", "release", "waiting for the producer's verdict", 0, 0),
    ];
    for (state, phase, waiting_for, ranks, bound) in table {
        let w = reach(state);
        let snapshot = w.d.session.snapshot(w.now + 3 * SECOND);
        let [pull] = &snapshot.pulls[..] else { panic!("one request") };
        assert_eq!((pull.phase, pull.waiting_for, pull.ranks.len()), (phase, waiting_for, ranks), "{state}");
        assert_eq!((pull.pull, &pull.fence, &pull.address[..]), (w.pull, &w.fence, "tcp:127.0.0.1:1"));
        assert_eq!((pull.since, pull.age, pull.left), (3 * SECOND, 3 * SECOND, DEADLINE - 3 * SECOND));
        assert_eq!((pull.lease_left, pull.trouble.clone()), (None, None));
        assert_eq!((snapshot.state, snapshot.missing.len(), snapshot.engine.as_str()), ("ready", 0, "d"));
        let [link] = &snapshot.links[..] else { panic!("one link") };
        let up = state != "Linking";
        assert_eq!((link.state, link.version), if up { ("up", Some(3)) } else { ("connecting", None) });
        assert_eq!((link.peer.as_ref().map(EngineId::as_str), link.pulls), (up.then_some("p"), usize::from(up)));
        assert_eq!((link.address.as_deref(), link.bound), (Some("tcp:127.0.0.1:1"), 0));
        let producer = w.p.session.snapshot(w.now + 3 * SECOND);
        assert_eq!(producer.links.iter().map(|l| l.bound).sum::<usize>(), bound, "{state}");
        if let [lease] = &producer.leases[..] {
            assert_eq!((lease.consumer.is_some(), lease.since, lease.left), (bound == 1, 3 * SECOND, None), "{state}");
            assert!(lease.waiting_for.starts_with("waiting for"));
        } else {
            assert_eq!((state, producer.leases.len()), ("Releasing", 0), "its read is over");
        }
    }
    // Trouble with the link, leases with an end, blocks in quarantine.
    let mut w = Pair::leased();
    w.answers = false;
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    let link = w.d.connects.remove(0);
    w.d.session.link_closed(link, "no route to host", w.now);
    let snapshot = w.d.session.snapshot(w.now);
    assert_eq!((snapshot.pulls[0].trouble.as_deref(), snapshot.links.len()), (Some("no route to host"), 0));
    w.answers = true;
    w.pass(SECOND, losing(&["BindAnswer"]));
    let snapshot = w.d.session.snapshot(w.now);
    assert_eq!((snapshot.pulls[0].phase, snapshot.pulls[0].trouble.clone()), ("bind", None));
    w.resume();
    w.carry(nothing);
    assert_eq!(w.d.session.snapshot(w.now).pulls[0].lease_left, Some(29 * SECOND));
    w.d.session.cancel(pull, w.now);
    w.say(pull, 1, Err(fault(Stage::Cancelled, false)));
    w.pass(2 * SECOND, nothing);
    let snapshot = w.d.session.snapshot(w.now);
    let [doubt] = &snapshot.quarantine[..] else { panic!("one request is in quarantine") };
    assert_eq!((doubt.pull, doubt.blocks, &doubt.ranks[..]), (pull, 3, &[RankId::new(0)][..]));
    assert!(snapshot.pulls.is_empty());
    // Links on the way up.
    let mut assembling = OwnerSession::new(config("p", 1, 4)).unwrap();
    let theirs = assembling.accept(None, SECOND);
    let snapshot = assembling.snapshot(2 * SECOND);
    assert_eq!((snapshot.state, snapshot.missing.len()), ("joining", 4));
    assert_eq!((snapshot.links[0].link, snapshot.links[0].since), (theirs.0, SECOND));
    assert_eq!(snapshot.links[0].state, "waiting for the peer's hello");
    let hello =
        kvferry_proto::handshake::Greeting::start(w.d.session.life.local().unwrap().clone(), Default::default());
    assembling.peer_message(theirs, PeerMessage::Hello(hello.1), SECOND);
    assert_eq!(assembling.snapshot(SECOND).links[0].state, "waiting for this engine's ranks");
}

/// The phases of a request are told in order, each once, and their times sum up to the whole, however it ends.
#[test]
fn phases_sum_up_to_the_whole() {
    let ms = Duration::from_millis;
    for end in ["delivered", "failed", "cancelled", "stale", "late"] {
        let mut w = Pair::leased();
        w.skew = (ms(77_000), ms(5));
        w.answers = false;
        let fence = w.offer(1, Ttl::Usual);
        let deadline = if end == "late" { ms(1500) } else { 100 * SECOND };
        let pull = w.pull_as(PullWish { deadline, ..wish(&fence) });
        w.carry(nothing);
        w.answers = true;
        w.pass(ms(10), losing(&["Bind"]));
        w.pass(ms(20), nothing);
        w.resume();
        w.carry(nothing);
        w.pass(ms(40), nothing);
        match end {
            "failed" => w.say(pull, 0, Err(fault(Stage::Plan, false))),
            "cancelled" => w.d.session.cancel(pull, w.d_now()),
            "late" => w.pass(ms(1430), nothing),
            _ => w.read(pull),
        }
        if end == "stale" {
            assert!(w.p.session.withdraw(fence.lease, w.p_now()));
        }
        w.carry(losing(&["Release", "Closed"]));
        w.pass(ms(80), losing(&["Release", "Closed"]));
        w.resume();
        w.carry(nothing);
        w.stop(pull);
        if end == "failed" {
            w.say(pull, 1, Err(fault(Stage::Cancelled, false)));
        }
        w.carry(nothing);
        let report = match w.result_of(pull).unwrap() {
            Ok(delivered) => delivered.report(),
            Err(failed) => &failed.report,
        };
        let spent: Vec<u128> = Phase::ALL.iter().map(|p| report.phases.of(*p).as_millis()).collect();
        let (expected, told): ([u128; 6], &[Phase]) = match end {
            "delivered" | "stale" => ([10, 20, 0, 40, 0, 80], &[Phase::Link, Phase::Bind, Phase::Read, Phase::Release]),
            "late" => ([10, 20, 0, 1470, 80, 0], &[Phase::Link, Phase::Bind, Phase::Read, Phase::Stop]),
            _ => ([10, 20, 0, 40, 80, 0], &[Phase::Link, Phase::Bind, Phase::Read, Phase::Stop]),
        };
        assert_eq!(spent, expected, "{end}: {}", w.end_of(pull));
        assert_eq!(report.took.as_millis(), expected.iter().sum::<u128>());
        assert_eq!(w.d.phases.iter().map(|(_, phase)| *phase).collect::<Vec<_>>(), told, "{end}");
        assert_eq!((w.d.up.len(), w.p.up.len(), w.d.failed.len()), (1, 1, 0), "a link comes up once");
    }
}
