//! The step between "which bytes" and "move them": the proof that a batch stays inside what is registered.
//!
//! The peer's lengths are those that the lane knows, from the peer's transport blob; the others are our own
//! registrations. So a peer whose manifest promises more than it registered is found here, before anything is posted.

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, BoundedBatch, BoundsError};
use kvferry_transport::PeerInfo;

use crate::cache::LocalCache;

/// Proves a batch that is written from `local` into `peer`.
///
/// # Errors
/// Which section leaves which region, and by how much.
pub fn bind_write(batch: Batch, local: &LocalCache, peer: &PeerInfo) -> Result<Arc<BoundedBatch>, BoundsError> {
    Ok(Arc::new(batch.check(local.lens(), &peer.lens())?))
}

/// Proves a batch that is read from `peer` into `local`.
///
/// # Errors
/// Which section leaves which region, and by how much.
pub fn bind_read(batch: Batch, peer: &PeerInfo, local: &LocalCache) -> Result<Arc<BoundedBatch>, BoundsError> {
    Ok(Arc::new(batch.check(&peer.lens(), local.lens())?))
}
