//! The cache items that a model's layers make under an engine's choices.

use kvferry_geometry::placement::HeadRule;
use kvferry_geometry::spec::{Component, Item, ModelSpec, PagedItem, Retention, StateItem};
use kvferry_geometry::units::ItemId;

use crate::dtype::{Dtype, IndexerDtype, KvDtype, Scales};
use crate::error::InputErrors;
use crate::model::{Attention, KvAuto, Layer, Model, ModelError, StateName};
use crate::state::Sharding;

/// What stands before the names of a draft's items.
pub const DRAFT_PREFIX: &str = "draft.";

/// Choices of an engine that change what is cached.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModelOptions {
    /// What the KV cache is kept in.
    pub kv_dtype: KvDtype,
    /// What the drafts' KV caches are kept in; `None`: as the model's.
    pub draft_kv_dtype: Option<KvDtype>,
    /// Scales of an FP8 KV cache that lie beside its values.
    pub scales: Scales,
    /// What an indexer's keys are kept in.
    pub indexer: IndexerDtype,
    /// What convolution states are kept in; `None`: the model's own type.
    pub conv_dtype: Option<Dtype>,
    /// What recurrent states are kept in; `None`: what the configuration or the family says (fp32 for Nemotron-H and KDA), else
    /// as the convolution states.
    pub state_dtype: Option<Dtype>,
    /// Only the first so many layers, for small runs.
    pub layers: Option<u32>,
    /// Which of the model's own multi-token-prediction layers.
    pub mtp: MtpLayers,
    /// Draft models whose caches are kept beside the model's; their layers are numbered after its own.
    pub drafts: Vec<Model>,
}

/// How many of a model's own multi-token-prediction layers are cached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum MtpLayers {
    /// None.
    #[default]
    None,
    /// All that there are, at least one.
    All,
    /// The first so many.
    First(u32),
}

/// The cache items of a model under given options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelItems {
    /// All items: the model's layers in order, then its MTP layers, then the drafts'.
    pub spec: ModelSpec,
    /// The items of each layer, in the same order.
    pub layers: Vec<LayerItems>,
    /// How each item is cut by tensor parallelism: for a paged item one entry, for a state one for each part.
    pub sharding: Vec<Vec<Sharding>>,
}

/// The items of one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerItems {
    /// The layer's number: MTP and draft layers are counted on after the model's own.
    pub layer: u32,
    /// Whether it is an MTP or draft layer, after the model's own.
    pub extra: bool,
    /// Its items; none where it keeps nothing, two where it keeps K and V and a state, or a latent and an indexer's keys.
    pub items: Vec<ItemId>,
}

impl ModelItems {
    /// How tensor parallelism of `tp` cuts a paged item (`part` 0) or a state's part, for
    /// [`Parallelism::place`](kvferry_geometry::placement::Parallelism::place).
    #[must_use]
    pub fn rule(&self, item: &Item, part: usize, tp: u32) -> HeadRule {
        let found = self.spec.find(&item.name).and_then(|id| self.sharding.get(id.index())?.get(part));
        found.copied().unwrap_or(Sharding::Split).rule(tp)
    }

    pub(crate) fn of(model: &Model, options: &ModelOptions) -> Result<Self, ModelError> {
        let has = u32::try_from(model.layers.len()).unwrap_or(u32::MAX);
        let mut out =
            Builder { options, items: Vec::new(), layers: Vec::new(), sharding: Vec::new(), errors: Vec::new() };
        let take = options.layers.unwrap_or(has);
        if take == 0 || take > has {
            out.errors.push(ModelError::Layers { model: model.name.clone(), got: take, has });
        }
        out.check_states(model);
        let own = out.kept(model, "kv_dtype", options.kv_dtype, "");
        for (i, layer) in (0u32..).zip(model.layers.iter().take(take as usize)) {
            out.layer(&own, Place { layer: i, extra: false, mtp: None }, *layer);
        }
        let mut next = has;
        for i in 0..out.mtp_steps(model) {
            for (j, layer) in (0u32..).zip(&model.mtp.layers) {
                let step = u32::try_from(model.mtp.layers.len()).unwrap_or(u32::MAX);
                out.layer(&own, Place { layer: next, extra: true, mtp: Some(i * step + j) }, *layer);
                next = next.saturating_add(1);
            }
        }
        let (option, dtype) = match options.draft_kv_dtype {
            Some(dtype) => ("draft_kv_dtype", dtype),
            None => ("kv_dtype", options.kv_dtype),
        };
        for draft in &options.drafts {
            let kept = out.kept(draft, option, dtype, DRAFT_PREFIX);
            for layer in &draft.layers {
                out.layer(&kept, Place { layer: next, extra: true, mtp: None }, *layer);
                next = next.saturating_add(1);
            }
        }
        out.finish()
    }
}

/// How a model's attention is kept.
struct Kept<'a> {
    model: &'a Model,
    option: &'static str,
    kv_dtype: KvDtype,
    /// `None` where a fault has been told already.
    format: Option<Format>,
    prefix: &'static str,
}

#[derive(Clone, Copy)]
enum Format {
    /// Bytes of a value, its tag, and the scales beside it.
    Plain(u32, &'static str, Scales),
    Nvfp4,
    DsMla,
}

/// Which layer it is.
#[derive(Clone, Copy)]
struct Place {
    layer: u32,
    extra: bool,
    /// The number among the MTP layers.
    mtp: Option<u32>,
}

struct Builder<'a> {
    options: &'a ModelOptions,
    items: Vec<Item>,
    layers: Vec<LayerItems>,
    sharding: Vec<Vec<Sharding>>,
    errors: Vec<ModelError>,
}

impl Builder<'_> {
    fn finish(mut self) -> Result<ModelItems, ModelError> {
        match self.errors.len() {
            0 => Ok(ModelItems { spec: ModelSpec::new(self.items)?, layers: self.layers, sharding: self.sharding }),
            1 => Err(self.errors.swap_remove(0)),
            _ => Err(ModelError::Several(self.errors)),
        }
    }

    /// State types are for models with states.
    fn check_states(&mut self, model: &Model) {
        let mut models = core::iter::once(model).chain(&self.options.drafts);
        if models.any(|m| m.layers.iter().any(|l| l.state.is_some())) {
            return;
        }
        for (option, dtype) in [("conv_dtype", self.options.conv_dtype), ("state_dtype", self.options.state_dtype)] {
            if dtype.is_some() {
                self.errors.push(ModelError::NoState { model: model.name.clone(), option });
            }
        }
    }

    fn mtp_steps(&mut self, model: &Model) -> u32 {
        let (has, name) = (model.mtp.steps, || model.name.clone());
        match self.options.mtp {
            MtpLayers::None => 0,
            MtpLayers::All | MtpLayers::First(_) if has == 0 => {
                self.errors.push(ModelError::NoMtp { model: name() });
                0
            }
            MtpLayers::First(got) if got == 0 || got > has => {
                self.errors.push(ModelError::Mtp { model: name(), got, has });
                0
            }
            MtpLayers::First(got) => got,
            MtpLayers::All => has,
        }
    }

    /// How a model's KV cache is kept, and whether the scales fit it.
    fn kept<'m>(&mut self, model: &'m Model, option: &'static str, dtype: KvDtype, prefix: &'static str) -> Kept<'m> {
        let plain = |(bytes, tag)| Some(Format::Plain(bytes, tag, self.options.scales));
        let format = match (dtype, &model.kv_auto) {
            (KvDtype::Auto, KvAuto::Unknown(error)) => {
                self.errors.push(InputErrors::from(error.clone()).into());
                None
            }
            (KvDtype::Auto, KvAuto::Model) => plain(model.dtype.unwrap_or(Dtype::Bf16).format()),
            (KvDtype::Auto, KvAuto::Fp8) | (KvDtype::Fp8E4m3, _) => plain((1, "fp8_e4m3")),
            (KvDtype::Bf16, _) => plain(Dtype::Bf16.format()),
            (KvDtype::Fp16, _) => plain(Dtype::Fp16.format()),
            (KvDtype::Fp8E5m2, _) => plain((1, "fp8_e5m2")),
            (KvDtype::Nvfp4, _) => Some(Format::Nvfp4),
            (KvDtype::Fp8DsMla, _) => Some(Format::DsMla),
        };
        let kept = match format {
            Some(Format::Plain(1, ..)) | None => "",
            Some(Format::Plain(_, tag, _)) => tag,
            Some(Format::Nvfp4) => "nvfp4, which has scales of its own",
            Some(Format::DsMla) => "fp8_ds_mla, which has scales of its own",
        };
        // A model without attention has nothing to scale, but then nothing to be wrong either.
        if self.options.scales != Scales::None && !kept.is_empty() {
            let (model, scales) = (model.name.clone(), self.options.scales);
            self.errors.push(ModelError::Scales { model, scales, kept });
        }
        Kept { model, option, kv_dtype: dtype, format, prefix }
    }

    fn layer(&mut self, kept: &Kept<'_>, place: Place, layer: Layer) {
        let first = self.items.len();
        if let Some(attention) = layer.attention {
            self.attention(kept, place, attention);
        }
        if let Some(state) = layer.state {
            let conv = self.options.conv_dtype.or(kept.model.dtype).unwrap_or(Dtype::Bf16);
            let temporal = self.options.state_dtype.or(kept.model.state_auto).unwrap_or(conv);
            let (parts, cuts) = state.parts(conv, temporal).into_iter().unzip();
            self.push(Item::state(&kept.state_name(place), StateItem { parts }), cuts);
        }
        let ids = (first..self.items.len()).filter_map(|i| u32::try_from(i).ok()).map(ItemId::new).collect();
        self.layers.push(LayerItems { layer: place.layer, extra: place.extra, items: ids });
    }

    fn attention(&mut self, kept: &Kept<'_>, place: Place, attention: Attention) {
        let Some(format) = kept.format else { return };
        let refused = self.errors.iter().any(|e| {
            matches!(e, ModelError::KvDtype { model, option, .. } if *model == kept.model.name && *option == kept.option)
        });
        let components = match (attention, format) {
            (Attention::Heads { head_dim, .. }, Format::Plain(bytes, tag, scales)) => {
                let width = u64::from(head_dim) * u64::from(bytes);
                ["k", "v"].into_iter().flat_map(|name| scaled(name, width, tag, scales)).collect()
            }
            (Attention::Heads { head_dim, .. }, Format::Nvfp4) if head_dim.is_multiple_of(16) => {
                let dim = u64::from(head_dim);
                let scale = |name| Component::new(name, dim / 16, "fp8_e4m3_per_16");
                vec![
                    Component::new("k", dim / 2, "nvfp4"),
                    scale("k_scale"),
                    Component::new("v", dim / 2, "nvfp4"),
                    scale("v_scale"),
                ]
            }
            (Attention::Latent { latent, rope, .. }, Format::Plain(bytes, tag, scales)) => {
                scaled("latent", (u64::from(latent) + u64::from(rope)) * u64::from(bytes), tag, scales)
            }
            (Attention::Latent { latent, rope, .. }, Format::DsMla) if latent.is_multiple_of(128) => {
                let (l, r) = (u64::from(latent), u64::from(rope));
                vec![Component::new("latent", l + l / 128 * 4 + r * 2, "fp8_ds_mla")]
            }
            _ if refused => return,
            (keeps, _) => {
                let fits = if matches!(format, Format::Nvfp4) {
                    "K and V of heads of a multiple of 16 values"
                } else {
                    "MLA latents of a multiple of 128 values"
                };
                let (model, layer) = (kept.model.name.clone(), place.layer);
                let (option, kv_dtype) = (kept.option, kept.kv_dtype);
                self.errors.push(ModelError::KvDtype { model, option, kv_dtype, layer, keeps, fits });
                return;
            }
        };
        let (heads, retention) = match attention {
            Attention::Heads { heads, retention, .. } => (heads, retention),
            Attention::Latent { .. } => (1, Retention::Full),
        };
        let item = PagedItem { retention, ..PagedItem::new(heads, components) };
        self.push(Item::paged(&kept.name(place, kept.model.names.attention), item), vec![Sharding::Split]);
        if let Attention::Latent { indexer: Some(dim), .. } = attention {
            let own = kept.model.dtype.unwrap_or(Dtype::Bf16).format();
            let components = indexer_components(dim, self.options.indexer, format, own);
            let name = kept.name(place, ".self_attn.indexer.k_cache");
            self.push(Item::paged(&name, PagedItem::new(1, components)), vec![Sharding::Split]);
        }
    }

    fn push(&mut self, item: Item, sharding: Vec<Sharding>) {
        self.items.push(item);
        self.sharding.push(sharding);
    }
}

impl Kept<'_> {
    fn name(&self, place: Place, after: &str) -> String {
        let (before, number) = match (place.mtp, self.model.mtp.before) {
            (Some(number), Some(before)) => (before, number),
            _ => (self.model.names.before, place.layer),
        };
        format!("{}{before}{number}{after}", self.prefix)
    }

    fn state_name(&self, place: Place) -> String {
        match self.model.names.state {
            StateName::After(after) => self.name(place, after),
            StateName::Beyond(before, after) => {
                let number = u64::from(place.layer) + self.model.layers.len() as u64;
                format!("{}{before}{number}{after}", self.prefix)
            }
        }
    }
}

/// A component and, where there are any, the scales beside it.
fn scaled(name: &str, width: u64, tag: &str, scales: Scales) -> Vec<Component> {
    let values = Component::new(name, width, tag);
    let scale = || Component::new(&format!("{name}_scale"), 4, "fp32");
    match scales {
        Scales::None => vec![values],
        Scales::PerTokenHead => vec![values, scale()],
        Scales::PerBlockHead(span) => vec![values, scale().with_span(span)],
        Scales::PerBlock(span) => vec![values, scale().with_span(span).shared()],
    }
}

fn indexer_components(dim: u32, choice: IndexerDtype, latent: Format, own: (u32, &'static str)) -> Vec<Component> {
    let plain = |bytes: u32, tag: &str| vec![Component::new("k", u64::from(dim) * u64::from(bytes), tag)];
    match (choice, latent) {
        (IndexerDtype::Model, _) => plain(own.0, own.1),
        (IndexerDtype::Auto, Format::Plain(bytes, tag, _)) if bytes > 1 => plain(bytes, tag),
        (IndexerDtype::Auto | IndexerDtype::Fp8, _) => vec![
            Component::new("k", u64::from(dim), "fp8_e4m3"),
            Component::new("scale", u64::from(dim).div_ceil(128) * 4, "fp32_per_128"),
        ],
    }
}
