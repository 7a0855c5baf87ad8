//! Every byte of the consumer against what it must be.

use std::fmt;

use kvferry_geometry::units::Name;

use crate::Finding;
use crate::execute::Writes;
use crate::memory::{Memory, Stamp, StampCache};
use crate::transfer::{Fate, Known, Transfer};
use crate::walk::{Cell, Coordinate, walk};

/// Every byte is right.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Verdict {
    /// Bytes that arrived.
    pub moved: u64,
    /// Bytes that were zeroed.
    pub zeroed: u64,
    /// Bytes that stayed as they were.
    pub untouched: u64,
}

/// What is wrong at the consumer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Bytes that must have arrived or become zero, with another value.
    pub wrong: u64,
    /// Bytes that must not have been touched, with another value.
    pub outside: u64,
    /// Bytes with the right value that were written more or less often than once, or written though not to be touched.
    pub miscounted: u64,
    /// The first of them.
    pub first: Mismatch,
}

/// One wrong byte.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mismatch {
    /// The transfer could not be walked.
    Broken(Finding),
    /// A byte of a coordinate.
    Coordinate {
        /// The item.
        item: Name,
        /// The consumer's rank.
        rank: usize,
        /// The component or part.
        component: Name,
        /// First token and heads that the value stands for, or position, row and unit of a state.
        coordinate: Coordinate,
        /// The byte of the value.
        byte: u64,
        /// What must have happened to it.
        fate: Fate,
        /// Its place.
        place: (usize, u64),
        /// The value it must have.
        expected: u8,
        /// The value it has.
        got: u8,
        /// How often it was moved to, and zeroed.
        writes: (u8, u8),
        /// What the value found there is.
        origin: String,
    },
    /// A byte that belongs to no coordinate of the request.
    Unowned {
        /// The consumer's rank.
        rank: usize,
        /// Region and byte.
        place: (usize, u64),
        /// The value it must have.
        expected: u8,
        /// The value it has.
        got: u8,
        /// How often it was moved to, and zeroed.
        writes: (u8, u8),
        /// What the value found there is.
        origin: String,
    },
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes wrong, {} touched outside, {} not written exactly once; the first: {}",
            self.wrong, self.outside, self.miscounted, self.first
        )
    }
}
impl std::error::Error for Report {}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broken(e) => write!(f, "{e}"),
            Self::Coordinate {
                item,
                rank,
                component,
                coordinate,
                byte,
                fate,
                place,
                expected,
                got,
                writes,
                origin,
            } => write!(
                f,
                "item {item}, rank {rank}, {}, component {component}, byte {byte} (region {}, byte {}), to be {}: \
                 expected {expected}, got {got} after {} moves and {} zeroings, which is {origin}",
                words(*coordinate),
                place.0,
                place.1,
                match fate {
                    Fate::Untouched => "left alone",
                    Fate::Moved => "moved",
                    Fate::Zeroed => "zeroed",
                },
                writes.0,
                writes.1,
            ),
            Self::Unowned { rank, place, expected, got, writes, origin } => write!(
                f,
                "rank {rank}, region {}, byte {}, of no coordinate of the request: expected {expected}, got {got} after \
                 {} moves and {} zeroings, which is {origin}",
                place.0, place.1, writes.0, writes.1
            ),
        }
    }
}

pub(crate) fn compare(transfer: &Transfer<'_>, got: &Memory, writes: &Writes) -> Result<Verdict, Box<Report>> {
    let broken = |e| Box::new(Report { wrong: 0, outside: 0, miscounted: 0, first: Mismatch::Broken(e) });
    let (expected, fates) = expected_destination(transfer).map_err(broken)?;
    let mut verdict = Verdict::default();
    let (mut wrong, mut outside, mut miscounted, mut first) = (0, 0, 0, None);
    for (rank, regions) in expected.ranks.iter().enumerate() {
        for (region, bytes) in regions.iter().enumerate() {
            for (i, &byte) in bytes.iter().enumerate() {
                let fate = fates.ranks[rank][region][i];
                let is = got.ranks[rank][region][i];
                let times = (writes.moves.ranks[rank][region][i], writes.zeros.ranks[rank][region][i]);
                let count = match fate {
                    MOVED => &mut verdict.moved,
                    ZEROED => &mut verdict.zeroed,
                    _ => &mut verdict.untouched,
                };
                *count += 1;
                let fault = match (is == byte, fate, times) {
                    (true, UNTOUCHED, (0, 0)) | (true, MOVED, (1, 0)) | (true, ZEROED, (0, 1)) => continue,
                    // A whole tail is zero at the producer, so that zeroing it again is no harm.
                    (true, MOVED, (1, 1)) if byte == 0 => continue,
                    (true, ..) => &mut miscounted,
                    (false, UNTOUCHED, _) => &mut outside,
                    (false, ..) => &mut wrong,
                };
                *fault += 1;
                first.get_or_insert((rank, region, i as u64));
            }
        }
    }
    let Some((rank, region, offset)) = first else { return Ok(verdict) };
    let first = describe(transfer, got, writes, &expected, rank, region, offset);
    Err(Box::new(Report { wrong, outside, miscounted, first }))
}

const UNTOUCHED: u8 = 0;
const MOVED: u8 = 1;
const ZEROED: u8 = 2;

/// The consumer's memory as it must be, and the fate of each of its bytes.
fn expected_destination(transfer: &Transfer<'_>) -> Result<(Memory, Memory), Finding> {
    let manifest = transfer.dst;
    let mut memory = Memory::background(manifest);
    let mut marks = Memory::zero(manifest);
    for (item, spec) in manifest.spec().items().iter().enumerate() {
        let fates = transfer.fates(item)?;
        let src_item = transfer.src_item(&spec.name);
        let listed = transfer.dst_listed(item)?;
        for rank in 0..manifest.ranks().len() {
            let mut failed = None;
            let mut stamps = StampCache::default();
            walk(manifest, rank, item, listed, |cell| {
                let mark = match fates.of(&cell) {
                    Fate::Untouched => return,
                    Fate::Moved => MOVED,
                    Fate::Zeroed => ZEROED,
                };
                let written = marks.cell_mut(rank, &cell).and_then(|marks| {
                    if marks.iter().any(|&m| m != UNTOUCHED) {
                        return Err(Finding::Shared { rank, region: cell.region, offset: cell.offset });
                    }
                    marks.fill(mark);
                    let bytes = memory.cell_mut(rank, &cell)?;
                    // Past the held tokens of a frozen block the producer has zeros.
                    let known = src_item.map_or(Ok(Known::Nothing), |src| transfer.known(src, &cell))?;
                    if mark == MOVED && known == Known::Held {
                        stamps.of(&cell).write(cell.coordinate, cell.byte, bytes);
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
    Ok((memory, marks))
}

/// Finds the coordinate of a byte, and what the value found there is.
fn describe(
    transfer: &Transfer<'_>,
    got: &Memory,
    writes: &Writes,
    expected: &Memory,
    rank: usize,
    region: usize,
    offset: u64,
) -> Mismatch {
    let value = |m: &Memory| m.bytes(rank, region, offset, 1).map_or(0, |b| b[0]);
    let (expected, is, writes) = (value(expected), value(got), (value(&writes.moves), value(&writes.zeros)));
    let place = (region, offset);
    let mut found = None;
    for item in 0..transfer.dst.spec().items().len() {
        let (Ok(fates), Ok(listed)) = (transfer.fates(item), transfer.dst_listed(item)) else { continue };
        walk(transfer.dst, rank, item, listed, |cell| {
            let inside = cell.region == region && cell.offset <= offset && offset < cell.offset + cell.width;
            let fate = fates.of(&cell);
            // Where groups share memory, the coordinate that is to be written is the byte's owner.
            if inside && (found.is_none() || fate != Fate::Untouched) {
                found = Some((cell, fate));
            }
        });
    }
    let Some((cell, fate)) = found else {
        let origin = origin(transfer, is, None);
        return Mismatch::Unowned { rank, place, expected, got: is, writes, origin };
    };
    let bytes = got.bytes(rank, region, cell.offset, cell.width).unwrap_or(&[]);
    Mismatch::Coordinate {
        item: cell.item.clone(),
        rank,
        component: cell.component.clone(),
        coordinate: cell.coordinate,
        byte: cell.byte + offset - cell.offset,
        fate,
        place,
        expected,
        got: is,
        writes,
        origin: origin(transfer, is, Some((&cell, bytes))),
    }
}

fn origin(transfer: &Transfer<'_>, value: u8, cell: Option<(&Cell<'_>, &[u8])>) -> String {
    match value {
        0 => "zero".into(),
        128..=191 => "a byte that the producer never computed".into(),
        192.. => "what was there before".into(),
        _ => cell
            .and_then(|(cell, bytes)| nearest(transfer, cell, bytes))
            .unwrap_or_else(|| "a held byte, of no coordinate near by".into()),
    }
}

/// The coordinate whose bytes lie in a cell, nearest first: the same item, then others; then by tokens, rows and heads apart.
fn nearest(transfer: &Transfer<'_>, cell: &Cell<'_>, bytes: &[u8]) -> Option<String> {
    let mut best: Option<((bool, u64, u32, u32), String)> = None;
    for (index, item) in transfer.src.spec().items().iter().enumerate() {
        let mut try_all = |component: &Name, width: u64, coordinates: Vec<Coordinate>| {
            let stamp = Stamp::new(&item.name, component);
            for at in coordinates {
                let mut held = vec![0; bytes.len().min(usize::try_from(width).unwrap_or(usize::MAX))];
                stamp.write(at, cell.byte, &mut held);
                if !bytes.starts_with(&held) {
                    continue;
                }
                let own = cell.coordinate;
                let apart = (
                    item.name != *cell.item,
                    at.token.abs_diff(own.token),
                    at.row.abs_diff(own.row),
                    at.heads.0.abs_diff(own.heads.0),
                );
                if best.as_ref().is_none_or(|b| apart < b.0) {
                    best = Some((apart, format!("item {}, {}, component {component}", item.name, words(at))));
                }
            }
        };
        let own = cell.coordinate;
        if let Some(paged) = item.as_paged() {
            for component in &paged.components {
                let heads = (0..paged.heads).map(|h| (h, h + 1)).chain([own.heads]);
                let tokens = own.token.saturating_sub(512)..own.token + 512;
                let all = heads.flat_map(|heads| tokens.clone().map(move |token| Coordinate { token, row: 0, heads }));
                try_all(&component.name, component.width.get(), all.collect());
            }
        }
        if let (Some(state), Ok(listed)) = (item.as_state(), transfer.src_listed(index)) {
            for part in &state.parts {
                let of_row = |token, row| (0..part.units).map(move |u| Coordinate { token, row, heads: (u, u + 1) });
                let of_state = |&(token, _): &(u64, u32)| (0..part.rows).flat_map(move |row| of_row(token, row));
                try_all(&part.name, part.width.get(), listed.states.iter().flat_map(of_state).collect());
            }
        }
    }
    best.map(|b| b.1)
}

/// A coordinate in words.
fn words(at: Coordinate) -> String {
    let Coordinate { token, row, heads } = at;
    let heads = if heads.1 == heads.0 + 1 { format!("{}", heads.0) } else { format!("{} to {}", heads.0, heads.1 - 1) };
    let row = if row == 0 { String::new() } else { format!(", row {row}") };
    format!("token {token}{row}, head {heads}")
}
