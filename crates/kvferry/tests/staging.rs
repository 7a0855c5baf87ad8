//! Two engines of this process that stage what is read, at either end: the same bytes, permuted on threads of the workers; and
//! whose lanes are refused, measured and shown.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use kvferry::{
    Address, Assurance, BlockId, BlockTable, Bytes, ContentKey, DstPaged, EngineId, LaneStanding, OfferSpec, Owner,
    Place, Policy, PullError, PullHandle, PullSpec, Region, SrcPaged, StagingOptions, Tail, TokenRange, Tokens, Way,
    Worker, WorkerError, WorkerHandle,
};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{CacheGroup, RankManifest};
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem};
use kvferry_geometry::units::{ItemId, Name, RankId};
use kvferry_shm::ShmTransport;
use kvferry_transport::Transport;
use kvferry_transport::mem::MemNetwork;

const N: u64 = 100;
const SOON: Duration = Duration::from_secs(30);

struct Engine {
    spec: ModelSpec,
    group: CacheGroup,
    ranks: Vec<RankManifest>,
    memory: Vec<Vec<Region>>,
}

/// Two layers of 8 heads of 64 bytes, blocks of 16 tokens.
fn engine(tp: u32, style: LayoutStyle) -> Engine {
    let item = |name| Item::paged(name, PagedItem::new(8, vec![Component::new("kv", 64, "bf16")]));
    let spec = ModelSpec::new(vec![item("a"), item("b")]).unwrap();
    let items = vec![ItemId::new(0), ItemId::new(1)];
    let placed = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split).unwrap();
    let rank = |placement| {
        let layout = style.build(&spec, &placement, &[(&items, 16, 64)]).unwrap();
        RankManifest { placement, layout }
    };
    let ranks: Vec<RankManifest> = placed.into_iter().map(rank).collect();
    let region = |r: &kvferry_geometry::layout::Region| Region::zeroed(usize::try_from(r.len.get()).unwrap()).unwrap();
    let memory = ranks.iter().map(|r| r.layout.regions.iter().map(region).collect()).collect();
    let group = CacheGroup { name: Name::new("all"), items, block_tokens: Tokens::new(16) };
    Engine { spec, group, ranks, memory }
}

impl Engine {
    /// Places of the values of a request's tokens, each with its number over the whole engine.
    fn each(&self, table: &[u32], mut visit: impl FnMut(&Region, u64, u64)) {
        for (rank, (manifest, memory)) in self.ranks.iter().zip(&self.memory).enumerate() {
            for (i, view) in manifest.layout.views.iter().enumerate() {
                let view = view.as_ref().unwrap().as_paged().unwrap();
                let heads = manifest.placement[i].as_ref().unwrap().as_paged().unwrap().heads;
                let c = &view.components[0];
                for t in 0..N {
                    let block = u64::from(table[usize::try_from(t / 16).unwrap()]);
                    for h in heads.start()..heads.end() {
                        let at = view.offset.get()
                            + block * view.block_stride.get()
                            + c.offset.get()
                            + u64::from(h - heads.start()) * c.head_stride.get()
                            + t % 16 * c.entry_stride.get();
                        visit(&memory[view.region.index()], at, (i as u64 * N + t) * 8 + u64::from(h));
                    }
                }
            }
            assert!(rank < 8);
        }
    }
}

fn value(number: u64, salt: u64) -> [u8; 64] {
    std::array::from_fn(|x| {
        ((number * 64 + x as u64).wrapping_mul(2654435761).wrapping_add(salt) >> 7).to_le_bytes()[0] | 1
    })
}

fn workers(
    id: &str,
    owner: &Owner,
    engine: &Engine,
    endpoint: &Endpoints,
    options: StagingOptions,
    policy: &Policy,
) -> Vec<WorkerHandle> {
    let worker = |(i, manifest): (u32, &RankManifest)| {
        let memory = engine.memory[i as usize].clone();
        let engine = EngineId::new(id).unwrap();
        Worker::builder(engine, RankId::new(i), owner.rank_socket(), manifest.clone(), memory, endpoint())
            .staging(options)
            .lanes(policy.clone())
            .spawn()
            .unwrap()
    };
    (0u32..).zip(&engine.ranks).map(worker).collect()
}

fn table(ids: &[u32]) -> BlockTable {
    BlockTable::new(0, &ids.iter().map(|&id| BlockId::new(id)).collect::<Vec<_>>())
}

#[tokio::test]
async fn workers_permute_what_they_have_staged() {
    // Room for one source's share of one request at a time.
    let options = StagingOptions { pool: Bytes::new(60 << 10), way: Way::Destination, ..StagingOptions::default() };
    let places = staged(StagingOptions::default(), options).await;
    assert!(places.iter().all(|p| *p == Place::Destination), "{places:?}");
}

#[tokio::test]
async fn workers_gather_what_others_read() {
    let consumer = StagingOptions { way: Way::Source, ..StagingOptions::default() };
    // Room for all, for one at a time, and for none.
    for (pool, gathered) in [(1 << 20, 12..13), (60 << 10, 2..13), (4 << 10, 0..1)] {
        let places = staged(StagingOptions { pool: Bytes::new(pool), ..StagingOptions::default() }, consumer).await;
        assert!(places.iter().all(|p| *p != Place::Destination), "{places:?}");
        let count = places.iter().filter(|p| **p == Place::Source).count();
        assert!(gathered.contains(&count), "{count} of {} with a pool of {pool}", places.len());
    }
}

/// Makes endpoints that reach each other.
type Endpoints = Box<dyn Fn() -> Box<dyn Transport>>;

fn mem() -> Endpoints {
    let network = MemNetwork::new(11);
    Box::new(move || Box::new(network.endpoint().unwrap()))
}

fn shm() -> Endpoints {
    Box::new(|| Box::new(ShmTransport::new(kvferry_shm::Config::default()).unwrap()))
}

/// Two engines that are ready: two ranks with heads outside, and one with heads inside.
struct Met {
    p: Engine,
    d: Engine,
    owners: [Owner; 2],
    handles: Vec<WorkerHandle>,
}

async fn meet(producer: StagingOptions, consumer: StagingOptions, policy: &Policy, endpoint: &Endpoints) -> Met {
    let (p, d) = (engine(2, LayoutStyle::HND), engine(1, LayoutStyle::NHD));
    let owner = |id, e: &Engine, ranks| {
        Owner::builder(EngineId::new(id).unwrap(), e.spec.clone(), vec![e.group.clone()], ranks)
            .listen(Address::loopback(0))
            .start()
    };
    let owners = [owner("p", &p, 2).await.unwrap(), owner("d", &d, 1).await.unwrap()];
    let mut handles = workers("p", &owners[0], &p, endpoint, producer, &Policy::default());
    handles.extend(workers("d", &owners[1], &d, endpoint, consumer, policy));
    for owner in &owners {
        owner.ready(SOON).await.unwrap();
    }
    Met { p, d, owners, handles }
}

impl Met {
    /// Begins to pull 100 tokens.
    async fn pull(&self, src: &[u32], dst: &[u32]) -> PullHandle {
        let content_key = ContentKey::from_bytes([9; 32]);
        let held = TokenRange::new(Tokens::ZERO, Tokens::new(N));
        let group = SrcPaged { table: table(src), held, tail: Tail::Exact }.into();
        let reference = self.owners[0].offer(OfferSpec::new(vec![group], content_key)).await.unwrap();
        let groups = vec![DstPaged { table: table(dst), cached: Tokens::ZERO }.into()];
        let mut spec = PullSpec::new(Tokens::new(N), groups, content_key);
        spec.assurance = Assurance::Full;
        self.owners[1].pull(reference, spec).await.unwrap()
    }

    async fn part(self) {
        for owner in self.owners {
            owner.shutdown().await;
        }
        for handle in self.handles {
            handle.join().unwrap();
        }
    }
}

/// A lane that isn't allowed carries nothing, and the pull says why, again and again; one that is is measured where that was asked
/// for, by scratch memory that no peer takes for staging memory. All can be seen at the worker, also after its end.
#[tokio::test]
async fn lanes_are_refused_measured_and_shown() {
    let names = |names: &[&str], min| Policy::new(names.iter().copied(), min).unwrap();
    for (policy, reason) in [
        (Policy::default(), None),
        (names(&["in-process", "shm", "cma"], Some(1)), None),
        (names(&["rdma"], None), Some("requires rdma; the lane is")),
        (names(&[], Some(u64::MAX)), Some("measured")),
    ] {
        for (endpoint, backend, kinds) in [(mem(), "mem", &["in-process"][..]), (shm(), "shm", &["shm", "cma"])] {
            let gather = StagingOptions { way: Way::Source, ..StagingOptions::default() };
            let met = meet(StagingOptions::default(), gather, &policy, &endpoint).await;
            let board = met.handles[2].lanes();
            assert!(board.snapshot().is_empty());
            for dst in [60, 50] {
                let dst: Vec<u32> = (0..7).map(|k| dst - k).collect();
                match (met.pull(&[1, 2, 3, 4, 5, 6, 7], &dst).await.await, reason) {
                    (Ok(delivered), None) => {
                        for pair in &delivered.report().pairs {
                            assert!(kinds.iter().any(|kind| pair.lane.starts_with(kind)), "{pair:?}");
                            assert_eq!(pair.place, Place::Direct);
                        }
                    }
                    (Err(PullError::Failed(failed)), Some(reason)) => {
                        let (_, fault) = &failed.report.faults[0];
                        assert!(fault.to_string().starts_with("connect: source rank"), "{fault}");
                        assert!(fault.text.contains(reason), "{fault}");
                    }
                    other => panic!("{other:?}"),
                }
            }
            let lanes = board.snapshot();
            met.part().await;
            assert_eq!(board.snapshot().len(), 2, "what was seen last");
            let ranks: Vec<_> = lanes.iter().map(|l| (l.engine.as_str(), l.rank.get(), l.backend)).collect();
            assert_eq!(ranks, [("p", 0, backend), ("p", 1, backend)]);
            for lane in lanes {
                // The pulls fail with the first lane that is refused; the other may still be made or measured then.
                let under_way = matches!(lane.standing, LaneStanding::Connecting | LaneStanding::Probing);
                if reason.is_some() && under_way {
                    continue;
                }
                match (&lane.standing, reason) {
                    (LaneStanding::Up, None) => {}
                    (LaneStanding::Refused(why), Some(reason)) if why.contains(reason) => {}
                    _ => panic!("{lane:?}"),
                }
                assert!(kinds.contains(&lane.lane.kind.name()), "{lane:?}");
                assert_eq!(lane.lane.measured.is_some(), policy.min_bytes_per_second().is_some(), "{lane:?}");
            }
        }
    }
}

/// Six requests at a time from two ranks to one, each of which is delivered; gives where their pairs were staged.
async fn staged(producer: StagingOptions, consumer: StagingOptions) -> Vec<Place> {
    let met = meet(producer, consumer, &Policy::default(), &mem()).await;
    let requests: Vec<(Vec<u32>, Vec<u32>)> =
        (0..6).map(|i| ((0..7).map(|k| k * 6 + i).collect(), (0..7).map(|k| 60 - i - k * 6).collect())).collect();
    let mut pulls = Vec::new();
    for (salt, (src, dst)) in (0u64..).zip(&requests) {
        met.p.each(src, |region, at, number| region.write(at, &value(number, salt)).unwrap());
        pulls.push(met.pull(src, dst).await);
    }
    let mut places = Vec::new();
    for (salt, (pull, (_, dst))) in (0u64..).zip(pulls.into_iter().zip(&requests)) {
        let delivered = pull.await.unwrap();
        places.extend(delivered.report().pairs.iter().map(|p| p.place));
        assert_eq!(delivered.report().bytes(), Bytes::new(N * 2 * 8 * 64));
        assert_eq!(delivered.report().groups[0].complete, (0, 6));
        met.d.each(dst, |region, at, number| {
            let mut got = [0; 64];
            region.read(at, &mut got).unwrap();
            assert_eq!(got, value(number, salt), "value {number} of request {salt}");
        });
    }
    assert_eq!(met.owners[1].quarantined().await.unwrap(), 0);
    met.part().await;
    places
}

#[tokio::test]
async fn a_worker_that_cannot_stage_says_so() {
    let network = MemNetwork::new(12);
    let e = engine(1, LayoutStyle::HND);
    let owner =
        Owner::builder(EngineId::new("e").unwrap(), e.spec.clone(), vec![e.group.clone()], 1).start().await.unwrap();
    for pool in [0, 100] {
        let options = StagingOptions { way: Way::Destination, pool: Bytes::new(pool), ..StagingOptions::default() };
        let transport = Box::new(network.endpoint().unwrap());
        let (id, rank) = (EngineId::new("e").unwrap(), RankId::new(0));
        let worker = Worker::builder(id, rank, owner.rank_socket(), e.ranks[0].clone(), e.memory[0].clone(), transport);
        let error = worker.staging(options).connect().unwrap_err();
        assert!(
            matches!(&error, WorkerError::Staging(_)) && error.to_string().contains("give it at least 4096 B"),
            "{error}"
        );
    }
}
