//! Two real engines that offer, pull and end, for tests at the surface that engines use: owners on sockets or names, a thread
//! for each rank, memory with a pattern in it, and the slow oracle's answer for every byte.
//!
//! The prefill engine has four ranks with heads outside tokens in blocks of 16, the decode engine two with tokens outside heads
//! in blocks of 8: nothing lies alike on both sides. All requests are of one prompt, into blocks of their own. Engines of any other
//! shape run, too ([`Running::of`]).

use std::sync::Arc;
use std::time::Duration;

use kvferry::{
    Address, Assurance, BlockTable, ContentKey, Delivered, DstGroup, DstPaged, EngineId, FailureCause, OfferSpec,
    Owner, OwnerBuilder, OwnerEvent, OwnerEvents, PullError, PullSpec, RankId, Reference, Region, SrcPaged, Tail,
    TokenRange, Tokens, Worker, WorkerBuilder, WorkerHandle,
};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::Request;
use kvferry_geometry::units::BlockId;
use kvferry_oracle::{Memory, Stamp, Transfer, fill_source, walk};
use kvferry_transport::mem::{MemFaults, MemNetwork};
use kvferry_transport::{EndpointId, Transport};

use crate::by_hand::{Engine, kv};

/// One second.
pub const SECOND: Duration = Duration::from_secs(1);
/// The prompt's length.
pub const TOKENS: u64 = 37;
/// What the decode engine has of it already.
pub const CACHED: u64 = 5;
/// The prompt's blocks at the prefill engine, scattered on purpose.
pub const SRC_BLOCKS: [u32; 3] = [9, 2, 5];
/// Where it goes at the decode engine.
pub const DST_BLOCKS: [u32; 5] = [30, 7, 8, 1, 19];

/// Four ranks, heads outside tokens, blocks of 16.
#[must_use]
pub fn prefill_shape() -> Engine {
    Engine::new(vec![kv("layer.0", 4, 32), kv("layer.1", 4, 32)], 4).blocks(16, 12)
}

/// Two ranks, tokens outside heads, blocks of 8.
#[must_use]
pub fn decode_shape() -> Engine {
    Engine::new(vec![kv("layer.0", 4, 32), kv("layer.1", 4, 32)], 2).blocks(8, 40).style(LayoutStyle::NHD)
}

/// The same with blocks for so many pulls at once, five for each.
#[must_use]
pub fn roomy_shape(pulls: u32) -> Engine {
    decode_shape().blocks(8, 40 + 5 * pulls)
}

/// The blocks of pull `n` of a roomy engine: they are lent to one pull at a time.
#[must_use]
pub fn blocks_of(n: u32) -> [u32; 5] {
    [3, 0, 4, 1, 2].map(|i| 40 + 5 * n + i)
}

/// One engine in this process.
#[derive(Debug)]
pub struct Running {
    /// Its owner.
    pub owner: Owner,
    /// The threads of its ranks.
    pub workers: Vec<WorkerHandle>,
    /// The memory of each rank, by region.
    pub memory: Vec<Vec<Region>>,
    /// The lane of each rank.
    pub endpoints: Vec<EndpointId>,
    /// What it is.
    pub manifest: Arc<Manifest>,
}

impl Running {
    /// Starts an engine that listens on a port of this host, and waits until its ranks have joined.
    ///
    /// # Panics
    /// Where something doesn't start.
    pub async fn start(id: &str, shape: &Engine, network: &MemNetwork) -> Self {
        Self::start_as(id, shape, network, |owner| owner).await
    }

    /// The same, with an owner that is told more.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub async fn start_as(
        id: &str,
        shape: &Engine,
        network: &MemNetwork,
        told: impl FnOnce(OwnerBuilder) -> OwnerBuilder,
    ) -> Self {
        Self::of(id, shape.manifest(), network, told, |worker| worker).await
    }

    /// The same with whatever cache, and with ranks that are told more, too.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub async fn of(
        id: &str,
        manifest: Arc<Manifest>,
        network: &MemNetwork,
        told: impl FnOnce(OwnerBuilder) -> OwnerBuilder,
        each: impl Fn(WorkerBuilder) -> WorkerBuilder,
    ) -> Self {
        let owner = told(builder(id, &manifest)).start().await.expect("an owner");
        let (mut workers, mut memory, mut endpoints) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, description) in (0u32..).map(RankId::new).zip(manifest.ranks()) {
            // Step 1: the engine has described its tensors; step 2: their memory is registered.
            let regions: Vec<Region> = description.layout.regions.iter().map(memory_of).collect();
            let transport = network.endpoint().expect("an endpoint");
            endpoints.push(transport.endpoint());
            // Step 3: ranks join their owner.
            let (engine, socket) = (owner.engine().clone(), owner.rank_socket());
            let lane = Box::new(transport);
            let worker = Worker::builder(engine, rank, socket, description.clone(), regions.clone(), lane);
            workers.push(each(worker).spawn().expect("a worker"));
            memory.push(regions);
        }
        let joined = owner.ready(20 * SECOND).await.expect("all ranks join");
        assert_eq!(joined.cache().digest(), manifest.digest());
        Self { owner, workers, memory, endpoints, manifest }
    }

    /// Fills its memory.
    ///
    /// # Panics
    /// Where the memory is another engine's.
    pub fn load(&self, memory: &Memory) {
        for (rank, regions) in self.memory.iter().zip(&memory.ranks) {
            for (region, bytes) in rank.iter().zip(regions) {
                region.write(0, bytes).expect("as long as it is described");
            }
        }
    }

    /// What is in its memory.
    ///
    /// # Panics
    /// Never: it is host memory.
    #[must_use]
    pub fn store(&self) -> Memory {
        let rank = |regions: &Vec<Region>| regions.iter().map(|r| r.to_vec().expect("host memory")).collect();
        Memory { ranks: self.memory.iter().map(rank).collect() }
    }

    /// Lets its ranks read as these faults say.
    ///
    /// # Panics
    /// Where a rank is gone.
    pub fn set_faults(&self, network: &MemNetwork, faults: &MemFaults) {
        for endpoint in &self.endpoints {
            assert!(network.set_faults(*endpoint, faults.clone()), "a lane is gone");
        }
    }

    /// Where its owner listens.
    ///
    /// # Panics
    /// Where it doesn't.
    #[must_use]
    pub fn address(&self) -> Address {
        self.owner.address().expect("it listens").clone()
    }

    /// The leases that are open, as they stand in references.
    ///
    /// # Panics
    /// Where the owner was shut down.
    pub async fn open_leases(&self) -> Vec<String> {
        let snapshot = self.owner.snapshot().await.expect("the owner runs");
        snapshot.leases.into_iter().map(|l| l.lease).collect()
    }

    /// Shuts it down, and waits for its ranks.
    ///
    /// # Panics
    /// Where a rank ends otherwise than by that.
    pub async fn stop(self) {
        self.owner.shutdown().await;
        for worker in self.workers {
            worker.join().expect("it ends as it should");
        }
    }
}

/// An owner on a port of this host, not started yet.
///
/// # Panics
/// Where `id` is none.
#[must_use]
pub fn builder(id: &str, manifest: &Manifest) -> OwnerBuilder {
    let ranks = u32::try_from(manifest.ranks().len()).expect("few ranks");
    Owner::builder(EngineId::new(id).expect("an id"), manifest.spec().clone(), manifest.groups().to_vec(), ranks)
        .model_identity("model@1")
        .listen(Address::loopback(0))
        .grace(SECOND / 2)
}

/// Both engines, the producer's memory filled, the consumer's with a background.
#[derive(Debug)]
pub struct World {
    /// What their ranks read over.
    pub network: MemNetwork,
    /// The producer.
    pub p: Running,
    /// The consumer.
    pub d: Running,
}

impl World {
    /// Both, as they usually are.
    pub async fn start() -> Self {
        Self::start_as(&decode_shape(), |p| p, |d| d).await
    }

    /// With blocks for so many pulls at once.
    pub async fn roomy(pulls: u32) -> Self {
        Self::start_as(&roomy_shape(pulls), |p| p, |d| d).await
    }

    /// With a decode engine of a shape, and owners that are told more.
    pub async fn start_as(
        decode: &Engine,
        p: impl FnOnce(OwnerBuilder) -> OwnerBuilder,
        d: impl FnOnce(OwnerBuilder) -> OwnerBuilder,
    ) -> Self {
        let network = MemNetwork::new(7);
        let p = Running::start_as("prefill", &prefill_shape(), &network, p).await;
        let d = Running::start_as("decode", decode, &network, d).await;
        fill(&p, &d);
        Self { network, p, d }
    }

    /// Pulls, and waits for the end.
    ///
    /// # Errors
    /// If it fails.
    ///
    /// # Panics
    /// Where it has no end.
    pub async fn pull(&self, reference: &Reference, spec: PullSpec) -> Result<Delivered, PullError> {
        pull(&self.d, reference, spec).await
    }

    /// Lets the decode engine's reads end so late.
    pub fn late_reads(&self, late: Duration) {
        self.d.set_faults(&self.network, &ending_late(late));
    }

    /// Lets the prefill engine's writes end so late.
    pub fn late_writes(&self, late: Duration) {
        self.p.set_faults(&self.network, &ending_late(late));
    }

    /// Shuts both down.
    pub async fn stop(self) {
        self.p.stop().await;
        self.d.stop().await;
    }
}

/// Operations whose bytes have moved that end so late.
fn ending_late(late: Duration) -> MemFaults {
    MemFaults { completion_delay: late..late + SECOND / 100, ..MemFaults::default() }
}

/// Fills both engines' memory.
///
/// # Panics
/// Where they are no engines of a [`World`].
pub fn fill(p: &Running, d: &Running) {
    p.load(&fill_source(&transfer(&p.manifest, &d.manifest)).expect("a sound transfer"));
    d.load(&Memory::background(&d.manifest));
}

/// Pulls, and waits for the end.
///
/// # Errors
/// If it fails.
///
/// # Panics
/// Where it has no end.
pub async fn pull(d: &Running, reference: &Reference, spec: PullSpec) -> Result<Delivered, PullError> {
    let limit = spec.deadline.saturating_add(20 * SECOND);
    let handle = d.owner.pull(reference.clone(), spec).await.expect("the owner runs");
    tokio::time::timeout(limit, handle).await.expect("every pull ends by its deadline")
}

/// The memory of a region.
///
/// # Panics
/// Where there is none.
#[must_use]
pub fn memory_of(region: &kvferry_geometry::layout::Region) -> Region {
    Region::zeroed(usize::try_from(region.len.get()).expect("small")).expect("memory")
}

/// A block table from a sequence's beginning.
#[must_use]
pub fn table(ids: &[u32]) -> BlockTable {
    BlockTable::new(0, &ids.iter().map(|&id| BlockId::new(id)).collect::<Vec<_>>())
}

/// The prompt's.
#[must_use]
pub fn key() -> ContentKey {
    ContentKey::of(&(0u32..37).collect::<Vec<_>>(), "", &[])
}

/// The prompt's blocks at the prefill engine.
#[must_use]
pub fn offer() -> OfferSpec {
    offer_of(&SRC_BLOCKS)
}

/// The prompt in some blocks.
#[must_use]
pub fn offer_of(ids: &[u32]) -> OfferSpec {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    OfferSpec::new(vec![SrcPaged { table: table(ids), held, tail: Tail::Exact }.into()], key())
}

/// Blocks at the decode engine.
#[must_use]
pub fn wanted(ids: &[u32], cached: u64) -> DstGroup {
    DstPaged { table: table(ids), cached: Tokens::new(cached) }.into()
}

/// The prompt, into [`DST_BLOCKS`].
#[must_use]
pub fn wish(assurance: Assurance) -> PullSpec {
    let spec = PullSpec::new(Tokens::new(TOKENS), vec![wanted(&DST_BLOCKS, CACHED)], key());
    PullSpec { assurance, deadline: 10 * SECOND, ..spec }
}

/// As [`wish`], into the blocks of pull `n`.
#[must_use]
pub fn wish_into(n: u32, assurance: Assurance) -> PullSpec {
    PullSpec { groups: vec![wanted(&blocks_of(n), CACHED)], ..wish(assurance) }
}

fn transfer<'m>(src: &'m Manifest, dst: &'m Manifest) -> Transfer<'m> {
    let request = Request { tokens: Tokens::new(TOKENS), src: offer().groups, dst: wish(Assurance::Full).groups };
    Transfer::of(src, dst, &request)
}

/// What the consumer's memory must be: the background, with the moved tokens' pattern, and zeros after them.
#[must_use]
pub fn expected(p: &Manifest, d: &Manifest) -> Memory {
    expected_in(p, d, &[DST_BLOCKS])
}

/// The same after several pulls of the prompt into blocks of their own.
///
/// # Panics
/// Where these are no engines of a [`World`].
#[must_use]
pub fn expected_in(p: &Manifest, d: &Manifest, pulls: &[[u32; 5]]) -> Memory {
    let mut memory = Memory::background(d);
    let mut transfer = transfer(p, d);
    let mut places = Vec::new();
    for blocks in pulls {
        transfer.dst_tables[0].table.blocks = blocks.to_vec();
        for rank in 0..d.ranks().len() {
            for (item, described) in d.spec().items().iter().enumerate() {
                walk(d, rank, item, transfer.dst_listed(item).expect("a paged item"), |cell| {
                    let stamp = Stamp::new(&described.name, cell.component);
                    places.push((rank, cell.region, cell.offset, cell.width, cell.coordinate, stamp));
                });
            }
        }
    }
    for (rank, region, offset, width, coordinate, stamp) in places {
        let bytes = memory.bytes_mut(rank, region, offset, width).expect("inside the region");
        if coordinate.token >= TOKENS {
            bytes.fill(0);
        } else if coordinate.token >= CACHED {
            stamp.write(coordinate, 0, bytes);
        }
    }
    memory
}

/// Why a pull failed.
///
/// # Panics
/// Where it has not.
#[must_use]
pub fn cause(result: Result<Delivered, PullError>) -> FailureCause {
    match result {
        Err(PullError::Failed(failed)) => failed.cause,
        other => panic!("it must fail, and say why: {other:?}"),
    }
}

/// The next event that is not of links or ranks; `None` when the owner is shut down.
///
/// # Panics
/// Where none comes for long.
pub async fn event(events: &mut OwnerEvents) -> Option<OwnerEvent> {
    loop {
        let next = tokio::time::timeout(20 * SECOND, events.next()).await.expect("an event");
        match next {
            Some(
                OwnerEvent::Ready { .. }
                | OwnerEvent::LinkUp { .. }
                | OwnerEvent::LinkDown { .. }
                | OwnerEvent::LinkFailed { .. },
            ) => {}
            other => return other,
        }
    }
}

/// Waits until something is so.
///
/// # Panics
/// Where it isn't so in 20 seconds.
pub async fn until(what: &str, is: impl AsyncFn() -> bool) {
    let wait = async {
        while !is().await {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    tokio::time::timeout(20 * SECOND, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// Bytes of this process that are in memory.
///
/// # Panics
/// Where `/proc` doesn't tell.
#[must_use]
pub fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("a process knows itself");
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse::<i64>().ok());
    pages.expect("its second number is what is in memory") * 4096
}
