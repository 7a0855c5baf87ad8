//! Further attempts of a request: from other replicas, when everything of the attempt before has stopped.

use super::{BTreeSet, Fence, Life, LinkId, OwnerSession, PullId, RankId};

use kvferry_proto::names::{Attempt, pairing_salt};
use kvferry_proto::peer::{PeerMessage, ReadsEnd, Release};
use kvferry_proto::rank::{RankFault, Stage};
use kvferry_proto::request::{Ended, Wanted};

use super::pulls::{Asked, State};

impl OwnerSession {
    /// Whether reads that have failed are worth another attempt: sources could not be reached or read, all has stopped, and the
    /// next map of peers names others.
    pub(super) fn another_attempt(&mut self, id: PullId, link: LinkId, ended: &Ended) -> Option<Wanted> {
        let wanted = ended.again(self.pulls.open.get(&id)?.wish.content_key)?;
        let faults: Vec<&RankFault> = ended.results().values().filter_map(|r| r.as_ref().err()).collect();
        let worth = self.is_worth_another(id, link, wanted.fence(), &ended.sources(), &faults);
        worth.then_some(wanted)
    }

    /// The same, for an attempt of which these pairs of ranks (ours, the producer's) have moved bytes, with these faults.
    pub(super) fn is_worth_another(
        &mut self,
        id: PullId,
        link: LinkId,
        next: &Fence,
        former: &BTreeSet<(RankId, RankId)>,
        faults: &[&RankFault],
    ) -> bool {
        self.next_map_differs(id, link, next, former, faults).unwrap_or(false)
    }

    fn next_map_differs(
        &mut self,
        id: PullId,
        link: LinkId,
        next: &Fence,
        former: &BTreeSet<(RankId, RankId)>,
        faults: &[&RankFault],
    ) -> Option<bool> {
        let pull = self.pulls.open.get(&id)?;
        // The producer knows the engine that asked, not the one that a rank of ours has made anew meanwhile.
        let ours = self.links.standing(link)?.1;
        if ours != self.life.local().map(|l| l.manifest.digest()) {
            return Some(false);
        }
        let made = pull.attempt.get().saturating_sub(pull.wish.fence.attempt.get()).saturating_add(1);
        let of_source = |fault: &&RankFault| {
            let stage =
                matches!(fault.stage, Stage::Connect | Stage::Submit | Stage::Read | Stage::Write | Stage::Cancelled);
            stage && !fault.in_doubt && fault.bad.is_empty()
        };
        let worth = made < pull.wish.attempts && !pull.is_late(self.now) && faults.iter().all(of_source);
        // A rank of ours that is gone reads nothing by another map either.
        if !worth || !self.links.knows_leases(link) || !matches!(self.life, Life::Ready(_)) {
            return Some(false);
        }
        let (before, lease) = (pull.pairing?.peer_map, pull.wish.fence.lease);
        let options = self.peer_options(pairing_salt(&self.config.engine, lease, next.attempt));
        let (_, direction) = self.reading(link)?;
        let map = direction.ok()?.map(options).ok()?;
        let others = map.pairs().iter().any(|p| !former.contains(&(p.dst(), p.src())));
        Some(others && map.digest() != before)
    }

    pub(super) fn try_again(&mut self, id: PullId, link: LinkId, wanted: Wanted) {
        let attempt = wanted.fence().attempt;
        if let Some(pull) = self.pulls.open.get_mut(&id) {
            (pull.attempt, pull.asked, pull.lease_end) = (attempt, Asked::default(), None);
            // What is known to have stopped is of the attempt before.
            pull.stopped.clear();
        }
        self.enter(id, State::Linking(wanted));
        self.bind(id, link);
    }

    /// A further attempt was refused: the one before it is still bound at the producer.
    pub(super) fn release_former(&mut self, id: PullId, link: LinkId) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let former = pull.attempt.get().checked_sub(1).filter(|n| *n >= pull.wish.fence.attempt.get());
        if let Some(former) = former {
            let fence = Fence { attempt: Attempt::new(former), ..pull.wish.fence.clone() };
            self.send_peer(link, PeerMessage::Release(Release { fence, reads: ReadsEnd::Abandoned }));
        }
    }
}
