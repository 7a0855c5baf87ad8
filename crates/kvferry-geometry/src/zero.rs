//! The destination's bytes beyond the moved tokens, which delivery zeroes.
//!
//! A block that is only partly filled would otherwise keep what an earlier request left in it.

use crate::batch::{Batch, Cursor, Descriptor};
use crate::manifest::Manifest;
use crate::plan::{PairPlan, PlanError};
use crate::request::BoundRequest;
use crate::units::{Bytes, RankId, RegionId};

/// Where one destination rank's tokens lie.
#[derive(Clone, Debug)]
pub struct ZeroPlan {
    plan: PairPlan,
}

impl ZeroPlan {
    /// The plan of one rank.
    ///
    /// # Errors
    /// [`PlanError::UnknownRank`] where the engine has no such rank.
    pub fn new(dst: &Manifest, rank: RankId) -> Result<Self, PlanError> {
        Ok(Self { plan: PairPlan::of_rank(dst, rank)? })
    }

    /// The ranges that a request zeroes on this rank.
    ///
    /// # Errors
    /// [`PlanError::ForeignRequest`] where the request was bound to another destination engine.
    pub fn resolve(&self, request: &BoundRequest) -> Result<ZeroBatch, PlanError> {
        Ok(ZeroBatch { batch: self.plan.resolve_zero(request)? })
    }
}

/// Byte ranges of one rank to fill with zeros.
#[derive(Clone, Debug, Default)]
pub struct ZeroBatch {
    batch: Batch,
}

/// One range to fill with zeros.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ZeroRange {
    /// The region.
    pub region: RegionId,
    /// Byte offset in the region.
    pub offset: u64,
    /// Bytes, at least 1.
    pub len: u64,
}

impl ZeroBatch {
    /// Bytes in all.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.batch.bytes()
    }

    /// The ranges, without overlap.
    #[must_use]
    pub fn ranges(&self) -> ZeroRanges<'_> {
        ZeroRanges { cursor: self.batch.cursor() }
    }
}

/// Iterator over the ranges of a [`ZeroBatch`].
#[derive(Clone, Debug)]
pub struct ZeroRanges<'a> {
    cursor: Cursor<'a>,
}

impl Iterator for ZeroRanges<'_> {
    type Item = ZeroRange;

    fn next(&mut self) -> Option<ZeroRange> {
        let mut one = [Descriptor::default()];
        (self.cursor.fill(&mut one) == 1).then(|| {
            let Descriptor { dst_region, dst_offset, len, .. } = one[0];
            ZeroRange { region: dst_region, offset: dst_offset, len }
        })
    }
}
