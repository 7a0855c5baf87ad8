//! Further attempts: from another replica, only when everything of the one before has stopped, and never twice the same.

use kvferry_proto::names::Attempt;
use kvferry_proto::peer::{Heartbeat, LeaseClosed, Left, ReadsEnd, Release};

use super::pair::{Pair, losing, nothing, sources_of};
use super::*;

fn attempt(fence: &Fence, n: u32) -> Fence {
    Fence { attempt: Attempt::new(n), ..fence.clone() }
}

/// A replicated world whose one request is being read, by its first attempt.
fn reading(attempts: u32) -> (Pair, Fence, PullId) {
    let mut w = Pair::replicated();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull_as(PullWish { policy: tries(attempts), deadline: 100 * SECOND, ..wish(&fence) });
    w.carry(nothing);
    assert_eq!(w.phase(pull), Some(Phase::Read));
    (w, fence, pull)
}

fn broken() -> Result<(), RankFault> {
    Err(fault(Stage::Connect, false))
}

fn binds(w: &Pair) -> usize {
    w.count('d', "Bind")
}

#[test]
fn another_replica_is_read_by_the_next_attempt() {
    let (mut w, fence, pull) = reading(2);
    let first = sources_of(&mut w.d, pull, 0);
    w.say(pull, 0, broken());
    w.carry(nothing);
    let second = sources_of(&mut w.d, pull, 0);
    assert!(first.len() == 1 && second.len() == 1 && first != second, "{first:?}, {second:?}");
    let snapshot = w.p.session.snapshot(w.now);
    assert_eq!((binds(&w), &snapshot.leases[0].fence), (2, &attempt(&fence, 1)));
    assert_eq!((w.end_of(pull), w.p.closed.len()), ("-".into(), 0), "the lease was never given up");
    w.read(pull);
    w.carry(nothing);
    let delivered = w.result_of(pull).unwrap().as_ref().unwrap();
    assert_eq!((delivered.report().attempts, &delivered.report().fence), (2, &attempt(&fence, 1)));
    assert_eq!(delivered.report().pairs.iter().map(|p| p.src.get()).collect::<Vec<_>>(), second);
    assert_eq!(w.p.closed, [(attempt(&fence, 1), Closing::Read)]);
    assert!(w.d.session.pulls.is_clean() && w.p.session.loans.is_empty() && w.d.session.loans.is_empty());
    let phases: Vec<Phase> = w.d.phases.iter().map(|(_, phase)| *phase).collect();
    use Phase::{Bind, Link, Read, Release};
    assert_eq!(phases, [Link, Bind, Read, Link, Bind, Read, Release]);
}

/// The next attempt begins when the last rank of the one before has stopped, and not before.
#[test]
fn all_ranks_stop_before_the_next_attempt() {
    let mut w = Pair::of(Side::replicas("p", 1, 2), Side::new("d", 2, 2));
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    assert_eq!(w.d.pulls().len(), 2);
    w.say(pull, 0, broken());
    w.carry(nothing);
    assert_eq!((binds(&w), w.phase(pull)), (1, Some(Phase::Stop)), "rank 1 may still read");
    w.d.orders.clear();
    w.say(pull, 1, Err(fault(Stage::Cancelled, false)));
    w.carry(nothing);
    assert_eq!((binds(&w), w.phase(pull), w.d.pulls().len()), (2, Some(Phase::Read), 2));
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
}

/// A rank of ours was lost and joined again meanwhile: the engine that asked is no more, and there is no further attempt, in which
/// what is known of that rank's former life would count for its new one.
#[test]
fn an_engine_made_anew_makes_no_further_attempt() {
    let mut w = Pair::of(Side::replicas("p", 1, 2), Side::new("d", 2, 2));
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    w.say(pull, 0, broken());
    w.d.lose(0, w.now);
    w.carry(nothing);
    w.d.rejoin(0, w.now);
    w.carry(nothing);
    assert_eq!(w.phase(pull), Some(Phase::Stop), "rank 1 may still read");
    w.say(pull, 1, Err(fault(Stage::Cancelled, false)));
    w.carry(nothing);
    assert_eq!((binds(&w), w.end_of(pull) != "-", w.failed(pull).report.attempts), (1, true, 1));
    assert!(w.d.session.loans.is_empty() && w.p.session.loans.is_empty());
}

/// For each way in which a first attempt fails: whether there is another.
#[test]
fn only_sources_that_failed_are_worth_another_attempt() {
    let bad = || RankFault {
        bad: vec![kvferry_proto::rank::BadBlock {
            src: RankId::new(0),
            item: kvferry_geometry::units::Name::new("layer.0"),
            block: kvferry_geometry::units::BlockId::new(7),
        }],
        ..fault(Stage::Read, false)
    };
    for (what, again) in [
        (fault(Stage::Connect, false), true),
        (fault(Stage::Submit, false), true),
        (fault(Stage::Read, false), true),
        (fault(Stage::Plan, false), false),
        (fault(Stage::Compare, false), false),
        (fault(Stage::Read, true), false),
        (bad(), false),
    ] {
        let (mut w, fence, pull) = reading(2);
        w.say(pull, 0, Err(what.clone()));
        w.carry(nothing);
        if again {
            assert_eq!((w.phase(pull), binds(&w)), (Some(Phase::Read), 2), "{what}");
            continue;
        }
        assert_eq!((w.end_of(pull).as_str(), binds(&w)), ("Ranks", 1), "{what}");
        assert_eq!(w.failed(pull).report.attempts, 1);
        assert_eq!(w.p.closed, [(fence, Closing::Abandoned)], "{what}");
        assert_eq!(w.d.session.quarantined() > 0, what.in_doubt);
    }
}

/// The same sources again are not another attempt.
#[test]
fn without_replicas_there_is_one_attempt() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    w.say(pull, 0, broken());
    w.stop(pull);
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.failed(pull).report.attempts, binds(&w)), ("Ranks", 1, 1));
}

#[test]
fn attempts_are_limited_and_each_ends_the_one_before() {
    for attempts in 0..4 {
        let (mut w, fence, pull) = reading(attempts);
        let mut made = 0;
        while w.end_of(pull) == "-" {
            made += 1;
            w.say(pull, 0, broken());
            w.carry(nothing);
        }
        assert_eq!((made, w.failed(pull).report.attempts), (attempts.max(1), attempts.max(1)));
        assert_eq!(w.failed(pull).cause.kind(), "transfer");
        assert_eq!(w.p.closed, [(attempt(&fence, made - 1), Closing::Abandoned)]);
        assert!(w.d.session.pulls.is_clean() && w.p.session.loans.is_empty());
    }
    // A request whose time is up while it stops, or that is given up, makes none.
    let mut w = Pair::of(Side::replicas("p", 1, 2), Side::new("d", 2, 2));
    for (lease, why) in [(1, "late"), (2, "cancelled"), (3, "rank lost")] {
        let fence = w.offer(lease, Ttl::Never);
        let groups = other_dst_groups(u32::try_from(lease).unwrap());
        let pull = w.pull_as(PullWish { groups, deadline: SECOND, ..wish(&fence) });
        w.carry(nothing);
        w.say(pull, 0, broken());
        match why {
            "late" => w.pass(SECOND, nothing),
            "cancelled" => w.d.session.cancel(pull, w.now),
            _ => w.d.lose(0, w.now),
        }
        let before = binds(&w);
        w.say(pull, 1, Err(fault(Stage::Cancelled, false)));
        w.carry(nothing);
        assert_eq!((binds(&w), w.failed(pull).report.attempts), (before, 1), "{why}");
        let expected = if why == "cancelled" { "Cancelled" } else { "Ranks" };
        assert_eq!(w.end_of(pull), expected, "{why}");
    }
}

/// The producer still holds the attempt before when it refuses the next one: it is told that nobody reads that either.
#[test]
fn a_refused_attempt_gives_the_one_before_back() {
    let (mut w, fence, pull) = reading(2);
    w.say(pull, 0, broken());
    w.carry(losing(&["Bind"]));
    let (_, theirs) = w.links[0];
    let refusal = BindAnswer::Refused { fence: attempt(&fence, 1), reason: BindRefusal::Busy("today".into()) };
    w.tell_d(theirs, PeerMessage::BindAnswer(refusal));
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.failed(pull).report.attempts), ("Refused", 2));
    assert_eq!(w.p.closed, [(fence, Closing::Abandoned)]);
}

/// Whatever is given up while the next attempt is asked for: the lease is free, whichever attempt the producer holds.
#[test]
fn giving_up_between_attempts_frees_the_lease() {
    for heard in [true, false] {
        for how in ["cancel", "shut down", "link lost"] {
            let (mut w, fence, pull) = reading(2);
            w.say(pull, 0, broken());
            w.carry(if heard { losing(&["BindAnswer"]) } else { losing(&["Bind"]) });
            assert_eq!(w.phase(pull), Some(Phase::Bind));
            let now = w.now;
            match how {
                "cancel" => w.d.session.cancel(pull, now),
                "shut down" => w.d.session.shut_down(now),
                _ => w.cut(),
            }
            w.carry(nothing);
            assert_ne!(w.end_of(pull), "-", "{how}");
            let lost = if how == "link lost" { Closing::ConsumerLost } else { Closing::Abandoned };
            assert_eq!(w.p.closed, [(attempt(&fence, heard.into()), lost)], "{how}, heard: {heard}");
            assert!(w.d.session.pulls.is_clean() && w.p.session.leases.is_clean());
        }
    }
}

/// Nothing that names an attempt before counts any more, at either side.
#[test]
fn messages_of_an_old_attempt_are_ignored() {
    let (mut w, fence, pull) = reading(2);
    w.say(pull, 0, broken());
    w.carry(nothing);
    let ((ours, theirs), old) = (w.links[0], fence.clone());
    // At the producer.
    for reads in [ReadsEnd::Complete, ReadsEnd::Abandoned] {
        w.tell_p(ours, PeerMessage::Release(Release { fence: old.clone(), reads }));
    }
    w.tell_p(ours, PeerMessage::Heartbeat(Heartbeat { beat: 99, leases: vec![(old.lease, old.attempt)] }));
    w.p.take();
    let said: Vec<PeerMessage> = w.p.to_peer.drain(..).map(|(_, m)| m).collect();
    let [PeerMessage::ReleaseAnswer(a), PeerMessage::ReleaseAnswer(b), PeerMessage::HeartbeatAnswer(c)] = &said[..]
    else {
        panic!("{said:?}")
    };
    assert!(a.verdict == Verdict::Stale && b.verdict == Verdict::Stale && c.left == [Left::Closed]);
    assert_eq!((w.p.closed.len(), w.p.rejected), (0, 1));
    // At the consumer, while it reads, and while it waits for the verdict.
    let grant = kvferry_proto::peer::Grant { fence: old.clone(), groups: Vec::new(), time_left: Some(Duration::ZERO) };
    let refused = BindAnswer::Refused { fence: old.clone(), reason: BindRefusal::UnknownLease };
    for releasing in [false, true] {
        if releasing {
            w.read(pull);
            w.carry(losing(&["Release"]));
            assert_eq!(w.phase(pull), Some(Phase::Release));
        }
        for m in [
            PeerMessage::BindAnswer(BindAnswer::Bound(grant.clone())),
            PeerMessage::BindAnswer(refused.clone()),
            PeerMessage::Closed(LeaseClosed { fence: old.clone(), how: Closing::Expired }),
            PeerMessage::ReleaseAnswer(ReleaseAnswer { fence: old.clone(), verdict: Verdict::Held }),
            PeerMessage::ReleaseAnswer(ReleaseAnswer { fence: old.clone(), verdict: Verdict::Stale }),
        ] {
            w.tell_d(theirs, m);
            w.d.take();
            assert_eq!(w.end_of(pull), "-");
        }
    }
    w.resume();
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
}
