//! What the user may ask of the demo, and the same said again to the rank processes.

use clap::{Args as ClapArgs, ValueEnum};
use kvferry_geometry::layout::LayoutStyle;
use kvferry_models::{Shape, layout_named};

/// How bytes move.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Wire {
    /// Shared memory between processes, one for each rank.
    Shm,
    /// Memory of one process; ranks are threads.
    Mem,
}

impl Wire {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Mem => "mem",
        }
    }
}

/// Run a prefill and a decode engine and prove every byte that moves between them
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// A preset's name or the path of a Hugging Face config.json
    #[arg(long, default_value = "llama-3.1-8b")]
    pub(crate) model: String,
    /// Parallel sizes of the prefill engine: tp=,pp=,dcp=,pcp=,pcp_mode=shard|replicate,interleave=
    #[arg(long, default_value = "tp=4,pp=2")]
    pub(crate) prefill: Shape,
    /// Parallel sizes of the decode engine
    #[arg(long, default_value = "tp=2")]
    pub(crate) decode: Shape,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) tokens: u64,
    /// Requests, all in flight together
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) requests: u32,
    /// Tokens of a prefill block
    #[arg(long, default_value_t = 16)]
    pub(crate) prefill_block: u32,
    /// Tokens of a decode block
    #[arg(long, default_value_t = 16)]
    pub(crate) decode_block: u32,
    /// hnd, nhd, planes or packed-rows
    #[arg(long, default_value = "hnd", value_parser = layout)]
    pub(crate) prefill_layout: (String, LayoutStyle),
    /// hnd, nhd, planes or packed-rows
    #[arg(long, default_value = "hnd", value_parser = layout)]
    pub(crate) decode_layout: (String, LayoutStyle),
    /// Tokens of each prompt that the decode engine has already
    #[arg(long, default_value_t = 0)]
    pub(crate) prefix_hit: u64,
    /// Only the model's first so many layers
    #[arg(long)]
    pub(crate) layers: Option<u32>,
    /// How bytes move
    #[arg(long, value_enum, default_value_t = Wire::Shm)]
    pub(crate) transport: Wire,
    /// One JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

fn layout(name: &str) -> Result<(String, LayoutStyle), String> {
    let style = layout_named(name).ok_or("the layouts are hnd, nhd, planes and packed-rows")?;
    Ok((name.to_owned(), style))
}

impl Args {
    /// The arguments that say the same again, for a rank process.
    pub(crate) fn again(&self) -> Vec<String> {
        let mut out = vec![
            format!("--model={}", self.model),
            format!("--prefill={}", self.prefill),
            format!("--decode={}", self.decode),
            format!("--tokens={}", self.tokens),
            format!("--requests={}", self.requests),
            format!("--prefill-block={}", self.prefill_block),
            format!("--decode-block={}", self.decode_block),
            format!("--prefill-layout={}", self.prefill_layout.0),
            format!("--decode-layout={}", self.decode_layout.0),
            format!("--prefix-hit={}", self.prefix_hit),
            format!("--transport={}", self.transport.name()),
        ];
        out.extend(self.layers.map(|n| format!("--layers={n}")));
        out
    }
}
