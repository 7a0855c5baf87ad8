//! Recorded requests: a file with one request a line.
//!
//! A trace is read line by line, with limits on the length of a line, the bytes read, the requests and block ids kept. Every line is
//! looked at; of the faults the first [`LISTED`](super::fault::LISTED) are listed with their lines, the others counted. The
//! first request that is kept is at time 0. Requests that are not in the order of time are put in order, and a note says how many
//! came late: recorders write some lines out of turn, and refusing the file would only have the operator sort it.

use std::io::BufRead;
use std::time::Duration;

use super::fault::{Fault, Faults, LoadErrors, clip};
use super::rows::{MAX_BLOCK_IDS, Row, Rows};
use super::{Load, LoadRequest, MAX_REQUESTS, draw};

/// The longest line that is read, in bytes.
pub const MAX_LINE: usize = 1 << 20;
/// The most bytes that are read of a trace; with [`TraceOptions::limit`] a larger one is read up to there.
pub const MAX_BYTES: u64 = 256 << 20;

/// How a trace is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Mooncake's: JSON lines with `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.
    Mooncake,
    /// Azure's: CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`.
    Azure,
    /// Ours: CSV with `at_s`, `prompt`, `output` and where known `prefill_hit`, `decode_hit`.
    Csv,
    /// Ours: JSON lines with the CSV's keys, or `blocks` in place of hits.
    Jsonl,
}

impl Format {
    /// The words of `load.format`.
    pub const KNOWN: &'static str = "\"auto\", \"mooncake\", \"azure\", \"csv\" or \"jsonl\"";

    /// By such a word; `auto` is none of them.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        match word {
            "mooncake" => Some(Self::Mooncake),
            "azure" => Some(Self::Azure),
            "csv" => Some(Self::Csv),
            "jsonl" => Some(Self::Jsonl),
            _ => None,
        }
    }

    /// By the first line that isn't empty.
    fn of_line(line: &str) -> Option<Self> {
        if line.starts_with('{') {
            let mooncake = line.contains("\"input_length\"") || line.contains("\"hash_ids\"");
            return Some(if mooncake { Self::Mooncake } else { Self::Jsonl });
        }
        if line.contains("ContextTokens") {
            return Some(Self::Azure);
        }
        line.contains("at_s").then_some(Self::Csv)
    }
}

/// How a trace is read.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceOptions {
    /// How it is written; `None`: told by its first line.
    pub format: Option<Format>,
    /// Times are divided by this.
    pub speed: f64,
    /// So many requests are left out at the beginning.
    pub first: u64,
    /// The most requests that are taken.
    pub limit: u64,
    /// Tokens of one block of `hash_ids` or `blocks`.
    pub block_tokens: u64,
}

impl Default for TraceOptions {
    /// All of it, as fast as it was, with Mooncake's blocks of 512 tokens.
    fn default() -> Self {
        Self { format: None, speed: 1.0, first: 0, limit: u64::MAX, block_tokens: 512 }
    }
}

/// Reads a trace; `file` names it in messages.
///
/// # Errors
/// Faults of its lines, a format that isn't known, no request at all, or more than is kept in memory.
pub fn read(file: &str, input: impl BufRead, options: &TraceOptions) -> Result<Load, LoadErrors> {
    let mut lines = Lines { input, number: 0, read: 0, buffer: Vec::new() };
    let mut faults = Faults::new(file);
    let mut kept = Kept::default();
    let mut rows: Option<Rows> = None;
    let mut seen = 0_u64;
    while seen < options.first.saturating_add(options.limit) {
        let line = match lines.next() {
            Line::End => break,
            Line::Fault(fault, goes_on) => {
                faults.at(Some(lines.number), "", fault);
                if goes_on {
                    continue;
                }
                break;
            }
            Line::Text(line) if line.is_empty() => continue,
            Line::Text(line) => line,
        };
        let number = lines.number;
        let Some(rows) = &mut rows else {
            let Some(format) = options.format.or_else(|| Format::of_line(&line)) else {
                faults.at(Some(number), "", unknown(&line));
                break;
            };
            let begun = Rows::begin(format, &line, number, options.block_tokens, &mut faults);
            let (mut begun, is_request) = match begun {
                Some(begun) => begun,
                None => break,
            };
            if is_request {
                seen += 1;
                if seen > options.first {
                    kept.push(begun.row(&line, number, &mut faults), number, &mut faults);
                }
            }
            rows = Some(begun);
            continue;
        };
        seen += 1;
        if seen > options.first && !kept.push(rows.row(&line, number, &mut faults), number, &mut faults) {
            break;
        }
    }
    if faults.is_empty() && kept.rows.is_empty() {
        faults.push("", Fault::Missing(nothing(seen, options.first)));
    }
    let load = kept.load(options.speed);
    faults.finish(Some(load))
}

fn unknown(line: &str) -> Fault {
    let expected = "the beginning of a known trace; see `load.format` for those that are read";
    Fault::Value { got: clip(line), expected }
}

fn nothing(seen: u64, first: u64) -> String {
    match seen {
        0 => "the trace has no request".into(),
        _ => format!("the trace has {seen} requests, and `load.first` leaves out {first}"),
    }
}

/// What was read so far.
#[derive(Default)]
struct Kept {
    rows: Vec<Row>,
    ids: u64,
    late: u64,
    silent: u64,
}

impl Kept {
    /// Keeps a request; false where there is no room for another.
    fn push(&mut self, row: Option<Row>, line: u64, faults: &mut Faults) -> bool {
        let Some(row) = row else { return true };
        if !faults.is_empty() {
            // It will come to nothing: the rest is only looked at.
            self.rows = Vec::new();
            return true;
        }
        self.ids += row.ids();
        let change = "set `load.limit`, and `load.first` for another part";
        if self.ids > MAX_BLOCK_IDS {
            faults.at(Some(line), "", Fault::TooMany { what: "block ids", limit: MAX_BLOCK_IDS, change });
            return false;
        }
        if self.rows.len() as u64 >= MAX_REQUESTS {
            faults.at(Some(line), "", Fault::TooMany { what: "requests", limit: MAX_REQUESTS, change });
            return false;
        }
        self.late += u64::from(self.rows.last().is_some_and(|last| row.at < last.at));
        self.silent += u64::from(row.output == 0);
        self.rows.push(row);
        true
    }

    fn load(mut self, speed: f64) -> Load {
        let mut notes = Vec::new();
        if self.late > 0 {
            // Stable: of the same time, the order of the file.
            self.rows.sort_by_key(|r| r.at);
            notes.push(format!("put in order of time: {} of its requests stood after a later one", self.late));
        }
        if self.silent > 0 {
            notes.push(format!("requests without output, taken to have one token: {}", self.silent));
        }
        let begin = self.rows.first().map_or(0, |r| r.at);
        let request = |row: Row| {
            let at = Duration::from_nanos(row.at.saturating_sub(begin).try_into().unwrap_or(0));
            let at = draw::faster(at, speed);
            LoadRequest { at, prompt: row.prompt, output: row.output.max(1), prefix: row.prefix }
        };
        Load { requests: self.rows.into_iter().map(request).collect(), notes }
    }
}

/// What comes next.
enum Line {
    /// A line without its end and blanks around it.
    Text(String),
    /// What is wrong with it, and whether anything can be read after it.
    Fault(Fault, bool),
    End,
}

/// Lines of limited length.
struct Lines<R> {
    input: R,
    number: u64,
    read: u64,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    fn next(&mut self) -> Line {
        self.buffer.clear();
        self.number += 1;
        let mut long = false;
        loop {
            let chunk = match self.input.fill_buf() {
                Ok(chunk) => chunk,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Line::Fault(Fault::Unreadable(e.to_string()), false),
            };
            if chunk.is_empty() {
                if self.buffer.is_empty() && !long {
                    return Line::End;
                }
                break;
            }
            let end = chunk.iter().position(|b| *b == b'\n');
            let piece = chunk.get(..end.unwrap_or(chunk.len())).unwrap_or_default();
            long |= self.buffer.len() + piece.len() > MAX_LINE;
            if !long {
                self.buffer.extend_from_slice(piece);
            }
            let used = end.map_or(chunk.len(), |end| end + 1);
            self.input.consume(used);
            self.read = self.read.saturating_add(used as u64);
            if self.read > MAX_BYTES {
                let change = "set `load.limit`, or cut the file";
                return Line::Fault(Fault::TooMany { what: "bytes", limit: MAX_BYTES, change }, false);
            }
            if end.is_some() {
                break;
            }
        }
        if long {
            let (limit, change) = (MAX_LINE as u64, "is there a line for each request?");
            return Line::Fault(Fault::TooMany { what: "bytes in the line", limit, change }, true);
        }
        let bytes = match self.buffer.as_slice() {
            [0x1f, 0x8b, ..] if self.number == 1 => return Line::Fault(Fault::Compressed, false),
            // A byte-order mark.
            [0xef, 0xbb, 0xbf, rest @ ..] if self.number == 1 => rest,
            bytes => bytes,
        };
        match std::str::from_utf8(bytes) {
            Ok(text) => Line::Text(text.trim().to_owned()),
            Err(_) => Line::Fault(Fault::NotText, true),
        }
    }
}
