//! Two processes: bytes both ways, notifications, death at the worst moment, a restart under the same name.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::io::Read;
use std::time::Duration;

use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::conformance::bytes::reversed;
use kvferry_transport::conformance::death::{Death, MARGIN, dies_in_the_middle, exchange};
use kvferry_transport::conformance::process::{Order, PeerProcess, serve};
use kvferry_transport::{Event, LaneKind, LostCause, OpKind, Region, Submission, Transport};
use support::{connected, drive, end_of, shared};

const NAME: &str = "KVFERRY_SHM_TEST_NAME";

/// A test for the runner, a serving peer for those who start it.
#[test]
fn peer_process() {
    let Some(order) = Order::from_environment() else {
        println!("no test: the process that the others start is this one with an order in its environment");
        return;
    };
    let mut config = Config::default();
    config.name = std::env::var(NAME).ok();
    let region = memory(&order.role, order.bytes);
    panic!("{}", serve(Box::new(ShmTransport::new(config).unwrap()), region));
}

fn memory(role: &str, len: usize) -> Region {
    if role == "plain" { Region::zeroed(len).unwrap() } else { shared(len) }
}

fn start(role: &str, len: usize) -> PeerProcess {
    PeerProcess::start("peer_process", role, len).unwrap()
}

fn endpoint() -> ShmTransport {
    ShmTransport::new(Config::default()).unwrap()
}

fn both_ways(role: &str, lane: LaneKind) {
    const LEN: usize = 9 << 20;
    let mut peer = start(role, LEN);
    let (mut d, ours) = (endpoint(), shared(LEN + 2 * usize::try_from(MARGIN).unwrap()));
    exchange(&mut d, &ours, &mut peer, LEN as u64, 10).unwrap();
    d.register(ours).unwrap();
    let id = d.connect(peer.blob()).unwrap();
    connected(&mut [&mut d], id);
    let batch = reversed(LEN as u64, 4096, MARGIN, true).unwrap();
    let op = d.submit(Submission { peer: id, kind: OpKind::Read, batch, notify: None }).unwrap();
    assert!(end_of(&mut [&mut d], op).done().is_some());
    let told = d.peer(id).unwrap().lane;
    let measured = told.measured.unwrap();
    assert_eq!(told.kind, lane);
    assert!(measured.bytes_per_second > 1e6 && measured.per_operation < Duration::from_secs(5), "{measured:?}");
}

#[test]
fn mapped_memory_both_ways() {
    both_ways("shared", LaneKind::SharedMemory);
}

#[test]
fn plain_memory_both_ways() {
    both_ways("plain", LaneKind::CrossProcess);
}

/// The peer is killed while large reads and writes are under way.
fn killed_in_the_middle(role: &str, death: Death) {
    let len = usize::try_from(death.bytes).unwrap();
    let mut peer = start(role, len);
    let (mut d, ours) = (endpoint(), shared(usize::try_from(death.our_bytes()).unwrap()));
    let aftermath = dies_in_the_middle(&mut d, &ours, &mut peer, &death).unwrap();
    println!("{role}, {death:?}: {aftermath:?}");
    assert_eq!((&aftermath.cause, aftermath.in_doubt), (&LostCause::Gone, 0), "{aftermath:?}");
    // Everything of the peer's is unmapped, and its memory gone with it: of this size, only our own mapping is left.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let large = maps.lines().filter(|line| line.contains("memfd:kvferry-test") && mapped_bytes(line) >= len);
    assert_eq!(large.count(), 1, "{maps}");
    // And the endpoint works on.
    let mut peer = start(role, 1 << 20);
    let small = shared((1 << 20) + 2 * usize::try_from(MARGIN).unwrap());
    exchange(&mut d, &small, &mut peer, 1 << 20, 1).unwrap();
}

fn mapped_bytes(line: &str) -> usize {
    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
    usize::from_str_radix(end, 16).unwrap() - usize::from_str_radix(start, 16).unwrap()
}

#[test]
fn a_killed_peer_ends_every_operation() {
    // One after the other: the first needs a gigabyte on each side.
    killed_in_the_middle("shared", Death::reading(1 << 30));
    killed_in_the_middle("shared", Death::writing(512 << 20, Duration::from_millis(30)));
    killed_in_the_middle("plain", Death::reading(512 << 20));
    killed_in_the_middle("plain", Death::writing(512 << 20, Duration::ZERO));
}

#[test]
fn a_restarted_peer_is_not_mistaken_for_its_former_life() {
    let name = format!("kvferry-test-{}", std::process::id());
    let mut d = endpoint();
    d.register(shared(4096)).unwrap();
    let named = || PeerProcess::start_with("peer_process", "shared", 4096, &[(NAME, &name)]).unwrap();
    let first = named();
    let old = first.blob().to_vec();
    let id = d.connect(&old).unwrap();
    connected(&mut [&mut d], id);
    drop(first);
    drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
    d.disconnect(id).unwrap();
    assert!(d.connect(&old).is_err(), "nobody has the name now");
    let second = named();
    let id = d.connect(&old).unwrap();
    let cause = drive(&mut [&mut d], |e| match e {
        Event::PeerLost { cause, .. } => Some(cause.clone()),
        Event::Connected { .. } => panic!("connected to another life"),
        _ => None,
    });
    assert!(matches!(&cause, LostCause::Refused(text) if text.contains("fetch the blob anew")), "{cause}");
    d.disconnect(id).unwrap();
    let id = d.connect(second.blob()).unwrap();
    connected(&mut [&mut d], id);
    let batch = reversed(4096, 4096, 0, true).unwrap();
    let op = d.submit(Submission { peer: id, kind: OpKind::Read, batch, notify: None }).unwrap();
    assert!(end_of(&mut [&mut d], op).done().is_some());
}

#[test]
fn a_killed_process_leaves_no_file_and_no_name() {
    let before = listing("/dev/shm");
    let mut peer = start("shared", 1 << 20);
    let mut d = endpoint();
    let id = d.connect(peer.blob()).unwrap();
    connected(&mut [&mut d], id);
    let name = format!("@kvferry-{}", d.peer(id).unwrap().endpoint);
    assert!(unix_names().contains(&name), "the name is there while it lives");
    peer.kill().unwrap();
    peer.wait().unwrap();
    drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
    d.disconnect(id).unwrap();
    assert!(!unix_names().contains(&name));
    assert_eq!(listing("/dev/shm"), before);
}

fn listing(path: &str) -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = std::fs::read_dir(path).map_or(Vec::new(), |d| d.map(|e| e.unwrap().file_name()).collect());
    names.sort();
    names
}

fn unix_names() -> String {
    let mut text = String::new();
    std::fs::File::open("/proc/net/unix").unwrap().read_to_string(&mut text).unwrap();
    text
}
