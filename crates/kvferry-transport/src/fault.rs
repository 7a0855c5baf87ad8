//! Faults by script in front of any backend: a wrapper that is a transport.
//!
//! A [`Script`] says what goes wrong with the k-th registration, connection, submission, or received notification; all
//! are counted from 0 over the wrapper's life. Everything that the script doesn't name passes unchanged. The contract
//! still holds towards the caller (each operation ends once, in doubt is said where it is so), but for
//! [`OpFault::DropNotify`] and [`Script::drop_received`], which break `[notify]` on purpose.
//!
//! ```
//! use kvferry_transport::{RegisterError, Region, Transport, mem::MemNetwork};
//! use kvferry_transport::fault::{Faulty, Script};
//! let refused = RegisterError::Refused { backend: "mem", len: Default::default(), reason: "on demand".into() };
//! let script = Script { register: [(1, refused.clone())].into(), ..Script::default() };
//! let mut t = Faulty::new(MemNetwork::new(1).endpoint()?, script);
//! t.register(Region::zeroed(1).unwrap())?;
//! assert_eq!(t.register(Region::zeroed(1).unwrap()), Err(refused));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use kvferry_geometry::units::RegionId;

use crate::error::{
    ConnectError, DeregisterError, RegisterError, RevokeError, SubmitError, TransferError, UnknownOp, UnknownPeer,
};
use crate::gate::Gate;
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Capabilities, EndpointId, Event, OpId, Outcome, PeerId, PeerInfo, RevokeScope, Submission};

/// What goes wrong with one submission.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OpFault {
    /// It is refused.
    Refuse(SubmitError),
    /// It is accepted, never posted, and ends as failed.
    Fail(TransferError),
    /// It is done below, and ends as in doubt.
    InDoubt(TransferError),
    /// It is posted this much after the first step that sees it.
    Delay(Duration),
    /// Its end is told this much later than it happened.
    HoldCompletion(Duration),
    /// Its end is not told; it stays in flight until cancelled, disconnected or the peer is lost, then ends in doubt.
    LoseCompletion,
    /// Its notification is taken off.
    DropNotify,
}

/// What goes wrong, by count.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Registrations that are refused.
    pub register: BTreeMap<u64, RegisterError>,
    /// Connections that are refused.
    pub connect: BTreeMap<u64, ConnectError>,
    /// Submissions.
    pub submit: BTreeMap<u64, OpFault>,
    /// Received notifications that are swallowed.
    pub drop_received: BTreeSet<u64>,
}

/// A transport with scripted faults.
#[derive(Debug)]
pub struct Faulty<T> {
    gate: Gate<T>,
    script: Script,
    counts: Counts,
    /// Accepted operations that were not posted, in order.
    held: Vec<Held>,
    /// Faults of posted operations that come into play at their end.
    at_end: BTreeMap<OpId, OpFault>,
    /// Ends that are kept back: when they are told (never, where `None`), and how.
    kept: BTreeMap<OpId, (Option<Duration>, Outcome)>,
}

#[derive(Debug, Default)]
struct Counts {
    register: u64,
    connect: u64,
    submit: u64,
    received: u64,
}

#[derive(Debug)]
struct Held {
    op: OpId,
    fault: Option<OpFault>,
    /// When it is posted; not known before a step has seen it.
    due: Option<Duration>,
}

impl<T: Transport> Faulty<T> {
    /// Puts a script in front of a transport.
    #[must_use]
    pub fn new(inner: T, script: Script) -> Self {
        let counts = Counts::default();
        Self {
            gate: Gate::new(inner),
            script,
            counts,
            held: Vec::new(),
            at_end: BTreeMap::new(),
            kept: BTreeMap::new(),
        }
    }

    /// Posts what is due; gives the time of the next.
    fn post_due(&mut self, now: Duration) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        for mut held in std::mem::take(&mut self.held) {
            if !self.gate.is_open(held.op) {
                continue;
            }
            let delay = if let Some(OpFault::Delay(delay)) = held.fault { delay } else { Duration::ZERO };
            let due = *held.due.get_or_insert(now + delay);
            if due > now {
                next = Some(next.map_or(due, |n| n.min(due)));
                self.held.push(held);
            } else {
                self.post(held);
            }
        }
        next
    }

    fn post(&mut self, held: Held) {
        match held.fault {
            Some(OpFault::Fail(error)) => return self.gate.end(held.op, Outcome::Failed(error)),
            Some(OpFault::DropNotify) => {
                if let Some(submission) = self.gate.held(held.op) {
                    submission.notify = None;
                }
            }
            Some(fault) => {
                self.at_end.insert(held.op, fault);
            }
            None => {}
        }
        self.gate.post(held.op);
        if !self.gate.is_open(held.op) {
            self.at_end.remove(&held.op);
        }
    }

    fn pass_events(&mut self, now: Duration) {
        while let Some(event) = self.gate.next_inner() {
            match event {
                Event::Completed { op, outcome, .. } => self.ended_below(op, outcome, now),
                Event::Notification { .. } => {
                    let index = self.counts.received;
                    self.counts.received += 1;
                    if !self.script.drop_received.contains(&index) {
                        self.gate.push(event);
                    }
                }
                Event::PeerLost { peer, ref cause } => {
                    self.end_kept(peer, &TransferError::PeerLost(cause.clone()));
                    self.gate.push(event);
                }
                Event::Connected { .. } => self.gate.push(event),
            }
        }
    }

    fn ended_below(&mut self, op: OpId, outcome: Outcome, now: Duration) {
        match self.at_end.remove(&op) {
            Some(OpFault::InDoubt(error)) => self.gate.end(op, Outcome::InDoubt(error)),
            Some(OpFault::HoldCompletion(delay)) => {
                self.kept.insert(op, (Some(now + delay), outcome));
            }
            Some(OpFault::LoseCompletion) => match outcome {
                Outcome::Done(_) => {
                    self.kept.insert(op, (None, outcome));
                }
                Outcome::Failed(why) | Outcome::InDoubt(why) => self.gate.end(op, Outcome::InDoubt(why)),
            },
            _ => self.gate.end(op, outcome),
        }
    }

    /// Tells the ends that are due; gives the time of the next.
    fn tell_due(&mut self, now: Duration) -> Option<Duration> {
        let due = |(_, (at, _)): &(&OpId, &(Option<Duration>, Outcome))| at.is_some_and(|at| at <= now);
        let ripe: Vec<OpId> = self.kept.iter().filter(due).map(|(op, _)| *op).collect();
        for op in ripe {
            if let Some((_, outcome)) = self.kept.remove(&op) {
                self.gate.end(op, outcome);
            }
        }
        self.kept.values().filter_map(|(at, _)| *at).min()
    }

    /// Ends the operations of a peer whose ends are kept back.
    fn end_kept(&mut self, peer: PeerId, why: &TransferError) {
        for op in self.gate.kept(peer) {
            self.end_one_kept(op, why);
        }
    }

    fn end_one_kept(&mut self, op: OpId, why: &TransferError) {
        match self.kept.remove(&op) {
            Some((Some(_), outcome)) => self.gate.end(op, outcome),
            Some((None, _)) => self.gate.end(op, Outcome::InDoubt(why.clone())),
            None => {}
        }
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn capabilities(&self) -> &Capabilities {
        self.gate.inner.capabilities()
    }

    fn endpoint(&self) -> EndpointId {
        self.gate.inner.endpoint()
    }

    fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        let index = self.counts.register;
        self.counts.register += 1;
        match self.script.register.get(&index) {
            Some(error) => Err(error.clone()),
            None => self.gate.register(region),
        }
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        self.gate.deregister(region)
    }

    fn blob(&self) -> Vec<u8> {
        self.gate.inner.blob()
    }

    fn connect(&mut self, blob: &[u8]) -> Result<PeerId, ConnectError> {
        let index = self.counts.connect;
        self.counts.connect += 1;
        match self.script.connect.get(&index) {
            Some(error) => Err(error.clone()),
            None => self.gate.inner.connect(blob),
        }
    }

    fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.gate.disconnect(peer)?;
        for op in self.gate.posted(peer) {
            self.at_end.remove(&op);
        }
        self.end_kept(peer, &TransferError::Disconnected);
        Ok(())
    }

    fn peer(&self, peer: PeerId) -> Result<PeerInfo, UnknownPeer> {
        self.gate.inner.peer(peer)
    }

    fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let index = self.counts.submit;
        self.counts.submit += 1;
        let fault = self.script.submit.get(&index).cloned();
        if let Some(OpFault::Refuse(error)) = fault {
            return Err(error);
        }
        let op = self.gate.submit(submission)?;
        self.held.push(Held { op, fault, due: None });
        Ok(op)
    }

    fn cancel(&mut self, op: OpId) -> Result<(), UnknownOp> {
        if !self.gate.cancel(op)? {
            self.end_one_kept(op, &TransferError::Cancelled);
        }
        // Whoever asks for the end is told it.
        self.at_end.remove(&op);
        Ok(())
    }

    fn revoke(&mut self, scope: RevokeScope) -> Result<(), RevokeError> {
        self.gate.inner.revoke(scope)
    }

    fn step(&mut self, now: Duration) -> Option<Duration> {
        let held = self.post_due(now);
        let inner = self.gate.inner.step(now);
        self.pass_events(now);
        let kept = self.tell_due(now);
        [held, inner, kept].into_iter().flatten().min()
    }

    fn next_event(&mut self) -> Option<Event> {
        self.gate.next_event()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.gate.inner.wake_fd()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.gate.has_events() || self.gate.inner.wait(timeout)
    }
}
