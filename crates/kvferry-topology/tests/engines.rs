//! Both engines on small deployments: they agree on what is moved, keep what they promise, and are the same every time.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test")]

use std::path::Path;

use kvferry_topology::answer::{Answer, LinkUse};
use kvferry_topology::run::{Engine, run};
use kvferry_topology::scenario::{Scenario, ScenarioError};

fn scenario(text: &str) -> Scenario {
    Scenario::from_toml("test", text, Path::new(".")).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// A deployment of two engines a side on two machines, with what is different.
fn text(model: &str, (p, d): (&str, &str), transfer: &str, more: &str) -> String {
    format!(
        r#"
        seed = 7
        [cluster]
        preset = "hgx-h100"
        nodes = 4
        [prefill]
        model = "{model}"
        engine = "{p}"
        engines = 2
        layers = 8
        kv_gib = 4
        [prefill.time]
        tokens_per_s = 20000
        [decode]
        model = "{model}"
        engine = "{d}"
        engines = 2
        layers = 8
        kv_gib = 4
        [decode.time]
        ms_per_token = 5
        [load]
        requests = 40
        arrivals = "poisson"
        per_s = 10
        prompt = {{ uniform = [200, 3000] }}
        output = 20
        [transfer]
        {transfer}
        {more}
        "#
    )
}

fn answers(s: &Scenario) -> (Answer, Answer) {
    (run(s, Engine::Analytic, false).unwrap(), run(s, Engine::Events, false).unwrap())
}

fn time(a: &Answer, name: &str) -> (f64, f64) {
    let t = a.times.iter().find(|t| t.name == name).unwrap();
    (t.p50, t.p99)
}

const SHAPES: &[(&str, (&str, &str))] = &[
    ("llama-3.1-8b", ("tp=4", "tp=4")),
    ("llama-3.1-8b", ("tp=4", "tp=2")),
    ("llama-3.1-8b", ("tp=2", "tp=4,pp=2")),
    ("deepseek-v3", ("tp=4", "tp=1")),
    ("deepseek-v3", ("tp=4,dcp=2", "tp=2")),
    ("kimi-linear-48b-a3b", ("tp=2,pp=2", "tp=4")),
    ("gpt-oss-120b", ("tp=4", "tp=2")),
];

#[test]
fn both_engines_move_the_same_bytes_and_account_for_all_of_them() {
    for (model, shapes) in SHAPES {
        for transfer in [
            "mode = \"pull\"",
            "mode = \"push\"",
            "mode = \"push\"\nstream = \"layers\"\nsteps = 4",
            "mode = \"push\"\nstream = \"chunks\"",
        ] {
            let what = format!("{model} {shapes:?} {transfer}");
            let s = scenario(&text(model, *shapes, transfer, ""));
            let (closed, events) = answers(&s);
            for a in [&closed, &events] {
                let r = &a.requests;
                assert_eq!((r.all, r.delivered, r.failed.len()), (40, 40, 0), "{what} {}: {:?}", a.engine, r.failed);
                assert_eq!(r.bytes, r.wire_bytes, "{what} {}", a.engine);
                let pairs: u64 = a.traffic.pairs.iter().map(|p| p.bytes).sum();
                let cells: u64 = a.traffic.cells.iter().map(|c| c.2).sum();
                assert_eq!((pairs, cells), (r.bytes, r.bytes), "{what} {}", a.engine);
                assert_eq!(a.traffic.all_pairs, a.traffic.pairs.len() as u64, "{what}");
                // Nothing stays on its machine here, so each byte goes out of a card and into one.
                for end in ["/out", "/in"] {
                    let nics = a.links.iter().filter(|l| l.kind == "nic" && l.name.ends_with(end));
                    let carried = nics.map(|l| l.bytes).sum::<u64>();
                    assert!(carried.abs_diff(r.bytes) < 100, "{what} {}: {carried} of {} {end}", a.engine, r.bytes);
                }
                assert!(
                    a.links.iter().all(|l| l.mean <= 1.0 + 1e-9 && l.peak.is_none_or(|p| p <= 1.0 + 1e-6)),
                    "{what}: {:?}",
                    a.links.first()
                );
                let fullest: Vec<f64> = a.links.iter().map(LinkUse::fullest).collect();
                assert!(fullest.is_sorted_by(|a, b| a >= b), "{what} {}: {fullest:?}", a.engine);
                for l in &a.links {
                    let most = l.over_time.iter().copied().reduce(f32::max).map(f64::from);
                    assert_eq!(l.peak, most, "{what} {}: {}", a.engine, l.name);
                    assert_eq!(l.peak.is_some(), a.engine == "events", "{what}: {}", l.name);
                }
                let json = serde_json::to_string(a).unwrap();
                let back = serde_json::from_str::<Answer>(&json).unwrap();
                assert_eq!(
                    (&back.requests, &back.traffic, &back.warnings),
                    (&a.requests, &a.traffic, &a.warnings),
                    "{what}"
                );
            }
            assert_eq!(closed.requests.bytes, events.requests.bytes, "{what}");
            let sent = |a: &Answer| a.traffic.pairs.iter().map(|p| p.descriptors).sum::<u64>();
            if !transfer.contains("stream") {
                // Tables of an engine that had others before are less contiguous, never more.
                assert!(sent(&closed) <= sent(&events), "{what}: {} {}", sent(&closed), sent(&events));
            }
        }
    }
}

#[test]
fn without_contention_the_closed_form_says_what_the_events_do() {
    for (model, shapes) in SHAPES {
        for mode in ["pull", "push"] {
            let s = text(model, *shapes, &format!("mode = \"{mode}\""), "").replace("per_s = 10", "per_s = 1");
            let (closed, events) = answers(&scenario(&s));
            for name in ["prefill", "wire", "handover", "time to first token"] {
                let ((a50, a99), (b50, b99)) = (time(&closed, name), time(&events, name));
                // The first of a pair of engines connects, which the closed form leaves out.
                let near = |a: f64, b: f64, more: f64| (a - b).abs() <= 0.35 * a.max(b) + more;
                assert!(
                    near(a50, b50, 3e-4) && near(a99, b99, 8e-3),
                    "{model} {shapes:?} {mode} {name}: {a50} {b50}, {a99} {b99}"
                );
            }
        }
    }
}

#[test]
fn the_same_seed_is_the_same_answer_and_another_is_not() {
    let s = scenario(&text("llama-3.1-8b", ("tp=4", "tp=2"), "mode = \"push\"\nstream = \"layers\"", ""));
    let twice = [0, 1].map(|_| run(&s, Engine::Events, false).unwrap());
    assert_eq!(twice[0], twice[1]);
    let other = run(&Scenario { seed: 8, ..s }, Engine::Events, false).unwrap();
    assert_ne!(other.times, twice[0].times);
}

#[test]
fn streaming_hides_the_wire_behind_the_prefill() {
    let s = text("llama-3.1-8b", ("tp=1", "tp=1"), "mode = \"push\"", "").replace("hgx-h100", "tcp-pair");
    let a = run(&scenario(&s), Engine::Events, true).unwrap();
    let streamed = a.compared.iter().find(|c| c.with.contains("layers")).unwrap();
    let (own, _) = time(&a, "handover");
    assert!(streamed.handover.p50 < own / 2.0, "{} beside {own}", streamed.handover.p50);
    assert!(streamed.first_token.p50 < time(&a, "time to first token").0);
}

#[test]
fn a_small_pool_makes_requests_wait_and_loses_none() {
    let s = text("llama-3.1-8b", ("tp=1", "tp=1"), "", "")
        .replace("kv_gib = 4\n        [decode.time]", "kv_gib = 0.15\n        [decode.time]");
    let a = run(&scenario(&s.replace("output = 20", "output = 400")), Engine::Events, false).unwrap();
    assert_eq!((a.requests.delivered, a.requests.failed.len()), (40, 0), "{:?}", a.requests);
    assert!(a.pools.waited > 0 && a.pools.peak_used <= a.pools.capacity, "{:?}", a.pools);
    assert!(a.warnings.iter().any(|w| w.code == "pool"), "{:?}", a.warnings);
}

#[test]
fn what_breaks_is_said_and_the_rest_is_delivered() {
    for failure in ["prefill = 0", "decode = 1", "link = \"node0/nic0/out\"\npercent = 1"] {
        for transfer in ["", "mode = \"push\"\nstream = \"layers\""] {
            let more = format!("deadline_s = 5\n[[failure]]\nat_s = 1.0\nlasts_s = 1.0\n{failure}");
            let s = scenario(&text("llama-3.1-8b", ("tp=2", "tp=2"), transfer, &more));
            let a = run(&s, Engine::Events, false).unwrap();
            let failed: u64 = a.requests.failed.iter().map(|f| f.1).sum();
            assert_eq!(a.requests.delivered + failed, 40, "{failure} {transfer}: {:?}", a.requests);
            assert!(a.requests.delivered > 20, "{failure} {transfer}: {:?}", a.requests);
        }
    }
}

#[test]
fn engines_that_do_not_match_are_told_as_a_handshake_would() {
    let s = text("llama-3.1-8b", ("tp=4", "tp=2"), "", "").replacen("layers = 8", "layers = 7", 1);
    let errors = Scenario::from_toml("test", &s, Path::new(".")).unwrap_err();
    let [ScenarioError::Mismatch(found)] = &errors.0[..] else { panic!("{errors}") };
    assert!(found.0.iter().any(|m| format!("{m}").contains("layers.7")), "{errors}");
}

#[test]
fn all_faults_of_a_scenario_are_told_at_once() {
    let s = text("llama-3.1-8b", ("tp=4", "tp=2"), "mode = \"shove\"\nstream = \"layers\"\nrails = 0", "")
        .replace("per_s = 10", "per_s = -1")
        .replace("nodes = 4", "nodes = 0")
        .replacen("kv_gib = 4", "kv_gib = -4", 1);
    let text = Scenario::from_toml("test", &s, Path::new(".")).unwrap_err().to_string();
    for key in ["transfer.mode", "transfer.stream", "transfer.rails", "load.per_s", "nodes", "prefill.kv_gib"] {
        assert!(text.contains(key), "{key} in {text}");
    }
}

/// States alone are more than there is: no engine that has one block, whatever may fit into it.
#[test]
fn memory_without_room_for_a_block_is_a_fault() {
    let small = |gib: &str| {
        let s = text("nemotron-h-56b", ("tp=8", "tp=8"), "", "").replace("layers = 8\n", "");
        let s = s.replacen("kv_gib = 4", &format!("kv_gib = {gib}"), 1);
        Scenario::from_toml("test", &s, Path::new(".")).map(|s| s.prefill.description.blocks)
    };
    let errors = small("0.001").unwrap_err();
    assert!(matches!(errors.0[..], [ScenarioError::Pool { key: "prefill", .. }]), "{errors}");
    assert!(errors.to_string().contains("give it more (kv_gib)"), "{errors}");
    assert!(small("4").unwrap().is_some_and(|blocks| blocks > 1));
}
