//! What can be wrong with a load: a value of the scenario, or a line of a trace. All faults at once, the first of them in full.

use std::fmt;

/// The faults that are listed of one input; the others are counted.
pub const LISTED: usize = 20;

/// Every fault of a table or a trace, in the order they were found; at least one, [`LISTED`] of them in full.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadErrors {
    /// Those that are listed.
    pub faults: Vec<LoadFault>,
    /// How many more there are.
    pub more: u64,
}

impl LoadErrors {
    /// Names the file where a fault has none.
    #[must_use]
    pub fn in_file(mut self, file: &str) -> Self {
        for fault in self.faults.iter_mut().filter(|f| f.file.is_empty()) {
            fault.file = file.into();
        }
        self
    }

    /// One fault of a file as a whole.
    #[must_use]
    pub fn of_file(file: &str, fault: Fault) -> Self {
        Self { faults: vec![LoadFault { file: file.into(), line: None, key: String::new(), fault }], more: 0 }
    }
}

impl fmt::Display for LoadErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.faults.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{fault}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "\nand {more} more faults"),
        }
    }
}
impl std::error::Error for LoadErrors {}

/// One fault: where it stands and what it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadFault {
    /// The file; empty where only the caller knows it ([`LoadErrors::in_file`]).
    pub file: String,
    /// A trace's line, from 1.
    pub line: Option<u64>,
    /// The key with its tables, as `load.per_s`, or a trace's column; empty for the line or file as a whole.
    pub key: String,
    /// What is wrong.
    pub fault: Fault,
}

impl fmt::Display for LoadFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.file.is_empty() {
            f.write_str(&self.file)?;
            if let Some(line) = self.line {
                write!(f, ":{line}")?;
            }
            f.write_str(": ")?;
        } else if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        write!(f, "{}", self.fault)
    }
}
impl std::error::Error for LoadFault {}

/// What is wrong at one place.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Something that must be there isn't.
    #[error("is missing; {0}")]
    Missing(String),
    /// A number outside its range.
    #[error("is {got}; it must be {low} to {high}")]
    Range {
        /// The number.
        got: String,
        /// The smallest allowed, or what it must be more than.
        low: String,
        /// The largest allowed.
        high: String,
    },
    /// A word that isn't known here.
    #[error("{got:?} is not known here; use {known}")]
    Word {
        /// The word.
        got: String,
        /// Those that are.
        known: &'static str,
    },
    /// Not what can be read as such a value.
    #[error("{got:?} is not {expected}")]
    Value {
        /// What is there.
        got: String,
        /// What must be.
        expected: &'static str,
    },
    /// Two values that can't both be right.
    #[error("{0}")]
    Conflict(String),
    /// More than is kept in memory.
    #[error("there are more than {limit} {what}; {change}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// What to change.
        change: &'static str,
    },
    /// A file that can't be opened or read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// A compressed file.
    #[error("is compressed (gzip), and only plain text is read; unpack it, as with `gunzip -k`")]
    Compressed,
    /// Bytes that are not text.
    #[error("is not UTF-8 text")]
    NotText,
    /// A line that isn't the JSON of a request.
    #[error("is not a request as JSON: {0}")]
    Json(String),
    /// A line with another number of fields than the header.
    #[error("has {got} fields, but the header has {want}")]
    Fields {
        /// How many there are.
        got: usize,
        /// How many the header has.
        want: usize,
    },
}

/// A text short enough for a message.
pub(crate) fn clip(text: &str) -> String {
    const MOST: usize = 60;
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}...", text.get(..at).unwrap_or_default()),
        None => text.into(),
    }
}

/// Collects the faults of one input.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    file: String,
    list: Vec<LoadFault>,
    more: u64,
}

impl Faults {
    pub(crate) fn new(file: &str) -> Self {
        Self { file: file.into(), ..Self::default() }
    }

    pub(crate) fn at(&mut self, line: Option<u64>, key: impl Into<String>, fault: Fault) {
        if self.list.len() < LISTED {
            self.list.push(LoadFault { file: self.file.clone(), line, key: key.into(), fault });
        } else {
            self.more = self.more.saturating_add(1);
        }
    }

    pub(crate) fn push(&mut self, key: impl Into<String>, fault: Fault) {
        self.at(None, key, fault);
    }

    pub(crate) fn missing(&mut self, key: impl Into<String>, hint: &str) {
        self.push(key, Fault::Missing(hint.into()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// A number that must be from `low` to `high`.
    pub(crate) fn number(&mut self, key: impl Into<String>, got: f64, low: f64, high: f64) -> Option<f64> {
        if (low..=high).contains(&got) {
            return Some(got);
        }
        self.push(key, Fault::Range { got: got.to_string(), low: low.to_string(), high: high.to_string() });
        None
    }

    /// A whole number that must be from `low` to `high`.
    pub(crate) fn count(&mut self, key: impl Into<String>, got: i64, low: u64, high: u64) -> Option<u64> {
        match u64::try_from(got) {
            Ok(n) if (low..=high).contains(&n) => Some(n),
            _ => {
                self.push(key, Fault::Range { got: got.to_string(), low: low.to_string(), high: high.to_string() });
                None
            }
        }
    }

    /// `value` if nothing was wrong, else every fault.
    pub(crate) fn finish<T>(self, value: Option<T>) -> Result<T, LoadErrors> {
        match value {
            Some(value) if self.list.is_empty() => Ok(value),
            _ if self.list.is_empty() => {
                Err(LoadErrors::of_file(&self.file, Fault::Conflict("cannot be understood".into())))
            }
            _ => Err(LoadErrors { faults: self.list, more: self.more }),
        }
    }
}
