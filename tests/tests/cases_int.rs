//! INT cases: integers and sizes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeSet;
use std::sync::Arc;

use kvferry_geometry::batch::Descriptor;
use kvferry_geometry::layout::LayoutStyle;
use kvferry_geometry::request::{BlockTable, Request};
use kvferry_geometry::units::{BlockId, Bytes, RegionId, Tokens};
use kvferry_proto::handshake::{Expected, Greeting};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::wire::{Fault, Frame, HEADER, decode_peer, encode_peer};
use kvferry_tests::by_hand::{Engine, Pair, holds, kv, latent, owner, wants};
use kvferry_transport::blob::Blob;
use kvferry_transport::mem::MemNetwork;
use kvferry_transport::{Region, Transport};

#[test]
fn int_01_a_blob_cut_at_any_byte_is_an_error() {
    let mut transport = MemNetwork::new(1).endpoint().expect("an endpoint");
    for _ in 0..3 {
        transport.register(Region::zeroed(24).expect("memory")).expect("registered");
    }
    let blob = transport.blob();
    Blob::decode(&blob).expect("whole");
    for len in 0..blob.len() {
        assert!(Blob::decode(&blob[..len]).is_err(), "{len} of {} bytes", blob.len());
    }
    let longer: Vec<u8> = blob.iter().copied().chain([0]).collect();
    assert!(Blob::decode(&longer).is_err());
}

#[test]
fn int_03_a_run_beyond_two_gib_is_one_descriptor() {
    // 40 000 adjacent blocks of 65 536 B.
    let engine = || Engine::new(vec![latent("mla", 4096)], 1).blocks(16, 40_000);
    let pair = Pair::new(&engine(), &engine());
    let n = 40_000 * 16;
    let bound = pair.bind(Request {
        tokens: Tokens::new(n),
        src: vec![holds(n, BlockTable::contiguous(0, BlockId::ZERO, 40_000))],
        dst: vec![wants(0, BlockTable::contiguous(0, BlockId::ZERO, 40_000))],
    });
    let batch = pair.batch(0, 0, &bound);
    assert_eq!(batch.bytes(), Bytes::new(2_621_440_000));
    assert_eq!(pair.runs(0, 0, &bound), [(0, 0, 2_621_440_000)]);
}

#[test]
fn int_05_a_plan_is_rows_not_blocks() {
    const REGIONS: u32 = 128;
    const BLOCKS: u32 = 50_000;
    let items = || (0..REGIONS).map(|i| kv(&format!("layer.{i}"), 1, 2)).collect::<Vec<_>>();
    // Padding at the destination keeps neighbours apart.
    let padded = LayoutStyle { padding: Bytes::new(64), ..LayoutStyle::HND };
    let pair = Pair::new(
        &Engine::new(items(), 1).blocks(16, BLOCKS),
        &Engine::new(items(), 1).blocks(16, BLOCKS).style(padded),
    );
    let n = u64::from(BLOCKS) * 16;
    let bound = pair.bind(Request {
        tokens: Tokens::new(n),
        src: vec![holds(n, BlockTable::contiguous(0, BlockId::ZERO, BLOCKS))],
        dst: vec![wants(0, BlockTable::contiguous(0, BlockId::ZERO, BLOCKS))],
    });
    let batch = pair.batch(0, 0, &bound);
    assert_eq!(batch.descriptors(), 6_400_000);
    assert_eq!(batch.rows(), u64::from(REGIONS) + 1, "one base a region, one run of block pairs");
    // A thousand random descriptors against the naive list.
    let naive = |index: u64| {
        let (region, block) = (index / u64::from(BLOCKS), index % u64::from(BLOCKS));
        let region = RegionId::new(u32::try_from(region).expect("few"));
        let (src_offset, dst_offset) = (block * 64, block * 128);
        Descriptor { src_region: region, dst_region: region, src_offset, dst_offset, len: 64 }
    };
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut picks = BTreeSet::from([0, batch.descriptors() - 1]);
    while picks.len() < 1000 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        picks.insert(state % batch.descriptors());
    }
    let mut buffer = vec![Descriptor::default(); 6_400];
    let (mut cursor, mut start) = (batch.cursor(), 0u64);
    loop {
        let filled = cursor.fill(&mut buffer) as u64;
        for &index in picks.range(start..start + filled) {
            let pick = usize::try_from(index - start).expect("few");
            assert_eq!(buffer[pick], naive(index), "descriptor {index}");
        }
        start += filled;
        if filled == 0 {
            break;
        }
    }
    assert_eq!(start, batch.descriptors());
}

#[test]
fn int_01_a_hello_cut_at_any_byte_is_an_error() {
    let cache = Engine::new(vec![kv("a", 4, 128), latent("b", 64)], 2).manifest();
    let local = Arc::new(owner("p", 1, &cache));
    let (_, hello) = Greeting::start(local, Expected::default());
    let bytes = encode_peer(&PeerMessage::Hello(hello.clone())).expect("short enough");
    let (kind, body) = (u16::from_le_bytes([bytes[4], bytes[5]]), &bytes[HEADER..]);
    let decode = |body: &[u8]| decode_peer(&Frame { kind, body: body.to_vec() });
    assert_eq!(decode(body).expect("whole"), PeerMessage::Hello(hello));
    for len in 0..body.len() {
        let error = decode(&body[..len]).expect_err("cut");
        assert_eq!(error.fault(), Fault::PeerBytes, "{len} of {} bytes: {error}", body.len());
    }
    let longer: Vec<u8> = body.iter().copied().chain([0]).collect();
    assert!(decode(&longer).is_err());
    // Changed bytes may decode to something else, but never to a panic.
    for at in 0..body.len() {
        for change in [0x01, 0x80, 0xFF] {
            let mut changed = body.to_vec();
            changed[at] ^= change;
            drop(decode(&changed));
        }
    }
}
