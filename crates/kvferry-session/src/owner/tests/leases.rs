//! The producer's side: leases, and what is asked about them.

use super::*;

/// A question that lists other groups than its engine has, or too many blocks, is answered and goes to no rank.
#[test]
fn digest_questions_that_do_not_fit_are_refused() {
    let mut w = reach("Reading");
    let (_, theirs) = w.link.unwrap();
    let many = kvferry_geometry::request::BlockTable::new(
        0,
        &vec![kvferry_geometry::units::BlockId::ZERO; usize::try_from(MAX_REQUEST_BLOCKS).unwrap() + 1],
    );
    for groups in
        [Vec::new(), [dst_groups(), dst_groups()].concat(), vec![DstPaged { table: many, cached: Tokens::ZERO }.into()]]
    {
        let question = question(&w, groups);
        w.p.orders.clear();
        w.p.session.peer_message(theirs, PeerMessage::RunDigest(question), w.now);
        w.p.take();
        assert!(w.p.orders.is_empty());
        let Some((_, PeerMessage::RunDigestAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
        assert!(answer.pieces.is_err());
    }
}

fn question(w: &World, groups: Vec<DstGroup>) -> kvferry_proto::peer::RunDigest {
    let (src, dst, tokens) = (RankId::new(0), RankId::new(0), Tokens::new(TOKENS));
    let windows = vec![kvferry_proto::peer::Window { start: 0, len: 64, piece: 64 }];
    kvferry_proto::peer::RunDigest { fence: w.fence.clone(), src, dst, tokens, groups, windows }
}

/// Digests are asked for once at a time, for pairs of the map only, and not after the lease is closed. Answers go to a
/// rank only if it has asked.
#[test]
fn digest_questions_are_one_for_each_pair_and_end_with_the_lease() {
    let mut w = reach("Reading");
    let (ours, theirs) = w.link.unwrap();
    let ask = |w: &mut World, src: u32, dst: u32| {
        let mut q = question(w, dst_groups());
        (q.src, q.dst) = (RankId::new(src), RankId::new(dst));
        w.p.orders.clear();
        w.p.session.peer_message(theirs, PeerMessage::RunDigest(q), w.now);
        w.p.take();
        w.p.orders.iter().filter(|(_, m)| matches!(m, ToRank::Digest(_))).count()
    };
    assert_eq!(ask(&mut w, 0, 0), 1);
    assert!(w.p.to_peer.is_empty());
    assert_eq!(ask(&mut w, 0, 0), 0, "the same again");
    assert_eq!(ask(&mut w, 0, 1), 0, "rank 1 reads nothing from rank 0");
    assert_eq!(ask(&mut w, 0, 77), 0, "no such rank");
    assert_eq!(w.p.to_peer.len(), 3, "each is told why");
    w.p.to_peer.clear();
    w.p.orders.clear();
    assert!(w.p.session.withdraw(w.fence.lease, w.now));
    w.p.take();
    assert_eq!(w.p.orders, [(w.p.rank_links[0], ToRank::CancelDigest(1))]);
    assert!(w.p.session.leases.is_idle() && w.p.session.asks.is_empty());
    assert!(matches!(w.p.to_peer.pop_front(), Some((_, PeerMessage::Closed(_)))));
    let Some((_, PeerMessage::RunDigestAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
    assert!(answer.pieces.is_err());
    // Nobody at the consumer has asked.
    w.d.orders.clear();
    w.d.session.peer_message(ours, PeerMessage::RunDigestAnswer(answer.clone()), w.now);
    w.d.take();
    assert!(w.d.orders.is_empty(), "{:?}", w.d.orders);
    let wanted = FromRank::DigestWanted { pull: w.pull, src: RankId::new(0), windows: Vec::new() };
    w.d.session.rank_message(w.d.rank_links[0], wanted, w.now);
    for expected in [1, 0] {
        w.d.take();
        w.d.orders.clear();
        w.d.session.peer_message(ours, PeerMessage::RunDigestAnswer(answer.clone()), w.now);
        w.d.take();
        assert_eq!(w.d.orders.len(), expected, "one answer for one question");
    }
}

/// A bind with another salt than the lease's is refused, and makes no map for it.
#[test]
fn invented_salts_are_refused() {
    let mut w = reach("Asking");
    let (_, theirs) = w.link.unwrap();
    let fence = w.p.offer(5, w.now);
    let due = kvferry_proto::names::pairing_salt(&EngineId::new("d").unwrap(), fence.lease, fence.attempt);
    let peer_map =
        w.p.session.serving(theirs).unwrap().1.unwrap().map(PeerOptions { salt: due, stripe: false }).unwrap().digest();
    for (salt, bound) in [(due + 1, false), (u64::MAX, false), (due, true)] {
        let bind = kvferry_proto::peer::Bind { fence: fence.clone(), content_key: key(1), salt, peer_map };
        w.p.take();
        w.p.to_peer.clear();
        w.p.session.peer_message(theirs, PeerMessage::Bind(bind), w.now);
        w.p.take();
        let Some((_, PeerMessage::BindAnswer(answer))) = w.p.to_peer.pop_front() else { panic!("an answer") };
        assert_eq!(matches!(answer, BindAnswer::Bound(_)), bound, "{answer:?}");
    }
}

/// Every lease ends once, also with the owner.
#[test]
fn shut_down_ends_every_lease() {
    let mut w = reach("Reading");
    let fence = w.p.offer(5, w.now);
    w.p.session.shut_down(w.now);
    w.p.take();
    assert_eq!(w.p.closed, [(fence, Closing::Withdrawn), (w.fence.clone(), Closing::Withdrawn)]);
}

/// SEC-03: messages about leases that the sender has not bound do nothing.
#[test]
fn sec_03_another_peers_lease_cannot_be_released_or_digested() {
    let mut w = reach("Reading");
    // A third engine, greeted in order.
    let mut e = Side::new("e", 3, 2);
    let theirs = w.p.session.accept(None, w.now);
    let mut other = wish(&w.fence);
    other.content_key = key(2);
    e.session.pull(other, w.now);
    e.take();
    let ours = e.connects.remove(0);
    assert!(e.session.link_opened(ours, None, w.now));
    for _ in 0..4 {
        e.take();
        for (_, m) in std::mem::take(&mut e.to_peer) {
            w.p.session.peer_message(theirs, m, w.now);
        }
        w.p.take();
        for (link, m) in std::mem::take(&mut w.p.to_peer) {
            assert_eq!(link, theirs, "nothing is said to the one who reads");
            e.session.peer_message(ours, m, w.now);
        }
    }
    e.take();
    let cause = &e.ended[0].1.as_ref().unwrap_err().cause;
    assert_eq!(*cause, FailureCause::Refused(BindRefusal::AlreadyBound));
    let release =
        kvferry_proto::peer::Release { fence: w.fence.clone(), reads: kvferry_proto::peer::ReadsEnd::Complete };
    w.p.session.peer_message(theirs, PeerMessage::Release(release), w.now);
    w.p.take();
    let (_, answer) = w.p.to_peer.pop_front().unwrap();
    assert!(matches!(answer, PeerMessage::ReleaseAnswer(ReleaseAnswer { verdict: Verdict::Stale, .. })));
    let digest = kvferry_proto::peer::RunDigest {
        fence: w.fence.clone(),
        src: RankId::new(0),
        dst: RankId::new(0),
        tokens: Tokens::new(TOKENS),
        groups: dst_groups(),
        windows: Vec::new(),
    };
    w.p.orders.clear();
    w.p.session.peer_message(theirs, PeerMessage::RunDigest(digest), w.now);
    w.p.take();
    assert!(w.p.orders.is_empty(), "no rank digests for it");
    w.p.to_peer.clear();
    // The one who has bound it is none the worse.
    w.all_read();
    w.carry(|_| false);
    assert_eq!(w.ended(), "Delivered");
}
