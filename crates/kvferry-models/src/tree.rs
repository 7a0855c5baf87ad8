//! Values with line numbers, common to JSON and TOML, and a reader that names key and line in every fault.

use std::collections::BTreeMap;

use crate::error::{Faults, InputFault};

/// The deepest nesting that is read.
pub(crate) const MAX_DEPTH: u32 = 32;
/// The most values that are read from one file.
pub(crate) const MAX_NODES: usize = 200_000;
/// The largest file that is read, in bytes.
pub(crate) const MAX_FILE: u64 = 1 << 20;

/// A value and the line where it starts.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Node {
    pub(crate) line: u32,
    pub(crate) value: Value,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Integer(i64),
    /// A number that isn't a 64-bit integer, as written.
    Number(String),
    Text(String),
    List(Vec<Node>),
    Table(Table),
}

impl Value {
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Null => "null".into(),
            Self::Bool(b) => b.to_string(),
            Self::Integer(i) => format!("the number {i}"),
            Self::Number(n) => format!("the number {}", clip(n)),
            Self::Text(t) => format!("the text {:?}", clip(t)),
            Self::List(_) => "a list".into(),
            Self::Table(_) => "a table".into(),
        }
    }
}

/// A text short enough for a message.
pub(crate) fn clip(text: &str) -> String {
    if text.chars().count() <= 60 {
        return text.into();
    }
    let mut out: String = text.chars().take(57).collect();
    out.push_str("...");
    out
}

/// The entries of a table by key; each with the key's line.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Table(pub(crate) BTreeMap<String, (u32, Node)>);

/// A table that is being read: its path and line go into every fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Section<'a> {
    table: &'a Table,
    path: &'a str,
    line: u32,
}

impl<'a> Section<'a> {
    /// `path` is empty for the file itself, else it ends with a dot.
    pub(crate) fn new(table: &'a Table, path: &'a str, line: u32) -> Self {
        Self { table, path, line }
    }

    /// The key with the tables it is in.
    pub(crate) fn key(&self, key: &str) -> String {
        format!("{}{}", self.path, clip(key))
    }

    /// The line of a key, or of the table where it is missing.
    pub(crate) fn line_of(&self, key: &str) -> u32 {
        self.table.0.get(key).map_or(self.line, |e| e.0)
    }

    /// The value of a key; `None` where it is missing or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Node> {
        self.table.0.get(key).map(|e| &e.1).filter(|n| n.value != Value::Null)
    }

    pub(crate) fn push(&self, key: &str, fault: InputFault, faults: &mut Faults) {
        faults.push(self.line_of(key), self.key(key), fault);
    }

    fn wrong(&self, key: &str, expected: &'static str, node: &Node, faults: &mut Faults) {
        self.push(key, InputFault::WrongType { expected, got: node.value.describe() }, faults);
    }

    /// Refuses keys that aren't in `known`.
    pub(crate) fn only(&self, known: &[&str], faults: &mut Faults) {
        for (key, (line, _)) in &self.table.0 {
            if !known.contains(&key.as_str()) {
                faults.push(*line, self.key(key), InputFault::UnknownKey(known.join(", ")));
            }
        }
    }

    /// An integer from 1 to `max`.
    pub(crate) fn count(&self, key: &str, max: u32, faults: &mut Faults) -> Option<u32> {
        self.number(key, 1, max, faults)
    }

    /// An integer in a range.
    pub(crate) fn number(&self, key: &str, min: u32, max: u32, faults: &mut Faults) -> Option<u32> {
        let node = self.get(key)?;
        let fault = match &node.value {
            Value::Integer(i) => match u32::try_from(*i) {
                Ok(n) if (min..=max).contains(&n) => return Some(n),
                _ => InputFault::OutOfRange { got: i.to_string(), min: min.into(), max: max.into() },
            },
            Value::Number(n) if n.trim_start_matches('-').bytes().all(|b| b.is_ascii_digit()) => {
                InputFault::OutOfRange { got: clip(n), min: min.into(), max: max.into() }
            }
            other => InputFault::WrongType { expected: "a whole number", got: other.describe() },
        };
        self.push(key, fault, faults);
        None
    }

    /// As [`Section::count`], but a missing key is a fault that says what it is for.
    pub(crate) fn needed(&self, key: &str, max: u32, hint: &'static str, faults: &mut Faults) -> Option<u32> {
        if self.get(key).is_none() {
            self.push(key, InputFault::Missing(hint), faults);
            return None;
        }
        self.count(key, max, faults)
    }

    pub(crate) fn text(&self, key: &str, faults: &mut Faults) -> Option<&'a str> {
        let node = self.get(key)?;
        let Value::Text(text) = &node.value else {
            self.wrong(key, "a text", node, faults);
            return None;
        };
        Some(text)
    }

    pub(crate) fn flag(&self, key: &str, faults: &mut Faults) -> Option<bool> {
        let node = self.get(key)?;
        let Value::Bool(flag) = node.value else {
            self.wrong(key, "true or false", node, faults);
            return None;
        };
        Some(flag)
    }

    pub(crate) fn list(&self, key: &str, faults: &mut Faults) -> Option<&'a [Node]> {
        let node = self.get(key)?;
        let Value::List(list) = &node.value else {
            self.wrong(key, "a list", node, faults);
            return None;
        };
        Some(list)
    }

    /// A list of whole numbers; entries that aren't are faults.
    pub(crate) fn numbers(&self, key: &str, faults: &mut Faults) -> Option<Vec<u32>> {
        let mut out = Vec::new();
        for node in self.list(key, faults)? {
            match node.value {
                Value::Integer(i) if u32::try_from(i).is_ok() => out.push(u32::try_from(i).unwrap_or(0)),
                ref other => {
                    let fault = InputFault::WrongType { expected: "a list of whole numbers", got: other.describe() };
                    faults.push(node.line, self.key(key), fault);
                    return None;
                }
            }
        }
        Some(out)
    }

    /// A word that `FromStr`-like `parse` knows; `known` says which there are.
    pub(crate) fn word<T>(
        &self,
        key: &str,
        known: &str,
        parse: impl Fn(&str) -> Option<T>,
        faults: &mut Faults,
    ) -> Option<T> {
        let word = self.text(key, faults)?;
        let parsed = parse(word);
        if parsed.is_none() {
            self.push(key, InputFault::UnknownValue { got: clip(word), known: known.into() }, faults);
        }
        parsed
    }
}

/// The line, from 1, of a byte of a text.
pub(crate) struct Lines(Vec<usize>);

impl Lines {
    pub(crate) fn new(text: &str) -> Self {
        Self(text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i).collect())
    }

    pub(crate) fn at(&self, byte: usize) -> u32 {
        u32::try_from(self.0.partition_point(|&end| end < byte)).map_or(u32::MAX, |n| n.saturating_add(1))
    }
}
