//! One engine's owner: collects its ranks, meets other owners, keeps the leases of what it offers, and decides how each of
//! its requests ends.
//!
//! The session's driver tells it what happens ([`OwnerSession`]'s methods), carries out what
//! [`next_effect`](OwnerSession::next_effect) gives, and calls [`step`](OwnerSession::step) when the time that it last gave has
//! come. Links and rank links are numbers here; what they are made of only the driver knows.
//!
//! A request ends exactly once, with [`Effect::PullEnded`]; a lease ends exactly once, with [`Effect::LeaseClosed`], and its
//! blocks are the engine's again then, not before. Whatever a peer sends on a link harms that link's requests at most.
//!
//! | part | what it keeps |
//! |---|---|
//! | `ranks` | our own ranks: joining, leaving, joining again |
//! | `links`, `roads` | links to other owners, and how to come to them; retries |
//! | `leases`, `asks` | what we offer, and what is asked about it |
//! | `pulls`, `attempts`, `ends`, `questions` | what we read: on the way, once more, ending, and what our ranks ask meanwhile |
//! | `beats` | the heartbeats of what we read |
//! | `streams`, `pushes` | what we offer while it is computed, and what our ranks write of it |
//! | `receiving` | what the producer's ranks write into blocks of ours, and the evidence that they have stopped |
//! | `loans` | which blocks are lent to whom |

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::digest::Digest;
use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::peers::PeerOptions;
use kvferry_geometry::request::{DstGroup, SrcGroup};
use kvferry_geometry::units::{GroupId, Name, RankId};
use kvferry_proto::handshake::{Allowed, Claim, Expected, Greeting, Hello, LocalSide};
use kvferry_proto::lease::Offer;
use kvferry_proto::manifest::{Assembly, EngineManifest, JoinError};
use kvferry_proto::names::{EngineId, Epoch, Fence, LeaseId};
use kvferry_proto::peer::{MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, PeerMessage};
use kvferry_proto::rank::{FromRank, PullId, ToRank};

use crate::pairing::{Acquaintances, Pairings};
use crate::snapshot::Snapshot;

mod asks;
mod attempts;
mod beats;
mod config;
mod effect;
mod ends;
mod leases;
mod links;
mod loans;
mod pulls;
mod pushes;
mod questions;
mod ranks;
mod receiving;
mod roads;
mod show;
mod streams;
#[cfg(test)]
mod tests;
mod timers;

use asks::Asks;
use beats::Beats;
pub use config::{
    Backoff, FailurePolicy, LeaseTerms, Limits, Mode, OwnerConfig, PhaseLimits, PullWish, Remedy, Source,
    USUAL_PRIORITY,
};
pub use effect::{Effect, LinkId, OfferError, RankLinkId};
use leases::Leases;
use links::Links;
use loans::Loans;
pub use loans::{Holder, Overlap};
use pulls::Pulls;
use pushes::Pushes;
use ranks::Ranks;
use roads::Roads;
pub use streams::StreamError;

/// When an offer ends, if nobody reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Ttl {
    /// As the owner's [`LeaseTerms`] say.
    #[default]
    Usual,
    /// After so long.
    For(Duration),
    /// Never: its blocks are lent until it is read or taken back.
    Never,
}

/// How far the engine is.
#[derive(Debug)]
enum Life {
    /// Ranks are missing.
    Assembling,
    /// All have joined.
    Ready(Arc<LocalSide>),
    /// All had joined, and one is gone. It may join again; the engine has a new epoch then.
    Broken { local: Arc<LocalSide>, rank: RankId, reason: String },
}

impl Life {
    fn local(&self) -> Option<&Arc<LocalSide>> {
        match self {
            Self::Assembling => None,
            Self::Ready(local) | Self::Broken { local, .. } => Some(local),
        }
    }
}

/// Whether something new is begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Service {
    Open,
    /// What has begun goes on to its end.
    Draining,
}

impl Service {
    fn is_draining(self) -> bool {
        self == Self::Draining
    }
}

/// One engine's owner. See the module's text.
#[derive(Debug)]
pub struct OwnerSession {
    config: OwnerConfig,
    /// The present one of the engine.
    epoch: Epoch,
    life: Life,
    assembly: Assembly,
    service: Service,
    ranks: Ranks,
    links: Links,
    roads: Roads,
    beats: Beats,
    leases: Leases,
    asks: Asks,
    loans: Loans,
    pulls: Pulls,
    pushes: Pushes,
    /// When those who are in doubt are asked again.
    evidence_due: Option<Duration>,
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
        Ok(Self {
            epoch: config.epoch,
            assembly: Assembly::new(c.engine, c.epoch, c.spec, c.groups, c.ranks)?,
            config,
            life: Life::Assembling,
            service: Service::Open,
            ranks: Ranks::default(),
            links: Links::default(),
            roads: Roads::default(),
            beats: Beats::default(),
            leases: Leases::default(),
            asks: Asks::default(),
            loans: Loans::default(),
            pulls: Pulls::default(),
            pushes: Pushes::default(),
            evidence_due: None,
            effects: VecDeque::new(),
            now: Duration::ZERO,
        })
    }

    /// What it computes of pairs of caches is shared with the other sessions of the process that have these.
    #[must_use]
    pub fn with_pairings(mut self, pairings: Pairings) -> Self {
        self.links.known = Acquaintances::sharing(pairings);
        self
    }

    /// The engine, once all ranks have joined.
    #[must_use]
    pub fn manifest(&self) -> Option<&Arc<EngineManifest>> {
        self.life.local().map(|l| &l.manifest)
    }

    /// What is said first to an owner that was not met before, once all ranks have joined: the same for all, until
    /// [`Effect::Ready`] comes again. It is long, so that a driver may want to encode it once.
    #[must_use]
    pub fn hello(&self) -> Option<Hello> {
        self.life.local().map(|local| Greeting::start(local.clone(), Expected::default()).1)
    }

    /// The ranks that have not joined.
    #[must_use]
    pub fn missing(&self) -> Vec<RankId> {
        self.assembly.missing().collect()
    }

    /// What the driver must do next.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Offers blocks under a fresh random lease id. They are lent from now on, until [`Effect::LeaseClosed`].
    ///
    /// # Errors
    /// If the engine isn't complete, or the offer doesn't fit it; then nothing is lent.
    pub fn offer(&mut self, lease: LeaseId, offer: Offer, ttl: Ttl, now: Duration) -> Result<Fence, OfferError> {
        self.now = now;
        let manifest = match &self.life {
            Life::Assembling => return Err(OfferError::NotReady),
            Life::Broken { rank, reason, .. } => {
                return Err(OfferError::RankLost { rank: *rank, reason: reason.clone() });
            }
            Life::Ready(local) => local.manifest.cache().clone(),
        };
        if self.service.is_draining() {
            return Err(OfferError::Draining);
        }
        let places = self.offered(&manifest, &offer.groups)?;
        if self.leases.is_open(lease) {
            return Err(OfferError::Repeated { lease });
        }
        let limit = self.config.limits.leases;
        if self.leases.len() >= limit {
            return Err(OfferError::TooManyLeases { limit });
        }
        self.loans.read(&manifest, &places)?;
        let ttl = match ttl {
            Ttl::Usual => self.config.lease.ttl,
            Ttl::For(time) => Some(time),
            Ttl::Never => None,
        };
        Ok(self.open_lease(lease, offer, ttl, places))
    }

    /// The blocks and slots that these groups show, if they can be offered.
    fn offered(&self, m: &Manifest, groups: &[SrcGroup]) -> Result<Vec<loans::Place>, OfferError> {
        let expected = self.config.groups.len();
        if groups.len() != expected {
            return Err(OfferError::GroupCount { expected, got: groups.len() });
        }
        let (blocks, states) = src_counts(groups);
        if blocks > MAX_REQUEST_BLOCKS {
            return Err(OfferError::TooManyBlocks { got: blocks, limit: MAX_REQUEST_BLOCKS });
        }
        if states > MAX_REQUEST_STATES {
            return Err(OfferError::TooManyStates { got: states, limit: MAX_REQUEST_STATES });
        }
        let places = loans::shown(m, groups);
        // No consumer could read it; and what names no block at all can't even be told to one.
        match beyond(m, groups, &places) {
            Some(error) => Err(error),
            None => Ok(places),
        }
    }

    /// Leases of ours that somebody has bound.
    #[must_use]
    pub fn bound_leases(&self) -> usize {
        self.leases.all_bound()
    }

    /// Blocks and slots that no request can be given any more, because a rank of ours or of a producer may still write them for
    /// one that failed.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.loans.quarantined()
    }

    /// Takes an offer back. Gives false where there is no such lease (any more).
    pub fn withdraw(&mut self, lease: LeaseId, now: Duration) -> bool {
        self.now = now;
        self.withdraw_lease(lease)
    }

    /// Tells the producer of a lease, as far as it can be reached, that nobody will read it: its blocks are free then, without
    /// waiting for the lease's end.
    pub fn decline(&mut self, address: &str, fence: Fence, now: Duration) {
        self.now = now;
        self.decline_lease(address, fence);
    }

    /// Begins nothing more: offers and requests are refused from now on. What has begun goes on to its end.
    pub fn drain(&mut self) {
        self.service = Service::Draining;
    }

    /// Whether no request and no lease is open.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.pulls.is_empty() && self.leases.len() == 0
    }

    /// Begins a request; [`Effect::PullEnded`] follows, once. Blocks that it would write and that are lent already, to another
    /// request or by an open lease, end it at once. A wish in a box stays in it; without one it is put into one.
    pub fn pull(&mut self, wish: impl Into<Box<PullWish>>, now: Duration) -> PullId {
        self.now = now;
        self.start_pull(wish.into())
    }

    /// Gives a request up; it ends when its ranks have stopped.
    pub fn cancel(&mut self, pull: PullId, now: Duration) {
        self.now = now;
        self.cancel_pull(pull);
    }

    /// Another owner has connected: gives its link's number. `proven` are the engines for which its credentials stand; `None`
    /// where it has none.
    pub fn accept(&mut self, proven: Option<Arc<Allowed>>, now: Duration) -> LinkId {
        self.now = now;
        self.accept_link(proven, Duration::ZERO)
    }

    /// As [`accept`](Self::accept), of one whose end has taken `took` to prove who it is: that counts for the time that the
    /// handshake may take.
    pub fn accept_after(&mut self, took: Duration, proven: Option<Arc<Allowed>>, now: Duration) -> LinkId {
        self.now = now;
        self.accept_link(proven, took)
    }

    /// A link that [`Effect::Connect`] asked for is up, with what its other end has proven, as for [`accept`](Self::accept). Gives
    /// false where it came too late and isn't wanted any more: close it.
    #[must_use]
    pub fn link_opened(&mut self, link: LinkId, proven: Option<Arc<Allowed>>, now: Duration) -> bool {
        self.now = now;
        self.link_is_open(link, proven);
        self.links.exists(link)
    }

    /// A link is gone, or could not be made. Unknown links are ignored.
    pub fn link_closed(&mut self, link: LinkId, reason: &str, now: Duration) {
        self.now = now;
        self.lose_link(link, reason);
    }

    /// A link that [`Effect::Connect`] asked for may not be made, now or later: who waits for it fails at once, with this reason, which
    /// says what to set. Unknown links are ignored.
    pub fn link_forbidden(&mut self, link: LinkId, reason: &str, now: Duration) {
        self.now = now;
        self.forbid_link(link, reason);
    }

    /// Another owner's hello claims this. It follows as a [message](Self::peer_message) once its manifest is proven, which for a large
    /// engine takes longer than all else: told of the claim, the session answers meanwhile, and otherwise later.
    pub fn peer_claims(&mut self, link: LinkId, claim: &Claim, now: Duration) {
        self.now = now;
        self.on_claim(link, claim);
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

    /// Lets time pass: ends what is overdue, does what is due. Gives the next time at which something will be.
    pub fn step(&mut self, now: Duration) -> Option<Duration> {
        self.now = now;
        self.expire_links();
        self.expire_rank_links();
        self.expire_leases();
        self.expire_pulls();
        self.send_beats();
        self.retry_roads();
        self.reclaim();
        self.ask_again();
        let due = [
            self.links.next_due(),
            self.ranks.next_deadline(),
            self.leases.next_end(),
            self.pulls.next_due(),
            self.beats.next_due(),
            self.roads.next_due(),
            self.evidence_due,
            self.config.reclaim_after.and_then(|after| Some(self.loans.oldest()?.saturating_add(after))),
        ];
        let next = due.into_iter().flatten().min();
        next.map(|t| t.max(now))
    }

    /// What is open, what each waits for, and since when.
    #[must_use]
    pub fn snapshot(&self, now: Duration) -> Snapshot {
        self.show(now)
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

/// A block or slot that is offered, and that not every rank has.
fn beyond(m: &Manifest, groups: &[SrcGroup], places: &[loans::Place]) -> Option<OfferError> {
    let no_block = |(id, g): (GroupId, &SrcGroup)| match g {
        SrcGroup::Paged(g) => g.table.iter().find(|b| b.get() == u32::MAX).map(|b| (id, b)),
        SrcGroup::State(_) => None,
    };
    let beyond = places.iter().copied().find(|(group, block)| *block >= m.blocks(*group));
    let (group, block) = beyond.or_else(|| (0..).map(GroupId::new).zip(groups).find_map(no_block))?;
    let name = m.groups().get(group.index()).map_or_else(|| Name::new("?"), |g| g.name.clone());
    Some(OfferError::BlockOutOfRange { group: name, block, blocks: m.blocks(group) })
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
