//! Reading a small text file with a limit.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::error::{InputError, InputErrors, InputFault};
use crate::tree::MAX_FILE;

/// Why a file's text was not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unread {
    /// It can't be opened or read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// It has more bytes than are read.
    #[error("it has more than the {limit} bytes that are read")]
    TooLarge {
        /// The most that are read.
        limit: u64,
    },
    /// It is no text.
    #[error("it is not UTF-8 text: {0}")]
    NotText(#[from] std::string::FromUtf8Error),
}

/// The text of a file of at most `limit` bytes, in UTF-8. One byte more is read at most: what has no length, as a device or a pipe,
/// may have no end either.
///
/// # Errors
/// Why it was not read.
pub fn text_within(path: &Path, limit: u64) -> Result<String, Unread> {
    let mut bytes = Vec::new();
    if File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)? as u64 > limit {
        return Err(Unread::TooLarge { limit });
    }
    Ok(String::from_utf8(bytes)?)
}

/// The text of a model or an engine description.
pub(crate) fn text(path: &Path) -> Result<String, InputErrors> {
    text_within(path, MAX_FILE).map_err(|unread| {
        let fault = match unread {
            Unread::TooLarge { limit } => {
                InputFault::TooLarge { what: "the file's size in bytes (at least)", got: limit + 1, limit }
            }
            other => InputFault::Unreadable(other.to_string()),
        };
        InputErrors::from(InputError { file: path.display().to_string(), line: None, key: String::new(), fault })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_read_than_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let of = |bytes: &[u8], limit| {
            std::fs::write(&path, bytes).unwrap();
            text_within(&path, limit).map_err(|e| e.to_string())
        };
        assert_eq!(of(b"12345678", 8).unwrap(), "12345678");
        assert_eq!(of(b"123456789", 8).unwrap_err(), "it has more than the 8 bytes that are read");
        assert!(of(b"\xff", 8).unwrap_err().contains("not UTF-8"));
        // It has no end.
        assert!(matches!(text_within(Path::new("/dev/zero"), 1 << 20), Err(Unread::TooLarge { limit: 1_048_576 })));
        assert!(matches!(text_within(&folder.path().join("none"), 8), Err(Unread::Io(_))));
    }
}
