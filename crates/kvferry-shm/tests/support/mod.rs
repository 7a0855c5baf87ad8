//! What the tests share: memory of both kinds, a clock, the harness, and endpoints driven to an event.
#![allow(dead_code, unused_imports, clippy::unwrap_used, clippy::panic, reason = "tests; each binary uses its part")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_geometry::batch::BoundedBatch;
use kvferry_shm::{Config, ShmTransport};
use kvferry_transport::conformance::Harness;
pub(crate) use kvferry_transport::conformance::drive::{connected, drive, end_of};
use kvferry_transport::{MemoryKind, Region, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A mapping that is unmapped with its last region.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; it offers nothing but being dropped.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `shared_with` with this length, and unmapped only here.
        unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) }.unwrap();
    }
}

/// A fresh memory file of this length with these seals.
pub(crate) fn memfd(len: usize, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("kvferry-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

pub(crate) fn sealed() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW
}

/// Memory backed by a memory file, mapped here.
pub(crate) fn shared_of(fd: OwnedFd, len: usize) -> Region {
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at a place of the kernel's choice.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, flags, MapFlags::SHARED, fd.as_fd(), 0) };
    let start = NonNull::new(start.unwrap().cast::<u8>()).unwrap();
    let owner = Arc::new(Mapping { start, len });
    // SAFETY: the mapping lives as long as its owner, the tests' files never shrink, and no reference to it is made.
    unsafe { Region::from_raw(start, len, MemoryKind::Host, owner) }.with_share(Arc::new(fd), 0)
}

/// Zeroed memory backed by a sealed memory file.
pub(crate) fn shared(len: usize) -> Region {
    shared_of(memfd(len, sealed()), len)
}

/// Bytes that a seed and a place determine.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// A batch that copies one region to another of the same length, block by block with the block order reversed.
pub(crate) fn reversed(len: usize, block: usize) -> Arc<BoundedBatch> {
    kvferry_transport::conformance::bytes::reversed(len as u64, block as u64, 0, true).unwrap()
}

/// What `reversed` makes of bytes.
pub(crate) fn reverse_blocks(bytes: &[u8], block: usize) -> Vec<u8> {
    bytes.chunks(block).rev().flatten().copied().collect()
}

/// The harness of this backend.
pub(crate) struct Shm {
    start: Instant,
    threads: usize,
    region: fn(usize) -> Region,
    /// See [`Harness::large`].
    pub(crate) large: usize,
}

impl Shm {
    pub(crate) fn new(threads: usize, region: fn(usize) -> Region) -> Self {
        Self { start: Instant::now(), threads, region, large: 8 << 20 }
    }
}

impl Harness for Shm {
    fn endpoint(&mut self) -> Box<dyn Transport> {
        let mut config = Config::default();
        config.threads = self.threads;
        Box::new(ShmTransport::new(config).unwrap())
    }

    fn region(&mut self, len: usize) -> Region {
        (self.region)(len)
    }

    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn kill(&mut self, victim: Box<dyn Transport>) {
        // The death of a whole process is in `processes.rs`.
        drop(victim);
    }

    fn readable(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        Some(poll(&mut fds, Some(&zero)).unwrap() > 0)
    }

    fn rounds(&self) -> u64 {
        100
    }

    fn large(&self) -> usize {
        self.large
    }
}
