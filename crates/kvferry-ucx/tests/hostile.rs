//! Blobs whose frame is whole, and whose part that UCX gets to read is not: a typed error, or a connection that may fail, and never
//! the end of the process.
//!
//! UCX aborts where it finds what it can't be, so every batch runs in a process of its own.
//!
//! One thing is left as it is: which file `posix` maps as the peer's queue. A peer is believed about that; another file of a living
//! process may be too short, and ends who maps it by `SIGBUS`. `sysv` is left out for the same reason: its segments have small
//! numbers, and the next one is somebody else's.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod support;

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvferry_transport::blob::Blob;
use kvferry_transport::conformance::bytes::reversed;
use kvferry_transport::{ConnectError, Event, OpKind, PeerId, Region, Submission, Transport};
use kvferry_ucx::{Rail, UcxConfig, UcxTransport};
use support::{drive, end_of};

const BATCH: &str = "KVFERRY_HOSTILE_BATCH";
const LEN: usize = 4096;

/// An endpoint over the lanes of that name. Its network is the loopback device: changed addresses are not called in others.
fn open(lanes: &str) -> (UcxTransport, Region) {
    let mut config = UcxConfig::with_rails(1);
    config.rails[0] = Rail::on(["lo"]).with_transports(lanes.split(','));
    config.connect_within = Duration::from_millis(200);
    let mut endpoint = UcxTransport::new(config).unwrap();
    let region = Region::zeroed(LEN).unwrap();
    endpoint.register(region.clone()).unwrap();
    (endpoint, region)
}

/// Where it stands which file `posix` maps: eight bytes with a descriptor's and this process's number, and a flag on top.
fn segment(lane: &[u8]) -> Option<usize> {
    const PROCFS: u64 = 1 << 63;
    const NUMBER: u64 = (1 << 30) - 1;
    let pid = u64::from(std::process::id());
    lane.windows(8).position(|bytes| {
        let id = u64::from_le_bytes(bytes.try_into().unwrap());
        id & PROCFS != 0 && (id & NUMBER == pid || id >> 30 & NUMBER == pid)
    })
}

/// What a byte becomes, one after another.
fn changes(byte: u8) -> impl Iterator<Item = u8> {
    let all = [byte ^ 1, byte ^ 0x10, byte ^ 0x80, byte.wrapping_add(1), 0, 0x7f, 0xff];
    let new = move |i: usize| !all[..i].contains(&all[i]) && all[i] != byte;
    (0..all.len()).filter(move |i| new(*i)).map(move |i| all[i])
}

/// Connects, waits a little for what comes of it, and disconnects; whether the blob was taken at all.
fn try_out(near: &mut UcxTransport, blob: &Blob, start: Instant) -> bool {
    let peer: PeerId = match near.connect(&blob.encode()) {
        Ok(peer) => peer,
        Err(ConnectError::BadLane { reason, .. }) => {
            assert!(!reason.is_empty());
            return false;
        }
        Err(other) => panic!("{other}"),
    };
    let begin = Instant::now();
    let mut known = false;
    while !known && begin.elapsed() < Duration::from_millis(5) {
        near.step(start.elapsed());
        known = std::iter::from_fn(|| near.next_event())
            .any(|e| matches!(e, Event::Connected { .. } | Event::PeerLost { .. }));
        near.wait(Some(Duration::from_micros(500)));
    }
    near.disconnect(peer).unwrap();
    true
}

/// A test for the runner; a batch for those who start it.
#[test]
fn batch() {
    let Ok(order) = std::env::var(BATCH) else {
        println!("no test: the batches of the others are this one with an order in its environment");
        return;
    };
    let (lanes, part) = order.split_once(' ').unwrap();
    let (step, of) = part.split_once('/').map(|(a, b)| (a.parse::<usize>().unwrap(), b.parse().unwrap())).unwrap();
    let start = Instant::now();
    let ((far, source), (mut near, ours)) = (open(lanes), open(lanes));
    let whole = Blob::decode(&far.blob()).unwrap();
    let (mut taken, mut refused) = (0, 0);
    let segment = segment(&whole.lane).map_or(0..0, |at| at..at + 8);
    for at in (step..whole.lane.len()).step_by(of) {
        for byte in changes(whole.lane[at]).filter(|_| !segment.contains(&at)) {
            // By the handle and not by `println`, so that it is out before what may end this process.
            writeln!(std::io::stdout().lock(), "TRY {byte:#x} for {:#x} at {at}", whole.lane[at]).unwrap();
            let mut blob = whole.clone();
            blob.lane[at] = byte;
            match try_out(&mut near, &blob, start) {
                true => taken += 1,
                false => refused += 1,
            }
        }
        let mut blob = whole.clone();
        blob.lane.truncate(at);
        assert!(!try_out(&mut near, &blob, start), "cut at {at}");
    }
    let tried = start.elapsed();
    // And all is as before.
    source.fill(0, LEN as u64, 7).unwrap();
    let peer = loop {
        let peer = near.connect(&whole.encode()).unwrap();
        let up = drive(&mut [&mut near], |e| match e {
            Event::Connected { peer: id } if *id == peer => Some(true),
            Event::PeerLost { peer: id, .. } if *id == peer => Some(false),
            _ => None,
        });
        if up {
            break peer;
        }
        near.disconnect(peer).unwrap();
        assert!(start.elapsed() < Duration::from_secs(15), "not connected any more");
    };
    let batch = reversed(LEN as u64, 512, 0, true).unwrap();
    let op = near.submit(Submission { peer, kind: OpKind::Read, batch, notify: None }).unwrap();
    assert!(end_of(&mut [&mut near], op).done().is_some());
    assert!(ours.to_vec().unwrap().iter().all(|byte| *byte == 7));
    drop((near, far));
    let len = whole.lane.len();
    println!(
        "\nDONE {taken} taken, {refused} refused; {len} bytes without {segment:?}; {tried:?} of {:?}",
        start.elapsed()
    );
}

/// Runs a batch in another process; what it said at the end.
fn run(lanes: &str, part: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "batch", "--nocapture"]).env(BATCH, format!("{lanes} {part}"));
    // UCX tells of each address that is none.
    command.env("UCX_LOG_LEVEL", "fatal").stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let last = |what: &str| text.lines().rfind(|line| line.starts_with(what)).unwrap_or_default().to_owned();
    assert!(
        output.status.success(),
        "{lanes} {part}: {}, after {:?}: {}",
        output.status,
        last("TRY"),
        String::from_utf8_lossy(&output.stderr)
    );
    last("DONE")
}

fn every_change(lanes: &str) {
    for part in 0..2 {
        println!("{lanes}: {}", run(lanes, &format!("{part}/2")));
    }
}

#[test]
fn blobs_that_are_changed_inside_over_tcp() {
    every_change("tcp");
}

#[test]
fn blobs_that_are_changed_inside_over_shared_memory() {
    every_change("posix");
}

#[test]
fn blobs_that_are_changed_inside_over_lanes_together() {
    every_change("posix,cma,tcp,self");
}
