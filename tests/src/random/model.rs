//! Random models.

use kvferry_geometry::spec::{Component, Item, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::units::Tokens;

use super::{Choices, small};

/// A random model: items that both engines have, and items that only one of them has.
#[derive(Clone, Debug)]
pub struct Model {
    /// On both sides.
    pub both: Vec<Item>,
    /// At the producer only.
    pub src_only: Vec<Item>,
    /// At the consumer only.
    pub dst_only: Vec<Item>,
}

/// What the layers of one model have in common.
struct Family {
    retentions: Vec<Retention>,
    /// Tokens that the widest value covers; the others' divide it.
    grain: u64,
    /// Percent of items that are states.
    states: u64,
    /// Percent of paged items with scales.
    scales: u64,
}

/// A few items of one model: layers alike and layers unlike.
#[must_use]
pub fn random_model(c: &mut Choices) -> Model {
    let grain = if c.chance(40) { c.pick(&[2, 4, 6, 12, 3]) } else { 1 };
    let ring = Retention::Ring(Tokens::new(c.pick(&[24, 48, 12, 36, 72])));
    let family = Family {
        retentions: vec![Retention::Full, other_retention(c, ring), other_retention(c, ring)],
        grain,
        states: if c.chance(50) { c.pick(&[40, 60, 50, 100]) } else { 0 },
        scales: if c.chance(if grain > 1 { 55 } else { 25 }) { 70 } else { 0 },
    };
    let count = c.pick(&[1, 2, 3, 4, 6, 5]);
    let mut items: Vec<Item> = Vec::new();
    for i in 0..count {
        let name = format!("model.layers.{i}.self_attn.attn");
        // Layers are mostly alike; those of hybrids alternate.
        let item = match items.last() {
            Some(_) if !c.chance(45) => Item { name: name.as_str().into(), ..c.pick(&items) },
            _ => random_item(c, &name, &family),
        };
        items.push(item);
    }
    let mut extra = |side: &str| {
        let count = if c.chance(12) { c.within(1, 2) } else { 0 };
        (0..count).map(|i| random_item(c, &format!("{side}.draft.layers.{i}"), &family)).collect::<Vec<Item>>()
    };
    let (src_only, dst_only) = (extra("p"), extra("d"));
    Model { both: items, src_only, dst_only }
}

fn other_retention(c: &mut Choices, ring: Retention) -> Retention {
    let tokens = Tokens::new(if c.chance(40) { c.within(1, 5) } else { c.within(1, 70) });
    match c.below(12) {
        0..=4 => Retention::Full,
        5..=7 => Retention::Window(tokens),
        8 | 9 => Retention::Chunk(tokens),
        _ => ring,
    }
}

fn random_item(c: &mut Choices, name: &str, family: &Family) -> Item {
    if c.chance(family.states) {
        Item::state(name, random_state(c))
    } else {
        Item::paged(name, random_paged(c, family))
    }
}

fn random_paged(c: &mut Choices, family: &Family) -> PagedItem {
    let retention = c.pick(&family.retentions);
    let latent = c.chance(25);
    let heads = if latent { 1 } else { small(c.within(1, 8)) };
    let names: &[&str] = if latent { &["latent", "rope"] } else { &["k", "v", "z"] };
    let count = usize::try_from(c.within(1, names.len() as u64)).unwrap();
    // Wide cells only where heads are few, so that caches stay tiny.
    let widest = if heads > 4 { 5 } else { 16 };
    let mut components = Vec::new();
    for name in &names[..count] {
        let width = if c.chance(40) { c.within(1, widest) } else { c.pick(&[2, 4, 1, 3]) };
        components.push(Component::new(name, width, "bf16"));
    }
    let divisors = |of: u64| (1..=of).filter(|d| of.is_multiple_of(*d)).collect::<Vec<u64>>();
    let tokens_per_entry = if c.chance(50) { c.pick(&divisors(family.grain)) } else { 1 };
    if c.chance(family.scales) {
        // In a ring the place of a value that spans entries would be shared by its oldest and its newest tokens.
        let spans =
            if matches!(retention, Retention::Ring(_)) { vec![1] } else { divisors(family.grain / tokens_per_entry) };
        for of in &names[..count] {
            let width = c.pick(&[1, 2, 4]);
            let span = if c.chance(50) { spans[spans.len() - 1] } else { c.pick(&spans) };
            let scale = Component::new(&format!("{of}.scale"), width, "fp32").with_span(small(span));
            components.push(if c.chance(30) { scale.shared() } else { scale });
        }
    }
    PagedItem { retention, tokens_per_entry: small(tokens_per_entry), ..PagedItem::new(heads, components) }
}

/// States as Mamba 1 and 2, gated delta nets, KDA and short convolutions have them, in miniature.
fn random_state(c: &mut Choices) -> StateItem {
    let rows = small(c.within(1, 3));
    let (heads, groups, channels) = (small(c.within(1, 6)), small(c.pick(&[1, 2, 4])), small(c.within(1, 3)));
    let conv = |name: &str, units: u32| StatePart::new(name, units, rows, 2, "bf16");
    let wide = c.pick(&[4, 8, 3]);
    let temporal = |units: u32| StatePart::new("temporal", units, 1, wide, "fp32");
    let parts = match c.below(6) {
        0 => vec![conv("x", heads * channels), conv("b", groups), conv("c", groups), temporal(heads)],
        1 => vec![conv("x", heads * channels), temporal(heads * channels)],
        2 => vec![conv("q", groups), conv("k", groups), conv("v", heads * channels), temporal(heads)],
        3 => vec![conv("q", heads), conv("k", heads), conv("v", heads), temporal(heads)],
        4 => vec![conv("conv", heads * channels)],
        _ => vec![temporal(heads)],
    };
    StateItem { parts }
}
