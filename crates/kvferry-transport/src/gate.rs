//! What wrappers that hold operations back have in common: ids of their own, admission at once, posting later.
//!
//! A held operation is an accepted one: it was checked, keeps its regions registered, and ends once, also if it is
//! cancelled, disconnected or its peer is lost before it was ever posted.

use std::collections::{BTreeMap, HashMap, VecDeque};

use kvferry_geometry::units::{Bytes, RegionId};

use crate::admit::{Named, admit};
use crate::error::{DeregisterError, LostCause, RegisterError, SubmitError, TransferError, UnknownOp, UnknownPeer};
use crate::region::Region;
use crate::transport::Transport;
use crate::types::{Event, OpId, Outcome, PeerId, Submission};

/// A transport whose operations are posted when its owner says so.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    pub(crate) inner: T,
    lens: BTreeMap<RegionId, Bytes>,
    ops: BTreeMap<OpId, GateOp>,
    by_inner: HashMap<OpId, OpId>,
    events: VecDeque<Event>,
    lost: BTreeMap<PeerId, LostCause>,
    next_op: u64,
}

#[derive(Debug)]
struct GateOp {
    peer: PeerId,
    named: Named,
    state: State,
}

#[derive(Debug)]
enum State {
    Held(Submission),
    Posted(OpId),
    /// Never posted, or ended below without being told yet: its owner tells its end.
    Kept,
}

impl<T: Transport> Gate<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self {
            inner,
            lens: BTreeMap::new(),
            ops: BTreeMap::new(),
            by_inner: HashMap::new(),
            events: VecDeque::new(),
            lost: BTreeMap::new(),
            next_op: 0,
        }
    }

    pub(crate) fn register(&mut self, region: Region) -> Result<RegionId, RegisterError> {
        let len = region.len();
        let id = self.inner.register(region)?;
        self.lens.insert(id, len);
        Ok(id)
    }

    pub(crate) fn deregister(&mut self, region: RegionId) -> Result<(), DeregisterError> {
        let operations = self.ops.values().filter(|op| op.named.ours.binary_search(&region).is_ok()).count();
        if operations > 0 {
            return Err(DeregisterError::Busy { region, operations });
        }
        self.inner.deregister(region)?;
        self.lens.remove(&region);
        Ok(())
    }

    /// Accepts an operation and holds it.
    pub(crate) fn submit(&mut self, submission: Submission) -> Result<OpId, SubmitError> {
        let peer = submission.peer;
        let info = self.inner.peer(peer).map_err(|UnknownPeer(peer)| SubmitError::UnknownPeer { peer })?;
        if let Some(cause) = self.lost.get(&peer) {
            return Err(SubmitError::PeerLost { peer, cause: cause.clone() });
        }
        let ours = |id| self.lens.get(&id).copied();
        let named = admit(&submission, self.inner.capabilities(), self.ops.len(), ours, &info)?;
        let id = OpId::new(self.next_op);
        self.next_op += 1;
        self.ops.insert(id, GateOp { peer, named, state: State::Held(submission) });
        Ok(id)
    }

    /// Posts a held operation; one that cannot be posted ends as failed.
    pub(crate) fn post(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let State::Held(submission) = std::mem::replace(&mut op.state, State::Kept) else { return };
        match self.inner.submit(submission) {
            Ok(inner) => {
                op.state = State::Posted(inner);
                self.by_inner.insert(inner, id);
            }
            Err(SubmitError::PeerLost { cause, .. }) => {
                self.end(id, Outcome::Failed(TransferError::PeerLost(cause)));
            }
            Err(error) => self.end(id, Outcome::Failed(TransferError::Lane { reason: error.to_string() })),
        }
    }

    /// The held submission, to change it before it is posted.
    pub(crate) fn held(&mut self, id: OpId) -> Option<&mut Submission> {
        match self.ops.get_mut(&id).map(|op| &mut op.state) {
            Some(State::Held(submission)) => Some(submission),
            _ => None,
        }
    }

    /// Whether the operation has not ended.
    pub(crate) fn is_open(&self, id: OpId) -> bool {
        self.ops.contains_key(&id)
    }

    /// Ends an operation towards the caller; the second end of one is none.
    pub(crate) fn end(&mut self, id: OpId, outcome: Outcome) {
        if let Some(op) = self.ops.remove(&id) {
            if let State::Posted(inner) = op.state {
                self.by_inner.remove(&inner);
            }
            self.events.push_back(Event::Completed { op: id, peer: op.peer, outcome });
        }
    }

    /// Asks an operation to stop: a held one ends at once, a posted one is asked below. One whose end is kept back is left to
    /// the owner, who gets `false`.
    pub(crate) fn cancel(&mut self, id: OpId) -> Result<bool, UnknownOp> {
        match self.ops.get(&id).ok_or(UnknownOp(id))?.state {
            State::Held(_) => self.end(id, Outcome::Failed(TransferError::Cancelled)),
            // An operation that has ended below has its event on the way.
            State::Posted(inner) => self.inner.cancel(inner).unwrap_or(()),
            State::Kept => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn disconnect(&mut self, peer: PeerId) -> Result<(), UnknownPeer> {
        self.inner.disconnect(peer)?;
        self.events.retain(|event| !event.is_of_connection(peer));
        self.lost.remove(&peer);
        for id in self.of_peer(peer, |state| matches!(state, State::Held(_))) {
            self.end(id, Outcome::Failed(TransferError::Disconnected));
        }
        Ok(())
    }

    /// Operations of a peer whose end the owner keeps back.
    pub(crate) fn kept(&self, peer: PeerId) -> Vec<OpId> {
        self.of_peer(peer, |state| matches!(state, State::Kept))
    }

    /// Operations of a peer that are in flight below.
    pub(crate) fn posted(&self, peer: PeerId) -> Vec<OpId> {
        self.of_peer(peer, |state| matches!(state, State::Posted(_)))
    }

    fn of_peer(&self, peer: PeerId, state: impl Fn(&State) -> bool) -> Vec<OpId> {
        self.ops.iter().filter(|(_, op)| op.peer == peer && state(&op.state)).map(|(id, _)| *id).collect()
    }

    /// The next event from below, with our ids. A completion has not ended the operation yet: the owner passes it to
    /// [`end`](Self::end), now or later. Held operations of a lost peer have ended.
    pub(crate) fn next_inner(&mut self) -> Option<Event> {
        loop {
            let event = self.inner.next_event()?;
            match event {
                Event::Completed { op: inner, peer, outcome } => {
                    let Some(op) = self.by_inner.remove(&inner) else { continue };
                    if let Some(gate_op) = self.ops.get_mut(&op) {
                        gate_op.state = State::Kept;
                    }
                    return Some(Event::Completed { op, peer, outcome });
                }
                Event::PeerLost { peer, ref cause } => {
                    self.lost.insert(peer, cause.clone());
                    for id in self.of_peer(peer, |state| matches!(state, State::Held(_))) {
                        self.end(id, Outcome::Failed(TransferError::PeerLost(cause.clone())));
                    }
                    return Some(event);
                }
                other => return Some(other),
            }
        }
    }

    /// Queues an event for the caller.
    pub(crate) fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }
}
