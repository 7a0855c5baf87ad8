//! Hugging Face configurations and engine descriptions turned into cache geometry.
//!
//! - [`Model`]: a `config.json` (or one of the project's presets) as layers and what each of them caches.
//! - [`ModelOptions`], [`ModelItems`]: an engine's choices of data type, layers and drafts, and the cache items they make.
//! - [`EngineDescription`]: a whole engine (model, [`Shape`], blocks, layout, groups), from TOML or built in code, as a
//!   [`Manifest`](kvferry_geometry::manifest::Manifest).
//!
//! This crate reads text and does arithmetic; it knows no device, socket or peer. Every fault of an input is told with
//! file, line and key, all of them at once. No input can make it panic, and memory is bounded by the file's size.
#![forbid(unsafe_code)]

mod config;
mod describe;
mod describe_toml;
mod dtype;
mod error;
mod faults;
mod grouping;
mod hybrid;
mod items;
mod json;
mod mixer;
mod model;
mod preset;
mod read;
mod shape;
mod stages;
mod state;
mod toml_tree;
mod tree;

pub use describe::{
    DEFAULT_BLOCK_SIZE, DEFAULT_BLOCKS, DEFAULT_SLOTS, DescribeError, EngineDescription, MAX_BLOCK_SIZE, MAX_BLOCKS,
    Slots,
};
pub use describe_toml::layout_named;
pub use dtype::{Dtype, IndexerDtype, KvDtype, Scales, UnknownDtype};
pub use error::{InputError, InputErrors, InputFault, MAX_FAULTS};
pub use grouping::{GroupRule, Grouping, RetentionKind};
pub use items::{DRAFT_PREFIX, LayerItems, ModelItems, ModelOptions, MtpLayers};
pub use model::{Attention, Layer, MAX_LAYERS, Model, ModelError, ranges};
pub use preset::preset_names;
pub use read::{Unread, text_within};
pub use shape::{MAX_INTERLEAVE, Shape, ShapeError, ShapeErrors};
pub use stages::{StageLayers, even_stages};
pub use state::{Sharding, State};
