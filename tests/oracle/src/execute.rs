//! Batches applied to memory, by loops written straight from the batch's documented formula.

use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::staged::{Place, Staged};
use kvferry_geometry::units::{Bytes, RankId, RegionId};

use crate::at;
use crate::compare::{Report, Verdict, compare};
use crate::memory::{Memory, fill_source};
use crate::transfer::Transfer;

/// Something that contradicts itself before any byte of the consumer was compared.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Finding {
    /// A group without a table, or an item that one side lacks.
    #[error("an item or its block table is missing on one side")]
    Tables,
    /// A view leaves its region.
    #[error("rank {rank}: a view puts {width} B at byte {offset} of region {region}, outside it")]
    ViewOutside {
        /// The rank.
        rank: usize,
        /// The region.
        region: usize,
        /// First byte.
        offset: u64,
        /// Bytes.
        width: u64,
    },
    /// Two coordinates of one request share a place.
    #[error("rank {rank}: two coordinates of the request share byte {offset} of region {region}")]
    Shared {
        /// The rank.
        rank: usize,
        /// The region.
        region: usize,
        /// The byte.
        offset: u64,
    },
    /// A batch leaves a region.
    #[error("ranks {src} to {dst}: {moved:?} leaves a region")]
    Outside {
        /// Source rank.
        src: usize,
        /// Destination rank.
        dst: usize,
        /// The move.
        moved: Descriptor,
    },
    /// The offsets of a batch overflow.
    #[error("ranks {src} to {dst}: the batch's offsets overflow")]
    Overflow {
        /// Source rank.
        src: usize,
        /// Destination rank.
        dst: usize,
    },
    /// The batch says something of itself that its formula contradicts.
    #[error("ranks {src} to {dst}: {what} gives {got}, but the batch's formula {expected}")]
    Disagrees {
        /// Source rank.
        src: usize,
        /// Destination rank.
        dst: usize,
        /// Which function.
        what: &'static str,
        /// What it gives.
        got: u64,
        /// What the formula gives.
        expected: u64,
    },
    /// The cursor's descriptors are not those of the formula.
    #[error(
        "ranks {src} to {dst}: with buffers of {buffer}, the cursor's byte {byte} goes elsewhere than by the formula"
    )]
    Cursor {
        /// Source rank.
        src: usize,
        /// Destination rank.
        dst: usize,
        /// Length of the buffers.
        buffer: usize,
        /// First byte, counted along the batch, that differs.
        byte: u64,
    },
    /// The batch is refused though every byte is inside.
    #[error("ranks {src} to {dst}: the bounds check refuses a batch whose bytes are all inside: {why}")]
    Refused {
        /// Source rank.
        src: usize,
        /// Destination rank.
        dst: usize,
        /// The refusal.
        why: String,
    },
    /// A batch can't be staged.
    #[error("ranks {src} to {dst}: a batch that can be carried out directly can't be staged")]
    NotStaged {
        /// Source rank.
        src: usize,
        /// Destination rank.
        dst: usize,
    },
    /// Zeros beyond a region.
    #[error("rank {rank}: zeros {len} B at byte {offset} of region {region}, outside it")]
    ZeroOutside {
        /// The rank.
        rank: usize,
        /// The region.
        region: RegionId,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// Counts of one batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Expansion {
    /// Bytes moved.
    pub bytes: u64,
    /// Runs of the formula.
    pub runs: u64,
    /// Descriptors of the cursor.
    pub descriptors: u64,
    /// Descriptors of the cursor that continue the one before on both sides and so should have been one with it.
    pub unmerged: u64,
}

/// How often each byte of the consumer was written.
#[derive(Clone, Debug)]
pub(crate) struct Writes {
    pub(crate) moves: Memory,
    pub(crate) zeros: Memory,
}

/// A transfer under way: both memories, and how often each byte of the consumer was written.
#[derive(Clone, Debug)]
pub struct Execution<'t, 'm> {
    transfer: &'t Transfer<'m>,
    src: Memory,
    dst: Memory,
    writes: Writes,
}

impl<'t, 'm> Execution<'t, 'm> {
    /// Fills both memories.
    ///
    /// # Errors
    /// Tables or views that contradict each other.
    pub fn new(transfer: &'t Transfer<'m>) -> Result<Self, Finding> {
        Ok(Self {
            transfer,
            src: fill_source(transfer)?,
            dst: Memory::background(transfer.dst),
            writes: Writes { moves: Memory::zero(transfer.dst), zeros: Memory::zero(transfer.dst) },
        })
    }

    /// Applies a batch of one rank pair, and holds what the batch says of itself against its formula.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn run(&mut self, src: RankId, dst: RankId, batch: &Batch) -> Result<Expansion, Finding> {
        let lens = (self.transfer.src.region_lens(src), self.transfer.dst.region_lens(dst));
        let (moves, seen) = examine((src.index(), dst.index()), batch, &lens.0, &lens.1)?;
        for moved in &moves {
            let bytes = self.read(src, dst, moved)?;
            self.write(src, dst, moved, &bytes)?;
        }
        Ok(seen)
    }

    /// Applies the two steps of a staged batch through a buffer of their own. The counts are those of the step between the ranks.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn run_staged(&mut self, src: RankId, dst: RankId, direct: &Batch, place: Place) -> Result<Expansion, Finding> {
        let (s, d) = (src.index(), dst.index());
        let mut lens = (self.transfer.src.region_lens(src), self.transfer.dst.region_lens(dst));
        // The buffer is one more region of the rank that permutes.
        let buffer =
            RegionId::new(u32::try_from(if place == Place::Source { lens.0.len() } else { lens.1.len() }).unwrap_or(0));
        let Some(staged) = Staged::new(direct, place, buffer) else {
            return Err(Finding::NotStaged { src: s, dst: d });
        };
        let len = Bytes::new(staged.bytes);
        let (first, second) = if place == Place::Source {
            let all = with(&lens.0, len);
            let first = examine((s, s), &staged.local, &lens.0, &all)?;
            lens.0 = all;
            (first, examine((s, d), &staged.wire, &lens.0, &lens.1)?)
        } else {
            let all = with(&lens.1, len);
            let first = examine((s, d), &staged.wire, &lens.0, &all)?;
            (first, examine((d, d), &staged.local, &all, &lens.1)?)
        };
        let disagrees = |what, got, expected| Finding::Disagrees { src: s, dst: d, what, got, expected };
        if staged.bytes != direct.bytes().get() {
            return Err(disagrees("the buffer's length", staged.bytes, direct.bytes().get()));
        }
        let mut bytes: Vec<Option<u8>> = vec![None; at(staged.bytes)];
        for moved in &first.0 {
            if moved.dst_region != buffer {
                return Err(Finding::Outside { src: s, dst: d, moved: *moved });
            }
            let from = self.read(src, dst, moved)?;
            for (to, byte) in bytes.iter_mut().skip(at(moved.dst_offset)).zip(from) {
                if to.replace(byte).is_some() {
                    return Err(disagrees("writes of one byte of the buffer", 2, 1));
                }
            }
        }
        for moved in &second.0 {
            if moved.src_region != buffer {
                return Err(Finding::Outside { src: s, dst: d, moved: *moved });
            }
            let part = bytes.iter().skip(at(moved.src_offset)).take(at(moved.len)).copied();
            let part: Option<Vec<u8>> = part.collect();
            let part = part.ok_or_else(|| disagrees("writes of one byte of the buffer", 0, 1))?;
            self.write(src, dst, moved, &part)?;
        }
        Ok(if place == Place::Source { second.1 } else { first.1 })
    }

    fn read(&self, src: RankId, dst: RankId, moved: &Descriptor) -> Result<Vec<u8>, Finding> {
        let (s, d) = (src.index(), dst.index());
        let bytes = self.src.bytes(s, moved.src_region.index(), moved.src_offset, moved.len);
        Ok(bytes.ok_or(Finding::Outside { src: s, dst: d, moved: *moved })?.to_vec())
    }

    fn write(&mut self, src: RankId, dst: RankId, moved: &Descriptor, bytes: &[u8]) -> Result<(), Finding> {
        let (s, d) = (src.index(), dst.index());
        let outside = || Finding::Outside { src: s, dst: d, moved: *moved };
        let (region, offset) = (moved.dst_region.index(), moved.dst_offset);
        self.dst.bytes_mut(d, region, offset, moved.len).ok_or_else(outside)?.copy_from_slice(bytes);
        for count in self.writes.moves.bytes_mut(d, region, offset, moved.len).ok_or_else(outside)? {
            *count = count.saturating_add(1);
        }
        Ok(())
    }

    /// Zeroes a stretch of the consumer's memory.
    ///
    /// # Errors
    /// The stretch leaves its region.
    pub fn zero(&mut self, rank: RankId, region: RegionId, offset: u64, len: u64) -> Result<(), Finding> {
        let (r, x) = (rank.index(), region.index());
        let outside = || Finding::ZeroOutside { rank: r, region, offset, len };
        self.dst.bytes_mut(r, x, offset, len).ok_or_else(outside)?.fill(0);
        for count in self.writes.zeros.bytes_mut(r, x, offset, len).ok_or_else(outside)? {
            *count = count.saturating_add(1);
        }
        Ok(())
    }

    /// Compares every byte of the consumer: moved and zeroed ones written once and right, all others never.
    ///
    /// # Errors
    /// How many bytes are wrong, and the first of them in words.
    pub fn finish(&self) -> Result<Verdict, Box<Report>> {
        compare(self.transfer, &self.dst, &self.writes)
    }

    /// The consumer's memory as it is now.
    #[must_use]
    pub fn dst_memory(&self) -> &Memory {
        &self.dst
    }
}

fn with(lens: &[Bytes], more: Bytes) -> Vec<Bytes> {
    lens.iter().copied().chain([more]).collect()
}

/// A batch's runs, after what the batch says of itself was held against them.
fn examine(
    (src, dst): (usize, usize),
    batch: &Batch,
    src_lens: &[Bytes],
    dst_lens: &[Bytes],
) -> Result<(Vec<Descriptor>, Expansion), Finding> {
    let moves = expand(batch).ok_or(Finding::Overflow { src, dst })?;
    let mut seen = Expansion { runs: moves.len() as u64, ..Expansion::default() };
    for moved in &moves {
        let inside = |lens: &[Bytes], region: RegionId, offset: u64| {
            let end = offset.checked_add(moved.len);
            lens.get(region.index()).is_some_and(|len| end.is_some_and(|end| end <= len.get()))
        };
        let from = inside(src_lens, moved.src_region, moved.src_offset);
        if !from || !inside(dst_lens, moved.dst_region, moved.dst_offset) {
            return Err(Finding::Outside { src, dst, moved: *moved });
        }
        seen.bytes += moved.len;
    }
    let disagrees = |what, got, expected| Finding::Disagrees { src, dst, what, got, expected };
    if batch.bytes().get() != seen.bytes {
        return Err(disagrees("bytes()", batch.bytes().get(), seen.bytes));
    }
    if batch.is_empty() != moves.is_empty() {
        return Err(disagrees("is_empty()", u64::from(batch.is_empty()), u64::from(moves.is_empty())));
    }
    for buffer in [1, 3, 64] {
        let flat = flatten(batch, &[buffer]);
        if let Some(byte) = first_difference(&moves, &flat) {
            return Err(Finding::Cursor { src, dst, buffer, byte });
        }
        let count = flat.len() as u64;
        if batch.descriptors() != count {
            return Err(disagrees("descriptors()", batch.descriptors(), count));
        }
        if buffer != 1 && count != seen.descriptors {
            return Err(disagrees("a cursor with another buffer", count, seen.descriptors));
        }
        seen.descriptors = count;
        seen.unmerged = flat.windows(2).filter(|w| continues(&w[0], &w[1])).count() as u64;
    }
    if let Err(e) = batch.clone().check(src_lens, dst_lens) {
        return Err(Finding::Refused { src, dst, why: e.to_string() });
    }
    Ok((moves, seen))
}

/// The runs of a batch by the formula of its module, in its order; `None` on overflow.
#[must_use]
pub fn expand(batch: &Batch) -> Option<Vec<Descriptor>> {
    let mut out = Vec::new();
    for section in batch.sections() {
        for base in section.bases.iter() {
            for part in &section.parts {
                for pair in part.pairs.iter() {
                    for k in 0..pair.count {
                        let s = u64::from(pair.src) + u64::from(k) * u64::from(part.src_step);
                        let d = u64::from(pair.dst) + u64::from(k) * u64::from(part.dst_step);
                        let mut points = vec![(
                            base.src_offset
                                .checked_add(part.src_add)?
                                .checked_add(s.checked_mul(part.src_block_stride)?)?,
                            base.dst_offset
                                .checked_add(part.dst_add)?
                                .checked_add(d.checked_mul(part.dst_block_stride)?)?,
                        )];
                        for dim in &part.nest.dims {
                            let mut next = Vec::new();
                            for (src, dst) in points {
                                for i in 0..dim.count {
                                    next.push((
                                        src.checked_add(i.checked_mul(dim.src_stride)?)?,
                                        dst.checked_add(i.checked_mul(dim.dst_stride)?)?,
                                    ));
                                }
                            }
                            points = next;
                        }
                        out.extend(points.into_iter().map(|(src_offset, dst_offset)| Descriptor {
                            src_region: base.src_region,
                            dst_region: base.dst_region,
                            src_offset,
                            dst_offset,
                            len: part.nest.run,
                        }));
                    }
                }
            }
        }
    }
    Some(out)
}

/// The cursor's descriptors through buffers of these lengths, in turn; a list of none or of zeros gives nothing.
#[must_use]
pub fn flatten(batch: &Batch, buffers: &[usize]) -> Vec<Descriptor> {
    let mut cursor = batch.cursor();
    let mut out = Vec::new();
    for &len in buffers.iter().filter(|&&len| len > 0).cycle() {
        let mut buffer = vec![Descriptor::default(); len];
        let n = cursor.fill(&mut buffer);
        if n == 0 {
            break;
        }
        out.extend_from_slice(&buffer[..n]);
    }
    out
}

/// The same bytes in the same order in the fewest descriptors.
#[must_use]
pub fn joined(list: &[Descriptor]) -> Vec<Descriptor> {
    let mut out: Vec<Descriptor> = Vec::new();
    for d in list {
        match out.last_mut() {
            Some(last) if continues(last, d) => last.len += d.len,
            _ => out.push(*d),
        }
    }
    out
}

fn continues(a: &Descriptor, b: &Descriptor) -> bool {
    a.src_region == b.src_region
        && a.dst_region == b.dst_region
        && a.src_offset + a.len == b.src_offset
        && a.dst_offset + a.len == b.dst_offset
}

/// The first byte, counted along both lists, that one list moves elsewhere than the other. Joined, lists of the same
/// bytes in the same order are equal.
fn first_difference(a: &[Descriptor], b: &[Descriptor]) -> Option<u64> {
    let (a, b) = (joined(a), joined(b));
    let mut byte = 0;
    for (x, y) in a.iter().zip(&b) {
        if x != y {
            let same_start = Descriptor { len: 0, ..*x } == Descriptor { len: 0, ..*y };
            return Some(byte + if same_start { x.len.min(y.len) } else { 0 });
        }
        byte += x.len;
    }
    (a.len() != b.len()).then_some(byte)
}
