//! The links, and what is kept of each.

use super::up::Up;
use crate::owner::roads::RoadId;
use crate::owner::timers::Timers;
use crate::owner::{BTreeMap, Digest, Duration, EngineId, Fence, LinkId};
use crate::pairing::Acquaintances;
use kvferry_proto::handshake::{Abilities, Again, Allowed, Established, Greeting, Hello, Lacking, Versions};
use kvferry_proto::manifest::EngineManifest;
use std::sync::Arc;

#[derive(Debug)]
pub(in crate::owner) enum Stage {
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
pub(in crate::owner) enum First {
    Hello(Box<Hello>),
    Again(Again),
}

#[derive(Debug)]
pub(in crate::owner) struct Link {
    pub(in crate::owner) stage: Stage,
    /// Where it leads, if it was us who connected.
    pub(in crate::owner) road: Option<RoadId>,
    /// For whom its credentials stand.
    pub(in crate::owner) proven: Option<Arc<Allowed>>,
    /// The manifest of ours that the peer knows, once it was greeted.
    pub(in crate::owner) ours: Option<Digest>,
    /// Whether we have greeted by digests only.
    pub(in crate::owner) briefly: bool,
    /// Whether the peer was sent our manifest because it had asked.
    pub(in crate::owner) supplied: bool,
    pub(in crate::owner) began: Duration,
    /// When our hello was sent first: what the peer says of itself in answer is not older.
    pub(in crate::owner) greeted: Option<Duration>,
    /// When it came up.
    pub(in crate::owner) up: Duration,
    /// When something was asked or answered on it last, but for beats.
    pub(in crate::owner) used: Duration,
    /// Binds whose answers nobody waits for any more: they come in order, before those of later binds of the same.
    pub(in crate::owner) owed: BTreeMap<Fence, u32>,
    /// What its peer has said that can't be true.
    pub(in crate::owner) contradictions: u32,
}

#[derive(Debug, Default)]
pub(in crate::owner) struct Links {
    pub(in crate::owner) last: u64,
    pub(in crate::owner) links: BTreeMap<LinkId, Link>,
    /// When a link must be up, or is looked at whether it is still of use.
    pub(in crate::owner) due: Timers<LinkId>,
    /// Those that are up.
    pub(in crate::owner) up: Up,
    pub(in crate::owner) known: Acquaintances,
    pub(in crate::owner) manifests: Remembered,
}

/// Manifests of engines that we have met, with or without a link: one for each engine, as its former life is of no use.
#[derive(Debug, Default)]
pub(in crate::owner) struct Remembered {
    count: u64,
    by_digest: BTreeMap<Digest, (u64, Arc<EngineManifest>)>,
    by_engine: BTreeMap<EngineId, Digest>,
    /// The one met longest ago first.
    by_age: BTreeMap<u64, Digest>,
}

impl Remembered {
    pub(in crate::owner) fn get(&self, digest: Digest) -> Option<Arc<EngineManifest>> {
        self.by_digest.get(&digest).map(|(_, m)| m.clone())
    }

    pub(in crate::owner) fn note(&mut self, manifest: &Arc<EngineManifest>, limit: usize) {
        self.count += 1;
        if let Some(before) = self.by_engine.get(manifest.engine()).copied() {
            self.remove(before);
        }
        self.by_engine.insert(manifest.engine().clone(), manifest.digest());
        self.by_age.insert(self.count, manifest.digest());
        self.by_digest.insert(manifest.digest(), (self.count, manifest.clone()));
        while self.by_digest.len() > limit {
            let Some((_, oldest)) = self.by_age.pop_first() else { return };
            self.remove(oldest);
        }
    }

    fn remove(&mut self, digest: Digest) {
        if let Some((age, manifest)) = self.by_digest.remove(&digest) {
            self.by_age.remove(&age);
            self.by_engine.remove(manifest.engine());
        }
    }
}

/// What a link is, for whoever wants to see it.
pub(in crate::owner) struct LinkView<'a> {
    pub(in crate::owner) link: LinkId,
    pub(in crate::owner) stage: &'static str,
    pub(in crate::owner) peer: Option<&'a Arc<EngineManifest>>,
    pub(in crate::owner) version: Option<u16>,
    pub(in crate::owner) road: Option<RoadId>,
    pub(in crate::owner) since: Duration,
}

impl Links {
    pub(in crate::owner) fn add(
        &mut self,
        stage: Stage,
        road: Option<RoadId>,
        now: Duration,
        deadline: Duration,
    ) -> LinkId {
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

    pub(in crate::owner) fn established(&self, link: LinkId) -> Option<&Established> {
        match &self.links.get(&link)?.stage {
            Stage::Up(established) => Some(established),
            _ => None,
        }
    }

    /// The peer at the other end, if both hellos are in order.
    pub(in crate::owner) fn peer(&self, link: LinkId) -> Option<&Arc<EngineManifest>> {
        self.established(link).map(|e| &e.peer)
    }

    /// Whether both ends can do something.
    pub(in crate::owner) fn has(&self, link: LinkId, ability: Abilities) -> bool {
        self.established(link).is_some_and(|e| e.abilities.has(ability))
    }

    /// Whether both ends know heartbeats, notices and further attempts.
    pub(in crate::owner) fn knows_leases(&self, link: LinkId) -> bool {
        self.established(link).is_some_and(|e| e.version >= Versions::LEASES)
    }

    /// When its peer was asked who it is, if it was asked: what it has said of itself is not older.
    pub(in crate::owner) fn asked(&self, link: LinkId) -> Option<Duration> {
        if self.knows_leases(link) { self.links.get(&link)?.greeted } else { None }
    }

    /// Those that are up and lead to an engine that pushes, whoever has made them.
    pub(in crate::owner) fn pushing_to(&self, engine: &EngineId) -> Vec<LinkId> {
        self.up.to(engine).filter(|link| self.has(*link, Abilities::PUSH)).collect()
    }

    /// A bind was sent over a link, and nobody waits for its answer any more.
    pub(in crate::owner) fn owe(&mut self, link: LinkId, fence: Fence) {
        if let Some(l) = self.links.get_mut(&link) {
            *l.owed.entry(fence).or_default() += 1;
        }
    }

    /// Whether an answer is one that nobody waits for.
    pub(in crate::owner) fn settle_owed(&mut self, link: LinkId, fence: &Fence) -> bool {
        let Some(l) = self.links.get_mut(&link) else { return false };
        let Some(count) = l.owed.get_mut(fence) else { return false };
        *count -= 1;
        if *count == 0 {
            l.owed.remove(fence);
        }
        true
    }

    /// Counts a contradiction; gives whether there were too many.
    pub(in crate::owner) fn contradicts(&mut self, link: LinkId) -> bool {
        let Some(l) = self.links.get_mut(&link) else { return false };
        l.contradictions = l.contradictions.saturating_add(1);
        l.contradictions > MAX_CONTRADICTIONS
    }

    pub(in crate::owner) fn exists(&self, link: LinkId) -> bool {
        self.links.contains_key(&link)
    }

    /// Whether we have greeted by digests.
    pub(in crate::owner) fn is_brief(&self, link: LinkId) -> bool {
        self.links.get(&link).is_some_and(|l| l.briefly)
    }

    /// Since when its peer may have been another, and which manifest of ours it knows.
    pub(in crate::owner) fn standing(&self, link: LinkId) -> Option<(Duration, Option<Digest>)> {
        let l = self.links.get(&link)?;
        // A neighbour of version 2 says its hello without waiting for ours.
        let heard = if self.knows_leases(link) { l.greeted } else { None };
        Some((heard.unwrap_or(l.began), l.ours))
    }

    pub(in crate::owner) fn used(&mut self, link: LinkId, now: Duration) {
        if let Some(l) = self.links.get_mut(&link) {
            l.used = now;
        }
    }

    pub(in crate::owner) fn next_due(&self) -> Option<Duration> {
        self.due.next()
    }

    /// What is known of pairs of engines is computed anew: our own manifest is another.
    pub(in crate::owner) fn forget_pairings(&mut self) {
        self.known.clear();
    }

    pub(in crate::owner) fn views(&self) -> impl Iterator<Item = LinkView<'_>> {
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
    pub(in crate::owner) fn is_empty(&self) -> bool {
        self.links.is_empty() && self.due.is_empty() && self.up.is_empty() && self.known.is_empty()
    }

    /// Whether a manifest is remembered, with or without a link.
    #[cfg(test)]
    pub(in crate::owner) fn remembers(&self, digest: Digest) -> bool {
        self.manifests.get(digest).is_some()
    }

    /// As if the engines met since had been too many.
    #[cfg(test)]
    pub(in crate::owner) fn forget_manifests(&mut self) {
        self.manifests = Remembered::default();
    }
}

/// What a peer may say that can't be true, before its link is given up.
const MAX_CONTRADICTIONS: u32 = 16;
