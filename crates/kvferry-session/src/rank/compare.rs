//! Comparing one source's bytes by digests of both sides, in two rounds: all of it in large pieces, then the first
//! pieces that differ in small ones, so that a difference can be named. Naming, like digesting, is done a slice at a time:
//! how much there is to name is the producer's to say.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use kvferry_geometry::batch::{BoundedBatch, Side};
use kvferry_geometry::manifest::{Manifest, RankManifest};
use kvferry_geometry::request::DstGroup;
use kvferry_geometry::units::{BlockId, GroupId, ItemId, Name, RankId};
use kvferry_proto::peer::{PieceDigest, Window};
use kvferry_proto::rank::{BadBlock, MAX_BAD_BLOCKS};
use kvferry_transport::Region;
use kvferry_transport::strips::Strips;

use crate::locate::cell_at;
use crate::runs::RunDigester;

/// The most pieces of the first round, and their smallest size.
const COARSE_PIECES: u64 = 4096;
const COARSE_MIN: u64 = 64 << 10;
/// Pieces of the first round that are looked at closely, and the pieces of each.
const CLOSE: usize = 16;
const FINE_PIECES: u64 = 1024;
const FINE_MIN: u64 = 64;
/// Bytes whose cells are named at a time.
const NAMED: u64 = 64 << 10;

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
    /// These of the destination's blocks differ.
    Differ(Vec<BadBlock>),
}

#[derive(Debug)]
pub(super) struct Compare {
    batch: Arc<BoundedBatch>,
    round: Round,
    windows: Vec<Window>,
    ours: Ours,
    theirs: Option<Vec<PieceDigest>>,
    naming: Option<Naming>,
}

/// The cells of the pieces that differ are being named.
#[derive(Debug)]
struct Naming {
    left: VecDeque<Range<u64>>,
    found: BTreeSet<(Option<ItemId>, BlockId)>,
    /// The request's blocks and slots at the destination.
    listed: Option<HashSet<(GroupId, BlockId)>>,
}

impl Compare {
    /// Begins the first round: gives the windows to ask the producer for.
    pub(super) fn start(batch: Arc<BoundedBatch>) -> Result<(Self, Vec<Window>), String> {
        let len = batch.bytes().get();
        let piece = len.div_ceil(COARSE_PIECES).next_power_of_two().max(COARSE_MIN);
        let windows = vec![Window { start: 0, len, piece }];
        let ours = digester(&batch, &windows)?;
        Ok((Self { batch, round: Round::Coarse, windows: windows.clone(), ours, theirs: None, naming: None }, windows))
    }

    /// Whether [`advance`](Self::advance) would do something.
    pub(super) fn has_work(&self) -> bool {
        matches!(self.ours, Ours::Working(_)) || self.theirs.is_some() || self.naming.is_some()
    }

    /// The producer's digests of the windows last asked for.
    pub(super) fn on_theirs(&mut self, pieces: Vec<PieceDigest>) {
        self.theirs = Some(pieces);
    }

    /// Digests a slice of our own side; judges when both sides are there; names a slice of what differs, in `own`'s `rank`
    /// as the producer's `src` filled it. `written` are the request's groups at the destination.
    pub(super) fn advance(
        &mut self,
        regions: &[Region],
        budget: u64,
        src: RankId,
        (own, rank): (&Manifest, RankId),
        written: &[DstGroup],
    ) -> Result<Progress, String> {
        if let Some(naming) = &mut self.naming {
            let Some(rank) = own.rank(rank) else { return Ok(Progress::Differ(Vec::new())) };
            let done = naming.advance(&self.batch, own, rank, written);
            return Ok(if done { Progress::Differ(naming.names(src, own)) } else { Progress::Working });
        }
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
            // Where the pieces that differed a moment ago now don't, the bytes were changing.
            Round::Fine => {
                let left = merged(if bad.is_empty() { &self.windows } else { &bad });
                self.naming = Some(Naming { left, found: BTreeSet::new(), listed: None });
                Ok(Progress::Working)
            }
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
}

impl Naming {
    /// Looks at the cells of some more bytes; true when all were seen or enough were found.
    fn advance(&mut self, batch: &BoundedBatch, own: &Manifest, rank: &RankManifest, written: &[DstGroup]) -> bool {
        let mut budget = NAMED;
        let listed = self.listed.get_or_insert_with(|| listed(written));
        // Where groups share memory, the byte is that of the group whose block it is.
        let of_group = |item, block| listed.contains(&(own.group_of(item), block));
        while let Some(range) = self.left.front_mut() {
            let take = (range.end - range.start).min(budget);
            let mut strips = Strips::new(batch, range.start..range.start + take);
            while let Some(strip) = strips.next_within(take) {
                for i in 0..strip.count {
                    let start = strip.dst_offset + i * strip.dst_stride;
                    let mut at = 0;
                    while at < strip.run {
                        let (cell, step) = match cell_at(own.spec(), rank, strip.dst_region, start + at, of_group) {
                            Some((item, block, rest)) => ((Some(item), block), rest.max(1)),
                            None => ((None, BlockId::ZERO), strip.run),
                        };
                        self.found.insert(cell);
                        at += step;
                    }
                }
            }
            range.start += take;
            budget -= take;
            if range.start >= range.end {
                self.left.pop_front();
            }
            if self.found.len() >= MAX_BAD_BLOCKS {
                return true;
            }
            if budget == 0 {
                break;
            }
        }
        self.left.is_empty()
    }

    fn names(&self, src: RankId, own: &Manifest) -> Vec<BadBlock> {
        let name = |id: Option<ItemId>| {
            id.and_then(|id| own.spec().get(id)).map_or_else(|| Name::new("(unknown)"), |item| item.name.clone())
        };
        let bad = |&(id, block): &(Option<ItemId>, BlockId)| BadBlock { src, item: name(id), block };
        self.found.iter().take(MAX_BAD_BLOCKS).map(bad).collect()
    }
}

fn listed(groups: &[DstGroup]) -> HashSet<(GroupId, BlockId)> {
    let of_group = |(group, g): (GroupId, &DstGroup)| -> Vec<(GroupId, BlockId)> {
        let ids: Vec<BlockId> = match g {
            DstGroup::Paged(g) => g.table.iter().collect(),
            DstGroup::State(g) => g.slot.into_iter().chain(g.more.iter().map(|c| c.slot)).collect(),
        };
        ids.into_iter().map(|id| (group, id)).collect()
    };
    (0u32..).map(GroupId::new).zip(groups).flat_map(of_group).collect()
}

/// The ranges of windows, neighbours joined.
fn merged(windows: &[Window]) -> VecDeque<Range<u64>> {
    let mut out: VecDeque<Range<u64>> = VecDeque::new();
    for w in windows {
        match out.back_mut() {
            Some(last) if last.end == w.start => last.end += w.len,
            _ => out.push_back(w.start..w.start + w.len),
        }
    }
    out
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
