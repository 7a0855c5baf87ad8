//! The memory of all processes: two files without a name, one for the source, one for the destination. Whoever takes part
//! maps them, so that all move the same bytes between the same pages.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use kvferry_geometry::units::Bytes;
use kvferry_transport::{MemoryKind, Region};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// What a destination holds where nothing was written.
pub(crate) const GUARD: u8 = 0x5a;

/// Makes a file of `len` bytes that keeps its length.
pub(crate) fn create(name: &str, len: u64) -> anyhow::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// A mapping that is undone with its last region.
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
        // SAFETY: mapped in `map` with this length, and unmapped only here.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Maps the whole file, with all its pages at once if they are `needed`.
fn map(fd: OwnedFd, needed: bool) -> anyhow::Result<Region> {
    let len = usize::try_from(rustix::fs::fstat(&fd)?.st_size)?;
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    let how = if needed { MapFlags::SHARED | MapFlags::POPULATE } else { MapFlags::SHARED };
    // SAFETY: a fresh mapping at a place of the kernel's choice.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, flags, how, fd.as_fd(), 0) }?;
    let start = NonNull::new(start.cast::<u8>()).context("mapped at address 0")?;
    let owner = Arc::new(Mapping { start, len });
    // SAFETY: the mapping lives as long as its owner, the file is sealed against shrinking, and no reference to it is made.
    Ok(unsafe { Region::from_raw(start, len, MemoryKind::Host, owner) }.with_share(Arc::new(fd), 0))
}

/// Opens and maps another process's file, by its path in `/proc`; with all its pages at once if they are `needed`.
pub(crate) fn open(path: &Path, needed: bool) -> anyhow::Result<Region> {
    let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("opening {}", path.display()))?;
    map(fd, needed)
}

/// Regions of these lengths, one after the other.
pub(crate) fn regions(whole: &Region, lens: &[Bytes]) -> anyhow::Result<Vec<Region>> {
    let mut at = 0;
    lens.iter()
        .map(|len| {
            let len = usize::try_from(len.get())?;
            ensure!(len % 4096 == 0, "a region of {len} bytes doesn't end with a page");
            let part = whole.part(at, len).with_context(|| format!("{len} bytes at {at} leave {whole:?}"))?;
            at += len;
            Ok(part)
        })
        .collect()
}

/// Fills a region so that no two pages, and hardly two words, are alike.
pub(crate) fn fill(region: &Region, seed: u64) -> anyhow::Result<()> {
    let mut x = seed | 1;
    let mut page = vec![0_u8; 64 << 10];
    let mut at = 0;
    while at < region.len().get() {
        for word in page.as_chunks_mut::<8>().0 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            *word = x.to_le_bytes();
        }
        let len = usize::try_from(region.len().get() - at)?.min(page.len());
        region.write(at, &page[..len])?;
        at += len as u64;
    }
    Ok(())
}
