//! Where commands write what they found out.

use std::fs::File;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Prints all of it, unless whoever reads it has read enough.
pub(crate) fn print(text: impl AsRef<[u8]>) -> anyhow::Result<()> {
    written(io::stdout().lock(), text.as_ref()).context("standard output can't be written")
}

fn written(mut out: impl io::Write, text: &[u8]) -> io::Result<()> {
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// The file of a report. It is opened before the report is made, which may take long, and keeps what is in it until then. Where none is
/// made, a file that wasn't there isn't there again.
pub(crate) struct Page {
    file: File,
    path: PathBuf,
    /// Whether there is nothing in it that anybody wrote.
    fresh: bool,
}

impl Page {
    /// Makes the file, if it isn't there.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let fresh = !path.exists();
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| format!("{} can't be written", path.display()))?;
        Ok(Self { file, path: path.to_owned(), fresh })
    }

    /// Writes the report; gives a line that says where it is.
    pub(crate) fn write(mut self, page: &str) -> anyhow::Result<String> {
        self.fresh = false;
        let path = self.path.display();
        // What is no file, a pipe say, has no length.
        let emptied = self.file.metadata().and_then(|m| if m.is_file() { self.file.set_len(0) } else { Ok(()) });
        emptied
            .and_then(|()| self.file.write_all(page.as_bytes()))
            .with_context(|| format!("{path} can't be written"))?;
        Ok(format!("{path} holds the report\n"))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if self.fresh {
            // That it stays is no harm.
            drop(std::fs::remove_file(&self.path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Closed(ErrorKind);

    impl io::Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_may_leave_early_and_no_other_fault_is_lost() {
        assert!(written(Closed(ErrorKind::BrokenPipe), b"x").is_ok());
        assert!(written(Closed(ErrorKind::StorageFull), b"x").is_err());
    }

    #[test]
    fn a_page_replaces_the_one_before_only_when_it_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page.html");
        std::fs::write(&path, "the one before").unwrap();
        let page = Page::open(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "the one before");
        assert!(page.write("new").unwrap().contains("page.html"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert!(Page::open(&dir.path().join("no/page.html")).is_err());
        // A report that isn't made leaves nothing behind, and what was there.
        let other = dir.path().join("other.html");
        for path in [&path, &other] {
            drop(Page::open(path).unwrap());
        }
        assert!(path.exists() && !other.exists());
    }
}
