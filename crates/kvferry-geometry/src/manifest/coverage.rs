//! The proof that an engine's ranks together hold every byte of every item.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use super::{MAX_FAULTS, ManifestError, RankManifest};
use crate::placement::{HeadRange, PagedPlacement, TokenClass};
use crate::spec::{Item, ModelSpec};
use crate::token_set::{MAX_PERIOD, TokenSet, lcm};

/// Comparisons that the proofs of one manifest may take in all.
const WORK: u64 = 1 << 26;

pub(super) fn check(spec: &ModelSpec, ranks: &[RankManifest], errors: &mut Vec<ManifestError>) {
    let mut work = WORK;
    // Layers are mostly placed alike, and one proof serves them all.
    let mut proven: BTreeSet<(u32, Vec<PagedPlacement>)> = BTreeSet::new();
    for (id, item) in spec.iter() {
        for (axis, total) in item.axes().enumerate() {
            let of_rank = |r: &RankManifest| r.placement[id.index()].as_ref()?.axis(axis);
            let placed: BTreeSet<PagedPlacement> = ranks.iter().filter_map(of_rank).collect();
            let key = (total, placed.into_iter().collect());
            if proven.contains(&key) {
                continue;
            }
            let before = errors.len();
            check_axis(item, total, &key.1, &mut work, errors);
            if errors.len() == before {
                proven.insert(key);
            } else if errors.len() > MAX_FAULTS {
                return;
            }
        }
    }
}

/// Whether every head (or unit) of every token is held.
fn check_axis(item: &Item, total: u32, placed: &[PagedPlacement], work: &mut u64, errors: &mut Vec<ManifestError>) {
    let name = || item.name.clone();
    let mut period = 1u64;
    for p in placed {
        match lcm(period, p.tokens.period()).filter(|&l| l <= MAX_PERIOD) {
            Some(l) => period = l,
            None => {
                errors.push(ManifestError::Period { item: name(), limit: MAX_PERIOD });
                return;
            }
        }
    }
    let all = TokenSet { period, intervals: vec![(0, period)] };
    let mut sets: BTreeMap<TokenClass, TokenSet> = BTreeMap::new();
    for heads in cut_heads(total, placed.iter().map(|p| p.heads)) {
        let classes: BTreeSet<TokenClass> =
            placed.iter().filter(|p| p.heads.contains(heads)).map(|p| p.tokens).collect();
        let mut cost = placed.len() as u64;
        let mut missing = all.clone();
        for class in classes {
            let set = sets.entry(class).or_insert_with(|| TokenSet::of_class(class, period));
            cost += (set.intervals.len() + missing.intervals.len()) as u64;
            missing = missing.minus(set);
            if missing.is_empty() || cost > *work {
                break;
            }
        }
        let Some(left) = work.checked_sub(cost) else {
            errors.push(ManifestError::TooComplex { item: name() });
            return;
        };
        *work = left;
        if let Some(&(start, end)) = missing.intervals.first() {
            errors.push(ManifestError::Uncovered { item: name(), heads, start, end, period });
            if errors.len() > MAX_FAULTS {
                return;
            }
        }
    }
}

/// The heads `[0, total)` cut at every interval's ends.
pub(crate) fn cut_heads(total: u32, ranges: impl Iterator<Item = HeadRange>) -> Vec<HeadRange> {
    let mut cuts = vec![0, total];
    for r in ranges {
        cuts.push(r.start().min(total));
        cuts.push(r.end().min(total));
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).filter_map(|w| HeadRange::new(w[0], w[1])).collect()
}
