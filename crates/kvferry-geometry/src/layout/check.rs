//! The proof that a rank's views are sound.

use alloc::vec;
use alloc::vec::Vec;

use super::{CacheLayout, ComponentView, PagedView, StateView, View, overlap};
use crate::placement::{HeadRange, PagedPlacement, Placement, RankPlacement, StatePlacement};
use crate::spec::{Item, ItemKind, MAX_ROWS, ModelSpec, PagedItem, StateItem};
use crate::units::{Bytes, ItemId, Name, RegionId};

/// A fault of one view.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The lists of placements and views are not as long as the item list.
    #[error("{what} lists {got} items, but the model has {expected}")]
    ItemCount {
        /// Which list.
        what: &'static str,
        /// Its length.
        got: usize,
        /// Items of the model.
        expected: usize,
    },
    /// An item is placed here but has no view.
    #[error("item {item}: placed on this rank but no view says where it lies")]
    MissingView {
        /// The item.
        item: Name,
    },
    /// An item has a view but is not placed here.
    #[error("item {item}: has a view on this rank but is not placed here")]
    UnplacedView {
        /// The item.
        item: Name,
    },
    /// A paged item with the placement or view of a state, or the other way round.
    #[error("item {item}: it is {kind}, but its {what} on this rank is of the other kind")]
    Kind {
        /// The item.
        item: Name,
        /// What the item is.
        kind: &'static str,
        /// Placement or view.
        what: &'static str,
    },
    /// A placement of a state names another number of parts.
    #[error("item {item}: its placement has units for {got} parts, but it has {expected}")]
    PartCount {
        /// The item.
        item: Name,
        /// Parts placed.
        got: usize,
        /// Parts of the item.
        expected: usize,
    },
    /// The heads or units of a placement are not those of the item.
    #[error("item {item}: placed heads or units {heads} are not among its {total}")]
    HeadsOutOfItem {
        /// The item.
        item: Name,
        /// The interval placed.
        heads: HeadRange,
        /// Heads of the item, or units of the part.
        total: u32,
    },
    /// The view names a region that isn't there.
    #[error("item {item}: its view names region {region}, but this rank registers {registered}")]
    UnknownRegion {
        /// The item.
        item: Name,
        /// The region named.
        region: RegionId,
        /// Regions registered.
        registered: usize,
    },
    /// The view's component or part names are not the item's.
    #[error("item {item}: the view's components or parts are {got:?}, the item's are {expected:?}")]
    Components {
        /// The item.
        item: Name,
        /// Names of the view.
        got: Vec<Name>,
        /// Names of the item.
        expected: Vec<Name>,
    },
    /// A region longer than any memory.
    #[error("region {region} has {len}, more than the {limit} that a region can have")]
    RegionTooLong {
        /// The region.
        region: RegionId,
        /// Its length.
        len: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// A size outside its range.
    #[error("item {item}: {what} is {got}; it must be 1 to {limit}")]
    OutOfRange {
        /// The item.
        item: Name,
        /// Which size.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The largest allowed.
        limit: u64,
    },
    /// The kernel's block doesn't divide the scheduler's.
    #[error("item {item}: kernel block {kernel} does not divide block size {block_size}")]
    KernelBlock {
        /// The item.
        item: Name,
        /// Entries of a kernel block.
        kernel: u32,
        /// Entries of a block.
        block_size: u32,
    },
    /// A value covers a number of entries that doesn't divide the kernel's block.
    #[error(
        "item {item}: component {component} has one value for {span} entries, which does not divide kernel block {kernel}"
    )]
    Span {
        /// The item.
        item: Name,
        /// The component.
        component: Name,
        /// Entries of a value.
        span: u32,
        /// Entries of a kernel block.
        kernel: u32,
    },
    /// Context-parallel ranks cut what one value covers.
    #[error(
        "item {item}: component {component} has one value for {tokens} tokens, but context-parallel ranks are dealt {interleave} \
         tokens at a time; use an interleave that is a multiple"
    )]
    SpanInterleave {
        /// The item.
        item: Name,
        /// The component.
        component: Name,
        /// Tokens of a value.
        tokens: u64,
        /// Tokens dealt out at a time.
        interleave: u32,
    },
    /// Chunks don't divide a value.
    #[error("item {item}: chunks of {chunk} do not divide component {component} of {width}, or are more than {limit}")]
    Chunk {
        /// The item.
        item: Name,
        /// The component.
        component: Name,
        /// Bytes of a chunk.
        chunk: Bytes,
        /// Bytes of a value.
        width: Bytes,
        /// The most chunks of a value.
        limit: u64,
    },
    /// The interleave doesn't divide the block size, so that a stripe would cross a block's end.
    #[error("item {item}: interleave {interleave} does not divide block size {block_size} (in tokens)")]
    Interleave {
        /// The item.
        item: Name,
        /// Tokens dealt out at a time.
        interleave: u32,
        /// Tokens that the entries of a block stand for.
        block_size: u64,
    },
    /// The view reaches beyond its region.
    #[error("item {item}: its view reaches byte {end} of region {region}, which ends at {len}")]
    OutOfRegion {
        /// The item.
        item: Name,
        /// The region.
        region: RegionId,
        /// One past the last byte of the view.
        end: u128,
        /// Length of the region.
        len: Bytes,
    },
    /// Two places of one item, or of two items of one group, share bytes.
    #[error(
        "items {first} and {second} of one cache group share bytes of region {region}: a write to one would change the other"
    )]
    Overlap {
        /// One item.
        first: Name,
        /// The other; may be the same.
        second: Name,
        /// The region.
        region: RegionId,
    },
    /// Strides so irregular that freedom from overlap could not be proven with bounded work.
    #[error("item {item}: its strides are too irregular to prove that its blocks do not overlap; use nested strides")]
    Unprovable {
        /// The item.
        item: Name,
    },
}

/// The most chunks of a value.
const MAX_CHUNKS: u64 = 1 << 12;
/// The most blocks of a view and the most entries of a block.
const MAX_BLOCKS: u32 = 1 << 30;
const MAX_BLOCK_SIZE: u32 = 1 << 20;
/// The longest region and the largest stride: as much as an address space has.
const MAX_REGION: u64 = 1 << 48;

impl CacheLayout {
    /// Proves that every view lies inside its region and that no two places of one group overlap. `groups` lists the
    /// items that share a block table.
    ///
    /// # Errors
    /// All faults of all views.
    pub fn check(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        groups: &[Vec<ItemId>],
    ) -> Result<(), Vec<LayoutError>> {
        self.check_within(spec, placement, groups, &mut { overlap::MAX_RUNS })
    }

    /// As [`check`](Self::check), listing at most `budget` runs of memory and taking them off it.
    pub(crate) fn check_within(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        groups: &[Vec<ItemId>],
        budget: &mut u64,
    ) -> Result<(), Vec<LayoutError>> {
        let mut errors = Vec::new();
        for (region, r) in (0u32..).map(RegionId::new).zip(&self.regions) {
            if r.len.get() > MAX_REGION {
                errors.push(LayoutError::RegionTooLong { region, len: r.len, limit: Bytes::new(MAX_REGION) });
            }
        }
        let expected = spec.items().len();
        for (what, got) in [("the placement", placement.len()), ("the layout", self.views.len())] {
            if got != expected {
                errors.push(LayoutError::ItemCount { what, got, expected });
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        let mut sound = vec![false; expected];
        // Items are mostly alike: what was proven of one needs no proof for the next.
        let mut proven: Option<ItemId> = None;
        for (id, item) in spec.iter() {
            if proven.is_some_and(|before| self.is_alike(spec, placement, before, id)) {
                sound[id.index()] = true;
                continue;
            }
            let name = &item.name;
            match (&placement[id.index()], &self.views[id.index()]) {
                (None, None) => {}
                (Some(_), None) => errors.push(LayoutError::MissingView { item: name.clone() }),
                (None, Some(_)) => errors.push(LayoutError::UnplacedView { item: name.clone() }),
                (Some(p), Some(view)) => {
                    let before = errors.len();
                    self.check_item(item, p, view, &mut errors);
                    sound[id.index()] = errors.len() == before;
                    if sound[id.index()] {
                        proven = Some(id);
                    }
                }
            }
        }
        for group in groups {
            self.check_overlap(spec, placement, group, &sound, budget, &mut errors);
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Whether two items are of one kind, placed and laid out alike, each in a region of the same length.
    fn is_alike(&self, spec: &ModelSpec, placement: &RankPlacement, a: ItemId, b: ItemId) -> bool {
        let of = |id: ItemId| {
            let view = self.views.get(id.index())?.as_ref()?;
            let len = self.regions.get(view.region().index())?.len;
            Some((&spec.get(id)?.kind, placement.get(id.index())?.as_ref()?, view, len))
        };
        match (of(a), of(b)) {
            (Some(a), Some(b)) => a.0 == b.0 && a.1 == b.1 && a.3 == b.3 && a.2.is_alike(b.2),
            _ => false,
        }
    }

    fn check_item(&self, item: &Item, placement: &Placement, view: &View, errors: &mut Vec<LayoutError>) {
        let before = errors.len();
        let name = &item.name;
        match (&item.kind, placement, view) {
            (ItemKind::Paged(paged), Placement::Paged(p), View::Paged(v)) => check_paged(name, paged, p, v, errors),
            (ItemKind::State(state), Placement::State(p), View::State(v)) => check_state(name, state, p, v, errors),
            (kind, p, v) => {
                let is_paged = matches!(kind, ItemKind::Paged(_));
                let kind = if is_paged { "a paged item" } else { "a state" };
                for (what, paged) in [("placement", p.as_paged().is_some()), ("view", v.as_paged().is_some())] {
                    if paged != is_paged {
                        errors.push(LayoutError::Kind { item: name.clone(), kind, what });
                    }
                }
                return;
            }
        }
        for stride in [view.stride()].iter().filter(|s| s.get() > MAX_REGION) {
            out_of_range(name, "a stride", stride.get(), MAX_REGION, errors);
        }
        let Some(region) = self.regions.get(view.region().index()) else {
            let (item, region, registered) = (name.clone(), view.region(), self.regions.len());
            errors.push(LayoutError::UnknownRegion { item, region, registered });
            return;
        };
        if errors.len() == before {
            let end = overlap::extents(item, placement, view).iter().map(overlap::Extent::end).max().unwrap_or(0);
            if end > u128::from(region.len.get()) {
                let (item, region, len) = (name.clone(), view.region(), region.len);
                errors.push(LayoutError::OutOfRegion { item, region, end, len });
            }
        }
    }

    fn check_overlap(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        group: &[ItemId],
        sound: &[bool],
        budget: &mut u64,
        errors: &mut Vec<LayoutError>,
    ) {
        // Places can only meet within one region.
        let view_of = |id: ItemId| self.views.get(id.index()).and_then(Option::as_ref);
        let mut by_region: Vec<(RegionId, ItemId)> = group
            .iter()
            .filter(|id| sound.get(id.index()) == Some(&true))
            .filter_map(|&id| Some((view_of(id)?.region(), id)))
            .collect();
        by_region.sort_unstable();
        let mut proven: Option<ItemId> = None;
        for members in by_region.chunk_by(|a, b| a.0 == b.0) {
            let region = members[0].0;
            let alone = if let [(_, id)] = members { Some(*id) } else { None };
            if alone.zip(proven).is_some_and(|(id, before)| self.is_alike(spec, placement, before, id)) {
                continue;
            }
            let extents_of = |id: ItemId| {
                let (item, p, view) = (spec.get(id)?, placement.get(id.index())?.as_ref()?, view_of(id)?);
                Some(overlap::extents(item, p, view).into_iter().map(move |e| (id, e)))
            };
            let members: Vec<_> = members.iter().filter_map(|&(_, id)| extents_of(id)).flatten().collect();
            let name = |id: ItemId| spec.get(id).map_or_else(|| "?".into(), |i| i.name.clone());
            match overlap::prove_disjoint(members, budget) {
                Ok(()) => proven = alone.or(proven),
                Err(overlap::Failure::Overlap(a, b)) => {
                    errors.push(LayoutError::Overlap { first: name(a), second: name(b), region });
                }
                Err(overlap::Failure::Unprovable(a)) => errors.push(LayoutError::Unprovable { item: name(a) }),
            }
        }
    }
}

fn out_of_range(item: &Name, what: &'static str, got: u64, limit: u64, errors: &mut Vec<LayoutError>) {
    errors.push(LayoutError::OutOfRange { item: item.clone(), what, got, limit });
}

/// Whether the names of a view are those of the item, in any order.
fn check_names<'a>(
    item: &Name,
    got: impl Iterator<Item = &'a Name>,
    expected: impl Iterator<Item = &'a Name>,
    errors: &mut Vec<LayoutError>,
) {
    let (mut got, mut expected): (Vec<Name>, Vec<Name>) = (got.cloned().collect(), expected.cloned().collect());
    got.sort();
    expected.sort();
    if got != expected {
        errors.push(LayoutError::Components { item: item.clone(), got, expected });
    }
}

fn check_units(item: &Name, heads: HeadRange, total: u32, errors: &mut Vec<LayoutError>) {
    if heads.end() > total {
        errors.push(LayoutError::HeadsOutOfItem { item: item.clone(), heads, total });
    }
}

fn check_paged(name: &Name, paged: &PagedItem, p: &PagedPlacement, view: &PagedView, errors: &mut Vec<LayoutError>) {
    let item = || name.clone();
    check_units(name, p.heads, paged.heads, errors);
    let kernel = view.kernel.size;
    for (what, got, limit) in [
        ("blocks", view.blocks, MAX_BLOCKS),
        ("block size", view.block_size, MAX_BLOCK_SIZE),
        ("kernel block size", kernel, MAX_BLOCK_SIZE),
    ] {
        if got == 0 || got > limit {
            out_of_range(name, what, u64::from(got), u64::from(limit), errors);
        }
    }
    let of_component = |c: &ComponentView| [c.head_stride, c.entry_stride, c.chunks.map_or(Bytes::ZERO, |c| c.stride)];
    let strides = view.components.iter().flat_map(of_component).chain([view.kernel.stride]);
    for stride in strides.map(Bytes::get).filter(|&s| s > MAX_REGION) {
        out_of_range(name, "a stride", stride, MAX_REGION, errors);
    }
    if kernel > 0 && !view.block_size.is_multiple_of(kernel) {
        errors.push(LayoutError::KernelBlock { item: item(), kernel, block_size: view.block_size });
    }
    let interleave = p.tokens.interleave();
    let block_size = u64::from(view.block_size) * u64::from(paged.tokens_per_entry);
    if block_size.checked_rem(u64::from(interleave)) != Some(0) {
        errors.push(LayoutError::Interleave { item: item(), interleave, block_size });
    }
    for c in &paged.components {
        if !kernel.is_multiple_of(c.span) {
            errors.push(LayoutError::Span { item: item(), component: c.name.clone(), span: c.span, kernel });
        }
        let tokens = paged.tokens_per_value(c);
        if p.tokens.count() > 1 && !u64::from(interleave).is_multiple_of(tokens) {
            errors.push(LayoutError::SpanInterleave { item: item(), component: c.name.clone(), tokens, interleave });
        }
    }
    let of_view = |name: &Name| view.components.iter().find(|v| v.name == *name);
    for c in &paged.components {
        let Some(chunks) = of_view(&c.name).and_then(|v| v.chunks) else { continue };
        let count = c.width.get().checked_div(chunks.bytes.get()).unwrap_or(0);
        if count == 0 || count > MAX_CHUNKS || count.checked_mul(chunks.bytes.get()) != Some(c.width.get()) {
            let (component, chunk, width) = (c.name.clone(), chunks.bytes, c.width);
            errors.push(LayoutError::Chunk { item: item(), component, chunk, width, limit: MAX_CHUNKS });
        }
    }
    check_names(name, view.components.iter().map(|c| &c.name), paged.components.iter().map(|c| &c.name), errors);
}

fn check_state(name: &Name, state: &StateItem, p: &StatePlacement, view: &StateView, errors: &mut Vec<LayoutError>) {
    if p.parts.len() != state.parts.len() {
        let (got, expected) = (p.parts.len(), state.parts.len());
        errors.push(LayoutError::PartCount { item: name.clone(), got, expected });
    }
    for (&units, part) in p.parts.iter().zip(&state.parts) {
        check_units(name, units, part.units, errors);
    }
    if view.slots == 0 || view.slots > MAX_BLOCKS {
        out_of_range(name, "slots", u64::from(view.slots), u64::from(MAX_BLOCKS), errors);
    }
    for part in &view.parts {
        if part.scratch_rows > MAX_ROWS {
            out_of_range(name, "scratch rows", u64::from(part.scratch_rows), u64::from(MAX_ROWS), errors);
        }
        for stride in [part.row_stride, part.unit_stride].map(Bytes::get).into_iter().filter(|&s| s > MAX_REGION) {
            out_of_range(name, "a stride", stride, MAX_REGION, errors);
        }
    }
    check_names(name, view.parts.iter().map(|c| &c.name), state.parts.iter().map(|c| &c.name), errors);
}
