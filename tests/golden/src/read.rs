//! Scenario files: `.json`, `.jsonl.gz`, or a folder of the first.
//!
//! Scenarios are read one at a time and none is kept, so memory is bounded by the longest allowed record whatever a file
//! unpacks to.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use crate::schema::Record;

/// Bytes of the longest record that is read.
pub const MAX_RECORD: u64 = 64 << 20;
/// Records that are read of one file.
pub const MAX_RECORDS: u64 = 1 << 20;

/// Why a file can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file system says no, or the compressed data is broken.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What it says.
        source: std::io::Error,
    },
    /// Not a scenario.
    #[error("{path}, record {record}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        record: u64,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A record longer than [`MAX_RECORD`].
    #[error("{path}, record {record}: it has more than the {limit} bytes that are read; split it")]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        record: u64,
        /// The limit.
        limit: u64,
    },
    /// More records than [`MAX_RECORDS`].
    #[error("{path}: it has more than the {limit} records that are read; split it")]
    TooMany {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// A name that ends in nothing known.
    #[error("{path}: expected a folder, a .json or a .jsonl.gz file")]
    Unknown {
        /// The file.
        path: PathBuf,
    },
    /// A folder without scenarios.
    #[error("{path}: no .json or .jsonl.gz file in this folder")]
    Empty {
        /// The folder.
        path: PathBuf,
    },
}

/// Gives each scenario of a folder (in order of names, not its subfolders) or file to `each`; says how many there were.
/// A `delivery.json` is not a scenario and is passed over in a folder.
///
/// # Errors
/// The first file or record that can't be read.
pub fn read(path: &Path, each: &mut dyn FnMut(Record)) -> Result<u64, ReadError> {
    let io = |source| ReadError::Io { path: path.to_owned(), source };
    if !fs::metadata(path).map_err(io)?.is_dir() {
        return read_file(path, each);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        let is_report = file.file_name().is_some_and(|n| n == "delivery.json");
        if !is_report && (ends(&file, ".json") || ends(&file, ".jsonl.gz")) {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(ReadError::Empty { path: path.to_owned() });
    }
    let mut total = 0;
    for file in files {
        total += read_file(&file, each)?;
    }
    Ok(total)
}

fn ends(path: &Path, suffix: &str) -> bool {
    path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.ends_with(suffix))
}

fn read_file(path: &Path, each: &mut dyn FnMut(Record)) -> Result<u64, ReadError> {
    let file = File::open(path).map_err(|source| ReadError::Io { path: path.to_owned(), source })?;
    if ends(path, ".jsonl.gz") {
        let mut lines = BufReader::new(MultiGzDecoder::new(BufReader::new(file)));
        return records(path, &mut lines, Some(b'\n'), each);
    }
    if ends(path, ".json") {
        return records(path, &mut BufReader::new(file), None, each);
    }
    Err(ReadError::Unknown { path: path.to_owned() })
}

/// One record for each piece that ends in `end`; one for all, if there is no end.
fn records(
    path: &Path,
    from: &mut dyn BufRead,
    end: Option<u8>,
    each: &mut dyn FnMut(Record),
) -> Result<u64, ReadError> {
    let mut count = 0;
    let mut bytes = Vec::new();
    for record in 1.. {
        bytes.clear();
        let mut limited = from.take(MAX_RECORD + 1);
        let read = match end {
            Some(end) => limited.read_until(end, &mut bytes),
            None => limited.read_to_end(&mut bytes),
        };
        read.map_err(|source| ReadError::Io { path: path.to_owned(), source })?;
        if bytes.len() as u64 > MAX_RECORD {
            return Err(ReadError::TooLong { path: path.to_owned(), record, limit: MAX_RECORD });
        }
        if bytes.is_empty() {
            break;
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        if record > MAX_RECORDS {
            return Err(ReadError::TooMany { path: path.to_owned(), limit: MAX_RECORDS });
        }
        let json = |source| ReadError::Json { path: path.to_owned(), record, source };
        each(serde_json::from_slice(&bytes).map_err(json)?);
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const RECORD: &str = r#"{"name":"a","verdict":"accept","scenario":{"mode":"pull","model":{"layers":[]},"prefill":{},
        "decode":{}},"sides":{"prefill":{"ranks":[]},"decode":{}},"of_another_version":[1,{}]}"#;

    fn zipped(folder: &Path, pieces: &[&[u8]]) -> PathBuf {
        let path = folder.join("x.jsonl.gz");
        let mut out = GzEncoder::new(File::create(&path).unwrap(), Compression::fast());
        pieces.iter().for_each(|p| out.write_all(p).unwrap());
        out.finish().unwrap();
        path
    }

    fn names(path: &Path) -> Result<Vec<String>, ReadError> {
        let mut names = Vec::new();
        read(path, &mut |r| names.push(r.name))?;
        Ok(names)
    }

    #[test]
    fn unknown_fields_are_passed_over_and_empty_lines_too() {
        let dir = tempfile::tempdir().unwrap();
        let line = RECORD.replace('\n', " ");
        let b = line.replace("\"a\"", "\"b\"");
        let path = zipped(dir.path(), &[line.as_bytes(), b"\n\n", b.as_bytes(), b"\n"]);
        assert_eq!(names(&path).unwrap(), ["a", "b"]);
        fs::write(dir.path().join("a.json"), RECORD).unwrap();
        fs::write(dir.path().join("delivery.json"), "{}").unwrap();
        assert_eq!(names(dir.path()).unwrap(), ["a", "a", "b"]);
    }

    #[test]
    fn what_is_no_record_is_an_error_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let line = RECORD.replace('\n', " ");
        let path = zipped(dir.path(), &[line.as_bytes(), b"\n{\"name\":7}\n"]);
        let error = names(&path).unwrap_err();
        assert!(matches!(error, ReadError::Json { record: 2, .. }), "{error}");
        let cut = fs::read(&path).unwrap();
        fs::write(&path, &cut[..cut.len() / 2]).unwrap();
        assert!(names(&path).is_err());
        let other = dir.path().join("x.txt");
        fs::write(&other, "").unwrap();
        assert!(matches!(names(&other), Err(ReadError::Unknown { .. })));
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(names(empty.path()), Err(ReadError::Empty { .. })));
        assert!(matches!(names(&dir.path().join("none.json")), Err(ReadError::Io { .. })));
    }

    #[test]
    fn a_small_file_that_unpacks_to_much_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let spaces = vec![b' '; 1 << 20];
        let pieces: Vec<&[u8]> = (0..=MAX_RECORD >> 20).map(|_| &spaces[..]).collect();
        let path = zipped(dir.path(), &pieces);
        assert!(fs::metadata(&path).unwrap().len() < 1 << 20);
        assert!(matches!(names(&path), Err(ReadError::TooLong { record: 1, .. })));
    }
}
