//! Whole engines: an owner and a worker on either side, joined over sockets; an offer, a pull by its reference, a lease that
//! is fenced before the bytes count as delivered.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvferry::{
    Address, Assurance, Bytes, ContentKey, EngineId, OfferSpec, Owner, PullSpec, RankId, StagingOptions, Tokens,
    Worker, WorkerHandle,
};

use crate::child::{Memory, is_source};
use crate::ferry;
use crate::wire::{Backend, Moved, Side};
use crate::work::{Scene, TOKENS, Work, dst_group, src_group};

/// Nothing here takes so long.
const LONG: Duration = Duration::from_secs(30);

/// One process of it. Fields are dropped in order.
struct End {
    _worker: WorkerHandle,
    owner: Owner,
    runtime: tokio::runtime::Runtime,
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
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let source = is_source(side);
    let engine = EngineId::new(if source { "compare-prefill" } else { "compare-decode" })?;
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
    Ok(Box::new(End { _worker: worker, owner, runtime }))
}

fn content() -> ContentKey {
    ContentKey::of(&[1], "", &[])
}

fn ids(memory: &Memory, work: Work) -> anyhow::Result<[Vec<kvferry::BlockId>; 2]> {
    let Work::Request { contiguous, .. } = work else { bail!("engines move requests") };
    Ok(memory.scene.ids(contiguous))
}

impl crate::child::End for End {
    fn offer(&mut self, memory: &Memory, work: Work) -> anyhow::Result<Vec<u8>> {
        let [src, _] = ids(memory, work)?;
        let spec = OfferSpec { groups: vec![src_group(&src)], content_key: content() };
        Ok(self.runtime.block_on(self.owner.offer(spec))?.to_string().into_bytes())
    }

    fn read(&mut self, memory: &Memory, work: Work, offer: &[u8]) -> anyhow::Result<Moved> {
        let [_, dst] = ids(memory, work)?;
        let start = Instant::now();
        let spec = PullSpec {
            tokens: Tokens::new(TOKENS.into()),
            groups: vec![dst_group(&dst)],
            content_key: content(),
            assurance: Assurance::Fenced,
            deadline: LONG,
        };
        let reference = std::str::from_utf8(offer)?.parse()?;
        let delivered = self.runtime.block_on(async { anyhow::Ok(self.owner.pull(reference, spec).await?.await?) })?;
        let ns = u64::try_from(start.elapsed().as_nanos())?;
        let pairs = &delivered.report().pairs;
        Ok(Moved { ns, descriptors: pairs.iter().map(|p| p.descriptors_after).sum(), lane: String::new() })
    }
}
