//! What a producer's owner knows of its writers: `kvferry-session/src/owner/pushes.rs`, without progress and what is granted beside
//! one block.

use std::collections::BTreeSet;

use kvferry_geometry::units::RankId;
use kvferry_proto::lease::Closing;
use kvferry_proto::names::{EngineId, Fence, LeaseId};
use kvferry_proto::peer::{BindAnswer, BindRefusal, Grant};
use kvferry_proto::push::{PushId, Stop, Stoppage, Stopped, WriterEnd, Writing};
use kvferry_proto::rank::{RankFault, Stage};

use super::writes::Write;
use super::{Lease, Open, Then};
use crate::consumer::Course;
use crate::fault::Fault;
use crate::network::{End, Link, LinkId, Message, PushBind, Written};
use crate::rules::Rule;
use crate::state::State;
use crate::world::World;

/// What ranks write of a lease, for one consumer and attempt.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Push {
    pub(crate) id: PushId,
    pub(crate) writing: Writing,
}

/// Writers of an attempt of which nobody has seen the end.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Doubt {
    fence: Fence,
    consumer: EngineId,
    link: LinkId,
    pub(crate) ranks: BTreeSet<RankId>,
}

pub(super) fn no_writer(in_doubt: bool) -> RankFault {
    RankFault { stage: Stage::Write, text: String::new(), in_doubt, bad: Vec::new() }
}

fn stoppage(doubted: &BTreeSet<RankId>) -> Stoppage {
    if doubted.is_empty() { Stoppage::All } else { Stoppage::Except(doubted.clone()) }
}

impl State {
    pub(crate) fn on_push_bind(&mut self, w: &World, producer: usize, link: LinkId, push: PushBind) {
        let PushBind { bind, block, pull } = push;
        let fence = bind.fence.clone();
        let admitted = self.admit(w, producer, link, &bind);
        let bound: Result<_, BindRefusal> = admitted.and_then(|(by, map)| {
            let grant = self.bind_lease(producer, link, &bind, by, map.digest())?;
            Ok((Grant { groups: Vec::new(), ..grant }, map))
        });
        let (answer, map) = match bound {
            Ok((grant, map)) => (BindAnswer::Bound(grant), Some(map)),
            Err(reason) => (BindAnswer::Refused { fence: fence.clone(), reason }, None),
        };
        self.send(w, link, End::Consumer, Message::BindAnswer(answer));
        let Some(map) = map else { return };
        let lease = fence.lease;
        let Some(l) = self.links.get(&link) else { return };
        let (consumer, lives) = (l.consumer, l.consumer_ranks);
        let Some(p) = self.producer(producer) else { return };
        p.last_push += 1;
        let (id, lost) = (PushId(p.last_push), p.lost);
        let Some(open) = p.open.get_mut(&lease) else { return };
        let (number, stream) = (open.lease, open.stream);
        let writers: BTreeSet<RankId> = map.pairs().iter().map(|pair| pair.src()).collect();
        open.push = Some(Push { id, writing: Writing::new(writers.clone()) });
        p.pushes.insert(id, lease);
        let from = w.leases.get(number).map_or(0, |plan| plan.block);
        self.note_ordered(number, consumer, &fence);
        for rank in writers.iter().copied().filter(|rank| Some(*rank) != lost) {
            let left: Vec<RankId> = map.pairs().iter().filter(|p| p.src() == rank).map(|p| p.dst()).collect();
            let life =
                |dst: &RankId| lives.get(usize::try_from(dst.get()).unwrap_or(usize::MAX)).copied().unwrap_or_default();
            let write = Write {
                lease: number,
                attempt: fence.attempt,
                run: stream.map_or(0, |s| s.run),
                from,
                consumer,
                to: block,
                pull,
                targets: left.iter().map(|dst| (*dst, life(dst))).collect(),
                left,
                ready: stream.is_none_or(|s| s.ready),
                whole: stream.is_none_or(|s| s.sealed),
                course: Course::Runs,
            };
            if let Some(p) = self.producer(producer) {
                p.writes.insert((rank, id), write);
            }
        }
        for rank in lost.into_iter().filter(|rank| writers.contains(rank)) {
            self.on_pushed(w, producer, rank, id, Err(no_writer(false)));
        }
        self.writers_may_have_ended(w, producer, lease);
    }

    /// The rules about what is about to be written.
    fn note_ordered(&mut self, number: usize, consumer: usize, fence: &Fence) {
        let attempt = (number, fence.attempt);
        if !self.ordered.insert(attempt) {
            self.broken.insert(Rule::AttemptOnce);
        }
        if self.over.contains(&(number, fence.attempt, consumer)) {
            self.broken.insert(Rule::StoppedIsOver);
        }
        let mut writes = self.producers.iter().flat_map(|p| p.writes.values());
        if writes.any(|write| write.lease == number) {
            self.broken.insert(Rule::DrainedBeforeNext);
        }
    }

    /// A rank has ended its writes for an order.
    pub(crate) fn on_pushed(&mut self, w: &World, producer: usize, rank: RankId, id: PushId, result: WriterEnd) {
        let Some(lease) = self.producers.get(producer).and_then(|p| p.pushes.get(&id)).copied() else {
            if !matches!(&result, Err(fault) if fault.in_doubt) {
                self.writer_has_stopped(w, producer, id, rank);
            }
            return;
        };
        let failed = result.is_err();
        let open = self.producer(producer).and_then(|p| p.open.get_mut(&lease));
        let Some(push) = open.and_then(|open| open.push.as_mut()).filter(|push| push.id == id) else { return };
        let instead = push.writing.pending().next().filter(|_| w.is(Fault::CountWriters));
        let Some(of) = Some(rank).filter(|rank| push.writing.is_pending(*rank)).or(instead) else {
            // It was lost, and is heard of after all.
            if !matches!(&result, Err(fault) if fault.in_doubt) {
                push.writing.has_stopped(rank);
            }
            return;
        };
        push.writing.on_end(of, result);
        if failed {
            self.stop_writers(producer, lease);
        }
        self.writers_may_have_ended(w, producer, lease);
    }

    /// Asks those of a lease's writers to stop that have not ended.
    pub(super) fn stop_writers(&mut self, producer: usize, lease: LeaseId) {
        let Some(p) = self.producer(producer) else { return };
        let Some(push) = p.open.get(&lease).and_then(|open| open.push.as_ref()) else { return };
        for rank in push.writing.pending() {
            if let Some(write) = p.writes.get_mut(&(rank, push.id)) {
                write.cancel();
            }
        }
    }

    /// Nobody waits any longer for writers that were asked to stop.
    pub(super) fn writers_are_late(&mut self, w: &World, producer: usize, lease: LeaseId) {
        let open = self.producer(producer).and_then(|p| p.open.get_mut(&lease));
        if let Some(push) = open.and_then(|open| open.push.as_mut()) {
            push.writing.end_pending(&no_writer(true));
        }
        self.writers_may_have_ended(w, producer, lease);
        self.has_stopped(w, producer, lease);
    }

    /// Goes on with a lease if all of its writers have ended.
    fn writers_may_have_ended(&mut self, w: &World, producer: usize, lease: LeaseId) {
        let Some(p) = self.producer(producer) else { return };
        let Some(open) = p.open.get(&lease) else { return };
        let Some(push) = open.push.as_ref().filter(|push| push.writing.is_over()) else { return };
        let id = push.id;
        if p.pushes.remove(&id).is_none() {
            return;
        }
        let (bound, link, stopping) = match &open.state {
            Lease::Bound(bound, link) => (bound, *link, false),
            Lease::Stopping { bound, link, .. } => (bound, *link, true),
            Lease::Offered(_) => return,
        };
        let (fence, consumer) = (bound.fence().clone(), bound.consumer().engine.clone());
        let writers = push.writing.told(fence.clone(), Vec::new()).writers;
        let ranks = push.writing.in_doubt();
        if !ranks.is_empty() {
            p.doubts.insert(id, Doubt { fence: fence.clone(), consumer, link, ranks });
        }
        if stopping {
            self.has_stopped(w, producer, lease);
        } else {
            self.send(w, link, End::Consumer, Message::Written(Written { fence, writers }));
        }
    }

    /// A lease is written no more. Gives the writers in doubt, if it was written at all.
    pub(super) fn writers_have_stopped(&mut self, producer: usize, lease: LeaseId) -> Option<BTreeSet<RankId>> {
        let p = self.producer(producer)?;
        let push = p.open.get_mut(&lease)?.push.take()?;
        p.pushes.remove(&push.id);
        Some(push.writing.in_doubt())
    }

    /// A consumer wants to know that nothing is written any more for an attempt; and nothing ever will be, from now on.
    pub(crate) fn on_stop(&mut self, w: &World, producer: usize, link: LinkId, stop: &Stop) {
        let (fence, lease) = (&stop.fence, stop.fence.lease);
        let Some(peer) = self.reader(w, link).map(|by| by.engine) else { return };
        let Some(p) = self.producer(producer) else { return };
        let (later, anew) = (!w.is(Fault::NextAttemptMayCome), !w.is(Fault::ReopenForNobody));
        let of_life = |open: &&mut Open| open.state.fence().epoch == fence.epoch;
        let open = p.open.get_mut(&lease).filter(of_life);
        let (mut state, mut again) = (None, false);
        if let Some(open) = open {
            if later && !w.is(Fault::OfferStaysOpen) {
                open.refused = open.refused.max(Some(fence.attempt));
            }
            again = anew && open.before.as_ref().is_some_and(|(engine, _)| *engine == peer);
            state = Some(open.state.clone());
        }
        let asks = |of: &Fence| of.attempt == fence.attempt || (later && of.attempt < fence.attempt);
        match state {
            // Of a later attempt than the one that is bound, its bind is still on its way, or lost: the lease isn't wanted either.
            Some(Lease::Bound(bound, _) | Lease::Stopping { bound, .. })
                if asks(bound.fence()) && bound.consumer().engine == peer =>
            {
                if w.is(Fault::StoppedTooEarly) {
                    self.say_stopped(w, producer, (&peer, &[link]), fence, &BTreeSet::new());
                }
                self.end_bound(w, producer, lease, Then::Close(Closing::Abandoned));
                if bound.fence() == fence {
                    return;
                }
            }
            // A bind of it may still be on its way, by another link: it must find nothing. Nor is anybody else to have what was
            // offered anew to the one who doesn't want it.
            Some(Lease::Offered(state)) if (asks(state.fence()) && !w.is(Fault::OfferStaysOpen)) || again => {
                self.end_lease(w, producer, lease, Closing::Declined);
            }
            _ => {}
        }
        let Some(p) = self.producer(producer) else { return };
        if !p.lived.contains(&fence.epoch) {
            let stopped = Stopped { fence: fence.clone(), writers: Stoppage::Unknown };
            return self.send(w, link, End::Consumer, Message::Stopped(stopped));
        }
        let doubts = p.doubts.values().filter(|d| d.fence == *fence && d.consumer == peer);
        let doubted: BTreeSet<RankId> = doubts.flat_map(|doubt| doubt.ranks.iter().copied()).collect();
        self.say_stopped(w, producer, (&peer, &[link]), fence, &doubted);
    }

    /// What has come to be known is told on all links to the consumer: nobody knows which of them it listens to.
    pub(super) fn tell_stopped(
        &mut self,
        w: &World,
        producer: usize,
        (consumer, link): (&EngineId, LinkId),
        fence: &Fence,
        doubted: &BTreeSet<RankId>,
    ) {
        let of =
            |l: &Link| l.producer == producer && l.at_producer.is_up() && w.consumers.get(l.consumer) == Some(consumer);
        let mut links: Vec<LinkId> = self.links.iter().filter(|(_, l)| of(l)).map(|(link, _)| *link).collect();
        links.retain(|of| *of == link || !w.is(Fault::ToldOnOneLink));
        self.say_stopped(w, producer, (consumer, &links), fence, doubted);
    }

    fn say_stopped(
        &mut self,
        w: &World,
        producer: usize,
        (consumer, links): (&EngineId, &[LinkId]),
        fence: &Fence,
        doubted: &BTreeSet<RankId>,
    ) {
        let number = (0..w.leases.len()).find(|n| w.lease_id(*n) == fence.lease);
        let reader = w.consumers.iter().position(|engine| engine == consumer);
        if let (Some(number), Some(reader), Some(p)) = (number, reader, self.producers.get(producer)) {
            let of = |write: &Write| (write.lease, write.attempt, write.consumer) == (number, fence.attempt, reader);
            if p.writes.iter().any(|((rank, _), write)| of(write) && !doubted.contains(rank)) {
                self.broken.insert(Rule::StoppedIsOver);
            }
            self.over.insert((number, fence.attempt, reader));
        }
        for link in links {
            let stopped = Stopped { fence: fence.clone(), writers: stoppage(doubted) };
            self.send(w, *link, End::Consumer, Message::Stopped(stopped));
        }
    }

    /// A writer that was in doubt has stopped.
    fn writer_has_stopped(&mut self, w: &World, producer: usize, id: PushId, rank: RankId) {
        let Some(p) = self.producer(producer) else { return };
        let lease = p.pushes.get(&id).or_else(|| p.doubts.get(&id).map(|doubt| &doubt.fence.lease)).copied();
        let forgets = w.is(Fault::WriterInDoubtForEver);
        let push = lease.and_then(|lease| p.open.get_mut(&lease)).and_then(|open| open.push.as_mut());
        if let Some(push) = push.filter(|push| push.id == id && !forgets) {
            push.writing.has_stopped(rank);
        }
        let Some(doubt) = p.doubts.get_mut(&id) else { return };
        if !doubt.ranks.remove(&rank) {
            return;
        }
        let Doubt { fence, consumer, link, ranks } = doubt.clone();
        if ranks.is_empty() {
            p.doubts.remove(&id);
        }
        self.tell_stopped(w, producer, (&consumer, link), &fence, &ranks);
    }

    /// A rank is gone: nothing proves that what it has posted has stopped.
    pub(super) fn rank_lost_in_pushes(&mut self, w: &World, producer: usize, rank: RankId) {
        let Some(p) = self.producer(producer) else { return };
        for (_, write) in p.writes.iter_mut().filter(|((of, _), _)| *of == rank) {
            write.hang();
        }
        let open: Vec<PushId> = p.pushes.keys().copied().collect();
        self.late_pushes.retain(|late| late.producer != producer || late.rank != rank);
        for id in open {
            self.on_pushed(w, producer, rank, id, Err(no_writer(true)));
        }
    }

    /// A rank has joined anew: its former life writes no more.
    pub(super) fn rank_is_new_in_pushes(&mut self, w: &World, producer: usize, rank: RankId) {
        let Some(p) = self.producer(producer) else { return };
        p.writes.retain(|(of, _), _| *of != rank);
        let known: Vec<PushId> = p.doubts.keys().chain(p.pushes.keys()).copied().collect();
        for id in known {
            self.writer_has_stopped(w, producer, id, rank);
        }
    }

    /// The prefill begins anew: what is written of the run before is stopped, and the lease is offered again when it has.
    pub(crate) fn begin_anew(&mut self, w: &World, producer: usize, lease: LeaseId) {
        let Some(p) = self.producer(producer) else { return };
        let Some(open) = p.open.get_mut(&lease) else { return };
        let (number, block) = (open.lease, w.leases.get(open.lease).map_or(0, |plan| plan.block));
        let Some(stream) = &mut open.stream else { return };
        let run = stream.begin_anew();
        p.cancel_writes_of(number);
        p.fill(block, super::Content::Other);
        if let Some(told) = self.leases.get_mut(number) {
            told.run = run;
        }
        self.end_bound(w, producer, lease, Then::Reopen);
    }
}
