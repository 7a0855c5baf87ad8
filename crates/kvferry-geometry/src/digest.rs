//! Digests of descriptions: BLAKE3 over a length-prefixed encoding, so that no two descriptions share one.

use alloc::vec::Vec;
use core::fmt;

/// 32 bytes that name a description.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// A digest from its bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    /// All 64 hex digits; `{:.8}` prints the first 8.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(64).min(64);
        for i in 0..digits {
            let nibble = (self.0[i / 2] >> (4 * (1 - i % 2))) & 0xf;
            f.write_str(&"0123456789abcdef"[usize::from(nibble)..=usize::from(nibble)])?;
        }
        Ok(())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self:.8})")
    }
}

/// Bytes that are collected before they are hashed: many at a time are hashed in parallel.
const TOGETHER: usize = 16 << 10;

/// Collects fields. Every field has a fixed width or a length before it, and every list its count.
pub(crate) struct Digester {
    hasher: blake3::Hasher,
    waiting: Vec<u8>,
}

impl Digester {
    /// `domain` keeps digests of different kinds apart.
    pub(crate) fn new(domain: &str) -> Self {
        let mut d = Self { hasher: blake3::Hasher::new(), waiting: Vec::new() };
        d.text(domain);
        d
    }

    pub(crate) fn number(&mut self, n: u64) {
        self.bytes(&n.to_le_bytes());
    }

    pub(crate) fn count(&mut self, n: usize) {
        self.number(n as u64);
    }

    pub(crate) fn text(&mut self, s: &str) {
        self.count(s.len());
        self.bytes(s.as_bytes());
    }

    pub(crate) fn finish(mut self) -> Digest {
        self.hasher.update(&self.waiting);
        Digest(*self.hasher.finalize().as_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
        if self.waiting.len() >= TOGETHER {
            self.hasher.update(&self.waiting);
            self.waiting.clear();
        }
    }
}
