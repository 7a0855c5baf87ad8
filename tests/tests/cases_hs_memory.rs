//! HS-06, with what it costs: alone in its process, so that its memory can be looked at.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use kvferry::Assurance;
use kvferry_proto::peer::PeerMessage;
use kvferry_tests::between::Raw;
use kvferry_tests::running::{World, offer, resident, wish};

/// Everything that was ever sent to such a port, each on a connection of its own; after each a request is served. Strangers are
/// closed, told no more than a hello, and cost nothing that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hs_06_foreign_traffic_stops_nobody() {
    let world = World::start().await;
    let at = world.p.address();
    let frame = |kind: u16, body: &[u8]| {
        let len = u32::try_from(body.len()).unwrap().to_le_bytes();
        [&len[..], &kind.to_le_bytes(), body].concat()
    };
    let random: Vec<u8> = (0u32..64).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let foreign: Vec<(&str, Vec<u8>)> = vec![
        ("64 random bytes", random),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("one frame", frame(1, b"")),
        ("seven frames", (0..7).flat_map(|_| frame(2, b"")).collect()),
        ("a tuple of two", frame(1, &[0x92, 0x01, 0x02])),
        ("an unknown verb", frame(12_345, b"")),
        ("a pickle", frame(16, &[0x80, 0x04, 0x95, 0x00])),
        ("a bind without a hello", frame(16, &[0; 120])),
        ("another version", frame(1, &[b'k', b'v', b'f', b'y', 9, 0, 12, 0])),
        ("64 MiB", [&(64u32 << 20).to_le_bytes()[..], &[1, 0]].concat()),
        ("the longest length", vec![0xFF, 0xFF, 0xFF, 0xFF, 1, 0]),
        ("half a header", vec![1]),
    ];
    let mut kept = Vec::new();
    let served = async || {
        let reference = world.p.owner.offer(offer()).await.unwrap();
        world.pull(&reference, wish(Assurance::Fenced)).await.unwrap();
    };
    let mut before = 0;
    for round in 0..4 {
        for (what, bytes) in &foreign {
            let mut stranger = Raw::connect(&at).await;
            stranger.send(bytes).await;
            match *what {
                // One that says nothing more is left alone until the handshake's deadline.
                "half a header" => kept.push(stranger),
                "64 MiB" => {
                    for _ in 0..64 {
                        stranger.send(&[0x5A; 1 << 16]).await;
                    }
                    while stranger.hear().await.is_some() {}
                }
                _ => {
                    while let Some(told) = stranger.hear().await {
                        let only = matches!(told, PeerMessage::Refused(_));
                        assert!(only, "{what}: a stranger is told {told:?}");
                    }
                }
            }
            served().await;
        }
        if round == 0 {
            before = resident();
        }
    }
    let grown = resident() - before;
    assert!(grown < 1 << 20, "{grown} bytes more after three rounds");
    world.stop().await;
}
