//! What two engines are to each other: whether they match, who reads from whom, by which plan. Computed when first
//! needed, then kept, within bounds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvferry_geometry::compat::{CompatOptions, Compatible, Mismatches};
use kvferry_geometry::digest::Digest;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::{PeerError, PeerMap, PeerOptions, RankPair};
use kvferry_geometry::plan::{PairPlan, PlanError};
use kvferry_geometry::units::RankId;
use kvferry_proto::names::SALTS;

/// The most plans that are kept for one direction, by all ranks of a process.
const MAX_PLANS: usize = 1 << 14;
/// The most maps: of each salt, striped or not.
const MAX_MAPS: u64 = 2 * SALTS;

/// Two engines can't exchange anything.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PairingError {
    /// Their caches don't describe one model.
    #[error("the caches do not match: {0}")]
    Mismatch(Mismatches),
    /// No map of peers.
    #[error(transparent)]
    Peers(#[from] PeerError),
    /// The map that the owners agreed on is not the one computed here.
    #[error("the map of peers here is {got:.16}, the order names {expected:.16}")]
    MapDiffers {
        /// The one named.
        expected: Digest,
        /// The one computed.
        got: Digest,
    },
    /// No plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Bytes may go from one engine to the other: all that is known about that.
#[derive(Debug)]
pub struct Direction {
    compatible: Compatible,
    kept: Mutex<Kept>,
}

/// What two ranks exchange, if they do, and its plan.
type Planned = (Option<RankPair>, Arc<PairPlan>);

/// What was computed so far.
#[derive(Debug, Default)]
struct Kept {
    /// By salt and striping.
    maps: BTreeMap<(u64, bool), Arc<PeerMap>>,
    /// What two ranks exchange under each of the salts is mostly one of few things.
    plans: BTreeMap<(bool, RankId, RankId), Vec<Planned>>,
    /// How many plans.
    count: usize,
}

impl Direction {
    /// From `src` to `dst`, letting pass what this side's engine lets pass.
    ///
    /// # Errors
    /// All mismatches.
    pub fn new(src: Arc<Manifest>, dst: Arc<Manifest>, options: CompatOptions) -> Result<Self, PairingError> {
        let compatible = Compatible::with(src, dst, options).map_err(PairingError::Mismatch)?;
        Ok(Self { compatible, kept: Mutex::default() })
    }

    /// The two manifests, proven to match.
    #[must_use]
    pub fn compatible(&self) -> &Compatible {
        &self.compatible
    }

    /// The map of peers for a salt, striped or not.
    ///
    /// # Errors
    /// If there is none.
    pub fn map(&self, options: PeerOptions) -> Result<Arc<PeerMap>, PairingError> {
        let key = (options.salt, options.stripe);
        if let Some(map) = lock(&self.kept).maps.get(&key) {
            return Ok(map.clone());
        }
        // Nobody waits for who computes: at worst two do so.
        let map = Arc::new(PeerMap::with(&self.compatible, options, |_, _| 0)?);
        let mut kept = lock(&self.kept);
        if kept.maps.len() as u64 >= MAX_MAPS {
            // Only salts that nobody draws come here.
            *kept = Kept::default();
        }
        Ok(kept.maps.entry(key).or_insert(map).clone())
    }

    /// The map for these options, if it is the one named.
    ///
    /// # Errors
    /// If there is none, or it is another.
    pub fn agreed_map(&self, options: PeerOptions, expected: Digest) -> Result<Arc<PeerMap>, PairingError> {
        let map = self.map(options)?;
        let got = map.digest();
        if got == expected { Ok(map) } else { Err(PairingError::MapDiffers { expected, got }) }
    }

    /// The plan of one pair of ranks by the map for these options.
    ///
    /// # Errors
    /// If there is no map.
    pub fn plan(&self, options: PeerOptions, src: RankId, dst: RankId) -> Result<Arc<PairPlan>, PairingError> {
        let map = self.map(options)?;
        let (place, pair) = ((options.stripe, src, dst), map.pair(src, dst));
        let known = |kept: &Kept| {
            let found = kept.plans.get(&place).into_iter().flatten().find(|(of, _)| of.as_ref() == pair);
            found.map(|(_, plan)| plan.clone())
        };
        if let Some(plan) = known(&lock(&self.kept)) {
            return Ok(plan);
        }
        let plan = Arc::new(PairPlan::new(&self.compatible, &map, src, dst)?);
        let mut kept = lock(&self.kept);
        if let Some(plan) = known(&kept) {
            return Ok(plan);
        }
        if kept.count >= MAX_PLANS {
            kept.plans.clear();
            kept.count = 0;
        }
        kept.plans.entry(place).or_default().push((pair.cloned(), plan.clone()));
        kept.count += 1;
        Ok(plan)
    }
}

/// What is computed of pairs of caches, once for all sessions of a process that share it: an engine's owner and its ranks, say.
/// Clones are the same. What no session needs any more isn't kept.
#[derive(Clone, Debug, Default)]
pub struct Pairings(Arc<Mutex<BTreeMap<Pair, Weak<Direction>>>>);

/// The caches of source and destination, and what passes between them.
type Pair = (Digest, Digest, CompatOptions);

impl Pairings {
    fn direction(
        &self,
        src: &Arc<Manifest>,
        dst: &Arc<Manifest>,
        options: CompatOptions,
    ) -> Result<Arc<Direction>, PairingError> {
        let pair = (src.digest(), dst.digest(), options);
        let known = || lock(&self.0).get(&pair).and_then(Weak::upgrade);
        if let Some(direction) = known() {
            return Ok(direction);
        }
        let made = Arc::new(Direction::new(src.clone(), dst.clone(), options)?);
        let mut all = lock(&self.0);
        all.retain(|_, held| held.strong_count() > 0);
        let held = all.entry(pair).or_insert_with(|| Arc::downgrade(&made));
        // Another may have been quicker.
        Ok(held.upgrade().unwrap_or(made))
    }

    /// How many directions are in use.
    #[cfg(test)]
    fn len(&self) -> usize {
        lock(&self.0).values().filter(|held| held.strong_count() > 0).count()
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What our engine knows of others, by how their caches are described: of many engines that are alike it is computed, and kept, once.
#[derive(Debug, Default)]
pub struct Acquaintances {
    shared: Pairings,
    known: BTreeMap<Digest, Ways>,
}

/// Both directions between our engine and another, each made when first asked for.
#[derive(Debug, Default)]
struct Ways {
    reading: Way,
    serving: Way,
}

/// One direction, with what our engine lets pass.
type Way = Option<(CompatOptions, Result<Arc<Direction>, PairingError>)>;

impl Acquaintances {
    /// Knows nobody, and shares what it computes.
    #[must_use]
    pub fn sharing(shared: Pairings) -> Self {
        Self { shared, known: BTreeMap::new() }
    }

    /// We read from an engine with this cache.
    ///
    /// # Errors
    /// All mismatches.
    pub fn reading(
        &mut self,
        ours: &Arc<Manifest>,
        peer: &Arc<Manifest>,
        options: CompatOptions,
    ) -> Result<Arc<Direction>, PairingError> {
        let Ways { reading, .. } = self.known.entry(peer.digest()).or_default();
        known(reading, options, || self.shared.direction(peer, ours, options))
    }

    /// An engine with this cache reads from us.
    ///
    /// # Errors
    /// All mismatches.
    pub fn serving(
        &mut self,
        ours: &Arc<Manifest>,
        peer: &Arc<Manifest>,
        options: CompatOptions,
    ) -> Result<Arc<Direction>, PairingError> {
        let Ways { serving, .. } = self.known.entry(peer.digest()).or_default();
        known(serving, options, || self.shared.direction(ours, peer, options))
    }

    /// The last engine with this cache is gone.
    pub fn forget(&mut self, gone: &Manifest) {
        self.known.remove(&gone.digest());
    }

    /// Our own cache is another: all is computed anew.
    pub fn clear(&mut self) {
        self.known.clear();
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}

fn known(
    way: &mut Way,
    options: CompatOptions,
    make: impl FnOnce() -> Result<Arc<Direction>, PairingError>,
) -> Result<Arc<Direction>, PairingError> {
    // An owner's options don't change; but a rank takes its owner's word with each order.
    let made = way.take().filter(|(of, _)| *of == options).unwrap_or_else(|| (options, make()));
    way.insert(made).1.clone()
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::compat::Unmatched;
    use kvferry_geometry::placement::HeadRule;

    use super::*;
    use crate::testing::{manifest, shape_by};

    fn ranks_of(m: &Manifest) -> impl Iterator<Item = RankId> {
        (0u32..).map(RankId::new).take(m.ranks().len())
    }

    /// Every rank holds the same, as of a latent.
    fn replicated(tp: u32) -> Arc<Manifest> {
        let (spec, groups, ranks) = shape_by(tp, HeadRule::Whole);
        Arc::new(Manifest::new(spec, groups, ranks).unwrap())
    }

    #[test]
    fn a_plan_is_that_of_its_own_salt_whatever_was_planned_before() {
        let mut kept = Vec::new();
        for (src, dst) in [(replicated(4), manifest(2)), (manifest(4), replicated(2)), (manifest(2), manifest(4))] {
            let direction = Direction::new(src.clone(), dst.clone(), CompatOptions::default()).unwrap();
            for options in (0..SALTS).flat_map(|salt| [false, true].map(|stripe| PeerOptions { salt, stripe })) {
                let map = PeerMap::with(direction.compatible(), options, |_, _| 0).unwrap();
                assert_eq!(*direction.map(options).unwrap(), map);
                for (s, d) in ranks_of(&src).flat_map(|s| ranks_of(&dst).map(move |d| (s, d))) {
                    let expected = PairPlan::new(direction.compatible(), &map, s, d).unwrap();
                    let got = direction.plan(options, s, d).unwrap();
                    assert_eq!(format!("{got:?}"), format!("{expected:?}"), "{options:?} {s} {d}");
                }
            }
            kept.push(lock(&direction.kept).count);
        }
        // Of 1,024 plans by salt, few differ.
        assert!(kept.iter().all(|count| *count <= 64), "{kept:?}");
    }

    #[test]
    fn sessions_that_share_compute_a_pair_once_and_only_for_as_long_as_one_needs_it() {
        let (p, d) = (manifest(4), manifest(2));
        let shared = Pairings::default();
        let [mut owner, mut rank] = [0; 2].map(|_| Acquaintances::sharing(shared.clone()));
        let usual = CompatOptions::default();
        let one = owner.reading(&d, &p, usual).unwrap();
        assert!(Arc::ptr_eq(&one, &rank.reading(&d, &p, usual).unwrap()));
        // Another direction, other options, somebody who shares nothing.
        let lenient = CompatOptions { source_only: Unmatched::Ignore, ..usual };
        assert!(!Arc::ptr_eq(&one, &rank.serving(&d, &p, usual).unwrap()));
        assert!(!Arc::ptr_eq(&one, &rank.reading(&d, &p, lenient).unwrap()));
        assert!(!Arc::ptr_eq(&one, &Acquaintances::default().reading(&d, &p, usual).unwrap()));
        drop(one);
        // The rank has taken the latest word; the owner still holds the first.
        assert_eq!(shared.len(), 3);
        rank.forget(&p);
        assert_eq!(shared.len(), 1);
        owner.clear();
        assert_eq!((shared.len(), owner.is_empty()), (0, true));
    }
}
