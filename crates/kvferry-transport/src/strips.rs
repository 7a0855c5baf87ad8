//! A batch walked by its own loops, a strip at a time, between any two byte positions.
//!
//! The bytes of a batch have an order (that of the module text of [`kvferry_geometry::batch`]), so a byte position from
//! 0 to [`Batch::bytes`] names a place in it. [`Strips`] walks from one position to another without expanding
//! descriptors: a [`Strip`] is the innermost loop. Positions are how a batch is shared among threads ([`shares`]), done a
//! slice at a time, and cut anywhere, even inside a run.
//!
//! Pure arithmetic on a [`BoundedBatch`]: nothing here can leave a region, because the proof covers every place that
//! the loops reach.

use std::ops::Range;

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Dim, MAX_DIMS, PairRun, Part};
use kvferry_geometry::units::RegionId;

#[cfg(test)]
mod tests;

/// `count` runs of `run` bytes, each a stride further on either side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strip {
    /// Region at the source rank.
    pub src_region: RegionId,
    /// Region at the destination rank.
    pub dst_region: RegionId,
    /// Byte offset of the first run in the source region.
    pub src_offset: u64,
    /// Byte offset of the first run in the destination region.
    pub dst_offset: u64,
    /// Bytes of each run, at least 1.
    pub run: u64,
    /// Runs, at least 1.
    pub count: u64,
    /// Bytes from one run to the next at the source.
    pub src_stride: u64,
    /// Bytes from one run to the next at the destination.
    pub dst_stride: u64,
}

impl Strip {
    /// Bytes in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.run * self.count
    }
}

/// Whole runs at scattered pairs of blocks: run `i` begins at `src_offset + pairs[i].src * src_block_stride` and
/// `dst_offset + pairs[i].dst * dst_block_stride`. Every pair run in it has one pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scatter<'a> {
    /// Region at the source rank.
    pub src_region: RegionId,
    /// Region at the destination rank.
    pub dst_region: RegionId,
    /// Byte offset of block 0 in the source region.
    pub src_offset: u64,
    /// Byte offset of block 0 in the destination region.
    pub dst_offset: u64,
    /// Bytes from one source block to the next.
    pub src_block_stride: u64,
    /// Bytes from one destination block to the next.
    pub dst_block_stride: u64,
    /// Bytes of each run, at least 1.
    pub run: u64,
    /// The pairs, at least one.
    pub pairs: &'a [PairRun],
}

/// The two innermost loops at once: `outer.count` times `inner.count` whole runs of `run` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// Region at the source rank.
    pub src_region: RegionId,
    /// Region at the destination rank.
    pub dst_region: RegionId,
    /// Byte offset of the first run in the source region.
    pub src_offset: u64,
    /// Byte offset of the first run in the destination region.
    pub dst_offset: u64,
    /// Bytes of each run, at least 1.
    pub run: u64,
    /// The outer loop; one step where the batch has no loop there.
    pub outer: Dim,
    /// The inner loop.
    pub inner: Dim,
}

impl Tile {
    /// Bytes in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.run * self.inner.count * self.outer.count
    }
}

/// Cuts the bytes of a batch into `n` shares of nearly equal size, in order; some are empty if there are few bytes.
/// Cuts inside a run fall on multiples of 4 KiB from its start where the run is that long.
#[must_use]
pub fn shares(batch: &BoundedBatch, n: usize) -> Vec<Range<u64>> {
    let total = batch.bytes().get();
    let n = n.max(1) as u64;
    let mut start = 0;
    let mut out = Vec::new();
    for i in 1..=n {
        let ideal = u64::try_from(u128::from(total) * u128::from(i) / u128::from(n)).unwrap_or(total);
        let end = if i == n { total } else { tidy_cut(batch, ideal).max(start) };
        out.push(start..end);
        start = end;
    }
    out
}

/// As [`shares`], but a cut inside the loops of a block pair goes back to the pair's start where that costs a share an eighth
/// of its bytes at most. So who works on the loops as a whole finds them whole.
#[must_use]
pub fn pair_shares(batch: &BoundedBatch, n: usize) -> Vec<Range<u64>> {
    let total = batch.bytes().get();
    let most = total / n.max(1) as u64 / 8;
    let mut start = 0;
    let mut out = shares(batch, n);
    for share in &mut out {
        let inside = Strips::new(batch, share.end..total).in_pair();
        let end = if inside <= most { share.end - inside } else { share.end };
        *share = start..end.max(start);
        start = share.end;
    }
    out
}

/// The nearest good place to cut at or before `position`.
fn tidy_cut(batch: &BoundedBatch, position: u64) -> u64 {
    const PAGE: u64 = 4096;
    let strips = Strips::new(batch, position..batch.bytes().get());
    let inside = strips.in_run;
    position - if inside > PAGE { inside % PAGE } else { inside }
}

/// The strips between two byte positions of a batch.
#[derive(Clone, Debug)]
pub struct Strips<'a> {
    batch: &'a Batch,
    section: usize,
    base: usize,
    part: usize,
    /// Index into the part's pair runs.
    pair_run: usize,
    /// Pairs of the pair run that are done, where the pairs are not the innermost loop.
    pair: u64,
    /// Steps done of the loops, the innermost included.
    idx: [u64; MAX_DIMS],
    /// Steps done of the pair loop where that is the innermost.
    inner: u64,
    /// Bytes done of the current run.
    in_run: u64,
    position: u64,
    end: u64,
}

impl<'a> Strips<'a> {
    /// The strips of the bytes from `range.start` to `range.end`; positions past the end of the batch are cut off.
    #[must_use]
    pub fn new(batch: &'a BoundedBatch, range: Range<u64>) -> Self {
        let (total, batch) = (batch.bytes().get(), batch.batch());
        let start = range.start.min(total);
        let mut strips = Self {
            batch,
            section: 0,
            base: 0,
            part: 0,
            pair_run: 0,
            pair: 0,
            idx: [0; MAX_DIMS],
            inner: 0,
            in_run: 0,
            position: start,
            end: range.end.min(total).max(start),
        };
        if start < total {
            strips.seek(start);
        }
        strips
    }

    /// The byte position that was reached.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next strip, of at most `budget` bytes; `None` at the end or if `budget` is zero.
    pub fn next_within(&mut self, budget: u64) -> Option<Strip> {
        let left = (self.end - self.position).min(budget);
        if left == 0 {
            return None;
        }
        let (base, part) = self.current()?;
        let pairs = part.pairs.get(self.pair_run)?;
        let line = self.line(base, part, pairs);
        let strip = cut(line, self.in_run, left);
        self.advance(part, pairs, line, &strip);
        self.position += strip.bytes();
        Some(strip)
    }

    /// Many strips at once, where the walk stands before scattered blocks that are moved whole: then it goes past all of
    /// them that end before the end of the range. `None` elsewhere; [`next_within`](Self::next_within) goes on there.
    pub fn next_scatter(&mut self) -> Option<Scatter<'a>> {
        if self.in_run > 0 || self.inner > 0 {
            return None;
        }
        let (base, part) = self.current()?;
        let run = part.nest.run;
        let room = usize::try_from((self.end - self.position) / run).unwrap_or(usize::MAX);
        if !part.nest.dims.is_empty() || room == 0 {
            return None;
        }
        let pairs = part.pairs.get(self.pair_run..)?;
        let singles = pairs.iter().take(room).take_while(|pairs| pairs.count == 1).count();
        if singles == 0 {
            return None;
        }
        self.pair_run += singles;
        self.position += singles as u64 * run;
        Some(Scatter {
            src_region: base.src_region,
            dst_region: base.dst_region,
            src_offset: base.src_offset + part.src_add,
            dst_offset: base.dst_offset + part.dst_add,
            src_block_stride: part.src_block_stride,
            dst_block_stride: part.dst_block_stride,
            run,
            pairs: &pairs[..singles],
        })
    }

    /// Many strips at once, where the walk stands at the start of a loop that has another one around it: then it goes past all
    /// steps of the outer loop that end before the end of the range. `None` elsewhere; [`next_within`](Self::next_within) goes
    /// on there. The outer loop is that of the nest, or of the block pairs of a pair run where the nest has one loop only.
    pub fn next_tile(&mut self) -> Option<Tile> {
        if self.in_run > 0 {
            return None;
        }
        let (base, part) = self.current()?;
        let pairs = part.pairs.get(self.pair_run)?;
        let dims = part.nest.dims.as_slice();
        let (inner, around) = dims.split_last()?;
        if self.idx[around.len()] > 0 {
            return None;
        }
        let room = (self.end - self.position) / inner.count.checked_mul(part.nest.run)?;
        let (done, outer) = match around.last() {
            Some(dim) => (self.idx[around.len() - 1], *dim),
            None => (self.pair, pair_loop(part, pairs)),
        };
        let steps = room.min(outer.count - done);
        if steps == 0 {
            return None;
        }
        let line = self.line(base, part, pairs);
        match around.len().checked_sub(1) {
            Some(loop_around) => {
                self.idx[loop_around] += steps;
                if steps + done == outer.count {
                    self.idx[loop_around] = 0;
                    self.carry(part, pairs, loop_around);
                }
            }
            None => self.step_pairs(pairs, steps),
        }
        let tile = Tile {
            src_region: line.src_region,
            dst_region: line.dst_region,
            src_offset: line.src_offset,
            dst_offset: line.dst_offset,
            run: part.nest.run,
            outer: Dim { count: steps, ..outer },
            inner: *inner,
        };
        self.position += tile.bytes();
        Some(tile)
    }

    /// Bytes from the start of the block pair that the walk stands in.
    fn in_pair(&mut self) -> u64 {
        let Some((_, part)) = self.current() else { return 0 };
        let runs = part.nest.dims.iter().zip(self.idx).fold(0, |runs, (dim, i)| runs * dim.count + i);
        runs * part.nest.run + self.in_run
    }

    /// The base and part the walk stands in, after skipping finished and empty ones.
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
            if self.pair_run < part.pairs.len() {
                return Some((base, part));
            }
            self.part += 1;
            self.pair_run = 0;
        }
    }

    /// What is left of the innermost loop, from the run that the walk stands in.
    fn line(&self, base: &Base, part: &Part, pairs: &PairRun) -> Strip {
        let dims = part.nest.dims.as_slice();
        let done = if dims.is_empty() { self.inner } else { self.pair };
        let src_block = u64::from(pairs.src) + done * u64::from(part.src_step);
        let dst_block = u64::from(pairs.dst) + done * u64::from(part.dst_step);
        let around = pair_loop(part, pairs);
        let mut strip = Strip {
            src_region: base.src_region,
            dst_region: base.dst_region,
            src_offset: base.src_offset + part.src_add + src_block * part.src_block_stride,
            dst_offset: base.dst_offset + part.dst_add + dst_block * part.dst_block_stride,
            run: part.nest.run,
            count: around.count - self.inner,
            src_stride: around.src_stride,
            dst_stride: around.dst_stride,
        };
        for (dim, i) in dims.iter().zip(self.idx) {
            strip.src_offset += i * dim.src_stride;
            strip.dst_offset += i * dim.dst_stride;
            (strip.count, strip.src_stride, strip.dst_stride) = (dim.count - i, dim.src_stride, dim.dst_stride);
        }
        if strip.count > 1 && part.pairs_are_adjacent() {
            strip.run *= strip.count;
            strip.count = 1;
        }
        strip
    }

    /// Steps past a strip that was cut from `line`.
    fn advance(&mut self, part: &Part, pairs: &PairRun, line: Strip, strip: &Strip) {
        let run = part.nest.run;
        let done = self.in_run + strip.bytes();
        let runs = done / run;
        self.in_run = done % run;
        let finished = self.in_run == 0 && done == line.bytes();
        let Some(last) = part.nest.dims.len().checked_sub(1) else {
            self.inner += runs;
            if finished {
                self.inner = 0;
                self.pair_run += 1;
            }
            return;
        };
        self.idx[last] += runs;
        if !finished {
            return;
        }
        self.idx[last] = 0;
        self.carry(part, pairs, last);
    }

    /// Steps the loops outside of loop `within` once, and the pairs where these are done.
    fn carry(&mut self, part: &Part, pairs: &PairRun, within: usize) {
        for (i, dim) in part.nest.dims.iter().enumerate().take(within).rev() {
            self.idx[i] += 1;
            if self.idx[i] < dim.count {
                return;
            }
            self.idx[i] = 0;
        }
        self.step_pairs(pairs, 1);
    }

    /// Steps the loop of pairs, where that is not the innermost.
    fn step_pairs(&mut self, pairs: &PairRun, steps: u64) {
        self.pair += steps;
        if self.pair == u64::from(pairs.count) {
            self.pair = 0;
            self.pair_run += 1;
        }
    }

    /// Goes to a byte position below the batch's total.
    fn seek(&mut self, position: u64) {
        let mut left = position;
        for section in self.batch.sections() {
            if section.bases.is_empty() {
                self.section += 1;
                continue;
            }
            let per_base: u64 = section.parts.iter().map(part_bytes).sum();
            let size = per_base * section.bases.len() as u64;
            if left < size {
                self.base = usize::try_from(left / per_base).unwrap_or(usize::MAX);
                self.seek_in_base(&section.parts, left % per_base);
                return;
            }
            left -= size;
            self.section += 1;
        }
    }

    fn seek_in_base(&mut self, parts: &[Part], mut left: u64) {
        for part in parts {
            let size = part_bytes(part);
            if left < size {
                self.seek_in_part(part, left);
                return;
            }
            left -= size;
            self.part += 1;
        }
    }

    fn seek_in_part(&mut self, part: &Part, mut left: u64) {
        let pair_bytes = part.nest.runs() * part.nest.run;
        for pairs in part.pairs.iter() {
            let size = u64::from(pairs.count) * pair_bytes;
            if left < size {
                break;
            }
            left -= size;
            self.pair_run += 1;
        }
        let pair = left / pair_bytes;
        if part.nest.dims.is_empty() {
            self.inner = pair;
        } else {
            self.pair = pair;
        }
        let mut run_index = left % pair_bytes / part.nest.run;
        for (i, dim) in part.nest.dims.iter().enumerate().rev() {
            self.idx[i] = run_index % dim.count;
            run_index /= dim.count;
        }
        self.in_run = left % part.nest.run;
    }
}

impl Iterator for Strips<'_> {
    type Item = Strip;

    fn next(&mut self) -> Option<Strip> {
        self.next_within(u64::MAX)
    }
}

/// The pairs of a pair run as a loop.
fn pair_loop(part: &Part, pairs: &PairRun) -> Dim {
    Dim {
        count: u64::from(pairs.count),
        // Wrapping: a step that no pair takes may be any number.
        src_stride: part.src_block_stride.wrapping_mul(u64::from(part.src_step)),
        dst_stride: part.dst_block_stride.wrapping_mul(u64::from(part.dst_step)),
    }
}

fn part_bytes(part: &Part) -> u64 {
    if part.pairs.is_empty() { 0 } else { part.pair_count() * part.nest.runs() * part.nest.run }
}

/// The first bytes of a line after `skip` bytes of its first run, at most `most` of them, as one strip.
fn cut(line: Strip, skip: u64, most: u64) -> Strip {
    if skip > 0 || most < line.run {
        let run = (line.run - skip).min(most);
        return Strip { src_offset: line.src_offset + skip, dst_offset: line.dst_offset + skip, run, count: 1, ..line };
    }
    Strip { count: line.count.min(most / line.run), ..line }
}
