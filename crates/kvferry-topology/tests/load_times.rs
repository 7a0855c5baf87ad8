//! How long prefills and tokens take: the closed forms beside sums over tokens, and the tables' faults.
#![allow(clippy::panic, reason = "tests")]

use std::time::Duration;

use kvferry_geometry::spec::Retention;
use kvferry_models::{Attention as Cached, Model, preset_names};
use kvferry_sim::rng::Rng;
use kvferry_topology::load::figures;
use kvferry_topology::load::prefill::{PrefillModel, PrefillTime};
use kvferry_topology::load::roofline::{Attention, Roofline};
use kvferry_topology::load::{DecodeModel, DecodeTable, EngineFigures, PrefillTable};

/// Eight H100 SXM: 989 TFLOPS in bf16, 3,350 GB/s.
const ENGINE: EngineFigures<'static> = EngineFigures {
    model: "llama-3.1-70b",
    layers: 80,
    gpus: 8,
    tflops: 989.0,
    hbm_gb_s: 3_350.0,
    bytes_per_token: 327_680.0,
    bytes_per_state: 0.0,
};

fn prefill(text: &str) -> PrefillModel {
    prefill_of(text, &ENGINE).unwrap_or_else(|e| panic!("{e}"))
}

fn prefill_of(text: &str, engine: &EngineFigures<'_>) -> Result<PrefillModel, String> {
    let table = toml::from_str::<PrefillTable>(text).map_err(|e| e.to_string())?;
    table.check().and_then(|s| s.model(engine)).map_err(|e| e.to_string())
}

fn decode_of(text: &str, engine: &EngineFigures<'_>) -> Result<DecodeModel, String> {
    let table = toml::from_str::<DecodeTable>(text).map_err(|e| e.to_string())?;
    table.check().and_then(|s| s.model(engine)).map_err(|e| e.to_string())
}

fn decode(text: &str) -> DecodeModel {
    decode_of(text, &ENGINE).unwrap_or_else(|e| panic!("{e}"))
}

#[track_caller]
fn near(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-6 * want.abs().max(1e-3), "{got} is not {want}");
}

#[test]
fn attention_is_the_sum_over_tokens() {
    for seed in 0..500 {
        let mut rng = Rng::of(&[seed]);
        let most = if rng.chance(5_000) { None } else { Some(rng.between(1, 300)) };
        let (new, context) = (rng.below(400), rng.below(400));
        let attention = Attention { layers: 3, heads: 5, qk_dim: 7, v_dim: 11, most };
        let mut operations = 0;
        for i in 0..new {
            let reads = (context + i + 1).min(most.unwrap_or(u64::MAX));
            // A multiplication and an addition for each value of q·k and of p·v.
            operations += 3 * 5 * (2 * 7 + 2 * 11) * reads;
        }
        near(attention.flops(new, context), operations as f64);
    }
}

#[test]
fn a_known_prefill() {
    // 8,192 tokens of Llama-3.1-70B: 2 * 70.6e9 operations each, and 4 * 80 * 64 * 128 for each token read.
    let n = 8_192.0;
    let flops = 2.0 * 70.6e9 * n + 4.0 * 80.0 * 64.0 * 128.0 * n * (n + 1.0) / 2.0;
    let time = flops / (8.0 * 989e12 * 0.5);
    near(prefill("").time(8_192, 0).as_secs_f64(), time);
    assert!((0.31..0.33).contains(&time), "{time}");
    // Two chunks are the same arithmetic; a fixed time is each chunk's.
    near(prefill("chunk_tokens = 4096").time(8_192, 0).as_secs_f64(), time);
    near(prefill("chunk_tokens = 4096\nfixed_ms = 3").time(8_193, 0).as_secs_f64() - time, 0.009 + one_token(8_192));
    // A hit saves the matrices, and of the attention only what the hit's own tokens would have read.
    let (hit, rest) = (6_000.0, 2_192.0);
    let saved = 2.0 * 70.6e9 * hit + 4.0 * 80.0 * 64.0 * 128.0 * hit * (hit + 1.0) / 2.0;
    near(prefill("").time(2_192, 6_000).as_secs_f64(), (flops - saved) / (8.0 * 989e12 * 0.5));
    assert!(rest + hit - n == 0.0);
}

/// One token after so many others is bound by memory: all weights and the cache.
fn one_token(context: u64) -> f64 {
    (2.0 * 70.6e9 + 327_680.0 * (context + 1) as f64) / (8.0 * 3_350e9 * 0.8)
}

#[test]
fn a_small_prefill_is_bound_by_memory() {
    near(prefill("").time(1, 5_000).as_secs_f64(), one_token(5_000));
    near(prefill("[roofline]\nhbm_efficiency = 1.0\nhbm_gb_s = 2680").time(1, 5_000).as_secs_f64(), one_token(5_000));
}

#[test]
fn a_known_token() {
    let weights = 2.0 * 70.6e9;
    let time = |running: f64, context: f64| (weights + 327_680.0 * context * running) / (8.0 * 3_350e9 * 0.8);
    near(decode("").step(1, 1_000).as_secs_f64(), time(1.0, 1_000.0));
    near(decode("").step(64, 64_000).as_secs_f64(), time(64.0, 1_000.0));
    near(decode("fixed_ms = 2").step(64, 64_000).as_secs_f64(), time(64.0, 1_000.0) + 0.002);
    // So many that the arithmetic takes longer.
    let flops = 4_096.0 * (2.0 * 70.6e9 + 4.0 * 80.0 * 64.0 * 128.0 * 11.0);
    near(decode("").step(4_096, 40_960).as_secs_f64(), flops / (8.0 * 989e12 * 0.5));
    // States are read and written.
    let engine = EngineFigures { bytes_per_state: 1e9, ..ENGINE };
    let with = decode_of("", &engine).unwrap().step(8, 8_000).as_secs_f64();
    near(with - decode("").step(8, 8_000).as_secs_f64(), 16e9 / (8.0 * 3_350e9 * 0.8));
    assert_eq!(decode("").step(0, 0), decode("").step(1, 0));
}

#[test]
fn experts_are_read_as_far_as_tokens_meet_them() {
    let engine = EngineFigures { model: "deepseek-v3", layers: 61, bytes_per_token: 0.0, ..ENGINE };
    let PrefillTime::Roofline { roofline, .. } = prefill_of("", &engine).unwrap().time else { panic!("no roofline") };
    near(roofline.weights(1.0), 37e9);
    near(roofline.weights(2.0), 671e9 * (1.0 - (634.0_f64 / 671.0).powi(2)));
    near(roofline.weights(100_000.0), 671e9);
    let dense = Roofline { active_params: 671e9, ..roofline };
    near(dense.weights(1.0), 671e9);
}

#[test]
fn a_rate_and_a_table() {
    let rate = prefill("tokens_per_s = 20000\nfixed_ms = 4");
    near(rate.time(10_000, 99).as_secs_f64(), 0.504);
    near(rate.time(0, 0).as_secs_f64(), 0.004);
    let table = prefill("table_ms = [[1000, 100], [2000, 150], [4000, 350]]");
    for (tokens, ms) in [(0, 50.0), (500, 75.0), (1_000, 100.0), (1_500, 125.0), (3_000, 250.0), (6_000, 550.0)] {
        near(table.time(tokens, 0).as_secs_f64() * 1e3, ms);
    }
    // With a hit: what the curve rises by, and what it begins with.
    near(table.time(1_000, 3_000).as_secs_f64() * 1e3, 350.0 - 250.0 + 50.0);
    near(prefill("table_ms = [[1000, 100]]\nfixed_ms = 1").time(3_000, 500).as_secs_f64() * 1e3, 301.0);
    // A curve that would be below 0 at 0 begins with 0.
    near(prefill("table_ms = [[1000, 10], [2000, 40]]").time(500, 0).as_secs_f64() * 1e3, 5.0);
    let table = decode("table_ms = [[8, 20], [64, 34]]");
    for (running, ms) in [(1, 20.0), (8, 20.0), (36, 27.0), (64, 34.0), (120, 48.0)] {
        near(table.step(running, 1 << 20).as_secs_f64() * 1e3, ms);
    }
    near(decode("ms_per_token = 12.5").step(99, 5).as_secs_f64() * 1e3, 12.5);
}

#[test]
fn more_never_takes_less() {
    for seed in 0..300 {
        let mut rng = Rng::of(&[seed]);
        let mut pairs = Vec::new();
        let (mut count, mut ms) = (0, 0);
        for _ in 0..rng.between(1, 8) {
            count += rng.between(1, 3_000);
            ms += rng.below(300);
            pairs.push(format!("[{count}, {ms}]"));
        }
        let pairs = pairs.join(", ");
        for text in [format!("table_ms = [{pairs}]"), format!("chunk_tokens = {}", rng.between(128, 9_000))] {
            let model = prefill(&text);
            let mut last = Duration::ZERO;
            let mut new = 0;
            for _ in 0..40 {
                let time = model.time(new, 700);
                assert!(time >= last, "{text}: {new}");
                last = time;
                new += rng.below(900);
            }
        }
        let model = decode(&format!("table_ms = [{pairs}]"));
        assert!((1..60).all(|i| model.step(i * 200, 0) <= model.step((i + 1) * 200, 0)));
    }
}

#[test]
fn nothing_overflows() {
    for text in ["", "tokens_per_s = 0.001", "table_ms = [[1, 1e8], [2, 1e8]]", "chunk_tokens = 128"] {
        let model = prefill(text);
        for (new, context) in [(1 << 24, 1 << 24), (0, u64::MAX), (1, u64::MAX)] {
            assert!(model.time(new, context) <= Duration::from_secs(1_000_000_000), "{text}");
        }
    }
    for text in ["", "ms_per_token = 1e6", "table_ms = [[1048576, 1e8]]"] {
        assert!(decode(text).step(u64::MAX, u64::MAX) <= Duration::from_secs(1_000_000_000));
    }
}

#[test]
fn layers_share_a_step() {
    let even = prefill("");
    assert_eq!(even.layer_ends(4), [0.25, 0.5, 0.75, 1.0]);
    near(even.layer_share(79, 80), 1.0 / 80.0);
    assert_eq!((even.layer_share(80, 80), even.layer_ends(0).len()), (0.0, 0));
    let engine = EngineFigures { layers: 3, ..ENGINE };
    let weighted = prefill_of("layer_weights = [1, 2, 5]", &engine).unwrap();
    assert_eq!(weighted.layer_ends(3), [0.125, 0.375, 1.0]);
    let ends = prefill("").layer_ends(61);
    assert!(ends.windows(2).all(|w| w[0] < w[1]) && ends.last() == Some(&1.0));
    assert_eq!(
        prefill_of("layer_weights = [1, 2]", &ENGINE).unwrap_err(),
        "prefill.time.layer_weights: has 2 numbers, but the model 80 layers; give one for each"
    );
}

#[test]
fn figures_fit_the_presets() {
    for name in preset_names().filter(|n| !n.contains("eagle3")) {
        let figures = figures::of(name).unwrap_or_else(|| panic!("no figures of {name}"));
        assert!(figures.active_b <= figures.total_b && figures.source.starts_with("https://"), "{name}");
        let model = Model::preset(name).unwrap();
        let mut cached: Vec<(u32, Option<u64>)> = Vec::new();
        let (mut latent, mut indexed) = (0, 0);
        for layer in model.layers() {
            match layer.attention {
                Some(Cached::Heads { head_dim, retention, .. }) => {
                    let window = if let Retention::Window(w) = retention { Some(w.get()) } else { None };
                    cached.push((head_dim, window));
                }
                Some(Cached::Latent { latent: l, rope, indexer }) => {
                    assert_eq!((l, rope), (512, 64));
                    latent += 1;
                    indexed += u32::from(indexer.is_some());
                }
                _ => {}
            }
        }
        let mut counted: Vec<(u32, Option<u64>)> = Vec::new();
        for kind in figures.attention(false) {
            match (kind.qk_dim, kind.v_dim) {
                (192, 128) => latent -= kind.layers,
                (_, 0) => indexed -= kind.layers,
                (dim, _) => counted.extend((0..kind.layers).map(|_| (dim, kind.most))),
            }
        }
        cached.sort_unstable();
        counted.sort_unstable();
        assert_eq!((counted, latent, indexed), (cached, 0, 0), "{name}");
    }
    assert!(figures::ALL.windows(2).all(|w| w[0].name < w[1].name));
    assert!(figures::ALL.iter().all(|f| preset_names().any(|n| n == f.name)));
}

#[test]
fn what_no_one_states_is_asked_for() {
    let engine = EngineFigures { model: "my-model", tflops: 0.0, ..ENGINE };
    assert_eq!(
        prefill_of("", &engine).unwrap_err(),
        "prefill.time.roofline.active_params_b: is missing; there are no figures of the model \"my-model\" here; say it, or measure times\n\
         prefill.time.roofline.attention: is missing; there are no figures of the model \"my-model\" here; say it, or measure times"
    );
    let own =
        "[roofline]\nactive_params_b = 3\nparams_b = 30\nattention = [{ layers = 4, heads = 8, head_dim = 64 }]\n";
    assert_eq!(
        decode_of(own, &engine).unwrap_err(),
        "decode.time.roofline.tflops: is missing; the cluster states none for this GPU: say it"
    );
    let DecodeModel::Roofline { roofline, .. } = decode_of(&format!("{own}tflops = 100"), &engine).unwrap() else {
        panic!("no roofline")
    };
    assert_eq!((roofline.active_params, roofline.params, roofline.weight_bytes), (3e9, 30e9, 2.0));
    assert_eq!(roofline.attention, [Attention { layers: 4, heads: 8, qk_dim: 64, v_dim: 64, most: None }]);
    near(roofline.flops_per_s, 8.0 * 100e12 * 0.5);
    // Active parameters of one's own without a total are a dense model's.
    let own = own.replace("params_b = 30\n", "").replace("active_3", "active_params_b = 3");
    let PrefillTime::Roofline { roofline, .. } = prefill_of(&own, &ENGINE).unwrap().time else { panic!("no roofline") };
    assert_eq!(roofline.params, 3e9);
    let text = "[roofline]\nparams_b = 3";
    assert_eq!(
        prefill_of(text, &ENGINE).unwrap_err(),
        "prefill.time.roofline.params_b: is 3 billion, less than the 70.6 billion active"
    );
}

#[test]
fn every_fault_of_the_tables_is_told() {
    for (text, fault) in [
        ("tokens_per_s = 0", "prefill.time.tokens_per_s: is 0; it must be 0.001 to 1000000000"),
        (
            "tokens_per_s = 5\ntable_ms = [[1, 1]]",
            "prefill.time: has more than one of `tokens_per_s`, `table_ms` and `roofline`; keep one",
        ),
        ("table_ms = []", "prefill.time.table_ms: is missing; give it one pair at least, as [4096, 210]"),
        (
            "table_ms = [[10, 5], [10, 4]]",
            "prefill.time.table_ms[1][0]: 10 comes after 10; put the pairs in rising order, each count once\n\
             prefill.time.table_ms[1][1]: 4 ms for 10 is less than 5 ms for 10; more can't take less",
        ),
        (
            "table_ms = [[0, -1]]\nfixed_ms = inf\nchunk_tokens = 3",
            "prefill.time.table_ms[0][0]: is 0; it must be 1 to 16777216\n\
             prefill.time.table_ms[0][1]: is -1; it must be 0 to 100000000\n\
             prefill.time.fixed_ms: is inf; it must be 0 to 1000000\n\
             prefill.time.chunk_tokens: is 3; it must be 128 to 16777216",
        ),
        (
            "tokens_per_s = 5\nchunk_tokens = 512",
            "prefill.time.chunk_tokens: is for the roofline, and the times are stated; leave it out",
        ),
        ("layer_weights = [1, 0]", "prefill.time.layer_weights[1]: is 0; it must be 0.000001 to 1000000"),
        ("layer_weights = []", "prefill.time.layer_weights: has 0 numbers; it must have one for each layer, 1 to 1024"),
        (
            "[roofline]\nefficiency = 1.5\ntflops = nan\nattention = [{ layers = 0, heads = 1, head_dim = 4, v_dim = 2 }, { layers = 1, heads = 1, qk_dim = 3 }]",
            "prefill.time.roofline.tflops: is NaN; it must be 0.001 to 1000000\n\
             prefill.time.roofline.efficiency: is 1.5; it must be 0.001 to 1\n\
             prefill.time.roofline.attention[0].layers: is 0; it must be 1 to 1024\n\
             prefill.time.roofline.attention[0].v_dim: stands beside `head_dim`, which says both; keep one\n\
             prefill.time.roofline.attention[1].v_dim: is missing; say `head_dim`, or `qk_dim` and `v_dim`",
        ),
    ] {
        assert_eq!(prefill_of(text, &ENGINE).unwrap_err(), fault);
    }
    for (text, fault) in [
        ("ms_per_token = -1", "decode.time.ms_per_token: is -1; it must be 0.001 to 1000000"),
        (
            "ms_per_token = 1\nfixed_ms = 1",
            "decode.time.fixed_ms: is for the roofline, and the times are stated; leave it out",
        ),
        ("table_ms = [[1e9, 1]]", "decode.time.table_ms[0][0]: is 1000000000; it must be 1 to 1048576"),
    ] {
        assert_eq!(decode_of(text, &ENGINE).unwrap_err(), fault);
    }
    assert!(prefill_of("rate = 4", &ENGINE).unwrap_err().contains("unknown field `rate`"));
    assert!(decode_of("chunk_tokens = 512", &ENGINE).unwrap_err().contains("unknown field `chunk_tokens`"));
}
