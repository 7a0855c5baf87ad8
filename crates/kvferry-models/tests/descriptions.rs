//! Engine descriptions: the examples, and every kind of fault with its line.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

use std::path::Path;

use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::manifest::{Manifest, ManifestError};
use kvferry_geometry::placement::PcpMode;
use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_models::{DescribeError, EngineDescription, Grouping, Model, ModelError, RetentionKind, Shape};

fn example(name: &str) -> EngineDescription {
    EngineDescription::from_file(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)).unwrap()
}

fn read(text: &str) -> Result<EngineDescription, DescribeError> {
    EngineDescription::from_toml("d.toml", text, None)
}

/// The fault of a description that can't be read, or of its manifest.
fn fault(text: &str) -> String {
    match read(text) {
        Err(error) => error.to_string(),
        Ok(d) => d.manifest().unwrap_err().to_string(),
    }
}

fn layers_of(m: &Manifest, rank: u32) -> usize {
    m.rank(RankId::new(rank)).unwrap().placement.iter().flatten().count()
}

#[test]
fn a_plain_engine() {
    let d = example("prefill-tp4-pp2.toml");
    assert_eq!((d.name.as_str(), d.shape.to_string().as_str()), ("prefill", "tp=4,pp=2"));
    let m = d.manifest().unwrap();
    assert_eq!(m.ranks().len(), 8);
    assert!((0..8).all(|r| layers_of(&m, r) == 16));
    assert_eq!(m.groups().len(), 1);
    assert_eq!(m.groups()[0].block_tokens, Tokens::new(16));
    let p = m.rank(RankId::new(3)).unwrap().placement[0].unwrap();
    assert_eq!((p.heads.start(), p.heads.end()), (6, 8));
}

#[test]
fn every_example_makes_a_manifest() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let d = EngineDescription::from_file(&path).unwrap_or_else(|e| panic!("{e}"));
        d.manifest().unwrap_or_else(|e| panic!("{e}"));
        count += 1;
    }
    assert_eq!(count, 6);
}

/// The page that explains descriptions.
fn page() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md")).unwrap()
}

#[test]
fn the_page_s_example_has_every_key_and_makes_a_manifest() {
    let page = page();
    let example = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let m = read(example).unwrap().manifest().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((m.ranks().len(), m.spec().items().len()), (8, 33));
    // The draft's heads are all on both ranks' sides of the last stage.
    assert_eq!(m.rank(RankId::new(7)).unwrap().placement[32].unwrap().heads.count(), 64);
    let Err(DescribeError::Input(errors)) = read("x = 1") else { panic!("x is no key") };
    let known = errors.0.iter().find(|e| e.key == "x").unwrap().to_string();
    for key in known.split("the keys are ").nth(1).unwrap().split(", ").filter(|k| *k != "group") {
        assert!(
            example.contains(&format!("\n{key} =")) || example.contains(&format!("[{key}]")) || key == "name",
            "{key}"
        );
    }
}

#[test]
fn the_page_names_every_preset() {
    let page = page();
    for name in kvferry_models::preset_names() {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn groups_have_sizes_and_layouts_of_their_own() {
    let m = example("gpt-oss-groups.toml").manifest().unwrap();
    let names: Vec<&str> = m.groups().iter().map(|g| g.name.as_str()).collect();
    assert_eq!(names, ["sliding", "full"]);
    assert_eq!(m.groups()[0].block_tokens, Tokens::new(32));
    assert_eq!(m.groups()[1].block_tokens, Tokens::new(64));
    for group in m.groups() {
        assert_eq!(group.items.len(), 18);
    }
    let layout = &m.rank(RankId::new(0)).unwrap().layout;
    assert_eq!(layout.regions.len(), 36);
    let (slides, full) = (layout.views[0].as_ref().unwrap(), layout.views[1].as_ref().unwrap());
    // 32 tokens x 4 heads x 2 x 128 B; 64 tokens and 256 B of padding.
    assert_eq!((slides.block_stride.get(), slides.blocks), (32 * 4 * 256, 1024));
    assert_eq!((full.block_stride.get(), full.blocks, full.kernel.size), (64 * 4 * 256 + 256, 4096, 16));
    assert_ne!(slides.region, full.region);
    // In a kernel block of 16 tokens V follows all of K.
    assert_eq!(full.components[1].offset.get(), 16 * 4 * 128);
}

#[test]
fn groups_come_by_shape_unless_told_otherwise() {
    let m = example("deepseek-dcp.toml").manifest().unwrap();
    // The latent and the indexer's keys are pages of different shape.
    assert_eq!(m.groups().len(), 2);
    assert_eq!(m.groups()[0].items.len(), 62);
    assert_eq!(m.groups()[0].block_tokens, Tokens::new(64 * 4));
    assert_eq!(layers_of(&m, 0), 60);
    // The layer of multi-token prediction is on the last stage.
    assert_eq!(layers_of(&m, 8), 64);
    let mut d = example("deepseek-dcp.toml");
    d.grouping = Grouping::ByRetention;
    assert_eq!(d.manifest().unwrap().groups().len(), 1);
}

#[test]
fn an_inline_model_with_a_draft_and_scattered_stages() {
    let m = example("inline.toml").manifest().unwrap();
    assert_eq!(m.ranks().len(), 6);
    assert_eq!((layers_of(&m, 0), layers_of(&m, 2), layers_of(&m, 4)), (4, 4, 4));
    assert_eq!(m.spec().items()[0].as_paged().components[0].encoding.as_str(), "fp16");
    // The draft follows the target's 11 layers; its pattern in `whole` names another layer, so its heads are split.
    assert_eq!(m.spec().items()[11].name.as_str(), "model.layers.11.self_attn.attn");
    assert_eq!(m.rank(RankId::new(4)).unwrap().placement[11].unwrap().heads.count(), 32);
    let mut d = example("inline.toml");
    d.whole = vec!["model.layers.11.*".into()];
    let m = d.manifest().unwrap();
    assert_eq!(m.rank(RankId::new(4)).unwrap().placement[11].unwrap().heads.count(), 64);
}

#[test]
fn built_in_code_and_read_from_text_are_the_same_engine() {
    let mut d = EngineDescription::new(Model::preset("qwen3-235b-a22b").unwrap(), "tp=8,dcp=2".parse().unwrap());
    d.options.layers = Some(8);
    d.layout = LayoutStyle::NHD;
    let text = "model = \"qwen3-235b-a22b\"\nlayers = 8\nlayout = \"nhd\"\nparallel = { tp = 8, dcp = 2 }";
    assert_eq!(d.manifest().unwrap().digest(), read(text).unwrap().manifest().unwrap().digest());
}

#[test]
fn prefill_context_parallelism_in_both_modes() {
    let base = "model = \"llama-3.1-8b\"\nlayers = 2\n";
    let tokens = |mode: &str| {
        let text = format!("{base}parallel = {{ tp = 2, pcp = 2, pcp_mode = \"{mode}\", interleave = 8 }}");
        let d = read(&text).unwrap();
        let m = d.manifest().unwrap();
        (d.shape.pcp_mode, m.ranks().len(), m.groups()[0].block_tokens.get())
    };
    assert_eq!(tokens("shard"), (PcpMode::Shard, 4, 32));
    assert_eq!(tokens("replicate"), (PcpMode::Replicate, 4, 16));
}

#[test]
fn decode_context_parallelism_without_replicas_says_what_to_change() {
    let d = read("model = \"llama-3.1-8b\"\nparallel = \"tp=2,dcp=2\"").unwrap();
    let error = d.manifest().unwrap_err();
    let DescribeError::Manifest { errors, .. } = &error else { panic!("{error}") };
    assert!(errors.0.iter().all(|e| matches!(e, ManifestError::Uncovered { .. })));
    assert_eq!(errors.0.len(), 64);
    let text = error.to_string();
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.contains("d.toml: item model.layers.0.self_attn.attn: no rank holds heads [0, 4)"), "{text}");
    assert!(text.contains("(the same for 31 more items)"), "{text}");
    assert!(text.ends_with("lower dcp, or raise tp to (KV heads) x 2"), "{text}");
}

#[test]
fn every_fault_of_a_description_names_key_and_line() {
    let m = "model = \"llama-3.1-8b\"\n";
    let cases: &[(&str, &str)] = &[
        ("block_size = 16", "d.toml:1: model: is missing; name a preset, or a config.json"),
        ("modle = 1\nmodel = \"llama-3.1-8b\"", "d.toml:1: modle: is not a key here; the keys are name, model, "),
        ("model = \"lama\"", "d.toml:1: model: \"lama\" is not known here; use bamba-9b, "),
        (
            "model = 7",
            "d.toml:1: model: must be a preset's name, a file's name that ends in .json, or a table, not the number 7",
        ),
        ("model = \"no/such.json\"", "no/such.json: cannot be read: "),
        (
            "model = { preset = \"qwen3-8b\", file = \"x\" }",
            "d.toml:1: model: states 2 of preset, file, config; state exactly one",
        ),
        ("[model]\nfiel = \"x\"", "d.toml:2: model.fiel: is not a key here"),
        ("{m}\nblock_size = 0", "d.toml:3: block_size: is 0; it must be 1 to 65536"),
        ("{m}block_size = 1.5", "d.toml:2: block_size: must be a whole number, not the number 1.5"),
        (
            "{m}block_size = 99999999999999999999",
            "d.toml:2: block_size: is 99999999999999999999; it must be 1 to 65536",
        ),
        ("{m}block_size = 24\nkernel_block = 16", "d.toml:3: kernel_block: is 16, which does not divide block_size 24"),
        ("{m}layout = \"hdn\"", "d.toml:2: layout: \"hdn\" is not known here; use hnd, nhd, planes or packed-rows"),
        (
            "{m}[layout]\nstyle = \"planes\"\nrows = \"packed\"",
            "d.toml:2: layout: planes over all blocks and rows that pack",
        ),
        ("{m}layers = 33", "d.toml:2: layers: is 33, but llama-3.1-8b has 32; it must be 1 to 32"),
        ("{m}mtp = true", "d.toml:2: mtp: is set, but llama-3.1-8b has no multi-token-prediction layers; leave it out"),
        ("{m}mtp = \"yes\"", "d.toml:2: mtp: must be true or false, not the text \"yes\""),
        ("{m}kv_dtype = \"int4\"", "d.toml:2: kv_dtype: \"int4\" is not known here; use auto, bf16"),
        (
            "{m}kv_dtype = \"fp8_ds_mla\"",
            "d.toml:2: kv_dtype: kv_dtype is fp8_ds_mla, but layer 0 of llama-3.1-8b keeps K and V",
        ),
        ("{m}parallel = \"tp=2,pq=3\"", "d.toml:2: parallel: \"pq\" is not a key of a shape"),
        ("{m}[parallel]\ntp = 4\ndpc = 2", "d.toml:4: parallel.dpc: is not a key here; the keys are tp, pp,"),
        (
            "{m}[parallel]\ntp = 4\ndcp = 3",
            "d.toml:4: parallel.dcp: is 3, which does not divide tp 4; choose one that does",
        ),
        (
            "{m}[parallel]\ntp = 16\ndcp = 2\ninterleave = 3",
            "d.toml:5: parallel.interleave: is 3, which does not divide block_size 16",
        ),
        (
            "{m}[parallel]\npcp = 2\npcp_mode = \"both\"",
            "d.toml:4: parallel.pcp_mode: \"both\" is not known here; use shard or replicate",
        ),
        ("{m}[parallel]\npp = 33", "d.toml:3: parallel.pp: is 33, but there are only 32 layers to cut into stages"),
        (
            "{m}[parallel]\nstages = [\"0-15\", \"17-31\"]",
            "d.toml:3: parallel.stages: layer 16 is on no stage; list it on one",
        ),
        (
            "{m}[parallel]\nstages = [\"0-15\", \"16-32\"]",
            "d.toml:3: parallel.stages: stage 1 lists layer 32, which the model doesn't have",
        ),
        (
            "{m}[parallel]\npp = 3\nstages = [\"0-15\", \"16-31\"]",
            "d.toml:4: parallel.stages: lists 2 stages, but pp is 3",
        ),
        ("{m}[parallel]\nstages = [\"0-15\",\n\"16..31\"]", "d.toml:4: parallel.stages: must be a text of layers like"),
        (
            "{m}[parallel]\ntp = 4096\npp = 8",
            "d.toml:2: parallel: tp x pp x pcp is 32768, more than the 16384 that are read",
        ),
        (
            "{m}[parallel]\ntp = 16384",
            "d.toml:2: parallel: ranks x cache items is 524288, more than the 262144 that are read",
        ),
        ("{m}groups = \"by-name\"", "d.toml:2: groups: \"by-name\" is not known here; use by-shape or by-retention"),
        (
            "{m}[[group]]\nname = \"a\"\nitems = \"x*\"",
            "d.toml:2: group: item model.layers.0.self_attn.attn fits no group",
        ),
        ("{m}[[group]]\n[[group]]\nname = \"b\"", "\nd.toml:3: group.1: \"b\" takes no item; correct or remove it"),
        (
            "{m}[[group]]\nblock_size = 20\nkernel_block = 8",
            "d.toml:4: group.0.kernel_block: is 8, which does not divide block_size 20",
        ),
        (
            "{m}[[group]]\nretention = \"all\"",
            "d.toml:3: group.0.retention: \"all\" is not known here; use full, window or chunk",
        ),
        (
            "{m}groups = \"by-shape\"\n[[group]]",
            "d.toml:3: group: lists groups, but groups on line 2 says how to make them",
        ),
        (
            "model = \"gpt-oss-120b\"\n[[group]]\nname = \"all\"",
            "d.toml:2: group.0: items model.layers.0.attn.attn (window 128) and model.layers.1.attn.attn (full) keep different tokens",
        ),
        ("{m}block_size = ", "d.toml:2: not TOML: "),
        ("{m}blocks = 1\nblocks = 2", "d.toml:3: not TOML: duplicate key"),
        (
            "[model.config]\nmodel_type = \"llama\"\nnum_hidden_layers = 2\nnum_attention_heads = 8\nhead_dim = 0",
            "d.toml:5: model.config.head_dim: is 0; it must be 1 to 65536",
        ),
        (
            "{m}blocks = 268435456\nblock_size = 65536\nparallel = \"tp=16,pp=8\"\nlayout = { padding = 1073741823 }",
            "d.toml:2: blocks: make a cache of more bytes than 64 bits count",
        ),
        ("{m}draft = [\"qwen3-8b\",\n\"none\"]", "d.toml:3: draft: \"none\" is not known here"),
    ];
    for (text, expected) in cases {
        let got = format!("\n{}", fault(&text.replace("{m}", m)));
        assert!(got.contains(expected.trim_start_matches('\n')), "{text}\n got {got}\nwant {expected}");
    }
}

#[test]
fn all_faults_are_told_at_once() {
    let text = fault("modle = 1\nblock_size = 0\nlayout = \"x\"\n[parallel]\ntp = 0\nqp = 2");
    assert_eq!(text.lines().count(), 6, "{text}");
}

#[test]
fn a_hybrid_is_told_alone() {
    let error = read("model = \"jamba-v0.1\"\nblock_size = 16").unwrap_err();
    assert!(matches!(error, DescribeError::Model(ModelError::NotYet(_))), "{error}");
    let text = fault("model = \"jamba-v0.1\"\nblock_size = 0");
    assert!(text.contains("block_size") && text.contains("mamba1 state of 28 layers"), "{text}");
}

#[test]
fn the_usual_pairs_of_shapes_make_manifests() {
    let cases: &[(&str, Option<u32>, &str, u32, usize)] = &[
        ("llama-3.1-8b", None, "tp=8", 16, 8),
        ("llama-3.1-8b", None, "tp=6", 48, 6),
        ("llama-3.1-8b", None, "tp=1,pp=4", 32, 4),
        ("llama-3.1-8b", None, "tp=2,pcp=2,pcp_mode=replicate", 16, 4),
        ("llama-3.1-8b", None, "tp=2,pcp=2,pcp_mode=shard", 16, 4),
        ("deepseek-v3", Some(8), "tp=2,dcp=2", 64, 2),
        ("qwen3-235b-a22b", Some(8), "tp=8,dcp=2", 16, 8),
        ("gemma-4-26b-a4b-it", None, "tp=4,pp=3", 16, 12),
        ("kimi-k2.5", None, "tp=8,dcp=8,interleave=64", 64, 8),
    ];
    for (model, layers, shape, block_size, ranks) in cases {
        for layout in ["hnd", "nhd", "planes", "packed-rows"] {
            let mut d = EngineDescription::new(Model::preset(model).unwrap(), shape.parse().unwrap());
            d.options.layers = *layers;
            d.block_size = *block_size;
            d.layout = kvferry_models::layout_named(layout).unwrap();
            let m = d.manifest().unwrap_or_else(|e| panic!("{model} {shape} {layout}: {e}"));
            assert_eq!(m.ranks().len(), *ranks, "{model} {shape}");
        }
    }
}

#[test]
fn windows_make_groups_of_their_own() {
    let d = EngineDescription::new(Model::preset("gemma-3-27b-it").unwrap(), Shape::default());
    let m = d.manifest().unwrap();
    let kinds: Vec<Retention> =
        m.groups().iter().map(|g| m.spec().get(g.items[0]).unwrap().as_paged().retention).collect();
    assert_eq!(kinds, [Retention::Window(Tokens::new(1024)), Retention::Full]);
    let rule = kvferry_models::GroupRule { retention: Some(RetentionKind::Full), ..Default::default() };
    assert_eq!(rule.block_size, None);
}
