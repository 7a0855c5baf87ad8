//! Absences that only the source text can show.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Crates whose root forbids unsafe code.
const SAFE: &[&str] = &[
    "crates/kvferry-geometry/src/lib.rs",
    "crates/kvferry-models/src/lib.rs",
    "crates/kvferry-proto/src/lib.rs",
    "crates/kvferry-session/src/lib.rs",
    "crates/kvferry/src/lib.rs",
    "xtask/src/main.rs",
];

/// Files and folders of library crates that may read a clock, and why. Everything else is told the time.
const CLOCKS: &[(&str, &str)] = &[
    ("crates/kvferry/src/driver.rs", "the driver tells everything else the time"),
    ("crates/kvferry-shm/src/", "threads of the backend's own, and a drop, can't be told the time"),
    ("crates/kvferry-ucx/src/", "threads of the backend's own can't be told the time"),
    ("crates/kvferry-nixl/src/", "threads of the backend's own can't be told the time"),
    (
        "crates/kvferry-transport/src/negotiate/wake.rs",
        "a wait that a signal interrupts goes on for what is left of it",
    ),
    ("crates/kvferry-transport/src/conformance/", "a suite of tests: how long it waits for a backend is real time"),
];

/// The one place of serde in the protocol.
const WIRE: &[&str] = &["crates/kvferry-proto/src/wire/"];

/// What the oracle may not use: answers of the code that it is there to check.
const ANSWERS: &[&str] =
    &["geometry::plan", "geometry::peers", "geometry::zero", "geometry::compat", ".needed(", ".local("];

/// Words that name one machine or its registry. Written in two halves, so that this file doesn't hold them.
const MACHINE: &[&str] = &[concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/")];
const REGISTRY: &[&str] = &[concat!("[sou", "rce."), concat!("replace", "-with"), concat!("spa", "rse+")];
const CRATES_IO: &str = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";

/// Reads the files that git tracks or would track.
pub(super) fn violations(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut out = Vec::new();
    let files = files(root)?;
    for required in SAFE {
        if !files.iter().any(|f| f == required) {
            out.push(format!("{required}: missing, though it is listed as a root without unsafe code"));
        }
    }
    for file in files {
        // What isn't text has no source to check.
        let Ok(text) = std::fs::read_to_string(root.join(&file)) else { continue };
        out.extend(file_violations(&file, &text));
    }
    Ok(out)
}

fn files(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root)
        .output()
        .context("git could not be started")?;
    ensure!(output.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("a file's name is not UTF-8")?;
    Ok(names.split_terminator('\0').map(str::to_owned).collect())
}

/// All faults of one file, by its path from the root of the workspace.
fn file_violations(file: &str, text: &str) -> Vec<String> {
    let mut out = Vec::new();
    if SAFE.contains(&file) && !text.contains("\n#![forbid(unsafe_code)]") {
        out.push(format!("{file}: lacks #![forbid(unsafe_code)]"));
    }
    if file == "crates/kvferry-geometry/src/lib.rs" && !text.contains("\n#![no_std]") {
        out.push(format!("{file}: lacks #![no_std], which keeps clocks, sockets and threads out"));
    }
    let is_package = file.ends_with("Cargo.toml") && text.lines().any(|l| l == "[package]");
    if is_package && !text.contains("\n[lints]\nworkspace = true") {
        out.push(format!("{file}: does not take the lints of the workspace"));
    }
    let in_library = file.starts_with("crates/") && file.contains("/src/") && file.ends_with(".rs");
    for (number, line) in (1..).zip(text.lines()) {
        let mut at = |what: &str| out.push(format!("{file}:{number}: {what}: {}", line.trim()));
        if MACHINE.iter().any(|path| names_path(line, path)) {
            at("names a path of one machine");
        }
        if REGISTRY.iter().any(|word| line.contains(word)) {
            at("names a registry");
        }
        if file.ends_with("Cargo.lock") && line.starts_with("source = ") && line != CRATES_IO {
            at("is not from crates.io");
        }
    }
    // One file of the oracle drives the planner, to have an answer to judge; what judges it is in the others.
    if file.starts_with("tests/oracle/src/") && file != "tests/oracle/src/prove.rs" {
        for (number, line) in code_lines(file, text) {
            if ANSWERS.iter().any(|answer| line.contains(answer)) {
                out.push(format!("{file}:{number}: the oracle uses what it checks: {}", line.trim()));
            }
        }
    }
    if in_library {
        for (number, line) in code_lines(file, text) {
            let mut at = |what: &str| out.push(format!("{file}:{number}: {what}: {}", line.trim()));
            let reads_clock = ["Instant::now", "SystemTime::now", ".elapsed()"].iter().any(|c| line.contains(c));
            if reads_clock && !CLOCKS.iter().any(|c| file.starts_with(c.0)) {
                at("reads a clock; take the time as an argument");
            }
            let in_proto = file.starts_with("crates/kvferry-proto/");
            if in_proto && line.contains("serde") && !WIRE.iter().any(|wire| file.starts_with(wire)) {
                at("uses serde outside the wire");
            }
        }
    }
    out
}

/// Whether an absolute path that starts with `path` stands in the line, and not one of a crate that ends that way.
fn names_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "._-}/".contains(c))
    })
}

/// Numbered lines of code without comments, up to the tests that end a file.
fn code_lines<'a>(file: &str, text: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
    let is_test_file = file.ends_with("/tests.rs") || file.contains("/tests/");
    let lines: Vec<&str> = if is_test_file { Vec::new() } else { text.lines().collect() };
    let tests = lines.windows(2).position(|w| w[0].trim() == "#[cfg(test)]" && w[1].trim_start().starts_with("mod "));
    let end = tests.unwrap_or(lines.len());
    (1..).zip(lines).take(end).filter(|(_, line)| !line.trim_start().starts_with("//"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> usize {
        file_violations(file, text).len()
    }

    #[test]
    fn roots_say_what_they_are_without() {
        let file = "crates/kvferry-geometry/src/lib.rs";
        assert_eq!(found(file, "//! Text.\n#![no_std]\n#![forbid(unsafe_code)]\n"), 0);
        assert_eq!(found(file, "//! Text.\n//#![no_std]\n"), 2);
        assert_eq!(found("crates/kvferry-memory/src/lib.rs", "//! Text.\n"), 0);
        assert_eq!(found("crates/new/Cargo.toml", "[package]\nname = \"new\"\n"), 1);
        assert_eq!(found("crates/new/Cargo.toml", "[package]\nname = \"new\"\n\n[lints]\nworkspace = true\n"), 0);
    }

    #[test]
    fn one_file_reads_a_clock_and_tests_may() {
        let line = "    let now = Instant::now();\n";
        assert_eq!(found("crates/kvferry/src/driver.rs", line), 0);
        assert_eq!(found("crates/kvferry-session/src/pull.rs", line), 1);
        assert_eq!(found("crates/kvferry-session/src/pull.rs", "// Instant::now() would be wrong here\n"), 0);
        let tests = format!("fn f() {{}}\n#[cfg(test)]\nmod tests {{\n{line}}}\n");
        assert_eq!(found("crates/kvferry-session/src/pull.rs", &tests), 0);
        let early = format!("#[cfg(test)]\nuse std::time::Instant;\n{line}");
        assert_eq!(found("crates/kvferry-session/src/pull.rs", &early), 1);
        assert_eq!(found("xtask/src/lint.rs", line), 0);
    }

    #[test]
    fn serde_stays_in_the_wire() {
        let line = "use serde::Serialize;\n";
        assert_eq!(found("crates/kvferry-proto/src/wire/frame.rs", line), 0);
        assert_eq!(found("crates/kvferry-proto/src/wire/mod.rs", line), 0);
        assert_eq!(found("crates/kvferry-proto/src/lease.rs", line), 1);
        assert_eq!(found("crates/kvferry-models/src/config.rs", line), 0);
    }

    #[test]
    fn the_oracle_works_things_out_by_itself() {
        assert_eq!(found("tests/oracle/src/walk.rs", "let local = class.local(token);\n"), 1);
        assert_eq!(found("tests/oracle/src/walk.rs", "use kvferry_geometry::peers::PeerMap;\n"), 1);
        assert_eq!(found("tests/src/case.rs", "use kvferry_geometry::peers::PeerMap;\n"), 0);
    }

    #[test]
    fn no_file_names_a_machine_or_its_registry() {
        let home = ["/ho", "me/user/x"].concat();
        assert_eq!(found("docs/testing.md", &format!("see {home}")), 1);
        assert_eq!(found("docs/testing.md", &format!("see crates{home}")), 0);
        let lock = |source: &str| found("Cargo.lock", &format!("[[package]]\nsource = \"{source}\"\n"));
        assert_eq!(lock("registry+https://github.com/rust-lang/crates.io-index"), 0);
        assert_eq!(lock("registry+https://mirror.example/index"), 1);
    }
}
