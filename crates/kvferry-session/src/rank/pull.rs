//! One rank's share of a request: its sources, read, then compared if that was asked for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::request::{BoundRequest, Request};
use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{Bytes, RankId, RegionId};
use kvferry_proto::names::EngineId;
use kvferry_proto::peer::{NotGathered, PieceDigest, Window};
use kvferry_proto::rank::{Assurance, BadBlock, PullId, RankFault, RankReport, SourceReport, Stage};
use kvferry_transport::{OpId, Outcome, PeerId, Region};

use super::admission::Wanted;
use super::compare::{Compare, Progress};
use super::orders::{Faults, Order, fault_of};
use super::reading::Reading;
use super::stage::Steps;
use crate::staging::Segment;

/// What the session must do next for a pull.
#[derive(Debug)]
pub(super) enum Next {
    /// Nothing: something is awaited.
    Wait,
    /// Ask these operations to stop.
    Stop(Vec<OpId>),
    /// A source's bytes are staged: permute them into place, then [`Pull::on_permuted`].
    Permute(RankId),
    /// All sources are read: zero, then [`Pull::compare`].
    AllRead,
    /// Ask the owner for these digests.
    Ask(Vec<(RankId, Vec<Window>)>),
    /// The pull has ended.
    End(Result<RankReport, RankFault>),
}

#[derive(Debug)]
pub(super) enum SourceState {
    /// Waiting for a segment of staging memory.
    Waiting(PeerId),
    /// Waiting until the source's rank has gathered, in its staging memory of this id.
    Asking { lane: PeerId, staging: RegionId },
    /// Waiting for its lane: this batch will be read.
    Queued(PeerId, Arc<BoundedBatch>),
    /// Being posted, slice by slice.
    Reading(Box<Reading>),
    /// Staged, and being permuted into place.
    Permuting { since: Duration },
    /// In place.
    Read { took: Duration },
    /// In place, and being compared.
    Comparing { took: Duration, compare: Box<Compare> },
    /// In place and equal to the producer's.
    Compared { took: Duration },
    /// Failed or stopped.
    Ended,
}

impl SourceState {
    fn is_under_way(&self) -> bool {
        let not_posted = matches!(self, Self::Waiting(_) | Self::Asking { .. } | Self::Queued(..));
        not_posted || matches!(self, Self::Reading(_) | Self::Permuting { .. })
    }
}

#[derive(Debug)]
pub(super) struct Source {
    /// The bytes as they go straight from place to place: what is compared, however they came.
    pub(super) batch: Arc<BoundedBatch>,
    pub(super) state: SourceState,
    pub(super) steps: Option<Steps>,
    before: u64,
    after: u64,
    rows: u64,
    /// What carried the bytes, in words.
    carried: String,
}

impl Source {
    pub(super) fn direct(lane: PeerId, batch: Arc<BoundedBatch>, before: u64) -> Self {
        let (after, rows) = (batch.batch().descriptors(), batch.batch().rows());
        Self {
            state: SourceState::Queued(lane, batch.clone()),
            batch,
            steps: None,
            before,
            after,
            rows,
            carried: String::new(),
        }
    }

    /// `staging` is the id of the source's staging memory.
    pub(super) fn staged(lane: PeerId, batch: Arc<BoundedBatch>, before: u64, steps: Steps, staging: RegionId) -> Self {
        let (after, rows) = steps.size();
        let state = match steps.place {
            Place::Source => SourceState::Asking { lane, staging },
            _ => SourceState::Waiting(lane),
        };
        Self { batch, state, steps: Some(steps), before, after, rows, carried: String::new() }
    }

    /// One that waits to be staged is not.
    pub(super) fn go_directly(&mut self) {
        if let SourceState::Waiting(lane) | SourceState::Asking { lane, .. } = self.state {
            *self = Self::direct(lane, self.batch.clone(), self.before);
        }
    }

    /// Nothing of it is in flight any more: gives its segment and whether that may still be written.
    fn end(&mut self, in_doubt: bool) -> (Option<Segment>, bool) {
        self.state = SourceState::Ended;
        (self.steps.as_mut().and_then(|s| s.segment.take()), in_doubt)
    }

    fn is_permuted(&self) -> bool {
        self.steps.as_ref().is_some_and(|s| s.place == Place::Destination)
    }

    /// One whose rank has written the bytes here.
    pub(super) fn written(batch: Arc<BoundedBatch>, before: u64) -> Self {
        let (after, rows) = (batch.batch().descriptors(), batch.batch().rows());
        let state = SourceState::Read { took: Duration::ZERO };
        Self { state, batch, steps: None, before, after, rows, carried: String::new() }
    }

    /// A named source of which this request needs nothing.
    pub(super) fn nothing(batch: Arc<BoundedBatch>) -> Self {
        let state = SourceState::Read { took: Duration::ZERO };
        Self { batch, state, steps: None, before: 0, after: 0, rows: 0, carried: String::new() }
    }
}

/// On what terms a request is read.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) assurance: Assurance,
    /// From whom.
    pub(super) engine: EngineId,
    pub(super) priority: u8,
    /// When nobody waits for it any more.
    pub(super) deadline: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Pull {
    order: Order,
    terms: Terms,
    pub(super) request: BoundRequest,
    /// As it was ordered.
    ordered: Arc<Request>,
    started: Duration,
    /// When the first slice was posted, and how many were.
    posted: Option<Duration>,
    slices: u32,
    /// Boxed: a node of the tree has room for eleven, and mostly there is one.
    pub(super) sources: BTreeMap<RankId, Box<Source>>,
    faults: Faults,
    zeroed: Bytes,
    bad: Vec<BadBlock>,
    /// Segments that nothing touches any more.
    pub(super) freed: Vec<Segment>,
    /// Sources that don't wait for a segment any more.
    pub(super) given_up: Vec<RankId>,
    /// Whether a segment was lost to a read in doubt.
    pub(super) lost: bool,
}

impl Pull {
    pub(super) fn new(
        id: PullId,
        terms: Terms,
        request: BoundRequest,
        ordered: Arc<Request>,
        started: Duration,
        sources: BTreeMap<RankId, Box<Source>>,
    ) -> Self {
        Self {
            order: Order::Pull(id),
            terms,
            request,
            ordered,
            started,
            posted: None,
            slices: 0,
            sources,
            faults: Faults::default(),
            zeroed: Bytes::ZERO,
            bad: Vec::new(),
            freed: Vec::new(),
            given_up: Vec::new(),
            lost: false,
        }
    }

    /// Whether a source waits for its lane.
    pub(super) fn has_queued(&self) -> bool {
        !self.faults.is_some() && self.sources.values().any(|s| matches!(s.state, SourceState::Queued(..)))
    }

    /// When nobody waits for it any more.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.terms.deadline
    }

    /// The same, if nothing of it was posted and something will be: then it is late.
    pub(super) fn late_at(&self) -> Option<Duration> {
        let waits = self.posted.is_none() && self.sources.values().any(|s| s.state.is_under_way());
        self.terms.deadline.filter(|_| waits)
    }

    /// Whether it has failed, and only waits for what is in flight.
    pub(super) fn has_failed(&self) -> bool {
        self.faults.is_some()
    }

    /// The source that will be read over a lane, if there is one.
    pub(super) fn still_uses(&self, peer: PeerId) -> Option<RankId> {
        let uses = |state: &SourceState| match state {
            SourceState::Waiting(lane) | SourceState::Asking { lane, .. } | SourceState::Queued(lane, _) => {
                *lane == peer
            }
            SourceState::Reading(reading) => reading.next().is_some() && reading.lane() == peer,
            _ => false,
        };
        self.sources.iter().find(|(_, s)| uses(&s.state)).map(|(&src, _)| src)
    }

    /// How long nothing of it was posted.
    pub(super) fn waited(&self, now: Duration) -> Duration {
        now.saturating_sub(self.started)
    }

    /// From whom it reads.
    pub(super) fn engine(&self) -> &EngineId {
        &self.terms.engine
    }

    /// A source's lane is open: its batch is read in slices of so many bytes. Gives what is wanted of the line.
    pub(super) fn read(&mut self, src: RankId, slice: Bytes) -> Option<Wanted> {
        let source = self.sources.get_mut(&src)?;
        let SourceState::Queued(lane, batch) = &source.state else { return None };
        let reading = Reading::new(*lane, batch, slice);
        let next = reading.next_bytes();
        source.state = SourceState::Reading(Box::new(reading));
        let Terms { engine, priority, deadline, .. } = &self.terms;
        Some(Wanted { peer: engine.clone(), priority: *priority, deadline: *deadline, next: next? })
    }

    /// The slice of a source that is to be posted next, and over which lane.
    pub(super) fn next_slice(&self, src: RankId) -> Option<(PeerId, Arc<BoundedBatch>)> {
        match &self.sources.get(&src)?.state {
            SourceState::Reading(reading) => Some((reading.lane(), reading.next()?.clone())),
            _ => None,
        }
    }

    /// That slice was posted; gives the bytes of the one after it.
    pub(super) fn on_posted(&mut self, src: RankId, op: OpId, now: Duration) -> Option<Bytes> {
        let SourceState::Reading(reading) = &mut self.sources.get_mut(&src)?.state else { return None };
        reading.posted(op, now);
        self.posted.get_or_insert(now);
        self.slices = self.slices.saturating_add(1);
        reading.next_bytes()
    }

    /// Whether bytes are to be digested here.
    pub(super) fn has_work(&self) -> bool {
        self.sources.values().any(|s| matches!(&s.state, SourceState::Comparing { compare, .. } if compare.has_work()))
    }

    /// A slice has ended; in words, over which lane, or why it failed.
    pub(super) fn on_completed(
        &mut self,
        (src, op): (RankId, OpId),
        outcome: &Outcome,
        said: String,
        now: Duration,
    ) -> Next {
        let Some(source) = self.sources.get_mut(&src) else { return Next::Wait };
        let SourceState::Reading(reading) = &mut source.state else { return Next::Wait };
        reading.on_completed(op, outcome);
        if let Some(fault) = fault_of(outcome, Stage::Read, self.order.other(src), &said) {
            return self.fail(fault);
        }
        source.carried = said;
        self.after_slice(src, now)
    }

    /// A slice of a source is done: so is the source, if it was the last.
    fn after_slice(&mut self, src: RankId, now: Duration) -> Next {
        if self.faults.is_some() {
            return self.stop();
        }
        let Some(source) = self.sources.get_mut(&src) else { return Next::Wait };
        let SourceState::Reading(reading) = &source.state else { return Next::Wait };
        if !reading.is_over() {
            return Next::Wait;
        }
        // What slices cut is one nevertheless; a transport may join more.
        source.after = source.after.min(reading.descriptors().max(1));
        let since = reading.since().unwrap_or(now);
        if source.is_permuted() {
            source.state = SourceState::Permuting { since };
            return Next::Permute(src);
        }
        source.state = SourceState::Read { took: now.saturating_sub(since) };
        self.after_reads()
    }

    /// A source gets the segment that it waits for; gives it back where it doesn't wait (any more).
    pub(super) fn on_segment(
        &mut self,
        src: RankId,
        segment: Segment,
        wire: impl FnOnce(&Steps, PeerId) -> Result<Arc<BoundedBatch>, RankFault>,
    ) -> Result<Next, Segment> {
        let Some(source) = self.sources.get_mut(&src) else { return Err(segment) };
        let (&SourceState::Waiting(lane), Some(steps)) = (&source.state, &mut source.steps) else {
            return Err(segment);
        };
        steps.segment = Some(segment);
        match wire(steps, lane) {
            Ok(batch) => {
                source.state = SourceState::Queued(lane, batch);
                Ok(Next::Wait)
            }
            Err(fault) => {
                source.state = SourceState::Ended;
                self.freed.extend(steps.segment.take());
                Ok(self.fail(fault))
            }
        }
    }

    /// A source's rank has gathered, or has not.
    pub(super) fn on_gathered(
        &mut self,
        src: RankId,
        result: Result<Bytes, NotGathered>,
        wire: impl FnOnce(&Steps, PeerId, RegionId, Bytes) -> Result<Arc<BoundedBatch>, RankFault>,
    ) -> Next {
        let Some(source) = self.sources.get_mut(&src) else { return Next::Wait };
        let (&SourceState::Asking { lane, staging }, Some(steps)) = (&source.state, &source.steps) else {
            return Next::Wait;
        };
        match result.map(|at| wire(steps, lane, staging, at)) {
            Ok(Ok(batch)) => source.state = SourceState::Queued(lane, batch),
            Ok(Err(fault)) => {
                source.state = SourceState::Ended;
                return self.fail(fault);
            }
            Err(_) => source.go_directly(),
        }
        Next::Wait
    }

    /// What a source had staged is in place, or can't be brought there: then nothing was touched.
    pub(super) fn on_permuted(&mut self, src: RankId, result: Result<(), String>, now: Duration) -> Next {
        let Some(source) = self.sources.get_mut(&src) else { return Next::Wait };
        let SourceState::Permuting { since } = source.state else { return Next::Wait };
        self.freed.extend(source.steps.as_mut().and_then(|s| s.segment.take()));
        match result {
            Ok(()) => {
                source.state = SourceState::Read { took: now.saturating_sub(since) };
                self.after_reads()
            }
            Err(text) => {
                source.state = SourceState::Ended;
                let text = format!("source rank {src}: {text}");
                self.fail(RankFault { stage: Stage::Permute, text, in_doubt: false, bad: Vec::new() })
            }
        }
    }

    /// Goes on when nothing is in flight or queued any more.
    pub(super) fn after_reads(&mut self) -> Next {
        let waiting = |s: &Source| s.state.is_under_way();
        if self.faults.is_some() {
            return self.stop();
        }
        if self.sources.values().any(|s| waiting(s)) {
            return Next::Wait;
        }
        let all = self.sources.values().all(|s| matches!(s.state, SourceState::Read { .. }));
        if all { Next::AllRead } else { Next::Wait }
    }

    /// Ends when nothing is in flight.
    pub(super) fn fail(&mut self, fault: RankFault) -> Next {
        self.faults.add(fault);
        self.stop()
    }

    fn stop(&mut self) -> Next {
        let (mut ops, mut busy) = (Vec::new(), false);
        for (&src, source) in &mut self.sources {
            match &mut source.state {
                SourceState::Reading(reading) => {
                    ops.append(&mut reading.stop());
                    if !reading.is_over() {
                        busy = true;
                        continue;
                    }
                    let in_doubt = reading.is_in_doubt();
                    match source.end(in_doubt) {
                        (lent, true) => self.lost |= lent.is_some(),
                        (lent, false) => self.freed.extend(lent),
                    }
                }
                // Somebody writes our blocks; it won't be long.
                SourceState::Permuting { .. } => busy = true,
                SourceState::Waiting(_) => {
                    source.state = SourceState::Ended;
                    self.given_up.push(src);
                }
                SourceState::Queued(..) => {
                    source.state = SourceState::Ended;
                    self.freed.extend(source.steps.as_mut().and_then(|s| s.segment.take()));
                }
                SourceState::Asking { .. } | SourceState::Comparing { .. } => source.state = SourceState::Ended,
                _ => {}
            }
        }
        if !ops.is_empty() {
            return Next::Stop(ops);
        }
        if busy {
            return Next::Wait;
        }
        self.faults.told().map_or(Next::Wait, |fault| Next::End(Err(fault)))
    }

    /// All is read and zeroed: compares, or ends.
    pub(super) fn compare(&mut self, zeroed: Bytes, now: Duration) -> Next {
        self.zeroed = zeroed;
        if self.terms.assurance != Assurance::Full {
            return self.end_if_done(now);
        }
        let mut questions = Vec::new();
        for (&src, source) in &mut self.sources {
            let SourceState::Read { took } = source.state else { continue };
            let bytes = source.batch.bytes().get();
            if bytes == 0 {
                source.state = SourceState::Compared { took };
                continue;
            }
            match Compare::start(source.batch.clone()) {
                Ok((compare, windows)) => {
                    source.state = SourceState::Comparing { took, compare: Box::new(compare) };
                    questions.push((src, windows));
                }
                Err(text) => return self.fail(compare_fault(text, Vec::new())),
            }
        }
        if questions.is_empty() { self.end_if_done(now) } else { Next::Ask(questions) }
    }

    /// The producer's digests have come, or won't.
    pub(super) fn on_theirs(&mut self, src: RankId, pieces: Result<Vec<PieceDigest>, String>) -> Next {
        let Some(SourceState::Comparing { compare, .. }) = self.sources.get_mut(&src).map(|s| &mut s.state) else {
            return Next::Wait;
        };
        match pieces {
            Ok(pieces) => {
                compare.on_theirs(pieces);
                Next::Wait
            }
            Err(why) => {
                let text = format!("source rank {src} could not digest its bytes: {why}");
                self.fail(compare_fault(text, Vec::new()))
            }
        }
    }

    /// Does a slice of our own side, and judges what both sides have done.
    pub(super) fn compare_slice(
        &mut self,
        regions: &[Region],
        budget: u64,
        own: &Manifest,
        rank: RankId,
        now: Duration,
    ) -> Next {
        let working = self.sources.iter_mut().find_map(|(src, s)| match &mut s.state {
            SourceState::Comparing { compare, took } if compare.has_work() => Some((*src, *took, compare)),
            _ => None,
        });
        let Some((src, took, compare)) = working else { return Next::Wait };
        match compare.advance(regions, budget, src, (own, rank), &self.ordered.dst) {
            Ok(Progress::Working) => Next::Wait,
            Ok(Progress::Ask(windows)) => Next::Ask(vec![(src, windows)]),
            Ok(Progress::Equal) => {
                if let Some(source) = self.sources.get_mut(&src) {
                    source.state = SourceState::Compared { took };
                }
                self.end_if_done(now)
            }
            Ok(Progress::Differ(bad)) => {
                if let Some(source) = self.sources.get_mut(&src) {
                    source.state = SourceState::Ended;
                }
                self.bad.extend(bad);
                self.end_if_done(now)
            }
            Err(text) => self.fail(compare_fault(text, Vec::new())),
        }
    }

    fn end_if_done(&mut self, now: Duration) -> Next {
        if self.sources.values().any(|s| matches!(s.state, SourceState::Comparing { .. })) {
            return Next::Wait;
        }
        if self.sources.values().any(|s| matches!(s.state, SourceState::Ended)) {
            let bad = std::mem::take(&mut self.bad);
            return Next::End(Err(compare_fault("bytes differ from the producer's".into(), bad)));
        }
        let mut compared = 0;
        let sources = self.sources.iter().map(|(&src, s)| {
            let took = match s.state {
                SourceState::Compared { took } => {
                    compared += s.batch.bytes().get();
                    took
                }
                SourceState::Read { took } => took,
                _ => Duration::ZERO,
            };
            SourceReport {
                src,
                bytes: s.batch.bytes(),
                rows: s.rows,
                descriptors_before: s.before,
                descriptors_after: s.after,
                place: s.steps.as_ref().map_or(Place::Direct, |s| s.place),
                lane: s.carried.clone(),
                took,
            }
        });
        let sources = sources.collect();
        Next::End(Ok(RankReport {
            sources,
            zeroed: self.zeroed,
            compared: Bytes::new(compared),
            queued: self.posted.map_or(Duration::ZERO, |posted| posted.saturating_sub(self.started)),
            slices: self.slices,
            took: now.saturating_sub(self.started),
        }))
    }
}

fn compare_fault(text: String, bad: Vec<BadBlock>) -> RankFault {
    RankFault { stage: Stage::Compare, text, in_doubt: false, bad }
}
