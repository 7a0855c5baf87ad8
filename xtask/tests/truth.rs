//! The simulator against what it simulates: the same engines and requests in `cargo xtask sim` and as processes in `cargo xtask demo`.
//!
//! Bytes and descriptors of every pair of ranks must be equal. Times are those of a machine that does other things besides; they are
//! printed (`--nocapture`) beside what the simulator says after a preflight of the same transport, and nothing is asserted of them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test whose process cannot be started has failed")]
#![allow(clippy::print_stdout, reason = "times are told, not judged")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Requests of each case, one after the other.
const REQUESTS: u64 = 2;

/// Two engines and a prompt.
#[derive(Clone, Copy)]
struct Case {
    model: &'static str,
    layers: u32,
    tokens: u64,
    /// Tokens of it that the decode engine has already.
    hit: u64,
    shapes: (&'static str, &'static str),
    blocks: (u32, u32),
    layouts: (&'static str, &'static str),
    /// Whether several ranks hold the same bytes: which of them is read is chosen anew for each request.
    replicas: bool,
}

const LLAMA: Case = Case {
    model: "llama-3.1-8b",
    layers: 4,
    tokens: 1000,
    hit: 0,
    shapes: ("tp=4", "tp=2"),
    blocks: (16, 16),
    layouts: ("hnd", "hnd"),
    replicas: false,
};
/// A latent is the same on all ranks of tensor parallelism.
const LATENT: Case = Case { model: "deepseek-v3", layers: 3, tokens: 500, shapes: ("tp=1", "tp=2"), ..LLAMA };
/// States and a latent.
const KIMI: Case = Case { model: "kimi-linear-48b-a3b", tokens: 1008, shapes: ("tp=1,pp=2", "tp=4"), ..LLAMA };

const CASES: &[Case] = &[
    LLAMA,
    Case { shapes: ("tp=2", "tp=8"), ..LLAMA },
    // Neither divides the other.
    Case { shapes: ("tp=6", "tp=4"), ..LLAMA },
    Case { shapes: ("tp=2,pp=2", "tp=1"), ..LLAMA },
    Case { shapes: ("tp=2,pcp=2,pcp_mode=shard", "tp=2"), ..LLAMA },
    Case { blocks: (16, 64), shapes: ("tp=2", "tp=2"), ..LLAMA },
    Case { blocks: (48, 32), ..LLAMA },
    Case { layouts: ("hnd", "nhd"), tokens: 200, ..LLAMA },
    Case { layouts: ("packed-rows", "planes"), ..LLAMA },
    Case { hit: 37, ..LLAMA },
    // One holds it, both get it.
    LATENT,
    // Each token's is on one rank.
    Case { shapes: ("tp=2,dcp=2", "tp=4"), ..LATENT },
    Case { shapes: ("tp=4", "tp=2"), replicas: true, ..LATENT },
    KIMI,
    // The last, partial block of one item touches the next item: two ranges that go as one.
    Case { tokens: 1000, ..KIMI },
    Case { model: "qwen3-next-80b-a3b", tokens: 208, shapes: ("tp=2,pp=2", "tp=4"), ..LLAMA },
    // Windows of 1,024 in five of six layers.
    Case { model: "gemma-3-27b-it", layers: 6, tokens: 1500, ..LLAMA },
    // Several slices, each of whole runs.
    Case { layers: 16, tokens: 2048, shapes: ("tp=1", "tp=1"), ..LLAMA },
];

/// Runs a command of this program that prints one JSON object.
fn json(args: &[&str], dir: &Path) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).args(args).current_dir(dir).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {}\n{said}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}\n{said}"))
}

/// Bytes and descriptors of each pair of ranks, by (source, destination).
type Pairs = BTreeMap<(u64, u64), (u64, u64)>;

impl Case {
    fn name(&self) -> String {
        let Self { model, layers, tokens, hit, shapes: (p, d), blocks, layouts, .. } = self;
        let mut out = format!("{model}, {layers} layers, {tokens} tokens, {p} -> {d}");
        if blocks.0 != blocks.1 {
            let _ = write!(out, ", blocks of {} -> {}", blocks.0, blocks.1);
        }
        if layouts.0 != layouts.1 {
            let _ = write!(out, ", {} -> {}", layouts.0, layouts.1);
        }
        if *hit > 0 {
            let _ = write!(out, ", {hit} there");
        }
        out
    }

    /// Engines as processes: what they moved, and how long a request took on the wire and from offer to delivery.
    fn real(&self, transport: &str, mode: &str, dir: &Path) -> (Pairs, [f64; 2]) {
        let Self { model, layers, tokens, hit, shapes, blocks, layouts, .. } = self;
        let line = format!(
            "demo --json --contiguous --checkpoints 0 --concurrency 1 --requests {REQUESTS} --transport {transport} --mode {mode} \
             --model {model} --layers {layers} --tokens {tokens} --prefix-hit {hit} --prefill {} --decode {} \
             --prefill-block {} --decode-block {} --prefill-layout {} --decode-layout {}",
            shapes.0, shapes.1, blocks.0, blocks.1, layouts.0, layouts.1
        );
        let summary = json(&line.split_whitespace().collect::<Vec<_>>(), dir);
        assert_eq!((&summary["wrong"], &summary["outside"]), (&0.into(), &0.into()), "{line}: {summary:#}");
        let rank = |label: &Value| label.as_str().unwrap().split(' ').nth(1).unwrap().parse::<u64>().unwrap();
        let pair = |p: &Value| {
            let moved = (p["bytes"].as_u64().unwrap(), p["descriptors_after"].as_u64().unwrap());
            ((rank(&p["src"]), rank(&p["dst"])), moved)
        };
        let phases = &summary["fenced_phases"];
        let [write, read, queue] = ["write", "read", "queue"].map(|name| phases[name].as_f64().unwrap());
        let round = summary["fenced"]["seconds"].as_f64().unwrap();
        let times = [write + read - queue, round / f64::from(u32::try_from(REQUESTS).unwrap())];
        (summary["pairs"].as_array().unwrap().iter().map(pair).collect(), times)
    }

    /// The same for the simulator, by events and by the closed form, on a machine that was measured by a preflight.
    fn simulated(&self, mode: &str, dir: &Path) -> [(Pairs, [f64; 2]); 2] {
        let Self { model, layers, tokens, hit, shapes, blocks, layouts, .. } = self;
        // So far apart that each finds an engine with nothing else to do.
        let line = |i: u64| format!("{},{tokens},1,{hit}\n", i * 10);
        let lines: String = (0..REQUESTS).map(line).collect();
        std::fs::write(dir.join("requests.csv"), format!("at_s,prompt,output,decode_hit\n{lines}")).unwrap();
        let side = |shape: &str, block: u32, layout: &str| {
            let sizes: Vec<String> = shape.split(',').map(|size| size.replace("=shard", "=\"shard\"")).collect();
            let engine = format!("{{ model = \"{model}\", blocks = 200, parallel = {{ {} }} }}", sizes.join(", "));
            format!("engine = {engine}\nlayers = {layers}\nblock_size = {block}\nlayout = \"{layout}\"")
        };
        let text = format!(
            r#"
            cluster = {{ preset = "local", calibration = "preflight.json" }}
            [prefill]
            {}
            time = {{ tokens_per_s = 100000 }}
            [decode]
            {}
            time = {{ ms_per_token = 1 }}
            [load]
            trace = "requests.csv"
            [transfer]
            mode = "{mode}"
            routing_ms = 0
            "#,
            side(shapes.0, blocks.0, layouts.0),
            side(shapes.1, blocks.1, layouts.1),
        );
        std::fs::write(dir.join("scenario.toml"), text).unwrap();
        [&["sim", "scenario.toml", "--json"][..], &["sim", "scenario.toml", "--json", "--analytic"]].map(|args| {
            let answer = json(args, dir);
            let delivered = answer["requests"]["delivered"].as_u64();
            assert_eq!(delivered, Some(REQUESTS), "{}: {:#}", self.name(), answer["requests"]);
            let number = |p: &Value, key: &str| p[key].as_u64().unwrap();
            let pair = |p: &Value| {
                let ranks = (p["source"][1].as_u64().unwrap(), p["destination"][1].as_u64().unwrap());
                (ranks, (number(p, "bytes"), number(p, "descriptors")))
            };
            let pairs = answer["traffic"]["pairs"].as_array().unwrap().iter().map(pair).collect();
            let times = answer["times"].as_array().unwrap();
            let time = |name: &str| times.iter().find(|t| t["name"] == name).unwrap()["p50"].as_f64().unwrap();
            (pairs, ["wire", "handover"].map(time))
        })
    }
}

/// Sums by destination.
fn by_destination(pairs: &Pairs) -> Pairs {
    let mut out = Pairs::new();
    for ((_, dst), (bytes, descriptors)) in pairs {
        let sum = out.entry((0, *dst)).or_default();
        *sum = (sum.0 + bytes, sum.1 + descriptors);
    }
    out
}

/// Every case, in these modes one after the other.
fn told_truly(transport: &str, modes: &[&[&str]]) {
    let dir = tempfile::tempdir().unwrap();
    let found = json(&["preflight", "--transport", transport, "--json"], dir.path());
    std::fs::write(dir.path().join("preflight.json"), found.to_string()).unwrap();
    println!("{transport}: {}", found["transports"][0]["measured"]);
    for (case, modes) in CASES.iter().zip(modes.iter().cycle()) {
        for mode in *modes {
            let what = format!("{transport} {mode}: {}", case.name());
            let (moved, measured) = case.real(transport, mode, dir.path());
            let [events, closed] = case.simulated(mode, dir.path());
            for (said, engine) in [(&events.0, "events"), (&closed.0, "analytic")] {
                if case.replicas {
                    assert_eq!(by_destination(said), by_destination(&moved), "{what}, {engine}");
                } else {
                    assert_eq!(*said, moved, "{what}, {engine}");
                }
            }
            assert!(!moved.is_empty() && moved.values().all(|m| m.0 > 0 && m.1 > 0), "{what}: {moved:?}");
            let sum = moved.values().fold((0, 0), |sum, m| (sum.0 + m.0, sum.1 + m.1));
            let ms = |i: usize| {
                let (is, by_events, by_form) = (measured[i], events.1[i], closed.1[i]);
                let factor = by_events / is;
                format!("{:.3} | {:.3} | {:.3} | {factor:.2}", is * 1e3, by_events * 1e3, by_form * 1e3)
            };
            let (bytes, descriptors) = (sum.0 / REQUESTS, sum.1 / REQUESTS);
            println!("| {what} | {} | {bytes} | {descriptors} | {} | {} |", moved.len(), ms(0), ms(1));
        }
    }
}

// One test for each mode: they take the longest of all, and run beside each other.
#[test]
fn processes_that_read_over_shared_memory_move_what_the_simulator_says() {
    told_truly("shm", &[&["pull"]]);
}

#[test]
fn processes_that_write_over_shared_memory_move_what_the_simulator_says() {
    told_truly("shm", &[&["push"]]);
}

#[test]
fn processes_over_ucx_move_what_the_simulator_says() {
    if !cfg!(feature = "ucx") {
        return kvferry_tests::skip("ucx", "xtask is built without its feature ucx");
    }
    told_truly("ucx", &[&["pull"], &["push"]]);
}
