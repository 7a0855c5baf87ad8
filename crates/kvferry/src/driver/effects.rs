//! What the session wants done, and how it leaves the driver.

use std::sync::Arc;

use kvferry_proto::handshake::Hello;
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{FromRank, RankFault, Stage, ToRank};
use kvferry_proto::wire;
use kvferry_session::owner::{Effect, LinkId, RankLinkId};

use super::events::OwnerEvent;
use super::links::{Peer, RankLink};
use super::{Driver, PIECE, Progress};
use crate::connection::{DRAINED, FULL};

/// Our hello with its frame: it is long, and the same for all who are met.
pub(super) struct Greeted {
    hello: Hello,
    frame: Vec<u8>,
}

impl Greeted {
    fn new(hello: Hello) -> Option<Self> {
        let message = PeerMessage::Hello(hello);
        let frame = wire::encode_peer(&message).ok()?;
        let PeerMessage::Hello(hello) = message else { return None };
        Some(Self { hello, frame })
    }

    /// The frame of a message that is this hello.
    fn frame_of(&self, message: &PeerMessage) -> Option<Vec<u8>> {
        let PeerMessage::Hello(Hello { versions, abilities, identity, stripe, digest, manifest }) = message else {
            return None;
        };
        let ours = &self.hello;
        // By its address: to compare manifests takes as long as to write one.
        let same = Arc::ptr_eq(manifest, &ours.manifest)
            && (versions, abilities, stripe) == (&ours.versions, &ours.abilities, &ours.stripe)
            && (identity, digest) == (&ours.identity, &ours.digest);
        same.then(|| self.frame.clone())
    }
}

impl Driver {
    /// Does what the session wants done. Failures come back to the session, which may want more.
    pub(super) fn carry_out(&mut self) {
        while let Some(effect) = self.session.next_effect() {
            self.observer.effect(&effect);
            match effect {
                Effect::Connect { link, address } => self.connect(link, &address),
                Effect::SendPeer { link, message } => self.send_peer(link, message),
                Effect::ClosePeer { link } => self.drop_peer(link),
                Effect::SendRank { link, message } => self.send_rank(link, message),
                Effect::CloseRank { link } => drop(self.ranks.remove(&link)),
                Effect::Ready(manifest) => {
                    self.hello = self.session.hello().and_then(Greeted::new);
                    self.events.push(OwnerEvent::Ready { epoch: manifest.epoch() });
                    self.progress.send_replace(Progress::Ready(manifest));
                }
                Effect::JoinRefused(error) => {
                    self.progress.send_if_modified(|p| {
                        let joining = matches!(p, Progress::Joining(_));
                        if joining {
                            *p = Progress::Refused(error.clone());
                        }
                        joining
                    });
                    self.events.push(OwnerEvent::JoinRefused(error));
                }
                Effect::RankLost { rank, reason } => {
                    // Whoever waits for the engine waits for its return.
                    self.progress.send_replace(Progress::Joining(self.session.missing()));
                    self.events.push(OwnerEvent::RankLost { rank, reason });
                }
                Effect::LinkUp { link, peer, version, took } => {
                    self.strangers.remove(&link);
                    if let Some(Peer::Socket(connection)) = self.peers.get(&link) {
                        connection.trust();
                    }
                    self.events.push(OwnerEvent::LinkUp { peer, version, took });
                }
                Effect::LinkDown { peer, reason, .. } => self.events.push(OwnerEvent::LinkDown { peer, reason }),
                Effect::LinkFailed { address: Some(address), reasons, refused } => {
                    self.events.push(OwnerEvent::LinkFailed { address: Some(address), reasons, refused });
                }
                Effect::LinkFailed { address: None, reasons, refused } => {
                    let told = self.events.may_tell_of_stranger(self.clock.now());
                    if told {
                        self.observer.stranger_failed(&reasons, refused);
                        self.events.push(OwnerEvent::LinkFailed { address: None, reasons, refused });
                    }
                }
                Effect::LeaseClosed { fence, how, .. } => {
                    self.events.push(OwnerEvent::Released { lease: fence.lease, how });
                }
                Effect::Progress { pull, tokens } => {
                    if let Some(progress) = self.pulls.get(&pull).and_then(|waiting| waiting.progress.as_ref()) {
                        progress.send_replace(tokens);
                    }
                    self.events.push(OwnerEvent::Progress { pull, tokens });
                }
                Effect::Reclaimed { pull, blocks } => self.events.push(OwnerEvent::Reclaimed { pull, blocks }),
                Effect::Contradiction { fence, peer, what } => {
                    self.events.push(OwnerEvent::Contradiction { lease: fence.lease, peer, what });
                }
                Effect::PullEnded { pull, result } => {
                    if let Some(waiting) = self.pulls.remove(&pull) {
                        // Nobody waits for an abandoned pull.
                        drop(waiting.done.send(result));
                    }
                }
                // The session knows no other effects; a newer one would be for a newer driver.
                _ => {}
            }
        }
    }

    /// Something was dealt with: does what the session wants done, and lets it go out if that has become much.
    pub(super) fn dealt_with(&mut self) {
        self.carry_out();
        self.unflushed += 1;
        if self.unflushed >= PIECE {
            self.flush();
        }
    }

    /// Lets all that was said go out.
    pub(super) fn flush(&mut self) {
        self.unflushed = 0;
        // Whoever is gone when it is handed over makes the session say more.
        while !self.said.0.is_empty() || !self.said.1.is_empty() {
            for link in std::mem::take(&mut self.said.0) {
                if self.peers.get_mut(&link).is_some_and(|peer| !peer.flush()) {
                    self.drop_peer(link);
                    self.session.link_closed(link, "the owner at the other end has ended", self.clock.now());
                }
            }
            for link in std::mem::take(&mut self.said.1) {
                if self.ranks.get_mut(&link).is_some_and(|rank| !rank.flush()) {
                    self.ranks.remove(&link);
                    self.session.rank_closed(link, "the rank has ended", self.clock.now());
                }
            }
            self.carry_out();
        }
        self.events.flush();
        self.progress.send_if_modified(|p| match p {
            Progress::Joining(missing) => {
                let now_missing = self.session.missing();
                let changed = *missing != now_missing && !now_missing.is_empty();
                if changed {
                    *missing = now_missing;
                }
                changed
            }
            _ => false,
        });
    }

    fn send_rank(&mut self, link: RankLinkId, message: ToRank) {
        let sent = match self.ranks.get_mut(&link) {
            Some(RankLink::Memory(end)) => {
                if self.said.1.last() != Some(&link) {
                    self.said.1.push(link);
                }
                end.send(message);
                self.full |= end.waiting() > FULL;
                return;
            }
            Some(RankLink::Socket(connection)) => match wire::encode_to_rank(&message) {
                Ok(frame) => {
                    if self.said.1.last() != Some(&link) {
                        self.said.1.push(link);
                    }
                    let sent = connection.send(frame);
                    self.full |= connection.waiting() > FULL;
                    sent
                }
                // The order fails, not the rank.
                Err(error) => {
                    if let Some(answer) = not_ordered(&message, &error.to_string()) {
                        self.session.rank_message(link, answer, self.clock.now());
                    }
                    return;
                }
            },
            None => false,
        };
        if !sent {
            self.ranks.remove(&link);
            self.session.rank_closed(link, "its connection takes nothing any more", self.clock.now());
        }
    }

    fn send_peer(&mut self, link: LinkId, message: PeerMessage) {
        let most = self.bounds.limits.waiting;
        let sent = match self.peers.get_mut(&link) {
            Some(Peer::Memory(end)) => {
                if self.said.0.last() != Some(&link) {
                    self.said.0.push(link);
                }
                end.send(message);
                Ok(())
            }
            Some(Peer::Socket(connection)) => {
                let known = self.hello.as_ref().and_then(|hello| hello.frame_of(&message));
                let frame = known.map_or_else(|| wire::encode_peer(&message).map_err(|e| e.to_string()), Ok);
                frame.and_then(|frame| {
                    if self.said.0.last() != Some(&link) {
                        self.said.0.push(link);
                    }
                    let sent = connection.send(frame) && connection.waiting() <= most;
                    self.full |= connection.waiting() > FULL;
                    if sent { Ok(()) } else { Err("its connection takes nothing any more".into()) }
                })
            }
            None => Err("its connection takes nothing any more".into()),
        };
        if let Err(reason) = sent {
            self.drop_peer(link);
            self.session.link_closed(link, &reason, self.clock.now());
        }
    }

    /// Lets the paused links go on once little waits for the ranks.
    pub(super) fn resume(&mut self) {
        if self.paused.is_empty() || self.ranks.values().any(|rank| rank.waiting() > DRAINED) {
            return;
        }
        let peers = &self.peers;
        self.paused.retain(|link| match peers.get(link) {
            Some(Peer::Socket(connection)) if connection.waiting() > DRAINED => true,
            Some(Peer::Socket(connection)) => {
                connection.credit();
                false
            }
            _ => false,
        });
    }
}

/// What a rank would have answered to an order that can't be written.
fn not_ordered(message: &ToRank, why: &str) -> Option<FromRank> {
    let fault = || RankFault { stage: Stage::Plan, text: why.to_owned(), in_doubt: false, bad: Vec::new() };
    match message {
        ToRank::Pull(order) => Some(FromRank::Pulled { pull: order.pull, result: Err(fault()) }),
        ToRank::Digest(order) => Some(FromRank::Digested { ticket: order.ticket, pieces: Err(why.to_owned()) }),
        ToRank::Push(order) => Some(FromRank::Pushed { push: order.push, result: Err(fault()) }),
        ToRank::Gather(order) => Some(FromRank::Gathered { ticket: order.ticket, result: Err(why.into()) }),
        // All others are shorter than what they were made from, which came in a frame, or than the orders; and what is said of
        // a stream is as long as its blocks, of which one request can't have so many.
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use kvferry_geometry::compat::CompatOptions;
    use kvferry_geometry::digest::Digest;
    use kvferry_geometry::peers::PeerOptions;
    use kvferry_geometry::request::{BlockTable, Request, SrcPaged, Tail};
    use kvferry_geometry::units::{BlockId, Bytes, RankId, TokenRange, Tokens};
    use kvferry_proto::names::{Attempt, LeaseId};
    use kvferry_proto::peer::{Gathered, MAX_REQUEST_BLOCKS};
    use kvferry_proto::push::{PushId, PushOrder, Stream};
    use kvferry_proto::rank::{Assurance, DigestOrder, GatherOrder, Pairing, PullId, PullOrder};

    use super::*;

    /// Whoever waits for what an order brings hears that it was not written.
    #[test]
    fn every_order_that_cannot_be_written_has_an_answer() {
        let digest = Digest::from_bytes([0; 32]);
        let (options, compat) = (PeerOptions::default(), CompatOptions::default());
        let pairing = Pairing { peer: digest, options, compat, peer_map: digest };
        let request = Request { tokens: Tokens::ZERO, src: Vec::new(), dst: Vec::new() };
        let (dst, ticket, why) = (RankId::new(0), 7, "it is too long");
        let order = PullOrder {
            pull: PullId(7),
            pairing,
            request: request.clone().into(),
            assurance: Assurance::Fenced,
            priority: 100,
            deadline: None,
            written: false,
        };
        let answer = not_ordered(&ToRank::Pull(order), why);
        assert!(matches!(answer, Some(FromRank::Pulled { pull: PullId(7), result: Err(f) }) if f.text == why));
        let order = DigestOrder { ticket, pairing, dst, request: request.clone(), windows: Vec::new() };
        let answer = not_ordered(&ToRank::Digest(order), why);
        assert!(matches!(answer, Some(FromRank::Digested { ticket: 7, pieces: Err(text) }) if text == why));
        let gathered = Gathered { bytes: Bytes::ZERO, batch: digest };
        let request_again = request.clone();
        let order = GatherOrder { ticket, pairing, dst, gathered, request };
        let answer = not_ordered(&ToRank::Gather(order), why);
        assert!(matches!(answer, Some(FromRank::Gathered { ticket: 7, result: Err(e) }) if e.to_string() == why));
        let order = PushOrder {
            push: PushId(7),
            lease: LeaseId::new(1),
            attempt: Attempt::FIRST,
            streamed: false,
            pairing,
            request: request_again.into(),
            priority: 100,
            within: std::time::Duration::ZERO,
            progress: false,
        };
        let answer = not_ordered(&ToRank::Push(Box::new(order)), why);
        assert!(matches!(answer, Some(FromRank::Pushed { push: PushId(7), result: Err(f) }) if f.text == why));
        assert_eq!(not_ordered(&ToRank::GatherEnd(7), why), None);
    }

    /// The longest that a stream's blocks can be still is a message.
    #[test]
    fn what_is_said_of_a_stream_can_always_be_written() {
        let blocks: Vec<BlockId> =
            (0..u32::try_from(MAX_REQUEST_BLOCKS).unwrap()).map(|i| BlockId::new(u32::MAX - i * 2)).collect();
        let held = TokenRange::new(Tokens::ZERO, Tokens::new(u64::MAX / 2));
        let group = SrcPaged { table: BlockTable::new(u64::MAX / 4, &blocks), held, tail: Tail::Exact }.into();
        let stream =
            Stream { lease: LeaseId::new(u128::MAX), attempt: Attempt::FIRST, groups: vec![group], sealed: true };
        assert!(wire::encode_to_rank(&ToRank::Stream(stream)).is_ok());
    }
}
