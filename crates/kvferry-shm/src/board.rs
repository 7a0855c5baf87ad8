//! Two small tables that an endpoint publishes to its peers in a memory file that only it can write.
//!
//! - **Gates**: for each region id, the generation in which it is registered now. A peer looks before and after each
//!   slice that it moves, so that an operation on a region that was deregistered fails instead of going on.
//! - **Slots**: for each copy thread, a counter that is odd while the thread is inside a slice. The owner of a region
//!   looks at its peers' slots after it closed the gate: once every slot that was odd has changed, no conforming peer
//!   touches the region any more, and its memory may go.
//!
//! Closing the gate and then looking at the slots, against taking the slot and then looking at the gate: both sides
//! put a sequentially consistent fence between the two, so at least one of them sees the other.
//!
//! All this binds conforming peers. One that breaks the rules can keep our memory for longer by a slot that stays odd, and can
//! touch it after it was freed by a slot that does not tell: against that there is only not to let it in.
//!
//! The board belongs to the process that made it. A child of a fork shares it, so nothing that the child does may change it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use kvferry_geometry::units::RegionId;
use kvferry_transport::blob::MAX_REGIONS;

use crate::window::{Window, WindowError, create};

/// The most copy threads of an endpoint.
pub(crate) const MAX_SLOTS: usize = 32;

const MAGIC: u64 = u64::from_le_bytes(*b"kvfboar1");
const FIRST_SLOT: usize = 64;
const SLOT_STRIDE: usize = 64;
const FIRST_GATE: usize = 4096;
const LEN: usize = FIRST_GATE + 8 * MAX_REGIONS;

/// What the slots of a peer showed at one moment.
pub(crate) type Slots = [u64; MAX_SLOTS];

/// Our own board.
#[derive(Debug)]
pub(crate) struct Board {
    fd: OwnedFd,
    words: Words,
    /// The process that made it.
    pid: u32,
}

/// A peer's board, which we can only read.
#[derive(Clone, Debug)]
pub(crate) struct PeerBoard(Words);

#[derive(Clone, Debug)]
struct Words(Arc<Window>);

impl Words {
    /// A word of the board, by its byte offset.
    fn at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < LEN, "offsets come from this module's constants");
        // SAFETY: the window is `LEN` bytes long (both constructors), begins at a page, lives as long as `self`, and its
        // words are only ever used as atomics, by us and by the process at the other end. A peer's board is mapped
        // read-only, where only relaxed loads of this size are defined (std::sync::atomic): `PeerBoard` uses nothing else,
        // and gets its ordering from fences.
        unsafe { AtomicU64::from_ptr(self.0.start().as_ptr().add(offset).cast()) }
    }

    fn gate(&self, region: RegionId) -> Option<&AtomicU64> {
        (region.index() < MAX_REGIONS).then(|| self.at(FIRST_GATE + 8 * region.index()))
    }

    fn slot(&self, slot: usize) -> &AtomicU64 {
        self.at(FIRST_SLOT + SLOT_STRIDE * (slot % MAX_SLOTS))
    }
}

impl Board {
    pub(crate) fn new() -> Result<Self, WindowError> {
        let (fd, window) = create("kvferry-board", LEN as u64, true)?;
        let words = Words(Arc::new(window));
        words.at(0).store(MAGIC, Ordering::Release);
        Ok(Self { fd, words, pid: std::process::id() })
    }

    /// Whether this is the process that made it, and not a child of a fork.
    pub(crate) fn is_ours(&self) -> bool {
        std::process::id() == self.pid
    }

    /// For passing to peers.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens the gate of a region that was registered in a generation.
    pub(crate) fn open(&self, region: RegionId, generation: u64) {
        if let Some(gate) = self.words.gate(region).filter(|_| self.is_ours()) {
            gate.store(generation + 1, Ordering::SeqCst);
        }
    }

    /// Closes the gate. The slots of peers must be read after this.
    pub(crate) fn close(&self, region: RegionId) {
        if let Some(gate) = self.words.gate(region).filter(|_| self.is_ours()) {
            gate.store(0, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    /// The slot of one of our copy threads.
    pub(crate) fn slot(&self, index: usize) -> Slot {
        Slot { words: self.words.clone(), index }
    }
}

/// One copy thread's counter.
#[derive(Debug)]
pub(crate) struct Slot {
    words: Words,
    index: usize,
}

impl Slot {
    /// Enters a slice; the gates must be looked at after this. Left when the guard is dropped.
    pub(crate) fn enter(&self) -> Inside<'_> {
        let word = self.words.slot(self.index);
        word.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Inside(word)
    }
}

/// While this lives, the thread may touch peers' memory whose gate it saw open.
pub(crate) struct Inside<'a>(&'a AtomicU64);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl PeerBoard {
    /// Maps what a peer passed as its board.
    pub(crate) fn map(fd: BorrowedFd<'_>) -> Result<Self, WindowError> {
        let words = Words(Arc::new(Window::map(fd, 0, LEN as u64, false)?));
        match load(words.at(0)) {
            MAGIC => Ok(Self(words)),
            _ => Err(WindowError::NoBoard),
        }
    }

    /// Whether a region is registered in that generation.
    pub(crate) fn is_open(&self, region: RegionId, generation: u64) -> bool {
        self.0.gate(region).is_some_and(|gate| load(gate) == generation.wrapping_add(1))
    }

    /// The slots now.
    pub(crate) fn slots(&self) -> Slots {
        std::array::from_fn(|i| load(self.0.slot(i)))
    }

    /// Whether every slice that ran when `then` was read has ended.
    pub(crate) fn passed(&self, then: &Slots) -> bool {
        self.slots().iter().zip(then).all(|(now, then)| then % 2 == 0 || now != then)
    }
}

/// What a peer wrote: whatever we read before was read before this, whatever follows comes after it and sees what the peer had
/// written before.
fn load(word: &AtomicU64) -> u64 {
    fence(Ordering::Acquire);
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_slots_are_seen_by_the_peer() {
        let board = Board::new().unwrap();
        let peer = PeerBoard::map(board.fd()).unwrap();
        let (a, b) = (RegionId::new(0), RegionId::new(u32::try_from(MAX_REGIONS - 1).unwrap()));
        board.open(a, 0);
        board.open(b, 6);
        assert!(peer.is_open(a, 0) && peer.is_open(b, 6) && !peer.is_open(b, 5) && !peer.is_open(a, 1));
        assert!(!peer.is_open(RegionId::new(u32::MAX), 0) && !peer.is_open(RegionId::new(1), u64::MAX - 1));
        board.close(a);
        assert!(!peer.is_open(a, 0));

        let slot = board.slot(3);
        let idle = peer.slots();
        let inside = slot.enter();
        let busy = peer.slots();
        assert!(peer.passed(&idle) && !peer.passed(&busy));
        drop(inside);
        assert!(peer.passed(&busy));
        let again = slot.enter();
        assert!(peer.passed(&busy) && !peer.passed(&peer.slots()));
        drop(again);
    }

    #[test]
    fn a_board_is_checked_like_any_memory_file() {
        let (fd, _window) = create("t", LEN as u64, false).unwrap();
        assert!(PeerBoard::map(fd.as_fd()).is_err(), "no magic");
        let (fd, _window) = create("t", 4096, false).unwrap();
        assert!(matches!(PeerBoard::map(fd.as_fd()), Err(WindowError::TooShort { .. })));
    }

    #[test]
    fn gate_and_slot_never_miss_each_other() {
        // Dekker: after the owner closed the gate and saw the slot passed, the peer's thread is never inside.
        let board = Board::new().unwrap();
        let owner_view = PeerBoard::map(board.fd()).unwrap();
        let region = RegionId::new(5);
        let memory = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let slot = board.slot(0);
            let view = owner_view.clone();
            let memory = &memory;
            scope.spawn(move || {
                let mut rounds = 0;
                while rounds < 20_000 {
                    let inside = slot.enter();
                    if view.is_open(region, 0) {
                        assert_eq!(memory.load(Ordering::Relaxed), 0, "touched after it was freed");
                    }
                    drop(inside);
                    rounds += 1;
                }
            });
            for _ in 0..20_000 {
                memory.store(0, Ordering::SeqCst);
                board.open(region, 0);
                std::hint::spin_loop();
                board.close(region);
                let then = owner_view.slots();
                while !owner_view.passed(&then) {
                    std::hint::spin_loop();
                }
                memory.store(1, Ordering::SeqCst);
            }
            board.close(region);
        });
    }
}
