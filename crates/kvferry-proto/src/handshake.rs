//! How two owners meet: each sends one hello, each judges the other's.
//!
//! ```text
//!   opened --[send Hello or Again]--> Greeting --Hello, or Again of a known manifest--> Established
//!                                      |  |  \--Again of an unknown one--> Lacking --Manifest--> Established
//!                                      |  \-----a bad one-----> Refusal (sent to the peer; the link is closed)
//!                                      \--------Refused-------> (over)
//! ```
//!
//! The exchange is symmetric but for its order: who has connected speaks first. Who will read from whom makes no difference. A
//! [`Hello`] has the whole manifest; engines that have met before, in version 3, say [`Again`] instead: the digest of their
//! own manifest, and of the one they know of the other. So first contact is one exchange, and a later one is one exchange
//! without manifests, unless one side has forgotten or changed meanwhile.
//!
//! What is compared: the
//! versions (there must be a common one), the engine ids (the one expected, one allowed, not our own), the model identity, and whether
//! maps of peers stripe (both sides compute one map, so both must). What the two engines' caches look like is not a matter of
//! the handshake: [`Compatible`](kvferry_geometry::compat::Compatible) compares it for each direction that is really used, on
//! each side with its own [`CompatOptions`](kvferry_geometry::compat::CompatOptions). Those may differ: they say only what a
//! side lets pass, never what moves, so each side refuses for itself and names the item.

use std::fmt;
use std::sync::Arc;

use kvferry_geometry::digest::Digest;

use crate::manifest::EngineManifest;
use crate::names::{EngineId, ModelIdentity};

/// Protocol versions that are understood, both ends included.
///
/// | version | what it is |
/// |---|---|
/// | 1 | paged items, one retention for a group; never released, and not spoken any more |
/// | 2 | states, compressed entries, scales, rings; striping in the hello |
/// | 3 | `Again`, manifests by digest; leases with an end, heartbeats, notices of closed leases, further attempts; `Busy` |
///
/// Neighbours one version apart understand each other: what a peer of version 2 doesn't know is not sent to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Versions {
    /// The oldest.
    pub min: u16,
    /// The newest.
    pub max: u16,
}

impl Versions {
    /// What this crate speaks.
    pub const OURS: Self = Self { min: 2, max: 3 };
    /// The version that knows `Again`, heartbeats and notices of closed leases.
    pub const LEASES: u16 = 3;

    /// The newest version of both.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.min, self.max)
    }
}

/// Optional abilities, one bit each; what both sides have may be used. Unknown bits are ignored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Abilities(pub u64);

impl Abilities {
    /// Answers [`PeerMessage::Gather`](crate::peer::PeerMessage::Gather). Both engines compute the gathered batch for
    /// themselves, and the question names what the consumer has computed, so that a difference is found before a byte moves.
    ///
    /// Bit 1 was that of questions without that name; nobody answers them any more.
    pub const GATHER: Self = Self(2);
    /// Writes what it offers into blocks that a [`PushBind`](crate::push::PushBind) grants.
    pub const PUSH: Self = Self(4);
    /// What this crate can do.
    pub const OURS: Self = Self(Self::GATHER.0 | Self::PUSH.0);

    /// Whether all of the other's bits are among these.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What both can do.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Whether unequal model identities are a mismatch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IdentityCheck {
    /// They are.
    #[default]
    Required,
    /// They are not: the caller vouches that the caches mean the same.
    Off,
}

/// What one owner tells another first.
#[derive(Clone, PartialEq, Debug)]
pub struct Hello {
    /// Versions it speaks.
    pub versions: Versions,
    /// What it can do.
    pub abilities: Abilities,
    /// What its cache's bytes mean.
    pub identity: ModelIdentity,
    /// Whether its maps of peers stripe over replicas.
    pub stripe: bool,
    /// The digest that it computed of its manifest.
    pub digest: Digest,
    /// Its manifest, with engine id and epoch.
    pub manifest: Arc<EngineManifest>,
}

/// What one owner tells another first if they have met before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Again {
    /// Versions it speaks.
    pub versions: Versions,
    /// What it can do.
    pub abilities: Abilities,
    /// What its cache's bytes mean.
    pub identity: ModelIdentity,
    /// Whether its maps of peers stripe over replicas.
    pub stripe: bool,
    /// Its engine.
    pub engine: EngineId,
    /// The digest of its manifest.
    pub digest: Digest,
    /// The digest of the manifest that it knows of the other. If that is not the present one, the other says a whole hello.
    pub yours: Digest,
}

/// Which engines may be met: ids, or beginnings of ids followed by `*`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Allowed(Vec<Box<str>>);

impl Allowed {
    /// From a list of ids and beginnings; an empty list allows none.
    #[must_use]
    pub fn new<S: AsRef<str>>(patterns: impl IntoIterator<Item = S>) -> Self {
        Self(patterns.into_iter().map(|p| p.as_ref().into()).collect())
    }

    /// Whether an engine is among them.
    #[must_use]
    pub fn has(&self, engine: &EngineId) -> bool {
        let is = |pattern: &str| match pattern.strip_suffix('*') {
            Some(beginning) => engine.as_str().starts_with(beginning),
            None => engine.as_str() == pattern,
        };
        self.0.iter().any(|p| is(p))
    }
}

/// Who may be at the other end of a link.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Expected {
    /// The engine that must answer, where we know.
    pub engine: Option<EngineId>,
    /// The engines for which the link's credentials stand; `None` where it has none.
    pub proven: Option<Arc<Allowed>>,
}

/// What an owner is, for all its handshakes.
#[derive(Clone, Debug)]
pub struct LocalSide {
    /// What its cache's bytes mean.
    pub identity: ModelIdentity,
    /// Whether that must be equal.
    pub check: IdentityCheck,
    /// Whether its maps of peers stripe over replicas.
    pub stripe: bool,
    /// Which engines it meets; `None`: any.
    pub allowed: Option<Arc<Allowed>>,
    /// Its manifest.
    pub manifest: Arc<EngineManifest>,
}

/// One reason not to talk.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HelloMismatch {
    /// No common version.
    #[error("protocol versions: ours are {ours}, the peer's {theirs}; upgrade the older side")]
    Version {
        /// Ours.
        ours: Versions,
        /// The peer's.
        theirs: Versions,
    },
    /// Another engine answered.
    #[error("engine id: expected {expected}, got {got}; the address belongs to another engine")]
    WrongEngine {
        /// Whom we wanted.
        expected: EngineId,
        /// Who answered.
        got: EngineId,
    },
    /// The peer has our own id.
    #[error(
        "engine id: the peer is {got}, which is this engine's own id; give each engine (and data-parallel rank) its own"
    )]
    OwnEngine {
        /// The id.
        got: EngineId,
    },
    /// The list of allowed peers doesn't have it.
    #[error("engine id: {got} is not on the list of allowed peers; add it, or connect to another engine")]
    NotAllowed {
        /// Who answered.
        got: EngineId,
    },
    /// Its credentials are another engine's.
    #[error(
        "engine id: the peer says {got}, but its credentials do not stand for that engine; give each engine its own"
    )]
    NotProven {
        /// Who it says it is.
        got: EngineId,
    },
    /// The caches' bytes don't mean the same.
    #[error(
        "model identity: ours is {ours:?}, the peer's {theirs:?}; serve one model on both, or switch the check off"
    )]
    Identity {
        /// Ours.
        ours: ModelIdentity,
        /// The peer's.
        theirs: ModelIdentity,
    },
    /// One side's maps of peers would stripe over replicas, the other's not: they would name other ranks.
    #[error(
        "striping over replicas: it is {} here, {} at the peer; configure `stripe` alike on both engines",
        on_off(.ours), on_off(.theirs)
    )]
    Stripe {
        /// Ours.
        ours: bool,
        /// The peer's.
        theirs: bool,
    },
    /// The peer's digest of its manifest is not what we compute.
    #[error(
        "manifest digest: the peer says {claimed:.16}, its manifest gives {computed:.16}; the two sides encode differently"
    )]
    Digest {
        /// What the peer says.
        claimed: Digest,
        /// What its manifest gives.
        computed: Digest,
    },
}

fn on_off(stripe: &bool) -> &'static str {
    if *stripe { "on" } else { "off" }
}

/// Every reason not to talk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal(pub Vec<HelloMismatch>);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, m) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{m}")?;
        }
        Ok(())
    }
}
impl std::error::Error for Refusal {}

/// Our hello is sent, the peer's is awaited.
#[derive(Clone, Debug)]
pub struct Greeting {
    local: Arc<LocalSide>,
    expected: Expected,
}

/// The peer's hello is in order, but its manifest is awaited: we have asked for it.
#[derive(Clone, Debug)]
pub struct Lacking {
    version: u16,
    abilities: Abilities,
    engine: EngineId,
    digest: Digest,
}

/// Both hellos are in order.
#[derive(Clone, Debug)]
pub struct Established {
    /// The version that both speak.
    pub version: u16,
    /// What both can do.
    pub abilities: Abilities,
    /// The peer.
    pub peer: Arc<EngineManifest>,
}

/// What an [`Again`] led to.
#[derive(Clone, Debug)]
pub enum Met {
    /// Its manifest is known.
    Established(Established),
    /// It is not: ask for it.
    Lacking(Lacking),
}

/// What both kinds of hello say, whatever the manifest. It is the beginning of a long hello too, so whoever is greeted can judge
/// it, and answer, before the manifest is read and proven: both sides then do that at once instead of by turns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Claim {
    /// Versions the peer speaks.
    pub versions: Versions,
    /// What its cache's bytes mean.
    pub identity: ModelIdentity,
    /// Whether its maps of peers stripe over replicas.
    pub stripe: bool,
    /// Who it says it is.
    pub engine: EngineId,
}

impl From<&Hello> for Claim {
    fn from(hello: &Hello) -> Self {
        Self {
            versions: hello.versions,
            identity: hello.identity.clone(),
            stripe: hello.stripe,
            engine: hello.manifest.engine().clone(),
        }
    }
}

impl From<&Again> for Claim {
    fn from(again: &Again) -> Self {
        Self {
            versions: again.versions,
            identity: again.identity.clone(),
            stripe: again.stripe,
            engine: again.engine.clone(),
        }
    }
}

impl Greeting {
    /// Begins: gives the hello to send.
    #[must_use]
    pub fn start(local: Arc<LocalSide>, expected: Expected) -> (Self, Hello) {
        let hello = Hello {
            versions: Versions::OURS,
            abilities: Abilities::OURS,
            identity: local.identity.clone(),
            stripe: local.stripe,
            digest: local.manifest.digest(),
            manifest: local.manifest.clone(),
        };
        (Self { local, expected }, hello)
    }

    /// Begins with a peer that has met us before, and of which we know the manifest with this digest.
    #[must_use]
    pub fn again(local: Arc<LocalSide>, expected: Expected, yours: Digest) -> (Self, Again) {
        let again = Again {
            versions: Versions::OURS,
            abilities: Abilities::OURS,
            identity: local.identity.clone(),
            stripe: local.stripe,
            engine: local.manifest.engine().clone(),
            digest: local.manifest.digest(),
            yours,
        };
        (Self { local, expected }, again)
    }

    /// Judges the beginning of the peer's hello, the rest of which is still to be judged.
    ///
    /// # Errors
    /// Every mismatch so far; send it to the peer and close the link.
    pub fn on_claim(&self, claim: &Claim) -> Result<(), Refusal> {
        let (_, found) = self.judge(claim);
        if found.is_empty() { Ok(()) } else { Err(Refusal(found)) }
    }

    /// Judges the peer's hello.
    ///
    /// # Errors
    /// Every mismatch; send it to the peer and close the link.
    pub fn on_hello(self, hello: &Hello) -> Result<Established, Refusal> {
        let (version, mut found) = self.judge(&Claim::from(hello));
        let computed = hello.manifest.digest();
        if computed != hello.digest {
            found.push(HelloMismatch::Digest { claimed: hello.digest, computed });
        }
        let abilities = Abilities::OURS.common(hello.abilities);
        match version {
            Some(version) if found.is_empty() => Ok(Established { version, abilities, peer: hello.manifest.clone() }),
            _ => Err(Refusal(found)),
        }
    }

    /// Judges the hello of a peer that has met us before. `known` is its manifest, if we (still) have it: the one with the digest
    /// that it says.
    ///
    /// # Errors
    /// Every mismatch; send it to the peer and close the link.
    pub fn on_again(self, again: &Again, known: Option<Arc<EngineManifest>>) -> Result<Met, Refusal> {
        let (version, found) = self.judge(&Claim::from(again));
        let abilities = Abilities::OURS.common(again.abilities);
        match version {
            Some(version) if found.is_empty() => {
                let (engine, digest) = (again.engine.clone(), again.digest);
                Ok(match known.filter(|k| k.digest() == digest && *k.engine() == engine) {
                    Some(peer) => Met::Established(Established { version, abilities, peer }),
                    None => Met::Lacking(Lacking { version, abilities, engine, digest }),
                })
            }
            _ => Err(Refusal(found)),
        }
    }

    fn judge(&self, claim: &Claim) -> (Option<u16>, Vec<HelloMismatch>) {
        let mut found = Vec::new();
        let (local, got) = (&self.local, &claim.engine);
        let (ours, theirs) = (Versions::OURS, claim.versions);
        let version = ours.common(theirs);
        if version.is_none() {
            found.push(HelloMismatch::Version { ours, theirs });
        }
        if got == local.manifest.engine() {
            found.push(HelloMismatch::OwnEngine { got: got.clone() });
        }
        if let Some(expected) = self.expected.engine.as_ref().filter(|e| *e != got) {
            found.push(HelloMismatch::WrongEngine { expected: expected.clone(), got: got.clone() });
        }
        if local.allowed.as_ref().is_some_and(|a| !a.has(got)) {
            found.push(HelloMismatch::NotAllowed { got: got.clone() });
        }
        if self.expected.proven.as_ref().is_some_and(|a| !a.has(got)) {
            found.push(HelloMismatch::NotProven { got: got.clone() });
        }
        if local.check == IdentityCheck::Required && local.identity != claim.identity {
            let (ours, theirs) = (local.identity.clone(), claim.identity.clone());
            found.push(HelloMismatch::Identity { ours, theirs });
        }
        if local.stripe != claim.stripe {
            found.push(HelloMismatch::Stripe { ours: local.stripe, theirs: claim.stripe });
        }
        (version, found)
    }
}

impl Lacking {
    /// Takes the manifest.
    ///
    /// # Errors
    /// If it is not the one that the peer has named.
    pub fn on_manifest(self, peer: Arc<EngineManifest>) -> Result<Established, Refusal> {
        let (claimed, computed) = (self.digest, peer.digest());
        if computed != claimed || *peer.engine() != self.engine {
            return Err(Refusal(vec![HelloMismatch::Digest { claimed, computed }]));
        }
        Ok(Established { version: self.version, abilities: self.abilities, peer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_meet_or_not() {
        let v = |min, max| Versions { min, max };
        for (a, b, common) in [
            (v(1, 1), v(1, 1), Some(1)),
            (v(1, 3), v(2, 5), Some(3)),
            (v(2, 5), v(1, 3), Some(3)),
            (v(1, 2), v(3, 4), None),
            (v(3, 4), v(1, 2), None),
            (v(1, 9), v(4, 4), Some(4)),
            (v(5, 1), v(1, 9), None),
        ] {
            assert_eq!(a.common(b), common, "{a} with {b}");
        }
    }

    fn local(id: &str, identity: &str, check: IdentityCheck) -> Arc<LocalSide> {
        let identity = ModelIdentity::new(identity).unwrap();
        Arc::new(LocalSide {
            identity,
            check,
            stripe: false,
            allowed: None,
            manifest: crate::testing::engine_of(id, 1),
        })
    }

    fn expecting(engine: Option<&str>) -> Expected {
        Expected { engine: engine.map(|id| EngineId::new(id).unwrap()), proven: None }
    }

    fn greet(ours: &Arc<LocalSide>, expected: Option<&str>, hello: &Hello) -> Result<Established, Refusal> {
        Greeting::start(ours.clone(), expecting(expected)).0.on_hello(hello)
    }

    /// The one state, with every kind of hello; the exchange is symmetric.
    #[test]
    fn greeting_by_event() {
        let (p, d) = (local("p", "m", IdentityCheck::Required), local("d", "m", IdentityCheck::Required));
        let hello_of = |side: &Arc<LocalSide>| Greeting::start(side.clone(), Expected::default()).1;
        for (ours, theirs) in [(&p, &d), (&d, &p)] {
            let met = greet(ours, Some(theirs.manifest.engine().as_str()), &hello_of(theirs)).unwrap();
            assert_eq!((met.version, met.abilities, &met.peer), (3, Abilities::OURS, &theirs.manifest));
            assert!(greet(ours, None, &hello_of(theirs)).is_ok(), "whoever connects to us is whom we expect");
        }
        let good = hello_of(&d);
        let refusals = |expected, hello: &Hello| greet(&p, expected, hello).unwrap_err().0;
        let theirs = Versions { min: 4, max: 5 };
        let of_version = Hello { versions: theirs, ..good.clone() };
        assert_eq!(refusals(None, &of_version), [HelloMismatch::Version { ours: Versions::OURS, theirs }]);
        let got = EngineId::new("d").unwrap();
        let expected = EngineId::new("e").unwrap();
        assert_eq!(refusals(Some("e"), &good), [HelloMismatch::WrongEngine { expected, got }]);
        // ID-06: two engines of one id, also in different lives, are not two engines.
        let own = p.manifest.engine().clone();
        assert_eq!(refusals(None, &hello_of(&p)), [HelloMismatch::OwnEngine { got: own }]);
        let identity = Hello { identity: ModelIdentity::new("n").unwrap(), ..good.clone() };
        assert!(matches!(refusals(None, &identity)[..], [HelloMismatch::Identity { .. }]));
        let digest = Hello { digest: Digest::from_bytes([0; 32]), ..good.clone() };
        assert!(matches!(refusals(None, &digest)[..], [HelloMismatch::Digest { .. }]));
        let striped = Hello { stripe: true, ..good.clone() };
        assert_eq!(refusals(None, &striped), [HelloMismatch::Stripe { ours: false, theirs: true }]);
        assert!(Refusal(refusals(None, &striped)).to_string().contains("is off here, on at the peer"));
        // Everything at once.
        let all = Hello { versions: theirs, stripe: true, digest: Digest::from_bytes([0; 32]), ..identity.clone() };
        let refusal = greet(&p, Some("e"), &all).unwrap_err();
        assert_eq!((refusal.0.len(), refusal.to_string().lines().count()), (5, 5), "{refusal}");
        // What it begins with is judged alike, before there is a manifest whose digest could differ.
        for (expected, hello) in [(None, &good), (None, &of_version), (Some("e"), &all), (None, &digest)] {
            let mut found = greet(&p, expected, hello).err().map_or(Vec::new(), |r| r.0);
            found.retain(|m| !matches!(m, HelloMismatch::Digest { .. }));
            let (greeting, _) = Greeting::start(p.clone(), expecting(expected));
            assert_eq!(greeting.on_claim(&Claim::from(hello)).err().map_or(Vec::new(), |r| r.0), found);
        }
        // The identity's check can be switched off, on this side only.
        let careless = local("p", "m", IdentityCheck::Off);
        assert!(greet(&careless, Some("d"), &identity).is_ok());
    }

    /// The state with every kind of `Again`, and the one that follows where a manifest lacks.
    #[test]
    fn greeting_again_by_event() {
        let (p, d) = (local("p", "m", IdentityCheck::Required), local("d", "m", IdentityCheck::Required));
        let known = d.manifest.clone();
        let again = Greeting::again(d.clone(), expecting(Some("p")), p.manifest.digest()).1;
        assert_eq!((again.digest, again.yours), (known.digest(), p.manifest.digest()));
        let on = |again: &Again, known| Greeting::start(p.clone(), Expected::default()).0.on_again(again, known);
        let Ok(Met::Established(met)) = on(&again, Some(known.clone())) else { panic!("it is known") };
        assert_eq!((met.version, &met.peer), (3, &known));
        // Unknown, or another life of it is known: it is asked for, and must be the one that was named.
        for known in [None, Some(crate::testing::engine_of("d", 2)), Some(crate::testing::engine_of("e", 1))] {
            let Ok(Met::Lacking(lacking)) = on(&again, known) else { panic!("it is not known") };
            let other = lacking.clone().on_manifest(crate::testing::engine_of("d", 2)).unwrap_err();
            assert!(matches!(other.0[..], [HelloMismatch::Digest { .. }]));
            assert_eq!(lacking.on_manifest(d.manifest.clone()).unwrap().peer, d.manifest);
        }
        let bad = Again {
            versions: Versions { min: 4, max: 4 },
            identity: ModelIdentity::new("n").unwrap(),
            stripe: true,
            engine: EngineId::new("p").unwrap(),
            ..again
        };
        assert_eq!(on(&bad, None).unwrap_err().0.len(), 4);
    }

    /// Who is allowed, and for whom credentials stand.
    #[test]
    fn hs_01_only_allowed_and_proven_engines_are_met() {
        let open = local("p", "m", IdentityCheck::Required);
        let hello = Greeting::start(local("decode-7", "m", IdentityCheck::Required), Expected::default()).1;
        for (list, ok) in
            [(&["decode-7"][..], true), (&["x", "decode-*"], true), (&["*"], true), (&["decode-"], false), (&[], false)]
        {
            let allowed = Some(Arc::new(Allowed::new(list)));
            let local = Arc::new(LocalSide { allowed: allowed.clone(), ..(*open).clone() });
            let by_list = Greeting::start(local, Expected::default()).0.on_hello(&hello);
            let expected = Expected { engine: None, proven: allowed };
            let by_name = Greeting::start(open.clone(), expected).0.on_hello(&hello);
            if ok {
                assert!(by_list.is_ok() && by_name.is_ok(), "{list:?}");
            } else {
                assert!(matches!(by_list.unwrap_err().0[..], [HelloMismatch::NotAllowed { .. }]), "{list:?}");
                assert!(matches!(by_name.unwrap_err().0[..], [HelloMismatch::NotProven { .. }]), "{list:?}");
            }
        }
    }
}
