//! One side of an item class: how tokens become blocks, kernel blocks and entries.

use crate::layout::PagedView;
use crate::placement::{Placement, TokenClass};

/// The numbers of a view that token arithmetic needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SideGeometry {
    pub(super) class: TokenClass,
    /// Entries of a block.
    pub(super) block_size: u64,
    /// Entries of a kernel block; the whole block where kernel blocks only continue each other.
    pub(super) kernel_size: u64,
    pub(super) kernel_stride: u64,
    pub(super) block_stride: u64,
    /// Tokens of the sequence that a block covers.
    pub(super) block_tokens: u64,
}

/// Where a token lies on one side, and for how many tokens the place simply goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    /// Table position of the block.
    pub(super) block: u64,
    /// Kernel block in the block.
    pub(super) kernel: u64,
    /// Entry in the kernel block.
    pub(super) entry: u64,
    /// At least 1.
    pub(super) left: u64,
}

impl SideGeometry {
    pub(super) fn new(view: &PagedView, placement: &Placement) -> Self {
        let block_size = u64::from(view.block_size);
        let kernel_size = u64::from(view.kernel.size);
        let kernel_stride = view.kernel.stride.get();
        let goes_on =
            view.components.iter().all(|c| c.entry_stride.get().checked_mul(kernel_size) == Some(kernel_stride));
        let kernel_size = if goes_on { block_size } else { kernel_size };
        Self {
            class: placement.tokens,
            block_size,
            kernel_size,
            kernel_stride,
            block_stride: view.block_stride.get(),
            block_tokens: block_size * u64::from(placement.tokens.count()),
        }
    }

    /// Where token `t` lies, for a token of the class.
    pub(super) fn spot(&self, t: u64) -> Spot {
        let block = t / self.block_tokens;
        let (interleave, period) = (u64::from(self.class.interleave()), self.class.period());
        let (local, stripe) = if self.class.count() == 1 {
            (t, u64::MAX)
        } else {
            (t / period * interleave + t % interleave, interleave - t % interleave)
        };
        let in_block = local - block * self.block_size;
        let entry = in_block % self.kernel_size;
        let left = (self.kernel_size - entry).min(stripe);
        Spot { block, kernel: in_block / self.kernel_size, entry, left }
    }
}
