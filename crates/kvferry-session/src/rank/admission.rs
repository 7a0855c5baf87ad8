//! Whose read or write is posted next, and whether it may be now.
//!
//! Each source of a request, and each destination of one, waits here with the size of its next slice. [`Queue::pick`] names the one to post: of the highest
//! priority that anything waits in; there, of the engine that has had the fewest bytes, so that engines that keep
//! waiting get equal shares; of that engine's requests by turns the one whose deadline comes first and the one that has had
//! the fewest bytes, so that a long request with an early deadline holds none up for longer than a few slices. A higher
//! priority always goes first and can starve a lower one; nothing starves among equals.
//!
//! What is in flight is bounded for each engine and for the rank, in bytes and operations. Who finds no room for the engine's
//! limit is passed by other engines, and by nobody of its own; who finds none for the rank's is passed by nobody: what is in flight ends,
//! and then it has its turn. What is larger than a limit goes when nothing else is in flight.
//!
//! It has no clock and posts nothing. Shares are counted in bytes posted (start-time fair queueing): an engine's or request's
//! *tag* is what it has had, on the scale of those that wait with it; who comes anew begins at the tag that is served.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RankId};
use kvferry_proto::names::EngineId;

use super::orders::Order;

/// How a rank's reads and writes are cut, and how much of them is in flight at most. None of it may be 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Admission {
    /// The most bytes of one operation. Smaller slices let others come between sooner, and cost more operations. Default 8 MiB.
    pub slice: Bytes,
    /// The most bytes in flight from and to one engine. Default 64 MiB.
    pub peer_bytes: Bytes,
    /// The most operations in flight from and to one engine. Default 64.
    pub peer_ops: u32,
    /// The most bytes in flight in all. Default 256 MiB.
    pub bytes: Bytes,
    /// The most operations in flight in all. Default 256.
    pub ops: u32,
}

impl Default for Admission {
    fn default() -> Self {
        let mib = |n: u64| Bytes::new(n << 20);
        Self { slice: mib(8), peer_bytes: mib(64), peer_ops: 64, bytes: mib(256), ops: 256 }
    }
}

/// An admission under which nothing could ever be read or written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the admission's `{limit}` is 0, so nothing could ever be read or written; let it be at least 1")]
#[non_exhaustive]
pub struct AdmissionRefused {
    /// The field.
    pub limit: &'static str,
}

impl Admission {
    /// Whether something can be read and written under it.
    ///
    /// # Errors
    /// The first field that is 0.
    pub fn check(&self) -> Result<(), AdmissionRefused> {
        let all = [
            ("slice", self.slice.get()),
            ("peer_bytes", self.peer_bytes.get()),
            ("peer_ops", self.peer_ops.into()),
            ("bytes", self.bytes.get()),
            ("ops", self.ops.into()),
        ];
        all.into_iter().find(|(_, n)| *n == 0).map_or(Ok(()), |(limit, _)| Err(AdmissionRefused { limit }))
    }

    /// Into what reads and writes are cut: no slice is larger than a limit.
    pub(super) fn cut(&self) -> Bytes {
        self.slice.min(self.peer_bytes).min(self.bytes)
    }
}

/// One source or destination of an order.
pub(super) type Key = (Order, RankId);

/// What waits: the slices of one source or destination, of which the next one's size is known.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) peer: EngineId,
    pub(super) priority: u8,
    /// When it is late.
    pub(super) deadline: Option<Duration>,
    /// Bytes of the next slice.
    pub(super) next: Bytes,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Queue {
    limits: Admission,
    /// The highest first; those in which something waits.
    levels: BTreeMap<Reverse<u8>, Level>,
    /// Everything that waits: in which level, of whom, and by which number.
    waiting: BTreeMap<Key, (Reverse<u8>, EngineId, u64)>,
    /// In flight, in all and by engine.
    all: Load,
    peers: BTreeMap<EngineId, Load>,
    arrivals: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Load {
    bytes: u64,
    ops: u64,
}

/// What waits in one priority.
#[derive(Debug, Default)]
struct Level {
    /// The largest tag that was served.
    now: u64,
    /// Boxed, so that a node of the tree is not too long for an allocator's quick lists.
    flows: BTreeMap<EngineId, Box<Flow>>,
    /// Those of which something waits, by tag.
    order: BTreeSet<(u64, EngineId)>,
    /// Those that have had more than others and left; they come back to where they were.
    idle: BTreeSet<(u64, EngineId)>,
}

/// What waits of one engine in one priority.
#[derive(Debug, Default)]
struct Flow {
    tag: u64,
    /// The largest tag of a request that was served in a turn of those that had the fewest bytes.
    now: u64,
    /// Whether the next turn is theirs.
    fair: bool,
    streams: BTreeMap<u64, Stream>,
    by_deadline: BTreeSet<(Duration, u64)>,
    by_tag: BTreeSet<(u64, u64)>,
}

#[derive(Debug)]
struct Stream {
    key: Key,
    deadline: Duration,
    tag: u64,
    next: u64,
}

impl Queue {
    pub(super) fn new(limits: Admission) -> Self {
        Self { limits, ..Self::default() }
    }

    /// What it was made with.
    pub(super) fn limits(&self) -> &Admission {
        &self.limits
    }

    /// Bytes in flight.
    pub(super) fn in_flight(&self) -> Bytes {
        Bytes::new(self.all.bytes)
    }

    /// Somebody's slices wait from now on. One that waits already is not taken twice.
    pub(super) fn push(&mut self, key: Key, wanted: Wanted) {
        if self.waiting.contains_key(&key) {
            return;
        }
        let (number, level) = (self.arrivals, Reverse(wanted.priority));
        self.arrivals += 1;
        self.waiting.insert(key, (level, wanted.peer.clone(), number));
        self.levels.entry(level).or_default().push(key, number, wanted);
    }

    /// Whose slice is to be posted now, if any may be. It stays so until something is posted, ends, comes or goes.
    pub(super) fn pick(&self) -> Option<Key> {
        // Not an engine's lower priorities either, or they might keep its room from the higher one for ever.
        let mut full: BTreeSet<&EngineId> = BTreeSet::new();
        for level in self.levels.values() {
            for (_, peer) in &level.order {
                let Some(stream) = level.flows.get(peer).and_then(|flow| flow.first()) else { continue };
                let load = self.peers.get(peer).copied().unwrap_or_default();
                if full.contains(peer) || !load.has_room(stream.next, self.limits.peer_bytes, self.limits.peer_ops) {
                    full.insert(peer);
                    continue;
                }
                let fits = self.all.has_room(stream.next, self.limits.bytes, self.limits.ops);
                return fits.then_some(stream.key);
            }
        }
        None
    }

    /// The next slice of this one was posted; the one after it has `next` bytes, or there is none.
    pub(super) fn posted(&mut self, key: Key, next: Option<Bytes>) {
        let Some((level, peer, number)) = self.waiting.get(&key) else { return };
        let Some(of_level) = self.levels.get_mut(level) else { return };
        let bytes = of_level.posted(peer, *number, self.limits.peer_bytes.get(), next);
        self.all.add(bytes);
        self.peers.entry(peer.clone()).or_default().add(bytes);
        if next.is_none() {
            self.remove(key);
        }
    }

    /// A slice of so many bytes is not in flight any more.
    pub(super) fn ended(&mut self, peer: &EngineId, bytes: Bytes) {
        self.all.take(bytes.get());
        if let Some(load) = self.peers.get_mut(peer) {
            load.take(bytes.get());
            if load.ops == 0 {
                self.peers.remove(peer);
            }
        }
    }

    /// Somebody's slices don't wait any more.
    pub(super) fn remove(&mut self, key: Key) {
        let Some((level, peer, number)) = self.waiting.remove(&key) else { return };
        if let Some(of_level) = self.levels.get_mut(&level) {
            of_level.remove(&peer, number);
            if of_level.order.is_empty() {
                self.levels.remove(&level);
            }
        }
    }

    /// Nor do those of all ranks of an order.
    pub(super) fn remove_order(&mut self, order: Order) {
        let all = (order, RankId::ZERO)..=(order, RankId::new(u32::MAX));
        while let Some((&key, _)) = self.waiting.range(all.clone()).next() {
            self.remove(key);
        }
    }
}

impl Load {
    fn has_room(self, next: u64, bytes: Bytes, ops: u32) -> bool {
        self.ops == 0 || (self.ops < u64::from(ops) && self.bytes.saturating_add(next) <= bytes.get())
    }

    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.ops += 1;
    }

    fn take(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.ops = self.ops.saturating_sub(1);
    }
}

impl Level {
    fn push(&mut self, key: Key, number: u64, wanted: Wanted) {
        let flow = self.flows.entry(wanted.peer.clone()).or_default();
        if flow.streams.is_empty() {
            self.idle.remove(&(flow.tag, wanted.peer.clone()));
            flow.tag = flow.tag.max(self.now);
            self.order.insert((flow.tag, wanted.peer));
        }
        let deadline = wanted.deadline.unwrap_or(Duration::MAX);
        flow.by_deadline.insert((deadline, number));
        flow.by_tag.insert((flow.now, number));
        flow.streams.insert(number, Stream { key, deadline, tag: flow.now, next: wanted.next.get() });
    }

    /// Counts what was posted; gives how many bytes it was.
    fn posted(&mut self, peer: &EngineId, number: u64, most_behind: u64, next: Option<Bytes>) -> u64 {
        let Some(flow) = self.flows.get_mut(peer) else { return 0 };
        let bytes = flow.posted(number, next);
        // Who was held up by its own limit makes up for no more than that.
        let from = flow.tag.max(self.now.saturating_sub(most_behind));
        self.order.remove(&(flow.tag, peer.clone()));
        flow.tag = from + bytes;
        self.order.insert((flow.tag, peer.clone()));
        self.now = self.now.max(from);
        // They would come back to where they come anew.
        while let Some((tag, _)) = self.idle.first()
            && *tag <= self.now
            && let Some((_, gone)) = self.idle.pop_first()
        {
            self.flows.remove(&gone);
        }
        bytes
    }

    fn remove(&mut self, peer: &EngineId, number: u64) {
        let Some(flow) = self.flows.get_mut(peer) else { return };
        flow.remove(number);
        if !flow.streams.is_empty() {
            return;
        }
        let at = (flow.tag, peer.clone());
        self.order.remove(&at);
        if flow.tag > self.now {
            self.idle.insert(at);
        } else {
            self.flows.remove(peer);
        }
    }
}

impl Flow {
    fn first(&self) -> Option<&Stream> {
        let number = if self.fair { self.by_tag.first()?.1 } else { self.by_deadline.first()?.1 };
        self.streams.get(&number)
    }

    fn posted(&mut self, number: u64, next: Option<Bytes>) -> u64 {
        let waiting = self.streams.len().max(1) as u64;
        let Some(stream) = self.streams.get_mut(&number) else { return 0 };
        let bytes = stream.next;
        self.by_tag.remove(&(stream.tag, number));
        if self.fair {
            self.now = self.now.max(stream.tag);
        }
        // Whoever comes anew begins where equal shares would have brought the others: so a long request is not passed for ever
        // by short ones that come one after the other.
        self.now += bytes / waiting;
        stream.tag += bytes;
        stream.next = next.map_or(0, Bytes::get);
        self.by_tag.insert((stream.tag, number));
        self.fair = !self.fair;
        bytes
    }

    fn remove(&mut self, number: u64) {
        if let Some(stream) = self.streams.remove(&number) {
            self.by_deadline.remove(&(stream.deadline, number));
            self.by_tag.remove(&(stream.tag, number));
        }
    }
}

#[cfg(test)]
mod tests;
