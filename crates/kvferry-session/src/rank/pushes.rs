//! A rank's pushes: from the order to the line, and to their end.
//!
//! What is written is always what lies between how far a destination has pieces and how far the source is final, so nothing that
//! isn't final is written, and nothing twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_geometry::batch::{Batch, BoundsError};
use kvferry_geometry::digest::Digest;
use kvferry_geometry::plan::{PairPlan, PlanError};
use kvferry_geometry::request::{BoundRequest, GroupMove, Request};
use kvferry_geometry::units::{ItemId, RankId, Tokens};
use kvferry_geometry::watermarks::{Watermark, Watermarks};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::names::LeaseId;
use kvferry_proto::push::{PushId, PushOrder};
use kvferry_proto::rank::{FromRank, RankFault, Stage};
use kvferry_transport::PeerId;

use super::lanes::Gate;
use super::orders::{Order, fault};
use super::push::{Next, Push, Target};
use super::{RankSession, Standing};
use crate::bind::bind_write;
use crate::pairing::Direction;

/// The pushes, also by lease.
#[derive(Debug, Default)]
pub(super) struct Pushes {
    /// Boxed: a tree of large values moves them about.
    all: BTreeMap<PushId, Box<Push>>,
    of_lease: BTreeSet<(LeaseId, PushId)>,
}

impl Pushes {
    pub(super) fn get(&self, id: PushId) -> Option<&Push> {
        self.all.get(&id).map(|p| &**p)
    }

    pub(super) fn get_mut(&mut self, id: PushId) -> Option<&mut Push> {
        self.all.get_mut(&id).map(|p| &mut **p)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PushId, &Push)> {
        self.all.iter().map(|(&id, p)| (id, &**p))
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Those of a lease.
    pub(super) fn of(&self, lease: LeaseId) -> Vec<PushId> {
        let all = (lease, PushId(0))..=(lease, PushId(u64::MAX));
        self.of_lease.range(all).map(|(_, id)| *id).collect()
    }

    fn insert(&mut self, id: PushId, push: Push) {
        self.of_lease.insert((push.order.lease, id));
        self.all.insert(id, Box::new(push));
    }

    fn remove(&mut self, id: PushId) {
        if let Some(push) = self.all.remove(&id) {
            self.of_lease.remove(&(push.order.lease, id));
        }
    }
}

impl RankSession {
    pub(super) fn start_push(&mut self, order: PushOrder) {
        let id = order.push;
        // Its end is the one that it has.
        if self.pushes.get(id).is_some() {
            return;
        }
        match self.plan_push(order) {
            Ok(push) => {
                self.unposted.insert((push.deadline(), Order::Push(id)));
                self.pushes.insert(id, push);
                match self.connect_targets(id) {
                    Ok(()) => self.advance(id),
                    Err(fault) => self.fail_push(id, fault),
                }
            }
            Err(fault) => self.out.push_back(FromRank::Pushed { push: id, result: Err(fault) }),
        }
    }

    fn plan_push(&mut self, order: PushOrder) -> Result<Push, RankFault> {
        let unfit = |e: &dyn std::fmt::Display| fault(Stage::Plan, e.to_string());
        let stream = self.streams.get(&order.lease);
        if let Some(stream) = stream.filter(|s| s.attempt > order.attempt) {
            let (of, at) = (order.attempt, stream.attempt);
            return Err(fault(Stage::Cancelled, format!("the order is of attempt {of}, and the prefill is at {at}")));
        }
        let streamed = order.streamed || stream.is_some();
        let rank = self.who.rank;
        let (pairing, items) = (order.pairing, self.items());
        let (peer, direction) = self.serving(&order)?;
        let map = direction.agreed_map(pairing.options, pairing.peer_map).map_err(|e| unfit(&e))?;
        let none = Arc::new(Watermarks::none(items));
        let mut targets = BTreeMap::new();
        for dst in map.consumers_of(rank) {
            let plan = direction.plan(pairing.options, rank, dst).map_err(|e| unfit(&e))?;
            targets.insert(dst, Box::new(Target::new(plan, none.clone())));
        }
        Ok(Push::new(order, peer.engine().clone(), streamed, targets, self.now))
    }

    /// Items of our engine's model.
    fn items(&self) -> usize {
        match &self.standing {
            Standing::Member(engine) => engine.cache().spec().iter().len(),
            _ => 0,
        }
    }

    /// The engine that is written to, and what it is to ours.
    fn serving(&mut self, order: &PushOrder) -> Result<(Arc<EngineManifest>, Arc<Direction>), RankFault> {
        let refuse = |text: &str| fault(Stage::Plan, text);
        let Standing::Member(engine) = &self.standing else { return Err(refuse("the engine is not complete")) };
        let known = self.peers.get(&order.pairing.peer).ok_or_else(|| refuse("the order names an unknown engine"))?;
        let peer = known.manifest.clone();
        let way = self.acquaintances.serving(engine.cache(), peer.cache(), order.pairing.compat);
        Ok((peer, way.map_err(|e| fault(Stage::Plan, e.to_string()))?))
    }

    /// The lanes that a stream will need are made before there is anything to write.
    fn connect_targets(&mut self, id: PushId) -> Result<(), RankFault> {
        let Some(push) = self.pushes.get(id).filter(|p| p.streamed) else { return Ok(()) };
        let dsts: Vec<(RankId, Arc<PairPlan>)> = push.targets.iter().map(|(&dst, t)| (dst, t.plan.clone())).collect();
        let Some(request) = self.bound(id)? else { return Ok(()) };
        for (dst, plan) in dsts {
            if may_move(&plan, &request) {
                self.lane_to(id, dst)?;
            }
        }
        Ok(())
    }

    /// Makes what has become final into pieces, and puts those whose lane is open into the line.
    pub(super) fn advance(&mut self, id: PushId) {
        let Some(push) = self.pushes.get(id).filter(|p| !p.has_failed()) else { return };
        let dsts: Vec<RankId> = push.targets.iter().filter(|(_, t)| t.wants().is_some()).map(|(&dst, _)| dst).collect();
        for dst in dsts {
            if let Err(fault) = self.next_piece(id, dst) {
                return self.fail_push(id, fault);
            }
        }
        self.enqueue_push(id);
        if let Some(push) = self.pushes.get_mut(id) {
            let next = push.after_pieces(self.now);
            self.go_on_push(id, next);
        }
    }

    fn next_piece(&mut self, id: PushId, dst: RankId) -> Result<(), RankFault> {
        let other = Order::Push(id).other(dst);
        let Some((plan, made)) = self.pushes.get(id).and_then(|p| {
            let target = p.targets.get(&dst)?;
            Some((target.plan.clone(), target.wants()?.clone()))
        }) else {
            return Ok(());
        };
        let Some(to) = self.reach(id).filter(|to| *to != made) else { return Ok(()) };
        let Some(request) = self.bound(id)? else { return Ok(()) };
        let (batch, to) = self.resolve(&plan, &request, &made, to).map_err(|e| other.fault(Stage::Plan, e))?;
        if to == made {
            return Ok(());
        }
        let unbound = |e: BoundsError| other.fault(Stage::Plan, e);
        let (lane, batch) = if batch.is_empty() {
            (None, Arc::new(batch.check(&[], &[]).map_err(unbound)?))
        } else {
            let lane = self.lane_to(id, dst)?;
            let info = self.end.transport.peer(lane).map_err(|e| other.fault(Stage::Connect, e))?;
            (Some(lane), bind_write(batch, &self.cache, &info).map_err(unbound)?)
        };
        let slice = self.queue.limits().cut();
        if let Some(push) = self.pushes.get_mut(id) {
            push.add(dst, lane, &batch, to, (slice, self.now));
        }
        Ok(())
    }

    /// How far the source is final for a push; `None` where its attempt has not begun.
    fn reach(&self, id: PushId) -> Option<Arc<Watermarks>> {
        let push = self.pushes.get(id)?;
        if !push.streamed {
            return Some(Arc::new(Watermarks::whole(self.items())));
        }
        let stream = self.streams.get(&push.order.lease).filter(|s| s.attempt == push.order.attempt)?;
        Some(stream.marks.clone())
    }

    /// The request with the source's blocks as far as they are known; `None` where the attempt has not begun.
    fn bound(&mut self, id: PushId) -> Result<Option<Arc<BoundRequest>>, RankFault> {
        let Some(push) = self.pushes.get(id) else { return Ok(None) };
        if push.request.is_some() {
            return Ok(push.request.clone());
        }
        let order = push.order.clone();
        let (src, sealed) = if push.streamed {
            let stream = self.streams.get(&order.lease).filter(|s| s.attempt == order.attempt);
            let Some(stream) = stream else { return Ok(None) };
            (stream.groups.clone(), stream.sealed)
        } else {
            (order.request.src.clone(), true)
        };
        let (_, direction) = self.serving(&order)?;
        let Request { tokens, dst, .. } = &*order.request;
        let request = Request { tokens: *tokens, src, dst: dst.clone() };
        let bind = if sealed { BoundRequest::new } else { BoundRequest::promised };
        let bound = bind(direction.compatible(), request).map_err(|e| fault(Stage::Plan, e.to_string()))?;
        let bound = Arc::new(bound);
        if let Some(push) = self.pushes.get_mut(id) {
            push.request = Some(bound.clone());
        }
        Ok(Some(bound))
    }

    /// What moves between `from` and `to`, and how far that is in the end: what is final but in blocks that the stream has not
    /// listed yet waits for those.
    fn resolve(
        &self,
        plan: &PairPlan,
        request: &BoundRequest,
        from: &Watermarks,
        mut to: Arc<Watermarks>,
    ) -> Result<(Batch, Arc<Watermarks>), PlanError> {
        let Standing::Member(engine) = &self.standing else { return Ok((Batch::default(), Arc::new(from.clone()))) };
        for _ in engine.cache().groups() {
            match plan.resolve_between(request, from, &to) {
                Err(PlanError::NotListed { group, listed, .. }) => {
                    let items = engine.cache().groups().get(group.index()).map_or(&[][..], |g| &g.items);
                    to = Arc::new(held_back(&to, from, items, listed.end()));
                }
                other => return other.map(|batch| (batch, to)),
            }
        }
        plan.resolve_between(request, from, &to).map(|batch| (batch, to))
    }

    /// The lane to a destination, connected now if there is none.
    fn lane_to(&mut self, id: PushId, dst: RankId) -> Result<PeerId, RankFault> {
        let push = self.pushes.get(id);
        let Some((lane, peer)) = push.and_then(|p| Some((p.targets.get(&dst)?.lane, p.order.pairing.peer))) else {
            return Err(fault(Stage::Connect, "the order has ended"));
        };
        let other = Order::Push(id).other(dst);
        let lane = match lane {
            Some(lane) => lane,
            None => {
                let manifest = self.peers.get(&peer).map(|known| known.manifest.clone());
                let manifest = manifest.ok_or_else(|| other.fault(Stage::Connect, "the engine was forgotten"))?;
                self.lane(peer, dst, &manifest).map_err(|e| other.fault(Stage::Connect, e))?
            }
        };
        if let Gate::Refused(why) = self.lanes.gate(lane) {
            return Err(other.fault(Stage::Connect, why));
        }
        if let Some(target) = self.pushes.get_mut(id).and_then(|p| p.targets.get_mut(&dst)) {
            target.lane = Some(lane);
        }
        Ok(lane)
    }

    /// Puts those destinations into the line that have something to be posted and their lane.
    fn enqueue_push(&mut self, id: PushId) {
        let Some(push) = self.pushes.get(id) else { return };
        let (mut open, mut refused) = (Vec::new(), None);
        for (dst, lane, wanted) in push.wanted() {
            match self.lanes.gate(lane) {
                Gate::Open => open.push((dst, wanted)),
                Gate::Wait => {}
                Gate::Refused(why) => refused = refused.or(Some(Order::Push(id).other(dst).fault(Stage::Connect, why))),
            }
        }
        if let Some(fault) = refused {
            return self.fail_push(id, fault);
        }
        for (dst, wanted) in open {
            self.queue.push((Order::Push(id), dst), wanted);
        }
    }

    /// The same for all pushes: a lane was admitted.
    pub(super) fn enqueue_pushes(&mut self) {
        let waiting: Vec<PushId> =
            self.pushes.iter().filter(|(_, p)| p.wanted().next().is_some()).map(|(id, _)| id).collect();
        for id in waiting {
            self.enqueue_push(id);
        }
    }

    /// The engine that they write to was forgotten.
    pub(super) fn fail_pushes_to(&mut self, peer: Digest) {
        let to: Vec<PushId> =
            self.pushes.iter().filter(|(_, p)| p.order.pairing.peer == peer).map(|(id, _)| id).collect();
        for id in to {
            self.fail_push(id, fault(Stage::Connect, "the engine was forgotten"));
        }
    }

    pub(super) fn cancel_push(&mut self, id: PushId) {
        self.fail_push(id, fault(Stage::Cancelled, "the owner gave the order up"));
    }

    /// The push has failed: nothing more is posted, what is in flight is asked to stop.
    pub(super) fn fail_push(&mut self, id: PushId, fault: RankFault) {
        let Some(push) = self.pushes.get_mut(id) else { return };
        let next = push.fail(fault);
        self.go_on_push(id, next);
    }

    pub(super) fn go_on_push(&mut self, id: PushId, next: Next) {
        let Some(push) = self.pushes.get_mut(id) else { return };
        let progress = push.progress();
        if push.has_failed() {
            self.dequeue(Order::Push(id));
        }
        if let Some(tokens) = progress {
            self.out.push_back(FromRank::PushProgress { push: id, tokens });
        }
        match next {
            Next::Wait => {}
            Next::Stop(ops) => ops.into_iter().for_each(|op| self.end.cancel(op)),
            Next::End(result) => {
                self.dequeue(Order::Push(id));
                self.pushes.remove(id);
                self.out.push_back(FromRank::Pushed { push: id, result });
            }
        }
    }
}

/// Whether a request may move something by a plan, as far as it is known.
fn may_move(plan: &PairPlan, request: &BoundRequest) -> bool {
    plan.classes().iter().any(|class| {
        // States are listed later.
        let of_class = |m: &&GroupMove| (m.src_group, m.dst_group) == class.groups();
        class.retention().is_none() || request.moves().iter().filter(of_class).any(|m| !m.is_empty())
    })
}

/// `to`, but of these items no further than `upto` and no less far than `from`.
fn held_back(to: &Watermarks, from: &Watermarks, items: &[ItemId], upto: Tokens) -> Watermarks {
    let marks = (0u32..).map(ItemId::new).zip(to.as_slice().iter().zip(from.as_slice()));
    let of = |(item, (&to, &from)): (ItemId, (&Watermark, &Watermark))| {
        if items.contains(&item) { to.min(Watermark::Upto(upto)).max(from) } else { to }
    };
    marks.map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_items_of_a_group_are_held_back_and_none_goes_back() {
        let upto = |n: u64| Watermark::Upto(Tokens::new(n));
        let marks = |list: &[u64]| list.iter().map(|&n| upto(n)).collect::<Watermarks>();
        let items = [0, 1, 3].map(ItemId::new);
        let got = held_back(&marks(&[40, 40, 40, 8]), &marks(&[0, 20, 0, 0]), &items, Tokens::new(16));
        assert_eq!(got, marks(&[16, 20, 40, 8]));
    }
}
