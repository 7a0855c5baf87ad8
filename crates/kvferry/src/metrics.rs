//! What an owner counts, told to whatever recorder the application has chosen through the `metrics` facade.
//!
//! The driver owns one [`OwnerMetrics`] and calls it once for each thing that happens. Everything with a name is made once: each peer
//! gets its handles when it is first met, and an event looks them up and adds. Labels are bounded: a peer is one of the first
//! [`MAX_PEERS`] engines with which a link was up, or `other`, so that ids which only a reference names take no place; all other
//! labels are words from fixed lists. Without a recorder the handles do nothing. Set
//! the recorder before the owner starts: handles don't move from one to another.
//!
//! It reads no clock and decides nothing.

use std::collections::HashMap;
use std::time::Duration;

use kvferry_proto::lease::Closing;
use kvferry_proto::names::EngineId;
use kvferry_proto::peer::BindRefusal;
use kvferry_proto::push::WriterEnd;
use kvferry_proto::rank::Stage;
use kvferry_session::outcome::{Phase, Report};
use kvferry_session::{Delivered, Failed, FailureCause};
use metrics::{Counter, Gauge, Histogram, Label};

mod names;
#[cfg(test)]
mod tests;
mod transfers;

pub use names::{METRICS, Metric, MetricKind};
pub use transfers::Transfers;

use names as n;

/// Engines that are told apart; those after them are `other`.
pub(crate) const MAX_PEERS: usize = 128;
/// How often what the ranks have read is summed up.
const INTERVAL: Duration = Duration::from_secs(10);

/// The counts of one owner.
pub(crate) struct OwnerMetrics {
    engine: Label,
    /// Where each of the first engines is in `peers`.
    places: HashMap<EngineId, usize>,
    /// One for each of them.
    peers: Vec<PeerMetrics>,
    /// That of all other engines, once there was one.
    others: Option<PeerMetrics>,
    offers: [Counter; 2],
    unbound: Words<Counter>,
    ages: Words<Histogram>,
    handshakes: Words<Counter>,
    ranks_lost: Counter,
    writes: Words<Counter>,
    written_bytes: Counter,
    reclaimed: Counter,
    gauges: Gauges,
    standing: Standing,
    interval: Transfers,
    next: Duration,
}

struct Gauges {
    pending: Gauge,
    offered: Gauge,
    bound: Gauge,
    /// By ranks of ours, by those of producers.
    quarantine: [Gauge; 2],
    links: Gauge,
    joined: Gauge,
    missing: Gauge,
}

/// What there is of what begins and ends here.
#[derive(Default)]
struct Standing {
    pulls: u64,
    leases: u64,
    links: u64,
}

/// What there is of what only the session knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    /// Blocks in quarantine.
    pub(crate) quarantined: usize,
    /// Those of them that producers' ranks may still write.
    pub(crate) by_writers: usize,
    /// Leases that are bound.
    pub(crate) bound: usize,
    /// Ranks of the engine.
    pub(crate) ranks: usize,
    /// How many of them are missing.
    pub(crate) missing: usize,
}

/// How a handshake ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unmet {
    /// It may be tried again.
    Failed,
    /// One of the two does not want the other.
    Refused,
}

impl OwnerMetrics {
    pub(crate) fn new(engine: &EngineId) -> Self {
        METRICS.iter().for_each(Metric::describe);
        let e = Label::new("engine", engine.as_str().to_owned());
        let gauge = |metric: &Metric, state: Option<&'static str>| {
            let key = metric.labels.first().copied().unwrap_or_default();
            let state = state.map(|s| Label::new(key, s));
            let labels: Vec<Label> = std::iter::once(e.clone()).chain(state).collect();
            metrics::gauge!(metric.name, labels)
        };
        let offers =
            ["accepted", "refused"].map(|outcome| counter(&n::OFFERS, vec![e.clone(), Label::new("outcome", outcome)]));
        Self {
            places: HashMap::new(),
            peers: Vec::new(),
            others: None,
            offers,
            unbound: Words::new(&n::LEASES_CLOSED, "how", vec![e.clone(), Label::new("peer", "none")]),
            ages: Words::new(&n::LEASE_AGE, "how", vec![e.clone()]),
            handshakes: Words::new(&n::HANDSHAKES, "outcome", vec![e.clone()]),
            ranks_lost: counter(&n::RANKS_LOST, vec![e.clone()]),
            writes: Words::new(&n::WRITES, "outcome", vec![e.clone()]),
            written_bytes: counter(&n::WRITTEN_BYTES, vec![e.clone()]),
            reclaimed: counter(&n::RECLAIMED, vec![e.clone()]),
            gauges: Gauges {
                pending: gauge(&n::PENDING, None),
                offered: gauge(&n::LEASES, Some("offered")),
                bound: gauge(&n::LEASES, Some("bound")),
                quarantine: ["ranks", "writers"].map(|by| gauge(&n::QUARANTINE, Some(by))),
                links: gauge(&n::LINKS, None),
                joined: gauge(&n::RANKS, Some("joined")),
                missing: gauge(&n::RANKS, Some("missing")),
            },
            standing: Standing::default(),
            interval: Transfers::default(),
            next: INTERVAL,
            engine: e,
        }
    }

    /// The engine wants to pull.
    pub(crate) fn pull_begun(&mut self) {
        self.standing.pulls += 1;
    }

    /// A pull has ended; it may have been pushed.
    pub(crate) fn pull_ended(&mut self, result: &Result<Delivered, Failed>, pushed: bool) {
        match result {
            Ok(delivered) => self.ended(delivered.report(), None, pushed),
            Err(failed) => self.ended(&failed.report, Some(&failed.cause), pushed),
        }
    }

    /// A rank of ours has ended what it was to write.
    pub(crate) fn written(&mut self, end: &WriterEnd) {
        let outcome = match end {
            Ok(report) => {
                let bytes = report.writes.iter().map(|w| w.bytes.get()).fold(0, u64::saturating_add);
                self.written_bytes.increment(bytes);
                "done"
            }
            Err(fault) if fault.in_doubt => "in doubt",
            Err(fault) if fault.stage == Stage::Cancelled => "cancelled",
            Err(_) => "failed",
        };
        self.writes.of(outcome).increment(1);
    }

    /// Blocks have left quarantine because of their age.
    pub(crate) fn reclaimed(&mut self, blocks: usize) {
        self.reclaimed.increment(blocks as u64);
    }

    /// A peer contradicts itself.
    pub(crate) fn contradiction(&mut self, peer: &EngineId) {
        self.peer(peer).contradictions.increment(1);
    }

    /// The engine has offered blocks.
    pub(crate) fn offered(&mut self, accepted: bool) {
        self.standing.leases += u64::from(accepted);
        self.offers[usize::from(!accepted)].increment(1);
    }

    /// A lease is over.
    pub(crate) fn lease_closed(&mut self, how: Closing, age: Duration, consumer: Option<&EngineId>) {
        self.standing.leases = self.standing.leases.saturating_sub(1);
        self.ages.of(how.name()).record(age);
        match consumer {
            Some(consumer) => self.peer(consumer).leases.of(how.name()).increment(1),
            None => self.unbound.of(how.name()).increment(1),
        }
    }

    /// A late release was answered *Stale*.
    pub(crate) fn fence_rejected(&mut self, peer: &EngineId) {
        self.peer(peer).fence_rejections.increment(1);
    }

    /// Two owners know each other.
    pub(crate) fn link_up(&mut self, peer: &EngineId, took: Duration) {
        self.standing.links += 1;
        self.handshakes.of("ok").increment(1);
        self.meet(peer);
        self.peer(peer).handshake_time.record(took);
    }

    /// A link did not come up.
    pub(crate) fn link_failed(&mut self, how: Unmet) {
        let outcome = match how {
            Unmet::Failed => "failed",
            Unmet::Refused => "refused",
        };
        self.handshakes.of(outcome).increment(1);
    }

    /// A link that was up is gone.
    pub(crate) fn link_down(&mut self, peer: &EngineId) {
        self.standing.links = self.standing.links.saturating_sub(1);
        self.peer(peer).links_lost.increment(1);
    }

    /// A heartbeat went out.
    pub(crate) fn heartbeat_sent(&mut self, peer: &EngineId) {
        self.peer(peer).heartbeats[0].increment(1);
    }

    /// A heartbeat came in.
    pub(crate) fn heartbeat_received(&mut self, peer: &EngineId) {
        self.peer(peer).heartbeats[1].increment(1);
    }

    /// A rank of the engine is gone.
    pub(crate) fn rank_lost(&mut self) {
        self.ranks_lost.increment(1);
    }

    /// What there is now, with what only the session knows. To be told whenever the driver has nothing left to do.
    pub(crate) fn standing(&mut self, known: Known) {
        let Standing { pulls, leases, links } = self.standing;
        let Known { quarantined, by_writers, bound, ranks, missing } = known;
        let (joined, by_ranks) = (ranks.saturating_sub(missing), quarantined.saturating_sub(by_writers));
        let [bound, by_ranks, by_writers, joined, missing] =
            [bound, by_ranks, by_writers, joined, missing].map(|n| n as u64);
        self.set_gauges([pulls, leases.saturating_sub(bound), bound, by_ranks, by_writers, links, joined, missing]);
    }

    /// Pulls, leases that are offered and bound, blocks in quarantine for our ranks and for producers', links, ranks that have joined and
    /// that are missing.
    fn set_gauges(&self, counts: [u64; 8]) {
        let Gauges { pending, offered, bound, quarantine: [ranks, writers], links, joined, missing } = &self.gauges;
        let gauges = [pending, offered, bound, ranks, writers, links, joined, missing];
        for (gauge, count) in gauges.into_iter().zip(counts) {
            #[expect(clippy::cast_precision_loss, reason = "counts of things in memory")]
            gauge.set(count as f64);
        }
    }

    /// When [`interval`](Self::interval) has something to say; `None` while it has nothing.
    pub(crate) fn due(&self) -> Option<Duration> {
        (!self.interval.is_empty()).then_some(self.next)
    }

    /// Every ten seconds, what the ranks have read since; `None` if that is nothing, not even a failure.
    pub(crate) fn interval(&mut self, now: Duration) -> Option<Transfers> {
        if now < self.next {
            return None;
        }
        self.next = now.saturating_add(INTERVAL);
        Some(std::mem::take(&mut self.interval)).filter(|t| !t.is_empty())
    }

    fn ended(&mut self, report: &Report, cause: Option<&FailureCause>, pushed: bool) {
        self.standing.pulls = self.standing.pulls.saturating_sub(1);
        self.interval.record_report(report);
        let outcome = match cause {
            None => Outcome::Delivered,
            Some(FailureCause::Cancelled) => Outcome::Cancelled,
            Some(_) => Outcome::Failed,
        };
        let peer = self.peer(&report.fence.engine);
        let mode = usize::from(pushed);
        peer.pulls[mode][outcome as usize].increment(1);
        peer.times[mode][outcome as usize].record(report.took);
        peer.attempts.increment(report.attempts.into());
        for (histogram, phase) in peer.phases.iter().zip(Phase::ALL) {
            let time = report.phases.of(phase);
            if !time.is_zero() {
                histogram.record(time);
            }
        }
        let (mut before, mut after) = (0, 0);
        for pair in &report.pairs {
            before += pair.descriptors_before;
            after += pair.descriptors_after;
        }
        peer.descriptors[0].increment(before);
        peer.descriptors[1].increment(after);
        let bytes = report.bytes().get();
        peer.wire_bytes.increment(bytes);
        peer.zeroed_bytes.increment(report.zeroed.get());
        peer.compared_bytes.increment(report.compared.get());
        if !report.pairs.is_empty() {
            peer.queue_time.record(report.phases.queued());
        }
        match cause {
            None => {
                peer.ideal_bytes.increment(bytes);
                #[expect(clippy::cast_precision_loss, reason = "it goes into buckets")]
                peer.bytes.record(bytes as f64);
            }
            Some(cause) => {
                peer.failures.of(kind(cause)).increment(1);
                for (_, fault) in &report.faults {
                    peer.faults.of(stage(fault.stage)).increment(1);
                }
            }
        }
    }

    fn peer(&mut self, peer: &EngineId) -> &mut PeerMetrics {
        match self.places.get(peer) {
            Some(at) => &mut self.peers[*at],
            None => self.others.get_or_insert_with(|| PeerMetrics::new(&self.engine, "other")),
        }
    }

    /// Gives a peer a place of its own, while there are some.
    fn meet(&mut self, peer: &EngineId) {
        if self.peers.len() < MAX_PEERS && !self.places.contains_key(peer) {
            self.places.insert(peer.clone(), self.peers.len());
            self.peers.push(PeerMetrics::new(&self.engine, peer.as_str()));
        }
    }
}

/// With its owner's end there is nothing more of the engine; gauges would say for ever what there was.
impl Drop for OwnerMetrics {
    fn drop(&mut self) {
        self.set_gauges([0; 8]);
    }
}

#[derive(Clone, Copy)]
enum Outcome {
    Delivered,
    Failed,
    Cancelled,
}

const OUTCOMES: [&str; 3] = ["delivered", "failed", "cancelled"];
const MODES: [&str; 2] = ["pull", "push"];

/// The handles of one peer.
struct PeerMetrics {
    pulls: [[Counter; 3]; 2],
    times: [[Histogram; 3]; 2],
    phases: [Histogram; Phase::ALL.len()],
    failures: Words<Counter>,
    faults: Words<Counter>,
    leases: Words<Counter>,
    attempts: Counter,
    queue_time: Histogram,
    bytes: Histogram,
    wire_bytes: Counter,
    ideal_bytes: Counter,
    zeroed_bytes: Counter,
    compared_bytes: Counter,
    descriptors: [Counter; 2],
    fence_rejections: Counter,
    contradictions: Counter,
    handshake_time: Histogram,
    links_lost: Counter,
    heartbeats: [Counter; 2],
}

impl PeerMetrics {
    fn new(engine: &Label, peer: &str) -> Self {
        let labels = || vec![engine.clone(), Label::new("peer", peer.to_owned())];
        let with = |key: &'static str, value: &'static str| {
            let mut labels = labels();
            labels.push(Label::new(key, value));
            labels
        };
        let ended = |outcome, mode| {
            let mut labels = with("outcome", outcome);
            labels.push(Label::new("mode", mode));
            labels
        };
        let one = |metric: &Metric| counter(metric, labels());
        let some = |metric: &Metric| histogram(metric, labels());
        Self {
            pulls: MODES.map(|m| OUTCOMES.map(|o| counter(&n::PULLS, ended(o, m)))),
            times: MODES.map(|m| OUTCOMES.map(|o| histogram(&n::PULL_TIME, ended(o, m)))),
            phases: Phase::ALL.map(|phase| histogram(&n::PHASE_TIME, with("phase", phase.name()))),
            failures: Words::new(&n::PULL_FAILURES, "kind", labels()),
            faults: Words::new(&n::RANK_FAULTS, "stage", labels()),
            leases: Words::new(&n::LEASES_CLOSED, "how", labels()),
            attempts: one(&n::PULL_ATTEMPTS),
            queue_time: some(&n::QUEUE_TIME),
            bytes: some(&n::PULL_BYTES),
            wire_bytes: one(&n::WIRE_BYTES),
            ideal_bytes: one(&n::IDEAL_BYTES),
            zeroed_bytes: one(&n::ZEROED_BYTES),
            compared_bytes: one(&n::COMPARED_BYTES),
            descriptors: ["before", "after"].map(|m| counter(&n::DESCRIPTORS, with("merged", m))),
            fence_rejections: one(&n::FENCE_REJECTIONS),
            contradictions: one(&n::CONTRADICTIONS),
            handshake_time: some(&n::HANDSHAKE_TIME),
            links_lost: one(&n::LINKS_LOST),
            heartbeats: ["sent", "received"].map(|d| counter(&n::HEARTBEATS, with("direction", d))),
        }
    }
}

/// The handles of one metric for the words of one label, made as they come: few of the words ever do.
struct Words<H> {
    metric: Metric,
    key: &'static str,
    labels: Vec<Label>,
    handles: Vec<(&'static str, H)>,
}

trait Handle {
    fn register(metric: &Metric, labels: Vec<Label>) -> Self;
}

impl Handle for Counter {
    fn register(metric: &Metric, labels: Vec<Label>) -> Self {
        counter(metric, labels)
    }
}

impl Handle for Histogram {
    fn register(metric: &Metric, labels: Vec<Label>) -> Self {
        histogram(metric, labels)
    }
}

impl<H: Handle> Words<H> {
    fn new(metric: &Metric, key: &'static str, labels: Vec<Label>) -> Self {
        Self { metric: *metric, key, labels, handles: Vec::new() }
    }

    fn of(&mut self, word: &'static str) -> &H {
        let at = match self.handles.iter().position(|(w, _)| *w == word) {
            Some(at) => at,
            None => {
                let mut labels = self.labels.clone();
                labels.push(Label::new(self.key, word));
                self.handles.push((word, H::register(&self.metric, labels)));
                self.handles.len() - 1
            }
        };
        &self.handles[at].1
    }
}

/// Words for why a pull has failed; of what the producer refused, for why it did.
const fn kind(cause: &FailureCause) -> &'static str {
    let FailureCause::Refused(refusal) = cause else { return cause.kind() };
    match refusal {
        BindRefusal::WrongEngine => "refused: wrong engine",
        BindRefusal::StaleEpoch { .. } => "refused: stale epoch",
        BindRefusal::UnknownLease => "refused: lease not open",
        BindRefusal::AlreadyBound => "refused: bound by another",
        BindRefusal::WrongAttempt { .. } => "refused: wrong attempt",
        BindRefusal::WrongContent => "refused: wrong content",
        BindRefusal::PeerMapDiffers { .. } => "refused: other peer map",
        BindRefusal::Incompatible(_) => "refused: incompatible",
        BindRefusal::RankLost { .. } => "refused: rank lost",
        BindRefusal::Busy(_) => "refused: busy",
        BindRefusal::NotSealed => "refused: not sealed",
        BindRefusal::Unfit(_) => "refused: room does not fit",
        _ => "refused",
    }
}

/// A word for what a rank was doing.
const fn stage(stage: Stage) -> &'static str {
    match stage {
        Stage::Plan => "plan",
        Stage::Connect => "connect",
        Stage::Submit => "submit",
        Stage::Read => "read",
        Stage::Write => "write",
        Stage::Permute => "permute",
        Stage::Zero => "zero",
        Stage::Compare => "compare",
        Stage::Cancelled => "cancelled",
        _ => "other",
    }
}

fn counter(metric: &Metric, labels: Vec<Label>) -> Counter {
    metrics::counter!(metric.name, labels)
}

fn histogram(metric: &Metric, labels: Vec<Label>) -> Histogram {
    metrics::histogram!(metric.name, labels)
}
