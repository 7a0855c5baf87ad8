//! Joining ranks and links to other owners.

use super::*;

/// An engine that no frame can describe is refused when it is complete, and its ranks live on.
#[test]
fn an_engine_too_long_for_a_frame_is_a_join_error() {
    let ranks = 16;
    let mut p = OwnerSession::new(config("p", 1, ranks)).unwrap();
    for (rank, manifest) in (0u32..).map(RankId::new).zip(shape(ranks).2) {
        let link = p.accept_rank(Duration::ZERO);
        let engine = EngineId::new("p").unwrap();
        let blob = vec![7; kvferry_proto::manifest::MAX_BLOB].into();
        let join = RankJoin { engine, rank, epoch: Epoch::new(0), manifest, blob };
        p.rank_message(link, FromRank::Join(join), Duration::ZERO);
    }
    let mut refused = 0;
    while let Some(effect) = p.next_effect() {
        match effect {
            Effect::JoinRefused(JoinError::TooLong(_)) => refused += 1,
            Effect::SendRank { message: ToRank::Refused(_), .. } | Effect::CloseRank { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((refused, p.missing()), (1, vec![RankId::new(ranks - 1)]));
}

/// A timeout beyond all reason is as good as none.
#[test]
fn endless_timeouts_are_no_overflow() {
    let mut config = config("p", 1, 4);
    (config.handshake, config.grace) = (Duration::MAX, Duration::MAX);
    let mut p = OwnerSession::new(config).unwrap();
    p.accept(None, SECOND);
    p.accept_rank(SECOND);
    assert_eq!(p.step(SECOND), Some(Duration::MAX));
    let mut w = reach("Reading");
    w.d.session.config.grace = Duration::MAX;
    w.d.session.cancel(w.pull, SECOND);
    w.carry(|_| false);
    assert_eq!(w.ended(), "-");
}

/// HS-10: a hello that comes before our own ranks have joined waits for them.
#[test]
fn hs_10_a_hello_before_the_ranks_waits() {
    let mut d = Side::new("d", 2, 2);
    let mut p = OwnerSession::new(config("p", 1, 4)).unwrap();
    let link = p.accept(None, Duration::ZERO);
    let fence = kvferry_proto::lease::first_attempt(EngineId::new("p").unwrap(), Epoch::new(1), LeaseId::new(1));
    d.session.pull(wish(&fence), Duration::ZERO);
    d.take();
    let ours = d.connects.remove(0);
    assert!(d.session.link_opened(ours, None, Duration::ZERO));
    d.take();
    let (_, hello) = d.to_peer.pop_front().unwrap();
    p.peer_message(link, hello, Duration::ZERO);
    assert!(p.next_effect().is_none(), "no answer yet, and no refusal");
    let (_, _, manifests) = shape(4);
    for (rank, manifest) in (0u32..).map(RankId::new).zip(manifests) {
        let rank_link = p.accept_rank(Duration::ZERO);
        let engine = EngineId::new("p").unwrap();
        let join = RankJoin { engine, rank, epoch: Epoch::new(0), manifest, blob: Arc::from([1]) };
        p.rank_message(rank_link, FromRank::Join(join), Duration::ZERO);
    }
    let mut answered = false;
    while let Some(effect) = p.next_effect() {
        if let Effect::SendPeer { message, .. } = effect {
            assert!(matches!(message, PeerMessage::Hello(_)));
            answered = true;
        }
    }
    assert!(answered);
    // And it was heard: a bind is answered now, if only by a refusal.
    let bind = kvferry_proto::peer::Bind { fence, content_key: key(1), salt: 0, peer_map: Digest::from_bytes([0; 32]) };
    p.peer_message(link, PeerMessage::Bind(bind), Duration::ZERO);
    assert!(matches!(p.next_effect(), Some(Effect::SendPeer { message: PeerMessage::BindAnswer(_), .. })));
}

/// RS-01: the producer was restarted at its old address. What its former life offered is stale, and it can be read anew.
#[test]
fn rs_01_a_restarted_producer_is_a_new_one() {
    let mut w = reach("Reading");
    let before = w.fence.clone();
    happen(&mut w, "link lost");
    w.settle();
    assert_eq!(w.ended(), "Link");
    w.p = Side::new("p", 100, 4);
    let stale = w.d.session.pull(wish(&before), w.now);
    w.d.take();
    w.connect();
    w.carry(|_| false);
    let cause = |w: &World, pull| {
        let ended = w.d.ended.iter().find(|e| e.0 == pull).unwrap();
        name(&ended.1.as_ref().unwrap_err().cause)
    };
    assert_eq!(cause(&w, stale), "StaleEpoch");
    let fence = w.p.offer(5, w.now);
    w.d.orders.clear();
    w.pull = w.d.session.pull(wish(&fence), w.now);
    w.carry(|_| false);
    w.all_read();
    w.carry(|_| false);
    assert!(w.d.ended.iter().any(|(pull, result)| *pull == w.pull && result.is_ok()));
}

/// HS-08: a link that can't be made is tried again, later each time, for all who wait for it; each fails once, by its own
/// deadline, and says what was wrong. The next one begins anew.
#[test]
fn hs_08_all_who_wait_for_a_link_fail_once() {
    let mut d = Side::new("d", 2, 2);
    let fence =
        |lease| kvferry_proto::lease::first_attempt(EngineId::new("p").unwrap(), Epoch::new(1), LeaseId::new(lease));
    let wish = |lease: u32| PullWish {
        groups: other_dst_groups(lease),
        deadline: SECOND * (1 + lease),
        ..wish(&fence(lease.into()))
    };
    let pulls: Vec<PullId> = (0..3).map(|lease| d.session.pull(wish(lease), Duration::ZERO)).collect();
    d.take();
    assert_eq!(d.connects.len(), 1, "one link for all");
    let (mut now, mut attempts) = (Duration::ZERO, Vec::new());
    while let Some(link) = d.connects.pop() {
        attempts.push(now.as_millis());
        d.session.link_closed(link, "connection refused", now);
        d.session.link_closed(link, "again", now);
        assert!(!d.session.link_opened(link, None, now), "what comes too late is not wanted");
        d.take();
        while d.connects.is_empty() {
            let Some(next) = d.session.step(now) else { break };
            now = next;
            d.session.step(now);
            d.take();
        }
    }
    // 100 ms after the first, then twice as long each time, until nobody waits.
    assert_eq!(attempts, [0, 100, 300, 700, 1500]);
    assert_eq!(d.failed, [false; 5], "each attempt is told of once, however many wait");
    let failed: Vec<_> = d.ended.iter().map(|(pull, r)| (*pull, name(&r.as_ref().unwrap_err().cause))).collect();
    assert_eq!(failed, pulls.iter().map(|pull| (*pull, "Link".to_owned())).collect::<Vec<_>>());
    assert!(d.ended[2].1.as_ref().unwrap_err().to_string().contains("connection refused"));
    assert_eq!(d.session.roads.waiting(), 0);
    d.session.pull(wish(9), now);
    d.take();
    assert_eq!((d.ended.len(), d.connects.len()), (3, 1), "the next one begins anew, at once");
}

/// Whoever connects and says nothing is sent away, and harms nobody.
#[test]
fn silent_links_are_closed_in_time() {
    let mut p = Side::new("p", 1, 4);
    let (link, rank_link) = (p.session.accept(None, SECOND), p.session.accept_rank(SECOND));
    assert_eq!(p.session.step(SECOND), Some(2 * SECOND));
    while p.session.next_effect().is_some() {}
    assert_eq!(p.session.step(2 * SECOND), None);
    let (mut peer_closed, mut rank_closed) = (false, false);
    while let Some(effect) = p.session.next_effect() {
        peer_closed |= matches!(effect, Effect::ClosePeer { link: l } if l == link);
        rank_closed |= matches!(effect, Effect::CloseRank { link: l } if l == rank_link);
    }
    assert!(peer_closed && rank_closed);
}
