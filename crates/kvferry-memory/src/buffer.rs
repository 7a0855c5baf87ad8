//! Memory that we map and own.
//!
//! [`HostBuffer`] is private to the process; [`SharedBuffer`] is a sealed memfd that other processes on the host can map.
//! Neither has a name in any file system: when the last mapping and descriptor go, also by a kill, the memory is free.
//!
//! Bytes are reached through [`Region`] alone, by copies: other processes and threads may change them at any time, so no
//! slice of them is ever given out.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_geometry::units::Bytes;
use kvferry_transport::{MemoryKind, Region};
use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::available::available_memory;

/// Memory could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// A buffer of no bytes, or of more than can be addressed.
    #[error("a buffer of {len} cannot be made")]
    Length {
        /// The length asked for.
        len: Bytes,
    },
    /// There is not enough.
    #[error("{requested} were asked for, {} are available; make the caches smaller", shown(.available))]
    OutOfMemory {
        /// What was asked for.
        requested: Bytes,
        /// What there is, where the system says.
        available: Option<Bytes>,
    },
    /// A system call failed.
    #[error("{call} for a buffer of {len} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// The length asked for.
        len: Bytes,
        /// The system's answer.
        source: io::Error,
    },
}

fn shown(available: &Option<Bytes>) -> String {
    available.map_or_else(|| "fewer".to_owned(), |b| b.to_string())
}

/// How to make a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BufferOptions {
    /// Touch every page now, so that no later access waits for the kernel; also finds out now if there is not enough.
    pub touch: bool,
    /// Ask for huge pages. The kernel may not give them; that is no error.
    pub huge_pages: bool,
}

/// Zeroed memory of this process alone, aligned to pages.
#[derive(Clone, Debug)]
pub struct HostBuffer {
    mapping: Arc<Mapping>,
    len: usize,
}

impl HostBuffer {
    /// Maps `len` bytes.
    ///
    /// # Errors
    /// See [`BufferError`].
    pub fn new(len: Bytes, options: BufferOptions) -> Result<Self, BufferError> {
        let size = checked_len(len, options)?;
        let mapping = Mapping::anonymous(size).map_err(|e| failed("mmap", len, e))?;
        mapping.prepare(options, len)?;
        Ok(Self { mapping: Arc::new(mapping), len: size })
    }

    /// All of it; keeps the memory mapped.
    #[must_use]
    pub fn region(&self) -> Region {
        Mapping::region(&self.mapping, self.len)
    }

    /// Its length.
    #[must_use]
    pub fn len(&self) -> Bytes {
        Bytes::new(self.len as u64)
    }

    /// Never: a buffer has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Zeroed memory in a memfd that is sealed against any change of its size, aligned to pages.
///
/// The descriptor is closed on exec; who is to map the memory gets it over a Unix socket. A peer that must not write gets
/// a read-only re-open of it (`/proc/self/fd/N`). The file's mode is 400, so that a peer of another user cannot open it once
/// more for writing; one of the same user can, as it can do anything to this process.
#[derive(Clone, Debug)]
pub struct SharedBuffer {
    mapping: Arc<Mapping>,
    fd: Arc<OwnedFd>,
    len: usize,
}

impl SharedBuffer {
    /// The seals a shared buffer has: its size never changes, so that who maps it never meets a SIGBUS for want of file. What the
    /// seals don't promise is memory: a page that was never touched is made at the first access, and a system that has none left
    /// (a memory cgroup, `vm.overcommit_memory=2`) kills who accesses it. [`BufferOptions::touch`] finds that out beforehand.
    pub const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    /// Makes a memfd of `len` bytes and maps it; `name` is what `/proc/PID/maps` shows.
    ///
    /// # Errors
    /// See [`BufferError`].
    pub fn new(name: &str, len: Bytes, options: BufferOptions) -> Result<Self, BufferError> {
        let size = checked_len(len, options)?;
        let fd = memfd(name).map_err(|e| failed("memfd_create", len, e))?;
        rustix::fs::ftruncate(&fd, len.get()).map_err(|e| failed("ftruncate", len, e))?;
        rustix::fs::fchmod(&fd, Mode::RUSR).map_err(|e| failed("fchmod", len, e))?;
        rustix::fs::fcntl_add_seals(&fd, Self::SEALS).map_err(|e| failed("sealing", len, e))?;
        let mapping = Mapping::shared(&fd, size).map_err(|e| failed("mmap", len, e))?;
        mapping.prepare(options, len)?;
        Ok(Self { mapping: Arc::new(mapping), fd: Arc::new(fd), len: size })
    }

    /// All of it, with its descriptor; keeps the memory mapped and the descriptor open.
    #[must_use]
    pub fn region(&self) -> Region {
        Mapping::region(&self.mapping, self.len).with_share(self.fd.clone(), 0)
    }

    /// The memfd.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Its length.
    #[must_use]
    pub fn len(&self) -> Bytes {
        Bytes::new(self.len as u64)
    }

    /// Never: a buffer has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The length as the system wants it, if there can be so much.
fn checked_len(len: Bytes, options: BufferOptions) -> Result<usize, BufferError> {
    let size = usize::try_from(len.get()).ok().filter(|&l| l > 0 && l < isize::MAX as usize - (1 << 21));
    let size = size.ok_or(BufferError::Length { len })?;
    // Touching what isn't there does not fail, it gets some process killed: so this is asked before.
    let available = available_memory();
    if options.touch && available.is_some_and(|available| len > available) {
        return Err(BufferError::OutOfMemory { requested: len, available });
    }
    Ok(size)
}

fn failed(call: &'static str, len: Bytes, error: Errno) -> BufferError {
    if error == Errno::NOMEM || error == Errno::NOSPC {
        return BufferError::OutOfMemory { requested: len, available: available_memory() };
    }
    BufferError::System { call, len, source: error.into() }
}

fn memfd(name: &str) -> Result<OwnedFd, Errno> {
    // What can be told of a name is 249 bytes without a zero.
    let name: String = name.chars().filter(|c| c.is_ascii_graphic()).take(200).collect();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(&*name, flags | MemfdFlags::NOEXEC_SEAL) {
        // A kernel before 6.3 doesn't know the flag.
        Err(Errno::INVAL) => rustix::fs::memfd_create(&*name, flags),
        made => made,
    }
}

/// A mapping that is unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<c_void>,
    size: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; this value alone unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: a shared `Mapping` offers only its address and advice about it.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn anonymous(size: usize) -> Result<Self, Errno> {
        // SAFETY: a null hint without MAP_FIXED makes a new mapping and touches no other.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        Ok(Self { start: NonNull::new(start).ok_or(Errno::NOMEM)?, size })
    }

    fn shared(fd: &OwnedFd, size: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint without MAP_FIXED makes a new mapping and touches no other. The memfd has `size` bytes and is
        // sealed, so no access inside the mapping can ever fault for want of file.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, prot, MapFlags::SHARED, fd, 0) }?;
        Ok(Self { start: NonNull::new(start).ok_or(Errno::NOMEM)?, size })
    }

    fn prepare(&self, options: BufferOptions, len: Bytes) -> Result<(), BufferError> {
        if options.huge_pages {
            // A wish: kernels without huge pages, or with them off for shared memory, refuse it.
            let _refused = self.advise(Advice::LinuxHugepage);
        }
        if options.touch {
            match self.advise(Advice::LinuxPopulateWrite) {
                // A kernel before 5.14 doesn't know it.
                Err(Errno::INVAL) => self.touch(),
                other => other.map_err(|e| failed("populating", len, e))?,
            }
        }
        Ok(())
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this mapping; none of the advices used here discards contents.
        unsafe { rustix::mm::madvise(self.start.as_ptr(), self.size, advice) }
    }

    fn touch(&self) {
        for at in (0..self.size).step_by(4096) {
            // SAFETY: inside the mapping, which is readable and writable; nobody else knows of it yet.
            unsafe { self.start.as_ptr().cast::<u8>().add(at).write_volatile(0) };
        }
    }

    fn region(mapping: &Arc<Self>, len: usize) -> Region {
        // SAFETY: `len <= size` bytes are mapped readable and writable until the mapping, which is the owner, is dropped;
        // a sealed memfd or anonymous memory cannot shrink, and no reference to the bytes is ever made.
        unsafe { Region::from_raw(mapping.start.cast(), len, MemoryKind::Host, mapping.clone()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by this value with this size; every region that could reach it holds an `Arc` of it, so none is left.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.size) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOUCHED: BufferOptions = BufferOptions { touch: true, huge_pages: true };

    #[test]
    fn buffers_are_zeroed_aligned_and_keep_themselves_alive() {
        for options in [BufferOptions::default(), TOUCHED] {
            let host = HostBuffer::new(Bytes::new(10_001), options).unwrap().region();
            let shared = SharedBuffer::new("kvferry test", Bytes::new(10_001), options).unwrap().region();
            for region in [host, shared] {
                assert_eq!(region.address() % 4096, 0);
                assert_eq!(region.to_vec().unwrap(), vec![0; 10_001]);
                region.fill(10_000, 1, 3).unwrap();
                assert!(region.fill(10_001, 1, 3).is_err());
                let mut last = [0];
                region.read(10_000, &mut last).unwrap();
                assert_eq!(last, [3]);
            }
        }
    }

    #[test]
    fn shared_memory_is_the_same_through_its_descriptor_and_sealed() {
        let buffer = SharedBuffer::new("kvferry", Bytes::new(8192), TOUCHED).unwrap();
        let region = buffer.region();
        region.write(5000, b"hello").unwrap();
        let (fd, offset) = region.share().unwrap();
        let mut seen = [0; 5];
        assert_eq!(rustix::io::pread(fd, &mut seen, offset + 5000), Ok(5));
        assert_eq!(&seen, b"hello");
        let seals = rustix::fs::fcntl_get_seals(buffer.fd()).unwrap();
        assert!(seals.contains(SharedBuffer::SEALS));
        assert_eq!(rustix::fs::fstat(buffer.fd()).unwrap().st_mode & 0o777, 0o400, "others can't open it again");
        assert_eq!(rustix::fs::ftruncate(buffer.fd(), 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(buffer.fd(), 1 << 20), Err(Errno::PERM));
        assert_eq!(rustix::fs::fstat(buffer.fd()).unwrap().st_size, 8192);
        let part = region.part(4096, 100).unwrap();
        assert_eq!(part.share().unwrap().1, 4096);
    }

    #[test]
    fn memory_outlives_the_buffer_while_a_region_does() {
        let region = SharedBuffer::new("kvferry", Bytes::new(4096), TOUCHED).unwrap().region();
        region.fill(0, 4096, 9).unwrap();
        assert_eq!(region.to_vec().unwrap(), vec![9; 4096]);
    }

    #[test]
    fn too_much_is_an_error_with_both_sizes() {
        let much = Bytes::new(1 << 60);
        for error in [
            HostBuffer::new(much, TOUCHED).map(drop).unwrap_err(),
            SharedBuffer::new("x", much, TOUCHED).map(drop).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(matches!(error, BufferError::OutOfMemory { available: Some(_), .. }), "{text}");
            assert!(text.contains("1152921504606846976 B were asked for"), "{text}");
        }
        assert!(matches!(HostBuffer::new(Bytes::ZERO, TOUCHED), Err(BufferError::Length { .. })));
        assert!(matches!(HostBuffer::new(Bytes::new(u64::MAX), TOUCHED), Err(BufferError::Length { .. })));
    }

    #[test]
    fn unmapped_when_the_last_region_goes() {
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("kvferry-unmap-probe").count();
        let buffer = SharedBuffer::new("kvferry-unmap-probe", Bytes::new(4096), BufferOptions::default()).unwrap();
        let region = buffer.region();
        drop(buffer);
        assert_eq!(maps(), 1);
        drop(region);
        assert_eq!(maps(), 0);
    }
}
