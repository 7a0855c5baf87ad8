//! Bytes that no rank of an engine holds.

use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::placement::Placement;
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::Name;

use crate::at;
use crate::walk::dealt;

/// A head of a token, or a unit of a state, that no rank holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Missing {
    /// The item.
    pub item: Name,
    /// The head or unit.
    pub head: u32,
    /// The token; 0 of a state.
    pub token: u64,
}

/// Walks the first `tokens` tokens of every item and head, and every unit of every part; gives the first gap of each item.
/// `tokens` must be at least the common period of the token classes for the answer to be about all tokens.
#[must_use]
pub fn uncovered(spec: &ModelSpec, ranks: &[RankManifest], tokens: u64) -> Vec<Missing> {
    let mut missing = Vec::new();
    for (index, item) in spec.items().iter().enumerate() {
        let placed = || ranks.iter().filter_map(|r| r.placement.get(index)?.as_ref());
        let gap = if let Some(paged) = item.as_paged() {
            let mut held = vec![vec![false; at(tokens)]; paged.heads as usize];
            for placed in placed().filter_map(Placement::as_paged) {
                for token in dealt(placed.tokens, tokens).into_iter().filter(|&t| t < tokens) {
                    for head in placed.heads.start()..placed.heads.end().min(paged.heads) {
                        held[head as usize][at(token)] = true;
                    }
                }
            }
            (0..paged.heads).find_map(|head| Some((head, held[head as usize].iter().position(|h| !h)?)))
        } else {
            let parts = item.as_state().into_iter().flat_map(|s| s.parts.iter().enumerate());
            let lacks = |part: usize, unit: u32| {
                let holds = |p: &Placement| p.as_state().and_then(|s| s.parts.get(part)).copied();
                !placed().filter_map(holds).any(|h| h.start() <= unit && unit < h.end())
            };
            let mut units = parts.flat_map(|(i, part)| (0..part.units).map(move |unit| (i, unit)));
            units.find(|&(part, unit)| lacks(part, unit)).map(|(_, unit)| (unit, 0))
        };
        missing.extend(gap.map(|(head, token)| Missing { item: item.name.clone(), head, token: token as u64 }));
    }
    missing
}
