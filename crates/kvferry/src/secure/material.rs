//! Certificates and keys as they come: a file, or bytes.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zeroize::Zeroizing;

use super::SecurityError;

/// More than any chain of certificates or list of revocations that a fleet should have.
const LIMIT: u64 = 1 << 20;

/// A certificate, key or list: in a file, which is read again at each [`reload`](super::Security::reload), or as bytes.
///
/// A path converts into one. What is printed of it is the path; bytes are never printed.
#[derive(Clone)]
pub struct Material(Kind);

#[derive(Clone)]
enum Kind {
    File(PathBuf),
    Bytes(Arc<Zeroizing<Vec<u8>>>),
}

impl Material {
    /// What is in a file.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self(Kind::File(path.into()))
    }

    /// These bytes.
    #[must_use]
    pub fn bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Self(Kind::Bytes(Arc::new(Zeroizing::new(bytes.into()))))
    }

    pub(super) fn read(&self, what: &'static str) -> Result<Zeroizing<Vec<u8>>, SecurityError> {
        self.load(what, true)
    }

    /// Reads a secret, which not everybody may read unless `exposed` allows it. The owner's group may: that is how Kubernetes hands
    /// secrets to processes that don't run as root.
    pub(super) fn read_secret(&self, what: &'static str, exposed: bool) -> Result<Zeroizing<Vec<u8>>, SecurityError> {
        self.load(what, exposed)
    }

    fn load(&self, what: &'static str, exposed: bool) -> Result<Zeroizing<Vec<u8>>, SecurityError> {
        let path = match &self.0 {
            Kind::File(path) => path,
            Kind::Bytes(bytes) => return Ok(Zeroizing::new(bytes.to_vec())),
        };
        let unreadable = |error| SecurityError::Unreadable { what, from: self.to_string(), error };
        let mut file = File::open(path).map_err(unreadable)?;
        // Of the open file, so that it can't be another than the one that is read.
        let metadata = file.metadata().map_err(unreadable)?;
        let mode = metadata.permissions().mode() & 0o777;
        if !exposed && mode & 0o007 != 0 {
            return Err(SecurityError::Exposed { what, from: self.to_string(), mode });
        }
        // All at once: a buffer that grows would leave parts of a secret behind.
        let room = usize::try_from(metadata.len().min(LIMIT)).unwrap_or(0);
        let mut bytes = Zeroizing::new(Vec::with_capacity(room + 1));
        let got = file.by_ref().take(LIMIT + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if got as u64 > LIMIT {
            return Err(SecurityError::TooLong { what, from: self.to_string(), limit: LIMIT });
        }
        Ok(bytes)
    }
}

impl From<PathBuf> for Material {
    fn from(path: PathBuf) -> Self {
        Self::file(path)
    }
}

impl From<&Path> for Material {
    fn from(path: &Path) -> Self {
        Self::file(path)
    }
}

impl From<&str> for Material {
    fn from(path: &str) -> Self {
        Self::file(path)
    }
}

impl fmt::Display for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::File(path) => write!(f, "the file {}", path.display()),
            Kind::Bytes(_) => f.write_str("the bytes that were given"),
        }
    }
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{self}>")
    }
}
