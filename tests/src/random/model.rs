//! Random models.

use kvferry_geometry::spec::{Component, Item, PagedItem, Retention};
use kvferry_geometry::units::Tokens;

use super::{Choices, small};

/// A few items of one model: layers alike and layers unlike, GQA and MLA, one to three components of 1 to 16 bytes, and
/// at most three kinds of retention.
#[must_use]
pub fn random_items(c: &mut Choices) -> Vec<Item> {
    let retentions = [Retention::Full, other_retention(c), other_retention(c)];
    let count = c.pick(&[1, 2, 3, 4, 6]);
    let mut items: Vec<PagedItem> = Vec::new();
    for _ in 0..count {
        let item = match items.last() {
            // Layers are mostly alike.
            Some(last) if !c.chance(45) => last.clone(),
            _ => random_item(c, &retentions),
        };
        items.push(item);
    }
    let names = ["model.layers.{}.self_attn.attn", "draft.layers.{}", "l{}"];
    let name = c.pick(&names);
    items.into_iter().enumerate().map(|(i, item)| Item::paged(&name.replace("{}", &i.to_string()), item)).collect()
}

fn other_retention(c: &mut Choices) -> Retention {
    let tokens = Tokens::new(c.within(1, 70));
    match c.below(10) {
        0..=4 => Retention::Full,
        5..=7 => Retention::Window(tokens),
        _ => Retention::Chunk(tokens),
    }
}

fn random_item(c: &mut Choices, retentions: &[Retention]) -> PagedItem {
    let retention = c.pick(retentions);
    let latent = c.chance(25);
    let heads = if latent { 1 } else { small(c.within(1, 8)) };
    let names: &[&str] = if latent { &["latent", "rope"] } else { &["k", "v", "scale"] };
    let count = usize::try_from(c.within(1, names.len() as u64)).unwrap();
    // Wide cells only where heads are few, so that caches stay tiny.
    let widest = if heads > 4 { 5 } else { 16 };
    let mut components = Vec::new();
    for name in &names[..count] {
        let width = if c.chance(40) { c.within(1, widest) } else { c.pick(&[2, 4, 1, 3]) };
        components.push(Component::new(name, width, "bf16"));
    }
    PagedItem { retention, ..PagedItem::new(heads, components) }
}
