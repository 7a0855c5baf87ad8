//! The part of a blob that only this backend reads: the process, the plugin, NIXL's metadata of the agent, and where its regions
//! begin; and names of agents.

use std::collections::BTreeSet;
use std::ffi::CString;

use kvferry_transport::EndpointId;

use crate::metadata::{Registered, walk};
use crate::process::Process;
use crate::sys::c_text;

const VERSION: u8 = 1;
/// What the agents of this crate are called, before the endpoint's id.
const NAME: &str = "kvferry-";
/// Bytes of a region's entry.
pub(crate) const ENTRY: usize = 16;

/// Where a region of a peer begins, and under which number its agent registered it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) serial: u64,
}

/// The lane part of a blob.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LanePart {
    pub(crate) process: Process,
    pub(crate) plugin: String,
    /// NIXL's metadata, which only NIXL reads.
    pub(crate) metadata: Vec<u8>,
    /// Of the blob's regions, in their order.
    pub(crate) places: Vec<Place>,
}

impl LanePart {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        self.process.encode(&mut out);
        let name = &self.plugin.as_bytes()[..self.plugin.len().min(255)];
        out.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        out.extend_from_slice(name);
        out.extend_from_slice(&u32::try_from(self.metadata.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend_from_slice(&self.metadata);
        for place in &self.places {
            out.extend_from_slice(&place.address.to_le_bytes());
            out.extend_from_slice(&place.serial.to_le_bytes());
        }
        out
    }

    /// Parses the lane of a blob that lists `lens` as the lengths of its regions; the error says what is wrong.
    pub(crate) fn decode(bytes: &[u8], endpoint: EndpointId, lens: &[u64]) -> Result<Self, String> {
        let cut = || format!("it has {} bytes, which is too few", bytes.len());
        let (&version, rest) = bytes.split_first().ok_or_else(cut)?;
        if version != VERSION {
            return Err(format!("its version is {version}, ours is {VERSION}"));
        }
        let (process, rest) = rest.split_first_chunk::<{ Process::LEN }>().ok_or_else(cut)?;
        let (&name_len, rest) = rest.split_first().ok_or_else(cut)?;
        let (name, rest) = rest.split_at_checked(usize::from(name_len)).ok_or_else(cut)?;
        let plugin = std::str::from_utf8(name).map_err(|_| "its plugin's name isn't text".to_owned())?.to_owned();
        let (len, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
        let len = usize::try_from(u32::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let (metadata, rest) = rest.split_at_checked(len).ok_or_else(cut)?;
        let told = walk(metadata).map_err(|why| format!("NIXL's metadata in it is broken: {why}"))?;
        if told.agent != agent_name(endpoint).as_bytes() {
            return Err(format!("its metadata isn't that of agent {NAME}{endpoint}"));
        }
        let registered: BTreeSet<Registered> = told.memory.into_iter().collect();
        if rest.len() != ENTRY * lens.len() {
            return Err(format!("it has {} bytes for the places of {} regions", rest.len(), lens.len()));
        }
        let mut places = Vec::with_capacity(lens.len());
        for (entry, len) in rest.chunks_exact(ENTRY).zip(lens) {
            let (address, serial) = entry.split_at(8);
            let number = |b: &[u8]| b.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
            let place = Place { address: number(address), serial: number(serial) };
            if place.address.checked_add(*len).is_none_or(|end| usize::try_from(end).is_err()) {
                return Err(format!("a region of {len} bytes begins at {:#x}", place.address));
            }
            let Place { address, serial } = place;
            if !registered.contains(&Registered { address, len: *len, serial }) {
                return Err(format!("a region of {len} bytes at {address:#x} is not in NIXL's metadata"));
            }
            places.push(place);
        }
        Ok(Self { process: Process::decode(process), plugin, metadata: metadata.to_vec(), places })
    }
}

/// The name of an endpoint's agent.
pub(crate) fn agent_name(endpoint: EndpointId) -> CString {
    c_text(&format!("{NAME}{endpoint}"))
}

/// The endpoint whose agent has this name.
pub(crate) fn endpoint_of(name: &[u8]) -> Option<EndpointId> {
    let hex = std::str::from_utf8(name.strip_prefix(NAME.as_bytes())?).ok()?;
    if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return None;
    }
    u128::from_str_radix(hex, 16).ok().map(|id| EndpointId::new(id.to_be_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(id: EndpointId, places: &[(u64, u64, u64)]) -> Vec<u8> {
        let memory: Vec<_> = places.iter().map(|&(address, len, serial)| Registered { address, len, serial }).collect();
        crate::metadata::tests::made(agent_name(id).as_bytes(), &memory)
    }

    #[test]
    fn round_trip_and_cuts() {
        let id = EndpointId::new([0xa5; 16]);
        let part = LanePart {
            process: Process::this(),
            plugin: "UCX".to_owned(),
            metadata: metadata(id, &[(4096, 10, 0), (1 << 40, 20, 7)]),
            places: vec![Place { address: 4096, serial: 0 }, Place { address: 1 << 40, serial: 7 }],
        };
        let bytes = part.encode();
        assert_eq!(LanePart::decode(&bytes, id, &[10, 20]), Ok(part.clone()));
        for end in 0..bytes.len() {
            assert!(LanePart::decode(&bytes[..end], id, &[10, 20]).is_err(), "cut at {end}");
        }
        assert!(LanePart::decode(&[&bytes[..], &[0]].concat(), id, &[10, 20]).is_err());
        assert!(LanePart::decode(&bytes, id, &[10]).unwrap_err().contains("1 regions"));
        assert!(LanePart::decode(&bytes, id, &[10, 21]).unwrap_err().contains("is not in NIXL's metadata"));
        assert!(LanePart::decode(&bytes, id, &[10, u64::MAX]).unwrap_err().contains("begins at"));
        assert!(LanePart::decode(&bytes, EndpointId::new([1; 16]), &[10, 20]).unwrap_err().contains("agent"));
        assert!(
            LanePart::decode(&[&[9][..], &bytes[1..]].concat(), id, &[10, 20]).unwrap_err().contains("version is 9")
        );
    }

    #[test]
    fn names_come_back() {
        let id = EndpointId::new([0x0b; 16]);
        assert_eq!(endpoint_of(agent_name(id).as_bytes()), Some(id));
        for foreign in [&b"kvferry-"[..], b"prefill-0", b"kvferry-+0000000000000000000000000000000"] {
            assert_eq!(endpoint_of(foreign), None);
        }
    }
}
