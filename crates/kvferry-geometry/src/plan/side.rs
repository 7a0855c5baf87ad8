//! One side of an item class: how entries of the sequence become blocks, kernel blocks and entries of these.
//!
//! All counts are in the class's entries; in most classes these are tokens.

use crate::layout::{PagedView, StateView};
use crate::placement::TokenClass;
use crate::spec::Component;

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
    /// Entries of the sequence that a block covers.
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
    /// The side of some components with equal spans, in entries of `entry_tokens` tokens; `None` where those don't fit (a
    /// proven manifest's do).
    pub(super) fn paged(
        view: &PagedView,
        tokens: TokenClass,
        entry_tokens: u64,
        components: &[&Component],
    ) -> Option<Self> {
        let span = u64::from(components.first()?.span);
        let block_size = u64::from(view.block_size) / span;
        let kernel_size = u64::from(view.kernel.size) / span;
        let kernel_stride = view.kernel.stride.get();
        let mut views = view.components.iter().filter(|v| components.iter().any(|c| c.name == v.name));
        let goes_on = views.all(|c| c.entry_stride.get().checked_mul(kernel_size) == Some(kernel_stride));
        let kernel_size = if goes_on { block_size } else { kernel_size };
        let interleave = u64::from(tokens.interleave()) / entry_tokens;
        let class = match tokens.count() {
            1 => TokenClass::ALL,
            count => TokenClass::new(count, u32::try_from(interleave).ok()?, tokens.index())?,
        };
        let block_tokens = block_size * u64::from(tokens.count());
        let block_stride = view.block_stride.get();
        Some(Self { class, block_size, kernel_size, kernel_stride, block_stride, block_tokens })
    }

    /// The side of a state, whose slot is a block of one entry.
    pub(super) fn state(view: &StateView) -> Self {
        let block_stride = view.slot_stride.get();
        Self { class: TokenClass::ALL, block_size: 1, kernel_size: 1, kernel_stride: 0, block_stride, block_tokens: 1 }
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
