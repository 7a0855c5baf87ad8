//! `cargo xtask test`: every test of the workspace, and a count that hides nothing.
//!
//! A test that can't run on this machine says so with `kvferry_tests::skip` and is counted as skipped, not as passed;
//! an ignored test counts as a failure. Benches are not run here (clippy builds them).

use std::io::{BufRead as _, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::Context as _;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to pass on to `cargo test`, e.g. `-p kvferry-shm` or a test's name; all of the workspace where empty
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    filter: Vec<String>,
}

/// What the lines of a run add up to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    ran: u64,
    failed: u64,
    ignored: u64,
    skipped: Vec<String>,
    failures: Vec<String>,
}

/// Runs tests and doctests, all of them also after one has failed; fails where anything did.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let mut tally = Tally::default();
    let mut line = vec!["test", "--no-fail-fast"];
    if !args.filter.iter().any(|a| a == "-p" || a.starts_with("--package")) {
        line.push("--workspace");
    }
    let sound = run_cargo(&line, &args.filter, &mut tally)?;
    println!();
    for skipped in &tally.skipped {
        println!("skipped: {skipped}");
    }
    for failure in &tally.failures {
        println!("failed: {failure}");
    }
    if tally.ignored > 0 {
        println!("{} ignored tests: a test that can't run here must say why with skip()", tally.ignored);
    }
    println!("{} in {:.0} s", tally.summary(), start.elapsed().as_secs_f64());
    let good = sound && tally.failed == 0 && tally.ignored == 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_cargo(line: &[&str], filter: &[String], tally: &mut Tally) -> anyhow::Result<bool> {
    let mut child = Command::new(env!("CARGO"))
        .args(line)
        .args(filter)
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo test could not be started")?;
    let out = child.stdout.take().context("cargo test has no output")?;
    for bytes in BufReader::new(out).split(b'\n') {
        let bytes = bytes.context("the output of cargo test could not be read")?;
        let text = String::from_utf8_lossy(&bytes);
        println!("{text}");
        tally.read(&text);
    }
    Ok(child.wait().context("cargo test could not be waited for")?.success())
}

impl Tally {
    /// Takes in one line of output.
    fn read(&mut self, line: &str) {
        if let Some(skipped) = line.strip_prefix("SKIPPED ") {
            self.skipped.push(skipped.to_owned());
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            self.ran += count_before(counts, " passed") + count_before(counts, " failed");
            self.failed += count_before(counts, " failed");
            self.ignored += count_before(counts, " ignored");
        } else if let Some(name) = line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED")) {
            self.failures.push(name.to_owned());
        }
    }

    fn summary(&self) -> String {
        let skipped = self.skipped.len() as u64;
        let passed = self.ran.saturating_sub(self.failed + skipped);
        format!("{passed} passed, {} failed, {skipped} skipped", self.failed)
    }
}

/// The number right before `word`.
fn count_before(text: &str, word: &str) -> u64 {
    let digits = |s: &str| s.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|d| d.parse().ok());
    text.split_once(word).and_then(|(before, _)| digits(before)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_not_a_pass_and_a_failure_is_named() {
        let mut tally = Tally::default();
        let lines = "\
running 3 tests
test a::one ... ok
SKIPPED ptrace_route: ptrace_scope is 2
test a::two ... FAILED
test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 4 filtered out; finished in 0.01s
test result: ok. 10 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.20s";
        lines.lines().for_each(|l| tally.read(l));
        assert_eq!(tally.failures, ["a::two"]);
        assert_eq!(tally.ignored, 1);
        assert_eq!(tally.summary(), "11 passed, 1 failed, 1 skipped");
    }
}
