//! The PP, FR and LS cases for push: stages, failure, order, loss and leases where the producer's ranks write, between whole engines.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::time::Duration;

use kvferry::{
    Admission, Assurance, Bytes, Closing, ContentKey, DstGroup, Failed, FailureCause, Mode, OfferSpec, OwnerEvent,
    Phase, PullError, PullHandle, PullSpec, Reference, SrcPaged, Tail, TokenRange, Tokens, Ttl,
};
use kvferry_geometry::spec::Item;
use kvferry_oracle::Memory;
use kvferry_proto::peer::BindRefusal;
use kvferry_proto::wire::kind;
use kvferry_tests::between::{Between, Fate, Way};
use kvferry_tests::by_hand_states::{Ask, Shape, gqa, mla};
use kvferry_tests::losses::one_loss;
use kvferry_tests::mortal::Mortal;
use kvferry_tests::moved::{Asked, By, in_every_mode};
use kvferry_tests::running::{
    CACHED, DST_BLOCKS, Running, SECOND, SRC_BLOCKS, TOKENS, World, blocks_of, cause, event, expected, expected_in,
    fill, key, offer, offer_of, prefill_shape, pull, roomy_shape, table, until, wanted, wish, wish_into,
};
use kvferry_tests::shapes::{falcon_h1, staged, windows};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork};

/// The prompt, pushed into the blocks of pull `n`.
fn push_into(n: u32) -> PullSpec {
    wish_into(n, Assurance::Fenced).push()
}

/// How a push failed.
async fn failed(handle: PullHandle) -> Failed {
    match tokio::time::timeout(20 * SECOND, handle).await.expect("every request ends") {
        Err(PullError::Failed(failed)) => *failed,
        other => panic!("it must fail, and say why: {other:?}"),
    }
}

/// Waits until all requests of the consumer are being written.
async fn writing(d: &Running, count: usize) {
    let writing = async || d.owner.snapshot().await.unwrap().pulls.iter().filter(|p| p.phase == "write").count();
    until("written to", async || writing().await == count).await;
}

fn held(blocks: usize) -> OfferSpec {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    OfferSpec::new(vec![SrcPaged { table: table(&SRC_BLOCKS[..blocks]), held, tail: Tail::Exact }.into()], key())
}

/// Operations that begin far too late.
fn never() -> MemFaults {
    MemFaults { start_delay: 60 * SECOND..61 * SECOND, ..MemFaults::default() }
}

async fn everywhere(src: &Shape, dst: &Shape, tokens: u64) {
    let delivered = in_every_mode(&src.manifest(), &dst.manifest(), Ask::of(tokens)).await;
    assert!(delivered.report().bytes().get() > 0);
}

/// Pipeline stages on either side and on both: whichever stage has a layer writes it where the other side's stage has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pp_01_stages_on_either_side_are_pushed() {
    let heads = |n: &str| gqa(n, 8);
    let cuts: [(&[usize], &[usize]); 5] =
        [(&[2, 2], &[4]), (&[4], &[2, 2]), (&[3, 1], &[1, 2, 1]), (&[1, 1, 1, 1], &[2, 2]), (&[3, 2], &[5])];
    for (src, dst) in cuts {
        everywhere(&staged(2, heads, src), &staged(2, heads, dst), 55).await;
        everywhere(&staged(2, mla, src), &staged(1, mla, dst), 55).await;
    }
}

/// The reported setup: attention at layers 1, 3, 5 and 7 only, and two stages. The second stage's first attention layer is layer 5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pp_01_attention_at_some_layers_is_pushed_by_name() {
    let names = ["layers.1", "layers.3", "layers.5", "layers.7"];
    let engine = |stages: &[&[&str]]| {
        let items: Vec<Item> = names.iter().map(|n| gqa(n, 8)).collect();
        Shape::new(items, 1).stages(stages)
    };
    let (p, d) = (engine(&[&["layers.1", "layers.3"], &["layers.5", "layers.7"]]), engine(&[&names]));
    let delivered = in_every_mode(&p.manifest(), &d.manifest(), Ask::of(55)).await;
    let pairs: Vec<_> = delivered.report().pairs.iter().map(|p| (p.src.get(), p.dst.get(), p.bytes.get())).collect();
    assert_eq!(pairs, [(0, 0, 2 * 8 * 512 * 55), (1, 0, 2 * 8 * 512 * 55)]);
}

/// Windows beside full layers, and states beside attention, in stages of every kind: also one of states only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pp_01_stages_of_hybrids_are_pushed() {
    for (src, dst) in [(&[2, 2][..], &[4][..]), (&[4], &[2, 2]), (&[1, 3], &[3, 1])] {
        everywhere(&windows(2, src, true), &windows(4, dst, true), 200).await;
        everywhere(&falcon_h1(2, src, 16), &falcon_h1(1, dst, 16), 55).await;
    }
    everywhere(&falcon_h1(1, &[1, 1, 1, 1], 16), &falcon_h1(2, &[4], 16), 55).await;
}

/// Stages, tensor-parallel sizes up and down, and blocks that don't divide, all together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pp_01_stages_of_other_sizes_and_blocks_are_pushed() {
    let heads = |n: &str| gqa(n, 8);
    for (src, dst) in [((2, &[1, 2][..], 16), (4, &[3][..], 64)), ((4, &[2, 1], 64), (2, &[1, 2], 24))] {
        let engine = |(tp, stages, block): (u32, &[usize], u32)| staged(tp, heads, stages).blocks(block, 6);
        everywhere(&engine(src), &engine(dst), 55).await;
    }
    everywhere(&windows(4, &[2, 2], false).blocks(16, 14), &windows(2, &[1, 3], false).blocks(24, 14), 200).await;
}

/// The producer's engine says nothing more after its offer, or its seal, and has nothing else to do; the consumer's grant comes when it
/// has long been idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pp_04_an_idle_engine_pushes() {
    let mut world = World::roomy(2).await;
    let mut events = world.p.owner.take_events().unwrap();
    let whole = world.p.owner.offer(offer()).await.unwrap();
    let mut stream = world.p.owner.announce(offer()).await.unwrap();
    let streamed = stream.reference().clone();
    stream.seal(offer().groups).await.unwrap();
    drop(stream);
    tokio::time::sleep(SECOND / 2).await;
    for (n, reference) in (0..).zip([whole, streamed]) {
        let delivered = pull(&world.d, &reference, push_into(n)).await.unwrap();
        assert!(delivered.report().took < 5 * SECOND);
        assert_eq!(
            event(&mut events).await,
            Some(OwnerEvent::Released { lease: reference.lease(), how: Closing::Read })
        );
    }
    assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &[blocks_of(0), blocks_of(1)]));
    world.stop().await;
}

/// One of four writers fails at once, the others only when they have stopped, late: nothing is told before, and then once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_01_a_push_fails_when_its_last_writer_has_stopped() {
    let mut world = World::roomy(1).await;
    let mut events = world.p.owner.take_events().unwrap();
    // Their bytes move at once, their ends come later.
    world.late_writes(SECOND);
    let fail = (0..100).map(|op| (op, Break { at_byte: 0, in_doubt: false })).collect();
    assert!(world.network.set_faults(world.p.endpoints[0], MemFaults { fail, ..MemFaults::default() }));
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference.clone(), push_into(0)).await.unwrap();
    let failed = failed(handle).await;
    assert!(matches!(failed.cause, FailureCause::Writers { failed: 1, ranks: 4, .. }), "{failed}");
    assert!(
        failed.report.writers_in_doubt.is_empty() && failed.report.groups[0].valid.end().get() <= CACHED,
        "{failed}"
    );
    let over = event(&mut events).await;
    assert_eq!(over, Some(OwnerEvent::Released { lease: reference.lease(), how: Closing::Abandoned }));
    assert_eq!(world.d.owner.quarantined().await.unwrap(), 0);
    world.stop().await;
}

/// Four writers are expected, and rank 2 can't post: the consumer is told so by name, when the others have stopped, and long before any
/// deadline. The next request is none the worse.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_03_a_write_that_cannot_be_posted_is_told() {
    let world = World::roomy(2).await;
    let fail = (0..100).map(|op| (op, Break { at_byte: 0, in_doubt: false })).collect();
    assert!(world.network.set_faults(world.p.endpoints[2], MemFaults { fail, ..MemFaults::default() }));
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let failed = failed(world.d.owner.pull(reference, push_into(0)).await.unwrap()).await;
    let FailureCause::Writers { failed: 1, ranks: 4, first } = &failed.cause else { panic!("{failed}") };
    assert!(!first.is_empty(), "{failed}");
    assert!(failed.report.took < 5 * SECOND, "{failed}");
    assert!(failed.report.writers_in_doubt.is_empty(), "{failed}");
    // The consumer's word that it wants no more of it takes a moment.
    until("over at the producer", async || world.p.owner.snapshot().await.unwrap().leases.is_empty()).await;
    let (p, d) = (world.p.owner.snapshot().await.unwrap(), world.d.owner.snapshot().await.unwrap());
    assert!(p.leases.is_empty() && d.pulls.is_empty() && d.quarantine.is_empty(), "{p:?} {d:?}");
    world.p.set_faults(&world.network, &MemFaults::default());
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(pull(&world.d, &reference, push_into(1)).await.is_ok());
    world.stop().await;
}

/// The consumer gives up while it waits for a producer that has crashed. Its blocks are not used again, since nobody can say that nothing
/// is written any more; where the engine vouches for a time, they come back after that, and it is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_05_a_producer_that_never_reports_holds_blocks_for_a_bounded_time() {
    let network = MemNetwork::new(7);
    let p = Mortal::start("prefill", &network, kvferry::Address::loopback(0), prefill_shape()).await;
    let told = |o: kvferry::OwnerBuilder| o.reclaim_after(Some(4 * SECOND));
    let mut d = Running::start_as("decode", &roomy_shape(2), &network, told).await;
    let mut events = d.owner.take_events().unwrap();
    fill(&p.engine, &d);
    let stream = p.engine.owner.announce(offer()).await.unwrap();
    let handle = d.owner.pull(stream.reference().clone(), push_into(0)).await.unwrap();
    let id = handle.id();
    writing(&d, 1).await;
    p.kill().await;
    let failed = failed(handle).await;
    assert!(matches!(failed.cause, FailureCause::Link { .. }), "{failed}");
    assert_eq!(failed.report.writers_in_doubt.len(), 4, "{failed}");
    d.owner.abort(id).unwrap();
    let seen = d.owner.snapshot().await.unwrap().quarantine;
    assert_eq!(seen.iter().map(|q| (q.blocks, q.writers.len())).collect::<Vec<_>>(), [(5, 4)]);
    assert_eq!(seen[0].producer.as_deref(), Some("prefill"));
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Reclaimed { pull: id, blocks: 5 }));
    assert_eq!(d.owner.quarantined().await.unwrap(), 0);
    // They can be had again.
    let other = Running::start("other", &prefill_shape(), &network).await;
    fill(&other, &d);
    let reference = other.owner.offer(offer()).await.unwrap();
    assert!(pull(&d, &reference, push_into(0)).await.is_ok());
    assert!(d.store() == expected_in(&other.manifest, &d.manifest, &[blocks_of(0)]));
    other.stop().await;
    d.stop().await;
}

/// The table of FR-07, where the producer writes: what is refused is refused before a byte has moved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_what_may_not_be_read_is_not_pushed_either() {
    let mut world = World::roomy(1).await;
    let mut events = world.p.owner.take_events().unwrap();
    let untouched = |world: &World| world.d.store() == Memory::background(&world.d.manifest);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let text = reference.to_string();
    // A lease that never was, another life, other content, blocks beyond the end, twice, too few.
    let unknown: Reference = text.replacen(&reference.lease().to_string(), &"5".repeat(32), 1).parse().unwrap();
    let refused = cause(pull(&world.d, &unknown, push_into(0)).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::UnknownLease));
    let stale: Reference = text.replacen(&reference.epoch().to_string(), &"0".repeat(32), 1).parse().unwrap();
    assert!(matches!(cause(pull(&world.d, &stale, push_into(0)).await), FailureCause::StaleEpoch { .. }));
    let other = PullSpec { content_key: ContentKey::of(&[1, 2, 3], "", &[]), ..push_into(0) };
    let refused = cause(pull(&world.d, &reference, other).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::WrongContent));
    for ids in [vec![30, 7, 8, 1, 45], vec![30, 7, 8, 1, 30], vec![30, 7, 8, 1]] {
        let spec = PullSpec { groups: vec![wanted(&ids, CACHED)], ..push_into(0) };
        let refused = cause(pull(&world.d, &reference, spec).await);
        let fits = FailureCause::Refused(BindRefusal::Unfit(String::new()));
        assert!(
            matches!(refused, FailureCause::Request(_))
                || std::mem::discriminant(&refused) == std::mem::discriminant(&fits),
            "{ids:?}: {refused}"
        );
    }
    assert!(world.p.owner.offer(offer_of(&[9, 2, 12])).await.is_err(), "the producer has 12 blocks");
    // Fewer tokens than are wanted are held.
    let short = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS - 1));
    let groups = vec![SrcPaged { table: table(&SRC_BLOCKS), held: short, tail: Tail::Exact }.into()];
    let less = world.p.owner.offer(OfferSpec { groups, ..offer() }).await.unwrap();
    let refused = cause(pull(&world.d, &less, push_into(0)).await);
    assert!(matches!(refused, FailureCause::Refused(BindRefusal::Unfit(_)) | FailureCause::Request(_)), "{refused}");
    // One that has expired.
    let brief = world.p.owner.offer(OfferSpec { ttl: Ttl::For(SECOND / 20), ..offer() }).await.unwrap();
    while event(&mut events).await != Some(OwnerEvent::Released { lease: brief.lease(), how: Closing::Expired }) {}
    let refused = cause(pull(&world.d, &brief, push_into(0)).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::UnknownLease));
    assert!(untouched(&world), "nothing was written");
    // The one beside them is in order; then it is used up, at once and once more.
    assert!(pull(&world.d, &reference, push_into(0)).await.is_ok());
    for _ in 0..2 {
        let again = cause(pull(&world.d, &reference, push_into(0)).await);
        assert_eq!(again, FailureCause::Refused(BindRefusal::UnknownLease));
    }
    assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &[blocks_of(0)]));
    world.stop().await;
}

/// A stale reference whose blocks are another prompt's now: nothing of that is written to anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_a_stale_reference_is_pushed_nothing_of_who_has_the_blocks_now() {
    let world = World::start().await;
    let stale = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.p.owner.withdraw(stale.lease()).await.unwrap());
    for region in world.p.memory.iter().flatten() {
        region.fill(0, region.len().get(), 0xB7).unwrap();
    }
    let now = OfferSpec { content_key: ContentKey::of(&[1, 2, 3], "", &[]), ..offer() };
    let now = world.p.owner.offer(now).await.unwrap();
    let push = || wish(Assurance::Full).push();
    let refused = cause(pull(&world.d, &stale, push()).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::UnknownLease));
    let refused = cause(pull(&world.d, &now, push()).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::WrongContent));
    assert!(world.d.store() == Memory::background(&world.d.manifest));
    assert_eq!(world.p.open_leases().await, [now.lease().to_string()], "and it is still there");
    world.stop().await;
}

/// A hybrid whose push fails: the request fails, as one, and of none of its groups is more in place than was cached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_a_hybrid_push_fails_as_one_request() {
    let (p, d) = (falcon_h1(2, &[4], 16).manifest(), falcon_h1(1, &[4], 16).manifest());
    let asked = Asked::start(&p, &d, Ask::of(55).cached(16)).await;
    let fail = (0..100).map(|op| (op, Break { at_byte: 100, in_doubt: false })).collect();
    assert!(asked.network.set_faults(asked.p.endpoints[1], MemFaults { fail, ..MemFaults::default() }));
    let reference = asked.p.owner.offer(asked.offer()).await.unwrap();
    let failed = failed(asked.d.owner.pull(reference, asked.spec(By::Push)).await.unwrap()).await;
    assert!(matches!(failed.cause, FailureCause::Writers { failed: 1, ranks: 2, .. }), "{failed}");
    let [attention, states] = failed.report.groups.as_slice() else { panic!("{failed}") };
    assert!(attention.valid.end().get() <= 16 && attention.hole == Some(Tokens::new(16)), "{failed}");
    assert!(states.states.is_empty(), "{failed}");
    asked.p.set_faults(&asked.network, &MemFaults::default());
    asked.serve(By::Push).await;
    asked.stop().await;
}

/// Ends of writes are never told, so that a time-out proves nothing: the request ends in time, and its blocks stay lent. How many, and who
/// may still write them, can be seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_09_a_push_that_times_out_frees_nothing() {
    let mut world = World::roomy(1).await;
    let mut events = world.p.owner.take_events().unwrap();
    let lost = MemFaults { lose_completion: (0..100).collect(), ..MemFaults::default() };
    world.p.set_faults(&world.network, &lost);
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let short = PullSpec { deadline: SECOND / 2, ..wish(Assurance::Fenced).push() };
    let failed = failed(world.d.owner.pull(reference.clone(), short).await.unwrap()).await;
    assert!(matches!(failed.cause, FailureCause::Deadline { .. }), "{failed}");
    assert_eq!(failed.report.writers_in_doubt.len(), 4, "{failed}");
    assert!(failed.report.took < 5 * SECOND, "{failed}");
    let over = event(&mut events).await;
    assert_eq!(over, Some(OwnerEvent::Released { lease: reference.lease(), how: Closing::Abandoned }));
    let seen = world.d.owner.snapshot().await.unwrap().quarantine;
    assert_eq!(seen.iter().map(|q| (q.blocks, q.writers.len())).collect::<Vec<_>>(), [(5, 4)]);
    world.p.set_faults(&world.network, &MemFaults::default());
    for spec in [wish(Assurance::Fenced), wish(Assurance::Fenced).push()] {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let lent = cause(pull(&world.d, &reference, spec).await);
        assert!(matches!(lent, FailureCause::Overlap(_)), "{lent}");
    }
    // Others can be had, and time changes nothing.
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(pull(&world.d, &reference, push_into(0)).await.is_ok());
    assert_eq!(world.d.owner.quarantined().await.unwrap(), 5);
    world.stop().await;
}

/// A transfer that takes longer than its request may: the request fails at its deadline, and its blocks are back as soon as the writers
/// have said that they have stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_09_a_push_that_stops_late_gives_its_blocks_back_then() {
    let world = World::start().await;
    world.p.set_faults(&world.network, &never());
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let short = PullSpec { deadline: SECOND / 2, ..wish(Assurance::Fenced).push() };
    let failed = failed(world.d.owner.pull(reference, short).await.unwrap()).await;
    assert!(matches!(failed.cause, FailureCause::Deadline { .. }), "{failed}");
    assert!(failed.report.phases.of(Phase::Write) > Duration::ZERO, "{failed}");
    until("given back", async || world.d.owner.quarantined().await.unwrap() == 0).await;
    world.p.set_faults(&world.network, &MemFaults::default());
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(pull(&world.d, &reference, wish(Assurance::Full).push()).await.is_ok());
    assert!(world.d.store() == expected(&world.p.manifest, &world.d.manifest));
    world.stop().await;
}

/// Blocks of a prompt that is finished and not sent yet are pinned; once they are taken back, whoever comes for them is told at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_10_a_pending_send_pins_its_blocks() {
    let mut world = World::roomy(2).await;
    let mut events = world.p.owner.take_events().unwrap();
    let reference = world.p.owner.offer(offer()).await.unwrap();
    // The producer would have other tokens brought into the same blocks.
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    let theirs = vec![SrcPaged { table: table(&DST_BLOCKS), held, tail: Tail::Exact }.into()];
    let theirs = world.d.owner.offer(OfferSpec::new(theirs, key())).await.unwrap();
    let room: Vec<DstGroup> = vec![wanted(&SRC_BLOCKS, 0)];
    let evict = || PullSpec { groups: room.clone(), ..wish(Assurance::Fenced) };
    let lent = cause(pull(&world.p, &theirs, evict()).await);
    assert!(matches!(lent, FailureCause::Overlap(_)), "{lent}");
    // Also while it is sent, slowly.
    world.late_writes(SECOND / 2);
    let handle = world.d.owner.pull(reference.clone(), push_into(0)).await.unwrap();
    writing(&world.d, 1).await;
    let lent = cause(pull(&world.p, &theirs, evict().push()).await);
    assert!(matches!(lent, FailureCause::Overlap(_)), "{lent}");
    handle.await.unwrap();
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: reference.lease(), how: Closing::Read }));
    // Free at last; and a send that is asked for when its blocks are gone fails at once, not by a deadline.
    let gone = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.p.owner.withdraw(gone.lease()).await.unwrap());
    let refused = failed(world.d.owner.pull(gone, push_into(1)).await.unwrap()).await;
    assert_eq!(refused.cause, FailureCause::Refused(BindRefusal::UnknownLease));
    assert!(refused.report.took < 5 * SECOND, "{refused}");
    assert!(pull(&world.p, &theirs, evict().push()).await.is_ok());
    world.stop().await;
}

/// Every bad end of a write is one failure, and the next request is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_12_every_fault_of_a_write_ends_the_push_once() {
    let world = World::roomy(12).await;
    for (n, at_byte) in [0, 1, 1000, 4000].into_iter().enumerate() {
        let n = 2 * u32::try_from(n).unwrap();
        let fail = (0..100).map(|op| (op, Break { at_byte, in_doubt: false })).collect();
        world.p.set_faults(&world.network, &MemFaults { fail, slice: Some(300), ..MemFaults::default() });
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let failed = failed(world.d.owner.pull(reference, push_into(n)).await.unwrap()).await;
        assert!(matches!(failed.cause, FailureCause::Writers { ranks: 4, .. }), "{failed}");
        assert!(failed.report.writers_in_doubt.is_empty(), "{failed}");
        world.p.set_faults(&world.network, &MemFaults::default());
        let reference = world.p.owner.offer(offer()).await.unwrap();
        assert!(pull(&world.d, &reference, push_into(n + 1)).await.is_ok());
    }
    assert!(world.p.owner.snapshot().await.unwrap().leases.is_empty());
    assert_eq!(world.d.owner.quarantined().await.unwrap(), 0);
    world.stop().await;
}

/// What the producer may have in flight is less than one request: it goes in slices. Of twenty at once some wait, all are delivered, and
/// nobody holds the engines up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_13_pushes_larger_than_what_may_be_in_flight_are_served() {
    let network = MemNetwork::new(7);
    // A rank writes 4096 bytes of a request.
    let few = Admission {
        slice: Bytes::new(512),
        peer_bytes: Bytes::new(2048),
        bytes: Bytes::new(3072),
        ..Admission::default()
    };
    let p = Running::of("prefill", prefill_shape().manifest(), &network, |p| p, |w| w.admission(few)).await;
    let d = Running::start("decode", &roomy_shape(20), &network).await;
    fill(&p, &d);
    let mut pushes = Vec::new();
    for n in 0..20 {
        let reference = p.owner.offer(offer()).await.unwrap();
        pushes.push(d.owner.pull(reference, push_into(n)).await.unwrap());
    }
    let asked = std::time::Instant::now();
    p.owner.snapshot().await.unwrap();
    assert!(asked.elapsed() < 5 * SECOND);
    for push in pushes {
        push.await.unwrap();
    }
    let all: Vec<[u32; 5]> = (0..20).map(blocks_of).collect();
    assert!(d.store() == expected_in(&p.manifest, &d.manifest, &all));
    p.stop().await;
    d.stop().await;
}

/// However writes and their ends are delayed, cut and shuffled: what is told to be delivered is there to the last byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_14_delivered_is_told_after_the_last_byte() {
    let ms = |n| Duration::from_millis(n);
    let kinds = [
        MemFaults::default(),
        MemFaults { slice: Some(100), shuffle: true, ..MemFaults::default() },
        MemFaults { slice: Some(1000), completion_delay: ms(20)..ms(40), ..MemFaults::default() },
        MemFaults { start_delay: ms(5)..ms(80), notify_delay: ms(5)..ms(50), ..MemFaults::default() },
        MemFaults { duplicate_completion: (0..100).collect(), start_delay: ms(1)..ms(30), ..MemFaults::default() },
    ];
    let world = World::roomy(20).await;
    let mut there = Vec::new();
    for (round, faults) in (0u32..).zip(&kinds) {
        world.p.set_faults(&world.network, faults);
        for n in 4 * round..4 * round + 4 {
            let reference = world.p.owner.offer(offer()).await.unwrap();
            // Nothing is compared: the bytes are there because the writers say so.
            pull(&world.d, &reference, push_into(n)).await.unwrap();
            there.push(blocks_of(n));
            assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &there), "{faults:?}");
        }
    }
    world.stop().await;
}

/// The messages of a first request that is pushed: hello, grant and release one way, hello, answer, written and verdict the other.
const EACH: [(Way, usize); 7] =
    [(Way::Forth, 0), (Way::Forth, 1), (Way::Forth, 2), (Way::Back, 0), (Way::Back, 1), (Way::Back, 2), (Way::Back, 3)];
const PUSH: Mode = Mode::Push { progress: false };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_15_a_link_that_is_cut_at_any_message_of_a_push_ends_it_once() {
    one_loss(Fate::Cut, PUSH, &EACH).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_15_a_message_of_a_push_that_is_lost_ends_it_by_its_deadline() {
    one_loss(Fate::Lose, PUSH, &EACH).await;
}

/// The consumer stops in the middle, and that word or the answer to it is lost: it can't know that nobody writes, until it is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_15_a_stop_that_is_lost_leaves_nothing_behind() {
    let terms = kvferry::LeaseTerms { ttl: Some(SECOND), extension: SECOND, beat: SECOND / 4, margin: SECOND / 50 };
    let told = |o: kvferry::OwnerBuilder| o.lease(terms);
    for lost in [kind::STOP, kind::STOPPED] {
        let world = World::start_as(&roomy_shape(2), told, told).await;
        world.p.set_faults(&world.network, &never());
        let once = std::sync::atomic::AtomicBool::new(false);
        let between = Between::start(world.p.address(), move |seen| {
            let first = seen.kind == lost && !once.swap(true, std::sync::atomic::Ordering::Relaxed);
            if first { Fate::Lose } else { Fate::Pass }
        })
        .await;
        let reference = between.by_way(&world.p.owner.offer(offer()).await.unwrap());
        let short = PullSpec { deadline: SECOND / 2, ..push_into(0) };
        let failed = failed(world.d.owner.pull(reference, short).await.unwrap()).await;
        assert!(matches!(failed.cause, FailureCause::Deadline { .. }), "{failed}");
        until("the producer has its blocks", async || world.p.owner.snapshot().await.unwrap().leases.is_empty()).await;
        // By the next link at the latest it is known that nobody writes.
        world.p.set_faults(&world.network, &MemFaults::default());
        let reference = world.p.owner.offer(offer()).await.unwrap();
        assert!(pull(&world.d, &reference, push_into(1)).await.is_ok());
        until("the consumer has its blocks", async || world.d.owner.quarantined().await.unwrap() == 0).await;
        assert!(between.seen().iter().any(|s| s.kind == lost), "kind {lost} was never said");
        world.stop().await;
    }
}

/// An abort of what was delivered frees nothing: neither the consumer's blocks, nor another lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_07_an_abort_after_a_push_frees_nothing() {
    let mut world = World::roomy(2).await;
    let mut events = world.p.owner.take_events().unwrap();
    let first = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(first.clone(), push_into(0)).await.unwrap();
    let id = handle.id();
    handle.await.unwrap();
    assert_eq!(event(&mut events).await, Some(OwnerEvent::Released { lease: first.lease(), how: Closing::Read }));
    // Finished and not sent yet: it ends by its consumer or its time only.
    let waiting = world.p.owner.offer(offer()).await.unwrap();
    world.d.owner.abort(id).unwrap();
    tokio::time::sleep(SECOND / 10).await;
    assert_eq!(world.p.open_leases().await, [waiting.lease().to_string()]);
    assert!(pull(&world.d, &waiting, push_into(1)).await.is_ok());
    assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &[blocks_of(0), blocks_of(1)]));
    world.stop().await;
}

/// The prompt is given up while it is computed: its blocks are free at once, whoever was granted room is told, and nothing of it has
/// gone out that was not final.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_07_an_abort_while_prefilling_exports_nothing() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    for asked in [false, true] {
        let stream = world.p.owner.announce(held(2)).await.unwrap();
        let reference = stream.reference().clone();
        let handle = if asked {
            let push = world.d.owner.pull(reference.clone(), wish(Assurance::Fenced).push()).await.unwrap();
            writing(&world.d, 1).await;
            Some(push)
        } else {
            None
        };
        drop(stream);
        let over = event(&mut events).await;
        assert_eq!(over, Some(OwnerEvent::Released { lease: reference.lease(), how: Closing::Withdrawn }));
        if let Some(handle) = handle {
            let failed = failed(handle).await;
            assert_eq!(failed.cause, FailureCause::LeaseClosed { how: Closing::Withdrawn }, "{failed}");
            assert!(failed.report.writers_in_doubt.is_empty(), "{failed}");
        }
        let refused = cause(pull(&world.d, &reference, wish(Assurance::Fenced).push()).await);
        assert_eq!(refused, FailureCause::Refused(BindRefusal::UnknownLease));
    }
    assert!(world.d.store() == Memory::background(&world.d.manifest), "nothing was final");
    assert!(world.p.owner.snapshot().await.unwrap().leases.is_empty());
    assert_eq!(world.d.owner.quarantined().await.unwrap(), 0);
    world.stop().await;
}

/// Four samples of one prompt: one is pushed, three are hits of what it has brought. Each is released by its own name, at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_09_every_sample_is_released_though_one_is_pushed() {
    let mut world = World::roomy(1).await;
    let mut events = world.p.owner.take_events().unwrap();
    let mut samples = Vec::new();
    for _ in 0..4 {
        samples.push(world.p.owner.offer(OfferSpec { ttl: Ttl::Never, ..offer() }).await.unwrap());
    }
    pull(&world.d, &samples[0], push_into(0)).await.unwrap();
    for sample in &samples[1..] {
        let hit = PullSpec { groups: vec![wanted(&blocks_of(0), TOKENS)], ..push_into(0) };
        assert_eq!(pull(&world.d, sample, hit).await.unwrap().report().bytes().get(), 0);
    }
    for sample in &samples {
        let released = OwnerEvent::Released { lease: sample.lease(), how: Closing::Read };
        assert_eq!(event(&mut events).await, Some(released));
    }
    assert!(world.p.owner.snapshot().await.unwrap().leases.is_empty());
    assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &[blocks_of(0)]));
    world.stop().await;
}

/// A request that the consumer will never admit, though its prompt is still being computed: one message, and the producer has its blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ls_10_a_stream_that_was_not_admitted_is_declined_at_once() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    let mut stream = world.p.owner.announce(OfferSpec { ttl: Ttl::Never, ..held(1) }).await.unwrap();
    let reference = stream.reference().clone();
    world.d.owner.decline(&reference).unwrap();
    let over = event(&mut events).await;
    assert_eq!(over, Some(OwnerEvent::Released { lease: reference.lease(), how: Closing::Declined }));
    assert!(stream.seal(offer().groups).await.is_err(), "it is over");
    let (p, d) = (world.p.owner.snapshot().await.unwrap(), world.d.owner.snapshot().await.unwrap());
    assert!(p.leases.is_empty() && d.pulls.is_empty() && d.quarantine.is_empty(), "{p:?} {d:?}");
    world.stop().await;
}
