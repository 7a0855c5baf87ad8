//! What is to happen, by time; what is due together comes in the order in which it was put in.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

/// See the module's text.
#[derive(Debug)]
pub struct Queue<T> {
    heap: BinaryHeap<Entry<T>>,
    next: u64,
}

#[derive(Debug)]
struct Entry<T> {
    at: Duration,
    number: u64,
    what: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl<T> Eq for Entry<T> {}
impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Entry<T> {
    /// The heap gives the largest first, so the earliest is the largest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), next: 0 }
    }
}

impl<T> Queue<T> {
    /// Something happens at that time.
    pub fn put(&mut self, at: Duration, what: T) {
        let number = self.next;
        self.next += 1;
        self.heap.push(Entry { at, number, what });
    }

    /// When the first is due.
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        self.heap.peek().map(|e| e.at)
    }

    /// Takes the first.
    pub fn take(&mut self) -> Option<(Duration, T)> {
        self.heap.pop().map(|e| (e.at, e.what))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}
