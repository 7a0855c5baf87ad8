//! Grants, write orders, streams, and how writes ended.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::{Bytes, ItemId, RankId, Tokens};

use super::messages::{nanos, pairing, stage, write_pairing, write_stage};
use super::request::Budget;
use super::{ConvertError, Converted, clip, text};
use crate::names::{Attempt, Fence, LeaseId};
use crate::push::{
    Progress, PushBind, PushId, PushOrder, Ready, Room, Stop, Stoppage, Stopped, Stream, WriteReport, WriterEnd,
    WriterReport, Written,
};
use crate::rank::{FromRank, RankFault};
use crate::wire::dto;

/// A stream that is over.
pub(super) struct Ended(pub(super) LeaseId);

impl TryFrom<dto::PushBind> for PushBind {
    type Error = ConvertError;
    fn try_from(d: dto::PushBind) -> Converted<Self> {
        let room = Room {
            tokens: Tokens::new(d.tokens),
            groups: Budget::new().dst(d.groups)?,
            within: Duration::from_nanos(d.within_ns),
            priority: d.priority,
            progress: d.progress,
        };
        Ok(Self { bind: d.bind.try_into()?, room })
    }
}

impl From<&PushBind> for dto::PushBind {
    fn from(m: &PushBind) -> Self {
        Self {
            bind: (&m.bind).into(),
            tokens: m.room.tokens.get(),
            groups: m.room.groups.iter().map(dto::DstGroup::from).collect(),
            within_ns: nanos(m.room.within),
            priority: m.room.priority,
            progress: m.room.progress,
        }
    }
}

/// Ends without what was written, which stands in a list of its own.
fn ends(ends: impl Iterator<Item = dto::WriterEnd>, writes: dto::Writes) -> Converted<Vec<WriterEnd>> {
    let end = |d: dto::WriterEnd| -> Converted<WriterEnd> {
        Ok(match d {
            Ok(r) => Ok(WriterReport {
                writes: Vec::new(),
                queued: Duration::from_nanos(r.queued_ns),
                slices: r.slices,
                took: Duration::from_nanos(r.took_ns),
            }),
            Err(f) => {
                Err(RankFault { stage: stage(&f.stage), text: text(f.text)?, in_doubt: f.in_doubt, bad: Vec::new() })
            }
        })
    };
    let mut all: Vec<WriterEnd> = ends.map(end).collect::<Converted<_>>()?;
    for w in writes {
        let writer = usize::try_from(w.writer).ok().and_then(|at| all.get_mut(at));
        let Some(Ok(report)) = writer else { return Err(ConvertError::Writer { writer: w.writer }) };
        report.writes.push(WriteReport {
            dst: RankId::new(w.dst),
            bytes: Bytes::new(w.bytes),
            descriptors: w.descriptors,
            lane: text(w.lane)?,
            took: Duration::from_nanos(w.took_ns),
        });
    }
    Ok(all)
}

fn write_end(end: &WriterEnd) -> dto::WriterEnd {
    match end {
        Ok(r) => Ok(dto::WriterReport { queued_ns: nanos(r.queued), slices: r.slices, took_ns: nanos(r.took) }),
        Err(f) => Err(dto::WriterFault { stage: write_stage(f.stage), text: clip(&f.text), in_doubt: f.in_doubt }),
    }
}

fn write_writes<'a>(ends: impl Iterator<Item = &'a WriterEnd>) -> dto::Writes {
    let of = |(writer, end): (u32, &'a WriterEnd)| {
        end.iter().flat_map(|r| &r.writes).map(move |w| dto::Write {
            writer,
            dst: w.dst.get(),
            bytes: w.bytes.get(),
            descriptors: w.descriptors,
            lane: clip(&w.lane),
            took_ns: nanos(w.took),
        })
    };
    (0u32..).zip(ends).flat_map(of).collect()
}

impl TryFrom<dto::Written> for Written {
    type Error = ConvertError;
    fn try_from(d: dto::Written) -> Converted<Self> {
        let (ranks, all): (Vec<u32>, Vec<dto::WriterEnd>) = d.writers.into_iter().unzip();
        let ends = ends(all.into_iter(), d.writes)?;
        let writers = ranks.into_iter().map(RankId::new).zip(ends).collect();
        Ok(Self { fence: d.fence.try_into()?, writers, groups: Budget::new().src(d.groups)? })
    }
}

impl From<&Written> for dto::Written {
    fn from(m: &Written) -> Self {
        Self {
            fence: (&m.fence).into(),
            writers: m.writers.iter().map(|(rank, end)| (rank.get(), write_end(end))).collect(),
            writes: write_writes(m.writers.iter().map(|(_, end)| end)),
            groups: m.groups.iter().map(dto::SrcGroup::from).collect(),
        }
    }
}

/// What a rank says of its own writes.
pub(super) fn write_pushed(push: PushId, result: &WriterEnd) -> dto::Pushed {
    dto::Pushed { push: push.0, result: write_end(result), writes: write_writes(std::iter::once(result)) }
}

impl TryFrom<dto::Progress> for Progress {
    type Error = ConvertError;
    fn try_from(d: dto::Progress) -> Converted<Self> {
        Ok(Self { fence: d.fence.try_into()?, tokens: Tokens::new(d.tokens) })
    }
}

impl From<&Progress> for dto::Progress {
    fn from(m: &Progress) -> Self {
        Self { fence: (&m.fence).into(), tokens: m.tokens.get() }
    }
}

impl TryFrom<dto::Fence> for Stop {
    type Error = ConvertError;
    fn try_from(d: dto::Fence) -> Converted<Self> {
        Ok(Self { fence: Fence::try_from(d)? })
    }
}

impl TryFrom<dto::Stopped> for Stopped {
    type Error = ConvertError;
    fn try_from(d: dto::Stopped) -> Converted<Self> {
        let writers = match d.writers {
            dto::Stoppage::All => Stoppage::All,
            dto::Stoppage::Except(ranks) => Stoppage::Except(ranks.into_iter().map(RankId::new).collect()),
            dto::Stoppage::Unknown => Stoppage::Unknown,
        };
        Ok(Self { fence: d.fence.try_into()?, writers })
    }
}

impl From<&Stopped> for dto::Stopped {
    fn from(m: &Stopped) -> Self {
        let writers = match &m.writers {
            Stoppage::All => dto::Stoppage::All,
            Stoppage::Except(ranks) => dto::Stoppage::Except(ranks.iter().map(|r| r.get()).collect()),
            Stoppage::Unknown => dto::Stoppage::Unknown,
        };
        Self { fence: (&m.fence).into(), writers }
    }
}

impl TryFrom<u64> for PushId {
    type Error = ConvertError;
    fn try_from(d: u64) -> Converted<Self> {
        Ok(Self(d))
    }
}

impl TryFrom<u128> for Ended {
    type Error = ConvertError;
    fn try_from(d: u128) -> Converted<Self> {
        Ok(Self(LeaseId::new(d)))
    }
}

impl TryFrom<dto::Push> for PushOrder {
    type Error = ConvertError;
    fn try_from(d: dto::Push) -> Converted<Self> {
        Ok(Self {
            push: PushId(d.push),
            lease: LeaseId::new(d.lease),
            attempt: Attempt::new(d.attempt),
            streamed: d.streamed,
            pairing: pairing(&d.pairing),
            request: Arc::new(d.request.try_into()?),
            priority: d.priority,
            within: Duration::from_nanos(d.within_ns),
            progress: d.progress,
        })
    }
}

impl From<&PushOrder> for dto::Push {
    fn from(m: &PushOrder) -> Self {
        Self {
            push: m.push.0,
            lease: m.lease.get(),
            attempt: m.attempt.get(),
            streamed: m.streamed,
            pairing: write_pairing(&m.pairing),
            request: (&*m.request).into(),
            priority: m.priority,
            within_ns: nanos(m.within),
            progress: m.progress,
        }
    }
}

impl TryFrom<dto::Stream> for Stream {
    type Error = ConvertError;
    fn try_from(d: dto::Stream) -> Converted<Self> {
        let (lease, attempt) = (LeaseId::new(d.lease), Attempt::new(d.attempt));
        Ok(Self { lease, attempt, groups: Budget::new().src(d.groups)?, sealed: d.sealed })
    }
}

impl From<&Stream> for dto::Stream {
    fn from(m: &Stream) -> Self {
        let groups = m.groups.iter().map(dto::SrcGroup::from).collect();
        Self { lease: m.lease.get(), attempt: m.attempt.get(), groups, sealed: m.sealed }
    }
}

impl TryFrom<dto::Ready> for Ready {
    type Error = ConvertError;
    fn try_from(d: dto::Ready) -> Converted<Self> {
        let items = d.items.into_iter().map(ItemId::new).collect();
        let (lease, attempt) = (LeaseId::new(d.lease), Attempt::new(d.attempt));
        Ok(Self { lease, attempt, items, tokens: Tokens::new(d.tokens) })
    }
}

impl From<&Ready> for dto::Ready {
    fn from(m: &Ready) -> Self {
        let items = m.items.iter().map(|i| i.get()).collect();
        Self { lease: m.lease.get(), attempt: m.attempt.get(), items, tokens: m.tokens.get() }
    }
}

impl TryFrom<dto::Pushed> for FromRank {
    type Error = ConvertError;
    fn try_from(d: dto::Pushed) -> Converted<Self> {
        let mut ends = ends(std::iter::once(d.result), d.writes)?;
        let result = ends.pop().ok_or(ConvertError::Writer { writer: 0 })?;
        Ok(Self::Pushed { push: PushId(d.push), result })
    }
}

impl TryFrom<dto::PushProgress> for FromRank {
    type Error = ConvertError;
    fn try_from(d: dto::PushProgress) -> Converted<Self> {
        Ok(Self::PushProgress { push: PushId(d.push), tokens: Tokens::new(d.tokens) })
    }
}
