//! A strict JSON reader that keeps line numbers.
//!
//! It takes what Python's `json` writes, so also the words `NaN`, `Infinity` and `-Infinity`. A key that stands twice
//! in one table is a fault. Depth and number of values are limited, so memory stays proportional to the file.

use crate::error::{Faults, InputErrors, InputFault};
use crate::tree::{MAX_DEPTH, MAX_FILE, MAX_NODES, Node, Table, Value, clip};

/// Reads a text whole.
pub(crate) fn parse(file: &str, text: &str) -> Result<Node, InputErrors> {
    let mut faults = Faults::new(file);
    if text.len() as u64 > MAX_FILE {
        let got = text.len() as u64;
        faults.push(1, "", InputFault::TooLarge { what: "the file's size in bytes", got, limit: MAX_FILE });
        return faults.finish(None);
    }
    let mut parser = Parser { text, at: 0, line: 1, nodes: 0 };
    let parsed = parser.value(0).and_then(|node| {
        parser.space();
        if parser.at < text.len() { Err(parser.expected("the end of the file")) } else { Ok(node) }
    });
    match parsed {
        Ok(node) => Ok(node),
        Err(fault) => {
            faults.push(parser.line, "", fault);
            faults.finish(None)
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    nodes: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b @ (b' ' | b'\t' | b'\r' | b'\n')) = self.peek() {
            self.line += u32::from(b == b'\n');
            self.at += 1;
        }
    }

    fn expected(&self, what: &str) -> InputFault {
        let got = match self.text.get(self.at..).and_then(|rest| rest.chars().next()) {
            Some(c) => format!("{c:?}"),
            None => "the end of the file".into(),
        };
        InputFault::Syntax(format!("not JSON: expected {what}, found {got}"))
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn value(&mut self, depth: u32) -> Result<Node, InputFault> {
        self.space();
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            let limit = MAX_NODES as u64;
            return Err(InputFault::TooLarge { what: "the number of values", got: self.nodes as u64, limit });
        }
        if depth >= MAX_DEPTH {
            let (got, limit) = (u64::from(depth) + 1, u64::from(MAX_DEPTH));
            return Err(InputFault::TooLarge { what: "the nesting", got, limit });
        }
        let line = self.line;
        let value = match self.peek() {
            Some(b'{') => self.table(depth)?,
            Some(b'[') => self.list(depth)?,
            Some(b'"') => Value::Text(self.string()?),
            Some(b'-' | b'0'..=b'9') => self.number()?,
            _ => self.word()?,
        };
        Ok(Node { line, value })
    }

    fn table(&mut self, depth: u32) -> Result<Value, InputFault> {
        self.at += 1;
        let mut table = Table::default();
        self.space();
        if self.eat(b'}') {
            return Ok(Value::Table(table));
        }
        loop {
            self.space();
            let line = self.line;
            if self.peek() != Some(b'"') {
                return Err(self.expected("a key in quotes"));
            }
            let key = self.string()?;
            self.space();
            if !self.eat(b':') {
                return Err(self.expected("':'"));
            }
            let node = self.value(depth + 1)?;
            if let Some((first, _)) = table.0.get(&key) {
                let (key, first) = (clip(&key), *first);
                return Err(InputFault::Contradiction(format!("key {key:?} stands twice, first on line {first}")));
            }
            table.0.insert(key, (line, node));
            self.space();
            if self.eat(b'}') {
                return Ok(Value::Table(table));
            }
            if !self.eat(b',') {
                return Err(self.expected("',' or '}'"));
            }
        }
    }

    fn list(&mut self, depth: u32) -> Result<Value, InputFault> {
        self.at += 1;
        let mut list = Vec::new();
        self.space();
        if self.eat(b']') {
            return Ok(Value::List(list));
        }
        loop {
            list.push(self.value(depth + 1)?);
            self.space();
            if self.eat(b']') {
                return Ok(Value::List(list));
            }
            if !self.eat(b',') {
                return Err(self.expected("',' or ']'"));
            }
        }
    }

    fn word(&mut self) -> Result<Value, InputFault> {
        let words = [
            ("null", Value::Null),
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            ("NaN", Value::Number("NaN".into())),
            ("Infinity", Value::Number("Infinity".into())),
        ];
        let rest = self.text.get(self.at..).unwrap_or_default();
        for (word, value) in words {
            if rest.starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.expected("a value"))
    }

    fn number(&mut self) -> Result<Value, InputFault> {
        let start = self.at;
        self.eat(b'-');
        if self.text.get(self.at..).is_some_and(|r| r.starts_with("Infinity")) {
            self.at += "Infinity".len();
            return Ok(Value::Number("-Infinity".into()));
        }
        let zero = self.peek() == Some(b'0');
        if self.digits() == 0 || (zero && self.at - start > if self.text.as_bytes()[start] == b'-' { 2 } else { 1 }) {
            return Err(self.expected("a number without a leading zero"));
        }
        let mut whole = true;
        if self.eat(b'.') {
            whole = false;
            if self.digits() == 0 {
                return Err(self.expected("a digit"));
            }
        }
        if self.eat(b'e') || self.eat(b'E') {
            whole = false;
            if !self.eat(b'+') {
                self.eat(b'-');
            }
            if self.digits() == 0 {
                return Err(self.expected("a digit"));
            }
        }
        let text = self.text.get(start..self.at).unwrap_or_default();
        Ok(match text.parse() {
            Ok(i) if whole => Value::Integer(i),
            _ => Value::Number(text.into()),
        })
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        self.at - start
    }

    fn string(&mut self) -> Result<String, InputFault> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let rest = self.text.get(self.at..).unwrap_or_default();
            let plain = rest.bytes().position(|b| b == b'"' || b == b'\\' || b < 0x20).unwrap_or(rest.len());
            out.push_str(rest.get(..plain).unwrap_or_default());
            self.at += plain;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(out);
                }
                Some(b'\\') => {
                    self.at += 1;
                    out.push(self.escape()?);
                }
                _ => return Err(self.expected("the end of a text")),
            }
        }
    }

    fn escape(&mut self) -> Result<char, InputFault> {
        let Some(b) = self.peek() else { return Err(self.expected("an escape")) };
        let c = match b {
            b'"' | b'\\' | b'/' => char::from(b),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                self.at += 1;
                return self.unicode();
            }
            _ => return Err(self.expected("an escape")),
        };
        self.at += 1;
        Ok(c)
    }

    fn unicode(&mut self) -> Result<char, InputFault> {
        let high = self.hex()?;
        if !(0xd800..0xdc00).contains(&high) {
            return char::from_u32(high).ok_or_else(|| self.expected("a code point that isn't half a pair"));
        }
        if !(self.eat(b'\\') && self.eat(b'u')) {
            return Err(self.expected("the second half of a code point"));
        }
        let low = self.hex()?;
        if !(0xdc00..0xe000).contains(&low) {
            return Err(self.expected("the second half of a code point"));
        }
        char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)).ok_or_else(|| self.expected("a code point"))
    }

    fn hex(&mut self) -> Result<u32, InputFault> {
        let digits = self.text.get(self.at..self.at + 4).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        match digits.and_then(|d| u32::from_str_radix(d, 16).ok()) {
            Some(n) => {
                self.at += 4;
                Ok(n)
            }
            None => Err(self.expected("four hex digits")),
        }
    }
}
