//! Every byte of the consumer against what it must be.

use std::fmt;

use kvferry_geometry::units::Name;

use crate::execute::Writes;
use crate::memory::{Memory, Stamp, StampCache};
use crate::transfer::{Fate, Transfer};
use crate::walk::{Cell, walk};
use crate::{Finding, at};

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
        /// The token.
        token: u64,
        /// The head.
        head: u32,
        /// The component.
        component: Name,
        /// The byte of the component.
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
                token,
                head,
                component,
                byte,
                fate,
                place,
                expected,
                got,
                writes,
                origin,
            } => write!(
                f,
                "item {item}, rank {rank}, token {token}, head {head}, component {component}, byte {byte} (region {}, \
                 byte {}), to be {}: expected {expected}, got {got} after {} moves and {} zeroings, which is {origin}",
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
        // Tokens past the held ones of a frozen block are zero at the producer.
        let held_end = transfer.src_table(transfer.src_item(&spec.name)?)?.held.end;
        for rank in 0..manifest.ranks().len() {
            let mut failed = None;
            let mut stamps = StampCache::default();
            walk(manifest, rank, item, &transfer.dst_table(item)?.table, |cell| {
                let mark = match fates[at(cell.token)] {
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
                    if mark == MOVED && cell.token < held_end {
                        stamps.of(&cell).write(cell.token, cell.head, bytes);
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
        let (Ok(fates), Ok(table)) = (transfer.fates(item), transfer.dst_table(item)) else { continue };
        walk(transfer.dst, rank, item, &table.table, |cell| {
            let inside = cell.region == region && cell.offset <= offset && offset < cell.offset + cell.width;
            let fate = fates[at(cell.token)];
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
        token: cell.token,
        head: cell.head,
        component: cell.component.clone(),
        byte: offset - cell.offset,
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

/// The coordinate whose bytes lie in a cell, nearest first: the same item, then others; then by tokens and heads apart.
fn nearest(transfer: &Transfer<'_>, cell: &Cell<'_>, bytes: &[u8]) -> Option<String> {
    let mut best: Option<((bool, u64, u32), String)> = None;
    for item in transfer.src.spec().items() {
        let Some(paged) = item.as_paged() else { continue };
        for component in &paged.components {
            let stamp = Stamp::new(&item.name, &component.name);
            for head in 0..paged.heads {
                for token in cell.token.saturating_sub(512)..cell.token + 512 {
                    let mut held = vec![0; bytes.len().min(at(component.width.get()))];
                    stamp.write(token, head, &mut held);
                    if !bytes.starts_with(&held) {
                        continue;
                    }
                    let apart = (item.name != *cell.item, token.abs_diff(cell.token), head.abs_diff(cell.head));
                    if best.as_ref().is_none_or(|b| apart < b.0) {
                        let (item, component) = (&item.name, &component.name);
                        let text = format!("item {item}, token {token}, head {head}, component {component}");
                        best = Some((apart, text));
                    }
                }
            }
        }
    }
    best.map(|b| b.1)
}
