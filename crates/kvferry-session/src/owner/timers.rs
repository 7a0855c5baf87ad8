//! When something is due, by name: the first is found at once, however many there are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Timers<K> {
    by_time: BTreeSet<(Duration, K)>,
    by_name: BTreeMap<K, Duration>,
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Self { by_time: BTreeSet::new(), by_name: BTreeMap::new() }
    }
}

impl<K: Copy + Ord> Timers<K> {
    /// This is due then, and at no other time.
    pub(super) fn set(&mut self, name: K, due: Duration) {
        match self.by_name.insert(name, due) {
            Some(before) if before == due => return,
            Some(before) => drop(self.by_time.remove(&(before, name))),
            None => {}
        }
        self.by_time.insert((due, name));
    }

    /// This is due then, unless it is due before.
    pub(super) fn hasten(&mut self, name: K, due: Duration) {
        if self.by_name.get(&name).is_none_or(|before| due < *before) {
            self.set(name, due);
        }
    }

    /// This is not due any more.
    pub(super) fn remove(&mut self, name: K) {
        if let Some(before) = self.by_name.remove(&name) {
            self.by_time.remove(&(before, name));
        }
    }

    /// Whether this is due at some time.
    pub(super) fn is_set(&self, name: K) -> bool {
        self.by_name.contains_key(&name)
    }

    /// When the first is due.
    pub(super) fn next(&self) -> Option<Duration> {
        self.by_time.first().map(|(due, _)| *due)
    }

    /// Takes one that is due.
    pub(super) fn take_due(&mut self, now: Duration) -> Option<K> {
        let (due, name) = *self.by_time.first().filter(|(due, _)| *due <= now)?;
        self.by_time.remove(&(due, name));
        self.by_name.remove(&name);
        Some(name)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_time.is_empty() && self.by_name.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_comes_in_order_and_once() {
        let at = Duration::from_secs;
        let mut timers = Timers::default();
        for (name, due) in [(1, 9), (2, 5), (3, 7), (2, 8), (1, 2), (4, 1)] {
            timers.set(name, at(due));
        }
        timers.hasten(2, at(9));
        timers.remove(4);
        timers.remove(4);
        assert_eq!(timers.next(), Some(at(2)));
        assert_eq!(timers.take_due(at(1)), None);
        let due: Vec<i32> = std::iter::from_fn(|| timers.take_due(at(7))).collect();
        assert_eq!((due, timers.next()), (vec![1, 3], Some(at(8))));
        timers.remove(2);
        assert!(timers.is_empty());
    }
}
