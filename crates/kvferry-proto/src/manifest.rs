//! An engine's whole description: its cache's geometry, each rank's transport blob and epoch, its names, one digest.
//!
//! Ranks say what they hold ([`RankJoin`]); the owner collects them in an [`Assembly`] and gets an [`EngineManifest`]
//! when every rank has joined. The geometry inside is a proven [`Manifest`]; the blobs are opaque here.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use blake3::Hasher;
use kvferry_geometry::digest::Digest;
use kvferry_geometry::manifest::{CacheGroup, Manifest, ManifestErrors, RankManifest};
use kvferry_geometry::placement::MAX_RANKS;
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::RankId;

use crate::names::{EngineId, Epoch};

/// The longest transport blob of a rank, in bytes.
pub const MAX_BLOB: usize = 1 << 20;

/// What a peer's ranks need to reach one rank: its transport's blob, and which life of it this is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankContact {
    /// Random, new at each start of the rank.
    pub epoch: Epoch,
    /// The transport's bytes; nobody but a transport of the same kind reads them.
    pub blob: Arc<[u8]>,
}

/// What a rank says when it joins its owner.
#[derive(Clone, PartialEq, Debug)]
pub struct RankJoin {
    /// The engine it believes it belongs to.
    pub engine: EngineId,
    /// Which rank of it.
    pub rank: RankId,
    /// Which life of the rank.
    pub epoch: Epoch,
    /// What it holds and where.
    pub manifest: RankManifest,
    /// Its transport's blob.
    pub blob: Arc<[u8]>,
}

/// A rank may not join, or the ranks together make no engine.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The rank was started for another engine.
    #[error(
        "rank {rank} says that it belongs to engine {got}, this is the owner of {expected}; start all ranks with one id"
    )]
    WrongEngine {
        /// The rank.
        rank: RankId,
        /// The owner's id.
        expected: EngineId,
        /// What the rank says.
        got: EngineId,
    },
    /// Its number is beyond the engine's ranks.
    #[error("rank {rank} joined, but the engine has ranks 0 to {ranks} (exclusive)")]
    OutOfRange {
        /// The rank.
        rank: RankId,
        /// How many the engine has.
        ranks: u32,
    },
    /// It has joined before.
    #[error("rank {rank} has joined already (its epoch is {joined:.8}); a second one came with epoch {epoch:.8}")]
    Repeated {
        /// The rank.
        rank: RankId,
        /// The epoch of the first.
        joined: Epoch,
        /// The epoch of the second.
        epoch: Epoch,
    },
    /// The life of the rank that the engine has lost wants to be taken back.
    #[error(
        "rank {rank} was lost, and joins with the epoch {epoch:.8} that it had: start it anew, with a fresh transport"
    )]
    SameLife {
        /// The rank.
        rank: RankId,
        /// Its epoch.
        epoch: Epoch,
    },
    /// Its transport blob is too long.
    #[error("rank {rank}: its transport blob has {got} bytes, more than {limit}")]
    BlobTooLong {
        /// The rank.
        rank: RankId,
        /// Its length.
        got: usize,
        /// The longest.
        limit: usize,
    },
    /// The engine has no ranks, or too many.
    #[error("an engine of {got} ranks was asked for; it must be 1 to {limit}")]
    RankCount {
        /// What was asked.
        got: u32,
        /// The most.
        limit: u32,
    },
    /// All have joined, and together they are unsound or incomplete.
    #[error("the ranks together are no engine: {0}")]
    Unsound(ManifestErrors),
    /// All have joined, and together they are described by more than a frame can carry to peers and ranks.
    #[error("the description of the whole engine is too long: {0}; describe its layout with fewer regions or views")]
    TooLong(String),
}

/// An owner's collection of ranks, until all have joined.
#[derive(Clone, Debug)]
pub struct Assembly {
    engine: EngineId,
    epoch: Epoch,
    spec: ModelSpec,
    groups: Vec<CacheGroup>,
    joined: Vec<Option<RankJoin>>,
    /// The lives of ranks that the complete engine has lost.
    lost: BTreeMap<RankId, Epoch>,
}

/// What a join led to.
#[derive(Clone, Debug)]
pub enum Joined {
    /// More ranks must join.
    Waiting,
    /// That was the last one.
    Complete(EngineManifest),
}

impl Assembly {
    /// Waits for `ranks` ranks.
    ///
    /// # Errors
    /// If an engine can't have so many.
    pub fn new(
        engine: EngineId,
        epoch: Epoch,
        spec: ModelSpec,
        groups: Vec<CacheGroup>,
        ranks: u32,
    ) -> Result<Self, JoinError> {
        if ranks == 0 || ranks > MAX_RANKS {
            return Err(JoinError::RankCount { got: ranks, limit: MAX_RANKS });
        }
        Ok(Self { engine, epoch, spec, groups, joined: vec![None; ranks as usize], lost: BTreeMap::new() })
    }

    /// The ranks that have not joined.
    pub fn missing(&self) -> impl Iterator<Item = RankId> {
        (0u32..).map(RankId::new).zip(&self.joined).filter(|(_, j)| j.is_none()).map(|(rank, _)| rank)
    }

    /// Takes back a join: the rank went away before the engine was complete.
    pub fn leave(&mut self, rank: RankId) {
        if let Some(slot) = self.joined.get_mut(rank.index()) {
            *slot = None;
        }
    }

    /// The complete engine has lost a rank. Its place is free again, but not for the same life of it: that a rank joins anew counts
    /// as evidence that its life before has ended.
    pub fn lose(&mut self, rank: RankId) {
        if let Some(join) = self.joined.get_mut(rank.index()).and_then(Option::take) {
            self.lost.insert(rank, join.epoch);
        }
    }

    /// What is joined from now on is another life of the engine.
    pub fn renew(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    /// Adds a rank.
    ///
    /// # Errors
    /// If it may not join, or if it was the last and all together are unsound. The assembly is then as it was before.
    pub fn join(&mut self, join: RankJoin) -> Result<Joined, JoinError> {
        self.admit(&join)?;
        let rank = join.rank;
        self.joined[rank.index()] = Some(join);
        if self.joined.iter().any(Option::is_none) {
            return Ok(Joined::Waiting);
        }
        let manifests = self.joined.iter().flatten().map(|j| j.manifest.clone()).collect();
        let contacts = self.joined.iter().flatten().map(|j| RankContact { epoch: j.epoch, blob: j.blob.clone() });
        let contacts = contacts.collect();
        match Manifest::new(self.spec.clone(), self.groups.clone(), manifests) {
            Ok(cache) => {
                Ok(Joined::Complete(EngineManifest::assemble(self.engine.clone(), self.epoch, cache, contacts)))
            }
            Err(errors) => {
                self.leave(rank);
                Err(JoinError::Unsound(errors))
            }
        }
    }

    fn admit(&self, join: &RankJoin) -> Result<(), JoinError> {
        let rank = join.rank;
        if join.engine != self.engine {
            let (expected, got) = (self.engine.clone(), join.engine.clone());
            return Err(JoinError::WrongEngine { rank, expected, got });
        }
        if join.blob.len() > MAX_BLOB {
            return Err(JoinError::BlobTooLong { rank, got: join.blob.len(), limit: MAX_BLOB });
        }
        match self.joined.get(rank.index()) {
            // The constructor has proven that the number fits.
            None => Err(JoinError::OutOfRange { rank, ranks: u32::try_from(self.joined.len()).unwrap_or(u32::MAX) }),
            Some(Some(first)) => Err(JoinError::Repeated { rank, joined: first.epoch, epoch: join.epoch }),
            Some(None) if self.lost.get(&rank) == Some(&join.epoch) => {
                Err(JoinError::SameLife { rank, epoch: join.epoch })
            }
            Some(None) => Ok(()),
        }
    }
}

/// Parts that make no engine manifest.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContactError {
    /// Not one contact for each rank.
    #[error("{got} transport blobs for {expected} ranks")]
    Count {
        /// Ranks.
        expected: usize,
        /// Blobs.
        got: usize,
    },
    /// A blob is too long.
    #[error("rank {rank}: its transport blob has {got} bytes, more than {limit}")]
    BlobTooLong {
        /// The rank.
        rank: RankId,
        /// Its length.
        got: usize,
        /// The longest.
        limit: usize,
    },
}

/// One life of an engine: names, geometry, and how to reach each rank. Immutable; share it.
#[derive(Clone, PartialEq, Eq)]
pub struct EngineManifest {
    engine: EngineId,
    epoch: Epoch,
    cache: Arc<Manifest>,
    ranks: Vec<RankContact>,
    digest: Digest,
}

impl EngineManifest {
    /// Puts the parts together.
    ///
    /// # Errors
    /// If there is not one contact for each rank of the cache, or a blob is too long.
    pub fn new(engine: EngineId, epoch: Epoch, cache: Manifest, ranks: Vec<RankContact>) -> Result<Self, ContactError> {
        if cache.ranks().len() != ranks.len() {
            return Err(ContactError::Count { expected: cache.ranks().len(), got: ranks.len() });
        }
        for (rank, contact) in (0u32..).map(RankId::new).zip(&ranks) {
            if contact.blob.len() > MAX_BLOB {
                return Err(ContactError::BlobTooLong { rank, got: contact.blob.len(), limit: MAX_BLOB });
            }
        }
        Ok(Self::assemble(engine, epoch, cache, ranks))
    }

    fn assemble(engine: EngineId, epoch: Epoch, cache: Manifest, ranks: Vec<RankContact>) -> Self {
        let digest = digest_of(&engine, epoch, &cache, &ranks);
        Self { engine, epoch, cache: Arc::new(cache), ranks, digest }
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &EngineId {
        &self.engine
    }

    /// Which life of its owner.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The geometry.
    #[must_use]
    pub fn cache(&self) -> &Arc<Manifest> {
        &self.cache
    }

    /// How to reach each rank.
    #[must_use]
    pub fn contacts(&self) -> &[RankContact] {
        &self.ranks
    }

    /// How to reach one rank.
    #[must_use]
    pub fn contact(&self, rank: RankId) -> Option<&RankContact> {
        self.ranks.get(rank.index())
    }

    /// Names all of this: equal digests mean equal engine manifests.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

impl fmt::Debug for EngineManifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = self.ranks.len();
        write!(f, "EngineManifest({} epoch {:.8}, {ranks} ranks, {:.8})", self.engine, self.epoch, self.digest)
    }
}

fn digest_of(engine: &EngineId, epoch: Epoch, cache: &Manifest, ranks: &[RankContact]) -> Digest {
    let mut h = Hasher::new();
    let number = |h: &mut Hasher, n: usize| {
        h.update(&(n as u64).to_le_bytes());
    };
    h.update(b"kvferry engine manifest 1");
    number(&mut h, engine.as_str().len());
    h.update(engine.as_str().as_bytes());
    h.update(&epoch.get().to_le_bytes());
    h.update(cache.digest().as_bytes());
    number(&mut h, ranks.len());
    for r in ranks {
        h.update(&r.epoch.get().to_le_bytes());
        number(&mut h, r.blob.len());
        h.update(&r.blob);
    }
    Digest::from_bytes(*h.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{engine, ranks};

    fn assembly() -> (Assembly, Vec<RankJoin>) {
        let (spec, groups, ranks) = ranks();
        let join = |(rank, manifest)| RankJoin {
            engine: EngineId::new("e").unwrap(),
            rank: RankId::new(rank),
            epoch: Epoch::new(10 + u128::from(rank)),
            manifest,
            blob: Arc::from([1, 2]),
        };
        let joins = (0u32..).zip(ranks).map(join).collect();
        (Assembly::new(EngineId::new("e").unwrap(), Epoch::new(1), spec, groups, 2).unwrap(), joins)
    }

    fn missing(a: &Assembly) -> Vec<u32> {
        a.missing().map(RankId::get).collect()
    }

    #[test]
    fn ranks_join_in_any_order_to_the_same_engine() {
        let mut digests = Vec::new();
        for order in [[0, 1], [1, 0]] {
            let (mut a, joins) = assembly();
            assert!(matches!(a.join(joins[order[0]].clone()), Ok(Joined::Waiting)));
            let Ok(Joined::Complete(engine)) = a.join(joins[order[1]].clone()) else { panic!("both have joined") };
            assert_eq!(engine.contact(RankId::new(1)).map(|c| c.epoch), Some(Epoch::new(11)));
            digests.push(engine.digest());
        }
        assert_eq!(digests[0], digests[1]);
    }

    /// HS-01: disagreement on the id, a rank that isn't, one that comes twice, a blob beyond all measure.
    #[test]
    fn hs_01_joining_by_event() {
        let (mut a, joins) = assembly();
        let wrong = RankJoin { engine: EngineId::new("f").unwrap(), ..joins[0].clone() };
        let (rank, expected, got) = (RankId::new(0), EngineId::new("e").unwrap(), EngineId::new("f").unwrap());
        assert_eq!(a.join(wrong).unwrap_err(), JoinError::WrongEngine { rank, expected, got });
        let beyond = RankJoin { rank: RankId::new(2), ..joins[0].clone() };
        assert_eq!(a.join(beyond).unwrap_err(), JoinError::OutOfRange { rank: RankId::new(2), ranks: 2 });
        let blob: Arc<[u8]> = vec![0; MAX_BLOB + 1].into();
        let long = RankJoin { blob, ..joins[0].clone() };
        assert!(matches!(a.join(long).unwrap_err(), JoinError::BlobTooLong { .. }));
        assert_eq!(missing(&a), [0, 1]);
        a.join(joins[0].clone()).unwrap();
        let again = RankJoin { epoch: Epoch::new(99), ..joins[0].clone() };
        let (joined, epoch) = (Epoch::new(10), Epoch::new(99));
        assert_eq!(a.join(again).unwrap_err(), JoinError::Repeated { rank, joined, epoch });
        assert_eq!(missing(&a), [1]);
        a.leave(rank);
        assert_eq!(missing(&a), [0, 1]);
        a.join(joins[0].clone()).unwrap();
        // A rank that the complete engine loses must come back as another.
        let mut complete = a.clone();
        complete.join(joins[1].clone()).unwrap();
        complete.lose(rank);
        let epoch = joins[0].epoch;
        assert_eq!(complete.join(joins[0].clone()).unwrap_err(), JoinError::SameLife { rank, epoch });
        let anew = RankJoin { epoch: Epoch::new(77), ..joins[0].clone() };
        assert!(matches!(complete.join(anew), Ok(Joined::Complete(_))));
        // Both have joined, and together they lack heads: the last is sent away, and may come back in order.
        let mut unsound = joins[1].clone();
        unsound.manifest = joins[0].manifest.clone();
        assert!(matches!(a.join(unsound).unwrap_err(), JoinError::Unsound(_)));
        assert_eq!(missing(&a), [1]);
        assert!(matches!(a.join(joins[1].clone()), Ok(Joined::Complete(_))));
    }

    #[test]
    fn digests_name_every_part() {
        let base = engine();
        let parts = |engine: &str, epoch, contacts| {
            let (id, epoch) = (EngineId::new(engine).unwrap(), Epoch::new(epoch));
            EngineManifest::new(id, epoch, (**base.cache()).clone(), contacts).unwrap().digest()
        };
        let same = || base.contacts().to_vec();
        assert_eq!(parts("prefill", 9, same()), base.digest());
        let mut blob = same();
        blob[1].blob = Arc::from([0]);
        let mut epoch = same();
        epoch[0].epoch = Epoch::new(0);
        for other in
            [parts("p", 9, same()), parts("prefill", 8, same()), parts("prefill", 9, blob), parts("prefill", 9, epoch)]
        {
            assert_ne!(other, base.digest());
        }
        let few = EngineManifest::new(base.engine().clone(), base.epoch(), (**base.cache()).clone(), Vec::new());
        assert_eq!(few, Err(ContactError::Count { expected: 2, got: 0 }));
    }
}
