//! The consumer's side: how requests end.

use super::*;

/// For each event: what a pull in each state has ended as right after it, and at last.
#[test]
fn pull_state_by_event() {
    let table: [(&str, [(&str, &str); 5]); 12] = [
        // Linking, Asking, Reading, Stopping (cancelled before), Releasing
        (
            "cancel",
            [
                ("Cancelled", "Cancelled"),
                ("Cancelled", "Cancelled"),
                ("-", "Cancelled"),
                ("-", "Cancelled"),
                ("Cancelled", "Cancelled"),
            ],
        ),
        (
            "deadline",
            [
                ("Link", "Link"),
                ("Deadline", "Deadline"),
                ("-", "Deadline"),
                ("Cancelled", "Cancelled"),
                ("Deadline", "Deadline"),
            ],
        ),
        ("link lost", [("-", "Link"), ("Link", "Link"), ("-", "Link"), ("-", "Cancelled"), ("Link", "Link")]),
        (
            "rank lost",
            [
                ("RankLost", "RankLost"),
                ("RankLost", "RankLost"),
                ("-", "Ranks"),
                ("-", "Cancelled"),
                ("RankLost", "RankLost"),
            ],
        ),
        ("rank failed", [("-", "Link"), ("-", "Deadline"), ("-", "Ranks"), ("-", "Cancelled"), ("-", "Deadline")]),
        (
            "rank not named",
            [("-", "Link"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("-", "Deadline")],
        ),
        (
            "bound again",
            [("Handshake", "Handshake"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("-", "Deadline")],
        ),
        (
            "refused",
            [
                ("Handshake", "Handshake"),
                ("Refused", "Refused"),
                ("-", "Deadline"),
                ("-", "Cancelled"),
                ("-", "Deadline"),
            ],
        ),
        (
            "refused, other lease",
            [("Handshake", "Handshake"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("-", "Deadline")],
        ),
        (
            "held",
            [
                ("Handshake", "Handshake"),
                ("-", "Deadline"),
                ("-", "Deadline"),
                ("-", "Cancelled"),
                ("Delivered", "Delivered"),
            ],
        ),
        (
            "stale",
            [("Handshake", "Handshake"), ("-", "Deadline"), ("-", "Deadline"), ("-", "Cancelled"), ("Stale", "Stale")],
        ),
        ("shut down", [("Shutdown", "Shutdown"); 5]),
    ];
    for (event, columns) in table {
        for (state, (at_once, at_last)) in STATES.into_iter().zip(columns) {
            let mut w = reach(state);
            assert_eq!(w.ended(), "-", "{state}");
            happen(&mut w, event);
            assert_eq!(w.ended(), at_once, "{state}, {event}: at once");
            w.settle();
            assert_eq!(w.ended(), at_last, "{state}, {event}: at last");
            assert!(w.p.closed.len() <= 1, "a lease ends once");
            let reads = ["Reading", "Stopping"].contains(&state);
            let expected: &[u32] = match event {
                "rank lost" if reads => &[1],
                "shut down" if reads => &[0, 1],
                // The ranks had not stopped when the grace was over, too.
                "deadline" if state == "Stopping" => &[0, 1],
                _ => &[],
            };
            let expected: Vec<RankId> = expected.iter().map(|&rank| RankId::new(rank)).collect();
            let in_doubt = w.d.ended[0].1.as_ref().err().map(|f| f.report.in_doubt.clone()).unwrap_or_default();
            assert_eq!(in_doubt, expected, "{state}, {event}: in doubt");
            let (pulls, leases) = (&w.d.session.pulls, &w.p.session.leases);
            let lied = (state, event) == ("Asking", "refused");
            assert!(pulls.is_empty() && (leases.is_idle() || lied), "{state}, {event}: nothing is left over");
            // A producer that has bound and then says that it has not gets its blocks back when the link ends.
            if state != "Linking" && !lied {
                assert_eq!(w.p.closed.len(), 1, "{state}, {event}: nothing is read any more, so the lease is over");
            }
        }
    }
}

#[test]
fn the_way_through_ends_as_delivered_and_frees_the_lease() {
    let mut w = reach("Reading");
    for (link, order) in w.d.pulls() {
        assert_eq!(order.pull, w.pull);
        assert_eq!(order.request.src, src_groups(), "the producer's blocks, as it offered them");
        let told = |(l, m): &(RankLinkId, ToRank)| *l == link && matches!(m, ToRank::Peer(_));
        assert_eq!(w.d.orders.iter().filter(|o| told(o)).count(), 1, "a rank is told of an engine once");
    }
    w.say(0, report(&[0, 1]));
    w.carry(|_| false);
    assert_eq!((w.ended(), w.p.closed.len()), ("-".into(), 0), "one rank still reads");
    w.say(1, report(&[2, 3]));
    w.carry(|_| false);
    assert_eq!(w.ended(), "Delivered");
    assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Read)]);
    // The lease is over for good.
    let again = w.d.session.pull(wish(&w.fence), w.now);
    w.carry(|_| false);
    let last = w.d.ended.last().unwrap();
    assert_eq!(last.0, again);
    let cause = &last.1.as_ref().unwrap_err().cause;
    assert_eq!(*cause, FailureCause::Refused(BindRefusal::UnknownLease));
}

/// FR-01: a request does not end while a sibling of the failed rank still reads, and all faults are told.
#[test]
fn fr_01_a_request_ends_when_the_last_rank_has_stopped() {
    let mut w = reach("Reading");
    w.say(0, Err(fault(Stage::Read, false)));
    w.carry(|_| false);
    assert_eq!((w.ended(), w.p.closed.len()), ("-".into(), 0));
    let cancelled = |(l, m): &(RankLinkId, ToRank)| *l == w.d.rank_links[1] && *m == ToRank::Cancel(w.pull);
    assert!(w.d.orders.iter().any(cancelled), "the sibling is told to stop");
    w.say(1, report(&[2, 3]));
    w.carry(|_| false);
    assert_eq!(w.ended(), "Ranks");
    let failed = w.d.ended[0].1.as_ref().unwrap_err();
    assert_eq!(failed.report.faults, [(RankId::new(0), fault(Stage::Read, false))]);
    assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Abandoned)]);
}

/// A rank that says that it read other sources than the map names delivers nothing.
#[test]
fn other_sources_than_the_named_ones_are_no_delivery() {
    for sources in [&[2][..], &[2, 3, 0], &[0, 1], &[]] {
        let mut w = reach("Reading");
        w.say(0, report(&[0, 1]));
        w.say(1, report(sources));
        w.carry(|_| false);
        assert_eq!(w.ended(), "NotAssured", "{sources:?}");
        assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Abandoned)]);
    }
}

#[test]
fn ranks_that_do_not_stop_in_time_are_in_doubt() {
    let mut w = reach("Stopping");
    w.say(0, Err(fault(Stage::Cancelled, false)));
    w.now += 2 * SECOND;
    w.d.session.step(w.now);
    w.carry(|_| false);
    assert_eq!(w.ended(), "Cancelled");
    assert_eq!(w.d.ended[0].1.as_ref().unwrap_err().report.in_doubt, [RankId::new(1)]);
    // Its three blocks are nobody else's until the rank says that it has stopped, and knows it.
    let overlaps = |w: &mut World| {
        let fence = w.p.offer(u128::from(w.d.ended.len() as u64), w.now);
        let pull = w.d.session.pull(wish(&fence), w.now);
        w.d.take();
        let ended = w.d.ended.iter().find(|(id, _)| *id == pull);
        ended.is_some_and(|(_, r)| matches!(&r.as_ref().unwrap_err().cause, FailureCause::Overlap(_)))
    };
    assert_eq!(w.d.session.quarantined(), 3);
    assert!(overlaps(&mut w));
    w.say(0, Err(fault(Stage::Cancelled, false)));
    w.say(1, Err(fault(Stage::Read, true)));
    assert_eq!(w.d.session.quarantined(), 3, "rank 0 was not waited for, and rank 1 doesn't know");
    w.say(1, Err(fault(Stage::Cancelled, false)));
    assert_eq!(w.d.session.quarantined(), 0);
    assert!(!overlaps(&mut w));
}

/// Ranks that have stopped are told as they ended, ranks that have not, or are gone, are in doubt.
#[test]
fn shut_down_tells_of_every_rank() {
    let in_doubt = |w: &World| {
        let failed = w.d.ended[0].1.as_ref().unwrap_err();
        assert_eq!(failed.cause, FailureCause::Shutdown);
        (failed.report.in_doubt.clone(), failed.report.pairs.len())
    };
    let ranks = |list: &[u32]| list.iter().map(|&r| RankId::new(r)).collect::<Vec<_>>();
    let mut w = reach("Reading");
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (ranks(&[0, 1]), 0));
    let mut w = reach("Reading");
    w.say(0, report(&[0, 1]));
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (ranks(&[1]), 2), "what was read is told");
    // A rank that died while it read is not forgotten.
    let mut w = reach("Reading");
    w.d.session.rank_closed(w.d.rank_links[0], "killed", w.now);
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (ranks(&[0, 1]), 0));
    let mut w = reach("Stopping");
    w.say(0, Err(fault(Stage::Read, true)));
    w.say(1, Err(fault(Stage::Cancelled, false)));
    w.carry(|_| false);
    assert_eq!(w.ended(), "Cancelled");
    assert_eq!(w.d.ended[0].1.as_ref().unwrap_err().report.in_doubt, ranks(&[0]));
    let mut w = reach("Releasing");
    happen(&mut w, "shut down");
    assert_eq!(in_doubt(&w), (Vec::new(), 4));
}

/// A rank that dies after it has read its share fails the request, since nobody can use its bytes.
#[test]
fn a_rank_that_dies_after_its_share_fails_the_request() {
    let mut w = reach("Reading");
    w.say(0, report(&[0, 1]));
    w.d.session.rank_closed(w.d.rank_links[0], "killed", w.now);
    w.carry(|_| false);
    assert_eq!(w.ended(), "-", "the other still reads");
    w.say(1, report(&[2, 3]));
    w.carry(|_| false);
    assert_eq!(w.ended(), "RankLost");
    assert_eq!(w.p.closed, [(w.fence.clone(), Closing::Abandoned)]);
    let failed = w.d.ended[0].1.as_ref().unwrap_err();
    assert!(failed.report.in_doubt.is_empty(), "both had stopped");
}
