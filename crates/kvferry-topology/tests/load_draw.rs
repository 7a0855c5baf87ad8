//! Loads by chance: that means and quantiles are those asked for, and that one thing drawn moves no other.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

use std::path::Path;

use kvferry_sim::rng::Rng;
use kvferry_topology::load::draw::{self, Arrivals, Length};
use kvferry_topology::load::{Load, LoadTable, MAX_TOKENS, Prefix};

const MANY: usize = 200_000;

fn draw(seed: u64, text: &str) -> Load {
    toml::from_str::<LoadTable>(text).unwrap().check().unwrap().draw(seed, Path::new(".")).unwrap()
}

fn mean(list: &[f64]) -> f64 {
    list.iter().sum::<f64>() / list.len() as f64
}

fn deviation(list: &[f64]) -> f64 {
    let mean = mean(list);
    (list.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / list.len() as f64).sqrt()
}

fn quantile(list: &mut [f64], q: f64) -> f64 {
    list.sort_by(f64::total_cmp);
    list[(list.len() as f64 * q) as usize]
}

#[track_caller]
fn near(got: f64, want: f64, share: f64) {
    assert!((got - want).abs() <= share * want.abs(), "{got} is not within {share} of {want}");
}

fn sample(seed: u64, mut one: impl FnMut(&mut Rng) -> f64) -> Vec<f64> {
    let mut rng = Rng::of(&[seed]);
    (0..MANY).map(|_| one(&mut rng)).collect()
}

#[test]
fn units_are_above_0_and_up_to_1() {
    let list = sample(1, draw::unit);
    assert!(list.iter().all(|x| *x > 0.0 && *x <= 1.0));
    near(mean(&list), 0.5, 0.01);
    near(deviation(&list), 12_f64.sqrt().recip(), 0.01);
}

#[test]
fn exponential_and_normal() {
    let mut list = sample(2, draw::exponential);
    near(mean(&list), 1.0, 0.02);
    near(deviation(&list), 1.0, 0.02);
    near(quantile(&mut list, 0.5), 2_f64.ln(), 0.02);
    near(quantile(&mut list, 0.99), 100_f64.ln(), 0.03);
    let mut list = sample(3, draw::normal);
    assert!(mean(&list).abs() < 0.01);
    near(deviation(&list), 1.0, 0.01);
    for (q, want) in [(0.01, -2.326), (0.1587, -1.0), (0.8413, 1.0), (0.99, 2.326)] {
        near(quantile(&mut list, q), want, 0.03);
    }
}

#[test]
fn gamma_of_every_shape() {
    for shape in [0.0025, 0.1, 0.5, 1.0, 1.5, 7.0, 400.0] {
        let list = sample(4, |rng| draw::gamma(rng, shape));
        assert!(list.iter().all(|x| x.is_finite() && *x >= 0.0));
        // The rarer the large ones, the less certain are the means.
        let certain = if shape < 0.05 { 0.2 } else { 0.03 };
        near(mean(&list), shape, certain);
        near(deviation(&list), shape.sqrt(), certain);
    }
    // Of shape 1 it is exponential.
    let mut list = sample(5, |rng| draw::gamma(rng, 1.0));
    near(quantile(&mut list, 0.5), 2_f64.ln(), 0.02);
    near(quantile(&mut list, 0.99), 100_f64.ln(), 0.03);
}

#[test]
fn arrivals_have_the_rate_and_the_burstiness() {
    for (arrivals, cv) in [
        (Arrivals::Constant { per_s: 40.0 }, 0.0),
        (Arrivals::Poisson { per_s: 40.0 }, 1.0),
        (Arrivals::Gamma { per_s: 40.0, cv: 0.25 }, 0.25),
        (Arrivals::Gamma { per_s: 40.0, cv: 1.0 }, 1.0),
        (Arrivals::Gamma { per_s: 40.0, cv: 4.0 }, 4.0),
    ] {
        let list = sample(6, |rng| arrivals.gap(rng));
        near(mean(&list), 1.0 / 40.0, 0.04);
        assert!((deviation(&list) / mean(&list) - cv).abs() <= 0.04 * cv + 1e-6, "{arrivals:?}");
    }
}

#[test]
fn lengths_are_those_asked_for() {
    let tokens = |length: &Length| sample(7, |rng| length.draw(rng) as f64);
    let mut list = tokens(&Length::LogNormal { median: 2_000.0, p99: 30_000.0, most: MAX_TOKENS });
    near(quantile(&mut list, 0.5), 2_000.0, 0.03);
    near(quantile(&mut list, 0.99), 30_000.0, 0.05);
    let list = tokens(&Length::LogNormal { median: 2_000.0, p99: 30_000.0, most: 9_000 });
    assert!(list.iter().all(|x| *x <= 9_000.0) && list.contains(&9_000.0));
    let list = tokens(&Length::LogNormal { median: 5.0, p99: 5.0, most: MAX_TOKENS });
    assert!(list.iter().all(|x| (x - 5.0).abs() < 0.1));
    let list = tokens(&Length::Uniform { low: 10, high: 19 });
    for n in 10..20 {
        let count = list.iter().filter(|x| (**x - f64::from(n)).abs() < 0.5).count();
        near(count as f64, MANY as f64 / 10.0, 0.05);
    }
    let list = tokens(&Length::Empirical([3, 500, 500, 9].into()));
    let count = list.iter().filter(|x| **x > 400.0).count();
    near(count as f64, MANY as f64 / 2.0, 0.03);
    assert_eq!(Length::Fixed(77).draw(&mut Rng::of(&[1])), 77);
}

const BASE: &str =
    "requests = 500\nper_s = 10\nprompt = { median = 900, p99 = 9000 }\noutput = { uniform = [1, 300] }\n";

#[test]
fn a_seed_gives_the_same_and_nothing_moves_another() {
    let load = draw(5, BASE);
    assert_eq!(load, draw(5, BASE));
    assert_ne!(load, draw(6, BASE));
    assert_eq!(load.requests.len(), 500);
    assert!(load.requests.windows(2).all(|w| w[0].at <= w[1].at));
    near(load.span().as_secs_f64(), 50.0, 0.2);
    let other = draw(5, &BASE.replace("{ median = 900, p99 = 9000 }", "{ list = [1, 2, 3] }"));
    for (a, b) in load.requests.iter().zip(&other.requests) {
        assert_eq!((a.at, a.output), (b.at, b.output));
    }
    let other = draw(5, &format!("{BASE}arrivals = \"gamma\"\ncv = 3\nprefill_hit = 0.3"));
    for (a, b) in load.requests.iter().zip(&other.requests) {
        assert_eq!((a.prompt, a.output), (b.prompt, b.output));
    }
    assert_ne!(load.requests[7].at, other.requests[7].at);
}

#[test]
fn constant_arrivals_begin_at_once() {
    let load = draw(1, "requests = 4\narrivals = \"constant\"\nper_s = 8\nprompt = 7\noutput = 1");
    let at: Vec<u128> = load.requests.iter().map(|r| r.at.as_micros()).collect();
    assert_eq!(at, [0, 125_000, 250_000, 375_000]);
    assert!(load.requests.iter().all(|r| r.prefix == Prefix::None));
}

#[test]
fn hits_are_shares_of_prompts() {
    let text = "requests = 20000\nper_s = 10\nprompt = 1001\noutput = 1\n";
    let load = draw(1, &format!("{text}prefill_hit = {{ chance = 0.3, share = 0.5 }}\ndecode_hit = 0.25"));
    let mut hit = 0;
    for request in &load.requests {
        let Prefix::Hit { prefill, decode } = request.prefix else { panic!("no hit") };
        assert!(prefill == 0 || prefill == 500);
        assert_eq!(decode, 250);
        hit += u32::from(prefill > 0);
    }
    near(f64::from(hit), 6_000.0, 0.05);
    near(load.hit_rate(None), 0.3 * 500.0 / 1001.0, 0.05);
    let load = draw(1, &format!("{text}prefill_hit = 1"));
    assert_eq!(load.requests[0].prefix, Prefix::Hit { prefill: 1001, decode: 0 });
}

fn told(text: &str) -> String {
    toml::from_str::<LoadTable>(text).unwrap().check().unwrap_err().to_string()
}

#[test]
fn every_fault_of_the_table_is_told() {
    assert_eq!(
        told(""),
        "load.requests: is missing; say how many are drawn, or name a `trace`\n\
         load.per_s: is missing; say how many requests arrive in a second\n\
         load.prompt: is missing; say how many tokens, as 4096 or { median = 2000, p99 = 30000 }\n\
         load.output: is missing; say how many tokens, as 4096 or { median = 2000, p99 = 30000 }"
    );
    assert_eq!(
        told(
            "requests = 0\narrivals = \"burst\"\nper_s = nan\nprompt = -4\noutput = { median = 9, p99 = 3 }\n\
             prefill_hit = 1.5\ndecode_hit = { chance = 2, share = -1 }\nspeed = 2\nlimit = 4"
        ),
        "load.speed: goes with `trace`; leave it out, or name a trace\n\
         load.limit: goes with `trace`; leave it out, or name a trace\n\
         load.requests: is 0; it must be 1 to 4000000\n\
         load.per_s: is NaN; it must be 0.0001 to 1000000\n\
         load.arrivals: \"burst\" is not known here; use \"constant\", \"poisson\" or \"gamma\"\n\
         load.prompt: is -4; it must be 1 to 16777216\n\
         load.output.p99: is 3; it must be 9 to 16777216\n\
         load.prefill_hit: is 1.5; it must be 0 to 1\n\
         load.decode_hit.chance: is 2; it must be 0 to 1\n\
         load.decode_hit.share: is -1; it must be 0 to 1"
    );
    let rest = "requests = 5\nper_s = 1\noutput = 1\n";
    for (line, fault) in [
        ("prompt = {}", "load.prompt: is missing; give the table `uniform`, `median` and `p99`, or `list`"),
        ("prompt = { list = [] }", "load.prompt.list: is missing; give it one number at least"),
        ("prompt = { list = [4, 0] }", "load.prompt.list: is 0; it must be 1 to 16777216"),
        ("prompt = { uniform = [9, 8] }", "load.prompt.uniform: is 8; it must be 9 to 16777216"),
        ("prompt = { p99 = 8 }", "load.prompt.median: is missing; `median` and `p99` go together"),
        (
            "prompt = { uniform = [1, 2], list = [1] }",
            "load.prompt: has more than one of `uniform`, `median` with `p99`, and `list`; keep one",
        ),
        (
            "prompt = 1\ncv = 3",
            "load.cv: is for arrivals = \"gamma\", not \"poisson\"; leave it out, or change `arrivals`",
        ),
        (
            "prompt = 1\narrivals = \"gamma\"",
            "load.cv: is missing; gamma arrivals need it: more than 1 for bursts, as 3",
        ),
    ] {
        assert_eq!(told(&format!("{rest}{line}")), fault);
    }
    assert_eq!(
        told("requests = 4000000\nper_s = 0.1\nprompt = 1\noutput = 1"),
        "load.per_s: is 0.1, with which 4000000 requests take more than a year; raise it, or lower `requests`"
    );
    let trace = "trace = \"x.csv\"\n";
    assert_eq!(
        told(&format!("{trace}requests = 1\nformat = \"gz\"\nspeed = 0\nfirst = -1")),
        "load.requests: is what the trace says; leave it out, or leave `trace` out\n\
         load.format: \"gz\" is not known here; use \"auto\", \"mooncake\", \"azure\", \"csv\" or \"jsonl\"\n\
         load.first: is -1; it must be 0 to 9223372036854775807\n\
         load.speed: is 0; it must be 0.01 to 1000000"
    );
}

#[test]
fn faults_of_form_have_their_line() {
    for (text, word) in [
        ("requests = 5\nper_sec = 1", "unknown field `per_sec`"),
        ("requests = 5\nprompt = \"many\"", "a number of tokens, or a table with"),
        ("requests = 5\nprompt = { mean = 5 }", "unknown field `mean`"),
        ("requests = 5\nprefill_hit = \"half\"", "a share from 0 to 1, or a table with"),
        ("requests = 5\nprefill_hit = { share = 5 }", "missing field `chance`"),
    ] {
        let error = toml::from_str::<LoadTable>(text).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains(word), "{error}");
    }
}
