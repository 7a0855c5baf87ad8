//! The planner against the oracle: random requests between random engines, every byte of memory compared.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;

use kvferry_geometry::manifest::{Manifest, ManifestError};
use kvferry_geometry::placement::TokenClass;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_oracle::dealt;
use kvferry_tests::{Case, cases, check_cases, sample};

#[test]
fn every_byte_of_the_destination_is_right() {
    check_cases("planner", cases(3000), |case: &Case| {
        case.check_placements()?;
        case.verify().map(|_| ())
    });
}

/// All ways in which a plan can be made occur, so that all of them are held to the oracle.
#[test]
fn random_plans_are_of_every_kind() {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for case in sample(8, 400) {
        let plan = case.plan().unwrap();
        for (src, dst, batch) in &plan.batches {
            let pair = PairPlan::new(&plan.compatible, &plan.peers, *src, *dst).unwrap();
            let mut note = |name, yes| *counts.entry(name).or_default() += u32::from(yes);
            for class in pair.classes() {
                let moved = plan.bound.moves().iter().find(|m| (m.src_group, m.dst_group) == class.groups()).unwrap();
                let (start, end) = (moved.range.start().get(), moved.range.end().get());
                let whole = |p: Tokens| start.div_ceil(p.get()) < end / p.get();
                note("no period", class.period().is_none());
                note("whole periods", class.period().is_some_and(whole));
                note("whole periods of several phases", class.period().is_some_and(whole) && class.phases().len() > 1);
                note("loops over tokens", class.phases().any(|p| !p.loops.is_empty()));
                note("two loops over tokens", class.phases().any(|p| p.loops.len() == 2));
                note("classes of several items", class.items().len() > 1);
            }
            let parts = || batch.sections().iter().flat_map(|s| &s.parts);
            note("runs of pairs", parts().any(|p| p.pairs.iter().any(|r| r.count > 1)));
            note("runs of pairs by steps", parts().any(|p| p.src_step > 1 && p.pairs.iter().any(|r| r.count > 1)));
            note("three loops", parts().any(|p| p.nest.dims.len() >= 3));
            note("several sources", plan.peers.sources_of(*dst).count() > 1);
        }
    }
    println!("{counts:#?}");
    assert!(counts.values().all(|&n| n >= 10), "{counts:#?}");
}

/// Who reads from whom is told as named sets, the same on both engines, and nobody else exchanges a byte.
#[test]
fn peers_are_named_sets() {
    for case in sample(9, 300) {
        let plan = case.plan().unwrap();
        let again = case.plan().unwrap();
        assert_eq!(plan.peers.digest(), again.peers.digest());
        let named: Vec<(RankId, RankId)> = plan.peers.pairs().iter().map(|p| (p.dst(), p.src())).collect();
        assert!(named.is_sorted() && named.windows(2).all(|w| w[0] != w[1]));
        let ranks = |m: &Manifest| (0u32..).map(RankId::new).take(m.ranks().len()).collect::<Vec<_>>();
        for &dst in &ranks(&case.dst) {
            let sources: Vec<RankId> = plan.peers.sources_of(dst).collect();
            for &src in &ranks(&case.src) {
                let reads = named.contains(&(dst, src));
                assert_eq!(sources.contains(&src), reads);
                assert_eq!(plan.peers.consumers_of(src).any(|d| d == dst), reads);
                let pair = PairPlan::new(&plan.compatible, &plan.peers, src, dst).unwrap();
                assert_eq!(!pair.classes().is_empty(), reads);
            }
        }
    }
}

#[test]
fn token_classes_are_dealt_as_they_say() {
    for (count, interleave, index) in [(1, 1, 0), (2, 1, 1), (3, 4, 0), (3, 4, 2), (4, 2, 1), (8, 16, 7), (5, 3, 4)] {
        let class = TokenClass::new(count, interleave, index).unwrap();
        let mine = dealt(class, 200);
        for token in 0..=mine[199] {
            let place = mine.iter().position(|&t| t == token);
            assert_eq!(class.holds(Tokens::new(token)), place.is_some(), "{class}, token {token}");
            if let Some(place) = place {
                assert_eq!(class.local(Tokens::new(token)), place as u64, "{class}, token {token}");
            }
        }
    }
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
