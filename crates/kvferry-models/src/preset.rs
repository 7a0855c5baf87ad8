//! The project's own model configurations: the keys of a public `config.json` that decide what is cached.

use crate::config;
use crate::model::{Model, ModelError};

/// Name and `config.json` text.
const PRESETS: &[(&str, &str)] = &[
    ("bamba-9b", include_str!("../presets/bamba-9b.json")),
    ("deepseek-v3", include_str!("../presets/deepseek-v3.json")),
    ("deepseek-v3.2", include_str!("../presets/deepseek-v3.2.json")),
    ("falcon-h1-0.5b", include_str!("../presets/falcon-h1-0.5b.json")),
    ("gemma-3-27b-it", include_str!("../presets/gemma-3-27b-it.json")),
    ("gemma-4-26b-a4b-it", include_str!("../presets/gemma-4-26b-a4b-it.json")),
    ("gpt-oss-120b", include_str!("../presets/gpt-oss-120b.json")),
    ("jamba-v0.1", include_str!("../presets/jamba-v0.1.json")),
    ("kimi-k2-instruct", include_str!("../presets/kimi-k2-instruct.json")),
    ("kimi-k2.5", include_str!("../presets/kimi-k2.5.json")),
    ("kimi-k2.5-eagle3", include_str!("../presets/kimi-k2.5-eagle3.json")),
    ("kimi-k2.5-eagle3-mla", include_str!("../presets/kimi-k2.5-eagle3-mla.json")),
    ("kimi-linear-48b-a3b", include_str!("../presets/kimi-linear-48b-a3b.json")),
    ("llama-3.1-70b", include_str!("../presets/llama-3.1-70b.json")),
    ("llama-3.1-8b", include_str!("../presets/llama-3.1-8b.json")),
    ("minimax-text-01", include_str!("../presets/minimax-text-01.json")),
    ("mistral-7b-v0.1", include_str!("../presets/mistral-7b-v0.1.json")),
    ("nemotron-3-nano-30b-a3b", include_str!("../presets/nemotron-3-nano-30b-a3b.json")),
    ("nemotron-3-super-120b-a12b", include_str!("../presets/nemotron-3-super-120b-a12b.json")),
    ("nemotron-h-56b", include_str!("../presets/nemotron-h-56b.json")),
    ("qwen3-235b-a22b", include_str!("../presets/qwen3-235b-a22b.json")),
    ("qwen3-8b", include_str!("../presets/qwen3-8b.json")),
    ("qwen3-next-80b-a3b", include_str!("../presets/qwen3-next-80b-a3b.json")),
];

/// The presets' names, sorted.
///
/// ```
/// assert!(kvferry_models::preset_names().any(|n| n == "deepseek-v3"));
/// ```
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|p| p.0)
}

pub(crate) fn load(name: &str) -> Result<Model, ModelError> {
    let Some((name, text)) = PRESETS.iter().find(|p| p.0 == name) else {
        return Err(ModelError::UnknownPreset { name: crate::tree::clip(name), known: preset_names().collect() });
    };
    let mut model = config::from_json(&format!("preset {name}"), text)?;
    model.name = (*name).into();
    Ok(model)
}
