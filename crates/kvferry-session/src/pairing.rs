//! What two engines are to each other: whether they match, who reads from whom, by which plan. Computed when first
//! needed, then kept, within bounds.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_geometry::compat::{Compatible, Mismatches};
use kvferry_geometry::digest::Digest;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::{PeerError, PeerMap};
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
    maps: BTreeMap<u64, Arc<PeerMap>>,
    plans: BTreeMap<(u64, RankId, RankId), Arc<PairPlan>>,
}

impl Direction {
    /// From `src` to `dst`.
    ///
    /// # Errors
    /// All mismatches.
    pub fn new(src: Arc<Manifest>, dst: Arc<Manifest>) -> Result<Self, PairingError> {
        let compatible = Compatible::new(src, dst).map_err(PairingError::Mismatch)?;
        Ok(Self { compatible, maps: BTreeMap::new(), plans: BTreeMap::new() })
    }

    /// The two manifests, proven to match.
    #[must_use]
    pub fn compatible(&self) -> &Compatible {
        &self.compatible
    }

    /// The map of peers for a salt.
    ///
    /// # Errors
    /// If there is none.
    pub fn map(&mut self, salt: u64) -> Result<Arc<PeerMap>, PairingError> {
        if let Some(map) = self.maps.get(&salt) {
            return Ok(map.clone());
        }
        let map = Arc::new(PeerMap::new(&self.compatible, salt)?);
        if self.maps.len() as u64 >= SALTS {
            // Only a peer that invents salts comes here.
            self.maps.clear();
            self.plans.clear();
        }
        self.maps.insert(salt, map.clone());
        Ok(map)
    }

    /// The map for a salt, if it is the one named.
    ///
    /// # Errors
    /// If there is none, or it is another.
    pub fn agreed_map(&mut self, salt: u64, expected: Digest) -> Result<Arc<PeerMap>, PairingError> {
        let map = self.map(salt)?;
        let got = map.digest();
        if got == expected { Ok(map) } else { Err(PairingError::MapDiffers { expected, got }) }
    }

    /// The plan of one pair of ranks for a salt.
    ///
    /// # Errors
    /// If there is no map.
    pub fn plan(&mut self, salt: u64, src: RankId, dst: RankId) -> Result<Arc<PairPlan>, PairingError> {
        let map = self.map(salt)?;
        if let Some(plan) = self.plans.get(&(salt, src, dst)) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(PairPlan::new(&self.compatible, &map, src, dst)?);
        if self.plans.len() >= MAX_PLANS {
            self.plans.clear();
        }
        self.plans.insert((salt, src, dst), plan.clone());
        Ok(plan)
    }
}

/// Both directions between our engine and another, each made when first asked for.
#[derive(Debug, Default)]
pub struct Acquaintance {
    reading: Option<Result<Direction, PairingError>>,
    serving: Option<Result<Direction, PairingError>>,
}

impl Acquaintance {
    /// We read from the peer.
    ///
    /// # Errors
    /// All mismatches.
    pub fn reading(&mut self, ours: &Arc<Manifest>, peer: &Arc<Manifest>) -> Result<&mut Direction, PairingError> {
        let made = self.reading.get_or_insert_with(|| Direction::new(peer.clone(), ours.clone()));
        made.as_mut().map_err(|e| e.clone())
    }

    /// The peer reads from us.
    ///
    /// # Errors
    /// All mismatches.
    pub fn serving(&mut self, ours: &Arc<Manifest>, peer: &Arc<Manifest>) -> Result<&mut Direction, PairingError> {
        let made = self.serving.get_or_insert_with(|| Direction::new(ours.clone(), peer.clone()));
        made.as_mut().map_err(|e| e.clone())
    }
}
