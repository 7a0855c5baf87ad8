//! A rank's memory and what should be in it.
//!
//! Beside the real bytes stands a *shadow*: what each byte should be by what the engine wrote and what was delivered to it. So
//! that nothing else was touched is one comparison.

use std::sync::Arc;

use kvferry_geometry::manifest::RankManifest;
use kvferry_memory::pattern::{self, Coordinate};
use kvferry_transport::Region;

use crate::places::{Cell, ItemPlaces, Place, RankPlaces};
use crate::rng::hash;

/// What a value should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Value {
    /// That of a content at a position of the sequence.
    Of {
        content: u64,
        position: u64,
    },
    Zero,
    /// What it is.
    AsIs,
    /// What it should have been before.
    Keep,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct RankMemory {
    pub(crate) regions: Vec<Region>,
    pub(crate) staging: Option<Region>,
    shadow: Vec<Vec<u8>>,
    pub(crate) places: Arc<RankPlaces>,
}

/// A byte that is not what it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wrong {
    pub(crate) region: usize,
    pub(crate) offset: u64,
    pub(crate) expected: u8,
    pub(crate) got: u8,
    pub(crate) place: Option<Place>,
    /// How many bytes of the region differ.
    pub(crate) count: u64,
}

impl RankMemory {
    /// Fresh zeroed memory; `None` where there is not enough. Without bytes all ranks share `nothing`.
    pub(crate) fn new(
        manifest: &RankManifest,
        places: Arc<RankPlaces>,
        staging: Option<usize>,
        nothing: Option<&Region>,
    ) -> Option<Self> {
        let lens: Vec<usize> =
            manifest.layout.regions.iter().map(|r| usize::try_from(r.len.get()).unwrap_or(usize::MAX)).collect();
        if let Some(nothing) = nothing {
            // One byte further each, so that no two are the same range.
            let part = |(i, len): (usize, &usize)| nothing.part(i, *len);
            let regions = lens.iter().enumerate().map(part).collect::<Option<Vec<_>>>()?;
            return Some(Self { regions, staging: None, shadow: Vec::new(), places });
        }
        let regions = lens.iter().map(|len| Region::zeroed(*len)).collect::<Option<Vec<_>>>()?;
        let staging = match staging {
            Some(bytes) => Some(Region::zeroed(bytes)?),
            None => None,
        };
        let shadow = lens.iter().map(|len| vec![0; *len]).collect();
        Some(Self { regions, staging, shadow, places })
    }

    /// Visits a block's values of one item: `should` says of the token in the block what it is, and gives what it should be. With
    /// `write` it is written, else only expected.
    pub(crate) fn set(&mut self, item: usize, block: u32, write: bool, mut should: impl FnMut(u64) -> Value) {
        let places = self.places.clone();
        let Some(item) = places.items.get(item) else { return };
        let Some(shadow) = self.shadow.get_mut(item.region) else { return };
        let start = item.offset + u64::from(block) * item.stride;
        let mut last = (u64::MAX, Value::AsIs);
        for cell in &item.cells {
            if cell.entry != last.0 {
                last = (cell.entry, should(cell.entry));
            }
            let at = usize::try_from(start + cell.at).unwrap_or(usize::MAX);
            let width = usize::try_from(cell.width).unwrap_or(0);
            let Some(into) = shadow.get_mut(at..at + width) else { continue };
            match last.1 {
                Value::Of { content, position } => write_value(into, item, cell, content, position),
                Value::Zero => into.fill(0),
                Value::Keep => continue,
                Value::AsIs => {
                    if let Some(region) = self.regions.get(item.region) {
                        // Inside, as the layout was checked.
                        region.read(start + cell.at, into).unwrap_or(());
                    }
                    continue;
                }
            }
            if write && let Some(region) = self.regions.get(item.region) {
                region.write(start + cell.at, into).unwrap_or(());
            }
        }
    }

    /// Whether a block's values of one item are what they should be, of those that should be something.
    pub(crate) fn holds(&self, item: usize, block: u32, mut should: impl FnMut(u64) -> Value) -> bool {
        let Some(item) = self.places.items.get(item) else { return true };
        let Some(region) = self.regions.get(item.region) else { return true };
        let start = item.offset + u64::from(block) * item.stride;
        let (mut is, mut expected) = (Vec::new(), Vec::new());
        item.cells.iter().all(|cell| {
            let Value::Of { content, position } = should(cell.entry) else { return true };
            let width = usize::try_from(cell.width).unwrap_or(0);
            is.resize(width, 0);
            expected.resize(width, 0);
            write_value(&mut expected, item, cell, content, position);
            region.read(start + cell.at, &mut is).is_ok() && is == expected
        })
    }

    /// Overwrites a block with bytes that no request ever has.
    pub(crate) fn scribble(&mut self, place: Place, salt: u64) {
        let items = self.of_group(place.0);
        for item in items {
            self.set(item, place.1, true, |entry| Value::Of { content: hash(&[salt, 0xdead]), position: entry });
        }
    }

    /// The items of a group, as this rank counts them.
    pub(crate) fn of_group(&self, group: u32) -> Vec<usize> {
        self.places.items.iter().enumerate().filter(|(_, i)| i.group == group).map(|(at, _)| at).collect()
    }

    /// Compares all bytes with the shadow.
    pub(crate) fn check(&self) -> Option<Wrong> {
        for (at, (region, shadow)) in self.regions.iter().zip(&self.shadow).enumerate() {
            let Ok(bytes) = region.to_vec() else { continue };
            if bytes == *shadow {
                continue;
            }
            let differs = |i: &usize| bytes[*i] != shadow[*i];
            let first = (0..bytes.len()).find(differs)?;
            let count = (0..bytes.len()).filter(differs).count() as u64;
            let mut places = Vec::new();
            let id = kvferry_geometry::units::RegionId::new(u32::try_from(at).unwrap_or(u32::MAX));
            self.places.find(id, first as u64, 1, &mut places);
            let (expected, got) = (shadow[first], bytes[first]);
            let place = places.first().copied();
            return Some(Wrong { region: at, offset: first as u64, expected, got, place, count });
        }
        None
    }
}

fn write_value(into: &mut [u8], item: &ItemPlaces, cell: &Cell, content: u64, position: u64) {
    let place = Coordinate { item: item.name ^ content, token: position, head: cell.head, component: cell.part };
    for (index, bytes) in (0u64..).zip(into.chunks_mut(8)) {
        let word = pattern::word(place, index).to_le_bytes();
        bytes.copy_from_slice(&word[..bytes.len()]);
    }
}
