//! How many blocks fit into the memory that a GPU has for them.

use kvferry_geometry::manifest::{Manifest, RankManifest};
use kvferry_models::{DEFAULT_SLOTS, DescribeError, EngineDescription, MAX_BLOCKS};

use crate::blocks::groups;

/// A rank whose memory has no room for a single block.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "rank {rank} has {bytes} bytes for its cache, and needs {states} for {slots} slots of states and {block} for one block; give it more \
     (kv_gib), have fewer slots, or share the model among more ranks"
)]
pub struct PoolFull {
    /// The rank.
    pub rank: u32,
    /// Bytes that it has.
    pub bytes: u64,
    /// Bytes of what is there whatever the number of blocks.
    pub states: u64,
    /// Slots of states; 0 where the model has none.
    pub slots: u32,
    /// Bytes of a block over all of the rank's layers.
    pub block: u64,
}

/// Why an engine's blocks can't be fitted.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FitError {
    /// The description makes no manifest.
    #[error(transparent)]
    Described(#[from] DescribeError),
    /// Its memory is too small.
    #[error(transparent)]
    Full(#[from] PoolFull),
}

/// Gives an engine as many blocks as fit into so many bytes of each of its GPUs. Where it says nothing of its slots of states, they
/// get half of the memory at most.
///
/// # Errors
/// If the description makes no manifest, or a rank has no room for one block.
pub fn fit_pool(d: &mut EngineDescription, bytes: u64) -> Result<(), FitError> {
    // Two sketches tell what a block takes and what is there anyway, on each rank: some have only states.
    let sketch = |d: &mut EngineDescription, blocks: u32| -> Result<Vec<u64>, DescribeError> {
        d.blocks = Some(blocks);
        Ok(lens(&d.manifest()?))
    };
    let ranks = |d: &mut EngineDescription| -> Result<Vec<(u64, u64)>, DescribeError> {
        let (few, more) = (sketch(d, FEW)?, sketch(d, 2 * FEW)?);
        let rank = |(few, more): (&u64, &u64)| {
            let each = more.saturating_sub(*few) / u64::from(FEW);
            (few.saturating_sub(each * u64::from(FEW)), each)
        };
        Ok(few.iter().zip(&more).map(rank).collect())
    };
    let mut of = ranks(d)?;
    let states = of.iter().map(|(fixed, _)| *fixed).max().unwrap_or(0);
    if d.slots.count.is_none() && states > bytes / 2 {
        let usual = u64::from(DEFAULT_SLOTS) * u64::from(d.slots.per_request);
        let slots = u128::from(usual) * u128::from(bytes / 2) / u128::from(states);
        let slots = u32::try_from(slots).unwrap_or(u32::MAX).max(d.slots.per_request).max(1);
        d.slots.count = Some(slots);
        of = ranks(d)?;
    }
    for (rank, &(states, block)) in (0u32..).zip(&of) {
        if states.saturating_add(block) > bytes {
            let m = d.manifest()?;
            let slots = groups(&m).filter(|g| states > 0 && m.is_state(*g)).map(|g| m.blocks(g).get()).max();
            return Err(PoolFull { rank, bytes, states, slots: slots.unwrap_or(0), block }.into());
        }
    }
    let fit = of.iter().filter(|(_, each)| *each > 0).map(|(fixed, each)| bytes.saturating_sub(*fixed) / each).min();
    let blocks = fit.map_or(MAX_BLOCKS, |n| u32::try_from(n).unwrap_or(u32::MAX));
    d.blocks = Some(blocks.clamp(1, MAX_BLOCKS));
    Ok(())
}

/// Blocks of the smaller sketch: so many that padding and rounding don't count.
const FEW: u32 = 64;

/// Bytes of each rank.
fn lens(m: &Manifest) -> Vec<u64> {
    let of = |r: &RankManifest| r.layout.regions.iter().map(|r| r.len.get()).fold(0, u64::saturating_add);
    m.ranks().iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use kvferry_models::Model;

    use super::*;

    fn fullest(d: &EngineDescription) -> u64 {
        lens(&d.manifest().unwrap()).into_iter().max().unwrap()
    }

    #[test]
    fn as_many_blocks_as_fit_and_not_one_more() {
        for (model, shape) in [
            ("llama-3.1-8b", "tp=2"),
            ("kimi-linear-48b-a3b", "tp=2"),
            ("deepseek-v3", "tp=4"),
            // Many and large states: there are fewer slots than usual.
            ("nemotron-h-56b", "tp=1"),
            ("nemotron-h-56b", "tp=2,pp=4"),
        ] {
            let mut d = EngineDescription::new(Model::preset(model).unwrap(), shape.parse().unwrap());
            let room = 8 << 30;
            fit_pool(&mut d, room).unwrap();
            assert!(fullest(&d) <= room, "{model} {shape}");
            assert!(d.blocks.is_some_and(|b| b > 100 && b < MAX_BLOCKS), "{model} {shape}: {:?}", d.blocks);
            d.blocks = d.blocks.map(|b| b + 2);
            assert!(fullest(&d) > room, "{model} {shape}");
        }
    }

    #[test]
    fn little_room_is_a_fault_that_says_how_much_is_needed() {
        let described = |model: &str| EngineDescription::new(Model::preset(model).unwrap(), "tp=1".parse().unwrap());
        // K and V of 8 heads of 128 values of two bytes, for 16 tokens in 32 layers.
        let block = 2 * 8 * 128 * 2 * 16 * 32;
        let full = PoolFull { rank: 0, bytes: block - 1, states: 0, slots: 0, block };
        assert_eq!(fit_pool(&mut described("llama-3.1-8b"), block - 1), Err(full.into()));
        let mut one = described("llama-3.1-8b");
        fit_pool(&mut one, block).unwrap();
        assert_eq!(one.blocks, Some(1));

        // States alone are more than there is.
        let mut d = described("nemotron-h-56b");
        d.slots.count = Some(256);
        let full = match fit_pool(&mut d, 40 << 30) {
            Err(FitError::Full(full)) => full,
            other => panic!("{other:?}"),
        };
        assert!(full.states > 40 << 30 && full.slots == 256 && full.to_string().contains("256 slots"), "{full}");
    }
}
