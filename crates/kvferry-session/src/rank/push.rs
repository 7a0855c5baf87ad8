//! One rank's writes of an order: its destinations, written piece by piece as the source becomes final.
//!
//! A *piece* is what moves between two watermarks, cut into slices. A destination has at most one piece with slices that are not
//! posted: what becomes final meanwhile makes up the next one, however often it was announced. Pieces end in any order; what is
//! complete is told in theirs.
//!
//! | state | made of | piece made | slice posted | slice done | slice bad, fail, stop |
//! |---|---|---|---|---|---|
//! | idle: all pieces posted, not whole | | queued | - | idle, or over if whole | stopping, or ended |
//! | queued: the last piece has slices left | a piece that isn't empty | - | queued, or idle | queued | stopping, or ended |
//! | over: whole, and nothing in flight | whole | - | - | - | ended |
//! | stopping: failed, some in flight | | - | - | stopping, or ended | stopping |
//!
//! The order ends when all of its destinations are over, or when it has failed and nothing of it is in flight; once, as it is
//! forgotten then.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::plan::{ItemClass, PairPlan};
use kvferry_geometry::request::BoundRequest;
use kvferry_geometry::units::{Bytes, RankId, Tokens};
use kvferry_geometry::watermarks::{Watermark, Watermarks};
use kvferry_proto::names::EngineId;
use kvferry_proto::push::{PushOrder, WriteReport, WriterEnd, WriterReport};
use kvferry_proto::rank::{RankFault, Stage};
use kvferry_transport::{OpId, Outcome, PeerId};

use super::admission::Wanted;
use super::orders::{Faults, Order, fault, fault_of};
use super::reading::Reading;

/// What the session must do next for a push.
#[derive(Debug)]
pub(super) enum Next {
    /// Nothing: something is awaited.
    Wait,
    /// Ask these operations to stop.
    Stop(Vec<OpId>),
    /// The push has ended.
    End(WriterEnd),
}

/// What moves to one destination between two watermarks.
#[derive(Debug)]
struct Piece {
    slices: Reading,
    /// What is complete with it and all pieces before it.
    to: Arc<Watermarks>,
    bytes: Bytes,
    /// Descriptors as planned; neighbours may also merge across rows, and who has moved them knows.
    descriptors: u64,
}

/// One rank that is written to.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) plan: Arc<PairPlan>,
    /// Taken when there is something to write.
    pub(super) lane: Option<PeerId>,
    /// How far there are pieces.
    made: Arc<Watermarks>,
    /// How far all pieces are complete.
    done: Arc<Watermarks>,
    pieces: VecDeque<Piece>,
    bytes: Bytes,
    descriptors: u64,
    /// What carried the bytes, in words.
    carried: String,
    /// When the first slice was posted, and how long it took from then until the last one so far was done.
    since: Option<Duration>,
    took: Duration,
}

impl Target {
    /// One of which nothing is written yet.
    pub(super) fn new(plan: Arc<PairPlan>, none: Arc<Watermarks>) -> Self {
        Self {
            plan,
            lane: None,
            made: none.clone(),
            done: none,
            pieces: VecDeque::new(),
            bytes: Bytes::ZERO,
            descriptors: 0,
            carried: String::new(),
            since: None,
            took: Duration::ZERO,
        }
    }

    /// How far there are pieces, if another may be made: everything so far is posted, and it isn't all.
    pub(super) fn wants(&self) -> Option<&Arc<Watermarks>> {
        (!self.made.is_whole() && self.next().is_none()).then_some(&self.made)
    }

    /// Whether something will be posted, as far as it can be known.
    pub(super) fn is_unposted(&self) -> bool {
        !self.made.is_whole() || self.next().is_some()
    }

    fn next(&self) -> Option<&Reading> {
        self.pieces.back().map(|p| &p.slices).filter(|s| s.next().is_some())
    }

    /// The next piece: `batch` moves to `to`. It may be empty.
    fn add(&mut self, lane: Option<PeerId>, batch: &Arc<BoundedBatch>, to: Arc<Watermarks>, slice: Bytes) {
        self.made = to.clone();
        let Some(lane) = lane else {
            // Nothing moves; but it is complete only with what comes before it.
            match self.pieces.back_mut() {
                Some(last) => last.to = to,
                None => self.done = to,
            }
            return;
        };
        self.lane = Some(lane);
        let (bytes, descriptors) = (batch.bytes(), batch.batch().descriptors());
        self.pieces.push_back(Piece { slices: Reading::new(lane, batch, slice), to, bytes, descriptors });
    }

    /// Counts the pieces that are complete with all before them.
    fn settle(&mut self) {
        while let Some(piece) = self.pieces.pop_front_if(|p| p.slices.is_over()) {
            self.bytes = Bytes::new(self.bytes.get().saturating_add(piece.bytes.get()));
            let descriptors = piece.descriptors.min(piece.slices.descriptors().max(1));
            self.descriptors = self.descriptors.saturating_add(descriptors);
            self.done = piece.to;
        }
    }

    /// The first token that is not in place, of the items of which tokens are written; `None` where there are none.
    fn tokens_done(&self) -> Option<Tokens> {
        let of_class = |c: &ItemClass| {
            c.retention()?;
            let each = c.entry_tokens().get().max(1);
            let marks = c.sources().iter().map(|&item| self.done.get(item).unwrap_or(Watermark::NONE));
            marks.min().map(|mark| match mark {
                // An entry is written with the last of its tokens.
                Watermark::Upto(tokens) => Tokens::new(tokens.get() / each * each),
                Watermark::Whole => Tokens::new(u64::MAX),
            })
        };
        self.plan.classes().iter().filter_map(of_class).min()
    }
}

#[derive(Debug)]
pub(super) struct Push {
    pub(super) order: PushOrder,
    /// To whom.
    engine: EngineId,
    /// Whether it writes what a stream announces; else what the order lists is final.
    pub(super) streamed: bool,
    /// The request, as far as the source's blocks are known; `None` when that has changed.
    pub(super) request: Option<Arc<BoundRequest>>,
    /// Boxed: a node of the tree has room for eleven, and mostly there is one.
    pub(super) targets: BTreeMap<RankId, Box<Target>>,
    started: Duration,
    /// When there was something to write, when the first slice of it was posted, and how many were.
    waits: Option<Duration>,
    posted: Option<Duration>,
    slices: u32,
    faults: Faults,
    /// The last progress that was told.
    told: Tokens,
}

impl Push {
    pub(super) fn new(
        order: PushOrder,
        engine: EngineId,
        streamed: bool,
        targets: BTreeMap<RankId, Box<Target>>,
        started: Duration,
    ) -> Self {
        Self {
            order,
            engine,
            streamed,
            request: None,
            targets,
            started,
            waits: None,
            posted: None,
            slices: 0,
            faults: Faults::default(),
            told: Tokens::ZERO,
        }
    }

    /// When nothing of it is posted any more.
    pub(super) fn deadline(&self) -> Duration {
        self.started.saturating_add(self.order.within)
    }

    /// The same, if something will be.
    pub(super) fn late_at(&self) -> Option<Duration> {
        let waits = !self.has_failed() && self.targets.values().any(|t| t.is_unposted());
        waits.then(|| self.deadline())
    }

    /// Why nothing of it may be posted now, if that is so.
    pub(super) fn too_late(&self, now: Duration) -> Option<RankFault> {
        let (within, since) = (self.order.within, now.saturating_sub(self.started));
        let text = || {
            format!("the grant lasts {within:?} and {since:?} have passed since it was ordered: nothing more is posted")
        };
        (now >= self.deadline()).then(|| fault(Stage::Submit, text()))
    }

    /// Whether it has failed, and only waits for what is in flight.
    pub(super) fn has_failed(&self) -> bool {
        self.faults.is_some()
    }

    /// To whom it writes.
    pub(super) fn engine(&self) -> &EngineId {
        &self.engine
    }

    /// The destination that will be written to over a lane, if there is one.
    pub(super) fn still_uses(&self, lane: PeerId) -> Option<RankId> {
        let uses = |t: &Target| t.lane == Some(lane) && t.is_unposted();
        self.targets.iter().find(|(_, t)| uses(t)).map(|(&dst, _)| dst)
    }

    /// What moves to a destination up to `to`, over this lane unless it is nothing.
    pub(super) fn add(
        &mut self,
        dst: RankId,
        lane: Option<PeerId>,
        batch: &Arc<BoundedBatch>,
        to: Arc<Watermarks>,
        (slice, now): (Bytes, Duration),
    ) {
        let Some(target) = self.targets.get_mut(&dst) else { return };
        target.add(lane, batch, to, slice);
        if lane.is_some() {
            self.waits.get_or_insert(now);
        }
    }

    /// The destinations that have a slice to post, over which lane, and what is wanted of the line.
    pub(super) fn wanted(&self) -> impl Iterator<Item = (RankId, PeerId, Wanted)> {
        let (peer, priority, deadline) = (&self.engine, self.order.priority, Some(self.deadline()));
        self.targets.iter().filter(|_| !self.has_failed()).filter_map(move |(&dst, target)| {
            let slices = target.next()?;
            Some((dst, slices.lane(), Wanted { peer: peer.clone(), priority, deadline, next: slices.next_bytes()? }))
        })
    }

    /// The slice of a destination that is to be posted next, and over which lane.
    pub(super) fn next_slice(&self, dst: RankId) -> Option<(PeerId, Arc<BoundedBatch>)> {
        let slices = self.targets.get(&dst)?.next()?;
        Some((slices.lane(), slices.next()?.clone()))
    }

    /// That slice was posted; gives the bytes of the one after it.
    pub(super) fn on_posted(&mut self, dst: RankId, op: OpId, now: Duration) -> Option<Bytes> {
        let target = self.targets.get_mut(&dst)?;
        let slices = &mut target.pieces.back_mut()?.slices;
        slices.posted(op, now);
        target.since.get_or_insert(now);
        self.posted.get_or_insert(now);
        self.slices = self.slices.saturating_add(1);
        slices.next_bytes()
    }

    /// A slice has ended; in words, over which lane, or why it failed.
    pub(super) fn on_completed(
        &mut self,
        (dst, op): (RankId, OpId),
        outcome: &Outcome,
        said: String,
        now: Duration,
    ) -> Next {
        let Some(target) = self.targets.get_mut(&dst) else { return Next::Wait };
        let Some(piece) = target.pieces.iter_mut().find(|p| p.slices.holds(op)) else { return Next::Wait };
        piece.slices.on_completed(op, outcome);
        if let Some(fault) = fault_of(outcome, Stage::Write, Order::Push(self.order.push).other(dst), &said) {
            return self.fail(fault);
        }
        target.carried = said;
        target.took = now.saturating_sub(target.since.unwrap_or(now));
        target.settle();
        self.after_pieces(now)
    }

    /// Ends when everything is written; or, if it has failed, when nothing is in flight.
    pub(super) fn after_pieces(&mut self, now: Duration) -> Next {
        if self.has_failed() {
            return self.stop();
        }
        if !self.targets.values().all(|t| t.done.is_whole()) {
            return Next::Wait;
        }
        let write = |dst: RankId, t: &Target| WriteReport {
            dst,
            bytes: t.bytes,
            descriptors: t.descriptors,
            lane: t.carried.clone(),
            took: t.took,
        };
        let queued = self.posted.zip(self.waits).map_or(Duration::ZERO, |(posted, since)| posted.saturating_sub(since));
        Next::End(Ok(WriterReport {
            writes: self.targets.iter().map(|(&dst, t)| write(dst, t)).collect(),
            queued,
            slices: self.slices,
            took: now.saturating_sub(self.started),
        }))
    }

    /// The first token that is not in place, if that is wanted and has grown.
    pub(super) fn progress(&mut self) -> Option<Tokens> {
        if !self.order.progress || self.has_failed() {
            return None;
        }
        // Who writes no tokens has none to wait for.
        let done = self.targets.values().filter_map(|t| t.tokens_done()).min();
        let done = done.unwrap_or(self.order.request.tokens).min(self.order.request.tokens);
        (done > self.told).then(|| {
            self.told = done;
            done
        })
    }

    /// Nothing more is posted. Ends when nothing is in flight.
    pub(super) fn fail(&mut self, fault: RankFault) -> Next {
        self.faults.add(fault);
        self.stop()
    }

    fn stop(&mut self) -> Next {
        let (mut ops, mut busy) = (Vec::new(), false);
        for piece in self.targets.values_mut().flat_map(|t| &mut t.pieces) {
            ops.append(&mut piece.slices.stop());
            busy |= !piece.slices.is_over();
        }
        if !ops.is_empty() {
            return Next::Stop(ops);
        }
        if busy {
            return Next::Wait;
        }
        self.faults.told().map_or(Next::Wait, |fault| Next::End(Err(fault)))
    }
}
