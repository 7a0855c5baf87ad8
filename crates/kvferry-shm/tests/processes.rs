//! Two processes: bytes both ways, notifications, death at the worst moment, a restart under the same name.
//!
//! The peer is this very binary, started again with only the test `peer_process` and a role in its environment.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::{
    Event, LaneKind, LostCause, OpKind, Outcome, PeerId, Region, Submission, TransferError, Transport,
};
use support::{connected, drive, end_of, pattern, reverse_blocks, reversed, shared};

const ROLE: &str = "KVFERRY_SHM_TEST_ROLE";
const BYTES: &str = "KVFERRY_SHM_TEST_BYTES";
const NAME: &str = "KVFERRY_SHM_TEST_NAME";

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).map(|c| u8::from_str_radix(std::str::from_utf8(c).unwrap(), 16).unwrap()).collect()
}

/// A test for the runner, a serving peer for those who start it: it tells its blob and its notifications, digests its
/// memory when asked to, and ends with its input.
#[test]
fn peer_process() {
    let Ok(role) = std::env::var(ROLE) else {
        println!("no test: the process that the others start is this one with {ROLE} set");
        return;
    };
    let len: usize = std::env::var(BYTES).unwrap().parse().unwrap();
    let mut config = Config::default();
    config.name = std::env::var(NAME).ok();
    let region = if role == "plain" { Region::zeroed(len).unwrap() } else { shared(len) };
    if len <= 64 << 20 {
        region.write(0, &pattern(7, len)).unwrap();
    } else {
        region.fill(0, len as u64, 0x5a).unwrap();
    }
    let mut endpoint = ShmTransport::new(config).unwrap();
    endpoint.register(region.clone()).unwrap();
    println!("\nBLOB {}", to_hex(&endpoint.blob()));
    let (send, orders) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            send.send(line.unwrap()).unwrap();
        }
        std::process::exit(0);
    });
    let start = Instant::now();
    loop {
        endpoint.step(start.elapsed());
        while let Some(event) = endpoint.next_event() {
            if let Event::Notification { payload, .. } = event {
                println!("NOTE {}", to_hex(&payload));
            }
        }
        if orders.try_recv().is_ok() {
            println!("SUM {}", sum(&region.to_vec().unwrap()));
        }
        endpoint.wait(Some(Duration::from_millis(2)));
    }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

struct PeerProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    skipped: Vec<String>,
    blob: Vec<u8>,
}

impl PeerProcess {
    fn start(role: &str, len: usize, name: Option<&str>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "peer_process", "--nocapture"]).env(ROLE, role).env(BYTES, len.to_string());
        if let Some(name) = name {
            command.env(NAME, name);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let stdin = child.stdin.take();
        let mut peer = Self { child, stdin, lines, skipped: Vec::new(), blob: Vec::new() };
        peer.blob = from_hex(&peer.line("BLOB "));
        peer
    }

    /// What follows the prefix on the next line that has it; other lines are kept.
    fn line(&mut self, prefix: &str) -> String {
        if let Some(at) = self.skipped.iter().position(|line| line.starts_with(prefix)) {
            return self.skipped.remove(at)[prefix.len()..].to_owned();
        }
        loop {
            let line = self.lines.recv_timeout(Duration::from_secs(60)).unwrap();
            match line.strip_prefix(prefix) {
                Some(rest) => return rest.to_owned(),
                None => self.skipped.push(line),
            }
        }
    }

    fn sum(&mut self) -> u64 {
        self.stdin.as_mut().unwrap().write_all(b"sum\n").unwrap();
        self.line("SUM ").parse().unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn endpoint() -> ShmTransport {
    ShmTransport::new(Config::default()).unwrap()
}

fn submit(
    d: &mut ShmTransport,
    peer: PeerId,
    kind: OpKind,
    len: usize,
    notify: Option<&str>,
) -> kvferry_transport::OpId {
    let batch = reversed(len, 4096);
    d.submit(Submission { peer, kind, batch, notify: notify.map(|n| n.as_bytes().to_vec()) }).unwrap()
}

fn both_ways(role: &str, lane: LaneKind) {
    const LEN: usize = 9 << 20;
    let mut peer = PeerProcess::start(role, LEN, None);
    let (mut d, ours) = (endpoint(), shared(LEN));
    d.register(ours.clone()).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    assert_eq!(d.peer(id).unwrap().lane.kind, lane);
    for round in 0..10 {
        let op = submit(&mut d, id, OpKind::Read, LEN, Some(&format!("read {round}")));
        let stats = end_of(&mut [&mut d], op).done().unwrap();
        assert_eq!(stats.bytes.get(), LEN as u64);
    }
    let measured = d.peer(id).unwrap().lane.measured.unwrap();
    assert!(measured.bytes_per_second > 1e6 && measured.per_operation < Duration::from_secs(5), "{measured:?}");
    let expected = reverse_blocks(&pattern(7, LEN), 4096);
    assert_eq!(ours.to_vec().unwrap(), expected);
    for round in 0..10 {
        ours.write(round * 4096, &pattern(round, 4096)).unwrap();
        let op = submit(&mut d, id, OpKind::Write, LEN, Some(&format!("write {round}")));
        assert!(end_of(&mut [&mut d], op).done().is_some());
        // Done is visible to the peer at once.
        assert_eq!(peer.sum(), sum(&reverse_blocks(&ours.to_vec().unwrap(), 4096)), "round {round}");
    }
    d.disconnect(id).unwrap();
    let notes: Vec<String> = (0..20).map(|_| String::from_utf8(from_hex(&peer.line("NOTE "))).unwrap()).collect();
    let each = |kind: &'static str| (0..10).map(move |i| format!("{kind} {i}"));
    assert_eq!(notes, each("read").chain(each("write")).collect::<Vec<_>>());
    assert!(peer.skipped.iter().all(|line| !line.starts_with("NOTE")), "{:?}", peer.skipped);
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
fn killed_in_the_middle(role: &str, kind: OpKind, delay: Duration) {
    const LEN: usize = 512 << 20;
    let mut peer = PeerProcess::start(role, LEN, None);
    let (mut d, ours) = (endpoint(), shared(LEN));
    d.register(ours.clone()).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    let ops: Vec<_> = (0..4).map(|i| submit(&mut d, id, kind, LEN, Some(&format!("{i}")))).collect();
    let start = Instant::now();
    while start.elapsed() < delay {
        d.step(start.elapsed());
        d.wait(Some(Duration::from_millis(1)));
    }
    peer.kill();
    let killed = Instant::now();
    let mut ends = Vec::new();
    let cause = drive(&mut [&mut d], |event| match event {
        Event::Completed { op, outcome, .. } => {
            ends.push((*op, outcome.clone()));
            None
        }
        Event::PeerLost { peer, cause } if *peer == id => Some(cause.clone()),
        _ => None,
    });
    assert_eq!(cause, LostCause::Gone);
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    // Each ended once, before the loss was told, and what was not done says why.
    let mut ids: Vec<_> = ends.iter().map(|(op, _)| *op).collect();
    ids.sort();
    assert_eq!(ids, ops);
    let lost = Outcome::Failed(TransferError::PeerLost(LostCause::Gone));
    assert!(ends.iter().all(|(_, end)| end.done().is_some() || *end == lost), "{ends:?}");
    assert!(ends.iter().any(|(_, end)| *end == lost), "all were done in {delay:?}: {ends:?}");
    d.disconnect(id).unwrap();
    // Everything of the peer's is unmapped, and its memory gone with it: of this size, only our own mapping is left.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let large = maps.lines().filter(|line| line.contains("memfd:kvferry-test") && mapped_bytes(line) >= LEN);
    assert_eq!(large.count(), 1, "{maps}");
    d.deregister(kvferry_geometry::units::RegionId::new(0)).unwrap();
}

fn mapped_bytes(line: &str) -> usize {
    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
    usize::from_str_radix(end, 16).unwrap() - usize::from_str_radix(start, 16).unwrap()
}

#[test]
fn a_killed_peer_ends_every_operation() {
    // One after the other: they need half a gigabyte on each side.
    killed_in_the_middle("shared", OpKind::Read, Duration::from_millis(30));
    killed_in_the_middle("shared", OpKind::Write, Duration::from_millis(30));
    killed_in_the_middle("plain", OpKind::Read, Duration::from_millis(30));
    killed_in_the_middle("plain", OpKind::Write, Duration::from_millis(0));
}

#[test]
fn a_restarted_peer_is_not_mistaken_for_its_former_life() {
    let name = format!("kvferry-test-{}", std::process::id());
    let mut d = endpoint();
    d.register(shared(4096)).unwrap();
    let first = PeerProcess::start("shared", 4096, Some(&name));
    let old = first.blob.clone();
    let id = d.connect(&old).unwrap();
    connected(&mut [&mut d], id);
    drop(first);
    drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
    d.disconnect(id).unwrap();
    assert!(d.connect(&old).is_err(), "nobody has the name now");
    let second = PeerProcess::start("shared", 4096, Some(&name));
    let id = d.connect(&old).unwrap();
    let cause = drive(&mut [&mut d], |e| match e {
        Event::PeerLost { cause, .. } => Some(cause.clone()),
        Event::Connected { .. } => panic!("connected to another life"),
        _ => None,
    });
    assert!(matches!(&cause, LostCause::Refused(text) if text.contains("fetch the blob anew")), "{cause}");
    d.disconnect(id).unwrap();
    let id = d.connect(&second.blob).unwrap();
    connected(&mut [&mut d], id);
    let op = submit(&mut d, id, OpKind::Read, 4096, None);
    assert!(end_of(&mut [&mut d], op).done().is_some());
}

#[test]
fn a_killed_process_leaves_no_file_and_no_name() {
    let before = listing("/dev/shm");
    let mut peer = PeerProcess::start("shared", 1 << 20, None);
    let mut d = endpoint();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    let name = format!("@kvferry-{}", d.peer(id).unwrap().endpoint);
    assert!(unix_names().contains(&name), "the name is there while it lives");
    peer.kill();
    peer.child.wait().unwrap();
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
