//! RS cases: peers that go, and come back as others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::time::Duration;

use kvferry::{Address, Assurance, Closing, FailureCause, LaneStanding, OwnerEvent, PullError, PullSpec, Reference};
use kvferry_proto::wire::kind;
use kvferry_tests::between::{Between, Fate, Way};
use kvferry_tests::mortal::Mortal;
use kvferry_tests::running::{
    Running, SECOND, World, blocks_of, cause, decode_shape, event, expected_in, fill, offer, prefill_shape, pull,
    roomy_shape, wish, wish_into,
};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork};

fn slow() -> MemFaults {
    MemFaults { start_delay: 30 * SECOND..31 * SECOND, ..MemFaults::default() }
}

/// A producer is killed with two reads in flight, and another takes its port; then a consumer goes and comes back. What was in
/// flight fails once; the first request that names the new one is served; one that names the old one is refused by name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_01_another_engine_on_the_same_port() {
    let network = MemNetwork::new(7);
    let first = Mortal::start("prefill-1", &network, Address::loopback(0), prefill_shape()).await;
    let at = first.engine.address();
    let d = Running::start("decode", &roomy_shape(4), &network).await;
    fill(&first.engine, &d);
    let old = first.engine.owner.offer(offer()).await.unwrap();
    d.set_faults(&network, &slow());
    let mut in_flight = vec![d.owner.pull(old.clone(), wish_into(0, Assurance::Fenced)).await.unwrap()];
    let another = first.engine.owner.offer(offer()).await.unwrap();
    in_flight.push(d.owner.pull(another, wish_into(1, Assurance::Fenced)).await.unwrap());
    let reading = async {
        while d.owner.snapshot().await.unwrap().pulls.iter().filter(|p| p.phase == "read").count() < 2 {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    tokio::time::timeout(10 * SECOND, reading).await.expect("both read");
    first.kill().await;
    for handle in in_flight {
        let ended = tokio::time::timeout(10 * SECOND, handle).await.expect("it ends, though its read would take long");
        assert!(matches!(ended, Err(PullError::Failed(_))), "{ended:?}");
    }
    d.set_faults(&network, &MemFaults::default());

    let second = Mortal::start("prefill-2", &network, at.clone(), prefill_shape()).await;
    assert_eq!(second.engine.address(), at);
    fill(&second.engine, &d);
    let new = second.engine.owner.offer(offer()).await.unwrap();
    let delivered = pull(&d, &new, wish_into(2, Assurance::Full)).await;
    assert!(delivered.is_ok(), "{delivered:?}");
    let stale = cause(pull(&d, &old, PullSpec { deadline: SECOND, ..wish_into(3, Assurance::Fenced) }).await);
    let FailureCause::Handshake { reasons, .. } = &stale else { panic!("{stale}") };
    assert!(reasons.iter().any(|r| r.contains("prefill-1") && r.contains("prefill-2")), "{reasons:?}");
    // Nothing of the first is kept, and the second is none the worse.
    let links = d.owner.snapshot().await.unwrap().links;
    assert_eq!(links.iter().filter_map(|l| l.peer.as_deref()).collect::<Vec<_>>(), ["prefill-2"]);
    let again = second.engine.owner.offer(offer()).await.unwrap();
    assert!(pull(&d, &again, wish_into(3, Assurance::Full)).await.is_ok());
    assert!(d.store() == expected_in(&second.engine.manifest, &d.manifest, &[blocks_of(2), blocks_of(3)]));
    second.stop().await;
    d.stop().await;
}

/// The same engine comes back at its address: a reference of its former life is told from one of this life.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_01_the_same_engine_in_another_life() {
    let network = MemNetwork::new(7);
    let first = Mortal::start("prefill", &network, Address::loopback(0), prefill_shape()).await;
    let (at, epoch) = (first.engine.address(), first.engine.owner.epoch());
    let d = Running::start("decode", &roomy_shape(4), &network).await;
    fill(&first.engine, &d);
    let (read, old) =
        (first.engine.owner.offer(offer()).await.unwrap(), first.engine.owner.offer(offer()).await.unwrap());
    assert!(pull(&d, &read, wish_into(0, Assurance::Fenced)).await.is_ok());
    first.kill().await;
    let second = Mortal::start("prefill", &network, at, prefill_shape()).await;
    assert_ne!(second.engine.owner.epoch(), epoch);
    fill(&second.engine, &d);
    let stale = cause(pull(&d, &old, wish_into(1, Assurance::Fenced)).await);
    let current = second.engine.owner.epoch();
    assert_eq!(stale, FailureCause::StaleEpoch { reference: epoch, current });
    let new = second.engine.owner.offer(offer()).await.unwrap();
    assert!(pull(&d, &new, wish_into(2, Assurance::Full)).await.is_ok());
    second.stop().await;
    d.stop().await;
}

/// The mirror: the consumer is killed while it reads, and comes back; the producer keeps running.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_01_a_consumer_that_comes_back_is_a_new_one() {
    let network = MemNetwork::new(7);
    let mut p = Running::start("prefill", &prefill_shape(), &network).await;
    let mut events = p.owner.take_events().unwrap();
    let first = Mortal::start("decode", &network, Address::loopback(0), decode_shape()).await;
    fill(&p, &first.engine);
    first.engine.set_faults(&network, &slow());
    let lease = p.owner.offer(offer()).await.unwrap();
    let reading = first.engine.owner.pull(lease.clone(), wish(Assurance::Fenced)).await.unwrap();
    let bound = async {
        while p.owner.snapshot().await.unwrap().leases.iter().all(|l| l.consumer.is_none()) {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    tokio::time::timeout(10 * SECOND, bound).await.expect("it is bound");
    let at = first.engine.address();
    first.kill().await;
    assert!(matches!(reading.await, Err(PullError::Shutdown)));
    assert_eq!(
        event(&mut events).await,
        Some(OwnerEvent::Released { lease: lease.lease(), how: Closing::ConsumerLost })
    );
    let second = Mortal::start("decode", &network, at, decode_shape()).await;
    fill(&p, &second.engine);
    let gone = cause(pull(&second.engine, &lease, wish(Assurance::Fenced)).await);
    assert!(matches!(gone, FailureCause::Refused(_)), "{gone}");
    let new = p.owner.offer(offer()).await.unwrap();
    assert!(pull(&second.engine, &new, wish(Assurance::Full)).await.is_ok());
    second.stop().await;
    p.stop().await;
}

/// What is known of a peer is let go of when its link ends, or has been idle for long: nobody new has to come for that. One that is
/// read from for longer than that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_04_a_peer_that_is_not_needed_is_let_go_of() {
    let idle = SECOND / 4;
    let world = World::start_as(&roomy_shape(3), |p| p, |d| d.idle_timeout(Some(idle))).await;
    let lanes = |standing: fn(&LaneStanding) -> bool| {
        let all = world.d.workers.iter().flat_map(|w| w.lanes().snapshot());
        all.filter(|l| standing(&l.standing)).count()
    };
    let up = || lanes(|s| matches!(s, LaneStanding::Up));
    // A read that takes longer than an idle peer is kept.
    world.late_reads(4 * idle);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.pull(&reference, wish_into(0, Assurance::Fenced)).await.is_ok());
    assert_eq!((up(), world.d.owner.snapshot().await.unwrap().links.len()), (4, 1));
    let forgotten = async {
        while up() > 0 || !world.d.owner.snapshot().await.unwrap().links.is_empty() {
            tokio::time::sleep(SECOND / 50).await;
        }
    };
    tokio::time::timeout(10 * SECOND, forgotten).await.expect("it is forgotten without anybody's coming");
    assert!(world.p.owner.snapshot().await.unwrap().links.is_empty());
    // A later request meets it anew.
    world.d.set_faults(&world.network, &MemFaults::default());
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.pull(&reference, wish_into(1, Assurance::Full)).await.is_ok());
    // One that dies is let go of at once.
    let World { p, d, .. } = world;
    p.stop().await;
    let forgotten = async {
        while !d.owner.snapshot().await.unwrap().links.is_empty()
            || d.workers.iter().flat_map(|w| w.lanes().snapshot()).any(|l| matches!(l.standing, LaneStanding::Up))
        {
            tokio::time::sleep(SECOND / 50).await;
        }
    };
    tokio::time::timeout(10 * SECOND, forgotten).await.expect("a dead peer is forgotten");
    d.stop().await;
}

/// Links break, and every post to a healthy producer fails for a while: the request at hand fails, the next one finds its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_05_the_next_request_after_a_disconnect_is_served() {
    let world = World::start_as(&roomy_shape(8), |p| p, |d| d).await;
    // The control link ends under a request.
    let cut = Between::start(world.p.address(), |seen| match seen.kind {
        kind::RELEASE if seen.connection == 0 => Fate::Cut,
        _ => Fate::Pass,
    })
    .await;
    let refer = async || -> Reference { cut.by_way(&world.p.owner.offer(offer()).await.unwrap()) };
    let broken = cause(pull(&world.d, &refer().await, wish_into(0, Assurance::Fenced)).await);
    assert!(matches!(broken, FailureCause::Link { .. }), "{broken}");
    assert!(pull(&world.d, &refer().await, wish_into(1, Assurance::Full)).await.is_ok());
    assert_eq!(cut.seen().iter().filter(|s| s.way == Way::Forth && s.number == 0).count(), 2, "two handshakes");
    // The lanes fail under the next ones.
    let fail = (0..100).map(|op| (op, Break { at_byte: 0, in_doubt: false })).collect();
    world.d.set_faults(&world.network, &MemFaults { fail, ..MemFaults::default() });
    for n in 2..4 {
        let failed = cause(pull(&world.d, &refer().await, wish_into(n, Assurance::Fenced)).await);
        assert!(matches!(failed, FailureCause::Ranks { .. }), "{failed}");
    }
    world.d.set_faults(&world.network, &MemFaults::default());
    let mut last = Duration::ZERO;
    for n in 4..6 {
        let delivered = pull(&world.d, &refer().await, wish_into(n, Assurance::Full)).await.unwrap();
        last = delivered.report().took;
    }
    assert!(last < 5 * SECOND);
    assert_eq!(world.d.owner.quarantined().await.unwrap(), 0);
    world.stop().await;
}
