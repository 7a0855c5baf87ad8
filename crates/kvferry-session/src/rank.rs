//! One rank: reads what its owner orders, writes what peers have granted room for, and digests what other ranks read from it.
//!
//! The session owns its [`Transport`]. Its driver hands it the owner's messages ([`RankSession::handle`]), calls
//! [`RankSession::step`] whenever the transport wakes or time is up, and sends on what [`RankSession::next_message`] gives. Lanes
//! to other ranks are connected when first needed and kept until the owner forgets the engine.
//!
//! What is read or written is cut into slices, which are posted by priority, deadline and equal shares of the engines, with no
//! more in flight than an [`Admission`] lets. A slice that fails fails its order: nothing more of it is posted.
//!
//! What is written may still be being computed when the order comes: then the owner has said before that its lease is a *stream*,
//! and says what of it is final ([`ToRank::Ready`]), or the driver does ([`RankSession::ready`]). It is written at once, and
//! nothing else is. No slice is posted after the grant's time.
//!
//! Reads may be staged, here or at their source: then the session's driver also does the local permutations that
//! [`RankSession::next_work`] gives, on whatever thread it likes, and says [`RankSession::work_done`].
//!
//! Every order ends with one [`FromRank::Pulled`] or [`FromRank::Pushed`], and not before everything that was posted for it has
//! ended. Digests and
//! comparisons are done a slice at a time, for each engine that waits in turn; planning, zeroing a request's tail and connecting
//! a lane are not cut.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::{BoundedBatch, BoundsError, Side};
use kvferry_geometry::digest::Digest;
use kvferry_geometry::request::{BoundRequest, Request};
use kvferry_geometry::units::{Bytes, RankId, RegionId};
use kvferry_geometry::zero::ZeroPlan;
use kvferry_proto::manifest::{EngineManifest, RankJoin};
use kvferry_proto::names::{EngineId, Epoch};
use kvferry_proto::rank::{DigestOrder, FromRank, Pairing, PullId, PullOrder, RankFault, Stage, ToRank};
use kvferry_transport::{Event, OpId, Outcome, PeerId, PeerInfo, Region, TransferError, Transport};

use crate::bind::bind_read;
use crate::cache::LocalCache;
use crate::pairing::{Acquaintances, Pairings};
use crate::runs::RunDigester;

mod admission;
mod compare;
mod endpoint;
mod gather;
mod lanes;
mod orders;
mod pull;
mod push;
mod pushes;
mod queue;
mod reading;
mod stage;
mod staged;
mod streams;
#[cfg(test)]
mod tests;

use admission::Queue;
pub use admission::{Admission, AdmissionRefused};
use endpoint::{Endpoint, Flight};
use lanes::{Gate, Lanes};
pub use lanes::{LaneReport, LaneStanding};
use orders::{Order, fault};
use pull::{Next, Pull, Source, Terms};
use pushes::Pushes;
pub use stage::{LocalWork, StagingConfig, StagingRefused, Way, WorkId};
use staged::Staging;
use streams::Streams;

/// Bytes that are digested between two looks at the transport.
const SLICE: u64 = 16 << 20;
/// The same while a lane is measured: what is looked at late would count as slow.
const SLICE_WHILE_PROBING: u64 = 256 << 10;

/// Which rank this is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankIdentity {
    /// Of which engine.
    pub engine: EngineId,
    /// Which one.
    pub rank: RankId,
    /// Which life of it: random.
    pub epoch: Epoch,
}

/// Whether the owner has taken the rank in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It has not answered yet, or other ranks are missing.
    Joining,
    /// The engine is complete.
    Member(Arc<EngineManifest>),
    /// It refused.
    Refused(String),
}

/// Another engine.
struct Known {
    manifest: Arc<EngineManifest>,
    lanes: BTreeMap<RankId, PeerId>,
    /// Whether it is asked to gather: not after it has computed other batches than we do.
    gathers: bool,
}

/// A digest order in progress.
struct Job {
    ticket: u64,
    digester: RunDigester,
}

/// One rank of an engine. See the module's text.
pub struct RankSession {
    who: RankIdentity,
    end: Endpoint,
    lanes: Lanes,
    cache: LocalCache,
    /// Whether there is memory in its regions.
    bytes: bool,
    standing: Standing,
    peers: BTreeMap<Digest, Known>,
    acquaintances: Acquaintances,
    /// Boxed: a tree of large values moves them about.
    pulls: BTreeMap<PullId, Box<Pull>>,
    pushes: Pushes,
    /// What of ours is still being computed.
    streams: Streams,
    /// Slices that wait to be posted.
    queue: Queue,
    /// Pulls of which nothing was posted yet and pushes of which something is left, by when they are late.
    unposted: BTreeSet<(Duration, Order)>,
    /// Digest orders by the engine that waits for them; each engine in turn gets a slice.
    jobs: VecDeque<(Digest, VecDeque<Job>)>,
    zeros: Option<ZeroPlan>,
    staging: Staging,
    out: VecDeque<FromRank>,
    now: Duration,
}

impl RankSession {
    /// A rank whose cache is registered with this transport. Its first message joins the owner.
    #[must_use]
    pub fn new(who: RankIdentity, transport: Box<dyn Transport>, cache: LocalCache) -> Self {
        let join = RankJoin {
            engine: who.engine.clone(),
            rank: who.rank,
            epoch: who.epoch,
            manifest: cache.manifest().clone(),
            blob: transport.blob().into(),
        };
        Self {
            who,
            end: Endpoint::new(transport),
            lanes: Lanes::default(),
            cache,
            bytes: true,
            standing: Standing::Joining,
            peers: BTreeMap::new(),
            acquaintances: Acquaintances::default(),
            pulls: BTreeMap::new(),
            pushes: Pushes::default(),
            streams: Streams::new(),
            queue: Queue::new(Admission::default()),
            unposted: BTreeSet::new(),
            jobs: VecDeque::new(),
            zeros: None,
            staging: Staging::default(),
            out: VecDeque::from([FromRank::Join(join)]),
            now: Duration::ZERO,
        }
    }

    /// What it computes of pairs of caches is shared with the other sessions of the process that have these.
    #[must_use]
    pub fn with_pairings(mut self, pairings: Pairings) -> Self {
        self.acquaintances = Acquaintances::sharing(pairings);
        self
    }

    /// For simulations only, whose regions are addresses that nothing lies at: what lies beyond the moved tokens isn't zeroed, though it
    /// is said to be.
    #[must_use]
    pub fn without_bytes(mut self) -> Self {
        self.bytes = false;
        self
    }

    /// Whether the owner has taken the rank in.
    #[must_use]
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Takes a message of the owner.
    pub fn handle(&mut self, message: ToRank, now: Duration) {
        self.now = now;
        self.on_message(message);
        self.serve_granted();
        self.expire();
        self.pump();
    }

    fn on_message(&mut self, message: ToRank) {
        match message {
            ToRank::Welcome(engine) => {
                self.forget_own(&engine);
                self.standing = match ZeroPlan::new(engine.cache(), self.who.rank) {
                    Ok(zeros) => {
                        self.zeros = Some(zeros);
                        Standing::Member(engine)
                    }
                    Err(error) => Standing::Refused(error.to_string()),
                };
            }
            ToRank::Refused(reason) => self.standing = Standing::Refused(reason),
            ToRank::Peer(manifest) => {
                let known = Known { manifest, lanes: BTreeMap::new(), gathers: true };
                self.peers.entry(known.manifest.digest()).or_insert(known);
            }
            ToRank::Forget(digest) => self.forget(digest),
            ToRank::Pull(order) => self.start_pull(&order),
            ToRank::Cancel(pull) => {
                self.fail(pull, fault(Stage::Cancelled, "the owner gave the request up"));
            }
            ToRank::Push(order) => self.start_push(*order),
            ToRank::CancelPush(push) => self.cancel_push(push),
            ToRank::Stream(stream) => self.on_stream(stream),
            ToRank::Ready(ready) => {
                self.on_ready(&ready);
            }
            ToRank::StreamEnd(lease) => self.end_stream(lease),
            ToRank::Digest(order) => self.start_digest(order),
            ToRank::CancelDigest(ticket) => {
                for (_, jobs) in &mut self.jobs {
                    jobs.retain(|job| job.ticket != ticket);
                }
                self.jobs.retain(|(_, jobs)| !jobs.is_empty());
            }
            ToRank::DigestAnswer { pull, src, pieces } => {
                if let Some(p) = self.pulls.get_mut(&pull) {
                    let next = p.on_theirs(src, pieces);
                    self.go_on(pull, next);
                }
            }
            ToRank::Gather(order) => self.start_gather(order),
            ToRank::GatherEnd(ticket) => self.end_gather(ticket),
            ToRank::GatherAnswer { pull, src, result } => self.on_gather_answer(pull, src, result),
            // A newer owner's message: nothing here waits for it.
            _ => {}
        }
    }

    /// Does what there is to do, without blocking for long. Gives the time at which it must be called again even if
    /// nothing wakes it; a time not after `now` means that there is more to do at once.
    pub fn step(&mut self, now: Duration) -> Option<Duration> {
        self.now = now;
        let deadline = self.end.step(now);
        while let Some(event) = self.end.next_event() {
            if !self.probe_event(&event) {
                self.on_event(event);
            }
        }
        self.probe();
        self.enqueue_admitted();
        self.serve_granted();
        self.expire();
        self.pump();
        let slice = self.slice();
        self.digest_slice(slice);
        self.compare_slice(slice);
        self.serve_granted();
        self.pump();
        let busy = !self.jobs.is_empty() || self.pulls.values().any(|p| p.has_work());
        if busy || self.end.is_called() {
            return Some(now);
        }
        [deadline, self.lanes.deadline(), self.late_at()].into_iter().flatten().min()
    }

    /// The next message for the owner.
    pub fn next_message(&mut self) -> Option<FromRank> {
        self.out.pop_front()
    }

    /// Readable while the transport has something to do; for a poller.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.end.transport.wake_fd()
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Completed { op, peer, outcome } => self.on_completed(op, peer, &outcome),
            // Its operations have ended before this.
            Event::PeerLost { peer, cause } => self.leave_lane(peer, format!("the peer is lost: {cause}")),
            Event::Connected { peer } => self.on_connected(peer),
            Event::Notification { .. } => {}
        }
    }

    fn on_completed(&mut self, op: OpId, peer: PeerId, outcome: &Outcome) {
        let Some(Flight { order, other, engine, bytes }) = self.end.ops.remove(&op) else { return };
        self.queue.ended(&engine, bytes);
        self.end.full = false;
        let said = match outcome {
            Outcome::Done(_) => self.end.transport.peer(peer).map_or(String::new(), |info| lanes::text(&info.lane)),
            // We did it, for a reason.
            Outcome::Failed(e @ TransferError::Disconnected) => self.lanes.lost(peer).unwrap_or(e.to_string()),
            Outcome::Failed(e) | Outcome::InDoubt(e) => e.to_string(),
        };
        match order {
            Order::Pull(id) => {
                if let Some(pull) = self.pulls.get_mut(&id) {
                    let next = pull.on_completed((other, op), outcome, said, self.now);
                    self.go_on(id, next);
                }
            }
            Order::Push(id) => {
                if let Some(push) = self.pushes.get_mut(id) {
                    let next = push.on_completed((other, op), outcome, said, self.now);
                    self.go_on_push(id, next);
                }
            }
        }
        if let Outcome::Failed(error @ TransferError::Stale { .. }) = outcome {
            // So is all that goes over this lane, for it goes by the blob that it was made by.
            self.leave_lane(peer, error.to_string());
        }
    }

    fn start_pull(&mut self, order: &PullOrder) {
        match self.plan(order) {
            Ok(pull) => {
                self.pulls.insert(order.pull, Box::new(pull));
                self.acquire(order.pull);
                self.ask_to_gather(order.pull);
                self.enqueue(order.pull);
                self.note_late(order.pull);
            }
            Err(fault) => self.out.push_back(FromRank::Pulled { pull: order.pull, result: Err(fault) }),
        }
    }

    /// Everything that can be refused is refused here, before the first byte moves.
    fn plan(&mut self, order: &PullOrder) -> Result<Pull, RankFault> {
        let refuse = |text: &str| fault(Stage::Plan, text);
        let unfit = |e: &dyn std::fmt::Display| fault(Stage::Plan, e.to_string());
        let Standing::Member(engine) = &self.standing else { return Err(refuse("the engine is not complete")) };
        if self.pulls.contains_key(&order.pull) {
            return Err(refuse("the request was ordered twice"));
        }
        let pairing = order.pairing;
        let known = self.peers.get(&pairing.peer).ok_or_else(|| refuse("the order names an unknown engine"))?;
        let (peer, gathers) = (known.manifest.clone(), known.gathers);
        let way = self.acquaintances.reading(engine.cache(), peer.cache(), pairing.compat);
        let direction = way.map_err(|e| unfit(&e))?;
        let map = direction.agreed_map(pairing.options, pairing.peer_map).map_err(|e| unfit(&e))?;
        let request =
            BoundRequest::new(direction.compatible(), Request::clone(&order.request)).map_err(|e| unfit(&e))?;
        let mut batches = Vec::new();
        for src in map.sources_of(self.who.rank) {
            let plan = direction.plan(pairing.options, src, self.who.rank).map_err(|e| unfit(&e))?;
            let before = plan.uncoalesced(&request).map_err(|e| unfit(&e))?;
            batches.push((src, before, plan.resolve(&request).map_err(|e| unfit(&e))?));
        }
        let mut sources = BTreeMap::new();
        for (src, before, batch) in batches {
            let other = Order::Pull(order.pull).other(src);
            let unbound = |e: BoundsError| other.fault(Stage::Plan, e);
            let source = if batch.is_empty() {
                Source::nothing(Arc::new(batch.check(&[], &[]).map_err(unbound)?))
            } else if order.written {
                let batch = batch.check(&peer.cache().region_lens(src), self.cache.lens()).map_err(unbound)?;
                Source::written(Arc::new(batch), before)
            } else {
                let connect = |text: String| other.fault(Stage::Connect, text);
                let lane = self.lane(pairing.peer, src, &peer).map_err(connect)?;
                if let Gate::Refused(why) = self.lanes.gate(lane) {
                    return Err(connect(why));
                }
                let mut info = self.end.transport.peer(lane).map_err(|e| connect(e.to_string()))?;
                self.lanes.measured(lane, &mut info.lane);
                let (staging, room) = staging_of(&peer, src, &info);
                let theirs = (staging, if gathers { room } else { Bytes::ZERO });
                let steps = self.staging.stager.as_ref().and_then(|s| s.choose(&batch, theirs, &info.lane));
                let batch = bind_read(batch, &info, &self.cache).map_err(unbound)?;
                match steps {
                    Some(steps) => Source::staged(lane, batch, before, steps, theirs.0),
                    None => Source::direct(lane, batch, before),
                }
            };
            sources.insert(src, Box::new(source));
        }
        let terms = Terms {
            assurance: order.assurance,
            engine: peer.engine().clone(),
            priority: order.priority,
            deadline: order.deadline.map(|left| self.now.saturating_add(left)),
        };
        Ok(Pull::new(order.pull, terms, request, order.request.clone(), self.now, sources))
    }

    /// The pull has failed: nothing more is posted, what is in flight is asked to stop.
    fn fail(&mut self, id: PullId, fault: RankFault) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let next = pull.fail(fault);
        self.go_on(id, next);
    }

    fn fail_order(&mut self, order: Order, fault: RankFault) {
        match order {
            Order::Pull(id) => self.fail(id, fault),
            Order::Push(id) => self.fail_push(id, fault),
        }
    }

    fn go_on(&mut self, id: PullId, next: Next) {
        if let Some(pull) = self.pulls.get_mut(&id) {
            let (freed, given_up) = (std::mem::take(&mut pull.freed), std::mem::take(&mut pull.given_up));
            let lost = std::mem::take(&mut pull.lost);
            self.free(freed, id, given_up);
            if lost {
                self.segment_lost();
            }
        }
        if self.pulls.get(&id).is_some_and(|p| p.has_failed()) {
            self.dequeue(Order::Pull(id));
        }
        match next {
            Next::Wait => {}
            Next::Stop(ops) => {
                for op in ops {
                    self.end.cancel(op);
                }
            }
            Next::Permute(src) => self.permute(id, src),
            Next::AllRead => self.zero_and_compare(id),
            Next::Ask(questions) => {
                for (src, windows) in questions {
                    self.out.push_back(FromRank::DigestWanted { pull: id, src, windows });
                }
            }
            Next::End(result) => {
                self.dequeue(Order::Pull(id));
                self.pulls.remove(&id);
                self.out.push_back(FromRank::Pulled { pull: id, result });
            }
        }
    }

    fn zero_and_compare(&mut self, id: PullId) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let regions = self.bytes.then(|| self.cache.regions());
        let next = match zero(self.zeros.as_ref(), &pull.request, regions) {
            Ok(bytes) => pull.compare(bytes, self.now),
            Err(text) => pull.fail(fault(Stage::Zero, text)),
        };
        self.go_on(id, next);
    }

    fn start_digest(&mut self, order: DigestOrder) {
        let (ticket, peer) = (order.ticket, order.pairing.peer);
        match self.plan_digest(order) {
            Ok(digester) => {
                let job = Job { ticket, digester };
                match self.jobs.iter_mut().find(|(p, _)| *p == peer) {
                    Some((_, jobs)) => jobs.push_back(job),
                    None => self.jobs.push_back((peer, VecDeque::from([job]))),
                }
            }
            Err(why) => self.out.push_back(FromRank::Digested { ticket, pieces: Err(why) }),
        }
    }

    fn plan_digest(&mut self, order: DigestOrder) -> Result<RunDigester, String> {
        let batch = self.served(order.pairing, order.dst, order.request)?;
        RunDigester::new(batch, Side::Src, order.windows).map_err(|e| e.to_string())
    }

    /// The batch by which a peer's rank reads from this one.
    fn served(&mut self, pairing: Pairing, dst: RankId, request: Request) -> Result<Arc<BoundedBatch>, String> {
        let Standing::Member(engine) = &self.standing else { return Err("the engine is not complete".into()) };
        let known = self.peers.get(&pairing.peer).ok_or("the order names an unknown engine")?;
        let peer = known.manifest.cache().clone();
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let way = self.acquaintances.serving(engine.cache(), &peer, pairing.compat);
        let direction = way.map_err(|e| text(&e))?;
        direction.agreed_map(pairing.options, pairing.peer_map).map_err(|e| text(&e))?;
        let request = BoundRequest::new(direction.compatible(), request).map_err(|e| text(&e))?;
        let plan = direction.plan(pairing.options, self.who.rank, dst).map_err(|e| text(&e))?;
        let batch = plan.resolve(&request).map_err(|e| text(&e))?;
        let bounded = batch.check(self.cache.lens(), &peer.region_lens(dst));
        Ok(Arc::new(bounded.map_err(|e| text(&e))?))
    }

    fn slice(&self) -> u64 {
        if self.lanes.is_reading() { SLICE_WHILE_PROBING } else { SLICE }
    }

    /// One slice of what peers asked for.
    fn digest_slice(&mut self, bytes: u64) {
        let Some((peer, mut jobs)) = self.jobs.pop_front() else { return };
        if let Some(mut job) = jobs.pop_front() {
            match job.digester.advance(self.cache.regions(), bytes) {
                Ok(false) => jobs.push_back(job),
                Ok(true) => {
                    let pieces = Ok(job.digester.finish());
                    self.out.push_back(FromRank::Digested { ticket: job.ticket, pieces });
                }
                Err(error) => {
                    self.out.push_back(FromRank::Digested { ticket: job.ticket, pieces: Err(error.to_string()) });
                }
            }
        }
        if !jobs.is_empty() {
            self.jobs.push_back((peer, jobs));
        }
    }

    /// One slice of our own side of a comparison.
    fn compare_slice(&mut self, bytes: u64) {
        let Some((&id, pull)) = self.pulls.iter_mut().find(|(_, p)| p.has_work()) else { return };
        let Standing::Member(engine) = &self.standing else { return };
        let next = pull.compare_slice(self.cache.regions(), bytes, engine.cache(), self.who.rank, self.now);
        self.go_on(id, next);
    }

    fn forget(&mut self, digest: Digest) {
        self.jobs.retain(|(peer, _)| *peer != digest);
        let Some(known) = self.peers.remove(&digest) else { return };
        let cache = known.manifest.cache();
        if !self.peers.values().any(|other| other.manifest.cache().digest() == cache.digest()) {
            self.acquaintances.forget(cache);
        }
        self.fail_pushes_to(digest);
        for lane in known.lanes.into_values() {
            let shared = self.peers.values().any(|k| k.lanes.values().any(|l| *l == lane));
            if !shared {
                self.fail_unposted(lane, "the engine was forgotten");
                self.lanes.leave(lane);
                self.end.disconnect(lane);
            }
        }
    }
}

/// The id and length of the staging memory of a peer's rank: the region after those of its manifest, if it has registered one.
fn staging_of(peer: &EngineManifest, rank: RankId, info: &PeerInfo) -> (RegionId, Bytes) {
    let after = peer.cache().rank(rank).map_or(0, |r| r.layout.regions.len());
    let id = RegionId::new(u32::try_from(after).unwrap_or(u32::MAX));
    (id, info.regions.iter().find(|(region, _)| *region == id).map_or(Bytes::ZERO, |(_, len)| *len))
}

/// Zeroes what lies beyond the moved tokens, where there is memory; gives how many bytes.
fn zero(plan: Option<&ZeroPlan>, request: &BoundRequest, regions: Option<&[Region]>) -> Result<Bytes, String> {
    let plan = plan.ok_or("the engine is not complete")?;
    let zeros = plan.resolve(request).map_err(|e| e.to_string())?;
    let Some(regions) = regions else { return Ok(zeros.bytes()) };
    for r in zeros.ranges() {
        let memory = regions.get(r.region.index()).ok_or_else(|| format!("region {} is not registered", r.region))?;
        memory.fill(r.offset, r.len, 0).map_err(|e| e.to_string())?;
    }
    Ok(zeros.bytes())
}

impl std::fmt::Debug for RankSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (engine, rank) = (&self.who.engine, self.who.rank);
        write!(
            f,
            "RankSession({engine} rank {rank}, {} pulls, {} pushes of {} streams, {} digests)",
            self.pulls.len(),
            self.pushes.len(),
            self.streams.len(),
            self.jobs.iter().map(|(_, jobs)| jobs.len()).sum::<usize>()
        )
    }
}
