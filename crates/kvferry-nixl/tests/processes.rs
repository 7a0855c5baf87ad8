//! Two processes: bytes both ways, notifications, death at the worst moment.
//!
//! The peer is this very binary, started again with only the test `peer_process` and a role in its environment.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_nixl::NixlTransport;
use kvferry_transport::{
    ConnectError, Event, LostCause, OpKind, Outcome, PeerId, Region, Submission, TransferError, Transport,
};
use support::{connected, drive, end_of, endpoint, has_nixl, lent, pattern, reverse_blocks, reversed, until};

const BYTES: &str = "KVFERRY_NIXL_TEST_BYTES";

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
    let Ok(len) = std::env::var(BYTES) else {
        println!("no test: the process that the others start is this one with {BYTES} set");
        return;
    };
    let len: usize = len.parse().unwrap();
    let region = Region::zeroed(len).unwrap();
    if len <= 64 << 20 {
        region.write(0, &pattern(7, len)).unwrap();
    } else {
        region.fill(0, len as u64, 0x5a).unwrap();
    }
    let mut endpoint = endpoint();
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
    fn start(len: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "peer_process", "--nocapture"]).env(BYTES, len.to_string());
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

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl PeerProcess {
    /// Stops it, and returns when each of its threads has stopped.
    fn freeze(&self) {
        self.signal(rustix::process::Signal::STOP);
        let state = |path: std::path::PathBuf| {
            let text = std::fs::read_to_string(path.join("stat")).unwrap_or_default();
            text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
        };
        let tasks = || std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        while !tasks().all(|t| state(t.unwrap().path()) == Some('T')) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn submit(
    d: &mut NixlTransport,
    peer: PeerId,
    kind: OpKind,
    len: usize,
    notify: Option<&str>,
) -> kvferry_transport::OpId {
    let batch = reversed(len, 16 << 10);
    d.submit(Submission { peer, kind, batch, notify: notify.map(|n| n.as_bytes().to_vec()) }).unwrap()
}

#[test]
fn both_ways() {
    const LEN: usize = 9 << 20;
    if !has_nixl() {
        return;
    }
    let mut peer = PeerProcess::start(LEN);
    let (mut d, ours) = (endpoint(), Region::zeroed(LEN).unwrap());
    d.register(ours.clone()).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    println!("{:?}", d.peer(id).unwrap().lane);
    for round in 0..10 {
        let op = submit(&mut d, id, OpKind::Read, LEN, Some(&format!("read {round}")));
        let stats = end_of(&mut [&mut d], op).done().unwrap();
        assert_eq!((stats.bytes.get(), stats.descriptors), (LEN as u64, (LEN >> 14) as u64));
    }
    let expected = reverse_blocks(&pattern(7, LEN), 16 << 10);
    assert_eq!(ours.to_vec().unwrap(), expected);
    for round in 0..10 {
        ours.write(round * 4096, &pattern(round, 4096)).unwrap();
        let op = submit(&mut d, id, OpKind::Write, LEN, Some(&format!("write {round}")));
        assert!(end_of(&mut [&mut d], op).done().is_some());
        // Done is visible to the peer at once.
        assert_eq!(peer.sum(), sum(&reverse_blocks(&ours.to_vec().unwrap(), 16 << 10)), "round {round}");
    }
    d.disconnect(id).unwrap();
    let notes: Vec<String> = (0..20).map(|_| String::from_utf8(from_hex(&peer.line("NOTE "))).unwrap()).collect();
    let each = |kind: &'static str| (0..10).map(move |i| format!("{kind} {i}"));
    assert_eq!(notes, each("read").chain(each("write")).collect::<Vec<_>>());
    assert!(peer.skipped.iter().all(|line| !line.starts_with("NOTE")), "{:?}", peer.skipped);
}

#[test]
fn a_gibibyte() {
    const LEN: usize = 1 << 30;
    if !has_nixl() {
        return;
    }
    let peer = PeerProcess::start(LEN);
    let (mut d, ours) = (endpoint(), Region::zeroed(LEN).unwrap());
    d.register(ours.clone()).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    let start = Instant::now();
    let op = submit(&mut d, id, OpKind::Read, LEN, None);
    assert_eq!(end_of(&mut [&mut d], op).done().unwrap().bytes.get(), LEN as u64);
    println!("1 GiB in blocks of 16 KiB took {:?}", start.elapsed());
    let mut part = vec![0; 1 << 20];
    for at in (0..LEN as u64).step_by(1 << 20) {
        ours.read(at, &mut part).unwrap();
        assert!(part.iter().all(|b| *b == 0x5a), "at {at}");
    }
}

/// The peer is killed while large reads or writes are under way.
fn killed_in_the_middle(kind: OpKind, len: usize, delay: Duration) {
    let peer = PeerProcess::start(len);
    let (mut d, (_, ours, held)) = (endpoint(), lent(len));
    d.register(ours).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    let ops: Vec<_> = (0..3).map(|i| submit(&mut d, id, kind, len, Some(&format!("{i}")))).collect();
    let start = Instant::now();
    while start.elapsed() < delay {
        d.step(start.elapsed());
        d.wait(Some(Duration::from_millis(1)));
    }
    peer.signal(rustix::process::Signal::KILL);
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
    println!("all told {:?} after the kill", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    // Each ended once, before the loss was told, and what was not done says why.
    let mut ids: Vec<_> = ends.iter().map(|(op, _)| *op).collect();
    ids.sort();
    assert_eq!(ids, ops);
    let lost = Outcome::Failed(TransferError::PeerLost(LostCause::Gone));
    let as_expected = |end: &Outcome| end.done().is_some() || matches!(end, Outcome::Failed(_));
    assert!(ends.iter().all(|(_, end)| as_expected(end)), "{ends:?}");
    assert!(ends.iter().any(|(_, end)| *end == lost), "all were done in {delay:?}: {ends:?}");
    d.disconnect(id).unwrap();
    d.deregister(RegionId::new(0)).unwrap();
    drop(d);
    until("the owner is let go", || held.upgrade().is_none());
}

#[test]
fn a_killed_peer_ends_every_operation() {
    if !has_nixl() {
        return;
    }
    killed_in_the_middle(OpKind::Read, 1 << 30, Duration::from_millis(30));
    killed_in_the_middle(OpKind::Write, 256 << 20, Duration::from_millis(5));
}

#[test]
fn a_question_without_an_answer_ends_with_the_peer() {
    const LEN: usize = 1 << 20;
    if !has_nixl() {
        return;
    }
    let peer = PeerProcess::start(LEN);
    let mut d = endpoint();
    d.register(Region::zeroed(LEN).unwrap()).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    // It is there, and does not answer.
    peer.freeze();
    let op = submit(&mut d, id, OpKind::Read, LEN, None);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        d.step(start.elapsed());
        d.wait(Some(Duration::from_millis(10)));
    }
    assert_eq!(d.next_event(), None);
    peer.signal(rustix::process::Signal::KILL);
    let lost = Outcome::Failed(TransferError::PeerLost(LostCause::Gone));
    assert_eq!(end_of(&mut [&mut d], op), lost);
    drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
    d.disconnect(id).unwrap();
    // Who is dead is not even asked.
    let (old, mut peer) = (peer.blob.clone(), peer);
    peer.child.wait().unwrap();
    assert!(matches!(d.connect(&old), Err(ConnectError::Unreachable { .. })));
}

/// The peer stops in the middle, over a lane that needs its code: what is under way may go on at any time.
fn stopped_in_the_middle(kind: OpKind) {
    const LEN: usize = 256 << 20;
    let mut peer = PeerProcess::start(LEN);
    let mut config = kvferry_nixl::NixlConfig::default();
    config.silence = Duration::from_millis(500);
    config.ucx = vec![("TLS".to_owned(), "tcp".to_owned())];
    let (mut d, (_, ours, held)) = (NixlTransport::new(config).unwrap(), lent(LEN));
    d.register(ours).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    let op = submit(&mut d, id, kind, LEN, Some("never"));
    until("bytes move", || d.telemetry().bytes > 0);
    peer.freeze();
    let end = end_of(&mut [&mut d], op);
    let why = |why: &str| why.contains("sign of life");
    assert!(
        matches!(&end, Outcome::InDoubt(TransferError::PeerLost(LostCause::Lane(text))) if why(text)),
        "{kind:?}: {end:?}"
    );
    drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
    d.disconnect(id).unwrap();
    d.deregister(RegionId::new(0)).unwrap();
    assert!(held.upgrade().is_some(), "{kind:?}: let go while it is in doubt");
    peer.signal(rustix::process::Signal::CONT);
    until("what was in doubt ends", || held.upgrade().is_none());
    // It lives, and was told nothing.
    peer.sum();
    assert!(peer.skipped.iter().all(|line| !line.starts_with("NOTE")), "{:?}", peer.skipped);
}

#[test]
fn a_peer_that_stops_in_the_middle_leaves_doubt_and_holds_memory() {
    if !has_nixl() {
        return;
    }
    stopped_in_the_middle(OpKind::Read);
    stopped_in_the_middle(OpKind::Write);
}

#[test]
fn a_question_to_a_silent_peer_fails() {
    const LEN: usize = 1 << 20;
    if !has_nixl() {
        return;
    }
    let peer = PeerProcess::start(LEN);
    let mut config = kvferry_nixl::NixlConfig::default();
    config.silence = Duration::from_millis(500);
    let mut d = NixlTransport::new(config).unwrap();
    d.register(Region::zeroed(LEN).unwrap()).unwrap();
    let id = d.connect(&peer.blob).unwrap();
    connected(&mut [&mut d], id);
    peer.freeze();
    let op = submit(&mut d, id, OpKind::Read, LEN, None);
    let end = end_of(&mut [&mut d], op);
    assert!(
        matches!(&end, Outcome::Failed(TransferError::PeerLost(LostCause::Lane(why))) if why.contains("sign of life"))
    );
    drive(&mut [&mut d], |e| matches!(e, Event::PeerLost { .. }).then_some(()));
}
