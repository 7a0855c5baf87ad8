//! The control plane: what everything costs but the moving of bytes.
//!
//! | part | what is measured |
//! |---|---|
//! | `requests` | requests a second and the time from offer to delivery, with a transport that is done at once: both engines in one process that meet in memory; then in two processes over a Unix socket, TCP, and TCP with TLS or a shared key; each at its limit and at half of it |
//! | `peers` | handshakes a second, and memory for each connected peer that asks for nothing, for 1, 100 and 1,000 |
//! | `contact` | first contact of engines with 100,000 blocks x 100 regions x 8 ranks over TCP on loopback |
//! | `fair` | 16 MiB requests alone and beside one of 4 GiB, over shared memory |
//!
//! `KVFERRY_BENCH_ONLY=requests,peers` chooses; `KVFERRY_BENCH_SECONDS` is the time of one measurement (default 3),
//! `KVFERRY_BENCH_BESIDE_MIB` the length of the long request (default 4096). System calls are counted with `perf` where it may.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvferry::secure::{Material, Security, SharedKeyOptions, TlsOptions};
use kvferry::{
    Address, Assurance, ContentKey, Engine, EngineBuilder, EngineId, OfferSpec, PullSpec, Reference, Tokens,
};
use kvferry_benches::engines::{listed, shape, wanted};
use kvferry_benches::instant::Instant as InstantTransport;
use kvferry_benches::measure::{cpu, median, number, quantile};
use kvferry_transport::{Region, Transport};
use tokio::sync::{Semaphore, mpsc};

mod fair;
mod peers;

const KEY: ContentKey = ContentKey::from_bytes([7; 32]);
/// Requests under way at the limit, and blocks of one.
const WINDOW: usize = 512;
const BLOCKS: usize = 3;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match std::env::var("KVFERRY_BENCH_ROLE").as_deref() {
        Ok("producer") => return runtime.block_on(producer()),
        Ok("peers") => return peers::child(),
        _ => {}
    }
    let only = std::env::var("KVFERRY_BENCH_ONLY").unwrap_or_default();
    let wanted = |part: &str| only.is_empty() || only.split(',').any(|o| o == part);
    if wanted("requests") {
        runtime.block_on(requests());
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
    calls: Option<u64>,
}

impl Run {
    fn rate(&self) -> f64 {
        self.requests as f64 / self.took.as_secs_f64()
    }

    fn print(mut self, what: &str, load: &str) {
        self.latency.sort();
        let at = |per_mille| quantile(&self.latency, per_mille) * 1e6;
        let (p50, p99) = (at(500), at(990));
        let cpu = self.cpu.as_secs_f64() * 1e6 / self.requests.max(1) as f64;
        let calls = self.calls.map_or("-".into(), |n| format!("{:.2}", n as f64 / self.requests.max(1) as f64));
        println!("| {what} | {load} | {:.0} | {p50:.0} us | {p99:.0} us | {cpu:.1} us | {calls} |", self.rate());
    }
}

/// Counts system calls of processes while something is measured, where `perf` may.
struct Calls(Option<Child>);

impl Calls {
    fn start(pids: &[u32]) -> Self {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        let child = Command::new("perf")
            .args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", &pids.join(",")])
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        Self(child.ok())
    }

    fn stop(self) -> Option<u64> {
        let child = self.0?;
        let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).ok()?)?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT).ok()?;
        let out = child.wait_with_output().ok()?;
        let text = String::from_utf8_lossy(&out.stderr);
        text.lines().find(|l| l.contains("sys_enter"))?.split(',').next()?.parse().ok()
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
    let p = Arc::new(engine("p", 1).listen("memory:bench".parse().unwrap()).start().await.unwrap());
    let d = Arc::new(engine("d", 2).start().await.unwrap());
    // Once, so that the engines have met.
    drop(in_process(&p, &d, None, Duration::from_millis(300)).await);
    let full = in_process(&p, &d, None, seconds()).await;
    let half = full.rate() / 2.0;
    full.print("one process, in memory", "full");
    in_process(&p, &d, Some(half), seconds()).await.print("one process, in memory", "half");
    drop((p, d));
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("p.sock").display());
    let secrets = peers::Secrets::new();
    for (what, address, security) in [
        ("two processes, Unix socket", socket.as_str(), "none"),
        ("two processes, TCP", "tcp:127.0.0.1:0", "none"),
        ("two processes, TCP with TLS", "tcp:127.0.0.1:0", "tls"),
        ("two processes, TCP with a shared key", "tcp:127.0.0.1:0", "key"),
    ] {
        let d = Arc::new(engine("d", 2).security(secrets.security(security, "d")).start().await.unwrap());
        let mut producer = Producer::start(address, security, &secrets);
        drop(producer.run(&d, None, Duration::from_millis(500)).await);
        let full = producer.run(&d, None, seconds()).await;
        let half = full.rate() / 2.0;
        full.print(what, "full");
        producer.run(&d, Some(half), seconds()).await.print(what, "half");
    }
    println!();
}

/// Requests in one process: as many as there are places for, or at a rate.
async fn in_process(p: &Arc<Engine>, d: &Arc<Engine>, rate: Option<f64>, time: Duration) -> Run {
    let (slots, latency) = (Arc::new(Mutex::new((0..WINDOW).collect::<Vec<_>>())), Arc::new(Mutex::new(Vec::new())));
    let places = Arc::new(Semaphore::new(WINDOW));
    let calls = Calls::start(&[std::process::id()]);
    let (began, before) = (Instant::now(), cpu());
    let mut begun = 0u64;
    while began.elapsed() < time {
        pace(rate, began, begun).await;
        let place = places.clone().acquire_owned().await.unwrap();
        let (p, d, slots, latency) = (p.clone(), d.clone(), slots.clone(), latency.clone());
        begun += 1;
        tokio::spawn(async move {
            let slot = slots.lock().unwrap().pop().unwrap();
            let from = Instant::now();
            let reference = p.offer(OfferSpec::new(listed(&ids(slot)), KEY)).await.unwrap();
            pull(&d, reference, slot).await;
            latency.lock().unwrap().push(from.elapsed());
            slots.lock().unwrap().push(slot);
            drop(place);
        });
    }
    drop(places.acquire_many(u32::try_from(WINDOW).unwrap()).await.unwrap());
    let (took, cpu) = (began.elapsed(), cpu().saturating_sub(before));
    let latency = std::mem::take(&mut *latency.lock().unwrap());
    Run { requests: begun, took, cpu, latency, calls: calls.stop() }
}

/// Waits until the next request is due.
async fn pace(rate: Option<f64>, began: Instant, begun: u64) {
    let Some(rate) = rate else { return };
    let due = Duration::from_secs_f64(begun as f64 / rate);
    let early = due.saturating_sub(began.elapsed());
    // The timer's grain is a millisecond: what is due within one goes together.
    if early > Duration::from_millis(1) {
        tokio::time::sleep(early).await;
    }
}

/// The producer in a process of its own. It offers what it is told to, a slot a line, and answers with references.
struct Producer {
    child: Child,
    asks: ChildStdin,
    answers: mpsc::UnboundedReceiver<(usize, Reference)>,
}

impl Producer {
    fn start(address: &str, security: &str, secrets: &peers::Secrets) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env("KVFERRY_BENCH_ROLE", "producer")
            .env("KVFERRY_BENCH_ADDRESS", address)
            .env("KVFERRY_BENCH_SECURITY", security)
            .env("KVFERRY_BENCH_SECRETS", secrets.folder())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tell, answers) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let Some((slot, reference)) = line.split_once(' ') else { continue };
                if tell.send((slot.parse().unwrap(), reference.parse().unwrap())).is_err() {
                    return;
                }
            }
        });
        Self { child, asks, answers }
    }

    async fn run(&mut self, d: &Arc<Engine>, rate: Option<f64>, time: Duration) -> Run {
        let (done, mut free) = mpsc::unbounded_channel::<usize>();
        for slot in 0..WINDOW {
            done.send(slot).unwrap();
        }
        let latency = Arc::new(Mutex::new(Vec::new()));
        let theirs = peers::cpu_of(self.child.id());
        let calls = Calls::start(&[std::process::id(), self.child.id()]);
        let (began, before) = (Instant::now(), cpu());
        let mut asked: HashMap<usize, Instant> = HashMap::new();
        let (mut begun, ended, mut lines) = (0u64, Arc::new(AtomicU64::new(0)), Vec::new());
        loop {
            let open = began.elapsed() < time;
            let due = |begun: u64| rate.is_none_or(|r| began.elapsed().as_secs_f64() * r >= begun as f64);
            while open && due(begun) {
                let Ok(slot) = free.try_recv() else { break };
                asked.insert(slot, Instant::now());
                writeln!(lines, "{slot}").unwrap();
                begun += 1;
            }
            if !lines.is_empty() {
                self.asks.write_all(&lines).unwrap();
                self.asks.flush().unwrap();
                lines.clear();
            }
            if !open && ended.load(Ordering::Acquire) == begun {
                break;
            }
            let wait = tokio::time::timeout(Duration::from_micros(500), self.answers.recv()).await;
            let Ok(first) = wait else { continue };
            let mut next = first;
            while let Some((slot, reference)) = next {
                let from = asked.remove(&slot).unwrap();
                let (d, done, latency, ended) = (d.clone(), done.clone(), latency.clone(), ended.clone());
                tokio::spawn(async move {
                    pull(&d, reference, slot).await;
                    latency.lock().unwrap().push(from.elapsed());
                    ended.fetch_add(1, Ordering::Release);
                    let _ = done.send(slot);
                });
                next = self.answers.try_recv().ok();
            }
        }
        let took = began.elapsed();
        let cpu = cpu().saturating_sub(before) + peers::cpu_of(self.child.id()).saturating_sub(theirs);
        let latency = std::mem::take(&mut *latency.lock().unwrap());
        Run { requests: begun, took, cpu, latency, calls: calls.stop() }
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

async fn producer() {
    let address: Address = std::env::var("KVFERRY_BENCH_ADDRESS").unwrap().parse().unwrap();
    let security = peers::security_of_child();
    let engine = Arc::new(engine("p", 1).listen(address).security(security).start().await.unwrap());
    let (tell, mut asks) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if tell.send(line.parse::<usize>().unwrap()).is_err() {
                return;
            }
        }
        std::process::exit(0);
    });
    let mut batch = Vec::new();
    while asks.recv_many(&mut batch, WINDOW).await > 0 {
        let mut lines = Vec::new();
        for slot in batch.drain(..) {
            let reference = engine.offer(OfferSpec::new(listed(&ids(slot)), KEY)).await.unwrap();
            writeln!(lines, "{slot} {reference}").unwrap();
        }
        std::io::stdout().write_all(&lines).unwrap();
        std::io::stdout().flush().unwrap();
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
