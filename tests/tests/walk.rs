//! The walk, from a registered cache to verified bytes, as one test that can be read from top to bottom; and what
//! happens where it must not go on.
//!
//! Two engines of different shapes live in one process: each rank is a thread with an endpoint of the in-memory transport,
//! owners meet over TCP on loopback, ranks join over Unix sockets. The prefill engine's memory is a pattern of logical
//! coordinates, and the slow oracle's walk says what every byte of the decode engine must be afterwards.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::sync::Arc;
use std::time::Duration;

use kvferry::{
    Address, Assurance, BlockTable, Closing, ContentKey, DstGroup, DstPaged, EngineId, FailureCause, OfferSpec, Owner,
    OwnerEvent, PullError, PullSpec, RankId, ReadyError, Reference, Region, SrcPaged, StartError, Tail, TokenRange,
    Tokens, Worker, WorkerHandle,
};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::Request;
use kvferry_geometry::units::BlockId;
use kvferry_oracle::{Memory, Transfer, fill_source, walk};
use kvferry_proto::peer::BindRefusal;
use kvferry_proto::rank::Stage;
use kvferry_tests::by_hand::{Engine, kv};
use kvferry_transport::mem::{MemFaults, MemNetwork};
use kvferry_transport::{EndpointId, Transport};

const SECOND: Duration = Duration::from_secs(1);
const TOKENS: u64 = 37;
const CACHED: u64 = 5;
/// Block ids, scattered on purpose.
const SRC_BLOCKS: [u32; 3] = [9, 2, 5];
const DST_BLOCKS: [u32; 5] = [30, 7, 8, 1, 19];

/// Four ranks, heads outside tokens, blocks of 16.
fn prefill_shape() -> Engine {
    Engine::new(vec![kv("layer.0", 4, 32), kv("layer.1", 4, 32)], 4).blocks(16, 12)
}

/// Two ranks, tokens outside heads, blocks of 8.
fn decode_shape() -> Engine {
    Engine::new(vec![kv("layer.0", 4, 32), kv("layer.1", 4, 32)], 2).blocks(8, 40).style(LayoutStyle::NHD)
}

/// The same with blocks for so many pulls at once, five for each.
fn roomy_shape(pulls: u32) -> Engine {
    decode_shape().blocks(8, 40 + 5 * pulls)
}

/// The blocks of pull `n` of a roomy engine: they are lent to one pull at a time.
fn blocks_of(n: u32) -> [u32; 5] {
    [3, 0, 4, 1, 2].map(|i| 40 + 5 * n + i)
}

/// One engine in this process.
struct Running {
    owner: Owner,
    workers: Vec<WorkerHandle>,
    memory: Vec<Vec<Region>>,
    endpoints: Vec<EndpointId>,
    manifest: Arc<Manifest>,
}

impl Running {
    async fn start(id: &str, shape: &Engine, network: &MemNetwork, identity: &str) -> Self {
        let manifest = shape.manifest();
        let owner = Owner::builder(
            EngineId::new(id).unwrap(),
            manifest.spec().clone(),
            manifest.groups().to_vec(),
            u32::try_from(manifest.ranks().len()).unwrap(),
        )
        .model_identity(identity)
        .listen(Address::loopback(0))
        .grace(SECOND / 2)
        .start()
        .await
        .unwrap();
        let (mut workers, mut memory, mut endpoints) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, description) in (0u32..).zip(manifest.ranks()) {
            // Step 1: the engine has described its tensors; step 2: their memory is registered.
            let regions: Vec<Region> = description.layout.regions.iter().map(memory_of).collect();
            let transport = network.endpoint().unwrap();
            endpoints.push(transport.endpoint());
            // Step 3: ranks join their owner.
            let worker = Worker::builder(
                owner.engine().clone(),
                RankId::new(rank),
                owner.rank_socket(),
                description.clone(),
                regions.clone(),
                Box::new(transport),
            );
            workers.push(worker.spawn().unwrap());
            memory.push(regions);
        }
        let joined = owner.ready(20 * SECOND).await.unwrap();
        assert_eq!(joined.cache().digest(), manifest.digest());
        Self { owner, workers, memory, endpoints, manifest }
    }

    fn load(&self, memory: &Memory) {
        for (rank, regions) in self.memory.iter().zip(&memory.ranks) {
            for (region, bytes) in rank.iter().zip(regions) {
                region.write(0, bytes).unwrap();
            }
        }
    }

    fn store(&self) -> Memory {
        let rank = |regions: &Vec<Region>| regions.iter().map(|r| r.to_vec().unwrap()).collect();
        Memory { ranks: self.memory.iter().map(rank).collect() }
    }

    async fn stop(self) {
        self.owner.shutdown().await;
        for worker in self.workers {
            worker.join().unwrap();
        }
    }
}

/// Both engines, the producer's memory filled, the consumer's with a background.
struct World {
    network: MemNetwork,
    p: Running,
    d: Running,
}

impl World {
    async fn start() -> Self {
        Self::with_identities("model@1", "model@1").await
    }

    async fn with_identities(p: &str, d: &str) -> Self {
        Self::with(&decode_shape(), p, d).await
    }

    async fn roomy(pulls: u32) -> Self {
        Self::with(&roomy_shape(pulls), "model@1", "model@1").await
    }

    async fn with(decode: &Engine, p: &str, d: &str) -> Self {
        let network = MemNetwork::new(7);
        let p = Running::start("prefill", &prefill_shape(), &network, p).await;
        let d = Running::start("decode", decode, &network, d).await;
        p.load(&fill_source(&transfer(&p.manifest, &d.manifest)).unwrap());
        d.load(&Memory::background(&d.manifest));
        Self { network, p, d }
    }

    async fn pull(&self, reference: &Reference, spec: PullSpec) -> Result<kvferry::Delivered, PullError> {
        tokio::time::timeout(30 * SECOND, self.d.owner.pull(reference.clone(), spec).await.unwrap())
            .await
            .expect("every pull ends by its deadline")
    }

    async fn stop(self) {
        self.p.stop().await;
        self.d.stop().await;
    }
}

fn memory_of(region: &kvferry_geometry::layout::Region) -> Region {
    Region::zeroed(usize::try_from(region.len.get()).unwrap()).unwrap()
}

fn table(ids: &[u32]) -> BlockTable {
    BlockTable::new(0, &ids.iter().map(|&id| BlockId::new(id)).collect::<Vec<_>>())
}

fn key() -> ContentKey {
    ContentKey::of(&(0u32..37).collect::<Vec<_>>(), "", &[])
}

fn offer() -> OfferSpec {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    OfferSpec {
        groups: vec![SrcPaged { table: table(&SRC_BLOCKS), held, tail: Tail::Exact }.into()],
        content_key: key(),
    }
}

fn wanted(ids: &[u32], cached: u64) -> DstGroup {
    DstPaged { table: table(ids), cached: Tokens::new(cached) }.into()
}

fn wish(assurance: Assurance) -> PullSpec {
    PullSpec {
        tokens: Tokens::new(TOKENS),
        groups: vec![wanted(&DST_BLOCKS, CACHED)],
        content_key: key(),
        assurance,
        deadline: 10 * SECOND,
    }
}

/// As [`wish`], into the blocks of pull `n`.
fn wish_into(n: u32, assurance: Assurance) -> PullSpec {
    PullSpec { groups: vec![wanted(&blocks_of(n), CACHED)], ..wish(assurance) }
}

fn transfer<'m>(src: &'m Manifest, dst: &'m Manifest) -> Transfer<'m> {
    let request = Request { tokens: Tokens::new(TOKENS), src: offer().groups, dst: wish(Assurance::Full).groups };
    Transfer::of(src, dst, &request)
}

/// What the consumer's memory must be: the background, with the moved tokens' pattern, and zeros after them.
fn expected(p: &Manifest, d: &Manifest) -> Memory {
    expected_in(p, d, &[DST_BLOCKS])
}

/// The same after several pulls of the prompt into blocks of their own.
fn expected_in(p: &Manifest, d: &Manifest, pulls: &[[u32; 5]]) -> Memory {
    let mut memory = Memory::background(d);
    let mut transfer = transfer(p, d);
    let mut places = Vec::new();
    for blocks in pulls {
        transfer.dst_tables[0].table.blocks = blocks.to_vec();
        for rank in 0..d.ranks().len() {
            for (item, described) in d.spec().items().iter().enumerate() {
                walk(d, rank, item, transfer.dst_listed(item).unwrap(), |cell| {
                    let stamp = kvferry_oracle::Stamp::new(&described.name, cell.component);
                    places.push((rank, cell.region, cell.offset, cell.width, cell.coordinate, stamp));
                });
            }
        }
    }
    for (rank, region, offset, width, coordinate, stamp) in places {
        let bytes = memory.bytes_mut(rank, region, offset, width).unwrap();
        if coordinate.token >= TOKENS {
            bytes.fill(0);
        } else if coordinate.token >= CACHED {
            stamp.write(coordinate, 0, bytes);
        }
    }
    memory
}

fn cause(result: Result<kvferry::Delivered, PullError>) -> FailureCause {
    match result {
        Err(PullError::Failed(failed)) => failed.cause,
        other => panic!("it must fail, and say why: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_walk() {
    // Steps 1 to 3: two engines, six ranks, described, registered and joined.
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();

    // Step 7, the producer's half: blocks and a content key become a reference, which a router carries as text.
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let carried: Reference = reference.to_string().parse().unwrap();
    assert_eq!(carried, reference);

    // Steps 4 to 6 on first contact (owners meet, caches are compared, peers are named), then 7 (bind), 8 (which bytes), 9
    // (bounds), 10 (they move), 11 (both sides digest them), 12 (one release: held), 13 (the engine is told).
    let delivered = world.pull(&carried, wish(Assurance::Full)).await.unwrap();

    // Who read how much from whom: each decode rank has two heads, each prefill rank one.
    let report = delivered.report();
    let pairs: Vec<_> = report.pairs.iter().map(|p| (p.dst.get(), p.src.get(), p.bytes.get())).collect();
    let each = (TOKENS - CACHED) * 2 * 2 * 32;
    assert_eq!(pairs, [(0, 0, each), (0, 1, each), (1, 2, each), (1, 3, each)]);
    assert_eq!(delivered.assurance(), Assurance::Full);
    assert_eq!(report.compared, report.bytes());
    assert_eq!(report.zeroed.get(), (40 - TOKENS) * 4 * 2 * 2 * 32);
    assert!(report.pairs.iter().all(|p| p.rows > 0 && p.descriptors_after <= p.descriptors_before));

    // Every byte of the decode engine is what it would have computed itself, or what it was.
    assert!(world.d.store() == expected(&world.p.manifest, &world.d.manifest));

    // The producer has its blocks again, and the lease never answers *held* again.
    let event = events.next().await.unwrap();
    assert_eq!(event, OwnerEvent::Released { lease: reference.lease(), how: Closing::Read });
    let again = world.pull(&reference, wish(Assurance::Full)).await;
    assert_eq!(cause(again), FailureCause::Refused(BindRefusal::UnknownLease));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_pulls_at_a_time_each_end_once() {
    let world = World::roomy(20).await;
    let mut handles = Vec::new();
    for i in 0..20 {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let assurance = if i % 2 == 0 { Assurance::Full } else { Assurance::Fenced };
        handles.push(world.d.owner.pull(reference, wish_into(i, assurance)).await.unwrap());
    }
    for handle in handles {
        let delivered = handle.await.unwrap();
        assert_eq!(delivered.report().pairs.len(), 4);
    }
    let all: Vec<[u32; 5]> = (0..20).map(blocks_of).collect();
    assert!(world.d.store() == expected_in(&world.p.manifest, &world.d.manifest, &all));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_hit_reads_nothing_and_releases() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let mut all = wish(Assurance::Full);
    all.groups = vec![wanted(&DST_BLOCKS, TOKENS)];
    let delivered = world.pull(&reference, all).await.unwrap();
    assert_eq!((delivered.report().bytes().get(), delivered.report().zeroed.get()), (0, 0));
    assert!(world.d.store() == Memory::background(&world.d.manifest), "nothing was touched");
    assert!(matches!(events.next().await, Some(OwnerEvent::Released { how: Closing::Read, .. })));
    world.stop().await;
}

/// FR-07: nothing that is refused touches a byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_not_be_read_is_refused_before_a_byte_moves() {
    let world = World::start().await;
    let reference = world.p.owner.offer(offer()).await.unwrap();

    let mut other_content = wish(Assurance::Full);
    other_content.content_key = ContentKey::of(&[1, 2, 3], "", &[]);
    let refused = world.pull(&reference, other_content).await;
    assert_eq!(cause(refused), FailureCause::Refused(BindRefusal::WrongContent));

    // Cases of the table: a lease that never was, a block beyond the end, a block twice, too little room.
    let text = reference.to_string();
    let unknown: Reference = text.replacen(&text[9..41], &"0".repeat(32), 1).parse().unwrap();
    let refused = world.pull(&unknown, wish(Assurance::Full)).await;
    assert_eq!(cause(refused), FailureCause::Refused(BindRefusal::UnknownLease));

    let stale: Reference = text.replacen(&text[42..74], &"0".repeat(32), 1).parse().unwrap();
    let refused = world.pull(&stale, wish(Assurance::Full)).await;
    assert!(matches!(cause(refused), FailureCause::StaleEpoch { .. }));

    let sampled = world.pull(&reference, wish(Assurance::Sampled)).await;
    assert!(matches!(cause(sampled), FailureCause::NotAssured(_)));

    assert!(world.d.store() == Memory::background(&world.d.manifest), "nothing was touched");
    // A refused bind leaves the lease as it was.
    assert!(world.pull(&reference, wish(Assurance::Full)).await.is_ok());

    for ids in [vec![30, 7, 8, 1, 40], vec![30, 7, 8, 1, 30], vec![30, 7, 8, 1]] {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let mut wrong = wish(Assurance::Full);
        wrong.groups = vec![wanted(&ids, CACHED)];
        let refused = world.pull(&reference, wrong).await;
        assert!(matches!(cause(refused), FailureCause::Request(_)), "{ids:?}");
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_models_do_not_talk_and_both_values_are_named() {
    let world = World::with_identities("model@1", "model@2").await;
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let refused = cause(world.pull(&reference, wish(Assurance::Full)).await);
    let FailureCause::Handshake { reasons, .. } = &refused else { panic!("{refused}") };
    assert!(reasons.iter().any(|r| r.contains("model@1") && r.contains("model@2")), "{reasons:?}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_taken_back_while_it_is_read_is_stale() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    // The decode ranks' reads end late.
    for endpoint in &world.d.endpoints {
        let late = MemFaults { completion_delay: SECOND / 2..SECOND / 2 + SECOND / 100, ..MemFaults::default() };
        assert!(world.network.set_faults(*endpoint, late));
    }
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference.clone(), wish(Assurance::Fenced)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    assert!(world.p.owner.withdraw(reference.lease()).await.unwrap());
    assert_eq!(cause(handle.await), FailureCause::Stale);
    assert!(!world.p.owner.withdraw(reference.lease()).await.unwrap(), "it is over");
    assert!(matches!(events.next().await, Some(OwnerEvent::Released { how: Closing::Withdrawn, .. })));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_bytes_are_found_and_named() {
    let world = World::start().await;
    for endpoint in &world.d.endpoints {
        let late = MemFaults { completion_delay: SECOND / 2..SECOND / 2 + SECOND / 100, ..MemFaults::default() };
        assert!(world.network.set_faults(*endpoint, late));
    }
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference, wish(Assurance::Full)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    // After the read, before the comparison: one byte of prefill rank 3, in the block of tokens 16 to 31.
    let view = world.p.manifest.ranks()[3].layout.views[1].as_ref().unwrap();
    let at = view.offset().get() + 2 * view.stride().get();
    world.p.memory[3][view.region().index()].fill(at, 1, 0xff).unwrap();
    let Err(PullError::Failed(failed)) = handle.await else { panic!("one byte differs") };
    // The other rank may have been told to stop.
    let differs = failed.report.faults.iter().filter(|(_, fault)| fault.stage == Stage::Compare);
    let [(rank, fault)] = differs.collect::<Vec<_>>()[..] else { panic!("one rank read it: {failed}") };
    assert_eq!(rank.get(), 1);
    let bad: Vec<_> = fault.bad.iter().map(|b| (b.src.get(), b.item.as_str().to_owned(), b.block.get())).collect();
    // Token 16 is in decode block 8, the third of its table.
    assert_eq!(bad, [(3, "layer.1".to_owned(), 8)]);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_producer_rank_fails_the_request_once_and_names_it() {
    let world = World::start().await;
    let reference = world.p.owner.offer(offer()).await.unwrap();
    assert!(world.network.kill(world.p.endpoints[2]));
    let Err(PullError::Failed(failed)) = world.pull(&reference, wish(Assurance::Full)).await else {
        panic!("a source is gone")
    };
    // The other rank was told to stop; whether it had read by then is a matter of time.
    assert_eq!(failed.cause, FailureCause::Ranks { failed: 1, ranks: 2 }, "{failed}");
    let (_, fault) = failed.report.faults.iter().find(|(rank, _)| rank.get() == 1).unwrap();
    assert!(fault.text.contains("source rank 2"), "{failed}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_that_stops_ends_its_requests() {
    let World { network, p, d } = World::start().await;
    for endpoint in &d.endpoints {
        let slow = MemFaults { start_delay: 5 * SECOND..6 * SECOND, ..MemFaults::default() };
        assert!(network.set_faults(*endpoint, slow));
    }
    let reference = p.owner.offer(offer()).await.unwrap();
    let handle = d.owner.pull(reference, wish(Assurance::Full)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    p.stop().await;
    let Err(PullError::Failed(failed)) = handle.await else { panic!("its producer is gone") };
    assert!(failed.report.took < 4 * SECOND, "{failed}");
    d.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_rank_that_dies_ends_the_request_and_is_in_doubt() {
    let World { network, p, mut d } = World::start().await;
    for endpoint in &d.endpoints {
        let slow = MemFaults { start_delay: 5 * SECOND..6 * SECOND, ..MemFaults::default() };
        assert!(network.set_faults(*endpoint, slow));
    }
    let mut events = d.owner.take_events().unwrap();
    let reference = p.owner.offer(offer()).await.unwrap();
    let handle = d.owner.pull(reference, wish(Assurance::Full)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    drop(d.workers.remove(0));
    let Err(PullError::Failed(failed)) = handle.await else { panic!("a rank is gone") };
    assert!(failed.report.in_doubt.contains(&RankId::new(0)), "{failed}");
    assert!(matches!(events.next().await, Some(OwnerEvent::RankLost { rank, .. }) if rank.get() == 0));
    p.stop().await;
    d.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_and_cancelling_end_a_pull_and_free_the_lease() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    for endpoint in &world.d.endpoints {
        let slow = MemFaults { start_delay: 60 * SECOND..61 * SECOND, ..MemFaults::default() };
        assert!(world.network.set_faults(*endpoint, slow));
    }
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let mut short = wish(Assurance::Fenced);
    short.deadline = SECOND / 2;
    let late = cause(world.pull(&reference, short).await);
    assert!(matches!(late, FailureCause::Deadline { .. }), "{late}");
    assert!(matches!(events.next().await, Some(OwnerEvent::Released { how: Closing::Abandoned, .. })));

    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference, wish(Assurance::Fenced)).await.unwrap();
    handle.cancel().await.unwrap();
    assert_eq!(cause(handle.await), FailureCause::Cancelled);

    // A dropped handle gives up, too. The cancelled one's lease may never have been bound.
    let reference = world.p.owner.offer(offer()).await.unwrap();
    let handle = world.d.owner.pull(reference.clone(), wish(Assurance::Fenced)).await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
    drop(handle);
    loop {
        match tokio::time::timeout(10 * SECOND, events.next()).await.unwrap() {
            Some(OwnerEvent::Released { lease, how: Closing::Abandoned }) if lease == reference.lease() => break,
            Some(_) => {}
            None => panic!("the lease was not released"),
        }
    }
    world.stop().await;
}

/// HS-01: ranks that disagree on the engine id fail at start-up; so does an engine whose rank is missing, naming it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_01_ranks_of_another_engine_are_refused_at_start() {
    let network = MemNetwork::new(7);
    let manifest = decode_shape().manifest();
    let start = || async {
        let groups = manifest.groups().to_vec();
        let id = EngineId::new("decode").unwrap();
        Owner::builder(id, manifest.spec().clone(), groups, 2).start().await.unwrap()
    };
    let worker = |owner: &Owner, engine: &str, rank: u32| {
        let description = manifest.rank(RankId::new(rank)).unwrap().clone();
        let regions = description.layout.regions.iter().map(memory_of);
        let transport = Box::new(network.endpoint().unwrap());
        let engine = EngineId::new(engine).unwrap();
        let regions = regions.collect();
        Worker::builder(engine, RankId::new(rank), owner.rank_socket(), description, regions, transport)
            .spawn()
            .unwrap()
    };
    let owner = start().await;
    let own = worker(&owner, "decode", 0);
    let missing = owner.ready(SECOND / 2).await.unwrap_err();
    assert_eq!(missing, ReadyError::Timeout { missing: vec![RankId::new(1)], after: SECOND / 2 });
    let foreign = worker(&owner, "other", 1);
    let refused = owner.ready(10 * SECOND).await.unwrap_err().to_string();
    assert!(refused.contains("decode") && refused.contains("other"), "{refused}");
    let told = foreign.join().unwrap_err().to_string();
    assert!(told.contains("decode") && told.contains("other"), "{told}");
    owner.shutdown().await;
    own.join().unwrap();
}

/// HS-02, HS-04: what can't be listened on or reached is an error at start.
#[tokio::test]
async fn hs_02_hs_04_addresses_are_settled_at_start() {
    let manifest = decode_shape().manifest();
    let builder = || {
        let groups = manifest.groups().to_vec();
        Owner::builder(EngineId::new("decode").unwrap(), manifest.spec().clone(), groups, 2)
    };
    let exposed = builder().listen("tcp:0.0.0.0:0".parse().unwrap()).start().await;
    assert!(matches!(exposed, Err(StartError::Exposed { .. })));
    let nameless = builder().listen("tcp:0.0.0.0:0".parse().unwrap()).plaintext_beyond_loopback().start().await;
    assert!(matches!(nameless, Err(StartError::Advertise { .. })));
    let first = builder().listen(Address::loopback(0)).start().await.unwrap();
    let taken = first.address().unwrap().clone();
    assert!(taken.is_definite(), "port 0 has become the real one");
    assert!(matches!(builder().listen(taken).start().await, Err(StartError::Listen { .. })));
    let socket = first.rank_socket().to_owned();
    assert!(socket.exists());
    first.shutdown().await;
    assert!(!socket.exists(), "nothing is left behind");
}

/// HS-06: foreign traffic harms only its own connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_06_garbage_on_the_port_does_not_stop_the_owner() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let world = World::start().await;
    let Some(Address::Tcp(port)) = world.p.owner.address().cloned() else { panic!("it listens on TCP") };
    let too_long = [0xff, 0xff, 0xff, 0xff, 1, 0];
    let unknown_kind = [0, 0, 0, 0, 0x39, 0x30];
    let pickle = [4, 0, 0, 0, 16, 0, 0x80, 0x04, 0x95, 0x00];
    let other_version = [8, 0, 0, 0, 1, 0, b'k', b'v', b'f', b'y', 9, 0, 12, 0];
    let garbage: [&[u8]; 7] =
        [b"GET / HTTP/1.1\r\n\r\n", &[0x5a; 64], &too_long, &unknown_kind, &pickle, &other_version, &[1]];
    let mut idle = Vec::new();
    for bytes in garbage {
        let mut socket = tokio::net::TcpStream::connect(port).await.unwrap();
        socket.write_all(bytes).await.unwrap();
        if bytes.len() > 1 {
            // It tells its own hello, then closes, most often after telling why.
            let mut heard = Vec::new();
            tokio::time::timeout(10 * SECOND, socket.read_to_end(&mut heard)).await.expect("it closes").ok();
        } else {
            // One that says nothing more is left alone until the handshake's deadline.
            idle.push(socket);
        }
        let reference = world.p.owner.offer(offer()).await.unwrap();
        assert!(world.pull(&reference, wish(Assurance::Fenced)).await.is_ok());
    }
    world.stop().await;
}

/// More pulls than any queue has places, all reading, and then their producer goes: each ends, and the consumer's rank is
/// none the worse.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_that_is_cut_off_breaks_no_rank() {
    const PULLS: u32 = 1500;
    let world = World::roomy(PULLS).await;
    for endpoint in &world.d.endpoints {
        let slow = MemFaults { start_delay: 60 * SECOND..61 * SECOND, ..MemFaults::default() };
        assert!(world.network.set_faults(*endpoint, slow));
    }
    let mut pulls = Vec::new();
    for n in 0..PULLS {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let spec = PullSpec { deadline: 60 * SECOND, ..wish_into(n, Assurance::Fenced) };
        pulls.push(world.d.owner.pull(reference, spec).await.unwrap());
    }
    tokio::time::sleep(SECOND).await;
    let World { p, d, .. } = world;
    p.stop().await;
    let mut in_doubt = 0;
    for pull in pulls {
        let ended = tokio::time::timeout(30 * SECOND, pull).await.expect("every pull ends");
        let Err(PullError::Failed(failed)) = ended else { panic!("its producer is gone: {ended:?}") };
        assert!(matches!(failed.cause, FailureCause::Link { .. }), "{failed}");
        in_doubt += usize::from(!failed.report.in_doubt.is_empty());
    }
    println!("{in_doubt} of {PULLS} pulls ended in doubt");
    d.owner.offer(offer_of_decode()).await.expect("no rank is lost");
    d.stop().await;
}

/// What the decode engine could offer.
fn offer_of_decode() -> OfferSpec {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    OfferSpec {
        groups: vec![SrcPaged { table: table(&DST_BLOCKS), held, tail: Tail::Exact }.into()],
        content_key: key(),
    }
}

/// More pulls at once than any queue has places are all delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_pulls_is_delivered() {
    let world = World::roomy(1200).await;
    let mut pulls = Vec::new();
    for n in 0..1200 {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        let spec = PullSpec { deadline: 60 * SECOND, ..wish_into(n, Assurance::Full) };
        pulls.push(world.d.owner.pull(reference, spec).await.unwrap());
    }
    for pull in pulls {
        pull.await.unwrap();
    }
    world.stop().await;
}

/// When a shutdown returns, its ranks have been told, even where nothing runs beside the caller; every lease has ended.
#[tokio::test]
async fn a_shutdown_is_over_when_it_returns() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    for _ in 0..600 {
        world.p.owner.offer(offer()).await.unwrap();
    }
    world.stop().await;
    let mut released = 0;
    while let Some(OwnerEvent::Released { how: Closing::Withdrawn, .. }) = events.next().await {
        released += 1;
    }
    assert_eq!(released, 600);
}

/// An offer whose caller has gone away before it knew the reference is taken back.
#[tokio::test]
async fn an_offer_that_nobody_sees_is_taken_back() {
    let mut world = World::start().await;
    let mut events = world.p.owner.take_events().unwrap();
    for wait in [Duration::ZERO, SECOND / 50] {
        let unseen = async {
            // Asked for, then left alone while the owner answers, then dropped.
            let mut offered = Box::pin(world.p.owner.offer(offer()));
            let first = std::future::poll_fn(|cx| std::task::Poll::Ready(offered.as_mut().poll(cx).is_pending())).await;
            assert!(first, "the owner has not run yet");
            tokio::time::sleep(wait).await;
        };
        unseen.await;
        let event = tokio::time::timeout(5 * SECOND, events.next()).await.expect("it is taken back");
        assert!(matches!(event, Some(OwnerEvent::Released { how: Closing::Withdrawn, .. })), "{event:?}");
    }
    world.stop().await;
}

/// A start that fails leaves no socket; a socket that a killed owner has left is replaced, one in use is not.
#[tokio::test]
async fn sockets_are_left_to_nobody() {
    let dir = std::env::temp_dir().join(format!("kvferry-walk-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("peer.sock");
    let manifest = decode_shape().manifest();
    let builder = || {
        let groups = manifest.groups().to_vec();
        let ranks = u32::try_from(manifest.ranks().len()).unwrap();
        let owner = Owner::builder(EngineId::new("d").unwrap(), manifest.spec().clone(), groups, ranks);
        owner.listen(Address::Unix(path.clone())).handshake_timeout(Duration::MAX).grace(Duration::MAX)
    };
    let failed = builder().rank_socket(dir.join("no/such/directory.sock")).start().await;
    assert!(matches!(failed, Err(StartError::Listen { .. })));
    assert!(!path.exists(), "a failed start leaves nothing");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "as a killed owner leaves it");
    let owner = builder().start().await.unwrap();
    let second = builder().start().await;
    assert!(matches!(second, Err(StartError::Listen { .. })), "it is in use");
    assert!(path.exists(), "and stays so");
    let silent = std::os::unix::net::UnixStream::connect(owner.rank_socket()).unwrap();
    tokio::time::sleep(SECOND / 10).await;
    owner.withdraw(kvferry::LeaseId::new(1)).await.expect("no timeout is too long");
    owner.shutdown().await;
    drop(silent);
    assert!(!path.exists());
    std::fs::remove_dir_all(&dir).unwrap();
}
