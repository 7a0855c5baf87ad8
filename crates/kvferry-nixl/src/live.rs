//! The endpoints of this process that have not ended: their peers in the same process can't learn it from the process's end.
//!
//! An endpoint that is dropped takes no connections from then on, but it has ended only when its thread has: until then requests of
//! its own may be in progress on others' memory.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvferry_transport::EndpointId;

/// Those that have not ended, and whether they take connections.
static LIVE: Mutex<BTreeMap<EndpointId, bool>> = Mutex::new(BTreeMap::new());

fn live() -> MutexGuard<'static, BTreeMap<EndpointId, bool>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Held by the thread of an endpoint, which ends with it, also by a panic.
pub(crate) struct Live(EndpointId);

impl Live {
    pub(crate) fn begin(endpoint: EndpointId) -> Self {
        live().insert(endpoint, true);
        Self(endpoint)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        live().remove(&self.0);
    }
}

/// An endpoint takes no connections any more.
pub(crate) fn close(endpoint: EndpointId) {
    if let Some(open) = live().get_mut(&endpoint) {
        *open = false;
    }
}

pub(crate) fn takes_connections(endpoint: EndpointId) -> bool {
    live().get(&endpoint).copied().unwrap_or(false)
}

pub(crate) fn has_ended(endpoint: EndpointId) -> bool {
    !live().contains_key(&endpoint)
}
