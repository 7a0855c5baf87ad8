//! HS cases: how engines meet, by the handshake's machine and by owners on real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::{
    Address, Assurance, EngineId, FailureCause, Owner, OwnerEvent, PullSpec, RankId, ReadyError, StartError, Worker,
};
use kvferry_geometry::units::Tokens;
use kvferry_proto::handshake::{Expected, Greeting, HelloMismatch, Versions};
use kvferry_proto::lease::first_attempt;
use kvferry_proto::names::LeaseId;
use kvferry_proto::peer::{PeerMessage, RunDigest, Window};
use kvferry_tests::between::Raw;
use kvferry_tests::by_hand::{Engine, kv, owner};
use kvferry_tests::running::{
    SECOND, World, builder, cause, decode_shape, memory_of, offer, prefill_shape, roomy_shape, wish, wish_into,
};
use kvferry_transport::mem::MemNetwork;

#[test]
fn hs_01_another_engine_than_expected_is_refused_with_both_ids() {
    let cache = Engine::new(vec![kv("a", 4, 128)], 2).manifest();
    let (expected, got) = (EngineId::new("engine-a").expect("an id"), EngineId::new("engine-b").expect("an id"));
    let (_, hello) = Greeting::start(Arc::new(owner("engine-b", 1, &cache)), Expected::default());
    let local = Arc::new(owner("decode", 2, &cache));
    let (greeting, _) = Greeting::start(Arc::clone(&local), Expected { engine: Some(expected.clone()), proven: None });
    let refused = greeting.on_hello(&hello).expect_err("the wrong engine");
    assert_eq!(refused.0, [HelloMismatch::WrongEngine { expected, got: got.clone() }]);
    // Nothing of it is kept: the next link, to the same engine under its own name, is in order.
    let (greeting, _) = Greeting::start(local, Expected { engine: Some(got), proven: None });
    assert!(greeting.on_hello(&hello).is_ok());
}

/// Ranks that disagree on the engine id fail at start-up; so does an engine whose rank is missing, naming it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_01_ranks_of_another_engine_are_refused_at_start() {
    let network = MemNetwork::new(7);
    let manifest = decode_shape().manifest();
    let start = || async {
        let groups = manifest.groups().to_vec();
        let id = EngineId::new("decode").unwrap();
        Owner::builder(id, manifest.spec().clone(), groups, 2).start().await.unwrap()
    };
    let worker = |owner: &Owner, engine: &str, rank: u32| {
        let description = manifest.rank(RankId::new(rank)).unwrap().clone();
        let regions = description.layout.regions.iter().map(memory_of);
        let transport = Box::new(network.endpoint().unwrap());
        let engine = EngineId::new(engine).unwrap();
        let regions = regions.collect();
        Worker::builder(engine, RankId::new(rank), owner.rank_socket(), description, regions, transport)
            .spawn()
            .unwrap()
    };
    let owner = start().await;
    let own = worker(&owner, "decode", 0);
    let missing = owner.ready(SECOND / 2).await.unwrap_err();
    assert_eq!(missing, ReadyError::Timeout { missing: vec![RankId::new(1)], after: SECOND / 2 });
    let foreign = worker(&owner, "other", 1);
    let refused = owner.ready(10 * SECOND).await.unwrap_err().to_string();
    assert!(refused.contains("decode") && refused.contains("other"), "{refused}");
    let told = foreign.join().unwrap_err().to_string();
    assert!(told.contains("decode") && told.contains("other"), "{told}");
    owner.shutdown().await;
    own.join().unwrap();
}

/// What would be told to peers must be reachable by them; what is told is exactly what was said.
#[tokio::test]
async fn hs_02_where_to_listen_and_what_to_tell_are_two_things() {
    let manifest = decode_shape().manifest();
    let start = |listen: &str| builder("decode", &manifest).listen(listen.parse().unwrap());
    let exposed = start("tcp:0.0.0.0:0").start().await;
    // By whichever of the two that find it: the configuration's check, or the start of listening.
    let refused = |started: Result<Owner, StartError>| match started.expect_err("refused") {
        error @ (StartError::Exposed { .. } | StartError::Advertise { .. } | StartError::Config(_)) => {
            error.to_string()
        }
        error => panic!("{error}"),
    };
    let exposed = refused(exposed);
    assert!(exposed.contains("plaintext_beyond_loopback"), "{exposed}");
    let nameless = start("tcp:0.0.0.0:0").plaintext_beyond_loopback().start().await;
    let nameless = refused(nameless);
    assert!(nameless.contains("advertise"), "{nameless}");
    let told: Address = "tcp:192.0.2.7:7600".parse().unwrap();
    let named = start("tcp:0.0.0.0:0").plaintext_beyond_loopback().advertise(told.clone()).start().await.unwrap();
    assert_eq!(named.address(), Some(&told));
    named.shutdown().await;
}

#[tokio::test]
async fn hs_04_a_taken_port_is_an_error_of_the_start() {
    let manifest = decode_shape().manifest();
    let listening = |address: Address| builder("decode", &manifest).listen(address);
    let first = listening(Address::loopback(0)).start().await.unwrap();
    let taken = first.address().unwrap().clone();
    assert!(taken.is_definite(), "port 0 has become the real one");
    let refused = listening(taken.clone()).start().await;
    assert!(matches!(refused, Err(StartError::Listen { .. })));
    // The one that listens is none the worse, and the next port is its own.
    let second = listening(Address::loopback(0)).start().await.unwrap();
    assert_ne!(second.address().unwrap(), &taken);
    let socket = first.rank_socket().to_owned();
    assert!(socket.exists());
    first.shutdown().await;
    assert!(!socket.exists(), "nothing is left behind");
    listening(taken).start().await.expect("it is free again").shutdown().await;
    second.shutdown().await;
}

/// A peer that is known asks for a rank that isn't there, and for blocks of a lease that was never offered: it is told so, and goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_06_a_rank_that_is_not_there_is_an_answer() {
    let world = World::start().await;
    let shape = decode_shape().manifest();
    let (mut peer, hello) = Raw::meet(&world.p.address(), "stranger", &shape).await;
    let PeerMessage::Hello(hello) = hello else { panic!("{hello:?}") };
    assert_eq!(hello.manifest.cache().digest(), world.p.manifest.digest());
    let fence = first_attempt(world.p.owner.engine().clone(), world.p.owner.epoch(), LeaseId::new(1));
    for (src, dst) in [(9, 0), (0, 9), (u32::MAX, 0)] {
        let (src, dst, fence) = (RankId::new(src), RankId::new(dst), fence.clone());
        let windows = vec![Window { start: 0, len: 64, piece: 64 }];
        let groups = wish(Assurance::Full).groups;
        let question = RunDigest { fence, src, dst, tokens: Tokens::new(37), groups, windows };
        peer.say(&PeerMessage::RunDigest(question)).await;
        let answer = peer.hear().await.expect("an answer");
        assert!(matches!(&answer, PeerMessage::RunDigestAnswer(a) if a.pieces.is_err()), "{answer:?}");
    }
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.pull(&reference, wish(Assurance::Full)).await.is_ok());
    world.stop().await;
}

/// 32 at once: each hears the whole manifest, and nothing of another's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_06_many_clients_at_once_hear_whole_answers() {
    let world = World::start().await;
    let (at, shape) = (world.p.address(), decode_shape().manifest());
    let mut all = tokio::task::JoinSet::new();
    for i in 0..32 {
        let (at, shape) = (at.clone(), shape.clone());
        all.spawn(async move { (i, Raw::meet(&at, &format!("client-{i}"), &shape).await) });
    }
    let mut peers = Vec::new();
    while let Some(met) = all.join_next().await {
        let (_, (peer, hello)) = met.unwrap();
        let PeerMessage::Hello(hello) = hello else { panic!("{hello:?}") };
        assert_eq!((hello.manifest.engine(), hello.digest), (world.p.owner.engine(), hello.manifest.digest()));
        assert_eq!(hello.manifest.cache().digest(), world.p.manifest.digest());
        peers.push(peer);
    }
    let links = world.p.owner.snapshot().await.unwrap().links;
    assert_eq!(links.iter().filter(|l| l.state == "up").count(), 32);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.pull(&reference, wish(Assurance::Full)).await.is_ok());
    world.stop().await;
}

/// Three requests wait for a peer that answers nobody: each fails once, by its own deadline, with its own blocks untouched; the
/// failed links are counted by attempts, not by requests; the next request, to a peer that answers, is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_08_who_waits_for_a_failed_handshake_fails_once() {
    let mut world = World::start_as(&roomy_shape(4), |p| p, |d| d.handshake_timeout(SECOND / 4)).await;
    let mut events = world.d.owner.take_events().unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..3 {
        let text = world.p.owner.offer(offer()).await.unwrap().to_string();
        let (who, _) = text.split_once('@').unwrap();
        let dead: kvferry::Reference = format!("{who}@tcp:{}", silent.local_addr().unwrap()).parse().unwrap();
        let spec = PullSpec { deadline: SECOND, ..wish_into(n, Assurance::Fenced) };
        waiting.push(world.d.owner.pull(dead, spec).await.unwrap());
    }
    for handle in waiting {
        let failed = cause(tokio::time::timeout(10 * SECOND, handle).await.expect("it ends"));
        assert!(matches!(failed, FailureCause::Link { .. } | FailureCause::Deadline { .. }), "{failed}");
    }
    let mut failures = 0;
    while let Ok(Some(event)) = tokio::time::timeout(Duration::from_millis(50), events.next()).await {
        failures += usize::from(matches!(event, OwnerEvent::LinkFailed { refused: false, .. }));
    }
    assert!((1..=5).contains(&failures), "{failures} links failed for three requests");
    assert_eq!(world.d.owner.quarantined().await.unwrap(), 0);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.pull(&reference, wish_into(0, Assurance::Full)).await.is_ok());
    world.stop().await;
}

/// A hello that comes before the producer's ranks have all joined waits for them, and so does the request behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_10_a_peer_that_comes_before_the_ranks_waits() {
    let network = MemNetwork::new(7);
    let manifest = prefill_shape().manifest();
    let early = builder("early", &manifest).start().await.unwrap();
    let at = early.address().unwrap().clone();
    let shape = decode_shape().manifest();
    let began = Instant::now();
    let meeting = tokio::spawn(async move { Raw::meet(&at, "decode", &shape).await });
    tokio::time::sleep(SECOND / 5).await;
    assert!(!meeting.is_finished(), "there is nothing to answer yet");
    let mut workers = Vec::new();
    for (rank, description) in (0u32..).map(RankId::new).zip(manifest.ranks()) {
        let regions = description.layout.regions.iter().map(memory_of).collect();
        let lane = Box::new(network.endpoint().unwrap());
        let worker =
            Worker::builder(early.engine().clone(), rank, early.rank_socket(), description.clone(), regions, lane);
        workers.push(worker.spawn().unwrap());
    }
    let (_peer, hello) = meeting.await.unwrap();
    assert!(matches!(hello, PeerMessage::Hello(_)), "{hello:?}");
    assert!(began.elapsed() >= SECOND / 5);
    early.shutdown().await;
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn hs_11_every_mismatch_is_told_at_once_with_both_values() {
    let cache = Engine::new(vec![kv("a", 4, 128)], 2).manifest();
    let (_, mut hello) = Greeting::start(Arc::new(owner("p", 1, &cache)), Expected::default());
    let theirs = Versions { min: 7, max: 9 };
    hello.versions = theirs;
    hello.identity = kvferry_proto::names::ModelIdentity::new("model@other").expect("an identity");
    let (greeting, _) = Greeting::start(Arc::new(owner("d", 2, &cache)), Expected::default());
    let refused = greeting.on_hello(&hello).expect_err("a version and a model apart").0;
    assert_eq!(refused[0], HelloMismatch::Version { ours: Versions::OURS, theirs });
    assert!(matches!(&refused[1], HelloMismatch::Identity { ours, theirs }
        if ours.as_str() == "model@revision" && theirs.as_str() == "model@other"));
    assert_eq!(refused.len(), 2);
}
