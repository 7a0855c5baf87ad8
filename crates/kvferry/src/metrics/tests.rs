//! What a recorder gets, and that the pages which name metrics name these.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_geometry::staged::Place;
use kvferry_geometry::units::{Bytes, RankId};
use kvferry_proto::lease::first_attempt;
use kvferry_proto::names::{Epoch, LeaseId};
use kvferry_proto::push::{WriteReport, WriterReport};
use kvferry_proto::rank::RankFault;
use kvferry_session::outcome::PairReport;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde_json::Value;

use super::*;
use crate::Assurance;

const PAGE: &str = include_str!("../../../../docs/observability.md");
const DASHBOARD: &str = include_str!("../../../../docs/grafana/kvferry.json");

fn id(name: &str) -> EngineId {
    EngineId::new(name).unwrap()
}

fn pair(dst: u32, bytes: u64, millis: u64) -> PairReport {
    PairReport {
        src: RankId::new(0),
        dst: RankId::new(dst),
        bytes: Bytes::new(bytes),
        rows: 1,
        descriptors_before: 80,
        descriptors_after: 2,
        place: Place::Direct,
        lane: "shm".into(),
        took: Duration::from_millis(millis),
    }
}

fn report(peer: &str) -> Report {
    Report {
        fence: first_attempt(id(peer), Epoch::new(1), LeaseId::new(2)),
        assurance: Assurance::Fenced,
        pairs: vec![pair(0, 1000, 10), pair(0, 3000, 5), pair(1, 4000, 20)],
        zeroed: Bytes::new(16),
        compared: Bytes::new(32),
        faults: Vec::new(),
        in_doubt: Vec::new(),
        writers_in_doubt: Vec::new(),
        groups: Vec::new(),
        attempts: 1,
        phases: kvferry_session::outcome::Phases::default(),
        took: Duration::from_millis(25),
    }
}

fn failed(peer: &str, cause: FailureCause) -> Failed {
    let fault = RankFault { stage: Stage::Read, text: "gone".into(), in_doubt: false, bad: Vec::new() };
    let faults = vec![(RankId::new(1), fault)];
    Failed { cause, report: Report { faults, ..report(peer) } }
}

/// Everything that can happen, once.
fn everything(m: &mut OwnerMetrics) {
    let peer = id("p");
    m.link_up(&peer, Duration::from_millis(2));
    for _ in 0..3 {
        m.pull_begun();
    }
    m.ended(&report("p"), None, false);
    m.pull_ended(&Err(failed("p", FailureCause::Stale)), true);
    m.pull_ended(&Err(failed("p", FailureCause::Cancelled)), false);
    m.pull_begun();
    m.pull_ended(&Err(failed("p", FailureCause::Refused(BindRefusal::WrongContent))), false);
    m.offered(true);
    m.offered(true);
    m.offered(false);
    m.lease_closed(Closing::Read, Duration::from_secs(1), Some(&peer));
    m.lease_closed(Closing::Expired, Duration::from_secs(30), None);
    m.fence_rejected(&peer);
    m.link_failed(Unmet::Failed);
    m.link_failed(Unmet::Refused);
    m.link_down(&peer);
    m.heartbeat_sent(&peer);
    m.heartbeat_received(&peer);
    m.rank_lost();
    // One more of each, which stays.
    m.pull_begun();
    m.offered(true);
    m.link_up(&peer, Duration::from_millis(2));
    m.standing(Known { quarantined: 7, by_writers: 3, bound: 1, ranks: 6, missing: 2 });
    let write = |bytes| WriteReport {
        dst: RankId::new(0),
        bytes: Bytes::new(bytes),
        descriptors: 1,
        lane: String::new(),
        took: Duration::ZERO,
    };
    let writes = vec![write(1000), write(24)];
    m.written(&Ok(WriterReport { writes, queued: Duration::ZERO, slices: 2, took: Duration::ZERO }));
    m.written(&Err(RankFault { stage: Stage::Write, text: "gone".into(), in_doubt: true, bad: Vec::new() }));
    m.written(&Err(RankFault { stage: Stage::Cancelled, text: "stopped".into(), in_doubt: false, bad: Vec::new() }));
    m.reclaimed(5);
    m.contradiction(&peer);
}

fn rendered(happens: impl FnOnce(&mut OwnerMetrics)) -> String {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        if let MetricKind::Histogram(buckets) = metric.kind {
            builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.into()), buckets).unwrap();
        }
    }
    let recorder = builder.build_recorder();
    let mut text = String::new();
    metrics::with_local_recorder(&recorder, || {
        let mut m = OwnerMetrics::new(&id("d"));
        happens(&mut m);
        // Its gauges are zero afterwards.
        text = recorder.handle().render();
    });
    text
}

/// The value of a series, without the label of the engine.
fn series(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
    let value = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.contains("engine=\"d\""), "{line}");
        let name = name.replace("engine=\"d\",", "").replace("{engine=\"d\"}", "").replace(",engine=\"d\"", "");
        (name, value.parse().unwrap())
    };
    lines.map(value).collect()
}

#[test]
fn what_happens_is_counted_where_it_belongs() {
    let text = rendered(everything);
    let series = series(&text);
    for (name, value) in [
        ("kvferry_pulls_total{peer=\"p\",outcome=\"delivered\",mode=\"pull\"}", 1.0),
        ("kvferry_pulls_total{peer=\"p\",outcome=\"failed\",mode=\"pull\"}", 1.0),
        ("kvferry_pulls_total{peer=\"p\",outcome=\"failed\",mode=\"push\"}", 1.0),
        ("kvferry_pulls_total{peer=\"p\",outcome=\"cancelled\",mode=\"pull\"}", 1.0),
        ("kvferry_pull_failures_total{peer=\"p\",kind=\"stale\"}", 1.0),
        ("kvferry_pull_failures_total{peer=\"p\",kind=\"refused: wrong content\"}", 1.0),
        ("kvferry_rank_faults_total{peer=\"p\",stage=\"read\"}", 3.0),
        ("kvferry_pull_attempts_total{peer=\"p\"}", 4.0),
        ("kvferry_pull_seconds_bucket{peer=\"p\",outcome=\"delivered\",mode=\"pull\",le=\"0.025\"}", 1.0),
        ("kvferry_pull_seconds_bucket{peer=\"p\",outcome=\"delivered\",mode=\"pull\",le=\"0.01\"}", 0.0),
        ("kvferry_wire_bytes_total{peer=\"p\"}", 32_000.0),
        ("kvferry_ideal_bytes_total{peer=\"p\"}", 8000.0),
        ("kvferry_pull_bytes_sum{peer=\"p\"}", 8000.0),
        ("kvferry_zeroed_bytes_total{peer=\"p\"}", 64.0),
        ("kvferry_compared_bytes_total{peer=\"p\"}", 128.0),
        ("kvferry_descriptors_total{peer=\"p\",merged=\"before\"}", 960.0),
        ("kvferry_descriptors_total{peer=\"p\",merged=\"after\"}", 24.0),
        ("kvferry_offers_total{outcome=\"accepted\"}", 3.0),
        ("kvferry_offers_total{outcome=\"refused\"}", 1.0),
        ("kvferry_leases_closed_total{peer=\"p\",how=\"read\"}", 1.0),
        ("kvferry_leases_closed_total{peer=\"none\",how=\"expired\"}", 1.0),
        ("kvferry_lease_age_seconds_sum{how=\"expired\"}", 30.0),
        ("kvferry_fence_rejections_total{peer=\"p\"}", 1.0),
        ("kvferry_handshakes_total{outcome=\"ok\"}", 2.0),
        ("kvferry_handshakes_total{outcome=\"refused\"}", 1.0),
        ("kvferry_handshake_seconds_count{peer=\"p\"}", 2.0),
        ("kvferry_links_lost_total{peer=\"p\"}", 1.0),
        ("kvferry_heartbeats_total{peer=\"p\",direction=\"sent\"}", 1.0),
        ("kvferry_heartbeats_total{peer=\"p\",direction=\"received\"}", 1.0),
        ("kvferry_ranks_lost_total", 1.0),
        ("kvferry_pulls_pending", 1.0),
        ("kvferry_leases_open{state=\"offered\"}", 0.0),
        ("kvferry_leases_open{state=\"bound\"}", 1.0),
        ("kvferry_quarantined_blocks{by=\"ranks\"}", 4.0),
        ("kvferry_quarantined_blocks{by=\"writers\"}", 3.0),
        ("kvferry_writes_total{outcome=\"done\"}", 1.0),
        ("kvferry_writes_total{outcome=\"in doubt\"}", 1.0),
        ("kvferry_writes_total{outcome=\"cancelled\"}", 1.0),
        ("kvferry_written_bytes_total", 1024.0),
        ("kvferry_reclaimed_blocks_total", 5.0),
        ("kvferry_contradictions_total{peer=\"p\"}", 1.0),
        ("kvferry_links", 1.0),
        ("kvferry_ranks{state=\"joined\"}", 4.0),
        ("kvferry_ranks{state=\"missing\"}", 2.0),
    ] {
        assert_eq!(series.get(name), Some(&value), "{name}\n{text}");
    }
}

/// The family of a series: its name without what a histogram adds.
fn family(name: &str) -> &str {
    let is = |n: &&str| METRICS.iter().any(|m| m.name == *n);
    let parts = ["_bucket", "_sum", "_count"];
    parts.iter().filter_map(|p| name.strip_suffix(p)).find(is).unwrap_or(name)
}

#[test]
fn every_metric_is_in_the_list_with_its_labels() {
    let text = rendered(everything);
    let mut seen: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in text.lines().filter(|l| l.starts_with("kvferry_")) {
        let (name, labels) = line.split_once('{').unwrap();
        let keys = labels.split("\",").filter_map(|l| l.split_once('=')).map(|(key, _)| key.trim_matches(','));
        seen.entry(family(name)).or_default().extend(keys.filter(|key| *key != "le" && *key != "engine"));
    }
    for metric in METRICS {
        let labels: BTreeSet<&str> = metric.labels.iter().copied().collect();
        assert_eq!(seen.remove(metric.name), Some(labels), "{}", metric.name);
        assert!(text.contains(&format!("# HELP {} {}", metric.name, metric.help)), "{}", metric.name);
    }
    assert_eq!(seen, BTreeMap::new(), "metrics that are not in the list");
}

/// Words of a text that look like our metrics.
fn names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|w| w.starts_with("kvferry_") && *w != "kvferry_").map(family).collect()
}

#[test]
fn the_page_describes_every_metric_as_it_is() {
    for metric in METRICS {
        let kind = match metric.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram(_) => "histogram",
        };
        let labels = metric.labels.iter().map(|l| format!("`{l}`")).collect::<Vec<_>>().join(", ");
        let labels = if labels.is_empty() { "-".to_owned() } else { labels };
        let row = format!("| `{}` | {kind} | {labels} | {} |", metric.name, metric.help);
        assert!(PAGE.contains(&row), "the page lacks\n{row}");
    }
    let known: BTreeSet<&str> = METRICS.iter().map(|m| m.name).collect();
    let unknown: Vec<_> = names(PAGE).difference(&known).copied().collect();
    assert_eq!(unknown, [""; 0], "the page names what there isn't");
}

#[test]
fn the_dashboard_is_sound_and_asks_for_metrics_that_there_are() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let known: BTreeSet<&str> = METRICS.iter().map(|m| m.name).collect();
    let mut asked = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "an id is there twice: {panel}");
        assert!(panel["gridPos"]["w"].as_u64().unwrap() <= 24);
        if panel["type"] == "row" {
            continue;
        }
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let opened = query.chars().filter(|c| "([{".contains(*c)).count();
            assert_eq!(opened, query.chars().filter(|c| ")]}".contains(*c)).count(), "{query}");
            let named = names(query);
            assert!(!named.is_empty(), "{query}");
            for name in named {
                let metric = METRICS.iter().find(|m| m.name == name).unwrap_or_else(|| panic!("{name}: {query}"));
                let of_histogram = query.contains(&format!("{name}_"));
                assert_eq!(of_histogram, matches!(metric.kind, MetricKind::Histogram(_)), "{query}");
                asked.insert(name);
            }
            // What is summed by is a label of what is asked for.
            for by in query.split("by (").skip(1) {
                for label in by.split(')').next().unwrap().split(',').map(str::trim) {
                    let has = |n: &str| METRICS.iter().any(|m| m.name == n && m.labels.contains(&label));
                    assert!(["le", "engine"].contains(&label) || names(query).into_iter().any(has), "{label}: {query}");
                }
            }
        }
    }
    assert!(names(DASHBOARD).is_subset(&known), "{:?}", names(DASHBOARD).difference(&known));
    let missing: Vec<_> = known.difference(&asked).copied().collect();
    assert!(missing.len() <= 4, "not on the dashboard: {missing:?}");
}

/// What a figure is for: a request's events by themselves, and what they add up to with a recorder that keeps all.
#[test]
fn counting_costs_little() {
    let rounds = 20_000;
    let cost = |m: &mut OwnerMetrics| {
        let (peer, report) = (id("p"), report("p"));
        let start = std::time::Instant::now();
        for _ in 0..rounds {
            m.pull_begun();
            m.ended(&report, None, false);
            m.offered(true);
            m.lease_closed(Closing::Read, Duration::from_millis(3), Some(&peer));
        }
        start.elapsed() / rounds
    };
    let nobody = cost(&mut OwnerMetrics::new(&id("d")));
    let mut somebody = Duration::ZERO;
    drop(rendered(|m| somebody = cost(m)));
    println!("a pull and a lease: {nobody:?} without a recorder, {somebody:?} with Prometheus's");
    // Not figures to compare: a name formatted or a handle made for each would be far beyond.
    assert!(nobody < Duration::from_micros(200) && somebody < Duration::from_micros(500), "{nobody:?} {somebody:?}");
}

#[test]
fn peers_beyond_the_first_ones_are_counted_together() {
    let text = rendered(|m| {
        for i in 0..MAX_PEERS + 50 {
            m.link_up(&id(&format!("p{i}")), Duration::ZERO);
        }
        m.link_up(&id("p3"), Duration::ZERO);
    });
    let series = series(&text);
    assert_eq!(series["kvferry_handshake_seconds_count{peer=\"other\"}"], 50.0);
    assert_eq!(series["kvferry_handshake_seconds_count{peer=\"p3\"}"], 2.0);
    let peers = series.keys().filter(|k| k.starts_with("kvferry_handshake_seconds_count")).count();
    assert_eq!(peers, MAX_PEERS + 1);
}

/// A reference names whatever engine it likes.
#[test]
fn an_engine_that_was_never_met_takes_no_place() {
    let text = rendered(|m| {
        for i in 0..MAX_PEERS + 50 {
            m.pull_begun();
            m.pull_ended(&Err(failed(&format!("forged{i}"), FailureCause::Stale)), false);
        }
        m.link_up(&id("p"), Duration::ZERO);
        m.pull_begun();
        m.ended(&report("p"), None, false);
    });
    let series = series(&text);
    assert_eq!(series["kvferry_pulls_total{peer=\"other\",outcome=\"failed\",mode=\"pull\"}"], 178.0);
    assert_eq!(series["kvferry_pulls_total{peer=\"p\",outcome=\"delivered\",mode=\"pull\"}"], 1.0);
    assert!(!text.contains("forged"), "{text}");
}

#[test]
fn after_an_owners_end_its_gauges_are_zero_and_its_counters_as_they_were() {
    let recorder = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&recorder, || everything(&mut OwnerMetrics::new(&id("d"))));
    let series = series(&recorder.handle().render());
    for metric in METRICS.iter().filter(|m| m.kind == MetricKind::Gauge) {
        let of_it: Vec<_> = series.iter().filter(|(name, _)| name.split('{').next() == Some(metric.name)).collect();
        assert!(!of_it.is_empty() && of_it.iter().all(|(_, value)| **value == 0.0), "{}: {of_it:?}", metric.name);
    }
    assert_eq!(series["kvferry_ranks_lost_total"], 1.0);
}

#[test]
fn me_01_intervals_tell_what_ranks_did_even_if_it_was_only_failing() {
    let mut m = OwnerMetrics::new(&id("d"));
    let second = Duration::from_secs;
    assert_eq!((m.interval(second(11)), m.due()), (None, None));
    m.ended(&report("p"), None, false);
    assert_eq!((m.interval(second(20)), m.due()), (None, Some(second(21))), "too soon");
    let t = m.interval(second(21)).unwrap();
    // Two ranks: one read 4,000 bytes from two sources at once, in 10 ms; the other as many in 20 ms.
    assert_eq!((t.count(), t.failures(), t.bytes(), t.time()), (2, 0, Bytes::new(8000), Duration::from_millis(30)));
    let mut only_failures = failed("p", FailureCause::Stale);
    only_failures.report.pairs.clear();
    m.pull_ended(&Err(only_failures), false);
    let t = m.interval(second(60)).unwrap();
    assert_eq!((t.count(), t.failures()), (0, 1));
    assert_eq!(m.interval(second(90)), None);
}
