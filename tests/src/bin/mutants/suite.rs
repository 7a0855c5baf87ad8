//! The suites: which faults there are, where they are planted, and what must find them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use super::copy::{Copy, is_patch, wait};
use super::{Outcome, Seen};

/// A kind of faults.
pub(crate) struct Suite {
    pub(crate) name: &'static str,
    /// Where the patches lie, from the root.
    pub(crate) folder: &'static str,
    /// How many there are at least.
    #[cfg_attr(not(test), allow(dead_code, reason = "for the test"))]
    pub(crate) least: usize,
    /// The folders that faults are planted in.
    pub(crate) planted: &'static [&'static str],
    /// What else is copied.
    copied: &'static [&'static str],
    /// The packages of the copy.
    members: &'static [&'static str],
    /// Files of the copy that the workspace hasn't.
    files: &'static [(&'static str, &'static str)],
    trial: Trial,
}

#[derive(Clone, Copy)]
enum Trial {
    PropertyTests,
    Worlds,
}

/// A run that takes longer goes round in circles.
const LIMIT: Duration = Duration::from_secs(300);
/// Seeds of worlds, from 0 on.
const SEEDS: u32 = 200;

pub(crate) const SUITES: &[Suite] = &[
    Suite {
        name: "planner",
        folder: "tests/mutants/planner",
        least: 50,
        planted: &["crates/kvferry-geometry"],
        copied: &["tests/oracle", "tests/src/random", "tests/tests/planner.rs", "Cargo.lock"],
        members: &["crates/kvferry-geometry", "tests", "tests/oracle"],
        files: &[(
            "tests/Cargo.toml",
            "[package]\nname = \"kvferry-tests\"\nedition.workspace = true\nversion.workspace = true\n\n\
             [lib]\npath = \"src/random/mod.rs\"\n\n\
             [dependencies]\nkvferry-geometry.workspace = true\nkvferry-oracle.workspace = true\n\
             proptest.workspace = true\n",
        )],
        trial: Trial::PropertyTests,
    },
    Suite {
        name: "protocol",
        folder: "tests/mutants/protocol",
        least: 14,
        planted: &["crates/kvferry-proto", "crates/kvferry-session"],
        copied: &[
            "crates/kvferry-geometry",
            "crates/kvferry-transport",
            "crates/kvferry-memory",
            "crates/kvferry-sim",
            "Cargo.lock",
        ],
        members: &[
            "crates/kvferry-geometry",
            "crates/kvferry-transport",
            "crates/kvferry-memory",
            "crates/kvferry-proto",
            "crates/kvferry-session",
            "crates/kvferry-sim",
        ],
        files: &[],
        trial: Trial::Worlds,
    },
];

impl Suite {
    /// Its patches whose names contain one of the words, by name.
    pub(crate) fn patches(&self, root: &Path, words: &[String]) -> Outcome<Vec<PathBuf>> {
        let mut patches = Vec::new();
        for entry in fs::read_dir(root.join(self.folder))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if is_patch(&path) && (words.is_empty() || words.iter().any(|w| name.contains(w.as_str()))) {
                patches.push(path);
            }
        }
        patches.sort();
        Ok(patches)
    }

    /// Makes the copy equal to the workspace.
    pub(crate) fn lay_out(&self, copy: &Copy<'_>) -> Outcome<()> {
        copy.restore(self.copied)?;
        copy.restore(self.planted)?;
        copy.set_members(self.members)?;
        self.files.iter().try_for_each(|(path, text)| copy.write(path, text))
    }

    /// Makes it equal to the workspace but for one fault.
    pub(crate) fn plant(&self, copy: &Copy<'_>, patch: &Path) -> Outcome<()> {
        copy.restore(self.planted)?;
        copy.apply(patch)
    }

    /// Builds the copy and tries it.
    pub(crate) fn attempt(&self, copy: &Copy<'_>) -> Outcome<Seen> {
        match self.trial {
            Trial::PropertyTests => property_tests(copy),
            Trial::Worlds => worlds(copy),
        }
    }
}

fn property_tests(copy: &Copy<'_>) -> Outcome<Seen> {
    const TESTS: &[&str] = &["test", "--quiet", "-p", "kvferry-tests", "--test", "planner"];
    let built = copy.cargo(&[TESTS, &["--no-run"]].concat()).output()?;
    if !built.status.success() {
        return Ok(Seen::Broken(String::from_utf8_lossy(&built.stderr).into_owned()));
    }
    let mut tests = copy.cargo(TESTS);
    let cases = std::env::var("PROPTEST_CASES").unwrap_or_else(|_| "2000".into());
    let seed = std::env::var("KVFERRY_SEED").unwrap_or_else(|_| "1".into());
    // The first failure is enough; nobody reads the smallest one.
    tests.env("PROPTEST_CASES", cases).env("KVFERRY_SEED", seed).env("PROPTEST_MAX_SHRINK_ITERS", "0");
    let log = copy.target.join("planner.log");
    tests.stdout(fs::File::create(&log)?).stderr(Stdio::null());
    let Some(status) = wait(tests.spawn()?, LIMIT)? else {
        return Ok(Seen::Failed(format!("did not end in {} s", LIMIT.as_secs())));
    };
    let log = fs::read_to_string(&log)?;
    Ok(match status.success() {
        true if log.contains("test result: ok") => Seen::Passed,
        true => Seen::Broken("the tests did not run".into()),
        false => Seen::Failed(reason(&log)),
    })
}

/// The line of a log that says best what failed.
fn reason(log: &str) -> String {
    let said = |word: &str| log.lines().find(|l| l.contains(word));
    let after = |word: &str| log.lines().skip_while(|l| !l.contains(word)).nth(1);
    let line = said(" bytes wrong")
        .or_else(|| after("run again with"))
        .or_else(|| after("panicked at"))
        .unwrap_or("the tests fail");
    line.chars().take(180).collect()
}

fn worlds(copy: &Copy<'_>) -> Outcome<Seen> {
    let mut build = copy.cargo(&["build", "--quiet", "--release", "-p", "kvferry-sim", "--example", "first"]);
    // Each fault rebuilds the same crates: what is the same in them is not compiled anew.
    build.env("CARGO_PROFILE_RELEASE_INCREMENTAL", "true").env("CARGO_PROFILE_RELEASE_DEBUG", "false");
    // To build the worlds takes much longer than to run them.
    build.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
    let built = build.output()?;
    if !built.status.success() {
        return Ok(Seen::Broken(String::from_utf8_lossy(&built.stderr).into_owned()));
    }
    let log = copy.target.join("worlds.log");
    let mut run = std::process::Command::new(copy.target.join("release/examples/first"));
    run.args(["0".to_owned(), SEEDS.to_string()]).env("RUST_BACKTRACE", "0");
    run.stdout(fs::File::create(&log)?).stderr(fs::File::create(copy.target.join("worlds.err"))?);
    let ended = wait(run.spawn()?, LIMIT)?;
    let log = fs::read_to_string(&log)?;
    let line: String = log.lines().next().unwrap_or_default().chars().take(220).collect();
    // Only a violation counts: worlds that panic or never end have not said what is wrong.
    Ok(match ended.and_then(|status| status.code()) {
        Some(0) if line.ends_with(", 0 violations") => Seen::Passed,
        Some(1) if line.starts_with("seed ") && !line.contains(": error: ") => Seen::Failed(line),
        Some(code) => Seen::Broken(format!("the worlds ended with {code}: {}", reason_of_panic(copy)?)),
        None => Seen::Broken(format!("the worlds did not end in {} s", LIMIT.as_secs())),
    })
}

fn reason_of_panic(copy: &Copy<'_>) -> Outcome<String> {
    let log = fs::read_to_string(copy.target.join("worlds.err"))?;
    Ok(log.lines().take(3).collect::<Vec<_>>().join(" ").chars().take(300).collect())
}
