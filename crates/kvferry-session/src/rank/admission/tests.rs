//! The line, by table, by hand and by chance.

use std::collections::VecDeque;

use kvferry_transport::conformance::sample::Rng;

use kvferry_proto::push::PushId;
use kvferry_proto::rank::PullId;

use super::*;

const MIB: u64 = 1 << 20;

fn peer(n: u64) -> EngineId {
    EngineId::new(&format!("p{n}")).unwrap()
}

fn key(n: u64) -> Key {
    (Order::Pull(PullId(n)), RankId::new(0))
}

fn number(order: Order) -> u64 {
    match order {
        Order::Pull(PullId(n)) | Order::Push(PushId(n)) => n,
    }
}

/// Of engine `of`, in the middle of priorities, without a deadline.
fn wanted(of: u64, next: u64) -> Wanted {
    Wanted { peer: peer(of), priority: 100, deadline: None, next: Bytes::new(next) }
}

fn limits(slice: u64, peer_bytes: u64, peer_ops: u32, bytes: u64, ops: u32) -> Admission {
    let b = Bytes::new;
    Admission { slice: b(slice), peer_bytes: b(peer_bytes), peer_ops, bytes: b(bytes), ops }
}

/// Of 16 bytes or 3 operations an engine, 24 bytes or 4 operations in all; all slices have 8 bytes. Request 1 is of engine 1
/// and request 2 of engine 2, two slices each.
#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Empty,
    /// Request 1 waits.
    One,
    /// Both wait.
    Two,
    /// Request 1 waits, and its engine's limit is reached.
    PeerFull,
    /// Both wait, and the rank's limit is reached.
    Full,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Event {
    /// Request 3 of engine 1 with this priority.
    Of1(u8),
    /// Request 3 of engine 3 with this priority.
    Of3(u8),
    /// Request 1 once more.
    Again,
    /// The slice that may be posted is.
    Post,
    /// A slice of engine 1 or 2 has ended.
    Ends(u64),
    Remove(u64),
}

impl State {
    fn make(self) -> Queue {
        let mut queue = Queue::new(limits(8, 16, 3, 24, 4));
        if self == Self::Empty {
            return queue;
        }
        queue.push(key(1), wanted(1, 8));
        if matches!(self, Self::Two | Self::Full) {
            queue.push(key(2), wanted(2, 8));
        }
        let posted = match self {
            Self::PeerFull => 2,
            Self::Full => 3,
            _ => 0,
        };
        for _ in 0..posted {
            queue.posted(queue.pick().unwrap(), Some(Bytes::new(8)));
        }
        queue
    }
}

/// Whose turn it is then (0: nobody's), how many wait, and bytes in flight.
fn outcome(state: State, event: Event) -> (u64, usize, u64) {
    let mut queue = state.make();
    match event {
        Event::Of1(priority) => queue.push(key(3), Wanted { priority, ..wanted(1, 8) }),
        Event::Of3(priority) => queue.push(key(3), Wanted { priority, ..wanted(3, 8) }),
        Event::Again => queue.push(key(1), wanted(7, 1)),
        Event::Post => {
            if let Some(next) = queue.pick() {
                queue.posted(next, None);
            }
        }
        Event::Ends(n) => queue.ended(&peer(n), Bytes::new(8)),
        Event::Remove(n) => queue.remove_order(Order::Pull(PullId(n))),
    }
    (queue.pick().map_or(0, |(order, _)| number(order)), queue.waiting.len(), queue.in_flight().get())
}

#[test]
fn every_state_times_every_event() {
    use Event::{Again, Ends, Of1, Of3, Post, Remove};
    type Cell = (u64, usize, u64);
    // event, then: empty, one, two, peer full, full
    let table: [(Event, [Cell; 5]); 11] = [
        (Of1(100), [(3, 1, 0), (1, 2, 0), (1, 3, 0), (0, 2, 16), (0, 3, 24)]),
        // Nor does a higher priority pass its engine's limit,
        (Of1(200), [(3, 1, 0), (3, 2, 0), (3, 3, 0), (0, 2, 16), (0, 3, 24)]),
        (Of1(0), [(3, 1, 0), (1, 2, 0), (1, 3, 0), (0, 2, 16), (0, 3, 24)]),
        // but another engine does.
        (Of3(100), [(3, 1, 0), (1, 2, 0), (1, 3, 0), (3, 2, 16), (0, 3, 24)]),
        (Of3(200), [(3, 1, 0), (3, 2, 0), (3, 3, 0), (3, 2, 16), (0, 3, 24)]),
        (Of3(0), [(3, 1, 0), (1, 2, 0), (1, 3, 0), (3, 2, 16), (0, 3, 24)]),
        (Again, [(1, 1, 0), (1, 1, 0), (1, 2, 0), (0, 1, 16), (0, 2, 24)]),
        (Post, [(0, 0, 0), (0, 0, 8), (2, 1, 8), (0, 1, 16), (0, 2, 24)]),
        // In `Full`, engine 1 has had two slices and engine 2 one.
        (Ends(1), [(0, 0, 0), (1, 1, 0), (1, 2, 0), (1, 1, 8), (2, 2, 16)]),
        (Remove(1), [(0, 0, 0), (0, 0, 0), (2, 1, 0), (0, 0, 16), (0, 1, 24)]),
        (Remove(9), [(0, 0, 0), (1, 1, 0), (1, 2, 0), (0, 1, 16), (0, 2, 24)]),
    ];
    for (event, expected) in table {
        for (state, cell) in
            [State::Empty, State::One, State::Two, State::PeerFull, State::Full].into_iter().zip(expected)
        {
            assert_eq!(outcome(state, event), cell, "{state:?} x {event:?}");
        }
    }
}

#[test]
fn an_admission_of_nothing_is_refused() {
    assert_eq!(Admission::default().check(), Ok(()));
    let all = [(0, 1, 1, 1, 1), (1, 0, 1, 1, 1), (1, 1, 0, 1, 1), (1, 1, 1, 0, 1), (1, 1, 1, 1, 0)];
    let names = ["slice", "peer_bytes", "peer_ops", "bytes", "ops"];
    for ((slice, peer_bytes, peer_ops, bytes, ops), limit) in all.into_iter().zip(names) {
        let refused = limits(slice, peer_bytes, peer_ops, bytes, ops).check().unwrap_err();
        assert_eq!(refused, AdmissionRefused { limit });
        assert!(refused.to_string().contains(limit), "{refused}");
    }
    assert_eq!(limits(9, 8, 1, 7, 1).cut(), Bytes::new(7), "no slice is larger than a limit");
}

/// A world of requests with a length each, posted as the line says.
struct World {
    queue: Queue,
    slice: u64,
    /// What is left of each request that waits: engine, and bytes.
    left: BTreeMap<Key, (u64, u64)>,
    flying: VecDeque<(u64, u64)>,
    /// Bytes posted by engine.
    served: BTreeMap<u64, u64>,
    /// The order of posting.
    log: Vec<u64>,
}

impl World {
    fn new(limits: Admission) -> Self {
        let (slice, queue) = (limits.cut().get(), Queue::new(limits));
        let (left, served) = (BTreeMap::new(), BTreeMap::new());
        Self { queue, slice, left, flying: VecDeque::new(), served, log: Vec::new() }
    }

    fn want(&mut self, id: u64, of: u64, bytes: u64, priority: u8, deadline: Option<u64>) {
        let deadline = deadline.map(Duration::from_secs);
        let next = Bytes::new(bytes.min(self.slice));
        self.queue.push(key(id), Wanted { peer: peer(of), priority, deadline, next });
        self.left.insert(key(id), (of, bytes));
    }

    /// Posts one slice, if one may be.
    fn post(&mut self) -> bool {
        let Some(next) = self.queue.pick() else { return false };
        let (of, left) = self.left[&next];
        let bytes = left.min(self.slice);
        self.flying.push_back((of, bytes));
        *self.served.entry(of).or_default() += bytes;
        self.log.push(number(next.0));
        if left == bytes {
            self.left.remove(&next);
            self.queue.posted(next, None);
        } else {
            self.left.insert(next, (of, left - bytes));
            self.queue.posted(next, Some(Bytes::new((left - bytes).min(self.slice))));
        }
        true
    }

    fn end(&mut self, at: usize) {
        let (of, bytes) = self.flying.remove(at).unwrap();
        self.queue.ended(&peer(of), Bytes::new(bytes));
    }

    /// Posts what may be, and lets the oldest end, so many times.
    fn run(&mut self, times: usize) {
        for _ in 0..times {
            while self.post() {}
            if !self.flying.is_empty() {
                self.end(0);
            }
        }
    }

    /// How many slices of others were posted after the first `from` and before the last slice of a request.
    fn others_before_the_end_of(&self, id: u64, from: usize) -> usize {
        let last = self.log.iter().rposition(|other| *other == id).unwrap();
        self.log[from..last].iter().filter(|other| **other != id).count()
    }
}

/// A request of 16 MiB that comes after one of 4 GiB waits for a few slices, whoever it is from and whichever is late first.
#[test]
fn a_short_request_waits_for_a_few_slices_of_a_long_one() {
    for (of, long, short) in [
        (1, None, None),
        (1, Some(1), Some(9)),
        (1, Some(9), Some(1)),
        (1, Some(1), None),
        (2, Some(1), Some(9)),
        (2, Some(9), None),
    ] {
        let mut w = World::new(Admission::default());
        w.want(1, 1, 4096 * MIB, 100, long);
        w.run(100);
        let before = w.log.len();
        assert_eq!(w.queue.in_flight(), Bytes::new(56 * MIB), "all but the slice that has just ended");
        w.want(2, of, 16 * MIB, 100, short);
        w.run(100);
        let others = w.others_before_the_end_of(2, before);
        assert!(others <= 4, "engine {of}: {others} slices of the long one are posted before the short one is");
        w.run(1000);
        assert!(w.left.is_empty() && w.queue.pick().is_none());
    }
}

/// One that is late first goes first, but never alone for long.
#[test]
fn the_earliest_deadline_goes_first_most_of_the_time() {
    let mut w = World::new(limits(8, 8, 1, 8, 1));
    for (id, deadline) in [(1, None), (2, Some(30)), (3, Some(10)), (4, Some(20))] {
        w.want(id, 1, 8, 100, deadline);
    }
    w.run(4);
    // By turns the one that is late first, and the one that came first of those that had nothing.
    assert_eq!(w.log, [3, 1, 4, 2]);
    let mut w = World::new(limits(8, 8, 1, 8, 1));
    (1..10).for_each(|id| w.want(id, 1, 80, 100, Some(10 - id)));
    w.run(20);
    let of_9 = w.log.iter().filter(|id| **id == 9).count();
    assert_eq!(of_9, 10, "the earliest has every other slice: {:?}", w.log);
    w.run(80);
    assert!(w.left.is_empty());
}

/// Short requests with early deadlines that come all the time don't stop a long one that has none.
#[test]
fn nothing_starves_among_equals() {
    for same_engine in [true, false] {
        let mut w = World::new(limits(8, 8, 1, 8, 1));
        w.want(1, 1, 8 * 1000, 100, None);
        for i in 0..1000 {
            w.want(2 + i, if same_engine { 1 } else { 2 + i }, 8, 100, Some(i));
            w.run(2);
        }
        assert!(w.log.iter().filter(|id| **id == 1).count() >= 400, "same engine: {same_engine}");
        assert!(w.left.len() < 20, "{} wait", w.left.len());
        // Engines that have gone are not kept.
        assert!(w.queue.levels.values().all(|l| l.flows.len() < 20 && l.idle.len() < 20));
    }
}

/// A long request with a late deadline has its share also where short ones of its engine take all that there is: as many wait
/// as it has had slices, and each has as much of every other turn as the others.
#[test]
fn a_late_deadline_does_not_starve_behind_ever_new_ones() {
    let each = 8 << 10;
    let mut w = World::new(limits(each, each, 1, each, 1));
    w.want(1, 1, each * 1000, 100, Some(1_000_000));
    w.want(2, 1, each, 100, Some(0));
    for i in 3..1000 {
        w.want(i, 1, each, 100, Some(i));
        w.run(1);
    }
    let of_1 = w.log.iter().filter(|id| **id == 1).count();
    assert!(of_1 >= 20, "{of_1} of {}", w.log.len());
}

/// An engine with one request at a time has no more than one with many that wait; nor one that comes back.
#[test]
fn who_comes_back_has_no_more_than_who_waits() {
    let mut w = World::new(limits(8, 8, 1, 8, 1));
    w.want(1, 1, 8 * 10_000, 100, None);
    for id in 2..1000 {
        w.want(id, 2, 8, 100, None);
        while w.left.contains_key(&key(id)) {
            w.run(1);
        }
    }
    assert!(w.served[&1].abs_diff(w.served[&2]) <= 16, "{:?}", w.served);
    // It was away for long, which is no credit.
    w.run(1000);
    let before = w.served.clone();
    w.want(5000, 2, 8 * 10_000, 100, None);
    w.run(100);
    assert!((w.served[&2] - before[&2]).abs_diff(w.served[&1] - before[&1]) <= 16, "{before:?} {:?}", w.served);
}

/// An engine whose slices take for ever holds nobody up, and makes up for no more than its limit when they do end.
#[test]
fn a_slow_engine_makes_up_for_no_more_than_its_limit() {
    let mut w = World::new(limits(8, 32, 4, 1000, 100));
    w.want(1, 1, 8 * 10_000, 100, None);
    w.want(2, 2, 8 * 10_000, 100, None);
    while w.post() {}
    assert_eq!(w.served, BTreeMap::from([(1, 32), (2, 32)]));
    for _ in 0..1000 {
        let of_2 = w.flying.iter().position(|(of, _)| *of == 2).unwrap();
        w.end(of_2);
        while w.post() {}
    }
    assert_eq!(w.served, BTreeMap::from([(1, 32), (2, 32 + 8 * 1000)]));
    // From now on both are alike fast, and the rank's limit is what binds.
    w.queue.limits = limits(8, 32, 4, 8, 1);
    while !w.flying.is_empty() {
        w.end(0);
    }
    let before = w.served.clone();
    w.run(400);
    let since = |of: u64| w.served[&of] - before[&of];
    assert!(since(1) >= since(2) && since(1) - since(2) <= 32 + 16, "{} and {}", since(1), since(2));
}

/// A higher priority takes all that its engine's limit lets it; a lower one of that engine does not come between.
#[test]
fn a_higher_priority_goes_first() {
    let mut w = World::new(limits(8, 16, 9, 64, 9));
    w.want(1, 1, 80, 1, Some(1));
    w.want(2, 1, 80, 2, None);
    w.want(3, 2, 80, 1, None);
    w.run(6);
    assert_eq!(w.log[..4], [2, 2, 3, 3], "engine 2 has room that engine 1 has not");
    assert!(!w.log.contains(&1), "{:?}", w.log);
    w.run(40);
    assert!(w.left.is_empty());
}

/// What is larger than a limit goes alone, and doesn't wait for ever behind what is smaller.
#[test]
fn what_is_larger_than_a_limit_goes_alone() {
    let mut queue = Queue::new(limits(8, 16, 9, 16, 9));
    queue.push(key(1), wanted(1, 100));
    assert_eq!(queue.pick(), Some(key(1)));
    queue.posted(key(1), Some(Bytes::new(100)));
    queue.push(key(2), wanted(2, 1));
    assert_eq!(queue.pick(), None, "the rank's limit is passed by nobody");
    queue.ended(&peer(1), Bytes::new(100));
    assert_eq!(queue.pick(), Some(key(2)), "engine 2 has had less");
    queue.posted(key(2), Some(Bytes::new(1)));
    for _ in 0..100 {
        let next = queue.pick().unwrap();
        if next == key(1) {
            return;
        }
        queue.posted(next, Some(Bytes::new(1)));
        queue.ended(&peer(2), Bytes::new(1));
        if queue.in_flight() == Bytes::new(1) && queue.pick().is_none() {
            queue.ended(&peer(2), Bytes::new(1));
        }
    }
    panic!("it starves");
}

fn random_limits(rng: &mut Rng) -> Admission {
    let slice = 1 + rng.below(16);
    let peer_bytes = slice * (1 + rng.below(4));
    let ops = |rng: &mut Rng| u32::try_from(1 + rng.below(6)).unwrap();
    let (peer_ops, all) = (ops(rng), 1 + rng.below(5));
    limits(slice, peer_bytes, peer_ops, peer_bytes * all + rng.below(slice), ops(rng) * 4)
}

/// Whatever comes in whichever order: no limit is passed, the priorities are kept, a free rank is never idle, all is served.
#[test]
fn any_sequence_keeps_the_limits_and_serves_all() {
    let (mut held, mut removed) = (0, 0);
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let limits = random_limits(&mut rng);
        let mut w = World::new(limits);
        let mut priorities = BTreeMap::new();
        for id in 0..120 {
            match rng.below(7) {
                0..3 => {
                    let priority = u8::try_from(rng.below(3)).unwrap();
                    let deadline = (rng.below(2) == 0).then(|| rng.below(50));
                    let bytes = 1 + rng.below(100);
                    priorities.insert(key(id), priority);
                    w.want(id, rng.below(4), bytes, priority, deadline);
                }
                3 if !w.left.is_empty() => {
                    let at = usize::try_from(rng.below(w.left.len() as u64)).unwrap();
                    let gone = *w.left.keys().nth(at).unwrap();
                    w.left.remove(&gone);
                    w.queue.remove(gone);
                    removed += 1;
                }
                4.. if !w.flying.is_empty() => {
                    let at = usize::try_from(rng.below(w.flying.len() as u64)).unwrap();
                    w.end(at);
                }
                _ => {}
            }
            if rng.below(3) > 0 {
                let Some(next) = w.queue.pick() else {
                    assert!(w.left.is_empty() || !w.flying.is_empty(), "seed {seed}: it is idle");
                    held += usize::from(!w.left.is_empty());
                    continue;
                };
                // Those of a higher priority wait for their engine only.
                let flies = |of: u64| w.flying.iter().any(|(other, _)| *other == of);
                let passed = w.left.iter().any(|(k, (of, _))| priorities[k] > priorities[&next] && !flies(*of));
                assert!(!passed, "seed {seed}: a higher priority is passed");
                assert_eq!(w.queue.pick(), Some(next));
                w.post();
            }
            let mut load: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
            for &(of, bytes) in &w.flying {
                let l = load.entry(of).or_default();
                *l = (l.0 + bytes, l.1 + 1);
            }
            for (bytes, ops) in load.values() {
                assert!(*bytes <= limits.peer_bytes.get() && *ops <= limits.peer_ops, "seed {seed}");
            }
            let all = load.values().fold((0, 0), |a, l| (a.0 + l.0, a.1 + l.1));
            assert!(all.0 <= limits.bytes.get() && all.1 <= limits.ops, "seed {seed}");
            assert_eq!(w.queue.in_flight().get(), all.0);
            assert_eq!(w.queue.waiting.len(), w.left.len());
        }
        w.run(3000);
        assert!(w.left.is_empty(), "seed {seed}: {:?} wait for ever", w.left);
        assert!(w.queue.levels.is_empty() && w.queue.peers.is_empty() && w.queue.all == Load::default(), "seed {seed}");
    }
    assert!(held > 1000 && removed > 1000, "only {held} were held up, {removed} removed");
}

/// Of engines that keep waiting in one priority, no two have had more than two slices apart where the rank's limit is what they
/// share, and no more than a limit and a slice where their own limits count as well. (An engine whose slices are small does not fill its
/// own limit; so there, all are alike.)
#[test]
fn engines_that_wait_have_equal_shares() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let mut limits = random_limits(&mut rng);
        let shared = seed % 2 == 0;
        let slice = limits.slice.get();
        if shared {
            (limits.peer_bytes, limits.peer_ops) = (limits.bytes, limits.ops);
        }
        let bound = if shared { 2 * slice } else { limits.peer_bytes.get() + slice };
        let mut w = World::new(limits);
        let engines = 2 + rng.below(3);
        let mut id = 0;
        for _ in 0..2000 {
            for of in 0..engines {
                // Each always has at least one, some have many; of all sizes.
                while w.left.values().filter(|(other, _)| *other == of).count() as u64 <= of * 3 {
                    id += 1;
                    let deadline = (rng.below(2) == 0).then(|| rng.below(1000));
                    let bytes = if shared { 1 + rng.below(6 * slice) } else { slice * (1 + rng.below(6)) };
                    w.want(id, of, bytes, 100, deadline);
                }
            }
            if !w.post() {
                w.end(0);
            }
            let served = |of| w.served.get(&of).copied().unwrap_or(0);
            let (least, most) = ((0..engines).map(served).min().unwrap(), (0..engines).map(served).max().unwrap());
            assert!(most - least <= bound, "seed {seed}: {:?} are more than {bound} apart", w.served);
        }
        assert!(w.served.len() as u64 == engines);
    }
}
