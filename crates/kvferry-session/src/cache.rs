//! A rank's cache: its regions, checked against what its layout says and registered with its transport.

use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::{MemoryKind, Region, RegisterError, Transport};

/// The memory is not what the layout says, or could not be registered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// Not one region for each of the layout's.
    #[error("{got} regions of memory were given, the layout has {expected}; give one for each, in its order")]
    Count {
        /// Regions of the layout.
        expected: usize,
        /// Regions given.
        got: usize,
    },
    /// A region is not as long as the layout says.
    #[error("region {region} has {got}, the layout says {expected}")]
    Length {
        /// The region.
        region: RegionId,
        /// What the layout says.
        expected: Bytes,
        /// What was given.
        got: Bytes,
    },
    /// A region is not of the kind that the layout says.
    #[error("region {region} is {got} memory, the layout says {expected}")]
    Kind {
        /// The region.
        region: RegionId,
        /// What the layout says.
        expected: MemoryKind,
        /// What was given.
        got: MemoryKind,
    },
    /// The transport gave a region another id than its place in the layout: it has other registrations.
    #[error("region {expected} of the layout was registered as {got}; give the rank a transport of its own")]
    Id {
        /// Its place in the layout.
        expected: RegionId,
        /// The id that the transport gave.
        got: RegionId,
    },
    /// No scratch memory for probes.
    #[error("there is no memory for {bytes} to measure lanes with; leave the policy's minimum out")]
    Scratch {
        /// How much.
        bytes: Bytes,
    },
    /// The transport refused.
    #[error("region {region} could not be registered: {error}")]
    Register {
        /// The region.
        region: RegionId,
        /// Why.
        error: RegisterError,
    },
}

/// A rank's registered cache.
#[derive(Debug)]
pub struct LocalCache {
    manifest: RankManifest,
    regions: Vec<Region>,
    staging: Option<Region>,
    /// Of all of these, by id.
    lens: Vec<Bytes>,
}

impl LocalCache {
    /// Checks the memory against the layout and registers it, region by region.
    ///
    /// # Errors
    /// What doesn't fit, or what the transport says; regions registered before the error stay so until the transport is
    /// dropped.
    pub fn register(
        transport: &mut dyn Transport,
        manifest: RankManifest,
        regions: Vec<Region>,
    ) -> Result<Self, CacheError> {
        let expected = &manifest.layout.regions;
        if expected.len() != regions.len() {
            return Err(CacheError::Count { expected: expected.len(), got: regions.len() });
        }
        let numbered = (0u32..).map(RegionId::new).zip(expected.iter().zip(&regions));
        for (region, (said, given)) in numbered.clone() {
            if said.len != given.len() {
                return Err(CacheError::Length { region, expected: said.len, got: given.len() });
            }
            if said.kind != given.kind() {
                return Err(CacheError::Kind { region, expected: said.kind, got: given.kind() });
            }
        }
        for (region, (_, given)) in numbered {
            let got = transport.register(given.clone()).map_err(|error| CacheError::Register { region, error })?;
            if got != region {
                return Err(CacheError::Id { expected: region, got });
            }
        }
        let lens = regions.iter().map(Region::len).collect();
        Ok(Self { manifest, regions, staging: None, lens })
    }

    /// Registers staging memory after the cache: no view lies in it, and no peer is told of it by the manifest.
    ///
    /// # Errors
    /// What the transport says; then there is none.
    pub fn with_staging(mut self, transport: &mut dyn Transport, memory: Region) -> Result<Self, CacheError> {
        let region = self.staging_id();
        let got = transport.register(memory.clone()).map_err(|error| CacheError::Register { region, error })?;
        if got != region {
            return Err(CacheError::Id { expected: region, got });
        }
        self.lens.push(memory.len());
        self.staging = Some(memory);
        Ok(self)
    }

    /// The staging memory, if there is some.
    #[must_use]
    pub fn staging(&self) -> Option<&Region> {
        self.staging.as_ref()
    }

    /// The staging memory's id: the one after the cache's regions.
    #[must_use]
    pub fn staging_id(&self) -> RegionId {
        // A layout has far fewer regions.
        RegionId::new(u32::try_from(self.regions.len()).unwrap_or(u32::MAX))
    }

    /// What the rank holds and where.
    #[must_use]
    pub fn manifest(&self) -> &RankManifest {
        &self.manifest
    }

    /// The memory, by region id.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The lengths of all that is registered, by id: the cache's regions, then the staging memory.
    #[must_use]
    pub fn lens(&self) -> &[Bytes] {
        &self.lens
    }
}
