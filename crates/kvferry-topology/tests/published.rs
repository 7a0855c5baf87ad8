//! What a simulation says of a model's cache, and what it moves, against the published sizes of every preset.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test")]

use std::path::Path;
use std::time::Duration;

use kvferry_models::preset_names;
use kvferry_topology::analytic::analyse_load;
use kvferry_topology::answer::Answer;
use kvferry_topology::events::simulate_load;
use kvferry_topology::load::{Load, LoadRequest, Prefix};
use kvferry_topology::scenario::Scenario;

/// A model's cache as published: bytes in bf16 over all layers at tensor parallelism 1, K and V both, a latent once.
struct Published {
    name: &'static str,
    /// Of one token, in all layers; and in those that keep it for ever.
    token: (u64, u64),
    /// Tokens that the others attend to, the next one included.
    window: u64,
    /// Layers with a state.
    states: u64,
    /// Bytes of one layer's convolution, and of its recurrent state if that is bf16.
    state: (u64, u64),
    /// Whether engines keep the recurrent state in fp32 unless told otherwise.
    fp32: bool,
}

const fn attention(name: &'static str, token: u64) -> Published {
    windowed(name, (token, token), 1)
}

const fn windowed(name: &'static str, token: (u64, u64), window: u64) -> Published {
    Published { name, token, window, states: 0, state: (0, 0), fp32: false }
}

const fn hybrid(name: &'static str, token: u64, states: u64, state: (u64, u64), fp32: bool) -> Published {
    Published { name, token: (token, token), window: 1, states, state, fp32 }
}

const PUBLISHED: [Published; 23] = [
    attention("llama-3.1-8b", 131_072),
    attention("llama-3.1-70b", 327_680),
    attention("qwen3-8b", 147_456),
    attention("qwen3-235b-a22b", 192_512),
    attention("deepseek-v3", 70_272),
    attention("deepseek-v3.2", 85_888),
    attention("kimi-k2-instruct", 70_272),
    attention("kimi-k2.5", 70_272),
    attention("kimi-k2.5-eagle3", 32_768),
    attention("kimi-k2.5-eagle3-mla", 1152),
    windowed("gemma-3-27b-it", (507_904, 81_920), 1024),
    windowed("gemma-4-26b-a4b-it", (225_280, 20_480), 1024),
    windowed("gpt-oss-120b", (73_728, 36_864), 128),
    windowed("mistral-7b-v0.1", (131_072, 0), 4096),
    hybrid("nemotron-3-nano-30b-a3b", 6144, 23, (36_864, 1_048_576), true),
    hybrid("nemotron-3-super-120b-a12b", 8192, 40, (61_440, 2_097_152), true),
    hybrid("nemotron-h-56b", 40_960, 54, (122_880, 8_388_608), true),
    hybrid("qwen3-next-80b-a3b", 24_576, 36, (49_152, 1_048_576), false),
    hybrid("kimi-linear-48b-a3b", 8064, 20, (73_728, 1_048_576), true),
    hybrid("jamba-v0.1", 16_384, 28, (49_152, 262_144), false),
    hybrid("bamba-9b", 12_288, 29, (50_688, 2_097_152), false),
    hybrid("falcon-h1-0.5b", 18_432, 36, (10_752, 393_216), false),
    hybrid("minimax-text-01", 40_960, 70, (0, 2_097_152), false),
];

/// Both engines with one more key of their descriptions, one rank each.
fn scenario(model: &str, key: &str, mode: &str) -> Scenario {
    let engine = format!("{{ model = \"{model}\", parallel = {{ tp = 1 }}, blocks = 400{key} }}");
    let text = format!(
        r#"
        cluster = {{ preset = "hgx-h100", nodes = 2 }}
        [prefill]
        engine = {engine}
        time = {{ tokens_per_s = 100000 }}
        [decode]
        engine = {engine}
        time = {{ ms_per_token = 1 }}
        [load]
        requests = 1
        per_s = 1
        prompt = 1
        output = 1
        [transfer]
        mode = "{mode}"
        "#
    );
    Scenario::from_toml("test", &text, Path::new(".")).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Both simulations of one prompt of so many tokens.
fn answers(s: &Scenario, prompt: u64) -> [Answer; 2] {
    let request = LoadRequest { at: Duration::ZERO, prompt, output: 1, prefix: Prefix::None };
    let load = Load { requests: vec![request], notes: Vec::new() };
    [analyse_load(s, &load).unwrap(), simulate_load(s, &load).unwrap()]
}

/// What a request of so many tokens moves: of layers with windows, what the next token attends to.
fn moved(p: &Published, tokens: u64, state: u64) -> u64 {
    tokens * p.token.1 + tokens.min(p.window - 1) * (p.token.0 - p.token.1) + state
}

fn says(s: &Scenario, prompt: u64, (token, state): (u64, u64), wire: u64, what: &str) {
    for a in answers(s, prompt) {
        let what = format!("{what}, {prompt} tokens, {}", a.engine);
        for side in [&a.prefill, &a.decode] {
            assert_eq!((side.bytes_per_token, side.bytes_per_state), (token, state), "{what}");
        }
        assert_eq!((a.requests.delivered, a.requests.bytes, a.requests.wire_bytes), (1, wire, wire), "{what}");
        let [pair] = a.traffic.pairs.as_slice() else { panic!("{what}: {:?}", a.traffic.pairs) };
        assert_eq!((pair.source, pair.destination, pair.bytes), ((0, 0), (0, 0), wire), "{what}");
    }
}

#[test]
fn every_preset_has_published_figures() {
    let mut named: Vec<&str> = PUBLISHED.iter().map(|p| p.name).collect();
    named.sort_unstable();
    assert_eq!(named, preset_names().collect::<Vec<_>>());
}

#[test]
fn tokens_states_and_what_is_moved_of_them_are_the_published_bytes() {
    for p in &PUBLISHED {
        let of = |times: u64| p.states * (p.state.0 + times * p.state.1);
        let usual = (if p.fp32 { 2 } else { 1 }, "", "as usual");
        let told =
            [(1, ", state_dtype = \"bf16\"", "states in bf16"), (2, ", state_dtype = \"fp32\"", "states in fp32")];
        let variants = std::iter::once(usual).chain(told.into_iter().filter(|_| p.states > 0));
        for (times, key, how) in variants {
            for mode in ["pull", "push"] {
                let s = scenario(p.name, key, mode);
                let state = of(times);
                // On both sides of every window's edge, and of a block's.
                for prompt in [1, 127, 1024, 5000] {
                    let what = format!("{}, {how}, {mode}", p.name);
                    says(&s, prompt, (p.token.0, state), moved(p, prompt, state), &what);
                }
            }
        }
    }
}

#[test]
fn layers_that_predict_several_tokens_are_added_on_request() {
    for (name, token) in [("deepseek-v3", 71_424), ("deepseek-v3.2", 87_296), ("nemotron-3-super-120b-a12b", 9216)] {
        let s = scenario(name, ", mtp = true", "pull");
        let p = PUBLISHED.iter().find(|p| p.name == name).unwrap();
        let state = p.states * (p.state.0 + 2 * p.state.1);
        says(&s, 1000, (token, state), 1000 * token + state, name);
    }
}

#[test]
fn other_formats_of_an_indexed_latent_have_their_published_bytes() {
    for (key, token) in [(", indexer = \"fp8\"", 78_324), (", kv_dtype = \"fp8_ds_mla\"", 48_068)] {
        says(&scenario("deepseek-v3.2", key, "pull"), 1000, (token, 0), 1000 * token, key);
    }
}
