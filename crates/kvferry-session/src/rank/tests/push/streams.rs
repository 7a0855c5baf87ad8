//! Pushes of what is still being computed: what is written when, and what becomes of it when the prefill begins anew.

use super::*;

/// FR-02, LS-01: announced in any order, with tables that grow, by the owner or by the engine: what is announced is written, nothing
/// else is, and in the end all is there, each byte once.
#[test]
fn fr_02_only_what_is_final_is_written() {
    for seed in 0..16 {
        let mut rng = Rng::new(seed);
        let tp = SHAPES[usize::try_from(rng.below(SHAPES.len() as u64)).unwrap()];
        let mut w = Pushing::new(tp, Script::default()).in_slices(admission(200 + rng.below(3000), 3));
        let mut marks = Watermarks::none(ITEMS as usize);
        let (mut listed, mut ordered, mut taken) = (0, false, vec![0u64; ITEMS as usize]);
        w.stream(Attempt::FIRST, listed, false);
        for round in 0..30 {
            match rng.below(8) {
                0 if listed < 3 => {
                    listed += 1;
                    w.stream(Attempt::FIRST, listed, false);
                }
                1 | 2 if !ordered => {
                    w.push(&w.order(1));
                    ordered = true;
                }
                3 => w.tell(&ToRank::Ready(ready(second_attempt(), &[0, 1], TOKENS))),
                4 => w.ready(&[7], TOKENS),
                _ => {
                    // More than is listed may be announced first where the engine's process is quicker; and less than before.
                    let (item, upto) = (u32::try_from(rng.below(2)).unwrap(), rng.below(TOKENS + 1));
                    taken[item as usize] = taken[item as usize].max(upto);
                    if rng.below(2) == 0 {
                        w.ready(&[item], upto);
                    } else {
                        let said = ready(Attempt::FIRST, &[item], upto);
                        assert!(w.p.iter_mut().all(|p| p.ready(&said, w.now)));
                    }
                }
            }
            for item in 0..ITEMS {
                let upto = taken[item as usize].min(16 * listed as u64);
                marks.advance([ItemId::new(item)], Tokens::new(upto)).unwrap();
            }
            w.steps(usize::try_from(rng.below(60)).unwrap());
            if rng.below(4) == 0 {
                w.steps(100);
                let expected = if ordered { w.expected(&marks) } else { w.expected(&Watermarks::none(2)) };
                assert!(w.memory() == expected, "seed {seed} round {round}");
            }
        }
        if !ordered {
            w.push(&w.order(1));
        }
        w.steps(200);
        assert!(w.ended.iter().all(Vec::is_empty), "it isn't sealed");
        w.stream(Attempt::FIRST, 3, true);
        w.stream(Attempt::FIRST, 1, false);
        w.steps(300);
        assert_eq!(w.memory(), w.expected(&Watermarks::whole(2)), "seed {seed}");
        let bytes = w.reports().iter().flat_map(|r| &r.writes).map(|x| x.bytes.get()).sum::<u64>();
        assert_eq!(bytes, TOKENS * TOKEN_BYTES, "each byte once");
        for told in &w.progress {
            assert!(told.is_sorted_by(|a, b| a < b) && told.last() == Some(&TOKENS), "{told:?}");
        }
        w.tell(&ToRank::StreamEnd(LEASE));
        assert!(w.is_quiet() && w.p.iter().all(|p| p.streams.is_empty()));
    }
}

/// While a slice waits to be posted, what is announced makes no pieces of its own.
#[test]
fn announcements_join_while_the_line_is_full() {
    let mut w = Pushing::new((1, 1), all(1, &OpFault::HoldCompletion(SECOND))).in_slices(admission(1 << 20, 1));
    w.stream(Attempt::FIRST, 3, false);
    w.push(&w.order(1));
    w.steps(10);
    for tokens in 1..TOKENS {
        w.ready(&[0, 1], tokens);
        w.steps(2);
    }
    assert_eq!((w.flying(), w.progress[0].len()), (1, 0));
    w.steps(1100);
    // The first, the one that waited, and all that came then.
    assert_eq!(w.progress[0], [1, 2, TOKENS - 1]);
    w.stream(Attempt::FIRST, 3, true);
    w.steps(10);
    assert_eq!(w.reports()[0].slices, 4);
}

/// What is complete is told in order, whatever ends first, and only growth is.
#[test]
fn progress_is_told_in_order() {
    let mut script = Script::default();
    script.submit.insert(0, OpFault::HoldCompletion(SECOND));
    let mut w = Pushing::new((1, 1), script);
    w.stream(Attempt::FIRST, 3, false);
    w.push(&w.order(1));
    w.steps(5);
    w.ready(&[0, 1], 16);
    w.steps(5);
    w.ready(&[0, 1], 20);
    w.steps(100);
    assert!(w.progress[0].is_empty(), "the first is not told to have ended");
    w.steps(1000);
    assert_eq!(w.progress[0], [20]);
    w.ready(&[0], 40);
    w.steps(10);
    assert_eq!(w.progress[0], [20], "the other item is behind");
    w.ready(&[1], 33);
    w.steps(10);
    assert_eq!(w.progress[0], [20, 33]);
    // Nobody wants to know.
    let mut w = Pushing::new((1, 1), Script::default());
    w.push(&PushOrder { progress: false, ..w.order(1) });
    w.steps(10);
    assert!(w.reports().len() == 1 && w.progress[0].is_empty());
}

/// LS-05: a prefill that begins anew ends the orders of the attempt before; theirs is not written any more, and the next attempt's
/// is.
#[test]
fn ls_05_a_new_attempt_ends_the_old_one() {
    let mut w = Pushing::new((1, 1), all(1, &OpFault::HoldCompletion(SECOND)));
    w.deaf.store(true, Ordering::Relaxed);
    w.stream(Attempt::FIRST, 3, false);
    w.push(&w.order(1));
    w.steps(5);
    w.ready(&[0, 1], 16);
    w.steps(5);
    w.stream(second_attempt(), 0, false);
    w.ready(&[0, 1], TOKENS);
    w.steps(100);
    assert!(w.ended[0].is_empty() && w.flying() == 1, "the old writes are drained");
    w.steps(1000);
    assert_eq!(w.fault().stage, Stage::Cancelled);
    assert!(w.fault().text.contains("anew"), "{}", w.fault());
    w.ended[0].clear();
    // Late words of the old attempt change nothing, and an order of it is none.
    w.stream(Attempt::FIRST, 3, true);
    assert!(!w.p[0].ready(&ready(Attempt::FIRST, &[0], TOKENS), w.now));
    w.push(&w.order(1));
    w.steps(5);
    assert_eq!(w.fault().stage, Stage::Cancelled);
    w.ended[0].clear();
    let before = w.memory();
    w.push(&PushOrder { attempt: second_attempt(), ..w.order(1) });
    w.steps(20);
    assert!(w.memory() == before && w.ended[0].is_empty());
    w.stream(second_attempt(), 3, true);
    w.steps(20);
    assert_eq!(w.reports().len(), 1);
    assert_eq!(w.memory(), w.expected(&Watermarks::whole(2)));
    // An order of an attempt that has not begun waits for it.
    let mut w = Pushing::new((1, 1), Script::default());
    w.stream(Attempt::FIRST, 3, true);
    w.push(&PushOrder { attempt: second_attempt(), ..w.order(1) });
    w.steps(20);
    assert!(w.memory().iter().flatten().all(|b| *b == UNTOUCHED) && w.ended[0].is_empty());
    w.stream(second_attempt(), 3, true);
    w.steps(20);
    assert_eq!(w.reports().len(), 1);
}

/// An order of a stream that the rank has not heard of writes nothing before it has.
#[test]
fn a_streamed_order_waits_for_its_stream() {
    let mut w = Pushing::new((1, 1), Script::default());
    w.push(&PushOrder { streamed: true, ..w.order(1) });
    w.steps(20);
    assert!(w.memory().iter().flatten().all(|b| *b == UNTOUCHED) && w.ended[0].is_empty());
    w.stream(Attempt::FIRST, 3, false);
    w.steps(20);
    assert!(w.memory().iter().flatten().all(|b| *b == UNTOUCHED) && w.ended[0].is_empty());
    w.stream(Attempt::FIRST, 3, true);
    w.steps(20);
    assert_eq!(w.reports().len(), 1);
    assert_eq!(w.memory(), w.expected(&Watermarks::whole(2)));
}

/// Nothing is kept of streams that aren't known.
#[test]
fn streams_are_kept_from_their_first_word_to_their_end() {
    let mut w = Pushing::new((1, 1), Script::default());
    for lease in 0..100 {
        let said = Ready { lease: LeaseId::new(lease), ..ready(Attempt::FIRST, &[0], 8) };
        assert!(!w.p[0].ready(&said, w.now));
        w.tell(&ToRank::StreamEnd(LeaseId::new(lease)));
    }
    assert!(w.p[0].streams.is_empty());
    w.stream(Attempt::FIRST, 3, false);
    assert!(w.p[0].ready(&ready(Attempt::FIRST, &[0, 9], 8), w.now));
    assert_eq!(format!("{:?}", w.p[0]), "RankSession(p rank 0, 0 pulls, 0 pushes of 1 streams, 0 digests)");
    w.tell(&ToRank::StreamEnd(LEASE));
    assert!(w.p[0].streams.is_empty());
    // What is not a stream is final as the order lists it.
    w.push(&w.order(1));
    w.steps(20);
    assert_eq!(w.reports().len(), 1);
}
