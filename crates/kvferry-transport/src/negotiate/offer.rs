//! What a blob of several backends says in its lane part: for each backend what its own blob would say, but for the endpoint and
//! the regions, which are the frame's.
//!
//! ```text
//! version u8 | backends u8, each: name: len u8, bytes | generation u64 | lane: len u32, bytes
//! ```

use kvferry_geometry::units::{Bytes, RegionId};

use super::{ANY, MAX_BACKENDS};
use crate::blob::{Blob, BlobError, MAX_LANE, Reader};
use crate::types::EndpointId;

const VERSION: u8 = 1;

/// One backend in a blob.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Offer {
    pub(super) backend: String,
    pub(super) generation: u64,
    pub(super) lane: Vec<u8>,
}

impl Offer {
    pub(super) fn of(blob: Blob) -> Self {
        Self { backend: blob.backend, generation: blob.generation, lane: blob.lane }
    }

    /// The blob that the backend itself would have made.
    pub(super) fn blob(self, endpoint: EndpointId, regions: Vec<(RegionId, Bytes)>) -> Vec<u8> {
        Blob { backend: self.backend, endpoint, generation: self.generation, regions, lane: self.lane }.encode()
    }
}

pub(super) fn encode(offers: &[Offer]) -> Vec<u8> {
    let mut out = vec![VERSION, u8::try_from(offers.len()).unwrap_or(u8::MAX)];
    for offer in offers {
        out.push(u8::try_from(offer.backend.len()).unwrap_or(u8::MAX));
        out.extend_from_slice(offer.backend.as_bytes());
        out.extend_from_slice(&offer.generation.to_le_bytes());
        out.extend_from_slice(&u32::try_from(offer.lane.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend_from_slice(&offer.lane);
    }
    out
}

/// Parses bytes from a peer. Nothing is allocated beyond their size.
pub(super) fn decode(bytes: &[u8]) -> Result<Vec<Offer>, BlobError> {
    let mut r = Reader::new(bytes);
    let [version] = r.array("version of the offers")?;
    if version != VERSION {
        return Err(BlobError::Field { field: "version of the offers", got: u64::from(version) });
    }
    let [count] = r.array("number of backends")?;
    if count == 0 || usize::from(count) > MAX_BACKENDS {
        return Err(BlobError::Field { field: "number of backends", got: u64::from(count) });
    }
    let mut offers: Vec<Offer> = Vec::with_capacity(usize::from(count));
    for index in 0..count {
        let offer = one(&mut r)?;
        if offer.backend.is_empty() || offer.backend == ANY || offers.iter().any(|o| o.backend == offer.backend) {
            return Err(BlobError::Field {
                field: "backend with an empty, reserved or repeated name",
                got: index.into(),
            });
        }
        offers.push(offer);
    }
    if r.left() > 0 {
        return Err(BlobError::Trailing { extra: r.left() });
    }
    Ok(offers)
}

fn one(r: &mut Reader<'_>) -> Result<Offer, BlobError> {
    let [len] = r.array("backend name")?;
    let name = std::str::from_utf8(r.take(usize::from(len), "backend name")?)
        .map_err(|e| BlobError::Field { field: "backend name's first bad byte", got: e.valid_up_to() as u64 })?;
    let generation = u64::from_le_bytes(r.array("generation")?);
    let len = r.count("lane of a backend", MAX_LANE)?;
    let lane = r.take(len, "lane of a backend")?;
    Ok(Offer { backend: name.to_owned(), generation, lane: lane.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<Offer> {
        let offer =
            |name: &str, generation, lane: &[u8]| Offer { backend: name.into(), generation, lane: lane.to_vec() };
        vec![offer("nixl", 3, b"metadata"), offer("shm", 4, b"")]
    }

    #[test]
    fn round_trip_and_every_cut() {
        let bytes = encode(&sample());
        assert_eq!(decode(&bytes), Ok(sample()));
        for end in 0..bytes.len() {
            assert!(matches!(decode(&bytes[..end]), Err(BlobError::Truncated { .. })), "cut at {end}");
        }
        assert_eq!(decode(&[&bytes[..], &[7]].concat()), Err(BlobError::Trailing { extra: 1 }));
    }

    #[test]
    fn no_bytes_are_more_than_an_error() {
        let bytes = encode(&sample());
        for at in 0..bytes.len() {
            for value in 0..=255 {
                let mut changed = bytes.clone();
                changed[at] = value;
                // Whatever it is, it is no panic, and what parses is no larger than what came.
                if let Ok(offers) = decode(&changed) {
                    assert!(offers.iter().map(|o| o.lane.len() + o.backend.len()).sum::<usize>() <= bytes.len());
                }
            }
        }
    }

    #[test]
    fn names_are_there_and_differ() {
        let named = |names: &[&str]| {
            let offer = |n: &&str| Offer { backend: (*n).to_owned(), generation: 0, lane: Vec::new() };
            decode(&encode(&names.iter().map(offer).collect::<Vec<_>>()))
        };
        assert!(named(&["shm", "ucx"]).is_ok());
        for bad in [&["shm", "shm"][..], &["any"], &[""], &[]] {
            assert!(matches!(named(bad), Err(BlobError::Field { .. })), "{bad:?}");
        }
    }
}
