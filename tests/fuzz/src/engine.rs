//! Engines written by choices: the usual ones with small numbers mostly, and any field overwritten by any number.

use kvferry_geometry::layout::{Chunks, ComponentOrder, LayoutStyle, MemoryKind, Rows, StateOrder, TokenOrder, View};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestErrors, RankManifest};
use kvferry_geometry::placement::{HeadRange, HeadRule, Parallelism, PcpMode, Placement, TokenClass};
use kvferry_geometry::spec::{
    Component, Item, ItemKind, ModelSpec, PagedItem, Retention, SpecErrors, StateItem, StatePart, ValueHeads,
};
use kvferry_geometry::units::{Bytes, ItemId, Name, RegionId, Tokens};

use crate::{Reached, Reader};

/// The most items that are written; more than a spec may have.
const MAX_ITEMS: u64 = 4100;
/// The most ranks times items that are written before the parallel sizes are refused unseen: what a [`Parallelism`] accepts
/// at most would keep one input busy for seconds.
const MAX_PLACED: u64 = 1 << 11;

/// Parts of a manifest, which may be unsound.
pub(crate) struct Description {
    spec: ModelSpec,
    groups: Vec<CacheGroup>,
    ranks: Vec<RankManifest>,
}

impl Description {
    pub(crate) fn manifest(self) -> Result<Manifest, ManifestErrors> {
        Manifest::new(self.spec, self.groups, self.ranks)
    }
}

/// A list of items, of which some come many times.
pub(crate) fn items(r: &mut Reader<'_>) -> Vec<Item> {
    let mut out: Vec<Item> = Vec::new();
    for kind in 0..1 + r.below(5) {
        let item = if r.below(4) == 3 { ItemKind::State(state(r)) } else { ItemKind::Paged(paged(r)) };
        let copies = r.usual(&[1, 1, 2, 1, 3]).min(MAX_ITEMS);
        for copy in 0..copies {
            // Two kinds may come by one name.
            let kind = if r.rare() { 0 } else { kind };
            out.push(Item { name: Name::new(&format!("layers.{copy}.{kind}")), kind: item.clone() });
        }
        if out.len() as u64 > MAX_ITEMS {
            break;
        }
    }
    out
}

/// A spec of items, in another order where `turn` says so.
pub(crate) fn spec(mut items: Vec<Item>, turn: usize) -> Result<ModelSpec, SpecErrors> {
    let by = turn % items.len().max(1);
    items.rotate_left(by);
    if turn > 128 {
        for item in &mut items {
            match &mut item.kind {
                ItemKind::Paged(p) => p.components.reverse(),
                ItemKind::State(s) => s.parts.reverse(),
                _ => {}
            }
        }
    }
    ModelSpec::new(items)
}

fn paged(r: &mut Reader<'_>) -> PagedItem {
    let heads = r.usual32(&[1, 2, 4, 8, 3, 6]);
    let tokens_per_entry = r.usual32(&[1, 1, 1, 1, 1, 2, 4]);
    let retention = match r.below(8) {
        0 => Retention::Window(Tokens::new(r.usual(&[4, 7, 16, 1]))),
        1 => Retention::Chunk(Tokens::new(r.usual(&[8, 16, 5]))),
        2 => Retention::Ring(Tokens::new(r.usual(&[16, 32, 8]))),
        _ => Retention::Full,
    };
    let mut components = Vec::new();
    for index in 0..1 + r.below(3) {
        let name = if r.rare() { "k".into() } else { format!("c{index}") };
        let mut c = Component::new(&name, r.usual(&[2, 4, 8, 1, 3, 16]), "bf16");
        if r.below(4) == 3 {
            c = c.with_span(r.usual32(&[2, 4, 1]));
        }
        if r.below(6) == 5 {
            c.heads = ValueHeads::Shared;
        }
        components.push(c);
    }
    PagedItem { heads, tokens_per_entry, components, retention }
}

fn state(r: &mut Reader<'_>) -> StateItem {
    let part = |index: usize, r: &mut Reader<'_>| {
        let units = r.usual32(&[4, 8, 2, 1, 12, 6]);
        let rows = r.usual32(&[3, 1, 3, 2]);
        StatePart::new(&format!("p{index}"), units, rows, r.usual(&[2, 4, 8, 1]), "fp32")
    };
    StateItem { parts: (0..1 + r.below(4)).map(|i| part(i, r)).collect() }
}

/// An engine for a spec; `None` where sizes or layout can't be written out, with the reason noted.
pub(crate) fn engine(r: &mut Reader<'_>, spec: ModelSpec, reached: &mut Reached) -> Option<Description> {
    let parallelism = parallelism(r, &spec);
    if u64::from(parallelism.ranks()).saturating_mul(spec.items().len() as u64) > MAX_PLACED {
        reached.at("large");
        return None;
    }
    let rules: Vec<HeadRule> = (0..8).map(|_| rule(r)).collect();
    let of = |item: &Item, axis: usize| rules[(item.name.as_str().len() + axis * 3) % rules.len()];
    let placements = match parallelism.place(&spec, of) {
        Ok(placements) => placements,
        Err(errors) => {
            errors.iter().for_each(|e| reached.fault(e));
            return None;
        }
    };
    let context = u64::from(parallelism.context());
    let groups = groups(r, &spec);
    let style = style(r);
    let sizes: Vec<(&[ItemId], u32, u32)> = groups.iter().map(|g| (&g.items[..], g.block_size, g.blocks)).collect();
    let mut ranks = Vec::new();
    for placement in placements {
        match style.build(&spec, &placement, &sizes) {
            Ok(layout) => ranks.push(RankManifest { placement, layout }),
            Err(error) => {
                reached.fault(&error);
                return None;
            }
        }
    }
    let block_tokens = |g: &Group| if g.states { 0 } else { u64::from(g.block_size).saturating_mul(context) };
    let group = |g: &Group| CacheGroup {
        name: g.name.clone(),
        items: g.items.clone(),
        block_tokens: Tokens::new(block_tokens(g)),
    };
    let mut out = Description { groups: groups.iter().map(group).collect(), spec, ranks };
    let overwritten = [0, 0, 0, 0, 1, 1, 2, 3][r.below(8)];
    for _ in 0..overwritten {
        overwrite(r, &mut out);
    }
    Some(out)
}

fn parallelism(r: &mut Reader<'_>, spec: &ModelSpec) -> Parallelism {
    let tp = r.usual32(&[1, 2, 4, 3, 8, 6]);
    let dcp = r.usual32(&[1, 1, 1, 1, 2, 4]);
    let pcp = r.usual32(&[1, 1, 1, 2]);
    let pcp_mode = if r.flag() { PcpMode::Shard } else { PcpMode::Replicate };
    let interleave = r.usual32(&[1, 1, 2, 4]);
    let mut stages = vec![Vec::new(); [1, 1, 1, 2, 3, 0][r.below(6)]];
    for (id, _) in spec.iter() {
        let at = r.below(stages.len());
        if let Some(stage) = stages.get_mut(at) {
            stage.push(id);
        }
        if r.rare() {
            // On another stage too, or twice on one.
            stages.iter_mut().take(1).for_each(|s| s.push(id));
        }
    }
    Parallelism { tp, dcp, pcp, pcp_mode, interleave, stages }
}

fn rule(r: &mut Reader<'_>) -> HeadRule {
    match r.below(8) {
        6 => HeadRule::Whole,
        7 => HeadRule::Blocks(r.usual32(&[2, 1, 4])),
        _ => HeadRule::Split,
    }
}

struct Group {
    name: Name,
    states: bool,
    items: Vec<ItemId>,
    block_size: u32,
    blocks: u32,
}

/// Items dealt out to groups; paged ones, states and rings apart mostly.
fn groups(r: &mut Reader<'_>, spec: &ModelSpec) -> Vec<Group> {
    let mut out: Vec<(u8, Group)> = Vec::new();
    let mixed = r.rare();
    for (id, item) in spec.iter() {
        let kind = match &item.kind {
            ItemKind::Paged(p) => match p.retention {
                Retention::Ring(t) => 1 + t.get().to_le_bytes()[0] % 32,
                _ => 0,
            },
            ItemKind::State(_) => 64,
            _ => 65,
        };
        let key = if mixed { 0 } else { kind } ^ if r.below(3) == 2 { 128 } else { 0 };
        if let Some((_, group)) = out.iter_mut().find(|g| g.0 == key) {
            group.items.push(id);
            continue;
        }
        let block_size = r.usual32(&[8, 4, 16, 2, 12]);
        let blocks = r.usual32(&[8, 4, 16, 5]);
        let name = if r.rare() { Name::new("g") } else { Name::new(&format!("g{key}")) };
        out.push((key, Group { name, states: kind == 64, items: vec![id], block_size, blocks }));
    }
    out.into_iter().map(|g| g.1).collect()
}

fn style(r: &mut Reader<'_>) -> LayoutStyle {
    LayoutStyle {
        order: if r.flag() { TokenOrder::TokensOuter } else { TokenOrder::HeadsOuter },
        components: [ComponentOrder::Packed, ComponentOrder::InBlock, ComponentOrder::Planes][r.below(3)],
        rows: if r.below(3) == 2 { Rows::Packed } else { Rows::PerItem },
        share: r.below(4) == 3,
        padding: Bytes::new(r.usual(&[0, 0, 0, 16, 3])),
        kernel_block: if r.below(4) == 3 { Some(r.usual32(&[4, 2, 8])) } else { None },
        state_order: if r.flag() { StateOrder::RowsOuter } else { StateOrder::UnitsOuter },
        scratch_rows: r.usual32(&[0, 0, 1, 3]),
    }
}

/// One number of a description becomes any other.
fn overwrite(r: &mut Reader<'_>, d: &mut Description) {
    let count = d.ranks.len();
    let rank = usize::from(r.byte()) % count.max(1);
    let (field, which, value) = (r.below(32), r.byte(), r.number());
    let value32 = u32::try_from(value).unwrap_or(u32::MAX);
    if field < 4 {
        let at = usize::from(which) % d.groups.len().max(1);
        let Some(group) = d.groups.get_mut(at) else { return };
        match field {
            0 => group.block_tokens = Tokens::new(value),
            1 => group.items.push(ItemId::new(value32)),
            2 => group.items.clear(),
            _ => group.name = "g".into(),
        }
        return;
    }
    let Some(rank) = d.ranks.get_mut(rank) else { return };
    let regions = rank.layout.regions.len();
    if field < 8 {
        match (field, rank.layout.regions.get_mut(usize::from(which) % regions.max(1))) {
            (4, Some(region)) => region.len = Bytes::new(value),
            (5, Some(region)) => region.kind = MemoryKind::Device(value32),
            (6, _) => rank.layout.regions.truncate(usize::from(which) % 4),
            (_, Some(region)) => region.len = Bytes::new(region.len.get().wrapping_mul(value)),
            _ => {}
        }
        return;
    }
    if field < 12 {
        let at = usize::from(which) % rank.placement.len().max(1);
        match (field, rank.placement.get_mut(at)) {
            (8, Some(p)) => *p = None,
            (9, Some(Some(Placement::Paged(p)))) => {
                p.heads = HeadRange::new(p.heads.start(), value32).unwrap_or(p.heads);
            }
            (10, Some(Some(Placement::Paged(p)))) => {
                p.tokens = TokenClass::new(value32, p.tokens.interleave(), u32::from(which)).unwrap_or(TokenClass::ALL);
            }
            (_, Some(Some(Placement::State(p)))) => {
                if let Some(range) = p.parts.first_mut() {
                    *range = HeadRange::new(value32, range.end()).unwrap_or(*range);
                }
            }
            _ => rank.placement.truncate(at),
        }
        return;
    }
    let at = usize::from(which & 15) % rank.layout.views.len().max(1);
    let inner = usize::from(which >> 4);
    let width = |item: &Item| item.as_paged().map(|p| p.components.iter().map(|c| c.width.get()).collect());
    let widths: Vec<Vec<u64>> = d.spec.items().iter().map(|i| width(i).unwrap_or_default()).collect();
    match rank.layout.views.get_mut(at) {
        Some(Some(View::Paged(v))) => {
            let components = v.components.len();
            let component = v.components.get_mut(inner % components.max(1));
            match (field, component) {
                (12, _) => v.region = RegionId::new(value32),
                (13, _) => v.offset = Bytes::new(value),
                (14, _) => v.block_stride = Bytes::new(value),
                (15, _) => v.blocks = value32,
                (16, _) => v.block_size = value32,
                (17, _) => v.kernel.size = value32,
                (18, _) => v.kernel.stride = Bytes::new(value),
                (19, Some(c)) => c.offset = Bytes::new(value),
                (20, Some(c)) => c.head_stride = Bytes::new(value),
                (21, Some(c)) => c.entry_stride = Bytes::new(value),
                (22, Some(c)) => c.name = "k".into(),
                (23, Some(c)) => c.chunks = Some(Chunks { bytes: Bytes::new(value), stride: c.head_stride }),
                (24, Some(c)) => c.chunks = Some(Chunks { bytes: Bytes::new(1), stride: Bytes::new(value) }),
                (25, _) => v.components.reverse(),
                // In two halves that lie as if they were one.
                (27 | 28, Some(c)) => {
                    let half = Bytes::new(widths[at].get(inner % components).map_or(0, |w| w / 2));
                    c.chunks = Some(Chunks { bytes: half, stride: half });
                }
                // A page as it may lie in a larger row.
                (26, _) => v.block_stride = Bytes::new(v.block_stride.get().wrapping_add(value)),
                _ => v.components.truncate(inner),
            }
        }
        Some(Some(View::State(v))) => {
            let parts = v.parts.len();
            let part = v.parts.get_mut(inner % parts.max(1));
            match (field, part) {
                (12, _) => v.region = RegionId::new(value32),
                (13, _) => v.offset = Bytes::new(value),
                (14, _) => v.slot_stride = Bytes::new(value),
                (15, _) => v.slots = value32,
                (16 | 19, Some(p)) => p.offset = Bytes::new(value),
                (17 | 20, Some(p)) => p.row_stride = Bytes::new(value),
                (18 | 21, Some(p)) => p.unit_stride = Bytes::new(value),
                (22, Some(p)) => p.name = "k".into(),
                (23, Some(p)) => p.scratch_rows = value32,
                (25, _) => v.parts.reverse(),
                _ => v.parts.truncate(inner),
            }
        }
        Some(view) => *view = None,
        None => {}
    }
}
