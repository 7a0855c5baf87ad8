//! What a session wants its driver to do, and what it tells the engine.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::units::{BlockId, Name, RankId, Tokens};
use kvferry_proto::lease::Closing;
use kvferry_proto::manifest::{EngineManifest, JoinError};
use kvferry_proto::names::{EngineId, Fence, LeaseId};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{PullId, ToRank};

use super::Overlap;
use crate::outcome::{Delivered, Failed, Phase};

/// A link to another owner. Counted by the session, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub u64);

/// A link to a rank of this engine. Counted by the session, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RankLinkId(pub u64);

/// What the driver must do.
#[derive(Debug)]
#[non_exhaustive]
pub enum Effect {
    /// Connect to another owner, then say [`link_opened`](super::OwnerSession::link_opened) or
    /// [`link_closed`](super::OwnerSession::link_closed).
    Connect {
        /// The link's number.
        link: LinkId,
        /// Where the owner listens.
        address: String,
    },
    /// Send to another owner.
    SendPeer {
        /// On which link.
        link: LinkId,
        /// What.
        message: PeerMessage,
    },
    /// Close a link after what was sent on it. The session has forgotten it.
    ClosePeer {
        /// Which.
        link: LinkId,
    },
    /// Send to a rank.
    SendRank {
        /// On which link.
        link: RankLinkId,
        /// What.
        message: ToRank,
    },
    /// Close a rank's link after what was sent on it. The session has forgotten it.
    CloseRank {
        /// Which.
        link: RankLinkId,
    },
    /// All ranks have joined; again after one was lost and has come back.
    Ready(Arc<EngineManifest>),
    /// A rank may not join, or all together are unsound.
    JoinRefused(JoinError),
    /// A rank of the complete engine is gone.
    RankLost {
        /// Which.
        rank: RankId,
        /// What is known.
        reason: String,
    },
    /// A link is up: both owners know each other.
    LinkUp {
        /// Which.
        link: LinkId,
        /// The engine at its other end.
        peer: EngineId,
        /// The version that both speak.
        version: u16,
        /// From when it was begun or accepted.
        took: Duration,
    },
    /// A link that was up is gone.
    LinkDown {
        /// Which.
        link: LinkId,
        /// The engine at its other end.
        peer: EngineId,
        /// What is known.
        reason: String,
    },
    /// A link did not come up.
    LinkFailed {
        /// The other end, if it was us who connected.
        address: Option<String>,
        /// Every reason.
        reasons: Vec<String>,
        /// Whether one of the owners refused the other: then it is not tried again for the requests that waited.
        refused: bool,
    },
    /// A request has gone over to another phase.
    Phase {
        /// Which.
        pull: PullId,
        /// To which.
        phase: Phase,
    },
    /// A consumer has told us that it had read all of a lease, and was answered *Stale*.
    FenceRejected {
        /// What it named.
        fence: Fence,
        /// Who.
        peer: EngineId,
    },
    /// So much of a pushed request is in place; told if it was asked for.
    Progress {
        /// Which.
        pull: PullId,
        /// The tokens before this one, as far as they are to be written. Not delivered yet. 0 where an attempt has begun anew.
        tokens: Tokens,
    },
    /// Blocks have left quarantine because of their age, by [`OwnerConfig::reclaim_after`](super::OwnerConfig::reclaim_after): nothing
    /// has proven that nobody writes them any more.
    Reclaimed {
        /// The request that had left them.
        pull: PullId,
        /// How many blocks and slots.
        blocks: usize,
    },
    /// A peer has said two things that can't both be true, or what only a broken one says. The request that it concerns fails; what was
    /// said so is no evidence, and the peer is asked to stop and to say when it has.
    Contradiction {
        /// What it was about.
        fence: Fence,
        /// The peer.
        peer: EngineId,
        /// What it has said.
        what: String,
    },
    /// A lease is over: its blocks are the engine's again.
    LeaseClosed {
        /// Which, with the attempt that was bound last.
        fence: Fence,
        /// How it ended.
        how: Closing,
        /// From the offer on.
        age: Duration,
        /// Who had bound it.
        consumer: Option<EngineId>,
    },
    /// A request has ended.
    PullEnded {
        /// Which.
        pull: PullId,
        /// How.
        result: Box<Result<Delivered, Failed>>,
    },
}

/// Something could not be offered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// Not all ranks have joined.
    #[error("this engine's ranks have not all joined; await that before offering")]
    NotReady,
    /// The owner is being shut down.
    #[error("this engine is draining and offers nothing more")]
    Draining,
    /// Not one entry for each group.
    #[error("the offer lists {got} groups, the engine has {expected}; list one for each, in its order")]
    GroupCount {
        /// Groups of the engine.
        expected: usize,
        /// Groups listed.
        got: usize,
    },
    /// It lists too many blocks.
    #[error("the offer lists {got} blocks, more than the {limit} that one request can have")]
    TooManyBlocks {
        /// Blocks listed.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// It lists too many states.
    #[error("the offer lists {got} states, more than the {limit} that one request can have")]
    TooManyStates {
        /// States listed.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// It lists a block or slot that not every rank has.
    #[error("block {block} of group {group} is offered, but the group has {blocks} on every rank; ids count from 0")]
    BlockOutOfRange {
        /// The group.
        group: Name,
        /// The block or slot.
        block: BlockId,
        /// How many there are.
        blocks: BlockId,
    },
    /// Too many leases are open.
    #[error("{limit} leases are open, which is the limit; give leases an end, or raise the limit")]
    TooManyLeases {
        /// The limit.
        limit: usize,
    },
    /// The lease id is in use.
    #[error("lease {lease} is open already; lease ids must be random")]
    Repeated {
        /// The id.
        lease: LeaseId,
    },
    /// A request of this engine's own writes the blocks.
    #[error("blocks that are offered are not final: {0}")]
    Overlap(#[from] Overlap),
    /// A rank is gone.
    #[error("this engine's rank {rank} is gone: {reason}; it can join again")]
    RankLost {
        /// Which.
        rank: RankId,
        /// What is known.
        reason: String,
    },
}
