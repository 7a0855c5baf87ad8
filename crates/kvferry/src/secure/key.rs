//! Shared keys: what a fleet without certificates has.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use data_encoding::{BASE64, HEXLOWER_PERMISSIVE};
use kvferry_proto::handshake::Allowed;
use zeroize::Zeroizing;

use super::SecurityError;
use super::allow::{AllowList, AllowedPeer};
use super::material::Material;
use super::stream::Peer;

/// The longest id of a shared key, in bytes.
pub const MAX_KEY_ID: usize = 64;
/// Bytes of a key.
const LEN: usize = 32;

/// Keys of 32 random bytes that both ends have. Clones share what [`reload`](super::Security::reload) reads.
#[derive(Clone)]
pub struct SharedKeyOptions(Arc<Shared>);

struct Shared {
    from: SharedKeyBuilder,
    allow: Option<AllowList>,
    keys: RwLock<Arc<[Key]>>,
}

/// What [`SharedKeyOptions`] are made of.
#[derive(Clone, Debug)]
pub struct SharedKeyBuilder {
    keys: Vec<(String, Material)>,
    allow: Vec<AllowedPeer>,
    exposed: bool,
}

/// A key and its id.
pub(super) struct Key {
    pub(super) id: String,
    pub(super) secret: Zeroizing<[u8; LEN]>,
}

impl SharedKeyOptions {
    /// The key that this end speaks with, and its id of up to [`MAX_KEY_ID`] letters, digits and `. _ : / -`, which is not secret. The key
    /// is 32 bytes as they are, as 64 hex digits, or as 44 characters of base64 (`openssl rand -hex 32`).
    ///
    /// Without [`allow`](SharedKeyBuilder::allow), whoever has one of the keys may be any engine.
    #[must_use]
    pub fn builder(id: impl Into<String>, key: impl Into<Material>) -> SharedKeyBuilder {
        SharedKeyBuilder { keys: vec![(id.into(), key.into())], allow: Vec::new(), exposed: false }
    }

    pub(super) fn reload(&self) -> Result<(), SecurityError> {
        let keys = self.0.from.load()?;
        *self.0.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(())
    }

    /// All keys; the first is the one to speak with.
    pub(super) fn keys(&self) -> Arc<[Key]> {
        self.0.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Who has proven to have this key; `None` if the allow-list has no entry for it.
    pub(super) fn peer(&self, id: &str) -> Option<Peer> {
        let names = vec![id.to_owned()];
        let engines = match &self.0.allow {
            None => None,
            Some(allow) => Some(Allowed::new(allow.admit(&names)?).into()),
        };
        Some(Peer { names: Some(names.into()), engines })
    }
}

impl fmt::Debug for SharedKeyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.from.fmt(f)
    }
}

impl SharedKeyBuilder {
    /// Adds a key that peers may speak with, while keys are changed.
    #[must_use]
    pub fn also(mut self, id: impl Into<String>, key: impl Into<Material>) -> Self {
        self.keys.push((id.into(), key.into()));
        self
    }

    /// Adds whom to let in, by the id of the key that a peer has. With one entry or more, nobody else is.
    #[must_use]
    pub fn allow(mut self, peer: AllowedPeer) -> Self {
        self.allow.push(peer);
        self
    }

    /// Accepts keys in files that every user of this host may read.
    #[must_use]
    pub fn readable_by_others(mut self) -> Self {
        self.exposed = true;
        self
    }

    /// Reads and checks everything.
    ///
    /// # Errors
    /// If a key can't be read, or is none; if an id is none, or is given twice.
    pub fn build(self) -> Result<SharedKeyOptions, SecurityError> {
        let allow = match self.allow.as_slice() {
            [] => None,
            peers => Some(AllowList::new(peers)?),
        };
        let keys = RwLock::new(self.load()?);
        Ok(SharedKeyOptions(Arc::new(Shared { from: self, allow, keys })))
    }

    fn load(&self) -> Result<Arc<[Key]>, SecurityError> {
        let mut keys: Vec<Key> = Vec::with_capacity(self.keys.len());
        for (id, from) in &self.keys {
            if !is_key_id(id) {
                return Err(SecurityError::KeyId { id: id.clone() });
            }
            if keys.iter().any(|key| key.id == *id) {
                return Err(SecurityError::SameKeyId { id: id.clone() });
            }
            let bytes = from.read_secret("shared key", self.exposed)?;
            let secret = match parse(&bytes) {
                Ok(secret) => secret,
                Err(Flaw::Length) => return Err(SecurityError::KeyLength { id: id.clone(), from: from.to_string() }),
                Err(Flaw::Weak(reason)) => {
                    return Err(SecurityError::WeakKey { id: id.clone(), from: from.to_string(), reason });
                }
            };
            keys.push(Key { id: id.clone(), secret });
        }
        Ok(keys.into())
    }
}

pub(super) fn is_key_id(id: &str) -> bool {
    (1..=MAX_KEY_ID).contains(&id.len()) && id.bytes().all(|c| c.is_ascii_alphanumeric() || b"._:/-".contains(&c))
}

#[derive(PartialEq, Eq, Debug)]
enum Flaw {
    Length,
    Weak(&'static str),
}

/// 32 bytes as they are, or in hex or base64 with blanks around.
fn parse(bytes: &[u8]) -> Result<Zeroizing<[u8; LEN]>, Flaw> {
    let text = bytes.trim_ascii();
    let mut secret = Zeroizing::new([0; LEN]);
    // Room for what base64 of any text of that length could give.
    let mut decoded = Zeroizing::new([0; LEN + 1]);
    if let Ok(raw) = <&[u8; LEN]>::try_from(bytes) {
        // A random one is all printable once in 10^14 times; a passphrase or half a key in hex always is.
        if raw.iter().all(u8::is_ascii_graphic) {
            return Err(Flaw::Weak("it is text of 32 characters, not 32 bytes in hex or base64"));
        }
        secret.copy_from_slice(raw);
    } else if text.len() == 2 * LEN {
        HEXLOWER_PERMISSIVE.decode_mut(text, &mut secret[..]).map_err(|_| Flaw::Length)?;
    } else if text.len() == 44 {
        let len = BASE64.decode_mut(text, &mut decoded[..]).map_err(|_| Flaw::Length)?;
        if len != LEN {
            return Err(Flaw::Length);
        }
        secret.copy_from_slice(&decoded[..LEN]);
    } else {
        return Err(Flaw::Length);
    }
    let mut seen = [false; 256];
    secret.iter().for_each(|&byte| seen[usize::from(byte)] = true);
    if seen.iter().filter(|&&seen| seen).count() < 8 {
        return Err(Flaw::Weak("it repeats fewer than 8 different bytes"));
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sec_a_key_is_32_bytes_in_any_of_three_ways() {
        let raw: Vec<u8> = (0..32).map(|i| i * 8 + 3).collect();
        let hex = HEXLOWER_PERMISSIVE.encode(&raw);
        let upper = hex.to_uppercase();
        let base64 = BASE64.encode(&raw);
        for text in
            [raw.clone(), hex.clone().into(), upper.into(), format!("{hex}\n").into(), format!(" {base64}\r\n").into()]
        {
            assert_eq!(parse(&text).unwrap()[..], raw, "{:?}", String::from_utf8_lossy(&text));
        }
    }

    #[test]
    fn sec_what_is_no_key_is_refused() {
        let short = BASE64.encode(&[7; 31]);
        assert_eq!(short.len(), 44);
        for text in ["", "secret", &"0".repeat(63), &"g".repeat(64), &"0".repeat(65), &short, &"=".repeat(44)] {
            assert_eq!(parse(text.as_bytes()).err(), Some(Flaw::Length), "{text:?}");
        }
        for weak in [&[0; 32][..], &[b'a'; 32], b"0123456789abcdef0123456789abcdef", "00".repeat(32).as_bytes()] {
            assert!(matches!(parse(weak), Err(Flaw::Weak(_))), "{weak:?}");
        }
    }

    #[test]
    fn sec_key_ids_are_short_words_and_unique() {
        let key = || Material::bytes((0..32).collect::<Vec<u8>>());
        for id in ["", "a b", "\u{e9}", &"x".repeat(65)] {
            let refused = SharedKeyOptions::builder(id, key()).build();
            assert!(matches!(refused, Err(SecurityError::KeyId { .. })), "{id:?}");
        }
        let twice = SharedKeyOptions::builder("a", key()).also("a", key()).build();
        assert!(matches!(twice, Err(SecurityError::SameKeyId { .. })));
        assert!(SharedKeyOptions::builder("x".repeat(64), key()).also("b", key()).build().is_ok());
    }
}
