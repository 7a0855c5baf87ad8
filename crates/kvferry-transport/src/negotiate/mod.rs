//! Several backends of one rank as one transport: for each peer the first of ours that the peer has too.
//!
//! A rank lists its backends in the order of its preference; [`Negotiated`] registers every region with all of them, offers
//! all of them in one blob, and connects to a peer by the first of *its own* that the peer's blob offers. So a rank that has
//! no NIXL talks to one that has both, and nobody configures pairs. The two directions of a pair may take different backends.
//!
//! Which one was taken is never hidden: [`PeerInfo::lane`](crate::PeerInfo) begins its words with the backend's name, and says
//! why a preferred one that both have was passed over. That happens in one case only: the preferred backend says at once that it
//! can't [reach](crate::ConnectError::Unreachable) the peer (shared memory of another host). A lane that breaks later, or never comes
//! up, is lost and not replaced: then the order of the list is the operator's to change.
//!
//! | | |
//! |---|---|
//! | endpoint | one id over all backends: construct the first, and the others with its [`endpoint`](crate::Transport::endpoint) |
//! | memory | the kinds that *every* backend can register, so that a region id means the same over each lane |
//! | notifications, operations in flight | the smallest limit of all |
//! | revocation | the weakest of all |
//! | cost | that of the first backend |
//! | a list of one | is its backend: same name, same blob, same descriptor to poll |
//!
//! Plain blobs of a backend that is in the list are taken as well; what a peer without `Negotiated` can't do is connect to a list
//! of several.
//!
//! Invariants: region ids are the same in all backends at any time; an operation id and a connection id tell their backend
//! (`inner · backends + index`), so that nothing is looked up to route them.
//!
//! ```
//! use kvferry_transport::{Transport, mem::MemNetwork, negotiate::Negotiated};
//! let (fast, plain) = (MemNetwork::named("fast", 1), MemNetwork::new(2));
//! let first = fast.endpoint()?;
//! let second = plain.endpoint_as(first.endpoint())?;
//! let both = Negotiated::new(vec![Box::new(first), Box::new(second)])?;
//! let mut other = Negotiated::new(vec![Box::new(plain.endpoint()?)])?;
//! let peer = other.connect(&both.blob())?;
//! assert_eq!(other.peer(peer)?.endpoint, both.endpoint());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod endpoint;
mod offer;
mod wake;

pub use endpoint::Negotiated;

use crate::blob::BlobError;
use crate::types::EndpointId;

/// The backend's name in blobs of several backends.
pub const ANY: &str = "any";
/// The most backends of one rank.
pub const MAX_BACKENDS: usize = 16;

/// Backends that can't be one transport.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NegotiateError {
    /// None, or too many.
    #[error("{got} backends were given, allowed are 1 to {MAX_BACKENDS}")]
    Count {
        /// How many.
        got: usize,
    },
    /// Two of the same name.
    #[error("backend {name} is in the list twice; leave one out (rails of one backend are its own configuration)")]
    Twice {
        /// The name.
        name: &'static str,
    },
    /// A list in a list.
    #[error("a list of backends can't be in a list of backends; give all of them in one list")]
    Nested,
    /// Different endpoint ids.
    #[error(
        "backend {first} is endpoint {first_id}, backend {second} is endpoint {second_id}; \
         configure {second} with the endpoint id of {first}, so that peers know one rank by one id"
    )]
    Endpoints {
        /// The first backend.
        first: &'static str,
        /// Its id.
        first_id: EndpointId,
        /// The one that differs.
        second: &'static str,
        /// Its id.
        second_id: EndpointId,
    },
    /// There is no kind of memory that all can register.
    #[error("no kind of memory can be registered with every backend: {supported}; leave out the one that lacks yours")]
    NoCommonMemory {
        /// The kinds by backend.
        supported: String,
    },
    /// A backend has registrations already.
    #[error("backend {name} has {regions} registrations already; register after the list is made")]
    Registered {
        /// The backend.
        name: &'static str,
        /// How many.
        regions: usize,
    },
    /// A backend's blob is not in the common frame.
    #[error("the blob of backend {name} is not in the common frame: {reason}")]
    Frame {
        /// The backend.
        name: &'static str,
        /// What is wrong with it.
        reason: BlobError,
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
