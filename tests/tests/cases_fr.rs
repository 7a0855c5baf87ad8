//! FR cases: failure, order and loss, in the in-memory transport and between whole engines.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::sync::Arc;
use std::time::Duration;

use kvferry::{
    Assurance, Closing, FailureCause, Mode, OwnerEvent, PullError, PullSpec, Reference, SrcPaged, Tail, TokenRange,
    Tokens, Ttl,
};
use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::RankId;
use kvferry_oracle::Memory;
use kvferry_proto::peer::BindRefusal;
use kvferry_tests::between::{Fate, Way};
use kvferry_tests::by_hand::{Engine, Pair, flat, kv, request, source_byte};
use kvferry_tests::losses::one_loss;
use kvferry_tests::over_mem::World;
use kvferry_tests::running::{
    CACHED, DST_BLOCKS, SECOND, World as Engines, blocks_of, cause, event, expected, expected_in, offer, offer_of,
    roomy_shape, wanted, wish, wish_into,
};
use kvferry_transport::mem::{Break, MemFaults, MemNetwork};
use kvferry_transport::{Event, OpKind, Outcome, Region, Submission, Transport};

/// `count` scattered blocks of 64 B from one rank to another.
fn scattered(count: u32) -> (Pair, Arc<BoundedBatch>) {
    let engine = || Engine::new(vec![kv("a", 1, 2)], 1).blocks(16, 2 * count);
    let pair = Pair::new(&engine(), &engine());
    let src: Vec<u32> = (0..count).map(|i| 2 * i).collect();
    let dst: Vec<u32> = src.iter().rev().copied().collect();
    let bound = pair.bind(request(u64::from(count) * 16, &src, &dst));
    let lens = pair.compatible.src().region_lens(RankId::ZERO);
    let batch = pair.batch(0, 0, &bound).check(&lens, &lens).expect("inside");
    (pair, Arc::new(batch))
}

/// Writes a batch to a peer; gives how it ended and, for each notice the peer heard, whether every byte was there.
fn write(batch: &Arc<BoundedBatch>, faults: MemFaults) -> (Option<Outcome>, Vec<bool>) {
    let network = MemNetwork::new(3);
    let (mut src, mut dst) = (network.endpoint().expect("endpoint"), network.endpoint().expect("endpoint"));
    let len = usize::try_from(batch.src_lens()[0].get()).expect("small");
    let (from, to) = (Region::zeroed(len).expect("memory"), Region::zeroed(len).expect("memory"));
    from.write(0, &(0..len as u64).map(|at| source_byte(0, 0, at)).collect::<Vec<_>>()).expect("inside");
    src.register(from.clone()).expect("registered");
    dst.register(to.clone()).expect("registered");
    network.set_faults(src.endpoint(), faults);
    let peer = src.connect(&dst.blob()).expect("connected");
    let notify = Some(b"written".to_vec());
    src.submit(Submission { peer, kind: OpKind::Write, batch: Arc::clone(batch), notify }).expect("accepted");

    let is_complete = || {
        let (from, to) = (from.to_vec().expect("host"), to.to_vec().expect("host"));
        flat(batch.batch()).iter().all(|d| {
            let range = |at: u64| usize::try_from(at).expect("small")..usize::try_from(at + d.len).expect("small");
            from[range(d.src_offset)] == to[range(d.dst_offset)]
        })
    };
    let (mut end, mut heard) = (None, Vec::new());
    for ms in 0..500 {
        src.step(Duration::from_millis(ms));
        dst.step(Duration::from_millis(ms));
        while let Some(event) = dst.next_event() {
            if matches!(event, Event::Notification { .. }) {
                heard.push(is_complete());
            }
        }
        while let Some(event) = src.next_event() {
            if let Event::Completed { outcome, .. } = event {
                assert!(end.replace(outcome).is_none(), "one end");
            }
        }
    }
    (end, heard)
}

#[test]
fn fr_14_a_notice_follows_the_last_byte() {
    let ms = |n| Duration::from_millis(n);
    let kinds = [
        MemFaults::default(),
        MemFaults { slice: Some(300), ..MemFaults::default() },
        MemFaults { slice: Some(1000), completion_delay: ms(20)..ms(40), ..MemFaults::default() },
        MemFaults { start_delay: ms(5)..ms(50), notify_delay: ms(5)..ms(50), ..MemFaults::default() },
    ];
    for count in [1, 1000] {
        let (_, batch) = scattered(count);
        assert_eq!(batch.batch().descriptors(), u64::from(count));
        for faults in &kinds {
            let (end, heard) = write(&batch, faults.clone());
            assert!(matches!(end, Some(Outcome::Done(_))), "{end:?}");
            assert_eq!(heard, [true], "one notice, when every byte is there");
        }
    }
}

#[test]
fn fr_14_a_failed_transfer_gives_no_notice() {
    let (_, batch) = scattered(1000);
    for at_byte in [0, 1, 32_000, 63_999] {
        let fail = [(0, Break { at_byte, in_doubt: false })].into();
        let (end, heard) = write(&batch, MemFaults { fail, slice: Some(500), ..MemFaults::default() });
        assert!(matches!(end, Some(Outcome::Failed(_))), "{end:?}");
        assert!(heard.is_empty());
    }
}

#[test]
fn fr_15_a_lost_notice_leaves_the_consumer_whole() {
    let pair = Pair::new(&Engine::new(vec![kv("a", 8, 2)], 4), &Engine::new(vec![kv("a", 8, 2)], 1));
    let bound = pair.bind(request(16, &[0], &[0]));
    for lost in 0..4 {
        let mut world = World::new(&pair, 0xEE);
        world.set_faults(0, MemFaults { drop_notify: [u64::from(lost)].into(), ..MemFaults::default() });
        assert!(world.pull(&pair, &bound).is_done());
        assert_eq!(world.dst_memory(), pair.deliver(&bound, 0xEE));
        for src in 0..4 {
            assert_eq!(world.notices(src), if src == lost { vec![] } else { vec![0] });
        }
    }
}

/// The consumer's memory must be as it was.
fn untouched(engines: &Engines) -> bool {
    engines.d.store() == Memory::background(&engines.d.manifest)
}

/// The same text with another lease.
fn other_lease(reference: &Reference) -> Reference {
    reference.to_string().replacen(&reference.lease().to_string(), &"5".repeat(32), 1).parse().expect("a reference")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_a_lease_that_never_was_is_refused() {
    let engines = Engines::start().await;
    let reference = engines.p.owner.offer(offer()).await.expect("an offer");
    let refused = cause(engines.pull(&other_lease(&reference), wish(Assurance::Full)).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::UnknownLease));
    assert!(untouched(&engines));
    assert!(engines.pull(&reference, wish(Assurance::Full)).await.is_ok(), "the one beside it is in order");
    assert!(engines.d.store() == expected(&engines.p.manifest, &engines.d.manifest));
    engines.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_a_block_beyond_the_last_is_refused_on_either_side() {
    let engines = Engines::start().await;
    // The prefill engine has 12 blocks, the decode engine 40.
    for (src, dst) in [(vec![9, 2, 12], DST_BLOCKS.to_vec()), (vec![9, 2, 5], vec![30, 7, 8, 1, 40])] {
        let refused = match engines.p.owner.offer(offer_of(&src)).await {
            Ok(reference) => {
                let spec = PullSpec { groups: vec![wanted(&dst, CACHED)], ..wish(Assurance::Full) };
                cause(engines.pull(&reference, spec).await).to_string()
            }
            Err(error) => error.to_string(),
        };
        assert!(refused.contains("12") || refused.contains("40"), "{refused}");
    }
    assert!(untouched(&engines), "nothing was posted");
    engines.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_a_reference_that_was_read_is_used_up() {
    let engines = Engines::start_as(&roomy_shape(2), |p| p, |d| d).await;
    let reference = engines.p.owner.offer(offer()).await.expect("an offer");
    assert!(engines.pull(&reference, wish_into(0, Assurance::Full)).await.is_ok());
    // At once, and once more.
    for _ in 0..2 {
        let again = cause(engines.pull(&reference, wish_into(1, Assurance::Full)).await);
        assert_eq!(again, FailureCause::Refused(BindRefusal::UnknownLease));
    }
    assert!(engines.d.store() == expected_in(&engines.p.manifest, &engines.d.manifest, &[blocks_of(0)]));
    engines.stop().await;
}

/// The reported answer was the previous prompt's: here the blocks hold another prompt, and are offered again under another name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_a_stale_reference_reads_nothing_of_who_has_the_blocks_now() {
    let engines = Engines::start().await;
    let stale = engines.p.owner.offer(offer()).await.expect("an offer");
    assert!(engines.p.owner.withdraw(stale.lease()).await.expect("it runs"));
    for region in engines.p.memory.iter().flatten() {
        region.fill(0, region.len().get(), 0xB7).expect("host memory");
    }
    let other = kvferry::ContentKey::of(&[1, 2, 3], "", &[]);
    let now = kvferry::OfferSpec { content_key: other, ..offer() };
    let now = engines.p.owner.offer(now).await.expect("an offer");
    let refused = cause(engines.pull(&stale, wish(Assurance::Full)).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::UnknownLease));
    // Not even by the other's name: what it was computed from is another prompt.
    let refused = cause(engines.pull(&now, wish(Assurance::Full)).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::WrongContent));
    assert!(untouched(&engines));
    assert_eq!(engines.p.open_leases().await, [now.lease().to_string()], "and it is still there");
    engines.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_a_lease_that_has_expired_is_refused() {
    let mut engines = Engines::start().await;
    let mut events = engines.p.owner.take_events().expect("once");
    let brief = kvferry::OfferSpec { ttl: Ttl::For(SECOND / 20), ..offer() };
    let reference = engines.p.owner.offer(brief).await.expect("an offer");
    let over = OwnerEvent::Released { lease: reference.lease(), how: Closing::Expired };
    assert_eq!(event(&mut events).await, Some(over));
    let refused = cause(engines.pull(&reference, wish(Assurance::Full)).await);
    assert_eq!(refused, FailureCause::Refused(BindRefusal::UnknownLease));
    assert!(untouched(&engines));
    engines.stop().await;
}

/// A reference of more tokens than the producer holds, and of a consumer that thinks it has room for more: not a byte beyond what
/// was computed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_07_tokens_that_are_not_held_are_refused() {
    let engines = Engines::start().await;
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(36));
    let table = kvferry_tests::running::table(&kvferry_tests::running::SRC_BLOCKS);
    let groups = vec![SrcPaged { table, held, tail: Tail::Exact }.into()];
    let reference = engines.p.owner.offer(kvferry::OfferSpec { groups, ..offer() }).await.expect("an offer");
    let refused = cause(engines.pull(&reference, wish(Assurance::Full)).await);
    assert!(matches!(refused, FailureCause::Request(_)), "{refused}");
    assert!(untouched(&engines));
    engines.stop().await;
}

/// The read takes far longer than the request may: the request ends in time, its blocks stay lent until the read has stopped, and
/// how many these are can be seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_09_a_timeout_is_no_stop() {
    let engines = Engines::start().await;
    // Ends are never told: whether these reads have stopped, nobody can know.
    let lost = MemFaults { lose_completion: (0..100).collect(), ..MemFaults::default() };
    engines.d.set_faults(&engines.network, &lost);
    let reference = engines.p.owner.offer(offer()).await.expect("an offer");
    let short = PullSpec { deadline: SECOND / 2, ..wish(Assurance::Fenced) };
    let Err(PullError::Failed(failed)) = engines.pull(&reference, short).await else { panic!("it never ends") };
    assert!(matches!(failed.cause, FailureCause::Deadline { .. }), "{failed}");
    assert_eq!(failed.report.in_doubt.len(), 2, "{failed}");
    assert!(failed.report.took < 5 * SECOND, "{failed}");
    // 5 blocks, none of which can be had.
    assert_eq!(engines.d.owner.quarantined().await.expect("it runs"), DST_BLOCKS.len());
    let seen = engines.d.owner.snapshot().await.expect("it runs").quarantine;
    assert_eq!(seen.iter().map(|q| (q.blocks, q.ranks.len())).collect::<Vec<_>>(), [(5, 2)]);
    engines.d.set_faults(&engines.network, &MemFaults::default());
    let reference = engines.p.owner.offer(offer()).await.expect("an offer");
    let lent = cause(engines.pull(&reference, wish(Assurance::Fenced)).await);
    assert!(matches!(lent, FailureCause::Overlap(_)), "{lent}");
    // Others can be.
    let elsewhere = PullSpec { groups: vec![wanted(&[2, 3, 4, 5, 6], CACHED)], ..wish(Assurance::Fenced) };
    assert!(engines.pull(&reference, elsewhere).await.is_ok());
    engines.stop().await;
}

/// The messages of a first request: hello and bind and release one way, hello and grant and verdict the other.
const EACH: [(Way, usize); 6] =
    [(Way::Forth, 0), (Way::Forth, 1), (Way::Forth, 2), (Way::Back, 0), (Way::Back, 1), (Way::Back, 2)];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_15_a_link_that_is_cut_at_any_message_ends_the_request_once() {
    one_loss(Fate::Cut, Mode::Pull, &EACH).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fr_15_a_message_that_is_lost_ends_the_request_by_its_deadline() {
    one_loss(Fate::Lose, Mode::Pull, &EACH).await;
}
