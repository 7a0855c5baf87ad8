//! Operations over wires that they share: where [`FabricConfig::wires`](super::FabricConfig::wires) says what is between ranks, an
//! operation takes as long as its bytes take there.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use kvferry_transport::OpKind;

use super::op::Stage;
use super::{Due, Owner, State};
use crate::flows::{Flow, FlowId, Flows};

/// What is between ranks, each named by its engine and rank.
pub trait Wires: Debug + Send + Sync {
    /// Units per second of each link: bytes, or descriptors where it is what works through those.
    fn capacities(&self) -> Vec<f64>;

    /// How bytes go from one rank to another: the parts of a transfer that go different ways. `kind` says which of the two posts it.
    fn paths(&self, src: (u32, u32), dst: (u32, u32), kind: OpKind) -> Vec<Path>;
}

/// One way.
#[derive(Clone, PartialEq, Debug)]
pub struct Path {
    /// The part of a transfer that goes this way, above 0, at most 1.
    pub share: f64,
    /// The links, by their place in [`Wires::capacities`].
    pub links: Vec<u32>,
    /// What works through the descriptors, also links.
    pub work: Vec<u32>,
    /// From one end to the other.
    pub latency: Duration,
    /// What an operation costs the rank that posts it, whatever its size: the next can't begin before.
    pub per_message: Duration,
    /// The most bytes per second of one operation.
    pub cap: f64,
}

/// What went from one rank to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    /// Bytes.
    pub bytes: u64,
    /// Descriptors.
    pub descriptors: u64,
    /// Operations.
    pub ops: u64,
}

/// What went from one rank to another, and which ranks these are: each by its engine and rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PairMoved {
    /// Where the bytes were.
    pub src: (u32, u32),
    /// Where they went.
    pub dst: (u32, u32),
    /// How much.
    pub moved: Moved,
}

/// Flows that stand for operations.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) flows: Flows,
    pub(crate) links: u32,
    /// The operation of a flow.
    ops: BTreeMap<FlowId, u64>,
    /// The flows of an operation that have not ended, and how long the last of its bytes is on its way.
    of_op: BTreeMap<u64, (Vec<FlowId>, Duration)>,
    pub(crate) moved: BTreeMap<(Pair, Pair), Moved>,
    /// The engines (source, destination) whose operations are written down, and what was.
    pub(crate) logs: Option<(u32, u32)>,
    pub(crate) log: Vec<Logged>,
}

/// An operation that was written down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Logged {
    /// Rank of the source.
    pub src: u32,
    /// Rank of the destination.
    pub dst: u32,
    /// When its first byte moved.
    pub begin: Duration,
    /// When its end was known.
    pub end: Duration,
    /// Bytes.
    pub bytes: u64,
}

/// An engine and a rank.
pub(crate) type Pair = (u32, u32);

impl Network {
    pub(crate) fn new(wires: &dyn Wires) -> Self {
        let capacities = wires.capacities();
        let links = u32::try_from(capacities.len()).unwrap_or(u32::MAX);
        Self {
            flows: Flows::new(capacities),
            links,
            ops: BTreeMap::new(),
            of_op: BTreeMap::new(),
            moved: BTreeMap::new(),
            logs: None,
            log: Vec::new(),
        }
    }
}

fn name(owner: Owner) -> Pair {
    (owner.engine, owner.rank)
}

impl State {
    /// Both ends of an operation, the source first.
    fn ends(&self, key: u64) -> Option<(Pair, Pair)> {
        let op = self.ops.get(&key)?;
        let (own, peer) = (name(self.nodes.get(op.node)?.owner), name(self.nodes.get(op.peer_node)?.owner));
        Some(if op.kind == OpKind::Read { (peer, own) } else { (own, peer) })
    }

    /// How long until the first byte of an operation moves.
    pub(crate) fn approach(&mut self, key: u64) -> Option<Duration> {
        let wires = self.config.wires.clone()?;
        let (src, dst) = self.ends(key)?;
        let op = self.ops.get(&key)?;
        let (node, kind) = (op.node, op.kind);
        let paths = wires.paths(src, dst, kind);
        let post = paths.iter().map(|p| p.per_message).max()?;
        // A read is asked for at the other end.
        let ask = paths.iter().map(|p| if kind == OpKind::Read { p.latency } else { Duration::ZERO }).max()?;
        let now = self.now;
        let node = self.nodes.get_mut(node)?;
        node.busy = node.busy.max(now) + post;
        Some(node.busy - now + ask)
    }

    /// The bytes of an operation begin to move.
    pub(crate) fn flow(&mut self, key: u64) {
        let (Some(wires), Some((src, dst)), Some(op)) = (self.config.wires.clone(), self.ends(key), self.ops.get(&key))
        else {
            return;
        };
        let (bytes, descriptors) = (op.total as f64, op.batch.batch().descriptors() as f64);
        let read = op.kind == OpKind::Read;
        let paths = wires.paths(src, dst, op.kind);
        // The end of a write is told by an answer.
        let back = paths.iter().map(|p| p.latency * if read { 1 } else { 2 }).max().unwrap_or_default();
        let now = self.now;
        let Some(network) = &mut self.network else { return };
        let mut flows = Vec::new();
        for path in paths {
            let mut uses: Vec<(u32, f64)> = path.links.iter().map(|link| (*link, 1.0)).collect();
            uses.extend(path.work.iter().filter(|_| bytes > 0.0).map(|work| (*work, descriptors / bytes)));
            let id = network.flows.begin(now, Flow { size: bytes * path.share, uses, cap: path.cap });
            network.ops.insert(id, key);
            flows.push(id);
        }
        network.of_op.insert(key, (flows, back));
        if let Some(op) = self.ops.get_mut(&key) {
            op.began = now;
        }
    }

    /// Bytes have arrived: where they are the last of an operation, it ends.
    pub(crate) fn flowed(&mut self, id: FlowId) {
        let Some(network) = &mut self.network else { return };
        let Some(key) = network.ops.remove(&id) else { return };
        let Some((flows, back)) = network.of_op.get_mut(&key) else { return };
        flows.retain(|flow| *flow != id);
        if !flows.is_empty() {
            return;
        }
        let back = *back;
        network.of_op.remove(&key);
        if let Some(op) = self.ops.get_mut(&key) {
            op.moved = op.total;
            op.stage = Stage::Ending;
            self.put(back, Due::End(key));
        }
    }

    /// An operation is no more: its bytes stop.
    pub(crate) fn unflow(&mut self, key: u64) {
        let now = self.now;
        let Some(network) = &mut self.network else { return };
        let Some((flows, _)) = network.of_op.remove(&key) else { return };
        for id in flows {
            network.ops.remove(&id);
            network.flows.stop(now, id);
        }
    }

    /// Writes down what an operation has moved.
    pub(crate) fn enter(&mut self, key: u64) {
        let (Some(ends), Some(op)) = (self.ends(key), self.ops.get(&key)) else { return };
        let (bytes, descriptors) = (op.total, op.batch.batch().descriptors());
        let (begin, end) = (op.began, self.now);
        let Some(network) = &mut self.network else { return };
        if network.logs == Some((ends.0.0, ends.1.0)) {
            network.log.push(Logged { src: ends.0.1, dst: ends.1.1, begin, end, bytes });
        }
        let moved = network.moved.entry(ends).or_default();
        moved.bytes += bytes;
        moved.descriptors += descriptors;
        moved.ops += 1;
    }
}
