//! Mappings of memory files, our own and those that peers pass, and the checks before a peer's is mapped.
//!
//! A peer's descriptor is never believed. It must be a memory file that is sealed against any change of size, and be
//! long enough *after* the seals were seen; only then is it mapped. So no access to the mapping faults for want of file,
//! whatever the peer does later and however it ends: the file lives as long as the mapping, its size is fixed. Want of memory is
//! another thing: a page that its owner never touched, or punched out, is made when we access it, and that can get us killed
//! where memory is limited (a memory cgroup, `vm.overcommit_memory=2`). Owners touch their buffers when they make them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// The file system of huge pages, as `statfs` names it (linux/magic.h).
const HUGETLBFS: rustix::fs::FsWord = 0x9584_58f6;

/// Why a memory file cannot be mapped. The texts name the cure.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum WindowError {
    #[error("the descriptor is no memfd ({0}); only memfds can be proven not to shrink")]
    NotMemfd(Errno),
    #[error(
        "the memfd is not sealed against {missing}, so it could shrink under a reader; add F_SEAL_SHRINK and F_SEAL_GROW"
    )]
    Unsealed { missing: &'static str },
    #[error(
        "the memfd is made of hugetlb pages, which its owner can take away under a reader (SIGBUS); use a memfd without \
             MFD_HUGETLB, and transparent huge pages"
    )]
    Hugetlb,
    #[error("the memfd has {size} bytes, but {len} at {offset} were announced")]
    TooShort { size: u64, offset: u64, len: u64 },
    #[error("a region of {0} bytes does not fit into an address space")]
    TooLong(u64),
    #[error("the memfd could not be mapped: {0}")]
    Map(Errno),
    #[error("the memfd could not be created: {0}")]
    Create(Errno),
    #[error("the memfd does not begin as a board of kvferry does")]
    NoBoard,
    #[error(
        "the memfd may be opened by other users (mode {mode:o}), who could then write to it through a descriptor that was \
         passed for reading; fchmod it to 400"
    )]
    Open { mode: u32 },
    #[error("the memfd could not be opened again read-only through /proc/self/fd: {0}; mount /proc")]
    Reopen(Errno),
}

/// A mapped stretch of a memory file. Unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Window {
    map: NonNull<u8>,
    map_len: usize,
    /// Where the stretch begins in the mapping, which begins at a page.
    inset: usize,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; the value offers only its address.
unsafe impl Send for Window {}
// SAFETY: as for `Send`.
unsafe impl Sync for Window {}

impl Window {
    /// Maps `len` bytes at `offset` of a memory file after checking it.
    pub(crate) fn map(fd: BorrowedFd<'_>, offset: u64, len: u64, writable: bool) -> Result<Self, WindowError> {
        check(fd, offset, len)?;
        let granule = rustix::param::page_size() as u64;
        let inset = offset % granule;
        let span = len.checked_add(inset).and_then(|n| n.checked_next_multiple_of(granule));
        let map_len = span.and_then(|n| usize::try_from(n).ok()).filter(|n| isize::try_from(*n).is_ok());
        let map_len = map_len.ok_or(WindowError::TooLong(len))?;
        let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let fit = |v: u64| usize::try_from(v).unwrap_or(usize::MAX);
        // SAFETY: a fresh mapping at a place of the kernel's choice touches no memory that anyone uses.
        let map = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                map_len,
                ProtFlags::READ | write,
                MapFlags::SHARED,
                fd,
                offset - inset,
            )
        };
        let map = NonNull::new(map.map_err(WindowError::Map)?.cast::<u8>()).ok_or(WindowError::Map(Errno::NOMEM))?;
        Ok(Self { map, map_len, inset: fit(inset), len: fit(len) })
    }

    /// Where the stretch begins.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // SAFETY: `inset` lies inside the mapping.
        unsafe { self.map.add(self.inset) }
    }

    /// How long it is.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping and is the only one that unmaps it; whoever uses its address holds it.
        let unmapped = unsafe { rustix::mm::munmap(self.map.as_ptr().cast(), self.map_len) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped cannot fail: {unmapped:?}");
    }
}

/// Checks kind and seals, then size.
pub(crate) fn check(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), WindowError> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(WindowError::NotMemfd)?;
    for (seal, missing) in [(SealFlags::SHRINK, "shrinking"), (SealFlags::GROW, "growing")] {
        if !seals.contains(seal) {
            return Err(WindowError::Unsealed { missing });
        }
    }
    // Seals don't forbid holes. In ordinary memory files a hole is filled with zeros when it is touched; in those of huge
    // pages only while the pool has pages left.
    if rustix::fs::fstatfs(fd).map_err(WindowError::NotMemfd)?.f_type == HUGETLBFS {
        return Err(WindowError::Hugetlb);
    }
    let stat = rustix::fs::fstat(fd).map_err(WindowError::NotMemfd)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(WindowError::TooShort { size, offset, len });
    }
    Ok(())
}

/// Whether nobody can map a memory file writable any more.
pub(crate) fn is_write_sealed(fd: BorrowedFd<'_>) -> bool {
    let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE)
}

/// Checks that a process of another user that gets a descriptor for reading can't open the file again for writing.
pub(crate) fn check_private(fd: BorrowedFd<'_>) -> Result<(), WindowError> {
    let mode = rustix::fs::fstat(fd).map_err(WindowError::NotMemfd)?.st_mode & 0o777;
    if mode & 0o077 == 0 { Ok(()) } else { Err(WindowError::Open { mode }) }
}

/// The same memory file, opened so that its receiver cannot map it writable. Only for others than the file's owner, and only
/// if [`check_private`] holds: who may open the file again by `/proc/self/fd` gets a writable descriptor.
pub(crate) fn read_only(fd: BorrowedFd<'_>) -> Result<OwnedFd, WindowError> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(WindowError::Reopen)
}

/// A new zeroed memory file, sealed against change of size, and our own writable mapping of it. With `private`, nobody
/// else can ever map it writable.
pub(crate) fn create(name: &str, len: u64, private: bool) -> Result<(OwnedFd, Window), WindowError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(name, flags).map_err(WindowError::Create)?;
    rustix::fs::ftruncate(&fd, len).map_err(WindowError::Create)?;
    rustix::fs::fchmod(&fd, rustix::fs::Mode::RUSR).map_err(WindowError::Create)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(WindowError::Create)?;
    let window = Window::map(fd.as_fd(), 0, len, true)?;
    if private {
        rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL).map_err(WindowError::Create)?;
    }
    Ok((fd, window))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn what_could_shrink_or_lies_is_refused() {
        let both = SealFlags::SHRINK | SealFlags::GROW;
        let map = |fd: &OwnedFd, offset, len| Window::map(fd.as_fd(), offset, len, false).map(|w| w.len());
        assert_eq!(map(&memfd(8192, both), 100, 8092), Ok(8092));
        assert!(matches!(
            map(&memfd(8192, SealFlags::GROW), 0, 1),
            Err(WindowError::Unsealed { missing: "shrinking" })
        ));
        assert!(matches!(
            map(&memfd(8192, SealFlags::SHRINK), 0, 1),
            Err(WindowError::Unsealed { missing: "growing" })
        ));
        let short = memfd(8192, both);
        assert_eq!(map(&short, 0, 8193), Err(WindowError::TooShort { size: 8192, offset: 0, len: 8193 }));
        assert!(matches!(map(&short, u64::MAX, 2), Err(WindowError::TooShort { .. })));
        assert!(rustix::fs::ftruncate(&short, 0).is_err(), "the seal holds");
        let file = rustix::fs::open("/proc/self/exe", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
        assert!(matches!(map(&file, 0, 1), Err(WindowError::NotMemfd(_))));
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(map(&pipe, 0, 1), Err(WindowError::NotMemfd(_))));
    }

    #[test]
    fn huge_pages_are_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let Ok(huge) = rustix::fs::memfd_create("t", flags) else {
            kvferry_tests::skip("hugetlb", "this kernel has no hugetlb memory files");
            return;
        };
        rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert_eq!(check(huge.as_fd(), 0, 0), Err(WindowError::Hugetlb));
    }

    #[test]
    fn a_read_only_reopen_cannot_be_mapped_writable() {
        let fd = memfd(4096, SealFlags::SHRINK | SealFlags::GROW);
        let again = read_only(fd.as_fd()).unwrap();
        assert!(Window::map(again.as_fd(), 0, 4096, false).is_ok());
        assert_eq!(Window::map(again.as_fd(), 0, 4096, true).unwrap_err(), WindowError::Map(Errno::ACCESS));
        let (private, _window) = create("t", 4096, true).unwrap();
        assert!(is_write_sealed(private.as_fd()) && !is_write_sealed(fd.as_fd()));
        assert_eq!(Window::map(private.as_fd(), 0, 4096, true).unwrap_err(), WindowError::Map(Errno::PERM));
    }
}
