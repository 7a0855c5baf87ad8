//! The innermost loop: runs of bytes between two mappings.

/// Copies `count` runs of `run` bytes, each a stride further on either side. No pointer is made past the last run.
///
/// # Safety
/// Every run must be readable at the source and writable at the destination, and their addresses must not overlap.
pub(crate) unsafe fn copy_runs(
    src: *const u8,
    src_stride: usize,
    dst: *mut u8,
    dst_stride: usize,
    run: usize,
    count: usize,
) {
    // SAFETY: the caller's promise, passed on; `N` is `run`.
    unsafe {
        match run {
            16 => fixed::<16>(src, src_stride, dst, dst_stride, count),
            32 => fixed::<32>(src, src_stride, dst, dst_stride, count),
            64 => fixed::<64>(src, src_stride, dst, dst_stride, count),
            128 => fixed::<128>(src, src_stride, dst, dst_stride, count),
            256 => fixed::<256>(src, src_stride, dst, dst_stride, count),
            _ => {
                for i in 0..count {
                    std::ptr::copy_nonoverlapping(src.add(i * src_stride), dst.add(i * dst_stride), run);
                }
            }
        }
    }
}

/// Short runs of a size that the compiler knows, which then needs no call for each.
///
/// # Safety
/// As for [`copy_runs`] with `run == N`.
unsafe fn fixed<const N: usize>(src: *const u8, src_stride: usize, dst: *mut u8, dst_stride: usize, count: usize) {
    for i in 0..count {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(src.add(i * src_stride), dst.add(i * dst_stride), N) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_for_every_length_and_stride() {
        for run in [1, 7, 16, 32, 64, 100, 128, 256, 4096] {
            for (count, gap_src, gap_dst) in [(1, 0, 0), (3, 5, 0), (4, 0, 11)] {
                let src: Vec<u8> = (0..(run + gap_src) * count).map(|i| u8::try_from(i % 251).unwrap() + 1).collect();
                let mut dst = vec![0u8; (run + gap_dst) * count];
                // SAFETY: both vectors hold `count` runs with their gaps.
                unsafe {
                    copy_runs(src.as_ptr(), run + gap_src, dst.as_mut_ptr(), run + gap_dst, run, count);
                }
                for i in 0..count {
                    let (s, d) = (i * (run + gap_src), i * (run + gap_dst));
                    assert_eq!(dst[d..d + run], src[s..s + run], "run {run} {i} of {count}");
                    assert!(dst[d + run..d + run + gap_dst].iter().all(|b| *b == 0));
                }
            }
        }
    }
}
