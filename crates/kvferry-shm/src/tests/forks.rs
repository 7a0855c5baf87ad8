//! What a fork does to an endpoint, and what needs a process of its own: another user, a small limit.

use std::os::fd::AsFd;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::board::{Board, PeerBoard};
use crate::sock;
use crate::window::{check_private, read_only};

/// Another user than root.
const NOBODY: libc::uid_t = 65_534;

/// A child of this process, which ends when this is dropped.
struct Child(libc::pid_t);

impl Child {
    /// Begins one that runs `body` and then exits; by 0 if it gave true.
    fn run(body: impl FnOnce() -> bool) -> Self {
        // SAFETY: the child has the one thread that called; it runs `body`, and leaves by `_exit` whatever happens.
        match unsafe { libc::fork() } {
            0 => {
                let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
                // SAFETY: ends the process without running anything that belongs to the parent.
                unsafe { libc::_exit(i32::from(!held)) }
            }
            pid => {
                assert!(pid > 0, "no child could be made");
                Self(pid)
            }
        }
    }

    fn held(&self) -> bool {
        let mut status = 0;
        // SAFETY: `status` is written by the call alone.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, 0) }, self.0);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: signals and waits for our own child; if it was waited for already, both fail and that is well.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// Whether a child may become another user; says that a check is skipped if not.
fn may_become_nobody() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        kvferry_tests::skip("root", "only root can become another user");
    }
    root
}

/// Becomes another user.
fn become_nobody() -> bool {
    // SAFETY: changes this process alone, a child made for it. The last call lets it see its own /proc/self/fd again.
    unsafe {
        libc::setresgid(NOBODY, NOBODY, NOBODY) == 0
            && libc::setresuid(NOBODY, NOBODY, NOBODY) == 0
            && libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) == 0
    }
}

fn cause_of_loss(d: &mut ShmTransport) -> LostCause {
    let start = Instant::now();
    loop {
        d.step(start.elapsed());
        match d.next_event() {
            Some(Event::PeerLost { cause, .. }) => return cause,
            Some(other) => panic!("{other:?}"),
            None => assert!(start.elapsed() < Duration::from_secs(10), "not heard in time"),
        }
        d.wait(Some(Duration::from_millis(1)));
    }
}

#[test]
fn a_child_of_a_fork_neither_serves_nor_uses_its_parents_endpoint() {
    let mut d = ShmTransport::new(Config::default()).unwrap();
    let mut p = ShmTransport::new(Config::default()).unwrap();
    p.register(Region::zeroed(LEN).unwrap()).unwrap();
    d.register(Region::zeroed(LEN).unwrap()).unwrap();
    // The child serves, but what it would tell of memory is true of the parent.
    let child = Child::run(|| {
        let start = Instant::now();
        loop {
            p.step(start.elapsed());
            p.wait(Some(Duration::from_millis(1)));
        }
    });
    let peer = d.connect(&p.blob()).unwrap();
    let cause = cause_of_loss(&mut d);
    assert!(matches!(&cause, LostCause::Refused(text) if text.contains("before a fork")), "{cause}");
    d.disconnect(peer).unwrap();
    drop(child);
    // A child that works with it, ends a registration, or drops it, changes nothing for the parent.
    let peer = d.connect(&p.blob()).unwrap();
    hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
    let read =
        |d: &mut ShmTransport| d.submit(Submission { peer, kind: OpKind::Read, batch: whole(0, 1), notify: None });
    let op = read(&mut d).unwrap();
    let done = |e| matches!(e, Event::Completed { op: id, outcome: Outcome::Done(_), .. } if id == op).then_some(());
    hear(&mut d, &mut p, done);
    let blob = p.blob();
    let mut endpoints = Some((d, p));
    let child = Child::run(|| {
        let Some((mut d, mut p)) = endpoints.take() else { return false };
        let refused =
            matches!(read(&mut d), Err(kvferry_transport::SubmitError::Refused { reason }) if reason.contains("fork"));
        let unknown = d.disconnect(peer).is_err();
        d.step(Duration::ZERO);
        let unreachable = d.connect(&blob).is_err_and(|e| e.to_string().contains("before a fork"));
        p.deregister(RegionId::new(0)).unwrap();
        drop((d, p));
        refused && unknown && unreachable
    });
    assert!(child.held());
    let (mut d, mut p) = endpoints.unwrap();
    let op = read(&mut d).unwrap();
    let done = |e| match e {
        Event::Completed { op: id, outcome, .. } if id == op => Some(outcome),
        _ => None,
    };
    let end = hear(&mut d, &mut p, done);
    assert!(end.done().is_some(), "{end:?}");
}

#[test]
fn a_guest_that_was_sent_away_wakes_nobody_while_a_child_holds_its_socket() {
    let mut p = ShmTransport::new(Config::default()).unwrap();
    let blob = kvferry_transport::blob::Blob::decode(&p.blob()).unwrap();
    let (name, token) = (blob.lane[21..].to_vec(), blob.lane[1..17].to_vec());
    let board = Board::new().unwrap();
    let dial = || {
        let socket = sock::socket().unwrap();
        sock::connect(&socket, &name).unwrap();
        socket
    };
    let (stranger, slow, guest) = (dial(), dial(), dial());
    let hello = [&[1, 1, 0][..], &blob.endpoint.get(), &token, &[9; 16]].concat();
    sock::send(&guest, &hello, &[], Some(board.fd())).unwrap();
    for _ in 0..5 {
        p.step(Duration::ZERO);
    }
    let (hears, told) = rustix::pipe::pipe().unwrap();
    let ends = [&stranger, &slow, &guest].map(std::os::fd::AsRawFd::as_raw_fd);
    let _child = Child::run(|| {
        // What it keeps are our copies of the sockets, so that they stay open when we close them.
        for end in ends {
            // SAFETY: this process uses none of them.
            unsafe { libc::close(end) };
        }
        rustix::io::write(&told, b".").unwrap();
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    rustix::io::read(&hears, &mut [0u8]).unwrap();
    for socket in [&stranger, &guest] {
        sock::send(socket, b"junk", &[], None).unwrap();
    }
    for _ in 0..5 {
        p.step(Duration::from_secs(1));
    }
    // By now one broke the protocol, one took too long, and one broke it as a guest.
    p.step(Duration::from_secs(100));
    drop((stranger, slow, guest));
    let start = Instant::now();
    // Children of other tests may keep an end open a while.
    while p.wait(Some(Duration::from_millis(20))) {
        p.step(Duration::from_secs(100));
        assert!(start.elapsed() < Duration::from_secs(10), "it is woken for sockets that it closed");
    }
    assert_eq!(p.step(Duration::from_secs(100)), None);
}

#[test]
fn a_descriptor_for_reading_cannot_be_opened_for_writing_by_others() {
    let (fd, _window) = create("kvferry-unit", LEN as u64, false).unwrap();
    check_private(fd.as_fd()).unwrap();
    let reading = read_only(fd.as_fd()).unwrap();
    if may_become_nobody() {
        let child = Child::run(|| {
            use std::os::fd::AsRawFd;
            let path = format!("/proc/self/fd/{}", reading.as_raw_fd());
            let open = |flags| rustix::fs::open(&path, flags, rustix::fs::Mode::empty());
            become_nobody()
                && open(rustix::fs::OFlags::RDWR).err() == Some(Errno::ACCESS)
                && rustix::io::pread(&reading, &mut [0u8; 8], 0) == Ok(8)
                && crate::window::Window::map(reading.as_fd(), 0, LEN as u64, false).is_ok()
        });
        assert!(child.held());
    }
    // A file that others may open is told of where others may connect.
    rustix::fs::fchmod(&fd, rustix::fs::Mode::from_raw_mode(0o644)).unwrap();
    let owner = Arc::new(Region::zeroed(LEN).unwrap());
    let region = || counted(&owner).with_share(Arc::new(fd.try_clone().unwrap()), 0);
    let mut open = ShmTransport::new(Config { other_users: true, ..Config::default() }).unwrap();
    let error = open.register(region()).unwrap_err().to_string();
    assert!(error.contains("mode 644") && error.contains("fchmod"), "{error}");
    ShmTransport::new(Config::default()).unwrap().register(region()).unwrap();
}

#[test]
fn many_descriptors_under_way_only_take_longer() {
    const REGIONS: usize = 80;
    const READERS: usize = 6;
    // The kernel's limit does not hold for root, and counts all that a user has under way.
    if !may_become_nobody() {
        return;
    }
    let child = Child::run(|| {
        assert!(become_nobody());
        let limit = Rlimit { current: Some(256), maximum: getrlimit(Resource::Nofile).maximum };
        setrlimit(Resource::Nofile, limit).unwrap();
        let mut p = ShmTransport::new(Config::default()).unwrap();
        for _ in 0..REGIONS {
            p.register(mapped()).unwrap();
        }
        let mut readers = Vec::new();
        for _ in 0..READERS {
            let mut d = ShmTransport::new(Config::default()).unwrap();
            d.register(Region::zeroed(LEN).unwrap()).unwrap();
            let peer = d.connect(&p.blob()).unwrap();
            hear(&mut d, &mut p, |e| (e == Event::Connected { peer }).then_some(()));
            readers.push((d, peer));
        }
        let regions = u32::try_from(REGIONS).unwrap();
        for (d, peer) in &mut readers {
            for src in 0..regions {
                let batch = whole(src, REGIONS);
                d.submit(Submission { peer: *peer, kind: OpKind::Read, batch, notify: None }).unwrap();
            }
            d.step(Duration::ZERO);
            d.step(Duration::ZERO);
        }
        // It answers all of them before anyone reads on.
        for _ in 0..30 {
            p.step(Duration::ZERO);
        }
        let start = Instant::now();
        let mut ended = 0;
        while ended < READERS * REGIONS {
            p.step(start.elapsed());
            for (d, _) in &mut readers {
                d.step(start.elapsed());
                while let Some(event) = d.next_event() {
                    let Event::Completed { outcome: Outcome::Done(_), .. } = event else {
                        println!("{event:?}");
                        return false;
                    };
                    ended += 1;
                }
            }
            if start.elapsed() > Duration::from_secs(10) {
                println!("only {ended} ended");
                return false;
            }
        }
        true
    });
    assert!(child.held());
}

#[test]
fn our_own_want_of_descriptors_is_not_the_peers_fault() {
    let child = Child::run(|| {
        let flags = rustix::net::SocketFlags::NONBLOCK;
        let kind = rustix::net::SocketType::SEQPACKET;
        let (a, b) = rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
        sock::send(&a, b"frame", &[], Some(a.as_fd())).unwrap();
        sock::send(&a, b"frame", &[], Some(a.as_fd())).unwrap();
        let mut buffer = [0; 64];
        let limit = Rlimit { current: Some(0), maximum: getrlimit(Resource::Nofile).maximum };
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, limit).unwrap();
        let none = sock::receive(&b, &mut buffer);
        setrlimit(Resource::Nofile, before).unwrap();
        let one = sock::receive(&b, &mut buffer);
        let lacks = matches!(none, Ok(sock::Received::Frame(5, fd)) if fd.fd().is_err_and(|e| e == sock::Lack::NoRoom));
        lacks && matches!(one, Ok(sock::Received::Frame(5, fd)) if fd.fd().is_ok())
    });
    assert!(child.held());
}

#[test]
fn only_who_made_a_board_changes_it() {
    let board = Board::new().unwrap();
    let region = RegionId::new(3);
    board.open(region, 0);
    let child = Child::run(|| {
        board.close(region);
        board.open(RegionId::new(4), 0);
        !board.is_ours()
    });
    assert!(child.held());
    let seen = PeerBoard::map(board.fd()).unwrap();
    assert!(board.is_ours() && seen.is_open(region, 0) && !seen.is_open(RegionId::new(4), 0));
}
