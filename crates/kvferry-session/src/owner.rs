//! One engine's owner: collects its ranks, meets other owners, keeps the leases of what it offers, and decides how each of
//! its requests ends.
//!
//! The session's driver tells it what happens ([`OwnerSession`]'s methods), carries out what
//! [`next_effect`](OwnerSession::next_effect) gives, and calls [`step`](OwnerSession::step) when the time that it last gave has
//! come. Links and rank links are numbers here; what they are made of only the driver knows.
//!
//! A request ends exactly once, with [`Effect::PullEnded`]; a lease ends exactly once, with [`Effect::LeaseClosed`], and its
//! blocks are the engine's again then, not before. Whatever a peer sends on a link harms that link's requests at most.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::digest::Digest;
use kvferry_geometry::manifest::CacheGroup;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::request::{DstGroup, SrcGroup};
use kvferry_geometry::spec::ModelSpec;
use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::handshake::{IdentityCheck, LocalSide};
use kvferry_proto::lease::{Closing, Offer};
use kvferry_proto::manifest::{Assembly, EngineManifest, JoinError};
use kvferry_proto::names::{ContentKey, EngineId, Epoch, Fence, LeaseId, ModelIdentity};
use kvferry_proto::peer::{MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, PeerMessage};
use kvferry_proto::rank::{Assurance, FromRank, PullId, ToRank};

use crate::outcome::{Delivered, Failed};

mod leases;
mod links;
mod loans;
mod pulls;
mod ranks;
#[cfg(test)]
mod tests;

use leases::Leases;
use links::Links;
use loans::Loans;
pub use loans::{Holder, Overlap};
use pulls::Pulls;
use ranks::Ranks;

/// A link to another owner. Counted by the session, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub u64);

/// A link to a rank of this engine. Counted by the session, never re-used by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RankLinkId(pub u64);

/// What an owner is.
#[derive(Clone, Debug)]
pub struct OwnerConfig {
    /// The engine's id.
    pub engine: EngineId,
    /// This life of it: random.
    pub epoch: Epoch,
    /// The model's items.
    pub spec: ModelSpec,
    /// The groups that share block tables.
    pub groups: Vec<CacheGroup>,
    /// How many ranks will join.
    pub ranks: u32,
    /// What the cache's bytes mean.
    pub identity: ModelIdentity,
    /// Whether peers must say the same.
    pub check: IdentityCheck,
    /// What becomes of items that only one of two engines has. Both engines' owners are asked, each with its own options; where
    /// these differ, the stricter one decides. They never change what moves.
    pub compat: CompatOptions,
    /// Whether one consumer's items are spread over all ranks that hold them alike. Peers must say the same.
    pub stripe: bool,
    /// How long a link may take until both hellos are in order, and a rank's link until it has joined.
    pub handshake: Duration,
    /// How long ranks may take to stop after a request has failed, before they count as in doubt.
    pub grace: Duration,
}

/// A wish to read another engine's blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PullWish {
    /// Where the producer's owner listens.
    pub address: String,
    /// The lease.
    pub fence: Fence,
    /// Length of the sequence.
    pub tokens: Tokens,
    /// Our blocks and what is cached, one entry for each group of our engine.
    pub groups: Vec<DstGroup>,
    /// What we think the cache was computed from.
    pub content_key: ContentKey,
    /// How sure we want to be.
    pub assurance: Assurance,
    /// How long it may take in all.
    pub deadline: Duration,
}

/// What the driver must do.
#[derive(Debug)]
#[non_exhaustive]
pub enum Effect {
    /// Connect to another owner, then say [`OwnerSession::link_opened`] or [`OwnerSession::link_closed`].
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
    /// All ranks have joined.
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
    /// A lease is over: its blocks are the engine's again.
    LeaseClosed {
        /// Which.
        fence: Fence,
        /// How it ended.
        how: Closing,
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
    #[error("this engine's rank {rank} is gone: {reason}; restart the engine")]
    RankLost {
        /// Which.
        rank: RankId,
        /// What is known.
        reason: String,
    },
}

/// How far the engine is.
#[derive(Debug)]
enum Life {
    /// Ranks are missing.
    Assembling(Box<Assembly>),
    /// All have joined.
    Ready(Arc<LocalSide>),
    /// All had joined, and one is gone.
    Broken(Arc<LocalSide>, RankId, String),
}

impl Life {
    fn local(&self) -> Option<&Arc<LocalSide>> {
        match self {
            Self::Assembling(_) => None,
            Self::Ready(local) | Self::Broken(local, ..) => Some(local),
        }
    }
}

/// One engine's owner. See the module's text.
#[derive(Debug)]
pub struct OwnerSession {
    config: OwnerConfig,
    life: Life,
    ranks: Ranks,
    links: Links,
    leases: Leases,
    loans: Loans,
    pulls: Pulls,
    effects: VecDeque<Effect>,
    now: Duration,
}

impl OwnerSession {
    /// An owner whose ranks have not joined.
    ///
    /// # Errors
    /// If an engine can't have so many ranks.
    pub fn new(config: OwnerConfig) -> Result<Self, JoinError> {
        let c = config.clone();
        let assembly = Assembly::new(c.engine, c.epoch, c.spec, c.groups, c.ranks)?;
        Ok(Self {
            config,
            life: Life::Assembling(Box::new(assembly)),
            ranks: Ranks::default(),
            links: Links::default(),
            leases: Leases::default(),
            loans: Loans::default(),
            pulls: Pulls::default(),
            effects: VecDeque::new(),
            now: Duration::ZERO,
        })
    }

    /// The engine, once all ranks have joined.
    #[must_use]
    pub fn manifest(&self) -> Option<&Arc<EngineManifest>> {
        self.life.local().map(|l| &l.manifest)
    }

    /// The ranks that have not joined.
    #[must_use]
    pub fn missing(&self) -> Vec<RankId> {
        match &self.life {
            Life::Assembling(assembly) => assembly.missing().collect(),
            _ => Vec::new(),
        }
    }

    /// What the driver must do next.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Offers blocks under a fresh random lease id. They are lent from now on, until [`Effect::LeaseClosed`].
    ///
    /// # Errors
    /// If the engine isn't complete, or the offer doesn't fit it; then nothing is lent.
    pub fn offer(&mut self, lease: LeaseId, offer: Offer) -> Result<Fence, OfferError> {
        let expected = self.config.groups.len();
        match &self.life {
            Life::Assembling(_) => return Err(OfferError::NotReady),
            Life::Broken(_, rank, reason) => {
                return Err(OfferError::RankLost { rank: *rank, reason: reason.clone() });
            }
            Life::Ready(_) if offer.groups.len() != expected => {
                return Err(OfferError::GroupCount { expected, got: offer.groups.len() });
            }
            Life::Ready(_) => {}
        }
        let (blocks, states) = src_counts(&offer.groups);
        if blocks > MAX_REQUEST_BLOCKS {
            return Err(OfferError::TooManyBlocks { got: blocks, limit: MAX_REQUEST_BLOCKS });
        }
        if states > MAX_REQUEST_STATES {
            return Err(OfferError::TooManyStates { got: states, limit: MAX_REQUEST_STATES });
        }
        if self.leases.is_open(lease) {
            return Err(OfferError::Repeated { lease });
        }
        if let Some(manifest) = self.life.local().map(|l| l.manifest.cache().clone()) {
            self.loans.read(&manifest, &loans::shown(&manifest, &offer.groups))?;
        }
        Ok(self.leases.open(&self.config.engine, self.config.epoch, lease, offer))
    }

    /// Blocks and slots that no request can be given any more, because a rank of one that failed may still write them.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.loans.quarantined()
    }

    /// Takes an offer back. Gives false where there is no such lease (any more).
    pub fn withdraw(&mut self, lease: LeaseId) -> bool {
        match self.leases.withdraw(lease) {
            Some(closed) => {
                self.close_lease(&closed);
                true
            }
            None => false,
        }
    }

    /// Begins a request; [`Effect::PullEnded`] follows, once. Blocks that it would write and that are lent already, to another
    /// request or by an open lease, end it at once.
    pub fn pull(&mut self, wish: PullWish, now: Duration) -> PullId {
        self.now = now;
        self.start_pull(wish)
    }

    /// Gives a request up; it ends when its ranks have stopped.
    pub fn cancel(&mut self, pull: PullId, now: Duration) {
        self.now = now;
        self.cancel_pull(pull);
    }

    /// Another owner has connected: gives its link's number.
    pub fn accept(&mut self, now: Duration) -> LinkId {
        self.now = now;
        self.accept_link()
    }

    /// A link that [`Effect::Connect`] asked for is up. Gives false where it came too late and isn't wanted any more: close
    /// it.
    #[must_use]
    pub fn link_opened(&mut self, link: LinkId, now: Duration) -> bool {
        self.now = now;
        self.greet(link);
        self.links.exists(link)
    }

    /// A link is gone, or could not be made. Unknown links are ignored.
    pub fn link_closed(&mut self, link: LinkId, reason: &str, now: Duration) {
        self.now = now;
        self.lose_link(link, reason);
    }

    /// Another owner's message.
    pub fn peer_message(&mut self, link: LinkId, message: PeerMessage, now: Duration) {
        self.now = now;
        self.on_peer_message(link, message);
    }

    /// A rank has connected: gives its link's number.
    pub fn accept_rank(&mut self, now: Duration) -> RankLinkId {
        self.now = now;
        self.ranks.accept(now.saturating_add(self.config.handshake))
    }

    /// A rank's link is gone.
    pub fn rank_closed(&mut self, link: RankLinkId, reason: &str, now: Duration) {
        self.now = now;
        self.lose_rank(link, reason);
    }

    /// A rank's message.
    pub fn rank_message(&mut self, link: RankLinkId, message: FromRank, now: Duration) {
        self.now = now;
        self.on_rank_message(link, message);
    }

    /// Lets time pass: ends what is overdue. Gives the next time at which something will be.
    pub fn step(&mut self, now: Duration) -> Option<Duration> {
        self.now = now;
        self.expire_links();
        self.expire_rank_links();
        self.expire_pulls();
        let deadlines = [self.links.next_deadline(), self.ranks.next_deadline(), self.pulls.next_deadline()];
        let next = deadlines.into_iter().flatten().min();
        next.map(|t| t.max(now))
    }

    /// Ends every request that is still open, as shut down, and takes every lease back; for the end of the owner itself.
    /// What ranks of a request have not ended counts as in doubt.
    pub fn shut_down(&mut self, now: Duration) {
        self.now = now;
        self.end_all_pulls();
        self.end_all_leases();
    }

    /// Another owner's bytes could not be read: tells it why, and closes its link.
    pub fn link_fault(&mut self, link: LinkId, reason: &str, now: Duration) {
        self.now = now;
        if self.links.exists(link) {
            self.refuse_link(link, vec![reason.into()]);
        }
    }

    /// How maps of peers are made for a salt.
    fn peer_options(&self, salt: u64) -> PeerOptions {
        PeerOptions { salt, stripe: self.config.stripe }
    }

    fn send_peer(&mut self, link: LinkId, message: PeerMessage) {
        if !self.links.exists(link) {
            return;
        }
        self.effects.push_back(Effect::SendPeer { link, message });
    }

    /// Sends to a rank, after telling it of the engine that the message names.
    fn send_rank(&mut self, rank: RankId, message: ToRank, about: Option<&Arc<EngineManifest>>) -> bool {
        let Some(link) = self.ranks.link(rank) else { return false };
        if let Some(peer) = about
            && self.ranks.tell(rank, peer.digest())
        {
            self.effects.push_back(Effect::SendRank { link, message: ToRank::Peer(peer.clone()) });
        }
        self.effects.push_back(Effect::SendRank { link, message });
        true
    }

    /// Lets the ranks forget an engine that no link leads to any more.
    fn forget(&mut self, digest: Digest) {
        for link in self.ranks.forget(digest) {
            self.effects.push_back(Effect::SendRank { link, message: ToRank::Forget(digest) });
        }
    }
}

/// Blocks and states that one side lists.
fn src_counts(groups: &[SrcGroup]) -> (u64, usize) {
    groups.iter().fold((0, 0), |(blocks, states): (u64, usize), g| match g {
        SrcGroup::Paged(g) => (blocks.saturating_add(g.table.len()), states),
        SrcGroup::State(g) => (blocks, states.saturating_add(g.checkpoints.len())),
    })
}

/// As [`src_counts`].
fn dst_counts(groups: &[DstGroup]) -> (u64, usize) {
    groups.iter().fold((0, 0), |(blocks, states): (u64, usize), g| match g {
        DstGroup::Paged(g) => (blocks.saturating_add(g.table.len()), states),
        DstGroup::State(g) => (blocks, states.saturating_add(g.more.len())),
    })
}

/// Who is where, shared by the parts of the session.
type ByRank<T> = BTreeMap<RankId, T>;
type DigestSet = BTreeSet<Digest>;
