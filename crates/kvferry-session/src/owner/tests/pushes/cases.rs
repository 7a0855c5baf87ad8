//! What was reported of pushes elsewhere, by case: whoever gives up, is not heard, or is heard too late.

use std::cell::Cell;

use kvferry_proto::push::Progress;

use super::*;

/// A producer that is told to stop and never reports: a thousand requests are given up, and every block is back each time, after the age
/// that the engine vouches for. What comes to be said long after that changes nothing, for nobody.
#[test]
fn fr_05_a_thousand_aborts_give_every_block_back() {
    let usual = |id, epoch, ranks| OwnerConfig { reclaim_after: Some(60 * SECOND), ..config(id, epoch, ranks) };
    let mut w = Pair::of(Side::with(usual("p", 1, 4)), Side::with(usual("d", 2, 2)));
    let mut silent = Vec::new();
    for n in 0..1000 {
        let fence = w.offer(n + 1, Ttl::Usual);
        let pull = w.push(&fence);
        assert_eq!(w.phase(pull), Some(Phase::Write), "request {n}");
        silent.push(w.p.pushes()[&0].push);
        w.p.orders.clear();
        let now = w.now;
        w.d.session.cancel(pull, now);
        w.carry(nothing);
        assert_eq!(w.end_of(pull), "-", "a write may land");
        w.pass(2 * SECOND, nothing);
        assert_eq!((w.end_of(pull), w.failed(pull).report.writers_in_doubt.len()), ("Cancelled".into(), 4));
        w.pass(59 * SECOND, nothing);
        assert!(w.d.session.quarantined() > 0, "request {n}");
        w.pass(SECOND, nothing);
        assert!(w.d.session.quarantined() == 0 && w.d.session.loans.is_empty(), "request {n}");
    }
    assert_eq!(w.d.reclaimed.len(), 1000);
    // All report while the next request writes into the same blocks.
    let next = w.offer(5000, Ttl::Usual);
    let pull = w.push(&next);
    let (lent, own) = (w.d.session.loans.lent(), w.p.pushes()[&0].push);
    for push in silent {
        for rank in 0..4 {
            w.pushed_as(rank, push, Err(fault(Stage::Cancelled, false)));
        }
    }
    w.carry(nothing);
    assert_eq!((w.phase(pull), w.d.session.loans.lent()), (Some(Phase::Write), lent));
    assert!(w.d.contradictions.is_empty(), "{:?}", w.d.contradictions);
    for rank in 0..4 {
        let end = wrote(&mut w, pull, rank);
        w.pushed_as(usize::try_from(rank).unwrap(), own, end);
    }
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
    assert!(w.is_quiet());
}

/// Failures that are told late, or of requests that never were, recreate nothing.
#[test]
fn fr_03_late_and_foreign_ends_recreate_nothing() {
    let (mut w, fence, pull) = world();
    w.pushed(2, Err(fault(Stage::Submit, false)));
    for rank in [0, 1, 3] {
        w.carry(nothing);
        assert_eq!(w.end_of(pull), "-", "the others have not stopped");
        w.pushed(rank, Err(fault(Stage::Cancelled, false)));
    }
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Writers");
    let (link, now) = (w.links[0].0, w.now);
    let never = Fence { lease: LeaseId::new(77), ..fence.clone() };
    let foreign = Fence { engine: EngineId::new("q").unwrap(), ..fence.clone() };
    for fence in [fence.clone(), attempt(&fence, 1), attempt(&fence, 9), never, foreign] {
        for writers in [vec![], vec![(RankId::new(2), lost(false))], vec![(RankId::new(99), ended())]] {
            let written = Written { fence: fence.clone(), writers, groups: Vec::new() };
            w.d.session.peer_message(link, PeerMessage::Written(Box::new(written)), now);
        }
        for writers in [Stoppage::All, Stoppage::Unknown, Stoppage::Except([RankId::new(2)].into())] {
            let stopped = Stopped { fence: fence.clone(), writers };
            w.d.session.peer_message(link, PeerMessage::Stopped(stopped), now);
        }
        let progress = Progress { fence, tokens: Tokens::new(16) };
        w.d.session.peer_message(link, PeerMessage::Progress(progress), now);
    }
    w.carry(nothing);
    assert!(w.is_quiet() && w.d.progress.is_empty(), "{:?}", w.d.progress);
    assert_eq!(w.d.ended.len(), 1);
    // The same link serves the next one.
    let next = w.offer(2, Ttl::Usual);
    let pull = w.push(&next);
    w.all_written(pull);
    w.carry(nothing);
    w.read(pull);
    w.carry(nothing);
    assert_eq!(w.end_of(pull), "Delivered");
}

/// Whichever message is lost, of whatever kind, once: the request ends by its own deadline at the latest, and both sides' tables are
/// empty afterwards.
#[test]
fn fr_15_any_one_message_that_is_lost_leaves_empty_tables() {
    for cancel in [false, true] {
        let mut ends = Vec::new();
        for lost in 0.. {
            let mut w = Pair::leased();
            let said = Cell::new(0);
            let lose = |_: &PeerMessage| said.replace(said.get() + 1) == lost;
            let fence = w.offer(1, Ttl::Usual);
            let pull = w.pull_as(push(&fence));
            w.carry(lose);
            for round in 0..40 {
                for (rank, order) in w.p.pushes() {
                    let link = w.p.rank_links[rank];
                    let stop = w.p.orders.contains(&(link, ToRank::CancelPush(order.push)));
                    let end = wrote(&mut w, pull, u32::try_from(rank).unwrap());
                    match cancel {
                        // Writers that have far to go, until they are told to stop.
                        true if stop => w.pushed_as(rank, order.push, Err(fault(Stage::Cancelled, false))),
                        true => {}
                        false => w.pushed_as(rank, order.push, end),
                    }
                }
                w.carry(lose);
                if w.phase(pull) == Some(Phase::Read) {
                    w.read(pull);
                }
                w.stop(pull);
                if cancel && round == 1 {
                    let now = w.now;
                    w.d.session.cancel(pull, now);
                }
                w.pass(5 * SECOND, lose);
            }
            let end = w.end_of(pull);
            assert!(w.is_quiet(), "message {lost} of {}: {end}, {:?}", said.get(), w.d.session.snapshot(w.now));
            assert!(end != "-" && (end != "Delivered" || !cancel), "message {lost}: {end}");
            assert_eq!(w.p.closed.len(), 1, "message {lost}");
            if lost >= said.get() {
                assert_eq!(end, if cancel { "Cancelled" } else { "Delivered" }, "nothing was lost");
                break;
            }
            ends.push(end);
        }
        assert!(ends.len() > 5, "{ends:?}");
    }
}
