//! Messages of both kinds of links.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::{CompatOptions, Unmatched};
use kvferry_geometry::digest::Digest;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{BlockId, Bytes, Name, RankId, Tokens};

use super::request::Budget;
use super::{ConvertError, Converted, clip, text};
use crate::manifest::{EngineManifest, RankJoin};
use crate::names::{Attempt, ContentKey, EngineId, Epoch, Fence, LeaseId};
use crate::peer::{
    Bind, BindAnswer, BindRefusal, Grant, MAX_PIECES, PieceDigest, ReadsEnd, Release, ReleaseAnswer, RunDigest,
    RunDigestAnswer, Verdict, Window,
};
use crate::rank::{
    Assurance, BadBlock, DigestOrder, FromRank, MAX_BAD_BLOCKS, Pairing, PullId, PullOrder, RankFault, RankReport,
    SourceReport, Stage, ToRank,
};
use crate::wire::dto;

/// Results of conversions whose own types are not ours to implement a trait for.
pub(super) struct Reasons(pub(super) Vec<String>);
pub(super) struct Shared(pub(super) Arc<EngineManifest>);
pub(super) struct Text(pub(super) String);
pub(super) struct Named(pub(super) Digest);
pub(super) struct Cancelled(pub(super) PullId);
pub(super) struct Ticket(pub(super) u64);

impl TryFrom<dto::Refused> for Reasons {
    type Error = ConvertError;
    fn try_from(d: dto::Refused) -> Converted<Self> {
        Ok(Self(d.0.into_iter().map(text).collect::<Converted<_>>()?))
    }
}

impl TryFrom<dto::Engine<'_>> for Shared {
    type Error = ConvertError;
    fn try_from(d: dto::Engine<'_>) -> Converted<Self> {
        Ok(Self(Arc::new(EngineManifest::try_from(d)?)))
    }
}

impl TryFrom<String> for Text {
    type Error = ConvertError;
    fn try_from(d: String) -> Converted<Self> {
        Ok(Self(text(d)?))
    }
}

impl TryFrom<[u8; 32]> for Named {
    type Error = ConvertError;
    fn try_from(d: [u8; 32]) -> Converted<Self> {
        Ok(Self(Digest::from_bytes(d)))
    }
}

impl TryFrom<u64> for Cancelled {
    type Error = ConvertError;
    fn try_from(d: u64) -> Converted<Self> {
        Ok(Self(PullId(d)))
    }
}

impl TryFrom<u64> for Ticket {
    type Error = ConvertError;
    fn try_from(d: u64) -> Converted<Self> {
        Ok(Self(d))
    }
}

impl TryFrom<dto::Fence> for Fence {
    type Error = ConvertError;
    fn try_from(d: dto::Fence) -> Converted<Self> {
        Ok(Self {
            engine: EngineId::new(&d.engine)?,
            epoch: Epoch::new(d.epoch),
            lease: LeaseId::new(d.lease),
            attempt: Attempt::new(d.attempt),
        })
    }
}

impl From<&Fence> for dto::Fence {
    fn from(f: &Fence) -> Self {
        Self { engine: f.engine.as_str().into(), epoch: f.epoch.get(), lease: f.lease.get(), attempt: f.attempt.get() }
    }
}

impl TryFrom<dto::Bind> for Bind {
    type Error = ConvertError;
    fn try_from(d: dto::Bind) -> Converted<Self> {
        Ok(Self {
            fence: d.fence.try_into()?,
            content_key: ContentKey::from_bytes(d.content_key),
            salt: d.salt,
            peer_map: Digest::from_bytes(d.peer_map),
        })
    }
}

impl From<&Bind> for dto::Bind {
    fn from(m: &Bind) -> Self {
        Self {
            fence: (&m.fence).into(),
            content_key: *m.content_key.as_bytes(),
            salt: m.salt,
            peer_map: *m.peer_map.as_bytes(),
        }
    }
}

impl TryFrom<dto::BindAnswer> for BindAnswer {
    type Error = ConvertError;
    fn try_from(d: dto::BindAnswer) -> Converted<Self> {
        Ok(match d {
            dto::BindAnswer::Bound { fence, groups, time_left_ns } => Self::Bound(Grant {
                fence: fence.try_into()?,
                groups: Budget::new().src(groups)?,
                time_left: time_left_ns.map(Duration::from_nanos),
            }),
            dto::BindAnswer::Refused { fence, reason } => {
                let reason = match reason {
                    dto::BindRefusal::WrongEngine => BindRefusal::WrongEngine,
                    dto::BindRefusal::StaleEpoch(e) => BindRefusal::StaleEpoch { current: Epoch::new(e) },
                    dto::BindRefusal::UnknownLease => BindRefusal::UnknownLease,
                    dto::BindRefusal::AlreadyBound => BindRefusal::AlreadyBound,
                    dto::BindRefusal::WrongAttempt { expected, got } => BindRefusal::WrongAttempt { expected, got },
                    dto::BindRefusal::WrongContent => BindRefusal::WrongContent,
                    dto::BindRefusal::PeerMapDiffers(d) => BindRefusal::PeerMapDiffers { ours: Digest::from_bytes(d) },
                    dto::BindRefusal::Incompatible(why) => BindRefusal::Incompatible(text(why)?),
                    dto::BindRefusal::RankLost(rank, why) => {
                        BindRefusal::RankLost { rank: RankId::new(rank), reason: text(why)? }
                    }
                    dto::BindRefusal::Busy(why) => BindRefusal::Busy(text(why)?),
                    dto::BindRefusal::NotSealed => BindRefusal::NotSealed,
                    dto::BindRefusal::Unfit(why) => BindRefusal::Unfit(text(why)?),
                };
                Self::Refused { fence: fence.try_into()?, reason }
            }
        })
    }
}

impl From<&BindAnswer> for dto::BindAnswer {
    fn from(m: &BindAnswer) -> Self {
        match m {
            BindAnswer::Bound(grant) => Self::Bound {
                fence: (&grant.fence).into(),
                groups: grant.groups.iter().map(dto::SrcGroup::from).collect(),
                time_left_ns: grant.time_left.map(nanos),
            },
            BindAnswer::Refused { fence, reason } => {
                let reason = match reason {
                    BindRefusal::WrongEngine => dto::BindRefusal::WrongEngine,
                    BindRefusal::StaleEpoch { current } => dto::BindRefusal::StaleEpoch(current.get()),
                    BindRefusal::UnknownLease => dto::BindRefusal::UnknownLease,
                    BindRefusal::AlreadyBound => dto::BindRefusal::AlreadyBound,
                    &BindRefusal::WrongAttempt { expected, got } => dto::BindRefusal::WrongAttempt { expected, got },
                    BindRefusal::WrongContent => dto::BindRefusal::WrongContent,
                    BindRefusal::PeerMapDiffers { ours } => dto::BindRefusal::PeerMapDiffers(*ours.as_bytes()),
                    BindRefusal::Incompatible(why) => dto::BindRefusal::Incompatible(clip(why)),
                    BindRefusal::RankLost { rank, reason } => dto::BindRefusal::RankLost(rank.get(), clip(reason)),
                    BindRefusal::Busy(why) => dto::BindRefusal::Busy(clip(why)),
                    BindRefusal::NotSealed => dto::BindRefusal::NotSealed,
                    BindRefusal::Unfit(why) => dto::BindRefusal::Unfit(clip(why)),
                };
                Self::Refused { fence: fence.into(), reason }
            }
        }
    }
}

impl TryFrom<dto::Release> for Release {
    type Error = ConvertError;
    fn try_from(d: dto::Release) -> Converted<Self> {
        let reads = match d.reads {
            dto::ReadsEnd::Complete => ReadsEnd::Complete,
            dto::ReadsEnd::Abandoned => ReadsEnd::Abandoned,
            dto::ReadsEnd::Declined => ReadsEnd::Declined,
        };
        Ok(Self { fence: d.fence.try_into()?, reads })
    }
}

impl From<&Release> for dto::Release {
    fn from(m: &Release) -> Self {
        let reads = match m.reads {
            ReadsEnd::Complete => dto::ReadsEnd::Complete,
            ReadsEnd::Abandoned => dto::ReadsEnd::Abandoned,
            ReadsEnd::Declined => dto::ReadsEnd::Declined,
        };
        Self { fence: (&m.fence).into(), reads }
    }
}

impl TryFrom<dto::ReleaseAnswer> for ReleaseAnswer {
    type Error = ConvertError;
    fn try_from(d: dto::ReleaseAnswer) -> Converted<Self> {
        let verdict = match d.verdict {
            dto::Verdict::Held => Verdict::Held,
            dto::Verdict::Stale => Verdict::Stale,
        };
        Ok(Self { fence: d.fence.try_into()?, verdict })
    }
}

impl From<&ReleaseAnswer> for dto::ReleaseAnswer {
    fn from(m: &ReleaseAnswer) -> Self {
        let verdict = match m.verdict {
            Verdict::Held => dto::Verdict::Held,
            Verdict::Stale => dto::Verdict::Stale,
        };
        Self { fence: (&m.fence).into(), verdict }
    }
}

fn windows(d: dto::Windows) -> Converted<Vec<Window>> {
    let invalid = ConvertError::Windows { limit: MAX_PIECES };
    let (mut pieces, mut end) = (0u64, 0u64);
    let mut out = Vec::new();
    for (start, len, piece) in d {
        let window = Window { start, len, piece };
        // In order and apart, so that no byte is digested twice for one question.
        if start < end {
            return Err(invalid);
        }
        end = start.saturating_add(len);
        pieces = window.pieces().and_then(|n| pieces.checked_add(n)).ok_or_else(|| invalid.clone())?;
        out.push(window);
    }
    if pieces > MAX_PIECES as u64 { Err(invalid) } else { Ok(out) }
}

pub(super) fn write_windows(windows: &[Window]) -> dto::Windows {
    windows.iter().map(|w| (w.start, w.len, w.piece)).collect()
}

fn pieces(d: dto::Pieces) -> Converted<Result<Vec<PieceDigest>, String>> {
    Ok(match d {
        Ok(list) => Ok(list.0),
        Err(why) => Err(text(why)?),
    })
}

pub(super) fn write_pieces(pieces: &Result<Vec<PieceDigest>, String>) -> dto::Pieces {
    match pieces {
        Ok(list) => Ok(list.iter().copied().collect()),
        Err(why) => Err(clip(why)),
    }
}

impl TryFrom<dto::RunDigest> for RunDigest {
    type Error = ConvertError;
    fn try_from(d: dto::RunDigest) -> Converted<Self> {
        Ok(Self {
            fence: d.fence.try_into()?,
            src: RankId::new(d.src),
            dst: RankId::new(d.dst),
            tokens: Tokens::new(d.tokens),
            groups: Budget::new().dst(d.groups)?,
            windows: windows(d.windows)?,
        })
    }
}

impl From<&RunDigest> for dto::RunDigest {
    fn from(m: &RunDigest) -> Self {
        Self {
            fence: (&m.fence).into(),
            src: m.src.get(),
            dst: m.dst.get(),
            tokens: m.tokens.get(),
            groups: m.groups.iter().map(dto::DstGroup::from).collect(),
            windows: write_windows(&m.windows),
        }
    }
}

impl TryFrom<dto::RunDigestAnswer> for RunDigestAnswer {
    type Error = ConvertError;
    fn try_from(d: dto::RunDigestAnswer) -> Converted<Self> {
        let (src, dst) = (RankId::new(d.src), RankId::new(d.dst));
        Ok(Self { fence: d.fence.try_into()?, src, dst, pieces: pieces(d.pieces)? })
    }
}

impl From<&RunDigestAnswer> for dto::RunDigestAnswer {
    fn from(m: &RunDigestAnswer) -> Self {
        let pieces = write_pieces(&m.pieces);
        Self { fence: (&m.fence).into(), src: m.src.get(), dst: m.dst.get(), pieces }
    }
}

impl TryFrom<dto::Join<'_>> for RankJoin {
    type Error = ConvertError;
    fn try_from(d: dto::Join<'_>) -> Converted<Self> {
        Ok(Self {
            engine: EngineId::new(d.engine)?,
            rank: RankId::new(d.rank),
            epoch: Epoch::new(d.epoch),
            manifest: d.manifest.try_into()?,
            blob: Arc::from(d.blob.0),
        })
    }
}

impl<'a> From<&'a RankJoin> for dto::Join<'a> {
    fn from(m: &'a RankJoin) -> Self {
        Self {
            engine: m.engine.as_str(),
            rank: m.rank.get(),
            epoch: m.epoch.get(),
            manifest: (&m.manifest).into(),
            blob: m.blob.iter().copied().collect(),
        }
    }
}

pub(super) fn pairing(d: &dto::Pairing) -> Pairing {
    let unmatched = |d: &dto::Unmatched| match d {
        dto::Unmatched::Refuse => Unmatched::Refuse,
        dto::Unmatched::Ignore => Unmatched::Ignore,
    };
    let (source_only, destination_only) = (unmatched(&d.source_only), unmatched(&d.destination_only));
    Pairing {
        peer: Digest::from_bytes(d.peer),
        options: PeerOptions { salt: d.salt, stripe: d.stripe },
        compat: CompatOptions { source_only, destination_only },
        peer_map: Digest::from_bytes(d.peer_map),
    }
}

pub(super) fn write_pairing(p: &Pairing) -> dto::Pairing {
    let unmatched = |u| match u {
        Unmatched::Refuse => dto::Unmatched::Refuse,
        Unmatched::Ignore => dto::Unmatched::Ignore,
    };
    dto::Pairing {
        peer: *p.peer.as_bytes(),
        salt: p.options.salt,
        stripe: p.options.stripe,
        source_only: unmatched(p.compat.source_only),
        destination_only: unmatched(p.compat.destination_only),
        peer_map: *p.peer_map.as_bytes(),
    }
}

impl TryFrom<dto::Pull> for PullOrder {
    type Error = ConvertError;
    fn try_from(d: dto::Pull) -> Converted<Self> {
        let assurance = match d.assurance {
            dto::Assurance::Fenced => Assurance::Fenced,
            dto::Assurance::Sampled => Assurance::Sampled,
            dto::Assurance::Full => Assurance::Full,
        };
        Ok(Self {
            pull: PullId(d.pull),
            pairing: pairing(&d.pairing),
            request: Arc::new(d.request.try_into()?),
            assurance,
            priority: d.priority,
            deadline: d.deadline_ns.map(Duration::from_nanos),
            written: d.written,
        })
    }
}

impl From<&PullOrder> for dto::Pull {
    fn from(m: &PullOrder) -> Self {
        let assurance = match m.assurance {
            Assurance::Fenced => dto::Assurance::Fenced,
            Assurance::Sampled => dto::Assurance::Sampled,
            Assurance::Full => dto::Assurance::Full,
        };
        Self {
            pull: m.pull.0,
            pairing: write_pairing(&m.pairing),
            request: (&*m.request).into(),
            assurance,
            priority: m.priority,
            deadline_ns: m.deadline.map(nanos),
            written: m.written,
        }
    }
}

impl TryFrom<dto::DigestOrder> for DigestOrder {
    type Error = ConvertError;
    fn try_from(d: dto::DigestOrder) -> Converted<Self> {
        Ok(Self {
            ticket: d.ticket,
            pairing: pairing(&d.pairing),
            dst: RankId::new(d.dst),
            request: d.request.try_into()?,
            windows: windows(d.windows)?,
        })
    }
}

impl From<&DigestOrder> for dto::DigestOrder {
    fn from(m: &DigestOrder) -> Self {
        Self {
            ticket: m.ticket,
            pairing: write_pairing(&m.pairing),
            dst: m.dst.get(),
            request: (&m.request).into(),
            windows: write_windows(&m.windows),
        }
    }
}

impl TryFrom<dto::DigestAnswer> for ToRank {
    type Error = ConvertError;
    fn try_from(d: dto::DigestAnswer) -> Converted<Self> {
        Ok(Self::DigestAnswer { pull: PullId(d.pull), src: RankId::new(d.src), pieces: pieces(d.pieces)? })
    }
}

impl TryFrom<dto::DigestWanted> for FromRank {
    type Error = ConvertError;
    fn try_from(d: dto::DigestWanted) -> Converted<Self> {
        Ok(Self::DigestWanted { pull: PullId(d.pull), src: RankId::new(d.src), windows: windows(d.windows)? })
    }
}

impl TryFrom<dto::Digested> for FromRank {
    type Error = ConvertError;
    fn try_from(d: dto::Digested) -> Converted<Self> {
        Ok(Self::Digested { ticket: d.ticket, pieces: pieces(d.pieces)? })
    }
}

impl TryFrom<dto::Pulled> for FromRank {
    type Error = ConvertError;
    fn try_from(d: dto::Pulled) -> Converted<Self> {
        let source = |s: dto::Source| -> Converted<SourceReport> {
            Ok(SourceReport {
                src: RankId::new(s.src),
                bytes: Bytes::new(s.bytes),
                rows: s.rows,
                descriptors_before: s.descriptors_before,
                descriptors_after: s.descriptors_after,
                place: match s.place {
                    dto::Place::Direct => Place::Direct,
                    dto::Place::Destination => Place::Destination,
                    dto::Place::Source => Place::Source,
                },
                lane: text(s.lane)?,
                took: Duration::from_nanos(s.took_ns),
            })
        };
        let result = match d.result {
            Ok(r) => Ok(RankReport {
                sources: r.sources.into_iter().map(source).collect::<Converted<_>>()?,
                zeroed: Bytes::new(r.zeroed),
                compared: Bytes::new(r.compared),
                queued: Duration::from_nanos(r.queued_ns),
                slices: r.slices,
                took: Duration::from_nanos(r.took_ns),
            }),
            Err(f) => Err(fault(f)?),
        };
        Ok(Self::Pulled { pull: PullId(d.pull), result })
    }
}

pub(super) fn stage(d: &dto::Stage) -> Stage {
    match d {
        dto::Stage::Plan => Stage::Plan,
        dto::Stage::Connect => Stage::Connect,
        dto::Stage::Submit => Stage::Submit,
        dto::Stage::Read => Stage::Read,
        dto::Stage::Permute => Stage::Permute,
        dto::Stage::Zero => Stage::Zero,
        dto::Stage::Compare => Stage::Compare,
        dto::Stage::Cancelled => Stage::Cancelled,
        dto::Stage::Write => Stage::Write,
    }
}

pub(super) fn write_stage(stage: Stage) -> dto::Stage {
    match stage {
        Stage::Plan => dto::Stage::Plan,
        Stage::Connect => dto::Stage::Connect,
        Stage::Submit => dto::Stage::Submit,
        Stage::Read => dto::Stage::Read,
        Stage::Permute => dto::Stage::Permute,
        Stage::Zero => dto::Stage::Zero,
        Stage::Compare => dto::Stage::Compare,
        Stage::Cancelled => dto::Stage::Cancelled,
        Stage::Write => dto::Stage::Write,
    }
}

fn fault(d: dto::RankFault) -> Converted<RankFault> {
    let stage = stage(&d.stage);
    let bad = |b: dto::BadBlock| {
        Ok(BadBlock { src: RankId::new(b.src), item: Name::new(&text(b.item)?), block: BlockId::new(b.block) })
    };
    let bad = d.bad.into_iter().map(bad).collect::<Converted<_>>()?;
    Ok(RankFault { stage, text: text(d.text)?, in_doubt: d.in_doubt, bad })
}

impl From<&RankReport> for dto::RankReport {
    fn from(r: &RankReport) -> Self {
        let source = |s: &SourceReport| dto::Source {
            src: s.src.get(),
            bytes: s.bytes.get(),
            rows: s.rows,
            descriptors_before: s.descriptors_before,
            descriptors_after: s.descriptors_after,
            place: match s.place {
                Place::Direct => dto::Place::Direct,
                Place::Destination => dto::Place::Destination,
                Place::Source => dto::Place::Source,
            },
            lane: clip(&s.lane),
            took_ns: nanos(s.took),
        };
        Self {
            sources: r.sources.iter().map(source).collect(),
            zeroed: r.zeroed.get(),
            compared: r.compared.get(),
            queued_ns: nanos(r.queued),
            slices: r.slices,
            took_ns: nanos(r.took),
        }
    }
}

impl From<&RankFault> for dto::RankFault {
    fn from(f: &RankFault) -> Self {
        let stage = write_stage(f.stage);
        let bad = |b: &BadBlock| dto::BadBlock { src: b.src.get(), item: b.item.as_str().into(), block: b.block.get() };
        let bad = f.bad.iter().take(MAX_BAD_BLOCKS).map(bad).collect();
        Self { stage, text: clip(&f.text), in_doubt: f.in_doubt, bad }
    }
}

/// Nanoseconds, up to 584 years.
pub(super) fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}
