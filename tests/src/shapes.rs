//! Engines of the shapes in `docs/support.md`, with sizes of real models in few layers: what is planned between them by the tests of that
//! page, and moved between engines that run by those that pull and push.

use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::placement::HeadRule;
use kvferry_geometry::spec::{Component, Item, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::units::Tokens;

use crate::by_hand_states::{Shape, delta_net, delta_rule, falcon, falcon_rule, gpt_oss, gqa, indexer, mla};

/// Two layers with 8 heads.
#[must_use]
pub fn llama(tp: u32) -> Shape {
    Shape::new(vec![gqa("layers.0", 8), gqa("layers.1", 8)], tp)
}

/// Two layers of MLA.
#[must_use]
pub fn deepseek(tp: u32) -> Shape {
    Shape::new(vec![mla("layers.0"), mla("layers.1")], tp)
}

/// Names of so many layers.
#[must_use]
pub fn layers(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("layers.{i}")).collect()
}

/// An engine of `count` layers, cut into stages of so many.
#[must_use]
pub fn staged(tp: u32, item: impl Fn(&str) -> Item, stages: &[usize]) -> Shape {
    let names = layers(stages.iter().sum());
    let shape = Shape::new(names.iter().map(|n| item(n)).collect(), tp);
    cut(shape, &names, stages)
}

/// Cuts the layers `names` of a shape into stages of so many.
#[must_use]
pub fn cut(shape: Shape, names: &[String], stages: &[usize]) -> Shape {
    let mut rest = names;
    let mut lists: Vec<Vec<&str>> = Vec::new();
    for &n in stages {
        let (stage, more) = rest.split_at(n);
        lists.push(stage.iter().map(String::as_str).collect());
        rest = more;
    }
    let lists: Vec<&[&str]> = lists.iter().map(Vec::as_slice).collect();
    shape.stages(&lists)
}

/// Four layers of gpt-oss, every other with a window, in two groups that share memory.
#[must_use]
pub fn windows(tp: u32, stages: &[usize], share: bool) -> Shape {
    let names = layers(4);
    let items = names.iter().enumerate().map(|(i, n)| gpt_oss(n, (i % 2 == 0).then_some(128))).collect();
    let groups: [(&[&str], u32, u32); 2] = [(&["layers.0", "layers.2"], 16, 28), (&["layers.1", "layers.3"], 16, 28)];
    let style = LayoutStyle { share, ..LayoutStyle::HND };
    cut(Shape::new(items, tp).groups(&groups).style(style), &names, stages)
}

/// Falcon H1 in miniature: two layers of attention and state each; blocks of the pool hold either.
#[must_use]
pub fn falcon_h1(tp: u32, stages: &[usize], tokens: u32) -> Shape {
    let names: Vec<String> = (0..2).flat_map(|i| [format!("layers.{i}.attn"), format!("layers.{i}.mixer")]).collect();
    let attention = |n: &str| {
        let components = vec![Component::new("k", 128, "bf16"), Component::new("v", 128, "bf16")];
        Item::paged(n, PagedItem::new(2, components))
    };
    let items = names.iter().map(|n| if n.ends_with("attn") { attention(n) } else { falcon(n) }).collect();
    let groups: [(&[&str], u32, u32); 2] =
        [(&["layers.0.attn", "layers.1.attn"], tokens, 12), (&["layers.0.mixer", "layers.1.mixer"], 0, 12)];
    let style = LayoutStyle { share: true, ..LayoutStyle::HND };
    cut(Shape::new(items, tp).groups(&groups).rule(falcon_rule).style(style), &names, stages)
}

/// An MLA model with an indexer: two groups of different pages.
#[must_use]
pub fn sparse(tp: u32, indexer_block: u32) -> Shape {
    let items = vec![mla("layers.0"), mla("layers.1"), indexer("layers.0.indexer"), indexer("layers.1.indexer")];
    let groups: [(&[&str], u32, u32); 2] =
        [(&["layers.0", "layers.1"], 64, 6), (&["layers.0.indexer", "layers.1.indexer"], indexer_block, 12)];
    Shape::new(items, tp).groups(&groups)
}

/// Attention in blocks of `kernels` kernel blocks of 16 tokens beside a state: the reference pads attention blocks until a page
/// is as large as a state, which depends on the TP size.
#[must_use]
pub fn padded_hybrid(tp: u32, kernels: u32) -> Shape {
    let style = LayoutStyle { share: true, kernel_block: Some(16), ..LayoutStyle::HND };
    falcon_h1(tp, &[4], 16 * kernels).style(style)
}

/// An MLA target with a draft of two KV heads in the target's group.
#[must_use]
pub fn with_gqa_draft(tp: u32) -> Shape {
    Shape::new(vec![mla("layers.0"), mla("layers.1"), gqa("draft.0", 2)], tp)
}

/// Compressed sparse attention in small: heads with all tokens, a latent for every four tokens, the compressor's ring of 32
/// tokens, a gated delta net, and a short convolution that all ranks have whole.
#[must_use]
pub fn compressed(tp: u32, share: bool) -> Shape {
    let latent = |n: &str| Component::new(n, 1152, "bf16");
    let ring = PagedItem { retention: Retention::Ring(Tokens::new(32)), ..PagedItem::new(1, vec![latent("pending")]) };
    let items = vec![
        gqa("layers.0.attn", 2),
        Item::paged("layers.0.compressed", PagedItem { tokens_per_entry: 4, ..PagedItem::new(1, vec![latent("kv")]) }),
        Item::paged("layers.0.ring", ring),
        delta_net("layers.1", 2, 4),
        Item::state("layers.0.ple", StateItem { parts: vec![StatePart::new("conv", 1024, 3, 2, "bf16")] }),
    ];
    let groups: [(&[&str], u32, u32); 4] = [
        (&["layers.0.attn", "layers.0.compressed"], 16, 12),
        (&["layers.0.ring"], 16, 12),
        (&["layers.1"], 0, 12),
        (&["layers.0.ple"], 0, 12),
    ];
    let rule = |item: &Item, part: usize| match item.name.as_str() {
        "layers.0.ple" => HeadRule::Whole,
        _ => delta_rule(item, part),
    };
    Shape::new(items, tp).groups(&groups).rule(rule).style(LayoutStyle { share, ..LayoutStyle::HND })
}
