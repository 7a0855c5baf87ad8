//! Every message there and back; and what becomes of bytes that are none.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::{CompatOptions, Unmatched};
use kvferry_geometry::digest::Digest;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::request::{
    BlockTable, Checkpoint, DstGroup, DstPaged, DstState, Request, SrcGroup, SrcPaged, SrcState, Tail,
};
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{BlockId, Bytes, ItemId, Name, RankId, TokenRange, Tokens};

use super::*;
use crate::handshake::{Abilities, Again, Claim, Hello};
use crate::lease::{Closing, first_attempt};
use crate::manifest::RankJoin;
use crate::names::{Attempt, ContentKey, EngineId, Epoch, Fence, LeaseId, ModelIdentity};
use crate::peer::{
    Bind, BindAnswer, BindRefusal, Gather, GatherAnswer, Gathered, Grant, Heartbeat, HeartbeatAnswer, LeaseClosed,
    Left, MAX_PIECES, NotGathered, ReadsEnd, Release, ReleaseAnswer, RunDigest, RunDigestAnswer, Verdict, Window,
};
use crate::push::{
    Progress, PushBind, PushId, PushOrder, Ready, Room, Stop, Stoppage, Stopped, Stream, WriteReport, WriterEnd,
    WriterReport, Written,
};
use crate::rank::{
    Assurance, BadBlock, DigestOrder, GatherOrder, Pairing, PullId, PullOrder, RankFault, RankReport, SourceReport,
    Stage,
};
use crate::testing::{engine, ranks};

fn fence() -> Fence {
    first_attempt(EngineId::new("prefill").unwrap(), Epoch::new(1 << 100), LeaseId::new(4097))
}

fn table() -> BlockTable {
    BlockTable::new(3, &[7, 8, 9, 2, 5, 4].map(BlockId::new))
}

fn src_groups() -> Vec<SrcGroup> {
    let held = TokenRange::new(Tokens::new(48), Tokens::new(130));
    vec![
        SrcPaged { table: table(), held, tail: Tail::Frozen }.into(),
        SrcState { checkpoints: vec![checkpoint(130, 7), checkpoint(0, u32::MAX)] }.into(),
        SrcPaged { table: BlockTable::default(), held: TokenRange::default(), tail: Tail::Exact }.into(),
        SrcState::default().into(),
    ]
}

fn checkpoint(position: u64, slot: u32) -> Checkpoint {
    Checkpoint { position: Tokens::new(position), slot: BlockId::new(slot) }
}

fn dst_groups() -> Vec<DstGroup> {
    vec![
        DstPaged { table: table(), cached: Tokens::new(u64::MAX) }.into(),
        DstState { slot: Some(BlockId::new(3)), more: vec![checkpoint(u64::MAX, 4)] }.into(),
        DstState::default().into(),
    ]
}

fn windows() -> Vec<Window> {
    vec![Window { start: 0, len: 1 << 40, piece: 1 << 30 }, Window { start: 1 << 40, len: 0, piece: 1 }]
}

/// The messages of version 2, as its corpus has them.
fn peer_messages_of_2() -> Vec<PeerMessage> {
    let manifest = engine();
    let hello = Hello {
        versions: Versions { min: 2, max: 2 },
        abilities: Abilities(1 << 63),
        identity: ModelIdentity::new("model@revision").unwrap(),
        stripe: true,
        digest: manifest.digest(),
        manifest,
    };
    let refusals = [
        BindRefusal::WrongEngine,
        BindRefusal::StaleEpoch { current: Epoch::new(3) },
        BindRefusal::UnknownLease,
        BindRefusal::AlreadyBound,
        BindRefusal::WrongAttempt { expected: 1, got: u32::MAX },
        BindRefusal::WrongContent,
        BindRefusal::PeerMapDiffers { ours: Digest::from_bytes([4; 32]) },
        BindRefusal::Incompatible("heads".into()),
        BindRefusal::RankLost { rank: RankId::new(3), reason: "killed".into() },
    ];
    let mut all = vec![
        PeerMessage::Hello(hello),
        PeerMessage::Refused(vec!["one".into(), String::new()]),
        PeerMessage::Bind(Bind {
            fence: fence(),
            content_key: ContentKey::from_bytes([8; 32]),
            salt: 63,
            peer_map: Digest::from_bytes([9; 32]),
        }),
        PeerMessage::BindAnswer(BindAnswer::Bound(Grant {
            fence: fence(),
            groups: src_groups(),
            time_left: Some(Duration::from_nanos(1_500_000_001)),
        })),
        PeerMessage::BindAnswer(BindAnswer::Bound(Grant { fence: fence(), groups: Vec::new(), time_left: None })),
        PeerMessage::RunDigest(RunDigest {
            fence: fence(),
            src: RankId::new(1),
            dst: RankId::new(0),
            tokens: Tokens::new(2048),
            groups: dst_groups(),
            windows: windows(),
        }),
        PeerMessage::Gather(Gather {
            fence: fence(),
            src: RankId::new(1),
            dst: RankId::new(u32::MAX),
            gathered: gathered(),
            tokens: Tokens::new(2048),
            groups: dst_groups(),
        }),
    ];
    all.extend(gatherings().map(|result| {
        PeerMessage::GatherAnswer(GatherAnswer { fence: fence(), src: RankId::new(1), dst: RankId::new(0), result })
    }));
    all.extend(refusals.map(|reason| PeerMessage::BindAnswer(BindAnswer::Refused { fence: fence(), reason })));
    all.extend(
        [ReadsEnd::Complete, ReadsEnd::Abandoned].map(|reads| PeerMessage::Release(Release { fence: fence(), reads })),
    );
    all.extend(
        [Verdict::Held, Verdict::Stale]
            .map(|verdict| PeerMessage::ReleaseAnswer(ReleaseAnswer { fence: fence(), verdict })),
    );
    all.extend([Ok(vec![[1; 16], [2; 16]]), Err("gone".to_owned())].map(|pieces| {
        PeerMessage::RunDigestAnswer(RunDigestAnswer {
            fence: fence(),
            src: RankId::new(1),
            dst: RankId::new(0),
            pieces,
        })
    }));
    all
}

fn peer_messages() -> Vec<PeerMessage> {
    let mut all = peer_messages_of_2();
    let PeerMessage::Hello(hello) = all[0].clone() else { panic!("the first is a hello") };
    all.push(PeerMessage::Again(Again {
        versions: Versions::OURS,
        abilities: Abilities::OURS,
        identity: hello.identity.clone(),
        stripe: false,
        engine: hello.manifest.engine().clone(),
        digest: hello.digest,
        yours: Digest::from_bytes([5; 32]),
    }));
    all.push(PeerMessage::Hello(Hello { versions: Versions::OURS, ..hello.clone() }));
    all.extend([PeerMessage::ManifestWanted, PeerMessage::Manifest(hello.manifest)]);
    let reasons = [BindRefusal::Busy("many".into()), BindRefusal::NotSealed, BindRefusal::Unfit("room".into())];
    all.extend(reasons.map(|reason| PeerMessage::BindAnswer(BindAnswer::Refused { fence: fence(), reason })));
    all.push(PeerMessage::Release(Release { fence: fence(), reads: ReadsEnd::Declined }));
    let leases = vec![(LeaseId::new(u128::MAX), Attempt::new(u32::MAX)), (LeaseId::new(0), Attempt::FIRST)];
    all.push(PeerMessage::Heartbeat(Heartbeat { beat: 7, leases }));
    let left = vec![Left::Closed, Left::For(Duration::from_nanos(1)), Left::Always];
    all.push(PeerMessage::HeartbeatAnswer(HeartbeatAnswer { beat: u64::MAX, left }));
    let ways = [
        Closing::Read,
        Closing::Abandoned,
        Closing::Declined,
        Closing::ConsumerLost,
        Closing::Withdrawn,
        Closing::Expired,
        Closing::RankLost,
        Closing::Restarted,
    ];
    all.extend(ways.map(|how| PeerMessage::Closed(LeaseClosed { fence: fence(), how })));
    all.extend(push_messages());
    all
}

fn push_messages() -> Vec<PeerMessage> {
    let bind = Bind {
        fence: fence(),
        content_key: ContentKey::from_bytes([8; 32]),
        salt: 63,
        peer_map: Digest::from_bytes([9; 32]),
    };
    let room = Room {
        tokens: Tokens::new(130),
        groups: dst_groups(),
        within: Duration::from_nanos(u64::MAX),
        priority: 7,
        progress: true,
    };
    let writers = ends().into_iter().zip(0..).map(|(end, n)| (RankId::new(n), end)).collect();
    let stoppages = [Stoppage::All, Stoppage::Except([1, u32::MAX].map(RankId::new).into()), Stoppage::Unknown];
    let mut all = vec![
        PeerMessage::PushBind(Box::new(PushBind { bind, room })),
        PeerMessage::Written(Box::new(Written { fence: fence(), writers, groups: src_groups() })),
        PeerMessage::Progress(Progress { fence: fence(), tokens: Tokens::new(u64::MAX) }),
        PeerMessage::Stop(Stop { fence: fence() }),
    ];
    all.extend(stoppages.map(|writers| PeerMessage::Stopped(Stopped { fence: fence(), writers })));
    all
}

fn ends() -> [WriterEnd; 2] {
    let write = WriteReport {
        dst: RankId::new(3),
        bytes: Bytes::new(1 << 50),
        descriptors: 9,
        lane: "cma (cma, sysv)".into(),
        took: Duration::from_micros(7),
    };
    let report =
        WriterReport { writes: vec![write], queued: Duration::from_micros(1), slices: 3, took: Duration::from_secs(1) };
    [Ok(report), Err(RankFault { stage: Stage::Write, text: "lost".into(), in_doubt: true, bad: Vec::new() })]
}

/// What a neighbour one version older has said, byte by byte: it means the same for ever, and what we say to such a neighbour
/// are the same bytes.
#[test]
fn frames_of_version_2_mean_what_they_meant() {
    for (i, message) in peer_messages_of_2().iter().enumerate() {
        let path = format!("{}/../../tests/data/wire/v2/{i:02}.frame", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(decode_peer(&frame(&bytes)).as_ref(), Ok(message), "{path}");
        assert_eq!(encode_peer(message).unwrap(), bytes, "{path}");
    }
}

/// What a hello begins with says what the whole does, of each version, and needs no more of it than that.
#[test]
fn a_claim_is_what_the_hello_says() {
    let mut hellos = 0;
    for message in peer_messages().iter().chain(&peer_messages_of_2()) {
        let whole = frame(&encode_peer(message).unwrap());
        let PeerMessage::Hello(hello) = message else {
            assert_eq!(claim(&whole), None);
            continue;
        };
        hellos += 1;
        assert_eq!(claim(&whole), Some(Claim::from(hello)));
        let begins = |len: usize| claim(&Frame { kind: whole.kind, body: whole.body[..len].to_vec() });
        let first = (0..=whole.body.len()).find(|len| begins(*len).is_some()).unwrap();
        assert!(first < 200 && (first..whole.body.len()).all(|len| begins(len) == Some(Claim::from(hello))), "{first}");
    }
    assert!(hellos >= 3);
}

fn gathered() -> Gathered {
    Gathered { bytes: Bytes::new(u64::MAX), batch: Digest::from_bytes([6; 32]) }
}

fn gatherings() -> [Result<Bytes, NotGathered>; 4] {
    [Ok(Bytes::ZERO), Ok(Bytes::new(u64::MAX)), Err("no room".into()), Err(NotGathered::Differs { ours: gathered() })]
}

fn pairing() -> Pairing {
    Pairing {
        peer: Digest::from_bytes([1; 32]),
        options: PeerOptions { salt: 5, stripe: true },
        compat: CompatOptions { source_only: Unmatched::Ignore, destination_only: Unmatched::Refuse },
        peer_map: Digest::from_bytes([2; 32]),
    }
}

fn request() -> Request {
    Request { tokens: Tokens::new(130), src: src_groups(), dst: dst_groups() }
}

fn to_rank_messages() -> Vec<ToRank> {
    let mut all = vec![
        ToRank::Welcome(engine()),
        ToRank::Refused("no".into()),
        ToRank::Peer(engine()),
        ToRank::Forget(Digest::from_bytes([3; 32])),
        ToRank::Cancel(PullId(u64::MAX)),
        ToRank::CancelDigest(u64::MAX),
        ToRank::Digest(DigestOrder {
            ticket: 3,
            pairing: pairing(),
            dst: RankId::new(7),
            request: request(),
            windows: windows(),
        }),
        ToRank::DigestAnswer { pull: PullId(1), src: RankId::new(2), pieces: Ok(vec![[9; 16]]) },
        ToRank::DigestAnswer { pull: PullId(1), src: RankId::new(2), pieces: Err("why".into()) },
        ToRank::Gather(GatherOrder {
            ticket: 4,
            pairing: pairing(),
            dst: RankId::new(6),
            gathered: gathered(),
            request: request(),
        }),
        ToRank::GatherEnd(u64::MAX),
    ];
    all.extend(gatherings().map(|result| ToRank::GatherAnswer { pull: PullId(3), src: RankId::new(1), result }));
    all.extend([Assurance::Fenced, Assurance::Sampled, Assurance::Full].map(|assurance| {
        let (priority, deadline) = (100, Some(Duration::from_secs(3)));
        ToRank::Pull(PullOrder {
            pull: PullId(4),
            pairing: pairing(),
            request: request().into(),
            assurance,
            priority,
            deadline,
            written: assurance == Assurance::Full,
        })
    }));
    let (lease, attempt) = (LeaseId::new(u128::MAX), Attempt::new(3));
    all.extend([
        ToRank::Push(Box::new(PushOrder {
            push: PushId(u64::MAX),
            lease,
            attempt,
            streamed: true,
            pairing: pairing(),
            request: Arc::new(request()),
            priority: 255,
            within: Duration::from_secs(3),
            progress: true,
        })),
        ToRank::CancelPush(PushId(0)),
        ToRank::Stream(Stream { lease, attempt, groups: src_groups(), sealed: true }),
        ToRank::Ready(Ready { lease, attempt, items: [0, 7].map(ItemId::new).to_vec(), tokens: Tokens::new(64) }),
        ToRank::StreamEnd(lease),
    ]);
    all
}

fn from_rank_messages() -> Vec<FromRank> {
    let (_, _, mut ranks) = ranks();
    // A rank that says something unsound is heard all the same; the owner judges.
    ranks[1].layout.views[2] = None;
    let join = |manifest| {
        FromRank::Join(RankJoin {
            engine: EngineId::new("prefill").unwrap(),
            rank: RankId::new(1),
            epoch: Epoch::new(5),
            manifest,
            blob: Arc::from([1, 2, 3]),
        })
    };
    let source = SourceReport {
        src: RankId::new(3),
        bytes: Bytes::new(1 << 50),
        rows: 2,
        descriptors_before: 3,
        descriptors_after: 1,
        place: Place::Destination,
        lane: "cma (cma, sysv)".into(),
        took: Duration::from_micros(7),
    };
    let report = RankReport {
        sources: [Place::Destination, Place::Direct, Place::Source]
            .map(|place| SourceReport { place, ..source.clone() })
            .to_vec(),
        zeroed: Bytes::new(5),
        compared: Bytes::new(6),
        queued: Duration::from_micros(9),
        slices: 7,
        took: Duration::from_secs(1),
    };
    let mut all: Vec<FromRank> = ranks.into_iter().map(join).collect();
    all.extend([
        FromRank::Pulled { pull: PullId(1), result: Ok(report) },
        FromRank::DigestWanted { pull: PullId(1), src: RankId::new(9), windows: windows() },
        FromRank::Digested { ticket: 8, pieces: Ok(Vec::new()) },
        FromRank::Digested { ticket: 8, pieces: Err("memory".into()) },
        FromRank::GatherWanted { pull: PullId(1), src: RankId::new(9), gathered: gathered() },
    ]);
    all.extend(gatherings().map(|result| FromRank::Gathered { ticket: 5, result }));
    all.extend(ends().map(|result| FromRank::Pushed { push: PushId(9), result }));
    all.push(FromRank::PushProgress { push: PushId(9), tokens: Tokens::new(17) });
    let stages = [
        Stage::Plan,
        Stage::Connect,
        Stage::Submit,
        Stage::Read,
        Stage::Permute,
        Stage::Zero,
        Stage::Compare,
        Stage::Cancelled,
        Stage::Write,
    ];
    all.extend(stages.map(|stage| {
        let bad = vec![BadBlock { src: RankId::new(1), item: Name::new("layer.0"), block: BlockId::new(6) }];
        FromRank::Pulled { pull: PullId(2), result: Err(RankFault { stage, text: "lost".into(), in_doubt: true, bad }) }
    }));
    all
}

fn frame(bytes: &[u8]) -> Frame {
    let mut reader = FrameReader::default();
    reader.extend(bytes);
    reader.next_frame().unwrap().unwrap()
}

/// All messages, as frames.
fn frames() -> Vec<Frame> {
    let peer = peer_messages().into_iter().map(|m| encode_peer(&m).unwrap());
    let to = to_rank_messages().into_iter().map(|m| encode_to_rank(&m).unwrap());
    let from = from_rank_messages().into_iter().map(|m| encode_from_rank(&m).unwrap());
    peer.chain(to).chain(from).map(|bytes| frame(&bytes)).collect()
}

/// Gives the bytes to every decoder; none may panic.
fn decode_all(frame: &Frame) -> [Result<(), WireError>; 3] {
    [decode_peer(frame).map(drop), decode_to_rank(frame).map(drop), decode_from_rank(frame).map(drop)]
}

#[test]
fn every_message_comes_back_as_it_was() {
    for m in peer_messages() {
        assert_eq!(decode_peer(&frame(&encode_peer(&m).unwrap())), Ok(m));
    }
    for m in to_rank_messages() {
        assert_eq!(decode_to_rank(&frame(&encode_to_rank(&m).unwrap())), Ok(m));
    }
    for m in from_rank_messages() {
        assert_eq!(decode_from_rank(&frame(&encode_from_rank(&m).unwrap())), Ok(m));
    }
}

#[test]
fn kinds_are_distinct_and_of_one_link_each() {
    let mut kinds: Vec<u16> = frames().iter().map(|f| f.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds.len(), 46, "every kind of the registry is covered");
    for f in frames() {
        let known = decode_all(&f).iter().filter(|r| !matches!(r, Err(WireError::UnknownKind { .. }))).count();
        assert_eq!(known, 1, "kind {}", f.kind);
    }
}

/// INT-01: cut at each byte, or longer by one, a message is an error of the peer.
#[test]
fn int_01_every_message_cut_at_each_byte_is_an_error() {
    for whole in frames() {
        for cut in 0..whole.body.len() {
            let part = Frame { kind: whole.kind, body: whole.body[..cut].to_vec() };
            for result in decode_all(&part) {
                assert_ne!(result.unwrap_err().fault(), Fault::Caller);
            }
        }
        let mut body = whole.body.clone();
        body.push(0);
        for result in decode_all(&Frame { kind: whole.kind, body }) {
            let error = result.unwrap_err();
            assert!(matches!(error, WireError::Trailing { .. } | WireError::UnknownKind { .. }), "{error}");
        }
    }
}

#[test]
fn flipped_bits_and_random_bytes_never_panic() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for whole in frames() {
        // Large ones are sampled, small ones flipped bit by bit.
        let bits = whole.body.len() * 8;
        let stride = (bits / 2000).max(1);
        for bit in (0..bits).step_by(stride) {
            let mut f = whole.clone();
            f.body[bit / 8] ^= 1 << (bit % 8);
            drop(decode_all(&f));
        }
        for _ in 0..200 {
            let body = (0..random() % 300).map(|_| random().to_le_bytes()[0]).collect();
            drop(decode_all(&Frame { kind: whole.kind, body }));
        }
    }
}

/// SEC-01: what other systems would run or reserve memory for is an error here, at once.
#[test]
fn sec_01_foreign_encodings_and_announced_lengths_are_errors() {
    let huge = [0xff, 0xff, 0xff, 0xff, 0x0f];
    let bodies: [&[u8]; 6] = [
        &[0x80, 0x04, 0x95, 0x0b, 0, 0, 0, 0, 0, 0, 0],
        &huge,
        &[0xff; 10],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0x91; 10_000],
        b"{\"a\":1}",
    ];
    for whole in frames() {
        for body in bodies {
            let f = Frame { kind: whole.kind, body: body.to_vec() };
            if [kind::CANCEL, kind::CANCEL_DIGEST, kind::GATHER_END, kind::CANCEL_PUSH, kind::STREAM_END]
                .contains(&f.kind)
            {
                // Any small number is a request's or a ticket's.
                continue;
            }
            assert!(decode_all(&f).iter().all(Result::is_err), "kind {} {body:?}", f.kind);
        }
        // A list that announces 2^32 elements at any place of a real message.
        for at in (0..whole.body.len()).step_by((whole.body.len() / 200).max(1)) {
            let mut body = whole.body[..at].to_vec();
            body.extend_from_slice(&huge);
            drop(decode_all(&Frame { kind: whole.kind, body }));
        }
    }
}

/// HS-11: the envelope of either hello decodes whatever the version; the refusal has both.
#[test]
fn hs_11_another_version_is_refused_with_both() {
    for hello in peer_messages().iter().filter(|m| matches!(m, PeerMessage::Hello(_) | PeerMessage::Again(_))) {
        let mut f = frame(&encode_peer(hello).unwrap());
        f.body[4..8].copy_from_slice(&[9, 0, 12, 0]);
        // What follows the head is of that version, and may be anything.
        f.body.truncate(20);
        let error = decode_peer(&f).unwrap_err();
        assert_eq!(error, WireError::Version { ours: Versions::OURS, theirs: Versions { min: 9, max: 12 } });
        let text = error.to_string();
        assert!(text.contains("2 to 3") && text.contains("9 to 12"), "{text}");
        f.body[0] = b'K';
        assert!(matches!(decode_peer(&f), Err(WireError::Magic { .. })));
        f.body.truncate(3);
        assert_eq!(decode_peer(&f), Err(WireError::Magic { got: b"Kvf".to_vec() }));
    }
}

fn meaning(frame: &Frame) -> ConvertError {
    match decode_all(frame).into_iter().find(|r| !matches!(r, Err(WireError::UnknownKind { .. }))) {
        Some(Err(WireError::Meaning { error, .. })) => error,
        other => panic!("it must make no sense: {other:?}"),
    }
}

fn of<D: serde::Serialize>(kind: u16, d: &D) -> Frame {
    Frame { kind, body: postcard::to_allocvec(d).unwrap() }
}

#[test]
fn block_tables_are_counted_before_they_are_expanded() {
    let answer = |runs: Vec<(u32, u32)>| {
        let table = dto::Table { first: 0, runs: runs.into_iter().collect() };
        let group = dto::SrcGroup::Paged { table, held: (0, 1), tail: dto::Tail::Exact };
        let bound = dto::BindAnswer::Bound {
            fence: (&fence()).into(),
            groups: [group].into_iter().collect(),
            time_left_ns: None,
        };
        of(kind::BIND_ANSWER, &bound)
    };
    let limit = crate::peer::MAX_REQUEST_BLOCKS;
    assert_eq!(meaning(&answer(vec![(0, u32::MAX)])), ConvertError::Tables { limit });
    assert_eq!(meaning(&answer(vec![(0, 1 << 20), (0, 1)])), ConvertError::Tables { limit });
    assert_eq!(meaning(&answer(vec![(u32::MAX, 2)])), ConvertError::Blocks { first: u32::MAX, count: 2 });
    assert!(decode_peer(&answer(vec![(0, 1 << 20)])).is_ok());
    let bad = dto::SrcGroup::Paged {
        table: dto::Table { first: 0, runs: std::iter::empty().collect() },
        held: (5, 4),
        tail: dto::Tail::Exact,
    };
    let bound =
        dto::BindAnswer::Bound { fence: (&fence()).into(), groups: [bad].into_iter().collect(), time_left_ns: None };
    assert_eq!(meaning(&of(kind::BIND_ANSWER, &bound)), ConvertError::Tokens { start: 5, end: 4 });
}

#[test]
fn states_are_counted_over_all_groups() {
    let limit = crate::peer::MAX_REQUEST_STATES;
    let list = |n: usize| -> dto::Checkpoints { std::iter::repeat_n((1, 2), n).collect() };
    let src = |lists: Vec<dto::Checkpoints>| dto::BindAnswer::Bound {
        fence: (&fence()).into(),
        groups: lists.into_iter().map(dto::SrcGroup::State).collect(),
        time_left_ns: None,
    };
    assert_eq!(meaning(&of(kind::BIND_ANSWER, &src(vec![list(limit), list(1)]))), ConvertError::States { limit });
    assert!(decode_peer(&of(kind::BIND_ANSWER, &src(vec![list(limit - 1), list(1)]))).is_ok());
    let dst = |n| dto::RunDigest {
        fence: (&fence()).into(),
        src: 0,
        dst: 0,
        tokens: 1,
        groups: [
            dto::DstGroup::State { slot: None, more: list(n) },
            dto::DstGroup::State { slot: Some(1), more: list(1) },
        ]
        .into_iter()
        .collect(),
        windows: std::iter::empty().collect(),
    };
    assert_eq!(meaning(&of(kind::RUN_DIGEST, &dst(limit))), ConvertError::States { limit });
    assert!(decode_peer(&of(kind::RUN_DIGEST, &dst(limit - 1))).is_ok());
    let gather = |n| {
        let dto::RunDigest { fence, src, dst, tokens, groups, .. } = dst(n);
        of(kind::GATHER, &dto::Gather { fence, src, dst, batch: dto::Batch(0, [0; 32]), tokens, groups })
    };
    assert_eq!(meaning(&gather(limit)), ConvertError::States { limit });
    assert!(decode_peer(&gather(limit - 1)).is_ok());
    // One list alone is bounded while it is read: the same bytes, without the bound.
    let group = (1u32, vec![(1u64, 2u32); limit + 1]);
    let frame = of(kind::BIND_ANSWER, &(0u32, dto::Fence::from(&fence()), vec![group], Option::<u64>::None));
    assert!(matches!(decode_peer(&frame), Err(WireError::Body { .. })));
}

#[test]
fn lists_of_parts_are_bounded() {
    let most = dto::MAX_PARTS;
    // The same bytes as an item's with that many parts, without the bound.
    let item = |n: usize| ("i", (1u32, vec![("p", 1u32, 1u32, 1u64, "e"); n]));
    let bytes = |n| postcard::to_allocvec(&item(n)).unwrap();
    assert!(postcard::from_bytes::<dto::Item>(&bytes(most)).is_ok());
    assert!(postcard::from_bytes::<dto::Item>(&bytes(most + 1)).is_err());
    let view = |n: usize| (1u32, (0u32, 0u64, 1u64, 1u32, vec![("p", 1u64, 1u64, 1u64, 0u32); n]));
    let bytes = |n| postcard::to_allocvec(&view(n)).unwrap();
    assert!(postcard::from_bytes::<dto::View>(&bytes(most)).is_ok());
    assert!(postcard::from_bytes::<dto::View>(&bytes(most + 1)).is_err());
    let placement = |n: usize| (1u32, vec![(0u32, 1u32); n]);
    let bytes = |n| postcard::to_allocvec(&placement(n)).unwrap();
    assert!(postcard::from_bytes::<dto::Placement>(&bytes(most)).is_ok());
    assert!(postcard::from_bytes::<dto::Placement>(&bytes(most + 1)).is_err());
}

/// What all new variants are made of, at random: it comes back as it was.
#[test]
fn random_items_views_and_requests_come_back_as_they_were() {
    use kvferry_geometry::layout::{Chunks, ComponentView, KernelBlock, PagedView, PartView, StateView, View};
    use kvferry_geometry::placement::{HeadRange, Placement, TokenClass};
    use kvferry_geometry::spec::{Component, Item, PagedItem, Retention, StateItem, StatePart};

    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut any = move |most: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Large numbers and small ones.
        let value = state >> (state % 64);
        most.checked_add(1).map_or(value, |n| value % n)
    };
    let small = |v: u64| u32::try_from(v).unwrap();
    for _ in 0..500 {
        let retention = match any(3) {
            0 => Retention::Full,
            1 => Retention::Window(Tokens::new(any(u64::MAX))),
            2 => Retention::Chunk(Tokens::new(any(u64::MAX))),
            _ => Retention::Ring(Tokens::new(any(u64::MAX))),
        };
        let count = any(15) + 1;
        let item = if any(1) == 0 {
            let component = |i: u64, any: &mut dyn FnMut(u64) -> u64| {
                let c = Component::new(&format!("c{i}"), any(u64::MAX), "e").with_span(small(any(0xffff_ffff)));
                if any(1) == 0 { c } else { c.shared() }
            };
            let components = (0..count).map(|i| component(i, &mut any)).collect();
            let tokens_per_entry = small(any(0xffff_ffff));
            Item::paged("item", PagedItem { tokens_per_entry, retention, ..PagedItem::new(small(any(99)), components) })
        } else {
            let mut part = |i| StatePart::new(&format!("p{i}"), small(any(99)), small(any(99)), any(u64::MAX), "e");
            Item::state("item", StateItem { parts: (0..count).map(&mut part).collect() })
        };
        let bytes = postcard::to_allocvec(&dto::Item::from(&item)).unwrap();
        assert_eq!(Item::try_from(postcard::from_bytes::<dto::Item>(&bytes).unwrap()), Ok(item));

        let name = Name::new("n");
        let mut wide = || kvferry_geometry::units::Bytes::new(any(u64::MAX));
        let (offset, stride, chunk) = (wide(), wide(), Chunks { bytes: wide(), stride: wide() });
        let region = kvferry_geometry::units::RegionId::new(small(any(0xffff_ffff)));
        let view = if any(1) == 0 {
            let chunks = (any(1) == 0).then_some(chunk);
            let component = |any: &mut dyn FnMut(u64) -> u64| ComponentView {
                chunks,
                ..ComponentView::new(name.clone(), any(u64::MAX), any(u64::MAX), any(u64::MAX))
            };
            View::Paged(PagedView {
                region,
                offset,
                block_stride: stride,
                blocks: small(any(0xffff_ffff)),
                block_size: small(any(0xffff_ffff)),
                kernel: KernelBlock { size: small(any(0xffff_ffff)), stride },
                components: (0..count).map(|_| component(&mut any)).collect(),
            })
        } else {
            let part = |any: &mut dyn FnMut(u64) -> u64| PartView {
                scratch_rows: small(any(0xffff_ffff)),
                ..PartView::new(name.clone(), any(u64::MAX), any(u64::MAX), any(u64::MAX))
            };
            let slots = small(any(0xffff_ffff));
            let parts = (0..count).map(|_| part(&mut any)).collect();
            View::State(StateView { region, offset, slot_stride: stride, slots, parts })
        };

        let mut heads = || {
            let start = small(any(1000));
            HeadRange::new(start, start + 1 + small(any(1000))).unwrap()
        };
        let parts: Vec<HeadRange> = (0..count).map(|_| heads()).collect();
        let paged = Placement::paged(parts[0], TokenClass::new(4, 8, small(any(3))).unwrap());
        let placement = if any(1) == 0 { paged } else { Placement::state(parts) };
        let (placements, views) = (vec![None, Some(placement)], vec![Some(view), None]);
        let layout = kvferry_geometry::layout::CacheLayout { regions: Vec::new(), views };
        let rank = kvferry_geometry::manifest::RankManifest { placement: placements, layout };
        let bytes = postcard::to_allocvec(&dto::Rank::from(&rank)).unwrap();
        assert_eq!(postcard::from_bytes::<dto::Rank>(&bytes).unwrap().try_into(), Ok(rank));

        let mut states = || -> Vec<Checkpoint> {
            (0..any(20)).map(|_| checkpoint(any(u64::MAX), small(any(0xffff_ffff)))).collect()
        };
        let (src, dst) = (SrcState { checkpoints: states() }, states());
        let slot = (any(1) == 0).then(|| BlockId::new(small(any(0xffff_ffff))));
        let dst = DstState { slot, more: dst };
        let request = Request { tokens: Tokens::new(any(u64::MAX)), src: vec![src.into()], dst: vec![dst.into()] };
        let bytes = postcard::to_allocvec(&dto::Request::from(&request)).unwrap();
        assert_eq!(postcard::from_bytes::<dto::Request>(&bytes).unwrap().try_into(), Ok(request));
    }
}

#[test]
fn what_a_rank_says_of_its_items_is_checked() {
    let held = |item, heads, tokens| dto::Held {
        item,
        placement: Some(Box::new(dto::Placement::Paged { heads, tokens })),
        view: None,
    };
    let join = |placements, list: Vec<dto::Held>| {
        let manifest =
            dto::Rank { placements, views: 1, regions: std::iter::empty().collect(), held: list.into_iter().collect() };
        let join = dto::Join { engine: "e", rank: 0, epoch: 1, manifest, blob: std::iter::empty().collect() };
        of(kind::JOIN, &join)
    };
    let all = (1, 1, 0);
    assert_eq!(meaning(&join(2, vec![held(1, (3, 3), all)])), ConvertError::Heads { item: 1, start: 3, end: 3 });
    assert_eq!(meaning(&join(2, vec![held(2, (0, 1), all)])), ConvertError::ItemId { item: 2 });
    let twice = vec![held(1, (0, 1), all), held(1, (0, 1), all)];
    assert_eq!(meaning(&join(2, twice)), ConvertError::ItemId { item: 1 });
    assert_eq!(
        meaning(&join(2, vec![held(0, (0, 1), (2, 1, 2))])),
        ConvertError::TokenClass { item: 0, count: 2, interleave: 1, index: 2 }
    );
    let units = [(0, 1), (4, 2)].into_iter().collect();
    let state = dto::Held { item: 0, placement: Some(Box::new(dto::Placement::State(units))), view: None };
    assert_eq!(meaning(&join(2, vec![state])), ConvertError::Heads { item: 0, start: 4, end: 2 });
    let (what, got, limit) = ("the placement", u32::MAX, kvferry_geometry::spec::MAX_ITEMS);
    assert_eq!(meaning(&join(u32::MAX, Vec::new())), ConvertError::ItemCount { what, got, limit });
}

#[test]
fn digest_questions_are_bounded() {
    // The same bytes as the real object's, without its bound.
    let ask = |windows: Vec<(u64, u64, u64)>| of(kind::DIGEST_WANTED, &(1u64, 0u32, windows));
    let refused = ConvertError::Windows { limit: MAX_PIECES };
    for windows in [
        vec![(0, 1, 0)],
        vec![(u64::MAX, 1, 1)],
        vec![(0, MAX_PIECES as u64 + 1, 1)],
        vec![(0, MAX_PIECES as u64, 1), (0, 1, 1)],
        vec![(0, u64::MAX, 1); 2],
        vec![(0, 10, 10), (9, 10, 10)],
        vec![(10, 10, 10), (0, 10, 10)],
    ] {
        assert_eq!(meaning(&ask(windows)), refused);
    }
    assert!(decode_from_rank(&ask(vec![(0, MAX_PIECES as u64, 1)])).is_ok());
    let many = ask(vec![(0, 1, 1); crate::peer::MAX_WINDOWS + 1]);
    assert!(matches!(decode_from_rank(&many), Err(WireError::Body { .. })), "a list longer than its bound");
}

/// A peer's unsound manifest is the peer's fault, with all that is wrong.
/// Where bytes are said to have been gathered is a number or a text of bounded length, and nothing after it.
#[test]
fn gather_answers_are_bounded() {
    let answer = |result| of(kind::GATHERED, &dto::Gathered { ticket: 1, result });
    let unable = |len| Err(dto::NotGathered::Unable("x".repeat(len)));
    let text = |len| answer(unable(len));
    assert!(decode_from_rank(&text(convert::MAX_TEXT)).is_ok());
    let (got, limit) = (convert::MAX_TEXT + 1, convert::MAX_TEXT);
    assert_eq!(meaning(&text(got)), ConvertError::Text { got, limit });
    let fence = || (&fence()).into();
    let of_peer = of(kind::GATHER_ANSWER, &dto::GatherAnswer { fence: fence(), src: 0, dst: 0, result: unable(got) });
    assert_eq!(meaning(&of_peer), ConvertError::Text { got, limit });
    let place = of(kind::GATHER_PLACE, &dto::GatherPlace { pull: 1, src: 0, result: unable(got) });
    assert_eq!(meaning(&place), ConvertError::Text { got, limit });
    let mut longer = answer(Ok(7));
    longer.body.push(0);
    assert!(matches!(decode_from_rank(&longer), Err(WireError::Trailing { extra: 1, .. })));
    // What we say ourselves is cut.
    let ours = FromRank::Gathered { ticket: 1, result: Err("x".repeat(got).into()) };
    let bytes = encode_from_rank(&ours).unwrap();
    assert!(
        matches!(decode_from_rank(&frame(&bytes)), Ok(FromRank::Gathered { result: Err(NotGathered::Unable(t)), .. }) if t.len() == limit)
    );
}

/// What each release says it can do: nothing before there was gathering.
#[test]
fn abilities_are_bits() {
    assert!(Abilities::OURS.has(Abilities::GATHER) && Abilities(u64::MAX).has(Abilities::GATHER));
    assert!(!Abilities(0).has(Abilities::GATHER) && !Abilities(u64::MAX - 2).has(Abilities::GATHER));
    assert!(!Abilities(1).has(Abilities::GATHER), "those who gather without the name of the batch are not asked");
}

#[test]
fn unsound_manifests_are_the_peers_fault() {
    let engine = engine();
    let mut d = dto::Engine::from(&*engine);
    for rank in &mut d.ranks.0 {
        for region in &mut rank.regions.0 {
            region.len = 16;
        }
    }
    let f = of(kind::PEER, &d);
    let error = decode_to_rank(&f).unwrap_err();
    assert_eq!(error.fault(), Fault::PeerChoice);
    assert!(matches!(meaning(&f), ConvertError::Manifest(errors) if errors.0.len() >= 6), "{error}");
    d.contacts.0.pop();
    for rank in &mut d.ranks.0 {
        for region in &mut rank.regions.0 {
            region.len = 1 << 20;
        }
    }
    assert!(matches!(meaning(&of(kind::PEER, &d)), ConvertError::Contacts(_)));
}

#[test]
fn messages_that_no_frame_can_carry_are_our_callers_fault() {
    let ids: Vec<BlockId> = (0..3_000_000).map(|i| BlockId::new(4_000_000 + i * 2)).collect();
    let held = TokenRange::default();
    let groups = vec![SrcPaged { table: BlockTable::new(0, &ids), held, tail: Tail::Exact }.into()];
    let answer = PeerMessage::BindAnswer(BindAnswer::Bound(Grant { fence: fence(), groups, time_left: None }));
    let error = encode_peer(&answer).unwrap_err();
    assert_eq!(error.fault(), Fault::Caller, "{error}");
    assert!(matches!(error, WireError::NotWritten { .. }), "a list is bounded before a frame is: {error}");
}

/// The largest requests that decode make orders that fit a frame: whatever a peer sends, an owner can pass it on.
#[test]
fn every_order_made_from_what_was_told_fits_a_frame() {
    // Nothing coalesces, and every id needs all its bytes.
    let scattered = |n: u32| {
        let ids: Vec<BlockId> = (0..n).map(|i| BlockId::new(0x8000_0000 + i * 2)).collect();
        BlockTable::new(u64::MAX, &ids)
    };
    let most = u32::try_from(crate::peer::MAX_REQUEST_BLOCKS).unwrap();
    let states = |n: usize| vec![Checkpoint { position: Tokens::new(u64::MAX), slot: BlockId::new(u32::MAX) }; n];
    let slot = Some(BlockId::new(u32::MAX));
    let groups = |n| {
        let paged = DstPaged { table: scattered(n), cached: Tokens::new(u64::MAX) };
        vec![paged.into(), DstState { slot, more: states(crate::peer::MAX_REQUEST_STATES) }.into()]
    };
    let question = |n| RunDigest {
        fence: fence(),
        src: RankId::new(0),
        dst: RankId::new(0),
        tokens: Tokens::new(u64::MAX),
        groups: groups(n),
        windows: vec![Window { start: 0, len: u64::MAX, piece: u64::MAX }; 1],
    };
    let over = encode_peer(&PeerMessage::RunDigest(question(most + 1)));
    // One too many is refused, by the writer's list or by the reader.
    if let Ok(bytes) = over {
        assert!(decode_peer(&frame(&bytes)).is_err());
    }
    let bytes = encode_peer(&PeerMessage::RunDigest(question(most))).unwrap();
    let PeerMessage::RunDigest(told) = decode_peer(&frame(&bytes)).unwrap() else { panic!("it is one") };
    let held = TokenRange::new(Tokens::ZERO, Tokens::new(u64::MAX));
    let src = vec![
        SrcPaged { table: scattered(most), held, tail: Tail::Frozen }.into(),
        SrcState { checkpoints: states(crate::peer::MAX_REQUEST_STATES) }.into(),
    ];
    let request = Request { tokens: told.tokens, src, dst: told.groups };
    let gather = GatherOrder {
        ticket: u64::MAX,
        pairing: pairing(),
        dst: told.dst,
        gathered: gathered(),
        request: request.clone(),
    };
    let order = DigestOrder { ticket: u64::MAX, pairing: pairing(), dst: told.dst, request, windows: told.windows };
    for order in [ToRank::Digest(order), ToRank::Gather(gather)] {
        let bytes = encode_to_rank(&order).unwrap();
        assert!(decode_to_rank(&frame(&bytes)).is_ok());
    }
}
