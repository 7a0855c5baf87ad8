//! The checks that every backend runs on a submission before anything is posted.

use kvferry_geometry::batch::{BoundedBatch, Side};
use kvferry_geometry::units::{Bytes, RegionId};

use crate::error::SubmitError;
use crate::types::{Capabilities, OpKind, PeerInfo, Submission};

/// The regions that an admitted submission names on each side, ascending and without repetition.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Named {
    /// Of this endpoint.
    pub ours: Vec<RegionId>,
    /// Of the peer.
    pub peers: Vec<RegionId>,
}

/// Whether a submission may be posted: kind, notification, queue, and for every region that the batch names, that it is
/// registered with the length that the batch was proven against. `ours` gives the length of a registered region of this
/// endpoint.
///
/// # Errors
/// What forbids it; see [`SubmitError`].
pub fn admit(
    submission: &Submission,
    capabilities: &Capabilities,
    in_flight: usize,
    ours: impl Fn(RegionId) -> Option<Bytes>,
    peer: &PeerInfo,
) -> Result<Named, SubmitError> {
    let supported = match submission.kind {
        OpKind::Read => capabilities.read,
        OpKind::Write => capabilities.write,
    };
    if !supported {
        return Err(SubmitError::UnsupportedKind { backend: capabilities.backend, kind: submission.kind });
    }
    if let Some(notify) = &submission.notify
        && notify.len() > capabilities.max_notify
    {
        return Err(SubmitError::NotifyTooLong { got: notify.len(), limit: capabilities.max_notify });
    }
    if in_flight >= capabilities.max_in_flight {
        return Err(SubmitError::QueueFull { limit: capabilities.max_in_flight });
    }
    let peers = |id: RegionId| {
        let at = peer.regions.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        peer.regions.get(at).map(|(_, len)| *len)
    };
    let (our_side, peer_side) = match submission.kind {
        OpKind::Read => (Side::Dst, Side::Src),
        OpKind::Write => (Side::Src, Side::Dst),
    };
    Ok(Named {
        ours: check_side(&submission.batch, our_side, ours)?,
        peers: check_side(&submission.batch, peer_side, peers)?,
    })
}

fn check_side(
    bounded: &BoundedBatch,
    side: Side,
    registered: impl Fn(RegionId) -> Option<Bytes>,
) -> Result<Vec<RegionId>, SubmitError> {
    let lens = match side {
        Side::Src => bounded.src_lens(),
        Side::Dst => bounded.dst_lens(),
    };
    let mut named: Vec<RegionId> = Vec::new();
    for base in bounded.batch().sections().iter().flat_map(|s| s.bases.iter()) {
        let region = match side {
            Side::Src => base.src_region,
            Side::Dst => base.dst_region,
        };
        if named.last() == Some(&region) {
            continue;
        }
        let Err(place) = named.binary_search(&region) else { continue };
        let registered = registered(region).ok_or(SubmitError::UnknownRegion { side, region })?;
        let proven = lens.get(region.index()).copied().unwrap_or(Bytes::ZERO);
        if proven != registered {
            return Err(SubmitError::RegionLength { side, region, proven, registered });
        }
        named.insert(place, region);
    }
    Ok(named)
}
