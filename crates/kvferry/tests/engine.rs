//! Whole engines in this process: over memory, TCP and Unix sockets; restarts, drops, drains, strangers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kvferry::secure::{Material, Security, SharedKeyOptions};
use kvferry::{
    Address, BlockId, BlockTable, CacheGroup, CallError, Closing, ConnectionLimits, ContentKey, DstPaged, Engine,
    EngineBuilder, EngineError, EngineId, FailureCause, ModelSpec, OfferError, OfferSpec, Owner, OwnerEvent,
    OwnerEvents, PullError, PullSpec, RankId, RankManifest, ReadyError, Reference, Region, SrcPaged, StartError, Tail,
    TokenRange, Tokens, Ttl, Worker,
};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, PagedItem};
use kvferry_geometry::units::{ItemId, Name};
use kvferry_transport::mem::{MemFaults, MemNetwork};
use kvferry_transport::{EndpointId, Transport};

const SOON: Duration = Duration::from_secs(60);
const KEY: ContentKey = ContentKey::from_bytes([9; 32]);
const BLOCK: u64 = 16;

struct Parts {
    spec: ModelSpec,
    groups: Vec<CacheGroup>,
    ranks: Vec<(RankManifest, Vec<Region>)>,
}

/// An item of two heads of 16 bytes, blocks of 16 tokens.
fn parts(tp: u32) -> Parts {
    let component = Component::new("kv", 16, "bf16");
    let spec = ModelSpec::new(vec![Item::paged("a", PagedItem::new(2, vec![component]))]).unwrap();
    let items = vec![ItemId::new(0)];
    let placed = Parallelism::tensor(&spec, tp).place(&spec, |_, _| HeadRule::Split).unwrap();
    let rank = |placement| {
        let layout = LayoutStyle::HND.build(&spec, &placement, &[(&items, 16, 256)]).unwrap();
        let memory = layout.regions.iter().map(|r| Region::zeroed(usize::try_from(r.len.get()).unwrap()).unwrap());
        let memory = memory.collect();
        (RankManifest { placement, layout }, memory)
    };
    let ranks = placed.into_iter().map(rank).collect();
    let groups = vec![CacheGroup { name: Name::new("all"), items, block_tokens: Tokens::new(BLOCK) }];
    Parts { spec, groups, ranks }
}

fn id(name: &str) -> EngineId {
    EngineId::new(name).unwrap()
}

fn engine(name: &str, tp: u32, net: &MemNetwork) -> EngineBuilder {
    let Parts { spec, groups, ranks } = parts(tp);
    let add =
        |engine: EngineBuilder, (manifest, memory)| engine.rank(manifest, memory, Box::new(net.endpoint().unwrap()));
    ranks.into_iter().fold(Engine::builder(id(name), spec, groups), add)
}

/// A consumer of one rank whose reads don't end by themselves once `stop` was called with what is given.
async fn consumer(net: &MemNetwork) -> (Engine, EndpointId) {
    let Parts { spec, groups, mut ranks } = parts(1);
    let (manifest, memory) = ranks.pop().unwrap();
    let transport = net.endpoint().unwrap();
    let endpoint = transport.endpoint();
    let d = Engine::builder(id("d"), spec, groups).rank(manifest, memory, Box::new(transport));
    (d.start().await.unwrap(), endpoint)
}

fn stop(net: &MemNetwork, endpoint: EndpointId) {
    assert!(net.set_faults(endpoint, MemFaults { start_delay: SOON..SOON * 2, ..MemFaults::default() }));
}

fn table(block: u32) -> BlockTable {
    BlockTable::new(0, &[BlockId::new(block)])
}

fn offer(block: u32) -> OfferSpec {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(BLOCK));
    OfferSpec::new(vec![SrcPaged { table: table(block), held, tail: Tail::Exact }.into()], KEY)
}

fn wish(block: u32) -> PullSpec {
    PullSpec::new(Tokens::new(BLOCK), vec![DstPaged { table: table(block), cached: Tokens::ZERO }.into()], KEY)
}

async fn moves(p: &Owner, d: &Owner, block: u32) {
    let reference = p.offer(offer(block)).await.unwrap();
    let carried: Reference = reference.to_string().parse().unwrap();
    let delivered = tokio::time::timeout(SOON, d.pull(carried, wish(block)).await.unwrap()).await.unwrap().unwrap();
    assert_eq!(delivered.report().bytes().get(), BLOCK * 2 * 16);
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

fn unix(name: &str) -> Address {
    Address::Unix(std::env::temp_dir().join(format!("kvferry-test-{}-{name}.sock", std::process::id())))
}

async fn meet_over(listen: Address) {
    let net = MemNetwork::new(1);
    let p = engine("p", 2, &net).listen(listen).start().await.unwrap();
    let d = engine("d", 1, &net).start().await.unwrap();
    assert_eq!(p.rank_socket(), std::path::Path::new(""), "an engine needs no socket for its ranks");
    moves(&p, &d, 3).await;
    for block in 0..20 {
        moves(&p, &d, block).await;
    }
    let seen = d.snapshot().await.unwrap();
    assert!(seen.to_json().contains("\"p\""), "{}", seen.to_json());
    p.shutdown().await;
    d.shutdown().await;
}

#[tokio::test]
async fn engines_meet_in_memory() {
    meet_over(Address::memory("engines-meet").unwrap()).await;
    // The name is free again.
    meet_over(Address::memory("engines-meet").unwrap()).await;
}

#[tokio::test]
async fn engines_meet_over_sockets() {
    meet_over(Address::loopback(0)).await;
    meet_over("tcp:[::1]:0".parse().unwrap()).await;
    meet_over(unix("meet")).await;
}

#[tokio::test]
async fn many_pulls_at_once_all_end_once() {
    let net = MemNetwork::new(2);
    let p = std::sync::Arc::new(engine("p", 1, &net).listen(Address::memory("many").unwrap()).start().await.unwrap());
    let d = std::sync::Arc::new(engine("d", 2, &net).start().await.unwrap());
    let mut tasks = tokio::task::JoinSet::new();
    for block in 0..128 {
        let (p, d) = (p.clone(), d.clone());
        tasks.spawn(async move {
            for _ in 0..5 {
                moves(&p, &d, block).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(d.quarantined().await, Ok(0));
}

/// HS-04: two of one address are never both there, and the one who comes late hears at once; port 0 is told as it really is.
#[tokio::test]
async fn hs_04_an_address_has_one_owner() {
    let net = MemNetwork::new(3);
    let first = engine("a", 1, &net).listen(Address::loopback(0)).start().await.unwrap();
    let taken = first.address().unwrap().clone();
    assert!(taken.is_definite() && taken != Address::loopback(0), "{taken}");
    let begun = Instant::now();
    for (name, address) in [("b", taken)] {
        let error = engine(name, 1, &net).listen(address.clone()).start().await.unwrap_err();
        assert!(matches!(error, EngineError::Owner(StartError::Listen { .. })), "{error}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
    for address in [Address::memory("hs-04").unwrap(), unix("hs04")] {
        let held = engine("c", 1, &net).listen(address.clone()).start().await.unwrap();
        let error = engine("d", 1, &net).listen(address.clone()).start().await.unwrap_err();
        assert!(matches!(error, EngineError::Owner(StartError::Listen { .. })), "{error}");
        held.shutdown().await;
        engine("e", 1, &net).listen(address).start().await.unwrap().shutdown().await;
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

/// HS-02: an address that peers can't connect to is refused where nothing else is advertised; what is advertised is carried as it is.
#[tokio::test]
async fn hs_02_references_carry_what_is_advertised() {
    let net = MemNetwork::new(4);
    let any: Address = "tcp:0.0.0.0:0".parse().unwrap();
    let start = |e: EngineBuilder| async { e.start().await.map(|_| ()).unwrap_err() };
    let error = start(engine("p", 1, &net).listen(any.clone())).await;
    assert!(matches!(&error, EngineError::Owner(StartError::Exposed { .. })), "{error}");
    let error = start(engine("p", 1, &net).listen(any.clone()).plaintext_beyond_loopback()).await;
    assert!(matches!(&error, EngineError::Owner(StartError::Advertise { .. })), "{error}");
    let told: Address = "tcp:10.1.2.3:5600".parse().unwrap();
    // Something leads from there to us.
    let error = start(engine("p", 1, &net).listen(Address::loopback(0)).advertise(told.clone())).await;
    assert!(matches!(&error, EngineError::Owner(StartError::Exposed { address }) if *address == told), "{error}");
    let p = engine("p", 1, &net).listen(any).advertise(told.clone()).plaintext_beyond_loopback().start().await.unwrap();
    assert_eq!(p.offer(offer(1)).await.unwrap().address(), &told);
}

#[tokio::test]
async fn a_dropped_pull_is_given_up() {
    let net = MemNetwork::new(5);
    let mut p = engine("p", 1, &net).listen(Address::memory("dropped").unwrap()).start().await.unwrap();
    let mut events = p.take_events().unwrap();
    let (d, endpoint) = consumer(&net).await;
    moves(&p, &d, 0).await;
    stop(&net, endpoint);
    let reference = p.offer(offer(1)).await.unwrap();
    let pull = d.pull(reference.clone(), wish(1)).await.unwrap();
    drop(pull);
    assert_eq!(released(&mut events, &reference).await, Closing::Abandoned);
    // By its id.
    let reference = p.offer(offer(2)).await.unwrap();
    let pull = d.pull(reference.clone(), wish(2)).await.unwrap();
    d.abort(pull.id()).unwrap();
    let failed = tokio::time::timeout(SOON, pull).await.unwrap();
    assert!(matches!(failed, Err(PullError::Failed(f)) if f.cause == FailureCause::Cancelled));
    assert_eq!(released(&mut events, &reference).await, Closing::Abandoned);
    // An offer whose caller has gone.
    let mut offered = Box::pin(p.offer(offer(3)));
    std::future::poll_fn(|cx| {
        assert!(offered.as_mut().poll(cx).is_pending(), "the driver had no time for it");
        std::task::Poll::Ready(())
    })
    .await;
    drop(offered);
    let leases = p.snapshot().await.unwrap().to_json();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let later = p.snapshot().await.unwrap();
    assert!(later.leases.is_empty(), "{leases}, then {}", later.to_json());
}

#[tokio::test]
async fn what_is_declined_or_expires_is_free() {
    let net = MemNetwork::new(6);
    let mut p = engine("p", 1, &net).listen(Address::memory("declined").unwrap()).start().await.unwrap();
    let mut events = p.take_events().unwrap();
    let d = engine("d", 1, &net).start().await.unwrap();
    moves(&p, &d, 0).await;
    let reference = p.offer(offer(1)).await.unwrap();
    d.decline(&reference).unwrap();
    assert_eq!(released(&mut events, &reference).await, Closing::Declined);
    let reference = p.offer(OfferSpec { ttl: Ttl::For(Duration::from_millis(50)), ..offer(2) }).await.unwrap();
    assert_eq!(released(&mut events, &reference).await, Closing::Expired);
}

#[tokio::test]
async fn a_drained_engine_begins_nothing_more() {
    let net = MemNetwork::new(7);
    let mut p = engine("p", 1, &net).listen(Address::memory("drained").unwrap()).start().await.unwrap();
    let mut events = p.take_events().unwrap();
    let d = engine("d", 1, &net).start().await.unwrap();
    moves(&p, &d, 0).await;
    let reference = p.offer(OfferSpec { ttl: Ttl::Never, ..offer(1) }).await.unwrap();
    let drain = tokio::spawn(p.drain(SOON));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!drain.is_finished(), "a lease is open");
    d.decline(&reference).unwrap();
    assert_eq!(released(&mut events, &reference).await, Closing::Declined);
    assert!(drain.await.unwrap(), "nothing was cut off");
    // What doesn't end is cut off.
    let p = engine("p", 1, &net).listen(Address::memory("drained").unwrap()).start().await.unwrap();
    p.offer(OfferSpec { ttl: Ttl::Never, ..offer(1) }).await.unwrap();
    assert!(!p.drain(Duration::from_millis(20)).await);
}

/// What ends by its time, and not by a message, ends the draining, too.
#[tokio::test]
async fn an_engine_is_drained_when_its_last_lease_expires() {
    let net = MemNetwork::new(15);
    let p = engine("p", 1, &net).listen(Address::memory("expires").unwrap()).start().await.unwrap();
    p.offer(OfferSpec { ttl: Ttl::For(Duration::from_millis(50)), ..offer(1) }).await.unwrap();
    let begun = Instant::now();
    assert!(p.drain(SOON).await, "nothing was cut off");
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
}

/// Everything that was listened on is free when a shutdown returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_is_free_after_a_shutdown() {
    let folder = tempfile::tempdir().unwrap();
    let Parts { spec, groups, .. } = parts(1);
    let start = async |listen: Address| {
        let owner = Owner::builder(id("p"), spec.clone(), groups.clone(), 1).listen(listen);
        owner.rank_socket(folder.path().join("ranks")).start().await.unwrap()
    };
    let first = start(Address::loopback(0)).await;
    let tcp = first.address().unwrap().clone();
    first.shutdown().await;
    for _ in 0..50 {
        for listen in [tcp.clone(), Address::memory("free").unwrap(), Address::Unix(folder.path().join("peers"))] {
            let owner = start(listen.clone()).await;
            assert!(owner.rank_socket().exists());
            owner.shutdown().await;
        }
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

/// A wrong worker among others doesn't keep the engine from becoming complete, or from being waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_rank_does_not_stick() {
    let net = MemNetwork::new(16);
    let Parts { spec, groups, ranks } = parts(2);
    let owner = Owner::builder(id("p"), spec, groups, 2).start().await.unwrap();
    let spawn = |rank: u32, (manifest, memory)| {
        let transport = Box::new(net.endpoint().unwrap());
        let worker = Worker::builder(id("p"), RankId::new(rank), "", manifest, memory, transport);
        worker.in_process(owner.rank_port()).spawn()
    };
    let mut ranks = ranks.into_iter();
    let wrong = spawn(7, parts(2).ranks.remove(0));
    let refused = owner.ready(SOON).await;
    assert!(matches!(refused, Err(ReadyError::Join(_))), "{refused:?}");
    let _first = spawn(0, ranks.next().unwrap()).unwrap();
    let seen = async {
        while !matches!(owner.ready(Duration::from_millis(20)).await,
            Err(ReadyError::Timeout { missing, .. }) if missing == [RankId::new(1)])
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON / 6, seen).await.unwrap();
    let (ready, second) = tokio::join!(owner.ready(SOON), async { spawn(1, ranks.next().unwrap()) });
    ready.unwrap();
    owner.shutdown().await;
    drop((wrong, second));
}

#[tokio::test]
async fn a_restarted_rank_joins_again_and_is_read_from() {
    let net = MemNetwork::new(8);
    let mut p = engine("p", 2, &net).listen(Address::memory("again").unwrap()).start().await.unwrap();
    let mut d = engine("d", 1, &net).start().await.unwrap();
    moves(&p, &d, 1).await;
    let (before, old) = (p.epoch(), p.offer(offer(2)).await.unwrap());
    let (_, memory) = parts(2).ranks.pop().unwrap();
    p.restart_rank(RankId::new(1), memory, Box::new(net.endpoint().unwrap())).await.unwrap();
    assert_ne!(p.epoch(), before, "it is another life of the engine");
    moves(&p, &d, 3).await;
    // A reference of the former life delivers nothing.
    let failed = tokio::time::timeout(SOON, d.pull(old, wish(2)).await.unwrap()).await.unwrap();
    assert!(failed.is_err());
    let (_, memory) = parts(1).ranks.pop().unwrap();
    d.restart_rank(RankId::new(0), memory, Box::new(net.endpoint().unwrap())).await.unwrap();
    moves(&p, &d, 4).await;
    let none = d.restart_rank(RankId::new(7), Vec::new(), Box::new(net.endpoint().unwrap())).await;
    assert!(matches!(none, Err(EngineError::NoSuchRank { .. })));
}

#[tokio::test]
async fn a_peer_may_restart_at_its_address() {
    let net = MemNetwork::new(9);
    let d = engine("d", 1, &net).start().await.unwrap();
    for listen in [Address::memory("restart").unwrap(), unix("restart")] {
        for block in 0..3 {
            let p = engine("p", 1, &net).listen(listen.clone()).start().await.unwrap();
            moves(&p, &d, block).await;
            p.shutdown().await;
        }
    }
    // One that is not there is waited for until the deadline, and named.
    let p = engine("p", 1, &net).listen(Address::memory("gone").unwrap()).start().await.unwrap();
    let reference = p.offer(offer(1)).await.unwrap();
    p.shutdown().await;
    let spec = PullSpec { deadline: Duration::from_millis(300), ..wish(1) };
    let failed = d.pull(reference, spec).await.unwrap().await;
    assert!(matches!(&failed, Err(PullError::Failed(f)) if f.to_string().contains("memory:gone")), "{failed:?}");
}

#[tokio::test]
async fn idle_peers_are_left_and_met_again() {
    let net = MemNetwork::new(10);
    let p = engine("p", 1, &net).listen(Address::loopback(0)).start().await.unwrap();
    let mut d = engine("d", 1, &net).idle_timeout(Some(Duration::from_millis(100))).start().await.unwrap();
    let mut events = d.take_events().unwrap();
    for block in 0..2 {
        moves(&p, &d, block).await;
        let down = async {
            loop {
                if let Some(OwnerEvent::LinkDown { peer, .. }) = events.next().await {
                    return peer;
                }
            }
        };
        assert_eq!(tokio::time::timeout(SOON, down).await.unwrap(), id("p"));
    }
}

#[tokio::test]
async fn after_shutdown_calls_are_refused() {
    let net = MemNetwork::new(11);
    let p = engine("p", 1, &net).listen(Address::memory("ended").unwrap()).start().await.unwrap();
    let (d, endpoint) = consumer(&net).await;
    stop(&net, endpoint);
    let pull = d.pull(p.offer(offer(1)).await.unwrap(), wish(1)).await.unwrap();
    d.shutdown().await;
    assert!(matches!(pull.await, Err(PullError::Failed(f)) if f.cause == FailureCause::Shutdown));
    let not_listening = engine("e", 1, &net).start().await.unwrap();
    assert_eq!(not_listening.offer(offer(1)).await, Err(CallError::NotListening));
    let bad = OfferSpec::new(Vec::new(), KEY);
    assert!(matches!(p.offer(bad).await, Err(CallError::Offer(OfferError::GroupCount { .. }))));
}

fn socket(owner: &Owner) -> SocketAddr {
    match owner.address() {
        Some(Address::Tcp(address)) => *address,
        other => panic!("{other:?}"),
    }
}

/// What strangers send: noise, other protocols, frames of a wrong kind, lengths without end.
fn nonsense(kind: usize) -> Vec<u8> {
    match kind % 6 {
        0 => (0u8..64).map(|i| i.wrapping_mul(197).wrapping_add(31)).collect(),
        1 => b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        2 => [&u32::MAX.to_le_bytes()[..], &[1, 0], &[7; 64]].concat(),
        3 => [&(64u32 << 20).to_le_bytes()[..], &[1, 0], &[7; 4096]].concat(),
        4 => [&3u32.to_le_bytes()[..], &999u16.to_le_bytes(), &[1, 2, 3]].concat(),
        _ => [&4u32.to_le_bytes()[..], &[1, 0], b"kvfy"].concat(),
    }
}

/// HS-06: 32 hostile clients at a time, again and again, harm nobody, and are dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_06_hostile_clients_harm_nobody_else() {
    let net = MemNetwork::new(12);
    let p = engine("p", 1, &net)
        .listen(Address::loopback(0))
        .handshake_timeout(Duration::from_secs(20))
        .start()
        .await
        .unwrap();
    let d = engine("d", 1, &net).start().await.unwrap();
    let at = socket(&p);
    let hostile: Vec<_> = (0..32)
        .map(|i| {
            std::thread::spawn(move || {
                for round in 0..6 {
                    let mut stream = TcpStream::connect(at).unwrap();
                    stream.set_read_timeout(Some(SOON)).unwrap();
                    // It may be dropped before it has sent all.
                    drop(stream.write_all(&nonsense(i + round)));
                    drop(stream.shutdown(std::net::Shutdown::Write));
                    let mut answer = Vec::new();
                    // It is closed, whatever is said before. The answer names the fault, and no manifest.
                    drop(stream.read_to_end(&mut answer));
                    let text = String::from_utf8_lossy(&answer).into_owned();
                    assert!(answer.len() < 1024, "{} bytes: {text}", answer.len());
                }
            })
        })
        .collect();
    for block in 0..60 {
        moves(&p, &d, block).await;
    }
    tokio::task::spawn_blocking(move || hostile.into_iter().for_each(|h| h.join().unwrap())).await.unwrap();
    moves(&p, &d, 1).await;
}

/// Links are protected on loopback too where that is said; who has not the key, or speaks plainly, is not met, and told so.
#[tokio::test]
async fn protected_engines_meet_and_others_do_not() {
    let key = |salt: u8| -> Security {
        let bytes: [u8; 32] = std::array::from_fn(|i| u8::try_from(i).unwrap().wrapping_mul(37).wrapping_add(salt));
        SharedKeyOptions::builder("k", Material::bytes(bytes)).build().unwrap().into()
    };
    let net = MemNetwork::new(14);
    // Protected, it may listen where other hosts can connect.
    let mut p = engine("p", 1, &net)
        .security(key(1))
        .listen("tcp:0.0.0.0:0".parse().unwrap())
        .advertise(Address::loopback(1))
        .start()
        .await
        .unwrap();
    p.take_events().unwrap();
    p.shutdown().await;
    let mut p = engine("p", 1, &net).security(key(1)).listen(Address::loopback(0)).start().await.unwrap();
    let mut events = p.take_events().unwrap();
    let d = engine("d", 1, &net).security(key(1)).start().await.unwrap();
    moves(&p, &d, 1).await;
    let others = [engine("e", 1, &net).security(key(2)), engine("f", 1, &net)];
    for other in others {
        let other = other.start().await.unwrap();
        let spec = PullSpec { deadline: Duration::from_millis(700), ..wish(2) };
        let failed = other.pull(p.offer(offer(2)).await.unwrap(), spec).await.unwrap().await;
        assert!(failed.is_err(), "{failed:?}");
    }
    let refused = async {
        loop {
            if let Some(OwnerEvent::LinkFailed { address: None, refused: true, reasons }) = events.next().await {
                return reasons;
            }
        }
    };
    let reasons = tokio::time::timeout(SOON, refused).await.unwrap();
    assert!(reasons[0].contains("127.0.0.1"), "{reasons:?}");
    moves(&p, &d, 3).await;
}

/// Wherever a reference leads, nothing goes to other hosts in plaintext that was not allowed to.
#[tokio::test]
async fn links_beyond_loopback_are_not_made_in_plaintext() {
    let net = MemNetwork::new(17);
    let told: Address = "tcp:192.0.2.1:7600".parse().unwrap();
    let p = engine("p", 1, &net).listen(Address::loopback(0)).advertise(told).plaintext_beyond_loopback();
    let p = p.start().await.unwrap();
    let pulled = async |d: EngineBuilder, block, deadline| {
        let d = d.start().await.unwrap();
        d.pull(p.offer(offer(block)).await.unwrap(), PullSpec { deadline, ..wish(block) })
            .await
            .unwrap()
            .await
            .unwrap_err()
    };
    // At once: it could be tried for ever.
    let start = Instant::now();
    let PullError::Failed(failed) = pulled(engine("d", 1, &net), 1, 3 * SOON).await else { panic!("no end") };
    let FailureCause::Unreachable { address, reason } = &failed.cause else { panic!("{failed}") };
    assert!(address == "tcp:192.0.2.1:7600" && reason.contains("`plaintext_beyond_loopback`"), "{failed}");
    assert!(start.elapsed() < SOON);
    let why = pulled(engine("d", 1, &net).plaintext_beyond_loopback(), 2, Duration::from_millis(200)).await.to_string();
    assert!(!why.contains("plaintext_beyond_loopback"), "{why}");
}

/// Who has used up most of its time until it has proven who it is has only the rest to say which engine it is.
#[tokio::test]
async fn a_handshake_has_one_limit_for_proof_and_hello() {
    let limit = Duration::from_secs(2);
    let bytes: [u8; 32] = std::array::from_fn(|i| u8::try_from(i).unwrap() * 7);
    let key: Security = SharedKeyOptions::builder("k", Material::bytes(bytes)).build().unwrap().into();
    let net = MemNetwork::new(19);
    let p = engine("p", 1, &net).security(key.clone()).listen(Address::loopback(0)).handshake_timeout(limit);
    let p = p.start().await.unwrap();
    let start = Instant::now();
    let stream = tokio::net::TcpStream::connect(socket(&p)).await.unwrap();
    tokio::time::sleep(limit * 3 / 4).await;
    let mut link = kvferry::secure::client(stream, &key, None).await.unwrap();
    // What it hears is its end.
    let mut answer = [0; 16];
    let read = std::future::poll_fn(|cx| {
        let mut answer = tokio::io::ReadBuf::new(&mut answer);
        tokio::io::AsyncRead::poll_read(std::pin::Pin::new(&mut link), cx, &mut answer)
    });
    drop(tokio::time::timeout(SOON, read).await.unwrap());
    assert!((limit..limit * 3 / 2).contains(&start.elapsed()), "{:?}", start.elapsed());
}

/// References that lead nowhere open only so many sockets.
#[tokio::test]
async fn links_in_the_making_are_bounded() {
    let net = MemNetwork::new(18);
    let key: [u8; 32] = std::array::from_fn(|i| u8::try_from(i).unwrap().wrapping_mul(37));
    let key: Security = SharedKeyOptions::builder("k", Material::bytes(key)).build().unwrap().into();
    let limits = ConnectionLimits { peers: 4, ..ConnectionLimits::default() };
    let d = engine("d", 1, &net).security(key).connections(limits).start().await.unwrap();
    let silent = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let offered = async |name: &str, block, listener: &std::net::TcpListener| {
        let told = Address::Tcp(listener.local_addr().unwrap());
        let p = engine(name, 1, &net).listen(Address::loopback(0)).advertise(told).start().await.unwrap();
        p.offer(offer(block)).await.unwrap()
    };
    let (first, second) = (silent(), silent());
    let _pull = d.pull(offered("p", 1, &first).await, wish(1)).await.unwrap();
    let spec = PullSpec { deadline: Duration::from_millis(300), ..wish(2) };
    let why = d.pull(offered("q", 2, &second).await, spec).await.unwrap().await.unwrap_err().to_string();
    assert!(why.contains("1 links are being made, which is the limit"), "{why}");
}

#[tokio::test]
async fn silent_clients_are_dropped_in_time_and_the_oldest_first() {
    let net = MemNetwork::new(13);
    let p = engine("p", 1, &net)
        .listen(Address::loopback(0))
        .handshake_timeout(Duration::from_millis(300))
        .connections(ConnectionLimits { strangers: 4, ..ConnectionLimits::default() })
        .start()
        .await
        .unwrap();
    let at = socket(&p);
    let silent = move || {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut answer = Vec::new();
        drop(stream.read_to_end(&mut answer));
    };
    tokio::task::spawn_blocking(silent).await.unwrap();
    // More of them than are let in at a time.
    let crowd: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(at).unwrap()).collect();
    let d = engine("d", 1, &net).start().await.unwrap();
    moves(&p, &d, 1).await;
    drop(crowd);
    assert!(p.snapshot().await.unwrap().links.len() <= 5);
}
