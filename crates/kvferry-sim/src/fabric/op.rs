//! One operation, from acceptance to the moment when it touches nothing any more.

use std::sync::Arc;
use std::time::Duration;

use kvferry_geometry::batch::BoundedBatch;
use kvferry_geometry::units::{Bytes, RegionId};
use kvferry_transport::admit::Named;
use kvferry_transport::copy::Copier;
use kvferry_transport::error::LostCause;
use kvferry_transport::strips::Strips;
use kvferry_transport::types::Stats as Moved;
use kvferry_transport::{EndpointId, Event, OpId, OpKind, Outcome, PeerId, TransferError};

use super::{Due, State};
use crate::faults::FaultKind;
use crate::places::{Place, RankPlaces};
use crate::rng::{ms, us};

#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) node: usize,
    pub(crate) id: OpId,
    pub(crate) peer: PeerId,
    pub(crate) peer_node: usize,
    pub(crate) generation: u64,
    pub(crate) kind: OpKind,
    pub(crate) named: Named,
    pub(crate) batch: Arc<BoundedBatch>,
    pub(crate) notify: Option<Vec<u8>>,
    pub(crate) copier: Option<Copier>,
    pub(crate) moved: u64,
    pub(crate) total: u64,
    /// Bytes of a strip.
    pub(crate) strip: u64,
    pub(crate) stage: Stage,
    pub(crate) fate: Fate,
    /// Blocks that it writes, at whoever is the destination.
    pub(crate) written: Vec<Place>,
    /// Blocks of its own rank that it sends.
    pub(crate) sent: Vec<Place>,
    /// When its bytes began to move, where there are wires.
    pub(crate) began: Duration,
    /// Since when it has waited for a lane that moves nothing.
    pub(crate) stalled: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    Moving,
    /// All bytes are moved, and it will be told.
    Ending,
    /// All bytes are moved, and it will not be told.
    Untold,
    /// It has ended for its poster, and bytes may still land.
    Told,
}

/// What goes wrong with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Well,
    /// It breaks at this byte.
    Fails(u64),
    /// It ends in doubt at this byte, and moves no further.
    Doubt(u64),
    /// It ends in doubt at this byte, and goes on later.
    Late(u64),
    /// Its end is lost.
    Lost,
}

impl Op {
    pub(crate) fn dst_node(&self) -> usize {
        match self.kind {
            OpKind::Read => self.node,
            OpKind::Write => self.peer_node,
        }
    }

    fn src_node(&self) -> usize {
        match self.kind {
            OpKind::Read => self.peer_node,
            OpKind::Write => self.node,
        }
    }

    pub(crate) fn writes_away(&self) -> bool {
        self.kind == OpKind::Write
    }

    fn breaks_at(&self) -> u64 {
        match self.fate {
            Fate::Fails(at) | Fate::Doubt(at) | Fate::Late(at) => at.min(self.total),
            Fate::Well | Fate::Lost => self.total,
        }
    }

    fn stats(&self) -> Moved {
        Moved { bytes: Bytes::new(self.moved), descriptors: self.batch.batch().descriptors() }
    }
}

/// The blocks of one side of a batch.
fn places(batch: &BoundedBatch, map: &RankPlaces, dst: bool) -> Vec<Place> {
    let mut all = Vec::new();
    let mut strips = Strips::new(batch, 0..batch.bytes().get());
    while let Some(s) = strips.next_within(u64::MAX) {
        let (region, offset, stride) = match dst {
            true => (s.dst_region, s.dst_offset, s.dst_stride),
            false => (s.src_region, s.src_offset, s.src_stride),
        };
        for run in 0..s.count {
            map.find(region, offset + run * stride, s.run, &mut all);
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

impl State {
    /// Takes an operation whose batch was admitted.
    pub(crate) fn accept(&mut self, mut op: Op) {
        let (node, peer) = (op.node, op.peer);
        let key = self.new_key();
        op.fate = self.fate(node, op.total);
        if let Some(map) = self.places_of(op.dst_node()) {
            op.written = places(&op.batch, &map, true);
        }
        let unwanted = self.is_unwanted(&op);
        self.stats.unwanted += u64::from(unwanted && op.kind == OpKind::Write);
        if op.kind == OpKind::Write
            && !unwanted
            && let Some(map) = self.places_of(node)
        {
            op.sent = places(&op.batch, &map, false);
        }
        let most = if self.config.bytes { self.config.strips.max(1) } else { 1 };
        let pieces = self.nodes.get_mut(node).map_or(1, |n| n.rng.between(1, most));
        op.strip = (op.total / pieces).max(64);
        self.touch(&op, true);
        self.stats.op_begun(op.kind, op.total);
        if let Some(n) = self.nodes.get_mut(node) {
            n.ops.insert(op.id, key);
        }
        self.ops.insert(key, op);
        let up = self.nodes.get_mut(node).and_then(|n| n.peers.get_mut(&peer)).is_some_and(|conn| match conn.link {
            super::Link::New => {
                conn.waiting.push(key);
                false
            }
            _ => true,
        });
        if up {
            let mut after = self.approach(key).unwrap_or_else(|| self.latency(node));
            if self.goes_wrong(node, FaultKind::SlowOp) {
                after += self.draw(node, (ms(5), ms(900)));
            }
            self.put(after, Due::Strip(key));
        }
    }

    fn fate(&mut self, node: usize, total: u64) -> Fate {
        let at = self.nodes.get_mut(node).map_or(0, |n| n.rng.below(total.saturating_add(1)));
        if self.goes_wrong(node, FaultKind::FailedOp) {
            Fate::Fails(at)
        } else if self.goes_wrong(node, FaultKind::DoubtfulOp) {
            Fate::Doubt(at)
        } else if self.goes_wrong(node, FaultKind::LateBytes) {
            Fate::Late(at)
        } else if self.goes_wrong(node, FaultKind::LostCompletion) {
            Fate::Lost
        } else {
            Fate::Well
        }
    }

    pub(crate) fn strip(&mut self, key: u64) {
        let Some(op) = self.ops.get(&key) else { return };
        if !matches!(op.stage, Stage::Moving | Stage::Told) {
            return;
        }
        let (node, peer_node, peer, told) = (op.node, op.peer_node, op.peer, op.stage == Stage::Told);
        let alive = |n: usize| self.nodes.get(n).is_some_and(|n| n.alive);
        if !alive(op.dst_node()) || !alive(peer_node) {
            // Where the peer is gone, that will be noticed. Nobody notices what was left of one that ended before.
            if told {
                self.release(key);
            }
            return;
        }
        if let Some(until) = self.cut_until(node, peer_node) {
            return self.stall(key, until);
        }
        if let Err(error) = self.allowed(key) {
            self.end(key, Outcome::Failed(error));
            return self.release(key);
        }
        if self.network.is_some() {
            return self.flow(key);
        }
        let Some(op) = self.ops.get_mut(&key) else { return };
        op.stalled = None;
        let limit = if told { op.total } else { op.breaks_at() };
        let end = limit.min(op.moved.saturating_add(op.strip)).max(op.moved);
        let bytes = end - op.moved;
        let range = op.moved..end;
        op.moved = end;
        if self.config.bytes
            && bytes > 0
            && let Err(reason) = self.copy(key, range)
        {
            self.end(key, Outcome::Failed(TransferError::Lane { reason }));
            return self.release(key);
        }
        self.stats.strips += 1;
        if end < limit {
            let at = self.occupy(node, peer_node, bytes);
            return self.at(at, Due::Strip(key));
        }
        if told {
            return self.release(key);
        }
        let Some(op) = self.ops.get_mut(&key) else { return };
        let broken = || TransferError::Lane { reason: format!("broken at byte {end}") };
        match op.fate {
            Fate::Fails(_) => {
                self.end(key, Outcome::Failed(broken()));
                self.release(key);
            }
            Fate::Doubt(_) => {
                // It moves no further, but nobody can know that.
                self.end(key, Outcome::InDoubt(broken()));
                self.release(key);
            }
            Fate::Late(_) => {
                op.stage = Stage::Told;
                self.unsend(key);
                self.end(key, Outcome::InDoubt(broken()));
                let after = self.draw(node, self.config.late);
                self.put(after, Due::Strip(key));
            }
            Fate::Lost => {
                op.stage = Stage::Untold;
                let after = self.draw(node, (ms(20), ms(4000)));
                self.put(after, Due::Missed(key));
            }
            Fate::Well => {
                op.stage = Stage::Ending;
                let at = self.occupy(node, peer_node, bytes);
                let after = self.latency(node);
                self.at(at.saturating_add(after), Due::End(key));
                let _ = peer;
            }
        }
    }

    /// Nothing moves: it waits, or the lane is given up.
    fn stall(&mut self, key: u64, until: Duration) {
        let now = self.now;
        let Some(op) = self.ops.get_mut(&key) else { return };
        let (node, peer, told) = (op.node, op.peer, op.stage == Stage::Told);
        let since = *op.stalled.get_or_insert(now);
        if !told && now.saturating_sub(since) >= ms(400) {
            return self.lose(node, peer, LostCause::Lane("nothing moves any more".into()));
        }
        let again = until.min(now.saturating_add(ms(100)));
        self.at(again, Due::Strip(key));
    }

    /// Whether the peer still lets it.
    fn allowed(&self, key: u64) -> Result<(), TransferError> {
        let Some(op) = self.ops.get(&key) else { return Ok(()) };
        let (Some(theirs), Some(ours)) = (self.nodes.get(op.peer_node), self.nodes.get(op.node)) else { return Ok(()) };
        let ours: EndpointId = ours.id;
        for &region in &op.named.peers {
            if theirs.table.generation() != op.generation || theirs.table.get(region).is_none() {
                return Err(TransferError::Stale { region });
            }
            if theirs.banned.contains(&ours) || theirs.revoked.contains(&region) {
                return Err(TransferError::Revoked { region });
            }
        }
        Ok(())
    }

    fn copy(&mut self, key: u64, range: std::ops::Range<u64>) -> Result<(), String> {
        let Some(op) = self.ops.get(&key) else { return Ok(()) };
        if op.copier.is_none() {
            let table = |n: usize, id: RegionId| self.nodes.get(n).and_then(|n| n.table.get(id).cloned());
            let (src, dst) = (op.src_node(), op.dst_node());
            let made = Copier::new(op.batch.clone(), |id| table(src, id), |id| table(dst, id));
            let made = made.map_err(|e| e.to_string())?;
            if let Some(op) = self.ops.get_mut(&key) {
                op.copier = Some(made);
            }
        }
        if let Some(copier) = self.ops.get(&key).and_then(|op| op.copier.as_ref()) {
            let _ = copier.copy(range);
        }
        Ok(())
    }

    pub(crate) fn told(&mut self, key: u64) {
        let Some(op) = self.ops.get_mut(&key) else { return };
        if op.stage != Stage::Ending {
            return;
        }
        let (stats, notify, to) = (op.stats(), op.notify.take(), op.peer_node);
        let from = self.nodes.get(op.node).map(|n| n.id);
        if let (Some(payload), Some(from)) = (notify, from) {
            self.tell(to, Event::Notification { from, payload });
        }
        self.enter(key);
        self.end(key, Outcome::Done(stats));
        self.release(key);
    }

    pub(crate) fn missed(&mut self, key: u64) {
        if self.ops.get(&key).is_some_and(|op| op.stage == Stage::Untold) {
            self.end(key, Outcome::InDoubt(TransferError::Lane { reason: "its end was never told".into() }));
            self.release(key);
        }
    }

    /// A cancel reaches the card some time after it was asked for.
    pub(crate) fn cancel(&mut self, key: u64) {
        let Some(node) = self.ops.get(&key).map(|op| op.node) else { return };
        if self.goes_wrong(node, FaultKind::DeafCancel) {
            return;
        }
        let after = self.draw(node, (us(1), us(200)));
        self.put(after, Due::Stop(key));
    }

    pub(crate) fn stopped(&mut self, key: u64) {
        self.stop_now(key, TransferError::Cancelled);
    }

    /// Stops an operation now, as far as that can be.
    pub(crate) fn stop_now(&mut self, key: u64, why: TransferError) {
        let Some(op) = self.ops.get_mut(&key) else { return };
        let node = op.node;
        match op.stage {
            Stage::Told => {}
            Stage::Ending => self.told(key),
            Stage::Untold => {
                self.end(key, Outcome::InDoubt(why));
                self.release(key);
            }
            Stage::Moving => match op.fate {
                Fate::Late(_) => {
                    op.stage = Stage::Told;
                    self.unsend(key);
                    self.end(key, Outcome::InDoubt(why));
                    let after = self.draw(node, self.config.late);
                    self.put(after, Due::Strip(key));
                }
                Fate::Doubt(_) => {
                    self.end(key, Outcome::InDoubt(why));
                    self.release(key);
                }
                _ => {
                    self.end(key, Outcome::Failed(why));
                    self.release(key);
                }
            },
        }
    }
}
