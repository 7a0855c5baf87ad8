//! An allocator that counts the bytes in use, for tests of what an input costs.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

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

pub(crate) fn signed(bytes: usize) -> i64 {
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

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(signed(layout.size()));
        // SAFETY: as above. Memory that is never touched costs nothing, but it was asked for.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-signed(layout.size()));
        // SAFETY: the caller keeps `dealloc`'s contract, and `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What comes of `once`, and the most bytes that this thread had in use for it at a time.
pub(crate) fn peak<T>(once: impl FnOnce() -> T) -> (T, i64) {
    let before = LIVE.with(|c| {
        let live = c.get().0;
        c.set((live, live));
        live
    });
    let out = once();
    (out, LIVE.with(Cell::get).1 - before)
}
