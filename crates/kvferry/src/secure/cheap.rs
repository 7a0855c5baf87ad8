//! An agreement of keys that costs nothing and protects nothing, for fuzzers only: the multiplications on the curve are `snow`'s own
//! business, and with them a fuzzer would do little else. All the rest of the handshake is as it always is.
//!
//! Compiled where `cargo fuzz` sets `--cfg fuzzing` for the whole build; no feature of this crate can turn it on.

use snow::Error;
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::{BoxedCryptoResolver, CryptoResolver, DefaultResolver, FallbackResolver, RingResolver};
use snow::types::{Cipher, Dh, Hash, Random};

const LEN: usize = 32;

/// As the library's own, but for the agreement of keys, and for random bytes, which are always the same: so is what an input does.
pub(super) fn resolver() -> BoxedCryptoResolver {
    let usual = FallbackResolver::new(Box::new(RingResolver), Box::new(DefaultResolver));
    Box::new(FallbackResolver::new(Box::new(Resolver), Box::new(usual)))
}

struct Resolver;

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Same))
    }

    fn resolve_dh(&self, _: &DHChoice) -> Option<Box<dyn Dh>> {
        Some(Box::<Sum>::default())
    }

    fn resolve_hash(&self, _: &HashChoice) -> Option<Box<dyn Hash>> {
        None
    }

    fn resolve_cipher(&self, _: &CipherChoice) -> Option<Box<dyn Cipher>> {
        None
    }
}

struct Same;

impl Random for Same {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), Error> {
        dest.fill(0x5a);
        Ok(())
    }
}

/// The public key is the private one, and what both agree on is the sum of them, byte by byte.
#[derive(Default)]
struct Sum([u8; LEN]);

impl Dh for Sum {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        LEN
    }

    fn priv_len(&self) -> usize {
        LEN
    }

    fn set(&mut self, privkey: &[u8]) {
        self.0.copy_from_slice(privkey);
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), Error> {
        rng.try_fill_bytes(&mut self.0)
    }

    fn pubkey(&self) -> &[u8] {
        &self.0
    }

    fn privkey(&self) -> &[u8] {
        &self.0
    }

    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), Error> {
        for ((out, ours), theirs) in out.iter_mut().zip(self.0).zip(pubkey) {
            *out = ours.wrapping_add(*theirs);
        }
        Ok(())
    }
}
