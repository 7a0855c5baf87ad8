//! Scenarios that the connector carries out wrongly, as told beside the scenario files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::read::{MAX_RECORD, ReadError};

/// Names of scenarios whose recorded bytes are wrong.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KnownWrong(BTreeSet<String>);

#[derive(Deserialize)]
struct Delivery {
    bad_bytes: u64,
}

impl KnownWrong {
    /// Reads `delivery.json` (name to `bad_bytes`) and `accepted_but_wrong.txt` (a name a line) of the folder that a path is
    /// or lies in. A file that isn't there names none.
    ///
    /// # Errors
    /// One that is there and can't be read.
    pub fn beside(path: &Path) -> Result<Self, ReadError> {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let mut names = BTreeSet::new();
        let report = folder.join("delivery.json");
        if let Some(text) = text(&report)? {
            let json = |source| ReadError::Json { path: report.clone(), record: 1, source };
            let all: BTreeMap<String, Delivery> = serde_json::from_str(&text).map_err(json)?;
            names.extend(all.into_iter().filter(|(_, d)| d.bad_bytes > 0).map(|(name, _)| name));
        }
        if let Some(text) = text(&folder.join("accepted_but_wrong.txt"))? {
            names.extend(text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned));
        }
        Ok(Self(names))
    }

    /// Whether a scenario is one of them.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

fn text(path: &PathBuf) -> Result<Option<String>, ReadError> {
    let io = |source| ReadError::Io { path: path.clone(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    let mut text = String::new();
    file.take(MAX_RECORD).read_to_string(&mut text).map_err(io)?;
    Ok(Some(text))
}
