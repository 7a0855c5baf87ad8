//! Requests and descriptions that must be refused, with the right type, and without a panic whatever the numbers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_geometry::batch::{Base, Batch, Descriptor, Dim, Nest, PairRun, Part, Section};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::{Chunks, ComponentOrder, LayoutStyle, PagedView, StateView, View};
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRange, HeadRule, Parallelism, PcpMode, Placement, TokenClass, split_heads};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{
    BlockTable, BoundRequest, Checkpoint, DstGroup, DstPaged, DstState, Request, RequestError, SrcGroup, SrcPaged,
    SrcState, Tail,
};
use kvferry_geometry::spec::{Item, ItemKind, ModelSpec, Retention, ValueHeads};
use kvferry_geometry::units::{BlockId, Bytes, GroupId, ItemId, RegionId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;
use kvferry_oracle::{Gap, Table};
use kvferry_tests::{Case, Choices, sample};

fn compatible(case: &Case) -> Compatible {
    case.compatible().unwrap()
}

/// (refusal, group) of all errors.
fn kinds(errors: &[RequestError]) -> BTreeSet<(&'static str, String)> {
    let kind = |e: &RequestError| match e {
        RequestError::NoRoom { group, .. } => ("no room", group.to_string()),
        RequestError::NotHeld { group, .. } => ("not held", group.to_string()),
        RequestError::RepeatedBlock { side, group, .. } => ("repeated", format!("{side} {group}")),
        RequestError::CachedBeyond { group, .. } => ("cached beyond", group.to_string()),
        RequestError::BlockOutOfRange { side, group, .. } => ("out of range", format!("{side} {group}")),
        RequestError::GroupCount { side, .. } => ("group count", side.to_string()),
        RequestError::SplitSpan { group, .. } => ("split", group.to_string()),
        RequestError::NoState { group, .. } => ("no state", group.to_string()),
        RequestError::SharedBytes { first, second, .. } => ("shared bytes", format!("{first} {second}")),
        other => panic!("{other}"),
    };
    errors.iter().map(kind).collect()
}

/// What the oracle says must be refused, in the planner's words.
fn expected(case: &Case) -> BTreeSet<(&'static str, String)> {
    let group = |m: &Manifest, item: &_| m.groups()[m.group_of(m.spec().find(item).unwrap()).index()].name.to_string();
    let kind = |gap: Gap| match gap {
        Gap::NotHeld { item, .. } => ("not held", group(&case.src, &item)),
        Gap::NoRoom { item, .. } => ("no room", group(&case.dst, &item)),
        Gap::Split { item, .. } => ("split", group(&case.dst, &item)),
        Gap::NoState { item, .. } => ("no state", group(&case.src, &item)),
    };
    let mut all: BTreeSet<_> = case.transfer().gaps().unwrap().into_iter().map(kind).collect();
    // Of a group that gets nothing nobody asks, and states are not hit up to a token.
    let matched =
        |g: &CacheGroup| g.items.iter().any(|&i| case.src.spec().find(&case.dst.spec().get(i).unwrap().name).is_some());
    let beyond = case
        .dst
        .groups()
        .iter()
        .zip(&case.dst_tables)
        .filter(|(g, t)| g.block_tokens.get() > 0 && t.cached > case.tokens && matched(g));
    all.extend(beyond.map(|(group, _)| ("cached beyond", group.name.to_string())));
    all
}

fn has_ring(m: &Manifest, group: &CacheGroup) -> bool {
    let ring =
        |i: &ItemId| matches!(m.spec().get(*i).unwrap().as_paged().map(|p| p.retention), Some(Retention::Ring(_)));
    group.items.iter().any(ring)
}

#[test]
fn gaps_are_refused_exactly_where_the_oracle_finds_them() {
    let (mut refused, mut served) = (0, 0);
    let mut by_kind: BTreeMap<&str, u32> = BTreeMap::new();
    for (i, mut case) in sample(21, 1500).enumerate() {
        let mut c = Choices::seeded(i as u64 + 1);
        let cut = |c: &mut Choices, table: &mut Table| match c.below(3) {
            0 if !table.blocks.is_empty() => {
                table.first += 1;
                table.blocks.remove(0);
            }
            1 => drop(table.blocks.pop()),
            _ => {}
        };
        let rings: Vec<bool> = case.src.groups().iter().map(|g| has_ring(&case.src, g)).collect();
        for (src, ring) in case.src_tables.iter_mut().zip(rings) {
            let blocks = &src.table.blocks;
            // A ring has no more than it has places, and what has been given back is not held.
            let fixed = ring || (1..blocks.len()).any(|i| blocks[..i].contains(&blocks[i]));
            let lowest = if fixed { src.held.start } else { 0 };
            match c.below(6) {
                0 => src.held.start = c.within(lowest, src.held.end),
                1 => src.held.end = c.within(src.held.start, src.held.end),
                2 if !ring => cut(&mut c, &mut src.table),
                3 => drop(src.states.pop()),
                _ => {}
            }
        }
        let rings: Vec<bool> = case.dst.groups().iter().map(|g| has_ring(&case.dst, g)).collect();
        for (dst, ring) in case.dst_tables.iter_mut().zip(rings) {
            match c.below(6) {
                0 if !ring => cut(&mut c, &mut dst.table),
                1 => dst.cached = c.within(0, case.tokens + 3),
                2 if dst.states.len() == 1 => dst.states[0].0 = c.within(0, case.tokens),
                _ => {}
            }
        }
        let got = BoundRequest::new(&compatible(&case), case.request());
        let mut got = got.map_or_else(|e| kinds(&e.0), |_| BTreeSet::new());
        // Placeholders of what isn't held may stand twice where a hit was cut down.
        let lacking: Vec<String> =
            got.iter().filter(|g| g.0 == "not held").map(|g| format!("source {}", g.1)).collect();
        got.retain(|g| g.0 != "repeated" || !lacking.contains(&g.1));
        assert_eq!(got, expected(&case), "{case:?}");
        got.iter().for_each(|g| *by_kind.entry(g.0).or_insert(0) += 1);
        if got.is_empty() {
            served += 1;
            case.verify().unwrap_or_else(|e| panic!("{e}\n{case:?}"));
        } else {
            refused += 1;
        }
    }
    println!("{refused} refused, {served} served; {by_kind:?}");
    assert!(refused > 300 && served > 300, "{refused} refused, {served} served");
    let rare = by_kind.values().any(|&n| n < 5);
    assert!(by_kind.len() == 5 && !rare, "{by_kind:?}");
}

#[test]
fn wrong_ids_and_counts_are_refused_by_type() {
    let mut seen = BTreeSet::new();
    for (i, case) in sample(22, 300).enumerate() {
        let both = compatible(&case);
        let mut c = Choices::seeded(i as u64 + 1);
        let check = |case: &Case, expected: (&'static str, String), seen: &mut BTreeSet<&'static str>| {
            let errors = BoundRequest::new(&both, case.request()).expect_err("a fault was planted").0;
            assert!(kinds(&errors).contains(&expected), "{expected:?} is not in {errors:?}");
            seen.insert(expected.0);
        };
        for (group, dst) in case.dst_tables.iter().enumerate() {
            let blocks = &dst.table.blocks;
            let name = case.dst.groups()[group].name.to_string();
            if blocks.len() > 1 {
                let mut repeated = case.clone();
                let from = usize::try_from(c.below(blocks.len() as u64)).unwrap();
                let to = (from + 1 + usize::try_from(c.below(blocks.len() as u64 - 1)).unwrap()) % blocks.len();
                repeated.dst_tables[group].table.blocks[to] = blocks[from];
                check(&repeated, ("repeated", format!("destination {name}")), &mut seen);
            }
            if !blocks.is_empty() {
                let mut outside = case.clone();
                let limit = case.dst.blocks(GroupId::new(u32::try_from(group).unwrap())).get();
                let at = usize::try_from(c.below(blocks.len() as u64)).unwrap();
                outside.dst_tables[group].table.blocks[at] = c.pick(&[limit, limit + 1, u32::MAX - 1, u32::MAX]);
                check(&outside, ("out of range", format!("destination {name}")), &mut seen);
            }
        }
        for (group, dst) in case.dst_tables.iter().enumerate().filter(|(_, d)| !d.states.is_empty()) {
            let name = case.dst.groups()[group].name.to_string();
            let mut outside = case.clone();
            let limit = case.dst.blocks(GroupId::new(u32::try_from(group).unwrap())).get();
            outside.dst_tables[group].states[0].1 = limit;
            check(&outside, ("out of range", format!("destination {name}")), &mut seen);
            if dst.states.len() > 1 {
                let mut repeated = case.clone();
                repeated.dst_tables[group].states[0].1 = dst.states[1].1;
                check(&repeated, ("repeated", format!("destination {name}")), &mut seen);
            }
        }
        for (group, src) in case.src_tables.iter().enumerate() {
            if let Some(last) = src.table.blocks.len().checked_sub(1) {
                let mut outside = case.clone();
                let limit = case.src.blocks(GroupId::new(u32::try_from(group).unwrap())).get();
                outside.src_tables[group].table.blocks[last] = limit;
                check(&outside, ("out of range", format!("source {}", case.src.groups()[group].name)), &mut seen);
            }
        }
        let mut fewer = case.clone();
        fewer.src_tables.pop();
        check(&fewer, ("group count", "source".into()), &mut seen);
        let mut more = case.clone();
        more.dst_tables.push(more.dst_tables[0].clone());
        check(&more, ("group count", "destination".into()), &mut seen);
    }
    assert_eq!(seen.len(), 3, "{seen:?}");
}

/// Numbers that break arithmetic, and some that don't.
fn odd(c: &mut Choices) -> u64 {
    let edges = [
        0,
        1,
        2,
        3,
        7,
        16,
        (1 << 20) - 1,
        1 << 20,
        (1 << 20) + 1,
        1 << 30,
        (1 << 31) - 1,
        1 << 31,
        u64::from(u32::MAX) - 1,
        u64::from(u32::MAX),
        1 << 32,
        1 << 40,
        1 << 62,
        (1 << 63) - 1,
        1 << 63,
        u64::MAX - 7,
        u64::MAX - 1,
        u64::MAX,
    ];
    match c.below(4) {
        0 => c.below(40),
        1 => (c.below(1 << 32) << 32) | c.below(1 << 32),
        _ => c.pick(&edges),
    }
}

fn odd32(c: &mut Choices) -> u32 {
    u32::try_from(odd(c) & u64::from(u32::MAX)).unwrap()
}

/// Parts of a manifest with some numbers replaced.
#[allow(clippy::cast_possible_truncation, reason = "indices")]
fn corrupted(c: &mut Choices, manifest: &Manifest, faults: u64) -> (Vec<Item>, Vec<CacheGroup>, Vec<RankManifest>) {
    let mut items = manifest.spec().items().to_vec();
    let mut groups = manifest.groups().to_vec();
    let mut ranks = manifest.ranks().to_vec();
    for _ in 0..faults {
        let rank = c.below(ranks.len() as u64) as usize;
        let r = &mut ranks[rank];
        let item = c.below(items.len() as u64) as usize;
        let view = r.layout.views.get_mut(item).and_then(Option::as_mut);
        match (c.below(34), view) {
            (0, _) => r.placement.truncate(item),
            (1, _) => r.layout.views.push(None),
            (2, _) => r.layout.regions.truncate(item),
            (3, _) => {
                if let Some(region) = r.layout.regions.first_mut() {
                    region.len = Bytes::new(odd(c));
                }
            }
            (4, _) => r.placement.iter_mut().skip(item).take(1).for_each(|p| *p = None),
            (5, _) => {
                if let (Some(Some(p)), Some(heads)) = (r.placement.get_mut(item), HeadRange::new(odd32(c), odd32(c))) {
                    match p {
                        Placement::Paged(p) => p.heads = heads,
                        Placement::State(s) => s.parts[0] = heads,
                    }
                }
            }
            (6, _) => {
                let class = TokenClass::new(odd32(c), odd32(c), odd32(c));
                if let (Some(Some(Placement::Paged(p))), Some(tokens)) = (r.placement.get_mut(item), class) {
                    p.tokens = tokens;
                }
            }
            (7, _) => r.layout.views.iter_mut().skip(item).take(1).for_each(|v| *v = None),
            (8, _) => {
                let group = c.below(groups.len() as u64) as usize;
                groups[group].block_tokens = Tokens::new(odd(c));
            }
            (9, _) => groups[0].items.push(ItemId::new(odd32(c))),
            (10, _) => drop(groups[0].items.pop()),
            (11 | 12, _) => corrupt_item(c, &mut items[item].kind),
            (13, _) => {
                if let Some(Some(Placement::State(s))) = r.placement.get_mut(item) {
                    s.parts.pop();
                }
            }
            // A region with room for anything: other numbers of the view are then free.
            (14, Some(view)) => {
                if let Some(region) = r.layout.regions.get_mut(view.region().index()) {
                    region.len = Bytes::new(u64::MAX);
                }
                match view {
                    View::Paged(v) => v.blocks = 1,
                    View::State(v) => v.slots = 1,
                }
            }
            (15 | 16, Some(view)) => {
                let (region, offset) = match view {
                    View::Paged(v) => (&mut v.region, &mut v.offset),
                    View::State(v) => (&mut v.region, &mut v.offset),
                };
                if c.chance(30) { *region = RegionId::new(odd32(c)) } else { *offset = Bytes::new(odd(c)) }
            }
            (_, Some(View::Paged(v))) => corrupt_paged(c, v),
            (_, Some(View::State(v))) => corrupt_state(c, v),
            _ => {}
        }
    }
    (items, groups, ranks)
}

fn corrupt_item(c: &mut Choices, kind: &mut ItemKind) {
    match kind {
        ItemKind::Paged(paged) => match c.below(8) {
            0 => paged.heads = odd32(c),
            1 => paged.components[0].width = Bytes::new(odd(c)),
            2 => paged.retention = Retention::Window(Tokens::new(odd(c))),
            3 => paged.retention = Retention::Chunk(Tokens::new(odd(c))),
            4 => paged.retention = Retention::Ring(Tokens::new(odd(c))),
            5 => paged.tokens_per_entry = odd32(c),
            6 => paged.components[0].heads = ValueHeads::Shared,
            _ => paged.components[0].span = odd32(c),
        },
        ItemKind::State(state) => match c.below(4) {
            0 => state.parts[0].units = odd32(c),
            1 => state.parts[0].rows = odd32(c),
            2 => drop(state.parts.pop()),
            _ => state.parts[0].width = Bytes::new(odd(c)),
        },
        _ => {}
    }
}

fn corrupt_paged(c: &mut Choices, v: &mut PagedView) {
    match c.below(12) {
        0 | 1 => v.block_stride = Bytes::new(odd(c)),
        2 => v.blocks = odd32(c),
        3 => v.block_size = odd32(c),
        4 => v.kernel.size = odd32(c),
        5 => v.kernel.stride = Bytes::new(odd(c)),
        6 => v.components[0].offset = Bytes::new(odd(c)),
        7 => v.components[0].head_stride = Bytes::new(odd(c)),
        8 => v.components[0].entry_stride = Bytes::new(odd(c)),
        9 => v.components[0].name = "other".into(),
        _ => v.components[0].chunks = Some(Chunks { bytes: Bytes::new(odd(c)), stride: Bytes::new(odd(c)) }),
    }
}

fn corrupt_state(c: &mut Choices, v: &mut StateView) {
    match c.below(8) {
        0 | 1 => v.slot_stride = Bytes::new(odd(c)),
        2 => v.slots = odd32(c),
        3 => v.parts[0].offset = Bytes::new(odd(c)),
        4 => v.parts[0].row_stride = Bytes::new(odd(c)),
        5 => v.parts[0].unit_stride = Bytes::new(odd(c)),
        6 => v.parts[0].scratch_rows = odd32(c),
        _ => v.parts[0].name = "other".into(),
    }
}

/// Whatever numbers a description has, it is refused or it plans, and then every byte is right.
#[test]
fn no_description_makes_the_planner_panic() {
    let (mut refused, mut planned, mut compared) = (0, 0, 0);
    for (i, mut case) in sample(31, 4000).enumerate() {
        let mut c = Choices::seeded(i as u64 + 1);
        let faults = c.pick(&[1, 1, 1, 2, 3, 5]);
        let at_src = c.chance(50);
        let side = if at_src { &mut case.src } else { &mut case.dst };
        let (items, groups, ranks) = corrupted(&mut c, side, faults);
        let Ok(spec) = ModelSpec::new(items) else {
            refused += 1;
            continue;
        };
        match Manifest::new(spec, groups, ranks) {
            Ok(sound) => *side = Arc::new(sound),
            Err(e) => {
                assert!(!e.to_string().is_empty());
                refused += 1;
                continue;
            }
        }
        let Ok(both) = case.compatible() else { continue };
        let Ok(peers) = PeerMap::new(&both, odd(&mut c)) else { continue };
        let Ok(bound) = BoundRequest::new(&both, case.request()) else { continue };
        planned += 1;
        for pair in peers.pairs() {
            let plan = PairPlan::new(&both, &peers, pair.src(), pair.dst()).unwrap();
            let batch = plan.resolve(&bound).unwrap();
            let mut few = [Descriptor::default(); 100];
            let _ = batch.cursor().fill(&mut few);
            let (src, dst) = (case.src.region_lens(pair.src()), case.dst.region_lens(pair.dst()));
            if let Err(e) = batch.check(&src, &dst) {
                panic!("{e}");
            }
        }
        if is_small(&case.src) && is_small(&case.dst) {
            match case.verify() {
                Ok(_) => compared += 1,
                // Groups may share memory; the blocks of this request then don't suit the changed view.
                Err(e) if e.contains("two coordinates of the request share") => {}
                Err(e) => panic!("{e}\n{case:?}"),
            }
        }
    }
    println!("{refused} refused, {planned} planned, {compared} compared");
    assert!(refused > 1500 && planned > 300 && compared > 200);
}

/// Whether the oracle can walk it.
fn is_small(m: &Manifest) -> bool {
    let bytes: u128 = m.ranks().iter().flat_map(|r| &r.layout.regions).map(|x| u128::from(x.len.get())).sum();
    let placed = m.ranks().iter().flat_map(|r| r.placement.iter().flatten());
    bytes < 1 << 20 && placed.into_iter().all(|p| p.as_paged().is_none_or(|p| p.tokens.period() < 5000))
}

#[test]
fn no_request_makes_the_planner_panic() {
    let mut planned = 0;
    for (i, case) in sample(41, 1500).enumerate() {
        let mut c = Choices::seeded(i as u64 + 1);
        let both = compatible(&case);
        let mut request = case.request();
        for _ in 0..c.pick(&[1, 1, 2, 4]) {
            let table = |c: &mut Choices| match c.below(3) {
                0 => BlockTable::contiguous(odd(c), BlockId::new(odd32(c)), odd32(c)),
                1 => BlockTable::contiguous(0, BlockId::ZERO, odd32(c)),
                _ => {
                    let ids: Vec<BlockId> = (0..c.below(20)).map(|_| BlockId::new(odd32(c))).collect();
                    BlockTable::new(odd(c), &ids)
                }
            };
            let range = |c: &mut Choices| TokenRange::new(Tokens::new(odd(c)), Tokens::new(odd(c)));
            let state = |c: &mut Choices| Checkpoint { position: Tokens::new(odd(c)), slot: BlockId::new(odd32(c)) };
            let states = |c: &mut Choices| (0..c.below(4)).map(|_| state(c)).collect::<Vec<_>>();
            let src = |c: &mut Choices, tail| -> SrcGroup {
                if c.chance(30) {
                    return SrcState { checkpoints: states(c) }.into();
                }
                SrcPaged { table: table(c), held: range(c), tail }.into()
            };
            let dst = |c: &mut Choices| -> DstGroup {
                if c.chance(30) {
                    let slot = if c.chance(50) { Some(BlockId::new(odd32(c))) } else { None };
                    return DstState { slot, more: states(c) }.into();
                }
                DstPaged { table: table(c), cached: Tokens::new(odd(c)) }.into()
            };
            let (s, d) = (request.src.len() - 1, request.dst.len() - 1);
            match (c.below(8), &mut request.src[s], &mut request.dst[d]) {
                (0, ..) => request.tokens = Tokens::new(odd(&mut c)),
                (1, SrcGroup::Paged(g), _) => g.table = table(&mut c),
                (2, _, DstGroup::Paged(g)) => g.table = table(&mut c),
                (3, SrcGroup::Paged(g), _) => g.held = range(&mut c),
                (4, _, DstGroup::Paged(g)) => g.cached = Tokens::new(odd(&mut c)),
                (1..=3, SrcGroup::State(g), _) => g.checkpoints.push(state(&mut c)),
                (4, _, DstGroup::State(g)) => g.more.push(state(&mut c)),
                (5, ..) => request.src.push(src(&mut c, Tail::Frozen)),
                (6, ..) => request.dst.push(dst(&mut c)),
                _ => request.src[s] = src(&mut c, Tail::Exact),
            }
        }
        let Request { src, dst, .. } = &request;
        let tables = || {
            let src = src.iter().filter_map(|g| if let SrcGroup::Paged(g) = g { Some(&g.table) } else { None });
            src.chain(dst.iter().filter_map(|g| if let DstGroup::Paged(g) = g { Some(&g.table) } else { None }))
        };
        let listed: u64 = tables().map(BlockTable::len).sum();
        let _ = tables().map(|t| t.iter().take(5).count()).sum::<usize>();
        let Ok(bound) = BoundRequest::new(&both, request) else { continue };
        assert!(listed < 100_000, "a table longer than its engine has blocks was taken");
        let Ok(peers) = PeerMap::new(&both, odd(&mut c)) else { continue };
        for pair in peers.pairs() {
            let batch = PairPlan::new(&both, &peers, pair.src(), pair.dst()).unwrap().resolve(&bound).unwrap();
            let (src, dst) = (case.src.region_lens(pair.src()), case.dst.region_lens(pair.dst()));
            if let Err(e) = batch.check(&src, &dst) {
                panic!("{e}\n{case:?}");
            }
            let zeros = ZeroPlan::new(&case.dst, pair.dst()).unwrap().resolve(&bound).unwrap();
            for z in zeros.ranges() {
                assert!(z.offset + z.len <= dst[z.region.index()].get());
            }
        }
        planned += 1;
    }
    assert!(planned > 40, "{planned} planned");
}

#[test]
fn no_number_makes_a_helper_panic() {
    let mut c = Choices::seeded(51);
    for case in sample(51, 400) {
        let c = &mut c;
        let spec = case.src.spec();
        let sizes: Vec<u32> = (0..4).map(|_| odd32(c)).collect();
        let stages = (0..c.below(4)).map(|_| vec![ItemId::new(odd32(c)), ItemId::ZERO]).collect();
        let pcp_mode = c.pick(&[PcpMode::Shard, PcpMode::Replicate]);
        let p = Parallelism { tp: sizes[0], dcp: sizes[1], pcp: sizes[2], pcp_mode, interleave: sizes[3], stages };
        let _ = (p.ranks(), p.context(), p.coordinates(kvferry_geometry::units::RankId::new(odd32(c))));
        if let Ok(ranks) = p.place(spec, |_, _| HeadRule::Split) {
            assert_eq!(ranks.len(), p.ranks() as usize);
        }
        let size = Tokens::new(odd(c));
        for retention in [Retention::Full, Retention::Window(size), Retention::Chunk(size), Retention::Ring(size)] {
            let n = Tokens::new(odd(c));
            let need = retention.needed(n);
            assert!(need.end() <= n && need.start() <= need.end());
        }
        let _ = split_heads(odd32(c), odd32(c), odd32(c));
        if let Some(class) = TokenClass::new(odd32(c), odd32(c), odd32(c)) {
            let t = Tokens::new(odd(c));
            let _ = (class.holds(t), class.local(t), class.period());
        }
        let items: Vec<ItemId> = spec.iter().map(|(id, _)| id).collect();
        let kernel_block = Some(odd32(c)).filter(|_| c.chance(50));
        let scratch_rows = odd32(c);
        let style = LayoutStyle { padding: Bytes::new(odd(c)), kernel_block, scratch_rows, ..LayoutStyle::PLANES };
        let in_block = LayoutStyle { components: ComponentOrder::InBlock, ..style };
        for style in [style, in_block, LayoutStyle { share: true, ..in_block }] {
            drop(style.build(spec, &case.src.ranks()[0].placement, &[(&items, odd32(c), odd32(c))]));
        }
    }
}

#[test]
fn a_batch_that_passes_its_check_stays_inside_whatever_its_numbers() {
    let mut c = Choices::seeded(61);
    let mut passed = 0;
    for _ in 0..40_000 {
        let c = &mut c;
        // Mostly small numbers, so that some pass.
        let any = |c: &mut Choices| if c.chance(10) { odd(c) } else { c.below(40) };
        let any32 = |c: &mut Choices| if c.chance(10) { odd32(c) } else { c.within(0, 3).try_into().unwrap() };
        let mut sections = Vec::new();
        for _ in 0..c.below(3) {
            let bases = (0..c.below(3)).map(|_| Base {
                src_region: RegionId::new(any32(c) & 1),
                dst_region: RegionId::new(any32(c) & 1),
                src_offset: any(c),
                dst_offset: any(c),
            });
            let bases: Vec<Base> = bases.collect();
            let parts = (0..c.below(3)).map(|_| Part {
                src_add: any(c),
                dst_add: any(c),
                src_block_stride: any(c),
                dst_block_stride: any(c),
                src_step: any32(c),
                dst_step: any32(c),
                nest: Nest {
                    dims: (0..c.below(3))
                        .map(|_| Dim { count: any(c), src_stride: any(c), dst_stride: any(c) })
                        .collect(),
                    run: any(c),
                },
                pairs: (0..c.below(3))
                    .map(|_| PairRun { src: any32(c), dst: any32(c), count: any32(c) })
                    .collect::<Vec<_>>()
                    .into(),
            });
            let parts: Vec<Part> = parts.collect();
            sections.push(Section { bases: bases.into(), parts });
        }
        let lens = [Bytes::new(c.pick(&[1000, 300, u64::MAX])), Bytes::new(c.pick(&[800, 500, u64::MAX]))];
        let Ok(bounded) = Batch::new(sections).check(&lens, &lens) else { continue };
        let batch = bounded.batch();
        let _ = (batch.bytes(), batch.descriptors(), batch.rows(), batch.is_empty());
        let mut out = [Descriptor::default(); 50];
        let n = batch.cursor().fill(&mut out);
        for d in &out[..n] {
            assert!(d.len > 0);
            assert!(d.src_offset.checked_add(d.len).is_some_and(|end| end <= lens[d.src_region.index()].get()));
            assert!(d.dst_offset.checked_add(d.len).is_some_and(|end| end <= lens[d.dst_region.index()].get()));
        }
        passed += 1;
    }
    assert!(passed > 2000, "{passed} passed");
}
