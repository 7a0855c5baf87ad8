//! What the engines of a world are: a model, and how each engine spreads and lays out its cache.

use std::sync::Arc;

use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::units::{Bytes, ItemId, Name, Tokens};

use crate::places::RankPlaces;
use crate::rng::Rng;

/// One engine's cache.
#[derive(Clone, Debug)]
pub struct Shape {
    /// All of it.
    pub manifest: Arc<Manifest>,
    /// What lies where, by rank.
    pub places: Vec<Arc<RankPlaces>>,
    /// In words.
    pub text: String,
}

/// How large the shapes of a world are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size {
    /// Most ranks of an engine.
    pub ranks: u32,
    /// The longest sequence.
    pub tokens: u64,
    /// How many of the longest requests there are blocks for.
    pub requests: u32,
}

/// A model, and what is known of its items.
#[derive(Clone, Debug)]
pub struct Model {
    spec: ModelSpec,
    text: &'static str,
    whole: bool,
}

impl Model {
    /// One of the usual kinds, with few layers and narrow heads.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Option<Self> {
        let layers = rng.small(2, 4);
        let heads = [1, 2, 4][usize::try_from(rng.below(3)).unwrap_or(0)];
        let kv = |name: String, retention| {
            let components = vec![Component::new("k", 8, "bf16"), Component::new("v", 8, "bf16")];
            Item::paged(&name, PagedItem { retention, ..PagedItem::new(heads, components) })
        };
        let state = |name: String| {
            let parts = vec![StatePart::new("conv", 8, 2, 2, "bf16"), StatePart::new("temporal", 4, 1, 16, "fp32")];
            Item::state(&name, StateItem { parts })
        };
        let window = Retention::Window(Tokens::new(rng.between(3, 20)));
        let names = (0..layers).map(|i| format!("layer.{i}"));
        let (items, text): (Vec<Item>, _) = match rng.below(5) {
            0 => {
                let latent = |n: String| Item::paged(&n, PagedItem::new(1, vec![Component::new("latent", 24, "bf16")]));
                (names.map(latent).collect(), "latent")
            }
            1 => {
                let each = names.enumerate();
                (each.map(|(i, n)| if i % 2 == 0 { state(n) } else { kv(n, Retention::Full) }).collect(), "hybrid")
            }
            2 => {
                let each = names.enumerate();
                (each.map(|(i, n)| kv(n, if i % 2 == 0 { window } else { Retention::Full })).collect(), "windowed")
            }
            _ => (names.map(|n| kv(n, Retention::Full)).collect(), "dense"),
        };
        let spec = ModelSpec::new(items).ok()?;
        Some(Self { spec, text, whole: text == "latent" })
    }

    /// A model whose attention layers are all alike.
    #[must_use]
    pub fn dense(layers: u32, heads: u32, width: u64) -> Option<Self> {
        let kv = |i: u32| {
            let components = vec![Component::new("k", width, "bf16"), Component::new("v", width, "bf16")];
            Item::paged(&format!("layer.{i}"), PagedItem::new(heads, components))
        };
        let spec = ModelSpec::new((0..layers).map(kv).collect()).ok()?;
        Some(Self { spec, text: "dense", whole: false })
    }

    /// The items.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }
}

impl Shape {
    /// One way of serving a model; `None` where it can't be written out.
    #[must_use]
    pub fn draw(model: &Model, rng: &mut Rng, size: Size) -> Option<Self> {
        let pp = if model.spec.items().len() > 1 && size.ranks > 1 && rng.chance(3500) { 2 } else { 1 };
        let tp = 1 << rng.below(u64::from((size.ranks / pp).max(1).ilog2()) + 1);
        let block = [4, 8, 16][usize::try_from(rng.below(3)).unwrap_or(0)];
        let mut style =
            *rng.pick(&[LayoutStyle::HND, LayoutStyle::NHD, LayoutStyle::PLANES, LayoutStyle::PACKED_ROWS])?;
        style.padding = Bytes::new(if rng.chance(3000) { 16 } else { 0 });
        let spare = rng.small(0, 3);
        Self::of(model, tp, pp, style, block, size, spare)
    }

    /// The one of these parallelisms, layout and block size.
    #[must_use]
    pub fn of(model: &Model, tp: u32, pp: u32, style: LayoutStyle, block: u32, size: Size, spare: u32) -> Option<Self> {
        let spec = &model.spec;
        let ids: Vec<ItemId> = spec.iter().map(|(id, _)| id).collect();
        let mut parallelism = Parallelism::tensor(spec, tp);
        if pp == 2 {
            // As equal as they can be.
            let (a, b) = ids.split_at(ids.len().div_ceil(2));
            parallelism.stages = vec![a.to_vec(), b.to_vec()];
        }
        let rule = if model.whole { HeadRule::Whole } else { HeadRule::Split };
        let placed = parallelism.place(spec, |_, _| rule).ok()?;
        let longest = u32::try_from(size.tokens).ok()?.div_ceil(block);
        let blocks = (longest * size.requests).saturating_add(spare);
        let kinds: [fn(&Item) -> bool; 3] = [
            |i| i.as_paged().is_some_and(|p| p.retention == Retention::Full),
            |i| i.as_paged().is_some_and(|p| p.retention != Retention::Full),
            |i| i.as_state().is_some(),
        ];
        let mut groups: Vec<(Name, Vec<ItemId>, u32, u32, bool)> = Vec::new();
        for (kind, name) in kinds.iter().zip(["full", "window", "state"]) {
            let of: Vec<ItemId> = spec.iter().filter(|(_, i)| kind(i)).map(|(id, _)| id).collect();
            if !of.is_empty() {
                let is_state = name == "state";
                groups.push((
                    Name::new(name),
                    of,
                    block,
                    if is_state { size.requests + spare } else { blocks },
                    is_state,
                ));
            }
        }
        let lists: Vec<(&[ItemId], u32, u32)> = groups.iter().map(|g| (&g.1[..], g.2, g.3)).collect();
        let mut ranks = Vec::new();
        for placement in placed {
            let layout = style.build(spec, &placement, &lists).ok()?;
            ranks.push(RankManifest { placement, layout });
        }
        let group = |g: &(Name, Vec<ItemId>, u32, u32, bool)| CacheGroup {
            name: g.0.clone(),
            items: g.1.clone(),
            block_tokens: Tokens::new(if g.4 { 0 } else { u64::from(g.2) }),
        };
        let manifest = Manifest::new(spec.clone(), groups.iter().map(group).collect(), ranks).ok()?;
        let places = manifest.ranks().iter().map(|r| Arc::new(RankPlaces::new(&manifest, r))).collect();
        let text = format!("{} tp{tp} pp{pp} blocks of {block} ({blocks})", model.text);
        Some(Self { manifest: Arc::new(manifest), places, text })
    }

    /// That of an engine as it is described, for worlds without bytes in which nothing is watched.
    #[must_use]
    pub fn plain(manifest: Arc<Manifest>, text: String) -> Self {
        Self { manifest, places: Vec::new(), text }
    }

    /// Whether a request can go from one to the other.
    #[must_use]
    pub fn feeds(&self, dst: &Self) -> bool {
        Compatible::new(self.manifest.clone(), dst.manifest.clone()).is_ok()
    }

    /// How many ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        u32::try_from(self.manifest.ranks().len()).unwrap_or(u32::MAX)
    }
}
