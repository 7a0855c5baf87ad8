//! The answering side: those who connected to us.
//!
//! A guest whose lane back has broken is *mute*: it gets no answers any more. Its process may live and be in the middle of a copy, and
//! other rails may serve the same caller; so what it has open on our memory stays open until it says `End`, or the books can
//! tell that it touches nothing any more.

use kvferry_transport::access::{Answer, Message};
use rustix::event::epoll;

use super::{GUEST, Rail};
use crate::books::CallerId;
use crate::process::Watch;
use crate::shared::Report;
use crate::sys::{Closing, Endpoint, Header};
use crate::transport::MAX_NOTIFY;
use crate::wire::{self, Caller, Ear, Hello, Told};

/// The most guests of a rail.
const MAX_GUESTS: usize = 1 << 14;
/// The most endpoints that are being closed when strangers are still told why they are refused.
const MAX_REFUSALS: usize = 256;

/// One connection of a peer to us.
pub(super) struct Guest {
    caller: Caller,
    /// Where we hear it, and where it hears us.
    ear: Ear,
    theirs: Ear,
    voice: Voice,
    watch: Watch,
    /// How many operations it has ended.
    ended: u64,
    /// It leaves when it has ended so many.
    leaves_at: Option<u64>,
    /// It was told that we go.
    going: bool,
}

/// The lane back to a guest.
enum Voice {
    Open(Endpoint),
    /// It is broken, and UCX is not done with it.
    Closing(Closing),
    /// Nothing of ours or of it goes over it any more.
    Mute,
}

impl Guest {
    pub(super) fn id(&self) -> CallerId {
        (self.caller.endpoint, self.caller.conn)
    }

    fn send(&self, kind: u8, body: Vec<u8>) -> bool {
        matches!(&self.voice, Voice::Open(endpoint) if endpoint.send(Header { kind, to: self.theirs }, body).is_ok())
    }

    /// That its lanes are gone proves that a caller on another host touches nothing any more; for one on this host the kernel
    /// tells, and one in this process says so itself.
    fn lanes_are_all(&self) -> bool {
        matches!(self.watch, Watch::Unknown)
    }
}

impl Rail {
    pub(super) fn guest_says(&mut self, header: Header, body: &[u8]) {
        if header.kind == wire::HELLO {
            if let Some(hello) = Hello::decode(body) {
                self.hello(hello);
            }
            return;
        }
        let Some(&id) = self.guest_ears.get(&header.to) else { return };
        match header.kind {
            wire::ASK => self.asked(id, body),
            wire::LEAVE => {
                if let (Some(guest), Some(ends)) = (self.guests.get_mut(&id), wire::ends(body)) {
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
        if refusal.is_some() && self.closings.len() > MAX_REFUSALS {
            return;
        }
        let watch = hello.process.watch(&self.shared.process);
        let (Ok(endpoint), Some(ear)) = (self.host.connect(&hello.address), wire::fresh_ear()) else { return };
        if let Some(reason) = refusal {
            // If it can't be told, the caller waits in vain and notices by its own clock.
            let _: Result<(), _> = endpoint.send(Header { kind: wire::REFUSE, to: hello.ear }, reason.into_bytes());
            self.close(endpoint, false);
            return;
        }
        let id = self.clock.next_guest;
        self.clock.next_guest += 1;
        if let Watch::Alive { fd, .. } = &watch {
            // Unwatched, its death is noticed by UCX later.
            let _: rustix::io::Result<()> =
                epoll::add(&self.epoll, fd, epoll::EventData::new_u64(GUEST | id), epoll::EventFlags::IN);
        }
        let guest = Guest {
            caller: hello.caller,
            ear,
            theirs: hello.ear,
            voice: Voice::Open(endpoint),
            watch,
            ended: 0,
            leaves_at: None,
            going: false,
        };
        self.shared.books().enter(guest.id());
        let welcome = guest.send(wire::WELCOME, ear.to_vec());
        self.guest_ears.insert(ear, id);
        self.guests.insert(id, guest);
        if !welcome {
            self.mute(id);
        }
    }

    fn asked(&mut self, id: u64, body: &[u8]) {
        let Some(guest) = self.guests.get_mut(&id) else { return };
        let caller = guest.id();
        match Message::decode(body) {
            Ok(Message::Begin { op, kind: _, generation, regions }) => {
                // It was told that we go, or can't be told anything: so it waits for no answer.
                if guest.going || !matches!(guest.voice, Voice::Open(_)) {
                    return;
                }
                let answer = self.shared.books().begin(caller, op, generation, &regions);
                let told = guest.send(wire::ANSWER, Message::Answer { op, answer }.encode());
                if !told {
                    if answer == Answer::Granted {
                        // It never hears that it may.
                        self.shared.books().end(caller, op);
                    }
                    self.mute(id);
                }
            }
            Ok(Message::End { op, notify }) if notify.is_none_or(|notify| notify.len() <= MAX_NOTIFY) => {
                guest.ended += 1;
                self.clock.restless |= matches!(guest.voice, Voice::Mute);
                let told = self.shared.books().end(caller, op);
                if let Some(payload) = notify {
                    if told {
                        self.shared.report(Report::Notice { from: caller.0, payload: payload.to_vec() });
                    }
                    if matches!(guest.voice, Voice::Open(_)) && !guest.send(wire::TOLD, Told { op, told }.encode()) {
                        self.mute(id);
                    }
                }
                self.let_leave(id);
            }
            // Not one of ours. It may have something open all the same.
            Ok(Message::Answer { .. } | Message::End { .. }) | Err(_) => self.mute(id),
        }
    }

    /// The lane back to a guest is broken, or it isn't to be spoken to any more.
    pub(super) fn mute(&mut self, id: u64) {
        let Some(guest) = self.guests.get_mut(&id) else { return };
        if !matches!(guest.voice, Voice::Open(_)) {
            return;
        }
        if let Voice::Open(endpoint) = std::mem::replace(&mut guest.voice, Voice::Mute) {
            guest.voice = Voice::Closing(endpoint.close(true));
        }
        self.clock.restless = true;
    }

    /// Lets a guest go that has said that it leaves, once everything that it said before has come.
    fn let_leave(&mut self, id: u64) {
        if self.guests.get(&id).is_some_and(|guest| guest.leaves_at.is_some_and(|ends| guest.ended >= ends)) {
            self.forget_guest(id, true);
        }
    }

    /// A guest is done with this rail.
    pub(super) fn forget_guest(&mut self, id: u64, force: bool) {
        let Some(guest) = self.guests.remove(&id) else { return };
        self.guest_ears.remove(&guest.ear);
        self.unwatch(&guest.watch);
        if !matches!(guest.voice, Voice::Mute) {
            self.shared.books().leave(guest.id(), guest.lanes_are_all());
        }
        match guest.voice {
            Voice::Open(endpoint) => self.close(endpoint, force),
            Voice::Closing(closing) => self.keep_closing(closing),
            Voice::Mute => {}
        }
    }

    pub(super) fn unwatch(&self, watch: &Watch) {
        if let Watch::Alive { fd, .. } = watch {
            // It goes with the descriptor anyway.
            let _: rustix::io::Result<()> = epoll::delete(&self.epoll, fd);
        }
    }

    pub(super) fn mute_faulted_guests(&mut self) {
        let faulted = |guest: &Guest| matches!(&guest.voice, Voice::Open(endpoint) if endpoint.failed().is_some());
        let mute: Vec<u64> = self.guests.iter().filter(|(_, guest)| faulted(guest)).map(|(id, _)| *id).collect();
        mute.into_iter().for_each(|id| self.mute(id));
    }

    /// A guest's process has ended, all its threads included.
    pub(super) fn guest_process_ended(&mut self, id: u64) {
        if let Some(guest) = self.guests.get(&id) {
            self.shared.books().release(guest.id());
        }
        self.forget_guest(id, true);
    }

    /// Tells all guests that we go.
    pub(super) fn say_going(&mut self) {
        for guest in self.guests.values_mut() {
            guest.going = true;
            // If it can't be told, its lane is broken, and it notices that.
            let _: bool = guest.send(wire::GOING, Vec::new());
        }
    }

    /// Whether no guest has anything open on our memory, at any rail.
    pub(super) fn guests_are_idle(&self) -> bool {
        let books = self.shared.books();
        self.guests.values().all(|guest| books.is_idle(guest.id()))
    }

    /// Looks after mute guests, and lets go of those that have nothing open and were told that we go, or can't be told anything.
    /// Whether there are such that have.
    pub(super) fn tend_guests(&mut self) -> bool {
        let (mut done, mut restless) = (Vec::new(), false);
        for (id, guest) in &mut self.guests {
            if let Voice::Closing(closing) = &mut guest.voice {
                if closing.done() {
                    guest.voice = Voice::Mute;
                    self.shared.books().leave(guest.id(), guest.lanes_are_all());
                }
                restless |= matches!(guest.voice, Voice::Closing(_));
            }
            let mute = matches!(guest.voice, Voice::Mute);
            if (guest.going || mute) && self.shared.books().is_idle(guest.id()) {
                done.push(*id);
            } else {
                restless |= guest.going;
            }
        }
        // Politely: the message that we go must arrive.
        done.into_iter().for_each(|id| self.forget_guest(id, false));
        restless
    }

    /// Breaks the lanes back to all guests.
    #[cfg(test)]
    pub(super) fn break_guests(&mut self) {
        let all: Vec<u64> = self.guests.keys().copied().collect();
        all.into_iter().for_each(|id| self.mute(id));
    }
}
