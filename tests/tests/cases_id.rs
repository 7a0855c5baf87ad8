//! ID cases: names of engines.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;
use std::sync::Arc;

use kvferry::{Address, Assurance, Closing, FailureCause, LeaseId, OwnerEvent, TransferParams};
use kvferry_proto::handshake::{Expected, Greeting, HelloMismatch};
use kvferry_tests::by_hand::{Engine, kv, owner};
use kvferry_tests::running::{World, builder, cause, decode_shape, event, offer, prefill_shape, wish};

#[test]
fn id_06_an_engine_that_meets_its_own_name_refuses() {
    let cache = Engine::new(vec![kv("a", 4, 128)], 2).manifest();
    // Data-parallel siblings are engines of their own and need names of their own.
    let (_, hello) = Greeting::start(Arc::new(owner("e", 1, &cache)), Expected::default());
    let (greeting, _) = Greeting::start(Arc::new(owner("e", 2, &cache)), Expected::default());
    let refused = greeting.on_hello(&hello).expect_err("one name for two").0;
    assert!(matches!(refused.as_slice(), [HelloMismatch::OwnEngine { got }] if got.as_str() == "e"), "{refused:?}");
    let (_, hello) = Greeting::start(Arc::new(owner("e-dp1", 1, &cache)), Expected::default());
    let (greeting, _) = Greeting::start(Arc::new(owner("e-dp0", 2, &cache)), Expected::default());
    assert!(greeting.on_hello(&hello).is_ok());
}

/// Each engine has names of its own for a request; what is released is what the producer has named, by way of a router's JSON.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn id_01_the_producers_name_comes_back() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    // The consumer's own numbers are others by then.
    let lost = world.p.owner.offer(offer()).await.unwrap();
    let gone: kvferry::Reference =
        lost.to_string().replacen(&lost.lease().to_string(), &"0".repeat(32), 1).parse().unwrap();
    assert_eq!(gone.lease(), LeaseId::new(0));
    assert!(world.pull(&gone, wish(Assurance::Fenced)).await.is_err());
    let carried = TransferParams::of(lost.clone()).to_string();
    let params: TransferParams = carried.parse().unwrap();
    let kvferry::Source::At(reference) = params.source() else { panic!("{carried}") };
    world.pull(reference, wish(Assurance::Fenced)).await.unwrap();
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: lost.lease(), how: Closing::Read }));
    world.stop().await;
}

/// Samples of one prompt share blocks and content, and never a name; a name is of one request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn id_03_no_two_samples_share_a_name() {
    let world = World::start().await;
    let mut names = BTreeSet::new();
    for _ in 0..300 {
        names.insert(world.p.owner.offer(offer()).await.unwrap().lease());
    }
    assert_eq!(names.len(), 300);
    assert!(!names.contains(&LeaseId::new(0)));
    assert_eq!(world.p.owner.snapshot().await.unwrap().leases.len(), 300);
    world.stop().await;
}

/// Four data-parallel siblings on one host: each its own engine on a port of its own; one that is sent to itself refuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn id_06_siblings_have_ids_and_ports_of_their_own() {
    let manifest = prefill_shape().manifest();
    let (mut owners, mut ports) = (Vec::new(), BTreeSet::new());
    for i in 0..4 {
        let owner = builder(&format!("e-dp{i}"), &manifest).listen(Address::loopback(0)).start().await.unwrap();
        ports.insert(owner.address().unwrap().clone());
        owners.push(owner);
    }
    assert_eq!(ports.len(), 4);
    for owner in owners {
        owner.shutdown().await;
    }
    let world = World::start_as(&decode_shape(), |p| p, |d| d).await;
    let own = world.d.owner.offer(kvferry_tests::running::offer_of(&[30, 7, 8, 1, 19])).await.unwrap();
    let spec = kvferry::PullSpec {
        groups: vec![kvferry_tests::running::wanted(&[2, 3, 4, 5, 6], 0)],
        ..wish(Assurance::Fenced)
    };
    let refused = cause(world.pull(&own, spec).await);
    let FailureCause::Handshake { reasons, .. } = &refused else { panic!("{refused}") };
    assert!(reasons.iter().any(|r| r.contains("own id")), "{reasons:?}");
    world.stop().await;
}
