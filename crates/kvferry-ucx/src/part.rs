//! Our part of the blob: where the rails are reached, and for each region its address and keys.
//!
//! ```text
//! "kvfU" | version u16 | token 16 | process 36 | rails u8
//! | each rail: address (len u16, bytes), keys u32, each (len u16, bytes)
//! | each region of the blob, in its order: address u64, each rail: index of its key u32
//! ```
//!
//! Regions that share a key (all of plain host memory, on lanes that don't register it) share its bytes here.
//!
//! What [`Part::decode`] gives has passed [`check_address`] and [`check_key`].

mod packed;

use std::collections::HashMap;

pub(crate) use self::packed::{ADDRESS_SLACK, KEY_SLACK, check_address, check_key};
use crate::config::MAX_RAILS;
use crate::process::Process;

const MAGIC: &[u8; 4] = b"kvfU";
const VERSION: u16 = 1;

/// The part, parsed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// What a caller must know.
    pub(crate) token: [u8; 16],
    pub(crate) process: Process,
    pub(crate) rails: Vec<RailPart>,
    /// One for each region.
    pub(crate) regions: Vec<Place>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RailPart {
    /// Of the worker that answers.
    pub(crate) address: Vec<u8>,
    pub(crate) keys: Vec<Vec<u8>>,
}

/// Where a region is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) address: u64,
    /// Index into each rail's keys.
    pub(crate) keys: Vec<u32>,
}

/// Keys of one rail, each once.
#[derive(Default)]
pub(crate) struct KeyTable<'a> {
    pub(crate) keys: Vec<Vec<u8>>,
    by_bytes: HashMap<&'a [u8], u32>,
}

impl<'a> KeyTable<'a> {
    pub(crate) fn index(&mut self, key: &'a [u8]) -> u32 {
        let next = u32::try_from(self.keys.len()).unwrap_or(u32::MAX);
        let index = *self.by_bytes.entry(key).or_insert(next);
        if index == next {
            self.keys.push(key.to_vec());
        }
        index
    }
}

impl Part {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + self.regions.len() * (8 + 4 * self.rails.len()));
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.token);
        self.process.encode(&mut out);
        out.push(u8::try_from(self.rails.len()).unwrap_or(u8::MAX));
        for rail in &self.rails {
            put(&mut out, &rail.address);
            out.extend_from_slice(&u32::try_from(rail.keys.len()).unwrap_or(u32::MAX).to_le_bytes());
            rail.keys.iter().for_each(|key| put(&mut out, key));
        }
        for region in &self.regions {
            out.extend_from_slice(&region.address.to_le_bytes());
            region.keys.iter().for_each(|key| out.extend_from_slice(&key.to_le_bytes()));
        }
        out
    }

    /// Parses what a peer sent, of as many regions as the blob around it lists with these lengths.
    pub(crate) fn decode(bytes: &[u8], lens: impl ExactSizeIterator<Item = u64>) -> Result<Self, String> {
        let mut rest = bytes;
        if take::<4>(&mut rest, "magic")? != *MAGIC {
            return Err("it doesn't begin with \"kvfU\"".to_owned());
        }
        let version = u16::from_le_bytes(take(&mut rest, "version")?);
        if version != VERSION {
            return Err(format!("its version is {version}, ours is {VERSION}"));
        }
        let token = take(&mut rest, "token")?;
        let process = Process::decode(&take(&mut rest, "process")?);
        let [count] = take(&mut rest, "rails")?;
        let count = usize::from(count);
        if !(1..=MAX_RAILS).contains(&count) {
            return Err(format!("it has {count} rails; 1 to {MAX_RAILS} are allowed"));
        }
        let rails = (0..count).map(|_| rail(&mut rest, lens.len())).collect::<Result<Vec<_>, _>>()?;
        let row = 8 + 4 * count;
        if rest.len() != lens.len() * row {
            return Err(format!("{} bytes about {} regions, where {row} each are right", rest.len(), lens.len()));
        }
        let regions = rest.chunks_exact(row).zip(lens).map(|(row, len)| place(row, len, &rails));
        Ok(Self { token, process, regions: regions.collect::<Result<_, _>>()?, rails })
    }
}

fn rail(rest: &mut &[u8], regions: usize) -> Result<RailPart, String> {
    let address = get(rest, "a rail's address")?;
    check_address(&address)?;
    let count = u32::from_le_bytes(take(rest, "a rail's keys")?);
    if usize::try_from(count).map_or(true, |count| count > regions) {
        return Err(format!("a rail has {count} keys for {regions} regions"));
    }
    let key = |_| get(rest, "a key").and_then(|key| check_key(&key).map(|()| key));
    let keys = (0..count).map(key).collect::<Result<_, _>>()?;
    Ok(RailPart { address, keys })
}

fn place(row: &[u8], len: u64, rails: &[RailPart]) -> Result<Place, String> {
    let mut rest = row;
    let address = u64::from_le_bytes(take(&mut rest, "a region's address")?);
    if address.checked_add(len).is_none() {
        return Err(format!("a region of {len} bytes at {address:#x} passes the end of memory"));
    }
    let mut keys = Vec::with_capacity(rails.len());
    for rail in rails {
        let key = u32::from_le_bytes(take(&mut rest, "a region's key")?);
        if usize::try_from(key).map_or(true, |key| key >= rail.keys.len()) {
            return Err(format!("a region has key {key} of {}", rail.keys.len()));
        }
        keys.push(key);
    }
    Ok(Place { address, keys })
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn get(rest: &mut &[u8], what: &str) -> Result<Vec<u8>, String> {
    let len = usize::from(u16::from_le_bytes(take(rest, what)?));
    let (bytes, tail) = rest.split_at_checked(len).ok_or_else(|| format!("it ends inside {what}"))?;
    *rest = tail;
    Ok(bytes.to_vec())
}

fn take<const N: usize>(rest: &mut &[u8], what: &str) -> Result<[u8; N], String> {
    let (head, tail) = rest.split_first_chunk::<N>().ok_or_else(|| format!("it ends inside {what}"))?;
    *rest = tail;
    Ok(*head)
}

#[cfg(test)]
mod tests {
    use super::packed::tests::{address, key};
    use super::*;

    fn sample() -> Part {
        let rail = |n: u8| RailPart { address: address(n == 2), keys: vec![key(n), key(n + 100)] };
        Part {
            token: [7; 16],
            process: Process { host: [3; 16], namespace: 4, pid: 5, started: 6 },
            rails: vec![rail(1), rail(2)],
            regions: vec![Place { address: 4096, keys: vec![0, 1] }, Place { address: 1 << 40, keys: vec![1, 0] }],
        }
    }

    #[test]
    fn it_comes_back_and_every_cut_is_refused() {
        let bytes = sample().encode();
        let lens = [10, 20];
        assert_eq!(Part::decode(&bytes, lens.into_iter()), Ok(sample()));
        for end in 0..bytes.len() {
            assert!(Part::decode(&bytes[..end], lens.into_iter()).is_err(), "cut at {end}");
        }
        assert!(Part::decode(&[&bytes[..], &[0]].concat(), lens.into_iter()).is_err());
        assert!(Part::decode(&bytes, [10].into_iter()).is_err());
        assert!(Part::decode(&bytes, [10, u64::MAX].into_iter()).is_err());
    }

    #[test]
    fn numbers_that_point_nowhere_are_refused() {
        let mut part = sample();
        part.regions[1].keys[0] = 2;
        assert!(Part::decode(&part.encode(), [1, 1].into_iter()).unwrap_err().contains("key 2 of 2"));
        part = sample();
        part.rails.clear();
        assert!(Part::decode(&part.encode(), [1, 1].into_iter()).is_err());
        part = sample();
        part.rails[0].address.clear();
        assert!(Part::decode(&part.encode(), [1, 1].into_iter()).is_err());
        part = sample();
        part.rails[1].keys.push(key(3));
        assert!(Part::decode(&part.encode(), [1, 1].into_iter()).unwrap_err().contains("3 keys for 2 regions"));
        part = sample();
        part.rails[1].keys[1].pop();
        assert!(Part::decode(&part.encode(), [1, 1].into_iter()).unwrap_err().contains("a key of 13 bytes"));
    }

    #[test]
    fn a_key_is_kept_once() {
        let mut table = KeyTable::default();
        let indices = [&b"a"[..], b"b", b"a", b"", b"b"].map(|key| table.index(key));
        assert_eq!((indices, table.keys.len()), ([0, 1, 0, 2, 1], 3));
    }
}
