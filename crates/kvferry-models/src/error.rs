//! What can be wrong with an input file, always with the file, the line and the key.

use std::fmt;

/// One fault of an input: where it stands and what it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InputError {
    /// The file's name, or what stands in for one (`preset llama-3.1-8b`, `shape`).
    pub file: String,
    /// The line, from 1; `None` where the input has no lines.
    pub line: Option<u32>,
    /// The key with the tables it is in, e.g. `text_config.head_dim`; empty for the file as a whole.
    pub key: String,
    /// What is wrong.
    pub fault: InputFault,
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}", self.fault)
    }
}
impl std::error::Error for InputError {}

/// What is wrong at one place of an input.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputFault {
    /// The text is not JSON or TOML.
    #[error("{0}")]
    Syntax(String),
    /// The file can't be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// A file, line, nesting or list beyond its limit.
    #[error("{what} is {got}, more than the {limit} that are read")]
    TooLarge {
        /// What is too large, with its unit.
        what: &'static str,
        /// Its size.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// A key that must be there isn't.
    #[error("is missing; {0}")]
    Missing(&'static str),
    /// A key that isn't known here.
    #[error("is not a key here; the keys are {0}")]
    UnknownKey(String),
    /// A value of another type.
    #[error("must be {expected}, not {got}")]
    WrongType {
        /// What it must be.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// A number outside its range.
    #[error("is {got}; it must be {min} to {max}")]
    OutOfRange {
        /// The number as written.
        got: String,
        /// The smallest allowed.
        min: u64,
        /// The largest allowed.
        max: u64,
    },
    /// A word that isn't known here.
    #[error("{got:?} is not known here; use {known}")]
    UnknownValue {
        /// The word.
        got: String,
        /// The words that are.
        known: String,
    },
    /// Two values that can't both be right.
    #[error("{0}")]
    Contradiction(String),
}

/// Every fault of an input, in the order they were found; at least one, at most [`MAX_FAULTS`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InputErrors(pub Vec<InputError>);

/// The most faults that are listed of one input.
pub const MAX_FAULTS: usize = 64;

impl fmt::Display for InputErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, e) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{e}")?;
        }
        Ok(())
    }
}
impl std::error::Error for InputErrors {}

impl From<InputError> for InputErrors {
    fn from(error: InputError) -> Self {
        Self(vec![error])
    }
}

/// Collects the faults of one input while it is read.
#[derive(Debug)]
pub(crate) struct Faults {
    file: String,
    list: Vec<InputError>,
}

impl Faults {
    pub(crate) fn new(file: &str) -> Self {
        Self { file: file.into(), list: Vec::new() }
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    pub(crate) fn push(&mut self, line: u32, key: impl Into<String>, fault: InputFault) {
        if self.list.len() < MAX_FAULTS {
            let error = InputError { file: self.file.clone(), line: Some(line), key: key.into(), fault };
            self.list.push(error);
        }
    }

    pub(crate) fn extend(&mut self, errors: InputErrors) {
        let room = MAX_FAULTS.saturating_sub(self.list.len());
        self.list.extend(errors.0.into_iter().take(room));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// `value` if nothing was wrong, else every fault.
    pub(crate) fn finish<T>(self, value: Option<T>) -> Result<T, InputErrors> {
        match value {
            Some(value) if self.list.is_empty() => Ok(value),
            _ if self.list.is_empty() => Err(InputErrors(vec![InputError {
                file: self.file,
                line: None,
                key: String::new(),
                fault: InputFault::Syntax("cannot be understood".into()),
            }])),
            _ => Err(InputErrors(self.list)),
        }
    }
}
