//! What a stranger's hello costs in memory before anybody knows who it is: in proportion to the bytes it has sent, whatever it
//! announces.
#![allow(clippy::unwrap_used, reason = "a test whose frame is read has failed")]

use kvferry_proto::wire::{ConvertError, Frame, WireError, decode_peer, kind};

mod counting;

fn varint(mut n: u32, out: &mut Vec<u8>) {
    while n >= 0x80 {
        out.push(n.to_le_bytes()[0] | 0x80);
        n >>= 7;
    }
    out.push(n.to_le_bytes()[0]);
}

/// A hello of an engine without items, each rank of which announces 4096 placements and as many views in 6 bytes.
fn greedy(ranks: u32) -> Frame {
    let mut body = b"kvfy".to_vec();
    // Versions, no abilities, identity "m", no striping, digest.
    body.extend([2, 0, 2, 0, 0, 1, b'm', 0]);
    body.extend([0; 32]);
    // Engine "e", epoch, no items, no groups.
    body.extend([1, b'e', 0, 0, 0]);
    varint(ranks, &mut body);
    for _ in 0..ranks {
        body.extend([0x80, 0x20, 0x80, 0x20, 0, 0]);
    }
    body.push(0);
    Frame { kind: kind::HELLO, body }
}

#[test]
fn a_hello_costs_no_more_memory_than_its_bytes_say() {
    for ranks in [1, 100, 1000, 4096] {
        let frame = greedy(ranks);
        let (outcome, peak) = counting::peak(|| decode_peer(&frame));
        let error = outcome.unwrap_err();
        assert!(matches!(error, WireError::Meaning { error: ConvertError::ItemCount { .. }, .. }), "{error}");
        let allowed = 64 * counting::signed(frame.body.len()) + (16 << 10);
        assert!(peak <= allowed, "{ranks} ranks in {} bytes took {peak} bytes", frame.body.len());
    }
}
