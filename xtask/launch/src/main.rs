//! `cargo xtask COMMAND`: builds and runs `xtask` in the profile that the command needs.
//!
//! What moves bytes or simulates does it in a release build. What builds, tests and checks shares the build of the tests, so that
//! nothing is compiled twice.
#![forbid(unsafe_code)]
#![allow(clippy::print_stderr, reason = "that it can't begin is for people")]

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

/// Commands that build, test and check.
const BUILDERS: [&str; 5] = ["layers", "lint", "mutants", "native", "test"];

fn profile(command: Option<&OsStr>) -> &'static str {
    if command.is_some_and(|c| BUILDERS.iter().any(|b| c == *b)) { "dev" } else { "release" }
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let profile = profile(arguments.first().map(OsString::as_os_str));
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "--package", "xtask", "--profile", profile, "--"]).args(arguments);
    // Takes this process over, so that a signal and an exit status are the command's own.
    eprintln!("error: cargo can't be run: {}", cargo.exec());
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_built_for_speed() {
        let of = |command: &str| profile(Some(OsStr::new(command)));
        assert_eq!((of("test"), of("lint")), ("dev", "dev"));
        let commands = include_str!("../../src/main.rs");
        for command in BUILDERS {
            let variant = command[..1].to_uppercase() + &command[1..];
            assert!(commands.contains(&format!("\n    {variant}({command}::Args)")), "xtask has no command {command}");
        }
        assert_eq!((of("demo"), of("sim"), of("nothing"), profile(None)), ("release", "release", "release", "release"));
    }
}
