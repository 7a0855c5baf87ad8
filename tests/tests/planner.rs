//! The planner against the oracle: random requests between random engines, every byte of memory compared.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;

use kvferry_geometry::manifest::ManifestError;
use kvferry_tests::{Case, cases, check_cases, sample};

#[test]
fn every_byte_of_the_destination_is_right() {
    check_cases("planner", cases(2400), |case: &Case| {
        case.check_placements()?;
        case.verify().map(|_| ())
    });
}

#[test]
fn drafts_that_leave_bytes_out_are_refused_for_exactly_those_items() {
    let mut refused = 0;
    for case in sample(11, 400) {
        for draft in &case.refused {
            refused += 1;
            let blocks = vec![2; draft.draft.groups.len()];
            let errors = draft.draft.build(&blocks).expect_err("bytes are missing").0;
            let mut named: Vec<String> = errors
                .iter()
                .map(|e| match e {
                    ManifestError::Uncovered { item, .. } => item.to_string(),
                    other => panic!("{other}"),
                })
                .collect();
            named.sort();
            named.dedup();
            let mut missing: Vec<String> = draft.missing.iter().map(|m| m.item.to_string()).collect();
            missing.sort();
            assert_eq!(named, missing, "{}", draft.draft.text);
        }
    }
    assert!(refused > 20, "only {refused} drafts were refused");
}

#[test]
fn random_cases_are_of_every_kind() {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for case in sample(7, 500) {
        for feature in case.features() {
            *counts.entry(feature).or_default() += 1;
        }
    }
    println!("of 500: {counts:#?}");
    let kinds = [
        "context parallel source",
        "context parallel destination",
        "context parallel on both sides",
        "interleaves differ",
        "many ranks to few",
        "few ranks to many",
        "neither rank count divides the other",
        "kernel blocks at the source",
        "kernel blocks at the destination",
        "pipeline stages on both sides",
        "one and several heads in one group",
        "several groups",
        "groups differ",
        "item order differs",
        "windows",
        "chunks",
        "block sizes differ, one divides",
        "block sizes differ, none divides",
        "hits",
        "frozen tails",
        "late tables",
        "groups share memory",
        "hand-made placements",
        "refused placements",
        "replicas at the source",
    ];
    for kind in kinds {
        assert!(counts.get(kind).is_some_and(|&n| n >= 10), "{kind}: {:?} of 500", counts.get(kind));
    }
}
