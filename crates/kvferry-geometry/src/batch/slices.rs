//! A proven batch in slices of bounded size, so that a long read can be posted piece by piece between others.
//!
//! A slice is a batch again, in product form. The slices follow the order of the batch's runs: expanded one after the other they
//! are the expansion of the whole, byte for byte. Cuts go between bases where they can, then between parts, then between block
//! pairs, then between steps of a pair's loops; inside a run only where it alone is larger than a slice. What is not cut is
//! shared with the whole (lists of bases and of pairs), what is cut is copied: a slice costs what its own rows cost, and only one is made at
//! a time. A batch that is no larger than a slice is its own only slice.
//!
//! A slice needs no proof of its own: it lists only places that the whole lists, of which the proof holds, and its loops
//! and runs are no longer.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::iter::FusedIterator;

use arrayvec::ArrayVec;

use super::{Base, Batch, BoundedBatch, Dim, MAX_DIMS, Nest, PairRun, Part, Section};
use crate::units::Bytes;

/// A slice that has less room than this share of its size takes nothing that would have to be cut for it.
const SMALL: u64 = 8;
/// A run that is cut, is so at multiples of this many bytes from its start, unless slices are smaller than that.
const GRAIN: u64 = 4096;

/// The slices of a batch, see [`BoundedBatch::slices`].
#[derive(Clone, Debug)]
pub struct Slices {
    whole: Arc<BoundedBatch>,
    /// At least 1.
    max: u64,
    /// Whether the batch is its own only slice, which is still to come.
    undivided: bool,
    at: Place,
    /// For one base of the section that `at` is in: bytes of each part.
    parts: Vec<u64>,
    /// Their sum.
    base_bytes: u64,
}

/// Where the next slice begins. All but the section are reset where an outer one moves on.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    section: usize,
    base: usize,
    part: usize,
    /// The pair run, and the pair in it.
    run: usize,
    pair: u32,
    /// The point of the pair's loops, counted through.
    point: u64,
    /// The byte of that point's run.
    byte: u64,
}

impl Place {
    fn is_at_pair(&self) -> bool {
        self.point == 0 && self.byte == 0
    }

    fn is_at_part(&self) -> bool {
        self.run == 0 && self.pair == 0 && self.is_at_pair()
    }

    fn next_pair(&mut self, pairs: &[PairRun]) {
        (self.point, self.byte) = (0, 0);
        self.pair += 1;
        if pairs.get(self.run).is_none_or(|run| self.pair >= run.count) {
            (self.run, self.pair) = (self.run + 1, 0);
        }
    }
}

impl BoundedBatch {
    /// The batch in slices of at most `max` bytes (at least one byte), each a batch in product form, in the order of its runs.
    /// They are made one at a time; together they are all of it. A batch of no more than `max` bytes is not copied, and one of
    /// none has no slices.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use kvferry_geometry::batch::{Base, Batch, Nest, PairRun, Part, Section};
    /// use kvferry_geometry::units::{Bytes, RegionId};
    /// let base = Base { src_region: RegionId::ZERO, dst_region: RegionId::ZERO, src_offset: 0, dst_offset: 0 };
    /// let part = Part {
    ///     src_add: 0, dst_add: 0, src_block_stride: 32, dst_block_stride: 64, src_step: 1, dst_step: 1,
    ///     nest: Nest::run(32), pairs: vec![PairRun { src: 0, dst: 0, count: 5 }].into(),
    /// };
    /// let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
    /// let whole = Arc::new(batch.check(&[Bytes::new(160)], &[Bytes::new(320)]).unwrap());
    /// let bytes = |max| whole.slices(Bytes::new(max)).map(|s| s.bytes().get()).collect::<Vec<_>>();
    /// assert_eq!(bytes(100), [96, 64]);
    /// assert_eq!(bytes(160), [160]);
    /// ```
    #[must_use]
    pub fn slices(self: &Arc<Self>, max: Bytes) -> Slices {
        let bytes = self.bytes().get();
        let max = max.get().max(1);
        let undivided = bytes > 0 && bytes <= max;
        // Where nothing is to be cut, all sections are passed already.
        let section = if bytes <= max { self.batch().sections().len() } else { 0 };
        let mut slices = Slices {
            whole: self.clone(),
            max,
            undivided,
            at: Place { section, ..Place::default() },
            parts: Vec::new(),
            base_bytes: 0,
        };
        slices.enter_section();
        slices
    }
}

impl Iterator for Slices {
    type Item = Arc<BoundedBatch>;

    fn next(&mut self) -> Option<Arc<BoundedBatch>> {
        if core::mem::take(&mut self.undivided) {
            return Some(self.whole.clone());
        }
        // A handle of its own, so that what it lists can be looked at while the place moves.
        let whole = self.whole.clone();
        let mut slice = Slice { sections: Vec::new(), open: None, left: self.max };
        while let Some(section) = self.settle(whole.batch().sections()) {
            if slice.left == 0 || !self.take(section, &mut slice) {
                break;
            }
        }
        if slice.sections.is_empty() {
            return None;
        }
        Some(Arc::new(whole.lesser(Batch::new(slice.sections))))
    }
}

impl FusedIterator for Slices {}

impl Slices {
    /// Counts the bytes of the section that the place is in now.
    fn enter_section(&mut self) {
        self.parts.clear();
        if let Some(section) = self.whole.batch().sections().get(self.at.section) {
            let bytes = |p: &Part| p.pair_count() * p.nest.runs() * p.nest.run;
            self.parts.extend(section.parts.iter().map(bytes));
        }
        self.base_bytes = self.parts.iter().sum();
    }

    /// Passes what is done and what has no bytes; gives the section that the place is in then.
    fn settle<'a>(&mut self, sections: &'a [Section]) -> Option<&'a Section> {
        loop {
            let section = sections.get(self.at.section)?;
            if self.base_bytes == 0 || self.at.base >= section.bases.len() {
                self.at = Place { section: self.at.section + 1, ..Place::default() };
                self.enter_section();
                continue;
            }
            let Some(part) = section.parts.get(self.at.part) else {
                self.at = Place { section: self.at.section, base: self.at.base + 1, ..Place::default() };
                continue;
            };
            if self.at.run < part.pairs.len() || self.is_at_base() {
                return Some(section);
            }
            self.next_part();
        }
    }

    fn is_at_base(&self) -> bool {
        self.at.part == 0 && self.at.is_at_part()
    }

    fn next_part(&mut self) {
        let Place { section, base, part, .. } = self.at;
        self.at = Place { section, base, part: part + 1, ..Place::default() };
    }

    /// Moves the next piece into a slice: of the coarsest kind that fits. False if the slice is to end here.
    fn take(&mut self, section: &Section, slice: &mut Slice) -> bool {
        let may_cut = slice.sections.is_empty() || slice.left >= self.max / SMALL;
        if self.is_at_base() {
            let first = self.at.base;
            let left = section.bases.len() - first;
            let fit = usize::try_from(slice.left / self.base_bytes).unwrap_or(usize::MAX).min(left);
            if fit > 0 {
                self.at.base += fit;
                slice.push_bases(section, first..first + fit, fit as u64 * self.base_bytes);
                return true;
            }
            if !may_cut {
                return false;
            }
        }
        let whose = (self.at.section, self.at.base);
        let (Some(base), Some(part)) = (section.bases.get(self.at.base), section.parts.get(self.at.part)) else {
            return false;
        };
        if self.at.is_at_part() {
            let bytes = self.parts.get(self.at.part).copied().unwrap_or(0);
            if bytes <= slice.left {
                if bytes > 0 {
                    slice.push_part(whose, base, part.clone(), bytes);
                }
                self.next_part();
                return true;
            }
            if !may_cut {
                return false;
            }
        }
        let pair_bytes = part.nest.runs() * part.nest.run;
        if self.at.is_at_pair() {
            if pair_bytes <= slice.left {
                let (pairs, count) = self.take_pairs(part, slice.left / pair_bytes);
                slice.push_part(whose, base, Part { pairs: pairs.into(), ..part.clone() }, count * pair_bytes);
                return true;
            }
            if !may_cut {
                return false;
            }
        }
        match self.take_of_pair(part, slice) {
            Some((piece, bytes)) => slice.push_part(whose, base, piece, bytes),
            None => return false,
        }
        true
    }

    /// The next `most` pairs of a part or fewer, from the start of one on.
    fn take_pairs(&mut self, part: &Part, most: u64) -> (Vec<PairRun>, u64) {
        let (mut pairs, mut count) = (Vec::new(), 0);
        while let Some(run) = part.pairs.get(self.at.run)
            && count < most
        {
            let left = run.count - self.at.pair;
            let taken = u32::try_from(most - count).map_or(left, |most| most.min(left));
            pairs.push(PairRun { count: taken, ..pair_at(part, run, self.at.pair) });
            count += u64::from(taken);
            self.at.pair += taken;
            if self.at.pair == run.count {
                (self.at.run, self.at.pair) = (self.at.run + 1, 0);
            }
        }
        (pairs, count)
    }

    /// The next piece of one pair, and its bytes; none where a run would be cut that needn't be.
    fn take_of_pair(&mut self, part: &Part, slice: &Slice) -> Option<(Part, u64)> {
        let run = part.pairs.get(self.at.run)?;
        let pairs = vec![PairRun { count: 1, ..pair_at(part, run, self.at.pair) }];
        let (src, dst) = self.point_offset(&part.nest);
        let piece = |byte: u64, nest: Nest| Part {
            // Inside what was proven, so they don't overflow.
            src_add: part.src_add + src + byte,
            dst_add: part.dst_add + dst + byte,
            nest,
            pairs: pairs.into(),
            ..*part
        };
        if self.at.byte == 0
            && let Some((nest, points)) = self.steps(&part.nest, slice.left)
        {
            self.at.point += points;
            let bytes = points * nest.run;
            let piece = piece(0, nest);
            if self.at.point == part.nest.runs() {
                self.at.next_pair(&part.pairs);
            }
            return Some((piece, bytes));
        }
        if self.at.byte == 0 && part.nest.run <= self.max {
            return None;
        }
        let (byte, left) = (self.at.byte, part.nest.run - self.at.byte);
        let mut bytes = left.min(slice.left);
        if bytes < left && self.max >= GRAIN {
            bytes -= bytes % GRAIN;
        }
        if bytes == 0 {
            return None;
        }
        self.at.byte += bytes;
        if self.at.byte == part.nest.run {
            (self.at.byte, self.at.point) = (0, self.at.point + 1);
            if self.at.point == part.nest.runs() {
                self.at.next_pair(&part.pairs);
            }
        }
        Some((piece(byte, Nest::run(bytes)), bytes))
    }

    /// How far the current point lies from the first on each side.
    fn point_offset(&self, nest: &Nest) -> (u64, u64) {
        let (mut rest, mut src, mut dst) = (self.at.point, 0, 0);
        for dim in nest.dims.iter().rev() {
            let step = rest % dim.count;
            rest /= dim.count;
            src += step * dim.src_stride;
            dst += step * dim.dst_stride;
        }
        (src, dst)
    }

    /// From the current point on: steps of the outermost loop whose step begins here and fits. With how many points they make.
    fn steps(&self, nest: &Nest, left: u64) -> Option<(Nest, u64)> {
        let mut volume = nest.runs();
        for (i, dim) in nest.dims.iter().enumerate() {
            let around = volume;
            volume /= dim.count;
            let fit = left / (volume * nest.run);
            if !self.at.point.is_multiple_of(volume) || fit == 0 {
                continue;
            }
            let steps = fit.min(dim.count - self.at.point % around / volume);
            let mut dims: ArrayVec<Dim, MAX_DIMS> = ArrayVec::new();
            dims.extend((steps > 1).then_some(Dim { count: steps, ..*dim }));
            dims.extend(nest.dims.iter().skip(i + 1).copied());
            return Some((Nest { dims, run: nest.run }, steps * volume));
        }
        None
    }
}

/// The pair of a run that is the `pair`th, as the start of a run.
fn pair_at(part: &Part, run: &PairRun, pair: u32) -> PairRun {
    PairRun { src: run.src + pair * part.src_step, dst: run.dst + pair * part.dst_step, count: run.count - pair }
}

/// A slice that is being made.
struct Slice {
    sections: Vec<Section>,
    /// The section and base of the whole that the last section here has parts of.
    open: Option<(usize, usize)>,
    /// Bytes that there is room for.
    left: u64,
}

impl Slice {
    fn push_bases(&mut self, section: &Section, bases: core::ops::Range<usize>, bytes: u64) {
        let bases = match section.bases.get(bases) {
            Some(some) if some.len() < section.bases.len() => some.into(),
            _ => section.bases.clone(),
        };
        self.sections.push(Section { bases, parts: section.parts.clone() });
        self.open = None;
        self.left -= bytes;
    }

    fn push_part(&mut self, whose: (usize, usize), base: &Base, part: Part, bytes: u64) {
        self.left -= bytes;
        match self.sections.last_mut() {
            Some(section) if self.open == Some(whose) => section.parts.push(part),
            _ => self.sections.push(Section { bases: [*base].into(), parts: vec![part] }),
        }
        self.open = Some(whose);
    }
}

#[cfg(test)]
mod tests;
