//! Writes whose bytes nobody will use, so that the blocks that they are sent from may be given back.
//!
//! A lease that ends unread gives its blocks back when its writers have stopped, or are in doubt. A rank that was in doubt (its process
//! slept longer than the grace) may post what it was ordered to all the same, when it wakes: whatever lies in those blocks by then.
//! Nobody is ever answered *held* for such a lease, and the consumer keeps the blocks that are written lent until it has evidence. So
//! the sender doesn't count. The write does: as soon as one of the written blocks comes back, it is in use.
//!
//! It is known by where it goes, as blocks that a request writes are lent to nobody else.

use std::collections::BTreeSet;

use kvferry_transport::EndpointId;

use super::{Fabric, Op, State};
use crate::places::Place;

impl Fabric {
    /// What one rank writes into these blocks of another is of no use to anybody: neither what is in flight nor what it posts later
    /// counts as sent, until these blocks [`belong`](Self::belong) to another.
    pub(crate) fn send_for_nothing(&self, from: EndpointId, to: EndpointId, places: &BTreeSet<Place>) {
        let mut state = self.lock();
        let (Some(from), Some(to)) = (state.find(from), state.find(to)) else { return };
        if let Some(node) = state.nodes.get_mut(to) {
            places.iter().for_each(|place| _ = node.unwanted.entry(*place).or_default().insert(from));
        }
        let sent = |op: &Op| op.node == from && op.dst_node() == to && state.is_unwanted(op);
        let all: Vec<u64> = state.ops.iter().filter(|(_, op)| sent(op)).map(|(key, _)| *key).collect();
        all.into_iter().for_each(|key| state.unsend(key));
    }

    /// Blocks of a rank are lent anew from now on: whatever is sent there counts.
    pub(crate) fn belong(&self, endpoint: EndpointId, places: &BTreeSet<Place>) {
        let mut state = self.lock();
        if let Some(node) = state.find(endpoint).and_then(|at| state.nodes.get_mut(at)) {
            node.unwanted.retain(|place, _| !places.contains(place));
        }
    }
}

impl State {
    /// Whether nobody will use what an operation writes: all of it goes where its rank [sends for nothing](Fabric::send_for_nothing),
    /// or into the memory of a process that is gone.
    pub(super) fn is_unwanted(&self, op: &Op) -> bool {
        let Some(to) = self.nodes.get(op.dst_node()) else { return true };
        let unwanted = |place| to.unwanted.get(place).is_some_and(|from| from.contains(&op.node));
        !to.alive || (!op.written.is_empty() && op.written.iter().all(unwanted))
    }

    /// Where a process was, nothing arrives.
    pub(super) fn unsend_to(&mut self, node: usize) {
        let all: Vec<u64> = self.ops.iter().filter(|(_, op)| op.dst_node() == node).map(|(key, _)| *key).collect();
        all.into_iter().for_each(|key| self.unsend(key));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvferry_geometry::batch::Batch;
    use kvferry_transport::admit::Named;
    use kvferry_transport::{OpId, OpKind, PeerId};

    use super::*;
    use crate::fabric::{FabricConfig, Fate, Owner, Stage};

    /// Writes these blocks of group 0, from block 3 of its own.
    fn write(node: usize, peer_node: usize, blocks: &[u32]) -> Op {
        Op {
            node,
            id: OpId::new(1),
            peer: PeerId::new(1),
            peer_node,
            generation: 0,
            kind: OpKind::Write,
            named: Named::default(),
            batch: Arc::new(Batch::default().check(&[], &[]).unwrap()),
            notify: None,
            copier: None,
            moved: 0,
            total: 0,
            strip: 0,
            stage: Stage::Moving,
            fate: Fate::Well,
            written: blocks.iter().map(|block| (0, *block)).collect(),
            sent: vec![(0, 3)],
            began: std::time::Duration::ZERO,
            stalled: None,
        }
    }

    #[test]
    fn what_is_sent_counts_unless_all_of_it_goes_where_nobody_wants_it() {
        let fabric = Fabric::new(FabricConfig::new(1));
        let ids = [1u8, 2, 3].map(|n| EndpointId::new([n; 16]));
        let [p, d, other] = ids;
        let nodes = ids.map(|id| fabric.lock().add(Owner { engine: 0, rank: 0, life: 1 }, id));
        let [at_p, at_d, at_other] = nodes;
        let (op, block) = (write(at_p, at_d, &[7]), |n: u32| BTreeSet::from([(0, n)]));
        let unwanted = |op: &Op| fabric.lock().is_unwanted(op);
        fabric.lock().touch(&op, true);
        fabric.lock().ops.insert(1, op);
        let touched = || (fabric.touching(p, (0, 3)).senders, fabric.touching(d, (0, 7)).writers);
        // Another block, another writer, another reader.
        fabric.send_for_nothing(p, d, &block(8));
        fabric.send_for_nothing(other, d, &block(7));
        fabric.send_for_nothing(p, other, &block(7));
        assert_eq!(touched(), (1, 1));
        fabric.send_for_nothing(p, d, &block(7));
        assert_eq!(touched(), (0, 1), "it is still written, and not sent from anywhere that matters");
        // What is posted later.
        assert!(unwanted(&write(at_p, at_d, &[7])) && unwanted(&write(at_p, at_d, &[7, 8])));
        assert!(!unwanted(&write(at_p, at_d, &[7, 9])) && !unwanted(&write(at_p, at_d, &[])));
        assert!(!unwanted(&write(at_other, at_d, &[8])) && !unwanted(&write(at_p, at_other, &[8])));
        fabric.belong(d, &block(7));
        assert!(!unwanted(&write(at_p, at_d, &[7])) && unwanted(&write(at_p, at_d, &[8])));
        fabric.kill(d, false);
        assert!(unwanted(&write(at_p, at_d, &[7])));
    }
}
