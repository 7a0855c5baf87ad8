//! Models, ranks and engines.

use std::sync::Arc;

use kvferry_geometry::layout::{CacheLayout, ComponentView, KernelBlock, MemoryKind, PagedView, Region};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestError, ManifestErrors, RankManifest};
use kvferry_geometry::placement::{HeadRange, MAX_PLACEMENTS, Placement, TokenClass};
use kvferry_geometry::spec::{Component, Item, ItemKind, ModelSpec, PagedItem, Retention};
use kvferry_geometry::units::{Bytes, ItemId, Name, RegionId, Tokens};

use super::{ConvertError, Converted, text};
use crate::manifest::{EngineManifest, RankContact};
use crate::names::{EngineId, Epoch};
use crate::wire::dto;

fn name(n: String) -> Converted<Name> {
    Ok(Name::new(&text(n)?))
}

impl TryFrom<dto::Item> for Item {
    type Error = ConvertError;
    fn try_from(d: dto::Item) -> Converted<Self> {
        let dto::ItemKind::Paged { heads, components, retention } = d.kind;
        let component = |c: dto::Component| {
            Ok(Component { name: name(c.name)?, width: Bytes::new(c.width), encoding: name(c.encoding)? })
        };
        let retention = match retention {
            dto::Retention::Full => Retention::Full,
            dto::Retention::Window(t) => Retention::Window(Tokens::new(t)),
            dto::Retention::Chunk(t) => Retention::Chunk(Tokens::new(t)),
        };
        let components = components.into_iter().map(component).collect::<Converted<_>>()?;
        Ok(Self { name: name(d.name)?, kind: ItemKind::Paged(PagedItem { heads, components, retention }) })
    }
}

impl From<&Item> for dto::Item {
    fn from(item: &Item) -> Self {
        let p = item.as_paged();
        let component = |c: &Component| dto::Component {
            name: c.name.as_str().into(),
            width: c.width.get(),
            encoding: c.encoding.as_str().into(),
        };
        let retention = match p.retention {
            Retention::Window(t) => dto::Retention::Window(t.get()),
            Retention::Chunk(t) => dto::Retention::Chunk(t.get()),
            _ => dto::Retention::Full,
        };
        let components = p.components.iter().map(component).collect();
        Self { name: item.name.as_str().into(), kind: dto::ItemKind::Paged { heads: p.heads, components, retention } }
    }
}

impl TryFrom<dto::Group> for CacheGroup {
    type Error = ConvertError;
    fn try_from(d: dto::Group) -> Converted<Self> {
        let items = d.items.into_iter().map(ItemId::new).collect();
        Ok(Self { name: name(d.name)?, items, block_tokens: Tokens::new(d.block_tokens) })
    }
}

impl From<&CacheGroup> for dto::Group {
    fn from(g: &CacheGroup) -> Self {
        let items = g.items.iter().map(|i| i.get()).collect();
        Self { name: g.name.as_str().into(), items, block_tokens: g.block_tokens.get() }
    }
}

impl TryFrom<dto::View> for PagedView {
    type Error = ConvertError;
    fn try_from(d: dto::View) -> Converted<Self> {
        let component = |c: dto::ComponentView| {
            Ok(ComponentView {
                name: name(c.name)?,
                offset: Bytes::new(c.offset),
                head_stride: Bytes::new(c.head_stride),
                entry_stride: Bytes::new(c.entry_stride),
            })
        };
        Ok(Self {
            region: RegionId::new(d.region),
            offset: Bytes::new(d.offset),
            block_stride: Bytes::new(d.block_stride),
            blocks: d.blocks,
            block_size: d.block_size,
            kernel: KernelBlock { size: d.kernel_size, stride: Bytes::new(d.kernel_stride) },
            components: d.components.into_iter().map(component).collect::<Converted<_>>()?,
        })
    }
}

impl From<&PagedView> for dto::View {
    fn from(v: &PagedView) -> Self {
        let component = |c: &ComponentView| dto::ComponentView {
            name: c.name.as_str().into(),
            offset: c.offset.get(),
            head_stride: c.head_stride.get(),
            entry_stride: c.entry_stride.get(),
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

fn placement(item: u32, d: &dto::Placement) -> Converted<Placement> {
    let (start, end) = d.heads;
    let heads = HeadRange::new(start, end).ok_or(ConvertError::Heads { item, start, end })?;
    let (count, interleave, index) = d.tokens;
    let class = TokenClass::new(count, interleave, index);
    let tokens = class.ok_or(ConvertError::TokenClass { item, count, interleave, index })?;
    Ok(Placement { heads, tokens })
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

impl TryFrom<dto::Rank> for RankManifest {
    type Error = ConvertError;
    fn try_from(d: dto::Rank) -> Converted<Self> {
        let mut placements = items("the placement", d.placements)?;
        let mut views = items("the layout", d.views)?;
        for held in d.held {
            if let Some(p) = &held.placement {
                put(&mut placements, held.item, placement(held.item, p)?)?;
            }
            if let Some(view) = held.view {
                put(&mut views, held.item, PagedView::try_from(*view)?)?;
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
        Ok(Self { placement: placements, layout: CacheLayout { regions, views } })
    }
}

impl From<&RankManifest> for dto::Rank {
    fn from(r: &RankManifest) -> Self {
        let (placements, views) = (&r.placement, &r.layout.views);
        let region = |x: &Region| dto::Region {
            len: x.len.get(),
            kind: match x.kind {
                MemoryKind::Device(i) => dto::MemoryKind::Device(i),
                _ => dto::MemoryKind::Host,
            },
        };
        let held = (0u32..).zip(0..placements.len().max(views.len())).filter_map(|(item, i)| {
            let placement = placements.get(i).copied().flatten().map(|p| {
                let t = p.tokens;
                let tokens = (t.count(), t.interleave(), t.index());
                Box::new(dto::Placement { heads: (p.heads.start(), p.heads.end()), tokens })
            });
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

impl TryFrom<dto::Engine> for EngineManifest {
    type Error = ConvertError;
    fn try_from(d: dto::Engine) -> Converted<Self> {
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
        let ranks = d.ranks.into_iter().map(RankManifest::try_from).collect::<Converted<_>>()?;
        let contact = |c: dto::Contact| RankContact { epoch: Epoch::new(c.epoch), blob: Arc::from(c.blob.0) };
        let contacts = d.contacts.into_iter().map(contact).collect();
        let engine = EngineId::new(&d.engine)?;
        let cache = Manifest::new(ModelSpec::new(items)?, groups, ranks)?;
        Ok(Self::new(engine, Epoch::new(d.epoch), cache, contacts)?)
    }
}

impl From<&EngineManifest> for dto::Engine {
    fn from(m: &EngineManifest) -> Self {
        let cache = m.cache();
        let contact = |c: &RankContact| dto::Contact { epoch: c.epoch.get(), blob: c.blob.iter().copied().collect() };
        Self {
            engine: m.engine().as_str().into(),
            epoch: m.epoch().get(),
            items: cache.spec().items().iter().map(dto::Item::from).collect(),
            groups: cache.groups().iter().map(dto::Group::from).collect(),
            ranks: cache.ranks().iter().map(dto::Rank::from).collect(),
            contacts: m.contacts().iter().map(contact).collect(),
        }
    }
}
