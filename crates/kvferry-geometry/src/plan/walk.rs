//! From tokens to runs, and from runs to phases.

use alloc::vec::Vec;

use arrayvec::ArrayVec;

use super::ItemClass;
use super::side::{SideGeometry, Spot};
use crate::token_set::TokenSet;

/// Consecutive tokens whose places go on evenly on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    src: Spot,
    dst: Spot,
    len: u64,
}

/// The runs of a class's tokens in an interval, in order. Work is bounded by the runs, not by the tokens.
pub(super) struct Runs<'a> {
    src: &'a SideGeometry,
    dst: &'a SideGeometry,
    tokens: &'a TokenSet,
    /// Next token to look at, and one past the last.
    at: u64,
    end: u64,
    pending: Option<Run>,
}

impl<'a> Runs<'a> {
    pub(super) fn new(class: &'a ItemClass, start: u64, end: u64) -> Self {
        Self { src: &class.src, dst: &class.dst, tokens: &class.tokens, at: start, end, pending: None }
    }

    /// The next cut of the token set, moved on to its first token.
    fn next_cut(&mut self) -> Option<Run> {
        let (start, end) = self.tokens.next_interval(self.at)?;
        let end = end.min(self.end);
        if start >= end {
            return None;
        }
        let (src, dst) = (self.src.spot(start), self.dst.spot(start));
        let len = (end - start).min(src.left).min(dst.left);
        self.at = start + len;
        Some(Run { src, dst, len })
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let mut run = self.pending.take().or_else(|| self.next_cut())?;
        while let Some(next) = self.next_cut() {
            if continues(run.src, next.src, run.len) && continues(run.dst, next.dst, run.len) {
                run.len += next.len;
            } else {
                self.pending = Some(next);
                break;
            }
        }
        Some(run)
    }
}

fn continues(a: Spot, b: Spot, len: u64) -> bool {
    a.block == b.block && a.kernel == b.kernel && a.entry + len == b.entry
}

/// One loop over tokens: `count` steps, each so many kernel blocks and entries further.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TokenLoop {
    /// Steps, at least 2.
    pub count: u64,
    /// (kernel blocks, entries) from one step to the next at the source.
    pub src: (u64, u64),
    /// The same at the destination.
    pub dst: (u64, u64),
}

/// Tokens with one block on each side: where they start in their blocks, and how they go on.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Phase {
    /// Table position of the source block, counted from the start of the period.
    pub src_block: u64,
    /// Table position of the destination block, counted from the start of the period.
    pub dst_block: u64,
    /// (kernel block, entry) where they start in the source block.
    pub src_start: (u64, u64),
    /// The same in the destination block.
    pub dst_start: (u64, u64),
    /// Loops, outermost first.
    pub loops: ArrayVec<TokenLoop, 2>,
    /// Consecutive tokens inside the loops.
    pub len: u64,
}

impl Phase {
    /// How many token runs the loops make.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.loops.iter().map(|l| l.count).product()
    }

    /// How many tokens.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.runs() * self.len
    }

    /// One token at the start of a block on both sides.
    pub(super) fn start() -> Self {
        Self { src_block: 0, dst_block: 0, src_start: (0, 0), dst_start: (0, 0), loops: ArrayVec::new(), len: 1 }
    }

    fn of_run(run: &Run) -> Self {
        Self {
            src_block: run.src.block,
            dst_block: run.dst.block,
            src_start: (run.src.kernel, run.src.entry),
            dst_start: (run.dst.kernel, run.dst.entry),
            loops: ArrayVec::new(),
            len: run.len,
        }
    }

    /// The step from `self` to `other` on both sides, where both are one shape, share their blocks, and no number falls.
    fn step_to(&self, other: &Self) -> Option<((u64, u64), (u64, u64))> {
        let alike = self.src_block == other.src_block
            && self.dst_block == other.dst_block
            && self.len == other.len
            && self.loops == other.loops;
        let step = |a: (u64, u64), b: (u64, u64)| Some((b.0.checked_sub(a.0)?, b.1.checked_sub(a.1)?));
        if alike {
            Some((step(self.src_start, other.src_start)?, step(self.dst_start, other.dst_start)?))
        } else {
            None
        }
    }
}

/// Groups runs into phases with up to two loops.
pub(super) fn phases(runs: impl Iterator<Item = Run>) -> Vec<Phase> {
    let single: Vec<Phase> = runs.map(|r| Phase::of_run(&r)).collect();
    if single.len() < 2 {
        return single;
    }
    fold(fold(single))
}

/// Folds stretches of evenly spaced, equal phases into one with a further loop outside.
fn fold(list: Vec<Phase>) -> Vec<Phase> {
    let mut out: Vec<Phase> = Vec::new();
    let mut rest = &list[..];
    while let Some((first, tail)) = rest.split_first() {
        let step = tail.first().and_then(|next| first.step_to(next));
        let Some(step) = step.filter(|_| !first.loops.is_full()) else {
            out.push(first.clone());
            rest = tail;
            continue;
        };
        let mut count = 2;
        while rest.get(count).is_some_and(|next| rest[count - 1].step_to(next) == Some(step)) {
            count += 1;
        }
        let mut folded = first.clone();
        folded.loops.insert(0, TokenLoop { count: count as u64, src: step.0, dst: step.1 });
        out.push(folded);
        rest = &rest[count..];
    }
    out
}
