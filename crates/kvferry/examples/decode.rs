//! A decode engine on kvferry, with a fake model: two ranks, each with two heads, blocks of 64 tokens, tokens outside heads; nothing
//! of that is as at the prefill engine.
//!
//! ```text
//! cargo run -p kvferry --example decode -- 127.0.0.1:8102
//! {"prompt": [1, 2, 3], "kv_transfer_params": {"do_remote_prefill": true, "kvferry_reference": "kvferry1...."}}
//! {"cache": "pulled 6144 B from 4 rank pairs", "wrong_bytes": 0}
//! ```

use std::sync::Arc;
use std::time::Duration;

use kvferry::{
    BlockId, BlockTable, ContentKey, DstPaged, Engine, EngineId, PullError, PullSpec, Reference, Source, Tokens,
    TransferParams,
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

struct Decode {
    engine: Engine,
    cache: fake::Cache,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> fake::Result<()> {
    // It listens nowhere: it pulls, and offers nothing.
    let cache = fake::Cache::new(2, 64, 64, LayoutStyle::NHD)?;
    let mut builder = Engine::builder(EngineId::new("decode-0")?, cache.spec.clone(), vec![cache.group.clone()])
        .model_identity("fake@1");
    for (manifest, memory) in &cache.ranks {
        let transport = ShmTransport::new(Config::default())?;
        builder = builder.rank(manifest.clone(), memory.clone(), Box::new(transport));
    }
    let decode = Arc::new(Decode { engine: builder.start().await?, cache });
    fake::serve(move |request| answer(Arc::clone(&decode), request)).await
}

/// One request: have its cache in our own blocks, pulled or computed, then go on from there.
async fn answer(decode: Arc<Decode>, request: Value) -> fake::Result<Value> {
    let Request { prompt, kv_transfer_params } = serde_json::from_value(request)?;
    let blocks = decode.cache.take(prompt.len())?;
    let (blocks, how) = match kv_transfer_params.source() {
        Source::At(reference) => decode.pull(reference, &prompt, blocks).await?,
        // A reference that was lost on the way is no reason to fail.
        Source::Lost | Source::None => {
            decode.cache.compute(&prompt, &blocks)?;
            (blocks, "computed here: no reference came with the request".to_owned())
        }
    };
    // Here it would generate; this one looks whether the cache is what it would have computed.
    let wrong = decode.cache.wrong(&prompt, &blocks)?;
    decode.cache.give_back(blocks);
    Ok(json!({"cache": how, "wrong_bytes": wrong}))
}

impl Decode {
    /// Pulls a prompt's cache into blocks, or computes it where that fails; gives the blocks that have it.
    async fn pull(
        &self,
        from: &Reference,
        prompt: &[u32],
        blocks: Vec<BlockId>,
    ) -> fake::Result<(Vec<BlockId>, String)> {
        let group = DstPaged { table: BlockTable::new(0, &blocks), cached: Tokens::ZERO };
        let tokens = Tokens::new(prompt.len() as u64);
        let mut pull = PullSpec::new(tokens, vec![group.into()], ContentKey::of(prompt, "", &[]));
        // Later it is quicker to compute it here.
        pull.deadline = Duration::from_secs(5);
        let failed = match self.engine.pull(from.clone(), pull).await?.await {
            Ok(delivered) => {
                let report = delivered.report();
                let how = format!("pulled {} from {} rank pairs", report.bytes(), report.pairs.len());
                return Ok((blocks, how));
            }
            Err(PullError::Failed(failed)) => failed,
            Err(error) => return Err(error.into()),
        };
        // Nothing of it may be used. Blocks that a rank may still write are not used again: here they are left alone.
        let blocks = if failed.report.in_doubt.is_empty() { blocks } else { self.cache.take(prompt.len())? };
        self.cache.compute(prompt, &blocks)?;
        Ok((blocks, format!("computed here: {failed}")))
    }
}
