//! A rank's staged reads on their way: from the line for a segment, over the wire, to the driver and back. What is gathered for
//! peers' reads, and by peers for ours, is next door.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kvferry_geometry::units::{Bytes, RankId};
use kvferry_memory::Permute;
use kvferry_proto::rank::{PullId, RankFault, Stage};
use kvferry_transport::PeerId;

use super::RankSession;
use super::gather::Gathers;
use super::pull::SourceState;
use super::stage::{Got, LocalWork, Stager, StagingConfig, StagingRefused, Steps, Waiter, WorkId};
use crate::staging::{Grant, Segment};

/// The staging memory, and what goes on in it.
#[derive(Default)]
pub(super) struct Staging {
    pub(super) stager: Option<Stager>,
    /// What peers' ranks read from this one.
    pub(super) gathers: Gathers,
    /// Segments for those who have waited.
    pub(super) granted: VecDeque<Grant<Waiter>>,
    last: u64,
    /// Permutations for the driver.
    work: VecDeque<LocalWork>,
    /// Those that have not ended.
    open: BTreeMap<WorkId, Waiter>,
}

impl Staging {
    /// Hands the driver a permutation for somebody.
    pub(super) fn start(&mut self, whose: Waiter, permute: Permute) {
        self.last += 1;
        let id = WorkId(self.last);
        self.open.insert(id, whose);
        self.work.push_back(LocalWork { id, permute });
    }
}

impl RankSession {
    /// The same, staging as it is told: in the cache's staging memory, if there is some, or in that of the producer's ranks. It
    /// gathers in its own memory for peers as well. Without this, all reads are direct, and nothing is gathered.
    ///
    /// # Errors
    /// If it can't stage so.
    pub fn with_staging(mut self, config: StagingConfig) -> Result<Self, StagingRefused> {
        self.staging.stager = Stager::new(&self.cache, config, self.end.transport.capabilities().cost)?;
        Ok(self)
    }

    /// The next permutation for the driver to do. Ask after `handle`, `step` and `work_done`.
    pub fn next_work(&mut self) -> Option<LocalWork> {
        self.staging.work.pop_front()
    }

    /// The driver has done a permutation, all of it.
    pub fn work_done(&mut self, work: WorkId, now: Duration) {
        self.now = now;
        match self.staging.open.remove(&work) {
            Some(Waiter::Read(id, src)) => {
                if let Some(pull) = self.pulls.get_mut(&id) {
                    let next = pull.on_permuted(src, Ok(()), now);
                    self.go_on(id, next);
                }
            }
            Some(Waiter::Gather(ticket)) => self.gathered(ticket),
            None => {}
        }
        self.serve_granted();
    }

    /// Bytes of staging memory in use. Those that a read in doubt may still write stay so for good.
    #[must_use]
    pub fn staging_lent(&self) -> Bytes {
        self.staging.stager.as_ref().map_or(Bytes::ZERO, Stager::lent)
    }

    /// Asks for segments for the sources that wait for one.
    pub(super) fn acquire(&mut self, id: PullId) {
        let (Some(pull), Some(stager)) = (self.pulls.get_mut(&id), &mut self.staging.stager) else { return };
        let mut failed = None;
        for (&src, source) in &mut pull.sources {
            let (SourceState::Waiting(_), Some(steps)) = (&source.state, &source.steps) else { continue };
            match stager.acquire((id, src), steps.bytes) {
                Ok(Got::InLine) => {}
                Ok(Got::Segment(segment)) => {
                    self.staging.granted.push_back(Grant { waiter: Waiter::Read(id, src), segment });
                }
                Ok(Got::Busy) => source.go_directly(),
                Err(text) => failed = Some(format!("source rank {src}: {text}")),
            }
        }
        if let Some(text) = failed {
            self.fail(id, RankFault { stage: Stage::Plan, text, in_doubt: false, bad: Vec::new() });
        }
    }

    /// Posts the reads of those who have got a segment.
    pub(super) fn serve_granted(&mut self) {
        while let Some(Grant { waiter, segment }) = self.staging.granted.pop_front() {
            let Waiter::Read(id, src) = waiter else {
                // A gather never waits.
                self.free_gather(segment);
                continue;
            };
            let (cache, transport) = (&self.cache, &self.end.transport);
            let wire = |steps: &Steps, lane: PeerId| {
                let fault = |stage, text: String| {
                    let text = format!("source rank {src}: {text}");
                    RankFault { stage, text, in_doubt: false, bad: Vec::new() }
                };
                let info = transport.peer(lane).map_err(|e| fault(Stage::Connect, e.to_string()))?;
                steps.wire_to_segment(cache, &info.lens()).map_err(|e| fault(Stage::Plan, e))
            };
            let next = match self.pulls.get_mut(&id) {
                Some(pull) => pull.on_segment(src, segment, wire),
                None => Err(segment),
            };
            match next {
                Ok(next) => {
                    self.go_on(id, next);
                    self.enqueue(id);
                }
                // It has failed since.
                Err(segment) => self.free(vec![segment], id, Vec::new()),
            }
        }
    }

    /// Gives segments back and takes sources out of the line; others may be served by that.
    pub(super) fn free(&mut self, segments: Vec<Segment>, id: PullId, given_up: Vec<RankId>) {
        let Some(stager) = &mut self.staging.stager else { return };
        for src in given_up {
            self.staging.granted.extend(stager.cancel(Waiter::Read(id, src)));
        }
        for segment in segments {
            self.staging.granted.extend(stager.release(segment));
        }
    }

    /// A read in doubt keeps its segment, so those in line may wait for ever: they go directly.
    pub(super) fn segment_lost(&mut self) {
        let Some(stager) = &mut self.staging.stager else { return };
        stager.lose();
        let mut direct = Vec::new();
        for (&id, pull) in &mut self.pulls {
            for (&src, source) in &mut pull.sources {
                if matches!(source.state, SourceState::Waiting(_)) {
                    source.go_directly();
                    self.staging.granted.extend(stager.cancel(Waiter::Read(id, src)));
                    direct.push(id);
                }
            }
        }
        for id in direct {
            self.enqueue(id);
        }
    }

    /// Hands the driver a permutation.
    pub(super) fn permute(&mut self, id: PullId, src: RankId) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let steps = pull.sources.get(&src).and_then(|s| s.steps.as_ref());
        let permute = match (&self.staging.stager, steps) {
            (Some(stager), Some(steps)) => stager.permute(steps, &self.cache),
            _ => Err("there is no staging memory".into()),
        };
        match permute {
            Ok(permute) => self.staging.start(Waiter::Read(id, src), permute),
            Err(text) => {
                let next = pull.on_permuted(src, Err(text), self.now);
                self.go_on(id, next);
            }
        }
    }
}
