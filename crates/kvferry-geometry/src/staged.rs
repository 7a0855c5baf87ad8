//! The staged way: few large moves into a dense buffer, then a local permutation.
//!
//! Where two layouts disagree inside blocks, a [direct](Place::Direct) batch has many small descriptors. A [`Staged`] pair of
//! batches moves the same bytes in two steps, one over the wire and one inside a rank, with a staging buffer between them:
//!
//! - at the [destination](Place::Destination), the wire step copies the source's bytes in the source's order, and the local
//!   step permutes them into place;
//! - at the [source](Place::Source), the local step gathers the bytes in the destination's order, and the wire step moves
//!   them as they are.
//!
//! So the side of the wire step that is real memory, the *anchor*, decides the order of the buffer: what is contiguous there
//! is contiguous in the buffer, across phases of one block and across the items of a row. The buffer is dense: it has as many
//! bytes as the batch moves. [`CostModel`] says which way is cheapest, with constants that can be set.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use arrayvec::ArrayVec;

use crate::batch::{Base, Batch, Dim, MAX_DIMS, Nest, PairRun, Part, Section, Side, joined};
use crate::units::RegionId;

mod cost;
mod digest;

pub use cost::{Choice, Cost, CostModel, Pools};

/// Where bytes are permuted, if anywhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// Nowhere: every run goes straight into place.
    Direct,
    /// At the destination, after the wire.
    Destination,
    /// At the source, before the wire.
    Source,
}

impl core::fmt::Display for Place {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Destination => "staged at the destination",
            Self::Source => "staged at the source",
        })
    }
}

/// A batch in two steps. Offsets of the buffer count from 0 in the region that stands for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Staged {
    /// The step between the ranks.
    pub wire: Batch,
    /// The step inside one rank: from the buffer into place at the destination, or into the buffer at the source.
    pub local: Batch,
    /// Length of the buffer.
    pub bytes: u64,
}

impl Staged {
    /// The two steps of a direct batch; `staging` is the id that the buffer's region has in them.
    ///
    /// `None` for [`Place::Direct`], and where the batch is so large that the buffer's blocks can't be counted in 32 bits.
    #[must_use]
    pub fn new(direct: &Batch, place: Place, staging: RegionId) -> Option<Self> {
        let anchor = match place {
            Place::Direct => return None,
            Place::Destination => Side::Src,
            Place::Source => Side::Dst,
        };
        let mut out = Builder { anchor, staging, at: 0, wire: Vec::new(), local: Vec::new() };
        for section in direct.sections() {
            for group in by_blocks(&section.parts, anchor) {
                for stretch in stretches(&group, anchor) {
                    out.add(&section.bases, &stretch)?;
                }
            }
        }
        Some(Self { wire: Batch::new(out.wire), local: Batch::new(out.local), bytes: out.at })
    }
}

/// One side of a part.
#[derive(Clone, Copy)]
struct Face {
    add: u64,
    block_stride: u64,
    step: u32,
}

fn face(part: &Part, side: Side) -> Face {
    match side {
        Side::Src => Face { add: part.src_add, block_stride: part.src_block_stride, step: part.src_step },
        Side::Dst => Face { add: part.dst_add, block_stride: part.dst_block_stride, step: part.dst_step },
    }
}

fn block(pair: &PairRun, side: Side) -> u32 {
    if side == Side::Src { pair.src } else { pair.dst }
}

fn stride(dim: &Dim, side: Side) -> u64 {
    if side == Side::Src { dim.src_stride } else { dim.dst_stride }
}

fn other(side: Side) -> Side {
    if side == Side::Src { Side::Dst } else { Side::Src }
}

/// What the pairs of a part are on one side: block stride, step, and runs of blocks that go on by the step.
type Blocks = (u64, u32, Vec<(u32, u32)>);

/// Equal for parts that go through the same blocks in the same way, however their pairs are cut into runs.
fn blocks(part: &Part, side: Side) -> Blocks {
    let Face { block_stride, step, .. } = face(part, side);
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for pair in part.pairs.iter() {
        let first = block(pair, side);
        match runs.last_mut() {
            Some((start, count)) if u64::from(*start) + u64::from(*count) * u64::from(step) == u64::from(first) => {
                *count = count.saturating_add(pair.count);
            }
            _ => runs.push((first, pair.count)),
        }
    }
    (block_stride, step, runs)
}

/// Parts that go through the same blocks of the anchor: the phases of a block that is larger than the other side's, say.
fn by_blocks(parts: &[Part], anchor: Side) -> Vec<Vec<&Part>> {
    let mut groups: Vec<Vec<&Part>> = Vec::new();
    let mut known: BTreeMap<Blocks, usize> = BTreeMap::new();
    for part in parts {
        let group = *known.entry(blocks(part, anchor)).or_insert(groups.len());
        match groups.get_mut(group) {
            Some(group) => group.push(part),
            None => groups.push(vec![part]),
        }
    }
    groups
}

/// What of an anchor's block lies together in the buffer.
struct Stretch<'a> {
    parts: Vec<&'a Part>,
    /// Where it starts in the anchor's block.
    start: u64,
    /// Its bytes in the buffer.
    len: u64,
    /// Whether the parts fill it without a gap, so that the buffer has a picture of it.
    whole: bool,
}

/// One past the last byte of a part in an anchor's block.
fn end(part: &Part, anchor: Side) -> u64 {
    let loops = part.nest.dims.iter().map(|d| (d.count - 1).saturating_mul(stride(d, anchor)));
    loops.fold(face(part, anchor).add.saturating_add(part.nest.run), u64::saturating_add)
}

fn bytes(part: &Part) -> u64 {
    part.nest.runs().saturating_mul(part.nest.run)
}

/// The stretches that parts of the same blocks fill; parts that fill none stand alone.
fn stretches<'a>(group: &[&'a Part], anchor: Side) -> Vec<Stretch<'a>> {
    let mut sorted = group.to_vec();
    sorted.sort_by_key(|p| face(p, anchor).add);
    let mut out: Vec<Stretch<'a>> = Vec::new();
    let mut rest = &sorted[..];
    while let Some((first, tail)) = rest.split_first() {
        // Parts whose spans meet or touch.
        let (start, mut far) = (face(first, anchor).add, end(first, anchor));
        let more = tail.iter().take_while(|p| {
            let joins = face(p, anchor).add <= far;
            far = if joins { far.max(end(p, anchor)) } else { far };
            joins
        });
        let (members, others) = rest.split_at(1 + more.count());
        rest = others;
        let total = members.iter().map(|p| bytes(p)).fold(0, u64::saturating_add);
        if total == far - start {
            out.push(Stretch { parts: members.to_vec(), start, len: total, whole: true });
        } else {
            let alone = |part: &&'a Part| Stretch {
                parts: vec![*part],
                start: face(part, anchor).add,
                len: bytes(part),
                whole: bytes(part) == end(part, anchor) - face(part, anchor).add,
            };
            out.extend(members.iter().map(alone));
        }
    }
    out
}

struct Builder {
    anchor: Side,
    staging: RegionId,
    /// End of the buffer so far.
    at: u64,
    wire: Vec<Section>,
    local: Vec<Section>,
}

impl Builder {
    fn add(&mut self, bases: &[Base], stretch: &Stretch<'_>) -> Option<()> {
        let Some(first) = stretch.parts.first() else { return Some(()) };
        let count = first.pair_count();
        u32::try_from(count).ok()?;
        // Items whose stretches lie end to end at the anchor are one longer stretch.
        let mut chains = self.chains(bases, if stretch.whole { Some(stretch.len) } else { None });
        chains.sort_by_key(Vec::len);
        for alike in chains.chunk_by(|a, b| a.len() == b.len()) {
            let row = stretch.len.checked_mul(alike[0].len() as u64)?;
            let area = row.checked_mul(count)?;
            let (mut anchors, mut places) = (Vec::new(), Vec::new());
            for chain in alike {
                anchors.push(self.base(self.anchor, *chain.first()?, self.at));
                let mut at = self.at;
                for base in chain {
                    places.push(self.base(other(self.anchor), base, at));
                    at = at.checked_add(stretch.len)?;
                }
                self.at = self.at.checked_add(area)?;
            }
            let wire = self.part(self.anchor, first, stretch, row);
            self.wire.push(Section { bases: anchors.into(), parts: vec![wire] });
            let local = stretch.parts.iter().map(|p| self.part(other(self.anchor), p, stretch, row)).collect();
            self.local.push(Section { bases: places.into(), parts: local });
        }
        Some(())
    }

    /// Bases that continue each other by `len` bytes at the anchor; each alone without a length.
    fn chains<'b>(&self, bases: &'b [Base], len: Option<u64>) -> Vec<Vec<&'b Base>> {
        let place = |b: &Base| match self.anchor {
            Side::Src => (b.src_region, b.src_offset),
            Side::Dst => (b.dst_region, b.dst_offset),
        };
        let mut sorted: Vec<&Base> = bases.iter().collect();
        sorted.sort_by_key(|b| place(b));
        let mut out: Vec<Vec<&Base>> = Vec::new();
        for base in sorted {
            let (region, offset) = place(base);
            let continues = |chain: &Vec<&Base>| {
                let last = chain.last().map(|b| place(b));
                last.is_some_and(|(r, o)| r == region && len.is_some_and(|len| o.checked_add(len) == Some(offset)))
            };
            match out.last_mut() {
                Some(chain) if continues(chain) => chain.push(base),
                _ => out.push(vec![base]),
            }
        }
        out
    }

    /// A base whose `side` is real and whose other side is the buffer. The wire step has the anchor for its real side.
    fn base(&self, side: Side, base: &Base, at: u64) -> Base {
        match side {
            Side::Src => Base { dst_region: self.staging, dst_offset: at, ..*base },
            Side::Dst => Base { src_region: self.staging, src_offset: at, ..*base },
        }
    }

    /// A part between its `side` and the buffer. On the anchor's side, a whole stretch is one run of a row of them.
    fn part(&self, side: Side, part: &Part, stretch: &Stretch<'_>, row: u64) -> Part {
        let real = face(part, side);
        let is_wire = side == self.anchor;
        let (nest, real_add, buffer_add) = if is_wire && stretch.whole {
            (Nest::run(row), stretch.start, 0)
        } else {
            let (dims, add) = self.loops(part, side, stretch);
            (Nest::collapsed(dims, part.nest.run), real.add, add)
        };
        let mut next = 0u32;
        let pairs = part.pairs.iter().map(|p| {
            let at = next;
            next = next.wrapping_add(p.count);
            if side == Side::Src {
                PairRun { src: p.src, dst: at, count: p.count }
            } else {
                PairRun { src: at, dst: p.dst, count: p.count }
            }
        });
        let (step, buffer_step) = (u64::from(real.step), 1);
        let steps = if side == Side::Src { (step, buffer_step) } else { (buffer_step, step) };
        let pairs = joined(pairs, steps, part.pairs.len()).into();
        match side {
            Side::Src => Part {
                src_add: real_add,
                dst_add: buffer_add,
                src_block_stride: real.block_stride,
                dst_block_stride: row,
                src_step: real.step,
                dst_step: 1,
                nest,
                pairs,
            },
            Side::Dst => Part {
                src_add: buffer_add,
                dst_add: real_add,
                src_block_stride: row,
                dst_block_stride: real.block_stride,
                src_step: 1,
                dst_step: real.step,
                nest,
                pairs,
            },
        }
    }

    /// The loops of a part between `side` and the buffer, and where the part starts in the buffer's stretch: a picture of the
    /// anchor's stretch where that is whole, else the part's bytes side by side in the anchor's order.
    fn loops(&self, part: &Part, side: Side, stretch: &Stretch<'_>) -> (ArrayVec<Dim, MAX_DIMS>, u64) {
        let mut inner_first = part.nest.dims.clone();
        inner_first.sort_by_key(|d| stride(d, self.anchor));
        let mut dense = part.nest.run;
        let mut dims: ArrayVec<Dim, MAX_DIMS> = ArrayVec::new();
        for d in &inner_first {
            let buffer = if stretch.whole { stride(d, self.anchor) } else { dense };
            dense = dense.saturating_mul(d.count);
            let real = stride(d, side);
            let (src_stride, dst_stride) = if side == Side::Src { (real, buffer) } else { (buffer, real) };
            dims.push(Dim { count: d.count, src_stride, dst_stride });
        }
        let add = if stretch.whole { face(part, self.anchor).add - stretch.start } else { 0 };
        (dims, add)
    }
}
