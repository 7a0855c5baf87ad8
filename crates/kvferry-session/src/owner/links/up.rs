//! Which links lead to whom: found without looking at all of them, as an owner may have thousands.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_geometry::digest::Digest;
use kvferry_proto::manifest::EngineManifest;

use super::{EngineId, LinkId};

/// The links that are up, by the engine at the other end.
#[derive(Debug, Default)]
pub(in crate::owner) struct Up {
    by_engine: BTreeMap<EngineId, BTreeSet<LinkId>>,
    manifests: Counts,
    caches: Counts,
}

/// What the last link of its kind has led to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Last {
    /// No other leads to an engine with this manifest.
    pub(super) manifest: bool,
    /// No other leads to one whose cache is described like this.
    pub(super) cache: bool,
}

impl Up {
    /// A link is up. Once for each.
    pub(super) fn add(&mut self, link: LinkId, peer: &EngineManifest) {
        self.by_engine.entry(peer.engine().clone()).or_default().insert(link);
        self.manifests.add(peer.digest());
        self.caches.add(peer.cache().digest());
    }

    /// A link that was up is gone.
    pub(super) fn remove(&mut self, link: LinkId, peer: &EngineManifest) -> Last {
        if let Some(links) = self.by_engine.get_mut(peer.engine()) {
            links.remove(&link);
            if links.is_empty() {
                self.by_engine.remove(peer.engine());
            }
        }
        Last { manifest: self.manifests.remove(peer.digest()), cache: self.caches.remove(peer.cache().digest()) }
    }

    /// Those that lead to an engine, whoever has made them.
    pub(in crate::owner) fn to(&self, engine: &EngineId) -> impl Iterator<Item = LinkId> {
        self.by_engine.get(engine).into_iter().flatten().copied()
    }

    #[cfg(test)]
    pub(in crate::owner) fn is_empty(&self) -> bool {
        self.by_engine.is_empty() && self.manifests.0.is_empty() && self.caches.0.is_empty()
    }
}

/// How many there are of each.
#[derive(Debug, Default)]
struct Counts(BTreeMap<Digest, usize>);

impl Counts {
    fn add(&mut self, what: Digest) {
        *self.0.entry(what).or_default() += 1;
    }

    /// Gives whether it was the last.
    fn remove(&mut self, what: Digest) -> bool {
        let Some(count) = self.0.get_mut(&what) else { return false };
        *count -= 1;
        let last = *count == 0;
        if last {
            self.0.remove(&what);
        }
        last
    }
}
