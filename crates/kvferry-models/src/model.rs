//! A model's layers, and the cache items that they make.

use std::fmt;
use std::path::Path;

use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention, SpecErrors};
use kvferry_geometry::units::ItemId;

use crate::dtype::{Dtype, IndexerDtype, KvDtype};
use crate::error::{InputError, InputErrors};
use crate::{config, preset, read};

/// The most layers a model can have.
pub const MAX_LAYERS: u32 = 1024;

/// What one layer caches.
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

/// A model as its configuration describes it: layers and data types, before any choice of an engine.
///
/// ```
/// use kvferry_models::{Model, ModelOptions};
/// let model = Model::preset("llama-3.1-8b")?;
/// let all = model.items(&ModelOptions::default())?;
/// assert_eq!(all.spec.bytes_per_token().get(), 131_072);
/// let some = model.items(&ModelOptions { layers: Some(8), ..ModelOptions::default() })?;
/// assert_eq!(some.spec.items()[7].name.as_str(), "model.layers.7.self_attn.attn");
/// # Ok::<(), kvferry_models::ModelError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Model {
    pub(crate) name: String,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) kv_auto: KvAuto,
    pub(crate) names: ItemNames,
    pub(crate) layers: Vec<Option<Attention>>,
    pub(crate) mtp: u32,
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

/// The parts of an item's name around the layer's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ItemNames {
    /// Before the number.
    pub(crate) before: &'static str,
    /// After it, for the attention.
    pub(crate) after: &'static str,
}

/// Choices of an engine that change what is cached.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModelOptions {
    /// What the KV cache is kept in.
    pub kv_dtype: KvDtype,
    /// What an indexer's keys are kept in.
    pub indexer: IndexerDtype,
    /// Only the first so many layers, for small runs.
    pub layers: Option<u32>,
    /// Also the model's own multi-token-prediction layers.
    pub mtp: bool,
    /// Draft models whose caches are kept beside the model's; their layers are numbered after its own.
    pub drafts: Vec<Model>,
}

/// The cache items of a model under given options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelItems {
    /// All items: the model's layers in order, then its MTP layers, then the drafts'.
    pub spec: ModelSpec,
    /// The items of each layer, in the same order.
    pub layers: Vec<LayerItems>,
}

/// The items of one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerItems {
    /// The layer's number, as in the items' names.
    pub layer: u32,
    /// Whether it is an MTP or draft layer, after the model's own.
    pub extra: bool,
    /// Its items; none where it shares another layer's cache.
    pub items: Vec<ItemId>,
}

/// Layers that keep a state rather than a cache of tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateLayers {
    /// What kind of state: `mamba2`, `gated delta net`, ...
    pub kind: &'static str,
    /// The layers' indices, from 0.
    pub layers: Vec<u32>,
}

/// A model that is understood but whose state caches can't be carried yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotYet {
    /// The model's name.
    pub model: String,
    /// The file.
    pub file: String,
    /// The line of the key that says which layers these are.
    pub line: u32,
    /// That key.
    pub key: String,
    /// The layers whose states aren't supported yet.
    pub state: Vec<StateLayers>,
    /// The layers that keep an attention cache, which alone would not be the model's cache.
    pub attention: Vec<u32>,
}

impl fmt::Display for NotYet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: model {}: not supported yet: ", self.file, self.line, self.key, self.model)?;
        for (i, s) in self.state.iter().enumerate() {
            let (comma, count) = (if i > 0 { "; " } else { "" }, s.layers.len());
            write!(f, "{comma}the {} state of {count} layers ({})", s.kind, ranges(&s.layers))?;
        }
        let count = self.attention.len();
        write!(f, "; without it the cache of its {count} attention layers ({}) is no use", ranges(&self.attention))
    }
}
impl std::error::Error for NotYet {}

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
    /// The model keeps states, which can't be carried yet.
    #[error(transparent)]
    NotYet(#[from] Box<NotYet>),
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
    /// A cache type that a layer can't be kept in.
    #[error(
        "kv_dtype is {kv_dtype}, but layer {layer} of {model} keeps {keeps}; {kv_dtype} is for MLA latents of a multiple of 128 values, use another type"
    )]
    KvDtype {
        /// The model's name.
        model: String,
        /// The type asked for.
        kv_dtype: KvDtype,
        /// The first such layer.
        layer: u32,
        /// What it keeps.
        keeps: String,
    },
    /// The items don't make a spec.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
}

impl Model {
    /// One of the project's own presets; [`preset_names`](crate::preset_names) lists them.
    ///
    /// # Errors
    /// An unknown name, with the known ones; or a model that keeps states.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        preset::load(name)
    }

    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// All faults with key and line; or a model that keeps states.
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

    /// What each layer caches; `None` where it reads an earlier layer's cache.
    #[must_use]
    pub fn layers(&self) -> &[Option<Attention>] {
        &self.layers
    }

    /// Multi-token-prediction layers, which [`ModelOptions::mtp`] adds.
    #[must_use]
    pub fn mtp_layers(&self) -> u32 {
        self.mtp
    }

    /// The configuration's own data type; `None` where it says none, and bf16 is then assumed.
    #[must_use]
    pub fn dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    /// The cache items under the given options.
    ///
    /// # Errors
    /// Options that this model can't have.
    pub fn items(&self, options: &ModelOptions) -> Result<ModelItems, ModelError> {
        let has = u32::try_from(self.layers.len()).unwrap_or(u32::MAX);
        let take = options.layers.unwrap_or(has);
        if take == 0 || take > has {
            return Err(ModelError::Layers { model: self.name.clone(), got: take, has });
        }
        if options.mtp && self.mtp == 0 {
            return Err(ModelError::NoMtp { model: self.name.clone() });
        }
        let mut out = Builder::default();
        for (i, layer) in (0u32..).zip(self.layers.iter().take(take as usize)) {
            out.layer(self, i, false, *layer, options)?;
        }
        let mut next = has;
        if options.mtp {
            for _ in 0..self.mtp {
                out.layer(self, next, true, self.layers.last().copied().flatten(), options)?;
                next += 1;
            }
        }
        for draft in &options.drafts {
            for layer in &draft.layers {
                out.layer(draft, next, true, *layer, options)?;
                next = next.saturating_add(1);
            }
        }
        Ok(ModelItems { spec: ModelSpec::new(out.items)?, layers: out.layers })
    }

    /// How one value of this model's KV cache is kept: `(bytes, tag)`, or `None` for the packed MLA format.
    fn kv_format(&self, kv: KvDtype) -> Result<Option<(u32, &'static str)>, ModelError> {
        let fp8 = (1, "fp8_e4m3");
        Ok(match (kv, &self.kv_auto) {
            (KvDtype::Auto, KvAuto::Unknown(error)) => return Err(InputErrors::from(error.clone()).into()),
            (KvDtype::Auto, KvAuto::Model) => Some(self.dtype.unwrap_or(Dtype::Bf16).format()),
            (KvDtype::Auto, KvAuto::Fp8) | (KvDtype::Fp8E4m3, _) => Some(fp8),
            (KvDtype::Bf16, _) => Some(Dtype::Bf16.format()),
            (KvDtype::Fp16, _) => Some(Dtype::Fp16.format()),
            (KvDtype::Fp8E5m2, _) => Some((1, "fp8_e5m2")),
            (KvDtype::Fp8DsMla, _) => None,
        })
    }
}

#[derive(Default)]
struct Builder {
    items: Vec<Item>,
    layers: Vec<LayerItems>,
}

impl Builder {
    fn layer(
        &mut self,
        model: &Model,
        layer: u32,
        extra: bool,
        attention: Option<Attention>,
        options: &ModelOptions,
    ) -> Result<(), ModelError> {
        let first = self.items.len();
        let format = model.kv_format(options.kv_dtype)?;
        let refuse =
            |keeps: String| ModelError::KvDtype { model: model.name.clone(), kv_dtype: options.kv_dtype, layer, keeps };
        let name = format!("{}{layer}{}", model.names.before, model.names.after);
        match attention {
            None => {}
            Some(Attention::Heads { heads, head_dim, retention }) => {
                let (bytes, tag) = format.ok_or_else(|| refuse(format!("K and V of {heads} heads")))?;
                let width = u64::from(head_dim) * u64::from(bytes);
                let components = vec![Component::new("k", width, tag), Component::new("v", width, tag)];
                self.items.push(Item::paged(&name, PagedItem { heads, components, retention }));
            }
            Some(Attention::Latent { latent, rope, indexer }) => {
                let (l, r) = (u64::from(latent), u64::from(rope));
                let component = match format {
                    Some((bytes, tag)) => Component::new("latent", (l + r) * u64::from(bytes), tag),
                    None if latent % 128 == 0 => Component::new("latent", l + l / 128 * 4 + r * 2, "fp8_ds_mla"),
                    None => return Err(refuse(format!("an MLA latent of {latent} values"))),
                };
                let one = |components| PagedItem { heads: 1, components, retention: Retention::Full };
                self.items.push(Item::paged(&name, one(vec![component])));
                if let Some(dim) = indexer {
                    let own = model.dtype.unwrap_or(Dtype::Bf16).format();
                    let components = indexer_components(dim, options.indexer, format, own);
                    let name = format!("{}{layer}.self_attn.indexer.k_cache", model.names.before);
                    self.items.push(Item::paged(&name, one(components)));
                }
            }
        }
        let ids = (first..self.items.len()).filter_map(|i| u32::try_from(i).ok()).map(ItemId::new).collect();
        self.layers.push(LayerItems { layer, extra, items: ids });
        Ok(())
    }
}

fn indexer_components(
    dim: u32,
    choice: IndexerDtype,
    latent: Option<(u32, &'static str)>,
    own: (u32, &'static str),
) -> Vec<Component> {
    let plain = |(bytes, tag): (u32, &str)| vec![Component::new("k", u64::from(dim) * u64::from(bytes), tag)];
    match (choice, latent) {
        (IndexerDtype::Model, _) => plain(own),
        (IndexerDtype::Auto, Some(format)) if format.0 > 1 => plain(format),
        (IndexerDtype::Auto | IndexerDtype::Fp8, _) => vec![
            Component::new("k", u64::from(dim), "fp8_e4m3"),
            Component::new("scale", u64::from(dim).div_ceil(128) * 4, "fp32_per_128"),
        ],
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
