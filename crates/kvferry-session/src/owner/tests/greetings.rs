//! How owners meet: first contact, again, after one of them has forgotten or changed; who may be met; links that come and go.

use kvferry_proto::handshake::{Claim, Hello};

use super::pair::{Pair, is_clean, losing, nothing};
use super::*;

fn engine(id: &str) -> EngineId {
    EngineId::new(id).unwrap()
}

/// What was said until both links were up, without what requests say.
fn greeted(w: &Pair) -> Vec<(char, &'static str)> {
    let of_greeting = ["Hello", "Again", "ManifestWanted", "Manifest", "Refused"];
    w.said.iter().filter(|(_, kind)| of_greeting.contains(kind)).copied().collect()
}

/// Engines that have met, and whose link is gone.
fn met() -> Pair {
    let mut w = Pair::leased();
    let pull = w.one_request(1);
    assert_eq!((w.end_of(pull).as_str(), greeted(&w)), ("Delivered", vec![('d', "Hello"), ('p', "Hello")]));
    w.cut();
    w.said.clear();
    w
}

fn works(w: &mut Pair, lease: u128) {
    let pull = w.one_request(lease);
    assert_eq!(w.end_of(pull), "Delivered", "{:?}", w.said);
    assert!(w.d.ended.iter().all(|(_, r)| r.is_ok()), "{:?}", w.d.ended);
}

/// Engines that have met greet by digests, and send no manifest again, unless one has forgotten or changed meanwhile.
#[test]
fn again_by_what_each_still_knows() {
    const D_AGAIN: (char, &str) = ('d', "Again");
    let forget = |side: &mut Side| side.session.links.forget_manifests();
    // Both know.
    let mut w = met();
    works(&mut w, 2);
    assert_eq!(greeted(&w), [D_AGAIN, ('p', "Again")]);
    // The producer has forgotten the consumer.
    let mut w = met();
    forget(&mut w.p);
    works(&mut w, 2);
    assert_eq!(greeted(&w), [D_AGAIN, ('p', "ManifestWanted"), ('p', "Again"), ('d', "Manifest")]);
    // The consumer has forgotten the producer.
    let mut w = met();
    forget(&mut w.d);
    works(&mut w, 2);
    assert_eq!(greeted(&w), [('d', "Hello"), ('p', "Hello")]);
    // It forgets while it is being answered.
    let mut w = met();
    let fence = w.offer(2, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(losing(&["Again"]));
    forget(&mut w.d);
    w.resume();
    w.carry(nothing);
    assert_eq!(greeted(&w), [D_AGAIN, ('p', "Again"), ('d', "ManifestWanted"), ('p', "Manifest")]);
    assert_eq!(w.phase(pull), Some(Phase::Read));
    // RS-01: the producer was restarted at the same address, with other ranks at that.
    for ranks in [4, 2] {
        let mut w = met();
        w.p = Side::new("p", 100, ranks);
        works(&mut w, 2);
        assert_eq!(greeted(&w), [D_AGAIN, ('p', "ManifestWanted"), ('p', "Hello"), ('d', "Manifest")]);
    }
    // RS-01, mirrored: the consumer was restarted.
    let mut w = met();
    w.d = Side::new("d", 100, 2);
    works(&mut w, 2);
    assert_eq!(greeted(&w), [('d', "Hello"), ('p', "Hello")]);
    // Both were.
    let mut w = met();
    (w.p, w.d) = (Side::new("p", 100, 4), Side::new("d", 101, 2));
    works(&mut w, 2);
    assert_eq!(greeted(&w), [('d', "Hello"), ('p', "Hello")]);
}

/// A peer that speaks only version 2 by now, whichever of its answers comes first: the next attempt is a whole hello.
#[test]
fn a_downgraded_peer_is_greeted_by_a_whole_hello() {
    let hello = |p: &Side| {
        let local = p.session.life.local().unwrap().clone();
        let (_, hello) = kvferry_proto::handshake::Greeting::start(local, Default::default());
        PeerMessage::Hello(Hello { versions: Versions { min: 2, max: 2 }, ..hello })
    };
    let refused = || PeerMessage::Refused(vec!["frames of kind 3 are not known".into()]);
    for says_hello in [true, false] {
        let mut w = met();
        w.answers = false;
        let fence = w.offer(2, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(nothing);
        let link = w.d.connects.remove(0);
        assert!(w.d.session.link_opened(link, None, w.now));
        w.carry(nothing);
        assert_eq!(greeted(&w), [('d', "Again")]);
        (w.d.failed, w.d.up, w.d.to_peer) = (Vec::new(), Vec::new(), VecDeque::new());
        // It doesn't wait until it is spoken to, and then can't read what it is told.
        if says_hello {
            let hello = hello(&w.p);
            w.d.session.peer_message(link, hello, w.now);
        }
        w.d.session.peer_message(link, refused(), w.now);
        w.d.session.link_closed(link, "closed by the peer", w.now);
        w.carry(nothing);
        assert_eq!((w.d.failed.clone(), w.d.up.len(), w.phase(pull)), (vec![false], 0, Some(Phase::Link)));
        (w.answers, w.speaks) = (true, Some(Versions { min: 2, max: 2 }));
        w.pass(SECOND / 10, nothing);
        assert_eq!(greeted(&w)[1..], [('d', "Hello"), ('p', "Hello")], "says hello: {says_hello}");
        w.read(pull);
        w.carry(nothing);
        assert_eq!((w.end_of(pull).as_str(), w.d.versions.last()), ("Delivered", Some(&2)));
    }
}

/// Manifests are asked for by those who were greeted by digest, once; nobody sends one unasked, or another.
#[test]
fn manifests_are_asked_for_once() {
    let refuses = |w: &mut Pair, m: PeerMessage| {
        let (ours, theirs) = w.links[0];
        w.tell_d(theirs, m);
        w.d.take();
        let refused = matches!(w.d.to_peer.back(), Some((_, PeerMessage::Refused(_))));
        assert_eq!(refused, !w.d.session.links.exists(ours), "who refuses closes");
        refused
    };
    // Greeted by digest: once.
    let mut w = met();
    works(&mut w, 2);
    assert!(!refuses(&mut w, PeerMessage::ManifestWanted));
    assert!(refuses(&mut w, PeerMessage::ManifestWanted));
    // By a whole hello: never.
    let mut w = Pair::leased();
    w.one_request(1);
    assert!(refuses(&mut w, PeerMessage::ManifestWanted));
    // Unasked.
    let mut w = met();
    works(&mut w, 2);
    let manifest = w.p.session.manifest().unwrap().clone();
    assert!(refuses(&mut w, PeerMessage::Manifest(manifest)));
    // Another than the one that was named.
    let mut w = met();
    w.one_request(2);
    w.cut();
    w.p.session.links.forget_manifests();
    let fence = w.offer(3, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(losing(&["Manifest", "Bind"]));
    let other = Side::new("d", 99, 2).session.manifest().unwrap().clone();
    let (ours, _) = w.links[0];
    w.tell_p(ours, PeerMessage::Manifest(other));
    w.kept.clear();
    w.carry(nothing);
    assert!(w.p.reasons.last().unwrap().contains("manifest digest"), "{:?}", w.p.reasons);
    assert_ne!(w.phase(pull), Some(Phase::Read));
}

/// What comes too early, too late, or twice in the greeting ends the link and nothing else.
#[test]
fn messages_out_of_place_end_their_link() {
    let bind = |fence: &Fence| {
        let (salt, peer_map) = (0, Digest::from_bytes([0; 32]));
        PeerMessage::Bind(kvferry_proto::peer::Bind { fence: fence.clone(), content_key: key(1), salt, peer_map })
    };
    let mut w = Pair::leased();
    let (pull, e) = (w.one_request(1), Side::new("e", 5, 2));
    let fence = w.offer(2, Ttl::Usual);
    for messages in [
        vec![bind(&fence)],
        vec![PeerMessage::ManifestWanted],
        vec![PeerMessage::Manifest(e.session.manifest().unwrap().clone())],
        vec![hello(&e), hello(&e)],
        vec![hello(&e), PeerMessage::Manifest(e.session.manifest().unwrap().clone())],
    ] {
        let link = w.p.session.accept(None, w.now);
        for m in messages {
            w.p.session.peer_message(link, m, w.now);
        }
        assert!(!w.p.session.links.exists(link));
        w.p.take();
        assert_eq!(w.p.closes.pop(), Some(link));
        let (_, m) = w.p.to_peer.pop_back().unwrap();
        assert!(matches!(m, PeerMessage::Refused(_)));
        w.p.to_peer.clear();
    }
    assert_eq!((w.end_of(pull).as_str(), w.p.closed.len()), ("Delivered", 1));
    works(&mut w, 3);
}

fn hello(side: &Side) -> PeerMessage {
    let local = side.session.life.local().unwrap().clone();
    PeerMessage::Hello(kvferry_proto::handshake::Greeting::start(local, Default::default()).1)
}

/// An engine that makes ever more links has its oldest ones closed, those without a bound lease first; others are none the worse.
#[test]
fn links_of_one_engine_are_bounded() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    let d = Side::new("d", 2, 2);
    let more: Vec<LinkId> = (1..=5)
        .map(|n| {
            let link = w.p.session.accept(None, w.now + n * SECOND);
            w.p.session.peer_message(link, hello(&d), w.now + n * SECOND);
            link
        })
        .collect();
    w.p.take();
    let other = w.p.session.accept(None, w.now);
    w.p.session.peer_message(other, hello(&Side::new("e", 3, 2)), w.now);
    w.p.take();
    assert_eq!(w.p.closes, more[..2], "the one over which it reads stands, and the last three");
    w.p.to_peer.retain(|(link, _)| !more.contains(link) && *link != other);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    assert!(w.p.session.links.exists(other));
}

/// However long a peer's refusal is, what each of those who wait is told is short.
#[test]
fn a_refusal_is_cut_to_what_people_read() {
    let mut w = Pair::leased();
    w.answers = false;
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull(&fence);
    w.carry(nothing);
    let ours = w.d.connects.remove(0);
    assert!(w.d.session.link_opened(ours, None, w.now));
    let reasons = vec!["\u{e9}".repeat(8000); 64];
    w.d.session.peer_message(ours, PeerMessage::Refused(reasons), w.now);
    w.d.take();
    let FailureCause::Handshake { reasons, .. } = &w.failed(pull).cause else { panic!("{:?}", w.failed(pull)) };
    let bytes: usize = reasons.iter().map(String::len).sum();
    assert!(bytes > 100 && bytes < 4096, "{bytes}");
}

/// HS-01: lists of allowed engines, and of those for which credentials stand, are kept at both ends.
#[test]
fn hs_01_only_allowed_and_proven_engines_meet() {
    let allowed = |list: &[&str]| Some(Arc::new(Allowed::new(list)));
    // Who, as the producer's list, as what the consumer has proven, as what the producer has proven.
    for (at_p, of_d, of_p, meet) in [
        (None, None, None, true),
        (allowed(&["d*"]), allowed(&["d"]), allowed(&["p", "q"]), true),
        (allowed(&["e"]), None, None, false),
        (allowed(&[]), None, None, false),
        (None, allowed(&["e"]), None, false),
        (None, None, allowed(&["q"]), false),
    ] {
        let p = OwnerConfig { allowed: at_p.clone(), ..config("p", 1, 4) };
        let mut w = Pair::of(Side::with(p), Side::new("d", 2, 2));
        w.answers = false;
        let fence = w.offer(1, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(nothing);
        let ours = w.d.connects.remove(0);
        let theirs = w.p.session.accept(of_d.clone(), w.now);
        w.links.push((ours, theirs));
        // An end that can't be the one we want is told nothing.
        let opened = w.d.session.link_opened(ours, of_p.clone(), w.now);
        assert_eq!(opened, of_p.is_none_or(|p| p.has(w.p.session.manifest().unwrap().engine())));
        if !opened {
            w.links.clear();
            w.p.session.link_closed(theirs, "closed", w.now);
            w.d.take();
            assert!(w.d.to_peer.is_empty(), "{:?}", w.d.to_peer);
        }
        w.carry(nothing);
        if meet {
            assert_eq!(w.phase(pull), Some(Phase::Read));
            continue;
        }
        let FailureCause::Handshake { reasons, .. } = &w.failed(pull).cause else { panic!("{:?}", w.failed(pull)) };
        assert!(reasons.len() == 1 && reasons[0].starts_with("engine id"), "{reasons:?}");
        assert_eq!((w.d.failed.len() + w.d.down.len(), w.d.connects.len()), (1, 0), "it is not tried again");
        assert!(w.links.is_empty() && w.d.session.roads.is_empty() && w.p.session.leases.is_idle());
    }
}

/// HS-01, RS-01: another engine answers at the address: both ids are told, nothing of it is kept, and it is none the worse.
#[test]
fn hs_01_another_engine_at_the_address_is_refused() {
    for met_before in [false, true] {
        let mut w = if met_before { met() } else { Pair::leased() };
        let stale = w.offer(9, Ttl::Usual);
        w.p = Side::new("q", 50, 4);
        let q = w.p.session.manifest().unwrap().digest();
        let pulls = [w.pull(&stale), w.pull(&Fence { lease: LeaseId::new(10), ..stale.clone() })];
        w.carry(nothing);
        w.pass(SECOND / 10, nothing);
        for pull in pulls {
            let FailureCause::Handshake { address, reasons } = &w.failed(pull).cause else { panic!("a mismatch") };
            assert!(reasons[0].contains("expected p, got q") && address == "tcp:127.0.0.1:1", "{reasons:?}");
        }
        assert!(!w.d.session.links.remembers(q) && w.d.session.roads.is_empty(), "nothing of it is kept");
        // Whom it really is, is read at the same address.
        let fence = w.p.offer(11, w.now);
        let pull = w.pull(&fence);
        w.carry(nothing);
        w.read(pull);
        w.carry(nothing);
        assert_eq!(w.end_of(pull), "Delivered");
    }
}

/// ID-06: four data-parallel siblings are four engines; one's own id is nobody else's.
#[test]
fn id_06_siblings_are_engines_of_their_own() {
    let mut d = Side::new("d", 2, 2);
    for i in 0u32..4 {
        let mut p = Side::new(&format!("e.dp{i}"), 1, 4);
        let fence = p.offer(1, Duration::ZERO);
        let wish = PullWish { groups: other_dst_groups(i), ..wish(&fence) };
        let pull = d.session.pull(wish, Duration::ZERO);
        d.take();
        // One address, one epoch, one lease id; and yet a link for each.
        let (ours, theirs) = (d.connects.remove(0), p.session.accept(None, Duration::ZERO));
        assert!(d.session.link_opened(ours, None, Duration::ZERO));
        for _ in 0..4 {
            d.take();
            for (link, m) in std::mem::take(&mut d.to_peer) {
                assert_eq!(link, ours);
                p.session.peer_message(theirs, m, Duration::ZERO);
            }
            p.take();
            for (_, m) in std::mem::take(&mut p.to_peer) {
                d.session.peer_message(ours, m, Duration::ZERO);
            }
        }
        // It is cancelled, so that the next one may have the same names.
        d.session.cancel(pull, Duration::ZERO);
        for rank in 0..2 {
            let result = Err(fault(Stage::Cancelled, false));
            d.session.rank_message(d.rank_links[rank], FromRank::Pulled { pull, result }, Duration::ZERO);
        }
        d.take();
        d.to_peer.clear();
    }
    let cancelled = |(_, r): &(PullId, Result<Delivered, Failed>)| {
        r.as_ref().is_err_and(|f| f.cause == FailureCause::Cancelled && f.report.faults.len() == 2)
    };
    assert!(d.up.len() == 4 && d.ended.len() == 4 && d.ended.iter().all(cancelled), "{:?}", d.ended);
    // Oneself.
    let own = Fence {
        engine: engine("d"),
        epoch: Epoch::new(2),
        lease: LeaseId::new(3),
        attempt: kvferry_proto::names::Attempt::FIRST,
    };
    let pull = d.session.pull(PullWish { groups: other_dst_groups(30), ..wish(&own) }, Duration::ZERO);
    d.take();
    let (ours, theirs) = (d.connects.remove(0), d.session.accept(None, Duration::ZERO));
    assert!(d.session.link_opened(ours, None, Duration::ZERO));
    for _ in 0..3 {
        d.take();
        for (link, m) in std::mem::take(&mut d.to_peer) {
            let to = if link == ours { theirs } else { ours };
            d.session.peer_message(to, m, Duration::ZERO);
        }
    }
    d.take();
    let (_, result) = d.ended.iter().find(|(id, _)| *id == pull).unwrap();
    let cause = &result.as_ref().unwrap_err().cause;
    assert!(matches!(cause, FailureCause::Handshake { reasons, .. } if reasons[0].contains("own id")), "{cause}");
}

/// ID-03, ID-04: three samples of a prompt are three leases; ids that share bits are never taken for each other.
#[test]
fn id_04_leases_are_told_apart_by_all_their_bits() {
    let mut w = Pair::leased();
    let ids = [1, 4097, 5, 1026, 1 << 64 | 1, 1 << 127 | 1];
    let fences = ids.map(|id| w.offer(id, Ttl::Usual));
    let repeated = w.p.session.offer(LeaseId::new(4097), offer(), Ttl::Usual, w.now);
    assert_eq!(repeated, Err(OfferError::Repeated { lease: LeaseId::new(4097) }));
    let pulls = fences.clone().map(|fence| w.pull(&fence));
    let twice = w.pull(&fences[1]);
    w.carry(nothing);
    assert_eq!(w.failed(twice).cause, FailureCause::Refused(BindRefusal::AlreadyBound));
    for (i, (pull, fence)) in pulls.iter().zip(&fences).enumerate().rev() {
        assert_eq!(w.phase(*pull), Some(Phase::Read));
        w.read(*pull);
        w.carry(nothing);
        assert_eq!((w.p.closed.len(), w.p.closed.last()), (6 - i, Some(&(fence.clone(), Closing::Read))));
    }
    assert!(w.p.consumers.iter().all(|c| *c == Some(engine("d"))));
}

/// Who is told how a long hello begins answers at once, and reads what follows meanwhile; whom it wouldn't meet it refuses without.
#[test]
fn a_hello_is_answered_before_it_is_read() {
    // The consumer has said hello, which is on its way.
    let begun = || {
        let mut w = Pair::leased();
        let fence = w.offer(1, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(|m| matches!(m, PeerMessage::Hello(_)));
        let PeerMessage::Hello(hello) = w.kept[0].2.clone() else { panic!("it says hello first") };
        (w, pull, hello)
    };
    let (mut w, pull, hello) = begun();
    let theirs = w.links[0].1;
    for _ in 0..2 {
        w.p.session.peer_claims(theirs, &Claim::from(&hello), w.now);
    }
    w.carry(|m| matches!(m, PeerMessage::Bind(_)));
    assert_eq!((greeted(&w), w.d.up.len(), w.p.up.len()), (vec![('d', "Hello"), ('p', "Hello")], 1, 0));
    w.resume();
    w.carry(nothing);
    assert_eq!((w.p.up.len(), greeted(&w).len(), w.phase(pull)), (1, 2, Some(Phase::Read)));
    // Told too late, or of a link that is gone: nothing.
    w.p.session.peer_claims(theirs, &Claim::from(&hello), w.now);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    w.cut();
    w.p.session.peer_claims(theirs, &Claim::from(&hello), w.now);
    works(&mut w, 2);
    // Not whom we meet; nothing of ours is told, and what follows is not looked at.
    let (mut w, pull, hello) = begun();
    let other = Claim { identity: ModelIdentity::new("another").unwrap(), ..Claim::from(&hello) };
    w.p.session.peer_claims(w.links[0].1, &other, w.now);
    w.carry(nothing);
    assert_eq!((greeted(&w), w.links.len()), (vec![('d', "Hello"), ('p', "Refused")], 0));
    assert!(w.end_of(pull).contains("Handshake"), "{}", w.end_of(pull));
    // What it says in the end is not what it has begun with, or makes no sense: the answer was given in vain.
    for digest in [true, false] {
        let (mut w, _, hello) = begun();
        let theirs = w.links[0].1;
        w.p.session.peer_claims(theirs, &Claim::from(&hello), w.now);
        if digest {
            let wrong = Hello { digest: Digest::from_bytes([9; 32]), ..hello };
            w.p.session.peer_message(theirs, PeerMessage::Hello(wrong), w.now);
        } else {
            w.p.session.link_fault(theirs, "it does not decode", w.now);
        }
        w.carry(nothing);
        assert_eq!((w.links.len(), w.p.up.len()), (0, 0));
        assert_eq!(greeted(&w), [('d', "Hello"), ('p', "Hello"), ('p', "Refused")]);
    }
}

/// Both connect at once, and read from each other: two links, two requests, each over the link that its reader has made.
#[test]
fn both_connect_at_once() {
    let mut w = Pair::leased();
    let (of_p, of_d) = (w.offer(1, Ttl::Usual), w.d.offer(1, w.now));
    let pull = w.pull(&of_p);
    let groups = other_dst_groups(90);
    let back = w.p.session.pull(PullWish { groups, ..wish(&of_d) }, w.now);
    w.carry(nothing);
    assert_eq!((w.links.len(), w.d.up.len(), w.p.up.len()), (2, 2, 2));
    w.read(pull);
    for rank in 0..4 {
        let result = report(&super::pair::sources_of(&mut w.p, back, rank));
        w.p.session.rank_message(w.p.rank_links[rank], FromRank::Pulled { pull: back, result }, w.now);
    }
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    assert!(matches!(&w.p.ended[..], [(id, Ok(_))] if *id == back));
    assert_eq!((w.p.closed.clone(), w.d.closed.clone()), (vec![(of_p, Closing::Read)], vec![(of_d, Closing::Read)]));
    // They meet again by digests both ways, and nothing is left once the links are gone.
    w.cut();
    works(&mut w, 2);
    w.cut();
    assert!(is_clean(&w.p.session) && is_clean(&w.d.session));
}

/// RS-04: a link of which nothing is asked is closed in time, by a clock and nothing else; one that is in use is not.
#[test]
fn rs_04_idle_links_are_closed_and_busy_ones_are_not() {
    let idle = |id, epoch, ranks| OwnerConfig { idle: Some(60 * SECOND), ..config(id, epoch, ranks) };
    for (at_d, at_p) in [(true, true), (true, false), (false, true)] {
        let side =
            |on, id, epoch, ranks| Side::with(if on { idle(id, epoch, ranks) } else { config(id, epoch, ranks) });
        let mut w = Pair::of(side(at_p, "p", 1, 4), side(at_d, "d", 2, 2));
        // A long read, with beats: nobody is sent away.
        let fence = w.offer(1, Ttl::For(30 * SECOND));
        let pull = w.pull(&fence);
        w.carry(nothing);
        for _ in 0..100 {
            w.pass(5 * SECOND, nothing);
        }
        assert_eq!((w.phase(pull), w.links.len()), (Some(Phase::Read), 1));
        w.read(pull);
        w.carry(nothing);
        let (p, d) = (w.p.session.manifest().unwrap().digest(), w.d.session.manifest().unwrap().digest());
        w.d.orders.clear();
        for _ in 0..59 {
            w.pass(SECOND, nothing);
            assert_eq!(w.links.len(), 1);
        }
        // It was last looked at within the time before.
        // Who has made it closes it first; who has accepted it, after twice the time.
        for _ in 0..if at_d { 61 } else { 130 } {
            w.pass(SECOND, nothing);
        }
        assert_eq!((w.links.len(), w.d.down.len(), w.p.down.len()), (0, 1, 1), "{at_d}, {at_p}");
        assert!(is_clean(&w.p.session) && is_clean(&w.d.session));
        assert_eq!(w.d.orders.iter().filter(|(_, m)| *m == ToRank::Forget(p)).count(), 2, "its ranks forget it");
        assert!(w.d.session.links.remembers(p) && w.p.session.links.remembers(d));
        // And the next request makes another, as among old acquaintances.
        w.said.clear();
        works(&mut w, 2);
        assert_eq!(greeted(&w), [('d', "Again"), ('p', "Again")]);
    }
}

/// RS-05: whatever becomes of a link, the next request has a new one.
#[test]
fn rs_05_the_next_request_has_a_new_link() {
    let mut w = Pair::leased();
    for lease in 0..4u128 {
        let fence = w.offer(100 + lease, Ttl::Usual);
        let pull = w.pull(&fence);
        w.carry(nothing);
        match lease {
            0 => w.cut(),
            1 => {
                let (ours, _) = w.links[0];
                w.p.session.link_fault(w.links[0].1, "the frame is longer than it may be", w.now);
                w.carry(nothing);
                assert!(!w.d.session.links.exists(ours));
            }
            2 => {
                let theirs = w.links[0].1;
                w.tell_d(theirs, PeerMessage::ManifestWanted);
                w.tell_d(theirs, PeerMessage::ManifestWanted);
                w.carry(nothing);
            }
            _ => {
                let ours = w.links[0].0;
                w.tell_p(ours, PeerMessage::Refused(vec!["no".into()]));
                w.carry(nothing);
            }
        }
        w.stop(pull);
        w.carry(nothing);
        assert!(["Link", "Handshake"].contains(&w.end_of(pull).as_str()), "{}", w.end_of(pull));
        assert_eq!(w.p.closed.iter().filter(|(f, _)| *f == fence).count(), 1);
        let next = w.one_request(lease + 1);
        assert_eq!(w.end_of(next), "Delivered");
    }
    assert_eq!((w.d.up.len(), w.d.down.len()), (5, 4));
}

/// Where our own settings allow no link, whoever waits for it fails at once, and is told what to set; who comes next asks anew.
#[test]
fn a_link_that_may_not_be_made_fails_who_waits_at_once() {
    let mut w = Pair::leased();
    w.answers = false;
    let fences: Vec<Fence> = (1..4).map(|lease| w.offer(lease, Ttl::Usual)).collect();
    let pulls: Vec<PullId> = fences.iter().map(|fence| w.pull(fence)).collect();
    w.carry(nothing);
    let link = w.d.connects.remove(0);
    assert!(w.d.connects.is_empty());
    w.d.session.link_forbidden(link, "set this", w.now);
    w.carry(nothing);
    for pull in pulls {
        let cause = &w.failed(pull).cause;
        let FailureCause::Unreachable { address, reason } = cause else { panic!("{cause}") };
        assert_eq!((reason.as_str(), cause.kind()), ("set this", "unreachable"));
        assert!(cause.to_string().contains(address), "{cause}");
    }
    assert!(w.d.session.roads.is_empty() && is_clean(&w.d.session));
    w.pass(10 * SECOND, nothing);
    assert!(w.d.connects.is_empty(), "nothing is tried again by itself");
    let fence = w.offer(5, Ttl::Usual);
    let pull = w.pull(&fence);
    w.answers = true;
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    w.d.session.link_forbidden(link, "set this", w.now);
}

/// What an end has taken to prove who it is counts for the time that the handshake may take.
#[test]
fn a_handshake_has_one_limit() {
    let mut w = Pair::leased();
    w.now = 10 * SECOND;
    let at_once = w.p.session.accept(None, w.now);
    let late = w.p.session.accept_after(SECOND / 10 * 7, None, w.now);
    let too_late = w.p.session.accept_after(20 * SECOND, None, w.now);
    let exists = |w: &mut Pair, time: Duration| {
        w.p.session.step(w.now + time);
        [at_once, late, too_late].map(|link| w.p.session.links.exists(link))
    };
    assert_eq!(exists(&mut w, SECOND / 10), [true, true, false]);
    assert_eq!(exists(&mut w, SECOND / 10 * 4), [true, false, false]);
    assert_eq!(exists(&mut w, SECOND), [false, false, false]);
}

/// HS-08: a peer that says nothing, or too little, costs its link only, and is tried again until nobody waits.
#[test]
fn hs_08_silent_and_refusing_peers() {
    let mut w = Pair::leased();
    let fence = w.offer(1, Ttl::Usual);
    let pull = w.pull_as(PullWish { deadline: 3 * SECOND, ..wish(&fence) });
    w.carry(losing(&["Hello"]));
    for _ in 0..40 {
        w.pass(SECOND / 10, losing(&["Hello"]));
    }
    let FailureCause::Link { reason, .. } = &w.failed(pull).cause else { panic!("{}", w.failed(pull)) };
    assert!(reason.contains("no handshake within 1s"), "{reason}");
    assert!(w.d.failed.len() >= 2 && w.d.failed.iter().all(|refused| !refused), "{:?}", w.d.failed);
    w.kept.clear();
    for _ in 0..20 {
        w.pass(SECOND / 10, losing(&["Hello"]));
    }
    assert!(w.d.session.roads.is_empty() && w.links.is_empty());
    // One that refuses for a reason is not tried again, and the next request asks it anew.
    let mut w = Pair::of(Side::new("p", 1, 4), Side::new("d", 2, 2));
    w.d.session.config.identity = ModelIdentity::new("n").unwrap();
    let other = OwnerConfig { identity: ModelIdentity::new("n").unwrap(), ..config("d", 2, 2) };
    w.d = Side::with(other);
    let fences = [w.offer(1, Ttl::Usual), w.offer(2, Ttl::Usual), w.offer(3, Ttl::Usual)];
    let pulls = fences.clone().map(|fence| w.pull(&fence));
    w.carry(nothing);
    for pull in pulls {
        let FailureCause::Handshake { reasons, .. } = &w.failed(pull).cause else { panic!("a mismatch") };
        assert!(reasons[0].starts_with("model identity"), "{reasons:?}");
        assert_eq!(w.failed(pull).report.groups.len(), 1, "what was cached is told");
    }
    assert_eq!((w.d.failed.clone(), w.d.ended.len(), w.links.len()), (vec![true], 3, 0));
    let next = w.pull(&fences[0]);
    w.carry(nothing);
    assert_eq!((w.end_of(next).as_str(), w.d.failed.len()), ("Handshake", 2));
    assert!(is_clean(&w.d.session));
}
