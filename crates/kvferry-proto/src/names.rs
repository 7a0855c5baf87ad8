//! Names: who an engine is, which life of it, which lease, which attempt.
//!
//! Every id has its full width on the wire; nothing is shortened, hashed down or re-used. This module makes no random
//! numbers: whoever starts an engine or offers a lease brings them.

use std::fmt;
use std::sync::Arc;

use blake3::Hasher;

/// The longest engine id in bytes.
pub const MAX_ENGINE_ID: usize = 128;
/// The longest model identity in bytes.
pub const MAX_MODEL_IDENTITY: usize = 1024;

/// A name was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// No character, or too many.
    #[error("{what} is {got} bytes long; it must be 1 to {limit}")]
    Length {
        /// Which name.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The longest.
        limit: usize,
    },
    /// A character that names don't have.
    #[error("{what} has the character {got:?}; use letters, digits and . _ : / -")]
    Character {
        /// Which name.
        what: &'static str,
        /// The character.
        got: char,
    },
}

/// An engine's configured, stable id. Data-parallel siblings are engines of their own and need ids of their own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineId(Arc<str>);

impl EngineId {
    /// Checks and wraps an id.
    ///
    /// # Errors
    /// If it is empty, longer than [`MAX_ENGINE_ID`], or has other characters than letters, digits and `. _ : / -`.
    pub fn new(id: &str) -> Result<Self, NameError> {
        let what = "the engine id";
        if id.is_empty() || id.len() > MAX_ENGINE_ID {
            return Err(NameError::Length { what, got: id.len(), limit: MAX_ENGINE_ID });
        }
        match id.chars().find(|c| !(c.is_ascii_alphanumeric() || "._:/-".contains(*c))) {
            Some(got) => Err(NameError::Character { what, got }),
            None => Ok(Self(Arc::from(id))),
        }
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// What bytes an engine's cache means, in the engine's words: weights revision, position encoding, quantisation
/// calibration. Compared, never parsed.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ModelIdentity(Arc<str>);

impl ModelIdentity {
    /// Wraps an identity.
    ///
    /// # Errors
    /// If it is empty or longer than [`MAX_MODEL_IDENTITY`].
    pub fn new(identity: &str) -> Result<Self, NameError> {
        if identity.is_empty() || identity.len() > MAX_MODEL_IDENTITY {
            let (got, limit) = (identity.len(), MAX_MODEL_IDENTITY);
            return Err(NameError::Length { what: "the model identity", got, limit });
        }
        Ok(Self(Arc::from(identity)))
    }

    /// That of an engine which says nothing of it: equal to that of any other such engine.
    #[must_use]
    pub fn unspecified() -> Self {
        Self(Arc::from("unspecified"))
    }

    /// The identity as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ModelIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ModelIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u128);

        impl $name {
            /// Wraps a random number.
            #[must_use]
            pub const fn new(random: u128) -> Self {
                Self(random)
            }

            /// The number.
            #[must_use]
            pub const fn get(self) -> u128 {
                self.0
            }
        }

        impl fmt::Display for $name {
            /// All 32 hex digits; `{:.8}` prints the first 8.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let digits = format!("{:032x}", self.0);
                f.write_str(&digits[..f.precision().unwrap_or(32).min(32)])
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:.8})"), self)
            }
        }
    };
}

random_id!(
    /// One life of an engine's owner, or of one of its ranks: random, new at each start.
    Epoch
);
random_id!(
    /// One offer of blocks: random, never re-used.
    LeaseId
);

impl Epoch {
    /// The epoch that follows this one where an owner lives on but its engine doesn't: a rank was lost, and came back with
    /// other memory. Peers can't tell it from a random one.
    #[must_use]
    pub fn after(self) -> Self {
        let mut h = Hasher::new();
        h.update(b"kvferry next epoch 1");
        h.update(&self.0.to_le_bytes());
        let mut next = [0; 16];
        next.copy_from_slice(&h.finalize().as_bytes()[..16]);
        Self(u128::from_le_bytes(next))
    }
}

/// Counts the attempts to read one lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Attempt(u32);

impl Attempt {
    /// The first.
    pub const FIRST: Self = Self(0);

    /// Wraps a count.
    #[must_use]
    pub const fn new(count: u32) -> Self {
        Self(count)
    }

    /// The count.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The one after it; `None` after the last that there can be.
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        match self.0.checked_add(1) {
            Some(count) => Some(Self(count)),
            None => None,
        }
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What every message about a lease names, so that none can be taken for another's: the engine that offers, which life
/// of it, the lease, and the attempt.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fence {
    /// The engine that offers.
    pub engine: EngineId,
    /// The life of its owner.
    pub epoch: Epoch,
    /// The lease.
    pub lease: LeaseId,
    /// Which attempt to read it.
    pub attempt: Attempt,
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:.8}/{:.8}/{}", self.engine, self.epoch, self.lease, self.attempt)
    }
}

/// What a cache was computed from: a digest of token ids, adapter, multimodal input and salt. Both sides compute it from
/// what *they* know, so that a stale or mixed-up reference is found before a byte moves.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentKey([u8; 32]);

impl ContentKey {
    /// Wraps a digest that the engine computed by a rule of its own.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The usual key: of the prompt's token ids, the adapter's name (empty for none), and any further bytes that change
    /// the cache (hashes of images, a tenant's salt), in order.
    #[must_use]
    pub fn of(tokens: &[u32], adapter: &str, further: &[&[u8]]) -> Self {
        let mut h = Hasher::new();
        let number = |h: &mut Hasher, n: usize| {
            h.update(&(n as u64).to_le_bytes());
        };
        h.update(b"kvferry content key 1");
        number(&mut h, tokens.len());
        for t in tokens {
            h.update(&t.to_le_bytes());
        }
        for part in std::iter::once(adapter.as_bytes()).chain(further.iter().copied()) {
            number(&mut h, part.len());
            h.update(part);
        }
        Self(*h.finalize().as_bytes())
    }

    /// The bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for ContentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentKey({:02x}{:02x}{:02x}{:02x})", self.0[0], self.0[1], self.0[2], self.0[3])
    }
}

/// How many different salts [`pairing_salt`] gives, so that maps of peers can be cached.
pub const SALTS: u64 = 64;

/// The salt that rotates ties between replicas: of the consumer's engine and the lease, so that many small consumers
/// don't all read from the same rank, and one further with every attempt, so that the next one reads from another replica
/// where there is one.
#[must_use]
pub fn pairing_salt(consumer: &EngineId, lease: LeaseId, attempt: Attempt) -> u64 {
    let mut h = Hasher::new();
    h.update(consumer.as_str().as_bytes());
    h.update(&lease.get().to_le_bytes());
    (u64::from(h.finalize().as_bytes()[0]) + u64::from(attempt.get())) % SALTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_ids_are_checked() {
        assert!(EngineId::new("prefill-0.rack/7:a_b").is_ok());
        assert!(matches!(EngineId::new(""), Err(NameError::Length { got: 0, .. })));
        assert!(matches!(EngineId::new(&"x".repeat(129)), Err(NameError::Length { got: 129, .. })));
        for bad in ["a b", "a@b", "a\nb", "\u{e9}"] {
            assert!(matches!(EngineId::new(bad), Err(NameError::Character { .. })), "{bad:?}");
        }
    }

    #[test]
    fn content_keys_differ_with_every_part() {
        let keys = [
            ContentKey::of(&[1, 2], "", &[]),
            ContentKey::of(&[2, 1], "", &[]),
            ContentKey::of(&[1, 2, 0], "", &[]),
            ContentKey::of(&[1, 2], "a", &[]),
            ContentKey::of(&[1, 2], "", &[b""]),
            ContentKey::of(&[1, 2], "", &[b"a"]),
            ContentKey::of(&[1, 2], "", &[b"a", b""]),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b));
        }
        assert_eq!(keys[0], ContentKey::of(&[1, 2], "", &[]));
    }

    #[test]
    fn epochs_and_attempts_go_on() {
        let (a, b) = (Epoch::new(7), Epoch::new(8));
        assert!(a.after() != a && a.after() != b.after() && a.after().after() != a);
        assert_eq!(Attempt::FIRST.next(), Some(Attempt::new(1)));
        assert_eq!(Attempt::new(u32::MAX).next(), None);
        let id = EngineId::new("d").unwrap();
        let salt = |attempt| pairing_salt(&id, LeaseId::new(1), Attempt::new(attempt));
        assert!((0..3).all(|n| salt(n + 1) == (salt(n) + 1) % SALTS) && salt(u32::MAX) < SALTS);
    }

    /// Full width: ids that share low or high bits stay apart, also when printed.
    #[test]
    fn id_04_ids_that_share_bits_stay_apart() {
        for (a, b) in [(1u128, 4097), (5, 1026), (1, 1 << 64 | 1), (7, 1 << 127 | 7)] {
            assert_ne!(LeaseId::new(a), LeaseId::new(b));
            assert_ne!(LeaseId::new(a).to_string(), LeaseId::new(b).to_string());
        }
    }
}
