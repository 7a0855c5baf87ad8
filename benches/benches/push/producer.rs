//! The engine that has the bytes: in this process, or in one of its own that does what it is told to, a line at a time.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use kvferry::{Address, Engine, ItemId, OfferSpec, OfferStream, Reference, SrcGroup, TokenRange, Tokens};
use kvferry_benches::engines::listed;
use kvferry_benches::measure::cpu;
use tempfile::TempDir;

use crate::side::{Cache, Order, SOURCE, ids, paint};
use crate::{KEY, model, shared_clock};

/// Tells a process that it is one.
pub(crate) const CACHE: &str = "KVFERRY_BENCH_CACHE";
const SOCKET: &str = "KVFERRY_BENCH_SOCKET";

pub(crate) enum Producer {
    Here(Engine, Cache),
    Apart(Apart),
}

pub(crate) struct Apart {
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
    _folder: TempDir,
}

impl Producer {
    pub(crate) async fn here(cache: Cache) -> Self {
        let memory = cache.memory();
        paint(&memory);
        let engine = cache
            .engine("p", memory)
            .listen(format!("memory:push-{}", cache.width).parse().unwrap())
            .start()
            .await
            .unwrap();
        Self::Here(engine, cache)
    }

    pub(crate) fn apart(cache: Cache) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(CACHE, cache.to_string())
            .env(SOCKET, folder.path().join("p.sock"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut apart = Apart { child, asks, answers, _folder: folder };
        // When its memory is painted.
        apart.ask("cpu");
        Self::Apart(apart)
    }

    /// Offers so many blocks; gives the reference, and when it began to.
    pub(crate) async fn offer(&mut self, order: Order, blocks: u32) -> (u64, Reference) {
        match self {
            Self::Here(engine, cache) => offer(engine, *cache, order, blocks).await,
            Self::Apart(apart) => {
                let answer = apart.ask(&format!("offer {order:?} {blocks}"));
                let (at, reference) = answer.split_once(' ').unwrap();
                (at.parse().unwrap(), reference.parse().unwrap())
            }
        }
    }

    /// CPU time of its process so far, if it has one of its own.
    pub(crate) fn cpu(&mut self) -> Duration {
        match self {
            Self::Here(..) => Duration::ZERO,
            Self::Apart(apart) => Duration::from_nanos(apart.ask("cpu").parse().unwrap()),
        }
    }
}

impl Apart {
    fn ask(&mut self, what: &str) -> String {
        tokio::task::block_in_place(|| {
            writeln!(self.asks, "{what}").unwrap();
            let mut answer = String::new();
            self.answers.read_line(&mut answer).unwrap();
            assert!(answer.ends_with('\n'), "the producer is gone");
            answer.trim_end().to_owned()
        })
    }

    /// Announces so many blocks.
    pub(crate) fn announce(&mut self, blocks: u32) -> Reference {
        self.ask(&format!("announce {blocks}")).parse().unwrap()
    }

    /// Lets a prefill of what was announced run by the compute model, telling of its layers or not, and seals it; gives when the last layer
    /// was done. Who tells of nothing doesn't wait either.
    pub(crate) fn prefill(&mut self, told: bool) -> u64 {
        self.ask(&format!("prefill {told}")).parse().unwrap()
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn blocks_of(cache: Cache, order: Order, blocks: u32) -> Vec<SrcGroup> {
    listed(&ids(order, blocks, cache.blocks(), SOURCE))
}

async fn offer(engine: &Engine, cache: Cache, order: Order, blocks: u32) -> (u64, Reference) {
    let at = shared_clock();
    let groups = blocks_of(cache, order, blocks);
    (at, engine.offer(OfferSpec::new(groups, KEY)).await.unwrap())
}

/// What a process of its own does.
pub(crate) async fn serve() {
    let cache: Cache = std::env::var(CACHE).unwrap().parse().unwrap();
    let address: Address = format!("unix:{}", std::env::var(SOCKET).unwrap()).parse().unwrap();
    let memory = cache.memory();
    paint(&memory);
    let engine = cache.engine("p", memory).listen(address).start().await.unwrap();
    let mut open: Option<(OfferStream, Vec<SrcGroup>, u64)> = None;
    let mut lines = std::io::stdin().lines();
    while let Some(Ok(line)) = tokio::task::block_in_place(|| lines.next()) {
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["cpu"] => cpu().as_nanos().to_string(),
            ["offer", order, blocks] => {
                let order = if order == "InARow" { Order::InARow } else { Order::Scattered };
                let (at, reference) = offer(&engine, cache, order, blocks.parse().unwrap()).await;
                format!("{at} {reference}")
            }
            ["announce", blocks] => {
                let groups = blocks_of(cache, Order::Scattered, blocks.parse().unwrap());
                let stream = engine.announce(OfferSpec::new(groups.clone(), KEY)).await.unwrap();
                let reference = stream.reference().to_string();
                let tokens = blocks.parse::<u64>().unwrap() * cache.block;
                open = Some((stream, groups, tokens));
                reference
            }
            ["prefill", told] => {
                let (stream, groups, tokens) = open.take().unwrap();
                prefill(cache, stream, groups, tokens, told == "true").await.to_string()
            }
            _ => unreachable!("{line}"),
        };
        println!("{answer}");
        std::io::stdout().flush().unwrap();
    }
    std::process::exit(0);
}

async fn prefill(cache: Cache, mut stream: OfferStream, groups: Vec<SrcGroup>, tokens: u64, told: bool) -> u64 {
    let began = shared_clock();
    let each = model::layer(0, tokens);
    let mut end = began;
    for layer in (0..cache.layers).filter(|_| told) {
        let due = Duration::from_nanos(began) + each * (layer + 1);
        let wait = due.saturating_sub(Duration::from_nanos(shared_clock()));
        // A thread's sleep: a runtime's timer has a grain of a millisecond.
        tokio::task::spawn_blocking(move || std::thread::sleep(wait)).await.unwrap();
        end = shared_clock();
        let range = TokenRange::new(Tokens::ZERO, Tokens::new(tokens));
        stream.region_ready(ItemId::new(layer), range).await.unwrap();
    }
    stream.seal(groups).await.unwrap();
    end
}
