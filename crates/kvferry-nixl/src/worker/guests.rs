//! Endpoints that are connected to us, and their operations on our memory.

use std::time::Instant;

use kvferry_transport::access::{Answer, Message};
use kvferry_transport::{EndpointId, Event};

use super::Worker;
use super::peers::MAX_BEGUN;
use crate::frame::{Frame, MAX_NOTIFY};
use crate::lane::agent_name;
use crate::metadata::walk;
use crate::process::Process;
use crate::shared::Told;

/// Notifications that the endpoint may leave untaken before no more operations are let in.
const MAX_UNTAKEN: usize = 4096;

/// Operations and questions of a guest at a time. It begins no more than half of them itself; those it gave up may still be open.
const MAX_OF_GUEST: usize = 2 * MAX_BEGUN;

/// One endpoint that is connected to us.
pub(super) struct Guest {
    /// Its latest connection.
    connection: u64,
    /// It gave the connection up, and is forgotten when its operations have ended.
    leaving: bool,
    /// It can't be reached. It is forgotten when its operations have ended, or it has.
    pub(super) cut: bool,
    /// Operations that we granted and that have not ended.
    pub(super) open: usize,
    /// Questions of it that were not answered.
    asking: usize,
    pub(super) heard: Instant,
    pinged: Instant,
}

impl Worker {
    /// Lets an endpoint in.
    pub(super) fn welcome(&mut self, from: EndpointId, connection: u64, process: &Process, metadata: &[u8]) {
        if self.stopping.is_some() {
            return;
        }
        if let Some(guest) = self.guests.get_mut(&from) {
            (guest.connection, guest.leaving, guest.cut) = (connection, false, false);
        } else {
            let Ok(watch) = process.watch(&self.net.process) else { return };
            // Who is not known can't be answered: it will give up by itself. Those that can't be reached take nobody's place.
            let known = walk(metadata).is_ok_and(|m| m.agent == agent_name(from).as_bytes() && m.memory.is_empty());
            if !known
                || self.guests.values().filter(|g| !g.cut).count() >= self.config.max_guests
                || self.net.load(from, watch, metadata, false).is_err()
            {
                self.shared.telemetry().foreign += 1;
                return;
            }
            let now = Instant::now();
            self.guests.insert(
                from,
                Guest { connection, leaving: false, cut: false, open: 0, asking: 0, heard: now, pinged: now },
            );
        }
        self.net.send(from, &Frame::Welcome { connection });
    }

    /// Keeps a question until it is answered. Only guests are answered, and no kvferry endpoint has more open than it may: the answer to
    /// that is given at once, so that nobody can make us keep more.
    pub(super) fn defer(&mut self, from: EndpointId, op: u64, bytes: Vec<u8>) {
        let Some(guest) = self.guests.get_mut(&from) else {
            self.shared.telemetry().foreign += 1;
            return;
        };
        if guest.open + guest.asking >= MAX_OF_GUEST {
            self.net.send(from, &Frame::Access(Message::Answer { op, answer: Answer::Refused }));
            return;
        }
        guest.asking += 1;
        self.deferred.push_back((from, bytes));
    }

    /// Answers questions, as long as the endpoint takes its notifications.
    pub(super) fn answer_deferred(&mut self) -> bool {
        let mut did = false;
        while !self.deferred.is_empty() && self.shared.untaken() < MAX_UNTAKEN {
            let Some((from, bytes)) = self.deferred.pop_front() else { break };
            did = true;
            let Ok(Frame::Access(Message::Begin { op, generation, regions, .. })) = Frame::decode(&bytes) else {
                continue;
            };
            let Some(guest) = self.guests.get_mut(&from) else { continue };
            // It may be another guest than the one that asked, under the same name.
            guest.asking = guest.asking.saturating_sub(1);
            let mut registry = self.shared.registry();
            let registry = &mut *registry;
            let answer = if self.stopping.is_some() {
                Answer::Refused
            } else {
                registry.keeper.begin(from, op, generation, &regions, &registry.table)
            };
            guest.open += usize::from(answer == Answer::Granted);
            self.net.send(from, &Frame::Access(Message::Answer { op, answer }));
        }
        did
    }

    /// An operation of a guest has ended.
    pub(super) fn ended(&mut self, from: EndpointId, op: u64, notify: Option<&[u8]>) {
        let Some(guest) = self.guests.get_mut(&from) else { return };
        if !self.shared.registry().keeper.end(from, op) {
            return;
        }
        guest.open -= 1;
        // What is longer than anybody may submit was not submitted.
        if notify.is_some_and(|payload| payload.len() > MAX_NOTIFY) {
            self.shared.telemetry().foreign += 1;
        } else if let Some(payload) = notify {
            self.shared.tell(Told::Event(Event::Notification { from, payload: payload.to_vec() }));
        }
        if (guest.leaving || guest.cut) && guest.open == 0 {
            self.remove_guest(from);
        }
    }

    pub(super) fn leaves(&mut self, from: EndpointId, connection: u64) {
        let Some(guest) = self.guests.get_mut(&from) else { return };
        // A later connection of the same endpoint stays.
        if guest.connection == connection {
            guest.leaving = true;
            if guest.open == 0 {
                self.remove_guest(from);
            }
        }
    }

    /// A guest can't be reached. Its operations on our memory don't need us: they may be in progress, and keep what they hold.
    pub(super) fn cut_guest(&mut self, endpoint: EndpointId) {
        let Some(guest) = self.guests.get_mut(&endpoint) else { return };
        guest.cut = true;
        if guest.open == 0 {
            self.remove_guest(endpoint);
        }
    }

    /// A guest will not touch our memory any more.
    pub(super) fn remove_guest(&mut self, endpoint: EndpointId) {
        if self.guests.remove(&endpoint).is_some() {
            self.shared.registry().keeper.gone(endpoint);
            self.net.release(endpoint);
        }
    }

    /// Speaks to guests that have operations open and are silent: if they are gone, NIXL says so. Silence alone is no proof that they
    /// don't touch the memory, so it frees nothing.
    pub(super) fn ping_guests(&mut self, now: Instant) {
        let pause = self.config.silence / 10;
        for (endpoint, guest) in self.guests.iter_mut().filter(|(_, g)| !g.cut && (g.open > 0 || g.leaving)) {
            if now > guest.heard + pause && now > guest.pinged + pause {
                guest.pinged = now;
                self.net.send(*endpoint, &Frame::Ping);
            }
        }
    }
}
