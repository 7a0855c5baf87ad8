//! Flat expansion of a batch, a buffer at a time and without allocation.

use super::{Base, Batch, Descriptor, MAX_DIMS, PairRun, Part};

/// Walks the descriptors of a batch in its order. Neighbours that are adjacent on both sides, also across parts and
/// bases, come out as one; the sequence does not depend on the buffers' sizes.
#[derive(Clone, Debug)]
pub struct Cursor<'a> {
    batch: &'a Batch,
    section: usize,
    base: usize,
    part: usize,
    place: Place,
}

/// A place inside one part.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    run: usize,
    pair: u32,
    idx: [u64; MAX_DIMS],
    /// Nothing of the part was yielded yet.
    started: bool,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(batch: &'a Batch) -> Self {
        Self { batch, section: 0, base: 0, part: 0, place: Place::default() }
    }

    /// Writes the next descriptors to the front of `out`; returns how many. Zero means the end (or an empty `out`).
    pub fn fill(&mut self, out: &mut [Descriptor]) -> usize {
        let mut n = 0;
        while let Some((base, part)) = self.current() {
            if !self.place.started && n > 0 {
                let mut first = [Descriptor::default()];
                let mut probe = self.place;
                fill_part(base, part, &mut probe, &mut first);
                let (last, first) = (&mut out[n - 1], first[0]);
                if adjacent(last, &first) {
                    last.len += first.len;
                    self.place = probe;
                    continue;
                }
            }
            if n == out.len() {
                break;
            }
            n += fill_part(base, part, &mut self.place, &mut out[n..]);
        }
        n
    }

    /// The base and part that the cursor stands in, after skipping finished ones.
    fn current(&mut self) -> Option<(&'a Base, &'a Part)> {
        loop {
            let section = self.batch.sections().get(self.section)?;
            let Some(base) = section.bases.get(self.base) else {
                (self.section, self.base, self.part) = (self.section + 1, 0, 0);
                continue;
            };
            let Some(part) = section.parts.get(self.part) else {
                (self.base, self.part) = (self.base + 1, 0);
                continue;
            };
            if self.place.run < part.pairs.len() {
                return Some((base, part));
            }
            self.part += 1;
            self.place = Place::default();
        }
    }
}

fn adjacent(a: &Descriptor, b: &Descriptor) -> bool {
    a.src_region == b.src_region
        && a.dst_region == b.dst_region
        && a.src_offset + a.len == b.src_offset
        && a.dst_offset + a.len == b.dst_offset
}

/// Fills `out` from one part; returns how many were written, and leaves `place.run` at the end when done.
fn fill_part(base: &Base, part: &Part, place: &mut Place, out: &mut [Descriptor]) -> usize {
    place.started = true;
    if part.pairs_are_adjacent() {
        fill_adjacent(base, part, place, out)
    } else if part.nest.dims.is_empty() {
        fill_blocks(base, part, place, out)
    } else {
        fill_nest(base, part, place, out)
    }
}

fn start_of(base: &Base, part: &Part) -> Descriptor {
    Descriptor {
        src_region: base.src_region,
        dst_region: base.dst_region,
        src_offset: base.src_offset + part.src_add,
        dst_offset: base.dst_offset + part.dst_add,
        len: part.nest.run,
    }
}

fn at_block(start: Descriptor, part: &Part, src: u32, dst: u32) -> Descriptor {
    Descriptor {
        src_offset: start.src_offset + u64::from(src) * part.src_block_stride,
        dst_offset: start.dst_offset + u64::from(dst) * part.dst_block_stride,
        ..start
    }
}

fn fill_adjacent(base: &Base, part: &Part, place: &mut Place, out: &mut [Descriptor]) -> usize {
    let start = start_of(base, part);
    let runs = &part.pairs[place.run..];
    let n = runs.len().min(out.len());
    for (slot, run) in out.iter_mut().zip(runs) {
        *slot = at_block(start, part, run.src, run.dst);
        slot.len = start.len * u64::from(run.count);
    }
    place.run += n;
    n
}

fn fill_blocks(base: &Base, part: &Part, place: &mut Place, out: &mut [Descriptor]) -> usize {
    let start = start_of(base, part);
    let mut n = 0;
    while n < out.len() {
        // A stretch of single pairs, the scattered case, is one flat loop.
        if place.pair == 0 {
            let singles = part.pairs[place.run..].iter().zip(&mut out[n..]);
            let mut done = 0;
            for (run, slot) in singles {
                if run.count != 1 {
                    break;
                }
                *slot = at_block(start, part, run.src, run.dst);
                done += 1;
            }
            n += done;
            place.run += done;
        }
        let Some(run) = part.pairs.get(place.run) else { break };
        let first = pair_of(part, run, place.pair);
        let mut next = at_block(start, part, first.0, first.1);
        let take = ((run.count - place.pair) as usize).min(out.len() - n);
        // Wrapping: a step that no pair takes may be any number.
        let src = part.src_block_stride.wrapping_mul(u64::from(part.src_step));
        let dst = part.dst_block_stride.wrapping_mul(u64::from(part.dst_step));
        n += emit(&mut out[n..n + take], &mut next, src, dst);
        place.advance_pairs(run, u32::try_from(take).unwrap_or(u32::MAX));
    }
    n
}

fn fill_nest(base: &Base, part: &Part, place: &mut Place, out: &mut [Descriptor]) -> usize {
    let start = start_of(base, part);
    let dims = part.nest.dims.as_slice();
    let Some((inner, outer)) = dims.split_last() else { return 0 };
    let last = outer.len();
    let mut n = 0;
    while n < out.len() {
        let Some(run) = part.pairs.get(place.run) else { break };
        let (src, dst) = pair_of(part, run, place.pair);
        let mut next = at_block(start, part, src, dst);
        for (dim, i) in dims.iter().zip(place.idx) {
            next.src_offset += i * dim.src_stride;
            next.dst_offset += i * dim.dst_stride;
        }
        // All points of this block pair that fit.
        loop {
            let left = usize::try_from(inner.count - place.idx[last]).unwrap_or(usize::MAX);
            let take = left.min(out.len() - n);
            n += emit(&mut out[n..n + take], &mut next, inner.src_stride, inner.dst_stride);
            if take < left {
                place.idx[last] += take as u64;
                return n;
            }
            place.idx[last] = 0;
            next.src_offset = next.src_offset.wrapping_sub(inner.count.wrapping_mul(inner.src_stride));
            next.dst_offset = next.dst_offset.wrapping_sub(inner.count.wrapping_mul(inner.dst_stride));
            if !carry(outer, place, &mut next) {
                break;
            }
            if n == out.len() {
                return n;
            }
        }
        place.advance_pairs(run, 1);
    }
    n
}

/// Steps the outer loops once; false when they are all done (and reset).
fn carry(outer: &[super::Dim], place: &mut Place, next: &mut Descriptor) -> bool {
    for (i, dim) in outer.iter().enumerate().rev() {
        place.idx[i] += 1;
        if place.idx[i] < dim.count {
            next.src_offset += dim.src_stride;
            next.dst_offset += dim.dst_stride;
            return true;
        }
        place.idx[i] = 0;
        next.src_offset = next.src_offset.wrapping_sub((dim.count - 1).wrapping_mul(dim.src_stride));
        next.dst_offset = next.dst_offset.wrapping_sub((dim.count - 1).wrapping_mul(dim.dst_stride));
    }
    false
}

/// Writes `out.len()` descriptors from `next` on, each a stride further; returns how many.
fn emit(out: &mut [Descriptor], next: &mut Descriptor, src: u64, dst: u64) -> usize {
    for slot in out.iter_mut() {
        *slot = *next;
        // Wrapping: the step past the last descriptor is never used, and may lie past the end of the numbers.
        next.src_offset = next.src_offset.wrapping_add(src);
        next.dst_offset = next.dst_offset.wrapping_add(dst);
    }
    out.len()
}

fn pair_of(part: &Part, run: &PairRun, pair: u32) -> (u32, u32) {
    (run.src + pair * part.src_step, run.dst + pair * part.dst_step)
}

impl Place {
    fn advance_pairs(&mut self, run: &PairRun, by: u32) {
        self.pair += by;
        if self.pair >= run.count {
            self.pair = 0;
            self.run += 1;
        }
    }
}
