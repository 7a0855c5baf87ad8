//! The control plane: what everything costs but the moving of bytes.
//!
//! | part | what is measured |
//! |---|---|
//! | `requests` | requests a second and the time from offer to delivery, with a transport that is done at once: both engines in one process that meet in memory; then in two processes over a Unix socket, TCP, and TCP with TLS or a shared key; each at its limit and at half of it; beside that over the Unix socket, what only sends as many bytes to and fro |
//! | `peers` | handshakes a second, and memory for each connected peer that asks for nothing, for 1, 100 and 1,000; to be run alone, as after `requests` peers live in memory that those have left |
//! | `contact` | first contact of engines with 100,000 blocks x 100 regions x 8 ranks over TCP on loopback |
//! | `fair` | 16 MiB requests alone and beside one of 4 GiB, over shared memory |
//!
//! `KVFERRY_BENCH_ONLY=requests,peers` chooses, and `KVFERRY_BENCH_OF=memory,unix,tcp,tls,key` among the requests.
//! `KVFERRY_BENCH_SECONDS` is the time of one measurement (default 3), `KVFERRY_BENCH_BESIDE_MIB` the length of the long request
//! (default 4096). System calls are counted with `perf` where it may.
//! `--features mimalloc` measures with that allocator instead of the system's.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvferry::secure::{Material, Security, SharedKeyOptions, TlsOptions};
use kvferry::{Assurance, ContentKey, Engine, EngineBuilder, EngineId, OfferSpec, PullSpec, Reference, Tokens};
use kvferry_benches::engines::{listed, shape, wanted};
use kvferry_benches::instant::Instant as InstantTransport;
use kvferry_benches::measure::{cpu, median, number, quantile};
use kvferry_transport::{Region, Transport};
use tokio::runtime::Handle;

mod fair;
mod peers;
mod two;

#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const KEY: ContentKey = ContentKey::from_bytes([7; 32]);
/// Requests under way at the limit, and blocks of one.
const WINDOW: usize = 512;
const BLOCKS: usize = 3;
/// How often it is looked which requests are due, at a rate.
const TICK: Duration = Duration::from_micros(200);

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match std::env::var("KVFERRY_BENCH_ROLE").as_deref() {
        Ok("producer") => return runtime.block_on(two::engine_of_producer()),
        Ok("echo") => return runtime.block_on(two::echo_of_producer()),
        Ok("peers") => return peers::child(),
        _ => {}
    }
    let only = std::env::var("KVFERRY_BENCH_ONLY").unwrap_or_default();
    let wanted = |part: &str| only.is_empty() || only.split(',').any(|o| o == part);
    if wanted("requests") {
        // On a worker: what another thread begins has to be handed over.
        runtime.block_on(async { tokio::spawn(requests()).await.unwrap() });
    }
    if wanted("peers") {
        runtime.block_on(peers::run());
    }
    if wanted("contact") {
        runtime.block_on(peers::first_contact());
    }
    if wanted("fair") {
        runtime.block_on(fair::run());
    }
}

fn seconds() -> Duration {
    Duration::from_secs(number("KVFERRY_BENCH_SECONDS", 3) as u64)
}

/// An engine of one rank with room for all requests under way, on the transport that is done at once.
fn engine(id: &str, name: u128) -> EngineBuilder {
    let blocks = u32::try_from(2 * WINDOW * BLOCKS).unwrap();
    let (spec, groups, ranks) = shape(2, 32, 1, blocks);
    let mut builder = Engine::builder(EngineId::new(id).unwrap(), spec, groups);
    for manifest in ranks {
        let len = |r: &kvferry_geometry::layout::Region| usize::try_from(r.len.get()).unwrap();
        let memory = manifest.layout.regions.iter().map(|r| Region::zeroed(len(r)).unwrap()).collect();
        let transport: Box<dyn Transport> = Box::new(InstantTransport::new(name));
        builder = builder.rank(manifest, memory, transport);
    }
    builder
}

fn ids(slot: usize) -> Vec<u32> {
    let first = u32::try_from(slot * BLOCKS).unwrap();
    vec![first, first + 2, first + 1]
}

fn tokens() -> u64 {
    BLOCKS as u64 * kvferry_benches::engines::BLOCK
}

async fn pull(engine: &Engine, reference: Reference, slot: usize) {
    let mut spec = PullSpec::new(Tokens::new(tokens()), wanted(&ids(slot)), KEY);
    spec.assurance = Assurance::Fenced;
    engine.pull(reference, spec).await.unwrap().await.unwrap();
}

/// What a run came to.
struct Run {
    requests: u64,
    took: Duration,
    cpu: Duration,
    latency: Vec<Duration>,
}

impl Run {
    fn rate(&self) -> f64 {
        self.requests as f64 / self.took.as_secs_f64()
    }

    fn each(&self, what: f64) -> f64 {
        what / self.requests.max(1) as f64
    }
}

/// Counts system calls of processes while something is measured, where `perf` may.
struct Calls(Child);

impl Calls {
    /// Counts once it has had time to attach itself.
    async fn start(pids: &[u32]) -> Option<Self> {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        let child = Command::new("perf")
            .args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", &pids.join(",")])
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        let calls = Self(child.ok()?);
        tokio::time::sleep(Duration::from_millis(300)).await;
        Some(calls)
    }

    fn stop(self) -> Option<u64> {
        let child = self.0;
        let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).ok()?)?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT).ok()?;
        let out = child.wait_with_output().ok()?;
        let text = String::from_utf8_lossy(&out.stderr);
        text.lines().find(|l| l.contains("sys_enter"))?.split(',').next()?.parse().ok()
    }
}

/// What is measured: two engines, or what stands beside them.
enum Sides {
    OneProcess { p: Arc<Engine>, d: Arc<Engine> },
    Two(two::Producer, Arc<two::Consumer>),
}

impl Sides {
    async fn run(&mut self, rate: Option<f64>, time: Duration) -> Run {
        match self {
            Self::OneProcess { p, d } => in_process(p, d, rate, time).await,
            Self::Two(producer, consumer) => producer.run(consumer, rate, time).await,
        }
    }

    /// A row of the table; gives the rate. System calls are counted in a run of their own, as that makes each of them slower.
    async fn row(&mut self, what: &str, load: &str, rate: Option<f64>) -> f64 {
        let mut run = self.run(rate, seconds()).await;
        let mut pids = vec![std::process::id()];
        if let Self::Two(producer, _) = self {
            pids.push(producer.pid());
        }
        let mut calls = None;
        if let Some(counting) = Calls::start(&pids).await {
            let counted = self.run(rate, seconds() / 3).await;
            calls = counting.stop().map(|n| counted.each(n as f64));
        }
        let calls = calls.map_or("-".into(), |n| format!("{n:.2}"));
        run.latency.sort();
        let at = |per_mille| quantile(&run.latency, per_mille) * 1e6;
        let (p50, p99, cpu) = (at(500), at(990), run.each(run.cpu.as_secs_f64() * 1e6));
        println!("| {what} | {load} | {:.0} | {p50:.0} us | {p99:.0} us | {cpu:.1} us | {calls} |", run.rate());
        run.rate()
    }
}

async fn requests() {
    println!(
        "requests of {BLOCKS} blocks, one rank an engine, a transport that is done at once, assurance fenced; CPU of all processes;"
    );
    println!("4 frames between the owners for each (bind, its answer, release, its answer) besides heartbeats\n");
    println!(
        "| engines | load | requests/s | p50 | p99 | CPU a request | system calls a request |\n|---|---|---|---|---|---|---|"
    );
    let of = std::env::var("KVFERRY_BENCH_OF").unwrap_or_default();
    let wanted = |what: &str| of.is_empty() || of.split(',').any(|o| o == what);
    let folder = tempfile::tempdir().unwrap();
    let socket = |name: &str| folder.path().join(name).display().to_string();
    let secrets = peers::Secrets::new();
    let mut beside = None;
    for (kind, what, address, security) in [
        ("memory", "one process, in memory", "memory:bench".into(), "none"),
        ("unix", "two processes, Unix socket", format!("unix:{}", socket("p.sock")), "none"),
        ("tcp", "two processes, TCP", "tcp:127.0.0.1:0".into(), "none"),
        ("tls", "two processes, TCP with TLS", "tcp:127.0.0.1:0".into(), "tls"),
        ("key", "two processes, TCP with a shared key", "tcp:127.0.0.1:0".into(), "key"),
    ] {
        if !wanted(kind) {
            continue;
        }
        let d = Arc::new(engine("d", 2).security(secrets.security(security, "d")).start().await.unwrap());
        let mut sides = if kind == "memory" {
            Sides::OneProcess { p: Arc::new(engine("p", 1).listen(address.parse().unwrap()).start().await.unwrap()), d }
        } else {
            let producer = two::Producer::start("producer", &address, security, &secrets);
            Sides::Two(producer, Arc::new(two::Consumer::Engine(d)))
        };
        // Once, so that the engines have met.
        drop(sides.run(None, Duration::from_millis(500)).await);
        let half = sides.row(what, "full", None).await / 2.0;
        sides.row(what, "half", Some(half)).await;
        if kind == "unix" {
            beside = Some(half);
        }
    }
    // At the rate of the engines, so that it stands beside them.
    if let Some(half) = beside {
        let address = socket("echo.sock");
        let producer = two::Producer::start("echo", &address, "none", &secrets);
        let mut sides = Sides::Two(producer, Arc::new(two::Consumer::Echo(two::Echo::connect(&address).await)));
        drop(sides.run(None, Duration::from_millis(500)).await);
        let what = "two processes, Unix socket: as many bytes to and fro, nothing else";
        sides.row(what, "full", None).await;
        sides.row(what, "half of the engines'", Some(half)).await;
    }
    println!();
}

/// Requests in one process: as many as there are places for, each place one after the other, or at a rate.
async fn in_process(p: &Arc<Engine>, d: &Arc<Engine>, rate: Option<f64>, time: Duration) -> Run {
    let (began, before) = (Instant::now(), cpu());
    let latency = match rate {
        None => {
            let each = |slot| {
                let (p, d) = (p.clone(), d.clone());
                tokio::spawn(async move {
                    let mut latency = Vec::new();
                    while began.elapsed() < time {
                        latency.push(once(&p, &d, slot).await);
                    }
                    latency
                })
            };
            let places: Vec<_> = (0..WINDOW).map(each).collect();
            let mut latency = Vec::new();
            for place in places {
                latency.extend(place.await.unwrap());
            }
            latency
        }
        Some(rate) => {
            let (done, free) = free_slots();
            let latency = Arc::new(Mutex::new(Vec::new()));
            let (p, d, all, runtime) = (p.clone(), d.clone(), latency.clone(), Handle::current());
            let pace = move || {
                at_rate(rate, time, &free, |slots| {
                    for slot in slots.drain(..) {
                        let (p, d, all, done) = (p.clone(), d.clone(), all.clone(), done.clone());
                        runtime.spawn(async move {
                            let took = once(&p, &d, slot).await;
                            all.lock().unwrap().push(took);
                            done.send(slot).unwrap();
                        });
                    }
                });
            };
            tokio::task::spawn_blocking(pace).await.unwrap();
            std::mem::take(&mut *latency.lock().unwrap())
        }
    };
    let (took, cpu) = (began.elapsed(), cpu().saturating_sub(before));
    Run { requests: latency.len() as u64, took, cpu, latency }
}

async fn once(p: &Engine, d: &Engine, slot: usize) -> Duration {
    let from = Instant::now();
    let reference = p.offer(OfferSpec::new(listed(&ids(slot)), KEY)).await.unwrap();
    pull(d, reference, slot).await;
    from.elapsed()
}

fn free_slots() -> (Sender<usize>, Receiver<usize>) {
    let (done, free) = channel();
    (0..WINDOW).for_each(|slot| done.send(slot).unwrap());
    (done, free)
}

/// Hands over the places of the requests that are due, on a thread of its own since a runtime's timer has a grain of a
/// millisecond; until the time is up and all places are free again.
fn at_rate(rate: f64, time: Duration, free: &Receiver<usize>, mut begin: impl FnMut(&mut Vec<usize>)) {
    let (began, mut begun, mut some) = (Instant::now(), 0.0, Vec::new());
    while began.elapsed() < time {
        std::thread::sleep(TICK);
        let due = began.elapsed().as_secs_f64() * rate;
        while begun < due
            && let Ok(slot) = free.try_recv()
        {
            begun += 1.0;
            some.push(slot);
        }
        begin(&mut some);
    }
    for _ in 0..WINDOW {
        free.recv().unwrap();
    }
}

/// The same, each as soon as its place is free.
fn at_once(time: Duration, free: &Receiver<usize>, mut begin: impl FnMut(&mut Vec<usize>)) {
    let (began, mut some) = (Instant::now(), Vec::new());
    let mut open = WINDOW;
    while open > 0 {
        some.push(free.recv().unwrap());
        some.extend(free.try_iter());
        if began.elapsed() < time {
            begin(&mut some);
        } else {
            open -= some.len();
            some.clear();
        }
    }
}

/// Used by parts of this bench.
fn of_key(id: &str, bytes: [u8; 32]) -> Security {
    SharedKeyOptions::builder(id, Material::bytes(bytes)).build().unwrap().into()
}

fn of_tls(roots: Material, certificate: Material, key: Material) -> Security {
    TlsOptions::builder(roots, certificate, key).build().unwrap().into()
}

fn print_median(times: Vec<Duration>) -> String {
    format!("{:.2} ms", median(times) * 1e3)
}
