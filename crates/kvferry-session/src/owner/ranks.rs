//! The owner's own ranks: joining, leaving, and what each was told.

use super::{BTreeMap, ByRank, Digest, DigestSet, Duration, Effect, Life, OwnerSession, RankId, RankLinkId};
use std::sync::Arc;

use kvferry_proto::handshake::{Expected, Greeting, LocalSide};
use kvferry_proto::manifest::{JoinError, Joined, RankJoin};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{FromRank, ToRank};
use kvferry_proto::wire;

/// One rank's link.
#[derive(Debug)]
struct RankLink {
    /// By when it must have joined.
    deadline: Duration,
    /// Which rank it is; `None` until it has joined.
    rank: Option<RankId>,
    /// The engines it was told of.
    told: DigestSet,
}

#[derive(Debug, Default)]
pub(super) struct Ranks {
    last: u64,
    links: BTreeMap<RankLinkId, RankLink>,
    by_rank: ByRank<RankLinkId>,
}

impl Ranks {
    pub(super) fn accept(&mut self, deadline: Duration) -> RankLinkId {
        self.last += 1;
        let link = RankLinkId(self.last);
        self.links.insert(link, RankLink { deadline, rank: None, told: DigestSet::new() });
        link
    }

    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.links.values().filter(|l| l.rank.is_none()).map(|l| l.deadline).min()
    }

    pub(super) fn link(&self, rank: RankId) -> Option<RankLinkId> {
        self.by_rank.get(&rank).copied()
    }

    fn rank(&self, link: RankLinkId) -> Option<RankId> {
        self.links.get(&link)?.rank
    }

    /// Those that have joined.
    pub(super) fn joined(&self) -> Vec<RankId> {
        self.by_rank.keys().copied().collect()
    }

    /// Notes that a rank is told of an engine; true if it was not before.
    pub(super) fn tell(&mut self, rank: RankId, digest: Digest) -> bool {
        let Some(link) = self.link(rank) else { return false };
        self.links.get_mut(&link).is_some_and(|l| l.told.insert(digest))
    }

    /// The links of the ranks that had been told of an engine.
    pub(super) fn forget(&mut self, digest: Digest) -> Vec<RankLinkId> {
        self.links.iter_mut().filter_map(|(id, l)| l.told.remove(&digest).then_some(*id)).collect()
    }
}

impl OwnerSession {
    pub(super) fn on_rank_message(&mut self, link: RankLinkId, message: FromRank) {
        let rank = match self.ranks.links.get(&link) {
            Some(l) => l.rank,
            None => return,
        };
        match (rank, message) {
            (None, FromRank::Join(join)) => self.join(link, join),
            (Some(rank), FromRank::Pulled { pull, result }) => self.on_pulled(rank, pull, result),
            (Some(rank), FromRank::Pushed { push, result }) => self.on_pushed(rank, push, result),
            (Some(rank), FromRank::PushProgress { push, tokens }) => self.on_push_progress(rank, push, tokens),
            (Some(rank), FromRank::DigestWanted { pull, src, windows }) => {
                self.on_digest_wanted(rank, pull, src, windows);
            }
            (Some(_), FromRank::Digested { ticket, pieces }) => self.on_digested(ticket, pieces),
            (Some(rank), FromRank::GatherWanted { pull, src, gathered }) => {
                self.on_gather_wanted(rank, pull, src, gathered);
            }
            (Some(_), FromRank::Gathered { ticket, result }) => self.on_gathered(ticket, result),
            (joined, _) => {
                let what = if joined.is_some() { "it joined twice" } else { "it did not join first" };
                self.refuse_rank(link, what.into());
            }
        }
    }

    fn join(&mut self, link: RankLinkId, join: RankJoin) {
        let rank = join.rank;
        if let Life::Broken { .. } = self.life {
            // What comes of it is another life of the engine, for its peers too.
            self.assembly.renew(self.epoch.after());
        }
        match self.assembly.join(join) {
            Err(error) => {
                self.refuse_rank(link, error.to_string());
                self.effects.push_back(Effect::JoinRefused(error));
            }
            Ok(joined) => {
                let complete = match joined {
                    Joined::Complete(manifest) => {
                        let local = LocalSide {
                            identity: self.config.identity.clone(),
                            check: self.config.check,
                            stripe: self.config.stripe,
                            allowed: self.config.allowed.clone(),
                            manifest: Arc::new(manifest),
                        };
                        if let Err(error) = fits_a_frame(&local) {
                            self.assembly.leave(rank);
                            self.refuse_rank(link, error.to_string());
                            return self.effects.push_back(Effect::JoinRefused(error));
                        }
                        Some(local)
                    }
                    Joined::Waiting => None,
                };
                if let Some(l) = self.ranks.links.get_mut(&link) {
                    l.rank = Some(rank);
                }
                self.ranks.by_rank.insert(rank, link);
                self.rank_is_new_in_pulls(rank);
                self.rank_is_new_in_pushes(rank);
                if let Some(local) = complete {
                    self.complete(local);
                }
            }
        }
    }

    fn complete(&mut self, local: LocalSide) {
        let manifest = local.manifest.clone();
        if self.epoch != manifest.epoch() {
            self.close_old_links();
        }
        self.epoch = manifest.epoch();
        self.pushes.live(self.epoch);
        self.life = Life::Ready(Arc::new(local));
        // What was computed with the manifest before is of another engine.
        self.links.forget_pairings();
        self.tell_ranks(|| ToRank::Welcome(manifest.clone()));
        self.effects.push_back(Effect::Ready(manifest));
        self.greet_waiting();
    }

    /// Sends away those who have connected and say nothing.
    pub(super) fn expire_rank_links(&mut self) {
        let now = self.now;
        let late = |l: &RankLink| l.rank.is_none() && l.deadline <= now;
        let late: Vec<RankLinkId> = self.ranks.links.iter().filter(|(_, l)| late(l)).map(|(id, _)| *id).collect();
        for link in late {
            self.refuse_rank(link, format!("it did not join within {:?}", self.config.handshake));
        }
    }

    fn refuse_rank(&mut self, link: RankLinkId, reason: String) {
        self.effects.push_back(Effect::SendRank { link, message: ToRank::Refused(reason.clone()) });
        self.effects.push_back(Effect::CloseRank { link });
        self.lose_rank(link, &reason);
    }

    pub(super) fn lose_rank(&mut self, link: RankLinkId, reason: &str) {
        let rank = self.ranks.rank(link);
        self.ranks.links.remove(&link);
        let Some(rank) = rank else { return };
        self.ranks.by_rank.remove(&rank);
        match &self.life {
            Life::Assembling => self.assembly.leave(rank),
            _ => self.assembly.lose(rank),
        }
        match &self.life {
            Life::Assembling => {}
            Life::Ready(local) => {
                let local = local.clone();
                self.life = Life::Broken { local, rank, reason: reason.into() };
                self.effects.push_back(Effect::RankLost { rank, reason: reason.into() });
            }
            Life::Broken { .. } => self.effects.push_back(Effect::RankLost { rank, reason: reason.into() }),
        }
        self.rank_lost_in_pulls(rank, reason);
        self.rank_lost_in_pushes(rank, reason);
        self.rank_lost_in_leases(rank, reason);
    }
}

/// Whether the engine can be described to its ranks and to peers; a hello is the longest description.
fn fits_a_frame(local: &LocalSide) -> Result<(), JoinError> {
    let (_, hello) = Greeting::start(Arc::new(local.clone()), Expected::default());
    match wire::encode_peer(&PeerMessage::Hello(hello)) {
        Ok(_) => Ok(()),
        Err(error) => Err(JoinError::TooLong(error.to_string())),
    }
}
