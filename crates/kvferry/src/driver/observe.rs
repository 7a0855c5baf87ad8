//! What the driver sees happen, told to metrics and spans. It changes nothing.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use kvferry_proto::names::{EngineId, Fence};
use kvferry_proto::peer::PeerMessage;
use kvferry_proto::rank::{FromRank, PullId};
use kvferry_session::owner::{Effect, LinkId, Mode, OfferError};
use kvferry_session::snapshot::Snapshot;

use crate::metrics::{Known, OwnerMetrics, Unmet};
use crate::spans::{self, PullSpan};

/// The driver's eyes.
pub(super) struct Observer {
    engine: EngineId,
    metrics: OwnerMetrics,
    /// Whose the links are that are up.
    links: HashMap<LinkId, EngineId>,
    /// Of the pulls that somebody wants to see.
    spans: HashMap<PullId, PullSpan>,
    /// Pulls that are pushed.
    pushed: HashSet<PullId>,
    /// Blocks in quarantine, and those of them that producers' ranks may still write.
    quarantined: (usize, usize),
}

impl Observer {
    pub(super) fn new(engine: EngineId) -> Self {
        let metrics = OwnerMetrics::new(&engine);
        Self {
            engine,
            metrics,
            links: HashMap::new(),
            spans: HashMap::new(),
            pushed: HashSet::new(),
            quarantined: (0, 0),
        }
    }

    /// A pull has begun.
    pub(super) fn pulling(&mut self, pull: PullId, mode: Mode, span: Option<Box<PullSpan>>) {
        self.metrics.pull_begun();
        if mode != Mode::Pull {
            self.pushed.insert(pull);
        }
        if let Some(span) = span {
            self.spans.insert(pull, *span);
        }
    }

    /// The engine has offered blocks.
    pub(super) fn offered(&mut self, offered: &Result<Fence, OfferError>) {
        self.metrics.offered(offered.is_ok());
        if let Ok(fence) = offered {
            spans::offered(fence);
        }
    }

    /// A message of a rank came in.
    pub(super) fn rank_said(&mut self, message: &FromRank) {
        if let FromRank::Pushed { result, .. } = message {
            self.metrics.written(result);
        }
    }

    /// A message of a peer came in.
    pub(super) fn heard(&mut self, link: LinkId, message: &PeerMessage) {
        if let PeerMessage::Heartbeat(_) = message
            && let Some(peer) = self.links.get(&link)
        {
            self.metrics.heartbeat_received(peer);
        }
    }

    /// Somebody has connected and could not prove who it is. All are counted; the log is told of those that the events tell of, so
    /// that nobody can fill it.
    pub(super) fn not_accepted(&mut self, reason: &str, told: bool) {
        self.metrics.link_failed(Unmet::Refused);
        if told {
            spans::not_accepted(&self.engine, reason);
        }
    }

    /// A link that somebody else has begun did not come up, and is to be told of.
    pub(super) fn stranger_failed(&self, reasons: &[String], refused: bool) {
        spans::link_failed(&self.engine, None, reasons, refused);
    }

    /// Before an effect is carried out.
    pub(super) fn effect(&mut self, effect: &Effect) {
        match effect {
            Effect::SendPeer { link, message: PeerMessage::Heartbeat(_) } => {
                if let Some(peer) = self.links.get(link) {
                    self.metrics.heartbeat_sent(peer);
                }
            }
            Effect::Phase { pull, phase } => {
                if let Some(span) = self.spans.get_mut(pull) {
                    span.phase(*phase);
                }
            }
            Effect::PullEnded { pull, result } => {
                self.metrics.pull_ended(result, self.pushed.remove(pull));
                if let Some(span) = self.spans.remove(pull) {
                    span.ended(result);
                }
            }
            Effect::LeaseClosed { fence, how, age, consumer } => {
                self.metrics.lease_closed(*how, *age, consumer.as_ref());
                spans::lease_closed(fence, *how, *age, consumer.as_ref());
            }
            Effect::FenceRejected { fence, peer } => {
                self.metrics.fence_rejected(peer);
                spans::fence_rejected(fence, peer);
            }
            Effect::Progress { pull, tokens } => {
                if let Some(span) = self.spans.get(pull) {
                    span.progress(*tokens);
                }
            }
            Effect::Reclaimed { pull, blocks } => {
                self.metrics.reclaimed(*blocks);
                spans::reclaimed(&self.engine, *pull, *blocks);
            }
            Effect::Contradiction { fence, peer, what } => {
                self.metrics.contradiction(peer);
                spans::contradiction(fence, peer, what);
            }
            Effect::LinkUp { link, peer, version, took } => {
                self.links.insert(*link, peer.clone());
                self.metrics.link_up(peer, *took);
                spans::link_up(&self.engine, peer, *version, *took);
            }
            Effect::LinkDown { link, peer, reason } => {
                self.links.remove(link);
                self.metrics.link_down(peer);
                spans::link_down(&self.engine, peer, reason);
            }
            Effect::LinkFailed { address, reasons, refused } => {
                self.metrics.link_failed(if *refused { Unmet::Refused } else { Unmet::Failed });
                // Of those that others have begun, only some are told of: see `stranger_failed`.
                if address.is_some() {
                    spans::link_failed(&self.engine, address.as_deref(), reasons, *refused);
                }
            }
            Effect::RankLost { .. } => self.metrics.rank_lost(),
            _ => {}
        }
    }

    /// How many blocks in quarantine producers' ranks may still write. Counted only when their number has changed.
    pub(super) fn by_writers(&mut self, quarantined: usize, snapshot: impl FnOnce() -> Snapshot) -> usize {
        if self.quarantined.0 != quarantined {
            let by_writers = snapshot().quarantine.iter().filter(|q| !q.writers.is_empty()).map(|q| q.blocks).sum();
            self.quarantined = (quarantined, if quarantined == 0 { 0 } else { by_writers });
        }
        self.quarantined.1
    }

    /// When there is something to sum up, though nothing more may happen.
    pub(super) fn due(&self) -> Option<Duration> {
        self.metrics.due()
    }

    /// What there is when the driver has done all that there was to do.
    pub(super) fn standing(&mut self, now: Duration, known: Known) {
        self.metrics.standing(known);
        if let Some(transfers) = self.metrics.interval(now) {
            spans::transfers(&self.engine, &transfers);
        }
    }
}
