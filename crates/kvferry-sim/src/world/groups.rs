//! Blocks of a sequence as offers and requests list them.

use kvferry_geometry::request::{
    BlockTable, Checkpoint, DstGroup, DstPaged, DstState, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::units::{TokenRange, Tokens};
use kvferry_proto::names::ContentKey;

use super::{Script, World};
use crate::engine::{Blocks, ids};

impl<S: Script> World<S> {
    /// What is offered of a sequence of `tokens`: blocks for its first `listed` tokens, and states if they are computed.
    pub(crate) fn src_groups(
        &self,
        engine: u32,
        blocks: &Blocks,
        tokens: u64,
        listed: u64,
        states: bool,
    ) -> Vec<SrcGroup> {
        let each = self.engines.get(engine as usize).map(|e| e.block_tokens()).unwrap_or_default();
        let held = TokenRange::new(Tokens::ZERO, Tokens::new(tokens));
        let of = |(list, each): (&Vec<u32>, &u64)| -> SrcGroup {
            if *each == 0 {
                let slot = ids(list).first().copied().filter(|_| states);
                let checkpoint = |slot| Checkpoint { position: Tokens::new(tokens), slot };
                return SrcState { checkpoints: slot.map(checkpoint).into_iter().collect() }.into();
            }
            let count = usize::try_from(listed.div_ceil(*each)).unwrap_or(usize::MAX).min(list.len());
            SrcPaged { table: BlockTable::new(0, &ids(&list[..count])), held, tail: Tail::Exact }.into()
        };
        blocks.iter().zip(&each).map(of).collect()
    }

    pub(crate) fn dst_groups(&self, engine: u32, blocks: &Blocks, cached: u64) -> Vec<DstGroup> {
        let each = self.engines.get(engine as usize).map(|e| e.block_tokens()).unwrap_or_default();
        let of = |(list, each): (&Vec<u32>, &u64)| -> DstGroup {
            match each {
                0 => DstState { slot: ids(list).first().copied(), more: Vec::new() }.into(),
                _ => DstPaged { table: BlockTable::new(0, &ids(list)), cached: Tokens::new(cached) }.into(),
            }
        };
        blocks.iter().zip(&each).map(of).collect()
    }
}

/// The key of a content: what it was computed from.
#[must_use]
pub fn key(content: u64) -> ContentKey {
    let mut bytes = [0x6b; 32];
    bytes[..8].copy_from_slice(&content.to_le_bytes());
    ContentKey::from_bytes(bytes)
}
