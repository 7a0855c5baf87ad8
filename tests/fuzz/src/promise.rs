//! What an accepted manifest promises, looked at with arithmetic of its own.

use std::collections::BTreeSet;

use kvferry_geometry::layout::{CacheLayout, View};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::placement::{Placement, TokenClass};
use kvferry_geometry::spec::{Item, ItemKind, ModelSpec, ValueHeads};
use kvferry_geometry::units::{BlockId, GroupId, ItemId, RankId, Tokens};

/// The most runs of memory that are listed for one manifest.
const MAX_RUNS: u128 = 1 << 14;
/// The most (rank, head, token) that are asked for one axis of an item.
const MAX_QUESTIONS: usize = 1 << 14;
/// Manifests of more placements are not made a second time.
const MAX_REPEATED: usize = 512;

/// Bytes of one component or part: a run at each point of the loops.
struct Places {
    offset: u128,
    /// (count, stride).
    loops: Vec<(u128, u128)>,
    run: u128,
}

/// Looks at everything that [`Manifest::new`] has proven, by sample where it is large.
///
/// # Panics
/// Where something is not so.
pub(crate) fn manifest(m: &Manifest) {
    let (spec, ranks) = (m.spec(), m.ranks());
    let mut budget = MAX_RUNS;
    for rank in ranks {
        assert_eq!((rank.placement.len(), rank.layout.views.len()), (spec.items().len(), spec.items().len()));
        in_regions(spec, &rank.placement, &rank.layout);
        for group in m.groups() {
            apart(spec, &rank.placement, &rank.layout, &group.items, &mut budget);
        }
    }
    for (id, item) in spec.iter() {
        assert_eq!(m.groups().iter().filter(|g| g.items.contains(&id)).count(), 1, "{}", item.name);
        covered(m, id, item);
    }
    for (id, group) in (0u32..).map(GroupId::new).zip(m.groups()) {
        let views = ranks.iter().flat_map(|r| group.items.iter().filter_map(|i| r.layout.views[i.index()].as_ref()));
        assert_eq!(m.blocks(id), BlockId::new(views.map(View::blocks).min().unwrap_or(0)), "{}", group.name);
    }
    for rank in (0u32..).map(RankId::new).take(ranks.len()) {
        assert_eq!(m.region_lens(rank).len(), ranks[rank.index()].layout.regions.len());
    }
    if ranks.len() * spec.items().len() <= MAX_REPEATED {
        let again = Manifest::new(spec.clone(), m.groups().to_vec(), ranks.to_vec());
        assert_eq!(again.as_ref(), Ok(m), "an accepted manifest is not accepted as it is");
    }
}

fn in_regions(spec: &ModelSpec, placement: &[Option<Placement>], layout: &CacheLayout) {
    for (item, (placed, view)) in spec.items().iter().zip(placement.iter().zip(&layout.views)) {
        let (Some(placed), Some(view)) = (placed, view) else {
            assert!(placed.is_none() && view.is_none(), "{}: placed or viewed, not both", item.name);
            continue;
        };
        let len = u128::from(layout.regions[view.region().index()].len.get());
        for places in places(item, placed, view) {
            let reach: u128 = places.loops.iter().map(|(count, stride)| (count - 1) * stride).sum();
            let end = places.offset + reach + places.run;
            assert!(end <= len, "{}: byte {end} of a region of {len}", item.name);
        }
    }
}

/// Lists the runs of a group where they are few, and looks for two that meet.
fn apart(spec: &ModelSpec, placement: &[Option<Placement>], layout: &CacheLayout, items: &[ItemId], budget: &mut u128) {
    let mut all = Vec::new();
    for &id in items {
        let (Some(item), Some(placed), Some(view)) =
            (spec.get(id), placement[id.index()].as_ref(), layout.views[id.index()].as_ref())
        else {
            continue;
        };
        for places in places(item, placed, view) {
            let count = places.loops.iter().map(|l| l.0).fold(1, u128::saturating_mul);
            let Some(left) = budget.checked_sub(count) else { return };
            *budget = left;
            let mut starts = vec![places.offset];
            for (count, stride) in places.loops {
                starts = starts.into_iter().flat_map(|s| (0..count).map(move |i| s + i * stride)).collect();
            }
            all.extend(starts.into_iter().map(|s| (view.region(), s, s + places.run)));
        }
    }
    all.sort_unstable();
    for pair in all.windows(2) {
        assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "places of one group share bytes: {pair:?}");
    }
}

/// By sample: every head (or unit) of every token is on some rank.
fn covered(m: &Manifest, id: ItemId, item: &Item) {
    let totals: Vec<u32> = match &item.kind {
        ItemKind::Paged(p) => vec![p.heads],
        ItemKind::State(s) => s.parts.iter().map(|p| p.units).collect(),
        _ => Vec::new(),
    };
    for (axis, total) in totals.into_iter().enumerate() {
        let held: BTreeSet<(u32, u32, TokenClass)> =
            m.ranks().iter().filter_map(|r| held(r.placement[id.index()].as_ref()?, axis)).collect();
        let mut heads: BTreeSet<u32> = [0, total - 1].into();
        heads.extend(held.iter().flat_map(|h| [h.0, h.1 - 1]));
        assert!(heads.iter().all(|&h| h < total), "{}: heads {heads:?} of {total}", item.name);
        let mut tokens: BTreeSet<u64> = (0..16).collect();
        tokens.extend(held.iter().flat_map(|h| [h.2.period() - 1, h.2.period() / 2, u64::from(h.2.interleave())]));
        let questions = heads.iter().flat_map(|h| tokens.iter().map(move |t| (*h, *t)));
        for (head, token) in questions.take(MAX_QUESTIONS / held.len().max(1)) {
            let holds = |h: &(u32, u32, TokenClass)| h.0 <= head && head < h.1 && h.2.holds(Tokens::new(token));
            assert!(held.iter().any(holds), "{}: nobody holds head {head} of token {token}", item.name);
        }
    }
}

fn held(placement: &Placement, axis: usize) -> Option<(u32, u32, TokenClass)> {
    let (range, tokens) = match placement {
        Placement::Paged(p) => (p.heads, p.tokens),
        Placement::State(s) => (*s.parts.get(axis)?, TokenClass::ALL),
    };
    Some((range.start(), range.end(), tokens))
}

/// One for each component or part, scratch rows included.
fn places(item: &Item, placement: &Placement, view: &View) -> Vec<Places> {
    let wide = |n: u64| u128::from(n);
    let mut out = Vec::new();
    match (&item.kind, placement, view) {
        (ItemKind::Paged(item), Placement::Paged(p), View::Paged(v)) => {
            for c in &item.components {
                let of = v.components.iter().find(|x| x.name == c.name).expect("a view of every component");
                let width = c.width.get();
                let chunk = of.chunks.map_or(width, |x| x.bytes.get());
                let heads = if c.heads == ValueHeads::Shared { 1 } else { p.heads.count() };
                let loops = vec![
                    (v.blocks.into(), wide(v.block_stride.get())),
                    ((v.block_size / v.kernel.size).into(), wide(v.kernel.stride.get())),
                    (heads.into(), wide(of.head_stride.get())),
                    ((v.kernel.size / c.span).into(), wide(of.entry_stride.get())),
                    (wide(width / chunk), of.chunks.map_or(0, |x| wide(x.stride.get()))),
                ];
                let offset = wide(v.offset.get()) + wide(of.offset.get());
                out.push(Places { offset, loops, run: wide(chunk) });
            }
        }
        (ItemKind::State(item), Placement::State(p), View::State(v)) => {
            for (part, units) in item.parts.iter().zip(&p.parts) {
                let of = v.parts.iter().find(|x| x.name == part.name).expect("a view of every part");
                let loops = vec![
                    (v.slots.into(), wide(v.slot_stride.get())),
                    (u128::from(part.rows) + u128::from(of.scratch_rows), wide(of.row_stride.get())),
                    (units.count().into(), wide(of.unit_stride.get())),
                ];
                let offset = wide(v.offset.get()) + wide(of.offset.get());
                out.push(Places { offset, loops, run: wide(part.width.get()) });
            }
        }
        _ => panic!("{}: placement or view of the wrong kind", item.name),
    }
    out
}
