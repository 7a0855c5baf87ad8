//! How requests and leases end, what is looked at then, and what becomes of their blocks.

use std::collections::BTreeSet;
use std::time::Duration;

use kvferry_proto::names::LeaseId;
use kvferry_proto::rank::PullId;
use kvferry_session::{Delivered, Failed};

use super::{Happens, Want, World, wants};
use crate::engine::Blocks;
use crate::memory::Value;
use crate::places::Place;
use crate::rng::ms;
use crate::violation::Violation;

impl World {
    pub(crate) fn pull_ended(&mut self, engine: u32, pull: PullId, result: Result<Delivered, Failed>) {
        if let Some(writer) = self.engines.get_mut(engine as usize).and_then(|e| e.doomed.remove(&pull)) {
            let how = name(&result);
            // Where a rank is lost meanwhile, that is said first.
            if !["Overlap", "RankLost", "NotReady"].contains(&how.as_str()) {
                self.violates(Violation::LentTwice { engine, pull: writer.0, how: format!("request {pull}: {how}") });
            }
            return;
        }
        let Some(i) = self.engines.get_mut(engine as usize).and_then(|e| e.pulls.remove(&pull)) else {
            return self.violates(Violation::EndedTwice { engine, pull: pull.0 });
        };
        self.count(17, u64::from(engine), pull.0);
        let now = self.now;
        let last = self.last_moment(i);
        let Some(r) = self.script.requests.get_mut(i) else { return };
        r.ended = Some(now);
        let decode = r.plan.decode;
        if now > last {
            let waits = format!("ended as {}", name(&result));
            self.violates(Violation::Overdue { engine, pull: pull.0, late: now - last, waits });
        }
        match result {
            Ok(_) => {
                self.note(|_| format!("request {i}: delivered to e{engine}"));
                self.check_delivered(i);
                self.over(i, "delivered");
                self.put(decode, wants(i, Want::Decoded));
            }
            Err(failed) => {
                let how = name(&Err(failed.clone()));
                self.note(|_| {
                    format!("request {i}: failed at e{engine}: {}; {:?}", failed.cause, failed.report.faults)
                });
                if how == "Overlap" {
                    let error = failed.cause.to_string();
                    self.violates(Violation::StillLent { engine, error });
                }
                if let Some(hole) = failed.report.first_hole() {
                    self.check_in_place(i, pull, hole.get(), "where it failed");
                }
                self.over(i, &how);
                let Some(blocks) = self.script.requests.get_mut(i).and_then(|r| r.dst.take()) else { return };
                if failed.report.in_doubt.is_empty() && failed.report.writers_in_doubt.is_empty() {
                    self.absorb(i, &blocks);
                    self.back_to(engine, &blocks, "the end of its request");
                } else if let Some(e) = self.engines.get_mut(engine as usize) {
                    e.aside.insert(pull, blocks);
                }
            }
        }
    }

    /// Blocks that requests in doubt had left and that are the engine's again.
    pub(crate) fn look_aside(&mut self, engine: u32) {
        let now = self.now;
        let Some(e) = self.engines.get_mut(engine as usize).filter(|e| !e.aside.is_empty()) else { return };
        let shown = e.process.clock.shows(now);
        let Some(owner) = &e.owner else { return };
        let held: Vec<PullId> = owner.snapshot(shown).quarantine.iter().map(|q| q.pull).collect();
        let free: Vec<PullId> = e.aside.keys().filter(|pull| !held.contains(pull)).copied().collect();
        for pull in free {
            if let Some(blocks) = self.engines.get_mut(engine as usize).and_then(|e| e.aside.remove(&pull)) {
                self.note(|_| format!("e{engine}: pull {pull} leaves quarantine"));
                self.absorb_blocks(engine, &blocks);
                self.back_to(engine, &blocks, "the end of its quarantine");
            }
        }
    }

    pub(crate) fn lease_closed(&mut self, engine: u32, lease: LeaseId, how: &str) {
        let Some(i) = self.engines.get_mut(engine as usize).and_then(|e| e.leases.remove(&lease)) else {
            return self.violates(Violation::ClosedTwice { engine, lease: lease.to_string() });
        };
        self.count(18, u64::from(engine), i as u64);
        *self.stats.leases.entry(how.to_owned()).or_default() += 1;
        self.note(|_| format!("request {i}: e{engine} closes its lease: {how}"));
        let last = self.lease_end(i);
        if self.now > last {
            let late = self.now - last;
            self.violates(Violation::LeaseOverdue { engine, lease: lease.to_string(), late });
        }
        let by = if how == "Read" { "the end of its lease" } else { "the end of its lease, which was not read" };
        if how != "Read" {
            self.nobody_wants(engine, i);
        }
        if let Some(blocks) = self.script.requests.get_mut(i).and_then(|r| r.src.take()) {
            self.back_to(engine, &blocks, by);
        }
        for blocks in self.script.requests.get_mut(i).map(|r| std::mem::take(&mut r.extra)).unwrap_or_default() {
            self.back_to(engine, &blocks, by);
        }
    }

    /// The last moment of a lease, by the world's time: its own end, moved on by whoever reads it.
    fn lease_end(&self, i: usize) -> Duration {
        let Some(r) = self.script.requests.get(i) else { return Duration::MAX };
        let terms = self.config.lease;
        let ttl = r.ttl.or(terms.ttl).unwrap_or_default();
        // Those who share the lease count as well.
        let of_lease = self
            .script
            .requests
            .iter()
            .enumerate()
            .filter(|(at, x)| *at == i || x.of == Some(i) || x.replica == Some(i));
        let read = of_lease.filter(|(_, x)| x.pull.is_some()).map(|(_, x)| x.ended.unwrap_or(self.now)).max();
        let slept: Duration = self.engines.iter().map(|e| e.process.slept).sum();
        let extended = read.map_or(Duration::ZERO, |at| at + terms.extension);
        // What a consumer said last may still have been on its way: a partition holds it back.
        let cut: Duration = self.cut.values().max().copied().unwrap_or_default();
        let end = (r.offered + ttl).max(extended).max(cut.min(self.now) + terms.extension);
        end + (ttl + terms.extension) * 2 / 1000 + slept + self.config.latency.1 * 200 + ms(50)
    }

    /// What a delivered request has left: every byte of it, and no other.
    fn check_delivered(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        // Of a lease that is shared, the content is its own request's.
        let content = r.of.and_then(|of| self.script.requests.get(of)).unwrap_or(r).content;
        let (engine, n, cached) = (r.consumer, r.tokens, r.cached);
        let Some(blocks) = r.dst.clone() else { return };
        if !self.config.bytes {
            return;
        }
        // A rank may have begun anew since, and its owner not have heard of that: nobody will use what was delivered.
        let asked = r.asked;
        let ranks = self.engines.get(engine as usize).map_or(&[][..], |e| &e.ranks);
        if ranks.iter().any(|r| r.link.is_none() || r.memory.is_none() || r.since > asked) {
            return self.absorb(i, &blocks);
        }
        self.each_block(engine, &blocks, false, |needs, each, position, entry| {
            let token = position * each + entry;
            let (from, to) = needs(n);
            match each {
                0 => Value::Of { content, position: n },
                _ if from.max(cached) >= to => Value::Keep,
                _ if token >= n => Value::Zero,
                _ if token >= from.max(cached) => Value::Of { content, position: token },
                _ => Value::Keep,
            }
        });
        self.absorb_open(engine);
        self.check_memory(engine, &format!("request {i} was delivered"));
    }

    /// Where a session says that the first tokens of a request are in place, they are: all of one run of its prefill.
    pub(crate) fn check_in_place(&mut self, i: usize, pull: PullId, tokens: u64, how: &'static str) {
        let Some(r) = self.script.requests.get(i) else { return };
        let of = r.of.and_then(|of| self.script.requests.get(of)).unwrap_or(r);
        let contents: Vec<u64> = of.former.iter().copied().chain([of.content]).collect();
        let (engine, n, cached) = (r.consumer, r.tokens, r.cached);
        let Some(blocks) = r.dst.as_ref().filter(|_| self.config.bytes && tokens > cached) else { return };
        let Some(e) = self.engines.get(engine as usize) else { return };
        let of_blocks = e.block_tokens();
        let asked = r.asked;
        let holds = |content: &u64| {
            e.ranks.iter().filter(|r| r.link.is_some() && r.since <= asked).filter_map(|r| r.memory.as_ref()).all(
                |memory| {
                    memory.places.items.iter().enumerate().all(|(at, item)| {
                        let group = item.group as usize;
                        let (Some(list), Some(each)) = (blocks.get(group), of_blocks.get(group).copied()) else {
                            return true;
                        };
                        let from = item.needs(n).0.max(cached);
                        (0u64..).zip(list).filter(|_| each > 0).all(|(position, block)| {
                            memory.holds(at, *block, |entry| match position * each + entry {
                                token if (from..tokens).contains(&token) => {
                                    Value::Of { content: *content, position: token }
                                }
                                _ => Value::Keep,
                            })
                        })
                    })
                },
            )
        };
        if !contents.iter().any(holds) {
            self.violates(Violation::NotInPlace { engine, pull: pull.0, tokens, how });
        }
    }

    /// What requests in progress, and those in doubt, may have written is as it is.
    pub(crate) fn absorb_open(&mut self, engine: u32) {
        let Some(e) = self.engines.get(engine as usize) else { return };
        let open: Vec<usize> = e.pulls.values().copied().collect();
        let aside: Vec<Blocks> = e.aside.values().cloned().collect();
        for i in open {
            if let Some(blocks) = self.script.requests.get(i).and_then(|r| r.dst.clone()) {
                self.absorb(i, &blocks);
            }
        }
        for blocks in aside {
            self.absorb_blocks(engine, &blocks);
        }
    }

    /// What a request may have written is as it is; what was cached is as it was.
    fn absorb(&mut self, i: usize, blocks: &Blocks) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, n, cached) = (r.consumer, r.tokens, r.cached);
        self.each_block(engine, blocks, false, |needs, each, position, entry| {
            let (from, to) = needs(n);
            let writes = each == 0 || (from.max(cached) < to && position * each + entry >= from.max(cached));
            if writes { Value::AsIs } else { Value::Keep }
        });
    }

    fn absorb_blocks(&mut self, engine: u32, blocks: &Blocks) {
        self.each_block(engine, blocks, false, |_, _, _, _| Value::AsIs);
    }

    /// Compares all memory of an engine with what should be in it.
    pub(crate) fn check_memory(&mut self, engine: u32, after: &str) {
        if !self.config.bytes {
            return;
        }
        let Some(e) = self.engines.get(engine as usize) else { return };
        let mut compared = 0;
        let mut wrong = None;
        for (rank, memory) in (0u32..).zip(&e.ranks).filter_map(|(rank, r)| Some((rank, r.memory.as_ref()?))) {
            compared += memory.regions.iter().map(|r| r.len().get()).sum::<u64>();
            wrong = wrong.or_else(|| memory.check().map(|w| (rank, w)));
        }
        self.stats.compared += compared;
        if let Some((rank, w)) = wrong {
            self.violates(Violation::WrongBytes {
                engine,
                rank,
                region: w.region,
                offset: w.offset,
                place: w.place,
                expected: w.expected,
                got: w.got,
                count: w.count,
                after: after.to_owned(),
            });
        }
    }

    /// Blocks come back to their engine, and are used for other things at once.
    pub(crate) fn back_to(&mut self, engine: u32, blocks: &Blocks, by: &'static str) {
        self.check_untouched(engine, blocks, by);
        let places = places(blocks);
        for r in self.engines.get(engine as usize).map_or(&[][..], |e| &e.ranks) {
            self.fabric.belong(r.endpoint, &places);
        }
        let salt = self.rng.word();
        let bytes = self.config.bytes;
        let Some(e) = self.engines.get_mut(engine as usize) else { return };
        for memory in e.ranks.iter_mut().filter(|_| bytes).filter_map(|r| r.memory.as_mut()) {
            for (group, list) in (0u32..).zip(blocks) {
                for block in list {
                    memory.scribble((group, *block), salt);
                }
            }
        }
        e.give(blocks);
    }

    /// Blocks are taken out: nobody may touch them.
    pub(crate) fn taken(&mut self, engine: u32, blocks: &Blocks) {
        self.check_untouched(engine, blocks, "its own hand");
    }

    /// A lease of an engine has ended unread: nothing that its ranks write for it will be delivered, nor what one that was in doubt
    /// posts later. So that doesn't keep the blocks that it is sent from, as long as those that it is written to are lent to the
    /// request that it was for. What is sent for leases that are open, or were read, counts.
    fn nobody_wants(&self, engine: u32, lease: usize) {
        let Some(e) = self.engines.get(engine as usize) else { return };
        let of_lease =
            |(at, r): &(usize, &super::Request)| *at == lease || r.of == Some(lease) || r.replica == Some(lease);
        for (_, r) in self.script.requests.iter().enumerate().filter(of_lease) {
            let Some(to) = self.engines.get(r.consumer as usize).filter(|_| r.lives.1 == self.life(r.consumer)) else {
                continue;
            };
            let open = r.dst.as_ref().filter(|_| r.pull.is_some() && r.ended.is_none());
            let Some(blocks) = open.or_else(|| to.aside.get(&r.pull?)) else { continue };
            let places = places(blocks);
            for (from, to) in e.ranks.iter().flat_map(|from| to.ranks.iter().map(move |to| (from, to))) {
                self.fabric.send_for_nothing(from.endpoint, to.endpoint, &places);
            }
        }
    }

    fn check_untouched(&mut self, engine: u32, blocks: &Blocks, by: &'static str) {
        let Some(e) = self.engines.get(engine as usize) else { return };
        // The memory of a rank that the owner has lost is nobody's: its next life has other memory.
        let stands = |r: &crate::engine::Rank<Happens>| r.session.is_some() && r.link.is_some();
        let ends = (0u32..).zip(&e.ranks).filter(|(_, r)| stands(r)).map(|(rank, r)| (rank, r.endpoint));
        let ends: Vec<_> = ends.collect();
        for (rank, endpoint) in ends {
            for (group, list) in (0u32..).zip(blocks) {
                for block in list {
                    let place = (group, *block);
                    let touch = self.fabric.touching(endpoint, place);
                    if touch.writers > 0 || touch.senders > 0 {
                        let (writers, senders) = (touch.writers, touch.senders);
                        let by_whom = self.fabric.touched_by(endpoint, place);
                        self.note(|_| format!("e{engine} rank {rank} {place:?} is touched by {by_whom:?}"));
                        return self.violates(Violation::GivenBackInUse { engine, rank, place, by, writers, senders });
                    }
                }
            }
        }
    }

    /// An engine of a request was killed.
    pub(crate) fn engine_lost(&mut self, i: usize, engine: u32) {
        let Some(r) = self.script.requests.get_mut(i) else { return };
        if r.consumer == engine && r.pull.is_some() && r.ended.is_none() {
            r.dst = None;
            self.over(i, "consumer lost");
        } else if r.producer == engine {
            r.src = None;
            r.extra.clear();
            if r.pull.is_none() && r.fence.is_none() {
                self.over(i, "producer lost");
            }
        }
    }

    /// A rank's bytes are gone: what had been delivered to its engine is of no use, nor what it has computed and not offered.
    pub(crate) fn rank_lost(&mut self, engine: u32) {
        let life = self.life(engine);
        let kept = |r: &super::Request| {
            r.consumer == engine && r.lives.1 == life && r.dst.is_some() && r.outcome.as_deref() == Some("delivered")
        };
        let computed =
            |r: &super::Request| r.producer == engine && r.lives.0 == life && r.src.is_some() && r.fence.is_none();
        let all = || self.script.requests.iter().enumerate();
        let kept: Vec<usize> = all().filter(|(_, r)| kept(r)).map(|(i, _)| i).collect();
        let computed: Vec<usize> = all().filter(|(_, r)| computed(r)).map(|(i, _)| i).collect();
        for i in kept {
            if let Some(blocks) = self.script.requests.get_mut(i).and_then(|r| r.dst.take()) {
                self.back_to(engine, &blocks, "the loss of a rank");
            }
        }
        for i in computed {
            if let Some(blocks) = self.script.requests.get_mut(i).and_then(|r| r.src.take()) {
                self.back_to(engine, &blocks, "the loss of a rank");
            }
            self.over(i, "producer lost");
        }
    }

    /// The moment has come by which a request must have ended.
    pub(crate) fn overdue(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i).filter(|r| r.ended.is_none()) else { return };
        let (engine, life, pull) = (r.consumer, r.lives.1, r.pull);
        if life != self.life(engine) {
            return;
        }
        let last = self.last_moment(i);
        let asleep = self.engines.get(engine as usize).is_some_and(|e| e.process.paused.is_some());
        if asleep || self.now <= last {
            let at = last.max(self.now) + ms(1);
            return self.queue.put(at, wants(i, Want::Overdue));
        }
        let Some(pull) = pull else { return };
        let now = self.now;
        let mut waits = String::new();
        self.with_owner(engine, |owner, shown| {
            let shown = owner.snapshot(shown);
            waits = shown.pulls.iter().find(|p| p.pull == pull).map_or("nothing", |p| p.waiting_for).to_owned();
        });
        self.violates(Violation::Overdue { engine, pull: pull.0, late: now - last, waits });
    }
}

fn places(blocks: &Blocks) -> BTreeSet<Place> {
    (0u32..).zip(blocks).flat_map(|(group, list)| list.iter().map(move |block| (group, *block))).collect()
}

/// How a request ended, in a word.
fn name(result: &Result<Delivered, Failed>) -> String {
    match result {
        Ok(_) => "delivered".into(),
        Err(failed) => {
            let text = format!("{:?}", failed.cause);
            text.chars().take_while(|c| c.is_alphanumeric()).collect()
        }
    }
}
