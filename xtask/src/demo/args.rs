//! What the user may ask of the demo, and the same said again to the rank processes.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args as ClapArgs, ValueEnum};
use kvferry_geometry::layout::{LayoutStyle, StateOrder};
use kvferry_geometry::units::Bytes;
use kvferry_models::layout_named;

use crate::backends::{BackendArgs, Wire, Wires};
use crate::engine::{IgnoreArgs, ModelArgs, Named};
use crate::show;

use super::scenario::Role;

/// Which way a decode rank's reads go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Way {
    /// Whichever is cheaper by the cost model.
    Auto,
    /// Straight into place.
    Direct,
    /// Staged at the destination and permuted there.
    Destination,
    /// Gathered at the source.
    Source,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Destination => "destination",
            Self::Source => "source",
        }
    }
}

/// Who moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Mode {
    /// The decode engine's ranks read.
    Pull,
    /// The prefill engine's ranks write.
    Push,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "push",
        }
    }
}

/// What a prefill says of its bytes before it has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Stream {
    /// Each layer, when it is computed.
    Layers,
}

/// Run a prefill and a decode engine and prove every byte that moves between them
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Every preset between engines of several shapes, cut to few layers
    #[arg(long, conflicts_with_all = ["model", "prefill", "decode", "json", "chaos"])]
    pub(crate) all: bool,
    /// Who moves the bytes
    #[arg(long, value_enum, default_value_t = Mode::Pull)]
    pub(crate) mode: Mode,
    /// Announce each request when its (simulated) prefill begins, and each layer when it is computed: it is written meanwhile
    #[arg(long, value_enum)]
    pub(crate) stream: Option<Stream>,
    /// The compute model of --stream: how long a layer of a prompt takes, in milliseconds
    #[arg(long, default_value_t = 5.0, value_name = "MS", value_parser = layer_ms)]
    pub(crate) layer_ms: f64,
    /// Draw when each layer was computed and written, into this file
    #[arg(long, value_name = "FILE", requires = "stream", conflicts_with = "chaos")]
    pub(crate) svg: Option<PathBuf>,
    /// Kill ranks of the prefill engine while they are read, or write, start them again, prefill and move again what that has failed,
    /// and prove that each request has failed once for each kill at most and is delivered in the end
    #[arg(long)]
    pub(crate) chaos: bool,
    /// How many ranks are killed, one after another; which, and when, follows from KVFERRY_SEED, and is another each time without it
    #[arg(long, default_value_t = 2, requires = "chaos", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) kills: u32,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The prefill engine: parallel sizes (tp=,pp=,dcp=,pcp=,pcp_mode=shard|replicate,interleave=), or a description's file
    #[arg(long, default_value = "tp=4,pp=2", value_name = "ENGINE")]
    pub(crate) prefill: Named,
    /// The decode engine
    #[arg(long, default_value = "tp=2", value_name = "ENGINE")]
    pub(crate) decode: Named,
    /// Tokens of each prompt; with --chaos 512
    #[arg(long, default_value_t = 2048, default_value_if("chaos", "true", "512"))]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) tokens: u64,
    /// Requests; with --chaos 16
    #[arg(long, default_value_t = 4, default_value_if("chaos", "true", "16"))]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) requests: u32,
    /// Requests in flight at a time [default: all; with --chaos 4]
    #[arg(long, value_name = "N", default_value_if("chaos", "true", "4"))]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) concurrency: Option<u32>,
    /// Tokens of a prefill block [default: as described, 16]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) prefill_block: Option<u32>,
    /// Tokens of a decode block
    #[arg(long, value_name = "TOKENS")]
    pub(crate) decode_block: Option<u32>,
    /// hnd, nhd, planes or packed-rows, and after commas: share (groups share memory), state-first, scratch=ROWS,
    /// padding=BYTES, kernel=TOKENS [default: as described, hnd]
    #[arg(long, value_name = "LAYOUT")]
    pub(crate) prefill_layout: Option<Layout>,
    /// The same for the decode engine
    #[arg(long, value_name = "LAYOUT")]
    pub(crate) decode_layout: Option<Layout>,
    /// Tokens of each prompt that the decode engine has already; states are read all the same
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub(crate) prefix_hit: u64,
    /// Earlier states that the prefill engine keeps beside the one after all tokens
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(..=64))]
    pub(crate) checkpoints: u64,
    /// The latest of them that the decode engine takes too
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) decode_checkpoints: u64,
    /// Keep sliding windows in rings
    #[arg(long)]
    pub(crate) rings: bool,
    /// Give each request blocks one after the other, as an engine does that has just started, instead of scattered ones
    #[arg(long)]
    pub(crate) contiguous: bool,
    /// Spread what a rank reads over all ranks that hold it equally
    #[arg(long)]
    pub(crate) stripe: bool,
    /// Staging memory of each rank that may stage, for example 64MiB; 0 for none
    #[arg(long, default_value = "0", value_name = "SIZE", value_parser = show::parse_size)]
    pub(crate) pool: u64,
    /// Which way reads go where there is staging memory
    #[arg(long, value_enum, default_value_t = Way::Auto)]
    pub(crate) way: Way,
    #[command(flatten)]
    pub(crate) ignore: IgnoreArgs,
    /// How bytes move: shm, mem (one process), ucx, nixl, or several in order of preference, such as nixl,ucx
    #[arg(long, default_value_t = Wire::Shm.into(), value_name = "LIST")]
    pub(crate) transport: Wires,
    /// What the prefill engine's ranks have [default: --transport]
    #[arg(long, value_name = "LIST")]
    pub(crate) prefill_transport: Option<Wires>,
    /// What the decode engine's ranks have
    #[arg(long, value_name = "LIST")]
    pub(crate) decode_transport: Option<Wires>,
    #[command(flatten)]
    pub(crate) backends: BackendArgs,
    /// One JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

fn layer_ms(text: &str) -> Result<f64, String> {
    let range = 0.01..=60_000.0;
    text.parse::<f64>().ok().filter(|ms| range.contains(ms)).ok_or_else(|| format!("a layer takes {range:?} ms"))
}

/// A layout as it is written on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    text: String,
    pub(crate) style: LayoutStyle,
    pub(crate) kernel_block: Option<u32>,
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let style = words.next().and_then(layout_named).ok_or("the layouts are hnd, nhd, planes and packed-rows")?;
        let mut out = Self { text: text.to_owned(), style, kernel_block: None };
        for word in words {
            let (key, number) = match word.split_once('=') {
                Some((key, n)) => (key, Some(n.parse::<u32>().map_err(|_| format!("{word}: {n} is no number"))?)),
                None => (word, None),
            };
            match (key, number) {
                ("share", None) => out.style.share = true,
                ("state-first", None) => out.style.state_order = StateOrder::RowsOuter,
                ("scratch", Some(n)) => out.style.scratch_rows = n,
                ("padding", Some(n)) => out.style.padding = Bytes::new(n.into()),
                ("kernel", Some(n)) => out.kernel_block = Some(n),
                _ => {
                    return Err(
                        "after a layout come share, state-first, scratch=ROWS, padding=BYTES, kernel=TOKENS".into()
                    );
                }
            }
        }
        Ok(out)
    }
}

impl Args {
    /// What the ranks of an engine have.
    pub(crate) fn wires(&self, role: Role) -> &Wires {
        let own = match role {
            Role::Prefill => self.prefill_transport.as_ref(),
            Role::Decode => self.decode_transport.as_ref(),
        };
        own.unwrap_or(&self.transport)
    }

    /// How long a layer takes by the compute model.
    pub(crate) fn layer_time(&self) -> Duration {
        Duration::from_secs_f64(self.layer_ms / 1e3)
    }

    /// The arguments that say the same again, for a rank process.
    pub(crate) fn again(&self) -> Vec<String> {
        let mut out = self.model.again();
        out.extend([
            format!("--prefill={}", self.prefill),
            format!("--decode={}", self.decode),
            format!("--tokens={}", self.tokens),
            format!("--requests={}", self.requests),
            format!("--prefix-hit={}", self.prefix_hit),
            format!("--checkpoints={}", self.checkpoints),
            format!("--decode-checkpoints={}", self.decode_checkpoints),
            format!("--pool={}", self.pool),
            format!("--way={}", self.way.name()),
            format!("--mode={}", self.mode.name()),
            format!("--transport={}", self.transport),
        ]);
        out.extend(self.stream.map(|Stream::Layers| "--stream=layers".to_owned()));
        out.push(format!("--layer-ms={}", self.layer_ms));
        out.extend(self.concurrency.map(|n| format!("--concurrency={n}")));
        out.extend(self.prefill_transport.as_ref().map(|w| format!("--prefill-transport={w}")));
        out.extend(self.decode_transport.as_ref().map(|w| format!("--decode-transport={w}")));
        out.extend(self.backends.again());
        out.extend(self.prefill_block.map(|n| format!("--prefill-block={n}")));
        out.extend(self.decode_block.map(|n| format!("--decode-block={n}")));
        out.extend(self.prefill_layout.as_ref().map(|l| format!("--prefill-layout={}", l.text)));
        out.extend(self.decode_layout.as_ref().map(|l| format!("--decode-layout={}", l.text)));
        let flags = [
            ("--rings", self.rings),
            ("--contiguous", self.contiguous),
            ("--stripe", self.stripe),
            ("--ignore-source-only", self.ignore.ignore_source_only),
            ("--ignore-destination-only", self.ignore.ignore_destination_only),
        ];
        out.extend(flags.into_iter().filter(|f| f.1).map(|f| f.0.to_owned()));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        demo: Args,
    }

    fn parse(line: &[&str]) -> Args {
        let line = std::iter::once("demo").chain(line.iter().copied());
        <Line as clap::Parser>::try_parse_from(line).unwrap().demo
    }

    #[test]
    fn a_rank_s_process_is_told_all_of_it() {
        let all = [
            "--model=gpt-oss-120b",
            "--prefill=tp=2,pp=2",
            "--decode=crates/kvferry-models/examples/draft.toml",
            "--tokens=5",
            "--requests=6",
            "--concurrency=3",
            "--prefill-block=32",
            "--decode-block=48",
            "--prefill-layout=nhd,share,state-first,scratch=3",
            "--decode-layout=hnd,padding=256,kernel=16",
            "--prefix-hit=1",
            "--checkpoints=2",
            "--decode-checkpoints=1",
            "--rings",
            "--contiguous",
            "--stripe",
            "--pool=3MiB",
            "--way=destination",
            "--mode=push",
            "--stream=layers",
            "--layer-ms=2.5",
            "--ignore-source-only",
            "--ignore-destination-only",
            "--transport=ucx",
            "--prefill-transport=ucx,shm",
            "--decode-transport=nixl,ucx",
            "--rails=2",
        ];
        for line in [&all[..], &[]] {
            let first = parse(line);
            let again = first.again();
            let second = parse(&again.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(format!("{first:?}"), format!("{second:?}"));
        }
    }

    #[test]
    fn chaos_has_defaults_of_its_own() {
        let of = |line: &[&str]| {
            let args = parse(line);
            (args.tokens, args.requests, args.concurrency, args.kills)
        };
        assert_eq!(of(&[]), (2048, 4, None, 2));
        assert_eq!(of(&["--chaos"]), (512, 16, Some(4), 2));
        assert_eq!(of(&["--chaos", "--tokens=9", "--concurrency=2", "--kills=3"]), (9, 16, Some(2), 3));
    }

    #[test]
    fn layouts_have_options() {
        let layout: Layout = "packed-rows,share,state-first,scratch=3,kernel=16".parse().unwrap();
        let expected = LayoutStyle {
            share: true,
            state_order: StateOrder::RowsOuter,
            scratch_rows: 3,
            ..LayoutStyle::PACKED_ROWS
        };
        assert_eq!((layout.style, layout.kernel_block), (expected, Some(16)));
        for wrong in ["", "share", "hnd,scratch", "hnd,share=1", "hnd,padding=x", "hnd,other"] {
            assert!(wrong.parse::<Layout>().is_err(), "{wrong}");
        }
    }
}
