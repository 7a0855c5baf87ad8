//! What must hold in every state of every world.

use kvferry_proto::lease::Offered;
use kvferry_proto::names::Attempt;
use kvferry_proto::push::PushId;
use kvferry_proto::rank::PullId;

use crate::consumer::{Consumer, Course, LoanOf, Phase, Writers};
use crate::network::{Link, Made};
use crate::producer::{Doubt, Lease, Producer};
use crate::state::{Fate, State};
use crate::world::World;

/// A rule.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// *Held* is answered only for a lease whose blocks have not been handed back, and whose bytes are still there.
    HeldIsHeld,
    /// *Held* is answered once for a lease.
    HeldOnce,
    /// A lease gives its blocks back once.
    LeaseEndsOnce,
    /// A bound lease is released by the life and the attempt that has bound it, and by nobody else.
    ReleasedByItsReader,
    /// A lease whose blocks were handed back is not in its owner's table: it can't answer any more.
    FreeIsClosed,
    /// A request is delivered only when its lease was said to be held.
    DeliveredIsHeld,
    /// Every byte of a delivered request is the lease's, read for the attempt that is delivered.
    DeliveredIsRight,
    /// A request ends once.
    OneOutcome,
    /// A request that was given up is not delivered, and begins no further reads.
    GivenUpIsOver,
    /// A block that a read under way writes is lent to its request, or in quarantine for it.
    WrittenIsLent,
    /// An attempt's reads begin when those of the one before have all ended.
    StoppedBeforeRetry,
    /// A block that a producer's rank may still write, in memory that is there, is lent to the request that has granted it, or in
    /// quarantine for it.
    GrantedIsLent,
    /// A lease's blocks are not handed back while a rank of its producer writes them to somebody, unless that rank is in doubt.
    SourceIsKept,
    /// Writers are ordered when nothing of their lease is written any more.
    DrainedBeforeNext,
    /// An attempt is written once.
    AttemptOnce,
    /// When it was said of an attempt who has stopped, the others never write for it.
    StoppedIsOver,
    /// A request that is told that its lease is over isn't wrong about it.
    ClosedIsClosed,
    /// What a consumer thinks is left of a lease that it reads is not more than what is left of it.
    EndIsNotLater,
    /// A request is over when its deadline has passed, and the time that its ranks have to stop.
    InTime,
    /// Where nothing can happen any more, all is over: no request, no bound lease, none whose time is up, no block lent but
    /// for reads that never end.
    AllEnds,
}

impl Rule {
    /// All.
    pub const ALL: [Self; 20] = [
        Self::HeldIsHeld,
        Self::HeldOnce,
        Self::LeaseEndsOnce,
        Self::ReleasedByItsReader,
        Self::FreeIsClosed,
        Self::DeliveredIsHeld,
        Self::DeliveredIsRight,
        Self::OneOutcome,
        Self::GivenUpIsOver,
        Self::WrittenIsLent,
        Self::StoppedBeforeRetry,
        Self::GrantedIsLent,
        Self::SourceIsKept,
        Self::DrainedBeforeNext,
        Self::AttemptOnce,
        Self::StoppedIsOver,
        Self::ClosedIsClosed,
        Self::EndIsNotLater,
        Self::InTime,
        Self::AllEnds,
    ];
}

impl State {
    /// Whether a rule has held on the way to this state, and holds in it.
    #[must_use]
    pub fn keeps(&self, rule: Rule, w: &World) -> bool {
        let now = match rule {
            Rule::FreeIsClosed => self.free_is_closed(),
            Rule::WrittenIsLent => self.consumers.iter().all(written_is_lent),
            Rule::GrantedIsLent => self.granted_is_lent(),
            Rule::SourceIsKept => self.producers.iter().all(|p| self.source_is_kept(p)),
            Rule::EndIsNotLater => self.end_is_not_later(),
            Rule::InTime => self.in_time(w),
            Rule::AllEnds => self.runs() || self.is_over() || self.can_go_on(w),
            _ => true,
        };
        now && !self.broken.contains(&rule)
    }

    fn free_is_closed(&self) -> bool {
        let mut open = self.producers.iter().flat_map(|p| p.open.values());
        open.all(|o| self.leases.get(o.lease).is_none_or(|told| told.closes == 0))
    }

    /// While the one who reads it is the one who has bound it; afterwards its end is of no use.
    fn end_is_not_later(&self) -> bool {
        let reading = self.consumers.iter().flat_map(|c| c.pulls.values());
        let ends = reading.filter_map(|p| match &p.state {
            Phase::Receiving(_) | Phase::Reading(_) => Some((p, p.lease_end?)),
            _ => None,
        });
        ends.into_iter().all(|(pull, end)| {
            let open = self.producers.iter().filter_map(|p| p.open.get(&pull.fence.lease)).next();
            match open.map(|o| &o.state) {
                Some(Lease::Bound(bound, link))
                    if Some(*link) == pull.link && bound.fence().attempt == pull.attempt =>
                {
                    bound.term().end().is_none_or(|theirs| end <= theirs)
                }
                _ => true,
            }
        })
    }

    fn in_time(&self, w: &World) -> bool {
        let mut pulls = self.consumers.iter().flat_map(|c| c.pulls.values());
        pulls.all(|p| self.now <= p.deadline + w.grace() * if p.push { 2 } else { 1 })
    }

    fn granted_is_lent(&self) -> bool {
        let own = self.producers.iter().flat_map(|p| p.writes.values().chain(p.orphans.iter().map(|(_, write)| write)));
        own.into_iter().all(|write| {
            let Some(c) = self.consumers.get(write.consumer) else { return true };
            let lives = crate::world::ranks().zip(c.ranks);
            let there = lives.into_iter().any(|life| write.targets.contains(&life));
            !there || c.loans.get(&write.to).is_some_and(|loan| loan.pull == write.pull)
        })
    }

    fn source_is_kept(&self, p: &Producer) -> bool {
        p.writes.iter().all(|((rank, push), write)| {
            let open = self.leases.get(write.lease).is_none_or(|told| told.closes == 0);
            open || p.doubts.get(push).is_some_and(|doubt| doubt.ranks.contains(rank))
        })
    }

    /// Something can happen for sure; spares looking at what.
    fn runs(&self) -> bool {
        let waiting = |link: &Link| !link.at_consumer.waiting().is_empty() || !link.at_producer.waiting().is_empty();
        let reads = |c: &Consumer| c.reads.values().any(|read| read.course == Course::Cancelled);
        let writes = |p: &Producer| p.writes.values().any(|write| write.course == Course::Cancelled);
        self.links.values().any(|link| link.made != Made::Apart && waiting(link))
            || self.consumers.iter().any(reads)
            || self.producers.iter().any(writes)
    }

    fn is_over(&self) -> bool {
        let requests = self.pulls.iter().all(|fate| matches!(fate, Fate::Delivered | Fate::Failed | Fate::Gone));
        let bound = self.producers.iter().flat_map(|p| p.open.values());
        // One that was bound before is offered to somebody who knows of it.
        let first = |state: &Offered| state.fence().attempt == Attempt::FIRST && state.term().end().is_none();
        let leases = bound.into_iter().all(|o| matches!(&o.state, Lease::Offered(state) if first(state)));
        requests
            && leases
            && self.producers.iter().all(nothing_is_written)
            && self.consumers.iter().all(|c| self.nothing_is_lent(c))
    }

    /// But for reads and writes that never end, whose blocks are in quarantine.
    fn nothing_is_lent(&self, c: &Consumer) -> bool {
        let hangs = |rank, pull| c.reads.get(&(rank, pull)).is_some_and(|r| r.course == Course::Hangs);
        let writes = |theirs: &Writers, pull: PullId| {
            let Some(p) = self.producers.get(theirs.producer) else { return false };
            theirs.ranks.keys().all(|rank| p.writes.iter().any(|((of, _), write)| of == rank && write.pull == pull))
        };
        let excused = c.quarantine.iter().all(|(pull, left)| {
            let ours = left.ours.is_empty() || left.ours.iter().any(|rank| hangs(*rank, *pull));
            ours && left.theirs.as_ref().is_none_or(|theirs| writes(theirs, *pull))
        });
        let loans = c.loans.values().all(|loan| loan.of == LoanOf::Quarantine && c.quarantine.contains_key(&loan.pull));
        excused && loans && c.reads.values().all(|read| read.course == Course::Hangs)
    }
}

/// But for what never ends, which is known to be in doubt.
fn nothing_is_written(p: &Producer) -> bool {
    let hangs = p.writes.values().all(|write| write.course == Course::Hangs);
    let doubts = |(push, doubt): (&PushId, &Doubt)| doubt.ranks.iter().all(|r| p.writes.contains_key(&(*r, *push)));
    hangs && p.pushes.is_empty() && p.doubts.iter().all(doubts)
}

fn written_is_lent(c: &Consumer) -> bool {
    c.reads.iter().all(|((_, pull), read)| c.loans.get(&read.to).is_some_and(|loan| loan.pull == *pull))
}
