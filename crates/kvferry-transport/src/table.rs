//! The registrations of one endpoint: ids, generations and the rule against registering twice; for backends.

use std::collections::{BTreeMap, HashMap};

use kvferry_geometry::units::{Bytes, RegionId};

use crate::blob::MAX_REGIONS;
use crate::error::{DeregisterError, RegisterError};
use crate::region::Region;
use crate::types::Capabilities;

/// Regions by id. See clauses `[ids]` and `[duplicate]` of [`Transport`](crate::Transport).
#[derive(Debug, Default)]
pub struct RegionTable {
    generation: u64,
    next: u32,
    by_id: BTreeMap<RegionId, Region>,
    by_range: HashMap<(usize, u64), RegionId>,
}

impl RegionTable {
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts how often ids began anew.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Checks what every backend must, and gives the region its id.
    ///
    /// # Errors
    /// Empty, of a kind that is not supported, registered already, or one too many.
    pub fn register(&mut self, region: Region, capabilities: &Capabilities) -> Result<RegionId, RegisterError> {
        self.check(&region, capabilities)?;
        if self.by_id.is_empty() && self.next > 0 {
            self.next = 0;
            self.generation += 1;
        }
        let id = RegionId::new(self.next);
        if id.index() >= MAX_REGIONS {
            return Err(RegisterError::TooMany { limit: MAX_REGIONS });
        }
        self.next += 1;
        self.by_range.insert((region.address(), region.len().get()), id);
        self.by_id.insert(id, region);
        Ok(id)
    }

    /// The checks of [`register`](Self::register) alone, for a backend that does work of its own between.
    ///
    /// # Errors
    /// As for `register`, but for the limit.
    pub fn check(&self, region: &Region, capabilities: &Capabilities) -> Result<(), RegisterError> {
        if !capabilities.memory.contains(&region.kind()) {
            return Err(RegisterError::UnsupportedMemory {
                backend: capabilities.backend,
                got: region.kind(),
                supported: capabilities.memory.clone(),
            });
        }
        if region.is_empty() {
            return Err(RegisterError::Empty);
        }
        match self.by_range.get(&(region.address(), region.len().get())) {
            Some(&existing) => Err(RegisterError::Duplicate { address: region.address(), len: region.len(), existing }),
            None => Ok(()),
        }
    }

    /// Removes a region that `busy` operations name.
    ///
    /// # Errors
    /// Unknown, or busy.
    pub fn deregister(&mut self, id: RegionId, busy: usize) -> Result<Region, DeregisterError> {
        if busy > 0 && self.by_id.contains_key(&id) {
            return Err(DeregisterError::Busy { region: id, operations: busy });
        }
        let region = self.by_id.remove(&id).ok_or(DeregisterError::Unknown { region: id })?;
        self.by_range.remove(&(region.address(), region.len().get()));
        Ok(region)
    }

    /// The region of an id.
    #[must_use]
    pub fn get(&self, id: RegionId) -> Option<&Region> {
        self.by_id.get(&id)
    }

    /// The length of the region of an id.
    #[must_use]
    pub fn len_of(&self, id: RegionId) -> Option<Bytes> {
        self.by_id.get(&id).map(Region::len)
    }

    /// Regions in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = (RegionId, &Region)> {
        self.by_id.iter().map(|(id, region)| (*id, region))
    }

    /// Ids and lengths, as a blob lists them.
    #[must_use]
    pub fn lens(&self) -> Vec<(RegionId, Bytes)> {
        self.iter().map(|(id, region)| (id, region.len())).collect()
    }

    /// How many regions there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixty_rounds_leave_nothing_behind() {
        let host = Capabilities::host("test");
        let whole = Region::zeroed(20_000).unwrap();
        let mut table = RegionTable::new();
        for round in 0..60 {
            for i in 0..10_000 {
                let id = table.register(whole.part(i, 2).unwrap(), &host).unwrap();
                assert_eq!(id.index(), i);
            }
            assert_eq!(table.generation(), round);
            for i in 0..10_000 {
                table.deregister(RegionId::new(i), 0).unwrap();
            }
            assert!(table.is_empty() && table.by_range.is_empty());
        }
    }

    #[test]
    fn identical_is_refused_and_overlapping_is_not() {
        let host = Capabilities::host("test");
        let whole = Region::zeroed(100).unwrap();
        let mut table = RegionTable::new();
        let first = table.register(whole.clone(), &host).unwrap();
        assert!(
            matches!(table.register(whole.clone(), &host), Err(RegisterError::Duplicate { existing, .. }) if existing == first)
        );
        let inner = table.register(whole.part(0, 50).unwrap(), &host).unwrap();
        assert_eq!((table.len(), table.len_of(inner)), (2, Some(Bytes::new(50))));
        assert!(matches!(table.deregister(first, 1), Err(DeregisterError::Busy { operations: 1, .. })));
        table.deregister(first, 0).unwrap();
        assert!(matches!(table.deregister(first, 1), Err(DeregisterError::Unknown { .. })));
        assert_eq!(table.generation(), 0);
    }
}
