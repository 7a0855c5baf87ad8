//! Bytes as a function of their logical coordinate.
//!
//! A test or demo fills a source rank's caches by coordinate, moves them, and then knows what every byte of a destination
//! rank must be without having seen the transfer. Two coordinates that differ in anything (item, token, head,
//! component, byte) give bytes that look unrelated, so a run that lands one token, head or item off is wrong in
//! nearly every byte (each is right by chance about once in 256; of 180,000 pairs of coordinates the worst still
//! differed in 215 of 256 bytes).
//!
//! ```
//! use kvferry_memory::pattern::{self, Coordinate};
//! let region = kvferry_transport::Region::zeroed(256).unwrap();
//! let place = Coordinate { item: pattern::seed("model.layers.0.self_attn.attn"), token: 7, head: 1, component: 0 };
//! pattern::fill(&region, 100, 64, place, 0)?;
//! assert_eq!(pattern::check(&region, 100, 64, place, 0)?, None);
//! let next = Coordinate { token: 8, ..place };
//! assert!(pattern::check(&region, 100, 64, next, 0)?.is_some_and(|wrong| wrong.count > 55));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use kvferry_transport::Region;
use kvferry_transport::region::AccessError;

/// Bytes made at a time: a run is often no longer, and then clearing the buffer must not cost more than filling it.
const CHUNK: usize = 256;
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Where a run of bytes belongs: all of its coordinate but the byte.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Coordinate {
    /// The item, as [`seed`] of its name.
    pub item: u64,
    /// The token (or entry, or state slot).
    pub token: u64,
    /// The head (or unit).
    pub head: u32,
    /// The component (or part).
    pub component: u32,
}

/// Bytes that are not what the pattern says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// How many bytes differ.
    pub count: u64,
    /// Offset in the region of the first of them.
    pub offset: u64,
    /// What it should be.
    pub expected: u8,
    /// What it is.
    pub got: u8,
}

/// A number for a name.
#[must_use]
pub fn seed(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    mix(hash)
}

/// The coordinate of bytes that belong to nothing: run it over a whole region, with the byte offset equal to the region
/// offset, before a transfer, and see afterwards that what no batch lists is still so.
#[must_use]
pub fn background(region: u64) -> Coordinate {
    Coordinate { item: mix(region ^ 0x6b76_6665_7272_7921), token: u64::MAX, head: u32::MAX, component: u32::MAX }
}

/// Bytes `8 * index` to `8 * index + 7` (little endian) of a coordinate.
#[must_use]
pub fn word(place: Coordinate, index: u64) -> u64 {
    nth(base(place), index)
}

/// Writes the pattern to `len` bytes at `offset` of the region: bytes `byte` to `byte + len` of the coordinate.
///
/// # Errors
/// If they leave the region or it isn't host memory; nothing is written then.
pub fn fill(region: &Region, offset: u64, len: u64, place: Coordinate, byte: u64) -> Result<(), AccessError> {
    check_range(region, offset, len)?;
    let base = base(place);
    let mut buffer = [0; CHUNK];
    let mut done = 0;
    while done < len {
        let bytes = chunk(base, byte + done, len - done, &mut buffer);
        region.write(offset + done, bytes)?;
        done += bytes.len() as u64;
    }
    Ok(())
}

/// Compares `len` bytes at `offset` of the region with bytes `byte` to `byte + len` of the coordinate.
///
/// # Errors
/// If they leave the region or it isn't host memory.
pub fn check(
    region: &Region,
    offset: u64,
    len: u64,
    place: Coordinate,
    byte: u64,
) -> Result<Option<Mismatch>, AccessError> {
    check_range(region, offset, len)?;
    let base = base(place);
    let (mut buffer, mut got) = ([0; CHUNK], [0; CHUNK]);
    let mut wrong: Option<Mismatch> = None;
    let mut done = 0;
    while done < len {
        let expected = chunk(base, byte + done, len - done, &mut buffer);
        let got = &mut got[..expected.len()];
        region.read(offset + done, got)?;
        if *got != *expected {
            compare(expected, got, offset + done, &mut wrong);
        }
        done += expected.len() as u64;
    }
    Ok(wrong)
}

fn check_range(region: &Region, offset: u64, len: u64) -> Result<(), AccessError> {
    let out = AccessError::OutOfRange { offset, len, region: region.len() };
    let count = usize::try_from(len).map_err(|_| out)?;
    region.host_range(offset, count).map(|_| ())
}

#[cold]
fn compare(expected: &[u8], got: &[u8], offset: u64, wrong: &mut Option<Mismatch>) {
    for ((&expected, &got), at) in expected.iter().zip(got).zip(offset..) {
        if expected != got {
            wrong.get_or_insert(Mismatch { count: 0, offset: at, expected, got }).count += 1;
        }
    }
}

/// The pattern from byte `from` on, at most `most` bytes, as many as fit the buffer.
fn chunk(base: u64, from: u64, most: u64, buffer: &mut [u8; CHUNK]) -> &[u8] {
    let skip = usize::try_from(from % 8).unwrap_or(0);
    let len = usize::try_from(most).unwrap_or(CHUNK).min(CHUNK - skip);
    let words = (skip + len).div_ceil(8);
    let first = from / 8;
    for (slot, i) in buffer.chunks_exact_mut(8).take(words).zip(first..) {
        slot.copy_from_slice(&nth(base, i).to_le_bytes());
    }
    &buffer[skip..skip + len]
}

/// All of a coordinate but the byte, mixed so that no two that are near each other have bases that are.
fn base(place: Coordinate) -> u64 {
    let unit = (u64::from(place.head) << 32) | u64::from(place.component);
    mix(mix(mix(place.item).wrapping_add(place.token.wrapping_mul(GOLDEN))).wrapping_add(unit.wrapping_mul(GOLDEN)))
}

/// Cheap, as it is paid for every word: the base is mixed well, the odd step changes every byte from word to word, and
/// folding each byte onto others keeps apart what a plain sum would not: far words, and coordinates whose bases share a
/// byte. Additions and shifts only, which vectorise.
fn nth(base: u64, index: u64) -> u64 {
    let z = base.wrapping_add(index.wrapping_mul(GOLDEN));
    z ^ z.rotate_left(29)
}

/// The finaliser of SplitMix64: a bijection in which every bit of the input changes half of the output.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(len: usize) -> Region {
        Region::zeroed(len).unwrap()
    }

    const PLACE: Coordinate = Coordinate { item: 5, token: 1000, head: 3, component: 1 };

    #[test]
    fn any_part_is_what_the_words_say() {
        let words: Vec<u8> = (0..1000).flat_map(|i| word(PLACE, i).to_le_bytes()).collect();
        let r = region(9000);
        for (offset, len, byte) in [(0, 8000, 0), (1, 1, 0), (3, 5, 6), (7, 1023, 1), (0, 3000, 4999), (9000, 0, 5)] {
            fill(&r, offset, len, PLACE, byte).unwrap();
            let got = r.to_vec().unwrap();
            let at = |v: u64| usize::try_from(v).unwrap();
            assert_eq!(got[at(offset)..at(offset + len)], words[at(byte)..at(byte + len)], "{offset} {len} {byte}");
            assert_eq!(check(&r, offset, len, PLACE, byte), Ok(None));
        }
    }

    #[test]
    fn neighbours_differ_in_nearly_every_byte() {
        let r = region(4096);
        fill(&r, 0, 4096, PLACE, 0).unwrap();
        let neighbours = [
            (Coordinate { item: 6, ..PLACE }, 0),
            (Coordinate { token: 1001, ..PLACE }, 0),
            (Coordinate { token: 1000 + (1 << 32), ..PLACE }, 0),
            (Coordinate { head: 2, ..PLACE }, 0),
            (Coordinate { component: 0, ..PLACE }, 0),
            (Coordinate { head: 1, component: 3, ..PLACE }, 0),
            (PLACE, 1),
            (PLACE, 8),
            (PLACE, 3),
            (PLACE, 256),
            (PLACE, 2048),
            (PLACE, 4096),
            (PLACE, 1 << 19),
            (PLACE, 1 << 30),
            (background(0), 0),
        ];
        for (place, byte) in neighbours {
            let wrong = check(&r, 0, 4096, place, byte).unwrap().map_or(0, |w| w.count);
            assert!(wrong > 4000, "{place:?} at byte {byte}: only {wrong} of 4096 differ");
        }
    }

    #[test]
    fn no_pair_of_many_coordinates_is_alike() {
        let place = |i: u64| Coordinate { item: seed(if i < 300 { "a" } else { "b" }), token: i % 300, ..PLACE };
        let runs: Vec<Vec<u8>> =
            (0..600).map(|i| (0..32).flat_map(|w| word(place(i), w).to_le_bytes()).collect()).collect();
        for (i, a) in runs.iter().enumerate() {
            for b in &runs[..i] {
                let same = a.iter().zip(b).filter(|(x, y)| x == y).count();
                assert!(same < 64, "{same} of 256 bytes are the same");
            }
        }
    }

    #[test]
    fn one_wrong_byte_is_found_anywhere() {
        let r = region(5000);
        fill(&r, 0, 5000, PLACE, 3).unwrap();
        for at in [0u64, 1, 7, 1020, 1021, 1022, 4999] {
            let mut byte = [0];
            r.read(at, &mut byte).unwrap();
            r.write(at, &[byte[0] ^ 4]).unwrap();
            let wrong = check(&r, 0, 5000, PLACE, 3).unwrap();
            assert_eq!(wrong, Some(Mismatch { count: 1, offset: at, expected: byte[0], got: byte[0] ^ 4 }));
            r.write(at, &byte).unwrap();
        }
    }

    #[test]
    fn outside_is_an_error_and_nothing_is_written() {
        let r = region(100);
        assert!(fill(&r, 50, 51, PLACE, 0).is_err());
        assert!(fill(&r, 50, u64::MAX, PLACE, 0).is_err());
        assert!(check(&r, 101, 0, PLACE, 0).is_err());
        assert_eq!(r.to_vec().unwrap(), vec![0; 100]);
    }

    #[test]
    fn bases_of_a_whole_model_are_distinct() {
        let mut seen = std::collections::HashSet::new();
        for item in 0..20 {
            let item = seed(&format!("model.layers.{item}.self_attn.attn"));
            for token in 0..200 {
                for head in 0..8 {
                    for component in 0..2 {
                        assert!(seen.insert(base(Coordinate { item, token, head, component })));
                    }
                }
            }
        }
    }
}
