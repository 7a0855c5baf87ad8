//! What can happen in a state.

use std::time::Duration;

use kvferry_geometry::units::RankId;
use kvferry_proto::rank::PullId;

use super::{Action, Fate, Owner, State, Times};
use crate::consumer::{Course, How, Phase};
use crate::network::{End, Link, Made, Wire};
use crate::producer::Content;
use crate::world::{Network, Start, World};

/// No world lasts longer; one that does is found as one that doesn't end.
const HORIZON: Duration = Duration::from_secs(60);

impl State {
    /// Timers are late by less than a tick.
    pub(super) fn of_time(&self, out: &mut Vec<Action>) {
        let (now, before) = (self.now, out.len());
        let mut later = false;
        for (n, p) in self.producers.iter().enumerate() {
            if !self.overdue(n).is_empty() {
                out.push(Action::Step(Owner::Producer(n)));
            }
            later |= p.open.values().any(|o| o.state.due().is_some_and(|due| due > now));
        }
        for (n, c) in self.consumers.iter().enumerate() {
            let due = c.next_due();
            if due.is_some_and(|due| due <= now) {
                out.push(Action::Step(Owner::Consumer(n)));
            }
            later |= due.is_some();
        }
        if out.len() == before && later && now < HORIZON {
            out.push(Action::Tick);
        }
    }

    pub(super) fn of_requests(&self, w: &World, out: &mut Vec<Action>) {
        for (id, plan) in w.requests() {
            match self.fate(id) {
                Some(Fate::Planned) => {
                    let offered = self.leases.get(plan.lease).is_some_and(|told| told.fence.is_some());
                    let may = match plan.start {
                        Start::First | Start::Anytime => true,
                        Start::After(other) => !matches!(self.pulls.get(other), Some(Fate::Planned | Fate::Open)),
                    };
                    if offered && may {
                        out.push(Action::Start(id));
                    }
                }
                Some(Fate::Open) if self.chances.aborts > 0 => out.push(Action::Abort(id)),
                _ => {}
            }
        }
        for (lease, (plan, told)) in w.leases.iter().zip(&self.leases).enumerate() {
            let Some(producer) = self.producers.get(plan.producer) else { continue };
            let before = plan.after.and_then(|before| self.leases.get(before));
            if told.fence.is_none() && before.is_some_and(|b| b.closes > 0) && producer.is_whole() {
                out.push(Action::Offer(lease));
            }
            if told.fence.is_some() && told.closes == 0 && !told.gone && self.chances.withdraws > 0 {
                out.push(Action::Withdraw(lease));
            }
            let of = |content| matches!(content, Content::Of(of, _) if of == lease);
            let holds = producer.memory.keys().any(|rank| of(producer.content(*rank, plan.block)));
            // Of what nobody reads, nobody sees it.
            let read = w.requests().any(|(id, p)| p.lease == lease && self.fate(id) == Some(Fate::Open));
            if told.closes > 0 && holds && read && self.chances.reuses > 0 {
                out.push(Action::Reuse(lease));
            }
        }
    }

    pub(super) fn of_links(&self, w: &World, out: &mut Vec<Action>) {
        for (n, c) in self.consumers.iter().enumerate() {
            for producer in 0..self.producers.len() {
                let waits = |id: &PullId| {
                    let plan = w.plan(*id).and_then(|plan| w.leases.get(plan.lease));
                    plan.is_some_and(|plan| plan.producer == producer)
                };
                let linking = c.pulls.iter().filter(|(_, p)| matches!(p.state, Phase::Linking(_)));
                let mut doubted = c.quarantine.values().filter_map(|left| left.theirs.as_ref());
                let here = |l: &Link| (l.consumer, l.producer) == (n, producer) && l.at_consumer.is_up();
                // Whatever the engines have to say to each other later.
                let later = doubted.any(|theirs| theirs.producer == producer) && !self.links.values().any(here);
                let wanted = linking.map(|(id, _)| id).any(waits) || later;
                let down = self.producers.get(producer).is_none_or(|p| p.down);
                if !c.roads.contains_key(&producer) && wanted && !down {
                    out.push(Action::Connect(n, producer));
                }
                if self.chances.strays > 0 && !down {
                    out.push(Action::Stray(n, producer));
                }
            }
        }
        for (id, link) in &self.links {
            for end in [End::Consumer, End::Producer] {
                let side = link.side(end);
                let hears = end == End::Producer || link.made != Made::Apart;
                let waiting = if hears { side.waiting() } else { &[] };
                let ordered = w.network == Network::Ordered;
                let may = if ordered { waiting.len().min(1) } else { waiting.len() };
                for index in (0..may).filter(|i| *i == 0 || waiting.get(*i) != waiting.get(*i - 1)) {
                    out.push(Action::Deliver(*id, end, index));
                    if !ordered && self.chances.losses > 0 {
                        out.push(Action::Lose(*id, end, index));
                    }
                    if !ordered && self.chances.repeats > 0 {
                        out.push(Action::Repeat(*id, end, index));
                    }
                }
                if link.wire == Wire::Cut && side.is_up() {
                    out.push(Action::Notice(*id, end));
                }
            }
            if link.wire == Wire::Whole && self.chances.breaks > 0 {
                out.push(Action::Break(*id));
            }
            if link.made == Made::Apart && link.at_consumer.is_up() {
                out.push(Action::Greet(*id));
            }
        }
    }

    pub(super) fn of_reads(&self, _: &World, out: &mut Vec<Action>) {
        for (n, c) in self.consumers.iter().enumerate() {
            for ((rank, pull), read) in &c.reads {
                let ends = read.course != Course::Hangs;
                let mut finish = |how| {
                    out.push(Action::Finish(n, *rank, *pull, how, Times::Once));
                    if self.chances.echoes > 0 {
                        out.push(Action::Finish(n, *rank, *pull, how, Times::Twice));
                    }
                };
                if ends && read.left.is_empty() {
                    finish(How::Complete);
                }
                if ends && read.course == Course::Cancelled {
                    finish(How::Cancelled);
                }
                if ends && self.chances.fails > 0 {
                    finish(How::Failed);
                }
                if !read.left.is_empty() {
                    out.push(Action::Copy(n, *rank, *pull));
                }
                if ends && self.chances.hangs > 0 {
                    out.push(Action::Hang(n, *rank, *pull));
                }
            }
        }
        out.extend((0..self.late.len()).map(Action::Again));
    }

    pub(super) fn of_writes(&self, w: &World, out: &mut Vec<Action>) {
        for (n, p) in self.producers.iter().enumerate() {
            for ((rank, push), write) in &p.writes {
                let ends = write.course != Course::Hangs;
                let mut end = |how| {
                    out.push(Action::EndWrite(n, *rank, *push, how, Times::Once));
                    if self.chances.echoes > 0 {
                        out.push(Action::EndWrite(n, *rank, *push, how, Times::Twice));
                    }
                };
                if ends && write.is_complete() {
                    end(How::Complete);
                }
                if ends && write.course == Course::Cancelled {
                    end(How::Cancelled);
                }
                if ends && self.chances.fails > 0 {
                    end(How::Failed);
                }
                if ends && self.chances.hangs > 0 {
                    end(How::InDoubt);
                    out.push(Action::HangWrite(n, *rank, *push));
                }
                if write.may_arrive() {
                    out.push(Action::Write(n, *rank, *push));
                }
            }
            let late = p.orphans.iter().enumerate().filter(|(_, (_, write))| write.may_arrive());
            out.extend(late.map(|(at, _)| Action::WriteLate(n, at)));
        }
        out.extend((0..self.late_pushes.len()).map(Action::ReportAgain));
        for (lease, plan) in w.leases.iter().enumerate() {
            let Some(p) = self.producers.get(plan.producer).filter(|p| p.is_whole()) else { continue };
            let Some(stream) = p.open.get(&w.lease_id(lease)).and_then(|open| open.stream) else { continue };
            match (stream.ready, stream.sealed) {
                (false, _) => out.push(Action::Ready(lease)),
                (true, false) => out.push(Action::Seal(lease)),
                (true, true) => {}
            }
            let due = self.overdue(plan.producer).contains(&w.lease_id(lease));
            if !stream.sealed && self.chances.prefills > 0 && !due {
                out.push(Action::Anew(lease));
            }
        }
    }

    pub(super) fn of_engines(&self, _: &World, out: &mut Vec<Action>) {
        for (n, p) in self.producers.iter().enumerate() {
            let owner = Owner::Producer(n);
            if p.down {
                out.push(Action::Rejoin(owner, RankId::new(0)));
                continue;
            }
            if self.chances.producer_restarts > 0 {
                out.push(Action::Restart(owner));
            }
            match p.lost {
                Some(rank) => out.push(Action::Rejoin(owner, rank)),
                None if self.chances.producer_ranks > 0 => {
                    out.extend(p.memory.keys().map(|rank| Action::LoseRank(owner, *rank)));
                }
                None => {}
            }
        }
        for (n, c) in self.consumers.iter().enumerate() {
            let owner = Owner::Consumer(n);
            if self.chances.consumer_restarts > 0 {
                out.push(Action::Restart(owner));
            }
            match c.lost {
                Some(rank) => out.push(Action::Rejoin(owner, rank)),
                None if self.chances.consumer_ranks > 0 => {
                    out.extend(crate::world::ranks().map(|rank| Action::LoseRank(owner, rank)));
                }
                None => {}
            }
        }
    }
}
