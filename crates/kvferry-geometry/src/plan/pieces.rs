//! What of a class moves when final bytes have grown: an interval of its entries for every item.
//!
//! Items that have grown alike form a piece; a request that is resolved whole is one piece of each class.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::resolve::Tables;
use super::{ItemClass, PairPlan, PlanError};
use crate::batch::Base;
use crate::request::{BoundRequest, GroupMove};
use crate::units::{ItemId, TokenRange, Tokens};
use crate::watermarks::{Watermark, Watermarks};

/// From which watermarks to which; `None` for all that a request moves.
pub(super) type Between<'a> = Option<(&'a Watermarks, &'a Watermarks)>;

/// Entries, and where the items start of which they move.
pub(super) struct Piece {
    pub(super) entries: (u64, u64),
    pub(super) bases: Arc<[Base]>,
}

impl PairPlan {
    /// The pieces of every class, with the tables that they use.
    pub(super) fn each_piece(
        &self,
        request: &BoundRequest,
        between: Between<'_>,
        mut visit: impl FnMut(&ItemClass, Piece, Tables<'_>),
    ) -> Result<(), PlanError> {
        self.check_between(request, between)?;
        for class in &self.classes {
            let (moved, tables) = self.move_of(class, request)?;
            let reach = class.reach(moved, request.tokens());
            let Some((from, to)) = between else {
                let piece = Piece { entries: (reach.start, reach.end), bases: Arc::clone(&class.bases) };
                visit(class, piece, tables);
                continue;
            };
            for piece in class.pieces(reach, from, to) {
                if request.is_promised() {
                    class.check_listed(piece.entries, tables)?;
                }
                visit(class, piece, tables);
            }
        }
        Ok(())
    }

    fn check_between(&self, request: &BoundRequest, between: Between<'_>) -> Result<(), PlanError> {
        let Some((from, to)) = between else {
            let first = self.classes.iter().find_map(|class| class.sources.first());
            return if request.is_promised() { promised(first.copied()) } else { Ok(()) };
        };
        for got in [from.as_slice().len(), to.as_slice().len()] {
            if got != self.src_items {
                let (src, dst, expected) = (self.src, self.dst, self.src_items);
                return Err(PlanError::ForeignWatermarks { src, dst, got, expected });
            }
        }
        if let Some(item) = to.behind(from)
            && let (Some(from), Some(to)) = (from.get(item), to.get(item))
        {
            return Err(PlanError::Backwards { item, from, to });
        }
        let whole = (0u32..).map(ItemId::new).zip(to.as_slice()).find(|(_, mark)| **mark == Watermark::Whole);
        if request.is_promised() { promised(whole.map(|(item, _)| item)) } else { Ok(()) }
    }
}

/// An item of a promised request that is to be whole.
fn promised(whole: Option<ItemId>) -> Result<(), PlanError> {
    whole.map_or(Ok(()), |item| Err(PlanError::Promised { item }))
}

/// The entries of a class that a request moves. `start <= counted <= end`.
#[derive(Clone, Copy)]
struct Reach {
    start: u64,
    /// One past the last that stands for tokens of the sequence; what follows moves with the whole.
    counted: u64,
    end: u64,
}

impl ItemClass {
    fn reach(&self, moved: &GroupMove, tokens: Tokens) -> Reach {
        if self.retention.is_none() {
            return Reach { start: 0, counted: 0, end: moved.states.len() as u64 };
        }
        let (start, end) = self.entries(moved.range);
        let counted = self.entries(moved.range.intersect(TokenRange::new(Tokens::ZERO, tokens))).1;
        Reach { start, counted: counted.clamp(start, end), end }
    }

    /// One past the last entry of which all tokens are final at a watermark.
    fn cut(&self, reach: Reach, mark: Watermark) -> u64 {
        match mark {
            Watermark::Whole => reach.end,
            Watermark::Upto(tokens) => (tokens.get() / self.entry_tokens).clamp(reach.start, reach.counted),
        }
    }

    /// Items with equal intervals together; those that move nothing are left out.
    fn pieces(&self, reach: Reach, from: &Watermarks, to: &Watermarks) -> Vec<Piece> {
        let mut alike: BTreeMap<(u64, u64), Vec<usize>> = BTreeMap::new();
        for (index, &item) in self.sources.iter().enumerate() {
            let cut = |marks: &Watermarks| self.cut(reach, marks.get(item).unwrap_or(Watermark::NONE));
            let entries = (cut(from), cut(to));
            if entries.0 < entries.1 {
                alike.entry(entries).or_default().push(index);
            }
        }
        alike.into_iter().map(|(entries, indices)| Piece { entries, bases: self.bases_of(&indices) }).collect()
    }

    /// Whether the source has listed the blocks of some entries.
    fn check_listed(&self, (start, end): (u64, u64), tables: Tables<'_>) -> Result<(), PlanError> {
        let at = |entry: u64| Tokens::new(entry.saturating_mul(self.entry_tokens));
        let position = |k: u64| at(k.saturating_mul(self.src.block_tokens));
        let (first, len) = (tables.src.first_position(), tables.src.len());
        let listed = TokenRange::new(position(first), position(first.saturating_add(len)));
        let to = TokenRange::new(at(start), at(end));
        if listed.contains(to) { Ok(()) } else { Err(PlanError::NotListed { group: self.groups.0, to, listed }) }
    }
}
