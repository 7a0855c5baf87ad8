//! Cargo as a child: with the native libraries where they can be had, and without what needs them elsewhere.

use std::process::Command;

use crate::native::{self, Native, NativeError};

/// Which part of the workspace can be built on this machine.
#[derive(Debug)]
pub(crate) struct Workspace {
    native: Result<Native, NativeError>,
}

impl Workspace {
    /// Fetches the native libraries where they aren't there.
    ///
    /// # Errors
    /// Where other libraries came than those recorded. That none can be had is no error: see [`Workspace::lacks`].
    pub(crate) fn prepare() -> Result<Self, NativeError> {
        match native::prepare() {
            Err(error) if error.is_refusal() => Err(error),
            native => Ok(Self { native }),
        }
    }

    /// The package that is left out and why, if one is.
    pub(crate) fn lacks(&self) -> Option<(&'static str, String)> {
        let error = self.native.as_ref().err()?;
        Some(("kvferry-nixl", format!("the native libraries are not there: {error}")))
    }

    /// What selects all that can be built.
    pub(crate) fn selection(&self) -> &'static [&'static str] {
        match self.native {
            Ok(_) => &["--workspace", "--features", "xtask/ucx,xtask/nixl"],
            Err(_) => &["--workspace", "--exclude", "kvferry-nixl", "--features", "xtask/ucx"],
        }
    }

    /// Cargo, where it finds the libraries.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = cargo();
        if let Ok(native) = &self.native {
            cargo.envs(native.vars());
        }
        cargo
    }
}

/// The cargo that this program was built by.
pub(crate) fn cargo() -> Command {
    Command::new(env!("CARGO"))
}

/// The backends whose absence is a failure, as the user lists them.
pub(crate) fn required() -> String {
    std::env::var("KVFERRY_REQUIRE").unwrap_or_default()
}

/// Whether `backend` is one of a list.
pub(crate) fn is_listed(list: &str, backend: &str) -> bool {
    list.split(',').any(|entry| entry.trim() == backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_libraries_only_what_needs_them_is_left_out() {
        let whole = Workspace { native: Ok(Native::default()) };
        assert!(whole.lacks().is_none() && !whole.selection().contains(&"--exclude"));
        let error = NativeError::Folder("none".into());
        let part = Workspace { native: Err(error) };
        let (left_out, why) = part.lacks().unwrap();
        assert_eq!(left_out, "kvferry-nixl");
        assert!(why.contains("none"), "{why}");
        let words = part.selection();
        let at = words.iter().position(|w| *w == "--exclude").unwrap();
        assert_eq!(words[at + 1], left_out);
        assert!(words.contains(&"xtask/ucx"), "{words:?}");
    }
}
