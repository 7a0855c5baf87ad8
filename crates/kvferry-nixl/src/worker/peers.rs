//! Connections that we made.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_geometry::units::RegionId;
use kvferry_transport::access::Message;
use kvferry_transport::{EndpointId, Event, LostCause, OpId, PeerId, TransferError};

use super::Worker;
use super::ops::Stage;
use crate::frame::{Bad, Frame};
use crate::lane::Place;
use crate::shared::{NewPeer, Told};

/// Operations that one peer is asked about and that have not ended.
pub(super) const MAX_BEGUN: usize = 1024;

/// One connection.
pub(super) struct Peer {
    pub(super) endpoint: EndpointId,
    pub(super) generation: u64,
    pub(super) places: Arc<[(RegionId, Place)]>,
    /// It has answered.
    pub(super) up: bool,
    /// It is lost, and why.
    pub(super) lost: Option<LostCause>,
    /// It was seen to have ended: nothing is sent to it any more.
    pub(super) dead: bool,
    /// It was disconnected and goes when its operations have ended.
    closing: bool,
    /// The loss was told.
    loss_told: bool,
    /// NIXL knows it because of this connection.
    loaded: bool,
    /// Operations that have not ended.
    pub(super) open: usize,
    /// Those of them that the peer was asked about.
    pub(super) begun: usize,
    /// Those that wait for that, oldest first.
    pub(super) waiting: VecDeque<OpId>,
    heard: Instant,
    pinged: Instant,
}

impl Peer {
    /// Whether something is expected of the peer.
    pub(super) fn awaits(&self) -> bool {
        self.lost.is_none() && (!self.up || self.open > 0)
    }

    /// Does not count a time in which nobody listened.
    pub(super) fn forgive(&mut self, gap: Duration) {
        // Not beyond now, of what was heard since.
        let now = Instant::now();
        (self.heard, self.pinged) = ((self.heard + gap).min(now), (self.pinged + gap).min(now));
    }

    /// Notes that something begins to be expected.
    pub(super) fn begin_waiting(&mut self) {
        if !self.awaits() {
            (self.heard, self.pinged) = (Instant::now(), Instant::now());
        }
    }
}

impl Worker {
    pub(super) fn connect(&mut self, new: NewPeer) {
        let NewPeer { peer: id, endpoint, generation, watch, metadata, places } = new;
        let loaded = self.net.load(endpoint, watch, &metadata, true);
        let now = Instant::now();
        let peer = Peer {
            endpoint,
            generation,
            places: places.into(),
            up: false,
            lost: None,
            dead: false,
            closing: false,
            loss_told: false,
            loaded: loaded.is_ok(),
            open: 0,
            begun: 0,
            waiting: VecDeque::new(),
            heard: now,
            pinged: now,
        };
        self.peers.insert(id, peer);
        if let Err(fail) = loaded {
            self.lose(id, &LostCause::Lane(format!("NIXL could not take the peer's metadata: {fail}")));
            return;
        }
        let metadata = std::mem::take(&mut self.net.metadata);
        let hello = Frame::Hello { connection: id.get(), process: self.net.process, metadata: &metadata };
        self.net.send(endpoint, &hello);
        self.net.metadata = metadata;
    }

    pub(super) fn disconnect(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.closing = true;
        for op in self.ops_of(id) {
            self.stop(op, TransferError::Disconnected);
        }
        self.settle(id);
    }

    /// Gives a connection up; its operations end at once or when what is in progress has ended.
    pub(super) fn lose(&mut self, id: PeerId, cause: &LostCause) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.lost.is_some() {
            return;
        }
        peer.lost = Some(cause.clone());
        for op in self.ops_of(id) {
            self.stop(op, TransferError::PeerLost(cause.clone()));
        }
        self.settle(id);
    }

    /// Does what waits for the end of a connection's operations.
    pub(super) fn settle(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.open > 0 {
            return;
        }
        if peer.closing {
            let (endpoint, loaded, lost) = (peer.endpoint, peer.loaded, peer.lost.is_some());
            self.peers.remove(&id);
            if loaded {
                if !lost {
                    self.net.send(endpoint, &Frame::Leave { connection: id.get() });
                }
                self.net.release(endpoint);
            }
        } else if let Some(cause) = peer.lost.clone()
            && !peer.loss_told
        {
            peer.loss_told = true;
            self.shared.tell(Told::Event(Event::PeerLost { peer: id, cause }));
        }
    }

    pub(super) fn peers_at(&self, endpoint: EndpointId) -> Vec<PeerId> {
        self.peers.iter().filter(|(_, p)| p.endpoint == endpoint).map(|(id, _)| *id).collect()
    }

    pub(super) fn ops_of(&self, peer: PeerId) -> Vec<OpId> {
        let mut ops: Vec<OpId> = self.ops.iter().filter(|(_, op)| op.peer == peer).map(|(id, _)| *id).collect();
        ops.sort_unstable();
        ops
    }

    /// Asks about operations that wait, oldest first.
    pub(super) fn ask(&mut self, id: PeerId) {
        loop {
            let Some(peer) = self.peers.get_mut(&id) else { return };
            let held = peer.lost.is_some() || self.suspects.contains_key(&peer.endpoint);
            if !peer.up || held || peer.begun >= MAX_BEGUN {
                return;
            }
            let Some(op_id) = peer.waiting.pop_front() else { return };
            let Some(op) = self.ops.get_mut(&op_id) else { continue };
            op.stage = Stage::Asking;
            peer.begun += 1;
            let begin = Message::Begin {
                op: op_id.get(),
                kind: op.kind,
                generation: peer.generation,
                regions: std::mem::take(&mut op.theirs),
            };
            self.net.send(peer.endpoint, &Frame::Access(begin));
        }
    }

    /// Does what a peer or a guest sent.
    pub(super) fn handle(&mut self, from: EndpointId, bytes: Vec<u8>) {
        let now = Instant::now();
        for peer in self.peers.values_mut().filter(|p| p.endpoint == from) {
            peer.heard = now;
        }
        if let Some(guest) = self.guests.get_mut(&from) {
            guest.heard = now;
        }
        self.net.touch(from, now);
        match Frame::decode(&bytes) {
            Err(Bad::Foreign) => self.shared.telemetry().foreign += 1,
            Err(Bad::Broken(what)) => {
                self.shared.telemetry().foreign += 1;
                for peer in self.peers_at(from) {
                    self.lose(peer, &LostCause::Protocol(what.clone()));
                }
            }
            Ok(Frame::Hello { connection, process, metadata }) => self.welcome(from, connection, &process, metadata),
            Ok(Frame::Welcome { connection }) => self.welcomed(from, PeerId::new(connection)),
            Ok(Frame::Leave { connection }) => self.leaves(from, connection),
            Ok(Frame::Closing) => self.closes(from),
            Ok(Frame::Bye) => self.gone(from, false),
            Ok(Frame::Ping) => {
                self.net.send(from, &Frame::Pong);
            }
            Ok(Frame::Pong) => {}
            Ok(Frame::Access(Message::Begin { op, .. })) => self.defer(from, op, bytes),
            Ok(Frame::Access(Message::Answer { op, answer })) => self.answered(from, OpId::new(op), answer),
            Ok(Frame::Access(Message::End { op, notify })) => self.ended(from, op, notify),
        }
    }

    fn welcomed(&mut self, from: EndpointId, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.endpoint != from || peer.up || peer.lost.is_some() {
            return;
        }
        peer.up = true;
        let lane = self.net.lane(&self.config, from);
        self.shared.tell(Told::Up(id, lane));
        self.ask(id);
    }

    /// Asks those that we wait for whether they live, and gives up those that are silent for too long.
    pub(super) fn ping_peers(&mut self, now: Instant) {
        let silence = self.config.silence;
        let mut silent = Vec::new();
        for (id, peer) in self.peers.iter_mut().filter(|(_, p)| p.awaits()) {
            if self.suspects.contains_key(&peer.endpoint) {
                continue;
            }
            if now > peer.heard + silence {
                silent.push(*id);
            } else if now > peer.heard + silence / 50 && now > peer.pinged + silence / 50 {
                peer.pinged = now;
                self.net.send(peer.endpoint, &Frame::Ping);
            }
        }
        for id in silent {
            self.lose(id, &LostCause::Lane(format!("the peer gave no sign of life for {silence:?}")));
        }
    }
}
