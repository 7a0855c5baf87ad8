//! A TOML text as keys with values and lines, taken one by one: what was not taken is not known.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::fault::{ConfigError, ConfigFault, MAX_FAULTS};
use super::value;

/// The longest text that is read, in bytes.
const MAX_TEXT: usize = 1 << 20;
/// The longest line, in bytes: it bounds how deep dotted keys can nest.
const MAX_LINE: usize = 4096;

/// A value that is no table.
#[derive(Debug)]
enum Value {
    Text(String),
    Integer(Option<u64>, String),
    Bool(bool),
    List(Vec<Value>),
    Other(&'static str, String),
}

impl Value {
    fn of(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text.to_string()),
            DeValue::Boolean(b) => Self::Bool(*b),
            DeValue::Integer(i) => {
                Self::Integer(u64::from_str_radix(i.as_str(), i.radix()).ok(), i.as_str().to_owned())
            }
            DeValue::Float(x) => Self::Other("the number", x.as_str().to_owned()),
            DeValue::Datetime(t) => Self::Other("the time", t.to_string()),
            DeValue::Array(list) => Self::List(list.iter().map(|v| Self::of(v.get_ref())).collect()),
            DeValue::Table(_) => Self::Other("a table", String::new()),
        }
    }

    fn as_text(&self) -> Option<String> {
        if let Self::Text(text) = self { Some(text.clone()) } else { None }
    }

    fn describe(&self) -> String {
        match self {
            Self::Text(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
            Self::Integer(_, text) => format!("the number {text:.40}"),
            Self::Bool(b) => b.to_string(),
            Self::List(list) => format!("a list of {}", list.len()),
            Self::Other(what, text) if text.is_empty() => (*what).to_owned(),
            Self::Other(what, text) => format!("{what} {text:.40}"),
        }
    }
}

/// What is left of a text, and what was found so far.
pub(super) struct Reader {
    file: String,
    values: BTreeMap<String, (u32, Value)>,
    tables: BTreeMap<String, u32>,
    /// Where each key of the text stands, taken or not.
    lines: BTreeMap<String, u32>,
    /// Every key that was asked for.
    known: Vec<String>,
    faults: Vec<ConfigError>,
}

impl Reader {
    pub(super) fn new(file: &str, text: &str) -> Self {
        let mut reader = Self {
            file: file.to_owned(),
            values: BTreeMap::new(),
            tables: BTreeMap::new(),
            lines: BTreeMap::new(),
            known: Vec::new(),
            faults: Vec::new(),
        };
        if let Err((line, fault)) = reader.parse(text) {
            reader.push(line, "", fault);
        }
        reader
    }

    fn parse(&mut self, text: &str) -> Result<(), (Option<u32>, ConfigFault)> {
        if text.len() > MAX_TEXT {
            let fault = ConfigFault::TooLarge { what: "its length in bytes", got: text.len(), limit: MAX_TEXT };
            return Err((None, fault));
        }
        if let Some((line, long)) = (1u32..).zip(text.lines()).find(|(_, l)| l.len() > MAX_LINE) {
            let fault = ConfigFault::TooLarge { what: "the line's length in bytes", got: long.len(), limit: MAX_LINE };
            return Err((Some(line), fault));
        }
        let starts: Vec<usize> = std::iter::once(0)
            .chain(text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1))
            .collect();
        let line = |at: usize| u32::try_from(starts.partition_point(|s| *s <= at)).unwrap_or(u32::MAX);
        match DeTable::parse(text) {
            Ok(table) => {
                self.flatten("", table.get_ref(), &line);
                Ok(())
            }
            Err(error) => Err((error.span().map(|s| line(s.start)), ConfigFault::Syntax(error.message().to_owned()))),
        }
    }

    fn flatten(&mut self, path: &str, table: &DeTable<'_>, line: &impl Fn(usize) -> u32) {
        for (key, value) in table {
            let at = line(key.span().start);
            let path = if path.is_empty() { key.get_ref().to_string() } else { format!("{path}.{}", key.get_ref()) };
            self.lines.insert(path.clone(), at);
            if let DeValue::Table(inner) = value.get_ref() {
                self.flatten(&path, inner, line);
                self.tables.insert(path, at);
            } else {
                self.values.insert(path, (at, Value::of(value.get_ref())));
            }
        }
    }

    fn push(&mut self, line: Option<u32>, key: &str, fault: ConfigFault) {
        self.faults.push(ConfigError { file: self.file.clone(), line, key: key.to_owned(), fault });
    }

    /// A fault of a key; its line is known where the text has the key.
    pub(super) fn fault(&mut self, key: &str, fault: ConfigFault) {
        self.push(self.lines.get(key).copied(), key, fault);
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.known.push(key.to_owned());
        if self.tables.remove(key).is_some() {
            self.values.retain(|k, _| !is_inside(k, key));
            return Some(Value::Other("a table", String::new()));
        }
        self.values.remove(key).map(|(_, value)| value)
    }

    fn wrong(&mut self, key: &str, expected: &'static str, got: &Value) {
        self.fault(key, ConfigFault::WrongType { expected, got: got.describe() });
    }

    /// A text, made into a value by `read`; `None` there for what it can't be.
    fn word<T>(&mut self, key: &str, expected: &'static str, read: impl Fn(&str) -> Option<T>) -> Option<T> {
        let value = self.take(key)?;
        let read = if let Value::Text(text) = &value { read(text) } else { None };
        if read.is_none() {
            self.wrong(key, expected, &value);
        }
        read
    }

    /// Whether the text has this key, or a table of this name.
    pub(super) fn has(&self, key: &str) -> bool {
        self.lines.contains_key(key)
    }

    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        self.word(key, "a text", |text| Some(text.to_owned()))
    }

    pub(super) fn duration(&mut self, key: &str, into: &mut Duration) {
        put(into, self.word(key, value::DURATION, value::duration));
    }

    pub(super) fn duration_or_never(&mut self, key: &str, into: &mut Option<Duration>) {
        let read = |text: &str| if text == "never" { Some(None) } else { value::duration(text).map(Some) };
        put(into, self.word(key, value::DURATION_OR_NEVER, read));
    }

    pub(super) fn size(&mut self, key: &str, into: &mut u64) {
        put(into, self.word(key, value::SIZE, value::size));
    }

    pub(super) fn rate(&mut self, key: &str, into: &mut Option<u64>) {
        put(into, self.word(key, value::RATE, value::rate).map(Some));
    }

    pub(super) fn path(&mut self, key: &str) -> Option<PathBuf> {
        self.word(key, "a path", |text| (!text.is_empty()).then(|| PathBuf::from(text)))
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(&mut self, key: &str, expected: &'static str, words: &[(&str, T)], into: &mut T) {
        put(into, self.word(key, expected, |text| words.iter().find(|(word, _)| *word == text).map(|(_, t)| *t)));
    }

    /// A text with a form of its own, and an error that says which.
    pub(super) fn parsed<T>(&mut self, key: &str) -> Option<T>
    where
        T: FromStr,
        T::Err: std::fmt::Display,
    {
        let text = self.text(key)?;
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                let got = format!("{:?}", text.chars().take(80).collect::<String>());
                self.fault(key, ConfigFault::Invalid { got, why: T::Err::to_string(&error) });
                None
            }
        }
    }

    pub(super) fn flag(&mut self, key: &str, into: &mut bool) {
        match self.take(key) {
            Some(Value::Bool(b)) => *into = b,
            Some(other) => self.wrong(key, "true or false", &other),
            None => {}
        }
    }

    /// A whole number of at least `least`.
    pub(super) fn count<T: TryFrom<u64>>(&mut self, key: &str, into: &mut T, least: u64) {
        match self.take(key) {
            Some(Value::Integer(n, text)) => match n.filter(|n| *n >= least).and_then(|n| T::try_from(n).ok()) {
                Some(n) => *into = n,
                None => {
                    let why = format!("it must be {least} at least, and not beyond all reason");
                    self.fault(key, ConfigFault::Invalid { got: text, why });
                }
            },
            Some(other) => self.wrong(key, "a whole number", &other),
            None => {}
        }
    }

    pub(super) fn texts(&mut self, key: &str) -> Option<Vec<String>> {
        const EXPECTED: &str = "a list of texts, as in [\"a\", \"b\"]";
        let value = self.take(key)?;
        let Value::List(list) = value else {
            self.wrong(key, EXPECTED, &value);
            return None;
        };
        let texts: Option<Vec<String>> = list.iter().map(Value::as_text).collect();
        if texts.is_none() {
            self.wrong(key, EXPECTED, &Value::List(list));
        }
        texts
    }

    /// A table of names of the file's own, each with a path.
    pub(super) fn paths(&mut self, key: &str) -> BTreeMap<String, PathBuf> {
        self.entries(key, "a path", |value| match value {
            Value::Text(text) if !text.is_empty() => Some(PathBuf::from(text)),
            _ => None,
        })
    }

    /// A table of names of the file's own, each with one of a few words or a list of texts.
    pub(super) fn words_or_texts<T: Copy>(
        &mut self,
        key: &str,
        expected: &'static str,
        words: &[(&str, T)],
    ) -> BTreeMap<String, Result<T, Vec<String>>> {
        self.entries(key, expected, |value| match value {
            Value::Text(text) => words.iter().find(|(word, _)| word == text).map(|(_, t)| Ok(*t)),
            Value::List(list) => list.iter().map(Value::as_text).collect::<Option<_>>().map(Err),
            _ => None,
        })
    }

    fn entries<T>(
        &mut self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> BTreeMap<String, T> {
        self.known.push(format!("{key}.<name>"));
        if let Some((_, value)) = self.values.remove(key) {
            self.wrong(key, "a table of names", &value);
        }
        self.tables.remove(key);
        let names: Vec<String> = self.values.keys().filter(|path| is_inside(path, key)).cloned().collect();
        let mut entries = BTreeMap::new();
        for path in names {
            let Some((_, value)) = self.values.remove(&path) else { continue };
            match read(&value) {
                Some(entry) => drop(entries.insert(path[key.len() + 1..].to_owned(), entry)),
                None => self.wrong(&path, expected, &value),
            }
        }
        entries
    }

    /// Whether nothing was wrong so far.
    pub(super) fn is_sound(&self) -> bool {
        self.faults.is_empty()
    }

    /// Every fault, and every key that was asked for. What nobody has asked for is a fault.
    pub(super) fn finish(mut self) -> (Vec<ConfigError>, Vec<String>) {
        let known = std::mem::take(&mut self.known);
        let above = |path: &str| known.iter().any(|k| is_inside(k, path));
        let mut unknown: Vec<(u32, String)> = Vec::new();
        for (key, (line, value)) in std::mem::take(&mut self.values) {
            if above(&key) {
                let fault = ConfigFault::WrongType { expected: "a table", got: value.describe() };
                self.push(Some(line), &key, fault);
            } else {
                unknown.push((line, key));
            }
        }
        // An unknown table that isn't empty is told by its keys.
        for (table, line) in std::mem::take(&mut self.tables) {
            let below = format!("{table}.");
            let holds = self.lines.range(below.clone()..).next().is_some_and(|(key, _)| key.starts_with(&below));
            if !above(&table) && !holds {
                unknown.push((line, table));
            }
        }
        // It takes time to find the nearest, and a file of another program has many keys: only for those that can be listed.
        unknown.sort_by_key(|(line, _)| *line);
        unknown.truncate(MAX_FAULTS);
        for (line, key) in unknown {
            self.push(Some(line), &key, ConfigFault::UnknownKey { nearest: nearest(&key, &known) });
        }
        (self.faults, known)
    }
}

/// Whether a key is in this table, or in one in it.
fn is_inside(key: &str, table: &str) -> bool {
    key.strip_prefix(table).is_some_and(|rest| rest.starts_with('.'))
}

fn put<T>(into: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *into = value;
    }
}

/// The known key that is most like this one: by its own name first, then by its tables'.
fn nearest(key: &str, known: &[String]) -> String {
    let name = |path: &str| path.rsplit('.').next().unwrap_or_default().chars().take(LIKE).collect::<Vec<char>>();
    let whole = |path: &str| path.chars().take(LIKE).collect::<Vec<char>>();
    let (key, own) = (whole(key), name(key));
    let by_name = |letters: usize| 4 * letters.min(64);
    let mut best: Option<(usize, &String)> = None;
    for candidate in known {
        let (whole, name) = (whole(candidate), name(candidate));
        // Words of other lengths are at least so far from each other: most need no closer look.
        let beyond = |distance: usize| best.is_some_and(|(least, _)| distance >= least);
        let apart = whole.len().abs_diff(key.len());
        if beyond(by_name(name.len().abs_diff(own.len())) + apart) {
            continue;
        }
        let names = by_name(edits(&own, &name));
        if beyond(names + apart) {
            continue;
        }
        let distance = names + edits(&key, &whole);
        if !beyond(distance) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, known)| known.clone()).unwrap_or_default()
}

/// So many letters of a key are compared.
const LIKE: usize = 200;

/// Letters to insert, remove or replace to make one of the other.
fn edits(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, n) in [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("ttl", "tll", 1)] {
            let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
            assert_eq!((edits(&a, &b), edits(&b, &a)), (n, n), "{a:?} {b:?}");
        }
    }

    #[test]
    fn the_nearest_key_is_found_by_name_then_by_table() {
        let known: Vec<String> =
            ["lease.ttl", "lease.beat", "retry.first", "worker.staging.pool"].map(str::to_owned).into();
        for (key, is) in [
            ("lease.tll", "lease.ttl"),
            ("ttl", "lease.ttl"),
            ("leases.beat", "lease.beat"),
            ("staging.pool", "worker.staging.pool"),
        ] {
            assert_eq!(nearest(key, &known), is, "{key}");
        }
    }
}
