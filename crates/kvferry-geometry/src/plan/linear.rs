//! Classes whose tokens lie end to end on both sides, across blocks too.
//!
//! There a stretch of consecutive blocks is one run whatever the two block sizes, so such a class is resolved by
//! stretches of tokens, with one token as the unit of its pairs.

use alloc::vec::Vec;

use super::{ItemClass, nest};
use crate::batch::{Nest, PairRun, Part, joined};
use crate::request::{BlockTable, Reader};

/// A class whose token `slot` (block id times block size, plus entry) lies at `slot` times `run` on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Linear {
    run: u64,
    src_add: u64,
    dst_add: u64,
}

impl Linear {
    /// The class as linear, where it is.
    pub(super) fn of(class: &ItemClass, src_blocks: u32, dst_blocks: u32) -> Option<Self> {
        let (run, src_add, dst_add) = nest::token_run(class)?;
        let goes_on = |side: &super::SideGeometry, blocks: u32| {
            let slots = u64::from(blocks).checked_mul(side.block_size);
            side.class.count() == 1
                && side.kernel_size == side.block_size
                && side.block_size.checked_mul(run) == Some(side.block_stride)
                && slots.is_some_and(|n| n <= u64::from(u32::MAX))
        };
        let all = class.tokens.is_all() && goes_on(&class.src, src_blocks) && goes_on(&class.dst, dst_blocks);
        all.then_some(Self { run, src_add, dst_add })
    }

    /// The tokens `[start, end)` as one part.
    pub(super) fn part(&self, class: &ItemClass, (start, end): (u64, u64), src: &BlockTable, dst: &BlockTable) -> Part {
        let mut from = Slots::new(src, start, class.src.block_size);
        let mut to = Slots::new(dst, start, class.dst.block_size);
        let mut at = start;
        let pairs = core::iter::from_fn(|| {
            let ((s, s_left), (d, d_left)) = (from.get(), to.get());
            let count = s_left.min(d_left).min(end - at);
            if count == 0 {
                return None;
            }
            from.skip(count);
            to.skip(count);
            at += count;
            // Slots have 32 bits, and so has their number.
            let fits = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
            Some(PairRun { src: fits(s), dst: fits(d), count: fits(count) })
        });
        let pairs: Vec<PairRun> = joined(pairs, (1, 1), 0);
        Part {
            src_add: self.src_add,
            dst_add: self.dst_add,
            src_block_stride: self.run,
            dst_block_stride: self.run,
            src_step: 1,
            dst_step: 1,
            nest: Nest::run(self.run),
            pairs: pairs.into(),
        }
    }
}

/// Reads a table forward by tokens.
struct Slots<'a> {
    reader: Reader<'a>,
    block_size: u64,
    entry: u64,
}

impl<'a> Slots<'a> {
    fn new(table: &'a BlockTable, token: u64, block_size: u64) -> Self {
        Self { reader: table.reader(token / block_size), block_size, entry: token % block_size }
    }

    /// The slot here, and how many slots are known to follow each other from here on.
    fn get(&self) -> (u64, u64) {
        let (id, known) = self.reader.get();
        (u64::from(id) * self.block_size + self.entry, u64::from(known) * self.block_size - self.entry)
    }

    fn skip(&mut self, tokens: u64) {
        let entry = self.entry + tokens;
        self.reader.skip(entry / self.block_size);
        self.entry = entry % self.block_size;
    }
}
