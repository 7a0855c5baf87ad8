//! An engine as its operator describes it, and the manifest that this makes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use kvferry_geometry::layout::{CacheLayout, LayoutStyle, StyleError, View};
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestError, ManifestErrors, RankManifest};
use kvferry_geometry::placement::{HeadRule, MAX_PLACEMENTS, MAX_RANKS, Parallelism, RankCoordinates, RankPlacement};
use kvferry_geometry::spec::{Item, ModelSpec};
use kvferry_geometry::units::{ItemId, RankId, RegionId, Tokens};

use crate::error::{InputError, InputErrors, InputFault};
use crate::faults::ManifestFaults;
use crate::grouping::{Group, Grouping, fits};
use crate::items::{LayerItems, ModelItems, ModelOptions};
use crate::model::{Model, ModelError};
use crate::shape::Shape;
use crate::stages::{StageLayers, even_stages};
use crate::{describe_toml, read};

/// Tokens of a block where the description doesn't say, as in vLLM.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// Blocks of a group where the description doesn't say.
pub const DEFAULT_BLOCKS: u32 = 1024;
/// State slots of a group, for each that a request uses, where the description doesn't say.
pub const DEFAULT_SLOTS: u32 = 64;
/// The largest block, in tokens.
pub const MAX_BLOCK_SIZE: u32 = 1 << 16;
/// The most blocks.
pub const MAX_BLOCKS: u32 = 1 << 28;

/// An engine: a model, the choices that change its cache, and how ranks, blocks and memory are laid out.
///
/// ```
/// use kvferry_models::{EngineDescription, Model};
/// let mut engine = EngineDescription::new(Model::preset("llama-3.1-8b")?, "tp=4,pp=2".parse()?);
/// engine.options.layers = Some(8);
/// engine.blocks = Some(256);
/// let manifest = engine.manifest()?;
/// assert_eq!((manifest.ranks().len(), manifest.spec().items().len()), (8, 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineDescription {
    /// What the engine is called in messages.
    pub name: String,
    /// The model.
    pub model: Model,
    /// Data types, layers, drafts.
    pub options: ModelOptions,
    /// Parallel sizes.
    pub shape: Shape,
    /// The layers of each stage; `None` cuts them evenly ([`even_stages`](crate::even_stages)). MTP and draft layers
    /// that no stage lists are on the last one.
    pub stages: Option<Vec<StageLayers>>,
    /// Items (in which `*` stands for any text) whose heads are all on every tensor-parallel rank.
    pub whole: Vec<String>,
    /// Tokens that one rank keeps in a block.
    pub block_size: u32,
    /// Tokens of the kernel's block, where it is smaller.
    pub kernel_block: Option<u32>,
    /// Blocks of each group; `None` is [`DEFAULT_BLOCKS`]. Groups that share memory have one pool of so many.
    pub blocks: Option<u32>,
    /// Slots of recurrent states.
    pub slots: Slots,
    /// Layout; its own `kernel_block` is overruled by the field above.
    pub layout: LayoutStyle,
    /// Which items share a block table.
    pub grouping: Grouping,
    pub(crate) origin: Origin,
}

/// The slots of recurrent states. Groups that share memory take them from the pool of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slots {
    /// Slots of each group of states; `None` is [`DEFAULT_SLOTS`] times `per_request`.
    pub count: Option<u32>,
    /// Slots that one request uses at a time: its running state, and any checkpoints that are kept beside it.
    pub per_request: u32,
}

impl Default for Slots {
    /// One for a request, the usual number of requests.
    fn default() -> Self {
        Self { count: None, per_request: 1 }
    }
}

impl Slots {
    pub(crate) fn all(self) -> u32 {
        self.count.unwrap_or(DEFAULT_SLOTS.saturating_mul(self.per_request))
    }
}

/// Where a description was read: the lines of its keys.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Origin {
    pub(crate) file: Option<String>,
    pub(crate) lines: BTreeMap<String, u32>,
}

/// Why there is no description or no manifest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DescribeError {
    /// The description is faulty.
    #[error(transparent)]
    Input(#[from] InputErrors),
    /// The model is, or its options are.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The ranks together don't make a sound and complete cache.
    #[error("{}", ManifestFaults { name, errors, hint })]
    Manifest {
        /// The engine's name, or the description's file.
        name: String,
        /// Every fault.
        errors: ManifestErrors,
        /// What to change, where that is known.
        hint: Option<String>,
    },
}

impl EngineDescription {
    /// A description with the usual values: 16 tokens a block, HND, groups by shape.
    #[must_use]
    pub fn new(model: Model, shape: Shape) -> Self {
        Self {
            name: "engine".into(),
            model,
            options: ModelOptions::default(),
            shape,
            stages: None,
            whole: Vec::new(),
            block_size: DEFAULT_BLOCK_SIZE,
            kernel_block: None,
            blocks: None,
            slots: Slots::default(),
            layout: LayoutStyle::HND,
            grouping: Grouping::ByShape,
            origin: Origin::default(),
        }
    }

    /// Reads a description in TOML; a model's file is looked for beside it.
    ///
    /// # Errors
    /// All faults, with key and line.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, DescribeError> {
        let path = path.as_ref();
        let text = read::text(path)?;
        describe_toml::read(&path.display().to_string(), &text, path.parent())
    }

    /// Reads the text of a description; `file` names it in messages, `dir` is where a model's file is looked for.
    ///
    /// # Errors
    /// All faults, with key and line.
    pub fn from_toml(file: &str, text: &str, dir: Option<&Path>) -> Result<Self, DescribeError> {
        describe_toml::read(file, text, dir)
    }

    /// The cache items of the model under this engine's options.
    ///
    /// # Errors
    /// Options that the model can't have.
    pub fn items(&self) -> Result<ModelItems, DescribeError> {
        self.model.items(&self.options).map_err(|error| {
            let mut faults = Vec::new();
            if self.option_faults(&error, &mut faults) { InputErrors(faults).into() } else { error.into() }
        })
    }

    /// Turns a fault of the model's options into faults of this description's keys; false where it isn't one.
    fn option_faults(&self, error: &ModelError, faults: &mut Vec<InputError>) -> bool {
        let key = match error {
            ModelError::Several(errors) => return errors.iter().all(|e| self.option_faults(e, faults)),
            ModelError::Input(errors) => {
                faults.extend(errors.0.iter().cloned());
                return true;
            }
            ModelError::Layers { .. } => "layers",
            ModelError::NoMtp { .. } | ModelError::Mtp { .. } => "mtp",
            ModelError::KvDtype { option, .. } | ModelError::NoState { option, .. } => option,
            ModelError::Scales { .. } => "scales",
            _ => return false,
        };
        // The message names the option, as the key in front of it does.
        let text = error.to_string();
        let text = text.strip_prefix(key).map_or(text.as_str(), str::trim_start);
        faults.push(self.error(key, InputFault::Contradiction(text.into())));
        true
    }

    /// The engine's manifest.
    ///
    /// # Errors
    /// All faults of the options, sizes, stages, groups and layout; else all faults of the manifest.
    pub fn manifest(&self) -> Result<Manifest, DescribeError> {
        let mut errors = Vec::new();
        let items = match self.items() {
            Ok(items) => Some(items),
            Err(DescribeError::Input(faults)) => {
                errors.extend(faults.0);
                None
            }
            Err(other) => return Err(other),
        };
        self.check_sizes(items.as_ref().map_or(0, |i| i.spec.items().len()), &mut errors);
        let Some(items) = items else { return Err(InputErrors(errors).into()) };
        let stages = self.stage_items(&items.layers, &mut errors);
        let groups = self.groups(&items, &mut errors);
        if !errors.is_empty() {
            return Err(InputErrors(errors).into());
        }
        let Shape { tp, dcp, pcp, pcp_mode, interleave, .. } = self.shape;
        let parallelism = Parallelism { tp, dcp, pcp, pcp_mode, interleave, stages };
        let placements =
            parallelism.place(&items.spec, |item, part| self.rule(&items, item, part)).map_err(|faults| {
                let error = |f: &dyn fmt::Display| self.error("parallel", InputFault::Contradiction(f.to_string()));
                InputErrors(faults.iter().map(|f| error(f)).collect())
            })?;
        let spec = items.spec;
        let context = parallelism.context();
        let mut ranks = Vec::new();
        let mut total = Some(0u64);
        for placement in placements {
            let layout = self.layout_of(&spec, &placement, &groups)?;
            let lens = layout.regions.iter().map(|r| r.len.get());
            total = lens.fold(total, |sum, len| sum.and_then(|s| s.checked_add(len)));
            ranks.push(RankManifest { placement, layout });
        }
        if total.is_none() {
            let text = "make a cache of more bytes than 64 bits count, over all ranks; use fewer or smaller blocks";
            return Err(self.fault("blocks", InputFault::Contradiction(text.into())).into());
        }
        let cache_groups = groups.iter().map(|g| CacheGroup {
            name: g.name.as_str().into(),
            items: g.items.clone(),
            block_tokens: Tokens::new(u64::from(g.block_size) * u64::from(context)),
        });
        let cache_groups = cache_groups.collect();
        Manifest::new(spec, cache_groups, ranks).map_err(|errors| {
            let hint = self.coverage_hint(&errors);
            DescribeError::Manifest {
                name: self.origin.file.clone().unwrap_or_else(|| self.name.clone()),
                errors,
                hint,
            }
        })
    }

    /// How tensor parallelism cuts a paged item, or a part of a state.
    pub(crate) fn rule(&self, items: &ModelItems, item: &Item, part: usize) -> HeadRule {
        let whole = self.whole.iter().any(|p| fits(p, item.name.as_str()));
        if whole { HeadRule::Whole } else { items.rule(item, part, self.shape.tp) }
    }

    /// Where a rank stands in the parallel dimensions.
    #[must_use]
    pub fn coordinates(&self, rank: RankId) -> RankCoordinates {
        let Shape { tp, dcp, pcp, pcp_mode, interleave, .. } = self.shape;
        Parallelism { tp, dcp, pcp, pcp_mode, interleave, stages: Vec::new() }.coordinates(rank)
    }

    /// A fault of this description at a key, with its line where it was read from a file.
    pub(crate) fn fault(&self, key: &str, fault: InputFault) -> InputErrors {
        self.error(key, fault).into()
    }

    pub(crate) fn error(&self, key: &str, fault: InputFault) -> InputError {
        let file = self.origin.file.clone().unwrap_or_else(|| self.name.clone());
        let section = key.rsplit_once('.').map_or("", |k| k.0);
        let line = self.origin.lines.get(key).or_else(|| self.origin.lines.get(section)).copied();
        InputError { file, line, key: key.into(), fault }
    }

    fn check_sizes(&self, items: usize, errors: &mut Vec<InputError>) {
        let (s, before) = (&self.shape, errors.len());
        let values = [s.tp, s.pp, s.dcp, s.pcp, s.interleave];
        for ((key, limit), value) in Shape::LIMITS.into_iter().zip(values) {
            if value == 0 || value > limit {
                let fault = InputFault::OutOfRange { got: value.to_string(), min: 1, max: limit.into() };
                errors.push(self.error(&format!("parallel.{key}"), fault));
            }
        }
        if self.slots.per_request == 0 || self.slots.all() < self.slots.per_request {
            let (got, max) = (self.slots.per_request.to_string(), u64::from(self.slots.all()));
            errors.push(self.error("slots_per_request", InputFault::OutOfRange { got, min: 1, max }));
        }
        if errors.len() > before {
            return;
        }
        if !s.tp.is_multiple_of(s.dcp) {
            let text = format!(
                "is {}, which does not divide tp {}; choose one that does, since it re-uses the tensor-parallel ranks",
                s.dcp, s.tp
            );
            errors.push(self.error("parallel.dcp", InputFault::Contradiction(text)));
        }
        let ranks = u64::from(s.tp) * u64::from(s.pp) * u64::from(s.pcp);
        let limit = u64::from(MAX_RANKS);
        if ranks > limit {
            errors.push(self.error("parallel", InputFault::TooLarge { what: "tp x pp x pcp", got: ranks, limit }));
        } else if ranks * items as u64 > MAX_PLACEMENTS as u64 {
            let (got, limit) = (ranks * items as u64, MAX_PLACEMENTS as u64);
            errors.push(self.error("parallel", InputFault::TooLarge { what: "ranks x cache items", got, limit }));
        }
    }

    /// The items of each stage.
    fn stage_items(&self, layers: &[LayerItems], errors: &mut Vec<InputError>) -> Vec<Vec<ItemId>> {
        let own = layers.iter().filter(|l| !l.extra).count();
        let own = u32::try_from(own).unwrap_or(u32::MAX);
        let stages = match &self.stages {
            Some(stages) => stages.clone(),
            None if self.shape.pp > own => {
                let text = format!("is {}, but there are only {own} layers to cut into stages", self.shape.pp);
                errors.push(self.error("parallel.pp", InputFault::Contradiction(text)));
                return Vec::new();
            }
            None => {
                let mut first = 0;
                let cut = even_stages(own, self.shape.pp).into_iter().map(|count| {
                    let range = (first, (first + count).saturating_sub(1));
                    first += count;
                    StageLayers(vec![range])
                });
                cut.collect()
            }
        };
        if stages.len() != self.shape.pp as usize {
            let text =
                format!("lists {} stages, but pp is {}; leave pp out or make them agree", stages.len(), self.shape.pp);
            errors.push(self.error("parallel.stages", InputFault::Contradiction(text)));
            return Vec::new();
        }
        let mut out: Vec<Vec<ItemId>> = stages.iter().map(|_| Vec::new()).collect();
        for layer in layers {
            let mut holders = 0;
            for (stage, items) in stages.iter().zip(&mut out) {
                if stage.holds(layer.layer) {
                    items.extend(&layer.items);
                    holders += 1;
                }
            }
            match (holders, layer.extra, out.last_mut()) {
                (0, true, Some(last)) => last.extend(&layer.items),
                (0, _, _) => {
                    let text = format!("layer {} is on no stage; list it on one", layer.layer);
                    errors.push(self.error("parallel.stages", InputFault::Contradiction(text)));
                }
                _ => {}
            }
        }
        for (i, stage) in stages.iter().enumerate() {
            let beyond = stage.0.iter().find(|r| !layers.iter().any(|l| l.layer == r.1));
            if let Some((_, last)) = beyond {
                let text = format!("stage {i} lists layer {last}, which the model doesn't have");
                errors.push(self.error("parallel.stages", InputFault::Contradiction(text)));
            }
        }
        out
    }

    /// One rank's layout: each group's in turn, with its own style; those that share memory all at once.
    fn layout_of(
        &self,
        spec: &ModelSpec,
        placement: &RankPlacement,
        groups: &[Group],
    ) -> Result<CacheLayout, DescribeError> {
        let sizes: Vec<_> = groups.iter().map(|g| (g.items.as_slice(), g.block_size, g.blocks)).collect();
        let refused = |e: StyleError| self.fault("layout", InputFault::Contradiction(e.to_string()));
        if let Some(first) = groups.first().filter(|g| g.style.share) {
            return Ok(first.style.build(spec, placement, &sizes).map_err(refused)?);
        }
        let mut all = CacheLayout { regions: Vec::new(), views: vec![None; spec.items().len()] };
        for (group, sizes) in groups.iter().zip(&sizes) {
            let built = group.style.build(spec, placement, &[*sizes]).map_err(refused)?;
            let before = u32::try_from(all.regions.len()).unwrap_or(u32::MAX);
            all.regions.extend(built.regions);
            for (slot, view) in all.views.iter_mut().zip(built.views) {
                if let Some(mut view) = view {
                    match &mut view {
                        View::Paged(v) => v.region = RegionId::new(v.region.get().saturating_add(before)),
                        View::State(v) => v.region = RegionId::new(v.region.get().saturating_add(before)),
                    }
                    *slot = Some(view);
                }
            }
        }
        Ok(all)
    }

    fn coverage_hint(&self, errors: &ManifestErrors) -> Option<String> {
        let uncovered = errors.0.iter().any(|e| matches!(e, ManifestError::Uncovered { .. }));
        let Shape { tp, dcp, .. } = self.shape;
        (uncovered && dcp > 1).then(|| {
            format!(
                "dcp {dcp} deals the tokens of each KV head out to {dcp} tensor-parallel ranks, so each head must be on that \
                 many; tp {tp} does not replicate them often enough: lower dcp, or raise tp to (KV heads) x {dcp}"
            )
        })
    }
}
