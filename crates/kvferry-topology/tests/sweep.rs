//! A sweep's candidates are what a file with their keys would be, and what it refuses is refused in the words of what refuses it.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test")]

use std::collections::BTreeSet;
use std::path::Path;

use kvferry_geometry::compat::Compatible;
use kvferry_topology::analytic;
use kvferry_topology::scenario::{Scenario, ScenarioError, ScenarioErrors};
use kvferry_topology::sweep::{Candidate, Figures, Kind, Outcome, Sweep};

/// A deployment on two machines, with a table of what is varied.
fn text(model: &str, sides: (&str, &str), transfer: &str, sweep: &str) -> String {
    format!(
        r#"
        seed = 3
        [cluster]
        preset = "hgx-h100"
        nodes = 3
        [prefill]
        model = "{model}"
        engine = "tp=4"
        layers = 8
        kv_gib = 2
        {}
        [decode]
        model = "{model}"
        engine = "tp=2"
        engines = 2
        layers = 8
        kv_gib = 2
        {}
        [load]
        requests = 12
        arrivals = "poisson"
        per_s = 4
        prompt = {{ uniform = [200, 3000] }}
        output = 20
        [transfer]
        {transfer}
        {sweep}
        "#,
        sides.0, sides.1
    )
}

fn scenario(text: &str) -> Scenario {
    Scenario::from_toml("test", text, Path::new(".")).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn sweep(text: &str) -> Sweep {
    Sweep::new(scenario(text), "test").unwrap_or_else(|e| panic!("{e}\n{text}"))
}

const WIDE: &str = r#"
    [sweep]
    gpus = [8, 16]
    prefill_share = [0.25, 0.5]
    prefill_tp = [1, 4, 16]
    prefill_pp = [1, 2]
    decode_tp = [1, 3, 8]
    decode_dcp = [1, 2]
    block_sizes = [16, [16, 64]]
    layouts = ["hnd", ["hnd", "nhd"]]
    modes = ["pull", "push", "push+layers"]
"#;

/// A scenario's text with a candidate's keys in place of its own.
fn direct(c: &Candidate, s: &Sweep, model: &str, more: (&str, &str)) -> String {
    let mut table: toml::Table = text(model, more, "", "").parse().unwrap();
    let keys: toml::Table = c.keys(s.shapes()).parse().unwrap();
    for (name, keys) in keys {
        let own = table.get_mut(&name).unwrap().as_table_mut().unwrap();
        own.extend(keys.as_table().unwrap().clone());
    }
    table.to_string()
}

#[test]
fn a_candidate_is_the_scenario_with_its_keys() {
    // A roofline knows the shape of an engine, and so does a sweep; nothing else is left to be the same by chance.
    let s = sweep(&text("llama-3.1-8b", ("", ""), "", WIDE));
    let (mut feasible, mut refused) = (0, 0);
    for c in s.candidates() {
        let direct = Scenario::from_toml("test", &direct(c, &s, "llama-3.1-8b", ("", "")), Path::new("."));
        match (s.outcome(c), direct) {
            (Outcome::Feasible(figures), Ok(direct)) => {
                let answer = analytic::analyse(&direct).unwrap();
                let span = direct.requests().unwrap().span().as_secs_f64();
                assert_eq!(figures, Figures::of(&answer, span), "{c}");
                let made = s.scenario(c).unwrap();
                assert_eq!((&made.prefill.gpus, &made.decode.gpus), (&direct.prefill.gpus, &direct.decode.gpus), "{c}");
                feasible += 1;
            }
            (Outcome::Infeasible(reasons), direct) => {
                refused += 1;
                same(c, &reasons.iter().map(|r| (r.kind, r.text.as_str())).collect::<Vec<_>>(), &direct, &s);
            }
            (Outcome::Feasible(_), Err(e)) => panic!("{c}: {e}"),
        }
    }
    assert!(feasible > 50 && refused > 50, "{feasible} {refused}");
}

/// That every reason is said of the file as well, in the same words.
fn same(c: &Candidate, reasons: &[(Kind, &str)], direct: &Result<Scenario, ScenarioErrors>, s: &Sweep) {
    for (kind, text) in reasons {
        let said: Vec<String> = match direct {
            Ok(direct) => match analytic::analyse(direct) {
                Ok(answer) => {
                    let over = matches!(kind, Kind::Overload | Kind::Gpus);
                    assert!(over, "{c}: {text}, but a simulation goes well: {:?}", answer.warnings);
                    continue;
                }
                Err(e) => vec![e.to_string()],
            },
            Err(errors) => errors
                .0
                .iter()
                .map(|e| match e {
                    ScenarioError::Mismatch(m) => m.to_string(),
                    ScenarioError::Engine { error, .. } => error.to_string(),
                    other => other.to_string(),
                })
                .collect(),
        };
        // The budget is the sweep's own.
        let budget = *kind == Kind::Gpus && s.gpus(c) > u64::from(s.settings().budget);
        assert!(
            budget || said.iter().any(|said| said == text || said.ends_with(text)),
            "{c}: {text}\nis not of {said:#?}"
        );
    }
}

#[test]
fn what_a_handshake_refuses_is_refused_in_its_words() {
    // One side keeps its cache in eight bits; a pair with equal dtypes is there to be the base, and D's is changed afterwards.
    let mut base = scenario(&text("llama-3.1-8b", ("", ""), "", "[sweep]\nprefill_tp = [1, 2, 4]\ndecode_tp = [1, 2]"));
    let other = scenario(&text("llama-3.1-8b", ("kv_dtype = \"fp8\"", "kv_dtype = \"fp8\""), "", ""));
    base.decode = other.decode;
    let s = Sweep::new(base, "test").unwrap();
    for c in s.candidates() {
        let Outcome::Infeasible(reasons) = s.outcome(c) else { panic!("{c} works") };
        let side = |like: &Scenario, prefill: bool| {
            let (of, e) = if prefill { (&like.prefill, &c.prefill) } else { (&like.decode, &c.decode) };
            let mut d = of.description.clone();
            d.shape = e.sizes.on(d.shape);
            std::sync::Arc::new(d.manifest().unwrap())
        };
        let said = Compatible::with(side(s.base(), true), side(s.base(), false), s.base().transfer.compat).unwrap_err();
        let mismatch: Vec<_> = reasons.iter().map(|r| (r.kind, r.text.clone())).collect();
        assert_eq!(mismatch, [(Kind::Mismatch, said.to_string())], "{c}");
    }
}

#[test]
fn what_does_not_fit_is_told_from_what_is_too_much() {
    let kind = |text: &str| -> BTreeSet<(Kind, String)> {
        let s = sweep(text);
        let of = |c: &Candidate| match s.outcome(c) {
            Outcome::Feasible(_) => Vec::new(),
            Outcome::Infeasible(reasons) => reasons.into_iter().map(|r| (r.kind, r.text)).collect(),
        };
        s.candidates().iter().flat_map(of).collect()
    };
    let one = |sides, sweep: &str| kind(&text("llama-3.1-8b", sides, "", sweep)).into_iter().next();
    assert_eq!(one(("", ""), "[sweep]\nprefill_tp = [4]"), None);
    let (k, text_of) = one(("", ""), "[sweep]\ngpus = 4\nprefill_tp = [4]").unwrap();
    assert_eq!((k, text_of.as_str()), (Kind::Gpus, "one engine of each side would take 6 GPUs, and the budget is 4"));
    let (k, text_of) = one(("", ""), "[sweep]\nweights_gib = 400\nprefill_tp = [8]\ngpus = 16").unwrap();
    assert_eq!(k, Kind::Memory);
    assert!(text_of.starts_with("decode: a rank has 200.0 GiB of 400 GiB of weights"), "{text_of}");
    let in_memory = |bytes: u64| {
        let mut base = scenario(&text("llama-3.1-8b", ("", ""), "", "[sweep]\nprefill_tp = [4]"));
        base.decode.kv_bytes = Some(bytes);
        let s = Sweep::new(base, "test").unwrap();
        let Outcome::Infeasible(reasons) = s.outcome(&s.candidates()[0]) else { panic!("it fits") };
        (reasons[0].kind, reasons[0].text.clone())
    };
    let (k, text_of) = in_memory(1);
    assert_eq!(k, Kind::Memory);
    assert!(text_of.starts_with("decode: rank 0 has 1 bytes for its cache"), "{text_of}");
    // A pool of a few blocks holds no prompt of thousands of tokens.
    let (k, text_of) = in_memory(1 << 20);
    assert_eq!(k, Kind::Pool);
    assert!(text_of.contains("blocks left of ") && text_of.contains(", and the request needs"), "{text_of}");
    // P is asked for more than it can compute.
    let slow = "[prefill.time]\ntokens_per_s = 100";
    let (k, _) = one((slow, ""), "[sweep]\nprefill_tp = [4]").unwrap();
    assert_eq!(k, Kind::Overload);
    assert_eq!(one((slow, ""), "[sweep]\nprefill_tp = [4]\nallow_overload = true"), None);
}

#[test]
fn stated_times_are_in_proportion_to_gpus_unless_they_are_fixed() {
    let times = ("[prefill.time]\ntokens_per_s = 20000", "[decode.time]\nms_per_token = 8");
    let of = |more: &str| {
        let s = sweep(&text(
            "llama-3.1-8b",
            times,
            "",
            &format!("[sweep]\nprefill_tp = [2, 4]\ndecode_tp = [2, 4]\n{more}"),
        ));
        let time = |c: &Candidate| {
            let s = s.scenario(c).unwrap();
            (s.prefill_time.time(1000, 0).as_millis(), s.decode_time.step(1, 1000).as_millis())
        };
        s.candidates().iter().map(time).collect::<Vec<_>>()
    };
    assert_eq!(of(""), [(100, 8), (100, 4), (50, 8), (50, 4)]);
    assert_eq!(of("fixed_times = true"), [(50, 8); 4]);
}

#[test]
fn budgets_are_filled_and_not_passed() {
    let s = sweep(&text("llama-3.1-8b", ("", ""), "", WIDE));
    let mut seen = BTreeSet::new();
    for c in s.candidates() {
        assert!(seen.insert(s.key(c)), "{c} is there twice");
        let gpus = s.gpus(c);
        let (p, d) = (u64::from(c.prefill.sizes.tp * c.prefill.sizes.pp), u64::from(c.decode.sizes.tp));
        if p + d > 16 {
            assert_eq!((c.prefill.engines, c.decode.engines), (1, 1), "{c}");
        } else {
            // Of one budget or the other less is left than one engine of D takes.
            assert!([8, 16].iter().any(|budget| gpus <= *budget && budget - gpus < d), "{c}: {gpus}");
        }
    }
    assert!(s.candidates().iter().any(|c| s.gpus(c) == 8) && s.candidates().iter().any(|c| s.gpus(c) == 16));
}

#[test]
fn every_fault_of_the_table_is_told_with_its_key() {
    let table = r#"
        [sweep]
        gpus = [0, 999]
        prefill_share = [1.5]
        prefill_tp = []
        decode_pp = [-1]
        block_sizes = [[16, 0]]
        layouts = ["hnd", "hdn"]
        modes = ["pull", "poll"]
        gpu_memory = 0.8
    "#;
    let faults = Sweep::new(scenario(&text("llama-3.1-8b", ("", ""), "", table)), "test").unwrap_err().to_string();
    for key in ["gpus: is 0", "gpus: is 999", "prefill_share: is 1.5", "prefill_tp: is a list of 0", "decode_pp: is -1"]
    {
        assert!(faults.contains(&format!("test: sweep.{key}")), "{key}: {faults}");
    }
    for key in ["block_sizes: is 0", "layouts: is \"hdn\"", "modes: is \"poll\"", "gpu_memory: is 0.8"] {
        assert!(faults.contains(&format!("test: sweep.{key}")), "{key}: {faults}");
    }
    let list = format!("{:?}", (1..=256).collect::<Vec<_>>());
    let many = format!("[sweep]\nprefill_tp = {list}\ndecode_tp = {list}\nblock_sizes = {list}");
    let faults = Sweep::new(scenario(&text("llama-3.1-8b", ("", ""), "", &many)), "test").unwrap_err().to_string();
    assert!(faults.contains("more than 1000000 candidates"), "{faults}");
    let faults = Sweep::new(scenario(&text("llama-3.1-8b", ("", ""), "", "")), "test").unwrap_err().to_string();
    assert!(faults.contains("sweep.*: is missing"), "{faults}");
    let unknown = Scenario::from_toml("test", &text("llama-3.1-8b", ("", ""), "", "[sweep]\ntp = [1]"), Path::new("."));
    assert!(unknown.unwrap_err().to_string().contains("unknown field `tp`"));
}
