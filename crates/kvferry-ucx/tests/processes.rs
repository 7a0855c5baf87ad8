//! Two processes: bytes both ways, notifications, and death at the worst moment.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_transport::conformance::bytes::reversed;
use kvferry_transport::conformance::death::{Death, MARGIN, dies_in_the_middle, exchange};
use kvferry_transport::conformance::process::{Order, PeerProcess, serve};
use kvferry_transport::{Event, LaneKind, LostCause, OpKind, Outcome, Region, Submission, TransferError, Transport};
use kvferry_ucx::{UcxConfig, UcxTransport};
use support::{connected, drive, end_of, endpoint, over};

/// What an endpoint is opened with, by the peer's role: the number of rails, or the one transport of two.
fn config(role: &str) -> UcxConfig {
    role.parse().map_or_else(|_| over(&[role], 2), UcxConfig::with_rails)
}

/// A test for the runner, a serving peer for those who start it.
#[test]
fn peer_process() {
    let Some(order) = Order::from_environment() else {
        println!("no test: the process that the others start is this one with an order in its environment");
        return;
    };
    let endpoint = UcxTransport::new(config(&order.role)).unwrap();
    panic!("{}", serve(Box::new(endpoint), Region::zeroed(order.bytes).unwrap()));
}

fn start(role: &str, len: usize) -> PeerProcess {
    PeerProcess::start("peer_process", role, len).unwrap()
}

/// What a peer of `len` bytes exchanges with.
fn ours(len: usize) -> Region {
    Region::zeroed(len + 2 * usize::try_from(MARGIN).unwrap()).unwrap()
}

#[test]
fn bytes_go_both_ways_whatever_the_rails() {
    const LEN: usize = 3 << 20;
    for (near, far) in [("2", "2"), ("1", "2"), ("2", "1"), ("3", "2"), ("tcp", "tcp"), ("posix", "posix")] {
        let mut peer = start(far, LEN);
        let mut d = UcxTransport::new(config(near)).unwrap();
        let begin = Instant::now();
        exchange(&mut d, &ours(LEN), &mut peer, LEN as u64, 3).unwrap_or_else(|e| panic!("{near} to {far}: {e}"));
        println!("{near} to {far}: {:?}", begin.elapsed());
    }
}

fn killed_in_the_middle(role: &str, death: &Death) {
    let mut peer = start(role, usize::try_from(death.bytes).unwrap());
    dies(role, &mut UcxTransport::new(config(role)).unwrap(), &mut peer, death);
}

fn dies(role: &str, d: &mut UcxTransport, peer: &mut PeerProcess, death: &Death) {
    let ours = Region::zeroed(usize::try_from(death.our_bytes()).unwrap()).unwrap();
    let aftermath = dies_in_the_middle(d, &ours, peer, death).unwrap();
    println!("{role}, {death:?}: {aftermath:?}");
    assert_eq!((&aftermath.cause, aftermath.in_doubt), (&LostCause::Gone, 0), "{aftermath:?}");
    assert!(aftermath.told_after < Duration::from_secs(10), "{aftermath:?}");
}

#[test]
fn a_gigabyte_arrives_and_a_peer_is_killed_in_the_next() {
    const LEN: usize = 1 << 30;
    let mut peer = start("2", LEN);
    let (mut d, ours) = (endpoint(2), Region::zeroed(LEN).unwrap());
    d.register(ours.clone()).unwrap();
    let id = d.connect(peer.blob()).unwrap();
    connected(&mut [&mut d], id);
    let lane = d.peer(id).unwrap().lane;
    assert_eq!((lane.kind, lane.transports), (LaneKind::CrossProcess, vec!["cma".to_owned()]), "{}", lane.detail);
    let batch = reversed(LEN as u64, 64 << 10, 0, true).unwrap();
    let begin = Instant::now();
    let op = d.submit(Submission { peer: id, kind: OpKind::Read, batch, notify: None }).unwrap();
    let stats = end_of(&mut [&mut d], op).done().unwrap();
    println!("1 GiB in {:?}", begin.elapsed());
    assert_eq!((stats.bytes.get(), stats.descriptors), (LEN as u64, (LEN >> 16) as u64));
    for at in [0, 1, LEN / 2 + 777, LEN - 4096] {
        let (block, within) = (at >> 16, at & 0xffff);
        let source = LEN - ((block + 1) << 16) + within;
        let mut got = [0; 64];
        ours.read(at as u64, &mut got).unwrap();
        let expected = kvferry_transport::conformance::bytes::block(
            (source >> 16) as u64,
            1 << 16,
            kvferry_transport::conformance::bytes::PEER,
        );
        assert_eq!(got, expected[within..within + 64], "at {at}");
    }
    d.disconnect(id).unwrap();
    d.deregister(RegionId::ZERO).unwrap();
    drop(ours);
    dies("2", &mut d, &mut peer, &Death::reading(LEN as u64));
}

#[test]
fn a_peer_killed_in_writes() {
    killed_in_the_middle("2", &Death::writing(128 << 20, Duration::from_millis(10)));
}

#[test]
fn a_peer_killed_over_tcp() {
    killed_in_the_middle("tcp", &Death::reading(64 << 20));
    killed_in_the_middle("tcp", &Death::writing(64 << 20, Duration::from_millis(10)));
}

#[test]
fn a_peer_killed_over_shared_memory() {
    killed_in_the_middle("posix", &Death::reading(64 << 20));
}

#[test]
fn a_question_without_an_answer_ends_with_the_peer() {
    const LEN: usize = 1 << 20;
    let mut peer = start("2", LEN);
    let mut d = endpoint(2);
    d.register(Region::zeroed(LEN).unwrap()).unwrap();
    let id = d.connect(peer.blob()).unwrap();
    connected(&mut [&mut d], id);
    // It is there, and does not answer.
    freeze(&peer);
    let batch = reversed(LEN as u64, 4096, 0, true).unwrap();
    let op = d.submit(Submission { peer: id, kind: OpKind::Read, batch: batch.clone(), notify: None }).unwrap();
    let cancelled = d.submit(Submission { peer: id, kind: OpKind::Read, batch, notify: None }).unwrap();
    d.cancel(cancelled).unwrap();
    assert_eq!(end_of(&mut [&mut d], cancelled), Outcome::Failed(TransferError::Cancelled));
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(200) {
        d.step(begin.elapsed());
        d.wait(Some(Duration::from_millis(10)));
    }
    assert_eq!(d.next_event(), None);
    peer.kill().unwrap();
    assert_eq!(end_of(&mut [&mut d], op), Outcome::Failed(TransferError::PeerLost(LostCause::Gone)));
    drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
    d.disconnect(id).unwrap();
    // Nobody connects to the dead.
    let again = d.connect(peer.blob()).unwrap();
    let cause = drive(&mut [&mut d], |e| match e {
        Event::PeerLost { peer, cause } if *peer == again => Some(cause.clone()),
        _ => None,
    });
    assert_eq!(cause, LostCause::Gone);
}

#[test]
fn an_idle_connection_hears_of_a_death_at_once() {
    let mut peer = start("1", 4096);
    let mut d = endpoint(2);
    let id = d.connect(peer.blob()).unwrap();
    connected(&mut [&mut d], id);
    peer.kill().unwrap();
    let killed = Instant::now();
    let lost = |e: &Event| (*e == Event::PeerLost { peer: id, cause: LostCause::Gone }).then_some(());
    drive(&mut [&mut d], lost);
    println!("told after {:?}", killed.elapsed());
}

/// Stops a process, and returns when each of its threads has stopped.
fn freeze(peer: &PeerProcess) {
    let pid = rustix::process::Pid::from_raw(peer.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let stopped = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    while !std::fs::read_dir(format!("/proc/{}/task", peer.id())).unwrap().all(stopped) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
