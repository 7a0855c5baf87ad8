//! What our ranks ask of a producer while they read: digests, and to gather. Only what was asked for goes back to a rank.

use super::{OwnerSession, PullId};

use kvferry_geometry::units::RankId;
use kvferry_proto::handshake::Abilities;
use kvferry_proto::peer::{Gather, GatherAnswer, Gathered, PeerMessage, RunDigest, RunDigestAnswer, Window};
use kvferry_proto::rank::ToRank;

use super::LinkId;
use super::pulls::State;

impl OwnerSession {
    pub(super) fn on_digest_wanted(&mut self, rank: RankId, id: PullId, src: RankId, windows: Vec<Window>) {
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        match &pull.state {
            State::Reading(reading) if reading.is_pending(rank) => {
                pull.asked.digests.insert((src, rank));
                let (fence, tokens, groups) = (pull.fence(), pull.wish.tokens, pull.wish.groups.clone());
                let question = RunDigest { fence, src, dst: rank, tokens, groups, windows };
                if let Some(link) = pull.link {
                    self.send_peer(link, PeerMessage::RunDigest(question));
                }
            }
            // The rank is being stopped, and will hear of it.
            _ => {}
        }
    }

    pub(super) fn on_run_digest_answer(&mut self, link: LinkId, answer: RunDigestAnswer) {
        let Some(id) = self.pulls.find(&answer.fence, link) else { return };
        let (src, pieces) = (answer.src, answer.pieces);
        // Only what was asked for goes to a rank.
        let asked = self.pulls.open.get_mut(&id).is_some_and(|p| p.asked.digests.remove(&(src, answer.dst)));
        if !asked {
            return;
        }
        // A rank that is gone has ended already.
        self.send_rank(answer.dst, ToRank::DigestAnswer { pull: id, src, pieces }, None);
    }

    pub(super) fn on_gather_wanted(&mut self, rank: RankId, id: PullId, src: RankId, gathered: Gathered) {
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        match &pull.state {
            State::Reading(reading) if reading.is_pending(rank) => {}
            // The rank is being stopped, and will hear of it.
            _ => return,
        }
        let Some(link) = pull.link else { return };
        if !self.links.has(link, Abilities::GATHER) {
            let result = Err("the producer's owner does not know how to gather".into());
            self.send_rank(rank, ToRank::GatherAnswer { pull: id, src, result }, None);
            return;
        }
        pull.asked.gathers.insert((src, rank));
        let (fence, tokens, groups) = (pull.fence(), pull.wish.tokens, pull.wish.groups.clone());
        self.send_peer(link, PeerMessage::Gather(Gather { fence, src, dst: rank, gathered, tokens, groups }));
    }

    pub(super) fn on_gather_answer(&mut self, link: LinkId, answer: GatherAnswer) {
        let Some(id) = self.pulls.find(&answer.fence, link) else { return };
        let GatherAnswer { src, dst, result, .. } = answer;
        // Only what was asked for goes to a rank.
        let asked = self.pulls.open.get_mut(&id).is_some_and(|p| p.asked.gathers.remove(&(src, dst)));
        if asked {
            self.send_rank(dst, ToRank::GatherAnswer { pull: id, src, result }, None);
        }
    }
}
