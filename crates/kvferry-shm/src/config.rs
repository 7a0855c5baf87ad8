//! What can be set, and why an endpoint could not be opened.

use std::time::Duration;

use kvferry_transport::EndpointId;
use rustix::io::Errno;

use crate::board::MAX_SLOTS;
use crate::lane::MAX_NAME;
use crate::window::WindowError;

/// Settings of an endpoint. Start from [`Config::default`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Copy threads, 1 to 32. Default: 2, or 1 on a machine with one CPU.
    pub threads: usize,
    /// Name of the socket in the abstract namespace. Default: `None`, a random one.
    pub name: Option<String>,
    /// The endpoint's id, where this is one of several backends of a rank, which have one id in common
    /// ([`Negotiated`](kvferry_transport::negotiate)). Default: `None`, a random one.
    pub endpoint: Option<EndpointId>,
    /// Whether peers may write to our regions at all. Default: true; [`register_read_only`](crate::ShmTransport::register_read_only)
    /// refuses it for one region.
    pub grant_writes: bool,
    /// Whether processes of other users may connect. Default: false.
    pub other_users: bool,
    /// Most peers that are connected to us at a time. Default: 4,096.
    pub max_guests: usize,
    /// Most mappings of peers' regions at a time, over all peers. Default: 16,384.
    pub max_mappings: usize,
    /// How long a peer may take to answer when we connect. Default: 10 s.
    pub answer_within: Duration,
}

impl Default for Config {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            threads: cpus.min(2),
            name: None,
            endpoint: None,
            grant_writes: true,
            other_users: false,
            max_guests: 4096,
            max_mappings: 16_384,
            answer_within: Duration::from_secs(10),
        }
    }
}

/// An endpoint could not be opened.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A setting is out of its range.
    #[error("{setting} is {got}, allowed is {allowed}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        got: usize,
        /// What may be.
        allowed: String,
    },
    /// Another endpoint has this name.
    #[error("the abstract socket name {name:?} is taken by another process; choose another name or leave it out")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The system refused.
    #[error("{what} failed: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
}

impl OpenError {
    pub(crate) fn system(what: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self::System { what, reason: errno.to_string() }
    }

    pub(crate) fn board(error: &WindowError) -> Self {
        Self::System { what: "making the board", reason: error.to_string() }
    }
}

impl Config {
    /// Checks every setting that could be out of range.
    pub(crate) fn check(&self) -> Result<(), OpenError> {
        if self.threads == 0 || self.threads > MAX_SLOTS {
            let allowed = format!("1 to {MAX_SLOTS}");
            return Err(OpenError::Setting { setting: "threads", got: self.threads, allowed });
        }
        if let Some(name) = &self.name
            && (name.is_empty() || name.len() > MAX_NAME)
        {
            let allowed = format!("1 to {MAX_NAME}");
            return Err(OpenError::Setting { setting: "length of name in bytes", got: name.len(), allowed });
        }
        Ok(())
    }
}
