//! A manifest's faults as an operator reads them.

use std::fmt;

use kvferry_geometry::manifest::{ManifestError, ManifestErrors};

/// A manifest's faults, those that differ only in the item told once.
pub(crate) struct ManifestFaults<'a> {
    pub(crate) name: &'a str,
    pub(crate) errors: &'a ManifestErrors,
    pub(crate) hint: &'a Option<String>,
}

/// The most faults that are written out.
const SHOWN: usize = 20;

impl fmt::Display for ManifestFaults<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut told: Vec<(String, &ManifestError, usize)> = Vec::new();
        for error in &self.errors.0 {
            let like = match error {
                ManifestError::Uncovered { heads, start, end, period, .. } => {
                    format!("{heads} {start} {end} {period}")
                }
                other => other.to_string(),
            };
            if let Some(t) = told.iter_mut().find(|t| t.0 == like) {
                t.2 += 1;
            } else if told.len() <= SHOWN {
                told.push((like, error, 0));
            }
        }
        for (i, (_, error, more)) in told.iter().take(SHOWN).enumerate() {
            let newline = if i > 0 { "\n" } else { "" };
            write!(f, "{newline}{}: {error}", self.name)?;
            if *more > 0 {
                write!(f, " (the same for {more} more items)")?;
            }
        }
        if told.len() > SHOWN {
            write!(f, "\n{}: and more faults, {} in all", self.name, self.errors.0.len())?;
        }
        match self.hint {
            Some(hint) => write!(f, "\n{}: {hint}", self.name),
            None => Ok(()),
        }
    }
}
