//! Two engines in this process, a request every 20 ms from one to the other, and their metrics for Prometheus:
//!
//! ```text
//! cargo run -p kvferry --example prometheus -- 127.0.0.1:9464    # http://127.0.0.1:9464/metrics, until interrupted
//! cargo run -p kvferry --example prometheus                      # a hundred requests, then prints the metrics
//! ```
//!
//! The dashboard in `docs/grafana/kvferry.json` shows what they mean.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use kvferry::{
    Address, BlockId, BlockTable, CacheGroup, ContentKey, DstPaged, Engine, EngineId, METRICS, MetricKind, ModelSpec,
    OfferSpec, PullSpec, RankManifest, Region, SrcPaged, Tail, TokenRange, Tokens,
};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::placement::{HeadRule, Parallelism};
use kvferry_geometry::spec::{Component, Item, PagedItem};
use kvferry_geometry::units::{ItemId, Name};
use kvferry_transport::mem::MemNetwork;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

const TOKENS: u64 = 1000;
const BLOCK: u32 = 16;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let address: Option<SocketAddr> = std::env::args().nth(1).map(|a| a.parse()).transpose()?;
    // The recorder first: what starts before it is not counted.
    let metrics = record(address)?;

    // Heads outside tokens on two ranks; tokens outside heads on one.
    let network = MemNetwork::new(1);
    let prefill = engine("prefill-0", 2, LayoutStyle::HND, &network).await?;
    let decode = engine("decode-0", 1, LayoutStyle::NHD, &network).await?;
    for n in 0u32.. {
        request(&prefill, &decode, n).await?;
        if address.is_none() && n == 99 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The gauges are told once a second.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    print!("{}", metrics.render());
    decode.shutdown().await;
    prefill.shutdown().await;
    Ok(())
}

/// Sets the recorder, and serves it where there is an address.
fn record(address: Option<SocketAddr>) -> Result<PrometheusHandle, Box<dyn Error>> {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        if let MetricKind::Histogram(buckets) = metric.kind {
            builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), buckets)?;
        }
    }
    let Some(address) = address else { return Ok(builder.install_recorder()?) };
    let (recorder, server) = builder.with_http_listener(address).build()?;
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder)?;
    tokio::spawn(async move {
        if server.await.is_err() {
            println!("http://{address}/metrics is not served any more");
        }
    });
    println!("http://{address}/metrics");
    Ok(handle)
}

/// What engines do all the time: one has computed a prompt and offers its blocks, the other pulls them into its own.
async fn request(prefill: &Engine, decode: &Engine, n: u32) -> Result<(), Box<dyn Error>> {
    let content_key = ContentKey::of(&[n], "", &[]);
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(TOKENS));
    let offered = SrcPaged { table: blocks(n), held, tail: Tail::Exact }.into();
    let reference = prefill.offer(OfferSpec::new(vec![offered], content_key)).await?;
    // Every tenth is asked for as another prompt than it is, to have failures to show.
    let asked = if n % 10 == 9 { ContentKey::of(&[n, n], "", &[]) } else { content_key };
    let wanted = DstPaged { table: blocks(n + 1), cached: Tokens::ZERO }.into();
    let pull = decode.pull(reference, PullSpec::new(Tokens::new(TOKENS), vec![wanted], asked)).await?;
    if let Err(error) = pull.await {
        println!("# request {n}: {error}");
    }
    Ok(())
}

/// The blocks of a request's tokens.
fn blocks(n: u32) -> BlockTable {
    let ids: Vec<BlockId> = (0..63).map(|k| BlockId::new(63 * (n % 4) + k)).collect();
    BlockTable::new(0, &ids)
}

/// Eight layers of 8 heads, 256 blocks of 16 tokens, over so many ranks.
async fn engine(id: &str, ranks: u32, style: LayoutStyle, network: &MemNetwork) -> Result<Engine, Box<dyn Error>> {
    let layer = |i: u32| {
        let components = ["K", "V"].map(|name| Component::new(name, 256, "bf16"));
        Item::paged(&format!("model.layers.{i}.self_attn.attn"), PagedItem::new(8, components.to_vec()))
    };
    let spec = ModelSpec::new((0..8).map(layer).collect())?;
    let items: Vec<ItemId> = (0..8).map(ItemId::new).collect();
    let group = CacheGroup { name: Name::new("all"), items: items.clone(), block_tokens: Tokens::new(BLOCK.into()) };
    let placed = Parallelism::tensor(&spec, ranks).place(&spec, |_, _| HeadRule::Split);
    let placed = placed.map_err(|faults| format!("{faults:?}"))?;
    let mut builder = Engine::builder(EngineId::new(id)?, spec.clone(), vec![group])
        .model_identity("a model of noise")
        .listen(Address::memory(id)?);
    for placement in placed {
        let layout = style.build(&spec, &placement, &[(&items, BLOCK, 256)])?;
        let lengths = layout.regions.iter().map(|r| usize::try_from(r.len.get()).ok());
        let memory: Option<Vec<Region>> = lengths.map(|len| Region::zeroed(len?)).collect();
        let memory = memory.ok_or("no memory")?;
        builder = builder.rank(RankManifest { placement, layout }, memory, Box::new(network.endpoint()?));
    }
    Ok(builder.start().await?)
}
