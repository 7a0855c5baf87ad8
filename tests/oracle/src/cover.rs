//! Bytes that no rank of an engine holds.

use kvferry_geometry::manifest::RankManifest;
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::Name;

use crate::at;
use crate::walk::dealt;

/// A head of a token that no rank holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Missing {
    /// The item.
    pub item: Name,
    /// The head.
    pub head: u32,
    /// The token.
    pub token: u64,
}

/// Walks the first `tokens` tokens of every item and head; gives the first gap of each item. `tokens` must be at least
/// the common period of the token classes for the answer to be about all tokens.
#[must_use]
pub fn uncovered(spec: &ModelSpec, ranks: &[RankManifest], tokens: u64) -> Vec<Missing> {
    let mut missing = Vec::new();
    for (index, item) in spec.items().iter().enumerate() {
        let Some(heads) = item.as_paged().map(|p| p.heads) else { continue };
        let mut held = vec![vec![false; at(tokens)]; heads as usize];
        for placed in ranks.iter().filter_map(|r| r.placement.get(index)?.as_ref()?.as_paged()) {
            for token in dealt(placed.tokens, tokens).into_iter().filter(|&t| t < tokens) {
                for head in placed.heads.start()..placed.heads.end().min(heads) {
                    held[head as usize][at(token)] = true;
                }
            }
        }
        let gap = (0..heads).find_map(|head| {
            let token = held[head as usize].iter().position(|h| !h)?;
            Some(Missing { item: item.name.clone(), head, token: token as u64 })
        });
        missing.extend(gap);
    }
    missing
}
