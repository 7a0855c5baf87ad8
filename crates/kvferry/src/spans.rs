//! Spans and events of one request, for whatever subscriber the application has.
//!
//! At the consumer a pull is one span, `pull`, from the call to the end, with a child span for each phase that it is in. At
//! the producer an offer and the end of its lease are events. Both carry the lease's id, so that a request can be followed over
//! engines; the field is `lease` everywhere.
//!
//! Without a subscriber, or one that doesn't want these spans, a request costs a few loads: no field is formatted and
//! nothing is allocated. Nothing is decided here, and no clock is read: times are the subscriber's own, and those of the reports.

use std::time::Duration;

use kvferry_geometry::units::Tokens;
use kvferry_proto::lease::Closing;
use kvferry_proto::names::{EngineId, Fence};
use kvferry_proto::rank::PullId;
use kvferry_session::outcome::Phase;
use kvferry_session::{Delivered, Failed, Mode};
use tracing::field::Empty;
use tracing::{Span, debug, debug_span, info, info_span, warn};

use crate::metrics::Transfers;

/// What the spans and events of this crate are filtered by.
const TARGET: &str = "kvferry";

/// The span of a pull, and that of its phase. Dropping it ends both.
#[derive(Debug)]
pub(crate) struct PullSpan {
    span: Span,
    phase: Span,
}

impl PullSpan {
    /// Begins a span, as a child of the caller's.
    pub(crate) fn new(engine: &EngineId, fence: &Fence, mode: Mode) -> Self {
        let mode = if mode == Mode::Pull { "pull" } else { "push" };
        let span = info_span!(
            target: TARGET,
            "pull",
            lease = %fence.lease,
            engine = %engine,
            peer = %fence.engine,
            mode,
            outcome = Empty,
            attempts = Empty,
            bytes = Empty,
        );
        Self { span, phase: Span::none() }
    }

    /// This, if somebody wants to see it.
    pub(crate) fn seen(self) -> Option<Box<Self>> {
        (!self.span.is_disabled()).then(|| Box::new(self))
    }

    /// Ends the phase that it was in, and begins this one.
    pub(crate) fn phase(&mut self, phase: Phase) {
        // A span without a subscriber has no children.
        if self.span.is_disabled() {
            return;
        }
        let parent = &self.span;
        self.phase = match phase {
            Phase::Link => debug_span!(target: TARGET, parent: parent, "link"),
            Phase::Bind => debug_span!(target: TARGET, parent: parent, "bind"),
            Phase::Write => debug_span!(target: TARGET, parent: parent, "write"),
            Phase::Read => debug_span!(target: TARGET, parent: parent, "read"),
            Phase::Stop => debug_span!(target: TARGET, parent: parent, "stop"),
            Phase::Release => debug_span!(target: TARGET, parent: parent, "release"),
            other => debug_span!(target: TARGET, parent: parent, "phase", name = other.name()),
        };
    }

    /// So much is in place.
    pub(crate) fn progress(&self, tokens: Tokens) {
        debug!(target: TARGET, parent: &self.span, tokens = tokens.get(), "progress");
    }

    /// Says how it ended.
    pub(crate) fn ended(self, result: &Result<Delivered, Failed>) {
        if self.span.is_disabled() {
            return;
        }
        let Self { span, phase } = self;
        drop(phase);
        let (report, outcome) = match result {
            Ok(delivered) => (delivered.report(), "delivered"),
            Err(failed) => (&failed.report, failed.cause.kind()),
        };
        span.record("outcome", outcome);
        span.record("attempts", report.attempts);
        span.record("bytes", report.bytes().get());
        if let Err(failed) = result {
            warn!(target: TARGET, parent: &span, error = %failed, took = ?report.took, "not delivered");
        }
    }
}

/// Blocks were offered.
pub(crate) fn offered(fence: &Fence) {
    debug!(target: TARGET, lease = %fence.lease, engine = %fence.engine, "offered");
}

/// A lease is over.
pub(crate) fn lease_closed(fence: &Fence, how: Closing, age: Duration, consumer: Option<&EngineId>) {
    let peer = consumer.map_or("", EngineId::as_str);
    let (lease, engine, how, age) = (fence.lease, &fence.engine, how.name(), age);
    debug!(target: TARGET, %lease, %engine, peer, how, ?age, "lease closed");
}

/// A release came too late.
pub(crate) fn fence_rejected(fence: &Fence, peer: &EngineId) {
    warn!(target: TARGET, lease = %fence.lease, engine = %fence.engine, %peer, "answered stale: its lease was over before its reads");
}

/// Blocks have left quarantine because of their age.
pub(crate) fn reclaimed(engine: &EngineId, pull: PullId, blocks: usize) {
    warn!(target: TARGET, %engine, pull = pull.0, blocks, "reclaimed: nothing proves that nobody writes these blocks any more");
}

/// A peer contradicts itself.
pub(crate) fn contradiction(fence: &Fence, peer: &EngineId, what: &str) {
    warn!(target: TARGET, lease = %fence.lease, engine = %fence.engine, %peer, what, "contradiction");
}

/// Two owners know each other.
pub(crate) fn link_up(engine: &EngineId, peer: &EngineId, version: u16, took: Duration) {
    info!(target: TARGET, %engine, %peer, version, ?took, "link up");
}

/// A link did not come up.
pub(crate) fn link_failed(engine: &EngineId, address: Option<&str>, reasons: &[String], refused: bool) {
    let (address, reasons) = (address.unwrap_or("accepted"), reasons.join("; "));
    warn!(target: TARGET, %engine, address, refused, reasons, "no link");
}

/// Somebody has connected who could not prove who it is.
pub(crate) fn not_accepted(engine: &EngineId, reason: &str) {
    warn!(target: TARGET, %engine, reason, "not accepted");
}

/// A link that was up is gone.
pub(crate) fn link_down(engine: &EngineId, peer: &EngineId, reason: &str) {
    info!(target: TARGET, %engine, %peer, reason, "link down");
}

/// What the ranks have read in an interval.
pub(crate) fn transfers(engine: &EngineId, t: &Transfers) {
    info!(
        target: TARGET,
        %engine,
        count = t.count(),
        failures = t.failures(),
        bytes = t.bytes().get(),
        mean_bytes = t.mean_bytes(),
        mean_time = ?t.mean_time(),
        per_rank_throughput = t.per_rank_throughput(),
        wall_clock_throughput = t.wall_clock_throughput(),
        "transfers"
    );
}

#[cfg(test)]
mod tests {
    use std::fmt::{Debug, Write as _};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Instant;

    use kvferry_geometry::units::Bytes;
    use kvferry_proto::lease::first_attempt;
    use kvferry_proto::names::{Epoch, LeaseId};
    use kvferry_session::FailureCause;
    use kvferry_session::outcome::{Phases, Report};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::Assurance;

    /// Writes down all that it hears.
    #[derive(Clone, Default)]
    struct Notes(Arc<(AtomicU64, Mutex<Vec<String>>)>);

    struct Fields(String);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            write!(self.0, " {}={value:?}", field.name()).unwrap();
        }
    }

    impl Notes {
        fn note(&self, text: String) {
            self.0.1.lock().unwrap().push(text);
        }

        fn taken(&self) -> Vec<String> {
            std::mem::take(&mut self.0.1.lock().unwrap())
        }
    }

    impl Subscriber for Notes {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "kvferry"
        }
        fn new_span(&self, span: &Attributes<'_>) -> Id {
            let id = self.0.0.fetch_add(1, Ordering::Relaxed) + 1;
            let mut fields = Fields(String::new());
            span.record(&mut fields);
            let parent = span.parent().map_or(0, Id::into_u64);
            self.note(format!("{id} in {parent}: {}{}", span.metadata().name(), fields.0));
            Id::from_u64(id)
        }
        fn record(&self, span: &Id, values: &Record<'_>) {
            let mut fields = Fields(String::new());
            values.record(&mut fields);
            self.note(format!("{}:{}", span.into_u64(), fields.0));
        }
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut fields = Fields(String::new());
            event.record(&mut fields);
            let parent = event.parent().map_or(0, Id::into_u64);
            self.note(format!("{} in {parent}:{}", event.metadata().level(), fields.0));
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
        fn try_close(&self, id: Id) -> bool {
            self.note(format!("{} ends", id.into_u64()));
            true
        }
    }

    fn fence() -> Fence {
        first_attempt(EngineId::new("p").unwrap(), Epoch::new(1), LeaseId::new(0xabc))
    }

    fn failed() -> Failed {
        let report = Report {
            fence: fence(),
            assurance: Assurance::Fenced,
            pairs: Vec::new(),
            zeroed: Bytes::ZERO,
            compared: Bytes::ZERO,
            faults: Vec::new(),
            in_doubt: Vec::new(),
            writers_in_doubt: Vec::new(),
            groups: Vec::new(),
            attempts: 2,
            phases: Phases::default(),
            took: Duration::from_millis(3),
        };
        Failed { cause: FailureCause::Stale, report }
    }

    #[test]
    fn a_pull_is_one_span_with_one_inside_for_each_phase() {
        let notes = Notes::default();
        let d = EngineId::new("d").unwrap();
        let lease = format!("lease={:032x}", 0xabc);
        tracing::subscriber::with_default(notes.clone(), || {
            let mut span = PullSpan::new(&d, &fence(), Mode::Push { progress: true });
            span.phase(Phase::Link);
            span.phase(Phase::Write);
            span.progress(Tokens::new(16));
            span.ended(&Err(failed()));
        });
        let heard = notes.taken();
        assert_eq!(
            heard[..6],
            [
                format!("1 in 0: pull {lease} engine=d peer=p mode=\"push\""),
                "2 in 1: link".to_owned(),
                "3 in 1: write".to_owned(),
                "2 ends".to_owned(),
                "DEBUG in 1: message=progress tokens=16".to_owned(),
                "3 ends".to_owned(),
            ]
        );
        assert_eq!(heard[6..9], ["1: outcome=\"stale\"", "1: attempts=2", "1: bytes=0"]);
        assert!(
            heard[9].starts_with("WARN in 1: message=not delivered error=the producer answered stale"),
            "{heard:#?}"
        );
        assert_eq!(heard[10..], ["1 ends"]);
    }

    #[test]
    fn both_ends_of_a_request_name_its_lease() {
        let notes = Notes::default();
        let d = EngineId::new("d").unwrap();
        tracing::subscriber::with_default(notes.clone(), || {
            offered(&fence());
            lease_closed(&fence(), Closing::Read, Duration::from_secs(1), Some(&d));
            fence_rejected(&fence(), &d);
        });
        let heard = notes.taken();
        assert_eq!(heard.len(), 3);
        assert!(heard.iter().all(|h| h.contains(&format!("lease={:032x}", 0xabc))), "{heard:#?}");
        assert!(heard[1].contains("peer=\"d\" how=\"read\" age=1s"), "{heard:#?}");
    }

    /// Not a figure to compare: only that nothing is formatted or allocated for nobody, which would be a thousand times more.
    #[test]
    fn without_a_subscriber_it_costs_next_to_nothing() {
        let (d, fence, result) = (EngineId::new("d").unwrap(), fence(), Err(failed()));
        let rounds = 100_000u32;
        let start = Instant::now();
        for _ in 0..rounds {
            let mut span = PullSpan::new(&d, &fence, Mode::Pull);
            Phase::ALL.into_iter().for_each(|phase| span.phase(phase));
            span.ended(&result);
            offered(&fence);
            lease_closed(&fence, Closing::Read, Duration::ZERO, Some(&d));
        }
        let each = start.elapsed() / rounds;
        println!("a pull's and a lease's spans and events without a subscriber: {each:?}");
        assert!(each < Duration::from_micros(200), "{each:?}");
    }
}
