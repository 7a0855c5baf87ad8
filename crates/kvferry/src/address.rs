//! Where an owner listens.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// Where an owner listens for other owners: `tcp:<ip>:<port>` (an IPv6 address in brackets), `unix:<path>`, or `memory:<name>` for
/// owners of one process.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Address {
    /// A TCP socket.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// A name within the process: messages are moved from owner to owner, without a socket and without being encoded.
    Memory(MemoryName),
}

/// A name that an owner listens at within its process: 1 to 64 ASCII letters, digits, `.`, `_` and `-`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemoryName(String);

impl fmt::Display for MemoryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text that is no address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no address; write tcp:<ip>:<port>, unix:<absolute path>, or memory:<name> within one process")]
pub struct AddressError {
    /// The text.
    pub text: String,
}

impl Address {
    /// A port of this host only; 0 for any that is free.
    #[must_use]
    pub const fn loopback(port: u16) -> Self {
        Self::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
    }

    /// A name within this process.
    ///
    /// # Errors
    /// If it is none.
    pub fn memory(name: &str) -> Result<Self, AddressError> {
        let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if (1..=64).contains(&name.len()) && name.bytes().all(good) {
            Ok(Self::Memory(MemoryName(name.into())))
        } else {
            Err(AddressError { text: format!("memory:{name}") })
        }
    }

    /// Whether other hosts can't reach it.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(socket) => socket.ip().to_canonical().is_loopback(),
            Self::Unix(_) | Self::Memory(_) => true,
        }
    }

    /// Whether a peer can connect to it as it stands: it names one interface and one port.
    #[must_use]
    pub fn is_definite(&self) -> bool {
        match self {
            Self::Tcp(socket) => socket.port() != 0 && !socket.ip().is_unspecified(),
            Self::Unix(_) | Self::Memory(_) => true,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(socket) => write!(f, "tcp:{socket}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Memory(name) => write!(f, "memory:{name}"),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = || AddressError { text: text.into() };
        match text.split_once(':') {
            Some(("tcp", socket)) => socket.parse().map(Self::Tcp).map_err(|_| error()),
            Some(("unix", path)) if path.starts_with('/') => Ok(Self::Unix(path.into())),
            Some(("memory", name)) => Self::memory(name),
            _ => Err(error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were() {
        for text in ["tcp:127.0.0.1:5600", "tcp:[::1]:5600", "unix:/run/a:b.sock", "memory:p-0.a_b"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "tcp:",
            "tcp:localhost:1",
            "tcp:127.0.0.1",
            "unix:",
            "unix:relative",
            "http://x",
            "127.0.0.1:5",
            "memory:",
            "memory:a/b",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn hs_02_what_only_this_host_can_reach_is_known() {
        let at = |text: &str| text.parse::<Address>().unwrap();
        for (text, local, definite) in [
            ("tcp:127.0.0.1:5600", true, true),
            ("tcp:127.0.0.1:0", true, false),
            ("tcp:0.0.0.0:5600", false, false),
            ("tcp:[::]:5600", false, false),
            ("tcp:[::ffff:127.0.0.1]:5600", true, true),
            ("tcp:10.0.0.7:5600", false, true),
            ("unix:/run/x", true, true),
            ("memory:x", true, true),
        ] {
            assert_eq!((at(text).is_local(), at(text).is_definite()), (local, definite), "{text}");
        }
    }
}
