//! `cargo xtask test`: every test of the workspace, and a count that hides nothing.
//!
//! A test that can't run on this machine says so with `kvferry_tests::skip` and is counted as skipped, not as passed;
//! an ignored test counts as a failure. Benches are not run here (clippy builds them). The native libraries are fetched
//! first; where they can't be, the NIXL backend is left out of the build and counts as one skip.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::Context as _;

use crate::cargo::{self, Workspace};

/// The packages that are built with the native libraries or run on them.
const NATIVE: [&str; 2] = ["xtask", "kvferry-nixl"];

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
    let packages = packages(&args.filter);
    let mut command = if packages.iter().all(|p| !NATIVE.contains(p)) && !packages.is_empty() {
        let mut command = cargo::cargo();
        command.args(["test", "--no-fail-fast"]);
        command
    } else {
        let workspace = Workspace::prepare()?;
        if let Some((package, why)) = workspace.lacks() {
            eprintln!("{package} is left out: {why}");
            tally.leave_out(package, &why, &cargo::required());
        }
        let mut command = workspace.cargo();
        command.args(["test", "--no-fail-fast"]);
        if packages.is_empty() {
            command.args(workspace.selection());
        }
        command
    };
    command.args(&args.filter);
    let sound = run_cargo(command, &mut tally)?;
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

/// The packages that a line for cargo names; none where it is about all.
fn packages(line: &[String]) -> Vec<&str> {
    let ours = line.split(|word| word == "--").next().unwrap_or_default();
    let mut out = Vec::new();
    for (at, word) in ours.iter().enumerate() {
        match word.as_str() {
            "-p" | "--package" => out.extend(ours.get(at + 1).map(String::as_str)),
            word => out.extend(word.strip_prefix("--package=").or_else(|| word.strip_prefix("-p"))),
        }
    }
    out
}

fn run_cargo(mut command: Command, tally: &mut Tally) -> anyhow::Result<bool> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo test could not be started")?;
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

    /// Counts a package that can't be built here as one skip, or as one failure where its backend is required.
    fn leave_out(&mut self, package: &str, why: &str, required: &str) {
        let backend = package.trim_start_matches("kvferry-");
        self.ran += 1;
        if cargo::is_listed(required, backend) {
            self.failed += 1;
            self.failures.push(format!("{package}: {backend} is required by KVFERRY_REQUIRE={required}, but: {why}"));
        } else {
            self.skipped.push(format!("{package} ({backend}): {why}"));
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

    #[test]
    fn a_package_that_is_left_out_is_a_skip_or_a_failure() {
        let mut tally = Tally::default();
        tally.leave_out("kvferry-nixl", "no pip", "shm,ucx");
        assert_eq!(tally.summary(), "0 passed, 0 failed, 1 skipped");
        assert_eq!(tally.skipped, ["kvferry-nixl (nixl): no pip"]);
        tally.leave_out("kvferry-nixl", "no pip", "shm, nixl");
        assert_eq!(tally.summary(), "0 passed, 1 failed, 1 skipped");
        assert!(tally.failures[0].ends_with("KVFERRY_REQUIRE=shm, nixl, but: no pip"), "{:?}", tally.failures);
    }

    #[test]
    fn packages_are_found_in_any_spelling() {
        let line = |words: &str| words.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(packages(&line("-p a --package b --package=c -pd name -- -p e")), ["a", "b", "c", "d"]);
        assert!(packages(&line("name --release")).is_empty());
    }
}
