//! Moving bytes by the kernel's copy between processes (`process_vm_readv`, `process_vm_writev`), for memory of a peer
//! that cannot be mapped.
//!
//! The kernel checks the peer's addresses, so a peer that lies gets an error or its own garbage, and nothing faults. What
//! the kernel does not check is *which* process a number names: one that ended may have given its number to another. So
//! every read brings the peer's probe word along in the same call and compares it, and every write reads it just before. Between
//! that and the write a window stays, of the time between two system calls, in which the process could end and its number be
//! given to another; the kernel has no call that writes and compares at once.

use std::io::IoSliceMut;

use rustix::io::Errno;

use crate::sock::last_errno;

/// Ranges of one call, on either side; the system's limit is 1,024 and one is the probe's.
pub(crate) const MAX_RANGES: usize = 512;
/// Bytes of one call, so that a cancel is heard.
pub(crate) const MAX_BYTES: u64 = 4 << 20;

/// A peer's process, and the word in its memory that proves that it is still that one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) probe_at: u64,
    pub(crate) probe: [u8; 16],
}

/// Why bytes could not be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProcessError {
    /// The system refused.
    Errno(Errno),
    /// The number names another process by now, or the peer's memory is not what it said.
    NotThePeer,
}

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// From the peer to us.
    Fetch,
    /// From us to the peer.
    Store,
}

/// A range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// Ranges that wait for one call. Each side's neighbours are joined on their own: the kernel only wants equal sums.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    ours: Vec<Span>,
    peers: Vec<Span>,
    bytes: u64,
}

impl Ranges {
    /// Whether another range could be too much for one call.
    pub(crate) fn is_full(&self) -> bool {
        self.ours.len() >= MAX_RANGES || self.peers.len() >= MAX_RANGES || self.bytes >= MAX_BYTES
    }

    /// Adds `len` bytes.
    pub(crate) fn push(&mut self, ours: u64, peers: u64, len: u64) {
        join(&mut self.ours, ours, len);
        join(&mut self.peers, peers, len);
        self.bytes += len;
    }

    /// Whether there is nothing to move.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.ours.clear();
        self.peers.clear();
        self.bytes = 0;
    }
}

fn join(spans: &mut Vec<Span>, start: u64, len: u64) {
    match spans.last_mut() {
        Some(last) if last.start + last.len == start => last.len += len,
        _ => spans.push(Span { start, len }),
    }
}

/// The two system calls, so that tests can stand in for the kernel.
pub(crate) trait Kernel: Send + Sync {
    /// As the system call; gives the bytes moved.
    ///
    /// # Safety
    /// Every range of `ours` must be memory that may be written (for a fetch) or read (for a store).
    unsafe fn vm(&self, way: Way, pid: i32, ours: &[Span], peers: &[Span]) -> Result<u64, Errno>;
}

/// The real one.
#[derive(Debug)]
pub(crate) struct Linux;

impl Kernel for Linux {
    unsafe fn vm(&self, way: Way, pid: i32, ours: &[Span], peers: &[Span]) -> Result<u64, Errno> {
        let local = iovecs(ours);
        let remote = iovecs(peers);
        let counts = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
        // SAFETY: the arrays are as long as their counts; that our ranges may be accessed is the caller's promise; the
        // peer's are checked by the kernel.
        let moved = unsafe {
            match way {
                Way::Fetch => libc::process_vm_readv(pid, local.as_ptr(), counts.0, remote.as_ptr(), counts.1, 0),
                Way::Store => libc::process_vm_writev(pid, local.as_ptr(), counts.0, remote.as_ptr(), counts.1, 0),
            }
        };
        u64::try_from(moved).map_err(|_| last_errno())
    }
}

fn iovecs(spans: &[Span]) -> Vec<libc::iovec> {
    let fit = |v: u64| usize::try_from(v).unwrap_or(0);
    let one = |s: &Span| libc::iovec { iov_base: std::ptr::without_provenance_mut(fit(s.start)), iov_len: fit(s.len) };
    spans.iter().map(one).collect()
}

impl Process {
    /// Reads the probe word and compares it.
    pub(crate) fn check(&self, kernel: &dyn Kernel) -> Result<(), ProcessError> {
        let mut word = [0u8; 16];
        let ours = [span_of(&mut word)];
        let peers = [Span { start: self.probe_at, len: 16 }];
        // SAFETY: the one range is `word`, borrowed mutably until the call has returned.
        let moved = unsafe { kernel.vm(Way::Fetch, self.pid, &ours, &peers) }.map_err(ProcessError::Errno)?;
        if moved == 16 && word == self.probe { Ok(()) } else { Err(ProcessError::NotThePeer) }
    }

    /// Moves all the ranges, in as many calls as it takes.
    ///
    /// # Safety
    /// Our side of every range must be memory that may be written (for a fetch) or read (for a store).
    pub(crate) unsafe fn transfer(&self, kernel: &dyn Kernel, way: Way, ranges: &Ranges) -> Result<(), ProcessError> {
        let mut done = 0;
        while done < ranges.bytes {
            let mut word = [0u8; 16];
            let (mut ours, mut peers) = (Vec::with_capacity(MAX_RANGES + 1), Vec::with_capacity(MAX_RANGES + 1));
            let head = if way == Way::Fetch { 16 } else { 0 };
            if way == Way::Fetch {
                ours.push(span_of(&mut word));
                peers.push(Span { start: self.probe_at, len: 16 });
            } else {
                self.check(kernel)?;
            }
            ours.extend(after(&ranges.ours, done));
            peers.extend(after(&ranges.peers, done));
            // SAFETY: `word` is borrowed until the call has returned; the other ranges are the caller's promise.
            let moved = unsafe { kernel.vm(way, self.pid, &ours, &peers) }.map_err(ProcessError::Errno)?;
            if way == Way::Fetch && (moved < 16 || word != self.probe) {
                return Err(ProcessError::NotThePeer);
            }
            if moved <= head {
                return Err(ProcessError::Errno(Errno::FAULT));
            }
            done += moved - head;
        }
        Ok(())
    }
}

fn span_of(word: &mut [u8; 16]) -> Span {
    let mut slice = IoSliceMut::new(word);
    Span { start: slice.as_mut_ptr().expose_provenance() as u64, len: 16 }
}

/// What is left of ranges after their first `done` bytes.
fn after(spans: &[Span], mut done: u64) -> impl Iterator<Item = Span> {
    spans.iter().filter_map(move |s| {
        let skip = done.min(s.len);
        done -= skip;
        (skip < s.len).then_some(Span { start: s.start + skip, len: s.len - skip })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn own(probe: &[u8; 16]) -> Process {
        let pid = i32::try_from(std::process::id()).unwrap();
        Process { pid, probe_at: probe.as_ptr().expose_provenance() as u64, probe: *probe }
    }

    /// The kernel with short transfers and planted errors.
    struct Stutter {
        most: u64,
        errno: Mutex<Option<Errno>>,
    }

    impl Kernel for Stutter {
        unsafe fn vm(&self, way: Way, pid: i32, ours: &[Span], peers: &[Span]) -> Result<u64, Errno> {
            if let Some(errno) = *self.errno.lock().unwrap() {
                return Err(errno);
            }
            let cut = |spans: &[Span]| {
                let mut left = self.most;
                let mut out = Vec::new();
                for s in spans {
                    let len = s.len.min(left);
                    left -= len;
                    out.push(Span { start: s.start, len });
                }
                out
            };
            // SAFETY: parts of the caller's ranges.
            unsafe { Linux.vm(way, pid, &cut(ours), &cut(peers)) }
        }
    }

    #[test]
    fn transfers_are_exact_also_when_the_kernel_moves_less() {
        let probe = [7; 16];
        let process = own(&probe);
        for most in [17, 100, u64::MAX / 2] {
            let kernel = Stutter { most, errno: Mutex::new(None) };
            let (src, mut dst) = ((0..=255u8).cycle().take(3000).collect::<Vec<_>>(), vec![0u8; 3000]);
            let (s, d) = (src.as_ptr().expose_provenance() as u64, dst.as_mut_ptr().expose_provenance() as u64);
            let mut fetch = Ranges::default();
            // Scattered at the peer, end to end at ours, and the other way round.
            for i in 0..10 {
                fetch.push(d + i * 100, s + (9 - i) * 300, 100);
            }
            assert_eq!((fetch.ours.len(), fetch.peers.len(), fetch.bytes), (1, 10, 1000));
            // SAFETY: both vectors outlive the calls and nothing else touches them.
            unsafe { process.transfer(&kernel, Way::Fetch, &fetch) }.unwrap();
            for i in 0..10 {
                assert_eq!(
                    dst[i * 100..i * 100 + 100],
                    src[(9 - i) * 300..(9 - i) * 300 + 100],
                    "most {most}, range {i}"
                );
            }
            assert_eq!(dst[1000..], [0; 2000]);
            let mut store = Ranges::default();
            store.push(s, d + 2000, 500);
            // SAFETY: as above.
            unsafe { process.transfer(&kernel, Way::Store, &store) }.unwrap();
            assert_eq!((&dst[2000..2500], &dst[2500..]), (&src[..500], &[0; 500][..]));
        }
    }

    #[test]
    fn another_process_under_the_same_number_is_found() {
        let probe = [7; 16];
        let mut process = own(&probe);
        process.probe[3] = 8;
        let mut dst = [0u8; 8];
        let src = [1u8; 8];
        let mut ranges = Ranges::default();
        ranges.push(dst.as_mut_ptr().expose_provenance() as u64, src.as_ptr().expose_provenance() as u64, 8);
        for way in [Way::Fetch, Way::Store] {
            // SAFETY: `dst` is ours and outlives the call.
            assert_eq!(unsafe { process.transfer(&Linux, way, &ranges) }, Err(ProcessError::NotThePeer));
        }
        assert_eq!(src, [1; 8], "nothing was stored");
        process.pid = i32::MAX;
        assert_eq!(process.check(&Linux), Err(ProcessError::Errno(Errno::SRCH)));
    }

    #[test]
    fn bad_addresses_and_refusals_are_errors() {
        let probe = [7; 16];
        let process = own(&probe);
        let mut dst = [0u8; 64];
        let mut ranges = Ranges::default();
        ranges.push(dst.as_mut_ptr().expose_provenance() as u64, 8, 64);
        // SAFETY: `dst` is ours and outlives the call.
        assert_eq!(unsafe { process.transfer(&Linux, Way::Fetch, &ranges) }, Err(ProcessError::Errno(Errno::FAULT)));
        let refusing = Stutter { most: 0, errno: Mutex::new(Some(Errno::PERM)) };
        assert_eq!(process.check(&refusing), Err(ProcessError::Errno(Errno::PERM)));
    }
}
