//! The demo as users run it, on small caches: the shapes it promises, and what it leaves behind when it is stopped.
#![allow(clippy::unwrap_used, reason = "a test whose process cannot be started has failed")]

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

fn demo(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("demo").args(args.split_whitespace());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Runs a shape and checks its last line; gives the summary.
fn proven(args: &str) -> serde_json::Value {
    let output = demo(&format!("{args} --requests 2 --json")).output().unwrap();
    assert!(output.status.success(), "{args}:\n{}", text(&output));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["wrong"], &summary["outside"]), (&0.into(), &0.into()), "{args}");
    let (moved, zeroed) = (summary["bytes"].as_u64().unwrap(), summary["zeroed"].as_u64().unwrap());
    assert_eq!(summary["verified"].as_u64().unwrap(), moved + zeroed, "{args}");
    assert!(moved > 0, "{args}");
    // Two rounds of two requests, each with a lease that was read and held to its end.
    assert_eq!(summary["leases"], serde_json::json!({"offered": 4, "ended": {"read": 4}}), "{args}");
    assert_eq!(summary["fences"], serde_json::json!({"held": 4, "stale": 0, "attempts": 4}), "{args}");
    assert!(summary["phases"]["read"].as_f64().is_some_and(|seconds| seconds > 0.0), "{args}");
    summary
}

/// The lanes that carried the pairs' bytes, each once.
fn lanes(summary: &serde_json::Value) -> BTreeSet<String> {
    let pairs = summary["pairs"].as_array().unwrap();
    let lanes = pairs.iter().flat_map(|p| p["lanes"].as_array().unwrap());
    lanes.map(|lane| lane.as_str().unwrap().to_lowercase()).collect()
}

/// Shapes, and the bytes that two requests move in each.
fn promised_shapes() -> Vec<(String, u64)> {
    let llama = "--layers 2 --tokens 200";
    let kv = 2 * 200 * 2 * 4096;
    vec![
        (llama.to_string(), kv),
        (format!("{llama} --decode tp=8"), kv),
        (format!("{llama} --prefill tp=6 --decode tp=4"), kv),
        (format!("{llama} --prefill tp=2,pp=2 --decode tp=1,pp=2"), kv),
        (format!("{llama} --prefill tp=2,pcp=2,pcp_mode=shard --decode tp=2"), kv),
        (format!("{llama} --prefill tp=2,pcp=2,pcp_mode=replicate --decode tp=2"), kv),
        (format!("{llama} --prefill-block 16 --decode-block 64"), kv),
        (format!("{llama} --prefill-block 48 --decode-block 32"), kv),
        (format!("{llama} --prefill-layout hnd --decode-layout nhd"), kv),
        (format!("{llama} --prefill-layout packed-rows --decode-layout planes"), kv),
        (format!("{llama} --prefix-hit 37"), kv / 200 * (200 - 37)),
        (format!("{llama} --prefill tp=2 --decode tp=4 --prefill-layout nhd --pool 8MiB --way source"), kv),
        // Four heads on eight ranks: each is held twice and read once.
        ("--model qwen3-235b-a22b --layers 2 --tokens 100 --prefill tp=8 --decode tp=4".into(), 2 * 100 * 2 * 2048),
        (
            "--model qwen3-235b-a22b --layers 2 --tokens 100 --prefill tp=8,dcp=2 --decode tp=2".into(),
            2 * 100 * 2 * 2048,
        ),
        // A latent is on every decode rank.
        ("--model deepseek-v3 --layers 2 --tokens 100 --prefill tp=4 --decode tp=2".into(), 2 * 2 * 100 * 2 * 1152),
        (
            "--model deepseek-v3 --layers 2 --tokens 100 --prefill tp=2,dcp=2 --decode tp=4".into(),
            4 * 2 * 100 * 2 * 1152,
        ),
        // Sliding windows of 1,024 in five of six layers; the sixth keeps all.
        (
            "--model gemma-3-27b-it --layers 6 --tokens 1500 --prefill tp=4 --decode tp=2".into(),
            2 * (5 * 1023 + 1500) * 8192,
        ),
    ]
}

/// Hybrids of three kinds: delta nets, Mamba 1 in some layers, Mamba 2 beside attention.
const HYBRIDS: [&str; 3] = [
    "--model qwen3-next-80b-a3b --layers 4 --tokens 200 --prefill tp=2,pp=2 --decode tp=4",
    "--model jamba-v0.1 --layers 5 --tokens 200 --prefill tp=4 --decode tp=2 --prefix-hit 200",
    "--model falcon-h1-0.5b --layers 2 --tokens 200 --prefill tp=2 --decode tp=1",
];

#[test]
fn every_promised_shape_is_proven() {
    for (args, bytes) in promised_shapes() {
        let summary = proven(&args);
        assert_eq!(summary["bytes"].as_u64(), Some(bytes), "{args}");
        assert!(lanes(&summary).iter().all(|l| l.contains("shm")), "{args}: {:?}", lanes(&summary));
    }
    let summary = proven("--layers 2 --tokens 200 --transport mem");
    assert!(lanes(&summary).iter().all(|l| l.contains("in-process")), "{:?}", lanes(&summary));
}

/// Hybrids and pipelines on both sides among them.
#[test]
fn every_promised_shape_is_pushed() {
    for (args, bytes) in promised_shapes() {
        let summary = proven(&format!("{args} --mode push"));
        assert_eq!((&summary["mode"], summary["bytes"].as_u64()), (&"push".into(), Some(bytes)), "{args}");
        assert!(summary["phases"]["write"].as_f64().is_some_and(|seconds| seconds > 0.0), "{args}");
    }
    for args in HYBRIDS {
        proven(&format!("{args} --mode push"));
    }
}

/// Each layer is written when it is computed, and no earlier: the memory holds other bytes until then.
#[test]
fn layers_are_written_while_others_are_computed() {
    let file = std::env::temp_dir().join(format!("kvferry-demo-{}.svg", std::process::id()));
    for (shape, layers) in [
        ("--layers 6 --tokens 400 --prefill tp=2 --decode tp=1", 6u32),
        ("--layers 4 --tokens 200 --prefill tp=2,pp=2 --decode tp=2,pp=2 --transport mem", 4),
        (HYBRIDS[0], 4),
        ("--model deepseek-v3 --layers 3 --tokens 100 --prefill tp=2,dcp=2 --decode tp=2", 3),
    ] {
        let args =
            format!("{shape} --mode push --stream layers --layer-ms 8 --requests 2 --json --svg {}", file.display());
        let output = demo(&args).output().unwrap();
        assert!(output.status.success(), "{args}:\n{}", text(&output));
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&summary["wrong"], &summary["outside"]), (&0.into(), &0.into()), "{args}");
        let (moved, zeroed) = (summary["bytes"].as_u64().unwrap(), summary["zeroed"].as_u64().unwrap());
        assert_eq!(summary["verified"].as_u64().unwrap(), moved + zeroed, "{args}");
        // Computed, by the model, alone.
        assert_eq!(summary["leases"], serde_json::json!({"offered": 6, "ended": {"read": 6}}), "{args}");
        let stream = &summary["stream"];
        let lines = stream["lines"].as_array().unwrap();
        assert_eq!((stream["layers"].as_u64(), lines.len()), (Some(u64::from(layers)), layers as usize), "{args}");
        let prefill = stream["prefill_seconds"].as_f64().unwrap();
        assert!(prefill >= 0.008 * f64::from(layers), "{stream:#}");
        // One request's.
        let bytes: u64 = lines.iter().map(|l| l["bytes"].as_u64().unwrap()).sum();
        assert_eq!(bytes * 2, moved, "{stream:#}");
        // What was written was computed before.
        for line in lines.iter().filter(|l| !l["written"].is_null()) {
            assert!(line["written"][0].as_f64() >= line["computed"][1].as_f64(), "{stream:#}");
        }
        let plot = std::fs::read_to_string(&file).unwrap();
        assert!(plot.starts_with("<svg ") && plot.trim_end().ends_with("</svg>"), "{plot}");
        assert_eq!(plot.matches("computed").count(), layers as usize, "{plot}");
    }
    std::fs::remove_file(file).unwrap();
}

/// Another seed each time; what fails says it.
#[test]
fn ranks_that_are_killed_fail_their_requests_once_and_all_are_delivered() {
    for shape in [
        "--prefill tp=4 --decode tp=2",
        "--prefill tp=2 --decode tp=4",
        "--prefill tp=4 --decode tp=2 --mode push",
        "--prefill tp=2 --decode tp=4 --mode push --stream layers",
    ] {
        let args = format!("--chaos --layers 2 --tokens 200 {shape} --json");
        let output = demo(&args).output().unwrap();
        assert!(output.status.success(), "{args}:\n{}", text(&output));
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        assert_eq!((number(&summary["wrong"]), number(&summary["outside"])), (0, 0), "{summary:#}");
        let kv = 16 * 200 * 2 * 4096;
        assert_eq!((number(&summary["bytes"]), number(&summary["fences"]["held"])), (kv, 16), "{summary:#}");
        assert_eq!(number(&summary["verified"]), kv + number(&summary["zeroed"]), "{summary:#}");
        let chaos = &summary["chaos"];
        let (repeated, untouched) = (number(&chaos["repeated"]), number(&chaos["untouched"]));
        assert!(repeated > 0 && repeated + untouched == 16, "{summary:#}");
        let failed_by =
            |kill: &serde_json::Value| kill["failed"].as_object().unwrap().values().map(number).sum::<u64>();
        let failed: Vec<u64> = chaos["kills"].as_array().unwrap().iter().map(failed_by).collect();
        assert!(failed.len() == 2 && failed.iter().sum::<u64>() > 0, "{summary:#}");
        // Whatever was offered has ended, and what was not delivered has failed.
        let leases = &summary["leases"];
        let ended: u64 = leases["ended"].as_object().unwrap().values().map(number).sum();
        assert_eq!(number(&leases["offered"]), ended, "{summary:#}");
        assert!(ended >= 16 + failed.iter().sum::<u64>(), "{summary:#}");
    }
}

/// Why `backend` can't be tested here, if so.
fn missing(backend: &str) -> Option<String> {
    let built = match backend {
        "ucx" => cfg!(feature = "ucx"),
        _ => cfg!(feature = "nixl"),
    };
    if !built {
        return Some(format!("xtask is built without its feature {backend}"));
    }
    #[cfg(feature = "nixl")]
    if backend == "nixl" {
        return kvferry_nixl::available().err().map(|e| e.to_string());
    }
    None
}

/// Every promised shape and three hybrids, with ranks that have nothing else to move bytes with.
fn proven_over(backend: &str) {
    if let Some(why) = missing(backend) {
        return kvferry_tests::skip(backend, &why);
    }
    let shapes = promised_shapes().into_iter().map(|(args, bytes)| (args, Some(bytes)));
    let pushed = ["", " --mode push"];
    let both = |(args, bytes): (String, _)| pushed.map(|mode| (format!("{args}{mode}"), bytes));
    for (args, bytes) in shapes.chain(HYBRIDS.map(|args| (args.to_owned(), None))).flat_map(both) {
        let args = format!("{args} --transport {backend}");
        let summary = proven(&args);
        assert!(bytes.is_none_or(|b| summary["bytes"].as_u64() == Some(b)), "{args}: {}", summary["bytes"]);
        let lanes = lanes(&summary);
        assert!(lanes.iter().all(|l| l.contains(words_of(backend)) && !l.starts_with("unknown")), "{args}: {lanes:?}");
    }
}

/// What lanes of a backend are told with.
fn words_of(backend: &str) -> &str {
    if backend == "ucx" { "rail 0: transfers by" } else { backend }
}

#[test]
fn ucx_moves_every_promised_shape() {
    proven_over("ucx");
}

#[test]
fn nixl_moves_every_promised_shape() {
    proven_over("nixl");
}

/// The first of the reader's that the other has too, whichever of them has more.
#[test]
fn ranks_with_different_backends_meet_over_what_both_have() {
    let mut cases = vec![("shm", "shm", "shm")];
    match missing("ucx") {
        Some(why) => return kvferry_tests::skip("ucx", &why),
        None => cases.extend([("ucx,shm", "shm", "shm"), ("ucx", "shm,ucx", "ucx"), ("shm,ucx", "ucx,shm", "ucx")]),
    }
    match missing("nixl") {
        Some(why) => kvferry_tests::skip("nixl", &why),
        None => {
            cases.extend([("ucx", "nixl,ucx", "ucx"), ("ucx,nixl", "nixl,ucx", "nixl"), ("nixl,ucx", "ucx", "ucx")])
        }
    }
    for (prefill, decode, taken) in cases {
        let args = format!("--layers 2 --tokens 200 --prefill-transport {prefill} --decode-transport {decode}");
        let lanes = lanes(&proven(&args));
        assert!(lanes.iter().all(|l| l.contains(words_of(taken))), "{args}: {lanes:?}");
    }
}

#[test]
fn what_cannot_work_is_refused_before_anything_starts() {
    for (args, expected) in [
        ("--prefill tp=2,dcp=2 --decode tp=2", "no rank holds heads or units [0, 4) of tokens [1, 2)"),
        ("--tokens 1000000 --requests 1000", "of memory, and the machine has"),
        ("--prefix-hit 3000", "--prefix-hit 3000 is more than --tokens 2048"),
        (
            "--prefill tp=2 --decode tp=4 --layers 2 --kv-dtype fp8_e4m3 --scales per-block=16",
            "has one value for all heads of a rank, which can't be re-sharded",
        ),
        ("--model no-such-model", "no-such-model"),
        ("--prefill tp=0", "tp"),
        ("--transport tcp", "the transports are shm, mem, ucx and nixl"),
        ("--stream layers", "--stream needs --mode push"),
        ("--mode push --svg x.svg", "--stream"),
        ("--mode push --stream layers --layer-ms 0", "a layer takes"),
        ("--chaos --transport mem", "all ranks are threads of this one"),
        ("--kills 3", "--chaos"),
        ("--prefill-transport shm --decode-transport ucx", "prefill ranks have shm and decode ranks ucx"),
    ] {
        let output = demo(args).output().unwrap();
        assert!(!output.status.success() && text(&output).contains(expected), "{args}:\n{}", text(&output));
        assert!(!text(&output).contains("filling caches"), "{args}");
    }
}

/// A full hit moves nothing, and says so.
#[test]
fn a_full_hit_moves_nothing() {
    let output = demo("--layers 2 --tokens 100 --prefix-hit 100 --requests 1").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("verified 0 bytes on 2 ranks, 0 wrong, 0 touched outside"), "{}", text(&output));
}

/// Starts a demo that is large enough to be met in the middle, waits until its ranks have joined, and gives their pids.
fn started() -> (Child, Vec<Pid>, BufReader<std::process::ChildStdout>) {
    let mut child = demo("--layers 8 --requests 8").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("all ranks ready") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "the demo ended before its ranks were ready");
    }
    let ranks = children(child.id());
    assert_eq!(ranks.len(), 10, "a process for each rank");
    (child, ranks, out)
}

fn children(parent: u32) -> Vec<Pid> {
    let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    let mut all: Vec<i32> = list.split_whitespace().map(|p| p.parse().unwrap()).collect();
    // Ranks may have been started by any of its threads.
    for task in std::fs::read_dir(format!("/proc/{parent}/task")).unwrap().flatten() {
        let list = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        all.extend(list.split_whitespace().map(|p| p.parse::<i32>().unwrap()));
    }
    all.sort_unstable();
    all.dedup();
    all.into_iter().filter_map(Pid::from_raw).collect()
}

fn all_gone(ranks: &[Pid]) {
    let start = Instant::now();
    let alive = |pid: &Pid| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
        // A zombie that its parent has yet to reap has no memory any more.
        !stat.is_empty() && !stat.rsplit(") ").next().unwrap_or_default().starts_with('Z')
    };
    while ranks.iter().any(alive) {
        assert!(start.elapsed() < Duration::from_secs(20), "ranks were left behind");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_killed_rank_fails_the_demo_and_leaves_nothing() {
    let (mut child, ranks, _out) = started();
    kill_process(ranks[3], Signal::KILL).unwrap();
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(errors.contains("error:") && !errors.contains("panicked"), "{errors}");
    all_gone(&ranks);
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let (mut child, ranks, _out) = started();
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert!(!child.wait().unwrap().success());
        all_gone(&ranks);
    }
    let left: Vec<_> = std::fs::read_dir("/dev/shm").map(|d| d.flatten().collect()).unwrap_or_default();
    assert!(!left.iter().any(|f: &std::fs::DirEntry| f.file_name().to_string_lossy().contains("kvferry")), "{left:?}");
}
