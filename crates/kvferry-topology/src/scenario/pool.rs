//! How many blocks fit into the memory that a GPU has for them.

use kvferry_geometry::manifest::Manifest;
use kvferry_models::{DescribeError, EngineDescription, MAX_BLOCKS};

/// Gives an engine as many blocks as fit into so many bytes of each of its GPUs, slots of states first. None fit: it gets one.
///
/// # Errors
/// If the description makes no manifest.
pub fn fit_pool(d: &mut EngineDescription, bytes: u64) -> Result<(), DescribeError> {
    let mut most = |blocks: u32| -> Result<u64, DescribeError> {
        d.blocks = Some(blocks);
        Ok(fullest(&d.manifest()?))
    };
    // Two sketches tell what a block takes and what is there anyway; padding may make the first few dearer.
    let (few, more) = (most(64)?, most(128)?);
    let each = (more - few.min(more)) / 64;
    let rest = bytes.saturating_sub(few);
    let blocks = match (bytes >= few, each) {
        (true, 1..) => 64 + rest / each,
        // Less than the sketch.
        (false, 1..) => (64u64).saturating_sub((few - bytes).div_ceil(each)),
        (_, 0) => u64::from(MAX_BLOCKS),
    };
    d.blocks = Some(u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, MAX_BLOCKS));
    Ok(())
}

/// Bytes of the rank that has the most.
fn fullest(m: &Manifest) -> u64 {
    let of = |r: &kvferry_geometry::manifest::RankManifest| {
        r.layout.regions.iter().map(|r| r.len.get()).fold(0, u64::saturating_add)
    };
    m.ranks().iter().map(of).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use kvferry_models::Model;

    use super::*;

    #[test]
    fn as_many_blocks_as_fit_and_not_one_more() {
        for (model, shape) in [("llama-3.1-8b", "tp=2"), ("kimi-linear-48b-a3b", "tp=2"), ("deepseek-v3", "tp=4")] {
            let mut d = EngineDescription::new(Model::preset(model).unwrap(), shape.parse().unwrap());
            let room = 8 << 30;
            fit_pool(&mut d, room).unwrap();
            assert!(fullest(&d.manifest().unwrap()) <= room, "{model}");
            d.blocks = d.blocks.map(|b| b + 2);
            assert!(fullest(&d.manifest().unwrap()) > room, "{model}");
        }
    }

    #[test]
    fn little_room_is_one_block() {
        let mut d = EngineDescription::new(Model::preset("llama-3.1-8b").unwrap(), "tp=1".parse().unwrap());
        fit_pool(&mut d, 1).unwrap();
        assert_eq!(d.blocks, Some(1));
    }
}
