//! What two engines are to each other: whether they match, who reads from whom, by which plan. Computed when first
//! needed, then kept, within bounds.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_geometry::compat::{CompatOptions, Compatible, Mismatches};
use kvferry_geometry::digest::Digest;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::{PeerError, PeerMap, PeerOptions};
use kvferry_geometry::plan::{PairPlan, PlanError};
use kvferry_geometry::units::RankId;
use kvferry_proto::names::SALTS;

/// The most plans that are kept for one direction.
const MAX_PLANS: usize = 4096;

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
    maps: BTreeMap<MapKey, Arc<PeerMap>>,
    plans: BTreeMap<(MapKey, RankId, RankId), Arc<PairPlan>>,
}

/// Salt and striping.
type MapKey = (u64, bool);

fn key(options: PeerOptions) -> MapKey {
    (options.salt, options.stripe)
}

impl Direction {
    /// From `src` to `dst`, letting pass what this side's engine lets pass.
    ///
    /// # Errors
    /// All mismatches.
    pub fn new(src: Arc<Manifest>, dst: Arc<Manifest>, options: CompatOptions) -> Result<Self, PairingError> {
        let compatible = Compatible::with(src, dst, options).map_err(PairingError::Mismatch)?;
        Ok(Self { compatible, maps: BTreeMap::new(), plans: BTreeMap::new() })
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
    pub fn map(&mut self, options: PeerOptions) -> Result<Arc<PeerMap>, PairingError> {
        if let Some(map) = self.maps.get(&key(options)) {
            return Ok(map.clone());
        }
        let map = Arc::new(PeerMap::with(&self.compatible, options, |_, _| 0)?);
        if self.maps.len() as u64 >= SALTS {
            // Only a peer that invents salts comes here.
            self.maps.clear();
            self.plans.clear();
        }
        self.maps.insert(key(options), map.clone());
        Ok(map)
    }

    /// The map for these options, if it is the one named.
    ///
    /// # Errors
    /// If there is none, or it is another.
    pub fn agreed_map(&mut self, options: PeerOptions, expected: Digest) -> Result<Arc<PeerMap>, PairingError> {
        let map = self.map(options)?;
        let got = map.digest();
        if got == expected { Ok(map) } else { Err(PairingError::MapDiffers { expected, got }) }
    }

    /// The plan of one pair of ranks by the map for these options.
    ///
    /// # Errors
    /// If there is no map.
    pub fn plan(&mut self, options: PeerOptions, src: RankId, dst: RankId) -> Result<Arc<PairPlan>, PairingError> {
        let map = self.map(options)?;
        if let Some(plan) = self.plans.get(&(key(options), src, dst)) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(PairPlan::new(&self.compatible, &map, src, dst)?);
        if self.plans.len() >= MAX_PLANS {
            self.plans.clear();
        }
        self.plans.insert((key(options), src, dst), plan.clone());
        Ok(plan)
    }
}

/// Both directions between our engine and another, each made when first asked for.
#[derive(Debug, Default)]
pub struct Acquaintance {
    reading: Way,
    serving: Way,
}

impl Acquaintance {
    /// We read from the peer.
    ///
    /// # Errors
    /// All mismatches.
    pub fn reading(
        &mut self,
        ours: &Arc<Manifest>,
        peer: &Arc<Manifest>,
        options: CompatOptions,
    ) -> Result<&mut Direction, PairingError> {
        known(&mut self.reading, options, || Direction::new(peer.clone(), ours.clone(), options))
    }

    /// The peer reads from us.
    ///
    /// # Errors
    /// All mismatches.
    pub fn serving(
        &mut self,
        ours: &Arc<Manifest>,
        peer: &Arc<Manifest>,
        options: CompatOptions,
    ) -> Result<&mut Direction, PairingError> {
        known(&mut self.serving, options, || Direction::new(ours.clone(), peer.clone(), options))
    }
}

/// What our engine knows of others, by how their caches are described: of many engines that are alike it is computed, and kept, once.
#[derive(Debug, Default)]
pub struct Acquaintances(BTreeMap<Digest, Acquaintance>);

impl Acquaintances {
    /// What is known of engines with this cache.
    pub fn of(&mut self, peer: &Manifest) -> &mut Acquaintance {
        self.0.entry(peer.digest()).or_default()
    }

    /// An engine with this cache is gone; where none of the `others` has the same, it is forgotten.
    pub fn forget<'a>(&mut self, gone: &Manifest, mut others: impl Iterator<Item = &'a Arc<Manifest>>) {
        if !others.any(|other| other.digest() == gone.digest()) {
            self.0.remove(&gone.digest());
        }
    }

    /// Our own cache is another: all is computed anew.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// One direction, with what our engine lets pass.
type Way = Option<(CompatOptions, Result<Direction, PairingError>)>;

fn known(
    way: &mut Way,
    options: CompatOptions,
    make: impl FnOnce() -> Result<Direction, PairingError>,
) -> Result<&mut Direction, PairingError> {
    // An owner's options don't change; but a rank takes its owner's word with each order.
    let made = way.take().filter(|(of, _)| *of == options).unwrap_or_else(|| (options, make()));
    way.insert(made).1.as_mut().map_err(|e| e.clone())
}
