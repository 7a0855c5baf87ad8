//! Memory of an engine as plain vectors, and the patterns that fill it.
//!
//! The patterns never share a value, so that a byte from the wrong source is always seen, and a byte of the wrong
//! coordinate with a chance of 126 in 127 for each byte:
//!
//! | value | meaning |
//! |---|---|
//! | 0 | zeroed |
//! | 1..=127 | held: a function of the coordinate |
//! | 128..=191 | poison: bytes of the producer that must never arrive |
//! | 192..=255 | background: what the consumer's memory was before |

use kvferry_geometry::manifest::Manifest;
use kvferry_geometry::units::Name;

use crate::execute::Finding;
use crate::transfer::Known;
use crate::walk::{Cell, Coordinate, walk};
use crate::{Transfer, at};

/// The bytes of every region of every rank of one engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Memory {
    /// Rank, then region, then byte.
    pub ranks: Vec<Vec<Vec<u8>>>,
}

impl Memory {
    /// All bytes zero.
    #[must_use]
    pub fn zero(manifest: &Manifest) -> Self {
        Self::filled(manifest, |_, _, bytes| bytes.fill(0))
    }

    /// Bytes that a producer never computed.
    #[must_use]
    pub fn poison(manifest: &Manifest) -> Self {
        Self::filled(manifest, |rank, region, bytes| noise(rank, region, 128, bytes))
    }

    /// Bytes of a consumer before a transfer.
    #[must_use]
    pub fn background(manifest: &Manifest) -> Self {
        Self::filled(manifest, |rank, region, bytes| noise(rank, region, 192, bytes))
    }

    fn filled(manifest: &Manifest, fill: impl Fn(u64, u64, &mut [u8])) -> Self {
        let mut ranks = Vec::new();
        for (r, rank) in manifest.ranks().iter().enumerate() {
            let mut regions = Vec::new();
            for (x, region) in rank.layout.regions.iter().enumerate() {
                let mut bytes = vec![0; at(region.len.get())];
                fill(r as u64, x as u64, &mut bytes);
                regions.push(bytes);
            }
            ranks.push(regions);
        }
        Self { ranks }
    }

    /// `len` bytes at a place, or `None` where the region doesn't have them.
    pub fn bytes_mut(&mut self, rank: usize, region: usize, offset: u64, len: u64) -> Option<&mut [u8]> {
        let end = offset.checked_add(len)?;
        self.ranks.get_mut(rank)?.get_mut(region)?.get_mut(at(offset)..at(end))
    }

    /// `len` bytes at a place, or `None` where the region doesn't have them.
    #[must_use]
    pub fn bytes(&self, rank: usize, region: usize, offset: u64, len: u64) -> Option<&[u8]> {
        let end = offset.checked_add(len)?;
        self.ranks.get(rank)?.get(region)?.get(at(offset)..at(end))
    }

    pub(crate) fn cell_mut(&mut self, rank: usize, cell: &Cell<'_>) -> Result<&mut [u8], Finding> {
        let (region, offset, width) = (cell.region, cell.offset, cell.width);
        self.bytes_mut(rank, region, offset, width).ok_or(Finding::ViewOutside { rank, region, offset, width })
    }
}

fn noise(rank: u64, region: u64, base: u8, bytes: &mut [u8]) {
    let seed = mix(mix(u64::from(base) ^ (rank << 8)) ^ region);
    for (i, chunk) in bytes.chunks_mut(8).enumerate() {
        for (byte, random) in chunk.iter_mut().zip(mix(seed ^ i as u64).to_le_bytes()) {
            *byte = base + random % 64;
        }
    }
}

/// The pattern of one component of one item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp(u64);

impl Stamp {
    /// The pattern's seed comes from the two names, so it is the same on every engine.
    #[must_use]
    pub fn new(item: &Name, component: &Name) -> Self {
        let text = |seed, name: &Name| name.as_str().bytes().fold(mix(seed), |h, b| mix(h ^ u64::from(b)));
        Self(text(text(1, item), component))
    }

    /// Writes bytes of one value or element, from its byte `first` on.
    pub fn write(self, coordinate: Coordinate, first: u64, bytes: &mut [u8]) {
        let Coordinate { token, row, heads } = coordinate;
        let seed = mix(mix(mix(self.0 ^ token) ^ u64::from(row)) ^ (u64::from(heads.1) << 32 | u64::from(heads.0)));
        for (i, byte) in (first..).zip(bytes) {
            *byte = 1 + mix(seed ^ i).to_le_bytes()[7] % 127;
        }
    }
}

/// The finaliser of splitmix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The producer's memory: every held byte is a function of its coordinate, the rest of a frozen block's bytes is zero,
/// all else is poison: scratch rows of states too.
///
/// # Errors
/// A view outside its region, or two held coordinates in one place: the tables contradict each other.
pub fn fill_source(transfer: &Transfer<'_>) -> Result<Memory, Finding> {
    let manifest = transfer.src;
    let mut memory = Memory::poison(manifest);
    let mut owners = Memory::zero(manifest);
    for (item, _) in manifest.spec().items().iter().enumerate() {
        let listed = transfer.src_listed(item)?;
        for rank in 0..manifest.ranks().len() {
            let mut failed = None;
            let mut stamp = StampCache::default();
            walk(manifest, rank, item, listed, |cell| {
                let written = transfer.known(item, &cell).and_then(|known| {
                    if known == Known::Nothing {
                        return Ok(());
                    }
                    let owners = owners.cell_mut(rank, &cell)?;
                    if owners.iter().any(|&o| o != 0) {
                        return Err(Finding::Shared { rank, region: cell.region, offset: cell.offset });
                    }
                    owners.fill(1);
                    let bytes = memory.cell_mut(rank, &cell)?;
                    if known == Known::Held {
                        stamp.of(&cell).write(cell.coordinate, cell.byte, bytes);
                    } else {
                        bytes.fill(0);
                    }
                    Ok(())
                });
                if let Err(e) = written {
                    failed.get_or_insert(e);
                }
            });
            failed.map_or(Ok(()), Err)?;
        }
    }
    Ok(memory)
}

/// Keeps the stamps of one item's components.
#[derive(Default)]
pub(crate) struct StampCache<'m>(Vec<(&'m Name, Stamp)>);

impl<'m> StampCache<'m> {
    pub(crate) fn of(&mut self, cell: &Cell<'m>) -> Stamp {
        if let Some((_, stamp)) = self.0.iter().find(|(name, _)| *name == cell.component) {
            return *stamp;
        }
        let stamp = Stamp::new(cell.item, cell.component);
        self.0.push((cell.component, stamp));
        stamp
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_never_share_a_value_and_differ_by_every_coordinate() {
        let mut a = [0; 256];
        let at = |token, row, head| Coordinate { token, row, heads: (head, head + 1) };
        Stamp::new(&"l0".into(), &"k".into()).write(at(7, 0, 3), 0, &mut a);
        assert!(a.iter().all(|b| (1..=127).contains(b)));
        let others = [
            ("l1", "k", at(7, 0, 3)),
            ("l0", "v", at(7, 0, 3)),
            ("l0", "k", at(8, 0, 3)),
            ("l0", "k", at(7, 1, 3)),
            ("l0", "k", at(7, 0, 2)),
            ("l0", "k", Coordinate { token: 7, row: 0, heads: (3, 5) }),
            ("l", "0k", at(7, 0, 3)),
        ];
        for (item, component, coordinate) in others {
            let mut b = [0; 256];
            Stamp::new(&item.into(), &component.into()).write(coordinate, 0, &mut b);
            let same = a.iter().zip(&b).filter(|(x, y)| x == y).count();
            assert!(same < 16, "{item} {component} {coordinate:?}: {same} of 256 bytes are equal");
        }
        let mut noise_bytes = [0; 999];
        noise(0, 0, 128, &mut noise_bytes);
        assert!(noise_bytes.iter().all(|b| (128..=191).contains(b)));
        noise(3, 1, 192, &mut noise_bytes);
        assert!(noise_bytes.iter().all(|b| *b >= 192));
    }
}
