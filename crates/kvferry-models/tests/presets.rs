//! Every preset against the published sizes of its cache.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::Tokens;
use kvferry_models::{IndexerDtype, KvDtype, Model, ModelError, ModelOptions, preset_names};

const FULL: Retention = Retention::Full;

const fn window(tokens: u64) -> Retention {
    Retention::Window(Tokens::new(tokens))
}

/// What items of one kind must be: how many, of what retention, bytes of one token.
type Kind = (usize, Retention, u64);

/// Name, items by kind, bytes of one token over all layers (bf16, counted once).
const ATTENTION: &[(&str, &[Kind], u64)] = &[
    ("llama-3.1-8b", &[(32, FULL, 4096)], 131_072),
    ("llama-3.1-70b", &[(80, FULL, 4096)], 327_680),
    ("qwen3-8b", &[(36, FULL, 4096)], 147_456),
    ("qwen3-235b-a22b", &[(94, FULL, 2048)], 192_512),
    ("deepseek-v3", &[(61, FULL, 1152)], 70_272),
    ("deepseek-v3.2", &[(61, FULL, 1152), (61, FULL, 256)], 85_888),
    ("kimi-k2-instruct", &[(61, FULL, 1152)], 70_272),
    ("kimi-k2.5", &[(61, FULL, 1152)], 70_272),
    ("kimi-k2.5-eagle3", &[(1, FULL, 32_768)], 32_768),
    ("kimi-k2.5-eagle3-mla", &[(1, FULL, 1152)], 1152),
    ("gemma-3-27b-it", &[(52, window(1024), 8192), (10, FULL, 8192)], 507_904),
    ("gemma-4-26b-a4b-it", &[(25, window(1024), 8192), (5, FULL, 4096)], 225_280),
    ("gpt-oss-120b", &[(18, window(128), 2048), (18, FULL, 2048)], 73_728),
    ("mistral-7b-v0.1", &[(32, window(4096), 4096)], 131_072),
];

/// Name, state kind, layers with a state, layers with an attention cache.
const HYBRID: &[(&str, &str, usize, usize)] = &[
    ("nemotron-3-nano-30b-a3b", "mamba2", 23, 6),
    ("nemotron-3-super-120b-a12b", "mamba2", 40, 8),
    ("nemotron-h-56b", "mamba2", 54, 10),
    ("qwen3-next-80b-a3b", "gated delta net", 36, 12),
    ("kimi-linear-48b-a3b", "KDA", 20, 7),
    ("jamba-v0.1", "mamba1", 28, 4),
    ("bamba-9b", "mamba2", 29, 3),
    ("falcon-h1-0.5b", "mamba2", 36, 36),
    ("minimax-text-01", "lightning attention", 70, 10),
];

#[test]
fn bytes_and_kinds_of_every_attention_model_are_the_published_ones() {
    for (name, kinds, all) in ATTENTION {
        let items = Model::preset(name).unwrap().items(&ModelOptions::default()).unwrap();
        assert_eq!(items.spec.bytes_per_token().get(), *all, "{name}");
        assert_eq!(items.spec.items().len(), kinds.iter().map(|k| k.0).sum::<usize>(), "{name}");
        for &(count, retention, bytes) in *kinds {
            let same = |i: &&kvferry_geometry::spec::Item| {
                i.as_paged().retention == retention && i.as_paged().bytes_per_token() == bytes
            };
            assert_eq!(items.spec.items().iter().filter(same).count(), count, "{name}: {retention}, {bytes} B");
        }
    }
}

#[test]
fn every_hybrid_is_a_typed_not_yet_that_names_its_layers() {
    for &(name, kind, state, attention) in HYBRID {
        let Err(ModelError::NotYet(error)) = Model::preset(name) else { panic!("{name} must not be supported yet") };
        assert_eq!(error.state.len(), 1, "{name}");
        assert_eq!((error.state[0].kind, error.state[0].layers.len()), (kind, state), "{name}");
        assert_eq!(error.attention.len(), attention, "{name}");
    }
    let text = |name| Model::preset(name).unwrap_err().to_string();
    assert_eq!(
        text("jamba-v0.1"),
        "preset jamba-v0.1:12: attn_layer_period: model jamba: not supported yet: the mamba1 state of 28 layers \
         (0-3, 5-11, 13-19, 21-27, 29-31); without it the cache of its 4 attention layers (4, 12, 20, 28) is no use"
    );
    // Layers are counted from 1 in this file, and the last breaks the rhythm.
    assert!(text("kimi-linear-48b-a3b").contains("7 attention layers (3, 7, 11, 15, 19, 23, 26)"));
    assert!(text("minimax-text-01").contains("(7, 15, 23, 31, 39, 47, 55, 63, 71, 79)"));
    assert!(text("qwen3-next-80b-a3b").contains("(3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47)"));
    assert!(text("bamba-9b").contains("(9, 18, 27)"));
    assert!(text("nemotron-3-nano-30b-a3b").contains("6 attention layers (5, 12, 19, 26, 33, 42)"));
}

#[test]
fn all_presets_are_tested() {
    let mut tested: Vec<&str> = ATTENTION.iter().map(|a| a.0).chain(HYBRID.iter().map(|h| h.0)).collect();
    tested.sort_unstable();
    let presets: Vec<&str> = preset_names().collect();
    assert_eq!(presets, tested);
}

#[test]
fn multi_token_prediction_layers_are_added_on_request() {
    let mtp = ModelOptions { mtp: true, ..ModelOptions::default() };
    for (name, all) in [("deepseek-v3", 71_424), ("deepseek-v3.2", 87_296)] {
        let items = Model::preset(name).unwrap().items(&mtp).unwrap();
        assert_eq!(items.spec.bytes_per_token().get(), all, "{name}");
        assert!(items.layers[61].extra);
        let first = items.layers[61].items[0];
        assert_eq!(items.spec.items()[first.index()].name.as_str(), "model.layers.61.self_attn.attn");
    }
    let error = Model::preset("kimi-k2-instruct").unwrap().items(&mtp).unwrap_err();
    assert_eq!(error, ModelError::NoMtp { model: "kimi-k2-instruct".into() });
}

#[test]
fn packed_and_quantised_formats_of_an_indexed_mla_have_the_published_sizes() {
    let model = Model::preset("deepseek-v3.2").unwrap();
    let bytes = |kv_dtype, indexer| {
        let options = ModelOptions { kv_dtype, indexer, ..ModelOptions::default() };
        model.items(&options).unwrap().spec.bytes_per_token().get()
    };
    assert_eq!(bytes(KvDtype::Auto, IndexerDtype::Auto), 85_888);
    assert_eq!(bytes(KvDtype::Auto, IndexerDtype::Fp8), 78_324);
    assert_eq!(bytes(KvDtype::Fp8DsMla, IndexerDtype::Auto), 48_068);
    assert_eq!(bytes(KvDtype::Fp8E4m3, IndexerDtype::Model), 61 * (576 + 256));
}

#[test]
fn items_are_named_as_the_engine_names_its_attention() {
    let name = |preset: &str, index: usize| {
        let items = Model::preset(preset).unwrap().items(&ModelOptions::default()).unwrap();
        items.spec.items()[index].name.as_str().to_owned()
    };
    assert_eq!(name("llama-3.1-8b", 17), "model.layers.17.self_attn.attn");
    assert_eq!(name("gpt-oss-120b", 3), "model.layers.3.attn.attn");
    assert_eq!(name("gemma-3-27b-it", 5), "language_model.model.layers.5.self_attn.attn");
    assert_eq!(name("kimi-k2.5", 60), "language_model.model.layers.60.self_attn.attn");
    assert_eq!(name("deepseek-v3.2", 2), "model.layers.1.self_attn.attn");
    assert_eq!(name("deepseek-v3.2", 3), "model.layers.1.self_attn.indexer.k_cache");
}

#[test]
fn drafts_follow_their_target_under_names_of_their_own() {
    let target = Model::preset("kimi-k2-instruct").unwrap();
    let draft = Model::preset("kimi-k2.5-eagle3").unwrap();
    let options = ModelOptions { layers: Some(2), drafts: vec![draft], ..ModelOptions::default() };
    let items = target.items(&options).unwrap();
    let names: Vec<&str> = items.spec.items().iter().map(|i| i.name.as_str()).collect();
    assert_eq!(
        names,
        ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn", "model.layers.61.self_attn.attn"]
    );
    assert_eq!(items.spec.items()[2].as_paged().heads, 64);
}

#[test]
fn the_layers_option_must_be_within_the_model() {
    let model = Model::preset("llama-3.1-8b").unwrap();
    for (layers, ok) in [(1, true), (32, true), (0, false), (33, false)] {
        let options = ModelOptions { layers: Some(layers), ..ModelOptions::default() };
        assert_eq!(model.items(&options).is_ok(), ok, "{layers}");
    }
}

#[test]
fn windows_sit_on_the_layers_that_slide() {
    let full = |preset: &str| -> Vec<usize> {
        let items = Model::preset(preset).unwrap().items(&ModelOptions::default()).unwrap();
        let kept = items.spec.items().iter().enumerate().filter(|(_, i)| i.as_paged().retention == FULL);
        kept.map(|(i, _)| i).collect()
    };
    assert_eq!(full("gemma-3-27b-it"), [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]);
    assert_eq!(full("gemma-4-26b-a4b-it"), [5, 11, 17, 23, 29]);
    assert_eq!(full("gpt-oss-120b"), (0..18).map(|i| 2 * i + 1).collect::<Vec<_>>());
    assert!(full("mistral-7b-v0.1").is_empty());
}

#[test]
fn an_unknown_preset_lists_the_known_ones() {
    let Err(ModelError::UnknownPreset { name, known }) = Model::preset("llama") else {
        panic!("there is no such preset")
    };
    assert_eq!((name.as_str(), known.len()), ("llama", ATTENTION.len() + HYBRID.len()));
}

#[test]
fn a_cache_type_that_a_layer_cannot_have_is_refused() {
    let options = ModelOptions { kv_dtype: KvDtype::Fp8DsMla, ..ModelOptions::default() };
    let error = Model::preset("qwen3-8b").unwrap().items(&options).unwrap_err();
    assert!(matches!(error, ModelError::KvDtype { layer: 0, .. }), "{error}");
    let fp8 = ModelOptions { kv_dtype: KvDtype::Fp8E4m3, ..ModelOptions::default() };
    let items = Model::preset("qwen3-8b").unwrap().items(&fp8).unwrap();
    assert_eq!(items.spec.bytes_per_token().get(), 147_456 / 2);
    assert_eq!(items.spec.items()[0].as_paged().components[0].encoding.as_str(), "fp8_e4m3");
}
