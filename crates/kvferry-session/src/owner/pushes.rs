//! The producer's side of push: our ranks write into blocks that a consumer has granted.
//!
//! Who writes is a named set, from the map of peers. A lease that is written is not closed before all of it have ended, or are
//! given up: then they are *in doubt*, and whoever asks is told so until there is evidence: the rank says that it has stopped
//! after all, or begins another life.

use super::{BTreeMap, BTreeSet, EngineId, Epoch, Fence, LeaseId, LinkId, OwnerSession, RankId, USUAL_PRIORITY};

use std::sync::Arc;

use kvferry_geometry::request::{BoundRequest, Request};
use kvferry_geometry::units::Tokens;
use kvferry_proto::lease::Closing;
use kvferry_proto::names::Attempt;
use kvferry_proto::peer::{BindAnswer, BindRefusal, Grant, PeerMessage};
use kvferry_proto::push::{
    Progress, PushBind, PushId, PushOrder, Room, Stop, Stoppage, Stopped, WriterEnd, Writing, Written,
};
use kvferry_proto::rank::{Pairing, RankFault, Stage, ToRank};

use super::leases::{State, Then};

/// What our ranks write of a lease, for one consumer and attempt.
#[derive(Debug)]
pub(super) struct Push {
    pub(super) id: PushId,
    pub(super) writing: Writing,
    /// How far each writer is, if the consumer wants to know.
    progress: Option<BTreeMap<RankId, Tokens>>,
    /// What it was told of that.
    told: Tokens,
}

/// Writers of an attempt of which nobody has seen the end.
#[derive(Debug)]
struct Doubt {
    fence: Fence,
    consumer: EngineId,
    ranks: BTreeSet<RankId>,
}

#[derive(Debug, Default)]
pub(super) struct Pushes {
    last: u64,
    /// Those whose writers have not all ended.
    open: BTreeMap<PushId, LeaseId>,
    doubts: BTreeMap<PushId, Doubt>,
    /// Whether some of those were too many to be kept.
    forgot: bool,
    /// The epochs that this owner has had, as far as it remembers.
    lives: BTreeSet<Epoch>,
}

/// Attempts with writers in doubt that are remembered. Of others nothing is known any more.
const MAX_DOUBTS: usize = 1 << 12;

/// Earlier epochs of this owner that are remembered. Of what was written in others nothing is known.
const MAX_LIVES: usize = 1 << 10;

impl Pushes {
    /// The owner's epoch is this one from now on.
    pub(super) fn live(&mut self, epoch: Epoch) {
        if self.lives.len() >= MAX_LIVES {
            self.lives.pop_first();
        }
        self.lives.insert(epoch);
    }

    fn doubt(&mut self, id: PushId, doubt: Doubt) {
        self.doubts.insert(id, doubt);
        if self.doubts.len() > MAX_DOUBTS {
            self.doubts.pop_first();
            self.forgot = true;
        }
    }

    /// Whether nothing is kept but the epochs.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.doubts.is_empty()
    }
}

impl OwnerSession {
    pub(super) fn on_push_bind(&mut self, link: LinkId, push: PushBind) {
        let PushBind { bind, room } = push;
        let fence = bind.fence.clone();
        let result = self.admit(link, &bind).and_then(|(by, map)| {
            self.check_room(link, fence.lease, &room)?;
            let grant = self.bind_lease(link, &bind, by, map.digest())?;
            // What it holds is told when it is written.
            Ok((Grant { groups: Vec::new(), ..grant }, map))
        });
        match result {
            Ok((grant, map)) => {
                self.send_peer(link, PeerMessage::BindAnswer(BindAnswer::Bound(grant)));
                let writers: BTreeSet<RankId> = map.pairs().iter().map(|p| p.src()).collect();
                self.order_writers(link, fence.lease, writers, room);
            }
            Err(reason) => self.send_peer(link, PeerMessage::BindAnswer(BindAnswer::Refused { fence, reason })),
        }
    }

    /// Whether the room fits what is offered, as far as that is known.
    fn check_room(&mut self, link: LinkId, lease: LeaseId, room: &Room) -> Result<(), BindRefusal> {
        let open = self.leases.open.get(&lease).ok_or(BindRefusal::UnknownLease)?;
        let offer = match &open.state {
            State::Offered(state) => state.offer(),
            State::Bound(state, _) => state.offer(),
            State::Stopping { .. } | State::Moving => return Err(BindRefusal::UnknownLease),
        };
        // Before anything is copied for it.
        let groups = self.links.peer(link).map_or(0, |peer| peer.cache().groups().len());
        if room.groups.len() != groups {
            let got = room.groups.len();
            return Err(BindRefusal::Unfit(format!("it lists {got} groups, its engine has {groups}")));
        }
        let sealed = open.stream.as_ref().is_none_or(|stream| stream.sealed);
        let request = Request { tokens: room.tokens, src: offer.groups.clone(), dst: room.groups.clone() };
        let Some((_, direction)) = self.serving(link) else { return Err(BindRefusal::UnknownLease) };
        let direction = direction.map_err(|e| BindRefusal::Incompatible(e.to_string()))?;
        let bound = if sealed {
            BoundRequest::new(direction.compatible(), request)
        } else {
            BoundRequest::promised(direction.compatible(), request)
        };
        bound.map(drop).map_err(|e| BindRefusal::Unfit(e.to_string()))
    }

    fn order_writers(&mut self, link: LinkId, lease: LeaseId, writers: BTreeSet<RankId>, room: Room) {
        let Some(peer) = self.links.peer(link).cloned() else { return };
        let compat = self.config.compat;
        let Some(open) = self.leases.open.get_mut(&lease) else { return };
        let State::Bound(bound, _) = &open.state else { return };
        self.pushes.last += 1;
        let id = PushId(self.pushes.last);
        self.pushes.open.insert(id, lease);
        let progress = room.progress.then(BTreeMap::new);
        open.push = Some(Box::new(Push { id, writing: Writing::new(writers.clone()), progress, told: Tokens::ZERO }));
        let (salt, peer_map, src) = (bound.salt(), bound.peer_map(), bound.offer().groups.clone());
        let attempt = open.stream.as_ref().map_or(Attempt::FIRST, |stream| stream.attempt);
        // Where it is streamed, what is said of the stream counts.
        let so_far = open.stream.as_ref().map(|stream| stream.so_far(lease, &src)).unwrap_or_default();
        let streamed = open.stream.is_some();
        let src = if streamed { Vec::new() } else { src };
        let options = self.peer_options(salt);
        let order = PushOrder {
            push: id,
            lease,
            attempt,
            streamed,
            pairing: Pairing { peer: peer.digest(), options, compat, peer_map },
            request: Arc::new(Request { tokens: room.tokens, src, dst: room.groups }),
            // Who comes first here is not a consumer's to say; who comes last is.
            priority: room.priority.min(USUAL_PRIORITY),
            within: room.within,
            progress: room.progress,
        };
        // All are ordered before one that isn't there makes the others stop.
        let mut absent = Vec::new();
        for rank in writers {
            for message in &so_far {
                self.send_rank(rank, message.clone(), None);
            }
            if !self.send_rank(rank, ToRank::Push(Box::new(order.clone())), Some(&peer)) {
                absent.push(rank);
            }
        }
        for rank in absent {
            self.on_pushed(rank, id, Err(no_writer("it is not there", false)));
        }
        self.writers_may_have_ended(lease);
    }

    /// One of our ranks has ended its writes for an order.
    pub(super) fn on_pushed(&mut self, rank: RankId, id: PushId, result: WriterEnd) {
        let Some(&lease) = self.pushes.open.get(&id) else {
            // Given up already. Whatever it says, it has stopped, unless it says that it doesn't know.
            if !matches!(&result, Err(fault) if fault.in_doubt) {
                self.writer_has_stopped(id, rank);
            }
            return;
        };
        let failed = result.is_err();
        let push = self.leases.open.get_mut(&lease).and_then(|open| open.push.as_mut()).filter(|push| push.id == id);
        let Some(push) = push else { return };
        if !push.writing.is_pending(rank) {
            // It was lost, and is heard of after all.
            if !matches!(&result, Err(fault) if fault.in_doubt) {
                push.writing.has_stopped(rank);
            }
            return;
        }
        push.writing.on_end(rank, result);
        if failed {
            // The others write for nothing.
            self.stop_writers(lease);
        }
        self.writers_may_have_ended(lease);
    }

    /// Asks those of a lease's writers to stop that have not ended.
    pub(super) fn stop_writers(&mut self, lease: LeaseId) {
        let Some(push) = self.leases.open.get(&lease).and_then(|open| open.push.as_ref()) else { return };
        let (id, pending) = (push.id, push.writing.pending().collect::<Vec<_>>());
        for rank in pending {
            self.send_rank(rank, ToRank::CancelPush(id), None);
        }
    }

    /// Nobody waits any longer for writers that were asked to stop.
    pub(super) fn writers_are_late(&mut self, lease: LeaseId) {
        let push = self.leases.open.get_mut(&lease).and_then(|open| open.push.as_mut());
        if let Some(push) = push {
            push.writing.end_pending(&no_writer("it did not stop in time", true));
        }
        self.writers_may_have_ended(lease);
        self.has_stopped(lease);
    }

    /// Goes on with a lease if all of its writers have ended.
    fn writers_may_have_ended(&mut self, lease: LeaseId) {
        let Some(open) = self.leases.open.get(&lease) else { return };
        let Some(push) = open.push.as_ref().filter(|push| push.writing.is_over()) else { return };
        let (id, doubted) = (push.id, push.writing.in_doubt());
        if self.pushes.open.remove(&id).is_none() {
            return;
        }
        let (bound, link) = match &open.state {
            State::Bound(bound, link) | State::Stopping { bound, link, .. } => (bound, *link),
            State::Offered(_) | State::Moving => return,
        };
        let (fence, consumer) = (bound.fence().clone(), bound.consumer().engine.clone());
        let told: Written = push.writing.told(fence.clone(), bound.offer().groups.clone());
        let stopping = matches!(open.state, State::Stopping { .. });
        if !doubted.is_empty() {
            self.pushes.doubt(id, Doubt { fence, consumer, ranks: doubted });
        }
        if stopping {
            self.has_stopped(lease);
        } else {
            self.links.used(link, self.now);
            self.send_peer(link, PeerMessage::Written(Box::new(told)));
        }
    }

    /// A lease is written no more. Gives the writers in doubt, if it was written at all.
    pub(super) fn writers_have_stopped(&mut self, lease: LeaseId) -> Option<BTreeSet<RankId>> {
        let push = self.leases.open.get_mut(&lease)?.push.take()?;
        self.pushes.open.remove(&push.id);
        Some(push.writing.in_doubt())
    }

    /// A consumer wants to know that nothing is written any more for an attempt; and nothing ever will be, from now on.
    pub(super) fn on_stop(&mut self, link: LinkId, stop: &Stop) {
        let (fence, lease) = (&stop.fence, stop.fence.lease);
        let Some(peer) = self.links.peer(link).map(|p| p.engine().clone()) else { return };
        if fence.engine != self.config.engine {
            return self.say_stopped(link, fence, Stoppage::Unknown);
        }
        // Only of this life of ours: in another there was another lease.
        if let Some(open) = self.leases.open.get_mut(&lease) {
            open.refuse(fence, &peer);
        }
        let open = self.leases.open.get(&lease);
        match open.map(|open| &open.state) {
            // Of a later attempt than the one that is bound, its bind is still on its way, or lost: the lease isn't wanted either.
            // What it doesn't want isn't offered anew either.
            Some(State::Bound(bound, _) | State::Stopping { bound, .. })
                if bound.consumer().engine == peer && asks(bound.fence(), fence) =>
            {
                let answered = bound.fence() == fence;
                self.end_bound(lease, Then::Close(Closing::Abandoned));
                if answered {
                    return;
                }
            }
            // A bind of it may still be on its way, by another link: it must find nothing. Nor is anybody else to have what was offered
            // anew to the one who doesn't want it.
            Some(State::Offered(state)) if asks(state.fence(), fence) || open.is_some_and(|o| o.was_of(&peer)) => {
                self.end_offered(lease);
            }
            _ => {}
        }
        let doubts = self.pushes.doubts.values().filter(|d| d.fence == *fence && d.consumer == peer);
        let doubted: BTreeSet<RankId> = doubts.flat_map(|d| d.ranks.iter().copied()).collect();
        let known = self.pushes.lives.contains(&fence.epoch) && !(self.pushes.forgot && doubted.is_empty());
        let writers = if known { stoppage(&doubted) } else { Stoppage::Unknown };
        self.say_stopped(link, fence, writers);
    }

    /// What has come to be known is told on every link to the consumer: nobody knows which of them it listens to. It asks on the next
    /// one if there is none.
    pub(super) fn tell_stopped(&mut self, consumer: &EngineId, fence: &Fence, doubted: &BTreeSet<RankId>) {
        for link in self.links.pushing_to(consumer) {
            self.say_stopped(link, fence, stoppage(doubted));
        }
    }

    fn say_stopped(&mut self, link: LinkId, fence: &Fence, writers: Stoppage) {
        self.send_peer(link, PeerMessage::Stopped(Stopped { fence: fence.clone(), writers }));
    }

    /// A writer that was in doubt has stopped.
    fn writer_has_stopped(&mut self, id: PushId, rank: RankId) {
        let lease = self.pushes.open.get(&id).or_else(|| self.pushes.doubts.get(&id).map(|d| &d.fence.lease)).copied();
        let push = lease.and_then(|lease| self.leases.open.get_mut(&lease)).and_then(|open| open.push.as_mut());
        if let Some(push) = push.filter(|push| push.id == id) {
            push.writing.has_stopped(rank);
        }
        let Some(doubt) = self.pushes.doubts.get_mut(&id).filter(|doubt| doubt.ranks.contains(&rank)) else { return };
        doubt.ranks.remove(&rank);
        let (fence, consumer, ranks) = (doubt.fence.clone(), doubt.consumer.clone(), doubt.ranks.clone());
        if ranks.is_empty() {
            self.pushes.doubts.remove(&id);
        }
        self.tell_stopped(&consumer, &fence, &ranks);
    }

    /// A rank of ours is gone: nothing proves that what it has posted has stopped.
    pub(super) fn rank_lost_in_pushes(&mut self, rank: RankId, reason: &str) {
        let open: Vec<PushId> = self.pushes.open.keys().copied().collect();
        for id in open {
            self.on_pushed(rank, id, Err(no_writer(reason, true)));
        }
    }

    /// A rank has joined anew: its former life writes no more.
    pub(super) fn rank_is_new_in_pushes(&mut self, rank: RankId) {
        let known: Vec<PushId> = self.pushes.doubts.keys().chain(self.pushes.open.keys()).copied().collect();
        for id in known {
            self.writer_has_stopped(id, rank);
        }
    }

    pub(super) fn on_push_progress(&mut self, rank: RankId, id: PushId, tokens: Tokens) {
        let Some(&lease) = self.pushes.open.get(&id) else { return };
        let Some(open) = self.leases.open.get_mut(&lease) else { return };
        let Some(push) = open.push.as_mut().filter(|push| push.writing.names(rank)) else { return };
        let State::Bound(bound, link) = &open.state else { return };
        let Some(progress) = &mut push.progress else { return };
        let of_rank = progress.entry(rank).or_default();
        *of_rank = tokens.max(*of_rank);
        // Of those that have not said anything yet, nothing is in place.
        let least = push.writing.ranks().map(|rank| progress.get(&rank).copied().unwrap_or_default()).min();
        let Some(tokens) = least.filter(|tokens| *tokens > push.told) else { return };
        push.told = tokens;
        let (link, fence) = (*link, bound.fence().clone());
        self.send_peer(link, PeerMessage::Progress(Progress { fence, tokens }));
    }
}

/// Whether a stop is about this attempt of a lease, or about a later one of it.
fn asks(of: &Fence, stop: &Fence) -> bool {
    of.epoch == stop.epoch && of.attempt <= stop.attempt
}

/// What is said of writers of which these are in doubt.
fn stoppage(doubted: &BTreeSet<RankId>) -> Stoppage {
    if doubted.is_empty() { Stoppage::All } else { Stoppage::Except(doubted.clone()) }
}

fn no_writer(reason: &str, in_doubt: bool) -> RankFault {
    let text = format!("nothing is known of the producer's rank any more: {reason}");
    RankFault { stage: Stage::Write, text, in_doubt, bad: Vec::new() }
}
