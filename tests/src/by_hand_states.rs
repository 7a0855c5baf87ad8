//! Engines by hand that hold more than K and V in one group: states, scales, drafts, groups of many kinds, irregular
//! placements.
//!
//! A [`Shape`] says what an engine caches, how that is spread and how it lies. Sizes are those of real models, in few layers
//! and few blocks, so that every byte can be looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::{CompatOptions, Compatible};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestErrors, RankManifest};
use kvferry_geometry::peers::{PeerMap, PeerOptions};
use kvferry_geometry::placement::{HeadRule, Parallelism, PcpMode, Placement, RankPlacement, TokenClass};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BoundRequest, Checkpoint, DstGroup, DstState, Request, SrcGroup, SrcState};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention, StateItem, StatePart};
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{BlockId, Bytes, GroupId, ItemId, Name, RankId, Tokens};
use kvferry_oracle::{Transfer, carry_out};
use kvferry_proto::lease::{Bound, Consumer, Offer, Offered, Term, first_attempt};
use kvferry_proto::names::{ContentKey, EngineId, Epoch, LeaseId};
use kvferry_proto::peer::BindAnswer;
use kvferry_proto::rank::{RankReport, SourceReport};
use kvferry_proto::request::{Granted, Step, Wanted};

use crate::by_hand::{Pair, holds, table, wants};

/// An MLA latent of DeepSeek: 512 values and 64 of rope, of 2 bytes.
pub const LATENT: u64 = 1152;

/// How the heads of an item, or the units of one of its parts, are spread.
pub type Rule = fn(&Item, usize) -> HeadRule;

/// An item of one head that all ranks hold whole.
#[must_use]
pub fn mla(name: &str) -> Item {
    Item::paged(name, PagedItem::new(1, vec![Component::new("latent", LATENT, "bf16")]))
}

/// The keys of a DeepSeek indexer: 128 values of a byte and one scale, both for each token.
#[must_use]
pub fn indexer(name: &str) -> Item {
    let components = vec![Component::new("key", 128, "fp8"), Component::new("scale", 4, "fp32")];
    Item::paged(name, PagedItem::new(1, components))
}

/// K and V of heads with 128 values of 2 bytes.
#[must_use]
pub fn gqa(name: &str, heads: u32) -> Item {
    let components = vec![Component::new("k", 256, "bf16"), Component::new("v", 256, "bf16")];
    Item::paged(name, PagedItem::new(heads, components))
}

/// K and V of 8 heads with 64 values of 2 bytes and a window, as in gpt-oss; `None` keeps everything.
#[must_use]
pub fn gpt_oss(name: &str, window: Option<u64>) -> Item {
    let components = vec![Component::new("k", 128, "bf16"), Component::new("v", 128, "bf16")];
    let retention = window.map_or(Retention::Full, |w| Retention::Window(Tokens::new(w)));
    Item::paged(name, PagedItem { retention, ..PagedItem::new(8, components) })
}

/// A Mamba 2 state: a convolution of 3 rows over x, B and C, and a state for each head.
#[must_use]
pub fn mamba2(name: &str, heads: u32, head_dim: u32, groups: u32, state_size: u32) -> Item {
    let conv = |part: &str, channels| StatePart::new(part, channels, 3, 2, "bf16");
    let temporal = u64::from(head_dim) * u64::from(state_size) * 2;
    let parts = vec![
        conv("conv.x", heads * head_dim),
        conv("conv.b", groups * state_size),
        conv("conv.c", groups * state_size),
        StatePart::new("temporal", heads, 1, temporal, "bf16"),
    ];
    Item::state(name, StateItem { parts })
}

/// The state of Falcon H1 0.5B, whose 24 heads share one B and one C, with a state size of 32 instead of 128: 1536 | 32 | 32
/// channels.
#[must_use]
pub fn falcon(name: &str) -> Item {
    mamba2(name, 24, 64, 1, 32)
}

/// The usual rule of Falcon's state: x and the heads are split, B and C are on all ranks.
#[must_use]
pub fn falcon_rule(item: &Item, part: usize) -> HeadRule {
    match (item.as_state(), part) {
        (Some(_), 0) => HeadRule::Blocks(64),
        (Some(_), 1 | 2) => HeadRule::Blocks(32),
        _ => HeadRule::Split,
    }
}

/// The state of a gated delta net: a convolution over q, k and v, and a state for each value head, as in Qwen3-Next with
/// fewer heads.
#[must_use]
pub fn delta_net(name: &str, key_heads: u32, value_heads: u32) -> Item {
    let conv = |part: &str, heads: u32| StatePart::new(part, heads * 128, 3, 2, "bf16");
    let temporal = StatePart::new("temporal", value_heads, 1, 128 * 128 * 2, "bf16");
    let parts = vec![conv("conv.q", key_heads), conv("conv.k", key_heads), conv("conv.v", value_heads), temporal];
    Item::state(name, StateItem { parts })
}

/// Heads of 128 channels stay together.
#[must_use]
pub fn delta_rule(item: &Item, part: usize) -> HeadRule {
    if item.as_state().is_some() && part < 3 { HeadRule::Blocks(128) } else { HeadRule::Split }
}

/// One cache group of a [`Shape`].
#[derive(Clone, Debug)]
struct Group {
    items: Vec<ItemId>,
    /// Tokens of a block on one rank; for states nothing.
    tokens: u32,
    blocks: u32,
}

/// An engine about to become a manifest. Starts with one group of all paged items and one of all states, HND, and 8 blocks
/// of 16 tokens.
#[derive(Clone, Debug)]
pub struct Shape {
    spec: ModelSpec,
    parallelism: Parallelism,
    style: LayoutStyle,
    rule: Rule,
    undealt: Vec<ItemId>,
    groups: Vec<Group>,
}

impl Shape {
    /// `tp` ranks that hold the given items.
    ///
    /// # Panics
    /// Where the items are no spec.
    #[must_use]
    pub fn new(items: Vec<Item>, tp: u32) -> Self {
        let spec = ModelSpec::new(items).unwrap_or_else(|e| panic!("the spec of a case is wrong: {e}"));
        let parallelism = Parallelism::tensor(&spec, tp);
        let (paged, states): (Vec<_>, Vec<_>) = spec.iter().partition(|(_, i)| i.as_paged().is_some());
        let group = |items: Vec<(ItemId, &Item)>| Group {
            items: items.into_iter().map(|i| i.0).collect(),
            tokens: 16,
            blocks: 8,
        };
        let groups = [group(paged), group(states)].into_iter().filter(|g| !g.items.is_empty()).collect();
        let style = LayoutStyle::HND;
        Self { spec, parallelism, style, rule: |_, _| HeadRule::Split, undealt: Vec::new(), groups }
    }

    /// Blocks of so many tokens a rank in every group, and so many of them.
    #[must_use]
    pub fn blocks(mut self, tokens: u32, blocks: u32) -> Self {
        for group in &mut self.groups {
            (group.tokens, group.blocks) = (tokens, blocks);
        }
        self
    }

    /// Cache groups: item names, tokens of a block on one rank, blocks or slots.
    #[must_use]
    pub fn groups(mut self, groups: &[(&[&str], u32, u32)]) -> Self {
        let group = |&(names, tokens, blocks): &(&[&str], u32, u32)| Group { items: self.ids(names), tokens, blocks };
        self.groups = groups.iter().map(group).collect();
        self
    }

    /// Another layout.
    #[must_use]
    pub fn style(mut self, style: LayoutStyle) -> Self {
        self.style = style;
        self
    }

    /// Another rule of heads and units.
    #[must_use]
    pub fn rule(mut self, rule: Rule) -> Self {
        self.rule = rule;
        self
    }

    /// Decode context parallelism, with tokens dealt out `interleave` at a time.
    #[must_use]
    pub fn dcp(mut self, dcp: u32, interleave: u32) -> Self {
        (self.parallelism.dcp, self.parallelism.interleave) = (dcp, interleave);
        self
    }

    /// Prefill context parallelism, with tokens dealt out `interleave` at a time.
    #[must_use]
    pub fn pcp(mut self, pcp: u32, mode: PcpMode, interleave: u32) -> Self {
        (self.parallelism.pcp, self.parallelism.pcp_mode, self.parallelism.interleave) = (pcp, mode, interleave);
        self
    }

    /// Items of which every rank holds all tokens, whatever the context parallelism of the others.
    #[must_use]
    pub fn undealt(mut self, names: &[&str]) -> Self {
        self.undealt = self.ids(names);
        self
    }

    /// Pipeline stages, by item names.
    #[must_use]
    pub fn stages(mut self, stages: &[&[&str]]) -> Self {
        self.parallelism.stages = stages.iter().map(|names| self.ids(names)).collect();
        self
    }

    fn ids(&self, names: &[&str]) -> Vec<ItemId> {
        let id = |name: &&str| self.spec.find(&Name::new(name)).unwrap_or_else(|| panic!("no item {name}"));
        names.iter().map(id).collect()
    }

    /// What its ranks say of themselves, to be changed by a test before [`Shape::assemble`].
    ///
    /// # Panics
    /// Where the parallelism or the layout can't be written out.
    #[must_use]
    pub fn ranks(&self) -> Vec<RankManifest> {
        let placed = self.parallelism.place(&self.spec, self.rule);
        let placed = placed.unwrap_or_else(|e| panic!("the parallelism of a case is wrong: {e:?}"));
        let groups: Vec<(&[ItemId], u32, u32)> =
            self.groups.iter().map(|g| (g.items.as_slice(), g.tokens, g.blocks)).collect();
        let rank = |mut placement: RankPlacement| {
            for id in &self.undealt {
                if let Some(Placement::Paged(p)) = &mut placement[id.index()] {
                    p.tokens = TokenClass::ALL;
                }
            }
            let layout = self.style.build(&self.spec, &placement, &groups);
            RankManifest { layout: layout.unwrap_or_else(|e| panic!("a layout is wrong: {e}")), placement }
        };
        placed.into_iter().map(rank).collect()
    }

    /// The manifest of the given ranks.
    ///
    /// # Errors
    /// What the manifest finds.
    pub fn assemble(&self, ranks: Vec<RankManifest>) -> Result<Arc<Manifest>, ManifestErrors> {
        let block_tokens = |g: &Group| {
            let is_state = g.items.iter().any(|&i| self.spec.get(i).is_some_and(|i| i.as_state().is_some()));
            let undealt = g.items.iter().all(|i| self.undealt.contains(i));
            let context = if undealt { 1 } else { u64::from(self.parallelism.context()) };
            Tokens::new(if is_state { 0 } else { u64::from(g.tokens) * context })
        };
        let group = |(i, g): (usize, &Group)| CacheGroup {
            name: Name::new(&format!("group {i}")),
            items: g.items.clone(),
            block_tokens: block_tokens(g),
        };
        let groups = self.groups.iter().enumerate().map(group).collect();
        Manifest::new(self.spec.clone(), groups, ranks).map(Arc::new)
    }

    /// The manifest as described.
    ///
    /// # Panics
    /// Where it is unsound.
    #[must_use]
    pub fn manifest(&self) -> Arc<Manifest> {
        self.assemble(self.ranks()).unwrap_or_else(|e| panic!("the manifest of a case is wrong: {e}"))
    }
}

/// A request for the first `tokens` tokens, of which the destination has `cached` already.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Length of the sequence.
    pub tokens: u64,
    /// Tokens that the destination's paged groups have already; states are always read.
    pub cached: u64,
    /// What of items that one side lacks.
    pub compat: CompatOptions,
    /// How holders are chosen.
    pub peers: PeerOptions,
    /// Where bytes are permuted, if anywhere.
    pub place: Place,
}

impl Ask {
    /// All of so many tokens, straight into place.
    #[must_use]
    pub fn of(tokens: u64) -> Self {
        let (compat, peers) = (CompatOptions::default(), PeerOptions::default());
        Self { tokens, cached: 0, compat, peers, place: Place::Direct }
    }

    /// The same where the destination has some already.
    #[must_use]
    pub fn cached(self, cached: u64) -> Self {
        Self { cached, ..self }
    }
}

/// A request planned, carried out and compared.
#[derive(Clone, Debug)]
pub struct Proof {
    /// Bytes that arrived at the destination, over all ranks.
    pub moved: u64,
    /// Bytes that were zeroed.
    pub zeroed: u64,
    /// Moves that a backend would make.
    pub descriptors: u64,
    /// (source rank, destination rank) of those that exchange bytes, by destination.
    pub pairs: Vec<(u32, u32)>,
}

/// Ids that jump about, none of them twice.
#[derive(Debug, Default)]
struct Scatter {
    taken: BTreeSet<u32>,
}

impl Scatter {
    /// A free id below `limit`.
    fn take(&mut self, limit: u32) -> u32 {
        let step = (2..limit).find(|s| s * s > limit && !limit.is_multiple_of(*s)).unwrap_or(1);
        let mut id = (u32::try_from(self.taken.len()).expect("few") * step + limit / 2) % limit;
        while !self.taken.insert(id) {
            id = (id + 1) % limit;
            assert!(self.taken.len() < limit as usize, "{limit} blocks are too few for this request");
        }
        id
    }
}

/// Whether groups of an engine have memory in common, so that their blocks must be apart.
fn shares(m: &Manifest) -> bool {
    let mut group_of: BTreeMap<(usize, u32), u32> = BTreeMap::new();
    let mut shared = false;
    for (rank, r) in m.ranks().iter().enumerate() {
        for (id, view) in (0u32..).map(ItemId::new).zip(&r.layout.views) {
            let Some(view) = view else { continue };
            let group = m.group_of(id).get();
            shared |= *group_of.entry((rank, view.region().get())).or_insert(group) != group;
        }
    }
    shared
}

/// What both engines list for a request: block ids of paged groups, two slots of every group of states.
#[derive(Clone, Debug)]
struct Lists {
    ask: Ask,
    /// By group: whether it holds states, and ids.
    src: Vec<(bool, Vec<u32>)>,
    dst: Vec<(bool, Vec<u32>)>,
}

impl Lists {
    fn of(src: &Manifest, dst: &Manifest, ask: Ask) -> Self {
        Self { ask, src: Self::ids(src, ask.tokens), dst: Self::ids(dst, ask.tokens) }
    }

    fn ids(m: &Manifest, tokens: u64) -> Vec<(bool, Vec<u32>)> {
        let (shared, mut scatter) = (shares(m), Scatter::default());
        let mut all = Vec::new();
        for (id, group) in (0u32..).map(GroupId::new).zip(m.groups()) {
            if !shared {
                scatter = Scatter::default();
            }
            let state = m.is_state(id);
            let ring = group.items.iter().find_map(|&i| match m.spec().get(i)?.as_paged()?.retention {
                Retention::Ring(r) => Some(r.get()),
                _ => None,
            });
            // A ring's table lists the ring.
            let covered = ring.unwrap_or(tokens);
            let count = if state { 2 } else { covered.div_ceil(group.block_tokens.get()) };
            all.push((state, (0..count).map(|_| scatter.take(m.blocks(id).get())).collect()));
        }
        all
    }

    /// As the planner reads it.
    fn request(&self) -> Request {
        let Ask { tokens, cached, .. } = self.ask;
        let src = |(state, ids): &(bool, Vec<u32>)| -> SrcGroup {
            // An earlier state is there too, and is not the one.
            let state_at = |position, id| Checkpoint { position: Tokens::new(position), slot: BlockId::new(id) };
            match state {
                true => SrcState { checkpoints: vec![state_at(tokens / 2, ids[1]), state_at(tokens, ids[0])] }.into(),
                false => holds(tokens, table(ids)),
            }
        };
        let dst = |(state, ids): &(bool, Vec<u32>)| -> DstGroup {
            match state {
                true => DstState { slot: Some(BlockId::new(ids[0])), more: Vec::new() }.into(),
                false => wants(cached, table(ids)),
            }
        };
        let (src, dst) = (self.src.iter().map(src).collect(), self.dst.iter().map(dst).collect());
        Request { tokens: Tokens::new(tokens), src, dst }
    }
}

/// The request for what is asked, with blocks that jump about on both sides, and an earlier state beside the one wanted.
///
/// # Panics
/// Where an engine has too few blocks.
#[must_use]
pub fn request_of(src: &Manifest, dst: &Manifest, ask: Ask) -> Request {
    Lists::of(src, dst, ask).request()
}

/// Plans a request between two engines, carries it out in memory, and holds every byte of the destination against the oracle.
///
/// # Panics
/// Where it is refused, or any byte is wrong.
#[must_use]
pub fn prove(src: &Arc<Manifest>, dst: &Arc<Manifest>, ask: Ask) -> Proof {
    try_prove(src, dst, ask).unwrap_or_else(|e| panic!("{e}"))
}

/// As [`prove`].
///
/// # Errors
/// The refusal, or what is wrong, in words.
pub fn try_prove(src: &Arc<Manifest>, dst: &Arc<Manifest>, ask: Ask) -> Result<Proof, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let compatible = Compatible::with(Arc::clone(src), Arc::clone(dst), ask.compat).map_err(|e| text(&e))?;
    let peers = PeerMap::with(&compatible, ask.peers, |_, _| 0).map_err(|e| text(&e))?;
    let request = request_of(src, dst, ask);
    let bound = BoundRequest::new(&compatible, request.clone()).map_err(|e| text(&e))?;
    let mut batches = Vec::new();
    for pair in peers.pairs() {
        let plan = PairPlan::new(&compatible, &peers, pair.src(), pair.dst()).map_err(|e| text(&e))?;
        batches.push((pair.src(), pair.dst(), plan.resolve(&bound).map_err(|e| text(&e))?));
    }
    let outcome = carry_out(&Transfer::of(src, dst, &request), &bound, &batches, ask.place)?;
    let (verdict, descriptors) = (outcome.verdict, outcome.expansion.descriptors);
    let pairs = peers.pairs().iter().map(|p| (p.src().get(), p.dst().get())).collect();
    Ok(Proof { moved: verdict.moved, zeroed: verdict.zeroed, descriptors, pairs })
}

/// A lease at its producer and at its consumer, bound: the owners' machines, ready for ranks to read.
#[derive(Clone, Debug)]
pub struct Leased {
    /// The consumer.
    pub consumer: Consumer,
    /// At the producer.
    pub bound: Bound,
    /// At the consumer.
    pub granted: Granted,
}

/// Offers some groups under a lease, and binds it.
///
/// # Panics
/// Where the machines refuse.
#[must_use]
pub fn leased(pair: &Pair, lease: u128, groups: Vec<SrcGroup>) -> Leased {
    let id = |name: &str| EngineId::new(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let fence = first_attempt(id("prefill"), Epoch::new(7), LeaseId::new(lease));
    let key = ContentKey::from_bytes([1; 32]);
    let offered = Offered::new(fence.clone(), Offer { groups, content_key: key }, Term::Open);
    let (asking, bind) = Wanted::new(fence, key).ask(0, pair.peers.digest());
    let consumer = Consumer { engine: id("decode"), epoch: Epoch::new(9) };
    let bound = offered.bind(&bind, consumer.clone(), pair.peers.digest(), Duration::ZERO);
    let (bound, grant) = bound.unwrap_or_else(|(_, why)| panic!("not lent: {why}"));
    let Step::Next(Ok(granted)) = asking.on_answer(BindAnswer::Bound(grant)) else { panic!("not granted") };
    Leased { consumer, bound, granted }
}

/// What a destination rank tells of its share, when it has read all its sources.
#[must_use]
pub fn has_read(pair: &Pair, dst: u32) -> RankReport {
    let source = |src: u32| SourceReport {
        src: RankId::new(src),
        bytes: Bytes::new(1),
        rows: 1,
        descriptors_before: 1,
        descriptors_after: 1,
        place: Place::Direct,
        lane: String::new(),
        took: Duration::ZERO,
    };
    let sources = pair.sources(dst).into_iter().map(source).collect();
    RankReport {
        sources,
        zeroed: Bytes::ZERO,
        compared: Bytes::ZERO,
        queued: Duration::ZERO,
        slices: 1,
        took: Duration::ZERO,
    }
}
