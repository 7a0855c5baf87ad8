//! Our registrations: what peers may do with each, and when the memory of one that was given up may really go.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};

use kvferry_geometry::units::RegionId;
use kvferry_transport::table::RegionTable;
use kvferry_transport::{Capabilities, DeregisterError, Region, RegisterError};

use crate::board::{Board, PeerBoard, Slots};
use crate::frame::{Access, Grant};
use crate::window;

/// Our registrations.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) board: Board,
    table: RegionTable,
    read_only: BTreeSet<RegionId>,
    /// How many operations of ours name a region.
    named: HashMap<RegionId, usize>,
    graves: Vec<Grave>,
    /// Read by peers to see whether the kernel lets them copy from us, and whether we are still we.
    probe: Box<[u8; 16]>,
}

/// A region that was given up while peers may have been inside a slice.
#[derive(Debug)]
struct Grave {
    region: Region,
    waits: Vec<(u64, Slots)>,
}

impl Local {
    pub(crate) fn new(board: Board, probe: [u8; 16]) -> Self {
        Self {
            board,
            table: RegionTable::new(),
            read_only: BTreeSet::new(),
            named: HashMap::new(),
            graves: Vec::new(),
            probe: Box::new(probe),
        }
    }

    pub(crate) fn table(&self) -> &RegionTable {
        &self.table
    }

    /// Where the probe word stands, and the word.
    pub(crate) fn probe(&self) -> (u64, [u8; 16]) {
        (self.probe.as_ptr().expose_provenance() as u64, *self.probe)
    }

    /// How many regions are not backed by a memfd.
    pub(crate) fn plain(&self) -> u32 {
        let plain = self.table.iter().filter(|(_, region)| region.share().is_none()).count();
        u32::try_from(plain).unwrap_or(u32::MAX)
    }

    pub(crate) fn register(
        &mut self,
        region: Region,
        read_only: bool,
        other_users: bool,
        capabilities: &Capabilities,
    ) -> Result<RegionId, RegisterError> {
        self.table.check(&region, capabilities)?;
        if let Some((fd, offset)) = region.share() {
            // A peer would refuse it later; the caller can still do something about it now.
            let checked = window::check(fd, offset, region.len().get());
            let checked = checked.and_then(|()| if other_users { window::check_private(fd) } else { Ok(()) });
            checked.map_err(|e| RegisterError::Refused {
                backend: capabilities.backend,
                len: region.len(),
                reason: format!("{e}; or register it without a descriptor, to be copied by process_vm_readv/writev"),
            })?;
        }
        let id = self.table.register(region, capabilities)?;
        if read_only {
            self.read_only.insert(id);
        }
        self.board.open(id, self.table.generation());
        Ok(id)
    }

    /// Ends a registration. The region is kept until every guest that was inside a slice has left it.
    pub(crate) fn deregister<'a>(
        &mut self,
        id: RegionId,
        guests: impl Iterator<Item = (u64, &'a PeerBoard)>,
    ) -> Result<(), DeregisterError> {
        let region = self.table.deregister(id, self.named.get(&id).copied().unwrap_or(0))?;
        self.read_only.remove(&id);
        self.board.close(id);
        self.keep(region, guests);
        Ok(())
    }

    /// Ends a registration whatever names it, because the endpoint ends. Only what peers can't map is kept for them.
    pub(crate) fn abandon<'a>(&mut self, id: RegionId, guests: impl Iterator<Item = (u64, &'a PeerBoard)>) {
        let Ok(region) = self.table.deregister(id, 0) else { return };
        self.board.close(id);
        if region.share().is_none() {
            self.keep(region, guests);
        }
    }

    fn keep<'a>(&mut self, region: Region, guests: impl Iterator<Item = (u64, &'a PeerBoard)>) {
        let inside = |(key, board): (u64, &PeerBoard)| {
            let slots = board.slots();
            (slots.iter().any(|s| s % 2 == 1)).then_some((key, slots))
        };
        let waits: Vec<_> = guests.filter_map(inside).collect();
        if !waits.is_empty() {
            self.graves.push(Grave { region, waits });
        }
    }

    /// Lets go of given-up regions that nobody can be inside any more; true if some are left. `board` gives a guest's board
    /// while it is connected.
    pub(crate) fn bury<'a>(&mut self, board: impl Fn(u64) -> Option<&'a PeerBoard>) -> bool {
        self.graves.retain_mut(|grave| {
            grave.waits.retain(|(key, then)| board(*key).is_some_and(|b| !b.passed(then)));
            !grave.waits.is_empty()
        });
        !self.graves.is_empty()
    }

    /// Never lets go of what peers may still be inside: the last resort when the endpoint ends.
    pub(crate) fn leak_graves(&mut self) {
        for grave in self.graves.drain(..) {
            std::mem::forget(grave.region);
        }
    }

    pub(crate) fn name(&mut self, regions: &[RegionId]) {
        for id in regions {
            *self.named.entry(*id).or_default() += 1;
        }
    }

    pub(crate) fn unname(&mut self, regions: &[RegionId]) {
        for id in regions {
            if let Some(count) = self.named.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    self.named.remove(id);
                }
            }
        }
    }

    /// What a peer gets that asks for a region.
    pub(crate) fn grant(
        &self,
        generation: u64,
        id: RegionId,
        access: Access,
        writes: bool,
    ) -> (Grant, Option<OwnedFd>) {
        let Some(region) = self.table.get(id).filter(|_| generation == self.table.generation()) else {
            return (Grant::Stale, None);
        };
        if access == Access::Write && (!writes || self.read_only.contains(&id)) {
            return (Grant::Denied(format!("writes to region {id} are not granted")), None);
        }
        let len = region.len().get();
        let Some((fd, offset)) = region.share() else {
            return (Grant::Address { start: region.as_ptr().expose_provenance() as u64, len }, None);
        };
        if access == Access::Write && window::is_write_sealed(fd) {
            let text = format!("the memfd of region {id} is sealed against writes of others");
            return (Grant::Denied(text), None);
        }
        let passed = match access {
            Access::Read => window::read_only(fd).map_err(|e| e.to_string()),
            Access::Write => fd.as_fd().try_clone_to_owned().map_err(|e| e.to_string()),
        };
        match passed {
            Ok(fd) => (Grant::Map { offset, len }, Some(fd)),
            Err(reason) => (Grant::Denied(reason), None),
        }
    }
}
