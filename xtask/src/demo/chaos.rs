//! `demo --chaos`: ranks of the prefill engine are killed while they are read, or write, and started again.
//!
//! Which rank, and at which offer, follows from the seed. The request that makes this offer waits at its router until the prefill
//! engine has noticed the loss, so that each kill hits one request at least; what else is in flight is hit wherever it is. What has
//! failed is prefilled again on all ranks, with other bytes than before, offered anew and pulled into the same blocks: a byte of
//! an earlier life or of an earlier attempt would be seen at the end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use kvferry::{Assurance, CallError, Delivered, Epoch, ItemId, OfferError, OfferStream, PullError, RankId, Reference};
use kvferry_transport::conformance::sample::Rng;
use rustix::process::{Signal, kill_process};
use serde::Serialize;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::JOIN;
use super::args::Args;
use super::crew::Crew;
use super::scenario::{Layer, Role};
use super::service::Service;
use super::stream::announce;

/// From the offer to the kill, at most, in microseconds: what else is in flight goes on meanwhile.
const DELAY: u64 = 20_000;

/// How chaos went.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Chaos {
    /// With `KVFERRY_SEED` the same ranks are killed at the same offers.
    pub(crate) seed: u64,
    pub(crate) kills: Vec<Kill>,
    /// Requests that were delivered at their first attempt.
    pub(crate) untouched: u64,
    /// Requests that failed at least once, and were delivered in the end.
    pub(crate) repeated: u64,
    /// What must not be; nothing where all is right.
    pub(crate) faults: Vec<String>,
}

/// One kill.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Kill {
    pub(crate) rank: String,
    /// At which offer.
    pub(crate) offer: u64,
    /// From the signal until the engine had noticed.
    pub(crate) noticed_seconds: f64,
    /// From the signal until the engine was complete again.
    pub(crate) back_seconds: f64,
    /// The requests that it failed, by cause.
    pub(crate) failed: BTreeMap<&'static str, u64>,
    #[serde(skip)]
    epoch: Option<Epoch>,
}

impl Chaos {
    pub(crate) fn print(&self) {
        for (number, kill) in (1..).zip(&self.kills) {
            let failed: u64 = kill.failed.values().sum();
            let causes: Vec<String> = kill.failed.iter().map(|(cause, n)| format!("{n} {cause}")).collect();
            println!(
                "kill {number}: {} at offer {}; noticed after {:.1} ms, complete again after {:.2} s; {failed} failed by it ({})",
                kill.rank,
                kill.offer,
                kill.noticed_seconds * 1e3,
                kill.back_seconds,
                causes.join(", "),
            );
        }
        println!(
            "chaos: {} of {} requests failed, once by each kill at most, and were prefilled and pulled again; KVFERRY_SEED={}",
            self.repeated,
            self.repeated + self.untouched,
            self.seed
        );
        for fault in &self.faults {
            println!("fault: {fault}");
        }
    }
}

/// What is left when all requests are delivered.
pub(crate) struct Played {
    pub(crate) crew: Crew,
    pub(crate) delivered: Vec<Delivered>,
    /// Which computation of each request was delivered.
    pub(crate) turns: Vec<u32>,
    /// Fences that were answered *Stale*.
    pub(crate) stale: u64,
    pub(crate) chaos: Chaos,
}

/// The seed: `KVFERRY_SEED`, else a new one.
pub(crate) fn seed() -> anyhow::Result<u64> {
    use std::hash::{BuildHasher as _, Hasher as _};
    match std::env::var("KVFERRY_SEED") {
        Ok(text) => text.trim().parse().with_context(|| format!("KVFERRY_SEED is {text}, and must be a number")),
        Err(_) => Ok(std::collections::hash_map::RandomState::new().build_hasher().finish()),
    }
}

/// Plays all requests to their deliveries.
pub(crate) async fn play(args: &Args, service: &Arc<Service>, crew: Crew, seed: u64) -> anyhow::Result<Played> {
    let (life, _) = watch::channel(Life::Up);
    let stage = Arc::new(Stage {
        service: Arc::clone(service),
        crew: Arc::new(Mutex::new(crew)),
        at_a_time: Semaphore::new(args.concurrency.unwrap_or(args.requests) as usize),
        life,
        script: SyncMutex::new(Script::new(args, service.scenario.prefill.ranks().count(), seed)),
        restarts: SyncMutex::default(),
        layers: if args.stream.is_some() { service.scenario.layers() } else { Vec::new() },
        layer_time: args.layer_time(),
    });
    let mut playing = JoinSet::new();
    for request in 0..service.scenario.requests.len() {
        playing.spawn(deliver(Arc::clone(&stage), request));
    }
    let mut ended = Vec::new();
    let mut trouble = None;
    while let Some(one) = playing.join_next().await {
        match one? {
            Ok(one) => ended.push(one),
            Err(error) => {
                trouble.get_or_insert(error);
                playing.abort_all();
                break;
            }
        }
    }
    let restarts = std::mem::take(&mut *locked(&stage.restarts));
    for restart in restarts {
        // Why an engine is not complete again is better to know than what came of it.
        let patience = if trouble.is_some() { Duration::from_secs(1) } else { JOIN };
        if let Ok(ended) = tokio::time::timeout(patience, restart).await {
            ended??;
        }
    }
    if let Some(trouble) = trouble {
        return Err(trouble);
    }
    ended.sort_unstable_by_key(|e| e.request);
    let kills = std::mem::take(&mut locked(&stage.script).done);
    let chaos = judge(args, service, seed, kills, &ended).await?;
    let stage = Arc::into_inner(stage).context("a request is still played")?;
    let crew = Arc::into_inner(stage.crew).context("the ranks are still in use")?.into_inner();
    let stale = ended.iter().flat_map(|e| &e.failures).filter(|f| f.kind == "stale").count() as u64;
    let turns = ended.iter().map(|e| e.turn).collect();
    Ok(Played { crew, delivered: ended.into_iter().map(|e| e.delivered).collect(), turns, stale, chaos })
}

/// Whether the prefill engine is complete, as its scheduler knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Up,
    /// A rank was killed and is not back.
    Down,
    /// It will not come back.
    Over,
}

/// What the requests have in common.
struct Stage {
    service: Arc<Service>,
    crew: Arc<Mutex<Crew>>,
    at_a_time: Semaphore,
    life: watch::Sender<Life>,
    script: SyncMutex<Script>,
    restarts: SyncMutex<Vec<JoinHandle<anyhow::Result<()>>>>,
    /// What is announced one after the other; nothing where all is offered at once.
    layers: Vec<Layer>,
    layer_time: Duration,
}

/// Which ranks are killed when.
struct Script {
    offers: u64,
    /// From which offer on, which rank, and how long after it.
    next: VecDeque<(u64, RankId, Duration)>,
    /// A rank is being killed or has yet to come back.
    busy: bool,
    done: Vec<Kill>,
}

impl Script {
    fn new(args: &Args, ranks: usize, seed: u64) -> Self {
        let (mut rng, mut last) = (Rng::new(seed), 0);
        let (requests, kills) = (u64::from(args.requests), u64::from(args.kills));
        let one = |kill: u64| {
            // Spread over the requests. Each kill has a request offered once more, so that there always is a next offer.
            let (from, to) = (requests * kill / kills, requests * (kill + 1) / kills);
            last = (1 + from + rng.below((to - from).max(1))).max(last + 1);
            let rank = u32::try_from(rng.below(ranks as u64)).unwrap_or(0);
            (last, RankId::new(rank), Duration::from_micros(rng.below(DELAY)))
        };
        Self { offers: 0, next: (0..kills).map(one).collect(), busy: false, done: Vec::new() }
    }
}

fn locked<T>(mutex: &SyncMutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A failure of a request.
struct Failure {
    epoch: Epoch,
    kind: &'static str,
    /// Where no kill explains it: all of it.
    unexplained: Option<String>,
}

/// A request that was delivered.
struct Ended {
    request: usize,
    turn: u32,
    failures: Vec<Failure>,
    delivered: Delivered,
}

/// One request, as the engines' schedulers would play it: prefilled and offered until it is delivered.
async fn deliver(stage: Arc<Stage>, request: usize) -> anyhow::Result<Ended> {
    let _permit = stage.at_a_time.acquire().await?;
    let service = &stage.service;
    let (mut turn, mut failures) = (0, Vec::new());
    loop {
        let epoch = stage.up().await?;
        let streamed = !stage.layers.is_empty();
        if turn > 0 && !streamed && !stage.prefill_again(request, turn, None).await? {
            continue;
        }
        let offered = if streamed {
            service.announce(request).await.map(|stream| (stream.reference().clone(), Some(stream)))
        } else {
            service.offer(request).await.map(|reference| (reference, None))
        };
        let (reference, stream) = match offered {
            Ok(offered) => offered,
            // Lost since we looked.
            Err(CallError::Offer(OfferError::RankLost { .. } | OfferError::NotReady)) => continue,
            Err(error) => return Err(error.into()),
        };
        if reference.epoch() != epoch {
            // What was computed before is gone. Of a stream nothing was yet, but its ranks may be another life's when they do.
            drop(stream);
            service.prefill.withdraw(reference.lease()).await?;
            continue;
        }
        let handle = match stream {
            None => {
                stage.may_kill(&reference).await?;
                service.pull(request, &reference, Assurance::Full).await?
            }
            Some(stream) => {
                let handle = service.pull(request, &reference, Assurance::Full).await?;
                let (killed, computed) =
                    tokio::join!(stage.may_kill(&reference), stage.compute_layers(request, turn, stream));
                killed?;
                computed?;
                handle
            }
        };
        let failed = match handle.await {
            Ok(delivered) => return Ok(Ended { request, turn, failures, delivered }),
            Err(PullError::Failed(failed)) => failed,
            Err(error) => return Err(error.into()),
        };
        let killed = locked(&stage.script).done.iter().any(|k| k.epoch == Some(epoch));
        let unexplained = (!killed).then(|| failed.to_string());
        failures.push(Failure { epoch, kind: failed.cause.kind(), unexplained });
        ensure!(failures.len() < 100, "request {request} failed 100 times, at last: {failed}");
        // Its blocks at both engines are written again when nobody reads or writes them.
        service.closed(reference.lease()).await?;
        if !failed.report.in_doubt.is_empty() || !failed.report.writers_in_doubt.is_empty() {
            service.nothing_in_doubt().await?;
        }
        turn += 1;
    }
}

impl Stage {
    /// Waits until the prefill engine is complete, and gives its epoch.
    async fn up(&self) -> anyhow::Result<Epoch> {
        let mut life = self.life.subscribe();
        if *life.wait_for(|l| *l != Life::Down).await? == Life::Over {
            bail!("the prefill engine is without a rank");
        }
        Ok(self.service.prefill.ready(JOIN).await?.epoch())
    }

    /// Computes a request, or these items of it, once more on all prefill ranks; false if one is gone.
    async fn prefill_again(&self, request: usize, turn: u32, items: Option<Vec<ItemId>>) -> anyhow::Result<bool> {
        let mut crew = Arc::clone(&self.crew).lock_owned().await;
        tokio::task::spawn_blocking(move || crew.prefill(request, turn, items)).await?
    }

    /// Computes a request layer by layer, and announces each; ends where a rank is gone. The first computation is in the memory
    /// already, and only takes its time.
    async fn compute_layers(&self, request: usize, turn: u32, mut stream: OfferStream) -> anyhow::Result<()> {
        for layer in &self.layers {
            tokio::time::sleep(self.layer_time).await;
            if turn > 0 && !self.prefill_again(request, turn, Some(layer.all.clone())).await? {
                return Ok(());
            }
            // Refused: its lease has ended with a rank. Whoever wanted it is told so.
            if announce(&stream, layer, self.service.scenario.ask.tokens).await.is_err() {
                return Ok(());
            }
        }
        // As before.
        drop(stream.seal(self.service.scenario.src_groups(request)).await);
        Ok(())
    }

    /// Counts an offer; if a rank is to be killed at it, does so, and has it started again.
    async fn may_kill(self: &Arc<Self>, reference: &Reference) -> anyhow::Result<()> {
        let ((_, rank, delay), offer) = {
            let mut script = locked(&self.script);
            script.offers += 1;
            let due = script.next.front().is_some_and(|(from, ..)| *from <= script.offers);
            if !due || script.busy || self.service.prefill.epoch() != reference.epoch() {
                return Ok(());
            }
            script.busy = true;
            (script.next.pop_front().context("it was there")?, script.offers)
        };
        tokio::time::sleep(delay).await;
        let process = self.crew.lock().await.process(Role::Prefill, rank).context("no such process")?;
        let before = {
            let mut script = locked(&self.script);
            let kill = Kill {
                rank: self.service.scenario.prefill.label(rank),
                offer,
                noticed_seconds: 0.0,
                back_seconds: 0.0,
                failed: BTreeMap::new(),
                epoch: Some(reference.epoch()),
            };
            script.done.push(kill);
            script.done.len()
        };
        self.life.send_replace(Life::Down);
        let start = Instant::now();
        kill_process(process, Signal::KILL)?;
        self.service.lost(before as u64).await?;
        locked(&self.script).done[before - 1].noticed_seconds = start.elapsed().as_secs_f64();
        let restart = tokio::spawn(Arc::clone(self).restart(rank, start));
        locked(&self.restarts).push(restart);
        Ok(())
    }

    async fn restart(self: Arc<Self>, rank: RankId, start: Instant) -> anyhow::Result<()> {
        let back = async {
            let mut crew = Arc::clone(&self.crew).lock_owned().await;
            // By a thread that lasts: a rank does not outlive the thread that has started it.
            crew.start_again(Role::Prefill, rank)?;
            tokio::task::spawn_blocking(move || crew.hear_one(Role::Prefill, rank)).await??;
            self.service.prefill.ready(JOIN).await?;
            anyhow::Ok(())
        };
        let back = back.await.with_context(|| format!("rank {rank} was killed and is not back"));
        let mut script = locked(&self.script);
        script.busy = false;
        if let Some(kill) = script.done.last_mut() {
            kill.back_seconds = start.elapsed().as_secs_f64();
        }
        self.life.send_replace(if back.is_ok() { Life::Up } else { Life::Over });
        back
    }
}

/// Whether all is as it must be: each failure has its kill, no request has failed twice by one, and nothing is left.
async fn judge(
    args: &Args,
    service: &Service,
    seed: u64,
    mut kills: Vec<Kill>,
    ended: &[Ended],
) -> anyhow::Result<Chaos> {
    let mut faults = Vec::new();
    for one in ended {
        let mut lives: Vec<Epoch> = Vec::new();
        for failure in &one.failures {
            if lives.contains(&failure.epoch) {
                faults.push(format!("request {} failed twice by one kill", one.request));
            }
            lives.push(failure.epoch);
            if let Some(why) = &failure.unexplained {
                faults.push(format!("request {} failed although no rank was killed: {why}", one.request));
            }
            if let Some(kill) = kills.iter_mut().find(|k| k.epoch == Some(failure.epoch)) {
                *kill.failed.entry(failure.kind).or_default() += 1;
            }
            // What a consumer may wait for has an end of its own, but not one that a dead rank should need.
            if failure.kind == "deadline" {
                faults.push(format!("request {} was failed by its deadline", one.request));
            }
        }
    }
    if kills.len() != args.kills as usize {
        faults.push(format!("{} of {} ranks were killed", kills.len(), args.kills));
    }
    // On a busy machine a kill may come when its rank has just nothing to do; but not each of them.
    if kills.iter().all(|k| k.failed.is_empty()) {
        faults.push("no kill has failed a request; give more requests".into());
    }
    if let Err(error) = service.nothing_in_doubt().await {
        faults.push(error.to_string());
    }
    match service.all_closed().await {
        Ok(account) if account.again > 0 => faults.push(format!("{} leases ended more than once", account.again)),
        Ok(_) => {}
        Err(error) => faults.push(error.to_string()),
    }
    for owner in [&service.prefill, &service.decode] {
        let left = owner.snapshot().await?;
        if !left.leases.is_empty() || !left.pulls.is_empty() {
            let (leases, pulls) = (left.leases.len(), left.pulls.len());
            faults.push(format!("{} still has {leases} leases and {pulls} pulls", owner.engine()));
        }
    }
    let repeated = ended.iter().filter(|e| !e.failures.is_empty()).count() as u64;
    let untouched = ended.len() as u64 - repeated;
    Ok(Chaos { seed, kills, untouched, repeated, faults })
}
