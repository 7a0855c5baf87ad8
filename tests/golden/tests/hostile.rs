//! Records with any number changed to any other: an outcome or an error, never a panic, never without end.
#![allow(clippy::unwrap_used, reason = "a test without its data has failed")]

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use kvferry_golden::judge::{Outcome, judge};
use kvferry_golden::schema::Record;
use serde_json::Value;

/// Records of every kind, small ones first.
fn records(at_most: usize) -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/golden/named.jsonl.gz");
    let lines = BufReader::new(GzDecoder::new(File::open(path).unwrap())).lines();
    let mut lines: Vec<String> = lines.map(|l| l.unwrap()).collect();
    lines.sort_by_key(String::len);
    lines.iter().take(at_most).map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// Numbers of a value in order; what is only said of the engines' names and the like is text and left alone.
fn numbers<'v>(value: &'v mut Value, out: &mut Vec<&'v mut Value>) {
    match value {
        Value::Number(_) => out.push(value),
        Value::Array(list) => list.iter_mut().for_each(|v| numbers(v, out)),
        Value::Object(map) => map.values_mut().for_each(|v| numbers(v, out)),
        _ => {}
    }
}

/// A number below `below`.
fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*state >> 33).unwrap_or(0) % below
}

#[test]
fn any_number_may_be_any_other() {
    let extremes = [0, 1, 2, 3, 7, 16, 17, 1 << 16, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 48, u64::MAX / 2, u64::MAX];
    let seed = std::env::var("KVFERRY_SEED").ok().and_then(|s| s.trim().parse().ok()).unwrap_or(2026);
    let (mut state, mut judged, mut failed) = (seed, 0u32, 0u32);
    let start = Instant::now();
    for record in records(100) {
        for _ in 0..12 {
            let mut changed = record.clone();
            let mut all = Vec::new();
            numbers(&mut changed, &mut all);
            let mut changes = Vec::new();
            for _ in 0..=random(&mut state, 3) {
                let (at, to) = (random(&mut state, all.len()), random(&mut state, extremes.len()));
                changes.push((at, extremes[to]));
                *all[at] = extremes[to].into();
            }
            let Ok(record) = serde_json::from_value::<Record>(changed) else { continue };
            let wrong = random(&mut state, 2) == 0;
            let outcome = catch_unwind(AssertUnwindSafe(|| judge(&record, wrong)));
            let outcome = outcome.unwrap_or_else(|_| panic!("seed {seed}: {}, numbers {changes:?}", record.name));
            judged += 1;
            failed += u32::from(matches!(outcome, Outcome::Failed { .. }));
        }
    }
    assert!(judged > 700 && failed > judged / 4, "{failed} of {judged} failed");
    assert!(start.elapsed() < Duration::from_secs(300), "{:?}", start.elapsed());
}
