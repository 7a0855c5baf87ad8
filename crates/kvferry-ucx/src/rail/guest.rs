//! The answering side: those who connected to us, and what they have open on our memory.

use std::collections::BTreeSet;

use kvferry_transport::access::Message;
use rustix::event::epoll;

use super::{GUEST, Rail};
use crate::process::Watch;
use crate::shared::Report;
use crate::sys::{Endpoint, Header};
use crate::wire::{self, Caller, Hello, Leave};

/// The most guests of a rail.
const MAX_GUESTS: usize = 1 << 14;

/// One connection of a peer to us.
pub(super) struct Guest {
    caller: Caller,
    /// `None` once it is lost.
    endpoint: Option<Endpoint>,
    watch: Watch,
    /// The operations that it has open.
    open: BTreeSet<u64>,
    /// How many it has ended.
    ended: u64,
    /// It leaves when it has ended so many.
    leaves_at: Option<u64>,
    /// It was told that we go.
    going: bool,
}

impl Guest {
    /// Whether it has nothing open on our memory.
    pub(super) fn is_idle(&self) -> bool {
        self.open.is_empty()
    }
}

impl Rail {
    pub(super) fn guest_says(&mut self, header: Header, body: &[u8]) {
        match header.kind {
            wire::HELLO => {
                if let Some(hello) = Hello::decode(body) {
                    self.hello(hello);
                }
            }
            wire::ASK => self.asked(header.to, body),
            wire::LEAVE => {
                if let Some(Leave { caller, ends }) = Leave::decode(body)
                    && let Some((&id, guest)) = self.guests.iter_mut().find(|(_, guest)| guest.caller == caller)
                {
                    guest.leaves_at = Some(ends);
                    self.let_leave(id);
                }
            }
            // Not a message to us.
            _ => {}
        }
    }

    fn hello(&mut self, hello: Hello) {
        // Who doesn't know the token has no blob of ours, and gets no answer: not even the address is looked at.
        if hello.token != self.shared.token {
            return;
        }
        let Ok(endpoint) = self.host.connect(&hello.address) else { return };
        let conn = hello.caller.conn;
        let refusal = if hello.to != self.shared.id {
            Some(format!("this is endpoint {}, not {}; fetch its blob anew", self.shared.id, hello.to))
        } else if self.clock.quitting.is_some() {
            Some("this endpoint is being closed".to_owned())
        } else if self.guests.len() >= MAX_GUESTS {
            Some(format!("{MAX_GUESTS} connections are open, the most there can be"))
        } else if self.guests.values().any(|guest| guest.caller == hello.caller) {
            Some("this connection is open already".to_owned())
        } else {
            None
        };
        if let Some(reason) = refusal {
            // If it can't be told, the caller waits in vain and notices by its own clock.
            let _: Result<(), _> = endpoint.send(Header { kind: wire::REFUSE, to: conn }, reason.into_bytes());
            self.close(endpoint, false);
            return;
        }
        let id = self.clock.next_guest;
        self.clock.next_guest += 1;
        let watch = hello.process.watch(&self.shared.process);
        if let Watch::Alive { fd, .. } = &watch {
            // Unwatched, its death is noticed by UCX later.
            let _: rustix::io::Result<()> =
                epoll::add(&self.epoll, fd, epoll::EventData::new_u64(GUEST | id), epoll::EventFlags::IN);
        }
        let welcome = endpoint.send(Header { kind: wire::WELCOME, to: conn }, id.to_le_bytes().to_vec());
        let guest = Guest {
            caller: hello.caller,
            endpoint: Some(endpoint),
            watch,
            open: BTreeSet::new(),
            ended: 0,
            leaves_at: None,
            going: false,
        };
        self.guests.insert(id, guest);
        if welcome.is_err() {
            self.forget_guest(id);
        }
    }

    fn asked(&mut self, id: u64, body: &[u8]) {
        let Some(guest) = self.guests.get_mut(&id) else { return };
        let from = guest.caller.endpoint;
        match Message::decode(body) {
            Ok(Message::Begin { op, kind: _, generation, regions }) => {
                // It was told that we go, so it waits for no answer.
                if guest.going {
                    return;
                }
                let answer = {
                    let books = &mut *self.shared.books();
                    books.keeper.begin(from, op, generation, &regions, &books.table)
                };
                if answer == kvferry_transport::access::Answer::Granted {
                    guest.open.insert(op);
                }
                let header = Header { kind: wire::ANSWER, to: guest.caller.conn };
                let reply = guest.endpoint.as_ref().map(|e| e.send(header, Message::Answer { op, answer }.encode()));
                if !matches!(reply, Some(Ok(()))) {
                    self.forget_guest(id);
                }
            }
            Ok(Message::End { op, notify }) => {
                guest.ended += 1;
                // Two rails of one endpoint have different operations; what this one didn't open, it can't end.
                if guest.open.remove(&op)
                    && self.shared.books().keeper.end(from, op)
                    && let Some(payload) = notify
                {
                    self.shared.report(Report::Notice { from, payload: payload.to_vec() });
                }
                self.let_leave(id);
            }
            // An answer to nothing, or bytes that are no message: whoever sends such things is not one of ours.
            Ok(Message::Answer { .. }) | Err(_) => self.forget_guest(id),
        }
    }

    /// Lets a guest go that has said that it leaves, once everything that it said before has come.
    fn let_leave(&mut self, id: u64) {
        if self.guests.get(&id).is_some_and(|guest| guest.leaves_at.is_some_and(|ends| guest.ended >= ends)) {
            self.forget_guest(id);
        }
    }

    /// A guest has left, or is lost: it touches our memory no more.
    fn forget_guest(&mut self, id: u64) {
        let Some(guest) = self.guests.remove(&id) else { return };
        {
            let mut books = self.shared.books();
            for &op in &guest.open {
                books.keeper.end(guest.caller.endpoint, op);
            }
        }
        self.unwatch(&guest.watch);
        if let Some(endpoint) = guest.endpoint {
            self.close(endpoint, true);
        }
    }

    pub(super) fn unwatch(&self, watch: &Watch) {
        if let Watch::Alive { fd, .. } = watch {
            // It goes with the descriptor anyway.
            let _: rustix::io::Result<()> = epoll::delete(&self.epoll, fd);
        }
    }

    pub(super) fn lose_faulted_guests(&mut self) {
        let faulted = |guest: &Guest| guest.endpoint.as_ref().is_some_and(|e| e.failed().is_some());
        let lost: Vec<u64> = self.guests.iter().filter(|(_, guest)| faulted(guest)).map(|(id, _)| *id).collect();
        lost.into_iter().for_each(|id| self.forget_guest(id));
    }

    pub(super) fn guest_process_ended(&mut self, id: u64) {
        self.forget_guest(id);
    }

    /// Tells all guests that we go.
    pub(super) fn say_going(&mut self) {
        for guest in self.guests.values_mut() {
            guest.going = true;
            if let Some(endpoint) = &guest.endpoint {
                // If it can't be told, its lane is broken, and it notices that.
                let _: Result<(), _> = endpoint.send(Header { kind: wire::GOING, to: guest.caller.conn }, Vec::new());
            }
        }
    }

    /// Lets go of guests that were told that we go and have nothing open any more. Whether there are such that have.
    pub(super) fn tend_guests(&mut self) -> bool {
        let done = |guest: &Guest| guest.going && guest.is_idle();
        let gone: Vec<u64> = self.guests.iter().filter(|(_, guest)| done(guest)).map(|(id, _)| *id).collect();
        for id in gone {
            let Some(guest) = self.guests.remove(&id) else { continue };
            self.unwatch(&guest.watch);
            if let Some(endpoint) = guest.endpoint {
                // Politely: the message that we go must arrive.
                self.close(endpoint, false);
            }
        }
        self.guests.values().any(|guest| guest.going)
    }
}
