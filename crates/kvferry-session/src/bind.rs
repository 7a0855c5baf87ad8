//! The step between "which bytes" and "move them": the proof that a batch stays inside what is registered.
//!
//! The source's lengths are those that the lane knows, from the peer's transport blob; the destination's are our own
//! registrations. So a peer whose manifest promises more than it registered is found here, before anything is posted.

use std::sync::Arc;

use kvferry_geometry::batch::{Batch, BoundedBatch, BoundsError};
use kvferry_transport::PeerInfo;

use crate::cache::LocalCache;

/// Proves a batch that is read from `peer` into `local`.
///
/// # Errors
/// Which section leaves which region, and by how much.
pub fn bind_read(batch: Batch, peer: &PeerInfo, local: &LocalCache) -> Result<Arc<BoundedBatch>, BoundsError> {
    Ok(Arc::new(batch.check(&peer.lens(), &local.lens())?))
}
