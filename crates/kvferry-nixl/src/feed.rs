//! A batch as pieces for NIXL, as many as fit into a request at a time.

use std::sync::Arc;

use kvferry_geometry::batch::{BoundedBatch, Cursor, Descriptor};
use kvferry_geometry::units::RegionId;
use kvferry_transport::OpKind;

use crate::config::Cutting;
use crate::lane::Place;
use crate::shared::Ours;
use crate::sys::{Fail, List};

/// Descriptors that are expanded at a time.
const AHEAD: usize = 256;

/// The walk over one operation's batch.
pub(crate) struct Feed {
    // Dropped before what it walks over.
    cursor: Cursor<'static>,
    _batch: Arc<BoundedBatch>,
    ahead: Vec<Descriptor>,
    /// The next of `ahead`; what is done of it was cut off already.
    at: usize,
}

/// The two sides' lists of one request.
pub(crate) struct Lists {
    pub(crate) local: List,
    pub(crate) remote: List,
}

/// What was put into the lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Filled {
    pub(crate) bytes: u64,
    pub(crate) descriptors: usize,
}

/// Where the descriptors' regions are.
pub(crate) struct Map<'a> {
    pub(crate) kind: OpKind,
    /// Ascending.
    pub(crate) ours: &'a [Ours],
    /// Ascending.
    pub(crate) theirs: &'a [(RegionId, Place)],
}

impl Feed {
    pub(crate) fn new(batch: Arc<BoundedBatch>) -> Self {
        let pinned: *const BoundedBatch = Arc::as_ptr(&batch);
        // SAFETY: the batch lies in the allocation of the `Arc`, which this structure holds for as long as the cursor lives: nothing moves
        // it, and nobody has it to change, as it is shared. The longer lifetime does not leave this structure.
        let cursor = unsafe { &*pinned }.batch().cursor();
        Self { cursor, _batch: batch, ahead: Vec::new(), at: 0 }
    }

    /// Whether nothing is left.
    pub(crate) fn is_done(&mut self) -> bool {
        if self.at == self.ahead.len() {
            self.ahead.resize(AHEAD, Descriptor::default());
            let n = self.cursor.fill(&mut self.ahead);
            self.ahead.truncate(n);
            self.at = 0;
        }
        self.ahead.is_empty()
    }

    /// Puts the next pieces into empty lists, within the limits of a request. The batch's proof covers every offset, and `admit` has
    /// compared the lengths that it was proven against: so every piece lies in its region.
    pub(crate) fn fill(&mut self, lists: &mut Lists, map: &Map<'_>, cutting: &Cutting) -> Result<Filled, Fail> {
        lists.local.clear()?;
        lists.remote.clear()?;
        let mut filled = Filled::default();
        let (mut ours, mut theirs) = (None, None);
        while filled.descriptors < cutting.request_descriptors
            && filled.bytes < cutting.request_bytes
            && !self.is_done()
        {
            let Some(piece) = self.ahead.get_mut(self.at) else { break };
            let len = piece.len.min(cutting.request_bytes - filled.bytes);
            let ((our_id, our_offset), (their_id, their_offset)) = match map.kind {
                OpKind::Read => ((piece.dst_region, piece.dst_offset), (piece.src_region, piece.src_offset)),
                OpKind::Write => ((piece.src_region, piece.src_offset), (piece.dst_region, piece.dst_offset)),
            };
            let (address, serial) = cached(&mut ours, our_id, || map.our_place(our_id))?;
            let (their_address, their_serial) = cached(&mut theirs, their_id, || map.their_place(their_id))?;
            let size = usize::try_from(len).map_err(|_| Fail::InvalidParam)?;
            lists.local.add(place(address, our_offset)?, size, serial)?;
            lists.remote.add(place(their_address, their_offset)?, size, their_serial)?;
            filled.descriptors += 1;
            filled.bytes += len;
            if len == piece.len {
                self.at += 1;
            } else {
                piece.len -= len;
                piece.src_offset += len;
                piece.dst_offset += len;
            }
        }
        Ok(filled)
    }
}

impl Map<'_> {
    fn our_place(&self, id: RegionId) -> Option<(u64, u64)> {
        let at = self.ours.binary_search_by_key(&id, |o| o.id).ok()?;
        self.ours.get(at).map(|o| (o.region.address() as u64, o.serial))
    }

    fn their_place(&self, id: RegionId) -> Option<(u64, u64)> {
        let at = self.theirs.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.theirs.get(at).map(|(_, place)| (place.address, place.serial))
    }
}

/// The place of a region, looked up only where it is another than the last one.
fn cached(
    last: &mut Option<(RegionId, (u64, u64))>,
    id: RegionId,
    look_up: impl FnOnce() -> Option<(u64, u64)>,
) -> Result<(u64, u64), Fail> {
    match last {
        Some((known, place)) if *known == id => Ok(*place),
        _ => {
            let place = look_up().ok_or(Fail::NotFound)?;
            *last = Some((id, place));
            Ok(place)
        }
    }
}

fn place(address: u64, offset: u64) -> Result<usize, Fail> {
    address.checked_add(offset).and_then(|a| usize::try_from(a).ok()).ok_or(Fail::InvalidParam)
}
