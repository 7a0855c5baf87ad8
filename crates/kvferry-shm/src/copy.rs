//! The innermost loop: runs of bytes between two mappings.
//!
//! Operations of many megabytes are written past the caches (x86-64): their destination would only push out what is in
//! use, and is not read again by the time it could still be there. While one run is copied, the beginning of the next one's
//! source is fetched, because the hardware's prefetchers stop at each page and scattered blocks are a page or a few.

use kvferry_transport::copy::copy_runs;

/// Bytes of an operation from which on it is written past the caches.
pub(crate) const STREAM_FROM: u64 = 4 << 20;
/// Shorter runs go through the caches in any case.
#[cfg(target_arch = "x86_64")]
const STREAM_RUN: usize = 1024;
/// Bytes of the next run's source that are fetched ahead.
const AHEAD: usize = 1024;

/// `count` runs of `run` bytes, each a stride further on either side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Runs {
    pub(crate) src: *const u8,
    pub(crate) dst: *mut u8,
    pub(crate) src_stride: usize,
    pub(crate) dst_stride: usize,
    pub(crate) run: usize,
    pub(crate) count: usize,
}

impl Runs {
    /// Copies them; no pointer is made past the last. With `stream`, the bytes are visible to others only after [`drain`].
    ///
    /// # Safety
    /// Every run must be readable at the source and writable at the destination, and their addresses must not overlap.
    pub(crate) unsafe fn copy(&self, stream: bool) {
        #[cfg(target_arch = "x86_64")]
        if stream && self.run >= STREAM_RUN {
            for i in 0..self.count {
                // SAFETY: the caller's promise.
                unsafe {
                    if i + 1 < self.count {
                        fetch(self.src.add((i + 1) * self.src_stride), self.run);
                    }
                    past_caches(self.src.add(i * self.src_stride), self.dst.add(i * self.dst_stride), self.run);
                }
            }
            return;
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = stream;
        // SAFETY: the caller's promise.
        unsafe { copy_runs(self.src, self.dst, self.run, self.count, self.src_stride, self.dst_stride) };
    }

    /// Begins to fetch the first run's source.
    pub(crate) fn fetch(&self) {
        fetch(self.src, self.run);
    }
}

/// Makes all bytes that this thread streamed visible before whatever it stores next.
pub(crate) fn drain() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` is in every x86-64 and touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Begins to fetch the beginning of `len` bytes. A hint: it touches nothing and cannot fault.
fn fetch(src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..len.min(AHEAD)).step_by(64) {
        // SAFETY: prefetching is in every x86-64 and never faults; the pointer is not dereferenced.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(at).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (src, len);
}

/// Copies with stores that don't fill the caches.
///
/// # Safety
/// As for `ptr::copy_nonoverlapping`.
#[cfg(target_arch = "x86_64")]
unsafe fn past_caches(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: all places lie in the `len` bytes of the caller's promise: `head` first bytes, then `lines` lines, then the rest.
    // The streaming stores want their destination aligned to 16 bytes, which `head` has seen to.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        for line in 0..lines {
            let from = src.add(head + line * LINE).cast::<__m128i>();
            let to = dst.add(head + line * LINE).cast::<__m128i>();
            let (a, b) = (_mm_loadu_si128(from), _mm_loadu_si128(from.add(1)));
            let (c, d) = (_mm_loadu_si128(from.add(2)), _mm_loadu_si128(from.add(3)));
            _mm_stream_si128(to, a);
            _mm_stream_si128(to.add(1), b);
            _mm_stream_si128(to.add(2), c);
            _mm_stream_si128(to.add(3), d);
        }
        let done = head + lines * LINE;
        std::ptr::copy_nonoverlapping(src.add(done), dst.add(done), len - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_for_every_length_stride_and_alignment() {
        for run in [1, 7, 16, 32, 64, 100, 128, 256, 1024, 1100, 4096, 5000] {
            for (count, gap_src, gap_dst, shift) in [(1, 0, 0, 0), (3, 5, 0, 1), (4, 0, 11, 3), (2, 64, 64, 63)] {
                for stream in [false, true] {
                    let len = (run + gap_src) * count;
                    let bytes: Vec<u8> = (0..len).map(|i| u8::try_from(i % 251).unwrap() + 1).collect();
                    let mut out = vec![0u8; (run + gap_dst) * count + shift];
                    let runs = Runs {
                        src: bytes.as_ptr(),
                        dst: out[shift..].as_mut_ptr(),
                        src_stride: run + gap_src,
                        dst_stride: run + gap_dst,
                        run,
                        count,
                    };
                    runs.fetch();
                    // SAFETY: both vectors hold `count` runs with their gaps.
                    unsafe { runs.copy(stream) };
                    drain();
                    assert!(out[..shift].iter().all(|b| *b == 0));
                    for i in 0..count {
                        let (s, d) = (i * (run + gap_src), shift + i * (run + gap_dst));
                        assert_eq!(out[d..d + run], bytes[s..s + run], "run {run}, {i} of {count}, stream {stream}");
                        assert!(out[d + run..d + run + gap_dst].iter().all(|b| *b == 0));
                    }
                }
            }
        }
    }
}
