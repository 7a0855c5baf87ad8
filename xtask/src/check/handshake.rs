//! What `check` says of two descriptions, and what two engines of these descriptions say of each other: two owners with all their
//! ranks, over a socket.

use std::path::{Path, PathBuf};

use kvferry::{
    Checkpoint, DstGroup, DstPaged, DstState, FailureCause, OfferSpec, PullError, PullSpec, SrcGroup, SrcPaged,
    SrcState, Tail, TokenRange,
};
use kvferry_geometry::units::{BlockId, Tokens};
use kvferry_tests::running::{Running, SECOND, key, pull, table};
use kvferry_transport::mem::MemNetwork;

use super::*;

/// One token of a prompt, in a block and a slot of each group's own.
fn offered(manifest: &Manifest) -> Vec<SrcGroup> {
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(1));
    let group = |(id, at): (GroupId, u32)| -> SrcGroup {
        if manifest.is_state(id) {
            let checkpoint = Checkpoint { position: Tokens::new(1), slot: BlockId::new(at) };
            SrcState { checkpoints: vec![checkpoint] }.into()
        } else {
            SrcPaged { table: table(&[at]), held, tail: Tail::Exact }.into()
        }
    };
    blocks::groups(manifest).zip(1..).map(group).collect()
}

fn wanted(manifest: &Manifest) -> Vec<DstGroup> {
    let group = |(id, at): (GroupId, u32)| -> DstGroup {
        if manifest.is_state(id) {
            DstState { slot: Some(BlockId::new(at)), more: Vec::new() }.into()
        } else {
            DstPaged { table: table(&[at]), cached: Tokens::ZERO }.into()
        }
    };
    blocks::groups(manifest).zip(1..).map(group).collect()
}

/// What the destination's engine says when it is to take over from the source's; `None` where it does so.
async fn meet(outcome: &Outcome, ignore: IgnoreArgs) -> Option<FailureCause> {
    let network = MemNetwork::new(1);
    let start = async |id: &str, engine: &Engine| {
        let told = |owner: kvferry::OwnerBuilder| owner.compat(ignore.options());
        Running::of(id, engine.manifest.clone(), &network, told, |worker| worker).await
    };
    let (source, destination) = (outcome.source.as_ref().unwrap(), outcome.destination.as_ref().unwrap());
    let (p, d) = (start("p", source).await, start("d", destination).await);
    let reference = p.owner.offer(OfferSpec::new(offered(&p.manifest), key())).await.unwrap();
    let wish = PullSpec::new(Tokens::new(1), wanted(&d.manifest), key());
    let result = pull(&d, &reference, PullSpec { deadline: 20 * SECOND, ..wish }).await;
    p.stop().await;
    d.stop().await;
    match result {
        Ok(_) => None,
        Err(PullError::Failed(failed)) => Some(failed.cause),
        Err(other) => panic!("{other}"),
    }
}

struct Pair {
    source: String,
    destination: String,
    model: ModelArgs,
    ignore: IgnoreArgs,
}

/// Descriptions of two engines in short: keys separated by semicolons.
fn pair(source: &str, destination: &str) -> Pair {
    let lines = |text: &str| text.split("; ").map(|line| format!("{line}\n")).collect();
    Pair {
        source: lines(source),
        destination: lines(destination),
        model: ModelArgs::default(),
        ignore: IgnoreArgs::default(),
    }
}

/// Two of the examples.
fn examples(source: &str, destination: &str) -> Pair {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kvferry-models/examples");
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
    Pair { source: read(source), destination: read(destination), ..pair("", "") }
}

/// Compares by the command and by a meeting. Gives the fields that differ, each once.
async fn compare(pair: Pair) -> Vec<&'static str> {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (source, destination) = (write("p.toml", &pair.source), write("d.toml", &pair.destination));
    let (model, ignore) = (pair.model, pair.ignore);
    let args = Args { source: Named::File(source), destination: Named::File(destination), model, ignore, json: false };
    // Small engines: what they cache is the same, however many blocks there are.
    let small = |d: &mut EngineDescription| {
        d.blocks = Some(16);
        // Where states share the pool of blocks, that is their number, too.
        d.slots.count = Some(16).filter(|_| !d.layout.share);
        Ok(())
    };
    let outcome = Outcome::new(&args, small);
    assert!(outcome.faults.is_empty(), "{}", outcome.text());
    let said: Vec<&str> = outcome.differences.iter().map(|d| d.reason.as_str()).collect();
    match meet(&outcome, ignore).await {
        None => assert!(outcome.compatible.is_some(), "they meet: {}", outcome.text()),
        Some(FailureCause::Mismatch(found)) => {
            let heard: Vec<String> = found.0.iter().map(ToString::to_string).collect();
            assert_eq!(said, heard);
            let (src, dst) = (outcome.source.as_ref().unwrap(), outcome.destination.as_ref().unwrap());
            let again = Compatible::with(src.manifest.clone(), dst.manifest.clone(), ignore.options());
            assert_eq!(again.unwrap_err(), found);
        }
        Some(FailureCause::Pairing(error)) => assert_eq!(said, [error.to_string()]),
        Some(other) => panic!("{other}"),
    }
    let mut fields: Vec<&str> = outcome.differences.iter().map(|d| d.field).collect();
    fields.sort_unstable();
    fields.dedup();
    fields
}

/// A small model in the keys of its config.json.
fn config(heads: u32, head_dim: u32, more: &str) -> String {
    format!(
        "[model.config]; model_type = \"llama\"; num_hidden_layers = 4; num_attention_heads = 8; num_key_value_heads = {heads}; \
         head_dim = {head_dim}; torch_dtype = \"float16\"{more}"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_says_what_engines_say_when_they_meet() {
    let none: &[&str] = &[];
    assert_eq!(compare(examples("prefill-tp4-pp2.toml", "decode-tp2.toml")).await, none);
    let differs = compare(examples("prefill-tp4-pp2.toml", "decode-wrong.toml")).await;
    assert_eq!(differs, ["encoding", "item", "width"]);
    assert_eq!(compare(examples("hybrid-prefill.toml", "hybrid-decode.toml")).await, none);
    assert_eq!(compare(examples("hybrid-prefill.toml", "prefill-tp4-pp2.toml")).await, ["item", "model"]);

    let heads = pair(&config(4, 64, ""), &config(2, 64, ""));
    assert_eq!(compare(heads).await, ["count"]);
    let fp8 = |more: &str| format!("model = \"llama-3.1-8b\"; layers = 2; kv_dtype = \"fp8\"; {more}");
    let components = pair(&fp8("scales = \"per-block-head\"; scale_block = 16"), &fp8("parallel = \"tp=2\""));
    assert_eq!(compare(components).await, ["components"]);
    let block = |tp, tokens| {
        fp8(&format!("scales = \"per-block\"; scale_block = {tokens}; parallel = \"tp={tp}\"; block_size = 64"))
    };
    assert_eq!(compare(pair(&block(2, 16), &block(2, 32))).await, ["coverage"]);
    assert_eq!(compare(pair(&block(2, 16), &block(4, 16))).await, ["shared"]);
    let window = |tokens| {
        let more = format!("; sliding_window = {tokens}; use_sliding_window = true");
        config(4, 64, &more).replace("\"llama\"", "\"mistral\"")
    };
    assert_eq!(compare(pair(&window(64), &window(128))).await, ["retention"]);
}

/// One side's draft: a mismatch, or none of the transfer's business.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_ignored_is_ignored_alike() {
    let model = "model = \"llama-3.1-8b\"; layers = 2";
    let draft = format!("{model}; draft = \"kimi-k2.5-eagle3\"");
    for (source, destination) in [(model, draft.as_str()), (draft.as_str(), model)] {
        for ignored in [false, true] {
            let ignore = IgnoreArgs { ignore_source_only: ignored, ignore_destination_only: ignored };
            let differs = compare(Pair { ignore, ..pair(source, destination) }).await;
            let expected: &[&str] = if ignored { &[] } else { &["item"] };
            assert_eq!(differs, expected, "{source} to {destination}, {ignored}");
        }
    }
}
