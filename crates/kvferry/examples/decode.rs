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
    BlockId, BlockTable, ContentKey, DstPaged, Engine, EngineId, Mode, PullError, PullSpec, Reference, Source, Tokens,
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
    let mut blocks = decode.cache.take(prompt.len())?;
    let answered = decode.run(&prompt, &kv_transfer_params, &mut blocks).await;
    // Whatever came of it, no block is lost.
    decode.cache.give_back(blocks);
    answered
}

impl Decode {
    /// Leaves in `blocks` what may be used again.
    async fn run(&self, prompt: &[u32], params: &TransferParams, blocks: &mut Vec<BlockId>) -> fake::Result<Value> {
        let how = match params.source() {
            Source::At(reference) => self.pull(reference, params.mode(), prompt, blocks).await?,
            // A reference that was lost on the way is no reason to fail.
            Source::Lost | Source::None => {
                self.cache.compute(prompt, blocks, 0..prompt.len())?;
                "computed here: no reference came with the request".to_owned()
            }
        };
        // Here it would generate; this one looks whether the cache is what it would have computed.
        let wrong = self.cache.wrong(prompt, blocks)?;
        Ok(json!({"cache": how, "wrong_bytes": wrong}))
    }

    /// Pulls a prompt's cache into blocks, or has it pushed there; or computes it where that fails, into others if need be.
    async fn pull(
        &self,
        from: &Reference,
        mode: Option<Mode>,
        prompt: &[u32],
        blocks: &mut Vec<BlockId>,
    ) -> fake::Result<String> {
        let group = DstPaged { table: BlockTable::new(0, blocks), cached: Tokens::ZERO };
        let tokens = Tokens::new(prompt.len() as u64);
        let mut pull = PullSpec::new(tokens, vec![group.into()], ContentKey::of(prompt, "", &[]));
        // Later it is quicker to compute it here.
        pull.deadline = Duration::from_secs(5);
        pull.mode = mode;
        let how = if matches!(mode, Some(Mode::Push { .. })) { "was pushed" } else { "pulled" };
        let failed = match self.engine.pull(from.clone(), pull).await?.await {
            Ok(delivered) => {
                let report = delivered.report();
                return Ok(format!("{how} {} from {} rank pairs", report.bytes(), report.pairs.len()));
            }
            Err(PullError::Failed(failed)) => failed,
            Err(error) => {
                // The engine has ended in the middle: nobody says any more what its ranks may still write.
                blocks.clear();
                return Err(error.into());
            }
        };
        // Nothing of it may be used. Blocks that a rank may still write are not used again: here they are left alone.
        if !failed.report.in_doubt.is_empty() || !failed.report.writers_in_doubt.is_empty() {
            blocks.clear();
            *blocks = self.cache.take(prompt.len())?;
        }
        self.cache.compute(prompt, blocks, 0..prompt.len())?;
        Ok(format!("computed here: {failed}"))
    }
}
