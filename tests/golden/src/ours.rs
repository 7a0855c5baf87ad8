//! What kvferry moves for a recorded request, as byte runs.

use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::compat::{Compatible, Mismatches};
use kvferry_geometry::peers::{PeerError, PeerMap, PeerOptions};
use kvferry_geometry::plan::{PairPlan, PlanError};
use kvferry_geometry::request::{BoundRequest, RequestErrors};

use crate::blocks::Lists;
use crate::engine::Engine;
use crate::vllm::Run;

/// Descriptors that are taken from a batch at a time.
const BUFFER: usize = 256;

/// kvferry does not carry the pair out, and says why.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The engines can't talk.
    #[error("{0}")]
    Compat(#[from] Mismatches),
    /// The request can't be served.
    #[error("{0}")]
    Request(#[from] RequestErrors),
    /// No peer map.
    #[error("{0}")]
    Peers(#[from] PeerError),
    /// No plan.
    #[error("{0}")]
    Plan(#[from] PlanError),
}

/// Plans a request over all rank pairs; gives the byte runs, in no order.
///
/// # Errors
/// kvferry's refusal.
pub fn planned(
    c: &Compatible,
    src: &Engine,
    dst: &Engine,
    lists: &Lists,
    options: PeerOptions,
) -> Result<Vec<Run>, Refusal> {
    let request = BoundRequest::new(c, lists.request())?;
    let peers = PeerMap::with(c, options, |_, _| 0)?;
    let mut out = Vec::new();
    for pair in peers.pairs() {
        let batch = PairPlan::new(c, &peers, pair.src(), pair.dst())?.resolve(&request)?;
        let (src_rank, dst_rank) = (pair.src().index(), pair.dst().index());
        let base = |bases: &[u64], rank: usize| bases.get(rank).copied().unwrap_or(0);
        let (from, to) = (base(&src.bases, src_rank), base(&dst.bases, dst_rank));
        let mut cursor = batch.cursor();
        let mut buffer = [Descriptor::default(); BUFFER];
        loop {
            let n = cursor.fill(&mut buffer);
            if n == 0 {
                break;
            }
            // Every rank has one region.
            let run = |d: &Descriptor| {
                let (src, dst) = (from + d.src_offset, to + d.dst_offset);
                Run { src_rank, src, dst_rank, dst, len: d.len }
            };
            out.extend(buffer[..n].iter().map(run));
        }
    }
    Ok(out)
}
