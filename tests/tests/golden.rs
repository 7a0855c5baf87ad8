//! Recorded transfers against our plans: every scenario comes out as it must, and a record that is changed does not.
#![allow(clippy::expect_used, reason = "a test without its data has failed")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvferry_golden::judge::{MAY_REFUSE, Outcome, SAME_RELATION, judge};
use kvferry_golden::read::read;
use kvferry_golden::run::{Judged, run};
use kvferry_golden::schema::{Record, Verdict};

fn data(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/golden").join(file)
}

/// All scenarios of a file, and how many came out how.
fn judged(file: &str) -> (Vec<Judged>, BTreeMap<&'static str, usize>) {
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(8);
    let mut all = Vec::new();
    let count = run(&data(file), threads, &mut |one| all.push(one)).expect("the file can be read");
    assert_eq!(count, all.len() as u64);
    let failed: Vec<_> = all.iter().filter(|j| !j.passed()).map(|j| format!("{}: {:?}", j.name, j.outcome)).collect();
    assert!(failed.is_empty(), "{} of {count} failed:\n{}", failed.len(), failed.join("\n"));
    let mut kinds = BTreeMap::new();
    for one in &all {
        *kinds.entry(word(&one.outcome)).or_default() += 1;
    }
    (all, kinds)
}

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Same { .. } => "same",
        Outcome::Right { .. } => "right",
        Outcome::Supported { .. } => "supported",
        Outcome::Refused { .. } => "refused",
        Outcome::Wire { .. } => "wire",
        Outcome::Failed { .. } => "failed",
    }
}

#[test]
fn every_named_scenario_comes_out_as_it_must() {
    let (all, kinds) = judged("named.jsonl.gz");
    assert_eq!(kinds, BTreeMap::from([("same", 94), ("right", 2), ("supported", 33), ("refused", 8), ("wire", 4)]));
    // Both refuse what can't be done, and each of those refusals is one that is expected.
    for one in all.iter().filter(|j| matches!(j.outcome, Outcome::Refused { .. })) {
        assert!(one.slugs.iter().all(|s| MAY_REFUSE.iter().any(|m| m.slug == s)), "{}", one.name);
    }
    // No refusal is listed that is never met.
    for may in MAY_REFUSE {
        let met = |j: &&Judged| j.slugs.iter().any(|s| s == may.slug) && matches!(j.outcome, Outcome::Refused { .. });
        assert!(all.iter().any(|j| met(&j)), "{} is in the table for nothing", may.slug);
    }
    // The oracle fills all but the caches of a whole large model.
    let unproven: Vec<_> =
        all.iter().filter(|j| matches!(j.outcome, Outcome::Same { proven: false, .. })).map(|j| &j.name[..]).collect();
    assert_eq!(unproven, ["pull_real_dsv3_tp8_tp4"]);
    // One record is listed as wrong for what its ranks share by design, which our manifest says of them.
    for one in &all {
        if let Outcome::Right { recorded, .. } = &one.outcome {
            assert_eq!(recorded == SAME_RELATION, one.name == "pull_hisparse_tp2_shared_pool", "{}", one.name);
        }
    }
    // Something moves wherever the record moves something.
    let moved = |j: &Judged| matches!(j.outcome, Outcome::Same { tally, .. } if tally.equal > 0);
    assert!(all.iter().filter(|j| moved(j)).count() > 80);
}

#[test]
fn every_random_scenario_comes_out_as_it_must() {
    let (all, kinds) = judged("random.jsonl.gz");
    assert_eq!(kinds, BTreeMap::from([("same", 463), ("right", 13), ("supported", 124)]));
    // Where the record is known to be wrong, the difference is seen and not taken for luck.
    for one in &all {
        if let Outcome::Right { recorded, .. } = &one.outcome {
            assert!(recorded.contains("bytes"), "{}: {recorded}", one.name);
        }
        if let Outcome::Supported { bytes, .. } | Outcome::Right { bytes, .. } = &one.outcome {
            assert!(*bytes > 0, "{}: the oracle proved nothing", one.name);
        }
    }
}

fn records(names: &[&str]) -> Vec<Record> {
    let mut out = Vec::new();
    read(&data("named.jsonl.gz"), &mut |r| {
        if names.contains(&r.name.as_str()) {
            out.push(r);
        }
    })
    .expect("the file can be read");
    assert_eq!(out.len(), names.len());
    out
}

const CHANGED: [&str; 8] = [
    "pull_gqa_tp2_tp8",
    "push_gqa_tp4_tp2",
    "pull_mamba2_tp4_tp2",
    "pull_kda_tp2_tp1",
    "pull_bsr4_gqa_tp2_tp2",
    "pull_dcp_p4_d2",
    "push_blhnc_mla_tp1_tp2",
    "push_pp2_swa6_tp2_tp2",
];

/// Changes one batch of each record; the comparison must see it.
fn changes_are_seen(change: impl Fn(&mut kvferry_golden::schema::Xfer)) {
    for mut record in records(&CHANGED) {
        assert!(matches!(judge(&record, false), Outcome::Same { .. }), "{}", record.name);
        let xfer = record.transfers.iter_mut().flat_map(|t| &mut t.xfers).next().expect("a batch");
        xfer.pairs_sha256 = None;
        change(xfer);
        let outcome = judge(&record, false);
        let seen = |why: &str| !why.contains("cannot be read") && !why.contains("refuses");
        assert!(matches!(&outcome, Outcome::Failed { why } if seen(why)), "{}: {outcome:?}", record.name);
    }
}

#[test]
fn a_descriptor_that_is_left_out_is_missed() {
    changes_are_seen(|x| {
        x.local_ids.pop();
        x.remote_ids.pop();
    });
}

#[test]
fn two_blocks_that_are_swapped_are_seen() {
    changes_are_seen(|x| x.remote_ids.swap(0, 1));
}

#[test]
fn a_descriptor_too_many_is_seen() {
    changes_are_seen(|x| {
        // The same source once more, to a block of no request: id 0 is nobody's.
        x.local_ids.push(0);
        x.remote_ids.push(0);
    });
}

#[test]
fn the_digest_of_the_pairs_is_checked() {
    for mut record in records(&CHANGED) {
        let xfer = record.transfers.iter_mut().flat_map(|t| &mut t.xfers).next().expect("a batch");
        xfer.remote_ids.swap(0, 1);
        let Outcome::Failed { why } = judge(&record, false) else { panic!("{}: not seen", record.name) };
        assert!(why.contains("their digest"), "{why}");
    }
}

#[test]
fn a_layout_that_is_changed_is_seen() {
    for mut record in records(&CHANGED) {
        for rank in &mut record.sides.decode.ranks {
            for view in rank.layer_views.values_mut() {
                // Every page starts where the next block's was.
                view.addr += view.strides_bytes[0];
                view.shape[0] -= view.shape[0] / 2;
            }
        }
        let outcome = judge(&record, false);
        assert!(matches!(outcome, Outcome::Failed { .. }), "{}: {outcome:?}", record.name);
    }
}

#[test]
fn a_refusal_of_what_we_should_support_is_a_failure() {
    // A pair that really can't talk, under the name of a refusal that says nothing of that.
    for mut record in records(&["reject_mla_len"]) {
        record.failures.truncate(1);
        record.failures[0].slug = "tp_not_divisible".to_owned();
        let Outcome::Failed { why } = judge(&record, false) else { panic!("a silent pass") };
        assert!(why.contains("kvferry refuses it too"), "{why}");
        record.verdict = Verdict::Accept;
        assert!(matches!(judge(&record, false), Outcome::Failed { .. }));
    }
}
