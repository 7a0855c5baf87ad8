//! TOML turned into values with line numbers.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{Faults, InputErrors, InputFault};
use crate::tree::{Lines, MAX_DEPTH, MAX_FILE, MAX_NODES, Node, Table, Value};

/// The longest line that is read, in bytes: it bounds how deep dotted keys can nest.
const MAX_LINE: usize = 1024;

/// Reads a text whole.
pub(crate) fn parse(file: &str, text: &str) -> Result<Node, InputErrors> {
    let mut faults = Faults::new(file);
    if text.len() as u64 > MAX_FILE {
        let got = text.len() as u64;
        faults.push(1, "", InputFault::TooLarge { what: "the file's size in bytes", got, limit: MAX_FILE });
        return faults.finish(None);
    }
    for (line, content) in (1u32..).zip(text.lines()) {
        if content.len() > MAX_LINE {
            let (got, limit) = (content.len() as u64, MAX_LINE as u64);
            faults.push(line, "", InputFault::TooLarge { what: "the line's length in bytes", got, limit });
            return faults.finish(None);
        }
    }
    let lines = Lines::new(text);
    match DeTable::parse(text) {
        Ok(table) => {
            let mut reader = Reader { lines, nodes: 0, faults };
            let table = reader.table(table.get_ref(), 0);
            reader.faults.finish(table.map(|t| Node { line: 1, value: Value::Table(t) }))
        }
        Err(error) => {
            let line = error.span().map_or(1, |s| lines.at(s.start));
            faults.push(line, "", InputFault::Syntax(format!("not TOML: {}", error.message())));
            faults.finish(None)
        }
    }
}

struct Reader {
    lines: Lines,
    nodes: usize,
    faults: Faults,
}

impl Reader {
    fn table(&mut self, table: &DeTable<'_>, depth: u32) -> Option<Table> {
        let mut out = Table::default();
        for (key, value) in table {
            let line = self.lines.at(key.span().start);
            let node = self.node(value, line, depth)?;
            out.0.insert(key.get_ref().to_string(), (line, node));
        }
        Some(out)
    }

    fn node(&mut self, value: &Spanned<DeValue<'_>>, key_line: u32, depth: u32) -> Option<Node> {
        self.nodes += 1;
        let limits = [
            ("the number of values", self.nodes as u64, MAX_NODES as u64),
            ("the nesting", u64::from(depth) + 1, u64::from(MAX_DEPTH)),
        ];
        for (what, got, limit) in limits {
            if got > limit {
                self.faults.push(key_line, "", InputFault::TooLarge { what, got, limit });
                return None;
            }
        }
        // A table that dotted keys or headers make has no place of its own; its key has.
        let line = self.lines.at(value.span().start).max(key_line);
        let value = match value.get_ref() {
            DeValue::String(s) => Value::Text(s.to_string()),
            DeValue::Boolean(b) => Value::Bool(*b),
            DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
                Ok(n) => Value::Integer(n),
                Err(_) => Value::Number(i.as_str().into()),
            },
            DeValue::Float(f) => Value::Number(f.as_str().into()),
            DeValue::Datetime(d) => Value::Text(d.to_string()),
            DeValue::Array(list) => {
                let nodes: Option<Vec<_>> = list.iter().map(|v| self.node(v, line, depth + 1)).collect();
                Value::List(nodes?)
            }
            DeValue::Table(table) => Value::Table(self.table(table, depth + 1)?),
        };
        Some(Node { line, value })
    }
}
