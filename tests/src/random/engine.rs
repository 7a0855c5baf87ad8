//! Random engines: parallelism or hand-made placements, groups, block sizes, layouts.

use std::collections::BTreeSet;

use kvferry_geometry::layout::{CacheLayout, ComponentOrder, LayoutStyle, Rows, StateOrder, TokenOrder};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestErrors, RankManifest};
use kvferry_geometry::placement::{HeadRange, HeadRule, Parallelism, PcpMode, Placement, RankPlacement, TokenClass};
use kvferry_geometry::spec::{Item, ItemKind, ModelSpec, Retention, ValueHeads};
use kvferry_geometry::units::{Bytes, ItemId, Name, Tokens};
use kvferry_oracle::{Missing, uncovered};

use super::odd_layout::{Page, Sharing, odd_layout, shuffle_regions};
use super::{Choices, small};

/// The most ranks of one engine.
const MAX_RANKS: u64 = 16;

/// An engine before memory: who holds what, and who shares block tables.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The model in this engine's order.
    pub spec: ModelSpec,
    /// What each rank holds.
    pub ranks: Vec<RankPlacement>,
    /// Items and block size in tokens of each group.
    pub groups: Vec<CacheGroup>,
    /// In words.
    pub text: String,
    /// By which rules it was placed, if by rules.
    pub usual: Option<Usual>,
    memory: Memory,
    layout: Choices,
}

/// Parallel sizes, and the rules by item and by axis of it.
pub type Usual = (Parallelism, Vec<Vec<HeadRule>>);

/// How a draft will be laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Memory {
    /// By usual styles, in which groups share memory or don't.
    Usual {
        share: bool,
    },
    Odd(Sharing),
}

/// How an engine takes after the other one of its case.
#[derive(Clone, Copy, Debug)]
pub enum Kin<'a> {
    /// Not at all.
    None,
    /// It has the other's memory layout and block sizes: engines alike are where the most can be merged.
    Like(&'a Draft),
    /// So many PCP ranks deal tokens one by one, in blocks of a prime: no short period is common with the other.
    Prime(u32),
}

/// A placement that leaves out bytes, so that no manifest can be made of it.
#[derive(Clone, Debug)]
pub struct RefusedDraft {
    /// The draft.
    pub draft: Draft,
    /// What the oracle misses.
    pub missing: Vec<Missing>,
}

/// A sound engine.
#[derive(Clone, Debug)]
pub struct Engine {
    /// Its manifest.
    pub manifest: Manifest,
    /// By which rules it was placed, if by rules.
    pub usual: Option<Usual>,
    /// In words.
    pub text: String,
}

impl Draft {
    /// A random engine for the items. Drafts that leave bytes out are repaired; they are given back too.
    pub fn random(c: &mut Choices, items: &[Item], kin: Kin<'_>) -> (Self, Vec<RefusedDraft>) {
        let mut items = items.to_vec();
        let mut order = c.fork();
        order.shuffle(&mut items);
        for item in &mut items {
            match &mut item.kind {
                ItemKind::Paged(paged) => order.shuffle(&mut paged.components),
                ItemKind::State(state) => order.shuffle(&mut state.parts),
                _ => {}
            }
        }
        let spec = ModelSpec::new(items).expect("a sound model");
        let groups = random_groups(c, &spec);
        let (mut draft, refused) = if !matches!(kin, Kin::Prime(_)) && c.chance(20) {
            (Self::by_hand(c, spec, groups), Vec::new())
        } else {
            Self::parallel(c, spec, groups, kin)
        };
        if let Kin::Like(other) = kin {
            draft.memory = other.memory;
            draft.layout = other.layout.clone();
        }
        (draft, refused)
    }

    fn parallel(c: &mut Choices, spec: ModelSpec, groups: Vec<Vec<ItemId>>, kin: Kin<'_>) -> (Self, Vec<RefusedDraft>) {
        let prime = if let Kin::Prime(n) = kin { Some(n) } else { None };
        let tp: u32 = if prime.is_some() { c.pick(&[1, 2, 4]) } else { c.pick(&[1, 2, 4, 3, 8, 6, 5, 7]) };
        let divisors: Vec<u32> = (1..=4).filter(|d| tp.is_multiple_of(*d)).collect();
        let dcp = if c.chance(40) { c.pick(&divisors) } else { 1 };
        let left = MAX_RANKS / u64::from(tp);
        let pcp = if let Some(n) = prime {
            n
        } else if c.chance(30) {
            small(c.within(1, left.min(4)))
        } else {
            1
        };
        let modes = [PcpMode::Shard, PcpMode::Replicate];
        let pcp_mode = c.pick(if prime.is_some() { &modes[..1] } else { &modes });
        let pp = if c.chance(50) { c.within(1, (left / u64::from(pcp)).min(4)) } else { 1 };
        // One value's tokens stay on one rank.
        let grain = small(groups.iter().map(|g| grain_of(&spec, g)).fold(1, lcm));
        let usual: Vec<u32> = [1, 2, 4, 3, 8, 5, 16, 12].into_iter().filter(|i| i % grain == 0).collect();
        let interleave = if prime.is_some() || usual.is_empty() { grain } else { c.pick(&usual) };
        let mut stages = random_stages(c, &spec, pp);
        let mut rules: Vec<Vec<HeadRule>> = Vec::new();
        let mut last: Option<&Item> = None;
        for item in spec.items() {
            // Layers alike are mostly placed alike.
            match (last, rules.last()) {
                (Some(last), Some(same)) if last.kind == item.kind && !c.chance(30) => rules.push(same.clone()),
                _ => rules.push(random_rules(c, item)),
            }
            last = Some(item);
        }
        let mut sizes = ParallelSizes { tp, dcp, pcp, pcp_mode, interleave };
        if groups.iter().any(|g| block_sizes_of(&spec, g, sizes).is_empty()) {
            // A ring is made of whole blocks.
            (sizes.dcp, sizes.pcp) = (1, 1);
        }
        let mut block_sizes: Vec<u32> = Vec::new();
        for group in &groups {
            let usual = [4, 8, 16, 2, 1, 6, 12, 24];
            let (all, some) = (block_sizes_of(&spec, group, sizes), |b: &u32| usual.contains(b));
            let some: Vec<u32> = all.iter().copied().filter(some).collect();
            let any = some.is_empty() || c.chance(40);
            let mut size = c.pick(if any { &all } else { &some });
            if let Some(n) = prime {
                size = if n == 3 { 61 } else { 67 };
            } else if let Kin::Like(other) = kin
                && let Some(same) = other.groups.iter().map(|g| small(g.block_tokens.get())).find(|&s| s > 0)
                && same.is_multiple_of(sizes.context())
                && all.contains(&(same / sizes.context()))
            {
                size = same / sizes.context();
            }
            block_sizes.push(size);
        }
        let memory = random_memory(c);
        let layout = c.fork();
        let mut refused = Vec::new();
        loop {
            let parallelism = sizes.over(&stages);
            let rule = |item: &Item, axis: usize| rules[spec.find(&item.name).unwrap().index()][axis];
            let ranks = parallelism.place(&spec, rule).expect("sizes in range");
            let groups = name_groups(&spec, &groups, |g| u64::from(block_sizes[g] * sizes.context()));
            let (dcp, pcp) = (sizes.dcp, sizes.pcp);
            let text = format!(
                "tp {tp}, dcp {dcp}, pcp {pcp} {pcp_mode:?}, interleave {interleave}, stages {stages:?}, rules {rules:?}, \
                 block sizes {block_sizes:?}"
            );
            let usual = Some((parallelism, rules.clone()));
            let draft = Self { spec: spec.clone(), ranks, groups, text, usual, memory, layout: layout.clone() };
            let missing = draft.missing(u64::from(interleave * sizes.context()));
            if missing.is_empty() {
                return (draft, refused);
            }
            // Repair: every rank of a stage holds all heads, and some stage holds the item.
            for gap in &missing {
                let id = spec.find(&gap.item).unwrap();
                rules[id.index()].fill(HeadRule::Whole);
                if !stages.iter().flatten().any(|i| *i == id) {
                    stages[0].push(id);
                }
            }
            refused.push(RefusedDraft { draft, missing });
        }
    }

    /// Placements that no rule writes: heads cut anywhere, another token class for each item, spare replicas.
    fn by_hand(c: &mut Choices, spec: ModelSpec, groups: Vec<Vec<ItemId>>) -> Self {
        let count = usize::try_from(c.within(1, 8)).unwrap();
        let one = ParallelSizes { tp: 1, dcp: 1, pcp: 1, pcp_mode: PcpMode::Shard, interleave: 1 };
        let mut block_tokens: Vec<u64> = Vec::new();
        for group in &groups {
            let all = block_sizes_of(&spec, group, one);
            let some: Vec<u32> = [12, 24, 4, 8, 6, 36].into_iter().filter(|b| all.contains(b)).collect();
            block_tokens.push(u64::from(c.pick(if some.is_empty() { &all } else { &some })));
        }
        let mut ranks: Vec<RankPlacement> = vec![vec![None; spec.items().len()]; count];
        let mut bulk = c.fork();
        for (id, item) in spec.iter() {
            let c = &mut bulk;
            let group = groups.iter().position(|g| g.contains(&id)).unwrap();
            let mut holders: Vec<usize> = (0..count).collect();
            c.shuffle(&mut holders);
            if let Some(state) = item.as_state() {
                let units: Vec<u32> = state.parts.iter().map(|p| p.units).collect();
                for (rank, parts) in state_by_hand(c, &units, &holders) {
                    ranks[rank][id.index()] = Some(Placement::state(parts));
                }
                continue;
            }
            let total = item.as_paged().unwrap().heads;
            let grain = grain_of(&spec, &[id]);
            // Intervals x classes, as many as there are ranks for; every rank's block holds whole values.
            let contexts: Vec<u32> = [1, 2, 4, 3]
                .into_iter()
                .filter(|&x| x as usize <= count && block_tokens[group].is_multiple_of(u64::from(x) * grain))
                .collect();
            let context = c.pick(&contexts);
            let interleave = |c: &mut Choices, size: u64| {
                let fits = |d: &u64| size.is_multiple_of(*d) && d.is_multiple_of(grain);
                let divisors: Vec<u64> = (1..=size).filter(fits).collect();
                small(c.pick(&divisors))
            };
            let deal = interleave(c, block_tokens[group] / u64::from(context));
            let parts = small(c.within(1, u64::from(total.min(small(count as u64) / context))));
            let mut holders = holders.into_iter();
            for heads in cut_by_hand(c, total, parts) {
                for index in 0..context {
                    let tokens = TokenClass::new(context, deal, index).unwrap();
                    ranks[holders.next().unwrap()][id.index()] = Some(Placement::paged(heads, tokens));
                }
            }
            for rank in holders {
                if c.chance(70) {
                    let context = c.pick(&contexts);
                    let deal = interleave(c, block_tokens[group] / u64::from(context));
                    let tokens = TokenClass::new(context, deal, small(c.below(u64::from(context)))).unwrap();
                    ranks[rank][id.index()] = Some(Placement::paged(any_range(c, total), tokens));
                }
            }
        }
        let memory = random_memory(c);
        let layout = c.fork();
        let text = format!("by hand on {count} ranks, blocks of {block_tokens:?} tokens, {ranks:?}");
        let groups = name_groups(&spec, &groups, |g| block_tokens[g]);
        Self { spec, ranks, groups, text, usual: None, memory, layout }
    }

    /// Bytes of one token over all ranks, more or less, and of one state over all ranks.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        let (mut token, mut state) = (0, 0);
        for rank in &self.ranks {
            for (placed, item) in rank.iter().zip(self.spec.items()) {
                match (&item.kind, placed) {
                    (ItemKind::Paged(paged), Some(Placement::Paged(p))) => {
                        let width: u64 = paged.components.iter().map(|x| x.width.get()).sum();
                        token += (u64::from(p.heads.count()) * width).div_ceil(u64::from(p.tokens.count()));
                    }
                    (ItemKind::State(s), Some(Placement::State(p))) => {
                        let of = |(part, units): (&kvferry_geometry::spec::StatePart, &HeadRange)| {
                            part.width.get() * u64::from(part.rows) * u64::from(units.count())
                        };
                        state += s.parts.iter().zip(&p.parts).map(of).sum::<u64>();
                    }
                    _ => {}
                }
            }
        }
        (token, state)
    }

    /// The same with a region for each item.
    #[must_use]
    pub fn apart(&self) -> Self {
        Self { memory: Memory::Odd(Sharing::Apart), ..self.clone() }
    }

    /// Whether groups share memory, so that no block id may be used by two of them.
    #[must_use]
    pub fn shares_blocks(&self) -> bool {
        matches!(self.memory, Memory::Odd(Sharing::Hybrid) | Memory::Usual { share: true })
    }

    fn missing(&self, tokens: u64) -> Vec<Missing> {
        // Without memory: the oracle looks at placements only.
        let rank = |p: &RankPlacement| RankManifest { placement: p.clone(), layout: CacheLayout::default() };
        let ranks: Vec<RankManifest> = self.ranks.iter().map(rank).collect();
        uncovered(&self.spec, &ranks, tokens)
    }

    /// Lays out memory with so many blocks for each group.
    ///
    /// # Errors
    /// What the manifest's check says; an error is a finding, unless the draft was refused.
    pub fn build(&self, blocks: &[u32]) -> Result<Engine, ManifestErrors> {
        let mut c = self.layout.clone();
        let style = random_style(&mut c, self);
        let alike = !c.chance(20);
        let mut text = format!("{}; ", self.text);
        text += &match self.memory {
            Memory::Odd(sharing) => format!("odd layout {sharing:?}"),
            Memory::Usual { .. } if alike => format!("{style:?}"),
            Memory::Usual { share } => format!("a style for each rank, share: {share}"),
        };
        let shuffled = c.chance(25);
        let mut ranks = Vec::new();
        for placement in &self.ranks {
            let layout = match self.memory {
                Memory::Odd(sharing) => {
                    let mut same = c.clone();
                    let c = if alike { &mut same } else { &mut c };
                    odd_layout(c, &self.spec, &self.pages(placement, blocks), sharing)
                }
                Memory::Usual { .. } => {
                    let style = if alike { style } else { random_style(&mut c, self) };
                    let mut layout = self.styled(style, placement, blocks);
                    if shuffled {
                        shuffle_regions(&mut c, &mut layout);
                    }
                    layout
                }
            };
            ranks.push(RankManifest { placement: placement.clone(), layout });
        }
        let manifest = Manifest::new(self.spec.clone(), self.groups.clone(), ranks)?;
        Ok(Engine { manifest, usual: self.usual.clone(), text })
    }

    fn pages(&self, placement: &RankPlacement, blocks: &[u32]) -> Vec<Page> {
        let mut pages = Vec::new();
        for (group, (info, &blocks)) in self.groups.iter().zip(blocks).enumerate() {
            for id in &info.items {
                if let Some(p) = &placement[id.index()] {
                    let context = p.as_paged().map_or(1, |p| p.tokens.count());
                    let block_tokens = small(info.block_tokens.get()) / context;
                    pages.push(Page { item: id.index(), group, placement: p.clone(), block_tokens, blocks });
                }
            }
        }
        pages
    }

    /// One of the usual layouts; items of one group with other block sizes on this rank are laid out on their own.
    fn styled(&self, style: LayoutStyle, placement: &RankPlacement, blocks: &[u32]) -> CacheLayout {
        let pages = self.pages(placement, blocks);
        let mut tables: Vec<(usize, u32, u32, Vec<ItemId>)> = Vec::new();
        for page in pages {
            let id = ItemId::new(small(page.item as u64));
            match tables.iter_mut().find(|t| (t.0, t.1) == (page.group, page.block_tokens)) {
                Some(table) => table.3.push(id),
                None => tables.push((page.group, page.block_tokens, page.blocks, vec![id])),
            }
        }
        // A group in two halves would share memory with itself.
        let halves = (1..tables.len()).any(|i| tables[..i].iter().any(|t| t.0 == tables[i].0));
        let style = LayoutStyle { share: style.share && !halves, ..style };
        let tables: Vec<(&[ItemId], u32, u32)> = tables.iter().map(|t| (&t.3[..], t.1, t.2)).collect();
        style.build(&self.spec, placement, &tables).expect("a style that can be written")
    }
}

#[derive(Clone, Copy)]
struct ParallelSizes {
    tp: u32,
    dcp: u32,
    pcp: u32,
    pcp_mode: PcpMode,
    interleave: u32,
}

impl ParallelSizes {
    fn context(self) -> u32 {
        if self.pcp_mode == PcpMode::Shard { self.dcp * self.pcp } else { self.dcp }
    }

    fn over(self, stages: &[Vec<ItemId>]) -> Parallelism {
        let Self { tp, dcp, pcp, pcp_mode, interleave } = self;
        Parallelism { tp, dcp, pcp, pcp_mode, interleave, stages: stages.to_vec() }
    }
}

/// Items to stages without regard to order; now and then one on two stages, or on none.
fn random_stages(c: &mut Choices, spec: &ModelSpec, pp: u64) -> Vec<Vec<ItemId>> {
    let mut stages = vec![Vec::new(); usize::try_from(pp).unwrap()];
    let mut c = c.fork();
    for (id, _) in spec.iter() {
        if c.chance(2) {
            continue;
        }
        let stage = usize::try_from(c.below(pp)).unwrap();
        stages[stage].push(id);
        if c.chance(12) {
            let other = usize::try_from(c.below(pp)).unwrap();
            if other != stage {
                stages[other].push(id);
            }
        }
    }
    stages
}

/// Split mostly. Values that stand for all heads of a rank are more often the same on all of them, since they could not be
/// moved otherwise.
fn random_rules(c: &mut Choices, item: &Item) -> Vec<HeadRule> {
    match &item.kind {
        ItemKind::Paged(paged) => {
            let shared = paged.components.iter().any(|x| x.heads == ValueHeads::Shared);
            let whole = if shared { 70 } else { 25 };
            vec![if c.chance(whole) { HeadRule::Whole } else { HeadRule::Split }]
        }
        ItemKind::State(state) => {
            let rule = |part: &kvferry_geometry::spec::StatePart| {
                let units = part.units;
                let divisors: Vec<u32> = (2..units).filter(|d| units.is_multiple_of(*d)).collect();
                match c.below(10) {
                    8 => HeadRule::Whole,
                    6.. if !divisors.is_empty() => HeadRule::Blocks(c.pick(&divisors)),
                    _ => HeadRule::Split,
                }
            };
            state.parts.iter().map(rule).collect()
        }
        _ => Vec::new(),
    }
}

fn any_range(c: &mut Choices, total: u32) -> HeadRange {
    let start = c.below(u64::from(total));
    HeadRange::new(small(start), small(c.within(start + 1, u64::from(total)))).unwrap()
}

/// So many intervals that make up all heads, cut anywhere.
fn cut_by_hand(c: &mut Choices, total: u32, parts: u32) -> Vec<HeadRange> {
    let mut cuts: Vec<u32> = (1..total).collect();
    c.shuffle(&mut cuts);
    cuts.truncate(parts as usize - 1);
    cuts.extend([0, total]);
    cuts.sort_unstable();
    cuts.windows(2).map(|w| HeadRange::new(w[0], w[1]).unwrap()).collect()
}

/// Every part cut in places of its own; further ranks have anything.
fn state_by_hand(c: &mut Choices, units: &[u32], ranks: &[usize]) -> Vec<(usize, Vec<HeadRange>)> {
    let holders = usize::try_from(c.within(1, ranks.len() as u64)).unwrap();
    let most = small(holders as u64);
    let mut cuts: Vec<Vec<HeadRange>> = Vec::new();
    for &total in units {
        let parts = small(c.within(1, u64::from(total.min(most))));
        cuts.push(cut_by_hand(c, total, parts));
    }
    let mut out = Vec::new();
    for (i, &rank) in ranks.iter().enumerate() {
        if i < holders {
            out.push((rank, cuts.iter().map(|cut| cut[i % cut.len()]).collect()));
        } else if c.chance(70) {
            out.push((rank, units.iter().map(|&total| any_range(c, total)).collect()));
        }
    }
    out
}

/// The ring that the items of a group keep, if they do.
fn ring_of(item: &Item) -> Option<u64> {
    match item.as_paged()?.retention {
        Retention::Ring(r) => Some(r.get()),
        _ => None,
    }
}

/// Groups of items that can share a table, split further now and then, in any order.
fn random_groups(c: &mut Choices, spec: &ModelSpec) -> Vec<Vec<ItemId>> {
    let mut c = c.fork();
    // Whether items that keep other tokens may share a table.
    let mixed = c.chance(40);
    let mut groups: Vec<Vec<ItemId>> = Vec::new();
    for (id, item) in spec.iter() {
        let first = |g: usize| spec.get(groups[g][0]).unwrap();
        let fits = |g: &usize| match (first(*g).as_paged(), item.as_paged()) {
            (Some(a), Some(b)) => ring_of(first(*g)) == ring_of(item) && (mixed || a.retention == b.retention),
            (None, None) => true,
            _ => false,
        };
        let alike: Vec<usize> = (0..groups.len()).filter(fits).collect();
        if alike.is_empty() || c.chance(25) {
            groups.push(vec![id]);
        } else {
            groups[c.pick(&alike)].push(id);
        }
    }
    groups.iter_mut().for_each(|g| c.shuffle(g));
    c.shuffle(&mut groups);
    groups
}

fn name_groups(spec: &ModelSpec, groups: &[Vec<ItemId>], block_tokens: impl Fn(usize) -> u64) -> Vec<CacheGroup> {
    let group = |(i, items): (usize, &Vec<ItemId>)| {
        let states = spec.get(items[0]).unwrap().as_state().is_some();
        CacheGroup {
            name: Name::new(&format!("group {i}")),
            items: items.clone(),
            block_tokens: Tokens::new(if states { 0 } else { block_tokens(i) }),
        }
    };
    groups.iter().enumerate().map(group).collect()
}

pub(crate) fn lcm(a: u64, b: u64) -> u64 {
    (1..=b).map(|k| a * k).find(|m| m % b == 0).unwrap()
}

/// Tokens of which every block of some items holds a multiple.
pub(crate) fn grain_of(spec: &ModelSpec, items: &[ItemId]) -> u64 {
    let paged = items.iter().filter_map(|i| spec.get(*i)?.as_paged());
    paged.flat_map(|p| p.components.iter().map(|x| p.tokens_per_value(x))).fold(1, lcm)
}

/// The block sizes up to 24 tokens or so that a rank's views of a group can have.
fn block_sizes_of(spec: &ModelSpec, group: &[ItemId], sizes: ParallelSizes) -> Vec<u32> {
    let dealt = if sizes.context() == 1 { 1 } else { sizes.interleave };
    let step = small(lcm(u64::from(dealt), grain_of(spec, group)));
    let ring = group.iter().find_map(|i| ring_of(spec.get(*i)?));
    let whole = |b: &u32| ring.is_none_or(|r| r.is_multiple_of(u64::from(b * sizes.context())));
    (1..=(36 / step).max(1)).map(|k| k * step).filter(whole).collect()
}

fn random_memory(c: &mut Choices) -> Memory {
    match c.below(10) {
        0..=3 => Memory::Usual { share: false },
        4 => Memory::Usual { share: true },
        5 => Memory::Odd(Sharing::Apart),
        6 => Memory::Odd(Sharing::Behind),
        7 => Memory::Odd(Sharing::Rows),
        _ => Memory::Odd(Sharing::Hybrid),
    }
}

fn random_style(c: &mut Choices, draft: &Draft) -> LayoutStyle {
    let share = draft.memory == Memory::Usual { share: true };
    let order = c.pick(&[TokenOrder::HeadsOuter, TokenOrder::TokensOuter]);
    let all = [ComponentOrder::Packed, ComponentOrder::InBlock, ComponentOrder::Planes];
    let components = c.pick(if share { &all[..2] } else { &all });
    let rows =
        if components == ComponentOrder::Planes { Rows::PerItem } else { c.pick(&[Rows::PerItem, Rows::Packed]) };
    let padding = Bytes::new(if c.chance(25) { c.within(1, 9) } else { 0 });
    // A kernel block divides the block size of every rank and item, and holds whole values.
    let pages = || draft.ranks.iter().flat_map(|r| draft.pages(r, &vec![1; draft.groups.len()]));
    let sizes: BTreeSet<u32> = pages().map(|p| p.block_tokens).filter(|&b| b > 0).collect();
    let items: Vec<ItemId> = draft.spec.iter().map(|(id, _)| id).collect();
    let grain = small(grain_of(&draft.spec, &items));
    let fits = |k: &u32| k.is_multiple_of(grain) && sizes.iter().all(|s| s % k == 0);
    let common: Vec<u32> = (1..=24).filter(fits).collect();
    let kernel_block = if c.chance(35) && !common.is_empty() { Some(c.pick(&common)) } else { None };
    let state_order = c.pick(&[StateOrder::UnitsOuter, StateOrder::RowsOuter]);
    let scratch_rows = if c.chance(30) { small(c.within(1, 2)) } else { 0 };
    LayoutStyle { order, components, rows, share, padding, kernel_block, state_order, scratch_rows }
}
