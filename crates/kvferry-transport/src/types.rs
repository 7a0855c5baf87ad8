//! The values of the contract: ids, submissions, events and what a backend says of itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::staged::CostModel;
use kvferry_geometry::units::{Bytes, RegionId};

use crate::error::{LostCause, TransferError};
use crate::region::MemoryKind;

/// One endpoint of the data plane: one life of one rank's transport. Random, never re-used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId([u8; 16]);

impl EndpointId {
    /// Wraps sixteen random bytes.
    #[must_use]
    pub const fn new(raw: [u8; 16]) -> Self {
        Self(raw)
    }

    /// The sixteen bytes.
    #[must_use]
    pub const fn get(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EndpointId({self})")
    }
}

macro_rules! counter_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(u64);

        impl $name {
            /// Wraps a plain number; for backends.
            #[must_use]
            pub const fn new(raw: u64) -> Self {
                Self(raw)
            }

            /// The plain number.
            #[must_use]
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

counter_id!(
    /// A connection of one endpoint to a peer. Counted by the endpoint, never re-used by it.
    PeerId
);
counter_id!(
    /// An operation of one endpoint. Counted by the endpoint, never re-used by it.
    OpId
);

/// Which way the bytes go, seen from the endpoint that submits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OpKind {
    /// The batch's source regions are the peer's, its destination regions ours.
    Read,
    /// The batch's source regions are ours, its destination regions the peer's.
    Write,
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// One operation: a proven batch for one peer.
#[derive(Clone, Debug)]
pub struct Submission {
    /// With whom.
    pub peer: PeerId,
    /// Which way.
    pub kind: OpKind,
    /// What; region ids are the registration ids of either side.
    pub batch: Arc<BoundedBatch>,
    /// Delivered to the peer, exactly once, after all bytes of the batch are visible to it (write) or were read from
    /// it (read). Not delivered if the operation failed.
    pub notify: Option<Vec<u8>>,
}

/// What an operation moved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Stats {
    /// Bytes moved.
    pub bytes: Bytes,
    /// Contiguous pieces that the backend moved them in.
    pub descriptors: u64,
}

/// How an operation ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All bytes arrived and are visible.
    Done(Stats),
    /// It failed, and neither side's memory will be touched for it any more. Part of the destination may be written.
    Failed(TransferError),
    /// It ended for the caller, but nothing proves that the memory is not touched later. Both sides' bytes stay loaned
    /// until there is other evidence (the peer's process is gone, or access was revoked by a backend that
    /// [excludes](Revocation::Excludes) later access).
    InDoubt(TransferError),
}

impl Outcome {
    /// The stats of a success.
    #[must_use]
    pub fn done(&self) -> Option<Stats> {
        match self {
            Self::Done(stats) => Some(*stats),
            Self::Failed(_) | Self::InDoubt(_) => None,
        }
    }
}

/// What a transport tells its driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The lane to a peer is up. Once for each successful `connect`, unless the peer is lost before.
    Connected {
        /// The connection.
        peer: PeerId,
    },
    /// An operation ended. Exactly once for each accepted submission.
    Completed {
        /// The operation.
        op: OpId,
        /// The connection it was submitted to.
        peer: PeerId,
        /// How it ended.
        outcome: Outcome,
    },
    /// A peer's operation on our memory finished and carried a notification. The peer need not be one that *we*
    /// connected to.
    Notification {
        /// The endpoint that submitted the operation, by its own word: the backend admitted it, but does not vouch for its id.
        from: EndpointId,
        /// The bytes of [`Submission::notify`].
        payload: Vec<u8>,
    },
    /// A connection broke by itself. All its operations have ended before this event; further submissions are refused.
    /// The connection's entry stays until `disconnect`.
    PeerLost {
        /// The connection.
        peer: PeerId,
        /// Why.
        cause: LostCause,
    },
}

impl Event {
    /// Whether it tells that this connection is up or lost: nobody hears that after `disconnect`, also if it was queued before.
    #[must_use]
    pub fn is_of_connection(&self, connection: PeerId) -> bool {
        matches!(self, Self::Connected { peer } | Self::PeerLost { peer, .. } if *peer == connection)
    }
}

/// What taking back access achieves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Revocation {
    /// After `revoke` returned, no peer's operation touches the memory: evidence that a writer has stopped.
    Excludes,
    /// After `revoke` returned, no *further* operation of a peer begins on the memory. One that had begun may touch it until it
    /// ends, and the memory's owner is kept alive until then: no evidence that a writer has stopped.
    Fences,
    /// The backend cannot take back access.
    Unsupported,
}

/// Whose access to what is taken back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RevokeScope {
    /// Every peer's access to one region.
    Region(RegionId),
    /// One peer's access to every region, also those registered later.
    Endpoint(EndpointId),
}

/// What a backend can do. Constant over the life of an endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// The backend's name, as in its blobs: `mem`, `shm`, `ucx`, ...
    pub backend: &'static str,
    /// The kinds of memory that can be registered.
    pub memory: Vec<MemoryKind>,
    /// Whether it reads from peers.
    pub read: bool,
    /// Whether it writes to peers.
    pub write: bool,
    /// Longest notification in bytes.
    pub max_notify: usize,
    /// Most operations in flight over all peers.
    pub max_in_flight: usize,
    /// What `revoke` achieves.
    pub revocation: Revocation,
    /// What a transfer over it costs, for the choice between moving directly and staging: round numbers of a typical lane of the
    /// backend, until somebody measures the one that there is.
    pub cost: CostModel,
}

impl Capabilities {
    /// Capabilities of a backend that reads and writes host memory, cannot revoke, and has generous limits; change the
    /// fields that differ.
    #[must_use]
    pub fn host(backend: &'static str) -> Self {
        Self {
            backend,
            memory: vec![MemoryKind::Host],
            read: true,
            write: true,
            max_notify: 64 << 10,
            max_in_flight: 1 << 16,
            revocation: Revocation::Unsupported,
            cost: CostModel::default(),
        }
    }
}

/// The kind of path that bytes really take to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LaneKind {
    /// A copy inside one process.
    InProcess,
    /// A copy between mappings of shared memory.
    SharedMemory,
    /// A copy by the kernel between two processes (`process_vm_readv` and its like).
    CrossProcess,
    /// Remote direct memory access by hardware.
    Rdma,
    /// Direct access between devices.
    DeviceDirect,
    /// A byte stream (TCP).
    Stream,
    /// The backend doesn't say.
    Unknown,
}

impl LaneKind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::InProcess,
        Self::SharedMemory,
        Self::CrossProcess,
        Self::Rdma,
        Self::DeviceDirect,
        Self::Stream,
        Self::Unknown,
    ];

    /// Its name, as policies and reports write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InProcess => "in-process",
            Self::SharedMemory => "shm",
            Self::CrossProcess => "cma",
            Self::Rdma => "rdma",
            Self::DeviceDirect => "device",
            Self::Stream => "tcp",
            Self::Unknown => "unknown",
        }
    }

    /// The kind that a library's own name of a transport stands for (`rc_mlx5`, `cuda_ipc`, `tcp`), where the name is known and the
    /// transport reads and writes by itself. `ud` never does: its puts are packets whose receiver copies.
    #[must_use]
    pub fn of_transport(name: &str) -> Option<Self> {
        let family = name.split('_').next().unwrap_or(name);
        match name {
            "self" => Some(Self::InProcess),
            "posix" | "sysv" | "xpmem" => Some(Self::SharedMemory),
            "cma" | "knem" => Some(Self::CrossProcess),
            "tcp" => Some(Self::Stream),
            "cuda_ipc" | "rocm_ipc" | "ze_ipc" | "gdr_copy" | "rocm_gdr" => Some(Self::DeviceDirect),
            _ if ["rc", "dc", "srd", "gga"].contains(&family) => Some(Self::Rdma),
            _ => None,
        }
    }
}

impl fmt::Display for LaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a preflight measured on a lane.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Measured {
    /// Bytes per second of large runs.
    pub bytes_per_second: f64,
    /// Time of one small operation.
    pub per_operation: Duration,
}

/// The lane a backend really uses for a peer.
#[derive(Clone, PartialEq, Debug)]
pub struct Lane {
    /// Its kind.
    pub kind: LaneKind,
    /// The library's own names of what carries the bytes of transfers, lower case and without devices: `cma`, `rc_mlx5`,
    /// `cuda_ipc`, ... Empty where the kind says it all.
    pub transports: Vec<String>,
    /// In the backend's words, for people.
    pub detail: String,
    /// What was measured on it, if anything was.
    pub measured: Option<Measured>,
}

/// What an endpoint knows of a connection.
#[derive(Clone, PartialEq, Debug)]
pub struct PeerInfo {
    /// The endpoint at the other end.
    pub endpoint: EndpointId,
    /// Its regions by id, as its blob had them; ascending ids. Shared, as there may be hundreds and each request asks.
    pub regions: Arc<[(RegionId, Bytes)]>,
    /// The lane, as far as known: before [`Event::Connected`] what is intended.
    pub lane: Lane,
}

impl PeerInfo {
    /// Lengths by region id, for [`Batch::check`](kvferry_geometry::batch::Batch::check). An id that the peer has not
    /// registered has length zero.
    #[must_use]
    pub fn lens(&self) -> Vec<Bytes> {
        let mut lens = Vec::with_capacity(self.regions.len());
        for &(id, len) in &*self.regions {
            lens.resize(id.index(), Bytes::ZERO);
            lens.push(len);
        }
        lens
    }
}
