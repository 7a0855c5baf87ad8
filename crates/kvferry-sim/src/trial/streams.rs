//! Prefills that are told of while they run.

use kvferry_geometry::units::{ItemId, TokenRange, Tokens};
use kvferry_proto::lease::Offer;
use kvferry_session::Ttl;
use kvferry_session::owner::{OfferError, StreamError};

use super::{Want, World, key, wants};
use crate::engine::Blocks;
use crate::memory::Value;
use crate::plan::StreamPlan;
use crate::rng::{hash, us};
use crate::violation::Violation;

impl World {
    /// Blocks are offered of which nothing is computed yet.
    pub(crate) fn announce(&mut self, i: usize) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, tokens, prompt, ttl, plan) = (r.producer, r.tokens, r.prompt, r.ttl, r.plan.stream);
        let (Some(blocks), Some(plan)) = (r.src.clone(), plan) else { return };
        let listed = if plan.late { chunk(plan, tokens, 0).1 } else { tokens };
        let groups = self.src_groups(engine, &blocks, tokens, listed, false);
        let offer = Offer { groups, content_key: key(prompt) };
        let terms = ttl.map_or(Ttl::Usual, Ttl::For);
        let lease = self.lease_id();
        let mut result = None;
        self.with_owner(engine, |owner, now| result = Some(owner.announce(lease, offer, terms, now)));
        match result {
            Some(Ok(fence)) => {
                self.note(|_| format!("request {i}: what follows is computed in {plan:?}"));
                self.offered(i, fence);
                self.next_step(i, plan, 0);
            }
            Some(Err(error @ (OfferError::Overlap(_) | OfferError::Repeated { .. }))) => {
                self.violates(Violation::StillLent { engine, error: error.to_string() });
            }
            _ => {
                self.back_to(engine, &blocks, "the offer's refusal");
                if let Some(r) = self.script.requests.get_mut(i) {
                    r.src = None;
                }
                self.over(i, "not offered");
            }
        }
        self.pump_owner(engine);
    }

    fn next_step(&mut self, i: usize, plan: StreamPlan, step: u32) {
        let after = self.rng.time(us(10), plan.step);
        self.put(after, wants(i, Want::Step(step)));
    }

    /// One layer of a chunk, or a chunk, or the end.
    pub(crate) fn prefill_step(&mut self, i: usize, step: u32) {
        let Some(r) = self.script.requests.get(i) else { return };
        let (engine, life, tokens) = (r.producer, r.lives.0, r.tokens);
        let (Some(plan), Some(fence)) = (r.plan.stream, r.fence.clone()) else { return };
        // Nobody computes what nobody will read.
        let Some(blocks) = r.src.clone().filter(|_| life == self.life(engine)) else { return };
        let lease = fence.lease;
        if self.engines.get(engine as usize).and_then(|e| e.owner.as_ref()).is_none_or(|o| !o.missing().is_empty()) {
            self.note(|_| format!("request {i}: its prefill is given up, as a rank is lost"));
            self.with_owner(engine, |owner, now| _ = owner.withdraw(lease, now));
            return self.pump_owner(engine);
        }
        let restarts = plan.restart == Some(step) && r.former.is_empty();
        let layers = if plan.layers { self.paged(engine) } else { Vec::new() };
        let per_chunk = u32::try_from(layers.len()).unwrap_or(1).max(1);
        let result = if restarts {
            self.restart(i, plan, &blocks)
        } else if step / per_chunk < plan.chunks {
            let items = match layers.get((step % per_chunk) as usize) {
                Some(layer) => vec![*layer],
                None => self.paged(engine),
            };
            self.compute(i, plan, &blocks, (step / per_chunk, items))
        } else {
            self.seal(i, &blocks)
        };
        match result {
            Ok(Some(next)) => self.next_step(i, plan, if restarts { 0 } else { next.unwrap_or(step + 1) }),
            Ok(None) => {}
            // Its lease is over.
            Err(
                StreamError::Unknown { .. } | StreamError::Offer(OfferError::NotReady | OfferError::RankLost { .. }),
            ) => {}
            Err(error) => {
                let error = format!("request {i} ({tokens} tokens, step {step}): {error}");
                self.violates(Violation::StreamRefused { engine, error });
            }
        }
        self.pump_owner(engine);
    }

    /// The paged items of an engine's model.
    fn paged(&self, engine: u32) -> Vec<ItemId> {
        let spec = self.engines.get(engine as usize).map(|e| e.shape.manifest.spec().clone());
        let paged = spec.iter().flat_map(|s| s.iter()).filter(|(_, item)| item.as_paged().is_some());
        paged.map(|(id, _)| id).collect()
    }

    /// The prefill begins anew, and its bytes become others.
    fn restart(&mut self, i: usize, plan: StreamPlan, blocks: &Blocks) -> Next {
        let Some(r) = self.script.requests.get(i) else { return Ok(None) };
        let (engine, tokens, prompt) = (r.producer, r.tokens, r.prompt);
        let Some(lease) = r.fence.as_ref().map(|f| f.lease) else { return Ok(None) };
        let (blocks, left) = self.other_blocks(engine, blocks);
        let blocks = &blocks;
        let listed = if plan.late { chunk(plan, tokens, 0).1 } else { tokens };
        let groups = self.src_groups(engine, blocks, tokens, listed, false);
        let mut result = Err(StreamError::Unknown { lease });
        self.with_owner(engine, |owner, now| result = owner.restart(lease, groups, now));
        let Some(r) = self.script.requests.get_mut(i) else { return Ok(None) };
        // What is listed no more is lent until the lease ends; where it is over already, nothing of this is.
        let run = match result {
            Ok(run) => run,
            Err(error) => {
                let taken = fresh(blocks, r.src.as_ref());
                self.back_to(engine, &taken, "the refusal of a new run");
                return Err(error);
            }
        };
        r.former.push(r.content);
        (r.run, r.content) = (run, hash(&[prompt, r.former.len() as u64]));
        r.src = Some(blocks.clone());
        r.extra.extend(left);
        self.note(|_| format!("request {i}: its prefill begins anew, run {run}"));
        // What was computed is overwritten.
        let salt = self.rng.word();
        self.each_block(engine, blocks, true, |_, each, position, entry| Value::Of {
            content: salt,
            position: position * each + entry,
        });
        Ok(Some(Some(0)))
    }

    /// Other blocks for some of the groups of a sequence, if there are enough; with those that it had.
    fn other_blocks(&mut self, engine: u32, blocks: &Blocks) -> (Blocks, Option<Blocks>) {
        let luck: Vec<bool> = blocks.iter().map(|_| self.rng.chance(4000)).collect();
        let wants: Vec<usize> =
            blocks.iter().zip(&luck).map(|(list, other)| if *other { list.len() } else { 0 }).collect();
        let taken = self.engines.get_mut(engine as usize).and_then(|e| e.take(&wants));
        let Some(taken) = taken.filter(|_| luck.contains(&true)) else { return (blocks.clone(), None) };
        self.taken(engine, &taken);
        let choose = |(other, (old, new)): (&bool, (&Vec<u32>, &Vec<u32>))| match other {
            true => (new.clone(), old.clone()),
            false => (old.clone(), Vec::new()),
        };
        let (now, left) = luck.iter().zip(blocks.iter().zip(&taken)).map(choose).unzip();
        (now, Some(left))
    }

    /// Tokens of some items are computed.
    fn compute(&mut self, i: usize, plan: StreamPlan, blocks: &Blocks, (at, items): (u32, Vec<ItemId>)) -> Next {
        let Some(r) = self.script.requests.get(i) else { return Ok(None) };
        let (engine, tokens, content, run) = (r.producer, r.tokens, r.content, r.run);
        let Some(lease) = r.fence.as_ref().map(|f| f.lease) else { return Ok(None) };
        let (from, to) = chunk(plan, tokens, at);
        if from == to {
            return Ok(Some(None));
        }
        if plan.late {
            let groups = self.src_groups(engine, blocks, tokens, to, false);
            let mut result = Err(StreamError::Unknown { lease });
            self.with_owner(engine, |owner, now| result = owner.extend(lease, run, groups, now));
            result?;
        }
        self.fill_items(engine, blocks, content, (from, to), &items);
        let range = TokenRange::new(Tokens::new(from), Tokens::new(to));
        let mut result = Err(StreamError::Unknown { lease });
        self.with_owner(engine, |owner, now| result = owner.region_ready(lease, run, &items, range, now));
        result.map(|()| Some(None))
    }

    /// All is computed, the states too.
    fn seal(&mut self, i: usize, blocks: &Blocks) -> Next {
        let Some(r) = self.script.requests.get(i) else { return Ok(None) };
        let (engine, tokens, content, run) = (r.producer, r.tokens, r.content, r.run);
        let Some(lease) = r.fence.as_ref().map(|f| f.lease) else { return Ok(None) };
        self.each_block(engine, blocks, true, |_, each, _, _| match each {
            0 => Value::Of { content, position: tokens },
            _ => Value::Keep,
        });
        let groups = self.src_groups(engine, blocks, tokens, tokens, true);
        let mut result = Err(StreamError::Unknown { lease });
        self.with_owner(engine, |owner, now| result = owner.seal(lease, run, groups, now));
        result?;
        self.note(|_| format!("request {i}: all of it is computed"));
        if let Some(r) = self.script.requests.get_mut(i) {
            r.computed = true;
        }
        Ok(None)
    }

    /// As [`fill`](Self::fill), of some paged items.
    fn fill_items(&mut self, engine: u32, blocks: &Blocks, content: u64, (from, to): (u64, u64), items: &[ItemId]) {
        let Some(e) = self.engines.get_mut(engine as usize) else { return };
        let names: Vec<u64> = items
            .iter()
            .filter_map(|id| e.shape.manifest.spec().get(*id))
            .map(|item| kvferry_memory::pattern::seed(item.name.as_str()))
            .collect();
        let tokens = e.block_tokens();
        for memory in e.ranks.iter_mut().filter_map(|r| r.memory.as_mut()) {
            let places = memory.places.clone();
            for (at, item) in places.items.iter().enumerate().filter(|(_, item)| names.contains(&item.name)) {
                let group = item.group as usize;
                let (Some(list), Some(each)) = (blocks.get(group), tokens.get(group).copied()) else { continue };
                for (position, block) in (0u64..).zip(list) {
                    memory.set(at, *block, true, |entry| match position * each + entry {
                        token if (from..to).contains(&token) => Value::Of { content, position: token },
                        _ => Value::Keep,
                    });
                }
            }
        }
    }
}

/// `Some(Some(step))`: that step is next; `Some(None)`: the one after this; `None`: none.
type Next = Result<Option<Option<u32>>, StreamError>;

/// Of these blocks those that the others don't have.
fn fresh(blocks: &Blocks, than: Option<&Blocks>) -> Blocks {
    let empty = Vec::new();
    let old = |group: usize| than.and_then(|b| b.get(group)).unwrap_or(&empty);
    let of_group =
        |(group, list): (usize, &Vec<u32>)| list.iter().filter(|b| !old(group).contains(b)).copied().collect();
    blocks.iter().enumerate().map(of_group).collect()
}

/// The tokens of a chunk.
fn chunk(plan: StreamPlan, tokens: u64, at: u32) -> (u64, u64) {
    let chunks = u64::from(plan.chunks.max(1));
    let cut = |n: u64| tokens * n.min(chunks) / chunks;
    (cut(u64::from(at)), cut(u64::from(at) + 1))
}
