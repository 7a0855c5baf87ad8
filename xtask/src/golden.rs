//! `cargo xtask golden PATH...`: recorded transfers of another connector, held against kvferry's plans.
//!
//! Prints a table of kinds of scenarios (mode and kinds of layers) and how they came out, each that failed, and ends with
//! `N passed, N failed`; exits 1 if any failed. `-v` prints a line for each. What the columns mean:
//!
//! - *same*: both move the same bytes, up to replicas and to bytes that nobody reads;
//! - *right*: the connector is known to deliver wrong bytes (`delivery.json`, `accepted_but_wrong.txt` beside the file), ours
//!   are proven by the oracle;
//! - *supported*: the connector refuses, ours are proven by the oracle;
//! - *refused*: both refuse, and our reason is one that is expected for this refusal;
//! - *wire*: the connector refuses a message, which says nothing of geometry.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use kvferry_golden::judge::Outcome;
use kvferry_golden::run::{Judged, run as judge_all};

use crate::show;

/// Characters of a reason in one line.
const REASON: usize = 300;

/// Scenario files.
#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct Args {
    /// Folders of scenarios, .json or .jsonl.gz files
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// Print a line for each scenario
    #[arg(short, long)]
    verbose: bool,
    /// Only scenarios whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// How many scenarios are judged at a time; all processors, if not given
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let all = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or_else(all);
    let mut table = Table::default();
    for path in &args.paths {
        judge_all(path, threads, &mut |judged| {
            if args.only.as_ref().is_some_and(|text| !judged.name.contains(text)) {
                return;
            }
            if args.verbose || !judged.passed() {
                println!("{}", line(&judged));
            }
            table.add(&judged);
        })?;
    }
    print!("{}", table.text());
    println!("{} passed, {} failed", table.passed(), table.failed());
    Ok(if table.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One scenario: how it came out, its name, and what there is to say.
fn line(judged: &Judged) -> String {
    let there = if judged.slugs.is_empty() { String::new() } else { format!(" (there: {})", judged.slugs.join(", ")) };
    let words = match &judged.outcome {
        Outcome::Same { tally: t, proven } => {
            let proof = if *proven { ", right by the oracle" } else { ", too large for the oracle" };
            let mut words = format!("{} moved by both{proof}", show::size(t.equal));
            for (bytes, what) in
                [(t.tail, "past the end"), (t.unread, "left behind by windows"), (t.padding, "padding")]
            {
                if bytes > 0 {
                    // Writing to a string can't fail.
                    let _ok = write!(words, "; recorded only: {} {what}", show::size(bytes));
                }
            }
            words
        }
        Outcome::Right { bytes, recorded } => {
            format!("{} right by the oracle, recorded as wrong: {recorded}", show::size(*bytes))
        }
        Outcome::Supported { bytes, made } => {
            let made = if made.is_empty() { String::new() } else { format!(" ({} made up)", made.join(", ")) };
            format!("{} right by the oracle{made}", show::size(*bytes))
        }
        Outcome::Refused { why } | Outcome::Failed { why } => why.clone(),
        Outcome::Wire { why } => format!("not a question of geometry: {why}"),
    };
    let words = words.replace('\n', "; ");
    let short: String = words.chars().take(REASON).collect();
    let more = if short.len() < words.len() { " ..." } else { "" };
    format!("{:9} {}{there}: {short}{more}", COLUMNS[column(&judged.outcome)], judged.name)
}

const COLUMNS: [&str; 6] = ["same", "right", "supported", "refused", "wire", "FAILED"];

fn column(outcome: &Outcome) -> usize {
    match outcome {
        Outcome::Same { .. } => 0,
        Outcome::Right { .. } => 1,
        Outcome::Supported { .. } => 2,
        Outcome::Refused { .. } => 3,
        Outcome::Wire { .. } => 4,
        Outcome::Failed { .. } => 5,
    }
}

/// Counts by kind and column.
#[derive(Default)]
struct Table(BTreeMap<String, [u64; COLUMNS.len()]>);

impl Table {
    fn add(&mut self, judged: &Judged) {
        self.0.entry(judged.kind.clone()).or_default()[column(&judged.outcome)] += 1;
    }

    fn sums(&self) -> [u64; COLUMNS.len()] {
        let mut sums = [0; COLUMNS.len()];
        for row in self.0.values() {
            sums.iter_mut().zip(row).for_each(|(s, n)| *s += n);
        }
        sums
    }

    fn failed(&self) -> u64 {
        self.sums()[COLUMNS.len() - 1]
    }

    fn passed(&self) -> u64 {
        self.sums()[..COLUMNS.len() - 1].iter().sum()
    }

    fn text(&self) -> String {
        let width = self.0.keys().map(String::len).max().unwrap_or(0).max("all".len());
        let mut out = format!("{:width$}", "");
        for name in COLUMNS {
            out += &format!(" {name:>9}");
        }
        out.push('\n');
        let total = ("all".to_owned(), self.sums());
        for (kind, row) in self.0.iter().map(|(k, r)| (k.clone(), *r)).chain([total]) {
            out += &format!("{kind:width$}");
            for n in row {
                out += &if n == 0 { format!(" {:>9}", ".") } else { format!(" {n:>9}") };
            }
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use kvferry_golden::schema::Verdict;

    use super::*;

    fn judged(kind: &str, outcome: Outcome) -> Judged {
        Judged { name: "s".into(), kind: kind.into(), recorded: Verdict::Reject, slugs: vec!["slug".into()], outcome }
    }

    #[test]
    fn the_table_counts_every_scenario_once() {
        let mut table = Table::default();
        table.add(&judged("pull full", Outcome::Supported { bytes: 1, made: Vec::new() }));
        table.add(&judged("push mla", Outcome::Failed { why: "x".into() }));
        table.add(&judged("push mla", Outcome::Wire { why: "x" }));
        assert_eq!((table.passed(), table.failed()), (2, 1));
        let text = table.text();
        let last = text.lines().last().unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(last, ["all", ".", ".", "1", ".", "1", "1"]);
    }

    #[test]
    fn a_reason_is_one_line_of_bounded_length() {
        let text = line(&judged("pull full", Outcome::Refused { why: "a\nb".repeat(500) }));
        assert!(text.starts_with("refused   s (there: slug): a; b"), "{text}");
        assert!(text.ends_with(" ...") && text.len() < REASON + 60 && !text.contains('\n'));
    }
}
