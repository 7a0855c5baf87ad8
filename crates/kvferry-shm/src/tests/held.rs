//! Operations whose copies take as long as the test likes: what is heard meanwhile, and what ends in doubt.

use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::*;

/// The kernel, which holds the thread after each copy of data (not of a probe's word) while it is told to.
#[derive(Default)]
struct Holding {
    hold: AtomicBool,
    copies: AtomicUsize,
}

impl Holding {
    fn held() -> Arc<Self> {
        Arc::new(Self { hold: AtomicBool::new(true), copies: AtomicUsize::new(0) })
    }

    fn release(&self) {
        self.hold.store(false, Ordering::Relaxed);
    }

    /// Waits until this many copies were made.
    fn after(&self, copies: usize) {
        let start = Instant::now();
        while self.copies.load(Ordering::Relaxed) < copies {
            assert!(start.elapsed() < Duration::from_secs(10), "no copy was made");
            std::thread::yield_now();
        }
    }
}

impl Kernel for Holding {
    unsafe fn vm(&self, way: Way, pid: i32, ours: &[Span], peers: &[Span]) -> Result<u64, Errno> {
        // SAFETY: the caller's promise, passed on.
        let moved = unsafe { Linux.vm(way, pid, ours, peers) };
        if peers.iter().map(|s| s.len).sum::<u64>() > 16 {
            self.copies.fetch_add(1, Ordering::Relaxed);
            while self.hold.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        moved
    }
}

/// Two endpoints: one whose copies are held on its one thread, and one with plain memory; connected.
fn held_pair(kernel: &Arc<Holding>, len: usize) -> (ShmTransport, ShmTransport, kvferry_transport::PeerId) {
    let mut d = ShmTransport::with_kernel(Config { threads: 1, ..Config::default() }, kernel.clone()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    p.register(Region::zeroed(len).unwrap()).unwrap();
    d.register(Region::zeroed(len).unwrap()).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
    (d, p, peer)
}

fn read(d: &mut ShmTransport, peer: kvferry_transport::PeerId) -> kvferry_transport::OpId {
    d.submit(Submission { peer, kind: OpKind::Read, batch: whole(0, 1), notify: None }).unwrap()
}

/// Begins a read and waits until its thread is held.
fn held_read(d: &mut ShmTransport, p: &mut ShmTransport, peer: kvferry_transport::PeerId) -> kvferry_transport::OpId {
    let op = read(d, peer);
    for _ in 0..4 {
        d.step(Duration::ZERO);
        p.step(Duration::ZERO);
    }
    op
}

fn outcome(d: &mut ShmTransport, op: kvferry_transport::OpId) -> Option<Outcome> {
    std::iter::from_fn(|| d.next_event()).find_map(|e| match e {
        Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
        _ => None,
    })
}

#[test]
fn a_thread_that_is_held_holds_neither_operations_nor_the_end() {
    let kernel = Holding::held();
    let (mut d, mut p, peer) = held_pair(&kernel, LEN);
    let memory = Arc::new(Region::zeroed(LEN).unwrap());
    let ours = d.register(counted(&memory)).unwrap();
    assert_eq!(ours, RegionId::new(1));
    let op = held_read(&mut d, &mut p, peer);
    kernel.after(1);
    // Behind it on the only thread: this one was not begun, so it ends at once and is not in doubt.
    let behind = read(&mut d, peer);
    d.step(Duration::ZERO);
    d.cancel(behind).unwrap();
    d.step(Duration::ZERO);
    assert_eq!(outcome(&mut d, behind), Some(Outcome::Failed(TransferError::Cancelled)));
    d.cancel(op).unwrap();
    assert_eq!(d.step(Duration::from_secs(10)), Some(Duration::from_secs(12)), "it is given a while");
    assert_eq!(outcome(&mut d, op), None);
    d.step(Duration::from_secs(12));
    assert_eq!(outcome(&mut d, op), Some(Outcome::InDoubt(TransferError::Cancelled)));
    // Others go on: there is a thread in place of the one that is held.
    let next = read(&mut d, peer);
    d.step(Duration::from_secs(12));
    kernel.after(2);
    d.cancel(next).unwrap();
    d.step(Duration::from_secs(13));
    // It has no more time by this.
    d.disconnect(peer).unwrap();
    d.step(Duration::from_secs(14));
    assert_eq!(outcome(&mut d, next), None);
    d.step(Duration::from_secs(15));
    assert_eq!(outcome(&mut d, next), Some(Outcome::InDoubt(TransferError::Disconnected)));
    // The peer sees the connection closed only when nothing is in doubt; the end of the endpoint does not wait for ever.
    let start = Instant::now();
    drop(d);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(Arc::strong_count(&memory), 1, "what no job uses is let go");
    kernel.release();
}

#[test]
fn a_region_closed_during_the_last_slice_is_stale() {
    let kernel = Holding::held();
    let mut d = ShmTransport::with_kernel(Config { threads: 1, ..Config::default() }, kernel.clone()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let memory = Arc::new(Region::zeroed(LEN).unwrap());
    p.register(counted(&memory)).unwrap();
    d.register(Region::zeroed(LEN).unwrap()).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
    let op = held_read(&mut d, &mut p, peer);
    kernel.after(1);
    // All bytes were moved, but what they were in the end is not known.
    p.deregister(RegionId::new(0)).unwrap();
    for i in 0..5 {
        p.step(Duration::from_secs(i));
        assert_eq!(Arc::strong_count(&memory), 2, "the thread is inside");
    }
    kernel.release();
    let end = hear(&mut d, &mut p, |e| match e {
        Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
        _ => None,
    });
    assert_eq!(end, Outcome::Failed(TransferError::Stale { region: RegionId::new(0) }));
    p.step(Duration::from_secs(5));
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn a_region_given_up_under_a_running_copy_ends_it_as_stale() {
    const MUCH: usize = 64 << 20;
    let plain = |len| Region::zeroed(len).unwrap();
    let mapped: fn(usize) -> Region = mapped_of;
    for memory in [mapped, plain] {
        let mut d = ShmTransport::new(Config::default()).unwrap();
        let mut p = ShmTransport::new(Config::default()).unwrap();
        let owned = Arc::new(memory(MUCH));
        let (ours, source) = (Region::zeroed(MUCH).unwrap(), counted_of(&owned, MUCH));
        owned.fill(0, MUCH as u64, 7).unwrap();
        d.register(ours.clone()).unwrap();
        let mut stale = 0;
        for round in 0..10u64 {
            p.register(source.clone()).unwrap();
            let peer = d.connect(&p.blob()).unwrap();
            hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
            ours.fill(0, MUCH as u64, 0).unwrap();
            let submission = Submission { peer, kind: OpKind::Read, batch: of_len(MUCH as u64), notify: None };
            let op = d.submit(submission.clone()).unwrap();
            for _ in 0..4 {
                d.step(Duration::ZERO);
                p.step(Duration::ZERO);
            }
            std::thread::sleep(Duration::from_micros(300 * round));
            p.deregister(RegionId::new(0)).unwrap();
            let end = hear(&mut d, &mut p, |e| match e {
                Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
                _ => None,
            });
            let gone = Outcome::Failed(TransferError::Stale { region: RegionId::new(0) });
            match end.done() {
                Some(_) => assert!(ours.to_vec().unwrap().iter().all(|b| *b == 7), "round {round}"),
                None => assert_eq!(end, gone),
            }
            stale += usize::from(end == gone);
            p.step(Duration::from_secs(round));
            assert_eq!(Arc::strong_count(&owned), 2, "round {round}: only `source` holds it");
            let late = d.submit(submission).unwrap();
            hear(&mut d, &mut p, |e| (e == Event::Completed { op: late, peer, outcome: gone.clone() }).then_some(()));
            d.disconnect(peer).unwrap();
        }
        assert!(stale > 0, "no copy was under way");
    }
}

#[test]
fn a_peer_that_is_gone_after_the_last_byte_is_no_success() {
    for gone in [false, true] {
        let kernel = Holding::held();
        let (mut d, mut p, peer) = held_pair(&kernel, LEN);
        let op = held_read(&mut d, &mut p, peer);
        kernel.after(1);
        kernel.release();
        assert!(d.wait(Some(Duration::from_secs(10))), "the thread's end wakes");
        let p = if gone {
            drop(p);
            None
        } else {
            Some(p)
        };
        // As a step does that looked at its sources before the peer went.
        d.hear_threads();
        let end = outcome(&mut d, op).unwrap();
        match gone {
            false => assert!(end.done().is_some(), "{end:?}"),
            true => assert_eq!(end, Outcome::Failed(TransferError::PeerLost(LostCause::Gone))),
        }
        drop(p);
    }
}

#[test]
fn a_cancel_is_heard_within_a_slice() {
    const MUCH: usize = 64 << 20;
    let kernel = Holding::held();
    let (mut d, mut p, peer) = held_pair(&kernel, MUCH);
    let op = {
        let batch = of_len(MUCH as u64);
        d.submit(Submission { peer, kind: OpKind::Read, batch, notify: None }).unwrap()
    };
    for _ in 0..4 {
        d.step(Duration::ZERO);
        p.step(Duration::ZERO);
    }
    kernel.after(1);
    d.cancel(op).unwrap();
    kernel.release();
    let end = hear(&mut d, &mut p, |e| match e {
        Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
        _ => None,
    });
    assert_eq!(end, Outcome::Failed(TransferError::Cancelled));
    assert_eq!(kernel.copies.load(Ordering::Relaxed), 1, "of 16 slices");
}

#[test]
fn the_end_of_an_endpoint_waits_for_those_inside_its_plain_memory() {
    let mut d = ShmTransport::new(Config::default()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let memory = Arc::new(Region::zeroed(LEN).unwrap());
    p.register(counted(&memory)).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
    let slot = d.slot(0);
    let inside = slot.enter();
    drop(p);
    assert_eq!(Arc::strong_count(&memory), 2, "never freed under a peer's hands");
    drop(inside);
}

#[test]
fn a_guest_that_was_sent_away_is_waited_for_until_it_closes() {
    let mut d = ShmTransport::new(Config::default()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let memory = Arc::new(Region::zeroed(LEN).unwrap());
    let id = p.register(counted(&memory)).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
    let slot = d.slot(0);
    let inside = slot.enter();
    p.send_all_away();
    p.deregister(id).unwrap();
    for i in 0..5 {
        p.step(Duration::from_secs(i));
    }
    assert_eq!(Arc::strong_count(&memory), 2, "it may still be inside");
    // It hears of it, stops, and by telling so lets the memory go.
    hear(&mut d, &mut p, |e| matches!(e, Event::PeerLost { .. }).then_some(()));
    for i in 0..5 {
        p.step(Duration::from_secs(i));
    }
    assert_eq!(Arc::strong_count(&memory), 1);
    assert_eq!(p.step(Duration::from_secs(9)), None);
    drop(inside);
}

#[test]
fn a_guest_that_broke_the_protocol_is_waited_for_like_any_other() {
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let memory = Arc::new(Region::zeroed(LEN).unwrap());
    let id = p.register(counted(&memory)).unwrap();
    let blob = kvferry_transport::blob::Blob::decode(&p.blob()).unwrap();
    let board = crate::board::Board::new().unwrap();
    let guest = crate::sock::socket().unwrap();
    crate::sock::connect(&guest, &blob.lane[21..]).unwrap();
    let hello = [&[1, 1, 0][..], &blob.endpoint.get(), &blob.lane[1..17], &[9; 16]].concat();
    crate::sock::send(&guest, &hello, &[], Some(board.fd())).unwrap();
    for _ in 0..4 {
        p.step(Duration::ZERO);
    }
    let slot = board.slot(0);
    let inside = slot.enter();
    crate::sock::send(&guest, b"junk", &[], None).unwrap();
    for _ in 0..4 {
        p.step(Duration::ZERO);
    }
    p.deregister(id).unwrap();
    p.step(Duration::from_secs(1));
    assert_eq!(Arc::strong_count(&memory), 2, "it may still be inside");
    crate::sock::say_no_more(&guest);
    for i in 2..5 {
        p.step(Duration::from_secs(i));
    }
    assert_eq!(Arc::strong_count(&memory), 1);
    drop(inside);
}
