//! An endpoint that leaves while bytes move: memory is let go when they have stopped, and not before; and nothing stays behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_geometry::units::RegionId;
use kvferry_transport::{OpKind, Outcome, Region, Submission, Transport};
use support::{connected, end_of, endpoint, has_nixl, lent, reversed, until};

const LEN: usize = 256 << 20;
const BLOCK: usize = 16 << 10;

/// The tests count this process's threads, so they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads of agents in this process; those that NIXL makes have the name of the one that it was called on.
fn agents() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    tasks
        .filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(|name| name.trim() == "kvferry-nixl"))
        .count()
}

#[test]
fn memory_of_a_deregistered_region_outlives_the_writes_of_one_that_leaves() {
    if !has_nixl() {
        return;
    }
    let _turn = turn();
    // The memory itself stays mapped, so that what comes too late can be seen.
    let (memory, lent, held) = lent(LEN);
    let samples = || -> Vec<u8> {
        let mut byte = [0];
        let at = |i: usize| {
            memory.read((i * BLOCK) as u64, &mut byte).unwrap();
            byte[0]
        };
        (0..LEN / BLOCK).map(at).collect()
    };
    let mut d = endpoint();
    let threads = agents();
    let mut p = endpoint();
    let target = d.register(lent).unwrap();
    let ours = Region::zeroed(LEN).unwrap();
    ours.fill(0, LEN as u64, 0x5a).unwrap();
    p.register(ours).unwrap();
    let peer = p.connect(&d.blob()).unwrap();
    connected(&mut [&mut p, &mut d], peer);
    p.submit(Submission { peer, kind: OpKind::Write, batch: reversed(LEN, BLOCK), notify: None }).unwrap();
    until("the write begins", || samples().contains(&0x5a));
    d.deregister(target).unwrap();
    assert!(held.upgrade().is_some(), "let go while it is written to");
    let leaving = std::thread::spawn(move || drop(p));
    until("the memory is let go", || held.upgrade().is_none());
    let then = samples();
    std::thread::sleep(Duration::from_millis(100));
    assert!(then == samples(), "written to after it was let go");
    leaving.join().unwrap();
    until("its agent ends", || agents() == threads);
}

#[test]
fn one_that_leaves_waits_for_those_that_read_it_and_ends() {
    if !has_nixl() {
        return;
    }
    let _turn = turn();
    let mut d = endpoint();
    let threads = agents();
    let mut p = endpoint();
    let source = Region::zeroed(LEN).unwrap();
    source.fill(0, LEN as u64, 0x5a).unwrap();
    p.register(source).unwrap();
    let ours = Region::zeroed(LEN).unwrap();
    d.register(ours.clone()).unwrap();
    let peer = d.connect(&p.blob()).unwrap();
    connected(&mut [&mut d, &mut p], peer);
    let op = d.submit(Submission { peer, kind: OpKind::Read, batch: reversed(LEN, BLOCK), notify: None }).unwrap();
    let mut last = [0];
    until("the read begins", || {
        ours.read((LEN - BLOCK) as u64, &mut last).unwrap();
        last[0] == 0x5a
    });
    drop(p);
    let end = end_of(&mut [&mut d], op);
    // It was stopped in good order, or was just done.
    assert!(matches!(&end, Outcome::Done(_) | Outcome::Failed(_)), "{end:?}");
    until("the agent of the other ends", || agents() == threads);
    d.deregister(RegionId::new(0)).unwrap();
}
