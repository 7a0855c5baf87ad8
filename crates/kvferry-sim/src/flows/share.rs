//! Progressive filling of the flows that are connected with a change. Not the bookkeeping of time: that is its parent's.
//!
//! The connected flows and links are numbered as they are found, and what filling needs of them is put close together.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;

use super::{End, Flows, NEVER, index, nanos, small};

/// Where sharing came by.
#[derive(Debug, Default)]
pub(super) struct Mark {
    /// The last sharing that did.
    seen: u64,
    /// The number there.
    number: u32,
    /// Of a flow: whether links have a say. See [`Slot::shares`](super::Slot::shares).
    pub(super) shares: bool,
}

/// What is connected. The memory is used again.
#[derive(Debug, Default)]
pub(super) struct Work {
    sharing: u64,
    /// Slots of the flows, and what is known of each.
    flows: Vec<u32>,
    found: Vec<Found>,
    /// Uses of all flows, by number of the link.
    uses: Vec<(u32, f64)>,
    /// The links, and all their flows by number.
    fills: Vec<Fill>,
    members: Vec<u32>,
    levels: Vec<Level>,
    limits: Vec<Level>,
}

#[derive(Debug)]
struct Found {
    uses: Range<usize>,
    /// What it can have by its cap, and by the links that are not among the connecting ones.
    limit: f64,
    /// Below 0 while it isn't fixed.
    rate: f64,
}

#[derive(Debug)]
struct Fill {
    members: Range<usize>,
    /// Capacity that no fixed flow has.
    left: f64,
    /// Flows that are not fixed, and the sum of their weights.
    open: usize,
    weight: f64,
    /// That sum when it was last added up: subtracting loses digits, so it is added up again where it has become much smaller.
    added: f64,
}

/// A rate at which a link is full or a flow has all it can have: the smallest is the first.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Level {
    rate: f64,
    of: u32,
}

impl Eq for Level {}
impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Level {
    /// The heap gives the largest first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.rate.total_cmp(&self.rate).then(other.of.cmp(&self.of))
    }
}

impl Flows {
    /// Shares anew what is connected with what has changed.
    pub(super) fn share_dirty(&mut self) {
        if self.dirty_flows.is_empty() && self.dirty_links.is_empty() {
            return;
        }
        let mut work = std::mem::take(&mut self.work);
        work.sharing += 1;
        let (mut dirty_links, mut dirty_flows) =
            (std::mem::take(&mut self.dirty_links), std::mem::take(&mut self.dirty_flows));
        for link in dirty_links.drain(..) {
            self.links[index(link)].dirty = false;
            for at in 0..self.links[index(link)].flows.len() {
                self.share_with(self.links[index(link)].flows[at].0, &mut work);
            }
        }
        for slot in dirty_flows.drain(..) {
            self.slots[index(slot)].dirty = false;
            self.share_with(slot, &mut work);
        }
        (self.dirty_links, self.dirty_flows, self.work) = (dirty_links, dirty_flows, work);
        self.tidy_ends();
    }

    /// Shares anew what is connected with one flow, unless that has been done.
    fn share_with(&mut self, slot: u32, work: &mut Work) {
        if self.marks[index(slot)].seen == work.sharing || self.slots[index(slot)].id.is_none() {
            return;
        }
        self.connected(slot, work);
        self.shares += 1;
        self.shared += work.flows.len() as u64;
        if let [alone] = work.found.as_mut_slice() {
            alone.rate = alone.limit;
        } else {
            work.fill();
        }
        self.put_ends(work);
    }

    /// Finds the flows that are connected with one, and the links that connect them.
    fn connected(&mut self, slot: u32, work: &mut Work) {
        work.flows.clear();
        work.found.clear();
        work.uses.clear();
        work.fills.clear();
        work.members.clear();
        work.limits.clear();
        work.flows.push(slot);
        let mark = &mut self.marks[index(slot)];
        (mark.seen, mark.number) = (work.sharing, 0);
        while let Some(&slot) = work.flows.get(work.found.len()) {
            let s = &self.slots[index(slot)];
            let (first, mut limit) = (work.uses.len(), s.cap);
            for used in s.uses.iter().filter(|_| s.shares()) {
                let link = &mut self.links[index(used.link)];
                if !link.couples() {
                    let alone = link.capacity / used.weight;
                    limit = if alone < limit { alone } else { limit };
                    continue;
                }
                if link.mark.seen != work.sharing {
                    (link.mark.seen, link.mark.number) = (work.sharing, small(work.fills.len()));
                    let first = work.members.len();
                    for &(other, _) in &link.flows {
                        let mark = &mut self.marks[index(other)];
                        if !mark.shares {
                            continue;
                        }
                        if mark.seen != work.sharing {
                            (mark.seen, mark.number) = (work.sharing, small(work.flows.len()));
                            work.flows.push(other);
                        }
                        work.members.push(mark.number);
                    }
                    let members = first..work.members.len();
                    let open = members.len();
                    work.fills.push(Fill { members, left: link.capacity, open, weight: 0.0, added: 0.0 });
                }
                let fill = &mut work.fills[index(link.mark.number)];
                fill.weight += used.weight;
                fill.added = fill.weight;
                work.uses.push((link.mark.number, used.weight));
            }
            let uses = first..work.uses.len();
            if uses.is_empty() {
                limit = s.limit;
            } else if limit < f64::INFINITY {
                work.limits.push(Level { rate: limit, of: small(work.found.len()) });
            }
            work.found.push(Found { uses, limit, rate: -1.0 });
        }
    }

    /// Books what has moved at the old rates, and notes the first that will end at the new ones: by then all are shared anew.
    fn put_ends(&mut self, work: &Work) {
        let mut first = NEVER;
        for (&slot, found) in work.flows.iter().zip(&work.found) {
            let rate = found.rate.max(0.0);
            if self.slots[index(slot)].rate.to_bits() != rate.to_bits() {
                self.settle(slot);
                let s = &mut self.slots[index(slot)];
                s.rate = rate;
                s.end = end(self.now, s.left, rate);
            }
            first = first.min(self.slots[index(slot)].end);
        }
        if first == NEVER {
            return;
        }
        for &slot in &work.flows {
            let s = &self.slots[index(slot)];
            if let Some(id) = s.id.filter(|_| s.end == first) {
                self.ends.push(Reverse(End { at: first, id }));
            }
        }
    }
}

impl Work {
    /// Progressive filling. As flows are fixed at the level reached, the level at which a link is full can only rise: a link stays in
    /// the heap under an old level until it comes first.
    fn fill(&mut self) {
        let (mut levels, limits) = (std::mem::take(&mut self.levels), std::mem::take(&mut self.limits));
        levels.clear();
        levels.extend(self.fills.iter().zip(0..).map(|(f, of)| Level { rate: f.left / f.weight, of }));
        let (mut levels, mut limits) = (BinaryHeap::from(levels), BinaryHeap::from(limits));
        let (mut open, mut reached) = (self.found.len(), 0.0_f64);
        while open > 0 {
            let full = self.first_full(&mut levels, reached);
            let limit = loop {
                match limits.peek_mut() {
                    Some(limit) if self.found[index(limit.of)].rate >= 0.0 => PeekMut::pop(limit),
                    limit => break limit.map(|l| *l),
                };
            };
            match (full, limit) {
                (Some(full), limit) if limit.is_none_or(|l| l.rate > full.rate) => {
                    reached = full.rate;
                    levels.pop();
                    for at in self.fills[index(full.of)].members.clone() {
                        open -= usize::from(self.fix(self.members[at], reached));
                    }
                }
                (_, Some(limit)) => {
                    reached = reached.max(limit.rate);
                    limits.pop();
                    open -= usize::from(self.fix(limit.of, limit.rate));
                }
                // Every flow has a limit or goes over one of the links.
                (_, None) => break,
            }
        }
        (self.levels, self.limits) = (levels.into_vec(), limits.into_vec());
    }

    /// The link that is full first, under its level of now.
    fn first_full(&mut self, levels: &mut BinaryHeap<Level>, reached: f64) -> Option<Level> {
        loop {
            let mut first = levels.peek_mut()?;
            let fill = &mut self.fills[index(first.of)];
            if fill.open == 0 {
                PeekMut::pop(first);
                continue;
            }
            if fill.weight < fill.added / 1024.0 {
                let of_link = |&&(link, _): &&(u32, f64)| link == first.of;
                let open = self.members[fill.members.clone()].iter().filter_map(|&number| {
                    let found = &self.found[index(number)];
                    let used = self.uses[found.uses.clone()].iter().find(of_link);
                    used.filter(|_| found.rate < 0.0).map(|u| u.1)
                });
                fill.weight = open.sum();
                fill.added = fill.weight;
            }
            // Rounding may not take it below what flows that rose together have.
            let now = (fill.left / fill.weight).max(reached);
            if now <= first.rate {
                return Some(Level { rate: now, of: first.of });
            }
            first.rate = now;
        }
    }

    /// Fixes a flow's rate, and takes that from its links. False if it was fixed.
    fn fix(&mut self, number: u32, rate: f64) -> bool {
        let found = &mut self.found[index(number)];
        if found.rate >= 0.0 {
            return false;
        }
        found.rate = rate.min(found.limit);
        for &(link, weight) in &self.uses[found.uses.clone()] {
            let fill = &mut self.fills[index(link)];
            fill.open -= 1;
            fill.weight -= weight;
            fill.left = (fill.left - weight * found.rate).max(0.0);
        }
        true
    }
}

/// When so much is through at such a rate: the first nanosecond at which it is.
#[expect(clippy::cast_possible_truncation, reason = "not below 0; `as` saturates")]
fn end(now: u64, left: f64, rate: f64) -> u64 {
    if left <= 0.0 || rate == f64::INFINITY {
        return now;
    }
    let ns = (left * 1e9 / rate).ceil();
    // Also where the rate is 0, and where it is no number.
    if ns < nanos(NEVER) { now.saturating_add(ns as u64) } else { NEVER }
}
