//! The bytes that wait to be written to one connection: the driver adds frames, the writer takes all that is there.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// A buffer is used again if it is not longer than this: an idle connection keeps little.
const KEPT: usize = 8 << 10;

/// The driver's end. Dropping it closes the outbox, after what was sent.
pub(super) struct Outbox {
    /// Sent since the last flush.
    new: Vec<u8>,
    shared: Arc<Shared>,
}

/// The writer's end.
pub(super) struct Written {
    shared: Arc<Shared>,
    spare: Vec<u8>,
}

struct Shared {
    state: Mutex<State>,
    /// Bytes that were sent and are not written.
    waiting: AtomicUsize,
    /// Nothing is written any more.
    ended: AtomicBool,
}

struct State {
    bytes: Vec<u8>,
    /// The driver gives nothing more.
    closing: bool,
    sleeper: Option<Waker>,
}

pub(super) fn outbox() -> (Outbox, Written) {
    let state = Mutex::new(State { bytes: Vec::new(), closing: false, sleeper: None });
    let shared = Arc::new(Shared { state, waiting: AtomicUsize::new(0), ended: AtomicBool::new(false) });
    (Outbox { new: Vec::new(), shared: shared.clone() }, Written { shared, spare: Vec::new() })
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outbox {
    /// Adds a frame; false if nothing is written any more.
    pub(super) fn send(&mut self, frame: Vec<u8>) -> bool {
        if self.shared.ended.load(Ordering::Relaxed) {
            return false;
        }
        self.shared.waiting.fetch_add(frame.len(), Ordering::Relaxed);
        if self.new.is_empty() {
            self.new = frame;
        } else {
            self.new.extend_from_slice(&frame);
        }
        true
    }

    /// Lets the writer have what was sent.
    pub(super) fn flush(&mut self) {
        if self.new.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        if state.bytes.is_empty() {
            std::mem::swap(&mut state.bytes, &mut self.new);
        } else {
            state.bytes.append(&mut self.new);
        }
        let sleeper = state.sleeper.take();
        drop(state);
        self.new.clear();
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    pub(super) fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::Relaxed)
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.flush();
        let mut state = self.shared.lock();
        state.closing = true;
        let sleeper = state.sleeper.take();
        drop(state);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }
}

impl Written {
    /// All that waits, once something does; `None` as soon as the driver gives nothing more: [`rest`](Self::rest) has what is left.
    pub(super) async fn next(&mut self) -> Option<Vec<u8>> {
        std::future::poll_fn(|cx| {
            let mut state = self.shared.lock();
            if state.closing {
                return Poll::Ready(None);
            }
            if !state.bytes.is_empty() {
                return Poll::Ready(Some(std::mem::replace(&mut state.bytes, std::mem::take(&mut self.spare))));
            }
            match &mut state.sleeper {
                Some(sleeper) => sleeper.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            Poll::Pending
        })
        .await
    }

    /// Whether the driver gives nothing more.
    pub(super) fn is_closing(&self) -> bool {
        self.shared.lock().closing
    }

    /// Notes that bytes are written; says whether that took what waits to `mark`, from above.
    pub(super) fn written(&self, bytes: usize, mark: usize) -> bool {
        let before = self.shared.waiting.fetch_sub(bytes, Ordering::Relaxed);
        before > mark && before - bytes <= mark
    }

    /// Takes a written piece's memory back.
    pub(super) fn recycle(&mut self, mut piece: Vec<u8>) {
        if piece.capacity() <= KEPT {
            piece.clear();
            self.spare = piece;
        }
    }

    /// What is left after the driver's end.
    pub(super) fn rest(&self) -> Vec<u8> {
        std::mem::take(&mut self.shared.lock().bytes)
    }

    /// Nothing is written any more.
    pub(super) fn end(&self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        self.shared.lock().bytes = Vec::new();
    }
}
