//! Runs a property over many random cases, shrinks what fails, and says how to run it again.

use std::fmt::Write as _;

use proptest::collection::vec;
use proptest::num::u32::ANY;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use super::{Case, Choices};

/// Choices that a case is made from directly; longer parts fork.
const CHOICES: usize = 224;

/// The seed of this run: `KVFERRY_SEED`, else a new one each time.
#[must_use]
pub fn seed() -> u64 {
    let given = std::env::var("KVFERRY_SEED").ok();
    given.and_then(|s| s.trim().parse().ok()).unwrap_or_else(|| {
        use std::hash::{BuildHasher as _, Hasher as _};
        std::collections::hash_map::RandomState::new().build_hasher().finish() >> 1
    })
}

/// How many cases to run: `PROPTEST_CASES`, else `normal`.
#[must_use]
pub fn cases(normal: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|s| s.trim().parse().ok()).unwrap_or(normal)
}

/// Runs a property over `count` random lists of choices.
///
/// # Panics
/// Where the property fails: with the seed, the smallest list of choices found that fails, and what it makes.
pub fn check_cases(name: &str, count: u32, property: impl Fn(&Case) -> Result<(), String>) {
    let seed = seed();
    // Unless PROPTEST_MAX_SHRINK_ITERS says otherwise.
    let default = Config::default();
    let max_shrink_iters = if default.max_shrink_iters == u32::MAX { 3000 } else { default.max_shrink_iters };
    let config = Config { cases: count, failure_persistence: None, max_shrink_iters, ..default };
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    for (slot, byte) in key[8..].iter_mut().zip(name.bytes()) {
        *slot = byte;
    }
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &key));
    let outcome = runner.run(&vec(ANY, CHOICES), |choices| {
        property(&Case::new(&mut Choices::new(&choices))).map_err(TestCaseError::fail)
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(why, choices)) => {
            let used = choices.iter().rposition(|&c| c != 0).map_or(0, |i| i + 1);
            let mut text = format!("{name} fails; run again with KVFERRY_SEED={seed} PROPTEST_CASES={count}\n{why}\n");
            let case = std::panic::catch_unwind(|| format!("{:?}", Case::new(&mut Choices::new(&choices))));
            let _ = write!(text, "choices {:?}\n{}", &choices[..used], case.unwrap_or_default());
            panic!("{text}");
        }
        Err(e) => panic!("{name}: {e}; seed {seed}"),
    }
}

/// The case that a list of choices makes, for a test of one that failed once.
#[must_use]
pub fn run_case(choices: &[u32]) -> Case {
    Case::new(&mut Choices::new(choices))
}

/// Cases from a fixed seed, for tests that count them; those whose items can't move are left out.
pub fn sample(seed: u64, count: usize) -> impl Iterator<Item = Case> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &key));
    let any = move |_| {
        let choices = vec(ANY, CHOICES).new_tree(&mut runner).expect("a list of numbers").current();
        Case::new(&mut Choices::new(&choices))
    };
    (0..count).map(any).filter(|case| case.unshareable().is_empty())
}
