//! What is done where a request fails: another source, a limit of each phase, and where to compute the rest from.

use kvferry_proto::push::Progress;

use super::pair::{Pair, losing, nothing};
use super::*;

fn source(fence: &Fence) -> Source {
    Source { address: "tcp:127.0.0.1:1".into(), fence: fence.clone() }
}

fn with(policy: FailurePolicy, mode: Mode, fence: &Fence) -> PullWish {
    PullWish { policy, mode, deadline: 100 * SECOND, ..wish(fence) }
}

fn both() -> [Mode; 2] {
    [Mode::Pull, Mode::Push { progress: false }]
}

/// Each source is tried once, in order; the report is of the last, and counts all.
#[test]
fn the_next_source_is_taken_where_one_has_failed() {
    for mode in both() {
        let mut w = Pair::leased();
        let gone = Fence { lease: LeaseId::new(99), ..w.offer(9, Ttl::Usual) };
        let stale = Fence { epoch: Epoch::new(98), ..gone.clone() };
        let good = w.offer(1, Ttl::Usual);
        let policy = FailurePolicy { others: vec![source(&stale), source(&good)], ..FailurePolicy::default() };
        let pull = w.pull_as(with(policy, mode, &gone));
        w.carry(nothing);
        assert_eq!(w.end_of(pull), "-", "{mode:?}");
        assert_eq!(w.d.session.snapshot(w.now).pulls[0].fence, good);
        w.d.session.cancel(pull, w.now);
        w.carry(nothing);
        w.stop(pull);
        w.pass(10 * SECOND, nothing);
        // What the engine gives up is not tried elsewhere.
        assert_eq!((w.end_of(pull), w.failed(pull).report.attempts), ("Cancelled".into(), 3));
        assert_eq!(w.failed(pull).report.fence, good);
    }
}

#[test]
fn after_the_last_source_it_has_failed() {
    let mut w = Pair::leased();
    let gone = |n: u128, of: &Fence| Fence { lease: LeaseId::new(n), ..of.clone() };
    let offered = w.offer(1, Ttl::Usual);
    let policy = FailurePolicy { others: vec![source(&gone(98, &offered))], ..FailurePolicy::default() };
    let pull = w.pull_as(with(policy, Mode::Pull, &gone(99, &offered)));
    w.carry(nothing);
    assert_eq!((w.end_of(pull).as_str(), w.failed(pull).report.attempts), ("Refused", 2));
    assert_eq!(w.failed(pull).report.fence, gone(98, &offered));
    assert!(w.d.session.pulls.is_clean() && w.d.session.loans.is_empty());
}

/// The blocks may still be written for the source that has failed: no other may write them.
#[test]
fn no_other_source_while_the_one_before_is_in_doubt() {
    for mode in both() {
        let mut w = Pair::leased();
        let (first, second) = (w.offer(1, Ttl::Usual), w.offer(2, Ttl::Usual));
        let policy = FailurePolicy { others: vec![source(&second)], ..FailurePolicy::default() };
        let pull = w.pull_as(with(policy, mode, &first));
        w.carry(nothing);
        if mode == Mode::Pull {
            w.say(pull, 0, Err(fault(Stage::Read, true)));
            w.say(pull, 1, Err(fault(Stage::Cancelled, false)));
            w.carry(nothing);
        } else {
            w.cut();
        }
        assert!(w.end_of(pull) != "-" && w.d.session.quarantined() > 0, "{mode:?}");
        assert_eq!(w.failed(pull).report.attempts, 1);
    }
}

/// A lease that another request of ours takes is left to it.
#[test]
fn a_source_that_is_taken_is_passed_over() {
    let mut w = Pair::leased();
    let (gone, taken, free) =
        (Fence { lease: LeaseId::new(99), ..w.offer(9, Ttl::Usual) }, w.offer(1, Ttl::Usual), w.offer(2, Ttl::Usual));
    let first = w.pull(&taken);
    let others = vec![source(&taken), source(&free)];
    let groups = other_dst_groups(7);
    let wish = with(FailurePolicy { others, ..FailurePolicy::default() }, Mode::Pull, &gone);
    let pull = w.pull_as(PullWish { groups, ..wish });
    w.carry(nothing);
    w.read(pull);
    w.read(first);
    w.carry(nothing);
    assert_eq!((w.end_of(first), w.end_of(pull)), ("Delivered".into(), "Delivered".into()));
    assert_eq!(w.result_of(pull).unwrap().as_ref().unwrap().report().fence, free);
}

/// Each phase has a limit of its own, and what is told is that limit.
#[test]
fn each_phase_has_its_limit() {
    let limits = |n: usize| {
        let at = |i| (i == n).then_some(3 * SECOND);
        PhaseLimits { link: at(0), bind: at(1), queue: None, transfer: at(2), release: at(3) }
    };
    let lost: [&'static [&'static str]; 4] = [&[], &["Bind", "PushBind"], &[], &["ReleaseAnswer"]];
    for mode in both() {
        for (n, lost) in lost.into_iter().enumerate() {
            let mut w = Pair::leased();
            let fence = w.offer(1, Ttl::Usual);
            w.answers = n != 0;
            let policy = FailurePolicy { within: limits(n), ..FailurePolicy::default() };
            let pull = w.pull_as(with(policy, mode, &fence));
            w.carry(losing(lost));
            if n == 3 && mode == Mode::Pull {
                w.read(pull);
            } else if n == 3 {
                continue;
            }
            w.carry(losing(lost));
            assert_eq!(w.d.session.step(w.now).map(|t| t <= 3 * SECOND), Some(true), "{mode:?} {n}");
            w.pass(2 * SECOND, losing(lost));
            assert_eq!(w.end_of(pull), "-", "{mode:?} {n}");
            for _ in 0..4 {
                w.pass(2 * SECOND, losing(lost));
                w.stop(pull);
            }
            let told = &w.failed(pull).cause;
            // Of a link, what has kept it from coming up is told too.
            let after = match told {
                FailureCause::Deadline { after, .. } => *after,
                FailureCause::Link { reason, .. } if n == 0 && reason.contains("no link within 3s") => 3 * SECOND,
                other => panic!("{mode:?} {n}: {other}"),
            };
            assert_eq!(after, 3 * SECOND);
        }
    }
}

/// What was told to be in place is what need not be computed again; not where somebody may still write it, or where nobody asked.
#[test]
fn the_rest_is_computed_from_the_first_hole() {
    for (then, in_doubt, hole) in
        [(Remedy::Recompute, false, 32), (Remedy::Recompute, true, 0), (Remedy::Fail, false, 0)]
    {
        let mut w = Pair::leased();
        let fence = w.offer(1, Ttl::Usual);
        let policy = FailurePolicy { then, ..FailurePolicy::default() };
        let pull = w.pull_as(with(policy, Mode::Push { progress: false }, &fence));
        w.carry(nothing);
        let ours = w.links[0].0;
        let progress = |tokens| PeerMessage::Progress(Progress { fence: fence.clone(), tokens: Tokens::new(tokens) });
        for tokens in [16, 32, 16] {
            w.d.session.peer_message(ours, progress(tokens), w.now);
        }
        w.carry(nothing);
        assert!(w.d.progress.is_empty(), "nobody wanted to hear it");
        w.d.session.cancel(pull, w.now);
        w.carry(nothing);
        if !in_doubt {
            for link in w.p.rank_links.clone() {
                let end = FromRank::Pushed {
                    push: kvferry_proto::push::PushId(1),
                    result: Err(fault(Stage::Cancelled, false)),
                };
                w.p.session.rank_message(link, end, w.now);
            }
        }
        w.carry(nothing);
        w.pass(10 * SECOND, nothing);
        let report = &w.failed(pull).report;
        assert_eq!(report.first_hole(), Some(Tokens::new(hole)), "{then:?}");
        assert_eq!(report.groups[0].complete, (0, hole / 16));
    }
}
