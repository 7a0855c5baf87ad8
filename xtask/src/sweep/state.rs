//! What a sweep has finished, in a file, so that it goes on where it was ended.
//!
//! The first line names the scenario by a digest of all that outcomes depend on; each other line is one finished candidate, named by a digest
//! of its own. A line is written at once and whole, so only the last can be torn: it is cut off, and its candidate is done again.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use kvferry_topology::sweep::{Candidate, Figures, Outcome, Sweep};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The form of the file.
const FORM: u32 = 1;
/// The longest line that is read.
const LONGEST: u64 = 16 << 20;

/// Why a state is of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum StateError {
    /// The file can't be opened, read or written.
    #[error("{file}: {error}", file = file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It is of something else.
    #[error(
        "{file}: holds the state of scenario {found:.16}, and this one is {wanted:.16} (a load, a seed, a cluster or an engine differs); name \
         another file, or remove this one",
        file = file.display()
    )]
    Other {
        /// The file.
        file: PathBuf,
        /// What it says.
        found: String,
        /// This scenario's digest.
        wanted: String,
    },
    /// It is no state.
    #[error("{file}:{line}: is no line of a sweep's state ({reason}); name another file, or remove this one", file = file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong.
        reason: String,
    },
}

#[derive(Serialize, Deserialize)]
struct Head {
    kvferry_sweep: u32,
    scenario: String,
}

#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    /// What people see.
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    outcome: Option<Outcome>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    events: Option<Result<Figures, String>>,
}

/// A file, and what was finished in it.
#[derive(Debug)]
pub(super) struct State {
    path: PathBuf,
    file: File,
    scenario: String,
    outcomes: HashMap<String, Outcome>,
    events: HashMap<String, Result<Figures, String>>,
}

/// A digest that is written to as text.
struct Hash(Sha256);

impl std::fmt::Write for Hash {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.update(text.as_bytes());
        Ok(())
    }
}

impl Hash {
    fn hex(self) -> String {
        let mut out = String::new();
        for byte in self.0.finalize() {
            let _ = write!(out, "{byte:02x}");
        }
        out
    }
}

/// The digest of all that outcomes depend on.
pub(super) fn scenario(sweep: &Sweep) -> String {
    let mut hash = Hash(Sha256::new());
    // A digest takes all that is written.
    let _ = sweep.identity(&mut hash);
    hash.hex()
}

impl State {
    /// Reads a state, or begins one.
    pub(super) fn open(path: &Path, sweep: &Sweep) -> Result<Self, StateError> {
        let io = |error| StateError::File { file: path.to_owned(), error };
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        let (path, scenario) = (path.to_owned(), scenario(sweep));
        let mut out = Self { path, file, scenario, outcomes: HashMap::new(), events: HashMap::new() };
        let whole = out.read()?;
        out.file.set_len(whole).map_err(|e| out.io(e))?;
        out.file.seek(SeekFrom::Start(whole)).map_err(|e| out.io(e))?;
        if whole == 0 {
            let head = Head { kvferry_sweep: FORM, scenario: out.scenario.clone() };
            out.append(&head)?;
        }
        Ok(out)
    }

    fn io(&self, error: std::io::Error) -> StateError {
        StateError::File { file: self.path.clone(), error }
    }

    /// Reads all whole lines; how many bytes those are.
    fn read(&mut self) -> Result<u64, StateError> {
        let mut input = BufReader::new(self.file.try_clone().map_err(|e| self.io(e))?);
        let (mut whole, mut number) = (0, 0);
        loop {
            let mut line = Vec::new();
            let got = (&mut input).take(LONGEST).read_until(b'\n', &mut line).map_err(|e| self.io(e))?;
            // The end, or a line that was not written whole.
            if line.last() != Some(&b'\n') && (got as u64) < LONGEST {
                return Ok(whole);
            }
            number += 1;
            self.line(number, &line)?;
            whole += got as u64;
        }
    }

    fn line(&mut self, number: u64, line: &[u8]) -> Result<(), StateError> {
        let fault = |error: serde_json::Error| StateError::Line {
            file: self.path.clone(),
            line: number,
            reason: error.to_string(),
        };
        if number == 1 {
            let head: Head = serde_json::from_slice(line).map_err(fault)?;
            if head.kvferry_sweep != FORM || head.scenario != self.scenario {
                let (found, wanted) = (head.scenario, self.scenario.clone());
                return Err(StateError::Other { file: self.path.clone(), found, wanted });
            }
            return Ok(());
        }
        let line: Line = serde_json::from_slice(line).map_err(fault)?;
        if let Some(outcome) = line.outcome {
            self.outcomes.insert(line.key.clone(), outcome);
        }
        if let Some(events) = line.events {
            self.events.insert(line.key, events);
        }
        Ok(())
    }

    fn append(&mut self, line: &impl Serialize) -> Result<(), StateError> {
        let mut text = serde_json::to_vec(line).map_err(|e| self.io(e.into()))?;
        text.push(b'\n');
        self.file.write_all(&text).and_then(|()| self.file.flush()).map_err(|e| self.io(e))
    }

    fn key(&self, sweep: &Sweep, candidate: &Candidate) -> String {
        let mut hash = Hash(Sha256::new());
        let _ = write!(hash, "{}\n{}", self.scenario, sweep.key(candidate));
        let mut out = hash.hex();
        out.truncate(32);
        out
    }

    /// What came of a candidate before.
    pub(super) fn outcome(&mut self, sweep: &Sweep, candidate: &Candidate) -> Option<Outcome> {
        self.outcomes.remove(&self.key(sweep, candidate))
    }

    /// What discrete events said of it.
    pub(super) fn events(&mut self, sweep: &Sweep, candidate: &Candidate) -> Option<Result<Figures, String>> {
        self.events.remove(&self.key(sweep, candidate))
    }

    /// Notes what came of a candidate.
    pub(super) fn done(&mut self, sweep: &Sweep, candidate: &Candidate, outcome: &Outcome) -> Result<(), StateError> {
        let (key, name) = (self.key(sweep, candidate), candidate.to_string());
        self.append(&Line { key, name, outcome: Some(outcome.clone()), events: None })
    }

    /// Notes what discrete events say of it.
    pub(super) fn confirmed(
        &mut self,
        sweep: &Sweep,
        candidate: &Candidate,
        events: &Result<Figures, String>,
    ) -> Result<(), StateError> {
        let (key, name) = (self.key(sweep, candidate), candidate.to_string());
        self.append(&Line { key, name, outcome: None, events: Some(events.clone()) })
    }
}
