//! What makes a random case difficult.

use kvferry_geometry::layout::{PagedView, StateView, View};
use kvferry_geometry::manifest::{CacheGroup, Manifest};
use kvferry_geometry::placement::PagedPlacement;
use kvferry_geometry::spec::{Component, PagedItem, Retention, ValueHeads};
use kvferry_geometry::staged::Place;

use super::Case;

/// The kinds of difficulty of a case.
pub(super) fn of(case: &Case) -> Vec<&'static str> {
    let mut found = Vec::new();
    let mut note = |name, yes| {
        if yes {
            found.push(name);
        }
    };
    let (src, dst) = (&*case.src, &*case.dst);
    let both = |yes: fn(&Manifest) -> bool| yes(src) && yes(dst);
    let either = |yes: fn(&Manifest) -> bool| yes(src) || yes(dst);

    // Who holds what.
    let context = |m: &Manifest| placements(m).map(|(_, p)| p.tokens.count()).max().unwrap_or(1);
    note("context parallel source", context(src) > 1);
    note("context parallel destination", context(dst) > 1);
    note("context parallel on both sides", context(src) > 1 && context(dst) > 1);
    let deals = |m: &Manifest| placements(m).map(|(_, p)| p.tokens.interleave()).max().unwrap_or(1);
    note("interleaves differ", context(src) > 1 && context(dst) > 1 && deals(src) != deals(dst));
    let ranks = (src.ranks().len(), dst.ranks().len());
    note("many ranks to few", ranks.0 > ranks.1);
    note("few ranks to many", ranks.0 < ranks.1);
    let divides = ranks.0.is_multiple_of(ranks.1) || ranks.1.is_multiple_of(ranks.0);
    note("neither rank count divides the other", !divides);
    note("pipeline stages on both sides", both(|m| m.ranks().iter().any(|r| r.placement.contains(&None))));
    let only_states = |m: &Manifest| {
        let paged = |r: &kvferry_geometry::manifest::RankManifest| {
            let mut placed = r.placement.iter().flatten().peekable();
            placed.peek().is_some() && placed.all(|p| p.as_state().is_some())
        };
        m.spec().items().iter().any(|i| i.as_paged().is_some()) && m.ranks().iter().any(paged)
    };
    note("ranks of states alone", either(only_states));
    note("hand-made placements", case.text.iter().any(|t| t.contains("by hand")));
    note("refused placements", !case.refused.is_empty());
    let replicated =
        |m: &Manifest| placements(m).any(|(i, p)| placements(m).filter(|(j, q)| *j == i && *q == p).count() > 1);
    note("replicas at the source", replicated(src));
    note("striped replicas at the source", replicated(src) && case.stripe);
    note("distances", case.salt % 3 == 2);

    // Groups and blocks.
    let one_head = |m: &Manifest, g: &CacheGroup, one: bool| {
        g.items.iter().any(|i| m.spec().get(*i).and_then(|i| i.as_paged()).is_some_and(|p| (p.heads == 1) == one))
    };
    let mixed_heads = |m: &Manifest| m.groups().iter().any(|g| one_head(m, g, true) && one_head(m, g, false));
    note("one and several heads in one group", mixed_heads(src) || mixed_heads(dst));
    note("several groups", both(|m| m.groups().len() > 1));
    note("groups differ", src.groups().len() != dst.groups().len());
    let order = src.spec().items().iter().zip(dst.spec().items()).any(|(a, b)| a.name != b.name);
    note("item order differs", order);
    let sizes = |m: &Manifest| m.groups().iter().map(|g| g.block_tokens.get()).filter(|&b| b > 0).collect::<Vec<_>>();
    let pairs = || sizes(src).into_iter().flat_map(|s| sizes(dst).into_iter().map(move |d| (s, d)));
    note("block sizes differ, one divides", pairs().any(|(s, d)| s != d && (s % d == 0 || d % s == 0)));
    note("block sizes differ, none divides", pairs().any(|(s, d)| s % d != 0 && d % s != 0));
    note("kernel blocks at the source", has_kernels(src));
    note("kernel blocks at the destination", has_kernels(dst));
    let kernels = |m: &Manifest| paged_views(m).map(|v| v.kernel.size).min();
    note("kernel blocks on both sides, that differ", both(has_kernels) && kernels(src) != kernels(dst));
    let kept = |m: &Manifest, g: &CacheGroup| {
        let mut all: Vec<Retention> =
            g.items.iter().filter_map(|i| Some(m.spec().get(*i)?.as_paged()?.retention)).collect();
        all.sort_unstable();
        all.dedup();
        all.len()
    };
    let mixed = |m: &Manifest| m.groups().iter().any(|g| kept(m, g) > 1);
    note("retentions mixed in a group", mixed(src) || mixed(dst));
    note("groups share memory", either(shares_memory));
    note("groups share memory on both sides", both(shares_memory));
    note("states and pages share memory", either(states_share));

    // What is cached.
    let paged = |yes: fn(&PagedItem) -> bool| matched(case).any(|i| i.as_paged().is_some_and(yes));
    note("windows", paged(|p| matches!(p.retention, Retention::Window(_))));
    note("chunks", paged(|p| matches!(p.retention, Retention::Chunk(_))));
    note("rings", paged(|p| matches!(p.retention, Retention::Ring(_))));
    let n = case.tokens;
    let gone_round = |i: &kvferry_geometry::spec::Item| matches!(i.as_paged().map(|p| p.retention), Some(Retention::Ring(r)) if r.get() < n);
    note("rings that have gone round", matched(case).any(gone_round));
    note("compressed entries", paged(|p| p.tokens_per_entry > 1));
    let component =
        |yes: fn(&Component) -> bool| matched(case).filter_map(|i| i.as_paged()).flat_map(|p| &p.components).any(yes);
    note("scales for each head and entry", component(|c| scale_of(c) && c.span == 1 && c.heads == ValueHeads::Each));
    note("scales for each head and block", component(|c| c.span > 1 && c.heads == ValueHeads::Each));
    note("scales for all heads", component(|c| c.span == 1 && c.heads == ValueHeads::Shared));
    note("scales for all heads of a block", component(|c| c.span > 1 && c.heads == ValueHeads::Shared));
    let spans_compressed = |p: &PagedItem| p.tokens_per_entry > 1 && p.components.iter().any(|c| c.span > 1);
    note("scales of compressed blocks", paged(spans_compressed));
    note("values cut in chunks", either(|m| paged_views(m).any(|v| v.components.iter().any(|c| c.chunks.is_some()))));
    note("items of one side", case.src.spec().items().len() != matched(case).count());
    note("items of the destination alone", case.dst.spec().items().len() != matched(case).count());

    // States.
    let states = || matched(case).filter(|i| i.as_state().is_some());
    note("states", states().next().is_some());
    note("states and pages", states().next().is_some() && matched(case).any(|i| i.as_paged().is_some()));
    note("states alone", matched(case).next().is_some() && matched(case).all(|i| i.as_state().is_some()));
    note("parts sharded unequally", either(unequal_parts));
    note("scratch rows", either(|m| state_views(m).any(|v| v.parts.iter().any(|p| p.scratch_rows > 0))));
    let order = |m: &Manifest| -> Vec<bool> {
        let parts = state_views(m).flat_map(|v| v.parts.iter());
        let mut all: Vec<bool> = parts.map(|p| p.row_stride > p.unit_stride).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    note("states dim-first and state-first", states().next().is_some() && order(src) != order(dst));
    let taken = || case.dst_tables.iter().map(|d| d.states.len());
    note("several checkpoints", taken().any(|k| k > 1));
    let resumes = case.dst_tables.iter().any(|d| d.states.iter().any(|s| s.0 == n));
    note("the state is there already", states().next().is_some() && !resumes);
    note("more checkpoints at the source", case.src_tables.iter().any(|s| s.states.len() > 2));

    // The request.
    note("hits", case.dst_tables.iter().any(|d| d.cached > 0));
    note("full hits of pages with states to move", resumes && case.dst_tables.iter().any(|d| d.cached == n));
    let hits: Vec<u64> = case.dst_tables.iter().filter(|d| !d.table.blocks.is_empty()).map(|d| d.cached).collect();
    note("hits that differ", hits.windows(2).any(|w| w[0] != w[1]));
    note("frozen tails", case.src_tables.iter().any(|s| s.frozen));
    note("late tables", case.src_tables.iter().any(|s| s.table.first > 0));
    note("late tables at the destination", case.dst_tables.iter().any(|d| d.table.first > 0));
    let repeats = |blocks: &[u32]| (1..blocks.len()).any(|i| blocks[..i].contains(&blocks[i]));
    note("placeholders of blocks given back", case.src_tables.iter().any(|s| repeats(&s.table.blocks)));
    note("staged at the destination", case.place == Place::Destination);
    note("staged at the source", case.place == Place::Source);
    note("packed rows on one side", packed(src) != packed(dst));
    note("packed rows on both sides", both(packed));
    found
}

fn scale_of(c: &Component) -> bool {
    c.name.as_str().ends_with("scale")
}

/// Items that both sides have.
fn matched(case: &Case) -> impl Iterator<Item = &kvferry_geometry::spec::Item> {
    case.dst.spec().items().iter().filter(|i| case.src.spec().find(&i.name).is_some())
}

/// Every paged item's placement on every rank.
fn placements(m: &Manifest) -> impl Iterator<Item = (usize, PagedPlacement)> {
    let ranks = m.ranks().iter();
    ranks.flat_map(|r| r.placement.iter().enumerate().filter_map(|(i, p)| Some((i, *p.as_ref()?.as_paged()?))))
}

fn views(m: &Manifest) -> impl Iterator<Item = &View> {
    m.ranks().iter().flat_map(|r| r.layout.views.iter().flatten())
}

fn paged_views(m: &Manifest) -> impl Iterator<Item = &PagedView> {
    views(m).filter_map(View::as_paged)
}

fn state_views(m: &Manifest) -> impl Iterator<Item = &StateView> {
    views(m).filter_map(View::as_state)
}

fn has_kernels(m: &Manifest) -> bool {
    paged_views(m).any(|v| v.kernel.size < v.block_size)
}

/// Whether views of two groups of a rank start in one place.
fn sharing(m: &Manifest, counts: impl Fn(usize, usize) -> bool) -> bool {
    m.ranks().iter().any(|r| {
        let placed: Vec<(usize, &View)> =
            r.layout.views.iter().enumerate().filter_map(|(i, v)| Some((i, v.as_ref()?))).collect();
        placed.iter().any(|(i, a)| {
            placed.iter().any(|(j, b)| {
                i != j && (a.region(), a.offset(), a.stride()) == (b.region(), b.offset(), b.stride()) && counts(*i, *j)
            })
        })
    })
}

fn shares_memory(m: &Manifest) -> bool {
    sharing(m, |_, _| true)
}

fn states_share(m: &Manifest) -> bool {
    let items = m.spec().items();
    sharing(m, |i, j| items[i].as_paged().is_some() && items[j].as_state().is_some())
}

/// Whether a rank has another share of one part than of another.
fn unequal_parts(m: &Manifest) -> bool {
    m.ranks().iter().any(|r| {
        r.placement.iter().zip(m.spec().items()).any(|(p, item)| {
            let (Some(p), Some(state)) = (p.as_ref().and_then(|p| p.as_state()), item.as_state()) else { return false };
            let share = |i: usize| (p.parts[i].count(), state.parts[i].units);
            (1..p.parts.len()).any(|i| share(i).0 * share(0).1 != share(0).0 * share(i).1)
        })
    })
}

/// Whether some rank has several items in one row.
fn packed(m: &Manifest) -> bool {
    m.ranks().iter().any(|r| {
        let views: Vec<&View> = r.layout.views.iter().flatten().collect();
        let rows = |a: &View, b: &View| {
            let apart = a.offset().get().abs_diff(b.offset().get());
            a.region() == b.region() && a.stride() == b.stride() && apart > 0 && apart < a.stride().get()
        };
        (0..views.len()).any(|i| views[..i].iter().any(|a| rows(a, views[i])))
    })
}
