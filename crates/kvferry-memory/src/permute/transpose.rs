//! Matrices of small elements that are turned over, with the vector instructions that every x86-64 has.
//!
//! | shape | where it comes from |
//! |---|---|
//! | 2-byte elements, 2 to 4 long one way | a convolution's state, channels by kernel rows: dim-first and state-first |
//! | 2-byte elements, at least 8 x 8 | anything else |
//! | 4-byte elements, at least 4 x 4 | scales for each token and head, NHD and HND |
//!
//! What is not of these shapes is left to the plain loops; on other machines everything is.

use super::kernel::Runs;

/// Turns 2-byte elements over; false (and nothing is done) if they are not in such a shape.
///
/// # Safety
/// As for [`Runs::copy`]; the run must be 2 bytes.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn shorts(_: &Runs, _stream: bool) -> bool {
    false
}

/// Turns 4-byte elements over; false (and nothing is done) if they are not in such a shape.
///
/// # Safety
/// As for [`Runs::copy`]; the run must be 4 bytes.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn words(_: &Runs) -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{shorts, words};

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{
        __m128i, _mm_and_si128, _mm_andnot_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_or_si128, _mm_set_epi64x,
        _mm_setzero_si128, _mm_slli_si128, _mm_srli_si128, _mm_storeu_si128, _mm_unpackhi_epi16, _mm_unpackhi_epi32,
        _mm_unpackhi_epi64, _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
    };
    use std::ops::Range;

    use super::Runs;

    /// A matrix in two orders: element (a, b) is at `src + a * N + b * src_stride` and at `dst + a * dst_stride + b * N`.
    #[derive(Clone, Copy)]
    struct Matrix<const N: usize> {
        src: *const u8,
        dst: *mut u8,
        a: usize,
        b: usize,
        src_stride: usize,
        dst_stride: usize,
    }

    /// See the text of the other machines' one.
    ///
    /// # Safety
    /// As for [`Runs::copy`]; the run must be 2 bytes.
    pub(in super::super) unsafe fn shorts(runs: &Runs, stream: bool) -> bool {
        let Some(m) = Matrix::<2>::of(runs) else { return false };
        let stream = stream && m.dst.addr().is_multiple_of(16);
        // SAFETY: the caller's promise; each function's own demand is the guard before it.
        unsafe {
            match (m.a, m.b) {
                (2..=4, 9..) if m.src_stride + 2 * m.a >= 8 => m.split(),
                (9.., 2) if m.dst_stride == 4 && stream => m.join::<2, true>(),
                (9.., 3) if m.dst_stride == 6 && stream => m.join::<3, true>(),
                (9.., 4) if m.dst_stride == 8 && stream => m.join::<4, true>(),
                (9.., 2) if m.dst_stride == 4 => m.join::<2, false>(),
                (9.., 3) if m.dst_stride == 6 => m.join::<3, false>(),
                (9.., 4) if m.dst_stride == 8 => m.join::<4, false>(),
                (8.., 8..) => m.blocks(turn_shorts),
                _ => return false,
            }
        }
        true
    }

    /// See the text of the other machines' one.
    ///
    /// # Safety
    /// As for [`Runs::copy`]; the run must be 4 bytes.
    pub(in super::super) unsafe fn words(runs: &Runs) -> bool {
        let Some(m) = Matrix::<4>::of(runs) else { return false };
        if m.a < 4 || m.b < 4 {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe { m.blocks(turn_words) };
        true
    }

    impl<const N: usize> Matrix<N> {
        fn of(runs: &Runs) -> Option<Self> {
            let Runs { src, dst, outer, inner, .. } = *runs;
            let (a, b) = match (outer, inner) {
                (a, b) if a.src == N && b.dst == N => (a, b),
                (b, a) if a.src == N && b.dst == N => (a, b),
                _ => return None,
            };
            Some(Self { src, dst, a: a.count, b: b.count, src_stride: b.src, dst_stride: a.dst })
        }

        /// # Safety
        /// `a` and `b` must be inside the matrix.
        unsafe fn from(&self, a: usize, b: usize) -> *const u8 {
            // SAFETY: the element lies in the same piece of memory as the first one.
            unsafe { self.src.add(a * N + b * self.src_stride) }
        }

        /// # Safety
        /// `a` and `b` must be inside the matrix.
        unsafe fn to(&self, a: usize, b: usize) -> *mut u8 {
            // SAFETY: the element lies in the same piece of memory as the first one.
            unsafe { self.dst.add(a * self.dst_stride + b * N) }
        }

        /// The elements that are no whole block, one by one.
        ///
        /// # Safety
        /// The runs' promise; both ranges must be inside the matrix.
        unsafe fn rest(&self, a: Range<usize>, b: Range<usize>) {
            for a in a {
                for b in b.clone() {
                    // SAFETY: the caller's promise.
                    unsafe { std::ptr::copy_nonoverlapping(self.from(a, b), self.to(a, b), N) };
                }
            }
        }

        /// In blocks of `W` by `W` elements, `W * N` being 16. A line of the source is used up before the next one is read.
        ///
        /// # Safety
        /// The runs' promise.
        unsafe fn blocks<const W: usize>(&self, turn: impl Fn([__m128i; W]) -> [__m128i; W]) {
            const { assert!(W * N == 16) };
            let (whole_a, whole_b) = (self.a / W * W, self.b / W * W);
            for line in (0..whole_a).step_by(4 * W) {
                for b in (0..whole_b).step_by(W) {
                    for a in (line..whole_a.min(line + 4 * W)).step_by(W) {
                        // SAFETY: the block's `W` elements from (a, b + i) on are 16 bytes of runs at the source, those from
                        // (a + i, b) on at the destination.
                        unsafe {
                            let mut rows = [_mm_setzero_si128(); W];
                            for (i, row) in rows.iter_mut().enumerate() {
                                *row = _mm_loadu_si128(self.from(a, b + i).cast());
                            }
                            for (i, column) in turn(rows).into_iter().enumerate() {
                                _mm_storeu_si128(self.to(a + i, b).cast(), column);
                            }
                        }
                    }
                }
            }
            // SAFETY: the caller's promise.
            unsafe {
                self.rest(0..whole_a, whole_b..self.b);
                self.rest(whole_a..self.a, 0..self.b);
            }
        }
    }

    impl Matrix<2> {
        /// Two to four elements side by side at the source go each to a row of its own.
        ///
        /// # Safety
        /// The runs' promise; `src_stride + 2 * a` must be 8 at least and `b` not 0.
        unsafe fn split(&self) {
            // The last place is not read by eight bytes: they might lie past the end.
            let blocks = (self.b - 1) / 8;
            for b in (0..blocks * 8).step_by(8) {
                // SAFETY: eight bytes from an element's place on end before the last element of the next place does, which is in
                // the matrix: by the caller's promise on the stride. The stores are eight elements of one row of the destination.
                unsafe {
                    let place = |i: usize| _mm_loadl_epi64(self.from(0, b + i).cast());
                    let twos = [0, 2, 4, 6].map(|i| _mm_unpacklo_epi16(place(i), place(i + 1)));
                    let [lo, hi] = [0, 2]
                        .map(|i| (_mm_unpacklo_epi32(twos[i], twos[i + 1]), _mm_unpackhi_epi32(twos[i], twos[i + 1])));
                    let put = |a: usize, v: __m128i| _mm_storeu_si128(self.to(a, b).cast(), v);
                    put(0, _mm_unpacklo_epi64(lo.0, hi.0));
                    put(1, _mm_unpackhi_epi64(lo.0, hi.0));
                    if self.a > 2 {
                        put(2, _mm_unpacklo_epi64(lo.1, hi.1));
                    }
                    if self.a > 3 {
                        put(3, _mm_unpackhi_epi64(lo.1, hi.1));
                    }
                }
            }
            // SAFETY: the caller's promise.
            unsafe { self.rest(0..self.a, blocks * 8..self.b) };
        }

        /// `K` rows of the source become `K` elements side by side, without gaps.
        ///
        /// # Safety
        /// The runs' promise; `b` must be `K`, two to four, and `dst_stride` `2 * K`; with `STREAM`, `dst` aligned to 16 bytes.
        unsafe fn join<const K: usize, const STREAM: bool>(&self) {
            let blocks = self.a / 8;
            for a in (0..blocks * 8).step_by(8) {
                // SAFETY: the loads are eight elements of one row of the source; the stores are the `8 * K` elements of eight
                // places, which lie without gaps.
                unsafe {
                    let row = |b: usize| _mm_loadu_si128(self.from(a, b.min(K - 1)).cast());
                    let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
                    let out = self.to(a, 0).cast::<__m128i>();
                    let (lo, hi) = (_mm_unpacklo_epi16(r0, r1), _mm_unpackhi_epi16(r0, r1));
                    if K == 2 {
                        put::<STREAM>(out, lo);
                        put::<STREAM>(out.add(1), hi);
                        continue;
                    }
                    let (lo2, hi2) = (_mm_unpacklo_epi16(r2, r3), _mm_unpackhi_epi16(r2, r3));
                    // Places in twos, four elements each.
                    let twos = [
                        _mm_unpacklo_epi32(lo, lo2),
                        _mm_unpackhi_epi32(lo, lo2),
                        _mm_unpacklo_epi32(hi, hi2),
                        _mm_unpackhi_epi32(hi, hi2),
                    ];
                    if K == 4 {
                        for (i, two) in twos.into_iter().enumerate() {
                            put::<STREAM>(out.add(i), two);
                        }
                        continue;
                    }
                    let [x0, x1, x2, x3] = twos.map(close_gaps);
                    put::<STREAM>(out, _mm_or_si128(x0, _mm_slli_si128::<12>(x1)));
                    put::<STREAM>(out.add(1), _mm_or_si128(_mm_srli_si128::<4>(x1), _mm_slli_si128::<8>(x2)));
                    put::<STREAM>(out.add(2), _mm_or_si128(_mm_srli_si128::<8>(x2), _mm_slli_si128::<4>(x3)));
                }
            }
            // SAFETY: the caller's promise.
            unsafe { self.rest(blocks * 8..self.a, 0..self.b) };
        }
    }

    /// # Safety
    /// `to` must be writable; with `STREAM`, aligned.
    #[inline]
    unsafe fn put<const STREAM: bool>(to: *mut __m128i, v: __m128i) {
        // SAFETY: the caller's promise.
        unsafe {
            if STREAM && cfg!(not(miri)) { std::arch::x86_64::_mm_stream_si128(to, v) } else { _mm_storeu_si128(to, v) }
        }
    }

    /// Bytes 0 to 5 and 8 to 13 side by side, then zeros.
    fn close_gaps(v: __m128i) -> __m128i {
        // SAFETY: SSE2 is in every x86-64, and only values are used.
        unsafe {
            let low = _mm_set_epi64x(0, 0x0000_ffff_ffff_ffff);
            let moved = _mm_andnot_si128(low, _mm_srli_si128::<2>(v));
            let clear = _mm_set_epi64x(0xffff_ffff, -1);
            _mm_or_si128(_mm_and_si128(low, v), _mm_and_si128(clear, moved))
        }
    }

    fn turn_shorts(r: [__m128i; 8]) -> [__m128i; 8] {
        // SAFETY: SSE2 is in every x86-64, and only values are used.
        unsafe {
            let twos = [0, 2, 4, 6].map(|i| (_mm_unpacklo_epi16(r[i], r[i + 1]), _mm_unpackhi_epi16(r[i], r[i + 1])));
            let fours = [0, 2].map(|i| {
                let (x, y) = (twos[i], twos[i + 1]);
                [
                    _mm_unpacklo_epi32(x.0, y.0),
                    _mm_unpackhi_epi32(x.0, y.0),
                    _mm_unpacklo_epi32(x.1, y.1),
                    _mm_unpackhi_epi32(x.1, y.1),
                ]
            });
            let column =
                |i: usize| (_mm_unpacklo_epi64(fours[0][i], fours[1][i]), _mm_unpackhi_epi64(fours[0][i], fours[1][i]));
            let [c0, c1, c2, c3] = [0, 1, 2, 3].map(column);
            [c0.0, c0.1, c1.0, c1.1, c2.0, c2.1, c3.0, c3.1]
        }
    }

    fn turn_words(r: [__m128i; 4]) -> [__m128i; 4] {
        // SAFETY: SSE2 is in every x86-64, and only values are used.
        unsafe {
            let (x, y) = (
                (_mm_unpacklo_epi32(r[0], r[1]), _mm_unpackhi_epi32(r[0], r[1])),
                (_mm_unpacklo_epi32(r[2], r[3]), _mm_unpackhi_epi32(r[2], r[3])),
            );
            [
                _mm_unpacklo_epi64(x.0, y.0),
                _mm_unpackhi_epi64(x.0, y.0),
                _mm_unpacklo_epi64(x.1, y.1),
                _mm_unpackhi_epi64(x.1, y.1),
            ]
        }
    }
}
