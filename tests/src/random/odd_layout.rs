//! Layouts that no style writes: loops nested in any order, gaps anywhere, regions shared in any way.

use kvferry_geometry::layout::{CacheLayout, ComponentView, KernelBlock, MemoryKind, PagedView, Region, View};
use kvferry_geometry::spec::{ModelSpec, PagedItem};
use kvferry_geometry::units::{Bytes, RegionId};

use super::{Choices, small};

/// An item of a rank that needs memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page {
    /// Index in the spec.
    pub(crate) item: usize,
    /// Its group.
    pub(crate) group: usize,
    /// Heads on this rank.
    pub(crate) heads: u32,
    /// Entries of a block on this rank.
    pub(crate) block_size: u32,
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
}

/// A view whose offset is still relative, with the bytes it spans.
struct Nested {
    view: PagedView,
    span: u64,
}

pub(crate) fn odd_layout(c: &mut Choices, spec: &ModelSpec, pages: &[Page], sharing: Sharing) -> CacheLayout {
    let mut pages = pages.to_vec();
    c.shuffle(&mut pages);
    let template = if c.chance(40) { Some(c.fork()) } else { None };
    let mut layout = CacheLayout { regions: Vec::new(), views: vec![None; spec.items().len()] };
    match sharing {
        Sharing::Apart => pages.iter().for_each(|page| place_behind(c, spec, &[*page], template.as_ref(), &mut layout)),
        Sharing::Behind => place_behind(c, spec, &pages, template.as_ref(), &mut layout),
        Sharing::Rows => {
            let mut groups: Vec<usize> = pages.iter().map(|p| p.group).collect();
            groups.sort_unstable();
            groups.dedup();
            for group in groups {
                let members: Vec<Page> = pages.iter().filter(|p| p.group == group).copied().collect();
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
        let mut axes = [Axis::Block, Axis::Kernel, Axis::Head, Axis::Entry, Axis::Component];
        let free = if own.chance(50) { 1 } else { 0 };
        own.shuffle(&mut axes[free..]);
        let mut nested = nest(&mut own, spec.items()[page.item].as_paged().unwrap(), page, &axes, blocks);
        if axes[0] == Axis::Block {
            nested.view.block_stride = Bytes::new(nested.view.block_stride.get() + between);
            nested.span += between * u64::from(blocks);
        }
        (nested.view.region, nested.view.offset) = (region, Bytes::new(end));
        layout.views[page.item] = Some(View::Paged(nested.view));
        end += nested.span + gap(c);
    }
    layout.regions.push(Region { len: Bytes::new(end), kind: MemoryKind::Host });
}

/// One region; within a row, the items of one group lie one after the other, and every group starts at its front.
fn place_rows(c: &mut Choices, spec: &ModelSpec, pages: &[Page], layout: &mut CacheLayout) {
    let region = RegionId::new(small(layout.regions.len() as u64));
    let (start, mut row) = (gap(c), 0);
    let mut ends: Vec<(usize, u64)> = Vec::new();
    let mut views = Vec::new();
    for page in pages {
        let mut axes = [Axis::Kernel, Axis::Head, Axis::Entry, Axis::Component];
        c.shuffle(&mut axes);
        let mut nested = nest(c, spec.items()[page.item].as_paged().unwrap(), page, &axes, page.blocks);
        if !ends.iter().any(|e| e.0 == page.group) {
            ends.push((page.group, 0));
        }
        let end = &mut ends.iter_mut().find(|e| e.0 == page.group).unwrap().1;
        (nested.view.region, nested.view.offset) = (region, Bytes::new(start + *end));
        *end += nested.span + gap(c);
        row = row.max(*end);
        views.push((page.item, nested.view));
    }
    let blocks = pages.iter().map(|p| u64::from(p.blocks)).max().unwrap_or(0);
    for (item, mut view) in views {
        view.block_stride = Bytes::new(row);
        layout.views[item] = Some(View::Paged(view));
    }
    layout.regions.push(Region { len: Bytes::new(start + row * blocks + gap(c)), kind: MemoryKind::Host });
}

fn shuffle_regions(c: &mut Choices, layout: &mut CacheLayout) {
    let mut order: Vec<usize> = (0..layout.regions.len()).collect();
    c.shuffle(&mut order);
    layout.regions = order.iter().map(|&old| layout.regions[old]).collect();
    for view in layout.views.iter_mut().flatten() {
        let View::Paged(view) = view else { continue };
        let new = order.iter().position(|&old| old == view.region.index()).unwrap();
        view.region = RegionId::new(small(new as u64));
    }
}

fn gap(c: &mut Choices) -> u64 {
    if c.chance(25) { c.within(1, 7) } else { 0 }
}

/// Strides of the loops, outermost first in `axes`, with gaps between the steps. Without `Axis::Block` the block stride
/// is left open.
fn nest(c: &mut Choices, paged: &PagedItem, page: &Page, axes: &[Axis], blocks: u32) -> Nested {
    let divisors: Vec<u32> = (1..=page.block_size).rev().filter(|d| page.block_size.is_multiple_of(*d)).collect();
    let kernel = c.pick(&divisors);
    let mut spans: Vec<u64> = paged.components.iter().map(|x| x.width.get()).collect();
    let mut components: Vec<ComponentView> =
        paged.components.iter().map(|x| ComponentView::new(x.name.clone(), 0, 0, 0)).collect();
    let (mut block_stride, mut kernel_stride, mut joined) = (0, 0, false);
    for axis in axes.iter().rev() {
        match axis {
            Axis::Component => {
                let mut order: Vec<usize> = (0..spans.len()).collect();
                c.shuffle(&mut order);
                let mut end = 0;
                for i in order {
                    components[i].offset = Bytes::new(end);
                    end += spans[i] + gap(c);
                }
                spans.fill(end);
                joined = true;
            }
            Axis::Block | Axis::Kernel => {
                // One stride for all components.
                let stride = spans.iter().max().unwrap() + gap(c);
                let count = if *axis == Axis::Block { blocks } else { page.block_size / kernel };
                *(if *axis == Axis::Block { &mut block_stride } else { &mut kernel_stride }) = stride;
                spans.fill(stride * u64::from(count));
            }
            Axis::Head | Axis::Entry => {
                let count = u64::from(if *axis == Axis::Head { page.heads } else { kernel });
                let common = gap(c);
                for (span, component) in spans.iter_mut().zip(&mut components) {
                    let stride = *span + if joined { common } else { gap(c) };
                    let field =
                        if *axis == Axis::Head { &mut component.head_stride } else { &mut component.entry_stride };
                    *field = Bytes::new(stride);
                    *span = stride * count;
                }
            }
        }
    }
    let span = spans.iter().copied().max().unwrap();
    // The order of a view's components is free.
    c.shuffle(&mut components);
    let view = PagedView {
        region: RegionId::ZERO,
        offset: Bytes::ZERO,
        block_stride: Bytes::new(block_stride),
        blocks,
        block_size: page.block_size,
        kernel: KernelBlock { size: kernel, stride: Bytes::new(kernel_stride) },
        components,
    };
    Nested { view, span }
}
