//! Bytes that flow over shared links: who goes how fast, and when each is through.
//!
//! Every flow has a size, a cap on its rate, and links it goes over, each with a weight: units of the link per byte of the flow
//! (1 where the link carries the bytes; descriptors per byte where it is an engine that works through descriptors). Rates are
//! *max-min fair* per flow, with the weights only in the links' sums: `sum of weight(f, l) * rate(f) <= capacity(l)` on every link,
//! and no flow's rate can be raised but by lowering that of one that has no more. They are found by progressive filling
//! (D. Bertsekas, R. Gallager, *Data Networks*, 2nd edition, 1992, 6.5.2, <https://web.mit.edu/dimitrib/www/datanets.html>): all
//! rates rise together from 0; what reaches its cap stops, and where a link is full all that goes over it stops.
//!
//! Only what is connected with a change is shared anew, and once for all that changes at one instant. Two flows are connected
//! where they go over one link *that could be full*: a link that carries all its flows at the most that each could ever have (by
//! its cap, and by each of its links alone) limits none of them, and what happens on one side of it is nothing to the other.
//! A flow's progress is kept as rate, time and rest, so that what isn't touched costs nothing.
//!
//! It is a model of sharing, not of packets: rates change at once, no byte is lost or waits, and the latency of a route is the
//! caller's to add. All is arithmetic of `f64` in a fixed order: the same calls give the same answers.
//!
//! ```
//! use std::time::Duration;
//! use kvferry_sim::flows::{Flow, Flows};
//!
//! let mut flows = Flows::new(vec![3e9]);
//! let long = flows.begin(Duration::ZERO, Flow { size: 3e9, uses: vec![(0, 1.0)], cap: f64::INFINITY });
//! let slow = flows.begin(Duration::ZERO, Flow { size: 1e9, uses: vec![(0, 1.0)], cap: 1e9 });
//! assert_eq!((flows.rate(long), flows.rate(slow)), (Some(2e9), Some(1e9)));
//! assert_eq!(flows.next(), Some(Duration::from_secs(1)));
//! assert_eq!(flows.advance(Duration::from_secs(1)), [slow]);
//! assert_eq!(flows.rate(long), Some(3e9));
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

mod share;
#[cfg(test)]
mod tests;

/// Bytes to be moved.
#[derive(Clone, PartialEq, Debug)]
pub struct Flow {
    /// Bytes. What isn't above 0 is through at once.
    pub size: f64,
    /// The links it goes over, each with the link's units per byte. A weight that isn't above 0 uses nothing; a link named twice
    /// is used twice; one there is none of has capacity 0.
    pub uses: Vec<(u32, f64)>,
    /// At most so many bytes per second; infinite where only the links limit it. 0, or what is no number, keeps it from moving.
    pub cap: f64,
}

/// Names a flow of one [`Flows`]. They are in order of their beginning.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FlowId {
    number: u64,
    slot: u32,
}

impl FlowId {
    /// The how-manieth flow it is, from 0.
    #[must_use]
    pub fn number(self) -> u64 {
        self.number
    }
}

/// Links and what flows over them. See the module's text.
///
/// Time never goes back: an earlier `now` than the latest counts as that one.
#[derive(Debug, Default)]
pub struct Flows {
    now: u64,
    begun: u64,
    live: usize,
    links: Vec<Link>,
    slots: Vec<Slot>,
    /// Of each slot. Apart, since sharing looks at them most.
    marks: Vec<share::Mark>,
    free: Vec<u32>,
    /// What ends when, of every connected set at least the flows that end first. An entry is out of date unless its flow still
    /// ends then; one that is not is true, whoever put it in.
    ends: BinaryHeap<Reverse<End>>,
    /// Ended, and not told yet.
    ended: Vec<FlowId>,
    dirty_links: Vec<u32>,
    dirty_flows: Vec<u32>,
    shares: u64,
    shared: u64,
    work: share::Work,
}

/// Order of end, then of beginning.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct End {
    at: u64,
    id: FlowId,
}

/// A time that never comes.
const NEVER: u64 = u64::MAX;

/// A link's whole capacity, in the units of [`Link::demand`]. A share is rounded up, so what is taken away is what was put in.
const WHOLE: u64 = 1 << 32;

#[derive(Debug)]
struct Link {
    capacity: f64,
    /// What its flows would take at the most that each could have, in parts of the capacity.
    demand: u64,
    /// Its flows: the slot, and the how-manieth of the flow's uses this is.
    flows: Vec<(u32, u32)>,
    /// Units carried by flows, up to when each was last settled.
    carried: f64,
    dirty: bool,
    mark: share::Mark,
}

impl Link {
    /// Whether its flows could fill it, so that they have to share.
    fn couples(&self) -> bool {
        self.demand > WHOLE
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Use {
    link: u32,
    /// Where in the link's list of flows.
    at: u32,
    weight: f64,
}

/// A flow's uses: few lie in the slot itself.
#[derive(Debug, Default)]
struct Uses {
    len: usize,
    few: [Use; 4],
    all: Vec<Use>,
}

impl Uses {
    fn push(&mut self, used: Use) {
        if let Some(room) = self.few.get_mut(self.len) {
            *room = used;
        } else {
            if self.len == self.few.len() {
                self.all.extend_from_slice(&self.few);
            }
            self.all.push(used);
        }
        self.len += 1;
    }
}

impl Deref for Uses {
    type Target = [Use];

    fn deref(&self) -> &[Use] {
        if self.len <= self.few.len() { &self.few[..self.len] } else { &self.all }
    }
}

impl DerefMut for Uses {
    fn deref_mut(&mut self) -> &mut [Use] {
        if self.len <= self.few.len() { &mut self.few[..self.len] } else { &mut self.all }
    }
}

#[derive(Debug)]
struct Slot {
    /// `None` in a slot that is free.
    id: Option<FlowId>,
    uses: Uses,
    cap: f64,
    /// The most it could ever have: the least of its cap and of each of its links alone.
    limit: f64,
    rate: f64,
    left: f64,
    /// When `left` was right.
    since: u64,
    end: u64,
    dirty: bool,
}

impl Slot {
    /// Whether links have a say: what can't move, or is limited by nothing, takes no part in sharing.
    fn shares(&self) -> bool {
        self.limit > 0.0 && self.limit < f64::INFINITY
    }

    /// Bytes moved since it was settled.
    fn moved(&self, now: u64) -> f64 {
        if self.rate <= 0.0 {
            return 0.0;
        }
        if self.rate == f64::INFINITY {
            return self.left;
        }
        (self.rate * nanos(now.saturating_sub(self.since)) / 1e9).min(self.left)
    }

    /// Its share of a link, at most the whole.
    #[expect(clippy::cast_possible_truncation, reason = "from 0 to the whole; `as` saturates, and takes NaN as 0")]
    fn share(&self, weight: f64, capacity: f64) -> u64 {
        if !self.shares() {
            return 0;
        }
        ((weight * self.limit / capacity * WHOLE as f64).ceil() as u64).min(WHOLE)
    }
}

/// As a number to reckon with. Exact up to 104 days.
fn nanos(ns: u64) -> f64 {
    ns as f64
}

fn to_nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn index(n: u32) -> usize {
    n as usize
}

fn small(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// What is not above 0, and what is no number, is 0.
fn positive(x: f64) -> f64 {
    if x > 0.0 { x } else { 0.0 }
}

impl Flows {
    /// Links of these capacities, in units per second; nothing flows.
    #[must_use]
    pub fn new(capacities: Vec<f64>) -> Self {
        let link = |capacity: f64| Link {
            capacity: positive(capacity),
            demand: 0,
            flows: Vec::new(),
            carried: 0.0,
            dirty: false,
            mark: share::Mark::default(),
        };
        Self { links: capacities.into_iter().map(link).collect(), ..Self::default() }
    }

    /// A flow begins. One of size 0, or that nothing limits, ends at the same instant.
    pub fn begin(&mut self, now: Duration, flow: Flow) -> FlowId {
        self.go_to(to_nanos(now));
        let number = self.begun;
        self.begun += 1;
        self.live += 1;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.marks.push(share::Mark::default());
            small(self.slots.len() - 1)
        });
        let id = FlowId { number, slot };
        let (now, left, cap) = (self.now, positive(flow.size), positive(flow.cap));
        let s = &mut self.slots[index(slot)];
        *s = Slot { id: Some(id), cap, left, since: now, ..Slot::default() };
        let mut nowhere = false;
        for (link, weight) in flow.uses.into_iter().filter(|(_, weight)| *weight > 0.0) {
            nowhere |= index(link) >= self.links.len();
            match s.uses.iter_mut().find(|u| u.link == link) {
                Some(there) => there.weight += weight,
                None => s.uses.push(Use { link, at: 0, weight }),
            }
        }
        if nowhere {
            (s.cap, s.uses) = (0.0, Uses::default());
        }
        for (nth, used) in s.uses.iter_mut().enumerate() {
            let on = &mut self.links[index(used.link)].flows;
            used.at = small(on.len());
            on.push((slot, small(nth)));
        }
        self.put_demand(slot);
        let s = &mut self.slots[index(slot)];
        if s.left <= 0.0 || s.limit == f64::INFINITY {
            s.end = now;
            self.ends.push(Reverse(End { at: now, id }));
        }
        self.touch_flow(slot);
        id
    }

    /// A flow is given up: the bytes it has left, or `None` if it has ended (then [`advance`](Self::advance) tells, or has told) or
    /// never was.
    pub fn stop(&mut self, now: Duration, id: FlowId) -> Option<f64> {
        self.go_to(to_nanos(now));
        self.find(id)?;
        self.settle(id.slot);
        let left = self.slots[index(id.slot)].left;
        self.remove(id.slot);
        Some(left)
    }

    /// A link is faster or slower from now on; at 0 it is broken, and what goes over it waits. No-op for a link there is none of.
    pub fn set_capacity(&mut self, now: Duration, link: u32, capacity: f64) {
        self.go_to(to_nanos(now));
        let Some(l) = self.links.get(index(link)) else {
            return;
        };
        let slots: Vec<u32> = l.flows.iter().map(|f| f.0).collect();
        for &slot in &slots {
            self.touch_flow(slot);
            self.take_demand(slot);
        }
        self.links[index(link)].capacity = positive(capacity);
        for &slot in &slots {
            self.put_demand(slot);
        }
    }

    /// When the next flow ends, if none begins or is stopped till then; `None` if none will. Shares anew what has changed.
    #[expect(clippy::should_implement_trait, reason = "it takes nothing out: the same is said until time goes on")]
    pub fn next(&mut self) -> Option<Duration> {
        if !self.ended.is_empty() {
            return Some(Duration::from_nanos(self.now));
        }
        self.share_dirty();
        self.first_end().map(|end| Duration::from_nanos(end.at))
    }

    /// Time goes on. Gives what has ended by then, in order of end, at one instant in order of beginning.
    pub fn advance(&mut self, now: Duration) -> Vec<FlowId> {
        self.go_to(to_nanos(now));
        std::mem::take(&mut self.ended)
    }

    /// Units a link has carried by now, to the rounding of the additions: a flow that has ended has carried its size, times the
    /// weight. Takes as long as there are flows on the link. 0 for a link there is none of.
    #[must_use]
    pub fn carried(&self, link: u32) -> f64 {
        let Some(l) = self.links.get(index(link)) else {
            return 0.0;
        };
        let under_way = l.flows.iter().map(|&(slot, nth)| {
            let s = &self.slots[index(slot)];
            let moved = s.moved(self.now);
            if moved > 0.0 { moved * s.uses[index(nth)].weight } else { 0.0 }
        });
        l.carried + under_way.sum::<f64>()
    }

    /// How often connected flows were shared anew, and how many flows there were in all these.
    #[must_use]
    pub fn shares(&self) -> (u64, u64) {
        (self.shares, self.shared)
    }

    /// Bytes per second of a flow from now on. Shares anew what has changed.
    pub fn rate(&mut self, id: FlowId) -> Option<f64> {
        self.share_dirty();
        self.find(id).map(|s| s.rate)
    }

    /// Bytes a flow has left now.
    #[must_use]
    pub fn left(&self, id: FlowId) -> Option<f64> {
        self.find(id).map(|s| s.left - s.moved(self.now))
    }

    /// Units per second a link has; 0 for one there is none of.
    #[must_use]
    pub fn capacity(&self, link: u32) -> f64 {
        self.links.get(index(link)).map_or(0.0, |l| l.capacity)
    }

    /// How many flow.
    #[must_use]
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether nothing flows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    fn find(&self, id: FlowId) -> Option<&Slot> {
        self.slots.get(index(id.slot)).filter(|s| s.id == Some(id))
    }

    /// Ends what ends by then, in its order. What has changed is shared before time goes on, and only then.
    fn go_to(&mut self, now: u64) {
        loop {
            if self.now < now {
                self.share_dirty();
            }
            match self.first_end() {
                Some(end) if end.at <= now.max(self.now) => {
                    self.now = self.now.max(end.at);
                    self.settle(end.id.slot);
                    self.remove(end.id.slot);
                    self.ended.push(end.id);
                }
                _ => break,
            }
        }
        self.now = self.now.max(now);
    }

    fn first_end(&mut self) -> Option<End> {
        while let Some(Reverse(end)) = self.ends.peek().copied() {
            if self.find(end.id).is_some_and(|s| s.end == end.at) {
                return Some(end);
            }
            self.ends.pop();
        }
        None
    }

    /// Forgets entries that are out of date, so that there are never many more than flows.
    fn tidy_ends(&mut self) {
        if self.ends.len() > 64 + 4 * self.live {
            let mut ends = std::mem::take(&mut self.ends).into_vec();
            ends.retain(|Reverse(end)| self.find(end.id).is_some_and(|s| s.end == end.at));
            ends.sort_unstable();
            ends.dedup();
            self.ends = BinaryHeap::from(ends);
        }
    }

    /// Books what a flow has moved. At its end that is all it had left.
    fn settle(&mut self, slot: u32) {
        let s = &mut self.slots[index(slot)];
        let moved = if s.end <= self.now { s.left } else { s.moved(self.now) };
        s.since = self.now;
        if moved > 0.0 {
            s.left = if moved < s.left { s.left - moved } else { 0.0 };
            for used in s.uses.iter() {
                self.links[index(used.link)].carried += used.weight * moved;
            }
        }
    }

    fn remove(&mut self, slot: u32) {
        self.take_demand(slot);
        let s = &mut self.slots[index(slot)];
        (s.id, s.rate, s.end) = (None, 0.0, NEVER);
        let uses = std::mem::take(&mut s.uses);
        for used in uses.iter() {
            let on = &mut self.links[index(used.link)].flows;
            on.swap_remove(index(used.at));
            if let Some(&(moved, nth)) = on.get(index(used.at)) {
                self.slots[index(moved)].uses[index(nth)].at = used.at;
            }
        }
        self.free.push(slot);
        self.live -= 1;
    }

    /// Finds a flow's limit, and asks for as much on all its links.
    fn put_demand(&mut self, slot: u32) {
        let s = &mut self.slots[index(slot)];
        let alone = s.uses.iter().map(|used| self.links[index(used.link)].capacity / used.weight);
        s.limit = alone.fold(s.cap, |a, b| if b < a { b } else { a });
        self.marks[index(slot)].shares = s.shares();
        for used in s.uses.iter() {
            let link = &mut self.links[index(used.link)];
            link.demand += s.share(used.weight, link.capacity);
            touch_link(link, used.link, &mut self.dirty_links);
        }
    }

    /// Takes back what [`put_demand`](Self::put_demand) asked for.
    fn take_demand(&mut self, slot: u32) {
        let s = &self.slots[index(slot)];
        for used in s.uses.iter() {
            let link = &mut self.links[index(used.link)];
            touch_link(link, used.link, &mut self.dirty_links);
            link.demand -= s.share(used.weight, link.capacity);
        }
    }

    fn touch_flow(&mut self, slot: u32) {
        let s = &mut self.slots[index(slot)];
        if !s.dirty {
            s.dirty = true;
            self.dirty_flows.push(slot);
        }
    }
}

/// What goes over a link is to be shared anew, if it is shared: asked before flows are taken off and after some are put on.
fn touch_link(link: &mut Link, number: u32, dirty: &mut Vec<u32>) {
    if link.couples() && !link.dirty {
        link.dirty = true;
        dirty.push(number);
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            id: None,
            uses: Uses::default(),
            cap: 0.0,
            limit: 0.0,
            rate: 0.0,
            left: 0.0,
            since: 0,
            end: NEVER,
            dirty: false,
        }
    }
}
