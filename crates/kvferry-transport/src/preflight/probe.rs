//! Measuring a lane by reading.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::{Base, Batch, BoundedBatch, Nest, PairRun, Part, Section};
use kvferry_geometry::units::{Bytes, RegionId};

use super::report::{Rate, Registration, Report};
use crate::error::{DeregisterError, LostCause, RegisterError, SubmitError, TransferError};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Event, OpId, OpKind, Outcome, PeerId, PeerInfo, Submission};

/// How long reads that were cancelled may take to end.
const GIVE_UP: Duration = Duration::from_secs(1);

/// How much is measured. Start from [`ProbeOptions::default`] or [`quick`](Self::quick).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ProbeOptions {
    /// Bytes of a small operation. Default: 64.
    pub small: u64,
    /// Small operations, one after the other. Default: 201.
    pub small_operations: u32,
    /// Bytes of larger ones, ascending; what the peer's largest region or the scratch region has not is cut to what they have.
    /// Default: 64 KiB, 1 MiB, 16 MiB.
    pub sizes: Vec<u64>,
    /// Operations in flight, where the scratch region has room for so many. Default: 4.
    pub window: u32,
    /// How long each size is measured. Default: 250 ms.
    pub time: Duration,
    /// The most bytes of each size. Default: 1 GiB.
    pub bytes: u64,
    /// How long all of it may take. Default: 30 s.
    pub within: Duration,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self {
            small: 64,
            small_operations: 201,
            sizes: vec![64 << 10, 1 << 20, 16 << 20],
            window: 4,
            time: Duration::from_millis(250),
            bytes: 1 << 30,
            within: Duration::from_secs(30),
        }
    }
}

impl ProbeOptions {
    /// Some ten milliseconds on a fast lane: enough to tell a lane from another.
    #[must_use]
    pub fn quick() -> Self {
        let (time, bytes) = (Duration::from_millis(10), 64 << 20);
        Self { small_operations: 21, sizes: vec![64 << 10, 1 << 20], time, bytes, ..Self::default() }
    }
}

/// Why there is no report.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// There is nothing to read.
    #[error("peer {peer} has no registered region to read; register at least one before its blob is made")]
    NothingToRead {
        /// The connection.
        peer: PeerId,
    },
    /// The scratch region has no room.
    #[error("the scratch region {region} of {len} is too small; {least} bytes are the least")]
    Scratch {
        /// The region.
        region: RegionId,
        /// What it has.
        len: Bytes,
        /// What it must have.
        least: u64,
    },
    /// There is no size to measure.
    #[error("the probe has no sizes to measure; give at least one")]
    NoSizes,
    /// A read of this size fits nowhere.
    #[error("no read of {size} fits into the peer's region and the scratch region")]
    NoRoom {
        /// Its bytes.
        size: Bytes,
    },
    /// No such connection.
    #[error("no connection {peer}")]
    UnknownPeer {
        /// The id named.
        peer: PeerId,
    },
    /// The scratch region could not be registered.
    #[error("the scratch region: {0}")]
    Register(#[from] RegisterError),
    /// The scratch region could not be given up.
    #[error("the scratch region: {0}")]
    Deregister(#[from] DeregisterError),
    /// A read was refused.
    #[error("a read was refused: {0}")]
    Refused(#[from] SubmitError),
    /// A read did not succeed.
    #[error("a read of {size} did not succeed: {reason}")]
    Failed {
        /// Its bytes.
        size: Bytes,
        /// Why.
        reason: TransferError,
    },
    /// The peer is lost.
    #[error("the peer is lost: {0}")]
    PeerLost(LostCause),
    /// It takes too long.
    #[error("not done within {limit:?}: {done} reads are done, {open} are under way; the lane may be stuck")]
    TooLong {
        /// The limit.
        limit: Duration,
        /// Reads that are done.
        done: u64,
        /// Reads that are not.
        open: usize,
    },
}

/// Measures a lane, without doing anything itself: it gives submissions and takes their ends, with the time.
///
/// Feed it until [`result`](Self::result) is there: [`poll`](Self::poll) and submit what it gives, tell it
/// [`submitted`](Self::submitted) or [`refused`](Self::refused), and show it every event. A probe that ends by an error may have
/// [operations open](Self::open), whose ends nobody waits for.
#[derive(Debug)]
pub struct Probe {
    options: ProbeOptions,
    peer: PeerId,
    scratch: (RegionId, Bytes),
    source: (RegionId, Bytes),
    src_lens: Vec<Bytes>,
    dst_lens: Vec<Bytes>,
    stages: Vec<Stage>,
    /// The stage that is measured.
    stage: usize,
    /// When the first poll was.
    begun: Option<Duration>,
    /// The operation that was given and not yet told to be submitted.
    given: Option<Open>,
    open: BTreeMap<OpId, Open>,
    /// Where the next read begins in the source.
    cursor: u64,
    done: u64,
    report: Report,
    result: Option<Result<Report, ProbeError>>,
}

/// Operations of one size.
#[derive(Debug)]
struct Stage {
    size: u64,
    window: u64,
    /// Most operations.
    most: u64,
    /// Small operations count by their times, the others by their bytes.
    times: Option<Vec<Duration>>,
    /// The first operation is not measured: it wakes what sleeps.
    warm: bool,
    submitted: u64,
    ended: u64,
    /// From the first measured submission to the last end.
    span: Option<(Duration, Duration)>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    slot: u64,
    since: Duration,
}

impl Probe {
    /// A probe of a connection, that reads into a registered region of ours of that length.
    ///
    /// # Errors
    /// If the peer has no region, or the scratch region no room for a small operation.
    pub fn new(
        options: ProbeOptions,
        peer: PeerId,
        info: &PeerInfo,
        scratch: (RegionId, Bytes),
    ) -> Result<Self, ProbeError> {
        let largest = info.regions.iter().copied().max_by_key(|(_, len)| *len);
        let source = largest.ok_or(ProbeError::NothingToRead { peer })?;
        let (region, len) = scratch;
        let room = len.get().min(source.1.get());
        if len == Bytes::ZERO {
            return Err(ProbeError::Scratch { region, len, least: 1 });
        }
        if options.sizes.is_empty() {
            return Err(ProbeError::NoSizes);
        }
        let small = options.small.clamp(1, room);
        let mut stages = vec![Stage::small(small, u64::from(options.small_operations.max(1)))];
        let mut sizes: Vec<_> = options.sizes.iter().map(|size| (*size).clamp(1, room)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        stages.extend(sizes.iter().map(|&size| {
            let window = (len.get() / size).clamp(1, u64::from(options.window.max(1)));
            Stage::large(size, window, (options.bytes / size).max(2))
        }));
        let mut dst_lens = vec![Bytes::ZERO; region.index() + 1];
        dst_lens[region.index()] = len;
        let report = Report {
            endpoint: info.endpoint,
            lane: info.lane.clone(),
            small: Bytes::new(small),
            per_operation: Duration::ZERO,
            small_operations: 0,
            rates: Vec::new(),
            registration: None,
        };
        Ok(Self {
            options,
            peer,
            scratch,
            source,
            src_lens: info.lens(),
            dst_lens,
            stages,
            stage: 0,
            begun: None,
            given: None,
            open: BTreeMap::new(),
            cursor: 0,
            done: 0,
            report,
            result: None,
        })
    }

    /// The next read to submit, if there is room for one now.
    pub fn poll(&mut self, now: Duration) -> Option<Submission> {
        let begun = *self.begun.get_or_insert(now);
        if self.result.is_none() && now.saturating_sub(begun) > self.options.within {
            let (limit, done, open) = (self.options.within, self.done, self.open.len());
            self.result = Some(Err(ProbeError::TooLong { limit, done, open }));
        }
        if self.result.is_some() || self.given.is_some() {
            return None;
        }
        // The time may be over since the last end.
        let time = self.options.time;
        if self.open.is_empty() && self.stages.get(self.stage).is_some_and(|s| s.ended > 0 && s.is_full(now, time)) {
            self.close_stage();
        }
        let stage = self.stages.get_mut(self.stage)?;
        // The first one runs alone.
        let window = if stage.warm { stage.window } else { 1 };
        if self.open.len() as u64 >= window || stage.is_full(now, time) {
            return None;
        }
        let slot = (0..).find(|slot| self.open.values().all(|open| open.slot != *slot))?;
        if stage.warm && stage.span.is_none() {
            stage.span = Some((now, now));
        }
        stage.submitted += 1;
        self.given = Some(Open { slot, since: now });
        let size = stage.size;
        let Some(batch) = self.read(slot, size) else {
            self.given = None;
            self.result = Some(Err(ProbeError::NoRoom { size: Bytes::new(size) }));
            return None;
        };
        Some(Submission { peer: self.peer, kind: OpKind::Read, batch, notify: None })
    }

    /// The read that was given is under way as this operation.
    pub fn submitted(&mut self, op: OpId) {
        if let Some(open) = self.given.take() {
            self.open.insert(op, open);
        }
    }

    /// The read that was given was refused. A full queue is tried again at a later poll; anything else ends the probe.
    pub fn refused(&mut self, error: &SubmitError) {
        self.given = None;
        if let Some(stage) = self.stages.get_mut(self.stage) {
            stage.submitted -= 1;
        }
        if !matches!(error, SubmitError::QueueFull { .. }) {
            self.result.get_or_insert(Err(ProbeError::Refused(error.clone())));
        }
    }

    /// Shows it an event; true if it is the end of one of its reads, and nobody else's business.
    pub fn on_event(&mut self, event: &Event, now: Duration) -> bool {
        match event {
            Event::Completed { op, outcome, .. } => {
                let Some(open) = self.open.remove(op) else { return false };
                self.ended(open, outcome, now);
                true
            }
            Event::PeerLost { peer, cause } if *peer == self.peer => {
                self.result.get_or_insert(Err(ProbeError::PeerLost(cause.clone())));
                false
            }
            _ => false,
        }
    }

    /// Adds what registering took.
    pub fn registration(&mut self, registration: Registration) {
        self.report.registration = Some(registration);
        if let Some(Ok(report)) = &mut self.result {
            report.registration = Some(registration);
        }
    }

    /// The report once all is measured, or why there is none.
    #[must_use]
    pub fn result(&self) -> Option<&Result<Report, ProbeError>> {
        self.result.as_ref()
    }

    /// Its operations that have not ended.
    pub fn open(&self) -> impl Iterator<Item = OpId> {
        self.open.keys().copied()
    }

    fn ended(&mut self, open: Open, outcome: &Outcome, now: Duration) {
        let Some(stage) = self.stages.get_mut(self.stage) else { return };
        match outcome {
            Outcome::Done(_) => self.done += 1,
            Outcome::Failed(reason) | Outcome::InDoubt(reason) => {
                let (size, reason) = (Bytes::new(stage.size), reason.clone());
                self.result.get_or_insert(Err(ProbeError::Failed { size, reason }));
                return;
            }
        }
        if !stage.warm {
            let took = now.saturating_sub(open.since);
            if stage.times.is_some() || took < self.options.time {
                (stage.warm, stage.submitted) = (true, 0);
                return;
            }
            // So slow that this one says it: no more of the size, and none larger.
            (stage.ended, stage.span) = (1, Some((open.since, now)));
            self.stages.truncate(self.stage + 1);
            return self.close_stage();
        }
        stage.ended += 1;
        stage.span = stage.span.map(|(first, _)| (first, now));
        if let Some(times) = &mut stage.times {
            times.push(now.saturating_sub(open.since));
        }
        if stage.is_full(now, self.options.time) && self.open.is_empty() {
            self.close_stage();
        }
    }

    fn close_stage(&mut self) {
        let Some(stage) = self.stages.get_mut(self.stage) else { return };
        match stage.times.take() {
            Some(mut times) => {
                times.sort_unstable();
                self.report.per_operation = times.get(times.len() / 2).copied().unwrap_or_default();
                self.report.small_operations = times.len() as u64;
            }
            None => {
                let span = stage.span.map_or(Duration::ZERO, |(first, last)| last.saturating_sub(first));
                #[allow(clippy::cast_precision_loss, reason = "far fewer bytes than would lose one")]
                let bytes = (stage.size * stage.ended) as f64;
                let bytes_per_second = bytes / span.max(Duration::from_nanos(1)).as_secs_f64();
                let size = Bytes::new(stage.size);
                self.report.rates.push(Rate { size, operations: stage.ended, bytes_per_second });
            }
        }
        self.stage += 1;
        if self.stage == self.stages.len() {
            self.report.lane.measured = Some(self.report.measured());
            self.result.get_or_insert(Ok(self.report.clone()));
        }
    }

    /// A read of one run from the next place of the source to a slot.
    fn read(&mut self, slot: u64, size: u64) -> Option<Arc<BoundedBatch>> {
        if self.cursor.checked_add(size)? > self.source.1.get() {
            self.cursor = 0;
        }
        let base = Base {
            src_region: self.source.0,
            dst_region: self.scratch.0,
            src_offset: self.cursor,
            dst_offset: slot * size,
        };
        self.cursor += size;
        let part = Part {
            src_add: 0,
            dst_add: 0,
            src_block_stride: size,
            dst_block_stride: size,
            src_step: 1,
            dst_step: 1,
            nest: Nest::run(size),
            pairs: vec![PairRun { src: 0, dst: 0, count: 1 }].into(),
        };
        let batch = Batch::new(vec![Section { bases: vec![base].into(), parts: vec![part] }]);
        // Cursor and slot keep it inside of both regions.
        batch.check(&self.src_lens, &self.dst_lens).ok().map(Arc::new)
    }
}

impl Stage {
    fn small(size: u64, most: u64) -> Self {
        let times = Some(Vec::new());
        Self { size, window: 1, most, times, warm: false, submitted: 0, ended: 0, span: None }
    }

    fn large(size: u64, window: u64, most: u64) -> Self {
        Self { times: None, window, ..Self::small(size, most) }
    }

    /// Whether no more operations are to be submitted.
    fn is_full(&self, now: Duration, time: Duration) -> bool {
        let over = self.span.is_some_and(|(first, _)| now.saturating_sub(first) >= time);
        self.submitted >= self.most || (over && self.submitted > 0)
    }
}

/// Measures a lane, blocking: registers `scratch` for it and gives it up again. `clock` is the driver's; events that are not the
/// probe's go to `others`; among them may be ends of its reads that came too late for it.
///
/// # Errors
/// Why there is no report. Reads under way are cancelled then; if some don't end within a second, the scratch region stays registered:
/// disconnect, and deregister it.
pub fn run(
    transport: &mut dyn Transport,
    peer: PeerId,
    scratch: Region,
    clock: &mut dyn FnMut() -> Duration,
    options: &ProbeOptions,
    others: &mut Vec<Event>,
) -> Result<Report, ProbeError> {
    let info = transport.peer(peer).map_err(|_| ProbeError::UnknownPeer { peer })?;
    let len = scratch.len();
    let start = clock();
    let region = transport.register(scratch)?;
    let register = clock().saturating_sub(start);
    let found = measure(transport, (peer, &info), (region, len), clock, options, others);
    let start = clock();
    let given_up = transport.deregister(region);
    let deregister = clock().saturating_sub(start);
    let mut report = found?;
    given_up?;
    report.registration = Some(Registration { size: len, register, deregister });
    // What the backend knows of it by now.
    let lane = transport.peer(peer).map_err(|_| ProbeError::UnknownPeer { peer })?.lane;
    report.lane = crate::types::Lane { measured: Some(report.measured()), ..lane };
    Ok(report)
}

fn measure(
    transport: &mut dyn Transport,
    (peer, info): (PeerId, &PeerInfo),
    scratch: (RegionId, Bytes),
    clock: &mut dyn FnMut() -> Duration,
    options: &ProbeOptions,
    others: &mut Vec<Event>,
) -> Result<Report, ProbeError> {
    let mut probe = Probe::new(options.clone(), peer, info, scratch)?;
    let mut cancelled: Option<Duration> = None;
    loop {
        let next = transport.step(clock());
        let now = clock();
        while let Some(event) = transport.next_event() {
            if !probe.on_event(&event, now) {
                others.push(event);
            }
        }
        if let Some(result) = probe.result() {
            let since = *cancelled.get_or_insert_with(|| {
                probe.open().for_each(|op| transport.cancel(op).unwrap_or(()));
                now
            });
            if probe.open().next().is_none() || now.saturating_sub(since) > GIVE_UP {
                return result.clone();
            }
        }
        let mut submitted = false;
        while let Some(submission) = probe.poll(clock()) {
            match transport.submit(submission) {
                Ok(op) => probe.submitted(op),
                Err(error) => {
                    probe.refused(&error);
                    break;
                }
            }
            submitted = true;
        }
        if !submitted {
            let rest = next.map_or(Duration::MAX, |at| at.saturating_sub(clock()));
            transport.wait(Some(rest.min(Duration::from_millis(1))));
        }
    }
}
