//! What the demo says.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry::{Delivered, PairReport, Phase};
use kvferry_geometry::staged::Place;
use serde::Serialize;

use super::args::Args;
use super::chaos::Chaos;
use super::image::Verdict;
use super::scenario::{Role, Scenario};
use super::service::Service;
use super::stream::Streamed;
use crate::show;

/// The most rank pairs that are listed as text.
const MOST_PAIRS: usize = 64;

/// What one decode rank read from one prefill rank, over all requests.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PairLine {
    pub(crate) src: String,
    pub(crate) dst: String,
    pub(crate) bytes: u64,
    pub(crate) rows: u64,
    pub(crate) descriptors_before: u64,
    pub(crate) descriptors_after: u64,
    /// How many of the requests' reads were staged.
    pub(crate) staged: u32,
    /// What really carried them, each once.
    pub(crate) lanes: BTreeSet<String>,
}

/// One round of all requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Round {
    /// From the first offer to the last delivery.
    pub(crate) seconds: f64,
    pub(crate) gigabytes_per_second: f64,
}

impl Round {
    pub(crate) fn new(bytes: u64, seconds: f64) -> Self {
        // Sizes here are far below 2^53.
        #[allow(clippy::cast_precision_loss, reason = "a rate is shown with three digits")]
        let gigabytes = bytes as f64 / 1e9;
        Self { seconds, gigabytes_per_second: gigabytes / seconds }
    }
}

/// What became of the leases, over all rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Leases {
    pub(crate) offered: u64,
    /// How they ended, and how many so.
    pub(crate) ended: BTreeMap<&'static str, u64>,
}

/// What the producer answered when all of a lease had been read, over all rounds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Fences {
    pub(crate) held: u64,
    pub(crate) stale: u64,
    /// Attempts of the requests that were delivered; more than these where one was tried at other replicas.
    pub(crate) attempts: u64,
}

impl Fences {
    pub(crate) fn add(&mut self, delivered: &[Delivered]) {
        // Nothing is delivered that was not held.
        self.held += delivered.len() as u64;
        self.attempts += delivered.iter().map(|d| u64::from(d.report().attempts)).sum::<u64>();
    }
}

/// How long the requests of a round were in each phase: medians, in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Phases {
    /// Waiting for the link between the owners.
    link: f64,
    /// Waiting for the producer to bind the lease.
    bind: f64,
    /// The longest wait of a rank for its turn to read; part of `read`.
    queue: f64,
    /// Of a push: the prefill ranks write.
    write: f64,
    read: f64,
    /// Waiting for the producer's verdict.
    release: f64,
}

impl Phases {
    pub(crate) fn of(delivered: &[Delivered]) -> Option<Self> {
        let median = |time: fn(&Delivered) -> Duration| {
            let mut times: Vec<Duration> = delivered.iter().map(time).collect();
            times.sort_unstable();
            times.get(times.len() / 2).map(Duration::as_secs_f64)
        };
        Some(Self {
            link: median(|d| d.report().phases.of(Phase::Link))?,
            bind: median(|d| d.report().phases.of(Phase::Bind))?,
            queue: median(|d| d.report().phases.queued())?,
            write: median(|d| d.report().phases.of(Phase::Write))?,
            read: median(|d| d.report().phases.of(Phase::Read))?,
            release: median(|d| d.report().phases.of(Phase::Release))?,
        })
    }
}

/// Everything that is said at the end.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) model: String,
    pub(crate) prefill: String,
    pub(crate) decode: String,
    pub(crate) prefill_transport: String,
    pub(crate) decode_transport: String,
    /// Who has moved the bytes: `pull` or `push`.
    pub(crate) mode: &'static str,
    pub(crate) requests: u32,
    pub(crate) tokens: u64,
    /// What is said of states; null where the model has none.
    pub(crate) states: Option<String>,
    pub(crate) prefix_hit: u64,
    pub(crate) pairs: Vec<PairLine>,
    /// Bytes moved in one round.
    pub(crate) bytes: u64,
    /// Bytes zeroed beyond the prompts' ends in one round.
    pub(crate) zeroed: u64,
    /// First contact, reads, digests on both sides, release.
    pub(crate) full: Option<Round>,
    /// The same requests again without digests, on lanes that are open.
    pub(crate) fenced: Option<Round>,
    /// The same runs by memcpy.
    pub(crate) memcpy: Option<Round>,
    pub(crate) leases: Leases,
    pub(crate) fences: Fences,
    /// Of the first round.
    pub(crate) phases: Option<Phases>,
    /// Of the round without digests.
    pub(crate) fenced_phases: Option<Phases>,
    /// Null without `--stream`, and where it wasn't measured.
    pub(crate) stream: Option<Streamed>,
    /// Null without `--chaos`.
    pub(crate) chaos: Option<Chaos>,
    /// Decode ranks.
    pub(crate) ranks: usize,
    pub(crate) verified: u64,
    pub(crate) wrong: u64,
    pub(crate) outside: u64,
    pub(crate) first_fault: Option<String>,
}

impl Summary {
    pub(crate) fn new(args: &Args, scenario: &Scenario) -> Self {
        Self {
            model: scenario.model.clone(),
            prefill: args.prefill.to_string(),
            decode: args.decode.to_string(),
            prefill_transport: args.wires(Role::Prefill).to_string(),
            decode_transport: args.wires(Role::Decode).to_string(),
            mode: args.mode.name(),
            requests: args.requests,
            tokens: args.tokens,
            states: scenario.states(),
            prefix_hit: args.prefix_hit,
            pairs: Vec::new(),
            bytes: 0,
            zeroed: 0,
            full: None,
            fenced: None,
            memcpy: None,
            leases: Leases::default(),
            fences: Fences::default(),
            phases: None,
            fenced_phases: None,
            stream: None,
            chaos: None,
            ranks: scenario.decode.ranks().count(),
            verified: 0,
            wrong: 0,
            outside: 0,
            first_fault: None,
        }
    }

    /// Adds a round of requests.
    pub(crate) fn add_delivered(&mut self, scenario: &Scenario, delivered: &[Delivered]) {
        for d in delivered {
            self.add_pairs(scenario, &d.report().pairs);
            self.zeroed += d.report().zeroed.get();
        }
        self.fences.add(delivered);
        self.phases = Phases::of(delivered);
    }

    /// Adds what became of the leases, once all have ended. Where chaos has found that they don't, it has said so.
    pub(crate) async fn add_leases(&mut self, service: &Service) -> anyhow::Result<()> {
        self.leases.offered = service.offers();
        if self.chaos.as_ref().is_none_or(|chaos| chaos.faults.is_empty()) {
            for how in service.all_closed().await?.closed.values() {
                *self.leases.ended.entry(how.name()).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Adds one request's pairs; they come by rank.
    fn add_pairs(&mut self, scenario: &Scenario, pairs: &[PairReport]) {
        for p in pairs {
            let (src, dst) = (scenario.prefill.label(p.src), scenario.decode.label(p.dst));
            let at = self.pairs.iter().position(|l| l.src == src && l.dst == dst);
            let at = at.unwrap_or_else(|| {
                self.pairs.push(PairLine {
                    src,
                    dst,
                    bytes: 0,
                    rows: 0,
                    descriptors_before: 0,
                    descriptors_after: 0,
                    staged: 0,
                    lanes: BTreeSet::new(),
                });
                self.pairs.len() - 1
            });
            let line = &mut self.pairs[at];
            line.bytes += p.bytes.get();
            line.rows += p.rows;
            line.descriptors_before += p.descriptors_before;
            line.descriptors_after += p.descriptors_after;
            line.staged += u32::from(p.place != Place::Direct);
            line.lanes.insert(p.lane.clone());
            self.bytes += p.bytes.get();
        }
    }

    /// Adds what a rank found; `counts` says whether its bytes are counted as verified, or were in an earlier round.
    pub(crate) fn add_verdict(&mut self, verdict: Verdict, counts: bool) {
        self.verified += if counts { verdict.checked } else { 0 };
        self.wrong += verdict.wrong;
        self.outside += verdict.outside;
        if self.first_fault.is_none() {
            self.first_fault = verdict.first;
        }
    }

    /// Whether every byte is right and no other was touched, and nothing else is wrong.
    pub(crate) fn is_right(&self) -> bool {
        self.wrong == 0 && self.outside == 0 && self.chaos.as_ref().is_none_or(|chaos| chaos.faults.is_empty())
    }

    pub(crate) fn print(&self) {
        // Said only where there is staging memory.
        let staged = self.pairs.iter().any(|p| p.staged > 0);
        let mut lanes: Vec<&BTreeSet<String>> = self.pairs.iter().map(|p| &p.lanes).collect();
        lanes.sort_unstable();
        lanes.dedup();
        let row = |p: &PairLine| {
            let counts = [p.rows, p.descriptors_before, p.descriptors_after].map(show::count);
            let staged = staged.then(|| format!("{} of {}", p.staged, self.requests));
            let first = [p.dst.clone(), p.src.clone(), show::size(p.bytes)];
            let lane =
                (lanes.len() > 1).then(|| lanes.iter().position(|l| *l == &p.lanes).map_or(0, |at| at + 1).to_string());
            first.into_iter().chain(counts).chain(staged).chain(lane).collect()
        };
        let rows: Vec<Vec<String>> = self.pairs.iter().take(MOST_PAIRS).map(row).collect();
        let verb = if self.mode == "push" { "written by" } else { "read from" };
        let mut headings = vec!["rank", verb, "bytes", "rows", "descriptors before", "after coalescing"];
        headings.extend(staged.then_some("staged"));
        headings.extend((lanes.len() > 1).then_some("lane"));
        println!("\n{}", show::table("", &headings, &rows).trim_end());
        if self.pairs.len() > MOST_PAIRS {
            println!("... and {} pairs more (--json lists all)", self.pairs.len() - MOST_PAIRS);
        }
        for (number, lane) in (1..).zip(&lanes) {
            let pairs = self.pairs.iter().filter(|p| p.lanes == **lane).count();
            let name = if lanes.len() > 1 { format!("lane {number}") } else { "lane".to_owned() };
            let words: Vec<&str> = lane.iter().map(String::as_str).collect();
            println!("{name} of {}: {}", show::number_of(pairs, "rank pair"), words.join(" and "));
        }
        let sum = |f: fn(&PairLine) -> u64| self.pairs.iter().map(f).sum::<u64>();
        println!(
            "in all {} over {} rank pairs: {} rows, {} descriptors before and {} after coalescing; {} zeroed",
            show::size(self.bytes),
            self.pairs.len(),
            show::count(sum(|p| p.rows)),
            show::count(sum(|p| p.descriptors_before)),
            show::count(sum(|p| p.descriptors_after)),
            show::size(self.zeroed),
        );
        let round = |name: &str, r: Option<Round>| {
            if let Some(r) = r {
                println!("{name:<52} {:>8.3} s {:>8.2} GB/s", r.seconds, r.gigabytes_per_second);
            }
        };
        println!();
        let full = if self.mode == "push" {
            "first contact, writes, digests at both ends (full)"
        } else {
            "first contact, reads, digests at both ends (full)"
        };
        round(if self.chaos.is_some() { "all requests, deaths and repetitions included" } else { full }, self.full);
        round("the same requests again, without digests (fenced)", self.fenced);
        round("the same runs by memcpy, same threads", self.memcpy);
        self.print_protocol();
        if let Some(stream) = &self.stream {
            stream.print();
        }
        if let Some(chaos) = &self.chaos {
            chaos.print();
        }
        if let Some(fault) = &self.first_fault {
            println!("first fault: {fault}");
        }
        println!(
            "verified {} bytes on {} ranks, {} wrong, {} touched outside",
            self.verified, self.ranks, self.wrong, self.outside
        );
    }

    /// What the owners did.
    fn print_protocol(&self) {
        let listed = |counts: &BTreeMap<&str, u64>| {
            let words: Vec<String> = counts.iter().map(|(what, n)| format!("{n} {what}")).collect();
            words.join(", ")
        };
        let Leases { offered, ended } = &self.leases;
        let Fences { held, stale, attempts } = self.fences;
        println!("leases: {offered} offered, ended: {}", listed(ended));
        println!("fences: {held} held, {stale} stale; {attempts} attempts for {held} deliveries");
        if let Some(p) = self.phases {
            let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
            let [link, bind, queue, write, read, release] =
                [p.link, p.bind, p.queue, p.write, p.read, p.release].map(ms);
            let moved = if self.mode == "push" {
                format!("write {write} (ranks waited {queue} for their turn), zero and compare {read}")
            } else {
                format!("read {read} (of which queue {queue})")
            };
            println!("phases, medians in ms: link {link}, bind {bind}, {moved}, release {release}");
        }
    }
}
