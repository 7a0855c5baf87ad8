//! Whole engines without sockets and threads: an owner and its ranks on the in-memory transport, stepped by hand.

use std::collections::VecDeque;
use std::time::Duration;

use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::request::{BlockTable, DstGroup, DstPaged, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{BlockId, ItemId, RankId, TokenRange, Tokens};
use kvferry_proto::lease::Offer;
use kvferry_proto::names::{ContentKey, EngineId, Epoch, Fence, LeaseId};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::Assurance;
use kvferry_session::owner::{Effect, FailurePolicy, LinkId, Mode, PullWish, RankLinkId, USUAL_PRIORITY};
use kvferry_session::rank::RankIdentity;
use kvferry_session::{LocalCache, OwnerConfig, OwnerSession, RankSession, Ttl};
use kvferry_transport::mem::MemNetwork;
use kvferry_transport::{Region, Transport};

use crate::measure::thread_cpu;

/// Tokens of a block.
pub const BLOCK: u64 = 16;

/// A description: `items` layers in regions of their own, 8 KV heads, `tp` ranks, blocks of 16 tokens.
///
/// # Panics
/// If the shape is unsound.
#[must_use]
pub fn shape(items: u32, width: u64, tp: u32, blocks: u32) -> (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>) {
    shape_of_blocks(items, width, tp, blocks, BLOCK)
}

/// The same with blocks of `block` tokens.
///
/// # Panics
/// If the shape is unsound.
#[must_use]
pub fn shape_of_blocks(
    items: u32,
    width: u64,
    tp: u32,
    blocks: u32,
    block: u64,
) -> (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>) {
    let kv = PagedItem::new(8, vec![Component::new("k", width, "bf16"), Component::new("v", width, "bf16")]);
    let items = (0..items).map(|i| Item::paged(&format!("model.layers.{i}.self_attn.attn"), kv.clone())).collect();
    let spec = ModelSpec::new(items).expect("a sound spec");
    let ids: Vec<ItemId> = spec.iter().map(|i| i.0).collect();
    let group = CacheGroup { name: "kv".into(), items: ids.clone(), block_tokens: Tokens::new(block) };
    let block = u32::try_from(block).expect("a small number");
    let placed = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split).expect("a sound parallelism");
    let rank = |placement| {
        let layout = LayoutStyle::HND.build(&spec, &placement, &[(&ids, block, blocks)]).expect("a sound layout");
        RankManifest { placement, layout }
    };
    let ranks = placed.into_iter().map(rank).collect();
    (spec, vec![group], ranks)
}

/// One engine.
pub struct Engine {
    /// Its owner.
    pub owner: OwnerSession,
    ranks: Vec<RankSession>,
    links: Vec<RankLinkId>,
    connects: Vec<LinkId>,
    said: VecDeque<PeerMessage>,
    /// Requests that have ended: delivered, and not.
    pub ended: (usize, usize),
    /// Why the last one failed that did.
    pub failure: Option<String>,
    /// CPU time in the owner, and in the ranks.
    pub spent: (Duration, Duration),
}

impl Engine {
    /// An engine whose ranks have joined.
    ///
    /// # Panics
    /// If it is unsound.
    #[must_use]
    pub fn new(
        id: &str,
        network: &MemNetwork,
        (spec, groups, manifests): (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>),
    ) -> Self {
        let engine = EngineId::new(id).expect("a sound id");
        let count = u32::try_from(manifests.len()).expect("few ranks");
        let config = OwnerConfig::new(engine.clone(), Epoch::new(1), spec, groups, count);
        let mut owner = OwnerSession::new(config).expect("a sound engine");
        let (mut ranks, mut links) = (Vec::new(), Vec::new());
        for (rank, manifest) in (0u32..).map(RankId::new).zip(manifests) {
            let mut transport: Box<dyn Transport> = Box::new(network.endpoint().expect("an endpoint"));
            let len = |r: &kvferry_geometry::layout::Region| usize::try_from(r.len.get()).expect("a small region");
            let regions = manifest.layout.regions.iter().map(|r| Region::zeroed(len(r)).expect("memory")).collect();
            let cache = LocalCache::register(&mut *transport, manifest, regions).expect("a sound cache");
            let who = RankIdentity { engine: engine.clone(), rank, epoch: Epoch::new(2) };
            ranks.push(RankSession::new(who, transport, cache));
            links.push(owner.accept_rank(Duration::ZERO));
        }
        let (connects, said) = (Vec::new(), VecDeque::new());
        let mut new =
            Self { owner, ranks, links, connects, said, ended: (0, 0), failure: None, spent: Default::default() };
        new.turn(Duration::ZERO);
        assert!(new.owner.manifest().is_some(), "all have joined");
        new
    }

    /// Offers blocks.
    ///
    /// # Panics
    /// If they can't be offered.
    pub fn offer(&mut self, lease: u128, groups: Vec<SrcGroup>, now: Duration) -> Fence {
        let offer = Offer { groups, content_key: ContentKey::from_bytes([7; 32]) };
        self.owner.offer(LeaseId::new(lease), offer, Ttl::Usual, now).expect("it can be offered")
    }

    /// Asks for blocks, to be pulled or pushed.
    pub fn pull(&mut self, mode: Mode, fence: Fence, tokens: u64, groups: Vec<DstGroup>, now: Duration) {
        let wish = PullWish {
            address: "there".into(),
            fence,
            tokens: Tokens::new(tokens),
            groups,
            content_key: ContentKey::from_bytes([7; 32]),
            assurance: Assurance::Fenced,
            deadline: Duration::from_secs(60),
            priority: USUAL_PRIORITY,
            policy: FailurePolicy::default(),
            mode,
        };
        self.owner.pull(wish, now);
    }

    /// Ranks do what there is to do, and the owner's effects are carried out; false if there was nothing.
    fn turn(&mut self, now: Duration) -> bool {
        let mut any = false;
        let (mut reports, mut orders) = (Vec::new(), Vec::new());
        let began = thread_cpu();
        for (rank, link) in self.ranks.iter_mut().zip(&self.links) {
            // There is more to do at once.
            any |= rank.step(now).is_some_and(|next| next <= now);
            reports.extend(std::iter::from_fn(|| rank.next_message()).map(|message| (*link, message)));
        }
        let stepped = thread_cpu();
        any |= !reports.is_empty();
        reports.into_iter().for_each(|(link, message)| self.owner.rank_message(link, message, now));
        while let Some(effect) = self.owner.next_effect() {
            any = true;
            match effect {
                Effect::Connect { link, .. } => self.connects.push(link),
                Effect::SendPeer { message, .. } => self.said.push_back(message),
                Effect::SendRank { link, message } => orders.push((link, message)),
                Effect::PullEnded { result, .. } => match *result {
                    Ok(_) => self.ended.0 += 1,
                    Err(failed) => {
                        self.ended.1 += 1;
                        self.failure = Some(failed.to_string());
                    }
                },
                _ => {}
            }
        }
        let said = thread_cpu();
        for (link, message) in orders {
            if let Some(rank) = self.links.iter().position(|l| *l == link) {
                self.ranks[rank].handle(message, now);
            }
        }
        self.spent.0 += said.saturating_sub(stepped);
        self.spent.1 += stepped.saturating_sub(began) + thread_cpu().saturating_sub(said);
        any
    }
}

/// Two engines with a link between their owners, which is begun by the first request.
pub struct Pair {
    /// The producer.
    pub p: Engine,
    /// The consumer.
    pub d: Engine,
    link: Option<(LinkId, LinkId)>,
    /// Messages that the owners have said to each other.
    pub frames: u64,
}

impl Pair {
    /// Of two shapes.
    #[must_use]
    pub fn new(
        p: (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>),
        d: (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>),
    ) -> Self {
        let network = MemNetwork::new(1);
        Self { p: Engine::new("p", &network, p), d: Engine::new("d", &network, d), link: None, frames: 0 }
    }

    /// Carries messages both ways until there are none.
    pub fn settle(&mut self, now: Duration) {
        loop {
            let mut any = self.p.turn(now) | self.d.turn(now);
            if let Some(ours) = self.d.connects.pop() {
                let theirs = self.p.owner.accept(None, now);
                any |= self.d.owner.link_opened(ours, None, now);
                self.link = Some((ours, theirs));
            }
            let Some((ours, theirs)) = self.link else { return };
            let began = thread_cpu();
            for message in self.d.said.drain(..) {
                any = true;
                self.frames += 1;
                self.p.owner.peer_message(theirs, message, now);
            }
            let half = thread_cpu().saturating_sub(began);
            for message in self.p.said.drain(..) {
                any = true;
                self.frames += 1;
                self.d.owner.peer_message(ours, message, now);
            }
            self.p.spent.0 += half;
            self.d.spent.0 += thread_cpu().saturating_sub(began).saturating_sub(half);
            if !any {
                return;
            }
        }
    }
}

/// What a producer lists for one request of whole blocks.
#[must_use]
pub fn listed(ids: &[u32]) -> Vec<SrcGroup> {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(ids.len() as u64 * BLOCK));
    vec![SrcPaged { table: table(ids), held, tail: Tail::Exact }.into()]
}

/// What a consumer lists for it.
#[must_use]
pub fn wanted(ids: &[u32]) -> Vec<DstGroup> {
    vec![DstPaged { table: table(ids), cached: Tokens::ZERO }.into()]
}

fn table(ids: &[u32]) -> BlockTable {
    BlockTable::new(0, &ids.iter().map(|&id| BlockId::new(id)).collect::<Vec<_>>())
}
