//! What waits for a task: a list that many fill and one takes as a whole.
//!
//! Whoever takes is woken once for all that comes while it sleeps, and never while it works. There is no bound: whoever fills it
//! waits for something to come of it before it sends more (a call for its answer, a connection for its credit).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// The taker's end. Dropping it refuses all that comes after, and drops what waits.
#[derive(Debug)]
pub(crate) struct Inbox<T>(Arc<Shared<T>>);

/// An end that fills.
#[derive(Debug)]
pub(crate) struct Sender<T>(Arc<Shared<T>>);

#[derive(Debug)]
struct Shared<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    waiting: Vec<T>,
    /// Numbers that were given out with [`Sender::send_numbered`].
    numbered: u64,
    sleeper: Option<Waker>,
    closed: bool,
}

/// Both ends.
pub(crate) fn inbox<T>() -> (Sender<T>, Inbox<T>) {
    let state = State { waiting: Vec::new(), numbered: 0, sleeper: None, closed: false };
    let shared = Arc::new(Shared(Mutex::new(state)));
    (Sender(shared.clone()), Inbox(shared))
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Sender<T> {
    /// Adds something; gives it back where nobody will take it any more.
    pub(crate) fn send(&self, item: T) -> Result<(), T> {
        let mut state = self.0.lock();
        if state.closed {
            return Err(item);
        }
        state.waiting.push(item);
        let sleeper = state.sleeper.take();
        drop(state);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
        Ok(())
    }

    /// Adds several things, as far as at most `most` wait then; leaves the others where they are.
    pub(crate) fn send_some(&self, items: &mut Vec<T>, most: usize) {
        let mut state = self.0.lock();
        let room = if state.closed { items.len() } else { most.saturating_sub(state.waiting.len()).min(items.len()) };
        let some = items.drain(..room);
        if state.closed {
            drop(state);
            return drop(some);
        }
        state.waiting.extend(some);
        let sleeper = state.sleeper.take();
        drop(state);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    /// Adds something that is made of its number. Numbers count from 1 in the order in which what has them is taken.
    pub(crate) fn send_numbered(&self, make: impl FnOnce(u64) -> T) -> Option<u64> {
        let mut state = self.0.lock();
        if state.closed {
            return None;
        }
        state.numbered += 1;
        let number = state.numbered;
        state.waiting.push(make(number));
        let sleeper = state.sleeper.take();
        drop(state);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
        Some(number)
    }
}

impl<T> Inbox<T> {
    /// Takes all that waits, in order. `into` must be empty; its memory is used for what comes next.
    pub(crate) fn take(&self, into: &mut Vec<T>) {
        std::mem::swap(&mut self.0.lock().waiting, into);
    }

    /// Until something waits.
    pub(crate) async fn filled(&self) {
        std::future::poll_fn(|cx| {
            let mut state = self.0.lock();
            if !state.waiting.is_empty() {
                return Poll::Ready(());
            }
            match &mut state.sleeper {
                Some(sleeper) => sleeper.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            Poll::Pending
        })
        .await;
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.sleeper = None;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        // Not under the lock: what is dropped may want to send.
        drop(waiting);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_sleeper_is_woken_once_for_all_that_comes() {
        let (sender, inbox) = inbox();
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut filled = Box::pin(inbox.filled());
        assert!(filled.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        for i in 0..5 {
            sender.send(i).unwrap();
        }
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(filled.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
        let mut got = Vec::new();
        inbox.take(&mut got);
        assert_eq!(got, [0, 1, 2, 3, 4]);
        // Nobody sleeps.
        sender.send(5).unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn numbers_are_in_the_order_of_what_has_them() {
        let (sender, inbox) = inbox();
        for _ in 0..4 {
            let sender = sender.clone();
            std::thread::spawn(move || (0..100).for_each(|_| assert!(sender.send_numbered(|n| n).is_some())));
        }
        let (mut got, mut some) = (Vec::new(), Vec::new());
        while got.len() < 400 {
            inbox.take(&mut some);
            got.append(&mut some);
        }
        assert_eq!(got, (1..=400).collect::<Vec<u64>>());
        drop(inbox);
        assert_eq!(sender.send_numbered(|n| n), None);
        assert_eq!(sender.send(7), Err(7));
    }
}
