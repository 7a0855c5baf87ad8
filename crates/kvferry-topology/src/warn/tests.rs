//! Answers that are made up, and what is said of them.

use std::path::Path;

use super::*;
use crate::answer::{Descriptors, Requests};

fn scenario(cluster: &str, more: &str) -> Scenario {
    let engine = "model = \"llama-3.1-8b\"\nengine = \"tp=2\"\nlayers = 2\nkv_gib = 1";
    let load = "requests = 1\nper_s = 1\nprompt = 10\noutput = 1";
    let text = format!("[cluster]\n{cluster}\n[prefill]\n{engine}\n[decode]\n{engine}\n[load]\n{load}\n{more}");
    Scenario::from_toml("test", &text, Path::new(".")).unwrap()
}

const RAILS: &str = "preset = \"hgx-h100\"\nnodes = 2";
const ONE_CARD: &str = "preset = \"tcp-pair\"\ngpu = { per_node = 4 }";

fn link(kind: &str, mean: f64, peak: impl Into<Option<f64>>) -> LinkUse {
    let name = format!("node0/{kind}/up");
    LinkUse { name, kind: kind.into(), capacity: 1e9, mean, peak: peak.into(), ..LinkUse::default() }
}

fn of_links(links: &[LinkUse]) -> Answer {
    Answer { engine: "events".into(), span: 1.0, links: links.to_vec(), ..Answer::default() }
}

/// The codes, and the text and advice of one.
fn told(s: &Scenario, a: &Answer, code: &str) -> (Vec<String>, String) {
    let all = warnings(s, a);
    let one = all.iter().find(|w| w.code == code).map_or_else(String::new, |w| format!("{}: {}", w.text, w.change));
    (all.into_iter().map(|w| w.code).collect(), one)
}

#[test]
fn a_hot_link_is_told_with_what_its_machines_can_do() {
    let hot = of_links(&[link("nic", 0.8, 1.0)]);
    let (codes, text) = told(&scenario(RAILS, ""), &hot, "hot-link");
    assert_eq!(codes, ["hot-link"]);
    assert!(text.contains("80 % on average, 100 % at its peak") && text.contains("rails = 2"), "{text}");
    // With one card a machine there is nothing to spread over.
    let (_, text) = told(&scenario(ONE_CARD, ""), &hot, "hot-link");
    assert!(!text.contains("rails") && text.contains("faster or more cards"), "{text}");
    // The closed form knows no peak, and says none.
    let (_, text) = told(&scenario(RAILS, ""), &of_links(&[link("nic", 0.8, None)]), "hot-link");
    assert!(text.contains("80 % on average:"), "{text}");
    // One that was full for a moment stands first, and is not the hot one.
    let (_, text) =
        told(&scenario(RAILS, ""), &of_links(&[link("uplink", 0.1, 1.0), link("nic", 0.8, 0.9)]), "hot-link");
    assert!(text.starts_with("node0/nic/up"), "{text}");
}

#[test]
fn descriptors_are_to_blame_only_where_they_take_time() {
    let says = |links: &[LinkUse]| told(&scenario(RAILS, ""), &of_links(links), "descriptors").1;
    let text = says(&[link("work", 0.04, 0.6), link("nic", 0.01, 0.2)]);
    assert!(text.contains("60.0 % of the time at its peak") && text.contains("20.0 %"), "{text}");
    let text = says(&[link("work", 0.04, None), link("nic", 0.01, None)]);
    assert!(text.contains("4.0 % of the time,"), "{text}");
    // An idle cluster, whose little is mostly descriptors; and one where bytes are the more.
    assert_eq!(says(&[link("work", 0.0004, 0.02), link("nic", 0.0001, 0.001)]), "");
    assert_eq!(says(&[link("nic", 0.3, 0.7), link("work", 0.2, 0.9)]), "");
    // A burst in an idle hour.
    assert_ne!(says(&[link("work", 0.0004, 0.5), link("nic", 0.0001, 0.1)]), "");
}

#[test]
fn what_crosses_the_spine_is_a_part_of_all_bytes() {
    let up = LinkUse { bytes: 40, ..link("uplink", 0.1, 0.1) };
    let of = |wire_bytes| {
        let requests = Requests { all: 1, delivered: 1, wire_bytes, ..Requests::default() };
        let answer = Answer { requests, ..of_links(std::slice::from_ref(&up)) };
        told(&scenario(RAILS, ""), &answer, "cross-rail").1
    };
    assert!(of(100).starts_with("40 % of the bytes") && of(100).contains("where TP is equal"), "{}", of(100));
    assert_eq!(of(1000), "", "the rest went over NVLink");
}

#[test]
fn small_descriptors_are_those_of_the_measured_requests() {
    let descriptors = Descriptors { requests: 7, sizes: vec![512, 1 << 20], before: vec![9, 9], after: vec![9, 1] };
    let answer = Answer { descriptors, ..of_links(&[]) };
    let (_, text) = told(&scenario(RAILS, ""), &answer, "small-descriptors");
    assert!(text.starts_with("90 % of the descriptors of the 7 requests that were measured"), "{text}");
}

#[test]
fn the_closed_form_says_that_it_sees_no_failures() {
    let failing = scenario(RAILS, "[[failure]]\nat_s = 1\nlasts_s = 1\nprefill = 0\n");
    let codes = |engine: &str| told(&failing, &Answer { engine: engine.into(), ..of_links(&[]) }, "not-simulated");
    assert_eq!(codes("events").0, [""; 0]);
    let (all, text) = codes("analytic");
    assert!(
        all == ["not-simulated"]
            && text.contains("does not look at the failures of the scenario, of which there are 1"),
        "{text}"
    );
}
