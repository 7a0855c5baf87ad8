//! The table of a push's states: each event in each of them.

use super::*;

/// Every event in every state: the order ends once, at once or when what is in flight has ended, and nothing is posted after it.
#[test]
fn every_event_in_every_state_ends_the_order_once() {
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum At {
        /// A stream of which nothing is announced.
        Idle,
        /// Its lane isn't up.
        NoLane,
        /// One slice is in flight, others wait.
        Queued,
        /// Everything announced is posted, and in flight.
        Posted,
        /// It has failed, and one slice is in flight.
        Stopping,
    }
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum On {
        Cancel,
        Late,
        Lost,
        Forget,
        Restart,
        End,
        Seal,
    }
    let states = [At::Idle, At::NoLane, At::Queued, At::Posted, At::Stopping];
    let events = [On::Cancel, On::Late, On::Lost, On::Forget, On::Restart, On::End, On::Seal];
    for (state, event) in states.into_iter().flat_map(|s| events.map(|e| (s, e))) {
        let script = all(1, &OpFault::HoldCompletion(SECOND));
        let mut w = Pushing::new((1, 1), script).in_slices(admission(1024, 1));
        w.held.store(state == At::NoLane, Ordering::Relaxed);
        w.stream(Attempt::FIRST, 3, false);
        w.push(&PushOrder { within: 20 * SECOND, ..w.order(1) });
        w.steps(5);
        match state {
            At::Idle => {}
            At::Posted => w.ready(&[0], 1),
            At::NoLane | At::Queued | At::Stopping => w.ready(&[0, 1], TOKENS),
        }
        w.steps(5);
        if state == At::Stopping {
            w.deaf.store(true, Ordering::Relaxed);
            w.tell(&ToRank::CancelPush(PushId(1)));
            w.steps(5);
        }
        let flying = w.flying();
        assert_eq!(flying, usize::from(!matches!(state, At::Idle | At::NoLane)), "{state:?}");
        assert!(w.ended[0].is_empty(), "{state:?}");
        w.deaf.store(true, Ordering::Relaxed);
        let before = w.memory();
        match event {
            On::Cancel => w.tell(&ToRank::CancelPush(PushId(1))),
            On::Late => {
                // Its slice has ended, too, so that all it is is late.
                w.now = 20 * SECOND;
            }
            On::Lost => {
                w.held.store(false, Ordering::Relaxed);
                w.d.clear();
            }
            On::Forget => w.tell(&ToRank::Forget(w.to_d.peer)),
            On::Restart => w.stream(second_attempt(), 3, true),
            On::End => w.tell(&ToRank::StreamEnd(LEASE)),
            On::Seal => {
                w.held.store(false, Ordering::Relaxed);
                w.stream(Attempt::FIRST, 3, true);
            }
        }
        w.steps(20);
        let waits = event == On::Seal || flying > 0 && matches!(event, On::Cancel | On::Restart | On::End);
        assert_eq!(w.ended[0].is_empty(), waits, "{state:?} {event:?}");
        w.now += SECOND;
        w.steps(60);
        let [(1, end)] = &w.ended[0][..] else { panic!("{state:?} {event:?}: {:?}", w.ended) };
        let stage = end.as_ref().err().map(|fault| fault.stage);
        let expected: &[Option<Stage>] = match (state, event) {
            (At::Stopping, _) => &[Some(Stage::Cancelled)],
            (_, On::Seal) => &[None],
            (_, On::Cancel | On::Restart | On::End) => &[Some(Stage::Cancelled)],
            (_, On::Late) => &[Some(Stage::Submit)],
            (_, On::Lost) => &[Some(Stage::Connect), Some(Stage::Write)],
            (_, On::Forget) => &[Some(Stage::Connect)],
        };
        assert!(expected.contains(&stage), "{state:?} {event:?}: {end:?}");
        assert!(w.is_quiet(), "{state:?} {event:?}");
        if !w.d.is_empty() && event != On::Seal {
            assert_eq!(w.memory(), before, "{state:?} {event:?}: nothing more is posted");
        }
        // And no end follows.
        w.tell(&ToRank::CancelPush(PushId(1)));
        w.tell(&ToRank::StreamEnd(LEASE));
        w.steps(5);
        assert_eq!(w.ended[0].len(), 1);
    }
}
