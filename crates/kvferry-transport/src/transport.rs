//! The contract.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvferry_geometry::units::RegionId;

use crate::error::{ConnectError, DeregisterError, RegisterError, RevokeError, SubmitError, UnknownOp, UnknownPeer};
use crate::region::Region;
use crate::types::{Capabilities, EndpointId, Event, OpId, PeerId, PeerInfo, RevokeScope, Submission};

/// One rank's endpoint of the data plane.
///
/// The names in brackets are the clauses; each has a test of that name in [`conformance`](crate::conformance).
///
/// # Registrations
/// - `[ids]` Regions get ids from 0 up in the order of registration. An id is not re-used while any registration
///   stands; once none stands, ids begin at 0 again in a new *generation*, and what peers connected by an older blob
///   submit afterwards fails as [`Stale`](crate::TransferError::Stale) instead of touching the new regions.
/// - `[duplicate]` A second registration of an identical range (same address and length) is
///   [`RegisterError::Duplicate`] and leaves the first intact. Ranges that overlap but differ are distinct.
/// - `[memory-kind]` Memory of a kind that the backend can't reach is refused here, with what it supports, and not later.
/// - `[deregister]` Deregistering a region named by an operation of ours that has not ended is
///   [`DeregisterError::Busy`]; an id that is not registered is `Unknown`. Otherwise the region is gone at return:
///   where [`Capabilities::revocation`] is `Excludes`, no peer touches it any more, and peers' operations on it fail.
///   The memory's owner is kept alive until no operation that names the region can touch it, so a registration
///   outlives every transfer.
///
/// # Peers
/// - `[blob]` [`blob`](Self::blob) describes this endpoint and its registrations at that moment. Any bytes at all may be
///   given to `connect`: those that are not a valid blob of this backend are a typed error, never a panic and never an
///   allocation larger than a small multiple of the blob.
/// - `[connect]` `connect` validates and begins; exactly one of [`Event::Connected`] and [`Event::PeerLost`] follows
///   first. Submissions are accepted at once and wait for the lane. The peer need not connect back.
/// - `[disconnect]` `disconnect` forgets the connection. Its operations that have not ended end, once each, with
///   events that follow; nothing else is heard of it, not even what was queued before of its coming up or its loss.
/// - `[peer-death]` When a peer dies, each of its operations ends, once each, then [`Event::PeerLost`] follows; nothing
///   hangs. An idle connection may notice only at its next operation.
///
/// # Operations
/// - `[bounds]` A submission is refused before anything is posted unless every region that its batch names is registered
///   on its side with the length that the batch was proven against (ours by our table, the peer's by its blob). So no byte
///   outside a registered region, and none that the batch doesn't list, is ever touched.
/// - `[once]` A refused submission has no event. An accepted one has exactly one [`Event::Completed`]: `Done`, `Failed`
///   or `InDoubt`; it comes after the operation has stopped, at the latest when it is cancelled, its peer is lost or
///   disconnected. An empty batch is an operation like any other and ends as `Done`.
/// - `[visible]` `Done` means that all bytes are visible: to us for a read, to the peer for a write.
/// - `[notify]` The notification is delivered to the peer exactly once, after the last byte, if the operation is `Done`;
///   never if it is `Failed`. With `InDoubt` it may or may not be.
/// - `[order]` Operations run and end in any order.
/// - `[cancel]` `cancel` asks. The operation's event gives the outcome: `Done` (too late), `Failed` (stopped; evidence that
///   nothing is touched any more), or `InDoubt`.
/// - `[revoke]` See [`Revocation`](crate::Revocation). Operations of ours are not affected.
///
/// # Driving
/// - `[drive]` Nothing happens but in `step`, or on threads of the backend's own; events come from `next_event` alone. After
///   submit, connect, cancel, disconnect: call `step`.
/// - `[wake]` [`wake_fd`](Self::wake_fd) is readable (level) once something arrived from outside (a peer, a backend's
///   thread) that `step` has not yet seen; `step` clears it. Timers are not on it: they are the time that `step` gave. Our
///   own calls are not on it either: step after them. [`wait`](Self::wait) sleeps on the same without a poller, and returns
///   at once while an event is queued. An idle endpoint uses no CPU: it is not woken, and its `step` gives no time or a later one.
/// - `[timers]` A driver that steps only when it is woken, or when the time that the last step gave has come, sees every
///   operation end.
/// - `[drop]` Dropping an endpoint abandons its operations without events; peers see it as gone. No memory is touched for
///   them after the drop returns, or the region's owner is kept alive until that is so.
///
/// There are no default methods: a wrapper must decide about each.
pub trait Transport: Send {
    /// What the backend can do.
    fn capabilities(&self) -> &Capabilities;

    /// This endpoint's id, as its blob has it and as peers see it in notifications.
    fn endpoint(&self) -> EndpointId;

    /// Registers memory; the endpoint keeps the region's owner alive until it is deregistered and no longer used.
    ///
    /// # Errors
    /// See [`RegisterError`]; nothing changed then.
    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError>;

    /// Ends a registration.
    ///
    /// # Errors
    /// See [`DeregisterError`]; nothing changed then.
    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError>;

    /// What peers need to connect: this endpoint and its registrations as they are now.
    fn blob(&self) -> Vec<u8>;

    /// Begins a connection by a peer's blob.
    ///
    /// # Errors
    /// See [`ConnectError`]; nothing changed then.
    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError>;

    /// Ends a connection; its operations end with events that follow.
    ///
    /// # Errors
    /// If there is no such connection.
    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer>;

    /// What is known of a connection: endpoint, regions, lane.
    ///
    /// # Errors
    /// If there is no such connection.
    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer>;

    /// Accepts an operation. Cheap: the batch is shared, not copied, and expanded later.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was posted then and no event follows.
    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError>;

    /// Asks an operation to stop.
    ///
    /// # Errors
    /// If the operation is not in flight: unknown, or its end is among the events.
    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp>;

    /// Takes back peers' access. At return it is excluded.
    ///
    /// # Errors
    /// See [`RevokeError`]; nothing changed then.
    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError>;

    /// Does what there is to do without blocking. `now` is the time since an origin of the driver's choice and never
    /// goes back. Gives the time at which it must be called again even if nothing wakes it; a time not after `now`
    /// means that there is more to do at once.
    fn step(&mut self, now: Duration) -> Option<Duration>;

    /// The next event, oldest first.
    fn next_event(&mut self) -> Option<Event>;

    /// Readable once something arrived that `step` has not yet seen; for a poller. Do not read from it.
    fn wake_fd(&self) -> BorrowedFd<'_>;

    /// Blocks until the wake source is readable, an event is queued or the time is over (`None`: no limit); true unless
    /// the time was over.
    fn wait(&mut self, timeout: Option<Duration>) -> bool;
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn capabilities(&self) -> &Capabilities {
        (**self).capabilities()
    }
    fn endpoint(&self) -> EndpointId {
        (**self).endpoint()
    }
    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        (**self).register(region)
    }
    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        (**self).deregister(region)
    }
    fn blob(&self) -> Vec<u8> {
        (**self).blob()
    }
    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        (**self).connect(blob)
    }
    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        (**self).disconnect(peer)
    }
    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        (**self).peer(peer)
    }
    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        (**self).submit(submission)
    }
    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        (**self).cancel(op)
    }
    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        (**self).revoke(scope)
    }
    fn step(&mut self, now: Duration) -> Option<Duration> {
        (**self).step(now)
    }
    fn next_event(&mut self) -> Option<Event> {
        (**self).next_event()
    }
    fn wake_fd(&self) -> BorrowedFd<'_> {
        (**self).wake_fd()
    }
    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        (**self).wait(timeout)
    }
}
