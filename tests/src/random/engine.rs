//! Random engines: parallelism or hand-made placements, groups, block sizes, layouts.

use std::collections::BTreeSet;

use kvferry_geometry::layout::{CacheLayout, ComponentOrder, LayoutStyle, Rows, TokenOrder};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestErrors, RankManifest};
use kvferry_geometry::placement::{HeadRange, HeadRule, Parallelism, PcpMode, Placement, RankPlacement, TokenClass};
use kvferry_geometry::spec::{Item, ModelSpec};
use kvferry_geometry::units::{Bytes, ItemId, Name, Tokens};
use kvferry_oracle::{Missing, uncovered};

use super::odd_layout::{Page, Sharing, odd_layout};
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
    pub usual: Option<(Parallelism, Vec<HeadRule>)>,
    sharing: Option<Sharing>,
    layout: Choices,
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
    /// By which rules it was placed, if by rules: one for each item.
    pub usual: Option<(Parallelism, Vec<HeadRule>)>,
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
            let kvferry_geometry::spec::ItemKind::Paged(paged) = &mut item.kind else { continue };
            order.shuffle(&mut paged.components);
        }
        let spec = ModelSpec::new(items).expect("a sound model");
        let groups = random_groups(c, &spec);
        let (mut draft, refused) = if !matches!(kin, Kin::Prime(_)) && c.chance(20) {
            (Self::by_hand(c, spec, groups), Vec::new())
        } else {
            Self::parallel(c, spec, groups, kin)
        };
        if let Kin::Like(other) = kin {
            draft.sharing = other.sharing;
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
        let interleave = if prime.is_some() { 1 } else { c.pick(&[1, 2, 4, 3, 8, 5, 16, 12]) };
        let mut stages = random_stages(c, &spec, pp);
        let mut rules: Vec<HeadRule> = Vec::new();
        for _ in spec.items() {
            rules.push(match rules.last() {
                Some(&last) if !c.chance(30) => last,
                _ => c.pick(&[HeadRule::Split, HeadRule::Split, HeadRule::Split, HeadRule::Whole]),
            });
        }
        let sizes = ParallelSizes { tp, dcp, pcp, pcp_mode, interleave };
        let dealt = if sizes.context() == 1 { 1 } else { interleave };
        let mut block_sizes: Vec<u32> = groups.iter().map(|_| random_block_size(c, dealt)).collect();
        if let Some(n) = prime {
            block_sizes.fill(if n == 3 { 61 } else { 67 });
        } else if let Kin::Like(other) = kin
            && let same = small(other.groups[0].block_tokens.get())
            && same.is_multiple_of(sizes.context() * dealt)
        {
            block_sizes.fill(same / sizes.context());
        }
        let sharing = random_sharing(c);
        let layout = c.fork();
        let mut refused = Vec::new();
        loop {
            let parallelism = sizes.over(&stages);
            let rule = |item: &Item, _: usize| rules[spec.find(&item.name).unwrap().index()];
            let ranks = parallelism.place(&spec, rule).expect("sizes in range");
            let groups = name_groups(&groups, |g| u64::from(block_sizes[g] * sizes.context()));
            let text = format!(
                "tp {tp}, dcp {dcp}, pcp {pcp} {pcp_mode:?}, interleave {interleave}, stages {stages:?}, rules {rules:?}, \
                 block sizes {block_sizes:?}"
            );
            let usual = Some((parallelism, rules.clone()));
            let draft = Self { spec: spec.clone(), ranks, groups, text, usual, sharing, layout: layout.clone() };
            let missing = draft.missing(u64::from(interleave * sizes.context()));
            if missing.is_empty() {
                return (draft, refused);
            }
            // Repair: every rank of a stage holds all heads, and some stage holds the item.
            for gap in &missing {
                let id = spec.find(&gap.item).unwrap();
                rules[id.index()] = HeadRule::Whole;
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
        let block_tokens: Vec<u64> = groups.iter().map(|_| c.pick(&[12, 24, 4, 8, 6, 36])).collect();
        let mut ranks: Vec<RankPlacement> = vec![vec![None; spec.items().len()]; count];
        let mut bulk = c.fork();
        for (id, item) in spec.iter() {
            let c = &mut bulk;
            let group = groups.iter().position(|g| g.contains(&id)).unwrap();
            let total = item.as_paged().unwrap().heads;
            let cut = |c: &mut Choices| {
                let start = c.below(u64::from(total));
                HeadRange::new(small(start), small(c.within(start + 1, u64::from(total)))).unwrap()
            };
            // Intervals × classes, as many as there are ranks for.
            let contexts: Vec<u32> = [1, 2, 4, 3]
                .into_iter()
                .filter(|&x| x as usize <= count && block_tokens[group].is_multiple_of(u64::from(x)))
                .collect();
            let context = c.pick(&contexts);
            let block_size = block_tokens[group] / u64::from(context);
            let interleave = |c: &mut Choices, size: u64| {
                let divisors: Vec<u64> = (1..=size).filter(|d| size.is_multiple_of(*d)).collect();
                small(c.pick(&divisors))
            };
            let deal = interleave(c, block_size);
            let parts = small(c.within(1, u64::from(total.min(small(count as u64) / context))));
            let mut holders: Vec<usize> = (0..count).collect();
            c.shuffle(&mut holders);
            let mut cuts: Vec<u32> = (1..total).collect();
            c.shuffle(&mut cuts);
            cuts.truncate(parts as usize - 1);
            cuts.extend([0, total]);
            cuts.sort_unstable();
            let mut holders = holders.into_iter();
            for w in cuts.windows(2) {
                for index in 0..context {
                    let heads = HeadRange::new(w[0], w[1]).unwrap();
                    let tokens = TokenClass::new(context, deal, index).unwrap();
                    ranks[holders.next().unwrap()][id.index()] = Some(Placement::paged(heads, tokens));
                }
            }
            for rank in holders {
                if c.chance(70) {
                    let context = c.pick(&contexts);
                    let deal = interleave(c, block_tokens[group] / u64::from(context));
                    let tokens = TokenClass::new(context, deal, small(c.below(u64::from(context)))).unwrap();
                    ranks[rank][id.index()] = Some(Placement::paged(cut(c), tokens));
                }
            }
        }
        let sharing = random_sharing(c);
        let layout = c.fork();
        let text = format!("by hand on {count} ranks, blocks of {block_tokens:?} tokens, {ranks:?}");
        let groups = name_groups(&groups, |g| block_tokens[g]);
        Self { spec, ranks, groups, text, usual: None, sharing, layout }
    }

    /// Bytes of one token over all ranks.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        let of_item = |(p, item): (&Option<Placement>, &Item)| {
            let Some(Placement::Paged(p)) = p else { return 0 };
            let width: u64 = item.as_paged().unwrap().components.iter().map(|x| x.width.get()).sum();
            (u64::from(p.heads.count()) * width).div_ceil(u64::from(p.tokens.count()))
        };
        self.ranks.iter().flat_map(|r| r.iter().zip(self.spec.items()).map(of_item)).sum()
    }

    /// Whether groups share memory, so that no block id may be used by two of them.
    #[must_use]
    pub fn shares_blocks(&self) -> bool {
        self.sharing == Some(Sharing::Hybrid)
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
        text += &match self.sharing {
            Some(sharing) => format!("odd layout {sharing:?}"),
            None if alike => format!("{style:?}"),
            None => "a style for each rank".into(),
        };
        let mut ranks = Vec::new();
        for placement in &self.ranks {
            let layout = match self.sharing {
                Some(sharing) => {
                    let mut same = c.clone();
                    let c = if alike { &mut same } else { &mut c };
                    odd_layout(c, &self.spec, &self.pages(placement, blocks), sharing)
                }
                None => {
                    let style = if alike { style } else { random_style(&mut c, self) };
                    self.styled(style, placement, blocks)
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
                if let Some(Placement::Paged(p)) = &placement[id.index()] {
                    let block_size = small(info.block_tokens.get()) / p.tokens.count();
                    pages.push(Page { item: id.index(), group, heads: p.heads.count(), block_size, blocks });
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
            match tables.iter_mut().find(|t| (t.0, t.1) == (page.group, page.block_size)) {
                Some(table) => table.3.push(id),
                None => tables.push((page.group, page.block_size, page.blocks, vec![id])),
            }
        }
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

/// Groups of items with one retention each, split further now and then, in any order.
fn random_groups(c: &mut Choices, spec: &ModelSpec) -> Vec<Vec<ItemId>> {
    let mut c = c.fork();
    let mut groups: Vec<Vec<ItemId>> = Vec::new();
    for (id, item) in spec.iter() {
        let retention = |id: ItemId| spec.get(id).unwrap().as_paged().unwrap().retention;
        let alike: Vec<usize> =
            (0..groups.len()).filter(|&g| retention(groups[g][0]) == item.as_paged().unwrap().retention).collect();
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

fn name_groups(groups: &[Vec<ItemId>], block_tokens: impl Fn(usize) -> u64) -> Vec<CacheGroup> {
    let group = |(i, items): (usize, &Vec<ItemId>)| CacheGroup {
        name: Name::new(&format!("group {i}")),
        items: items.clone(),
        block_tokens: Tokens::new(block_tokens(i)),
    };
    groups.iter().enumerate().map(group).collect()
}

/// A multiple of the interleave, mostly up to 24.
fn random_block_size(c: &mut Choices, interleave: u32) -> u32 {
    let most = (24 / interleave).max(1);
    let usual: Vec<u32> =
        [4, 8, 16, 2, 1, 6, 12, 24].into_iter().filter(|b| b % interleave == 0 && b / interleave <= most).collect();
    if usual.is_empty() || c.chance(40) { interleave * small(c.within(1, u64::from(most))) } else { c.pick(&usual) }
}

fn random_sharing(c: &mut Choices) -> Option<Sharing> {
    match c.below(10) {
        0..=4 => None,
        5 => Some(Sharing::Apart),
        6 => Some(Sharing::Behind),
        7 => Some(Sharing::Rows),
        _ => Some(Sharing::Hybrid),
    }
}

fn random_style(c: &mut Choices, draft: &Draft) -> LayoutStyle {
    let order = c.pick(&[TokenOrder::HeadsOuter, TokenOrder::TokensOuter]);
    let components = c.pick(&[ComponentOrder::Packed, ComponentOrder::InBlock, ComponentOrder::Planes]);
    let rows =
        if components == ComponentOrder::Planes { Rows::PerItem } else { c.pick(&[Rows::PerItem, Rows::Packed]) };
    let padding = Bytes::new(if c.chance(25) { c.within(1, 9) } else { 0 });
    // A kernel block divides the block size of every rank and item.
    let sizes: BTreeSet<u32> =
        draft.ranks.iter().flat_map(|r| draft.pages(r, &vec![1; draft.groups.len()])).map(|p| p.block_size).collect();
    let common: Vec<u32> = (1..=24).filter(|k| sizes.iter().all(|s| s % k == 0)).collect();
    let kernel_block = if c.chance(35) { Some(c.pick(&common)) } else { None };
    LayoutStyle { order, components, rows, padding, kernel_block, ..LayoutStyle::HND }
}
