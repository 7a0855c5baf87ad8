//! The usual placement rules, by dealing heads and ranks one by one.

use kvferry_geometry::placement::{HeadRule, Parallelism, PcpMode, Placement, RankPlacement};
use kvferry_geometry::spec::ModelSpec;

/// What one rank holds of a paged item, or of one part of a state, in plain numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// First head or unit and one past the last.
    pub heads: (u32, u32),
    /// How many ranks share the tokens, how many tokens are dealt out at a time, which share this is.
    pub tokens: (u32, u32, u32),
}

/// The heads of each of `tp` ranks: every rank earns `heads` points, and `tp` points buy the next head. Ranks that earn
/// less than a head hold the one that is being earned.
#[must_use]
pub fn usual_heads(heads: u32, tp: u32) -> Vec<(u32, u32)> {
    let (mut points, mut next) = (0, 0);
    let mut out = Vec::new();
    for _ in 0..tp {
        let first = next;
        points += heads;
        while points >= tp {
            points -= tp;
            next += 1;
        }
        out.push((first, if heads < tp { first + 1 } else { next }));
    }
    out
}

fn ruled(rule: HeadRule, heads: u32, tp: u32, rank: u32) -> (u32, u32) {
    match rule {
        HeadRule::Split => usual_heads(heads, tp)[rank as usize],
        HeadRule::Whole => (0, heads),
        HeadRule::Blocks(size) => {
            let blocks = usual_heads(heads / size, tp)[rank as usize];
            (blocks.0 * size, blocks.1 * size)
        }
    }
}

fn shares(placed: &Placement) -> Vec<Share> {
    match placed {
        Placement::Paged(p) => vec![Share {
            heads: (p.heads.start(), p.heads.end()),
            tokens: (p.tokens.count(), p.tokens.interleave(), p.tokens.index()),
        }],
        Placement::State(s) => {
            s.parts.iter().map(|h| Share { heads: (h.start(), h.end()), tokens: (1, 1, 0) }).collect()
        }
    }
}

/// The first rank and item whose placement is not the usual one, and the shares of its parts that it should have and has.
/// `rules` are by item, then by part; paged items have one.
#[must_use]
pub fn unusual(
    parallelism: &Parallelism,
    spec: &ModelSpec,
    rules: &[Vec<HeadRule>],
    ranks: &[RankPlacement],
) -> Option<(usize, usize, Vec<Share>, Vec<Share>)> {
    let mut rank = 0;
    for stage in &parallelism.stages {
        // Shares are numbered along the ranks of the first TP group, then of the next PCP rank.
        let mut before = 0;
        for _ in 0..parallelism.pcp {
            let mut dcp = 0;
            for tp in 0..parallelism.tp {
                let shards = parallelism.pcp_mode == PcpMode::Shard;
                let count = if shards { parallelism.pcp * parallelism.dcp } else { parallelism.dcp };
                let index = if shards { before + dcp } else { dcp };
                let tokens = if count == 1 { (1, 1, 0) } else { (count, parallelism.interleave, index) };
                for (item, info) in spec.items().iter().enumerate() {
                    let mut expected = Vec::new();
                    if stage.iter().any(|i| i.index() == item) {
                        let ruled = |(part, total)| ruled(rules[item][part], total, parallelism.tp, tp);
                        if let Some(paged) = info.as_paged() {
                            expected.push(Share { heads: ruled((0, paged.heads)), tokens });
                        }
                        for part in info.as_state().iter().flat_map(|s| s.parts.iter().map(|p| p.units).enumerate()) {
                            expected.push(Share { heads: ruled(part), tokens: (1, 1, 0) });
                        }
                    }
                    let got = ranks.get(rank).and_then(|r| r.get(item)?.as_ref()).map_or_else(Vec::new, shares);
                    if got != expected {
                        return Some((rank, item, expected, got));
                    }
                }
                rank += 1;
                dcp = if dcp + 1 == parallelism.dcp { 0 } else { dcp + 1 };
            }
            before += parallelism.dcp;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_earned() {
        assert_eq!(usual_heads(8, 4), [(0, 2), (2, 4), (4, 6), (6, 8)]);
        assert_eq!(usual_heads(8, 6), [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 8)]);
        assert_eq!(usual_heads(4, 8), [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)]);
        assert_eq!(usual_heads(1, 3), [(0, 1); 3]);
        assert_eq!(usual_heads(2, 3), [(0, 1), (0, 1), (1, 2)]);
    }
}
