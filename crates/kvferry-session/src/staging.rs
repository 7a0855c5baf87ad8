//! Who may use staging memory, and in which order.
//!
//! A [`StagingPool`] lends contiguous *segments* of one registered region, whose bytes it never sees: a segment is an offset and
//! a length. Who finds no room waits. Waiters are served strictly in the order in which they came: nobody is overtaken, not even by
//! one that would fit, so nobody starves. What is larger than the pool is told so at once and goes directly.
//!
//! A segment is a loan like a block: it is given back by value, once, by whoever knows that nothing writes to it or reads from it
//! any more. One that is dropped instead stays out of use for good, which is right for bytes in doubt and a leak otherwise.
//!
//! No thread, no clock: nothing is granted but in answer to a call. A waiter whose time is up is cancelled by whoever has the time.
//!
//! ```
//! # use kvferry_geometry::units::Bytes;
//! # use kvferry_session::staging::{Acquired, StagingPool};
//! let mut pool = StagingPool::new(Bytes::new(1 << 20), Bytes::new(4096))?;
//! let Acquired::Granted(all) = pool.acquire("first", Bytes::new(1 << 20))? else { panic!() };
//! assert_eq!(pool.acquire("second", Bytes::new(100))?, Acquired::Queued);
//! assert_eq!(pool.acquire("third", Bytes::new((1 << 20) + 1))?, Acquired::TooLarge);
//! let granted = pool.release(all)?;
//! assert_eq!((granted[0].waiter, granted[0].segment.len()), ("second", Bytes::new(4096)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use kvferry_geometry::units::Bytes;

/// A pool could not be made or was used wrongly; always our caller's fault.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// Segments cannot be aligned so.
    #[error("segments cannot be aligned to {align}; give a power of two")]
    Align {
        /// The alignment asked for.
        align: Bytes,
    },
    /// A waiter asked again before it was served or cancelled.
    #[error("the waiter waits for {waiting} already and asks for {asked}; cancel it first")]
    Waiting {
        /// What it waits for.
        waiting: Bytes,
        /// What it asks for now.
        asked: Bytes,
    },
}

/// A segment was given back to a pool that did not lend it. It is inside, still lent.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} was lent by another pool; release it there")]
pub struct ForeignSegment(pub Segment);

/// A lent part of a pool's region. Neither cloned nor copied: it is given back by [`StagingPool::release`].
#[derive(Debug)]
#[must_use = "a segment that is dropped stays out of use for good"]
pub struct Segment {
    offset: u64,
    len: u64,
    /// The pool that lent it.
    pool: Arc<()>,
}

impl Segment {
    /// Where it begins in the region; a multiple of the pool's alignment.
    #[must_use]
    pub fn offset(&self) -> Bytes {
        Bytes::new(self.offset)
    }

    /// Its length: what was asked for, rounded up to the pool's alignment.
    #[must_use]
    pub fn len(&self) -> Bytes {
        Bytes::new(self.len)
    }

    /// Never: a segment has at least the pool's alignment.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl PartialEq for Segment {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.pool, &other.pool) && (self.offset, self.len) == (other.offset, other.len)
    }
}

impl Eq for Segment {}

/// What came of asking for a segment.
#[derive(PartialEq, Eq, Debug)]
pub enum Acquired {
    /// Here it is.
    Granted(Segment),
    /// It will come with some later release or cancellation.
    Queued,
    /// The pool is smaller than that; it never will.
    TooLarge,
}

/// A waiter is served.
#[derive(PartialEq, Eq, Debug)]
pub struct Grant<W> {
    /// Who waited.
    pub waiter: W,
    /// What it gets.
    pub segment: Segment,
}

/// Lends segments of one region of `len` bytes to waiters `W`, first come, first served. See the module's text.
#[derive(Debug)]
pub struct StagingPool<W> {
    len: u64,
    align: u64,
    /// Offset and length of what is free; no two adjoin.
    free: BTreeMap<u64, u64>,
    /// Who waits for how much, already rounded up, with what was asked for; the first in front.
    waiting: VecDeque<(W, u64, Bytes)>,
    identity: Arc<()>,
}

impl<W: Copy + Eq> StagingPool<W> {
    /// A pool over a region of `len` bytes, all free. Segments begin at multiples of `align` and have multiples of it as lengths;
    /// bytes of the region beyond the last multiple are not lent. A pool of no bytes finds everything too large.
    ///
    /// # Errors
    /// If `align` is not a power of two.
    pub fn new(len: Bytes, align: Bytes) -> Result<Self, StagingError> {
        if !align.get().is_power_of_two() {
            return Err(StagingError::Align { align });
        }
        let (len, align) = (len.get() / align.get() * align.get(), align.get());
        let free = if len == 0 { BTreeMap::new() } else { BTreeMap::from([(0, len)]) };
        Ok(Self { len, align, free, waiting: VecDeque::new(), identity: Arc::default() })
    }

    /// Asks for a segment of at least `bytes` for a waiter. A waiter may hold any number of segments, but wait for one only.
    ///
    /// # Errors
    /// If the waiter waits already.
    pub fn acquire(&mut self, waiter: W, bytes: Bytes) -> Result<Acquired, StagingError> {
        if let Some((.., waiting)) = self.waiting.iter().find(|(other, ..)| *other == waiter) {
            return Err(StagingError::Waiting { waiting: *waiting, asked: bytes });
        }
        let rounded = bytes.get().max(1).checked_next_multiple_of(self.align);
        let Some(need) = rounded.filter(|need| *need <= self.len) else { return Ok(Acquired::TooLarge) };
        if self.waiting.is_empty()
            && let Some(segment) = self.take(need)
        {
            return Ok(Acquired::Granted(segment));
        }
        self.waiting.push_back((waiter, need, bytes));
        Ok(Acquired::Queued)
    }

    /// Takes a segment back; gives those that are served by that, in their order.
    ///
    /// # Errors
    /// If this pool did not lend it; then it is in the error.
    pub fn release(&mut self, segment: Segment) -> Result<Vec<Grant<W>>, ForeignSegment> {
        if !Arc::ptr_eq(&segment.pool, &self.identity) {
            return Err(ForeignSegment(segment));
        }
        self.put(segment.offset, segment.len);
        Ok(self.serve())
    }

    /// Takes a waiter off the queue; gives those behind it that are served by that, in their order. Who doesn't wait is no
    /// error: it may have been served just now. Segments are not taken back by this.
    pub fn cancel(&mut self, waiter: W) -> Vec<Grant<W>> {
        self.waiting.retain(|(other, ..)| *other != waiter);
        self.serve()
    }

    /// Bytes that can be lent in all.
    #[must_use]
    pub fn len(&self) -> Bytes {
        Bytes::new(self.len)
    }

    /// Whether there is nothing to lend at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that are lent, dropped segments included.
    #[must_use]
    pub fn lent(&self) -> Bytes {
        Bytes::new(self.len - self.free.values().sum::<u64>())
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Serves the first in the queue, as long as there is room for it.
    fn serve(&mut self) -> Vec<Grant<W>> {
        let mut granted = Vec::new();
        while let Some(&(waiter, need, _)) = self.waiting.front() {
            let Some(segment) = self.take(need) else { break };
            self.waiting.pop_front();
            granted.push(Grant { waiter, segment });
        }
        granted
    }

    /// The first place with room.
    fn take(&mut self, need: u64) -> Option<Segment> {
        let (&offset, &room) = self.free.iter().find(|(_, room)| **room >= need)?;
        self.free.remove(&offset);
        if room > need {
            self.free.insert(offset + need, room - need);
        }
        Some(Segment { offset, len: need, pool: self.identity.clone() })
    }

    /// Makes a place free, as one with its free neighbours.
    fn put(&mut self, offset: u64, len: u64) {
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &room)) = self.free.range(..offset).next_back()
            && before + room == start
        {
            start = before;
        }
        if let Some(room) = self.free.remove(&end) {
            end += room;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use kvferry_transport::conformance::sample::Rng;

    use super::*;

    type Pool = StagingPool<u32>;

    fn pool(len: u64) -> Pool {
        StagingPool::new(Bytes::new(len), Bytes::new(16)).unwrap()
    }

    fn acquire(pool: &mut Pool, waiter: u32, bytes: u64) -> Result<Acquired, StagingError> {
        pool.acquire(waiter, Bytes::new(bytes))
    }

    fn granted(pool: &mut Pool, waiter: u32, bytes: u64) -> Segment {
        match acquire(pool, waiter, bytes) {
            Ok(Acquired::Granted(segment)) => segment,
            other => panic!("{other:?}"),
        }
    }

    fn names(grants: &[Grant<u32>]) -> Vec<u32> {
        grants.iter().map(|g| g.waiter).collect()
    }

    /// Of 64 bytes: a pool where nothing is lent; where the middle half is lent, so that 16 and 16 are free; where all is lent;
    /// and that with waiters 10 (for 32), 11 (for 16) and 12 (for 64).
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum State {
        Free,
        Split,
        Full,
        Waiting,
    }

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Event {
        /// By waiter 20.
        Acquire(u64),
        /// By waiter 11.
        Again,
        /// Of the segment in the middle.
        Release,
        Cancel(u32),
    }

    impl State {
        fn make(self) -> (Pool, Vec<Segment>) {
            let mut pool = pool(64);
            if self == Self::Free {
                return (pool, Vec::new());
            }
            let (low, middle, high) = (granted(&mut pool, 0, 16), granted(&mut pool, 1, 32), granted(&mut pool, 2, 16));
            if self == Self::Split {
                assert_eq!(pool.release(low).unwrap(), []);
                assert_eq!(pool.release(high).unwrap(), []);
                return (pool, vec![middle]);
            }
            if self == Self::Waiting {
                for (waiter, bytes) in [(10, 32), (11, 16), (12, 64)] {
                    assert_eq!(acquire(&mut pool, waiter, bytes), Ok(Acquired::Queued));
                }
            }
            (pool, vec![middle, low, high])
        }
    }

    /// What an event comes to, see `Cell`.
    fn outcome(state: State, event: Event) -> (&'static str, Vec<u32>, usize) {
        let (mut pool, mut segments) = state.make();
        let answer = |result: Result<Acquired, StagingError>| match result {
            Ok(Acquired::Granted(_)) => "granted",
            Ok(Acquired::Queued) => "queued",
            Ok(Acquired::TooLarge) => "too large",
            Err(_) => "waits already",
        };
        let (said, served) = match event {
            Event::Acquire(bytes) => (answer(acquire(&mut pool, 20, bytes)), Vec::new()),
            Event::Again => (answer(acquire(&mut pool, 11, 16)), Vec::new()),
            Event::Release if segments.is_empty() => ("nothing is lent", Vec::new()),
            Event::Release => ("", names(&pool.release(segments.remove(0)).unwrap())),
            Event::Cancel(waiter) => ("", names(&pool.cancel(waiter))),
        };
        (said, served, pool.waiting())
    }

    #[test]
    fn every_state_times_every_event() {
        use Event::{Acquire, Again, Cancel, Release};
        use State::{Free, Full, Split, Waiting};
        /// The answer, who is served, and how many wait then.
        type Cell = (&'static str, &'static [u32], usize);
        // event, then: free, split, full, waiting
        let table: [(Event, [Cell; 4]); 9] = [
            (Acquire(16), [("granted", &[], 0), ("granted", &[], 0), ("queued", &[], 1), ("queued", &[], 4)]),
            (Acquire(17), [("granted", &[], 0), ("queued", &[], 1), ("queued", &[], 1), ("queued", &[], 4)]),
            (Acquire(64), [("granted", &[], 0), ("queued", &[], 1), ("queued", &[], 1), ("queued", &[], 4)]),
            (Acquire(65), [("too large", &[], 0), ("too large", &[], 0), ("too large", &[], 0), ("too large", &[], 3)]),
            (Again, [("granted", &[], 0), ("granted", &[], 0), ("queued", &[], 1), ("waits already", &[], 3)]),
            // 32 bytes become free: enough for waiter 10 alone.
            (Release, [("nothing is lent", &[], 0), ("", &[], 0), ("", &[], 0), ("", &[10], 2)]),
            (Cancel(10), [("", &[], 0), ("", &[], 0), ("", &[], 0), ("", &[], 2)]),
            (Cancel(11), [("", &[], 0), ("", &[], 0), ("", &[], 0), ("", &[], 2)]),
            (Cancel(99), [("", &[], 0), ("", &[], 0), ("", &[], 0), ("", &[], 3)]),
        ];
        for (event, expected) in table {
            for (state, (said, served, waiting)) in [Free, Split, Full, Waiting].into_iter().zip(expected) {
                assert_eq!(outcome(state, event), (said, served.to_vec(), waiting), "{state:?} x {event:?}");
            }
        }
    }

    #[test]
    fn small_ones_do_not_overtake_and_a_cancel_lets_them_go_on() {
        let (mut pool, mut segments) = State::Waiting.make();
        // 16 bytes are free: enough for 11, which came after 10.
        assert_eq!(pool.release(segments.remove(1)).unwrap(), []);
        assert_eq!(pool.waiting(), 3);
        assert_eq!(names(&pool.cancel(10)), [11]);
        // 12 needs all of it.
        assert_eq!(pool.release(segments.remove(0)).unwrap(), []);
        assert_eq!(acquire(&mut pool, 13, 16), Ok(Acquired::Queued));
        assert_eq!(names(&pool.cancel(12)), [13]);
        assert_eq!(pool.waiting(), 0);
    }

    #[test]
    fn one_release_serves_many_in_order() {
        let mut pool = pool(64);
        let all = granted(&mut pool, 0, 64);
        for waiter in 1..=5 {
            assert_eq!(acquire(&mut pool, waiter, 10), Ok(Acquired::Queued));
        }
        let served = pool.release(all).unwrap();
        assert_eq!(names(&served), [1, 2, 3, 4]);
        assert_eq!(served.iter().map(|g| g.segment.offset().get()).collect::<Vec<_>>(), [0, 16, 32, 48]);
        assert_eq!((pool.lent(), pool.waiting()), (Bytes::new(64), 1));
    }

    #[test]
    fn segments_of_others_are_not_taken() {
        let (mut a, mut b) = (pool(64), pool(64));
        let (of_a, of_b) = (granted(&mut a, 1, 16), granted(&mut b, 1, 16));
        assert_ne!(of_a, of_b);
        let ForeignSegment(back) = a.release(of_b).unwrap_err();
        assert_eq!(a.lent(), Bytes::new(16));
        assert_eq!(b.release(back).unwrap(), []);
        assert_eq!(b.lent(), Bytes::ZERO);
        drop(of_a);
        assert_eq!(a.lent(), Bytes::new(16), "what is dropped stays out of use");
    }

    #[test]
    fn sizes_are_rounded_and_extremes_refused() {
        for align in [0, 3, 48] {
            let align = Bytes::new(align);
            assert_eq!(Pool::new(Bytes::new(64), align).unwrap_err(), StagingError::Align { align });
        }
        let mut odd = pool(70);
        assert_eq!(odd.len(), Bytes::new(64));
        assert_eq!(acquire(&mut odd, 1, 65), Ok(Acquired::TooLarge));
        assert_eq!(acquire(&mut odd, 1, u64::MAX), Ok(Acquired::TooLarge));
        let none = granted(&mut odd, 1, 0);
        assert_eq!((none.len(), none.is_empty()), (Bytes::new(16), false));
        let mut nothing = pool(15);
        assert!(nothing.is_empty());
        assert_eq!(acquire(&mut nothing, 1, 1), Ok(Acquired::TooLarge));
        let mut all = StagingPool::new(Bytes::new(u64::MAX), Bytes::new(1)).unwrap();
        assert!(matches!(all.acquire(1, Bytes::new(u64::MAX)), Ok(Acquired::Granted(_))));
    }

    /// What a pool must do, from the list of what is lent alone.
    struct Model {
        len: u64,
        align: u64,
        lent: Vec<Segment>,
        /// Waiter and rounded size.
        queue: VecDeque<(u32, u64)>,
    }

    impl Model {
        fn has_room(&self, need: u64) -> bool {
            let mut taken: Vec<_> = self.lent.iter().map(|s| (s.offset, s.offset + s.len)).collect();
            taken.sort_unstable();
            taken.push((self.len, self.len));
            let mut end = 0;
            taken.into_iter().any(|(start, next)| {
                let room = start - end;
                end = next;
                room >= need
            })
        }

        /// A segment that was lent lies inside, overlaps no other and has its size.
        fn lend(&mut self, segment: Segment, need: u64) {
            assert_eq!((segment.len, segment.offset % self.align), (need, 0), "{segment:?}");
            assert!(segment.offset + segment.len <= self.len, "{segment:?} of {}", self.len);
            let apart =
                |other: &Segment| other.offset + other.len <= segment.offset || segment.offset + need <= other.offset;
            assert!(self.lent.iter().all(apart), "{segment:?} overlaps one of {:?}", self.lent);
            self.lent.push(segment);
        }

        /// Those in front are served, as long as there is room, and nobody else.
        fn serve(&mut self, grants: Vec<Grant<u32>>) {
            for grant in grants {
                let (waiter, need) = self.queue.pop_front().unwrap();
                assert_eq!(grant.waiter, waiter, "out of order");
                assert!(self.has_room(need));
                self.lend(grant.segment, need);
            }
            assert!(self.queue.front().is_none_or(|front| !self.has_room(front.1)), "the first waits beside its room");
        }

        fn check(&self, pool: &Pool) {
            assert_eq!(pool.lent().get(), self.lent.iter().map(|s| s.len).sum::<u64>());
            assert_eq!(pool.waiting(), self.queue.len());
            let ranges: Vec<_> = pool.free.iter().map(|(&offset, &len)| (offset, offset + len)).collect();
            assert!(ranges.windows(2).all(|w| w[0].1 < w[1].0), "free neighbours stay apart: {ranges:?}");
        }
    }

    #[test]
    fn any_sequence_keeps_order_and_bounds_and_gives_all_back() {
        let (mut waited, mut cancelled) = (0, 0);
        for seed in 0..400 {
            let mut rng = Rng::new(seed);
            let align = 1 << rng.below(5);
            let len = align * (1 + rng.below(40));
            let mut pool = StagingPool::new(Bytes::new(len + rng.below(align)), Bytes::new(align)).unwrap();
            let mut model = Model { len, align, lent: Vec::new(), queue: VecDeque::new() };
            let largest = 1 + rng.below(len + len / 8 + 1);
            for waiter in 0..150 {
                match rng.below(8) {
                    0..4 => {
                        let bytes = rng.below(largest + 1);
                        let need = bytes.max(1).next_multiple_of(align);
                        match acquire(&mut pool, waiter, bytes).unwrap() {
                            Acquired::TooLarge => assert!(need > len, "seed {seed}"),
                            Acquired::Queued => {
                                assert!(!model.queue.is_empty() || !model.has_room(need), "seed {seed}");
                                model.queue.push_back((waiter, need));
                                waited += 1;
                            }
                            Acquired::Granted(segment) => {
                                assert!(model.queue.is_empty(), "seed {seed}: overtaken");
                                model.lend(segment, need);
                            }
                        }
                    }
                    4..7 if !model.lent.is_empty() => {
                        let at = usize::try_from(rng.below(model.lent.len() as u64)).unwrap();
                        let grants = pool.release(model.lent.swap_remove(at)).unwrap();
                        model.serve(grants);
                    }
                    7 if !model.queue.is_empty() => {
                        let at = usize::try_from(rng.below(model.queue.len() as u64)).unwrap();
                        let (waiter, _) = model.queue.remove(at).unwrap();
                        let grants = pool.cancel(waiter);
                        model.serve(grants);
                        cancelled += 1;
                    }
                    _ => {}
                }
                model.check(&pool);
            }
            // Whoever waits is served by releases alone, and then all of the pool is there again.
            while let Some(segment) = model.lent.pop() {
                let grants = pool.release(segment).unwrap();
                model.serve(grants);
                model.check(&pool);
            }
            assert!(model.queue.is_empty(), "seed {seed}: somebody starves");
            assert_eq!(pool.free, BTreeMap::from([(0, len)]), "seed {seed}");
        }
        assert!(waited > 1000 && cancelled > 500, "only {waited} waited, {cancelled} were cancelled");
    }
}
