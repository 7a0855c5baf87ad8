//! Links to other owners: greeted, kept while they are of use, lost.
//!
//! Who has connected speaks first. Engines that have met before greet by digests; a manifest that one side has forgotten is asked
//! for and comes before anything else does.

use super::{Duration, Effect, EngineId, LinkId, OwnerSession};
use std::sync::Arc;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::manifest::Manifest;
use kvferry_proto::handshake::{
    Again, Allowed, Claim, Established, Expected, Greeting, Hello, HelloMismatch, Met, Refusal, Versions,
};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::peer::PeerMessage;

use super::roads::RoadId;
use crate::outcome::FailureCause;
use crate::pairing::{Acquaintances, Direction, PairingError};

mod keep;
mod table;
mod up;

use table::{First, Link, Remembered, Stage};
pub(super) use table::{LinkView, Links};

impl OwnerSession {
    /// `took`: how long it is there already.
    pub(super) fn accept_link(&mut self, proven: Option<Arc<Allowed>>, took: Duration) -> LinkId {
        let began = self.now.saturating_sub(took);
        let deadline = began.saturating_add(self.config.handshake);
        let link = self.links.add(Stage::Waiting(None), None, began, deadline);
        if let Some(l) = self.links.links.get_mut(&link) {
            l.proven = proven;
        }
        link
    }

    pub(super) fn begin_link(&mut self, road: RoadId, address: &str) -> LinkId {
        let deadline = self.now.saturating_add(self.config.handshake);
        let link = self.links.add(Stage::Connecting, Some(road), self.now, deadline);
        self.effects.push_back(Effect::Connect { link, address: address.to_owned() });
        link
    }

    pub(super) fn link_is_open(&mut self, link: LinkId, proven: Option<Arc<Allowed>>) {
        if let Some(l) = self.links.links.get_mut(&link).filter(|l| matches!(l.stage, Stage::Connecting)) {
            l.proven = proven;
            l.stage = Stage::Waiting(None);
        } else {
            return;
        }
        // What we say first tells much of our ranks: not to an end that can't be the one we want.
        let wanted = self.links.links.get(&link).map(|l| self.expected(l));
        if let Some(Expected { engine: Some(got), proven }) = wanted {
            let found = match (&proven, &self.config.allowed) {
                (Some(proven), _) if !proven.has(&got) => HelloMismatch::NotProven { got },
                (_, Some(allowed)) if !allowed.has(&got) => HelloMismatch::NotAllowed { got },
                _ => return self.speak_first(link),
            };
            return self.drop_link(link, vec![found.to_string()]);
        }
        self.speak_first(link);
    }

    /// Our ranks have all joined: greets those who have connected meanwhile, and those to whom we have.
    pub(super) fn greet_waiting(&mut self) {
        let waiting = self.links.links.iter_mut().filter_map(|(id, l)| match &mut l.stage {
            Stage::Waiting(first) => Some((*id, l.road.is_some(), first.take())),
            _ => None,
        });
        let waiting: Vec<(LinkId, bool, Option<First>)> = waiting.collect();
        for (link, ours, first) in waiting {
            if ours {
                self.speak_first(link);
            }
            if let Some(first) = first {
                self.on_first(link, first);
            }
        }
    }

    fn expected(&self, link: &Link) -> Expected {
        let engine = link.road.and_then(|road| self.roads.engine(road)).cloned();
        Expected { engine, proven: link.proven.clone() }
    }

    /// Says our hello on a link that we have made, if we know what to say.
    fn speak_first(&mut self, link: LinkId) {
        let now = self.now;
        let Some(local) = self.life.local().cloned() else { return };
        let Some(l) = self.links.links.get(&link).filter(|l| matches!(l.stage, Stage::Waiting(_))) else { return };
        let expected = self.expected(l);
        // By digest only to whom we have met on this road, and still know.
        let known = l.road.and_then(|road| self.roads.met(road)).filter(|d| self.links.manifests.get(*d).is_some());
        let ours = local.manifest.digest();
        let (greeting, message) = match known {
            Some(yours) => {
                let (greeting, again) = Greeting::again(local, expected, yours);
                (greeting, PeerMessage::Again(again))
            }
            None => {
                let (greeting, hello) = Greeting::start(local, expected);
                (greeting, PeerMessage::Hello(hello))
            }
        };
        if let Some(l) = self.links.links.get_mut(&link) {
            (l.stage, l.ours, l.briefly) = (Stage::Greeting(greeting), Some(ours), known.is_some());
            l.greeted = Some(now);
        }
        self.send_peer(link, message);
    }

    /// What the other end has said first, on a link that it has made.
    fn on_first(&mut self, link: LinkId, first: First) {
        let Some(l) = self.links.links.get(&link) else { return };
        if !matches!(l.stage, Stage::Waiting(_)) {
            // Both spoke at once: a neighbour that doesn't wait. Our own hello is sent.
            return match first {
                First::Hello(hello) => self.on_hello(link, &hello),
                First::Again(again) => self.on_again(link, &again),
            };
        }
        let Some(local) = self.life.local().cloned() else {
            let waiting = |l: &&Link| matches!(l.stage, Stage::Waiting(Some(_)));
            if self.links.links.values().filter(waiting).count() >= MAX_WAITING {
                // It tries again by itself; hellos are long, and who sends them is not known yet.
                return self.close_link(link, "the engine's ranks have not all joined, and others wait already");
            }
            if let Some(l) = self.links.links.get_mut(&link) {
                l.stage = Stage::Waiting(Some(first));
            }
            return;
        };
        let (ours, expected) = (local.manifest.digest(), self.expected(l));
        let theirs = match &first {
            First::Hello(hello) => (hello.digest, None),
            First::Again(again) => (again.digest, Some(again.yours)),
        };
        let (greeting, answer) = if theirs.1 == Some(ours) {
            let (greeting, again) = Greeting::again(local, expected, theirs.0);
            (greeting, PeerMessage::Again(again))
        } else {
            let (greeting, hello) = Greeting::start(local, expected);
            (greeting, PeerMessage::Hello(hello))
        };
        let met = match &first {
            First::Hello(hello) => greeting.on_hello(hello).map(Met::Established),
            First::Again(again) => greeting.on_again(again, self.links.manifests.get(again.digest)),
        };
        if let Some(l) = self.links.links.get_mut(&link) {
            (l.ours, l.briefly) = (Some(ours), matches!(answer, PeerMessage::Again(_)));
        }
        match met {
            Ok(met) => {
                // A manifest that is asked for comes before whatever follows our answer.
                if matches!(met, Met::Lacking(_)) {
                    self.send_peer(link, PeerMessage::ManifestWanted);
                }
                self.send_peer(link, answer);
                self.on_met(link, met);
            }
            Err(refusal) => self.refuse_link(link, texts(&refusal)),
        }
    }

    /// What the other end's hello claims, which follows; on a link that it has made or we have.
    pub(super) fn on_claim(&mut self, link: LinkId, claim: &Claim) {
        let Some(l) = self.links.links.get(&link) else { return };
        let (greeting, answer) = match (&l.stage, self.life.local()) {
            (Stage::Greeting(greeting), _) => (greeting.clone(), None),
            (Stage::Waiting(None), Some(local)) => {
                let (greeting, hello) = Greeting::start(local.clone(), self.expected(l));
                (greeting, Some(hello))
            }
            _ => return,
        };
        if let Err(refusal) = greeting.on_claim(claim) {
            return self.refuse_link(link, texts(&refusal));
        }
        if let Some(hello) = answer {
            if let Some(l) = self.links.links.get_mut(&link) {
                (l.ours, l.stage) = (Some(hello.digest), Stage::Greeting(greeting));
            }
            self.send_peer(link, PeerMessage::Hello(hello));
        }
    }

    pub(super) fn on_peer_message(&mut self, link: LinkId, message: PeerMessage) {
        let Some(l) = self.links.links.get_mut(&link) else { return };
        match (&l.stage, message) {
            (Stage::Waiting(None), PeerMessage::Hello(hello)) => self.on_first(link, First::Hello(Box::new(hello))),
            (Stage::Waiting(None), PeerMessage::Again(again)) => self.on_first(link, First::Again(again)),
            (Stage::Greeting(_), PeerMessage::Hello(hello)) => self.on_hello(link, &hello),
            (Stage::Greeting(_), PeerMessage::Again(again)) => self.on_again(link, &again),
            (Stage::Greeting(_) | Stage::Lacking(_) | Stage::Up(_), PeerMessage::ManifestWanted)
                if l.briefly && !l.supplied =>
            {
                l.supplied = true;
                if let Some(local) = self.life.local() {
                    let manifest = local.manifest.clone();
                    self.send_peer(link, PeerMessage::Manifest(manifest));
                }
            }
            (Stage::Lacking(_), PeerMessage::Manifest(manifest)) => self.on_manifest(link, manifest),
            (_, PeerMessage::Refused(reasons)) => {
                let reasons = legible(reasons);
                self.effects.push_back(Effect::ClosePeer { link });
                self.drop_link(link, reasons);
            }
            (Stage::Up(_), message) => {
                if !matches!(message, PeerMessage::Heartbeat(_) | PeerMessage::HeartbeatAnswer(_)) {
                    l.used = self.now;
                }
                self.on_message_of_peer(link, message);
            }
            _ => self.refuse_link(link, vec![MISPLACED.into()]),
        }
    }

    fn on_message_of_peer(&mut self, link: LinkId, message: PeerMessage) {
        match message {
            PeerMessage::Bind(bind) => self.on_bind(link, &bind),
            PeerMessage::BindAnswer(answer) => self.on_bind_answer(link, answer),
            PeerMessage::Release(release) => self.on_release(link, &release),
            PeerMessage::ReleaseAnswer(answer) => self.on_release_answer(link, &answer),
            PeerMessage::PushBind(push) => self.on_push_bind(link, *push),
            PeerMessage::Written(written) => self.on_written(link, *written),
            PeerMessage::Progress(progress) => self.on_progress(link, &progress),
            PeerMessage::Stop(stop) => self.on_stop(link, &stop),
            PeerMessage::Stopped(stopped) => self.on_stopped(link, stopped),
            PeerMessage::Heartbeat(beat) => self.on_heartbeat(link, beat),
            PeerMessage::HeartbeatAnswer(answer) => self.on_heartbeat_answer(link, answer),
            PeerMessage::Closed(notice) => self.on_lease_closed(link, &notice),
            PeerMessage::RunDigest(question) => self.on_run_digest(link, question),
            PeerMessage::RunDigestAnswer(answer) => self.on_run_digest_answer(link, answer),
            PeerMessage::Gather(question) => self.on_gather(link, question),
            PeerMessage::GatherAnswer(answer) => self.on_gather_answer(link, answer),
            _ => self.refuse_link(link, vec![MISPLACED.into()]),
        }
    }

    fn on_hello(&mut self, link: LinkId, hello: &Hello) {
        self.judge(link, |greeting, _| greeting.on_hello(hello).map(Met::Established));
    }

    fn on_again(&mut self, link: LinkId, again: &Again) {
        self.judge(link, |greeting, manifests| greeting.on_again(again, manifests.get(again.digest)));
    }

    fn judge(&mut self, link: LinkId, met: impl FnOnce(Greeting, &Remembered) -> Result<Met, Refusal>) {
        let Some(l) = self.links.links.get(&link) else { return };
        let Stage::Greeting(greeting) = &l.stage else { return };
        match met(greeting.clone(), &self.links.manifests) {
            Ok(met) => {
                if matches!(met, Met::Lacking(_)) {
                    self.send_peer(link, PeerMessage::ManifestWanted);
                }
                self.on_met(link, met);
            }
            Err(refusal) => self.refuse_link(link, texts(&refusal)),
        }
    }

    fn on_met(&mut self, link: LinkId, met: Met) {
        match met {
            // It is older than when it was met, and will not understand how it was greeted: tried anew, by a whole hello.
            Met::Established(e) if e.version < Versions::LEASES && self.links.is_brief(link) => {
                self.close_link(link, &format!("the peer speaks version {} by now", e.version));
            }
            Met::Established(established) => self.is_up(link, established),
            Met::Lacking(lacking) => {
                if let Some(l) = self.links.links.get_mut(&link) {
                    l.stage = Stage::Lacking(lacking);
                }
            }
        }
    }

    fn on_manifest(&mut self, link: LinkId, manifest: Arc<EngineManifest>) {
        let Some(l) = self.links.links.get(&link) else { return };
        let Stage::Lacking(lacking) = &l.stage else { return };
        match lacking.clone().on_manifest(manifest) {
            Ok(established) => self.is_up(link, established),
            Err(refusal) => self.refuse_link(link, texts(&refusal)),
        }
    }

    fn is_up(&mut self, link: LinkId, established: Established) {
        let (now, version) = (self.now, established.version);
        let ours = self.links.links.get(&link).and_then(|l| l.ours);
        if version < Versions::LEASES && self.life.local().is_some_and(|local| ours != Some(local.manifest.digest())) {
            return self.close_link(link, MADE_ANEW);
        }
        let peer = established.peer.clone();
        let Some(l) = self.links.links.get_mut(&link) else { return };
        (l.stage, l.up, l.used) = (Stage::Up(established), now, now);
        let (took, road) = (now.saturating_sub(l.began), l.road);
        self.links.up.add(link, &peer);
        match self.config.idle {
            Some(idle) => self.links.due.set(link, now.saturating_add(keep::allowed(idle, road))),
            None => self.links.due.remove(link),
        }
        self.links.manifests.note(&peer, self.config.limits.manifests);
        if road.is_none() && !self.spare_links(link, peer.engine()) {
            let limit = self.config.limits.links;
            return self
                .refuse_link(link, vec![format!("{limit} links of {} are in use, which is the limit", peer.engine())]);
        }
        self.effects.push_back(Effect::LinkUp { link, peer: peer.engine().clone(), version, took });
        self.ask_for_evidence(link, &peer);
        if let Some(road) = road {
            self.road_is_up(road, link, (version >= Versions::LEASES).then(|| peer.digest()));
        }
    }

    /// Tells the peer why, then closes.
    pub(super) fn refuse_link(&mut self, link: LinkId, reasons: Vec<String>) {
        self.send_peer(link, PeerMessage::Refused(reasons.clone()));
        self.effects.push_back(Effect::ClosePeer { link });
        self.drop_link(link, reasons);
    }

    /// Closes a link that nobody uses.
    pub(super) fn close_link(&mut self, link: LinkId, reason: &str) {
        self.effects.push_back(Effect::ClosePeer { link });
        self.lose_link(link, reason);
    }

    /// The link may not be made.
    pub(super) fn forbid_link(&mut self, link: LinkId, reason: &str) {
        if let Some(road) = self.links.links.get(&link).and_then(|l| l.road) {
            self.road_is_closed(road, link, reason);
        }
        self.lose_link(link, reason);
    }

    /// The link broke by itself.
    pub(super) fn lose_link(&mut self, link: LinkId, reason: &str) {
        self.remove_link(link, vec![reason.to_owned()], false);
    }

    /// The link was given up by one of the owners.
    fn drop_link(&mut self, link: LinkId, reasons: Vec<String>) {
        self.remove_link(link, reasons, true);
    }

    fn remove_link(&mut self, link: LinkId, reasons: Vec<String>, refused: bool) {
        let Some(gone) = self.links.links.remove(&link) else { return };
        self.links.due.remove(link);
        self.beats_end(link);
        let address = gone.road.and_then(|road| self.roads.address(road)).map(str::to_owned);
        self.link_lost_in_leases(link);
        match gone.stage {
            Stage::Up(Established { peer, .. }) => {
                let reason = reasons.join("; ");
                let at = address.unwrap_or_default();
                let cause = if refused {
                    FailureCause::Handshake { address: at, reasons }
                } else {
                    FailureCause::Link { address: at, reason: reason.clone() }
                };
                self.link_lost_in_pulls(link, &cause);
                self.effects.push_back(Effect::LinkDown { link, peer: peer.engine().clone(), reason });
                if let Some(road) = gone.road {
                    self.road_is_down(road, link);
                }
                let last = self.links.up.remove(link, &peer);
                if last.cache {
                    self.links.known.forget(peer.cache());
                }
                if last.manifest {
                    self.forget(peer.digest());
                }
            }
            _ => {
                // A neighbour that was met before may not know brief hellos any more: that is no answer to a whole one.
                let refused = refused && !gone.briefly;
                self.effects.push_back(Effect::LinkFailed { address, reasons: reasons.clone(), refused });
                if let Some(road) = gone.road {
                    self.road_failed(road, link, reasons, refused);
                }
            }
        }
    }

    /// What we know of the peer at a link when it reads from us.
    pub(super) fn serving(&mut self, link: LinkId) -> Option<Acquainted> {
        self.met(link, Acquaintances::serving)
    }

    /// What we know of the peer at a link when we read from it.
    pub(super) fn reading(&mut self, link: LinkId) -> Option<Acquainted> {
        self.met(link, Acquaintances::reading)
    }

    fn met(&mut self, link: LinkId, way: Way) -> Option<Acquainted> {
        let peer = self.links.peer(link)?.clone();
        let ours = self.life.local()?.manifest.cache().clone();
        let direction = way(&mut self.links.known, &ours, peer.cache(), self.config.compat);
        Some((peer, direction))
    }
}

/// Whether a link is of use is not looked at more often.
const SHORTEST_IDLE: Duration = Duration::from_millis(1);

/// The most hellos that are kept until our own ranks have joined.
const MAX_WAITING: usize = 16;

/// What neighbours of version 2 are told, who don't ask again who we are.
const MADE_ANEW: &str = "this engine was made anew";

const MISPLACED: &str = "a message came that does not belong here in the conversation";

/// As much of a peer's reasons as people read: each request that waits for the link gets them.
fn legible(reasons: Vec<String>) -> Vec<String> {
    let cut = |reason: String| {
        let end = (0..=reason.len().min(MAX_REASON)).rev().find(|&i| reason.is_char_boundary(i)).unwrap_or(0);
        if end == reason.len() { reason } else { format!("{}...", &reason[..end]) }
    };
    reasons.into_iter().take(MAX_REASONS).map(cut).collect()
}

/// Of a peer's refusal: so many reasons, of so many bytes.
const MAX_REASONS: usize = 8;
const MAX_REASON: usize = 256;

fn texts(refusal: &Refusal) -> Vec<String> {
    refusal.0.iter().map(ToString::to_string).collect()
}

/// A peer, and what moves in one of the two directions.
type Acquainted = (Arc<EngineManifest>, Result<Arc<Direction>, PairingError>);
/// Which direction: [`Acquaintances::serving`] or [`Acquaintances::reading`].
type Way =
    fn(&mut Acquaintances, &Arc<Manifest>, &Arc<Manifest>, CompatOptions) -> Result<Arc<Direction>, PairingError>;
