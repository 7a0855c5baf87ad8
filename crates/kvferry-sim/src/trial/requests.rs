//! What the engines do with their blocks: prefill, offer, read, decode, give back.

use std::time::Duration;

use kvferry_geometry::units::Tokens;
use kvferry_proto::lease::Offer;
use kvferry_proto::names::{Attempt, Fence};
use kvferry_proto::rank::{Assurance, PullId};
use kvferry_session::Ttl;
use kvferry_session::owner::{FailurePolicy, Mode, OfferError, PhaseLimits, PullWish, Remedy, Source};

use super::{Request, Want, World, key, wants};
use crate::engine::Blocks;
use crate::faults::FaultKind;
use crate::memory::Value;
use crate::plan::RequestPlan;
use crate::rng::{hash, ms, us};
use crate::violation::Violation;

/// How often a request looks for room, and how long it waits in between.
const WAITS: u32 = 40;
const WAIT: Duration = ms(25);
/// How often a request is made anew.
const TRIES: u32 = 3;

impl World {
    pub(crate) fn plan_requests(&mut self) {
        for (number, plan) in (0u32..).zip(self.config.requests.clone()) {
            if self.config.mask.makes(number) {
                let at = plan.at;
                let i = self.make(number, plan, 0);
                self.queue.put(at, wants(i, Want::Arrive));
            }
        }
    }

    fn make(&mut self, number: u32, plan: RequestPlan, tries: u32) -> usize {
        let content =
            hash(&[self.config.seed, 0xc0, u64::from(number), u64::from(tries), self.script.requests.len() as u64]);
        let (producer, consumer, tokens, cached) = (plan.producer, plan.consumer, plan.tokens, plan.cached);
        let (deadline, ttl) = (plan.deadline, plan.ttl);
        self.script.requests.push(Request {
            plan,
            number,
            producer,
            consumer,
            lives: (0, 0),
            content,
            prompt: content,
            former: Vec::new(),
            extra: Vec::new(),
            replica: None,
            silent: false,
            run: Attempt::FIRST,
            computed: false,
            tokens,
            cached,
            src: None,
            dst: None,
            fence: None,
            offered: Duration::ZERO,
            ttl,
            pull: None,
            asked: Duration::ZERO,
            deadline,
            ended: None,
            outcome: None,
            waits: 0,
            tries,
            of: None,
            back: false,
        });
        self.script.requests.len() - 1
    }

    pub(crate) fn request(&mut self, i: usize, want: Want) {
        let number = match want {
            Want::Step(step) => 100 + u64::from(step),
            Want::Arrive => 0,
            Want::Offer => 1,
            Want::Ask => 2,
            Want::Cancel => 3,
            Want::Withdraw => 4,
            Want::Decline => 5,
            Want::Decoded => 6,
            Want::Overdue => 7,
        };
        self.count(16, i as u64, number);
        match want {
            Want::Arrive => self.arrive(i),
            Want::Offer => self.offer(i),
            Want::Ask => self.ask(i),
            Want::Cancel => self.cancel(i),
            Want::Withdraw => self.withdraw(i),
            Want::Decline => self.decline(i),
            Want::Step(step) => self.prefill_step(i, step),
            Want::Decoded => self.decoded(i),
            Want::Overdue => self.overdue(i),
        }
    }

    /// A request is over for whoever counts requests.
    pub(crate) fn over(&mut self, i: usize, how: &str) {
        let Some(r) = self.script.requests.get_mut(i).filter(|r| r.outcome.is_none()) else { return };
        r.outcome = Some(how.to_owned());
        self.stats.outcome(how);
        let now = self.now;
        self.note(|_| format!("request {i} is over: {how}"));
        let Some(r) = self.script.requests.get_mut(i) else { return };
        r.ended.get_or_insert(now);
        let own = r.of.is_none() && !r.back && !r.silent;
        let again = how != "delivered" && r.plan.again && r.tries + 1 < TRIES && own;
        if again && !self.healed {
            let (number, plan, tries) = (r.number, RequestPlan { wrong: Vec::new(), ..r.plan.clone() }, r.tries + 1);
            let next = self.make(number, plan, tries);
            self.put(ms(20), wants(next, Want::Arrive));
        }
    }

    /// Waits for room; false where it has waited long enough.
    fn waits(&mut self, i: usize, want: Want) -> bool {
        let Some(r) = self.script.requests.get_mut(i) else { return false };
        r.waits += 1;
        let more = r.waits < WAITS;
        if more {
            self.put(WAIT, wants(i, want));
        }
        more
    }

    /// The prompt arrives: blocks are taken out and, when the prefill is done, offered.
    fn arrive(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, tokens, prefill) = (r.producer, r.tokens, r.plan.prefill);
        let blocks = match self.is_up(engine) {
            true => self.engines.get_mut(engine as usize).and_then(|e| e.take(&e.wants(tokens))),
            false => None,
        };
        let Some(blocks) = blocks else {
            if !self.waits(i, Want::Arrive) {
                self.over(i, "no room at the producer");
            }
            return;
        };
        self.taken(engine, &blocks);
        let life = self.life(engine);
        self.replicate(i);
        let Some(r) = self.script.requests.get_mut(i) else { return };
        let content = r.content;
        (r.src, r.lives.0, r.waits) = (Some(blocks.clone()), life, 0);
        if r.plan.stream.is_some() {
            return self.announce(i);
        }
        r.computed = true;
        self.fill(engine, &blocks, content, 0, tokens);
        self.note(|_| format!("request {i}: e{engine} computes {tokens} tokens in {blocks:?}"));
        self.put(prefill, wants(i, Want::Offer));
    }

    /// Another engine computes the same, for whoever can't have it from the first.
    fn replicate(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (plan, number, content) = (r.plan.clone(), r.number, r.content);
        let Some(other) = plan.replica.filter(|_| !r.silent && r.replica.is_none()) else { return };
        let plan = RequestPlan { producer: other, replica: None, wrong: Vec::new(), again: false, ..plan };
        let replica = self.make(number, plan, 0);
        if let Some(r) = self.script.requests.get_mut(replica) {
            (r.content, r.prompt, r.silent) = (content, content, true);
        }
        if let Some(r) = self.script.requests.get_mut(i) {
            r.replica = Some(replica);
        }
        self.put(us(1), wants(replica, Want::Arrive));
    }

    fn offer(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, tokens, prompt, ttl) = (r.producer, r.tokens, r.prompt, r.ttl);
        let Some(blocks) = r.src.clone() else { return };
        if r.lives.0 != self.life(engine) {
            return self.over(i, "producer lost");
        }
        let groups = self.src_groups(engine, &blocks, tokens, tokens, true);
        let lease = self.lease_id();
        let offer = Offer { groups, content_key: key(prompt) };
        let terms = ttl.map_or(Ttl::Usual, Ttl::For);
        let mut result = None;
        self.with_owner(engine, |owner, now| result = Some(owner.offer(lease, offer, terms, now)));
        match result {
            Some(Ok(fence)) => self.offered(i, fence),
            Some(Err(error @ (OfferError::Overlap(_) | OfferError::Repeated { .. }))) => {
                self.violates(Violation::StillLent { engine, error: error.to_string() });
            }
            Some(Err(_)) => {
                self.back_to(engine, &blocks, "the offer's refusal");
                if let Some(r) = self.script.requests.get_mut(i) {
                    r.src = None;
                }
                self.over(i, "not offered");
            }
            None => self.over(i, "producer lost"),
        }
        self.pump_owner(engine);
    }

    pub(crate) fn offered(&mut self, i: usize, fence: Fence) {
        let (now, mask) = (self.now, self.config.mask.clone());
        let Some(r) = self.script.requests.get_mut(i) else { return };
        let (engine, plan) = (r.producer, r.plan.clone());
        (r.fence, r.offered) = (Some(fence.clone()), now);
        if let Some(e) = self.engines.get_mut(engine as usize) {
            e.leases.insert(fence.lease, i);
        }
        self.note(|_| format!("request {i}: e{engine} offers {fence}"));
        if self.script.requests.get(i).is_some_and(|r| r.silent) {
            return self.over(i, "(a replica)");
        }
        let route = self.rng.time(us(200), ms(20));
        let wrong = |kind| plan.goes_wrong(kind, &mask);
        if let Some(after) = wrong(FaultKind::Withdraw) {
            self.put(after, wants(i, Want::Withdraw));
        }
        if wrong(FaultKind::Silence).is_some() {
            self.stats.fault(FaultKind::Silence);
            return self.over(i, "never asked for");
        }
        if let Some(after) = wrong(FaultKind::Decline) {
            return self.put(after, wants(i, Want::Decline));
        }
        if let Some(after) = wrong(FaultKind::Twice) {
            self.stats.fault(FaultKind::Twice);
            let number = self.script.requests.get(i).map_or(0, |r| r.number);
            let twin = self.make(number, RequestPlan { wrong: Vec::new(), replica: None, ..plan.clone() }, 0);
            let engines = u32::try_from(self.engines.len()).unwrap_or(1);
            let prompt = self.script.requests.get(i).map_or(0, |r| r.prompt);
            if let Some(t) = self.script.requests.get_mut(twin) {
                let next = (t.consumer + 1) % engines.max(1);
                t.consumer = if next == t.producer { t.consumer } else { next };
                (t.of, t.content, t.prompt) = (Some(i), prompt, prompt);
                (t.fence, t.offered) = (Some(fence), now);
            }
            self.put(after, wants(twin, Want::Ask));
        }
        self.put(route, wants(i, Want::Ask));
    }

    /// The consumer takes blocks out and begins to read.
    fn ask(&mut self, i: usize) {
        let mask = self.config.mask.clone();
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, tokens, cached, prompt) = (r.consumer, r.tokens, r.cached, r.prompt);
        let content = r.content;
        let Some(mut fence) = r.fence.clone() else { return };
        if r.outcome.is_some() {
            return;
        }
        // Routers know when something can be read; some are wrong.
        let open = self.engines.get(r.producer as usize).is_some_and(|e| e.leases.contains_key(&fence.lease));
        if r.plan.push.is_none() && r.plan.stream.is_some() && !r.computed && open && r.of.is_none() && r.number % 8 > 0
        {
            return self.put(ms(4), wants(i, Want::Ask));
        }
        let blocks = match self.is_up(engine) {
            true => self.engines.get_mut(engine as usize).and_then(|e| e.take(&e.wants(tokens))),
            false => None,
        };
        let Some(blocks) = blocks else {
            if !self.waits(i, Want::Ask) {
                let r = self.script.requests.get(i);
                let address = r.map_or_else(String::new, |r| format!("e{}", r.producer));
                if r.is_some_and(|r| r.of.is_none()) {
                    self.with_owner(engine, |owner, now| owner.decline(&address, fence, now));
                }
                self.over(i, "no room at the consumer");
                self.pump_owner(engine);
            }
            return;
        };
        self.taken(engine, &blocks);
        // What the engine has of the sequence already, from another request.
        self.fill_cached(engine, &blocks, content, 0, cached);
        let groups = self.dst_groups(engine, &blocks, cached);
        let life = self.life(engine);
        let now = self.now;
        let Some(r) = self.script.requests.get_mut(i) else { return };
        let plan = r.plan.clone();
        if plan.goes_wrong(FaultKind::StaleFence, &mask).is_some() {
            fence.lease = kvferry_proto::names::LeaseId::new(fence.lease.get() ^ 1);
        }
        let short = plan.goes_wrong(FaultKind::ShortDeadline, &mask);
        let deadline = short.unwrap_or(plan.deadline);
        (r.dst, r.lives.1, r.asked, r.deadline) = (Some(blocks), life, now, deadline);
        let replica = r.replica.and_then(|at| self.script.requests.get(at));
        let replica = replica.and_then(|r| Some((format!("e{}", r.producer), r.fence.clone()?)));
        let Some(r) = self.script.requests.get(i) else { return };
        let wish = PullWish {
            address: format!("e{}", r.producer),
            fence,
            tokens: Tokens::new(tokens),
            groups,
            content_key: key(prompt),
            assurance: if plan.full && self.config.bytes { Assurance::Full } else { Assurance::Fenced },
            deadline,
            priority: plan.priority,
            policy: FailurePolicy {
                attempts: plan.attempts,
                others: replica.map(|(address, fence)| Source { address, fence }).into_iter().collect(),
                then: if plan.recompute { Remedy::Recompute } else { Remedy::Fail },
                within: limits(plan.within),
            },
            mode: plan.push.map_or(Mode::Pull, |progress| Mode::Push { progress }),
        };
        let doomed = PullWish { fence: Fence { lease: self.lease_id(), ..wish.fence.clone() }, ..wish.clone() };
        let mut pull = None;
        self.with_owner(engine, |owner, now| pull = Some(owner.pull(wish, now)));
        let Some(pull) = pull else { return };
        if let Some(r) = self.script.requests.get_mut(i) {
            r.pull = Some(pull);
        }
        if let Some(e) = self.engines.get_mut(engine as usize) {
            e.pulls.insert(pull, i);
        }
        self.note(|_| format!("request {i}: e{engine} asks, pull {pull}, within {deadline:?}"));
        for (kind, of) in [(FaultKind::ShortDeadline, short), (FaultKind::StaleFence, None)] {
            if of.is_some() || (kind == FaultKind::StaleFence && plan.goes_wrong(kind, &mask).is_some()) {
                self.stats.fault(kind);
            }
        }
        if let Some(after) = plan.goes_wrong(FaultKind::Cancel, &mask) {
            self.put(after, wants(i, Want::Cancel));
        }
        let last = self.last_moment(i);
        self.queue.put(last + us(1), wants(i, Want::Overdue));
        self.pump_owner(engine);
        if cached < tokens && plan.goes_wrong(FaultKind::Overlap, &mask).is_some() {
            self.overlap(i, pull, doomed);
        }
    }

    /// The engine asks for, and offers, blocks that a request writes: it must be told so.
    fn overlap(&mut self, i: usize, pull: PullId, wish: PullWish) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, tokens, prompt) = (r.consumer, r.tokens, r.prompt);
        let open = self.engines.get(engine as usize).is_some_and(|e| e.pulls.contains_key(&pull));
        let Some(blocks) = r.dst.clone().filter(|_| open) else { return };
        self.stats.fault(FaultKind::Overlap);
        let offer = Offer { groups: self.src_groups(engine, &blocks, tokens, tokens, true), content_key: key(prompt) };
        let lease = self.lease_id();
        let (mut offered, mut doomed) = (None, None);
        self.with_owner(engine, |owner, now| {
            offered = Some(owner.offer(lease, offer, Ttl::Usual, now));
            doomed = Some(owner.pull(wish, now));
        });
        if let Some(Ok(fence)) = offered {
            self.violates(Violation::LentTwice { engine, pull: pull.0, how: format!("offered as {fence}") });
        }
        if let (Some(doomed), Some(e)) = (doomed, self.engines.get_mut(engine as usize)) {
            e.doomed.insert(doomed, pull);
        }
        self.pump_owner(engine);
    }

    /// When a request must have ended by the world's time, if its owner is never asleep.
    pub(crate) fn last_moment(&self, i: usize) -> Duration {
        let Some(r) = self.script.requests.get(i) else { return Duration::MAX };
        let slept = self.engines.get(r.consumer as usize).map_or(Duration::ZERO, |e| e.process.slept);
        // Writers have their own owner's grace as well. Clocks go a thousandth slow at most.
        let graces = if r.plan.push.is_some() { 2 } else { 1 };
        let within = (r.deadline + self.config.grace * graces) * 1002 / 1000;
        r.asked + within + slept + ms(20)
    }

    fn cancel(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, life) = (r.consumer, r.lives.1);
        let Some(pull) = r.pull.filter(|_| life == self.life(engine) && r.ended.is_none()) else { return };
        self.stats.fault(FaultKind::Cancel);
        self.note(|_| format!("request {i}: cancelled"));
        self.with_owner(engine, |owner, now| owner.cancel(pull, now));
        self.pump_owner(engine);
    }

    fn withdraw(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, life) = (r.producer, r.lives.0);
        let Some(lease) = r.fence.as_ref().map(|f| f.lease).filter(|_| life == self.life(engine)) else { return };
        if self.engines.get(engine as usize).is_none_or(|e| !e.leases.contains_key(&lease)) {
            return;
        }
        self.stats.fault(FaultKind::Withdraw);
        self.note(|_| format!("request {i}: withdrawn"));
        self.with_owner(engine, |owner, now| _ = owner.withdraw(lease, now));
        self.pump_owner(engine);
    }

    fn decline(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, address) = (r.consumer, format!("e{}", r.producer));
        let Some(fence) = r.fence.clone() else { return };
        self.stats.fault(FaultKind::Decline);
        self.with_owner(engine, |owner, now| owner.decline(&address, fence, now));
        self.over(i, "declined");
        self.pump_owner(engine);
    }

    /// The consumer has decoded: its blocks are free, or go back to where the prompt was computed.
    fn decoded(&mut self, i: usize) {
        let Some(r) = self.script.requests.get_mut(i) else { return };
        let (engine, life, back, producer) = (r.consumer, r.lives.1, r.plan.back, r.producer);
        if life != self.engines.get(engine as usize).map_or(u32::MAX, |e| e.process.life) {
            return;
        }
        let Some(r) = self.script.requests.get_mut(i) else { return };
        let (content, tokens, number, cached) = (r.content, r.tokens, r.number, r.cached);
        let Some(blocks) = r.dst.take() else { return };
        let Some(more) = back.filter(|_| !r.back && r.of.is_none()) else {
            return self.back_to(engine, &blocks, "the end of decoding");
        };
        // As many tokens more as there is room for.
        let room = self.engines.get(engine as usize).map(|e| e.block_tokens()).unwrap_or_default();
        let most = room.iter().zip(&blocks).filter(|(each, _)| **each > 0).map(|(each, b)| each * b.len() as u64).min();
        let all = (tokens + more).min(most.unwrap_or(tokens));
        // What it had of the sequence before is of the same prefill now.
        self.fill_cached(engine, &blocks, content, 0, cached);
        self.fill(engine, &blocks, content, tokens, all);
        let Some(plan) = self.script.requests.get(i).map(|r| r.plan.clone()) else { return };
        let plan = RequestPlan {
            producer: engine,
            consumer: producer,
            tokens: all,
            cached: 0,
            stream: None,
            wrong: Vec::new(),
            ..plan
        };
        let next = self.make(number, plan, 0);
        if let Some(r) = self.script.requests.get_mut(next) {
            (r.content, r.src, r.lives.0, r.back, r.computed) = (content, Some(blocks), life, true, true);
        }
        self.note(|_| format!("request {next} gives back what request {i} has read"));
        self.put(us(1), wants(next, Want::Offer));
    }

    /// Fills tokens of a sequence, and its states where all tokens to the last are computed.
    pub(crate) fn fill(&mut self, engine: u32, blocks: &Blocks, content: u64, from: u64, to: u64) {
        self.fill_cached(engine, blocks, content, from, to);
        if from < to {
            self.each_block(engine, blocks, true, |_, each, _, _| match each {
                0 => Value::Of { content, position: to },
                _ => Value::Keep,
            });
        }
    }

    /// As [`fill`](Self::fill), without states.
    fn fill_cached(&mut self, engine: u32, blocks: &Blocks, content: u64, from: u64, to: u64) {
        if from >= to {
            return;
        }
        self.each_block(engine, blocks, true, |_, each, position, entry| {
            let token = position * each + entry;
            let fills = each > 0 && (from..to).contains(&token);
            if fills { Value::Of { content, position: token } } else { Value::Keep }
        });
    }

    /// Visits every block of a sequence on every rank: what should be there, of the item's needs, tokens of a block, position of
    /// the block in the sequence and token in the block.
    pub(crate) fn each_block(
        &mut self,
        engine: u32,
        blocks: &Blocks,
        write: bool,
        should: impl Fn(&dyn Fn(u64) -> (u64, u64), u64, u64, u64) -> Value,
    ) {
        let Some(e) = self.engines.get_mut(engine as usize) else { return };
        let tokens = e.block_tokens();
        for memory in e.ranks.iter_mut().filter_map(|r| r.memory.as_mut()) {
            let places = memory.places.clone();
            for (at, item) in places.items.iter().enumerate() {
                let group = item.group as usize;
                let (Some(list), Some(each)) = (blocks.get(group), tokens.get(group).copied()) else { continue };
                for (position, block) in (0u64..).zip(list) {
                    memory.set(at, *block, write, |entry| should(&|n| item.needs(n), each, position, entry));
                }
            }
        }
    }
}

fn limits([link, bind, transfer, release]: [Option<Duration>; 4]) -> PhaseLimits {
    PhaseLimits { link, bind, transfer, release, ..PhaseLimits::default() }
}
