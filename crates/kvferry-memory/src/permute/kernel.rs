//! The inner loops of a permutation: runs between addresses.
//!
//! Short runs are copied by loops that know their size, long ones by `memcpy`, or past the caches where the operation is so
//! large that its destination would only push out what is in use. Where one loop steps through the source run by run and the
//! other one through the destination, the runs are the elements of a matrix that is turned over: [`transpose`](super::transpose).
//! Miri knows no stores past the caches and no hints, and gets plain copies instead.

use super::transpose;

/// One loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Loop {
    pub(super) count: usize,
    /// Bytes from one step to the next at the source.
    pub(super) src: usize,
    /// And at the destination.
    pub(super) dst: usize,
}

impl Loop {
    /// No loop.
    pub(super) const ONCE: Self = Self { count: 1, src: 0, dst: 0 };

    /// A loop of a proven batch: its numbers fit where a step uses them.
    pub(super) fn of(count: u64, src: u64, dst: u64) -> Self {
        let fit = |v: u64| usize::try_from(v).unwrap_or(0);
        Self { count: fit(count), src: fit(src), dst: fit(dst) }
    }
}

/// Two loops around runs of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Runs {
    pub(super) src: *const u8,
    pub(super) dst: *mut u8,
    pub(super) run: usize,
    pub(super) outer: Loop,
    pub(super) inner: Loop,
}

impl Runs {
    /// Copies them. With `stream`, the bytes are visible to others only after [`drain`].
    ///
    /// # Safety
    /// On either side, all bytes from the first of the runs to the last must lie in one piece of memory that stays mapped,
    /// readable and writable; no reference to a byte of a run may exist. No byte may be in a run of both sides.
    pub(super) unsafe fn copy(&self, stream: bool) {
        // SAFETY: the caller's promise, passed on; `N` is `run`.
        unsafe {
            match self.run {
                1 => self.fixed::<1>(),
                2 if transpose::shorts(self, stream) => {}
                2 => self.fixed::<2>(),
                4 if transpose::words(self) => {}
                4 => self.fixed::<4>(),
                8 => self.fixed::<8>(),
                16 => self.fixed::<16>(),
                32 => self.fixed::<32>(),
                _ if stream && self.run >= STREAM_RUN => self.past_caches(),
                64 => self.lines::<64, false>(),
                128 => self.lines::<128, false>(),
                256 => self.lines::<256, false>(),
                512 => self.lines::<512, false>(),
                _ => self.any(),
            }
        }
    }

    /// Begins to fetch what is read first, and what is written first where that goes through the caches.
    pub(super) fn fetch(&self, stream: bool) {
        let whole =
            |inner: usize, outer: usize| inner * (self.inner.count - 1) + outer * (self.outer.count - 1) + self.run;
        fetch(self.src, whole(self.inner.src, self.outer.src));
        if !(stream && self.run >= STREAM_RUN) {
            fetch(self.dst, whole(self.inner.dst, self.outer.dst));
        }
    }

    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn any(&self) {
        for o in 0..self.outer.count {
            for i in 0..self.inner.count {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(self.from(o, i), self.to(o, i), self.run) };
            }
        }
    }

    /// # Safety
    /// As for [`copy`](Self::copy), with a run of `N`.
    unsafe fn fixed<const N: usize>(&self) {
        // SAFETY: the caller's promise; the second number is `inner.count`.
        unsafe {
            match self.inner.count {
                2 => return self.short::<N, 2>(),
                3 => return self.short::<N, 3>(),
                4 => return self.short::<N, 4>(),
                _ => {}
            }
        }
        for o in 0..self.outer.count {
            for i in 0..self.inner.count {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(self.from(o, i), self.to(o, i), N) };
            }
        }
    }

    /// Few steps of the inner loop, as many as the compiler knows.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy), with a run of `N` and an inner count of `K`.
    unsafe fn short<const N: usize, const K: usize>(&self) {
        for o in 0..self.outer.count {
            for i in 0..K {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(self.from(o, i), self.to(o, i), N) };
            }
        }
    }

    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn past_caches(&self) {
        let whole_lines = (self.dst.addr() | self.outer.dst | self.inner.dst).is_multiple_of(LINE);
        // SAFETY: the caller's promise; the first number is `run`, and every run begins a line of the destination.
        unsafe {
            match self.run {
                64 if whole_lines => self.lines::<64, true>(),
                128 if whole_lines => self.lines::<128, true>(),
                256 if whole_lines => self.lines::<256, true>(),
                512 if whole_lines => self.lines::<512, true>(),
                _ => self.long(),
            }
        }
    }

    /// Short runs of as many bytes as some lines have; the source of a later one is fetched while one is copied.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy), with a run of `N`; with `STREAM`, every run must begin a line of the destination.
    unsafe fn lines<const N: usize, const STREAM: bool>(&self) {
        let ahead = (AHEAD / N).min(self.inner.count);
        for o in 0..self.outer.count {
            for i in 0..self.inner.count {
                let (o2, i2) =
                    if i + ahead < self.inner.count { (o, i + ahead) } else { (o + 1, i + ahead - self.inner.count) };
                fetch(self.src.wrapping_add(o2.wrapping_mul(self.outer.src).wrapping_add(i2 * self.inner.src)), N);
                // SAFETY: the caller's promise.
                unsafe { move_lines::<N, STREAM>(self.from(o, i), self.to(o, i)) };
            }
        }
    }

    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn long(&self) {
        for o in 0..self.outer.count {
            for i in 0..self.inner.count {
                // SAFETY: the caller's promise.
                unsafe { past_caches(self.from(o, i), self.to(o, i), self.run) };
            }
        }
    }

    /// # Safety
    /// As for [`copy`](Self::copy); `o` and `i` must be steps of the loops.
    unsafe fn from(&self, o: usize, i: usize) -> *const u8 {
        // SAFETY: the run lies in the same piece of memory as the first one.
        unsafe { self.src.add(o * self.outer.src + i * self.inner.src) }
    }

    /// # Safety
    /// As for [`copy`](Self::copy); `o` and `i` must be steps of the loops.
    unsafe fn to(&self, o: usize, i: usize) -> *mut u8 {
        // SAFETY: the run lies in the same piece of memory as the first one.
        unsafe { self.dst.add(o * self.outer.dst + i * self.inner.dst) }
    }
}

/// Shorter runs go through the caches in any case.
const STREAM_RUN: usize = LINE;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes that are fetched ahead.
const AHEAD: usize = 1024;

/// Makes all bytes that this thread streamed visible before whatever it stores next.
pub(super) fn drain() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: `sfence` is in every x86-64 and touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Begins to fetch the beginning of `len` bytes. A hint: it touches nothing and cannot fault.
fn fetch(place: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..len.min(AHEAD)).step_by(LINE) {
        // SAFETY: prefetching is in every x86-64 and never faults; the pointer is not dereferenced.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(at).cast());
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (place, len);
}

/// Copies with stores that don't fill the caches.
///
/// # Safety
/// As for `ptr::copy_nonoverlapping`.
unsafe fn past_caches(src: *const u8, dst: *mut u8, len: usize) {
    const MANY: usize = 4 * LINE;
    let head = dst.align_offset(LINE).min(len);
    let mut done = head;
    // SAFETY: all places lie in the `len` bytes of the caller's promise: `head` first bytes, then whole lines of the
    // destination, then the rest.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        while len - done >= MANY {
            move_lines::<MANY, true>(src.add(done), dst.add(done));
            done += MANY;
        }
        while len - done >= LINE {
            move_lines::<LINE, true>(src.add(done), dst.add(done));
            done += LINE;
        }
        std::ptr::copy_nonoverlapping(src.add(done), dst.add(done), len - done);
    }
}

/// # Safety
/// As for `ptr::copy_nonoverlapping` with `N` bytes, a number of lines; with `STREAM`, `dst` must begin a line.
#[inline]
unsafe fn move_lines<const N: usize, const STREAM: bool>(src: *const u8, dst: *mut u8) {
    const { assert!(N.is_multiple_of(LINE)) };
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..N).step_by(LINE) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128};
        // SAFETY: inside the `N` bytes. The streaming stores want their destination aligned to 16 bytes, which a line is.
        unsafe {
            let (from, to) = (src.add(at).cast::<__m128i>(), dst.add(at).cast::<__m128i>());
            let line = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
            for (i, part) in line.into_iter().enumerate() {
                if STREAM { _mm_stream_si128(to.add(i), part) } else { _mm_storeu_si128(to.add(i), part) }
            }
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, N);
    }
}
