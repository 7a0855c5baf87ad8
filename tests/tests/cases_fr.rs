//! FR cases: what the in-memory transport can show of failure, order and loss.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::RankId;
use kvferry_tests::by_hand::{Engine, Pair, flat, kv, request, source_byte};
use kvferry_tests::over_mem::World;
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
