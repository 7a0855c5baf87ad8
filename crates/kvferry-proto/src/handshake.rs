//! How two owners meet: each sends one hello, each judges the other's.
//!
//! ```text
//!   opened --[send Hello]--> Greeting --Hello ok--> Established
//!                               |  \----Hello bad-> Refusal (sent to the peer; the link is closed)
//!                               \---Refused-------> RefusedByPeer
//! ```
//!
//! The exchange is symmetric: who connected, and who will read from whom, makes no difference. What is compared: the
//! versions (there must be a common one), the engine ids (the one expected; not our own), the model identity, and whether
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Versions {
    /// The oldest.
    pub min: u16,
    /// The newest.
    pub max: u16,
}

impl Versions {
    /// What this crate speaks.
    pub const OURS: Self = Self { min: 2, max: 2 };

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
    /// What this crate can do.
    pub const OURS: Self = Self::GATHER;

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

/// What an owner is, for all its handshakes.
#[derive(Clone, Debug)]
pub struct LocalSide {
    /// What its cache's bytes mean.
    pub identity: ModelIdentity,
    /// Whether that must be equal.
    pub check: IdentityCheck,
    /// Whether its maps of peers stripe over replicas.
    pub stripe: bool,
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
    expected: Option<EngineId>,
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

impl Greeting {
    /// Begins: gives the hello to send. `expected` is the engine that must answer, where we know.
    #[must_use]
    pub fn start(local: Arc<LocalSide>, expected: Option<EngineId>) -> (Self, Hello) {
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

    /// Judges the peer's hello.
    ///
    /// # Errors
    /// Every mismatch; send it to the peer and close the link.
    pub fn on_hello(self, hello: &Hello) -> Result<Established, Refusal> {
        let mut found = Vec::new();
        let (ours, theirs) = (Versions::OURS, hello.versions);
        let version = ours.common(theirs);
        if version.is_none() {
            found.push(HelloMismatch::Version { ours, theirs });
        }
        let got = hello.manifest.engine();
        if got == self.local.manifest.engine() {
            found.push(HelloMismatch::OwnEngine { got: got.clone() });
        }
        if let Some(expected) = self.expected.filter(|e| e != got) {
            found.push(HelloMismatch::WrongEngine { expected, got: got.clone() });
        }
        if self.local.check == IdentityCheck::Required && self.local.identity != hello.identity {
            let (ours, theirs) = (self.local.identity.clone(), hello.identity.clone());
            found.push(HelloMismatch::Identity { ours, theirs });
        }
        if self.local.stripe != hello.stripe {
            found.push(HelloMismatch::Stripe { ours: self.local.stripe, theirs: hello.stripe });
        }
        let computed = hello.manifest.digest();
        if computed != hello.digest {
            found.push(HelloMismatch::Digest { claimed: hello.digest, computed });
        }
        match version {
            Some(version) if found.is_empty() => Ok(Established {
                version,
                abilities: Abilities::OURS.common(hello.abilities),
                peer: hello.manifest.clone(),
            }),
            _ => Err(Refusal(found)),
        }
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
        Arc::new(LocalSide { identity, check, stripe: false, manifest: crate::testing::engine_of(id, 1) })
    }

    fn greet(ours: &Arc<LocalSide>, expected: Option<&str>, hello: &Hello) -> Result<Established, Refusal> {
        let expected = expected.map(|id| EngineId::new(id).unwrap());
        Greeting::start(ours.clone(), expected).0.on_hello(hello)
    }

    /// The one state, with every kind of hello; the exchange is symmetric.
    #[test]
    fn greeting_by_event() {
        let (p, d) = (local("p", "m", IdentityCheck::Required), local("d", "m", IdentityCheck::Required));
        let hello_of = |side: &Arc<LocalSide>| Greeting::start(side.clone(), None).1;
        for (ours, theirs) in [(&p, &d), (&d, &p)] {
            let met = greet(ours, Some(theirs.manifest.engine().as_str()), &hello_of(theirs)).unwrap();
            assert_eq!((met.version, met.abilities, &met.peer), (2, Abilities::OURS, &theirs.manifest));
            assert!(greet(ours, None, &hello_of(theirs)).is_ok(), "whoever connects to us is whom we expect");
        }
        let good = hello_of(&d);
        let refusals = |expected, hello: &Hello| greet(&p, expected, hello).unwrap_err().0;
        let theirs = Versions { min: 3, max: 4 };
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
        // The identity's check can be switched off, on this side only.
        let careless = local("p", "m", IdentityCheck::Off);
        assert!(greet(&careless, Some("d"), &identity).is_ok());
    }
}
