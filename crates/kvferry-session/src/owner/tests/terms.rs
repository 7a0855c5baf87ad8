//! How long leases last: clocks that are never compared, beats, margins, ends on both sides.

use kvferry_proto::peer::{Bind, Heartbeat, HeartbeatAnswer, LeaseClosed, Left, ReadsEnd, Release};

use super::pair::{Pair, losing, nothing};
use super::*;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// What the consumer and the producer think is left of the one lease.
fn left(w: &Pair) -> (Option<Duration>, Option<Duration>) {
    let d = w.d.session.snapshot(w.d_now()).pulls.first().and_then(|p| p.lease_left);
    (d, w.p.session.snapshot(w.p_now()).leases.first().and_then(|l| l.left))
}

/// LS-02: the two clocks have nothing to do with each other, and a delay only makes the consumer more careful.
#[test]
fn ls_02_no_clock_crosses_the_wire() {
    for skew in [(0, 0), (1000, 50), (50, 5000)].map(|(d, p)| (secs(d), secs(p))) {
        let mut w = Pair::leased();
        w.skew = skew;
        let fence = w.offer(1, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(nothing);
        assert_eq!(left(&w), (Some(secs(30)), Some(secs(30))), "{skew:?}");
        w.read(pull);
        w.carry(nothing);
        // The bind takes 2 s, its answer 3 s: the consumer counts from when it asked.
        let fence = w.offer(2, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(losing(&["Bind"]));
        w.now += secs(2);
        w.resume();
        w.carry(losing(&["BindAnswer"]));
        w.now += secs(3);
        w.resume();
        w.carry(nothing);
        assert_eq!(left(&w), (Some(secs(23)), Some(secs(25))), "{skew:?}");
        // The same of a beat.
        w.pass(secs(5), losing(&["Heartbeat"]));
        w.now += secs(7);
        w.resume();
        w.carry(losing(&["HeartbeatAnswer"]));
        w.now += secs(1);
        w.resume();
        assert_eq!(left(&w), (Some(secs(12)), Some(secs(19))), "{skew:?}");
        w.read(pull);
        w.carry(nothing);
        assert_eq!(w.end_of(pull), "Delivered");
    }
}

/// LS-03: what has no more than the margin left is not read, and is given back at once.
#[test]
fn ls_03_a_lease_near_its_end_is_declined() {
    let soon = millis(1001);
    for (ttl, reads) in [(Ttl::For(soon), true), (Ttl::For(secs(1)), false), (Ttl::For(millis(1)), false)] {
        let mut w = Pair::leased();
        let fence = w.offer(1, ttl);
        let pull = w.pull(&fence);
        w.carry(nothing);
        if reads {
            assert_eq!(w.phase(pull), Some(Phase::Read));
            continue;
        }
        let FailureCause::LeaseExpired { left, margin } = &w.failed(pull).cause else { panic!("{ttl:?}") };
        assert!(left <= margin && *margin == secs(1));
        assert_eq!(w.failed(pull).cause.kind(), "lease expired");
        assert!(w.d.pulls().is_empty(), "no rank has heard of it");
        assert_eq!(w.p.closed, [(fence, Closing::Abandoned)]);
    }
    // A bind that was long on its way tells of the time it took.
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(losing(&["BindAnswer"]));
    w.now += millis(29_000);
    w.resume();
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.p.closed.len()), ("LeaseExpired", 1));
    // No end is no end.
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Never);
    let pull = w.pull(&fence);
    w.carry(nothing);
    assert_eq!(left(&w), (None, None));
    for _ in 0..20 {
        w.pass(secs(40), nothing);
    }
    assert_eq!((w.phase(pull), w.count('d', "Heartbeat")), (Some(Phase::Read), 0));
}

/// LS-04: a lease of 30 s, beats every 5 s that extend to 20 s: ends at 30, 30, 35, 40; all later ones lost: over at 40.
#[test]
fn ls_04_beats_extend_and_their_loss_ends_the_lease() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    for (beats, end) in (1..).zip([30, 30, 35, 40]) {
        w.pass(secs(5), nothing);
        assert_eq!((w.count('d', "Heartbeat"), w.count('p', "HeartbeatAnswer")), (beats, beats));
        let expected = Some(secs(end) - w.now);
        assert_eq!(left(&w), (expected, expected));
    }
    while w.now < millis(39_900) {
        w.pass(millis(100), losing(&["Heartbeat"]));
        assert_eq!((w.p.closed.len(), w.phase(pull)), (0, Some(Phase::Read)), "{:?}", w.now);
    }
    w.pass(millis(100), losing(&["Heartbeat"]));
    assert_eq!(w.p.closed, [(fence, Closing::Expired)]);
    assert_eq!(w.phase(pull), Some(Phase::Stop), "the consumer knows by itself");
    assert_eq!(w.end_of(pull), "-", "its ranks have not stopped");
    w.stop(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "LeaseExpired");
    assert!(w.d.session.quarantined() == 0 && w.p.session.loans.is_empty());
}

/// LS-04: one beat for all leases of a peer; a lease that is closed isn't beaten for; beats stop when nothing is read.
#[test]
fn ls_04_beats_are_batched_and_stop() {
    let mut w = Pair::leased();
    let pulls: Vec<PullId> = (1..=3)
        .map(|lease| {
            let fence = w.offer(lease, Ttl::Usual);
            w.pull(&fence)
        })
        .collect();
    w.carry(nothing);
    w.pass(secs(5), losing(&["Heartbeat"]));
    let [(true, _, PeerMessage::Heartbeat(beat))] = &w.kept[..] else { panic!("one beat: {:?}", w.kept) };
    assert_eq!(beat.leases.len(), 3);
    w.resume();
    w.carry(nothing);
    w.read(pulls[0]);
    w.carry(nothing);
    w.pass(secs(5), losing(&["Heartbeat"]));
    let [(true, _, PeerMessage::Heartbeat(beat))] = &w.kept[..] else { panic!("one beat: {:?}", w.kept) };
    assert_eq!(beat.leases.iter().map(|(lease, _)| lease.get()).collect::<Vec<_>>(), [2, 3]);
    w.resume();
    w.read(pulls[1]);
    w.d.session.cancel(pulls[2], w.now);
    w.stop(pulls[2]);
    w.carry(nothing);
    assert_eq!(w.p.closed.len(), 3);
    let before = w.count('d', "Heartbeat");
    for _ in 0..10 {
        w.pass(secs(5), nothing);
    }
    assert_eq!(w.count('d', "Heartbeat"), before);
    assert!(w.d.session.beats.is_empty(), "the peer is dropped from the list");
    // A late answer of then is not taken for one of the next series.
    let fence = w.offer(4, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    w.pass(secs(5), losing(&["Heartbeat"]));
    let link = w.links[0].1;
    for beat in 0..=2 {
        let answer = HeartbeatAnswer { beat, left: vec![Left::Closed] };
        w.tell_d(link, PeerMessage::HeartbeatAnswer(answer));
    }
    assert_eq!(w.phase(pull), Some(Phase::Read));
}

/// LS-04: a beat for what is unknown, another's, or of another attempt is answered *Closed* and changes nothing.
#[test]
fn ls_04_a_beat_for_an_unknown_lease_is_ignored() {
    let mut w = Pair::leased();
    let (bound, offered) = (w.offer(1, Ttl::Usual), w.offer(2, Ttl::Usual));
    w.pull(&bound);
    w.carry(nothing);
    w.now += secs(15);
    let before = w.p.session.snapshot(w.now);
    let ours = w.links[0].0;
    let (first, second) = (kvferry_proto::names::Attempt::FIRST, kvferry_proto::names::Attempt::new(1));
    let leases = vec![(LeaseId::new(99), first), (offered.lease, first), (bound.lease, second)];
    w.tell_p(ours, PeerMessage::Heartbeat(Heartbeat { beat: 7, leases }));
    w.p.take();
    let Some((_, PeerMessage::HeartbeatAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
    assert_eq!(answer, HeartbeatAnswer { beat: 7, left: vec![Left::Closed; 3] });
    assert_eq!(w.p.session.snapshot(w.now), before);
    let beat = Heartbeat { beat: 8, leases: vec![(bound.lease, first)] };
    w.tell_p(ours, PeerMessage::Heartbeat(beat));
    assert_eq!(left(&w).1, Some(secs(20)), "and one that is right extends");
}

/// A lease that is shorter than the usual time between beats is beaten for in time, too.
#[test]
fn short_leases_are_beaten_for_in_time() {
    let mut w = Pair::leased();
    w.p.session.config.lease.extension = secs(2);
    let fence = w.offer(1, Ttl::For(secs(2)));
    let pull = w.pull(&fence);
    w.carry(nothing);
    for _ in 0..200 {
        w.pass(millis(100), nothing);
    }
    assert_eq!(w.phase(pull), Some(Phase::Read), "{:?}", w.p.closed);
    assert!(w.count('d', "Heartbeat") < 60, "and not more often than that: {}", w.count('d', "Heartbeat"));
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
}

/// Beats without pause, links without patience: time passes all the same.
#[test]
fn times_of_nothing_do_not_stop_the_clock() {
    let mut w = Pair::leased();
    w.d.session.config.lease.beat = Duration::ZERO;
    (w.d.session.config.idle, w.p.session.config.idle) = (Some(Duration::ZERO), Some(Duration::ZERO));
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    for _ in 0..50 {
        w.pass(millis(1), nothing);
    }
    assert_eq!(w.phase(pull), Some(Phase::Read));
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
}

/// LS-05: a consumer that knows nothing of the end reads after it, and is told *Stale*; the blocks' next owner is unharmed.
#[test]
fn ls_05_a_late_reader_is_told_stale() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    // No beat and no notice comes through, and the consumer's owner is busy for 45 s.
    w.now = secs(31);
    w.p.session.step(w.now);
    w.carry(losing(&["Closed"]));
    assert_eq!(w.p.closed, [(fence.clone(), Closing::Expired)]);
    let next = w.offer(2, Ttl::Usual);
    w.now = secs(45);
    w.read(pull);
    w.carry(losing(&["Closed"]));
    assert_eq!((w.end_of(pull).as_str(), w.p.rejected), ("Stale", 1));
    assert_eq!(w.p.closed.len(), 1, "the lease ends once, and the next one of the same blocks goes on");
    let now = w.p_now();
    assert!(w.p.session.withdraw(next.lease, now));
}

/// LS-05: an expired lease answers *Stale* also before its owner has noticed, and closes once.
#[test]
fn ls_05_a_lease_is_over_when_its_time_is_up() {
    let mut w = Pair::leased();
    let (first, second) = (w.offer(1, Ttl::Usual), w.offer(2, Ttl::Usual));
    let pull = w.pull(&first);
    w.carry(nothing);
    w.now = secs(30);
    w.read(pull);
    let late = w.pull(&second);
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.end_of(late).as_str()), ("Stale", "Refused"));
    assert!(w.p.closed.is_empty());
    w.pass(Duration::ZERO, nothing);
    assert_eq!(w.p.closed, [(first, Closing::Expired), (second, Closing::Expired)]);
    assert!(w.p.session.loans.is_empty());
}

/// For each way in which a producer closes a bound lease: the notice stops the reads, and the request ends when they have.
#[test]
fn notices_by_state() {
    for state in STATES {
        let mut w = reach(state);
        let Some((_, theirs)) = w.link else { continue };
        let open = state != "Releasing";
        assert_eq!(w.p.session.withdraw(w.fence.lease, w.now), open, "{state}");
        w.carry(|m| matches!(m, PeerMessage::Closed(_)));
        let how = if open { Closing::Withdrawn } else { Closing::Read };
        assert_eq!(w.p.closed, [(w.fence.clone(), how)], "{state}");
        let (ours, _) = w.link.unwrap();
        let notice = LeaseClosed { fence: w.fence.clone(), how: Closing::Withdrawn };
        w.d.session.peer_message(ours, PeerMessage::Closed(notice.clone()), w.now);
        w.carry(|_| false);
        let cancelled = w.d.orders.iter().filter(|(_, m)| matches!(m, ToRank::Cancel(_))).count();
        assert_eq!(cancelled, if ["Reading", "Stopping"].contains(&state) { 2 } else { 0 }, "{state}");
        assert_eq!(w.ended(), "-", "{state}: not at once");
        // Twice is as good as once.
        w.d.session.peer_message(ours, PeerMessage::Closed(notice), w.now);
        w.settle();
        let expected = match state {
            "Reading" => "LeaseClosed",
            "Stopping" => "Cancelled",
            _ => "Deadline",
        };
        assert_eq!(w.ended(), expected, "{state}");
        assert!(w.d.session.pulls.is_clean() && w.p.session.loans.is_empty() && w.p.session.leases.is_clean());
        assert_eq!(w.p.closed.len(), 1, "{state}: once");
        w.p.session.link_closed(theirs, "", w.now);
    }
}

/// A notice of another attempt, another lease, or from another link stops nobody.
#[test]
fn notices_of_others_are_ignored() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    let (ours, theirs) = w.links[0];
    let other = Fence { attempt: kvferry_proto::names::Attempt::new(1), ..fence.clone() };
    let unknown = Fence { lease: LeaseId::new(9), ..fence.clone() };
    let elsewhere = Fence { engine: EngineId::new("q").unwrap(), ..fence.clone() };
    for fence in [other, unknown, elsewhere] {
        w.tell_d(theirs, PeerMessage::Closed(LeaseClosed { fence, how: Closing::Expired }));
    }
    w.d.session.peer_message(
        LinkId(ours.0 + 50),
        PeerMessage::Closed(LeaseClosed { fence, how: Closing::Expired }),
        w.now,
    );
    assert_eq!(w.phase(pull), Some(Phase::Read));
}

/// LS-09: of four samples one is read, three are full hits: all four leases end without waiting for their time.
#[test]
fn ls_09_full_hits_release_their_leases() {
    let mut w = Pair::leased();
    let fences: Vec<Fence> = (1..=4).map(|lease| w.offer(lease, Ttl::Usual)).collect();
    let mut pulls = vec![w.pull(&fences[0])];
    for (i, fence) in (50u32..).zip(&fences[1..]) {
        let mut groups = other_dst_groups(i);
        if let [DstGroup::Paged(g)] = &mut groups[..] {
            g.cached = Tokens::new(TOKENS);
        }
        pulls.push(w.pull_as(PullWish { groups, ..wish(fence) }));
    }
    w.carry(nothing);
    w.read(pulls[0]);
    w.carry(nothing);
    assert!(pulls.iter().all(|pull| w.end_of(*pull) == "Delivered"));
    assert_eq!(w.p.closed.iter().filter(|(_, how)| *how == Closing::Read).count(), 4);
    let first = w.result_of(pulls[1]).unwrap().as_ref().unwrap();
    assert!(first.report().pairs.is_empty());
    assert_eq!(w.d.pulls().len(), 2, "the ranks have read for one of them");
}

/// LS-10: nobody will read it: the producer hears so over the link that there is, or one that is made for it, or not at all.
#[test]
fn ls_10_declined_leases_are_free_at_once() {
    let mut w = Pair::leased();
    let address = wish(&w.offer(1, Ttl::Usual)).address;
    let fences: Vec<Fence> = (2..=5).map(|lease| w.offer(lease, Ttl::Usual)).collect();
    // No link: one is made for both.
    for fence in &fences[..2] {
        w.d.session.decline(&address, fence.clone(), w.now);
    }
    w.carry(nothing);
    let declined = |n: usize| fences[..n].iter().map(|f| (f.clone(), Closing::Declined)).collect::<Vec<_>>();
    assert_eq!((w.p.closed.clone(), w.p.up.len()), (declined(2), 1));
    // It is up.
    w.d.session.decline(&address, fences[2].clone(), w.now);
    w.carry(nothing);
    assert_eq!((w.p.closed.clone(), w.p.up.len()), (declined(3), 1));
    // Once more, of an unknown one, of one of another life: nothing.
    for fence in [
        fences[2].clone(),
        Fence { lease: LeaseId::new(77), ..fences[0].clone() },
        Fence { epoch: Epoch::new(77), ..fences[3].clone() },
    ] {
        w.d.session.decline(&address, fence, w.now);
    }
    w.carry(nothing);
    assert_eq!((w.p.closed.clone(), w.p.rejected), (declined(3), 0));
    // Nobody is there: once, and no more is kept of it.
    w.cut();
    (w.answers, w.d.failed) = (false, Vec::new());
    w.d.session.decline(&address, fences[3].clone(), w.now);
    w.carry(nothing);
    let link = w.d.connects.remove(0);
    w.d.session.link_closed(link, "connection refused", w.now);
    w.d.take();
    for _ in 0..100 {
        w.pass(millis(100), nothing);
    }
    assert_eq!((w.d.failed.clone(), w.d.connects.len()), (vec![false], 0));
    assert!(w.d.session.roads.is_empty());
    w.pass(secs(30), nothing);
    assert_eq!(w.p.closed.last(), Some(&(fences[3].clone(), Closing::Expired)), "it ends by itself");
    assert!(w.p.session.loans.is_empty());
}

/// Who only offers can't be made to give a lease up by one who names another attempt, or says that it was read.
#[test]
fn an_offer_is_declined_by_its_own_fence_only() {
    let mut w = Pair::leased();
    w.one_request(1);
    let (ours, _) = w.links[0];
    let fence = w.offer(2, Ttl::Usual);
    let other = Fence { attempt: kvferry_proto::names::Attempt::new(1), ..fence.clone() };
    let own = || fence.clone();
    // What follows a bind that was refused, or was never one, takes the lease from nobody.
    for (fence, reads) in [(other, ReadsEnd::Declined), (own(), ReadsEnd::Abandoned), (own(), ReadsEnd::Complete)] {
        w.tell_p(ours, PeerMessage::Release(Release { fence, reads }));
        w.p.take();
        let Some((_, PeerMessage::ReleaseAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
        assert_eq!((answer.verdict, w.p.closed.len()), (Verdict::Stale, 1));
    }
    assert_eq!(w.p.rejected, 1, "a complete read of what was never bound");
    let pull = w.pull(&fence);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
}

/// It beats for nothing: what it has bound has no end but its own.
#[test]
fn what_a_peer_of_version_2_reads_does_not_expire() {
    let mut w = Pair::leased();
    w.speaks = Some(Versions { min: 2, max: 2 });
    let fence = w.offer(1, Ttl::For(secs(30)));
    w.pass(secs(20), nothing);
    let pull = w.pull_as(PullWish { deadline: secs(500), ..wish(&fence) });
    w.carry(nothing);
    for _ in 0..20 {
        w.pass(secs(10), nothing);
    }
    assert_eq!((w.phase(pull), w.p.closed.len()), (Some(Phase::Read), 0));
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    // Unread, it ends as ever.
    w.offer(2, Ttl::For(secs(30)));
    w.pass(secs(31), nothing);
    assert_eq!(w.p.closed.last().map(|(_, how)| *how), Some(Closing::Expired));
}

/// A neighbour of version 2 is served as before, and is never told what it doesn't know.
#[test]
fn a_peer_of_version_2_hears_nothing_of_version_3() {
    let old = Some(Versions { min: 2, max: 2 });
    let mut w = Pair::leased();
    w.speaks = old;
    let pull = w.one_request(1);
    assert_eq!((w.end_of(pull).as_str(), w.d.versions.clone(), w.p.versions.clone()), ("Delivered", vec![2], vec![2]));
    // A lease that ends while it is read: the consumer learns it from the verdict.
    w.p.session.config.limits.bound = 1;
    let (first, second) = (w.offer(2, Ttl::Usual), w.offer(3, Ttl::Usual));
    let (first, second) = (w.pull(&first), w.pull(&second));
    w.carry(nothing);
    let FailureCause::Refused(BindRefusal::Incompatible(why)) = &w.failed(second).cause else { panic!("busy") };
    assert!(why.contains("limit"), "{why}");
    w.pass(secs(6), nothing);
    assert!(w.p.session.withdraw(LeaseId::new(2), w.now));
    w.carry(nothing);
    assert_eq!(w.phase(first), Some(Phase::Read));
    w.read(first);
    w.carry(nothing);
    assert_eq!(w.end_of(first), "Stale");
    // And another attempt is nothing that it knows.
    let fence = w.offer(4, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    w.say(pull, 0, Err(fault(Stage::Connect, false)));
    w.stop(pull);
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.failed(pull).report.attempts), ("Ranks", 1));
    // Met again, it is greeted by a whole hello.
    w.cut();
    w.one_request(5);
    for new in ["Heartbeat", "HeartbeatAnswer", "Closed", "Again", "ManifestWanted", "Manifest"] {
        assert_eq!((w.count('d', new), w.count('p', new)), (0, 0), "{new}");
    }
    assert_eq!(w.count('d', "Hello"), 2);
}

/// A bind by somebody else's salt or key, and one after the end, leave an offered lease as it was.
#[test]
fn refused_binds_leave_the_lease_offered() {
    let mut w = Pair::leased();
    w.one_request(1);
    let (ours, _) = w.links[0];
    let fence = w.offer(2, Ttl::Usual);
    let map = Digest::from_bytes([3; 32]);
    let salt = kvferry_proto::names::pairing_salt(&EngineId::new("d").unwrap(), fence.lease, fence.attempt);
    for (fence, content_key, salt) in [
        (fence.clone(), key(2), salt),
        (fence.clone(), key(1), salt + 1),
        (fence.clone(), key(1), salt),
        (Fence { epoch: Epoch::new(9), ..fence.clone() }, key(1), salt),
        (Fence { engine: EngineId::new("q").unwrap(), ..fence.clone() }, key(1), salt),
    ] {
        w.tell_p(ours, PeerMessage::Bind(Bind { fence, content_key, salt, peer_map: map }));
        w.p.take();
        let Some((_, PeerMessage::BindAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
        assert!(matches!(answer, BindAnswer::Refused { .. }), "{answer:?}");
        assert!(w.p.session.leases.is_idle());
    }
    let pull = w.pull(&fence);
    w.carry(nothing);
    assert_eq!(w.phase(pull), Some(Phase::Read));
}
