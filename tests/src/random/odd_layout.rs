//! Layouts that no style writes: loops nested in any order, gaps anywhere, regions shared in any way.

use kvferry_geometry::layout::{
    CacheLayout, Chunks, ComponentView, KernelBlock, MemoryKind, PagedView, PartView, Region, StateView, View,
};
use kvferry_geometry::placement::{HeadRange, PagedPlacement, Placement};
use kvferry_geometry::spec::{ItemKind, ModelSpec, PagedItem, StateItem, ValueHeads};
use kvferry_geometry::units::{Bytes, RegionId};

use super::engine::lcm;
use super::{Choices, small};

/// An item of a rank that needs memory.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    /// Index in the spec.
    pub(crate) item: usize,
    /// Its group.
    pub(crate) group: usize,
    /// What this rank has of it.
    pub(crate) placement: Placement,
    /// Tokens of a block on this rank; 0 of states.
    pub(crate) block_tokens: u32,
    /// Blocks of its group.
    pub(crate) blocks: u32,
}

/// How the items of a rank share regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sharing {
    /// A region for each item.
    Apart,
    /// One region, one item after the other.
    Behind,
    /// A region for each group; a row of all its items for each block.
    Rows,
    /// One region; a row for each block, in which every group starts at the front: the same bytes for several groups.
    Hybrid,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Axis {
    Block,
    Kernel,
    Head,
    Entry,
    Component,
    Chunk,
}

/// A view whose offset is still relative, with the bytes it spans.
struct Nested {
    view: View,
    span: u64,
}

pub(crate) fn odd_layout(c: &mut Choices, spec: &ModelSpec, pages: &[Page], sharing: Sharing) -> CacheLayout {
    let mut pages = pages.to_vec();
    c.shuffle(&mut pages);
    let template = if c.chance(40) { Some(c.fork()) } else { None };
    let mut layout = CacheLayout { regions: Vec::new(), views: vec![None; spec.items().len()] };
    match sharing {
        Sharing::Apart => pages
            .iter()
            .for_each(|page| place_behind(c, spec, std::slice::from_ref(page), template.as_ref(), &mut layout)),
        Sharing::Behind => place_behind(c, spec, &pages, template.as_ref(), &mut layout),
        Sharing::Rows => {
            let mut groups: Vec<usize> = pages.iter().map(|p| p.group).collect();
            groups.sort_unstable();
            groups.dedup();
            for group in groups {
                let members: Vec<Page> = pages.iter().filter(|p| p.group == group).cloned().collect();
                place_rows(c, spec, &members, &mut layout);
            }
        }
        Sharing::Hybrid => place_rows(c, spec, &pages, &mut layout),
    }
    shuffle_regions(c, &mut layout);
    layout
}

fn place_behind(
    c: &mut Choices,
    spec: &ModelSpec,
    pages: &[Page],
    template: Option<&Choices>,
    layout: &mut CacheLayout,
) {
    let region = RegionId::new(small(layout.regions.len() as u64));
    let mut end = gap(c);
    for page in pages {
        let blocks = page.blocks + small(if c.chance(30) { c.below(3) } else { 0 });
        let between = if template.is_some() { c.below(4) } else { gap(c) };
        // Some ranks lay all items out alike, apart from gaps between blocks.
        let mut own = template.cloned().unwrap_or_else(|| c.fork());
        let mut axes = [Axis::Block, Axis::Kernel, Axis::Head, Axis::Entry, Axis::Component, Axis::Chunk];
        let free = if own.chance(50) { 1 } else { 0 };
        own.shuffle(&mut axes[free..]);
        let mut nested = nest(&mut own, spec, page, &axes, blocks);
        let (_, stride) = place_of(&mut nested.view, region, end);
        if axes[0] == Axis::Block {
            *stride = Bytes::new(stride.get() + between);
            nested.span += between * u64::from(blocks);
        }
        layout.views[page.item] = Some(nested.view);
        end += nested.span + gap(c);
    }
    layout.regions.push(Region { len: Bytes::new(end), kind: MemoryKind::Host });
}

/// Sets a view's region and offset; gives its offset and stride.
fn place_of(view: &mut View, region: RegionId, offset: u64) -> (&mut Bytes, &mut Bytes) {
    let (r, o, stride) = match view {
        View::Paged(v) => (&mut v.region, &mut v.offset, &mut v.block_stride),
        View::State(v) => (&mut v.region, &mut v.offset, &mut v.slot_stride),
    };
    (*r, *o) = (region, Bytes::new(offset));
    (o, stride)
}

/// One region; within a row, the items of one group lie one after the other, and every group starts at its front.
fn place_rows(c: &mut Choices, spec: &ModelSpec, pages: &[Page], layout: &mut CacheLayout) {
    let region = RegionId::new(small(layout.regions.len() as u64));
    let (start, mut row) = (gap(c), 0);
    let mut ends: Vec<(usize, u64)> = Vec::new();
    let mut views = Vec::new();
    for page in pages {
        let mut axes = [Axis::Kernel, Axis::Head, Axis::Entry, Axis::Component, Axis::Chunk];
        c.shuffle(&mut axes);
        let mut nested = nest(c, spec, page, &axes, page.blocks);
        if !ends.iter().any(|e| e.0 == page.group) {
            ends.push((page.group, 0));
        }
        let end = &mut ends.iter_mut().find(|e| e.0 == page.group).unwrap().1;
        place_of(&mut nested.view, region, start + *end);
        *end += nested.span + gap(c);
        row = row.max(*end);
        views.push((page.item, nested.view));
    }
    let blocks = pages.iter().map(|p| u64::from(p.blocks)).max().unwrap_or(0);
    for (item, mut view) in views {
        let offset = view.offset().get();
        *place_of(&mut view, region, offset).1 = Bytes::new(row);
        layout.views[item] = Some(view);
    }
    layout.regions.push(Region { len: Bytes::new(start + row * blocks + gap(c)), kind: MemoryKind::Host });
}

/// Registers the regions in another order.
pub(crate) fn shuffle_regions(c: &mut Choices, layout: &mut CacheLayout) {
    let mut order: Vec<usize> = (0..layout.regions.len()).collect();
    c.shuffle(&mut order);
    layout.regions = order.iter().map(|&old| layout.regions[old]).collect();
    for view in layout.views.iter_mut().flatten() {
        let new = order.iter().position(|&old| old == view.region().index()).unwrap();
        let offset = view.offset().get();
        place_of(view, RegionId::new(small(new as u64)), offset);
    }
}

fn gap(c: &mut Choices) -> u64 {
    if c.chance(25) { c.within(1, 7) } else { 0 }
}

fn nest(c: &mut Choices, spec: &ModelSpec, page: &Page, axes: &[Axis], blocks: u32) -> Nested {
    match (&spec.items()[page.item].kind, &page.placement) {
        (ItemKind::Paged(paged), Placement::Paged(placed)) => nest_paged(c, paged, placed, page, axes, blocks),
        (ItemKind::State(state), Placement::State(placed)) => nest_state(c, state, &placed.parts, axes, blocks),
        _ => panic!("a placement of another kind"),
    }
}

/// Loops inside out: every component has a number of steps along each axis.
struct Loops {
    spans: Vec<u64>,
    /// Whether the components lie in one cell already, so that they step together.
    joined: bool,
}

impl Loops {
    /// One step along an axis, the same for all components.
    fn common(&mut self, c: &mut Choices, count: u64) -> u64 {
        let stride = self.spans.iter().max().unwrap() + gap(c);
        self.spans.fill(stride * count);
        stride
    }

    /// Steps along an axis by component: `counts` of them, each as long as `lengths` of the finest. Gives their strides.
    fn each(&mut self, c: &mut Choices, counts: &[u64], lengths: &[u64]) -> Vec<u64> {
        if self.joined {
            let stride = self.spans.iter().max().unwrap() + gap(c);
            let most = counts.iter().zip(lengths).map(|(n, l)| n * l).max().unwrap();
            self.spans.fill(stride * most);
            return lengths.iter().map(|l| stride * l).collect();
        }
        let mut strides = Vec::new();
        for (span, count) in self.spans.iter_mut().zip(counts) {
            strides.push(*span + gap(c));
            *span = strides[strides.len() - 1] * count;
        }
        strides
    }

    /// Puts the components side by side; gives their offsets.
    fn join(&mut self, c: &mut Choices) -> Vec<u64> {
        let mut order: Vec<usize> = (0..self.spans.len()).collect();
        c.shuffle(&mut order);
        let mut offsets = vec![0; order.len()];
        let mut end = 0;
        for i in order {
            offsets[i] = end;
            end += self.spans[i] + gap(c);
        }
        self.spans.fill(end);
        self.joined = true;
        offsets
    }
}

/// Strides of the loops, outermost first in `axes`, with gaps between the steps. Without `Axis::Block` the block stride
/// is left open.
fn nest_paged(
    c: &mut Choices,
    paged: &PagedItem,
    placed: &PagedPlacement,
    page: &Page,
    axes: &[Axis],
    blocks: u32,
) -> Nested {
    let block_size = page.block_tokens / paged.tokens_per_entry;
    // A kernel block holds whole values.
    let values = paged.components.iter().fold(1, |l, x| lcm(l, u64::from(x.span)));
    let fits = |d: &u32| block_size.is_multiple_of(*d) && u64::from(*d).is_multiple_of(values);
    let divisors: Vec<u32> = (1..=block_size).rev().filter(fits).collect();
    let kernel = c.pick(&divisors);
    let pieces: Vec<u64> = paged
        .components
        .iter()
        .map(|x| {
            let width = x.width.get();
            let all: Vec<u64> = (1..=width).rev().filter(|d| width.is_multiple_of(*d)).collect();
            if c.chance(15) { c.pick(&all) } else { width }
        })
        .collect();
    let mut loops = Loops { spans: pieces.clone(), joined: false };
    let views = paged.components.iter().map(|x| ComponentView::new(x.name.clone(), 0, 0, 0));
    let mut components: Vec<ComponentView> = views.collect();
    let (mut block_stride, mut kernel_stride) = (0, 0);
    let spans: Vec<u64> = paged.components.iter().map(|x| u64::from(x.span)).collect();
    let ones = vec![1; spans.len()];
    for axis in axes.iter().rev() {
        match axis {
            Axis::Component => {
                for (component, offset) in components.iter_mut().zip(loops.join(c)) {
                    component.offset = Bytes::new(offset);
                }
            }
            Axis::Block => block_stride = loops.common(c, u64::from(blocks)),
            Axis::Kernel => kernel_stride = loops.common(c, u64::from(block_size / kernel)),
            Axis::Head => {
                let heads = u64::from(placed.heads.count());
                let of = |shared| if shared { 1 } else { heads };
                let counts: Vec<u64> = paged.components.iter().map(|x| of(x.heads == ValueHeads::Shared)).collect();
                for (component, stride) in components.iter_mut().zip(loops.each(c, &counts, &ones)) {
                    component.head_stride = Bytes::new(stride);
                }
            }
            Axis::Entry => {
                let counts: Vec<u64> = spans.iter().map(|s| u64::from(kernel) / s).collect();
                for (component, stride) in components.iter_mut().zip(loops.each(c, &counts, &spans)) {
                    component.entry_stride = Bytes::new(stride);
                }
            }
            Axis::Chunk => {
                let widths = paged.components.iter().map(|x| x.width.get());
                let counts: Vec<u64> = widths.zip(&pieces).map(|(w, p)| w / p).collect();
                for (i, stride) in loops.each(c, &counts, &ones).into_iter().enumerate() {
                    if counts[i] > 1 {
                        components[i].chunks =
                            Some(Chunks { bytes: Bytes::new(pieces[i]), stride: Bytes::new(stride) });
                    }
                }
            }
        }
    }
    let span = loops.spans.iter().copied().max().unwrap();
    // The order of a view's components is free.
    c.shuffle(&mut components);
    let view = PagedView {
        region: RegionId::ZERO,
        offset: Bytes::ZERO,
        block_stride: Bytes::new(block_stride),
        blocks,
        block_size,
        kernel: KernelBlock { size: kernel, stride: Bytes::new(kernel_stride) },
        components,
    };
    Nested { view: View::Paged(view), span }
}

/// The same of a state: blocks are slots, heads are units, entries are rows, components are parts.
fn nest_state(c: &mut Choices, state: &StateItem, units: &[HeadRange], axes: &[Axis], slots: u32) -> Nested {
    let mut loops = Loops { spans: state.parts.iter().map(|p| p.width.get()).collect(), joined: false };
    let mut parts: Vec<PartView> = state.parts.iter().map(|p| PartView::new(p.name.clone(), 0, 0, 0)).collect();
    for part in &mut parts {
        part.scratch_rows = if c.chance(25) { small(c.within(1, 2)) } else { 0 };
    }
    let mut slot_stride = 0;
    let ones = vec![1; parts.len()];
    for axis in axes.iter().rev() {
        match axis {
            Axis::Component => {
                for (part, offset) in parts.iter_mut().zip(loops.join(c)) {
                    part.offset = Bytes::new(offset);
                }
            }
            Axis::Block => slot_stride = loops.common(c, u64::from(slots)),
            Axis::Head => {
                let counts: Vec<u64> = units.iter().map(|u| u64::from(u.count())).collect();
                for (part, stride) in parts.iter_mut().zip(loops.each(c, &counts, &ones)) {
                    part.unit_stride = Bytes::new(stride);
                }
            }
            Axis::Entry => {
                let rows = state.parts.iter().zip(&parts).map(|(p, v)| u64::from(p.rows + v.scratch_rows));
                let counts: Vec<u64> = rows.collect();
                for (part, stride) in parts.iter_mut().zip(loops.each(c, &counts, &ones)) {
                    part.row_stride = Bytes::new(stride);
                }
            }
            Axis::Kernel | Axis::Chunk => {}
        }
    }
    let span = loops.spans.iter().copied().max().unwrap();
    c.shuffle(&mut parts);
    let slot_stride = Bytes::new(slot_stride);
    let view = StateView { region: RegionId::ZERO, offset: Bytes::ZERO, slot_stride, slots, parts };
    Nested { view: View::State(view), span }
}
