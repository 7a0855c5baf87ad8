//! Links to other owners: made when first needed, greeted, kept, lost.

use super::{BTreeMap, Digest, Duration, Effect, EngineId, LinkId, OwnerSession};
use std::sync::Arc;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::manifest::Manifest;
use kvferry_proto::handshake::{Abilities, Greeting, Hello};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::peer::PeerMessage;

use crate::outcome::FailureCause;
use crate::pairing::{Acquaintance, Direction, PairingError};

/// An engine at an address.
type Target = (String, EngineId);

#[derive(Debug)]
enum Stage {
    /// The driver connects.
    Connecting,
    /// Connected, while our own ranks have not all joined. The peer may have said its hello.
    Waiting(Option<Box<Hello>>),
    /// Our hello is sent.
    Greeting(Greeting),
    /// Both hellos are in order. With what both can do.
    Up(Arc<EngineManifest>, Abilities),
}

#[derive(Debug)]
struct Link {
    stage: Stage,
    /// Whom we wanted, if it was us who connected.
    target: Option<Target>,
    /// By when it must be up.
    deadline: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Links {
    last: u64,
    links: BTreeMap<LinkId, Link>,
    targets: BTreeMap<Target, LinkId>,
    known: BTreeMap<Digest, Acquaintance>,
}

impl Links {
    fn add(&mut self, link: Link) -> LinkId {
        self.last += 1;
        let id = LinkId(self.last);
        self.links.insert(id, link);
        id
    }

    /// The peer at the other end, if both hellos are in order.
    pub(super) fn peer(&self, link: LinkId) -> Option<&Arc<EngineManifest>> {
        match &self.links.get(&link)?.stage {
            Stage::Up(peer, _) => Some(peer),
            _ => None,
        }
    }

    /// Whether both ends can do something.
    pub(super) fn has(&self, link: LinkId, ability: Abilities) -> bool {
        matches!(self.links.get(&link), Some(Link { stage: Stage::Up(_, common), .. }) if common.has(ability))
    }

    pub(super) fn exists(&self, link: LinkId) -> bool {
        self.links.contains_key(&link)
    }

    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.links.values().filter(|l| !matches!(l.stage, Stage::Up(..))).map(|l| l.deadline).min()
    }

    fn is_known_elsewhere(&self, digest: Digest) -> bool {
        self.links.values().any(|l| matches!(&l.stage, Stage::Up(peer, _) if peer.digest() == digest))
    }
}

impl OwnerSession {
    pub(super) fn accept_link(&mut self) -> LinkId {
        let deadline = self.now.saturating_add(self.config.handshake);
        let link = self.links.add(Link { stage: Stage::Waiting(None), target: None, deadline });
        self.greet(link);
        link
    }

    /// The link to an engine, begun now if there is none.
    pub(super) fn link_to(&mut self, address: &str, engine: &EngineId) -> LinkId {
        let target = (address.to_owned(), engine.clone());
        if let Some(link) = self.links.targets.get(&target) {
            return *link;
        }
        let deadline = self.now.saturating_add(self.config.handshake);
        let link = self.links.add(Link { stage: Stage::Connecting, target: Some(target.clone()), deadline });
        self.links.targets.insert(target, link);
        self.effects.push_back(Effect::Connect { link, address: address.to_owned() });
        link
    }

    /// Sends our hello, if we know what to say.
    pub(super) fn greet(&mut self, link: LinkId) {
        let Some(l) = self.links.links.get_mut(&link) else { return };
        if !matches!(l.stage, Stage::Connecting | Stage::Waiting(_)) {
            return;
        }
        let Some(local) = self.life.local() else {
            if matches!(l.stage, Stage::Connecting) {
                l.stage = Stage::Waiting(None);
            }
            return;
        };
        let expected = l.target.as_ref().map(|(_, engine)| engine.clone());
        let (greeting, hello) = Greeting::start(local.clone(), expected);
        let before = std::mem::replace(&mut l.stage, Stage::Greeting(greeting));
        self.send_peer(link, PeerMessage::Hello(hello));
        if let Stage::Waiting(Some(theirs)) = before {
            self.on_hello(link, &theirs);
        }
    }

    /// Our ranks have all joined: greets those who have connected meanwhile.
    pub(super) fn greet_waiting(&mut self) {
        let waiting: Vec<LinkId> =
            self.links.links.iter().filter(|(_, l)| matches!(l.stage, Stage::Waiting(_))).map(|(id, _)| *id).collect();
        for link in waiting {
            self.greet(link);
        }
    }

    pub(super) fn on_peer_message(&mut self, link: LinkId, message: PeerMessage) {
        let Some(l) = self.links.links.get(&link) else { return };
        match (&l.stage, message) {
            (Stage::Waiting(None), PeerMessage::Hello(hello)) => {
                if let Some(l) = self.links.links.get_mut(&link) {
                    l.stage = Stage::Waiting(Some(Box::new(hello)));
                }
            }
            (Stage::Greeting(_), PeerMessage::Hello(hello)) => self.on_hello(link, &hello),
            (Stage::Up(..), PeerMessage::Bind(bind)) => self.on_bind(link, &bind),
            (Stage::Up(..), PeerMessage::BindAnswer(answer)) => self.on_bind_answer(link, answer),
            (Stage::Up(..), PeerMessage::Release(release)) => self.on_release(link, &release),
            (Stage::Up(..), PeerMessage::ReleaseAnswer(answer)) => self.on_release_answer(link, &answer),
            (Stage::Up(..), PeerMessage::RunDigest(question)) => self.on_run_digest(link, question),
            (Stage::Up(..), PeerMessage::RunDigestAnswer(answer)) => self.on_run_digest_answer(link, answer),
            (Stage::Up(..), PeerMessage::Gather(question)) => self.on_gather(link, question),
            (Stage::Up(..), PeerMessage::GatherAnswer(answer)) => self.on_gather_answer(link, answer),
            (_, PeerMessage::Refused(reasons)) => {
                self.effects.push_back(Effect::ClosePeer { link });
                self.drop_link(link, reasons);
            }
            _ => self.refuse_link(link, vec!["a message came that does not belong here in the conversation".into()]),
        }
    }

    fn on_hello(&mut self, link: LinkId, hello: &Hello) {
        let Some(l) = self.links.links.get_mut(&link) else { return };
        let Stage::Greeting(greeting) = &l.stage else { return };
        let greeting = greeting.clone();
        match greeting.on_hello(hello) {
            Ok(established) => {
                l.stage = Stage::Up(established.peer, established.abilities);
                self.link_up_for_pulls(link);
            }
            Err(refusal) => self.refuse_link(link, refusal.0.iter().map(ToString::to_string).collect()),
        }
    }

    /// Tells the peer why, then closes.
    pub(super) fn refuse_link(&mut self, link: LinkId, reasons: Vec<String>) {
        self.send_peer(link, PeerMessage::Refused(reasons.clone()));
        self.effects.push_back(Effect::ClosePeer { link });
        self.drop_link(link, reasons);
    }

    /// The link broke by itself.
    pub(super) fn lose_link(&mut self, link: LinkId, reason: &str) {
        self.remove_link(link, |address| FailureCause::Link { address, reason: reason.to_owned() });
    }

    /// The link was given up by one of the owners.
    fn drop_link(&mut self, link: LinkId, reasons: Vec<String>) {
        self.remove_link(link, |address| FailureCause::Handshake { address, reasons });
    }

    fn remove_link(&mut self, link: LinkId, cause: impl FnOnce(String) -> FailureCause) {
        let Some(gone) = self.links.links.remove(&link) else { return };
        let mut address = String::new();
        if let Some(target) = gone.target {
            self.links.targets.remove(&target);
            address = target.0;
        }
        let cause = cause(address);
        self.link_lost_in_leases(link);
        self.link_lost_in_pulls(link, &cause);
        if let Stage::Up(peer, _) = gone.stage
            && !self.links.is_known_elsewhere(peer.digest())
        {
            self.links.known.remove(&peer.digest());
            self.forget(peer.digest());
        }
    }

    pub(super) fn expire_links(&mut self) {
        let now = self.now;
        let late = |l: &Link| !matches!(l.stage, Stage::Up(..)) && l.deadline <= now;
        let late: Vec<LinkId> = self.links.links.iter().filter(|(_, l)| late(l)).map(|(id, _)| *id).collect();
        for link in late {
            let reason = format!("no handshake within {:?}", self.config.handshake);
            self.effects.push_back(Effect::ClosePeer { link });
            self.lose_link(link, &reason);
        }
    }

    /// What we know of the peer at a link when it reads from us.
    pub(super) fn serving(&mut self, link: LinkId) -> Option<Met<'_>> {
        self.met(link, Acquaintance::serving)
    }

    /// What we know of the peer at a link when we read from it.
    pub(super) fn reading(&mut self, link: LinkId) -> Option<Met<'_>> {
        self.met(link, Acquaintance::reading)
    }

    fn met(&mut self, link: LinkId, way: Way) -> Option<Met<'_>> {
        let peer = self.links.peer(link)?.clone();
        let ours = self.life.local()?.manifest.cache().clone();
        let known = self.links.known.entry(peer.digest()).or_default();
        let direction = way(known, &ours, peer.cache(), self.config.compat);
        Some((peer, direction))
    }
}

/// A peer, and what moves in one of the two directions.
type Met<'a> = (Arc<EngineManifest>, Result<&'a mut Direction, PairingError>);
/// Which direction: [`Acquaintance::serving`] or [`Acquaintance::reading`].
type Way = for<'a> fn(
    &'a mut Acquaintance,
    &Arc<Manifest>,
    &Arc<Manifest>,
    CompatOptions,
) -> Result<&'a mut Direction, PairingError>;
