//! What an operator should look at, and what to change.

use crate::answer::{Answer, LinkUse, Times, Warning};
use crate::lives::carries_bytes;
use crate::scenario::{Mode, Scenario, Stream};

/// A link that is used so much on average is full most of the time that it is wanted.
const HOT: f64 = 0.7;
/// What works no longer than so on average slows nobody, unless it has a peak above the other.
const IDLE: f64 = 0.01;
/// See [`IDLE`].
const IDLE_PEAK: f64 = 0.1;
/// So much of D's pool in use leaves no room for a burst.
const FULL: f64 = 0.9;
/// Descriptors of fewer bytes are costly on every transport that was measured.
const SMALL: u64 = 8 << 10;
/// A rank that sends so many times the mean is the one that all wait for.
const LOPSIDED: f64 = 2.0;

struct List(Vec<Warning>);

impl List {
    fn add(&mut self, code: &str, text: String, change: impl Into<String>) {
        self.0.push(Warning { code: code.into(), text, change: change.into() });
    }
}

/// The worst first.
pub(crate) fn warnings(s: &Scenario, a: &Answer) -> Vec<Warning> {
    let mut out = List(Vec::new());
    if a.engine == "analytic" && !s.failures.is_empty() {
        let text = format!(
            "the closed form does not look at the failures of the scenario, of which there are {}",
            s.failures.len()
        );
        out.add("not-simulated", text, "simulate by events (without --analytic)");
    }
    lost(a, &mut out);
    saturated(s, a, &mut out);
    links(s, a, &mut out);
    pools(a, &mut out);
    handover(s, a, &mut out);
    shape(a, &mut out);
    out.0
}

fn time<'a>(a: &'a Answer, name: &str) -> Option<&'a Times> {
    a.times.iter().find(|t| t.name == name && t.count > 0)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn lost(a: &Answer, out: &mut List) {
    let r = &a.requests;
    for (why, n) in &r.failed {
        let change = match why.as_str() {
            "does not fit" => "give the engine more blocks (kv_gib), or cut the longest prompts",
            "Deadline" => "raise deadline_s, or find what they waited for below",
            _ => "see the guide on failures; a failed handover is computed again or fails, as the engine chooses",
        };
        out.add("failed", format!("{n} of {} requests were not delivered: {why}", r.all), change);
    }
    let open = r.all - r.delivered - r.failed.iter().map(|f| f.1).sum::<u64>().min(r.all - r.delivered);
    if open > 0 {
        out.add(
            "unfinished",
            format!("{open} of {} requests had not ended when the simulation did", r.all),
            "simulate longer",
        );
    }
}

fn saturated(s: &Scenario, a: &Answer, out: &mut List) {
    let (Some(queue), Some(prefill)) = (time(a, "prefill queue"), time(a, "prefill")) else { return };
    if queue.p50 > prefill.mean {
        let busy = prefill.mean * prefill.count as f64 / (a.span * f64::from(s.prefill.engines));
        out.add(
            "prefill-saturated",
            format!(
                "half of the prompts wait {:.2} s or longer for a prefill of {:.2} s; P's engines are busy {} of the time",
                queue.p50,
                prefill.mean,
                percent(busy.min(1.0))
            ),
            "more engines of P, a larger one, or more of the prompts' beginnings in its prefix caches",
        );
    }
}

fn links(s: &Scenario, a: &Answer, out: &mut List) {
    let of_bytes = |bytes: bool| a.links.iter().filter(move |l| carries_bytes(&l.kind) == bytes);
    if let Some(hot) = LinkUse::busiest(of_bytes(true)).filter(|l| l.mean > HOT) {
        let change = match hot.kind.as_str() {
            "uplink" => {
                "keep P and D on the same rails (same TP, or ranks placed so that each reads its own rail), or less oversubscription"
            }
            "nic" | "ethernet" if s.transfer.rails == 1 && s.cluster.nodes().iter().any(|n| n.nics > 1) => {
                "spread a rank's bytes over more cards (rails = 2), or put fewer ranks on one card"
            }
            "nic" | "ethernet" => {
                "faster or more cards, engines on more machines, or fewer bytes (an FP8 cache, prefix hits at D)"
            }
            _ => "put P's and D's engines farther apart, or on more GPUs",
        };
        let peak = hot.peak.map_or_else(String::new, |peak| format!(", {} at its peak", percent(peak)));
        out.add("hot-link", format!("{} is used {} on average{peak}", hot.name, percent(hot.mean)), change);
    }
    // The fullest stand first. Where little is handed over, the means are of the time in between.
    let (carried, when) =
        of_bytes(true).next().map_or((0.0, ""), |l| (l.fullest(), if l.peak.is_some() { " at its peak" } else { "" }));
    let works = |l: &&LinkUse| (l.mean > IDLE || l.peak.is_some_and(|p| p > IDLE_PEAK)) && l.fullest() > 1.5 * carried;
    if let Some(work) = of_bytes(false).next().filter(works) {
        out.add(
            "descriptors",
            format!(
                "{} works through descriptors {:.1} % of the time{when}, the fullest link carries bytes {:.1} % of it{when}: transfers \
                 wait for descriptors, not for bandwidth",
                work.name,
                work.fullest() * 100.0,
                carried * 100.0
            ),
            "fewer, larger descriptors: equal block sizes and layouts on both sides, or staging",
        );
    }
    let up: u64 = a.links.iter().filter(|l| l.kind == "uplink" && l.name.ends_with("/up")).map(|l| l.bytes).sum();
    let all = a.requests.wire_bytes;
    if all > 0 && up as f64 > 0.3 * all as f64 {
        out.add(
            "cross-rail",
            format!("{} of the bytes leave their rail and cross the spine", percent(up as f64 / all as f64)),
            "where TP is equal on both sides, place D's ranks so that each reads from its own card's rail; else the spine must carry it",
        );
    }
}

fn pools(a: &Answer, out: &mut List) {
    let p = &a.pools;
    let share = p.peak_used as f64 / p.capacity.max(1) as f64;
    if p.waited > 0 || share > FULL {
        out.add(
            "pool",
            format!("D's pool is {} full at its peak, and {} requests waited for room", percent(share), p.waited),
            "more memory for D's cache (kv_gib), more engines of D, or fewer requests at a time",
        );
    }
}

fn handover(s: &Scenario, a: &Answer, out: &mut List) {
    let (Some(handover), Some(first)) = (time(a, "handover"), time(a, "time to first token")) else { return };
    let share = handover.p50 / first.p50.max(1e-9);
    if share > 0.2 && s.transfer.stream == Stream::None {
        let push = if s.transfer.mode == Mode::Pull { "mode = \"push\" and " } else { "" };
        out.add(
            "handover",
            format!("the handover is {} of the time to first token", percent(share)),
            format!("let P write while it computes ({push}stream = \"layers\")"),
        );
    }
    if let Some(held) = time(a, "held at P").filter(|held| held.p99 > 4.0 * handover.p50 + 1.0) {
        out.add(
            "held",
            format!("P's blocks are held for up to {:.1} s (p99) after a prefill", held.p99),
            "D takes requests up too late: give it more room, or route them when it has",
        );
    }
}

fn shape(a: &Answer, out: &mut List) {
    let d = &a.descriptors;
    let all: u64 = d.after.iter().sum();
    let small: u64 = d.sizes.iter().zip(&d.after).filter(|(size, _)| **size < SMALL).map(|(_, n)| n).sum();
    if all > 0 && small * 2 > all {
        out.add(
            "small-descriptors",
            format!(
                "{} of the descriptors of the {} requests that were measured are smaller than {} KiB",
                percent(small as f64 / all as f64),
                d.requests,
                SMALL >> 10
            ),
            "equal block sizes and layouts on both sides (heads outermost where TP differs), or staging",
        );
    }
    let mut sent: Vec<u64> =
        vec![0; (a.prefill.engines as usize).saturating_mul(a.prefill.ranks as usize).min(1 << 22)];
    for p in &a.traffic.pairs {
        let at = p.source.0 as usize * a.prefill.ranks as usize + p.source.1 as usize;
        if let Some(sum) = sent.get_mut(at) {
            *sum += p.bytes;
        }
    }
    let (most, all) = (sent.iter().copied().max().unwrap_or(0), sent.iter().sum::<u64>());
    let mean = all as f64 / sent.len().max(1) as f64;
    // Of a few requests some rank always has the most.
    if a.requests.delivered >= 64 && most as f64 > LOPSIDED * mean {
        out.add(
            "lopsided",
            format!("one of P's ranks sends {:.1} times what the others do on average", most as f64 / mean),
            "spread what one rank holds for others over all that hold it alike (stripe = true), or route by load",
        );
    }
}

#[cfg(test)]
mod tests;
