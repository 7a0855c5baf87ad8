//! The stream of events: from the driver to whoever has taken it.

use std::collections::VecDeque;
use std::time::Duration;

use kvferry_geometry::units::{RankId, Tokens};
use kvferry_proto::lease::Closing;
use kvferry_proto::manifest::JoinError;
use kvferry_proto::names::{EngineId, Epoch, LeaseId};
use kvferry_proto::rank::PullId;

use super::inbox::{Inbox, Sender, inbox};

/// Events that wait to be taken, at most.
const EVENTS: usize = 1 << 18;

/// Events of strangers in a second, at most.
const STRANGERS: u32 = 16;

/// What happens at an owner without being asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OwnerEvent {
    /// A lease is over: its blocks are the engine's again.
    Released {
        /// The lease.
        lease: LeaseId,
        /// How it ended.
        how: Closing,
    },
    /// All ranks have joined; again after one was lost and has come back. What was offered before is of another epoch.
    Ready {
        /// This life of the engine.
        epoch: Epoch,
    },
    /// A link to another engine's owner is up.
    LinkUp {
        /// The engine.
        peer: EngineId,
        /// The protocol's version that both speak.
        version: u16,
        /// From when it was begun or accepted.
        took: Duration,
    },
    /// A link to another engine's owner that was up is gone. What was bound or read over it has its own end.
    LinkDown {
        /// The engine.
        peer: EngineId,
        /// What is known.
        reason: String,
    },
    /// A link to another engine's owner did not come up. Of links that others have begun, 16 a second are told at most.
    LinkFailed {
        /// The other end, if it was us who connected.
        address: Option<String>,
        /// Every reason.
        reasons: Vec<String>,
        /// Whether one of the owners refused the other: then it is not tried again for the requests that waited.
        refused: bool,
    },
    /// A rank of the complete engine is gone. Pulls and offers fail until it has joined again.
    RankLost {
        /// Which.
        rank: RankId,
        /// What is known.
        reason: String,
    },
    /// A rank was refused.
    JoinRefused(JoinError),
    /// So much of a pull that was asked for [with progress](crate::PullSpec::push_with_progress) is in place, as its
    /// [handle](crate::PullHandle::progress) says, too. It is not delivered yet.
    Progress {
        /// Which.
        pull: PullId,
        /// The tokens before this one, as far as they are to be written.
        tokens: Tokens,
    },
    /// Blocks have left quarantine because of their age, as [`reclaim_after`](crate::OwnerBuilder::reclaim_after) says: nothing has
    /// proven that nobody writes them any more.
    Reclaimed {
        /// The pull that had left them.
        pull: PullId,
        /// How many blocks and slots.
        blocks: usize,
    },
    /// A peer has said two things that can't both be true, or what only a broken one says. The pull that it concerns fails, and what
    /// the peer says of its writers is not taken for evidence: blocks may stay in quarantine.
    Contradiction {
        /// The lease that it was about.
        lease: LeaseId,
        /// The peer.
        peer: EngineId,
        /// What it has said.
        what: String,
    },
    /// Nobody has taken events for so long that some were not kept. What was released among them only
    /// the engine's own account of its leases can tell.
    Missed {
        /// How many.
        events: u64,
    },
}

/// The events of an owner, in order. 262,144 that are not taken wait; of what comes after these, only the number is kept
/// ([`OwnerEvent::Missed`]).
#[derive(Debug)]
pub struct OwnerEvents {
    inbox: Inbox<Option<OwnerEvent>>,
    taken: VecDeque<Option<OwnerEvent>>,
}

impl OwnerEvents {
    /// The next event; `None` once the owner is shut down and all were taken. Nothing is lost where the future is dropped.
    pub async fn next(&mut self) -> Option<OwnerEvent> {
        loop {
            match self.taken.pop_front() {
                Some(Some(event)) => return Some(event),
                Some(None) => {
                    // The end stays the end.
                    self.taken.push_front(None);
                    return None;
                }
                None => {}
            }
            self.inbox.filled().await;
            let mut some = Vec::from(std::mem::take(&mut self.taken));
            self.inbox.take(&mut some);
            self.taken = some.into();
        }
    }
}

/// The driver's end.
pub(super) struct Events {
    sender: Sender<Option<OwnerEvent>>,
    /// Since the last flush.
    new: Vec<Option<OwnerEvent>>,
    missed: u64,
    /// In which second strangers were last told of, and how many.
    strangers: (u64, u32),
}

pub(crate) struct EventsEnd(Sender<Option<OwnerEvent>>);

pub(crate) fn events() -> (EventsEnd, OwnerEvents) {
    let (sender, inbox) = inbox();
    (EventsEnd(sender), OwnerEvents { inbox, taken: VecDeque::new() })
}

impl Events {
    pub(super) fn new(end: EventsEnd) -> Self {
        Self { sender: end.0, new: Vec::new(), missed: 0, strangers: (0, 0) }
    }

    pub(super) fn push(&mut self, event: OwnerEvent) {
        self.new.push(Some(event));
    }

    /// Whether to tell, here and in the log, of something more that strangers can cause as often as they like: they must not keep
    /// other events out.
    pub(super) fn may_tell_of_stranger(&mut self, now: Duration) -> bool {
        if self.strangers.0 != now.as_secs() {
            self.strangers = (now.as_secs(), 0);
        }
        self.strangers.1 = self.strangers.1.saturating_add(1);
        self.strangers.1 <= STRANGERS
    }

    /// Hands over what has happened, all at once.
    pub(super) fn flush(&mut self) {
        if self.new.is_empty() {
            return;
        }
        if self.missed > 0 {
            self.new.insert(0, Some(OwnerEvent::Missed { events: self.missed }));
        }
        let before = self.new.len();
        self.sender.send_some(&mut self.new, EVENTS);
        if self.missed > 0 && self.new.len() < before {
            self.missed = 0;
        } else if self.missed > 0 {
            self.new.remove(0);
        }
        self.missed += self.new.len() as u64;
        self.new.clear();
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.flush();
        // Nobody listens: as good.
        drop(self.sender.send(None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(lease: u128) -> OwnerEvent {
        OwnerEvent::Released { lease: LeaseId::new(lease), how: Closing::Withdrawn }
    }

    #[test]
    fn strangers_are_told_of_so_many_times_a_second() {
        let mut events = Events::new(events().0);
        let told = |events: &mut Events, ms| {
            (0..100).filter(|_| events.may_tell_of_stranger(Duration::from_millis(ms))).count()
        };
        assert_eq!((told(&mut events, 0), told(&mut events, 999), told(&mut events, 1000)), (16, 0, 16));
    }

    #[tokio::test]
    async fn what_nobody_takes_is_counted() {
        let (end, mut taken) = events();
        let mut events = Events::new(end);
        for i in 0..EVENTS + 10 {
            events.push(event(i as u128));
            if i % 1000 == 0 {
                events.flush();
            }
        }
        events.flush();
        events.push(event(0));
        events.flush();
        for i in 0..EVENTS {
            assert_eq!(taken.next().await, Some(event(i as u128)));
        }
        events.push(event(7));
        events.flush();
        assert_eq!(taken.next().await, Some(OwnerEvent::Missed { events: 11 }));
        assert_eq!(taken.next().await, Some(event(7)));
        drop(events);
        assert_eq!((taken.next().await, taken.next().await), (None, None));
    }
}
