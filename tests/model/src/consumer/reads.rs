//! The reads of a consumer's ranks.
//!
//! Of a rank (`kvferry-session/src/rank/pull.rs`) there is a read that was ordered: its bytes come at some moment, from one source
//! after the other, and it ends once, with all that was in flight.

use std::time::Duration;

use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_proto::names::Attempt;
use kvferry_proto::rank::{PullId, RankReport, SourceReport, Stage};
use kvferry_proto::request::{Granted, RankResult, Step};

use super::{At, Phase, Why, fault};
use crate::fault::Fault;
use crate::producer::{Content, block_of};
use crate::rules::Rule;

/// A rank's share of a request, under way.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Read {
    pub(crate) attempt: Attempt,
    pub(crate) producer: usize,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// From whom it has still to read, and from whom it has.
    pub(crate) left: Vec<RankId>,
    pub(crate) done: Vec<RankId>,
    pub(crate) course: Course,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Course {
    Runs,
    Cancelled,
    /// It never ends.
    Hangs,
}

/// How a rank's read ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum How {
    /// All was read.
    Complete,
    /// A source could not be read.
    Failed,
    /// It was told to stop, and has.
    Cancelled,
    /// Nobody knows whether it has; of writes.
    InDoubt,
}

fn report(sources: &[RankId]) -> RankResult {
    let source = |&src: &RankId| SourceReport {
        src,
        bytes: Bytes::ZERO,
        rows: 0,
        descriptors_before: 0,
        descriptors_after: 0,
        place: Place::Direct,
        lane: String::new(),
        took: Duration::ZERO,
    };
    Ok(RankReport {
        sources: sources.iter().map(source).collect(),
        zeroed: Bytes::ZERO,
        compared: Bytes::ZERO,
        queued: Duration::ZERO,
        slices: 0,
        took: Duration::ZERO,
    })
}

impl At<'_> {
    /// All named ranks are ordered to read; one that isn't there makes the others stop.
    pub(super) fn read(&mut self, id: PullId, granted: Granted) {
        let (w, number) = (self.w, self.number);
        let Some(engine) = w.consumers.get(number) else { return };
        let Some(plan) = w.plan(id) else { return };
        let Some(pull) = self.pull(id) else { return };
        let (attempt, pushed) = (pull.attempt, pull.push);
        // What was written is there.
        let Some(from) = block_of(granted.groups()).or(pushed.then_some(0)) else { return };
        let (_, Some(map)) = w.map(engine, pull.fence.lease, attempt) else { return };
        let producer = w.leases.get(plan.lease).map_or(0, |l| l.producer);
        let reading = granted.read(map);
        let named: Vec<RankId> = reading.pending().collect();
        self.put(id, Phase::Reading(reading));
        if self.s.given_up.contains(&id) {
            self.s.broken.insert(Rule::GivenUpIsOver);
        }
        let mut absent = Vec::new();
        for rank in named {
            let Some(c) = self.c() else { return };
            if c.lost == Some(rank) {
                absent.push(rank);
                continue;
            }
            let (mut left, mut done): (Vec<RankId>, _) = (map.sources_of(rank).collect(), Vec::new());
            if pushed {
                std::mem::swap(&mut left, &mut done);
            } else {
                c.memory.retain(|(of, block, _), _| (*of, *block) != (rank, plan.block));
            }
            let read = Read { attempt, producer, from, to: plan.block, left, done, course: Course::Runs };
            let before = c.reads.iter().any(|((_, pull), read)| *pull == id && read.attempt != attempt);
            c.reads.insert((rank, id), read);
            if before {
                self.s.broken.insert(Rule::StoppedBeforeRetry);
            }
        }
        for rank in absent {
            self.on_pulled(rank, id, Err(fault(Stage::Read, false)));
        }
    }

    /// A piece of a read arrives: whatever is there now.
    pub(crate) fn copy(&mut self, rank: RankId, id: PullId) {
        let Some(read) = self.c().and_then(|c| c.reads.get_mut(&(rank, id))) else { return };
        if read.left.is_empty() {
            return;
        }
        let src = read.left.remove(0);
        read.done.push(src);
        let (producer, from, to) = (read.producer, read.from, read.to);
        let content = self.s.producers.get(producer).map_or(Content::Other, |p| p.content(src, from));
        if let Some(c) = self.c() {
            c.memory.insert((rank, to, src), content);
        }
    }

    /// A read ends, and its rank says so.
    pub(crate) fn finish(&mut self, rank: RankId, id: PullId, how: How) -> Option<RankResult> {
        let read = self.c()?.reads.remove(&(rank, id))?;
        let result = match how {
            How::Complete => report(&read.done),
            How::Failed if self.w.is(Fault::FaultIsFine) => {
                let all: Vec<RankId> = read.done.iter().chain(&read.left).copied().collect();
                report(&all)
            }
            How::Failed => Err(fault(Stage::Read, false)),
            How::InDoubt => Err(fault(Stage::Read, true)),
            How::Cancelled => Err(fault(Stage::Cancelled, false)),
        };
        self.on_pulled(rank, id, result.clone());
        Some(result)
    }

    pub(crate) fn on_pulled(&mut self, rank: RankId, id: PullId, result: RankResult) {
        let failed = result.is_err();
        let (reading, stopping) = match self.state(id) {
            Some(Phase::Reading(reading)) => (reading, None),
            Some(Phase::Stopping { reading, why, until }) => (reading, Some((why, until))),
            Some(_) => return,
            None => {
                if !matches!(&result, Err(fault) if fault.in_doubt) {
                    self.stopped(id, rank);
                }
                return;
            }
        };
        let first = self.w.is(Fault::FirstRankEndsAll);
        match (reading.on_rank(rank, result), stopping) {
            (Step::Next(ended), stopping) => self.reads_ended(id, ended, stopping.map_or(Why::Ranks, |s| s.0)),
            (Step::Waiting(reading), None) if !failed && first => {
                let mut ended = reading;
                loop {
                    let Some(next) = ended.pending().next() else { return };
                    let sources: Vec<RankId> = self.sources(id, next);
                    match ended.on_rank(next, report(&sources)) {
                        Step::Next(ended) => return self.reads_ended(id, ended, Why::Ranks),
                        Step::Waiting(same) | Step::Ignored(same) => ended = same,
                    }
                }
            }
            (Step::Waiting(reading), None) if failed && self.w.is(Fault::RetryBeforeStopped) => {
                let ended = reading.end_pending(&fault(Stage::Cancelled, false));
                self.reads_ended(id, ended, Why::Ranks);
            }
            (Step::Ignored(reading) | Step::Waiting(reading), Some((why, until))) => {
                self.put(id, Phase::Stopping { reading, why, until });
            }
            (Step::Waiting(reading), None) if failed => self.stop_ranks(id, reading, Why::Ranks),
            (Step::Ignored(reading) | Step::Waiting(reading), None) => self.put(id, Phase::Reading(reading)),
        }
    }

    pub(super) fn sources(&mut self, id: PullId, rank: RankId) -> Vec<RankId> {
        let (w, number) = (self.w, self.number);
        let Some(pull) = self.pull(id) else { return Vec::new() };
        let Some(engine) = w.consumers.get(number) else { return Vec::new() };
        let (_, map) = w.map(engine, pull.fence.lease, pull.attempt);
        map.map(|m| m.sources_of(rank).collect()).unwrap_or_default()
    }
}
