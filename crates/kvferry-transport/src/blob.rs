//! The frame of what an endpoint tells its peers: who it is, which regions it has, and a part that only its backend reads.
//!
//! The blob crosses trust boundaries as opaque bytes; this is where they are parsed, once. Little endian throughout:
//!
//! ```text
//! "kvfT" | version u16 | backend: len u8, bytes | endpoint 16 | generation u64
//! | regions u32, each: id u32, length u64 | lane: len u32, bytes | FNV-1a u64 over all before
//! ```
//!
//! The checksum finds damage (any single changed byte), not malice.

use kvferry_geometry::units::{Bytes, RegionId};

use crate::negotiate::{ANY, MAX_BACKENDS};
use crate::types::EndpointId;

/// The version of the frame.
pub const VERSION: u16 = 1;
/// The most regions a blob can list.
pub const MAX_REGIONS: usize = 1 << 20;
/// The longest lane part of one backend in bytes.
pub const MAX_LANE: usize = 1 << 20;
/// The longest lane part of several.
const MAX_LANES: usize = MAX_BACKENDS * (MAX_LANE + 512);

const MAGIC: &[u8; 4] = b"kvfT";

/// A parsed blob.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Blob {
    /// The backend's name.
    pub backend: String,
    /// The endpoint.
    pub endpoint: EndpointId,
    /// The generation of its registrations.
    pub generation: u64,
    /// Its registrations, ascending ids, no length zero.
    pub regions: Vec<(RegionId, Bytes)>,
    /// What only the backend reads.
    pub lane: Vec<u8>,
}

/// Bytes that are no valid blob.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// It ends too early.
    #[error("it ends at byte {len} inside {field}")]
    Truncated {
        /// Its length.
        len: usize,
        /// The field that is cut.
        field: &'static str,
    },
    /// It does not begin as one.
    #[error("it doesn't begin with \"kvfT\"")]
    NotABlob,
    /// Another version of the frame.
    #[error("its version is {got}, ours is {expected}")]
    Version {
        /// Ours.
        expected: u16,
        /// The blob's.
        got: u16,
    },
    /// The checksum differs.
    #[error("its checksum is {got:#018x}, its bytes give {expected:#018x}")]
    Checksum {
        /// Computed.
        expected: u64,
        /// Found.
        got: u64,
    },
    /// A field has a value that makes no sense.
    #[error("its {field} is {got}, which is not allowed")]
    Field {
        /// The field.
        field: &'static str,
        /// The value.
        got: u64,
    },
    /// Bytes follow the end.
    #[error("{extra} bytes follow its end")]
    Trailing {
        /// How many.
        extra: usize,
    },
}

impl Blob {
    /// The bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + self.backend.len() + 12 * self.regions.len() + self.lane.len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        let name = &self.backend.as_bytes()[..self.backend.len().min(255)];
        out.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        out.extend_from_slice(name);
        out.extend_from_slice(&self.endpoint.get());
        out.extend_from_slice(&self.generation.to_le_bytes());
        out.extend_from_slice(&u32::try_from(self.regions.len()).unwrap_or(u32::MAX).to_le_bytes());
        for (id, len) in &self.regions {
            out.extend_from_slice(&id.get().to_le_bytes());
            out.extend_from_slice(&len.get().to_le_bytes());
        }
        out.extend_from_slice(&u32::try_from(self.lane.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend_from_slice(&self.lane);
        out.extend_from_slice(&fnv1a(&out).to_le_bytes());
        out
    }

    /// Parses bytes from a peer.
    ///
    /// # Errors
    /// See [`BlobError`]. Nothing is allocated beyond the size of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let mut r = Reader::new(bytes);
        if r.take(4, "magic")? != MAGIC {
            return Err(BlobError::NotABlob);
        }
        let version = u16::from_le_bytes(r.array("version")?);
        if version != VERSION {
            return Err(BlobError::Version { expected: VERSION, got: version });
        }
        let [name_len] = r.array("backend")?;
        let name = r.take(usize::from(name_len), "backend")?;
        let endpoint = EndpointId::new(r.array("endpoint")?);
        let generation = u64::from_le_bytes(r.array("generation")?);
        let count = r.count("regions", MAX_REGIONS)?;
        let table = r.take(count * 12, "regions")?;
        let longest = if name == ANY.as_bytes() { MAX_LANES } else { MAX_LANE };
        let lane_len = r.count("lane", longest)?;
        let lane = r.take(lane_len, "lane")?;
        let expected = fnv1a(&bytes[..r.at]);
        let got = u64::from_le_bytes(r.array("checksum")?);
        if got != expected {
            return Err(BlobError::Checksum { expected, got });
        }
        if r.left() > 0 {
            return Err(BlobError::Trailing { extra: r.left() });
        }
        let backend = std::str::from_utf8(name)
            .map_err(|e| BlobError::Field { field: "backend name's first bad byte", got: e.valid_up_to() as u64 })?;
        Ok(Self { backend: backend.to_owned(), endpoint, generation, regions: regions(table)?, lane: lane.to_vec() })
    }
}

fn regions(table: &[u8]) -> Result<Vec<(RegionId, Bytes)>, BlobError> {
    let mut out: Vec<(RegionId, Bytes)> = Vec::with_capacity(table.len() / 12);
    for row in table.chunks_exact(12) {
        let mut r = Reader::new(row);
        let id = RegionId::new(u32::from_le_bytes(r.array("regions")?));
        let len = u64::from_le_bytes(r.array("regions")?);
        if out.last().is_some_and(|(last, _)| *last >= id) || id.index() >= MAX_REGIONS {
            return Err(BlobError::Field { field: "region id", got: u64::from(id.get()) });
        }
        if len == 0 || len > i64::MAX as u64 {
            return Err(BlobError::Field { field: "region length", got: len });
        }
        out.push((id, Bytes::new(len)));
    }
    Ok(out)
}

/// FNV-1a, 64 bits: each step is a bijection of the state, so one changed byte always changes the result.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Bytes from a peer, taken field by field.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes that are left.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn take(&mut self, n: usize, field: &'static str) -> Result<&'a [u8], BlobError> {
        let truncated = BlobError::Truncated { len: self.bytes.len(), field };
        let end = self.at.checked_add(n).ok_or(truncated.clone())?;
        let taken = self.bytes.get(self.at..end).ok_or(truncated)?;
        self.at = end;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], BlobError> {
        let taken = self.take(N, field)?;
        taken.try_into().map_err(|_| BlobError::Truncated { len: self.bytes.len(), field })
    }

    pub(crate) fn count(&mut self, field: &'static str, most: usize) -> Result<usize, BlobError> {
        let n = u32::from_le_bytes(self.array(field)?);
        let count = usize::try_from(n).unwrap_or(usize::MAX);
        if count > most {
            return Err(BlobError::Field { field, got: u64::from(n) });
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Blob {
        Blob {
            backend: "mem".into(),
            endpoint: EndpointId::new([3; 16]),
            generation: 7,
            regions: vec![(RegionId::new(0), Bytes::new(100)), (RegionId::new(4), Bytes::new(1 << 40))],
            lane: b"where".to_vec(),
        }
    }

    #[test]
    fn round_trip() {
        assert_eq!(Blob::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn every_cut_and_every_flip_is_refused() {
        let bytes = sample().encode();
        for end in 0..bytes.len() {
            assert!(matches!(Blob::decode(&bytes[..end]), Err(BlobError::Truncated { .. })), "cut at {end}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Blob::decode(&flipped).is_err(), "flip of bit {bit}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(Blob::decode(&longer), Err(BlobError::Trailing { extra: 1 }));
    }

    #[test]
    fn announced_sizes_are_not_believed() {
        let mut blob = sample();
        blob.regions.clear();
        blob.lane.clear();
        let mut bytes = blob.encode();
        let at = bytes.len() - 16;
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Blob::decode(&bytes), Err(BlobError::Field { field: "regions", got: u64::from(u32::MAX) }));
    }

    #[test]
    fn ids_ascend_and_lengths_are_sane() {
        let mut blob = sample();
        blob.regions.reverse();
        assert!(matches!(Blob::decode(&blob.encode()), Err(BlobError::Field { field: "region id", got: 0 })));
        blob.regions = vec![(RegionId::new(0), Bytes::ZERO)];
        assert!(matches!(Blob::decode(&blob.encode()), Err(BlobError::Field { field: "region length", got: 0 })));
    }
}
