//! Small engines for the tests that are named after cases: described in a line, planned in a line, and answered in
//! plain numbers (rank numbers, byte offsets, block ids).

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, Descriptor};
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestErrors, RankManifest};
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::placement::{HeadRule, Parallelism, PcpMode};
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BlockTable, BoundRequest, DstGroup, DstPaged, Request, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention};
use kvferry_geometry::units::{BlockId, ItemId, Name, RankId, TokenRange, Tokens};
use kvferry_geometry::zero::ZeroPlan;
use kvferry_proto::handshake::{IdentityCheck, LocalSide};
use kvferry_proto::manifest::{EngineManifest, RankContact};
use kvferry_proto::names::{EngineId, Epoch, ModelIdentity};

/// An attention item: K and V, each `width` bytes for each token and head.
#[must_use]
pub fn kv(name: &str, heads: u32, width: u64) -> Item {
    windowed(name, heads, width, Retention::Full)
}

/// As [`kv`], with a retention.
#[must_use]
pub fn windowed(name: &str, heads: u32, width: u64, retention: Retention) -> Item {
    let components = vec![Component::new("k", width, "bf16"), Component::new("v", width, "bf16")];
    Item::paged(name, PagedItem { retention, ..PagedItem::new(heads, components) })
}

/// An MLA item: one latent of `width` bytes for each token, the same on all ranks.
#[must_use]
pub fn latent(name: &str, width: u64) -> Item {
    let components = vec![Component::new("latent", width, "bf16")];
    Item::paged(name, PagedItem::new(1, components))
}

/// An engine about to become a manifest. Starts with one group of all items, blocks of 16 tokens, 64 blocks, HND.
#[derive(Clone, Debug)]
pub struct Engine {
    /// What it caches.
    pub spec: ModelSpec,
    /// How it is spread.
    pub parallelism: Parallelism,
    style: LayoutStyle,
    groups: Vec<(Vec<ItemId>, u32, u32)>,
}

impl Engine {
    /// `tp` ranks that hold the given items.
    ///
    /// # Panics
    /// Where the items are no spec.
    #[must_use]
    pub fn new(items: Vec<Item>, tp: u32) -> Self {
        let spec = ModelSpec::new(items).unwrap_or_else(|e| panic!("the spec of a case is wrong: {e}"));
        let parallelism = Parallelism::tensor(&spec, tp);
        let all = spec.iter().map(|(id, _)| id).collect();
        Self { spec, parallelism, style: LayoutStyle::HND, groups: vec![(all, 16, 64)] }
    }

    /// Blocks of `entries` tokens a rank, `blocks` of them, in every group.
    #[must_use]
    pub fn blocks(mut self, entries: u32, blocks: u32) -> Self {
        for group in &mut self.groups {
            (group.1, group.2) = (entries, blocks);
        }
        self
    }

    /// Another layout.
    #[must_use]
    pub fn style(mut self, style: LayoutStyle) -> Self {
        self.style = style;
        self
    }

    /// Decode context parallelism, with tokens dealt out `interleave` at a time.
    #[must_use]
    pub fn dcp(mut self, dcp: u32, interleave: u32) -> Self {
        (self.parallelism.dcp, self.parallelism.interleave) = (dcp, interleave);
        self
    }

    /// Prefill context parallelism.
    #[must_use]
    pub fn pcp(mut self, pcp: u32, mode: PcpMode) -> Self {
        (self.parallelism.pcp, self.parallelism.pcp_mode) = (pcp, mode);
        self
    }

    /// Pipeline stages, by item names.
    #[must_use]
    pub fn stages(mut self, stages: &[&[&str]]) -> Self {
        self.parallelism.stages = stages.iter().map(|names| self.ids(names)).collect();
        self
    }

    /// Cache groups: item names, entries of a block, blocks.
    #[must_use]
    pub fn groups(mut self, groups: &[(&[&str], u32, u32)]) -> Self {
        self.groups = groups.iter().map(|(names, entries, blocks)| (self.ids(names), *entries, *blocks)).collect();
        self
    }

    fn ids(&self, names: &[&str]) -> Vec<ItemId> {
        let id = |name: &&str| self.spec.find(&Name::new(name)).unwrap_or_else(|| panic!("no item {name}"));
        names.iter().map(id).collect()
    }

    /// What its ranks say of themselves, to be changed by a test before [`Engine::assemble`].
    ///
    /// # Panics
    /// Where the parallelism or the layout can't be written out.
    #[must_use]
    pub fn ranks(&self) -> Vec<RankManifest> {
        let placed = self.parallelism.place(&self.spec, |_, _| HeadRule::Split);
        let placed = placed.unwrap_or_else(|e| panic!("the parallelism of a case is wrong: {e:?}"));
        let groups: Vec<(&[ItemId], u32, u32)> = self.groups.iter().map(|g| (g.0.as_slice(), g.1, g.2)).collect();
        let rank = |placement| {
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
        let context = u64::from(self.parallelism.context());
        let group = |(i, (items, entries, _)): (usize, &(Vec<ItemId>, u32, u32))| CacheGroup {
            name: Name::new(&format!("group {i}")),
            items: items.clone(),
            block_tokens: Tokens::new(u64::from(*entries) * context),
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

/// What an owner of this name with this cache tells others; its ranks' blobs are two bytes each.
///
/// # Panics
/// Where `id` is no engine id.
#[must_use]
pub fn owner(id: &str, epoch: u128, cache: &Manifest) -> LocalSide {
    let id = EngineId::new(id).unwrap_or_else(|e| panic!("{id}: {e}"));
    let contact = |rank: u32| RankContact { epoch: Epoch::new(u128::from(rank) + 1), blob: Arc::from([7, 7]) };
    let contacts = (0u32..).take(cache.ranks().len()).map(contact).collect();
    let manifest = EngineManifest::new(id, Epoch::new(epoch), cache.clone(), contacts);
    LocalSide {
        identity: ModelIdentity::new("model@revision").unwrap_or_else(|e| panic!("{e}")),
        check: IdentityCheck::Required,
        manifest: Arc::new(manifest.unwrap_or_else(|e| panic!("{e}"))),
        stripe: false,
        allowed: None,
    }
}

/// A source and a destination that know each other.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Both manifests.
    pub compatible: Compatible,
    /// Who reads from whom.
    pub peers: PeerMap,
}

impl Pair {
    /// Two engines as described.
    #[must_use]
    pub fn new(src: &Engine, dst: &Engine) -> Self {
        Self::of(src.manifest(), dst.manifest())
    }

    /// Two manifests.
    ///
    /// # Panics
    /// Where they can't talk.
    #[must_use]
    pub fn of(src: Arc<Manifest>, dst: Arc<Manifest>) -> Self {
        let compatible = Compatible::new(src, dst).unwrap_or_else(|e| panic!("the engines of a case differ: {e}"));
        let peers = PeerMap::new(&compatible, 0).unwrap_or_else(|e| panic!("no peer map: {e}"));
        Self { compatible, peers }
    }

    /// The ranks that destination rank `dst` reads.
    #[must_use]
    pub fn sources(&self, dst: u32) -> Vec<u32> {
        self.peers.sources_of(RankId::new(dst)).map(RankId::get).collect()
    }

    /// The ranks that read source rank `src`.
    #[must_use]
    pub fn consumers(&self, src: u32) -> Vec<u32> {
        self.peers.consumers_of(RankId::new(src)).map(RankId::get).collect()
    }

    /// How many consumers each source rank has.
    #[must_use]
    pub fn consumer_counts(&self) -> Vec<usize> {
        (0u32..).zip(self.compatible.src().ranks()).map(|(src, _)| self.consumers(src).len()).collect()
    }

    /// A request proven.
    ///
    /// # Panics
    /// Where it is refused.
    #[must_use]
    pub fn bind(&self, request: Request) -> BoundRequest {
        BoundRequest::new(&self.compatible, request).unwrap_or_else(|e| panic!("the request of a case is refused: {e}"))
    }

    /// What moves from one rank to another.
    ///
    /// # Panics
    /// Where there is no plan.
    #[must_use]
    pub fn batch(&self, src: u32, dst: u32, request: &BoundRequest) -> Batch {
        let plan = PairPlan::new(&self.compatible, &self.peers, RankId::new(src), RankId::new(dst));
        let batch = plan.and_then(|plan| plan.resolve(request));
        batch.unwrap_or_else(|e| panic!("no plan from {src} to {dst}: {e}"))
    }

    /// The descriptors of [`Pair::batch`], by place at the destination.
    #[must_use]
    pub fn descriptors(&self, src: u32, dst: u32, request: &BoundRequest) -> Vec<Descriptor> {
        let mut all = flat(&self.batch(src, dst, request));
        all.sort_unstable_by_key(|d| (d.dst_region, d.dst_offset));
        all
    }

    /// The descriptors of two ranks with one region each, as (source offset, destination offset, length).
    ///
    /// # Panics
    /// Where there are more regions.
    #[must_use]
    pub fn runs(&self, src: u32, dst: u32, request: &BoundRequest) -> Vec<(u64, u64, u64)> {
        let all = self.descriptors(src, dst, request);
        assert!(
            all.iter().all(|d| d.src_region.get() == 0 && d.dst_region.get() == 0),
            "more than one region: {all:?}"
        );
        all.iter().map(|d| (d.src_offset, d.dst_offset, d.len)).collect()
    }

    /// The bytes of destination rank `dst` that are zeroed, as (region, offset, length).
    ///
    /// # Panics
    /// Where there is no such rank.
    #[must_use]
    pub fn zeroed(&self, dst: u32, request: &BoundRequest) -> Vec<(u32, u64, u64)> {
        let batch = ZeroPlan::new(self.compatible.dst(), RankId::new(dst))
            .and_then(|plan| plan.resolve(request))
            .expect("a rank of it");
        let mut all: Vec<_> = batch.ranges().map(|z| (z.region.get(), z.offset, z.len)).collect();
        all.sort_unstable();
        all
    }

    /// Every region of every destination rank after delivery: source byte `(rank, region, offset)` was
    /// [`source_byte`], and every destination byte was `before`.
    #[must_use]
    pub fn deliver(&self, request: &BoundRequest, before: u8) -> Vec<Vec<Vec<u8>>> {
        let usize = |n: u64| usize::try_from(n).expect("a case fits in memory");
        let regions = |m: &Manifest, rank| m.region_lens(RankId::new(rank)).iter().map(|l| l.get()).collect::<Vec<_>>();
        let mut memory = Vec::new();
        for (dst, _) in (0u32..).zip(self.compatible.dst().ranks()) {
            let lens = regions(self.compatible.dst(), dst);
            let mut rank: Vec<Vec<u8>> = lens.iter().map(|&len| vec![before; usize(len)]).collect();
            for src in self.sources(dst) {
                for d in self.descriptors(src, dst, request) {
                    let to = &mut rank[d.dst_region.index()];
                    for i in 0..d.len {
                        to[usize(d.dst_offset + i)] = source_byte(src, d.src_region.get(), d.src_offset + i);
                    }
                }
            }
            for (region, offset, len) in self.zeroed(dst, request) {
                rank[region as usize][usize(offset)..usize(offset + len)].fill(0);
            }
            memory.push(rank);
        }
        memory
    }
}

/// What [`Pair::deliver`] takes a source to hold; never 0.
#[must_use]
pub fn source_byte(rank: u32, region: u32, offset: u64) -> u8 {
    let mixed = (u64::from(rank) << 40 ^ u64::from(region) << 32 ^ offset).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed.to_be_bytes()[0] | 1
}

/// All descriptors of a batch in its own order.
#[must_use]
pub fn flat(batch: &Batch) -> Vec<Descriptor> {
    let mut all = Vec::new();
    let mut buffer = [Descriptor::default(); 64];
    let mut cursor = batch.cursor();
    loop {
        let filled = cursor.fill(&mut buffer);
        if filled == 0 {
            return all;
        }
        all.extend_from_slice(&buffer[..filled]);
    }
}

/// Cuts runs into pieces of `unit` bytes and names them by number: (source piece, destination piece).
///
/// # Panics
/// Where a run doesn't start and end at pieces.
#[must_use]
pub fn pieces(runs: &[(u64, u64, u64)], unit: u64) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for &(src, dst, len) in runs {
        let whole = [src, dst, len].iter().all(|n| n.is_multiple_of(unit));
        assert!(whole, "({src}, {dst}, {len}) is not whole pieces of {unit}");
        all.extend((0..len / unit).map(|i| (src / unit + i, dst / unit + i)));
    }
    all.sort_unstable_by_key(|p| p.1);
    all
}

/// A table from position 0.
#[must_use]
pub fn table(ids: &[u32]) -> BlockTable {
    table_at(0, ids)
}

/// A table that starts late.
#[must_use]
pub fn table_at(first_position: u64, ids: &[u32]) -> BlockTable {
    let ids: Vec<BlockId> = ids.iter().copied().map(BlockId::new).collect();
    BlockTable::new(first_position, &ids)
}

/// Tokens `[start, end)`.
#[must_use]
pub fn tokens(start: u64, end: u64) -> TokenRange {
    TokenRange::new(Tokens::new(start), Tokens::new(end))
}

/// A source group that holds tokens `[0, n)`.
#[must_use]
pub fn holds(n: u64, table: BlockTable) -> SrcGroup {
    SrcPaged { table, held: tokens(0, n), tail: Tail::Exact }.into()
}

/// A destination group that has tokens `[0, cached)` already.
#[must_use]
pub fn wants(cached: u64, table: BlockTable) -> DstGroup {
    DstPaged { table, cached: Tokens::new(cached) }.into()
}

/// A request of `n` tokens between engines of one group each; the destination has nothing yet.
#[must_use]
pub fn request(n: u64, src: &[u32], dst: &[u32]) -> Request {
    Request { tokens: Tokens::new(n), src: vec![holds(n, table(src))], dst: vec![wants(0, table(dst))] }
}
