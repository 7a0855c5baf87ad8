//! The ways that a pair's bytes can go, what each costs, and why one is the best.

use kvferry_geometry::batch::Batch;
use kvferry_geometry::staged::{Choice, Cost, CostModel, Place, Pools};
use serde_json::{Value, json};

use crate::show;

/// The cost model's constants and the staging memory.
#[derive(Clone, Copy, Debug, clap::Args)]
#[group(skip)]
pub(super) struct CostArgs {
    /// Nanoseconds that a descriptor costs, whatever its length
    #[arg(long, value_name = "NS", default_value_t = CostModel::default().descriptor_ns)]
    descriptor_ns: u64,
    /// What the wire moves between two ranks, in gigabits a second
    #[arg(long, value_name = "GBIT", default_value_t = gbps(CostModel::default().wire_bytes_per_us))]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    wire_gbps: u64,
    /// What a local step permutes with long runs, in gigabits a second
    #[arg(long, value_name = "GBIT", default_value_t = gbps(CostModel::default().permute_bytes_per_us))]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    permute_gbps: u64,
    /// Picoseconds that a run of a local step costs, whatever its length
    #[arg(long, value_name = "PS", default_value_t = CostModel::default().run_ps)]
    run_ps: u64,
    /// Nanoseconds that staging costs once
    #[arg(long, value_name = "NS", default_value_t = CostModel::default().stage_ns)]
    stage_ns: u64,
    /// Staging memory of each rank, for example 64MiB; 0 for none
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = show::parse_size)]
    pool: u64,
}

/// Gigabits a second of bytes a microsecond.
const fn gbps(bytes_per_us: u64) -> u64 {
    bytes_per_us / 125
}

impl Default for CostArgs {
    fn default() -> Self {
        let CostModel { descriptor_ns, wire_bytes_per_us, permute_bytes_per_us, run_ps, stage_ns } =
            CostModel::default();
        let (wire_gbps, permute_gbps) = (gbps(wire_bytes_per_us), gbps(permute_bytes_per_us));
        Self { descriptor_ns, wire_gbps, permute_gbps, run_ps, stage_ns, pool: 256 << 20 }
    }
}

impl CostArgs {
    fn model(self) -> CostModel {
        CostModel {
            descriptor_ns: self.descriptor_ns,
            wire_bytes_per_us: self.wire_gbps * 125,
            permute_bytes_per_us: self.permute_gbps * 125,
            run_ps: self.run_ps,
            stage_ns: self.stage_ns,
        }
    }

    /// All ways of one pair's batch.
    pub(super) fn compare(self, batch: &Batch) -> Choice {
        self.model().compare(batch, Pools { source: self.pool, destination: self.pool })
    }

    /// The constants in words.
    fn words(self) -> String {
        format!(
            "{} a descriptor, {} Gbit/s on the wire, {} Gbit/s and {} ps a run locally, {} to stage, a pool of {}",
            show::time(self.descriptor_ns),
            self.wire_gbps,
            self.permute_gbps,
            show::count(self.run_ps),
            show::time(self.stage_ns),
            show::size(self.pool),
        )
    }

    /// One choice for an operator, or the sum of several.
    pub(super) fn text(self, of: &str, choice: &Choice) -> String {
        let row = |c: &Cost| row(c, if c.fits { String::new() } else { "larger than the pool".into() });
        let rows: Vec<Vec<String>> = ways(choice).map(row).collect();
        let headings = ["way", "time", "descriptors on the wire", "local runs", "staging", ""];
        let table = show::table("    ", &headings, &rows);
        format!("{of} ({}):\n{table}    {}\n", self.words(), why(choice))
    }
}

fn ways(choice: &Choice) -> impl Iterator<Item = &Cost> {
    [Some(&choice.direct), choice.destination.as_ref(), choice.source.as_ref()].into_iter().flatten()
}

/// Why the best way is the best, in one sentence.
fn why(choice: &Choice) -> String {
    let best = &choice.best;
    if choice.direct.descriptors == 0 {
        return "best: nothing moves".into();
    }
    if best.place != Place::Direct {
        let (saved, local) =
            (choice.direct.descriptors.saturating_sub(best.descriptors), choice.direct.ns.saturating_sub(best.ns));
        return format!(
            "best: {}, since {} fewer descriptors on the wire save more than the local step costs, {} in all",
            best.place,
            show::count(saved),
            show::time(local),
        );
    }
    let staged = || ways(choice).filter(|c| c.place != Place::Direct);
    let Some(cheapest) = staged().min_by_key(|c| c.ns) else {
        return "best: direct, since a batch of so many blocks can't be staged".into();
    };
    if cheapest.ns < choice.direct.ns && !cheapest.fits {
        return format!(
            "best: direct, since what would be faster ({}, {}) needs {} of staging memory, more than the pool has",
            cheapest.place,
            show::time(cheapest.ns),
            show::size(cheapest.staging),
        );
    }
    let saved = choice.direct.descriptors.saturating_sub(cheapest.descriptors);
    let saving = match saved {
        0 => "no descriptor".into(),
        1 => "one descriptor".into(),
        n => format!("{} descriptors", show::count(n)),
    };
    format!(
        "best: direct, since the cheapest staging ({}) saves {saving} on the wire and its local step costs more, {} in all",
        cheapest.place,
        show::time(cheapest.ns.saturating_sub(choice.direct.ns)),
    )
}

/// The sum of several pairs' choices: each way as if all went it; best is the sum of each pair's best.
pub(super) fn sum<'a>(choices: impl Iterator<Item = &'a Choice>) -> Option<Sum> {
    let mut out: Option<Sum> = None;
    for choice in choices {
        match &mut out {
            None => out = Some(Sum { all: choice.clone(), best_ns: choice.best.ns, best: [0; 3] }),
            Some(sum) => {
                add(&mut sum.all.direct, &choice.direct);
                sum.all.destination = both(sum.all.destination, choice.destination);
                sum.all.source = both(sum.all.source, choice.source);
                sum.best_ns = sum.best_ns.saturating_add(choice.best.ns);
            }
        }
        if let Some(sum) = &mut out {
            sum.best[choice.best.place as usize] += 1;
        }
    }
    out
}

/// See [`sum`].
pub(super) struct Sum {
    all: Choice,
    best_ns: u64,
    /// Pairs whose best is direct, at the destination, at the source.
    best: [usize; 3],
}

impl Sum {
    /// One line for each way, and what choosing for each pair gives.
    pub(super) fn text(&self) -> String {
        let row = |c: &Cost| row(c, show::number_of(self.best[c.place as usize], "pair"));
        let mut rows: Vec<Vec<String>> = ways(&self.all).map(row).collect();
        let pairs = show::number_of(self.best.iter().sum(), "pair");
        let dash = || "-".to_owned();
        rows.push(vec!["the best for each pair".into(), show::time(self.best_ns), dash(), dash(), dash(), pairs]);
        let headings = ["all pairs, summed", "time", "descriptors on the wire", "local runs", "staging", "best for"];
        show::table("", &headings, &rows)
    }

    pub(super) fn json(&self) -> Value {
        let mut value = json(&self.all);
        if let Some(map) = value.as_object_mut() {
            map.remove("best");
            map.remove("why");
            map.insert("best_ns".into(), json!(self.best_ns));
            let [direct, destination, source] = self.best;
            let counts = json!({"direct": direct, "destination": destination, "source": source});
            map.insert("best_for_pairs".into(), counts);
        }
        value
    }
}

fn both(sum: Option<Cost>, more: Option<Cost>) -> Option<Cost> {
    let (mut sum, more) = (sum?, more?);
    add(&mut sum, &more);
    Some(sum)
}

fn add(sum: &mut Cost, more: &Cost) {
    sum.ns = sum.ns.saturating_add(more.ns);
    sum.descriptors = sum.descriptors.saturating_add(more.descriptors);
    sum.runs = sum.runs.saturating_add(more.runs);
    sum.staging = sum.staging.saturating_add(more.staging);
    sum.fits &= more.fits;
}

const fn key(place: Place) -> &'static str {
    match place {
        Place::Direct => "direct",
        Place::Destination => "destination",
        Place::Source => "source",
    }
}

/// A choice as the module `plan` describes it.
pub(super) fn json(choice: &Choice) -> Value {
    let cost = |c: Option<&Cost>| {
        c.map(|c| {
            json!({
                "ns": c.ns, "descriptors": c.descriptors, "local_runs": c.runs, "staging_bytes": c.staging, "fits": c.fits,
            })
        })
    };
    json!({
        "direct": cost(Some(&choice.direct)),
        "destination": cost(choice.destination.as_ref()),
        "source": cost(choice.source.as_ref()),
        "best": key(choice.best.place),
        "why": why(choice),
    })
}

/// One way as a row of a table, with a last cell of the table's own.
fn row(c: &Cost, last: String) -> Vec<String> {
    let local = |n: String| if c.place == Place::Direct { "-".into() } else { n };
    let (runs, staging) = (local(show::count(c.runs)), local(show::size(c.staging)));
    vec![c.place.to_string(), show::time(c.ns), show::count(c.descriptors), runs, staging, last]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(place: Place, ns: u64, descriptors: u64, fits: bool) -> Cost {
        Cost { place, ns, descriptors, runs: 7, staging: 4096, fits }
    }

    fn choice(direct: Cost, destination: Cost, source: Cost) -> Choice {
        let best = [direct, destination, source].into_iter().filter(|c| c.fits).min_by_key(|c| c.ns).unwrap();
        Choice { best, direct, destination: Some(destination), source: Some(source) }
    }

    #[test]
    fn the_defaults_are_the_model_s() {
        assert_eq!(CostArgs::default().model(), CostModel::default());
        assert!(CostArgs::default().words().starts_with("100 ns a descriptor, 400 Gbit/s on the wire"));
    }

    #[test]
    fn the_reason_is_a_sentence() {
        let direct = cost(Place::Direct, 5_000, 1_000, true);
        let at = |place, ns, fits| cost(place, ns, 10, fits);
        let faster = choice(direct, at(Place::Destination, 2_000, true), at(Place::Source, 3_000, true));
        assert_eq!(
            why(&faster),
            "best: staged at the destination, since 990 fewer descriptors on the wire save more than the local step costs, 3 us in all"
        );
        let slower = choice(direct, at(Place::Destination, 6_000, true), at(Place::Source, 7_000, true));
        assert_eq!(
            why(&slower),
            "best: direct, since the cheapest staging (staged at the destination) saves 990 descriptors on the wire and its local step costs more, 1 us in all"
        );
        let large = choice(direct, at(Place::Destination, 2_000, false), at(Place::Source, 3_000, false));
        assert!(why(&large).contains("needs 4 KiB of staging memory, more than the pool has"), "{}", why(&large));
        let sum = sum([&faster, &slower].into_iter()).unwrap();
        assert_eq!((sum.best_ns, sum.best, sum.all.direct.ns), (7_000, [1, 1, 0], 10_000));
    }
}
