//! Ranks that are lost and join again: what ends, what goes on, and how others come to know of the new life.

use super::pair::{Pair, is_clean, losing, nothing, sources_of};
use super::*;
use kvferry_proto::handshake::Claim;

fn closed_as(w: &Pair, fence: &Fence) -> Vec<Closing> {
    w.p.closed.iter().filter(|(f, _)| f == fence).map(|(_, how)| *how).collect()
}

/// A rank of the producer is lost: leases that nobody reads and those that are read from it are over, others are read to their
/// end, and nothing new is bound or offered until it is back.
#[test]
fn a_lost_rank_ends_the_leases_that_need_it() {
    let mut w = Pair::replicated();
    // Two requests that read from different replicas.
    let mut by_source: BTreeMap<u32, (Fence, PullId)> = BTreeMap::new();
    let mut lease = 0;
    while by_source.len() < 2 {
        lease += 1;
        let fence = w.offer(lease, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(nothing);
        let source = sources_of(&mut w.d, pull, 0)[0];
        by_source.entry(source).or_insert((fence, pull));
    }
    let unread = w.offer(500, Ttl::Usual);
    let asked = w.offer(501, Ttl::Usual);
    let asked_pull = w.pull(&asked);
    w.carry(losing(&["Bind"]));
    let ((gone, gone_pull), (stays, stays_pull)) = (by_source[&1].clone(), by_source[&0].clone());
    w.p.lose(1, w.now);
    assert_eq!(w.p.session.snapshot(w.now).state, "rank lost");
    w.resume();
    w.carry(nothing);
    assert_eq!((closed_as(&w, &unread), closed_as(&w, &gone)), (vec![Closing::RankLost], vec![Closing::RankLost]));
    assert!(closed_as(&w, &stays).is_empty());
    assert_eq!((w.phase(gone_pull), w.phase(stays_pull)), (Some(Phase::Stop), Some(Phase::Read)));
    w.stop(gone_pull);
    w.carry(nothing);
    assert_eq!(w.failed(gone_pull).cause, FailureCause::LeaseClosed { how: Closing::RankLost });
    let refused = &w.failed(asked_pull).cause;
    assert!(
        matches!(refused, FailureCause::Refused(BindRefusal::RankLost { rank, .. }) if rank.get() == 1),
        "{refused}"
    );
    let offered = w.p.session.offer(LeaseId::new(9), offer(), Ttl::Usual, w.now);
    assert!(matches!(offered, Err(OfferError::RankLost { .. })));
    // It is back, and the other request is still read to its end.
    w.p.rejoin(1, w.now);
    w.carry(nothing);
    w.read(stays_pull);
    w.carry(nothing);
    assert_eq!((w.end_of(stays_pull).as_str(), closed_as(&w, &stays)), ("Delivered", vec![Closing::Read]));
}

/// The engine has a new epoch then: its ranks are told, a reference of the new life makes the link anew, and the old link goes
/// when what goes over it has ended.
#[test]
fn a_reference_of_a_new_epoch_makes_the_link_anew() {
    let mut w = Pair::replicated();
    let (mut lease, mut others) = (0, Vec::new());
    let (old_pull, old) = loop {
        lease += 1;
        let fence = w.offer(lease, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(nothing);
        if sources_of(&mut w.d, pull, 0) == [0] {
            break (pull, fence);
        }
        others.push(pull);
    };
    let first_link = w.links[0];
    let (before, digest) = (w.p.session.epoch, w.p.session.manifest().unwrap().digest());
    w.now += SECOND;
    w.p.lose(1, w.now);
    w.carry(nothing);
    for pull in others {
        w.stop(pull);
    }
    w.carry(nothing);
    w.p.orders.clear();
    w.p.rejoin(1, w.now);
    w.carry(nothing);
    let welcomed = w.p.orders.iter().filter(|(_, m)| matches!(m, ToRank::Welcome(m) if m.epoch() == before.after()));
    assert_eq!((welcomed.count(), w.p.session.epoch, w.p.ready.last()), (2, before.after(), Some(&before.after())));
    assert_eq!((w.p.session.snapshot(w.now).state, w.p.session.snapshot(w.now).epoch), ("ready", before.after()));
    let fence = w.offer(1000, Ttl::Usual);
    assert_eq!(fence.epoch, before.after());
    w.now += SECOND;
    let pull = w.pull(&fence);
    w.carry(nothing);
    assert_eq!((w.phase(pull), w.links.len(), w.links[0]), (Some(Phase::Read), 2, first_link), "both are in use");
    w.d.orders.clear();
    w.read(old_pull);
    w.carry(nothing);
    assert_eq!((w.end_of(old_pull).as_str(), closed_as(&w, &old)), ("Delivered", vec![Closing::Read]));
    assert!(w.links.len() == 1 && !w.d.session.links.exists(first_link.0) && !w.p.session.links.exists(first_link.1));
    assert!(w.d.orders.iter().any(|(_, m)| *m == ToRank::Forget(digest)), "ranks forget the old life");
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    // A reference of the old life is looked into once, over a link that is surely younger, and fails by name.
    w.now += SECOND;
    let stale = w.pull(&Fence { lease: LeaseId::new(2000), ..old });
    w.carry(nothing);
    let expected = FailureCause::StaleEpoch { reference: before, current: before.after() };
    assert_eq!((&w.failed(stale).cause, w.links.len()), (&expected, 1));
    let next = w.one_request(3000);
    assert_eq!(w.end_of(next), "Delivered");
    w.cut();
    assert!(is_clean(&w.d.session) && is_clean(&w.p.session) && w.d.session.loans.is_empty());
}

/// Requests that wait while the link is made anew all get it; those of the old life fail as stale.
#[test]
fn all_who_come_meanwhile_take_the_new_link() {
    let mut w = Pair::leased();
    w.one_request(1);
    let old = w.offer(2, Ttl::Usual);
    w.now += SECOND;
    w.p.lose(3, w.now);
    w.p.rejoin(3, w.now);
    let new: Vec<Fence> = (10..14).map(|lease| w.offer(lease, Ttl::Usual)).collect();
    w.now += SECOND;
    w.answers = false;
    let mut pulls = vec![w.pull(&new[0]), w.pull(&new[1])];
    let stale = w.pull(&old);
    pulls.push(w.pull(&new[2]));
    w.carry(nothing);
    assert_eq!(w.d.connects.len(), 1, "one link for all");
    w.answers = true;
    w.d.session.step(w.now);
    pulls.push(w.pull(&new[3]));
    w.carry(nothing);
    assert_eq!(w.d.connects.len(), 0);
    for pull in pulls {
        w.read(pull);
        w.carry(nothing);
        assert_eq!(w.end_of(pull), "Delivered");
    }
    // It has asked over the old link: there the producer itself refuses it.
    let refused = &w.failed(stale).cause;
    assert!(matches!(refused, FailureCause::Refused(BindRefusal::StaleEpoch { .. })), "{refused}");
    assert_eq!(w.links.len(), 1);
}

/// A reference of another epoch wants a link of its own; what the one that is up will do for goes over it meanwhile, also where no
/// other comes about.
#[test]
fn a_link_serves_while_another_is_made() {
    let mut w = Pair::leased();
    w.one_request(1);
    let before = w.links[0];
    w.now += SECOND;
    let other = |fence: &Fence| Fence { epoch: fence.epoch.after(), ..fence.clone() };
    let fences: Vec<Fence> = (10..14).map(|lease| w.offer(lease, Ttl::Usual)).collect();
    w.answers = false;
    let waits = w.pull(&other(&fences[0]));
    w.carry(nothing);
    assert_eq!((w.phase(waits), w.d.connects.len()), (Some(Phase::Link), 1));
    let deliver = |w: &mut Pair, fence: &Fence| {
        let pull = w.pull(fence);
        w.carry(nothing);
        w.read(pull);
        w.carry(nothing);
        assert_eq!((w.end_of(pull).as_str(), &w.links[..]), ("Delivered", &[before][..]));
    };
    deliver(&mut w, &fences[0]);
    // It could not be made, and is tried again; nobody else minds.
    let failed = w.d.connects.remove(0);
    w.d.session.link_closed(failed, "no route", w.now);
    deliver(&mut w, &fences[1]);
    assert_eq!((w.phase(waits), w.d.connects.len()), (Some(Phase::Link), 0));
    w.pass(SECOND, nothing);
    assert_eq!((w.phase(waits), w.d.connects.len()), (Some(Phase::Link), 1));
    deliver(&mut w, &fences[2]);
    // Something goes over the first when the other is up: it ends there.
    let reads = w.pull(&fences[3]);
    w.answers = true;
    w.carry(nothing);
    assert_eq!((w.end_of(waits).as_str(), w.links.len()), ("StaleEpoch", 2));
    w.read(reads);
    w.carry(nothing);
    assert_eq!((w.end_of(reads).as_str(), w.links.len()), ("Delivered", 1));
    assert!(!w.d.session.links.exists(before.0), "the other one is taken from now on");
    // Who wants another one may go, and the one that is up may break, before there is another.
    w.now += SECOND;
    w.answers = false;
    let fence = w.offer(20, Ttl::Usual);
    let far = Fence { epoch: fence.epoch.after().after(), ..fence.clone() };
    let waits = w.pull(&far);
    w.carry(nothing);
    w.cut();
    let waits_too = w.pull(&fence);
    w.carry(nothing);
    assert_eq!((w.phase(waits), w.phase(waits_too), w.d.connects.len()), (Some(Phase::Link), Some(Phase::Link), 1));
    w.answers = true;
    w.carry(nothing);
    w.read(waits_too);
    w.carry(nothing);
    assert_eq!((w.end_of(waits).as_str(), w.end_of(waits_too).as_str()), ("StaleEpoch", "Delivered"));
    w.cut();
    assert!(is_clean(&w.d.session) && is_clean(&w.p.session));
}

/// A rank of the consumer is lost while it reads, and joins again: its blocks are in quarantine until then, the next request
/// tells the producer of the new life by a new link.
#[test]
fn a_consumers_rank_joins_again() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    let (old_link, before) = (w.links[0], w.d.session.epoch);
    w.now += SECOND;
    w.d.lose(1, w.now);
    w.stop(pull);
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), &w.failed(pull).report.in_doubt[..]), ("Ranks", &[RankId::new(1)][..]));
    assert_eq!((w.d.session.quarantined(), w.p.closed.len()), (3, 1));
    let refused = w.offer(2, Ttl::Usual);
    let refused = w.pull(&refused);
    w.carry(nothing);
    assert_eq!(w.end_of(refused), "RankLost");
    w.d.rejoin(1, w.now);
    w.carry(nothing);
    assert_eq!((w.d.session.quarantined(), w.d.session.epoch), (0, before.after()));
    assert!(w.d.session.loans.is_empty());
    w.now += SECOND;
    let next = w.one_request(3);
    assert_eq!(w.end_of(next), "Delivered");
    assert!(w.links.len() == 1 && w.links[0] != old_link, "it has a new link, and the old one is gone");
    // The producer knows who it was.
    assert_eq!(w.p.session.snapshot(w.now).links[0].epoch, Some(before.after()));
}

/// It joins again before the other rank has stopped: then nothing is in doubt when the request ends.
#[test]
fn a_rank_that_is_back_before_the_end_leaves_no_quarantine() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    w.d.lose(0, w.now);
    w.carry(nothing);
    w.d.rejoin(0, w.now);
    w.carry(nothing);
    assert_eq!(w.phase(pull), Some(Phase::Stop), "rank 1 still reads");
    w.say(pull, 1, Err(fault(Stage::Cancelled, false)));
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.failed(pull).report.in_doubt.len()), ("Ranks", 0));
    assert!(w.d.session.quarantined() == 0 && w.d.session.loans.is_empty());
    // One that comes back twice, or was never in doubt, changes nothing.
    let fence = w.offer(2, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    w.say(pull, 0, Err(fault(Stage::Read, true)));
    w.d.lose(1, w.now);
    w.d.rejoin(1, w.now);
    w.carry(nothing);
    assert_eq!(w.failed(pull).report.in_doubt, [RankId::new(0), RankId::new(1)], "both were when it ended");
    assert_eq!(w.d.session.quarantined(), 3, "and one is still");
    w.d.lose(0, w.now);
    w.d.rejoin(0, w.now);
    assert!(w.d.session.loans.is_empty());
}

/// Two ranks are lost one after the other: the engine is back when both are, in one new life.
#[test]
fn two_lost_ranks_are_one_new_life() {
    let mut w = Pair::leased();
    let before = w.p.session.epoch;
    w.p.lose(1, w.now);
    w.p.lose(2, w.now);
    w.p.take();
    assert_eq!(w.p.lost, [RankId::new(1), RankId::new(2)]);
    w.p.rejoin(1, w.now);
    w.p.take();
    assert_eq!((w.p.ready.len(), w.p.session.missing()), (1, vec![RankId::new(2)]));
    w.p.lose(1, w.now);
    w.p.rejoin(2, w.now);
    w.p.rejoin(1, w.now);
    w.p.take();
    assert_eq!(w.p.ready, [before, before.after()]);
    let pull = w.one_request(1);
    assert_eq!(w.end_of(pull), "Delivered");
    // A rank that is there can't join a second time, and harms nobody by trying.
    let engine = EngineId::new("p").unwrap();
    let link = w.p.session.accept_rank(w.now);
    let manifest = w.p.manifests[1].clone();
    let join = RankJoin { engine, rank: RankId::new(1), epoch: Epoch::new(3), manifest, blob: Arc::from([1]) };
    w.p.session.rank_message(link, FromRank::Join(join), w.now);
    let mut refused = 0;
    while let Some(effect) = w.p.session.next_effect() {
        refused += usize::from(matches!(effect, Effect::JoinRefused(JoinError::Repeated { .. })));
    }
    assert_eq!((refused, w.p.session.epoch), (1, before.after()));
    let pull = w.one_request(2);
    assert_eq!(w.end_of(pull), "Delivered");
}

/// A link that was made anew, and over which its peer still reads from us, goes when that has ended.
#[test]
fn an_old_link_that_serves_goes_when_it_has_served() {
    let mut w = Pair::leased();
    w.one_request(1);
    let (ours, theirs) = w.links[0];
    // A peer may read over a link that we have made.
    let of_d = w.d.offer(1, w.now);
    let salt = kvferry_proto::names::pairing_salt(&EngineId::new("p").unwrap(), of_d.lease, of_d.attempt);
    let options = PeerOptions { salt, stripe: false };
    let peer_map = w.d.session.serving(ours).unwrap().1.unwrap().map(options).unwrap().digest();
    let bind = kvferry_proto::peer::Bind { fence: of_d.clone(), content_key: key(1), salt, peer_map };
    w.tell_d(theirs, PeerMessage::Bind(bind));
    w.now += SECOND;
    w.p.lose(0, w.now);
    w.p.rejoin(0, w.now);
    w.p.take();
    w.p.to_peer.clear();
    w.now += SECOND;
    let next = w.one_request(2);
    assert_eq!((w.end_of(next).as_str(), w.links.len()), ("Delivered", 2), "{:?}", w.said);
    let release = kvferry_proto::peer::Release { fence: of_d.clone(), reads: kvferry_proto::peer::ReadsEnd::Complete };
    w.tell_d(theirs, PeerMessage::Release(release));
    w.carry(nothing);
    assert_eq!((w.d.closed.clone(), w.links.len()), (vec![(of_d, Closing::Read)], 1));
    assert!(!w.d.session.links.exists(ours));
}

/// References of an epoch that was shown to be old make no link of their own, however many come.
#[test]
fn old_references_make_one_link_for_all() {
    let mut w = Pair::leased();
    let old = w.offer(1, Ttl::Usual);
    w.one_request(2);
    w.now += SECOND;
    w.p.lose(0, w.now);
    w.p.rejoin(0, w.now);
    w.carry(nothing);
    w.now += SECOND;
    let long = w.offer(3, Ttl::Usual);
    let long = w.pull(&long);
    w.carry(nothing);
    assert_eq!(w.phase(long), Some(Phase::Read));
    let up = w.d.up.len();
    for n in 0..20u128 {
        w.now += SECOND / 10;
        let stale = w.pull(&Fence { lease: LeaseId::new(100 + n), ..old.clone() });
        w.carry(nothing);
        assert_eq!(w.end_of(stale), "StaleEpoch");
    }
    assert!(w.d.up.len() <= up + 1, "{} links", w.d.up.len() - up);
    w.read(long);
    w.carry(nothing);
    assert_eq!(w.end_of(long), "Delivered");
}

/// A consumer of version 2 keeps its link and its notion of the engine for ever: the producer closes it when it is another.
#[test]
fn a_peer_of_version_2_meets_the_engine_that_was_made_anew() {
    let mut w = Pair::leased();
    w.speaks = Some(kvferry_proto::handshake::Versions { min: 2, max: 2 });
    w.one_request(1);
    w.now += SECOND;
    w.p.lose(0, w.now);
    w.p.rejoin(0, w.now);
    w.carry(nothing);
    assert_eq!((w.links.len(), w.p.down.len()), (0, 1));
    w.now += SECOND;
    let pull = w.one_request(2);
    assert_eq!(w.end_of(pull), "Delivered");
    // It becomes another between the answer to what a hello claims and the hello.
    w.cut();
    let fence = w.offer(3, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(|m| matches!(m, PeerMessage::Hello(_)));
    let Some((true, _, PeerMessage::Hello(hello))) = w.kept.first().cloned() else { panic!("it says hello") };
    let claim = Claim { versions: Versions { min: 2, max: 2 }, ..Claim::from(&hello) };
    w.p.session.peer_claims(w.links[0].1, &claim, w.now);
    w.p.lose(0, w.now);
    w.p.rejoin(0, w.now);
    let up = w.p.up.len();
    w.resume();
    w.carry(nothing);
    assert_eq!((w.links.len(), w.p.up.len()), (0, up), "the consumer would know the engine that was");
    w.now += SECOND;
    let next = w.one_request(4);
    assert_eq!(
        (w.end_of(pull).as_str(), w.end_of(next).as_str()),
        ("Link", "Delivered"),
        "its lease is gone in any case"
    );
}
