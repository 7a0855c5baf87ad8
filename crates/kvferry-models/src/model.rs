//! A model's layers as its configuration describes them.

use std::fmt;
use std::path::Path;

use kvferry_geometry::spec::{Retention, SpecErrors};

use crate::dtype::{Dtype, KvDtype, Scales};
use crate::error::{InputError, InputErrors};
use crate::items::{ModelItems, ModelOptions};
use crate::state::State;
use crate::{config, preset, read};

/// The most layers a model can have.
pub const MAX_LAYERS: u32 = 1024;

/// What one layer caches; nothing where it reads another layer's cache or has none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Layer {
    /// Its attention's cache.
    pub attention: Option<Attention>,
    /// Its recurrent state; a layer can have both.
    pub state: Option<State>,
}

/// What one layer's attention caches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Attention {
    /// K and V for each KV head.
    Heads {
        /// KV heads of the whole model.
        heads: u32,
        /// Values of one head's K, and of its V.
        head_dim: u32,
        /// Which tokens stay readable.
        retention: Retention,
    },
    /// One MLA latent for all heads.
    Latent {
        /// Values of the compressed KV (`kv_lora_rank`).
        latent: u32,
        /// Values of the rotary key (`qk_rope_head_dim`).
        rope: u32,
        /// Values of an indexer's key (`index_head_dim`), where the layer has one.
        indexer: Option<u32>,
    },
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Heads { heads, head_dim, .. } => write!(f, "K and V of {heads} heads of {head_dim} values"),
            Self::Latent { latent, rope, .. } => write!(f, "an MLA latent of {latent} + {rope} values"),
        }
    }
}

/// A model as its configuration describes it: layers and data types, before any choice of an engine.
///
/// ```
/// use kvferry_models::{Model, ModelOptions};
/// let model = Model::preset("qwen3-next-80b-a3b")?;
/// let all = model.items(&ModelOptions::default())?;
/// assert_eq!((all.spec.bytes_per_token().get(), all.spec.bytes_per_state().get()), (24_576, 39_518_208));
/// let some = model.items(&ModelOptions { layers: Some(4), ..ModelOptions::default() })?;
/// assert_eq!(some.spec.items()[2].name.as_str(), "model.layers.2.linear_attn");
/// assert_eq!(some.spec.items()[3].name.as_str(), "model.layers.3.self_attn.attn");
/// # Ok::<(), kvferry_models::ModelError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Model {
    pub(crate) name: String,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) kv_auto: KvAuto,
    /// What the recurrent state is kept in unless the engine says otherwise; `None`: as the convolution.
    pub(crate) state_auto: Option<Dtype>,
    pub(crate) names: ItemNames,
    pub(crate) layers: Vec<Layer>,
    pub(crate) mtp: Mtp,
}

/// A model's own multi-token-prediction layers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Mtp {
    /// How many prediction steps have layers of their own.
    pub(crate) steps: u32,
    /// The layers of one step.
    pub(crate) layers: Vec<Layer>,
    /// What stands before a layer's number, counted from 0; `None`: they are named and numbered after the model's own layers.
    pub(crate) before: Option<&'static str>,
}

/// What the checkpoint says of its KV cache's type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum KvAuto {
    /// Nothing: the model's own type.
    Model,
    /// FP8, e4m3.
    Fp8,
    /// Something that isn't known here.
    Unknown(InputError),
}

/// How vLLM names a layer's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ItemNames {
    /// Before the layer's number.
    pub(crate) before: &'static str,
    /// After it, for the attention.
    pub(crate) attention: &'static str,
    /// After it, for the state.
    pub(crate) state: StateName,
}

/// How vLLM names a layer's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StateName {
    /// As the attention, with this after the number.
    After(&'static str),
    /// The layer's number is counted on after the model's layers, so that it differs from the attention's: before the number,
    /// after it (Falcon-H1).
    Beyond(&'static str, &'static str),
}

/// Why there is no model or no spec.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No preset has this name.
    #[error("there is no preset {name:?}; the presets are {}", known.join(", "))]
    UnknownPreset {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// The configuration is faulty.
    #[error(transparent)]
    Input(#[from] InputErrors),
    /// A `layers` option beyond the model.
    #[error("layers is {got}, but {model} has {has}; it must be 1 to {has}")]
    Layers {
        /// The model's name.
        model: String,
        /// Layers asked for.
        got: u32,
        /// Layers there are.
        has: u32,
    },
    /// The `mtp` option on a model that has no such layers.
    #[error("mtp is set, but {model} has no multi-token-prediction layers; leave it out")]
    NoMtp {
        /// The model's name.
        model: String,
    },
    /// More multi-token-prediction layers than the model has.
    #[error("mtp is {got}, but {model} has {has} multi-token-prediction layers; it must be 1 to {has}")]
    Mtp {
        /// The model's name.
        model: String,
        /// Layers asked for.
        got: u32,
        /// Layers there are.
        has: u32,
    },
    /// A cache type that a layer can't be kept in.
    #[error(
        "{option} is {kv_dtype}, but layer {layer} of {model} keeps {keeps}; {kv_dtype} is for {fits}, use another type"
    )]
    KvDtype {
        /// The model's name.
        model: String,
        /// The option that says so: `kv_dtype` or `draft_kv_dtype`.
        option: &'static str,
        /// The type asked for.
        kv_dtype: KvDtype,
        /// The first such layer.
        layer: u32,
        /// What it keeps.
        keeps: Attention,
        /// What can be kept in this type.
        fits: &'static str,
    },
    /// Scales beside a cache that needs none or has its own.
    #[error("scales are {scales}, but the KV cache of {model} is kept in {kept}; scales go with fp8_e4m3 and fp8_e5m2")]
    Scales {
        /// The model's name.
        model: String,
        /// The scales asked for.
        scales: Scales,
        /// What the cache is kept in.
        kept: &'static str,
    },
    /// A state type on a model that keeps no state.
    #[error("{option} is set, but {model} keeps no recurrent state; leave it out")]
    NoState {
        /// The model's name.
        model: String,
        /// The option.
        option: &'static str,
    },
    /// The items don't make a spec.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// Several of the above; no one of them is this.
    #[error("{}", list(.0))]
    Several(Vec<ModelError>),
}

fn list(errors: &[ModelError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

impl Model {
    /// One of the project's own presets; [`preset_names`](crate::preset_names) lists them.
    ///
    /// # Errors
    /// An unknown name, with the known ones.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        preset::load(name)
    }

    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// All faults with key and line.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        Self::from_json(&path.display().to_string(), &read::text(path)?)
    }

    /// Reads the text of a Hugging Face `config.json`; `file` names it in messages.
    ///
    /// # Errors
    /// As [`Model::from_file`].
    pub fn from_json(file: &str, text: &str) -> Result<Self, ModelError> {
        config::from_json(file, text)
    }

    /// A preset if there is one of this name, else the configuration in the file of this name.
    ///
    /// # Errors
    /// As [`Model::from_file`] where there is such a file, else as [`Model::preset`].
    pub fn preset_or_file(name: &str) -> Result<Self, ModelError> {
        match Self::preset(name) {
            Err(ModelError::UnknownPreset { .. }) if Path::new(name).exists() => Self::from_file(name),
            other => other,
        }
    }

    /// The preset's name, or the configuration's `model_type`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What each layer caches.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Multi-token-prediction layers that keep a cache, which [`ModelOptions::mtp`] adds.
    #[must_use]
    pub fn mtp_layers(&self) -> u32 {
        self.mtp.steps
    }

    /// The configuration's own data type; `None` where it says none, and bf16 is then assumed.
    #[must_use]
    pub fn dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    /// The cache items under the given options.
    ///
    /// # Errors
    /// Every option that this model can't have, [`ModelError::Several`] where there is more than one.
    pub fn items(&self, options: &ModelOptions) -> Result<ModelItems, ModelError> {
        ModelItems::of(self, options)
    }
}

/// Numbers in rising order as `0-3, 5, 7-9`.
#[must_use]
pub fn ranges(numbers: &[u32]) -> String {
    let mut out = String::new();
    for run in numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        if !out.is_empty() {
            out.push_str(", ");
        }
        out.push_str(&first.to_string());
        if last > first {
            let dash = if *last == first + 1 { ", " } else { "-" };
            out.push_str(&format!("{dash}{last}"));
        }
    }
    out
}
