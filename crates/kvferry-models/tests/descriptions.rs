//! Engine descriptions: the examples, and every kind of fault with its line.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test panics")]

use std::path::Path;

use kvferry_geometry::layout::{LayoutStyle, PagedView, View};
use kvferry_geometry::manifest::{Manifest, ManifestError};
use kvferry_geometry::placement::{PagedPlacement, PcpMode};
use kvferry_geometry::spec::Retention;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_models::{DescribeError, EngineDescription, Grouping, Model, Shape, layout_named};

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

fn held(m: &Manifest, rank: u32, item: usize) -> PagedPlacement {
    *m.rank(RankId::new(rank)).unwrap().placement[item].as_ref().unwrap().as_paged().unwrap()
}

fn view(m: &Manifest, item: usize) -> &View {
    m.ranks()[0].layout.views[item].as_ref().unwrap()
}

fn paged_view(m: &Manifest, item: usize) -> &PagedView {
    view(m, item).as_paged().unwrap()
}

fn retention(m: &Manifest, group: usize) -> Retention {
    m.spec().get(m.groups()[group].items[0]).unwrap().as_paged().unwrap().retention
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
    assert_eq!((held(&m, 3, 0).heads.start(), held(&m, 3, 0).heads.end()), (6, 8));
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
    assert_eq!(count, 10);
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
    // The draft's heads are all on every rank of the last stage.
    assert_eq!(held(&m, 7, 32).heads.count(), 64);
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
    let (slides, full) = (paged_view(&m, 0), paged_view(&m, 1));
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
    assert_eq!(m.spec().items()[0].as_paged().unwrap().components[0].encoding.as_str(), "fp16");
    // The draft follows the target's 11 layers; its pattern in `whole` names another layer, so its heads are split.
    assert_eq!(m.spec().items()[11].name.as_str(), "draft.model.layers.11.self_attn.attn");
    assert_eq!(held(&m, 4, 11).heads.count(), 32);
    let mut d = example("inline.toml");
    d.whole = vec!["draft.*".into()];
    assert_eq!(held(&d.manifest().unwrap(), 4, 11).heads.count(), 64);
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
    assert!(text.contains("d.toml: item model.layers.0.self_attn.attn: no rank holds heads or units [0, 4)"), "{text}");
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
            "d.toml:2: layout: planes over all blocks exclude rows that pack all items of a block and memory that groups share",
        ),
        ("{m}layers = 33", "d.toml:2: layers: is 33, but llama-3.1-8b has 32; it must be 1 to 32"),
        ("{m}mtp = true", "d.toml:2: mtp: is set, but llama-3.1-8b has no multi-token-prediction layers; leave it out"),
        ("{m}mtp = \"yes\"", "d.toml:2: mtp: must be true, false or a whole number, not the text \"yes\""),
        ("{m}kv_dtype = \"int4\"", "d.toml:2: kv_dtype: \"int4\" is not known here; use auto, bf16"),
        (
            "{m}kv_dtype = \"fp8_ds_mla\"",
            "d.toml:2: kv_dtype: is fp8_ds_mla, but layer 0 of llama-3.1-8b keeps K and V of 8 heads of 128 values; fp8_ds_mla is for MLA",
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
        (
            "{m}groups = \"by-name\"",
            "d.toml:2: groups: \"by-name\" is not known here; use by-shape, by-retention, by-kind or equal-layers",
        ),
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
            "d.toml:3: group.0.retention: \"all\" is not known here; use full, window, chunk, ring or state",
        ),
        (
            "{m}groups = \"by-shape\"\n[[group]]",
            "d.toml:3: group: lists groups, but groups on line 2 says how to make them",
        ),
        (
            "model = \"jamba-v0.1\"\n[[group]]\nname = \"all\"",
            "d.toml:2: group.0: items model.layers.4.attn (paged) and model.layers.0.mixer (a state) can't share a block table",
        ),
        (
            "model = \"jamba-v0.1\"\n[[group]]\nretention = \"state\"\nblock_size = 16\n[[group]]\nname = \"a\"\nslots = 7",
            "d.toml:4: group.0.block_size: is for paged items, but item model.layers.0.mixer is a state and has slots; leave it out\n\
             d.toml:7: group.1.slots: is for states, but item model.layers.4.attn is paged and has blocks; leave it out",
        ),
        ("{m}slots_per_request = 65\nslots = 64", "d.toml:2: slots_per_request: is 65; it must be 1 to 64"),
        ("{m}slots = 0", "d.toml:2: slots: is 0; it must be 1 to 268435456"),
        ("{m}mtp = 2", "d.toml:2: mtp: is set, but llama-3.1-8b has no multi-token-prediction layers"),
        (
            "model = \"deepseek-v3\"\nmtp = 2",
            "d.toml:2: mtp: is 2, but deepseek-v3 has 1 multi-token-prediction layers",
        ),
        ("{m}conv_dtype = \"fp32\"", "d.toml:2: conv_dtype: is set, but llama-3.1-8b keeps no recurrent state"),
        (
            "model = \"jamba-v0.1\"\nstate_dtype = \"fp8\"",
            "d.toml:2: state_dtype: \"fp8\" is not known here; use bf16, fp16 or fp32",
        ),
        (
            "{m}kv_dtype = \"nvfp4\"\nscales = \"per-block\"",
            "d.toml:3: scales: are per-block of 16 tokens, but the KV cache of llama-3.1-8b is kept in nvfp4",
        ),
        ("{m}scale_block = 8", "d.toml:2: scale_block: is the tokens that one scale covers, but scales are neither"),
        (
            "{m}kv_dtype = \"fp8\"\nscales = \"per-block-head\"\nscale_block = 12",
            "block_size: is 16, which is not a multiple of the 12 tokens that one scale or entry of item model.layers.0.self_attn.attn covers",
        ),
        (
            "{m}kv_dtype = \"fp8\"\nscales = \"per-block-head\"\nkernel_block = 8",
            "d.toml:4: kernel_block: is 8, which is not a multiple of the 16 tokens that one scale",
        ),
        (
            "{m}kv_dtype = \"fp8\"\nscales = \"per-block\"\n[parallel]\ntp = 16\ndcp = 2\ninterleave = 8",
            "d.toml:7: parallel.interleave: is 8, which is not a multiple of the 16 tokens that one scale",
        ),
        (
            "{m}[layout]\nstate_order = \"rows-first\"",
            "d.toml:3: layout.state_order: \"rows-first\" is not known here; use dim-first or state-first",
        ),
        ("{m}[layout]\nscratch_rows = 5000", "d.toml:3: layout.scratch_rows: is 5000; it must be 0 to 1024"),
        ("{m}[layout]\nstyle = \"planes\"\nshare = true", "d.toml:2: layout: planes over all blocks exclude rows"),
        (
            "model = \"jamba-v0.1\"\nslots = 4\nlayout = { share = true }",
            "d.toml:2: slots: states take their slots from the blocks where groups share memory",
        ),
        (
            "model = \"jamba-v0.1\"\nlayout = { share = true }\n[[group]]\nretention = \"state\"\n[[group]]\nname = \"a\"\nlayout = \"nhd\"",
            "d.toml:3: group.0: group \"0\" has another layout or kernel block than group \"a\", but groups that share memory have one",
        ),
        (
            "model = \"gpt-oss-120b\"\nlayout = { share = true }\n[[group]]\nretention = \"window\"\n[[group]]\nname = \"a\"\nblocks = 9",
            "d.toml:5: group.1: group \"a\" has another number of blocks than group \"0\"",
        ),
        ("{m}[[group]]\nsplit = 0", "d.toml:3: group.0.split: is 0; it must be 1 to 4096"),
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
fn groups_that_share_memory_have_equally_many_layers_in_the_same_places() {
    let m = example("hybrid-prefill.toml").manifest().unwrap();
    // 23 Mamba layers and 6 of attention: groups of 6, as many as the smallest kind has.
    let sizes: Vec<usize> = m.groups().iter().map(|g| g.items.len()).collect();
    assert_eq!(sizes, [6, 6, 6, 5, 6]);
    let names: Vec<&str> = m.groups().iter().map(|g| g.name.as_str()).collect();
    assert_eq!(names, ["0 state", "1 state", "2 state", "3 state", "4 full"]);
    let states: Vec<bool> = (0..5).map(|g| m.is_state(kvferry_geometry::units::GroupId::new(g))).collect();
    assert_eq!(states, [true, true, true, true, false]);
    // Layers are dealt out in turn, so that every stage has its share.
    let group = |g: usize| -> Vec<&str> {
        m.groups()[g].items.iter().map(|i| m.spec().get(*i).unwrap().name.as_str()).collect()
    };
    assert_eq!(group(1)[..2], ["model.layers.2.mixer", "model.layers.11.mixer"]);
    let layout = &m.ranks()[0].layout;
    // 2096 tokens of one head and 512 B make the largest page.
    let page = 2096 * 512;
    assert_eq!(layout.regions.len(), 6);
    assert!(layout.regions.iter().all(|r| r.len.get() == 512 * page));
    for group in m.groups() {
        for (n, item) in group.items.iter().enumerate() {
            let view = view(&m, item.index());
            assert_eq!((view.region().index(), view.blocks()), (n, 512));
        }
    }
}

#[test]
fn states_have_slots_of_their_own_where_no_memory_is_shared() {
    let m = example("hybrid-decode.toml").manifest().unwrap();
    assert_eq!((m.ranks().len(), m.groups().len()), (32, 2));
    let state = view(&m, 0).as_state().unwrap();
    // TP 16, 8 groups: 4 heads of 64 channels; one group of B and C, as on the next rank.
    let held = |rank: u32| m.rank(RankId::new(rank)).unwrap().placement[0].clone().unwrap();
    let parts = |rank| -> Vec<(u32, u32)> {
        held(rank).as_state().unwrap().parts.iter().map(|p| (p.start(), p.end())).collect()
    };
    assert_eq!(parts(2), [(512, 768), (128, 256), (128, 256), (8, 12)]);
    assert_eq!(parts(3), [(768, 1024), (128, 256), (128, 256), (12, 16)]);
    // 3 rows and 3 of scratch, rows outside.
    assert_eq!((state.slots, state.parts[0].scratch_rows, state.parts[0].unit_stride.get()), (128, 3, 2));
    // A row is x, B and C.
    assert_eq!(
        (state.parts[0].row_stride.get(), state.parts[2].offset.get()),
        (2 * (256 + 128 + 128), 2 * (256 + 128))
    );
    assert_eq!(state.slot_stride.get(), (256 + 128 + 128) * 6 * 2 + 4 * 64 * 128 * 4);
    // Where no number of slots is stated it follows what a request needs.
    let slots = |text: &str| {
        let m = read(&format!("model = \"jamba-v0.1\"\nlayers = 2\n{text}")).unwrap().manifest().unwrap();
        view(&m, 0).blocks()
    };
    assert_eq!((slots(""), slots("slots_per_request = 3"), slots("slots = 5")), (64, 192, 5));
}

#[test]
fn a_stage_can_have_states_only_or_nothing_at_all() {
    let text = "model = \"nemotron-3-nano-30b-a3b\"\nlayers = 6\n[parallel]\nstages = [\"0, 2, 4\", \"1, 3\", \"5\"]";
    let m = read(text).unwrap().manifest().unwrap();
    assert_eq!((layers_of(&m, 0), layers_of(&m, 1), layers_of(&m, 2)), (3, 0, 1));
}

#[test]
fn windows_share_one_table_with_full_layers_where_the_hybrid_manager_is_off() {
    let mut d = EngineDescription::new(Model::preset("gpt-oss-120b").unwrap(), Shape::default());
    d.grouping = Grouping::ByKind;
    let m = d.manifest().unwrap();
    assert_eq!((m.groups().len(), m.groups()[0].items.len(), m.groups()[0].name.as_str()), (1, 36, "0 mixed"));
    d.grouping = Grouping::ByRetention;
    assert_eq!(d.manifest().unwrap().groups().len(), 2);
}

#[test]
fn equal_layers_are_those_of_the_hybrid_manager() {
    let sizes = |model: &str, draft: Option<&str>| -> Vec<usize> {
        let mut d = EngineDescription::new(Model::preset(model).unwrap(), Shape::default());
        d.options.drafts = draft.iter().map(|d| Model::preset(d).unwrap()).collect();
        d.grouping = Grouping::EqualLayers;
        d.manifest().unwrap().groups().iter().map(|g| g.items.len()).collect()
    };
    // All keep all tokens: one table, whatever the pages.
    assert_eq!(sizes("deepseek-v3.2", None), [122]);
    assert_eq!(sizes("kimi-k2.5", Some("kimi-k2.5-eagle3")), [62]);
    assert_eq!(sizes("gpt-oss-120b", None), [18, 18]);
    assert_eq!(sizes("gemma-4-26b-a4b-it", None), [5, 5, 5, 5, 5, 5]);
    assert_eq!(sizes("gemma-3-27b-it", None), [9, 9, 9, 9, 8, 8, 10]);
    assert_eq!(sizes("falcon-h1-0.5b", None), [36, 36]);
    assert_eq!(sizes("jamba-v0.1", None), [4, 4, 4, 4, 4, 4, 4, 4]);
}

#[test]
fn blocks_of_smaller_pages_grow_where_memory_is_shared() {
    let blocks = |tp: u32| -> Vec<u64> {
        let mut d =
            EngineDescription::new(Model::preset("gemma-4-26b-a4b-it").unwrap(), Shape { tp, ..Shape::default() });
        d.grouping = Grouping::EqualLayers;
        d.layout.share = true;
        let m = d.manifest().unwrap();
        let mut tokens: Vec<u64> = m.groups().iter().map(|g| g.block_tokens.get()).collect();
        tokens.dedup();
        tokens
    };
    // A token of a full layer has half the bytes of one that slides; at TP 4 its head is on two ranks each, and they are equal.
    assert_eq!(blocks(1), [16, 32]);
    assert_eq!(blocks(2), [16, 32]);
    assert_eq!(blocks(4), [16]);
}

#[test]
fn a_rule_can_deal_its_items_out() {
    let text = "model = \"kimi-linear-48b-a3b\"\nlayout = { share = true }\n\
                [[group]]\nname = \"kda\"\nretention = \"state\"\nsplit = 3\n[[group]]\nname = \"mla\"\nblock_size = 64";
    let m = read(text).unwrap().manifest().unwrap();
    let groups: Vec<(&str, usize)> = m.groups().iter().map(|g| (g.name.as_str(), g.items.len())).collect();
    assert_eq!(groups, [("kda 0", 7), ("kda 1", 7), ("kda 2", 6), ("mla", 7)]);
    assert_eq!(m.ranks()[0].layout.regions.len(), 7);
}

#[test]
fn a_draft_shares_its_targets_table_though_its_pages_differ() {
    let m = example("draft.toml").manifest().unwrap();
    assert_eq!((m.groups().len(), m.groups()[0].items.len()), (1, 62));
    assert_eq!((held(&m, 5, 0).heads.count(), held(&m, 5, 61).heads.start()), (1, 40));
    assert_eq!((paged_view(&m, 0).block_stride.get(), paged_view(&m, 61).block_stride.get()), (64 * 656, 64 * 8 * 512));
}

#[test]
fn scales_lie_in_planes_of_their_own() {
    let m = example("fp8-scales.toml").manifest().unwrap();
    let view = paged_view(&m, 0);
    let names: Vec<&str> = view.components.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["k", "k_scale", "v", "v_scale"]);
    // One head on each of 8 ranks: 32 tokens of 128 B; the plane of the scales is as wide.
    assert_eq!(view.block_stride.get(), 32 * 128);
    assert_eq!(view.components[1].offset.get(), 32 * 128 * 1024);
    assert_eq!(view.components[1].entry_stride.get(), 4);
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
            d.layout = layout_named(layout).unwrap();
            let m = d.manifest().unwrap_or_else(|e| panic!("{model} {shape} {layout}: {e}"));
            assert_eq!(m.ranks().len(), *ranks, "{model} {shape}");
        }
    }
}

#[test]
fn windows_make_groups_of_their_own() {
    let d = EngineDescription::new(Model::preset("gemma-3-27b-it").unwrap(), Shape::default());
    let m = d.manifest().unwrap();
    assert_eq!([retention(&m, 0), retention(&m, 1)], [Retention::Window(Tokens::new(1024)), Retention::Full]);
}
