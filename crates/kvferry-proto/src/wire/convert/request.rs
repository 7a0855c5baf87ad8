//! Block tables and the two sides of a request.

use kvferry_geometry::request::{
    BlockTable, Checkpoint, DstGroup, DstPaged, DstState, Request, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::units::{BlockId, TokenRange, Tokens};

use super::{ConvertError, Converted};
use crate::peer::{MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES};
use crate::wire::bounded::List;
use crate::wire::dto;

/// How many blocks and states one side of a request may still list. With these limits on both sides, every order that an
/// owner makes from what it was told fits a frame.
pub(super) struct Budget {
    blocks: u64,
    states: usize,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self { blocks: MAX_REQUEST_BLOCKS, states: MAX_REQUEST_STATES }
    }

    fn table(&mut self, d: dto::Table) -> Converted<BlockTable> {
        // Counted before anything is expanded.
        for &(first, count) in &d.runs.0 {
            let left = self.blocks.checked_sub(u64::from(count));
            self.blocks = left.ok_or(ConvertError::Tables { limit: MAX_REQUEST_BLOCKS })?;
            if first.checked_add(count).is_none() {
                return Err(ConvertError::Blocks { first, count });
            }
        }
        let runs: Vec<(BlockId, u32)> = d.runs.into_iter().map(|(first, count)| (BlockId::new(first), count)).collect();
        Ok(BlockTable::from_runs(d.first, &runs))
    }

    fn checkpoints(&mut self, d: dto::Checkpoints) -> Converted<Vec<Checkpoint>> {
        let left = self.states.checked_sub(d.0.len());
        self.states = left.ok_or(ConvertError::States { limit: MAX_REQUEST_STATES })?;
        let checkpoint = |(position, slot)| Checkpoint { position: Tokens::new(position), slot: BlockId::new(slot) };
        Ok(d.into_iter().map(checkpoint).collect())
    }

    pub(super) fn src<const N: usize>(&mut self, groups: List<dto::SrcGroup, N>) -> Converted<Vec<SrcGroup>> {
        let group = |d: dto::SrcGroup| {
            let (table, (start, end), tail) = match d {
                dto::SrcGroup::Paged { table, held, tail } => (table, held, tail),
                dto::SrcGroup::State(list) => return Ok(SrcState { checkpoints: self.checkpoints(list)? }.into()),
            };
            if end < start {
                return Err(ConvertError::Tokens { start, end });
            }
            let held = TokenRange::new(Tokens::new(start), Tokens::new(end));
            let tail = match tail {
                dto::Tail::Exact => Tail::Exact,
                dto::Tail::Frozen => Tail::Frozen,
            };
            Ok(SrcPaged { table: self.table(table)?, held, tail }.into())
        };
        groups.into_iter().map(group).collect()
    }

    pub(super) fn dst<const N: usize>(&mut self, groups: List<dto::DstGroup, N>) -> Converted<Vec<DstGroup>> {
        let group = |d: dto::DstGroup| {
            Ok(match d {
                dto::DstGroup::Paged { table, cached } => {
                    DstPaged { table: self.table(table)?, cached: Tokens::new(cached) }.into()
                }
                dto::DstGroup::State { slot, more } => {
                    DstState { slot: slot.map(BlockId::new), more: self.checkpoints(more)? }.into()
                }
            })
        };
        groups.into_iter().map(group).collect()
    }
}

impl From<&BlockTable> for dto::Table {
    fn from(t: &BlockTable) -> Self {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for id in t.iter().map(BlockId::get) {
            match runs.last_mut() {
                Some((first, count)) if first.checked_add(*count) == Some(id) => *count += 1,
                _ => runs.push((id, 1)),
            }
        }
        Self { first: t.first_position(), runs: List(runs) }
    }
}

fn write_checkpoints(list: &[Checkpoint]) -> dto::Checkpoints {
    list.iter().map(|c| (c.position.get(), c.slot.get())).collect()
}

impl From<&SrcGroup> for dto::SrcGroup {
    fn from(g: &SrcGroup) -> Self {
        match g {
            SrcGroup::Paged(g) => {
                let tail = match g.tail {
                    Tail::Exact => dto::Tail::Exact,
                    Tail::Frozen => dto::Tail::Frozen,
                };
                Self::Paged { table: (&g.table).into(), held: (g.held.start().get(), g.held.end().get()), tail }
            }
            SrcGroup::State(g) => Self::State(write_checkpoints(&g.checkpoints)),
        }
    }
}

impl From<&DstGroup> for dto::DstGroup {
    fn from(g: &DstGroup) -> Self {
        match g {
            DstGroup::Paged(g) => Self::Paged { table: (&g.table).into(), cached: g.cached.get() },
            DstGroup::State(g) => Self::State { slot: g.slot.map(BlockId::get), more: write_checkpoints(&g.more) },
        }
    }
}

impl TryFrom<dto::Request> for Request {
    type Error = ConvertError;
    fn try_from(d: dto::Request) -> Converted<Self> {
        let (src, dst) = (Budget::new().src(d.src)?, Budget::new().dst(d.dst)?);
        Ok(Self { tokens: Tokens::new(d.tokens), src, dst })
    }
}

impl From<&Request> for dto::Request {
    fn from(r: &Request) -> Self {
        Self {
            tokens: r.tokens.get(),
            src: r.src.iter().map(dto::SrcGroup::from).collect(),
            dst: r.dst.iter().map(dto::DstGroup::from).collect(),
        }
    }
}
