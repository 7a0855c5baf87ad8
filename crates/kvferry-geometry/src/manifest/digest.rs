//! The digest of a manifest: every field, in a fixed order.

use super::{CacheGroup, RankManifest};
use crate::digest::{Digest, Digester};
use crate::layout::{MemoryKind, PagedView, StateView, View};
use crate::placement::{HeadRange, Placement};
use crate::spec::{Item, ItemKind, ModelSpec, Retention, ValueHeads};

pub(super) fn of(spec: &ModelSpec, groups: &[CacheGroup], ranks: &[RankManifest]) -> Digest {
    let mut d = Digester::new("kvferry manifest 2");
    d.count(spec.items().len());
    spec.items().iter().for_each(|item| of_item(&mut d, item));
    d.count(groups.len());
    for g in groups {
        d.text(g.name.as_str());
        d.number(g.block_tokens.get());
        d.count(g.items.len());
        g.items.iter().for_each(|i| d.number(u64::from(i.get())));
    }
    d.count(ranks.len());
    for r in ranks {
        d.count(r.layout.regions.len());
        for region in &r.layout.regions {
            d.number(region.len.get());
            d.number(match region.kind {
                MemoryKind::Host => 0,
                MemoryKind::Device(i) => 1 + u64::from(i),
            });
        }
        // A proven manifest has a placement where it has a view, both of the item's kind.
        for (p, view) in r.placement.iter().zip(&r.layout.views) {
            match (p, view) {
                (Some(p), Some(view)) => {
                    d.number(1);
                    of_placement(&mut d, p);
                    of_view(&mut d, view);
                }
                _ => d.number(0),
            }
        }
    }
    d.finish()
}

fn of_item(d: &mut Digester, item: &Item) {
    d.text(item.name.as_str());
    match &item.kind {
        ItemKind::Paged(p) => {
            d.number(0);
            d.number(u64::from(p.heads));
            d.number(u64::from(p.tokens_per_entry));
            let (kind, tokens) = match p.retention {
                Retention::Full => (0, 0),
                Retention::Window(t) => (1, t.get()),
                Retention::Chunk(t) => (2, t.get()),
                Retention::Ring(t) => (3, t.get()),
            };
            d.number(kind);
            d.number(tokens);
            d.count(p.components.len());
            for c in &p.components {
                d.text(c.name.as_str());
                d.number(c.width.get());
                d.text(c.encoding.as_str());
                d.number(u64::from(c.span));
                d.number(u64::from(c.heads == ValueHeads::Shared));
            }
        }
        ItemKind::State(s) => {
            d.number(1);
            d.count(s.parts.len());
            for p in &s.parts {
                d.text(p.name.as_str());
                d.number(u64::from(p.units));
                d.number(u64::from(p.rows));
                d.number(p.width.get());
                d.text(p.encoding.as_str());
            }
        }
    }
}

fn of_placement(d: &mut Digester, placement: &Placement) {
    let range = |d: &mut Digester, heads: HeadRange| {
        d.number(u64::from(heads.start()));
        d.number(u64::from(heads.end()));
    };
    match placement {
        Placement::Paged(p) => {
            range(d, p.heads);
            for n in [p.tokens.count(), p.tokens.interleave(), p.tokens.index()] {
                d.number(u64::from(n));
            }
        }
        Placement::State(s) => s.parts.iter().for_each(|&units| range(d, units)),
    }
}

/// Components and parts are in the spec's order by now, so names add nothing.
fn of_view(d: &mut Digester, view: &View) {
    let numbers = [u64::from(view.region().get()), view.offset().get(), view.stride().get(), u64::from(view.blocks())];
    numbers.iter().for_each(|&n| d.number(n));
    match view {
        View::Paged(PagedView { block_size, kernel, components, .. }) => {
            [u64::from(*block_size), u64::from(kernel.size), kernel.stride.get()].iter().for_each(|&n| d.number(n));
            for c in components {
                let (bytes, stride) = c.chunks.map_or((0, 0), |c| (c.bytes.get(), c.stride.get()));
                for n in [c.offset.get(), c.head_stride.get(), c.entry_stride.get(), bytes, stride] {
                    d.number(n);
                }
            }
        }
        View::State(StateView { parts, .. }) => {
            for p in parts {
                for n in [p.offset.get(), p.row_stride.get(), p.unit_stride.get(), u64::from(p.scratch_rows)] {
                    d.number(n);
                }
            }
        }
    }
}
