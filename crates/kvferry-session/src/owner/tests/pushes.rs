//! Push at the two owners: who may write when, and what is known of those who do.

use kvferry_geometry::units::{ItemId, TokenRange};
use kvferry_proto::names::Attempt;
use kvferry_proto::push::{PushId, PushOrder, Stop, Stoppage, Stopped, WriteReport, WriterEnd, WriterReport, Written};

use super::pair::{Pair, is_clean, losing, nothing, sources_of};
use super::*;
use crate::owner::StreamError;
use crate::testing::other_src_groups;

mod cases;

fn push(fence: &Fence) -> PullWish {
    PullWish { mode: Mode::Push { progress: true }, deadline: 100 * SECOND, ..wish(fence) }
}

fn attempt(fence: &Fence, n: u32) -> Fence {
    Fence { attempt: Attempt::new(n), ..fence.clone() }
}

impl Side {
    /// The write orders that each rank got last.
    fn pushes(&self) -> BTreeMap<usize, PushOrder> {
        let rank = |link: &RankLinkId| self.rank_links.iter().position(|l| l == link);
        let of = |(link, m): &(RankLinkId, ToRank)| match m {
            ToRank::Push(order) => Some((rank(link)?, (**order).clone())),
            _ => None,
        };
        self.orders.iter().filter_map(of).collect()
    }

    fn told(&self, what: impl Fn(&ToRank) -> bool) -> usize {
        self.orders.iter().filter(|(_, m)| what(m)).count()
    }
}

fn ended() -> WriterEnd {
    Ok(WriterReport { writes: Vec::new(), queued: Duration::ZERO, slices: 1, took: Duration::ZERO })
}

fn lost(in_doubt: bool) -> WriterEnd {
    Err(fault(Stage::Write, in_doubt))
}

/// What a producer's rank says that has written to the one consumer's rank that it writes to, as the tests' reports have it.
fn wrote(w: &mut Pair, pull: PullId, rank: u32) -> WriterEnd {
    let ranks = w.d.rank_links.len();
    let writes = (0..ranks).filter(|dst| sources_of(&mut w.d, pull, *dst).contains(&rank)).map(|dst| WriteReport {
        dst: RankId::new(u32::try_from(dst).unwrap()),
        bytes: report(&[rank]).unwrap().sources[0].bytes,
        descriptors: 1,
        lane: "there".into(),
        took: SECOND,
    });
    let writes: Vec<_> = writes.collect();
    ended().map(|report| WriterReport { writes, ..report })
}

impl Pair {
    fn push(&mut self, fence: &Fence) -> PullId {
        let pull = self.pull_as(push(fence));
        self.carry(nothing);
        pull
    }

    fn pushed(&mut self, rank: usize, result: WriterEnd) {
        let id = self.p.pushes()[&rank].push;
        self.pushed_as(rank, id, result);
    }

    fn pushed_as(&mut self, rank: usize, push: PushId, result: WriterEnd) {
        let now = self.p_now();
        self.p.session.rank_message(self.p.rank_links[rank], FromRank::Pushed { push, result }, now);
    }

    fn all_written(&mut self, pull: PullId) {
        for rank in 0..self.p.rank_links.len() {
            let end = wrote(self, pull, u32::try_from(rank).unwrap());
            self.pushed(rank, end);
        }
    }

    fn announce(&mut self, lease: u128) -> Fence {
        let now = self.p_now();
        self.p.session.announce(LeaseId::new(lease), offer(), Ttl::Usual, now).unwrap()
    }

    fn is_quiet(&self) -> bool {
        let of = |s: &Side| s.session.pulls.is_clean() && s.session.leases.is_clean() && s.session.loans.is_empty();
        of(&self.p) && of(&self.d) && self.p.session.pushes.is_empty()
    }
}

fn world() -> (Pair, Fence, PullId) {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.push(&fence);
    assert_eq!(w.phase(pull), Some(Phase::Write));
    (w, fence, pull)
}

#[test]
fn named_writers_write_then_our_ranks_finish() {
    let (mut w, fence, pull) = world();
    assert_eq!(w.p.pushes().keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(w.d.pulls().len(), 0, "nobody of ours reads");
    for rank in [2, 0, 3] {
        let end = wrote(&mut w, pull, rank);
        w.pushed(usize::try_from(rank).unwrap(), end);
        w.carry(nothing);
        assert_eq!((w.count('p', "Written"), w.phase(pull)), (0, Some(Phase::Write)));
    }
    let end = wrote(&mut w, pull, 1);
    w.pushed(1, end);
    w.carry(nothing);
    assert_eq!((w.count('p', "Written"), w.phase(pull)), (1, Some(Phase::Read)));
    let orders = w.d.pulls();
    assert!(orders.len() == 2 && orders.values().all(|o| o.written));
    w.read(pull);
    w.carry(nothing);
    let delivered = w.result_of(pull).unwrap().as_ref().unwrap();
    assert_eq!(delivered.report().pairs.len(), 4);
    assert!(delivered.report().pairs.iter().all(|p| p.lane == "there" && p.took == SECOND));
    assert_eq!(w.p.closed, [(fence, Closing::Read)]);
    assert!(w.is_quiet());
    use Phase::{Bind, Link, Read, Release, Write};
    assert_eq!(w.d.phases.iter().map(|(_, p)| *p).collect::<Vec<_>>(), [Link, Bind, Write, Read, Release]);
}

/// Other replicas' ranks are not named, hear nothing and are not waited for.
#[test]
fn ranks_with_nothing_to_write_are_not_in_the_set() {
    let mut w = Pair::replicated();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.push(&fence);
    let named = sources_of(&mut w.d, pull, 0);
    assert_eq!(w.p.pushes().keys().map(|r| u32::try_from(*r).unwrap()).collect::<Vec<_>>(), named);
    let other = 1 - usize::try_from(named[0]).unwrap();
    // One that isn't named is not heard.
    let id = w.p.pushes().values().next().unwrap().push;
    w.pushed_as(other, id, ended());
    w.carry(nothing);
    assert_eq!(w.phase(pull), Some(Phase::Write));
    let end = wrote(&mut w, pull, named[0]);
    w.pushed(1 - other, end);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
}

/// A writer whose bytes aren't those of the plan has not written what was asked for, whatever it says.
#[test]
fn a_writer_that_wrote_less_fails_the_request() {
    let (mut w, _, pull) = world();
    for rank in 0..4 {
        let mut end = wrote(&mut w, pull, rank);
        if rank == 3 {
            end.as_mut().unwrap().writes[0].bytes = Bytes::new(1);
        }
        w.pushed(usize::try_from(rank).unwrap(), end);
    }
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert!(w.end_of(pull) != "Delivered" && w.failed(pull).report.faults.len() == 1, "{}", w.end_of(pull));
    assert!(w.failed(pull).to_string().contains("wrote 1 bytes"), "{}", w.failed(pull));
}

/// FR-01: the first failure frees nothing under its siblings.
#[test]
fn fr_01_a_failed_writer_stops_the_others_and_blocks_stay_until_all_have() {
    let (mut w, fence, pull) = world();
    w.pushed(2, lost(false));
    w.carry(nothing);
    assert_eq!(w.p.told(|m| matches!(m, ToRank::CancelPush(_))), 3);
    assert_eq!((w.end_of(pull), w.p.closed.len(), w.d.session.loans.lent().0 > 0), ("-".into(), 0, true));
    for rank in [0, 1, 3] {
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
    }
    w.carry(nothing);
    let failed = w.failed(pull);
    assert!(matches!(failed.cause, FailureCause::Writers { failed: 1, ranks: 4, .. }), "{failed}");
    assert_eq!(w.p.closed, [(fence, Closing::Abandoned)]);
    assert!(w.is_quiet());
}

/// FR-03: what could not be posted has failed, by name; what was not posted is nowhere.
#[test]
fn fr_03_another_replica_writes_by_the_next_attempt() {
    let mut w = Pair::replicated();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.push(&fence);
    let first = *w.p.pushes().keys().next().unwrap();
    w.p.orders.clear();
    w.pushed_as(first, PushId(1), Err(fault(Stage::Submit, false)));
    w.carry(nothing);
    let second: Vec<usize> = w.p.pushes().keys().copied().collect();
    assert!(second == [1 - first] && w.phase(pull) == Some(Phase::Write));
    let end = wrote(&mut w, pull, u32::try_from(second[0]).unwrap());
    w.pushed(second[0], end);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!((w.end_of(pull), w.p.closed.clone()), ("Delivered".into(), vec![(attempt(&fence, 1), Closing::Read)]));
    assert!(w.is_quiet());
}

/// A consumer that gives up keeps its blocks lent until it has evidence; so does the producer keep its own.
#[test]
fn a_cancelled_push_ends_when_the_writers_have() {
    let (mut w, fence, pull) = world();
    let now = w.now;
    w.d.session.cancel(pull, now);
    w.carry(nothing);
    assert_eq!((w.phase(pull), w.p.closed.len()), (Some(Phase::Stop), 0));
    assert!(w.d.session.loans.lent().0 > 0 && w.p.session.loans.lent().1 > 0);
    for rank in 0..4 {
        assert_eq!(w.end_of(pull), "-");
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
        w.carry(nothing);
    }
    assert_eq!((w.end_of(pull), w.p.closed.clone()), ("Cancelled".into(), vec![(fence, Closing::Abandoned)]));
    assert!(w.is_quiet());
}

/// FR-09: a time-out is no evidence. The blocks stay in quarantine, counted and named, until the writer is heard of.
#[test]
fn fr_09_writers_in_doubt_leave_their_blocks_in_quarantine() {
    let (mut w, fence, pull) = world();
    let id = w.p.pushes()[&0].push;
    let now = w.now;
    w.d.session.cancel(pull, now);
    w.carry(nothing);
    for rank in 0..3 {
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
    }
    w.pass(3 * SECOND, nothing);
    assert_eq!(
        (w.end_of(pull), w.failed(pull).report.writers_in_doubt.clone()),
        ("Cancelled".into(), vec![RankId::new(3)])
    );
    assert_eq!(w.p.closed, [(fence.clone(), Closing::Abandoned)]);
    let quarantine = &w.d.session.snapshot(w.now).quarantine;
    assert_eq!((quarantine.len(), &quarantine[0].writers), (1, &vec![RankId::new(3)]));
    assert_eq!(w.d.session.quarantined(), quarantine[0].blocks);
    // No other request is given them meanwhile, and time alone changes nothing.
    w.pass(1000 * SECOND, nothing);
    let next = w.offer(2, Ttl::Usual);
    let other = w.push(&next);
    assert_eq!(w.end_of(other), "Overlap");
    // The rank says, late, that it has stopped: so its owner says.
    w.pushed_as(3, id, Err(fault(Stage::Cancelled, false)));
    w.carry(nothing);
    assert_eq!(w.d.session.quarantined(), 0);
    let again = w.push(&next);
    assert_eq!(w.phase(again), Some(Phase::Write));
}

/// FR-05, RS-05: a producer's link is gone in the middle. What it wrote is asked for on the next one.
#[test]
fn fr_05_a_producer_that_vanishes_leaves_quarantine_until_it_is_met_again() {
    let (mut w, fence, pull) = world();
    w.cut();
    assert_eq!((w.end_of(pull), w.failed(pull).report.writers_in_doubt.len()), ("Link".into(), 4));
    // The producer stops its writers by itself, and keeps its blocks until they have.
    assert_eq!((w.p.told(|m| matches!(m, ToRank::CancelPush(_))), w.p.closed.len()), (4, 0));
    for rank in 0..4 {
        w.pushed(rank, if rank == 1 { lost(true) } else { lost(false) });
    }
    w.carry(nothing);
    assert_eq!(w.p.closed, [(fence, Closing::ConsumerLost)]);
    assert!(w.d.session.quarantined() > 0);
    // It is asked as soon as it can be reached, whether there is a request for it or not.
    w.carry(nothing);
    assert_eq!((w.count('d', "Stop"), w.count('p', "Stopped")), (1, 1));
    let next = w.offer(2, Ttl::Usual);
    let other = w.pull_as(PullWish { groups: other_dst_groups(9), ..push(&next) });
    w.carry(nothing);
    let quarantine = w.d.session.snapshot(w.now).quarantine;
    assert_eq!(quarantine[0].writers, [RankId::new(1)]);
    // That rank begins another life: its former one writes no more.
    let now = w.now;
    w.p.session.rank_closed(w.p.rank_links[1], "killed", now);
    w.carry(nothing);
    w.p.rejoin(1, now);
    w.carry(nothing);
    w.stop(other);
    w.pass(SECOND, nothing);
    let last = w.offer(3, Ttl::Usual);
    w.pull_as(PullWish { groups: other_dst_groups(10), ..push(&last) });
    w.carry(nothing);
    assert!(w.d.session.snapshot(w.now).quarantine.iter().all(|q| q.pull != pull));
}

/// A grant that is still on its way when its link is lost binds nothing any more once the consumer was told that nobody writes.
#[test]
fn a_grant_that_comes_after_its_stop_finds_nothing() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull_as(push(&fence));
    w.carry(losing(&["PushBind"]));
    let (late, old) = (w.kept.pop().unwrap(), w.links[0]);
    // The consumer sees the link break, the producer does not yet.
    let now = w.now;
    w.d.session.link_closed(old.0, "cut", now);
    w.links.clear();
    w.d.take();
    assert_eq!((w.end_of(pull), w.d.session.quarantined() > 0), ("Link".into(), true));
    let next = w.offer(2, Ttl::Usual);
    w.pull_as(PullWish { groups: other_dst_groups(9), ..push(&next) });
    w.carry(nothing);
    assert_eq!(w.d.session.quarantined(), 0, "nobody writes");
    w.p.orders.clear();
    w.p.session.peer_message(old.1, late.2, now);
    w.p.take();
    assert_eq!(w.p.pushes().len(), 0);
    assert_eq!(w.p.closed, [(fence, Closing::Declined)]);
}

/// FR-15, PP: completion is a set of named senders.
#[test]
fn fr_15_ends_of_other_writers_are_no_evidence() {
    let (mut w, fence, pull) = world();
    let ours = w.links[0].0;
    let say = |writers: &[u32]| {
        let writers = writers.iter().map(|r| (RankId::new(*r), ended())).collect();
        PeerMessage::Written(Box::new(Written { fence: fence.clone(), writers, groups: src_groups() }))
    };
    let now = w.now;
    w.d.session.peer_message(ours, say(&[0, 1, 2, 2]), now);
    w.carry(nothing);
    assert_eq!((w.d.contradictions.len(), w.phase(pull)), (1, Some(Phase::Stop)));
    assert!(w.d.contradictions[0].contains("RankId(3)"), "{:?}", w.d.contradictions);
    for rank in 0..4 {
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
    }
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Contradiction");
    assert!(w.is_quiet());
}

/// LS-05 the other way round: what the producer ends by itself is over when its writers are.
#[test]
fn a_withdrawn_push_tells_first_why_and_then_that_nobody_writes() {
    for how in [Closing::Withdrawn, Closing::Expired] {
        let (mut w, fence, pull) = world();
        let now = w.now;
        if how == Closing::Withdrawn {
            assert!(w.p.session.withdraw(LeaseId::new(1), now));
        } else {
            w.now += 60 * SECOND;
            let now = w.now;
            w.p.session.step(now);
        }
        w.carry(nothing);
        assert_eq!((w.phase(pull), w.p.closed.len(), w.count('p', "Closed")), (Some(Phase::Stop), 0, 1));
        for rank in 0..4 {
            w.pushed(rank, Err(fault(Stage::Cancelled, false)));
        }
        w.carry(nothing);
        assert!(matches!(&w.failed(pull).cause, FailureCause::LeaseClosed { how: told } if *told == how));
        assert_eq!(w.p.closed, [(fence, how)]);
        assert!(w.is_quiet());
    }
}

/// A stream: what is final is told to whoever writes, what was final before the grant too.
#[test]
fn streams_are_told_to_their_writers() {
    let mut w = Pair::leased();
    let fence = w.announce(1);
    let lease = LeaseId::new(1);
    let (a, b) = (TokenRange::new(Tokens::ZERO, Tokens::new(16)), TokenRange::new(Tokens::new(16), Tokens::new(20)));
    let now = w.now;
    let items = [ItemId::new(0)];
    w.p.session.region_ready(lease, Attempt::FIRST, &items, a, now).unwrap();
    w.carry(nothing);
    assert_eq!(w.p.told(|m| matches!(m, ToRank::Ready(_))), 0, "nobody writes yet");
    // It can't be pulled before it is sealed.
    let early = w.pull_as(PullWish { groups: other_dst_groups(9), ..wish(&fence) });
    w.carry(nothing);
    assert!(matches!(&w.failed(early).cause, FailureCause::Refused(BindRefusal::NotSealed)));
    let pull = w.push(&fence);
    assert_eq!(w.p.told(|m| matches!(m, ToRank::Ready(r) if r.tokens == a.end())), 4);
    w.p.session.region_ready(lease, Attempt::FIRST, &items, b, now).unwrap();
    w.carry(nothing);
    assert_eq!(w.p.told(|m| matches!(m, ToRank::Ready(r) if r.tokens == b.end())), 4);
    // Each rank has written more; the least of them is told, and only when it grows.
    let id = w.p.pushes()[&0].push;
    for (rank, tokens) in [(0, 16), (1, 16), (2, 20), (3, 16), (0, 20), (0, 16)] {
        let message = FromRank::PushProgress { push: id, tokens: Tokens::new(tokens) };
        w.p.session.rank_message(w.p.rank_links[rank], message, now);
        w.carry(nothing);
    }
    assert_eq!(w.d.progress, [(pull, Tokens::new(16))]);
    w.p.session.seal(lease, Attempt::FIRST, src_groups(), now).unwrap();
    w.carry(nothing);
    assert_eq!(w.p.told(|m| matches!(m, ToRank::Stream(s) if s.sealed)), 4);
    w.all_written(pull);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    assert_eq!(w.p.told(|m| matches!(m, ToRank::StreamEnd(_))), 4);
    assert!(w.is_quiet());
}

#[test]
fn what_is_said_of_a_stream_must_join_what_was_said() {
    let mut w = Pair::leased();
    w.announce(1);
    w.offer(2, Ttl::Usual);
    let (lease, first, now) = (LeaseId::new(1), Attempt::FIRST, Duration::ZERO);
    let to = |a, b| TokenRange::new(Tokens::new(a), Tokens::new(b));
    let p = &mut w.p.session;
    let ready = |p: &mut OwnerSession, lease, attempt, item, range| {
        p.region_ready(lease, attempt, &[ItemId::new(item)], range, now)
    };
    assert!(matches!(ready(p, LeaseId::new(9), first, 0, to(0, 1)), Err(StreamError::Unknown { .. })));
    assert!(matches!(ready(p, LeaseId::new(2), first, 0, to(0, 1)), Err(StreamError::NotStreamed { .. })));
    assert!(matches!(ready(p, lease, Attempt::new(1), 0, to(0, 1)), Err(StreamError::WrongAttempt { .. })));
    assert!(matches!(ready(p, lease, first, 99, to(0, 1)), Err(StreamError::UnknownItem { .. })));
    assert!(matches!(ready(p, lease, first, 0, to(1, 2)), Err(StreamError::Gap { .. })));
    assert!(matches!(ready(p, lease, first, 0, to(0, 1 << 20)), Err(StreamError::NotListed { .. })));
    ready(p, lease, first, 0, to(0, 8)).unwrap();
    assert!(matches!(ready(p, lease, first, 0, to(0, 8)), Err(StreamError::Gap { .. })));
    // What is listed stays; another order of the same blocks is another list.
    let other = other_src_groups(1);
    assert!(matches!(p.extend(lease, first, other.clone(), now), Err(StreamError::Relisted { .. })));
    assert!(matches!(p.seal(lease, first, other.clone(), now), Err(StreamError::Relisted { .. })));
    assert_eq!(p.restart(lease, other, now), Ok(Attempt::new(1)));
    assert!(matches!(ready(p, lease, first, 0, to(8, 9)), Err(StreamError::WrongAttempt { .. })));
    ready(p, lease, Attempt::new(1), 0, to(0, 4)).unwrap();
    p.seal(lease, Attempt::new(1), other_src_groups(1), now).unwrap();
    assert!(matches!(p.restart(lease, src_groups(), now), Err(StreamError::Sealed { .. })));
    assert!(matches!(ready(p, lease, Attempt::new(1), 0, to(4, 5)), Err(StreamError::Sealed { .. })));
}

/// A prefill that begins anew drains the writes of the run before; the consumer grants its room anew before the new run writes.
#[test]
fn a_restarted_prefill_drains_before_it_writes() {
    let mut w = Pair::leased();
    let fence = w.announce(1);
    let (lease, now) = (LeaseId::new(1), Duration::ZERO);
    let pull = w.push(&fence);
    let old = w.p.pushes()[&0].push;
    w.p.orders.clear();
    let next = w.p.session.restart(lease, other_src_groups(3), now).unwrap();
    w.carry(nothing);
    assert_eq!((w.p.told(|m| matches!(m, ToRank::CancelPush(_))), w.p.pushes().len()), (4, 0));
    assert!(w.p.session.loans.lent().1 > other_places(&w), "the blocks of both runs are lent");
    for rank in 0..4 {
        assert_eq!(w.p.pushes().len(), 0, "one of the run before may still write");
        w.pushed_as(rank, old, Err(fault(Stage::Cancelled, false)));
        w.carry(nothing);
    }
    assert_eq!((w.count('d', "PushBind"), w.p.pushes().len()), (2, 4));
    assert!(w.p.pushes().values().all(|order| order.attempt == next));
    w.p.session.seal(lease, next, other_src_groups(3), now).unwrap();
    w.all_written(pull);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!((w.end_of(pull), w.p.closed.clone()), ("Delivered".into(), vec![(attempt(&fence, 1), Closing::Read)]));
    assert!(w.is_quiet());
}

/// The blocks of one run.
fn other_places(w: &Pair) -> usize {
    w.p.session.leases.shown() / 2
}

/// A writer of the run before is in doubt: what it may still write is where the new run would, so there is none.
#[test]
fn a_restart_with_a_writer_in_doubt_ends_the_lease() {
    let mut w = Pair::leased();
    let fence = w.announce(1);
    let pull = w.push(&fence);
    let now = w.now;
    w.p.session.restart(LeaseId::new(1), src_groups(), now).unwrap();
    for rank in 0..4 {
        w.pushed(rank, lost(rank == 2));
    }
    w.carry(nothing);
    assert_eq!((w.count('d', "PushBind"), w.p.closed.clone()), (1, vec![(fence, Closing::Withdrawn)]));
    assert_eq!(w.failed(pull).report.writers_in_doubt, [RankId::new(2)]);
    assert!(w.d.session.quarantined() > 0);
}

/// `reclaim_after` is off unless an engine vouches for it, and is told where it is used.
#[test]
fn quarantine_ends_by_time_only_where_the_engine_vouches_for_it() {
    for reclaim_after in [None, Some(60 * SECOND)] {
        let usual = |id, epoch, ranks| OwnerConfig { reclaim_after, ..config(id, epoch, ranks) };
        let mut w = Pair::of(Side::with(usual("p", 1, 4)), Side::with(usual("d", 2, 2)));
        let fence = w.offer(1, Ttl::Usual);
        let pull = w.push(&fence);
        // Nobody answers there any more.
        w.answers = false;
        w.cut();
        w.pass(59 * SECOND, nothing);
        assert!(w.d.session.quarantined() > 0 && w.d.reclaimed.is_empty());
        let due = w.d.session.step(w.now);
        w.pass(SECOND, nothing);
        assert_eq!(w.d.session.quarantined() == 0, reclaim_after.is_some());
        assert_eq!(w.d.reclaimed.first().map(|(id, _)| *id), reclaim_after.map(|_| pull));
        assert!(due.is_some_and(|due| due <= 60 * SECOND), "it is asked for all the time");
    }
}

/// What a stranger asks about an attempt of another life is not known.
#[test]
fn stops_of_other_lives_are_not_answered_by_guesses() {
    let (mut w, fence, _) = world();
    let theirs = w.links[0].1;
    let now = w.now;
    let mut ask = |fence: Fence| {
        w.p.session.peer_message(theirs, PeerMessage::Stop(Stop { fence }), now);
        w.p.take();
        let said = w.p.to_peer.pop_back();
        match said {
            Some((_, PeerMessage::Stopped(Stopped { writers, .. }))) => Some(writers),
            _ => None,
        }
    };
    assert_eq!(ask(Fence { epoch: Epoch::new(99), ..fence.clone() }), Some(Stoppage::Unknown));
    assert_eq!(ask(Fence { engine: EngineId::new("q").unwrap(), ..fence.clone() }), Some(Stoppage::Unknown));
    assert_eq!(ask(Fence { lease: LeaseId::new(5), ..fence.clone() }), Some(Stoppage::All));
    assert_eq!(ask(fence), None, "its writers have not ended");
}

#[test]
fn owners_without_links_are_clean_afterwards() {
    let (mut w, _, pull) = world();
    w.all_written(pull);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    w.cut();
    assert!(is_clean(&w.p.session) && is_clean(&w.d.session));
}

/// The producer is told to stop an attempt whose grant is still on its way, while the attempt before it is bound: that grant must find
/// nothing, whatever link it comes by.
#[test]
fn a_grant_of_the_next_attempt_that_comes_after_its_stop_finds_nothing() {
    let mut w = Pair::replicated();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.push(&fence);
    let first = *w.p.pushes().keys().next().unwrap();
    w.pushed(first, lost(false));
    w.carry(losing(&["PushBind"]));
    let (late, old) = (w.kept.pop().unwrap(), w.links[0]);
    assert_eq!(w.phase(pull), Some(Phase::Bind));
    let now = w.now;
    w.d.session.link_closed(old.0, "cut", now);
    w.links.clear();
    w.d.take();
    assert_eq!((w.end_of(pull), w.d.session.quarantined() > 0), ("Link".into(), true));
    w.carry(nothing);
    assert_eq!(w.d.session.quarantined(), 0, "nobody writes");
    w.p.orders.clear();
    w.p.session.peer_message(old.1, late.2, now);
    w.p.take();
    assert_eq!(w.p.pushes().len(), 0);
    assert_eq!(w.p.closed, [(fence, Closing::Abandoned)]);
}

/// A lost writer joins anew while others still write: that is evidence before anybody has asked for it.
#[test]
fn evidence_that_comes_while_others_write_counts() {
    let (mut w, fence, pull) = world();
    let now = w.now;
    let id = w.p.pushes()[&0].push;
    // The link is lost, so the lease is not spared; its other writers take their time.
    w.p.session.rank_closed(w.p.rank_links[3], "killed", now);
    w.carry(nothing);
    w.p.rejoin(3, now);
    w.carry(nothing);
    for rank in 0..3 {
        w.pushed_as(rank, id, Err(fault(Stage::Cancelled, false)));
    }
    w.carry(nothing);
    assert!(w.end_of(pull) != "-" && w.failed(pull).report.writers_in_doubt.is_empty(), "{}", w.end_of(pull));
    assert_eq!(w.p.closed, [(fence, Closing::RankLost)]);
    assert!(w.p.session.pushes.is_empty() && w.d.session.quarantined() == 0);
}

/// What a stop is answered is what is known then, not what was known when the writers ended.
#[test]
fn evidence_that_comes_after_the_end_counts() {
    let (mut w, fence, _) = world();
    for rank in 0..4 {
        w.pushed(rank, lost(rank == 0));
    }
    w.carry(losing(&["Written"]));
    let (id, now, theirs) = (w.p.pushes()[&0].push, w.now, w.links[0].1);
    w.pushed_as(0, id, Err(fault(Stage::Cancelled, false)));
    w.carry(losing(&["Stopped"]));
    assert!(w.p.session.pushes.is_empty());
    w.p.session.peer_message(theirs, PeerMessage::Stop(Stop { fence: fence.clone() }), now);
    w.p.take();
    let answer = PeerMessage::Stopped(Stopped { fence, writers: Stoppage::All });
    assert!(w.p.to_peer.iter().any(|(_, m)| *m == answer), "{:?}", w.p.to_peer);
}

/// A consumer whose heartbeat falls into the drain of a prefill that begins anew goes on.
#[test]
fn a_heartbeat_while_a_restart_drains_ends_nothing() {
    let mut w = Pair::leased();
    let fence = w.announce(1);
    let pull = w.push(&fence);
    let (now, theirs) = (w.now, w.links[0].1);
    w.p.session.restart(LeaseId::new(1), src_groups(), now).unwrap();
    let beat = kvferry_proto::peer::Heartbeat { beat: 1, leases: vec![(fence.lease, fence.attempt)] };
    w.p.session.peer_message(theirs, PeerMessage::Heartbeat(beat), now);
    w.p.take();
    let left = w.p.to_peer.iter().find_map(|(_, m)| match m {
        PeerMessage::HeartbeatAnswer(answer) => Some(answer.left.clone()),
        _ => None,
    });
    assert!(matches!(left.as_deref(), Some([kvferry_proto::peer::Left::For(_)])), "{left:?}");
    w.carry(nothing);
    assert_eq!(w.phase(pull), Some(Phase::Write));
    // Its consumer is lost meanwhile: then it is offered to nobody.
    w.cut();
    for rank in 0..4 {
        w.pushed_as(rank, PushId(1), Err(fault(Stage::Cancelled, false)));
    }
    w.carry(nothing);
    assert_eq!(w.p.closed, [(fence, Closing::ConsumerLost)]);
}

/// A manifest that may be older than the grant tells nothing of the lives of those who write.
#[test]
fn an_old_greeting_is_no_evidence() {
    let (mut w, fence, pull) = world();
    w.cut();
    assert!(w.d.session.quarantined() > 0);
    let (spec, groups, ranks) = crate::testing::shape(4);
    let contact = |n: u128| kvferry_proto::manifest::RankContact { epoch: Epoch::new(n), blob: Arc::from([0u8; 4]) };
    let cache = kvferry_geometry::manifest::Manifest::new(spec, groups, ranks).unwrap();
    let contacts = (0..4).map(|n| contact(9000 + n)).collect();
    let met = EngineManifest::new(fence.engine.clone(), Epoch::new(9), cache, contacts).unwrap();
    let writers = w.failed(pull).report.writers_in_doubt.len();
    let at = w.now;
    assert_eq!(w.d.session.loans.peer_is_met(&met, None), std::slice::from_ref(&fence));
    assert_eq!(w.d.session.snapshot(at).quarantine[0].writers.len(), writers);
    assert_eq!(w.d.session.loans.peer_is_met(&met, Some(at)), []);
    assert_eq!(w.d.session.quarantined(), 0);
}

/// What has arrived at a rank of ours that is lost is not in place, whatever was told before.
#[test]
fn what_a_lost_rank_had_is_computed_anew() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let policy = FailurePolicy { then: Remedy::Recompute, ..FailurePolicy::default() };
    let pull = w.pull_as(PullWish { policy, ..push(&fence) });
    w.carry(nothing);
    let progress = PeerMessage::Progress(kvferry_proto::push::Progress { fence, tokens: Tokens::new(32) });
    w.d.session.peer_message(w.links[0].0, progress, w.now);
    w.d.session.rank_closed(w.d.rank_links[1], "killed", w.now);
    w.carry(nothing);
    for rank in 0..4 {
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
    }
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.failed(pull).report.first_hole()), ("RankLost", Some(Tokens::ZERO)));
}

/// Somebody else who knows a lease's name can't keep its consumer from its next attempt.
#[test]
fn a_stranger_stops_nothing_of_a_bound_lease() {
    let mut w = Pair::replicated();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.push(&fence);
    let first = *w.p.pushes().keys().next().unwrap();
    let stranger = Side::replicas("e", 5, 1);
    let mut other = Pair::of(std::mem::replace(&mut w.p, Side::replicas("x", 9, 2)), stranger);
    let met = other.d.session.pull(wish(&Fence { lease: LeaseId::new(50), ..fence.clone() }), other.now);
    other.carry(nothing);
    let theirs = other.links[0].1;
    for attempt in [0, 1, u32::MAX] {
        let stop = PeerMessage::Stop(Stop { fence: Fence { attempt: Attempt::new(attempt), ..fence.clone() } });
        other.p.session.peer_message(theirs, stop, other.now);
    }
    other.p.take();
    let _ = met;
    w.p = other.p;
    w.p.orders.retain(|(_, m)| !matches!(m, ToRank::CancelPush(_)));
    w.p.to_peer.clear();
    w.pushed_as(first, PushId(1), lost(false));
    w.carry(nothing);
    assert_eq!((w.phase(pull), w.end_of(pull)), (Some(Phase::Write), "-".into()), "its second attempt is bound");
}

/// What was offered anew to a consumer whose link is gone is offered to nobody.
#[test]
fn a_reopened_lease_ends_with_its_consumers_link() {
    let mut w = Pair::leased();
    let offer = Offer { groups: src_groups(), content_key: key(1) };
    let fence = w.p.session.announce(LeaseId::new(1), offer, Ttl::Never, w.now).unwrap();
    w.push(&fence);
    w.p.session.restart(LeaseId::new(1), src_groups(), w.now).unwrap();
    for rank in 0..4 {
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
    }
    w.carry(losing(&["Closed", "Stop"]));
    w.cut();
    assert_eq!(w.p.closed, [(attempt(&fence, 1), Closing::ConsumerLost)]);
    assert!(w.p.session.leases.is_clean() && w.p.session.loans.is_empty());
}

/// Two requests by one reference on one link: an answer to the first is none to the second.
#[test]
fn an_answer_that_nobody_waits_for_is_nobody_elses() {
    for first in [Mode::Pull, Mode::Push { progress: false }] {
        let mut w = Pair::leased();
        let fence = w.offer(1, Ttl::Usual);
        let before = w.pull_as(PullWish { mode: first, groups: other_dst_groups(3), ..push(&fence) });
        w.carry(losing(&["BindAnswer", "Stopped"]));
        let now = w.now;
        w.d.session.cancel(before, now);
        w.carry(losing(&["BindAnswer", "Stopped"]));
        for rank in w.p.pushes().keys().copied().collect::<Vec<_>>() {
            w.pushed(rank, Err(fault(Stage::Cancelled, false)));
        }
        w.pass(5 * SECOND, losing(&["BindAnswer", "Stopped"]));
        assert_eq!(w.end_of(before), "Cancelled", "{first:?}");
        let again = w.pull_as(push(&fence));
        w.carry(losing(&["BindAnswer", "Stopped"]));
        w.resume();
        w.carry(nothing);
        // The lease is over: so it is told, and at once.
        assert!(matches!(&w.failed(again).cause, FailureCause::Refused(BindRefusal::UnknownLease)), "{first:?}");
    }
}

/// A request that is given up while it stops for another reason goes to no other source.
#[test]
fn a_cancel_while_it_halts_is_the_end() {
    let mut w = Pair::leased();
    let (first, second) = (w.offer(1, Ttl::Usual), w.offer(2, Ttl::Usual));
    let other = Source { address: "tcp:127.0.0.1:1".into(), fence: second };
    let within = PhaseLimits { transfer: Some(SECOND), ..PhaseLimits::default() };
    let policy = FailurePolicy { others: vec![other], within, ..FailurePolicy::default() };
    let pull = w.pull_as(PullWish { policy, ..push(&first) });
    w.carry(nothing);
    w.pass(SECOND, nothing);
    assert_eq!(w.phase(pull), Some(Phase::Stop));
    let now = w.now;
    w.d.session.cancel(pull, now);
    for rank in 0..4 {
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
    }
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.failed(pull).report.attempts), ("Cancelled", 1));
}

/// The producer's owner is in another life and knows nothing of its writers' former one; the link on which it says so is older than
/// their next life. It is greeted anew, and then shows that.
#[test]
fn an_engine_that_does_not_know_is_greeted_anew() {
    let (mut w, fence, pull) = world();
    let now = w.now;
    // Its next life comes up on the links that there are, as far as the consumer can see.
    w.d.session.cancel(pull, now);
    w.carry(losing(&["Stop"]));
    w.pass(10 * SECOND, losing(&["Stop"]));
    assert!(w.end_of(pull) == "Cancelled" && w.d.session.quarantined() > 0);
    let before = w.links.len();
    let unknown = PeerMessage::Stopped(Stopped { fence, writers: Stoppage::Unknown });
    let ours = w.links[0].0;
    w.d.session.peer_message(ours, unknown.clone(), w.now);
    w.d.take();
    assert_eq!((before, w.d.connects.len()), (1, 1));
    // One that was just greeted is not greeted again for each such answer.
    w.carry(losing(&["Stop"]));
    let ours = w.links.last().unwrap().0;
    for _ in 0..3 {
        w.d.session.peer_message(ours, unknown.clone(), w.now);
        w.carry(losing(&["Stop"]));
        assert!(w.d.connects.is_empty() && w.links.len() <= 2);
    }
}
