//! What a stranger's hello costs in memory before anybody knows who it is: in proportion to the bytes it has sent, whatever it
//! announces.
#![allow(clippy::unwrap_used, reason = "a test whose frame is read has failed")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvferry_proto::wire::{ConvertError, Frame, WireError, decode_peer, kind};

thread_local! {
    /// Bytes in use, and the most since it was last set.
    static LIVE: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

fn count(bytes: i64) {
    LIVE.with(|c| {
        let (live, peak) = c.get();
        c.set((live + bytes, peak.max(live + bytes)));
    });
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counter is plain thread-local data without a
// destructor and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: the caller keeps `alloc`'s contract, which is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-signed(layout.size()));
        // SAFETY: the caller keeps `dealloc`'s contract, and `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
        let before = LIVE.with(|c| {
            let live = c.get().0;
            c.set((live, live));
            live
        });
        let error = decode_peer(&frame).unwrap_err();
        let peak = LIVE.with(Cell::get).1 - before;
        assert!(matches!(error, WireError::Meaning { error: ConvertError::ItemCount { .. }, .. }), "{error}");
        let allowed = 64 * signed(frame.body.len()) + (16 << 10);
        assert!(peak <= allowed, "{ranks} ranks in {} bytes took {peak} bytes", frame.body.len());
    }
}
