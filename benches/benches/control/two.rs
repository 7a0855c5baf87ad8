//! Requests between two processes. Beside the engines stands what only sends as many bytes to and fro, which is what the machine can
//! do.
//!
//! The process of the producer offers what it is told to through a pipe, a place a line, and answers with references. Both ends read
//! in tasks: a thread that waits for a pipe would cost each request two more wake-ups.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvferry::{Address, Engine, OfferSpec};
use kvferry_benches::engines::listed;
use kvferry_benches::measure::cpu;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::{KEY, Run, at_once, at_rate, engine, free_slots, ids, peers, pull};

/// Bytes of the frames of a request as the engines of this bench write them, without the two of length that [`frame`] puts before:
/// bind, its answer, release, its answer.
const FRAMES: [usize; 4] = [108, 106, 44, 44];
/// Bytes of a reference.
const REFERENCE: usize = 110;

/// Whoever gets what was offered.
pub(super) enum Consumer {
    Engine(Arc<Engine>),
    /// Only sends as much to and fro.
    Echo(Echo),
}

impl Consumer {
    /// Deals with a place that was offered.
    async fn get(&self, slot: usize, offered: &str) {
        match self {
            Self::Engine(engine) => pull(engine, offered.parse().unwrap(), slot).await,
            Self::Echo(echo) => {
                echo.ask(slot, 0).await;
                echo.ask(slot, 2).await;
            }
        }
    }
}

/// The producer in a process of its own.
pub(super) struct Producer {
    child: Child,
    asks: OwnedFd,
    /// Called with each place, when it was offered, and its reference.
    on_offered: Arc<Mutex<Option<OnOffered>>>,
}

type OnOffered = Box<dyn FnMut(usize, u64, String) + Send>;

impl Producer {
    /// `role` is that of an engine or of the echo.
    pub(super) fn start(role: &str, address: &str, security: &str, secrets: &peers::Secrets) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env("KVFERRY_BENCH_ROLE", role)
            .env("KVFERRY_BENCH_ADDRESS", address)
            .env("KVFERRY_BENCH_SECURITY", security)
            .env("KVFERRY_BENCH_SECRETS", secrets.folder())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, out) = (child.stdin.take().unwrap().into(), child.stdout.take().unwrap());
        let out = pipe::Receiver::from_owned_fd(out.into()).unwrap();
        let on_offered: Arc<Mutex<Option<OnOffered>>> = Arc::default();
        let told = on_offered.clone();
        tokio::spawn(each_line(out, move |line| {
            let mut words = line.splitn(3, ' ');
            let (slot, since, offered) = (words.next(), words.next(), words.next().unwrap());
            let (slot, since) = (slot.unwrap().parse().unwrap(), since.unwrap().parse().unwrap());
            told.lock().unwrap().as_mut().unwrap()(slot, since, offered.into());
        }));
        Self { child, asks, on_offered }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Latency counts from the offer at the producer, and has the reference's way through a pipe in it.
    pub(super) async fn run(&mut self, consumer: &Arc<Consumer>, rate: Option<f64>, time: Duration) -> Run {
        let (done, free) = free_slots();
        let latency = Arc::new(Mutex::new(Vec::new()));
        let theirs = peers::cpu_of(self.child.id());
        let (began, before) = (Instant::now(), cpu());
        let (consumer, all) = (consumer.clone(), latency.clone());
        *self.on_offered.lock().unwrap() = Some(Box::new(move |slot, since, offered| {
            let (consumer, all, done) = (consumer.clone(), all.clone(), done.clone());
            tokio::spawn(async move {
                consumer.get(slot, &offered).await;
                let took = Duration::from_nanos(shared_clock().saturating_sub(since));
                all.lock().unwrap().push(took);
                done.send(slot).unwrap();
            });
        }));
        let mut asks = File::from(self.asks.try_clone().unwrap());
        let pace = move || {
            let mut lines = Vec::new();
            let ask = |slots: &mut Vec<usize>| {
                slots.drain(..).for_each(|slot| writeln!(lines, "{slot}").unwrap());
                asks.write_all(&lines).unwrap();
                lines.clear();
            };
            match rate {
                Some(rate) => at_rate(rate, time, &free, ask),
                None => at_once(time, &free, ask),
            }
        };
        tokio::task::spawn_blocking(pace).await.unwrap();
        let took = began.elapsed();
        let cpu = cpu().saturating_sub(before) + peers::cpu_of(self.child.id()).saturating_sub(theirs);
        *self.on_offered.lock().unwrap() = None;
        let latency = std::mem::take(&mut *latency.lock().unwrap());
        Run { requests: latency.len() as u64, took, cpu, latency }
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Nanoseconds of a clock that all processes share.
fn shared_clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap()
}

/// The process of the producer, an engine.
pub(super) async fn engine_of_producer() {
    let address: Address = std::env::var("KVFERRY_BENCH_ADDRESS").unwrap().parse().unwrap();
    let security = peers::security_of_child();
    let engine = Arc::new(engine("p", 1).listen(address).security(security).start().await.unwrap());
    let tell = writer(pipe::Sender::from_owned_fd(std::io::stdout().as_fd().try_clone_to_owned().unwrap()).unwrap());
    each_ask(move |slot| {
        let (engine, tell) = (engine.clone(), tell.clone());
        tokio::spawn(async move {
            let since = shared_clock();
            let reference = engine.offer(OfferSpec::new(listed(&ids(slot)), KEY)).await.unwrap();
            tell.send(format!("{slot} {since} {reference}\n").into_bytes()).unwrap();
        });
    })
    .await;
}

/// The process of the producer where it only answers.
pub(super) async fn echo_of_producer() {
    let listener = UnixListener::bind(std::env::var("KVFERRY_BENCH_ADDRESS").unwrap()).unwrap();
    tokio::spawn(async move {
        let (read, write) = listener.accept().await.unwrap().0.into_split();
        let answer = writer(write);
        each_frame(read, |slot, kind| answer.send(frame(slot, kind + 1)).unwrap()).await;
    });
    let tell = writer(pipe::Sender::from_owned_fd(std::io::stdout().as_fd().try_clone_to_owned().unwrap()).unwrap());
    let reference = "-".repeat(REFERENCE);
    each_ask(|slot| tell.send(format!("{slot} {} {reference}\n", shared_clock()).into_bytes()).unwrap()).await;
}

/// Calls for each place that is asked for, until nobody can ask any more.
async fn each_ask(mut of: impl FnMut(usize)) {
    let asked = pipe::Receiver::from_owned_fd(std::io::stdin().as_fd().try_clone_to_owned().unwrap()).unwrap();
    each_line(asked, |line| of(line.parse().unwrap())).await;
}

/// Calls for each line that comes through a pipe, until it ends.
async fn each_line(from: pipe::Receiver, mut of: impl FnMut(&str)) {
    let (mut from, mut line) = (BufReader::new(from), String::new());
    while from.read_line(&mut line).await.unwrap() > 0 {
        of(line.trim_end());
        line.clear();
    }
}

/// A task that writes what it is given, all that waits at once.
fn writer(mut to: impl AsyncWriteExt + Send + Unpin + 'static) -> UnboundedSender<Vec<u8>> {
    let (tell, mut pieces): (_, UnboundedReceiver<Vec<u8>>) = unbounded_channel();
    tokio::spawn(async move {
        while let Some(mut some) = pieces.recv().await {
            while let Ok(mut piece) = pieces.try_recv() {
                some.append(&mut piece);
            }
            // The other process may have been told to end.
            if to.write_all(&some).await.is_err() {
                return;
            }
        }
    });
    tell
}

/// The consumer's end of what only sends to and fro: tasks, a socket, nothing of ours.
pub(super) struct Echo {
    tell: UnboundedSender<Vec<u8>>,
    waiting: Arc<Mutex<HashMap<usize, oneshot::Sender<()>>>>,
}

impl Echo {
    pub(super) async fn connect(address: &str) -> Self {
        let stream = loop {
            match UnixStream::connect(address).await {
                Ok(stream) => break stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        let (read, write) = stream.into_split();
        let waiting: Arc<Mutex<HashMap<usize, oneshot::Sender<()>>>> = Arc::default();
        let waiters = waiting.clone();
        tokio::spawn(each_frame(read, move |slot, _| {
            let waiter = waiters.lock().unwrap().remove(&slot).unwrap();
            waiter.send(()).unwrap();
        }));
        Self { tell: writer(write), waiting }
    }

    async fn ask(&self, slot: usize, kind: usize) {
        let (answered, answer) = oneshot::channel();
        self.waiting.lock().unwrap().insert(slot, answered);
        self.tell.send(frame(slot, kind)).unwrap();
        answer.await.unwrap();
    }
}

/// The `kind`-th frame of a request: its length, its place, its kind, and as many bytes as are still wanted.
fn frame(slot: usize, kind: usize) -> Vec<u8> {
    let mut frame = vec![0; FRAMES[kind]];
    frame[..2].copy_from_slice(&u16::try_from(slot).unwrap().to_le_bytes());
    frame[2] = u8::try_from(kind).unwrap();
    [&u16::try_from(frame.len()).unwrap().to_le_bytes()[..], &frame].concat()
}

/// Calls for each frame, until there are no more.
async fn each_frame(mut from: impl AsyncReadExt + Unpin, mut of: impl FnMut(usize, usize)) {
    let (mut buffer, mut filled) = (vec![0; 64 << 10], 0);
    loop {
        match from.read(&mut buffer[filled..]).await {
            Ok(0) | Err(_) => return,
            Ok(n) => filled += n,
        }
        let mut at = 0;
        while let Some(len) = buffer[at..filled].first_chunk().map(|&len| usize::from(u16::from_le_bytes(len)))
            && at + 2 + len <= filled
        {
            let frame = &buffer[at + 2..];
            of(usize::from(u16::from_le_bytes([frame[0], frame[1]])), frame[2].into());
            at += 2 + len;
        }
        buffer.copy_within(at..filled, 0);
        filled -= at;
    }
}
