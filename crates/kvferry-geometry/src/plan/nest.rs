//! From a phase to loops over bytes.

use alloc::vec::Vec;

use arrayvec::ArrayVec;

use super::walk::{Phase, TokenLoop};
use super::{ItemClass, SideGeometry};
use crate::batch::{Dim, MAX_DIMS, Nest};
use crate::layout::PagedView;
use crate::placement::{HeadRange, Placement};
use crate::spec::PagedItem;
use crate::units::Name;

/// Components that lie alike on both sides: `count` of `run` bytes for each (token, head).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cell {
    pub(super) run: u64,
    pub(super) count: u64,
    src: CellSide,
    dst: CellSide,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CellSide {
    /// Offset in the kernel block of the first head that moves.
    offset: u64,
    /// From one of the `count` to the next.
    stride: u64,
    head_stride: u64,
    entry_stride: u64,
}

/// The components of an item as cells; `None` where a view lacks a component (a proven manifest's doesn't).
pub(super) fn cells(
    item: &PagedItem,
    src: (&PagedView, &Placement),
    dst: (&PagedView, &Placement),
    heads: HeadRange,
) -> Option<Vec<Cell>> {
    let side = |(view, placed): (&PagedView, &Placement), name: &Name| -> Option<CellSide> {
        let c = view.components.iter().find(|c| c.name == *name)?;
        let skipped = u64::from(heads.start() - placed.heads.start());
        Some(CellSide {
            offset: c.offset.get() + skipped * c.head_stride.get(),
            stride: 0,
            head_stride: c.head_stride.get(),
            entry_stride: c.entry_stride.get(),
        })
    };
    let mut single: Vec<Cell> = Vec::new();
    for c in &item.components {
        single.push(Cell { run: c.width.get(), count: 1, src: side(src, &c.name)?, dst: side(dst, &c.name)? });
    }
    single.sort_by_key(|c| c.dst.offset);
    // Components side by side on both sides are one; evenly spaced equals are a loop.
    let mut fused: Vec<Cell> = Vec::new();
    for cell in single {
        match fused.last_mut() {
            Some(last) if last.joins(&cell) => last.run += cell.run,
            _ => fused.push(cell),
        }
    }
    let mut out: Vec<Cell> = Vec::new();
    for cell in fused {
        match out.last_mut() {
            Some(last) if last.extends_to(&cell) => {
                last.src.stride = (cell.src.offset - last.src.offset) / last.count;
                last.dst.stride = (cell.dst.offset - last.dst.offset) / last.count;
                last.count += 1;
            }
            _ => out.push(cell),
        }
    }
    Some(out)
}

impl Cell {
    fn strides_equal(&self, other: &Self) -> bool {
        let pair = |c: &CellSide| (c.head_stride, c.entry_stride);
        pair(&self.src) == pair(&other.src) && pair(&self.dst) == pair(&other.dst)
    }

    fn joins(&self, next: &Self) -> bool {
        self.strides_equal(next)
            && self.src.offset + self.run == next.src.offset
            && self.dst.offset + self.run == next.dst.offset
    }

    /// Whether `next` is one more step of the same loop.
    fn extends_to(&self, next: &Self) -> bool {
        let even = |a: &CellSide, b: &CellSide| {
            let far = b.offset.checked_sub(a.offset);
            far.is_some_and(|far| far > 0 && (self.count == 1 || a.stride.checked_mul(self.count) == Some(far)))
        };
        self.run == next.run && self.strides_equal(next) && even(&self.src, &next.src) && even(&self.dst, &next.dst)
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
        let heads = u64::from(class.heads.count());
        let of_cell = |cell: &Cell| heads * collapse(dims(class, cell, &phase, 1), cell.run).runs();
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
        nest: collapse(dims(class, cell, phase, u64::from(class.heads.count())), cell.run),
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

/// The fewest loops around the longest run: loops that continue the run join it, loops that continue each other become
/// one. What is left goes outermost by destination stride, so that writes go forward.
fn collapse(mut dims: ArrayVec<Dim, MAX_DIMS>, mut run: u64) -> Nest {
    dims.retain(|d| d.count > 1);
    while let Some(at) = dims.iter().position(|d| d.src_stride == run && d.dst_stride == run) {
        run *= dims[at].count;
        dims.remove(at);
    }
    dims.sort_by_key(|d| core::cmp::Reverse(d.dst_stride));
    let mut merged: ArrayVec<Dim, MAX_DIMS> = ArrayVec::new();
    for inner in dims {
        match merged.last_mut() {
            Some(outer)
                if inner.src_stride.checked_mul(inner.count) == Some(outer.src_stride)
                    && inner.dst_stride.checked_mul(inner.count) == Some(outer.dst_stride) =>
            {
                *outer = Dim { count: outer.count * inner.count, ..inner };
            }
            _ => merged.push(inner),
        }
    }
    Nest { dims: merged, run }
}
