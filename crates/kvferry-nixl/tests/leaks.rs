//! What many rounds leave behind: nothing. One test, as it counts what belongs to the whole process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_nixl::NixlTransport;
use kvferry_transport::{Event, MemoryKind, OpKind, PeerId, Region, RegisterError, Submission, Transport};
use support::{connected, drive, end_of, endpoint, has_nixl, reversed};

fn entries(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn counts() -> (usize, usize) {
    (entries("/proc/self/fd"), entries("/proc/self/task"))
}

/// Waits until as little is open as at first: what the threads do may still be under way.
fn settled(first: (usize, usize), round: usize) {
    let start = Instant::now();
    while counts() > first || counts().1 > first.1 {
        assert!(start.elapsed() < Duration::from_secs(5), "round {round}: {:?}, {first:?} at first", counts());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn rounds_leave_nothing_behind() {
    if !has_nixl() {
        return;
    }
    idle_endpoints_sleep();
    registrations_come_and_go();
    endpoints_come_and_go();
    connections_and_operations_come_and_go();
    hundred_thousand_small_ones();
}

/// While nothing happens, two connected endpoints use next to no processor, and yet answer at once.
fn idle_endpoints_sleep() {
    let (mut d, mut p) = (endpoint(), endpoint());
    for t in [&mut d, &mut p] {
        t.register(Region::zeroed(4096).unwrap()).unwrap();
    }
    let peer = d.connect(&p.blob()).unwrap();
    connected(&mut [&mut d, &mut p], peer);
    let on_processor = || -> f64 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|t| t.unwrap().path().join("schedstat"));
        // The first word is the time on a processor in nanoseconds.
        tasks.map(|t| std::fs::read_to_string(t).unwrap().split(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    };
    let (before, start) = (on_processor(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let share = (on_processor() - before) / 1e9 / start.elapsed().as_secs_f64();
    println!("two idle endpoints use {:.2} % of a processor", share * 100.0);
    assert!(share < 0.1, "{share}");
    // Over a pause, the first small operation does not wait for the end of one.
    let mut times: Vec<Duration> = (0..20)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(30));
            let batch = reversed(4096, 4096);
            let start = Instant::now();
            let op = d.submit(Submission { peer, kind: OpKind::Read, batch, notify: None }).unwrap();
            assert!(end_of(&mut [&mut d, &mut p], op).done().is_some());
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("an operation after a pause takes {:?}, at least {:?}", times[10], times[0]);
    assert!(times[0] < Duration::from_millis(10), "{times:?}");
}

/// REG-01, REG-05: registering the same memory for many rounds costs no more in the last round than in the first.
fn registrations_come_and_go() {
    let mut t = endpoint();
    let whole = Region::zeroed(16 << 20).unwrap();
    let mut flat = None;
    for round in 0..40 {
        let start = Instant::now();
        for i in 0..50u32 {
            let part = whole.part(usize::try_from(i).unwrap() << 18, 1 << 18).unwrap();
            assert_eq!(t.register(part.clone()), Ok(RegionId::new(i)));
            assert!(matches!(t.register(part), Err(RegisterError::Duplicate { .. })));
        }
        let blob = t.blob().len();
        (0..50).for_each(|i| t.deregister(RegionId::new(i)).unwrap());
        let now = (counts(), blob);
        if round == 5 {
            flat = Some((now, resident()));
        } else if let Some((first, memory)) = flat {
            assert_eq!(now.0, first.0, "round {round}");
            assert!(blob.abs_diff(first.1) < 1000, "the blob has {blob} bytes, it had {}", first.1);
            assert!(resident() < memory + (4 << 20), "round {round}: {} bytes, {memory} at first", resident());
        }
        assert!(start.elapsed() < Duration::from_secs(5), "round {round} took {:?}", start.elapsed());
    }
    // REG-04: what can't be reached is refused, and nothing else suffers.
    let memory = t.capabilities().memory.clone();
    assert_eq!(memory, [MemoryKind::Host]);
    assert_eq!(t.register(whole.clone()), Ok(RegionId::new(0)));
}

fn endpoints_come_and_go() {
    let mut flat = None;
    for round in 0..12 {
        let (mut d, mut p) = (endpoint(), endpoint());
        let memory = Region::zeroed(1 << 16).unwrap();
        d.register(Region::zeroed(1 << 16).unwrap()).unwrap();
        p.register(memory).unwrap();
        let peer = d.connect(&p.blob()).unwrap();
        connected(&mut [&mut d, &mut p], peer);
        let batch = reversed(1 << 16, 4096);
        let op = d.submit(Submission { peer, kind: OpKind::Write, batch, notify: Some(b"x".to_vec()) }).unwrap();
        assert!(end_of(&mut [&mut d, &mut p], op).done().is_some());
        if round % 2 == 0 {
            drop(p);
            drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
        }
        drop(d);
        if round == 3 {
            flat = Some((counts(), resident()));
        } else if let Some((first, memory)) = flat
            && round % 2 == 1
        {
            // UCX keeps a few things for the life of the process, not for each endpoint.
            settled((first.0 + 2, first.1), round);
            assert!(resident() < memory + (32 << 20), "round {round}: {} bytes, {memory} at first", resident());
        }
    }
}

fn connections_and_operations_come_and_go() {
    const LEN: usize = 1 << 20;
    let (mut d, mut p) = (endpoint(), endpoint());
    for t in [&mut d, &mut p] {
        t.register(Region::zeroed(LEN).unwrap()).unwrap();
    }
    let batch = reversed(LEN, 16 << 10);
    let mut flat = None;
    for round in 0..200 {
        let peer = d.connect(&p.blob()).unwrap();
        let kind = if round % 2 == 0 { OpKind::Read } else { OpKind::Write };
        let op = d.submit(Submission { peer, kind, batch: batch.clone(), notify: None }).unwrap();
        if round % 5 > 0 {
            assert!(end_of(&mut [&mut d, &mut p], op).done().is_some());
        }
        d.disconnect(peer).unwrap();
        if round % 5 == 0 {
            end_of(&mut [&mut d, &mut p], op);
        }
        if round == 20 {
            flat = Some((counts(), resident()));
        } else if let Some((first, memory)) = flat {
            settled(first, round);
            assert!(resident() < memory + (8 << 20), "round {round}: {} bytes, {memory} at first", resident());
        }
    }
    d.deregister(RegionId::new(0)).unwrap();
    p.deregister(RegionId::new(0)).unwrap();
}

/// 100,000 small operations, 256 at a time: each ends once and is notified once, and memory stays flat.
fn hundred_thousand_small_ones() {
    const OPS: usize = 100_000;
    let (mut d, mut p) = (endpoint(), endpoint());
    for t in [&mut d, &mut p] {
        t.register(Region::zeroed(4096).unwrap()).unwrap();
    }
    let peer = d.connect(&p.blob()).unwrap();
    connected(&mut [&mut d, &mut p], peer);
    let batch = reversed(4096, 2048);
    let start = Instant::now();
    let (mut submitted, mut ended, mut notices, mut flat) = (0, 0, 0, None);
    let mut seen = vec![false; OPS];
    while ended < OPS || notices < OPS {
        while submitted < OPS && submitted - ended < 256 {
            small(&mut d, peer, &batch, submitted);
            submitted += 1;
        }
        d.step(start.elapsed());
        while let Some(event) = d.next_event() {
            let Event::Completed { outcome, .. } = event else { panic!("{event:?}") };
            assert!(outcome.done().is_some(), "{outcome:?}");
            ended += 1;
        }
        p.step(start.elapsed());
        while let Some(event) = p.next_event() {
            let Event::Notification { payload, .. } = event else { panic!("{event:?}") };
            let i = usize::from_le_bytes(payload.try_into().unwrap());
            assert!(!std::mem::replace(&mut seen[i], true), "notification {i} came twice");
            notices += 1;
        }
        if ended > OPS / 5 && flat.is_none() {
            flat = Some(resident());
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{ended} ends, {notices} notifications");
        d.wait(Some(Duration::from_millis(1)));
    }
    println!("{OPS} operations in {:?}", start.elapsed());
    let (now, then) = (resident(), flat.unwrap());
    assert!(now < then + (8 << 20), "{now} bytes at the end, {then} bytes at a fifth");
    assert_eq!(d.telemetry().requests, OPS as u64);
    assert_eq!(d.telemetry().bytes, 4096 * OPS as u64);
}

fn small(
    d: &mut NixlTransport,
    peer: PeerId,
    batch: &std::sync::Arc<kvferry_geometry::batch::BoundedBatch>,
    number: usize,
) {
    let notify = Some(number.to_le_bytes().to_vec());
    d.submit(Submission { peer, kind: OpKind::Write, batch: batch.clone(), notify }).unwrap();
}
