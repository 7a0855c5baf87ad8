//! From a phase to loops over bytes.

use alloc::vec::Vec;

use arrayvec::ArrayVec;

use super::walk::{Phase, TokenLoop};
use super::{ItemClass, SideGeometry};
use crate::batch::{Dim, MAX_DIMS, Nest};
use crate::layout::{Chunks, PagedView, PartView};
use crate::placement::{HeadRange, PagedPlacement};
use crate::spec::{Component, StatePart, ValueHeads};

/// Bytes of an entry that lie alike on both sides: `count` of `run` bytes for each of `units` heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cell {
    run: u64,
    count: u64,
    units: u64,
    src: CellSide,
    dst: CellSide,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct CellSide {
    /// Offset in the kernel block of the first head that moves.
    offset: u64,
    /// From one of the `count` to the next.
    stride: u64,
    head_stride: u64,
    entry_stride: u64,
}

/// Some components of an item as cells; `None` where a view lacks one (a proven manifest's doesn't).
pub(super) fn paged_cells(
    components: &[&Component],
    src: (&PagedView, &PagedPlacement),
    dst: (&PagedView, &PagedPlacement),
    heads: HeadRange,
) -> Option<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    for c in components {
        let shared = c.heads == ValueHeads::Shared;
        let side = |(view, placed): (&PagedView, &PagedPlacement)| -> Option<(CellSide, Option<Chunks>)> {
            let v = view.components.iter().find(|v| v.name == c.name)?;
            let skipped = if shared { 0 } else { u64::from(heads.start().checked_sub(placed.heads.start())?) };
            let head_stride = v.head_stride.get();
            let offset = v.offset.get() + skipped * head_stride;
            Some((CellSide { offset, stride: 0, head_stride, entry_stride: v.entry_stride.get() }, v.chunks))
        };
        let units = if shared { 1 } else { u64::from(heads.count()) };
        let ((s, s_chunks), (d, d_chunks)) = (side(src)?, side(dst)?);
        // A value is cut wherever either side cuts it.
        let mut at = 0;
        while at < c.width.get() {
            let ((s_add, s_left), (d_add, d_left)) = (chunk(s_chunks, at, c), chunk(d_chunks, at, c));
            let run = s_left.min(d_left);
            let (src, dst) = (CellSide { offset: s.offset + s_add, ..s }, CellSide { offset: d.offset + d_add, ..d });
            cells.push(Cell { run, count: 1, units, src, dst });
            at += run;
        }
    }
    Some(fused(cells))
}

/// Where byte `at` of a value lies, and how many bytes follow it there.
fn chunk(chunks: Option<Chunks>, at: u64, component: &Component) -> (u64, u64) {
    let Some(Chunks { bytes, stride }) = chunks else { return (at, component.width.get() - at) };
    let bytes = bytes.get().max(1);
    (at / bytes * stride.get() + at % bytes, bytes - at % bytes)
}

/// Some units of one part of a state as a cell.
pub(super) fn state_cell(
    part: &StatePart,
    (src, src_units): (&PartView, HeadRange),
    (dst, dst_units): (&PartView, HeadRange),
    units: HeadRange,
) -> Cell {
    let side = |view: &PartView, placed: HeadRange| {
        let head_stride = view.unit_stride.get();
        let skipped = u64::from(units.start().saturating_sub(placed.start()));
        let offset = view.offset.get() + skipped * head_stride;
        CellSide { offset, stride: view.row_stride.get(), head_stride, entry_stride: 0 }
    };
    let (src, dst) = (side(src, src_units), side(dst, dst_units));
    let (run, count, units) = (part.width.get(), u64::from(part.rows), u64::from(units.count()));
    // What is one run on both sides can join its neighbours.
    let loops = [(count, src.stride, dst.stride), (units, src.head_stride, dst.head_stride)];
    let dims = loops.map(|(count, src_stride, dst_stride)| Dim { count, src_stride, dst_stride });
    let nest = Nest::collapsed(dims.into_iter().collect(), run);
    if nest.dims.is_empty() {
        let plain = |side: CellSide| CellSide { offset: side.offset, ..CellSide::default() };
        return Cell { run: nest.run, count: 1, units: 1, src: plain(src), dst: plain(dst) };
    }
    Cell { run, count, units, src, dst }
}

/// Cells side by side on both sides become one; evenly spaced equals become a loop.
pub(super) fn fused(mut cells: Vec<Cell>) -> Vec<Cell> {
    cells.sort_by_key(|c| c.dst.offset);
    let mut joined: Vec<Cell> = Vec::new();
    for cell in cells {
        match joined.last_mut() {
            Some(last) if last.joins(&cell) => last.run += cell.run,
            _ => joined.push(cell),
        }
    }
    let mut out: Vec<Cell> = Vec::new();
    for cell in joined {
        match out.last_mut() {
            Some(last) if last.extends_to(&cell) => {
                last.src.stride = (cell.src.offset - last.src.offset) / last.count;
                last.dst.stride = (cell.dst.offset - last.dst.offset) / last.count;
                last.count += 1;
            }
            _ => out.push(cell),
        }
    }
    out
}

impl Cell {
    /// Bytes of one entry.
    pub(super) fn bytes(&self) -> u64 {
        self.run * self.count * self.units
    }

    fn strides_equal(&self, other: &Self) -> bool {
        let pair = |c: &CellSide| (c.head_stride, c.entry_stride);
        self.units == other.units && pair(&self.src) == pair(&other.src) && pair(&self.dst) == pair(&other.dst)
    }

    fn joins(&self, next: &Self) -> bool {
        self.strides_equal(next)
            && (self.count, next.count) == (1, 1)
            && self.src.offset + self.run == next.src.offset
            && self.dst.offset + self.run == next.dst.offset
    }

    /// Whether `next` is one more step of the same loop.
    fn extends_to(&self, next: &Self) -> bool {
        let even = |a: &CellSide, b: &CellSide| {
            let far = b.offset.checked_sub(a.offset);
            far.is_some_and(|far| far > 0 && (self.count == 1 || a.stride.checked_mul(self.count) == Some(far)))
        };
        self.run == next.run
            && next.count == 1
            && self.strides_equal(next)
            && even(&self.src, &next.src)
            && even(&self.dst, &next.dst)
    }
}

/// One nest of a phase with what is added to both offsets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PlacedNest {
    pub(super) src_add: u64,
    pub(super) dst_add: u64,
    pub(super) nest: Nest,
}

/// A phase with its nests, one for each cell of the class.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct CompiledPhase {
    pub(super) phase: Phase,
    pub(super) nests: Vec<PlacedNest>,
    /// Contiguous ranges of all cells where nothing is joined across heads.
    pub(super) ranges: u64,
}

impl CompiledPhase {
    pub(super) fn new(class: &ItemClass, phase: Phase) -> Self {
        let nests = class.cells.iter().map(|cell| place(class, cell, &phase)).collect();
        let of_cell = |cell: &Cell| cell.units * Nest::collapsed(dims(class, cell, &phase, 1), cell.run).runs();
        let ranges = class.cells.iter().map(of_cell).sum();
        Self { phase, nests, ranges }
    }
}

/// Where all bytes of one token are one run on both sides, with the next token right behind: (its bytes, offset at the
/// source, offset at the destination).
pub(super) fn token_run(class: &ItemClass) -> Option<(u64, u64, u64)> {
    let [cell] = class.cells[..] else { return None };
    let PlacedNest { src_add, dst_add, nest: Nest { dims, run } } = place(class, &cell, &Phase::start());
    let goes_on = cell.src.entry_stride == run && cell.dst.entry_stride == run;
    (dims.is_empty() && goes_on).then_some((run, src_add, dst_add))
}

fn place(class: &ItemClass, cell: &Cell, phase: &Phase) -> PlacedNest {
    PlacedNest {
        src_add: cell.src.offset + step(&class.src, &cell.src, phase.src_start),
        dst_add: cell.dst.offset + step(&class.dst, &cell.dst, phase.dst_start),
        nest: Nest::collapsed(dims(class, cell, phase, cell.units), cell.run),
    }
}

fn step(side: &SideGeometry, c: &CellSide, (kernels, entries): (u64, u64)) -> u64 {
    kernels * side.kernel_stride + entries * c.entry_stride
}

/// The loops of a cell in a phase, for `heads` heads.
fn dims(class: &ItemClass, cell: &Cell, phase: &Phase, heads: u64) -> ArrayVec<Dim, MAX_DIMS> {
    let mut dims: ArrayVec<Dim, MAX_DIMS> = ArrayVec::new();
    dims.push(Dim { count: cell.count, src_stride: cell.src.stride, dst_stride: cell.dst.stride });
    dims.push(Dim { count: heads, src_stride: cell.src.head_stride, dst_stride: cell.dst.head_stride });
    for TokenLoop { count, src, dst } in &phase.loops {
        dims.push(Dim {
            count: *count,
            src_stride: step(&class.src, &cell.src, *src),
            dst_stride: step(&class.dst, &cell.dst, *dst),
        });
    }
    dims.push(Dim { count: phase.len, src_stride: cell.src.entry_stride, dst_stride: cell.dst.entry_stride });
    dims
}
