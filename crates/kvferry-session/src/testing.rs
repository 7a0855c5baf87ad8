//! Two small engines for this crate's tests: a model of two items, tensor parallel, blocks of 16 tokens.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, Manifest, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::request::{BlockTable, DstGroup, DstPaged, SrcGroup, SrcPaged, Tail};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{BlockId, ItemId, Name, RegionId, TokenRange, Tokens};
use kvferry_transport::{
    Capabilities, ConnectError, DeregisterError, EndpointId, Event, OpId, PeerId, PeerInfo, Region, RegisterError,
    RevokeError, RevokeScope, Submission, SubmitError, Transport, UnknownOp, UnknownPeer,
};

/// Blocks of every engine.
pub(crate) const BLOCKS: u32 = 1024;
/// Tokens of every request.
pub(crate) const TOKENS: u64 = 40;
/// Bytes of one token over both items and all heads.
pub(crate) const TOKEN_BYTES: u64 = 2 * 4 * 2 * 32;

/// A description of an engine of `tp` ranks.
pub(crate) fn shape(tp: u32) -> (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>) {
    shape_by(tp, HeadRule::Split)
}

/// As [`shape`], by this rule.
pub(crate) fn shape_by(tp: u32, rule: HeadRule) -> (ModelSpec, Vec<CacheGroup>, Vec<RankManifest>) {
    let item = |name: &str| {
        let components = vec![Component::new("k", 32, "bf16"), Component::new("v", 32, "bf16")];
        Item::paged(name, PagedItem::new(4, components))
    };
    let spec = ModelSpec::new(vec![item("layer.0"), item("layer.1")]).unwrap();
    let ids = [ItemId::new(0), ItemId::new(1)];
    let group = CacheGroup { name: Name::new("all"), items: ids.to_vec(), block_tokens: Tokens::new(16) };
    let placed = Parallelism::tensor(&spec, tp).place(&spec, |_, _| rule).unwrap();
    let rank = |placement| {
        let layout = LayoutStyle::NHD.build(&spec, &placement, &[(&ids[..], 16, BLOCKS)]).unwrap();
        RankManifest { placement, layout }
    };
    let ranks = placed.into_iter().map(rank).collect();
    (spec, vec![group], ranks)
}

/// Its manifest.
pub(crate) fn manifest(tp: u32) -> Arc<Manifest> {
    let (spec, groups, ranks) = shape(tp);
    Arc::new(Manifest::new(spec, groups, ranks).unwrap())
}

fn table(ids: &[u32]) -> BlockTable {
    BlockTable::new(0, &ids.iter().map(|&id| BlockId::new(id)).collect::<Vec<_>>())
}

/// What the producer lists.
pub(crate) fn src_groups() -> Vec<SrcGroup> {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    vec![SrcPaged { table: table(&[3, 0, 6]), held, tail: Tail::Exact }.into()]
}

/// The same tokens in other blocks of the producer's.
pub(crate) fn other_src_groups(request: u32) -> Vec<SrcGroup> {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    let first = 8 + 3 * (request % (BLOCKS / 3 - 8));
    vec![SrcPaged { table: table(&[first, first + 2, first + 1]), held, tail: Tail::Exact }.into()]
}

/// What another request of the consumer lists: blocks of its own.
pub(crate) fn other_dst_groups(request: u32) -> Vec<DstGroup> {
    let first = 8 + 3 * (request % (BLOCKS / 3 - 8));
    vec![DstPaged { table: table(&[first, first + 2, first + 1]), cached: Tokens::ZERO }.into()]
}

/// What the consumer lists.
pub(crate) fn dst_groups() -> Vec<DstGroup> {
    vec![DstPaged { table: table(&[7, 2, 1]), cached: Tokens::ZERO }.into()]
}

/// A transport whose lanes come up late: nothing of `Connected` and `PeerLost` is told while `held` is set. While `deaf` is, it
/// takes note of no cancel.
pub(crate) struct Late<T> {
    pub(crate) inner: T,
    pub(crate) held: Arc<AtomicBool>,
    pub(crate) deaf: Arc<AtomicBool>,
    kept: VecDeque<Event>,
}

impl<T> Late<T> {
    pub(crate) fn new(inner: T, held: Arc<AtomicBool>) -> Self {
        Self { inner, held, deaf: Arc::default(), kept: VecDeque::new() }
    }
}

impl<T: Transport> Transport for Late<T> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn endpoint(&self) -> EndpointId {
        self.inner.endpoint()
    }
    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        self.inner.register(region)
    }
    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.inner.deregister(region)
    }
    fn blob(&self) -> Vec<u8> {
        self.inner.blob()
    }
    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        self.inner.connect(blob)
    }
    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.inner.disconnect(peer)
    }
    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.inner.peer(peer)
    }
    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        self.inner.submit(submission)
    }
    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        if self.deaf.load(Ordering::Relaxed) { Ok(()) } else { self.inner.cancel(op) }
    }
    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        self.inner.revoke(scope)
    }
    fn step(&mut self, now: Duration) -> Option<Duration> {
        self.inner.step(now)
    }
    fn next_event(&mut self) -> Option<Event> {
        if !self.held.load(Ordering::Relaxed)
            && let Some(event) = self.kept.pop_front()
        {
            return Some(event);
        }
        loop {
            let event = self.inner.next_event()?;
            let of_lane = matches!(event, Event::Connected { .. } | Event::PeerLost { .. });
            if !(of_lane && self.held.load(Ordering::Relaxed)) {
                return Some(event);
            }
            self.kept.push_back(event);
        }
    }
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inner.wake_fd()
    }
    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.wait(timeout)
    }
}
