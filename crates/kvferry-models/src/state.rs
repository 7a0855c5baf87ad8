//! The recurrent states that layers keep: their parts, bytes, and how tensor parallelism cuts them.
//!
//! Sizes are the whole model's, before any sharding. Shapes follow vLLM's `MambaStateShapeCalculator`; what differs is said
//! at [`Sharding::Grouped`].

use kvferry_geometry::placement::HeadRule;
use kvferry_geometry::spec::StatePart;

use crate::dtype::Dtype;

/// The state that one layer keeps for a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum State {
    /// Mamba 1: a convolution over the inner channels and a state for each of them.
    Mamba1 {
        /// Inner channels (`mamba_expand * hidden_size`).
        channels: u32,
        /// Values of one channel's state.
        state_size: u32,
        /// Taps of the convolution; the state keeps one row fewer.
        conv_kernel: u32,
    },
    /// Mamba 2: a convolution over x, B and C, and a state for each head.
    Mamba2 {
        /// Heads.
        heads: u32,
        /// Channels of a head.
        head_dim: u32,
        /// Groups of heads that share B and C; they divide the heads.
        groups: u32,
        /// Values of B, and of C, for each group.
        state_size: u32,
        /// Taps of the convolution.
        conv_kernel: u32,
    },
    /// Gated delta net, and KDA with as many key heads as value heads: a convolution over q, k and v, and a state for each
    /// value head.
    DeltaNet {
        /// Heads of q and of k; they divide the value heads.
        key_heads: u32,
        /// Channels of such a head.
        key_dim: u32,
        /// Heads of v.
        value_heads: u32,
        /// Channels of such a head.
        value_dim: u32,
        /// Taps of the convolution.
        conv_kernel: u32,
    },
    /// Linear (lightning) attention: a matrix for each head, no convolution.
    Linear {
        /// Heads.
        heads: u32,
        /// Rows and columns of a head's matrix.
        head_dim: u32,
    },
}

/// How the heads of an item, or the units of a state's part, are spread over tensor-parallel ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Sharding {
    /// Each head or unit by itself.
    Split,
    /// In blocks of so many units that stay together, e.g. the channels of one head.
    Blocks(u32),
    /// Units that belong to `groups` groups (heads that share B and C, or one key head) and follow them: up to `groups` ranks
    /// whole groups are dealt out, beyond that blocks. Where the ranks divide the heads this is the same as by blocks; where
    /// they don't, a rank would otherwise hold a head without its group.
    Grouped {
        /// How many groups.
        groups: u32,
        /// Units of one.
        group: u32,
        /// Units that stay together where there are more ranks than groups.
        block: u32,
    },
}

impl Sharding {
    /// The rule for `tp` ranks.
    #[must_use]
    pub fn rule(self, tp: u32) -> HeadRule {
        match self {
            Self::Split | Self::Blocks(1) => HeadRule::Split,
            Self::Blocks(size) => HeadRule::Blocks(size),
            Self::Grouped { groups, group, .. } if tp <= groups => Self::Blocks(group).rule(tp),
            Self::Grouped { block, .. } => Self::Blocks(block).rule(tp),
        }
    }
}

impl State {
    /// What kind of state it is.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Mamba1 { .. } => "mamba1",
            Self::Mamba2 { .. } => "mamba2",
            Self::DeltaNet { .. } => "delta net",
            Self::Linear { .. } => "linear attention",
        }
    }

    /// The parts and how each is cut, with the convolution's rows in `conv` and the recurrent state in `temporal`.
    ///
    /// Convolution parts have a unit for each channel, `conv_kernel - 1` rows, and one value's bytes for each (row, unit). The
    /// recurrent state has a unit for each head (each channel in Mamba 1), one row, and that unit's state as its width.
    #[must_use]
    pub fn parts(self, conv: Dtype, temporal: Dtype) -> Vec<(StatePart, Sharding)> {
        let part = |name: &str, units: u32, kernel: u32, cut| {
            let (bytes, tag) = conv.format();
            (StatePart::new(name, units, kernel.saturating_sub(1), u64::from(bytes), tag), cut)
        };
        let state = |units: u32, rows: u32, columns: u32, cut| {
            let (bytes, tag) = temporal.format();
            let width = u64::from(rows).saturating_mul(u64::from(columns)).saturating_mul(u64::from(bytes));
            (StatePart::new("temporal", units, 1, width, tag), cut)
        };
        match self {
            Self::Mamba1 { channels, state_size, conv_kernel } => vec![
                part("conv.x", channels, conv_kernel, Sharding::Split),
                state(channels, 1, state_size, Sharding::Split),
            ],
            Self::Mamba2 { heads, head_dim, groups, state_size, conv_kernel } => {
                let per_group = heads.checked_div(groups).unwrap_or(1);
                let x = Sharding::Grouped { groups, group: per_group.saturating_mul(head_dim), block: head_dim };
                let bc = (groups.saturating_mul(state_size), Sharding::Blocks(state_size));
                vec![
                    part("conv.x", heads.saturating_mul(head_dim), conv_kernel, x),
                    part("conv.b", bc.0, conv_kernel, bc.1),
                    part("conv.c", bc.0, conv_kernel, bc.1),
                    state(heads, head_dim, state_size, Sharding::Grouped { groups, group: per_group, block: 1 }),
                ]
            }
            Self::DeltaNet { key_heads, key_dim, value_heads, value_dim, conv_kernel } => {
                let per_key = value_heads.checked_div(key_heads).unwrap_or(1);
                let groups = key_heads;
                let v = Sharding::Grouped { groups, group: per_key.saturating_mul(value_dim), block: value_dim };
                let qk = (key_heads.saturating_mul(key_dim), Sharding::Blocks(key_dim));
                vec![
                    part("conv.q", qk.0, conv_kernel, qk.1),
                    part("conv.k", qk.0, conv_kernel, qk.1),
                    part("conv.v", value_heads.saturating_mul(value_dim), conv_kernel, v),
                    state(value_heads, value_dim, key_dim, Sharding::Grouped { groups, group: per_key, block: 1 }),
                ]
            }
            Self::Linear { heads, head_dim } => vec![state(heads, head_dim, head_dim, Sharding::Split)],
        }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::placement::HeadRange;

    use super::*;

    fn held(part: &(StatePart, Sharding), tp: u32) -> Vec<(u32, u32)> {
        let range = |rank| part.1.rule(tp).of(part.0.units, tp, rank).map(|r: HeadRange| (r.start(), r.end()));
        (0..tp).map(|rank| range(rank).unwrap()).collect()
    }

    #[test]
    fn heads_come_with_the_groups_that_they_read() {
        let (heads, head_dim, groups, state_size) = (24u32, 4u32, 8u32, 16u32);
        let state = State::Mamba2 { heads, head_dim, groups, state_size, conv_kernel: 4 };
        let parts = state.parts(Dtype::Bf16, Dtype::Fp32);
        for tp in 1..=32 {
            let (x, b, t) = (held(&parts[0], tp), held(&parts[1], tp), held(&parts[3], tp));
            for rank in 0..tp as usize {
                assert_eq!((x[rank].0, x[rank].1), (t[rank].0 * head_dim, t[rank].1 * head_dim), "tp {tp} rank {rank}");
                let (first, last) = (t[rank].0 / 3, (t[rank].1 - 1) / 3);
                if tp <= groups || tp.is_multiple_of(groups) {
                    assert!(
                        b[rank].0 <= first * state_size && (last + 1) * state_size <= b[rank].1,
                        "tp {tp} rank {rank}"
                    );
                }
            }
        }
        // Where TP exceeds the groups, B and C are on several ranks, but x and the heads are not.
        assert_eq!(held(&parts[1], 16)[5], (2 * 16, 3 * 16));
        assert_eq!(held(&parts[3], 24)[5], (5, 6));
    }

    #[test]
    fn value_heads_come_with_their_key_heads() {
        let state = State::DeltaNet { key_heads: 16, key_dim: 8, value_heads: 32, value_dim: 4, conv_kernel: 4 };
        let parts = state.parts(Dtype::Bf16, Dtype::Bf16);
        for tp in [1, 2, 3, 4, 5, 6, 8, 16, 32] {
            let (k, v, t) = (held(&parts[1], tp), held(&parts[2], tp), held(&parts[3], tp));
            for rank in 0..tp as usize {
                assert_eq!((v[rank].0, v[rank].1), (t[rank].0 * 4, t[rank].1 * 4));
                assert!(
                    k[rank].0 <= t[rank].0 / 2 * 8 && t[rank].1.div_ceil(2) * 8 <= k[rank].1,
                    "tp {tp} rank {rank}"
                );
            }
        }
    }

    #[test]
    fn the_channels_of_mamba1_are_cut_alike_in_both_parts() {
        let parts = State::Mamba1 { channels: 100, state_size: 16, conv_kernel: 4 }.parts(Dtype::Bf16, Dtype::Fp32);
        assert_eq!(held(&parts[0], 3), held(&parts[1], 3));
        assert_eq!(held(&parts[0], 3), [(0, 33), (33, 66), (66, 100)]);
    }
}
