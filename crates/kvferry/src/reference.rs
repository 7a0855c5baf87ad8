//! What a router carries from a prefill engine to a decode engine: where, who, which life, which lease.

use std::fmt;
use std::str::FromStr;

use kvferry_proto::lease::first_attempt;
use kvferry_proto::names::{EngineId, Epoch, Fence, LeaseId};

use crate::address::Address;

/// A reference to offered blocks. As text (`Display`, `FromStr`) it is one opaque word of printable ASCII (unless the path of
/// a Unix socket is not), to be put into a JSON string, a header or a query as it is:
///
/// ```text
/// kvferry1.<lease, 32 hex digits>.<epoch, 32 hex digits>.<engine id>@<address>
/// ```
///
/// It holds no secret and no time.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Reference {
    address: Address,
    engine: EngineId,
    epoch: Epoch,
    lease: LeaseId,
}

/// A text that is no reference.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no kvferry reference: {reason}")]
pub struct ReferenceError {
    /// The text, cut to 256 characters.
    pub text: String,
    /// What is wrong with it.
    pub reason: String,
}

const PREFIX: &str = "kvferry1.";
const HEX: usize = 32;

impl Reference {
    pub(crate) fn new(address: Address, fence: &Fence) -> Self {
        Self { address, engine: fence.engine.clone(), epoch: fence.epoch, lease: fence.lease }
    }

    /// Where the producer's owner listens.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The producer.
    #[must_use]
    pub fn engine(&self) -> &EngineId {
        &self.engine
    }

    /// Which life of the producer.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The lease.
    #[must_use]
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    pub(crate) fn fence(&self) -> Fence {
        first_attempt(self.engine.clone(), self.epoch, self.lease)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}.{}.{}@{}", self.lease, self.epoch, self.engine, self.address)
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let error = |reason: String| ReferenceError { text: text.chars().take(256).collect(), reason };
        let rest = text.strip_prefix(PREFIX).ok_or_else(|| error(format!("it doesn't begin with {PREFIX}")))?;
        let (lease, rest) = number(rest).ok_or_else(|| error(format!("its lease is not {HEX} hex digits")))?;
        let (epoch, rest) = number(rest).ok_or_else(|| error(format!("its epoch is not {HEX} hex digits")))?;
        let (engine, address) = rest.split_once('@').ok_or_else(|| error("it has no address".into()))?;
        Ok(Self {
            address: address.parse().map_err(|e: crate::AddressError| error(e.to_string()))?,
            engine: EngineId::new(engine).map_err(|e| error(e.to_string()))?,
            epoch: Epoch::new(epoch),
            lease: LeaseId::new(lease),
        })
    }
}

/// A number of exactly 32 lower-case hex digits and a dot.
fn number(text: &str) -> Option<(u128, &str)> {
    let (digits, rest) = text.split_at_checked(HEX)?;
    if !digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return None;
    }
    Some((u128::from_str_radix(digits, 16).ok()?, rest.strip_prefix('.')?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(engine: &str, address: &str) -> Reference {
        let fence = first_attempt(EngineId::new(engine).unwrap(), Epoch::new(7), LeaseId::new(u128::MAX));
        Reference::new(address.parse().unwrap(), &fence)
    }

    #[test]
    fn references_come_back_as_they_were() {
        for (engine, address) in
            [("p", "tcp:127.0.0.1:1"), ("a.b:c/d-e_f", "tcp:[::1]:65535"), ("p.1", "unix:/tmp/a@b.c:d")]
        {
            let r = reference(engine, address);
            assert_eq!(r.to_string().parse::<Reference>().unwrap(), r);
        }
    }

    #[test]
    fn a_reference_cut_or_changed_is_refused_or_another_one() {
        let whole = reference("p", "tcp:127.0.0.1:12").to_string();
        for cut in 0..whole.len() {
            if let Ok(r) = whole[..cut].parse::<Reference>() {
                assert_ne!(r.to_string(), whole);
            }
        }
        for bad in ["", "x", "kvferry1.", &whole.replace("kvferry1", "kvferry2"), &whole.to_uppercase(), "\u{e9}"] {
            assert!(bad.parse::<Reference>().is_err(), "{bad}");
        }
    }
}
