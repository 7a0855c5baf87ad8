//! Messages and file descriptors over Unix sockets of the `SEQPACKET` type: whole frames, in order, never half of one.
//!
//! Names are in the abstract namespace, so no file exists and none is left behind when a process is killed. Every call
//! is non-blocking. A message can bring at most one descriptor; more, or a frame longer than the buffer, is reported as
//! such and its descriptors are closed. What a peer passes may take long to close (a socket that lingers), so whatever is no
//! memory file is closed on a thread of its own.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// The most descriptors that the kernel passes with one message.
const MAX_FDS: usize = 253;

/// What a receive gave.
pub(crate) enum Received {
    /// A frame of this many bytes at the front of the buffer, and the descriptor that came with it.
    Frame(usize, Passed),
    /// Nothing now.
    Nothing,
    /// The other end is closed and everything it sent was received.
    Closed,
    /// A frame that no conforming peer sends: too long, or with more than one descriptor.
    Improper(&'static str),
}

/// The descriptor that came with a frame. Closed when dropped, by a thread of its own if that could take long.
pub(crate) struct Passed(Result<OwnedFd, Lack>);

/// Why there is no descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Lack {
    /// None came.
    #[error("came without a descriptor")]
    Missing,
    /// One came, but this process has as many as it may.
    #[error("came with a descriptor, but this process has as many as it may; raise RLIMIT_NOFILE")]
    NoRoom,
}

impl Passed {
    /// The descriptor.
    pub(crate) fn fd(&self) -> Result<BorrowedFd<'_>, Lack> {
        self.0.as_ref().map(AsFd::as_fd).map_err(|lack| *lack)
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        if let Ok(fd) = std::mem::replace(&mut self.0, Err(Lack::Missing)) {
            discard(vec![fd]);
        }
    }
}

/// A socket that listens on an abstract name.
pub(crate) fn listen(name: &[u8]) -> Result<OwnedFd, Errno> {
    let fd = socket()?;
    rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name)?)?;
    rustix::net::listen(&fd, 128)?;
    Ok(fd)
}

/// A socket that is not connected yet.
pub(crate) fn socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Connects. `Errno::AGAIN`: the listener's queue is full; `Errno::CONNREFUSED`: nobody has that name.
pub(crate) fn connect(fd: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    rustix::net::connect(fd, &SocketAddrUnix::new_abstract_name(name)?)
}

/// The next connection that waits.
pub(crate) fn accept(fd: &OwnedFd) -> Result<OwnedFd, Errno> {
    rustix::net::accept_with(fd, FLAGS)
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Credentials {
    /// Its process, as seen from here; zero if it is in a pid namespace that cannot be seen from here.
    pub(crate) pid: i32,
    /// Its effective user.
    pub(crate) user: u32,
}

/// Who is at the other end, as the kernel says: for the connecting side, who called `listen`.
pub(crate) fn credentials(fd: &OwnedFd) -> Result<Credentials, Errno> {
    use std::os::fd::AsRawFd;
    let mut got = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: `got` is a whole `ucred`, which any bytes are a value of, and `len` is its size. (rustix has this call, but
    // its process ids cannot be zero.)
    let status = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut got).cast(), &raw mut len)
    };
    if status == 0 { Ok(Credentials { pid: got.pid, user: got.uid }) } else { Err(last_errno()) }
}

/// The error of the system call that just failed.
pub(crate) fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Sends one frame made of two pieces, with a descriptor.
pub(crate) fn send(fd: &OwnedFd, head: &[u8], tail: &[u8], pass: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: [BorrowedFd<'_>; 1];
    if let Some(pass) = pass {
        fds = [pass];
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let pieces = [IoSlice::new(head), IoSlice::new(tail)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    retry(|| rustix::net::sendmsg(fd, &pieces, &mut control, flags)).map(|_| ())
}

/// Receives one frame.
pub(crate) fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> Result<Received, Errno> {
    // With less room, what doesn't fit would be closed in this thread.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut resets = 0;
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = match rustix::net::recvmsg(fd, &mut into, &mut control, flags) {
            Ok(got) => got,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            // A peer that closed with unread input resets the connection, once, before what it sent is read out.
            Err(Errno::CONNRESET) if resets == 0 => {
                resets += 1;
                continue;
            }
            Err(Errno::CONNRESET) => return Ok(Received::Closed),
            Err(e) => return Err(e),
        };
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                fds.extend(passed);
            }
        }
        let long = got.flags.contains(ReturnFlags::TRUNC);
        if long || fds.len() > 1 {
            discard(fds);
            let what =
                if long { "a frame longer than the longest" } else { "more than one file descriptor in a frame" };
            return Ok(Received::Improper(what));
        }
        // There was room for as many as can come, so what is cut off found no room in this process.
        if got.flags.contains(ReturnFlags::CTRUNC) {
            discard(fds);
            return Ok(Received::Frame(got.bytes, Passed(Err(Lack::NoRoom))));
        }
        return Ok(match fds.pop() {
            None if got.bytes == 0 => Received::Closed,
            fd => Received::Frame(got.bytes, Passed(fd.ok_or(Lack::Missing))),
        });
    }
}

/// Whether the other end of a socket is closed, or a process descriptor says that its process ended.
pub(crate) fn gone(socket: &OwnedFd, process: Option<&OwnedFd>) -> bool {
    let hang_up = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let mut fds = vec![PollFd::new(socket, PollFlags::RDHUP)];
    if let Some(process) = process {
        fds.push(PollFd::new(process, PollFlags::IN));
    }
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    match retry(|| poll(&mut fds, Some(&zero))) {
        Ok(0) | Err(_) => false,
        Ok(_) => fds[0].revents().intersects(hang_up) || fds.get(1).is_some_and(|p| !p.revents().is_empty()),
    }
}

/// Whether the other end is closed altogether: no process holds it any more.
pub(crate) fn closed(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Hang-ups and errors are told in any case. Our own half that is shut down alone is no hang-up.
    matches!(retry(|| poll(&mut fds, Some(&zero))), Ok(n) if n > 0)
}

/// Says that we send no more. The other end reads that as an end; what it sent can still be read.
pub(crate) fn say_no_more(socket: &OwnedFd) {
    // Fails only for what is not connected any more.
    rustix::net::shutdown(socket, rustix::net::Shutdown::Write).unwrap_or(());
}

/// Whether a descriptor becomes readable within the time. A signal does not end the wait.
pub(crate) fn readable(fd: impl AsFd, timeout: Option<Duration>) -> bool {
    let until = timeout.and_then(|t| Instant::now().checked_add(t));
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let limit = left.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        match poll(&mut fds, limit.as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|n| n > 0),
        }
    }
}

/// Descriptors to close, and whether a thread is at it.
struct Closing {
    fds: Vec<OwnedFd>,
    runs: bool,
}

static CLOSING: Mutex<Closing> = Mutex::new(Closing { fds: Vec::new(), runs: false });

/// Closes what a peer passed. Memory files are closed here; for others that can take as long as the peer likes, so one thread
/// closes them one by one, and ends when none is left.
fn discard(fds: Vec<OwnedFd>) {
    let slow: Vec<_> = fds.into_iter().filter(|fd| rustix::fs::fcntl_get_seals(fd).is_err()).collect();
    if slow.is_empty() {
        return;
    }
    let mut closing = closing();
    closing.fds.extend(slow);
    if !closing.runs {
        // If there can be no thread now, they wait for the next time.
        let thread = std::thread::Builder::new().name("kvferry-shm-close".to_owned()).spawn(close_all);
        closing.runs = thread.is_ok();
    }
}

fn close_all() {
    loop {
        let mut closing = closing();
        let Some(fd) = closing.fds.pop() else {
            closing.runs = false;
            return;
        };
        drop(closing);
        drop(fd);
    }
}

fn closing() -> MutexGuard<'static, Closing> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
