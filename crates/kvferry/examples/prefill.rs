//! A prefill engine on kvferry, with a fake model: four ranks, each with one head, blocks of 16 tokens, heads outside tokens.
//!
//! ```text
//! cargo run -p kvferry --example prefill -- 127.0.0.1:8101
//! {"prompt": [1, 2, 3], "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}}
//! {"kv_transfer_params": {"do_remote_decode": false, "do_remote_prefill": true, "kvferry_reference": "kvferry1...."}}
//! ```
//! With `"kvferry_mode": "push"` in the request it answers at once, and writes into the decode engine's blocks while it computes.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry::{
    Address, BlockId, BlockTable, ContentKey, Engine, EngineId, Items, LeaseId, Mode, OfferSpec, OfferStream,
    OwnerEvent, OwnerEvents, SrcGroup, SrcPaged, Tail, TokenRange, Tokens, TransferParams,
};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_shm::{Config, ShmTransport};
use serde_json::{Value, json};

mod fake;

#[derive(serde::Deserialize)]
struct Request {
    prompt: Vec<u32>,
    #[serde(default)]
    kv_transfer_params: TransferParams,
}

struct Prefill {
    engine: Engine,
    cache: fake::Cache,
    /// Blocks that a decode engine may read.
    lent: Mutex<Lent>,
}

#[derive(Default)]
struct Lent {
    blocks: HashMap<LeaseId, Vec<BlockId>>,
    /// Leases that were over before it was noted here what they lend.
    over: HashSet<LeaseId>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> fake::Result<()> {
    let cache = fake::Cache::new(4, 16, 256, LayoutStyle::HND)?;
    let mut builder = Engine::builder(EngineId::new("prefill-0")?, cache.spec.clone(), vec![cache.group.clone()])
        .model_identity("fake@1")
        .listen(Address::loopback(0));
    for (manifest, memory) in &cache.ranks {
        builder = builder.rank(manifest.clone(), memory.clone(), Box::new(ShmTransport::new(Config::default())?));
    }
    let mut engine = builder.start().await?;
    let events = engine.take_events().ok_or("the events were taken")?;
    let prefill = Arc::new(Prefill { engine, cache, lent: Mutex::default() });
    tokio::spawn(take_back(prefill.clone(), events));
    fake::serve(move |request| answer(Arc::clone(&prefill), request)).await
}

/// One request: compute the prompt, then lend its blocks to whoever has the reference.
async fn answer(prefill: Arc<Prefill>, request: Value) -> fake::Result<Value> {
    let Request { prompt, kv_transfer_params } = serde_json::from_value(request)?;
    let blocks = prefill.cache.take(prompt.len())?;
    if !kv_transfer_params.wants_offer() {
        // Here it would go on to decode.
        prefill.cache.compute(&prompt, &blocks, 0..prompt.len())?;
        prefill.cache.give_back(blocks);
        return Ok(json!({"kv_transfer_params": null}));
    }
    let offer = OfferSpec::new(groups(prompt.len(), &blocks), ContentKey::of(&prompt, "", &[]));
    if let mode @ Some(Mode::Push { .. }) = kv_transfer_params.mode() {
        // The reference goes out before the first token is computed.
        let announced = prefill.engine.announce(offer).await;
        let stream = announced.inspect_err(|_| prefill.cache.give_back(blocks.clone()))?;
        let params = TransferParams::of(stream.reference().clone()).with_mode(mode);
        tokio::spawn(async move {
            if let Err(error) = prefill.stream(&prompt, blocks, stream).await {
                println!("nobody goes on with a prompt: {error}");
            }
        });
        return Ok(json!({"kv_transfer_params": params}));
    }
    prefill.cache.compute(&prompt, &blocks, 0..prompt.len())?;
    match prefill.engine.offer(offer).await {
        Ok(reference) => {
            prefill.lend(reference.lease(), blocks);
            Ok(json!({"kv_transfer_params": TransferParams::of(reference)}))
        }
        Err(error) => {
            prefill.cache.give_back(blocks);
            Err(error.into())
        }
    }
}

/// Blocks are ours again when their lease is over, however it ended: read, declined, expired, withdrawn.
async fn take_back(prefill: Arc<Prefill>, mut events: OwnerEvents) {
    while let Some(event) = events.next().await {
        if let OwnerEvent::Released { lease, how } = event {
            println!("lease {lease}: {}", how.name());
            prefill.released(lease);
        }
    }
}

/// All of a prompt in its blocks: the one group that the engine has.
fn groups(tokens: usize, blocks: &[BlockId]) -> Vec<SrcGroup> {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(tokens as u64));
    vec![SrcPaged { table: BlockTable::new(0, blocks), held, tail: Tail::Exact }.into()]
}

impl Prefill {
    /// Computes a prompt in chunks, each of which is written to its consumer at once.
    async fn stream(&self, prompt: &[u32], blocks: Vec<BlockId>, mut stream: OfferStream) -> fake::Result<()> {
        let (lease, n) = (stream.lease(), prompt.len());
        let compute = async {
            for start in (0..n).step_by(32) {
                let end = n.min(start + 32);
                self.cache.compute(prompt, &blocks, start..end)?;
                let chunk = TokenRange::new(Tokens::new(start as u64), Tokens::new(end as u64));
                stream.region_ready(Items::Paged, chunk).await?;
            }
            Ok(stream.seal(groups(n, &blocks)).await?)
        };
        let computed = compute.await;
        // Only now: blocks are not given back while they are written here.
        self.lend(lease, blocks);
        computed
    }

    /// Notes what a lease lends. It may be over already, and its event seen: the offer's answer and the event come to two tasks.
    fn lend(&self, lease: LeaseId, blocks: Vec<BlockId>) {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        if lent.over.remove(&lease) {
            self.cache.give_back(blocks);
        } else {
            lent.blocks.insert(lease, blocks);
        }
    }

    fn released(&self, lease: LeaseId) {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        match lent.blocks.remove(&lease) {
            Some(blocks) => self.cache.give_back(blocks),
            None => drop(lent.over.insert(lease)),
        }
    }
}
