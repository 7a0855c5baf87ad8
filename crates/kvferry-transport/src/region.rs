//! Memory that may be registered.
//!
//! A [`Region`] is a range of bytes, what kind of memory it is, who keeps it alive and, where there is one, a file
//! descriptor through which another process on this host can map the same bytes. The promise about foreign memory is made
//! once, at [`Region::from_raw`]; everything after it is safe.
//!
//! The bytes may be written at any time by other threads, by a peer's process or by a device: so no Rust reference to them
//! is ever made, only raw copies, and what a copy of bytes under change reads is arbitrary bytes. That they are not under
//! change when it matters is the business of leases and loans, above.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

pub use kvferry_geometry::layout::MemoryKind;
use kvferry_geometry::units::Bytes;

/// An access by the CPU was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// It would leave the region.
    #[error("{len} bytes at {offset} leave a region of {region}")]
    OutOfRange {
        /// Where it begins.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// The region's length.
        region: Bytes,
    },
    /// The CPU cannot reach this memory.
    #[error("the CPU cannot reach {0} memory")]
    NotHost(MemoryKind),
}

/// How another process on this host can map a region.
#[derive(Clone, Debug)]
struct Share {
    fd: Arc<OwnedFd>,
    offset: u64,
}

/// A range of bytes that may be registered. Cheap to clone; clones are the same bytes and share the owner.
#[derive(Clone)]
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    kind: MemoryKind,
    share: Option<Share>,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the constructor's caller promises that the bytes may be accessed from any thread while the owner lives, and
// the region holds the owner.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; a shared region gives no more access than an owned one.
unsafe impl Sync for Region {}

impl Region {
    /// The one place where foreign memory is promised.
    ///
    /// # Safety
    /// Until `owner` is dropped, and from any thread:
    /// - for host memory, the `len` bytes at `start` are mapped, readable and writable, and reading or writing them never
    ///   faults (a file mapping must not shrink);
    /// - for device memory, they are one allocation of that device;
    /// - no Rust reference (`&` or `&mut`) to any of these bytes is alive, except such as to `UnsafeCell` or atomics:
    ///   they are changed behind the compiler's back.
    ///
    /// `start + len` must not overflow, and `len` must not pass `isize::MAX`.
    #[must_use]
    pub unsafe fn from_raw(
        start: NonNull<u8>,
        len: usize,
        kind: MemoryKind,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, len, kind, share: None, owner }
    }

    /// Adds the file descriptor, and the offset in it, through which other processes can map the same bytes. Safe:
    /// if these are other bytes then transfers go wrong, but only inside what was shared.
    #[must_use]
    pub fn with_share(mut self, fd: Arc<OwnedFd>, offset: u64) -> Self {
        self.share = Some(Share { fd, offset });
        self
    }

    /// Fresh zeroed host memory, aligned to 64 bytes and not shareable: for tests and one-process use. `None` if there is
    /// not enough memory or `len` is zero.
    #[must_use]
    pub fn zeroed(len: usize) -> Option<Self> {
        let owner = Arc::new(Heap::new(len)?);
        let start = owner.start;
        // SAFETY: `Heap` owns `len` mapped bytes at `start` until it is dropped, hands out no reference to them, and is
        // the owner given here.
        Some(unsafe { Self::from_raw(start, len, MemoryKind::Host, owner) })
    }

    /// The part of `len` bytes at `offset`, with the same owner; `None` if it would leave the region.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset <= self.len`, so the place is inside the allocation or one past its end.
        let start = unsafe { self.start.add(offset) };
        let share = self.share.as_ref().map(|s| Share { fd: s.fd.clone(), offset: s.offset + offset as u64 });
        Some(Self { start, len, share, kind: self.kind, owner: self.owner.clone() })
    }

    /// Its length.
    #[must_use]
    pub fn len(&self) -> Bytes {
        Bytes::new(self.len as u64)
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What kind of memory it is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Where it begins, as a number.
    #[must_use]
    pub fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Where it begins. Valid for `len` bytes while the region, a clone or a part of it is alive; see the module's
    /// text on references.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The file descriptor, and the offset in it, through which other processes can map these bytes.
    #[must_use]
    pub fn share(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.share.as_ref().map(|s| (s.fd.as_fd(), s.offset))
    }

    /// The same bytes, labelled as another kind; for the suite, which shows that the label alone is refused.
    pub(crate) fn labelled(&self, kind: MemoryKind) -> Self {
        Self { kind, ..self.clone() }
    }

    /// How many regions, clones and parts keep the owner alive; for the suite, which shows that none is forgotten.
    pub(crate) fn owners(&self) -> usize {
        Arc::strong_count(&self.owner)
    }

    /// Copies bytes at `offset` out of the region.
    ///
    /// # Errors
    /// If they leave the region or it isn't host memory; nothing is copied then.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let from = self.host_range(offset, into.len())?;
        // SAFETY: `host_range` proved that the source bytes are in mapped host memory of the region; `into` is exclusive
        // and cannot overlap it, as no reference to a region's bytes exists.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into the region at `offset`.
    ///
    /// # Errors
    /// If they leave the region or it isn't host memory; nothing is copied then.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let to = self.host_range(offset, bytes.len())?;
        // SAFETY: as in `read`, with the sides changed.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Sets `len` bytes at `offset` to one value.
    ///
    /// # Errors
    /// If they leave the region or it isn't host memory; nothing is set then.
    pub fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), AccessError> {
        let count = usize::try_from(len).map_err(|_| self.out_of_range(offset, len))?;
        let to = self.host_range(offset, count)?;
        // SAFETY: `host_range` proved that the bytes are in mapped host memory of the region.
        unsafe { std::ptr::write_bytes(to, value, count) };
        Ok(())
    }

    /// Copies all bytes out.
    ///
    /// # Errors
    /// If it isn't host memory.
    pub fn to_vec(&self) -> Result<Vec<u8>, AccessError> {
        let mut out = vec![0; self.len];
        self.read(0, &mut out)?;
        Ok(out)
    }

    /// The place of `len` bytes at `offset`, proven to be host memory inside the region.
    ///
    /// # Errors
    /// If they leave the region or it isn't host memory.
    pub fn host_range(&self, offset: u64, len: usize) -> Result<*mut u8, AccessError> {
        if self.kind != MemoryKind::Host {
            return Err(AccessError::NotHost(self.kind));
        }
        let out_of_range = || self.out_of_range(offset, len as u64);
        let start = usize::try_from(offset).map_err(|_| out_of_range())?;
        match start.checked_add(len) {
            // SAFETY: `start <= self.len`, so the place is inside the allocation or one past its end.
            Some(end) if end <= self.len => Ok(unsafe { self.start.as_ptr().add(start) }),
            _ => Err(out_of_range()),
        }
    }

    fn out_of_range(&self, offset: u64, len: u64) -> AccessError {
        AccessError::OutOfRange { offset, len, region: self.len() }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = if self.share.is_some() { ", shareable" } else { "" };
        write!(f, "Region({:#x}, {} B, {}{shared})", self.address(), self.len, self.kind)
    }
}

/// Zeroed heap memory.
struct Heap {
    start: NonNull<u8>,
    layout: std::alloc::Layout,
}

// SAFETY: the allocation belongs to this value alone and is only freed by it; allocations aren't bound to a thread.
unsafe impl Send for Heap {}
// SAFETY: a shared `Heap` offers nothing but the address.
unsafe impl Sync for Heap {}

impl Heap {
    fn new(len: usize) -> Option<Self> {
        if len == 0 {
            return None;
        }
        let layout = std::alloc::Layout::from_size_align(len, 64).ok()?;
        // SAFETY: the layout has a size above zero.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Self { start, layout })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout, and freed only here.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_stays_inside() {
        let region = Region::zeroed(100).unwrap();
        region.write(90, &[7; 10]).unwrap();
        assert!(matches!(region.write(91, &[7; 10]), Err(AccessError::OutOfRange { offset: 91, len: 10, .. })));
        assert!(region.fill(u64::MAX, 1, 0).is_err());
        assert!(region.fill(0, u64::MAX, 0).is_err());
        assert!(region.read(101, &mut []).is_err());
        region.read(100, &mut []).unwrap();
        region.fill(0, 5, 9).unwrap();
        let bytes = region.to_vec().unwrap();
        assert_eq!((&bytes[..5], &bytes[5..90], &bytes[90..]), (&[9; 5][..], &[0; 85][..], &[7; 10][..]));
    }

    #[test]
    fn parts_share_bytes_and_owner() {
        let region = Region::zeroed(64).unwrap();
        let part = region.part(16, 8).unwrap();
        assert_eq!(part.address(), region.address() + 16);
        drop(region);
        part.write(0, &[1; 8]).unwrap();
        assert_eq!(part.to_vec().unwrap(), [1; 8]);
        assert!(part.part(8, 1).is_none());
        assert!(part.part(usize::MAX, 2).is_none());
        assert!(part.part(8, 0).unwrap().is_empty());
    }

    #[test]
    fn device_memory_is_out_of_reach() {
        let host = Region::zeroed(16).unwrap();
        let start = NonNull::new(host.as_ptr()).unwrap();
        // SAFETY: the bytes are owned by `host`, which is the owner given.
        let region = unsafe { Region::from_raw(start, 16, MemoryKind::Device(1), Arc::new(host)) };
        assert_eq!(region.fill(0, 1, 1), Err(AccessError::NotHost(MemoryKind::Device(1))));
        assert_eq!(region.kind().to_string(), "device 1");
    }
}
