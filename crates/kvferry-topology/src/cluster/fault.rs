//! What can be wrong with a cluster's description or with a calibration, always with the key.

use std::fmt;

/// One fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClusterError {
    /// The file's name; that of the preset where the fault is in its use.
    pub file: String,
    /// The key with its tables, as in `machine[1].nic.gbit_s`; empty for the file as a whole.
    pub key: String,
    /// What is wrong, and what to change.
    pub fault: ClusterFault,
}

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.file, &self.key] {
            if !part.is_empty() {
                write!(f, "{part}: ")?;
            }
        }
        write!(f, "{}", self.fault)
    }
}
impl std::error::Error for ClusterError {}

/// What is wrong at one place.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterFault {
    /// The text has another form than it must have: no TOML, no JSON, a key that isn't known, a value of another type.
    #[error("{0}")]
    Form(String),
    /// Beyond a limit.
    #[error("{what} is {got}, more than the {limit} that are allowed")]
    TooMany {
        /// What, with its unit.
        what: &'static str,
        /// How many there are.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// A key that must be there isn't.
    #[error("is missing; {0}")]
    Missing(&'static str),
    /// A value that can't be, by itself.
    #[error("is {got}; {change}")]
    Invalid {
        /// The value.
        got: String,
        /// What can be.
        change: String,
    },
    /// Values that can't be together.
    #[error("{0}")]
    Contradiction(String),
}

/// Every fault of a description; at least one, at most 64.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClusterErrors(pub Vec<ClusterError>);

/// The most faults that are listed.
const MAX_FAULTS: usize = 64;

impl fmt::Display for ClusterErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            let newline = if i > 0 { "\n" } else { "" };
            write!(f, "{newline}{error}")?;
        }
        Ok(())
    }
}
impl std::error::Error for ClusterErrors {}

/// Faults as they are found.
#[derive(Debug)]
pub(super) struct Faults {
    file: String,
    found: Vec<ClusterError>,
}

impl Faults {
    pub(super) fn of(file: &str) -> Self {
        Self { file: file.to_owned(), found: Vec::new() }
    }

    pub(super) fn add(&mut self, key: impl Into<String>, fault: ClusterFault) {
        if self.found.len() < MAX_FAULTS {
            self.found.push(ClusterError { file: self.file.clone(), key: key.into(), fault });
        }
    }

    /// What was read, unless there are faults. Nothing read without a fault doesn't happen; it is one of the whole file.
    pub(super) fn or<T>(mut self, read: Option<T>) -> Result<T, ClusterErrors> {
        match read {
            Some(read) if self.found.is_empty() => Ok(read),
            _ => {
                if self.found.is_empty() {
                    self.add("", ClusterFault::Form("cannot be read".into()));
                }
                Err(ClusterErrors(self.found))
            }
        }
    }
}
