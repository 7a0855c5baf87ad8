//! Every preset against the published sizes of its cache.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

use kvferry_geometry::spec::{Item, PagedItem, Retention, ValueHeads};
use kvferry_geometry::units::Tokens;
use kvferry_models::{
    Attention, Dtype, IndexerDtype, KvDtype, Model, ModelError, ModelOptions, MtpLayers, Scales, preset_names,
};

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

/// A hybrid as published: bytes of one token, and of one layer's state.
struct Hybrid {
    name: &'static str,
    /// Layers with an attention cache, bytes of a token over all of them (bf16).
    attention: (usize, u64),
    /// Layers with a state.
    states: usize,
    /// Bytes of a layer's convolution state in bf16, and of its recurrent state in bf16.
    conv: u64,
    recurrent: u64,
    /// Whether the recurrent state is kept in 32 bits unless told otherwise.
    fp32: bool,
}

const fn hybrid(
    name: &'static str,
    attention: (usize, u64),
    states: usize,
    conv: u64,
    recurrent: u64,
    fp32: bool,
) -> Hybrid {
    Hybrid { name, attention, states, conv, recurrent, fp32 }
}

const HYBRID: &[Hybrid] = &[
    hybrid("nemotron-3-nano-30b-a3b", (6, 6144), 23, 36_864, 1_048_576, true),
    hybrid("nemotron-3-super-120b-a12b", (8, 8192), 40, 61_440, 2_097_152, true),
    hybrid("nemotron-h-56b", (10, 40_960), 54, 122_880, 8_388_608, true),
    hybrid("qwen3-next-80b-a3b", (12, 24_576), 36, 49_152, 1_048_576, false),
    hybrid("kimi-linear-48b-a3b", (7, 8064), 20, 73_728, 1_048_576, true),
    hybrid("jamba-v0.1", (4, 16_384), 28, 49_152, 262_144, false),
    hybrid("bamba-9b", (3, 12_288), 29, 50_688, 2_097_152, false),
    hybrid("falcon-h1-0.5b", (36, 18_432), 36, 10_752, 393_216, false),
    hybrid("minimax-text-01", (10, 40_960), 70, 0, 2_097_152, false),
];

fn paged(item: &Item) -> &PagedItem {
    item.as_paged().unwrap()
}

fn bytes_of(item: &PagedItem) -> u64 {
    u64::from(item.heads) * item.components.iter().map(|c| c.width.get()).sum::<u64>()
}

fn items(name: &str) -> Vec<Item> {
    Model::preset(name).unwrap().items(&ModelOptions::default()).unwrap().spec.items().to_vec()
}

#[test]
fn bytes_and_kinds_of_every_attention_model_are_the_published_ones() {
    for (name, kinds, all) in ATTENTION {
        let items = Model::preset(name).unwrap().items(&ModelOptions::default()).unwrap();
        assert_eq!(items.spec.bytes_per_token().get(), *all, "{name}");
        assert_eq!(items.spec.items().len(), kinds.iter().map(|k| k.0).sum::<usize>(), "{name}");
        for &(count, retention, bytes) in *kinds {
            let same = |i: &&Item| paged(i).retention == retention && bytes_of(paged(i)) == bytes;
            assert_eq!(items.spec.items().iter().filter(same).count(), count, "{name}: {retention}, {bytes} B");
        }
    }
}

#[test]
fn bytes_of_every_hybrid_are_the_published_ones() {
    for h in HYBRID {
        let model = Model::preset(h.name).unwrap();
        let bf16 = Some(Dtype::Bf16);
        let fp32 = Some(Dtype::Fp32);
        for (state_dtype, times) in [(bf16, 1), (fp32, 2), (None, if h.fp32 { 2 } else { 1 })] {
            let spec = model.items(&ModelOptions { state_dtype, ..ModelOptions::default() }).unwrap().spec;
            assert_eq!(spec.bytes_per_token().get(), h.attention.1, "{}", h.name);
            let each = h.conv + times * h.recurrent;
            assert_eq!(spec.bytes_per_state().get(), h.states as u64 * each, "{}", h.name);
            let states: Vec<_> = spec.items().iter().filter_map(Item::as_state).collect();
            assert_eq!((states.len(), spec.items().len()), (h.states, h.states + h.attention.0), "{}", h.name);
            for state in states {
                let (last, conv) = state.parts.split_last().unwrap();
                assert_eq!(conv.iter().map(|p| p.bytes()).sum::<u64>(), h.conv, "{}", h.name);
                assert_eq!((last.name.as_str(), last.bytes()), ("temporal", times * h.recurrent), "{}", h.name);
                assert!(conv.iter().all(|p| p.rows == 3 && p.width.get() == 2), "{}", h.name);
            }
        }
    }
}

#[test]
fn the_parts_of_a_state_are_those_that_are_sharded_alone() {
    let parts = |name: &str, item: &str| -> Vec<(String, u32, u32, u64, String)> {
        let items = items(name);
        let state = items.iter().find(|i| i.name.as_str() == item).unwrap().as_state().unwrap();
        let part = |p: &kvferry_geometry::spec::StatePart| {
            (p.name.as_str().into(), p.units, p.rows, p.width.get(), p.encoding.as_str().into())
        };
        state.parts.iter().map(part).collect()
    };
    let own = |list: &[(&str, u32, u32, u64, &str)]| -> Vec<(String, u32, u32, u64, String)> {
        list.iter().map(|p| (p.0.into(), p.1, p.2, p.3, p.4.into())).collect()
    };
    let expected = [("conv.x", 8192, 3, 2, "bf16"), ("temporal", 8192, 1, 32, "bf16")];
    assert_eq!(parts("jamba-v0.1", "model.layers.0.mixer"), own(&expected));
    let expected = [
        ("conv.x", 4096, 3, 2, "bf16"),
        ("conv.b", 1024, 3, 2, "bf16"),
        ("conv.c", 1024, 3, 2, "bf16"),
        ("temporal", 64, 1, 64 * 128 * 4, "fp32"),
    ];
    assert_eq!(parts("nemotron-3-nano-30b-a3b", "model.layers.0.mixer"), own(&expected));
    let expected = [
        ("conv.q", 2048, 3, 2, "bf16"),
        ("conv.k", 2048, 3, 2, "bf16"),
        ("conv.v", 4096, 3, 2, "bf16"),
        ("temporal", 32, 1, 128 * 128 * 2, "bf16"),
    ];
    assert_eq!(parts("qwen3-next-80b-a3b", "model.layers.0.linear_attn"), own(&expected));
    let expected = [
        ("conv.q", 4096, 3, 2, "bf16"),
        ("conv.k", 4096, 3, 2, "bf16"),
        ("conv.v", 4096, 3, 2, "bf16"),
        ("temporal", 32, 1, 128 * 128 * 4, "fp32"),
    ];
    assert_eq!(parts("kimi-linear-48b-a3b", "model.layers.0.self_attn"), own(&expected));
    assert_eq!(parts("minimax-text-01", "model.layers.0"), own(&[("temporal", 64, 1, 128 * 128 * 2, "bf16")]));
}

#[test]
fn states_and_attention_sit_on_the_layers_that_have_them() {
    let attention = |name: &str| -> Vec<usize> {
        let model = Model::preset(name).unwrap();
        model.layers().iter().enumerate().filter(|(_, l)| l.attention.is_some()).map(|l| l.0).collect()
    };
    assert_eq!(attention("jamba-v0.1"), [4, 12, 20, 28]);
    // Layers are counted from 1 in this file, and the last breaks the rhythm.
    assert_eq!(attention("kimi-linear-48b-a3b"), [3, 7, 11, 15, 19, 23, 26]);
    assert_eq!(attention("minimax-text-01"), [7, 15, 23, 31, 39, 47, 55, 63, 71, 79]);
    assert_eq!(attention("qwen3-next-80b-a3b"), [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]);
    assert_eq!(attention("bamba-9b"), [9, 18, 27]);
    assert_eq!(attention("nemotron-3-nano-30b-a3b"), [5, 12, 19, 26, 33, 42]);
    let nano = Model::preset("nemotron-3-nano-30b-a3b").unwrap();
    let empty = nano.layers().iter().filter(|l| l.attention.is_none() && l.state.is_none()).count();
    assert_eq!(empty, 23);
    let falcon = Model::preset("falcon-h1-0.5b").unwrap();
    assert!(falcon.layers().iter().all(|l| l.attention.is_some() && l.state.is_some()));
}

#[test]
fn all_presets_are_tested() {
    let mut tested: Vec<&str> = ATTENTION.iter().map(|a| a.0).chain(HYBRID.iter().map(|h| h.name)).collect();
    tested.sort_unstable();
    let presets: Vec<&str> = preset_names().collect();
    assert_eq!(presets, tested);
}

#[test]
fn multi_token_prediction_layers_are_added_on_request() {
    let mtp = |mtp| ModelOptions { mtp, ..ModelOptions::default() };
    let cases = [
        ("deepseek-v3", 71_424, "model.layers.61.self_attn.attn"),
        ("deepseek-v3.2", 87_296, "model.layers.61.self_attn.attn"),
        ("nemotron-3-super-120b-a12b", 9216, "mtp.layers.0.mixer.attn"),
    ];
    for (name, all, item) in cases {
        let model = Model::preset(name).unwrap();
        let items = model.items(&mtp(MtpLayers::All)).unwrap();
        assert_eq!(items.spec.bytes_per_token().get(), all, "{name}");
        let extra = items.layers.iter().find(|l| l.extra).unwrap();
        assert_eq!(extra.layer as usize, model.layers().len());
        assert_eq!(items.spec.items()[extra.items[0].index()].name.as_str(), item);
        assert_eq!(model.items(&mtp(MtpLayers::First(1))).unwrap(), items);
        let error = model.items(&mtp(MtpLayers::First(2))).unwrap_err();
        assert_eq!(error, ModelError::Mtp { model: name.into(), got: 2, has: 1 });
    }
    // Qwen3-Next's are named apart too; the published file leaves their number out.
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("presets");
    let text = std::fs::read_to_string(dir.join("qwen3-next-80b-a3b.json")).unwrap();
    let text = text.replacen('{', "{\"num_nextn_predict_layers\": 2,", 1);
    let items = Model::from_json("c", &text).unwrap().items(&mtp(MtpLayers::All)).unwrap();
    let names: Vec<&str> = items.spec.items()[48..].iter().map(|i| i.name.as_str()).collect();
    assert_eq!(names, ["mtp.layers.0.self_attn.attn", "mtp.layers.1.self_attn.attn"]);
    let error = Model::preset("kimi-k2-instruct").unwrap().items(&mtp(MtpLayers::All)).unwrap_err();
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
fn items_are_named_as_the_engine_names_its_caches() {
    let name = |preset: &str, index: usize| items(preset)[index].name.as_str().to_owned();
    assert_eq!(name("llama-3.1-8b", 17), "model.layers.17.self_attn.attn");
    assert_eq!(name("gpt-oss-120b", 3), "model.layers.3.attn.attn");
    assert_eq!(name("gemma-3-27b-it", 5), "language_model.model.layers.5.self_attn.attn");
    assert_eq!(name("kimi-k2.5", 60), "language_model.model.layers.60.self_attn.attn");
    assert_eq!(name("deepseek-v3.2", 2), "model.layers.1.self_attn.attn");
    assert_eq!(name("deepseek-v3.2", 3), "model.layers.1.self_attn.indexer.k_cache");
    assert_eq!(
        (name("jamba-v0.1", 3), name("jamba-v0.1", 4)),
        ("model.layers.3.mixer".into(), "model.layers.4.attn".into())
    );
    assert_eq!(name("bamba-9b", 9), "model.layers.9.attn");
    assert_eq!(name("nemotron-h-56b", 0), "model.layers.0.mixer");
    assert_eq!(name("nemotron-h-56b", 4), "model.layers.7.mixer.attn");
    assert_eq!(name("qwen3-next-80b-a3b", 2), "model.layers.2.linear_attn");
    assert_eq!(name("qwen3-next-80b-a3b", 3), "model.layers.3.self_attn.attn");
    // One class keeps both kinds under one name.
    assert_eq!(name("kimi-linear-48b-a3b", 2), "model.layers.2.self_attn");
    assert_eq!(name("kimi-linear-48b-a3b", 3), "model.layers.3.self_attn");
    assert_eq!(
        (name("minimax-text-01", 6), name("minimax-text-01", 7)),
        ("model.layers.6".into(), "model.layers.7.attn".into())
    );
    // Two items a layer, whose numbers differ.
    assert_eq!(
        (name("falcon-h1-0.5b", 4), name("falcon-h1-0.5b", 5)),
        ("model.layers.2.attn".into(), "model.38.mixer".into())
    );
}

#[test]
fn drafts_follow_their_target_under_names_of_their_own() {
    for (target, draft, heads, bytes) in [
        ("kimi-k2.5", "kimi-k2.5-eagle3", 64, 70_272 + 32_768),
        ("kimi-k2.5", "kimi-k2.5-eagle3-mla", 1, 70_272 + 1152),
        ("llama-3.1-8b", "kimi-k2.5-eagle3-mla", 1, 131_072 + 1152),
    ] {
        let drafts = vec![Model::preset(draft).unwrap()];
        let target = Model::preset(target).unwrap();
        let items = target.items(&ModelOptions { drafts: drafts.clone(), ..ModelOptions::default() }).unwrap();
        let last = items.spec.items().last().unwrap();
        let number = target.layers().len();
        assert_eq!(last.name.as_str(), format!("draft.model.layers.{number}.self_attn.attn"));
        assert_eq!((paged(last).heads, items.spec.bytes_per_token().get()), (heads, bytes));
        // Also where only some of the target's layers are kept.
        let some = target.items(&ModelOptions { layers: Some(2), drafts, ..ModelOptions::default() }).unwrap();
        assert_eq!((some.spec.items().len(), some.spec.items().last()), (3, Some(last)));
    }
}

#[test]
fn a_draft_can_be_kept_in_another_type() {
    let drafts = vec![Model::preset("kimi-k2.5-eagle3").unwrap()];
    let target = Model::preset("kimi-k2.5").unwrap();
    let options = ModelOptions { kv_dtype: KvDtype::Fp8DsMla, drafts, ..ModelOptions::default() };
    let error = target.items(&options).unwrap_err();
    assert!(matches!(&error, ModelError::KvDtype { layer: 61, model, .. } if model == "kimi-k2.5-eagle3"), "{error}");
    let options = ModelOptions { draft_kv_dtype: Some(KvDtype::Auto), ..options };
    assert_eq!(target.items(&options).unwrap().spec.bytes_per_token().get(), 61 * 656 + 32_768);
}

#[test]
fn scales_lie_beside_their_values_under_names_of_their_own() {
    let model = Model::preset("llama-3.1-8b").unwrap();
    let all = |scales| {
        let options = ModelOptions { kv_dtype: KvDtype::Fp8E4m3, scales, layers: Some(1), ..ModelOptions::default() };
        model.items(&options).unwrap().spec
    };
    let names = |spec: &kvferry_geometry::spec::ModelSpec| -> Vec<String> {
        paged(&spec.items()[0]).components.iter().map(|c| c.name.as_str().into()).collect()
    };
    let spec = all(Scales::PerTokenHead);
    assert_eq!(names(&spec), ["k", "k_scale", "v", "v_scale"]);
    assert_eq!(spec.bytes_per_token().get(), 8 * 2 * (128 + 4));
    let spec = all(Scales::PerBlockHead(16));
    let scale = &paged(&spec.items()[0]).components[1];
    assert_eq!((scale.span, scale.heads, scale.width.get()), (16, ValueHeads::Each, 4));
    assert_eq!(spec.bytes_per_token().get(), 8 * 2 * 128 + 8 * 2 * 4 / 16);
    let spec = all(Scales::PerBlock(16));
    assert_eq!(paged(&spec.items()[0]).components[1].heads, ValueHeads::Shared);
    assert_eq!(spec.bytes_per_token().get(), 8 * 2 * 128 + 1);
    // An MLA latent has one scale.
    let options = ModelOptions { kv_dtype: KvDtype::Fp8E4m3, scales: Scales::PerTokenHead, ..ModelOptions::default() };
    let items = Model::preset("deepseek-v3").unwrap().items(&options).unwrap();
    assert_eq!(items.spec.bytes_per_token().get(), 61 * (576 + 4));
}

#[test]
fn four_bit_pages_have_data_and_scales() {
    let options = ModelOptions { kv_dtype: KvDtype::Nvfp4, ..ModelOptions::default() };
    let spec = Model::preset("llama-3.1-8b").unwrap().items(&options).unwrap().spec;
    let widths: Vec<u64> = paged(&spec.items()[0]).components.iter().map(|c| c.width.get()).collect();
    // 128 values of 4 bits, and 8 scales.
    assert_eq!(widths, [64, 8, 64, 8]);
    assert_eq!(spec.bytes_per_token().get(), 32 * 8 * 2 * 72);
    let error = Model::preset("deepseek-v3").unwrap().items(&options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kv_dtype is nvfp4, but layer 0 of deepseek-v3 keeps an MLA latent of 512 + 64 values; nvfp4 is for K and V of heads of a \
         multiple of 16 values, use another type"
    );
}

#[test]
fn options_that_a_model_cannot_have_are_told_all_at_once() {
    let model = Model::preset("llama-3.1-8b").unwrap();
    let options = ModelOptions {
        scales: Scales::PerTokenHead,
        state_dtype: Some(Dtype::Fp32),
        mtp: MtpLayers::All,
        layers: Some(99),
        ..ModelOptions::default()
    };
    let Err(ModelError::Several(errors)) = model.items(&options) else { panic!("all four are wrong") };
    let model = || "llama-3.1-8b".to_owned();
    let scales = ModelError::Scales { model: model(), scales: Scales::PerTokenHead, kept: "bf16" };
    let state = ModelError::NoState { model: model(), option: "state_dtype" };
    let layers = ModelError::Layers { model: model(), got: 99, has: 32 };
    assert_eq!(errors, [layers, state, scales, ModelError::NoMtp { model: model() }]);
    // In the description they stand at their keys.
    let text = "model = \"llama-3.1-8b\"\nscales = \"per-token-head\"\nstate_dtype = \"fp32\"\nblock_size = 16\nparallel = \"tp=4,dcp=3\"";
    let error = kvferry_models::EngineDescription::from_toml("d", text, None).unwrap().manifest().unwrap_err();
    assert_eq!(
        error.to_string(),
        "d:3: state_dtype: is set, but llama-3.1-8b keeps no recurrent state; leave it out\n\
         d:2: scales: are per-token-head, but the KV cache of llama-3.1-8b is kept in bf16; scales go with fp8_e4m3 and fp8_e5m2\n\
         d:5: parallel.dcp: is 3, which does not divide tp 4; choose one that does, since it re-uses the tensor-parallel ranks"
    );
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
        let kept = items.spec.items().iter().enumerate().filter(|(_, i)| paged(i).retention == FULL);
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
    let keeps = Attention::Heads { heads: 8, head_dim: 128, retention: FULL };
    assert!(matches!(error, ModelError::KvDtype { layer: 0, keeps: k, .. } if k == keeps), "{error}");
    let fp8 = ModelOptions { kv_dtype: KvDtype::Fp8E4m3, ..ModelOptions::default() };
    let items = Model::preset("qwen3-8b").unwrap().items(&fp8).unwrap();
    assert_eq!(items.spec.bytes_per_token().get(), 147_456 / 2);
    assert_eq!(paged(&items.spec.items()[0]).components[0].encoding.as_str(), "fp8_e4m3");
}
