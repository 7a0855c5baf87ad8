//! Comparing one source's bytes by digests of both sides, in two rounds: all of it in large pieces, then the first
//! pieces that differ in small ones, so that a difference can be named.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvferry_geometry::batch::{BoundedBatch, Side};
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::units::{BlockId, ItemId, Name, RankId};
use kvferry_proto::peer::{PieceDigest, Window};
use kvferry_proto::rank::{BadBlock, MAX_BAD_BLOCKS};
use kvferry_transport::Region;

use crate::locate::cell_at;
use crate::runs::{RunDigester, for_each_run};

/// The most pieces of the first round, and their smallest size.
const COARSE_PIECES: u64 = 4096;
const COARSE_MIN: u64 = 64 << 10;
/// Pieces of the first round that are looked at closely, and the pieces of each.
const CLOSE: usize = 16;
const FINE_PIECES: u64 = 1024;
const FINE_MIN: u64 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Round {
    Coarse,
    Fine,
}

#[derive(Debug)]
enum Ours {
    Working(Box<RunDigester>),
    Done(Vec<PieceDigest>),
}

/// What a slice of work led to.
#[derive(Debug)]
pub(super) enum Progress {
    /// More work, or the producer's digests are awaited.
    Working,
    /// The second round begins with these windows.
    Ask(Vec<Window>),
    /// All pieces are equal.
    Equal,
    /// These pieces differ.
    Differ(Vec<Window>),
}

#[derive(Debug)]
pub(super) struct Compare {
    batch: Arc<BoundedBatch>,
    round: Round,
    windows: Vec<Window>,
    ours: Ours,
    theirs: Option<Vec<PieceDigest>>,
}

impl Compare {
    /// Begins the first round: gives the windows to ask the producer for.
    pub(super) fn start(batch: Arc<BoundedBatch>) -> Result<(Self, Vec<Window>), String> {
        let len = batch.batch().bytes().get();
        let piece = len.div_ceil(COARSE_PIECES).next_power_of_two().max(COARSE_MIN);
        let windows = vec![Window { start: 0, len, piece }];
        let ours = digester(&batch, &windows)?;
        Ok((Self { batch, round: Round::Coarse, windows: windows.clone(), ours, theirs: None }, windows))
    }

    /// Whether [`advance`](Self::advance) would do something.
    pub(super) fn has_work(&self) -> bool {
        matches!(self.ours, Ours::Working(_)) || self.theirs.is_some()
    }

    /// The producer's digests of the windows last asked for.
    pub(super) fn on_theirs(&mut self, pieces: Vec<PieceDigest>) {
        self.theirs = Some(pieces);
    }

    /// Digests a slice of our own side; judges when both sides are there.
    pub(super) fn advance(&mut self, regions: &[Region], budget: u64) -> Result<Progress, String> {
        if let Ours::Working(digester) = &mut self.ours {
            if !digester.advance(regions, budget).map_err(|e| e.to_string())? {
                return Ok(Progress::Working);
            }
            let done = std::mem::replace(&mut self.ours, Ours::Done(Vec::new()));
            if let Ours::Working(digester) = done {
                self.ours = Ours::Done(digester.finish());
            }
        }
        let (Ours::Done(ours), Some(theirs)) = (&self.ours, self.theirs.take()) else { return Ok(Progress::Working) };
        if ours.len() != theirs.len() {
            return Err(format!("the producer sent {} digests, {} were asked for", theirs.len(), ours.len()));
        }
        let bad: Vec<Window> = pieces_of(&self.windows)
            .zip(ours.iter().zip(&theirs))
            .filter(|(_, (a, b))| a != b)
            .map(|(window, _)| window)
            .collect();
        match self.round {
            _ if bad.is_empty() && self.round == Round::Coarse => Ok(Progress::Equal),
            // The pieces that differed a moment ago now don't: the bytes were changing.
            Round::Fine if bad.is_empty() => Ok(Progress::Differ(self.windows.clone())),
            Round::Fine => Ok(Progress::Differ(bad)),
            Round::Coarse => {
                let close = |w: &Window| {
                    let piece = w.len.div_ceil(FINE_PIECES).next_power_of_two().max(FINE_MIN);
                    Window { piece, ..*w }
                };
                self.windows = bad.iter().take(CLOSE).map(close).collect();
                self.round = Round::Fine;
                self.ours = digester(&self.batch, &self.windows)?;
                Ok(Progress::Ask(self.windows.clone()))
            }
        }
    }

    /// The destination's items and blocks that have a byte in these pieces.
    pub(super) fn name(&self, src: RankId, pieces: &[Window], own: &Manifest, rank: RankId) -> Vec<BadBlock> {
        let Some(rank) = own.rank(rank) else { return Vec::new() };
        let mut found: BTreeSet<(Option<ItemId>, BlockId)> = BTreeSet::new();
        for piece in pieces {
            let walked = for_each_run(&self.batch, piece.start, piece.len, |d| {
                let mut at = 0;
                while at < d.len {
                    let step = match cell_at(own.spec(), rank, d.dst_region, d.dst_offset + at) {
                        Some((item, block, rest)) => {
                            found.insert((Some(item), block));
                            rest.max(1)
                        }
                        None => {
                            found.insert((None, BlockId::ZERO));
                            d.len
                        }
                    };
                    at += step;
                }
                if found.len() < MAX_BAD_BLOCKS { Ok(()) } else { Err(()) }
            });
            if walked.is_err() {
                break;
            }
        }
        let name = |id: Option<ItemId>| {
            id.and_then(|id| own.spec().get(id)).map_or_else(|| Name::new("(unknown)"), |item| item.name.clone())
        };
        found.into_iter().take(MAX_BAD_BLOCKS).map(|(id, block)| BadBlock { src, item: name(id), block }).collect()
    }
}

fn digester(batch: &Arc<BoundedBatch>, windows: &[Window]) -> Result<Ours, String> {
    let digester = RunDigester::new(batch.clone(), Side::Dst, windows.to_vec()).map_err(|e| e.to_string())?;
    Ok(Ours::Working(Box::new(digester)))
}

/// The pieces of windows, each as a window of one piece.
fn pieces_of(windows: &[Window]) -> impl Iterator<Item = Window> {
    windows.iter().flat_map(|w| {
        (0..w.len.div_ceil(w.piece)).map(|i| {
            let start = i * w.piece;
            let len = w.piece.min(w.len - start);
            Window { start: w.start + start, len, piece: len }
        })
    })
}
