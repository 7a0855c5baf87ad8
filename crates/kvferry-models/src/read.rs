//! Reading a small text file with a limit.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::error::{InputError, InputErrors, InputFault};
use crate::tree::MAX_FILE;

/// The file's text, if it is UTF-8 and not too large.
pub(crate) fn text(path: &Path) -> Result<String, InputErrors> {
    let fail = |fault| {
        InputErrors::from(InputError { file: path.display().to_string(), line: None, key: String::new(), fault })
    };
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|f| f.take(MAX_FILE + 1).read_to_end(&mut bytes));
    match read {
        Err(error) => Err(fail(InputFault::Unreadable(error.to_string()))),
        Ok(got) if got as u64 > MAX_FILE => {
            let got = got as u64;
            Err(fail(InputFault::TooLarge { what: "the file's size in bytes (at least)", got, limit: MAX_FILE }))
        }
        Ok(_) => {
            String::from_utf8(bytes).map_err(|e| fail(InputFault::Unreadable(format!("it is not UTF-8 text: {e}"))))
        }
    }
}
