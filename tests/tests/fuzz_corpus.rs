//! The corpus of every fuzz target, each file and some neighbours of it: no panic, bounded memory and time. Presets and the
//! examples of engine descriptions are part of the corpora of their targets.
//!
//! `KVFERRY_FUZZ_ROUNDS` sets how many neighbours of each file are tried (default 40), `KVFERRY_FUZZ_SEED` which. An input that
//! fails is written to the directory of temporary files, and its path is told.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test whose corpus can't be read has failed"
)]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvferry_fuzz::mutate::{Rng, mutate};
use kvferry_fuzz::{Reached, TARGETS, Target};

mod counting;

/// The most memory that a longer input than is promised for may need at a time.
const MAX_BYTES: i64 = 256 << 20;
/// The longest that one input may take; far more than any does, as other work may be going on.
const MAX_TIME: Duration = Duration::from_secs(20);

fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut dirs = vec![here.join("data/fuzz").join(target.name)];
    match target.name {
        "config" => dirs.push(here.join("../crates/kvferry-models/presets")),
        "describe" => dirs.push(here.join("../crates/kvferry-models/examples")),
        "scenario" => dirs.extend(["../docs/guides", "../crates/kvferry-topology/presets"].map(|dir| here.join(dir))),
        "trace" => dirs.push(here.join("../crates/kvferry-topology/tests/data")),
        _ => {}
    }
    let mut files: Vec<PathBuf> = Vec::new();
    for dir in dirs {
        let before = files.len();
        let all = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path());
        // Pages about scenarios stand beside them.
        files.extend(all.filter(|path| path.extension().is_none_or(|kind| kind != "md" && kind != "svg")));
        assert!(files.len() > before, "{} is empty", dir.display());
    }
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// One input within its bounds; `what` tells which it is.
fn bounded(target: &Target, input: &[u8], what: &str) -> Reached {
    let kept = || {
        let path = std::env::temp_dir().join(format!("kvferry-fuzz-{}-{:08x}", target.name, sum(input)));
        std::fs::write(&path, input).map_or_else(|e| e.to_string(), |()| path.display().to_string())
    };
    let start = Instant::now();
    let most = Cell::new(0);
    let peak = |run: &dyn Fn() -> Reached| {
        let (reached, bytes) = counting::peak(run);
        most.set(bytes.max(most.get()));
        (reached, bytes)
    };
    let ran = catch_unwind(AssertUnwindSafe(|| target.bounded(input, peak)));
    let (peak, took) = (most.get(), start.elapsed());
    let Ok(reached) = ran else { panic!("{}: {what} breaks a promise; the input is {}", target.name, kept()) };
    assert!(peak <= MAX_BYTES, "{}: {what} needs {peak} bytes; the input is {}", target.name, kept());
    assert!(took <= MAX_TIME, "{}: {what} takes {took:?}; the input is {}", target.name, kept());
    reached
}

/// FNV-1a.
fn sum(input: &[u8]) -> u32 {
    input.iter().fold(0x811c_9dc5, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193))
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}

/// Runs a target's corpus and neighbours; the corpus must reach all of `expected`.
fn replay(name: &str, expected: &[&str]) {
    let target = TARGETS.iter().find(|t| t.name == name).unwrap();
    let corpus = corpus(target);
    let mut places: BTreeSet<String> = BTreeSet::new();
    for (path, input) in &corpus {
        places.extend(bounded(target, input, &path.display().to_string()).places().iter().cloned());
    }
    for place in expected {
        assert!(places.contains(*place), "{name}: no file of the corpus reaches {place:?}; it reaches {places:?}");
    }
    let (rounds, seed) = (setting("KVFERRY_FUZZ_ROUNDS", 40), setting("KVFERRY_FUZZ_SEED", 1));
    let mut rng = Rng::new(seed);
    for (path, input) in &corpus {
        for round in 0..rounds {
            let other = &corpus[rng.below(corpus.len())].1;
            let near = mutate(input, other, target.is_text, &mut rng);
            bounded(target, &near, &format!("neighbour {round} (seed {seed}) of {}", path.display()));
        }
    }
}

#[test]
fn configurations() {
    replay("config", &["model", "manifest", "Missing", "OutOfRange", "Syntax"]);
}

#[test]
fn engine_descriptions() {
    replay("describe", &["description", "manifest", "Manifest", "UnknownKey", "UnknownValue", "Contradiction"]);
}

#[test]
fn layouts() {
    let shapes = ["states", "compressed", "spans", "scratch rows", "kernel blocks", "chunks", "huge", "map"];
    let faults = ["Layout", "Uncovered", "BlockTokens", "GroupsOfItem", "MixedGroup", "Divides", "OutOfRange"];
    replay("layout", &[&shapes[..], &faults[..]].concat());
}

#[test]
fn requests() {
    let ways = ["staged at the source", "staged at the destination", "fewer descriptors", "states move", "full hit"];
    let faults = ["NotHeld", "NoRoom", "NoState", "BlockOutOfRange", "RepeatedBlock", "SharedBytes", "TooLong"];
    replay("request", &[&ways[..], &faults[..]].concat());
}

#[test]
fn frames() {
    replay(
        "wire",
        &[
            "kind 1", "kind 3", "kind 4", "kind 5", "kind 17", "kind 20", "kind 21", "kind 22", "kind 24", "kind 25",
            "kind 26", "kind 27", "kind 28", "kind 36", "kind 37", "kind 64", "kind 65", "kind 68", "kind 69",
            "kind 70", "kind 71", "kind 80", "kind 84", "kind 89", "kind 90", "kind 91", "kind 92", "kind 93",
            "kind 94", "kind 95", "kind 96", "Body", "Meaning", "Trailing", "TooLong",
        ],
    );
}

#[test]
fn parameters_and_references() {
    replay(
        "params",
        &[
            "no source",
            "lost",
            "params",
            "reference",
            "tcp",
            "unix",
            "memory",
            "Json",
            "WrongType",
            "ReferenceError",
            "AddressError",
        ],
    );
}

#[test]
fn links_with_a_shared_key() {
    replay(
        "secure",
        &[
            "server waits",
            "client waits",
            "key",
            "all arrived",
            "cut off",
            "handshake waits",
            "OtherKind",
            "UnknownKey",
            "WrongKey",
            "KeyLength",
            "WeakKey",
            "Custom",
        ],
    );
}

#[test]
fn settings() {
    replay("settings", &["settings", "Syntax", "Missing", "Invalid", "Contradiction"]);
}

#[test]
fn scenarios() {
    let faults = ["Form", "Value", "Cluster", "ClusterError", "Engine", "Load", "Mismatch", "Unreadable"];
    let places = [&["scenario", "cluster", "drawn"][..], &faults[..]].concat();
    replay("scenario", &places);
}

#[test]
fn traces() {
    replay("trace", &["trace", "prefix", "no prefix", "Conflict", "Json", "Missing", "Range", "Value"]);
}

#[test]
fn neighbours_are_repeatable_and_differ() {
    let near = |seed| mutate(b"{\"a\": 12, \"b\": [3]}", b"other", true, &mut Rng::new(seed));
    let all: BTreeSet<Vec<u8>> = (0..100).map(near).collect();
    assert!(all.len() > 80, "{} of 100", all.len());
    assert_eq!(near(5), near(5));
    assert!((0..100).all(|seed| mutate(b"", b"", false, &mut Rng::new(seed)).len() <= 16));
}
