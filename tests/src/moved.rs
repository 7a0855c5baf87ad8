//! One request between any two engines that run, in every mode: pulled, pushed, and pushed while it is being computed. Whatever
//! the mode, every byte of the consumer is held against the slow oracle, and who wrote how much to whom is told alike.
//!
//! A prompt that is streamed is computed chunk by chunk: the producer's memory is poison where it has not come to yet, so that a byte which
//! moves before it is final is one that is wrong in the end. What the consumer is told of its progress is compared as
//! soon as it is told.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry::{
    Assurance, BlockId, BlockTable, Delivered, Items, OfferSpec, OwnerBuilder, PullSpec, RankId, Reference, SrcGroup,
    SrcPaged, SrcState, TokenRange, Tokens,
};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::Request;
use kvferry_geometry::units::{GroupId, ItemId};
use kvferry_oracle::{Fate, Memory, Stamp, Transfer, fill_source, walk};
use kvferry_transport::mem::MemNetwork;

use crate::by_hand_states::{Ask, request_of};
use crate::running::{Running, SECOND, key};

/// How the bytes come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// The consumer reads.
    Pull,
    /// The producer writes what it holds.
    Push,
    /// The producer writes while it computes so many tokens at a time.
    Stream(u64),
}

impl By {
    /// Every mode: streams in chunks that end inside blocks.
    pub const ALL: [Self; 3] = [Self::Pull, Self::Push, Self::Stream(24)];
}

/// Two engines that run, and what is asked between them.
#[derive(Debug)]
pub struct Asked {
    /// What their ranks move bytes over.
    pub network: MemNetwork,
    /// The producer.
    pub p: Running,
    /// The consumer.
    pub d: Running,
    request: Request,
}

/// A value of one side: where it lies, and from which token on it is final.
struct Place {
    /// The last token that it stands for; `None` of a state.
    last: Option<u64>,
    rank: usize,
    region: usize,
    offset: u64,
    bytes: Vec<u8>,
}

impl Asked {
    /// Starts both.
    ///
    /// # Panics
    /// Where one doesn't start.
    pub async fn start(src: &Arc<Manifest>, dst: &Arc<Manifest>, ask: Ask) -> Self {
        let network = MemNetwork::new(11);
        let told = |o: OwnerBuilder| o.compat(ask.compat).stripe(ask.peers.stripe);
        let p = Running::of("prefill", Arc::clone(src), &network, told, |w| w).await;
        let d = Running::of("decode", Arc::clone(dst), &network, told, |w| w).await;
        Self { network, p, d, request: request_of(src, dst, ask) }
    }

    /// Both end.
    pub async fn stop(self) {
        self.p.stop().await;
        self.d.stop().await;
    }

    /// What the producer offers.
    #[must_use]
    pub fn offer(&self) -> OfferSpec {
        OfferSpec::new(self.request.src.clone(), key())
    }

    /// What the consumer wants, in a mode.
    #[must_use]
    pub fn spec(&self, by: By) -> PullSpec {
        let spec = PullSpec::new(self.request.tokens, self.request.dst.clone(), key());
        let spec = PullSpec { assurance: Assurance::Full, ..spec };
        match by {
            By::Pull => spec,
            By::Push => spec.push(),
            By::Stream(_) => spec.push_with_progress(),
        }
    }

    /// Serves the request once and compares every byte.
    ///
    /// # Panics
    /// Where it fails, or a byte is wrong.
    pub async fn serve(&self, by: By) -> Delivered {
        let transfer = Transfer::of(&self.p.manifest, &self.d.manifest, &self.request);
        let computed = fill_source(&transfer).expect("a sound transfer");
        self.d.load(&Memory::background(&self.d.manifest));
        let delivered = match by {
            By::Stream(chunk) => {
                self.p.load(&Memory::poison(&self.p.manifest));
                self.stream(&transfer, &computed, chunk).await
            }
            _ => {
                self.p.load(&computed);
                let reference = self.p.owner.offer(self.offer()).await.expect("an offer");
                self.begin(&reference, by).await.await.unwrap_or_else(|e| panic!("{by:?}: {e}"))
            }
        };
        let (got, mut want) = (self.d.store(), Memory::background(&self.d.manifest));
        for place in moved(&transfer) {
            let len = place.bytes.len() as u64;
            let bytes = want.bytes_mut(place.rank, place.region, place.offset, len).expect("inside the region");
            bytes.copy_from_slice(&place.bytes);
        }
        for (rank, (got, want)) in got.ranks.iter().zip(&want.ranks).enumerate() {
            for (region, (got, want)) in got.iter().zip(want).enumerate() {
                let wrong = got.iter().zip(want).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "{by:?}: rank {rank}, region {region}, a byte is wrong at");
            }
        }
        assert_eq!(self.d.owner.quarantined().await.expect("it runs"), 0);
        delivered
    }

    async fn begin(&self, reference: &Reference, by: By) -> kvferry::PullHandle {
        self.d.owner.pull(reference.clone(), self.spec(by)).await.expect("the owner runs")
    }

    /// Chunk by chunk, all items at once or one after the other; the consumer comes when the first chunk is there.
    async fn stream(&self, transfer: &Transfer<'_>, computed: &Memory, chunk: u64) -> Delivered {
        let n = self.request.tokens.get();
        let (mut places, arriving) = (source(transfer, computed), moved(transfer));
        let items = self.paged_items();
        let first = OfferSpec { groups: self.listed(0), ..self.offer() };
        let mut stream = self.p.owner.announce(first).await.expect("an announcement");
        let (mut handle, mut start) = (None, 0);
        while start < n {
            let end = n.min(start + chunk);
            stream.extend(self.listed(end)).await.expect("more blocks");
            for place in extract(&mut places, |p| p.last.is_some_and(|last| last < end)) {
                self.write(&place);
            }
            let tokens = TokenRange::new(Tokens::new(start), Tokens::new(end));
            if (start / chunk).is_multiple_of(2) {
                stream.region_ready(Items::Paged, tokens).await.expect("final");
            } else {
                for item in items.iter().rev() {
                    stream.region_ready(*item, tokens).await.expect("final");
                }
            }
            let pull = match &handle {
                Some(pull) => pull,
                None => handle.insert(self.begin(stream.reference(), By::Stream(chunk)).await),
            };
            self.arrives(pull, end, &arriving).await;
            start = end;
        }
        for place in &places {
            self.write(place);
        }
        stream.seal(self.request.src.clone()).await.expect("all of it");
        let ended = tokio::time::timeout(20 * SECOND, handle.expect("a prompt has tokens")).await;
        ended.expect("it ends").unwrap_or_else(|e| panic!("streamed: {e}"))
    }

    /// Waits until the consumer hears that what can be in place of the first `end` tokens is; then it must be.
    async fn arrives(&self, pull: &kvferry::PullHandle, end: u64, arriving: &[Place]) {
        // A value for several tokens moves with the last of them, and only then those before it are all there. Where nothing keeps
        // tokens, none are waited for.
        let keeps_tokens = self.request.src.iter().any(|group| matches!(group, SrcGroup::Paged(_)));
        let whole = end - end % 16;
        let mut progress = pull.progress().expect("it was asked for");
        let seen = async {
            while progress.tokens().get() < whole {
                progress.next().await.expect("it goes on");
            }
        };
        let in_time = tokio::time::timeout(20 * SECOND, seen).await.is_ok();
        let told = progress.tokens().get();
        assert!(in_time, "{told} tokens are said to be in place where {end} are computed");
        assert!(told <= end || !keeps_tokens, "{told} tokens are said to be in place, {end} are computed");
        for place in arriving.iter().filter(|p| p.last.is_some_and(|last| last < told)) {
            let mut got = vec![0; place.bytes.len()];
            self.d.memory[place.rank][place.region].read(place.offset, &mut got).expect("inside the region");
            assert!(got == place.bytes, "token {:?} is said to be in place at {told}, and is not", place.last);
        }
    }

    /// The producer's blocks for so many tokens, and no states; rings from the beginning.
    fn listed(&self, tokens: u64) -> Vec<SrcGroup> {
        let m = &self.p.manifest;
        let of = |(id, group): (GroupId, &SrcGroup)| match group {
            SrcGroup::State(_) => SrcState::default().into(),
            SrcGroup::Paged(g) => {
                let block = m.groups()[id.index()].block_tokens.get();
                let count = usize::try_from(tokens.div_ceil(block)).expect("few");
                let ids: Vec<BlockId> = g.table.iter().take(count).collect();
                let table = if is_ring(m, id) { g.table.clone() } else { BlockTable::new(0, &ids) };
                SrcPaged { table, held: g.held, tail: g.tail }.into()
            }
        };
        (0u32..).map(GroupId::new).zip(&self.request.src).map(of).collect()
    }

    fn paged_items(&self) -> Vec<ItemId> {
        self.p.manifest.spec().iter().filter(|(_, item)| item.as_paged().is_some()).map(|(id, _)| id).collect()
    }

    fn write(&self, place: &Place) {
        self.p.memory[place.rank][place.region].write(place.offset, &place.bytes).expect("inside the region");
    }
}

fn is_ring(m: &Manifest, group: GroupId) -> bool {
    use kvferry_geometry::spec::Retention::Ring;
    let mut items = m.groups()[group.index()].items.iter().filter_map(|i| m.spec().get(*i)?.as_paged());
    items.any(|item| matches!(item.retention, Ring(_)))
}

fn extract(places: &mut Vec<Place>, what: impl Fn(&Place) -> bool) -> Vec<Place> {
    let (out, rest) = std::mem::take(places).into_iter().partition(what);
    *places = rest;
    out
}

/// Everything that the producer computes.
fn source(transfer: &Transfer<'_>, computed: &Memory) -> Vec<Place> {
    let (m, mut places) = (transfer.src, Vec::new());
    for (item, described) in m.spec().items().iter().enumerate() {
        let (listed, paged) = (transfer.src_listed(item).expect("a table"), described.as_paged().is_some());
        for rank in 0..m.ranks().len() {
            walk(m, rank, item, listed, |cell| {
                let bytes = computed.bytes(rank, cell.region, cell.offset, cell.width).expect("inside the region");
                let (region, offset, bytes) = (cell.region, cell.offset, bytes.to_vec());
                places.push(Place { last: paged.then_some(cell.last), rank, region, offset, bytes });
            });
        }
    }
    places
}

/// What the consumer's memory is afterwards where something happens to it. All is held exactly, so that what moves has a pattern.
fn moved(transfer: &Transfer<'_>) -> Vec<Place> {
    let (m, mut places) = (transfer.dst, Vec::new());
    for (item, described) in m.spec().items().iter().enumerate() {
        let fates = transfer.fates(item).expect("a table");
        let (listed, paged) = (transfer.dst_listed(item).expect("a table"), described.as_paged().is_some());
        for rank in 0..m.ranks().len() {
            walk(m, rank, item, listed, |cell| {
                let mut bytes = vec![0; usize::try_from(cell.width).expect("small")];
                match fates.of(&cell) {
                    Fate::Untouched => return,
                    Fate::Zeroed => {}
                    Fate::Moved => Stamp::new(cell.item, cell.component).write(cell.coordinate, cell.byte, &mut bytes),
                }
                let (region, offset) = (cell.region, cell.offset);
                places.push(Place { last: paged.then_some(cell.last), rank, region, offset, bytes });
            });
        }
    }
    places
}

/// Serves a request in every mode, and compares what is told of it.
///
/// # Panics
/// Where a mode fails, or differs from the others.
pub async fn in_every_mode(src: &Arc<Manifest>, dst: &Arc<Manifest>, ask: Ask) -> Delivered {
    let asked = Asked::start(src, dst, ask).await;
    // Which of several that hold the same are taken is each request's own.
    let told = |d: &Delivered| {
        let mut by_rank: BTreeMap<RankId, u64> = BTreeMap::new();
        d.report().pairs.iter().for_each(|p| *by_rank.entry(p.dst).or_default() += p.bytes.get());
        by_rank
    };
    let pulled = asked.serve(By::Pull).await;
    for by in [By::Push, By::Stream(24)] {
        let pushed = asked.serve(by).await;
        assert_eq!(told(&pushed), told(&pulled), "{by:?}");
        assert_eq!(pushed.report().zeroed, pulled.report().zeroed, "{by:?}");
        assert_eq!(pushed.report().compared, pulled.report().compared, "{by:?}");
    }
    asked.stop().await;
    pulled
}
