//! kvferry beside what others do with the same memory, in one run.
//!
//! Two processes a rival, one that owns the source and one that reads it into the destination; all of them map the same two
//! memory files. Rounds alternate: every rival moves a work's bytes once, then all do so again, in another order. Who does not
//! have its turn is stopped by a signal, so that a library that polls without pause costs nobody else anything. After the timed
//! rounds each rival moves the bytes once more into cleared memory, and every byte of the destination is compared.
//!
//! What is timed is from the order in the reader's process to its last byte: for requests that includes everything from block
//! ids on (kvferry: planning, proof, submission; NIXL: making the request; vLLM: from `start_load_kv` to `finished_recving`). CPU
//! time is that of either whole process over the same span, and a little around it.
//!
//! `cargo run --release -- --peer DIR` does everything; see `docs/performance.md`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it reports")]

use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;

mod child;
#[cfg(feature = "engines")]
mod engine;
mod ferry;
mod machine;
mod memory;
mod pair;
mod peer;
mod plain;
#[cfg(feature = "nixl")]
mod raw_nixl;
#[cfg(feature = "ucx")]
mod raw_ucx;
mod scenes;
mod table;
mod wire;
mod work;

/// What can be left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Part {
    /// Scattered blocks of several sizes.
    Blocks,
    /// Whole requests, first contacts and idle ranks, blocks of 16 tokens on both sides.
    Requests,
    /// Whole requests from blocks of 16 tokens into blocks of 64.
    Wider,
}

/// Compares.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Args {
    /// Folder of the bench of vLLM's workers: the one that has `bench.py`, or the one above it
    #[arg(long, env = "KVFERRY_PEER")]
    pub(crate) peer: Option<PathBuf>,
    /// A Python that has vLLM and NIXL; default: `venv/bin/python` in the peer's folder
    #[arg(long, env = "KVFERRY_PEER_PYTHON")]
    pub(crate) python: Option<PathBuf>,
    /// Timed rounds
    #[arg(long, default_value_t = 7)]
    pub(crate) rounds: usize,
    /// Only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) only: Vec<Part>,
    /// Only rivals whose name has one of these words in it
    #[arg(long, value_delimiter = ',')]
    pub(crate) who: Vec<String>,
    /// Write the report here, too
    #[arg(long)]
    out: Option<PathBuf>,
    /// Take what is built in: don't build UCX and NIXL in
    #[arg(long)]
    as_built: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    if let Some(start) = std::env::args().skip_while(|a| a != "child").nth(1) {
        child::run(&serde_json::from_str(&start)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let args = Args::parse();
    if !args.as_built && !cfg!(feature = "nixl") {
        return again();
    }
    let report = scenes::run(&args)?;
    println!("{report}");
    if let Some(out) = &args.out {
        std::fs::write(out, &report).with_context(|| format!("writing {}", out.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs with the libraries built in, as far as there are any: NIXL needs what `cargo xtask native` fetches.
fn again() -> anyhow::Result<ExitCode> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cargo = Command::new("cargo");
    // In the caller's folder, whose paths were given.
    cargo.args(["run", "--release", "--quiet", "--manifest-path"]).arg(own.join("Cargo.toml"));
    match native(own) {
        Ok(environment) => {
            cargo.args(["--features", "ucx,nixl"]).envs(environment);
        }
        Err(why) => {
            eprintln!("without NIXL: {why:#}");
            cargo.args(["--features", "ucx"]);
        }
    }
    let error = cargo.args(["--", "--as-built"]).args(std::env::args_os().skip(1)).exec();
    bail!("starting cargo: {error}")
}

/// The environment that NIXL is built with and runs in.
fn native(own: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let given = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if given("LIBCLANG_PATH") && given("NIXL_PLUGIN_DIR") {
        return Ok(Vec::new());
    }
    let root = own.join("../..");
    let output = Command::new("cargo").args(["xtask", "native"]).current_dir(root).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "cargo xtask native failed");
    let text = String::from_utf8(output.stdout)?;
    let exported = |line: &str| {
        let (name, value) = line.strip_prefix("export ")?.split_once('=')?;
        Some((name.to_owned(), value.trim_matches('\'').to_owned()))
    };
    Ok(text.lines().filter_map(exported).collect())
}

/// Files of the source and of the destination, open as long as this lives.
pub(crate) struct Files {
    _open: [std::os::fd::OwnedFd; 2],
    pub(crate) paths: [PathBuf; 2],
}

impl Files {
    /// Makes both, and fills the source.
    pub(crate) fn new(lens: [u64; 2]) -> anyhow::Result<Self> {
        let [src, dst] =
            [memory::create("kvferry-compare source", lens[0])?, memory::create("kvferry-compare", lens[1])?];
        let own = std::process::id();
        let path = |fd: &std::os::fd::OwnedFd| PathBuf::from(format!("/proc/{own}/fd/{}", fd.as_raw_fd()));
        let paths = [path(&src), path(&dst)];
        memory::fill(&memory::open(&paths[0], false)?, 5)?;
        let region = memory::open(&paths[1], false)?;
        region.fill(0, region.len().get(), memory::GUARD)?;
        Ok(Self { _open: [src, dst], paths })
    }
}

/// Says how far it is.
pub(crate) fn say(start: Instant, what: &str) {
    eprintln!("{:6.1} s  {what}", start.elapsed().as_secs_f64());
}

/// How long idle ranks are watched.
pub(crate) const IDLE: Duration = Duration::from_secs(2);
