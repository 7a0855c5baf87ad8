//! The endpoints of this process that have not ended: their peers in the same process can't learn it from the process's end.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use kvferry_transport::EndpointId;

static LIVE: Mutex<BTreeSet<EndpointId>> = Mutex::new(BTreeSet::new());

pub(crate) fn begin(endpoint: EndpointId) {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner).insert(endpoint);
}

pub(crate) fn end(endpoint: EndpointId) {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner).remove(&endpoint);
}

pub(crate) fn is_live(endpoint: EndpointId) -> bool {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner).contains(&endpoint)
}
