//! What must hold in every state of every world.

use crate::consumer::{Consumer, Course, LoanOf, Phase};
use crate::network::Link;
use crate::producer::Lease;
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
    pub const ALL: [Self; 14] = [
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
            Phase::Reading(_) => Some((p, p.lease_end?)),
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
        pulls.all(|p| self.now <= p.deadline + w.grace())
    }

    /// Something can happen for sure; spares looking at what.
    fn runs(&self) -> bool {
        let waiting = |link: &Link| !link.at_consumer.waiting().is_empty() || !link.at_producer.waiting().is_empty();
        let reads = |c: &Consumer| c.reads.values().any(|read| read.course == Course::Cancelled);
        self.links.values().any(waiting) || self.consumers.iter().any(reads)
    }

    fn is_over(&self) -> bool {
        let requests = self.pulls.iter().all(|fate| matches!(fate, Fate::Delivered | Fate::Failed | Fate::Gone));
        let bound = self.producers.iter().flat_map(|p| p.open.values());
        let leases =
            bound.into_iter().all(|o| matches!(&o.state, Lease::Offered(state) if state.term().end().is_none()));
        requests && leases && self.consumers.iter().all(nothing_is_lent)
    }
}

fn written_is_lent(c: &Consumer) -> bool {
    c.reads.iter().all(|((_, pull), read)| c.loans.get(&read.to).is_some_and(|loan| loan.pull == *pull))
}

/// But for reads that never end, whose blocks are in quarantine.
fn nothing_is_lent(c: &Consumer) -> bool {
    let hangs = |rank, pull| c.reads.get(&(rank, pull)).is_some_and(|r| r.course == Course::Hangs);
    let excused = c.quarantine.iter().all(|(pull, (_, ranks))| ranks.iter().any(|rank| hangs(*rank, *pull)));
    let loans = c.loans.values().all(|loan| loan.of == LoanOf::Quarantine && c.quarantine.contains_key(&loan.pull));
    excused && loans && c.reads.values().all(|read| read.course == Course::Hangs)
}
