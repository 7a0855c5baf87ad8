//! What the endpoints of one process share.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use kvferry_geometry::units::RegionId;

use super::faults::MemFaults;
use super::signal::Signal;
use super::{BACKEND, MemTransport};
use crate::error::TransferError;
use crate::rng::Rng;
use crate::table::RegionTable;
use crate::types::EndpointId;

/// The most notifications that wait for one endpoint to step; more hold their operations back.
const INBOX: usize = 1 << 16;

/// A network inside one process. Cheap to clone; clones are the same network.
#[derive(Clone, Debug)]
pub struct MemNetwork {
    name: &'static str,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    rng: Rng,
    endpoints: BTreeMap<EndpointId, Arc<Shared>>,
}

impl MemNetwork {
    /// A network without endpoints; the seed decides all ids and all drawn times.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::named(BACKEND, seed)
    }

    /// A network whose endpoints are of a backend of another name, for tests of endpoints that have several.
    #[must_use]
    pub fn named(name: &'static str, seed: u64) -> Self {
        Self { name, state: Arc::new(Mutex::new(State { rng: Rng::new(seed), endpoints: BTreeMap::new() })) }
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// A new endpoint without faults.
    ///
    /// # Errors
    /// If the process has no file descriptors left for its wake source.
    pub fn endpoint(&self) -> io::Result<MemTransport> {
        let mut id = [0; 16];
        id.copy_from_slice(&self.lock().rng.bytes(16));
        self.endpoint_as(EndpointId::new(id))
    }

    /// A new endpoint without faults, under an id that its owner drew.
    ///
    /// # Errors
    /// As for [`endpoint`](Self::endpoint), and if there is an endpoint of this id.
    pub fn endpoint_as(&self, id: EndpointId) -> io::Result<MemTransport> {
        let signal = Signal::new()?;
        let mut state = self.lock();
        if state.endpoints.contains_key(&id) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("endpoint {id} is in this network already"),
            ));
        }
        let shared = Arc::new(Shared {
            id,
            access: RwLock::new(Access { alive: true, ..Access::default() }),
            inbox: Mutex::new(VecDeque::new()),
            faults: Mutex::new(Arc::default()),
            signal,
        });
        state.endpoints.insert(shared.id, shared.clone());
        let rng = Rng::new(state.rng.next_u64());
        Ok(MemTransport::new(self.clone(), shared, rng))
    }

    /// Sets the faults of an endpoint from now on; false if it is gone.
    pub fn set_faults(&self, endpoint: EndpointId, faults: MemFaults) -> bool {
        let Some(shared) = self.find(endpoint) else { return false };
        *shared.faults.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(faults);
        shared.signal.raise();
        true
    }

    /// Lets an endpoint die, as if its process had been killed: no more memory of it is touched at return, and its peers
    /// find out. False if it is gone already.
    pub fn kill(&self, endpoint: EndpointId) -> bool {
        let mut state = self.lock();
        let Some(shared) = state.endpoints.remove(&endpoint) else { return false };
        let others: Vec<_> = state.endpoints.values().cloned().collect();
        drop(state);
        let mut access = shared.write();
        access.alive = false;
        access.table = RegionTable::new();
        drop(access);
        shared.signal.raise();
        others.iter().for_each(|other| other.signal.raise());
        true
    }

    pub(super) fn find(&self, endpoint: EndpointId) -> Option<Arc<Shared>> {
        self.lock().endpoints.get(&endpoint).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of an endpoint that its peers reach.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: EndpointId,
    /// Held for reading while a peer moves a slice, for writing to take back access: so access is excluded at return.
    access: RwLock<Access>,
    inbox: Mutex<VecDeque<Notice>>,
    faults: Mutex<Arc<MemFaults>>,
    pub(super) signal: Signal,
}

/// Who may touch what.
#[derive(Debug, Default)]
pub(super) struct Access {
    pub(super) alive: bool,
    pub(super) table: RegionTable,
    pub(super) revoked: BTreeSet<RegionId>,
    pub(super) banned: BTreeSet<EndpointId>,
}

impl Access {
    /// Whether a peer that connected in `generation` may touch `regions`.
    pub(super) fn check(&self, peer: EndpointId, generation: u64, regions: &[RegionId]) -> Result<(), TransferError> {
        for &region in regions {
            if self.table.generation() != generation || self.table.get(region).is_none() {
                return Err(TransferError::Stale { region });
            }
            if self.banned.contains(&peer) || self.revoked.contains(&region) {
                return Err(TransferError::Revoked { region });
            }
        }
        Ok(())
    }
}

/// A notification under way.
#[derive(Debug)]
pub(super) struct Notice {
    pub(super) from: EndpointId,
    pub(super) payload: Vec<u8>,
    /// How long it is still under way, counted from when the receiver first sees it.
    pub(super) delay: Duration,
}

impl Shared {
    pub(super) fn read(&self) -> RwLockReadGuard<'_, Access> {
        self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, Access> {
        self.access.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn faults(&self) -> Arc<MemFaults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Hands the notice back if the inbox is full.
    pub(super) fn deliver(&self, notice: Notice) -> Result<(), Notice> {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        if inbox.len() >= INBOX {
            return Err(notice);
        }
        inbox.push_back(notice);
        drop(inbox);
        self.signal.raise();
        Ok(())
    }

    pub(super) fn take_notices(&self) -> VecDeque<Notice> {
        std::mem::take(&mut *self.inbox.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
