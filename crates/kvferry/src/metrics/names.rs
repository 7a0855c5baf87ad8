//! Every metric that there is: its name, kind, unit, labels and meaning. `docs/observability.md` has the same list.

use metrics::Unit;

/// A metric as it is described to the application's recorder.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Metric {
    /// Its name, with the unit at its end.
    pub name: &'static str,
    /// How it counts.
    pub kind: MetricKind,
    /// Its labels, beside `engine`, which all have: the id of the engine whose owner counts.
    pub labels: &'static [&'static str],
    /// What it is.
    pub help: &'static str,
}

/// How a metric counts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum MetricKind {
    /// A sum that only grows.
    Counter,
    /// A number as it stands.
    Gauge,
    /// A distribution; with the upper bounds of buckets that fit it, for recorders that want buckets.
    Histogram(&'static [f64]),
}

impl Metric {
    pub(super) fn describe(&self) {
        let unit = match self.name.trim_end_matches("_total").rsplit('_').next() {
            Some("bytes") => Unit::Bytes,
            Some("seconds") => Unit::Seconds,
            _ => Unit::Count,
        };
        match self.kind {
            MetricKind::Counter => metrics::describe_counter!(self.name, unit, self.help),
            MetricKind::Gauge => metrics::describe_gauge!(self.name, unit, self.help),
            MetricKind::Histogram(_) => metrics::describe_histogram!(self.name, unit, self.help),
        }
    }
}

/// 100 us to 30 s.
const SECONDS: &[f64] =
    &[1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// 1 ms to an hour.
const LONG_SECONDS: &[f64] = &[1e-3, 1e-2, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 3600.0];
/// 64 KiB to 64 GiB.
const BYTES: &[f64] = &[
    65_536.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
    17_179_869_184.0,
    68_719_476_736.0,
];

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: MetricKind::Counter, labels, help }
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind: MetricKind::Gauge, labels, help }
}

const fn histogram(
    name: &'static str,
    buckets: &'static [f64],
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind: MetricKind::Histogram(buckets), labels, help }
}

macro_rules! metrics {
    ($($constant:ident = $metric:expr;)*) => {
        $(pub(super) const $constant: Metric = $metric;)*

        /// Every metric, for recorders that want to know of them beforehand, and of their buckets.
        pub const METRICS: &[Metric] = &[$($constant),*];
    };
}

metrics! {
    PULLS = counter("kvferry_pulls_total", &["peer", "outcome", "mode"], "pulls that have ended: delivered, failed, cancelled");
    PULL_FAILURES = counter("kvferry_pull_failures_total", &["peer", "kind"], "pulls that were not delivered, by why");
    RANK_FAULTS = counter("kvferry_rank_faults_total", &["peer", "stage"], "ranks that failed in pulls, by what they were doing");
    PULL_ATTEMPTS = counter("kvferry_pull_attempts_total", &["peer"], "attempts at pulls; more than pulls where others were tried");
    PULL_TIME = histogram("kvferry_pull_seconds", SECONDS, &["peer", "outcome", "mode"], "from the call to the end of a pull");
    PHASE_TIME = histogram("kvferry_pull_phase_seconds", SECONDS, &["peer", "phase"], "how long pulls were in a phase");
    QUEUE_TIME = histogram("kvferry_pull_queue_seconds", SECONDS, &["peer"], "of the read phase: until a rank's first read had its turn, the slowest rank");
    PULL_BYTES = histogram("kvferry_pull_bytes", BYTES, &["peer"], "bytes of a delivered pull");
    WIRE_BYTES = counter("kvferry_wire_bytes_total", &["peer"], "bytes read by ranks that have read their whole part, in the last attempts of pulls that were delivered and others");
    IDEAL_BYTES = counter("kvferry_ideal_bytes_total", &["peer"], "of those, the bytes of delivered pulls: what they lacked, each once for each rank that holds it");
    ZEROED_BYTES = counter("kvferry_zeroed_bytes_total", &["peer"], "bytes zeroed behind the moved tokens");
    COMPARED_BYTES = counter("kvferry_compared_bytes_total", &["peer"], "bytes whose digests were compared on both sides");
    DESCRIPTORS = counter("kvferry_descriptors_total", &["peer", "merged"], "descriptors of reads, before and after neighbours were merged");
    OFFERS = counter("kvferry_offers_total", &["outcome"], "offers of blocks: accepted, refused");
    LEASES_CLOSED = counter("kvferry_leases_closed_total", &["peer", "how"], "leases that are over, by how; peer none: nobody had bound it");
    LEASE_AGE = histogram("kvferry_lease_age_seconds", LONG_SECONDS, &["how"], "from the offer to the lease's end; how read: its age when it was read");
    FENCE_REJECTIONS = counter("kvferry_fence_rejections_total", &["peer"], "releases that were answered Stale: the consumer has thrown away what it had read");
    WRITES = counter("kvferry_writes_total", &["outcome"], "what ranks of this engine were to write for a peer's request, by rank: done, failed, cancelled, in doubt");
    WRITTEN_BYTES = counter("kvferry_written_bytes_total", &[], "bytes that ranks of this engine have written which have written all of theirs");
    CONTRADICTIONS = counter("kvferry_contradictions_total", &["peer"], "times that a peer has said what can't be true beside what it had said");
    RECLAIMED = counter("kvferry_reclaimed_blocks_total", &[], "blocks that have left quarantine because of their age, without evidence");
    HANDSHAKES = counter("kvferry_handshakes_total", &["outcome"], "links to other owners: ok, failed, refused");
    HANDSHAKE_TIME = histogram("kvferry_handshake_seconds", SECONDS, &["peer"], "until the other owner's hello is proven, from the call to connect, or from when it was accepted");
    LINKS_LOST = counter("kvferry_links_lost_total", &["peer"], "links that were up and are gone, idle ones among them");
    HEARTBEATS = counter("kvferry_heartbeats_total", &["peer", "direction"], "heartbeats, each for all leases of a peer: sent, received");
    RANKS_LOST = counter("kvferry_ranks_lost_total", &[], "ranks of this engine that are gone");
    PENDING = gauge("kvferry_pulls_pending", &[], "pulls that have not ended");
    LEASES = gauge("kvferry_leases_open", &["state"], "leases that are open: offered (nobody has bound them), bound");
    QUARANTINE = gauge("kvferry_quarantined_blocks", &["by"], "blocks that may still be written for a pull which has ended, by ranks of this engine or by a producer's writers");
    LINKS = gauge("kvferry_links", &[], "links to other owners that are up");
    RANKS = gauge("kvferry_ranks", &["state"], "ranks of this engine: joined, missing");
}
