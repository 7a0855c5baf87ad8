//! UC cases: what transports over real wires get wrong, on the backends that run everywhere. The cases that are of UCX alone stand in
//! its crate.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_memory::{BufferOptions, SharedBuffer};
use kvferry_shm::ShmTransport;
use kvferry_transport::mem::MemNetwork;
use kvferry_transport::{Event, OpId, OpKind, Outcome, PeerId, Region, Submission, TransferError, Transport};

const SOON: Duration = Duration::from_secs(30);

/// A name and what makes endpoints that reach each other.
type Backend = (&'static str, Box<dyn Fn() -> Box<dyn Transport>>);

fn backends() -> [Backend; 2] {
    let network = MemNetwork::new(4);
    let shm = || -> Box<dyn Transport> { Box::new(ShmTransport::new(kvferry_shm::Config::default()).unwrap()) };
    [("mem", Box::new(move || Box::new(network.endpoint().unwrap()))), ("shm", Box::new(shm))]
}

/// One range of `len` bytes from `src` of one region to `dst` of another.
fn range(src: (RegionId, u64), dst: (RegionId, u64), len: u64, src_len: u64, dst_len: u64) -> Arc<BoundedBatch> {
    let base = Base { src_region: src.0, dst_region: dst.0, src_offset: src.1, dst_offset: dst.1 };
    let part = Part {
        src_add: 0,
        dst_add: 0,
        src_block_stride: len,
        dst_block_stride: len,
        src_step: 1,
        dst_step: 1,
        nest: Nest::run(len),
        pairs: vec![PairRun { src: 0, dst: 0, count: 1 }].into(),
    };
    let lens = |id: RegionId, len| {
        let mut lens = vec![Bytes::ZERO; id.index()];
        lens.push(Bytes::new(len));
        lens
    };
    let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    Arc::new(batch.check(&lens(src.0, src_len), &lens(dst.0, dst_len)).unwrap())
}

/// Steps endpoints until `what` gives something.
fn until<T>(ends: &mut [&mut dyn Transport], mut what: impl FnMut(usize, Event) -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        for (i, end) in ends.iter_mut().enumerate() {
            end.step(start.elapsed());
            while let Some(event) = end.next_event() {
                if let Some(got) = what(i, event) {
                    return got;
                }
            }
        }
        assert!(start.elapsed() < SOON, "it does not end");
    }
}

/// The `i`th endpoint's operation, to its end.
fn end_of(ends: &mut [&mut dyn Transport], i: usize, op: OpId) -> Outcome {
    until(ends, |at, event| match event {
        Event::Completed { op: ended, outcome, .. } if (at, ended) == (i, op) => Some(outcome),
        _ => None,
    })
}

/// How often memory of this name is mapped in this process.
fn mappings(name: &str) -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains(name)).count()
}

/// A range that is given up and registered again is another memory: what was known of the old one is stale, never the old bytes, and
/// no mapping is left of a round.
#[test]
fn uc_03_memory_that_is_registered_anew_is_read_anew() {
    const LEN: u64 = 64 << 10;
    for (name, endpoint) in backends() {
        let (mut p, mut d) = (endpoint(), endpoint());
        let tag = format!("kvferry-uc-03-{name}");
        let place = Region::zeroed(4096).unwrap();
        let id = d.register(place.clone()).unwrap();
        let mut known: Option<PeerId> = None;
        for round in 1..=100u8 {
            // The range: the very same memory in odd rounds, fresh memory (at the same place, as it goes) in even ones.
            let buffer = SharedBuffer::new(&tag, Bytes::new(LEN), BufferOptions::default()).unwrap();
            for pattern in [round, round ^ 0x80] {
                let range_of_p = buffer.region();
                assert!(mappings(&tag) > 0, "it is counted");
                range_of_p.fill(0, LEN, pattern).unwrap();
                let registered = p.register(range_of_p).unwrap();
                assert_eq!(registered, RegionId::ZERO, "a new generation begins at 0");
                let read = |offset| range((registered, offset), (id, 0), 4096, LEN, 4096);
                if let Some(old) = known.take() {
                    let op = d.submit(Submission { peer: old, kind: OpKind::Read, batch: read(0), notify: None });
                    let outcome = end_of(&mut [&mut *d, &mut *p], 0, op.unwrap());
                    assert!(matches!(outcome, Outcome::Failed(TransferError::Stale { .. })), "{name}: {outcome:?}");
                    d.disconnect(old).unwrap();
                }
                let peer = d.connect(&p.blob()).unwrap();
                for offset in [0, 4096, LEN - 4096] {
                    let op = d.submit(Submission { peer, kind: OpKind::Read, batch: read(offset), notify: None });
                    let outcome = end_of(&mut [&mut *d, &mut *p], 0, op.unwrap());
                    assert!(matches!(outcome, Outcome::Done(_)), "{name}: {outcome:?}");
                    assert!(place.to_vec().unwrap().iter().all(|b| *b == pattern), "{name}, round {round}");
                }
                known = Some(peer);
                p.deregister(registered).unwrap();
            }
            drop(buffer);
            assert!(mappings(&tag) <= 4, "{name}, round {round}: {} mappings", mappings(&tag));
        }
        d.disconnect(known.unwrap()).unwrap();
        for step in 0..10 {
            d.step(Duration::from_millis(step));
            p.step(Duration::from_millis(step));
        }
        drop((d, p));
        assert_eq!(mappings(&tag), 0, "{name}");
    }
}

/// What one endpoint has been told, by those who poll it.
#[derive(Default)]
struct Told {
    ends: BTreeMap<OpId, Vec<Outcome>>,
    connected: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

/// Eight threads poll one endpoint while a ninth adds peers, reads from them and leaves them again, in the middle of reads too: every
/// read ends exactly once, and those that are done have moved their bytes.
///
/// An endpoint is `Send` and not more: sharing one without a lock doesn't compile.
#[test]
fn uc_07_eight_threads_poll_while_peers_come_and_go() {
    const fn is_send<T: Send + ?Sized>() {}
    is_send::<dyn Transport>();
    const ROUNDS: u64 = 300;
    const READS: u64 = 4;
    const LEN: u64 = 64 << 10;
    for (name, endpoint) in backends() {
        let shared: Vec<Mutex<Box<dyn Transport>>> = (0..3).map(|_| Mutex::new(endpoint())).collect();
        let sources: Vec<Region> = [0x11, 0x22]
            .map(|fill| {
                let region = Region::zeroed(usize::try_from(LEN).unwrap()).unwrap();
                region.fill(0, LEN, fill).unwrap();
                region
            })
            .to_vec();
        let place = Region::zeroed(usize::try_from(LEN).unwrap()).unwrap();
        let id = locked(&shared[2]).register(place.clone()).unwrap();
        for (end, region) in shared.iter().zip(&sources) {
            assert_eq!(locked(end).register(region.clone()).unwrap(), RegionId::ZERO);
        }
        let (told, over, start) = (Mutex::new(Told::default()), AtomicBool::new(false), Instant::now());
        let poll = |end: &Mutex<Box<dyn Transport>>| {
            let mut end = locked(end);
            end.step(start.elapsed());
            while let Some(event) = end.next_event() {
                let mut told = locked(&told);
                match event {
                    Event::Completed { op, outcome, .. } => told.ends.entry(op).or_default().push(outcome),
                    Event::Connected { .. } => told.connected += 1,
                    Event::PeerLost { cause, .. } => panic!("{name}: {cause}"),
                    Event::Notification { .. } => {}
                }
            }
        };
        let mut ops = Vec::new();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (shared, over, poll) = (&shared, &over, &poll);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        poll(&shared[2]);
                        // Two of them serve the peers as well.
                        if let Some(end) = shared[..2].get(thread) {
                            poll(end);
                        }
                        std::thread::yield_now();
                    }
                });
            }
            for round in 0..ROUNDS {
                let which = usize::try_from(round % 2).unwrap();
                let blob = locked(&shared[which]).blob();
                let peer = locked(&shared[2]).connect(&blob).unwrap();
                let first = ops.len();
                for i in 0..READS {
                    let (len, at) = (LEN / READS, i * (LEN / READS));
                    let batch = range((RegionId::ZERO, at), (id, at), len, LEN, LEN);
                    let submission = Submission { peer, kind: OpKind::Read, batch, notify: None };
                    ops.push(locked(&shared[2]).submit(submission).unwrap());
                }
                // Every third peer is left in the middle, the others when their reads have ended.
                if round % 3 > 0 {
                    while ops[first..].iter().any(|op| !locked(&told).ends.contains_key(op)) {
                        assert!(start.elapsed() < SOON, "{name}, round {round}: a completion is lost");
                        std::thread::yield_now();
                    }
                    let fill = [0x11, 0x22][which];
                    assert!(place.to_vec().unwrap().iter().all(|b| *b == fill), "{name}, round {round}");
                }
                locked(&shared[2]).disconnect(peer).unwrap();
                while round % 3 == 0 && ops[first..].iter().any(|op| !locked(&told).ends.contains_key(op)) {
                    assert!(start.elapsed() < SOON, "{name}, round {round}: a completion is lost after leaving");
                    std::thread::yield_now();
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        let told = told.into_inner().unwrap();
        assert_eq!(told.ends.len() as u64, ROUNDS * READS, "{name}: nothing that was not asked for has ended");
        for op in &ops {
            let ends = &told.ends[op];
            assert_eq!(ends.len(), 1, "{name}: {ends:?}");
            let fine = matches!(ends[0], Outcome::Done(_) | Outcome::Failed(TransferError::Disconnected));
            assert!(fine, "{name}: {ends:?}");
        }
        assert!(told.connected <= ROUNDS);
    }
}

/// When a write is done at who writes, its bytes are there at who is written to, and the notice comes to one that does nothing but
/// wait: 64 MiB in 250 runs.
#[test]
fn uc_08_done_here_means_visible_there_and_the_notice_needs_no_traffic() {
    const RUN: u64 = 256 << 10;
    const RUNS: u64 = 250;
    for (name, endpoint) in backends() {
        let (mut reader, mut writer) = (endpoint(), endpoint());
        let len = RUN * RUNS;
        let shared = |what: &str| {
            SharedBuffer::new(&format!("kvferry-uc-08-{what}"), Bytes::new(len), BufferOptions::default()).unwrap()
        };
        let (from, to) = (shared("from").region(), shared("to").region());
        for run in 0..RUNS {
            from.fill(run * RUN, RUN, run.to_le_bytes()[0] | 1).unwrap();
        }
        let target = reader.register(to.clone()).unwrap();
        let source = writer.register(from).unwrap();
        let peer = writer.connect(&reader.blob()).unwrap();
        let (tell, noticed) = channel();
        let waiter = std::thread::spawn(move || {
            let start = Instant::now();
            while start.elapsed() < SOON {
                reader.step(start.elapsed());
                while let Some(event) = reader.next_event() {
                    if let Event::Notification { payload, .. } = event {
                        // Gone is who has failed.
                        drop(tell.send((payload, Instant::now())));
                        return reader;
                    }
                }
                reader.wait(Some(SOON));
            }
            panic!("no notice has come");
        });
        let base = Base { src_region: source, dst_region: target, src_offset: 0, dst_offset: 0 };
        let part = Part {
            src_add: 0,
            dst_add: 0,
            src_block_stride: RUN,
            dst_block_stride: RUN,
            src_step: 1,
            dst_step: 1,
            nest: Nest::run(RUN),
            // Backwards: no two runs join.
            pairs: (0..u32::try_from(RUNS).unwrap())
                .rev()
                .map(|i| PairRun { src: i, dst: i, count: 1 })
                .collect::<Vec<_>>()
                .into(),
        };
        let lens = [Bytes::new(len)];
        let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
        assert_eq!(batch.descriptors(), RUNS);
        let batch = Arc::new(batch.check(&lens, &lens).unwrap());
        let notify = Some(b"all of it".to_vec());
        let op = writer.submit(Submission { peer, kind: OpKind::Write, batch, notify }).unwrap();
        let outcome = end_of(&mut [&mut *writer], 0, op);
        let done = Instant::now();
        assert!(matches!(outcome, Outcome::Done(stats) if stats.bytes == Bytes::new(len)), "{name}: {outcome:?}");
        for run in 0..RUNS {
            let mut ends = [0u8; 2];
            to.read(run * RUN, &mut ends[..1]).unwrap();
            to.read((run + 1) * RUN - 1, &mut ends[1..]).unwrap();
            assert_eq!(ends, [run.to_le_bytes()[0] | 1; 2], "{name}, run {run}");
        }
        // The writer does nothing any more.
        let (payload, at) = noticed.recv_timeout(SOON).expect("the notice comes by itself");
        assert_eq!(payload, b"all of it");
        let gap = at.saturating_duration_since(done);
        assert!(gap < Duration::from_secs(2), "{name}: the notice came {gap:?} after the end");
        drop(waiter.join().unwrap());
    }
}
