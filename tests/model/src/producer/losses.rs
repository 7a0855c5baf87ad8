//! What a producer loses: ranks, links, and all of its engine.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_geometry::units::RankId;
use kvferry_proto::lease::Closing;
use kvferry_proto::names::LeaseId;

use super::{BLOCKS, Content, Lease, Open, Producer, Then, Write, epoch, index};
use crate::fault::Fault;
use crate::network::{End, LinkId};
use crate::state::State;
use crate::world::World;

impl State {
    /// A rank is gone: nothing proves that its writes have stopped; its bytes are gone, and so are the leases that show them to
    /// somebody.
    pub(crate) fn lose_producer_rank(&mut self, w: &World, producer: usize, rank: RankId) {
        let Some(p) = self.producer(producer) else { return };
        p.lost = Some(rank);
        p.memory.insert(rank, [Content::Other; BLOCKS]);
        self.rank_lost_in_pushes(w, producer, rank);
        let Some(p) = self.producer(producer) else { return };
        let spared = |open: &Open| match &open.state {
            Lease::Bound(state, _) => !w.names(state.salt(), rank) || w.is(Fault::SpareAll),
            Lease::Offered(_) | Lease::Stopping { .. } => false,
        };
        let lost: Vec<LeaseId> = p.open.iter().filter(|(_, open)| !spared(open)).map(|(id, _)| *id).collect();
        for lease in lost {
            self.end_lease(w, producer, lease, Closing::RankLost);
        }
    }

    /// The lost rank joins again: another life of the engine. Or the first of an engine that has died.
    pub(crate) fn rejoin_producer_rank(&mut self, w: &World, producer: usize, rank: RankId) {
        let Some(p) = self.producer(producer) else { return };
        p.orphans.clear();
        if std::mem::take(&mut p.down) {
            return;
        }
        (p.lost, p.epoch) = (None, p.epoch.after());
        p.lived.insert(p.epoch);
        if let Some(life) = p.ranks.get_mut(index(rank.get())) {
            *life += 1;
        }
        self.rank_is_new_in_pushes(w, producer, rank);
    }

    /// `link_lost_in_leases`.
    pub(crate) fn producer_loses_link(&mut self, w: &World, producer: usize, link: LinkId) {
        if w.is(Fault::KeepAfterLink) {
            return;
        }
        let Some(p) = self.producer(producer) else { return };
        let of_link = |open: &Open| match &open.state {
            Lease::Bound(_, of) | Lease::Stopping { link: of, .. } => *of == link,
            // Whom it is offered to anew can't come by another link.
            Lease::Offered(_) => open.before.as_ref().is_some_and(|(_, of)| *of == link),
        };
        let lost: Vec<LeaseId> = p.open.iter().filter(|(_, open)| of_link(open)).map(|(id, _)| *id).collect();
        for lease in lost {
            match self.producers.get(producer).and_then(|p| p.open.get(&lease)).map(|open| &open.state) {
                Some(Lease::Offered(_)) if w.is(Fault::ReopenForNobody) => {}
                Some(Lease::Offered(_)) => self.end_lease(w, producer, lease, Closing::ConsumerLost),
                _ => self.end_bound(w, producer, lease, Then::Close(Closing::ConsumerLost)),
            }
        }
    }

    /// All of the engine dies and is started again: no lease, other bytes, another epoch. What its ranks were writing may go on until
    /// all of them are new.
    pub(crate) fn restart_producer(&mut self, w: &World, producer: usize) {
        let Some(p) = self.producer(producer) else { return };
        let gone: Vec<usize> = p.open.values().map(|open| open.lease).collect();
        let lives = p.lives + 1;
        let new = Producer { lives, epoch: epoch(producer, lives), ..Producer::new(producer) };
        let open = if w.is(Fault::ForgetEpoch) { std::mem::take(&mut p.open) } else { BTreeMap::new() };
        let orphans: Vec<(RankId, Write)> =
            std::mem::take(&mut p.writes).into_iter().map(|((rank, _), write)| (rank, write)).collect();
        let (down, ranks) = (!orphans.is_empty(), p.ranks.map(|life| life + 1));
        *p = Producer { lived: BTreeSet::from([new.epoch]), open, orphans, down, ranks, ..new };
        for number in gone {
            if let Some(told) = self.leases.get_mut(number) {
                told.gone = true;
            }
        }
        for link in self.links.values_mut().filter(|l| l.producer == producer) {
            link.drop_end(End::Producer);
        }
        self.late_pushes.retain(|late| late.producer != producer);
    }
}
