//! Models, ranks and engines.

use std::sync::Arc;

use kvferry_geometry::layout::{
    CacheLayout, Chunks, ComponentView, KernelBlock, MemoryKind, PagedView, PartView, Region, StateView, View,
};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestError, ManifestErrors, RankManifest};
use kvferry_geometry::placement::{HeadRange, MAX_PLACEMENTS, Placement, TokenClass};
use kvferry_geometry::spec::{
    Component, Item, ItemKind, ModelSpec, PagedItem, Retention, StateItem, StatePart, ValueHeads,
};
use kvferry_geometry::units::{Bytes, ItemId, Name, RegionId, Tokens};

use super::{ConvertError, Converted, bounded};
use crate::manifest::{EngineManifest, RankContact};
use crate::names::{EngineId, Epoch};
use crate::wire::dto;

/// Names that were met lately: thousands of views have the same few, which are made once.
#[derive(Default)]
struct Names(Vec<Name>);

impl Names {
    const KEPT: usize = 8;

    fn name(&mut self, n: &str) -> Converted<Name> {
        if let Some(known) = self.0.iter().find(|known| known.as_str() == n) {
            return Ok(known.clone());
        }
        let name = name(n)?;
        if self.0.len() == Self::KEPT {
            self.0.remove(0);
        }
        self.0.push(name.clone());
        Ok(name)
    }
}

fn name(n: &str) -> Converted<Name> {
    Ok(Name::new(bounded(n)?))
}

impl TryFrom<dto::Component<'_>> for Component {
    type Error = ConvertError;
    fn try_from(d: dto::Component<'_>) -> Converted<Self> {
        let heads = match d.heads {
            dto::ValueHeads::Each => ValueHeads::Each,
            dto::ValueHeads::Shared => ValueHeads::Shared,
        };
        let (name, encoding) = (name(d.name)?, name(d.encoding)?);
        Ok(Self { name, width: Bytes::new(d.width), encoding, span: d.span, heads })
    }
}

impl<'a> From<&'a Component> for dto::Component<'a> {
    fn from(c: &'a Component) -> Self {
        let heads = match c.heads {
            ValueHeads::Each => dto::ValueHeads::Each,
            ValueHeads::Shared => dto::ValueHeads::Shared,
        };
        let (name, encoding) = (c.name.as_str(), c.encoding.as_str());
        Self { name, width: c.width.get(), encoding, span: c.span, heads }
    }
}

impl TryFrom<dto::StatePart<'_>> for StatePart {
    type Error = ConvertError;
    fn try_from(d: dto::StatePart<'_>) -> Converted<Self> {
        let (name, encoding) = (name(d.name)?, name(d.encoding)?);
        Ok(Self { name, units: d.units, rows: d.rows, width: Bytes::new(d.width), encoding })
    }
}

impl<'a> From<&'a StatePart> for dto::StatePart<'a> {
    fn from(p: &'a StatePart) -> Self {
        let (name, encoding) = (p.name.as_str(), p.encoding.as_str());
        Self { name, units: p.units, rows: p.rows, width: p.width.get(), encoding }
    }
}

impl TryFrom<dto::Item<'_>> for Item {
    type Error = ConvertError;
    fn try_from(d: dto::Item<'_>) -> Converted<Self> {
        let kind = match d.kind {
            dto::ItemKind::Paged { heads, tokens_per_entry, components, retention } => {
                let retention = match retention {
                    dto::Retention::Full => Retention::Full,
                    dto::Retention::Window(t) => Retention::Window(Tokens::new(t)),
                    dto::Retention::Chunk(t) => Retention::Chunk(Tokens::new(t)),
                    dto::Retention::Ring(t) => Retention::Ring(Tokens::new(t)),
                };
                let components = components.into_iter().map(Component::try_from).collect::<Converted<_>>()?;
                ItemKind::Paged(PagedItem { heads, tokens_per_entry, components, retention })
            }
            dto::ItemKind::State(parts) => {
                let parts = parts.into_iter().map(StatePart::try_from).collect::<Converted<_>>()?;
                ItemKind::State(StateItem { parts })
            }
        };
        Ok(Self { name: name(d.name)?, kind })
    }
}

impl<'a> From<&'a Item> for dto::Item<'a> {
    fn from(item: &'a Item) -> Self {
        let kind = match &item.kind {
            ItemKind::State(s) => dto::ItemKind::State(s.parts.iter().map(dto::StatePart::from).collect()),
            // There is no other kind; a new one must be written here before it can be sent.
            _ => paged(item.as_paged()),
        };
        Self { name: item.name.as_str(), kind }
    }
}

fn paged(item: Option<&PagedItem>) -> dto::ItemKind<'_> {
    let retention = match item.map(|p| p.retention) {
        Some(Retention::Window(t)) => dto::Retention::Window(t.get()),
        Some(Retention::Chunk(t)) => dto::Retention::Chunk(t.get()),
        Some(Retention::Ring(t)) => dto::Retention::Ring(t.get()),
        _ => dto::Retention::Full,
    };
    dto::ItemKind::Paged {
        heads: item.map_or(0, |p| p.heads),
        tokens_per_entry: item.map_or(0, |p| p.tokens_per_entry),
        components: item.iter().flat_map(|p| &p.components).map(dto::Component::from).collect(),
        retention,
    }
}

impl TryFrom<dto::Group<'_>> for CacheGroup {
    type Error = ConvertError;
    fn try_from(d: dto::Group<'_>) -> Converted<Self> {
        let items = d.items.into_iter().map(ItemId::new).collect();
        Ok(Self { name: name(d.name)?, items, block_tokens: Tokens::new(d.block_tokens) })
    }
}

impl<'a> From<&'a CacheGroup> for dto::Group<'a> {
    fn from(g: &'a CacheGroup) -> Self {
        let items = g.items.iter().map(|i| i.get()).collect();
        Self { name: g.name.as_str(), items, block_tokens: g.block_tokens.get() }
    }
}

fn paged_view(names: &mut Names, d: dto::PagedView<'_>) -> Converted<PagedView> {
    let component = |c: dto::ComponentView<'_>| {
        let chunks = c.chunks.map(|(bytes, stride)| Chunks { bytes: Bytes::new(bytes), stride: Bytes::new(stride) });
        let name = names.name(c.name)?;
        Ok(ComponentView { chunks, ..ComponentView::new(name, c.offset, c.head_stride, c.entry_stride) })
    };
    Ok(PagedView {
        region: RegionId::new(d.region),
        offset: Bytes::new(d.offset),
        block_stride: Bytes::new(d.block_stride),
        blocks: d.blocks,
        block_size: d.block_size,
        kernel: KernelBlock { size: d.kernel_size, stride: Bytes::new(d.kernel_stride) },
        components: d.components.into_iter().map(component).collect::<Converted<_>>()?,
    })
}

impl<'a> From<&'a PagedView> for dto::PagedView<'a> {
    fn from(v: &'a PagedView) -> Self {
        let component = |c: &'a ComponentView| dto::ComponentView {
            name: c.name.as_str(),
            offset: c.offset.get(),
            head_stride: c.head_stride.get(),
            entry_stride: c.entry_stride.get(),
            chunks: c.chunks.map(|x| (x.bytes.get(), x.stride.get())),
        };
        Self {
            region: v.region.get(),
            offset: v.offset.get(),
            block_stride: v.block_stride.get(),
            blocks: v.blocks,
            block_size: v.block_size,
            kernel_size: v.kernel.size,
            kernel_stride: v.kernel.stride.get(),
            components: v.components.iter().map(component).collect(),
        }
    }
}

fn state_view(names: &mut Names, d: dto::StateView<'_>) -> Converted<StateView> {
    let part = |p: dto::PartView<'_>| {
        let (name, scratch_rows) = (names.name(p.name)?, p.scratch_rows);
        Ok(PartView { scratch_rows, ..PartView::new(name, p.offset, p.row_stride, p.unit_stride) })
    };
    Ok(StateView {
        region: RegionId::new(d.region),
        offset: Bytes::new(d.offset),
        slot_stride: Bytes::new(d.slot_stride),
        slots: d.slots,
        parts: d.parts.into_iter().map(part).collect::<Converted<_>>()?,
    })
}

impl<'a> From<&'a StateView> for dto::StateView<'a> {
    fn from(v: &'a StateView) -> Self {
        let part = |p: &'a PartView| dto::PartView {
            name: p.name.as_str(),
            offset: p.offset.get(),
            row_stride: p.row_stride.get(),
            unit_stride: p.unit_stride.get(),
            scratch_rows: p.scratch_rows,
        };
        Self {
            region: v.region.get(),
            offset: v.offset.get(),
            slot_stride: v.slot_stride.get(),
            slots: v.slots,
            parts: v.parts.iter().map(part).collect(),
        }
    }
}

fn view(names: &mut Names, d: dto::View<'_>) -> Converted<View> {
    Ok(match d {
        dto::View::Paged(v) => View::Paged(paged_view(names, v)?),
        dto::View::State(v) => View::State(state_view(names, v)?),
    })
}

impl<'a> From<&'a View> for dto::View<'a> {
    fn from(v: &'a View) -> Self {
        match v {
            View::Paged(v) => Self::Paged(v.into()),
            View::State(v) => Self::State(v.into()),
        }
    }
}

fn interval(item: u32, (start, end): (u32, u32)) -> Converted<HeadRange> {
    HeadRange::new(start, end).ok_or(ConvertError::Heads { item, start, end })
}

fn placement(item: u32, d: dto::Placement) -> Converted<Placement> {
    Ok(match d {
        dto::Placement::Paged { heads, tokens: (count, interleave, index) } => {
            let class = TokenClass::new(count, interleave, index);
            let tokens = class.ok_or(ConvertError::TokenClass { item, count, interleave, index })?;
            Placement::paged(interval(item, heads)?, tokens)
        }
        dto::Placement::State(parts) => {
            Placement::state(parts.into_iter().map(|units| interval(item, units)).collect::<Converted<_>>()?)
        }
    })
}

fn write_placement(p: &Placement) -> dto::Placement {
    let interval = |h: &HeadRange| (h.start(), h.end());
    match p {
        Placement::Paged(p) => {
            let tokens = (p.tokens.count(), p.tokens.interleave(), p.tokens.index());
            dto::Placement::Paged { heads: interval(&p.heads), tokens }
        }
        Placement::State(s) => dto::Placement::State(s.parts.iter().map(interval).collect()),
    }
}

/// An empty list of as many items as are announced, which is few: no model has more than a limit.
fn items<T: Clone>(what: &'static str, got: u32) -> Converted<Vec<Option<T>>> {
    let limit = dto::MAX_ITEMS;
    match usize::try_from(got) {
        Ok(n) if n <= limit => Ok(vec![None; n]),
        _ => Err(ConvertError::ItemCount { what, got, limit }),
    }
}

fn put<T>(list: &mut [Option<T>], item: u32, value: T) -> Converted<()> {
    match list.get_mut(ItemId::new(item).index()) {
        Some(slot @ None) => {
            *slot = Some(value);
            Ok(())
        }
        _ => Err(ConvertError::ItemId { item }),
    }
}

impl TryFrom<dto::Rank<'_>> for RankManifest {
    type Error = ConvertError;
    fn try_from(d: dto::Rank<'_>) -> Converted<Self> {
        rank(&mut Names::default(), d)
    }
}

fn rank(names: &mut Names, d: dto::Rank<'_>) -> Converted<RankManifest> {
    let mut placements = items("the placement", d.placements)?;
    let mut views = items("the layout", d.views)?;
    for held in d.held {
        if let Some(p) = held.placement {
            put(&mut placements, held.item, placement(held.item, *p)?)?;
        }
        if let Some(view) = held.view {
            put(&mut views, held.item, self::view(names, *view)?)?;
        }
    }
    let region = |r: dto::Region| Region {
        len: Bytes::new(r.len),
        kind: match r.kind {
            dto::MemoryKind::Host => MemoryKind::Host,
            dto::MemoryKind::Device(i) => MemoryKind::Device(i),
        },
    };
    let regions = d.regions.into_iter().map(region).collect();
    Ok(RankManifest { placement: placements, layout: CacheLayout { regions, views } })
}

impl<'a> From<&'a RankManifest> for dto::Rank<'a> {
    fn from(r: &'a RankManifest) -> Self {
        let (placements, views) = (&r.placement, &r.layout.views);
        let region = |x: &Region| dto::Region {
            len: x.len.get(),
            kind: match x.kind {
                MemoryKind::Device(i) => dto::MemoryKind::Device(i),
                _ => dto::MemoryKind::Host,
            },
        };
        let held = (0u32..).zip(0..placements.len().max(views.len())).filter_map(|(item, i)| {
            let placement = placements.get(i).and_then(Option::as_ref).map(|p| Box::new(write_placement(p)));
            let view = views.get(i).and_then(Option::as_ref).map(|v| Box::new(dto::View::from(v)));
            (placement.is_some() || view.is_some()).then_some(dto::Held { item, placement, view })
        });
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Self {
            placements: count(placements.len()),
            views: count(views.len()),
            regions: r.layout.regions.iter().map(region).collect(),
            held: held.collect(),
        }
    }
}

impl TryFrom<dto::Engine<'_>> for EngineManifest {
    type Error = ConvertError;
    fn try_from(d: dto::Engine<'_>) -> Converted<Self> {
        let (items, ranks) = (d.items.0.len(), d.ranks.0.len());
        // Before lists of that size are made: a rank costs few bytes on the wire, whatever it announces.
        if items.saturating_mul(ranks) > MAX_PLACEMENTS {
            let limit = MAX_PLACEMENTS;
            return Err(ManifestErrors(vec![ManifestError::Placements { ranks, items, limit }]).into());
        }
        for r in &d.ranks.0 {
            for (what, got) in [("the placement", r.placements), ("the layout", r.views)] {
                if usize::try_from(got).is_ok_and(|n| n > items) {
                    return Err(ConvertError::ItemCount { what, got, limit: items });
                }
            }
        }
        let items = d.items.into_iter().map(Item::try_from).collect::<Converted<_>>()?;
        let groups = d.groups.into_iter().map(CacheGroup::try_from).collect::<Converted<_>>()?;
        let mut names = Names::default();
        let ranks = d.ranks.into_iter().map(|r| rank(&mut names, r)).collect::<Converted<_>>()?;
        let contact = |c: dto::Contact| RankContact { epoch: Epoch::new(c.epoch), blob: Arc::from(c.blob.0) };
        let contacts = d.contacts.into_iter().map(contact).collect();
        let engine = EngineId::new(d.engine)?;
        let cache = Manifest::new(ModelSpec::new(items)?, groups, ranks)?;
        Ok(Self::new(engine, Epoch::new(d.epoch), cache, contacts)?)
    }
}

impl<'a> From<&'a EngineManifest> for dto::Engine<'a> {
    fn from(m: &'a EngineManifest) -> Self {
        let cache = m.cache();
        let contact = |c: &RankContact| dto::Contact { epoch: c.epoch.get(), blob: c.blob.iter().copied().collect() };
        Self {
            engine: m.engine().as_str(),
            epoch: m.epoch().get(),
            items: cache.spec().items().iter().map(dto::Item::from).collect(),
            groups: cache.groups().iter().map(dto::Group::from).collect(),
            ranks: cache.ranks().iter().map(dto::Rank::from).collect(),
            contacts: m.contacts().iter().map(contact).collect(),
        }
    }
}
