//! What can be wrong with a configuration, always with the key, and with the line where it came from a file.

use std::fmt;

/// One fault of a configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// The file's name; empty for a configuration that was made in code.
    pub file: String,
    /// The line, from 1; `None` where there is none: the key is missing, or nothing was read from a file.
    pub line: Option<u32>,
    /// The key with its tables, as in `lease.ttl`; empty for the file as a whole.
    pub key: String,
    /// What is wrong.
    pub fault: ConfigFault,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let colon = |f: &mut fmt::Formatter<'_>| f.write_str(": ");
        if !self.file.is_empty() {
            f.write_str(&self.file)?;
            if let Some(line) = self.line {
                write!(f, ":{line}")?;
            }
            colon(f)?;
        }
        if !self.key.is_empty() {
            f.write_str(&self.key)?;
            colon(f)?;
        }
        write!(f, "{}", self.fault)
    }
}
impl std::error::Error for ConfigError {}

/// What is wrong at one place.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigFault {
    /// The text is no TOML.
    #[error("not TOML: {0}")]
    Syntax(String),
    /// The file can't be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// Beyond a limit of what is read.
    #[error("{what} is {got}, more than the {limit} that are read")]
    TooLarge {
        /// What, with its unit.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// A key that must be there isn't.
    #[error("is missing; {0}")]
    Missing(&'static str),
    /// A key that isn't known.
    #[error("is no known key; the nearest one is {nearest}")]
    UnknownKey {
        /// The known key that is most like it, with its tables.
        nearest: String,
    },
    /// A value of another type or form.
    #[error("must be {expected}, not {got}")]
    WrongType {
        /// What it must be, with an example.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// A value that can't be, by itself.
    #[error("is {got}; {why}")]
    Invalid {
        /// The value.
        got: String,
        /// Why it can't be, and what can.
        why: String,
    },
    /// Values that can't be together.
    #[error("{0}")]
    Contradiction(String),
}

/// Every fault of a configuration, by line; at least one, at most 64.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigErrors(pub Vec<ConfigError>);

/// The most faults that are listed.
pub(super) const MAX_FAULTS: usize = 64;

impl ConfigErrors {
    /// `Ok` if there is none.
    pub(super) fn of(mut faults: Vec<ConfigError>) -> Result<(), Self> {
        if faults.is_empty() {
            return Ok(());
        }
        faults.sort_by_key(|f| f.line);
        faults.truncate(MAX_FAULTS);
        Err(Self(faults))
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            let newline = if i > 0 { "\n" } else { "" };
            write!(f, "{newline}{error}")?;
        }
        Ok(())
    }
}
impl std::error::Error for ConfigErrors {}
