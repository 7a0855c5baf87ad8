//! The consumer's side: requests, from the wish to their one end.

use super::{BTreeMap, BTreeSet, Duration, Effect, Fence, Life, LinkId, OwnerSession, PullId, PullWish, dst_counts};

use kvferry_geometry::request::{BoundRequest, Request};
use kvferry_geometry::units::RankId;
use kvferry_proto::handshake::Abilities;
use kvferry_proto::names::pairing_salt;
use kvferry_proto::peer::{
    BindAnswer, BindRefusal, Gather, GatherAnswer, Gathered, MAX_REQUEST_BLOCKS, MAX_REQUEST_STATES, PeerMessage,
    ReadsEnd, Release, ReleaseAnswer, RunDigest, RunDigestAnswer, Window,
};
use kvferry_proto::rank::{Pairing, PullOrder, RankFault, Stage, ToRank};
use kvferry_proto::request::{Asking, Ended, Granted, RankResult, Reading, Releasing, Step, Wanted};

use super::loans::written;
use crate::assurance::{Assured, served};
use crate::outcome::{self, Delivered, Failed, FailureCause, GroupOutcome, Report};

#[derive(Debug)]
enum State {
    /// The link is not up.
    Linking(Wanted),
    /// The producer was asked.
    Asking(Asking),
    /// Ranks read.
    Reading(Reading),
    /// It has failed; ranks are stopping. `None`: the ranks' own faults are the cause.
    Stopping { reading: Reading, cause: Option<FailureCause>, until: Duration },
    /// The verdict is awaited.
    Releasing(Releasing, Assured),
    /// Between two states, within one call.
    Moving,
}

impl State {
    fn waiting_for(&self) -> &'static str {
        match self {
            Self::Linking(_) => "waiting for the link to the producer's owner",
            Self::Asking(_) => "waiting for the producer to bind the lease",
            Self::Reading(_) | Self::Stopping { .. } => "waiting for ranks to read",
            Self::Releasing(..) | Self::Moving => "waiting for the producer's verdict",
        }
    }
}

#[derive(Debug)]
struct Pull {
    wish: PullWish,
    link: LinkId,
    pairing: Option<Pairing>,
    /// Digests that were asked for and have not come: of which producer rank, for which of ours.
    questions: BTreeSet<(RankId, RankId)>,
    /// What was asked to be gathered and has not been, likewise.
    gathers: BTreeSet<(RankId, RankId)>,
    groups: Outcomes,
    started: Duration,
    state: State,
}

/// What of our groups is in place when the request ends.
#[derive(Debug)]
struct Outcomes {
    /// Where it fails.
    kept: Vec<GroupOutcome>,
    /// Where it is delivered.
    delivered: Vec<GroupOutcome>,
}

impl Pull {
    fn deadline(&self) -> Duration {
        match &self.state {
            State::Stopping { until, .. } => *until,
            _ => self.started.saturating_add(self.wish.deadline),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Pulls {
    last: u64,
    open: BTreeMap<PullId, Pull>,
    by_fence: BTreeMap<Fence, PullId>,
}

impl Pulls {
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.open.values().map(Pull::deadline).min()
    }

    /// Whether nothing is kept of any request.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.by_fence.is_empty()
    }

    /// The requests whose share of this rank has not ended.
    #[cfg(test)]
    pub(super) fn pending(&self, rank: RankId) -> Vec<PullId> {
        let waits = |p: &Pull| match &p.state {
            State::Reading(reading) | State::Stopping { reading, .. } => reading.is_pending(rank),
            _ => false,
        };
        self.open.iter().filter(|(_, p)| waits(p)).map(|(id, _)| *id).collect()
    }

    /// The request for a lease on a link.
    fn find(&self, fence: &Fence, link: LinkId) -> Option<PullId> {
        let id = *self.by_fence.get(fence)?;
        (self.open.get(&id)?.link == link).then_some(id)
    }

    /// Takes the state out; put another back in the same call.
    fn take(&mut self, id: PullId) -> Option<State> {
        Some(std::mem::replace(&mut self.open.get_mut(&id)?.state, State::Moving))
    }

    fn put(&mut self, id: PullId, state: State) {
        if let Some(pull) = self.open.get_mut(&id) {
            pull.state = state;
        }
    }

    fn on_link(&self, link: LinkId) -> Vec<PullId> {
        self.open.iter().filter(|(_, p)| p.link == link).map(|(id, _)| *id).collect()
    }
}

impl OwnerSession {
    pub(super) fn start_pull(&mut self, wish: PullWish) -> PullId {
        self.pulls.last += 1;
        let id = PullId(self.pulls.last);
        let (blocks, states) = dst_counts(&wish.groups);
        let refused = match &self.life {
            Life::Assembling(_) => Some(FailureCause::NotReady),
            Life::Broken(_, rank, reason) => Some(FailureCause::RankLost { rank: *rank, reason: reason.clone() }),
            Life::Ready(_) => match served(wish.assurance) {
                Err(error) => Some(error.into()),
                Ok(()) if self.pulls.by_fence.contains_key(&wish.fence) => {
                    Some(FailureCause::Refused(BindRefusal::AlreadyBound))
                }
                Ok(()) if blocks > MAX_REQUEST_BLOCKS => {
                    Some(FailureCause::TooManyBlocks { got: blocks, limit: MAX_REQUEST_BLOCKS })
                }
                Ok(()) if states > MAX_REQUEST_STATES => {
                    Some(FailureCause::TooManyStates { got: states, limit: MAX_REQUEST_STATES })
                }
                Ok(()) => None,
            },
        };
        let manifest = self.life.local().map(|l| l.manifest.cache().clone());
        let refused = refused.or_else(|| {
            let m = manifest.as_ref()?;
            self.loans.write(m, id, &written(m, wish.tokens, &wish.groups)).err().map(FailureCause::Overlap)
        });
        let kept = manifest.map(|m| outcome::kept(&m, wish.tokens, &wish.groups)).unwrap_or_default();
        if let Some(cause) = refused {
            let report = Report::empty(wish.fence, wish.assurance, Duration::ZERO, kept);
            let result = Box::new(Err(Failed { cause, report }));
            self.effects.push_back(Effect::PullEnded { pull: id, result });
            return id;
        }
        let link = self.link_to(&wish.address, &wish.fence.engine);
        self.pulls.by_fence.insert(wish.fence.clone(), id);
        let state = State::Linking(Wanted::new(wish.fence.clone(), wish.content_key));
        let (started, groups) = (self.now, Outcomes { kept, delivered: Vec::new() });
        let (questions, gathers) = (BTreeSet::new(), BTreeSet::new());
        let pull = Pull { wish, link, pairing: None, questions, gathers, groups, started, state };
        self.pulls.open.insert(id, pull);
        if self.links.peer(link).is_some() {
            self.ask(id);
        }
        id
    }

    pub(super) fn link_up_for_pulls(&mut self, link: LinkId) {
        for id in self.pulls.on_link(link) {
            self.ask(id);
        }
    }

    fn ask(&mut self, id: PullId) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let (link, fence) = (pull.link, pull.wish.fence.clone());
        let salt = pairing_salt(&self.config.engine, fence.lease);
        let (options, compat) = (self.peer_options(salt), self.config.compat);
        let Some((peer, direction)) = self.reading(link) else { return };
        if peer.epoch() != fence.epoch {
            let (reference, current) = (fence.epoch, peer.epoch());
            return self.stop(id, FailureCause::StaleEpoch { reference, current });
        }
        let map = match direction.and_then(|d| d.map(options)) {
            Ok(map) => map,
            Err(error) => return self.stop(id, error.into()),
        };
        match self.pulls.take(id) {
            Some(State::Linking(wanted)) => {
                let (asking, bind) = wanted.ask(salt, map.digest());
                self.pulls.put(id, State::Asking(asking));
                if let Some(pull) = self.pulls.open.get_mut(&id) {
                    pull.pairing = Some(Pairing { peer: peer.digest(), options, compat, peer_map: map.digest() });
                }
                self.send_peer(link, PeerMessage::Bind(bind));
            }
            Some(other) => self.pulls.put(id, other),
            None => {}
        }
    }

    pub(super) fn on_bind_answer(&mut self, link: LinkId, answer: BindAnswer) {
        let fence = match &answer {
            BindAnswer::Bound(grant) => &grant.fence,
            BindAnswer::Refused { fence, .. } => fence,
        };
        let Some(id) = self.pulls.find(fence, link) else { return };
        match self.pulls.take(id) {
            Some(State::Asking(asking)) => match asking.on_answer(answer) {
                Step::Next(Ok(granted)) => self.read(id, granted),
                Step::Next(Err(reason)) => self.fail(id, FailureCause::Refused(reason), None),
                Step::Ignored(same) | Step::Waiting(same) => self.pulls.put(id, State::Asking(same)),
            },
            Some(other) => self.pulls.put(id, other),
            None => {}
        }
    }

    fn read(&mut self, id: PullId, granted: Granted) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let (link, wish, pairing) = (pull.link, &pull.wish, pull.pairing);
        let request = Request { tokens: wish.tokens, src: granted.groups().to_vec(), dst: wish.groups.clone() };
        let assurance = wish.assurance;
        let (Some(pairing), Some((peer, direction))) = (pairing, self.reading(link)) else {
            return self.give_back(id, link, granted, FailureCause::NotReady);
        };
        let direction = match direction {
            Ok(direction) => direction,
            Err(error) => return self.give_back(id, link, granted, error.into()),
        };
        let map = match direction.map(pairing.options) {
            Ok(map) => map,
            Err(error) => return self.give_back(id, link, granted, error.into()),
        };
        let (full_hit, delivered) = match BoundRequest::new(direction.compatible(), request.clone()) {
            Ok(bound) => (bound.is_full_hit(), outcome::delivered(direction.compatible(), &request, &bound)),
            Err(errors) => return self.give_back(id, link, granted, FailureCause::Request(errors)),
        };
        if let Some(pull) = self.pulls.open.get_mut(&id) {
            pull.groups.delivered = delivered;
        }
        if full_hit {
            return self.reads_ended(id, granted.full_hit(), None);
        }
        let reading = granted.read(&map);
        let named: Vec<RankId> = reading.pending().collect();
        self.pulls.put(id, State::Reading(reading));
        // All are ordered before one that isn't there makes the others stop.
        let order = |rank: &RankId| {
            let order = PullOrder { pull: id, pairing, request: request.clone(), assurance, priority: 100, deadline: None };
            !self.send_rank(*rank, ToRank::Pull(order), Some(&peer))
        };
        let absent: Vec<RankId> = named.into_iter().filter(order).collect();
        for rank in absent {
            self.on_pulled(rank, id, Err(lost("it is not there", false)));
        }
    }

    fn give_back(&mut self, id: PullId, link: LinkId, granted: Granted, cause: FailureCause) {
        self.send_peer(link, PeerMessage::Release(granted.abandon()));
        self.fail(id, cause, None);
    }

    pub(super) fn on_pulled(&mut self, rank: RankId, id: PullId, result: RankResult) {
        let failed = result.is_err();
        let (reading, stopping) = match self.pulls.take(id) {
            Some(State::Reading(reading)) => (reading, None),
            Some(State::Stopping { reading, cause, until }) => (reading, Some((cause, until))),
            Some(other) => return self.pulls.put(id, other),
            None => {
                // The request has ended without it. Whatever it says, it has stopped, unless it says that it doesn't know.
                if !matches!(&result, Err(fault) if fault.in_doubt) {
                    self.loans.stopped(id, rank);
                }
                return;
            }
        };
        match (reading.on_rank(rank, result), stopping) {
            (Step::Next(ended), stopping) => self.reads_ended(id, ended, stopping.and_then(|(cause, _)| cause)),
            (Step::Ignored(reading) | Step::Waiting(reading), Some((cause, until))) => {
                self.pulls.put(id, State::Stopping { reading, cause, until });
            }
            (Step::Waiting(reading), None) if failed => self.stop_ranks(id, reading, None),
            (Step::Ignored(reading) | Step::Waiting(reading), None) => self.pulls.put(id, State::Reading(reading)),
        }
    }

    /// No rank reads any more.
    fn reads_ended(&mut self, id: PullId, ended: Ended, cause: Option<FailureCause>) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let link = pull.link;
        let cause = match (cause, Assured::check(pull.wish.assurance, &ended)) {
            (Some(cause), _) => cause,
            (None, Ok(assured)) => match ended.release() {
                Ok((releasing, release)) => {
                    self.pulls.put(id, State::Releasing(releasing, assured));
                    return self.send_peer(link, PeerMessage::Release(release));
                }
                Err((ended, release)) => {
                    self.send_peer(link, PeerMessage::Release(release));
                    return self.fail(id, crate::assurance::NotAssured::Incomplete.into(), Some(&ended));
                }
            },
            (None, Err(error)) => {
                // Those that were stopped because of others are not what went wrong.
                let own = |r: &&RankResult| matches!(r, Err(fault) if fault.stage != Stage::Cancelled);
                let failed = ended.results().values().filter(own).count();
                let ranks = ended.results().len();
                if failed > 0 { FailureCause::Ranks { failed, ranks } } else { error.into() }
            }
        };
        self.send_peer(link, PeerMessage::Release(ended.abandon()));
        self.fail(id, cause, Some(&ended));
    }

    pub(super) fn on_release_answer(&mut self, link: LinkId, answer: &ReleaseAnswer) {
        let Some(id) = self.pulls.find(&answer.fence, link) else { return };
        match self.pulls.take(id) {
            Some(State::Releasing(releasing, assured)) => match releasing.on_answer(answer) {
                Step::Next(Ok(held)) => {
                    let Some(pull) = self.pulls.open.get_mut(&id) else { return };
                    let took = self.now.saturating_sub(pull.started);
                    let groups = std::mem::take(&mut pull.groups.delivered);
                    self.end(id, Ok(Delivered::new(&held, assured, took, groups)));
                }
                Step::Next(Err(ended)) => self.fail(id, FailureCause::Stale, Some(&ended)),
                Step::Ignored(same) | Step::Waiting(same) => self.pulls.put(id, State::Releasing(same, assured)),
            },
            Some(other) => self.pulls.put(id, other),
            None => {}
        }
    }

    pub(super) fn on_digest_wanted(&mut self, rank: RankId, id: PullId, src: RankId, windows: Vec<Window>) {
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        match &pull.state {
            State::Reading(reading) if reading.is_pending(rank) => {
                pull.questions.insert((src, rank));
                let (fence, tokens, groups) = (pull.wish.fence.clone(), pull.wish.tokens, pull.wish.groups.clone());
                let question = RunDigest { fence, src, dst: rank, tokens, groups, windows };
                let link = pull.link;
                self.send_peer(link, PeerMessage::RunDigest(question));
            }
            // The rank is being stopped, and will hear of it.
            _ => {}
        }
    }

    pub(super) fn on_run_digest_answer(&mut self, link: LinkId, answer: RunDigestAnswer) {
        let Some(id) = self.pulls.find(&answer.fence, link) else { return };
        let (src, pieces) = (answer.src, answer.pieces);
        // Only what was asked for goes to a rank.
        let asked = self.pulls.open.get_mut(&id).is_some_and(|p| p.questions.remove(&(src, answer.dst)));
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
        let link = pull.link;
        if !self.links.has(link, Abilities::GATHER) {
            let result = Err("the producer's owner does not know how to gather".into());
            self.send_rank(rank, ToRank::GatherAnswer { pull: id, src, result }, None);
            return;
        }
        pull.gathers.insert((src, rank));
        let (fence, tokens, groups) = (pull.wish.fence.clone(), pull.wish.tokens, pull.wish.groups.clone());
        self.send_peer(link, PeerMessage::Gather(Gather { fence, src, dst: rank, gathered, tokens, groups }));
    }

    pub(super) fn on_gather_answer(&mut self, link: LinkId, answer: GatherAnswer) {
        let Some(id) = self.pulls.find(&answer.fence, link) else { return };
        let GatherAnswer { src, dst, result, .. } = answer;
        // Only what was asked for goes to a rank.
        let asked = self.pulls.open.get_mut(&id).is_some_and(|p| p.gathers.remove(&(src, dst)));
        if asked {
            self.send_rank(dst, ToRank::GatherAnswer { pull: id, src, result }, None);
        }
    }

    pub(super) fn cancel_pull(&mut self, id: PullId) {
        self.stop(id, FailureCause::Cancelled);
    }

    /// Ends a request as failed: at once if no rank reads, else when all have stopped.
    fn stop(&mut self, id: PullId, cause: FailureCause) {
        match self.pulls.take(id) {
            Some(State::Asking(_)) => {
                // It may be bound by the time this arrives, and after the bind it does.
                self.abandon(id);
                self.fail(id, cause, None);
            }
            Some(State::Reading(reading)) => self.stop_ranks(id, reading, Some(cause)),
            Some(State::Releasing(releasing, _)) => self.fail(id, cause, Some(releasing.ended())),
            Some(same @ State::Stopping { .. }) => self.pulls.put(id, same),
            Some(State::Linking(_) | State::Moving) => self.fail(id, cause, None),
            None => {}
        }
    }

    /// Tells the producer that nothing of its lease will be used.
    fn abandon(&mut self, id: PullId) {
        let Some(pull) = self.pulls.open.get(&id) else { return };
        let (link, fence) = (pull.link, pull.wish.fence.clone());
        self.send_peer(link, PeerMessage::Release(Release { fence, reads: ReadsEnd::Abandoned }));
    }

    fn stop_ranks(&mut self, id: PullId, reading: Reading, cause: Option<FailureCause>) {
        let pending: Vec<RankId> = reading.pending().collect();
        let until = self.now.saturating_add(self.config.grace);
        self.pulls.put(id, State::Stopping { reading, cause, until });
        for rank in pending {
            self.send_rank(rank, ToRank::Cancel(id), None);
        }
    }

    pub(super) fn link_lost_in_pulls(&mut self, link: LinkId, cause: &FailureCause) {
        for id in self.pulls.on_link(link) {
            self.stop(id, cause.clone());
        }
    }

    pub(super) fn rank_lost_in_pulls(&mut self, rank: RankId, reason: &str) {
        let open: Vec<PullId> = self.pulls.open.keys().copied().collect();
        for id in open {
            let Some(pull) = self.pulls.open.get(&id) else { continue };
            let fails = match &pull.state {
                State::Linking(_) | State::Asking(_) | State::Moving => true,
                State::Reading(reading) | State::Stopping { reading, .. } if reading.is_pending(rank) => {
                    // Nothing proves that it has stopped.
                    self.on_pulled(rank, id, Err(lost(reason, true)));
                    continue;
                }
                // Its bytes are there, but nobody can use them.
                State::Reading(reading) | State::Stopping { reading, .. } => reading.names(rank),
                State::Releasing(releasing, _) => releasing.ended().names(rank),
            };
            if fails {
                self.stop(id, FailureCause::RankLost { rank, reason: reason.into() });
            }
        }
    }

    pub(super) fn expire_pulls(&mut self) {
        let now = self.now;
        let late: Vec<PullId> =
            self.pulls.open.iter().filter(|(_, p)| p.deadline() <= now).map(|(id, _)| *id).collect();
        for id in late {
            match self.pulls.take(id) {
                Some(State::Stopping { reading, cause, .. }) => {
                    // Ranks that have not stopped in time are in doubt.
                    let ended = reading.end_pending(&lost("it did not stop in time", true));
                    self.reads_ended(id, ended, cause);
                }
                Some(state) => {
                    let waiting_for = state.waiting_for();
                    self.pulls.put(id, state);
                    let after = self.pulls.open.get(&id).map_or(Duration::ZERO, |p| p.wish.deadline);
                    self.stop(id, FailureCause::Deadline { after, waiting_for });
                }
                None => {}
            }
        }
    }

    pub(super) fn end_all_pulls(&mut self) {
        let open: Vec<PullId> = self.pulls.open.keys().copied().collect();
        for id in open {
            let Some(state) = self.pulls.take(id) else { continue };
            if !matches!(state, State::Linking(_)) {
                self.abandon(id);
            }
            match state {
                // Whoever has not stopped yet won't be heard of again.
                State::Reading(reading) | State::Stopping { reading, .. } => {
                    let ended = reading.end_pending(&lost("the owner was shut down before it had stopped", true));
                    self.fail(id, FailureCause::Shutdown, Some(&ended));
                }
                State::Releasing(releasing, _) => self.fail(id, FailureCause::Shutdown, Some(releasing.ended())),
                State::Linking(_) | State::Asking(_) | State::Moving => self.fail(id, FailureCause::Shutdown, None),
            }
        }
    }

    fn fail(&mut self, id: PullId, cause: FailureCause, ended: Option<&Ended>) {
        let Some(pull) = self.pulls.open.get_mut(&id) else { return };
        let (fence, level) = (pull.wish.fence.clone(), pull.wish.assurance);
        let took = self.now.saturating_sub(pull.started);
        let kept = std::mem::take(&mut pull.groups.kept);
        let report = match ended {
            Some(ended) => Report::of(fence, level, took, ended, kept),
            None => Report::empty(fence, level, took, kept),
        };
        self.end(id, Err(Failed { cause, report }));
    }

    fn end(&mut self, id: PullId, result: Result<Delivered, Failed>) {
        let Some(pull) = self.pulls.open.remove(&id) else { return };
        self.pulls.by_fence.remove(&pull.wish.fence);
        if let Some(local) = self.life.local() {
            let places = written(local.manifest.cache(), pull.wish.tokens, &pull.wish.groups);
            let in_doubt = result.as_ref().err().map_or(&[][..], |failed| &failed.report.in_doubt);
            self.loans.write_ended(id, places, in_doubt);
        }
        self.effects.push_back(Effect::PullEnded { pull: id, result: Box::new(result) });
    }
}

fn lost(reason: &str, in_doubt: bool) -> RankFault {
    RankFault {
        stage: Stage::Read,
        text: format!("nothing is known of the rank any more: {reason}"),
        in_doubt,
        bad: Vec::new(),
    }
}
