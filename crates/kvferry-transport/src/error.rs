//! Errors, one enum for each verb, and whose fault each is.

use kvferry_geometry::batch::Side;
use kvferry_geometry::units::{Bytes, RegionId};

use crate::blob::BlobError;
use crate::region::MemoryKind;
use crate::types::{EndpointId, OpId, OpKind, PeerId};

/// Whose fault an error is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fault {
    /// The peer sent bytes that mean nothing, or that break the format.
    PeerBytes,
    /// The peer sent something well formed that it may not ask for.
    PeerChoice,
    /// Our caller.
    Caller,
    /// The machine, the network, a process that died.
    Environment,
    /// Ourselves.
    Bug,
}

/// Memory could not be registered. Nothing changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The same range is registered already; that registration is intact.
    #[error("{len} at {address:#x} are registered already as region {existing}; deregister that first")]
    Duplicate {
        /// Start of the range.
        address: usize,
        /// Its length.
        len: Bytes,
        /// The registration that stands.
        existing: RegionId,
    },
    /// The backend cannot reach this kind of memory.
    #[error("{backend} cannot reach {got} memory; it supports {}", list(.supported))]
    UnsupportedMemory {
        /// The backend.
        backend: &'static str,
        /// What was to be registered.
        got: MemoryKind,
        /// What can be.
        supported: Vec<MemoryKind>,
    },
    /// The region has no bytes.
    #[error("a region of no bytes cannot be registered")]
    Empty,
    /// Too many registrations.
    #[error("{limit} regions are registered, the most that this backend takes")]
    TooMany {
        /// The most there can be.
        limit: usize,
    },
    /// The backend or the system refused.
    #[error("{backend} could not register {len}: {reason}")]
    Refused {
        /// The backend.
        backend: &'static str,
        /// Length of the region.
        len: Bytes,
        /// Cause and, where known, cure.
        reason: String,
    },
}

impl RegisterError {
    /// Whose fault it is.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Duplicate { .. } | Self::UnsupportedMemory { .. } | Self::Empty => Fault::Caller,
            Self::TooMany { .. } | Self::Refused { .. } => Fault::Environment,
        }
    }
}

fn list(kinds: &[MemoryKind]) -> String {
    kinds.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A registration could not be given up. Nothing changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeregisterError {
    /// No such registration.
    #[error("region {region} is not registered")]
    Unknown {
        /// The id named.
        region: RegionId,
    },
    /// Operations of ours that name it have not ended.
    #[error("region {region} is named by {operations} operations that have not ended; await or cancel them first")]
    Busy {
        /// The region.
        region: RegionId,
        /// How many operations.
        operations: usize,
    },
}

/// Access could not be taken back. Nothing changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RevokeError {
    /// No such registration.
    #[error("region {region} is not registered")]
    Unknown {
        /// The id named.
        region: RegionId,
    },
    /// The backend cannot do it.
    #[error("{backend} cannot take back access")]
    Unsupported {
        /// The backend.
        backend: &'static str,
    },
}

/// A peer's blob was refused, or a connection could not be begun. Nothing changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The blob does not parse.
    #[error("the peer's transport blob is not valid: {0}")]
    Malformed(#[from] BlobError),
    /// The blob is another backend's.
    #[error("the peer's transport blob is of backend {got:?}, ours is {expected:?}; use the same on both sides")]
    WrongBackend {
        /// Ours.
        expected: &'static str,
        /// The blob's.
        got: String,
    },
    /// The peer offers none of the backends that we have.
    #[error(
        "this rank has the transport backends {}, the peer offers {}: none is common; give both sides one that the other has",
        .ours.join(", "),
        .offered.join(", ")
    )]
    NoCommonBackend {
        /// Ours, in order of preference.
        ours: Vec<&'static str>,
        /// Those of the blob, in the peer's order.
        offered: Vec<String>,
    },
    /// The backend's own part of the blob does not parse or makes no sense.
    #[error("the {backend} part of the peer's transport blob is not valid: {reason}")]
    BadLane {
        /// The backend.
        backend: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// There is a connection to this endpoint already.
    #[error("endpoint {endpoint} is connected already as peer {peer}")]
    AlreadyConnected {
        /// The endpoint.
        endpoint: EndpointId,
        /// The connection.
        peer: PeerId,
    },
    /// The blob is our own.
    #[error("the blob names this endpoint itself")]
    Itself,
    /// The endpoint is not there, or no longer.
    #[error("endpoint {endpoint} cannot be reached: {reason}")]
    Unreachable {
        /// The endpoint.
        endpoint: EndpointId,
        /// Cause and, where known, cure.
        reason: String,
    },
}

impl ConnectError {
    /// Whose fault it is.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Malformed(_) | Self::BadLane { .. } => Fault::PeerBytes,
            Self::WrongBackend { .. } | Self::NoCommonBackend { .. } => Fault::PeerChoice,
            Self::AlreadyConnected { .. } | Self::Itself => Fault::Caller,
            Self::Unreachable { .. } => Fault::Environment,
        }
    }
}

/// A submission was refused. Nothing was posted, no event follows.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// No such connection.
    #[error("no connection {peer}")]
    UnknownPeer {
        /// The id named.
        peer: PeerId,
    },
    /// The connection is lost.
    #[error("peer {peer} is lost: {cause}")]
    PeerLost {
        /// The connection.
        peer: PeerId,
        /// Why.
        cause: LostCause,
    },
    /// The backend doesn't do this kind.
    #[error("{backend} has no {kind}")]
    UnsupportedKind {
        /// The backend.
        backend: &'static str,
        /// What was asked.
        kind: OpKind,
    },
    /// The batch names a region that is not registered (any more).
    #[error("the batch names {side} region {region}, which is not registered")]
    UnknownRegion {
        /// The side of the batch.
        side: Side,
        /// The region named.
        region: RegionId,
    },
    /// The batch was proven against another length than the region has.
    #[error("the batch was proven against {proven} for {side} region {region}, which has {registered}")]
    RegionLength {
        /// The side of the batch.
        side: Side,
        /// The region.
        region: RegionId,
        /// The length the proof assumed.
        proven: Bytes,
        /// The length it has.
        registered: Bytes,
    },
    /// The notification is too long.
    #[error("a notification of {got} bytes is longer than {limit}")]
    NotifyTooLong {
        /// Its length.
        got: usize,
        /// The longest.
        limit: usize,
    },
    /// Too many operations in flight: try again after the next completion.
    #[error("{limit} operations are in flight, the most there can be")]
    QueueFull {
        /// The most.
        limit: usize,
    },
    /// The backend or the system refused.
    #[error("the operation could not be posted: {reason}")]
    Refused {
        /// Cause and, where known, cure.
        reason: String,
    },
}

impl SubmitError {
    /// Whose fault it is.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::PeerLost { .. } | Self::QueueFull { .. } | Self::Refused { .. } => Fault::Environment,
            _ => Fault::Caller,
        }
    }
}

/// Why an accepted operation did not succeed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// Our side disconnected.
    #[error("disconnected")]
    Disconnected,
    /// The peer is lost.
    #[error("peer lost: {0}")]
    PeerLost(LostCause),
    /// The peer took back access to a region that the operation names.
    #[error("the peer took back access to its region {region}")]
    Revoked {
        /// The peer's region.
        region: RegionId,
    },
    /// The peer deregistered a region that the operation names, or registered anew since its blob was made.
    #[error("the peer's region {region} is no longer registered as its blob says; connect anew with a new blob")]
    Stale {
        /// The peer's region.
        region: RegionId,
    },
    /// The lane failed.
    #[error("the lane failed: {reason}")]
    Lane {
        /// Cause and, where known, cure.
        reason: String,
    },
}

impl TransferError {
    /// Whose fault it is.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Cancelled | Self::Disconnected => Fault::Caller,
            Self::Revoked { .. } | Self::Stale { .. } => Fault::PeerChoice,
            Self::PeerLost(_) | Self::Lane { .. } => Fault::Environment,
        }
    }
}

/// Why a connection broke.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LostCause {
    /// The peer's process or endpoint is gone: it will not touch memory any more.
    #[error("the peer's endpoint is gone")]
    Gone,
    /// The peer refused the connection.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// The peer broke the lane's protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// The lane broke; nothing is known of the peer.
    #[error("the lane broke: {0}")]
    Lane(String),
}

/// No such connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no connection {0}")]
pub struct UnknownPeer(pub PeerId);

/// No such operation in flight.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("operation {0} is not in flight")]
pub struct UnknownOp(pub OpId);
