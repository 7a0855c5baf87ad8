//! Links to other owners: greeted, kept while they are of use, lost.
//!
//! Who has connected speaks first. Engines that have met before greet by digests; a manifest that one side has forgotten is asked
//! for and comes before anything else does.

use super::{BTreeMap, Digest, Duration, Effect, EngineId, Fence, LinkId, OwnerSession};
use std::sync::Arc;

use kvferry_geometry::compat::CompatOptions;
use kvferry_geometry::manifest::Manifest;
use kvferry_proto::handshake::{
    Abilities, Again, Allowed, Established, Expected, Greeting, Hello, HelloMismatch, Lacking, Met, Refusal, Versions,
};
use kvferry_proto::manifest::EngineManifest;
use kvferry_proto::peer::PeerMessage;

use super::roads::RoadId;
use super::timers::Timers;
use crate::outcome::FailureCause;
use crate::pairing::{Acquaintance, Direction, PairingError};

mod keep;

#[derive(Debug)]
enum Stage {
    /// The driver connects.
    Connecting,
    /// Connected, while our own ranks have not all joined, or until the other end has spoken first. What it has said.
    Waiting(Option<First>),
    /// Our hello is sent.
    Greeting(Greeting),
    /// Both hellos are in order, and the peer's manifest is on its way.
    Lacking(Lacking),
    /// Both hellos are in order.
    Up(Established),
}

/// What the other end has said first.
#[derive(Debug)]
enum First {
    Hello(Box<Hello>),
    Again(Again),
}

#[derive(Debug)]
struct Link {
    stage: Stage,
    /// Where it leads, if it was us who connected.
    road: Option<RoadId>,
    /// For whom its credentials stand.
    proven: Option<Arc<Allowed>>,
    /// The manifest of ours that the peer knows, once it was greeted.
    ours: Option<Digest>,
    /// Whether we have greeted by digests only.
    briefly: bool,
    /// Whether the peer was sent our manifest because it had asked.
    supplied: bool,
    began: Duration,
    /// When our hello was sent first: what the peer says of itself in answer is not older.
    greeted: Option<Duration>,
    /// When it came up.
    up: Duration,
    /// When something was asked or answered on it last, but for beats.
    used: Duration,
    /// Binds whose answers nobody waits for any more: they come in order, before those of later binds of the same.
    owed: BTreeMap<Fence, u32>,
    /// What its peer has said that can't be true.
    contradictions: u32,
}

#[derive(Debug, Default)]
pub(super) struct Links {
    last: u64,
    links: BTreeMap<LinkId, Link>,
    /// When a link must be up, or is looked at whether it is still of use.
    due: Timers<LinkId>,
    known: BTreeMap<Digest, Acquaintance>,
    manifests: Remembered,
}

/// Manifests of engines that we have met, with or without a link.
#[derive(Debug, Default)]
struct Remembered {
    count: u64,
    by_digest: BTreeMap<Digest, (u64, Arc<EngineManifest>)>,
}

impl Remembered {
    fn get(&self, digest: Digest) -> Option<Arc<EngineManifest>> {
        self.by_digest.get(&digest).map(|(_, m)| m.clone())
    }

    fn note(&mut self, manifest: &Arc<EngineManifest>, limit: usize) {
        self.count += 1;
        // One for each engine: its former life is of no use.
        self.by_digest.retain(|_, (_, m)| m.engine() != manifest.engine());
        self.by_digest.insert(manifest.digest(), (self.count, manifest.clone()));
        while self.by_digest.len() > limit {
            let Some(oldest) = self.by_digest.iter().min_by_key(|(_, (count, _))| *count).map(|(d, _)| *d) else {
                return;
            };
            self.by_digest.remove(&oldest);
        }
    }
}

/// What a link is, for whoever wants to see it.
pub(super) struct LinkView<'a> {
    pub(super) link: LinkId,
    pub(super) stage: &'static str,
    pub(super) peer: Option<&'a Arc<EngineManifest>>,
    pub(super) version: Option<u16>,
    pub(super) road: Option<RoadId>,
    pub(super) since: Duration,
}

impl Links {
    fn add(&mut self, stage: Stage, road: Option<RoadId>, now: Duration, deadline: Duration) -> LinkId {
        self.last += 1;
        let id = LinkId(self.last);
        let link = Link {
            stage,
            road,
            proven: None,
            ours: None,
            briefly: false,
            supplied: false,
            began: now,
            greeted: None,
            up: now,
            used: now,
            owed: BTreeMap::new(),
            contradictions: 0,
        };
        self.links.insert(id, link);
        self.due.set(id, deadline);
        id
    }

    fn established(&self, link: LinkId) -> Option<&Established> {
        match &self.links.get(&link)?.stage {
            Stage::Up(established) => Some(established),
            _ => None,
        }
    }

    /// The peer at the other end, if both hellos are in order.
    pub(super) fn peer(&self, link: LinkId) -> Option<&Arc<EngineManifest>> {
        self.established(link).map(|e| &e.peer)
    }

    /// Whether both ends can do something.
    pub(super) fn has(&self, link: LinkId, ability: Abilities) -> bool {
        self.established(link).is_some_and(|e| e.abilities.has(ability))
    }

    /// Whether both ends know heartbeats, notices and further attempts.
    pub(super) fn knows_leases(&self, link: LinkId) -> bool {
        self.established(link).is_some_and(|e| e.version >= Versions::LEASES)
    }

    /// When its peer was asked who it is, if it was asked: what it has said of itself is not older.
    pub(super) fn asked(&self, link: LinkId) -> Option<Duration> {
        if self.knows_leases(link) { self.links.get(&link)?.greeted } else { None }
    }

    /// Those that are up and lead to an engine that pushes, whoever has made them.
    pub(super) fn pushing_to(&self, engine: &EngineId) -> Vec<LinkId> {
        let pushes = |e: &Established| e.peer.engine() == engine && e.abilities.has(Abilities::PUSH);
        let leads = |l: &Link| matches!(&l.stage, Stage::Up(e) if pushes(e));
        self.links.iter().filter(|(_, l)| leads(l)).map(|(id, _)| *id).collect()
    }

    /// A bind was sent over a link, and nobody waits for its answer any more.
    pub(super) fn owe(&mut self, link: LinkId, fence: Fence) {
        if let Some(l) = self.links.get_mut(&link) {
            *l.owed.entry(fence).or_default() += 1;
        }
    }

    /// Whether an answer is one that nobody waits for.
    pub(super) fn settle_owed(&mut self, link: LinkId, fence: &Fence) -> bool {
        let Some(l) = self.links.get_mut(&link) else { return false };
        let Some(count) = l.owed.get_mut(fence) else { return false };
        *count -= 1;
        if *count == 0 {
            l.owed.remove(fence);
        }
        true
    }

    /// Counts a contradiction; gives whether there were too many.
    pub(super) fn contradicts(&mut self, link: LinkId) -> bool {
        let Some(l) = self.links.get_mut(&link) else { return false };
        l.contradictions = l.contradictions.saturating_add(1);
        l.contradictions > MAX_CONTRADICTIONS
    }

    pub(super) fn exists(&self, link: LinkId) -> bool {
        self.links.contains_key(&link)
    }

    /// Whether we have greeted by digests.
    fn is_brief(&self, link: LinkId) -> bool {
        self.links.get(&link).is_some_and(|l| l.briefly)
    }

    /// Since when its peer may have been another, and which manifest of ours it knows.
    pub(super) fn standing(&self, link: LinkId) -> Option<(Duration, Option<Digest>)> {
        let l = self.links.get(&link)?;
        // A neighbour of version 2 says its hello without waiting for ours.
        let heard = if self.knows_leases(link) { l.greeted } else { None };
        Some((heard.unwrap_or(l.began), l.ours))
    }

    pub(super) fn used(&mut self, link: LinkId, now: Duration) {
        if let Some(l) = self.links.get_mut(&link) {
            l.used = now;
        }
    }

    pub(super) fn next_due(&self) -> Option<Duration> {
        self.due.next()
    }

    /// What is known of pairs of engines is computed anew: our own manifest is another.
    pub(super) fn forget_pairings(&mut self) {
        self.known.clear();
    }

    pub(super) fn views(&self) -> impl Iterator<Item = LinkView<'_>> {
        self.links.iter().map(|(id, l)| {
            let (stage, established) = match &l.stage {
                Stage::Connecting => ("connecting", None),
                Stage::Waiting(None) if l.road.is_none() => ("waiting for the peer's hello", None),
                Stage::Waiting(_) => ("waiting for this engine's ranks", None),
                Stage::Greeting(_) => ("waiting for the peer's hello", None),
                Stage::Lacking(_) => ("waiting for the peer's manifest", None),
                Stage::Up(e) => ("up", Some(e)),
            };
            let (peer, version) = (established.map(|e| &e.peer), established.map(|e| e.version));
            LinkView { link: *id, stage, peer, version, road: l.road, since: l.up }
        })
    }

    /// Whether there is no link, and nothing is kept of any but manifests.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.links.is_empty() && self.due.is_empty() && self.known.is_empty()
    }

    /// Whether a manifest is remembered, with or without a link.
    #[cfg(test)]
    pub(super) fn remembers(&self, digest: Digest) -> bool {
        self.manifests.get(digest).is_some()
    }

    /// As if the engines met since had been too many.
    #[cfg(test)]
    pub(super) fn forget_manifests(&mut self) {
        self.manifests = Remembered::default();
    }

    fn is_known_elsewhere(&self, digest: Digest) -> bool {
        self.links.values().any(|l| matches!(&l.stage, Stage::Up(e) if e.peer.digest() == digest))
    }
}

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
        let peer = established.peer.clone();
        let Some(l) = self.links.links.get_mut(&link) else { return };
        (l.stage, l.up, l.used) = (Stage::Up(established), now, now);
        let (took, road) = (now.saturating_sub(l.began), l.road);
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
                if !self.links.is_known_elsewhere(peer.digest()) {
                    self.links.known.remove(&peer.digest());
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
    pub(super) fn serving(&mut self, link: LinkId) -> Option<Acquainted<'_>> {
        self.met(link, Acquaintance::serving)
    }

    /// What we know of the peer at a link when we read from it.
    pub(super) fn reading(&mut self, link: LinkId) -> Option<Acquainted<'_>> {
        self.met(link, Acquaintance::reading)
    }

    fn met(&mut self, link: LinkId, way: Way) -> Option<Acquainted<'_>> {
        let peer = self.links.peer(link)?.clone();
        let ours = self.life.local()?.manifest.cache().clone();
        let known = self.links.known.entry(peer.digest()).or_default();
        let direction = way(known, &ours, peer.cache(), self.config.compat);
        Some((peer, direction))
    }
}

/// What a peer may say that can't be true, before its link is given up.
const MAX_CONTRADICTIONS: u32 = 16;

/// Whether a link is of use is not looked at more often.
const SHORTEST_IDLE: Duration = Duration::from_millis(1);

/// The most hellos that are kept until our own ranks have joined.
const MAX_WAITING: usize = 16;

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
type Acquainted<'a> = (Arc<EngineManifest>, Result<&'a mut Direction, PairingError>);
/// Which direction: [`Acquaintance::serving`] or [`Acquaintance::reading`].
type Way = for<'a> fn(
    &'a mut Acquaintance,
    &Arc<Manifest>,
    &Arc<Manifest>,
    CompatOptions,
) -> Result<&'a mut Direction, PairingError>;
