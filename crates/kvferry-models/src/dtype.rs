//! Data types of cached values: what a model was trained in, and what its cache is kept in.

use std::fmt;
use std::str::FromStr;

/// A model's own data type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dtype {
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE half, 2 bytes.
    Fp16,
    /// IEEE single, 4 bytes.
    Fp32,
}

impl Dtype {
    pub(crate) const KNOWN: &'static str = "bfloat16, float16 or float32";

    /// Reads the names that engines use.
    pub(crate) fn parse_short(word: &str) -> Option<Self> {
        match word {
            "bf16" => Some(Self::Bf16),
            "fp16" => Some(Self::Fp16),
            "fp32" => Some(Self::Fp32),
            other => Self::parse(other),
        }
    }

    /// Reads the names that configurations use, with or without `torch.`.
    pub(crate) fn parse(word: &str) -> Option<Self> {
        match word.strip_prefix("torch.").unwrap_or(word) {
            "bfloat16" => Some(Self::Bf16),
            "float16" | "half" => Some(Self::Fp16),
            "float32" | "float" => Some(Self::Fp32),
            _ => None,
        }
    }

    /// Bytes of one value and the encoding's tag.
    pub(crate) const fn format(self) -> (u32, &'static str) {
        match self {
            Self::Bf16 => (2, "bf16"),
            Self::Fp16 => (2, "fp16"),
            Self::Fp32 => (4, "fp32"),
        }
    }
}

/// What the KV cache is kept in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum KvDtype {
    /// FP8 (e4m3) where the configuration says that the checkpoint was calibrated for it, else the model's own type.
    #[default]
    Auto,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    Fp16,
    /// 8-bit float, 4 exponent bits; `fp8` means this one.
    Fp8E4m3,
    /// 8-bit float, 5 exponent bits.
    Fp8E5m2,
    /// K and V only: 4-bit floats, two in a byte, with one e4m3 scale for each 16 values, in components of their own.
    Nvfp4,
    /// MLA only: the latent in e4m3 with one 32-bit scale for each 128 values, the rotary part in bf16 (656 bytes for
    /// 512 + 64 values).
    Fp8DsMla,
}

impl KvDtype {
    pub(crate) const KNOWN: &'static str = "auto, bf16, fp16, fp8, fp8_e4m3, fp8_e5m2, nvfp4 or fp8_ds_mla";

    pub(crate) fn parse(word: &str) -> Option<Self> {
        match word {
            "auto" => Some(Self::Auto),
            "bf16" | "bfloat16" => Some(Self::Bf16),
            "fp16" | "float16" => Some(Self::Fp16),
            "fp8" | "fp8_e4m3" => Some(Self::Fp8E4m3),
            "fp8_e5m2" => Some(Self::Fp8E5m2),
            "nvfp4" => Some(Self::Nvfp4),
            "fp8_ds_mla" => Some(Self::Fp8DsMla),
            _ => None,
        }
    }
}

/// Scales that lie apart from an FP8 cache's values, each 32 bits, in components `k_scale`, `v_scale`, `latent_scale`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Scales {
    /// None, or one for a whole tensor that isn't part of the cache.
    #[default]
    None,
    /// One for each token and head.
    PerTokenHead,
    /// One for each head and so many tokens.
    PerBlockHead(u32),
    /// One for so many tokens and all heads that a rank holds.
    PerBlock(u32),
}

impl fmt::Display for Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::PerTokenHead => f.write_str("per-token-head"),
            Self::PerBlockHead(n) => write!(f, "per-block-head of {n} tokens"),
            Self::PerBlock(n) => write!(f, "per-block of {n} tokens"),
        }
    }
}

/// What an indexer's keys (DeepSeek-V3.2) are kept in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum IndexerDtype {
    /// As the latent: FP8 with scales where the KV cache is FP8, else the KV cache's type.
    #[default]
    Auto,
    /// The model's own type.
    Model,
    /// e4m3 with one 32-bit scale for each 128 values, as vLLM keeps it whatever the KV cache's type: 132 bytes for
    /// 128 values.
    Fp8,
}

impl IndexerDtype {
    pub(crate) const KNOWN: &'static str = "auto, model or fp8";

    pub(crate) fn parse(word: &str) -> Option<Self> {
        match word {
            "auto" => Some(Self::Auto),
            "model" => Some(Self::Model),
            "fp8" => Some(Self::Fp8),
            _ => None,
        }
    }
}

/// A word that names no data type.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{got:?} is no data type known here; use {known}")]
pub struct UnknownDtype {
    /// The word.
    pub got: String,
    /// The words that are known.
    pub known: &'static str,
}

impl FromStr for KvDtype {
    type Err = UnknownDtype;
    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Self::parse(word).ok_or_else(|| UnknownDtype { got: word.into(), known: Self::KNOWN })
    }
}

impl FromStr for IndexerDtype {
    type Err = UnknownDtype;
    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Self::parse(word).ok_or_else(|| UnknownDtype { got: word.into(), known: Self::KNOWN })
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Nvfp4 => "nvfp4",
            Self::Fp8DsMla => "fp8_ds_mla",
        })
    }
}
