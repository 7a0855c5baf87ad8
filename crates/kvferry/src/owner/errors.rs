//! Why an owner could not be started, or a call to it not be served.

use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::manifest::JoinError;
use kvferry_proto::names::NameError;
use kvferry_session::StreamError;
use kvferry_session::owner::OfferError;

use crate::address::Address;
use crate::config::ConfigErrors;
use crate::secure::SecurityError;

/// An owner could not be started. Nothing is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A name is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// An engine can't have so many ranks.
    #[error(transparent)]
    Ranks(#[from] JoinError),
    /// A socket can't be bound.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// Where.
        address: String,
        /// Why.
        error: std::io::Error,
    },
    /// Other hosts could reach it, and it is not authenticated.
    #[error(
        "{address} can be reached from other hosts, and links are neither encrypted nor authenticated; say how with `security`, or \
             listen on loopback or a Unix socket, or say `plaintext_beyond_loopback` where the network is trusted"
    )]
    Exposed {
        /// Where it was to listen, or what it was to advertise.
        address: Address,
    },
    /// Peers can't connect to the address that references would carry.
    #[error("peers cannot connect to {address}: say which address they shall use with `advertise`")]
    Advertise {
        /// The address.
        address: Address,
    },
    /// Certificates or keys can't be used.
    #[error("security: {0}")]
    Security(#[from] SecurityError),
    /// Options contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// No random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(String),
}

/// A call to an owner could not be served.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The owner was shut down.
    #[error("the owner was shut down")]
    Shutdown,
    /// The offer was refused.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// What was said of a stream was refused.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The model has no such item.
    #[error("the model has no item {name:?}; items are named as in its spec")]
    NoSuchItem {
        /// The name.
        name: String,
    },
    /// References need an address.
    #[error("this owner does not listen for other owners; give it an address with `listen` to offer blocks")]
    NotListening,
    /// No random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(String),
}

/// The engine did not become complete.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadyError {
    /// Ranks are missing.
    #[error("ranks {missing:?} did not join within {after:?}")]
    Timeout {
        /// Which.
        missing: Vec<RankId>,
        /// How long it waited.
        after: Duration,
    },
    /// A rank may not join, or all together are unsound.
    #[error(transparent)]
    Join(JoinError),
    /// The owner was shut down.
    #[error("the owner was shut down")]
    Shutdown,
}
