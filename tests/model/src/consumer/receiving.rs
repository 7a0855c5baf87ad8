//! A consumer's side of push: `kvferry-session/src/owner/receiving.rs`, and what `owner/loans.rs` keeps of writers, without progress,
//! reports of bytes, and reclaiming by age.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_geometry::peers::PeerMap;
use kvferry_geometry::units::RankId;
use kvferry_proto::names::Fence;
use kvferry_proto::peer::Bind;
use kvferry_proto::push::{Arrival, Receiving, Stop, Stoppage, Stopped, WriterEnd, in_doubt};
use kvferry_proto::rank::{PullId, RankFault};
use kvferry_proto::request::{Granted, Step, Wanted};

use super::{At, Phase};
use crate::fault::Fault;
use crate::network::{LinkId, Message, PushBind, Written};
use crate::producer::content_key;
use crate::world::Lives;

/// The producer's ranks that may write for an attempt.
#[derive(Clone, PartialEq, Hash, Debug)]
pub(crate) struct Writers {
    pub(crate) fence: Fence,
    pub(crate) producer: usize,
    /// Each with the life of it that was told to, and the ranks of ours whose memory it writes.
    pub(crate) ranks: BTreeMap<RankId, (u8, BTreeSet<RankId>)>,
}

impl Writers {
    fn only(&self, who: &BTreeSet<RankId>) -> Self {
        let ranks = self.ranks.iter().filter(|(rank, _)| who.contains(rank)).map(|(rank, of)| (*rank, of.clone()));
        Self { ranks: ranks.collect(), ..self.clone() }
    }

    pub(super) fn writes_to(&self, rank: RankId) -> bool {
        self.ranks.values().any(|(_, to)| to.contains(&rank))
    }

    fn pairs(&self) -> BTreeSet<(RankId, RankId)> {
        self.ranks.iter().flat_map(|(src, (_, to))| to.iter().map(|dst| (*dst, *src))).collect()
    }

    /// A rank of ours has joined anew.
    pub(super) fn is_new(&mut self, rank: RankId) {
        for (_, to) in self.ranks.values_mut() {
            to.remove(&rank);
        }
        self.ranks.retain(|_, (_, to)| !to.is_empty());
    }

    /// Ranks of the producer are in these lives.
    fn met(&mut self, lives: &Lives) {
        self.ranks.retain(|rank, (life, _)| life_of(lives, *rank) == *life);
    }
}

fn life_of(lives: &Lives, rank: RankId) -> u8 {
    usize::try_from(rank.get()).ok().and_then(|n| lives.get(n)).copied().unwrap_or_default()
}

fn doubted_of(written: &Written) -> BTreeSet<RankId> {
    in_doubt(written.writers.iter().map(|(rank, end)| (*rank, end)))
}

impl At<'_> {
    pub(super) fn is_pushed(&mut self, id: PullId) -> bool {
        self.pull(id).is_some_and(|pull| pull.push)
    }

    /// Binds a lease with the block that it is to be written into.
    pub(super) fn grant(&mut self, id: PullId, link: LinkId, bind: Bind, map: &PeerMap) {
        let Some((producer, lives)) = self.s.links.get(&link).map(|l| (l.producer, l.producer_ranks)) else { return };
        let Some(block) = self.w.plan(id).map(|plan| plan.block) else { return };
        let mut ranks: BTreeMap<RankId, (u8, BTreeSet<RankId>)> = BTreeMap::new();
        for pair in map.pairs() {
            let life = life_of(&lives, pair.src());
            ranks.entry(pair.src()).or_insert_with(|| (life, BTreeSet::new())).1.insert(pair.dst());
        }
        let Some(c) = self.c() else { return };
        c.memory.retain(|(_, of, _), _| *of != block);
        if let Some(pull) = c.pulls.get_mut(&id) {
            pull.granted = Some(Writers { fence: bind.fence.clone(), producer, ranks });
            pull.gone.clear();
        }
        self.send(link, Message::PushBind(PushBind { bind, block, pull: id }));
    }

    fn named(&mut self, id: PullId) -> BTreeSet<RankId> {
        let granted = self.pull(id).and_then(|pull| pull.granted.as_ref());
        granted.map(|of| of.ranks.keys().copied().collect()).unwrap_or_default()
    }

    /// The grant was accepted.
    pub(super) fn receive(&mut self, id: PullId, fence: Fence) {
        let writers = self.named(id);
        self.put(id, Phase::Receiving(Receiving::new(fence, writers)));
    }

    pub(crate) fn on_written(&mut self, link: LinkId, written: Written) {
        let Written { fence, writers } = written.clone();
        let found = self.c().and_then(|c| c.find(&fence, link));
        if found.is_none() || !self.w.is(Fault::EvidenceForAnother) {
            self.late_evidence(link, &written);
        }
        let Some(id) = found else { return };
        match self.state(id) {
            Some(Phase::Receiving(receiving)) => {
                let told = kvferry_proto::push::Written { fence: fence.clone(), writers, groups: Vec::new() };
                match receiving.on_written(told) {
                    Step::Next(Arrival::Whole { groups, .. }) => self.read(id, Granted::written(fence, groups)),
                    Step::Next(Arrival::Broken(ends)) => self.writes_have_failed(id, link, fence, &ends),
                    Step::Next(Arrival::Others { .. }) => self.halt(id, fence),
                    Step::Ignored(same) | Step::Waiting(same) => self.put(id, Phase::Receiving(same)),
                }
            }
            Some(Phase::Halting { receiving, .. }) => {
                let told: BTreeSet<RankId> = writers.iter().map(|(rank, _)| *rank).collect();
                if told == *receiving.writers() {
                    self.abandon(id);
                    self.fail_written(id, &doubted_of(&written));
                }
            }
            _ => {}
        }
    }

    /// All have ended, and not all have written: tries again, or that is it.
    fn writes_have_failed(&mut self, id: PullId, link: LinkId, fence: Fence, ends: &BTreeMap<RankId, WriterEnd>) {
        let doubted = in_doubt(ends.iter().map(|(rank, end)| (*rank, end)));
        let faults: Vec<&RankFault> = ends.values().filter_map(|end| end.as_ref().err()).collect();
        let pairs = self.pull(id).and_then(|pull| pull.granted.as_ref()).map(Writers::pairs).unwrap_or_default();
        if let Some(attempt) = fence.attempt.next().filter(|_| doubted.is_empty())
            && self.is_worth_another(id, attempt, &pairs, &faults) == Some(true)
            && let Some(plan) = self.w.plan(id)
        {
            let wanted = Wanted::new(Fence { attempt, ..fence }, content_key(plan.lease));
            return self.try_again(id, link, wanted);
        }
        self.abandon(id);
        self.fail_written(id, &doubted);
    }

    /// It is to be written no more: asks for evidence that it isn't.
    pub(super) fn halt(&mut self, id: PullId, fence: Fence) {
        let receiving = Receiving::new(fence.clone(), self.named(id));
        let until = self.s.now + self.patience();
        self.put(id, Phase::Halting { receiving, until });
        let Some(link) = self.pull(id).and_then(|pull| pull.link) else { return };
        if self.w.is(Fault::ReleaseEndsAll) {
            return self.give_up(id);
        }
        self.send(link, Message::Stop(Stop { fence }));
    }

    /// The producer waits for its ranks, and then says what it knows.
    fn patience(&self) -> Duration {
        self.w.grace() * 2
    }

    pub(crate) fn on_stopped(&mut self, link: LinkId, stopped: &Stopped) {
        let fence = &stopped.fence;
        let found = self.c().and_then(|c| c.find(fence, link));
        if found.is_none() || !self.w.is(Fault::EvidenceForAnother) {
            self.writers_stopped(link, fence, &stopped.writers);
        }
        let Some(id) = found else { return };
        if let Some(Phase::Halting { receiving, .. } | Phase::Receiving(receiving)) = self.state(id) {
            let doubted = match &stopped.writers {
                Stoppage::All => BTreeSet::new(),
                Stoppage::Except(_) if self.w.is(Fault::DoubtIgnored) => BTreeSet::new(),
                Stoppage::Except(ranks) => receiving.writers().intersection(ranks).copied().collect(),
                Stoppage::Unknown => receiving.writers().clone(),
            };
            self.fail_written(id, &doubted);
        }
    }

    /// Fails a request whose writers have ended but for these, which nobody has seen the end of.
    pub(super) fn fail_written(&mut self, id: PullId, doubted: &BTreeSet<RankId>) {
        if let Some(pull) = self.pull(id) {
            let mut doubt = pull.granted.as_ref().map(|of| of.only(doubted));
            for rank in &pull.gone {
                doubt.iter_mut().for_each(|of| of.is_new(*rank));
            }
            pull.doubt = doubt.filter(|of| !of.ranks.is_empty());
        }
        self.fail(id, None);
    }

    /// What a request has left in quarantine may be known to have stopped.
    fn late_evidence(&mut self, link: LinkId, written: &Written) {
        let (named, doubted) = (written.writers.iter().map(|(rank, _)| *rank), doubted_of(written));
        let named: BTreeSet<RankId> = named.collect();
        self.settle_writers(link, &written.fence, |rank| !named.contains(&rank) || doubted.contains(&rank));
    }

    /// The producer says which of its writers have stopped for an attempt.
    fn writers_stopped(&mut self, link: LinkId, fence: &Fence, who: &Stoppage) {
        match who {
            Stoppage::All => self.settle_writers(link, fence, |_| false),
            Stoppage::Except(still) => self.settle_writers(link, fence, |rank| still.contains(&rank)),
            Stoppage::Unknown => {}
        }
    }

    fn settle_writers(&mut self, link: LinkId, fence: &Fence, still: impl Fn(RankId) -> bool) {
        let Some(producer) = self.s.links.get(&link).map(|l| l.producer) else { return };
        let of = |theirs: &Writers| theirs.fence == *fence && theirs.producer == producer;
        let Some(c) = self.c() else { return };
        let left = c.quarantine.iter().filter(|(_, left)| left.theirs.as_ref().is_some_and(of));
        let ids: Vec<PullId> = left.map(|(id, _)| *id).collect();
        for id in ids {
            self.settle(id, |left| {
                if let Some(theirs) = &mut left.theirs {
                    theirs.ranks.retain(|rank, _| still(*rank));
                }
            });
        }
    }

    /// A link to an engine is up: what it left in quarantine may be known to have stopped by the lives of its ranks, if what it says
    /// of them is `fresh`; else it is asked.
    pub(crate) fn ask_for_evidence(&mut self, link: LinkId, fresh: bool) {
        let Some((producer, lives)) = self.s.links.get(&link).map(|l| (l.producer, l.producer_ranks)) else { return };
        let Some(c) = self.c() else { return };
        let of = |theirs: &Writers| theirs.producer == producer;
        let left = c.quarantine.iter().filter(|(_, left)| left.theirs.as_ref().is_some_and(of));
        let ids: Vec<PullId> = left.map(|(id, _)| *id).collect();
        for id in ids.iter().filter(|_| fresh) {
            self.settle(*id, |left| {
                if let Some(theirs) = &mut left.theirs {
                    theirs.met(&lives);
                }
            });
        }
        for id in ids {
            let theirs = self.c().and_then(|c| c.quarantine.get(&id)).and_then(|left| left.theirs.as_ref());
            if let Some(fence) = theirs.map(|theirs| theirs.fence.clone()) {
                self.send(link, Message::Stop(Stop { fence }));
            }
        }
    }
}
