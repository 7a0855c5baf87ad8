//! The RS and SEC cases for push: peers that go and come back as others, and peers that grant what they may not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry::{
    Address, Assurance, BlockTable, Closing, DstGroup, DstPaged, EngineId, FailureCause, LaneStanding, OwnerBuilder,
    OwnerEvent, PullError, PullSpec, Reference, Tokens,
};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::units::BlockId;
use kvferry_oracle::Memory;
use kvferry_proto::names::{Attempt, Fence, pairing_salt};
use kvferry_proto::peer::{Bind, BindAnswer, BindRefusal, PeerMessage};
use kvferry_proto::push::{PushBind, Room};
use kvferry_proto::wire::kind;
use kvferry_tests::between::{Between, Fate, Raw, Way};
use kvferry_tests::mortal::Mortal;
use kvferry_tests::running::{
    CACHED, Running, SECOND, TOKENS, World, blocks_of, cause, decode_shape, event, expected, expected_in, fill, key,
    offer, prefill_shape, pull, roomy_shape, table, until, wish, wish_into,
};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork};

fn push_into(n: u32) -> PullSpec {
    wish_into(n, Assurance::Fenced).push()
}

fn slow() -> MemFaults {
    MemFaults { start_delay: 30 * SECOND..31 * SECOND, ..MemFaults::default() }
}

/// A producer is killed with two pushes in flight, and another takes its port: what was in flight fails once, the first request that names
/// the new one is served, and one that names the old one is refused by name. Nothing that the new one says is taken for
/// evidence of the old one's writers: their blocks come back by age only, where the engine vouches for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_01_another_engine_on_the_port_of_one_that_pushed() {
    let network = MemNetwork::new(7);
    let first = Mortal::start("prefill-1", &network, Address::loopback(0), prefill_shape()).await;
    let at = first.engine.address();
    let told = |o: OwnerBuilder| o.reclaim_after(Some(8 * SECOND));
    let mut d = Running::start_as("decode", &roomy_shape(5), &network, told).await;
    let mut events = d.owner.take_events().unwrap();
    fill(&first.engine, &d);
    first.engine.set_faults(&network, &slow());
    let old = first.engine.owner.offer(offer()).await.unwrap();
    let mut in_flight = vec![d.owner.pull(old.clone(), push_into(0)).await.unwrap()];
    let another = first.engine.owner.offer(offer()).await.unwrap();
    in_flight.push(d.owner.pull(another, push_into(1)).await.unwrap());
    let writing = async || d.owner.snapshot().await.unwrap().pulls.iter().filter(|p| p.phase == "write").count() == 2;
    until("both are written", writing).await;
    first.kill().await;
    for handle in in_flight {
        let ended =
            tokio::time::timeout(10 * SECOND, handle).await.expect("it ends, though its writes would take long");
        let Err(PullError::Failed(failed)) = ended else { panic!("{ended:?}") };
        assert_eq!(failed.report.writers_in_doubt.len(), 4, "{failed}");
    }
    let second = Mortal::start("prefill-2", &network, at.clone(), prefill_shape()).await;
    assert_eq!(second.engine.address(), at);
    fill(&second.engine, &d);
    let new = second.engine.owner.offer(offer()).await.unwrap();
    let delivered = pull(&d, &new, PullSpec { assurance: Assurance::Full, ..push_into(2) }).await;
    assert!(delivered.is_ok(), "{delivered:?}");
    let stale = cause(pull(&d, &old, PullSpec { deadline: SECOND, ..push_into(3) }).await);
    let FailureCause::Handshake { reasons, .. } = &stale else { panic!("{stale}") };
    assert!(reasons.iter().any(|r| r.contains("prefill-1") && r.contains("prefill-2")), "{reasons:?}");
    assert_eq!(d.owner.quarantined().await.unwrap(), 10, "another engine knows nothing of the first one's ranks");
    for _ in 0..2 {
        let reclaimed = event(&mut events).await;
        assert!(matches!(reclaimed, Some(OwnerEvent::Reclaimed { blocks: 5, .. })), "{reclaimed:?}");
    }
    assert_eq!(d.owner.quarantined().await.unwrap(), 0);
    let again = second.engine.owner.offer(offer()).await.unwrap();
    assert!(pull(&d, &again, push_into(0)).await.is_ok(), "also into those");
    assert!(d.store() == expected_in(&second.engine.manifest, &d.manifest, &[blocks_of(2), blocks_of(0)]));
    second.stop().await;
    d.stop().await;
}

/// The same engine comes back at its address: its ranks are others, so that those who were in doubt write no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_01_the_next_life_of_an_engine_that_pushed_is_evidence() {
    let network = MemNetwork::new(7);
    let first = Mortal::start("prefill", &network, Address::loopback(0), prefill_shape()).await;
    let (at, epoch) = (first.engine.address(), first.engine.owner.epoch());
    let d = Running::start("decode", &roomy_shape(3), &network).await;
    fill(&first.engine, &d);
    first.engine.set_faults(&network, &slow());
    let old = first.engine.owner.offer(offer()).await.unwrap();
    let handle = d.owner.pull(old.clone(), push_into(0)).await.unwrap();
    until("it is written", async || d.owner.snapshot().await.unwrap().pulls.iter().any(|p| p.phase == "write")).await;
    first.kill().await;
    assert!(handle.await.is_err());
    assert_eq!(d.owner.quarantined().await.unwrap(), 5);
    let second = Mortal::start("prefill", &network, at, prefill_shape()).await;
    fill(&second.engine, &d);
    let stale = cause(pull(&d, &old, push_into(1)).await);
    assert_eq!(stale, FailureCause::StaleEpoch { reference: epoch, current: second.engine.owner.epoch() });
    until("known to have stopped", async || d.owner.quarantined().await.unwrap() == 0).await;
    let new = second.engine.owner.offer(offer()).await.unwrap();
    assert!(pull(&d, &new, push_into(0)).await.is_ok());
    assert!(d.store() == expected_in(&second.engine.manifest, &d.manifest, &[blocks_of(0)]));
    second.stop().await;
    d.stop().await;
}

/// The mirror: the consumer is killed while it is written to, and comes back; the producer keeps running.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_01_a_consumer_that_was_pushed_to_comes_back_as_a_new_one() {
    let network = MemNetwork::new(7);
    let mut p = Running::start("prefill", &prefill_shape(), &network).await;
    let mut events = p.owner.take_events().unwrap();
    let first = Mortal::start("decode", &network, Address::loopback(0), decode_shape()).await;
    fill(&p, &first.engine);
    p.set_faults(&network, &slow());
    let lease = p.owner.offer(offer()).await.unwrap();
    let handle = first.engine.owner.pull(lease.clone(), wish(Assurance::Fenced).push()).await.unwrap();
    let bound = async || p.owner.snapshot().await.unwrap().leases.iter().all(|l| l.consumer.is_some());
    until("it is bound", bound).await;
    let at = first.engine.address();
    first.kill().await;
    assert!(matches!(handle.await, Err(PullError::Shutdown)));
    let over = event(&mut events).await;
    assert_eq!(over, Some(OwnerEvent::Released { lease: lease.lease(), how: Closing::ConsumerLost }));
    p.set_faults(&network, &MemFaults::default());
    let second = Mortal::start("decode", &network, at, decode_shape()).await;
    fill(&p, &second.engine);
    let gone = cause(pull(&second.engine, &lease, wish(Assurance::Fenced).push()).await);
    assert!(matches!(gone, FailureCause::Refused(_)), "{gone}");
    assert!(
        second.engine.store() == Memory::background(&second.engine.manifest),
        "nothing of the first one's lands here"
    );
    let new = p.owner.offer(offer()).await.unwrap();
    assert!(pull(&second.engine, &new, wish(Assurance::Full).push()).await.is_ok());
    assert!(second.engine.store() == expected(&p.manifest, &second.engine.manifest));
    second.stop().await;
    p.stop().await;
}

/// The lanes of a push are the producer's: a consumer that is not needed any more is let go of without anybody's coming, and one that is
/// written to for longer than that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_04_a_consumer_that_is_not_needed_is_let_go_of() {
    let idle = SECOND / 4;
    let world = World::start_as(&roomy_shape(3), |p| p, |d| d.idle_timeout(Some(idle))).await;
    let up = || {
        let all = world.p.workers.iter().flat_map(|w| w.lanes().snapshot());
        all.filter(|l| matches!(l.standing, LaneStanding::Up)).count()
    };
    world.late_writes(4 * idle);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(pull(&world.d, &reference, push_into(0)).await.is_ok());
    assert_eq!((up(), world.p.owner.snapshot().await.unwrap().links.len()), (4, 1));
    let none = async || up() == 0 && world.p.owner.snapshot().await.unwrap().links.is_empty();
    until("it is forgotten", none).await;
    assert!(world.d.owner.snapshot().await.unwrap().links.is_empty());
    // A later request meets it anew.
    world.p.set_faults(&world.network, &MemFaults::default());
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(pull(&world.d, &reference, PullSpec { assurance: Assurance::Full, ..push_into(1) }).await.is_ok());
    // One that dies is let go of at once.
    let World { p, d, .. } = world;
    d.stop().await;
    let all = || p.workers.iter().flat_map(|w| w.lanes().snapshot());
    let gone = async || {
        p.owner.snapshot().await.unwrap().links.is_empty() && !all().any(|l| matches!(l.standing, LaneStanding::Up))
    };
    until("a dead peer is forgotten", gone).await;
    p.stop().await;
}

/// Links break, and every write to a healthy consumer fails for a while: the request at hand fails, the next one finds its way, and
/// what it asks on it gives the blocks of the broken one back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rs_05_the_next_push_after_a_disconnect_is_served() {
    let world = World::start_as(&roomy_shape(6), |p| p, |d| d).await;
    // The control link ends under a request.
    let cut = Between::start(world.p.address(), |seen| match seen.kind {
        kind::WRITTEN if seen.connection == 0 => Fate::Cut,
        _ => Fate::Pass,
    })
    .await;
    let refer = async || -> Reference { cut.by_way(&world.p.owner.offer(offer()).await.unwrap()) };
    let broken = cause(pull(&world.d, &refer().await, push_into(0)).await);
    assert!(matches!(broken, FailureCause::Link { .. }), "{broken}");
    assert!(pull(&world.d, &refer().await, PullSpec { assurance: Assurance::Full, ..push_into(1) }).await.is_ok());
    assert_eq!(cut.seen().iter().filter(|s| s.way == Way::Forth && s.number == 0).count(), 2, "two handshakes");
    until("the blocks are back", async || world.d.owner.quarantined().await.unwrap() == 0).await;
    // The lanes fail under the next ones.
    let fail = (0..100).map(|op| (op, Break { at_byte: 0, in_doubt: false })).collect();
    world.p.set_faults(&world.network, &MemFaults { fail, ..MemFaults::default() });
    for n in [0, 2] {
        let failed = cause(pull(&world.d, &refer().await, push_into(n)).await);
        assert!(matches!(failed, FailureCause::Writers { .. }), "{failed}");
    }
    world.p.set_faults(&world.network, &MemFaults::default());
    for n in [0, 2] {
        let delivered = pull(&world.d, &refer().await, push_into(n)).await.unwrap();
        assert!(delivered.report().took < 5 * SECOND);
    }
    assert_eq!(world.d.owner.quarantined().await.unwrap(), 0);
    let there = [blocks_of(0), blocks_of(1), blocks_of(2)];
    assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &there));
    world.stop().await;
}

/// Peers that grant what there can't be: ids beyond the end, twice, a million, another number of groups, less room than is offered,
/// a lease of somebody else. Each is refused before anything is posted, and the lease is its true consumer's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_03_grants_of_blocks_that_cannot_be_are_refused() {
    let world = World::start().await;
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let (p, d) = (&world.p.manifest, &world.d.manifest);
    let compatible = Compatible::new(p.clone(), d.clone()).unwrap();
    let lease = reference.lease();
    let salt = pairing_salt(&EngineId::new("hostile").unwrap(), lease, Attempt::FIRST);
    let map = PeerMap::new(&compatible, salt).unwrap();
    let fence = Fence { engine: reference.engine().clone(), epoch: reference.epoch(), lease, attempt: Attempt::FIRST };
    let (mut hostile, answer) = Raw::meet(&world.p.address(), "hostile", d).await;
    assert!(matches!(answer, PeerMessage::Hello(_)), "{answer:?}");
    let paged = |ids: &[u32]| -> DstGroup { DstPaged { table: table(ids), cached: Tokens::new(CACHED) }.into() };
    let many: Vec<BlockId> = (0..1_000_000).map(BlockId::new).collect();
    let many: DstGroup = DstPaged { table: BlockTable::new(0, &many), cached: Tokens::ZERO }.into();
    let good = [30, 7, 8, 1, 19];
    let rooms = [
        (TOKENS, vec![paged(&[30, 7, 8, 1, 40])]),
        (TOKENS, vec![paged(&[30, 7, 8, 1, u32::MAX - 1])]),
        (TOKENS, vec![paged(&[30, 7, 8, 1, 30])]),
        (TOKENS, vec![many]),
        (TOKENS, vec![]),
        (TOKENS, vec![paged(&good), paged(&good)]),
        (TOKENS, vec![paged(&[30, 7, 8, 1])]),
        (TOKENS + 1, vec![paged(&good)]),
        (u64::MAX, vec![paged(&good)]),
    ];
    for (tokens, groups) in rooms {
        let bind = Bind { fence: fence.clone(), content_key: key(), salt, peer_map: map.digest() };
        let tokens = Tokens::new(tokens);
        let room = Room { tokens, groups, within: 10 * SECOND, priority: 1, progress: false };
        let what = format!("{tokens}, {} groups", room.groups.len());
        hostile.say(&PeerMessage::PushBind(Box::new(PushBind { bind, room }))).await;
        let answer = hostile.hear().await;
        let Some(PeerMessage::BindAnswer(BindAnswer::Refused { reason, .. })) = answer else {
            panic!("{what}: {answer:?}")
        };
        assert!(matches!(reason, BindRefusal::Unfit(_)), "{what}: {reason}");
    }
    // Whoever doesn't know what it was computed from gets nothing, whatever it grants.
    let other = kvferry::ContentKey::of(&[1, 2, 3], "", &[]);
    let bind = Bind { fence, content_key: other, salt, peer_map: map.digest() };
    let groups = vec![paged(&good)];
    let room = Room { tokens: Tokens::new(TOKENS), groups, within: 10 * SECOND, priority: 1, progress: false };
    hostile.say(&PeerMessage::PushBind(Box::new(PushBind { bind, room }))).await;
    let answer = hostile.hear().await;
    let refused = |a: &BindAnswer| matches!(a, BindAnswer::Refused { reason: BindRefusal::WrongContent, .. });
    assert!(matches!(&answer, Some(PeerMessage::BindAnswer(a)) if refused(a)), "{answer:?}");
    assert!(world.d.store() == Memory::background(d), "nothing was written");
    assert!(pull(&world.d, &reference, wish(Assurance::Full).push()).await.is_ok(), "its consumer is served");
    assert!(world.d.store() == expected(p, d));
    world.stop().await;
}
