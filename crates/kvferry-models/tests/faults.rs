//! Faults of a `config.json`, and inputs that only want to do harm.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

use kvferry_models::{EngineDescription, KvDtype, Model, ModelError, ModelOptions, MtpLayers, Scales, preset_names};
use proptest::prelude::*;

const LLAMA: &str = r#"{
  "model_type": "llama",
  "num_hidden_layers": 2,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "hidden_size": 512
}"#;

fn with(line: &str) -> String {
    LLAMA.replacen('{', &format!("{{\n  {line},"), 1)
}

fn fault(text: &str) -> String {
    Model::from_json("c.json", text).unwrap_err().to_string()
}

#[test]
fn a_small_configuration_is_read() {
    let model = Model::from_json("c.json", LLAMA).unwrap();
    let items = model.items(&ModelOptions::default()).unwrap();
    assert_eq!(items.spec.bytes_per_token().get(), 2 * 2 * 2 * 64 * 2);
    assert_eq!((model.name(), model.dtype(), model.layers().len(), model.mtp_layers()), ("llama", None, 2, 0));
}

#[test]
fn every_fault_names_key_and_line() {
    let replace = |from: &str, to: &str| LLAMA.replace(from, to);
    let gemma = |key: &str| {
        format!(
            "{{\"model_type\": \"gemma3\",\n\"num_hidden_layers\": 7,\n\"text_config\": {{\"model_type\": \"gemma3_text\",\n\
             \"num_hidden_layers\": 6, \"num_attention_heads\": 8,\n\"num_key_value_heads\": 4, \"head_dim\": 64,\n{key}}}}}"
        )
    };
    let cases: &[(String, &str)] = &[
        (replace("\"llama\"", "\"lama\""), "c.json:2: model_type: \"lama\" is not known here; use llama, mistral, "),
        (replace("  \"model_type\": \"llama\",\n", ""), "c.json:1: model_type: is missing"),
        (replace("\"num_hidden_layers\": 2,", ""), "c.json:1: num_hidden_layers: is missing"),
        (replace(": 2,", ": 2000,"), "c.json:3: num_hidden_layers: is 2000; it must be 1 to 1024"),
        (replace(": 8,", ": -8,"), "c.json:4: num_attention_heads: is -8; it must be 1 to 65536"),
        (replace(": 8,", ": \"8\","), "c.json:4: num_attention_heads: must be a whole number, not the text \"8\""),
        (
            replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"),
            "c.json:5: num_key_value_heads: is 3, which does not divide the 8 num_attention_heads on line 4",
        ),
        (
            replace("512", "510"),
            "c.json:6: hidden_size: is 510, which makes no head size with the 8 num_attention_heads on line 4; state head_dim",
        ),
        (replace("\"hidden_size\": 512", "\"other\": 1"), "c.json:1: hidden_size: is missing; without head_dim"),
        (with("\"sliding_window\": 64"), "c.json:2: sliding_window: is set, but llama models have no sliding layers"),
        (with("\"torch_dtype\": \"int8\""), "c.json:2: torch_dtype: \"int8\" is not known here; use bfloat16"),
        (
            with("\"torch_dtype\": \"float16\",\n\"dtype\": \"bfloat16\""),
            "c.json:3: dtype: is bf16 here but fp16 on line 2",
        ),
        (
            with("\"layer_types\": [\"full_attention\"]"),
            "c.json:2: layer_types: lists 1 layers, but num_hidden_layers on line 4 is 2",
        ),
        (
            with("\"layer_types\": [\"full_attention\",\n\"odd\"]"),
            "c.json:3: layer_types: \"odd\" is not known here; use full_attention",
        ),
        (
            with("\"layer_types\": [\"full_attention\",\n\"sliding_attention\"]"),
            "c.json:3: layer_types: layer 1 needs sliding_window, which has no value or is switched off",
        ),
        (with("\"num_kv_shared_layers\": 2"), "c.json:2: num_kv_shared_layers: is 2; it must be 0 to 1"),
        (with("\"text_config\": 1"), "c.json:2: text_config: must be a table, not the number 1"),
        (
            with("\"text_config\": {}"),
            "c.json:3: model_type: \"llama\" is not known here; use one of gemma3, gemma4, kimi_k25 beside text_config",
        ),
        (with("\"model_type\": \"qwen3\""), "c.json:3: not JSON: key"), /* twice: told before anything else */
        (
            gemma("\"sliding_window\": 8"),
            "c.json:4: text_config.num_hidden_layers: is the number 6 here but the number 7 on line 2, outside text_config",
        ),
        (
            gemma("\"sliding_window\": 0").replacen("7", "6", 1),
            "c.json:6: text_config.sliding_window: is 0; it must be 1 to 4294967295",
        ),
        (gemma("\"x\": 0").replacen("7", "6", 1), "c.json:3: text_config.sliding_window: is missing"),
        ("{\"model_type\": \"gemma3\"}".into(), "c.json:1: text_config: is missing"),
        ("[]".into(), "c.json:1: must be a table, not a list"),
        (String::new(), "c.json:1: not JSON: expected a value, found the end of the file"),
        (replace("512\n", "512,\n"), "c.json:7: not JSON: expected a key in quotes, found '}'"),
        (replace(": 8", ": 08"), "c.json:4: not JSON: expected a number without a leading zero"),
    ];
    for (text, expected) in cases {
        let got = fault(text);
        let expected = expected.replace("not JSON: key", "key \"model_type\" stands twice, first on line 2");
        assert!(got.starts_with(&expected), "{text}\n got {got}\nwant {expected}");
    }
}

#[test]
fn contradictions_of_other_families() {
    let mla = r#"{"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_attention_heads": 8,
"kv_lora_rank": 512,
"index_head_dim": 128}"#;
    let text = fault(mla);
    assert!(text.contains("c.json:1: qk_rope_head_dim: is missing"), "{text}");
    assert!(
        text.contains("c.json:3: index_head_dim: sizes an indexer, but the model_type on line 1 has none"),
        "{text}"
    );
    let qwen = |keys: &str| {
        format!(
            "{{\"model_type\": \"qwen3\", \"num_hidden_layers\": 4, \"num_attention_heads\": 8, \"head_dim\": 64,\n\"num_key_value_heads\": 2,\n{keys}}}"
        )
    };
    let text = fault(&qwen("\"use_sliding_window\": true"));
    assert!(
        text.contains("c.json:1: sliding_window: has no value, but use_sliding_window on line 3 is true"),
        "{text}"
    );
    let text = fault(&qwen("\"use_sliding_window\": true, \"sliding_window\": 16"));
    assert!(text.contains("max_window_layers: is missing"), "{text}");
    let model =
        Model::from_json("c", &qwen("\"use_sliding_window\": true, \"sliding_window\": 16, \"max_window_layers\": 3"))
            .unwrap();
    let items = model.items(&ModelOptions::default()).unwrap();
    let full = Some(kvferry_geometry::spec::Retention::Full);
    let full = items.spec.items().iter().filter(|i| i.as_paged().map(|p| p.retention) == full);
    assert_eq!(full.count(), 3);
    // Without the switch a window alone means nothing to the Qwen classes.
    let model = Model::from_json("c", &qwen("\"sliding_window\": 16")).unwrap();
    assert_eq!(model.items(&ModelOptions::default()).unwrap().spec.items().len(), 4);
}

#[test]
fn faults_of_hybrids_name_key_and_line() {
    let preset = |name: &str| {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("presets");
        std::fs::read_to_string(dir.join(format!("{name}.json"))).unwrap()
    };
    let cases = [
        (
            "nemotron-h-56b",
            "\"n_groups\": 8",
            "\"n_groups\": 7",
            "n_groups: is 7, which does not divide the 256 mamba_num_heads on line",
        ),
        ("nemotron-h-56b", "\"ssm_state_size\": 256,\n", "", "ssm_state_size: is missing; the state is sized by it"),
        ("nemotron-h-56b", "\"conv_kernel\": 4", "\"conv_kernel\": 1", "conv_kernel: is 1; it must be 2 to 1025"),
        ("nemotron-h-56b", "\"M-M-", "\"MXM-", "hybrid_override_pattern: \"X\" is not known here; use M (Mamba)"),
        (
            "nemotron-h-56b",
            "\"M-M-",
            "\"M-M",
            "hybrid_override_pattern: lists 117 layers, but num_hidden_layers on line",
        ),
        (
            "nemotron-3-super-120b-a12b",
            "\"mtp_hybrid_override_pattern\": \"*E\"",
            "\"mtp_hybrid_override_pattern\": \"ME\"",
            "mtp_hybrid_override_pattern: \"M\" is not known here",
        ),
        ("nemotron-3-nano-30b-a3b", "\"float32\"", "\"float8\"", "mamba_ssm_cache_dtype: \"float8\" is not known here"),
        (
            "bamba-9b",
            "\"mamba_n_heads\": 128",
            "\"mamba_n_heads\": 127",
            "mamba_expand: makes 8192 inner channels, which are not the 127 mamba_n_heads on line",
        ),
        ("falcon-h1-0.5b", "1536", "1535", "mamba_d_ssm: makes 1535 inner channels"),
        (
            "jamba-v0.1",
            "\"mamba_expand\": 2",
            "\"mamba_expand\": 20",
            "mamba_expand: the number of channels that it makes is 81920",
        ),
        (
            "jamba-v0.1",
            "\"sliding_window\": null",
            "\"sliding_window\": 8",
            "sliding_window: is set, but jamba models have no sliding",
        ),
        (
            "qwen3-next-80b-a3b",
            "\"linear_num_key_heads\": 16",
            "\"linear_num_key_heads\": 5",
            "linear_num_key_heads: is 5, which does not divide the 32 linear_num_value_heads on line",
        ),
        (
            "kimi-linear-48b-a3b",
            "\"num_heads\": 32",
            "\"heads\": 32",
            "linear_attn_config.num_heads: is missing; the state is sized",
        ),
        (
            "kimi-linear-48b-a3b",
            "[1, 2, 3, 5,",
            "[2, 3, 5,",
            "linear_attn_config: layer 1 (counted from 1) is in neither list",
        ),
        (
            "kimi-linear-48b-a3b",
            "[1, 2, 3, 5,",
            "[0, 2, 3, 5,",
            "linear_attn_config.kda_layers: is 0; it must be 1 to 27",
        ),
        ("minimax-text-01", "\"head_dim\": 128,", "", "head_dim: is missing; the state is sized by it"),
    ];
    for (name, from, to, expected) in cases {
        let text = preset(name);
        assert!(text.contains(from), "{name}: {from}");
        let got = fault(&text.replacen(from, to, 1));
        assert!(got.contains(expected) && got.starts_with("c.json:"), "{name}: {to}\n got {got}\nwant {expected}");
    }
    // All at once: sizes, letters and heads.
    let text =
        preset("nemotron-h-56b").replace("\"M-M-", "\"MXM-").replace("mamba_head_dim", "head").replace("n_groups", "x");
    assert_eq!(fault(&text).lines().count(), 3, "{}", fault(&text));
}

#[test]
fn a_head_size_may_be_left_to_the_class() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("presets");
    let text = std::fs::read_to_string(dir.join("bamba-9b.json")).unwrap();
    let spec = |text: &str| Model::from_json("c", text).unwrap().items(&ModelOptions::default()).unwrap().spec;
    assert_eq!(spec(&text.replace("\"mamba_d_head\": 64", "\"mamba_d_head\": \"auto\"")), spec(&text));
    assert_eq!(spec(&text.replace("\"mamba_d_head\": 64,", "")), spec(&text));
}

#[test]
fn layers_that_share_a_cache_have_no_item() {
    let model = Model::from_json("c", &with("\"num_kv_shared_layers\": 1")).unwrap();
    let items = model.items(&ModelOptions::default()).unwrap();
    assert_eq!((items.spec.items().len(), items.layers.len()), (1, 2));
    assert!(items.layers[1].items.is_empty());
}

#[test]
fn a_calibrated_checkpoint_decides_the_cache_type_unless_told_otherwise() {
    let bytes = |quant: &str, kv_dtype| {
        let model = Model::from_json("c.json", &with(&format!("\"quantization_config\": {quant}"))).unwrap();
        let options = ModelOptions { kv_dtype, ..ModelOptions::default() };
        model.items(&options).map(|i| i.spec.bytes_per_token().get())
    };
    assert_eq!(bytes(r#"{"kv_cache_scheme": null}"#, KvDtype::Auto), Ok(1024));
    assert_eq!(bytes(r#"{"kv_cache_scheme": {"num_bits": 8, "type": "float"}}"#, KvDtype::Auto), Ok(512));
    assert_eq!(bytes(r#"{"kv_cache_quant_algo": "FP8"}"#, KvDtype::Auto), Ok(512));
    let int = r#"{"kv_cache_scheme": {"num_bits": 8, "type": "int"}}"#;
    let error = bytes(int, KvDtype::Auto).unwrap_err().to_string();
    assert!(error.starts_with("c.json:2: quantization_config.kv_cache_scheme: "), "{error}");
    assert_eq!(bytes(int, KvDtype::Bf16), Ok(1024));
}

#[test]
fn what_python_writes_is_read() {
    let text =
        with("\"a\": [NaN, Infinity, -Infinity, 1e-5, -0.5, 1E+3, true, null, {}, \"\\u00e9\\ud83d\\ude00\\n\"]");
    assert!(Model::from_json("c.json", &text).is_ok());
    for bad in
        ["\"a\": \"\\ud83d\"", "\"a\": \"\\x\"", "\"a\": 1.", "\"a\": -", "\"a\": nul", "\"a\": \"\t\"", "\"a\": +1"]
    {
        assert!(Model::from_json("c.json", &with(bad)).is_err(), "{bad}");
    }
}

#[test]
fn depth_size_and_count_are_limited() {
    let deep = with(&format!("\"a\": {}{}", "[".repeat(100_000), "]".repeat(100_000)));
    assert!(fault(&deep).contains("the nesting is 33, more than the 32"), "{}", fault(&deep));
    let many = with(&format!("\"a\": [{}0]", "0,".repeat(300_000)));
    assert!(fault(&many).contains("the number of values is 200001"));
    let large = with(&format!("\"a\": \"{}\"", "x".repeat(1 << 20)));
    assert!(fault(&large).contains("the file's size in bytes is "));
    // Dotted keys nest as deep as a line is long.
    for text in [
        format!("{}a = 1", "a.".repeat(400_000)),
        format!("[{}a]", "a.".repeat(400)),
        format!("{}a = 1", "a.".repeat(400)),
    ] {
        assert!(EngineDescription::from_toml("d", &text, None).is_err());
    }
    let open = "a = ".to_string() + &"[\n".repeat(300_000);
    assert!(EngineDescription::from_toml("d", &open, None).is_err());
    let errors = (0..1000).map(|i| format!("k{i} = 1\n")).collect::<String>();
    let text = EngineDescription::from_toml("d", &errors, None).unwrap_err().to_string();
    assert_eq!(text.lines().count(), kvferry_models::MAX_FAULTS);
}

#[test]
fn a_file_cut_at_any_byte_is_an_error_never_a_panic() {
    for end in 0..LLAMA.len() {
        assert!(Model::from_json("c.json", &LLAMA[..end]).is_err(), "{end}");
    }
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in preset_names() {
        let text = std::fs::read_to_string(dir.join("presets").join(format!("{name}.json"))).unwrap();
        for end in (0..text.trim_end().len()).filter(|&e| text.is_char_boundary(e)) {
            assert!(matches!(Model::from_json("c.json", &text[..end]), Err(ModelError::Input(_))), "{name} {end}");
        }
    }
    for entry in std::fs::read_dir(dir.join("examples")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for end in (0..text.len()).filter(|&e| text.is_char_boundary(e)) {
            // A description cut at a line's end may be whole; it must only not panic.
            drop(EngineDescription::from_toml("d.toml", &text[..end], None).map(|d| d.manifest().is_ok()));
        }
    }
}

/// A number, word or sign to put into a file.
fn scrap() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("0"),
        Just("-1"),
        Just("4294967296"),
        Just("99999999999999999999999999"),
        Just("1e400"),
        Just("null"),
        Just("{"),
        Just("]"),
        Just("\""),
        Just("\\u"),
        Just("\n"),
        Just(","),
        Just(":"),
        Just("="),
        Just("["),
        Just("\u{1f600}"),
        Just("full_attention"),
        Just("65535"),
        Just("1024"),
        Just("true"),
        Just("*"),
        Just("tp"),
        Just("dcp = 3\n"),
    ]
    .prop_map(str::to_owned)
}

proptest! {
    #[test]
    fn mutated_configurations_never_panic(
        which in 0usize..23, edits in prop::collection::vec((any::<prop::sample::Index>(), 0usize..8, scrap()), 1..6)
    ) {
        let name = preset_names().nth(which).unwrap();
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("presets").join(format!("{name}.json"));
        let text = mutate(std::fs::read_to_string(path).unwrap(), &edits);
        if let Ok(model) = Model::from_json("c.json", &text) {
            drop(model.items(&ModelOptions { kv_dtype: KvDtype::Fp8DsMla, mtp: MtpLayers::All, ..ModelOptions::default() }));
            drop(model.items(&ModelOptions { kv_dtype: KvDtype::Fp8E4m3, scales: Scales::PerBlock(16), ..ModelOptions::default() }));
            drop(model.items(&ModelOptions::default()));
        }
    }

    #[test]
    fn mutated_descriptions_never_panic(
        which in 0usize..10, edits in prop::collection::vec((any::<prop::sample::Index>(), 0usize..8, scrap()), 1..4)
    ) {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
        let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        paths.sort();
        let text = mutate(std::fs::read_to_string(&paths[which]).unwrap(), &edits);
        if let Ok(d) = EngineDescription::from_toml("d.toml", &text, None) {
            // Large engines are sound too but slow to prove here.
            if d.shape.ranks() <= 64 {
                drop(d.manifest());
            }
        }
    }

    #[test]
    fn any_text_is_refused_or_read(text in "\\PC{0,200}") {
        drop(Model::from_json("c.json", &text));
        drop(EngineDescription::from_toml("d.toml", &text, None));
        drop(text.parse::<kvferry_models::Shape>());
    }
}

fn mutate(mut text: String, edits: &[(prop::sample::Index, usize, String)]) -> String {
    for (at, cut, scrap) in edits {
        let mut chars: Vec<char> = text.chars().collect();
        let at = at.index(chars.len().max(1)).min(chars.len());
        let end = (at + cut).min(chars.len());
        chars.splice(at..end, scrap.chars());
        text = chars.into_iter().collect();
    }
    text
}
