//! Plants small faults in a copy of the sources and checks that the tests find each of them.
//!
//! `mutants SUITE [NAME...]`: every patch in the suite's folder is one fault, as a unified diff from the root of the workspace. For
//! each, the copy is made to have only this fault, is built and is tried: that must fail. A patch that no longer applies or doesn't
//! compile is an error and never counts as found. Without any fault the copy must pass. Names are words of which a patch's name
//! contains one; all are planted where none is given.
//!
//! | suite | faults | what must find them |
//! |---|---|---|
//! | `planner` | `tests/mutants/planner` | `tests/tests/planner.rs`; `PROPTEST_CASES` (2000 where it isn't set) and `KVFERRY_SEED` are handed on |
//! | `protocol` | `tests/mutants/protocol` | worlds of `kvferry-sim`, by a violation in one of the first 200 seeds |
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

mod copy;
mod suite;

use copy::Copy;
use suite::{SUITES, Suite};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What a trial of the copy shows.
enum Seen {
    Passed,
    /// Why it failed, in a line.
    Failed(String),
    /// The patch does not apply, or what it makes does not compile, or is not tried as it should.
    Broken(String),
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            say(&format!("mutants: {e}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<bool> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_default();
    let names: Vec<&str> = SUITES.iter().map(|s| s.name).collect();
    let suite = SUITES.iter().find(|s| s.name == name);
    let suite = suite.ok_or_else(|| format!("no suite {name:?}; there are {}", names.join(" and ")))?;
    let words: Vec<String> = args.collect();
    let root = root()?;
    let patches = suite.patches(root, &words)?;
    if patches.is_empty() {
        return Err(format!("no patch in {} has such a name", suite.folder).into());
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let copy = Copy::new(root, &target.join("mutants").join(suite.name));
    try_all(suite, &copy, &patches)
}

fn try_all(suite: &Suite, copy: &Copy<'_>, patches: &[PathBuf]) -> Outcome<bool> {
    let began = Instant::now();
    suite.lay_out(copy)?;
    match suite.attempt(copy)? {
        Seen::Passed => say(&format!("passes     without any fault ({:.0} s)", began.elapsed().as_secs_f64())),
        Seen::Failed(why) => return Err(format!("fails without any fault: {why}").into()),
        Seen::Broken(why) => return Err(format!("the copy without any fault is not tried:\n{why}").into()),
    }
    let (mut found, mut errors) = (0, 0);
    for patch in patches {
        let name = patch.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let began = Instant::now();
        let seen = match suite.plant(copy, patch) {
            Ok(()) => suite.attempt(copy)?,
            Err(e) => Seen::Broken(e.to_string()),
        };
        let text = match seen {
            Seen::Failed(why) => {
                found += 1;
                format!("found      {name}: {why}")
            }
            Seen::Passed => format!("NOT FOUND  {name}"),
            Seen::Broken(why) => {
                errors += 1;
                format!("ERROR      {name}: {why}")
            }
        };
        say(&format!("{text} ({:.0} s)", began.elapsed().as_secs_f64()));
    }
    let took = began.elapsed().as_secs_f64();
    say(&format!("{} mutants, {found} found, {errors} errors, {took:.0} s", patches.len()));
    Ok(found == patches.len())
}

/// The root of the workspace.
fn root() -> Outcome<&'static Path> {
    Ok(Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("no workspace around this package")?)
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A closed pipe is no reason to stop.
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn every_patch_applies() {
        if copy::git(Path::new(".")).arg("--version").output().is_err() {
            return kvferry_tests::skip("git", "patches are applied by git, which is not there");
        }
        let root = root().unwrap();
        for suite in SUITES {
            let patches = suite.patches(root, &[]).unwrap();
            assert!(patches.len() >= suite.least, "{}: only {} patches", suite.name, patches.len());
            for patch in patches {
                let error = copy::applies(root, &patch).err().map(|e| e.to_string());
                assert_eq!(error, None, "{}", patch.display());
                let text = std::fs::read_to_string(&patch).unwrap();
                let files = text.lines().filter_map(|l| l.strip_prefix("+++ b/"));
                for file in files {
                    let planted = suite.planted.iter().any(|folder| file.starts_with(folder));
                    assert!(planted, "{}: {file} is not restored before the next fault", patch.display());
                }
            }
        }
    }
}
