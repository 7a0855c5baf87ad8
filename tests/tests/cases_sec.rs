//! SEC cases: what a hostile peer may claim.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry::{EngineId, Owner, StartError};
use kvferry_geometry::batch::Side;
use kvferry_geometry::request::{BoundRequest, RequestError, SrcGroup};
use kvferry_geometry::units::{BlockId, Tokens};
use kvferry_proto::wire::{
    Frame, FrameError, FrameReader, HEADER, decode_from_rank, decode_peer, decode_to_rank, kind,
};
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, request, table, wants};
use kvferry_transport::blob::{Blob, BlobError};

/// Two groups of 64 blocks each.
fn pair() -> Pair {
    let engine = || Engine::new(vec![kv("a", 1, 2), kv("b", 1, 2)], 1).groups(&[(&["a"], 16, 64), (&["b"], 16, 64)]);
    Pair::new(&engine(), &engine())
}

fn refused(dst: [&[u32]; 2]) -> Vec<RequestError> {
    let pair = pair();
    let request = kvferry_geometry::request::Request {
        tokens: Tokens::new(32),
        src: (0..2).map(|_| holds(32, table(&[0, 1]))).collect(),
        dst: dst.into_iter().map(|ids| wants(0, table(ids))).collect(),
    };
    BoundRequest::new(&pair.compatible, request).expect_err("a hostile list").0
}

#[test]
fn sec_01_a_blob_is_parsed_by_its_schema_alone() {
    // What starts as a serialised object of a language is no blob, whatever follows.
    let mut pickle = vec![0x80, 0x04];
    pickle.extend([b'('; 10_000]);
    assert!(matches!(Blob::decode(&pickle), Err(BlobError::NotABlob)));
    // A count of 2^32 - 1 regions in a few bytes is refused by what is there, not by what is announced.
    let mut blob = Blob {
        backend: "mem".to_owned(),
        endpoint: kvferry_transport::EndpointId::new([7; 16]),
        generation: 0,
        regions: Vec::new(),
        lane: Vec::new(),
    }
    .encode();
    let count = 4 + 2 + 1 + 3 + 16 + 8;
    blob[count..count + 4].fill(0xFF);
    assert!(Blob::decode(&blob).is_err());
}

#[test]
fn sec_01_a_frame_is_parsed_by_its_kind_alone() {
    // A pickle, deep nesting, and counts of everything that a varint can announce, as the body of every kind.
    let bodies: [Vec<u8>; 5] = [
        [vec![0x80, 0x04], vec![b'('; 10_000]].concat(),
        vec![0x91; 10_000],
        vec![0xFF; 10_000],
        vec![0xFF, 0xFF, 0xFF, 0xFF, 0x0F],
        vec![0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01],
    ];
    for kind in 0..=128 {
        for (number, body) in bodies.iter().enumerate() {
            let frame = Frame { kind, body: body.clone() };
            assert!(decode_peer(&frame).is_err(), "kind {kind}");
            assert!(decode_from_rank(&frame).is_err(), "kind {kind}");
            // A rank trusts its owner; the last two are a cancellation of the request, digest, gather, push or stream of that number.
            let cancels = matches!(
                kind,
                kind::CANCEL | kind::CANCEL_DIGEST | kind::GATHER_END | kind::CANCEL_PUSH | kind::STREAM_END
            );
            assert!(decode_to_rank(&frame).is_err() || number >= 3 && cancels, "kind {kind}");
        }
    }
    // A frame of 4 GiB is refused by its header.
    let mut reader = FrameReader::default();
    reader.extend(&[0xFF; HEADER]);
    assert!(matches!(reader.next_frame(), Err(FrameError::TooLong { got: u32::MAX, .. })));
}

/// Nothing listens unless it is told to, and then not where other hosts can connect.
#[tokio::test]
async fn sec_01_nothing_listens_for_other_hosts_by_itself() {
    let manifest = Engine::new(vec![kv("a", 1, 2)], 1).manifest();
    let builder = || {
        let (spec, groups) = (manifest.spec().clone(), manifest.groups().to_vec());
        Owner::builder(EngineId::new("e").expect("an id"), spec, groups, 1)
    };
    let quiet = builder().start().await.expect("an owner");
    assert_eq!(quiet.address(), None);
    quiet.shutdown().await;
    for open in ["tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:192.0.2.1:7600"] {
        let refused = builder().listen(open.parse().expect("an address")).start().await;
        let error = refused.expect_err("nobody is authenticated");
        let why = matches!(error, StartError::Exposed { .. } | StartError::Config(_));
        assert!(why && error.to_string().contains("plaintext_beyond_loopback"), "{open}: {error}");
    }
}

#[test]
fn sec_03_block_ids_out_of_range_are_refused_with_both_values() {
    for id in [64, 1_000_000, u32::MAX] {
        let errors = refused([&[0, id], &[0, 1]]);
        let [RequestError::BlockOutOfRange { side, group, block, blocks }] = errors.as_slice() else {
            panic!("{errors:?}")
        };
        assert_eq!((*side, group.as_str(), *block), (Side::Dst, "group 0", BlockId::new(id)));
        assert_eq!(*blocks, BlockId::new(64));
    }
}

#[test]
fn sec_03_a_repeated_destination_block_is_refused() {
    let errors = refused([&[0, 1], &[5, 5]]);
    assert_eq!(
        errors,
        [RequestError::RepeatedBlock { side: Side::Dst, group: "group 1".into(), block: BlockId::new(5) }]
    );
}

#[test]
fn sec_03_a_million_ids_are_refused_and_all_faults_are_told() {
    let many: Vec<u32> = (0..1_000_000).collect();
    let errors = refused([&many, &[3, 3]]);
    assert!(
        matches!(errors.as_slice(), [
        RequestError::BlockOutOfRange { block, .. },
        RequestError::RepeatedBlock { .. },
    ] if block.get() == 999_999),
        "{errors:?}"
    );
}

#[test]
fn sec_03_a_wrong_number_of_groups_is_refused() {
    let pair = pair();
    let errors = BoundRequest::new(&pair.compatible, request(16, &[0], &[0])).expect_err("two groups").0;
    assert!(
        matches!(
            errors.as_slice(),
            [
                RequestError::GroupCount { side: Side::Src, got: 1, expected: 2 },
                RequestError::GroupCount { side: Side::Dst, got: 1, expected: 2 },
            ]
        ),
        "{errors:?}"
    );
}

#[test]
fn sec_03_tokens_that_the_source_never_computed_are_not_read() {
    let engine = || Engine::new(vec![kv("a", 1, 2)], 1);
    let pair = Pair::new(&engine(), &engine());
    let mut hostile = request(32, &[0, 1], &[0, 1]);
    let SrcGroup::Paged(group) = &mut hostile.src[0] else { panic!("a paged group") };
    group.held = kvferry_tests::by_hand::tokens(0, 31);
    assert!(BoundRequest::new(&pair.compatible, hostile).is_err(), "token 31 may be another request's");
    let mut hostile = request(u64::MAX, &[0, 1], &[0, 1]);
    hostile.dst[0] = wants(u64::MAX, table(&[0, 1]));
    assert!(BoundRequest::new(&pair.compatible, hostile).is_err(), "a length beyond all reason");
}
