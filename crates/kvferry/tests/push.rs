//! Push between whole engines: in one process and with workers apart; while the prompt is being computed, with restarts and drops in the
//! middle; mixed with pulls; both ways. Every byte is checked.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::ops::{Deref, Range};
use std::time::Duration;

use kvferry::{
    Address, Assurance, BlockId, BlockTable, CacheGroup, CallError, Closing, ContentKey, DstPaged, Engine,
    EngineConfig, EngineId, FailureCause, ItemId, Items, Mode, ModelSpec, OfferSpec, OfferStream, Owner, OwnerEvent,
    OwnerEvents, Phase, PullError, PullHandle, PullSpec, RankId, RankManifest, ReadyPort, Reference, Region, SrcGroup,
    SrcPaged, StreamError, Tail, TokenRange, Tokens, Worker, WorkerHandle,
};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, PagedItem};
use kvferry_geometry::units::Name;
use kvferry_transport::mem::{MemFaults, MemNetwork};
use kvferry_transport::{EndpointId, Transport};

const SOON: Duration = Duration::from_secs(60);
const KEY: ContentKey = ContentKey::from_bytes([9; 32]);
/// Tokens of a prompt: six blocks of 16, and a quarter.
const N: u64 = 100;
/// Bytes of a prompt: two items of eight heads.
const BYTES: u64 = N * 2 * 8 * 64;

/// One engine: two layers of eight heads, blocks of 16 tokens.
struct Side {
    running: Running,
    ranks: Vec<RankManifest>,
    memory: Vec<Vec<Region>>,
    endpoints: Vec<EndpointId>,
    ports: Vec<ReadyPort>,
}

enum Running {
    Together(Engine),
    Apart(Owner, Vec<WorkerHandle>),
}

impl Deref for Side {
    type Target = Owner;

    fn deref(&self) -> &Owner {
        match &self.running {
            Running::Together(engine) => engine.owner(),
            Running::Apart(owner, _) => owner,
        }
    }
}

fn id(name: &str) -> EngineId {
    EngineId::new(name).unwrap()
}

/// How the owners meet, and where their ranks are.
#[derive(Clone, Copy)]
enum Setup {
    /// All in this process.
    Memory(&'static str),
    /// Owners over TCP, workers by sockets.
    Tcp,
}

async fn side(name: &str, tp: u32, style: LayoutStyle, net: &MemNetwork, setup: Setup) -> Side {
    side_with(EngineConfig::new(id(name)), tp, style, net, setup).await
}

async fn side_with(config: EngineConfig, tp: u32, style: LayoutStyle, net: &MemNetwork, setup: Setup) -> Side {
    let item = |name| Item::paged(name, PagedItem::new(8, vec![Component::new("kv", 64, "bf16")]));
    let spec = ModelSpec::new(vec![item("layer 0"), item("layer 1")]).unwrap();
    let items = vec![ItemId::new(0), ItemId::new(1)];
    let placed = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split).unwrap();
    let rank = |placement| {
        let layout = style.build(&spec, &placement, &[(&items, 16, 256)]).unwrap();
        RankManifest { placement, layout }
    };
    let ranks: Vec<RankManifest> = placed.into_iter().map(rank).collect();
    let region = |r: &kvferry_geometry::layout::Region| Region::zeroed(usize::try_from(r.len.get()).unwrap()).unwrap();
    let memory: Vec<Vec<Region>> = ranks.iter().map(|r| r.layout.regions.iter().map(region).collect()).collect();
    let groups = vec![CacheGroup { name: Name::new("all"), items, block_tokens: Tokens::new(16) }];
    let transports: Vec<_> = ranks.iter().map(|_| net.endpoint().unwrap()).collect();
    let endpoints = transports.iter().map(Transport::endpoint).collect();
    let each = ranks.iter().cloned().zip(memory.iter().cloned()).zip(transports);
    let engine = config.id.clone();
    match setup {
        Setup::Memory(at) => {
            let listen = Address::memory(&format!("push-{at}-{engine}")).unwrap();
            let mut builder = Engine::from_config(config, spec, groups).listen(listen);
            for ((manifest, memory), transport) in each {
                builder = builder.rank(manifest, memory, Box::new(transport));
            }
            let started = builder.start().await.unwrap();
            let ports = (0..tp).map(|r| started.ready_port(RankId::new(r)).unwrap()).collect();
            Side { running: Running::Together(started), ranks, memory, endpoints, ports }
        }
        Setup::Tcp => {
            let owner =
                Owner::from_config(config, spec, groups, tp).listen(Address::loopback(0)).start().await.unwrap();
            let worker = |(r, ((manifest, memory), transport))| {
                let rank = RankId::new(r);
                let worker =
                    Worker::builder(engine.clone(), rank, owner.rank_socket(), manifest, memory, Box::new(transport));
                worker.spawn().unwrap()
            };
            let workers: Vec<WorkerHandle> = (0..).zip(each).map(worker).collect();
            owner.ready(SOON).await.unwrap();
            let ports = workers.iter().map(WorkerHandle::ready_port).collect();
            Side { running: Running::Apart(owner, workers), ranks, memory, endpoints, ports }
        }
    }
}

impl Side {
    fn take_events(&mut self) -> OwnerEvents {
        match &mut self.running {
            Running::Together(engine) => engine.take_events().unwrap(),
            Running::Apart(owner, _) => owner.take_events().unwrap(),
        }
    }

    /// Places of the values of a request's tokens, each with its number over the whole engine, at one of its ranks or all.
    fn each(&self, first: u32, tokens: Range<u64>, only: Option<usize>, mut visit: impl FnMut(&Region, u64, u64)) {
        for (rank, (manifest, memory)) in self.ranks.iter().zip(&self.memory).enumerate() {
            if only.is_some_and(|only| only != rank) {
                continue;
            }
            for (i, view) in manifest.layout.views.iter().enumerate() {
                let view = view.as_ref().unwrap().as_paged().unwrap();
                let heads = manifest.placement[i].as_ref().unwrap().as_paged().unwrap().heads;
                let c = &view.components[0];
                for t in tokens.clone() {
                    let block = u64::from(table(first).iter().nth(usize::try_from(t / 16).unwrap()).unwrap().get());
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
        }
    }

    fn compute(&self, first: u32, tokens: Range<u64>, salt: u64) {
        self.each(first, tokens, None, |region, at, number| region.write(at, &value(number, salt)).unwrap());
    }

    fn check(&self, first: u32, salt: u64) {
        self.each(first, 0..N, None, |region, at, number| {
            let mut got = [0; 64];
            region.read(at, &mut got).unwrap();
            assert_eq!(got, value(number, salt), "value {number} of computation {salt}");
        });
    }

    async fn end(self) {
        match self.running {
            Running::Together(engine) => engine.shutdown().await,
            Running::Apart(owner, workers) => {
                owner.shutdown().await;
                workers.into_iter().for_each(|w| w.join().unwrap());
            }
        }
    }
}

fn value(number: u64, salt: u64) -> [u8; 64] {
    std::array::from_fn(|x| {
        ((number * 64 + x as u64).wrapping_mul(2_654_435_761).wrapping_add(salt << 9) >> 7).to_le_bytes()[0] | 1
    })
}

/// Seven blocks that don't stand beside each other.
fn table(first: u32) -> BlockTable {
    BlockTable::new(0, &(0..7).map(|k| BlockId::new(first + k * 3)).collect::<Vec<_>>())
}

fn tokens(range: Range<u64>) -> TokenRange {
    TokenRange::new(Tokens::new(range.start), Tokens::new(range.end))
}

/// All of a prompt, of which some blocks are listed.
fn src(first: u32, blocks: usize) -> Vec<SrcGroup> {
    let listed: Vec<BlockId> = table(first).iter().take(blocks).collect();
    vec![SrcPaged { table: BlockTable::new(0, &listed), held: tokens(0..N), tail: Tail::Exact }.into()]
}

fn offer(first: u32) -> OfferSpec {
    OfferSpec::new(src(first, 7), KEY)
}

fn wish(first: u32) -> PullSpec {
    let groups = vec![DstPaged { table: table(first), cached: Tokens::ZERO }.into()];
    PullSpec { assurance: Assurance::Full, ..PullSpec::new(Tokens::new(N), groups, KEY) }
}

async fn delivered(handle: PullHandle) -> kvferry::Delivered {
    let delivered = tokio::time::timeout(SOON, handle).await.unwrap().unwrap();
    assert_eq!(delivered.report().bytes().get(), BYTES);
    delivered
}

async fn failed(handle: PullHandle) -> kvferry::Failed {
    match tokio::time::timeout(SOON, handle).await.unwrap() {
        Err(PullError::Failed(failed)) => *failed,
        other => panic!("{other:?}"),
    }
}

/// Two engines: tensor-parallel 2, heads outside, and 1, heads inside.
async fn pair(net: &MemNetwork, setup: Setup) -> (Side, Side) {
    (side("p", 2, LayoutStyle::HND, net, setup).await, side("d", 1, LayoutStyle::NHD, net, setup).await)
}

/// The end of a lease.
async fn released(events: &mut OwnerEvents, reference: &Reference) -> Closing {
    let end = async {
        loop {
            if let Some(OwnerEvent::Released { lease, how }) = events.next().await
                && lease == reference.lease()
            {
                return how;
            }
        }
    };
    tokio::time::timeout(SOON, end).await.unwrap()
}

async fn pushed(setup: Setup) {
    let net = MemNetwork::new(31);
    let (mut p, d) = pair(&net, setup).await;
    let mut events = p.take_events();
    for round in 0..4u32 {
        p.compute(round, 0..N, round.into());
        let reference = p.offer(offer(round)).await.unwrap();
        // As a router carries it.
        let carried: Reference = reference.to_string().parse().unwrap();
        let done = delivered(d.pull(carried, wish(100 + round).push()).await.unwrap()).await;
        assert_eq!(released(&mut events, &reference).await, Closing::Read);
        let report = done.report();
        assert_eq!(report.pairs.len(), 2, "{report:?}");
        assert!(report.phases.of(Phase::Write) > Duration::ZERO, "{report:?}");
        assert_eq!(report.groups[0].complete, (0, 6));
        d.check(100 + round, round.into());
    }
    assert_eq!(d.quarantined().await, Ok(0));
    p.end().await;
    d.end().await;
}

#[tokio::test]
async fn an_offer_is_pushed_in_memory() {
    pushed(Setup::Memory("offer")).await;
}

#[tokio::test]
async fn an_offer_is_pushed_over_tcp_by_workers_apart() {
    pushed(Setup::Tcp).await;
}

/// A prompt in chunks of a block and a half: blocks are listed and final one after the other, and the consumer sees them come.
async fn streamed(setup: Setup) {
    let net = MemNetwork::new(32);
    let (p, d) = pair(&net, setup).await;
    let mut stream = p.announce(OfferSpec::new(src(1, 0), KEY)).await.unwrap();
    let pull = d.pull(stream.reference().clone(), wish(101).push_with_progress()).await.unwrap();
    let mut progress = pull.progress().unwrap();
    for start in (0..N).step_by(24) {
        let chunk = start..(start + 24).min(N);
        stream.extend(src(1, usize::try_from(chunk.end.div_ceil(16)).unwrap())).await.unwrap();
        p.compute(1, chunk.clone(), 5);
        stream.region_ready(Items::Paged, tokens(chunk.clone())).await.unwrap();
        let seen = async { while progress.tokens().get() < chunk.end && progress.next().await.is_some() {} };
        tokio::time::timeout(SOON, seen).await.unwrap();
        assert_eq!(progress.tokens().get(), chunk.end, "nothing more is computed, and all of this is there");
    }
    let seen = d.snapshot().await.unwrap();
    assert_eq!(seen.pulls[0].phase, "write", "{}", seen.to_json());
    stream.seal(src(1, 7)).await.unwrap();
    assert!(stream.is_sealed());
    // What is sealed stays offered.
    drop(stream);
    delivered(pull).await;
    d.check(101, 5);
    // What was not seen yet, and then the end.
    let end = async { while progress.next().await.is_some() {} };
    tokio::time::timeout(SOON, end).await.unwrap();
    assert_eq!(progress.tokens().get(), N);
    p.end().await;
    d.end().await;
}

#[tokio::test]
async fn a_prompt_is_pushed_chunk_by_chunk_in_memory() {
    streamed(Setup::Memory("chunks")).await;
}

#[tokio::test]
async fn a_prompt_is_pushed_chunk_by_chunk_over_tcp() {
    streamed(Setup::Tcp).await;
}

/// Layers finish one after the other, and are named in every way; a consumer that comes late finds them, too.
#[tokio::test]
async fn layers_are_pushed_as_they_finish() {
    let net = MemNetwork::new(33);
    let (p, d) = pair(&net, Setup::Memory("layers")).await;
    p.compute(2, 0..N, 6);
    let mut stream = p.announce(offer(2)).await.unwrap();
    stream.region_ready("layer 0", tokens(0..N)).await.unwrap();
    let pull = d.pull(stream.reference().clone(), wish(102).push_with_progress()).await.unwrap();
    for (items, error) in [
        (Items::from("layer 2"), "no item \"layer 2\""),
        (Items::from(7..8), "item 7 is none of the model's"),
        (Items::from(0..1), "tokens"),
    ] {
        let refused = stream.region_ready(items, tokens(0..N)).await.unwrap_err();
        assert!(refused.to_string().contains(error), "{refused}");
    }
    stream.region_ready(1..2, tokens(0..N)).await.unwrap();
    let mut progress = pull.progress().unwrap();
    while progress.tokens().get() < N {
        tokio::time::timeout(SOON, progress.next()).await.unwrap().unwrap();
    }
    stream.seal(src(2, 7)).await.unwrap();
    let sealed = stream.region_ready(Items::Paged, tokens(0..N)).await;
    // It may be over by now.
    let refused = matches!(sealed, Err(CallError::Stream(StreamError::Sealed { .. } | StreamError::Unknown { .. })));
    assert!(refused, "{sealed:?}");
    delivered(pull).await;
    d.check(102, 6);
}

/// Each rank says by itself what it has computed, also before it knows of the stream.
async fn said_by_ranks(setup: Setup) {
    let net = MemNetwork::new(34);
    let (p, d) = pair(&net, setup).await;
    let mut stream = p.announce(offer(3)).await.unwrap();
    let say = |rank: usize, to: u64| {
        p.each(3, 0..to, Some(rank), |region, at, number| region.write(at, &value(number, 7)).unwrap());
        let items = [0, 1].map(ItemId::new);
        assert!(p.ports[rank].region_ready(stream.lease(), stream.attempt(), items, Tokens::new(to)));
    };
    say(0, 48);
    let pull = d.pull(stream.reference().clone(), wish(103).push_with_progress()).await.unwrap();
    let mut progress = pull.progress().unwrap();
    say(1, 64);
    // As far as both are.
    while progress.tokens().get() < 48 {
        tokio::time::timeout(SOON, progress.next()).await.unwrap().unwrap();
    }
    say(0, N);
    while progress.tokens().get() < 64 {
        tokio::time::timeout(SOON, progress.next()).await.unwrap().unwrap();
    }
    say(1, N);
    stream.seal(src(3, 7)).await.unwrap();
    delivered(pull).await;
    d.check(103, 7);
    p.end().await;
    d.end().await;
}

#[tokio::test]
async fn ranks_say_by_themselves_what_is_final_in_memory() {
    said_by_ranks(Setup::Memory("ranks")).await;
}

#[tokio::test]
async fn ranks_say_by_themselves_what_is_final_over_sockets() {
    said_by_ranks(Setup::Tcp).await;
}

#[tokio::test]
async fn a_worker_that_has_ended_takes_no_promises() {
    let net = MemNetwork::new(35);
    let p = side("p", 1, LayoutStyle::HND, &net, Setup::Tcp).await;
    let (stream, port) = (p.announce(offer(1)).await.unwrap(), p.ports[0].clone());
    let (lease, attempt) = (stream.lease(), stream.attempt());
    assert!(port.region_ready(lease, attempt, [ItemId::new(0)], Tokens::new(16)));
    p.end().await;
    assert!(!port.region_ready(lease, attempt, [ItemId::new(0)], Tokens::new(32)));
    // What is said of a stream whose owner is gone is an error.
    assert_eq!(stream.extend(src(1, 7)).await, Err(CallError::Shutdown));
}

/// The prefill begins anew when half of it is written: only the second run arrives.
async fn restarted(setup: Setup) {
    let net = MemNetwork::new(36);
    let (p, d) = pair(&net, setup).await;
    let mut stream = p.announce(offer(4)).await.unwrap();
    let pull = d.pull(stream.reference().clone(), wish(104).push_with_progress()).await.unwrap();
    let mut progress = pull.progress().unwrap();
    for (run, last) in [(20, 48), (21, 32)] {
        p.compute(4, 0..last, run);
        stream.region_ready(Items::Paged, tokens(0..last)).await.unwrap();
        while progress.tokens().get() != last {
            tokio::time::timeout(SOON, progress.next()).await.unwrap().unwrap();
        }
        let before = stream.attempt();
        let now = stream.restart(src(4, 7)).await.unwrap();
        assert!(now > before && now == stream.attempt());
        // Of the run before nothing can be said any more.
        assert!(p.ports[0].region_ready(stream.lease(), before, [ItemId::new(0)], Tokens::new(N)));
    }
    p.compute(4, 0..N, 22);
    stream.region_ready(Items::Paged, tokens(0..N)).await.unwrap();
    stream.seal(src(4, 7)).await.unwrap();
    delivered(pull).await;
    d.check(104, 22);
    assert_eq!(d.quarantined().await, Ok(0));
    p.end().await;
    d.end().await;
}

#[tokio::test]
async fn a_prefill_begins_anew_in_memory() {
    restarted(Setup::Memory("anew")).await;
}

#[tokio::test]
async fn a_prefill_begins_anew_over_tcp() {
    restarted(Setup::Tcp).await;
}

/// A stream that nobody goes on with is withdrawn: its consumer hears so, and its blocks are free.
#[tokio::test]
async fn a_dropped_stream_is_withdrawn() {
    let net = MemNetwork::new(37);
    let (mut p, d) = pair(&net, Setup::Memory("left")).await;
    let mut events = p.take_events();
    let stream = p.announce(offer(5)).await.unwrap();
    let reference = stream.reference().clone();
    let pull = d.pull(reference.clone(), wish(105).push_with_progress()).await.unwrap();
    stream.region_ready(Items::Paged, tokens(0..16)).await.unwrap();
    let mut progress = pull.progress().unwrap();
    tokio::time::timeout(SOON, progress.next()).await.unwrap().unwrap();
    drop(stream);
    assert_eq!(released(&mut events, &reference).await, Closing::Withdrawn);
    let failed = failed(pull).await;
    assert!(matches!(failed.cause, FailureCause::LeaseClosed { how: Closing::Withdrawn }), "{failed}");
    assert!(failed.report.writers_in_doubt.is_empty());
    // Free at both ends.
    p.compute(5, 0..N, 1);
    let reference = p.offer(offer(5)).await.unwrap();
    delivered(d.pull(reference, wish(105).push()).await.unwrap()).await;
    d.check(105, 1);
}

/// Nobody's blocks before the producer has said that its writers have stopped: those of a pull that was dropped are neither
/// written by others, nor offered.
#[tokio::test]
async fn a_dropped_push_keeps_its_blocks_until_its_writers_have_stopped() {
    let net = MemNetwork::new(38);
    let (mut p, d) = pair(&net, Setup::Memory("dropped")).await;
    let mut events = p.take_events();
    p.compute(6, 0..N, 2);
    // The end of a write is told late; that it is to stop may come before it, or find it ended.
    let late = Duration::from_millis(400);
    for endpoint in &p.endpoints {
        assert!(net.set_faults(*endpoint, MemFaults { completion_delay: late..late * 2, ..MemFaults::default() }));
    }
    let reference = p.offer(offer(6)).await.unwrap();
    let pull = d.pull(reference.clone(), wish(106).push()).await.unwrap();
    let arrived = || {
        let mut any = false;
        d.each(106, 0..N, None, |region, at, _| {
            let mut got = [0; 64];
            region.read(at, &mut got).unwrap();
            any |= got != [0; 64];
        });
        any
    };
    while !arrived() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(d.snapshot().await.unwrap().pulls[0].phase, "write");
    drop(pull);
    let stopping = p.offer(offer(30)).await.unwrap();
    let next = d.pull(stopping.clone(), wish(106).push()).await.unwrap();
    let next = tokio::time::timeout(SOON, next).await.unwrap();
    assert_eq!(released(&mut events, &reference).await, Closing::Abandoned);
    match next {
        Err(PullError::Failed(refused)) => assert!(matches!(refused.cause, FailureCause::Overlap(_)), "{refused}"),
        // All writers had stopped by then: the blocks were free, and nothing of the first is written over the second.
        Ok(_) => d.each(106, 0..N, None, |region, at, _| {
            let mut got = [1; 64];
            region.read(at, &mut got).unwrap();
            assert_eq!(got, [0; 64], "the other prompt was never computed");
        }),
        Err(other) => panic!("{other}"),
    }
    let free = async {
        while !d.snapshot().await.unwrap().pulls.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, free).await.unwrap();
    assert_eq!(d.quarantined().await, Ok(0), "all writers were seen to stop");
    let reference = p.offer(offer(6)).await.unwrap();
    delivered(d.pull(reference, wish(106).push()).await.unwrap()).await;
    d.check(106, 2);
}

#[tokio::test]
async fn pulls_and_pushes_mix() {
    let net = MemNetwork::new(39);
    let setup = Setup::Memory("mixed");
    let (p, d) = (side("p", 2, LayoutStyle::HND, &net, setup).await, side("d", 2, LayoutStyle::NHD, &net, setup).await);
    let mut handles = Vec::new();
    for number in 0..12u32 {
        // Three to a stretch of 21 blocks, each with every third of them.
        let from = number / 3 * 21 + number % 3;
        let to = 255 - 18 - from;
        p.compute(from, 0..N, number.into());
        let reference = p.offer(offer(from)).await.unwrap();
        let wish = if number % 2 == 0 { wish(to) } else { wish(to).push() };
        handles.push((to, number, d.pull(reference, wish).await.unwrap()));
    }
    for (to, number, handle) in handles {
        let report = delivered(handle).await.report().clone();
        assert_eq!(report.phases.of(Phase::Write) > Duration::ZERO, number % 2 == 1, "{report:?}");
        d.check(to, number.into());
    }
}

/// In a second turn the prefill engine has the decode engine's ranks write what they have added.
#[tokio::test]
async fn both_ways_are_the_same() {
    let net = MemNetwork::new(40);
    let (p, d) = pair(&net, Setup::Tcp).await;
    p.compute(7, 0..N, 3);
    let reference = p.offer(offer(7)).await.unwrap();
    delivered(d.pull(reference, wish(107).push()).await.unwrap()).await;
    // The decode engine generates over the last block, and announces it while it does.
    let mut stream: OfferStream = d.announce(offer(107)).await.unwrap();
    let back = p.pull(stream.reference().clone(), wish(8).push()).await.unwrap();
    stream.region_ready(Items::Paged, tokens(0..N - 4)).await.unwrap();
    d.compute(107, N - 4..N, 3);
    stream.seal(src(107, 7)).await.unwrap();
    let report = delivered(back).await.report().clone();
    assert_eq!(report.pairs.len(), 2, "one rank wrote to two: {report:?}");
    p.check(8, 3);
    p.end().await;
    d.end().await;
}

/// A pull of what is still being computed is refused, and says why; the engine's usual mode is the configuration's.
#[tokio::test]
async fn the_usual_mode_is_the_engine_s() {
    let net = MemNetwork::new(41);
    let setup = Setup::Memory("usual");
    let mut config = EngineConfig::new(id("d"));
    config.mode = Mode::Push { progress: false };
    let p = side("p", 2, LayoutStyle::HND, &net, setup).await;
    let d = side_with(config, 1, LayoutStyle::NHD, &net, setup).await;
    p.compute(9, 0..N, 4);
    let mut stream = p.announce(offer(9)).await.unwrap();
    let refused = PullSpec { mode: Some(Mode::Pull), ..wish(109) };
    let refused = failed(d.pull(stream.reference().clone(), refused).await.unwrap()).await;
    assert_eq!(refused.cause.kind(), "refused", "{refused}");
    assert!(refused.to_string().contains("seal"), "{refused}");
    let pull = d.pull(stream.reference().clone(), wish(109)).await.unwrap();
    assert!(pull.progress().is_none(), "it was not asked for");
    stream.seal(src(9, 7)).await.unwrap();
    let done = delivered(pull).await;
    assert!(done.report().phases.of(Phase::Write) > Duration::ZERO);
    d.check(109, 4);
}

/// A prefill rank that dies in the middle of its writes leaves the consumer's blocks in quarantine, which names it; by living anew it
/// frees them.
#[tokio::test]
async fn the_blocks_of_a_lost_writer_wait_for_its_next_life() {
    let net = MemNetwork::new(42);
    let (mut p, d) = pair(&net, Setup::Tcp).await;
    p.compute(10, 0..N, 8);
    let stream = p.announce(offer(10)).await.unwrap();
    let pull = d.pull(stream.reference().clone(), wish(110).push_with_progress()).await.unwrap();
    let mut progress = pull.progress().unwrap();
    stream.region_ready(Items::Paged, tokens(0..32)).await.unwrap();
    while progress.tokens().get() < 32 {
        tokio::time::timeout(SOON, progress.next()).await.unwrap().unwrap();
    }
    let (manifest, memory) = (p.ranks[1].clone(), p.memory[1].clone());
    let Running::Apart(owner, workers) = &mut p.running else { panic!("workers apart") };
    let lost = workers.pop().unwrap();
    lost.stop();
    lost.join().unwrap();
    let failed = failed(pull).await;
    assert_eq!(failed.report.writers_in_doubt, [RankId::new(1)], "{failed}");
    let waiting = d.snapshot().await.unwrap().quarantine;
    assert_eq!((waiting.len(), waiting[0].producer.as_deref(), &waiting[0].writers[..]), (1, Some("p"), &[1][..]));
    let refused = self::failed(d.pull(stream.reference().clone(), wish(110).push()).await.unwrap()).await;
    assert!(matches!(refused.cause, FailureCause::Overlap(_)), "{refused}");
    drop(stream);
    let transport = Box::new(net.endpoint().unwrap());
    let worker = Worker::builder(id("p"), RankId::new(1), owner.rank_socket(), manifest, memory, transport);
    workers.push(worker.spawn().unwrap());
    owner.ready(SOON).await.unwrap();
    let free = async {
        while d.quarantined().await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, free).await.unwrap();
    p.compute(10, 0..N, 9);
    let reference = p.offer(offer(10)).await.unwrap();
    delivered(d.pull(reference, wish(110).push()).await.unwrap()).await;
    d.check(110, 9);
    p.end().await;
    d.end().await;
}
