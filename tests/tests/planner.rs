//! The planner against the oracle: random requests between random engines, every byte of memory compared.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]

use std::cell::RefCell;
use std::collections::BTreeMap;

use kvferry_geometry::compat::{Compatible, Mismatch};
use kvferry_geometry::manifest::{Manifest, ManifestError};
use kvferry_geometry::placement::TokenClass;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_oracle::dealt;
use kvferry_tests::{Case, cases, check_cases, sample};

/// Every byte of a case, or that it is refused for the reason that the oracle finds, and for no other.
fn check(case: &Case, counts: &RefCell<BTreeMap<&'static str, u32>>) -> Result<(), String> {
    let count = |name| *counts.borrow_mut().entry(name).or_default() += 1;
    case.check_placements()?;
    let unshareable = case.unshareable();
    if unshareable.is_empty() {
        case.verify()?;
        count("served");
        case.features().into_iter().for_each(count);
        return Ok(());
    }
    // A value that stands for all heads of a rank can't be cut or joined.
    let Err(found) = Compatible::with(case.src.clone(), case.dst.clone(), case.options) else {
        return Err(format!("{unshareable:?} can't move, but the engines are compatible"));
    };
    let mut named: Option<Vec<_>> =
        found.0.iter().map(|m| matches!(m, Mismatch::SharedValue { .. }).then(|| m.item().clone())).collect();
    // Once for each such component.
    named.iter_mut().for_each(Vec::dedup);
    if named.as_ref() != Some(&unshareable) {
        return Err(format!("{unshareable:?} can't move, refused is {found}"));
    }
    count("refused: a value for all heads of a rank");
    Ok(())
}

/// Runs a share of the cases, and checks that none is refused too often and that all kinds are served.
fn check_share(name: &str) {
    let counts = RefCell::new(BTreeMap::new());
    let total = cases(5000) / 2;
    check_cases(name, total, |case: &Case| check(case, &counts));
    let counts = counts.into_inner();
    println!("of {total}: {counts:#?}");
    let of = |kind: &str| counts.get(kind).copied().unwrap_or(0);
    assert!(of("refused: a value for all heads of a rank") <= total / 10, "{counts:#?}");
    // In smaller runs, of mutants say, rare kinds may be missing.
    if total >= 2500 {
        let rare: Vec<_> = KINDS.iter().filter(|k| of(k) < 10).map(|k| (k, of(k))).collect();
        assert!(rare.is_empty(), "of {total}: {rare:?}");
    }
}

// Two halves, on two cores.
#[test]
fn every_byte_of_the_destination_is_right() {
    check_share("planner");
}

#[test]
fn every_byte_of_the_destination_is_right_again() {
    check_share("planner, the other half");
}

/// What must be met.
const KINDS: &[&str] = &[
    "block sizes differ, none divides",
    "block sizes differ, one divides",
    "chunks",
    "compressed entries",
    "context parallel destination",
    "context parallel on both sides",
    "context parallel source",
    "distances",
    "few ranks to many",
    "frozen tails",
    "full hits of pages with states to move",
    "groups differ",
    "groups share memory",
    "groups share memory on both sides",
    "hand-made placements",
    "hits",
    "hits that differ",
    "interleaves differ",
    "item order differs",
    "items of one side",
    "items of the destination alone",
    "kernel blocks at the destination",
    "kernel blocks at the source",
    "kernel blocks on both sides, that differ",
    "late tables",
    "late tables at the destination",
    "many ranks to few",
    "more checkpoints at the source",
    "neither rank count divides the other",
    "one and several heads in one group",
    "packed rows on both sides",
    "packed rows on one side",
    "parts sharded unequally",
    "pipeline stages on both sides",
    "placeholders of blocks given back",
    "ranks of states alone",
    "refused placements",
    "replicas at the source",
    "retentions mixed in a group",
    "rings",
    "rings that have gone round",
    "scales for all heads",
    "scales for all heads of a block",
    "scales for each head and block",
    "scales for each head and entry",
    "scales of compressed blocks",
    "scratch rows",
    "served",
    "several checkpoints",
    "several groups",
    "staged at the destination",
    "staged at the source",
    "states",
    "states alone",
    "states and pages",
    "states and pages share memory",
    "states dim-first and state-first",
    "striped replicas at the source",
    "the state is there already",
    "values cut in chunks",
    "windows",
];

/// All ways in which a plan can be made occur, so that all of them are held to the oracle.
#[test]
fn random_plans_are_of_every_kind() {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for case in sample(8, 600) {
        let plan = case.plan().unwrap();
        for (src, dst, batch) in &plan.batches {
            let pair = PairPlan::new(&plan.compatible, &plan.peers, *src, *dst).unwrap();
            let mut note = |name, yes| *counts.entry(name).or_default() += u32::from(yes);
            for class in pair.classes() {
                let key = (class.groups(), class.retention());
                let moved = plan.bound.moves().iter().find(|m| ((m.src_group, m.dst_group), m.retention) == key);
                let moved = moved.unwrap();
                note("states", class.retention().is_none());
                note("several parts", class.shares().len() > 1);
                note("no period", class.period().is_none());
                let each = class.entry_tokens().get();
                let (start, end) = (moved.range.start().get() / each, moved.range.end().get() / each);
                let whole = |p: u64| start.div_ceil(p) < end / p;
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
