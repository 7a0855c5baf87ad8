//! Block tables and the two sides of a request.

use kvferry_geometry::request::{BlockTable, DstGroup, Request, SrcGroup, Tail};
use kvferry_geometry::units::{BlockId, TokenRange, Tokens};

use super::{ConvertError, Converted};
use crate::peer::MAX_REQUEST_BLOCKS;
use crate::wire::bounded::List;
use crate::wire::dto;

/// How many blocks one side of a request may still list. With this limit on both sides, every order that an owner makes
/// from what it was told fits a frame.
pub(super) struct Budget(u64);

impl Budget {
    pub(super) fn new() -> Self {
        Self(MAX_REQUEST_BLOCKS)
    }

    fn table(&mut self, d: dto::Table) -> Converted<BlockTable> {
        // Counted before anything is expanded.
        for &(first, count) in &d.runs.0 {
            let left = self.0.checked_sub(u64::from(count));
            self.0 = left.ok_or(ConvertError::Tables { limit: MAX_REQUEST_BLOCKS })?;
            if first.checked_add(count).is_none() {
                return Err(ConvertError::Blocks { first, count });
            }
        }
        let ids: Vec<BlockId> =
            d.runs.into_iter().flat_map(|(first, count)| (first..first + count).map(BlockId::new)).collect();
        Ok(BlockTable::new(d.first, &ids))
    }

    pub(super) fn src<const N: usize>(&mut self, groups: List<dto::SrcGroup, N>) -> Converted<Vec<SrcGroup>> {
        let group = |d: dto::SrcGroup| {
            let (start, end) = d.held;
            if end < start {
                return Err(ConvertError::Tokens { start, end });
            }
            let held = TokenRange::new(Tokens::new(start), Tokens::new(end));
            let tail = match d.tail {
                dto::Tail::Exact => Tail::Exact,
                dto::Tail::Frozen => Tail::Frozen,
            };
            Ok(SrcGroup { table: self.table(d.table)?, held, tail })
        };
        groups.into_iter().map(group).collect()
    }

    pub(super) fn dst<const N: usize>(&mut self, groups: List<dto::DstGroup, N>) -> Converted<Vec<DstGroup>> {
        let group = |d: dto::DstGroup| Ok(DstGroup { table: self.table(d.table)?, cached: Tokens::new(d.cached) });
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

impl From<&SrcGroup> for dto::SrcGroup {
    fn from(g: &SrcGroup) -> Self {
        let tail = match g.tail {
            Tail::Exact => dto::Tail::Exact,
            Tail::Frozen => dto::Tail::Frozen,
        };
        Self { table: (&g.table).into(), held: (g.held.start().get(), g.held.end().get()), tail }
    }
}

impl From<&DstGroup> for dto::DstGroup {
    fn from(g: &DstGroup) -> Self {
        Self { table: (&g.table).into(), cached: g.cached.get() }
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
