//! Counts of descriptors and mappings, in a process of its own so that nothing else changes them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::time::Duration;

use kvferry_geometry::units::RegionId;
use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::blob::Blob;
use kvferry_transport::{OpKind, Region, Submission, Transport};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use support::{connected, end_of, reversed, shared};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Mappings of memory files; others come and go with the allocator.
fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|l| l.contains("memfd:")).count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn nothing_is_left_behind() {
    let (fds, maps, tasks) = (descriptors(), mappings(), threads());
    {
        connections_come_and_go();
        strangers_are_few_and_have_little_time();
        a_hoard_of_descriptors_stalls_nobody();
    }
    assert_eq!((descriptors(), mappings(), threads()), (fds, maps, tasks));
}

fn connections_come_and_go() {
    const LEN: usize = 16 << 10;
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let mut d = ShmTransport::new(Config::default()).unwrap();
    p.register(shared(LEN)).unwrap();
    d.register(Region::zeroed(LEN).unwrap()).unwrap();
    let (blob, batch) = (p.blob(), reversed(LEN, 1024));
    let mut first = None;
    for round in 0..1000 {
        let peer = d.connect(&blob).unwrap();
        if round % 3 > 0 {
            connected(&mut [&mut d, &mut p], peer);
        }
        let kind = if round % 2 == 0 { OpKind::Read } else { OpKind::Write };
        let submission = Submission { peer, kind, batch: batch.clone(), notify: None };
        let op = d.submit(submission).unwrap();
        if round % 5 > 0 {
            assert!(end_of(&mut [&mut d, &mut p], op).done().is_some());
        }
        d.disconnect(peer).unwrap();
        for _ in 0..if first.is_some() { 2000 } else { 100 } {
            d.step(Duration::ZERO);
            p.step(Duration::ZERO);
            while d.next_event().is_some() {}
            if first.is_some_and(|f| f == (descriptors(), mappings(), threads())) {
                break;
            }
            // The operation's threads may need a moment to stop.
            d.wait(Some(Duration::from_millis(1)));
        }
        let now = (descriptors(), mappings(), threads());
        // After the first round the copy threads run.
        // After the first rounds the copy threads run and nothing is under way.
        if round == 2 {
            first = Some(now);
        } else if let Some(first) = first {
            assert_eq!(now, first, "round {round}");
        }
    }
    d.deregister(RegionId::new(0)).unwrap();
    p.deregister(RegionId::new(0)).unwrap();
}

fn stranger(name: &[u8]) -> Option<std::os::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name).unwrap()).ok()?;
    Some(fd)
}

fn strangers_are_few_and_have_little_time() {
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let name = Blob::decode(&p.blob()).unwrap().lane[21..].to_vec();
    let idle = descriptors();
    let mut held = Vec::new();
    for i in 0..1000 {
        held.extend(stranger(&name));
        if i % 50 == 0 {
            for _ in 0..4 {
                p.step(Duration::ZERO);
            }
        }
    }
    let mut due = None;
    for _ in 0..40 {
        due = p.step(Duration::from_secs(1));
    }
    let theirs = descriptors() - idle - held.len();
    assert!(theirs <= 256, "{theirs} strangers are kept");
    assert!(due.is_some_and(|due| due <= Duration::from_secs(6)), "they are looked at again: {due:?}");
    p.step(Duration::from_secs(20));
    assert_eq!(descriptors() - idle - held.len(), 0);
    drop(held);
    for _ in 0..40 {
        p.step(Duration::from_secs(20));
    }
    assert_eq!(p.step(Duration::from_secs(20)), None);
    assert!(!p.wait(Some(Duration::from_millis(1))), "and it sleeps again");
}

fn a_hoard_of_descriptors_stalls_nobody() {
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let name = Blob::decode(&p.blob()).unwrap().lane[21..].to_vec();
    let waiting = stranger(&name).unwrap();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let low = rustix::process::Rlimit { current: Some(200), maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, low).unwrap();
    let hoard: Vec<_> = std::iter::from_fn(|| rustix::io::fcntl_dupfd_cloexec(&waiting, 0).ok()).collect();
    let due = p.step(Duration::from_secs(1));
    let woken = p.wait(Some(Duration::from_millis(1)));
    drop(hoard);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    // It rests instead of spinning on a connection that it cannot take.
    assert_eq!((due, woken), (Some(Duration::from_millis(1100)), false));
    p.step(Duration::from_secs(2));
    assert!(p.wait(Some(Duration::from_secs(1))), "the listener is watched again");
    p.step(Duration::from_secs(2));
    let before = descriptors();
    drop(waiting);
    for _ in 0..3 {
        p.step(Duration::from_secs(2));
    }
    assert_eq!(descriptors(), before - 2);
}
