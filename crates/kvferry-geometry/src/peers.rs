//! Who reads what from whom.
//!
//! For every set of items that are placed alike, the head × token space is cut into *atoms* at all interval ends of both
//! manifests; each atom has a set of holders at the source. Every consumer (destination rank) gets its holders so that it
//! reads from the fewest ranks; among equals the nearest, then the one with the fewest bytes assigned so far, and what
//! is still equal is chosen by the salt, so that many small destination engines don't all read one rank.
//!
//! "Fewest" is found greedily: the rank that holds most of what is still missing comes first, and items that leave the
//! least choice are assigned first. Where placements follow the usual rules this is the optimum; for intervals made by hand
//! it may take one holder more than need be. It is always complete.
//!
//! A consumer that could read everything from any of several ranks reads from one of them, unless the map is asked to
//! *stripe*: then the consumer's items are dealt out over all holders that are equally near, in stretches of neighbours.
//!
//! Both engines compute the same map from the same two manifests and salt, and compare [`PeerMap::digest`].

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use crate::compat::Compatible;
use crate::digest::{Digest, Digester};
use crate::manifest::RankManifest;
use crate::manifest::coverage::cut_heads;
use crate::placement::{HeadRange, PagedPlacement, TokenClass};
use crate::spec::{Component, Item, ItemKind};
use crate::token_set::{MAX_PERIOD, TokenSet, lcm};
use crate::units::{ItemId, Name, RankId};

/// Comparisons that choosing holders may take in all.
const WORK: u64 = 1 << 26;

/// No map can be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The token classes of both sides repeat together only after too many tokens.
    #[error(
        "item {item}: the token classes of source and destination repeat together only after more than {limit} tokens; \
         use interleaves and context sizes with a smaller common multiple"
    )]
    Period {
        /// The first item concerned.
        item: Name,
        /// The limit.
        limit: u64,
    },
    /// The placements are cut into so many different pieces that choosing holders would take too long.
    #[error(
        "item {item}: the placements of source and destination are cut into too many different pieces to choose who reads \
         from whom; use fewer distinct head intervals and token classes"
    )]
    TooComplex {
        /// The first item concerned.
        item: Name,
    },
    /// Bytes that no source rank holds. A proven manifest has none.
    #[error("item {item}: destination rank {dst} needs heads {heads} of tokens that no source rank holds")]
    Uncovered {
        /// The first item concerned.
        item: Name,
        /// The consumer.
        dst: RankId,
        /// Some of the heads.
        heads: HeadRange,
    },
}

/// How holders are chosen. Both engines must use the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PeerOptions {
    /// A number that differs between consumers' engines and requests (their lease, say); turns ties.
    pub salt: u64,
    /// Whether one consumer's items are spread over all ranks that hold them alike and are equally near, for more bandwidth.
    pub stripe: bool,
}

/// A rectangle of the head × token space of some items that one rank reads from another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// Index of the item set.
    pub(crate) items: usize,
    pub(crate) heads: HeadRange,
    pub(crate) tokens: TokenSet,
}

/// What one destination rank reads from one source rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankPair {
    src: RankId,
    dst: RankId,
    pub(crate) shares: Vec<Share>,
}

impl RankPair {
    /// The rank that is read.
    #[must_use]
    pub fn src(&self) -> RankId {
        self.src
    }

    /// The rank that reads.
    #[must_use]
    pub fn dst(&self) -> RankId {
        self.dst
    }
}

/// Items that are placed alike along one of their axes (see [`Item::axes`](crate::spec::Item::axes)).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct AxisItems {
    /// Destination ids.
    pub(crate) items: Vec<ItemId>,
    /// 0 for paged items; the part's index in the destination's spec for states.
    pub(crate) axis: usize,
    /// Whether they are states.
    pub(crate) state: bool,
}

/// Who reads what from whom, for one pair of manifests and one salt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerMap {
    pub(crate) item_sets: Vec<AxisItems>,
    pairs: Vec<RankPair>,
    /// Digests of the source's and the destination's manifest.
    of: (Digest, Digest),
    digest: Digest,
}

impl PeerMap {
    /// The map for one salt: a number that differs between consumers' engines and requests (their lease, say).
    ///
    /// # Errors
    /// [`PeerError::Period`] where the two sides' context parallelism can't be brought to a common period, and
    /// [`PeerError::TooComplex`] where placements are cut too finely.
    pub fn new(c: &Compatible, salt: u64) -> Result<Self, PeerError> {
        Self::with(c, PeerOptions { salt, stripe: false }, |_, _| 0)
    }

    /// As [`PeerMap::new`], with all options and the distance from a source rank to a destination rank where it is known.
    /// Both engines must use the same distances.
    ///
    /// # Errors
    /// As [`PeerMap::new`].
    pub fn with(
        c: &Compatible,
        options: PeerOptions,
        distance: impl Fn(RankId, RankId) -> u32,
    ) -> Result<Self, PeerError> {
        let mut sets = item_sets(c);
        for set in &mut sets {
            set.measure(c)?;
        }
        if options.stripe {
            sets = sets.into_iter().flat_map(ItemSet::striped).collect();
        }
        // Least choice first: what is held once decides which ranks are read, and replicas then follow it.
        sets.sort_by_key(|s| (s.held, s.items.first().copied(), s.axis));
        let mut builder = Builder {
            distance,
            options,
            load: vec![0; c.src().ranks().len()],
            work: WORK,
            shares: BTreeMap::new(),
            // Which source ranks a consumer reads already.
            reads: vec![Vec::new(); c.dst().ranks().len()],
        };
        for (index, set) in sets.iter().enumerate() {
            builder.assign(c, index, set)?;
        }
        let pairs: Vec<RankPair> =
            builder.shares.into_iter().map(|((dst, src), shares)| RankPair { src, dst, shares }).collect();
        let of_set =
            |s: ItemSet| AxisItems { items: s.items.into_iter().map(|i| i.0).collect(), axis: s.axis, state: s.state };
        let item_sets: Vec<AxisItems> = sets.into_iter().map(of_set).collect();
        let digest = digest_of(c, options, &item_sets, &pairs);
        Ok(Self { item_sets, pairs, of: c.digests(), digest })
    }

    /// Names this map and the two manifests it was made from.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether the map was made from these manifests.
    pub(crate) fn is_of(&self, c: &Compatible) -> bool {
        self.of == c.digests()
    }

    /// All pairs that exchange bytes, by destination, then source.
    #[must_use]
    pub fn pairs(&self) -> &[RankPair] {
        &self.pairs
    }

    /// The pair of two ranks, if they exchange bytes.
    #[must_use]
    pub fn pair(&self, src: RankId, dst: RankId) -> Option<&RankPair> {
        let at = self.pairs.binary_search_by_key(&(dst, src), |p| (p.dst, p.src)).ok()?;
        self.pairs.get(at)
    }

    /// The source ranks that a destination rank reads.
    pub fn sources_of(&self, dst: RankId) -> impl Iterator<Item = RankId> {
        self.pairs.iter().filter(move |p| p.dst == dst).map(|p| p.src)
    }

    /// The named consumers of a source rank.
    pub fn consumers_of(&self, src: RankId) -> impl Iterator<Item = RankId> {
        self.pairs.iter().filter(move |p| p.src == src).map(|p| p.dst)
    }
}

/// Items that every rank of both sides places alike along one axis.
#[derive(Clone)]
struct ItemSet {
    /// Destination ids, with the bytes of one head: in [`MAX_PERIOD`] tokens, or of the state.
    items: Vec<(ItemId, u128)>,
    axis: usize,
    state: bool,
    /// Heads or units of the model.
    total: u32,
    src: Vec<Option<PagedPlacement>>,
    dst: Vec<Option<PagedPlacement>>,
    period: u64,
    heads: Vec<HeadRange>,
    /// How often the source holds it, in heads × tokens of a period, scaled to be comparable between sets.
    held: u64,
}

/// Neighbouring items are mostly placed like one of so many before.
const RECENT: usize = 8;

fn item_sets(c: &Compatible) -> Vec<ItemSet> {
    // The axis's total belongs to the key, since it bounds the cuts.
    type Key = (bool, usize, u32, Vec<Option<PagedPlacement>>, Vec<Option<PagedPlacement>>);
    fn of(ranks: &[RankManifest], id: ItemId, axis: usize) -> impl Iterator<Item = Option<PagedPlacement>> {
        ranks.iter().map(move |r| r.placement[id.index()].as_ref()?.axis(axis))
    }
    let mut sets: Vec<ItemSet> = Vec::new();
    let mut by_placement: BTreeMap<Key, usize> = BTreeMap::new();
    for (id, item) in c.dst().spec().iter() {
        let Some((src_id, src_item)) = c.src_item(id).and_then(|i| Some((i, c.src().spec().get(i)?))) else { continue };
        let state = item.as_state().is_some();
        for (axis, total) in item.axes().enumerate() {
            let Some(src_axis) = item.axis_in(axis, src_item) else { continue };
            let (src, dst) = (|| of(c.src().ranks(), src_id, src_axis), || of(c.dst().ranks(), id, axis));
            let alike = |s: &&mut ItemSet| {
                (s.state, s.axis, s.total) == (state, axis, total)
                    && s.src.iter().copied().eq(src())
                    && s.dst.iter().copied().eq(dst())
            };
            let weighed = (id, weight(item, axis));
            if let Some(set) = sets.iter_mut().rev().take(RECENT).find(alike) {
                set.items.push(weighed);
                continue;
            }
            let (src, dst): (Vec<_>, Vec<_>) = (src().collect(), dst().collect());
            let at = *by_placement.entry((state, axis, total, src.clone(), dst.clone())).or_insert(sets.len());
            match sets.get_mut(at) {
                Some(set) => set.items.push(weighed),
                None => sets.push(ItemSet {
                    items: vec![weighed],
                    axis,
                    state,
                    total,
                    src,
                    dst,
                    period: 1,
                    heads: Vec::new(),
                    held: 0,
                }),
            }
        }
    }
    sets
}

/// Bytes of one head in [`MAX_PERIOD`] tokens, or of one unit of a state.
fn weight(item: &Item, axis: usize) -> u128 {
    match &item.kind {
        ItemKind::Paged(p) => {
            let of =
                |c: &Component| u128::from(c.width.get()) * u128::from(MAX_PERIOD) / u128::from(p.tokens_per_value(c));
            p.components.iter().map(of).sum()
        }
        ItemKind::State(s) => s.parts.get(axis).map_or(0, |p| u128::from(p.rows) * u128::from(p.width.get())),
    }
}

impl ItemSet {
    /// Finds the period, the head cuts and how often the source holds everything.
    fn measure(&mut self, c: &Compatible) -> Result<(), PeerError> {
        let name = || self.name(c);
        let placed = || self.src.iter().chain(&self.dst).flatten();
        let mut period = 1;
        for p in placed() {
            period = lcm(period, p.tokens.period())
                .filter(|&l| l <= MAX_PERIOD)
                .ok_or_else(|| PeerError::Period { item: name(), limit: MAX_PERIOD })?;
        }
        let heads = cut_heads(self.total, placed().map(|p| p.heads));
        let held: u64 = self
            .src
            .iter()
            .flatten()
            .map(|p| (1 << 20) * u64::from(p.heads.count()) / u64::from(p.tokens.count()))
            .sum();
        self.held = held / u64::from(self.total.max(1));
        (self.period, self.heads) = (period, heads);
        Ok(())
    }

    fn name(&self, c: &Compatible) -> Name {
        let first = self.items.first().and_then(|i| c.dst().spec().get(i.0));
        first.map_or_else(|| "?".into(), |i| i.name.clone())
    }

    /// Stretches of neighbouring items with about equally many bytes, one for each of the ranks that hold them alike.
    fn striped(self) -> Vec<Self> {
        let mut alike: BTreeMap<PagedPlacement, u128> = BTreeMap::new();
        self.src.iter().flatten().for_each(|p| *alike.entry(*p).or_default() += 1);
        let ways = alike.into_values().max().unwrap_or(1).max(1);
        let total = self.items.iter().map(|i| i.1).sum::<u128>().max(1);
        let mut stripes: BTreeMap<u128, Vec<(ItemId, u128)>> = BTreeMap::new();
        let mut before = 0;
        for &(id, bytes) in &self.items {
            // By the item's middle, so that a stripe is no longer than its neighbours by more than an item.
            stripes.entry((2 * before + bytes) * ways / (2 * total)).or_default().push((id, bytes));
            before += bytes;
        }
        stripes.into_values().map(|items| Self { items, ..self.clone() }).collect()
    }
}

struct Builder<D> {
    distance: D,
    options: PeerOptions,
    /// Bytes assigned so far, for requests of [`MAX_PERIOD`] tokens.
    load: Vec<u128>,
    /// Comparisons left.
    work: u64,
    shares: BTreeMap<(RankId, RankId), Vec<Share>>,
    reads: Vec<Vec<RankId>>,
}

impl<D: Fn(RankId, RankId) -> u32> Builder<D> {
    fn assign(&mut self, c: &Compatible, index: usize, set: &ItemSet) -> Result<(), PeerError> {
        let mut classes: BTreeMap<TokenClass, Arc<TokenSet>> = BTreeMap::new();
        let mut of_class = |class: TokenClass| {
            let made = classes.entry(class).or_insert_with(|| Arc::new(TokenSet::of_class(class, set.period)));
            Arc::clone(made)
        };
        let holders: Vec<(RankId, HeadRange, Arc<TokenSet>)> = (0u32..)
            .map(RankId::new)
            .zip(&set.src)
            .filter_map(|(rank, p)| p.map(|p| (rank, p.heads, of_class(p.tokens))))
            .collect();
        let held: u64 = holders.iter().map(|h| h.2.intervals.len() as u64).sum();
        for (dst, p) in (0u32..).map(RankId::new).zip(&set.dst) {
            let Some(p) = p else { continue };
            let wanted = TokenSet::of_class(p.tokens, set.period);
            let mut missing: Vec<(HeadRange, TokenSet)> =
                set.heads.iter().filter(|h| p.heads.contains(**h)).map(|h| (*h, wanted.clone())).collect();
            while let Some((heads, _)) = missing.first() {
                let item = || set.name(c);
                let intervals: usize = missing.iter().map(|(_, tokens)| tokens.intervals.len()).sum();
                // Each holder's tokens are compared with each stretch of heads that is missing.
                let cost = (holders.len() as u64)
                    .saturating_mul(intervals as u64)
                    .saturating_add(held.saturating_mul(missing.len() as u64));
                self.work = self.work.checked_sub(cost).ok_or_else(|| PeerError::TooComplex { item: item() })?;
                let Some((gain, at)) = self.choose(dst, &holders, &missing) else {
                    let item = item();
                    return Err(PeerError::Uncovered { item, dst, heads: *heads });
                };
                let (src, held_heads, held_tokens) = &holders[at];
                let bytes: u128 = set.items.iter().map(|i| i.1).sum();
                self.load[src.index()] += u128::from(gain) * bytes / u128::from(set.period);
                if !self.reads[dst.index()].contains(src) {
                    self.reads[dst.index()].push(*src);
                }
                let mut taken: Vec<Share> = Vec::new();
                for (heads, tokens) in &mut missing {
                    if !held_heads.contains(*heads) {
                        continue;
                    }
                    let part = tokens.intersect(held_tokens);
                    *tokens = tokens.minus(&part);
                    if !part.is_empty() {
                        push_share(&mut taken, Share { items: index, heads: *heads, tokens: part });
                    }
                }
                missing.retain(|(_, tokens)| !tokens.is_empty());
                self.shares.entry((dst, *src)).or_default().extend(taken);
            }
        }
        Ok(())
    }

    /// The best holder for what is missing: (heads × tokens it has, its index).
    fn choose(
        &self,
        dst: RankId,
        holders: &[(RankId, HeadRange, Arc<TokenSet>)],
        missing: &[(HeadRange, TokenSet)],
    ) -> Option<(u64, usize)> {
        let mut best: Vec<(u64, usize)> = Vec::new();
        let mut best_key = None;
        for (at, (src, heads, tokens)) in holders.iter().enumerate() {
            let gain: u64 = missing
                .iter()
                .filter(|(h, _)| heads.contains(*h))
                .map(|(h, t)| u64::from(h.count()) * t.intersect(tokens).len())
                .sum();
            if gain == 0 {
                continue;
            }
            // A rank that is read already is one peer less; striping is about having more of them.
            let known = !self.options.stripe && self.reads[dst.index()].contains(src);
            let key = (core::cmp::Reverse(gain), !known, (self.distance)(*src, dst), self.load[src.index()]);
            match best_key.as_ref().map(|b| key.cmp(b)) {
                Some(core::cmp::Ordering::Greater) => {}
                Some(core::cmp::Ordering::Equal) => best.push((gain, at)),
                _ => {
                    best_key = Some(key);
                    best = vec![(gain, at)];
                }
            }
        }
        let turn = self.options.salt.checked_rem(best.len() as u64)?;
        best.get(usize::try_from(turn).unwrap_or(0)).copied()
    }
}

/// Adds a share, joining it to the last one where only the heads go on.
fn push_share(list: &mut Vec<Share>, share: Share) {
    if let Some(last) = list.last_mut()
        && last.heads.end() == share.heads.start()
        && last.tokens == share.tokens
        && let Some(heads) = HeadRange::new(last.heads.start(), share.heads.end())
    {
        last.heads = heads;
        return;
    }
    list.push(share);
}

fn digest_of(c: &Compatible, options: PeerOptions, item_sets: &[AxisItems], pairs: &[RankPair]) -> Digest {
    let mut d = Digester::new("kvferry peer map 2");
    for manifest in [c.src(), c.dst()] {
        manifest.digest().as_bytes().iter().for_each(|b| d.number(u64::from(*b)));
    }
    d.number(options.salt);
    d.number(u64::from(options.stripe));
    d.count(item_sets.len());
    for set in item_sets {
        d.count(set.axis);
        d.count(set.items.len());
        set.items.iter().for_each(|i| d.number(u64::from(i.get())));
    }
    d.count(pairs.len());
    for pair in pairs {
        d.number(u64::from(pair.src.get()));
        d.number(u64::from(pair.dst.get()));
        d.count(pair.shares.len());
        for s in &pair.shares {
            d.count(s.items);
            d.number(u64::from(s.heads.start()));
            d.number(u64::from(s.heads.end()));
            d.number(s.tokens.period);
            d.count(s.tokens.intervals.len());
            for (a, b) in &s.tokens.intervals {
                d.number(*a);
                d.number(*b);
            }
        }
    }
    d.finish()
}
