//! A plan times a request's block tables.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::nest::{CompiledPhase, PlacedNest};
use super::{ItemClass, PairPlan, walk};
use crate::batch::{Base, Batch, PairRun, Part, Section};
use crate::request::{BlockTable, BoundRequest};
use crate::units::TokenRange;

/// Steps and block strides of the parts of one class.
#[derive(Clone, Copy)]
struct Steps {
    src: u32,
    dst: u32,
}

impl PairPlan {
    /// The byte ranges that move for a request: exactly its moved tokens, nothing else.
    ///
    /// The request must have been bound to the engines of this plan; then every place lies inside its region.
    #[must_use]
    pub fn resolve(&self, request: &BoundRequest) -> Batch {
        let mut sections = Vec::new();
        for class in &self.classes {
            let (src, dst) = class.groups;
            let Some(moved) = request.moves().iter().find(|m| (m.src_group, m.dst_group) == (src, dst)) else {
                continue;
            };
            class.resolve(moved.range, request.src_table(src), request.dst_table(dst), &mut sections);
        }
        Batch::new(sections)
    }

    /// The places of a self-plan that a request zeroes.
    pub(crate) fn resolve_zero(&self, request: &BoundRequest) -> Batch {
        let mut sections = Vec::new();
        for class in &self.classes {
            let group = class.groups.1;
            // Moves from several source groups end apart only where a frozen, zeroed tail came along: zero it again.
            let zeros = request.moves().iter().filter(|m| m.dst_group == group).map(|m| m.zero);
            let Some(zero) = zeros.min_by_key(|z| z.start()) else { continue };
            let table = request.dst_table(group);
            class.resolve(zero, table, table, &mut sections);
        }
        Batch::new(sections)
    }

    /// How many ranges a request would take with one for each item, component, head and run of tokens that lie
    /// consecutively in one (kernel) block on both sides: what coalescing starts from.
    #[must_use]
    pub fn uncoalesced(&self, request: &BoundRequest) -> u64 {
        let of_class = |class: &ItemClass| {
            let moved = request.moves().iter().find(|m| (m.src_group, m.dst_group) == class.groups);
            let runs = moved.map_or(0, |m| class.token_runs(m.range));
            class.items.len() as u64 * class.components * u64::from(class.heads.count()) * runs
        };
        self.classes.iter().map(of_class).sum()
    }
}

impl ItemClass {
    /// The whole periods of an interval: (first, one past the last); equal where there is none.
    fn periods(&self, range: TokenRange) -> Option<(u64, u64, u64)> {
        let period = self.period?;
        let first = range.start().get().div_ceil(period);
        let last = range.end().get() / period;
        (first < last).then_some((period, first, last))
    }

    fn token_runs(&self, range: TokenRange) -> u64 {
        let (start, end) = (range.start().get(), range.end().get());
        let walked = |a, b| walk::Runs::new(self, a, b).count() as u64;
        match self.periods(range) {
            Some((period, first, last)) => {
                let each: u64 = self.phases.iter().map(|p| p.phase.runs()).sum();
                walked(start, first * period) + (last - first) * each + walked(last * period, end)
            }
            None => walked(start, end),
        }
    }

    fn resolve(&self, range: TokenRange, src: &BlockTable, dst: &BlockTable, out: &mut Vec<Section>) {
        if range.is_empty() {
            return;
        }
        let (start, end) = (range.start().get(), range.end().get());
        let mut parts = Vec::new();
        match self.periods(range) {
            Some((period, first, last)) => {
                self.walk(start, first * period, src, dst, &mut parts);
                self.repeat(period, first, last, src, dst, &mut parts);
                self.walk(last * period, end, src, dst, &mut parts);
            }
            None => self.walk(start, end, src, dst, &mut parts),
        }
        self.sections(parts, out);
    }

    /// The tokens of an interval one run at a time, for the ends of a request.
    fn walk(&self, start: u64, end: u64, src: &BlockTable, dst: &BlockTable, parts: &mut Vec<Part>) {
        for phase in walk::phases(walk::Runs::new(self, start, end)) {
            let pair = PairRun { src: src.block(phase.src_block), dst: dst.block(phase.dst_block), count: 1 };
            let compiled = CompiledPhase::new(self, phase);
            self.parts(&compiled.nests, Steps { src: 1, dst: 1 }, &[pair].into(), parts);
        }
    }

    /// Whole periods: every phase times its block pairs.
    fn repeat(&self, period: u64, first: u64, last: u64, src: &BlockTable, dst: &BlockTable, parts: &mut Vec<Part>) {
        let src_step = period / self.src.block_tokens;
        let dst_step = period / self.dst.block_tokens;
        let fits = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let steps = Steps { src: fits(src_step), dst: fits(dst_step) };
        // Phases of one block pair differ in their tokens only, so they share the list of pairs.
        let mut known: Option<((u64, u64), Arc<[PairRun]>)> = None;
        for compiled in &self.phases {
            let blocks = (compiled.phase.src_block, compiled.phase.dst_block);
            let pairs = match known.take() {
                Some((of, pairs)) if of == blocks => pairs,
                _ => {
                    let from = Walk { table: src, position: first * src_step + blocks.0, step: src_step };
                    let to = Walk { table: dst, position: first * dst_step + blocks.1, step: dst_step };
                    block_pairs(from, to, last - first).into()
                }
            };
            self.parts(&compiled.nests, steps, &pairs, parts);
            known = Some((blocks, pairs));
        }
    }

    fn parts(&self, nests: &[PlacedNest], steps: Steps, pairs: &Arc<[PairRun]>, out: &mut Vec<Part>) {
        out.extend(nests.iter().map(|n| Part {
            src_add: n.src_add,
            dst_add: n.dst_add,
            src_block_stride: self.src.block_stride,
            dst_block_stride: self.dst.block_stride,
            src_step: steps.src,
            dst_step: steps.dst,
            nest: n.nest.clone(),
            pairs: Arc::clone(pairs),
        }));
    }

    /// Bases times parts. Items whose pages lie end to end in a row on both sides become one longer run.
    fn sections(&self, parts: Vec<Part>, out: &mut Vec<Section>) {
        let (mut plain, mut rest) = (Vec::new(), Vec::new());
        for part in parts {
            if part.nest.dims.is_empty() && self.bases.len() > 1 { rest.push(part) } else { plain.push(part) }
        }
        while let Some(run) = rest.first().map(|p| p.nest.run) {
            let (same, other): (Vec<Part>, Vec<Part>) = rest.into_iter().partition(|p| p.nest.run == run);
            rest = other;
            let chains = chains(&self.bases, run);
            if chains.iter().all(|c| c.1 == 1) {
                plain.extend(same);
                continue;
            }
            let mut lengths: Vec<u64> = chains.iter().map(|c| c.1).collect();
            lengths.sort_unstable();
            lengths.dedup();
            for length in lengths {
                let bases: Vec<Base> = chains.iter().filter(|c| c.1 == length).map(|c| c.0).collect();
                let mut longer = same.clone();
                longer.iter_mut().for_each(|p| p.nest.run = run * length);
                out.push(Section { bases: bases.into(), parts: longer });
            }
        }
        if !plain.is_empty() {
            out.push(Section { bases: Arc::clone(&self.bases), parts: plain });
        }
    }
}

/// Bases that continue each other by `run` bytes on both sides, as (first, how many).
fn chains(bases: &[Base], run: u64) -> Vec<(Base, u64)> {
    let mut sorted = bases.to_vec();
    sorted.sort_unstable_by_key(|b| (b.dst_region, b.dst_offset));
    let mut out: Vec<(Base, u64)> = Vec::new();
    for base in sorted {
        match out.last_mut() {
            Some((first, count))
                if (first.src_region, first.dst_region) == (base.src_region, base.dst_region)
                    && first.src_offset.checked_add(*count * run) == Some(base.src_offset)
                    && first.dst_offset.checked_add(*count * run) == Some(base.dst_offset) =>
            {
                *count += 1;
            }
            _ => out.push((base, 1)),
        }
    }
    out
}

/// Every `step`-th entry of a table.
#[derive(Clone, Copy)]
struct Walk<'a> {
    table: &'a BlockTable,
    position: u64,
    step: u64,
}

/// The block pairs of `count` steps on both sides, with steps inside one stretch of both as one run.
fn block_pairs(src: Walk<'_>, dst: Walk<'_>, count: u64) -> Vec<PairRun> {
    let (from, to) = (src.table.stretches(), dst.table.stretches());
    let (mut i, mut j) = (src.table.stretch_at(src.position), dst.table.stretch_at(dst.position));
    let (mut s, mut d, mut left) = (src.position, dst.position, count);
    let longest = from.len().max(to.len()).min(usize::try_from(count).unwrap_or(usize::MAX));
    let mut out = Vec::with_capacity(longest.min(from.len() + to.len()));
    while left > 0 {
        while s >= from[i].position + u64::from(from[i].count) {
            i += 1;
        }
        while d >= to[j].position + u64::from(to[j].count) {
            j += 1;
        }
        let (a, b) = (from[i], to[j]);
        let (s_in, d_in) = (s - a.position, d - b.position);
        // Both are below a stretch's count, which has 32 bits.
        let steps = steps_left(u64::from(a.count) - s_in, src.step)
            .min(steps_left(u64::from(b.count) - d_in, dst.step))
            .min(u32::try_from(left).unwrap_or(u32::MAX));
        let fits = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        out.push(PairRun { src: a.id + fits(s_in), dst: b.id + fits(d_in), count: steps });
        s += u64::from(steps) * src.step;
        d += u64::from(steps) * dst.step;
        left -= u64::from(steps);
    }
    out
}

/// How many steps start within the next `left` entries.
fn steps_left(left: u64, step: u64) -> u32 {
    let steps = if step == 1 {
        left
    } else if left <= step {
        1
    } else {
        left.div_ceil(step)
    };
    u32::try_from(steps).unwrap_or(u32::MAX)
}
