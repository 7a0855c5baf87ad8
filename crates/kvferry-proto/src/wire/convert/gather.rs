//! The messages about gathering at the source.

use kvferry_geometry::digest::Digest;
use kvferry_geometry::units::{Bytes, RankId, Tokens};

use super::messages::{pairing, write_pairing};
use super::request::Budget;
use super::{ConvertError, Converted, clip, text};
use crate::peer::{Gather, GatherAnswer, Gathered, NotGathered};
use crate::rank::{FromRank, GatherOrder, PullId, ToRank};
use crate::wire::dto;

fn gathering(d: dto::Gathering) -> Converted<Result<Bytes, NotGathered>> {
    Ok(match d {
        Ok(offset) => Ok(Bytes::new(offset)),
        Err(dto::NotGathered::Differs(ours)) => Err(NotGathered::Differs { ours: ours.into() }),
        Err(dto::NotGathered::Unable(why)) => Err(NotGathered::Unable(text(why)?)),
    })
}

pub(super) fn write_gathering(result: &Result<Bytes, NotGathered>) -> dto::Gathering {
    match result {
        Ok(offset) => Ok(offset.get()),
        Err(NotGathered::Differs { ours }) => Err(dto::NotGathered::Differs(ours.into())),
        Err(NotGathered::Unable(why)) => Err(dto::NotGathered::Unable(clip(why))),
    }
}

impl From<dto::Batch> for Gathered {
    fn from(dto::Batch(bytes, batch): dto::Batch) -> Self {
        Self { bytes: Bytes::new(bytes), batch: Digest::from_bytes(batch) }
    }
}

impl From<&Gathered> for dto::Batch {
    fn from(m: &Gathered) -> Self {
        Self(m.bytes.get(), *m.batch.as_bytes())
    }
}

impl TryFrom<dto::Gather> for Gather {
    type Error = ConvertError;
    fn try_from(d: dto::Gather) -> Converted<Self> {
        Ok(Self {
            fence: d.fence.try_into()?,
            src: RankId::new(d.src),
            dst: RankId::new(d.dst),
            gathered: d.batch.into(),
            tokens: Tokens::new(d.tokens),
            groups: Budget::new().dst(d.groups)?,
        })
    }
}

impl From<&Gather> for dto::Gather {
    fn from(m: &Gather) -> Self {
        Self {
            fence: (&m.fence).into(),
            src: m.src.get(),
            dst: m.dst.get(),
            batch: (&m.gathered).into(),
            tokens: m.tokens.get(),
            groups: m.groups.iter().map(dto::DstGroup::from).collect(),
        }
    }
}

impl TryFrom<dto::GatherAnswer> for GatherAnswer {
    type Error = ConvertError;
    fn try_from(d: dto::GatherAnswer) -> Converted<Self> {
        let (src, dst) = (RankId::new(d.src), RankId::new(d.dst));
        Ok(Self { fence: d.fence.try_into()?, src, dst, result: gathering(d.result)? })
    }
}

impl From<&GatherAnswer> for dto::GatherAnswer {
    fn from(m: &GatherAnswer) -> Self {
        let result = write_gathering(&m.result);
        Self { fence: (&m.fence).into(), src: m.src.get(), dst: m.dst.get(), result }
    }
}

impl TryFrom<dto::GatherOrder> for GatherOrder {
    type Error = ConvertError;
    fn try_from(d: dto::GatherOrder) -> Converted<Self> {
        let (pairing, dst) = (pairing(&d.pairing), RankId::new(d.dst));
        Ok(Self { ticket: d.ticket, pairing, dst, gathered: d.batch.into(), request: d.request.try_into()? })
    }
}

impl From<&GatherOrder> for dto::GatherOrder {
    fn from(m: &GatherOrder) -> Self {
        let (pairing, request) = (write_pairing(&m.pairing), (&m.request).into());
        Self { ticket: m.ticket, pairing, dst: m.dst.get(), batch: (&m.gathered).into(), request }
    }
}

impl TryFrom<dto::GatherWanted> for FromRank {
    type Error = ConvertError;
    fn try_from(d: dto::GatherWanted) -> Converted<Self> {
        Ok(Self::GatherWanted { pull: PullId(d.pull), src: RankId::new(d.src), gathered: d.batch.into() })
    }
}

impl TryFrom<dto::Gathered> for FromRank {
    type Error = ConvertError;
    fn try_from(d: dto::Gathered) -> Converted<Self> {
        Ok(Self::Gathered { ticket: d.ticket, result: gathering(d.result)? })
    }
}

impl TryFrom<dto::GatherPlace> for ToRank {
    type Error = ConvertError;
    fn try_from(d: dto::GatherPlace) -> Converted<Self> {
        Ok(Self::GatherAnswer { pull: PullId(d.pull), src: RankId::new(d.src), result: gathering(d.result)? })
    }
}
