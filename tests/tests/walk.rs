//! The walk, from a registered cache to verified bytes, as one test that can be read from top to bottom; and what
//! happens where it must not go on.
//!
//! Two engines of different shapes live in one process: each rank is a thread with an endpoint of the in-memory transport,
//! owners meet over TCP on loopback, ranks join over Unix sockets. The prefill engine's memory is a pattern of logical
//! coordinates, and the slow oracle's walk says what every byte of the decode engine must be afterwards.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::time::Duration;

use kvferry::{
    Address, Assurance, Closing, ContentKey, FailureCause, LeaseTerms, Mode, OwnerEvent, PullError, PullSpec, RankId,
    Reference, StartError,
};
use kvferry_oracle::Memory;
use kvferry_proto::peer::BindRefusal;
use kvferry_proto::rank::Stage;
use kvferry_tests::running::{
    self, CACHED, DST_BLOCKS, SECOND, TOKENS, World, blocks_of, cause, decode_shape, event, expected, expected_in,
    offer, offer_of, wanted, wish, wish_into,
};
use kvferry_transport::mem::MemFaults;

/// The producer's ranks write.
const PUSH: Mode = Mode::Push { progress: false };

fn by(mode: Mode, spec: PullSpec) -> PullSpec {
    PullSpec { mode: Some(mode), ..spec }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_walk() {
    walked(Mode::Pull).await;
}

/// The same with the producer's ranks writing: nothing else is different for the engines.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_walk_pushed() {
    walked(PUSH).await;
}

async fn walked(mode: Mode) {
    // Steps 1 to 3: two engines, six ranks, described, registered and joined.
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();

    // Step 7, the producer's half: blocks and a content key become a reference, which a router carries as text.
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let carried: Reference = reference.to_string().parse().unwrap();
    assert_eq!(carried, reference);

    // Steps 4 to 6 on first contact (owners meet, caches are compared, peers are named), then 7 (bind), 8 (which bytes), 9
    // (bounds), 10 (they move), 11 (both sides digest them), 12 (one release: held), 13 (the engine is told).
    let delivered = world.pull(&carried, by(mode, wish(Assurance::Full))).await.unwrap();

    // Who read how much from whom: each decode rank has two heads, each prefill rank one.
    let report = delivered.report();
    let pairs: Vec<_> = report.pairs.iter().map(|p| (p.dst.get(), p.src.get(), p.bytes.get())).collect();
    let each = (TOKENS - CACHED) * 2 * 2 * 32;
    assert_eq!(pairs, [(0, 0, each), (0, 1, each), (1, 2, each), (1, 3, each)]);
    assert_eq!(delivered.assurance(), Assurance::Full);
    assert_eq!(report.compared, report.bytes());
    assert_eq!(report.zeroed.get(), (40 - TOKENS) * 4 * 2 * 2 * 32);
    assert!(report.pairs.iter().all(|p| p.rows > 0 && p.descriptors_after <= p.descriptors_before));

    // Every byte of the decode engine is what it would have computed itself, or what it was.
    assert!(world.d.store() == expected(&world.p.manifest, &world.d.manifest));

    // The producer has its blocks again, and the lease never answers *held* again.
    let released = event(&mut events).await.unwrap();
    assert_eq!(released, OwnerEvent::Released { lease: reference.lease(), how: Closing::Read });
    let again = world.pull(&reference, by(mode, wish(Assurance::Full))).await;
    assert_eq!(cause(again), FailureCause::Refused(BindRefusal::UnknownLease));
    world.stop().await;
}

/// Pulls, pushes, and both among each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_pulls_at_a_time_each_end_once() {
    many(|_| Mode::Pull).await;
    many(|_| PUSH).await;
    many(|i| if i % 3 == 0 { Mode::Pull } else { PUSH }).await;
}

async fn many(mode: impl Fn(u32) -> Mode) {
    let world = World::roomy(20).await;
    let mut handles = Vec::new();
    for i in 0..20 {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let assurance = if i % 2 == 0 { Assurance::Full } else { Assurance::Fenced };
        let spec = by(mode(i), wish_into(i, assurance));
        handles.push(world.d.owner.pull(reference, spec).await.unwrap());
    }
    for handle in handles {
        let delivered = handle.await.unwrap();
        assert_eq!(delivered.report().pairs.len(), 4);
    }
    let all: Vec<[u32; 5]> = (0..20).map(blocks_of).collect();
    assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &all));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_hit_reads_nothing_and_releases() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    for mode in [Mode::Pull, PUSH] {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let mut all = by(mode, wish(Assurance::Full));
        all.groups = vec![wanted(&DST_BLOCKS, TOKENS)];
        let delivered = world.pull(&reference, all).await.unwrap();
        assert_eq!((delivered.report().bytes().get(), delivered.report().zeroed.get()), (0, 0));
        assert!(world.d.store() == Memory::background(&world.d.manifest), "nothing was touched");
        assert!(matches!(event(&mut events).await, Some(OwnerEvent::Released { how: Closing::Read, .. })));
    }
    world.stop().await;
}

/// FR-07: nothing that is refused touches a byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_not_be_read_is_refused_before_a_byte_moves() {
    let world = World::start().await;
    let reference = world.p.owner.offer(offer()).await.unwrap();

    let mut other_content = wish(Assurance::Full);
    other_content.content_key = ContentKey::of(&[1, 2, 3], "", &[]);
    let refused = world.pull(&reference, other_content).await;
    assert_eq!(cause(refused), FailureCause::Refused(BindRefusal::WrongContent));

    // Cases of the table: a lease that never was, a block beyond the end, a block twice, too little room.
    let text = reference.to_string();
    let unknown: Reference = text.replacen(&text[9..41], &"0".repeat(32), 1).parse().unwrap();
    let refused = world.pull(&unknown, wish(Assurance::Full)).await;
    assert_eq!(cause(refused), FailureCause::Refused(BindRefusal::UnknownLease));

    let stale: Reference = text.replacen(&text[42..74], &"0".repeat(32), 1).parse().unwrap();
    let refused = world.pull(&stale, wish(Assurance::Full)).await;
    assert!(matches!(cause(refused), FailureCause::StaleEpoch { .. }));

    let sampled = world.pull(&reference, wish(Assurance::Sampled)).await;
    assert!(matches!(cause(sampled), FailureCause::NotAssured(_)));

    assert!(world.d.store() == Memory::background(&world.d.manifest), "nothing was touched");
    // A refused bind leaves the lease as it was.
    assert!(world.pull(&reference, wish(Assurance::Full)).await.is_ok());

    for ids in [vec![30, 7, 8, 1, 40], vec![30, 7, 8, 1, 30], vec![30, 7, 8, 1]] {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let mut wrong = wish(Assurance::Full);
        wrong.groups = vec![wanted(&ids, CACHED)];
        let refused = world.pull(&reference, wrong).await;
        assert!(matches!(cause(refused), FailureCause::Request(_)), "{ids:?}");
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_models_do_not_talk_and_both_values_are_named() {
    let world = World::start_as(&decode_shape(), |p| p, |d| d.model_identity("model@2")).await;
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let refused = cause(world.pull(&reference, wish(Assurance::Full)).await);
    let FailureCause::Handshake { reasons, .. } = &refused else { panic!("{refused}") };
    assert!(reasons.iter().any(|r| r.contains("model@1") && r.contains("model@2")), "{reasons:?}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_taken_back_while_it_is_read_is_no_answer() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    world.late_reads(SECOND / 2);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference.clone(), wish(Assurance::Fenced)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    assert!(world.p.owner.withdraw(reference.lease()).await.unwrap());
    // The consumer is told at once; had the word been lost, its release would have been answered *stale*.
    assert_eq!(cause(handle.await), FailureCause::LeaseClosed { how: Closing::Withdrawn });
    assert!(!world.p.owner.withdraw(reference.lease()).await.unwrap(), "it is over");
    assert!(matches!(event(&mut events).await, Some(OwnerEvent::Released { how: Closing::Withdrawn, .. })));
    world.stop().await;
}

/// Leases have an end: a consumer's beats move it away for as long as it reads, and nobody's leave it where it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lasts_as_long_as_it_is_wanted() {
    // A third of the lease passes between two beats; the read takes four leases.
    let tenth = SECOND / 10;
    let terms = LeaseTerms { ttl: Some(4 * tenth), extension: 4 * tenth, beat: tenth, margin: tenth };
    let mut world = World::start_as(&decode_shape(), |p| p.lease(terms), |d| d.lease(terms)).await;
    let mut events = world.p.owner.take_events().unwrap();
    world.late_reads(16 * tenth);
    let wanted = world.p.owner.offer(offer()).await.unwrap();
    let delivered = world.pull(&wanted, wish(Assurance::Fenced)).await.unwrap();
    assert!(delivered.report().took > 16 * tenth);
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: wanted.lease(), how: Closing::Read }));

    let unwanted = world.p.owner.offer(offer()).await.unwrap();
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: unwanted.lease(), how: Closing::Expired }));
    let late = cause(world.pull(&unwanted, wish(Assurance::Fenced)).await);
    assert_eq!(late, FailureCause::Refused(BindRefusal::UnknownLease));

    // Who will not read says so, and the blocks are free at once.
    let declined = world.p.owner.offer(offer()).await.unwrap();
    world.d.owner.decline(&declined).unwrap();
    assert_eq!(
        event(&mut events).await,
        Some(OwnerEvent::Released { lease: declined.lease(), how: Closing::Declined })
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_bytes_are_found_and_named() {
    let world = World::start().await;
    world.late_reads(SECOND / 2);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference, wish(Assurance::Full)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    // After the read, before the comparison: one byte of prefill rank 3, in the block of tokens 16 to 31.
    let view = world.p.manifest.ranks()[3].layout.views[1].as_ref().unwrap();
    let at = view.offset().get() + 2 * view.stride().get();
    world.p.memory[3][view.region().index()].fill(at, 1, 0xff).unwrap();
    let Err(PullError::Failed(failed)) = handle.await else { panic!("one byte differs") };
    // The other rank may have been told to stop.
    let differs = failed.report.faults.iter().filter(|(_, fault)| fault.stage == Stage::Compare);
    let [(rank, fault)] = differs.collect::<Vec<_>>()[..] else { panic!("one rank read it: {failed}") };
    assert_eq!(rank.get(), 1);
    let bad: Vec<_> = fault.bad.iter().map(|b| (b.src.get(), b.item.as_str().to_owned(), b.block.get())).collect();
    // Token 16 is in decode block 8, the third of its table.
    assert_eq!(bad, [(3, "layer.1".to_owned(), 8)]);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_producer_rank_fails_the_request_once_and_names_it() {
    let world = World::start().await;
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.network.kill(world.p.endpoints[2]));
    let Err(PullError::Failed(failed)) = world.pull(&reference, wish(Assurance::Full)).await else {
        panic!("a source is gone")
    };
    // The other rank was told to stop; whether it had read by then is a matter of time.
    assert_eq!(failed.cause, FailureCause::Ranks { failed: 1, ranks: 2 }, "{failed}");
    let (_, fault) = failed.report.faults.iter().find(|(rank, _)| rank.get() == 1).unwrap();
    assert!(fault.text.contains("source rank 2"), "{failed}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_that_stops_ends_its_requests() {
    let World { network, p, d } = World::start().await;
    let slow = MemFaults { start_delay: 5 * SECOND..6 * SECOND, ..MemFaults::default() };
    d.set_faults(&network, &slow);
    let reference = p.owner.offer(offer()).await.unwrap();
    let handle = d.owner.pull(reference, wish(Assurance::Full)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    p.stop().await;
    let Err(PullError::Failed(failed)) = handle.await else { panic!("its producer is gone") };
    assert!(failed.report.took < 4 * SECOND, "{failed}");
    d.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_rank_that_dies_ends_the_request_and_is_in_doubt() {
    let World { network, p, mut d } = World::start().await;
    let slow = MemFaults { start_delay: 5 * SECOND..6 * SECOND, ..MemFaults::default() };
    d.set_faults(&network, &slow);
    let mut events = d.owner.take_events().unwrap();
    let reference = p.owner.offer(offer()).await.unwrap();
    let handle = d.owner.pull(reference, wish(Assurance::Full)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    drop(d.workers.remove(0));
    let Err(PullError::Failed(failed)) = handle.await else { panic!("a rank is gone") };
    assert!(failed.report.in_doubt.contains(&RankId::new(0)), "{failed}");
    assert!(matches!(event(&mut events).await, Some(OwnerEvent::RankLost { rank, .. }) if rank.get() == 0));
    p.stop().await;
    d.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_and_cancelling_end_a_pull_and_free_the_lease() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    let slow = MemFaults { start_delay: 60 * SECOND..61 * SECOND, ..MemFaults::default() };
    world.d.set_faults(&world.network, &slow);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let mut short = wish(Assurance::Fenced);
    short.deadline = SECOND / 2;
    let late = cause(world.pull(&reference, short).await);
    assert!(matches!(late, FailureCause::Deadline { .. }), "{late}");
    assert!(matches!(event(&mut events).await, Some(OwnerEvent::Released { how: Closing::Abandoned, .. })));

    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference, wish(Assurance::Fenced)).await.unwrap();
    handle.cancel().await.unwrap();
    assert_eq!(cause(handle.await), FailureCause::Cancelled);

    // A dropped handle gives up, too. The cancelled one's lease may never have been bound.
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference.clone(), wish(Assurance::Fenced)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    drop(handle);
    loop {
        match event(&mut events).await {
            Some(OwnerEvent::Released { lease, how: Closing::Abandoned }) if lease == reference.lease() => break,
            Some(_) => {}
            None => panic!("the lease was not released"),
        }
    }
    world.stop().await;
}

/// More pulls than any queue has places, all reading, and then their producer goes: each ends, and the consumer's rank is
/// none the worse.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_that_is_cut_off_breaks_no_rank() {
    const PULLS: u32 = 1500;
    let world = World::roomy(PULLS).await;
    let slow = MemFaults { start_delay: 60 * SECOND..61 * SECOND, ..MemFaults::default() };
    world.d.set_faults(&world.network, &slow);
    let mut pulls = Vec::new();
    for n in 0..PULLS {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let spec = PullSpec { deadline: 60 * SECOND, ..wish_into(n, Assurance::Fenced) };
        pulls.push(world.d.owner.pull(reference, spec).await.unwrap());
    }
    tokio::time::sleep(SECOND).await;
    let World { p, d, .. } = world;
    p.stop().await;
    let mut in_doubt = 0;
    for pull in pulls {
        let ended = tokio::time::timeout(30 * SECOND, pull).await.expect("every pull ends");
        let Err(PullError::Failed(failed)) = ended else { panic!("its producer is gone: {ended:?}") };
        let gone =
            matches!(failed.cause, FailureCause::Link { .. } | FailureCause::LeaseClosed { how: Closing::Withdrawn });
        assert!(gone || matches!(failed.cause, FailureCause::Ranks { .. }), "{failed}");
        in_doubt += usize::from(!failed.report.in_doubt.is_empty());
    }
    println!("{in_doubt} of {PULLS} pulls ended in doubt");
    d.owner.offer(offer_of(&DST_BLOCKS)).await.expect("no rank is lost");
    d.stop().await;
}

/// More pulls at once than any queue has places are all delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_pulls_is_delivered() {
    let world = World::roomy(1200).await;
    let mut pulls = Vec::new();
    for n in 0..1200 {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let spec = PullSpec { deadline: 60 * SECOND, ..wish_into(n, Assurance::Full) };
        pulls.push(world.d.owner.pull(reference, spec).await.unwrap());
    }
    for pull in pulls {
        pull.await.unwrap();
    }
    world.stop().await;
}

/// When a shutdown returns, its ranks have been told, even where nothing runs beside the caller; every lease has ended.
#[tokio::test]
async fn a_shutdown_is_over_when_it_returns() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    for _ in 0..600 {
        world.p.owner.offer(offer()).await.unwrap();
    }
    world.stop().await;
    let mut released = 0;
    while let Some(OwnerEvent::Released { how: Closing::Withdrawn, .. }) = event(&mut events).await {
        released += 1;
    }
    assert_eq!(released, 600);
}

/// An offer whose caller has gone away before it knew the reference is taken back.
#[tokio::test]
async fn an_offer_that_nobody_sees_is_taken_back() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    for wait in [Duration::ZERO, SECOND / 50] {
        let unseen = async {
            // Asked for, then left alone while the owner answers, then dropped.
            let mut offered = Box::pin(world.p.owner.offer(offer()));
            let first = std::future::poll_fn(|cx| std::task::Poll::Ready(offered.as_mut().poll(cx).is_pending())).await;
            assert!(first, "the owner has not run yet");
            tokio::time::sleep(wait).await;
        };
        unseen.await;
        let ended = event(&mut events).await;
        assert!(matches!(ended, Some(OwnerEvent::Released { how: Closing::Withdrawn, .. })), "{ended:?}");
    }
    world.stop().await;
}

/// A start that fails leaves no socket; a socket that a killed owner has left is replaced, one in use is not.
#[tokio::test]
async fn sockets_are_left_to_nobody() {
    let dir = std::env::temp_dir().join(format!("kvferry-walk-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("peer.sock");
    let manifest = decode_shape().manifest();
    let builder = || {
        let owner = running::builder("d", &manifest).listen(Address::Unix(path.clone()));
        owner.handshake_timeout(Duration::MAX).grace(Duration::MAX)
    };
    let failed = builder().rank_socket(dir.join("no/such/directory.sock")).start().await;
    assert!(matches!(failed, Err(StartError::Listen { .. })));
    assert!(!path.exists(), "a failed start leaves nothing");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "as a killed owner leaves it");
    let owner = builder().start().await.unwrap();
    let second = builder().start().await;
    assert!(matches!(second, Err(StartError::Listen { .. })), "it is in use");
    assert!(path.exists(), "and stays so");
    let silent = std::os::unix::net::UnixStream::connect(owner.rank_socket()).unwrap();
    tokio::time::sleep(SECOND / 10).await;
    owner.withdraw(kvferry::LeaseId::new(1)).await.expect("no timeout is too long");
    owner.shutdown().await;
    drop(silent);
    assert!(!path.exists());
    std::fs::remove_dir_all(&dir).unwrap();
}
