//! Further attempts of a request: from other replicas, when everything of the attempt before has stopped.

use super::{BTreeSet, Effect, Fence, Life, LinkId, OwnerSession, PullId, RankId};

use kvferry_geometry::units::Tokens;
use kvferry_proto::names::{Attempt, pairing_salt};
use kvferry_proto::peer::{PeerMessage, ReadsEnd, Release};
use kvferry_proto::rank::{RankFault, Stage};
use kvferry_proto::request::{Ended, Wanted};

use super::config::Mode;
use super::pulls::{Asked, State};
use crate::outcome::FailureCause;

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
        let of_source = |fault: &&RankFault| {
            let stage =
                matches!(fault.stage, Stage::Connect | Stage::Submit | Stage::Read | Stage::Write | Stage::Cancelled);
            stage && !fault.in_doubt && fault.bad.is_empty()
        };
        let worth =
            pull.tries_here < pull.wish.policy.attempts && !pull.is_late(self.now) && faults.iter().all(of_source);
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

    /// Goes over to the next attempt. One that `counts` is one of those that a source may have.
    pub(super) fn try_again(&mut self, id: PullId, link: LinkId, wanted: Wanted, counts: bool) {
        self.pulls.tried(id, counts);
        let attempt = wanted.fence().attempt;
        if let Some(pull) = self.pulls.open.get_mut(&id) {
            (pull.attempt, pull.asked, pull.lease_end) = (attempt, Asked::default(), None);
            // What is known to have stopped, and to be in place, is of the attempt before.
            pull.stopped.clear();
            let told = std::mem::replace(&mut pull.granted.progress, Tokens::ZERO);
            if told > Tokens::ZERO && pull.wish.mode == (Mode::Push { progress: true }) {
                self.effects.push_back(Effect::Progress { pull: id, tokens: Tokens::ZERO });
            }
        }
        self.enter(id, State::Linking(wanted));
        self.bind(id, link);
    }

    /// Goes over to another producer, if there is one that hasn't been tried, and this failure is of the one that was.
    pub(super) fn another_source(&mut self, id: PullId, cause: &FailureCause, ended: Option<&Ended>) -> bool {
        let Some(pull) = self.pulls.open.get(&id) else { return false };
        let in_doubt = ended.is_some_and(|e| e.results().values().any(|r| r.as_ref().is_err_and(|f| f.in_doubt)));
        // What is in doubt may still write the blocks that the other would.
        let hopeless = in_doubt || pull.doubt.is_some() || pull.is_late(self.now) || !cause.is_of_producer();
        if hopeless || !matches!(self.life, Life::Ready(_)) {
            return false;
        }
        let (former, before, key) = (pull.link, pull.road, pull.wish.content_key);
        let Some(next) = self.pulls.next_source(id) else { return false };
        let road = self.road_to(&next.address, &next.fence.engine);
        let wanted = Wanted::new(next.fence.clone(), key);
        if let Some((link, fence)) = self.pulls.open.get_mut(&id).and_then(|pull| pull.take_unanswered()) {
            self.links.owe(link, fence);
        }
        self.pulls.change_source(id, next, road);
        if before != road {
            self.roads.stop_waiting(before, id);
        }
        if let Some(link) = former {
            self.links.used(link, self.now);
            self.retire_link(link);
        }
        self.enter(id, State::Linking(wanted));
        self.seek_link(road, id);
        true
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
