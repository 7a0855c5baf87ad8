//! Whole engines: an owner and a worker on either side, joined over sockets; an offer, a pull by its reference, a lease that
//! is fenced before the bytes count as delivered.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry::{
    Address, Assurance, BlockId, Bytes, ContentKey, Delivered, EngineId, OfferSpec, Owner, PullSpec, RankId,
    StagingOptions, Tokens, Worker, WorkerHandle,
};

use crate::child::{Memory, Steps, is_source};
use crate::ferry;
use crate::wire::{Backend, Contact, Moved, Side};
use crate::work::{Scene, TOKENS, Work, dst_group, src_group};

/// Nothing here takes so long.
const LONG: Duration = Duration::from_secs(30);

/// One process of it. Fields are dropped in order.
struct End {
    _worker: WorkerHandle,
    owner: Owner,
    runtime: tokio::runtime::Runtime,
    backend: Backend,
    threads: usize,
}

impl End {
    fn start(memory: &Memory, name: &str, source: bool, backend: Backend, threads: usize) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let engine = EngineId::new(name)?;
        let [src, dst] = memory.scene.manifests()?;
        let (manifest, regions) = if source { (src, &memory.src) } else { (dst, &memory.dst) };
        let owner = Owner::builder(engine.clone(), manifest.spec().clone(), manifest.groups().to_vec(), 1)
            .model_identity("llama-3.1-70b pages")
            .listen(Address::loopback(0));
        let owner = runtime.block_on(owner.start())?;
        let described = manifest.rank(RankId::ZERO).context("no rank")?.clone();
        let transport = ferry::open(backend, threads)?;
        let worker = Worker::builder(engine, RankId::ZERO, owner.rank_socket(), described, regions.clone(), transport);
        let whole = Work::Request { contiguous: false, staged: false, wider: true }.bytes();
        let pool = if memory.scene == Scene::Wider { Bytes::new(whole) } else { Bytes::ZERO };
        let worker = worker.staging(StagingOptions { pool, threads: 2, ..StagingOptions::default() }).spawn()?;
        runtime.block_on(owner.ready(LONG))?;
        Ok(Self { _worker: worker, owner, runtime, backend, threads })
    }

    fn pull(&self, tokens: Tokens, dst: &[BlockId], offer: &[u8]) -> anyhow::Result<Delivered> {
        let (groups, assurance) = (vec![dst_group(dst)], Assurance::Fenced);
        let spec = PullSpec { assurance, deadline: LONG, ..PullSpec::new(tokens, groups, content()) };
        let reference = std::str::from_utf8(offer)?.parse()?;
        self.runtime.block_on(async { Ok(self.owner.pull(reference, spec).await?.await?) })
    }
}

pub(crate) fn end(
    memory: &Memory,
    side: Side,
    backend: Backend,
    threads: usize,
) -> anyhow::Result<Box<dyn crate::child::End>> {
    if memory.scene == Scene::Blocks {
        bail!("engines move requests");
    }
    let source = is_source(side);
    let name = if source { "compare-prefill" } else { "compare-decode" };
    Ok(Box::new(End::start(memory, name, source, backend, threads)?))
}

fn content() -> ContentKey {
    ContentKey::of(&[1], "", &[])
}

/// Tokens and block ids on both sides; of the smallest request, one block.
fn request(memory: &Memory, work: Work) -> anyhow::Result<(Tokens, [Vec<BlockId>; 2])> {
    match work {
        Work::Blocks(_) => bail!("engines move requests"),
        Work::Small => Ok((Tokens::new(16), memory.scene.ids(true).map(|ids| ids.into_iter().take(1).collect()))),
        Work::Request { contiguous, .. } => Ok((Tokens::new(TOKENS.into()), memory.scene.ids(contiguous))),
    }
}

impl crate::child::End for End {
    fn offer(&mut self, memory: &Memory, work: Work) -> anyhow::Result<Vec<u8>> {
        let (tokens, [src, _]) = request(memory, work)?;
        let spec = OfferSpec::new(vec![src_group(&src, tokens)], content());
        Ok(self.runtime.block_on(self.owner.offer(spec))?.to_string().into_bytes())
    }

    fn read(&mut self, memory: &Memory, work: Work, offer: &[u8]) -> anyhow::Result<Moved> {
        let (tokens, [_, dst]) = request(memory, work)?;
        let start = Instant::now();
        let delivered = self.pull(tokens, &dst, offer)?;
        let ns = u64::try_from(start.elapsed().as_nanos())?;
        let pairs = &delivered.report().pairs;
        // Its kind; details follow a colon.
        let lane = pairs.first().and_then(|pair| pair.lane.split(':').next()).unwrap_or_default().to_owned();
        Ok(Moved { ns, descriptors: pairs.iter().map(|p| p.descriptors_after).sum(), lane })
    }

    fn contact(&mut self, memory: &Memory, offer: &[u8]) -> anyhow::Result<Contact> {
        let (tokens, [_, dst]) = request(memory, Work::Small)?;
        let mut steps = Steps::new();
        let fresh = Self::start(memory, "compare-newcomer", false, self.backend, self.threads)?;
        let open_ns = steps.next();
        fresh.pull(tokens, &dst, offer)?;
        Ok(Contact { open_ns, first_ns: steps.next(), ..Contact::default() })
    }
}
