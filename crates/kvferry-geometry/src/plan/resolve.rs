//! A plan times a request's block tables.

use alloc::borrow::Cow;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::nest::{CompiledPhase, PlacedNest};
use super::pieces::Between;
use super::{ItemClass, PairPlan, Phase, PlanError, rows, walk};
use crate::batch::{Base, Batch, PairRun, Pairs, Part, joined};
use crate::request::{BlockTable, BoundRequest, GroupMove, Reader};
use crate::units::{BlockId, ItemId};
use crate::watermarks::Watermarks;

/// The tables of a class; classes with equal `link` have equal ones.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    link: usize,
    pub(super) src: &'a BlockTable,
    dst: &'a BlockTable,
}

/// (link, first positions, steps, count): what a list of pairs follows from.
type PairsKey = (usize, (u64, u64), (u64, u64), u64);

/// Lists of pairs made so far for a request. Phases and classes with the same pairs share one list: that is less work, and
/// shows which of their parts are of one row.
#[derive(Default)]
struct KnownPairs(Vec<(PairsKey, Pairs)>);

impl KnownPairs {
    /// `count` pairs from the two positions on, by the steps.
    fn get(&mut self, tables: Tables<'_>, positions: (u64, u64), steps: (u64, u64), count: u64) -> Pairs {
        let key = (tables.link, positions, steps, count);
        // Those asked for last are asked for again first.
        if let Some((_, pairs)) = self.0.iter().rev().take(MOST_SOUGHT).find(|(k, _)| *k == key) {
            return pairs.clone();
        }
        let from = Walk { reader: tables.src.reader(positions.0), step: steps.0 };
        let to = Walk { reader: tables.dst.reader(positions.1), step: steps.1 };
        let pairs: Pairs = block_pairs(from, to, count).into();
        self.0.push((key, pairs.clone()));
        pairs
    }
}

/// How many lists back a known one is looked for.
const MOST_SOUGHT: usize = 64;

/// Steps of the parts of one class.
#[derive(Clone, Copy)]
struct Steps {
    src: u32,
    dst: u32,
}

impl PairPlan {
    /// The byte ranges that move for a request: exactly its moved tokens, nothing else.
    ///
    /// # Errors
    /// [`PlanError::ForeignRequest`] where the request was bound to other engines: its blocks mean other tokens there.
    pub fn resolve(&self, request: &BoundRequest) -> Result<Batch, PlanError> {
        self.resolve_pieces(request, None)
    }

    /// What moves of a request when the source's final bytes have grown from some watermarks to others: of each item the entries
    /// whose tokens all lie below `to` and didn't below `from`, among those that [`resolve`](Self::resolve) moves. An entry or
    /// value that stands for several tokens moves with the last of them. States, a last value that is filled in part, and what a
    /// frozen tail adds move with [`Whole`](crate::watermarks::Watermark::Whole).
    ///
    /// So along any growing row of watermarks, from none to whole, the batches together move what `resolve` does, each byte
    /// once. Requests may change between them by what [`promised`](BoundRequest::promised) lets come later.
    ///
    /// # Errors
    /// [`PlanError::ForeignRequest`] and [`PlanError::ForeignWatermarks`] where these are of other engines,
    /// [`PlanError::Backwards`] where `to` is behind `from`, and of a promised request [`PlanError::Promised`] where an item is
    /// whole in `to`, [`PlanError::NotListed`] where tokens are final whose blocks are not listed.
    pub fn resolve_between(
        &self,
        request: &BoundRequest,
        from: &Watermarks,
        to: &Watermarks,
    ) -> Result<Batch, PlanError> {
        self.resolve_pieces(request, Some((from, to)))
    }

    fn resolve_pieces(&self, request: &BoundRequest, between: Between<'_>) -> Result<Batch, PlanError> {
        let mut known = KnownPairs::default();
        let mut all = Vec::new();
        self.each_piece(request, between, |class, piece, tables| {
            all.push((piece.bases, class.resolve(piece.entries, tables, &mut known)));
        })?;
        Ok(Batch::new(rows::join(all)))
    }

    /// The places of a self-plan that a request zeroes.
    pub(crate) fn resolve_zero(&self, request: &BoundRequest) -> Result<Batch, PlanError> {
        if request.of().1 != self.of.1 {
            return Err(self.foreign());
        }
        let mut known = KnownPairs::default();
        let mut all = Vec::new();
        for class in &self.classes {
            // What the source doesn't have doesn't move and isn't zeroed.
            let Some(class) = class.without(request.unmatched()) else { continue };
            let group = class.groups.1;
            // Moves from several source groups end apart only where a frozen, zeroed tail came along: zero it again.
            let of_class = |m: &&GroupMove| (m.dst_group, m.retention) == (group, class.retention);
            let zeros = request.moves().iter().filter(of_class).map(|m| m.zero);
            let Some(zero) = zeros.min_by_key(|z| z.start()) else { continue };
            let table = request.dst_table(group);
            let tables = Tables { link: group.index(), src: table, dst: table };
            all.push((Arc::clone(&class.bases), class.resolve(class.entries_behind(zero), tables, &mut known)));
        }
        Ok(Batch::new(rows::join(all)))
    }

    /// How many contiguous ranges a request would take if nothing were joined across heads, blocks and items: what
    /// coalescing starts from.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn uncoalesced(&self, request: &BoundRequest) -> Result<u64, PlanError> {
        self.ranges_of_pieces(request, None)
    }

    /// The same of what [`resolve_between`](Self::resolve_between) moves.
    ///
    /// # Errors
    /// As there.
    pub fn uncoalesced_between(
        &self,
        request: &BoundRequest,
        from: &Watermarks,
        to: &Watermarks,
    ) -> Result<u64, PlanError> {
        self.ranges_of_pieces(request, Some((from, to)))
    }

    fn ranges_of_pieces(&self, request: &BoundRequest, between: Between<'_>) -> Result<u64, PlanError> {
        let mut sum = 0;
        self.each_piece(request, between, |class, piece, _| {
            sum += piece.bases.len() as u64 * class.ranges(piece.entries);
        })?;
        Ok(sum)
    }

    /// What a request moves of a class, and the two tables.
    pub(super) fn move_of<'a>(
        &self,
        class: &ItemClass,
        request: &'a BoundRequest,
    ) -> Result<(&'a GroupMove, Tables<'a>), PlanError> {
        if request.of() != self.of {
            return Err(self.foreign());
        }
        let key = |m: &GroupMove| ((m.src_group, m.dst_group), m.retention) == (class.groups, class.retention);
        let index = request.moves().iter().position(key).ok_or_else(|| self.foreign())?;
        let (Some(m), Some((src, dst))) = (request.moves().get(index), request.tables(index)) else {
            return Err(self.foreign());
        };
        Ok((m, Tables { link: index, src, dst }))
    }

    fn foreign(&self) -> PlanError {
        PlanError::ForeignRequest { src: self.src, dst: self.dst }
    }
}

impl ItemClass {
    /// The class without some of its items; `None` where none is left.
    fn without(&self, items: &[ItemId]) -> Option<Cow<'_, Self>> {
        if !self.items.iter().any(|i| items.contains(i)) {
            return Some(Cow::Borrowed(self));
        }
        let kept: Vec<usize> = (0..self.items.len()).filter(|&i| !items.contains(&self.items[i])).collect();
        let ids = |of: &[ItemId]| -> Vec<ItemId> { kept.iter().map(|&i| of[i]).collect() };
        let (items, sources, bases) = (ids(&self.items), ids(&self.sources), self.bases_of(&kept));
        (!kept.is_empty()).then(|| Cow::Owned(Self { items, sources, bases, ..self.clone() }))
    }

    /// Where some of the items start, given by their indices in order.
    pub(super) fn bases_of(&self, indices: &[usize]) -> Arc<[Base]> {
        if indices.len() == self.bases.len() {
            return Arc::clone(&self.bases);
        }
        indices.iter().map(|&i| self.bases[i]).collect()
    }

    /// The whole periods of an interval: (first, one past the last); equal where there is none.
    fn periods(&self, (start, end): (u64, u64)) -> Option<(u64, u64, u64)> {
        let period = self.period?;
        let first = start.div_ceil(period);
        let last = end / period;
        (first < last).then_some((period, first, last))
    }

    /// Contiguous ranges of one item, with nothing joined across heads and blocks.
    fn ranges(&self, (start, end): (u64, u64)) -> u64 {
        let walked = |a, b| -> u64 {
            let phases = walk::phases(walk::Runs::new(self, a, b));
            phases.into_iter().map(|phase| CompiledPhase::new(self, phase).ranges).sum()
        };
        match self.periods((start, end)) {
            Some((period, first, last)) => {
                let each: u64 = self.phases.iter().map(|p| p.ranges).sum();
                walked(start, first * period) + (last - first) * each + walked(last * period, end)
            }
            None => walked(start, end),
        }
    }

    /// The parts of an interval of entries, for the class's bases.
    fn resolve(&self, (start, end): (u64, u64), tables: Tables<'_>, known: &mut KnownPairs) -> Vec<Part> {
        let mut parts = Vec::new();
        if start >= end {
            return parts;
        }
        if let Some(linear) = self.linear {
            parts.push(linear.part(self, (start, end), tables.src, tables.dst));
        } else if let Some((period, first, last)) = self.periods((start, end)) {
            self.walk(start, first * period, tables, known, &mut parts);
            self.repeat(period, first, last, tables, known, &mut parts);
            self.walk(last * period, end, tables, known, &mut parts);
        } else {
            self.walk(start, end, tables, known, &mut parts);
        }
        parts
    }

    /// The entries of an interval one run at a time, for the ends of a request.
    fn walk(&self, start: u64, end: u64, tables: Tables<'_>, known: &mut KnownPairs, parts: &mut Vec<Part>) {
        for phase in walk::phases(walk::Runs::new(self, start, end)) {
            let pairs = known.get(tables, (phase.src_block, phase.dst_block), (1, 1), 1);
            let compiled = CompiledPhase::new(self, phase);
            self.parts(&compiled.nests, Steps { src: 1, dst: 1 }, &pairs, parts);
        }
    }

    /// Whole periods: every phase times its block pairs.
    fn repeat(
        &self,
        period: u64,
        first: u64,
        last: u64,
        tables: Tables<'_>,
        known: &mut KnownPairs,
        parts: &mut Vec<Part>,
    ) {
        let (src_step, dst_step) = (period / self.src.block_tokens, period / self.dst.block_tokens);
        let fits = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let steps = Steps { src: fits(src_step), dst: fits(dst_step) };
        for compiled in &self.phases {
            let Phase { src_block, dst_block, .. } = compiled.phase;
            let positions = (first * src_step + src_block, first * dst_step + dst_block);
            let pairs = known.get(tables, positions, (src_step, dst_step), last - first);
            self.parts(&compiled.nests, steps, &pairs, parts);
        }
    }

    fn parts(&self, nests: &[PlacedNest], steps: Steps, pairs: &Pairs, out: &mut Vec<Part>) {
        out.extend(nests.iter().map(|n| Part {
            src_add: n.src_add,
            dst_add: n.dst_add,
            src_block_stride: self.src.block_stride,
            dst_block_stride: self.dst.block_stride,
            src_step: steps.src,
            dst_step: steps.dst,
            nest: n.nest.clone(),
            pairs: pairs.clone(),
        }));
    }
}

/// Every `step`-th entry of a table.
#[derive(Clone, Copy)]
struct Walk<'a> {
    reader: Reader<'a>,
    step: u64,
}

impl Walk<'_> {
    /// The id here, and how many steps start inside consecutive ids.
    fn get(&self) -> (u32, u32) {
        let (id, known) = self.reader.get();
        let steps = if self.step == 1 || known == 1 { u64::from(known) } else { u64::from(known).div_ceil(self.step) };
        (id, u32::try_from(steps).unwrap_or(u32::MAX))
    }
}

/// The block pairs of `count` steps on both sides; pairs that go on by the step on both sides are one run.
fn block_pairs(mut src: Walk<'_>, mut dst: Walk<'_>, count: u64) -> Vec<PairRun> {
    let most = usize::try_from(count.min(src.reader.runs().max(dst.reader.runs()))).unwrap_or(0);
    let steps = (src.step, dst.step);
    // The scattered case is one plain loop over two lists; it is most of what a large request costs.
    if let (Reader::List { list: from, at: i }, Reader::List { list: to, at: j }) = (src.reader, dst.reader) {
        // Slices, not strided chunks: the compiler keeps both in registers.
        if steps == (1, 1) {
            let fits = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
            let (from, to) = (from.get(fits(i)..).unwrap_or_default(), to.get(fits(j)..).unwrap_or_default());
            let pairs = from.iter().zip(to).take(fits(count));
            return joined(pairs.map(|(s, d)| PairRun { src: s.get(), dst: d.get(), count: 1 }), (1, 1), most);
        }
        let (from, to) = (every(from, i, steps.0), every(to, j, steps.1));
        let pairs = from.zip(to).take(usize::try_from(count).unwrap_or(usize::MAX));
        return joined(pairs.map(|(s, d)| PairRun { src: s.get(), dst: d.get(), count: 1 }), steps, most);
    }
    let mut left = count;
    let pairs = core::iter::from_fn(|| {
        if left == 0 {
            return None;
        }
        let ((s, s_steps), (d, d_steps)) = (src.get(), dst.get());
        let count = s_steps.min(d_steps).min(u32::try_from(left).unwrap_or(u32::MAX));
        src.reader.skip(u64::from(count) * src.step);
        dst.reader.skip(u64::from(count) * dst.step);
        left -= u64::from(count);
        Some(PairRun { src: s, dst: d, count })
    });
    joined(pairs, steps, most)
}

/// Every `step`-th id from an index on.
fn every(list: &[BlockId], at: u64, step: u64) -> impl Iterator<Item = BlockId> {
    let fits = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    list.get(fits(at)..).unwrap_or_default().chunks(fits(step).max(1)).map(|chunk| chunk[0])
}
