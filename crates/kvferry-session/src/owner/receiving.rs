//! The consumer's side of push: the producer's ranks write into blocks of ours, and our blocks stay lent until each of those ranks
//! is known to have stopped.
//!
//! ```text
//!   Asking --Bound--> Receiving --Written, whole--> Reading (zero, compare) --> as for a pull
//!     |                   |  |
//!     |                   |  \--Written, broken; Closed: restarted--> (another attempt, or over)
//!     \-------------------+--(it must stop)--> Halting --Written, Stopped, refused--> over
//!                                                  \--nothing is heard--> over, writers in doubt
//! ```
//!
//! Evidence may come later, when the request has long ended: its producer is asked on every new link.

use super::{BTreeMap, BTreeSet, Duration, Effect, Fence, LinkId, OwnerSession, PullId};
use std::sync::Arc;

use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::handshake::Abilities;
use kvferry_proto::lease::Closing;
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::peer::{Bind, PeerMessage};
use kvferry_proto::push::{
    Arrival, Progress, PushBind, Receiving, Room, Stop, Stoppage, Stopped, WriterEnd, WriterReport, Written, in_doubt,
};
use kvferry_proto::rank::{RankFault, RankReport, Stage};
use kvferry_proto::request::{RankResult, Step, Wanted};

use super::config::{Mode, Remedy};
use super::loans::Writers;
use super::pulls::State;
use crate::outcome::FailureCause;

/// What is known of the producer's writers of an attempt.
#[derive(Debug, Default)]
pub(super) struct Granted {
    /// Which of our ranks each of them writes to, by the map of peers, and which life of it was told to.
    writers: BTreeMap<RankId, (kvferry_proto::names::Epoch, BTreeSet<RankId>)>,
    /// What each has done, once all have.
    reports: BTreeMap<RankId, WriterReport>,
    /// When they were told.
    at: Duration,
    /// Ranks of ours that have begun another life since: what is written to their memory of before changes nothing.
    gone: BTreeSet<RankId>,
    /// The tokens before this one are in place.
    pub(super) progress: Tokens,
}

impl Granted {
    /// Those of these writers that write, with all that is needed to tell later that they have stopped.
    pub(super) fn doubt(&self, fence: Fence, who: &BTreeSet<RankId>) -> Writers {
        let writers = self.writers.iter().filter(|(rank, _)| who.contains(rank));
        let ranks = writers.filter_map(|(rank, (epoch, to))| {
            let to: BTreeSet<RankId> = to.difference(&self.gone).copied().collect();
            (!to.is_empty()).then_some((*rank, (*epoch, to)))
        });
        Writers { fence, granted: self.at, ranks: ranks.collect() }
    }

    /// A rank of ours has begun another life.
    pub(super) fn forget(&mut self, rank: RankId) {
        self.gone.insert(rank);
    }

    /// Keeps what its writers say of those whom they were to write to.
    fn keep(&mut self, mut reports: BTreeMap<RankId, WriterReport>) {
        for (src, report) in &mut reports {
            let to = self.writers.get(src).map(|(_, to)| to);
            report.writes.retain(|w| to.is_some_and(|to| to.contains(&w.dst)));
        }
        self.reports = reports;
    }

    pub(super) fn writers(&self) -> BTreeSet<RankId> {
        self.writers.keys().copied().collect()
    }

    /// Who wrote to whom: our rank, the producer's.
    pub(super) fn pairs(&self) -> BTreeSet<(RankId, RankId)> {
        self.writers.iter().flat_map(|(src, (_, to))| to.iter().map(move |dst| (*dst, *src))).collect()
    }

    /// Adds what the writers have said to what a rank of ours says of the same bytes. Both have computed them from the same plan: a
    /// writer that has written more or less has not written what was asked for.
    pub(super) fn complete(&self, rank: RankId, result: RankResult) -> RankResult {
        let mut report: RankReport = result?;
        for source in &mut report.sources {
            let Some(of_writer) = self.reports.get(&source.src) else { continue };
            let write = of_writer.writes.iter().find(|w| w.dst == rank);
            let bytes = write.map_or(0, |w| w.bytes.get());
            if bytes != source.bytes.get() {
                let (src, plan) = (source.src, source.bytes);
                let text = format!("source rank {src} says that it wrote {bytes} bytes, the map of peers says {plan}");
                return Err(RankFault { stage: Stage::Write, text, in_doubt: false, bad: Vec::new() });
            }
            if let Some(w) = write {
                (source.lane, source.took) = (w.lane.clone(), w.took);
                source.descriptors_after = source.descriptors_after.min(w.descriptors.max(1));
            }
            report.queued = report.queued.max(of_writer.queued);
            report.slices = report.slices.max(of_writer.slices);
        }
        Ok(report)
    }
}

impl OwnerSession {
    /// Binds a lease with the blocks that it is to be written into.
    pub(super) fn grant(
        &mut self,
        id: PullId,
        link: LinkId,
        bind: Bind,
        peer: &EngineManifest,
        pairs: &[(RankId, RankId)],
    ) {
        let now = self.now;
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        let mut writers: BTreeMap<RankId, (_, BTreeSet<RankId>)> = BTreeMap::new();
        for (src, dst) in pairs {
            let Some(contact) = peer.contact(*src) else { continue };
            writers.entry(*src).or_insert_with(|| (contact.epoch, BTreeSet::new())).1.insert(*dst);
        }
        pull.granted = Granted { writers, at: now, ..Granted::default() };
        let room = Room {
            tokens: pull.wish.tokens,
            groups: pull.wish.groups.clone(),
            within: pull.deadline().saturating_sub(now),
            priority: pull.wish.priority,
            progress: pull.wish.mode == Mode::Push { progress: true } || pull.wish.policy.then == Remedy::Recompute,
        };
        self.send_peer(link, PeerMessage::PushBind(Box::new(PushBind { bind, room })));
    }

    /// The grant was accepted.
    pub(super) fn receive(&mut self, id: PullId, fence: Fence) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let receiving = Receiving::new(fence, pull.granted.writers());
        self.enter(id, State::Receiving(receiving));
    }

    pub(super) fn on_written(&mut self, link: LinkId, written: Written) {
        let fence = written.fence.clone();
        // Of a request that has ended without it; another one of the same lease may be open.
        let late = self.late_evidence(link, &written);
        let Some(id) = self.pulls.find(&fence, link) else { return };
        match self.pulls.take(id) {
            Some(State::Receiving(receiving)) => match receiving.on_written(written) {
                Step::Next(Arrival::Whole { groups, reports }) => {
                    if let Some(pull) = self.pulls.open.get_mut(&id) {
                        pull.granted.keep(reports);
                    }
                    self.finish_written(id, link, fence, groups);
                }
                Step::Next(Arrival::Broken(ends)) => self.writes_have_failed(id, link, fence, &ends),
                Step::Next(Arrival::Others { missing, extra }) => {
                    let receiving = Receiving::new(fence.clone(), self.named(id));
                    self.put(id, State::Receiving(receiving));
                    let what = format!(
                        "writers that the map of peers names are missing ({missing:?}), others are told of ({extra:?})"
                    );
                    self.contradiction(link, fence, what.clone());
                    self.stop(id, FailureCause::Contradiction { what });
                }
                Step::Ignored(same) | Step::Waiting(same) => self.put(id, State::Receiving(same)),
            },
            Some(State::Halting { receiving, cause, until }) => {
                let told: BTreeSet<RankId> = written.writers.iter().map(|(rank, _)| *rank).collect();
                if told == *receiving.writers() {
                    let doubted = ends_in_doubt(&written);
                    self.abandon(id);
                    self.fail_written(id, cause, &doubted);
                } else {
                    self.put(id, State::Halting { receiving, cause, until });
                    self.contradiction(link, fence, "other writers than the map of peers names have ended".into());
                }
            }
            Some(other) => {
                self.put(id, other);
                if !late {
                    self.contradiction(link, fence, "the end of its writes is told again".into());
                }
            }
            None => {}
        }
    }

    fn named(&self, id: PullId) -> BTreeSet<RankId> {
        self.pulls.open.get(&id).map(|pull| pull.granted.writers()).unwrap_or_default()
    }

    /// All have ended, and not all have written: tries again, or that is it.
    fn writes_have_failed(&mut self, id: PullId, link: LinkId, fence: Fence, ends: &BTreeMap<RankId, WriterEnd>) {
        let doubted = in_doubt(ends.iter().map(|(rank, end)| (*rank, end)));
        let faults: Vec<&RankFault> = ends.values().filter_map(|end| end.as_ref().err()).collect();
        let pairs = self.pulls.open.get(&id).map(|pull| pull.granted.pairs()).unwrap_or_default();
        let next = fence.attempt.next().map(|attempt| Fence { attempt, ..fence });
        if doubted.is_empty()
            && let Some(next) = next
            && self.is_worth_another(id, link, &next, &pairs, &faults)
            && let Some(pull) = self.pulls.open.get(&id)
        {
            let wanted = Wanted::new(next, pull.wish.content_key);
            return self.try_again(id, link, wanted, true);
        }
        let failed = faults.iter().filter(|fault| fault.stage != Stage::Cancelled).count();
        let first = faults.iter().find(|fault| fault.stage != Stage::Cancelled).or(faults.first());
        let first = first.map_or_else(String::new, |fault| fault.to_string());
        let cause = FailureCause::Writers { failed, ranks: ends.len(), first };
        self.abandon(id);
        self.fail_written(id, cause, &doubted);
    }

    /// It is to be written no more: asks for evidence that it isn't.
    pub(super) fn halt(&mut self, id: PullId, fence: Fence, cause: FailureCause) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let receiving = Receiving::new(fence.clone(), pull.granted.writers());
        let link = pull.link;
        // The producer waits for its ranks, and then says what it knows.
        let until = self.now.saturating_add(self.config.grace.saturating_mul(2));
        self.enter(id, State::Halting { receiving, cause, until });
        if let Some(link) = link {
            self.send_peer(link, PeerMessage::Stop(Stop { fence }));
        }
    }

    pub(super) fn on_stopped(&mut self, link: LinkId, stopped: Stopped) {
        let fence = &stopped.fence;
        if self.is_of(link, fence) {
            self.loans.writers_stopped(fence, &stopped.writers);
            self.evidence_has_come();
            if stopped.writers == Stoppage::Unknown && self.loans.doubts(&fence.engine) {
                self.greet_anew(&fence.engine);
            }
        }
        let Some(id) = self.pulls.find(fence, link) else { return };
        let doubted = |of: &Receiving| match &stopped.writers {
            Stoppage::All => BTreeSet::new(),
            Stoppage::Except(ranks) => of.writers().intersection(ranks).copied().collect(),
            Stoppage::Unknown => of.writers().clone(),
        };
        match self.pulls.take(id) {
            Some(State::Halting { receiving, cause, .. }) => {
                let doubted = doubted(&receiving);
                self.fail_written(id, cause, &doubted);
            }
            // The producer has given up by itself, and has said why before, if it could.
            Some(State::Receiving(receiving)) => {
                let doubted = doubted(&receiving);
                self.fail_written(id, FailureCause::LeaseClosed { how: Closing::Abandoned }, &doubted);
            }
            Some(other) => self.put(id, other),
            None => {}
        }
    }

    /// Fails a request whose writers have ended but for these, which nobody has seen the end of.
    pub(super) fn fail_written(&mut self, id: PullId, cause: FailureCause, doubted: &BTreeSet<RankId>) {
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        let fence = pull.fence();
        pull.doubt = (!doubted.is_empty()).then(|| pull.granted.doubt(fence.clone(), doubted));
        let (road, over) = (pull.road, pull.link);
        if !doubted.is_empty() {
            self.seek_evidence(road);
            self.evidence_due.get_or_insert(self.now.saturating_add(self.config.retry.most));
            // Another link may be up already, that nobody will ask on otherwise.
            for link in self.links.pushing_to(&fence.engine).into_iter().filter(|link| Some(*link) != over) {
                self.send_peer(link, PeerMessage::Stop(Stop { fence: fence.clone() }));
            }
        }
        self.fail(id, cause, None);
    }

    /// What a request has left in quarantine may be known to have stopped. Gives whether one has.
    fn late_evidence(&mut self, link: LinkId, written: &Written) -> bool {
        let fence = &written.fence;
        let waiting = self.loans.doubted_writers(fence);
        if waiting.is_empty() || !self.is_of(link, fence) {
            return false;
        }
        // Of those that it doesn't name it says nothing.
        let doubted = ends_in_doubt(written);
        let named: BTreeSet<RankId> = written.writers.iter().map(|(rank, _)| *rank).collect();
        let except = waiting.into_iter().filter(|rank| !named.contains(rank) || doubted.contains(rank)).collect();
        self.loans.writers_stopped(fence, &Stoppage::Except(except));
        self.evidence_has_come();
        true
    }

    /// Whether a link's peer is the engine that a fence names.
    fn is_of(&self, link: LinkId, fence: &Fence) -> bool {
        self.links.peer(link).is_some_and(|p| *p.engine() == fence.engine)
    }

    /// A link to an engine is up: what it left in quarantine may be known to have stopped, or is asked for.
    pub(super) fn ask_for_evidence(&mut self, link: LinkId, peer: &Arc<EngineManifest>) {
        let since = self.links.asked(link);
        let pushes = self.links.has(link, Abilities::PUSH);
        for fence in self.loans.peer_is_met(peer, since).into_iter().filter(|_| pushes) {
            self.send_peer(link, PeerMessage::Stop(Stop { fence }));
        }
        self.evidence_has_come();
    }

    /// Asks again for evidence that has not come, on every link that is up: nothing else would bring it there.
    pub(super) fn ask_again(&mut self) {
        if self.evidence_due.is_none_or(|due| due > self.now) {
            return;
        }
        let doubted = self.loans.doubted();
        self.evidence_due = (!doubted.is_empty()).then(|| self.now.saturating_add(self.config.retry.most));
        for fence in doubted {
            for link in self.links.pushing_to(&fence.engine) {
                self.send_peer(link, PeerMessage::Stop(Stop { fence: fence.clone() }));
            }
        }
    }

    pub(super) fn on_progress(&mut self, link: LinkId, progress: &Progress) {
        let Some(id) = self.pulls.find(&progress.fence, link) else { return };
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        let State::Receiving(_) = &pull.state else { return };
        let tokens = progress.tokens.min(pull.wish.tokens);
        if tokens <= pull.granted.progress {
            return;
        }
        pull.granted.progress = tokens;
        if pull.wish.mode != (Mode::Push { progress: true }) {
            return;
        }
        self.effects.push_back(Effect::Progress { pull: id, tokens });
    }

    pub(super) fn contradiction(&mut self, link: LinkId, fence: Fence, what: String) {
        let Some(peer) = self.links.peer(link).map(|p| p.engine().clone()) else { return };
        self.effects.push_back(Effect::Contradiction { fence, peer, what });
        if self.links.contradicts(link) {
            self.refuse_link(link, vec!["too much of what was said can't be true".into()]);
        }
    }

    /// Lets blocks go whose age the engine takes for evidence.
    pub(super) fn reclaim(&mut self) {
        let Some(since) = self.config.reclaim_after.and_then(|after| self.now.checked_sub(after)) else { return };
        for (pull, blocks) in self.loans.reclaim(since) {
            self.effects.push_back(Effect::Reclaimed { pull, blocks });
        }
        self.evidence_has_come();
    }
}

fn ends_in_doubt(written: &Written) -> BTreeSet<RankId> {
    in_doubt(written.writers.iter().map(|(rank, end)| (*rank, end)))
}
