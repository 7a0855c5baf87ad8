//! A request planned, carried out in memory and compared, in one call.

use kvferry_geometry::batch::Batch;
use kvferry_geometry::compat::Compatible;
use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::plan::PairPlan;
use kvferry_geometry::request::{BoundRequest, Request};
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::RankId;
use kvferry_geometry::zero::ZeroPlan;

use crate::compare::Verdict;
use crate::execute::{Execution, Expansion};
use crate::transfer::Transfer;

/// What happened in a transfer whose every byte is right.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Bytes by fate.
    pub verdict: Verdict,
    /// Sums over all batches.
    pub expansion: Expansion,
}

/// Plans a request, moves and zeroes what the plans say, and compares every byte of the consumer.
///
/// # Errors
/// The planner's refusal, or what is wrong, in words.
pub fn prove(compatible: &Compatible, peers: &PeerMap, request: &Request) -> Result<Outcome, String> {
    let bound = BoundRequest::new(compatible, request.clone()).map_err(|e| e.to_string())?;
    let mut batches = Vec::new();
    for pair in peers.pairs() {
        let plan = PairPlan::new(compatible, peers, pair.src(), pair.dst()).map_err(|e| e.to_string())?;
        batches.push((pair.src(), pair.dst(), plan.resolve(&bound).map_err(|e| e.to_string())?));
    }
    let transfer = Transfer::of(compatible.src(), compatible.dst(), request);
    carry_out(&transfer, &bound, &batches, Place::Direct)
}

/// Moves what some batches say (source rank, destination rank, batch), directly or through a buffer at one side, zeroes what a
/// request leaves, and compares.
///
/// # Errors
/// What is wrong, in words.
pub fn carry_out(
    transfer: &Transfer<'_>,
    bound: &BoundRequest,
    batches: &[(RankId, RankId, Batch)],
    place: Place,
) -> Result<Outcome, String> {
    let mut run = Execution::new(transfer).map_err(|e| e.to_string())?;
    let mut expansion = Expansion::default();
    for (src, dst, batch) in batches {
        let seen = match place {
            Place::Direct => run.run(*src, *dst, batch),
            _ => run.run_staged(*src, *dst, batch, place),
        };
        let seen = seen.map_err(|e| e.to_string())?;
        expansion.bytes += seen.bytes;
        expansion.runs += seen.runs;
        expansion.descriptors += seen.descriptors;
        expansion.unmerged += seen.unmerged;
    }
    for (rank, _) in (0u32..).map(RankId::new).zip(transfer.dst.ranks()) {
        let plan = ZeroPlan::new(transfer.dst, rank).map_err(|e| e.to_string())?;
        for range in plan.resolve(bound).map_err(|e| e.to_string())?.ranges() {
            run.zero(rank, range.region, range.offset, range.len).map_err(|e| e.to_string())?;
        }
    }
    let verdict = run.finish().map_err(|e| e.to_string())?;
    Ok(Outcome { verdict, expansion })
}
