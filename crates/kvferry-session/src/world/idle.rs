//! Engines that have nothing to do, and what they do all the same when they are asked.

use super::pushes::{arrived, push, source};
use super::tests::{decode, prefill};
use super::*;

/// Whether no rank has to be stepped again before something wakes it.
fn asleep(w: &mut World) -> bool {
    let now = w.now;
    [&mut w.p, &mut w.d].into_iter().flat_map(|e| &mut e.ranks).all(|rank| rank.step(now).is_none())
}

/// The producer's engine has made its last call, and its ranks sleep, when a consumer's grant comes: it is written without any
/// call more, and then they sleep again.
#[test]
fn pp_04_a_grant_to_an_idle_engine_is_served_and_then_nobody_polls() {
    let mut w = World::new(prefill(), decode());
    w.p.fill(1, &source());
    let whole = w.offer(source());
    w.leases += 1;
    let offer = Offer { groups: source(), content_key: KEY };
    let streamed = w.p.owner.announce(LeaseId::new(w.leases), offer, Ttl::Usual, w.now).unwrap();
    w.p.owner.seal(streamed.lease, streamed.attempt, source(), w.now).unwrap();
    w.run(200);
    assert!(asleep(&mut w));
    for fence in [whole, streamed] {
        let pull = w.d.owner.pull(push(&w, &fence, Assurance::Full), w.now);
        w.run(60);
        w.end_of(pull).unwrap().unwrap();
        assert!(arrived(&w, 1));
        assert_eq!(w.p.closed.last(), Some(&(fence, Closing::Read)));
        assert!(asleep(&mut w), "nothing is pending");
    }
}
