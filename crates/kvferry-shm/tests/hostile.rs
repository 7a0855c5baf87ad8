//! Peers that lie, flood or break the protocol, on either end of a connection, played by raw sockets. Nothing they do panics,
//! faults, hangs or costs more than a bounded amount; each lie has its error.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::blob::Blob;
use kvferry_transport::{
    ConnectError, EndpointId, Event, Fault, LostCause, OpId, OpKind, Outcome, PeerId, Submission, TransferError,
    Transport,
};
use rustix::fs::SealFlags;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use support::{connected, drive, end_of, memfd, reversed, sealed, shared};

const LEN: usize = 64 << 10;
const BOARD: usize = 4096 + (8 << 20);

fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn send(fd: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// What there is to receive now; `None` if nothing, an empty frame if the other end is closed.
fn receive(fd: &OwnedFd) -> Option<Vec<u8>> {
    let mut buffer = vec![0u8; 1 << 17];
    loop {
        match rustix::net::recv(fd, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((len, _)) => return Some(buffer[..len].to_vec()),
            Err(rustix::io::Errno::AGAIN) => return None,
            Err(rustix::io::Errno::CONNRESET) => {}
            Err(e) => panic!("{e}"),
        }
    }
}

/// A board with the first gates open for generation 0.
fn board() -> OwnedFd {
    let fd = memfd(BOARD, sealed());
    rustix::io::pwrite(&fd, b"kvfboar1", 0).unwrap();
    for gate in 0..4 {
        rustix::io::pwrite(&fd, &1u64.to_ne_bytes(), 4096 + 8 * gate).unwrap();
    }
    fd
}

// Frames, written down a second time on purpose.
fn hello(target: EndpointId, token: [u8; 16]) -> Vec<u8> {
    [&[1, 1, 0][..], &target.get(), &token, &[9; 16]].concat()
}

fn welcome(probe: &[u8; 16]) -> Vec<u8> {
    let at = probe.as_ptr().expose_provenance() as u64;
    [&[2][..], &at.to_le_bytes(), probe].concat()
}

fn grant(region: u32, access: u8, what: u8, a: u64, b: u64) -> Vec<u8> {
    [&[5][..], &region.to_le_bytes(), &[access, what], &a.to_le_bytes(), &b.to_le_bytes()].concat()
}

fn ask(generation: u64, region: u32, access: u8) -> Vec<u8> {
    [&[4][..], &generation.to_le_bytes(), &region.to_le_bytes(), &[access]].concat()
}

/// A listening side made of a raw socket, and an honest endpoint that connects to it.
struct Liar {
    listener: OwnedFd,
    blob: Vec<u8>,
    probe: Box<[u8; 16]>,
    honest: ShmTransport,
}

impl Liar {
    fn new(name: &str, plain: u32) -> Self {
        let name = format!("kvferry-liar-{name}-{}", std::process::id());
        let listener = socket();
        rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let lane = [&[1][..], &[5; 16], &plain.to_le_bytes(), name.as_bytes()].concat();
        let regions = (0..3).map(|i| (RegionId::new(i), Bytes::new(LEN as u64))).collect();
        let blob = Blob { backend: "shm".into(), endpoint: EndpointId::new([8; 16]), generation: 0, regions, lane };
        let mut config = Config::default();
        config.answer_within = Duration::from_millis(200);
        let mut honest = ShmTransport::new(config).unwrap();
        honest.register(shared(LEN)).unwrap();
        Self { listener, blob: blob.encode(), probe: Box::new([0x77; 16]), honest }
    }

    fn accept(&mut self) -> (PeerId, OwnedFd) {
        let peer = self.honest.connect(&self.blob).unwrap();
        let socket = rustix::net::accept(&self.listener).unwrap();
        assert_eq!(receive(&socket).unwrap()[0], 1, "a hello");
        (peer, socket)
    }

    fn welcomed(&mut self) -> (PeerId, OwnedFd) {
        let (peer, socket) = self.accept();
        send(&socket, &welcome(&self.probe), &[board().as_fd()]).unwrap();
        connected(&mut [&mut self.honest], peer);
        (peer, socket)
    }

    fn submit(&mut self, peer: PeerId, kind: OpKind) -> OpId {
        let batch = reversed(LEN, 4096);
        let op = self.honest.submit(Submission { peer, kind, batch, notify: Some(b"n".to_vec()) }).unwrap();
        self.honest.step(Duration::ZERO);
        op
    }

    fn loss(&mut self, peer: PeerId) -> LostCause {
        let cause = drive(&mut [&mut self.honest], |e| match e {
            Event::PeerLost { cause, .. } => Some(cause.clone()),
            _ => None,
        });
        self.honest.disconnect(peer).unwrap();
        cause
    }
}

#[test]
fn a_lying_listener_is_given_up() {
    let mut liar = Liar::new("listener", 0);
    let mut expect_protocol = |what: &str, frames: &[(&[u8], &[BorrowedFd<'_>])]| {
        let (peer, socket) = liar.accept();
        for (bytes, fds) in frames {
            send(&socket, bytes, fds).unwrap();
        }
        let cause = liar.loss(peer);
        assert!(matches!(&cause, LostCause::Protocol(text) if text.contains(what)), "{what}: {cause}");
    };
    let probe = Box::new([0x77; 16]);
    let (good, welcome) = (board(), welcome(&probe));
    let unsealed = memfd(BOARD, SealFlags::empty());
    let growing = memfd(BOARD, SealFlags::SHRINK);
    let short = memfd(4096, sealed());
    let blank = memfd(BOARD, sealed());
    let pipe = rustix::pipe::pipe().unwrap().0;
    let long = vec![6u8; (64 << 10) + 100];
    expect_protocol("unknown kind 99", &[(&[99, 1, 2], &[])]);
    expect_protocol("length", &[(&welcome[..10], &[good.as_fd()])]);
    expect_protocol("longer than the longest", &[(&long, &[])]);
    expect_protocol("more than one file descriptor", &[(&welcome, &[good.as_fd(), good.as_fd()])]);
    expect_protocol("came without a descriptor", &[(&welcome, &[])]);
    expect_protocol("sealed against shrinking", &[(&welcome, &[unsealed.as_fd()])]);
    expect_protocol("sealed against growing", &[(&welcome, &[growing.as_fd()])]);
    expect_protocol("4096 bytes", &[(&welcome, &[short.as_fd()])]);
    expect_protocol("board", &[(&welcome, &[blank.as_fd()])]);
    expect_protocol("no memfd", &[(&welcome, &[pipe.as_fd()])]);
    expect_protocol("a grant out of turn", &[(&grant(0, 0, 2, 0, 0)[..7], &[])]);
    expect_protocol("a welcome out of turn", &[(&welcome, &[good.as_fd()]), (&welcome, &[good.as_fd()])]);
    expect_protocol("not asked for", &[(&welcome, &[good.as_fd()]), (&grant(0, 0, 2, 0, 0)[..7], &[])]);
    expect_protocol("a question out of turn", &[(&welcome, &[good.as_fd()]), (&ask(0, 0, 0), &[])]);
    expect_protocol("a notification out of turn", &[(&welcome, &[good.as_fd()]), (&[6, 1], &[])]);
    // A refusal is told in the peer's words, without what could harm a terminal.
    let (peer, socket) = liar.accept();
    send(&socket, b"\x03go \x1b[2Jaway", &[]).unwrap();
    assert_eq!(liar.loss(peer), LostCause::Refused("go  [2Jaway".into()));
    // Silence has an end.
    let (peer, _socket) = liar.accept();
    let started = Instant::now();
    assert!(matches!(liar.loss(peer), LostCause::Lane(text) if text.contains("did not answer")));
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn lies_about_memory_fail_the_operation_and_nothing_faults() {
    let mut liar = Liar::new("memory", 0);
    let len = LEN as u64;
    let mut expect = |what: &str, kind: OpKind, answer: &[u8], fd: Option<&OwnedFd>| {
        let (peer, socket) = liar.welcomed();
        let op = liar.submit(peer, kind);
        let question = receive(&socket).unwrap();
        assert_eq!(question, ask(0, 0, u8::from(kind == OpKind::Write)));
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        send(&socket, answer, &fds).unwrap();
        let end = end_of(&mut [&mut liar.honest], op);
        let Outcome::Failed(error) = &end else { panic!("{what}: {end:?}") };
        assert!(error.to_string().contains(what), "{what}: {error}");
        // No notification of a failed operation.
        assert!(receive(&socket).is_none_or(|frame| frame.is_empty()), "{what}");
        liar.honest.disconnect(peer).unwrap();
    };
    let (unsealed, short, read_only) = (memfd(LEN, SealFlags::GROW), memfd(LEN - 1, sealed()), memfd(LEN, sealed()));
    let pipe = rustix::pipe::pipe().unwrap().0;
    let reopened = {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", read_only.as_raw_fd());
        rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap()
    };
    let map = |access| grant(0, access, 0, 0, len);
    expect("F_SEAL_SHRINK", OpKind::Read, &map(0), Some(&unsealed));
    expect("has 65535 bytes", OpKind::Read, &map(0), Some(&short));
    expect("has 65536 bytes", OpKind::Read, &grant(0, 0, 0, 4096, len), Some(&read_only));
    expect("were announced", OpKind::Read, &grant(0, 0, 0, u64::MAX - 5, len), Some(&read_only));
    expect("its blob says 65536", OpKind::Read, &grant(0, 0, 0, 0, len - 1), Some(&read_only));
    expect("its blob says 65536", OpKind::Read, &grant(0, 0, 0, 0, u64::MAX), Some(&read_only));
    expect("without a descriptor", OpKind::Read, &map(0), None);
    expect("no memfd", OpKind::Read, &map(0), Some(&pipe));
    expect("could not be mapped", OpKind::Write, &map(1), Some(&reopened));
    expect("not granted here", OpKind::Write, &[&grant(0, 1, 3, 0, 0)[..7], b"not granted here"].concat(), None);
    expect("no longer registered", OpKind::Read, &grant(0, 0, 2, 0, 0)[..7], None);
    // Addresses are checked by the kernel; the probe is right, so the lie shows only in the copy.
    expect("not mapped", OpKind::Read, &grant(0, 0, 1, 4096, len), None);
    expect("not mapped", OpKind::Write, &grant(0, 1, 1, 4096, len), None);
    expect("passes the end", OpKind::Read, &grant(0, 0, 1, u64::MAX - 5, len), None);
}

#[test]
fn a_false_probe_and_attempts_to_truncate() {
    // All its regions are plain, and its probe is not where it says: the connection is useless.
    let mut liar = Liar::new("probe", 3);
    let (peer, socket) = liar.accept();
    let elsewhere = [0u8; 16];
    let mut frame = welcome(&elsewhere);
    frame[9] ^= 1;
    send(&socket, &frame, &[board().as_fd()]).unwrap();
    assert_eq!(liar.loss(peer), LostCause::Gone);
    let (peer, socket) = liar.accept();
    let nowhere = [&[2][..], &64u64.to_le_bytes(), &[0; 16]].concat();
    send(&socket, &nowhere, &[board().as_fd()]).unwrap();
    assert!(matches!(liar.loss(peer), LostCause::Lane(text) if text.contains("not mapped")));

    // A sealed file can't be truncated under a reader, and closing the gate ends its reading.
    let mut liar = Liar::new("truncate", 0);
    let (peer, socket) = liar.accept();
    let (gates, file) = (board(), memfd(LEN, sealed()));
    send(&socket, &welcome(&liar.probe), &[gates.as_fd()]).unwrap();
    connected(&mut [&mut liar.honest], peer);
    let op = liar.submit(peer, OpKind::Read);
    receive(&socket).unwrap();
    send(&socket, &grant(0, 0, 0, 0, LEN as u64), &[file.as_fd()]).unwrap();
    assert!(end_of(&mut [&mut liar.honest], op).done().is_some());
    for size in [0, 4096, 1 << 30] {
        assert!(rustix::fs::ftruncate(&file, size).is_err());
    }
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 0, LEN as u64).unwrap();
    let op = liar.submit(peer, OpKind::Read);
    assert!(end_of(&mut [&mut liar.honest], op).done().is_some(), "a hole reads as zeros");
    rustix::io::pwrite(&gates, &[0; 8], 4096).unwrap();
    let op = liar.submit(peer, OpKind::Read);
    let stale = TransferError::Stale { region: RegionId::new(0) };
    assert_eq!(end_of(&mut [&mut liar.honest], op), Outcome::Failed(stale));
}

/// The endpoint's id, token and socket name, as its blob tells them.
fn whereabouts(endpoint: &ShmTransport) -> (EndpointId, [u8; 16], Vec<u8>) {
    let blob = Blob::decode(&endpoint.blob()).unwrap();
    (blob.endpoint, blob.lane[1..17].try_into().unwrap(), blob.lane[21..].to_vec())
}

fn intruder(name: &[u8]) -> OwnedFd {
    let fd = socket();
    rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name).unwrap()).unwrap();
    fd
}

/// Steps the endpoint until the intruder hears something.
fn hear(endpoint: &mut ShmTransport, fd: &OwnedFd) -> Vec<u8> {
    for _ in 0..1000 {
        endpoint.step(Duration::ZERO);
        if let Some(heard) = receive(fd) {
            return heard;
        }
    }
    panic!("nothing heard");
}

#[test]
fn a_lying_guest_is_sent_away() {
    let mut p = ShmTransport::new(Config::default()).unwrap();
    p.register(shared(LEN)).unwrap();
    let (id, token, name) = whereabouts(&p);
    let mut expect = |answer: &str, bytes: &[u8], fds: &[BorrowedFd<'_>]| {
        let fd = intruder(&name);
        send(&fd, bytes, fds).unwrap();
        let heard = hear(&mut p, &fd);
        if answer.is_empty() {
            assert_eq!(heard, [], "{bytes:?}");
        } else {
            assert_eq!(heard[0], 3, "a refusal");
            let text = String::from_utf8_lossy(&heard[1..]).into_owned();
            assert!(text.contains(answer), "{text}");
        }
        assert_eq!(p.next_event(), None);
    };
    let good = board();
    let unsealed = memfd(BOARD, SealFlags::empty());
    expect("", b"garbage", &[]);
    expect("", &[6, 1, 2], &[]);
    expect("", &ask(0, 0, 0), &[]);
    expect("", &[], &[good.as_fd()]);
    expect("", &[good.as_fd(); 12].iter().map(|_| 1u8).collect::<Vec<_>>(), &[good.as_fd(); 12]);
    expect("earlier life", &hello(id, [0; 16]), &[good.as_fd()]);
    expect("earlier life", &hello(EndpointId::new([1; 16]), token), &[good.as_fd()]);
    expect("came without a descriptor", &hello(id, token), &[]);
    expect("not sealed", &hello(id, token), &[unsealed.as_fd()]);
    let mut other_version = hello(id, token);
    other_version[1] = 2;
    expect("version 2", &other_version, &[good.as_fd()]);
    // Random frames after a proper hello: each intruder is served or sent away, and the endpoint goes on.
    let mut state = 5u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    for _ in 0..300 {
        let fd = intruder(&name);
        send(&fd, &hello(id, token), &[good.as_fd()]).unwrap();
        for _ in 0..20 {
            let frame: Vec<u8> = (0..1 + random() % 30).map(|_| random() % 8).collect();
            if send(&fd, &frame, &[]).is_err() {
                break;
            }
            p.step(Duration::ZERO);
        }
        p.step(Duration::ZERO);
        while p.next_event().is_some() {}
    }
    let fd = intruder(&name);
    send(&fd, &hello(id, token), &[good.as_fd()]).unwrap();
    assert_eq!(hear(&mut p, &fd)[0], 2, "an honest guest is still welcome");
}

#[test]
fn what_a_stranger_passes_is_closed_without_making_us_wait() {
    use std::io::Write;
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let (_, _, name) = whereabouts(&p);
    for copies in [1, 3] {
        // A socket whose last close takes as long as it says: it has bytes that nobody reads.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let full = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _never_read = listener.accept().unwrap();
        full.set_nonblocking(true).unwrap();
        while (&full).write(&[0; 65_536]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&full, Some(Duration::from_secs(3))).unwrap();
        let stranger = intruder(&name);
        send(&stranger, b"junk", &vec![full.as_fd(); copies]).unwrap();
        drop(full);
        let start = Instant::now();
        assert_eq!(hear(&mut p, &stranger), [], "sent away");
        assert!(start.elapsed() < Duration::from_secs(2), "{copies}: {:?}", start.elapsed());
    }
}

#[test]
fn floods_are_bounded() {
    let mut p = ShmTransport::new(Config::default()).unwrap();
    p.register(shared(LEN)).unwrap();
    let (id, token, name) = whereabouts(&p);
    let good = board();
    let guest = intruder(&name);
    send(&guest, &hello(id, token), &[good.as_fd()]).unwrap();
    assert_eq!(hear(&mut p, &guest)[0], 2);
    // Notifications that our driver does not take wait with their sender.
    let (mut sent, mut refused) = (0u32, 0);
    while refused < 1000 {
        match send(&guest, &[6, 1, 2, 3], &[]) {
            Ok(_) => sent += 1,
            Err(_) => refused += 1,
        }
        p.step(Duration::ZERO);
        assert!(sent < 100_000, "the flood is taken in without end");
    }
    let mut got = 0;
    loop {
        let before = got;
        while p.next_event().is_some() {
            got += 1;
        }
        p.step(Duration::ZERO);
        if got == before && got >= sent {
            break;
        }
        assert!(got <= sent);
    }
    assert_eq!(got, sent, "and each arrives in the end");
    // Questions whose answers nobody reads.
    let mut refused = 0;
    for asked in 0.. {
        if send(&guest, &ask(0, 0, 0), &[]).is_err() {
            refused += 1;
        }
        p.step(Duration::ZERO);
        if refused > 1000 {
            break;
        }
        assert!(asked < 100_000, "questions are taken in without end");
    }
    // The answers are there once they are read, and the guest is served on.
    let mut answers = 0;
    for _ in 0..5000 {
        answers += usize::from(receive(&guest).is_some());
        p.step(Duration::ZERO);
    }
    assert!(answers > 100, "{answers}");
    assert_eq!(receive(&guest), None);
    send(&guest, &ask(0, 0, 0), &[]).unwrap();
    assert_eq!(hear(&mut p, &guest)[0], 5);
}

#[test]
fn any_bytes_as_a_blob_are_an_error() {
    let mut d = ShmTransport::new(Config::default()).unwrap();
    let p = ShmTransport::new(Config::default()).unwrap();
    let mut blob = Blob::decode(&p.blob()).unwrap();
    for lane in [&[][..], &[1], &[2; 40], &[1; 21], &[1; 200]] {
        blob.lane = lane.to_vec();
        let error = d.connect(&blob.encode()).unwrap_err();
        assert!(matches!(error, ConnectError::BadLane { backend: "shm", .. }), "{error}");
        assert_eq!(error.fault(), Fault::PeerBytes);
    }
    blob.backend = "ucx".into();
    assert!(matches!(d.connect(&blob.encode()), Err(ConnectError::WrongBackend { expected: "shm", .. })));
}
