//! The proof that an engine's ranks together hold every byte of every item.

use alloc::vec;
use alloc::vec::Vec;

use super::{ManifestError, RankManifest};
use crate::placement::{HeadRange, Placement};
use crate::spec::{Item, ModelSpec};
use crate::token_set::{MAX_PERIOD, TokenSet, lcm};

pub(super) fn check(spec: &ModelSpec, ranks: &[RankManifest], errors: &mut Vec<ManifestError>) {
    for (id, item) in spec.iter() {
        let mut placed: Vec<Placement> = Vec::new();
        for p in ranks.iter().filter_map(|r| r.placement[id.index()]) {
            if !placed.contains(&p) {
                placed.push(p);
            }
        }
        check_item(item, &placed, errors);
    }
}

fn check_item(item: &Item, placed: &[Placement], errors: &mut Vec<ManifestError>) {
    let mut period = 1u64;
    for p in placed {
        match lcm(period, p.tokens.period()).filter(|&l| l <= MAX_PERIOD) {
            Some(l) => period = l,
            None => {
                errors.push(ManifestError::Period { item: item.name.clone(), limit: MAX_PERIOD });
                return;
            }
        }
    }
    let all = TokenSet { period, intervals: vec![(0, period)] };
    for heads in cut_heads(item.as_paged().heads, placed.iter().map(|p| p.heads)) {
        let held = placed
            .iter()
            .filter(|p| p.heads.contains(heads))
            .map(|p| TokenSet::of_class(p.tokens, period))
            .fold(TokenSet::empty(period), |sum, set| sum.union(&set));
        if let Some(&(start, end)) = all.minus(&held).intervals.first() {
            errors.push(ManifestError::Uncovered { item: item.name.clone(), heads, start, end, period });
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
