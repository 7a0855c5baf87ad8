//! Engines on a command line: a description's file, or parallel sizes of a model named beside them.
//!
//! What the flags say overrules a description, on both sides, so that a large model can be cut down for a small run.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use kvferry_geometry::compat::{CompatOptions, Unmatched};
use kvferry_models::{
    Attention, DescribeError, EngineDescription, KvDtype, Layer, Model, ModelOptions, MtpLayers, Scales, Shape, State,
};

/// What is described where nothing else is named.
const DEFAULT_MODEL: &str = "llama-3.1-8b";
/// Tokens that one scale of a block covers where the command line doesn't say.
const SCALE_BLOCK: u32 = 16;

/// An engine as it stands on a command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Named {
    /// A description in TOML.
    File(PathBuf),
    /// Parallel sizes: `tp=4,pp=2`.
    Shape(Shape),
}

impl FromStr for Named {
    type Err = String;

    /// Sizes have an equals sign; a file of such a name is still a file.
    fn from_str(text: &str) -> Result<Self, String> {
        let path = Path::new(text);
        if !text.contains('=') || path.exists() {
            return Ok(Self::File(path.to_owned()));
        }
        text.parse().map(Self::Shape).map_err(|e| e.to_string())
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Shape(shape) => write!(f, "{shape}"),
        }
    }
}

/// The model, and what of it is cached and how. What is left out is as the descriptions say.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub(crate) struct ModelArgs {
    /// A preset's name or the path of a Hugging Face config.json [default: llama-3.1-8b]
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Only the model's first so many layers, and at least so many that every kind of layer is among them
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<u32>,
    /// A draft model kept beside it, a preset or a path; may be given several times
    #[arg(long, value_name = "NAME")]
    pub(crate) draft: Vec<String>,
    /// Also the model's multi-token-prediction layers, all or the first so many
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    #[arg(value_parser = mtp)]
    pub(crate) mtp: Option<MtpLayers>,
    /// What the KV cache is kept in: auto, bf16, fp16, fp8, fp8_e5m2, nvfp4, fp8_ds_mla
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_dtype: Option<KvDtype>,
    /// The same for the drafts
    #[arg(long, value_name = "TYPE")]
    pub(crate) draft_kv_dtype: Option<KvDtype>,
    /// Scales beside an FP8 cache: none, per-token-head, per-block-head[=TOKENS], per-block[=TOKENS]
    #[arg(long, value_name = "KIND", value_parser = scales)]
    pub(crate) scales: Option<Scales>,
}

/// What may differ between the engines.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[group(skip)]
pub(crate) struct IgnoreArgs {
    /// Leave items alone that only P has (its draft, say)
    #[arg(long)]
    pub(crate) ignore_source_only: bool,
    /// Leave items alone that only D has: it goes on without their bytes
    #[arg(long)]
    pub(crate) ignore_destination_only: bool,
}

impl IgnoreArgs {
    pub(crate) fn options(self) -> CompatOptions {
        let of = |ignore| {
            if ignore { Unmatched::Ignore } else { Unmatched::Refuse }
        };
        CompatOptions { source_only: of(self.ignore_source_only), destination_only: of(self.ignore_destination_only) }
    }
}

impl ModelArgs {
    /// The engine with this model.
    pub(crate) fn describe(&self, engine: &Named, name: &str) -> Result<EngineDescription, DescribeError> {
        let mut out = match engine {
            Named::File(path) => {
                let mut out = EngineDescription::from_file(path)?;
                if let Some(model) = &self.model {
                    out.model = Model::preset_or_file(model)?;
                }
                out
            }
            Named::Shape(shape) => {
                let model = Model::preset_or_file(self.model.as_deref().unwrap_or(DEFAULT_MODEL))?;
                let mut out = EngineDescription::new(model, *shape);
                out.name = name.to_owned();
                out
            }
        };
        self.overrule(&mut out)?;
        Ok(out)
    }

    fn overrule(&self, out: &mut EngineDescription) -> Result<(), DescribeError> {
        let options = &mut out.options;
        if !self.draft.is_empty() {
            options.drafts = self.draft.iter().map(|d| Model::preset_or_file(d)).collect::<Result<_, _>>()?;
        }
        set(&mut options.mtp, self.mtp);
        set(&mut options.kv_dtype, self.kv_dtype);
        set(&mut options.scales, self.scales);
        options.draft_kv_dtype = self.draft_kv_dtype.or(options.draft_kv_dtype);
        options.layers = self.layers.map(|n| at_least(n, out.model.layers())).or(options.layers);
        Ok(())
    }

    /// The arguments that say the same again.
    pub(crate) fn again(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut say = |flag: &str, value: Option<String>| out.extend(value.map(|v| format!("--{flag}={v}")));
        say("model", self.model.clone());
        say("layers", self.layers.map(|n| n.to_string()));
        for draft in &self.draft {
            say("draft", Some(draft.clone()));
        }
        let steps = |mtp| match mtp {
            MtpLayers::None => "0".to_owned(),
            MtpLayers::All => "all".to_owned(),
            MtpLayers::First(n) => n.to_string(),
        };
        say("mtp", self.mtp.map(steps));
        say("kv-dtype", self.kv_dtype.map(|d| d.to_string()));
        say("draft-kv-dtype", self.draft_kv_dtype.map(|d| d.to_string()));
        let kind = |scales| match scales {
            Scales::None => "none".to_owned(),
            Scales::PerTokenHead => "per-token-head".to_owned(),
            Scales::PerBlockHead(n) => format!("per-block-head={n}"),
            Scales::PerBlock(n) => format!("per-block={n}"),
        };
        say("scales", self.scales.map(kind));
        out
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// Of `asked` layers and the fewest that have every kind of cache of the model, the more.
fn at_least(asked: u32, layers: &[Layer]) -> u32 {
    let (mut attention, mut states): (Vec<Attention>, Vec<State>) = (Vec::new(), Vec::new());
    let mut fewest = 0;
    for (number, layer) in (1u32..).zip(layers) {
        let (a, s) = (layer.attention.filter(|a| !attention.contains(a)), layer.state.filter(|s| !states.contains(s)));
        if a.is_some() || s.is_some() {
            fewest = number;
        }
        attention.extend(a);
        states.extend(s);
    }
    // None at all is a fault that the model tells.
    if asked == 0 { 0 } else { asked.max(fewest) }
}

fn mtp(text: &str) -> Result<MtpLayers, String> {
    match text {
        "all" => Ok(MtpLayers::All),
        "0" => Ok(MtpLayers::None),
        n => n.parse().map(MtpLayers::First).map_err(|_| "write a number of layers, or nothing for all".into()),
    }
}

fn scales(text: &str) -> Result<Scales, String> {
    let known = || "the scales are none, per-token-head, per-block-head[=TOKENS] and per-block[=TOKENS]".to_owned();
    let (kind, tokens) = match text.split_once('=') {
        Some((kind, n)) => (kind, n.parse().ok().filter(|&n: &u32| n > 0).ok_or_else(known)?),
        None => (text, SCALE_BLOCK),
    };
    match kind {
        "none" => Ok(Scales::None),
        "per-token-head" => Ok(Scales::PerTokenHead),
        "per-block-head" => Ok(Scales::PerBlockHead(tokens)),
        "per-block" => Ok(Scales::PerBlock(tokens)),
        _ => Err(known()),
    }
}

/// What changes a model's items, in words; empty where nothing does.
pub(crate) fn options(o: &ModelOptions) -> String {
    let mut out = Vec::new();
    out.extend(o.layers.map(|n| format!("{n} layers")));
    out.extend(match o.mtp {
        MtpLayers::None => None,
        MtpLayers::All => Some("MTP".to_owned()),
        MtpLayers::First(n) => Some(format!("{n} MTP layers")),
    });
    out.extend(o.drafts.iter().map(|d| format!("draft {}", d.name())));
    if o.kv_dtype != KvDtype::Auto {
        out.push(o.kv_dtype.to_string());
    }
    if o.scales != Scales::None {
        out.push(format!("scales {}", o.scales));
    }
    out.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_files_or_sizes() {
        assert_eq!("a/b.toml".parse(), Ok(Named::File("a/b.toml".into())));
        assert_eq!("tp=2,pp=3".parse::<Named>().unwrap().to_string(), "tp=2,pp=3");
        assert!("tp=two".parse::<Named>().is_err());
    }

    #[test]
    fn a_cut_model_keeps_every_kind_of_layer() {
        let fewest = |name: &str| at_least(1, Model::preset(name).unwrap().layers());
        assert_eq!((fewest("llama-3.1-8b"), fewest("gpt-oss-120b"), fewest("gemma-3-27b-it")), (1, 2, 6));
        assert_eq!((fewest("jamba-v0.1"), fewest("qwen3-next-80b-a3b"), fewest("falcon-h1-0.5b")), (5, 4, 1));
        let jamba = Model::preset("jamba-v0.1").unwrap();
        assert_eq!(
            (at_least(9, jamba.layers()), at_least(0, jamba.layers()), at_least(99, jamba.layers())),
            (9, 0, 99)
        );
    }

    #[test]
    fn what_is_said_again_is_the_same() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            model: ModelArgs,
        }
        let line = [
            "x",
            "--model=kimi-k2.5",
            "--layers=3",
            "--draft=kimi-k2.5-eagle3",
            "--draft=kimi-k2.5-eagle3-mla",
            "--mtp",
            "--kv-dtype=fp8",
            "--draft-kv-dtype=bf16",
            "--scales=per-block-head",
        ];
        let parse = |line: &[String]| <Line as clap::Parser>::try_parse_from(line).unwrap().model;
        let first = parse(&line.map(str::to_owned));
        let again: Vec<String> = std::iter::once("x".to_owned()).chain(first.again()).collect();
        assert_eq!(format!("{first:?}"), format!("{:?}", parse(&again)));
        assert!(again.contains(&"--scales=per-block-head=16".to_owned()), "{again:?}");
        assert!(scales("per-block=0").is_err() && scales("some").is_err() && mtp("some").is_err());
    }

    #[test]
    fn flags_overrule_a_description() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kvferry-models/examples/hybrid-decode.toml");
        let args = ModelArgs { layers: Some(1), ..ModelArgs::default() };
        // The file's stages list all layers, so only the options are looked at here.
        let engine = args.describe(&Named::File(path), "decode").unwrap();
        assert_eq!((engine.options.layers, engine.name.as_str()), (Some(6), "hybrid-decode"));
        assert_eq!(options(&engine.options), "6 layers");
    }
}
