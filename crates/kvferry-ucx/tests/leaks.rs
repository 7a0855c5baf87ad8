//! Counts of descriptors, threads and memory, in a process of its own so that nothing else changes them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use kvferry_transport::conformance::bytes::reversed;
use kvferry_transport::{OpKind, Region, Submission, Transport};
use kvferry_ucx::{UcxConfig, UcxTransport};
use support::{connected, end_of, endpoint, over};

fn entries(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn counts() -> (usize, usize) {
    (entries("/proc/self/fd"), entries("/proc/self/task"))
}

/// The counts, once they are what they were, or after a while.
fn settled(expected: Option<(usize, usize)>) -> (usize, usize) {
    let begin = Instant::now();
    while expected.is_some_and(|e| e != counts()) && begin.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(1));
    }
    counts()
}

/// A whole life: endpoints, registrations, connections, transfers both ways, some cut short.
fn life(round: u32) {
    const LEN: usize = 1 << 20;
    let (mut near, mut far) = (endpoint(2), endpoint(2));
    let memory = [Region::zeroed(LEN).unwrap(), Region::zeroed(LEN).unwrap()];
    near.register(memory[0].clone()).unwrap();
    far.register(memory[1].clone()).unwrap();
    for kind in [OpKind::Read, OpKind::Write] {
        let peer = near.connect(&far.blob()).unwrap();
        connected(&mut [&mut near, &mut far], peer);
        let batch = reversed(LEN as u64, 4096, 0, kind == OpKind::Read).unwrap();
        let submission = Submission { peer, kind, batch, notify: Some(vec![1]) };
        for _ in 0..3 {
            let op = near.submit(submission.clone()).unwrap();
            assert!(end_of(&mut [&mut near, &mut far], op).done().is_some());
        }
        near.submit(submission).unwrap();
        if round.is_multiple_of(2) {
            near.disconnect(peer).unwrap();
        } else {
            // Dropped with an operation under way.
            break;
        }
    }
}

// One test: another one beside it would change the counts.
#[test]
fn nothing_is_left_behind() {
    lives();
    connections_come_and_go(&UcxConfig::with_rails(2));
    // Each connection has descriptors of its own here.
    connections_come_and_go(&over(&["tcp"], 2));
}

fn lives() {
    // UCX keeps a thread and some descriptors of its own once it was used.
    (0..4).for_each(life);
    let before = settled(None);
    let memory = resident();
    for round in 0..12 {
        life(round);
        assert_eq!(settled(Some(before)), before, "round {round}");
    }
    let grown = resident().saturating_sub(memory);
    println!("{before:?} descriptors and threads; {grown} bytes more");
    assert!(grown < 48 << 20, "{grown} bytes more after 12 lives");
}

fn connections_come_and_go(config: &UcxConfig) {
    let open = || UcxTransport::new(config.clone()).unwrap();
    let (mut near, mut far) = (open(), open());
    let blob = far.blob();
    let mut first = None;
    for round in 0..200 {
        let peer = near.connect(&blob).unwrap();
        if round % 4 > 0 {
            connected(&mut [&mut near, &mut far], peer);
        }
        near.disconnect(peer).unwrap();
        if round == 60 {
            std::thread::sleep(Duration::from_millis(50));
            first = Some((counts(), resident()));
        }
    }
    let (first, memory) = first.unwrap();
    let last = settled(Some(first));
    let grown = resident().saturating_sub(memory);
    println!("{first:?}, then {last:?}; {grown} bytes more");
    assert!(last.0 <= first.0 + 64 && last.1 == first.1, "{first:?}, then {last:?}");
    assert!(grown < 2 << 20, "{grown} bytes more after 140 connections");
}
